"""Pooling: the tokens become one feature.

Contract: `pool(dim)` makes a module that is called `(x, size, prefix) -> feature (b, d)`. `x` is (b, n, d), its first `prefix`
tokens are prefix tokens. `size`, (b, n) or None, is the number of patches that each token stands for; it weights the mean. The
attribute `class_tokens` is the number of prefix tokens that the pool reads; the model makes them. A pool whose feature has
another width has `make_head(classes)`, which makes a module from feature to logits with a `weight` that the model initializes.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from smallvit import convolution


class ClassToken(nn.Module):
    """A pooling module that returns the class token. This extra first token collects information from all other tokens by
    attention.

    Paper  ViT, arXiv:2010.11929.
    """

    class_tokens = 1

    def __init__(self, dim: int):
        super().__init__()

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 1) -> Tensor:
        return x[:, 0]


class MeanTokens(nn.Module):
    """A pooling module that returns the mean of the patch tokens (global average pooling).

    Call it as `pool(x, size, prefix)`. The first `prefix` tokens (class token and registers) are left out. The default is 0, so
    give their number.
    """

    class_tokens = 0

    def __init__(self, dim: int):
        super().__init__()

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 0) -> Tensor:
        if size is None:
            return x[:, prefix:].mean(1)
        weight = size[:, prefix:, None].to(x.dtype)
        return (x[:, prefix:] * weight).sum(1) / weight.sum(1)


class SequencePool(nn.Module):
    """A pooling module that returns a weighted mean of the patch tokens. The weights are a softmax over one learned score for
    each token. Call it as `pool(x, size, prefix)`; the first `prefix` tokens, by default none, are left out.

    Paper    Hassani et al. 2021 (CCT), arXiv:2104.05704, section 3.2.
    Off      A score of zero for all tokens equals `MeanTokens`.
    """

    class_tokens = 0

    def __init__(self, dim: int):
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def macs(self, patches: float) -> float:
        """Return the number of multiply-adds (MACs) of the scores, for a number of patch tokens."""
        return patches * self.score.in_features

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 0) -> Tensor:
        x, score = x[:, prefix:], self.score(x[:, prefix:])
        if size is None:
            return (x * score.softmax(1)).sum(1)
        size = size[:, prefix:, None]
        # the maximum is over tokens of size above 0: a removed token with a large score must not make all others vanish
        above = score - score.detach().masked_fill(size == 0, float("-inf")).amax(1, keepdim=True)
        weight = size.to(x.dtype) * torch.where(above > 0, 0.0, above).exp()
        return (x * weight).sum(1) / weight.sum(1)


class Projected(nn.Module):
    """A pooling module that applies another pooling, `pool`, and then an MLP of `layers` layers of width `hidden` with
    BatchNorm. In self-supervised learning, the MLP replaces the first layers of the projection head. The rest of this head is
    dropped after training, but the MLP stays in the model.

    `pool` is a class that creates the pooling. Each layer of the MLP has a linear map, BatchNorm and GELU.

    Paper    Chen et al. 2020 (SimCLR v2), arXiv:2006.10029, section 2: part of the projection head stays on the backbone for
             fine-tuning and probing. Self-supervision then ends in a shallower head, `DINO(layers=1)`: together they compute
             what a head of three layers computes, and its hidden layers are not thrown away with it.
    Off      `layers=0` equals the pool.
    Departs  GELU, as in the heads of DINO; the paper has ReLU. All layers of the MLP stay in the model; the paper fine-tunes
             from the first layer of its head.

    Raises   ValueError for a training batch of one image, of which BatchNorm cannot compute a variance, for `hidden` below 1,
             and for negative `layers`.
    """

    def __init__(self, dim: int, *, pool: Callable = MeanTokens, hidden: int = 256, layers: int = 2):
        super().__init__()
        if hidden < 1 or layers < 0:
            raise ValueError(f"got hidden={hidden}, layers={layers}; expected hidden of at least 1 and layers of at least 0")
        self.pool = pool(dim)
        self.class_tokens, self.dim, self.width = self.pool.class_tokens, dim, hidden if layers else dim
        widths = [dim] + [hidden] * layers
        self.layers = nn.Sequential()
        for inputs, outputs in zip(widths[:-1], widths[1:]):  # no bias: BatchNorm has one
            self.layers.extend([nn.Linear(inputs, outputs, bias=False), convolution.BatchNorm1d(outputs), nn.GELU()])

    def forward(self, x: Tensor, size: Tensor | None = None, prefix: int = 0) -> Tensor:
        if self.training and len(x) == 1:
            raise ValueError("Projected uses BatchNorm and got a training batch of one image; expected at least two")
        return self.layers(self.pool(x, size, prefix))

    def macs(self, patches: float) -> float:
        """Return the number of multiply-adds (MACs) of the pool and the MLP, for a number of patch tokens."""
        inner = self.pool.macs(patches) if hasattr(self.pool, "macs") else 0
        return inner + sum(layer.weight.numel() for layer in self.layers if isinstance(layer, nn.Linear))

    def make_head(self, classes: int) -> nn.Linear:
        return nn.Linear(self.width, classes)


class DistilledTokens(nn.Module):
    """A pooling module that returns the class token and the distillation token of DeiT, concatenated to shape (batch, 2 *
    width). Each of the two tokens has its own linear head.

    Paper    Touvron et al. 2021 (DeiT), arXiv:2012.12877, section 4. `Distill(token=True)` trains both heads: the class token's
             from labels, the distillation token's from a teacher. The logits are the mean of both heads.
    Off      `ClassToken` with `registers=1` has the same tokens; its logits are those of the class token's head.
    Departs  The paper adds the softmax of both heads; the authors' code and timm average their logits, as here. With any other
             objective than `Distill(token=True)`, this average is trained.
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
    """Two linear heads, one for the class token and one for the distillation token of DeiT. The input is the two tokens,
    concatenated to shape (batch, 2 * width). The output is the mean of the logits of the two heads, shape (batch, classes).
    """

    def __init__(self, dim: int, classes: int):
        super().__init__()
        self.from_labels, self.from_teacher = nn.Linear(dim, classes), nn.Linear(dim, classes)

    def reset_parameters(self):
        nn.init.trunc_normal_(self.from_teacher.weight, std=0.02)

    @property
    def weight(self) -> Tensor:
        """Return the weight tensor of the head that is trained on labels. A single linear head (`nn.Linear`) also has an
        attribute `weight`, so the same code of the model initializes both kinds of heads.
        """
        return self.from_labels.weight

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the two heads separately, each of shape (batch, classes). The first head is trained on labels,
        the second on a teacher. `x` holds the features (batch, 2 * width).
        """
        class_token, distillation_token = x.chunk(2, dim=-1)
        return self.from_labels(class_token), self.from_teacher(distillation_token)

    def forward(self, x: Tensor) -> Tensor:
        from_labels, from_teacher = self.apart(x)
        return (from_labels + from_teacher) / 2
