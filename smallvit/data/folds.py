"""Random splits of images by class and by group: labelled and validation images, a held-out part, and folds.

A group is a set of images that belong together, such as the images of one patient. All images of a group are always on the same
side of a split. Without groups, every image is a group of its own.
"""

from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from smallvit.rng import shuffled

from .images import DataSpec

ATTEMPTS = 100  # how many random splits are drawn until each fold has images of all classes


@dataclass(frozen=True, eq=False)
class Fold:
    """One fold of a cross-validation.

    folds      number of folds
    pool       number of images in all folds together
    index      indices of the test images among these images (the pool), in increasing order
    positions  indices of the test images among all images of the data set; equal to `index` if all are in the pool
    """

    folds: int
    pool: int
    index: Tensor
    positions: Tensor


def balanced_split(
    labels: Tensor, held_out: int, seed: int, stream: str, groups: Tensor | None = None, *, keep_one: bool = False
) -> tuple[Tensor, Tensor]:
    """Split images at random into two parts, and return two tensors: the indices of each part. The second part has `held_out`
    images, in proportion to the class sizes. In the first part the classes alternate. `labels` holds the labels of all images.
    The number `seed` and the text `stream`, the name of a random stream, determine the order.

    The order of the classes, and of the images within a class, is random. The held-out images are the last ones of each class.
    With `groups`, the group number of each image, whole groups are held out instead, which `choose_groups` chooses, so that the
    number of their images may differ from `held_out`. With `keep_one`, one image of each class is never held out, so that the
    second part may be smaller than `held_out`.
    """
    index = random_order(len(labels), seed, stream)
    label = labels[index]
    count = torch.bincount(label)
    wanted = _proportional(held_out, count)
    if keep_one:
        wanted = wanted.minimum((count - 1).clamp(min=0))
    chosen = None if groups is None else choose_groups(labels, groups, wanted, seed, stream)[index]
    if chosen is not None:  # sorted within a class, the held-out images come last
        last = chosen.to(torch.int8).argsort(stable=True)
        index, label, chosen = index[last], label[last], chosen[last]
    rank = torch.empty_like(index)  # the position of an image within its class
    rank[label.argsort(stable=True)] = torch.cat([torch.arange(n) for n in count.tolist()])
    turn = torch.tensor(shuffled(list(range(len(count))), seed, f"{stream}/class")).argsort()
    order = (rank * len(count) + turn[label]).argsort()
    is_held_out = ((rank >= (count - wanted)[label]) if chosen is None else chosen)[order]
    return index[order][~is_held_out], index[order][is_held_out]


@lru_cache(maxsize=32)
def random_order(count: int, seed: int, stream: str) -> Tensor:
    """Return the numbers from 0 to `count - 1` in the order of `shuffled`, as a tensor that must not be changed. The last 32
    orders are kept, because hashing 60,000 numbers takes 0.3 seconds, and all arms of a comparison draw the same images.
    """
    return torch.tensor(shuffled(list(range(count)), seed, stream), dtype=torch.int64)


def choose_groups(labels: Tensor, groups: Tensor, wanted: Tensor, seed: int, stream: str) -> Tensor:
    """Choose whole groups at random so that the number of images of each class comes close to `wanted`; other groups may come
    closer. Return a boolean tensor with one value for each image: True for the images of the chosen groups.

    labels, groups  class and group number of each image
    wanted          number of images of each class to choose; a class of which some are wanted gets at least one if possible
    seed, stream    the random seed, and the name of the random stream

    The groups are visited once, in random order. A group is chosen if it brings the numbers closer to `wanted`. If a class of
    which images are wanted then has none, because its groups are large, the smallest of them is chosen. At least one group of
    each class is never chosen.
    """
    numbers, group = np.unique(groups.numpy(), return_inverse=True)
    table = np.zeros((len(numbers), len(wanted)), np.int64)  # images of each group and class
    np.add.at(table, (group, labels.numpy()), 1)
    target, left = wanted.numpy(), table.sum(0)
    taken, chosen = np.zeros_like(target), np.zeros(len(numbers), bool)
    order = shuffled(list(range(len(numbers))), seed, f"{stream}/group")

    def take(number: int):
        nonlocal taken, left
        chosen[number], taken, left = True, taken + table[number], left - table[number]

    def leaves_all_classes(number: int) -> bool:
        return bool(((left - table[number])[table[number] > 0] > 0).all())

    for number in order:
        if leaves_all_classes(number) and np.abs(target - taken - table[number]).sum() < np.abs(target - taken).sum():
            take(number)
    for missing in np.flatnonzero((target > 0) & (taken == 0)):  # all groups of this class are large: take the smallest
        able = [number for number in order if table[number, missing] and not chosen[number] and leaves_all_classes(number)]
        if able and not taken[missing]:
            take(min(able, key=lambda number: table[number].sum()))
    return torch.from_numpy(chosen[group])


def held_out_part(labels: Tensor, groups: Tensor | None, share: float | None, spec: DataSpec) -> Tensor:
    """Draw a fixed part of the images for testing, in proportion to the classes, and return a boolean tensor: True for the test
    images. The part is always the same for the same labels and groups.

    labels, groups  class and group number of each image; None: every image is a group of its own
    share           share of the images to draw, between 0 and 1; 0.0: no image is a test image
    spec            description of the data set

    Raises    ValueError for a share that is not between 0 and 1, and for a class with fewer than 2 images or groups.
    """
    if isinstance(share, bool) or not isinstance(share, float) or not 0 <= share < 1:
        raise ValueError(
            f"test={share!r}; expected a share of the images between 0 and 1, such as test=0.2, or 0.0 for no test images"
        )
    if not share:
        return torch.zeros(len(labels), dtype=torch.bool)
    _check_class_sizes(labels, groups, 2, f"test={share}", spec)
    count = torch.bincount(labels)
    wanted = (share * count).round().long().clamp(min=1).minimum(count - 1)
    groups = torch.arange(len(labels)) if groups is None else groups
    chosen = choose_groups(labels, groups, wanted, 0, "test")
    if lacking := [name for label, name in enumerate(spec.classes) if not (chosen & (labels == label)).any()]:
        raise ValueError(
            f"{spec.name}: no group with images of {', '.join(lacking)} can be held out by test={share}, because each class "
            "needs images of another group for training; expected more groups"
        )
    return chosen


def first_folds(
    labels: Tensor, groups: Tensor | None, folds: int, spec: DataSpec, test: float | None = None
) -> list[Tensor]:
    """Return the first division of the images into folds: the indices of the images of each fold. Raise ValueError if the
    images cannot be divided into `folds` folds that each have images of all classes. The message says what is possible instead.

    labels, groups  class and group number of each image; None: every image is a group of its own
    spec            description of the data set
    test            the share of all images that these images are, if they are a held-out part; otherwise None
    """
    if not isinstance(folds, Integral) or isinstance(folds, bool) or folds < 2:
        raise ValueError(f"folds={folds!r}; expected a number of folds of at least 2, such as folds=5")
    _check_class_sizes(labels, groups, folds, f"folds={folds}", spec, test)
    return draw_folds(labels, groups, folds, 0, len(spec.classes))


def _check_class_sizes(
    labels: Tensor, groups: Tensor | None, needed: int, option: str, spec: DataSpec, test: float | None = None
):
    """Raise ValueError if a class has fewer than `needed` groups (without groups, images). The message says that `option` needs
    them, and what is possible instead. `test` is the share of all images that these images are, if they are a held-out part.
    """
    unit = "images" if groups is None else "groups of images (or of identical images)"
    units = torch.arange(len(labels)) if groups is None else groups
    fewest, label = min((len(units[labels == label].unique()), label) for label in range(len(spec.classes)))
    if fewest < needed:
        where, other, advice = "", "test=0.2", "add images, or leave the class out"
        if test is not None:
            where, other, advice = f" in the part test={test}", f"a larger part than test={test}", "set a larger test="
        possible = f"at most folds={fewest} is possible, or {other}" if fewest >= 2 else advice
        needs = f"{option} needs {needed} {unit} of each class{where}"
        raise ValueError(f"{spec.name}: {needs}, but {spec.classes[label]!r} has {fewest}; {possible}")


def draw_folds(labels: Tensor, groups: Tensor | None, folds: int, number: int, classes: int) -> list[Tensor]:
    """Divide images at random into folds with about equal shares of each class, and return the indices of the images of each
    fold, in increasing order.

    labels, groups  class and group number of each image; all images of a group are in one fold
    folds           number of folds
    number          number of the division, the random state of scikit-learn's StratifiedGroupKFold (StratifiedKFold without
                    groups)
    classes         number of classes

    Every fold has images of all classes. Where the first division has a fold without one, further ones are drawn.

    Raises    ValueError if no such division is found.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    splitter = StratifiedKFold if groups is None else StratifiedGroupKFold
    for attempt in range(ATTEMPTS):
        split = splitter(n_splits=folds, shuffle=True, random_state=number + attempt * 2**20)
        parts = [torch.from_numpy(test) for _, test in split.split(np.zeros(len(labels)), labels.numpy(), groups)]
        if all(len(labels[part].unique()) == classes for part in parts):
            return parts
    raise ValueError(
        f"folds={folds}: the groups cannot be divided into {folds} folds that each have images of all classes; expected fewer "
        "folds, or test=0.2 without folds"
    )


def _proportional(total: int, count: Tensor) -> Tensor:
    """Return integers (a tensor) that sum to `total` and are proportional to the numbers in `count`, as nearly as possible
    (largest remainder method).
    """
    share, remainder = total * count // count.sum(), total * count % count.sum()
    share[remainder.argsort(descending=True, stable=True)[: total - int(share.sum())]] += 1
    return share
