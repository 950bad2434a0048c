"""Other transformer blocks: a block with a depth-wise convolution beside it.

Each follows the contract of the slot: see `smallvit.vit.Block`.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.reduction import LayerContext
from smallvit.vit import Block


class ConvShortcutBlock(Block):
    """A transformer block with a parallel depth-wise convolution of 3 x 3 patches, whose output is added to the output of the
    block. So each patch sees its neighbors from the first training step on, without attention.

    `norm` is the normalization before the convolution: "layer" (LayerNorm) or "batch" (BatchNorm). `start` is the
    initialization of the convolution: that of torch ("default"), or weights of 0 ("zero"). `layers` is the number of blocks
    that have the convolution, counted from the first block; None means all. The other options are those of `Block`.

    The model sets the grid of the patches. The convolution adds nothing to prefix tokens (class token, registers), so with a
    class token the convolution of the last block has no effect. Drop-path skips the branches of the block, not the convolution.

    Paper    Zhang et al. 2024, arXiv:2407.19394: y = Block(x) + DW(norm(GELU(x))), where x are the patches that enter the
             block, and DW is a 3 x 3 depth-wise convolution with bias and zero padding.
    Off      `layers=0` equals `Block`; `start="zero"` equals it at the start of training.
    Departs  LayerNorm in place of BatchNorm by default: it has no running statistics, so batches of one image, weight averaging
             and resumed runs are exact. `norm="batch"` is the paper's.
    Raises   ValueError for an unknown `norm` or `start`, and in the forward pass if the patches do not form a grid: after
             merging or pruning, and with hidden patches, as in MAE.
    """

    grid: tuple[int, int] | None = None  # set by the model at each call; None if the patches form no grid

    def __init__(
        self, dim: int, heads: int, attention: Callable, reduction: nn.Module | None, drop_path: float, *,
        norm: str = "layer", start: str = "default", layers: int | None = None, mlp_ratio: float = 4.0,
        activation: str = "gelu", norm_first: bool = True, dropout: float = 0.0, layer_scale: float | None = None,
    ):  # fmt: skip
        super().__init__(
            dim, heads, attention, reduction, drop_path, mlp_ratio=mlp_ratio, activation=activation, norm_first=norm_first,
            dropout=dropout, layer_scale=layer_scale,
        )  # fmt: skip
        if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int) or layers < 0):
            raise ValueError(f"layers is {layers!r}; expected None or a number of blocks, from 0")
        self.layers, self.prefix = layers, 1
        self.shortcut = None if layers == 0 else ConvShortcut(dim, norm, start)

    def set_context(self, context: LayerContext):
        """Set the number of prefix tokens, and remove the convolution in blocks after the first `layers`."""
        self.prefix = context.prefix
        if self.layers is not None and context.layer >= self.layers:
            self.shortcut = None

    def more_macs(self, n: float | Tensor) -> float | Tensor:
        """Return the number of multiply-adds (MACs) of the convolution, for `n` tokens including prefix tokens."""
        return 0 if self.shortcut is None else 9 * (n - self.prefix) * self.shortcut.conv.out_channels

    def forward(self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Any = None) -> tuple:
        new, new_size, *more = super().forward(x, size, mask, places)
        if self.shortcut is None:
            return new, new_size, *more
        if self.grid is None:
            raise ValueError(
                "ConvShortcutBlock knows no grid of patches, because patches are hidden (MAE) or the block is used outside a"
                " ViT; expected another block, or all patches"
            )
        rows, columns = self.grid
        if size is not None or new_size is not None or not x.shape[1] == new.shape[1] == self.prefix + rows * columns:
            raise ValueError(
                f"ConvShortcutBlock got {x.shape[1]} tokens and made {new.shape[1]} of them, some merged or pruned, where there"
                f" are {rows} x {columns} patches and {self.prefix} prefix tokens; expected layers=k, for the k blocks before"
                " the first reduction"
            )
        return new + F.pad(self.shortcut(x[:, self.prefix :], self.grid), (0, 0, self.prefix, 0)), new_size, *more


class ConvShortcut(nn.Module):
    """The parallel path of `ConvShortcutBlock`: GELU, norm, and a depth-wise convolution of 3 x 3 patches. It is called with
    the patches (batch, patches, width) and their grid (rows, columns).
    """

    def __init__(self, dim: int, norm: str, start: str):
        super().__init__()
        if norm not in ("layer", "batch") or start not in ("default", "zero"):
            raise ValueError(f"got norm={norm!r}, start={start!r}; expected 'layer' or 'batch', and 'default' or 'zero'")
        self.start = start
        self.norm = nn.LayerNorm(dim, eps=1e-6) if norm == "layer" else nn.BatchNorm1d(dim)
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
