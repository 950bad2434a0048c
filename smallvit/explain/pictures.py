"""Figures with rows of images: attention over images, reconstructions of a masked autoencoder, and plain galleries.

Each function returns a matplotlib `Figure`: a notebook shows it, and figure.savefig("attention.png", dpi=200) writes it to
disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from textwrap import fill
from typing import TYPE_CHECKING, Any

from .maps import Query, patch_attention, rollout
from .sheet import GAP, GONE, TITLE, check_spec, image_grid, shown_range, to_rgb

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from smallvit.data import Images
    from smallvit.objectives import MAE

HEAT = "inferno"  # color map of attention, from 0 to the largest value in a map
VISIBLE = 0.4  # how strongly the image is visible behind its attention map
QUERY_COLOR = "#00c8ff"  # outline of the patch that is the query
TITLE_LENGTH = 18  # characters in a line of a title that fit above an image
NOTE = 0.17  # inches below each attention map, for its largest value


def attention_figure(model: nn.Module, images: Images, *, block: int = -1, query: Query = None) -> Figure:
    """Return a matplotlib figure with attention maps over images. Each image gets a row: the image, a map for each head of one
    block, the mean over heads, and the attention roll-out. The option `block` selects the block.

    `block` counts from 0, or from the last block if negative. `query` is the (row, column) of a patch, which gets a blue
    outline; None uses the class token or the mean over patches, as in `patch_attention`. Each map has its own color scale, from
    black for 0 to yellow for its largest value. This value is written below, in percent of all attention of the query. Patches
    are single squares, because attention has no finer resolution. The patches of a merged token share its attention.

    attention_figure(model, mnist().train.take(slice(4)), block=2)

    Raises   ValueError as `patch_attention` does, for pixels without a `spec`, and for neither 1 nor 3 channels.
    """
    import numpy as np

    check_spec(images)
    x = images.spec.normalize(images.pixels())
    heads = patch_attention(model, x, block=block, query=query)
    maps = [*heads.unbind(1), heads.mean(1), rollout(model, x, query=query)]
    values = np.stack([attention.double().cpu().numpy() for attention in maps], axis=1)
    blocks: Any = model.blocks
    name = f"block {range(len(blocks))[block]}"
    head_titles = [f"{name}\nhead {head}" for head in range(len(maps) - 2)]
    titles = ["image\n", *head_titles, f"{name}\nmean", "all blocks\nroll-out"]

    pixels = to_rgb(images.images)
    figure, axes = image_grid(len(pixels), titles, pixels.shape[1] / pixels.shape[2], below=NOTE)
    for image, image_values, row in zip(pixels, values, axes):
        row[0].imshow(image, interpolation="none")
        for attention, ax in zip(image_values, row[1:]):
            draw_attention(ax, image, attention)
        if query is not None:
            outline_patch(row[0], query, image_values[0].shape)
    return figure


def reconstruction_figure(mae: MAE, images: Images, *, seed: int = 0) -> Figure:
    """Return a matplotlib figure with reconstructions of the masked autoencoder `mae`. Each image gets a row: the image, its
    visible patches, and the reconstructed image.

    `mae` is the trained `MAE` objective. `seed` chooses the hidden patches; these are predicted from the visible ones alone. An
    `MAE` that was trained with normalized target patches does not predict the mean and standard deviation of a patch. For such
    a model a last column takes both from the hidden patch itself. Papers usually show this picture, although it contains
    information that the model does not have.

    Raises   ValueError for an object without `reconstruct`, for pixels without a `spec`, and for neither 1 nor 3 channels.
    """
    import numpy as np
    from matplotlib.colors import to_rgb as color_to_rgb

    if not hasattr(mae, "reconstruct"):
        raise ValueError(f"got a {type(mae).__name__}; expected the MAE that was trained, which can reconstruct, not its model")
    check_spec(images)
    spec = images.spec
    result = mae.reconstruct(spec.normalize(images.pixels()).to(next(mae.parameters())), seed=seed)
    mean, std = result.image.new_tensor([spec.mean, spec.std])[..., None, None]
    shown = shown_range(images.pixels())

    def unnormalize(x: Tensor) -> np.ndarray:
        """Return the normalized images `x` as an array of RGB pixels from 0 to 1. The mean and the standard deviation are those
        of the data set from which the figure's images come.
        """
        return to_rgb((x * std + mean).double().cpu(), shown)

    image, hidden = unnormalize(result.image), result.mask.any(1).cpu().numpy()[..., None]
    columns = {
        "image": image,
        "visible": np.where(hidden, color_to_rgb(GONE), image),
        "reconstructed": unnormalize(result.predicted),
    }
    if not result.predicted.equal(result.helped):
        columns["reconstructed, given\nmean and std"] = unnormalize(result.helped)
    h, w = result.image.shape[-2:]
    figure, axes = image_grid(len(result.image), list(columns), h / w)
    for axes_column, pictures in zip(axes.T, columns.values()):
        for ax, picture in zip(axes_column, pictures):
            ax.imshow(picture, interpolation="none")
    return figure


def gallery(images: Images | Tensor, titles: Sequence[str] = (), *, columns: int = 10) -> Figure:
    """Return a matplotlib figure that shows many images in a grid, for example misclassified images.

    `images` are `Images`, or pixels of shape (batch, channels, height, width), as bytes or as floats. Where some floats lie
    outside of [0, 1], the smallest value of all images is drawn in black and the largest one in white. `titles` has one text
    per image, or is empty; long titles are broken into lines. `columns` is the number of images in a row.

    gallery(test.take(wrong), [f"{guess}, not {label}" for guess, label in zip(guesses[wrong], test.labels[wrong])])

    Raises   ValueError for no images, another number of titles, fewer than 1 column, or neither 1 nor 3 channels.
    """
    pixels = to_rgb(getattr(images, "images", images))
    titles = ["\n".join(fill(line, TITLE_LENGTH) for line in str(title).split("\n")) for title in titles]
    if titles and len(titles) != len(pixels):
        raise ValueError(f"got {len(titles)} titles for {len(pixels)} images; expected one each, or none")
    if not isinstance(columns, Integral) or columns < 1:
        raise ValueError(f"columns is {columns}; expected at least 1, a whole number")
    n, (h, w) = len(pixels), pixels.shape[1:3]
    columns = min(columns, n)
    lines = max((title.count("\n") + 1 for title in titles), default=0)
    figure, axes = image_grid(-(-n // columns), [""] * columns, h / w, below=lines * TITLE / 2 + GAP, title=0)
    for ax, image in zip(axes.flat, pixels):
        ax.imshow(image, interpolation="none")
        ax.set_anchor("S")  # leaves all free space to the title
    for ax, title in zip(axes.flat, titles):
        ax.set_title(title, fontsize=9, pad=3, parse_math=False)  # the name of a class may contain "$"
    return figure


def draw_attention(ax: Axes, image: np.ndarray, attention: np.ndarray):
    """Draw an image on the matplotlib axes `ax`, with a color map of the attention to its patches. `image` has the shape
    (height, width, 3), and `attention` has the shape (rows, columns).

    The largest value is written below in percent.
    """
    import matplotlib
    import numpy as np

    (h, w, _), (rows, columns), largest = image.shape, attention.shape, attention.max()
    pixels = attention[np.arange(h)[:, None] * rows // h, np.arange(w) * columns // w]
    heat = matplotlib.colormaps[HEAT](pixels / largest if largest > 0 else pixels)[..., :3]
    ax.imshow(1 - (1 - heat) * (1 - VISIBLE * image), interpolation="none")
    percent = f"{100 * largest:.0f}" if largest >= 0.1 else f"{100 * largest:.2g}"
    ax.text(0.5, -0.03, f"max {percent}%", transform=ax.transAxes, ha="center", va="top", fontsize=7)


def outline_patch(ax: Axes, patch: tuple[int, int], grid: tuple[int, int]):
    """Draw a blue outline around one patch of an image on the matplotlib axes `ax`. `patch` is the (row, column) of the patch.
    `grid` is the number of (rows, columns) of patches.
    """
    from matplotlib.patches import Rectangle

    (left, right), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    height, width = abs(bottom - top) / grid[0], (right - left) / grid[1]
    corner = left + patch[1] * width, min(bottom, top) + patch[0] * height
    ax.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=QUERY_COLOR, linewidth=1.2))
