"""Trace: hashes and numbers that tell whether two trainings of equal settings are the same from the first step on.

Processors round differently, so a hash of the exact bytes would differ between machines. A tensor is therefore described by its
shape and two numbers with few digits, and these are hashed: its root mean square with 4 significant digits, and the cosine with
a fixed vector with 3 decimals. Another random draw changes them. Rounding errors of float32 do so for fewer than one tensor in
ten thousand.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from smallvit.augment import Batch

BATCHES, LOSSES = 3, 8  # how many batches and losses at the beginning of a training are kept


@dataclass
class Trace:
    """What is kept of the beginning of one training run, so that it can be compared with another training with equal settings.

    initial   hash of the initial weights of the model
    batches   hashes of the first 3 batches: images after augmentation and normalization, targets, and views
    losses    the losses of the first 8 steps
    """

    initial: str
    batches: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add_batch(self, step: int, batch: Batch):
        """Keep the hash of a training batch if it is one of the first 3. `step` is the number of steps taken before it. A batch
        that is drawn twice counts once.
        """
        if step == len(self.batches) < BATCHES:
            self.batches.append(digest(enumerate([batch.images, batch.targets, *batch.views])))

    def add_loss(self, step: int, loss: Tensor):
        """Keep the loss of a training step if it is one of the first 8. `step` is the number of steps taken, with this one."""
        if step == len(self.losses) + 1 <= LOSSES:
            self.losses.append(loss.item())

    def to_dict(self, model: nn.Module, ema_distance: float | None) -> dict:
        """Return the trace of a finished training as a dict, as the record (results) of the run contains it. `model` is the
        model that is evaluated, and `ema_distance` the result of the function `distance`.
        """
        batches = hashlib.sha256("".join(self.batches).encode()).hexdigest() if self.batches else None
        return {
            "initial": self.initial,
            "batches": batches,
            "losses": self.losses,
            "ema_distance": ema_distance,
            "final_norm": norm(model.parameters()),
            "instructions": torch.backends.cpu.get_cpu_capability(),  # processors of one name may have different ones
        }


def digest(tensors: Iterable[tuple[object, Tensor]]) -> str:
    """Return a hash of tensors, as hexadecimal digits, that does not change if their values are rounded differently. `tensors`
    are pairs of a name and a tensor.

    Only the first digits of two numbers for each tensor are hashed; see the top of this file.
    """
    text = "\n".join(f"{name} {tuple(tensor.shape)} {summary(tensor)}" for name, tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()


def summary(tensor: Tensor) -> str:
    """Return two numbers about a tensor as text: its root mean square with 4 significant digits, and the cosine of the angle to
    a fixed vector with 3 decimals.
    """
    values = tensor.detach().cpu().double().flatten()
    count = max(len(values), 1)
    size = math.sqrt((values @ values).item())
    direction = torch.arange(len(values), dtype=torch.float64) * 0.6180339887 % 1 - 0.5  # uniform from -0.5 to 0.5
    cosine = (values @ direction).item() / (size * math.sqrt(count / 12)) if size else 0.0
    return f"{size / math.sqrt(count):.3e} {round(cosine, 3) + 0.0:.3f}"  # + 0.0: no negative zero


@torch.no_grad()
def norm(tensors: Iterable[Tensor]) -> float:
    """Return the L2 norm of all values of the tensors together."""
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


@torch.no_grad()
def distance(model: nn.Module, other: nn.Module) -> float | None:
    """Return the L2 distance between the parameters of two models of the same architecture, divided by the norm of the first
    one's. None if this norm is 0.
    """
    size = norm(model.parameters())
    return norm(p - q for p, q in zip(model.parameters(), other.parameters())) / size if size else None
