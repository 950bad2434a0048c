"""The base class of all optimizers, and AdamW, the default."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SCALARS = ("step", "weight_sum", "lr_max")  # entries of a state that are one number, the same for all runs of a stack


class Optimizer:
    """The base class of optimizers that a run can use. In addition to the interface of `torch.optim.Optimizer`, the training
    loop needs these attributes and methods. `AdamW` implements them, so the easiest way to write an optimizer of your own is a
    subclass of `AdamW`.

    passes                         number of forward and backward passes of a step
    two_passes(...)                compute the gradients of a step, for an optimizer that needs them at two places; see `SAM`,
                                   of which a subclass may have another method `moved`
    averages                       True if the weights to evaluate are those of `averaged(parameter)`
    initial_state(group, index)    the state of the parameter `group["params"][index]` before its first step, as a dict of
                                   tensors: those in `SCALARS` have the shape (), all others the shape of the parameter
    check_run(run)                 raise ValueError for settings of a run that cannot be combined with this optimizer; by
                                   default there are none
    check_objective(objective)     raise ValueError for a model or an objective that this optimizer cannot train; by default
                                   there are none
    """

    def check_run(self, run: Any):
        """Raise ValueError for settings of a run that cannot be combined with this optimizer. By default, there
        are none.
        """

    def check_objective(self, objective: Any):
        """Raise ValueError for an objective or a model that this optimizer cannot train. By default,
        there are none.
        """

    def check_state(self):
        """Raise ValueError unless the state of each parameter, after a step, has the entries that `initial_state` returns. An
        interrupted run and the runs of a stack continue from these entries.
        """
        optimizer: Any = self
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                found, expected = optimizer.state.get(parameter), optimizer.initial_state(group, index)
                if found and found.keys() != expected.keys():
                    raise ValueError(
                        f"{type(self).__name__} keeps {sorted(found)} for a parameter and its initial_state returns "
                        f"{sorted(expected)}; expected the same: override initial_state(group, index)"
                    )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy of this optimizer needs, as a dict. `torch.optim.Optimizer` leaves out options.

        Private attributes are those of torch, which sets them again. A function is a method that a scheduler has replaced.
        """
        return {name: value for name, value in vars(self).items() if not (name.startswith("_") or callable(value))}


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Return what `closure` returns. It computes the loss and the gradients before a step, so gradients are switched on in it.
    None returns None.
    """
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_groups(name: str, groups: Any, key: str):
    """Raise ValueError unless `groups` are parameter groups with the entry `key`, as `smallvit.optim.decay_groups` makes them.
    A group without parameters does not need it. `name` is that of the optimizer.
    """
    fits = isinstance(groups, list) and all(isinstance(g, dict) and (key in g or not g["params"]) for g in groups)
    if not fits:
        expected = "smallvit.optim.decay_groups(Supervised(model), weight_decay)[0]"
        raise ValueError(f"{name} got parameters that are not in groups with {key!r}; expected {expected}")


def check_state_dict(optimizer: Any, state_dict: dict[str, Any]):
    """Raise ValueError if `state_dict` is that of another kind of optimizer, so that entries are missing which the steps of
    `optimizer` need. Parameters that had no step yet have no entries.
    """
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"]):
        for index, number in zip(range(len(group["params"])), saved["params"]):
            found = state_dict["state"].get(number)
            if found and (missing := sorted(optimizer.initial_state(group, index).keys() - found)):
                name = type(optimizer).__name__
                raise ValueError(
                    f"{name} got the state of another optimizer, without {', '.join(missing)}; expected what state_dict of "
                    f"{name} has returned, for the same groups of parameters"
                )


class AdamW(Optimizer, torch.optim.AdamW):
    """The optimizer AdamW of PyTorch: Adam with decoupled weight decay. It is the default of a run.

    Paper    Loshchilov and Hutter 2019, arXiv:1711.05101, with betas (0.9, 0.999).
    """

    passes, averages = 1, False

    def __init__(self, groups: list[dict]):
        super().__init__(groups, fused=True)

    def initial_state(self, group: dict, index: int) -> dict[str, Tensor]:
        """Return the state of one parameter before its first step, as a dict of tensors: the number of steps, and the moving
        averages of the gradients and of their squares. The parameter is `group["params"][index]`.
        """
        zeros = torch.zeros_like(group["params"][index])
        return {"step": zeros.new_zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def load_state_dict(self, state_dict: dict[str, Any]):
        """Load a state that `state_dict` has returned. Raises ValueError if it has other groups of parameters, or if another
        optimizer has returned it.
        """
        check_state_dict(self, state_dict)
        super().load_state_dict(state_dict)
