"""Stacked runs: the same training as one by one, to rounding; what cannot be stacked is trained alone and says nothing else."""

import importlib
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from smallvit import (
    DINO,
    Distill,
    DistilledTokens,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    Projected,
    Run,
    ShiftedPatchEmbed,
    SmallCNN,
    ViT,
    ablate,
    augment,
    digits,
    linear_probe,
)
from smallvit.launch import autotune as trial
from smallvit.launch import launch
from smallvit.optim import tensors
from smallvit.record import CHECKPOINT, WEIGHTS
from smallvit.train import fit, fit_stacked
from smallvit.train.loop import Training
from smallvit.train.stack import NotStackable, Stack

trainings = importlib.import_module("smallvit.train.fit")  # the package's name for it is the function
TINY = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2)
SHORT = Run(model=TINY, labels=50, val=20, steps=12, batch=8, clip=0.5, augment=augment.digits())
KINDS = {
    "plain": SHORT,
    "locality": SHORT.vary(attention=LocalityAttention),
    "shifted": SHORT.vary(tokenizer=partial(ShiftedPatchEmbed, patch=2), pool=MeanTokens, registers=2),
    "merged": SHORT.vary(reduction=partial(Merge, r=2)),
    "batch norm": SHORT.vary(pool=Projected),
    "layer by layer": SHORT.vary(layer_decay=0.5, ema=0.0, clip=0.0),
    "cnn": SHORT.vary(model=SmallCNN),
}


def training(run: Run, seed: int) -> Training:
    """In double precision, where rounding cannot hide a mistake."""
    run, data = run.vary(seed=seed), digits()
    made = Training(run, data, data.subset(labels=run.labels, val=run.val, seed=seed), "cpu")
    for module in (made.objective, made.averaged):
        if module is not None:
            module.double()
    made.pairs = tensors(made.averaged, made.objective.model) if made.averaged else []
    draw = made.next_batch
    made.next_batch = lambda: (batch := draw())._replace(images=batch.images.double(), targets=batch.targets.double())
    return made


def weights(one: Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.model.state_dict().items()}


@pytest.mark.parametrize("run", KINDS.values(), ids=KINDS)
def test_together_they_take_the_steps_of_each_alone(run, monkeypatch):
    monkeypatch.setattr("smallvit.objectives.supervised.cross_entropy", precise)
    alone, together = ([training(run, seed) for seed in (3, 1, 4)] for _ in range(2))
    start = [weights(one) for one in together]
    for one in alone:
        one.objective.train()
        for _ in range(6):
            one.train_step()
    stack = Stack(together)
    for one in together:
        one.objective.train()
    for _ in range(6):
        stack.train_step()
    for before, one, other in zip(start, alone, together):
        assert other.step == 6 and other.stacked == 3
        torch.testing.assert_close(other.loss.double(), one.loss.double(), rtol=1e-6, atol=1e-6)
        found, expected = weights(other), weights(one)
        assert any(not torch.equal(found[name], before[name]) for name in found)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-7, msg=name)
        for p, q in zip(other.objective.parameters(), one.objective.parameters()):
            for moment in ("exp_avg", "exp_avg_sq"):
                if one.optimizer.state[q]:
                    torch.testing.assert_close(other.optimizer.state[p][moment], one.optimizer.state[q][moment])


def precise(logits, targets):
    return -(targets * logits.log_softmax(-1)).sum(-1).mean()


def test_each_keeps_its_record_and_says_how_many_there_were(tmp_path):
    runs = [SHORT.vary(seed=seed) for seed in range(3)]
    alone = [fit(run, tmp_path / f"alone{run.seed}") for run in runs]
    together = fit_stacked(runs, [tmp_path / str(run.seed) for run in runs])
    assert [r["stacked"] for r in alone] == [None] * 3 and [r["stacked"] for r in together] == [3] * 3
    for one, other in zip(alone, together):
        assert {k: one[k] for k in ("seed", "fingerprint", "subset_sha256", "steps", "images_seen", "params")} == {
            k: other[k] for k in ("seed", "fingerprint", "subset_sha256", "steps", "images_seen", "params")
        }
        assert [point[1] for point in other["curve"]] == pytest.approx([point[1] for point in one["curve"]], abs=1e-3)
        assert other["test"]["nll"] == pytest.approx(one["test"]["nll"], abs=1e-3)
    assert fit_stacked(runs, [tmp_path / str(run.seed) for run in runs]) == together, "finished runs were trained again"


def test_half_precision_stacks_too(tmp_path):
    runs = [SHORT.vary(seed=seed, precision="bf16") for seed in range(2)]
    alone = [fit(run, tmp_path / f"alone{run.seed}") for run in runs]
    together = fit_stacked(runs, [tmp_path / str(run.seed) for run in runs])
    assert [r["stacked"] for r in together] == [2, 2]
    for one, other in zip(alone, together):
        assert other["test"]["nll"] == pytest.approx(one["test"]["nll"], abs=2e-2)


@pytest.mark.parametrize(
    "knobs",
    [{}, {"kind": "hard"}, {"token": True}, {"weight": 0.0}],
    ids=lambda knobs: next(iter(knobs), "soft"),
)
def test_pupils_each_with_a_teacher_of_their_own_stack_too(knobs, tmp_path):
    pool = {"pool": DistilledTokens} if "token" in knobs else {}
    run = SHORT.vary(objective=partial(Distill, **knobs), teacher=SHORT.vary(model=SmallCNN), **pool)
    runs = [run.at_seed(seed) for seed in range(2)]
    alone = [fit(run, tmp_path / f"alone{run.seed}") for run in runs]
    together = fit_stacked(runs, [tmp_path / str(run.seed) for run in runs])
    assert [r["stacked"] for r in together] == [2, 2]
    for one, other in zip(alone, together):
        assert [point[1] for point in other["curve"]] == pytest.approx([point[1] for point in one["curve"]], abs=1e-3)
        assert other["test"]["nll"] == pytest.approx(one["test"]["nll"], abs=1e-3)


class Killed(Exception):
    pass


def put_down(runs, places, monkeypatch):
    """Killed after five steps together."""

    def killed(members, train_step, watch):
        for member in members:
            member.objective.train()
        for _ in range(5):
            train_step()
        for member in members:
            member.save()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(trainings, "train", killed)
        with pytest.raises(Killed):
            fit_stacked(runs, places)


def test_put_down_and_taken_up_again_together_they_end_where_they_would_have(tmp_path, monkeypatch):
    runs = [SHORT.vary(seed=seed) for seed in range(2)]
    whole, broken = ([tmp_path / f"{name}{run.seed}" for run in runs] for name in ("whole", "broken"))
    fit_stacked(runs, whole)

    put_down(runs, broken, monkeypatch)
    assert all((place / CHECKPOINT).exists() for place in broken)
    taken_up = fit_stacked(runs, broken)
    assert [r["steps"] for r in taken_up] == [12, 12]
    for one, other in zip(whole, broken):
        expected, found = (load_file(place / WEIGHTS) for place in (one, other))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_one_that_was_put_down_in_a_stack_and_ends_alone_says_so(tmp_path, monkeypatch):
    runs, places = [SHORT.vary(seed=seed) for seed in range(2)], [tmp_path / "0", tmp_path / "1"]
    put_down(runs, places, monkeypatch)
    assert fit(runs[0], places[0])["stacked"] == 2


def test_one_that_is_further_than_the_others_is_trained_alone(tmp_path):
    runs, places = [SHORT.vary(seed=seed) for seed in range(2)], [tmp_path / "0", tmp_path / "1"]
    with trainings.opened(runs[0], places[0], "", "cpu", None, None) as (ahead, _):
        ahead.objective.train()
        ahead.train_step()
        ahead.save()
    assert [r["stacked"] for r in fit_stacked(runs, places)] == [None, None]
    expected = load_file((fit(runs[0], tmp_path / "alone"), tmp_path / "alone" / WEIGHTS)[1])
    found = load_file(places[0] / WEIGHTS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (SHORT.vary(dropout=0.1), "random"),
        (SHORT.vary(drop_path=0.1), "random"),
        (SHORT.vary(early_stop=2), "early_stop"),
        (SHORT.vary(init=SHORT, steps=0), "nothing to train"),
        (SHORT.vary(objective=partial(DINO, prototypes=16), augment=augment.digit_crops(local=0)), "DINO does more"),
    ],
    ids=["dropout", "drop path", "early stop", "frozen", "objective"],
)
def test_what_cannot_be_stacked_is_named_and_trained_alone(run, why, tmp_path):
    runs = [run.vary(seed=seed) for seed in range(2)]
    with pytest.raises(NotStackable, match=why):
        Stack([training(one, one.seed) for one in runs])
    if why == "random":
        fit(runs[1], tmp_path / "alone")
        records = fit_stacked(runs, [tmp_path / "0", tmp_path / "1"])
        assert [r["stacked"] for r in records] == [None, None]
        expected, found = (load_file(tmp_path / name / WEIGHTS) for name in ("alone", "1"))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "change", [{"lr": 0.1}, {"steps": 24}, {"weight_decay": 0.5}, {"labels": 40}], ids=lambda x: next(iter(x))
)
def test_runs_that_differ_in_more_than_their_seed_are_trained_alone(change, tmp_path):
    runs = [SHORT, SHORT.vary(seed=1, **change)]
    with pytest.raises(NotStackable, match="more than their seed"):
        Stack([training(run, run.seed) for run in runs])
    assert [r["stacked"] for r in fit_stacked(runs, [tmp_path / "0", tmp_path / "1"])] == [None, None]


def test_a_checkpoint_is_no_larger_for_the_company(tmp_path, monkeypatch):
    runs = [SHORT.vary(seed=seed, ema=0.1) for seed in range(4)]
    put_down(runs, [tmp_path / str(run.seed) for run in runs], monkeypatch)
    alone = Training(runs[0], digits(), digits().subset(labels=50, val=20, seed=0), "cpu")
    alone.resume(tmp_path / "alone", "")
    alone.train_step()
    alone.save()
    sizes = [path.stat().st_size for path in (tmp_path / "0" / CHECKPOINT, tmp_path / "alone")]
    assert sizes[0] < 1.1 * sizes[1]


def test_a_model_that_is_another_for_each_member_is_found_out():
    members = [training(SHORT, seed) for seed in range(2)]
    members[1].objective.model.blocks[0].attention.scale *= 3  # a number of its own, which no weight holds
    with pytest.raises(NotStackable, match="the losses together are"):
        Stack(members)


def test_a_recipe_in_stacks_has_the_runs_that_it_has_without(tmp_path):
    arms = {"scratch": SHORT, "dropout": SHORT.vary(dropout=0.1), "tuned": SHORT.vary(init=SHORT.vary(lr=2e-3), lr=5e-4)}
    arms["frozen"] = SHORT.vary(init=SHORT.vary(lr=2e-3), steps=0, augment=(), ema=0.0, evaluators=(linear_probe,))
    runs = ablate(arms, labels=[50], seeds=range(3), references=False)
    told = []
    records = launch(runs, tmp_path, recipe="t", jobs=1, stack=3, show=told.append)
    assert [(r["arm"], r["seed"]) for r in records] == [(run.arm, run.seed) for run in runs]
    assert {(r["arm"], r["stacked"]) for r in records} == {
        ("scratch", 3), ("dropout", None), ("tuned", 3), ("frozen", None)
    }  # fmt: skip
    assert len(told) == 15 and all(r["status"] == "finished" for r in told)  # with what the tuned start from
    with pytest.raises(ValueError, match="stack is 0; expected how many runs"):
        launch(runs, tmp_path, recipe="t", stack=0)


def test_one_that_fails_takes_no_other_with_it(tmp_path):
    broken = SHORT.vary(tokenizer=partial(PatchEmbed, patch=3))
    runs = ablate({"scratch": SHORT, "broken": broken}, labels=[50], seeds=range(2), references=False)
    records = launch(runs, tmp_path, recipe="t", jobs=1, stack=2)
    found = {(r["arm"], r["seed"]): (r["status"], r["stacked"]) for r in records}
    assert found == {
        ("scratch", 0): ("finished", 2), ("scratch", 1): ("finished", 2),
        ("broken", 0): ("failed", None), ("broken", 1): ("failed", None),
    }  # fmt: skip


def test_how_many_are_best_trained_as_one_is_measured(monkeypatch):
    """As if k together took the square root of k times as long as one, and then as if they took k times as long."""
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(9), references=False)
    monkeypatch.setattr(trial, "a_step", lambda train_step, one: train_step() or (one.stacked or 1) ** 0.5)
    size, why = trial.stack_size(runs, jobs=2, device="cpu")
    assert size == 4 and "4 together: 500 ms a step of each" in why and "8 together" not in why  # a worker would be idle
    assert trial.stack_size(runs, jobs=1, device="cpu")[0] == 8 and trial.stack_size(runs[:1], jobs=1, device="cpu")[0] == 1
    random = ablate({"scratch": SHORT.vary(dropout=0.1)}, labels=[50], seeds=range(4), references=False)
    size, why = trial.stack_size(random, jobs=1, device="cpu")
    assert size == 1 and "2 together: NotStackable" in why and "random" in why
    monkeypatch.setattr(trial, "a_step", lambda train_step, one: float(one.stacked or 1))
    assert trial.stack_size(runs, jobs=1, device="cpu")[0] == 1


def test_every_kind_of_run_has_a_say_in_how_many_and_one_that_cannot_be_stacked_counts_as_it_is_alone(monkeypatch):
    """As if k together took the square root of k times as long as one; DINO cannot, and takes most of the steps."""
    before = SHORT.vary(objective=partial(DINO, prototypes=16), augment=augment.digit_crops(local=0), clip=0.0, ema=0.0)
    monkeypatch.setattr(trial, "a_step", lambda train_step, one: train_step() or (one.stacked or 1) ** 0.5)
    for steps, expected, took in ((12, 4, 750), (1_200, 1, 995)):
        runs = ablate({"from it": SHORT.vary(init=before.vary(steps=steps))}, labels=[50], seeds=range(4), references=False)
        size, why = trial.stack_size(runs, jobs=1, device="cpu")
        assert size == expected and f"4 together: {took} ms" in why and "of 2 kinds of runs 1 are trained alone" in why


def test_what_keeps_a_stack_from_being_tried_is_said_and_keeps_nothing_else(monkeypatch):
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(8), references=False)

    def step(train_step, one):
        if one.stacked == 4:
            raise RuntimeError("out of memory")
        return (one.stacked or 1) ** 0.5

    monkeypatch.setattr(trial, "a_step", step)
    size, why = trial.stack_size(runs, jobs=1, device="cpu")
    assert size == 2 and "4 together: RuntimeError, out of memory" in why and "8 together" not in why
    broken = [run.vary(tokenizer=partial(PatchEmbed, patch=3)) for run in runs]
    size, why = trial.stack_size(broken, jobs=1, device="cpu")
    assert size == 1 and "patches of 3 pixels" in why
    assert trial.stack_size([run.vary(steps=0) for run in runs], jobs=1, device="cpu") == (1, "nothing is trained")
    with pytest.raises(ValueError, match="device is 'cdua'"):
        trial.stack_size(runs, jobs=1, device="cdua")
