"""Plots of what a model has learned: similar positions, features in two dimensions, and the confusion matrix.

Each function returns a matplotlib `Figure`. `feature_view` and `confusion_figure` take arrays, tensors or lists; they need
neither a model nor torch.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from .sheet import to_array

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor, nn

MAX_DISTINCT = 20  # largest number of classes with colors that are easy to tell apart


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a new matplotlib figure with one plot, and the axes of this plot. `width` and `height` are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def position_similarity(model: nn.Module, *, image: tuple[int, int] | None = None) -> Figure:
    """Return a matplotlib figure that shows how similar the position embeddings of a model are. Each patch gets a small map:
    the cosine similarity between its embedding and the embeddings of all patches.

    The maps are placed like their patches. Position embeddings are what the model adds to its tokens, learned or fixed. `model`
    is a `ViT` or a timm model. `image` is (height, width) of the images; None uses the size that the model was built for, and
    is the only value for a timm model.

    Paper    ViT, arXiv:2010.11929, figure 7.
    Raises   ValueError for a model that adds no positions to its tokens, positions that depend on the image or are all zero,
             and an `image` for a timm model.
    """
    import numpy as np

    table, (rows, columns) = position_embeddings(model, image)
    unit = table / np.maximum(np.linalg.norm(table, axis=-1, keepdims=True), 1e-12)
    cosines = (unit @ unit.T).reshape(rows, columns, rows, columns)
    gap = max(1, round(max(rows, columns) / 7))  # in cells, between two maps
    page = np.full((rows * (rows + gap) - gap, columns * (columns + gap) - gap), np.nan)
    for row, column in np.ndindex(rows, columns):
        top, left = row * (rows + gap), column * (columns + gap)
        page[top : top + rows, left : left + columns] = cosines[row, column]

    side = max(5.5, 0.45 * max(rows, columns)) / max(page.shape)
    figure, ax = new_figure(side * page.shape[1] + 1.5, side * page.shape[0] + 0.6)
    shown = ax.imshow(page, cmap="viridis", vmin=min(cosines.min(), 0.99), vmax=1, interpolation="none")
    ax.set_xticks((columns - 1) / 2 + (columns + gap) * np.arange(columns), [*map(str, range(columns))], fontsize=8)
    ax.set_yticks((rows - 1) / 2 + (rows + gap) * np.arange(rows), [*map(str, range(rows))], fontsize=8)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set(xlabel="column of the patch", ylabel="row of the patch")
    colorbar: Any = figure.colorbar(shown, ax=ax, shrink=0.7, label="cosine between positions")
    colorbar.outline.set_visible(False)
    return figure


def position_embeddings(model: Any, image: tuple[int, int] | None) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the position embeddings of the patch tokens of a model, an array of shape (patches, width), and the number of
    (rows, columns) of patches. `image` is the image size (height, width) in pixels; None is the size for which the model was
    built.

    Raises   ValueError for a model without positions, with zeros only or with positions that depend on the image, and for
             `image` with a timm model.
    """
    import torch

    from smallvit.vit import ViT

    kind = type(model).__name__
    if isinstance(model, ViT):
        grid = model.tokenizer.grid(image or model.image)
        if model.position is None:
            raise ValueError(f"this {kind} has no positions (position=None); expected a model that adds some to its tokens")
        position = copy.deepcopy(model.position).float()  # half precision would round what is added to 1
        zeros = model.prefix.new_zeros(1, len(model.prefix) + grid[0] * grid[1], model.prefix.shape[1], dtype=torch.float32)
        with torch.inference_mode():
            table, other = ((position(x, grid) - x)[0, len(model.prefix) :] for x in (zeros, zeros + 1))
        if not torch.allclose(table, other, atol=1e-3):
            name = type(model.position).__name__
            raise ValueError(f"the positions of this {kind} ({name}) depend on the image; expected Learned or fixed ones")
    else:
        table, grid = getattr(model, "pos_embed", None), getattr(getattr(model, "patch_embed", None), "grid_size", None)
        if not isinstance(table, torch.Tensor) or table.ndim != 3 or grid is None:
            raise ValueError(f"this {kind} has no table of positions; expected a ViT or a Vision Transformer of timm with one")
        if image is not None:
            raise ValueError(f"image is {image} for a {kind} of timm; expected None, its own size, or from_timm(model)")
        table = table[0, table.shape[1] - grid[0] * grid[1] :]
    table = table.detach().double().cpu().numpy()
    if not table.any():
        raise ValueError(f"the positions of this {kind} are all zero, so they have no cosine; expected some that are not")
    return table, grid


def position_table(length: int, width: int) -> Figure:
    """Return a matplotlib figure that shows sinusoidal position embeddings as an image. `length` is the number of positions
    (rows), and `width` is the number of channels (columns).

    Paper    Vaswani et al. 2017, arXiv:1706.03762, section 3.5, as in `SinCos1d`: channel 2k is
             sin(position / 10000^(2k/width)), channel 2k + 1 is the cosine. Low channels change fast, high channels hardly.
    Raises   ValueError for `length` below 1, for a `width` that is odd or below 2, and for other than whole numbers.
    """
    from smallvit.positions import SinCos1d

    if not isinstance(length, Integral) or not isinstance(width, Integral) or length < 1 or width < 2 or width % 2:
        raise ValueError(f"got length {length} and width {width}; expected at least one position, and an even width")
    table: Tensor = SinCos1d(width, (1, length), 0).get_buffer("table")

    figure, ax = new_figure(6, 5)
    shown = ax.imshow(table.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    ax.set(xlabel="channel", ylabel="position", title=f"{length:,} positions, {width:,} channels")
    ax.spines[:].set_visible(False)
    colorbar: Any = figure.colorbar(shown, ax=ax, ticks=[-1, 0, 1])
    colorbar.outline.set_visible(False)
    return figure


def feature_view(
    features: Any, labels: Sequence[int], *, classes: Sequence[str] | None = None, method: str = "pca"
) -> Figure:
    """Return a matplotlib figure that shows the features of images as points in two dimensions, with one color for each class
    in `labels`. The option `method` selects the projection, PCA or t-SNE.

    `features` has shape (images, channels) and `labels` one integer per image. `classes` are the class names for the legend.
    `method="pca"` projects onto the first two principal components; the axes say how much of the variance they explain.
    `method="tsne"` uses t-SNE of scikit-learn, initialized from PCA: it keeps neighbors together, but distances between
    clusters and their sizes have no meaning. Equal features give equal pictures. Labels only set the colors.

    feature_view(features(model, images), images.labels, classes=images.spec.classes)

    Raises   ValueError for another method, for another number of labels than images, for fewer than 3 images or 2 channels,
             for features that are not finite, and for a label without a class name.
    """
    import numpy as np

    x, numbers = to_array(features).astype(np.float64), to_array(labels)
    if x.ndim != 2 or len(x) < 3 or x.shape[1] < 2 or numbers.shape != x.shape[:1]:
        raise ValueError(f"got features {x.shape} and labels {numbers.shape}; expected n d and n, n at least 3, d at least 2")
    if not np.isfinite(x).all():
        raise ValueError("got features that are NaN or infinite; expected those of a model that has not diverged")
    if classes is not None:
        check_classes("labels", numbers, classes)
    points, axis_names = project_to_2d(x, method)

    present = np.unique(numbers)
    legend_columns = -(-len(present) // 20)
    figure, ax = new_figure(5.8 + 0.8 * legend_columns, 5)
    for place, (number, color) in enumerate(zip(present, class_colors(len(present)))):
        size = float(np.clip(6_000 / len(x), 5, 30))
        ax.scatter(*points[numbers == number].T, s=size, color=color, alpha=0.8, linewidths=0, label=str(place))
    ax.set(xlabel=axis_names[0], ylabel=axis_names[1], title=f"{len(x):,} images, {x.shape[1]} channels")
    ax.set_aspect("equal", adjustable="datalim")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[["top", "right"]].set_visible(False)
    legend = figure.legend(loc="outside right upper", frameon=False, markerscale=2, ncols=legend_columns)
    for text, number in zip(legend.get_texts(), present):  # a label that begins with "_" would be left out
        text.set(text=str(number if classes is None else classes[number]), parse_math=False)
    return figure


def project_to_2d(x: np.ndarray, method: str) -> tuple[np.ndarray, list[str]]:
    """Return features that are projected to two dimensions, an array of shape (images, 2), and the labels of the two axes. `x`
    has the shape (images, features). `method` is "pca" or "tsne".
    """
    import numpy as np

    if method not in ("pca", "tsne"):
        raise ValueError(f"method is {method!r}; expected 'pca' or 'tsne'")
    from sklearn.decomposition import PCA

    with np.errstate(invalid="ignore"):  # constant features: 0 / 0
        pca = PCA(n_components=2, svd_solver="full").fit(x)
    if method == "pca":
        shares = 100 * np.nan_to_num(pca.explained_variance_ratio_)
        return pca.transform(x), [f"component {i}: {share:.0f}% of the variance" for i, share in enumerate(shares, start=1)]
    from sklearn.manifold import TSNE

    start = pca.transform(x)
    start = start / max(start[:, 0].std(), 1e-12) * 1e-4
    tsne = TSNE(init=start, perplexity=min(30, (len(x) - 1) / 3), random_state=0, n_jobs=1)
    return tsne.fit_transform(x), ["t-SNE: neighbors are near, distances between clusters mean nothing", ""]


def class_colors(n: int) -> list:
    """Return a list of `n` colors for n classes. Up to 20 colors are easy to tell apart. For more classes, the colors are taken
    from a rainbow.
    """
    import matplotlib

    if n <= MAX_DISTINCT:
        distinct: Any = matplotlib.colormaps["tab10" if n <= 10 else "tab20"]
        return list(distinct.colors[:n])
    return [matplotlib.colormaps["turbo"](i / (n - 1)) for i in range(n)]


def check_classes(name: str, numbers: np.ndarray, classes: Sequence[str]):
    """Raise ValueError unless all `numbers` are valid class indices: integers from 0 to the number of classes - 1. `classes`
    holds the class names. `name` is a text for the error message that says what the numbers are, such as "labels".
    """
    if not hasattr(classes, "__len__"):
        raise ValueError(f"classes is {classes!r}; expected the names of the classes, such as ('cat', 'dog')")
    if numbers.dtype.kind not in "iu":
        raise ValueError(
            f"got {name} like {numbers.reshape(-1)[0].item()!r}; expected numbers of classes, 0 to {len(classes) - 1}, such as "
            "classes.index(name), or predict_proba(images).argmax(1) of a trained model"
        )
    if numbers.min() < 0 or numbers.max() >= len(classes):
        raise ValueError(
            f"got {name} like {numbers.min()} and {numbers.max()}; expected numbers of classes, 0 to {len(classes) - 1}"
        )


def confusion_figure(guesses: Sequence[int], labels: Sequence[int], classes: Sequence[str]) -> Figure:
    """Return a matplotlib figure with the confusion matrix of a classifier: rows are true classes, columns are predicted
    classes. `guesses` and `labels` are the numbers of the predicted and of the true class, one per image. `classes` holds the
    names of the classes.

    Each number in the figure counts images. The color of a cell is its share of the row: correct predictions are blue; errors
    are orange, with a color scale that ends at the most frequent error.

    Raises   ValueError for no images, for different numbers of guesses and labels, and for a class without a name.
    """
    import numpy as np

    predicted, true = to_array(guesses), to_array(labels)
    if predicted.ndim != 1 or predicted.shape != true.shape or not len(true):
        raise ValueError(f"got guesses {predicted.shape} and labels {true.shape}; expected as many of each, at least one")
    check_classes("guesses", predicted, classes)
    check_classes("labels", true, classes)
    k = len(classes)
    counts = np.zeros((k, k), dtype=int)
    np.add.at(counts, (true, predicted), 1)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    diagonal = np.eye(k, dtype=bool)
    errors = np.where(diagonal, np.nan, share)

    side = 1.6 + 0.42 * k
    figure, ax = new_figure(side, side)
    ax.imshow(np.where(diagonal, share, np.nan), cmap="Blues", vmin=0, vmax=1.4)
    ax.imshow(np.ma.masked_invalid(errors), cmap="Oranges", vmin=0, vmax=max(np.nanmax(errors, initial=0), 1e-12) * 1.4)
    for row, column in np.argwhere(counts):
        ax.text(column, row, str(counts[row, column]), ha="center", va="center", fontsize=8)
    rotation = 90 if max(map(len, map(str, classes))) > 3 else 0
    ax.set_xticks(range(k), classes, rotation=rotation, parse_math=False)
    ax.set_yticks(range(k), classes, parse_math=False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    wrong = int(np.count_nonzero(predicted != true))
    ax.set(xlabel="predicted", ylabel="true", title=f"{wrong:,} of {len(true):,} wrong ({wrong / len(true):.1%})")
    return figure
