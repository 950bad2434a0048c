"""Where a reduction stands, and the small moves that all reductions are made of."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class LayerContext(NamedTuple):
    """What the model tells a reduction: its block and the tokens that come to it.

    It stands in block `layer`, from 0, of `depth`. Tokens are `dim` wide; `prefix` of them, first in the sequence, are no
    patches, and the very first is a class token if `class_token`. Where nothing is reduced there are `patches` patches.
    """

    layer: int = 0
    depth: int = 1
    dim: int = 64
    prefix: int = 1
    class_token: bool = True
    patches: int = 49

    @property
    def tokens(self) -> int:
        """All tokens where nothing is reduced."""
        return self.prefix + self.patches


def stands_first(reduction: nn.Module | None) -> bool:
    """Whether it stands before the attention of its block and not behind it."""
    return bool(getattr(reduction, "first", False))


def take(x: Tensor, index: Tensor) -> Tensor:
    """The tokens at those places: b n d, b m -> b m d; or b n, b m -> b m."""
    if x.ndim == 2:
        return x.gather(1, index)
    # whole rows are copied, not element by element
    rows = index + x.shape[1] * torch.arange(x.shape[0], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, index.shape)


def wide(index: Tensor, x: Tensor) -> Tensor:
    """b m -> b m d, to gather or scatter whole tokens."""
    return index[..., None].expand(-1, -1, x.shape[-1])


def stages(layers: tuple[int, ...] | None, depth: int) -> list[int]:
    """The blocks that prune: those given, if any, or, as in EViT and DynamicViT, the ones at 1/4, 2/4 and 3/4 of the depth.

    Raises ValueError for a block that is not there, or that is named twice.
    """
    if layers is None:
        return sorted({depth * quarter // 4 for quarter in (1, 2, 3)})
    real = isinstance(layers, tuple | list) and all(isinstance(layer, int) and 0 <= layer < depth for layer in layers)
    if not real or len(set(layers)) < len(layers):
        raise ValueError(f"layers is {layers!r}; expected different blocks of this model, from 0 to {depth - 1}")
    return sorted(layers)


def fraction(keep: float, name: str) -> float:
    """The fraction, if it is one."""
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise ValueError(f"{name} is {keep!r}; expected a fraction of the patches, above 0 and up to 1 (all of them)")
    return float(keep)
