"""Collapse: when a model without labels has learned to say the same of every image. Observation early, named, and stopped."""

from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

LOOKS, APART = 100, 10  # how often a run looks at its own health, and the fewest steps from one look to the next
PATIENCE = 10  # so many looks in a row before it is stopped: a tenth of the run, or 100 steps where that is longer
SAME = 0.05  # nats that the teacher's targets tell one image from another by; a healthy run has more than 1
FLAT = 0.01  # feature spread: 1 where features point all ways, about 0.1 in an untrained ViT


class Observation(NamedTuple):
    """What an objective saw of its last batch: features b d and, where there is a teacher, its targets b k, which sum to 1."""

    features: Tensor
    targets: Tensor | None = None


class Collapse(RuntimeError):
    """The run has collapsed; the message says how, and which knob to turn first."""


def measure(seen: Observation | None) -> dict[str, float]:
    """Four numbers of a batch. All of them fall when a model collapses, but for `entropy`, which may also rise to 1.

    `spread`: the standard deviation of the normalised features over the batch, times the root of their width: 1 if they point
    all ways, 0 if they are one. `rank`: how many directions they use, the exponential of the entropy of the spectrum of their
    covariance (Roy, Vetterli 2007). `entropy`: the mean entropy of the teacher's targets, over log k. `information`: how much
    one image's targets differ from the batch's mean, in nats: the entropy of the mean less the mean entropy.

    Raises FloatingPointError for features that are not finite.
    """
    if seen is None:
        return {}
    if not seen.features.isfinite().all():
        raise FloatingPointError("the features are not finite any more; try a smaller lr")
    x = F.normalize(seen.features.float(), dim=-1)
    energy = torch.linalg.svdvals(x - x.mean(0)).square()
    spread = x.std(0, correction=0).square().sum().sqrt()
    numbers = {"spread": spread, "rank": entropy(energy / energy.sum().clamp_min(1e-30)).exp()}
    if seen.targets is not None:
        mean, k = entropy(seen.targets).mean(), seen.targets.shape[-1]
        numbers |= {"entropy": mean / log(k), "information": entropy(seen.targets.mean(0)) - mean}
    return {name: value.item() for name, value in numbers.items()}


def entropy(p: Tensor) -> Tensor:
    """In nats, along the last axis."""
    return -torch.special.xlogy(p, p).sum(-1)


def mode(numbers: dict[str, float]) -> str | None:
    """How these numbers of a batch look collapsed, and the first knob to turn; None where they do not."""
    if numbers.get("information", SAME) < SAME and numbers["entropy"] > 0.5:
        return "uniform: the teacher calls everything everything; lower teacher_temp (and warm_temp), or raise center_momentum"
    if numbers.get("information", SAME) < SAME:
        return "one-hot: the teacher calls everything the same; raise teacher_temp, or lower center_momentum"
    if numbers["spread"] < FLAT:
        return "flat: all images have the same features; lower the learning rate, or give DINO koleo=0.1"
    return None


class Monitor:
    """Looks at an objective `LOOKS` times in a run, and stops it when it has looked collapsed `PATIENCE` times in a row."""

    def __init__(self, steps: int):
        self.every, self.in_a_row = max(APART, steps // LOOKS), 0

    def check(self, step: int, observation: Observation | None):
        """Look at what was seen last, if it is time; at one image alone there is nothing to see. Raises `Collapse`."""
        if step % self.every or observation is None or len(observation.features) == 1:
            return
        numbers = measure(observation)
        how = mode(numbers)
        self.in_a_row = self.in_a_row + 1 if how else 0
        if self.in_a_row >= PATIENCE:
            said = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
            raise Collapse(f"collapsed by step {step}, {how} ({said})")
