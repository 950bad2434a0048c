"""Pooling: from tokens to one feature.

Contract: `pool(dim)` makes a module that is called `(x, size, prefix) -> b d`. `x` is b n d with `prefix` prefix tokens first;
`size`, b n or None, says how many patches each token stands for, and a merged token weighs as much as they do. The attribute
`class_tokens` says how many prefix tokens the pool reads; the model makes them. A pool whose feature is of another width has
`make_head(classes)`: it makes the module that turns the feature into logits, with a `weight` that is drawn as any head's.
"""

from collections.abc import Callable

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


class Projected(nn.Module):
    """Another pool, and behind it `layers` times a linear map to `hidden`, BatchNorm and GELU, as a projection head begins.

    Paper    Chen et al. 2020 (SimCLR v2), arXiv:2006.10029, section 2: a part of the projection head is kept behind the
             backbone, fine-tuned and probed. Self-supervision then ends in a shallower head, `DINO(layers=1)`: together they
             compute what a head of three layers computed, and its hidden layers are not thrown away with it.
    Off      `layers=0` equals the pool.

    Raises   ValueError for a training batch of one image, which BatchNorm has no deviation of.
    """

    def __init__(self, dim: int, *, pool: Callable = MeanTokens, hidden: int = 256, layers: int = 2):
        super().__init__()
        if hidden < 1 or layers < 0:
            raise ValueError(f"got hidden={hidden}, layers={layers}; expected at least 1 wide, and 0 layers or more")
        self.pool = pool(dim)
        self.class_tokens, self.dim, self.width = self.pool.class_tokens, dim, hidden if layers else dim
        widths = [dim] + [hidden] * layers
        self.layers = nn.Sequential()
        for before, after in zip(widths[:-1], widths[1:]):  # no bias: BatchNorm has one
            self.layers.extend([nn.Linear(before, after, bias=False), nn.BatchNorm1d(after), nn.GELU()])

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 0) -> Tensor:
        if self.training and len(x) == 1:
            raise ValueError("Projected has BatchNorm and got one image to train on; expected a batch of at least two")
        return self.layers(self.pool(x, size, prefix))

    def make_head(self, classes: int) -> nn.Linear:
        return nn.Linear(self.width, classes)


class DistilledTokens(nn.Module):
    """The feature is the class token and, beside it, a distillation token, b 2d; each has a head of its own.

    Paper    Touvron et al. 2021 (DeiT), arXiv:2012.12877, section 4. `Distill(token=True)` trains the two apart: the class
             token's head learns from labels, the other one from a teacher. The logits are the mean of both heads.
    Off      `ClassToken` with `registers=1` has the same tokens; its logits are those of the class token's head.
    Departs  The paper adds the softmax of both heads; its authors' code and timm take the mean of their logits, and so do we.
             With any other objective than `Distill(token=True)` that mean is what learns.
    """

    class_tokens = 2

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 2) -> Tensor:
        return x[:, :2].flatten(1)

    def make_head(self, classes: int) -> "TwoHeads":
        return TwoHeads(self.dim, classes)


class TwoHeads(nn.Module):
    """The heads of `DistilledTokens`: b 2d -> the mean of their logits, b k; `apart` gives both."""

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.from_labels, self.from_teacher = nn.Linear(dim, classes), nn.Linear(dim, classes)

    def reset_parameters(self):
        nn.init.trunc_normal_(self.from_teacher.weight, std=0.02)

    @property
    def weight(self) -> Tensor:
        """Of the head that learns from labels, which starts as the head of any other pool does."""
        return self.from_labels.weight

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits that learn from labels, and those that learn from a teacher."""
        label, taught = x.chunk(2, dim=-1)
        return self.from_labels(label), self.from_teacher(taught)

    def forward(self, x: Tensor) -> Tensor:
        label, taught = self.apart(x)
        return (label + taught) / 2
