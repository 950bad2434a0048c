"""What an evaluator receives and returns: three sets of labelled images, and named numbers."""

from collections.abc import Iterator, Sized
from typing import Any, NamedTuple, TypeVar

import torch

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


class PerImage(float):
    """A score that is the mean of one value for each test image, such as an accuracy. It is a float, and its attribute `values`
    holds the values of the images in the order of the test set.

    `values` is a one-dimensional tensor, array or list of booleans or numbers; the attribute is a numpy array. If an evaluator
    yields such a score first and its values are 0 or 1, the record of the run keeps them (see `Record.correct`). Then verdicts
    also take into account that the test images are a random sample.

    Raises   ValueError if the values are not one-dimensional or if there are none.
    """

    values: Any

    def __new__(cls, values: Any) -> "PerImage":
        array = torch.as_tensor(values).detach().cpu().numpy()
        if array.ndim != 1 or not array.size:
            raise ValueError(f"got values of shape {array.shape}; expected one value for each image, shape (images,)")
        score = super().__new__(cls, array.mean(dtype="float64"))
        score.values = array
        return score

    def __getnewargs__(self) -> tuple:
        """Return the argument from which `copy` and `pickle` create an equal object."""
        return (self.values,)


def require_images(images: AnyImages) -> AnyImages:
    """Return a set of images unchanged, or raise ValueError if it is empty."""
    if not len(images):
        raise ValueError("there are no images to evaluate; expected at least one")
    return images
