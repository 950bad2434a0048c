"""Flip, RandomErasing, Noise: one plain change to the pixels."""

from dataclasses import dataclass
from math import log

import torch
from torch import Generator, Tensor

from .batch import Batch, expect, expect_span


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Mirror some of the images left to right.

    Off       probability=0.
    """

    probability: float = 0.5
    force: bool = False

    def __post_init__(self):
        expect(self, probability=(0, 1))

    @property
    def unsafe_for_digits(self) -> str | None:
        return None if self.force else "Flip mirrors digits: a mirrored 2, 3, 4 or 7 is no digit"

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        images = batch.images
        chosen = (torch.rand(len(images), 1, 1, 1, generator=generator) < self.probability).to(images)
        return batch._replace(
            images=torch.lerp(images, images.flip(-1), chosen)
        )  # by 0 or 1: exact, and faster than torch.where


@dataclass(frozen=True, kw_only=True)
class RandomErasing:
    """Black out a rectangle in some of the images.

    area      fraction of the image, drawn uniformly between the two
    aspect    height over width, relative to the image's: log-uniform between 1/aspect and aspect, as far as it fits

    Paper     arXiv:1708.04896 (Random Erasing); arXiv:1708.04552 (Cutout).
    Off       probability=0.
    Departs   Black, so that no new ink appears: the paper fills with noise, others with a mean colour. Always fits at once.
    """

    area: tuple[float, float] = (0.02, 0.33)
    probability: float = 0.25
    aspect: float = 3.3
    unsafe_for_digits = None

    def __post_init__(self):
        expect(self, probability=(0, 1), aspect=(1, 100))
        expect_span(self, "area", 1e-6, 1)

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        chance, size, shape = torch.rand(3, len(batch.images), generator=generator)
        area = self.area[0] + (self.area[1] - self.area[0]) * size
        longest = (-area.log()).clamp(max=log(self.aspect))
        tall = ((2 * shape - 1) * longest).exp()
        area = area * (chance < self.probability)
        inside = rectangles((area * tall).sqrt(), (area / tall).sqrt(), batch.images, generator)
        return batch._replace(images=batch.images * (1 - inside))


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Add Gaussian noise of standard deviation `std` to every pixel; what leaves [0, 1] is cut off, as a sensor does.

    Off       std=0.
    """

    std: float = 0.05
    unsafe_for_digits = None

    def __post_init__(self):
        expect(self, std=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.std:
            return batch
        noise = torch.randn(batch.images.shape, generator=generator).to(batch.images.device)
        return batch._replace(images=torch.add(batch.images, noise, alpha=self.std).clamp_(0, 1))


def rectangles(height: Tensor, width: Tensor, images: Tensor, generator: Generator) -> Tensor:
    """1 inside a rectangle per image and 0 outside, `b 1 h w`: sides as fractions of the image's, placed anywhere inside it."""

    def span(fraction: Tensor, length: int) -> Tensor:
        size = (fraction * length).round()[:, None]
        start = (torch.rand(len(size), 1, generator=generator) * (length - size + 1)).floor()
        pixel = torch.arange(length)
        return ((pixel >= start) & (pixel < start + size)).to(images)

    h, w = images.shape[2:]
    return span(height, h)[:, None, :, None] * span(width, w)[:, None, None, :]
