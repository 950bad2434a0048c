"""What an evaluator is given: labelled images to learn from, to choose on, and to score."""

from collections.abc import Iterator
from typing import NamedTuple

from smallvit.data import Images

Named = Iterator[tuple[str, float]]


class Splits(NamedTuple):
    """The labelled images an evaluator may learn from, those it may choose on (may be empty), and those it scores."""

    train: Images
    val: Images
    test: Images


def some(images: Images) -> Images:
    """The images, of which there is at least one."""
    if not len(images):
        raise ValueError("there are no images to evaluate; expected at least one")
    return images
