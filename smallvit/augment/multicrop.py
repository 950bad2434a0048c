"""MultiCrop: what self-supervision compares, several looks at each image."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator

from .batch import Batch, height_width, whole
from .warp import Warp


@dataclass(frozen=True, kw_only=True)
class MultiCrop:
    """Look at each image several times: two global views and `local` smaller ones (multi-crop), each its own draw.

    first     steps that make the first global view
    second    steps that make the second; None for the same as the first, drawn anew
    small     steps that make a local view, such as `Warp(crop=(0.2, 0.5), size=16)`; the model resamples its positions
    local     how many local views; 0 leaves multi-crop out and changes nothing else

    The images of the batch stay as they are; its `views` are then the global ones together and the local ones together. Steps
    before it change the images that are looked at; steps after it leave the views alone.

    Paper     Caron et al. 2020 (SwAV), arXiv:2006.09882, section 3.3, for multi-crop.
    Raises    ValueError: fewer than 0 local views, local views without steps that make them, or global views of two sizes.
    """

    first: tuple[Callable, ...]
    second: tuple[Callable, ...] | None = None
    small: tuple[Callable, ...] = ()
    local: int = 0

    def __post_init__(self):
        for name in ("first", "second", "small"):
            steps = getattr(self, name)
            if not (isinstance(steps, tuple) and all(map(callable, steps))) and (name, steps) != ("second", None):
                raise ValueError(f"MultiCrop({name}={steps!r}): expected a tuple of steps, such as (Warp(crop=(0.4, 1.0)),)")
        if not whole(self.local, 0):
            raise ValueError(f"MultiCrop(local={self.local!r}): expected how many local views, 0 or more")
        if self.local and not self.small:
            raise ValueError(f"MultiCrop(local={self.local}) has no steps for them: expected small=(Warp(crop=..., size=...),)")

    @property
    def unsafe_for_digits(self) -> str | None:
        steps = (*self.first, *(self.second or ()), *self.small)
        return next((reason for step in steps if (reason := getattr(step, "unsafe_for_digits", None))), None)

    def table(self, image_size: int | tuple[int, int]) -> list[tuple[str, int, tuple[int, int]]]:
        """Name, number, and height and width of the views of an image of that size: a side, or height and width.

        Raises    ValueError: global views of two sizes, or a size that is none.
        """
        sides = height_width(image_size)
        if sides is None:
            raise ValueError(f"image_size is {image_size!r}; expected a side in pixels, or (height, width)")

        def size(steps: tuple[Callable, ...]) -> tuple[int, int]:
            at_the_end = sides
            for step in steps:
                at_the_end = step.sides(*at_the_end) if isinstance(step, Warp) else at_the_end
            return at_the_end

        first, second = size(self.first), size(self.first if self.second is None else self.second)
        if first != second:
            raise ValueError(f"the global views are {first} and {second} pixels; expected one size, give their Warps the same")
        return [("global", 2, first)] + [("local", self.local, size(self.small))] * (self.local > 0)

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        def look(steps: tuple[Callable, ...], times: int) -> torch.Tensor:
            if steps and isinstance(steps[0], Warp):  # it need not copy what it is to look at many times
                images, steps = steps[0].views(batch.images, times, generator), steps[1:]
            else:
                images = batch.images.repeat(times, 1, 1, 1)
            many = Batch(images, batch.targets.repeat(times, 1))
            for step in steps:
                many = step(many, generator)
            return many.images

        self.table(batch.images.shape[2:])
        two = (look(self.first, 2),) if self.second is None else (look(self.first, 1), look(self.second, 1))
        return batch._replace(views=(torch.cat(two), *([look(self.small, self.local)] if self.local else [])))
