"""MultiCrop: several views of each image, for self-supervised learning."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from .batch import Batch, height_width, is_whole_number
from .warp import Warp


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

    Paper     Caron et al. 2020 (SwAV), arXiv:2006.09882, section 3.3.
    Raises    ValueError if `local` is negative, if there are local views but no `small` transforms, or if the two global views
              differ in size.
    """

    first: tuple[Callable, ...]
    second: tuple[Callable, ...] | None = None
    small: tuple[Callable, ...] = ()
    local: int = 0

    def __post_init__(self):
        for name in ("first", "second", "small"):
            value = getattr(self, name)
            if not (isinstance(value, tuple) and all(map(callable, value))) and (name, value) != ("second", None):
                raise ValueError(f"MultiCrop({name}={value!r}): expected a tuple of transforms, such as (Warp(size=16),)")
        if not is_whole_number(self.local, 0):
            raise ValueError(f"MultiCrop(local={self.local!r}): expected the number of local views, 0 or more")
        if self.local and not self.small:
            raise ValueError(f"MultiCrop(local={self.local}) needs transforms for local views: set small=(Warp(size=...),)")

    @property
    def unsafe_for_digits(self) -> str | None:
        transforms = (*self.first, *(self.second or ()), *self.small)
        return next((reason for step in transforms if (reason := getattr(step, "unsafe_for_digits", None))), None)

    def table(self, image_size: int | tuple[int, int]) -> list[tuple[str, int, tuple[int, int]]]:
        """Return a list of the views that are made of an image. Each row is (name, number of views, (height, width) in pixels);
        the name is "global" or "local". `image_size` is the size of the original image.

        `image_size` is in pixels: one side, or (height, width).

        Raises    ValueError if the two global views differ in size, or for an invalid size.
        """
        start = height_width(image_size)
        if start is None:
            raise ValueError(f"image_size is {image_size!r}; expected a side in pixels, or (height, width)")

        def size_after(transforms: tuple[Callable, ...]) -> tuple[int, int]:
            size = start
            for transform in transforms:
                size = transform.output_size(*size) if isinstance(transform, Warp) else size
            return size

        first, second = size_after(self.first), size_after(self.first if self.second is None else self.second)
        if first != second:
            raise ValueError(f"the global views have {first} and {second} pixels; give the Warps of both the same size")
        return [("global", 2, first)] + [("local", self.local, size_after(self.small))] * (self.local > 0)

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        def make_views(transforms: tuple[Callable, ...], count: int) -> Tensor:
            if transforms and isinstance(transforms[0], Warp):  # a leading Warp reads the images without copying them
                images, transforms = transforms[0].views(batch.images, count, generator), transforms[1:]
            else:
                images = batch.images.repeat(count, 1, 1, 1)
            views = Batch(images, batch.targets.repeat(count, 1))
            for transform in transforms:
                views = transform(views, generator)
            return views.images

        h, w = batch.images.shape[2:]
        self.table((h, w))  # raises ValueError if the global views differ in size
        pair = [make_views(self.first, 2)] if self.second is None else [make_views(self.first, 1), make_views(self.second, 1)]
        return batch._replace(views=(torch.cat(pair), *([make_views(self.small, self.local)] if self.local else [])))
