"""What an evaluator receives and returns: three sets of labelled images, and named numbers."""

import math
from collections.abc import Iterator, Sized
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

import torch

from smallvit.data import HeldOut, Images

AnyImages = TypeVar("AnyImages", bound=Sized)
NamedScores = Iterator[tuple[str, float]]


class NotFinite(ValueError):
    """Error for a model whose logits or features are not finite, because its training has diverged."""


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
    """A score of the test images with one value for each image, such as an accuracy. It is a float. Its attribute `values`
    holds the values of the images in the order of the test set, and their mean is the score.

    values   a one-dimensional tensor, array or list of booleans or numbers; the attribute is a numpy array. Booleans (or the
             integers 0 and 1) say which images are classified correctly, unless the evaluator declares that lower numbers are
             better. Floats do not say it: give `right`, too.
    score    the exact score; None means the mean of the values. Give it where the score is no plain mean, such as the area
             under a ROC curve. The values are then contributions: how much each image adds to the score, shifted so that their
             mean is the score.
    right    which images are classified correctly, one boolean each, if the values do not say it. The record keeps them, and
             `smallvit report --disagreements` uses them.

    If an evaluator yields such a score first, the record of the run keeps the values: as bits if they say which images are
    right (see `Record.correct`), else as numbers. Then verdicts also take into account that the test images are a random
    sample.

    Raises   ValueError if the values are not one-dimensional or not finite, if there are none, or if their mean is not the
             score.
    """

    values: Any
    right: Any

    def __new__(cls, values: Any, score: float | None = None, right: Any = None) -> "PerImage":
        tensor = torch.as_tensor(values).detach().cpu()
        array = (tensor.double() if tensor.dtype == torch.bfloat16 else tensor).numpy()
        if array.ndim != 1 or not array.size:
            raise ValueError(f"got values of shape {array.shape}; expected one value for each image, shape (images,)")
        mean = float(array.mean(dtype="float64"))
        if not math.isfinite(mean):
            raise ValueError("got values that are NaN or infinite; expected a finite number for each image")
        if score is not None and not abs(mean - score) <= 1e-6 * max(1.0, abs(score)):
            raise ValueError(f"the values have the mean {mean:.6g}, the score is {score:.6g}; expected values with this mean")
        result = super().__new__(cls, mean if score is None else score)
        result.values, result.right = array, right
        return result

    def __getnewargs__(self) -> tuple:
        """Return the arguments from which `copy` and `pickle` create an equal object."""
        return self.values, float(self), self.right


def require_splits(splits: Any):
    """Raise ValueError unless `splits` is a `Splits` object."""
    if not isinstance(splits, Splits):
        raise ValueError(
            f"splits is of the type {type(splits).__name__}; expected three sets of Images: Splits(train, val, test), of which"
            " test is scored"
        )


def refuse_others(images: Any):
    """Raise ValueError for a tensor or anything else in the place of `Images`. `HeldOut` says itself that it is not read."""
    if not isinstance(images, Images | HeldOut):
        given = "tensor" if isinstance(images, torch.Tensor) else type(images).__name__
        raise ValueError(f"got a {given}; expected Images. For the features of a tensor, use FeatureExtractor(model, spec=...)")


def require_images(images: AnyImages) -> AnyImages:
    """Return a set of images unchanged, or raise ValueError if it is empty."""
    if not len(images):
        raise ValueError("there are no images to evaluate; expected at least one")
    return images


def is_whole_number(value: Any, minimum: int = 1) -> bool:
    """Return True if an option is an integer of Python or NumPy of at least `minimum`, else False. True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= minimum
