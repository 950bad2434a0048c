"""Attention: tokens look at tokens.

Contract: `attention(dim, heads)` makes a module that is called `(x, size, mask) -> AttentionOutput`.

- `x` is b n d; any n, also 1. No parameter depends on n.
- `size`, b n or None, says how many patches each token stands for: a key is weighed by its size (weights proportional to
  `size * exp(logit)`), so a token of size 2 counts as two equal tokens and a token of size 0 is gone. None means all ones.
- `mask`, broadcastable to b h n n, is True where a query (row) may look at a key (column).

Letters: b images, h heads, n tokens, d width, e width of one head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AttentionOutput(NamedTuple):
    """What attention returns: the mixed tokens, and three facts about them that a reduction or a picture may ask for.

    `key()` is the mean over heads of the keys, b n e. `saliency(queries)` is the attention that each token receives, b n: the
    mean over heads and over the first `queries` tokens (by default all that are there). `map()` is the attention map, b h n n:
    how each query (row) shares its attention out over the keys. They are computed only when called.
    """

    x: Tensor
    key: Callable[[], Tensor] | None = None
    saliency: Callable[..., Tensor] | None = None
    map: Callable[[], Tensor] | None = None


class Attention(nn.Module):
    """Multi-head self-attention: every token becomes a mean of all tokens, weighed by how well query and key agree.

    Paper    Vaswani et al. 2017, arXiv:1706.03762, in the form of ViT, arXiv:2010.11929.
    Departs  `size` adds log(size) to the logits (proportional attention, ToMe, arXiv:2210.09461); with None nothing is added.

    `head_dim` frees the head width from `dim / heads`; `qk_norm` normalises queries and keys of each head (arXiv:2302.05442);
    `dropout` acts on the attention map. The attribute `fused` overrides the choice of kernel (see `attend`).

    Raises   ValueError if `heads` does not divide `dim` and no `head_dim` is given.
    """

    fused: bool | None = None

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        head_dim = width_of_head(dim, heads, head_dim)
        self.heads, self.scale, self.dropout = heads, head_dim**-0.5, dropout
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.proj = nn.Linear(heads * head_dim, dim)

    def forward(self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None) -> AttentionOutput:
        q, k, v = split_heads(self.qkv(x), self.heads)
        q, k = self.q_norm(q), self.k_norm(k)
        return mix(q, k, v, size, mask, self.proj, self.dropout if self.training else 0.0, self.fused, self.scale)


class LocalityAttention(nn.Module):
    """Locality self-attention (LSA): no token looks at itself, and each head learns how sharply it looks.

    Paper    Lee, Lee, Song 2021, arXiv:2112.13492, section 4.2. Per head a temperature, here as the factor `scale` of the
             logits, starts at 1 / sqrt(e) and is learned; the diagonal of every attention map, the class token's own place
             included, is masked out before the softmax.
    Off      `mask_self=False, temperature="fixed"` equals `Attention`. Each half can be switched on alone, which the paper
             does not report.
    Departs  From the paper: nothing in the function. From the authors' code: the mask is built for the tokens at hand and
             not for a fixed count, so merging, pruning, multi-crop and other resolutions work; the fill is -inf, which half
             precision can hold; a token with nobody else to look at (n = 1, or all others of size 0) looks at itself where
             the authors' code does so by accident and -inf gives NaN. Their CaiT fills with -1e-9, which masks nothing.
             From vit-pytorch: `temperature="per layer"` is its variant, one scalar a layer, stored as a logarithm, which
             therefore cannot change its sign.

    With merged tokens the diagonal is a whole group: its members no longer see each other.

    Raises   ValueError if `heads` does not divide `dim` and no `head_dim` is given, or for an unknown `temperature`.
    """

    fused: bool | None = None

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        mask_self: bool = True,
        temperature: str = "per head",
        head_dim: int | None = None,
        qkv_bias: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        if temperature not in ("per head", "per layer", "fixed"):
            raise ValueError(f"temperature is {temperature!r}; expected 'per head', 'per layer' or 'fixed'")
        head_dim = width_of_head(dim, heads, head_dim)
        self.heads, self.mask_self, self.temperature, self.dropout = heads, mask_self, temperature, dropout
        self.start = head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.proj = nn.Linear(heads * head_dim, dim)
        if temperature == "per head":
            self.scale = nn.Parameter(torch.empty(heads))
        elif temperature == "per layer":
            self.log_scale = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self):
        if self.temperature == "per head":
            nn.init.constant_(self.scale, self.start)
        elif self.temperature == "per layer":
            nn.init.constant_(self.log_scale, torch.tensor(self.start).log().item())

    def forward(self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None) -> AttentionOutput:
        q, k, v = split_heads(self.qkv(x), self.heads)
        if self.temperature == "per head":
            q = q * self.scale[:, None, None]
        elif self.temperature == "per layer":
            q = q * self.log_scale.exp()
        if self.mask_self:
            mask = others(x.shape[1], size, mask, x.device)
        scale = self.start if self.temperature == "fixed" else 1.0
        return mix(q, k, v, size, mask, self.proj, self.dropout if self.training else 0.0, self.fused, scale)


def width_of_head(dim: int, heads: int, head_dim: int | None) -> int:
    """As given, or an equal share of the model's width."""
    if heads < 1 or (head_dim is not None and head_dim < 1):
        raise ValueError(f"got heads={heads}, head_dim={head_dim}; expected at least one head, at least one wide")
    if head_dim is not None:
        return head_dim
    if dim % heads:
        near = [h for h in range(1, dim + 1) if dim % h == 0]
        fits = sorted(sorted(near, key=lambda h: abs(h - heads))[:2])
        raise ValueError(f"{heads} heads do not divide width {dim}; take heads={fits[0]} or {fits[-1]}, or give head_dim")
    return dim // heads


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """b n (3 h e) -> three of b h n e."""
    return qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def others(n: int, size: Tensor | None, mask: Tensor | None, device: torch.device) -> Tensor:
    """True where a token may look at another one; at itself only if nothing else is left for it to see."""
    eye = torch.eye(n, dtype=torch.bool, device=device)
    if size is None and mask is None:
        return ~eye if n > 1 else eye
    allowed = ~eye
    if size is not None:
        allowed = allowed & (size > 0)[:, None, None, :]
    if mask is not None:
        allowed = allowed & boolean(mask)
    return allowed | (eye & ~allowed.any(-1, keepdim=True))


def boolean(mask: Tensor) -> Tensor:
    """The mask with at least the axes n n."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; expected torch.bool, True where a query may look at a key")
    return torch.atleast_2d(mask)


def mix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor | None,
    mask: Tensor | None,
    proj: nn.Module,
    dropout: float,
    fused: bool | None,
    scale: float,
) -> AttentionOutput:
    """What the tokens see, heads joined and projected."""
    x, seen = attend(q, k, v, size, mask, dropout, fused, scale)

    def saliency(queries: int | None = None) -> Tensor:
        asking = mask if mask is None or boolean(mask).shape[-2] == 1 else boolean(mask)[..., :queries, :]
        rows = (weights(q[:, :, :queries] * scale, k, size, asking) if seen is None else seen[:, :, :queries]).mean(1)
        if queries is not None or size is None:
            return rows.mean(1)
        there = (size > 0).to(rows.dtype)
        return torch.einsum("bq,bqk->bk", there, rows) / there.sum(1, keepdim=True)

    def whole() -> Tensor:
        return weights(q * scale, k, size, mask) if seen is None else seen

    return AttentionOutput(proj(x.transpose(1, 2).flatten(2)), key=lambda: k.mean(1), saliency=saliency, map=whole)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    size: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    fused: bool | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """The values that each token sees, b h n e, by the faster of two kernels that agree to rounding; and the attention map,
    b h n n, where the kernel makes one.

    On a CPU the fused kernel of `scaled_dot_product_attention` loses to two products and a softmax while the map fits in the
    cache, so it is taken from 128 tokens on (512 in half precision, which it is slow at); on a GPU always. `fused` overrides
    the rule. Sizes with a gradient need the map. Logits are multiplied by `scale`.
    """
    if size is not None and size.requires_grad:
        return learn_sizes(q * scale, k, v, size, mask, dropout), None
    if fused is None:
        fused = q.device.type != "cpu" or q.shape[-2] >= (128 if q.dtype == torch.float32 else 512)
    if fused:
        bias = bias_of(size, mask)
        bias = None if bias is None else bias.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale), None
    seen = weights(q * scale, k, size, mask)
    return F.dropout(seen.to(v.dtype), dropout) @ v, seen


def weights(q: Tensor, k: Tensor, size: Tensor | None, mask: Tensor | None) -> Tensor:
    """The attention map, b h n n, proportional to size * exp(logit); rows sum to 1. No gradient to the sizes."""
    logits = q @ k.transpose(-2, -1)
    bias = bias_of(None if size is None else size.detach(), mask)
    return (logits if bias is None else logits + bias).softmax(-1)


def bias_of(size: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """What is added to the logits, broadcastable to b h n n: log(size) of the key, and -inf where the mask forbids."""
    bias = None if size is None else size.log()[:, None, None, :]
    if mask is None:
        return bias
    zero = torch.zeros((), device=mask.device) if bias is None else bias
    return torch.where(boolean(mask), zero, float("-inf"))


def learn_sizes(q: Tensor, k: Tensor, v: Tensor, size: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """The values that each token sees, b h n e, with their gradient to the sizes, which the logarithm does not have at 0.

    As in DynamicViT (arXiv:2106.02034, equations 10 and 11) a token always sees itself, as one if it is gone, and its size has
    no part in that: nobody looks at the row of a token that is gone, but the gradient asks what it would have said. The largest
    logit is taken over the tokens that are there, and no exponential is above 1, so that none of the gone can drown a row.
    """
    logits = q @ k.transpose(-2, -1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    there = bias_of((size > 0).to(logits.dtype), mask)
    above = logits - (logits.detach() + there).amax(-1, keepdim=True)
    grown = torch.where(above > 0, 0.0, above).exp()
    if mask is not None:
        grown = grown * boolean(mask)
    factor = size.to(logits.dtype)[:, None, :, None]  # by the values, so that no second map is made
    itself = torch.where(factor > 0, factor, 1.0).detach() - factor
    alone = grown.diagonal(dim1=-2, dim2=-1)[..., None] * itself
    total = grown @ factor.expand(-1, grown.shape[1], -1, -1) + alone
    return ((F.dropout(grown, dropout) @ (factor * v) + alone * v) / total).to(v.dtype)
