"""at_size: a data set with images of another size, so that one model fits several data sets."""

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np
import torch

from .dataset import Dataset, to_pixels
from .decode import read_image
from .images import DataSpec, Images, with_moments

# data set -> (height, width) -> the data set in this size, as long as the first one is in use
RESIZED: WeakKeyDictionary[Dataset, dict[tuple[int, int], Dataset]] = WeakKeyDictionary()


def at_size(data: Callable[[], Dataset], size: int | tuple[int, int]) -> Dataset:
    """Return another data set with all images resized to `size` pixels (one side, or height and width). `data` is the loader of
    that data set, such as `digits`, or a `partial` of one.

    Images are resized as `folder` resizes them (bicubic, antialiased); the ratio of their sides may change. Pixels are
    normalized by the mean and standard deviation of the resized training images. A mean of 0, which MNIST and similar data sets
    have because their background is black, stays 0.

    Raises ValueError for a size that is no positive whole number, for images that are stored as float32 or have another number
    of channels than 1, 3 or 4, and for a data set with folds: use the option `size` of `folder` there.
    """
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
        raise ValueError(f"size is {size!r}; expected a number of pixels, such as 28, or a pair (height, width)")
    if not callable(data):
        raise ValueError(f"data is a {type(data).__name__}; expected a loader without the call, such as digits")
    whole = data()
    known = RESIZED.setdefault(whole, {})
    if sides not in known:
        known[sides] = _at_size(whole, sides)
    return known[sides]


def _at_size(data: Dataset, size: tuple[int, int]) -> Dataset:
    """Return the data set `data` with images of `size` (height, width)."""
    if data.folds or data.spec.dtype != "uint8" or data.spec.channels not in (1, 3, 4):
        kind = f"{data.folds} folds" if data.folds else f"{data.spec.channels} channels of {data.spec.dtype}"
        raise ValueError(
            f"{data.spec.name} has {kind}, which at_size does not support; expected gray or color images of 8 bits with fixed "
            "test images; folder(..., size=28) resizes all kinds of images"
        )
    sized = replace(data.spec, size=size)
    train = _resized(data.train, sized)
    moments = with_moments(sized, train)
    spec = replace(moments, mean=moments.mean if any(data.spec.mean) else data.spec.mean)
    test, val = data.test.changed(lambda images: _resized(images, spec)), data.val and _resized(data.val, spec)
    unlabelled = data.unlabelled and _resized(data.unlabelled, spec)
    return replace(data, spec=spec, train=train.with_spec(spec), test=test, val=val, unlabelled=unlabelled)


def _resized(images: Images, spec: DataSpec) -> Images:
    """Return `images` in the size of the description `spec`, which becomes their description."""
    return Images(_pixels(images, spec.size), images.labels, spec, images.files)


def _pixels(images: Images, size: tuple[int, int]) -> torch.Tensor:
    """Return the pixels of `images` in another size (height, width), uint8 `n c h w`."""
    from PIL import Image

    arrays = (np.ascontiguousarray(pixels.transpose(1, 2, 0)) for part in images.parts() for pixels in part.numpy())
    pictures = (Image.fromarray(array if array.shape[2] > 1 else array[..., 0]) for array in arrays)
    resized = [read_image(picture, size, mode=None).pixels for picture in pictures]
    if not resized:
        return torch.empty((0, images.spec.channels, *size), dtype=torch.uint8)
    return to_pixels(np.stack(resized), images.spec.name)
