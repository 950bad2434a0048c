"""Prune (EViT): keep the patches that the class token attends to, fuse the others into one token."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .context import LayerContext, check_context, check_fraction, check_function, gather_tokens, pruning_layers, sizes_of


class Prune(nn.Module):
    """Token pruning (EViT), a module in the blocks of a ViT. Some of the blocks keep only the patches that get most attention
    from the class token. The other patches are fused into one token.

    `keep` is the share of the patches at hand that each pruning block keeps; `layers` are these blocks, by default those at
    1/4, 2/4 and 3/4 of the depth. `fuse` is "sum" (the paper), "mean" or "none" (drop the others). While the progress of the
    run goes from the first to the second value of `shrink`, the share kept in training falls from 1 to `keep` along a cosine;
    the authors do so during a third of their epochs.

    `context` is a `LayerContext`. Prune reads its `layer`, `depth`, `prefix` and `class_token`.

    Call it between the attention and the MLP as `prune(x, size, saliency=out.saliency)`, where `out` is the `AttentionOutput`.
    `x` are tokens (b, n, d), prefix tokens first. `size` (b, n) holds the number of patches in each token; None means 1.
    `saliency` is a function: `saliency(queries)` returns how much attention each token receives (b, n). `key` is not used. It
    returns the new tokens (b, m, d), and their sizes (b, m) or None.

    Paper    Liang et al. 2022 (EViT), arXiv:2202.07800, in blocks 3, 6 and 9 of 12. The score of a patch is the attention that
             it gets from the class token, the mean over heads. Of n patches, ceil(keep n) stay, best first. The last token is
             the sum of the others, weighted by their scores. The weights are not normalized, so that this token shrinks with
             the attention of the patches that it replaces.
    Off      `keep=1`.
    Departs  The product keep n is rounded to 6 digits before the ceiling: 0.55 * 100 keeps 55 patches; the authors take
             the ceiling of the float 55.00000000000001 and keep 56. The score is computed without attention dropout. All prefix
             tokens are protected; the authors' code may drop the distillation token. Without a class token, the score is the
             mean over all queries. As published, every token has size 1, also the fused one. `fuse="mean"` is an addition: the
             fused token is the weighted mean of the others and has the sum of their sizes.
    Raises   ValueError for a `keep` outside (0, 1], a block that does not exist, an unknown `fuse`, a `shrink` out of order,
             or a `saliency` that is no function.
    """

    needs = ("saliency",)

    def __init__(
        self, context: LayerContext, *,
        keep: float = 0.7, fuse: str = "sum", layers: tuple | None = None, shrink: tuple = (0.0, 0.0),
    ):  # fmt: skip
        super().__init__()
        check_context(context, class_token=True)
        if fuse not in ("sum", "mean", "none"):
            raise ValueError(f"fuse is {fuse!r}; expected 'sum' (as published), 'mean' or 'none'")
        if not isinstance(shrink, tuple | list) or len(shrink) != 2 or not 0 <= shrink[0] <= shrink[1] <= 1:
            raise ValueError(f"shrink is {shrink}; expected the progress at its start and end, such as (0.0, 0.3)")
        self.prefix, self.fuse, self.shrink = context.prefix, fuse, shrink
        self.keep = check_fraction(keep) if context.layer in pruning_layers(layers, context.depth) else 1.0
        self.queries = 1 if context.class_token else None
        self.progress = 1.0  # set by the objective during training

    def share(self) -> float:
        """Return the fraction of the patches that this block keeps at the moment. In evaluation this is the option `keep`. In
        training the fraction falls from 1 to `keep`. The option `shrink` says when: for example, (0.0, 0.3) means during the
        first 30% of the run.

        `shrink` is an interval of the training progress, which goes from 0 to 1.
        """
        start, end = self.shrink
        if not self.training or self.progress >= end:
            return self.keep
        if self.progress < start:
            return 1.0
        return self.keep + (1 - self.keep) * 0.5 * (1 + math.cos(math.pi * (self.progress - start) / (end - start)))

    def left(self, n: int) -> int:
        """Return the number of tokens after pruning in evaluation, if `n` tokens enter this block. These numbers include the
        prefix tokens (class token and registers). The result also counts the token into which the pruned patches are fused.
        """
        kept = kept_patches(self.keep, n - self.prefix)
        return self.prefix + kept + (self.fuse != "none" and kept < n - self.prefix)

    def forward(self, x: Tensor, size: Tensor | None, key: Any = None, saliency: Any = None) -> tuple[Tensor, Tensor | None]:
        n, p = x.shape[1], self.prefix
        kept = kept_patches(self.share(), n - p)
        if kept == n - p:
            return x, size
        if saliency is None:
            raise ValueError("Prune needs the saliency of the attention; return AttentionOutput(x, saliency=...)")
        check_function("Prune", "saliency", saliency)
        score = saliency(self.queries)[:, p:]
        order = p + score.argsort(dim=-1, descending=True, stable=True)
        stay, dropped = order[:, :kept], order[:, kept:]
        tokens = [x[:, :p], gather_tokens(x, stay)]
        if self.fuse == "mean" or size is not None:
            size = sizes_of(x, size)
        sizes = [] if size is None else [size[:, :p], gather_tokens(size, stay)]
        if self.fuse != "none":
            weight = gather_tokens(score, dropped - p).to(x.dtype)
            if self.fuse == "mean":
                total = weight.sum(1, keepdim=True)
                weight = weight / torch.where(total > 0, total, 1.0)  # 0 if all of them were removed before
            tokens.append(weight[:, None] @ gather_tokens(x, dropped))
            if size is not None:
                fused = gather_tokens(size, dropped).sum(1, keepdim=True)
                sizes.append(fused if self.fuse == "mean" else (fused > 0).to(fused.dtype))  # 0 if all were removed before
        return torch.cat(tokens, dim=1), torch.cat(sizes, dim=1) if sizes else None


def kept_patches(keep: float, patches: int) -> int:
    """Return the number of patches that stay if a fraction of them is kept. `keep` is the fraction and `patches` is the number
    of all patches. The product is rounded up, and at least one patch stays if there is any.
    """
    exact = round(keep * int(patches), 6)  # rounded first: 0.55 * 100 is 55.00000000000001 as a float
    return min(patches, max(1, math.ceil(exact)))
