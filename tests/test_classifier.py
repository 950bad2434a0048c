"""The classifier for scikit-learn: scikit-learn's own checks, what it accepts, and that it trains as `fit` does."""

import tempfile
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedGroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from smallvit import (
    DINO,
    Block,
    Distill,
    PatchEmbed,
    Run,
    SmallCNN,
    SmallViTClassifier,
    Supervised,
    ViT,
    ablate,
    accuracy,
    arrays,
    augment,
    fit,
    knn,
    load,
)
from smallvit.data import Dataset
from smallvit.deploy.classifier import on_all_images

vit = partial(ViT, block=partial(Block, mlp_ratio=2.0), dim=16, depth=1, heads=2)
TABLE = Run(model=partial(vit, tokenizer=partial(PatchEmbed, patch=1)), steps=20, batch=32, lr=0.02, ema=0.0)
DIGITS = Run(model=partial(vit, tokenizer=partial(PatchEmbed, patch=2)), steps=60, batch=32, lr=0.01, ema=0.0)

# The checks that scikit-learn expects to fail, each with the reason. There are none: the checks use tables of any values with
# 1 to 20 columns, and with `image_shape=(1, -1), rescale=True` every table is a set of images.
EXPECTED_FAILURES: dict[str, str] = {}


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Rows of 300 digits, 8 x 8 values from 0 to 16, and their labels."""
    X, y = load_digits(return_X_y=True)
    return X[:300], y[:300]


def classifier(**options) -> SmallViTClassifier:
    return SmallViTClassifier(**{"run": DIGITS, "rescale": True} | options)


CHECKS = [*estimator_checks_generator(SmallViTClassifier(TABLE, image_shape=(1, -1), rescale=True), mark="xfail",
                                      expected_failed_checks=EXPECTED_FAILURES)]  # fmt: skip
LONG_CHECKS = {"check_classifiers_classes", "check_classifier_data_not_an_array", "check_estimators_dtypes", "check_fit_idempotent"}


def name_of(part) -> str:
    return getattr(part, "func", type(part)).__name__


def made_by_another(check) -> bool:
    """Whether there is the same check with a table that cannot be written and another type of numbers as well."""
    return name_of(check) == "check_classifiers_train" and check.keywords == {"readonly_memmap": True}


def quicker(estimator, check):
    """With fewer steps, except where scikit-learn asks for a high accuracy."""
    accurate = name_of(check) in ("check_classifiers_train", "check_classifiers_classes")
    return estimator if accurate else clone(estimator).set_params(steps=3)


@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        pytest.param(*case, marks=pytest.mark.slow if name_of(case[1]) in LONG_CHECKS or made_by_another(case[1]) else ())
        for case in CHECKS
    ],
    ids=name_of,
)
def test_scikit_learn_check(estimator, check):
    """What `parametrize_with_checks` does, with names that are the same in each test process."""
    check(quicker(estimator, check))


# Together with the rest of scikit-learn


@pytest.mark.slow
def test_cross_validation_by_groups_and_pipeline(digits):
    X, y = digits
    pipeline = make_pipeline(StandardScaler(), classifier())
    scores = cross_val_score(pipeline, X, y, cv=StratifiedGroupKFold(3), groups=np.arange(300) // 3)
    assert len(scores) == 3 and scores.min() > 0.4


def test_classifier_trains_also_where_gradients_are_switched_off_or_autocast_is_on(digits):
    x, y = digits[0][:100], digits[1][:100]
    expected = classifier(steps=3).fit(x, y).predict_proba(x)
    for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        with context:
            model = classifier(steps=3).fit(x, y)
        assert np.array_equal(model.predict_proba(x), expected)


@pytest.mark.slow
def test_calibration_gives_probabilities(digits):
    X, y = digits
    calibrated = CalibratedClassifierCV(classifier(steps=100), ensemble=False, cv=2).fit(X[:200], y[:200])
    probabilities = calibrated.predict_proba(X[200:])
    assert probabilities.shape == (100, 10) and np.allclose(probabilities.sum(1), 1)
    assert calibrated.score(X[200:], y[200:]) > 0.5


@pytest.mark.slow
def test_grid_search_over_settings_and_models(digits):
    search = GridSearchCV(classifier(random_state=0), {"steps": [1, 40], "run": [DIGITS, DIGITS.vary(dim=8)]}, cv=2)
    search.fit(*digits)
    assert search.best_params_["steps"] == 40 and search.best_estimator_.run_.steps == 40
    assert len({*search.cv_results_["mean_test_score"]}) > 2


# Images and labels


def test_rows_images_bytes_and_floats_train_the_same_model(digits):
    X, y = digits
    pixels = np.rint(X / 16 * 255).astype(np.uint8)
    same = [
        (X, {}),
        (X.reshape(-1, 8, 8), {}),
        (X / 16, {"rescale": False}),
        (pixels.reshape(-1, 8, 8, 1), {"rescale": False}),
        (torch.from_numpy(pixels), {"rescale": False, "image_shape": (8, 8)}),
    ]
    first, *others = [classifier(steps=10, **options).fit(images, y).predict_proba(images) for images, options in same]
    assert all(np.array_equal(first, other) for other in others)


def test_rows_of_color_images_of_any_shape():
    X = np.random.default_rng(0).integers(0, 256, (20, 4 * 6 * 3), dtype=np.uint8)
    fitted = classifier(rescale=False, image_shape=(4, -1, 3), steps=1).fit(X, np.arange(20) % 2)
    assert fitted.image_shape_ == (4, 6, 3) and fitted.n_features_in_ == 72
    assert np.array_equal(fitted.predict_proba(X), fitted.predict_proba(X.reshape(20, 4, 6, 3)))


@pytest.mark.parametrize(("shape", "given"), [((1, 8, 8), (8, 8)), ((3, 8, 8), (8, 8, 3)), ((8, 8), (-1, 4))])
def test_images_of_another_shape_than_image_shape_are_refused(shape, given):
    X = np.random.default_rng(0).random((12, *shape))
    with pytest.raises(ValueError, match=rf"image_shape is \({given[0]}, .*\), but X has images of shape \({shape[0]}, .*leave"):
        classifier(image_shape=given, steps=1).fit(X, np.arange(12) % 2)


def test_images_of_the_given_shape_are_accepted(digits):
    X, y = digits
    fitted = classifier(image_shape=(8, -1), steps=1).fit(X.reshape(-1, 8, 8, 1), y)
    assert fitted.image_shape_ == (8, 8, 1) and fitted.predict(X.reshape(-1, 8, 8)).shape == (300,)


def test_labels_of_any_type(digits):
    X, y = digits
    names = np.array([f"digit {label}" for label in y], dtype=object)
    fitted, numbered = classifier(steps=10).fit(X, names), classifier(steps=10).fit(X, y)
    assert [*fitted.classes_] == sorted({*names}) and fitted.predict(X[:1])[0] in names
    assert np.array_equal(fitted.predict_proba(X), numbered.predict_proba(X))
    assert fitted.score(X, names) == np.mean(fitted.predict(X) == names)
    for other in (y > 4, np.datetime64("2020-01-01") + y, y.astype(float)):
        fitted = classifier(steps=1).fit(X, other)
        assert fitted.classes_.dtype == other.dtype and {*fitted.predict(X).tolist()} <= {*other.tolist()}
    with pytest.raises(ValueError, match="Unknown label type"):
        classifier(steps=1).fit(X, y.astype(object))


def test_floats_that_leave_0_to_1_by_rounding_are_pixels(digits):
    X, y = digits
    exact, rounded = (classifier(rescale=False, steps=1).fit(pixels, y) for pixels in (X / 16, X / 16 * (1 + 1e-7) - 1e-8))
    assert np.array_equal(exact.predict_proba(X / 16), rounded.predict_proba((X / 16).clip(1e-7) + 1e-7))


def test_values_outside_those_of_training_are_clipped(digits):
    X, y = digits
    fitted = classifier(steps=10).fit(X, y)
    assert np.array_equal(fitted.predict_proba(X[:5] * 100 - 3), fitted.predict_proba((X[:5] * 100 - 3).clip(0, 16)))


def test_default_model_fits_the_images(digits):
    X, y = digits
    fitted = SmallViTClassifier(steps=40, rescale=True).fit(X[:200], y[:200])
    assert fitted.model_.tokenizer.grid((8, 8)) == (4, 4) and fitted.score(X[200:], y[200:]) > 0.5
    wide = SmallViTClassifier(steps=1, batch=2).fit(np.random.default_rng(0).random((4, 28, 56)), [0, 1, 0, 1])
    assert wide.model_.tokenizer.grid((28, 56)) == (4, 8)


def test_wrong_images_and_labels_are_refused(digits):
    X, y = digits
    errors = [
        ({"rescale": False}, X, y, r"values from 0 to 16 of type float64; expected uint8, or floats in \[0, 1\]"),
        ({"rescale": False}, X.astype(int), y, r"type int64; expected uint8"),
        ({}, X[:, :63], y, "63 features, which is no square image; set image_shape"),
        ({"image_shape": (8, 9)}, X, y, r"image_shape is \(8, 9\) for 64 values"),
        ({"image_shape": (-1, -1)}, X, y, r"image_shape is \(-1, -1\)"),
        ({"image_shape": 8}, X, y, "image_shape is 8; expected \\(height, width\\) or"),
        ({"image_shape": "88"}, X, y, "image_shape is '88'; expected"),
        ({}, X[:4], np.array(["a", 1, "b", 2], dtype=object), r"labels of types that cannot be sorted together \(int, str\)"),
        ({"image_shape": (64,)}, X, y, r"expected \(height, width\)"),
        ({}, X, np.zeros(300), "y has 1 class, 0.0; expected"),
        ({}, X, np.full(300, "a"), "y has 1 class, 'a'; expected"),
        ({"rescale": False}, X / 16 + 1e-5, y, r"values from 1e-05 to 1 of type float64; expected uint8, or floats in \[0, 1\]"),
        ({"run": "quickstart"}, X, y, "run is 'quickstart'; expected a smallvit.Run"),
        ({"steps": 0}, X, y, "trains no classifier"),
        ({"run": DIGITS.vary(early_stop=1, val=0)}, X, y, "early_stop=1 needs validation images"),
        ({"lr": -1.0}, X, y, "lr is -1.0; expected a number"),
    ]
    for options, images, labels, message in errors:
        with pytest.raises(ValueError, match=message):
            classifier(**options).fit(images, labels)
    fitted = classifier(steps=1).fit(X.reshape(-1, 8, 8), y)
    with pytest.raises(ValueError, match=r"images of shape \(4, 16\); expected \(8, 8, 1\)"):
        fitted.predict(X.reshape(-1, 4, 16))
    with pytest.raises(ValueError, match=r"Found array with 0 sample\(s\)"):
        fitted.predict(X[:0].reshape(0, 8, 8))
    with pytest.raises(TypeError, match="sample_weight"):
        fitted.fit(X, y, sample_weight=np.ones(300))


# The training is that of `fit`


def test_weights_equal_those_of_fit_and_nothing_is_left_behind(digits, tmp_path, monkeypatch):
    X, y = digits
    pixels = np.rint(X / 16 * 255).astype(np.uint8).reshape(-1, 8, 8)
    file = tmp_path / "digits.npz"
    np.savez(file, train_images=pixels, train_labels=y, test_images=pixels[:20], test_labels=y[:20])
    run = DIGITS.vary(data=partial(arrays, path=str(file)), val=0, seed=3, steps=20, ema=0.1)
    fit(run, tmp_path / "run")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.setattr(tempfile, "tempdir", str(empty))
    before = torch.get_rng_state()
    fitted = classifier(run=run, random_state=3).fit(pixels, y)
    assert not [*empty.iterdir()] and torch.equal(torch.get_rng_state(), before)
    expected = load(tmp_path / "run").model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in fitted.model_.state_dict().items())


def test_random_state_is_the_seed(digits):
    X, y = digits

    def predicted(**options) -> np.ndarray:
        return clone(classifier(steps=3, **options)).fit(X, y).predict_proba(X[:50])

    one, two = predicted(random_state=1), predicted(random_state=2)
    assert np.array_equal(one, predicted(random_state=1)) and not np.array_equal(one, two)
    assert np.array_equal(two, predicted(run=DIGITS.at_seed(2)))
    drawn = [predicted(random_state=np.random.RandomState(0)) for _ in range(2)]
    assert np.array_equal(*drawn) and not np.array_equal(one, drawn[0])


def test_earlier_runs_leave_out_the_validation_images_of_early_stopping():
    """An earlier run that had learned their labels would make the accuracy on them too high."""
    pretraining = DIGITS.vary(seed=5)
    arm = DIGITS.vary(init=pretraining.vary(init=pretraining), early_stop=1, val=20)
    run = on_all_images(arm)
    assert run.val == run.init.val == run.init.init.val == 20 and run.seed == run.init.seed == run.init.init.seed
    without = on_all_images(arm.vary(early_stop=0))
    assert without.val == without.init.val == 0


def test_arm_with_pretraining_teacher_and_early_stopping(digits):
    X, y = digits
    run = DIGITS.vary(steps=6)
    pretraining = run.vary(
        objective=partial(DINO, layers=1, prototypes=16), augment=augment.digit_crops(local=0), unlabelled=True, clip=0.0,
        evaluators=(knn,), batch=16,
    )  # fmt: skip
    arm = run.vary(init=pretraining, teacher=run.vary(model=SmallCNN), objective=Distill, early_stop=1)
    runs = ablate({"scratch": run, "all": arm}, labels=[20], seeds=range(6), references=False)
    entry = next(entry for entry in runs if entry.arm == "all")
    fitted = classifier(run=entry, random_state=0).fit(X, y)
    assert fitted.run_.labels is None and fitted.run_.val is None and fitted.run_.dependencies["init"].val == 0
    assert fitted.predict_proba(X).shape == (300, 10)
    with pytest.raises(ValueError, match="trains no classifier"):
        classifier(run=pretraining).fit(X, y)


def test_validation_images_are_no_copies_of_training_images(digits, monkeypatch):
    X, y = digits
    parts, subset = [], Dataset.subset
    monkeypatch.setattr(Dataset, "subset", lambda self, **options: parts.append(found := subset(self, **options)) or found)
    classifier(run=DIGITS.vary(steps=2, early_stop=1, val=20)).fit(np.repeat(X[:60], 2, axis=0), np.repeat(y[:60], 2))
    assert parts and all(not {*part.val.pixel_hashes} & {*part.train.pixel_hashes} for part in parts)


def test_balanced_class_weights_help_the_small_class(digits):
    X, y = digits
    rare = np.concatenate([np.flatnonzero(y != 8), np.flatnonzero(y == 8)[:3]])
    X, y = X[rare], (y[rare] == 8).astype(int)
    shares = [
        classifier(steps=40, run=DIGITS.vary(objective=objective, evaluators=(accuracy,))).fit(X, y).predict_proba(X)[:, 1].mean()
        for objective in (Supervised, partial(Supervised, class_weight="balanced"))
    ]
    assert shares[0] < shares[1]
