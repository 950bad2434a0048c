"""The computations that take most of the time when views are made, and which code does them.

`PYTORCH` does them everywhere. Inside `using(kernels)`, other code takes its place: `smallvit.native` has some for CPUs. It
must compute the same up to rounding.

Shapes: b images, c channels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Kernels(NamedTuple):
    """Code for the four computations. `index` are the positions of the images that are changed, int64, on their device.

    sample    `sample(images, grid, padding)`: crops of the images, sampled bilinearly, shape (crops, c, rows, columns). The
              first b crops are one of every image, the next b a second one, and so on. `grid` (2, crops, rows, columns) holds
              the point (x, y) of each new pixel, in the coordinates of torch's `grid_sample`: from -1 to 1 along each axis of
              the image. Outside, images are black with the padding "zeros"; with "border" they have the value of the nearest
              pixel
    recolor   `recolor(images, matrix, offset)`: new RGB images, whose pixels are matrix x + offset for a pixel x, clipped to
              [0, 1]. `matrix` (b, 3, 3) and `offset` (b, 1, 1) are those of each image
    gray      `gray(images, index)`: make RGB images gray, in place
    blur      `blur(images, index, sigma)`: blur images, in place; see `Blur`. `sigma` (images that are changed) holds the
              standard deviations in pixels
    """

    sample: Callable[[Tensor, Tensor, str], Tensor]
    recolor: Callable[[Tensor, Tensor, Tensor], Tensor]
    gray: Callable[[Tensor, Tensor], None]
    blur: Callable[[Tensor, Tensor, Tensor], None]


def sample(images: Tensor, grid: Tensor, padding: str) -> Tensor:
    parts = [part.permute(1, 2, 3, 0) for part in grid.chunk(grid.shape[1] // len(images), dim=1)]
    crops = [F.grid_sample(images, points, padding_mode=padding, align_corners=False) for points in parts]
    return torch.cat(crops) if len(crops) > 1 else crops[0]


def recolor(images: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    return torch.baddbmm(offset, matrix, images.flatten(2)).clamp_(0, 1).view_as(images)


def gray(images: Tensor, index: Tensor):
    change_chosen(images, index, to_gray)


def blur(images: Tensor, index: Tensor, sigma: Tensor):
    def blurred(images: Tensor) -> Tensor:
        weights = {length: _gaussian_weights(length, sigma) for length in set(images.shape[2:])}
        rows, columns = (weights[length] for length in images.shape[2:])
        return rows[:, None] @ (images.flatten(1, 2) @ columns.mT.contiguous()).view_as(images)

    change_chosen(images, index, blurred)


PYTORCH = Kernels(sample, recolor, gray, blur)
KERNELS: ContextVar[Kernels] = ContextVar("KERNELS", default=PYTORCH)


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Context manager inside which `kernels` do the computations, in this thread only."""
    token = KERNELS.set(kernels)
    try:
        yield
    finally:
        KERNELS.reset(token)


def change_chosen(images: Tensor, index: Tensor, change: Callable[[Tensor], Tensor]):
    """Change images in place. `index` are the positions of those that are chosen. `change` gets the chosen images, and returns
    the changed ones.
    """
    if len(index) == len(images):
        images.copy_(change(images))
    else:
        images[index] = change(images.index_select(0, index))


def to_gray(images: Tensor) -> Tensor:
    """Return the gray values of RGB images (batch, 3, height, width), as a tensor of shape (batch, 1, height, width), by the
    standard ITU-R BT.601.
    """
    return 0.299 * images[:, 0:1] + 0.587 * images[:, 1:2] + 0.114 * images[:, 2:3]


def _gaussian_weights(length: int, sigma: Tensor) -> Tensor:
    """Return one matrix for each image, shape (images, length, length). Multiplied by the pixels along one axis of the image,
    the matrix blurs this axis by a Gaussian filter. `length` is the number of pixels of the axis. `sigma` (images) holds the
    standard deviation in pixels for each image.

    Each row of a matrix sums to 1.
    """
    variance = sigma.clamp(min=1e-3).square_()[:, None, None]
    logits = _squared_distances(length, sigma.device) / (-2 * variance)
    return torch.softmax(logits.clamp_(min=-30), dim=-1)  # smaller weights are several times slower to multiply


@lru_cache(maxsize=64)
def _squared_distances(length: int, device: torch.device) -> Tensor:
    """Return the squared distances between the pixels along one axis of an image, shape (length, length)."""
    position = torch.arange(length, device=device)
    return (position[:, None] - position).square()
