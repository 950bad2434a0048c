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
    """Hashes and numbers from the first steps of one training run: initial weights, batches and losses. Another training with
    equal settings should have the same values. If not, a comparison shows where the two begin to differ.

    initial   hash of the initial weights of the model
    batches   hashes of the first 3 batches: images after augmentation and normalization, targets, and views
    losses    the losses of the first 8 steps
    """

    initial: str
    batches: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def add_batch(self, step: int, batch: Batch):
        """Keep the hash of a training batch if it is one of the first 3. `step` is the number of training steps taken before
        this batch. If the batch of the same step is drawn again, such as for a check before training, nothing is added.
        """
        if step == len(self.batches) < BATCHES:
            self.batches.append(digest(enumerate([batch.images, batch.targets, *batch.views])))

    def add_loss(self, step: int, loss: Tensor):
        """Keep the loss of a training step if it is one of the first 8. `step` is the number of steps taken, with this one.

        A loss that is not finite is left out, and with it all later ones: a checkpoint may not contain it, and the run fails.
        """
        if step == len(self.losses) + 1 <= LOSSES and math.isfinite(value := loss.item()):
            self.losses.append(value)

    def to_dict(self, model: nn.Module, ema_distance: float | None) -> dict:
        """Return the trace of a finished training (hashes and numbers to compare it with another training) as a dict, which is
        stored in the record (saved results) of the run. `model` is the evaluated model. `ema_distance` is the relative distance
        between its averaged weights and the last weights, or None without an average.
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
    """Return a hash of tensors, as hexadecimal digits, that stays the same if their values have other rounding errors. So
    trainings on two machines can be compared. The hash uses the name, the shape and two rounded numbers of each tensor.
    `tensors` are pairs of a name and a tensor.

    Only the first digits of two numbers for each tensor are hashed; see the top of this file.
    """
    text = "\n".join(f"{name} {tuple(tensor.shape)} {summary(tensor)}" for name, tensor in tensors)
    return hashlib.sha256(text.encode()).hexdigest()


def summary(tensor: Tensor) -> str:
    """Return two rounded numbers as text that tell different tensors apart, in spite of rounding errors. They are the root mean
    square of the values, with 4 significant digits, and the cosine of the angle to a fixed vector, with 3 decimals. The fixed
    vector has values spread evenly from -0.5 to 0.5, in an irregular order.
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
    """Return the L2 distance between the parameters of `model` and those of `other`, divided by the L2 norm of the parameters
    of `model`. Both models have the same architecture. The result is None if the norm is 0.
    """
    size = norm(model.parameters())
    return norm(p - q for p, q in zip(model.parameters(), other.parameters())) / size if size else None
