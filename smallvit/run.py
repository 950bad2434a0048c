"""Run: all settings of one training, in one frozen dataclass; how runs are varied, compared and written down.

Components (model, objective, transforms, evaluators) are callables whose options are bound by `functools.partial`. So a run can
be written as plain JSON (`describe`), rebuilt from it (`rebuild`), identified (`fingerprint`) and compared (`difference`).
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar

from smallvit import components
from smallvit.components import check, check_option, function, options
from smallvit.data import digits
from smallvit.evaluate import accuracy, declaration, knn, linear_probe
from smallvit.objectives import Objective, Supervised
from smallvit.optimizers import AdamW, Optimizer
from smallvit.pretrained import Weights
from smallvit.vit import ViT

DEPENDENCIES = ("init", "teacher")  # fields that may hold another run
DEFAULT_EVALUATORS: Any = None  # replaced by those that suit the objective


def number(default: Any, low: float, high: float) -> Any:
    """Return a dataclass field for a setting of `Run` that is a number from `low` to `high`, with the default value `default`.
    If `low` is an integer, the setting must be an integer too. None is allowed if the default is None.
    """
    return field(default=default, metadata={"low": low, "high": high})


def choice(default: str, *others: str) -> Any:
    """Return a dataclass field for a setting whose value must be one of a few strings. The first argument is the default; the
    other arguments are the other allowed strings.
    """
    return field(default=default, metadata={"allowed": (default, *others)})


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """All settings of one training run: data, model, objective, optimization and evaluation. Two runs are equal if all their
    settings are equal.

    Data        `data()` loads the data set. `labels` is the number of labelled images, class-balanced and drawn by `seed`; None
                means all but the validation images. `val` is the number of validation images; None means all that the data set
                has of its own or, if it has none, a fifth of the training images, at most 1,000. With `unlabelled=True` the
                run trains on all images but the validation images, and their labels are hidden (targets are 0).
                `pseudo_labels(model, labelled, unlabelled)`, such as `label_spreading`, then guesses those labels before the
                first step, with the model given by `init` or, without `init`, with the model of `teacher`.
    Model       `model(image, channels, classes)`, usually `partial(ViT, ...)`. `init` is another run, whose final weights are
                the initial weights of this one, or `Weights` from a file or from timm. Parts that only this model has (a
                learned reduction, a head for other classes) are initialized as usual.
    Objective   `objective(model)` computes the loss. `teacher` is the run whose trained model a `Distill` objective learns
                from, or that guesses the labels. `augment` is a tuple of transforms, applied to each batch in turn.
    Training    `steps` steps of `batch` images each, taken by `optimizer`: `AdamW`, `Muon`, `SAM` or `ScheduleFree`, or a
                `partial` of one. Peak learning rate `lr`: linear warmup over the fraction `warmup` of all steps, then a cosine
                decay to 0 (`schedule="constant"`: no decay). `weight_decay` applies to matrices and kernels only.
                `layer_decay=k` multiplies the rate by k for each block further from the head, as in fine-tuning of BEiT
                (arXiv:2106.08254). `clip` is the largest norm of the gradient; 0 means no limit. `ema` > 0 evaluates an
                exponential moving average of the weights, whose length is that fraction of all steps; 0 evaluates the last
                weights. `early_stop=k` > 0 stops when k validation checks in a row (of the 12 in a run) have brought no
                improvement, and keeps the best weights. `precision` is "fp32" or "bf16".
    Evaluation  `evaluators` measure the trained model, in this order. The first number of the first one judges the run. The
                default is accuracy; kNN and a linear probe where the objective uses no labels.

    Raises      ValueError for an unknown name, a value out of range or settings that contradict each other.
    """

    data: Callable = digits
    labels: int | None = number(None, 1, 10**9)
    val: int | None = number(None, 0, 10**9)
    unlabelled: bool = False
    pseudo_labels: Callable | None = None
    seed: int = number(0, 0, 2**31)

    model: Callable = ViT
    init: "Run | Weights | None" = None

    objective: Callable = Supervised
    teacher: "Run | None" = None
    augment: tuple[Callable, ...] = ()

    steps: int = number(2_000, 0, 10**9)
    batch: int = number(64, 1, 10**6)
    optimizer: Callable = AdamW
    lr: float = number(1e-3, 0.0, 10.0)
    warmup: float = number(0.1, 0.0, 1.0)
    schedule: str = choice("cosine", "constant")
    weight_decay: float = number(0.05, 0.0, 10.0)
    layer_decay: float | None = number(None, 0.01, 1.0)
    clip: float = number(1.0, 0.0, 1e9)
    ema: float = number(0.05, 0.0, 1.0)
    early_stop: int = number(0, 0, 10**6)
    precision: str = choice("fp32", "bf16")

    evaluators: tuple[Callable, ...] = DEFAULT_EVALUATORS

    # Options added since version 0.2.0, each with the value at which the run is what it was before: see `fingerprint`.
    added_options: ClassVar[dict[str, Any]] = {"optimizer": AdamW}

    def __new__(cls, **settings):
        for name in settings:
            check_option(name, [f.name for f in fields(cls)], "a run")
        return super().__new__(cls)

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(self, f.name, components.python_numbers(getattr(self, f.name)))
            check_value(f.name, getattr(self, f.name), f.default, f.metadata)
        for name in ("data", "model", "objective", "optimizer"):
            check(getattr(self, name), name)
        objective = function(self.objective)
        if not (isinstance(objective, type) and issubclass(objective, Objective)):
            raise ValueError(f"objective is {objective.__name__}; expected a subclass of smallvit.Objective")
        optimizer = function(self.optimizer)
        if not (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
            name = getattr(optimizer, "__name__", repr(optimizer))
            raise ValueError(f"optimizer is {name}; expected AdamW, Muon, SAM, ScheduleFree, or a subclass of one")
        if not isinstance(self.init, Run | Weights | None):
            raise ValueError(f"init is {self.init!r}; expected another run, Weights(...), or None")
        if not isinstance(self.teacher, Run | None):
            raise ValueError(f"teacher is {self.teacher!r}; expected another run, or None")
        if self.evaluators is None:
            object.__setattr__(self, "evaluators", self.default_evaluators)
        for name, example in (("augment", "augment.digits()"), ("evaluators", "(accuracy, knn)")):
            object.__setattr__(self, name, checked(getattr(self, name), name, example))
        check_evaluators(self.evaluators)
        if self.pseudo_labels is not None:
            check(self.pseudo_labels, "pseudo_labels")
            if not (self.unlabelled and (self.init or self.teacher) and self.reads_labels and self.steps):
                raise ValueError(
                    "pseudo_labels need images without labels and a trained model; expected unlabelled=True, init=... or "
                    "teacher=..., an objective that reads labels, and steps > 0"
                )
        objective.check_run(self)
        if self.optimizer is not AdamW:
            self.optimizer([{"params": []}]).check_run(self)
        if self.early_stop and accuracy not in self.evaluators:
            raise ValueError(f"early_stop={self.early_stop} compares accuracies; add smallvit.accuracy to the evaluators")

    @property
    def dependencies(self) -> "dict[str, Run]":
        """The earlier runs that must be trained before this one, as a dict. The key "init" holds the run that provides the
        initial weights, and the key "teacher" holds the run of the teacher model.

        A key is absent if the field of this name holds no run.
        """
        return {name: run for name in DEPENDENCIES if isinstance(run := getattr(self, name), Run)}

    @property
    def reads_labels(self) -> bool:
        """Whether the training objective of the run learns from labels. Self-supervised objectives, such as DINO and MAE, do
        not learn from labels.
        """
        return function(self.objective).needs_labels

    @property
    def learns_from_teacher(self) -> bool:
        """Whether the objective learns from the model of `teacher`, as `Distill` does. If not, a teacher only guesses labels.
        """
        return function(self.objective).needs_teacher

    @property
    def default_evaluators(self) -> tuple[Callable, ...]:
        """The evaluators (functions that score a trained model) of a run for which the user sets none, as a tuple. They measure
        accuracy if the objective learns from labels, otherwise kNN and a linear probe.
        """
        return (accuracy,) if self.reads_labels else (knn, linear_probe)

    @property
    def folds(self) -> int:
        """The number of folds if the data loader of the run has the option `folds` (cross-validation), otherwise 0. The seed s
        of such a run names a pass over all images, number s // folds, and a fold of it, number s % folds: its test images.
        """
        option = options(self.data).get("folds")
        return option.default if option and isinstance(option.default, int) else 0

    def at_seed(self, seed: int) -> "Run":
        """Return a copy of this run with another random seed. Earlier runs that this run needs, such as pretraining, get the
        same seed. The copies of two runs that differ only in their seed are equal if both get the same seed.
        """
        return self.throughout(lambda run: {"seed": seed})

    def throughout(self, changes: "Callable[[Run], dict[str, Any]]") -> "Run":
        """Return a copy of this run in which some settings are changed, also in the earlier runs that it needs, such as
        pretraining. `changes` is a function that returns the new settings of each of these runs, by name.
        """
        return replace(self, **changes(self), **{name: run.throughout(changes) for name, run in self.dependencies.items()})

    @property
    def stack_key(self) -> str:
        """A fingerprint (short hash) that is equal for runs that can be trained together as one model: runs that differ only
        in their random seed, their learning rate and their number of labelled images.
        """
        return fingerprint(replace(without_seed_and_labels(self), lr=1.0))

    @property
    def stackable(self) -> bool:
        """False if runs with these settings cannot be trained together as one model: they have no steps, `early_stop` ends each
        of them at another step, or their objective changes state outside the gradient step. True is no promise: random numbers
        inside the model, such as dropout, are found only when the model has been made.
        """
        return bool(self.steps) and not self.early_stop and getattr(function(self.objective), "stackable", True)

    def with_steps(self, change: Callable[[int], int]) -> "Run":
        """Return a copy of this run with another number of training steps. The function `change` converts the old number to the
        new one. Earlier runs that this run needs, such as pretraining, are changed in the same way.
        """
        return self.throughout(lambda run: {"steps": change(run.steps)})

    def with_data(self, data: Callable) -> "Run":
        """Return a copy of this run with another data set, which the function `data` loads. Earlier runs that this run needs,
        such as pretraining, are changed in the same way.
        """
        return self.throughout(lambda run: {"data": data})

    def vary(self, **changes: Any) -> "Run":
        """Return a copy of this run with some settings changed, which are given by name. They are settings of the run, such as
        `lr=1e-3`, options of its model, such as `depth=6`, or options of its optimizer, such as `rho=0.1` with `SAM`.

        Raises ValueError for a name that neither the run nor its model nor its optimizer has.
        """
        names = [f.name for f in fields(self)]
        mine = {name: value for name, value in changes.items() if name in names}
        others = {name: value for name, value in changes.items() if name not in names}
        for part in ("model", "optimizer") if others else ():
            component = mine.get(part, getattr(self, part))
            check(component, part)
            own = {name: others.pop(name) for name in options(component) if name in others}
            if own:
                mine[part] = partial(component, **own)
        for name in others:
            known = [*names, *options(mine.get("model", self.model)), *options(mine.get("optimizer", self.optimizer))]
            check_option(name, known, f"a run of {function(mine.get('model', self.model)).__name__}")
        if "objective" in mine and self.evaluators == self.default_evaluators:
            mine.setdefault("evaluators", None)  # replaced by the default evaluators of the new objective
        return replace(self, **mine)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and fingerprint(self) == fingerprint(other)

    def __hash__(self) -> int:
        return hash(fingerprint(self))


def check_value(name: str, value: Any, default: Any, limits: Any):
    """Raise ValueError if `value` is not allowed for the setting of `Run` with this `name` and this `default`. `limits` is a
    dict with the smallest and the largest number (`low` and `high`), with the allowed strings (`allowed`), or without limits.
    """
    if "allowed" in limits and value not in limits["allowed"]:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(map(repr, limits['allowed']))}")
    if isinstance(default, bool) and not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; expected True or False")
    if "low" not in limits or (value is None and default is None):
        return
    low, high = limits["low"], limits["high"]
    types, expected = ((int,), "a whole number") if isinstance(low, int) else ((int, float), "a number")
    if isinstance(value, bool) or not isinstance(value, types) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; expected {expected} from {low} to {high}")


def checked(parts: Iterable[Callable], name: str, example: str) -> tuple[Callable, ...]:
    """Check that all given transforms or evaluators can be used in a run, and return them as a tuple. `name` is the setting of
    the run, "augment" or "evaluators", and `example` is a correct value of it as text. Both appear in the error message.

    Raises ValueError if one of them cannot be used.
    """
    if not isinstance(parts, tuple | list):
        raise ValueError(f"{name} is {parts!r}; expected a tuple, such as {example}")
    for index, part in enumerate(parts):
        if isinstance(function(part), type):
            raise ValueError(f"{name}[{index}] is the class {function(part).__name__}; expected an instance of it")
        check(part, f"{name}[{index}]")
    return tuple(parts)


def check_evaluators(evaluators: tuple[Callable, ...]):
    """Raise ValueError unless the evaluators of a run (functions that score a trained model) are usable. There must be at least
    one, and none may occur twice. The first one judges the run, so it must report a number such as an accuracy.
    """
    if not evaluators:
        raise ValueError("evaluators is empty; expected at least one, such as smallvit.accuracy")
    names = [function(evaluator).__name__ for evaluator in evaluators]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"evaluators has {repeated[0]} twice, and both report the same names; expected each once")
    if not declaration(evaluators[0]).judges:
        raise ValueError(f"evaluators begins with {names[0]}, which cannot judge a run; expected another one before it")


def describe(run: Any) -> Any:
    """Return a description of a run, of a component (such as a model or a transform) or of a plain value as JSON data. It
    contains all settings, also those with their default value.

    So the description stays valid when a default changes later.
    """
    if isinstance(run, Run):
        return {f.name: describe(getattr(run, f.name)) for f in fields(run)}
    return components.describe(run)


def rebuild(plain: Any) -> Any:
    """Return the run, component (such as a model or a transform) or plain value that a description in JSON data stands for.
    This is the inverse of `describe`.

    A setting that smallvit did not have at the time of the description gets the value that keeps the old behavior.

    Only components of smallvit and of loaded recipes are looked up. Raises ValueError for anything else.
    """
    if isinstance(plain, dict) and plain and not plain.keys() & {"call", "make"}:
        settings = {name: value for name, value in plain.items() if value is not None or name in Run.__dataclass_fields__}
        return Run(**Run.added_options | {name: rebuild(value) for name, value in settings.items()})
    return components.rebuild(plain)


def fingerprint(run: Run) -> str:
    """Return a hash of the settings of a run, as a text of 16 hexadecimal digits. Runs with equal settings have equal
    fingerprints. Runs with different settings have different ones, except for options that do not change the result, such as
    `cache` of `folder`.

    A new option does not change the fingerprints of existing runs: an option that is None counts as absent, and so does one
    that has the value given in `added_options` of its component (or of `Run`).
    """
    return hashlib.sha256(json.dumps(canonical(run), sort_keys=True).encode()).hexdigest()[:16]


def without_seed_and_labels(run: Run) -> Run:
    """Return a copy of a run with seed 0 and `labels=None`. The earlier runs that it needs, such as pretraining, are changed in
    the same way. Runs that differ only in their seed and number of labelled images become equal, so they count as one setting.
    """
    return run.throughout(lambda each: {"seed": 0, "labels": None})


def canonical(run: Run) -> dict[str, Any]:
    """Return the settings of a run as JSON data in a fixed form, from which the hash of the run (its fingerprint) is computed.
    Settings that are None are left out.

    Newer options that have their old value are left out, too. The same holds in the earlier runs that this run depends on.
    """
    old = {name: describe(value) for name, value in Run.added_options.items()}
    plain = {name: value for name, value in describe(run).items() if name not in old or value != old[name]}
    return components.canonical(plain | {name: canonical(other) for name, other in run.dependencies.items() if name in plain})


def difference(run: Run, other: Run) -> dict[str, tuple[str, str]]:
    """Return the settings in which two runs differ, as a dict from a name such as `model.depth` to a pair of texts: the value
    in `run` and the value in `other`.
    """
    found = components.differences(describe(run), describe(other))
    return {name: (components.describe_value(one), components.describe_value(two)) for name, (one, two) in found.items()}
