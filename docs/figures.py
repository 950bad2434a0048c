"""Draw the figures of the technique pages: `docs/_static/techniques/NAME-light.svg` and `NAME-dark.svg`.

    python docs/figures.py            # all figures
    python docs/figures.py dino mae   # two of them

The figures are committed, so a build of the site does not draw them. Drawing needs MNIST and takes some minutes the first time:
it trains a few small models into `runs/figures`, where they are kept. Token maps and learning curves come from the committed
records. Each function `draw_NAME(style)` draws one figure with the technique itself.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from smallvit import PatchEmbed, SequencePool, fit, load, mnist
from smallvit.recipe import find_recipe, load_recipe

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "_static" / "techniques"
RUNS = ROOT / "runs" / "figures"


# ---------------------------------------------------------------------------------------------------------------- models


@cache
def recipe_run(recipe: str, arm: str, labels: int | None = 1_000) -> Any:
    """Return the run of one arm of a recipe at one number of labels, with seed 0."""
    runs = load_recipe(find_recipe(str(ROOT / "recipes" / f"{recipe}.py"))).RUNS
    return next(entry.run for entry in runs if (entry.arm, entry.labels, entry.seed) == (arm, labels, 0))


def model_runs() -> dict[str, Any]:
    """Return the runs of the trained models that figures show, by name. They are arms of the recipes, with seed 0."""
    grid_of_7 = {"tokenizer": partial(PatchEmbed, patch=4), "steps": 600}  # 49 patches, for finer pictures than 16
    learned = recipe_run("explain", "learned").vary(**grid_of_7)
    return {
        "LSA off": recipe_run("spt_lsa", "scratch"),
        "LSA": recipe_run("spt_lsa", "+LSA"),
        "conv stem": recipe_run("spt_lsa", "convolutional stem"),
        "positions": learned,
        "positions from 0.02": recipe_run("explain", "learned from 0.02").vary(**grid_of_7),
        "sequence pool": learned.vary(pool=SequencePool),
        "cnn": recipe_run("distill", "distilled from a CNN").teacher,
    }


@cache
def trained(name: str) -> Any:
    """Return a trained model in evaluation mode. It is trained at the first call and then kept in `runs/figures`."""
    folder = RUNS / name.replace(" ", "-")
    fit(model_runs()[name], folder)
    return load(folder).model


@cache
def trained_mae() -> Any:
    """Return a trained `MAE` objective: encoder and decoder. A run keeps the encoder only, so the whole is kept here."""
    from smallvit.train.loop import Training

    run = recipe_run("mae", "MAE on all digits").init
    data = run.data()
    training = Training(run, data, data.subset(labels=run.labels, val=run.val, seed=run.seed), "cpu")
    path = RUNS / "mae.pt"
    if path.exists():
        training.objective.load_state_dict(torch.load(path, weights_only=True))
    else:
        training.objective.train()
        while training.step < run.steps:
            training.train_step()
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(training.objective.state_dict(), path)
    return training.objective.eval()


# --------------------------------------------------------------------------------------------------------------- drawing


@dataclass(frozen=True)
class Style:
    """The colors of a figure: text, faint lines, and the two accents, on a transparent background."""

    ink: str
    faint: str
    accent: str
    second: str


LIGHT = Style(ink="#24292f", faint="#c3c9d0", accent="#c25700", second="#4f46d6")
DARK = Style(ink="#d6dbe1", faint="#555c66", accent="#ff9f45", second="#9a94ff")
PANEL = 1.05  # inches: side of an image
DIGITS = (7, 15, 5, 0)  # training images of MNIST that most figures show: 3, 7, 2, 5


@cache
def digits(indices: Sequence[int] = DIGITS) -> Any:
    """Return training images of MNIST with these indices, as `Images`."""
    return mnist().train.take(torch.tensor(indices))


def grid(rows: int, columns: int, width: float = PANEL, height: float = PANEL, gap: float = 0.03) -> tuple[Figure, Any]:
    """Return a figure with rows x columns panels of this size in inches, without ticks and frames, and its axes."""
    figure = Figure(figsize=((width + 0.12) * columns, (height + 0.1) * rows + 0.3), layout="constrained")
    figure.get_layout_engine().set(w_pad=gap, h_pad=gap, wspace=0.02, hspace=0.02)
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    return figure, axes


def show(ax: Axes, image: Any, title: str = "", **options: Any):
    """Draw an image (h, w) with a title above it; gray from 0 to 1 unless options say otherwise."""
    ax.imshow(np.asarray(image), **{"cmap": "gray", "vmin": 0, "vmax": 1, "interpolation": "none"} | options)
    ax.set_title(title, fontsize=9)


def row_title(ax: Axes, text: str, style: Style):
    """Write a title to the left of a row of panels."""
    ax.text(-0.08, 0.5, text, transform=ax.transAxes, ha="right", va="center", fontsize=9, color=style.ink)


def box(ax: Axes, top: float, left: float, height: float, width: float, color: str, **options: Any):
    """Outline a rectangle of pixels; it begins with the pixel (top, left)."""
    from matplotlib.patches import Rectangle

    options = {"linewidth": 1.6, "fill": False, "edgecolor": color} | options
    ax.add_patch(Rectangle((left - 0.5, top - 0.5), width, height, clip_on=False, **options))


def frame_axes(ax: Axes, style: Style):
    """Give a plot ticks and two thin axes in the color of the text."""
    ax.set_axis_on()
    ax.tick_params(colors=style.ink, labelsize=8, length=2)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(style.faint)


def draw_shifted_patches(style: Style) -> Figure:
    """The image and its four shifted copies; below, the five patches of one token."""
    from smallvit import ShiftedPatchEmbed

    patch, row, column = 7, 1, 2
    tokenizer = ShiftedPatchEmbed((28, 28), 1, 8, patch=patch)
    copies = tokenizer.shifted(digits().pixels()[2:3])[0]
    figure, axes = grid(2, 5)
    titles = ["image", "shifted\ndown-right", "shifted\ndown-left", "shifted\nup-right", "shifted\nup-left"]
    top, left = row * patch, column * patch
    for ax, image, title in zip(axes[0], copies, titles):
        show(ax, image, title)
        for line in range(patch, 28, patch):
            ax.axhline(line - 0.5, color=style.faint, linewidth=0.5)
            ax.axvline(line - 0.5, color=style.faint, linewidth=0.5)
        box(ax, top, left, patch, patch, style.accent)
    for ax, image in zip(axes[1], copies):
        show(ax, image[top : top + patch, left : left + patch])
        box(ax, 0, 0, patch, patch, style.accent)
    row_title(axes[1, 0], "one token\nsees", style)
    return figure


def draw_locality_attention(style: Style) -> Figure:
    """The mean attention map of each block with `Attention` and `LocalityAttention`, over 500 images; models of `spt_lsa`."""
    from smallvit import attention_maps

    x = mnist().spec.normalize(mnist().train.take(slice(500)).pixels())
    figure, axes = grid(2, 4, 1.4, 1.4)
    for line, name, title in ((axes[0], "LSA off", "Attention"), (axes[1], "LSA", "Locality-\nAttention")):
        for block, (ax, weights) in enumerate(zip(line, attention_maps(trained(name), x))):
            mean = weights.mean((0, 1))
            show(ax, mean, "" if name == "LSA" else f"block {block}", cmap="magma", vmax=0.25)
            text = f"to itself: {100 * mean.diagonal().mean():.0f}%"
            ax.text(0.5, -0.03, text, transform=ax.transAxes, ha="center", va="top", fontsize=8, color=style.ink)
        row_title(line[0], title, style)
    return figure


def receptive_field(tokenizer: Any, row: int, column: int) -> tuple[int, int, int, int]:
    """Return which pixels of a 28 x 28 image change one token, from the gradient: top, left, height, width."""
    from torch import nn

    for name, module in list(tokenizer.named_modules()):
        if isinstance(module, nn.GroupNorm):  # through its statistics every token depends a little on the whole image
            parent, _, last = name.rpartition(".")
            setattr(tokenizer.get_submodule(parent), last, nn.Identity())
        if isinstance(module, nn.ReLU):
            parent, _, last = name.rpartition(".")
            setattr(tokenizer.get_submodule(parent), last, nn.Identity())
    rows, columns = tokenizer.grid((28, 28))
    seen = torch.zeros(28, 28)
    for seed in range(8):  # max-pooling passes the gradient to one pixel only, so several images are needed
        x = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        tokenizer(x)[0].unflatten(0, (rows, columns))[row, column].square().sum().backward()
        seen += x.grad[0, 0].abs()
    ys, xs = seen.nonzero().T
    return int(ys.min()), int(xs.min()), int(ys.max() - ys.min() + 1), int(xs.max() - xs.min() + 1)


def draw_conv_stem(style: Style) -> Figure:
    """The pixels that one token sees with four tokenizers; below, the feature maps of a trained convolutional stem."""
    from smallvit import ConvStem, ConvTokenizer, ShiftedPatchEmbed

    torch.manual_seed(0)
    image = digits().pixels()[0, 0]
    figure, axes = grid(2, 4, 1.4, 1.4)
    tokenizers = {
        "PatchEmbed\npatch=7": partial(PatchEmbed, patch=7),
        "ShiftedPatchEmbed\npatch=7": partial(ShiftedPatchEmbed, patch=7, norm=False),
        "ConvStem\nlayers=3": partial(ConvStem, layers=3),
        "ConvTokenizer\nlayers=3": partial(ConvTokenizer, layers=3),
    }
    for ax, (title, make) in zip(axes[0], tokenizers.items()):
        tokenizer = make((28, 28), 1, 8)
        rows, columns = tokenizer.grid((28, 28))
        show(ax, image, f"{title}\n{rows} x {columns} tokens")
        for line in range(1, rows):
            ax.axhline(28 * line / rows - 0.5, color=style.faint, linewidth=0.5)
            ax.axvline(28 * line / rows - 0.5, color=style.faint, linewidth=0.5)
        box(ax, *receptive_field(tokenizer, 1, 2), style.accent)
    stem: Any = trained("conv stem").tokenizer
    x = mnist().spec.normalize(digits().pixels()[:1])
    show(axes[1, 0], image, "image\n28 x 28")
    layers = list(stem.layers)
    for ax, layer in zip(axes[1, 1:], range(3)):
        with torch.no_grad():
            for module in layers[3 * layer : 3 * layer + 3]:
                x = module(x)
        strongest = x[0].flatten(1).std(1).argsort(descending=True)[:4].sort().values
        side = x.shape[-1]
        maps = [x[0, index] / x[0, index].max().clamp_min(1e-6) for index in strongest]
        page = np.full((2 * side + 1, 2 * side + 1), np.nan)
        for index, one in enumerate(maps):
            top, left = (index // 2) * (side + 1), (index % 2) * (side + 1)
            page[top : top + side, left : left + side] = one
        show(ax, page, f"layer {layer + 1}\n4 of {x.shape[1]}, {side} x {side}", cmap="magma")
    row_title(axes[0, 0], "what one\ntoken sees", style)
    row_title(axes[1, 0], "feature maps\nof ConvStem", style)
    return figure


def draw_positions(style: Style) -> Figure:
    """How similar the position of one patch is to all others (cosine), for six kinds of positions on a 7 x 7 grid."""
    from smallvit import SinCos1d, SinCos2d
    from smallvit.explain.plots import position_embeddings

    def fixed(make: Callable) -> np.ndarray:
        return make(64, (7, 7), 1).table.numpy()

    paper = partial(SinCos2d, centered=False, amplitude=1.0)
    tables = {
        "Learned\nfrom N(0, 1)": position_embeddings(trained("positions"), None)[0],
        "Learned\nfrom 0.02": position_embeddings(trained("positions from 0.02"), None)[0],
        "SinCos1d\n10,000": fixed(SinCos1d),
        "SinCos2d\n10,000": fixed(partial(paper, temperature=10_000)),
        "SinCos2d\n100": fixed(partial(paper, temperature=100)),
        "SinCos2d\n10": fixed(partial(paper, temperature=10)),
    }
    figure, axes = grid(2, len(tables), 1.12, 1.12)
    for column, (title, table) in enumerate(tables.items()):
        unit = table / np.linalg.norm(table, axis=-1, keepdims=True)
        cosine = (unit @ unit.T).reshape(7, 7, 7, 7)
        for ax, (row, place) in zip(axes[:, column], ((3, 3), (1, 5))):
            drawn = ax.imshow(cosine[row, place], cmap="viridis", vmin=0, vmax=1, interpolation="none")
            box(ax, row, place, 1, 1, style.accent)
        axes[0, column].set_title(title, fontsize=9)
    for ax, title in zip(axes[:, 0], ("patch in\nthe middle", "patch near\na corner")):
        row_title(ax, title, style)
    bar: Any = figure.colorbar(drawn, ax=axes, shrink=0.7, aspect=14, ticks=[0, 0.5, 1])
    bar.set_label("cosine", color=style.ink, fontsize=9)
    bar.ax.tick_params(colors=style.ink, labelsize=8, length=2)
    bar.outline.set_visible(False)
    return figure


def draw_pooling(style: Style) -> Figure:
    """The weight of each patch in the feature, for three pools. The models are trained."""
    from smallvit import patch_attention

    images = digits()
    x = mnist().spec.normalize(images.pixels())
    attention = patch_attention(trained("positions"), x).mean(1)
    pooled: Any = trained("sequence pool")
    with torch.no_grad():
        tokens, _ = pooled.tokens(x)
        weights = pooled.pool.score(tokens[:, len(pooled.prefix) :]).softmax(1)[..., 0].unflatten(1, (7, 7))
    rows = {
        "ClassToken": attention / attention.sum((1, 2), keepdim=True),
        "MeanTokens": torch.full_like(weights, 1 / 49),
        "SequencePool": weights,
    }
    figure, axes = grid(4, len(images), 1.05, 0.82)
    for ax, image in zip(axes[0], images.pixels()[:, 0]):
        show(ax, image)
    row_title(axes[0, 0], "image", style)
    for line, (title, maps) in zip(axes[1:], rows.items()):
        for ax, one in zip(line, maps):
            show(ax, one, cmap="magma", vmin=0, vmax=0.12)
        row_title(line[0], title, style)
    bar: Any = figure.colorbar(axes[1, 0].images[0], ax=axes, shrink=0.6, aspect=18, extend="max", ticks=[0, 0.04, 0.08, 0.12])
    bar.ax.set_yticklabels(["0", "4%", "8%", "12%"])
    bar.set_label("weight of a patch", color=style.ink, fontsize=9)
    bar.ax.tick_params(colors=style.ink, labelsize=8, length=2)
    bar.outline.set_visible(False)
    return figure


def token_maps(arm: str, style: Style) -> Figure:
    """The token map that is stored in the committed records of `tokens`: what an arm does to three test images."""
    from smallvit.explain import draw_token_map
    from smallvit.record import read_records

    records = read_records(ROOT / "recipes" / "tokens.jsonl")
    picture: Any = next(record.picture for record in records if record.arm == arm and record.picture)
    figure = draw_token_map(picture)
    figure.set_size_inches(figure.get_size_inches() * 0.95)
    return figure


def draw_token_merging(style: Style) -> Figure:
    """ToMe on trained models: see `token_maps`."""
    return token_maps("49 tokens, ToMe, as long again", style)


def draw_token_pruning(style: Style) -> Figure:
    """EViT on trained models: see `token_maps`."""
    return token_maps("49 tokens, EViT, as long again", style)


def draw_learned_pruning(style: Style) -> Figure:
    """DynamicViT on trained models: see `token_maps`."""
    return token_maps("49 tokens, DynamicViT, as long again", style)


def draw_learned_thresholds(style: Style) -> Figure:
    """LTMP on trained models: see `token_maps`."""
    return token_maps("49 tokens, LTMP, as long again", style)


def draw_dino(style: Style) -> Figure:
    """The views of three images: two global views for teacher and student, four local views for the student only."""
    from smallvit import augment

    images = digits((7, 15, 5))
    batch = augment.Batch(images.pixels(), images.targets())
    batch = augment.apply(augment.digit_crops(), batch, torch.Generator().manual_seed(1))
    big, small = (views.unflatten(0, (-1, len(images)))[:, :, 0] for views in batch.views)
    figure, axes = grid(len(images), 7, 0.95, 0.95)
    for index, line in enumerate(axes):
        show(line[0], images.pixels()[index, 0], "" if index else "image\n")
        for number, ax in enumerate(line[1:3]):
            show(ax, big[number, index], "" if index else f"global view {number + 1}\n28 x 28")
            box(ax, 0, 0, 28, 28, style.accent)
        for number, ax in enumerate(line[3:]):
            show(ax, small[number, index], "" if index else f"local view {number + 1}\n16 x 16")
            ax.set_xlim(-6.5, 21.5)
            ax.set_ylim(21.5, -6.5)
            box(ax, 0, 0, 16, 16, style.second)
    return figure


def draw_mae(style: Style) -> Figure:
    """Images, their visible patches and the reconstructions of a trained masked autoencoder, for two masks."""
    mae = trained_mae()
    images = digits((7, 15, 5))
    spec = mnist().spec
    x = spec.normalize(images.pixels())
    figure, axes = grid(len(images), 5, 1.05, 1.05)
    for part, seed in enumerate((0, 1)):
        result = mae.reconstruct(x, seed=seed)
        predicted = result.predicted * spec.std[0] + spec.mean[0]
        for index, line in enumerate(axes):
            title = "" if index else ("image", "visible\npatches", "recon-\nstructed")
            if not part:
                show(line[0], images.pixels()[index, 0], title and f"{title[0]}\n")
            hidden = result.mask[index, 0].numpy()
            visible = np.stack([images.pixels()[index, 0].numpy()] * 3, -1)
            visible[hidden] = matplotlib.colors.to_rgb(style.faint)
            line[1 + 2 * part].imshow(visible, interpolation="none")
            line[1 + 2 * part].set_title(title and title[1], fontsize=9)
            show(line[2 + 2 * part], predicted[index, 0].clamp(0, 1), title and title[2])
    return figure


def draw_distillation(style: Style) -> Figure:
    """The label of four validation images, and the teacher's probabilities: one easy image, and the three least certain."""
    run = model_runs()["cnn"]
    data = run.data()
    images = data.subset(labels=run.labels, val=run.val, seed=run.seed).val
    teacher = trained("cnn")
    with torch.no_grad():
        logits = teacher(data.spec.normalize(images.pixels()))
    certainty = logits.softmax(-1).amax(-1).argsort(stable=True)
    chosen = torch.cat([certainty[-1:], certainty[:3]])
    rows = {
        "label": images.targets()[chosen],
        "teacher": logits[chosen].softmax(-1),
        "teacher,\ntemperature 3": (logits[chosen] / 3).softmax(-1),
    }
    figure, axes = grid(4, len(chosen), 1.35, 0.8)
    for ax, image in zip(axes[0], images.pixels()[chosen, 0]):
        show(ax, image)
    for line, (title, targets) in zip(axes[1:], rows.items()):
        for ax, values in zip(line, targets):
            frame_axes(ax, style)
            ax.bar(range(10), values, color=style.accent if title == "label" else style.second)
            ax.set_ylim(0, 1)
            ax.set_yticks([])
            ax.set_xticks(range(10) if title.startswith("teacher,") else [])
            ax.tick_params(length=0)
            ax.spines["left"].set_visible(False)
        row_title(line[0], title, style)
    return figure


def draw_label_spreading(style: Style) -> Figure:
    """Ten labels spread over 300 of scikit-learn's digits; two dimensions by t-SNE."""
    from sklearn.manifold import TSNE

    from smallvit import Pixels, label_spreading
    from smallvit import digits as small_digits

    data = small_digits()
    train = data.subset(labels=None, val=0, seed=0).train.take(slice(300))
    first = torch.stack([(train.labels == k).nonzero()[0, 0] for k in range(10)])
    others = torch.ones(len(train), dtype=torch.bool).index_fill(0, first, False)
    labelled, unlabelled = train.take(first), train.take(others.nonzero()[:, 0])
    model = Pixels(data.spec.size, data.spec.channels, 10)
    found = label_spreading(model, labelled, unlabelled, neighbors=10)
    guesses = train.labels.clone().index_fill(0, first, 0)
    guesses[others] = found
    guesses[first] = labelled.labels
    place = TSNE(random_state=0, init="pca", perplexity=20).fit_transform(train.pixels().flatten(1).numpy())
    colors = np.array(matplotlib.colormaps["tab10"].colors)
    figure, axes = grid(1, 3, 2.4, 2.4)
    wrong = (guesses != train.labels).numpy()
    accuracy = 1 - wrong[others.numpy()].mean()
    for ax, title in zip(axes[0], ("10 labels", "spread labels", f"errors ({accuracy:.0%} right)")):
        ax.set_title(title, fontsize=9)
        options = {"s": 9, "linewidths": 0, "rasterized": True}
        if title == "spread labels":
            ax.scatter(*place.T, color=colors[guesses], **options)
        else:
            ax.scatter(*place.T, color=style.faint, **options)
        if title.startswith("errors"):
            ax.scatter(*place[wrong].T, color=style.accent, **options | {"s": 22, "marker": "x", "linewidths": 1.2})
        else:
            ax.scatter(*place[first].T, color=colors, **options | {"s": 60, "linewidths": 1, "edgecolors": style.ink})
    return figure


def draw_augmentation(style: Style) -> Figure:
    """Six images and what each transform makes of them."""
    from smallvit import augment

    images = digits((7, 15, 5, 0, 2, 13))
    deformation = augment.digits()[0]
    rows = {
        "image": (),
        "affine": (augment.Warp(rotate=15, scale=0.15, shear=12, shift=0.07),),
        "elastic": (augment.Warp(elastic=deformation.elastic),),
        "digits()": augment.digits(),
        "StrokeWidth": (augment.StrokeWidth(width=0.06, probability=1.0),),
        "RandomErasing": (augment.RandomErasing(probability=1.0),),
        "Mixup": (augment.Mixup(),),
    }
    figure, axes = grid(len(rows), len(images), 0.85, 0.85)
    for line, (title, transforms) in zip(axes, rows.items()):
        batch = augment.Batch(images.pixels(), images.targets())
        batch = augment.apply(transforms, batch, torch.Generator().manual_seed(8))
        for ax, image, target in zip(line, batch.images[:, 0], batch.targets):
            show(ax, image)
            parts = sorted(((share, k) for k, share in enumerate(target.tolist()) if share > 0.005), reverse=True)
            text = ", ".join(f"{100 * share:.0f}% {k}" for share, k in parts) if len(parts) > 1 else ""
            ax.text(0.5, -0.04, text, transform=ax.transAxes, ha="center", va="top", fontsize=6.5, color=style.ink)
        row_title(line[0], title, style)
    return figure


def curves(arm: str, seed: int = 0, labels: int = 100) -> np.ndarray:
    """Return the validation curve of a run of `regularize`: rows of (step, accuracy), from the committed records."""
    from smallvit.record import read_records

    for record in read_records(ROOT / "recipes" / "regularize.jsonl"):
        if (record.arm, record.seed, record.labels) == (arm, seed, labels):
            return np.array([(step, 100 * accuracy) for step, _, accuracy in record.curve])
    raise ValueError(f"regularize has no run of {arm!r} with seed {seed}")


def draw_regularization(style: Style) -> Figure:
    """Dropout and stochastic depth as masks; early stopping and the EMA as curves of the committed records."""
    from smallvit.vit import DropPath, drop_path_rates

    figure, axes = grid(2, 2, 2.9, 1.7, gap=0.08)
    axes = axes.flat
    torch.manual_seed(0)
    dropped = torch.nn.Dropout(0.1)(torch.ones(17, 32)) > 0
    show(axes[0], dropped, "dropout=0.1: 17 tokens, 32 channels", cmap="cividis", aspect="auto")
    kept = [DropPath(rate).train()(torch.ones(24, 1, 1))[:, 0, 0] > 0 for rate in drop_path_rates(0.3, 6) for _ in range(2)]
    show(axes[1], torch.stack(kept, dim=1), "drop_path=0.3: 24 images, 12 branches", cmap="cividis", aspect="auto")
    stopped, plain = curves("early stopping"), curves("plain ViT")
    for ax, title in ((axes[2], "early_stop=3"), (axes[3], "ema=0.2")):
        frame_axes(ax, style)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("step", fontsize=8)
        ax.set_ylabel("validation accuracy, %", fontsize=8)
    axes[2].plot(*plain.T, color=style.faint, linewidth=1.5)
    axes[2].plot(*stopped.T, color=style.accent, linewidth=1.8)
    best = stopped[:, 1].argmax()
    axes[2].plot(*stopped[best], "o", color=style.accent)
    axes[2].annotate("kept", stopped[best], (0, 6), textcoords="offset points", ha="center", fontsize=8, color=style.ink)
    axes[3].plot(*plain.T, color=style.faint, linewidth=1.5, label="weights")
    axes[3].plot(*curves("weight averaging").T, color=style.accent, linewidth=1.8, label="average")
    axes[3].legend(frameon=False, fontsize=8, labelcolor=style.ink, loc="lower right")
    return figure


# ---------------------------------------------------------------------------------------------------------------- saving


def svg(draw: Callable[[Style], Figure], style: Style) -> str:
    """Draw a figure and return it as SVG with a transparent background; text stays text."""
    settings = {
        "svg.fonttype": "none", "svg.hashsalt": "techniques", "text.color": style.ink, "axes.labelcolor": style.ink,
        "axes.titlecolor": style.ink, "savefig.facecolor": "none", "image.composite_image": False, "font.size": 9,
    }  # fmt: skip
    page = io.StringIO()
    with matplotlib.rc_context(settings):
        figure = draw(style)
        figure.patch.set_alpha(0)
        for ax in figure.axes:
            ax.patch.set_alpha(0)
        figure.savefig(page, format="svg", metadata={"Date": None}, transparent=True, dpi=110)
    text = page.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)


FIGURES = {name.removeprefix("draw_"): draw for name, draw in list(globals().items()) if name.startswith("draw_")}


def draw_all(names: Sequence[str] = ()):
    """Write the named figures, or all of them, each for light and dark pages."""
    torch.set_num_threads(1)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in names or FIGURES:
        for mode, style in (("light", LIGHT), ("dark", DARK)):
            path = PICTURES / f"{name}-{mode}.svg"
            path.write_text(svg(FIGURES[name], style), encoding="utf-8")
            print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    draw_all(sys.argv[1:])
