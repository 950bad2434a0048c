"""Other transformer blocks: with a depth-wise convolution beside the block, or after it.

Each follows the contract of the slot: see `smallvit.vit.Block`.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.attention_positions import Places
from smallvit.convolution import BatchNorm1d
from smallvit.positions import PEG, Grid
from smallvit.reduction import LayerContext
from smallvit.vit import Block


class GridBlock(Block):
    """A transformer block with a depth-wise 3 x 3 convolution over the grid of its patches, in the first `layers` blocks of a
    model; None means all. This is what such blocks have in common.

    `conv_name` is the name of the attribute that holds the convolution, or None in a block without it. `instead` says what to
    use for patches that form no grid.
    """

    conv_name: ClassVar[str]
    instead: ClassVar[str]

    def __init__(self, *shapes: Any, layers: int | None, **options: Any):
        super().__init__(*shapes, **options)
        if layers is not None and (type(layers) is not int or layers < 0):
            raise ValueError(f"layers is {layers!r}; expected None or a number of blocks, from 0")
        self.layers, self.prefix = layers, 1

    def set_context(self, context: LayerContext):
        """Take the number of prefix tokens from the model, and drop the convolution in blocks after the first `layers`."""
        self.prefix = context.prefix
        if self.layers is not None and context.layer >= self.layers:
            setattr(self, self.conv_name, None)

    @property
    def needs_places(self) -> bool:
        """Return True if the block has the convolution, which needs the grid of the patches."""
        return getattr(self, self.conv_name) is not None

    def more_macs(self, n: float | Tensor) -> float | Tensor:
        """Return the number of multiply-adds (MACs) of the convolution, for `n` tokens with those of the prefix."""
        return 9 * (n - self.prefix) * self.norm1.normalized_shape[0] if self.needs_places else 0

    def grid_of(self, size: Tensor | None, places: list[Places]) -> Grid:
        """Return the number of (rows, columns) of the patches that the block puts out. `size` is that of its tokens, and
        `places` is a list with their `Places`, which is empty if the block got none.

        Raises ValueError for patches that form no grid.
        """
        name = type(self).__name__
        if not places:
            raise ValueError(f"{name} needs the places of its patches and got none; expected a call by a ViT")
        if size is not None or not places[0].whole:
            raise ValueError(
                f"{name} needs all patches in their grid, and some are hidden (MAE), merged or pruned; expected {self.instead}"
            )
        return places[0].grid


class ConvShortcutBlock(GridBlock):
    """A transformer block with a parallel depth-wise convolution of 3 x 3 patches, whose output is added to the output of the
    block. So each patch sees its neighbors from the first training step on, without attention.

    `norm` is the normalization before the convolution: "layer" (LayerNorm) or "batch" (BatchNorm). `start` is the
    initialization of the convolution: that of torch ("default"), or weights of 0 ("zero"). `layers` is the number of blocks
    that have the convolution, counted from the first block; None means all. The other options are those of `Block`.

    The block reads the grid of the patches from `places`, which it gets from the model. The convolution adds nothing to prefix
    tokens (class token, registers), so with a class token the convolution of the last block has no effect. Drop-path skips the
    branches of the block, not the convolution.

    Paper    Zhang et al. 2024, arXiv:2407.19394: y = Block(x) + DW(norm(GELU(x))), where x are the patches that enter the
             block, and DW is a 3 x 3 depth-wise convolution with bias and zero padding.
    Off      `layers=0` equals `Block`; `start="zero"` equals it at the start of training.
    Departs  LayerNorm in place of BatchNorm by default: it has no running statistics, so batches of one image, weight averaging
             and resumed runs are exact. `norm="batch"` is the paper's.
    Raises   ValueError for an unknown `norm` or `start`, and for patches that form no grid: after merging or pruning, or if
             some are hidden, as in MAE.
    """

    conv_name = "shortcut"
    instead = "all patches, or layers=k, for the k blocks before the first reduction"

    def __init__(
        self, dim: int, heads: int, attention: Callable, reduction: nn.Module | None, drop_path: float, *,
        norm: str = "layer", start: str = "default", layers: int | None = None, mlp_ratio: float = 4.0,
        activation: str = "gelu", norm_first: bool = True, dropout: float = 0.0, layer_scale: float | None = None,
    ):  # fmt: skip
        super().__init__(
            dim, heads, attention, reduction, drop_path, layers=layers, mlp_ratio=mlp_ratio, activation=activation,
            norm_first=norm_first, dropout=dropout, layer_scale=layer_scale,
        )  # fmt: skip
        self.shortcut = None if layers == 0 else ConvShortcut(dim, norm, start)

    def forward(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Places | None = None
    ) -> tuple:
        new, new_size, *more = super().forward(x, size, mask, places)
        if self.shortcut is not None:
            grid = self.grid_of(new_size, more)
            new = new + F.pad(self.shortcut(x[:, self.prefix :], grid), (0, 0, self.prefix, 0))
        return new, new_size, *more


class ConvShortcut(nn.Module):
    """The parallel path of `ConvShortcutBlock`: GELU, norm, and a depth-wise convolution of 3 x 3 patches. It is called with
    the patches (batch, patches, width) and their grid (rows, columns).
    """

    def __init__(self, dim: int, norm: str, start: str):
        super().__init__()
        if norm not in ("layer", "batch") or start not in ("default", "zero"):
            raise ValueError(f"got norm={norm!r}, start={start!r}; expected 'layer' or 'batch', and 'default' or 'zero'")
        self.start = start
        self.norm = nn.LayerNorm(dim, eps=1e-6) if norm == "layer" else BatchNorm1d(dim)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.reset_parameters()

    def reset_parameters(self):
        if self.start == "zero":
            nn.init.zeros_(self.conv.weight)
            nn.init.zeros_(torch.as_tensor(self.conv.bias))

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        x = F.gelu(x)
        x = self.norm(x).mT if isinstance(self.norm, nn.LayerNorm) else self.norm(x.mT)
        return self.conv(x.unflatten(-1, grid)).flatten(2).mT


class PEGBlock(GridBlock):
    """A transformer block that is followed by conditional positions: `PEG` adds a depth-wise convolution of 3 x 3 patches to
    the tokens that leave the block.

    `layers` is the number of blocks that have it, counted from the first one; None means all. Each has weights of its own.
    `start` is that of `PEG`. The other options are those of `Block`. Use `position=None` for the model, or the positions come
    on top of its own.

    Paper    CPVT, Chu et al. 2021, arXiv:2102.10882: one after the first block (`layers=1`), or one after each of the first
             blocks.
    Off      `layers=0` equals `Block`; `start="zero"` equals it at the start of training.
    Raises   ValueError for an unknown `start`, and for patches that form no grid: after merging or pruning, or if some are
             hidden, as in MAE. The position slot, `position=PEG`, accepts these.
    """

    conv_name = "peg"
    instead = "all patches, or position=PEG, which acts before the first block"

    def __init__(
        self, dim: int, heads: int, attention: Callable, reduction: nn.Module | None, drop_path: float, *,
        start: str = "default", layers: int | None = 1, mlp_ratio: float = 4.0,
        activation: str = "gelu", norm_first: bool = True, dropout: float = 0.0, layer_scale: float | None = None,
    ):  # fmt: skip
        super().__init__(
            dim, heads, attention, reduction, drop_path, layers=layers, mlp_ratio=mlp_ratio, activation=activation,
            norm_first=norm_first, dropout=dropout, layer_scale=layer_scale,
        )  # fmt: skip
        self.peg = None if layers == 0 else PEG(dim, (1, 1), self.prefix, start=start)

    def set_context(self, context: LayerContext):
        """Take the number of prefix tokens from the model, and drop the positions after blocks after the first `layers`."""
        super().set_context(context)
        if self.peg is not None:
            self.peg.prefix = context.prefix

    def forward(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Places | None = None
    ) -> tuple:
        new, new_size, *more = super().forward(x, size, mask, places)
        return new if self.peg is None else self.peg(new, self.grid_of(new_size, more)), new_size, *more
