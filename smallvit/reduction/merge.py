"""Merge (ToMe): what is alike becomes one token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import LayerContext, take, wide


class Merge(nn.Module):
    """Token merging (ToMe): in every layer the `r` most similar pairs of patches become one token each, their mean.

    Paper    Bolya et al. 2022, arXiv:2210.09461, bipartite soft matching: patches at even places of the sequence are sources,
             at odd places destinations; each source is matched to the destination of the most similar key (mean over heads,
             cosine), the r best matches are merged, weighed by size. The sequence is then the prefix, the sources that stayed,
             the destinations.
    Off      `r=0`.
    Departs  All prefix tokens are protected, registers too, where the authors' code knows a class and a distillation token
             alone. A key of zero length is no NaN. What stays is returned bit for bit. Proportional attention is the
             attention's (`size`), and mean pooling weighs by size, which the authors' code does for MAE alone.

    `r` is a number of merges in each layer, a fraction of the patches at hand, or a tuple with one of these for each layer. A
    number is spread over the layers by `inflect` from -1 (early) over 0 (constant) to 1 (late), with the authors' rounding.
    More merges than half of the patches cannot be made in one layer: as in the paper, as many are made as can.

    Raises   ValueError for a negative `r`, a fraction over 0.5, a tuple of another length than the depth, or `inflect` beyond
             [-1, 1].
    """

    def __init__(self, place: LayerContext, *, r: int | float | tuple = 0, inflect: float = 0.0):
        super().__init__()
        self.prefix = place.prefix
        self.r = schedule(r, inflect, place.depth)[place.layer]

    def count(self, n: int) -> int:
        """How many merges are made among n tokens."""
        patches = n - self.prefix
        wanted = int(self.r * patches) if isinstance(self.r, float) else self.r
        return min(wanted, patches // 2)

    def left(self, n: int) -> int:
        return n - self.count(n)

    def macs(self, n: int, head_dim: int) -> float:
        """What the matching costs."""
        patches = n - self.prefix
        return (patches // 2) * (patches - patches // 2) * head_dim if self.count(n) else 0

    def forward(self, x: Tensor, size: Tensor | None, key, saliency=None) -> tuple[Tensor, Tensor | None]:
        n, p = x.shape[1], self.prefix
        r = self.count(n)
        if r == 0:
            return x, size
        if key is None:
            raise ValueError("Merge needs the keys of the attention and this attention gives none; return AttentionOutput(x, key=...)")
        k = F.normalize(key().detach(), dim=-1)
        first = p + p % 2  # where the sources begin; the destinations begin at the other parity
        score, match = (k[:, first::2] @ k[:, p + 1 - p % 2 :: 2].transpose(1, 2)).max(-1)
        order = score.argsort(dim=-1, descending=True, stable=True)
        gone, match = order[:, :r], match.gather(1, order[:, :r])
        stay = order[:, r:].sort(-1).values

        everywhere = torch.arange(n, device=x.device)
        there, targets = everywhere[:p].expand(x.shape[0], -1), everywhere[p + 1 - p % 2 :: 2].expand(x.shape[0], -1)
        left = torch.cat([there, first + 2 * stay, targets], dim=1)
        gone, match = first + 2 * gone, match + p + stay.shape[1]
        x, moved = take(x, left), take(x, gone)
        if size is None:
            size, mass = x.new_ones(left.shape), x.new_ones(gone.shape)
        else:
            size, mass = take(size, left), take(size, gone)
        size = size.scatter_add(1, match, mass)
        # a mean as steps towards what joins: tokens that nothing joins stay bit for bit what they are
        share = mass / take(size, match)
        return x.scatter_add(1, wide(match, x), (moved - take(x, match)) * share[..., None]), size


def schedule(r: int | float | tuple, inflect: float, depth: int) -> list[int | float]:
    """What to merge in each layer: numbers are counts, fractions shares of the patches at hand."""
    if isinstance(r, bool) or not isinstance(r, int | float | tuple | list):
        raise ValueError(f"r is {r!r}; expected a number of merges from 0 on, a fraction up to 0.5, or one of these a layer")
    if not -1 <= inflect <= 1:
        raise ValueError(f"inflect is {inflect}; expected from -1 (merge early) to 1 (merge late)")
    if inflect and not isinstance(r, int):
        raise ValueError(f"inflect={inflect} spreads a number of merges and r is {r!r}; expected a whole number, or inflect=0")
    if isinstance(r, tuple | list):
        if len(r) != depth:
            raise ValueError(f"got {len(r)} values of r for {depth} layers; expected one each, or a single one")
        counts = list(r)
    elif isinstance(r, float) or depth == 1:
        counts = [r] * depth
    else:
        first = int(r * (1 - inflect))
        counts = [int(first + 2 * (r - first) * layer / (depth - 1)) for layer in range(depth)]
    for count in counts:
        if not isinstance(count, int | float) or not count >= 0 or (isinstance(count, float) and not count <= 0.5):
            raise ValueError(f"r is {count}; expected a number of merges from 0 on, or a fraction up to 0.5")
    return counts
