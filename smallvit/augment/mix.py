"""Mixup, CutMix, SmoothLabels: change the targets."""

from dataclasses import dataclass
from math import pi

import torch
from torch import Generator, Tensor

from .batch import Batch, expect
from .pixels import rectangles


@dataclass(frozen=True, kw_only=True)
class Mixup:
    """Blend some of the images with another of the batch, and the targets in the same proportion.

    Paper     arXiv:1710.09412.
    Off       probability=0.
    Departs   Each image draws its own proportion from Beta(alpha, alpha); the paper draws one for the batch.
    """

    alpha: float = 0.8
    probability: float = 1.0
    unsafe_for_digits = None

    def __post_init__(self):
        expect(self, alpha=(0.001, 1000), probability=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        partner, kept = _partners(self, batch.images, generator)
        kept = kept[:, None].to(batch.images.device)
        images = torch.lerp(batch.images[partner], batch.images, kept[:, :, None, None])
        return batch._replace(images=images, targets=torch.lerp(batch.targets[partner], batch.targets, kept))


@dataclass(frozen=True, kw_only=True)
class CutMix:
    """Paste a rectangle from another image of the batch into some of the images; targets are mixed by the area pasted.

    On a black background the rectangle may hold no ink and still change the target: for digits, Mixup is the truer one.

    Paper     arXiv:1905.04899.
    Off       probability=0.
    Departs   Each image draws its own proportion from Beta(alpha, alpha) and its own rectangle, which lies inside the image;
              the paper draws one of each for the batch and lets the border cut it off.
    """

    alpha: float = 1.0
    probability: float = 1.0
    unsafe_for_digits = None

    def __post_init__(self):
        expect(self, alpha=(0.001, 1000), probability=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.probability:
            return batch
        partner, kept = _partners(self, batch.images, generator)
        side = (1 - kept).sqrt()
        inside = rectangles(side, side, batch.images, generator)
        images = torch.lerp(batch.images, batch.images[partner], inside)
        targets = torch.lerp(batch.targets, batch.targets[partner], inside.mean(dim=(2, 3)))
        return batch._replace(images=images, targets=targets)


@dataclass(frozen=True, kw_only=True)
class SmoothLabels:
    """Share `amount` of each target among all classes alike.

    Paper     arXiv:1512.00567.
    Off       amount=0.
    """

    amount: float = 0.1
    unsafe_for_digits = None

    def __post_init__(self):
        expect(self, amount=(0, 1))

    def __call__(self, batch: Batch, generator: Generator) -> Batch:
        if not self.amount:
            return batch
        return batch._replace(targets=(1 - self.amount) * batch.targets + self.amount / batch.targets.shape[1])


def _partners(step: Mixup | CutMix, images: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """The image each is mixed with (the next in a random ring), and the proportion kept: from Beta(alpha, alpha), or all.

    torch's own Beta takes no generator. This one is exact: Bailey's polar method for Student's t with 2 alpha degrees of
    freedom, folded into [0, 1] (Devroye, Random variate generation in one line of code, 1996).
    """
    ring = torch.randperm(len(images), generator=generator)
    partner = torch.empty_like(ring).scatter_(0, ring, ring.roll(1))
    radius, turn, chance = torch.rand(3, len(images), generator=generator, dtype=torch.float64)
    t = (radius ** (-1 / step.alpha) - 1).sqrt() * (2 * pi * turn).cos()
    kept = (1 + t.atan().sin()) / 2
    return partner.to(images.device), torch.where(chance < step.probability, kept, 1.0).float()
