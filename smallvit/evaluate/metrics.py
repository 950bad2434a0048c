"""Evaluators with the metrics that papers report: balanced accuracy, macro F1, AUC, log loss and calibration error.

Each metric is computed by scikit-learn where it has it. All share one forward pass with `accuracy`. Each yields its score
first, so it can judge a run, and each has one value for each test image, so that verdicts can speak of new images.

Shapes: n images, k classes; probabilities are (n, k) in float64, labels are (n).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from smallvit.data import Images

from .declare import evaluator
from .scores import predictions
from .splits import NamedScores, PerImage, Splits, is_whole_number, require_images, require_splits

if TYPE_CHECKING:
    import numpy as np

BINS = 15  # bins of confidence in a calibration error and a reliability diagram


def arrays(model: nn.Module, images: Images) -> "tuple[np.ndarray, np.ndarray]":
    """Return the class probabilities that a model gives to `images`, shape (n, k), and their labels, shape (n), as two numpy
    arrays.
    """
    return predictions(model, images).numpy(), images.labels.numpy()


def require_every_class(splits: Splits, **options):
    """Raise ValueError if a class has no image among `splits.test`, because a mean over classes is not defined then. An empty
    set of images is allowed: without validation images, nothing is scored on them. Other `options` of an evaluator are ignored.

    Before training, this is called with the validation images and with the test images (without their pixels) as `test`.
    """
    images = splits.test
    if len(images.spec.classes) == 1:
        raise ValueError(f"there is one class, {images.spec.classes[0]!r}; expected at least two, which a score can compare")
    counts = images.labels.bincount(minlength=len(images.spec.classes)).tolist()
    missing = [name for name, count in zip(images.spec.classes, counts) if not count] if len(images) else []
    if missing:
        more = f" and {len(missing) - 1} more classes" * (len(missing) > 1)
        raise ValueError(
            f"class {missing[0]!r}{more} has no image among the {len(images):,} images to score, so a mean over the classes is"
            " not defined; expected an image of each class in the validation and test images: set a larger val (or val=0), use"
            " a test part with every class, or judge by accuracy or log_loss"
        )


@evaluator(head=True, needs=require_every_class)
def balanced_accuracy(model: nn.Module, splits: Splits) -> NamedScores:
    """Evaluator (a function that scores a model): yield the balanced accuracy of the model on the test images: the accuracy of
    each class, averaged over the classes. Each class counts the same, however many images it has. `splits` holds the images.

    The number is named `balanced_accuracy`. It equals `sklearn.metrics.balanced_accuracy_score`. The values of the images are
    those of the jackknife, as in `macro_f1`. Where a class has a single test image, its accuracy without this image counts as
    0.5.

    Raises   ValueError if a class has no image among the test images, and the errors of `accuracy`.
    """
    yield "balanced_accuracy", balanced_accuracy_of(*scored(model, splits))


def balanced_accuracy_of(found: "np.ndarray", labels: "np.ndarray") -> PerImage:
    """Return the balanced accuracy of class probabilities `found` (n, k) for images with the given `labels` (n). Each class has
    an image.
    """
    import numpy as np
    from sklearn.metrics import balanced_accuracy_score

    predicted, counts = found.argmax(1), np.bincount(labels)
    right, score = predicted == labels, float(balanced_accuracy_score(labels, predicted))
    hits = np.bincount(labels, weights=right)
    others = np.divide((hits[labels] - right), counts[labels] - 1, out=np.full(len(labels), 0.5), where=counts[labels] > 1)
    without = score + (others - (hits / counts)[labels]) / len(counts)
    return PerImage(jackknife(score, without), score, right)


@evaluator(head=True, needs=require_every_class)
def macro_f1(model: nn.Module, splits: Splits) -> NamedScores:
    """Evaluator (a function that scores a model): yield the macro F1 score of the model on the test images: the F1 score of
    each class (harmonic mean of precision and recall), averaged over the classes. `splits` holds the images.

    The number is named `macro_f1`. It equals `sklearn.metrics.f1_score(average="macro", zero_division=0)`. Each image
    also gets a value, so that verdicts can speak of new images. It is the jackknife value: n times the score minus (n - 1)
    times the score without the image, shifted so that the mean of all values is the score.

    Raises   ValueError if a class has no image among the test images, and the errors of `accuracy`.
    """
    yield "macro_f1", macro_f1_of(*scored(model, splits))


def macro_f1_of(found: "np.ndarray", labels: "np.ndarray") -> PerImage:
    """Return the macro F1 score of class probabilities `found` (n, k) for images with the given `labels` (n)."""
    import numpy as np
    from sklearn.metrics import f1_score

    predicted, k = found.argmax(1), found.shape[1]
    score = f1_score(labels, predicted, labels=np.arange(k), average="macro", zero_division=0)  # pyright: ignore
    return PerImage(jackknife(float(score), macro_f1_without(labels, predicted, k)), float(score))


@evaluator(head=True, needs=require_every_class)
def auc(model: nn.Module, splits: Splits) -> NamedScores:
    """Evaluator (a function that scores a model): yield the area under the ROC curve of the model on the test images. For two
    classes, it is the probability that an image of the second class gets a higher probability of this class than an image of
    the first one. For more classes, it is the mean of the areas of each class against all others. `splits` holds the images.

    The number is named `auc`. It equals `sklearn.metrics.roc_auc_score` (`multi_class="ovr"`, `average="macro"`) and the AUC of
    MedMNIST's evaluator. The values of the images are those of the jackknife, as in `macro_f1`. Where a class has a single test
    image, its area without this image counts as 0.5.

    Raises   ValueError if a class has no image among the test images, and the errors of `accuracy`.
    """
    yield "auc", auc_of(*scored(model, splits))


def auc_of(found: "np.ndarray", labels: "np.ndarray") -> PerImage:
    """Return the area under the ROC curve of class probabilities `found` (n, k) for images with the given `labels` (n). Each
    class has an image.
    """
    from sklearn.metrics import roc_auc_score

    two = found.shape[1] == 2
    score = roc_auc_score(labels, found[:, 1]) if two else roc_auc_score(labels, found, multi_class="ovr", average="macro")
    return PerImage(jackknife(float(score), auc_without(labels, found)), float(score))


@evaluator(head=True, lower_is_better=True)
def log_loss(model: nn.Module, splits: Splits) -> NamedScores:
    """Evaluator (a function that scores a model): yield the mean of -log(probability of the true class) over the test images,
    in nats. A smaller number is better. It is 0 for a model that is certain and right, and log(k) for one that gives each of k
    classes the same probability. `splits` holds the images.

    The number is named `log_loss`. It equals `sklearn.metrics.log_loss`, which bounds probabilities from below by 2.2e-16. The
    value of an image is its own loss.

    Raises   the errors of `accuracy`.
    """
    import numpy as np

    require_splits(splits)
    found, labels = arrays(model, require_images(splits.test))
    each = found[np.arange(len(labels)), labels]
    yield "log_loss", PerImage(-np.log(np.clip(each, np.finfo(found.dtype).eps, None)))


def require_bins(splits: Splits, *, bins: int = BINS):
    """Raise ValueError unless `bins`, the option of `calibration`, is a number of bins. `splits` is not used."""
    if not is_whole_number(bins):
        raise ValueError(f"bins is {bins!r}; expected a whole number of at least 1")


@evaluator(head=True, lower_is_better=True, needs=require_bins)
def calibration(model: nn.Module, splits: Splits, *, bins: int = BINS) -> NamedScores:
    """Evaluator (a function that scores a model): yield the expected calibration error (ECE) of the model on the test images.
    The images are sorted into `bins` bins of equal width by confidence, the probability of the predicted class. The ECE is the
    mean over images of the gap between accuracy and mean confidence of their bin. `splits` holds the images.

    The number is named `ece`, and a smaller one is better. A model is calibrated if images with a confidence of 80% are
    classified correctly in 80% of cases. The value of an image is (1 if correct, else 0) minus its confidence, times -1 if
    this difference, averaged over the images of its bin, is negative. The mean of these values is the ECE. The ECE of few
    images is too large: chance alone makes gaps.

    Paper    Guo et al., arXiv:1706.04599, section 2.
    Raises   ValueError for `bins` below 1, and the errors of `accuracy`.
    """
    import numpy as np

    require_splits(splits)
    require_bins(splits, bins=bins)
    found, labels = arrays(model, require_images(splits.test))
    gaps, place = (found.argmax(1) == labels) - found.max(1), bin_of(found.max(1), bins)
    values = np.sign(np.bincount(place, gaps, bins))[place] * gaps
    yield "ece", PerImage(values, float(np.abs(np.bincount(place, gaps, bins)).sum() / len(labels)))


METRICS = (balanced_accuracy, macro_f1, auc, log_loss, calibration)
# metrics by which a probe can also be judged: name -> a function of class probabilities and labels
OF_PROBES = {"balanced_accuracy": balanced_accuracy_of, "macro_f1": macro_f1_of, "auc": auc_of}


def probe_metric(evaluator: Callable) -> str | None:
    """Return the option `metric` with which a probe has the same score as `evaluator`, such as "auc". It is None for an
    accuracy and for a score that probes do not have.
    """
    return evaluator.__name__ if evaluator in METRICS and evaluator.__name__ in OF_PROBES else None


def require_metric(metric: str | None, splits: Splits):
    """Raise ValueError for an unknown `metric` of a probe, and if a class has no image among the test images in `splits`. None
    needs nothing.
    """
    if metric is None:
        return
    if metric not in [*OF_PROBES]:
        raise ValueError(f"metric is {metric!r}; expected one of {', '.join(map(repr, OF_PROBES))}, or None for the accuracy")
    require_every_class(splits)


def score_probe(metric: str, probabilities: Any, splits: Splits) -> PerImage:
    """Return the score of a probe, a classifier on frozen features. `metric` is the name of the score, `probabilities` (n, k)
    are those of the probe for the test images, and `splits` holds the images.

    Raises   ValueError for an unknown metric, and if a class has no test image.
    """
    import numpy as np

    require_metric(metric, splits)
    return OF_PROBES[metric](np.asarray(probabilities, dtype="float64"), splits.test.labels.numpy())


def confusion(model: nn.Module, images: Images) -> list[list[int]]:
    """Return the confusion matrix of a model on `images` as nested lists of k x k counts. Rows are true classes, and columns
    are predicted classes.
    """
    import numpy as np
    from sklearn.metrics import confusion_matrix

    found, labels = arrays(model, require_images(images))
    return confusion_matrix(labels, found.argmax(1), labels=np.arange(found.shape[1])).tolist()


def reliability(model: nn.Module, images: Images, bins: int = BINS) -> list[list[float]]:
    """Return the data of a reliability diagram as a list: [number of images, mean confidence, accuracy] for each of `bins` bins
    of equal width, where the confidence is the probability that the model gives to its predicted class. An empty bin is
    [0, 0, 0].
    """
    import numpy as np

    found, labels = arrays(model, require_images(images))
    confidence, place = found.max(1), bin_of(found.max(1), bins)
    counts = np.bincount(place, minlength=bins)
    sums = [np.bincount(place, weights, bins) for weights in (confidence, found.argmax(1) == labels)]
    return [[int(n), *(float(s / n) if n else 0.0 for s in pair)] for n, pair in zip(counts, zip(*sums))]


def scored(model: nn.Module, splits: Splits) -> "tuple[np.ndarray, np.ndarray]":
    """Return the class probabilities that a model gives to the test images, shape (n, k), and their labels, shape (n), as two
    numpy arrays. Raise ValueError if there are no test images or if a class has none.
    """
    require_splits(splits)
    require_images(splits.test)
    require_every_class(splits)
    return arrays(model, splits.test)


def bin_of(confidence: "np.ndarray", bins: int) -> "np.ndarray":
    """Return the number of the bin of each image. `confidence` (n) is between 0 and 1, and the `bins` bins have equal width. A
    value on the line between two bins belongs to the lower one.
    """
    import numpy as np

    return np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)


def jackknife(score: float, without: "np.ndarray") -> "np.ndarray":
    """Return the jackknife value of each image, shifted so that the mean of the values is `score`. The array `without` (n)
    holds the score of all images but one, for each image that is left out.
    """
    values = -(len(without) - 1) * without
    return values - values.mean() + score


def macro_f1_without(labels: "np.ndarray", predicted: "np.ndarray", k: int) -> "np.ndarray":
    """Return the macro F1 score of all images but one, for each image that is left out, as an array (n). `labels` and
    `predicted` are the true and the predicted classes (n), numbers below `k`.

    The score without an image depends only on its true and its predicted class, so k x k scores are computed. The F1 score of a
    class that is neither a label nor predicted is 0.
    """
    import numpy as np

    def ratio(right: "np.ndarray", total: "np.ndarray") -> "np.ndarray":
        return np.divide(2 * right, total, out=np.zeros(len(total)), where=total > 0)

    right = np.bincount(labels[labels == predicted], minlength=k).astype(float)
    total = (np.bincount(labels, minlength=k) + np.bincount(predicted, minlength=k)).astype(float)
    f1 = ratio(right, total)
    wrong = ratio(right, total - 1) - f1  # change of a class if an image that is wrongly of it, or wrongly not, is left out
    change = wrong[:, None] + wrong[None, :]
    np.fill_diagonal(change, ratio(right - 1, total - 2) - f1)
    return ((f1.sum() + change) / k)[labels, predicted]


def auc_without(labels: "np.ndarray", found: "np.ndarray") -> "np.ndarray":
    """Return the area under the ROC curve of all images but one, for each image that is left out, as an array (n). `labels` (n)
    are the true classes and `found` (n, k) the probabilities. It is the mean over the classes, or the area of the second class
    if there are two.

    The area of a class counts pairs of an image of the class and another one. Leaving out an image removes its pairs.
    """
    import numpy as np

    k, areas = found.shape[1], []
    for c in range(k) if k > 2 else (1,):
        of_class, scores = labels == c, found[:, c]
        inside, outside = np.sort(scores[of_class]), np.sort(scores[~of_class])
        pairs = np.empty(len(labels))  # pairs of each image in the right order; equal scores count one half
        pairs[of_class] = count_below(outside, scores[of_class])
        pairs[~of_class] = len(inside) - count_below(inside, scores[~of_class])
        m, q = len(inside) - of_class, len(outside) - ~of_class
        left = pairs[of_class].sum() - pairs
        areas.append(np.divide(left, m * q, out=np.full(len(labels), 0.5), where=m * q > 0))
    return np.mean(areas, axis=0)


def count_below(ordered: "np.ndarray", values: "np.ndarray") -> "np.ndarray":
    """Return how many numbers of the sorted array `ordered` are below each of `values`. Equal ones count one half."""
    import numpy as np

    return (np.searchsorted(ordered, values, "left") + np.searchsorted(ordered, values, "right")) / 2
