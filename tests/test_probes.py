"""Probes: kNN and logistic regression on frozen features agree with scikit-learn and choose options on validation images."""

import hashlib
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import nn
from toys import TINY_VIT, slow_after

from smallvit import (
    Images,
    Run,
    Splits,
    ViT,
    accuracy,
    calibration,
    cost,
    data,
    digits,
    features,
    fit,
    initialize,
    knn,
    linear_probe,
)
from smallvit.evaluate import cached_features, declaration, few_shot, probes

PROBES = {"knn": knn, "linear_probe": linear_probe, "few_shot": partial(few_shot, shots=5)}
all_probes = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
sklearn_knn = partial(KNeighborsClassifier, metric="cosine", algorithm="brute")
sklearn_logistic = partial(LogisticRegression, tol=1e-5, max_iter=5000)


@pytest.fixture(scope="module")
def splits() -> Splits:
    digits = data.digits()
    subset = digits.subset(labels=100, val=100, seed=0)
    return Splits(subset.train, subset.val, digits.test.open())


@pytest.fixture
def vit() -> ViT:
    return initialize(TINY_VIT((8, 8), 1, 10, dropout=0.5, drop_path=0.5), 0)


class Table(nn.Module):
    """A model that looks up features: those of image i are row i of a table."""

    def __init__(self, rows):
        super().__init__()
        self.register_buffer("rows", torch.as_tensor(rows, dtype=torch.float32))

    def features(self, x):
        return self.rows[(x.flatten(1) @ torch.tensor([256.0 * 255, 255.0])).round().long()]

    forward = features


def numbered_images(indices, labels, classes=10) -> Images:
    """Images of 1 x 2 pixels that contain their index in a table."""
    indices = torch.as_tensor(indices).view(-1, 1, 1, 1)
    names = tuple(map(str, range(classes)))
    spec = data.DataSpec(name="t", channels=1, size=(1, 2), classes=names, mean=(0.0,), std=(1.0,))
    pixels = torch.cat([indices // 256, indices % 256], 3).to(torch.uint8)
    return Images(pixels, torch.as_tensor(labels, dtype=torch.int64), spec)


def table_and_splits(rows, labels, classes=10, n=(60, 40)) -> tuple[Table, Splits]:
    """A table as a model, and splits: n[0] training images, then n[1] validation images, then test images."""
    labels, (train, val) = np.asarray(labels), n
    parts = [range(train), range(train, train + val), range(train + val, len(labels))]
    return Table(rows), Splits(*(numbered_images(list(part), labels[list(part)], classes) for part in parts))


def clusters(seed=0, n=400, k=4, distance=0.8):
    """Rows of 8 Gaussian features with a mean of `distance` in the feature of their label, and the labels."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, k, n)
    return generator.normal(size=(n, 8)) + distance * np.eye(k, 8)[labels], labels


# Nearest neighbors


@pytest.mark.parametrize("seed", range(3))
def test_knn_agrees_with_sklearn(seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, 400)
    rows = generator.normal(size=(400, 6)) + 0.7 * np.eye(4, 6)[labels]
    model, splits = table_and_splits(rows, labels, 4, n=(100, 20))
    found = dict(knn(model, splits, ks=(1, 2, 3, 4, 7, 20)))
    for k in (1, 2, 3, 4, 7, 20):
        assert found[f"knn_{k}"] == sklearn_knn(k).fit(rows[:100], labels[:100]).score(rows[120:], labels[120:])
    assert len(set(found.values())) > 3
    scaled = Table(rows * generator.uniform(0.1, 10, (400, 1)))  # only the direction of features counts
    assert dict(knn(scaled, splits)) == dict(knn(model, splits))


def test_auc_counts_equal_shares_of_the_votes_as_a_tie():
    rows, labels = clusters(n=700, k=3)
    model, splits = table_and_splits(rows, labels, 3, n=(300, 0))
    found = dict(knn(model, splits, ks=(5,), metric="auc"))["auc"]
    votes = sklearn_knn(5).fit(rows[:300], labels[:300]).predict_proba(rows[300:])
    assert float(found) == pytest.approx(roc_auc_score(labels[300:], votes, multi_class="ovr"), abs=1e-12)


def test_a_tie_goes_to_the_smaller_class_even_if_it_is_farther_away():
    """Two neighbors of two classes: both have one vote, and class 3 is nearer."""
    rows = [[1, 0.1], [1, 0.2], [-1, 0.0], [1, 0.0]]
    model = Table(rows)
    splits = Splits(numbered_images(range(3), [3, 1, 0]), numbered_images([], []), numbered_images([3], [1]))
    assert dict(knn(model, splits, ks=(1, 2, 3))) == {"knn_1": 0.0, "knn_2": 1.0, "knn_3": 0.0}
    assert KNeighborsClassifier(2, metric="cosine").fit(rows[:3], [3, 1, 0]).predict(rows[3:]) == [1]


def test_knn_agrees_with_sklearn_if_every_labeled_image_occurs_twice():
    generator = np.random.default_rng(0)
    labels = np.tile(generator.integers(0, 4, 100), 2)
    rows = np.tile(generator.normal(size=(100, 6)).astype(np.float32), (2, 1))
    queries, targets = generator.normal(size=(150, 6)), generator.integers(0, 4, 150)
    model, splits = table_and_splits(np.concatenate([rows, queries]), np.concatenate([labels, targets]), 4, n=(200, 0))
    found = dict(knn(model, splits, ks=(2, 6, 20)))
    for k in (2, 6, 20):
        assert found[f"knn_{k}"] == sklearn_knn(k).fit(rows, labels).score(queries, targets)


def test_knn_tells_apart_features_with_nearly_the_same_direction():
    """As in an untrained model: cosines differ from the eighth digit on, which float32 cannot represent."""
    labels = np.arange(300) % 3
    rows = 1e4 + np.random.default_rng(0).normal(size=(300, 3)) * 0.1 + np.eye(3)[labels]
    model, splits = table_and_splits(rows, labels, 3, n=(150, 0))
    rows = rows.astype(np.float32).astype(float)
    assert dict(knn(model, splits))["knn_5"] == sklearn_knn(5).fit(rows[:150], labels[:150]).score(rows[150:], labels[150:]) == 1


def test_knn_compares_the_directions_of_tiny_features():
    rows, labels = clusters(n=300)
    found = [dict(knn(*table_and_splits(scale * rows, labels, 4, n=(100, 0)))) for scale in (1, 2.0**-100)]
    assert found[0] == found[1]


def test_knn_computes_a_limited_number_of_similarities_at_a_time(monkeypatch):
    rows, labels = clusters(n=600)
    model, splits = table_and_splits(rows, labels, 4, n=(100, 50))
    expected = dict(knn(model, splits))
    monkeypatch.setattr(probes, "AT_ONCE", 7 * 100)
    sizes, topk = [], torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, k: sizes.append(x.numel()) or topk(x, k))
    assert dict(knn(model, splits)) == expected and max(sizes) == 700 and sum(sizes) == 450 * 100


# Linear probe


@pytest.mark.parametrize("standardize", [True, False])
def test_the_linear_probe_is_sklearns_with_the_best_c_on_validation_images(standardize):
    rows, labels = clusters()
    rows = (rows * np.logspace(-1, 1, 8)).astype(np.float32).astype(float)  # features of very different scale
    model, splits = table_and_splits(rows, labels, 4, n=(80, 60))
    found = dict(linear_probe(model, splits, standardize=standardize))
    scaler = StandardScaler().fit(rows[:80]) if standardize else None
    train, val, test = (scaler.transform(part) if scaler else part for part in (rows[:80], rows[80:140], rows[140:]))
    fitted = {c: sklearn_logistic(C=c).fit(train, labels[:80]) for c in (1e-3, 1e-2, 1e-1, 1.0, 10.0)}
    scores = {c: probe.score(val, labels[80:140]) for c, probe in fitted.items()}
    best = min(c for c in scores if scores[c] == max(scores.values()))
    assert found == {
        "linear_probe": fitted[best].score(test, labels[140:]),
        "linear_probe_c": best,
        "linear_probe_edge": float(best in (1e-3, 10.0)),
        "linear_probe_iterations": fitted[best].n_iter_[0],
    }
    assert len(set(scores.values())) > 1


def test_the_linear_probe_is_at_the_minimum_of_its_loss():
    """The loss is the mean cross-entropy plus |w|^2 / (2 C n); its minimum is found by Newton's method from zero."""
    rows, labels = clusters(n=400)
    model, splits = table_and_splits(rows, labels, 4, n=(150, 0))
    rows = rows.astype(np.float32).astype(float)
    x = StandardScaler().fit(rows[:150]).transform(rows)
    x, y = torch.from_numpy(np.c_[x, np.ones(len(x))]), torch.from_numpy(labels)
    penalty = torch.ones(4, 9, dtype=torch.float64)
    penalty[:, -1] = 0  # no penalty on the intercept

    def loss(w):
        return nn.functional.cross_entropy(x[:150] @ w.view(4, 9).T, y[:150]) + (penalty * w.view(4, 9) ** 2).sum() / (2 * 150)

    w = torch.zeros(36, dtype=torch.float64)
    for _ in range(30):
        slope = torch.autograd.functional.jacobian(loss, w)
        w = w - torch.linalg.lstsq(torch.autograd.functional.hessian(loss, w), slope, driver="gelsd").solution
    assert slope.abs().max() < 1e-9
    correct = ((x[150:] @ w.view(4, 9).T).argmax(1) == y[150:]).double().mean().item()
    assert dict(linear_probe(model, splits))["linear_probe"] == correct


@pytest.mark.parametrize("standardize", [True, False])
def test_the_linear_probe_of_more_features_than_images_is_that_of_sklearn(standardize):
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(160, 1_200)) * np.linspace(0.1, 1, 1_200), np.arange(160) % 4
    rows = (rows + 0.05 * rng.normal(size=(4, 1_200))[labels]).astype(np.float32).astype(float)
    probe = probes.fit_logistic_regression(rows[:60], torch.from_numpy(labels[:60]), 0.1, standardize)
    scaled = (rows - rows[:60].mean(0)) / rows[:60].std(0) if standardize else rows
    expected = sklearn_logistic(C=0.1, tol=1e-7).fit(scaled[:60], labels[:60])
    assert np.allclose(probe.predict_proba(rows[60:]), expected.predict_proba(scaled[60:]), atol=1e-3)
    assert 0.3 < expected.score(scaled[60:], labels[60:]) < 1


@pytest.mark.parametrize("strengths", [(1e-3, 1e-2, 1e-1), (1e-1, 1.0, 1e-3), (0.1,), (1e-2, 1e-1, 1.0)], ids=str)
def test_a_c_at_the_edge_of_the_grid_is_reported(strengths):
    """C = 0.1 is best: at the edge of the first grid, inside the second and fourth, and the only value of the third."""
    generator = np.random.default_rng(4)
    labels = generator.integers(0, 2, 900)
    rows = generator.normal(size=(900, 40)) + 1.0 * labels[:, None] * (np.arange(40) < 2)
    model, splits = table_and_splits(rows, labels, 2, n=(60, 700))
    found = dict(linear_probe(model, splits, strengths=strengths))
    assert found["linear_probe_c"] == 0.1
    assert found["linear_probe_edge"] == (strengths == (1e-3, 1e-2, 1e-1))
    assert found["linear_probe_iterations"] == int(found["linear_probe_iterations"]) > 1


def test_c_is_chosen_on_validation_images_and_not_on_test_images():
    generator = np.random.default_rng(1)
    labels = generator.integers(0, 2, 300)
    rows = generator.normal(size=(300, 20)) + 1.0 * labels[:, None] * (np.arange(20) == 0)
    model, splits = table_and_splits(rows, labels, 2, n=(40, 130))
    flipped = splits._replace(test=numbered_images(range(170, 300), 1 - labels[170:], 2))
    plain, other = dict(linear_probe(model, splits)), dict(linear_probe(model, flipped))
    assert plain["linear_probe_c"] == other["linear_probe_c"]
    assert plain["linear_probe"] == pytest.approx(1 - other["linear_probe"])
    flipped = splits._replace(val=numbered_images(range(40, 170), 1 - labels[40:170], 2))
    assert dict(linear_probe(model, flipped))["linear_probe_c"] != plain["linear_probe_c"]


def test_the_smaller_of_equally_good_strengths_is_used_in_any_order():
    model, splits = table_and_splits(*clusters(distance=30), 4)  # easy to separate
    for strengths in ((1.0, 10.0), (10.0, 1.0)):
        assert dict(linear_probe(model, splits, strengths=strengths))["linear_probe_c"] == 1.0


def test_labelled_images_of_one_class_are_refused():
    model, splits = table_and_splits(*clusters(), 4)
    one = splits.train.take(splits.train.labels == 0)
    with pytest.raises(ValueError, match="all of one class"):
        dict(linear_probe(model, splits._replace(train=one)))


def test_without_validation_images_c_is_1_and_other_probes_are_unchanged():
    rows, labels = clusters()
    model, splits = table_and_splits(rows, labels, 4)
    without = splits._replace(val=splits.val.take(slice(0, 0)))
    found = dict(linear_probe(model, without))
    scaler = StandardScaler().fit(rows[:60])
    expected = sklearn_logistic(C=1.0).fit(scaler.transform(rows[:60]), labels[:60])
    assert found["linear_probe"] == expected.score(scaler.transform(rows[100:]), labels[100:])
    assert found["linear_probe_c"] == 1 and found["linear_probe_edge"] == 0
    assert dict(linear_probe(model, without, strengths=(0.1,)))["linear_probe_c"] == 0.1  # nothing to choose
    for name in ("knn", "few_shot"):
        assert dict(PROBES[name](model, without)) == dict(PROBES[name](model, splits))


# Few-shot


@pytest.mark.parametrize("shots, draws", [(16, 5), (3, 2)])
def test_few_shot_by_hand(shots, draws):
    rows, labels = clusters(n=900)
    model, splits = table_and_splits(rows, labels, 4, n=(300, 0))
    x, drawn, scores = rows.astype(np.float32).astype(float), [], []
    for draw in range(draws):
        order = sorted(range(300), key=lambda i: hashlib.sha256(f"{draw}/few_shot/{i}".encode()).digest())
        drawn.append([i for k in range(4) for i in [i for i in order if labels[i] == k][:shots]])
        mean, sd = x[drawn[-1]].mean(0), x[drawn[-1]].std(0)
        probe = sklearn_logistic(C=1.0).fit((x[drawn[-1]] - mean) / sd, labels[drawn[-1]])
        scores.append(probe.score((x[300:] - mean) / sd, labels[300:]))
    found = dict(few_shot(model, splits, shots=shots, draws=draws))
    assert found == {"few_shot": pytest.approx(np.mean(scores)), "few_shot_sd": pytest.approx(np.std(scores, ddof=1))}
    assert len(set(scores)) > 1 and len(set(map(frozenset, drawn))) == draws
    for index in drawn:
        assert np.bincount(labels[index]).tolist() == [shots] * 4 and len(set(index)) == 4 * shots
    assert dict(few_shot(model, splits, shots=shots, draws=draws, strength=1e-4)) != found


def test_every_model_gets_the_same_images_and_no_others(vit, splits, monkeypatch):
    every = Splits(data.digits().train, splits.val, splits.test)
    read = []

    def recorded(model, images, **options):
        read.append(images.sha256)
        return features(model, images, **options)

    monkeypatch.setattr(probes, "features", recorded)
    first = list(few_shot(vit, every))
    second = list(few_shot(initialize(vit, 1), every._replace(val=every.val.take(slice(0, 0)))))
    assert first != second and read[:6] == read[6:] and len(set(read)) == 6
    assert read[0] == splits.test.sha256 and dict(first)["few_shot"] > 0.3


def test_images_of_fewer_shots_are_among_those_of_more():
    _, splits = table_and_splits(np.zeros((300, 1)), clusters(n=300)[1], 4, n=(300, 0))
    many, few = (probes.draw_balanced(splits.train, shots, 3).tolist() for shots in (16, 4))
    assert set(few) < set(many)


# All probes


@pytest.mark.parametrize("factor", slow_after(1, [100.0, 0.01]))
def test_the_scale_of_the_features_does_not_matter_unless_they_are_not_standardized(factor):
    rows, labels = clusters(n=6200)
    (model, splits), (scaled, _) = (table_and_splits(rows * scale, labels, 4, n=(150, 50)) for scale in (1, factor))
    for probe in (knn, linear_probe, few_shot):
        assert abs(next(probe(model, splits))[1] - next(probe(scaled, splits))[1]) < 0.001
    assert dict(linear_probe(model, splits))["linear_probe_c"] == dict(linear_probe(scaled, splits))["linear_probe_c"]
    unscaled = [dict(linear_probe(m, splits, standardize=False)) for m in (model, scaled)]
    assert unscaled[0] != unscaled[1]


@pytest.mark.parametrize("probe", slow_after(1, PROBES.values()), ids=PROBES)
def test_permuted_labels_give_chance(probe):
    """8 permutations of 500 images in 4 classes: their mean has a standard deviation of 0.7 points."""
    scores = []
    for seed in range(8):
        rows, labels = clusters(seed, n=600)
        model, splits = table_and_splits(rows, np.random.default_rng(seed).permutation(labels), 4)
        scores.append(next(probe(model, splits))[1])
    assert abs(np.mean(scores) - 0.25) < 0.03


@pytest.mark.parametrize("probe", [knn, linear_probe])
def test_a_class_without_labeled_images_is_never_predicted(probe):
    model, splits = table_and_splits(*clusters(n=500), 4, n=(100, 100))
    lacking = splits._replace(train=splits.train.take((splits.train.labels != 2).nonzero()[:, 0]))
    only_2 = lacking._replace(test=splits.test.take((splits.test.labels == 2).nonzero()[:, 0]))
    assert next(probe(model, only_2))[1] == 0
    assert next(probe(model, splits))[1] > next(probe(model, lacking))[1] > 0


@pytest.mark.parametrize("names", slow_after(1, [{"of": "both", "layers": 2}, {"of": "mean"}, {"of": "class token", "norm": "before"}]), ids=str)
@all_probes
def test_a_probe_reads_the_features_of_its_options(probe, names, vit, splits):
    """The result equals that of a model with only these features."""
    parts = [splits.train, splits.val, splits.test]
    rows = np.concatenate([features(vit, part, **names) for part in parts])
    ends = np.cumsum([0, *map(len, parts)])
    numbered = Splits(*(numbered_images(range(a, b), part.labels) for part, a, b in zip(parts, ends, ends[1:])))
    found = dict(probe(vit, splits, **names))
    assert found == dict(probe(Table(rows), numbered)) and found != dict(probe(vit, splits))


# Bad input


def test_values_that_do_not_apply_are_left_out(vit, splits):
    few = splits._replace(train=splits.train.take(slice(0, 10)))
    assert list(dict(knn(vit, few))) == ["knn_1", "knn_5"]
    assert list(dict(few_shot(vit, splits, shots=2, draws=1))) == ["few_shot"]


@pytest.mark.parametrize(
    "evaluator, options",
    [
        (knn, {"ks": (1, 5), "of": "mean", "layers": 2}),
        (linear_probe, {"strengths": (0.1, 1.0), "of": "mean", "layers": 2}),
        (few_shot, {"shots": 2, "draws": 2, "strength": 0.5}),
        (calibration, {"bins": 7}),
    ],
)
def test_options_may_be_numbers_of_numpy(evaluator, options, vit, splits):
    def of_numpy(value):
        kinds = {int: np.int64, float: np.float32, tuple: lambda values: tuple(map(of_numpy, values))}
        return kinds.get(type(value), lambda value: value)(value)

    found = dict(evaluator(vit, splits, **{name: of_numpy(value) for name, value in options.items()}))
    assert found == pytest.approx(dict(evaluator(vit, splits, **options))) and all(isinstance(v, float) for v in found.values())


@pytest.mark.parametrize(
    "probe, message",
    [(partial(knn, ks=ks), r"ks is .* from 1 on") for ks in ((), (0,), (5, 0), (-1, 3), (2.0,), (True,))]
    + [
        (partial(knn, ks=(101, 102)), "100 labelled images"),
        (partial(linear_probe, strengths=()), r"strengths is \(\); expected a tuple"),
        (few_shot, r"class '\d' has 10 labelled images; expected at least shots=16 of each"),
        (partial(few_shot, shots=0), "expected at least 1 of each"),
        (partial(few_shot, draws=0), "expected at least 1 of each"),
        (partial(few_shot, shots=2.5), "expected at least 1 of each"),
        (partial(few_shot, shots=2, strength=-1.0), "strength is -1.0; expected an inverse strength C above 0"),
        (partial(linear_probe, strengths=("a", 1.0)), "strengths is .*above 0"),
        (partial(linear_probe, of="foo"), "of is 'foo'"),
        (partial(knn, metric="foo"), "metric is 'foo'; expected one of 'balanced_accuracy'"),
        (partial(knn, layers=2), "got layers=2 .* with of='head'"),
        (partial(calibration, bins=True), "bins is True; expected a whole number"),
        (partial(cost, batch=0), "batch=0"),
    ],
)
def test_impossible_options_are_refused(probe, message, vit, splits):
    with pytest.raises(ValueError, match=message):
        dict(probe(vit, splits))


def test_impossible_options_are_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr("smallvit.train.loop.Training.train_step", lambda *_: pytest.fail("a step was taken"))
    run = Run(data=digits, model=TINY_VIT, labels=50, val=20, steps=3, batch=8)
    for probe in (partial(knn, ks=(500,)), partial(linear_probe, strengths=()), partial(calibration, bins=0), partial(cost, repeats=0)):
        with pytest.raises(ValueError, match="expected"):
            fit(run.vary(evaluators=(accuracy, probe)), tmp_path)
    with pytest.raises(ValueError, match="no image among the 5 images to score"):
        fit(run.vary(val=5, evaluators=(partial(knn, metric="auc"),)), tmp_path)


def test_few_shot_refuses_a_class_without_labeled_images_also_before_training(vit, splits):
    lacking = splits._replace(train=splits.train.take((splits.train.labels != 7).nonzero()[:, 0]))
    for check in (lambda: dict(few_shot(vit, lacking, shots=5)), lambda: declaration(few_shot).needs(lacking, shots=5, draws=2)):
        with pytest.raises(ValueError, match="class '7' has 0 labelled images"):
            check()


@pytest.mark.parametrize("probe", [knn, linear_probe, few_shot])
def test_features_that_are_not_finite_are_refused(probe):
    rows, labels = clusters(n=300)
    rows[7] = np.nan
    model, splits = table_and_splits(rows, labels, 4, n=(150, 50))
    with pytest.raises(ValueError, match=r"features of 1 of \d+ images are not finite"):
        dict(probe(model, splits))


@pytest.mark.slow
def test_a_probe_that_does_not_converge_is_refused():
    rows = np.random.default_rng(0).normal(size=(600, 40)) * np.logspace(-2, 2, 40)
    model, splits = table_and_splits(rows, np.arange(600) % 4, 4, n=(500, 50))
    with pytest.raises(RuntimeError, match=r"C=1e\+06 did not converge .* smaller C"):
        dict(linear_probe(model, splits, strengths=(1e6,), standardize=False))


# The cache of features


def test_evaluators_with_a_cache_give_the_same_numbers_and_compute_features_once(vit, splits, monkeypatch):
    images, fits = [], []
    features_of_vit, fit = type(vit).features, probes.fit_logistic_regression
    monkeypatch.setattr(type(vit), "features", lambda self, x: images.append(len(x)) or features_of_vit(self, x))
    monkeypatch.setattr(probes, "fit_logistic_regression", lambda *arguments: fits.append(arguments[2]) or fit(*arguments))
    calls = [(probe, part) for part in (splits._replace(test=splits.val), splits) for probe in (knn, linear_probe)]
    separate = [dict(probe(vit, part)) for probe, part in calls]
    images_before, fits_before = sum(images), len(fits)
    images.clear(), fits.clear()
    with cached_features():
        assert [dict(probe(vit, part)) for probe, part in calls] == separate
    assert sum(images) == 100 + 100 + len(splits.test) < images_before / 2 and len(fits) == 5 == fits_before / 2


def test_the_cache_returns_copies_and_ends_with_its_context(vit, splits):
    with cached_features():
        first = features(vit, splits.val)
        changed = features(vit, splits.val)
        changed += 1
        assert (features(vit, splits.val) == first).all(), "a caller's change reached the cache"
        assert (features(vit, splits.val.take(slice(None))) == first).all()
    with torch.no_grad():
        vit.norm.bias.add_(1)
    assert not np.allclose(features(vit, splits.val), first)
