"""Prune (EViT): what the class token does not look at becomes one token."""

import math

import torch
from torch import Tensor, nn

from .context import LayerContext, fraction, stages, take


class Prune(nn.Module):
    """Keep the patches that the class token attends to most; the others become one token.

    Paper    Liang et al. 2022 (EViT), arXiv:2202.07800, in the blocks at 1/4, 2/4 and 3/4 of the depth (3, 6, 9 of 12). The
             score of a patch is the attention that the class token pays it, the mean over heads; ceil(keep n) of n patches
             stay, best first, and the last token is the sum of the others weighed by their scores (`fuse="sum"`). The weights
             are not normalised, so that token shrinks with the attention it stood for.
    Off      `keep=1`.
    Departs  The score is taken before attention dropout, so it does not jump about. All prefix tokens are protected, where the
             authors' code may drop the distillation token. Without a class token the score is the mean over all tokens that
             look. As published, tokens are counted once each, the fused one too; `fuse="mean"`, which is ours, makes the mean
             of the dropped patches and counts it for as many as they were; `fuse="none"` only drops.

    `keep` is the share of the patches at hand that each of these blocks keeps. While a run's progress goes from the first to
    the second value of `shrink`, training keeps less and less, from all to `keep` along a cosine, as the authors do for a third
    of their epochs.

    Raises   ValueError for a share that is none, a block that is not there, an unknown `fuse`, or a `shrink` out of order.
    """

    def __init__(
        self,
        place: LayerContext,
        *,
        keep: float = 0.7,
        fuse: str = "sum",
        layers: tuple | None = None,
        shrink: tuple = (0.0, 0.0),
    ):
        super().__init__()
        if fuse not in ("sum", "mean", "none"):
            raise ValueError(f"fuse is {fuse!r}; expected 'sum' (as published), 'mean' or 'none'")
        if not isinstance(shrink, tuple | list) or len(shrink) != 2 or not 0 <= shrink[0] <= shrink[1] <= 1:
            raise ValueError(f"shrink is {shrink}; expected where in a run it starts and ends, such as (0.0, 0.3)")
        here = place.layer in stages(layers, place.depth)
        self.prefix, self.fuse, self.shrink = place.prefix, fuse, shrink
        self.keep = fraction(keep, "keep") if here else 1.0
        self.queries = 1 if place.class_token else None
        self.progress = 1.0  # of the run, told by the objective

    def share(self) -> float:
        """What to keep now: in training it may still be shrinking."""
        start, end = self.shrink
        if not self.training or self.progress >= end:
            return self.keep
        if self.progress < start:
            return 1.0
        return self.keep + (1 - self.keep) * 0.5 * (1 + math.cos(math.pi * (self.progress - start) / (end - start)))

    def left(self, n: int) -> int:
        kept = count(self.keep, n - self.prefix)
        fused = self.fuse != "none" and kept < n - self.prefix
        return self.prefix + kept + fused

    def forward(self, x: Tensor, size: Tensor | None, key=None, saliency=None) -> tuple[Tensor, Tensor | None]:
        n, p = x.shape[1], self.prefix
        kept = count(self.share(), n - p)
        if kept == n - p:
            return x, size
        if saliency is None:
            raise ValueError("Prune needs the saliency of the attention and this one gives none; return AttentionOutput(x, saliency=...)")
        score = saliency(self.queries)[:, p:]
        order = p + score.argsort(dim=-1, descending=True, stable=True)
        stay, gone = order[:, :kept], order[:, kept:]
        tokens = [x[:, :p], take(x, stay)]
        if self.fuse == "mean" and size is None:
            size = x.new_ones(x.shape[:2])
        sizes = None if size is None else [size[:, :p], take(size, stay)]
        if self.fuse != "none":
            weight = take(score, gone - p).to(x.dtype)
            if self.fuse == "mean":
                weight = weight / weight.sum(1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
            tokens.append(weight[:, None] @ take(x, gone))
            if sizes is not None:
                fused = take(size, gone).sum(1, keepdim=True)
                sizes.append(fused if self.fuse == "mean" else torch.ones_like(fused))
        return torch.cat(tokens, dim=1), None if sizes is None else torch.cat(sizes, dim=1)


def count(keep: float, patches: int) -> int:
    """How many of so many patches stay, at least one; 0.55 * 20 is 11, whatever floats say."""
    return max(1, math.ceil(round(keep * patches, 6)))
