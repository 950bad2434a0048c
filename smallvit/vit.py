"""The Vision Transformer, whole: image -> tokens -> blocks -> feature -> logits, with a slot wherever a technique may sit.

A slot is any callable; the recipe gives its knobs (`partial(ShiftedPatchEmbed, patch=7)`), the model its shapes. The contract
of each slot stands at the top of its file: tokenizers, positions, attention, reduction, pooling.

Letters: b images, c channels, h w pixels, n tokens (prefix first, then patches), d width.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from smallvit.attention import Attention, AttentionOutput
from smallvit.pooling import ClassToken
from smallvit.positions import Learned
from smallvit.reduction import LayerContext
from smallvit.reduction.context import stands_first, take
from smallvit.rng import stream
from smallvit.tokenizers import PatchEmbed


class Block(nn.Module):
    """One layer: tokens look at each other, then each is changed on its own by an MLP; both added to what was there.

    Contract `block(dim, heads, attention, reduction, drop_path)` makes a module that is called `(x, size, mask) -> (x, size)`.
    Paper    pre-norm (`norm_first=True`) as in ViT, arXiv:2010.11929; post-norm as in Vaswani et al. 2017, arXiv:1706.03762.

    `dropout` acts on both branches and inside the MLP; `drop_path` leaves out a branch for a whole image (stochastic depth,
    arXiv:1603.09382); `layer_scale` is the initial factor of each channel of a branch (CaiT, arXiv:2103.17239), None for none.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        attention: Callable,
        reduction: nn.Module | None,
        drop_path: float,
        *,
        mlp_ratio: float = 4.0,
        activation: str = "gelu",
        norm_first: bool = True,
        dropout: float = 0.0,
        layer_scale: float | None = None,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}")
        hidden = int(dim * mlp_ratio)
        self.norm_first, self.reduction = norm_first, reduction
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attention = attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), ACTIVATIONS[activation](), nn.Dropout(dropout), nn.Linear(hidden, dim))
        self.branch1, self.branch2 = (
            nn.Sequential(nn.Dropout(dropout), LayerScale(dim, layer_scale), DropPath(drop_path)) for _ in range(2)
        )

    def forward(self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if stands_first(self.reduction):
            x, size = self.reduction(x, size)
        mixed = self.attention(self.norm1(x) if self.norm_first else x, size, mask)
        if not isinstance(mixed, AttentionOutput):
            raise ValueError(f"{type(self.attention).__name__} returned a {type(mixed).__name__}; expected AttentionOutput(tokens)")
        x = x + self.branch1(mixed.x)
        x = x if self.norm_first else self.norm1(x)
        if self.reduction is not None and not stands_first(self.reduction):
            x, size = self.reduction(x, size, mixed.key, mixed.saliency)
        del mixed  # it holds on to queries, keys and values
        x = x + self.branch2(self.mlp(self.norm2(x) if self.norm_first else x))
        return x if self.norm_first else self.norm2(x), size


class ViT(nn.Module):
    """A Vision Transformer for images of any size, made of slots.

    Paper    Dosovitskiy et al. 2020, arXiv:2010.11929. With the default slots and a timm `vit_*` state dict (see `pretrained`)
             it gives timm's logits.
    Departs  Weights start Xavier-uniform for linear maps (as in MAE and the original JAX code), N(0, 1) for positions and 0.02
             for prefix tokens and the head, each module's drawn from a stream of its own name (see `initialize`).

    `registers` extra tokens follow the class token and are read by nobody (arXiv:2309.16588). `dropout` acts on the tokens
    before the first block (a block has its own: `partial(Block, dropout=0.1)`). `drop_path` is the rate of the last block,
    rising linearly from 0 as in timm, or one rate for each block. `norm_after_pool` moves the last LayerNorm behind the pool,
    as timm's `fc_norm`.

    `model(x)` gives logits b k, `model.features(x)` what the head sees, b d, `model.tokens(x)` all tokens and their sizes. The
    head is a linear map, unless the pool brings its own; without classes (0) there is none. `x` is normalised pixels b c h w.
    `mask`, broadcastable to b heads n n, is True where a token may look.

    Raises   ValueError for an image that the tokenizer cannot tile, heads that do not divide the width, another number of
             channels than it was built for, `norm_after_pool` with a pool that brings its own head, or a slot that is no class.
    """

    no_weight_decay = ("prefix",)

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
        refuse_numbers(dim=(dim, 1), depth=(depth, 0), heads=(heads, 1), registers=(registers, 0))
        refuse_slots(tokenizer=tokenizer, attention=attention, pool=pool, block=block)
        refuse_slots(none=True, position=position, reduction=reduction)
        self.image, self.channels = tuple(image), channels
        self.tokenizer = tokenizer(image, channels, dim)
        self.pool = pool(dim)
        for part, needed in ((self.tokenizer, "grid"), (self.pool, "class_tokens")):
            if not hasattr(part, needed):
                raise ValueError(f"{type(part).__name__} has no {needed}; see the contract at the top of its slot's file")
        if norm_after_pool and hasattr(self.pool, "make_head"):
            raise ValueError(
                f"norm_after_pool norms what is as wide as a token; expected False with {type(self.pool).__name__}"
            )
        self.prefix = nn.Parameter(torch.empty(self.pool.class_tokens + registers, dim))
        self.position = position(dim, self.tokenizer.grid(image), len(self.prefix)) if position else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            block(dim, heads, attention, reduction(place) if reduction else None, rate)
            for place, rate in zip(self.places(depth, image), rates(drop_path, depth))
        )
        self.norm_after_pool = norm_after_pool
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        head = self.pool.make_head if hasattr(self.pool, "make_head") else partial(nn.Linear, dim)
        self.head = head(classes) if classes else nn.Identity()
        initialize(self)

    def reset_parameters(self):
        if not isinstance(self.head, nn.Identity):
            nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.trunc_normal_(self.prefix, std=0.02)  # last: how many there are must not move the draw of the head

    def places(self, depth: int, image: tuple[int, int]) -> list[LayerContext]:
        """What a reduction in each of `depth` blocks is told, for images of that size."""
        rows, columns = self.tokenizer.grid(image)
        prefix, dim = self.prefix.shape
        return [LayerContext(layer, depth, dim, prefix, self.pool.class_tokens > 0, rows * columns) for layer in range(depth)]

    def tokens(self, x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """All tokens after the last block, b n d, and how many patches each stands for, b n (None: one each).

        `keep`, b k, are the places of the patches that go through the blocks; without it all do.
        """
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(
                f"got images of shape {tuple(x.shape)}; expected b {self.channels} h w, the channels this model was built for"
            )
        if mask is not None and any(getattr(block, "reduction", None) is not None for block in self.blocks):
            raise ValueError("got a mask for a model that reduces tokens, and no mask can follow them; expected mask=None")
        grid = self.tokenizer.grid(x.shape[-2:])
        x = torch.cat([self.prefix.expand(x.shape[0], -1, -1).to(x.dtype), self.tokenizer(x)], dim=1)
        x = self.dropout(self.position(x, grid) if self.position else x)
        if keep is not None:
            x = torch.cat([x[:, : len(self.prefix)], take(x[:, len(self.prefix) :], keep)], dim=1)
        size = None
        for block in self.blocks:
            x, size = block(x, size, mask)
        return (x if self.norm_after_pool else self.norm(x)), size

    def features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the head sees, b d."""
        return self.pooled(*self.tokens(x, mask))

    def pooled(self, x: Tensor, size: Tensor | None) -> Tensor:
        """What the head sees of all tokens, b n d -> b d."""
        x = self.pool(x, size, len(self.prefix))
        return self.norm(x) if self.norm_after_pool else x

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.head(self.features(x, mask))


class LayerScale(nn.Module):
    """Multiply each channel by a learned factor that starts at `start`; None leaves the input as it is."""

    def __init__(self, dim: int, start: float | None):
        super().__init__()
        self.start = start
        self.factor = None if start is None else nn.Parameter(torch.full((dim,), start))

    def reset_parameters(self):
        if self.factor is not None:
            nn.init.constant_(self.factor, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.factor is None else x * self.factor


class DropPath(nn.Module):
    """In training, zero the branch of a whole image with probability `rate`; the others are scaled by 1 / (1 - rate)."""

    def __init__(self, rate: float):
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"drop_path is {rate}; expected a probability from 0 up to, not including, 1")
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device) >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)


def refuse_numbers(**numbers: tuple[int, int]):
    """Raise ValueError for what is no whole number, or less than the least that stands beside it."""
    for name, (number, least) in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError(f"{name} is {number!r}; expected a whole number from {least} on")


def refuse_slots(none: bool = False, **slots):
    """Raise ValueError for what makes no module: a name in quotes, or a module that is made already."""
    for name, slot in slots.items():
        if isinstance(slot, nn.Module) or not (callable(slot) or (none and slot is None)):
            given = f"a {type(slot).__name__} that is made already" if isinstance(slot, nn.Module) else repr(slot)
            raise ValueError(f"{name} is {given}; expected a class, its knobs bound by functools.partial: the model makes it")


ACTIVATIONS = {"gelu": nn.GELU, "relu": nn.ReLU}


def rates(drop_path: float | Sequence[float], depth: int) -> list[float]:
    """One drop-path rate for each block."""
    if isinstance(drop_path, int | float):
        return [drop_path * layer / max(depth - 1, 1) for layer in range(depth)]
    if len(drop_path) != depth:
        raise ValueError(f"got {len(drop_path)} drop-path rates for {depth} blocks; expected one each, or a single number")
    return list(drop_path)


def initialize(model: nn.Module, seed: int | None = None) -> nn.Module:
    """Draw all weights anew; with a seed, each module's from the stream of its own name.

    Two models that share a module under the same name get the same weights for it, whatever else differs between them, so that
    a paired comparison starts both arms at the same point. Children come first: a parent may draw its own parts differently.
    A class from elsewhere (of a recipe, say) keeps what its constructor drew, its children too, unless it has
    `reset_parameters`.
    """
    modules = dict(model.named_modules())
    own = [name for name, module in modules.items() if not (ours(module) or hasattr(module, "reset_parameters"))]
    for name, module in reversed(modules.items()):
        if any(f"{name}.".startswith(f"{place}.") for place in own):
            continue
        if isinstance(module, nn.Linear) or hasattr(module, "reset_parameters"):
            with torch.random.fork_rng(devices=[], enabled=seed is not None):
                if seed is not None:
                    torch.default_generator.manual_seed(stream(seed, "init", name))  # weights are drawn on the CPU
                reset(module)
    return model


def ours(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] in ("smallvit", "torch")


def reset(module: nn.Module):
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    else:
        module.reset_parameters()
