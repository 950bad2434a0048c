"""Warp: moves the pixels, all ways at once."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, radians
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor

from .batch import Batch, expect, expect_span, height_width


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
    crop      area of the window that is looked at, as a fraction of the image's, uniform between the two; all lengths above are
              then the window's, and it is turned about its own middle
    aspect    width over height of that window, relative to the image's: log-uniform from 1/aspect to aspect, as far as it fits
    aim       where the window lies: "anywhere" inside the image, or on "ink": about a pixel drawn by its brightness. Then
              nothing is blank: a view with nothing half as bright as its image's brightest pixel is moved to that pixel
    size      side of the result in pixels, or (height, width); None keeps the image's
    fill      what is seen outside the image: "black", or the nearest "edge" pixel
    force     says that turning digits by more than 30 degrees is intended

    Paper     Simard et al., ICDAR 2003: elastic 34 and smooth 4 pixels there are about 0.05 and 0.14 here. The window is that
              of Szegedy et al. 2015 (arXiv:1409.4842), RandomResizedCrop elsewhere.
    Off       rotate, scale, shear, shift and elastic at 0, crop at (1, 1) and size at None.
    Departs   Displacements are drawn at control points 1.5 `smooth` apart, not at every pixel, and all pixels vary alike.
              Bilinear, where DINO's RandomResizedCrop is bicubic and smooths what it shrinks. The window always fits at once,
              where that one tries again, so that its largest are rarer than here.
    """

    rotate: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    elastic: float = 0.0
    smooth: float = 0.14
    crop: tuple[float, float] = (1.0, 1.0)
    aspect: float = 4 / 3
    aim: Literal["anywhere", "ink"] = "anywhere"
    size: int | tuple[int, int] | None = None
    fill: Literal["black", "edge"] = "black"
    force: bool = False

    def __post_init__(self):
        expect(self, rotate=(0, 180), scale=(0, 10), shear=(0, 80), shift=(0, 1), elastic=(0, 1), smooth=(0.02, 10))
        expect(self, aspect=(1, 100))
        for name, allowed in (("fill", ("black", "edge")), ("aim", ("anywhere", "ink"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f'Warp({name}={getattr(self, name)!r}): expected "{allowed[0]}" or "{allowed[1]}"')
        expect_span(self, "crop", 1e-6, 1)
        if self.size is not None and height_width(self.size) is None:
            raise ValueError(f"Warp(size={self.size!r}): expected a side in pixels, (height, width), or None")

    @property
    def unsafe_for_digits(self) -> str | None:
        safe = self.rotate <= 30 or self.force
        return None if safe else f"Warp(rotate={self.rotate}) turns digits by more than 30 degrees: a 6 can become a 9"

    @property
    def off(self) -> bool:
        moves = self.rotate or self.scale or self.shear or self.shift or self.elastic
        return not moves and self.crop == (1, 1) and self.size is None

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        return batch if self.off else batch._replace(images=self.views(batch.images, 1, generator))

    def views(self, images: Tensor, times: int, generator: Generator) -> Tensor:
        """`times` views of each image, each its own draw, view after view: `(times b) c h w`."""
        if self.off:
            return images.repeat(times, 1, 1, 1)
        middle, part = self.window(images, times, generator)
        grid = self.affine(images, middle, part, generator)
        if self.elastic:
            grid = self.crumple(grid, images, part, generator)
        looks = [self.look(images, view) for view in grid.chunk(times)]
        seen = torch.cat(looks) if times > 1 else looks[0]
        return self.onto_ink(seen, images, grid) if self.aim == "ink" else seen

    def look(self, images: Tensor, grid: Tensor) -> Tensor:
        """Each image, read where the grid says."""
        padding = "zeros" if self.fill == "black" else "border"
        return F.grid_sample(images, rearrange(grid, "b xy h w -> b h w xy"), padding_mode=padding, align_corners=False)

    def onto_ink(self, seen: Tensor, images: Tensor, grid: Tensor) -> Tensor:
        """What was seen; where that is blank, the same grid with its middle on the brightest pixel is looked through."""
        brightest = images.flatten(1).amax(1).repeat(len(seen) // len(images))
        blank = (seen.flatten(1).amax(1) < brightest / 2).nonzero()[:, 0]
        if len(blank):
            of, grid = images[blank % len(images)], grid[blank]
            ink = _place(of.amax(1).flatten(1).argmax(1), of).T
            away = ink - grid[:, :, grid.shape[2] // 2, grid.shape[3] // 2]
            seen[blank] = self.look(of, grid + away[:, :, None, None])
        return seen

    def sides(self, h: int, w: int) -> tuple[int, int]:
        """Height and width of the result for an image of that size."""
        return height_width(self.size) or (h, w)

    def window(self, images: Tensor, times: int, generator: Generator) -> tuple[Tensor, Tensor]:
        """Middle, in grid_sample's coordinates, and width and height, as fractions of the image's: `xy b` each."""
        b = times * len(images)
        if self.crop == (1, 1):
            return images.new_zeros(2, b), images.new_ones(2, b)
        size, shape, at_x, at_y = torch.rand(4, b, generator=generator).to(images.device)
        area = self.crop[0] + (self.crop[1] - self.crop[0]) * size
        wide = ((2 * shape - 1) * (-area.log()).clamp(max=log(self.aspect))).exp()
        part = torch.stack([(area * wide).sqrt(), (area / wide).sqrt()]).clamp(max=1)
        anywhere = torch.stack([2 * at_x - 1, 2 * at_y - 1]) * (1 - part)
        middle = _drawn(images, at_x) if self.aim == "ink" else anywhere
        return middle.clamp(part - 1, 1 - part), part

    def affine(self, images: Tensor, middle: Tensor, part: Tensor, generator: Generator) -> Tensor:
        """Where each pixel is read from, `b xy h w` in grid_sample's coordinates; the content moves by the drawn shift."""
        h, w = images.shape[2:]
        rows, columns = self.sides(h, w)
        side, to_grid = min(h, w), _to_grid(h, w)
        zoom, shift = log(1 + self.scale), 2 * self.shift  # the unit of length is half the shorter side
        ranges = torch.tensor([radians(self.rotate), radians(self.shear), zoom, zoom, shift, shift])[:, None]
        angle, lean, zoom_x, zoom_y, right, down = ranges * (2 * torch.rand(6, part.shape[1], generator=generator) - 1)
        cos, sin, slant = angle.cos(), angle.sin(), lean.tan()
        along_x = torch.stack([cos, sin], dim=1) * zoom_x.exp()[:, None] * to_grid
        along_y = torch.stack([cos * slant - sin, sin * slant + cos], dim=1) * zoom_y.exp()[:, None] * to_grid
        x, y = _centres(columns, columns * side / w) - right[:, None], _centres(rows, rows * side / h) - down[:, None]
        # Sums of products, not a matrix product: that may run in TF32 or bf16, too coarse for a coordinate.
        from_x, from_y = ((along[:, :, None] * at[:, None]).to(images.device) for along, at in ((along_x, x), (along_y, y)))
        if self.crop != (1, 1):
            from_x, from_y = from_x * part.T[:, :, None] + middle.T[:, :, None], from_y * part.T[:, :, None]
        return from_x[:, :, None, :] + from_y[:, :, :, None]

    def crumple(self, grid: Tensor, images: Tensor, part: Tensor, generator: Generator) -> Tensor:
        """The grid, displaced in place by random control points whose influence falls off smoothly along rows and columns."""
        h, w = images.shape[2:]
        lengths = [(length, min(h, w) * length / whole) for length, whole in zip(grid.shape[2:], (h, w))]
        rows, columns = (_influence(length, side, self.smooth, grid.device) for length, side in lengths)
        control = torch.randn(len(grid), 2, rows.shape[1], columns.shape[1], generator=generator)
        control = (control * (2 * self.elastic * _to_grid(h, w)[:, None, None])).to(grid.device)
        if self.crop != (1, 1):
            control = control * part.T[:, :, None, None]
        across = (control @ columns.T).flatten(0, 1)
        return grid.flatten(0, 1).baddbmm_(rows.expand(len(across), -1, -1), across).view_as(grid)


def _drawn(images: Tensor, chance: Tensor) -> Tensor:
    """A pixel of each image, drawn by its brightness, for each chance; `xy b` in grid_sample's coordinates."""
    ink = images.mean(1).flatten(1).double().cumsum(1)
    chance = rearrange(chance, "(times b) -> b times", b=len(images)).double()
    place = torch.searchsorted(ink, (chance * ink[:, -1:]).contiguous(), right=True).clamp(max=ink.shape[1] - 1)
    return _place(rearrange(place, "b times -> (times b)"), images)


def _place(place: Tensor, images: Tensor) -> Tensor:
    """The middle of the pixel of that number, rows first; `xy b` in grid_sample's coordinates."""
    h, w = images.shape[2:]
    x, y = place % w, place // w
    return torch.stack([(2 * x + 1 - w) / w, (2 * y + 1 - h) / h]).to(images)


def _to_grid(h: int, w: int) -> Tensor:
    """What half the shorter side is in grid_sample's x and y."""
    return torch.tensor([min(h, w) / w, min(h, w) / h])


def _centres(length: int, side: float) -> Tensor:
    """Pixel centres along an axis, in halves of the shorter side."""
    return (2 * torch.arange(length) + 1 - length) / side


@lru_cache(maxsize=64)
def _influence(length: int, side: float, smooth: float, device: torch.device) -> Tensor:
    """How much each pixel along an axis follows each control point, `length n`: Gaussian, squares of a row sum to 1."""
    sigma, spacing = 2 * smooth, 3 * smooth
    n = ceil(2 * length / side / spacing) + 2
    points = spacing * (torch.arange(n) - (n - 1) / 2)
    weights = torch.exp(-((_centres(length, side)[:, None] - points) ** 2) / (2 * sigma**2))
    return (weights / weights.norm(dim=1, keepdim=True)).to(device)
