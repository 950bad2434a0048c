"""Muon: orthogonal updates for the matrices inside the transformer blocks, and AdamW for all other parameters."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .adamw import AdamW, check_groups, loss_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the polynomial that is applied to the singular values
SCALES = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}


class Muon(AdamW):
    """The optimizer Muon. It makes the momentum of each weight matrix nearly orthogonal, and uses it as the update. So all
    directions of the matrix change by about the same amount, not mainly those with large gradients.

    Muon trains the weights of linear layers inside the blocks: queries, keys, values, projections and MLPs, also in the decoder
    of MAE. AdamW trains all other parameters: tokenizer, tokens, positions, norms, biases, heads, and layers that score tokens.

    `groups` is `smallvit.optim.decay_groups(Supervised(model), weight_decay)[0]`. Outside of `fit`, set `group["lr"]` of each
    group before each step.

    momentum    decay rate of the moving average of the gradients
    nesterov    True: Nesterov momentum
    split_qkv   True: make the matrices of queries, keys and values orthogonal separately. False: treat them as one matrix
    scale       "match_rms_adamw": updates are as large as those of AdamW, so its learning rate and weight decay can be reused.
                "original": factor max(1, rows/columns)^0.5, which needs a learning rate around 0.01
    iterations  number of Newton-Schulz iterations

    Paper    Jordan et al. 2024, kellerjordan.github.io/posts/muon. The scale that matches AdamW: Liu et al. 2025,
             arXiv:2502.16982. The update is that of `torch.optim.Muon`; the iteration is timm's, for many matrices at once.
    Off      `AdamW`.
    Departs  The iteration is computed in the data type of the weights, float32, and not in bfloat16, which is slow on CPUs. The
             AdamW part has the betas of a run without Muon (0.9 and 0.999).
    Raises   ValueError for an unknown scale, a momentum outside [0, 1), and a model without linear layers inside blocks.
    """

    def __init__(
        self, groups: list[dict], *, momentum: float = 0.95, nesterov: bool = True, split_qkv: bool = True,
        scale: str = "match_rms_adamw", iterations: int = 5,
    ):  # fmt: skip
        if not isinstance(scale, str) or scale not in SCALES:
            raise ValueError(f"scale of Muon is {scale!r}; expected one of {', '.join(map(repr, SCALES))}")
        if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
            raise ValueError(f"momentum of Muon is {momentum!r}; expected at least 0 and less than 1")
        if type(iterations) is not int or iterations < 1:
            raise ValueError(f"iterations of Muon is {iterations!r}; expected a whole number, at least 1")
        check_groups("Muon", groups, "parts")
        super().__init__(groups)
        self.momentum, self.nesterov, self.split_qkv = momentum, nesterov, split_qkv
        self.scale, self.iterations = scale, iterations
        self._step_supports_amp_scaling = False  # unlike AdamW: a GradScaler must unscale the gradients before the step

    def initial_state(self, group: dict, index: int) -> dict[str, Tensor]:
        """Return the state of one parameter before its first step: for a matrix inside a block, the number of steps and the
        moving average of the gradients; for others, that of AdamW. The parameter is `group["params"][index]`.
        """
        if not group["parts"][index]:
            return super().initial_state(group, index)
        zeros = torch.zeros_like(group["params"][index])
        return {"step": zeros.new_zeros(()), "momentum": zeros}

    def check_objective(self, objective: Any):
        """Raise ValueError if the model has no linear layers inside blocks."""
        if not any(parts for group in self.param_groups for parts in group["parts"]):
            name = type(objective.trained_model).__name__
            raise ValueError(f"Muon is for linear layers inside blocks and {name} has none to train; use AdamW")

    def add_param_group(self, param_group: dict):
        """Add a group of parameters, a dict as in torch. Without the entry "parts", AdamW trains them.

        Raises ValueError if "parts" does not have one number for each parameter.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        parameters, parts = len(group["params"]), len(group.setdefault("parts", [0] * len(group["params"])))
        if parts != parameters:
            raise ValueError(
                f"Muon got a group of {parameters} parameters with {parts} numbers in 'parts'; expected one for each: remove "
                "the numbers of removed parameters too, or freeze parameters (requires_grad=False) before decay_groups"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all parameters by one step, from their gradients. As in torch, `closure` may compute them: a function that
        returns the loss, which is returned.
        """
        if not any(parts for group in self.param_groups for parts in group["parts"]):
            raise ValueError(
                "Muon got no linear layer inside blocks, so it would be AdamW; expected the groups of "
                "smallvit.optim.decay_groups, for a model with its blocks in the attribute blocks"
            )
        loss = loss_of(closure)
        hidden = defaultdict(list)  # shape of a matrix -> the parameters of such matrices, each with its group and its gradient
        for group in self.param_groups:
            for index, (p, parts) in enumerate(zip(group["params"], group["parts"])):
                if parts and p.grad is not None:
                    if not self.state[p]:
                        self.state[p].update(self.initial_state(group, index))
                    shape = p.shape[-2] // (parts if self.split_qkv else 1), p.shape[-1]
                    hidden[shape].append((p, group, p.grad))
                    p.grad = None  # so that AdamW leaves it out
        self.adamw_step()
        for shape, entries in hidden.items():  # in all layers at once: a call takes longer than the numbers of a small matrix
            updates = torch.cat([self.update(self.state[p], gradient).reshape(-1, *shape) for p, _, gradient in entries])
            sizes = [p.numel() // math.prod(shape) for p, *_ in entries]
            for (p, group, gradient), update in zip(entries, orthogonalize(updates, self.iterations).split(sizes)):
                p.grad = gradient
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.reshape(p.shape), alpha=-group["lr"] * SCALES[self.scale](*shape))
        return loss

    def adamw_step(self):
        """Take a step of AdamW for all parameters with a gradient, without the hooks of `step`. torch calls these hooks once
        around the step of this class; it adds them to the method of AdamW too, as soon as an AdamW has been made.
        """
        step = torch.optim.AdamW.step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self)  # pyright: ignore

    def update(self, state: dict[str, Tensor], gradient: Tensor) -> Tensor:
        """Add a gradient to the moving average in the state of a parameter. Return the update before orthogonalization."""
        state["step"] += 1
        mean = state["momentum"].lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(mean, self.momentum) if self.nesterov else mean


def orthogonalize(matrices: Tensor, iterations: int) -> Tensor:
    """Return matrices, shape (batch, rows, columns), with the same singular vectors and with singular values near 1, by the
    Newton-Schulz iteration. After 5 iterations they are from 0.68 to 1.14, unless they were very small.
    """
    from timm.optim.muon import zeropower_via_newtonschulz

    return zeropower_via_newtonschulz(matrices, iterations, [COEFFICIENTS], dtype=matrices.dtype)
