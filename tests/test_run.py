"""Runs: their settings are checked, written as JSON, rebuilt and identified; a record can call components only. And `ablate`."""

import functools
import hashlib
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import types
from dataclasses import InitVar, dataclass, field, fields, is_dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import smallvit
from smallvit import (
    DINO,
    ArmRun,
    Attention,
    Block,
    Distill,
    LearnThresholds,
    LearnToPrune,
    LocalityAttention,
    MeanTokens,
    Merge,
    Muon,
    PatchEmbed,
    Pixels,
    Run,
    ShiftedPatchEmbed,
    SinCos2d,
    SmallCNN,
    Supervised,
    Tune,
    ViT,
    ablate,
    accuracy,
    arrays,
    at_size,
    augment,
    cost,
    describe,
    difference,
    digits,
    few_shot,
    fingerprint,
    fit,
    folder,
    knn,
    label_spreading,
    linear_probe,
    mnist,
    rebuild,
)
from smallvit.components import MODULES, VALUE_MODULES, canonical, component, function, options, own_arguments
from smallvit.definitions import definitions
from smallvit.recipe import smoke_test_runs
from smallvit.record import RANDOM

# A run with nested partials, tuples, transforms, another run, and None in place of a default.
RICH = Run(
    data=partial(mnist, root="/somewhere"),
    labels=100,
    val=0,
    model=partial(
        ViT, tokenizer=partial(ShiftedPatchEmbed, patch=7, norm=False), block=partial(Block, mlp_ratio=2.0, layer_scale=1e-4),
        attention=partial(LocalityAttention, mask_self=False), position=None, reduction=partial(Merge, r=(0.25, 2)),
        drop_path=(0.0, 0.1), depth=2,
    ),
    init=Run(steps=10),
    augment=(*augment.photos(), augment.Warp(rotate=10, fill="edge")),
    evaluators=(accuracy, partial(knn, ks=(1, 3)), linear_probe),
)  # fmt: skip
NAMES = [f.name for f in fields(Run)]


def misspellings(name: str) -> list[str]:
    """The name with one letter left out, or with two neighboring letters swapped, in all ways."""
    deleted = {name[:i] + name[i + 1 :] for i in range(len(name))}
    swapped = {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1)}
    return sorted((deleted | swapped) - {name, ""})


def refused(build, *words: str):
    """Assert that `build()` raises ValueError with all these words in its message."""
    with pytest.raises(ValueError) as raised:
        build()
    assert all(word in str(raised.value) for word in words), raised.value


def words_id(value) -> str:
    """The id of a case in a table of refusals: the first words of the message."""
    return "" if callable(value) else " ".join(value)


# Names and values


@pytest.mark.parametrize("names, count", [(NAMES, 200), ([*options(ViT)], 170)], ids=["run", "ViT"])
def test_misspelt_name_is_refused_with_the_right_one(names, count):
    misspelt = [(name, wrong) for name in names for wrong in misspellings(name)]
    assert len(NAMES) == 24 and len(options(ViT)) >= 13 and len(misspelt) >= count
    for name, wrong in misspelt:
        words = f"has no option {wrong!r}; did you mean {name!r}?"
        refused(lambda wrong=wrong: Run().vary(**{wrong: 1}), "a run of ViT " + words)
        other = {wrong: 1} if names is NAMES else {"model": partial(ViT, **{wrong: 1})}
        refused(lambda other=other: Run(**other), "a run " + words if names is NAMES else "ViT " + words)


@pytest.mark.parametrize("name, expected", [("learning_rate", "lr"), ("epochs", "steps"), ("average", "ema"), ("embed_dim", "dim")])
def test_name_of_another_library_is_refused_with_ours(name, expected):
    refused(lambda: Run().vary(**{name: 1}), f"has no option {name!r}; did you mean {expected!r}?")


WRONG_VALUES = {
    "data": [3, None, "digits", digits()],
    "labels": [0, -1, 1.5, "100", True, 10**10, [100]],
    "val": [-1, 0.2, "all", False],
    "unlabelled": [1, None, "yes", True],
    "pseudo_labels": ["spread", 3, label_spreading],
    "seed": [-1, 0.0, None, "0", 2**31 + 1],
    "model": ["ViT", None, nn.Linear(2, 2), ViT((8, 8), 1, 10)],
    "init": ["scratch", 3, ViT, {"lr": 0.1}],
    "objective": ["supervised", None, 0, ViT, partial(ViT, dim=8), accuracy],
    "teacher": ["resnet", 3, ViT, Run()],
    "augment": [None, "digits", augment.digits, augment.Warp(), (None,), ("flip",), (augment.Warp,), (partial(augment.Warp, rotate=5),)],
    "steps": [-1, 1.0, None, "10"],
    "optimizer": ["adamw", None, 3, torch.optim.AdamW, Supervised],
    "batch": [0, 0.5, None],
    "lr": [-0.1, 11, float("nan"), float("inf"), "1e-3", None, True],
    "warmup": [-0.1, 1.1, None],
    "schedule": ["linear", "", 1, None, ["cosine"]],
    "weight_decay": [-1e-9, float("nan"), None],
    "layer_decay": [0.0, 1.5, "0.75", True],
    "clip": [-1, float("inf"), None],
    "ema": [-0.1, 1.5, None, False],
    "early_stop": [-1, 0.5, None, True],
    "precision": ["fp16", None, 32, ["fp32"]],
    "evaluators": [(), accuracy, "accuracy", (3,), {accuracy}],
}  # fmt: skip


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name, values in WRONG_VALUES.items() for value in values],
    ids=lambda value: re.sub(" at 0x.*", "", str(value)),
)
def test_setting_of_a_wrong_type_or_size_is_refused_by_name(name, value):
    assert set(WRONG_VALUES) == set(NAMES)
    refused(lambda: Run(**{name: value}), name if not isinstance(value, nn.Module) else "neither a function nor a class")


@pytest.mark.parametrize(
    "name, value",
    [("labels", 1), ("val", 0), ("val", None), ("warmup", 0), ("warmup", 1.0), ("lr", 10), ("seed", 2**31), ("clip", 0)],
)
def test_limits_of_a_setting_are_allowed_values(name, value):
    assert getattr(Run(**{name: value}), name) == value


def test_numbers_of_numpy_are_python_numbers(tmp_path):
    """A sweep over `np.arange` gives runs, comparisons and tuning like one over `range`, and they can be trained."""
    vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=np.int64(4)), depth=1, heads=np.int32(2))
    run = Run(data=partial(at_size, data=digits, size=np.int64(8)), model=vit, batch=np.uint8(4), val=20, steps=2)
    run = run.vary(dim=np.arange(20)[8], lr=np.float32(0.5), labels=np.int64(20), seed=np.arange(2)[1])
    plain = run.vary(tokenizer=partial(PatchEmbed, patch=4), heads=2, dim=8, lr=0.5, data=partial(at_size, data=digits, size=8))
    assert run == plain and json.dumps(describe(run)) == json.dumps(describe(plain))
    assert fit(run, tmp_path).finished
    runs = ablate({"scratch": run, "deep": run.vary(depth=np.int64(2))}, labels=np.array([20]), seeds=np.arange(2), references=[])
    assert [(entry.labels, entry.seed) for entry in runs] == [(20, 0), (20, 0), (20, 1), (20, 1)]
    half, two = np.float32(0.5), np.int64(2)
    own = (*augment.photos(half), augment.Warp(rotate=two, crop=(half, np.float64(1)), size=(two, two)), augment.Noise(std=half))
    own += (*augment.photo_crops(half, local=two, size=two), augment.MultiCrop(first=(partial(at_size, size=two),)))
    same = (*augment.photos(0.5), augment.Warp(rotate=2, crop=(0.5, 1.0), size=(2, 2)), augment.Noise(std=0.5))
    same += (*augment.photo_crops(0.5, local=2, size=2), augment.MultiCrop(first=(partial(at_size, size=2),)))
    assert json.dumps(describe(own)) == json.dumps(describe(same))
    tune = Tune({"dim": np.arange(8, 24, 8), "lr": (np.float32(0.25), 1.0)}, trials=np.int64(4), steps=np.float32(0.5))
    assert json.dumps(tune.plain()) == json.dumps(Tune({"dim": [8, 16], "lr": (0.25, 1.0)}, trials=4, steps=0.5).plain())
    assert run.with_data(run.data).data is run.data  # without numbers of NumPy nothing is made anew


def module_level_function(x):
    return x


@dataclass(frozen=True)
class HiddenArgument:
    gain: InitVar[float] = 1.0

    def __call__(self, batch, generator):
        return batch


@dataclass(frozen=True)
class ComputedField(HiddenArgument):
    factor: float = field(default=0.0, init=False)


class OwnConstructor(augment.Noise):
    def __init__(self, times):
        super().__init__(std=0.05)


def local_class():
    @dataclass(frozen=True)
    class LocalTransform:
        def __call__(self, batch, generator):
            return batch

    return LocalTransform


LOCAL = ("lambda or a local function", "top level of the recipe")
REFUSED = [
    # options of components, however deep
    (lambda: Run(model=partial(nn.Transformer, d_model=8)), "'torch.nn.Transformer' is not in", "def my_model(image, channels, classes)"),
    (lambda: Run(model=Attention), "Attention cannot be called as a model, with (image, channels, classes)", "def my_model("),
    (lambda: Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patc=2))), "PatchEmbed", "'patc'", "'patch'"),
    (lambda: Run(model=partial(ViT, attention=partial(Attention, qknorm=True))), "Attention", "'qk_norm'"),
    (lambda: Run(model=partial(ViT, block=partial(Block, drop_path=0.1))), "Block has no option 'drop_path'"),
    (lambda: Run(evaluators=(accuracy, partial(knn, k=5))), "knn", "'ks'"),
    (lambda: Run(data=partial(folder, pat="x")), "folder", "'path'"),
    (lambda: Run(objective=partial(Supervised, zzz=1)), "Supervised", "'zzz'"),
    (lambda: Run(zzz=1), "a run", "expected one of", "weight_decay"),
    (lambda: Run(model=partial(ViT, channels=3)), "ViT has no option 'channels'"),  # a shape, which the model supplies
    (lambda: Run(model=partial(ViT, (8, 8))), "model binds ((8, 8),) by position", "by name"),
    (lambda: Run(model=partial(ViT, tokenizer=partial(PatchEmbed, 7))), "model.tokenizer", "by name"),
    (lambda: Run(model=partial(ViT, tokenizer=PatchEmbed)), "model.tokenizer has no 'patch'", "partial(PatchEmbed, patch=...)"),
    (lambda: Run(data=folder), "data has no 'path'", "partial(folder, path=...)"),
    (lambda: Run(data=partial(folder, path="x", size=[32, 32])), "size of folder is [32, 32]", "a tuple"),
    # settings that contradict each other
    (lambda: Run(objective=LearnToPrune), "LearnToPrune", "init=..."),
    (lambda: Run(objective=partial(LearnThresholds, budget=0.5)), "LearnThresholds", "init=..."),
    (lambda: Run(objective=Distill), "Distill", "teacher=..."),
    (lambda: Run(objective=partial(ViT, dim=8)), "objective is ViT", "subclass of smallvit.Objective"),
    (lambda: Run(teacher=Run()), "teacher", "Supervised", "Distill"),
    (lambda: Run(augment=augment.digit_crops()), "views", "Supervised"),
    (lambda: Run(early_stop=3, evaluators=(knn,)), "early_stop=3", "smallvit.accuracy"),
    (lambda: Run(evaluators=(accuracy, partial(few_shot, shots=1), partial(few_shot, shots=2))), "few_shot twice", "each once"),
    (lambda: Run(evaluators=(cost, accuracy)), "begins with cost", "cannot judge"),
    # components that a record cannot name
    (lambda: Run(model=lambda *shape: None), *LOCAL),
    (lambda: Run(model=partial(lambda *shape: None)), *LOCAL),
    (lambda: Run().vary(tokenizer=lambda *shape: None), *LOCAL),
    (lambda: Run(model=local_class()), *LOCAL),
    (lambda: Run(augment=(local_class()(),)), *LOCAL),
    (lambda: Run(model=module_level_function), "test_run.module_level_function", "recipes.<file>.Name"),
    (lambda: Run(model=nn.Linear), "torch.nn.Linear", "recipes.<file>.Name"),
    (lambda: Run(model=print), "builtins.print", "recipes.<file>.Name"),
    (lambda: Run(model=dict), "builtins.dict"),
    (lambda: Run(model="".join), "recipes.<file>.Name"),
    (lambda: Run(model=Run.vary), "smallvit.run.Run.vary"),
    (lambda: Run(model=ViT.forward), "no component 'ViT.forward'", "top level"),
    # dataclasses whose description would be the same for different arguments
    (lambda: Run(augment=(HiddenArgument(2.0),)), "HiddenArgument", "takes (gain)", "its fields are ()", "arguments are its fields"),
    (lambda: Run(augment=(ComputedField(2.0),)), "ComputedField", "takes (gain)", "its fields are (factor)"),
    (lambda: Run(augment=(OwnConstructor(2.0),)), "OwnConstructor", "takes (times)", "its fields are (std)"),
    # options that JSON cannot store
    *((lambda value=value: Run(model=partial(ViT, dim=value)), "cannot describe")
      for value in (float("nan"), -float("inf"), {"a": 1}, {1, 2}, b"x", 1j, object(), nn.Parameter())),
    # vary
    (lambda: Run().vary(model=SmallCNN, dim=8), "a run of SmallCNN has no option 'dim'"),
    (lambda: Run().vary(model=3, dim=8), "model is 3"),
]  # fmt: skip


@pytest.mark.parametrize("build, words", [(build, words) for build, *words in REFUSED], ids=words_id)
def test_unusable_settings_are_refused(build, words):
    refused(build, *words)


@pytest.mark.parametrize(
    "data", [partial(folder, path="x", size=(8, 8)), partial(arrays, path="x.npz"), partial(mnist, root="x")]
)
def test_loader_accepts_its_options(data):
    run = Run(data=data)
    assert rebuild(describe(run)) == run != Run() and rebuild(describe(run)).data.keywords.items() >= data.keywords.items()


def test_settings_that_fit_each_other_are_accepted():
    assert Run(objective=LearnToPrune, init=Run()).objective is LearnToPrune
    thresholds = partial(LearnThresholds, budget=0.5)
    assert Run(objective=thresholds, init=Run()).objective is thresholds
    assert list(Run(objective=Distill, teacher=Run()).dependencies) == ["teacher"]
    assert Run(early_stop=3, evaluators=(knn, accuracy)).early_stop == 3


def test_run_cannot_be_changed():
    run = Run()
    with pytest.raises(AttributeError):
        run.lr = 1.0
    transforms = [augment.Warp()]
    run = Run(augment=transforms)
    transforms.append(augment.Warp())
    assert len(run.augment) == 1


# vary, equality


def test_vary_changes_settings_of_the_run_and_options_of_its_model():
    run = Run()
    changed = run.vary(lr=0.5, dim=32, tokenizer=partial(PatchEmbed, patch=2))
    assert changed.lr == 0.5 and changed.model.keywords["dim"] == 32 and function(changed.model) is ViT
    assert set(difference(run, changed)) == {"lr", "model.dim", "model.tokenizer.patch"}
    assert run == Run() and run.vary() == run
    twice = changed.vary(dim=16).vary(depth=1)
    assert twice.model.keywords == {"dim": 16, "depth": 1, "tokenizer": changed.model.keywords["tokenizer"]}
    assert Run().vary(model=SmallCNN, hidden=8) == Run(model=partial(SmallCNN, hidden=8))


def test_runs_with_equal_settings_are_equal():
    equal = [
        Run(), Run(model=partial(ViT)), Run(model=partial(partial(ViT, depth=6), dim=64)), Run(lr=0.001),
        Run(evaluators=[accuracy], augment=[]), Run(clip=1, model=partial(ViT, dropout=0, block=partial(Block, mlp_ratio=4))),
    ]  # fmt: skip
    assert all(run == equal[0] and hash(run) == hash(equal[0]) and not difference(run, equal[0]) for run in equal)
    assert len({*equal, Run(seed=1)}) == 2
    assert Run() != Run(seed=1) and Run() != 3 and Run() != describe(Run())


# Written as JSON, and rebuilt

COMPONENTS = {
    name for name, home in smallvit.HOME.items() if home in MODULES and (home not in VALUE_MODULES or name == "Weights")
} - {"FeatureExtractor", "Objective", "Preprocess"}
TRANSFORMS = [value for value in vars(augment).values() if isinstance(value, type) and is_dataclass(value)]


def through_json(plain):
    return rebuild(json.loads(json.dumps(plain, allow_nan=False)))


def another(value):
    """Another value of the same kind, whether or not the option accepts it."""
    if value is None:
        return 3
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else 0.9 * value + 0.03
    if isinstance(value, str):
        return value + "?"
    return (*value, 7) if isinstance(value, tuple | list) else SinCos2d


@pytest.mark.parametrize("name", sorted(COMPONENTS))
def test_every_public_component_is_rebuilt_with_its_options(name):
    component = getattr(smallvit, name)
    assert len(COMPONENTS) >= 46
    assert function(through_json(describe(component))) is component
    for option, p in options(component).items():
        changed = partial(component, **{option: another(None if p.default is p.empty else p.default)})
        again = through_json(describe(changed))
        assert function(again) is component and describe(again) == describe(changed) != describe(component)
        assert describe(again.keywords[option]) == describe(changed.keywords[option])


SPECIAL = {"fill": "edge", "aim": "ink", "area": (0.1, 0.2), "crop": (0.1, 0.2), "sigma": (0.1, 0.2), "size": (7, 9)}
SPECIAL |= dict.fromkeys(("first", "second", "small"), (augment.Warp(rotate=3),))


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda transform: transform.__name__)
def test_every_transform_is_rebuilt_with_its_options(transform):
    assert len(TRANSFORMS) >= 12
    crops = {"first": (augment.Warp(),), "small": (augment.Warp(size=4),)} if transform is augment.MultiCrop else {}
    for f in fields(transform):
        changed = transform(**crops | {f.name: SPECIAL[f.name] if f.name in SPECIAL else another(f.default)})
        again = through_json(describe(changed))
        assert type(again) is transform and again == changed != transform(**crops)


@pytest.mark.parametrize("run", [Run(), RICH], ids=["plain", "rich"])
def test_run_is_rebuilt_from_json(run):
    again = through_json(describe(run))
    assert isinstance(again, Run) and again == run and describe(again) == describe(run)
    assert fingerprint(again) == fingerprint(run) and again.augment == run.augment
    model = again.model((28, 28), 1, 10)
    assert isinstance(model, ViT) and (run is not RICH or (model.position is None and not model.blocks[1].attention.mask_self))


def test_described_run_contains_every_default():
    plain = describe(Run())
    tokenizer = {"call": "smallvit.tokenizers.PatchEmbed", "kernel": None, "linear": False, "patch": 4}
    assert plain["model"]["tokenizer"] == tokenizer and plain["model"]["dim"] == 64
    assert plain["lr"] == 1e-3 and set(plain) == set(NAMES)


DEFAULTS = [
    (Run, "lr", 0.5), (ViT, "depth", 1), (ViT, "pool", MeanTokens), (PatchEmbed, "linear", True), (Block, "mlp_ratio", 1.0),
    (ShiftedPatchEmbed, "shift", "none"), (augment.Warp, "smooth", 0.5), (linear_probe, "standardize", False),
]  # fmt: skip


@pytest.mark.parametrize("owner, name, new", DEFAULTS, ids=[name for _, name, _ in DEFAULTS])
@pytest.mark.parametrize(
    "run", [Run(augment=augment.digits(), evaluators=(accuracy, linear_probe)), RICH], ids=["plain", "rich"]
)
def test_described_run_stays_the_same_when_a_default_changes(owner, name, new, run, monkeypatch, request):
    def described():
        return describe(owner() if is_dataclass(owner) else owner)

    plain, old_fingerprint, before = json.dumps(describe(run)), fingerprint(run), described()
    monkeypatch.setitem((owner.__init__ if isinstance(owner, type) else owner).__kwdefaults__, name, new)
    own_arguments.cache_clear()  # another version of the package is another process
    request.addfinalizer(own_arguments.cache_clear)
    assert described() != before
    again = rebuild(json.loads(plain))
    assert json.dumps(describe(again)) == plain and fingerprint(again) == old_fingerprint


def test_removed_option_that_was_none_does_not_invalidate_an_old_record():
    run = Run(augment=augment.digits())
    plain = json.loads(json.dumps(describe(run)))
    plain["forgotten"] = plain["objective"]["label_smoothing"] = plain["augment"][0]["forgotten"] = None
    assert fingerprint(rebuild(plain)) == fingerprint(run)
    plain["objective"]["label_smoothing"] = 0.1
    refused(lambda: rebuild(plain), "Supervised has no option 'label_smoothing'")


# Fingerprints

CHANGED = {
    "data": mnist, "labels": 50, "val": 7, "unlabelled": True, "pseudo_labels": label_spreading, "seed": 1, "model": SmallCNN,
    "init": Run(), "objective": partial(Supervised, softmax_first=True), "teacher": Run(), "augment": augment.digits(), "steps": 1,
    "batch": 1, "lr": 0.5, "warmup": 0.5, "schedule": "constant", "weight_decay": 0.5, "layer_decay": 0.5, "clip": 0.5, "ema": 0.5,
    "early_stop": 1, "precision": "bf16", "evaluators": (accuracy, knn), "optimizer": Muon,
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_fingerprint_changes_with_every_setting(name):
    assert set(CHANGED) == set(NAMES)
    special = {"unlabelled": Run(objective=DINO), "teacher": Run(objective=Distill, teacher=Run(seed=7))}
    special |= {"pseudo_labels": Run(unlabelled=True, init=Run(), pseudo_labels=partial(label_spreading, neighbors=3))}
    run = special.get(name, Run())
    changed = run.vary(**{name: CHANGED[name]})
    assert fingerprint(changed) != fingerprint(run) and changed != run
    assert {key.partition(".")[0].partition("[")[0] for key in difference(run, changed)} == {name}


def leaves(plain, path=()):
    """Every plain value in a described run, with the keys that lead to it."""
    if isinstance(plain, dict | list):
        for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
            yield from leaves(value, (*path, key))
    elif path[-1] not in ("call", "make"):
        yield path, plain


def edited(plain, path, value):
    plain = json.loads(json.dumps(plain))
    functools.reduce(lambda inner, key: inner[key], path[:-1], plain)[path[-1]] = value
    return plain


def test_fingerprint_changes_with_every_nested_option_and_difference_names_it():
    plain, found, seen = describe(RICH), {fingerprint(RICH)}, 0
    allowed = {"fp32": "bf16", "edge": "black", "/somewhere": "/else", "black": "edge", "anywhere": "ink", "cosine": "constant"}
    for path, value in leaves(plain):
        # Supervised allows no other value of the first three; a range has two ends
        if path[-1] in ("unlabelled", "teacher", "pseudo_labels") or "crop" in path:
            continue
        try:
            changed = rebuild(edited(plain, path, another(value)))
        except ValueError:  # the option does not accept this value
            changed = rebuild(edited(plain, path, {"lr": 0.5} if path[-1] == "init" else allowed.get(value, 0.01)))
        seen += 1
        found.add(fingerprint(changed))
        name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
        assert list(difference(RICH, changed)) == [name]
    assert seen >= 70 and len(found) == seen + 1


@pytest.mark.slow
def test_fingerprint_is_the_same_in_every_process_and_order_of_options():
    run = Run(model=partial(ViT, dim=32, depth=2), augment=augment.digits(), evaluators=(knn, accuracy))
    other = Run(evaluators=(knn, accuracy), augment=augment.digits(), model=partial(ViT, depth=2, dim=32))
    code = (
        "from functools import partial; from smallvit import *; from smallvit import augment;"
        "print(fingerprint(Run(model=partial(ViT, depth=2, dim=32), augment=augment.digits(), evaluators=(knn, accuracy))))"
    )
    path = os.pathsep.join([os.path.dirname(os.path.dirname(smallvit.__file__)), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == fingerprint(run) == fingerprint(other) and len(fingerprint(run)) == 16


def hash_of(plain) -> str:
    """The fingerprint of a described run, as an earlier version of smallvit computed it."""
    return hashlib.sha256(json.dumps(canonical(plain), sort_keys=True).encode()).hexdigest()[:16]


def without(plain, option):
    """A description without an option, wherever it occurs."""
    if isinstance(plain, dict):
        return {name: without(value, option) for name, value in plain.items() if name != option}
    return [without(item, option) for item in plain] if isinstance(plain, list) else plain


@pytest.mark.parametrize(
    "owner, option, old, new",
    [(Attention, "qk_norm", False, True), (augment.Warp, "smooth", 0.14, 0.5), (Run, "precision", "fp32", "bf16"),
     (Run, "augment", augment.digits(), ())],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:20],
)  # fmt: skip
def test_added_option_keeps_old_fingerprints_and_old_behavior(owner, option, old, new, monkeypatch, request):
    """As if an older version did not have the option: its records lack the option, and the default may be another one now."""
    digit_run = Run(augment=augment.digits())
    run = digit_run.vary(objective=Distill, init=digit_run.vary(steps=7), teacher=digit_run)
    plain = describe(run)
    old_plain = json.loads(json.dumps(functools.reduce(without, (option, *Run.added_options), plain)))
    old_fingerprint = hash_of(old_plain)
    assert fingerprint(run) != old_fingerprint
    monkeypatch.setattr(owner, "added_options", {**getattr(owner, "added_options", {}), option: old}, raising=False)
    assert fingerprint(run) == old_fingerprint
    monkeypatch.setitem(owner.__init__.__kwdefaults__, option, new)
    own_arguments.cache_clear()
    request.addfinalizer(own_arguments.cache_clear)
    again = rebuild(old_plain)
    assert fingerprint(again) == old_fingerprint and describe(again) == plain
    assert fingerprint(rebuild(describe(Run()))) == fingerprint(Run())  # with the new default


@pytest.mark.parametrize("default", [False, True], ids=["off by default", "on by default"])
def test_added_option_of_a_recipe_component_keeps_old_fingerprints(default, probe):
    old = Run(model=probe.small)
    old_fingerprint, plain = fingerprint(old), json.loads(json.dumps(describe(old)))
    source = f"def small(image, channels, classes, *, dim=8, fast={default}): pass\nsmall.added_options = {{'fast': False}}"
    exec(source, vars(probe))
    assert fingerprint(Run(model=partial(probe.small, fast=False))) == old_fingerprint
    assert (fingerprint(Run(model=probe.small)) == old_fingerprint) == (not default)
    again = rebuild(plain)
    assert again.model.keywords == {"dim": 8, "fast": False} and fingerprint(again) == old_fingerprint


def test_added_option_is_not_forced_on_a_subclass_without_it(probe, monkeypatch):
    exec("class Own(Attention):\n    def __init__(self, dim, heads, *, gain=1.0): pass", vars(probe))
    run = Run().vary(attention=probe.Own)
    old_fingerprint = fingerprint(run)
    monkeypatch.setattr(Attention, "added_options", {"qk_norm": False}, raising=False)
    assert fingerprint(run) == old_fingerprint and rebuild(describe(run)) == run


def test_new_option_that_is_none_keeps_old_fingerprints(probe):
    old = fingerprint(Run(model=probe.small))
    exec("def small(image, channels, classes, *, dim=8, new=None): pass", vars(probe))
    assert fingerprint(Run(model=probe.small)) == old != fingerprint(Run(model=partial(probe.small, new=0)))


# Differences


def test_difference_names_the_settings_that_differ_and_no_others():
    shifted = Run().vary(tokenizer=partial(ShiftedPatchEmbed, patch=4), lr=2e-3)
    tokenizers = ("PatchEmbed(patch=4)", "ShiftedPatchEmbed(patch=4)")
    assert difference(Run(), shifted) == {"model.tokenizer": tokenizers, "lr": ("0.001", "0.002")}
    assert difference(RICH, RICH) == {}
    assert difference(Run(), Run(labels=10)) == {"labels": ("None", "10")}
    assert difference(Run(), Run(augment=augment.digits()))["augment"][0] == "[]"
    stronger = Run(augment=augment.photos(2))
    assert difference(Run(augment=augment.photos()), stronger)["augment[1].shift"] == ("0.125", "0.25")
    more = Run(evaluators=(accuracy, partial(knn, ks=(1, 5, 9))))
    assert set(difference(Run(evaluators=(accuracy, knn)), more)) == {"evaluators[1].ks[2]"}


# ablate


def test_ablate_lists_every_arm_at_every_seed_with_the_baseline_first():
    entries = ablate({"base": Run(), "b": Run(lr=0.1)}, labels=(100, None), seeds=(3, 1), references=False)
    cells = itertools.product((100, None), (3, 1), (("base", "baseline"), ("b", "technique")))
    assert [(entry.labels, entry.seed, (entry.arm, entry.role)) for entry in entries] == [*cells]
    assert {entry.baseline for entry in entries} == {"base"}
    assert all((entry.run.labels, entry.run.seed) == (entry.labels, entry.seed) for entry in entries)
    assert {entry.run.lr for entry in entries if entry.arm == "b"} == {0.1}
    assert len(ablate({"base": Run()}, references=False)) == 8
    assert len(ablate({"a": Run(labels=100)}, labels=(100, 1000), references=False)) == 16
    assert len(ablate({"a": Run()}, seeds=iter(range(3)), labels=iter([10, 20]), references=False)) == 6


def test_references_use_the_data_of_the_baseline():
    base = Run(data=mnist, lr=0.3, batch=16, early_stop=2, augment=augment.digits(), objective=Supervised)
    entries = ablate({"base": base, "b": base.vary(dim=32)}, labels=[100], seeds=[0])
    assert [(entry.arm, entry.role) for entry in entries] == [
        ("base", "baseline"), ("b", "technique"),
        ("pixels, logistic regression", "reference"), ("pixels, nearest neighbor", "reference"), ("small CNN", "reference"),
    ]  # fmt: skip
    runs = [entry.run for entry in entries]
    logistic, nearest, small = runs[2:]
    assert {run.data for run in runs} == {mnist} and {run.labels for run in runs} == {100}
    assert logistic.model is nearest.model is Pixels and logistic.steps == nearest.steps == logistic.early_stop == 0
    assert function(logistic.evaluators[0]) is linear_probe and nearest.evaluators == (knn,)
    assert set(difference(base.vary(labels=100), small)) == {"model"}
    assert len({fingerprint(run) for run in runs}) == 5


def test_small_cnn_is_a_reference_only_if_the_baseline_is_trained():
    frozen = ablate({"a": Run(steps=0, init=Run(), evaluators=(knn,))}, seeds=[0])
    names = ["pixels, logistic regression", "pixels, nearest neighbor", RANDOM]
    assert [entry.arm for entry in frozen if entry.role == "reference"] == names
    self_supervised = Run(objective=DINO, augment=(augment.Flip(), *augment.digit_crops()), clip=0.0)
    (cnn,) = [entry.run for entry in ablate({"a": self_supervised}, seeds=[0]) if entry.arm == "small CNN"]
    assert cnn.augment == (augment.Flip(),)


def test_shorter_runs_keep_their_place_in_the_comparison():
    entries = ablate({"a": Run(), "b": Run(init=Run(steps=50), lr=0.1)}, labels=[20, 10], seeds=[1, 0], references=False)
    smoke = smoke_test_runs(entries)
    assert [(e.arm, e.role, e.baseline, e.labels, e.seed, e.run.steps) for e in smoke] == [
        ("a", "baseline", "a", 10, 0, 2), ("b", "technique", "a", 10, 0, 2)
    ]  # fmt: skip
    assert smoke[1].run.init.steps == 2
    longer = entries[1].with_steps(lambda steps: 3 * steps)
    assert (longer.arm, longer.role, longer.run.steps, longer.run.init.steps) == ("b", "technique", 6000, 150)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: ablate({}), ("expected a dict", "baseline first")),
        (lambda: ablate([Run()]), ("expected a dict",)),
        (lambda: ablate({"a": partial(ViT)}), ("expected a dict from names to runs",)),
        (lambda: ablate({"a": Run(), "b": Run()}), ("'a' and 'b'", "equal settings")),
        (lambda: ablate({"a": Run(), "b": Run(seed=5)}), ("'a' and 'b'", "equal settings")),
        (lambda: ablate({"a": Run(), "b": Run().vary(dim=64)}), ("'a' and 'b'", "equal settings")),
        (lambda: ablate({"a": Run(), "cnn": Run(model=SmallCNN)}), ("'cnn' and 'small CNN'", "equal settings", "references=False")),
        (lambda: ablate({"a": Run(), "small CNN": Run(lr=0.1)}), ("'small CNN'", "standard reference and of an arm", "references=False")),
        (lambda: ablate({"a": Run()}, extra_references={"small CNN": Run(lr=0.1)}), ("extra reference and of a standard reference",)),
        (lambda: ablate({"a": Run()}, references=False, extra_references={"a": Run(lr=0.1)}), ("extra reference and of an arm",)),
        (lambda: ablate({"a": Run(labels=100)}), ("arm 'a' has labels=100", "in ablate only")),
        (lambda: ablate({"a": Run()}, labels=100), ("labels is 100", "labels=[100]")),
        (lambda: ablate({"a": Run()}, seeds=4), ("seeds is 4", "seeds=range(4)")),
        (lambda: ablate({"a": Run()}, seeds="0"), ("seeds is '0'", "seeds=range(8)")),
        (lambda: ablate({"a": Run()}, seeds=()), ("seeds are []", "at least one")),
        (lambda: ablate({"a": Run()}, seeds=(0, 1, 0)), ("seeds are [0, 1, 0]", "each once")),
        (lambda: ablate({"a": Run()}, labels=[10, 10]), ("labels are [10, 10]", "each once")),
        (lambda: ablate({"a": Run()}, labels=["10"]), ("labels is '10'",)),
        (lambda: ablate({3: Run()}), ("arm is 3",)),
        *((lambda name=name: ArmRun(run=Run(), arm=name), ("arm is", "names")) for name in (3, None, "", "  ")),
        *((lambda name=name: ArmRun(run=Run(), arm="a", baseline=name), ("baseline",)) for name in (3, None, ["a"])),
        *((lambda role=role: ArmRun(run=Run(), arm="a", role=role), ("role is",)) for role in ("winner", None, 1)),
        (lambda: ArmRun(run=ViT, arm="a"), ("run is", "smallvit.Run")),
    ],
    ids=words_id,
)  # fmt: skip
def test_unusable_comparisons_are_refused(build, words):
    refused(build, *words)


# What a record may call


@pytest.fixture
def probe(monkeypatch):
    """A loaded recipe with components of its own, and with other things that a record must not reach."""
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
class Transform:
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


def test_components_of_a_loaded_recipe_are_rebuilt(probe):
    run = Run(model=partial(probe.small, dim=16), augment=(probe.Transform(amount=0.1),)).vary(dim=4)
    assert through_json(describe(run)) == run and describe(run)["model"]["call"] == "recipes.probe.small"
    assert through_json(describe(run)).augment == (probe.Transform(amount=0.1),)
    assert through_json(describe(Run().vary(attention=probe.Mine))).model.keywords["attention"].func is probe.Mine
    refused(lambda: Run().vary(attention=probe.Mine.Inner), "no component 'Mine.Inner'", "top level")
    refused(lambda: Run(model=probe.unnamed), "lambda")


FORBIDDEN = [
    "os.system", "posix.system", "builtins.eval", "subprocess.run", "torch.load", "torch.hub.load", "shutil.rmtree",
    "smallvit.storage.write_text", "smallvit.storage.write_atomic", "smallvit.train.fit", "smallvit.launch.launch", "smallvit.run.rebuild",
    "smallvit.run.Run", "smallvit.recipe.load_recipe", "smallvit.__main__.main", "smallvit.report.html", "smallvit.pretrained.from_timm",
    "smallvit.import_module", "smallvit.ViT", "smallvit.ablation.ablate", "smallvit.ablation.ArmRun", "smallvit.train.load",
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
    None, 5, 1.5, True, b"os.system", ["smallvit.vit.ViT"], [], {}, {"call": "smallvit.vit.ViT"}, ViT,
]  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN, ids=repr)
def test_record_cannot_call_any_other_name(name, probe):
    assert len(FORBIDDEN) >= 90
    plains = [{"call": name}, {"make": name}, {"call": name, "path": "x"}, {"make": name, "rotate": 1}, {"model": {"call": name}}]
    for build in (lambda: component(name), *(lambda plain=plain: rebuild(plain) for plain in plains)):
        refused(build, *(["expected"] if isinstance(name, str) else []))


def test_rebuilding_a_record_does_not_import_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "evil.py").write_text("import os\nos.environ['EVIL'] = '1'\ndef run(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    refused(lambda: rebuild({"call": "recipes.evil.run"}), "loaded recipe")
    assert "EVIL" not in os.environ and "recipes.evil" not in sys.modules


def test_record_can_call_only_public_components_of_smallvit():
    reached = {}
    for module in MODULES:
        for name in vars(importlib.import_module(f"smallvit.{module}")):
            try:
                reached[f"{module}.{name}"] = component(f"smallvit.{module}.{name}")
            except ValueError:
                continue
    assert len(reached) >= 60
    assert all(found.__module__.startswith("smallvit.") and not found.__name__.startswith("_") for found in reached.values())
    assert {name.partition(".")[2] for name in reached} >= COMPONENTS
    assert not [name for name in reached if isinstance(reached[name], types.ModuleType)]


NOT_MADE = [
    {"make": "smallvit.data.arrays", "path": "secret.npz"}, {"make": "smallvit.data.mnist"}, {"make": "smallvit.augment.digits"},
    {"make": "smallvit.vit.ViT", "image": [8, 8], "channels": 1, "classes": 10},
    {"make": "smallvit.objectives.Supervised", "model": None}, {"make": "smallvit.data.HeldOut", "images": 1},
    {"make": "smallvit.evaluate.Splits", "train": 1, "val": 1, "test": 1},
    {"make": "smallvit.augment.Warp", "call": "smallvit.augment.Warp"},
]  # fmt: skip
NOT_A_RUN = [
    {"modle": 3}, {"lr": "fast"}, {"model": {}}, {"evaluators": []}, {"labels": [[]]},
    {"augment": {"make": "smallvit.augment.Warp"}}, {"augment": [{"call": "smallvit.augment.Warp"}]},
    {"model": {"call": "smallvit.vit.ViT", "dmi": 3}}, {"model": {"call": "smallvit.vit.ViT", "": 3}},
    {"model": {"call": "smallvit.vit.ViT", "image": [8, 8]}},
    {"model": {"call": "smallvit.vit.ViT", "tokenizer": {"call": "smallvit.tokenizers.PatchEmbed"}}},
]  # fmt: skip
WARP_OPTIONS = [("rotat", 5), ("rotate", "5"), ("rotate", 1000), ("rotate", [1, 2]), ("fill", None), ("self", 1), ("", 1)]


@pytest.mark.parametrize(
    "plain, words",
    [
        *((plain, (plain["make"], "cannot be created", "expected a dataclass")) for plain in NOT_MADE),
        *(({"lr": 0.1, "augment": [plain]}, ("cannot be created",)) for plain in NOT_MADE),
        *(({"make": "smallvit.augment.Warp", option: value}, ("Warp",)) for option, value in WARP_OPTIONS),
        *((plain, ()) for plain in NOT_A_RUN),
    ],
    ids=str,
)
def test_wrong_description_is_refused(plain, words):
    refused(lambda: rebuild(plain), *words)


def test_bottomless_description_raises_and_calls_nothing():
    deep = "smallvit.vit.ViT"
    for _ in range(20_000):
        deep = {"call": "smallvit.vit.ViT", "pool": deep}
    with pytest.raises(RecursionError):
        rebuild(deep)
    assert function(rebuild({"call": "smallvit.vit.ViT", "dim": 3})) is ViT  # nothing is broken by the error


def test_rebuilding_neither_creates_a_model_nor_reads_data(monkeypatch):
    plain = describe(RICH)

    @functools.wraps(ViT.__init__)
    def created(*_, **__):
        pytest.fail("a model was created")

    monkeypatch.setattr(ViT, "__init__", created)
    assert describe(rebuild(plain)) == plain  # the folder /somewhere does not exist either


# The hash of a recipe's component

TEXT = '''
"""A recipe."""
import torch
GAIN = 1.0
OTHER = 2
class A:
    """A class."""
    def f(self):
        """A method."""
        return GAIN
class B(A):
    pass
def g(x, y=OTHER):
    """A function."""
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
        ("A class.", "The class.", set()),
        ("A method.", "The method.", set()),
        ('    """A function."""\n', "", set()),
        ("    pass", '    """The docstring is new."""', set()),
        ('["a"] = 1', '["a"] = 2', {"TABLE", "reads"}),
        ("append(1)", "append(2)", {"TABLE", "reads"}),
        ("B.depth = 3", "B.depth = 4", {"B"}),
        ("for one in [1]", "for one in [2]", {"NUMBERS"}),
    ],
)
def test_hash_of_a_definition_changes_with_its_code_and_what_it_uses(old, new, changed):
    """Also with statements that change a table or a class; a name inside a comprehension is another one than outside."""
    text = TEXT + """
TABLE = {"list": []}
TABLE["a"] = 1
TABLE["list"].append(1)
B.depth = 3
NUMBERS = [one for one in [1]]
def reads(one):
    return TABLE[one]
"""
    before, after = definitions(text), definitions(text.replace(old, new))
    assert {name for name in before if before[name] != after[name]} == changed and before.keys() == after.keys()



CHANGES = """
TABLE = {}
OTHER = {}
FILLED = {}
KEYS = ["a"]
COUNT = 0
SETTING = {}
UNTOUCHED = {}
def enter(table, key):
    def add(function):
        table[key] = function
        return function
    return add
def fill(size=1):
    OTHER["size"] = size
    helper()
def helper():
    global COUNT
    COUNT = 1
class Base:
    def __init_subclass__(cls):
        KEYS.append(cls)
class Part(Base):
    gain = 1
@enter(TABLE, "first")
def first():
    return 1
fill()
dict.update(FILLED, first=1)
rows = alias = TABLE
short = rows
short["second"] = 2
for row in [FILLED]:
    row["third"] = 3
setattr(SETTING, "fourth", 4)
last = KEYS.pop(0)
print(UNTOUCHED, 5)
def reads():
    return UNTOUCHED
"""


@pytest.mark.parametrize(
    "old, new, changed",
    [
        ("return 1", "return 10", {"TABLE", "first", "rows", "alias", "short"}),
        ("gain = 1", "gain = 10", {"KEYS", "Part"}),
        ("fill()\ndict", "fill(10)\ndict", {"OTHER", "COUNT", "fill", "helper"}),
        ("first=1", "first=10", {"FILLED", "row"}),
        ('["second"] = 2', '["second"] = 20', {"TABLE", "rows", "alias", "short"}),
        ("= 3", "= 30", {"FILLED", "row"}),
        ('"fourth", 4', '"fourth", 40', {"SETTING"}),
        ("pop(0)", "pop(-1)", {"KEYS", "last"}),
        ("UNTOUCHED, 5", "UNTOUCHED, 50", set()),
        ("return UNTOUCHED", "return (UNTOUCHED,)", {"reads"}),
    ],
)
def test_hash_of_a_table_changes_with_all_code_that_changes_the_table(old, new, changed):
    """By a decorator, by functions that change it, by a base class, under another name, in a loop, and by `setattr`."""
    before, after = definitions(CHANGES), definitions(CHANGES.replace(old, new))
    assert CHANGES.count(old) == 1 and before.keys() == after.keys()
    found = {name for name in before if before[name] != after[name]}
    assert changed <= found and not found & ({"UNTOUCHED", "reads"} - changed)


UNRELATED = '''
import torch
from dataclasses import dataclass
from smallvit import evaluator
@dataclass(frozen=True)
class One:
    most: float = 1.0
    @property
    def half(self):
        return self.most / 2
@dataclass(frozen=True)
class Two:
    least: float = 0.0
    @torch.no_grad()
    def forward(self, x):
        return torch.relu(x)
    @property
    def double(self):
        return self.least * 2
@evaluator(probe=True)
def three(model):
    return torch.zeros(3)
@evaluator(probe=True)
def four(model):
    return 4
RUNS = [One(), Two(), three, four, range(6)]
'''


def test_registry_with_the_name_of_a_builtin_or_of_an_import_is_one():
    for first in ("all = Registry()", "from lib import all\nall = Registry()"):
        text = first + "\n@all.add\ndef one():\n    return 1\ndef use(x):\n    return [f(x) for f in all.values()]\n"
        before, after = definitions(text), definitions(text.replace("return 1", "return 2"))
        assert {name for name in before if before[name] != after[name]} == {"all", "one", "use"}


@pytest.mark.parametrize(
    "old, new, changed",
    [
        ("range(6)", "range(7)", {"RUNS"}),
        ("most / 2", "most / 4", {"One", "RUNS"}),
        ("relu", "tanh", {"Two", "RUNS"}),
        ("zeros(3)", "zeros(4)", {"three", "RUNS"}),
        ("return 4", "return 5", {"four", "RUNS"}),
    ],
)
def test_hash_of_code_does_not_change_with_other_code_that_has_the_same_decorators(old, new, changed):
    before, after = definitions(UNRELATED), definitions(UNRELATED.replace(old, new))
    assert {name for name in before if before[name] != after[name]} == changed and before.keys() == after.keys()


def test_hash_of_code_is_the_same_in_all_versions_of_python():
    text = "class A(B):\n    def f(self, *, x=()):\n        return [y for y in x if y]\n\n\n@g\ndef h(): pass\n"
    assert definitions(text) == {"A": "049ad59368695147", "g": "1f1350abc34e3ed8", "h": "1f1350abc34e3ed8"}


def test_hash_covers_an_import_of_all_names():
    before, after = (definitions(f"from {module} import *\ndef f():\n    return X\n") for module in ("one", "two"))
    assert before["f"] != after["f"]
