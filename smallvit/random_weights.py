"""Random initial weights of a model: `initialize` draws those of each module from a random stream of its own."""

from typing import Any

import torch
from torch import nn

from smallvit.rng import stream


def initialize(model: nn.Module, seed: int | None = None) -> nn.Module:
    """Initialize all weights of a model again, in place, and return the model. With a `seed`, the random numbers for a module
    depend only on the seed and on the name of the module.

    Two models that have a module of the same name and shape get the same weights for it, even if they differ elsewhere. A
    paired comparison therefore starts both arms from the same weights. Children are drawn before their parent, which may
    draw some of its parts again. Inside the model, a module of a class from outside smallvit and torch (for instance from a
    recipe or timm) and its children keep the weights of their constructor, unless the class has `reset_parameters`. Fixed
    tables, such as those of `SinCos2d` and `Rotary`, are computed again everywhere.

    Raises   ValueError if a `seed` is given and the model is on a GPU, because weights are drawn on the CPU.
    """
    if seed is not None and any(parameter.device.type not in ("cpu", "meta") for parameter in model.parameters()):
        raise ValueError("weights are drawn on the CPU, and the model is on a GPU; call initialize before model.to(device)")
    modules = dict(model.named_modules())
    untouched = [name for name, module in modules.items() if not (is_builtin(module) or hasattr(module, "reset_parameters"))]
    for name, module in reversed(modules.items()):
        if any(f"{name}.".startswith(f"{parent}.") for parent in untouched) and not is_fixed_table(module):
            continue
        if isinstance(module, nn.Linear | nn.MultiheadAttention) or hasattr(module, "reset_parameters"):
            with torch.random.fork_rng(devices=[], enabled=seed is not None):
                if seed is not None:
                    torch.default_generator.manual_seed(stream(seed, "init", name))  # weights are drawn on the CPU
                reset_module(module)
    return model


def is_builtin(module: Any) -> bool:
    """Return True if the class of `module` is defined in smallvit or in torch, else False. smallvit initializes the weights of
    such a module. Modules of other classes, for example from a recipe file, keep the weights of their constructor, unless they
    have a method `reset_parameters`.
    """
    return type(module).__module__.partition(".")[0] in ("smallvit", "torch")


def is_fixed_table(module: Any) -> bool:
    """Return True if a module has a table that it computes and that is not saved with the weights, and no weights."""
    return bool(module._non_persistent_buffers_set) and not any(True for _ in module.parameters()) and is_builtin(module)


def reset_module(module: Any):
    """Initialize the weights of one module, in place. A linear layer gets Xavier-uniform weights and zero bias. Other modules
    are initialized by their method `reset_parameters`.
    """
    parametrized = getattr(module, "parametrizations", {})
    invertible = all(hasattr(part, "right_inverse") for parts in parametrized.values() for part in parts)
    if parametrized and not (isinstance(module, nn.Linear) and [*parametrized] == ["weight"] and invertible):
        raise ValueError(
            f"{sorted(parametrized)[0]} of a {type(module).__mro__[1].__name__} has a parametrization, such as weight norm, so "
            "it cannot be initialized again; put it into a class of your own, whose weights are kept"
        )
    if isinstance(module, nn.Linear):
        weight = torch.empty_like(module.weight) if parametrized else module.weight
        nn.init.xavier_uniform_(weight)
        if parametrized:
            module.weight = weight  # the parametrization finds the parameters of this weight
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.MultiheadAttention):
        module._reset_parameters()
    else:
        module.reset_parameters()
