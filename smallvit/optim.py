"""Optimising: which weights decay, how the rate moves, and how weights are averaged."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Pace = Callable[[float, float], float]


def decay_groups(objective: nn.Module, weight_decay: float, layer_decay: float | None = None) -> tuple[list[dict], list[Pace]]:
    """Groups of what is trained, and the pace of each: (progress, the run's pace) -> fraction of the peak rate.

    Weight decay on matrices and kernels alone: not on biases, norms, temperatures, nor on tokens and positions. With
    `layer_decay=k` a block that has i blocks behind it
    learns k^(i + 1) times as fast as the head, and what lies before the blocks k times as fast as the first of them. The last
    norm goes with the head, as in BEiT; timm counts it with the last block.

    Raises   ValueError for `layer_decay` on a model without blocks.
    """
    spared = {id(p) for m in objective.modules() for name in getattr(m, "no_weight_decay", ()) for p in [getattr(m, name)]}
    behind = {} if layer_decay is None else blocks_behind(objective.trained_model)
    groups, paces = [], []
    for parameters, own in objective.learning_rates():
        trained = [p for p in parameters if p.requires_grad]
        for depth in sorted({behind.get(id(p), 0) for p in trained}):
            here = [p for p in trained if behind.get(id(p), 0) == depth]
            decayed = [p for p in here if p.ndim > 1 and id(p) not in spared]
            rest = [p for p in here if p.ndim <= 1 or id(p) in spared]
            groups += [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
            paces += [slowed(own, layer_decay**depth) if depth else own] * 2
    return groups, paces


def slowed(own: Pace, factor: float) -> Pace:
    return lambda progress, pace: factor * own(progress, pace)


def blocks_behind(model: nn.Module) -> dict[int, int]:
    """By the id of each parameter that lies in the blocks or before them, how many steps it is away from the head."""
    if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
        raise ValueError(f"layer_decay counts blocks and {type(model).__name__} has none; expected a ViT, or layer_decay=None")
    last, found = len(model.blocks), {}
    for at, block in enumerate(model.blocks):
        found |= dict.fromkeys(map(id, block.parameters()), last - at)
    before = [getattr(model, name, None) for name in ("tokenizer", "prefix", "position")]
    for part in before:
        parameters = [part] if isinstance(part, nn.Parameter) else part.parameters() if part is not None else []
        found |= dict.fromkeys(map(id, parameters), last + 1)
    return found


def learning_rate(progress: float, warmup: float, one_step: float, schedule: str | None = None) -> float:
    """The learning rate as a fraction of its peak: up in a line, down in a cosine; never 0 on a step that is taken."""
    if progress < warmup:
        return min(1.0, (progress + one_step) / warmup)
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / max(1 - warmup, one_step)))


def tensors(mean: nn.Module, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The parameters and running statistics of two equal models, pair by pair."""
    return [*zip(mean.parameters(), (p.detach() for p in model.parameters())), *zip(mean.buffers(), model.buffers())]


@torch.no_grad()
def ema_update(pairs: list[tuple[Tensor, Tensor]], weight: float):
    """Move the first of each pair towards the second by `weight`; what is not a real number (a counter) is copied."""
    moving = [pair for pair in pairs if pair[0].is_floating_point()]
    torch._foreach_lerp_([mean for mean, _ in moving], [now for _, now in moving], weight)
    for mean, now in pairs:
        if not mean.is_floating_point():
            mean.copy_(now)
