"""Warp: moves the pixels, all ways at once."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, radians
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Generator, Tensor

from smallvit.augment.batch import Batch, expect


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
        expect(self, rotate=(0, 180), scale=(0, 10), shear=(0, 80), shift=(0, 1), elastic=(0, 1), smooth=(0.02, 10))
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
