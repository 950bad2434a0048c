"""Metrics: equal to scikit-learn and to MedMNIST's evaluator, with the right value for each image, in every order of a run."""

import math
import re
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from sklearn.utils.class_weight import compute_class_weight
from torch import nn
from toys import TINY_VIT, slow_but

from smallvit import Pixels, Run, Supervised, ablate, digits, fingerprint, fit
from smallvit.components import function
from smallvit.data import Dataset, DataSpec, HeldOut, Images
from smallvit.evaluate import (
    PerImage,
    Splits,
    accuracy,
    auc,
    balanced_accuracy,
    cached_features,
    calibration,
    confusion,
    declaration,
    knn,
    linear_probe,
    log_loss,
    macro_f1,
    predictions,
    reliability,
)
from smallvit.train.loop import Training

METRICS = (balanced_accuracy, macro_f1, auc, log_loss, calibration)
all_metrics = pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.__name__)


class Table(nn.Module):
    """A model that looks up the logits of an image in a table; the first two pixels are the number of the row."""

    def __init__(self, logits):
        super().__init__()
        self.logits, self.passes = nn.Parameter(torch.as_tensor(logits, dtype=torch.float32)), 0

    def forward(self, x):
        self.passes += 1
        pixels = (255 * x[:, 0, 0]).round().long()
        return self.logits[256 * pixels[:, 0] + pixels[:, 1]]


def case(k=4, n=60, seed=0, confident=1.5, weights=None) -> tuple[Table, Splits]:
    """A model with random logits and n images of k unequal classes, each with at least one image, as (model, splits)."""
    random = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(k), random.choice(k, n - k, p=weights)])
    logits = random.normal(size=(n, k)).round(1 if n < 200 else 3) + confident * np.eye(k)[labels]  # round: some are equal
    images = torch.zeros(n, 1, 2, 2, dtype=torch.uint8)
    images[:, 0, 0] = torch.stack([torch.arange(n) // 256, torch.arange(n) % 256], 1).to(torch.uint8)
    spec = DataSpec(name="table", channels=1, size=(2, 2), classes=tuple("abcdefgh"[:k]), mean=(0.0,), std=(1.0,))
    test = Images(images, torch.as_tensor(labels), spec)
    return Table(logits), Splits(test.take(slice(0)), test.take(slice(0)), test)


CASES = {
    "four classes": {},
    "two classes": {"k": 2},
    "rare class": {"weights": (0.02, 0.02, 0.06, 0.9)},
    "one image of a class": {"weights": (0.0, 0.3, 0.3, 0.4)},
    "at chance": {"confident": 0.0},
    "certain": {"confident": 9.0},
    "many": {"n": 3000, "k": 7},
}
every_case = pytest.mark.parametrize("options", CASES.values(), ids=CASES)


def first(metric, model, splits) -> PerImage:
    return next(iter(metric(model, splits)))[1]


def known(model, splits) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p = torch.softmax(model.logits.detach().double(), -1).numpy()
    return splits.test.labels.numpy(), p, p.argmax(1)


def expected(name, y, p, guess):
    """The score by scikit-learn."""
    if name == "auc":
        return sk.roc_auc_score(y, p[:, 1]) if p.shape[1] == 2 else sk.roc_auc_score(y, p, multi_class="ovr")
    classes = np.arange(p.shape[1])
    return {
        "balanced_accuracy": lambda: sk.balanced_accuracy_score(y, guess),
        "macro_f1": lambda: sk.f1_score(y, guess, labels=classes, average="macro", zero_division=0),
        "log_loss": lambda: sk.log_loss(y, p, labels=classes),
    }[name]()


# Scores


@every_case
def test_scores_are_those_of_scikit_learn(options):
    model, splits = case(**options)
    for metric in METRICS[:-1]:
        name, score = next(iter(metric(model, splits)))
        assert name == metric.__name__ and score == pytest.approx(expected(name, *known(model, splits)), abs=1e-12)


@every_case
def test_auc_and_accuracy_are_those_of_medmnist(options):
    """Its evaluator: multi-class, the mean over classes of the area of one class against the rest, and the accuracy of the
    largest score; binary, the area and the accuracy (above one half) of the last column.
    """
    model, splits = case(**options)
    y, p, guess = known(model, splits)
    if p.shape[1] == 2:
        area, right = sk.roc_auc_score(y, p[:, -1]), sk.accuracy_score(y, p[:, -1] > 0.5)
    else:
        area = np.mean([sk.roc_auc_score((y == c).astype(float), p[:, c]) for c in range(p.shape[1])])
        right = sk.accuracy_score(y, guess)
    assert first(auc, model, splits) == pytest.approx(area, abs=1e-12)
    assert first(accuracy, model, splits) == pytest.approx(right, abs=1e-12)


@every_case
@pytest.mark.parametrize("bins", [1, 10, 15])
def test_the_calibration_error_is_the_mean_gap_of_the_bins(options, bins):
    model, splits = case(**options)
    y, p, guess = known(model, splits)
    confidence, right, total = p.max(1), guess == y, 0.0
    for b in range(bins):
        inside = (confidence > b / bins) & (confidence <= (b + 1) / bins)
        total += abs(right[inside].mean() - confidence[inside].mean()) * inside.mean() if inside.any() else 0.0
    (name, score), *rest = calibration(model, splits, bins=bins)
    assert name == "ece" and not rest and score == pytest.approx(total, abs=1e-12)


def test_the_diagram_and_the_matrix_count_every_image():
    model, splits = case()
    y, _, guess = known(model, splits)
    assert confusion(model, splits.test) == sk.confusion_matrix(y, guess).tolist()
    rows = reliability(model, splits.test)
    assert len(rows) == 15 and sum(n for n, *_ in rows) == 60
    assert sum(n * right for n, _, right in rows) == pytest.approx((guess == y).sum())
    assert sum(n * abs(right - sure) for n, sure, right in rows) / 60 == pytest.approx(first(calibration, model, splits))
    assert all(row == [0, 0.0, 0.0] or (b / 15 < row[1] <= (b + 1) / 15) for b, row in enumerate(rows))


def test_two_of_fifteen_bins_by_hand():
    logits = torch.log(torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7], [0.3, 0.7]]))
    model, splits = case(k=2, n=4)
    model.logits = nn.Parameter(logits)
    images = Images(splits.test.images, torch.tensor([0, 1, 1, 1]), splits.test.spec)
    score = first(calibration, model, splits._replace(test=images))
    assert score == pytest.approx((2 * 0.4 + 2 * 0.3) / 4) and score.values == pytest.approx([-0.1, 0.9, 0.3, 0.3])


# One value for each image


@every_case
@all_metrics
def test_the_values_of_the_images_have_the_score_as_their_mean(options, metric):
    model, splits = case(**options)
    score = first(metric, model, splits)
    assert isinstance(score, PerImage) and score.values.shape == (len(splits.test),)
    assert score.values.mean() == pytest.approx(float(score), abs=1e-9)


@pytest.mark.parametrize("name", slow_but(("rare class",), ["four classes", "two classes", "rare class", "at chance", "certain"]))
@pytest.mark.parametrize("metric", [balanced_accuracy, macro_f1, auc], ids=lambda metric: metric.__name__)
def test_values_are_those_of_leaving_out_each_image(name, metric):
    model, splits = case(**CASES[name])
    y, p, guess = known(model, splits)
    n = len(y)
    without = []
    for i in range(n):
        rest = np.arange(n) != i
        if metric is auc and len(np.unique(y[rest])) < p.shape[1]:
            others = [c for c in range(p.shape[1]) if c != y[i]]
            areas = [sk.roc_auc_score(y[rest] == c, p[rest, c]) for c in others] + [0.5]
            without.append(np.mean(areas) if p.shape[1] > 2 else 0.5)
        elif metric is balanced_accuracy:
            of_class = [guess[rest & (y == c)] == c for c in range(p.shape[1])]
            without.append(np.mean([right.mean() if len(right) else 0.5 for right in of_class]))
        else:
            without.append(expected(metric.__name__, y[rest], p[rest], guess[rest]))
    pseudo = n * expected(metric.__name__, y, p, guess) - (n - 1) * np.array(without)
    score = first(metric, model, splits)
    assert score.values == pytest.approx(pseudo - pseudo.mean() + float(score), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("metric", [balanced_accuracy, macro_f1, auc], ids=lambda metric: metric.__name__)
def test_the_spread_of_the_values_is_that_of_new_test_images(metric):
    """The standard error from the values of one test set, against the standard deviation over 300 test sets."""
    scores, errors = [], []
    for seed in range(300):
        model, splits = case(n=250, k=3, seed=seed, weights=(0.2, 0.3, 0.5))
        score = first(metric, model, splits)
        scores.append(float(score))
        errors.append(score.values.std(ddof=1) / math.sqrt(250))
    ratio = np.sqrt(np.mean(np.square(errors))) / np.std(scores)
    assert 0.88 < ratio < 1.12


def test_the_loss_of_an_image_is_its_own():
    model, splits = case()
    y, p, _ = known(model, splits)
    assert first(log_loss, model, splits).values == pytest.approx(-np.log(p[np.arange(len(y)), y]))


def test_an_image_counts_for_its_class():
    model, splits = case(k=2, n=4)
    model.logits = nn.Parameter(torch.tensor([[1.0, 0], [0, 1.0], [1.0, 0], [1.0, 0]]))
    images = Images(splits.test.images, torch.tensor([0, 1, 0, 0]), splits.test.spec)
    score = first(balanced_accuracy, model, splits._replace(test=images))
    assert score == 1 and score.values == pytest.approx([0.8125, 1.5625, 0.8125, 0.8125]), "the second one is alone in its class"
    assert score.right.all()


# Use


def test_all_metrics_share_one_forward_pass():
    model, splits = case()
    with cached_features():
        for metric in (accuracy, *METRICS):
            list(metric(model, splits))
        confusion(model, splits.test)
        reliability(model, splits.test)
    assert model.passes == 1


def test_predictions_are_probabilities_in_float64():
    model, splits = case()
    found = predictions(model, splits.test)
    assert found.dtype == torch.float64 and found.shape == (60, 4)
    assert torch.allclose(found.sum(1), torch.ones(60, dtype=torch.float64), atol=1e-15)


@pytest.mark.parametrize("metric", [balanced_accuracy, macro_f1, auc], ids=lambda metric: metric.__name__)
def test_a_class_without_test_images_is_an_error_that_names_it(metric):
    model, splits = case()
    lacking = splits._replace(test=splits.test.take(splits.test.labels != 2))
    with pytest.raises(ValueError, match=r"class 'c' has no image among the \d+ images to score.*judge by accuracy"):
        list(metric(model, lacking))
    with pytest.raises(ValueError, match="class 'c'"):
        declaration(metric).needs(lacking)
    declaration(metric).needs(splits)
    declaration(metric).needs(Splits(splits.test, splits.val, splits.val))  # no validation images


def test_one_class_alone_cannot_be_scored_by_class():
    model, splits = case(k=1)
    for metric in (balanced_accuracy, macro_f1, auc):
        with pytest.raises(ValueError, match="there is one class, 'a'; expected at least two"):
            list(metric(model, splits))
    assert first(log_loss, model, splits) == 0


def test_a_class_without_test_images_is_found_before_training():
    check = sys.modules["smallvit.train.fit"].check_evaluation
    run, data = Run(data=digits, model=TINY_VIT, labels=50, val=100, evaluators=(macro_f1,)), digits()
    images = data.test.open()
    test, subset = HeldOut(images.take(images.labels != 4)), data.subset(labels=50, val=100, seed=0)
    check(run, subset, data.test)
    with pytest.raises(ValueError, match=r"class '4' has no image among the \d+ images to score"):
        check(run, subset, test)
    assert test.reads == 0 and not test.without_pixels().images.any()


def test_a_class_without_test_images_is_no_error_for_the_others():
    model, splits = case()
    lacking = splits._replace(test=splits.test.take(splits.test.labels != 2))
    assert first(log_loss, model, lacking) > 0 and first(calibration, model, lacking) > 0


@all_metrics
def test_no_images_and_other_outputs_are_refused(metric):
    model, splits = case()
    with pytest.raises(ValueError, match="there are no images to evaluate"):
        list(metric(model, splits._replace(test=splits.val)))
    model.logits = nn.Parameter(torch.zeros(60, 3))
    with pytest.raises(ValueError, match="expected a logit for each of 4 classes"):
        list(metric(model, splits))


def test_wrong_bins_are_refused():
    model, splits = case()
    for bins in (0, 2.5):
        with pytest.raises(ValueError, match=re.escape(f"bins is {bins}; expected a whole number of at least 1")):
            list(calibration(model, splits, bins=bins))


def test_which_scores_are_better_when_lower():
    lower = {metric.__name__ for metric in METRICS if declaration(metric).lower_is_better}
    assert lower == {"log_loss", "calibration"} and declaration(partial(calibration, bins=5)).lower_is_better
    assert all(declaration(metric).judges for metric in METRICS)


# Training with weights of the classes


def unequal() -> Dataset:
    """A data set of digits with three times as many images of the classes 0 to 4."""
    whole = digits()
    keep = (whole.train.labels < 5) | (torch.arange(len(whole.train)) % 3 == 0)
    return replace(whole, train=whole.train.take(keep))


def test_class_weights_use_the_labels_of_the_run_and_leave_fingerprints_unchanged():
    run = Run(data=digits, model=TINY_VIT, val=100, steps=6, batch=8)
    weighted = run.vary(objective=partial(Supervised, class_weight="balanced"))
    assert fingerprint(run) == fingerprint(run.vary(objective=partial(Supervised, class_weight=None))) != fingerprint(weighted)
    data = unequal()
    subset = data.subset(labels=None, val=100, seed=0)
    trainings = [Training(weighted, data, subset, "cpu") for _ in range(2)]
    labels = subset.train.labels.numpy()
    expected = compute_class_weight("balanced", classes=np.arange(10), y=labels)
    assert trainings[0].objective.class_weights.tolist() == pytest.approx(expected)
    for training in trainings:
        training.train_step()
    assert torch.equal(*(training.objective.model.head.weight for training in trainings))


# References in a comparison


@pytest.mark.parametrize("metric", [balanced_accuracy, macro_f1, auc], ids=lambda metric: metric.__name__)
def test_probes_can_be_judged_by_a_metric(metric):
    whole = unequal()
    subset = whole.subset(labels=None, val=50, seed=0)
    splits, model = Splits(subset.train, subset.val, whole.test.open()), Pixels((8, 8), 1, 10)
    labels = splits.test.labels.numpy()
    for probe, options in ((linear_probe, {"strengths": (1.0,)}), (knn, {"ks": (1,)})):
        (name, score), (own, accuracy_of_probe), *_ = probe(model, splits, metric=metric.__name__, **options)
        assert name == metric.__name__ and own in ("linear_probe", "knn_1") and isinstance(score, PerImage)
        plain = dict(probe(model, splits, **options))
        assert plain[own] == accuracy_of_probe and name not in plain
        if metric is balanced_accuracy:  # the mean recall of what the probe gets right
            right = accuracy_of_probe.values
            assert score == pytest.approx(np.mean([right[labels == c].mean() for c in range(10)]))
        assert 0.8 < score < 1
    with pytest.raises(ValueError, match="metric is 'f2'; expected one of 'balanced_accuracy', 'macro_f1', 'auc', or None"):
        list(knn(model, splits, metric="f2"))
    with pytest.raises(ValueError, match=r"metric is \['auc'\]; expected one of"):
        list(knn(model, splits, metric=["auc"]))


def test_references_have_the_score_of_the_baseline():
    run = Run(data=digits, model=TINY_VIT, steps=2, batch=8)

    def judges(*evaluators):
        entries = ablate({"vit": run.vary(evaluators=evaluators)}, seeds=[0])
        return {entry.arm: entry.run.evaluators[0] for entry in entries if entry.role == "reference"}

    plain = judges(accuracy)
    assert all(function(judge) in (accuracy, knn, linear_probe) for judge in plain.values())
    balanced = judges(balanced_accuracy, accuracy)
    assert balanced["small CNN"] is balanced_accuracy
    assert balanced["pixels, nearest neighbor"].keywords == {"metric": "balanced_accuracy"}
    assert balanced["pixels, logistic regression"].keywords["metric"] == "balanced_accuracy"
    loss = judges(log_loss, accuracy)  # probes have no log loss
    assert loss["small CNN"] is log_loss and loss["pixels, nearest neighbor"] is plain["pixels, nearest neighbor"]


def test_a_run_is_judged_by_its_first_metric(tmp_path):
    run = Run(data=digits, model=TINY_VIT, labels=50, val=50, steps=3, batch=8, ema=0.0)
    for metric, name in ((auc, "auc"), (log_loss, "log_loss")):
        record = fit(run.vary(evaluators=(metric, accuracy, calibration)), tmp_path / name)
        assert record.score == name and record.result == pytest.approx(record.per_image.mean(), abs=1e-5)
        assert bool(record.lower_is_better) == (metric is log_loss) and np.sum(record.confusion) == record.test_images
        assert set(record.test) == {name, "accuracy", "nll", "ece"} and len(record.reliability) == 15
        assert np.trace(record.confusion) / record.test_images == pytest.approx(record.test["accuracy"])
        assert record.test["nll"] == pytest.approx(dict.get(record.test, "log_loss", record.test["nll"]), abs=1e-5)
