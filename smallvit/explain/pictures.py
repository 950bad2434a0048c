"""Sheets of images: with attention over them, with patches guessed, or as they are. Each is a matplotlib `Figure`.

figure.savefig("attention.png", dpi=200) writes one to disk; a notebook shows it by itself.
"""

from collections.abc import Sequence

from .maps import patch_attention, rollout
from .sheet import GAP, GONE, TITLE, coloured, images_with_spec, sheet

HEAT = "inferno"  # colours of attention from none to the most in a picture
GHOST = 0.4  # how much of the image shines through
ASKED = "#00c8ff"  # the line round the patch that asks
NOTE = 0.17  # inches below each picture of attention


def attention_figure(
    model: "torch.nn.Module",  # noqa: F821
    images: "Images",  # noqa: F821
    *,
    block: int = -1,
    query: tuple[int, int] | None = None,
) -> "matplotlib.figure.Figure":  # noqa: F821
    """One row for each image: itself, what each head of this block looks at, the mean over heads, and roll-out over all blocks.

    What asks is the class token, the mean of all patches or `query`, as in `patch_attention`; a patch that asks has a blue line
    round it. Each picture has colours of its own, from black for nothing to yellow for its largest value, written below it in
    percent of all the attention of the one who asks. A patch is one square, since attention knows nothing finer; the patches of
    a merged token share its attention.

    attention_figure(model, mnist().train.take(slice(4)), block=2)

    Raises   ValueError as `patch_attention` does, and for pixels without a `spec` or with neither one nor three channels.
    """
    import numpy as np

    x = images_with_spec(images).spec.normalise(images.pixels())
    heads = patch_attention(model, x, block=block, query=query)
    layers = [*heads.unbind(1), heads.mean(1), rollout(model, x, query=query)]
    heat = np.stack([layer.double().cpu().numpy() for layer in layers], axis=1)
    where = f"block {range(len(model.blocks))[block]}"
    titles = [
        "image\n",
        *(f"{where}\nhead {head}" for head in range(len(layers) - 2)),
        f"{where}\nmean",
        "all blocks\nroll-out",
    ]

    pixels = coloured(images.images)
    figure, axes = sheet(len(pixels), titles, pixels.shape[1] / pixels.shape[2], below=NOTE)
    for image, maps, row in zip(pixels, heat, axes):
        row[0].imshow(image, interpolation="none")
        for values, ax in zip(maps, row[1:]):
            glow(ax, image, values)
        if query is not None:
            outline(row[0], query, maps[0].shape)
    return figure


def reconstruction_figure(mae: "MAE", images: "Images", *, seed: int = 0) -> "matplotlib.figure.Figure":  # noqa: F821
    """One row for each image: itself, what a masked autoencoder was shown of it, and what it made of that.

    `seed` decides what is hidden. The guess is made from visible pixels alone. A model that learned with `normalise` does not
    say how bright a patch is and how strong its contrast: there a last column takes both, as mean and standard deviation,
    from the hidden patch itself: the picture that papers show, which shows more than the model knows.

    Raises   ValueError for what cannot reconstruct, and for pixels without a `spec` or with neither one nor three channels.
    """
    import numpy as np

    if not hasattr(mae, "reconstruct"):
        raise ValueError(f"got a {type(mae).__name__}; expected the MAE that was trained, which can reconstruct, not its model")
    spec = images_with_spec(images).spec
    made = mae.reconstruct(spec.normalise(images.pixels()).to(next(mae.parameters())), seed=seed)
    mean, std = made.image.new_tensor([spec.mean, spec.std])[..., None, None]

    def seen(x):
        return coloured((x * std + mean).double().cpu())

    from matplotlib.colors import to_rgb

    hidden = made.mask.any(1).cpu().numpy()[..., None]
    columns = {
        "image": seen(made.image),
        "shown": np.where(hidden, to_rgb(GONE), seen(made.image)),
        "guessed": seen(made.predicted),
    }
    if not made.predicted.equal(made.helped):
        columns["guessed, told\nmean and std"] = seen(made.helped)
    h, w = made.image.shape[-2:]
    figure, axes = sheet(len(made.image), list(columns), h / w)
    for column, pictures in zip(axes.T, columns.values()):
        for ax, picture in zip(column, pictures):
            ax.imshow(picture, interpolation="none")
    return figure


def gallery(
    images: "Images | torch.Tensor",  # noqa: F821
    titles: Sequence[str] = (),
    *,
    columns: int = 10,
) -> "matplotlib.figure.Figure":  # noqa: F821
    """Images side by side in reading order, each with its title: to look at errors, at augmented images, at a data set.

    `images` are `Images`, or pixels b c h w, bytes or floats in [0, 1]; what is below or above is drawn as 0 or 1.

    gallery(test.take(wrong), [f"{guess}, not {label}" for guess, label in zip(guesses[wrong], test.labels[wrong])])

    Raises   ValueError for no images, another number of titles, fewer than 1 column, or neither one nor three channels.
    """
    pixels = coloured(getattr(images, "images", images))
    titles = list(titles)
    if titles and len(titles) != len(pixels):
        raise ValueError(f"got {len(titles)} titles for {len(pixels)} images; expected one each, or none")
    if columns < 1:
        raise ValueError(f"columns is {columns}; expected at least 1")
    n, (h, w) = len(pixels), pixels.shape[1:3]
    columns = min(columns, n)
    lines = max((str(title).count("\n") + 1 for title in titles), default=0)
    figure, axes = sheet(-(-n // columns), [""] * columns, h / w, below=lines * TITLE / 2 + GAP, title=0)
    for ax, image in zip(axes.flat, pixels):
        ax.imshow(image, interpolation="none")
    for ax, title in zip(axes.flat, titles):
        ax.set_title(title, fontsize=9, pad=3)
    return figure


def glow(ax, image, values):
    """Attention to patches, rows x columns, in colours, with the image h w 3 shining through and the largest value below."""
    import matplotlib
    import numpy as np

    (h, w, _), (rows, columns), most = image.shape, values.shape, values.max()
    full = values[np.arange(h)[:, None] * rows // h, np.arange(w) * columns // w]
    heat = matplotlib.colormaps[HEAT](full / most if most > 0 else full)[..., :3]
    ax.imshow(1 - (1 - heat) * (1 - GHOST * image), interpolation="none")
    percent = f"{100 * most:.0f}" if most >= 0.1 else f"{100 * most:.2g}"
    ax.text(0.5, -0.03, f"max {percent}%", transform=ax.transAxes, ha="center", va="top", fontsize=7)


def outline(ax, query, grid):
    """A line round the patch that asks, on an image of that grid."""
    from matplotlib.patches import Rectangle

    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    height, width = abs(bottom - top) / grid[0], (right - left) / grid[1]
    corner = left + query[1] * width, min(bottom, top) + query[0] * height
    ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=ASKED, linewidth=1.2))
