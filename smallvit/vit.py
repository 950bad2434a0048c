"""The Vision Transformer: an image becomes tokens, blocks change the tokens, a pool makes one feature, a head gives logits.

Every part that a technique can replace is a slot: tokenizer, position, attention, reduction, pool, block. A slot is any
callable that makes a module. A recipe sets its options, as in `partial(ShiftedPatchEmbed, patch=7)`; the model calls it with
shapes. The file of each slot states its contract at the top.

Letters in shapes: b images, c channels, h w pixels, n tokens (prefix tokens first, then patches), d width.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.attention import Attention, AttentionOutput, acts_inside_attention, check_rate, name_of
from smallvit.attention_positions import Places, places_of
from smallvit.optim import names_without_decay
from smallvit.pooling import ClassToken
from smallvit.positions import Learned
from smallvit.random_weights import initialize
from smallvit.reduction import LayerContext
from smallvit.reduction.context import gather_tokens, reduce_tokens, runs_before_attention
from smallvit.slot_checks import check_blocks, check_indices, check_integers, check_slots, needs_places
from smallvit.tokenizers import PatchEmbed, check_pair


class Block(nn.Module):
    """A transformer block: attention, then an MLP on each token. The attention and the MLP each have a LayerNorm and a residual
    connection.

    Contract `block(dim, heads, attention, reduction, drop_path)` makes a module. It is called with tokens `x`, their sizes
             (numbers of patches) or None, and an attention mask or None: `(x, size, mask) -> (x, size)`.
             A block that must know where its tokens are is called `(x, size, mask, places) -> (x, size, places)`. It says so by
             an attribute `needs_places` that is True, or its attention has positions.
             If the module or its attention has a method `set_context`, a `ViT` calls it once with the `LayerContext` of the
             block. A method `more_macs(n)` returns the multiply-adds of `n` tokens outside attention and MLP; without it there
             are none. If its attention has a method `start_from_positions`, it is called with the position module of the model,
             or with None, when all weights have been drawn.
    Paper    pre-norm (`norm_first=True`) as in ViT, arXiv:2010.11929; post-norm as in Vaswani et al. 2017, arXiv:1706.03762.

    `mlp_ratio` is the hidden width of the MLP divided by `dim`. `activation` is "gelu" or "relu", or "swiglu" or "geglu" for a
    gated MLP with about as many weights (see `GatedUnit`). `dropout` acts on both branches and inside the MLP. `drop_path` is
    the probability to skip a branch for a whole image (stochastic depth, arXiv:1603.09382). `layer_scale` is the initial factor
    of each channel of a branch (CaiT, arXiv:2103.17239), None for none.

    Raises   ValueError for an unknown `activation`, a negative `mlp_ratio`, and a `drop_path` or `dropout` outside [0, 1).
    """

    def __init__(
        self, dim: int, heads: int, attention: Callable, reduction: nn.Module | None, drop_path: float, *,
        mlp_ratio: float = 4.0, activation: str = "gelu", norm_first: bool = True, dropout: float = 0.0,
        layer_scale: float | None = None,
    ):  # fmt: skip
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}")
        check_rate(dropout=dropout)
        if not mlp_ratio >= 0:
            raise ValueError(f"mlp_ratio is {mlp_ratio}; expected the hidden width of the MLP divided by dim, 0 or more")
        hidden = int(dim * mlp_ratio)
        gated = activation in GATED
        if gated:  # three matrices for two: 2/3 of the width, rounded up to a multiple of 8
            hidden = -(-int(hidden * 2 / 3) // 8) * 8
        self.norm_first, self.reduction = norm_first, reduction
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attention = attention(dim, heads)
        wide, act = nn.Linear(dim, 2 * hidden if gated else hidden), ACTIVATIONS[activation]()
        self.mlp = nn.Sequential(wide, act, nn.Dropout(dropout), nn.Linear(hidden, dim))
        self.branch1, self.branch2 = (
            nn.Sequential(nn.Dropout(dropout), LayerScale(dim, layer_scale), DropPath(drop_path)) for _ in range(2)
        )

    def forward(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Places | None = None
    ) -> tuple:
        reduction, reduce_first = self.reduction, runs_before_attention(self.reduction)
        if reduction is not None and reduce_first:
            x, size, places = reduce_tokens(reduction, x, size, places)
        known = (places,) if getattr(self.attention, "position", None) is not None else ()
        output = self.attention(self.norm1(x) if self.norm_first else x, size, mask, *known)
        if not isinstance(output, AttentionOutput):
            raise ValueError(f"{type(self.attention).__name__} gave a {type(output).__name__}; return AttentionOutput(tokens)")
        x = x + self.branch1(output.x)
        x = x if self.norm_first else self.norm1(x)
        if reduction is not None and not reduce_first:
            x, size, places = reduce_tokens(reduction, x, size, places, output.key, output.saliency)
        del output  # free the queries, keys and values before the MLP
        x = x + self.branch2(self.mlp(self.norm2(x) if self.norm_first else x))
        x = x if self.norm_first else self.norm2(x)
        return (x, size) if places is None else (x, size, places)


class Blocks(nn.ModuleList):
    """A list of transformer blocks, each of which takes the tokens of the one before it. It is called like a block."""

    def forward(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Places | None = None
    ) -> tuple:
        return one_after_another(self, x, size, mask, places)


def one_after_another(
    blocks: Iterable[Any], x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Places | None = None
) -> tuple:
    """Call transformer blocks one after another, each with the tokens of the one before it. Return what the last one returns:
    its tokens, the number of patches that each of them represents, and the places of the tokens if `places` is not None.
    """
    given = () if places is None else (places,)
    for block in blocks:
        x, size, *given = block(x, size, mask, *given)
    return x, size, *given


class ViT(nn.Module):
    """A Vision Transformer (ViT) that classifies images of size `image` (height, width) with `channels` channels into `classes`
    classes. It has `depth` blocks of width `dim` with `heads` attention heads. Its parts can be replaced: `tokenizer`,
    `position` embedding, `attention`, token `reduction` (merging or pruning), `pool` and `block`. The value of each is a class,
    from which the model creates the part.

    Images may have any height and width that the tokenizer accepts.

    `model(x)` returns logits (b, classes), `model.features(x)` the input of the head (b, d), `model.tokens(x)` all tokens of
    the last block and their sizes. `x` holds normalized pixels (b, c, h, w). `mask`, broadcastable to (b, heads, n, n), is True
    where a query (row) may attend to a key (column).

    Paper    Dosovitskiy et al. 2020, arXiv:2010.11929. With the default slots and a timm `vit_*` state dict (see `pretrained`)
             the logits equal timm's.
    Departs  Initial weights are Xavier-uniform for linear maps (as in MAE and the original JAX code), N(0, 1) for positions and
             std 0.02 for prefix tokens and the head. Each module draws from a random stream of its own (see `initialize`).

    `registers` extra tokens follow the class token; no pool reads them (arXiv:2309.16588). `dropout` acts on the tokens before
    the first block (a block has its own: `partial(Block, dropout=0.1)`). `drop_path` is the rate of the last block, rising
    linearly from 0 over the blocks as in timm, or a list with one rate per block. `norm_after_pool` applies the last LayerNorm
    to the feature, as timm's `fc_norm`. The head is a linear map unless the pool makes its own; with `classes=0` there is none.

    Raises   ValueError for an image that the patches do not tile, heads that do not divide the width, images of integers or
             with another number of channels, `norm_after_pool` with a pool that makes its own head, a list of rates in
             `drop_path` with another length than `depth`, a `dropout` outside [0, 1), a mask for a model with a reduction, or a
             slot that cannot be called.
    """

    blocks: Any  # `Blocks`, a list of what the block slot makes

    def __init__(
        self,
        image: tuple[int, int],
        channels: int,
        classes: int,
        *,
        dim: int = 64,
        depth: int = 6,
        heads: int = 4,
        tokenizer: Callable = partial(PatchEmbed, patch=4),
        position: Callable | None = Learned,
        attention: Callable = Attention,
        reduction: Callable | None = None,
        pool: Callable = ClassToken,
        block: Callable = Block,
        registers: int = 0,
        dropout: float = 0.0,
        drop_path: float | Sequence[float] = 0.0,
        norm_after_pool: bool = False,
    ):
        super().__init__()
        check_integers(
            channels=(channels, 1), classes=(classes, 0), dim=(dim, 1), depth=(depth, 0), heads=(heads, 1),
            registers=(registers, 0),
        )  # fmt: skip
        check_rate(dropout=dropout)
        check_slots(tokenizer=tokenizer, attention=attention, pool=pool, block=block)
        check_slots(none=True, position=position, reduction=reduction)
        if position and acts_inside_attention(position):
            name = name_of(position)
            raise ValueError(f"{name} works inside attention; expected attention=partial(Attention, position={name})")
        self.image, self.channels = tuple(check_pair(image)), channels
        self.tokenizer = tokenizer(image, channels, dim)
        self.pool = pool(dim)
        contracts = ((self.tokenizer, "grid", "tokenizers.py"), (self.pool, "class_tokens", "pooling.py"))
        for part, attribute, file in contracts:
            if not hasattr(part, attribute):
                raise ValueError(f"{type(part).__name__} has no {attribute}; see the contract at the top of smallvit/{file}")
        own_head = hasattr(self.pool, "make_head")
        if norm_after_pool and own_head:
            raise ValueError(f"{type(self.pool).__name__} makes its own head; expected norm_after_pool=False")
        self.prefix = nn.Parameter(torch.empty(self.pool.class_tokens + registers, dim))
        grid = self.tokenizer.grid(image)
        attention = with_grid(attention, grid, len(self.prefix))
        self.position = position(dim, grid, len(self.prefix)) if position else None
        self.dropout = nn.Dropout(dropout)
        contexts = self.layer_contexts(depth, image)
        self.blocks = Blocks(
            block(dim, heads, attention, reduction(context) if reduction else None, rate)
            for context, rate in zip(contexts, drop_path_rates(drop_path, depth))
        )
        check_blocks(self.blocks)
        for made, context in zip(self.blocks, contexts):
            for part in (made, getattr(made, "attention", None)):
                if set_context := getattr(part, "set_context", None):
                    set_context(context)
        self.norm_after_pool = norm_after_pool
        self.skips_unused_norms = False  # True: only the class token is normalized, if nothing else is used
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        make_head = self.pool.make_head if own_head else partial(nn.Linear, dim)
        self.head = make_head(classes) if classes else nn.Identity()
        initialize(self)

    @torch.no_grad()
    def reset_parameters(self):
        if not isinstance(self.head, nn.Identity):
            nn.init.trunc_normal_(self.head.weight, std=0.02)
        position: Any = self.position
        if getattr(position, "std", None) == "patch":
            position.table.mul_(self.patch_std())
        for block in self.blocks:
            if start := getattr(getattr(block, "attention", None), "start_from_positions", None):
                start(position)
        # The prefix is drawn last and row by row: torch draws 16 numbers at a time, so a single draw of all rows would give
        # the class token another value when registers or a distillation token follow.
        for token in self.prefix:
            nn.init.trunc_normal_(token, std=0.02)

    def patch_std(self) -> float:
        """Return the standard deviation with which the channels of a patch token start, for normalized pixels. The last layer
        of the tokenizer, which reads F values for each token, has weights of variance 2 / (F + width), as Xavier-uniform draws
        them.
        """
        layers = [m.weight for m in self.tokenizer.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        values = layers[-1][0].numel() if layers else self.channels * prod(self.image) / prod(self.tokenizer.grid(self.image))
        return (2 * values / (values + self.prefix.shape[1])) ** 0.5

    def layer_contexts(self, depth: int, image: tuple[int, int]) -> list[LayerContext]:
        """Return a list with one `LayerContext` for each of `depth` blocks. It describes the block: its index, the width of the
        tokens and their number. From this description, the token reduction (merging or pruning) of the block is created.
        `image` is the image size (height, width) in pixels.
        """
        rows, columns = self.tokenizer.grid(image)
        prefix, dim = self.prefix.shape
        return [LayerContext(layer, depth, dim, prefix, self.pool.class_tokens > 0, rows * columns) for layer in range(depth)]

    def no_weight_decay(self) -> set[str]:
        """Return the names of all parameters that get no weight decay in any optimizer, such as `prefix` and `position.table`.
        timm's `create_optimizer_v2` asks for them in this form. Biases and norms are not in the set: optimizers leave them out
        because they have one axis.
        """
        found = {"prefix"}
        for path, module in self.named_modules():
            if module is not self:
                found.update(f"{path}.{name}" for name in names_without_decay(module))
        return found

    def tokens(self, x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return all tokens after the last block (batch, tokens, width), and the number of patches that each token represents
        (batch, tokens); None means 1 for all. `x` holds normalized images. `mask`, boolean and broadcastable to
        (batch, heads, tokens, tokens), is True where a token (row) may attend to another (column). `keep` (batch, k) holds the
        indices of the patches to use; by default all are used.
        """
        x, size = self.tokens_before_norm(x, mask, keep)
        return (x if self.norm_after_pool else self.norm(x)), size

    def tokens_before_norm(
        self, x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Like `tokens`, but without the last norm."""
        if x.ndim != 4 or x.shape[1] != self.channels or not x.is_floating_point():
            raise ValueError(
                f"got {x.dtype} images of shape {tuple(x.shape)}; this model needs b {self.channels} h w, normalized floats"
            )
        if mask is not None and any(getattr(block, "reduction", None) is not None for block in self.blocks):
            raise ValueError("got a mask for a model that reduces tokens, which a mask cannot follow; expected mask=None")
        grid = self.tokenizer.grid(x.shape[-2:])
        if keep is not None:
            check_indices(keep, len(x), prod(grid))
        x = self.dropout(self.embed(x))
        places = places_of(grid, x.device) if any(map(needs_places, self.blocks)) else None
        if keep is not None:
            x = torch.cat([x[:, : len(self.prefix)], gather_tokens(x[:, len(self.prefix) :], keep)], dim=1)
            places = None if places is None else places._replace(at=places.at[keep])
        size = None
        return self.blocks(x, size, mask, places)[:2]

    def embed(self, x: Tensor) -> Tensor:
        """Return the tokens that enter the first block, without dropout: prefix tokens and patches, with positions. `x` holds
        the images (batch, channels, height, width).
        """
        grid = self.tokenizer.grid(x.shape[-2:])
        x = torch.cat([self.prefix.expand(x.shape[0], -1, -1).to(x.dtype), self.tokenizer(x)], dim=1)
        return self.position(x, grid) if self.position else x

    def features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return one feature vector for each image, shape (batch, features). They enter the classification head. There are
        `dim` features, unless the pool gives another number (`DistilledTokens`: 2 x `dim`, `Projected`: `hidden`). `x` holds
        the images (batch, channels, height, width), and `mask` is True where attention is allowed.
        """
        norm: Any = self.norm
        if self.skips_unused_norms and not (norm._forward_hooks or norm._forward_pre_hooks):
            x, size = self.tokens_before_norm(x, mask)
            return norm(self.pool(x, size, len(self.prefix)))
        return self.pooled(*self.tokens(x, mask))

    def pooled(self, x: Tensor, size: Tensor | None) -> Tensor:
        """Return one feature vector for each image, shape (batch, features), pooled from its tokens `x` (batch, tokens, width).
        `size` (batch, tokens) is the number of patches that each token represents; None means 1.

        These features enter the classification head.
        """
        x = self.pool(x, size, len(self.prefix))
        return self.norm(x) if self.norm_after_pool else x

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.features(x, mask))


class LayerScale(nn.Module):
    """A module that multiplies each channel of the tokens by a learned factor. The option `start` is the initial value of the
    factors. With None, the tokens stay unchanged.
    """

    def __init__(self, dim: int, start: float | None):
        super().__init__()
        self.start = start
        self.factor = None if start is None else nn.Parameter(torch.full((dim,), float(start)))

    def reset_parameters(self):
        if self.factor is not None and self.start is not None:
            nn.init.constant_(self.factor, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor


class DropPath(nn.Module):
    """A module for stochastic depth. In training, it sets the output of a residual branch (the attention or the MLP of a block)
    to zero for randomly chosen images. The option `rate` is the probability.

    The branches of the other images are divided by 1 - rate, so that the mean stays the same. In evaluation nothing changes.
    """

    def __init__(self, rate: float):
        super().__init__()
        check_rate(drop_path=rate)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device) >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)


class GatedUnit(nn.Module):
    """A module for a gated MLP. It divides the channels of its input into two halves and multiplies them: the first half, the
    gate, goes through an activation, `act`. With SiLU the MLP is a SwiGLU, with GELU a GEGLU.

    Paper    Shazeer 2020, arXiv:2002.05202. The hidden width is 2/3 of that of a plain MLP, rounded up to a multiple of 8, so
             that the three matrices have as many weights as two (3% more at width 64).
    Departs  Gate and values come from one linear map, gate first, as in timm's `SwiGLUPacked`. They start as all linear maps;
             in timm's `SwiGLU` the gate starts near 1.
    """

    def __init__(self, act: Callable[[Tensor], Tensor]):
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        gate, values = x.chunk(2, dim=-1)
        return self.act(gate) * values


GATED = {"swiglu": partial(GatedUnit, F.silu), "geglu": partial(GatedUnit, F.gelu)}
ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU} | GATED


def drop_path_rates(drop_path: float | Sequence[float], depth: int) -> list[float]:
    """Return a list with the stochastic-depth rate of each of `depth` blocks. If `drop_path` is a number, the rates rise
    linearly from 0 in the first block to this number in the last block. `drop_path` may also be a list of rates.
    """
    if isinstance(drop_path, Real):
        drop_path = float(drop_path)
        return [drop_path * layer / max(depth - 1, 1) for layer in range(depth)]
    if not isinstance(drop_path, list | tuple):
        raise ValueError(f"drop_path is {drop_path!r}; expected a rate from 0 to below 1, or a list with one rate per block")
    if len(drop_path) != depth:
        raise ValueError(f"got {len(drop_path)} drop-path rates for {depth} blocks; expected one per block, or a single number")
    return list(drop_path)


def with_grid(attention: Callable, grid: tuple[int, int], prefix: int) -> Callable:
    """Return the attention slot of a model with `grid` (rows, columns) and `prefix`, the number of prefix tokens, given to its
    option `position`. If it has no such option, or if it is None, the slot is returned unchanged. An attention inside another
    one, as in `mimetic_start`, is treated alike.
    """
    parameters = inspect.signature(attention).parameters
    if "attention" in parameters:
        return partial(attention, attention=with_grid(parameters["attention"].default, grid, prefix))
    option = parameters.get("position")
    if option is None or option.default in (None, option.empty):
        return attention
    return partial(attention, position=partial(option.default, grid=grid, prefix=prefix))
