"""Plain numbers and flags of a user's own modules and optimizers, such as `self.calls`: a checkpoint saves them, too."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from smallvit.optimizers import Optimizer
from smallvit.random_weights import is_builtin

PARTS = nn.Module, torch.optim.Optimizer, Optimizer
Numbers = dict[str, float]  # by the name of the attribute; flags are numbers, too
KINDS = int, float, bool
SET_ANYWAY = "progress", "lr", "training", "_is_full_backward_hook"  # by the training and by PyTorch


def own_parts(objective: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Return the modules of an objective, and its optimizer, whose classes are a user's own, as a dict from their names."""
    parts = {f"objective.{name}".rstrip("."): part for name, part in objective.named_modules()}
    parts |= {"optimizer": optimizer, "optimizer.base": vars(optimizer).get("base")} if optimizer is not None else {}
    return {name: part for name, part in parts.items() if isinstance(part, PARTS) and not is_builtin(part)}


def numbers_of(part: Any) -> Numbers:
    """Return the numbers and flags (True or False) that a module or an optimizer keeps as plain attributes, and those in the
    parameter groups of an optimizer, by name, such as "calls" and "param_groups.0.k". The attributes `progress` and `training`
    and the learning rate are left out, because the training sets them.
    """
    found = {}
    for prefix, values in places(part).items():
        numbers = {name: value for name, value in values.items() if type(value) in KINDS}
        found |= {prefix + name: value for name, value in numbers.items() if name not in SET_ANYWAY}
    return found


def places(part: Any) -> dict[str, dict[str, Any]]:
    """Return the dicts in which a module or an optimizer may keep numbers, by the beginning of the names of these numbers."""
    groups = () if isinstance(part, nn.Module) else vars(part).get("param_groups", ())
    return {"": vars(part)} | {f"param_groups.{index}.": group for index, group in enumerate(groups)}


def restore_numbers(part: Any, numbers: Numbers):
    """Give a module or an optimizer the `numbers` that `numbers_of` has returned."""
    for prefix, values in places(part).items():
        values.update(numbers_at(prefix, numbers))


def numbers_at(prefix: str, numbers: Numbers) -> Numbers:
    """Return those of the `numbers` whose names are the `prefix` of a place and a name without dots, by this name."""
    own = {name.removeprefix(prefix): value for name, value in numbers.items() if name.startswith(prefix)}
    return {name: value for name, value in own.items() if "." not in name}


def replaces_others(part: Any, numbers: Numbers) -> bool:
    """Return whether `numbers` would take the place of other attributes of a module or an optimizer, such as its methods."""
    for prefix, values in places(part).items():
        found = [values.get(name, 0) if prefix else getattr(part, name, 0) for name in numbers_at(prefix, numbers)]
        if any(type(value) not in KINDS for value in found):
            return True
    return False


def set_numbers(parts: Sequence[Any], numbers: Sequence[Numbers]):
    """Give the modules and optimizers `parts` the `numbers` that they had before, and remove those that have come since."""
    for part, before in zip(parts, numbers):
        added = {name: 0.0 for name in numbers_of(part).keys() - before.keys()}
        for prefix, values in places(part).items():
            for name in numbers_at(prefix, added):
                del values[name]
        restore_numbers(part, before)


def counted_once(parts: Sequence[Any], forward: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that does what `forward` does, except that the numbers of `parts` change in its first call only. All
    calls begin with the present numbers.
    """
    before, after = [numbers_of(part) for part in parts], []

    def call() -> Any:
        set_numbers(parts, before)
        result = forward()
        after.append([numbers_of(part) for part in parts])
        set_numbers(parts, after[0])
        return result

    return call


def changed_number(parts: Sequence[Any], numbers: Sequence[Numbers]) -> str:
    """Return the first number of `parts` that is not as it was before, such as `Counter.calls`, or an empty text. `numbers` are
    the earlier ones.
    """
    for part, before in zip(parts, numbers):
        for name, value in numbers_of(part).items():
            if repr(value) != repr(before.get(name)):  # nan is not equal to nan
                return f"{type(part).__name__}.{name}"
    return ""
