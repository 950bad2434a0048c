"""Collapse of self-supervised training: the model gives the same features or targets for every image. It is detected here.

A `Monitor` looks at the features of the current batch from time to time, and stops a run that has collapsed.
"""

from math import log
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHECKS, MIN_STEPS = 100, 10  # number of checks in a run, and the smallest number of steps between two checks
PATIENCE = 10  # collapsed checks in a row before a run is stopped: a tenth of the run, or 100 steps if that is longer
MIN_INFORMATION = 0.05  # nats; healthy runs have more than 1
MIN_SPREAD = 0.01  # 1 for features in all directions; an untrained ViT has about 0.1


class Observation(NamedTuple):
    """The values of one training batch that are checked for collapse: the features of the images, shape (batch, features), and
    the target probabilities of a teacher, shape (batch, classes). Without a teacher, the targets are None. For an ensemble,
    both have one more axis, the first, for the members.
    """

    features: Tensor
    targets: Tensor | None = None


class Collapse(RuntimeError):
    """An error that stops a self-supervised run because its features have collapsed: all images get nearly the same output. The
    message names the kind of collapse and suggests which option to change.
    """


def collapse_statistics(observation: Observation | None) -> dict[str, float]:
    """Return a dict of numbers that show whether self-supervised features have collapsed (all images get nearly the same
    output). `observation` holds the features of a batch and, if there is a teacher, its target probabilities.

    The numbers are the spread, rank, entropy and information.

    Returns an empty dict without an observation, and only `spread` and `rank` without targets.

    spread       the standard deviation of the L2-normalized features over the batch, times the square root of their width. It
                 is 1 if the features point in all directions, and 0 if they are all equal.
    rank         the number of directions that the features use: the exponential of the entropy of the spectrum of their
                 covariance (Roy, Vetterli 2007).
    entropy      the mean entropy of the teacher's targets, divided by log k. It is 0 for one-hot and 1 for uniform targets.
    information  how much the targets of an image differ from the mean over the batch, in nats: the entropy of the mean minus
                 the mean entropy.

    In a collapse all of them fall, except `entropy`, which may also rise to 1. For an ensemble, they are those of the first
    member that has collapsed, or of the first member if none has.

    Raises   FloatingPointError if the features are not finite.
    """
    if observation is None:
        return {}
    features, targets = observation
    if features.ndim == 3:
        members = map(Observation, features, [None] * len(features) if targets is None else targets)
        statistics_of_all = list(map(collapse_statistics, members))
        return next(filter(collapse_kind, statistics_of_all), statistics_of_all[0])
    if not features.isfinite().all():
        raise FloatingPointError("the features are not finite any more; try a smaller lr")
    x = F.normalize(features.float(), dim=-1)
    energy = torch.linalg.svdvals(x - x.mean(0)).square()
    spread = x.std(0, correction=0).square().sum().sqrt()
    statistics = {"spread": spread, "rank": entropy(energy / energy.sum().clamp_min(1e-30)).exp()}
    if targets is not None:
        mean, k = entropy(targets).mean(), targets.shape[-1]
        statistics |= {"entropy": mean / log(k), "information": entropy(targets.mean(0)) - mean}
    return {name: value.item() for name, value in statistics.items()}


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of the probabilities `p` along the last axis, in nats."""
    return -torch.special.xlogy(p, p).sum(-1)


def collapse_kind(statistics: dict[str, float]) -> str | None:
    """Return a text that names the kind of collapse (all images get nearly the same output) and suggests which option to
    change. Return None if the features are healthy. `statistics` is the dict that `collapse_statistics` returns.
    """
    if statistics.get("information", MIN_INFORMATION) < MIN_INFORMATION:
        if statistics["entropy"] > 0.5:
            return (
                "uniform: the teacher's targets are the same for all classes; lower teacher_temp (and warm_temp), or raise"
                " center_momentum"
            )
        return "one-hot: the teacher's targets are one class for all images; raise teacher_temp, or lower center_momentum"
    if statistics["spread"] < MIN_SPREAD:
        return (
            "flat: all images have the same features; lower the learning rate, give DINO koleo=0.1, or LeJEPA a larger weight"
        )
    return None


class Monitor:
    """An object that watches a training run for collapse (all images get nearly the same output). About 100 batches of the run
    are checked. If 10 checks in a row find a collapse, the error `Collapse` is raised.

    steps  the number of steps of the run. Checks are at least 10 steps apart.
    """

    def __init__(self, steps: int):
        self.every, self.in_a_row = max(MIN_STEPS, steps // CHECKS), 0

    def check(self, step: int, observation: Observation | None):
        """Check the features of a training batch (`observation`) for collapse: do all images get nearly the same output? Raise
        `Collapse` if this is the tenth collapsed check in a row. `step` is the number of the training step.

        Most steps are skipped: only every n-th step is checked, where n depends on the length of the run.

        A batch of one image says nothing about collapse and is not checked.
        """
        if step % self.every or observation is None or observation.features.shape[-2] == 1:
            return
        numbers = collapse_statistics(observation)
        kind = collapse_kind(numbers)
        self.in_a_row = self.in_a_row + 1 if kind else 0
        if self.in_a_row >= PATIENCE:
            statistics = ", ".join(f"{name} {value:.3g}" for name, value in numbers.items())
            raise Collapse(f"collapsed by step {step}, {kind} ({statistics})")
