"""Transforms of color, brightness and sharpness: Jitter, Gray, Solarize and Blur."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import tau

import torch
from torch import Generator, Tensor

from .batch import ON_CPU, Batch, ChosenTransform, Random, Transform, check_interval, check_range, symmetric_uniform, upload
from .kernels import KERNELS, change_chosen, to_gray

# Matrices for an RGB pixel x. GRAY x: its gray value (ITU-R BT.601), three times. CHROMA x: the rest, x - GRAY x.
# QUARTER_TURN x: the chroma, rotated by 90 degrees from red towards green.
GRAY = torch.tensor([0.299, 0.587, 0.114], **ON_CPU).expand(3, 3)
CHROMA = torch.eye(3, **ON_CPU) - GRAY
QUARTER_TURN = CHROMA @ torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]], **ON_CPU) / 3**0.5


@dataclass(frozen=True, kw_only=True)
class Jitter(Transform):
    """A transform that randomly changes brightness, contrast, saturation and hue of each image, like torchvision's ColorJitter.

    probability   share of the images that are changed
    brightness, contrast, saturation   each is multiplied by a factor drawn uniformly from 1 - value to 1 + value. Contrast is
                  relative to the mean of the image, saturation to the gray value of each pixel (ITU-R BT.601)
    hue           colors are rotated by at most this part of a full turn, in either direction; gray pixels stay as they are, and
                  every pixel keeps its gray value

    Pixels are clipped to [0, 1] once, at the end.

    Off       all four at 0, or probability=0.
    Departs   The order is fixed and pixels are clipped once; ColorJitter draws an order and clips after each change.
              ColorJitter's hue is that of HSV: the angles are nearly the same, but the gray value of a pixel changes. Its
              contrast is relative to the mean of the gray values, here to the mean of all channels.
    Raises    ValueError for saturation or hue on images that do not have 3 channels.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    probability: float = 1.0
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, brightness=(0, 1), contrast=(0, 1), saturation=(0, 1), hue=(0, 0.5), probability=(0, 1))

    @property
    def off(self) -> bool:
        return not self.probability or not (self.brightness or self.contrast or self.saturation or self.hue)

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        options = [self.brightness, self.contrast, self.saturation, self.hue]
        ranges = torch.tensor(options, **ON_CPU)[: 4 if self.hue else 3, None]
        change = ranges * symmetric_uniform(len(ranges), shape[0], generator=generator)
        if self.probability < 1:
            change = change * (torch.rand(shape[0], generator=generator, **ON_CPU) < self.probability)
        return {"change": change.T}

    def change(self, batch: Batch, random: Random) -> Batch:
        images, change = batch.images, random["change"].T
        for name in ("saturation", "hue"):
            if value := getattr(self, name):
                _check_rgb(images, f"Jitter({name}={value})", f"set {name}=0, or color=False in photo_crops and strong_photos")
        brightness, contrast, saturation = (1 + change[:3])[:, :, None, None]
        if self.hue:  # all four changes at once: one 3 x 3 matrix for each image, and a constant for the contrast
            angle = tau * change[3, :, None, None]
            mix = contrast * brightness * (GRAY + saturation * (angle.cos() * CHROMA + angle.sin() * QUARTER_TURN))
            mean = images.mean(dim=(1, 2, 3))[:, None, None] * upload((1 - contrast) * brightness, images.device)
            return batch._replace(images=KERNELS.get().recolor(images, upload(mix, images.device), mean))
        factors = (brightness, contrast, saturation)
        brightness, contrast, saturation = (upload(factor[:, None], images.device) for factor in factors)
        images = images * brightness
        images = torch.lerp(images.mean(dim=(1, 2, 3), keepdim=True), images, contrast)
        if self.saturation:
            images = torch.lerp(to_gray(images), images, saturation)
        return batch._replace(images=images.clamp(0, 1))


@dataclass(frozen=True, kw_only=True)
class Gray(ChosenTransform):
    """A transform that converts randomly chosen RGB images to gray. A gray image still has 3 channels, which are equal. The
    option `probability` is the probability for each image.

    The gray value of a pixel has the weights of ITU-R BT.601.

    Off       probability=0.
    Raises    ValueError for images that do not have 3 channels.
    """

    probability: float = 0.2
    in_place = True
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, probability=(0, 1))

    def change(self, batch: Batch, random: Random) -> Batch:
        _check_rgb(batch.images, f"Gray(probability={self.probability})", "leave it out")
        KERNELS.get().gray(batch.images, _chosen(batch, random))
        return batch


@dataclass(frozen=True, kw_only=True)
class Solarize(ChosenTransform):
    """A transform that solarizes randomly chosen images: every pixel value x of at least `threshold` becomes 1 - x. The option
    `probability` is the probability for each image. Pixels are first clipped to [0, 1].

    `force=True` allows this transform for digits, where it is refused otherwise.

    Off       probability=0.
    """

    threshold: float = 0.5
    probability: float = 0.2
    force: bool = False
    in_place = True

    def __post_init__(self):
        check_range(self, threshold=(0, 1), probability=(0, 1))

    @property
    def unsafe_for_digits(self) -> str | None:
        return None if self.force else "Solarize turns the ink of digits black: a stroke becomes two thin ones"

    def change(self, batch: Batch, random: Random) -> Batch:
        def solarize(images: Tensor) -> Tensor:
            images = images.clamp_(0, 1)
            return (images - (images >= self.threshold).to(images)).abs_()  # |x - 1| or |x|: much faster than torch.where

        change_chosen(batch.images, _chosen(batch, random), solarize)
        return batch


@dataclass(frozen=True, kw_only=True)
class Blur(ChosenTransform):
    """A transform that blurs randomly chosen images by a Gaussian filter with a random standard deviation. The option
    `probability` is the probability for each image.

    The standard deviation is drawn uniformly from the interval `sigma`, in fractions of the shorter side of the image. PIL and
    torchvision give sigma in pixels: divide by the side. The usual 0.1 to 2 pixels are (0.003, 0.06) at 32 pixels, the
    default, and (0.0005, 0.009) at DINO's 224. Near the border only pixels inside the image are averaged, so the border does
    not get darker.

    Off       probability=0, or sigma=(0, 0).
    """

    sigma: tuple[float, float] = (0.003, 0.06)
    probability: float = 0.5
    in_place = True
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, probability=(0, 1))
        check_interval(self, "sigma", 0, 0.5)

    @property
    def off(self) -> bool:
        return super().off or self.sigma == (0, 0)

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        low, high = (length * min(shape[2:]) for length in self.sigma)
        sigma = low + (high - low) * torch.rand(shape[0], generator=generator, **ON_CPU)
        return {"sigma": sigma} | super().draw(shape, generator)

    def change(self, batch: Batch, random: Random) -> Batch:
        index = _chosen(batch, random)
        KERNELS.get().blur(batch.images, index, upload(random["sigma"], index.device)[index])
        return batch


def _chosen(batch: Batch, random: Random) -> Tensor:
    """Return the positions of the chosen images in the batch, on their device."""
    return upload(random["chosen"].nonzero()[:, 0], batch.images.device)


def _check_rgb(images: Tensor, transform: str, advice: str) -> None:
    """Raise ValueError unless the images have 3 channels. The error message contains the name of the `transform` and the text
    `advice`, which says what to do.
    """
    if images.shape[1] != 3:
        raise ValueError(f"{transform} needs 3 channels, got {images.shape[1]}: {advice}")
