"""What every augmentation takes and gives: a batch of images with their targets."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor


class Batch(NamedTuple):
    """Images `b c h w` with pixels in [0, 1], black = 0 (normalisation comes later), and targets `b k` whose rows sum to 1.

    `views` are views of the images for self-supervision, those of one size together: view after view, `(views b) c h w`.
    `teacher_logits` has what a teacher says of the images, logits `b k`, where there is one who has been asked.
    """

    images: Tensor
    targets: Tensor
    views: tuple[Tensor, ...] = ()
    teacher_logits: tuple[Tensor, ...] = ()


Augmentation = Callable[[Batch, Generator], Batch]


def apply(steps: Sequence[Augmentation], batch: Batch, generator: Generator) -> Batch:
    """The batch after each step in turn.

    Raises    ValueError: images that are not float32 `b c h w`, or targets that are not one row for each.
    """
    images, targets = batch.images, batch.targets
    if images.ndim != 4 or targets.ndim != 2 or len(images) != len(targets) or images.dtype != torch.float32:
        got = f"{images.dtype} {tuple(images.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"expected float32 images b c h w in [0, 1] and targets b k, got {got}")
    for step in steps:
        batch = step(batch, generator)
    return batch


def expect(step: Augmentation, **ranges: tuple[float, float]) -> None:
    """Refuse a step with a value that is no number in its range, the ends included."""
    for name, (low, high) in ranges.items():
        value = getattr(step, name)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{type(step).__name__}({name}={value!r}): expected a number from {low} to {high}")


def expect_span(step: Augmentation, name: str, low: float, high: float) -> None:
    """Refuse a step with a value that is no tuple of two numbers in that range, the lower one first."""
    value = getattr(step, name)
    pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, int | float) for end in value)
    if not (pair and low <= value[0] <= value[1] <= high):
        raise ValueError(f"{type(step).__name__}({name}={value!r}): expected (low, high), two numbers from {low} to {high}")


def whole(value: object, least: int = 1) -> bool:
    """Whether that is a whole number, and no less."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def height_width(size: object) -> tuple[int, int] | None:
    """Height and width in pixels of a size, which is a side or both; None of anything else."""
    pair = (size, size) if isinstance(size, int) else size
    return tuple(pair) if isinstance(pair, tuple) and len(pair) == 2 and all(map(whole, pair)) else None
