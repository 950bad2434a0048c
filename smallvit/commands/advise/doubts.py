"""Which labels are probably wrong, an estimate of their number, and the class with the most errors.

All results are computed from predictions for images on which the models were not trained, as in a cross-validation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smallvit.verdicts.statistics import wilson
from smallvit.words import how_many

SHOWN = 20  # largest number of images in the result
MIN_IMAGES = 100  # with fewer predicted images, the number of wrong labels is not estimated
MIN_AGREEMENT = 0.6  # it is not estimated either if the models predict the given class for a smaller share of the images
LARGEST = 0.5  # largest share of wrong labels in the fit
PERMUTATIONS = 2000
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """An image whose label is probably wrong.

    image                    index of the image, from 0
    name                     its name, such as a file name
    given, instead           the name of its class, and of the class that the models predict
    p_given, p_instead       probabilities of the two classes, as means over the models
    models, agreeing         number of models that predicted the image, and how many of them predict the class `instead`
    """

    image: int
    name: str
    given: str
    instead: str
    p_given: float
    p_instead: float
    models: int
    agreeing: int

    @property
    def text(self) -> str:
        """A line for a page: `a/12.png is labelled cat; 5 of 5 models say dog (mean probability 92%; cat: 3%)`."""
        say = f"{self.agreeing} of {self.models} models say {self.instead}"
        means = f"mean probability {self.p_instead:.0%}; {self.given}: {self.p_given:.0%}"
        return f"{self.name} is labelled {self.given}; {say} ({means})"


@dataclass(frozen=True, kw_only=True)
class WrongLabels:
    """How many labels are probably wrong.

    estimate, low, high   the estimated number of wrong labels and its 95% interval; None if it cannot be estimated
    images                the number of images that were predicted
    text                  one or two sentences for the page: the estimate and its assumption, or why there is no estimate
    """

    estimate: float | None
    low: float | None
    high: float | None
    images: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Doubts:
    """The labels that are probably wrong.

    images    the images with the most doubtful labels, the most doubtful first
    doubted   the number of all images for which the models predict another class than the given one
    wrong     the estimated number of wrong labels
    """

    images: tuple[Doubt, ...]
    doubted: int
    wrong: WrongLabels


@dataclass(frozen=True, kw_only=True)
class ClassErrors:
    """The errors of the models for the images of one class.

    name        the class
    images      its number of images
    error       the share of wrong predictions, a mean over its images and the models
    low, high   95% interval of the error, for new images
    """

    name: str
    images: int
    error: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class WeakClass:
    """The class that would profit most from more images, if a class has significantly more errors than the others.

    weakest   the class with the highest error, if it stands out; None: no class stands out
    classes   the errors of all classes, the largest error first
    text      a sentence for the page
    """

    weakest: ClassErrors | None
    classes: tuple[ClassErrors, ...]
    text: str


def doubts(
    predictions: Any,
    labels: Any,
    *,
    classes: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    shown: int = SHOWN,
) -> Doubts:
    """Return which labels are probably wrong, and an estimate of their number.

    A label is doubtful if the mean prediction of the models is another class. The labels are sorted by the mean probability of
    the given class, the smallest first. In tests with planted wrong labels, this order found more of them than four other
    orders, such as the margin between the two classes and the thresholds of confident learning.

    predictions: the class probabilities of images on which the models were not trained, as an array (models, images, classes),
    with NaN where a model did not predict an image
    labels: the given class of each image, as a number from 0
    classes: names of the classes; None: their numbers
    names: names of the images, such as file names; None: their indices
    shown: the largest number of images in the result

    Raises ValueError for predictions that do not fit the labels.

    Paper  Northcutt et al. 2021 (confident learning; self-confidence as the score of a label).
    """
    import numpy as np

    found, given = _checked(predictions, labels, classes)
    class_names, image_names = _names(classes, found.shape[2]), _names(names, len(given))
    if len(image_names) != len(given):
        raise ValueError(f"{len(image_names)} names for {len(given)} images; give one name for each image, in their order")
    seen = np.flatnonzero(~np.isnan(found[..., 0]).all(0))
    mean = np.nanmean(found[:, seen], axis=0)
    said, p_given = mean.argmax(1), mean[np.arange(len(seen)), given[seen]]
    order = [k for k in np.argsort(p_given, kind="stable") if said[k] != given[seen[k]]]
    images = []
    for k in order[:shown]:
        i = int(seen[k])
        votes = found[~np.isnan(found[:, i, 0]), i].argmax(1)
        images.append(
            Doubt(
                image=i,
                name=image_names[i],
                given=class_names[given[i]],
                instead=class_names[said[k]],
                p_given=float(p_given[k]),
                p_instead=float(mean[k, said[k]]),
                models=len(votes),
                agreeing=int((votes == said[k]).sum()),
            )
        )
    return Doubts(images=tuple(images), doubted=len(order), wrong=_wrong_labels(mean, given[seen]))


def weak_class(predictions: Any, labels: Any, *, classes: Sequence[str] | None = None) -> WeakClass:
    """Return the class that would profit most from more images: the class with the highest error, if this is not by chance.

    This is a permutation test. Its null hypothesis is that all classes are equally hard, so that errors do not depend on the
    class. The errors of the images are assigned to the classes at random, 2,000 times. The statistic of a class is its error
    minus the mean error, divided by its standard error. A class stands out if its statistic is larger than the largest
    statistic of any class in 95% of the permutations. So for equally hard classes, one stands out in at most 5 of 100 folders.

    It is likely, but not tested, that more images reduce the errors of this class. Its labels may also be wrong more often.

    predictions, labels, classes: as in `doubts`

    Raises ValueError for predictions that do not fit the labels.
    """
    import numpy as np

    found, given = _checked(predictions, labels, classes)
    class_names = _names(classes, found.shape[2])
    seen = np.flatnonzero(~np.isnan(found[..., 0]).all(0))
    wrong = np.where(np.isnan(found[..., 0]), np.nan, np.nan_to_num(found).argmax(2) != given)
    errors, label = np.nanmean(wrong[:, seen], axis=0), given[seen]
    counts = np.bincount(label, minlength=len(class_names))
    rates = np.bincount(label, errors, minlength=len(class_names)) / np.maximum(counts, 1)

    scale = errors.std() * np.sqrt(np.maximum(0, 1 / np.maximum(counts, 1) - 1 / len(label)))
    usable = (counts > 1) & (scale > 0)
    # the error of an image is a mean over models, which varies less than that of one model: the intervals are rather too wide
    rows = {
        c: ClassErrors(name=class_names[c], images=int(counts[c]), error=float(rates[c]), low=low, high=high)
        for c in sorted(np.flatnonzero(counts), key=lambda c: (-rates[c], c))
        for low, high in [np.clip(wilson(float(rates[c]), int(counts[c])), 0.0, 1.0).tolist()]
    }
    outstanding: list[ClassErrors] = []
    if usable.sum() > 1:
        random, largest = np.random.default_rng(0), []
        for _ in range(PERMUTATIONS):
            dealt = np.bincount(label, random.permutation(errors), minlength=len(class_names))[usable] / counts[usable]
            largest.append(((dealt - errors.mean()) / scale[usable]).max())
        limit = np.quantile(largest, 1 - LEVEL, method="higher")
        outstanding = [rows[c] for c in rows if usable[c] and (rates[c] - errors.mean()) / scale[c] > limit]
    weakest = outstanding[0] if outstanding else None
    if weakest is None:
        text = "No class was shown to be more difficult than the others."
    else:
        interval = f"{weakest.error:.0%} of predictions [{weakest.low:.0%}, {weakest.high:.0%}]"
        text = (
            f"More images of {weakest.name} would probably help most: the models are wrong in {interval} for its "
            f"{weakest.images} images, and in {errors.mean():.0%} for all images."
        )
    return WeakClass(weakest=weakest, classes=tuple(rows.values()), text=text)


def _checked(predictions: Any, labels: Any, classes: Sequence[str] | None) -> tuple[Any, Any]:
    """Return the predictions as an array (models, images, classes) with NaN, and the labels as an array."""
    import numpy as np

    given = np.asarray(labels)
    if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu":
        raise ValueError(f"labels of shape {given.shape} and type {given.dtype}; expected a whole number for each image")
    found = np.asarray(predictions, dtype=float)
    if found.ndim != 3 or found.shape[1] != len(given):
        raise ValueError(f"predictions of shape {found.shape}; expected (models, images, classes), with {len(given)} images")
    if found.shape[2] < 2 or (classes is not None and len(classes) != found.shape[2]):
        expected = "at least 2" if classes is None else f"{len(classes)} as in the names of the classes"
        raise ValueError(f"predictions for {found.shape[2]} classes; expected {expected}")
    if given.min() < 0 or given.max() >= found.shape[2]:
        raise ValueError(f"labels from {given.min()} to {given.max()}; expected numbers from 0 to {found.shape[2] - 1}")
    missing = np.isnan(found)
    if (missing.any(2) != missing.all(2)).any() or missing.all():
        raise ValueError("some probabilities are NaN; expected NaN in all classes of an image that a model did not predict")
    if not np.allclose(found.sum(2)[~missing[..., 0]], 1, atol=1e-3) or np.nanmin(found) < 0:
        raise ValueError("the probabilities of an image do not sum to 1; expected probabilities, not logits")
    return found, given


def _names(names: Sequence[str] | None, count: int) -> list[str]:
    """Return the names, or the numbers from 0 as texts."""
    return [str(i) for i in range(count)] if names is None else [str(name) for name in names]


# The number of wrong labels


def _wrong_labels(mean: Any, given: Any) -> WrongLabels:
    """Return how many labels are probably wrong. `mean` is an array (images, classes) of mean probabilities."""
    images, agreement = len(given), float((mean.argmax(1) == given).mean())
    reason = ""
    if images < MIN_IMAGES:
        reason = f"{how_many(images, 'image is', 'images are')} too few; at least {MIN_IMAGES} are needed"
    elif agreement < MIN_AGREEMENT:
        reason = f"the models say another class than the given one for {1 - agreement:.0%} of the images"
    if reason:
        text = f"How many labels are wrong cannot be estimated: {reason}."
        return WrongLabels(estimate=None, low=None, high=None, images=images, text=text)
    best, low, high = (images * share for share in wrong_share(mean, given))
    assumption = (
        "This assumes that the models make almost no errors on the images for which they are most confident, and that wrong "
        "labels are equally frequent among these images and the others."
    )
    if round(low) >= 1:
        text = f"About {best:.0f} of {images:,} labels are probably wrong [{low:.0f}, {high:.0f}]. {assumption}"
    else:
        text = f"At most {math.ceil(high)} of {images:,} labels are probably wrong, and maybe none. {assumption}"
    return WrongLabels(estimate=best, low=low, high=high, images=images, text=text)


def wrong_share(mean: Any, given: Any) -> tuple[float, float, float]:
    """Return the share of wrong labels as a tuple: the estimate and the ends of its 95% interval.

    The more confident the models are, the fewer errors they make. So with growing confidence, the share of images for which
    they predict another class than the given one falls, but not below the share of wrong labels. A logistic curve with such a
    lower limit is fitted by maximum likelihood (in psychophysics, this limit is the lapse rate). The interval is a profile
    likelihood interval: it contains all shares whose log likelihood is at most 1.92 below the maximum.

    mean: array (images, classes) of probabilities for images on which the models were not trained
    given: the given class of each image
    """
    import numpy as np
    from scipy.interpolate import make_interp_spline
    from scipy.optimize import minimize
    from scipy.special import expit, logit
    from scipy.stats import chi2

    differs, others = mean.argmax(1) != given, mean.shape[1] - 1
    certainty = logit(np.clip(mean.max(1), 1e-6, 1 - 1e-6))
    certainty = (certainty - certainty.mean()) / max(1e-9, certainty.std())

    def loss(parameters: Any, share: float) -> float:
        """Return the negative log likelihood. A normal prior of the log slope, around a slope of 2, keeps the slope finite."""
        errors = expit(parameters[0] - math.exp(min(parameters[1], 50)) * certainty) * others / (others + 1)
        p = np.clip(errors + share - share * errors * (1 + 1 / others), 1e-9, 1 - 1e-9)
        return -float(np.log(np.where(differs, p, 1 - p)).sum()) + 0.5 * (parameters[1] - math.log(2)) ** 2

    def profile(share: float) -> float:
        return min(minimize(loss, start, args=(share,)).fun for start in ((-1.0, 0.0), (-2.0, 1.0)))

    tried = np.array([0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.07, 0.09, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, LARGEST])
    shares = np.linspace(0, LARGEST, 1001)
    losses = make_interp_spline(tried, [profile(share) for share in tried], k=2)(shares)  # so that the minimum is no node
    inside = shares[losses - losses.min() < chi2.isf(LEVEL, 1) / 2]
    return float(shares[losses.argmin()]), float(inside.min()), float(inside.max())
