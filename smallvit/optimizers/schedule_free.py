"""Schedule-free AdamW: an average of the weights in place of a learning-rate schedule."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .adamw import SCALARS, Optimizer, check_state_dict, loss_of


class ScheduleFree(Optimizer, torch.optim.Optimizer):
    """Schedule-free AdamW. The learning rate stays constant after the warmup, and the model that is evaluated and saved is an
    average of the weights of all steps so far. So you can use the model at any step, and you do not need to choose the number
    of steps in advance.

    There are three sets of weights. The fast weights z take steps of AdamW without momentum. Their average x is evaluated. The
    gradient g is computed at y = (1 - beta1) z + beta1 x. With the learning rate r:
    d = g / (v^0.5 + eps) + weight_decay y;  z <- z - r d;  x <- (1 - c) x + c z,
    where v is the bias-corrected mean of g² as in Adam, and c is r² (of the largest r so far) divided by its sum over all
    steps.

    `groups` is `smallvit.optim.decay_groups(Supervised(model), weight_decay)[0]`. Outside of `fit`, set `group["lr"]` of each
    group before each step, and evaluate the values of `averaged(parameter)`, not the parameters.

    beta1  share of x in y. 0.9 is usual; 0.95 to 0.98 for long training
    beta2  decay rate of the moving average of the squared gradients
    eps    added to the square root of this average

    A run needs `schedule="constant"` and `ema=0.0`, because this optimizer replaces both. The run's `warmup` applies. The best
    learning rate is 1 to 10 times that of AdamW.

    Paper    Defazio et al. 2024, arXiv:2405.15682. The steps equal those of `AdamWScheduleFree` of the package schedulefree.
    Off      `AdamW`.
    Departs  A parameter counts its steps from its first gradient on.
    Raises   ValueError for `beta1` outside (0, 1), `beta2` outside [0, 1) or `eps` outside (0, 1); for a run with another
             schedule or with EMA; for a model with batch normalization, whose statistics would be those of y; and for an
             objective such as DINO, which evaluates a teacher that is already an average, or as `LearnThresholds`, which limits
             weights after each step.
    """

    passes, averages = 1, True

    def __init__(self, groups: list[dict], *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8):
        if not isinstance(beta1, int | float) or not 0 < beta1 < 1:
            raise ValueError(f"beta1 of ScheduleFree is {beta1!r}; expected a number above 0 and below 1")
        if not all(isinstance(value, int | float) for value in (beta2, eps)) or not (0 <= beta2 < 1 and 0 < eps < 1):
            raise ValueError(f"beta2 and eps of ScheduleFree are {beta2!r}, {eps!r}; expected 0 <= beta2 < 1 and 0 < eps < 1")
        super().__init__(groups, {"lr": 1e-3, "weight_decay": 0.0})
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def initial_state(self, group: dict, index: int) -> dict[str, Tensor]:
        """Return the state of one parameter before its first step: the fast weights z, the moving average of the squared
        gradients, the number of steps, the sum of r² over all steps, and the largest learning rate. The parameter is
        `group["params"][index]`.
        """
        z = group["params"][index].detach().clone()
        numbers = {name: z.new_zeros((), dtype=number_type(z)) for name in SCALARS}
        return {"z": z, "exp_avg_sq": torch.zeros_like(z, dtype=number_type(z))} | numbers

    def load_state_dict(self, state_dict: dict[str, Any]):
        """Load a state that `state_dict` has returned. Raises ValueError if it has other groups of parameters, or if another
        optimizer has returned it.
        """
        check_state_dict(self, state_dict)
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for p, number in zip(parameters, numbers):
            if self.state.get(p):  # torch has converted these numbers to the data type of the parameter
                saved = state_dict["state"][number]
                exact = "exp_avg_sq", *SCALARS
                self.state[p].update({name: saved[name].to(p.device, number_type(p), copy=True) for name in exact})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all parameters by one step, from their gradients. As in torch, `closure` may compute them: a function that
        returns the loss, which is returned.
        """
        loss = loss_of(closure)
        for group in self.param_groups:
            chosen = [(index, p) for index, p in enumerate(group["params"]) if p.grad is not None]
            for index, p in chosen:
                if not self.state[p]:
                    self.state[p].update(self.initial_state(group, index))
            if chosen:
                self.update([p for _, p in chosen], group["lr"], group["weight_decay"], group.get("shares"))
        return loss

    def update(self, y: list[Any], rate: float, weight_decay: float, shares: Tensor | None):
        """Change the parameters `y`, which have gradients, by one step with the learning rate `rate` and weight decay. The
        `_foreach_` operations of torch change all tensors of a list at once. In a stack, `shares` are the learning rates of the
        runs, divided by `rate`.
        """
        each: Any = torch  # its functions `_foreach_...`, as in the optimizers of torch
        states, gradients = [self.state[p] for p in y], [p.grad for p in y]
        z, squares, steps, sums, largest = (
            [state[name] for state in states] for name in ("z", "exp_avg_sq", "step", "weight_sum", "lr_max")
        )
        each._foreach_add_(steps, 1)
        each._foreach_clamp_min_(largest, rate)
        weights = each._foreach_mul(largest, largest)
        each._foreach_add_(sums, weights)
        c = each._foreach_div(weights, each._foreach_clamp_min(sums, 1e-30))  # 0 as long as the learning rate is 0
        each._foreach_mul_(squares, self.beta2)
        each._foreach_addcmul_(squares, gradients, gradients, value=1 - self.beta2)
        corrections = each._foreach_pow(self.beta2, steps)
        each._foreach_mul_(corrections, -1)
        each._foreach_add_(corrections, 1)
        roots = each._foreach_div(squares, corrections)
        each._foreach_sqrt_(roots)
        each._foreach_add_(roots, self.eps)
        d = [change.to(p.dtype) for change, p in zip(each._foreach_div(gradients, roots), y)]
        if weight_decay:
            each._foreach_add_(d, y, alpha=weight_decay)
        if shares is not None:
            d = [change * shares.view(-1, *[1] * (change.ndim - 1)).to(change.dtype) for change in d]
        # y = (1 - beta1) z + beta1 x after the step, without x: (1 - c) y + c z + rate (beta1 (1 - c) - 1) d
        each._foreach_lerp_(y, z, [share.to(p.dtype) for share, p in zip(c, y)])
        each._foreach_mul_(c, -self.beta1 * rate)
        each._foreach_add_(c, (self.beta1 - 1) * rate)
        each._foreach_add_(y, each._foreach_mul(d, c))
        each._foreach_add_(z, d, alpha=-rate)

    @torch.no_grad()
    def averaged(self, parameter: nn.Parameter) -> Tensor:
        """Return the averaged value x of a parameter, which is used for evaluation. The parameter itself holds y."""
        state = self.state.get(parameter)
        return torch.lerp(parameter, state["z"], 1 - 1 / self.beta1) if state else parameter.detach()

    def check_run(self, run: Any):
        """Raise ValueError if the run has a learning-rate schedule or an EMA of the weights."""
        if run.schedule != "constant" or run.ema:
            raise ValueError(
                "ScheduleFree replaces the schedule and the EMA of the weights, and the run has "
                f"schedule={run.schedule!r} and ema={run.ema}; set schedule='constant' and ema=0.0"
            )

    def check_objective(self, objective: Any):
        """Raise ValueError if the objective does not evaluate the model that it trains or changes its weights after a step, or
        if this model has batch normalization.
        """
        if objective.changes_weights:
            raise ValueError(
                f"{type(objective).__name__} limits weights after each step, which the average of ScheduleFree does not follow;"
                " use AdamW"
            )
        if objective.trained_model is not objective.model:
            raise ValueError(
                f"{type(objective).__name__} evaluates another model than the one it trains, whose weights ScheduleFree would "
                "average; use AdamW"
            )
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in objective.model.modules()):
            raise ValueError(
                f"{type(objective.model).__name__} has batch normalization, whose running statistics are not those of the "
                "averaged weights of ScheduleFree; use AdamW, or a model without it"
            )


def number_type(parameter: Tensor) -> torch.dtype:
    """Return the data type of the number of steps and of the sums for a parameter: that of the parameter, but at least float32,
    because half precision cannot count to 300 or hold the square of a small learning rate.
    """
    return torch.promote_types(parameter.dtype, torch.float32)
