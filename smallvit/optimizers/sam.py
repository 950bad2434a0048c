"""SAM and ASAM: sharpness-aware minimization, which uses the gradient at nearby weights with a larger loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .adamw import AdamW, Optimizer, check_groups


class SAM(Optimizer):
    """Sharpness-aware minimization. Each step computes the gradient g of the loss and moves the weights along g by the distance
    `rho`, to where the loss is larger. There it computes the gradient on the same batch, and moves the weights back. The
    optimizer `base` then takes its step with this second gradient. This favors flat minima, where nearby weights have a small
    loss too.

    A step takes twice as long, and the record counts its images twice. So compare also with a baseline of twice the steps.

    `groups` is `smallvit.optim.decay_groups(Supervised(model), weight_decay)[0]`. Outside of `fit`, set `group["lr"]` of each
    group before each step, and call `two_passes(backward, objective, changed)` and then `step()`.

    rho       distance of the move; 0.05 to 0.2 are usual, and about ten times as much with `adaptive`
    adaptive  True: ASAM, which scales the move by the size of each weight, so that rescaling the weights has no effect. The
              move is rho T²g / |T g|, with T = |w| + eta for matrices and kernels, and T = 1 for biases, norms, tokens and
              positions
    eta       added to |w| in ASAM
    base      the optimizer that takes the steps: `AdamW`, `Muon` or `ScheduleFree`, or a `partial` of one

    Both passes use the same augmented images and the same random numbers. Buffers, such as the running statistics of batch
    normalization or the center of DINO, and teachers change in the first pass only. So both passes learn the same targets of a
    teacher; targets that the trained model predicts itself, as in FixMatch, are predicted anew in the second pass. The reported
    loss is that of the first pass. Gradients are clipped after the second pass. Weights that do not learn in a step are not
    moved: frozen ones, such as the last layer of DINO at the start, and those with the learning rate 0, such as all but the
    predictors of `LearnToPrune` at the start. In a stack, the move is computed for each run separately.

    Paper    SAM: Foret et al. 2021, arXiv:2010.01412. ASAM: Kwon et al. 2021, arXiv:2102.11600.
    Off      `rho=0` equals the base optimizer, bit for bit, and has one pass.
    Departs  ASAM's authors scale the move for each parameter whose name contains "weight"; here for each parameter with weight
             decay. All parameters have the same `rho`. The weights are restored from a copy, so there are no rounding errors.
    Raises   ValueError for a negative `rho` or `eta`, and for a `base` that is itself SAM.
    """

    _step_supports_amp_scaling = False  # a GradScaler must unscale the gradients before the step, also if the base could do it

    def __init__(
        self, groups: list[dict], *, rho: float = 0.05, adaptive: bool = False, eta: float = 0.01, base: Callable = AdamW
    ):  # fmt: skip
        for name, value in (("rho", rho), ("eta", eta)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{name} of SAM is {value!r}; expected a number, at least 0")
        check_groups("SAM", groups, "decays")
        if not callable(base):
            raise ValueError(f"base of SAM is {base!r}; expected an optimizer class, such as AdamW or Muon")
        self.base = base(groups)
        if not isinstance(self.base, Optimizer) or isinstance(self.base, SAM):
            raise ValueError(f"base of SAM makes {type(self.base).__name__}; expected AdamW, Muon or ScheduleFree")
        self.rho, self.adaptive, self.eta = rho, adaptive, eta
        self.passes = 2 if rho else 1
        self.used = False  # whether `two_passes` was called

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the base optimizer, such as its `state`."""
        if name == "base":
            raise AttributeError(name)
        return getattr(self.base, name)

    def check_state(self):
        """Raise ValueError unless the state of each parameter has the entries that the base optimizer says."""
        self.base.check_state()

    def step(self, closure: None = None):
        """Change all parameters by one step of the base optimizer, from the gradients that `two_passes` has computed. Raise
        ValueError if it was not called, and for a closure, because a step needs two passes.
        """
        if closure is not None:
            raise ValueError(
                "SAM.step got a closure; expected none: call two_passes(backward, objective, changed) with a function that "
                "computes the gradients, and then step()"
            )
        if self.rho and not self.used:
            raise ValueError(
                "SAM.step was called without two_passes(backward, objective, changed), so the step would be that of the base "
                "optimizer; expected this call first, which computes the gradients"
            )
        self.base.step()
        self.used = False

    def two_passes(
        self, backward: Callable[[], Tensor], objective: Any, changed: Sequence[Tensor], members: Sequence[Any] = ()
    ) -> Tensor:
        """Compute the gradients of a step at the moved weights, and return the loss at the original weights. The function
        `backward` sets the gradients to zero, computes them at the present weights and returns the loss. `objective` is the
        training objective. `changed` are its tensors that a forward pass may change, such as buffers and the weights of a
        teacher; they change in the first pass only. In a stack, `members` are the objectives of its runs, and the first axis of
        all tensors is the run. See `second_pass` and `frozen_parameters` of `Objective`.
        """
        self.used = True
        if not self.rho:
            return backward()
        device = next(p.device for group in self.param_groups for p in group["params"])
        before, draws = [tensor.clone() for tensor in changed], random_states(device)
        loss = backward()
        after, objectives = [tensor.clone() for tensor in changed], members or [objective]
        observed = [each.observed for each in objectives]
        if getattr(objective, "second_pass", None) is None:
            copy_all(changed, before)
            second_pass = nullcontext()
        else:
            second_pass = marked(objective)
        for parameter in getattr(objective, "frozen_parameters", list)():
            parameter.grad = None
        set_random_states(device, draws)
        with self.moved(bool(members)), second_pass:
            backward()
        copy_all(changed, after)
        for each, first_pass in zip(objectives, observed):
            each.observed = first_pass
        return loss

    @contextmanager
    def moved(self, members: bool = False) -> Iterator[None]:
        """Context manager that moves the weights along their gradients by the distance `rho`, and restores them exactly at the
        end. Parameters without a gradient or with the learning rate 0 are not moved. With `members`, the first axis is the run
        of a stack. ASAM treats a group without the entry "decays" as biases.
        """
        groups = [group for group in self.param_groups if group["lr"]]
        chosen = [(p, group.get("decays", False)) for group in groups for p in group["params"] if p.grad is not None]
        if not chosen:
            yield
            return
        kept = [p.detach().clone() for p, _ in chosen]
        with torch.no_grad():
            units = [w.abs().add_(self.eta) if self.adaptive and decays else None for w, (_, decays) in zip(kept, chosen)]
            scaled = [p.grad if unit is None else unit * p.grad for unit, (p, _) in zip(units, chosen)]
            rows = [each.reshape(len(each) if members else 1, -1) for each in scaled]
            length = torch.stack([row.norm(dim=1) for row in rows]).norm(dim=0)  # one for each run
            factor = self.rho / (length + 1e-12)
            for (p, _), unit, each in zip(chosen, units, scaled):
                own = factor.view(-1 if members else 1, *[1] * (p.ndim - 1)) if p.ndim else factor[0]
                p.add_((each if unit is None else unit * each) * own)
        try:
            yield
        finally:
            copy_all([p for p, _ in chosen], kept)

    def check_run(self, run: Any):
        """Raise ValueError for settings of a run that cannot be combined with the base optimizer."""
        self.base.check_run(run)

    def check_objective(self, objective: Any):
        """Raise ValueError for an objective or a model that the base optimizer cannot train."""
        self.base.check_objective(objective)


@contextmanager
def marked(objective: Any) -> Iterator[None]:
    """Context manager in which the attribute `second_pass` of a training objective is True."""
    objective.second_pass = True
    try:
        yield
    finally:
        objective.second_pass = False


@torch.no_grad()
def copy_all(tensors: Sequence[Tensor], values: Sequence[Tensor]):
    """Copy values into tensors, in place."""
    for tensor, value in zip(tensors, values):
        tensor.copy_(value)


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of the random number generators of the CPU and of `device`, from which dropout draws."""
    own = [torch.get_device_module(device).get_rng_state(*index(device))] if device.type != "cpu" else []
    return [torch.get_rng_state(), *own]


def set_random_states(device: torch.device, states: Sequence[Tensor]):
    """Set the random number generators of the CPU and of `device` to states from `random_states`."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, *index(device))


def index(device: torch.device) -> tuple:
    """Return the device as an argument for the functions of its module, if they take one."""
    return (device,) if device.type == "cuda" else ()
