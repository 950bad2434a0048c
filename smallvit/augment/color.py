"""Jitter, Gray, Solarize, Blur: what light, colour and lens do to a picture."""

from collections.abc import Callable
from dataclasses import dataclass
from math import tau

import torch
from einops import rearrange
from torch import Generator, Tensor

from .batch import Batch, expect, expect_span

# A pixel is its grey and its colour, GREY x + COLOUR x. QUARTER x is its colour after a quarter turn, red towards green.
GREY = torch.tensor([0.299, 0.587, 0.114]).expand(3, 3)  # ITU-R BT.601
COLOUR = torch.eye(3) - GREY
QUARTER = COLOUR @ torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / 3**0.5


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Change some images' brightness, contrast and saturation, by factors between 1 minus and 1 plus the stated value, and hue.

    Contrast is about the image's mean, saturation about each pixel's grey (ITU-R BT.601). Hue turns the colours by up to the
    stated part of a full turn either way; grey stays grey, and every pixel keeps its luma. What leaves [0, 1] is cut off, once.

    Off       all four at 0, or probability=0.
    Departs   In this order and cut off once, where torchvision's ColorJitter draws an order and cuts off after each. Its hue is
              HSV's: the angles are nearly the same, but there a pixel's luma changes.
    Raises    ValueError: saturation or hue of images without red, green and blue.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    probability: float = 1.0
    unsafe_for_digits = None

    def __post_init__(self):
        expect(self, brightness=(0, 1), contrast=(0, 1), saturation=(0, 1), hue=(0, 0.5), probability=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability or not (self.brightness or self.contrast or self.saturation or self.hue):
            return batch
        images = batch.images
        for name in ("saturation", "hue"):
            if value := getattr(self, name):
                _in_colour(images, f"Jitter({name}={value})", f"set {name}=0")
        ranges = torch.tensor([self.brightness, self.contrast, self.saturation, self.hue])[: 4 if self.hue else 3, None]
        change = ranges * (2 * torch.rand(len(ranges), len(images), generator=generator) - 1)
        if self.probability < 1:
            change = change * (torch.rand(len(images), generator=generator) < self.probability)
        brightness, contrast, saturation = rearrange(1 + change[:3], "factor b -> factor b 1 1")
        if self.hue:  # all at once: a matrix for each image, and its mean
            angle = tau * change[3, :, None, None]
            mix = contrast * brightness * (GREY + saturation * (angle.cos() * COLOUR + angle.sin() * QUARTER))
            mean = images.mean(dim=(1, 2, 3))[:, None, None] * ((1 - contrast) * brightness).to(images.device)
            images = torch.einsum("bij, bjhw -> bihw", mix.to(images), images)
            return batch._replace(images=images.add_(mean[..., None]).clamp_(0, 1))
        brightness, contrast, saturation = (factor[:, None].to(images.device) for factor in (brightness, contrast, saturation))
        images = images * brightness
        images = torch.lerp(images.mean(dim=(1, 2, 3), keepdim=True), images, contrast)
        if self.saturation:
            images = torch.lerp(_grey(images), images, saturation)
        return batch._replace(images=images.clamp(0, 1))


@dataclass(frozen=True, kw_only=True)
class Gray:
    """Take the colour out of some of the images: red, green and blue become their grey (ITU-R BT.601).

    Off       probability=0.
    Raises    ValueError: images without red, green and blue.
    """

    probability: float = 0.2
    unsafe_for_digits = None

    def __post_init__(self):
        expect(self, probability=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        _in_colour(batch.images, f"Gray(probability={self.probability})", "leave it out")
        return _some(batch, self.probability, generator, lambda given, _: _grey(given).repeat(1, 3, 1, 1))


@dataclass(frozen=True, kw_only=True)
class Solarize:
    """Invert what is at least as bright as `threshold` in some of the images, as a film does that sees too much light.

    Off       probability=0.
    """

    threshold: float = 0.5
    probability: float = 0.2
    force: bool = False

    def __post_init__(self):
        expect(self, threshold=(0, 1), probability=(0, 1))

    @property
    def unsafe_for_digits(self) -> str | None:
        return None if self.force else "Solarize turns the ink of digits black: a stroke becomes two thin ones"

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch

        def solarized(given: Tensor, _) -> Tensor:
            return (given - (given >= self.threshold).to(given)).abs()  # |x - 1| or |x|: much faster than torch.where

        return _some(batch, self.probability, generator, solarized)


@dataclass(frozen=True, kw_only=True)
class Blur:
    """Blur some of the images with a Gaussian; each draws its own standard deviation uniformly between the two of `sigma`.

    As all lengths here `sigma` is a fraction of the image's shorter side. The radius of PIL's GaussianBlur and torchvision's
    sigma are in pixels: divide by the side. 0.1 to 2 pixels, usual whatever the size, are (0.003, 0.06) at 32 pixels, the
    default, and (0.0005, 0.009) at DINO's 224. At the border only the pixels that there are count, so it does not darken.

    Off       probability=0, or sigma=(0, 0).
    """

    sigma: tuple[float, float] = (0.003, 0.06)
    probability: float = 0.5
    unsafe_for_digits = None

    def __post_init__(self):
        expect(self, probability=(0, 1))
        expect_span(self, "sigma", 0, 0.5)

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability or self.sigma == (0, 0):
            return batch
        images = batch.images
        low, high = (length * min(images.shape[2:]) for length in self.sigma)
        sigma = low + (high - low) * torch.rand(len(images), generator=generator).to(images)

        def blurred(given: Tensor, chosen: Tensor) -> Tensor:
            weights = {length: _gauss(length, sigma[chosen]) for length in set(given.shape[2:])}
            rows, columns = (weights[length] for length in given.shape[2:])
            return rows[:, None] @ (given.flatten(1, 2) @ columns.mT.contiguous()).view_as(given)

        return _some(batch, self.probability, generator, blurred)


def _some(batch: Batch, probability: float, generator: Generator, change: Callable[[Tensor, Tensor], Tensor]) -> Batch:
    """The batch with some of its images changed, each with that probability; `change` is given them, and their numbers."""
    images = batch.images
    chosen = (torch.rand(len(images), generator=generator) < probability).nonzero()[:, 0].to(images.device)
    if len(chosen) == len(images):
        return batch._replace(images=change(images, chosen))
    return batch._replace(images=images.index_copy(0, chosen, change(images[chosen], chosen)))


def _grey(images: Tensor) -> Tensor:
    return 0.299 * images[:, 0:1] + 0.587 * images[:, 1:2] + 0.114 * images[:, 2:3]


def _in_colour(images: Tensor, step: str, advice: str):
    if images.shape[1] != 3:
        raise ValueError(f"{step} needs 3 channels, got {images.shape[1]}: {advice}")


def _gauss(length: int, sigma: Tensor) -> Tensor:
    """How much of each pixel along an axis goes into each: `b length length`, rows sum to 1."""
    at = torch.arange(length, device=sigma.device)
    apart = (at[:, None] - at).square()
    logits = -apart / (2 * sigma.clamp(min=1e-3).square()[:, None, None])
    return torch.softmax(logits.clamp(min=-30), dim=-1)  # products with smaller numbers still are several times as slow
