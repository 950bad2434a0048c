"""Pooling: from tokens to one feature.

Contract: `pool(dim)` makes a module that is called `(x, size, prefix) -> b d`. `x` is b n d with `prefix` prefix tokens first;
`size`, b n or None, says how many patches each token stands for, and a merged token weighs as much as they do. The attribute
`class_tokens` says how many prefix tokens the pool reads; the model makes them.
"""

import torch
from torch import Tensor, nn


class ClassToken(nn.Module):
    """The feature is the class token: one extra token that looks at all others. Paper: ViT, arXiv:2010.11929."""

    class_tokens = 1

    def __init__(self, dim: int):
        super().__init__()

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 1) -> Tensor:
        return x[:, 0]


class MeanTokens(nn.Module):
    """The feature is the mean of the patch tokens (global average pooling), prefix tokens left out."""

    class_tokens = 0

    def __init__(self, dim: int):
        super().__init__()

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 0) -> Tensor:
        if size is None:
            return x[:, prefix:].mean(1)
        weight = size[:, prefix:, None].to(x.dtype)
        return (x[:, prefix:] * weight).sum(1) / weight.sum(1)


class SequencePool(nn.Module):
    """The feature is a weighted mean of the patch tokens, the weights a softmax of one learned score for each token.

    Paper    Hassani et al. 2021 (CCT), arXiv:2104.05704, section 3.2.
    Off      a score of zero for all tokens equals `MeanTokens`.
    """

    class_tokens = 0

    def __init__(self, dim: int):
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 0) -> Tensor:
        x, score = x[:, prefix:], self.score(x[:, prefix:])
        if size is None:
            return (x * score.softmax(1)).sum(1)
        size = size[:, prefix:, None]
        # the largest score of those that are there: one that is gone must not drown them, and log(size) has no gradient at 0
        above = score - score.detach().masked_fill(size == 0, float("-inf")).amax(1, keepdim=True)
        weight = size.to(x.dtype) * torch.where(above > 0, 0.0, above).exp()
        return (x * weight).sum(1) / weight.sum(1)
