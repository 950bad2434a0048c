"""The batch that every transform takes and returns, and the checks of the transforms' options."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor


class Batch(NamedTuple):
    """A batch of training images (batch, channels, height, width) with the target probabilities of each image (batch, classes).
    The batch may also hold augmented views of the images and the logits of teacher models.

    images           float32 pixels in [0, 1], where 0 is black; they are normalized after all transforms
    targets          one row for each image; each row sums to 1
    views            for self-supervised learning: one tensor for each size of view, `(views b) c h w`, all images' first views
                     first, then all images' second views, and so on
    teacher_logits   logits of teacher models, `b k` each; empty without a teacher
    """

    images: Tensor
    targets: Tensor
    views: tuple[Tensor, ...] = ()
    teacher_logits: tuple[Tensor, ...] = ()


Augmentation = Callable[[Batch, Generator], Batch]


def apply(transforms: Sequence[Augmentation], batch: Batch, generator: Generator) -> Batch:
    """Apply all transforms to a batch, one after the other, and return the new batch. `generator` is the random number
    generator.

    Raises    ValueError if the images are not float32 `b c h w`, or if there is not one row of targets for each image.
    """
    images, targets = batch.images, batch.targets
    if images.ndim != 4 or targets.ndim != 2 or len(images) != len(targets) or images.dtype != torch.float32:
        got = f"{images.dtype} {tuple(images.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"expected float32 images b c h w in [0, 1] and targets b k, got {got}")
    for transform in transforms:
        batch = transform(batch, generator)
    return batch


def check_range(transform: object, **ranges: tuple[float, float]) -> None:
    """Raise ValueError unless some options of a transform are numbers in the allowed range. Each keyword argument in `ranges`
    is the name of an option with its (lowest, highest) value. For example, `probability=(0, 1)` checks that
    `transform.probability` is from 0 to 1.
    """
    for name, (low, high) in ranges.items():
        value = getattr(transform, name)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{type(transform).__name__}({name}={value!r}): expected a number from {low} to {high}")


def check_interval(transform: object, name: str, low: float, high: float) -> None:
    """Raise ValueError unless an option of a transform is a pair of numbers (a, b) with low <= a <= b <= high. `name` is the
    name of the option.
    """
    value = getattr(transform, name)
    pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, int | float) for end in value)
    if not (pair and low <= value[0] <= value[1] <= high):
        raise ValueError(f"{type(transform).__name__}({name}={value!r}): expected (a, b) with {low} <= a <= b <= {high}")


def is_whole_number(value: Any, minimum: int = 1) -> bool:
    """Return True if `value` is an integer of at least `minimum`, else False. True and False do not count as integers."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def height_width(size: Any) -> tuple[int, int] | None:
    """Return a size in pixels as a pair (height, width). `size` is a pair of this form, or one integer for a square. For
    anything else, return None.
    """
    pair = (size, size) if isinstance(size, int) else size
    return (pair[0], pair[1]) if isinstance(pair, tuple) and len(pair) == 2 and all(map(is_whole_number, pair)) else None
