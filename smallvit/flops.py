"""Compute: how much work a model does for an image, by the closed form of the papers, by torch's count, and by the clock.

Letters: n tokens into attention, m tokens into the MLP of the same block. MACs are multiply-accumulates, what the papers on
token reduction call FLOPs; a FLOP counter counts two for each.
"""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from smallvit.reduction.context import stands_first
from smallvit.vit import ViT


def linear_macs(module: nn.Module) -> int:
    """MACs of the linear maps of a module, for each token that goes through."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def block_macs(block: nn.Module, n: float | Tensor, m: float | Tensor) -> float | Tensor:
    """MACs of one block by the closed form: n (4 d^2) + n^2 (2 d) + m (2 ratio d^2) for heads that fill the width d.

    Norms, softmax, activation and biases are left out, as in the papers.
    """
    pair = 2 * block.attention.proj.in_features  # the attention map, and the values by it
    return n * linear_macs(block.attention) + n * n * pair + m * linear_macs(block.mlp)


def tokens_per_layer(model: nn.Module, image: tuple[int, int] | None = None) -> list[tuple[int, int]] | None:
    """For each block how many tokens its attention and its MLP see, prefix included; None where it depends on the image.

    `image` is the height and width, by default those the model was built for.
    """
    n, out = model.places(1, image or model.image)[0].tokens, []
    for block in model.blocks:
        m = n
        if block.reduction is not None:
            m = block.reduction.left(n) if hasattr(block.reduction, "left") else None
        if m is None:
            return None
        out.append((m if stands_first(block.reduction) else n, m))
        n = m
    return out


def in_words(model: nn.Module) -> str:
    """How many tokens are left where: `50 tokens, behind the blocks 42, 35, 29, 24; 0.61 of the MACs`."""
    tokens, start = tokens_per_layer(model), f"{model.places(1, model.image)[0].tokens} tokens, behind the blocks"
    if tokens is None:
        return f"{start} as many as the image asks for"
    start += f" {', '.join(str(m) for _, m in tokens)}"
    if not has_closed_form(model):
        return start
    share = sum(closed_form(model).values()) / sum(closed_form(unreduced(model)).values())
    return f"{start}; {share:.2f} of the MACs"


def closed_form(
    model: nn.Module,
    tokens: Sequence[tuple[float, float]] | None = None,
    image: tuple[int, int] | None = None,
    embed: float | None = None,
) -> dict[str, float]:
    """MACs for one image: `embed`, `blocks`, `reduction` (what the reduction itself costs) and `head`,
    with what a pool has of layers behind it.

    `tokens` are the (n, m) of each block, by default those of `tokens_per_layer`. Published figures leave `reduction` out. What
    a kernel that makes no attention map computes again, for a reduction that asks for the map, is not in it. `embed` is what
    `embed_macs` says, for whoever has asked already.

    Raises   ValueError where the tokens depend on the image and are not given, or for attention without a projection `proj`.
    """
    image = image or model.image
    tokens = tokens or tokens_per_layer(model, image)
    if tokens is None:
        raise ValueError("how many tokens this model keeps depends on the image; give tokens, for instance of seen_tokens")
    if not has_closed_form(model):
        kind = type(model.blocks[0].attention).__name__
        raise ValueError(f"{kind} has no projection `proj`, so no closed form is known; count it: counted(model, x)")
    embed = embed_macs(model, image) if embed is None else embed
    came, extra = model.places(1, image)[0].tokens, 0.0
    for block, (_, m) in zip(model.blocks, tokens):
        if hasattr(block.reduction, "macs"):
            extra += block.reduction.macs(came, block.attention.proj.in_features // block.attention.heads)
        came = m
    blocks = sum(block_macs(block, n, m) for block, (n, m) in zip(model.blocks, tokens))
    head = linear_macs(model.head) + linear_macs(getattr(model.pool, "layers", nn.Identity()))
    return {"embed": embed, "blocks": blocks, "reduction": extra, "head": head}


def embed_macs(model: nn.Module, image: tuple[int, int]) -> float:
    """MACs of the tokenizer for one image of that size, as torch counts them: each kind has a closed form of its own."""
    parameter = next(model.parameters())
    blank = torch.zeros(1, model.channels, *image, dtype=parameter.dtype, device=parameter.device)
    return counted(model.tokenizer, blank) / 2


def counted(model: nn.Module, images: Tensor) -> int:
    """FLOPs (two for each multiply-accumulate) of one forward pass by torch's counter, which sees products alone."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        model(images)
    return counter.get_total_flops()


def seen_tokens(model: nn.Module, images: Tensor) -> Tensor:
    """For each image and block how many tokens attention and the MLP see: images x blocks x 2. For models that look first."""
    came: list[Tensor] = []

    def note(block, given, out):
        x, size = out
        came.append(torch.full((len(x),), x.shape[1]) if size is None else (size > 0).sum(1).cpu())

    hooks = [block.register_forward_hook(note) for block in model.blocks]
    try:
        with torch.inference_mode():
            model(images)
    finally:
        for hook in hooks:
            hook.remove()
    seen, n = [], torch.full((len(images),), model.places(1, tuple(images.shape[-2:]))[0].tokens)
    for block, m in zip(model.blocks, came):
        seen.append(torch.stack([m if stands_first(block.reduction) else n, m], dim=1))
        n = m
    return torch.stack(seen, dim=1)


def unreduced(model: nn.Module) -> nn.Module:
    """A copy of the model that reduces nothing."""
    new = copy.deepcopy(model)
    for block in new.blocks:
        block.reduction = None
    return new


def footprint(model: nn.Module, images: Tensor) -> dict[str, float]:
    """`params`, and `macs` for one image: torch's count, or, where that depends on the image, the mean over these.

    A model without parameters is what its `features` do.
    """
    params = sum(p.numel() for p in model.parameters())
    if reduces(model) and tokens_per_layer(model) is None:
        return {"params": params, "macs": sum(macs := macs_of_each(model, images)) / len(macs)}
    return {"params": params, "macs": counted(forward(model), images[:1]) // 2}


def forward(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """What a model does with images; one without parameters, and so without a head, makes features of them."""
    return model if next(model.parameters(), None) is not None else model.features


def macs_of_each(model: nn.Module, images: Tensor, seen: Tensor | None = None) -> list[float]:
    """MACs of each image, for a model whose tokens depend on the image: by the closed form, or one by one as counted.

    `seen` is what `seen_tokens` says of these images, for whoever has asked already.
    """
    if not has_closed_form(model):
        return [counted(model, image[None]) / 2 for image in images]
    each, size = (seen_tokens(model, images) if seen is None else seen).tolist(), tuple(images.shape[-2:])
    embed = embed_macs(model, size)
    return [sum(closed_form(model, tokens, size, embed).values()) for tokens in each]


def reduces(model: nn.Module) -> bool:
    """Whether this is a `ViT` of which at least one block has a reduction."""
    return isinstance(model, ViT) and any(getattr(block, "reduction", None) is not None for block in model.blocks)


def has_closed_form(model: ViT) -> bool:
    """Whether all of its attention ends in a projection `proj`, as the formula has it."""
    return all(isinstance(getattr(block.attention, "proj", None), nn.Linear) for block in model.blocks)


def milliseconds(calls: Sequence[Callable[[], object]], repeats: int = 9) -> list[float]:
    """The median time of each call; they take turns, so that what disturbs one disturbs all."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, of in zip(calls, times):
            started = time.perf_counter()
            call()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
            if turn:  # the first is to warm up
                of.append(1e3 * (time.perf_counter() - started))
    return [median(of) for of in times]


def speedup(model: nn.Module, images: Tensor, repeats: int = 9) -> tuple[float, float]:
    """Milliseconds of one forward pass over the images, and how often that goes into the time of the same model unreduced,
    with whichever attention kernel makes that autotune. Below 1 the reduction loses time."""
    kernels = [unreduced(model) for _ in range(2)]
    for kernel, fused in zip(kernels, (False, True)):
        for module in kernel.modules():
            if hasattr(module, "fused"):
                module.fused = fused
    with torch.inference_mode():
        mine, *theirs = milliseconds([partial(each, images) for each in (model, *kernels)], repeats)
    return mine, min(theirs) / mine


def match_budget(
    model: Callable,
    reduction: Callable,
    knob: str,
    share: float,
    between: tuple[float, float],
    image: tuple[int, int] = (28, 28),
    channels: int = 1,
    of: str = "macs",
) -> float:
    """The value of `knob`, to three decimals, at which the reduction brings `model` nearest to `share` of its MACs, or, with
    `of="tokens"`, of the tokens that leave its last block.

    `model` is called `(image, channels, classes)`, as in a `Run`; `between` are the values to look between. The MACs are those
    of `closed_form`, what the reduction costs included, so they can be met for a reduction with a fixed schedule alone.

    Raises   ValueError if no value between those two comes within a twentieth of the share.
    """
    if of not in ("macs", "tokens"):
        raise ValueError(f"of is {of!r}; expected 'macs' or 'tokens'")

    with torch.device("meta"):
        made = model(image, channels, 10)
    places = made.places(len(made.blocks), image)
    embed = embed_macs(made, image)

    def spent(value: float | None) -> float:
        with torch.device("meta"):
            for block, place in zip(made.blocks, places):
                block.reduction = None if value is None else reduction(place, **{knob: value})
        return sum(closed_form(made, embed=embed).values()) if of == "macs" else float(tokens_per_layer(made)[-1][1])

    whole = spent(None)
    low, high = between
    rising = spent(high) > spent(low)
    while high - low > 1e-3:
        middle = round((low + high) / 2, 4)
        low, high = (middle, high) if (spent(middle) / whole < share) == rising else (low, middle)
    best = min((round(value, 3) for value in (low, high)), key=lambda value: abs(spent(value) / whole - share))
    if abs(spent(best) / whole - share) > 0.05:
        raise ValueError(
            f"{knob} from {between[0]} to {between[1]} comes to {spent(best) / whole:.2f} of the {of} at best; expected {share}"
        )
    return best
