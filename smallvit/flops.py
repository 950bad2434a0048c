"""Cost of a model: multiply-adds by the closed form of the papers, by torch's counter, and measured time.

MACs are multiply-accumulates, which papers on token reduction call FLOPs; a FLOP counter counts two for each. In formulas, n
tokens enter the attention of a block and m tokens its MLP, prefix tokens included.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from smallvit.numerics import native_kernel, uses_native_kernel
from smallvit.reduction.context import runs_before_attention
from smallvit.vit import ViT

Model = TypeVar("Model", bound=nn.Module)


def linear_macs(module: nn.Module) -> int:
    """Return the number of multiply-adds (MACs) that all linear layers of a module need for one token."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def block_macs(block: Any, n: float | Tensor, m: float | Tensor) -> Any:
    """Return the number of multiply-adds (MACs) of one transformer block. `n` is the number of tokens in its attention. `m` is
    the number of tokens in its MLP, which is smaller if the block merges or prunes tokens after the attention.

    For heads that fill the width d: n (4 d^2) + n^2 (2 d) + m (2 ratio d^2). Norms, softmax, activation and biases are left
    out, as in the papers.
    """
    # queries times keys, and the map times values, unless the attention says otherwise
    attention = block.attention
    per_pair = attention.macs_per_pair if hasattr(attention, "macs_per_pair") else 2 * attention.proj.in_features
    more = block.more_macs(n) if hasattr(block, "more_macs") else 0
    return n * linear_macs(attention) + n * n * per_pair + m * linear_macs(block.mlp) + more


def tokens_per_layer(model: ViT, image: tuple[int, int] | None = None) -> list[tuple[int, int]] | None:
    """Return a list with two numbers for each block: the number of tokens in its attention and in its MLP. Return None if these
    numbers depend on the content of the image. `image` is the image size (height, width) in pixels.

    Prefix tokens (class token and registers) are included. By default `image` is the size for which the model was built. Raise
    ValueError for a model that is no `ViT`.
    """
    n, counts = input_tokens(model, image), []
    for block in model.blocks:
        m = n
        if block.reduction is not None:
            m = block.reduction.left(n) if hasattr(block.reduction, "left") else None
        if m is None:
            return None
        counts.append((m if runs_before_attention(block.reduction) else n, m))
        n = m
    return counts


def input_tokens(model: ViT, image: Sequence[int] | None = None) -> int:
    """Return the number of tokens that enter the first block, including prefix tokens (class token and registers). `image` is
    the image size (height, width) in pixels. By default it is the size for which the model was built.
    """
    check_vit(model)
    height, width = image or model.image
    return model.layer_contexts(1, (height, width))[0].tokens


def check_vit(model: Any):
    """Raise ValueError unless a model is a `ViT`."""
    if not isinstance(model, ViT):
        raise ValueError(f"got a {type(model).__name__}; expected a smallvit ViT: for a timm model use from_timm(model)")


def describe_tokens(model: ViT) -> str:
    """Return a line of text with the number of tokens after each block of a model. The text also gives the number of
    multiply-adds (MACs), as a fraction of those of the same model without merging or pruning of tokens.

    For example: `50 tokens, after the blocks 42, 35, 29, 24; 0.61 of the MACs`.
    """
    tokens, start = tokens_per_layer(model), f"{input_tokens(model)} tokens, after the blocks"
    if tokens is None:
        return f"{start} a number that depends on the image"
    start += f" {', '.join(str(m) for _, m in tokens)}"
    if not has_closed_form(model):
        return start
    return f"{start}; {sum(closed_form(model).values()) / sum(closed_form(unreduced(model)).values()):.2f} of the MACs"


def closed_form(
    model: ViT, tokens: Sequence[tuple[float, float]] | None = None,
    image: tuple[int, int] | None = None, embed: float | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the multiply-adds (MACs) of a ViT for one image, computed by a formula, as a dict with the keys `embed`
    (tokenizer and positions), `blocks`, `reduction` (merging and pruning of tokens, which published figures leave out) and
    `head` (with the layers of a pool).

    tokens  numbers of tokens in the attention and in the MLP of each block; by default those of `tokens_per_layer`
    image   image size (height, width); by default that of the model
    embed   the result of `embed_macs`, if known already

    If a reduction asks a fused kernel for its attention map, this second computation is not counted.

    Raises   ValueError if the tokens depend on the image and are not given, for attention without a projection `proj`, or for
             a model that is no `ViT`.
    """
    check_vit(model)
    height, width = image or model.image
    tokens = tokens or tokens_per_layer(model, (height, width))
    if tokens is None:
        raise ValueError("the number of tokens of this model depends on the image; give tokens, for instance from seen_tokens")
    if not has_closed_form(model):
        kind = type(getattr(model.blocks[0], "attention", model.blocks[0])).__name__
        raise ValueError(
            f"no closed form is known for blocks with {kind}: it needs an attention with a projection `proj`, and an MLP of "
            "linear layers; use counted(model, x) instead"
        )
    n, reduction = input_tokens(model, (height, width)), 0.0
    for block, (_, m) in zip(model.blocks, tokens):
        if hasattr(block.reduction, "macs"):
            reduction += block.reduction.macs(n, block.attention.proj.in_features // block.attention.heads)
        n = m
    return {
        "embed": embed_macs(model, (height, width)) if embed is None else embed,
        "blocks": sum(block_macs(block, n, m) for block, (n, m) in zip(model.blocks, tokens)),
        "reduction": reduction,
        "head": linear_macs(model.head) + (model.pool.macs(n - len(model.prefix)) if hasattr(model.pool, "macs") else 0),
    }


def embed_macs(model: ViT, image: Sequence[int]) -> float:
    """Return the number of multiply-adds (MACs) of the tokenizer and the positions of a model for one image, counted by torch.
    `image` is the image size (height, width) in pixels. Positions inside attention that have a method `macs(grid)` are added.
    """
    parameter = next(model.parameters())
    blank = torch.zeros(1, model.channels, *image, dtype=parameter.dtype, device=parameter.device)
    grid = model.tokenizer.grid(image)
    positions: list[Any] = [getattr(getattr(block, "attention", None), "position", None) for block in model.blocks]
    with evaluating(model):
        embed = counted(model.embed, blank) / 2
    return embed + sum(each.macs(grid) for each in positions if hasattr(each, "macs"))


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Context manager in which a model is in evaluation mode and computes no gradients. At the end, each module gets its
    earlier mode (training or evaluation) back. A function that is no module is called as it is.
    """
    modes = {module: module.training for module in model.modules()} if isinstance(model, nn.Module) else {}
    if isinstance(model, nn.Module):
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # a class may undo in this method what it did in `eval`, such as adding LoRA to the weights
        for module, mode in modes.items():  # modules inside these have got the mode of the outer one
            module.training = mode


def counted(model: Callable[[Tensor], Any], images: Tensor) -> int:
    """Return the number of floating-point operations (FLOPs) of one forward pass on `images`, counted by torch. One
    multiply-add counts as two FLOPs. A module is counted in evaluation mode.

    torch counts matrix products, attention and convolutions only.
    """
    with evaluating(model), flop_counter() as counter:
        model(images)
    return counter.get_total_flops()


def flop_counter() -> Any:
    """Return torch's counter of FLOPs, a context manager. It also counts the fused attention kernel of CPUs, which torch leaves
    out. Inside it, `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` do without their fast path for inference, in which
    torch counts nothing.
    """
    from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

    def fused_attention(q, k, v, *args, out_shape=None, **options):
        return sdpa_flop_count(q, k, v)

    kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    more: Any = {} if kernel in flop_registry else {kernel: fused_attention}
    counter: Any = FlopCounterMode(display=False, custom_mapping=more)
    counter.mod_tracker = WholeModel()
    return counter


class WholeModel:
    """In place of torch's ModuleTracker, which fails if a parameter is the input of a module. All operations belong to the
    whole model: only their total is read. Between enter and exit, the fast path of `nn.MultiheadAttention` is switched off.
    """

    parents = frozenset({"Global"})

    def __enter__(self):
        self.fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *error):
        torch.backends.mha.set_fastpath_enabled(self.fast)


def seen_tokens(model: ViT, images: Tensor) -> Tensor:
    """Run a model on images, in evaluation mode, and return the number of tokens in each block, shape (images, blocks, 2). The
    last axis holds the number of tokens in the attention and in the MLP.

    This also works if the number of tokens depends on the image. Raise ValueError for a model that is no `ViT`.
    """
    check_vit(model)
    counts: list[Tensor] = []

    def count(block, inputs, output):
        x, size = output[:2]
        counts.append(torch.full((len(x),), x.shape[1]) if size is None else (size > 0).sum(1).cpu())

    with ExitStack() as hooks, evaluating(model):
        for block in dict.fromkeys(model.blocks):
            hooks.enter_context(block.register_forward_hook(count))
        model(images)
    pairs, n = [], torch.full((len(images),), input_tokens(model, images.shape[-2:]))
    for block, m in zip(model.blocks, counts):
        pairs.append(torch.stack([m if runs_before_attention(block.reduction) else n, m], dim=1))
        n = m
    return torch.stack(pairs, dim=1) if pairs else torch.empty(len(images), 0, 2, dtype=torch.int64)


def unreduced(model: Model) -> Model:
    """Return a copy of a ViT in which no block merges or prunes tokens. The weights are copied too."""
    new: Any = copy.deepcopy(model)
    for block in new.blocks:
        block.reduction = None
    return new


def footprint(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return a dict with the number of parameters of a model (`params`) and its number of multiply-adds for one image (`macs`).
    `images` is a batch of input images.

    The multiply-adds are counted by torch. If they depend on the image, they are the mean over `images`. Those of a deep
    ensemble are the sum over its members. For a model without parameters, its `features` are counted.
    """
    params = sum(p.numel() for p in model.parameters())
    if getattr(model, "divides_batches", False):
        return {"params": params, "macs": sum(footprint(each, images)["macs"] for each in model.members)}  # pyright: ignore
    if reduces(model) and tokens_per_layer(model) is None:
        return {"params": params, "macs": sum(macs := macs_of_each(model, images)) / len(macs)}
    with evaluating(model):
        return {"params": params, "macs": counted(forward(model), images[:1]) // 2}


def forward(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function that runs a model on images, to measure its cost. The function is the model itself. A model without
    parameters, such as the raw pixels as features, has no classifier; there, the function is its method `features`.
    """
    return model if next(model.parameters(), None) is not None else model.features


def macs_of_each(model: ViT, images: Tensor, seen: Tensor | None = None) -> list[float]:
    """Return a list with the multiply-adds (MACs) of a ViT for each of the `images`. It is for models whose number of tokens
    depends on the image. `seen` (optional) holds the number of tokens in each block for each image, if it was counted before;
    otherwise it is counted here.

    The MACs follow the closed form, or torch's counter image by image where no closed form is known.
    """
    if not has_closed_form(model):
        return [counted(model, image[None]) / 2 for image in images]
    height, width = images.shape[-2:]
    embed = embed_macs(model, (height, width))
    seen = seen_tokens(model, images) if seen is None else seen
    return [sum(closed_form(model, tokens, (height, width), embed).values()) for tokens in seen.tolist()]


def reduces(model: nn.Module) -> TypeGuard[ViT]:
    """Return True if the model is a `ViT` in which at least one block merges or prunes tokens, else False."""
    return isinstance(model, ViT) and any(getattr(block, "reduction", None) is not None for block in model.blocks)


def has_closed_form(model: Any) -> bool:
    """Return True if the multiply-adds (MACs) of a ViT can be computed by a formula, else False. The formula reads the width of
    the attention from its output projection `proj`, so the attention of every block must have this linear layer. And it counts
    linear layers, so the MLP must have no other weights, such as those of a convolution.
    """
    attentions, mlps = ([getattr(block, name, None) for block in model.blocks] for name in ("attention", "mlp"))
    projected = all(isinstance(getattr(attention, "proj", None), nn.Linear) for attention in attentions)
    return projected and all(isinstance(mlp, nn.Module) and linear_macs(mlp) == matrix_weights(mlp) for mlp in mlps)


def matrix_weights(module: nn.Module) -> int:
    """Return the number of weights in all matrices and kernels of a module, which are the parameters with two or more axes."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)


def milliseconds(calls: Sequence[Callable[[], object]], repeats: int = 9, warm_up: float = 0.0) -> list[float]:
    """Return a list with the median time of each function in `calls`, in milliseconds. `repeats` is the number of measurements.

    The functions take turns, so that disturbances of the machine affect all of them alike. In each turn a function is called
    until `warm_up` seconds have passed, at least once, and then once more; the last call is measured. So its data is in the
    caches of the processor, as in a loop that calls this function only. A function alone is warmed up once.
    """

    def timed(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return 1e3 * (time.perf_counter() - started)

    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats):
        for call, measured in zip(calls, times):
            if not turn or len(calls) > 1:
                warmed = timed(call)
                while warmed < 1e3 * warm_up:
                    warmed += timed(call)
            measured.append(timed(call))
    return [median(measured) for measured in times]


def speedup(model: ViT, images: Tensor, repeats: int = 9) -> tuple[float, float]:
    """Measure how much faster a model is with token reduction (merging or pruning) than without. Return the median time of a
    forward pass on `images` in milliseconds, and the speedup: the time without reduction divided by the time with it. `repeats`
    is the number of measurements.

    The model without reduction uses the faster of the two attention kernels. Inside `native_kernel(model)` the native kernel
    computes the model without reduction too. A speedup below 1 means that the reduction makes the model slower.

    Raises   ValueError for a model that is no `ViT`, or in which no block has a reduction.
    """
    check_vit(model)
    if not reduces(model):
        raise ValueError("speedup got a model without token reduction; expected one with it, such as apply(model, reduction)")
    native = uses_native_kernel(model)
    baselines = [unreduced(model) for _ in range(3 if native else 2)]
    for baseline, fused in zip(baselines, (False, True)):
        for module in baseline.modules():
            if hasattr(module, "fused"):
                setattr(module, "fused", fused)  # noqa: B010
    calls = [partial(each, images) for each in (model, *baselines)]
    with evaluating(nn.ModuleList([model, *baselines])), native_kernel(baselines[-1]) if native else nullcontext():
        own, *others = milliseconds(calls, repeats)
    return own, min(others) / own


def without_memory(make: Callable[[], Model]) -> Model:
    """Return the model that the function `make` creates, without memory for its weights (on torch's device "meta"), which is
    fast. A model whose code computes with values is created on the usual device.
    """
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError, TypeError):
        return make()


def match_budget(
    model: Callable, reduction: Callable, option: str, share: float, between: tuple[float, float],
    image: tuple[int, int] = (28, 28), channels: int = 1, of: str = "macs",
) -> float:  # fmt: skip
    """Return the value of an option at which token reduction lowers the cost of a model to the fraction `share`. `reduction` is
    the class that merges or prunes tokens, such as `Merge`; `option` is the name of its option, and `between` holds the lowest
    and highest value to try. `model` builds the model; it is called `(image, channels, classes)`, as in a `Run`. `image` is the
    size of the images (height, width), and `channels` their number of channels. `of` is the cost: "macs" or "tokens".

    The result is rounded to three decimals. With `of="macs"` the cost is the MACs of `closed_form`, the reduction itself
    included; with `of="tokens"` the number of tokens after the last block, which must not depend on the image.

    Raises   ValueError if no value in this range comes within 0.05 of the share, for another `of`, for a model that is already
             built, and for a number of tokens that depends on the image. The option must accept fractions, such as r=0.25 of
             `Merge`.
    """
    if of not in ("macs", "tokens"):
        raise ValueError(f"of is {of!r}; expected 'macs' or 'tokens'")
    if isinstance(model, nn.Module) or not callable(model):
        raise ValueError(
            f"model is a finished {type(model).__name__}; expected a class or function that is called (image, channels, "
            "classes), such as partial(ViT, dim=64)"
        )
    built: ViT = without_memory(partial(model, image, channels, 10))
    contexts, embed = built.layer_contexts(len(built.blocks), image), embed_macs(built, image)

    def cost(value: float | None) -> float:
        with next(built.parameters()).device:
            for block, context in zip(built.blocks, contexts):
                block.reduction = None if value is None else reduction(context, **{option: value})
        if of == "macs":
            return sum(closed_form(built, embed=embed).values())
        if (counts := tokens_per_layer(built)) is None:
            raise ValueError("the number of tokens of this reduction depends on the image, so no budget can be matched")
        return float(counts[-1][1])

    full = cost(None)
    low, high = between
    rising = cost(high) > cost(low)
    while high - low > 1e-3:
        middle = round((low + high) / 2, 4)
        low, high = (middle, high) if (cost(middle) / full < share) == rising else (low, middle)
    best = min((round(value, 3) for value in (low, high)), key=lambda value: abs(cost(value) / full - share))
    if abs(cost(best) / full - share) > 0.05:
        raise ValueError(
            f"{option} from {between[0]} to {between[1]} reaches {cost(best) / full:.2f} of the {of} at best; expected {share}"
        )
    return best
