"""How steps are computed: kernels, precision and compiling change rounding alone, are tried, kept, and said."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from smallvit import DINO, PatchEmbed, Run, ViT, ablate, augment
from smallvit.__main__ import main
from smallvit.launch import autotune as trial
from smallvit.launch import launch
from smallvit.numerics import DEFAULT, Numerics
from smallvit.record import WEIGHTS, read_record
from smallvit.train import fit, fit_stacked
from smallvit.train import loop as trainings

TINY = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2)
SHORT = Run(model=TINY, labels=50, val=20, steps=12, batch=8, augment=augment.digits())


def gap(a, b) -> float:
    """The largest difference between the weights that two runs left."""
    a, b = load_file(a / WEIGHTS), load_file(b / WEIGHTS)
    return max((a[name] - b[name]).abs().max().item() for name in a)


def test_a_kernel_changes_rounding_and_the_record_says_which(tmp_path):
    records = [fit(SHORT, tmp_path / str(kernel), numerics=Numerics(kernel=kernel)) for kernel in ("explicit", "fused", None)]
    assert [record["kernel"] for record in records] == ["explicit", "fused", "rule"]
    assert gap(tmp_path / "explicit", tmp_path / "None") == 0  # so few tokens: that is the rule
    assert 0 < gap(tmp_path / "explicit", tmp_path / "fused") < 1e-3


def test_half_precision_by_execution_is_that_of_a_run_that_asks_for_it(tmp_path):
    asked = fit(SHORT.vary(precision="bf16"), tmp_path / "asked")
    told = fit(SHORT, tmp_path / "told", numerics=Numerics(precision="bf16"))
    assert gap(tmp_path / "asked", tmp_path / "told") == 0
    assert asked["precision"] == told["precision"] == "bf16" and asked["fingerprint"] != told["fingerprint"]
    full = fit(SHORT.vary(precision="bf16"), tmp_path / "full", numerics=Numerics(precision="fp32"))
    assert full["precision"] == "fp32" and gap(tmp_path / "full", tmp_path / "asked") > 0


PLAIN, FUSED = DEFAULT, Numerics(kernel="fused", precision="bf16")


@pytest.mark.parametrize(("began", "today"), [(FUSED, PLAIN), (PLAIN, FUSED)], ids=["plain today", "fused today"])
def test_what_was_put_down_goes_on_as_it_began(began, today, tmp_path, monkeypatch):
    whole = fit(SHORT, tmp_path / "whole", numerics=began)
    monkeypatch.setattr(trainings, "CHECKPOINT_SECONDS", 0.0)
    train_step = trainings.Training.train_step

    def until(training):
        if training.step == 5:
            raise KeyboardInterrupt
        train_step(training)

    with monkeypatch.context() as patch:
        patch.setattr(trainings.Training, "train_step", until)
        with pytest.raises(KeyboardInterrupt):
            fit(SHORT, tmp_path / "put down", numerics=began)
    record = fit(SHORT, tmp_path / "put down", numerics=today)
    assert gap(tmp_path / "whole", tmp_path / "put down") == 0
    assert all(record[name] == whole[name] for name in ("kernel", "precision", "compiled", "curve", "val", "test"))


def test_what_is_evaluated_is_computed_as_ever(tmp_path, monkeypatch):
    kernels = []
    monkeypatch.setattr(trainings, "CHECKS", 3)
    look = trainings.Training.validate

    def looked(training):
        kernels.extend(
            module.fused
            for model in (training.model, training.objective)
            for module in model.modules()
            if hasattr(module, "fused")
        )
        look(training)

    monkeypatch.setattr(trainings.Training, "validate", looked)
    fit(SHORT, tmp_path, numerics=FUSED)
    assert kernels and set(kernels) == {None}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="compiling takes a compiler")
@pytest.mark.parametrize("run", [SHORT, SHORT.vary(dropout=0.2, drop_path=0.2, ema=0.0)], ids=["plain", "random"])
def test_compiled_blocks_learn_the_same(run, tmp_path):
    fit(run, tmp_path / "plain")
    record = fit(run, tmp_path / "compiled", numerics=Numerics(compiled=True))
    assert record["compiled"] and 0 < gap(tmp_path / "plain", tmp_path / "compiled") < 1e-3


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Numerics(compiled=True), "got 2 runs as one and compiled; expected one or the other"),
        (Numerics(kernel="flash"), "kernel of the numerics is 'flash'; expected 'explicit' or 'fused'"),
        (Numerics(precision="fp16"), "precision of the numerics is 'fp16'; expected 'fp32' or 'bf16'"),
    ],
)
def test_what_is_no_choice_is_refused_before_anything_trains(wrong, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        launch([SHORT], tmp_path, recipe="t", stack=2, numerics=wrong)
    assert not list(tmp_path.iterdir())


def as_if(monkeypatch, seconds):
    """As if a step took so long in each way."""
    monkeypatch.setattr(trial, "a_step", lambda train_step, one, steps=8: train_step() or seconds(one))


def test_the_fastest_is_taken_if_it_gains_and_comes_to_the_same_losses(tmp_path, monkeypatch):
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(1), references=False)
    as_if(monkeypatch, lambda one: 0.5 if one.numerics.kernel == "fused" else 1.0)
    numerics, stack, why = trial.autotune(runs, tmp_path / "a", 1, "cpu", {"precision": "fp32"})
    assert (numerics, stack) == (Numerics(precision="fp32", kernel="fused"), 1) and "fp32, fused attention: 500 ms" in why
    as_if(monkeypatch, lambda one: 0.97 if one.numerics.kernel == "fused" else 1.0)  # not worth another rounding
    assert trial.autotune(runs, tmp_path / "b", 1, "cpu", {"precision": "fp32"})[0] == Numerics(precision="fp32")
    as_if(monkeypatch, lambda one: 0.4 if one.numerics.precision == "bf16" else 1.0)
    assert trial.autotune(runs, tmp_path / "c", 1, "cpu")[0] == Numerics(precision="bf16")
    half = [run.vary(precision="bf16") for run in runs]
    assert trial.autotune(half, tmp_path / "d", 1, "cpu")[0] == DEFAULT  # they have what they ask for
    both = ablate({"fp32": SHORT, "bf16": SHORT.vary(precision="bf16")}, labels=[50], seeds=range(1), references=False)
    assert trial.autotune(both, tmp_path / "both", 1, "cpu")[0] == DEFAULT  # that is what they compare
    as_if(monkeypatch, lambda one: 5.0 if one.numerics.precision == "bf16" else 1.0)
    assert "bf16: over 3 times as long as another" in trial.autotune(runs, tmp_path / "e", 1, "cpu")[2]
    monkeypatch.setattr("smallvit.train.stack.TOLERANCE", {"fp32": 1e-4, "bf16": 1e-9})
    as_if(monkeypatch, lambda one: 0.4 if one.numerics.precision == "bf16" else 1.0)
    numerics, _, why = trial.autotune(runs, tmp_path / "f", 1, "cpu")
    assert numerics == DEFAULT and "bf16: losses" in why


def test_all_kinds_of_runs_have_a_say_by_their_steps(tmp_path, monkeypatch):
    """Fused is faster for the few steps of the small patches, slower for the many of the large ones."""
    small = SHORT.vary(tokenizer=partial(PatchEmbed, patch=1))
    runs = ablate({"large": SHORT.vary(steps=1_000), "small": small}, labels=[50], seeds=range(1), references=False)

    def seconds(one):
        fewer = {16: 1.2, 64: 0.2}[one.objective.model.places(1, (8, 8))[0].tokens - 1]
        return fewer if one.numerics.kernel == "fused" else 1.0

    as_if(monkeypatch, seconds)
    full = {"precision": None, "stack": 1}
    assert trial.autotune(runs, tmp_path / "a", 1, "cpu", full)[0] == DEFAULT
    assert trial.autotune(runs[1:], tmp_path / "b", 1, "cpu", full)[0] == Numerics(kernel="fused")
    before = SHORT.vary(objective=DINO, augment=augment.digit_crops(), clip=0.0, ema=0.0, steps=100)
    started = ablate({"from it": SHORT.vary(init=before)}, labels=[50], seeds=range(1), references=False)
    assert [steps for _, steps in trial.shapes_of(started)] == [100, 12]


def test_compiling_must_pay_for_itself(tmp_path, monkeypatch):
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(1), references=False)
    tried, took = [], 30.0
    spent = [0.0]
    monkeypatch.setattr(trial.time, "perf_counter", lambda: spent[0])

    def race(ways, begin, counts):
        tried.append(ways)
        spent[0] += took if any(way.compiled for way in ways) else 0
        return {way: 60.0 if way.compiled else 100.0 for way in ways}, [way.describe() for way in ways]

    monkeypatch.setattr(trial, "race", race)
    assert not trial.autotune(runs, tmp_path / "a", 1, "cpu")[0].compiled and len(tried) == 1  # too short to try
    monkeypatch.setattr(trial, "WORTH_COMPILING", 90.0)
    assert trial.autotune(runs, tmp_path / "b", 1, "cpu")[0].compiled and len(tried) == 3
    took = 50.0
    assert not trial.autotune(runs, tmp_path / "c", 1, "cpu", {"stack": 1})[0].compiled  # 40 s gained for 50 s
    assert not trial.autotune(runs, tmp_path / "d", 1, "cpu", {"compiled": False})[0].compiled and len(tried) == 6
    assert trial.autotune(runs, tmp_path / "e", 1, "cpu", {"compiled": True})[:2] == (Numerics(compiled=True), 1)
    monkeypatch.setattr(trial, "race", lambda ways, *more: ({way: 1e3 for way in ways if not way.compiled}, ["no compiler"]))
    assert not trial.autotune(runs, tmp_path / "f", 1, "cpu", {"stack": 1})[0].compiled


def test_what_was_chosen_is_kept_for_this_machine_and_these_runs(tmp_path, monkeypatch):
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(2), references=False)
    asked = []
    monkeypatch.setattr(trial, "tried", lambda *a: asked.append(a) or (Numerics(kernel="fused"), 2, "because"))
    first = trial.autotune(runs, tmp_path, 1, "cpu")
    again = trial.autotune(runs, tmp_path, 1, "cpu")
    assert first[:2] == again[:2] == (Numerics(kernel="fused"), 2) and "as tried before" in again[2] and len(asked) == 1
    trial.autotune(runs[:1], tmp_path, 1, "cpu")
    assert len(asked) == 1  # a part of the same recipe
    trial.autotune([*runs, *(run.vary(dim=32) for run in runs)], tmp_path, 1, "cpu")
    assert len(asked) == 1  # an arm that came since: it is computed as the others were
    trial.autotune(runs, tmp_path, 1, "cpu", {"precision": "fp32"})
    monkeypatch.setattr(trial.records, "cpu", lambda: "another")
    trial.autotune(runs, tmp_path, 1, "cpu")
    assert len(asked) == 3
    (tmp_path / "fast.json").write_text("torn")
    assert trial.autotune(runs, tmp_path, 1, "cpu")[2].startswith("because")
    untrained = [run.vary(steps=0) for run in runs]
    assert trial.autotune(untrained, tmp_path / "none", 1, "cpu") == (DEFAULT, 1, "nothing is trained")
    with pytest.raises(ValueError, match="device is 'cdua'"):
        trial.autotune(runs, tmp_path, 1, "cdua")
    with pytest.raises(ValueError, match="got 4 runs as one and compiled"):
        trial.autotune(runs, tmp_path, 1, "cpu", {"stack": 4, "compiled": True})


def test_a_run_that_cannot_be_tried_is_left_to_its_record(tmp_path):
    broken = [SHORT.vary(tokenizer=partial(PatchEmbed, patch=3))]
    numerics, stack, why = trial.autotune(broken, tmp_path, 1, "cpu")
    assert (numerics, stack) == (DEFAULT, 1) and "patches of 3 pixels" in why

    def wordless(way):
        raise AssertionError

    assert trial.race([DEFAULT], wordless, [1]) == ({}, ["as it is: AssertionError"])


def test_half_precision_is_held_to_its_own_rounding_also_as_one(tmp_path):
    runs = [SHORT.vary(seed=seed) for seed in range(2)]
    records = fit_stacked(runs, [tmp_path / "0", tmp_path / "1"], numerics=Numerics(precision="bf16"))
    assert [(record["stacked"], record["precision"]) for record in records] == [(2, "bf16")] * 2


RECIPE = '''"""Does it help?"""

from functools import partial

from smallvit import PatchEmbed, Run, ViT, ablate

vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2)
scratch = Run(model=vit, steps=4, batch=8)
RUNS = ablate({"scratch": scratch, "longer": scratch.vary(steps=6)}, labels=[50], seeds=range(2), references=False)
'''


def test_the_command_says_what_it_tried_and_computes_all_runs_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.py").write_text(RECIPE)
    assert main(["run", "quick.py", "--jobs", "1", "--fast", "--numerics", "kernel=fused", "precision=fp32"]) == 0
    assert "fast: fp32, fused attention" in capsys.readouterr().out
    records = [read_record(path.parent) for path in tmp_path.glob("runs/quick/50/*/*/record.json")]
    assert len(records) == 4 and {(r["kernel"], r["precision"], r["compiled"]) for r in records} == {("fused", "fp32", False)}
    assert len(json.loads((tmp_path / "runs/quick/fast.json").read_text())) == 1
    assert "kernel fused" in (tmp_path / "runs/quick/report.md").read_text()
    assert main(["run", "quick.py", "--dry-run", "--numerics", "kernel=quick"]) == 2
    assert "expected some of precision=fp32|bf16, kernel=rule|explicit|fused, compiled=yes|no" in capsys.readouterr().err


def test_without_a_word_nothing_is_tried(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "race", None)
    (tmp_path / "quick.py").write_text(RECIPE)
    assert main(["run", "quick.py", "--jobs", "1"]) == 0
    assert not (tmp_path / "runs/quick/fast.json").exists()


def test_bf16_losses_of_the_first_step_are_near_enough_to_pass():
    """The bound of the trial, on real digits: half precision is not thrown out by its own rounding."""
    times, said = trial.race(
        [DEFAULT, Numerics(kernel="fused"), Numerics(precision="bf16")], lambda way: [trial.begun(SHORT, way, "cpu")], [12]
    )
    assert {DEFAULT, Numerics(kernel="fused")} <= times.keys() and not any("losses" in words for words in said)
    assert torch.get_num_threads() == 1
