"""What an evaluator receives and returns: three sets of labelled images, and named numbers."""

from collections.abc import Iterator, Sized
from typing import NamedTuple, TypeVar

from smallvit.data import Images

AnyImages = TypeVar("AnyImages", bound=Sized)
NamedScores = Iterator[tuple[str, float]]


class Splits(NamedTuple):
    """Labelled images for an evaluator: `train` to fit a classifier, `val` to choose its options, `test` to compute scores.

    `val` may be empty. `fit` evaluates twice: first with the validation images as `test`, then once with the
    test images.
    """

    train: Images
    val: Images
    test: Images


def require_images(images: AnyImages) -> AnyImages:
    """Return the images unchanged. Raises ValueError if the set of images is empty."""
    if not len(images):
        raise ValueError("there are no images to evaluate; expected at least one")
    return images
