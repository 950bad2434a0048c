"""The layout of figures with rows and columns of images, and the conversion of pixels for matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

SIDE, GAP, TITLE = 1.29, 0.06, 0.31  # inches: width of a panel, space between two panels, height of the titles
GONE = "#bccfea"  # color of pruned or hidden patches; differs from black, gray and white, which are frequent in images


def image_grid(
    rows: int, titles: Sequence[str], aspect: float, *, below: float = 0, title: float = TITLE
) -> tuple[Figure, np.ndarray]:
    """Return an empty matplotlib figure for a grid of images, and its axes as an array of shape (rows, columns). `rows` is the
    number of rows, and `titles` holds the title of each column. `aspect` is the image height divided by the image width.
    `below` (extra space below each image) and `title` (height of the titles) are in inches.

    The axes have no ticks and no frame.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    size = ((SIDE + GAP) * len(titles), (SIDE * aspect + GAP + below) * rows + title)
    layout = ConstrainedLayoutEngine(w_pad=GAP / 2, h_pad=GAP / 2, wspace=0, hspace=0)
    figure = Figure(figsize=size, layout=layout)
    axes = figure.subplots(rows, len(titles), squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, text in zip(axes[0], titles):
        ax.set_title(text, fontsize=9)
    return figure, axes


def to_array(values: Any) -> np.ndarray:
    """Return a tensor, an array or a list as a numpy array."""
    import numpy as np

    if hasattr(values, "detach"):  # numpy accepts neither a tensor that requires a gradient nor bfloat16
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    return np.asarray(values)


def to_rgb(pixels: Any, shown: tuple[float, float] | None = None) -> np.ndarray:
    """Return images as an array of RGB floats from 0 to 1 for matplotlib, shape (batch, height, width, 3). `pixels` has the
    shape (batch, channels, height, width): a tensor or an array of bytes (uint8) or of floats.

    Gray images get three equal channels. `shown` are the values that become 0 and 1; values outside are clipped. None takes
    those of `shown_range`.

    Raises   ValueError for another type, another number of dimensions, no images, or neither 1 nor 3 channels.
    """
    import numpy as np

    pixels = to_array(pixels)
    if pixels.dtype != np.uint8 and pixels.dtype.kind not in "bf":
        raise ValueError(f"got pixels of {pixels.dtype}; expected bytes (uint8), or floats")
    if pixels.ndim != 4 or not len(pixels):
        raise ValueError(f"got pixels of shape {pixels.shape}; expected b c h w, at least one image")
    if pixels.shape[1] not in (1, 3):
        raise ValueError(f"got images of {pixels.shape[1]} channels; expected gray (1) or color (3) to draw")
    pixels = pixels / 255 if pixels.dtype == np.uint8 else pixels
    low, high = shown_range(pixels) if shown is None else shown
    pixels = np.clip((pixels - low) / (high - low), 0, 1)
    return np.broadcast_to(pixels.transpose(0, 2, 3, 1), (len(pixels), *pixels.shape[2:], 3))


def shown_range(pixels: Any) -> tuple[float, float]:
    """Return the values of `pixels`, a tensor or an array of floats, that are drawn in black and in white. They are 0 and 1 or,
    if some values lie outside of [0, 1], the smallest and the largest value of all images together.
    """
    pixels = to_array(pixels)
    low, high = (float(pixels.min()), float(pixels.max())) if pixels.size else (0, 1)
    return (low, high) if low < high and (low < 0 or high > 1) else (0, 1)


def check_spec(images: Any):
    """Raise ValueError if `images` is not an `Images` object (images with the mean and standard deviation that normalize their
    pixels).

    The attribute `spec` holds the mean and standard deviation.
    """
    if not hasattr(images, "spec"):
        raise ValueError(f"got a {type(images).__name__}; expected Images, which know how their pixels are normalized")
