"""Runs: every choice is held against what there is, written down whole, rebuilt alike, and nothing else can be called from a record."""

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass, fields, is_dataclass
from functools import partial

import pytest
from torch import nn

import smallvit
from smallvit import (
    DINO,
    Attention,
    Block,
    Distill,
    LearnThresholds,
    LearnToPrune,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    Pixels,
    Run,
    ShiftedPatchEmbed,
    SinCos2d,
    SmallCNN,
    Supervised,
    ViT,
    ablate,
    accuracy,
    arrays,
    augment,
    cost,
    describe,
    difference,
    digits,
    few_shot,
    fingerprint,
    folder,
    knn,
    label_spreading,
    linear_probe,
    mnist,
    rebuild,
)
from smallvit.components import ROOMS, VALUES, component, function, knobs, own_arguments
from smallvit.recipe import definitions

# As much nesting as there is: partials in partials, tuples, augmentations, None where a default is something.
RICH = Run(
    data=partial(mnist, root="/somewhere"),
    labels=100,
    val=0,
    model=partial(
        ViT,
        tokenizer=partial(ShiftedPatchEmbed, patch=7, norm=False),
        block=partial(Block, mlp_ratio=2.0, layer_scale=1e-4),
        attention=partial(LocalityAttention, mask_self=False),
        position=None,
        reduction=partial(Merge, r=(0.25, 2)),
        drop_path=(0.0, 0.1),
        depth=2,
    ),
    init=Run(steps=10),
    augment=(*augment.photos(), augment.Warp(rotate=10, fill="edge")),
    evaluators=(accuracy, partial(knn, ks=(1, 3)), linear_probe),
)
NAMES = [f.name for f in fields(Run)]


def misspellings(name: str) -> list[str]:
    """All ways to leave out one letter or to swap two."""
    deleted = {name[:i] + name[i + 1 :] for i in range(len(name))}
    swapped = {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1)}
    return sorted((deleted | swapped) - {name, ""})


def refused(build, *words: str) -> str:
    with pytest.raises(ValueError) as raised:
        build()
    assert all(word in str(raised.value) for word in words), raised.value
    return str(raised.value)


# Names


def test_a_misspelt_field_is_refused_and_the_right_one_named():
    found = [(name, wrong) for name in NAMES for wrong in misspellings(name)]
    assert len(NAMES) == 26 and len(found) >= 200
    for name, wrong in found:
        refused(lambda wrong=wrong: Run(**{wrong: 1}), f"a run has no choice {wrong!r}; did you mean {name!r}?")
        refused(lambda wrong=wrong: Run().vary(**{wrong: 1}), f"did you mean {name!r}?")


def test_a_misspelt_knob_of_the_model_is_refused_and_the_right_one_named():
    found = [(name, wrong) for name in knobs(ViT) for wrong in misspellings(name)]
    assert len(knobs(ViT)) >= 13 and len(found) >= 170
    for name, wrong in found:
        refused(lambda wrong=wrong: Run().vary(**{wrong: 1}), f"a run of ViT has no choice {wrong!r}; did you mean {name!r}?")
        refused(
            lambda wrong=wrong: Run(model=partial(ViT, **{wrong: 1})), f"ViT has no choice {wrong!r}; did you mean {name!r}?"
        )


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patc=2))), ("PatchEmbed", "'patc'", "'patch'")),
        (lambda: Run(model=partial(ViT, attention=partial(Attention, qknorm=True))), ("Attention", "'qk_norm'")),
        (lambda: Run(model=partial(ViT, block=partial(Block, drop_path=0.1))), ("Block has no choice 'drop_path'",)),
        (lambda: Run(evaluators=(accuracy, partial(knn, k=5))), ("knn", "'ks'")),
        (lambda: Run(data=partial(folder, pat="x")), ("folder", "'path'")),
        (lambda: Run(objective=partial(Supervised, zzz=1)), ("Supervised", "'zzz'")),
        (lambda: Run(zzz=1), ("a run", "expected one of", "weight_decay")),
        (lambda: Run(model=partial(ViT, channels=3)), ("ViT has no choice 'channels'",)),  # a shape is not the recipe's to choose
        (lambda: Run(model=partial(ViT, (8, 8))), ("model binds ((8, 8),) by position", "by name")),
        (lambda: Run(model=partial(ViT, tokenizer=partial(PatchEmbed, 7))), ("model.tokenizer", "by name")),
        (lambda: Run(model=partial(ViT, tokenizer=PatchEmbed)), ("model.tokenizer has no 'patch'", "partial(PatchEmbed, patch=...)")),
        (lambda: Run(data=folder), ("data has no 'path'", "partial(folder, path=...)")),
    ],
)  # fmt: skip
def test_knobs_are_checked_however_deep(build, words):
    refused(build, *words)


def test_a_loader_may_be_given_what_it_needs():
    for run in (
        Run(data=partial(folder, path="x", size=(8, 8))),
        Run(data=partial(arrays, path="x.npz")),
        Run(data=partial(mnist, root="x")),
    ):
        assert rebuild(describe(run)) == run != Run()
        assert rebuild(describe(run)).data.keywords["path" if "path" in run.data.keywords else "root"].startswith("x")


# Types and ranges

WRONG = {
    "arm": [3, None, "", "  "],
    "role": ["winner", None, 1],
    "baseline": [],
    "data": [3, None, "digits", digits()],
    "labels": [0, -1, 1.5, "100", True, 10**10, [100]],
    "val": [-1, 0.2, "all", False],
    "unlabelled": [1, None, "yes", True],
    "seed": [-1, 0.0, None, "0", 2**31 + 1],
    "model": ["ViT", None, nn.Linear(2, 2), ViT((8, 8), 1, 10)],
    "init": ["scratch", 3, ViT, {"lr": 0.1}],
    "objective": ["supervised", None, 0],
    "augment": [None, "digits", augment.digits, augment.Warp(), (None,), ("flip",), (augment.Warp,), (partial(augment.Warp, rotate=5),)],
    "steps": [-1, 1.0, None, "10"],
    "batch": [0, 0.5, None],
    "lr": [-0.1, 11, float("nan"), float("inf"), "1e-3", None, True],
    "weight_decay": [-1e-9, float("nan"), None],
    "warmup": [-0.1, 1.1, None],
    "clip": [-1, float("inf"), None],
    "ema": [-0.1, 1.5, None, False],
    "early_stop": [-1, 0.5, None, True],
    "precision": ["fp16", None, 32, ["fp32"]],
    "evaluators": [(), accuracy, "accuracy", (3,), {accuracy}],
    "teacher": ["resnet", 3, ViT, Run()],
    "schedule": ["linear", "", 1],
    "layer_decay": [0.0, 1.5, "0.75", True],
    "pseudo_labels": ["spread", 3, label_spreading],
}  # fmt: skip


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name, values in WRONG.items() for value in values],
    ids=lambda x: re.sub(" at 0x.*", "", str(x)),
)
def test_a_choice_of_the_wrong_kind_or_size_is_refused_by_name(name, value):
    assert list(WRONG) == NAMES
    refused(lambda: Run(**{name: value}), name if not isinstance(value, nn.Module) else "neither a function nor a class")


@pytest.mark.parametrize("objective", [LearnToPrune, partial(LearnThresholds, budget=0.5)], ids=["prune", "thresholds"])
def test_an_objective_that_teaches_a_trained_model_needs_one(objective):
    refused(lambda: Run(objective=objective), "teaches a trained model", "init=...")
    assert Run(objective=objective, init=Run()).objective is objective


def test_who_learns_from_a_teacher_needs_one_and_nobody_else_takes_one():
    refused(lambda: Run(objective=Distill), "teacher is None and Distill learns from one", "teacher=...")
    refused(lambda: Run(teacher=Run(arm="cnn")), "teacher is 'cnn' and Supervised takes none; take Distill")
    assert list(Run(objective=Distill, teacher=Run()).before) == ["teacher"]


@pytest.mark.parametrize("name", [3, None, ["a"]], ids=str)
def test_the_name_of_the_baseline_is_a_name(name):
    refused(lambda: Run(baseline=name), "baseline")


@pytest.mark.parametrize(
    "name, value",
    [("labels", 1), ("val", 0), ("val", None), ("warmup", 0), ("warmup", 1.0), ("lr", 10), ("seed", 2**31), ("clip", 0)],
)
def test_the_ends_of_a_range_belong_to_it(name, value):
    assert getattr(Run(**{name: value}), name) == value


def test_stopping_early_needs_the_accuracy_that_it_goes_by():
    refused(lambda: Run(early_stop=3, evaluators=(knn,)), "early_stop=3", "smallvit.accuracy")
    assert Run(early_stop=3, evaluators=(knn, accuracy)).early_stop == 3


def double(x):
    return x


@pytest.mark.parametrize(
    "thing, words",
    [
        (lambda *shape: None, ("lambda or a local function", "top level of the recipe")),
        (partial(lambda *shape: None), ("lambda or a local function", "top level of the recipe")),
        (partial(ViT, tokenizer=lambda *shape: None), ("lambda or a local function", "top level of the recipe")),
        (double, ("test_run.double", "recipes.<file>.Name")),
        (nn.Linear, ("torch.nn.Linear", "recipes.<file>.Name")),
        (print, ("builtins.print", "recipes.<file>.Name")),
        (dict, ("builtins.dict",)),
        ("".join, ("recipes.<file>.Name",)),
        (Run.vary, ("smallvit.run.Run.vary",)),
        (ViT.forward, ("no component 'ViT.forward'", "top level")),
    ],
    ids=lambda x: "",
)
def test_what_a_record_cannot_name_is_refused_with_what_to_do(thing, words):
    refused(lambda: Run(model=thing), *words)


def test_a_local_class_is_refused_too():
    class Mine(nn.Module):
        pass

    @dataclass(frozen=True)
    class Step:
        def __call__(self, batch, generator):
            return batch

    refused(lambda: Run(model=Mine), "Mine is a lambda or a local function", "top level of the recipe")
    refused(lambda: Run(augment=(Step(),)), "Step is a lambda or a local function", "top level of the recipe")


@pytest.mark.parametrize(
    "knob", [float("nan"), -float("inf"), {"a": 1}, {1, 2}, b"x", 1j, object(), nn.Parameter()], ids=lambda x: type(x).__name__
)
def test_a_knob_that_json_cannot_hold_is_refused(knob):
    refused(lambda: Run(model=partial(ViT, dim=knob)), "cannot describe")


def test_a_run_cannot_be_changed():
    run = Run()
    with pytest.raises(AttributeError):
        run.lr = 1.0
    steps = [augment.Warp()]
    run = Run(augment=steps)
    steps.append(augment.Warp())
    assert len(run.augment) == 1


# vary


def test_vary_sends_a_name_to_the_run_or_to_its_model():
    run = Run()
    changed = run.vary(lr=0.5, dim=32, tokenizer=partial(PatchEmbed, patch=2))
    assert changed.lr == 0.5 and changed.model.keywords["dim"] == 32 and function(changed.model) is ViT
    assert set(difference(run, changed)) == {"lr", "model.dim", "model.tokenizer.patch"}
    assert run == Run() and run.vary() == run
    twice = changed.vary(dim=16).vary(depth=1)
    assert twice.model.keywords == {"dim": 16, "depth": 1, "tokenizer": changed.model.keywords["tokenizer"]}


def test_vary_takes_a_new_model_and_its_knobs_at_once():
    assert Run().vary(model=SmallCNN, hidden=8) == Run(model=partial(SmallCNN, hidden=8))
    refused(lambda: Run().vary(model=SmallCNN, dim=8), "a run of SmallCNN has no choice 'dim'")
    refused(lambda: Run().vary(model=3, dim=8), "model is 3")


def test_vary_keeps_arm_and_role_unless_told():
    assert Run(arm="a", role="reference").vary(lr=1).arm == "a" and Run(role="reference").vary(lr=1).role == "reference"
    assert Run(arm="a").vary(arm="b").arm == "b"


# Equality


def test_runs_are_equal_when_they_say_the_same():
    same = [
        Run(),
        Run(model=partial(ViT)),
        Run(model=partial(partial(ViT, depth=6), dim=64)),
        Run(lr=0.001, arm="other", role="reference"),
        Run(evaluators=[accuracy], augment=[]),
        Run(clip=1, model=partial(ViT, dropout=0, block=partial(Block, mlp_ratio=4))),
    ]
    assert all(run == same[0] and hash(run) == hash(same[0]) and not difference(run, same[0]) for run in same)
    assert len({*same, Run(seed=1)}) == 2
    assert Run() != Run(seed=1) and Run() != 3 and Run() != describe(Run())


# Described, and back

HERE = {name for name, home in smallvit.HOME.items() if home in ROOMS and (home not in VALUES or name == "Weights")}
STEPS = [made for made in vars(augment).values() if isinstance(made, type) and hasattr(made, "__dataclass_fields__")]


def back(plain):
    return rebuild(json.loads(json.dumps(plain, allow_nan=False)))


def another(value):
    """Another value of the same kind, whatever the knob makes of it."""
    if value is None:
        return 3
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else 0.9 * value + 0.03
    if isinstance(value, str):
        return value + "?"
    return (*value, 7) if isinstance(value, tuple | list) else SinCos2d


@pytest.mark.parametrize("name", sorted(HERE))
def test_every_public_component_comes_back_from_json_with_its_knobs(name):
    thing = getattr(smallvit, name)
    assert len(HERE) >= 46
    assert function(back(describe(thing))) is thing
    for knob, p in knobs(thing).items():
        chosen = partial(thing, **{knob: another(None if p.default is p.empty else p.default)})
        again = back(describe(chosen))
        assert function(again) is thing and describe(again) == describe(chosen) != describe(thing)
        assert describe(again.keywords[knob]) == describe(chosen.keywords[knob])


SPECIAL = {"fill": "edge", "aim": "ink", "area": (0.1, 0.2), "crop": (0.1, 0.2), "sigma": (0.1, 0.2), "size": (7, 9)}
SPECIAL |= dict.fromkeys(("first", "second", "small"), (augment.Warp(rotate=3),))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_every_augmentation_comes_back_from_json_as_it_was_made(step):
    assert len(STEPS) >= 12
    made = partial(step, first=(augment.Warp(),), small=(augment.Warp(size=4),)) if step is augment.MultiCrop else step
    for f in fields(step):
        ours = made(**{f.name: SPECIAL[f.name] if f.name in SPECIAL else another(f.default)})
        again = back(describe(ours))
        assert type(again) is step and again == ours != made()


@pytest.mark.parametrize("run", [Run(), RICH], ids=["plain", "rich"])
def test_a_run_comes_back_from_json(run):
    again = back(describe(run))
    assert (
        isinstance(again, Run) and again == run and describe(again) == describe(run) and fingerprint(again) == fingerprint(run)
    )
    assert again.augment == run.augment
    assert (again.arm, again.role) == ("scratch", "technique") and "arm" not in describe(run)
    model = again.model((28, 28), 1, 10)
    assert isinstance(model, ViT) and (run is not RICH or (model.position is None and not model.blocks[1].attention.mask_self))


def test_a_described_run_spells_out_every_default():
    plain = describe(Run())
    assert plain["model"]["tokenizer"] == {
        "call": "smallvit.tokenizers.PatchEmbed",
        "kernel": None,
        "linear": False,
        "patch": 4,
    }
    assert plain["model"]["dim"] == 64 and plain["lr"] == 1e-3 and set(plain) == set(NAMES) - {"arm", "role", "baseline"}


DEFAULTS = [
    (Run, "lr", 0.5),
    (ViT, "depth", 1),
    (ViT, "pool", MeanTokens),
    (PatchEmbed, "linear", True),
    (Block, "mlp_ratio", 1.0),
    (ShiftedPatchEmbed, "shift", "none"),
    (augment.Warp, "smooth", 0.5),
    (linear_probe, "standardise", False),
]


@pytest.mark.parametrize("owner, name, new", DEFAULTS, ids=[name for _, name, _ in DEFAULTS])
@pytest.mark.parametrize(
    "run", [Run(augment=augment.digits(), evaluators=(accuracy, linear_probe)), RICH], ids=["plain", "rich"]
)
def test_a_described_run_replays_when_a_default_of_the_package_changes(owner, name, new, run, monkeypatch, request):
    def told():
        return describe(owner() if is_dataclass(owner) else owner)

    plain, mark, before = json.dumps(describe(run)), fingerprint(run), told()
    monkeypatch.setitem((owner.__init__ if isinstance(owner, type) else owner).__kwdefaults__, name, new)
    own_arguments.cache_clear()  # another version of the package is another process
    request.addfinalizer(own_arguments.cache_clear)
    assert told() != before  # whoever leaves the choice open gets the new default
    again = rebuild(json.loads(plain))
    assert json.dumps(describe(again)) == plain and fingerprint(again) == mark


def test_a_choice_of_none_that_is_gone_today_does_not_stop_an_old_record():
    run = Run(augment=augment.digits())
    plain = json.loads(json.dumps(describe(run)))
    plain["forgotten"] = plain["objective"]["label_smoothing"] = plain["augment"][0]["forgotten"] = None
    assert fingerprint(rebuild(plain)) == fingerprint(run)
    plain["objective"]["label_smoothing"] = 0.1
    refused(lambda: rebuild(plain), "Supervised has no choice 'label_smoothing'")


# Fingerprints.  None stands here in gold: every new knob of the package changes them all, which is what they are for. What must hold is
# that equal runs have equal ones, in every process, and that no choice is left out.

CHANGED = {
    "data": mnist, "labels": 50, "val": 7, "seed": 1, "model": SmallCNN, "init": Run(), "objective": ViT,
    "augment": augment.digits(), "steps": 1,
    "batch": 1, "lr": 0.5, "weight_decay": 0.5, "warmup": 0.5, "clip": 0.5, "ema": 0.5, "early_stop": 1, "precision": "bf16",
    "evaluators": (accuracy, knn), "unlabelled": True, "teacher": Run(), "schedule": "constant", "layer_decay": 0.5,
    "pseudo_labels": label_spreading,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_the_fingerprint_changes_with_every_field(name):
    assert set(CHANGED) == set(NAMES) - {"arm", "role", "baseline"}
    starts = {"unlabelled": Run(objective=DINO), "teacher": Run(objective=Distill, teacher=Run(seed=7))}
    starts |= {"pseudo_labels": Run(unlabelled=True, init=Run(), pseudo_labels=partial(label_spreading, neighbours=3))}
    start = starts.get(name, Run())
    changed = start.vary(**{name: CHANGED[name]})
    assert fingerprint(changed) != fingerprint(start) and changed != start
    assert {key.partition(".")[0].partition("[")[0] for key in difference(start, changed)} == {name}


def test_arm_role_and_against_decide_nothing():
    assert fingerprint(Run(arm="a", role="reference", baseline="b")) == fingerprint(Run()) and not difference(Run(arm="a"), Run())


def leaves(plain, path=()):
    """Every plain value in a described run, with the way to it."""
    if isinstance(plain, dict | list):
        for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from leaves(value, (*path, key))
    elif path[-1] not in ("call", "make"):
        yield path, plain


def edited(plain, path, value):
    plain = json.loads(json.dumps(plain))
    functools.reduce(lambda inner, key: inner[key], path[:-1], plain)[path[-1]] = value
    return plain


def test_the_fingerprint_changes_with_every_choice_however_deep_and_difference_says_which():
    plain, marks, seen = describe(RICH), {fingerprint(RICH)}, 0
    for path, value in leaves(plain):
        # not for an objective that reads the labels there are, and has no teacher; a range has two ends
        if path[-1] in ("unlabelled", "teacher", "pseudo_labels") or "crop" in path:
            continue
        try:
            changed = rebuild(edited(plain, path, another(value)))
        except ValueError:  # the augmentation or the run refuses this value: nudge it instead
            nudged = {"fp32": "bf16", "edge": "black", "/somewhere": "/else", "black": "edge", "anywhere": "ink"}.get(
                value, 0.01
            )
            changed = rebuild(edited(plain, path, {"init": {"lr": 0.5}, "schedule": "constant"}.get(path[-1], nudged)))
        seen += 1
        marks.add(fingerprint(changed))
        words = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
        assert list(difference(RICH, changed)) == [words]
    assert seen >= 70 and len(marks) == seen + 1


def test_the_fingerprint_does_not_depend_on_the_process_or_on_the_order_of_the_knobs():
    run = Run(model=partial(ViT, dim=32, depth=2), augment=augment.digits(), evaluators=(knn, accuracy))
    assert fingerprint(run) == fingerprint(
        Run(evaluators=(knn, accuracy), augment=augment.digits(), model=partial(ViT, depth=2, dim=32))
    )
    code = (
        "from functools import partial; from smallvit import *; from smallvit import augment;"
        "print(fingerprint(Run(model=partial(ViT, depth=2, dim=32), augment=augment.digits(), evaluators=(knn, accuracy))))"
    )
    path = os.pathsep.join([os.path.dirname(os.path.dirname(smallvit.__file__)), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == fingerprint(run) and len(fingerprint(run)) == 16


def test_a_new_knob_that_is_off_by_none_leaves_the_fingerprints_of_old_records_alone(probe):
    old = fingerprint(Run(model=probe.small))
    exec("def small(image, channels, classes, *, dim=8, new=None): pass", vars(probe))
    assert fingerprint(Run(model=probe.small)) == old != fingerprint(Run(model=partial(probe.small, new=0)))


# Differences


def test_a_difference_is_told_in_words_and_says_nothing_else():
    spt = Run().vary(tokenizer=partial(ShiftedPatchEmbed, patch=4), lr=2e-3)
    here, there = (
        "PatchEmbed(linear=False, patch=4)",
        "ShiftedPatchEmbed(norm=True, pad=0.0, patch=4, shift='half-patch diagonal')",
    )
    assert difference(Run(), spt) == {"model.tokenizer": (here, there), "lr": ("0.001", "0.002")}
    assert difference(RICH, RICH) == {}
    assert difference(Run(), Run(labels=10)) == {"labels": ("None", "10")}
    assert difference(Run(), Run(augment=augment.digits()))["augment"][0] == "none"
    stronger = Run(augment=augment.photos(2))
    assert difference(Run(augment=augment.photos()), stronger)["augment[1].shift"] == ("0.125", "0.25")
    assert set(difference(Run(evaluators=(accuracy, knn)), Run(evaluators=(accuracy, partial(knn, ks=(1, 5, 9)))))) == {
        "evaluators[1].ks[2]"
    }


# ablate


def test_ablate_pairs_every_arm_with_every_seed_and_puts_the_baseline_first():
    runs = ablate({"base": Run(), "b": Run(lr=0.1)}, labels=(100, None), seeds=(3, 1), references=False)
    assert [(run.labels, run.seed, run.arm, run.role) for run in runs] == [
        (labels, seed, arm, role)
        for labels in (100, None)
        for seed in (3, 1)
        for arm, role in (("base", "baseline"), ("b", "technique"))
    ]
    assert {run.lr for run in runs if run.arm == "b"} == {0.1}
    assert len(ablate({"base": Run()}, references=False)) == 8


def test_the_floors_stand_in_every_comparison_on_the_data_of_the_baseline():
    base = Run(data=mnist, lr=0.3, batch=16, early_stop=2, augment=augment.digits(), objective=Supervised)
    runs = ablate({"base": base, "b": base.vary(dim=32)}, labels=[100], seeds=[0])
    assert [(run.arm, run.role) for run in runs] == [
        ("base", "baseline"), ("b", "technique"),
        ("pixels, logistic regression", "reference"), ("pixels, nearest neighbour", "reference"), ("small CNN", "reference"),
    ]  # fmt: skip
    logistic, nearest, small = runs[2:]
    assert {run.data for run in runs} == {mnist} and {run.labels for run in runs} == {100}
    assert logistic.model is nearest.model is Pixels and logistic.steps == nearest.steps == logistic.early_stop == 0
    assert function(logistic.evaluators[0]) is linear_probe and nearest.evaluators == (knn,)
    assert set(difference(base.vary(labels=100), small)) == {"model"}
    assert len({fingerprint(run) for run in runs}) == 5


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: ablate({}), ("expected a dict", "baseline first")),
        (lambda: ablate([Run()]), ("expected a dict",)),
        (lambda: ablate({"a": partial(ViT)}), ("expected a dict from names to runs",)),
        (lambda: ablate({"a": Run(), "b": Run(arm="x")}), ("'a' and 'b' are the same run",)),
        (lambda: ablate({"a": Run(), "b": Run(seed=5)}), ("'a' and 'b' are the same run",)),
        (lambda: ablate({"a": Run(), "b": Run().vary(dim=64)}), ("'a' and 'b' are the same run",)),
        (lambda: ablate({"a": Run(), "cnn": Run(model=SmallCNN)}), ("'cnn' and 'small CNN' are the same run", "references=False")),
        (lambda: ablate({"a": Run(), "small CNN": Run(lr=0.1)}), ("'small CNN'", "of a reference and of an arm", "references=False")),
        (lambda: ablate({"a": Run()}, extra_references={"small CNN": Run(lr=0.1)}), ("of a reference and of a reference",)),
        (lambda: ablate({"a": Run()}, references=False, extra_references={"a": Run(lr=0.1)}), ("of a reference and of an arm",)),
        (lambda: ablate({"a": Run(labels=100)}), ("arm 'a' has labels=100", "to ablate alone")),
        (lambda: ablate({"a": Run()}, labels=100), ("labels is 100", "labels=[100]")),
        (lambda: ablate({"a": Run()}, seeds=8), ("seeds is 8",)),
        (lambda: ablate({"a": Run()}, seeds=()), ("seeds are []", "at least one")),
        (lambda: ablate({"a": Run()}, seeds=(0, 1, 0)), ("seeds are [0, 1, 0]", "each once")),
        (lambda: ablate({"a": Run()}, labels=[10, 10]), ("labels are [10, 10]", "each once")),
        (lambda: ablate({"a": Run()}, labels=["10"]), ("labels is '10'",)),
        (lambda: ablate({3: Run()}), ("arm is 3",)),
    ],
)
def test_comparisons_that_would_mislead_are_refused(build, words):
    refused(build, *words)


def test_an_arm_may_name_the_labels_that_ablate_gives_it():
    assert len(ablate({"a": Run(labels=100)}, labels=(100, 1000), references=False)) == 16
    assert len(ablate({"a": Run()}, seeds=iter(range(3)), labels=iter([10, 20]), references=False)) == 6


# What a record may call


@pytest.fixture
def probe(monkeypatch):
    """A loaded recipe with components of its own, and with things in it that are none."""
    module = types.ModuleType("recipes.probe")
    monkeypatch.setitem(sys.modules, "recipes.probe", module)
    source = """
import os
from dataclasses import dataclass
from functools import partial
from os import system
from smallvit import Attention, Run, ViT

class Mine(Attention):
    class Inner(Attention):
        pass

@dataclass(frozen=True, kw_only=True)
class Step:
    amount: float = 0.5
    def __call__(self, batch, generator):
        return batch

def small(image, channels, classes, *, dim=8):
    return ViT(image, channels, classes, dim=dim)

def _hidden(): pass

made, number, alias, unnamed = partial(ViT), 3, os.system, lambda: None
"""
    exec(compile(source, "probe.py", "exec"), vars(module))
    return module


def test_components_of_a_loaded_recipe_are_named_and_found(probe):
    run = Run(model=partial(probe.small, dim=16), augment=(probe.Step(amount=0.1),)).vary(dim=4)
    assert back(describe(run)) == run and describe(run)["model"]["call"] == "recipes.probe.small"
    assert back(describe(run)).augment == (probe.Step(amount=0.1),)
    assert back(describe(Run().vary(attention=probe.Mine))).model.keywords["attention"].func is probe.Mine
    refused(lambda: Run().vary(attention=probe.Mine.Inner), "no component 'Mine.Inner'", "top level")
    refused(lambda: Run(model=probe.unnamed), "lambda")


FORBIDDEN = [
    "os.system", "posix.system", "builtins.eval", "subprocess.run", "torch.load", "torch.hub.load", "shutil.rmtree",
    "smallvit.record.write_text", "smallvit.record.write_atomic", "smallvit.train.fit", "smallvit.launch.launch", "smallvit.run.rebuild",
    "smallvit.run.Run", "smallvit.recipe.load_recipe", "smallvit.__main__.main", "smallvit.report.html", "smallvit.pretrained.from_timm",
    "smallvit.import_module", "smallvit.ViT",
    "smallvit.data.os.system", "smallvit.data.published.os.system", "smallvit.data.published.digits", "smallvit.data.published",
    "smallvit.data.published._download", "smallvit.data._root", "smallvit.data.images", "smallvit.data.images.Dataset",
    "smallvit.data.Dataset.from_arrays", "smallvit.evaluate.torch.load", "smallvit.evaluate.contextmanager", "smallvit.evaluate.Images",
    "smallvit.tokenizers.torch", "smallvit.tokenizers.rearrange", "smallvit.tokenizers.prod", "smallvit.tokenizers.Image",
    "smallvit.vit.Attention", "smallvit.vit.partial", "smallvit.vit.nn", "smallvit.vit.ACTIVATIONS", "smallvit.vit.stream",
    "smallvit.vit.ViT.__init__", "smallvit.vit.ViT.forward.__globals__", "smallvit.vit.__builtins__", "smallvit.vit.__loader__",
    "smallvit.vit.__dict__", "smallvit.vit.__getattr__", "smallvit.vit._hidden", "smallvit.vit.", "smallvit.vit", "smallvit.", "smallvit",
    "", ".", "..", "...", ".vit.ViT", "..vit.ViT", "smallvit..ViT", "smallvit.vit..ViT", "Smallvit.vit.ViT", "smallvit.vit.vit",
    "smallvit.vit.ViT ", " smallvit.vit.ViT", "smallvit.vit.ViT\n", "smallvit.vit.ViT\0", "smallvit.vit:ViT", "smallvit/vit.ViT", "ViT",
    "recipes", "recipes.", "recipes.evil", "recipes.evil.run", "recipes..evil", "recipes.probe", "recipes.probe.", "recipes.probe.os",
    "recipes.probe.os.system", "recipes.probe.system", "recipes.probe.alias", "recipes.probe.made", "recipes.probe.number",
    "recipes.probe.unnamed", "recipes.probe._hidden", "recipes.probe.Attention", "recipes.probe.Mine.Inner", "recipes.probe.Mine.__init__",
]  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN, ids=repr)
def test_a_record_reaches_no_other_name(name, probe):
    assert len(FORBIDDEN) == len(set(FORBIDDEN)) >= 80
    for build in (
        component,
        lambda n: rebuild({"call": n}),
        lambda n: rebuild({"make": n}),
        lambda n: rebuild({"call": n, "path": "x"}),
    ):
        refused(lambda build=build: build(name), "expected")


@pytest.mark.parametrize(
    "name", [None, 5, 1.5, True, b"os.system", ["smallvit.vit.ViT"], [], {}, {"call": "smallvit.vit.ViT"}, ViT], ids=repr
)
def test_a_name_that_is_no_string_is_a_value_error(name):
    refused(lambda: component(name))
    refused(lambda: rebuild({"call": name}))
    refused(lambda: rebuild({"make": name, "rotate": 1}))
    refused(lambda: rebuild({"model": {"call": name}}))


def test_a_recipe_that_is_not_loaded_is_not_loaded_by_a_record(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "evil.py").write_text("import os\nos.environ['EVIL'] = '1'\ndef run(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    refused(lambda: rebuild({"call": "recipes.evil.run"}), "loaded recipes")
    assert "EVIL" not in os.environ and "recipes.evil" not in sys.modules


def test_what_a_record_can_reach_is_public_ours_and_listed():
    reached = {}
    for room in ROOMS:
        for name in vars(importlib.import_module(f"smallvit.{room}")):
            try:
                reached[f"{room}.{name}"] = component(f"smallvit.{room}.{name}")
            except ValueError:
                continue
    assert len(reached) >= 60
    assert all(thing.__module__.startswith("smallvit.") and not thing.__name__.startswith("_") for thing in reached.values())
    assert {name.partition(".")[2] for name in reached} >= HERE
    assert not [name for name in reached if isinstance(reached[name], types.ModuleType)]


@pytest.mark.parametrize(
    "plain",
    [
        {"make": "smallvit.data.arrays", "path": "secret.npz"},
        {"make": "smallvit.data.mnist"},
        {"make": "smallvit.vit.ViT", "image": [8, 8], "channels": 1, "classes": 10},
        {"make": "smallvit.objectives.Supervised", "model": None},
        {"make": "smallvit.augment.digits"},
        {"make": "smallvit.evaluate.Splits", "train": 1, "val": 1, "test": 1},
        {"make": "smallvit.data.HeldOut", "images": 1},
        {"make": "smallvit.augment.Warp", "call": "smallvit.augment.Warp"},
    ],
    ids=lambda plain: plain["make"],
)
def test_only_a_dataclass_is_made_from_a_record(plain):
    refused(lambda: rebuild(plain), plain["make"], "cannot be made", "expected a dataclass")
    refused(lambda: rebuild({"lr": 0.1, "augment": [plain]}), "cannot be made")


@pytest.mark.parametrize(
    "knob, value", [("rotat", 5), ("rotate", "5"), ("rotate", 1000), ("rotate", [1, 2]), ("fill", None), ("self", 1), ("", 1)]
)
def test_an_augmentation_with_knobs_that_it_has_not_is_a_value_error(knob, value):
    refused(lambda: rebuild({"make": "smallvit.augment.Warp", knob: value}), "Warp")


@pytest.mark.parametrize(
    "plain",
    [
        {"modle": 3},
        {"lr": "fast"},
        {"model": {"call": "smallvit.vit.ViT", "dmi": 3}},
        {"model": {"call": "smallvit.vit.ViT", "image": [8, 8]}},
        {"model": {"call": "smallvit.vit.ViT", "tokenizer": {"call": "smallvit.tokenizers.PatchEmbed"}}},
        {"model": {"call": "smallvit.vit.ViT", "": 3}},
        {"model": {}},
        {"augment": {"make": "smallvit.augment.Warp"}},
        {"augment": [{"call": "smallvit.augment.Warp"}]},
        {"evaluators": []},
        {"labels": [[]]},
    ],
    ids=str,
)  # fmt: skip
def test_a_record_of_no_run_is_a_value_error(plain):
    refused(lambda: rebuild(plain))


def test_a_bottomless_record_raises_and_calls_nothing():
    deep = "smallvit.vit.ViT"
    for _ in range(20_000):
        deep = {"call": "smallvit.vit.ViT", "pool": deep}
    with pytest.raises(RecursionError):
        rebuild(deep)
    assert function(rebuild({"call": "smallvit.vit.ViT", "dim": 3})) is ViT  # and all is as it was


def test_rebuilding_neither_builds_a_model_nor_reads_data(monkeypatch):
    plain = describe(RICH)

    @functools.wraps(ViT.__init__)
    def built(*_, **__):
        pytest.fail("the model was built")

    monkeypatch.setattr(ViT, "__init__", built)
    again = rebuild(plain)  # there is no /somewhere either
    assert describe(again) == plain


def test_the_small_cnn_is_trained_on_images_or_is_no_floor():
    frozen = ablate({"a": Run(steps=0, init=Run(), evaluators=(knn,))}, seeds=[0])
    assert [run.arm for run in frozen if run.role == "reference"] == [
        "pixels, logistic regression",
        "pixels, nearest neighbour",
        "random initialisation",
    ]
    blind = Run(objective=DINO, augment=(augment.Flip(), *augment.digit_crops()), clip=0.0)
    (cnn,) = [run for run in ablate({"a": blind}, seeds=[0]) if run.arm == "small CNN"]
    assert cnn.augment == (augment.Flip(),)


@pytest.mark.parametrize(
    "choices, words",
    [
        ({"evaluators": (accuracy, partial(few_shot, shots=1), partial(few_shot, shots=2))}, ("few_shot twice", "each once")),
        ({"evaluators": (cost, accuracy)}, ("begins with cost", "judges nothing")),
        ({"schedule": "cosine"}, ("'constant', None",)),
        ({"augment": augment.digit_crops()}, ("augment makes views and Supervised reads none",)),
        ({"data": partial(folder, path="x", size=[32, 32])}, ("size of folder is [32, 32]", "a tuple")),
    ],
    ids=["twice", "cost first", "schedule", "views", "list"],
)
def test_choices_that_could_not_be_compared_or_loaded_are_refused(choices, words):
    refused(lambda: Run(**choices), *words)


# What a component of a recipe is made of

TEXT = '''
"""A recipe."""
import torch
GAIN = 1.0
OTHER = 2
class A:
    def f(self):
        return GAIN
class B(A):
    pass
def g(x, y=OTHER):
    return torch.relu(x) + y
lr = 3
'''


@pytest.mark.parametrize(
    "old, new, changed",
    [
        ("GAIN = 1.0", "GAIN = 5.0", {"GAIN", "A", "B"}),
        ("OTHER = 2", "OTHER = 3", {"OTHER", "g"}),
        ("    pass", "    more = 1", {"B"}),
        ("import torch", "import numpy as torch", {"torch", "g"}),
        ("lr = 3", "lr = 4", {"lr"}),
        ("class A", "# a comment\nclass A", set()),
        ("A recipe.", "The recipe.", set()),
    ],
)
def test_a_definition_is_another_when_it_or_what_it_uses_has_changed(old, new, changed):
    before, after = definitions(TEXT), definitions(TEXT.replace(old, new))
    assert {name for name in before if before[name] != after[name]} == changed and before.keys() == after.keys()
