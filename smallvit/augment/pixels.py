"""Transforms that make one simple change to the pixels: Flip, StrokeWidth, RandomErasing and Noise."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, log

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from .batch import ON_CPU, Batch, ChosenTransform, Random, Transform, check_interval, check_range, symmetric_uniform, upload


@dataclass(frozen=True, kw_only=True)
class Flip(ChosenTransform):
    """A transform that mirrors randomly chosen images left to right. The option `probability` is the probability for each
    image.

    `force=True` allows this transform for digits, where it is refused otherwise.

    Off       probability=0.
    """

    probability: float = 0.5
    force: bool = False

    def __post_init__(self):
        check_range(self, probability=(0, 1))

    @property
    def unsafe_for_digits(self) -> str | None:
        return None if self.force else "Flip mirrors digits: a mirrored 2, 3, 4 or 7 is no digit"

    def change(self, batch: Batch, random: Random) -> Batch:
        images = batch.images
        weight = upload(random["chosen"][:, None, None, None], images.device).to(images)  # 0 or 1
        return batch._replace(images=torch.lerp(images, images.flip(-1), weight))  # exact, and faster than torch.where


@dataclass(frozen=True, kw_only=True)
class StrokeWidth(ChosenTransform):
    """A transform that makes the strokes of characters thicker or thinner in randomly chosen images. The option `probability`
    is the probability for each image. It works for bright strokes on a dark background. For dark strokes, thicker and thinner
    are exchanged, and both are equally probable.

    width     largest change of the width of a stroke, as a fraction of the shorter side of the image. The change of each image
              is drawn uniformly from -width to width. At 28 pixels, 0.036 is one pixel: half a pixel on each side of a stroke.
              The width of a diagonal stroke changes up to 1.4 times as much

    Where each pixel gets the largest value of its 3x3 neighborhood, every edge moves outwards by one pixel (dilation); with the
    smallest value it moves inwards (erosion). For a part of a pixel, the image and the changed one are interpolated. A stroke
    of 1 or 2 pixels gets darker instead of thinner; it can vanish only with a change of 2 pixels, which at 28 pixels needs a
    `width` of 0.072 or more.

    Paper     arXiv:1809.10780 (Morpho-MNIST), which makes data sets with thin and thick digits.
    Off       probability=0, or width=0.
    Departs   The paper works on enlarged images, and changes each digit in proportion to its own stroke width. Here the change
              does not depend on the digit.
    """

    width: float = 0.04
    probability: float = 0.5
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, probability=(0, 1), width=(0, 0.15))  # above it, many digits vanish

    @property
    def off(self) -> bool:
        return super().off or not self.width

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        edge = 0.5 * self.width * min(shape[2:]) * symmetric_uniform(shape[0], generator=generator)  # in pixels
        return {"edge": edge * super().draw(shape, generator)["chosen"]}

    def change(self, batch: Batch, random: Random) -> Batch:
        edge = random["edge"][:, None, None, None]
        sign = upload(torch.where(edge < 0, -1, 1), batch.images.device)
        images = batch.images * sign  # the smallest value is the largest one of the negative image
        for pixel in range(ceil(edge.abs().max())):
            weight = upload((edge.abs() - pixel).clamp(0, 1), images.device).to(images)
            images = torch.lerp(images, _largest_nearby(images), weight)
        return batch._replace(images=images * sign)


@dataclass(frozen=True, kw_only=True)
class RandomErasing(Transform):
    """A transform that sets a random rectangle to black in randomly chosen images (random erasing, cutout). The option
    `probability` is the probability for each image.

    area      interval of the rectangle's area, as a fraction of the image's; drawn uniformly
    aspect    the rectangle's height / width, relative to the image's, is drawn log-uniformly from 1/aspect to aspect; the range
              is narrower for a rectangle that would not fit into the image

    Paper     arXiv:1708.04896 (Random Erasing); arXiv:1708.04552 (Cutout).
    Off       probability=0.
    Departs   The paper fills with noise, others with the mean color; black adds no new ink to a digit. The paper draws again
              until a rectangle fits.
    """

    area: tuple[float, float] = (0.02, 0.33)
    probability: float = 0.25
    aspect: float = 3.3
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, probability=(0, 1), aspect=(1, 100))
        check_interval(self, "area", 1e-6, 1)

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        chance, size, relative_aspect = torch.rand(3, shape[0], generator=generator, **ON_CPU)
        area = self.area[0] + (self.area[1] - self.area[0]) * size
        longest = (-area.log()).clamp(max=log(self.aspect))
        aspect = ((2 * relative_aspect - 1) * longest).exp()
        area = area * (chance < self.probability)
        return draw_rectangles((area * aspect).sqrt(), (area / aspect).sqrt(), generator)

    def change(self, batch: Batch, random: Random) -> Batch:
        return batch._replace(images=batch.images * (1 - rectangle_mask(random, batch.images)))


@dataclass(frozen=True, kw_only=True)
class Noise(Transform):
    """A transform that adds Gaussian noise to every pixel and clips the result to [0, 1]. The option `std` is the standard
    deviation of the noise.

    Off       std=0.
    """

    std: float = 0.05
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, std=(0, 1))

    @property
    def off(self) -> bool:
        return not self.std

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        return {"noise": torch.randn(*shape, generator=generator, **ON_CPU)}

    def change(self, batch: Batch, random: Random) -> Batch:
        noise = upload(random["noise"], batch.images.device)
        return batch._replace(images=torch.add(batch.images, noise, alpha=self.std).clamp_(0, 1))


def _largest_nearby(images: Tensor) -> Tensor:
    """Return images in which each pixel has the largest value of its 3x3 neighborhood."""
    x = F.pad(images, (1, 1, 1, 1), mode="replicate")
    x = torch.maximum(torch.maximum(x[..., :-2], x[..., 1:-1]), x[..., 2:])  # 20 times as fast as max_pool2d on a CPU
    return torch.maximum(torch.maximum(x[..., :-2, :], x[..., 1:-1, :]), x[..., 2:, :])


def draw_rectangles(height: Tensor, width: Tensor, generator: Generator) -> Random:
    """Draw the position of one rectangle in each image. Return its position and size along both axes. `height` and `width` hold
    the sides of each rectangle, as fractions of the sides of the image.
    """
    top, left = torch.rand(2, len(height), generator=generator, **ON_CPU)
    return {"height": height, "width": width, "top": top, "left": left}


def rectangle_mask(random: Random, images: Tensor) -> Tensor:
    """Return a mask (b, 1, h, w) with one rectangle in each image: 1 inside the rectangle, 0 elsewhere. `random` comes from
    `draw_rectangles`.
    """

    def span(fraction: Tensor, place: Tensor, length: int) -> Tensor:
        size = (fraction * length).round()[:, None]
        start = (place[:, None] * (length - size + 1)).floor()
        pixel = torch.arange(length, device="cpu")
        return upload((pixel >= start) & (pixel < start + size), images.device).to(images)

    rows = span(random["height"], random["top"], images.shape[2])
    columns = span(random["width"], random["left"], images.shape[3])
    return rows[:, None, :, None] * columns[:, None, None, :]
