"""Probes: evaluators that train a simple classifier on the frozen features of a model.

Their options `of`, `layers` and `norm` name the features and are those of `features`.
"""

import math
from collections.abc import Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.data import Images
from smallvit.rng import shuffled

from .cache import cached
from .declare import evaluator
from .hooks import Array, check_place, features
from .metrics import require_metric, score_probe
from .splits import NamedScores, PerImage, Splits, is_whole_number, require_splits

AT_ONCE = 2**23  # similarities in memory at a time: 64 MB
ITERATIONS = 5_000
KS = (1, 5, 20)  # numbers of neighbors
MANY_FEATURES = 1_000  # from which the solver is slow
SHOTS = 16
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)  # the inverse penalties C that `linear_probe` tries


def require_neighbors(
    splits: Splits, *, ks: tuple[int, ...] = KS, metric: str | None = None, of: str = "head", layers: int = 1,
    norm: str = "after",
):  # fmt: skip
    """Raise ValueError unless `knn` can be computed with these options. `splits` holds the images. This is checked before a run
    starts.
    """
    if not isinstance(ks, tuple | list) or not ks or not all(map(is_whole_number, ks)):
        raise ValueError(f"ks is {ks}; expected a tuple of whole numbers from 1 on")
    if min(ks) > len(splits.train):
        raise ValueError(f"knn has {len(splits.train)} labelled images; expected at least as many as the smallest k")
    check_place(of, layers, norm)
    require_metric(metric, splits)


@evaluator(probe=True, needs=require_neighbors)
def knn(
    model: nn.Module,
    splits: Splits,
    *,
    ks: tuple[int, ...] = KS,
    metric: str | None = None,
    of: str = "head",
    layers: int = 1,
    norm: str = "after",
) -> NamedScores:
    """Evaluator (a function that scores a model): classify the test images by their k nearest neighbors among the labelled
    images. Yield the accuracy for each k in the option `ks`. `splits` holds the training, validation and test images.

    The names of the accuracies are `knn_1`, `knn_5` and so on. The options `of`, `layers` and `norm` select the features of the
    model, in which neighbors are searched.

    Nearest means the largest cosine similarity of the features. Each neighbor has one vote; the smaller class index wins a tie.
    Values of k above the number of labelled images are left out. Similarities are computed in float64, because the features of
    an untrained model all point in nearly the same direction. Which of several equally near images are used is not specified.

    With `metric="balanced_accuracy"`, "macro_f1" or "auc", this score is yielded first, under its own name. It is that of the
    first k that is not left out, where the share of the votes is the probability of a class.

    Raises   ValueError for a k that is no whole number from 1 on, if every k is above the number of labelled images, and for an
             unknown metric.
    """
    require_splits(splits)
    require_neighbors(splits, ks=ks, metric=metric, of=of, layers=layers, norm=norm)
    ks = tuple(int(k) for k in ks if k <= len(splits.train))
    train, test = (
        F.normalize(torch.from_numpy(features(model, images, of=of, layers=layers, norm=norm)).double(), dim=1, eps=1e-300)
        for images in (splits.train, splits.test)
    )
    classes = len(splits.train.spec.classes)
    correct: dict[int, list[Tensor]] = {k: [] for k in ks}
    shares: list[Tensor] = []  # of the votes of the first k
    tie_break = torch.linspace(0.5, 0, classes)  # argmax of equal counts is not specified
    rows = max(1, AT_ONCE // max(len(train), max(ks) * classes))
    for queries, labels in zip(test.split(rows), splits.test.labels.split(rows)):
        votes = F.one_hot(splits.train.labels[(queries @ train.T).topk(max(ks)).indices], classes)
        shares.append(votes[:, : ks[0]].double().mean(1) + 1e-9 * tie_break)
        for k in ks:
            correct[k].append((votes[:, :k].sum(1) + tie_break).argmax(-1) == labels)
    if metric is not None:
        yield metric, score_probe(metric, torch.cat(shares), splits)  # their sums are 1 up to 1e-8; a division would part ties
    for k in ks:
        yield f"knn_{k}", PerImage(torch.cat(correct[k]))


def choice_of_probe(strengths: Sequence[float] = STRENGTHS, **others: Any) -> str:
    """Return what `linear_probe` chooses on the validation images, in words. With one value in `strengths` it is nothing."""
    return "C of the linear probe" * (len(strengths) > 1)


def require_strengths(
    splits: Splits, *, strengths: tuple[float, ...] = STRENGTHS, standardize: bool = True, metric: str | None = None,
    of: str = "head", layers: int = 1, norm: str = "after",
):  # fmt: skip
    """Raise ValueError unless `linear_probe` can be computed with these options. `splits` holds the images. This is checked
    before a run starts.
    """
    if not isinstance(strengths, tuple | list) or not strengths or not all(map(is_strength, strengths)):
        raise ValueError(f"strengths is {strengths!r}; expected a tuple of inverse strengths C above 0, such as (1.0,)")
    check_place(of, layers, norm)
    require_metric(metric, splits)


def is_strength(value: Any) -> bool:
    """Return whether a value is an inverse penalty C: a finite number above 0."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < math.inf


@evaluator(probe=True, chooses=choice_of_probe, needs=require_strengths)
def linear_probe(
    model: nn.Module,
    splits: Splits,
    *,
    strengths: tuple[float, ...] = STRENGTHS,
    standardize: bool = True,
    metric: str | None = None,
    of: str = "head",
    layers: int = 1,
    norm: str = "after",
) -> NamedScores:
    """Evaluator (a function that scores a model): train a linear classifier on features of the model, without changing the
    model. Yield the accuracy on the test images. `splits` holds the training, validation and test images.

    The accuracy is named `linear_probe`. The classifier is a logistic regression with L2 penalty. The options `of`, `layers`
    and `norm` select the features.

    strengths    the inverse penalties C to try. The one with the best accuracy on the validation images is used, the smallest
                 of equals. Without validation images C is 1, or the only value in `strengths`. `linear_probe_c` is this C.
                 `linear_probe_edge` is 1 if C is the smallest or largest of several, else 0: a value beyond may then be better.
    standardize  scale each feature to mean 0 and variance 1 over the labelled images. False suits features that already have
                 one scale, such as pixels.

    metric       "balanced_accuracy", "macro_f1" or "auc": this score of the test images is yielded first, under its own name.
                 None: the accuracy alone. C is chosen by the accuracy in both cases.

    `linear_probe_iterations` is the number of iterations that the solver took.

    Raises   RuntimeError if the solver does not converge; ValueError if there are no strengths, for one that is not above 0,
             and for an unknown metric.
    """
    require_splits(splits)
    require_strengths(splits, strengths=strengths, metric=metric, of=of, layers=layers, norm=norm)
    train, test = (features(model, images, of=of, layers=layers, norm=norm) for images in (splits.train, splits.test))

    def fit_probe(inverse_penalty: float):
        """Train a logistic regression on the features of the labelled training images, and return it. The features were
        computed before. `inverse_penalty` is the argument C of scikit-learn: a larger value means less regularization.
        """
        fit = partial(fit_logistic_regression, train, splits.train.labels, inverse_penalty, standardize)
        return cached(fit, "logistic", model, splits.train, of, layers, norm, inverse_penalty, standardize)

    if len(splits.val):
        val = features(model, splits.val, of=of, layers=layers, norm=norm)
        probes = {c: fit_probe(c) for c in sorted(strengths)}
        best = max(probes, key=lambda c: probe_accuracy(probes[c], val, splits.val.labels))
    else:
        best = strengths[0] if len(strengths) == 1 else 1.0
        probes = {best: fit_probe(best)}
    probe, edge = probes[best], len(probes) > 1 and best in (min(probes), max(probes))
    if metric is not None:
        yield metric, score_probe(metric, all_probabilities(probe, test, len(splits.train.spec.classes)), splits)
    yield "linear_probe", probe_accuracy(probe, test, splits.test.labels)
    yield "linear_probe_c", float(best)
    yield "linear_probe_edge", float(edge)
    yield "linear_probe_iterations", float(probe[-1].n_iter_.max())


def require_shots(
    splits: Splits, *, shots: int = SHOTS, draws: int = 5, strength: float = 1.0, of: str = "head", layers: int = 1,
    norm: str = "after",
):  # fmt: skip
    """Raise ValueError unless `few_shot` can be computed with these options: each class needs `shots` labelled images in
    `splits`. This is checked before a run starts.
    """
    if not is_whole_number(shots) or not is_whole_number(draws):
        raise ValueError(f"got shots={shots!r} and draws={draws!r}; expected at least 1 of each, whole numbers")
    if not is_strength(strength):
        raise ValueError(f"strength is {strength!r}; expected an inverse strength C above 0, such as 1.0")
    check_place(of, layers, norm)
    draw_balanced(splits.train, shots, 0)


@evaluator(probe=True, needs=require_shots, pixel_options=("shots", "draws", "strength"))
def few_shot(
    model: nn.Module,
    splits: Splits,
    *,
    shots: int = SHOTS,
    draws: int = 5,
    strength: float = 1.0,
    of: str = "head",
    layers: int = 1,
    norm: str = "after",
) -> NamedScores:
    """Evaluator (a function that scores a model): train a linear classifier on features of only a few labelled images. Yield
    the accuracy on the test images. The option `shots` is the number of images of each class. `splits` holds the training,
    validation and test images.

    The accuracy is named `few_shot`. The classifier is a logistic regression. The options `of`, `layers` and `norm` select the
    features of the model, which is not changed.

    `few_shot` is the mean accuracy over `draws` random choices of these images, and `few_shot_sd` the standard deviation (left
    out for one draw). `strength` is the inverse penalty C; it is fixed, because so few images leave none to choose it on.
    Features are standardized on the drawn images. The draws depend only on the labels of `splits.train`, so every model gets
    the same images; those of fewer shots are among those of more.

    Raises   ValueError if a class has too few labelled images; RuntimeError if the solver does not converge.
    """
    require_splits(splits)
    require_shots(splits, shots=shots, draws=draws, strength=strength, of=of, layers=layers, norm=norm)
    test = features(model, splits.test, of=of, layers=layers, norm=norm)

    def fit_probe(draw: int):
        """Train a logistic regression on a few randomly chosen images of each class, and return it. `draw` is the number of
        this random choice: 0, 1 and so on.
        """
        images = splits.train.take(draw_balanced(splits.train, shots, draw))
        return fit_logistic_regression(features(model, images, of=of, layers=layers, norm=norm), images.labels, strength)

    accuracies = []
    for draw in range(draws):
        probe = cached(partial(fit_probe, draw), "few_shot", model, splits.train, shots, draw, strength, of, layers, norm)
        accuracies.append(probe_accuracy(probe, test, splits.test.labels))
    if draws == 1:
        yield "few_shot", accuracies[0]
        return
    accuracies = torch.tensor(accuracies, dtype=torch.float64)
    yield "few_shot", accuracies.mean().item()
    yield "few_shot_sd", accuracies.std().item()


def draw_balanced(images: Images, shots: int, seed: int) -> Tensor:
    """Return the indices of randomly chosen images, the same number for each class. `shots` is the number of images per class,
    and `seed` is the random seed.

    Raises ValueError if a class has fewer images.
    """
    order = torch.tensor(shuffled(list(range(len(images))), seed, "few_shot"), dtype=torch.int64)
    labels, chosen = images.labels[order], []
    for k, name in enumerate(images.spec.classes):
        of_class = order[labels == k]
        if len(of_class) < shots:
            raise ValueError(f"class {name!r} has {len(of_class)} labelled images; expected at least shots={shots} of each")
        chosen.append(of_class[:shots])
    return torch.cat(chosen)


def fit_logistic_regression(x: Array, labels: Tensor, strength: float, standardize: bool = True) -> Any:
    """Train a logistic regression on the features `x` (images, features) and return it as a scikit-learn pipeline. `strength`
    is the inverse penalty C. If `standardize` is True, each feature is first scaled to mean 0 and variance 1.

    It is fitted in float64 to a tolerance of 1e-5. With scikit-learn's default of 1e-4 the accuracy is up to half a point
    away from that of the minimum. More than `MANY_FEATURES` features of fewer images are first rotated into their principal
    components, all of which are kept. This has the same minimum, because the penalty does not depend on the rotation, and is
    150 times as fast for 240 images with 9,408 pixels. Raises RuntimeError if the solver does not converge.
    """
    import warnings

    from sklearn.decomposition import PCA
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(labels.unique()) < 2:
        raise ValueError("the labelled images are all of one class; a probe tells classes apart, expected at least two")
    before: list[Any] = [StandardScaler()] if standardize else []
    if len(x) < x.shape[1] > MANY_FEATURES:
        before.append(PCA(svd_solver="full"))
    probe = make_pipeline(*before, LogisticRegression(C=strength, tol=1e-5, max_iter=ITERATIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            return probe.fit(x.astype("float64"), labels.numpy())
        except ConvergenceWarning as warning:
            raise RuntimeError(
                f"the probe with C={strength:g} did not converge in {ITERATIONS:,} iterations; try smaller C"
            ) from warning


def all_probabilities(probe: Any, x: Array, classes: int) -> Array:
    """Return the probabilities that the trained scikit-learn classifier `probe` gives to each of `classes` classes, shape
    (images, classes). `x` holds the features (images, features). A class without training images has the probability 0.
    """
    import numpy as np

    found = np.zeros((len(x), classes))
    found[:, probe.classes_] = probe.predict_proba(x.astype("float64"))
    return found


def probe_accuracy(probe: Any, x: Array, labels: Tensor) -> PerImage:
    """Return the accuracy of the trained scikit-learn classifier `probe`, from 0 to 1. `x` holds the features (images,
    features) and `labels` the true classes.
    """
    return PerImage(probe.predict(x.astype("float64")) == labels.numpy())
