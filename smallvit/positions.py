"""Positions: what tells the model where a token is in the image.

Contract: `position(dim, grid, prefix)` makes a module that is called `(x, grid) -> x`. `x` is (b, prefix + rows * columns, d),
prefix tokens (class token, registers) first; `grid` is (rows, columns) of the image at hand. On another grid than that of the
constructor, positions are resampled as in timm: bicubic, antialiased, those of prefix tokens unchanged.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

Grid = tuple[int, int]


class Learned(nn.Module):
    """Learned position embeddings: a module that adds a learned vector to each token. If the option `on_prefix` is False, the
    prefix tokens (class token and registers) stay unchanged.

    There is one vector for each patch position of the grid and one for each prefix token.

    `std` is the standard deviation of the initial values. With "patch", it is that of the channels of a patch token at the
    start, which a `ViT` computes as sqrt(2 F / (F + d)), for patches of F values and tokens of width d.

    Paper    ViT, arXiv:2010.11929. timm calls `on_prefix=False` `no_embed_class`; its models with registers use it.
    Departs  Initial values are N(0, 1), as in the code of SPT and LSA; timm and DINO use std 0.02, CCT 0.2. From 0.02, a narrow
             model with few steps does not learn positions, and trains as if its patches had no order.
    Raises   ValueError for another text as `std`.
    """

    no_weight_decay = ("table",)

    def __init__(self, dim: int, grid: Grid, prefix: int, *, on_prefix: bool = True, std: float | str = 1.0):
        super().__init__()
        if isinstance(std, str) and std != "patch":
            raise ValueError(f"std is {std!r}; expected a number or 'patch'")
        self.grid, self.prefix, self.std = tuple(grid), prefix, std
        self.table = nn.Parameter(torch.empty((prefix if on_prefix else 0) + grid[0] * grid[1], dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        prefix = len(self.table) - self.grid[0] * self.grid[1]
        std = 1.0 if isinstance(self.std, str) else self.std  # a `ViT` multiplies the table by the std of its patches
        nn.init.normal_(self.table[prefix:], std=std)
        for row in self.table[:prefix]:  # last and row by row, so that more prefix tokens change no shared row (see `ViT`)
            nn.init.normal_(row, std=std)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return add_positions(self, x, grid)


class FixedTable(nn.Module):
    """The base class of position embeddings that are computed and not learned. The table stays at least float32, also after
    `model.bfloat16()`: it is not saved with the weights, so rounded values would stay after `model.float()`.
    """

    table: Tensor

    def make_table(self, grid: Grid, dim: int):
        """Make the table, still empty, with a row of `dim` numbers for each patch of the `grid`."""
        at_least_float32 = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("table", torch.empty(grid[0] * grid[1], dim, dtype=at_least_float32), persistent=False)

    def _apply(self, fn: Callable, recurse: bool = True) -> "FixedTable":
        table = self.table
        super()._apply(fn, recurse)
        if self.table.dtype in (torch.bfloat16, torch.float16):
            self.table = table.to(self.table.device)
        return self


class SinCos2d(FixedTable):
    """Fixed position embeddings in two dimensions: a module that adds sines and cosines to the tokens. One half of the channels
    encodes the column of a patch, the other half its row.

    `temperature` is the base of the frequencies, which then fall from 1 radian per patch. With "grid", they fall from pi (a
    wave of 2 patches) to almost pi / G (half a wave over the image); G is the larger side of the grid. `centered=True`
    subtracts the mean over all patches, because it is the same for all of them. `amplitude` multiplies the table. With "unit",
    the factor is chosen so that the differences from the mean over all patches have a mean square of 1, as those of `Learned`
    have at the start.

    The table is not saved with the weights: after `to_empty`, call `initialize(model)` before `load_state_dict`.

    Paper    MAE, arXiv:2111.06377: [sin x, cos x, sin y, cos y], frequencies 10000^(-4k/d). Prefix tokens get zeros. This is
             `temperature=10_000, centered=False, amplitude=1`, and None as temperature means the same 10,000.
    Departs  timm's default order is [sin y, sin x, cos y, cos x]; big_vision divides the exponent by d/4 - 1. The defaults are
             other ones, because 10,000 was chosen for long sequences: on a grid of 4 x 4 only 8% of the squared values differ
             between patches, and the patches beside each other are almost alike.
    Raises   ValueError if the width is not divisible by 4, the temperature is below 1, or for another text as an option.
    """

    added_options: ClassVar[dict[str, Any]] = {"temperature": 10_000, "centered": False, "amplitude": 1.0}

    def __init__(
        self, dim: int, grid: Grid, prefix: int, *,
        temperature: float | str | None = "grid", centered: bool = True, amplitude: float | str = "unit",
    ):  # fmt: skip
        super().__init__()
        if dim % 4:
            raise ValueError(f"width {dim} is not divisible by 4, as sines of two coordinates need; use {dim + -dim % 4}")
        for name, option, text in (("temperature", temperature, "grid"), ("amplitude", amplitude, "unit")):
            if isinstance(option, str) and option != text:
                raise ValueError(f"{name} is {option!r}; expected a number or {text!r}")
        self.grid, self.prefix = tuple(grid), prefix
        self.temperature, self.centered, self.amplitude = temperature, centered, amplitude
        self.make_table(grid, dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        numbers = [torch.arange(side, device="cpu") for side in self.grid]
        rows, columns = torch.meshgrid(numbers, indexing="ij")
        fastest, base = (math.pi, max(self.grid)) if isinstance(self.temperature, str) else (1.0, self.temperature)
        width = self.table.shape[1] // 2
        angles = (fastest * index.flatten().to(self.table.dtype) for index in (columns, rows))
        table = torch.cat([sines(angle, width, base) for angle in angles], dim=-1)
        differences = table - table.mean(0)
        amplitude = self.amplitude
        if isinstance(amplitude, str):
            amplitude = 1 / max(float(differences.square().mean().sqrt()), 1e-6)  # 0 on a grid of one patch
        self.table.copy_(amplitude * (differences if self.centered else table))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return add_positions(self, x, grid)


class SinCos1d(FixedTable):
    """Fixed position embeddings in one dimension: a module that adds sines and cosines of the patch number to the tokens.
    Patches are numbered row by row from the top left. The original Transformer for text uses this encoding.

    `temperature` is the base of the frequencies; None means the paper's 10,000.

    The table is not saved with the weights: after `to_empty`, call `initialize(model)` before `load_state_dict`.

    Paper    Vaswani et al. 2017, arXiv:1706.03762: sine in even, cosine in odd channels, frequencies 10000^(-2k/d). The first
             patch has index 0; prefix tokens get zeros.
    Raises   ValueError if the width is odd, or the temperature is below 1.
    """

    def __init__(self, dim: int, grid: Grid, prefix: int, *, temperature: float | None = None):
        super().__init__()
        if dim % 2:
            raise ValueError(f"width {dim} is odd, but sine and cosine come in pairs; use {dim + 1}")
        self.grid, self.prefix, self.temperature = tuple(grid), prefix, temperature
        self.make_table(grid, dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        table = sines(torch.arange(len(self.table), device="cpu"), self.table.shape[1], self.temperature)
        self.table.copy_(rearrange(table, "n (two k) -> n (k two)", two=2))

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        return add_positions(self, x, grid)


class PEG(nn.Module):
    """Conditional positions (a positional encoding generator): a module that adds a depth-wise convolution of 3 x 3 patches to
    the tokens. So the position of a patch depends on its neighbors. Zeros around the image show the convolution where the
    border is, and the blocks pass this on.

    It works at any image size and has 10 parameters for each channel. Prefix tokens (class token, registers) stay unchanged.
    `start` is the initial value of the convolution: "default" is torch's, "zero" adds nothing at first. The kernel gets no
    weight decay. In the position slot, it acts before the first block; `PEGBlock` has it after the first block, as the paper.

    Paper    CPVT, Chu et al. 2021, arXiv:2102.10882: x + DW(x), where x are the patches as an image, and DW is a 3 x 3
             depth-wise convolution with bias and zero padding. timm calls it `PosConv`.
    Off      `start="zero"` equals `position=None` at the start of training.
    Departs  In the position slot: the paper's models have it after the first block, where tokens have seen the whole image.
    Raises   ValueError for another `start`, and for a number of tokens that does not fit the grid.
    """

    def __init__(self, dim: int, grid: Grid, prefix: int, *, start: str = "default"):
        super().__init__()
        if start not in ("default", "zero"):
            raise ValueError(f"start is {start!r}; expected 'default' or 'zero'")
        self.prefix, self.start = prefix, start
        self.conv: Any = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.conv.no_weight_decay = ("weight",)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        if self.start == "zero":
            self.conv.weight.zero_()
            self.conv.bias.zero_()

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        check_number_of_tokens(x, self.prefix, grid)
        added = self.conv(x[:, self.prefix :].mT.unflatten(-1, grid)).flatten(2).mT
        return x + F.pad(added, (0, 0, self.prefix, 0))


def sines(index: Tensor, dim: int, temperature: float | None = None) -> Tensor:
    """Return the sine and cosine encoding of the n numbers in `index`, shape (n, dim). The first dim/2 channels are sines, the
    others cosines. Sine i and cosine i have the frequency temperature^(-2 i / dim): from 1 down to almost 1 / temperature. If
    `temperature` is None, it is 10,000.
    """
    base = 10_000 if temperature is None else temperature
    if base < 1:
        raise ValueError(f"temperature is {temperature}; expected 1 or more, roughly the number of tokens in the longest wave")
    frequency = base ** (-torch.arange(dim // 2, dtype=torch.float64, device=index.device) / (dim // 2))
    angle = index[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def add_positions(module: Any, x: Tensor, grid: Grid) -> Tensor:
    """Return the tokens `x` (batch, tokens, width) plus the position embeddings of the module `module`. The embeddings are
    first resized to `grid`, the number of (rows, columns) of patches in the image.

    The embeddings are the attribute `table` of the module.

    If the table has no rows for prefix tokens (class token and registers), these tokens stay as they are.
    """
    check_number_of_tokens(x, module.prefix, grid)
    table = resample(module.table, module.grid, grid)
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # PyTorch has no autocast for the device "meta"
        table = table.to(x.dtype)
    missing = module.prefix - prefix_rows(module.table, module.grid)
    return x + (F.pad(table, (0, 0, missing, 0)) if missing else table)


def prefix_rows(table: Tensor, grid: Grid) -> int:
    """Return how many rows of position embeddings belong to prefix tokens (class token and registers). `table` holds one row
    for each of them, if any, then one for each patch of the `grid`, the number of (rows, columns) of patches.
    """
    return table.shape[0] - grid[0] * grid[1]


def check_number_of_tokens(x: Tensor, prefix: int, grid: Grid):
    """Raise ValueError unless the tokens `x` (batch, tokens, width) are `prefix` prefix tokens and the patches of `grid`, the
    number of (rows, columns) of patches in the image.
    """
    if x.shape[1] != prefix + grid[0] * grid[1]:
        raise ValueError(f"got {x.shape[1]} tokens; expected {prefix} prefix tokens and a grid of {grid[0]} x {grid[1]}")


def resample(table: Tensor, old_grid: Grid, grid: Grid) -> Tensor:
    """Return position embeddings that are resized to another patch grid by bicubic interpolation. `table` holds the old
    embeddings: first one row for each prefix token (class token or register), which stays unchanged, then one row for each
    patch. `old_grid` and `grid` are the old and the new number of (rows, columns) of patches.

    `table` has the shape (prefix + rows * columns, d). timm resizes in the same way.
    """
    if all(isinstance(n, int) for n in grid) and tuple(old_grid) == tuple(grid):  # `torch.export` has sizes that are no int
        return table
    prefix = prefix_rows(table, old_grid)
    patches = table[prefix:].to(torch.promote_types(table.dtype, torch.float32))
    image = rearrange(patches, "(r c) d -> 1 d r c", r=old_grid[0])
    image = F.interpolate(image, size=tuple(grid), mode="bicubic", antialias=True)
    return torch.cat([table[:prefix], rearrange(image, "1 d r c -> (r c) d").to(table.dtype)])
