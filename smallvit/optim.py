"""Optimization: weight-decay groups, the learning-rate schedule, and exponential moving averages of weights."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LearningRate = Callable[[float, float], float]


def decay_groups(
    objective: Any, weight_decay: float, layer_decay: float | None = None
) -> tuple[list[dict], list[LearningRate]]:
    """Return the parameter groups of an objective for the optimizer AdamW, and a list with the learning-rate function of each
    group. Only the weight matrices of linear layers and convolutions get `weight_decay`. If `layer_decay` is given, the
    learning rate of each block is that of the next block, multiplied by this factor.

    Only matrices and kernels decay: not biases, norms and temperatures, nor tokens and positions. A learning-rate function maps
    `(progress, rate)` to a fraction of the peak rate, where `rate` is the fraction that the run's schedule gives. With
    `layer_decay=k`, a block that is followed by i blocks learns with k^(i + 1) times the rate of the head, and the parts before
    the blocks with k times the rate of the first block. The last norm has the rate of the head, as in BEiT; in timm it has the
    rate of the last block.

    Raises   ValueError for `layer_decay` with a model that has no blocks.
    """
    no_decay = {id(p) for m in objective.modules() for name in getattr(m, "no_weight_decay", ()) for p in [getattr(m, name)]}
    distances = {} if layer_decay is None else distances_to_head(objective.trained_model)
    groups, rates = [], []
    for parameters, rate in objective.learning_rates():
        trained = [p for p in parameters if p.requires_grad]
        for distance in sorted({distances.get(id(p), 0) for p in trained}):
            selected = [p for p in trained if distances.get(id(p), 0) == distance]
            decayed = [p for p in selected if p.ndim > 1 and id(p) not in no_decay]
            others = [p for p in selected if p.ndim <= 1 or id(p) in no_decay]
            groups += [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
            rates += [scale_learning_rate(rate, layer_decay**distance) if layer_decay and distance else rate] * 2
    return groups, rates


def scale_learning_rate(rate: LearningRate, factor: float) -> LearningRate:
    """Return a learning-rate function whose values are `factor` times those of `rate`. Both are functions of the finished
    fraction of the run and of the value of the run's schedule, and return a fraction of the peak learning rate.
    """
    return lambda progress, run_rate: factor * rate(progress, run_rate)


def distances_to_head(model: Any) -> dict[int, int]:
    """Return a dict from `id(parameter)` to the distance of the parameter from the head of the model, counted in blocks. The
    last block has distance 1, the block before it 2, and so on.

    Raises ValueError for a model without blocks.
    """
    if not isinstance(getattr(model, "blocks", None), nn.ModuleList):
        raise ValueError(f"layer_decay needs blocks and {type(model).__name__} has none; expected a ViT, or layer_decay=None")
    last, distances = len(model.blocks), {}
    for index, block in enumerate(model.blocks):
        distances |= dict.fromkeys(map(id, block.parameters()), last - index)
    for part in [getattr(model, name, None) for name in ("tokenizer", "prefix", "position")]:
        parameters = [part] if isinstance(part, nn.Parameter) else part.parameters() if part is not None else []
        distances |= dict.fromkeys(map(id, parameters), last + 1)
    return distances


def learning_rate(progress: float, warmup: float, one_step: float, schedule: str | None = None) -> float:
    """Return the learning rate as a fraction of the peak rate: a linear rise (warmup), then half a cosine down to 0. With
    `schedule` "constant" the rate stays at the peak after the warmup. `progress` is the finished fraction of the run. `warmup`
    and `one_step` are the fractions that the warmup and one step take; because of `one_step`, the rate of the first step is not
    0.

    All fractions are from 0 to 1. The rate is never 0 at a step. `schedule=None` is the cosine.
    """
    if progress < warmup:
        return min(1.0, (progress + one_step) / warmup)
    if schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / max(1 - warmup, one_step)))


def tensor_pairs(ema: nn.Module, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return a list of pairs of tensors: each parameter and buffer of the averaged model `ema`, with the tensor of the same
    name in `model`. The two models have the same architecture.

    The pairs are the argument of `ema_update`.
    """
    return [*zip(ema.parameters(), (p.detach() for p in model.parameters())), *zip(ema.buffers(), model.buffers())]


@torch.no_grad()
def ema_update(pairs: list[tuple[Tensor, Tensor]], weight: float):
    """Update exponential moving averages in place. In each pair of tensors (average, new value), the average moves towards the
    new value by the fraction `weight`. Integer tensors are copied.
    """
    averaged = [pair for pair in pairs if pair[0].is_floating_point()]
    torch._foreach_lerp_([ema for ema, _ in averaged], [now for _, now in averaged], weight)  # pyright: ignore
    for ema, now in pairs:
        if not ema.is_floating_point():
            ema.copy_(now)
