"""Transforms that change the targets: Mixup, CutMix and SmoothLabels."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

import torch
from torch import Generator, Tensor

from .batch import Batch, Random, Transform, check_range, upload
from .pixels import draw_rectangles, rectangle_mask


@dataclass(frozen=True, kw_only=True)
class Mixup(Transform):
    """Mixup, a transform that blends randomly chosen images with another image of the batch. The targets of the two images are
    blended in the same proportion.

    alpha         each image draws its proportion from Beta(alpha, alpha)
    probability   share of the images that are mixed

    Paper     arXiv:1710.09412.
    Off       probability=0.
    Departs   The paper draws one proportion for the whole batch.
    """

    alpha: float = 0.8
    probability: float = 1.0
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, alpha=(0.001, 1000), probability=(0, 1))

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        return _draw_partners(self, shape[0], generator)

    def change(self, batch: Batch, random: Random) -> Batch:
        partner, weight = _partner(random, batch.images.device), upload(random["weight"][:, None], batch.images.device)
        images = torch.lerp(batch.images[partner], batch.images, weight[:, :, None, None])
        targets = torch.lerp(batch.targets[partner], batch.targets, weight.to(batch.targets.dtype))
        return batch._replace(images=images, targets=targets)


@dataclass(frozen=True, kw_only=True)
class CutMix(Transform):
    """CutMix, a transform that pastes a rectangle from another image of the batch into randomly chosen images. The targets of
    the two images are mixed in proportion to their areas.

    alpha         each image draws the share that it keeps from Beta(alpha, alpha)
    probability   share of the images that are changed

    On a black background the rectangle may contain no ink and still change the target: prefer Mixup for digits.

    Paper     arXiv:1905.04899.
    Off       probability=0.
    Departs   The paper draws one proportion and one rectangle for the whole batch, and the border may cut the rectangle off.
              Here each image has its own, and the rectangle lies inside the image.
    """

    alpha: float = 1.0
    probability: float = 1.0
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, alpha=(0.001, 1000), probability=(0, 1))

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        random = _draw_partners(self, shape[0], generator)
        side = (1 - random["weight"]).sqrt()
        return random | draw_rectangles(side, side, generator)

    def change(self, batch: Batch, random: Random) -> Batch:
        partner, mask = _partner(random, batch.images.device), rectangle_mask(random, batch.images)
        images = torch.lerp(batch.images, batch.images[partner], mask)
        targets = torch.lerp(batch.targets, batch.targets[partner], mask.mean(dim=(2, 3)).to(batch.targets.dtype))
        return batch._replace(images=images, targets=targets)


@dataclass(frozen=True, kw_only=True)
class SmoothLabels(Transform):
    """Label smoothing, a transform that replaces the targets by (1 - amount) * targets + amount / classes. The option `amount`
    is a number from 0 to 1.

    Paper     arXiv:1512.00567.
    Off       amount=0.
    """

    amount: float = 0.1
    unsafe_for_digits = None

    def __post_init__(self):
        check_range(self, amount=(0, 1))

    @property
    def off(self) -> bool:
        return not self.amount

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        return {}

    def change(self, batch: Batch, random: Random) -> Batch:
        known = batch.targets.sum(1, keepdim=True).round(decimals=6)  # 1, or 0 for an image without a label
        return batch._replace(targets=(1 - self.amount) * batch.targets + self.amount / batch.targets.shape[1] * known)


def _draw_partners(transform: Mixup | CutMix, b: int, generator: Generator) -> Random:
    """Choose for each of `b` images another image of the batch to mix with. Return two tensors: the distance to the other image
    in the batch, and the weight of the original image, from 0 to 1. `transform` is a `Mixup` or `CutMix` object; its options
    say how often and how strongly images are mixed. `generator` is the random number generator.

    The weight is drawn from Beta(alpha, alpha) with the transform's probability, and is 1 otherwise. The partner is the next
    image in a random cyclic order. torch's Beta distribution takes no generator. This sampler is exact: Bailey's polar method
    for Student's t with 2 alpha degrees of freedom, mapped to [0, 1] (Devroye, Random variate generation in one line of code,
    1996).
    """
    cycle = torch.randperm(b, generator=generator, device="cpu")
    partner = torch.empty_like(cycle).scatter_(0, cycle, cycle.roll(1))
    radius, turn, chance = torch.rand(3, b, generator=generator, dtype=torch.float64, device="cpu")
    t = (radius ** (-1 / transform.alpha) - 1).sqrt() * (2 * pi * turn).cos()
    weight = (1 + t.atan().sin()) / 2
    distance = partner - torch.arange(b, device="cpu")
    return {"distance": distance, "weight": torch.where(chance < transform.probability, weight, 1.0).float()}


def _partner(random: Random, device: torch.device) -> Tensor:
    """Return the index of the image that each image is mixed with. `random` comes from `_draw_partners`."""
    return upload(torch.arange(len(random["distance"]), device="cpu") + random["distance"], device)
