"""Run: one page of choices that says everything about one training; and how runs are varied, compared and written down.

A run is a plain frozen value. Its components are callables whose knobs are bound by `functools.partial`, so that a run can be
described in plain JSON (`describe`), rebuilt from it (`rebuild`), and told from another (`fingerprint`, `difference`).
"""

import functools
import hashlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any

from smallvit.data import digits
from smallvit.evaluate import accuracy, knn, linear_probe
from smallvit.floors import Pixels, SmallCNN
from smallvit.objectives import Supervised
from smallvit.vit import ViT

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides one training. `arm` and `role` name it and decide nothing.

    Data        `data()` loads it; `labels` labelled images, class-balanced, drawn by `seed` (None: all but the validation
                images); `val` validation images (None: a fifth of the training images, at most 1,000).
    Model       `model(image, channels, classes)`, usually `partial(ViT, ...)`.
    Objective   `objective(model)`; `augment` are the steps that each batch goes through first, each image its own draw.
    Length      `steps` optimizer steps of `batch` images, whatever the number of labels.
    Optimizer   AdamW with peak rate `lr`, linear warm-up over the fraction `warmup` of the steps, then a cosine to 0;
                `weight_decay` on matrices alone; `clip` is the largest norm of the gradient (0: no limit).
    Weights     `average` > 0 reports the running mean of the weights over that fraction of the steps; 0 the last weights.
    Choosing    By default nothing is chosen on the validation images. `early_stop=k` > 0 stops after k of the `CHECKS` checks
                without a better one and reports the best; those labels are then counted in the report.
    Evaluation  `evaluators`, in order; the first name that the first one yields is what the arm is judged by.

    Raises      ValueError for an unknown or impossible choice, naming the nearest right one.
    """

    arm: str = "scratch"
    role: str = "technique"

    data: Callable = digits
    labels: int | None = None
    val: int | None = None
    seed: int = 0
    model: Callable = ViT
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
    evaluators: tuple[Callable, ...] = (accuracy,)

    def __new__(cls, **choices):
        for name in choices:
            known(name, [f.name for f in fields(cls)], "a run")
        return super().__new__(cls)

    def __post_init__(self):
        for name in ("augment", "evaluators"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, low, high in LIMITS:
            value = getattr(self, name)
            number = isinstance(value, int) if type(low) is int else isinstance(value, int | float)
            if value is None and name in ("labels", "val"):
                continue
            if isinstance(value, bool) or not number or not low <= value <= high:
                kind = "a whole number" if type(low) is int else "a number"
                raise ValueError(f"{name} is {value!r}; expected {kind} from {low} to {high}")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; expected one of {', '.join(PRECISIONS)}")
        if not self.evaluators:
            raise ValueError("evaluators is empty; expected at least one, such as smallvit.accuracy")
        for name in ("data", "model", "objective"):
            check(getattr(self, name), name)
        for name in ("augment", "evaluators"):
            for at, step in enumerate(getattr(self, name)):
                check(step, f"{name}[{at}]")

    def vary(self, **changes: Any) -> "Run":
        """The same run but for `changes`: fields of the run, or knobs of its model (`attention=LocalityAttention`).

        Raises ValueError for a name that neither the run nor its model has.
        """
        own = [f.name for f in fields(self)]
        mine = {name: value for name, value in changes.items() if name in own}
        its = {name: value for name, value in changes.items() if name not in own}
        if its:
            model = mine.get("model", self.model)
            for name in its:
                known(name, [*own, *knobs(model)], f"a run of {function(model).__name__}")
            mine["model"] = partial(model, **its)
        return replace(self, **mine)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and describe(self) == describe(other)

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


def ablate(
    arms: dict[str, Run], *, labels: Iterable[int | None] = (None,), seeds: Iterable[int] = range(8), floors: bool = True
) -> list[Run]:
    """Every arm for every number of labels and every seed; the first arm is the baseline of all differences.

    The floors stand in every comparison unless `floors=False`: raw pixels under logistic regression and under kNN, and a small
    CNN trained as the baseline is. Seeds come outermost within a number of labels, so that a half-finished recipe already compares
    all arms.

    Raises ValueError if two arms are the same run under two names.
    """
    if not arms:
        raise ValueError("ablate got no arms; expected a dict from names to runs, the baseline first")
    baseline = next(iter(arms.values()))
    named = {name: (run, "technique" if at else "baseline") for at, (name, run) in enumerate(arms.items())}
    if floors:
        named |= {name: (run, "floor") for name, run in the_floors(baseline).items() if name not in named}
    same: dict[str, str] = {}
    for name, (run, _) in named.items():
        other = same.setdefault(fingerprint(run), name)
        if other != name:
            raise ValueError(
                f"the arms {other!r} and {name!r} are the same run; expected them to differ in at least one choice"
            )
    seeds = list(seeds)
    return [
        replace(run, arm=name, role=role, labels=count, seed=seed)
        for count in labels
        for seed in seeds
        for name, (run, role) in named.items()
    ]


def the_floors(baseline: Run) -> dict[str, Run]:
    """The arms that a ViT has to beat, on the data of the baseline."""
    pixels = replace(baseline, model=Pixels, steps=0, augment=(), average=0.0, early_stop=0, objective=Supervised)
    return {
        "pixels, logistic regression": replace(pixels, evaluators=(partial(linear_probe, standardise=False),)),
        "pixels, nearest neighbour": replace(pixels, evaluators=(knn,)),
        "small CNN": replace(baseline, model=SmallCNN, objective=Supervised, evaluators=(accuracy,)),
    }


# A run in plain JSON, and back.

ROOMS = (
    "attention",
    "augment",
    "data",
    "evaluate",
    "floors",
    "objectives",
    "pooling",
    "positions",
    "reduction",
    "tokenizers",
    "vit",
)


def describe(value: Any) -> Any:
    """The value in plain JSON, every default spelled out, so that a run replays when a default changes.

    A component is `{"call": "smallvit.tokenizers.PatchEmbed", "patch": 7, ...}`; one that is already made (an augmentation) is
    `{"make": ..., ...}`; a run is its fields.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [describe(item) for item in value]
    if isinstance(value, Run):
        return {f.name: describe(getattr(value, f.name)) for f in fields(value) if f.name not in ("arm", "role")}
    if is_dataclass(value) and not isinstance(value, type):
        return {"make": address(type(value))} | {f.name: describe(getattr(value, f.name)) for f in fields(value)}
    if callable(value):
        chosen = {name: p.default for name, p in sorted(knobs(value).items()) if p.default is not p.empty}
        return {"call": address(function(value))} | {name: describe(knob) for name, knob in chosen.items()}
    raise ValueError(f"cannot describe {value!r}; expected a plain value, a function or class, or a partial of one")


def rebuild(plain: Any) -> Any:
    """The value that `describe` wrote down. Only names of components in `smallvit` and in loaded recipes are looked up."""
    if isinstance(plain, list):
        return tuple(rebuild(item) for item in plain)
    if not isinstance(plain, dict):
        return plain
    rest = {name: rebuild(value) for name, value in plain.items() if name not in ("call", "make")}
    if "make" in plain:
        return component(plain["make"])(**rest)
    if "call" in plain:
        return partial(component(plain["call"]), **rest) if rest else component(plain["call"])
    return Run(**rest)


def fingerprint(run: Run) -> str:
    """16 hex digits that differ whenever two runs differ in a choice; a choice of None counts as not made."""
    plain = json.dumps(without_none(describe(run)), sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:16]


def difference(run: Run, other: Run) -> dict[str, tuple[str, str]]:
    """Where two runs differ: dotted name -> (choice here, choice there), in words."""
    return dict(unequal(describe(run), describe(other), ""))


def unequal(here: Any, there: Any, name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    same_kind = isinstance(here, dict) and isinstance(there, dict)
    if same_kind and all(here.get(kind) == there.get(kind) for kind in ("call", "make")):
        for key in here | there:
            yield from unequal(here.get(key), there.get(key), f"{name}.{key}".lstrip("."))
    elif here != there:
        yield name, (in_words(here), in_words(there))


def in_words(plain: Any) -> str:
    """A described value as one would say it: `ShiftedPatchEmbed(norm=True, patch=7)`."""
    if isinstance(plain, list):
        return ", ".join(map(in_words, plain)) or "none"
    if not isinstance(plain, dict):
        return repr(plain) if isinstance(plain, str) else str(plain)
    name = (plain.get("call") or plain.get("make") or "Run").rpartition(".")[2]
    knobs = [
        f"{key}={in_words(knob)}"
        for key, knob in plain.items()
        if key not in ("call", "make") and not isinstance(knob, dict) and knob is not None
    ]
    return f"{name}({', '.join(knobs)})" if knobs else name


def address(thing: Callable) -> str:
    """The public name under which a component is found again: `smallvit.<room>.Name`, however many files the room has."""
    if "<" in thing.__qualname__:
        raise ValueError(
            f"{thing.__qualname__} is a lambda or a local function and cannot stand in a record; define it at the top level of the recipe"
        )
    name = ".".join([*thing.__module__.split(".")[:2], thing.__qualname__])
    if component(name) is not thing:
        raise ValueError(f"{name} is not what its name leads to; define it once, at the top level of its file")
    return name


def component(name: str) -> Callable:
    """The class or function of that name. A record must not reach anything else: it is data from somewhere.

    Raises ValueError for all but the public classes and functions of the component files and of the loaded recipes.
    """
    package, _, rest = name.partition(".")
    room, _, attribute = rest.partition(".")
    module = f"{package}.{room}"
    if not (package == "smallvit" and room in ROOMS) and not (package == "recipes" and module in sys.modules):
        raise ValueError(
            f"{name!r} is outside the component files of smallvit and the loaded recipes; expected smallvit.<{'|'.join(ROOMS)}>.Name"
            " or recipes.<file>.Name"
        )
    found = vars(importlib.import_module(module)).get(attribute)
    home = getattr(found, "__module__", None) or ""
    if not callable(found) or attribute.startswith("_") or not f"{home}.".startswith(f"{module}."):
        raise ValueError(
            f"{module} has no component {attribute!r}; expected a public class or function defined at its top level, no lambda"
        )
    return found


def check(component: Any, where: str):
    """Hold every knob of a component, however deep, against its signature."""
    if isinstance(component, partial):
        if component.args:
            raise ValueError(f"{where} binds {component.args!r} by position; expected every knob by name")
        for name, knob in component.keywords.items():
            known(name, knobs(function(component)), function(component).__name__)
            if isinstance(knob, partial):
                check(knob, f"{where}.{name}")
    elif not callable(component):
        raise ValueError(f"{where} is {component!r}; expected a function or class, or functools.partial of one with its knobs")
    describe(component)


def function(component: Callable) -> Callable:
    """The class or function under any number of partials."""
    while isinstance(component, functools.partial):
        component = component.func
    return component


def knobs(component: Callable) -> dict[str, inspect.Parameter]:
    """What a recipe may choose of a component, with the defaults in force: all but the shapes, which have no default."""
    signature = inspect.signature(component)
    return {name: p for name, p in signature.parameters.items() if p.kind == p.KEYWORD_ONLY or p.default is not p.empty}


def known(name: str, names: Iterable[str], owner: str):
    names = list(names)
    if name not in names:
        near = get_close_matches(name, names, 1, 0.5)
        advice = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(sorted(names))}"
        raise ValueError(f"{owner} has no choice {name!r}; {advice}")


def without_none(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: without_none(value) for name, value in plain.items() if value is not None}
    return [without_none(item) for item in plain] if isinstance(plain, list) else plain
