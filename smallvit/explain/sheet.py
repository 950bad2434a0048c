"""Sheets: rows and columns of images, and images as matplotlib draws them."""

from collections.abc import Sequence

SIDE, GAP, TITLE = 1.29, 0.06, 0.31  # inches: the width of a panel, what is between two, the height of the titles
GONE = "#bccfea"  # what is gone or hidden: neither black, grey nor white


def sheet(rows: int, titles: Sequence[str], aspect: float, *, below: float = 0, title: float = TITLE):
    """A figure of so many rows and a column for each title, and its axes; pictures are `aspect` times as high as wide, with
    room of `below` inches for what else is said of each."""
    from matplotlib.figure import Figure

    size = ((SIDE + GAP) * len(titles), (SIDE * aspect + GAP + below) * rows + title)
    figure = Figure(figsize=size, layout="constrained")
    figure.get_layout_engine().set(w_pad=GAP / 2, h_pad=GAP / 2, wspace=0, hspace=0)
    axes = figure.subplots(rows, len(titles), squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, words in zip(axes[0], titles):
        ax.set_title(words, fontsize=9)
    return figure, axes


def coloured(pixels):
    """Pixels b c h w, bytes or floats in [0, 1] -> b h w 3, floats from 0 to 1."""
    import numpy as np

    if hasattr(pixels, "detach"):  # a tensor, which may have a gradient, or a precision that numpy has not
        pixels = pixels.detach().cpu()
        pixels = pixels.float() if pixels.is_floating_point() else pixels
    pixels = np.asarray(pixels)
    if pixels.dtype != np.uint8 and pixels.dtype.kind not in "bf":
        raise ValueError(f"got pixels of {pixels.dtype}; expected bytes (uint8), or floats in [0, 1]")
    if pixels.ndim != 4 or not len(pixels):
        raise ValueError(f"got pixels of shape {pixels.shape}; expected b c h w, at least one image")
    if pixels.shape[1] not in (1, 3):
        raise ValueError(f"got images of {pixels.shape[1]} channels; expected grey (1) or colour (3) to draw")
    pixels = pixels / 255 if pixels.dtype == np.uint8 else pixels
    return np.broadcast_to(np.clip(pixels, 0, 1).transpose(0, 2, 3, 1), (len(pixels), *pixels.shape[2:], 3))


def images_with_spec(images):
    """The images, if they know how their pixels are normalised."""
    if not hasattr(images, "spec"):
        raise ValueError(f"got a {type(images).__name__}; expected Images, which know how their pixels are normalised")
    return images
