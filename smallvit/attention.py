"""Attention: each token becomes a weighted mean of all tokens.

Contract: `attention(dim, heads)` makes a module that is called `(x, size, mask) -> AttentionOutput`.

- `x` is (b, n, d), for any number of tokens n, also 1. No parameter depends on n.
- `size`, (b, n) or None, is the number of patches that each token stands for. The attention weight of a key is proportional
  to `size * exp(logit)`: a token of size 2 counts as two equal tokens, one of size 0 is ignored. None means that all are 1.
- `mask`, boolean, is True where a query (row) may attend to a key (column): (n) for the keys, (n, n), or 4 axes that broadcast
  to (b, h, n, n). 3 axes are refused: the first could be images or heads. Each row must allow at least one key of size above
  0: otherwise the result of the row is NaN with some kernels, which makes all gradients NaN.
- An attribute `position` that is not None says that the module needs to know where its tokens are. It is then called
  `(x, size, mask, places)`; see `attention_positions`.
- A method `as_plain()` may return a `PlainAttention(scale, mask_self)`. It says that the module computes the usual attention
  from its linear maps `qkv` and `proj`, so that the native kernel can do the same, also for `key` and `saliency`.
- Further attributes are optional. `rows_sum_to_1 = False`: the rows of the attention map need not sum to 1. `macs_per_pair`:
  multiply-adds for a query and a key; the default is twice the input width of the linear map `proj`. `no_weight_decay`: names
  of parameters without weight decay. `not_stackable`: why runs with this module cannot be trained together as one model.

Letters in shapes: b images, h heads, n tokens, d width, e width of one head.
"""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class AttentionOutput(NamedTuple):
    """The result of an attention module: the new tokens `x`, and three functions that compute more when they are called.

    `key()` returns the keys, averaged over heads, (batch, tokens, width of the keys). `map()` returns the attention map,
    (batch, heads, tokens, tokens): how each query (row) distributes its attention over the keys. `saliency(queries)` returns
    the attention that each token receives, (batch, tokens): the mean over heads and over the first `queries` queries (by
    default all tokens of size above 0).

    Raises   TypeError for arithmetic, AttributeError for an attribute of a tensor: use `.x` instead.
    """

    x: Tensor
    key: Callable[[], Tensor] | None = None
    saliency: Callable[..., Tensor] | None = None
    map: Callable[[], Tensor] | None = None

    def _refuse(self, *_) -> NoReturn:
        """Raise TypeError, because an `AttentionOutput` cannot be used in arithmetic like a tensor. The error message says to
        use its attribute `x`, the tensor of tokens.
        """
        raise TypeError(NOT_A_TENSOR)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = __truediv__ = __neg__ = _refuse

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {NOT_A_TENSOR}" if hasattr(Tensor, name) else f"AttentionOutput has no {name!r}")


class PlainAttention(NamedTuple):
    """How `smallvit.native` can compute an attention itself: as softmax(scale * queries * keys) * values, from the linear maps
    `qkv` and `proj` of the module.

    An attention module says so by a method `as_plain`, which returns None if its options ask for something else. A subclass
    with another `forward` is not computed so, unless it has a method `as_plain` of its own.
    """

    scale: float | str  # a number, or the name of a parameter with a factor for each head
    mask_self: bool = False  # whether no token attends to itself, as in `mask_diagonal`


NOT_A_TENSOR = "attention returns an AttentionOutput, not a tensor; take its tokens: attention(x).x"


class Attention(nn.Module):
    """Multi-head self-attention, a module. Each new token is a weighted mean of all tokens. The weights are a softmax of the
    products of queries and keys.

    Call it as `attention(x, size, mask, places)`. `x` are tokens (b, n, dim). `size` (b, n) holds the number of patches in each
    token; None means 1. `mask` is boolean, True where a token may attend to another one: (n, n) for all images, (b, 1, n, n)
    for one mask per image, (b, 1, 1, n) to hide padding, or None. `places`, a `Places`, says where the patches are; only the
    option `position` needs it, and a `ViT` gives it. The call returns an `AttentionOutput`; the new tokens (b, n, dim) are its
    attribute `x`. In a model of timm, use `timm_attention`.

    The mask must let each token attend to at least one token, also padding: use `mask | torch.eye(n, dtype=torch.bool)`. A row
    that is False everywhere gives NaN with some kernels, and then all gradients are NaN.

    Paper    Vaswani et al. 2017, arXiv:1706.03762, in the form of ViT, arXiv:2010.11929.
    Departs  `size` adds log(size) to the logits (proportional attention, ToMe, arXiv:2210.09461); None adds nothing.

    `head_dim` is the width of one head, by default `dim / heads`. `qk_norm` applies a LayerNorm to the queries and keys of each
    head (arXiv:2302.05442). `dropout` acts on the attention map. `position` is `RelativeBias` or `Rotary`: positions inside
    attention. The attribute `fused` is True for PyTorch's fused kernel, False for matrix products, and None for the faster one.

    Raises   ValueError if `heads` does not divide `dim` and no `head_dim` is given, for a mask that is not boolean or has 3
             axes, and for a boolean `size`.
    """

    fused: bool | None = None
    added_options: ClassVar[dict[str, Any]] = {"position": None}

    def __init__(
        self, dim: int, heads: int, *,
        head_dim: int | None = None, qkv_bias: bool = True, qk_norm: bool = False, dropout: float = 0.0,
        position: Callable | None = None,
    ):  # fmt: skip
        super().__init__()
        head_dim = head_width(dim, heads, head_dim)
        check_rate(dropout=dropout)
        self.heads, self.scale, self.dropout = heads, head_dim**-0.5, dropout
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.proj = nn.Linear(heads * head_dim, dim)
        self.position = make_position(position, heads, head_dim)

    def forward(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Any = None
    ) -> AttentionOutput:
        q, k, v = split_heads(self.qkv(x), self.heads)
        q, k = self.q_norm(q), self.k_norm(k)
        return attend_and_project(self, q, k, v, size, mask, self.scale, places)

    def as_plain(self) -> PlainAttention | None:
        """Return how the native kernel can compute this attention, or None if it has positions, or normalizes queries and keys.
        """
        return PlainAttention(self.scale) if isinstance(self.q_norm, nn.Identity) and self.position is None else None


class LocalityAttention(nn.Module):
    """Locality self-attention (LSA), a multi-head attention module. No token attends to itself, and each head learns the
    temperature of its softmax.

    Call it as `attention(x, size, mask, places)`. `x` are tokens (b, n, dim). `size` (b, n) holds the number of patches in each
    token; None means 1. `mask` is boolean, True where a token may attend to another one: (n, n) for all images, (b, 1, n, n)
    for one mask per image, (b, 1, 1, n) to hide padding, or None. `places`, a `Places`, says where the patches are; only the
    option `position` needs it, and a `ViT` gives it. The call returns an `AttentionOutput`; the new tokens (b, n, dim) are its
    attribute `x`. In a model of timm, use `timm_attention`.

    Paper    Lee, Lee, Song 2021, arXiv:2112.13492, section 4.2. The temperature of a head is stored as the factor `scale` of
             its logits; it starts at 1 / sqrt(head_dim) and is learned. The diagonal of every attention map, also that of the
             class token, is masked out before the softmax.
    Off      `mask_self=False, temperature="fixed"` equals `Attention`. The mask and the temperature can also be used one
             without the other, which the paper does not report.
    Departs  From the paper: nothing in the function. From the authors' code: the mask is built for the tokens at hand, not for
             a fixed number, so merging, pruning, multi-crop and other resolutions work. The mask value is -inf, which half
             precision can hold. A token without any other token to attend to (n = 1, or all others of size 0) attends to
             itself; in the authors' code this happens by accident, and plain -inf gives NaN. The authors' CaiT uses -1e-9,
             which masks nothing. From vit-pytorch: `temperature="per layer"` is its variant, one scalar per layer, stored as a
             logarithm, so that its sign cannot change.

    `mask_self` masks the diagonal. `temperature` is "per head", "per layer" or "fixed". The other options are those of
    `Attention`, without `qk_norm`. The mask must let each token attend to at least one token of `size` above 0, as there; with
    `mask_self=True`, this may be the token itself. After token merging the diagonal stands for a whole group of patches: its
    members no longer attend to each other.

    Raises   ValueError if `heads` does not divide `dim` and no `head_dim` is given, for an unknown `temperature`, for a mask
             that is not boolean or has 3 axes, and for a boolean `size`.
    """

    fused: bool | None = None
    added_options: ClassVar[dict[str, Any]] = {"position": None}

    def __init__(
        self, dim: int, heads: int, *, mask_self: bool = True, temperature: str = "per head",
        head_dim: int | None = None, qkv_bias: bool = True, dropout: float = 0.0, position: Callable | None = None,
    ):  # fmt: skip
        super().__init__()
        if temperature not in ("per head", "per layer", "fixed"):
            raise ValueError(f"temperature is {temperature!r}; expected 'per head', 'per layer' or 'fixed'")
        head_dim = head_width(dim, heads, head_dim)
        check_rate(dropout=dropout)
        self.heads, self.mask_self, self.temperature, self.dropout = heads, mask_self, temperature, dropout
        self.start = head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * heads * head_dim, bias=qkv_bias)
        self.proj = nn.Linear(heads * head_dim, dim)
        if temperature == "per head":
            self.scale = nn.Parameter(torch.empty(heads))
        elif temperature == "per layer":
            self.log_scale = nn.Parameter(torch.empty(()))
        self.position = make_position(position, heads, head_dim)
        self.reset_parameters()

    def reset_parameters(self):
        if self.temperature == "per head":
            nn.init.constant_(self.scale, self.start)
        elif self.temperature == "per layer":
            nn.init.constant_(self.log_scale, torch.tensor(self.start, device="cpu").log().item())

    def forward(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Any = None
    ) -> AttentionOutput:
        q, k, v = split_heads(self.qkv(x), self.heads)
        if self.temperature == "per head":
            q = q * self.scale[:, None, None]
        elif self.temperature == "per layer":
            q = q * self.log_scale.exp()
        if self.mask_self:
            mask = mask_diagonal(x.shape[1], size, mask, x.device)
        return attend_and_project(self, q, k, v, size, mask, self.start if self.temperature == "fixed" else 1.0, places)

    def as_plain(self) -> PlainAttention | None:
        """Return how the native kernel can compute this attention, or None if it has positions or one temperature for all
        heads.
        """
        scales = {} if self.position is not None else {"per head": "scale", "fixed": self.start}
        return PlainAttention(scales[self.temperature], self.mask_self) if self.temperature in scales else None


def check_rate(**rates: float):
    """Raise ValueError unless all given rates of random drops are at least 0 and less than 1. Each keyword argument is the name
    of an option and its value, such as `dropout=0.1`.
    """
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise ValueError(f"{name} is {rate}; expected a probability of at least 0 and less than 1")


def head_width(dim: int, heads: int, head_dim: int | None) -> int:
    """Return the width of one attention head, an integer. The width is `head_dim` if given, else `dim / heads`. `dim` is the
    width of the tokens. Raise ValueError if `heads` does not divide `dim` and no `head_dim` is given, or if one of them is
    below 1.
    """
    if heads < 1 or (head_dim is not None and head_dim < 1):
        raise ValueError(f"got heads={heads}, head_dim={head_dim}; expected at least one head of width 1 or more")
    if head_dim is not None:
        return head_dim
    if dim % heads:
        divisors = [h for h in range(1, dim + 1) if dim % h == 0]
        nearest = sorted(sorted(divisors, key=lambda h: abs(h - heads))[:2])
        raise ValueError(f"{heads} heads do not divide width {dim}; use heads={nearest[0]} or {nearest[-1]}, or give head_dim")
    return dim // heads


def name_of(slot: Callable) -> str:
    """Return the name of the class that a slot such as `position` creates, also for a `partial`."""
    return getattr(getattr(slot, "func", slot), "__name__", repr(slot))


def acts_inside_attention(position: Callable) -> bool:
    """Return True for positions that attention uses in every block, and False for positions that are added to the tokens."""
    return "head_dim" in inspect.signature(position).parameters


def make_position(position: Callable | None, heads: int, head_dim: int) -> nn.Module | None:
    """Return the module for positions inside attention that the option `position` asks for, or None. `heads` is the number of
    heads, and `head_dim` is the width of each.

    Raises ValueError for positions that are added to tokens, and if the grid is not known.
    """
    if position is None:
        return None
    name, parameters = name_of(position), inspect.signature(position).parameters
    if not acts_inside_attention(position):
        raise ValueError(f"{name} is added to the tokens, not used inside attention; expected ViT(position={name})")
    if any(parameters[shape].default is inspect.Parameter.empty for shape in ("grid", "prefix")):
        raise ValueError(f"{name} needs the grid; use it in a ViT, or partial({name}, grid=(rows, columns), prefix=number)")
    grid = parameters["grid"].default
    if not (isinstance(grid, tuple | list) and len(grid) == 2):
        raise ValueError(f"grid of {name} is {grid!r}; expected a pair, (rows, columns)")
    return position(heads, head_dim)


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each of shape (b, h, n, e). `qkv` is the output of their joint projection, shape (b, n,
    3 h e). `heads` is the number h of heads, and e is the width of a head.

    Raises   ValueError for tokens without a batch, or in the form of an image.
    """
    check_tokens(qkv)
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def check_tokens(x: Tensor):
    """Raise ValueError for tokens without a batch, or in the form of an image."""
    if x.ndim != 3:
        raise ValueError(f"got tokens with {x.ndim} axes; expected 3, (batch, tokens, width): x[None] for a single image")


def mask_diagonal(n: int, size: Tensor | None, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return a boolean attention mask for `n` tokens in which no token attends to itself. True allows attention; the shape can
    be broadcast to (batch, heads, n, n). Pairs that are False in `mask` are excluded too. `size` and `mask` may be None.

    A token that could then attend to no token of `size` above 0 attends to itself. The mask does not exclude tokens of size 0
    (removed tokens): attention ignores them anyway, and learned pruning needs the gradient to their sizes.
    """
    eye = torch.eye(n, dtype=torch.bool, device=device)
    if size is None and mask is None:
        return ~eye if n > 1 else eye
    allowed = ~eye if mask is None else ~eye & check_mask(mask, n)
    present = allowed if size is None else allowed & (size > 0)[:, None, None, :]
    return allowed | (eye & ~present.any(-1, keepdim=True))


def check_mask(mask: Tensor, queries: int | None = None) -> Tensor:
    """Return a boolean attention mask with at least two axes (queries, keys). A mask with one axis is the same for all queries:
    its shape (keys) becomes (1, keys). Raise ValueError if `mask` is not boolean, has three axes, or is for another number of
    `queries`.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}; expected torch.bool, True where a query may attend to a key")
    if mask.ndim == 3:  # they would be heads, queries and keys, but most callers mean images, queries and keys
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; expected 1, 2 or 4 axes: for one mask per image use mask[:, None], for one "
            "mask per head use mask[None]"
        )
    if queries is not None and mask.ndim == 2 and mask.shape[0] not in (1, queries):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} for {queries} tokens; expected (queries, keys). A mask for the keys of each "
            "image, (batch, keys), is mask[:, None, None, :]"
        )
    return torch.atleast_2d(mask)


def check_size(size: Tensor | None):
    """Raise ValueError if `size` is boolean: it is a mask then, and no number of patches in each token (batch, tokens)."""
    if size is not None and size.dtype == torch.bool:
        raise ValueError(
            f"size is a boolean tensor of shape {tuple(size.shape)}; expected the number of patches in each token: give a mask "
            "for the keys of each image as mask=keys[:, None, None, :]"
        )


def attend_and_project(
    module: Any, q: Tensor, k: Tensor, v: Tensor, size: Tensor | None, mask: Tensor | None, scale: float, places: Any = None
) -> AttentionOutput:
    """Compute attention from queries `q`, keys `k` and values `v` (batch, heads, tokens, width), and return an
    `AttentionOutput`. The attention module `module` has the output projection, which is applied at the end. `size` is the
    number of patches in each token; None means 1. `mask` is True where attention is allowed; None allows all. `scale`
    multiplies the logits. `places` says where the tokens are, if the module has positions.

    The dropout rate, the choice of the kernel and the positions are attributes of `module`.
    """
    mask = None if mask is None else check_mask(mask, q.shape[-2])
    key = k
    q, k, bias = apply_position(module, q, k, places)
    x, attention_map = attend(q, k, v, size, mask, module.dropout if module.training else 0.0, module.fused, scale, bias)

    def saliency(queries=None) -> Tensor:  # no `int | None`: torch 2.6 cannot export it
        rows_mask = mask if mask is None or mask.shape[-2] == 1 else mask[..., :queries, :]
        queried = q[:, :, :queries] * scale
        rows_bias = None if bias is None else bias[..., :queries, :]
        rows = weights(queried, k, size, rows_mask, rows_bias) if attention_map is None else attention_map[:, :, :queries]
        return mean_over_queries(rows.mean(1), None if queries is not None else size)

    return AttentionOutput(
        module.proj(x.transpose(1, 2).flatten(2)),
        key=lambda: mean_over_heads(key),  # not turned: reductions ask what is alike, not what is near
        saliency=saliency,
        map=lambda: weights(q * scale, k, size, mask, bias) if attention_map is None else attention_map,
    )


def mean_over_heads(x: Tensor) -> Tensor:
    """Return the mean of `x` (batch, heads, tokens, width) over the heads, (batch, tokens, width)."""
    first, *others = x.unbind(1)  # sums of whole heads take less time than x.mean(1) with these strides
    return sum(others, first) / x.shape[1]


def mean_over_queries(rows: Tensor, size: Tensor | None) -> Tensor:
    """Return the attention that each token receives (batch, tokens), as a mean over queries. `rows` (batch, queries, tokens) is
    the attention of each query. Queries of `size` 0 (removed tokens) do not count; None counts all.
    """
    if size is None:
        return rows.mean(1)
    present = (size > 0).to(rows.dtype)
    return torch.einsum("bq,bqk->bk", present, rows) / present.sum(1, keepdim=True)


def apply_position(module: Any, q: Tensor, k: Tensor, places: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return queries and keys that the positions of the attention module `module` have turned, and what they add to the logits;
    None adds nothing. `places` says where the tokens are. Without positions, `q` and `k` are returned unchanged.

    Raises ValueError if the module has positions and `places` is None.
    """
    if module.position is None:
        return q, k, None
    if places is None:
        raise ValueError(
            f"{type(module).__name__} has positions ({type(module.position).__name__}) and got no places; expected a call by a "
            "ViT, or attention(x, places=...)"
        )
    return module.position(q, k, places)


def attend(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor | None = None, mask: Tensor | None = None,
    dropout: float = 0.0, fused: bool | None = None, scale: float = 1.0, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return the attention output (batch, heads, tokens, width) of queries `q`, keys `k` and values `v`, and the attention map
    or None. `size` is the number of patches in each token, `mask` is True where attention is allowed, `dropout` is a rate, and
    `scale` multiplies the logits, to which `bias` is added. `fused` is True for PyTorch's fused kernel, which gives no map,
    False for matrix products, or None for the faster one.

    The map has the shape (batch, heads, tokens, tokens). It is None if the kernel computes none.

    There are two kernels, which agree up to rounding. On a GPU the fused `scaled_dot_product_attention` is always used. On a
    CPU it is slower than two matrix products and a softmax while the map fits in the cache, so it is used from 128 tokens on
    (512 in half precision, in which it is slow). True or False for `fused` overrides this rule. Sizes with a gradient need the
    map.
    """
    if size is not None and size.requires_grad:
        return attend_with_size_gradient(q * scale, k, v, size, mask, dropout, bias), None
    if fused is None:
        n = q.shape[-2]  # no int in a trace or an export for images of any size, in which the choice would hold for all sizes
        fused = q.device.type != "cpu" or not isinstance(n, int) or n >= (128 if q.dtype == torch.float32 else 512)
    if fused:
        bias = logit_bias(size, mask, bias)
        bias = None if bias is None else bias.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale), None
    attention_map = weights(q * scale, k, size, mask, bias)
    return F.dropout(attention_map.to(v.dtype), dropout) @ v, attention_map


def weights(q: Tensor, k: Tensor, size: Tensor | None, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """Return the attention map (batch, heads, tokens, tokens) of queries `q` and keys `k`. Each row sums to 1. `size` is the
    number of patches in each token: larger tokens get more attention. `mask` is True where attention is allowed. `bias` is
    added to the logits.

    Each key is weighted by exp(query * key) times its `size`. Sizes get no gradient.
    """
    logits = q @ k.transpose(-2, -1)
    bias = logit_bias(None if size is None else size.detach(), mask, bias)
    return (logits if bias is None else logits + bias).softmax(-1)


def logit_bias(size: Tensor | None, mask: Tensor | None, bias: Tensor | None = None) -> Tensor | None:
    """Return a tensor to add to the attention logits before the softmax: log(size) for each key, and -inf where the boolean
    `mask` is False. `size` (batch, tokens) is the number of patches in each token. `bias` is added to it.

    The shape broadcasts to (b, h, n, n). The result is None without sizes, mask and bias.
    """
    check_size(size)
    if size is not None:
        of_sizes = size.log()[:, None, None, :]
        bias = of_sizes if bias is None else bias + of_sizes
    if mask is None:
        return bias
    zero = torch.zeros((), device=mask.device) if bias is None else bias
    return torch.where(check_mask(mask), zero, float("-inf"))


def attend_with_size_gradient(
    q: Tensor, k: Tensor, v: Tensor, size: Tensor, mask: Tensor | None, dropout: float, bias: Tensor | None = None
) -> Tensor:
    """Return the attention output (batch, heads, tokens, width) of queries `q`, keys `k` and values `v`. `size` is the number
    of patches in each token, 0 for a removed token. In the backward pass, all sizes get a gradient, also those that are 0;
    learned pruning needs this. `mask` is True where attention is allowed, `dropout` is the dropout rate, and `bias` is added to
    the logits.

    Adding log(size) to the logits, as `attend` does otherwise, has no gradient at size 0. As in DynamicViT (arXiv:2106.02034,
    equations 10 and 11) a token always attends to itself with its own size, or 1 if it was removed, and this part carries no
    gradient to the size. No token attends to a removed token; only the gradient uses its key and value.

    Departs  No exponential exceeds 1, so that no removed token can make the sum overflow. The authors' gradient to the size of
             a removed token is larger if its logit is above those of all present tokens: often 2 to 70, rarely 1e6 times.
             Measured with that gradient (up to 1e6 times) on scikit-learn's digits, 400 labels, difference in accuracy and its
             standard error: `LearnedPrune` +0.4 ± 0.4 points at keep=0.5 and -6.3 ± 2.8 at keep=0.3 (6 seeds), without gradient
             clipping -20 ± 6 at keep=0.5 (4 seeds); `LearnedThresholds` +2.9 ± 1.4, with 9.7 tokens left for 9.3 (6 seeds).
    """
    logits = q @ k.transpose(-2, -1)
    logits = logits if bias is None else logits + bias
    logits = at_least_float32(logits)
    visible = (size > 0)[:, None, None, :]
    if mask is not None:
        visible = visible & check_mask(mask)
    above = logits - logits.detach().masked_fill(~visible, float("-inf")).amax(-1, keepdim=True)
    exponential = torch.where(above > 0, 0.0, above).exp()
    if mask is not None:
        exponential = exponential * check_mask(mask)
    factor = size.to(logits.dtype)[:, None, :, None]  # multiplied with the values, which saves a second map
    own_factor = torch.where(factor > 0, factor, 1.0).detach() - factor
    to_itself = exponential.diagonal(dim1=-2, dim2=-1)[..., None] * own_factor
    total = exponential @ factor.expand(-1, exponential.shape[1], -1, -1) + to_itself
    return ((F.dropout(exponential, dropout) @ (factor * v) + to_itself * v) / total).to(v.dtype)


def at_least_float32(x: Tensor) -> Tensor:
    """Return a tensor of half precision as float32, in which small differences are not rounded away. Tensors of float32 and
    float64 are returned unchanged.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
