"""The base class of all optimizers, and AdamW, the default."""

from typing import Any

import torch
from torch import Tensor

SCALARS = ("step", "weight_sum", "lr_max")  # entries of a state that are one number, the same for all runs of a stack


class Optimizer:
    """The base class of optimizers that a run can use. It says what the training loop needs beside the interface of
    `torch.optim.Optimizer`; `AdamW` has the usual answers, so an optimizer of your own is easiest as a subclass of `AdamW`.

    passes                         how often a step passes its batch through the model, forward and backward
    averages                       whether the weights to evaluate are those of `averaged(parameter)`
    initial_state(group, index)    the state of the parameter `group["params"][index]` before its first step, as a dict of
                                   tensors: those in `SCALARS` have the shape (), all others the shape of the parameter
    check_run(run)                 raise ValueError for settings of a run that cannot be combined with this optimizer
    check_objective(objective)     raise ValueError for a model or an objective that this optimizer cannot train
    """


class AdamW(Optimizer, torch.optim.AdamW):
    """The optimizer AdamW of PyTorch: Adam, in which weight decay does not pass through the moments of the gradient. It is the
    default of a run.

    Paper    Loshchilov and Hutter 2019, arXiv:1711.05101. The momentum is 0.9, and 0.999 for the squares of the gradient.
    """

    passes, averages = 1, False

    def __init__(self, groups: list[dict]):
        super().__init__(groups, fused=True)

    def initial_state(self, group: dict, index: int) -> dict[str, Tensor]:
        """Return the state of one parameter before its first step, as a dict of tensors: the number of steps, and the mean of
        the gradients and of their squares. The parameter is `group["params"][index]`.
        """
        zeros = torch.zeros_like(group["params"][index])
        return {"step": zeros.new_zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def check_run(self, run: Any):
        """Raise ValueError for settings of a run that cannot be combined with this optimizer. There are none."""

    def check_objective(self, objective: Any):
        """Raise ValueError for an objective or a model that this optimizer cannot train. There is none."""
