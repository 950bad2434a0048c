"""Runs that start from another run (`init`): trained first and once, paired by seed, loaded completely, and counted as costs."""

import hashlib
import shutil
import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from toys import TINY_VIT, slow_after

from smallvit import (
    AttentionOutput,
    Distill,
    LearnedPrune,
    LearnedThresholds,
    LearnThresholds,
    LearnToPrune,
    Merge,
    PatchEmbed,
    Run,
    SmallCNN,
    ablate,
    accuracy,
    augment,
    compare,
    cost,
    describe,
    difference,
    digits,
    fingerprint,
    fit,
    rebuild,
)
from smallvit.ablation import with_dependencies
from smallvit.data.images import HeldOut
from smallvit.launch import launch
from smallvit.record import WEIGHTS, read_record

SHORT = Run(model=partial(TINY_VIT, depth=4), labels=50, val=20, steps=12, batch=8, augment=augment.digits())
FROZEN = SHORT.vary(init=SHORT, steps=0, augment=(), ema=0.0)


def entries_of(arms: dict[str, Run], labels=(50,), seeds=(0,)):
    return ablate(arms, labels=labels, seeds=seeds, references=False)


# Weights and costs


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """The folder of the finished run SHORT. Tests must not change it."""
    folder = tmp_path_factory.mktemp("start")
    fit(SHORT, folder)
    return folder


def test_run_without_steps_equals_the_run_that_it_starts_from(tmp_path):
    record, start = fit(FROZEN.vary(reduction=Merge), tmp_path), read_record(tmp_path / "init")
    assert start.fingerprint == fingerprint(SHORT) == record.pretraining["fingerprint"]
    assert (start.role, start.arm) == ("dependency", "init of run")
    assert record.test == start.test and record.steps == 0 and record.seconds == 0
    loaded, expected = load_file(tmp_path / WEIGHTS), load_file(tmp_path / "init" / WEIGHTS)
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in loaded)


def test_record_contains_the_cost_of_all_earlier_runs_and_the_loaded_weights(tmp_path):
    second = SHORT.vary(init=SHORT, steps=6)
    record = fit(second.vary(init=second, steps=2), tmp_path)
    assert record.images_seen == 2 * 8
    assert [run["stacked"] for run in record.pretraining["runs"].values()] == [None, None]
    assert (record.pretraining["images_seen"], record.pretraining["steps"]) == ((6 + 12) * 8, 6 + 12)
    assert record.init_weights["loaded"] == len(load_file(tmp_path / WEIGHTS)) and record.init_weights["missing"] == []
    assert record.init_weights["sha256"] == hashlib.sha256((tmp_path / "init" / WEIGHTS).read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "init, teacher, steps",
    slow_after(1, [(SHORT, SHORT, 12), (SHORT, SHORT.vary(init=SHORT, steps=7), 19), (SHORT.vary(lr=3e-4), SHORT, 24)]),
    ids=["same run", "one after the other", "two runs"],
)
def test_earlier_run_that_is_used_twice_is_counted_once(init, teacher, steps, tmp_path):
    record = fit(SHORT.vary(init=init, teacher=teacher, objective=Distill, steps=2), tmp_path)
    assert record.pretraining["steps"] == steps and record.pretraining["images_seen"] == steps * 8


def test_labels_of_an_earlier_run_are_counted_in_the_budget(tmp_path):
    more = FROZEN.vary(labels=None, init=SHORT.vary(labels=400))
    records = launch(entries_of({"base": SHORT.vary(labels=None), "more": more}), tmp_path, recipe="t", jobs=1)
    assert records[1].pretraining["labels"] == 400
    assert {row.arm: row.budget["extra_labels"] for row in compare(records).rows} == {"base": 0, "more": 350}


def test_all_labels_and_labels_for_a_choice_are_counted_in_the_budget(start, tmp_path):
    earlier, total = replace(SHORT, labels=None, early_stop=1), len(digits().train)
    record = fit(SHORT.vary(init=earlier, steps=2), tmp_path)
    assert record.pretraining["labels"] == total - 20 and record.pretraining["chosen_labels"] == 20
    base = replace(read_record(start), role="baseline", arm="a", baseline="a")
    rows = compare([base, replace(record, role="technique", arm="b", baseline="a")]).rows
    assert {row.arm: row.budget["extra_labels"] for row in rows} == {"a": 0, "b": total - 20 - 50 + 20}


def test_only_a_reduction_may_have_new_weights(start, tmp_path):
    record = fit(FROZEN.vary(reduction=partial(LearnedPrune, keep=0.5)), tmp_path / "learned", init=start)
    missing = record.init_weights["missing"]
    assert missing and all(".reduction." in name for name in missing)


@pytest.mark.parametrize(
    "change",
    slow_after(1, [
        dict(reduction=partial(LearnedPrune, keep=0.6), objective=LearnToPrune),
        dict(reduction=LearnedThresholds, objective=partial(LearnThresholds, budget=0.6), lr=0.1),
    ]),
    ids=["DynamicViT", "LTMP"],
)
@pytest.mark.slow
def test_learned_reductions_are_trained_from_another_run_and_bitwise_equal_again(tmp_path, change):
    run = SHORT.vary(init=SHORT, steps=8, **change)
    fit(SHORT, tmp_path / "start")
    first, second = (fit(run, tmp_path / name, init=tmp_path / "start") for name in "ab")
    assert first.test == second.test and first.macs == second.macs and first.weights_sha256 == second.weights_sha256
    one, two, start = (load_file(tmp_path / name / WEIGHTS) for name in ("a", "b", "start"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    changed = {name.rpartition(".")[0] for name in start if not torch.equal(one[name], start[name])}
    assert bool(changed) == (run.objective is LearnToPrune)  # LTMP trains the thresholds only
    assert first.picture["groups"] and first.macs < read_record(tmp_path / "start").macs * 1.2


def test_init_is_a_setting_of_the_run():
    longer = FROZEN.vary(init=SHORT.vary(steps=13))
    assert fingerprint(FROZEN) != fingerprint(longer) and difference(FROZEN, longer) == {"init.steps": ("12", "13")}
    assert rebuild(describe(FROZEN)) == FROZEN and rebuild(describe(SHORT)).init is None
    assert FROZEN.with_steps(lambda steps: 3 * steps).init.steps == 36
    assert FROZEN.at_seed(7).init.seed == 7 and FROZEN.at_seed(0) == FROZEN


# In a comparison


@pytest.mark.slow
def test_dependencies_are_trained_first_and_once(tmp_path):
    other = SHORT.vary(lr=3e-3)
    arms = {"scratch": SHORT, "frozen": FROZEN, "tuned": SHORT.vary(init=SHORT, steps=4), "other": FROZEN.vary(init=other)}
    entries = entries_of(arms, seeds=[3, 4])
    ordered, positions = with_dependencies(entries)
    assert [ordered[index["init"]].run.lr for index in positions if index] == [1e-3, 1e-3, 3e-3] * 2 and len(ordered) == 10
    assert [(e.arm, e.role, e.baseline) for e in ordered[8:]] == [("initialization of other", "dependency", "scratch")] * 2
    shown = []
    records = launch(list(reversed(entries)), tmp_path, recipe="t", jobs=2, show=shown.append)
    assert [r.status for r in records] == ["finished"] * 8 and len(shown) == 10
    scratch = {r.seed: r for r in records if r.arm == "scratch"}
    for r in records:
        if r.arm in ("frozen", "tuned"):
            assert r.pretraining["fingerprint"] == scratch[r.seed].fingerprint
            assert r.subset_sha256 == scratch[r.seed].subset_sha256
    assert len(list(tmp_path.rglob(WEIGHTS))) == 10


def test_part_of_a_recipe_trains_a_dependency_in_the_folder_of_its_arm(tmp_path):
    entries = entries_of({"base, plain": SHORT, "frozen": FROZEN})
    launch(entries[1:], tmp_path, recipe="t", recipe_runs=entries, jobs=1)
    launch(entries, tmp_path, recipe="t", jobs=1, show=lambda record: pytest.fail(f"{record.arm} was trained a second time"))


def test_dependency_of_two_comparisons_is_trained_once(tmp_path):
    one, other = entries_of({"a": FROZEN}), entries_of({"b": FROZEN.vary(lr=0.5)})
    assert one[0].run.init == other[0].run.init
    launch(other, tmp_path, recipe="t", jobs=1)
    shown = []
    launch(one + other, tmp_path, recipe="t", jobs=1, show=shown.append)
    assert [record.arm for record in shown] == ["a"]


def test_dependency_that_is_an_arm_keeps_the_name_of_the_arm():
    tuned = SHORT.vary(init=SHORT, steps=4)
    entries = entries_of({"base": SHORT, "tuned": tuned, "both": tuned.vary(init=tuned)})
    ordered, positions = with_dependencies(entries[2:], entries)
    assert [entry.arm for entry in ordered] == ["both", "tuned", "base"] and positions == [{"init": 1}, {"init": 2}, {}]
    assert with_dependencies(entries) == (entries, [{}, {"init": 0}, {"init": 1}])


def test_dependency_has_the_seed_and_the_labels_of_its_run_unless_it_sets_labels():
    base = replace(SHORT, labels=None)
    entries = entries_of({"a": base, "b": replace(FROZEN, labels=None, init=base)}, labels=[10, 20], seeds=[5])
    assert [(e.run.init.labels, e.run.init.seed) for e in entries if e.run.init] == [(10, 5), (20, 5)]
    entries = entries_of({"a": base, "b": replace(FROZEN, labels=None)}, labels=[20], seeds=[5])
    assert entries[1].run.init.labels == 50
    references = [e for e in ablate({"a": FROZEN}, labels=[50], seeds=[0]) if e.role == "reference"]
    assert references and all(entry.run.init is None for entry in references)


@pytest.mark.slow
def test_deleted_dependency_of_a_dependency_is_trained_again(tmp_path):
    second = SHORT.vary(init=SHORT, steps=4, lr=1e-3)
    entries = entries_of({"base": SHORT.vary(lr=2e-3), "from a": FROZEN, "from b": second.vary(init=second, steps=2)})
    assert [record.arm for record in launch(entries[:2], tmp_path, recipe="t", jobs=1)] == ["base", "from a"]
    shutil.rmtree(tmp_path / "t" / "50" / "dependencies")
    assert [record.status for record in launch(entries, tmp_path, recipe="t", jobs=1)] == ["finished"] * 3


# Failures


def test_failed_dependency_is_tried_once_and_named_in_the_run_that_needs_it(tmp_path, capfd):
    broken = SHORT.vary(tokenizer=partial(PatchEmbed, patch=3))
    arms = {"scratch": SHORT, "broken": broken, "needs": broken.vary(init=broken, steps=2), "frozen": FROZEN}
    records = launch(entries_of(arms), tmp_path, recipe="t", jobs=1)
    assert [r.status for r in records] == ["finished", "failed", "failed", "finished"]
    assert all(word in records[2].error for word in ("initialization", "failed", "ValueError", "patch"))
    assert capfd.readouterr().err.count("FAILED") == 2


def weights_of_another_seed(folder):
    fit(SHORT.vary(seed=9, steps=1), folder / "other")
    shutil.copy(folder / "other" / WEIGHTS, folder / WEIGHTS)


@pytest.mark.parametrize(
    "run, damage, words",
    [
        (FROZEN.vary(dim=32), None, r"do not fit: blocks.0.*expected the same model, except for its reduction"),
        (FROZEN.vary(registers=2), None, r"do not fit: .*prefix; expected"),
        (FROZEN.vary(init=SHORT.vary(steps=3)), None, r"holds run \w+, not"),
        (FROZEN, weights_of_another_seed, "model.safetensors is damaged"),
        (FROZEN, lambda folder: (folder / WEIGHTS).write_bytes(b"torn"), "model.safetensors is damaged"),
        (FROZEN, lambda folder: (folder / WEIGHTS).unlink(), "has no model.safetensors; delete its record.json"),
        (SHORT, None, "for init, but the run has none"),
    ],
    ids=["width", "registers", "other run", "other weights", "torn weights", "no weights", "no init"],
)  # fmt: skip
def test_folder_that_does_not_fit_init_is_refused(run, damage, words, start, tmp_path):
    folder = shutil.copytree(start, tmp_path / "start")
    if damage:
        damage(folder)
    with pytest.raises(ValueError, match=words):
        fit(run, tmp_path / "mine", init=folder)
    assert fit(FROZEN, tmp_path / "mine", init=start).finished  # the folder is not blocked by the error


class ForeignAttention(torch.nn.Module):
    """Attention without a projection or an input for saliency."""

    def __init__(self, dim, heads):
        super().__init__()
        self.mixing = torch.nn.Linear(dim, dim)

    def forward(self, x, size=None, mask=None):
        return AttentionOutput(self.mixing(x), key=lambda: x, saliency=lambda queries: x.square().mean(-1))


class Untraceable(torch.nn.Module):
    """A reduction that keeps half of the patches by all channels of a token, so that patches cannot be traced through it."""

    def __init__(self, context):
        super().__init__()
        self.score, self.prefix = torch.nn.Linear(context.dim, 1), context.prefix

    def forward(self, x, size=None, key=None, saliency=None):
        patches = x[:, self.prefix :]
        best = self.score(patches)[..., 0].argsort(-1)[:, : (patches.shape[1] + 1) // 2, None].expand(-1, -1, x.shape[-1])
        return torch.cat([x[:, : self.prefix], patches.gather(1, best)], dim=1), size


class OtherBlocks(SmallCNN):
    """A model with an attribute `blocks` that is not a list of blocks."""

    blocks = 2


@pytest.mark.parametrize(
    "change",
    [
        dict(attention=ForeignAttention, reduction=partial(Merge, r=2)),
        pytest.param(dict(attention=ForeignAttention, reduction=LearnedThresholds), marks=pytest.mark.slow),
        pytest.param(dict(reduction=Untraceable), marks=pytest.mark.slow),
        dict(model=OtherBlocks),
    ],
    ids=["no projection", "no projection, tokens by image", "cannot be traced", "other blocks"],
)
def test_model_that_cannot_be_counted_or_drawn_does_not_fail_its_run(tmp_path, change, monkeypatch):
    recipe = types.ModuleType("recipes.foreign")
    monkeypatch.setitem(sys.modules, "recipes.foreign", recipe)
    for component in (ForeignAttention, Untraceable, OtherBlocks):
        monkeypatch.setattr(component, "__module__", "recipes.foreign")
        setattr(recipe, component.__name__, component)
    whole = HeldOut.open
    monkeypatch.setattr(HeldOut, "open", lambda self: whole(self).take(slice(10)))  # each image is counted separately
    record = fit(SHORT.vary(evaluators=(accuracy, partial(cost, repeats=1)), **change), tmp_path)
    assert record.finished and record.macs > 0 and record.test["macs"] > 0
    if change.get("reduction") is Untraceable:
        assert "Untraceable" in record.picture["error"]
