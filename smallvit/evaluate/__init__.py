"""Evaluators: from a frozen model to named numbers.

splits.py      Splits: the labelled images that an evaluator is given
scores.py      accuracy, cost: what the model does as it is, and what that takes
taps.py        features: what a frozen model says of each image, read off where one wants
probes.py      knn, linear_probe, few_shot: how well simple classifiers do on these features
extractor.py   FeatureExtractor: the features in a pipeline of scikit-learn
memory.py      remembering: what one evaluator has computed of a model, the next need not

Contract: `evaluator(model, splits)` yields `(name, float)` and scores `splits.test`; the first name is the one an arm is judged
by. It is deterministic and leaves the model bit for bit as it was. `fit` calls it with validation images in the place of the
test images first, and with the test images once, last. An evaluator that chooses something on `splits.val` says what in its
attribute `chooses`; the report then counts those labels too. Only `cost`, which reads a clock, is not deterministic. What is
asked of a model twice is computed once (`memory.py`), so that an evaluator which changes a model must work on a copy. One
with `judges = False` cannot come first; one with `needs(splits)` refuses there what it cannot do, before a run is trained.
"""

from .declare import Declaration, declaration, evaluator
from .features import FeatureExtractor
from .hooks import features, frozen
from .memory import remembering
from .probes import few_shot, knn, linear_probe
from .scores import accuracy, cost
from .splits import Named, Splits, some

__all__ = [
    "Declaration",
    "FeatureExtractor",
    "Named",
    "Splits",
    "accuracy",
    "cost",
    "declaration",
    "evaluator",
    "features",
    "few_shot",
    "frozen",
    "knn",
    "linear_probe",
    "remembering",
    "some",
]
