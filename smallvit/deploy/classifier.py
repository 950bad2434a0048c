"""SmallViTClassifier: a run as a classifier for scikit-learn, which is trained on arrays in memory."""

from dataclasses import replace
from math import isqrt, prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from smallvit.ablation import ArmRun
from smallvit.baselines import small_vit
from smallvit.data import Dataset, Preprocess, sealed_test_images
from smallvit.record import WEIGHTS
from smallvit.run import Run
from smallvit.train.fit import training_allowed
from smallvit.train.loop import Training, train
from smallvit.train.trained_model import save_weights, trains_classifier

PREDICTED_TOGETHER = 256  # images in one forward pass
ROUNDING = 1e-6  # how far pixels may leave [0, 1]: the 256 levels to which they are rounded are the same


class SmallViTClassifier(ClassifierMixin, BaseEstimator):
    """An image classifier for scikit-learn. `fit` trains the model of a run (the settings of one training) on arrays.

        classifier = SmallViTClassifier(steps=500, rescale=True, random_state=0)
        cross_val_score(classifier, *load_digits(return_X_y=True))

    `X` holds images (n, height, width) or (n, height, width, channels), or one row for each image, (n, features), which is
    reshaped. Pixels are bytes (uint8) or floats in [0, 1]; training and prediction round floats to 256 levels. Labels are
    texts, whole numbers, truth values or dates; an array of the type object may hold texts only, as in scikit-learn. The
    training code is that of `smallvit.fit`. No file is left behind.

    All images of `X` are training images with labels: `labels` and `data` of the run are not used. A run with `early_stop` sets
    aside validation images from `X`, as many as its `val` says; identical images stay on one side. Earlier runs that the run
    needs, such as pretraining or a teacher, are trained on `X` first.

    run           the settings, a `Run` or an arm of a recipe (an `ArmRun`); None: a small ViT for images of this size
    steps         number of training steps; None: that of the run (1,000 if `run` is None)
    batch         number of images in a training step; None: that of the run
    lr            peak learning rate; None: that of the run
    image_shape   (height, width) or (height, width, channels) to which each row of `X` is reshaped. One number may be -1: it is
                  computed. If `X` holds images, it must be their shape. None: the shape of the images or, for rows, gray square
                  images
    rescale       True: `fit` finds the smallest and the largest value in `X`, and the values between them become pixels from 0
                  to 1. Values outside, in later images, are clipped. False: other values than bytes and [0, 1] are an error
    random_state  the seed of the run: a whole number, a numpy RandomState, or None for the seed that the run has
    device        "cpu", "cuda", "mps" or "auto", for the training; predictions are made on the CPU

    After `fit`: `classes_` (the labels, sorted), `n_features_in_` (number of values of an image), `feature_names_in_` (names of
    the columns, if `X` was a table with names), `image_shape_` (height, width, channels), `run_` (the run that was trained),
    `model_` (the PyTorch module) and `preprocess_` (turns pixels into the input of `model_`).

    Departs   There is no `sample_weight`: a training step draws a batch, so a weight of 2 could not equal an image given twice.
    Raises    ValueError for images or labels that cannot be used, and for a run that trains no classifier.
    """

    def __init__(
        self,
        run: Run | ArmRun | None = None,
        *,
        steps: int | None = None,
        batch: int | None = None,
        lr: float | None = None,
        image_shape: tuple[int, ...] | None = None,
        rescale: bool = False,
        random_state: Any = None,
        device: str = "cpu",
    ):
        self.run = run
        self.steps = steps
        self.batch = batch
        self.lr = lr
        self.image_shape = image_shape
        self.rescale = rescale
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> "SmallViTClassifier":
        """Train the model on the images `X` with the labels `y`, and return the classifier itself."""
        rows, shape = as_rows(X)
        X, y = validate_data(self, rows, y)
        try:
            check_classification_targets(y)
            self.classes_, labels = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        except TypeError as error:
            kinds = ", ".join(sorted({type(label).__name__ for label in np.ravel(y)}))
            raise ValueError(f"y has labels of types that cannot be sorted together ({kinds}); expected one type") from error
        if len(self.classes_) < 2:
            raise ValueError(f"y has 1 class, {self.classes_.tolist()[0]!r}; expected images of at least 2 classes")
        self.image_shape_ = whole_shape(X.shape[1], shape, self.image_shape)
        self.range_ = (float(X.min()), float(X.max())) if self.rescale else None
        self.run_ = self._settings()
        arrays = self._bytes(X), labels.astype(np.int64)
        names = tuple(map(str, self.classes_))
        # a data set has test images; these are never opened
        parts = {"train": arrays, "test": (arrays[0][:1], arrays[1][:1])}
        data = Dataset.from_arrays("X", parts, names).with_repeats_together()
        reason = "SmallViTClassifier has no test images"
        with TemporaryDirectory() as folder, training_allowed(), sealed_test_images(reason):
            model = trained(self.run_, data, Path(folder), self.device).model
        self.model_ = model.cpu().eval().requires_grad_(False)
        self.model_.zero_grad()
        self.preprocess_ = Preprocess.from_spec(data.spec)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class for each image in `X`, as an array (images, classes). The order of the classes
        is that of the attribute `classes_`.
        """
        check_is_fitted(self)
        rows, shape = as_rows(X)
        if shape and (*shape, 1)[:3] != self.image_shape_:
            raise ValueError(f"X has images of shape {shape}; expected {self.image_shape_}, as in fit")
        inputs = self.preprocess_(self._bytes(validate_data(self, rows, reset=False)))
        with torch.no_grad():
            logits = torch.cat([self.model_(part) for part in inputs.split(PREDICTED_TOGETHER)])
        return logits.double().softmax(-1).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each image in `X`, as an array (images)."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    def _settings(self) -> Run:
        """Return the run that `fit` trains: that of the parameter `run`, with the other parameters and without a choice of
        labelled images. Raise ValueError if it is no run, or if it trains no classifier.
        """
        run = self.run.run if isinstance(self.run, ArmRun) else self.run
        if run is None:
            run = Run(model=small_vit(self.image_shape_[:2]), steps=1_000, batch=32, lr=2e-3)
        if not isinstance(run, Run):
            raise ValueError(f"run is {run!r:.60}; expected a smallvit.Run, an arm of a recipe, or None")
        given = {"steps": self.steps, "batch": self.batch, "lr": self.lr}
        run = replace(run, **{name: value for name, value in given.items() if value is not None})
        if not trains_classifier(run):
            raise ValueError("run trains no classifier; expected an objective that reads labels, and steps > 0")
        if self.random_state is None:
            return on_all_images(run)
        is_seed = isinstance(self.random_state, int | np.integer)
        seed = self.random_state if is_seed else check_random_state(self.random_state).randint(2**31 - 1)
        return on_all_images(run.at_seed(int(seed)))

    def _bytes(self, X: Any) -> np.ndarray:
        """Return images as bytes (images, height, width, channels). `X` holds the values of one image in each row. Raise
        ValueError for values that are no pixels.
        """
        if self.range_ is not None:
            low, high = self.range_
            X = ((X - low) / (high - low or 1.0)).clip(0, 1)
        elif X.dtype != np.uint8 and not (X.min() >= -ROUNDING and X.max() <= 1 + ROUNDING):
            raise ValueError(
                f"X has values from {X.min():.4g} to {X.max():.4g} of type {X.dtype}; expected uint8, or floats in [0, 1]; "
                "SmallViTClassifier(rescale=True) scales other values"
            )
        X = X if X.dtype == np.uint8 else np.rint(X * 255).astype(np.uint8)
        return X.reshape(-1, *self.image_shape_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags


def as_rows(X: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Return images (n, height, width) or (n, height, width, channels) as rows (n, features), and the shape of an image. Any
    other `X` is returned as it is, with None, so that scikit-learn checks it.
    """
    X = X if hasattr(X, "ndim") else np.asarray(X)
    return (np.asarray(X).reshape(len(X), prod(X.shape[1:])), tuple(X.shape[1:])) if X.ndim > 2 else (X, None)


def whole_shape(features: int, found: tuple[int, ...] | None, given: tuple[int, ...] | None) -> tuple[int, int, int]:
    """Return the shape of an image as (height, width, channels). `features` is the number of its values, `found` is the shape
    of the images that the user passed (None for rows), and `given` is the parameter `image_shape` of the classifier.

    Raises ValueError if `given` is no tuple of whole numbers, if the values do not fill this shape, if the images have another
    shape, or if rows without a given shape are no square.
    """
    is_tuple = isinstance(given, tuple | list) and all(isinstance(size, int | np.integer) for size in given)
    if given is not None and not is_tuple:
        raise ValueError(
            f"image_shape is {given!r}; expected (height, width) or (height, width, channels) in pixels, such as (28, 28)"
        )
    shape = given or found
    if shape is None:
        side = isqrt(features)
        if side**2 != features:
            raise ValueError(f"a row of X has {features} features, which is no square image; set image_shape=(height, width)")
        return side, side, 1
    known = prod(size for size in shape if size != -1)
    unknown = [*shape].count(-1)
    if len(shape) not in (2, 3) or unknown > 1 or min(shape) < -1 or known < 1 or known * (features // known) != features:
        known = 0
    if not known or (not unknown and known != features):
        source = "image_shape is" if given else "X has images of shape"
        raise ValueError(
            f"{source} {tuple(shape)} for {features} values; expected (height, width) or (height, width, channels) with as many"
        )
    height, width, channels = [features // known if size == -1 else int(size) for size in (*shape, 1)][:3]
    if found and (*found, 1)[:3] != (height, width, channels):
        raise ValueError(
            f"image_shape is {tuple(given or ())}, but X has images of shape {found}; expected equal shapes, (height, width) "
            "or (height, width, channels); leave image_shape out, and move the channels of X to the last axis if they are first"
        )
    return height, width, channels


def on_all_images(run: Run, later: Run | None = None) -> Run:
    """Return a copy of `run` that trains on all images of its data set. Only a run with early stopping keeps validation images.
    Earlier runs that this run needs, such as pretraining, are changed in the same way. If they read labels, they leave out the
    validation images of a run with early stopping that starts from them (`later`): it would already know these images, and
    stop too early.
    """
    images: dict = {"val": run.val if run.early_stop else 0}
    if later is not None and run.reads_labels:
        images = {"val": later.val, "seed": later.seed}
    stopping = later or (run if run.early_stop else None)
    earlier = {name: on_all_images(other, stopping) for name, other in run.dependencies.items()}
    return replace(run, labels=None, **images, **earlier)


def trained(run: Run, data: Dataset, folder: Path, device: str) -> Training:
    """Train a run on a data set in memory and return its `Training` object, without a record (saved results). `data` is the
    data set, which replaces that of the run, `folder` is an empty folder for temporary files, and `device` is a torch device.

    Earlier runs that the run needs, such as pretraining, are trained first, on the same data.
    """
    places = {}
    for name, other in run.dependencies.items():
        places[name] = folder / name
        places[name].mkdir()
        save_weights(places[name] / WEIGHTS, trained(other, data, places[name], device).model, other, data.spec)
    subset = data.subset(labels=run.labels, val=run.val, seed=run.seed)
    if run.early_stop and not len(subset.val):
        raise ValueError(f"early_stop={run.early_stop} needs validation images, and {len(data.train)} images are too few")
    training = Training(run, data, subset, device, places.get("init"), places.get("teacher"))
    train([training], training.train_step, lambda step, accuracy: None)
    return training
