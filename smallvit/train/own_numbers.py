"""Plain numbers that modules and optimizers of a user's own keep, such as `self.calls`: a checkpoint saves them, too."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from smallvit.vit import is_builtin

Numbers = dict[str, float]  # by the name of the attribute


def own_parts(objective: nn.Module, optimizer: Any = None) -> dict[str, Any]:
    """Return the modules of an objective, and its optimizer, whose classes are a user's own, as a dict from their names."""
    parts = {f"objective.{name}".rstrip("."): part for name, part in objective.named_modules()}
    parts |= {"optimizer": optimizer, "optimizer.base": vars(optimizer).get("base")} if optimizer is not None else {}
    # `base` of an optimizer may also be a number, which has no attributes
    return {name: part for name, part in parts.items() if hasattr(part, "__dict__") and not is_builtin(part)}


def numbers_of(part: Any) -> Numbers:
    """Return the numbers that a module or an optimizer keeps as plain attributes. `progress` is left out, because the objective
    sets it in each step.
    """
    return {name: value for name, value in vars(part).items() if type(value) in (int, float) and name != "progress"}


def set_numbers(parts: Sequence[Any], numbers: Sequence[Numbers]):
    """Give the modules and optimizers `parts` the `numbers` that they had before, and remove those that have come since."""
    for part, before in zip(parts, numbers):
        for name in numbers_of(part).keys() - before.keys():
            delattr(part, name)
        vars(part).update(before)


def changed_number(parts: Sequence[Any], numbers: Sequence[Numbers]) -> str:
    """Return the first number of `parts` that is not as it was before, such as `Counter.calls`, or an empty text. `numbers` are
    the earlier ones.
    """
    for part, before in zip(parts, numbers):
        for name, value in numbers_of(part).items():
            if repr(value) != repr(before.get(name)):  # nan is not equal to nan
                return f"{type(part).__name__}.{name}"
    return ""
