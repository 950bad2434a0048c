"""Augmentation: a batch in, a changed batch out, on the batch's own device and with another draw for each image.

An augmentation is any callable `(batch, generator) -> batch`. The ones here are frozen dataclasses of plain values, so a run
can be described, compared and rebuilt. Every parameter is drawn on the CPU, from the given generator and nothing else, then
moved: one seed gives the same pixels on every device, up to rounding. `unsafe_for_digits` is None, or a sentence that says
why a digit's label would no longer be true.

Shapes: b images, c channels, h x w pixels, k classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, pi, radians
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor


class Batch(NamedTuple):
    """Images `b c h w` with pixels in [0, 1], black = 0 (normalisation comes later), and targets `b k` whose rows sum to 1."""

    images: Tensor
    targets: Tensor


Augmentation = Callable[[Batch, Generator], Batch]


def apply(steps: Sequence[Augmentation], batch: Batch, generator: Generator) -> Batch:
    """The batch after each step in turn."""
    images, targets = batch
    if images.ndim != 4 or targets.ndim != 2 or len(images) != len(targets) or not images.is_floating_point():
        got = f"{images.dtype} {tuple(images.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"expected float images b c h w in [0, 1] and targets b k, got {got}")
    for step in steps:
        batch = step(batch, generator)
    return batch


@dataclass(frozen=True, kw_only=True)
class Warp:
    """Turn, stretch, slant, shift and crumple each image in one resampling, so that strokes are blurred only once.

    Angles are in degrees, lengths are fractions of the image's shorter side (8 x 8 and 28 x 28 look alike); each image draws
    uniformly between minus and plus the stated value.

    rotate    angle
    scale     0.15 is a zoom between 1/1.15 and 1.15, uniform in its logarithm, for width and height separately
    shear     angle by which upright strokes lean
    shift     length, for x and y separately
    elastic   length: root mean square of a smooth random displacement, for x and y separately
    smooth    length: standard deviation of the Gaussian that smooths it, at least 0.02
    fill      what is seen outside the image: "black", or the nearest "edge" pixel
    force     says that turning digits by more than 30 degrees is intended

    Paper     Simard et al., ICDAR 2003: elastic 34 and smooth 4 pixels there are about 0.05 and 0.14 here.
    Off       rotate, scale, shear, shift and elastic at 0.
    Departs   Displacements are drawn at control points 1.5 `smooth` apart, not at every pixel, and all pixels vary alike.
    """

    rotate: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    elastic: float = 0.0
    smooth: float = 0.14
    fill: Literal["black", "edge"] = "black"
    force: bool = False

    def __post_init__(self):
        _expect(self, rotate=(0, 180), scale=(0, 10), shear=(0, 80), shift=(0, 1), elastic=(0, 1), smooth=(0.02, 10))
        if self.fill not in ("black", "edge"):
            raise ValueError(f'Warp(fill={self.fill!r}): expected "black" or "edge"')

    @property
    def unsafe_for_digits(self) -> str | None:
        safe = self.rotate <= 30 or self.force
        return None if safe else f"Warp(rotate={self.rotate}) turns digits by more than 30 degrees: a 6 can become a 9"

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not (self.rotate or self.scale or self.shear or self.shift or self.elastic):
            return batch
        grid = self.affine(batch.images, generator)
        if self.elastic:
            grid = self.crumple(grid, generator)
        grid = rearrange(grid, "b xy h w -> b h w xy")
        padding = "zeros" if self.fill == "black" else "border"
        return batch._replace(images=F.grid_sample(batch.images, grid, padding_mode=padding, align_corners=False))

    def affine(self, images: Tensor, generator: Generator) -> Tensor:
        """Where each pixel is read from, `b xy h w` in grid_sample's coordinates; the content moves by the drawn shift."""
        b, _, h, w = images.shape
        side, to_grid = min(h, w), _to_grid(h, w)
        zoom, shift = log(1 + self.scale), 2 * self.shift  # the unit of length is half the shorter side
        ranges = torch.tensor([radians(self.rotate), radians(self.shear), zoom, zoom, shift, shift])[:, None]
        angle, lean, zoom_x, zoom_y, right, down = ranges * (2 * torch.rand(6, b, generator=generator) - 1)
        cos, sin, slant = angle.cos(), angle.sin(), lean.tan()
        along_x = torch.stack([cos, sin], dim=1) * zoom_x.exp()[:, None] * to_grid
        along_y = torch.stack([cos * slant - sin, sin * slant + cos], dim=1) * zoom_y.exp()[:, None] * to_grid
        x, y = _centres(w, side) - right[:, None], _centres(h, side) - down[:, None]
        # Sums of products, not a matrix product: that may run in TF32 or bf16, too coarse for a coordinate.
        from_x, from_y = along_x[:, :, None] * x[:, None], along_y[:, :, None] * y[:, None]
        return from_x.to(images.device)[:, :, None, :] + from_y.to(images.device)[:, :, :, None]

    def crumple(self, grid: Tensor, generator: Generator) -> Tensor:
        """The grid, displaced in place by random control points whose influence falls off smoothly along rows and columns."""
        b, _, h, w = grid.shape
        rows, columns = (_influence(length, min(h, w), self.smooth, grid.device) for length in (h, w))
        control = torch.randn(b, 2, rows.shape[1], columns.shape[1], generator=generator)
        control *= 2 * self.elastic * _to_grid(h, w)[:, None, None]
        across = (control.to(grid.device) @ columns.T).flatten(0, 1)
        return grid.flatten(0, 1).baddbmm_(rows.expand(2 * b, -1, -1), across).view_as(grid)


def _to_grid(h: int, w: int) -> Tensor:
    """What half the shorter side is in grid_sample's x and y."""
    return torch.tensor([min(h, w) / w, min(h, w) / h])


def _centres(length: int, side: int) -> Tensor:
    """Pixel centres along an axis, in halves of the shorter side."""
    return (2 * torch.arange(length) + 1 - length) / side


@lru_cache(maxsize=64)
def _influence(length: int, side: int, smooth: float, device: torch.device) -> Tensor:
    """How much each pixel along an axis follows each control point, `length n`: Gaussian, squares of a row sum to 1."""
    sigma, spacing = 2 * smooth, 3 * smooth
    n = ceil(2 * length / side / spacing) + 2
    points = spacing * (torch.arange(n) - (n - 1) / 2)
    weights = torch.exp(-((_centres(length, side)[:, None] - points) ** 2) / (2 * sigma**2))
    return (weights / weights.norm(dim=1, keepdim=True)).to(device)


@dataclass(frozen=True, kw_only=True)
class Flip:
    """Mirror some of the images left to right.

    Off       probability=0.
    """

    probability: float = 0.5
    force: bool = False

    def __post_init__(self):
        _expect(self, probability=(0, 1))

    @property
    def unsafe_for_digits(self) -> str | None:
        return None if self.force else "Flip mirrors digits: a mirrored 2, 3, 4 or 7 is no digit"

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        images = batch.images
        chosen = (torch.rand(len(images), 1, 1, 1, generator=generator) < self.probability).to(images.device)
        return batch._replace(images=torch.where(chosen, images.flip(-1), images))


@dataclass(frozen=True, kw_only=True)
class Erase:
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
        _expect(self, probability=(0, 1), aspect=(1, 100))
        if not (isinstance(self.area, tuple) and len(self.area) == 2 and 0 < self.area[0] <= self.area[1] <= 1):
            raise ValueError(f"Erase(area={self.area}): expected (low, high) with 0 < low <= high <= 1")

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        chance, size, shape = torch.rand(3, len(batch.images), generator=generator)
        area = self.area[0] + (self.area[1] - self.area[0]) * size
        longest = (-area.log()).clamp(max=log(self.aspect))
        tall = ((2 * shape - 1) * longest).exp()
        area = area * (chance < self.probability)
        inside = _rectangles((area * tall).sqrt(), (area / tall).sqrt(), batch.images, generator)
        return batch._replace(images=batch.images * (1 - inside))


@dataclass(frozen=True, kw_only=True)
class Mixup:
    """Blend some of the images with another of the batch, and the targets in the same proportion.

    Paper     arXiv:1710.09412.
    Off       probability=0.
    Departs   Each image draws its own proportion from Beta(alpha, alpha); the paper draws one for the batch.
    """

    alpha: float = 0.8
    probability: float = 1.0
    unsafe_for_digits = None

    def __post_init__(self):
        _expect(self, alpha=(0.001, 1000), probability=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        partner, kept = _partners(self, batch.images, generator)
        kept = kept[:, None].to(batch.images.device)
        images = torch.lerp(batch.images[partner], batch.images, kept[:, :, None, None])
        return Batch(images, torch.lerp(batch.targets[partner], batch.targets, kept))


@dataclass(frozen=True, kw_only=True)
class CutMix:
    """Paste a rectangle from another image of the batch into some of the images; targets are mixed by the area pasted.

    On a black background the rectangle may hold no ink and still change the target: for digits, Mixup is the truer one.

    Paper     arXiv:1905.04899.
    Off       probability=0.
    Departs   Each image draws its own proportion from Beta(alpha, alpha) and its own rectangle, which lies inside the image;
              the paper draws one of each for the batch and lets the border cut it off.
    """

    alpha: float = 1.0
    probability: float = 1.0
    unsafe_for_digits = None

    def __post_init__(self):
        _expect(self, alpha=(0.001, 1000), probability=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        partner, kept = _partners(self, batch.images, generator)
        side = (1 - kept).sqrt()
        inside = _rectangles(side, side, batch.images, generator)
        images = torch.lerp(batch.images, batch.images[partner], inside)
        return Batch(images, torch.lerp(batch.targets, batch.targets[partner], inside.mean(dim=(2, 3))))


@dataclass(frozen=True, kw_only=True)
class SmoothLabels:
    """Share `amount` of each target among all classes alike.

    Paper     arXiv:1512.00567.
    Off       amount=0.
    """

    amount: float = 0.1
    unsafe_for_digits = None

    def __post_init__(self):
        _expect(self, amount=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.amount:
            return batch
        classes = batch.targets.shape[1]
        return batch._replace(targets=(1 - self.amount) * batch.targets + self.amount / classes)


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Add Gaussian noise of standard deviation `std` to every pixel; what leaves [0, 1] is cut off, as a sensor does.

    Off       std=0.
    """

    std: float = 0.05
    unsafe_for_digits = None

    def __post_init__(self):
        _expect(self, std=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.std:
            return batch
        noise = torch.randn(batch.images.shape, generator=generator).to(batch.images.device)
        return batch._replace(images=torch.add(batch.images, noise, alpha=self.std).clamp_(0, 1))


@dataclass(frozen=True, kw_only=True)
class Jitter:
    """Change each image's brightness, contrast and saturation, by factors between 1 minus and 1 plus the stated value.

    Contrast is about the image's mean, saturation about each pixel's grey (ITU-R BT.601). What leaves [0, 1] is cut off.

    Off       all at 0.
    Raises    ValueError: saturation of images without red, green and blue.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    unsafe_for_digits = None

    def __post_init__(self):
        _expect(self, brightness=(0, 1), contrast=(0, 1), saturation=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not (self.brightness or self.contrast or self.saturation):
            return batch
        images = batch.images
        if self.saturation and images.shape[1] != 3:
            raise ValueError(f"Jitter(saturation={self.saturation}) needs 3 channels, got {images.shape[1]}: set saturation=0")
        ranges = torch.tensor([self.brightness, self.contrast, self.saturation])[:, None]
        factors = 1 + ranges * (2 * torch.rand(3, len(images), generator=generator) - 1)
        brightness, contrast, saturation = rearrange(factors.to(images.device), "factor b -> factor b 1 1 1")
        images = images * brightness
        images = torch.lerp(images.mean(dim=(1, 2, 3), keepdim=True), images, contrast)
        if self.saturation:
            grey = 0.299 * images[:, 0:1] + 0.587 * images[:, 1:2] + 0.114 * images[:, 2:3]
            images = torch.lerp(grey, images, saturation)
        return batch._replace(images=images.clamp(0, 1))


def digits(strength: float = 1.0) -> tuple[Augmentation, ...]:
    """Strong, yet safe for handwritten digits: a reader still sees what was written. Strength goes from 0 (off) to 1.5."""
    if not 0 <= strength <= 1.5:
        raise ValueError(f"digits(strength={strength}): expected 0 to 1.5, beyond which digits can no longer be read")
    return (
        Warp(
            rotate=15 * strength,
            scale=0.15 * strength,
            shear=12 * strength,
            shift=0.07 * strength,
            elastic=0.04 * strength,
        ),
    )


def photos(strength: float = 1.0) -> tuple[Augmentation, ...]:
    """The usual set for small photos, grey or in colour: mirror, shift, light, erase, mix. Strength goes from 0 (off) to 2."""
    if not 0 <= strength <= 2:
        raise ValueError(f"photos(strength={strength}): expected 0 to 2")
    return (
        Flip(probability=0.5 * min(strength, 1)),
        Warp(shift=0.125 * strength, scale=0.1 * strength),
        Jitter(brightness=0.2 * strength, contrast=0.2 * strength),
        Erase(probability=0.25 * strength),
        Mixup(probability=0.4 * strength),
        CutMix(probability=0.4 * strength),
    )


def _expect(step: Augmentation, **ranges: tuple[float, float]) -> None:
    for name, (low, high) in ranges.items():
        value = getattr(step, name)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{type(step).__name__}({name}={value!r}): expected a number from {low} to {high}")


def _partners(step: Mixup | CutMix, images: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """The image each is mixed with (the next in a random ring), and the proportion kept: from Beta(alpha, alpha), or all.

    torch's own Beta takes no generator. This one is exact: Bailey's polar method for Student's t with 2 alpha degrees of
    freedom, folded into [0, 1] (Devroye, Random variate generation in one line of code, 1996).
    """
    ring = torch.randperm(len(images), generator=generator)
    partner = torch.empty_like(ring).scatter_(0, ring, ring.roll(1))
    radius, turn, chance = torch.rand(3, len(images), generator=generator, dtype=torch.float64)
    t = (radius ** (-1 / step.alpha) - 1).sqrt() * (2 * pi * turn).cos()
    kept = (1 + t.atan().sin()) / 2
    return partner.to(images.device), torch.where(chance < step.probability, kept, 1.0).float()


def _rectangles(height: Tensor, width: Tensor, images: Tensor, generator: Generator) -> Tensor:
    """1 inside a rectangle per image and 0 outside, `b 1 h w`: sides as fractions of the image's, placed anywhere inside it."""

    def span(fraction: Tensor, length: int) -> Tensor:
        size = (fraction * length).round()[:, None]
        start = (torch.rand(len(size), 1, generator=generator) * (length - size + 1)).floor()
        pixel = torch.arange(length)
        return ((pixel >= start) & (pixel < start + size)).to(images)

    h, w = images.shape[2:]
    return span(height, h)[:, None, :, None] * span(width, w)[:, None, None, :]
