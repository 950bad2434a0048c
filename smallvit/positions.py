"""Positions: where a token is.

Contract: `position(dim, grid, prefix)` makes a module that is called `(x, grid) -> x`. `x` is b (prefix + rows * columns) d
with the prefix tokens (class token, registers) first; `grid` is (rows, columns) of the image at hand. On another grid than its
own the table is resampled as timm does: bicubic, antialiased, the prefix untouched.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

Grid = tuple[int, int]


class Learned(nn.Module):
    """One learned vector for each place of the grid, and (if `on_prefix`) one for each prefix token.

    Paper    ViT, arXiv:2010.11929. timm calls `on_prefix=False` `no_embed_class`; its models with registers use it.
    Departs  Starts from N(0, 1), as the authors of SPT and LSA do, where timm and DINO start from 0.02 and CCT from 0.2: a
             narrow model with few steps cannot grow positions out of noise and trains as if its patches were a bag.
    """

    no_weight_decay = ("table",)

    def __init__(self, dim: int, grid: Grid, prefix: int, *, on_prefix: bool = True, std: float = 1.0):
        super().__init__()
        self.grid, self.prefix, self.std = tuple(grid), prefix, std
        self.table = nn.Parameter(torch.empty((prefix if on_prefix else 0) + grid[0] * grid[1], dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        prefix = len(self.table) - self.grid[0] * self.grid[1]
        nn.init.normal_(self.table[prefix:], std=self.std)
        nn.init.normal_(self.table[:prefix], std=self.std)  # last: how many there are must not move the draw of the patches

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return add(x, self.table, self.grid, grid, self.prefix)


class SinCos2d(nn.Module):
    """Fixed sines and cosines of column and row: half of the width tells the column, half the row.

    Paper    MAE, arXiv:2111.06377: [sin x, cos x, sin y, cos y], frequencies 10000^(-4k/d). Prefix tokens get nothing.
    Departs  timm's default order is [sin y, sin x, cos y, cos x]; big_vision divides the exponent by d/4 - 1.
             `temperature` takes the place of 10000 (None), which was made for long sequences: on a grid of 7 x 7 most channels
             hardly move. One seed of the recipe `explain`, validation images: 76 with 10,000, 81 with 100, 84 with 10.
    Raises   ValueError unless 4 divides the width, and for a temperature below 1.
    """

    def __init__(self, dim: int, grid: Grid, prefix: int, *, temperature: float | None = None):
        super().__init__()
        if dim % 4:
            raise ValueError(
                f"width {dim} is not divisible by 4, which sine and cosine of two coordinates need; take {dim + -dim % 4}"
            )
        self.grid, self.prefix = tuple(grid), prefix
        rows, columns = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
        table = torch.cat([sines(place.flatten(), dim // 2, temperature) for place in (columns, rows)], dim=-1)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return add(x, self.table, self.grid, grid, self.prefix)


class SinCos1d(nn.Module):
    """Fixed sines and cosines of the index in reading order, as for text.

    Paper    Vaswani et al. 2017, arXiv:1706.03762: sine at even, cosine at odd channels, frequencies 10000^(-2k/d). The first
             patch is position 0; prefix tokens get nothing.
    Departs  `temperature` takes the place of 10000 (None).
    Raises   ValueError if the width is odd, and for a temperature below 1.
    """

    def __init__(self, dim: int, grid: Grid, prefix: int, *, temperature: float | None = None):
        super().__init__()
        if dim % 2:
            raise ValueError(f"width {dim} is odd; sine and cosine come in pairs, take {dim + 1}")
        self.grid, self.prefix = tuple(grid), prefix
        table = rearrange(sines(torch.arange(grid[0] * grid[1]), dim, temperature), "n (two k) -> n (k two)", two=2)
        self.register_buffer("table", table.float(), persistent=False)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return add(x, self.table, self.grid, grid, self.prefix)


def sines(place: Tensor, dim: int, temperature: float | None = None) -> Tensor:
    """n -> n dim: the sines, then the cosines, of `place` at dim/2 frequencies from 1 down to almost 1/temperature."""
    base = 10_000 if temperature is None else temperature  # None: runs from before there was a choice are the same runs
    if base < 1:
        raise ValueError(f"temperature is {temperature}; expected 1 or more, about how many tokens the slowest wave spans")
    frequency = base ** (-torch.arange(dim // 2, dtype=torch.float64) / (dim // 2))
    angle = place[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def add(x: Tensor, table: Tensor, own: Grid, grid: Grid, prefix: int) -> Tensor:
    """`x` plus the table for the grid at hand; the table's rows before the grid belong to the prefix."""
    table = resample(table, own, grid)
    missing = x.shape[1] - len(table)
    if missing not in (0, prefix):
        raise ValueError(f"got {x.shape[1]} tokens; expected {prefix} prefix tokens and a grid of {grid[0]} x {grid[1]}")
    return x + (F.pad(table, (0, 0, missing, 0)) if missing else table)


def resample(table: Tensor, own: Grid, grid: Grid) -> Tensor:
    """(extra + rows * columns) d -> the same for another grid, by timm's rule; rows before the grid are kept as they are."""
    if tuple(own) == tuple(grid):
        return table
    extra = len(table) - own[0] * own[1]
    image = rearrange(table[extra:].float(), "(r c) d -> 1 d r c", r=own[0])
    image = F.interpolate(image, size=tuple(grid), mode="bicubic", antialias=True)
    return torch.cat([table[:extra], rearrange(image, "1 d r c -> (r c) d").to(table.dtype)])
