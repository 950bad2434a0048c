"""Run: one page of choices that says everything about one training; and how runs are varied, compared and written down.

A run is a plain frozen value. Its components are callables whose knobs are bound by `functools.partial`, so that a run can be
described in plain JSON (`describe`), rebuilt from it (`rebuild`), and told from another (`fingerprint`, `difference`).
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from smallvit import components
from smallvit.augment import MultiCrop
from smallvit.components import check, function, knobs, known
from smallvit.data import digits
from smallvit.evaluate import accuracy, knn, linear_probe
from smallvit.objectives import Supervised
from smallvit.pretrained import Weights
from smallvit.vit import ViT

DEPENDENCIES = ("init", "teacher")  # the fields that may hold another run
NAMING = ("arm", "role", "baseline")  # the fields of a run that decide nothing
PRECISIONS = ("fp32", "bf16")
SCHEDULES = ("constant", None)  # None: a cosine to 0
ROLES = ("baseline", "technique", "reference")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides one training. `arm`, `role` and `against` (its baseline's arm) name it and decide nothing.

    Data        `data()` loads it; `labels` labelled images, class-balanced, drawn by `seed` (None: all but the validation
                images); `val` validation images (None: a fifth of the training images, at most 1,000). `unlabelled=True`:
                train on all images but the validation images, whatever `labels` says, and read no label: targets are 0.
    Model       `model(image, channels, classes)`, usually `partial(ViT, ...)`.
    Start       `init` is the run whose weights this one starts from; it is trained first. What only this model has (a
                reduction that learns, a head for other classes) starts as in a model without `init`. Or `Weights` that were
                trained elsewhere.
    Guessing    `pseudo_labels(model, known, images)`, such as `label_spreading`, gives the images of `unlabelled=True` a label
                each by what the start says of them and of the labelled ones, before the first step; those are then learned.
    Objective   `objective(model)`; `augment` are the steps that each batch goes through first, each image its own draw.
                `teacher` is the run whose trained model a `Distill` learns from; it is trained first, and frozen.
    Length      `steps` optimizer steps of `batch` images, whatever the number of labels.
    Optimizer   AdamW with peak rate `lr`, linear warm-up over the fraction `warmup` of the steps, then a cosine to 0;
                `weight_decay` on matrices alone; `clip` is the largest norm of the gradient (0: no limit). After the warm-up
                `schedule="constant"` keeps the rate. `layer_decay=k` multiplies the rate by k for every block further from
                the head, which suits fine-tuning (BEiT, arXiv:2106.08254).
    Weights     `average` > 0 reports a running mean of the weights: plain over the first of the steps, that fraction of them,
                then exponential of that length; 0 the last weights.
    Choosing    By default nothing is chosen on the validation images. `early_stop=k` > 0 stops after k of the `CHECKS` checks
                without a better one and reports the best; those labels are then counted in the report.
    Evaluation  `evaluators`, in order; the first name that the first one yields is what the arm is judged by. None: accuracy,
                and where the objective reads no label (so that no head learns) kNN and a linear probe.

    Raises      ValueError for an unknown or impossible choice, naming the nearest right one.
    """

    arm: str = "scratch"
    role: str = "technique"
    baseline: str = ""

    data: Callable = digits
    labels: int | None = None
    val: int | None = None
    unlabelled: bool = False
    seed: int = 0
    model: Callable = ViT
    init: "Run | Weights | None" = None
    objective: Callable = Supervised
    augment: tuple[Callable, ...] = ()
    steps: int = 2_000
    batch: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.1
    clip: float = 1.0
    ema: float = 0.05
    early_stop: int = 0
    precision: str = "fp32"
    evaluators: tuple[Callable, ...] | None = None

    # later choices: None is what there was before them
    teacher: "Run | None" = None
    schedule: str | None = None
    layer_decay: float | None = None
    pseudo_labels: Callable | None = None

    def __new__(cls, **choices):
        for name in choices:
            known(name, [f.name for f in fields(cls)], "a run")
        return super().__new__(cls)

    def __post_init__(self):
        for name, low, high in LIMITS:
            in_range(getattr(self, name), low, high, name)
        for name, values in (("precision", PRECISIONS), ("role", ROLES), ("schedule", SCHEDULES)):
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(map(repr, values))}")
        if not isinstance(self.arm, str) or not self.arm.strip():
            raise ValueError(f"arm is {self.arm!r}; expected a name")
        if not isinstance(self.baseline, str):
            raise ValueError(f"against is {self.baseline!r}; expected the arm of its baseline, or nothing")
        for name in ("data", "model", "objective"):
            check(getattr(self, name), name)
        if not isinstance(self.init, Run | Weights | None):
            raise ValueError(f"init is {self.init!r}; expected the run to start from, Weights(...), or None")
        if not isinstance(self.init, Run) and getattr(function(self.objective), "needs_init", False):
            raise ValueError(f"{function(self.objective).__name__} teaches a trained model; give the run init=..., another run")
        if not isinstance(self.teacher, Run | None):
            raise ValueError(f"teacher is {self.teacher!r}; expected the run whose model teaches, or None")
        if getattr(function(self.objective), "needs_teacher", False) != (self.teacher is not None):
            name = function(self.objective).__name__
            wanted = (
                "learns from one; give the run teacher=..., another run" if self.teacher is None else "takes none; take Distill"
            )
            raise ValueError(f"teacher is {self.teacher and self.teacher.arm!r} and {name} {wanted}")
        if self.teacher is not None and not (self.teacher.reads_labels and (self.teacher.steps or self.teacher.init)):
            raise ValueError(
                f"teacher {self.teacher.arm!r} has a head that learned from no labels; expected a run that trains on them"
            )
        if self.evaluators is None:
            object.__setattr__(self, "evaluators", self.usual)
        if not isinstance(self.unlabelled, bool):
            raise ValueError(f"unlabelled is {self.unlabelled!r}; expected True or False")
        if self.unlabelled and self.reads_labels and self.teacher is None and self.pseudo_labels is None:
            name = function(self.objective).__name__
            raise ValueError(
                f"unlabelled=True but {name} reads labels; take DINO or MAE, Distill, which hears its teacher, or pseudo_labels"
            )
        if self.pseudo_labels is not None:
            check(self.pseudo_labels, "pseudo_labels")
            if not (self.unlabelled and self.init and self.reads_labels and self.steps):
                raise ValueError(
                    "pseudo_labels are for images without labels, by a model that was trained before; expected unlabelled=True,"
                    " init=..., an objective that reads labels, and steps"
                )
        for name, example in (("augment", "augment.digits()"), ("evaluators", "(accuracy, knn)")):
            object.__setattr__(self, name, checked(getattr(self, name), name, example))
        if any(isinstance(step, MultiCrop) for step in self.augment) and not getattr(
            function(self.objective), "reads_views", False
        ):
            name = function(self.objective).__name__
            raise ValueError(f"augment makes views and {name} reads none; expected changes of images, or DINO")
        if not self.evaluators:
            raise ValueError("evaluators is empty; expected at least one, such as smallvit.accuracy")
        names = [function(evaluator).__name__ for evaluator in self.evaluators]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"evaluators has {twice[0]} twice, and both call their numbers the same; expected each once")
        if not getattr(function(self.evaluators[0]), "judges", True):
            raise ValueError(f"evaluators begins with {names[0]}, which judges nothing; expected it behind another one")
        if accuracy in self.evaluators and not self.reads_labels:
            raise ValueError(
                f"accuracy asks a head that {function(self.objective).__name__} does not train; expected (knn, linear_probe)"
            )
        if self.early_stop and accuracy not in self.evaluators:
            raise ValueError(f"early_stop={self.early_stop} goes by accuracy; expected smallvit.accuracy among the evaluators")

    def at_seed(self, seed: int) -> "Run":
        """The run, and all that is trained before it, at that seed: what runs have in common that differ in nothing else."""
        return replace(self, seed=seed, **{field: run.at_seed(seed) for field, run in self.dependencies.items()})

    @property
    def dependencies(self) -> "dict[str, Run]":
        """The runs that are trained before this one, by the field that asks for them: what it starts from, who teaches it."""
        return {name: run for name in DEPENDENCIES if isinstance(run := getattr(self, name), Run)}

    @property
    def reads_labels(self) -> bool:
        """Whether the objective learns from labels; DINO and MAE do not."""
        return getattr(function(self.objective), "needs_labels", True)

    @property
    def usual(self) -> tuple[Callable, ...]:
        """What evaluates such a run unless it says otherwise."""
        return (accuracy,) if self.reads_labels else (knn, linear_probe)

    def vary(self, **changes: Any) -> "Run":
        """The same run but for `changes`: fields of the run, or knobs of its model (`attention=LocalityAttention`).

        Raises ValueError for a name that neither the run nor its model has.
        """
        own = [f.name for f in fields(self)]
        mine = {name: value for name, value in changes.items() if name in own}
        its = {name: value for name, value in changes.items() if name not in own}
        if its:
            model = mine.get("model", self.model)
            check(model, "model")
            for name in its:
                known(name, [*own, *knobs(model)], f"a run of {function(model).__name__}")
            mine["model"] = partial(model, **its)
        if "objective" in mine and self.evaluators == self.usual:
            mine.setdefault("evaluators", None)  # and then those that are usual with the new one
        return replace(self, **mine)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and fingerprint(self) == fingerprint(other)

    def __hash__(self) -> int:
        return hash(fingerprint(self))


LIMITS = (
    ("labels", 1, 10**9),
    ("val", 0, 10**9),
    ("seed", 0, 2**31),
    ("steps", 0, 10**9),
    ("batch", 1, 10**6),
    ("lr", 0.0, 10.0),
    ("weight_decay", 0.0, 10.0),
    ("warmup", 0.0, 1.0),
    ("clip", 0.0, 1e9),
    ("ema", 0.0, 1.0),
    ("early_stop", 0, 10**6),
    ("layer_decay", 0.01, 1.0),
)


def in_range(value: float | None, low: float, high: float, name: str):
    """Hold a number of a run against its limits; whole limits mean a whole number."""
    if value is None and name in ("labels", "val", "layer_decay"):
        return
    kinds, kind = (int, "a whole number") if isinstance(low, int) else (int | float, "a number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; expected {kind} from {low} to {high}")


def checked(components: Iterable[Callable], name: str, example: str) -> tuple[Callable, ...]:
    """The augmentations or evaluators of a run, each held against its signature."""
    if not isinstance(components, tuple | list):
        raise ValueError(f"{name} is {components!r}; expected a tuple, such as {example}")
    for at, step in enumerate(components):
        if isinstance(function(step), type):
            raise ValueError(f"{name}[{at}] is the class {function(step).__name__}; expected one made of it, with its knobs")
        check(step, f"{name}[{at}]")
    return tuple(components)


def describe(run: Any) -> Any:
    """The run in plain JSON, every default of every component spelled out, so that it replays when a default changes.

    Also describes a component or a plain value.
    """
    if isinstance(run, Run):
        return {f.name: describe(getattr(run, f.name)) for f in fields(run) if f.name not in NAMING}
    return components.describe(run)


def rebuild(plain: Any) -> Any:
    """The run, component or plain value that `describe` wrote down.

    Raises ValueError for whatever is neither; only components of smallvit and of loaded recipes are looked up.
    """
    if isinstance(plain, dict) and plain and not plain.keys() & {"call", "make"}:
        known = {name: value for name, value in plain.items() if value is not None or name in Run.__dataclass_fields__}
        return Run(**{name: rebuild(value) for name, value in known.items()})
    return components.rebuild(plain)


def fingerprint(run: Run) -> str:
    """16 hex digits that differ whenever two runs differ in a choice; a choice of None counts as not made."""
    plain = json.dumps(components.canonical(describe(run)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def difference(run: Run, other: Run) -> dict[str, tuple[str, str]]:
    """Where two runs differ: dotted name -> (choice here, choice there), in words."""
    return dict(components.unequal(describe(run), describe(other), ""))
