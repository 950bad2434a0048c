"""The command line as a user meets it: also from another directory, with wrong arguments, and with broken recipes."""

import math
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
import torch
from PIL import Image
from toys import leave_out_figures, slow_after, write_recipe

from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate, accuracy, cost, digits, flops, folder, linear_probe
from smallvit.__main__ import joined, main, parser
from smallvit.commands import report
from smallvit.commands.run import EXCLUDED, NEEDED
from smallvit.launch import autotune, launch, plan
from smallvit.launch.results import record_failure, tags
from smallvit.numerics import DEFAULT, Numerics
from smallvit.recipe import check_comparable, find_recipe, load_recipe, only, recipe_files
from smallvit.record import RECORD, WEIGHTS, Record, read_record, read_records, write_record, write_records
from smallvit.report import records
from smallvit.train.fit import new_record
from smallvit.train.loop import Training
from smallvit.verdicts import compare

pytestmark = pytest.mark.usefixtures("without_figures")
RECIPE = '''
"""Does locality attention help a very small model?

More.
"""
from functools import partial
from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate, augment

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=6, batch=8, val=20,
              augment=augment.digits())
RUNS = ablate({"scratch": scratch, "+LSA": scratch.vary(attention=LocalityAttention)}, labels=[20, 40], seeds=range(2))
'''
LSA = '"+LSA": scratch.vary(attention=LocalityAttention)'
SMALLEST = ("--only", "labels=20", "seed=0", "arm=scratch,+LSA", "--jobs", "1")


def all_records(workdir: Path) -> list[Record]:
    return [record for path in sorted(workdir.rglob(RECORD)) if (record := read_record(path.parent))]


def test_help_imports_no_torch_and_names_every_command():
    code = "import sys; sys.argv=['smallvit','--help']\nimport runpy\ntry: runpy.run_module('smallvit', run_name='__main__')\n"
    code += "except SystemExit as end: assert end.code == 0\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in ("list", "run", "tune", "explore", "report", "verify", "summary"))


def test_list_works_from_any_directory_and_writes_nothing(workdir):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, "-m", "smallvit", "list"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=workdir, env=environment)
    assert done.returncode == 0 and "quickstart" in done.stdout
    assert sorted(path.name for path in workdir.iterdir()) == ["mine.py"]


def test_list_shows_every_recipe_with_its_question_also_beside_broken_ones(capsys, workdir):
    (workdir / "recipes").mkdir()
    (workdir / "recipes" / "own.py").write_text(RECIPE)
    (workdir / "recipes" / "torn.py").write_bytes(b'"""\xff\x00"""')
    (workdir / "recipes" / "half.py").write_text('"""What?')
    (workdir / "recipes" / "lost.py").symlink_to("nowhere")
    (workdir / "recipes" / ".#own.py").symlink_to("me@host.1")  # a lock of Emacs
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert out.count("cannot be read: ") == 3 and "half" in out and "lost" in out and ".#own" not in out
    assert "own" in out and "Does locality attention help" in out
    assert all(path.stem in out for path in recipe_files()) and "quickstart" in out


def test_a_recipe_is_run_reported_published_and_verified(workdir, capsys):
    assert main(["run", "mine.py", "--only", "labels=20", "arm=scratch,+LSA,references", "--jobs", "1"]) == 0
    captured = capsys.readouterr()
    assert "20 labels" in captured.out and "not enough seeds" in captured.out and "small CNN" in captured.out
    assert "loading mine.py" in captured.err and "mine: training 10 runs; starting 1 worker process" in captured.err
    page = (workdir / "runs" / "mine" / "report.md").read_text()
    assert "Does locality attention help" in page and "+LSA" in page
    assert "comparisons (2 in this recipe)" in page, "comparisons without results must count too"
    assert "missing" in page and "40 labels" in page
    assert main(["report", "mine.py", "--publish"]) == 2, "half a recipe was published"
    assert "have not finished" in capsys.readouterr().err
    assert main(["run", "mine.py", "--jobs", "1"]) == 0
    (workdir / "mine.md").write_text("my notes")
    assert main(["report", "mine.py", "--publish"]) == 2 and (workdir / "mine.md").read_text() == "my notes"
    assert "mine.md would be replaced, but there is no mine.jsonl of an earlier --publish" in capsys.readouterr().err
    (workdir / "mine.md").unlink()
    assert main(["report", "mine.py", "--publish"]) == main(["report", "mine.py", "--publish"]) == 0
    assert len(read_records(workdir / "mine.jsonl")) == 2 * 2 * 5
    assert (workdir / "mine.md").exists() and (workdir / "mine.html").exists()
    assert main(["report", "mine.py", "--disagreements", "+LSA", "scratch"]) == 0
    assert re.search(r"the images with the most disagreement:\n +image +only first +only second\n  test image \d+", capsys.readouterr().out)
    assert main(["report", "mine.py", "--against", "+LSA"]) == 0
    assert re.search(r"\nWith \+LSA as the control.*:\nscratch at 20 labels: ", capsys.readouterr().out)
    Path("mine.py").write_text(Path("mine.py").read_text().replace('"+LSA"', '"LSA"'))
    assert main(["verify", "mine.py", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "LSA at 20 labels, seed 0: " in out and "identical to the record" in out, "an arm with a new name was not verified"
    records = read_records(workdir / "mine.jsonl")
    scores = [{name: value + 0.1 * (name == "accuracy") for name, value in r.test.items()} for r in records]
    other = [replace(r, test=test, correct=None) for r, test in zip(records, scores)]
    write_records(workdir / "mine.jsonl", other)
    assert main(["verify", "mine.py", "--jobs", "1"]) == 1
    assert "FAILED, the same weights score" in capsys.readouterr().out
    Path("mine.py").write_text(Path("mine.py").read_text().replace("batch=8", "batch=9"))
    sys.modules.pop("recipes.mine", None)
    assert main(["verify", "mine.py", "--jobs", "1"]) == 1
    shown = capsys.readouterr()
    assert "scratch at 20 labels, seed 0: not trained, because the recipe has changed: settings: batch was 8 and is 9" in shown.out
    assert "training" not in shown.err and "NOT verified" in shown.out


def test_home_folder_in_the_paths_of_a_recipe_and_of_its_runs(workdir, monkeypatch):
    monkeypatch.setenv("HOME", str(workdir / "home"))
    Path("home").mkdir()
    Path("mine.py").rename("home/mine.py")
    assert main(["run", "~/mine.py", "--out=~/runs", "--only", "seed=0", "labels=20", "arm=scratch", "--jobs", "1"]) == 0
    main(["report", "~/mine.py", "--out=~/runs", "--csv=~/table.csv"])
    assert len(records("~/mine.py", "~/runs")) == len(read_records("~/runs/mine")) == 1
    chosen = only(load_recipe("~/mine.py").RUNS, ["seed=0", "labels=20", "arm=scratch"])
    launch(chosen, "~/runs", recipe="mine", show=lambda record: pytest.fail("a finished run was trained again"))
    assert Path("home/table.csv").is_file() and os.listdir(workdir) == ["home"], "a folder with the name ~ was made"


@pytest.mark.slow
def test_a_comparison_is_published_in_parts(workdir, capsys):
    small = RECIPE.replace("seeds=range(2)", "seeds=[0], references=False")
    write_recipe(small.replace("labels=[20, 40]", "labels=[20]"))
    assert main(["run", "mine.py", "--jobs", "1"]) == main(["report", "mine.py", "--publish"]) == 0
    first = read_records(workdir / "mine.jsonl")
    shutil.rmtree(workdir / "runs")
    write_recipe(small)
    assert main(["run", "mine.py", "--jobs", "1", "--only", "labels=40"]) == 0
    capsys.readouterr()
    assert main(["report", "mine.py", "--publish"]) == 0
    assert f"{len(first)} of {2 * len(first)} runs have no result here" in capsys.readouterr().out
    both = read_records(workdir / "mine.jsonl")
    assert [r for r in both if r.labels == 20] == first and len(both) == 2 * len(first)
    assert "40 labels" in (workdir / "mine.md").read_text()
    write_recipe(small.replace("steps=6", "steps=7"))
    assert main(["report", "mine.py", "--publish"]) == 2, "records of other settings were published"


def test_one_committed_record_stands_for_a_reference_at_every_length():
    """A classifier of raw pixels has no training steps, so its runs at two lengths have one fingerprint."""
    scratch = Run(data=digits, model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2))
    runs = ablate({"scratch": scratch, "b": scratch.vary(depth=2)}, labels=[50], seeds=range(2), steps=[10, 20])
    records = [new_record(entry.run, tags(entry, "mine"), "missing") for entry in runs]
    finished = {"status": "finished", "score": "accuracy", "test": {"accuracy": 0.5}, "test_images": 500}
    committed = [replace(r, **finished) for r in records]
    found = report.with_published(records, committed, "mine.jsonl")
    assert [(r.arm, r.length, r.seed, r.finished) for r in found] == [(r.arm, r.length, r.seed, True) for r in records]
    moved = [replace(r, baseline="b" if r.arm == "small CNN" else r.baseline) for r in records]
    assert [r.baseline for r in report.with_published(moved, committed, "mine.jsonl")] == [r.baseline for r in moved]


# --dry-run


@pytest.mark.slow
def test_dry_run_describes_the_arms_and_counts_finished_runs(workdir, capsys):
    assert main(["run", "mine.py", *SMALLEST, "--out", "mine"]) == 0
    capsys.readouterr()
    assert main(["run", "mine.py", "--dry-run", "--out", "mine"]) == 0
    out = capsys.readouterr().out
    assert "    model.attention: Attention -> LocalityAttention" in out
    assert "scratch: 4 runs of 6 steps" in out and out.count("; 1 have finished") == 2
    assert "20 runs, 2 have finished, the others take about" in out
    assert main(["run", "mine.py", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "have finished" not in out and "20 runs, about" in out and not (workdir / "runs").exists()


@pytest.mark.slow
def test_dry_run_downloads_nothing(workdir, capsys, monkeypatch):
    import huggingface_hub

    for name in ("get_hf_file_metadata", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, name, lambda *words, **options: pytest.fail("something was downloaded"))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *words: None)
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    more = f"RUNS += ablate({{'tuned': scratch.vary(init=Weights(name={name!r}))}}, labels=[50], seeds=[0], references=False)"
    write_recipe(f"from smallvit import Weights\n{RECIPE}\n{more}\n")
    assert main(["run", "mine.py", "--dry-run"]) == 0
    assert f"{name} must be downloaded" in capsys.readouterr().out


@pytest.fixture
def takes(monkeypatch):
    """A function that lets some seconds pass on a clock that otherwise stands still, and returns its second argument."""
    clock = [0.0]
    monkeypatch.setattr(plan.time, "perf_counter", lambda: clock[0])

    def takes(seconds, result=None):
        clock[0] += seconds
        return result

    return takes


def test_estimate_counts_steps_validation_and_evaluation(monkeypatch, takes):
    """As if a step took 1 s, a validation 10 s, the evaluation 1 s for each test image and 0.5 s for each training image."""
    train_step = Training.train_step
    monkeypatch.setattr(Training, "train_step", lambda self: takes(1, train_step(self)))
    monkeypatch.setattr(Training, "validate", lambda self: takes(10))
    monkeypatch.setattr(Training, "facts", lambda self: takes(0.25))
    evaluate = lambda run, model, subset, test: takes(len(test.open()) + 0.5 * len(subset.train))  # noqa: E731
    monkeypatch.setattr(import_module("smallvit.train.fit"), "evaluate", evaluate)
    run = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), labels=50, steps=60)
    expected = len(digits().test.open()) + 25 + 0.25
    monkeypatch.setattr(plan, "SLOW", math.inf)
    assert plan.estimate(run, "cpu") == pytest.approx(60 + 12 * 10 + expected)
    assert plan.estimate(run.vary(steps=0), "cpu") == pytest.approx(expected)
    monkeypatch.setattr(plan, "MOST_TRAIN", 10)
    monkeypatch.setattr(plan, "TEST_COUNTS", (5, 20))  # the others are extrapolated
    assert plan.estimate(run.vary(steps=0), "cpu") == pytest.approx(expected)


@pytest.mark.parametrize("evaluators", [(accuracy,), (linear_probe,)], ids=["accuracy", "probe"])
def test_estimate_of_a_large_model_scores_few_images(evaluators, monkeypatch, takes):
    """As if a step took 1 s, and the model 1 s for each image."""
    scored = []

    def evaluate(run, model, subset, test):
        scored.append(len(subset.val) + len(test.open()) + (evaluators == (linear_probe,)) * len(subset.train))
        takes(scored[-1])

    monkeypatch.setattr(Training, "train_step", lambda self: takes(1))
    monkeypatch.setattr(Training, "validate", lambda self: pytest.fail("all validation images were scored"))
    monkeypatch.setattr(import_module("smallvit.train.fit"), "evaluate", evaluate)
    run = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), labels=50, steps=60, evaluators=evaluators)
    val = len(autotune.begun(run, DEFAULT, "cpu", plan.MOST_STEPS).subset.val)
    expected = val + len(digits().test.open()) + 50 * (evaluators == (linear_probe,))
    assert plan.estimate(run, "cpu") == pytest.approx(60 + 12 * val + expected)
    assert plan.estimate(run.vary(steps=0), "cpu") == pytest.approx(expected)
    assert max(scored) <= 3 * plan.FEW[-1]


@pytest.mark.parametrize("slow", [math.inf, 0.001], ids=["small", "large"])
def test_estimate_does_not_multiply_the_time_of_the_evaluator_cost(slow, monkeypatch, takes):
    """As if this evaluator took 100 s, and the others 1 s for each image."""

    def evaluate(run, model, subset, test):
        images = len(subset.val) + len(test.open())
        takes(images + 100 * (cost in run.evaluators))

    monkeypatch.setattr(Training, "facts", lambda self: None)
    monkeypatch.setattr(flops, "footprint", lambda *words: takes(100, {"macs": 1}))
    monkeypatch.setattr(import_module("smallvit.train.fit"), "evaluate", evaluate)
    monkeypatch.setattr(plan, "SLOW", slow)
    monkeypatch.setattr(plan, "TEST_COUNTS", (5, 20))
    model = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2)
    run = Run(model=model, labels=50, steps=0, evaluators=(accuracy, cost))
    val = len(autotune.begun(run, DEFAULT, "cpu", plan.MOST_STEPS).subset.val)
    assert plan.estimate(run, "cpu") == pytest.approx(val + len(digits().test.open()) + 2 * 100)


def test_estimate_includes_the_start_of_the_command_and_of_the_workers(workdir, monkeypatch, capsys):
    monkeypatch.setattr(plan, "estimate", lambda *options: 60.0)
    monkeypatch.setattr(plan, "worker_start", lambda device: 3600.0)
    monkeypatch.setattr(plan, "computing_processes", lambda: 0.0)
    monkeypatch.setattr(plan.os, "cpu_count", lambda: 2)
    assert main(["run", "mine.py", "--dry-run", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "20 runs, about 70 min with 2 worker processes" in out and "without" not in out and "busy" not in out
    assert main(["run", "mine.py", "--dry-run", "--jobs", "2", "--stack", "8"]) == 0
    assert "the time is that without --stack; the runs may be faster with it" in capsys.readouterr().out
    assert "about 100 min" in plan.plan(load_recipe("mine.py").RUNS, 2, "cpu", startup=1800.0)


def test_dry_run_measures_the_steps_as_numerics_says(workdir, monkeypatch, capsys):
    times = {DEFAULT: 1200.0, Numerics(kernel="explicit"): 600.0}
    monkeypatch.setattr(plan, "estimate", lambda run, device, numerics: times[numerics])
    for name in ("worker_start", "computing_processes"):
        monkeypatch.setattr(plan, name, lambda *options: 0.0)
    for options, time in (([], "3.3 h"), (["--numerics", "kernel=explicit"], "100 min")):
        assert main(["run", "mine.py", "--dry-run", "--jobs", "2", *options]) == 0
        assert f"20 runs, about {time} with 2 worker processes" in capsys.readouterr().out


def test_dry_run_refuses_finished_runs_on_other_images_as_the_run_does(workdir, monkeypatch, capsys):
    assert main(["run", "mine.py", "--only", "labels=20", "arm=scratch", "seed=0", "--jobs", "1"]) == 0
    monkeypatch.setattr(Record, "has_other_data", lambda *content: True)
    for options in (["--dry-run"], ["--jobs", "1"]):
        assert main(["run", "mine.py", *options]) == 2
        assert "1 run has finished on other images or labels than digits contains now" in capsys.readouterr().err


def test_estimate_is_longer_if_other_programs_use_the_processor(workdir, monkeypatch):
    """Measured was one process beside two others on two cores; training are two processes beside them."""
    for name, value in (("estimate", 60.0), ("worker_start", 0.0)):
        monkeypatch.setattr(plan, name, lambda *options, value=value: value)
    monkeypatch.setattr(plan, "computing_processes", lambda: 2.0)
    monkeypatch.setattr(plan.os, "cpu_count", lambda: 2)
    text = plan.plan(load_recipe("mine.py").RUNS, 2, "cpu")
    assert "about 13 min with 2 worker" in text and "other programs keep about 2 cores busy, which makes it slower" in text
    assert plan.slowdown(0, 2) == 1.0 and plan.slowdown(0, 4) == 2.0 and plan.slowdown(14, 2) == 16 / 15
    monkeypatch.setattr(plan.os, "cpu_count", lambda: 64)
    assert plan.slowdown(30, 16) == 1.0


def test_step_is_timed_with_its_interruptions_and_for_a_second(monkeypatch, takes):
    """Every tenth step takes 50 ms and not 10 ms, because another program has the processor."""
    steps = []

    def train_step(self):
        steps.append(self.step)
        takes(0.05 if len(steps) % 10 == 0 else 0.01)

    monkeypatch.setattr(Training, "train_step", train_step)
    run = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), labels=50, steps=60)
    seconds = plan.step_time(autotune.begun(run, DEFAULT, "cpu", plan.MOST_STEPS))
    assert seconds == pytest.approx(0.014, rel=0.05) and 65 < len(steps) < 80


def test_dry_run_compares_each_arm_with_its_own_baseline_also_if_it_is_not_selected(workdir, monkeypatch):
    for name in ("estimate", "worker_start", "computing_processes"):
        monkeypatch.setattr(plan, name, lambda *options: 0.0)
    runs = load_recipe("mine.py").RUNS
    tuned = [replace(entry, run=entry.run.vary(lr=entry.run.labels / 1000), tuning={}) for entry in runs if entry.role != "reference"]
    cnn, lsa = only(runs, ["arm=small CNN", "labels=40"]), only(tuned, ["arm=+LSA", "labels=40"])
    text = plan.plan([*lsa, *cnn], 1, "cpu", recipe_runs=[*runs, *tuned])
    described = re.search(r"\+LSA, tuned: .*\n((?:    .*\n)*)small CNN: .*\n((?:    .*\n)*)", text)
    assert described[1].splitlines() == ["    model.attention: Attention -> LocalityAttention"]
    assert "LocalityAttention" not in described[2] and "SmallCNN" in described[2]
    pretrained = runs[0].run.vary(init=runs[0].run.vary(labels=None, steps=3))
    shared = ablate({"scratch": pretrained, "b": pretrained.vary(depth=2)}, labels=[20], seeds=range(3), references=False)
    text = plan.plan(only(shared, ["arm=b", "seed=2"]), 1, "cpu", recipe_runs=shared)
    assert "    model.depth: 1 -> 2" in text and "init.seed" not in text, "both arms share the pretraining of their seed"
    assert " -> " not in plan.plan(cnn, 1, "cpu"), "an arm was compared with another one than its baseline"


@pytest.mark.parametrize(("options", "left"), [([], 19), (["--retry"], 20)])
def test_dry_run_counts_failed_runs_only_if_they_will_be_trained(options, left, workdir, monkeypatch, capsys):
    for name, value in (("estimate", 60.0), ("worker_start", 0.0), ("computing_processes", 0.0)):
        monkeypatch.setattr(plan, name, lambda *options, value=value: value)
    record_failure(load_recipe("mine.py").RUNS[0], "runs", "mine", ValueError("broken"))
    assert main(["run", "mine.py", "--dry-run", "--jobs", "1", *options]) == 0
    out = capsys.readouterr().out
    assert f"about {left} min with 1 worker" in out
    assert out.count("1 have failed (--retry trains them again)") == (0 if options else 2)


def test_arm_whose_loss_becomes_infinite_does_not_stop_a_dry_run(workdir, monkeypatch, capsys):
    validate = Training.validate

    def diverge(self, last):
        if self.step > last:
            raise FloatingPointError("the loss is nan")
        return validate(self)

    for name in ("worker_start", "computing_processes"):
        monkeypatch.setattr(plan, name, lambda *options: 0.0)
    run = load_recipe("mine.py").RUNS[0].run
    monkeypatch.setattr(Training, "validate", lambda self: diverge(self, run.steps))
    assert plan.estimate(run, "cpu") > 0, "steps that the run does not have were counted"
    monkeypatch.setattr(Training, "validate", lambda self: diverge(self, 0))
    assert main(["run", "mine.py", "--dry-run", "--only", "arm=scratch,pixels, nearest neighbor"]) == 0
    out = capsys.readouterr().out
    assert "scratch: 4 runs of 6 steps, cannot be timed: the loss is nan\n" in out and "nearest neighbor: 4 runs of 0 steps, about" in out
    assert "of each arm; without 4 runs that cannot be timed\n" in out


def test_dry_run_for_ray_needs_no_gpu_on_this_machine(workdir, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("estimate", "worker_start", "computing_processes"):
        monkeypatch.setattr(plan, name, lambda *options: 0.0)
    assert main(["run", "mine.py", "--on", "ray", "--device", "cuda", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "20 runs, about" in printed.out and "this machine has no cuda device, so the time is measured on its CPU" in printed.err
    assert main(["run", "mine.py", "--on", "ray", "--device", "cdua", "--dry-run"]) == 2
    assert "device is 'cdua'; expected" in capsys.readouterr().err


# summary


@pytest.mark.parametrize(
    "words, start, rows, parameters",
    [
        (["mine.py"], "mine, scratch:", ["16 x 16", "17 x 16"], 3_850),
        (["mine.py", "--arm", "+LSA", "--image", "16"], "mine, +LSA:", ["64 x 16", "65 x 16"], 4_620),
        (["vit_tiny_patch16_224"], "step ", ["3 x 224 x 224", "196 x 192", "197 x 192"], 5_717_416),
        pytest.param(
            ["vit_base_patch16_224", "--image", "224", "--channels", "3"], "step ", ["197 x 768"], 86_567_656, marks=pytest.mark.slow
        ),
        (["resnet18", "--image", "32", "--channels", "1"], "step ", ["1 x 32 x 32", "64 x 16 x 16"], 11_683_240),
    ],
)
def test_summary_of_an_arm_and_of_timm_models(words, start, rows, parameters, workdir, capsys):
    assert main(["summary", *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(start) and all(row in out for row in rows)
    assert out.splitlines()[-1].split()[:2] == ["total", f"{parameters:,}"]
    assert sorted(path.name for path in workdir.iterdir()) == ["mine.py"]


# Parts of a recipe, and other lengths


def test_verdicts_are_printed_if_the_report_cannot_be_written(workdir, capsys):
    assert main(["run", "mine.py", *SMALLEST]) in (0, 1)
    shown = capsys.readouterr().out.partition("\nreport: ")[0]
    page = workdir / "runs" / "mine" / "report.md"
    page.unlink()
    page.mkdir()
    assert main(["report", "mine.py"]) == 2
    found = capsys.readouterr()
    assert "test accuracy" in shown and "scratch" in found.out and "report.md" in found.err


def test_report_and_prediction_say_that_runs_have_other_settings(workdir, capsys):
    assert main(["run", "mine.py", *SMALLEST]) in (0, 1)
    Path("mine.py").write_text(RECIPE.replace("steps=6", "steps=7"))
    assert Path("mine.py").read_text() != RECIPE
    capsys.readouterr()
    assert main(["report", "mine.py"]) == 2
    assert "no runs of mine in runs, but 2 finished ones with other settings than mine.py has now; start" in capsys.readouterr().err
    Image.new("L", (8, 8)).save("image.png")
    assert main(["predict", "mine.py:scratch", "image.png"]) == 2
    assert ", but 1 with other settings than mine.py has now; if it was" in capsys.readouterr().err


def test_smoke_test_trains_every_arm_and_leaves_the_real_runs_alone(workdir, capsys):
    assert main(["run", "mine.py", "--smoke", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert all(arm in out for arm in ("scratch", "+LSA", "small CNN", "pixels, nearest neighbor"))
    assert not (workdir / "runs" / "mine").exists()


def test_longer_runs_have_their_own_folder_and_report(workdir):
    assert main(["run", "mine.py", "--scale-steps", "2", *SMALLEST]) == 0
    folder = workdir / "runs" / "scale-steps-2" / "mine"
    (folder / "report.html").unlink()
    assert main(["report", "mine.py", "--scale-steps", "2"]) == 1, "most runs are missing"
    page = (folder / "report.md").read_text()
    assert "scratch" in page and "smallvit run mine --scale-steps 2" in page.replace("mine.py", "mine")
    assert (folder / "report.html").exists() and not (workdir / "runs" / "mine").exists()
    assert {record.steps for record in all_records(workdir)} == {12}


def test_only_selects_by_arm_labels_and_seed(workdir):
    runs = load_recipe("mine.py").RUNS
    assert {r.arm for r in only(runs, ["arm=+LSA"])} == {"+LSA"}
    assert {(r.labels, r.seed) for r in only(runs, ["labels=40", "seed=0-1"])} == {(40, 0), (40, 1)}
    assert {r.arm for r in only(runs, ["arm=pixels, logistic regression,+LSA"])} == {"pixels, logistic regression", "+LSA"}
    assert {r.role for r in only(runs, ["arm=references"])} == {"reference"}


def test_only_finds_names_with_commas_and_no_parts_of_names():
    arms = {name: Run(lr=1e-3 * (1 + place)) for place, name in enumerate(("a,b", "a", "b", "bb", "c"))}
    runs = ablate(arms, seeds=[0], references=False)
    for text, names in {"a,bb": {"a", "bb"}, "a,b": {"a,b"}, "b,a": {"a", "b"}, "c,a,b,bb": {"a,b", "bb", "c"}}.items():
        assert {entry.arm for entry in only(runs, [f"arm={text}"])} == names


def test_only_can_be_given_several_times_and_each_filter_once(workdir, monkeypatch, capsys):
    for name in ("estimate", "worker_start", "computing_processes"):
        monkeypatch.setattr(plan, name, lambda *options: 0.0)
    for words in (["--only", "arm=scratch", "--only", "seed=0"], ["--only", "arm=scratch", "seed=0", "arm=scratch"]):
        assert main(["run", "mine.py", "--dry-run", *words]) == 0
        assert "2 runs, about" in (out := capsys.readouterr().out) and "+LSA" not in out
    assert main(["run", "mine.py", "--dry-run", "--only", "arm=scratch", "--only", "arm=+LSA"]) == 2
    assert "--only got arm=scratch and arm=+LSA; expected one filter: arm=scratch,+LSA\n" in capsys.readouterr().err


def test_only_selects_a_pass_of_a_cross_validation_or_one_fold_of_it():
    base = Run(data=partial(folder, path="nowhere", folds=5), model=ViT)
    runs = ablate({"scratch": base, "+LSA": base.vary(attention=LocalityAttention)}, seeds=range(6))
    assert {r.seed for r in only(runs, ["pass=0"])} == {*range(5)} and {r.seed for r in only(runs, ["pass=1,4-5"])} == {*range(5, 10), *range(20, 30)}
    assert {r.seed_text for r in only(runs, ["seed=7"])} == {"pass 1, fold 2"}
    for text, message in (
        ("pass=6", "this recipe has no pass '6'; expected one of '0', '1', '2', '3', '4', '5'"),
        ("seed=40", "this recipe has no seed '40'; it has seed=0-29; a seed is one of 5 folds, and pass=0 is a pass over all folds"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            only(runs, [text])


def test_name_of_a_recipe_file_is_compared_with_files_first_and_then_with_recipes(workdir):
    Path("leaves.py").write_text("")
    Path("quickstat.py").write_text("")
    for name, near in (("leavs.py", "leaves.py"), ("leavs", "leaves.py"), ("quickstar.py", "quickstat.py"), ("classrom.py", "classroom")):
        with pytest.raises(ValueError, match=f"did you mean '{near}'"):
            find_recipe(name)
    with pytest.raises(ValueError, match=r"expected one of the files leaves.py, mine.py, quickstat.py, or the path .* recipes ablation"):
        find_recipe("xyz.py")
    assert find_recipe("leaves") == Path("leaves.py")
    Path("deeper").mkdir()
    Path("deeper/leaves.py").write_text("")
    with pytest.raises(ValueError, match=f"there is no file leavs.py in {workdir / 'deeper'}; did you mean 'deeper/leaves.py'"):
        find_recipe("deeper/leavs.py")


# Wrong arguments and broken recipes


@pytest.mark.parametrize(
    "words, message",
    [
        (["run", "quickstrat"], "did you mean 'quickstart'?"),
        (["run", "nothere"], "there is no recipe 'nothere'; expected"),
        (["run", "quickstrat"], "there is no recipe 'quickstrat'"),
        (["run", "nowhere.py"], "there is no file nowhere.py in /"),
        (["run", "nowhere.py"], "expected one of the files mine.py, or the path of another .py file, or one of the recipes ablation"),
        (["run", "minee.py"], "did you mean 'mine.py'?"),
        (["run", "elsewhere/recipes/quickstart.py"], "there is no file elsewhere/recipes/quickstart.py, because there is no folder "),
        (["run", "mine.py", "--only", "pass=0"], "this recipe has no cross-validation (folds=); expected seed=0"),
        (["run", "mine.py", "--only", "arm=+LAS"], "has no arm '+LAS'; did you mean '+LSA'?"),
        (["run", "mine.py", "--only", "labels=30"], "has no labels '30'"),
        (["run", "mine.py", "--only", "seed=0-9999999999"], "--only got the range 0-9999999999; expected at most 100,000 numbers"),
        (["run", "mine.py", "--only", "seeds=1"], "--only got 'seeds=1'; expected arm=..., labels=..., seed=..., pass=..., length=... or settings=..."),
        (["report", "mine.py"], "no runs of mine in runs; start them with: smallvit run mine.py"),
        (["report", "./mine", "--out", "my runs"], "start them with: smallvit run mine.py --out 'my runs'\n"),
        (["report", "mine.py", "--scale-steps", "2"], "no runs of mine in runs/scale-steps-2"),
        (["report", "mine.py", "--scale-steps", "2", "--publish"], "--publish got --scale-steps 2"),
        (["verify", "mine.py"], "no committed records"),
        (["run", "mine.py", "--numerics", "compiled=yes", "compiled=no"], "compiled twice; expected each choice once"),
        (["run", "mine.py", "--out", "mine.py"], "--out mine.py cannot be created"),
        (["run", "mine.py", "--fast", "--out", "mine.py/runs"], "--out mine.py/runs cannot be created"),
        *(
            ([command, "mine.py", "--out", "mine.py/runs"], "--out mine.py/runs cannot be created")
            for command in ("status", "tune", "explore", "report", "verify")
        ),
        (["run", "mine.py", "--device", "cdua"], "device is 'cdua'; expected cpu, cuda, mps or auto"),
        *((["run", "mine.py", "--device", "cuda", *more], "no such GPU") for more in ([], ["--dry-run"], ["--fast"], ["--smoke"])),
        (["run", "nowhere.py", "--device", "cuda"], "no such GPU"),
        (["verify", "mine.py", "--device", "cuda"], "no such GPU"),
        (["summary", "quickstrat"], "did you mean 'quickstart'? (timm has no model of that name either)"),
        (["summary", "mine.py", "--arm", "+LAS"], "has no arm '+LAS'; did you mean '+LSA'?"),
        (["summary", "mine.py", "--image", "9"], "patches of 2 pixels do not tile an image of 9 x 9"),
        (["summary", "vit_tiny_patch16_224", "--arm", "+LSA"], "is a timm model and has no arm '+LSA'"),
        (["summary", "vit_tiny_patch16_224", "--image", "28"], "patches of 16 pixels do not tile an image of 28 x 28"),
        (["summary", "swin_tiny_patch4_window7_224", "--image", "28"], "does not accept images of 3 x 28 x 28"),
    ],
)
def test_wrong_arguments_get_one_line_and_status_2(words, message, workdir, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(words) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if "loading" not in line]
    assert message in captured.err and errors[0].startswith("smallvit: ")
    assert "Traceback" not in captured.err and "driver" not in captured.err and not captured.out
    assert "mine.py" not in os.listdir("runs") if Path("runs").exists() else True


VALUES = {
    "--shard": ["1/2"], "--log": ["wandb"], "--gpus": ["all"], "--max-seeds": ["8"], "--per-gpu": ["2"], "--sbatch": ["-t 5"],
    "--address": ["local"],
}  # fmt: skip


def test_exploring_without_validation_images_is_refused_before_anything_is_trained(workdir, capsys):
    write_recipe(RECIPE.replace("val=20", "val=0"))
    assert main(["explore", "mine.py", "--jobs", "1"]) == 2
    assert "smallvit: 'scratch' has val=0, so there are no images to score it on; set val" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "smallvit: error: there is no command; expected list, run, status,"),
        (["nonsense"], "smallvit: error: argument COMMAND: invalid choice: 'nonsense'"),
        (["run"], "smallvit run: error: the following arguments are required: recipe"),
        (["verify", "mine.py", "--seed", "3"], "smallvit verify: error: there is no option --seed here; it belongs to smallvit predict"),
        (["explore", "mine.py", "--seed", "3"], "smallvit explore: error: there is no option --seed here; it belongs to smallvit predict"),
        (["report", "mine.py", "--pub"], "smallvit report: error: there is no option --pub"),
        (["run", "mine.py", "--jops", "3"], "smallvit run: error: there is no option --jops; did you mean --jobs?"),
        (["status", "mine.py", "--csv=x"], "smallvit status: error: there is no option --csv here; it belongs to smallvit report"),
        (["report", "mine.py", "extra", "--latex"], "smallvit report: error: there is one argument too many: 'extra'"),
        (["run", "mine.py", "--stack", "0"], "smallvit run: error: argument --stack: '0' is not allowed; expected a whole number,"),
        (["predict", "mine.py:+LSA", "a.png", "--seed", "-1"], "smallvit predict: error: argument --seed: "),
        (["export", "mine.py:+LSA", "a.onnx", "--seed", "x"], "smallvit export: error: argument --seed: 'x' is not allowed; expected"),
    ],
)
def test_error_of_a_command_shows_the_usage_of_this_command(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    error, program = capsys.readouterr().err, message.partition(": error")[0]
    assert end.value.code == 2 and error.startswith(f"usage: {program} [") and message in error.splitlines()[-1]


def test_arms_whose_names_begin_with_a_minus_are_no_options(workdir, capsys):
    words = ["report", "mine.py", "--disagreements", "scratch", "-LSA", "--predictions", "-o", "--mistakes", "-EMA", "--against", "-LSA"]
    options = parser().parse_args(joined(words))
    assert (options.disagreements, options.predictions, options.mistakes) == (["scratch", "-LSA"], "-o", "-EMA")
    assert options.against == "-LSA"
    options = parser().parse_args(joined(["report", "mine.py", "--disagreements", "--EMA", " x", "--mistakes=-EMA"]))
    assert (options.disagreements, options.mistakes) == (["--EMA", " x"], "-EMA")
    write_recipe(RECIPE.replace(LSA, LSA.replace("+LSA", "-LSA")))
    assert main(["summary", "mine.py", "--arm", "-LSA"]) == 0
    with pytest.raises(SystemExit):
        main(["report", "mine.py", "--disagreements", "scratch", "--csv"])
    assert "argument --disagreements: expected 2 arguments" in capsys.readouterr().err


@pytest.mark.parametrize("first, second", EXCLUDED)
def test_options_that_exclude_each_other_are_refused_with_advice(first, second, workdir, capsys):
    words = [word for option in (first, second) for word in [*option.replace("...", "0").split(), *VALUES.get(option, [])]]
    assert main(["run", "mine.py", "--jobs", "1", *words]) == 2
    assert f"smallvit: {first} cannot be used with {second}: {EXCLUDED[first, second]}\n" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--against", "+LSA"], ["--predictions", "+LSA"], ["--mistakes", "+LSA"], ["--log", "wandb"], ["--disagreements", "scratch", "+LSA"]])
def test_publishing_does_nothing_else(option, workdir, capsys):
    assert main(["report", "mine.py", "--publish", *option]) == 2
    assert f"smallvit: --publish cannot be used with {option[0]}: it only writes" in capsys.readouterr().err


@pytest.mark.parametrize("flag", NEEDED)
def test_option_without_the_one_that_it_needs_is_refused(flag, workdir, capsys):
    assert main(["run", "mine.py", "--jobs", "1", flag, *VALUES[flag]]) == 2
    message = f"smallvit: {flag} {VALUES[flag][0]} needs {' or '.join(NEEDED[flag])}; add it, or remove {flag}\n"
    assert message in capsys.readouterr().err and not (workdir / "runs").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("import smallvit\nraise RuntimeError('no luck')", "broken.py, line 2: RuntimeError: no luck"),
        ("RUNS = [", "broken.py, line 1: SyntaxError"),
        ("import sys\n\nsys.exit()", "broken.py, line 3: SystemExit"),
        ("x = 1", "broken.py defines no list RUNS"),
        ("RUNS = [1]", "broken.py defines no list RUNS"),
        ("from smallvit import Run\nRUNS = [Run(stepps=3)]", "line 2: ValueError: a run has no option 'stepps'; did you mean 'steps'?"),
        ("ARMS = {\n'a': 1, 'b': 2, 'a': 3}", "broken.py: ValueError: the dict in line 1 has the key 'a' 2 times"),
        ("from smallvit import mnits", "line 1: ImportError: cannot import name 'mnits'"),
        ("from mine import scratch", "line 1: ModuleNotFoundError: No module named 'mine'; a recipe must be one file"),
        (RECIPE + "RUNS = RUNS + RUNS", "labels=20, seed=0 2 times"),
        (RECIPE + "RUNS = RUNS[1:2]", "RUNS has no baseline"),
    ],
)
def test_broken_recipe_is_named_with_its_line_before_anything_is_trained(text, message, workdir, capsys):
    Path("broken.py").write_text(text)
    assert main(["run", "broken.py"]) == 2
    assert message in capsys.readouterr().err and not Path("runs").exists()


def two_baselines() -> list:
    """The runs of a recipe that concatenates two calls of `ablate`."""
    runs = []
    for patch in (2, 4):
        base = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=patch)))
        arms = {f"patch {patch}": base, f"+LSA, patch {patch}": base.vary(attention=LocalityAttention)}
        runs += ablate(arms, seeds=range(2), references=patch == 2)
    return runs


def test_recipe_may_have_several_baselines_if_every_arm_names_its_own():
    runs = two_baselines()
    check_comparable(runs, "r.py")
    check_comparable([replace(run, baseline="") for run in runs if run.baseline == "patch 2"], "r.py")
    for changed, message in (
        ([replace(run, baseline="") for run in runs], r"arm '\+LSA, patch 2' \(technique\) has the baseline ''"),
        ([run for run in runs if run.arm != "patch 4"], r"'patch 4'; expected one of \['patch 2'\]"),
        ([replace(runs[0], baseline="patch 4"), *runs[1:]], "'patch 2' has several roles or several baselines"),
        ([replace(run, baseline="patch 4") if run.arm == "patch 2" else run for run in runs], r"'patch 2' \(baseline\) has the"),
        ([replace(run, role="technique") if run.seed else run for run in runs], "'patch 2' has several roles"),
    ):
        with pytest.raises(ValueError, match=message):
            check_comparable(changed, "r.py")


# Runs that fail or were damaged


def test_failing_arm_gives_status_1_and_the_others_are_reported(workdir, capsys):
    write_recipe(RECIPE.replace(LSA, '"odd": scratch.vary(heads=3)'))
    assert main(["run", "mine.py", "--only", "labels=20", "seed=0", "--jobs", "1"]) == 1
    captured = capsys.readouterr()
    assert "FAILED odd, 20 labels, seed 0: ValueError: 3 heads do not divide width 16" in captured.err
    assert "scratch" in captured.out and (workdir / "runs" / "mine" / "report.html").exists()
    assert main(["run", "mine.py", "--only", "labels=20", "seed=0", "--jobs", "1"]) == 1  # nothing is tried again
    assert "  odd: ValueError: 3 heads do not divide width 16" in capsys.readouterr().err


USER_CLASS = """
class Mine(LocalityAttention):
    gain = 1.0

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
"""


@pytest.mark.parametrize(
    "code, error",
    [
        ("return super().forward(*args, **kwargs) + 1", "TypeError: "),
        pytest.param("raise Odd(1, 2)", "RuntimeError: Odd: 1 and 2", marks=pytest.mark.slow),
    ],
    ids=["type error", "exception that cannot be pickled"],
)
def test_error_in_user_code_shows_the_line_and_the_record_has_the_traceback(code, error, workdir, capsys):
    odd = "\nclass Odd(Exception):\n    def __init__(self, a, b):\n        super().__init__(f'{a} and {b}')\n"
    text = RECIPE.replace("\nscratch =", USER_CLASS.replace("return super().forward(*args, **kwargs)", code) + odd + "\nscratch =")
    write_recipe(text.replace(LSA, '"mine": scratch.vary(attention=Mine)'))
    line = 1 + text.splitlines().index(f"        {code}")
    for options in ([], [], ["--dry-run"]):  # also of a failure that is not tried again
        assert main(["run", "mine.py", "--only", "labels=20", "seed=0", "arm=mine", "--jobs", "1", *options]) in (1, 2)
        err = capsys.readouterr().err
        assert f"(mine.py, line {line}: {code})" in err and (error in err or options)
    record = next(record for record in all_records(workdir) if record.status == "failed")
    assert record.error.startswith(error) and "train/loop.py" in record.traceback and code in record.traceback


def test_empty_file_of_committed_records_is_named(workdir, capsys):
    Path("mine.jsonl").touch()
    assert main(["verify", "mine.py"]) == 2
    assert "mine.jsonl is empty; expected committed records" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--on", "slurm", "--jobs", "2"]])
def test_data_that_cannot_be_loaded_are_named_with_the_line(options, workdir, capsys):
    loader = "def mine():\n    open('nowhere.csv')\n\nscratch = Run(data=mine, "
    write_recipe(RECIPE.replace("scratch = Run(", loader))
    assert main(["run", "mine.py", *options]) == 2
    err = capsys.readouterr().err
    assert "cannot be loaded: FileNotFoundError: " in err and "'nowhere.csv' (mine.py, line 10: open('nowhere.csv'))" in err


@pytest.mark.parametrize("error, text", [
    (PermissionError(13, "Permission denied", "a/b"), "smallvit: a/b: Permission denied\n"),
    (OSError("no network"), "smallvit: no network\n"),
])  # fmt: skip
def test_error_of_the_system_is_one_line(error, text, monkeypatch, capsys):
    monkeypatch.setattr("smallvit.commands.list.recipe_files", lambda: (_ for _ in ()).throw(error))
    assert main(["list"]) == 2 and capsys.readouterr().err == text


@pytest.mark.parametrize("module, words, again", [("list", ["list"], False), ("verify", ["verify", "mine.py"], True)])
def test_only_a_command_that_continues_says_so_when_it_is_stopped(module, words, again, monkeypatch, capsys):
    stop = lambda options: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    monkeypatch.setattr(import_module(f"smallvit.commands.{module}"), "main", stop)
    assert main(words) == 130
    assert capsys.readouterr().err.endswith("stopped" + "; run the same command again to continue" * again + "\n")


@pytest.mark.slow
def test_damaged_runs_are_named_by_report_and_trained_again_by_run(workdir, capsys):
    assert main(["run", "mine.py", *SMALLEST]) == 0
    torn, other = sorted(workdir.rglob(RECORD))
    content, kept = torn.read_bytes(), other.read_bytes()
    torn.write_bytes(content[:100])
    weights = other.parent / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    files = sorted(workdir.rglob("*"))
    capsys.readouterr()
    assert main(["report", "mine.py"]) == 2, "there is no intact run"
    err = capsys.readouterr().err
    assert f"{torn.relative_to(workdir)} is damaged" in err and f"{weights.relative_to(workdir)} is damaged" in err
    assert sorted(workdir.rglob("*")) == files and other.read_bytes() == kept
    assert main(["run", "mine.py", "--dry-run", *SMALLEST]) == 0
    assert "have finished" not in capsys.readouterr().out
    assert main(["run", "mine.py", *SMALLEST]) == 0
    assert capsys.readouterr().err.count("is damaged; renamed to *.damaged") == 2
    assert len(list(workdir.rglob("*.damaged"))) == 3 and len([r for r in all_records(workdir) if r.finished]) == 2


def test_result_at_chance_is_a_warning_in_the_terminal(workdir, capsys):
    write_recipe(RECIPE.replace("steps=6", "steps=6, lr=10.0"))
    assert main(["run", "mine.py", *SMALLEST]) == 0
    warning = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: scratch at 20 labels"))
    assert "most frequent class" in warning


@pytest.mark.slow
def test_deleted_arm_still_counts_as_a_comparison(workdir):
    assert main(["run", "mine.py", *SMALLEST]) == 0

    def comparisons(text: str) -> list[str]:
        write_recipe(text)
        main(["run", "mine.py", "--only", "labels=20", "seed=0", "arm=scratch", "--jobs", "1"])
        page = (workdir / "runs" / "mine" / "report.md").read_text()
        return re.findall(r"number of comparisons \((\d+) in this recipe\)", page)

    assert comparisons(RECIPE) == ["2"]
    assert comparisons(RECIPE.replace('"+LSA"', '"LSA"')) == ["2"], "an arm with another name is not another comparison"
    assert comparisons(RECIPE.replace(LSA, '"wide": scratch.vary(dim=32)')) == ["3"]
    assert "removed from the recipe" in (workdir / "runs" / "mine" / "report.md").read_text()


MANY = """
ARMS = {"scratch": scratch, "wide": scratch.vary(dim=32), "+LSA": scratch.vary(attention=LocalityAttention)}
RUNS = ablate(ARMS, labels=[20, 40], seeds=range(2), references=False)
"""


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory) -> Path:
    """The folder of a recipe with three arms that has been run. Tests work on a copy."""
    place = tmp_path_factory.mktemp("many")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        leave_out_figures(patch)
        write_recipe(RECIPE.partition("RUNS =")[0] + MANY)
        assert main(["run", "mine.py", "--jobs", "1"]) == 0
    return place


@pytest.mark.parametrize(
    ("old", "new", "removed"),
    [
        ("labels=[20, 40]", "labels=[20]", 2),
        pytest.param("steps=6", "steps=7", 4, marks=pytest.mark.slow),
        pytest.param(', "+LSA": scratch.vary(attention=LocalityAttention)}', "}", 2, marks=pytest.mark.slow),
        pytest.param("references=False", "references=False, baseline={'+LSA': 'wide'}", 2, marks=pytest.mark.slow),
        pytest.param('"wide": ', '"wider": ', 0, marks=pytest.mark.slow),
        pytest.param('"scratch": ', '"plain": ', 0, marks=pytest.mark.slow),
        pytest.param("range(2)", "range(1)", 0, marks=pytest.mark.slow),
        pytest.param(
            ', "+LSA": scratch.vary(attention=LocalityAttention)}\nRUNS = ablate(ARMS,',
            '}\nRUNS = ablate(ARMS, extra_references={"+LSA": scratch.vary(attention=LocalityAttention)},',
            2,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_comparisons_that_an_edit_removes_stay_in_the_family_also_when_published(old, new, removed, many_runs, workdir):
    shutil.copytree(many_runs, workdir, dirs_exist_ok=True)
    text = Path("mine.py").read_text()
    trained = {record.fingerprint for record in all_records(workdir)}
    assert old in text
    write_recipe(text.replace(old, new))
    assert main(["run", "mine.py", "--jobs", "1"]) == main(["report", "mine.py", "--publish"]) == 0
    records = read_records(workdir / "mine.jsonl")
    assert {record.removed for record in records} == {removed} and compare(records).earlier == removed
    assert f"({compare(records).family} in this recipe)" in (workdir / "mine.md").read_text()
    if "steps" not in old:
        assert {record.fingerprint for record in all_records(workdir)} == trained
        assert len(all_records(workdir)) == len(trained), "a renamed arm was trained again"


def test_removed_comparisons_stay_in_the_family_when_recipe_and_folder_are_renamed(many_runs, workdir):
    shutil.copytree(many_runs / "runs" / "mine", workdir / "runs" / "other")
    shutil.copytree(many_runs / "runs" / "mine", workdir / "runs" / "other" / "mine")  # as in a recipe called "explore"
    for path in (workdir / "runs" / "other" / "mine").rglob(RECORD):
        record = read_record(path.parent)
        write_record(path.parent, replace(record, run=record.run | {"steps": 7}))
    text = (many_runs / "mine.py").read_text().replace(', "+LSA": scratch.vary(attention=LocalityAttention)}', "}")
    Path("other.py").write_text(text)
    records = report.collect(load_recipe("other.py").RUNS, workdir / "runs", "other")
    assert {(record.status, record.recipe, record.removed) for record in records} == {("finished", "other", 2)}


@pytest.mark.parametrize("option, target", [("--csv", "mine.py"), ("--latex", "new.PY"), ("--csv", "photo.jpg"), ("--latex", ".")])
def test_table_never_replaces_a_recipe_or_an_image(option, target, workdir, capsys):
    before = Path("mine.py").read_text()
    assert main(["report", "mine.py", option, target]) == 2
    assert f"{option} got {target}; expected one file for the table, such as table." in capsys.readouterr().err
    assert Path("mine.py").read_text() == before and not Path("new.PY").exists()


def test_report_says_that_lines_of_another_machine_are_missing(many_runs, workdir, capsys):
    shutil.copytree(many_runs, workdir, dirs_exist_ok=True)
    runs, file = load_recipe("mine.py").RUNS, Path("runs", "mine", "test_reads.jsonl")
    (_, *lines), note = file.read_text().splitlines(keepends=True), f"{file} has no line for 1 run that was scored on test images"
    file.write_text("".join(lines))
    report.collect(runs, Path("runs"), "mine")
    assert note in (err := capsys.readouterr().err) and "join their files test_reads.jsonl" in err
    file.write_text("".join(lines) + (many_runs / file).read_text())  # as joined
    report.collect(runs, Path("runs"), "mine")
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "labels", "seeds"),
    slow_after(3, [
        ([], [20], [0]),
        (["--seeds", "2"], [20], [0, 1]),
        (["--only", "seed=1", "--labels", "40"], [40], [1]),
        (["--only", "seed=0-1"], [20], [0, 1]),
        (["--only", "labels=20,40"], [20, 40], [0]),
        (["--only", "arm=scratch,wide", "seed=0,1", "labels=20,40"], [20, 40], [0, 1]),
    ]),
)
def test_verify_trains_all_runs_that_only_names(words, labels, seeds, many_runs, workdir, monkeypatch, capsys):
    shutil.copytree(many_runs, workdir, dirs_exist_ok=True)
    assert main(["report", "mine.py", "--publish"]) == 0
    trained: list[tuple] = []
    monkeypatch.setattr("smallvit.commands.verify.launch", lambda runs, *_, **__: trained.extend((e.labels, e.seed) for e in runs) or [])
    assert main(["verify", "mine.py", *words]) == 1
    arms = 2 if "arm=scratch,wide" in words else 3
    assert Counter(trained) == {pair: arms for pair in product(labels, seeds)}
    if not words:
        with monkeypatch.context() as patch:
            numerics: list[Numerics] = []
            patch.setattr("smallvit.commands.verify.launch", lambda *_, **options: numerics.append(options["numerics"]) or [])
            assert main(["verify", "mine.py", "--numerics", "precision=bf16", "kernel=explicit"]) == 1
        assert numerics == [Numerics("bf16", "explicit")]
    if "seed=0-1" in words:
        assert main(["verify", "mine.py", *words, "--seeds", "2"]) == 2 and "remove one of them" in capsys.readouterr().err


def test_verify_trains_committed_seeds_that_the_recipe_does_not_list(workdir, monkeypatch):
    """`smallvit run --until-decided` adds seeds to those of the recipe."""
    write_recipe(RECIPE.partition("RUNS =")[0] + MANY)
    entries = load_recipe("mine.py").RUNS
    write_records(workdir / "mine.jsonl", [new_record(entry.run, tags(entry, "mine"), "finished") for entry in entries])
    write_recipe((workdir / "mine.py").read_text().replace("range(2)", "range(1)"))
    trained: list[tuple] = []
    monkeypatch.setattr("smallvit.commands.verify.launch", lambda runs, *_, **__: trained.extend((e.arm, e.seed) for e in runs) or [])
    for words, seeds in ((["--only", "seed=1"], [1]), (["--seeds", "2"], [0, 1])):
        trained.clear()
        assert main(["verify", "mine.py", *words]) == 1
        assert Counter(trained) == dict.fromkeys(product(("scratch", "wide", "+LSA"), seeds), 1)


@pytest.mark.slow
def test_settings_that_were_scored_after_the_shown_ones_are_counted(workdir, capsys):
    """The first settings were the best: their records say 1, because nothing else had been scored then."""
    small = RECIPE.replace("labels=[20, 40], seeds=range(2)", "labels=[20, 40], seeds=[0], references=False")
    for steps in (6, 7, 8):
        write_recipe(small.replace("steps=6", f"steps={steps}"))
        assert main(["run", "mine.py", "--jobs", "1"]) == 0
    write_recipe(small.replace('"+LSA"', '"LSA"'))
    assert {record.test_settings for record in all_records(workdir) if record.steps == 6} == {1}
    capsys.readouterr()
    assert main(["report", "mine.py", "--publish"]) == 0
    assert "so the best may be here by luck: scratch: 3; LSA: 3" in capsys.readouterr().out
    assert {record.test_settings for record in read_records(workdir / "mine.jsonl")} == {3}


def test_longer_runs_leave_out_the_tuned_copies(workdir, capsys):
    module = load_recipe(workdir / "mine.py")
    tuned = [replace(entry, tuning={"trials": 2}) for entry in module.RUNS]
    options = Namespace(scale_steps=2, out="runs", recipe="mine.py")
    runs, _ = report.scaled([*module.RUNS, *tuned], options)
    assert len(runs) == len(module.RUNS) and all(entry.tuning is None for entry in runs)
    assert "--scale-steps uses the settings of the recipe" in capsys.readouterr().out
    assert report.scaled(module.RUNS, options)[0] == runs and not capsys.readouterr().out
    assert len(report.scaled([*runs, *tuned], Namespace(scale_steps=1, out="runs"))[0]) == 2 * len(runs)


# Components defined in a recipe


def test_new_attention_in_a_recipe_file_runs_without_touching_the_package(workdir):
    write_recipe('''"""Does attention that ignores distance help?"""
from functools import partial
import torch
from PIL import Image
from torch import nn
from smallvit import AttentionOutput, PatchEmbed, Run, ViT, ablate

class MeanAttention(nn.Module):
    """Every token sees the mean of all tokens."""

    def __init__(self, dim, heads, *, gain: float = 1.0):
        super().__init__()
        self.proj, self.gain = nn.Linear(dim, dim), gain

    def forward(self, x, size=None, mask=None):
        return AttentionOutput(self.gain * self.proj(x.mean(1, keepdim=True).expand_as(x)))

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=6, batch=8, labels=20, val=20)
RUNS = ablate({"scratch": scratch, "mean": scratch.vary(attention=partial(MeanAttention, gain=2.0))}, labels=[20], seeds=[0])
''')
    assert main(["run", "mine.py", "--jobs", "2"]) == 0
    attention = next(record.run["model"]["attention"] for record in all_records(workdir) if record.arm == "mean")
    assert attention.pop("recipe_sha256") and attention == {"call": "recipes.mine.MeanAttention", "gain": 2.0}


def test_edited_class_of_a_recipe_is_trained_again_but_not_after_a_comment(workdir):
    recipe = RECIPE.replace("\nscratch =", USER_CLASS + "\nscratch =").replace(LSA, '"mine": scratch.vary(attention=Mine)')

    def trained(text: str) -> int:
        write_recipe(text)
        assert main(["run", "mine.py", "--only", "arm=mine", "seed=0", "labels=20", "--jobs", "1"]) == 0
        return len(all_records(workdir))

    assert trained(recipe) == 1 and trained("# a comment\n" + recipe) == 1
    assert trained(recipe.replace("gain = 1.0", "gain = 2.0")) == 2


def test_changed_recipe_file_is_imported_again_and_an_unchanged_one_is_not(workdir):
    path = workdir / "changing.py"
    path.write_text(RECIPE)
    first = load_recipe(path)
    assert load_recipe(path) is first
    path.write_text(RECIPE.replace('"scratch":', '"another":'))
    assert {entry.arm for entry in load_recipe(path).RUNS} >= {"another"} and "scratch" not in {e.arm for e in load_recipe(path).RUNS}
