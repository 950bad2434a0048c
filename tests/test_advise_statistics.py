"""What more labelled images would bring, and which labels are probably wrong: simulations with known truth, and digits with
wrong labels that were put in.
"""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from toys import slow_after

from smallvit.commands.advise.doubts import doubts, weak_class, wrong_share
from smallvit.commands.advise.learning_curve import Estimate, LearningCurve, images_or_technique, learning_curve

ERRORS = {75: [0.40, 0.38, 0.42], 150: [0.32, 0.31, 0.30], 300: [0.25, 0.24, 0.26]}
ACCURACIES = {n: [1 - error for error in errors] for n, errors in ERRORS.items()}

# curve -> exponent, floor (share of the error at n images), offset (share of n); the error is 1 at n images
FORMS = {
    "exponent 0.1": (0.1, 0, 0),
    "exponent 0.3": (0.3, 0, 0),
    "exponent 0.5": (0.5, 0, 0),
    "exponent 0.8": (0.8, 0, 0),
    "floor of half": (0.5, 0.5, 0),
    "floor of 80%": (0.5, 0.8, 0),
    "constant": (0, 1, 0),
    "late fall": (0.8, 0, 0.5),
}


def true_error(form: str, at_n: float, relative: float) -> float:
    """The true error at `relative` times n images, where `at_n` is that at n images."""
    exponent, floor, offset = FORMS[form]
    return min(0.9, at_n * (floor + (1 - floor) * ((relative + offset) / (1 + offset)) ** -exponent))


def simulated(rng, true: dict[int, float], passes: int, images: int, *, sd=0.1, difficulty=0.5, alike=0.7) -> dict:
    """Whether each image is right, as number of training images -> array (passes, images), from a probit model.

    sd: standard deviation of the level over passes at one number, on the probit scale (0.1: 3.9 points at an error of 0.4, 2.3
    at 0.15); a third of this variance is added in common to all numbers of a pass. difficulty: share of the variance that
    belongs to the images; `alike` of it is the same at all numbers of training images.
    """
    shape = (len(true), passes, images)
    z = stats.norm.ppf(list(true.values()))[:, None, None] + np.zeros(shape)
    z += math.sqrt(difficulty * alike) * rng.standard_normal((1, 1, images))
    z += math.sqrt(difficulty * (1 - alike)) * rng.standard_normal((len(true), 1, images))
    z += sd * rng.standard_normal((len(true), passes, 1)) + sd / math.sqrt(3) * rng.standard_normal((1, passes, 1))
    z += math.sqrt(1 - difficulty - sd**2 * 4 / 3) * rng.standard_normal(shape)
    return dict(zip(true, z < 0))


# The learning curve


def test_curve_holds_measured_fitted_and_predicted_errors():
    curve = learning_curve(ACCURACIES, test_images=300)
    assert isinstance(curve, LearningCurve) and curve.now == 300
    for n, errors in ERRORS.items():
        assert curve.measured[n].mean == pytest.approx(np.mean(errors)) and curve.measured[n].low < curve.fitted[n].mean
        assert abs(curve.fitted[n].mean - np.mean(errors)) < 0.02
    assert list(curve.fitted) == sorted(curve.fitted) and min(curve.fitted) == 75 and max(curve.fitted) == 600
    means = [error.mean for error in curve.fitted.values()]
    assert means == sorted(means, reverse=True) and len(means) >= 10
    assert curve.gain.mean == pytest.approx(curve.fitted[300].mean - curve.twice.mean)
    assert 0 < curve.gain.low < 0.05 < curve.gain.high and curve.outcome == "more"
    assert curve.text == f"Twice as many images (600 in place of 300) would bring about {curve.gain.points}."
    assert learning_curve(dict(reversed(ACCURACIES.items())), test_images=300) == curve


def test_interval_of_a_measured_error_is_the_usual_one():
    one_pass_differs = {10: [0.5, 0.5, 0.5, 0.5], 20: [0.7, 0.7, 0.7, 0.9]}
    measured = learning_curve(one_pass_differs, test_images=10**6).measured
    pooled = np.var([0.7, 0.7, 0.7, 0.9], ddof=1) / 2  # of both numbers
    assert measured[20].high - measured[20].mean == pytest.approx(stats.t.isf(0.025, 6) * math.sqrt(pooled / 4), rel=1e-3)
    measured = learning_curve({10: [0.5, 0.5], 20: [0.8, 0.8]}, test_images=400).measured
    assert measured[20].high - 0.2 == pytest.approx(stats.t.isf(0.025, 399) * 0.4 / 20, rel=0.02)


@pytest.mark.parametrize("kind", ["passes", "images"])
def test_order_of_passes_and_of_images_does_not_matter(kind):
    rng = np.random.default_rng(0)
    runs = simulated(rng, {100: 0.4, 200: 0.3, 400: 0.25}, 4, 80)
    order = rng.permutation(4 if kind == "passes" else 80)
    again = learning_curve({n: row[order] if kind == "passes" else row[:, order] for n, row in runs.items()})
    for a, b in zip(vars(learning_curve(runs)).values(), vars(again).values()):
        if isinstance(a, Estimate):
            assert (a.mean, a.low, a.high) == pytest.approx((b.mean, b.low, b.high), abs=1e-9)


def test_more_information_makes_the_interval_narrower():
    width = lambda *args, **more: (g := learning_curve(*args, **more).gain).high - g.low  # noqa: E731
    runs = simulated(np.random.default_rng(1), {500: 0.4, 1000: 0.3, 2000: 0.22}, 4, 1000, difficulty=0.8, alike=0.9)
    scores = {n: row.mean(1) for n, row in runs.items()}
    assert width(runs) < width(runs, folds=True) < width(scores, test_images=200)
    assert width(runs) < width(scores, test_images=1000) < width(scores, test_images=200) < width(scores, test_images=50)
    assert width(scores, test_images=1000) < width({n: row[:2] for n, row in scores.items()}, test_images=1000)


def test_prediction_of_a_precise_curve_contains_the_truth_and_the_floor_makes_it_uncertain():
    for form in ("exponent 0.3", "exponent 0.8", "floor of half", "floor of 80%", "late fall"):
        true = {n: true_error(form, 0.05, n / 400) for n in (25, 50, 100, 200, 400)}
        gain = learning_curve({n: [1 - e + 1e-4, 1 - e - 1e-4] for n, e in true.items()}, test_images=10**7).gain
        expected = 0.05 - true_error(form, 0.05, 2)
        print(form, expected, gain.points)
        assert gain.low < expected < gain.high and gain.mean == pytest.approx(expected, abs=0.004), form


def test_gain_can_be_counted_from_more_images_than_were_used():
    curve, later = (learning_curve(ACCURACIES, test_images=300, now=now) for now in (None, 750))
    assert later.gain.mean < curve.gain.mean and later.now == 750 and {300, 750, 1500} <= set(later.fitted)
    assert later.twice.low <= later.twice.mean <= later.twice.high
    assert "(1,500 in place of 750)" in later.text


@pytest.mark.parametrize(
    "accuracies, images, outcome, text",
    [
        ({100: [1, 1], 200: [1, 1]}, 100, "little", "Twice as many images (400 in place of 200) would bring at most 0."),
        ({100: [0.95, 0.952], 200: [0.951, 0.95], 400: [0.952, 0.95]}, 5000, "little", "would bring at most 0."),
        ({100: [0.5, 0.6], 200: [0.55, 0.5], 400: [0.5, 0.6]}, 100, "unknown", "cannot be told from these runs: twice as many"),
        ({100: [0.9, 0.91], 200: [0.8, 0.81], 400: [0.7, 0.71]}, 5000, "misfit", "as learning curves do"),
    ],
    ids=["no error", "flat", "noisy", "rising error"],
)
def test_sentence_says_what_can_be_told(accuracies, images, outcome, text):
    curve = learning_curve(accuracies, test_images=images)
    assert curve.outcome == outcome and text in curve.text, curve.text
    assert 0 <= curve.gain.low <= curve.gain.mean <= curve.gain.high <= 1


@pytest.mark.parametrize(
    "accuracies, options, message",
    [
        ({100: [0.5, 0.6]}, {"test_images": 100}, "at least two numbers of images"),
        ({100: [0.5, 0.6], 200: [0.5]}, {"test_images": 100}, r"100: \(2,\), 200: \(1,\); expected the same"),
        ({100: [0.5], 200: [0.5]}, {"test_images": 100}, "at least two passes"),
        ({100: [50, 60], 200: [70, 80]}, {"test_images": 100}, "accuracies as fractions"),
        ({100: [0.5, math.nan], 200: [0.7, 0.8]}, {"test_images": 100}, "no missing values"),
        ({100: [0.5, 0.6], 200: [0.7, 0.8]}, {}, "expected the number of test images"),
        ({100: [0.5, 0.6], 200: [0.7, 0.8]}, {"test_images": 100, "now": 150}, "now=150; expected at least 200"),
    ],
)
def test_what_is_no_learning_curve_is_refused(accuracies, options, message):
    with pytest.raises(ValueError, match=message):
        learning_curve(accuracies, **options)


def test_images_are_compared_with_a_technique():
    curve = learning_curve(ACCURACIES, test_images=300)
    low, high = curve.gain.low, curve.gain.high
    for technique, outcome, start in (
        ((-0.01, -0.03, 0.01), "images", "Twice as many images (600) would bring more than mixup has brought: "),
        ((curve.gain.mean, 0.03, 0.07), "unknown", "Whether twice as many images would bring more than mixup cannot be told"),
        ((0.2, 0.19, 0.21), "technique", "Mixup has brought more than twice as many images (600) would: 20.0 points [19.0, 21.0]"),
        ((0.0, None, None), "unknown", "Whether"),
    ):
        found = images_or_technique(curve, "mixup", *technique)
        assert found.outcome == outcome and found.text.startswith(start), found.text
        assert found.difference.mean == pytest.approx(curve.gain.mean - technique[0])
    found = images_or_technique(curve, "mixup", 0.01, 0.01, 0.01).difference
    assert (found.low, found.high) == pytest.approx((low - 0.01, high - 0.01))
    assert "−3.0" in images_or_technique(curve, "mixup", -0.01, -0.03, 0.01).text
    rising = learning_curve({100: [0.9, 0.91], 200: [0.8, 0.81], 400: [0.7, 0.71]}, test_images=5000)
    assert images_or_technique(rising, "mixup", 0.5, 0.5, 0.5).outcome == "unknown"
    with pytest.raises(ValueError, match="outside its interval"):
        images_or_technique(curve, "mixup", 0.1, 0.2, 0.3)


def coverage(cells, repetitions: int, *, single_images=True, now=1.0, rng=None) -> dict[str, list[tuple[bool, bool]]]:
    """For each form of the curve, whether the intervals of the gain and of the error with twice as many images contain the
    truth. `cells` yields the number of images, the error there, the form and the number of passes.
    """
    rng = rng or np.random.default_rng(0)
    inside: dict[str, list] = {}
    for n, error, form, passes in cells:
        true = {round(n * r): true_error(form, error, r) for r in (0.25, 0.5, 1)}
        before, after = (true_error(form, error, now * times) for times in (1, 2))
        for _ in range(repetitions):
            runs = simulated(rng, true, passes, round(1.25 * n))
            data = (runs,) if single_images else ({k: row.mean(1) for k, row in runs.items()},)
            curve = learning_curve(*data, test_images=round(1.25 * n), now=round(now * n))
            inside.setdefault(form, []).append(
                (
                    curve.gain.low - 1e-9 <= before - after <= curve.gain.high + 1e-9,
                    curve.twice.low - 1e-9 <= after <= curve.twice.high + 1e-9,
                )
            )
    return inside


@pytest.mark.slow
@pytest.mark.parametrize("single_images, now", [(True, 1.0), (False, 1.0), (True, 2.5)])
def test_interval_of_the_prediction_contains_the_truth_in_at_least_90_percent(single_images, now):
    cells = product((100, 500, 2000), (0.4, 0.15, 0.03), FORMS, (2, 4, 8))
    inside = coverage(cells, 20, single_images=single_images, now=now)
    rates = {form: np.mean(values, axis=0) for form, values in inside.items()}
    print(f"\nsingle images {single_images}, from {now} n: gain, error with twice as many images")
    for form, rate in rates.items():
        print(f"{form:14}", *(f"{r:.1%}" for r in rate))
    assert all((rate >= 0.9).all() for rate in rates.values()), rates
    assert np.mean(list(rates.values())) >= 0.95


def nearest(x, y, test):
    return y[((x**2).sum(1) - 2 * test @ x.T).argmin(1)]


def centroids(x, y, test):
    means = np.stack([x[y == c].mean(0) if (y == c).any() else np.full(x.shape[1], 1e3) for c in range(10)])
    return ((means**2).sum(1) - 2 * test @ means.T).argmin(1)


def ridge(x, y, test):
    kernel = lambda a, b: np.exp(-((a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T) / 40)  # noqa: E731
    return (kernel(test, x) @ np.linalg.solve(kernel(x, x) + 0.1 * np.eye(len(x)), np.eye(10)[y])).argmax(1)


@pytest.mark.slow
@pytest.mark.parametrize("classifier", [nearest, centroids, ridge])
def test_interval_contains_the_truth_with_real_training_in_a_cross_validation(classifier):
    """300 noisy digits, 3 passes over 5 folds, with a quarter, half and all of the training images of a fold."""
    pixels, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)

    def drawn(count):
        chosen = rng.permutation(len(pixels))[:count]
        return pixels[chosen] / 16 + 0.35 * rng.standard_normal((count, 64)), digits[chosen]

    def wrong(x, y, train, test):
        return classifier(x[train], y[train], x[test]) != y[test]

    true = {}
    for n in (240, 480):
        samples = [(*drawn(n + 1000), range(n), range(n, n + 1000)) for _ in range(150)]
        true[n] = np.mean([wrong(*sample).mean() for sample in samples])
    inside = []
    for _ in range(100):
        x, y = drawn(300)
        right = {n: np.zeros((3, 300)) for n in (60, 120, 240)}
        for number in range(3):
            for test in np.array_split(rng.permutation(300), 5):
                train = rng.permutation(np.setdiff1d(range(300), test))
                for n in right:
                    right[n][number, test] = ~wrong(x, y, train[:n], test)
        curve = learning_curve(right, folds=True)
        gain, twice = true[240] - true[480], curve.twice
        inside.append((curve.gain.low <= gain <= curve.gain.high, twice.low <= true[480] <= twice.high))
    rate = np.mean(inside, axis=0)
    print(f"\n{classifier.__name__}: gain {gain:.3f}; intervals contain the gain {rate[0]:.0%}, the error {rate[1]:.0%}")
    assert (rate >= 0.85).all()


# Wrong labels


def out_of_fold(x, y, passes: int, classes: int, seed: int = 0) -> np.ndarray:
    """Probabilities (passes, images, classes) by logistic regression; in each pass every image is predicted once."""
    found = np.zeros((passes, len(y), classes))
    for number, p in enumerate(found):
        for train, test in StratifiedKFold(5, shuffle=True, random_state=100 * seed + number).split(x, y):
            model = LogisticRegression(max_iter=300).fit(x[train], y[train])
            p[np.ix_(test, model.classes_)] = model.predict_proba(x[test])
    return found


def planted(count: int, share: float, seed: int, chosen=range(10)) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Digits with wrong labels: pixels, labels, and which labels are wrong."""
    rng = np.random.default_rng(seed)
    pixels, digits = load_digits(return_X_y=True)
    kept = rng.permutation(np.flatnonzero(np.isin(digits, chosen)))[:count]
    y = np.searchsorted(chosen, digits[kept])
    wrong = np.zeros(len(y), dtype=bool)
    wrong[rng.permutation(len(y))[: round(share * len(y))]] = True
    return pixels[kept] / 16, np.where(wrong, (y + rng.integers(1, len(chosen), len(y))) % len(chosen), y), wrong


@pytest.mark.parametrize("count, share, least", slow_after(1, [(300, 0.03, 0.6), (300, 0.1, 0.75), (500, 0.2, 0.8)]))
@pytest.mark.slow
def test_planted_wrong_labels_are_found(count, share, least):
    precision, first, numbers = [], [], []
    for seed in range(3):
        x, y, wrong = planted(count, share, seed)
        found = doubts(out_of_fold(x, y, 3, 10, seed), y, shown=wrong.sum())
        listed = [wrong[d.image] for d in found.images]
        precision.append(np.mean(listed))
        first.append(np.mean(listed[:10]))
        numbers.append(found.wrong.low - 1 <= wrong.sum() <= found.wrong.high + 1)
    print(f"\n{count} digits, {share:.0%} wrong: precision at k = number of wrong labels {np.mean(precision):.0%}, at 10 {np.mean(first):.0%}")
    assert np.mean(precision) > least and np.mean(first) >= 0.7 and sum(numbers) >= 2


def test_without_wrong_labels_the_estimate_contains_zero():
    x, y, _ = planted(400, 0, 1)
    found = doubts(out_of_fold(x, y, 2, 10), y)
    assert found.wrong.low == 0 and found.wrong.high < 12 and found.doubted >= len(found.images) > 0
    assert found.wrong.text.startswith("At most ") and "of 400 labels are probably wrong, and maybe none" in found.wrong.text


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 0.03, 0.1, 0.2])
def test_interval_contains_the_number_of_planted_wrong_labels(share):
    rows = []
    for seed, chosen in product(range(10), ((3, 8), (1, 7, 9), range(10))):
        x, y, wrong = planted(300, share, seed, chosen)
        x = x + (0.5 if len(chosen) == 2 else 0.3) * np.random.default_rng(seed).standard_normal(x.shape)
        mean = out_of_fold(x, y, 2, len(chosen), seed).mean(0)
        best, low, high = wrong_share(mean, y)
        rows.append((best, low - 0.004 <= wrong.mean() <= high + 0.004, (mean.argmax(1) != y)[~wrong].mean()))
    best, inside, errors = np.mean(rows, axis=0)
    print(f"\n{share:.0%} wrong labels: mean estimate {best:.1%}, in the interval {inside:.0%}, errors of the models {errors:.0%}")
    assert inside >= 0.85 and abs(best - share) < 0.03


def test_doubts_are_ranked_and_described():
    p = np.array([[[0.9, 0.1, 0], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]], [[0.8, 0.2, 0], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]]])
    found = doubts(p, [1, 0, 2], classes=["cat", "dog", "bird"], names=["a.png", "b.png", "c.png"])
    assert [d.name for d in found.images] == ["a.png", "b.png"] and found.doubted == 2
    assert found.images[0].text == "a.png is labelled dog; 2 of 2 models say cat (mean probability 85%; dog: 15%)"
    second = found.images[1]
    assert (second.image, second.given, second.instead, second.agreeing) == (1, "cat", "bird", 1)
    assert (second.p_given, second.p_instead) == pytest.approx((0.15, 0.45))
    assert len(doubts(p, [1, 0, 2], shown=1).images) == 1 and doubts(p, [1, 0, 2]).images[0].name == "0"
    assert found.wrong.estimate is None and "3 images are too few" in found.wrong.text


@pytest.mark.slow
def test_images_that_no_model_predicted_are_left_out():
    x, y, _ = planted(200, 0.1, 0)
    p = out_of_fold(x, y, 4, 10)
    p[np.random.default_rng(0).random((4, 200)) < 0.6] = math.nan
    seen = int((~np.isnan(p[..., 0])).any(0).sum())
    assert doubts(p, y).wrong.images == seen < 200 and {d.models for d in doubts(p, y).images} >= {1, 2}


def test_number_of_wrong_labels_is_not_estimated_from_poor_models():
    rng = np.random.default_rng(0)
    found = doubts(rng.dirichlet(np.ones(4), (3, 300)), rng.integers(0, 4, 300))
    assert found.wrong.estimate is found.wrong.low is found.wrong.high is None
    assert found.wrong.text.startswith("How many labels are wrong cannot be estimated: the models say another class")


def answers(rates, counts, rng, models=3) -> tuple[np.ndarray, np.ndarray]:
    """Predictions with given error rates of the classes, and the labels."""
    y = np.repeat(np.arange(len(rates)), counts)
    wrong = rng.random((models, len(y))) < np.asarray(rates)[y]
    return np.eye(len(rates))[np.where(wrong, (y + 1) % len(rates), y)], y


def test_class_with_the_most_errors_is_named():
    p, y = answers((0.1, 0.5, 0.1, 0.15), (80, 60, 80, 5), np.random.default_rng(0))
    found = weak_class(p, y, classes=["cat", "dog", "bird", "fish"])
    assert found.weakest and found.weakest.name == "dog" and found.weakest.images == 60
    assert found.weakest.low < 0.5 < found.weakest.high and found.classes[0] == found.weakest
    assert found.text.startswith("More images of dog would probably help most: the models are wrong in ")
    assert [c.error for c in found.classes] == sorted((c.error for c in found.classes), reverse=True)
    low, high = stats.binomtest(round(found.weakest.error * 60), 60).proportion_ci(method="wilson")
    assert (found.weakest.low, found.weakest.high) == pytest.approx((low, high), abs=0.02)


@pytest.mark.slow
def test_equally_hard_classes_stand_out_in_at_most_5_percent():
    rng = np.random.default_rng(0)
    named = [weak_class(*answers([0.2] * 5, (60, 40, 20, 10, 5), rng)).weakest is not None for _ in range(60)]
    assert np.mean(named) <= 0.12
    sure = weak_class(*answers([0, 0], (20, 20), rng))
    assert sure.weakest is None and sure.text.startswith("No class was shown to be more difficult") and sure.classes[0].high > 0.1


@pytest.mark.parametrize(
    "predictions, labels, options, message",
    [
        (np.full((2, 3, 4), 0.25), [0, 1], {}, r"shape \(2, 3, 4\); expected \(models, images, classes\), with 2 images"),
        (np.full((2, 3, 4), 0.25), [0, 1, 4], {}, "labels from 0 to 4; expected numbers from 0 to 3"),
        (np.full((2, 3, 4), 0.25), [0.0, 1.0, 2.0], {}, "expected a whole number for each image"),
        (np.full((2, 3, 4), 0.3), [0, 1, 2], {}, "do not sum to 1; expected probabilities, not logits"),
        (np.full((2, 3, 4), math.nan), [0, 1, 2], {}, "expected NaN in all classes"),
        (np.full((2, 3, 4), 0.25), [0, 1, 2], {"classes": ["a", "b"]}, "predictions for 4 classes; expected 2"),
        (np.full((2, 3, 4), 0.25), [0, 1, 2], {"names": ["a", "b"]}, "2 names for 3 images"),
        ([[], []], [0, 1, 1], {}, r"shape \(2, 0\); expected \(models, images, classes\), with 3 images"),
    ],
)
def test_predictions_that_do_not_fit_are_refused(predictions, labels, options, message):
    with pytest.raises(ValueError, match=message):
        doubts(predictions, labels, **options)
