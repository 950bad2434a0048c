"""LearnedPrune (DynamicViT): a small network says which patches may go."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import LayerContext, fraction, stages, take


class LearnedPrune(nn.Module):
    """A small network says, before three of the blocks, which patches may go.

    Paper    Rao et al. 2021 (DynamicViT), arXiv:2106.02034, before the blocks at 1/4, 2/4 and 3/4 of the depth. From each patch
             and from the mean of those still there, a predictor of three layers gives two log-probabilities. In training a
             patch is kept or dropped by a Gumbel draw, for good, and stays in the tensor with size 0, so that the gradient
             reaches the predictor through attention. In evaluation the int(patches keep^k) best of the k-th predictor stay,
             best first.
    Off      `keep=1`: no predictor.
    Departs  The count goes with the image at hand, where the authors' code has 14 x 14 written into it. In training no token
             gives way to one that is gone: attention takes the largest logit over the tokens that are there, and there is no
             small constant in its sum. Where a draw would leave no patch at all, the likeliest stays. Wants the objective
             `LearnToPrune`, which holds the shares kept to `keep`.

    `kept` passes on the decisions, b patches, and changes nothing: whoever wants to see them hooks it. `target` is the share
    of all patches that should be left behind this block.

    Raises   ValueError for a share that is none, or a block that is not there.
    """

    first = True

    def __init__(self, place: LayerContext, *, keep: float = 0.7, layers: tuple | None = None):
        super().__init__()
        blocks = stages(layers, place.depth)
        self.dim, self.prefix, self.patches = place.dim, place.prefix, place.patches
        here = place.layer in blocks and fraction(keep, "keep") < 1
        before = blocks.index(place.layer) if here else 0
        self.expected, self.target = max(1, int(place.patches * keep**before)), keep ** (before + 1) if here else 1.0
        self.predictor = Predictor(place.dim) if here else None
        self.kept = nn.Identity()

    def left(self, n: int) -> int:
        if self.predictor is None:
            return n
        # at another image size the counts grow or shrink with what comes here
        patches = n - self.prefix
        return self.prefix + min(patches, max(1, int(self.patches * self.target * (patches / self.expected))))

    def macs(self, n: int, head_dim: int) -> float:
        """What the predictor costs."""
        linear = [part.weight.numel() for part in self.modules() if isinstance(part, nn.Linear)]
        return (n - self.prefix) * sum(linear)

    def forward(self, x: Tensor, size: Tensor | None, key=None, saliency=None) -> tuple[Tensor, Tensor | None]:
        if self.predictor is None:
            return x, size
        p = self.prefix
        there = x.new_ones(x.shape[:2]) if size is None else size
        score = self.predictor(x[:, p:, : self.dim], there[:, p:]).float().log_softmax(-1)
        if self.training:
            kept = there[:, p:] * F.gumbel_softmax(score, hard=True)[..., 0]
            likeliest = score[..., 0].masked_fill(there[:, p:] == 0, float("-inf")).argmax(-1, keepdim=True)
            last = torch.zeros_like(kept).scatter(1, likeliest, 1.0) * (kept.amax(1, keepdim=True) == 0)
            return x, torch.cat([there[:, :p], self.kept(kept + last * there[:, p:].detach())], dim=1)
        best = p + score[..., 0].argsort(dim=-1, descending=True, stable=True)[:, : self.left(x.shape[1]) - p]
        x = torch.cat([x[:, :p], take(x, best)], dim=1)
        return x, None if size is None else torch.cat([size[:, :p], take(size, best)], dim=1)


class Predictor(nn.Module):
    """Patches b n d and their sizes b n -> logits to be kept and to go, b n 2, from each patch and the mean of all."""

    def __init__(self, dim: int):
        super().__init__()
        self.embed = nn.Sequential(nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, dim), nn.GELU())
        half, quarter = max(dim // 2, 1), max(dim // 4, 1)
        self.decide = nn.Sequential(nn.Linear(dim, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2))

    def forward(self, x: Tensor, size: Tensor) -> Tensor:
        local, everywhere = self.embed(x).chunk(2, dim=-1)
        weight = size[..., None].to(x.dtype)
        mean = (everywhere * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1e-6)
        return self.decide(torch.cat([local, mean.expand_as(everywhere)], dim=-1))
