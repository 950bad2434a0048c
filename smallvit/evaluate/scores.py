"""What a model does as it is: how often it is right, and what that costs."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit import flops

from .declare import evaluator
from .hooks import frozen
from .splits import Named, Splits, some


def accuracy(model: nn.Module, splits: Splits) -> Named:
    """`accuracy`: the share of images whose largest logit is the right one; `nll`: mean negative log-likelihood, in nats.

    Raises   ValueError for a model that does not give one logit for each class, or gives numbers that are not finite.
    """
    scored, right, surprise = some(splits.test), 0, 0.0
    expected = len(scored.spec.classes)
    with frozen(model) as like:
        for images, labels in scored.batches(device=like.device):
            logits = model(images.to(like)).float()
            if logits.shape != (len(images), expected):
                got = f"{type(model).__name__} gives {tuple(logits.shape)} for {len(images)} images"
                raise ValueError(f"{got}; expected a logit for each of {expected} classes")
            right += (logits.argmax(-1) == labels).sum().item()
            surprise += F.cross_entropy(logits, labels, reduction="sum").item()
    if not math.isfinite(surprise):
        raise ValueError(f"the logits of {type(model).__name__} are not finite; expected a model that has not diverged")
    yield "accuracy", right / len(scored)
    yield "nll", surprise / len(scored)


@evaluator(judges=False)
def cost(model: nn.Module, splits: Splits, *, batch: int = 32, repeats: int = 9) -> Named:
    """What a forward pass costs, on the device and threads at hand, and what a reduction in the model buys.

    `macs` for one image: of a model that reduces tokens by the closed form where there is one, else by torch's count, which is
    `flops / 2`; where they depend on the image, the mean over the scored images (at most 1,000) and `macs_sd`. `tokens`: how
    many leave the last block, the mean. `ms`: median milliseconds for a batch of `batch` images. `speedup`: over the same model
    unreduced with its autotune attention kernel, side by side; below 1 the reduction loses time. Times are what they are: they
    alone are not deterministic.
    """
    images = next(iter(some(splits.test).batches(min(batch, len(splits.test)))))[0]
    with frozen(model) as like:
        images = images.to(like)
        numbers = reduced_cost(model, splits, images, repeats) if flops.reduces(model) else plain_cost(model, images, repeats)
    yield from numbers.items()


def plain_cost(model: nn.Module, images: Tensor, repeats: int) -> dict[str, float]:
    """Of a model that sees all tokens, or has none."""
    times = flops.milliseconds([partial(flops.forward(model), images)], repeats)
    return {"macs": float(flops.footprint(model, images)["macs"]), "ms": times[0]}


def reduced_cost(model: nn.Module, splits: Splits, images: Tensor, repeats: int) -> dict[str, float]:
    """Of a model that reduces its tokens."""
    size = tuple(images.shape[-2:])
    if tokens := flops.tokens_per_layer(model, size):
        counted = float(flops.counted(model, images[:1]))
        macs = sum(flops.closed_form(model, image=size).values()) if flops.has_closed_form(model) else counted / 2
        numbers = {"macs": macs, "flops": counted, "tokens": float(tokens[-1][1])}
    else:
        scored = next(x for x, _ in splits.test.batches(1_000)).to(images)
        seen = flops.seen_tokens(model, scored)
        each = torch.tensor(flops.macs_of_each(model, scored, seen), dtype=torch.float64)
        numbers = {"macs": each.mean().item(), "macs_sd": each.std(correction=0).item()}
        numbers["tokens"] = seen[:, -1, 1].double().mean().item()
    ms, times = flops.speedup(model, images, repeats)
    return numbers | {"ms": ms, "speedup": times}
