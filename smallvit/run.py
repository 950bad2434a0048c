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
from smallvit.components import check, function, knobs, known
from smallvit.data import digits
from smallvit.evaluate import accuracy, few_shot, knn, linear_probe
from smallvit.floors import Pixels, SmallCNN
from smallvit.objectives import Supervised
from smallvit.vit import ViT

NAMING = ("arm", "role", "against")  # the fields of a run that decide nothing
PRECISIONS = ("fp32", "bf16")
ROLES = ("baseline", "technique", "floor")
RANDOM = "random initialisation"  # the floor of what is probed


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides one training. `arm`, `role` and `against` (its baseline's arm) name it and decide nothing.

    Data        `data()` loads it; `labels` labelled images, class-balanced, drawn by `seed` (None: all but the validation
                images); `val` validation images (None: a fifth of the training images, at most 1,000). `unlabelled=True`:
                train on all images but the validation images, whatever `labels` says, and read no label.
    Model       `model(image, channels, classes)`, usually `partial(ViT, ...)`.
    Start       `init` is the run whose weights this one starts from; it is trained first. What only this model has (a
                reduction that learns, a head for other classes) starts as in a model without `init`.
    Objective   `objective(model)`; `augment` are the steps that each batch goes through first, each image its own draw.
    Length      `steps` optimizer steps of `batch` images, whatever the number of labels.
    Optimizer   AdamW with peak rate `lr`, linear warm-up over the fraction `warmup` of the steps, then a cosine to 0;
                `weight_decay` on matrices alone; `clip` is the largest norm of the gradient (0: no limit).
    Weights     `average` > 0 reports the running mean of the weights over that fraction of the steps; 0 the last weights.
    Choosing    By default nothing is chosen on the validation images. `early_stop=k` > 0 stops after k of the `CHECKS` checks
                without a better one and reports the best; those labels are then counted in the report.
    Evaluation  `evaluators`, in order; the first name that the first one yields is what the arm is judged by. None: accuracy,
                and where the objective reads no label (so that no head learns) kNN and a linear probe.

    Raises      ValueError for an unknown or impossible choice, naming the nearest right one.
    """

    arm: str = "scratch"
    role: str = "technique"
    against: str = ""

    data: Callable = digits
    labels: int | None = None
    val: int | None = None
    unlabelled: bool = False
    seed: int = 0
    model: Callable = ViT
    init: "Run | None" = None
    objective: Callable = Supervised
    augment: tuple[Callable, ...] = ()
    steps: int = 2_000
    batch: int = 64
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.1
    clip: float = 1.0
    average: float = 0.05
    early_stop: int = 0
    precision: str = "fp32"
    evaluators: tuple[Callable, ...] | None = None

    def __new__(cls, **choices):
        for name in choices:
            known(name, [f.name for f in fields(cls)], "a run")
        return super().__new__(cls)

    def __post_init__(self):
        for name, low, high in LIMITS:
            in_range(getattr(self, name), low, high, name)
        for name, values in (("precision", PRECISIONS), ("role", ROLES)):
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(values)}")
        if not isinstance(self.arm, str) or not self.arm.strip():
            raise ValueError(f"arm is {self.arm!r}; expected a name")
        if not isinstance(self.against, str):
            raise ValueError(f"against is {self.against!r}; expected the arm of its baseline, or nothing")
        for name in ("data", "model", "objective"):
            check(getattr(self, name), name)
        if not isinstance(self.init, Run | None):
            raise ValueError(f"init is {self.init!r}; expected the run to start from, or None")
        if self.init is None and getattr(function(self.objective), "needs_init", False):
            raise ValueError(f"{function(self.objective).__name__} teaches a trained model; give the run init=..., another run")
        if self.evaluators is None:
            object.__setattr__(self, "evaluators", self.usual)
        if not isinstance(self.unlabelled, bool):
            raise ValueError(f"unlabelled is {self.unlabelled!r}; expected True or False")
        if self.unlabelled and self.reads_labels:
            raise ValueError(f"unlabelled=True but {function(self.objective).__name__} reads labels; take DINO or MAE")
        for name, example in (("augment", "augment.digits()"), ("evaluators", "(accuracy, knn)")):
            object.__setattr__(self, name, checked(getattr(self, name), name, example))
        if not self.evaluators:
            raise ValueError("evaluators is empty; expected at least one, such as smallvit.accuracy")
        if accuracy in self.evaluators and not self.reads_labels:
            raise ValueError(
                f"accuracy asks a head that {function(self.objective).__name__} does not train; expected (knn, linear_probe)"
            )
        if self.early_stop and accuracy not in self.evaluators:
            raise ValueError(f"early_stop={self.early_stop} goes by accuracy; expected smallvit.accuracy among the evaluators")

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
    ("average", 0.0, 1.0),
    ("early_stop", 0, 10**6),
)


def in_range(value: float | None, low: float, high: float, name: str):
    """Hold a number of a run against its limits; whole limits mean a whole number."""
    if value is None and name in ("labels", "val"):
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


def ablate(
    arms: dict[str, Run], *, labels: Iterable[int | None] = (None,), seeds: Iterable[int] = range(8), floors: bool = True
) -> list[Run]:
    """Every arm for every number of labels and every seed; the first arm is the baseline of all differences.

    The floors stand in every comparison unless `floors=False`: raw pixels under logistic regression and under kNN, a small CNN
    trained as the baseline is, and where an arm is judged by a probe the same probe of its random weights. Seeds come
    outermost within a number of labels, so that a half-finished recipe already compares all arms.

    Raises ValueError if two arms are the same run under two names, if an arm bears a floor's name or asks for another number of
    labels, and if a seed or a number of labels is given twice: one run is not two.
    """
    labels, seeds = several(labels, "labels"), several(seeds, "seeds")
    if not arms or not isinstance(arms, dict) or not all(isinstance(run, Run) for run in arms.values()):
        raise ValueError(f"ablate got the arms {arms!r}; expected a dict from names to runs, the baseline first")
    for name, run in arms.items():
        if run.labels not in (None, *labels):
            raise ValueError(
                f"arm {name!r} has labels={run.labels}, ablate labels={labels}; give the numbers of labels to ablate alone"
            )
    named = {name: (run, "technique" if at else "baseline") for at, (name, run) in enumerate(arms.items())}
    if floors:
        for name, run in the_floors(list(arms.values())).items():
            if name in named:
                raise ValueError(
                    f"the arm {name!r} has the name of a floor; give it another, or leave the floors out: floors=False"
                )
            named[name] = (run, "floor")
    same: dict[str, str] = {}
    for name, (run, _) in named.items():
        other = same.setdefault(fingerprint(placed(run, None, 0)), name)
        if other != name:
            raise ValueError(
                f"the arms {other!r} and {name!r} are the same run; expected them to differ in at least one choice"
            )
    runs = [
        placed(replace(run, arm=name, role=role, against=next(iter(arms))), count, seed)
        for count in labels
        for seed in seeds
        for name, (run, role) in named.items()
    ]
    names = {fingerprint(run): run.arm for run in runs}
    for run in runs:
        start = run.init
        while start is not None:
            names.setdefault(fingerprint(start), f"start of {run.arm}")
            start = start.init
    return [replace(run, init=called(run.init, names)) for run in runs]


def called(start: Run | None, names: dict[str, str]) -> Run | None:
    """A start by its name, that of its arm if it is one, so that it is trained once; and so whatever it starts from."""
    return start and replace(start, arm=names[fingerprint(start)], init=called(start.init, names))


def placed(run: Run, labels: int | None, seed: int) -> Run:
    """The run at that seed and number of labels, and so what it starts from, unless that has a number of labels of its own.

    A start that trains on all images unlabelled is one for all numbers of labels.
    """
    start = run.init and placed(run.init, run.init.labels or (None if run.init.unlabelled else labels), seed)
    return replace(run, labels=labels, seed=seed, init=start)


def several(values: Iterable, name: str) -> list:
    """The values as a list, each there once."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}; expected several, such as {name}=[{values!r}]")
    values = list(values)
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} are {values}; expected at least one, and each once")
    return values


def the_floors(arms: list[Run]) -> dict[str, Run]:
    """What a ViT has to beat, on the data of the baseline, the first arm; where an arm is probed, also its random weights."""
    baseline = arms[0]
    supervised = {"init": None, "objective": Supervised, "unlabelled": False}
    untrained = supervised | {"steps": 0, "augment": (), "average": 0.0, "early_stop": 0}
    pixels = replace(baseline, model=Pixels, **untrained, evaluators=(knn,))
    few = next((e for run in arms for e in run.evaluators if function(e) is few_shot), None)
    asked = {name: knob for name, knob in getattr(few, "keywords", {}).items() if name in ("shots", "draws", "strength")}
    few = () if few is None else (partial(few_shot, **asked),)  # pixels have neither layers nor a class token
    floors = {
        "pixels, logistic regression": replace(pixels, evaluators=(partial(linear_probe, standardise=False), *few)),
        "pixels, nearest neighbour": pixels,
        "small CNN": replace(baseline, model=SmallCNN, **supervised, evaluators=(accuracy,)),
    }
    probed = next((run for run in arms if function(run.evaluators[0]) in (knn, linear_probe, few_shot)), None)
    return floors if probed is None else floors | {RANDOM: replace(probed, **untrained)}


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
        return Run(**{name: rebuild(value) for name, value in plain.items()})
    return components.rebuild(plain)


def fingerprint(run: Run) -> str:
    """16 hex digits that differ whenever two runs differ in a choice; a choice of None counts as not made."""
    plain = json.dumps(components.canonical(describe(run)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def difference(run: Run, other: Run) -> dict[str, tuple[str, str]]:
    """Where two runs differ: dotted name -> (choice here, choice there), in words."""
    return dict(components.unequal(describe(run), describe(other), ""))
