"""Train a small model with every two techniques of different slots, and write to a page which of them work together.

    python docs/combinations.py

writes the block between `<!-- combinations -->` and `<!-- end -->` in `docs/howto/combine_slots.md`. A test compares it with
what the library does.

The techniques are found in the library: all objectives, all optimizers, and all public names that are created with the
arguments of one of the `SLOTS`. A technique that needs options to work in a small model gets them in `OPTIONS`.
"""

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

import smallvit
from smallvit import DINO, DeepEnsemble, Objective, Optimizer, PatchEmbed, Run, ViT, augment, to_timm
from smallvit.components import MODULES, function, options
from smallvit.data import Dataset
from smallvit.native import reason_against, reason_against_block
from smallvit.numerics import DEFAULT, Numerics
from smallvit.train.loop import Training
from smallvit.train.stack import NotStackable, Stack
from smallvit.train.trained_model import TrainedModel
from smallvit.vit import ACTIVATIONS, Blocks

PAGE = Path(__file__).parent / "howto" / "combine_slots.md"

# slot -> the arguments without a default with which a technique of this slot is created; None: see `slot_of`
SLOTS: dict[str, tuple[str, ...] | None] = {
    "tokenizer": ("image", "channels", "dim"),
    "position": ("dim", "grid", "prefix"),
    "position in attention": ("heads", "head_dim", "grid", "prefix"),
    "attention": ("dim", "heads"),
    "initialization of attention": None,
    "reduction": ("context",),
    "pool": ("dim",),
    "block": ("dim", "heads", "attention", "reduction", "drop_path"),
    "activation": None,
    "objective": None,
    "optimizer": None,
    "model": ("image", "channels", "classes"),
}
NONE = {  # what a slot is called on the page if it is empty
    "position": "no positions",
    "position in attention": "no positions in attention",
    "initialization of attention": "default initialization",
    "reduction": "no reduction",
}
NO_TECHNIQUES = {  # public names beside techniques. `Pixels` has no weights; a `ResNet` is slow and trains like `SmallCNN`
    "AttentionOutput", "LayerContext", "Objective", "Optimizer", "Pixels", "Places", "ResNet", "initialize",
}  # fmt: skip
# technique -> options with which it works, and acts, in a model of 3 x 3 patches and two blocks. A name with brackets is a
# further entry in the table, for a setting of a technique that works with other techniques than its default.
OPTIONS: dict[str, dict[str, Any]] = {
    "Block(norm_first=False)": {"norm_first": False},
    "ConvStem": {"layers": 2},
    "ConvTokenizer": {"hidden": 8},
    "DeepEnsemble": {"of": partial(ViT, dim=32, depth=1, heads=2), "count": 2},
    "DINO": {"prototypes": 16, "hidden": 16, "bottleneck": 8},
    "DINO(patches=1)": {"prototypes": 16, "hidden": 16, "bottleneck": 8, "patches": 1.0},
    "Distill(token=True)": {"token": True},
    "EachMember": {"of": partial(DINO, prototypes=16, hidden=16, bottleneck=8)},
    "LeJEPA": {"hidden": 16},
    "LearnedPrune": {"layers": (0,)},
    "LearnedThresholds": {"merge": 0.2, "prune": 0.8},
    "Merge": {"r": 2},
    "PatchEmbed": {"patch": 4},
    "Projected": {"hidden": 16},
    "Prune": {"layers": (0,)},
    "Resized": {"tokenizer": partial(PatchEmbed, patch=4), "size": 12},
    "SemiSupervised": {"weak": (), "ratio": 1},
    "ShiftedPatchEmbed": {"patch": 4},
}
# technique -> what it needs in other slots
TOGETHER = {
    "Distill(token=True)": {"pool": "DistilledTokens"},
    "EachMember": {"model": "DeepEnsemble"},
    "LearnToPrune": {"reduction": "LearnedPrune"},
    "LearnThresholds": {"reduction": "LearnedThresholds"},
}
SMALL = Run(  # a run that all optimizers accept
    model=partial(ViT, dim=32, depth=2, heads=2), labels=16, val=4, steps=2, batch=4, schedule="constant", ema=0.0
)

Names = dict[str, str]  # slot -> name of a technique


# Techniques


def slot_of(thing: Any) -> str | None:
    """The slot of a public name of smallvit, or None if it is no technique of a slot."""
    if isinstance(thing, type) and issubclass(thing, Objective | Optimizer):
        return "objective" if issubclass(thing, Objective) else "optimizer"
    parameters = inspect.signature(thing).parameters.values() if callable(thing) else ()
    required = tuple(p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty)
    if required == SLOTS["attention"] and "attention" in inspect.signature(thing).parameters:
        return "initialization of attention"
    return next((slot for slot, arguments in SLOTS.items() if arguments and arguments == required), None)


def public_techniques() -> dict[str, list[Any]]:
    """The public classes and functions of each slot.

    Raises ValueError for a public name beside techniques that seems to be none.
    """
    found: dict[str, list[Any]] = {slot: [] for slot in SLOTS}
    for module in MODULES:
        things = [getattr(smallvit, name) for name in smallvit.NAMES.get(module, ()) if name not in NO_TECHNIQUES]
        slots = [slot_of(thing) for thing in things]
        if any(slots) and None in slots:
            name = things[slots.index(None)].__name__
            raise ValueError(
                f"smallvit.{module}.{name} stands beside techniques and is created with other arguments; expected those of a"
                " slot in SLOTS, or its name in NO_TECHNIQUES, both in docs/combinations.py"
            )
        for thing, slot in zip(things, slots):
            if slot is not None:
                found[slot].append(thing)
    return found


@cache
def choices() -> dict[str, dict[str, Any]]:
    """All techniques: slot -> name -> what is given to a run, the default of the library first. An empty slot is None.

    Raises ValueError for a technique that has options without a default and is not in OPTIONS.
    """
    parts: dict[str, Any] = {name: p.default for name, p in options(ViT).items()}
    parts |= {name: getattr(SMALL, name) for name in ("objective", "optimizer", "model")}
    defaults = {slot: getattr(function(parts.get(slot)), "__name__", NONE.get(slot)) for slot in SLOTS}
    found: dict[str, dict[str, Any]] = {}
    for slot, things in public_techniques().items():
        entries: dict[str, Any] = {NONE[slot]: None} if slot in NONE else {}
        for thing in things:
            needed = [name for name, p in options(thing).items() if p.default is p.empty]
            if missing := [name for name in needed if name not in OPTIONS.get(thing.__name__, {})]:
                raise ValueError(f"{thing.__name__} needs {', '.join(missing)}; add it to OPTIONS in docs/combinations.py")
            names = [thing.__name__, *(name for name in OPTIONS if name.startswith(f"{thing.__name__}("))]
            entries |= {name: partial(thing, **OPTIONS.get(name, {})) for name in names}
        found[slot] = dict(sorted(entries.items(), key=lambda entry: entry[0] != defaults[slot]))
    return found | {"activation": {name: name for name in ACTIVATIONS}}


def with_defaults(chosen: Mapping[str, str]) -> Names:
    """A technique for each slot: the chosen ones, what they need in other slots, and otherwise the defaults."""
    together = [TOGETHER.get(name, {}) for name in chosen.values()]
    defaults = {slot: next(iter(entries)) for slot, entries in choices().items()}
    return {slot: next((part[slot] for part in (chosen, *together) if slot in part), name) for slot, name in defaults.items()}


def run_with(names: Names) -> Run:
    """A run with these techniques, and with a teacher, an earlier run or views if the objective needs them."""
    part = {slot: choices()[slot][name] for slot, name in names.items()}
    objective: Any = part["objective"].func
    more = {"objective": part["objective"], "optimizer": part["optimizer"]}
    more |= {"augment": augment.digit_crops(local=1, size=12)} if objective.needs_views else {}
    more |= {"init": SMALL} if objective.needs_init else {}
    more |= {"teacher": SMALL} if objective.needs_teacher else {}
    if part["model"].func not in (ViT, DeepEnsemble):
        return SMALL.vary(model=part["model"], **more)
    attention = part["attention"]
    if part["position in attention"] is not None:
        attention = partial(attention, position=part["position in attention"])
    if part["initialization of attention"] is not None:
        attention = partial(part["initialization of attention"], attention=attention)
    block = partial(part["block"], activation=part["activation"])
    slots = {slot: part[slot] for slot in ("tokenizer", "position", "reduction", "pool")}
    vit = SMALL.vary(attention=attention, block=block, **slots).model
    return SMALL.vary(model=vit if part["model"].func is ViT else partial(part["model"], of=vit), **more)


# Training


@cache
def data() -> Dataset:
    """Random images of 12 x 12 pixels in four classes."""
    rng = np.random.default_rng(0)
    splits = {part: (rng.integers(0, 256, (24, 12, 12), dtype=np.uint8), np.arange(24) % 4) for part in ("train", "test")}
    return Dataset.from_arrays("random", splits, ("a", "b", "c", "d"))


def prepared(run: Run, seed: int = 0, numerics: Numerics = DEFAULT) -> Training:
    """A training before its first step, on 16 of the images."""
    subset = data().subset(labels=run.labels, val=run.val, seed=seed)
    made = Training(run.at_seed(seed) if seed else run, data(), subset, "cpu", numerics=numerics)
    made.objective.train()
    return made


def train_one_step(run: Run, numerics: Numerics = DEFAULT):
    """Train a run for one step.

    Raises AssertionError if the loss or a gradient is not finite, or if all gradients are 0.
    """
    made = prepared(run, numerics=numerics)
    made.train_step()
    gradients = [p.grad for p in made.parameters if p.grad is not None]
    assert all(number.isfinite().all() for number in (made.loss, *gradients)), "the loss or a gradient is not finite"
    assert any(gradient.any() for gradient in gradients), "all gradients are 0"


def refusal(run_of: Callable[[], Run]) -> str | None:
    """The message with which smallvit refuses to train a run, or None if a step was trained. Other errors are raised."""
    try:
        train_one_step(run_of())
    except ValueError as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if not Path(raised_in).is_relative_to(Path(smallvit.__file__).parent):
            raise
        return str(error)
    return None


Pair = tuple[tuple[str, str], tuple[str, str]]  # slot and name of two techniques


@cache
def outcomes() -> dict[Pair, str | None]:
    """Each pair of techniques from two slots with the message of the library if it is refused, or None if it was trained. A
    model without the slots of a ViT is combined with objectives and optimizers only.

    Raises AssertionError if another error than a ValueError of smallvit occurs, or if a technique is refused alone.
    """
    known: dict[tuple, str | None] = {}
    found: dict[Pair, str | None] = {}
    wrong = []
    for slots in combinations(SLOTS, 2):
        if slots[1] == "model" and slots[0] not in ("objective", "optimizer"):
            continue
        for names in product(*(choices()[slot] for slot in slots)):
            chosen = with_defaults(dict(zip(slots, names)))
            key = tuple(chosen.items())
            if key not in known:
                try:
                    known[key] = refusal(partial(run_with, chosen))
                except Exception as error:
                    wrong.append(f"{' with '.join(names)}: {type(error).__name__}: {error}")
                    known[key] = None
            found[(slots[0], names[0]), (slots[1], names[1])] = known[key]
    for slot, names in choices().items():
        for name in names:
            if message := known[tuple(with_defaults({slot: name}).items())]:
                wrong.append(f"{name} needs options in OPTIONS or another technique in TOGETHER: {message}")
    assert not wrong, "expected a step or a ValueError of smallvit:\n" + "\n".join(wrong)
    return found


# Other features of the library, for each technique alone


def reason_against_stack(run: Run) -> str | None:
    """Why two seeds of a run are not trained together as one model, or None if they took a step."""
    try:
        stack = Stack([prepared(run, seed) for seed in (0, 1)])
    except NotStackable as error:
        return str(error)
    stack.train_step()
    assert all(member.loss.isfinite() for member in stack.members), "a loss is not finite"
    return None


def reason_against_native(run: Run) -> str | None:
    """Why PyTorch computes blocks of a run with `kernel=native`, or None if the kernel computes all of them."""
    lists = [module for module in prepared(run).objective.modules() if isinstance(module, Blocks)]
    reasons = [reason_against_block(block) for blocks in lists for block in blocks]
    if not reasons:
        return "the model has no transformer blocks"
    if not any(reasons) and not reason_against():
        train_one_step(run, Numerics(kernel="native"))
    return next(filter(None, reasons), None)


def reason_against_export(run: Run) -> str | None:
    """Why the trained model of a run cannot be exported to ONNX, or None if it can."""
    return message_of(partial(TrainedModel.check_classes, SimpleNamespace(run=run)))


def reason_against_timm(run: Run) -> str | None:
    """Why the model of a run cannot become a model of timm, or None if it can."""
    return message_of(partial(to_timm, run.model((12, 12), 1, 4)))


def message_of(call: Callable[[], Any]) -> str | None:
    """The message of the ValueError that a call raises, or None if it raises none."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


class Feature(NamedTuple):
    """A feature of the library that works with some techniques."""

    against: Callable[[Run], str | None]  # returns what is against it
    meaning: str  # of "no" in the table
    reasons: bool = True  # whether the page lists them


FEATURES = {
    "`--stack`": Feature(
        reason_against_stack,
        "trains runs that differ in seed, learning rate or number of labels as one model. *No*: they are trained one by one.",
    ),
    "native kernel": Feature(
        reason_against_native,
        "(`--numerics kernel=native`) computes blocks by C++ code. *No*: PyTorch computes some or all of the blocks.",
    ),
    "ONNX": Feature(reason_against_export, "(`smallvit export`) writes the trained model to a file. *No*: it is refused."),
    "`to_timm`": Feature(
        reason_against_timm, "makes a model of timm. *No*: it is refused, with an error that names the parts.", reasons=False
    ),
}


@cache
def features() -> dict[tuple[str, str], tuple[str | None, ...]]:
    """For each technique, by slot and name, what is against each of FEATURES. None means that it works."""
    known: dict[tuple, tuple[str | None, ...]] = {}
    found: dict[tuple[str, str], tuple[str | None, ...]] = {}
    for slot, name in ((slot, name) for slot, names in choices().items() for name in names):
        chosen = with_defaults({slot: name})
        key = tuple(chosen.items())  # the same for all defaults
        if key not in known:
            known[key] = tuple(feature.against(run_with(chosen)) for feature in FEATURES.values())
        found[slot, name] = known[key]
    return found


# The page


def shown(name: str) -> str:
    """The name of a technique as Markdown."""
    return name if name in NONE.values() else f"`{name}`"


def listed(names: Iterable[str]) -> str:
    """Names of techniques as Markdown, separated by commas."""
    return ", ".join(map(shown, names))


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table. Bars in cells are escaped."""
    header = list(header)
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pairs_of(slot: str, other: str) -> dict[tuple[str, str], str | None]:
    """The outcomes of all pairs of techniques of two slots, by their names. Empty if the slots are not combined."""
    return {(a, b): found for ((s, a), (t, b)), found in outcomes().items() if (s, t) == (slot, other)}


def counts_table() -> str:
    """The table of the slots of which not all pairs of techniques train, with the number of pairs that do."""
    rows = []
    for slot, other in combinations(SLOTS, 2):
        found = pairs_of(slot, other)
        trained = sum(message is None for message in found.values())
        if trained < len(found):
            rows.append([slot, other, f"{trained} of {len(found)}"])
    return table(["slot", "other slot", "combinations that train"], rows)


class Refusal(NamedTuple):
    """Techniques that are refused with each of some techniques of another slot, with the message for the first pair."""

    names: list[str]
    refused: list[str]
    instead: list[str]  # those of the other slot that are trained with all `names`
    message: str


def skeleton(message: str) -> str:
    """A message with a sign in the place of names of techniques and numbers. Equal ones are shown once."""
    names = {re.escape(name.partition("(")[0]) for entries in choices().values() for name in entries}
    return re.sub(rf"\b({'|'.join(names)}|\d+)\b", "#", message)


def refusals(slot: str, other: str) -> list[Refusal]:
    """The refused pairs of two slots, in as few entries as possible."""
    found = pairs_of(slot, other)
    groups: dict[str, list[tuple[str, str]]] = {}
    for pair, message in found.items():
        if message is not None:
            groups.setdefault(skeleton(message), []).append(pair)

    def trained_with(names: Iterable[str], own: int) -> list[str]:
        """The techniques that are trained with all `names`, which are of `slot` (own=0) or of `other` (own=1)."""
        partners = choices()[(other, slot)[own]]
        return [partner for partner in partners if all(found[(name, partner)[:: 1 - 2 * own]] is None for name in names)]

    def entries(pairs: list[tuple[str, str]], own: int) -> list[Refusal]:
        """The refused pairs, where techniques that are refused with the same others are one entry."""
        partners: dict[str, list[str]] = {}
        for pair in pairs:
            partners.setdefault(pair[own], []).append(pair[1 - own])
        result = []
        for refused in dict.fromkeys(map(tuple, partners.values())):
            names = [name for name, those in partners.items() if tuple(those) == refused]
            ways_out = filter(None, [trained_with(names, own), trained_with(refused, 1 - own)])
            instead = min(ways_out, key=lambda those: (set(those) <= set(NONE.values()), len(those)), default=[])
            result.append(Refusal(names, list(refused), instead, found[(names[0], refused[0])[:: 1 - 2 * own]] or ""))
        return result

    return [entry for pairs in groups.values() for entry in min((entries(pairs, own) for own in (0, 1)), key=len)]


def refusal_table() -> str:
    """The table of all refused pairs."""
    found = [refusal for slot, other in combinations(SLOTS, 2) for refusal in refusals(slot, other)]
    rows = [[listed(r.names), listed(r.refused), listed(r.instead), r.message] for r in found]
    return table(["technique", "not with", "works instead", "error message"], rows)


def feature_table() -> str:
    """The table of the techniques that work with each of FEATURES, and the reasons against those that do not."""
    rows: list[list[str]] = []
    for slot, names in choices().items():
        alike: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            alike.setdefault(tuple("no" if reason else "yes" for reason in features()[slot, name]), []).append(name)
        rows += [[slot, listed(those), *marks] for marks, those in alike.items()]
    lines = [table(["slot", "techniques", *FEATURES], rows), ""]
    for place, (title, feature) in enumerate(FEATURES.items()):
        lines.append(f"- {title} {feature.meaning}")
        alike_reasons: dict[str, list[tuple[str, str]]] = {}
        for (_, name), found in features().items():
            if (reason := found[place]) and feature.reasons:
                alike_reasons.setdefault(skeleton(reason), []).append((name, reason))
        lines += [f"  - {listed(name for name, _ in those)}: {those[0][1]}" for those in alike_reasons.values()]
    return "\n".join(lines)


def content() -> str:
    """The generated part of the page."""
    trained = sum(message is None for message in outcomes().values())
    return INTRODUCTION.format(
        techniques=sum(map(len, choices().values())), slots=len(SLOTS), trained=trained, refused=len(outcomes()) - trained,
        counts=counts_table(), refusals=refusal_table(), features=feature_table(),
    )  # fmt: skip


INTRODUCTION = """\
The library has {techniques} techniques and settings in {slots} slots. A small model was trained for one step with every two of
them from different slots, but models only with objectives and optimizers. **{trained:,} combinations train, and {refused} are
refused** with an error message, before the first step or in it. In these pairs of slots, some combinations are refused; in all
other pairs that were tried, all combinations train:

{counts}

The techniques of each slot are listed [below](#other-features).

### Refused combinations

Two techniques of different slots work together unless a row of this table says that one is *not with* the other.

{refusals}

### Other features

{features}"""


def with_content(page: str) -> str:
    """The text of a page with the block between `<!-- combinations -->` and `<!-- end -->` written again."""
    start, end = "<!-- combinations -->\n", "<!-- end -->"
    before, rest = page.split(start)
    return f"{before}{start}{content()}\n{end}{rest.split(end, 1)[1]}"


if __name__ == "__main__":
    PAGE.write_text(with_content(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
