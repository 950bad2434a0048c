"""Batches: which images a training step sees, in which order, and how they are augmented.

Runs that are trained together as one model (a stack) draw their batches together. Each run has random numbers of its own, so
its batch is the one that it has alone. But the images of all runs are read, augmented and normalized at once, which is faster
on a GPU.
"""

import functools
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from smallvit.augment import Batch, apply
from smallvit.augment.batch import upload
from smallvit.data import Images
from smallvit.numerics import making_views
from smallvit.rng import stream

if TYPE_CHECKING:
    from .loop import Training


class Source:
    """The training images of one run, or of several runs, from which batches are drawn. `parts` has the images of each run.

    On a GPU, the images of several runs are moved into one tensor, so that one operation reads a batch of each. The attribute
    `parts` then has parts of this tensor. On a CPU they stay where they are, also on a disk.
    """

    def __init__(self, parts: Sequence[Images]):
        self.parts, self.whole = list(parts), parts[0] if len(parts) == 1 else None
        sizes = [len(part) for part in parts]
        self.starts = [sum(sizes[:number]) for number in range(len(parts))]
        if self.whole is None and parts[0].labels.device.type != "cpu":
            pixels, labels = (torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels"))
            self.whole = Images(pixels, labels, parts[0].spec)
            self.parts = [self.whole.take(slice(start, start + size)) for start, size in zip(self.starts, sizes)]

    def take(self, indices: Sequence[Tensor]) -> Batch:
        """Return a batch with the images of each run at its positions in `indices`: first those of the first run, then those of
        the second, and so on.
        """
        if self.whole is None:
            images, targets = zip(*((part.pixels(index), part.targets(index)) for part, index in zip(self.parts, indices)))
            return Batch(torch.cat(images), torch.cat(targets))
        index = torch.cat([index + start for index, start in zip(indices, self.starts)])
        index = upload(index, self.whole.labels.device)
        return Batch(self.whole.pixels(index), self.whole.targets(index))


def draw_batch(members: Sequence["Training"], source: Source, pool: Source | None) -> Batch:
    """Return the batches of the current step of several runs, as one batch: first the images of the first run, then those of
    the second, and so on. The images are drawn, augmented and normalized. `members` are the `Training` objects of the runs,
    `source` has their training images, and `pool` the unlabelled images that their objective sees beside these, if any.

    The runs differ only in seed, learning rate and number of labels.
    """
    first = members[0]
    run, step, seeds = first.run, first.step, [member.run.seed for member in members]
    indices = [batch_index(len(part), run.batch, step, seed) for part, seed in zip(source.parts, seeds)]
    batch = source.take(indices)
    batch = batch._replace(targets=first.label_mask * batch.targets)
    with making_views(first.numerics, first.device.type) if run.augment or pool is not None else nullcontext():
        batch = apply(run.augment, batch, generators(stream(seed, "augment", step) for seed in seeds))
        if pool is not None:
            batch = batch._replace(views=unlabelled_views(members, pool))
    normalize = first.spec.normalize
    return batch._replace(images=normalize(batch.images), views=tuple(normalize(views) for views in batch.views))


def unlabelled_views(members: Sequence["Training"], pool: Source) -> tuple[Tensor, ...]:
    """Return the views of unlabelled images that the objective of several runs needs in the current step, not yet normalized:
    first those of the first run, then those of the second, and so on. `pool` has all unlabelled images. In each run, their
    order and each view have random streams of their own.
    """
    first = members[0]
    ratio, views = first.objective.unlabelled
    seeds = [stream(member.run.seed, "unlabelled") for member in members]
    batch = pool.take([batch_index(len(part), ratio * first.run.batch, first.step, s) for part, s in zip(pool.parts, seeds)])
    result = []
    for number, transforms in enumerate(views):
        own = generators(stream(seed, "view", f"{first.step}/{number}") for seed in seeds)
        result.append(apply(transforms, batch, own).images)
    return tuple(result)


def generators(seeds: Iterable[int]) -> list[Generator]:
    """Return a random number generator for each random stream; see `smallvit.rng.stream`, which makes the `seeds`."""
    return [Generator().manual_seed(seed) for seed in seeds]


def batch_index(n: int, batch: int, step: int, seed: int) -> Tensor:
    """Return the indices of the training images in one batch, as a tensor of shape (batch,). `n` is the number of training
    images, `step` is the number of the training step, and `seed` decides the random order.

    All images are shuffled again for each epoch. The epochs are joined into one sequence, which is cut into batches.
    """
    start, end = step * batch, (step + 1) * batch
    epochs = range(start // n, (end - 1) // n + 1)
    return torch.cat([epoch_order(n, e, seed)[max(start - e * n, 0) : end - e * n] for e in epochs])


@functools.lru_cache(maxsize=256)  # the runs of a stack take turns
def epoch_order(n: int, epoch: int, seed: int) -> Tensor:
    """Return the random order of the `n` training images in one epoch, as a tensor with their indices."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(stream(seed, "order", epoch)))
