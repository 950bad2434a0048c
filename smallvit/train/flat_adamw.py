"""The steps of AdamW with a few large tensors in the place of many small ones, for runs with the native kernel."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def lay_in_a_row(parameters: Iterable[nn.Parameter]):
    """Move the values of parameters into one piece of memory, one after another in their order. The values stay the same."""
    parameters = list(parameters)
    if parameters:
        memory = torch.cat([p.detach().flatten() for p in parameters])
        for p, values in zip(parameters, memory.split([p.numel() for p in parameters])):
            p.data = values.view(p.shape)


def lay_apart(parameters: Iterable[nn.Parameter]):
    """Undo `lay_in_a_row`: give each parameter a piece of memory of its own. Parameters that have one keep it."""
    for p in parameters:
        if p.untyped_storage().nbytes() > p.numel() * p.element_size():
            p.data = p.detach().clone()


class FlatAdamW:
    """AdamW for many small parameters, with a few large tensors instead. It does what `optimizer` does, in less time.

    `optimizer` is a `torch.optim.AdamW` that has taken at least one step. Parameters that lie in a row (see `lay_in_a_row`)
    become one tensor, and so do their gradients and states. From then on, each `.grad` and each moment in `optimizer.state` is
    a part of such a tensor, so `optimizer.state_dict()` stays right. Learning rates are read from `optimizer`. A parameter
    without a gradient so far stays as it is until it gets one, as in `optimizer`. If a parameter gets no gradient in a later
    step, as in a block that is skipped at random, `complete` says so, and `optimizer` must go on alone.

    Before a step, all gradients are -0.0: whatever is added to it, also 0.0, is no longer -0.0. So what is still -0.0 after the
    backward pass got no gradient. A gradient that is -0.0 everywhere, as of a term that is subtracted from the loss with the
    weight 0, counts as none, too: such a parameter does not change in this step, also not by weight decay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.gradients: list[tuple[nn.Parameter, Tensor]] = []  # each parameter with the part that is its gradient
        self.starts: list[Tensor] = []  # of each joined gradient, the positions where its parts begin
        self.groups: list[tuple[dict, list[list[Tensor]]]] = []  # each group, with five lists: see `join`
        others = []
        for group in optimizer.param_groups:
            joined = [self.join(row) for row in rows_in_memory(group["params"], optimizer.state)]
            if joined:
                self.groups.append((group, [list(tensors) for tensors in zip(*joined)]))
            others.append(group | {"params": [p for p in group["params"] if p not in optimizer.state]})
        self.flat_parameters: list[Any] = [p for _, lists in self.groups for p in lists[0]]
        self.rest = None
        self.divisor: Tensor | None = None  # of all gradients, for the next step
        if any(group["params"] for group in others):
            self.rest = torch.optim.AdamW(others, fused=True)
            self.rest.state = optimizer.state  # pyright: ignore[reportAttributeAccessIssue]
        self.parameters: list[nn.Parameter] = [*self.flat_parameters, *(p for group in others for p in group["params"])]

    def join(self, row: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
        """Return a parameter that shares its memory with all parameters in a row, its gradient, its two moments and its count
        of steps. The gradients and moments of the parameters become parts of them.
        """
        sizes = [p.numel() for p in row]
        self.starts.append(torch.tensor([0, *sizes[:-1]], device=row[0].device).cumsum(0))
        flat = nn.Parameter(row[0].detach().as_strided((sum(sizes),), (1,)))
        flat.grad = torch.zeros_like(flat)
        states = [self.optimizer.state[p] for p in row]
        moments = {name: torch.cat([state[name].flatten() for state in states]) for name in ("exp_avg", "exp_avg_sq")}
        parts = zip(*(tensor.split(sizes) for tensor in (flat.grad, *moments.values())))
        for p, state, (gradient, *own) in zip(row, states, parts):
            p.grad = own_gradient = gradient.view(p.shape)
            self.gradients.append((p, own_gradient))
            state.update({"step": states[0]["step"]} | {name: part.view(p.shape) for name, part in zip(moments, own)})
        return flat, flat.grad, *moments.values(), states[0]["step"]

    def zero_grad(self):
        """Set all gradients to zero (-0.0), and those of parameters without a gradient so far to None."""
        for p in self.flat_parameters:
            p.grad.fill_(-0.0)
        if self.rest is not None:
            self.rest.zero_grad()

    def complete(self) -> bool:
        """Return whether all parameters have got gradients, and these still are where this object expects them. An objective
        may have replaced one, or removed it. Parameters that got no gradient have `.grad` None after this, as in PyTorch.
        """
        firsts = [p.grad.index_select(0, starts) for p, starts in zip(self.flat_parameters, self.starts)]
        if firsts and untouched(torch.cat(firsts)).any():  # quick: one value of each parameter
            for p, gradient in self.gradients:
                if p.grad is gradient and untouched(gradient).all():
                    p.grad = None
        return all(p.grad is gradient for p, gradient in self.gradients)

    @torch.no_grad()
    def clip(self, largest: float):
        """Clip the gradients in the next call of `step`, as PyTorch's `clip_grad_norm_` does: if their norm is above `largest`,
        they are divided by so much that it becomes `largest`. The optimizer does this on its way through the gradients.
        """
        gradients = [p.grad.flatten() for p in self.parameters if p.grad is not None]
        if any(gradient.device.type != "cpu" for gradient in gradients):
            nn.utils.clip_grad_norm_(self.parameters, largest)
            return
        norm = math.sqrt(sum(gradient.dot(gradient).item() for gradient in gradients))
        if not norm + 1e-6 <= largest:  # also for a norm that is not a number
            self.divisor = torch.tensor((norm + 1e-6) / largest)
            for p in self.parameters[len(self.flat_parameters) :]:
                if p.grad is not None:
                    p.grad.div_(self.divisor)

    @torch.no_grad()
    def step(self):
        """Update all parameters from their gradients."""
        tensors: Any = torch
        for group, (parameters, gradients, means, squares, steps) in self.groups:
            # what `torch.optim.AdamW(fused=True)` calls after looking through its parameters
            tensors._foreach_add_(steps, 1)
            tensors._fused_adamw_(
                parameters, gradients, means, squares, [], steps, lr=group["lr"], beta1=group["betas"][0],
                beta2=group["betas"][1], eps=group["eps"], weight_decay=group["weight_decay"], amsgrad=False, maximize=False,
                grad_scale=self.divisor,
            )  # fmt: skip
        self.divisor = None
        if self.rest is not None:
            for group, own in zip(self.optimizer.param_groups, self.rest.param_groups):
                own["lr"] = group["lr"]
            self.rest.step()

    def separate(self):
        """Make the count of steps of each parameter its own again, so that `optimizer` can go on alone."""
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()


def untouched(values: Tensor) -> Tensor:
    """Return for each value whether it is -0.0: then nothing was added to it since `FlatAdamW.zero_grad`."""
    return (values == 0) & values.signbit()


def rows_in_memory(parameters: Iterable[nn.Parameter], states: dict) -> list[list[nn.Parameter]]:
    """Divide the parameters that have a state of AdamW into lists. Those of one list lie one after another in memory, and have
    taken equally many steps.
    """
    rows: list[list[nn.Parameter]] = []
    for p in parameters:
        if p not in states:
            continue
        last = rows[-1][-1] if rows else None
        follows = (
            last is not None
            and p.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
            and p.storage_offset() == last.storage_offset() + last.numel()
            and p.is_contiguous() and last.is_contiguous()
            and torch.equal(states[p]["step"], states[last]["step"])
        )  # fmt: skip
        if follows:
            rows[-1].append(p)
        else:
            rows.append([p])
    return rows
