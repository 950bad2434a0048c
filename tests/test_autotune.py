"""Numerics: kernels, precision and compilation change rounding only; `--fast` measures them, and the choice is stored."""

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from toys import TINY_VIT, slow_after

from smallvit import DINO, ArmRun, LeJEPA, PatchEmbed, Run, SemiSupervised, ViT, ablate, augment
from smallvit.__main__ import main
from smallvit.flops import footprint
from smallvit.launch import autotune, launch, plan
from smallvit.numerics import DEFAULT, Numerics
from smallvit.record import WEIGHTS, read_record
from smallvit.train import fit, fit_stacked, loop

SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=12, batch=8, augment=augment.digits())
FUSED, NATIVE = Numerics(kernel="fused", precision="bf16"), Numerics(kernel="native")


def comparison(*, seeds: int = 1, **arms: Run) -> list[ArmRun]:
    return ablate(arms or {"scratch": SHORT}, labels=[50], seeds=range(seeds), references=False)


def largest_difference(a, b) -> float:
    """Between the weights in two folders."""
    a, b = load_file(a / WEIGHTS), load_file(b / WEIGHTS)
    return max((a[name] - b[name]).abs().max().item() for name in a)


# Training with other numerics


def test_kernel_changes_rounding_only_and_is_recorded(tmp_path):
    run = SHORT.vary(steps=6)
    records = [fit(run, tmp_path / str(kernel), numerics=Numerics(kernel=kernel)) for kernel in ("explicit", "fused", None)]
    assert [record.kernel for record in records] == ["explicit", "fused", "rule"]
    assert largest_difference(tmp_path / "explicit", tmp_path / "None") == 0  # the rule for so few tokens
    assert 0 < largest_difference(tmp_path / "explicit", tmp_path / "fused") < 1e-3


def test_precision_of_the_numerics_overrides_that_of_the_run(tmp_path):
    short = SHORT.vary(steps=4)
    half = short.vary(precision="bf16")
    by_run = fit(half, tmp_path / "run")
    by_numerics = fit(short, tmp_path / "numerics", numerics=Numerics(precision="bf16"))
    full = fit(half, tmp_path / "full", numerics=Numerics(precision="fp32"))
    assert [record.precision for record in (by_run, by_numerics, full)] == ["bf16", "bf16", "fp32"]
    assert by_run.fingerprint != by_numerics.fingerprint
    assert largest_difference(tmp_path / "run", tmp_path / "numerics") == 0
    assert largest_difference(tmp_path / "run", tmp_path / "full") > 0


@pytest.mark.parametrize(
    ("first", "later"),
    slow_after(1, [(FUSED, DEFAULT), (NATIVE, DEFAULT), (DEFAULT, FUSED), (DEFAULT, NATIVE)]),
    ids=["default later", "native before", "fused later", "native later"],
)
def test_resumed_run_keeps_the_numerics_it_began_with(first, later, tmp_path, monkeypatch):
    whole = fit(SHORT, tmp_path / "whole", numerics=first)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    train_step = loop.Training.train_step

    def interrupted_step(training):
        if training.step == 5:
            raise KeyboardInterrupt
        train_step(training)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Training, "train_step", interrupted_step)
        fit(SHORT, tmp_path / "resumed", numerics=first)
    record = fit(SHORT, tmp_path / "resumed", numerics=later)
    assert largest_difference(tmp_path / "whole", tmp_path / "resumed") == 0
    for name in ("kernel", "precision", "compiled", "curve", "val", "test"):
        assert getattr(record, name) == getattr(whole, name)


def test_evaluation_does_not_use_the_numerics(tmp_path, monkeypatch):
    kernels = []
    validate = loop.Training.validate

    def observed(training):
        modules = [*training.model.modules(), *training.objective.modules()]
        kernels.extend(module.fused for module in modules if hasattr(module, "fused"))
        validate(training)

    monkeypatch.setattr(loop, "CHECKS", 3)
    monkeypatch.setattr(loop.Training, "validate", observed)
    fit(SHORT, tmp_path, numerics=FUSED)
    assert kernels and set(kernels) == {None}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="compilation needs a compiler")
@pytest.mark.parametrize("run", [SHORT, SHORT.vary(dropout=0.2, drop_path=0.2, ema=0.0)], ids=["plain", "random"])
def test_compiled_blocks_learn_the_same(run, tmp_path):
    fit(run, tmp_path / "plain")
    record = fit(run, tmp_path / "compiled", numerics=Numerics(compiled=True))
    assert record.compiled and 0 < largest_difference(tmp_path / "plain", tmp_path / "compiled") < 1e-3


def test_stack_in_bf16_is_accepted(tmp_path):
    runs = [SHORT.vary(seed=seed, steps=4) for seed in range(2)]
    records = fit_stacked(runs, [tmp_path / "0", tmp_path / "1"], numerics=Numerics(precision="bf16"))
    assert [(record.stacked, record.precision) for record in records] == [(2, "bf16")] * 2


@pytest.mark.parametrize(
    ("numerics", "message"),
    [
        (Numerics(compiled=True), "2 runs as one and compiled; expected one or the other"),
        (Numerics(kernel="flash"), "kernel of the numerics is 'flash'; expected 'explicit' or 'fused'"),
        (Numerics(precision="fp16"), "precision of the numerics is 'fp16'; expected 'fp32' or 'bf16'"),
    ],
)
def test_invalid_numerics_are_refused_before_anything_is_trained(numerics, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        launch(comparison(), tmp_path, recipe="t", stack=2, numerics=numerics)
    assert not list(tmp_path.iterdir())


# The choice


def as_if(monkeypatch, seconds):
    """Let a step seem to take `seconds(training)`."""
    measured = lambda pairs, repeats=8: [step() or seconds(training) for step, training in pairs]  # noqa: E731
    monkeypatch.setattr(autotune, "step_seconds", measured)
    monkeypatch.setattr(autotune, "TOO_SLOW", math.inf)  # on a busy machine any step can take long


HALF = SHORT.vary(precision="bf16")


@pytest.mark.parametrize(
    ("arms", "given", "option", "seconds", "expected", "text"),
    [
        ({}, {"precision": "fp32"}, "fused", 0.5, Numerics("fp32", "fused"), "fp32, fused attention: 500 ms per step"),
        ({}, {"precision": "fp32"}, "fused", 0.97, Numerics("fp32"), ""),  # too small a gain for other rounding
        ({}, {}, "bf16", 0.4, Numerics("bf16"), ""),
        pytest.param({"a": HALF}, {}, "bf16", 0.4, DEFAULT, "", marks=pytest.mark.slow),  # the runs use bf16 already
        ({"a": SHORT, "b": HALF}, {}, "bf16", 0.4, DEFAULT, ""),  # the arms compare precisions
    ],
    ids=["gain", "small gain", "bf16", "bf16 already", "compared"],
)
def test_fastest_numerics_are_chosen(arms, given, option, seconds, expected, text, tmp_path, monkeypatch):
    as_if(monkeypatch, lambda training: seconds if option in training.numerics else 1.0)
    numerics, stack, reason = autotune.autotune(comparison(**arms), tmp_path, 1, "cpu", given)
    assert (numerics, stack) == (expected, 1) and text in reason


def test_variant_with_other_losses_or_much_slower_is_excluded(tmp_path, monkeypatch):
    limit = autotune.TOO_SLOW
    as_if(monkeypatch, lambda training: 0.4 if training.numerics.precision == "bf16" else 1.0)
    with monkeypatch.context() as patch:
        patch.setattr("smallvit.train.stack.TOLERANCE", {"fp32": 1e-4, "bf16": 1e-9})
        numerics, _, reason = autotune.autotune(comparison(), tmp_path / "losses", 1, "cpu")
    assert numerics == DEFAULT and "bf16: the losses are" in reason
    monkeypatch.setattr(autotune, "TOO_SLOW", limit)
    clock = [0.0]
    train_step = loop.Training.train_step

    def slow_step(training):
        clock[0] += 5.0 if training.numerics.precision == "bf16" else 1.0
        train_step(training)

    monkeypatch.setattr(loop.Training, "train_step", slow_step)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    numerics, _, reason = autotune.autotune(comparison(), tmp_path / "slow", 1, "cpu")
    assert numerics == DEFAULT and "bf16: more than 3 times as slow as another one" in reason


def test_kinds_of_runs_are_weighed_by_their_steps(tmp_path, monkeypatch):
    """As if the fused kernel were faster for the few steps with small patches, and slower for the many with large ones."""
    runs = comparison(large=SHORT.vary(steps=1_000), small=SHORT.vary(tokenizer=partial(PatchEmbed, patch=1)))

    def seconds(training):
        tokens = training.objective.model.layer_contexts(1, (8, 8))[0].tokens - 1
        return {16: 1.2, 64: 0.2}[tokens] if training.numerics.kernel == "fused" else 1.0

    as_if(monkeypatch, seconds)
    given = {"precision": None, "stack": 1, "compiled": False}
    assert autotune.autotune(runs, tmp_path / "a", 1, "cpu", given)[0] == DEFAULT
    assert autotune.autotune(runs[1:], tmp_path / "b", 1, "cpu", given)[0] == Numerics(kernel="fused")
    start = SHORT.vary(objective=DINO, augment=augment.digit_crops(), clip=0.0, ema=0.0, steps=100)
    assert [steps for _, steps in autotune.kinds_of(comparison(tuned=SHORT.vary(init=start)))] == [100, 12]


@pytest.mark.parametrize("dim, depth, batch", slow_after(3, [(16, 2, 8), (64, 4, 64), (64, 4, 256), (192, 12, 64)]))
def test_stack_on_a_gpu_depends_on_the_work_of_a_step(dim, depth, batch):
    model = partial(ViT, tokenizer=partial(PatchEmbed, patch=1), dim=dim, depth=depth, heads=4)
    runs = comparison(a=SHORT.vary(model=model, batch=batch, augment=()), b=SHORT)
    work = batch * footprint(model((8, 8), 1, 10), torch.zeros(1, 1, 8, 8))["macs"]
    assert autotune.stack_for_gpu(runs) == max(1, min(64, int(8e9 / work)))


def test_stack_on_a_gpu_counts_unlabelled_images_and_all_kinds_of_runs():
    weak = {"weak": augment.digits(0.3), "strong": augment.digits()}
    small, large = (SHORT.vary(objective=partial(SemiSupervised, ratio=ratio, **weak)) for ratio in (1, 1_000))
    many = {f"a{batch}": SHORT.vary(batch=batch, steps=100) for batch in range(4, 16)}
    assert autotune.stack_for_gpu(comparison(a=small)) == 64
    assert autotune.stack_for_gpu(comparison(a=large)) == autotune.stack_for_gpu(comparison(**many, b=large)) < 64


def test_stack_on_a_gpu_counts_the_views_of_images():
    """On digits of 8 x 8 pixels, two views of 8 x 8 and four of 16 x 16 have 18 times the pixels of an image."""
    model = partial(ViT, tokenizer=partial(PatchEmbed, patch=1), dim=64, depth=4, heads=4)
    images = SHORT.vary(model=model, batch=8, augment=())
    views = SHORT.vary(model=model, batch=8, objective=LeJEPA, augment=augment.digit_crops(), unlabelled=True)
    found = [autotune.stack_for_gpu(comparison(a=run)) for run in (images, images.vary(batch=18 * 8), views)]
    assert found[0] > found[1] == found[2] > 1


def test_stack_on_a_gpu_is_one_run_if_there_is_nothing_to_train():
    assert autotune.stack_for_gpu(comparison(a=SHORT.vary(steps=0))) == 1


def test_compilation_is_tried_for_long_recipes_and_must_save_more_than_it_costs(tmp_path, monkeypatch):
    races, clock, cost = [], [0.0], 30.0
    monkeypatch.setattr(autotune, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def race(variants, begin, counts):
        races.append(variants)
        clock[0] += cost if any(variant.compiled for variant in variants) else 0
        return {v: 60.0 if v.compiled else 100.0 for v in variants}, [v.describe() for v in variants]

    def choice(name: str, given: dict | None = None):
        return autotune.autotune(comparison(), tmp_path / name, 1, "cpu", given)[:2]

    monkeypatch.setattr(autotune, "race", race)
    assert not choice("short")[0].compiled and len(races) == 1  # the recipe takes only 100 s
    monkeypatch.setattr(autotune, "WORTH_COMPILING", 90.0)
    assert choice("long")[0].compiled and len(races) == 3
    cost = 50.0  # to save 40 s
    assert not choice("costly", {"stack": 1})[0].compiled
    assert not choice("no", {"compiled": False})[0].compiled and len(races) == 6
    assert choice("yes", {"compiled": True}) == (Numerics(compiled=True), 1)
    monkeypatch.setattr(autotune, "race", lambda variants, *rest: ({v: 1e3 for v in variants if not v.compiled}, ["no compiler"]))
    assert not choice("no compiler", {"stack": 1})[0].compiled


def test_choice_is_stored_for_the_machine_and_the_given_options(tmp_path, monkeypatch):
    runs, measured = comparison(seeds=2), []
    monkeypatch.setattr(autotune, "measure", lambda *a: measured.append(a) or (Numerics(kernel="fused"), 2, "because"))

    def choice(runs=runs, given=None):
        return autotune.autotune(runs, tmp_path, 1, "cpu", given)

    first, again = choice(), choice()
    assert first[:2] == again[:2] == (Numerics(kernel="fused"), 2) and "measured earlier" in again[2] and len(measured) == 1
    choice(runs[:1])  # a part of the recipe
    choice([*runs, *(replace(entry, run=entry.run.vary(dim=32)) for entry in runs)])  # with a new arm
    assert len(measured) == 1
    choice(given={"precision": "fp32"})
    monkeypatch.setattr(autotune.records, "cpu", lambda: "another")
    choice()
    assert len(measured) == 3
    (tmp_path / "fast.json").write_text("torn")
    assert choice()[2] == "because"
    (key,) = json.loads((tmp_path / "fast.json").read_text())
    (tmp_path / "fast.json").write_text(json.dumps({key: [["fp17", None, False], 2, "damaged"]}))
    assert choice()[2] == "because"
    untrained = [replace(entry, run=entry.run.vary(steps=0)) for entry in runs]
    assert autotune.autotune(untrained, tmp_path / "none", 1, "cpu") == (DEFAULT, 1, "there is nothing to train")


@pytest.mark.parametrize(
    ("device", "given", "message"),
    [("cdua", {}, "device is 'cdua'"), ("cpu", {"stack": 4, "compiled": True}, "got 4 runs as one and compiled")],
)
def test_autotune_refuses_invalid_options(device, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        autotune.autotune(comparison(), tmp_path, 1, device, given)


def test_run_that_cannot_be_measured_is_left_to_its_record(tmp_path):
    broken = comparison(broken=SHORT.vary(tokenizer=partial(PatchEmbed, patch=3)))
    numerics, stack, reason = autotune.autotune(broken, tmp_path, 1, "cpu")
    assert (numerics, stack) == (DEFAULT, 1) and "patches of 3 pixels" in reason

    def fail(variant):
        raise AssertionError

    assert autotune.race([DEFAULT], fail, [1]) == ({}, ["default: AssertionError"])


def test_bf16_is_not_excluded_by_its_own_rounding(monkeypatch):
    monkeypatch.setattr(autotune, "TOO_SLOW", math.inf)
    variants = [DEFAULT, Numerics(kernel="fused"), Numerics(precision="bf16")]
    times, texts = autotune.race(variants, lambda variant: [autotune.begun(SHORT, variant, "cpu")], [12])
    assert {DEFAULT, Numerics(kernel="fused")} <= times.keys() and not any("losses" in text for text in texts)


def test_measuring_computes_in_one_thread_and_restores_the_number_of_threads(monkeypatch):
    seen = []
    monkeypatch.setattr(autotune, "race", lambda *given: seen.append(torch.get_num_threads()) or ({DEFAULT: 1.0}, []))
    monkeypatch.setattr(plan, "begun", lambda *given: seen.append(torch.get_num_threads()) or 1 / 0)
    entry = ArmRun(run=SHORT, arm="scratch")
    torch.set_num_threads(2)
    try:
        autotune.measure([entry], [(SHORT, 1)], 1, "cpu", {"stack": 1, "compiled": False})
        with pytest.raises(ZeroDivisionError):
            plan.estimate(SHORT, "cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 1]


# The command line

RECIPE = '''"""Does it help?"""

from functools import partial

from smallvit import PatchEmbed, Run, ViT, ablate

vit = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2)
scratch = Run(model=vit, steps=4, batch=8)
RUNS = ablate({"scratch": scratch, "longer": scratch.vary(steps=6)}, labels=[50], seeds=range(2), references=False)
'''


@pytest.mark.slow
def test_fast_prints_its_choice_and_applies_it_to_all_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.py").write_text(RECIPE)
    assert main(["run", "quick.py", "--jobs", "1", "--fast", "--numerics", "kernel=fused", "precision=fp32"]) == 0
    assert "fast: fp32, fused attention" in capsys.readouterr().out
    records = [read_record(path.parent) for path in tmp_path.glob("runs/quick/50/*/*/record.json")]
    assert len(records) == 4 and {(r.kernel, r.precision, r.compiled) for r in records} == {("fused", "fp32", False)}
    assert len(json.loads((tmp_path / "runs/quick/fast.json").read_text())) == 1
    assert "kernel fused" in (tmp_path / "runs/quick/report.md").read_text()
    assert main(["run", "quick.py", "--dry-run", "--numerics", "kernel=quick"]) == 2
    assert "expected some of precision=fp32|bf16, kernel=rule|explicit|fused|native, compiled=yes|no" in capsys.readouterr().err


@pytest.mark.slow
def test_without_fast_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(autotune, "race", None)
    (tmp_path / "quick.py").write_text(RECIPE)
    assert main(["run", "quick.py", "--jobs", "1"]) == 0
    assert not (tmp_path / "runs/quick/fast.json").exists()


@pytest.mark.slow
def test_fast_on_a_gpu_stacks_as_many_runs_as_without_it(monkeypatch, tmp_path):
    """The measurement is made on the CPU here. The fused kernel cannot be stacked, and the native one is for CPUs."""
    begun = autotune.begun
    monkeypatch.setattr(autotune, "check_device", lambda device: None)
    monkeypatch.setattr(autotune, "begun", lambda run, numerics, device, *more: begun(run, numerics, "cpu", *more))
    runs = comparison(seeds=2)
    numerics, stack, reason = autotune.autotune(runs, tmp_path, 1, "cuda")
    assert stack == autotune.stack_for_gpu(runs) > 1 and numerics.kernel in (None, "explicit")
    assert "fused" not in reason and "native" not in reason
    assert autotune.autotune(runs, tmp_path, 1, "cuda", {"kernel": "fused"})[1] == 1
    assert "fused" in autotune.autotune(runs, tmp_path, 1, "cpu")[2]
