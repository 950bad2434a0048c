"""Probes: how well simple classifiers do on the features of a frozen model.

They read features by name: `of`, `layers` and `norm` are those of `features`.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.data import Images
from smallvit.rng import shuffled

from .declare import evaluator
from .hooks import features
from .memory import once
from .splits import Named, Splits

AT_ONCE = 2**23  # similarities in memory at a time: 64 MB
ITERATIONS = 5_000
SHOTS = 16  # labelled images of each class


@evaluator(probe=True)
def knn(
    model: nn.Module,
    splits: Splits,
    *,
    ks: tuple[int, ...] = (1, 5, 20),
    of: str = "head",
    layers: int = 1,
    norm: str = "after",
) -> Named:
    """`knn_1`, ...: k nearest labelled images by cosine of the features, one vote each; ties go to the smaller class index.

    A k beyond the number of labelled images is left out. Similarities are computed in float64: the features of an untrained
    model all point nearly the same way. Of equally near images, any may be among the k.
    """
    if not isinstance(ks, tuple | list) or min(ks, default=0) < 1:
        raise ValueError(f"ks is {ks}; expected a tuple of whole numbers from 1 on")
    ks = tuple(k for k in ks if k <= len(splits.train))
    if not ks:
        raise ValueError(f"knn has {len(splits.train)} labelled images; expected at least as many as the smallest k")
    known, asked = (
        F.normalize(torch.from_numpy(features(model, images, of=of, layers=layers, norm=norm)).double(), dim=1)
        for images in (splits.train, splits.test)
    )
    classes, right = len(splits.train.spec.classes), dict.fromkeys(ks, 0)
    slope = torch.linspace(0.5, 0, classes)  # argmax of equal counts is not specified; this settles it
    many = max(1, AT_ONCE // max(len(known), max(ks) * classes))
    for part, labels in zip(asked.split(many), splits.test.labels.split(many)):
        votes = F.one_hot(splits.train.labels[(part @ known.T).topk(max(ks)).indices], classes)
        for k in ks:
            right[k] += ((votes[:, :k].sum(1) + slope).argmax(-1) == labels).sum().item()
    for k in ks:
        yield f"knn_{k}", right[k] / len(asked)


@evaluator(probe=True, chooses="C of the linear probe")
def linear_probe(
    model: nn.Module,
    splits: Splits,
    *,
    strengths: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0, 10.0),
    standardise: bool = True,
    of: str = "head",
    layers: int = 1,
    norm: str = "after",
) -> Named:
    """`linear_probe`: accuracy of an L2 logistic regression on the frozen features; `linear_probe_c`: its inverse strength C.

    Features are standardised on the labelled images alone; `standardise=False` keeps them as they are, which suits features of
    one scale, such as pixels. C is the one of `strengths` that scores best on the validation images, the smaller of equals;
    without validation images it is 1. `linear_probe_edge` is 1 if the C chosen is the smallest or largest of several, so that
    one beyond may be better, else 0. `linear_probe_iterations`: how many the solver took at that C.

    Raises   RuntimeError if the solver does not converge: such a number is not the probe's. ValueError for no strengths.
    """
    if not isinstance(strengths, tuple | list) or not strengths:
        raise ValueError(f"strengths is {strengths!r}; expected a tuple of at least one inverse strength C, such as (1.0,)")
    train, test = (features(model, images, of=of, layers=layers, norm=norm) for images in (splits.train, splits.test))
    chosen, edge = 1.0, False

    def fitted(c: float):
        fit = partial(logistic, train, splits.train.labels, c, standardise)
        return once(fit, "logistic", model, splits.train, of, layers, norm, c, standardise)

    if len(splits.val):
        val = features(model, splits.val, of=of, layers=layers, norm=norm)
        probes = {c: fitted(c) for c in sorted(strengths)}
        chosen = max(probes, key=lambda c: score(probes[c], val, splits.val.labels))
        edge = len(probes) > 1 and chosen in (min(probes), max(probes))
        probe = probes[chosen]
    else:
        probe = fitted(chosen)
    yield "linear_probe", score(probe, test, splits.test.labels)
    yield "linear_probe_c", chosen
    yield "linear_probe_edge", float(edge)
    yield "linear_probe_iterations", float(probe[-1].n_iter_.max())


def enough(splits: Splits, *, shots: int = SHOTS, **others):
    """Raise ValueError if a class has too few labelled images."""
    balanced(splits.train, shots, 0)


@evaluator(probe=True, needs=enough, pixel_options=("shots", "draws", "strength"))
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
) -> Named:
    """`few_shot`: accuracy of an L2 logistic regression that sees `shots` labelled images of each class; mean over `draws`.

    `few_shot_sd`: standard deviation over the draws, where there are several. Features are standardised on the images drawn
    alone. `strength` is the inverse strength C, fixed, since so few images leave none to choose it on. Which images are drawn
    depends on the labels of `splits.train` alone, so every model gets the same; those of fewer shots are among those of more.

    Raises   ValueError if a class has too few labelled images; RuntimeError if the solver does not converge.
    """
    if shots < 1 or draws < 1:
        raise ValueError(f"got shots={shots} and draws={draws}; expected at least 1 of each")
    test = features(model, splits.test, of=of, layers=layers, norm=norm)

    def fitted(draw: int):
        drawn = splits.train.take(balanced(splits.train, shots, draw))
        return logistic(features(model, drawn, of=of, layers=layers, norm=norm), drawn.labels, strength)

    scores = []
    for draw in range(draws):
        probe = once(partial(fitted, draw), "few_shot", model, splits.train, shots, draw, strength, of, layers, norm)
        scores.append(score(probe, test, splits.test.labels))
    found = torch.tensor(scores, dtype=torch.float64)
    yield "few_shot", found.mean().item()
    if draws > 1:
        yield "few_shot_sd", found.std().item()


def balanced(images: Images, shots: int, draw: int) -> Tensor:
    """The places of `shots` images of each class, fixed by the number of the draw."""
    place = torch.tensor(shuffled(range(len(images)), draw, "few_shot"), dtype=torch.int64)
    label, found = images.labels[place], []
    for k, name in enumerate(images.spec.classes):
        mine = place[label == k]
        if len(mine) < shots:
            raise ValueError(f"class {name!r} has {len(mine)} labelled images; expected at least shots={shots} of each class")
        found.append(mine[:shots])
    return torch.cat(found)


def logistic(x: "numpy.ndarray", labels: Tensor, strength: float, standardise: bool = True):  # noqa: F821
    """A fitted L2 logistic regression of scikit-learn, in a pipeline behind a scaler.

    In float64 and to a tolerance of 1e-5: scikit-learn's 1e-4 stops up to half a point from the minimum's accuracy.
    """
    import warnings

    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scale = [StandardScaler()] if standardise else []
    probe = make_pipeline(*scale, LogisticRegression(C=strength, tol=1e-5, max_iter=ITERATIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        try:
            return probe.fit(x.astype("float64"), labels.numpy())
        except ConvergenceWarning as warning:
            raise RuntimeError(
                f"the probe with C={strength:g} did not converge in {ITERATIONS:,} iterations; try smaller C"
            ) from warning


def score(probe, x: "numpy.ndarray", labels: Tensor) -> float:  # noqa: F821
    return float((probe.predict(x.astype("float64")) == labels.numpy()).mean())
