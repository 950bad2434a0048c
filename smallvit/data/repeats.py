"""Identical images: found by a hash of their pixels, named in warnings, and kept on one side of a split."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .images import Images
from .notes import note

NAMED = 10  # how many pairs of files a warning lists

Pairs = list[tuple[str, str]]


def same_pixels(images: Images) -> Tensor | None:
    """Return group numbers, one for each image, that are equal for images with exactly the same pixels. Return None if all
    images differ.
    """
    number: dict[bytes, int] = {}
    groups = [number.setdefault(one, len(number)) for one in images.pixel_hashes]
    return torch.tensor(groups) if len(number) < len(images) else None


def warn_of_repeats(name: str, images: Images, sides: Sequence[str] | Tensor | None):
    """Warn about identical images that lie on different sides of a split, and about identical images with different labels.
    Pairs of them are named.

    name    name of the data set
    images  all its images
    sides   the side of each image: the name of its part ("train", "test" or "val"), or the number of its group, which is always
            on one side as a whole; None if the images are not divided
    """
    first: dict[bytes, int] = {}
    across: Pairs = []
    labels: Pairs = []
    for index, one in enumerate(images.pixel_hashes):
        other = first.setdefault(one, index)
        pair = _file(images, other), _file(images, index)
        if images.labels[other] != images.labels[index]:
            labels.append(pair)
        if sides is not None and sides[other] != sides[index]:
            across.append(pair)
    if across:
        by_group = isinstance(sides, Tensor)
        where, advice = ("of another group", "give them one group") if by_group else ("of another part", "remove one of each")
        text = f"images that are identical to an image {where}: {len(across):,}, {_listed(across)}"
        note(f"{name}: {text}; {advice}, or the score may be too high")
    if labels:
        text = f"images that are identical to an image with another label: {len(labels):,}, {_listed(labels)}"
        note(f"{name}: {text}; correct the labels")


def _file(images: Images, index: int) -> str:
    return f"image {index}" if images.files is None else images.files[index]


def _listed(pairs: Pairs) -> str:
    """Return the first pairs of a list as text, and how many more there are."""
    more = f" and {len(pairs) - NAMED:,} more" if len(pairs) > NAMED else ""
    return ", ".join(f"{one} = {other}" for one, other in pairs[:NAMED]) + more
