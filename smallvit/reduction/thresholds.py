"""LearnedThresholds (LTMP): merged and pruned is what passes a threshold that was learned."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import LayerContext, take, wide


class LearnedThresholds(nn.Module):
    """Merge what is alike and prune what nobody looks at, beyond two thresholds that each block learns.

    Paper    Bonnaerens, Dambre 2023 (LTMP), arXiv:2305.17328. Every source patch whose most similar destination (ToMe's
             matching) is more similar than `merge` joins it, as many as there are; then every patch goes whose attention
             received, the mean over heads and queries, is not above `prune`. A merged patch has the importance of its most
             important member. Decisions are hard, their gradients those of a sigmoid of that `temperature` (straight through).
             How many patches are left depends on the image.
    Off      `merge=1, prune=0`: nothing is more similar than equal, and attention is never 0.
    Departs  In the authors' code training and inference are two functions, since masked patches change the matching and the
             importance, and inference takes one image at a time. Here patches keep their order, sources and destinations are
             every other one of those that are there, and only they are asked for importance: masked training and inference
             agree, and inference takes a batch, padded to the longest of it (size 0). The prune threshold counts in units of
             the mean importance without reduction, 1 / tokens, so that one setting serves 17 tokens and 197. The most
             important patch always stays. Similarity and importance carry no gradient. Wants the objective
             `LearnThresholds`, which holds the cost to a budget. The gradient to a token's size leaves out what it sees itself
             (see `attention.learn_sizes`). For images of another size the unit stays that of the size it was built for.

    `merge` and `prune` are where the thresholds start, and what they are where nobody trains them. `merge=None` only prunes.
    `kept` passes on the decisions, b n, and changes nothing: whoever wants to see them hooks it.

    Raises   ValueError for a `merge` beyond [-1, 1], a negative `prune`, or a temperature of 0 or less.
    """

    def __init__(self, place: LayerContext, *, merge: float | None = 0.9, prune: float = 0.0, temperature: float = 0.1):
        super().__init__()
        if merge is not None and not -1 <= merge <= 1:
            raise ValueError(f"merge is {merge}; expected a cosine from -1 (merge all you can) to 1 (nothing), or None")
        if not prune >= 0 or not temperature > 0:
            raise ValueError(f"got prune={prune}, temperature={temperature}; expected 0 or more, and more than 0")
        self.prefix, self.tokens, self.temperature = place.prefix, place.tokens, temperature
        self.start_merge, self.start_prune = merge, float(prune)
        self.prune = nn.Parameter(torch.empty(()))
        self.merge = None if merge is None else nn.Parameter(torch.empty(()))
        self.kept = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.prune, self.start_prune)
        if self.merge is not None:
            nn.init.constant_(self.merge, self.start_merge)

    def clamp(self):
        """Put the thresholds back to where they mean something, as the authors do after each step."""
        with torch.no_grad():
            self.prune.clamp_(0, self.tokens)
            if self.merge is not None:
                self.merge.clamp_(0, 1)

    def left(self, n: int) -> None:
        return None

    def macs(self, n: float, head_dim: int) -> float:
        """What the matching costs, which compares all with all."""
        return 0 if self.merge is None else n * n * head_dim

    def forward(self, x: Tensor, size: Tensor | None, key=None, saliency=None) -> tuple[Tensor, Tensor | None]:
        if key is None or saliency is None:
            raise ValueError("LearnedThresholds needs keys and saliency of attention; return AttentionOutput(x, key=..., saliency=...)")
        given, size = size, x.new_ones(x.shape[:2]) if size is None else size
        patch = torch.arange(x.shape[1], device=x.device) >= self.prefix
        with torch.no_grad():  # what is measured is given; the thresholds learn from what they decide
            importance = saliency(None).float() * self.tokens
        kept = torch.ones_like(importance)
        if self.merge is not None:
            similarity, match = self.matches(key().detach().float(), size.detach() > 0)
            merged = self.beyond(similarity, self.merge)
            x, size, importance = self.join(x, size, importance, merged, match)
            kept = kept - merged
        here = patch & (kept * size > 0)
        top = torch.where(here, importance, float("-inf")).argmax(-1, keepdim=True)
        spared = (~patch).expand_as(kept).scatter(1, top, True)
        kept = kept * torch.where(spared, 1.0, self.beyond(importance, self.prune))
        size = size * self.kept(kept).to(size.dtype)
        if self.training or torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return x, size
        return shortest(x, size, given)

    def matches(self, key: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """For every token the cosine to its most similar destination, -2 where it is no source; and that one's place."""
        rank = there.cumsum(1) - 1
        free = there & (torch.arange(key.shape[1], device=key.device) >= self.prefix)
        source, target = free & (rank % 2 == 0), free & (rank % 2 == 1)
        key = F.normalize(key, dim=-1)
        cosine = (key @ key.transpose(1, 2)).clamp(max=1)  # equal keys can round to a little more
        return torch.where(source[:, :, None] & target[:, None, :], cosine, -2.0).max(-1)

    def join(self, x: Tensor, size: Tensor, importance: Tensor, merged: Tensor, match: Tensor):
        """Add every merged source to its destination, weighed by size; `merged` is 1 for those, 0 for all others."""
        mass = size * merged.to(size.dtype)
        total = size.scatter_add(1, match, mass)
        moved = (x * size[..., None]).scatter_add(1, wide(match, x), x * mass[..., None])
        received = torch.zeros_like(total).scatter_add(1, match, mass.detach()) > 0
        x = torch.where(received[..., None], (moved / total.clamp_min(1e-6)[..., None]).to(x.dtype), x)
        theirs = torch.where(merged > 0, importance, float("-inf"))
        return x, total, importance.scatter_reduce(1, match, theirs, "amax")

    def beyond(self, value: Tensor, threshold: Tensor) -> Tensor:
        """1 where the value is above the threshold, else 0, with the gradient of a sigmoid."""
        soft = ((value - threshold) / self.temperature).sigmoid()
        return (value > threshold).to(soft.dtype) + (soft - soft.detach())  # the bracket is exactly 0


def shortest(x: Tensor, size: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The batch without what no image needs: those that are there first, in their order, up to the longest of the batch."""
    there = size > 0
    longest = int(there.sum(1).max())
    if longest == x.shape[1]:
        return x, given if there.all() else size
    order = (~there).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    return take(x, order), take(size, order)
