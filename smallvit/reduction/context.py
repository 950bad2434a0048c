"""The position of a reduction in the model, and operations on tokens that several reductions use."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerContext(NamedTuple):
    """A description of one transformer block, from which the token reduction (merging or pruning) of the block is created. It
    holds the index of the block, the number of blocks, the width of the tokens, and the number of tokens.

    The block has the index `layer`, from 0, in a model of `depth` blocks. Tokens are `dim` wide. The first `prefix` tokens are
    prefix tokens; the very first is a class token if `class_token`. Without reduction there are `patches` patches. In code of
    your own, set all of them: `LayerContext(layer=0, depth=12, dim=192, prefix=1, class_token=True, patches=196)`.
    """

    layer: int = 0
    depth: int = 1
    dim: int = 64
    prefix: int = 1
    class_token: bool = True
    patches: int = 49

    @property
    def tokens(self) -> int:
        """Return the number of tokens before any merging or pruning: prefix tokens (class token and registers) plus patches."""
        return self.prefix + self.patches


def check_context(context: LayerContext, class_token: bool = False):
    """Raise ValueError if the description of a block contradicts itself. With `class_token`, it must be right about the class
    token.
    """
    if not 0 <= context.layer < context.depth:
        raise ValueError(f"{context} has layer {context.layer} of {context.depth} blocks; set depth, the number of blocks")
    if class_token and context.class_token and context.prefix < 1:
        raise ValueError(f"{context} has a class token and no prefix tokens; expected prefix=1, or class_token=False")


def check_function(reduction: str, name: str, given: Any):
    """Raise ValueError unless `given`, the argument `name` of a reduction module, is a function, as the attention gives it."""
    if not callable(given):
        raise ValueError(
            f"{reduction} got a {type(given).__name__} as {name}; pass the function out.{name} of the attention's output, not "
            "its result"
        )


def runs_before_attention(reduction: nn.Module | None) -> bool:
    """Return True if a token reduction (a module that merges or prunes tokens) runs before the attention of its block, and
    False if it runs after the attention.

    The attribute `first` of the reduction says so. None gives False.
    """
    return bool(getattr(reduction, "first", False))


def reduce_tokens(
    reduction: nn.Module, x: Tensor, size: Tensor | None, places: Any = None, *attention: Callable | None
) -> tuple[Tensor, Tensor | None, Any]:
    """Call a reduction, which merges or prunes the tokens `x` of `size`, and return its tokens, their sizes and their `places`.
    `attention` are the functions `key` and `saliency` of the attention, if there are any.

    `places` is a `Places` of patch tokens, or None if nobody needs it. The reduction carries the row, the column and a 1 along
    behind the channels of each token. If it adds tokens with weights, it adds these three with the same weights. So the row and
    the column, divided by the third number, are the mean place of the members.
    """
    if places is None:
        return *reduction(x, size, *attention), None
    d, p = x.shape[-1], x.shape[1] - places.at.shape[-2]
    carried = F.pad(F.pad(places.at, (0, 1), value=1.0), (0, 0, p, 0)).expand(x.shape[0], -1, -1)
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # PyTorch has no autocast for the device "meta"
        carried = carried.to(x.dtype)
    given = torch.cat([x, carried], dim=-1)  # with autocast, tokens of half precision become float32 here
    reduced, size = reduction(given, size, *attention)
    if reduced is given:
        return x, size, places
    weighted = reduced[:, p:, d:].detach().float()
    at = weighted[..., :2] / weighted[..., 2:].clamp_min(torch.finfo(weighted.dtype).tiny)
    return reduced[..., :d].to(x.dtype), size, places._replace(at=at)


def sizes_of(x: Tensor, size: Tensor | None) -> Tensor:
    """Return how many patches each token represents, as floats of shape (batch, tokens). If `size` is None, each of the tokens
    `x` (batch, tokens, width) represents one. The number format is then at least float32, because half precision (bfloat16)
    does not count beyond 256.
    """
    if size is not None:
        return size if size.is_floating_point() else size.float()
    return torch.ones(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


@contextmanager
def exact_keys(key: Tensor) -> Iterator[Tensor]:
    """Context manager that gives the keys of an attention as float32 or float64, and in which products of them are computed in
    that precision, also inside `torch.autocast`. Rounded similarities would choose other tokens to merge.
    """
    exact = key.to(torch.promote_types(key.dtype, torch.float32))
    if key.is_meta:  # PyTorch has no autocast for this device
        yield exact
        return
    with torch.autocast(key.device.type, enabled=False):
        yield exact


def gather_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Return selected tokens of each image. `index` (b, m) holds the positions of the tokens to select. Tokens `x` of shape (b,
    n, d) become (b, m, d). Numbers per token of shape (b, n) become (b, m).
    """
    if x.ndim == 2:
        return x.gather(1, index)
    # index_select copies whole rows, which is faster than gathering element by element
    rows = index + x.shape[1] * torch.arange(index.shape[0], device=index.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, index.shape)


def expand_index(index: Tensor, x: Tensor) -> Tensor:
    """Return token positions `index` (b, m), repeated for every channel of the tokens `x` (b, n, d). The result has the shape
    (b, m, d), which the functions `scatter` and `gather` of torch need.
    """
    return index[..., None].expand(-1, -1, x.shape[-1])


def pruning_layers(layers: tuple[int, ...] | None, depth: int) -> list[int]:
    """Return a list with the indices of the blocks that prune tokens, in a model of `depth` blocks. The result is `layers` or,
    if `layers` is None, the blocks at 1/4, 2/4 and 3/4 of the depth.

    The default is that of EViT and DynamicViT. Raise ValueError for an index that does not exist or occurs twice.
    """
    if layers is None:
        return sorted({depth * quarter // 4 for quarter in (1, 2, 3)})
    valid = isinstance(layers, tuple | list) and all(isinstance(layer, int) and 0 <= layer < depth for layer in layers)
    if not valid or len(set(layers)) < len(layers):
        raise ValueError(f"layers is {layers!r}; expected different block indices of this model, from 0 to {depth - 1}")
    return sorted(layers)


def check_fraction(keep: float) -> float:
    """Return `keep`, the fraction of patches to keep, as a float. Raise ValueError unless `keep` is above 0 and at most 1."""
    if isinstance(keep, bool) or not isinstance(keep, Real) or not 0 < keep <= 1:
        raise ValueError(f"keep is {keep!r}; expected a fraction of the patches, above 0 and up to 1 (all of them)")
    return float(keep)
