"""Evaluators: functions that compute named numbers from a frozen model.

scores.py     accuracy, augmented_accuracy, cost: run the model itself; predictions: its class probabilities
metrics.py    balanced_accuracy, macro_f1, auc, log_loss, calibration: other metrics of the model itself
probes.py     knn, linear_probe, few_shot: train a simple classifier on frozen features
hooks.py      features: the features of a model, read at a named place
extractor.py  FeatureExtractor: the features as a scikit-learn transformer
splits.py     Splits: the labelled images that an evaluator receives; PerImage: a score that is a mean over images
declare.py    evaluator, declaration: what an evaluator declares about itself
cache.py      cached_features: evaluators of the same model share its features

An evaluator is a function that yields pairs of a name and a number:

    from smallvit.evaluate import evaluator, features

    @evaluator(judges=False)
    def feature_size(model, splits, *, of="head"):
        rows = features(model, splits.test, of=of)
        yield "feature_norm", float((rows**2).sum(1).mean() ** 0.5)
        yield "feature_width", float(rows.shape[1])

    Run(..., evaluators=(accuracy, feature_size))

Contract of `evaluator(model, splits, **options)`:

- It yields `(name, float)` pairs with unique names. Options are keyword-only and set by `functools.partial`.
- The numbers are computed on `splits.test`. A classifier is fitted on `splits.train`, and its options are chosen on
  `splits.val`. `fit` calls each evaluator with the validation images as `test` first, and once with the test images at the end.
- The first number of the first evaluator judges the run; it must be a share from 0 to 1. If smaller numbers are better, the
  evaluator declares `lower_is_better=True`, and the number may be any from 0 on. An evaluator with other numbers declares
  `judges=False` and cannot come first.
- A number that is the mean of one value for each test image may be yielded as `PerImage(values)`, which is a float. The record
  keeps the values of the judging number, and a verdict then speaks of new images too.
- It is deterministic (only `cost` measures time) and leaves the model bitwise unchanged, including the mode and hooks of each
  module: `with frozen(model) as reference` ensures the modes. An evaluator that changes a model must copy it first, since
  features and probes are cached for all evaluators of a run.
- It declares by the decorator `evaluator(...)` what differs from the defaults of `Declaration`: `probe` (trains a classifier
  on frozen features), `head` (reads the logits of the model), `judges`, `chooses` (what is chosen on validation images; the
  report then counts these labels too), `needs` (checks the splits before training), `pixel_options` and `lower_is_better`. A
  function without the decorator has the defaults.
"""

from typing import TYPE_CHECKING, Any

from .cache import cached_features
from .declare import Declaration, declaration, evaluator
from .hooks import check_features_exist, features, frozen
from .metrics import METRICS, auc, balanced_accuracy, calibration, confusion, log_loss, macro_f1, probe_metric, reliability
from .probes import few_shot, knn, linear_probe
from .scores import accuracy, augmented_accuracy, cost, predictions
from .splits import NamedScores, PerImage, Splits, require_images

if TYPE_CHECKING:
    from .extractor import FeatureExtractor

__all__ = [
    "METRICS",
    "Declaration",
    "FeatureExtractor",
    "NamedScores",
    "PerImage",
    "Splits",
    "accuracy",
    "auc",
    "augmented_accuracy",
    "balanced_accuracy",
    "cached_features",
    "calibration",
    "check_features_exist",
    "confusion",
    "cost",
    "declaration",
    "evaluator",
    "features",
    "few_shot",
    "frozen",
    "knn",
    "linear_probe",
    "log_loss",
    "macro_f1",
    "predictions",
    "probe_metric",
    "reliability",
    "require_images",
]


def __getattr__(name: str) -> Any:  # imported at first use, because its file imports scikit-learn
    if name != "FeatureExtractor":
        raise AttributeError(f"smallvit.evaluate has no {name!r}; it offers {', '.join(__all__)}")
    from .extractor import FeatureExtractor

    return FeatureExtractor
