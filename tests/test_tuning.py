"""Equal tuning: the same trials for all arms, no test image read, and the same choice for any number of workers."""

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from toys import TINY_VIT

import smallvit
from smallvit import MAE, ArmRun, Block, LocalityAttention, Run, ablate, carry_over, digits, fit, imagenet_vit_s, knn
from smallvit.__main__ import main
from smallvit.commands.tune import keep_trials, plan, table
from smallvit.launch import launch
from smallvit.launch import tune as loop
from smallvit.launch.results import folder, tags
from smallvit.launch.suggest import at_edge, position_of, suggestions, value_at
from smallvit.launch.tune import HALVING, candidates, may_succeed, on_all_images, run_count, stages, tune_arms
from smallvit.packing import pack_bits
from smallvit.pretrained import Unavailable
from smallvit.recipe import load_recipe
from smallvit.record import Record, write_record, write_records
from smallvit.report import markdown
from smallvit.report.provenance import warnings
from smallvit.run import describe, fingerprint
from smallvit.train.fit import new_record
from smallvit.trials import read_trials, trials_file
from smallvit.trials import trials as tried_settings
from smallvit.tuning import (
    FIRST_SEED,
    Tune,
    TunedArm,
    apply,
    arm_ranges,
    one_per_cell,
    read,
    runs_to_tune,
    tuned_file,
    untuned_cells,
    with_tuned,
    write,
)
from smallvit.verdicts import compare

BASE = Run(data=digits, model=TINY_VIT, steps=4, batch=8, lr=2e-3, val=20)
ARMS = {"scratch": BASE, "+LSA": BASE.vary(attention=LocalityAttention)}
RANGES = {"lr": (3e-4, 6e-2), "weight_decay": (0.01, 0.3), "depth": [1, 2, 4]}
EIGHT = Tune(RANGES, trials=8, seeds=4, val=100)
FOUR = Tune({"lr": (3e-4, 6e-2)}, trials=4, seeds=2, val=40)


def comparison(tune: Tune = EIGHT, arms: dict[str, Run] = ARMS, **options) -> list:
    return ablate(arms, tune=tune, **{"labels": [50], "seeds": range(2), "references": False} | options)


def trials(runs: list) -> list:
    found, left_out = candidates(runs, one_per_cell(runs_to_tune(runs)))
    assert not left_out
    return found


def untimed(path: Path) -> dict:
    plain = json.loads(path.read_text())
    for arm in plain["arms"]:
        arm["cost"]["seconds"] = 0
    return plain


@pytest.fixture
def fake_launch(monkeypatch):
    """Replace the training by a function of the settings, `score`, and collect the runs that would have been trained."""
    launched: list = []

    def launch(runs, out, *, validation_only, show, **options):
        assert validation_only and out.name == "tuning"
        assert len({fingerprint(entry.run) for entry in runs}) == len(runs)
        launched.append(runs)
        return [finished(entry) for entry in runs]

    def finished(entry) -> Record:
        score = launch.score(entry)
        bits = np.arange(entry.run.val) < round((score or 0) * entry.run.val)
        done = {"val": {"accuracy": float(bits.mean())}, "correct": pack_bits(np.roll(bits, entry.seed))}
        return Record(
            recipe="t",
            arm=entry.arm,
            role=entry.role,
            labels=entry.labels,
            seed=entry.seed,
            fingerprint=fingerprint(entry.run),
            run=describe(entry.run),
            score="accuracy",
            val_images=entry.run.val,
            images_seen=entry.run.steps * entry.run.batch,
            seconds=2.0,
            **({"status": "failed", "error": "FloatingPointError: nan"} if score is None else {"status": "finished"} | done),
        )

    launch.launched, launch.score = launched, lambda entry: 0.5
    monkeypatch.setattr(loop, "launch", launch)
    return launch


# What is tried


def test_stages_halve_the_trials_and_double_the_seeds():
    assert stages(8, 4) == [(8, 1), (4, 2), (2, 4)] and stages(8, 8) == [(8, 1), (4, 2), (2, 4), (2, 8)]
    assert stages(3, 1) == [(3, 1)] and stages(5, 3) == [(5, 1), (3, 2), (2, 3)]
    assert run_count(EIGHT) == 16


@pytest.mark.slow
def test_five_arms_are_tuned_in_twice_the_runs_of_their_own_comparison(tmp_path, fake_launch):
    arms = {f"mlp ratio {ratio}": BASE.vary(block=partial(Block, mlp_ratio=ratio)) for ratio in (1.0, 1.5, 2.0, 3.0, 4.0)}
    runs = comparison(arms=arms, seeds=range(8))
    tuned = tune_arms(trials(runs), tmp_path, recipe="t")
    trained = {fingerprint(entry.run) for launched in fake_launch.launched for entry in launched}
    assert len(runs) == 40 and len(trained) == sum(arm.cost["runs"] for arm in tuned) == 80 < 3 * len(runs)


def test_all_arms_get_the_same_suggestions_and_as_many_trials(tmp_path, fake_launch):
    runs = comparison(references=True, labels=[50, 100])
    found, left_out = candidates(runs, one_per_cell(runs_to_tune(runs)))
    assert {arm.entry.arm for arm in found} == {"scratch", "+LSA", "small CNN"} and len(found) == 6
    assert {arm.arm for arm in left_out} == {"pixels, logistic regression", "pixels, nearest neighbor"}
    assert all(arm.note == "nothing to tune" for arm in left_out)
    for arm in found:
        shared = [{name: settings[name] for name in ("lr", "weight_decay")} for settings in arm.settings]
        assert shared == [{name: settings[name] for name in ("lr", "weight_decay")} for settings in found[0].settings]
        assert ("depth" in arm.settings[0]) == (arm.entry.arm != "small CNN") and len(arm.settings) == 8
        assert {run.val for run in arm.runs} == {100}
    tuned = tune_arms(found, tmp_path, recipe="t")
    assert {(len(arm.trials), arm.cost["runs"]) for arm in tuned} == {(8, 16)}


def test_trials_with_the_settings_of_an_earlier_one_have_no_scores(tmp_path, fake_launch):
    fake_launch.score = lambda entry: 0.5 + 10 * entry.run.lr
    tune = Tune({"lr": [1e-3, 2e-3, 4e-3]}, trials=8, seeds=4, val=100, own={"scratch": {"lr": [2e-3]}})
    tuned = tune_arms(trials(comparison(tune)), tmp_path, recipe="t")
    write(tmp_path / "t.tuned.json", tune, tuned)
    assert read(tmp_path / "t.tuned.json")[1] == tuned
    for arm, few in zip(tuned, ([2e-3], [1e-3, 2e-3, 4e-3]), strict=True):
        scores = {trial["settings"]["lr"]: trial["scores"] for trial in arm.trials if trial["scores"]}
        trained = [settings for settings, _, _ in arm.tuning()["curve"]]
        assert len(arm.trials) == 8 and sorted(scores) == sorted(settings["lr"] for settings in trained) == few
        assert arm.settings == {"lr": few[-1]} and len(scores[few[-1]]) == 4
        assert arm.cost["runs"] == sum(map(len, scores.values()))
    keep_trials(tmp_path / "t.py", tuned, [])
    kept = [trial["arm"] for trial in read_trials(trials_file(tmp_path / "t.py"))]
    assert sorted(kept) == ["+LSA"] * 3 + ["scratch"]
    planned = plan(trials(comparison(tune)), [], tune, 0)
    assert f"scratch, 50 labels: 8 trials, {tuned[0].cost['runs']} runs" in planned
    assert f"\n{sum(arm.cost['runs'] for arm in tuned)} runs with up to 4 seeds" in planned
    first = next(i for i, trial in enumerate(tuned[0].trials) if trial["scores"])
    tuned[0].trials[first]["scores"] = []
    write(tmp_path / "t.tuned.json", tune, tuned)
    with pytest.raises(ValueError, match="arm 'scratch': a trial is"):
        read(tmp_path / "t.tuned.json")


def test_trials_may_be_shorter_than_the_runs_of_the_comparison(tmp_path, fake_launch):
    whole, _ = candidates(comparison(), [("scratch", 50)])
    runs = comparison(replace(EIGHT, steps=0.5))
    short, _ = candidates(runs, [("scratch", 50)])
    assert [2 * run.steps for run in short[0].runs] == [run.steps for run in whole[0].runs]
    (arm,) = tune_arms(short, tmp_path, recipe="t")
    assert all(run.steps == whole[0].runs[0].steps for run in (entry.run for entry in runs))
    assert arm.fingerprint == fingerprint(whole[0].entry.run.at_seed(0))


@pytest.mark.parametrize("values", [(0.999, 0.9999), (0.99, 0.9999), (0.995, 0.9995), (12345.0, 12349.0), (3e-4, 6e-3), (0.0, 1.0)])
def test_every_trial_has_another_value_also_in_a_narrow_range(values):
    found = [each["ema"] for each in suggestions(Tune({"ema": values}, trials=8), {"ema": values}, {"ema": -1.0})]
    assert len(set(found)) == 8 and min(found) >= values[0] and max(found) <= values[1]
    eighths = sorted(int(8 * min(position_of(values, value), 0.999)) for value in found)
    assert max(map(eighths.count, eighths)) <= 2  # a rounded value may lie beyond its eighth


@pytest.mark.parametrize("values", [(1, 100), (1, 12), (2, 9), (0, 5)])
def test_position_of_a_whole_number_gives_this_number(values):
    assert [value_at(values, position_of(values, n)) for n in range(values[0], values[1] + 1)] == list(range(values[0], values[1] + 1))


def test_suggestions_cover_the_ranges_evenly_and_begin_with_the_recipe():
    ranges = RANGES | {"warmup": (0.0, 0.5), "batch": (8, 64)}
    recipe = {"lr": 2e-3, "weight_decay": 0.05, "depth": 2, "warmup": 0.1, "batch": 8}
    found = suggestions(Tune(ranges, trials=64), ranges, recipe)
    assert found == suggestions(Tune(ranges, trials=64), ranges, recipe) and found[0] == recipe
    assert 28 <= sum(s["lr"] < math.sqrt(3e-4 * 6e-2) for s in found) <= 36  # on a logarithmic scale
    assert 28 <= sum(s["warmup"] < 0.25 for s in found) <= 36  # on a linear scale
    assert {s["depth"] for s in found} == {1, 2, 4} and all(isinstance(s["batch"], int) for s in found)
    assert all(low <= s[name] <= high for s in found for name in s if name != "depth" for low, high in [ranges[name]])
    outside = suggestions(Tune(ranges, trials=64), ranges, recipe | {"lr": 1.0})
    assert [s for s in outside if s in found[1:]] == found[1:] and recipe not in outside
    assert all(s["lr"] <= 6e-2 for s in outside)


@pytest.mark.parametrize("value", [3e-4, 5e-4, 1e-3, 2e-3, 6e-3])
def test_values_of_the_recipe_replace_the_nearest_trial(value):
    ranges = {"lr": (3e-4, 6e-3)}
    first, *others = suggestions(Tune(ranges, trials=8), ranges, {"lr": value})
    assert first == {"lr": value}
    eighths = sorted(int(8 * math.log(s["lr"] / 3e-4) / math.log(20)) for s in others)
    missing = set(range(8)) - set(eighths)
    assert len(eighths) == len(set(eighths)) == 7 and len(missing) == 1
    assert abs(missing.pop() + 0.5 - 8 * math.log(value / 3e-4) / math.log(20)) <= 1.5


def test_own_ranges_change_no_other_value():
    own = Tune(RANGES, val=100, own={"+LSA": {"depth": [2], "heads": [1, 2]}})
    scratch, lsa = trials(comparison(own))
    assert [s["lr"] for s in scratch.settings] == [s["lr"] for s in lsa.settings] and "heads" not in scratch.settings[0]
    assert {s["depth"] for s in lsa.settings} == {2} and {s["heads"] for s in lsa.settings} == {1, 2}
    assert len(lsa.settings) == len(scratch.settings) == 8


def test_arm_keeps_the_hyperparameter_that_it_asks_about():
    arms = ARMS | {"depth 4": BASE.vary(depth=4), "deep +LSA": BASE.vary(depth=4, attention=LocalityAttention)}
    ranges = arm_ranges(runs_to_tune(comparison(arms=arms)))
    assert ranges["scratch"] == ranges["+LSA"] == ranges["deep +LSA"] == RANGES
    assert ranges["depth 4"] == {name: RANGES[name] for name in ("lr", "weight_decay")}


def test_external_weights_that_cannot_be_downloaded_are_left_out_with_the_reason(monkeypatch):
    references = imagenet_vit_s(BASE, scratch=False)
    weights = next(iter(references.values())).init
    monkeypatch.setattr(loop, "unavailable_weights", lambda runs: {weights: Unavailable("no network")})
    runs = comparison(FOUR, extra_references=references)
    found, left_out = candidates(runs, one_per_cell(runs_to_tune(runs)))
    assert [arm.entry.arm for arm in found] == ["scratch", "+LSA"]
    assert [arm.note for arm in left_out] == ["left as it is: no network", "nothing to tune"]
    text = plan(found, left_out, FOUR, 0)
    assert "+LSA, 50 labels: 4 trials, 6 runs of 4 steps" in text and "12 runs with up to 2 seeds" in text


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ranges": {}}, "expected a dict"),
        ({"ranges": {"lr": (1e-2, 1e-3)}}, "low < high"),
        ({"ranges": {"lr": (1e-3, math.inf)}}, "expected finite numbers"),
        ({"ranges": {"lr": [math.nan, 1.0]}}, "different numbers or texts"),
        ({"ranges": {"lr": [1e-3]}}, "at least 2"),
        ({"ranges": {"depth": [2, 2]}}, "different"),
        ({"ranges": {"steps": (100, 200)}}, "'steps' cannot be tuned"),
        ({"ranges": RANGES, "trials": 1}, "trials of Tune is 1"),
        ({"ranges": RANGES, "own": {"+LSA": (1, 2)}}, "own is"),
        ({"ranges": RANGES, "common": 1}, "common of Tune is 1"),
    ],
)
def test_wrong_ranges_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Tune(**options)


@pytest.mark.parametrize(
    "runs, message",
    [
        (lambda: comparison(Tune({"learning_rate": (1e-3, 1e-2)})), "no option 'learning_rate'; did you mean 'lr'"),
        (lambda: comparison(Tune(RANGES, own={"+LSB": {"lr": [1e-3]}})), r"no option '\+LSB'; did you mean '\+LSA'"),
        (lambda: comparison(Tune(RANGES, own={"+LSA": {"width": [16, 32]}})), "no option 'width'"),
        (lambda: comparison(seeds=[0, FIRST_SEED + 3]), "seed 2003, which the trials use"),
        (lambda: comparison(Tune(RANGES, val=3_000)), r"val=3000, but digits has at most 1\d\d\d .* set val=1\d\d\d or less"),
        (lambda: ablate(ARMS, references=False), "nothing to tune; pass tune="),
        (lambda: comparison(Tune(RANGES, common=False), steps=[4, 8]), r"common=False\) with the lengths \[4, 8\]"),
    ],
)
def test_tuning_that_cannot_work_is_refused_before_training(runs, message):
    with pytest.raises(ValueError, match=message):
        trials(runs())


# What is chosen


def test_best_trial_is_found_and_its_cost_counted(tmp_path, fake_launch):
    runs = comparison()
    fake_launch.score = lambda entry: 0.9 - 0.05 * abs(math.log(entry.run.lr / 5e-3)) + 0.01 * (entry.seed % 2)
    (tuned, _) = tune_arms(trials(runs), tmp_path, recipe="t")
    found = [settings["lr"] for settings in trials(runs)[0].settings]
    assert tuned.settings["lr"] == min(found, key=lambda lr: abs(math.log(lr / 5e-3)))
    assert sorted(len(trial["scores"]) for trial in tuned.trials) == [1, 1, 1, 1, 2, 2, 4, 4]
    drawn = [digits().subset(labels=50, val=100, seed=FIRST_SEED + i) for i in range(4)]
    labels = {i for one in drawn for i in [*one.index.tolist(), *one.val_index.tolist()]}
    assert tuned.cost == {"labels": len(labels), "images_seen": 16 * 4 * 8, "runs": 16, "seconds": 32.0}
    seeds = {entry.seed for launched in fake_launch.launched for entry in launched}
    assert seeds == set(range(FIRST_SEED, FIRST_SEED + 4))
    assert tuned.tuning()["curve"] == [[t["settings"], np.mean(t["scores"]), len(t["scores"])] for t in tuned.trials]


def test_expected_loss_counts_images_that_several_seeds_draw(tmp_path, fake_launch):
    """Variance of the mean of 4 seeds: that of 4 independent ones, and the covariance by the images that two seeds share."""
    rng = np.random.default_rng(0)
    scores: dict = {}
    fake_launch.score = lambda entry: scores.setdefault(fingerprint(entry.run), round(rng.uniform(0.4, 0.6), 3))
    arm = trials(comparison(replace(EIGHT, val=800)))[0]
    (tuned,) = tune_arms([arm], tmp_path, recipe="t")
    one, other = (i for i, s in enumerate(arm.scores) if len(s) == 4)
    deviations, means = [], []
    for seed in range(FIRST_SEED, FIRST_SEED + 4):
        bits = [arm.records[fingerprint(arm.runs[i].at_seed(seed))].correct_bits.astype(float) for i in (one, other)]
        drawn = digits().subset(labels=50, val=800, seed=seed).val_index.tolist()
        means.append((bits[0] - bits[1]).mean())
        deviations.append(dict(zip(drawn, bits[0] - bits[1] - means[-1])))
    shared = [
        sum(deviations[s][i] * deviations[t][i] for i in deviations[s].keys() & deviations[t].keys()) / 800**2
        for s, t in itertools.combinations(range(4), 2)
    ]
    variance = np.var(means, ddof=1) / 4 + max(0.0, np.mean(shared))
    assert tuned.loss == pytest.approx(HALVING * 0.43 * math.sqrt(variance / 2), rel=0.02) and tuned.loss > 0


def test_differences_on_the_same_images_in_another_order_are_only_sorted():
    rng = np.random.default_rng(0)
    differences, drawn = rng.integers(-1, 2, (3, 6)).astype(float), [rng.permutation(6) for _ in range(3)]
    found = on_all_images(differences, drawn)
    assert np.allclose(found, [row[np.argsort(order)] for row, order in zip(differences, drawn)])


def test_seeds_may_have_other_numbers_of_validation_images():
    """Where whole groups are validation images, their number differs from seed to seed."""
    found = on_all_images([np.array([1.0, 0.0]), np.array([1.0, 0.0, 0.5])], [np.array([3, 1]), np.array([1, 2, 3])])
    assert np.allclose(found.mean(1), 0.5)
    assert np.allclose(found, [[-0.25, 0.5, 1.25], [1.0, 0.0, 0.5]])


def test_equal_settings_take_one_place_in_the_halving(tmp_path, fake_launch):
    """With 3 values and 8 trials, copies of the best value would fill the later stages."""
    fake_launch.score = lambda entry: 0.9 - 0.1 * abs(entry.run.model.keywords["depth"] - 4) + 0.01 * (entry.seed % 2)
    arm, _ = trials(comparison(Tune({"depth": [1, 2, 4]}, trials=8, seeds=4, val=100)))
    (tuned,) = tune_arms([arm], tmp_path, recipe="t")
    finalists = [trial["settings"]["depth"] for trial in tuned.trials if len(trial["scores"]) == 4]
    assert tuned.settings == {"depth": 4} and sorted(finalists) == [2, 4] and len(tuned.trials) == 8


def test_earlier_runs_of_a_trial_are_not_trained_on_its_validation_images(tmp_path):
    pretrained = BASE.vary(labels=None)
    arms = {"scratch": BASE, "fine-tuned": BASE.vary(init=pretrained)}
    runs = comparison(Tune({"lr": (3e-4, 6e-2)}, trials=2, seeds=1, val=300), arms)
    (run,) = {arm.runs[0] for arm in trials(runs) if arm.entry.arm == "fine-tuned"}
    run = run.at_seed(FIRST_SEED)
    mine, earlier = (digits().subset(labels=one.labels, val=one.val, seed=FIRST_SEED) for one in (run, run.init))
    assert len(mine.val) == 300 and not {*mine.val_index.tolist()} & {*earlier.index.tolist()}
    with pytest.raises(ValueError, match=r"\d+ of the 300 validation images .* labelled training images of the run in init="):
        fit(BASE.vary(init=pretrained, val=300), tmp_path / "run", validation_only=True)
    without_labels = BASE.vary(init=pretrained, objective=MAE, augment=(), evaluators=(knn,), ema=0.0)
    with pytest.raises(ValueError, match="labelled training images of the run in init= of the run in init="):
        fit(BASE.vary(init=without_labels, val=300), tmp_path / "other", validation_only=True)


@pytest.mark.slow
def test_halving_loses_a_sixth_more_than_all_seeds_for_all_trials():
    """The largest loss over true scatters of 8 trials, in units of the noise of a trial with 4 seeds: 0.43 without halving."""
    rng, repetitions, worst = np.random.default_rng(0), 20_000, {"full": 0.0, "halved": 0.0}
    rows = np.arange(repetitions)
    for scatter in (0.3, 0.375, 0.5, 0.6):
        truth = rng.normal(0, scatter, (repetitions, 8))
        scores = truth[:, :, None] + rng.normal(size=(repetitions, 8, 4))
        left = np.ones((repetitions, 8), bool)
        means = np.zeros((repetitions, 8))
        for count, seeds in stages(8, 4):
            keep = np.argsort(np.where(left, -means, np.inf), axis=1, kind="stable")[:, :count]
            left = np.zeros_like(left)
            np.put_along_axis(left, keep, True, axis=1)
            means = scores[:, :, :seeds].mean(2)
        for name, judged in (("full", scores.mean(2)), ("halved", np.where(left, means, -np.inf))):
            lost = (truth.max(1) - truth[rows, judged.argmax(1)]).mean() * 2  # the noise of 4 seeds is 1 / 2
            worst[name] = max(worst[name], lost)
    assert worst["full"] == pytest.approx(0.43, abs=0.015)
    assert worst["halved"] / worst["full"] == pytest.approx(HALVING, abs=0.04)


def test_first_of_equal_trials_is_chosen(tmp_path, fake_launch):
    arm = trials(comparison())[0]
    (tuned,) = tune_arms([arm], tmp_path, recipe="t")
    assert tuned.settings == arm.settings[0] and [len(t["scores"]) for t in tuned.trials] == [4, 4, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(("place", "edge"), [(-1, ["lr"]), (-2, []), (0, ["lr"])])
def test_the_largest_and_the_smallest_value_that_were_tried_are_an_edge(place, edge, tmp_path, fake_launch):
    """Above the second largest value a larger one was tried, also if its loss became infinite."""
    arm = trials(comparison(replace(EIGHT, ranges={"lr": (3e-4, 6e-2)})))[0]
    tried = sorted(settings["lr"] for settings in arm.settings)
    best = tried[place]
    fake_launch.score = lambda entry: None if entry.run.lr > best else 0.9 - abs(math.log(entry.run.lr / best)) / 10
    (tuned,) = tune_arms([arm], tmp_path, recipe="t")
    assert tuned.settings["lr"] == best and tuned.edge == edge
    assert not at_edge(arm.ranges["lr"], tried[-2])


def test_infinite_loss_ranks_last_and_is_refused_only_for_all_trials(tmp_path, fake_launch):
    fake_launch.score = lambda entry: None if entry.run.lr < 0.02 else 0.1
    arm = trials(comparison())[0]
    (tuned,) = tune_arms([arm], tmp_path, recipe="t")
    assert tuned.settings["lr"] >= 0.02 and tuned.trials[0]["scores"][0] is None
    assert all(None not in [point[1]] for point in tuned.tuning()["curve"]) and len(tuned.tuning()["curve"]) < 8
    fake_launch.score = lambda entry: None
    with pytest.raises(ValueError, match="all trials of scratch, 50 labels had an infinite loss"):
        tune_arms(trials(comparison())[:1], tmp_path, recipe="t")


def test_trials_with_an_infinite_loss_are_not_trained_again(tmp_path):
    """Neither in the next stage nor by the next command: they would fail in the same way."""
    runs = [ArmRun(run=BASE.vary(lr=lr).at_seed(2000), arm="scratch") for lr in (1e-3, 2e-3)]
    for entry, error in zip(runs, ("FloatingPointError: the loss is nan at step 3", "OSError: the disk was not there")):
        place = folder(entry, tmp_path, "t")
        place.mkdir(parents=True)
        write_record(place, replace(new_record(entry.run, tags(entry, "t"), "failed"), error=error))
    shown = []
    launch(runs, tmp_path, recipe="t", jobs=1, validation_only=True, show=shown.append, retry=may_succeed)
    assert [(record.run["lr"], record.status) for record in shown] == [(2e-3, "finished")]


def test_arm_whose_weights_are_gone_keeps_its_tuned_settings(tmp_path, monkeypatch, fake_launch):
    """The weights were on the machine that tuned the arm, and are not on this one."""
    text = RECIPE.format(count=str(tmp_path / "reads.txt"), other="init=Weights(name='vit_tiny_patch16_224')")
    path = tmp_path / "mine.py"
    path.write_text(text.replace("ViT, ablate", "ViT, Weights, ablate").replace("HeldOut.open = counted", ""))
    monkeypatch.setattr(loop, "unavailable_weights", lambda runs: {})
    assert main(["tune", str(path)]) == 0
    tuned = read(tuned_file(path))[1]
    assert [len(arm.trials) for arm in tuned] == [4, 4]
    monkeypatch.setattr(loop, "unavailable_weights", lambda runs: {run.init: Unavailable("no network") for run in runs if run.init})
    assert main(["tune", str(path)]) == 0
    assert read(tuned_file(path))[1] == tuned


def test_choice_is_the_same_without_optuna(tmp_path, fake_launch, monkeypatch):
    chosen = tune_arms(trials(comparison()), tmp_path, recipe="with")
    monkeypatch.setattr(loop, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "optuna", None)
    again = tune_arms(trials(comparison()), tmp_path, recipe="without")
    assert [(arm.settings, arm.trials) for arm in again] == [(arm.settings, arm.trials) for arm in chosen] and chosen
    assert not (tmp_path / "tuning" / "without" / "journal.log").exists()


@pytest.mark.slow
def test_optuna_shows_all_trials_also_after_a_kill_in_the_middle_of_a_line(tmp_path, fake_launch):
    from optuna import load_study
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    journal = tmp_path / "tuning" / "t" / "journal.log"
    for _ in range(2):
        tune_arms(trials(comparison()), tmp_path, recipe="t")
        storage = JournalStorage(JournalFileBackend(str(journal)))
        study = load_study(study_name="+LSA, 50 labels", storage=storage)
        assert [t.state.name for t in study.trials] == ["COMPLETE"] * 2 + ["PRUNED"] * 6
        assert study.trials[0].intermediate_values == dict.fromkeys((1, 2, 4), 0.5) and study.best_value == 0.5
        journal.write_bytes(journal.read_bytes()[:-20])
    with loop.open_journal(journal.parent), pytest.raises(ValueError, match="another process is tuning"):
        tune_arms(trials(comparison()), tmp_path, recipe="t")


@pytest.mark.parametrize("line", [b"half of a line", b"[]", b'{"op_code": 77}', b'{"op_code": 0}', b"\xff"])
def test_damaged_file_of_optuna_is_renamed_and_a_new_one_is_begun(line, tmp_path, capsys):
    pytest.importorskip("optuna")
    journal = tmp_path / "journal.log"
    journal.write_bytes(line + b"\n")
    with loop.open_journal(tmp_path) as storage:
        assert storage.get_all_studies() == []
    assert (tmp_path / "journal.log.damaged").read_bytes() == line + b"\n"
    assert "journal.log is damaged; renamed to *.damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    "values, value, edge",
    [
        ((1e-4, 1e-2), 1e-4, True),
        ((1e-4, 1e-2), 1.5e-4, True),
        ((1e-4, 1e-2), 2e-4, False),
        ((1e-4, 1e-2), 7e-3, True),
        ((0.0, 0.5), 0.06, False),
        ((0.0, 0.5), 0.46, True),
        ([2, 4, 8], 8, True),
        ([8, 2, 4], 4, False),
        ([2, 4], 4, False),
        (["cosine", "constant", "other"], "other", False),
    ],
)
def test_value_at_the_edge_of_its_range(values, value, edge):
    assert at_edge(values, value) is edge


def test_table_shows_the_choice_and_warns_of_an_edge_and_of_a_large_loss():
    arm = TunedArm(
        arm="+SPT",
        labels=1_000,
        fingerprint="x",
        settings={"lr": 0.006, "depth": 4},
        accuracy=0.93123,
        edge=["lr"],
        loss=0.0034,
        trials=[{"settings": {}, "scores": [0.9]}],
    )
    lines = table([arm, replace(arm, arm="scratch", edge=[], loss=0.001)]).splitlines()
    assert lines[1].split("  ")[0] == "+SPT" and "lr=0.006, depth=4" in lines[1] and "93.12" in lines[1] and "0.34" in lines[1]
    assert [line for line in lines if "lr=0.006 at the edge of the range" in line] == [line for line in lines if "edge" in line]
    assert sum("0.34 points may be lost" in line for line in lines) == 1
    assert "1 run, 1 second of training" in table([replace(arm, cost=arm.cost | {"runs": 1, "seconds": 1.4})]).splitlines()


# The file


def chosen(path: Path, runs: list, settings: dict | None = None, note: str = "nothing to tune") -> Path:
    """Write a file in which every trained arm got these settings."""
    settings, tune = settings or {"lr": 0.01, "depth": 4}, runs[0].tune
    cells, ranges = one_per_cell(runs_to_tune(runs)), arm_ranges(runs_to_tune(runs))
    arms = [
        TunedArm(
            arm=arm,
            labels=labels,
            fingerprint=fingerprint(entry.run.at_seed(0)),
            settings=settings,
            accuracy=0.8,
            edge=["depth"],
            loss=0.001,
            cost={"labels": 130, "images_seen": 512, "runs": 16, "seconds": 3.5},
            trials=[{"settings": settings, "scores": [0.7, 0.9]}],
        )
        if ranges[arm]
        else TunedArm(arm=arm, labels=labels, fingerprint=fingerprint(entry.run.at_seed(0)), note=note)
        for (arm, labels), entry in cells.items()
    ]
    write(path, tune, arms)
    assert read(path)[1] == arms
    return path


def test_tuned_copies_have_the_chosen_settings_at_the_longest_length_and_carry_their_cost(tmp_path):
    arms = {name: run.vary(val=30) for name, run in ARMS.items()}
    runs = comparison(arms=arms, steps=[4, 8], labels=[50, 100])
    copies = apply(runs, chosen(tmp_path / "t.tuned.json", runs))
    assert [(c.arm, c.labels, c.seed) for c in copies] == [(r.arm, r.labels, r.seed) for r in runs if r.length == 8]
    assert all((c.run.lr, c.run.steps, c.run.val, c.length) == (0.01, 8, 30, 8) for c in copies)
    assert all(c.run.model.keywords["depth"] == 4 for c in copies)
    assert copies[0].tuning == {
        "settings": {"lr": 0.01, "depth": 4},
        "trials": 1,
        "labels": 130,
        "images_seen": 512,
        "seconds": 3.5,
        "loss": 0.001,
        "edge": ["depth"],
        "curve": [[{"lr": 0.01, "depth": 4}, 0.8, 2]],
    }


def test_untuned_runs_are_left_out_on_request_once_the_settings_are_chosen(tmp_path):
    runs = comparison(Tune({"lr": (1e-3, 1e-2)}, common=False), references=True)
    assert with_tuned(runs, tmp_path / "t.py") == runs
    path = chosen(tmp_path / "t.tuned.json", runs, {"lr": 0.01})
    tuned = with_tuned(runs, tmp_path / "t.py")
    assert tuned == apply(runs, path) and len(tuned) == len(runs)
    with pytest.raises(ValueError, match="other options of Tune"):
        apply(comparison(Tune({"lr": (1e-3, 1e-2)}), references=True), path)
    text = markdown(records_of(tuned), title="t", doc="Does it help?")
    assert "50 labels, tuned" in text and "common" not in text


@pytest.mark.parametrize("common", [True, False])
def test_arm_that_is_not_in_the_file_stays_untuned_and_the_others_keep_their_settings(common, tmp_path):
    tune = Tune({"lr": (1e-3, 1e-2)}, common=common)
    path = chosen(tmp_path / "t.tuned.json", comparison(tune, labels=[50, 100]), {"lr": 0.01})
    write(path, tune, [arm for arm in read(path)[1] if (arm.arm, arm.labels) != ("+LSA", 100)])
    runs = comparison(tune, ARMS | {"more": BASE.vary(warmup=0.2)}, labels=[50, 100])
    found = with_tuned(runs, tmp_path / "t.py")
    tuned, left = {("scratch", 50), ("scratch", 100), ("+LSA", 50)}, [("more", 50), ("+LSA", 100), ("more", 100)]
    assert {(e.arm, e.labels, e.run.lr) for e in found if e.tuning} == {(*cell, 0.01) for cell in tuned}
    assert {(e.arm, e.labels) for e in found if not e.tuning} == ({*tuned, *left} if common else {*left})
    assert sorted(untuned_cells(found)) == sorted(left) and len(untuned_cells(runs)) == 6
    rows = {(row.arm, row.labels, row.tuned): row for row in compare(records_of(found)).rows}
    assert rows["more", 50, True].reason == "more, every seed: missing", "an untuned arm counts as tuned"


def test_arm_with_nothing_to_tune_has_an_unchanged_copy_with_0_trials(tmp_path):
    runs = comparison(Tune({"lr": (1e-3, 1e-2)}), references=True)
    copies = apply(runs, chosen(tmp_path / "t.tuned.json", runs, {"lr": 0.01}))
    pixels = [copy for copy in copies if copy.run.steps == 0]
    assert len(pixels) == 4 and all(copy.tuning["trials"] == 0 and copy.tuning["curve"] == [] for copy in pixels)
    assert all(copy.run in [entry.run for entry in runs] for copy in pixels)


def records_of(runs: list) -> list[Record]:
    """Records of finished runs, in which each technique is better than the baseline, with the tuning of the runs."""
    rng = np.random.default_rng(0)
    return [
        Record(
            recipe="t", arm=entry.arm, role=entry.role, baseline=entry.baseline, labels=entry.labels, seed=entry.seed,
            tuning=entry.tuning, fingerprint=fingerprint(entry.run), run=describe(entry.run), status="finished",
            score="accuracy", test={"accuracy": float(bits.mean())}, correct=pack_bits(bits), test_images=2_000,
            steps=entry.run.steps, drawn_share=0.01, looks=entry.looks,
        )
        for entry in runs
        for bits in [rng.random(2_000) < (0.7 if entry.role == "baseline" else 0.8)]
    ]  # fmt: skip


@pytest.mark.parametrize("looks", [None, [6, 8]], ids=["all seeds", "looks"])
def test_arm_that_got_no_trials_has_no_verdict_at_tuned_settings(tmp_path, looks):
    """An arm differs only in the tuned rate, others also in something else, and one of them has the first as its control."""
    arms = {
        "scratch": BASE, "lr 0.02": BASE.vary(lr=0.02), "other": BASE.vary(lr=0.02, depth=3), "untrained": BASE.vary(steps=0),
        "warm": BASE.vary(lr=0.02, warmup=0.3),
    }  # fmt: skip
    runs = comparison(Tune({"lr": (1e-3, 1e-2)}), arms=arms, seeds=range(6), baseline={"warm": "lr 0.02"})
    ranges = arm_ranges(runs_to_tune(runs))
    assert not ranges["lr 0.02"] and not ranges["untrained"] and ranges["other"] and ranges["warm"]
    path = chosen(tmp_path / "t.tuned.json", runs, {"lr": 0.01}, note="left as it is")
    records = records_of([replace(entry, looks=looks) for entry in runs + apply(runs, path)])
    rows = {(row.arm, row.tuned): row for row in compare(records).rows}
    assert all(rows[arm, False].verdict == "better" for arm in ("lr 0.02", "other", "untrained"))
    assert rows["other", True].verdict == rows["untrained", True].verdict == "better"
    kept, warm = rows["lr 0.02", True], rows["warm", True]
    assert (kept.verdict, kept.reason, kept.next_look) == ("no verdict", "not tuned, while its baseline was", None)
    assert (warm.verdict, warm.reason) == ("no verdict", "tuned with 1 trials, and lr 0.02 with 0")
    (line,) = [line for line in warnings(records) if "different numbers of trials" in line]
    assert "lr 0.02: 0" in line and "scratch: 1" in line and "untrained" not in line
    page = markdown(records, title="t", doc="Is it better?")
    assert "not tuned, while its baseline was" in page and "left as it is" in page


def test_changed_arm_range_or_recipe_is_refused(tmp_path):
    runs = comparison()
    path = chosen(tmp_path / "t.tuned.json", runs)
    changed = comparison(arms=ARMS | {"+LSA": ARMS["+LSA"].vary(batch=9)})
    with pytest.raises(ValueError, match=r"settings of arm '\+LSA' at 50 labels have changed .* run smallvit tune \S+/t\.py again"):
        apply(changed, path)
    with pytest.raises(ValueError, match="other options of Tune"):
        apply(comparison(Tune(RANGES, trials=9, val=100)), path)
    equal = comparison(arms={"scratch": BASE, "deep": BASE.vary(depth=4)})
    with pytest.raises(ValueError, match="'scratch' and 'deep' have equal settings after tuning; fix what they differ in"):
        apply(equal, chosen(path, equal))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda text: text[:-50], "damaged or is not JSON"),
        (lambda text: text.replace('"format": 1', '"format": 9'), "has format 9"),
        (lambda text: text.replace('"edge"', '"edges"'), "not a list of tuned arms"),
        (lambda text: text.replace("0.7, 0.9", "0.7, 9.0"), "scores of a trial"),
        (lambda text: text.replace('"settings": { "lr": 0.01,', '"settings": { "lr": 0.02,', 1), "those of no trial"),
        (lambda text: text.replace('"runs": 16', '"runs": "16"'), "cost is"),
        (lambda text: text.replace('"labels": 50', '"labels": [50]', 1), r"labels is \[50\]"),
        (lambda text: text.replace('"note": ""', '"note": 5', 1), "note is 5"),
        (lambda text: text.replace('"edge": [', '"edge": [1, ', 1).replace("[1, ]", "[1]"), "edge"),
    ],
)
def test_damaged_file_is_refused(tmp_path, change, message):
    path = chosen(tmp_path / "t.tuned.json", comparison())
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=rf"{message}.*delete it and run smallvit tune \S+/t\.py again"):
        read(path)


def hand_edited(path: Path, **change) -> Path:
    """Write a file with trials of 2, 2 and 1 seeds, of which the first is the best and was chosen, with changed fields."""
    runs = comparison(arms={"scratch": BASE, "deeper": BASE.vary(depth=3)})
    scores = {0.01: [0.7, 0.9], 0.02: [0.8, 0.8], 0.03: [0.95]}
    trials = [{"settings": {"lr": lr}, "scores": values} for lr, values in scores.items()]
    write(path, runs[0].tune, [
        TunedArm(**{
            "arm": arm, "labels": labels, "fingerprint": fingerprint(entry.run.at_seed(0)),
            "settings": {"lr": 0.01}, "accuracy": 0.8, "trials": trials,
        } | change)
        for (arm, labels), entry in one_per_cell(runs_to_tune(runs)).items()
    ])  # fmt: skip
    return path


def test_choice_that_is_not_the_best_trial_with_all_seeds_is_refused(tmp_path):
    path = tmp_path / "t.tuned.json"
    assert read(hand_edited(path))[1][0].settings == {"lr": 0.01}
    for lr in (0.02, 0.03):  # an equal, later trial; a trial with fewer seeds
        with pytest.raises(ValueError, match=r"are not those of the best trial, \{'lr': 0.01\}; delete it and run"):
            read(hand_edited(path, settings={"lr": lr}))
    with pytest.raises(ValueError, match=r"accuracy is 0\.9, but the mean of the scores of the best trial is 0\.8"):
        read(hand_edited(path, accuracy=0.9))
    with pytest.raises(ValueError, match="have no trials"):
        read(hand_edited(path, trials=[], accuracy=None))


@pytest.mark.slow
@pytest.mark.parametrize("option, values", [("registers", [0, 8]), ("depth", [1, 2]), ("dim", (16, 64))])
def test_options_that_change_a_matched_cost_are_not_tuned(option, values):
    arms = {"scratch": BASE, "deep": BASE.vary(depth=3)}
    with pytest.raises(ValueError, match=rf"Tune has {option}=.*match='macs' keeps them equal; leave {option} out of Tune"):
        comparison(Tune({"lr": (1e-3, 1e-2), option: values}), arms=arms, match="macs")
    own = Tune({"lr": (1e-3, 1e-2)}, own={"deep": {option: values}})
    with pytest.raises(ValueError, match="which gives 'deep' "):
        comparison(own, arms=arms, match="macs")
    assert comparison(Tune({"lr": (1e-3, 1e-2), "heads": [1, 2]}), arms=arms, match="macs")
    assert comparison(Tune({"lr": (1e-3, 1e-2), option: values}), arms=arms)


@pytest.mark.slow
def test_importing_tune_does_not_import_optuna():
    code = "import sys, smallvit.tuning; assert 'optuna' not in sys.modules and 'sklearn' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


# Real training

RECIPE = '''"""Is it tuned?"""

from functools import partial
from pathlib import Path

from smallvit import PatchEmbed, Run, Supervised, ViT, ablate, digits
from smallvit.data import HeldOut
from smallvit.tuning import Tune

read = HeldOut.open


def counted(self):
    with open({count!r}, "a") as file:
        file.write("read\\n")
    return read(self)


HeldOut.open = counted  # also in the worker processes, which import this file


class Cheat(Supervised):
    def __init__(self, model):
        super().__init__(model)
        digits().test.open()


vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=8, depth=1, heads=2)
base = Run(data=digits, model=vit, steps=3, batch=8, lr=2e-3, val=20)
RUNS = ablate(
    {{"scratch": base, "other": base.vary({other})}},
    labels=[50],
    seeds=range(2),
    references=False,
    tune=Tune({{"lr": (3e-4, 6e-2)}}, trials=4, seeds=2, val=40),
)
'''


def recipe(folder: Path, name: str, other: str = "registers=1") -> Path:
    path = folder / f"{name}.py"
    path.write_text(RECIPE.format(count=str(folder / "reads.txt"), other=other))
    return path


@pytest.fixture
def unpatched():
    """Undo what the recipe above does to this process."""
    from smallvit.data import HeldOut

    before = HeldOut.open
    yield
    HeldOut.open = before


def test_command_tunes_all_arms_without_reading_a_test_image(tmp_path, monkeypatch, capsys, unpatched):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, "tuned_recipe")
    assert main(["tune", str(path), "--jobs", "2", "--only", "arm=scratch"]) == 0
    first = read(tuned_file(path))[1]
    assert [arm.arm for arm in first] == ["scratch"]
    assert {entry.arm for entry in load_recipe(path).RUNS if entry.tuning} == {"scratch"}
    output = capsys.readouterr().out
    assert f"not tuned yet: other at 50 labels; to tune the rest: smallvit tune {path}\n" in output and "now trains" not in output
    assert main(["tune", str(path), "--jobs", "2"]) == 0
    assert read(tuned_file(path))[1][0] == first[0] and not (tmp_path / "reads.txt").exists()
    output = capsys.readouterr().out
    assert "12 runs," in output and "now trains the tuned runs" in output and "other  " in output
    records = [json.loads(file.read_text()) for file in tmp_path.glob("runs/tuning/tuned_recipe/50/*/*/record.json")]
    assert len(records) == 12 and all(r["test"] is None and r["seed"] >= FIRST_SEED for r in records)
    tuned = [entry for entry in load_recipe(path).RUNS if entry.tuning]
    assert [(e.arm, e.seed, e.tuning["trials"]) for e in tuned] == [(a, s, 4) for s in (0, 1) for a in ("scratch", "other")]
    link = tmp_path / "links" / path.name
    link.parent.mkdir()
    link.symlink_to(path)
    assert not any(entry.tuning for entry in load_recipe(link).RUNS), "the files of a link lie beside the link"
    tuned_file(path).rename(tuned_file(link))
    assert sum(entry.tuning is not None for entry in load_recipe(link).RUNS) == 4 and not tuned_file(path).exists()
    tuned_file(link).rename(tuned_file(path))
    monkeypatch.setattr("smallvit.commands.tune.tune_arms", lambda todo, *_, **__: pytest.fail("tuned again") if todo else [])
    assert main(["tune", str(path)]) == 0


@pytest.fixture
def fake_tuning(monkeypatch):
    """Choose the first settings of each arm without any training."""

    def tune_arms(todo, *_, **__):
        return [
            TunedArm(
                arm=arm.entry.arm,
                labels=arm.entry.labels,
                fingerprint=fingerprint(arm.entry.run.at_seed(0)),
                settings=arm.settings[0],
                accuracy=0.9,
                trials=[{"settings": each, "scores": [0.9 if each == arm.settings[0] else 0.5]} for each in arm.settings],
            )
            for arm in todo
        ]

    monkeypatch.setattr("smallvit.commands.tune.tune_arms", tune_arms)
    return tune_arms


@pytest.mark.slow
def test_recipe_that_is_tuned_at_some_labels_only_can_be_used_and_completed(tmp_path, monkeypatch, capsys, unpatched, fake_tuning):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, "partly_tuned")
    path.write_text(path.read_text().replace("labels=[50]", "labels=[50, 100]"))
    assert main(["tune", "partly_tuned.py", "--only", "labels=50", "--out", "my runs"]) == 0
    left = "not tuned yet: scratch at 100 labels and other at 100 labels; to tune the rest: smallvit tune partly_tuned.py"
    assert f"written: {tuned_file(path).name}; {left} --out 'my runs'" in capsys.readouterr().out
    assert main(["run", "partly_tuned.py", "--only", "labels=50", "settings=tuned", "--jobs", "1"]) == 0
    assert f"note: {left}\n" in capsys.readouterr().err
    assert main(["run", "partly_tuned.py", "--dry-run", "--out", "my runs", "--only", "arm=scratch", "seed=0"]) == 0
    assert f"note: {left} --out 'my runs'\n" in capsys.readouterr().err
    assert main(["run", "partly_tuned.py", "--only", "settings=tuned", "labels=100"]) == 2
    assert "this recipe has no labels '100'; did you mean" in capsys.readouterr().err
    for command in ("status", "report"):
        assert main([command, "partly_tuned.py"]) == 1, "8 untuned runs are to be trained"
    assert "scratch at 100 labels" in capsys.readouterr().err
    with pytest.raises(ValueError, match="arm 'scratch' with labels=100 of the recipe partly_tuned is not tuned"):
        carry_over("partly_tuned", digits)
    assert len(carry_over("partly_tuned", digits, labels=[50])) == 4
    assert main(["tune", "partly_tuned.py"]) == 0 and "now trains the tuned runs, too" in capsys.readouterr().out
    assert len(carry_over("partly_tuned", digits)) == 8


def test_arms_that_two_processes_tune_at_the_same_time_are_both_in_the_file(tmp_path, monkeypatch, unpatched, fake_tuning):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, "tuned_twice")

    def tune_arms(todo, *_, **__):
        if todo[0].entry.arm == "scratch":  # while this command trains
            assert main(["tune", str(path), "--only", "arm=other", "--out", "elsewhere"]) == 0
        return fake_tuning(todo)

    monkeypatch.setattr("smallvit.commands.tune.tune_arms", tune_arms)
    assert main(["tune", str(path), "--only", "arm=scratch"]) == 0
    assert [arm.arm for arm in read(tuned_file(path))[1]] == ["scratch", "other"]


def test_report_of_settings_that_were_chosen_with_other_ranges_has_a_warning(tmp_path, monkeypatch, capsys, unpatched, fake_tuning):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, "other_ranges")
    assert main(["tune", str(path)]) == 0
    write_records(path.with_suffix(".jsonl"), records_of(load_recipe(path).RUNS))
    text = "other_ranges.tuned.json were chosen with other options of Tune, such as other ranges, than the recipe has now; smallvit tune"
    for ranges, changed in (("3e-4, 6e-2", False), ("3e-4, 5e-2", True)):
        path.write_text(path.read_text().replace("3e-4, 6e-2", ranges))
        assert main(["report", str(path)]) == 0
        captured = capsys.readouterr()
        assert (f"warning: the tuned settings in {text}" in captured.err) is changed and "50 labels, tuned" in captured.out
        for suffix in (".md", ".html"):
            page = Path("runs", "other_ranges", f"report{suffix}").read_text().replace("\\", "")
            start = "4 of 8 runs on this page (“scratch”, “other”) do not follow the recipe as it is now. The tuned settings in"
            assert (f"{start} {text}" in page) is changed
    assert main(["status", str(path)]) == 1  # the runs are only in the committed records
    pytest.importorskip("pandas")
    assert smallvit.records(path)["tuned"].any()
    assert main(["report", str(path), "--publish"]) == main(["run", str(path)]) == 2
    assert "other options of Tune than the recipe has now; run smallvit tune" in capsys.readouterr().err


def test_trials_that_are_replaced_by_new_ones_still_count(tmp_path, monkeypatch, unpatched, fake_tuning):
    """Each setting counts once. More seeds of the same settings are no new ones."""
    monkeypatch.chdir(tmp_path)
    path, settings = recipe(tmp_path, "tuned_again"), {"scratch": set(), "other": set()}
    text = path.read_text()
    counts = []
    for changed in (text, text, text.replace("seeds=2", "seeds=3"), text.replace("3e-4, 6e-2", "3e-4, 5e-2")):
        path.write_text(changed)
        assert main(["tune", str(path)]) == 0
        for arm in read(tuned_file(path))[1]:
            settings[arm.arm] |= {trial["settings"]["lr"] for trial in arm.trials}
        counts.append(tried_settings(path))
        assert counts[-1] == {arm: len(found) for arm, found in settings.items()}
    assert counts[0] == counts[1] == counts[2] and counts[3]["scratch"] > counts[2]["scratch"] >= 2


def test_nothing_is_tuned_if_the_result_cannot_be_written(tmp_path, monkeypatch, capsys, unpatched, fake_tuning):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, "locked_out")
    (tmp_path / ".locked_out.tuned.lock").mkdir()
    monkeypatch.setattr("smallvit.commands.tune.tune_arms", lambda *_, **__: pytest.fail("trained"))
    assert main(["tune", str(path)]) == 2 and ".locked_out.tuned.lock" in capsys.readouterr().err


@pytest.mark.slow
def test_longer_runs_have_the_settings_of_the_recipe_if_all_its_runs_are_tuned(tmp_path, monkeypatch, capsys, unpatched, fake_tuning):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, "all_tuned")
    path.write_text(path.read_text().replace("val=40)", "val=40, common=False)"))
    assert main(["tune", "all_tuned.py"]) == 0
    assert all(entry.tuning for entry in load_recipe(path).RUNS)
    assert main(["status", "all_tuned.py", "--scale-steps", "2"]) == 1
    assert "0 of 4 runs have finished, 4 waiting" in capsys.readouterr().out
    assert main(["run", "all_tuned.py", "--scale-steps", "2", "--jobs", "1"]) == 0
    assert "--scale-steps uses the settings of the recipe" in capsys.readouterr().out
    records = [json.loads(file.read_text()) for file in tmp_path.glob("runs/scale-steps-2/all_tuned/50/*/*/record.json")]
    assert [(r["steps"], r["tuning"], r["run"]["lr"]) for r in records] == [(6, None, 2e-3)] * 4


def test_objective_that_opens_the_test_images_makes_tuning_fail(tmp_path, monkeypatch, capsys, unpatched):
    monkeypatch.chdir(tmp_path)
    path = recipe(tmp_path, "cheating_recipe", "objective=Cheat")
    assert main(["tune", str(path), "--jobs", "1"]) == 2
    message = capsys.readouterr().err
    assert "trials failed; the first is of 'other': ValueError" in message and "test images" in message
    assert not tuned_file(path).exists()


@pytest.mark.slow
def test_choice_is_the_same_for_any_number_of_workers_and_after_a_kill(tmp_path):
    runs = comparison(FOUR)
    write(tmp_path / "one.json", FOUR, tune_arms(trials(runs), tmp_path / "one", recipe="t", jobs=1))
    trained: list = []

    def interrupt(record: Record):
        trained.append(record.fingerprint)
        if len(trained) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_arms(trials(runs), tmp_path / "two", recipe="t", jobs=2, show=interrupt)
    after: list = []
    tuned = tune_arms(trials(runs), tmp_path / "two", recipe="t", jobs=2, show=lambda record: after.append(record.fingerprint))
    write(tmp_path / "two.json", FOUR, tuned)
    assert untimed(tmp_path / "one.json") == untimed(tmp_path / "two.json")
    assert len(trained) == 5 and not set(trained) & set(after) and 5 + len(after) >= 11


@pytest.mark.slow
def test_stacked_trials_have_the_same_weights_for_any_number_of_workers(tmp_path):
    pretrained = BASE.vary(init=BASE.vary(lr=1e-3))
    tune = Tune({"lr": (3e-4, 6e-2)}, trials=2, seeds=4, val=40)
    found = []
    for jobs in (1, 2, 3):
        todo = trials(comparison(tune, {"scratch": pretrained, "+LSA": pretrained.vary(warmup=0.5)}))
        tune_arms(todo, tmp_path / str(jobs), recipe="t", jobs=jobs, stack=2)
        records = [record for arm in todo for record in arm.records.values()]
        found.append({record.fingerprint: (record.stacked, record.weights_sha256) for record in records})
    assert found[0] == found[1] == found[2] and len(found[0]) == 16
    assert all(stacked == 2 for stacked, _ in found[0].values()), "both rates of a seed, or two seeds of a rate"
