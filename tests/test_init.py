"""Runs that start from another run: trained first and once, paired with it, its weights loaded whole, its cost in the budget."""

import hashlib
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

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
    ViT,
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
from smallvit.data.images import HeldOut
from smallvit.launch import launch
from smallvit.launch.scheduler import with_dependencies
from smallvit.recipe import shortened, with_length
from smallvit.record import WEIGHTS, read_record

TINY = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=4, heads=2)
SHORT = Run(model=TINY, labels=50, val=20, steps=12, batch=8, augment=augment.digits())
SHELF = SHORT.vary(init=SHORT, steps=0, augment=(), ema=0.0)


def test_with_no_step_and_nothing_reduced_it_is_the_run_it_starts_from(tmp_path):
    record = fit(SHELF.vary(reduction=Merge), tmp_path)
    before = read_record(tmp_path / "init")
    assert before["fingerprint"] == fingerprint(SHORT) == record["pretraining"]["fingerprint"]
    assert record["test"] == before["test"] and record["steps"] == 0 and record["seconds"] == 0
    ours, theirs = load_file(tmp_path / WEIGHTS), load_file(tmp_path / "init" / WEIGHTS)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_what_the_start_cost_stands_in_the_record_its_own_start_included(tmp_path):
    second = SHORT.vary(init=SHORT, steps=6)
    record = fit(second.vary(init=second, steps=2), tmp_path)
    assert record["images_seen"] == 2 * 8
    assert (record["pretraining"]["images_seen"], record["pretraining"]["steps"]) == ((6 + 12) * 8, 6 + 12)
    assert record["weights"]["loaded"] == len(load_file(tmp_path / WEIGHTS)) and record["weights"]["missing"] == []
    assert record["weights"]["sha256"] == hashlib.sha256((tmp_path / "init" / WEIGHTS).read_bytes()).hexdigest()


def test_only_a_reduction_may_be_new(tmp_path):
    start, learned = tmp_path / "start", partial(LearnedPrune, keep=0.5)
    fit(SHORT, start)
    record = fit(SHELF.vary(reduction=learned), tmp_path / "learned", start=start)
    assert record["weights"]["missing"] and all(".reduction." in name for name in record["weights"]["missing"])
    with pytest.raises(ValueError, match=r"do not fit: blocks.0.*expected the same model but for its reduction"):
        fit(SHELF.vary(dim=32), tmp_path / "wide", start=start)
    with pytest.raises(ValueError, match=r"do not fit: .*prefix; expected"):
        fit(SHELF.vary(registers=2), tmp_path / "registers", start=start)


def test_another_runs_folder_is_no_start(tmp_path):
    fit(SHORT.vary(steps=3), tmp_path / "other")
    with pytest.raises(ValueError, match="holds the record of run"):
        fit(SHELF, tmp_path / "mine", start=tmp_path / "other")


def test_starts_are_trained_first_and_once_also_those_that_no_arm_is(tmp_path):
    other = SHORT.vary(lr=3e-3)
    arms = {"scratch": SHORT, "shelf": SHELF, "tuned": SHORT.vary(init=SHORT, steps=4), "other": SHELF.vary(init=other)}
    runs = ablate(arms, labels=[50], seeds=[3, 4], references=False)
    ordered, starts = with_dependencies(runs)
    assert [ordered[at["init"]].lr for at in starts if at] == [1e-3, 1e-3, 3e-3] * 2 and len(ordered) == 10
    told = []
    records = launch(list(reversed(runs)), tmp_path, recipe="t", jobs=2, show=told.append)
    assert [r["status"] for r in records] == ["finished"] * 8 and len(told) == 10
    scratch = {r["seed"]: r for r in records if r["arm"] == "scratch"}
    for r in records:
        if r["arm"] in ("shelf", "tuned"):
            assert r["pretraining"]["fingerprint"] == scratch[r["seed"]]["fingerprint"]
            assert r["subset_sha256"] == scratch[r["seed"]]["subset_sha256"]
    assert len(list(tmp_path.rglob(WEIGHTS))) == 10


def test_a_part_of_a_recipe_trains_its_start_where_the_whole_would_look_for_it(tmp_path):
    runs = ablate({"base, plain": SHORT, "shelf": SHELF}, labels=[50], seeds=[0], references=False)
    launch(runs[1:], tmp_path, recipe="t", jobs=1)
    launch(runs, tmp_path, recipe="t", jobs=1, show=lambda record: pytest.fail("the start was trained a second time"))


def test_a_start_that_two_comparisons_share_is_trained_once_whichever_comes_first(tmp_path):
    one = ablate({"a": SHELF}, labels=[50], seeds=[0], references=False)
    other = ablate({"b": SHELF.vary(lr=0.5)}, labels=[50], seeds=[0], references=False)
    assert {run.init.arm for run in one + other} == {"start of a", "start of b"} and one[0].init == other[0].init
    launch(other, tmp_path, recipe="t", jobs=1)
    told = []
    launch(one + other, tmp_path, recipe="t", jobs=1, show=told.append)
    assert [record["arm"] for record in told] == ["a"]


def test_a_start_that_also_teaches_is_paid_for_once(tmp_path):
    record = fit(SHORT.vary(init=SHORT, teacher=SHORT, objective=Distill, steps=2), tmp_path)
    assert record["pretraining"]["steps"] == SHORT.steps


def test_what_start_and_teacher_both_came_from_is_paid_for_once(tmp_path):
    first = SHORT.vary(lr=1e-3)
    record = fit(SHORT.vary(init=first, teacher=SHORT.vary(init=first, steps=7), objective=Distill, steps=2), tmp_path)
    assert record["pretraining"]["steps"] == first.steps + 7 and record["pretraining"]["images_seen"] == (first.steps + 7) * 8


def test_a_start_takes_the_seed_and_the_labels_of_its_run_unless_it_has_its_own():
    runs = ablate({"a": replace(SHORT, labels=None), "b": replace(SHELF, labels=None, init=replace(SHORT, labels=None))},
                  labels=[10, 20], seeds=[5], references=False)  # fmt: skip
    assert [(run.init.labels, run.init.seed) for run in runs if run.init] == [(10, 5), (20, 5)]
    own = ablate({"a": SHORT.vary(labels=None), "b": SHELF.vary(labels=None)}, labels=[20], seeds=[5], references=False)
    assert own[1].init.labels == 50
    assert all(run.init is None for run in ablate({"a": SHELF}, labels=[50], seeds=[0]) if run.role == "reference")


def test_a_start_is_a_choice_and_is_written_down():
    assert fingerprint(SHELF) != fingerprint(SHELF.vary(init=SHORT.vary(steps=13)))
    assert rebuild(describe(SHELF)) == SHELF and rebuild(describe(SHORT)).init is None
    assert difference(SHELF, SHELF.vary(init=SHORT.vary(steps=13))) == {"init.steps": ("12", "13")}
    assert [run.init.steps for run in shortened([replace(SHELF, arm="a")])] == [2]
    assert with_length(SHELF, lambda steps: 3 * steps).init.steps == 36
    with pytest.raises(ValueError, match="init is 'scratch'; expected the run to start from"):
        SHORT.vary(init="scratch")


@pytest.mark.parametrize(
    "change",
    [
        dict(reduction=partial(LearnedPrune, keep=0.6), objective=LearnToPrune),
        dict(reduction=LearnedThresholds, objective=partial(LearnThresholds, budget=0.6), lr=0.1),
    ],
    ids=["DynamicViT", "LTMP"],
)
def test_learned_reductions_are_trained_from_a_start_and_bitwise_again(tmp_path, change):
    run = SHORT.vary(init=SHORT, steps=8, **change)
    fit(SHORT, tmp_path / "start")
    first, second = (fit(run, tmp_path / name, start=tmp_path / "start") for name in "ab")
    assert first["test"] == second["test"] and first["macs"] == second["macs"]
    one, two, start = (load_file(tmp_path / name / WEIGHTS) for name in ("a", "b", "start"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    moved = {name.rpartition(".")[0] for name in start if not torch.equal(one[name], start[name])}
    assert bool(moved) == (run.objective is LearnToPrune)  # thresholds alone learn in LTMP
    assert first["picture"]["groups"] and first["macs"] < read_record(tmp_path / "start")["macs"] * 1.2


# What may go wrong


def test_a_start_that_fails_is_tried_once_and_named_in_what_needed_it(tmp_path, capfd):
    broken = SHORT.vary(tokenizer=partial(PatchEmbed, patch=3))
    arms = {"scratch": SHORT, "broken": broken, "needs": broken.vary(init=broken, steps=2), "shelf": SHELF}
    records = launch(ablate(arms, labels=[50], seeds=[0], references=False), tmp_path, recipe="t", jobs=1)
    assert [r["status"] for r in records] == ["finished", "failed", "failed", "finished"]
    assert records[2]["error"].startswith("RuntimeError: its start failed: ValueError") and "patch" in records[2]["error"]
    assert capfd.readouterr().err.count("FAILED") == 2


def test_weights_that_are_not_the_starts_are_refused(tmp_path):
    fit(SHORT, tmp_path / "start")
    fit(SHORT.vary(seed=9), tmp_path / "other")
    good = (tmp_path / "start" / WEIGHTS).read_bytes()
    (tmp_path / "start" / WEIGHTS).write_bytes((tmp_path / "other" / WEIGHTS).read_bytes())
    with pytest.raises(ValueError, match=r"model.safetensors is of run \w+, not of \w+, whose weights are asked for"):
        fit(SHELF, tmp_path / "mine", start=tmp_path / "start")
    (tmp_path / "start" / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors to start from; delete its record.json"):
        fit(SHELF, tmp_path / "mine", start=tmp_path / "start")
    (tmp_path / "start" / WEIGHTS).write_bytes(good)
    assert fit(SHELF, tmp_path / "mine", start=tmp_path / "start")["status"] == "finished"
    with pytest.raises(ValueError, match="for a run without init; expected it to have init=a run"):
        fit(SHORT, tmp_path / "plain", start=tmp_path / "start")


def test_the_start_of_a_start_goes_by_the_name_of_its_arm_too():
    tuned = SHORT.vary(init=SHORT, steps=4)
    runs = ablate({"base": SHORT, "tuned": tuned, "both": tuned.vary(init=tuned)}, labels=[50], seeds=[0], references=False)
    assert (runs[2].init.arm, runs[2].init.init.arm, runs[1].init.arm) == ("tuned", "base", "base")


def test_labels_that_only_the_start_had_are_counted(tmp_path):
    more = SHELF.vary(labels=None, init=SHORT.vary(labels=400))
    runs = ablate({"base": SHORT.vary(labels=None), "more": more}, labels=[50], seeds=[0], references=False)
    records = launch(runs, tmp_path, recipe="t", jobs=1)
    assert records[1]["pretraining"]["labels"] == 400
    extra = {row.arm: row.budget["extra_labels"] for row in compare(records).rows}
    assert extra == {"base": 0, "more": 350}


def test_all_labels_and_those_that_a_start_chose_by_are_counted_too(tmp_path):
    start = replace(SHORT, labels=None, early_stop=1)
    record = fit(SHORT.vary(init=start, steps=2), tmp_path)
    assert record["pretraining"]["labels"] == len(digits().train) - 20 and record["pretraining"]["chosen_labels"] == 20
    base = fit(SHORT, tmp_path / "base")
    rows = compare([base | {"role": "baseline", "arm": "a"}, record | {"role": "technique", "arm": "b", "baseline": "a"}]).rows
    assert {row.arm: row.budget["extra_labels"] for row in rows} == {"a": 0, "b": len(digits().train) - 20 - 50 + 20}


def test_a_start_of_a_start_that_is_gone_is_trained_again(tmp_path):
    second = SHORT.vary(init=SHORT, steps=4, lr=1e-3)
    arms = {"base": SHORT.vary(lr=2e-3), "from a": SHELF, "from b": second.vary(init=second, steps=2)}
    runs = ablate(arms, labels=[50], seeds=[0], references=False)
    assert [record["arm"] for record in launch(runs[:2], tmp_path, recipe="t", jobs=1)] == ["base", "from a"]
    shutil.rmtree(tmp_path / "t" / "50" / "before")
    assert [record["status"] for record in launch(runs, tmp_path, recipe="t", jobs=1)] == ["finished"] * 3


class Silent(torch.nn.Module):
    """Attention of another make: no projection, no saliency."""

    def __init__(self, dim, heads):
        super().__init__()
        self.mixing = torch.nn.Linear(dim, dim)

    def forward(self, x, size=None, mask=None):
        return AttentionOutput(self.mixing(x), key=lambda: x, saliency=lambda queries: x.square().mean(-1))


class Narrow(torch.nn.Module):
    """A reduction that cannot be followed: it reads all channels of a token. Keeps the better half of the patches."""

    def __init__(self, place):
        super().__init__()
        self.score, self.prefix = torch.nn.Linear(place.dim, 1), place.prefix

    def forward(self, x, size=None, key=None, saliency=None):
        patches = x[:, self.prefix :]
        best = self.score(patches)[..., 0].argsort(-1)[:, : (patches.shape[1] + 1) // 2, None].expand(-1, -1, x.shape[-1])
        return torch.cat([x[:, : self.prefix], patches.gather(1, best)], dim=1), size


class Blocky(SmallCNN):
    """A model with an attribute `blocks` that is no list of blocks."""

    blocks = 2


@pytest.mark.parametrize(
    "change",
    [
        dict(attention=Silent, reduction=partial(Merge, r=2)),
        dict(attention=Silent, reduction=LearnedThresholds),
        dict(reduction=Narrow),
        dict(model=Blocky),
    ],
    ids=["no projection", "no projection, tokens by image", "cannot be followed", "blocks of its own"],
)
def test_what_cannot_be_counted_or_drawn_costs_no_run(tmp_path, change, monkeypatch):
    monkeypatch.setattr("smallvit.components.address", lambda thing: f"tests.{thing.__name__}")
    monkeypatch.setattr("smallvit.components.written", lambda thing: {})
    whole = HeldOut.open
    monkeypatch.setattr(HeldOut, "open", lambda self: whole(self).take(slice(10)))  # each is counted on its own
    record = fit(SHORT.vary(evaluators=(accuracy, partial(cost, repeats=1)), **change), tmp_path)
    assert record["status"] == "finished" and record["macs"] > 0 and record["test"]["macs"] > 0
    if change.get("reduction") is Narrow:
        assert "Narrow cannot be followed" in record["picture"]["error"]
