"""What an evaluator receives and returns: three sets of labelled images, and named numbers."""

from collections.abc import Iterator, Sized
from typing import NamedTuple, TypeVar

from smallvit.data import Images

AnyImages = TypeVar("AnyImages", bound=Sized)
NamedScores = Iterator[tuple[str, float]]


class Splits(NamedTuple):
    """The three sets of labelled images that an evaluator (a function that scores a model) receives: `train` to train a
    classifier, `val` to choose its options, and `test` to compute scores.

    `val` may be empty. `fit` evaluates twice: first with the validation images as `test`, then once with the
    test images.
    """

    train: Images
    val: Images
    test: Images


def require_images(images: AnyImages) -> AnyImages:
    """Return a set of images unchanged, or raise ValueError if it is empty."""
    if not len(images):
        raise ValueError("there are no images to evaluate; expected at least one")
    return images
