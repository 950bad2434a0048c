"""MultiCrop: several views of each image, for self-supervised learning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Generator

from .batch import (
    Batch,
    Transform,
    changes_parts,
    check_batch,
    concatenate,
    height_width,
    is_whole_number,
    size_after,
    use_python_numbers,
)
from .pixels import Flip
from .warp import Warp, warp_together


@dataclass(frozen=True, kw_only=True)
class MultiCrop:
    """Multi-crop, a transform that makes several random views of each image for self-supervised learning. Two global views show
    most of the image. Smaller local views show small parts of the image; the option `local` is their number.

    first     transforms that make the first global view
    second    transforms that make the second global view; None: the same as `first`, with new random numbers
    small     transforms that make each local view, such as `(Warp(crop=(0.2, 0.5), size=16),)`
    local     number of local views; 0 makes the global views only

    The views are written to `batch.views`: the global views in one tensor, the local views in a second one. The images of the
    batch do not change. Transforms before MultiCrop change the images that the views are made of. Transforms after it do not
    change the views. The model must accept the size of the local views; smallvit's ViT resamples its positions.

    Random numbers are drawn in the order of the views: for the first global view, the second one, and the local views. Then all
    views are made. Transforms that do not come from smallvit draw their numbers when they are called, after all others. With
    several generators, the batch consists of as many parts of equal size, whose views are made at once: first all views of the
    first part, in the order above, then those of the second one, and so on.

    Paper     Caron et al. 2020 (SwAV), arXiv:2006.09882, section 3.3.
    Raises    ValueError if `local` is negative, if there are local views but no `small` transforms, or if the two global views
              differ in size.
    """

    first: tuple[Callable, ...]
    second: tuple[Callable, ...] | None = None
    small: tuple[Callable, ...] = ()
    local: int = 0

    def __post_init__(self):
        use_python_numbers(self)
        for name in ("first", "second", "small"):
            value = getattr(self, name)
            if not (isinstance(value, tuple) and all(map(callable, value))) and (name, value) != ("second", None):
                raise ValueError(f"MultiCrop({name}={value!r}): expected a tuple of transforms, such as (Warp(size=16),)")
        if not is_whole_number(self.local, 0):
            raise ValueError(f"MultiCrop(local={self.local!r}): expected the number of local views, 0 or more")
        if self.local and not self.small:
            raise ValueError(f"MultiCrop(local={self.local}) needs transforms for local views: set small=(Warp(size=...),)")

    @property
    def transforms(self) -> tuple[Callable, ...]:
        """All transforms of the views."""
        return (*self.first, *(self.second or ()), *self.small)

    @property
    def unsafe_for_digits(self) -> str | None:
        return next((reason for step in self.transforms if (reason := getattr(step, "unsafe_for_digits", None))), None)

    def table(self, image_size: int | tuple[int, int]) -> list[tuple[str, int, tuple[int, int]]]:
        """Return a list of the views that are made of an image. Each row is (name, number of views, (height, width) in pixels);
        the name is "global" or "local". `image_size` is the size of the original image.

        `image_size` is in pixels: one side, or (height, width). A transform of your own that changes the size of the images
        needs a method `output_size(height, width)`, which returns the new size, as `Warp` has it.

        Raises    ValueError if the two global views differ in size, or for an invalid size.
        """
        start = height_width(image_size)
        if start is None:
            raise ValueError(f"image_size is {image_size!r}; expected a side in pixels, or (height, width)")

        def size_of_view(transforms: tuple[Callable, ...]) -> tuple[int, int]:
            size = start
            for transform in transforms:
                size = size_after(transform, *size)
            return size

        first, second = size_of_view(self.first), size_of_view(self.first if self.second is None else self.second)
        if first != second:
            raise ValueError(f"the global views have {first} and {second} pixels; give the Warps of both the same size")
        return [("global", 2, first)] + [("local", self.local, size_of_view(self.small))] * (self.local > 0)

    def __call__(self, batch: Batch, *generators: Generator) -> Batch:
        check_batch("MultiCrop", batch, generators)
        if len(generators) > 1 and not all(map(changes_parts, self.transforms)):
            raise ValueError("MultiCrop got several generators and a transform that is not smallvit's; expected one generator")
        with torch.autocast(batch.images.device.type, enabled=False):  # pixels are not rounded to half precision
            return self._with_views(batch, generators)

    def _with_views(self, batch: Batch, generators: Sequence[Generator]) -> Batch:
        """Return the batch with its views."""
        b, c, h, w = batch.images.shape
        if not b:
            raise ValueError("MultiCrop got a batch without images; expected at least one")
        self.table((h, w))  # raises ValueError if the global views differ in size
        shape = (b // len(generators), c, h, w)
        drawn = zip((2, 1, 1, self.local), zip(*(self._draw(shape, generator) for generator in generators)))
        both, first, second, small = (_concatenate_parts(parts, count) for count, parts in drawn)
        generator = generators[0]  # of transforms that draw when they are called, which are refused with several generators
        views = _make_views(batch, [both, small] if self.local else [both], (2, self.local), generator)
        if first or second:
            both_images, both_targets = views[0].images, views[0].targets  # not chunk(2), whose parts must not be overwritten
            halves = [Batch(both_images[part], both_targets[part]) for part in (slice(b), slice(b, None))]
            changed = [_change(half, drawn, generator) for half, drawn in zip(halves, (first, second))]
            if any(new.images is not old.images for new, old in zip(changed, halves)):  # otherwise changed in place
                views[0] = Batch(torch.cat([half.images for half in changed]), views[0].targets)
        images = [part.images for part in views]
        if len(generators) > 1:  # b: the images of a part
            sizes = {"parts": len(generators), "b": shape[0]}
            images = [rearrange(each, "(views parts b) c h w -> (parts views b) c h w", **sizes) for each in images]
        return batch._replace(views=tuple(images))

    def _draw(self, shape: Sequence[int], generator: Generator) -> "list[Drawn]":
        """Return the transforms of both global views together, those that only the first and only the second one has after
        them, and those of the local views, with random numbers for images of a `shape` (batch, channels, height, width).
        """
        b, *image = shape
        if self.second is None:
            both, first, second = _draw_all(self.first, (2 * b, *image), generator), [], []
        else:
            first, second = (_draw_all(transforms, shape, generator) for transforms in (self.first, self.second))
            both = _join(first, second)
            first, second = first[len(both) :], second[len(both) :]
        small = _draw_all(self.small, (self.local * b, *image), generator) if self.local else []
        return [both, first, second, small]


Drawn = list[tuple[Callable, Any]]
"""Transforms, each with its random numbers: a `Random`, or None for one that draws when it is called."""


def _draw_all(transforms: Sequence[Callable], shape: Sequence[int], generator: Generator) -> Drawn:
    """Return the transforms with random numbers for images of a `shape` (batch, channels, height, width). Transforms that are
    off are left out. A callable that is no `Transform` may change the size of the images, and may return images that must not
    be overwritten. So it and all after it draw when they are called.
    """
    drawn: Drawn = []
    for transform in transforms:
        if not isinstance(transform, Transform) or (drawn and drawn[-1][1] is None):
            drawn.append((transform, None))
        elif not transform.off:
            drawn.append((transform, transform.draw(shape, generator)))
        shape = (*shape[:2], *size_after(transform, *shape[2:]))
    return drawn


def _concatenate_parts(parts: Sequence[Drawn], views: int) -> Drawn:
    """Return the transforms of all parts of a batch, which are the same in all parts, with the random numbers of all parts:
    those for the first of the `views` of all images come first, then those for the second ones, and so on.
    """
    if len(parts) == 1:
        return parts[0]
    joined: Drawn = []
    for drawn in zip(*parts):
        by_view = [{name: numbers.unflatten(0, (views, -1)) for name, numbers in random.items()} for _, random in drawn]
        random = {name: torch.cat([own[name] for own in by_view], dim=1).flatten(0, 1) for name in by_view[0]}
        joined.append((drawn[0][0], random))
    return joined


def _join(first: Drawn, second: Drawn) -> Drawn:
    """Return the transforms with which both lists begin, with the random numbers of both."""
    joined: Drawn = []
    for (transform, one), (other, two) in zip(first, second):
        if transform != other or one is None or two is None:
            break
        joined.append((transform, concatenate([one, two])))
    return joined


def _make_views(batch: Batch, parts: Sequence[Drawn], counts: Sequence[int], generator: Generator) -> list[Batch]:
    """Return a batch of views for each of the `parts`. `counts` says how many views of each image a part makes."""
    if all(drawn and isinstance(drawn[0][0], Warp) for drawn in parts):  # a leading Warp reads the images without copying them
        parts = [_mirror_in_warp(drawn) for drawn in parts]
        images = warp_together(batch.images, *zip(*(drawn[0] for drawn in parts)))
        parts = [drawn[1:] for drawn in parts]
    else:
        images = [batch.images.repeat(count, 1, 1, 1) for count in counts]
    targets = [batch.targets.expand(count, -1, -1).flatten(0, 1) for count in counts]  # faster than repeat
    return [_change(Batch(*views), drawn, generator) for views, drawn in zip(zip(images, targets), parts)]


def _mirror_in_warp(drawn: Drawn) -> Drawn:
    """Return the drawn transforms without a Flip that follows the leading Warp, if the Warp can mirror the images as well."""
    (warp, random), *rest = drawn
    if warp.can_mirror and rest and isinstance(rest[0][0], Flip):
        (_, flip), *rest = rest
        return [(warp, random | {"mirrored": flip["chosen"]}), *rest]
    return drawn


def _change(batch: Batch, drawn: Drawn, generator: Generator) -> Batch:
    """Return the batch after all drawn transforms, which may overwrite its images."""
    for transform, random in drawn:
        batch = transform(batch, generator) if random is None else transform.change(batch, random)
    return batch
