"""Other kinds of attention: differential, sigmoid and talking-heads attention.

Each follows the contract of the slot: see `smallvit.attention`.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.attention import (
    Attention,
    AttentionOutput,
    apply_position,
    attend_and_project,
    attend_with_size_gradient,
    check_mask,
    check_rate,
    check_size,
    check_tokens,
    logit_bias,
    mean_over_queries,
    split_heads,
)


class DifferentialAttention(nn.Module):
    """Differential attention, a multi-head attention module. Each head computes two attention maps, and subtracts the second
    map, multiplied by a learned number (lambda), from the first. What both maps have in common, such as noise, cancels.

    Each head has two groups of queries and keys of width `dim / (2 heads)`, and values of twice this width. For queries and
    keys of the same width as in `Attention`, use half as many heads.

    `lambda_init` is the initial value of lambda. None means the paper's value for the index of the block, which only a `ViT`
    passes on. In timm or in a model of your own, None means 0.2, the value of the first block; call
    `module.set_context(LayerContext(layer=i))` for the block with the index i. `dropout` acts on both maps. A mask must let
    each token attend to at least one token, as in `Attention`.

    Paper    Ye et al. 2024, arXiv:2410.05258: (1 - lambda_init) RMSNorm((softmax(q1 k1) - lambda softmax(q2 k2)) v) for each
             head, lambda = exp(a1 b1) - exp(a2 b2) + lambda_init with vectors a and b that all heads of a block share, and
             lambda_init = 0.8 - 0.6 exp(-0.3 layer), from 0.2 in the first block to almost 0.8.
    Off      None: the two groups and the norm of each head have no counterpart in `Attention`.
    Departs  Token sizes and masks act on both maps. `map()` returns the difference. Its rows sum to 1 - lambda, and it has
             negative entries. `saliency()` is computed from the first map, which has none.
    Raises   ValueError if `2 heads` does not divide `dim`.
    """

    fused: bool | None = None
    rows_sum_to_1 = False
    no_weight_decay = ("lambda_queries", "lambda_keys")

    def __init__(
        self, dim: int, heads: int, *, lambda_init: float | None = None, qkv_bias: bool = True, dropout: float = 0.0
    ):  # fmt: skip
        super().__init__()
        if heads < 1 or dim % (2 * heads):
            raise ValueError(f"got {heads} heads for width {dim}; expected that 2 * heads divides it, for two groups per head")
        check_rate(dropout=dropout)
        width = dim // (2 * heads)
        self.heads, self.scale, self.dropout, self.macs_per_pair = heads, width**-0.5, dropout, 3 * dim
        self.by_layer = lambda_init is None
        self.lambda_init = lambda_at(0) if lambda_init is None else lambda_init
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.lambda_queries = nn.Parameter(torch.empty(2, width))
        self.lambda_keys = nn.Parameter(torch.empty(2, width))
        self.norm = nn.RMSNorm(2 * width, eps=1e-5)
        self.proj = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.normal_(self.lambda_queries, std=0.1)
        nn.init.normal_(self.lambda_keys, std=0.1)

    def set_context(self, context: Any):
        """Set the paper's `lambda_init` for the block with the index `context.layer`, unless the option is set."""
        if self.by_layer:
            self.lambda_init = lambda_at(context.layer)

    def forward(self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None) -> AttentionOutput:
        check_tokens(x)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        queries, keys = (part.unflatten(-1, (self.heads, 2, -1)).permute(3, 0, 2, 1, 4).unbind(0) for part in (q, k))
        v = v.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        options = Unprojected(self.dropout, self.training, self.fused)
        first, second = (attend_and_project(options, q, k, v, size, mask, self.scale) for q, k in zip(queries, keys))
        products = (self.lambda_queries * self.lambda_keys).to(torch.promote_types(v.dtype, torch.float32)).sum(-1).exp()
        factor = (products[0] - products[1] + self.lambda_init).to(v.dtype)
        heads = (first.x - factor * second.x).unflatten(-1, (self.heads, -1))
        normed = F.rms_norm(heads, heads.shape[-1:], self.norm.weight.to(heads.dtype), self.norm.eps)
        return AttentionOutput(
            self.proj(((1 - self.lambda_init) * normed).flatten(-2)),
            key=lambda: torch.cat([first.key(), second.key()], dim=-1),  # pyright: ignore[reportOptionalCall]
            saliency=first.saliency,
            map=lambda: first.map() - factor * second.map(),  # pyright: ignore[reportOptionalCall]
        )


class Unprojected(NamedTuple):
    """The options that `attend_and_project` reads from a module, for attention without an output projection."""

    dropout: float
    training: bool
    fused: bool | None
    position: None = None

    def proj(self, x: Tensor) -> Tensor:
        """Return `x` unchanged."""
        return x


def lambda_at(layer: int) -> float:
    """Return the initial lambda of differential attention in the block with the index `layer`, from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


class SigmoidAttention(Attention):
    """Sigmoid attention, a multi-head attention module. Each attention weight is the sigmoid of its logit, instead of a softmax
    over all logits. So the weight of a key does not depend on the other keys, and the weights of a query do not sum to 1.

    The logarithm of the number of tokens is subtracted from the logits, so that the weights sum to almost 1 if all logits are
    0. The options are those of `Attention`; `qk_norm=True` keeps logits small, which makes training more stable.

    Paper    Ramapuram et al. 2024, arXiv:2409.04431, section 3: sigmoid(q k / sqrt(head_dim) + b) with b = -log n.
    Off      None: a sigmoid has no setting at which it is a softmax.
    Departs  The weight of a key is multiplied by its size, and n is the sum of all sizes. So merging equal tokens does not
             change the result, and a token of size 0 is ignored. There is one kernel, so `fused` has no effect.
    Raises   ValueError as `Attention` does.
    """

    rows_sum_to_1 = False

    def forward(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Any = None
    ) -> AttentionOutput:
        check_size(size)
        q, k, v = split_heads(self.qkv(x), self.heads)
        q, key = self.q_norm(q), self.k_norm(k)
        q, k, bias = apply_position(self, q, key, places)
        if size is None:
            n = x.shape[1]  # no int in a trace or an export for images of any size
            log_n = math.log(n) if isinstance(n, int) else torch.ones(n, dtype=torch.float32, device=x.device).sum().log()
        else:
            log_n = size.sum(-1).log()[:, None, None, None]
        logits = q * self.scale @ k.transpose(-2, -1) - log_n
        attention_map = (logits if bias is None else logits + bias).sigmoid()
        if size is not None:
            attention_map = attention_map * size[:, None, None, :]
        if mask is not None:
            attention_map = attention_map * check_mask(mask)
        return output_of_maps(self, attention_map, attention_map, key, v, size)


class TalkingHeadsAttention(Attention):
    """Talking-heads attention, a multi-head attention module. The heads exchange information: a learned matrix mixes their
    logits before the softmax, and another one mixes their attention maps after it.

    `mix_logits` and `mix_maps` switch the two matrices on. The other options are those of `Attention`, without `position`. A
    mask must let each token attend to at least one token, as there.

    Paper    Shazeer et al. 2020, arXiv:2003.02436; used in CaiT, arXiv:2103.17239.
    Off      `mix_logits=False, mix_maps=False` equals `Attention`. With both on, it equals `Attention` before the first step.
    Departs  Both matrices start as the identity, and have no bias. In CaiT they start at random with std 0.02, so all maps are
             almost 0 at first. A bias of the logits would cancel in the softmax, and a bias of the maps would attend to tokens
             that are masked or removed. Sizes and masks act after the logits are mixed. `saliency()` is computed from the maps
             before they are mixed, which are never negative. The matrices get no weight decay in a run of smallvit, because it
             would pull them away from the identity; other optimizers need a group without decay for them. There is one kernel,
             so `fused` has no effect.
    Raises   ValueError as `Attention` does.
    """

    rows_sum_to_1 = False
    no_weight_decay = ("mix_logits", "mix_maps")

    def __init__(
        self, dim: int, heads: int, *, mix_logits: bool = True, mix_maps: bool = True,
        head_dim: int | None = None, qkv_bias: bool = True, qk_norm: bool = False, dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__(dim, heads, head_dim=head_dim, qkv_bias=qkv_bias, qk_norm=qk_norm, dropout=dropout)
        self.mix_logits = nn.Parameter(torch.empty(heads, heads)) if mix_logits else None
        self.mix_maps = nn.Parameter(torch.empty(heads, heads)) if mix_maps else None
        self.macs_per_pair = 2 * self.proj.in_features + (mix_logits + mix_maps) * heads**2
        self.reset_parameters()

    def reset_parameters(self):
        for matrix in (self.mix_logits, self.mix_maps):
            if matrix is not None:
                nn.init.eye_(matrix)

    def forward(self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None) -> AttentionOutput:
        if self.mix_logits is None and self.mix_maps is None:
            return super().forward(x, size, mask)
        q, k, v = split_heads(self.qkv(x), self.heads)
        q, k = self.q_norm(q) * self.scale, self.k_norm(k)
        if size is not None and size.requires_grad:
            softmaxed = self.maps_with_size_gradient(q, k, size, mask)
        else:
            logits, bias = mix_heads(self.mix_logits, q @ k.transpose(-2, -1)), logit_bias(size, mask)
            softmaxed = (logits if bias is None else logits + bias).softmax(-1)
        return output_of_maps(self, mix_heads(self.mix_maps, softmaxed), softmaxed, k, v, size)

    def maps_with_size_gradient(self, q: Tensor, k: Tensor, size: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention maps before they are mixed. In the backward pass all sizes get a gradient, as in
        `attend_with_size_gradient`.

        That function needs queries and keys. A mixed logit is the product of a long query (the queries of all heads, times
        their factors) and a long key (the keys of all heads). With the identity matrix as values, the result is the map.
        """
        if self.mix_logits is not None:
            q = torch.einsum("gh,bhne->bgnhe", self.mix_logits, q).flatten(-2)
            k = k.transpose(1, 2).flatten(-2)[:, None].expand(-1, self.heads, -1, -1)
        return attend_with_size_gradient(q, k, torch.eye(k.shape[-2], dtype=k.dtype, device=k.device), size, mask, 0.0)


def mix_heads(matrix: Tensor | None, maps: Tensor) -> Tensor:
    """Return attention maps or logits (batch, heads, tokens, tokens), each replaced by a weighted sum over all heads. Row g of
    `matrix` (heads, heads) holds the weights for head g. None changes nothing.
    """
    return maps if matrix is None else torch.einsum("gh,bhqk->bgqk", matrix.to(maps.dtype), maps)


def output_of_maps(module: Any, maps: Tensor, received: Tensor, k: Tensor, v: Tensor, size: Tensor | None) -> AttentionOutput:
    """Return the `AttentionOutput` of an attention module that computes its attention maps itself: `maps` (batch, heads,
    tokens, tokens). `received` are the maps from which the saliency is computed, `k` and `v` the keys and values (batch, heads,
    tokens, width), and `size` is the number of patches in each token; None means 1.
    """

    def saliency(queries=None) -> Tensor:  # no `int | None`: torch 2.6 cannot export it
        return mean_over_queries(received[:, :, :queries].mean(1), None if queries is not None else size)

    x = F.dropout(maps.to(v.dtype), module.dropout, module.training) @ v
    return AttentionOutput(
        module.proj(x.transpose(1, 2).flatten(2)), key=lambda: k.mean(1), saliency=saliency, map=lambda: maps
    )
