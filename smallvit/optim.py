"""Optimization: weight-decay groups, the learning-rate schedule, and exponential moving averages of weights."""

import math
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

LearningRate = Callable[[float, float], float]
# the names under which torch.compile and the checkpoint wrapper of PyTorch keep the module that they call
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}


def decay_groups(
    objective: Any, weight_decay: float, layer_decay: float | None = None
) -> tuple[list[dict], list[LearningRate]]:
    """Return the parameter groups of an objective for the optimizer, and a list with the learning-rate function of each group.
    All parameters with two or more axes get `weight_decay`, except those that a module names in `no_weight_decay`. If
    `layer_decay` is given, the learning rate of each block is that of the next block, multiplied by this factor.

    So the matrices and kernels of smallvit decay: not biases, norms and temperatures, nor tokens and positions. A learning-rate
    function maps `(progress, rate)` to a fraction of the peak rate, where `rate` is the fraction that the run's schedule gives.
    With `layer_decay=k`, a block that is followed by i blocks learns with k^(i + 1) times the rate of the head, and the parts
    before the blocks with k times the rate of the first block. The last norm has the rate of the head, as in BEiT; in timm it
    has the rate of the last block. A group also says whether its parameters decay ("decays"), and how many matrices inside a
    block each of them holds ("parts", see `hidden_matrices`).

    Raises   ValueError for `layer_decay` with a model that has no parts `blocks` and `tokenizer` as a `ViT` has them.
    """
    if not hasattr(objective, "learning_rates"):
        raise ValueError(f"got a {type(objective).__name__}; expected an objective, such as Supervised(model)")
    no_decay = {id(p) for m in objective.modules() for name in names_without_decay(m) for p in parameters_at(m, name)}
    distances = {} if layer_decay is None else distances_to_head(objective.trained_model)
    matrices = hidden_matrices(objective)
    groups, rates = [], []
    for parameters, rate in objective.learning_rates():
        trained = [p for p in parameters if p.requires_grad]
        for distance in sorted({distances.get(id(p), 0) for p in trained}):
            selected = [p for p in trained if distances.get(id(p), 0) == distance]
            decayed = [p for p in selected if p.ndim > 1 and id(p) not in no_decay]
            others = [p for p in selected if p.ndim <= 1 or id(p) in no_decay]
            for chosen, decays in ((decayed, True), (others, False)):
                parts = [matrices.get(id(p), 0) for p in chosen]
                groups.append({"params": chosen, "weight_decay": weight_decay * decays, "decays": decays, "parts": parts})
            rates += [scale_learning_rate(rate, layer_decay**distance) if layer_decay and distance else rate] * 2
    return groups, rates


def names_without_decay(module: Any) -> Iterable[str]:
    """Return the names of the parameters of a module that get no weight decay, as the module says: our modules by an attribute
    `no_weight_decay`, those of timm by a method of this name. A name may have dots, as
    `blocks.0.attn.relative_position_bias_table`.
    """
    names: Any = getattr(module, "no_weight_decay", ())
    found: Any = names() if callable(names) else names
    return found


def parameters_at(module: nn.Module, name: str) -> list[Any]:
    """Return the parameters behind a name in a module: the one with this name, which may have dots, or those from which it is
    computed with `torch.nn.utils.parametrizations`, such as weight norm. If there are none, the list is empty.
    """
    path, _, name = name.rpartition(".")
    try:
        owner: Any = attrgetter(path)(module) if path else module
        if is_parametrized(owner, name):
            return [*owner.parametrizations[name].parameters(recurse=False)]
        return [getattr(owner, name)]
    except AttributeError:
        return []


def hidden_matrices(objective: nn.Module) -> dict[int, int]:
    """Return a dict from `id(weight)` to a number, for the weights of the linear layers inside transformer blocks: how many
    matrices of equal size the weight holds, which is 3 for queries, keys and values in one layer, 2 for keys and values, and
    otherwise 1. The layers are found by their names `qkv` and `kv`.

    Layers that choose tokens (`reduction`) and layers with one output or one input are left out. Optimizers for matrices, such
    as Muon, are made for these weights: what they do to the first and the last layer of a model, and to tables, costs accuracy.
    """
    found = {}
    lists = [getattr(module, "blocks", None) for module in objective.modules()]
    for blocks in lists:
        for name, part in blocks.named_modules() if isinstance(blocks, nn.ModuleList | nn.Sequential) else ():
            path = name.split(".")
            if isinstance(part, nn.Linear) and "reduction" not in path and min(part.weight.shape) > 1:
                count = {"qkv": 3, "kv": 2}.get(path[-1], 1)
                count = count if part.out_features % count == 0 else 1
                found |= {id(p): count for p in parameters_at(part, "weight") if p.shape == part.weight.shape}
    return found


def scale_learning_rate(rate: LearningRate, factor: float) -> LearningRate:
    """Return a learning-rate function whose values are `factor` times those of `rate`. Both are functions of the finished
    fraction of the run and of the value of the run's schedule, and return a fraction of the peak learning rate.
    """
    return lambda progress, run_rate: factor * rate(progress, run_rate)


def distances_to_head(model: Any) -> dict[int, int]:
    """Return a dict from `id(parameter)` to the distance of the parameter from the head of the model, counted in blocks. The
    last block has distance 1, the block before it 2, and so on.

    Raises ValueError for a model that has no parts `blocks` and `tokenizer` as a `ViT` has them.
    """
    for part, kind in (("blocks", nn.ModuleList), ("tokenizer", nn.Module)):
        if not isinstance(getattr(model, part, None), kind):
            raise ValueError(
                f"layer_decay needs the {part} of a ViT and {type(model).__name__} has none; use a ViT (from_timm makes one of "
                "a timm model), or layer_decay=None"
            )
    last, distances = len(model.blocks), {}
    for index, block in enumerate(model.blocks):
        distances |= dict.fromkeys(map(id, block.parameters()), last - index)
    for part in [getattr(model, name, None) for name in ("tokenizer", "prefix", "position")]:
        parameters = [part] if isinstance(part, nn.Parameter) else part.parameters() if part is not None else []
        distances |= dict.fromkeys(map(id, parameters), last + 1)
    return distances


def learning_rate(progress: float, warmup: float, one_step: float, schedule: str = "cosine") -> float:
    """Return the learning rate as a fraction of the peak rate: a linear rise (warmup), then half a cosine down to 0. With
    `schedule` "constant" the rate stays at the peak after the warmup. `progress` is the finished fraction of the run. `warmup`
    and `one_step` are the fractions that the warmup and one step take; because of `one_step`, the rate of the first step is not
    0.

    All fractions are from 0 to 1. The rate is never 0 at a step.

    Raises   ValueError for another schedule.
    """
    if schedule not in ("cosine", "constant"):
        raise ValueError(f"schedule is {schedule!r}; expected 'cosine' or 'constant'")
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
    return [(tensor, now.detach()) for tensor, now in tensors_in(module_pairs(ema, model))]


def module_pairs(ema: nn.Module, model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return a list of pairs of modules: each module of the averaged model `ema`, with that of the same name in `model`. The
    list is the argument of `tensors_in`.

    Modules that only call another one, as `torch.compile` and the checkpoint wrapper of PyTorch make them, are left out.

    Raises   ValueError if the two models have other parameters or buffers, or other shapes.
    """
    averaged, present = modules_by_name(ema), modules_by_name(model)
    for name in averaged | present:
        own, other = (tensor_shapes(modules[name]) if name in modules else {} for modules in (averaged, present))
        buffers = [modules[name]._buffers for modules in (averaged, present) if name in modules]
        unfilled = {key for part in buffers for key, buffer in part.items() if buffer is None}  # made when first needed
        if any(own.get(key) != other.get(key) for key in (own | other).keys() - unfilled):
            raise ValueError(
                f"the model and its moving average differ in {name or 'the outermost module'}: tensors of the shapes {other} "
                f"and {own}; change the parts of a model, for example for LoRA, before its average is made, as by DINO(model)"
            )
    return [(averaged[name], present[name]) for name in averaged if name in present]


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name, without those of `WRAPPERS`, which have no tensors of their own."""
    found = {}
    for name, module in model.named_modules():
        if not WRAPPERS & module._modules.keys():
            found[".".join(part for part in name.split(".") if part not in WRAPPERS)] = module
    return found


def tensor_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters and buffers of a module, without those of the modules inside it, by name."""
    tensors = module._parameters | module._buffers
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}


def tensors_in(pairs: list[tuple[nn.Module, nn.Module]]) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters and buffers that pairs of modules have now, as pairs of tensors for `ema_update`. With a list of
    modules that is kept, this is fast enough for every step: tensors are replaced when a model is moved, converted or copied,
    modules are not.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}  # a tensor that two modules share is one pair
    for ema, model in pairs:
        for own, other in ((ema._parameters, model._parameters), (ema._buffers, model._buffers)):
            filled = [name for name, tensor in own.items() if tensor is not None and other[name] is not None]
            found |= {id(own[name]): (own[name], other[name]) for name in filled}  # pyright: ignore
    return [*found.values()]


def buffers_of(modules: Iterable[nn.Module]) -> list[Tensor | None]:
    """Return the buffers that the modules themselves have now, without those of the modules inside them."""
    return [buffer for module in modules for buffer in module._buffers.values()]


@torch.no_grad()
def ema_update(pairs: list[tuple[Tensor, Tensor]], weight: float):
    """Update exponential moving averages in place. In each pair of tensors (average, new value), the average moves towards the
    new value by the fraction `weight`. Integer tensors are copied.
    """
    averaged = [(ema, now if now.dtype == ema.dtype else now.to(ema.dtype)) for ema, now in pairs if ema.is_floating_point()]
    if averaged:
        torch._foreach_lerp_([ema for ema, _ in averaged], [now for _, now in averaged], weight)  # pyright: ignore
    for ema, now in pairs:
        if not ema.is_floating_point():
            ema.copy_(now)
