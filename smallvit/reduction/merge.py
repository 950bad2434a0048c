"""Merge (ToMe): similar patches become one token."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import LayerContext, check_context, check_function, exact_keys, sizes_of


class Merge(nn.Module):
    """Token merging (ToMe), a module in each block that merges the most similar pairs of patches. A pair becomes one token: the
    mean of the two, weighted by the number of patches in each. The option `r` sets how many pairs are merged in a block, and
    `inflect` whether early or late blocks merge more.

    `r` is a number of merges per block, a fraction of the patches at hand (a float up to 0.5), or a tuple with one of these per
    block. If `r` is a whole number, `inflect` moves merges to early blocks (-1) or to late blocks (1), with the authors'
    rounding; 0 gives each block the same number. A block can merge at most half of its patches; as in the paper, a larger `r`
    is cut to that.

    `context` is a `LayerContext`. Merge reads its `layer`, `depth` and `prefix`.

    Call it between the attention and the MLP as `merge(x, size, key)`. `x` are tokens (b, n, d), prefix tokens first. `size`
    (b, n) holds the number of patches in each token; None means 1. `key` is a function without arguments that returns the keys
    (b, n, e): pass `out.key` of the `AttentionOutput` `out`, not `out.key()`. It returns the new tokens (b, n - r, d) and their
    sizes (b, n - r), which the next attention needs.

    Paper    Bolya et al. 2022, arXiv:2210.09461, bipartite soft matching. Patches at even indices of the sequence are sources,
             at odd indices destinations. Each source is matched to the destination with the most similar key (mean over heads,
             cosine). The r best matches are merged, weighted by size. The new sequence is the prefix, the remaining sources,
             the destinations.
    Off      `r=0`.
    Departs  All prefix tokens are protected, also registers; the authors' code protects a class and a distillation token. The
             remaining sources keep the order of the image; without a class token the authors' code leaves them in the order of
             their scores. A key of length zero gives no NaN. Tokens that do not take part in a merge stay bit for bit the same.
             Proportional attention is part of the attention (`size`). Mean pooling weights by size; the authors' code does so
             for MAE models only.
    Raises   ValueError for a negative `r`, a fraction over 0.5, a tuple whose length is not the depth, `inflect` outside [-1,
             1], `inflect` with an `r` that is no whole number, or a `key` that is no function.
    """

    needs, merges_best_pairs = ("key",), True

    def __init__(self, context: LayerContext, *, r: int | float | tuple = 0, inflect: float = 0.0):
        super().__init__()
        check_context(context)
        self.prefix = context.prefix
        self.r = merge_schedule(r, inflect, context.depth)[context.layer]

    def count(self, n: int) -> int:
        """Return the number of pairs of patches that this block merges, if `n` tokens enter the block. Prefix tokens (class
        token and registers) are counted in `n`, but are never merged.
        """
        patches = n - self.prefix
        return min(int(round(self.r * int(patches), 6)) if isinstance(self.r, float) else self.r, patches // 2)

    def left(self, n: int) -> int:
        """Return the number of tokens after the merging in this block, if `n` tokens enter the block. These numbers include the
        prefix tokens (class token and registers).
        """
        return n - self.count(n)

    def macs(self, n: int, head_dim: int) -> float:
        """Return the number of multiply-adds (MACs) that are needed to find similar pairs among `n` tokens by their keys.
        `head_dim` is the width of a key.
        """
        patches = n - self.prefix
        return (patches // 2) * (patches - patches // 2) * head_dim if self.count(n) else 0

    def forward(self, x: Tensor, size: Tensor | None, key: Any, saliency: Any = None) -> tuple[Tensor, Tensor | None]:
        (b, n, _), p = x.shape, self.prefix
        r = self.count(n)
        if r == 0:
            return x, size
        if key is None:
            raise ValueError("Merge needs the keys of the attention, which gives none; return AttentionOutput(x, key=...)")
        check_function("Merge", "key", key)
        first_source, first_target = p + p % 2, p + 1 - p % 2
        with exact_keys(key().detach()) as k:
            k = F.normalize(k, dim=-1)
            score, match = torch.bmm(k[:, first_source::2], k[:, first_target::2].transpose(1, 2)).max(-1)
        order = score.argsort(dim=-1, descending=True, stable=True)
        sources, tokens = first_source + 2 * order, torch.arange(n, device=x.device).expand(b, -1)
        unmerged = sources[:, r:].sort(-1).values
        match = match.gather(1, order[:, :r]) + p + unmerged.shape[1]

        # the tokens of all images are in one list, so that each image needs no calls of its own
        image = torch.arange(b, device=x.device)[:, None]
        before, after = n * image, (n - r) * image  # the first token of each image
        remaining = (torch.cat([tokens[:, :p], unmerged, tokens[:, first_target::2]], dim=1) + before).flatten()
        merged, match = (sources[:, :r] + before).flatten(), (match + after).flatten()
        size = sizes_of(x, size).flatten()
        x, mass = x.flatten(0, 1), size.index_select(0, merged)
        x, moved = x.index_select(0, remaining), x.index_select(0, merged)
        size = size.index_select(0, remaining).index_add(0, match, mass)
        # the mean is computed as a step towards the merged token, so that tokens without a merge stay bit for bit the same
        total = size.index_select(0, match)
        share = (mass / total.clamp_min(torch.finfo(total.dtype).tiny)).to(x.dtype)  # 0 for two removed tokens, of size 0
        step = (moved - x.index_select(0, match)) * share[:, None]
        # in place only without gradients, and not in a trace, which must not depend on that
        in_place = not (torch.is_grad_enabled() or torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]
        x = x.index_add_(0, match, step) if in_place else x.index_add(0, match, step)
        return x.unflatten(0, (b, n - r)), size.unflatten(0, (b, n - r))


def plain_number(value: Any) -> Any:
    """Return a number of NumPy as one of Python. Other values are returned unchanged."""
    if isinstance(value, Real) and not isinstance(value, bool | int | float):
        return int(value) if isinstance(value, Integral) else float(value)
    return value


def merge_schedule(r: int | float | Sequence, inflect: float, depth: int) -> list[int | float]:
    """Return a list with the number of merges in each of `depth` blocks. `r` is this number for all blocks, or a list of one
    number per block; a float is a fraction of the patches. `inflect`, from -1 to 1, moves merges to early blocks (negative) or
    to late blocks (positive).

    `r` and `inflect` are the options of `Merge`. Raise ValueError if they are out of range.
    """
    r = [plain_number(count) for count in r] if isinstance(r, tuple | list) else plain_number(r)
    if isinstance(r, bool) or not isinstance(r, (int, float, tuple, list)):
        raise ValueError(f"r is {r!r}; expected a number of merges (0 or more), a fraction up to 0.5, or one of these a layer")
    if not -1 <= inflect <= 1:
        raise ValueError(f"inflect is {inflect}; expected from -1 (merge early) to 1 (merge late)")
    if inflect and not isinstance(r, int):
        raise ValueError(f"inflect={inflect} spreads a number of merges and r is {r!r}; expected an integer, or inflect=0")
    if isinstance(r, tuple | list):
        if len(r) != depth:
            raise ValueError(f"got {len(r)} values of r for {depth} layers; expected one per layer, or a single one")
        counts: list[int | float] = [*r]
    elif isinstance(r, float) or depth == 1:
        counts = [r] * depth
    else:
        first = int(r * (1 - inflect))
        step = 2 * (r - first) / (depth - 1)  # rounded as in the authors' code, which divides first
        counts = [int(first + step * layer) for layer in range(depth)]
    for count in counts:
        if not isinstance(count, int | float) or not count >= 0 or (isinstance(count, float) and not count <= 0.5):
            raise ValueError(f"r is {count}; expected a number of merges (a whole one, 0 or more), or a fraction up to 0.5")
    return counts
