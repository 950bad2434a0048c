"""smallvit run: train the runs of a recipe, or one part of them, and write its report."""

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import partial
from pathlib import Path

from smallvit.ablation import ArmRun
from smallvit.data.dataset import current_content
from smallvit.launch import launch
from smallvit.launch.autotune import autotune, stack_to_use
from smallvit.launch.gpus import VISIBLE, cuda_for_auto, gpu_workers
from smallvit.launch.launcher import check_device
from smallvit.launch.local import environment_variables
from smallvit.launch.plan import plan, tokens_left
from smallvit.launch.ray_engine import RayEngine
from smallvit.launch.results import Damaged, recall
from smallvit.launch.scheduler import check_unchanged, is_untrained
from smallvit.launch.shards import BUSY, divide
from smallvit.launch.slurm import submit
from smallvit.looks import Looks, seeds_left_out, with_looks
from smallvit.numerics import Numerics, check_numerics, parse_numerics
from smallvit.recipe import find_recipe, load_recipe, only, smoke_test_runs
from smallvit.record import RETRIED, Record
from smallvit.report.page import command_text
from smallvit.trackers import TrackerProcess, check_tracker

from .report import check_excluded, collect, runs_to_send, scale_option, scaled, status, write_report
from .stored import check_out, known_looks
from .tune import untuned_note
from .until_decided import begin, train_until_decided


def main(options: argparse.Namespace) -> int:
    """Train the runs of a recipe file (a Python file that lists the runs of a comparison), and write the report. `options` are
    the arguments of the command line. Return the exit status: 0 if all runs have finished, otherwise 1.

    Runs that have finished earlier are not trained again. `--until-decided` adds seeds to arms without a verdict. `--shard`
    trains only one part of the runs and writes no report. `--on slurm` submits jobs and returns at once; the last of the jobs
    writes the report.
    """
    check_options(options)
    if options.log:
        check_tracker(options.log)
    if options.on != "here":
        return run(options, [])
    options.device = cuda_for_auto(options.device)
    gpus = gpu_workers(options.gpus, options.per_gpu, options.jobs, options.device)
    with environment_variables({VISIBLE: gpus[0]} if gpus else {}):  # on which this process measures the speed, if it does
        check_device(options.device)
        return run(options, gpus)


def run(options: argparse.Namespace, gpus: Sequence[str]) -> int:
    """Train the runs of a recipe file and write the report, as `main` says. `options` are the arguments of the command line,
    and `gpus` is the GPU of each worker process (a process that trains runs), with the option `--gpus`. Return the exit status.
    """
    path = find_recipe(options.recipe)
    module = load_recipe(path)
    if any(e.tune is not None for e in module.RUNS) and all(e.tuning is None for e in module.RUNS):
        tune = command_text("tune", options.recipe, Path(options.out))
        advice = f"run `{tune}` first; now all arms are trained with the settings in the file"
        print(f"note: the recipe declares tuning; {advice}", file=sys.stderr)
    if note := untuned_note(module.RUNS, options.recipe, options.out):
        print(note, file=sys.stderr)
    recipe_runs, out = scaled(module.RUNS, options)
    looks = known_looks(recipe_runs, out, path.stem)
    if options.until_decided:
        looks = begin(recipe_runs, looks, options, out, path)
    elif note := seeds_left_out(recipe_runs, looks):
        print(note, file=sys.stderr)
    declared, recipe_runs = recipe_runs, with_looks(recipe_runs, looks)
    runs = only(recipe_runs, options.only)
    if options.smoke:
        runs = recipe_runs = smoke_test_runs(runs)
        out = out / "smoke"
    if options.shard:
        runs = shard_runs(runs, recipe_runs, options)
        out = out / "shard-{}-of-{}".format(*options.shard) if options.smoke else out  # shards must not delete each other's
    given = parse_numerics(options.numerics)
    check_numerics(Numerics(**given), options.stack or 1)
    if options.on == "slurm":
        submit(options, path.stem, out, runs, recipe_runs)
        return 0
    if options.dry_run:
        print_plan(runs, recipe_runs, looks, out, path.stem, options, len(gpus) or options.jobs, Numerics(**given))
        return 0
    if not runs:  # of this shard
        return end_shard([], options)
    check_out(out, create=True)
    if options.smoke:
        shutil.rmtree(out / path.stem, ignore_errors=True)  # a smoke test trains again each time
    for arm, tokens in tokens_left(runs).items():
        print(f"{arm}: {tokens}")
    train = trainer(options, out, path, recipe_runs, given, gpus)
    if options.shard:
        train(runs, recipe_runs)
        return end_shard(collect(runs, out, path.stem), options)
    if options.until_decided and looks:
        recipe_runs = train_until_decided(declared, runs, looks, train, options, out, path.stem)
        runs = only(recipe_runs, options.only)
    else:
        train(runs, recipe_runs)
    if options.smoke:
        print("smoke test: every arm was trained for at most two steps to see that it works; the numbers mean nothing")
    records = collect(recipe_runs, out, path.stem)
    target = out / path.stem / "report"
    models = None if options.smoke or options.scale_steps > 1 else out
    shown, all_results = not options.smoke, Path(options.out)
    write_report(path, module, records, target, options.scale_steps, show_warnings=shown, models=models, out=all_results)
    requested = {(entry.cell, entry.seed) for entry in runs}
    return status([record for entry, record in zip(recipe_runs, records) if (entry.cell, entry.seed) in requested])


def print_plan(
    runs: Sequence[ArmRun],
    recipe_runs: Sequence[ArmRun],
    looks: Looks | None,
    out: Path,
    recipe: str,
    options: argparse.Namespace,
    jobs: int,
    numerics: Numerics,
):
    """Print which runs will be trained and how long this takes, for `--dry-run`. `runs` are the runs to train, `recipe_runs`
    are all runs of the recipe, `looks` are its planned numbers of seeds, `out` is the folder of all results, `recipe` is the
    name of the recipe file, `options` are the command-line arguments, `jobs` is the number of worker processes, and
    `numerics` is how training steps are computed.

    Raises ValueError, as the training does, if earlier runs were trained on other images or labels than there are now.
    """

    def earlier(entry: ArmRun) -> Record | None:
        with suppress(Damaged):
            return None if options.smoke else recall(entry, out, recipe)
        return None

    found = {id(entry): earlier(entry) for entry in runs}  # each is read, and its weights are hashed, only once

    def ended(entry: ArmRun) -> str | None:
        record = found[id(entry)] if id(entry) in found else earlier(entry)
        untrained = is_untrained(record, options.retry)
        return None if record is None or untrained else record.status

    for data in dict.fromkeys(entry.run.data for entry in runs) if any(found.values()) else ():
        check_unchanged(found.values(), data, current_content(data))
    elapsed = time.perf_counter() - options.started
    print(plan(runs, jobs, device_to_measure(options), ended, recipe_runs, elapsed, numerics))
    if faster := [f"--{name}" for name in ("stack", "fast") if getattr(options, name)]:
        print(f"the time is that without {' and '.join(faster)}; the runs may be faster with it")
    elif options.device == "cuda" and chooses_stack(options):
        print("the time is that of runs that are trained one at a time; small models are faster, since they are put together")
    if options.until_decided and looks:
        print(f"this is the first part; seeds are added at the looks {', '.join(map(str, looks.schedule))}")


def device_to_measure(options: argparse.Namespace) -> str:
    """Return the device on which `--dry-run` measures a few training steps: the one that the command line names. With
    `--on ray`, this machine may lack the GPU that the cluster has. The device is then the CPU, and a note says so. `options`
    are the command-line arguments.

    Raises ValueError if the device is unknown, or if it is not there and the runs would be trained on this machine.
    """
    try:
        check_device(options.device)
    except ValueError:
        if options.on != "ray" or options.device not in ("cuda", "mps"):
            raise
        print(f"note: this machine has no {options.device} device, so the time is measured on its CPU", file=sys.stderr)
        return "cpu"
    return options.device


EXCLUDED = {  # pairs of options that cannot be used together: why, and what to do
    ("--shard", "--until-decided"): "a look needs the results of all shards; choose the number of seeds in the recipe",
    ("--shard", "--log"): "several shards cannot send results at once; send them afterwards with `smallvit report --log`",
    ("--smoke", "--until-decided"): "a smoke test has no verdicts; remove one of them",
    ("--only seed=...", "--until-decided"): "looks choose the seeds; remove one of them",
    ("--only pass=...", "--until-decided"): "looks choose the passes; remove one of them",
    ("--on slurm", "--shard"): "each job trains a shard of its own; remove --shard",
    ("--on slurm", "--until-decided"): "a look needs the results of all jobs; choose the number of seeds in the recipe",
    ("--on slurm", "--log"): "several jobs cannot send results at once; send them afterwards with `smallvit report --log`",
    ("--on slurm", "--smoke"): "a smoke test takes seconds; run it without --on slurm",
    ("--on slurm", "--fast"): "nodes of different kinds would choose differently; give --stack and --numerics instead",
    ("--on ray", "--shard"): "Ray divides the runs itself; remove --shard",
    ("--on ray", "--gpus"): "Ray chooses the GPUs; use --device cuda instead",
    ("--on ray", "--fast"): "machines of different kinds would choose differently; give --stack and --numerics instead",
}
NEEDED = {  # options that have a meaning only with another one: one of these
    "--max-seeds": ("--until-decided",),
    "--per-gpu": ("--gpus", "--on slurm", "--on ray"),
    "--sbatch": ("--on slurm",),
    "--address": ("--on ray",),
}


def check_options(options: argparse.Namespace):
    """Raise ValueError if the options of the command line contradict each other, as the tables `EXCLUDED` and `NEEDED` say, if
    `--gpus` is empty, or if `--per-gpu` does not suit where and on which device the runs are trained.
    """
    values = {"--" + name.replace("_", "-"): value for name, value in vars(options).items() if value}
    seeds = [text.partition("=")[0] for text in options.only if text.startswith(("seed=", "pass="))]
    given = {*values, f"--on {options.on}", *(f"--only {name}=..." for name in seeds)}
    check_excluded(given, EXCLUDED)
    for flag, others in NEEDED.items():
        if flag in given and given.isdisjoint(others):
            raise ValueError(f"{flag} {values[flag]} needs {' or '.join(others)}; add it, or remove {flag}")
    if options.gpus == "":
        raise ValueError("--gpus is empty; expected all, or numbers such as 0,2; or leave it out")
    if options.per_gpu and options.on == "ray" and options.device not in ("cuda", "auto"):
        raise ValueError(f"--per-gpu is about GPUs, and the runs have --device {options.device}; add --device cuda")
    if isinstance(options.per_gpu, float) and options.on != "ray":
        raise ValueError(
            f"--per-gpu is {options.per_gpu}, the share of a GPU, which only --on ray understands; expected the number of "
            "worker processes on each GPU"
        )


def shard_runs(runs: Sequence[ArmRun], recipe_runs: Sequence[ArmRun], options: argparse.Namespace) -> list[ArmRun]:
    """Return the runs of the shard (one of several independent parts) that the option `--shard` names, and print how many they
    are. `runs` are the runs of all shards, `recipe_runs` are all runs of the recipe, and `options` are the command-line
    arguments.

    The division depends on `--only` and `--stack`, which must be the same for all shards, and not on what has finished.
    """
    index, count = options.shard
    shards = divide(runs, recipe_runs, count, options.stack or 1)
    chosen, used = shards[index - 1], sum(map(bool, shards))
    few = f"; only {used} shards have runs: the other runs need one of theirs first" * (used < min(count, len(runs)))
    print(f"shard {index}/{count}: {len(chosen)} of {len(runs)} runs{few}", file=sys.stderr)
    return chosen


def end_shard(records: Sequence[Record], options: argparse.Namespace) -> int:
    """Print which runs of a shard (one of several independent parts of a recipe) did not finish, and how to write the report,
    which needs all shards. Return the exit status: 0 if all runs of the shard have finished or their external weights are
    unavailable, 75 if another process trains the others or the same command trains them again, otherwise 1. `records` are the
    results of the runs, and `options` are the command-line arguments.
    """
    if records:
        status(records)
    command = shlex.join(["smallvit", "report", options.recipe, "--out", options.out]) + scale_option(options.scale_steps)
    advice = "a smoke test of a shard has no report" if options.smoke else f"when all shards have ended: {command}"
    print("shard {}/{} has ended; {}".format(*options.shard, advice))
    left = {record.status for record in records} - {"finished", "unavailable"}
    return BUSY if left and left <= {"missing", *RETRIED} else int(bool(left))


def chooses_stack(options: argparse.Namespace) -> bool:
    """Return True if `stack_to_use` chooses how many runs are trained as one model. With `--fast` this is measured instead, and
    the runs of a shard or of another machine are put together only on request. `options` are the command-line arguments.
    """
    return options.on == "here" and not (options.fast or options.shard)


def trainer(
    options: argparse.Namespace, out: Path, recipe: Path, recipe_runs: Sequence[ArmRun], given: dict, gpus: Sequence[str]
) -> Callable[[Sequence[ArmRun], Sequence[ArmRun]], None]:
    """Return a function that trains runs as the command line says. The function has two parameters: the runs to train, and all
    runs of the recipe, which may contain earlier runs that they need. `options` are the command-line arguments, `out` is the
    results folder, `recipe` is the path of the recipe file, `recipe_runs` are its runs, `given` has the values of
    `--numerics`, such as the precision, and `gpus` is the GPU of each worker process, with the option `--gpus`.

    With `--fast`, a few training steps of `recipe_runs` are measured here, once, to find the fastest settings for this machine.
    The options in `given` are not changed.
    """
    numerics, stack, engine = Numerics(**given), options.stack or 1, None
    if chooses_stack(options):
        stack = stack_to_use(options.stack, recipe_runs, options.device, numerics)
    if options.on == "ray":
        engine = partial(RayEngine, address=options.address or "auto", per_gpu=options.per_gpu or 1, jobs=options.jobs)
    if options.fast:
        if options.stack:
            given = given | {"stack": options.stack}
        print("fast: measuring a few steps with each kernel, precision and stack size", file=sys.stderr)
        jobs = len(gpus) or options.jobs
        numerics, stack, reason = autotune(recipe_runs, out / recipe.stem, jobs, options.device, given)
        print(f"fast: {reason}")

    def train(runs: Sequence[ArmRun], recipe_runs: Sequence[ArmRun]):
        with followed_by(options.log, runs, out, recipe.stem):
            launch(
                runs,
                out,
                recipe=recipe.stem,
                recipe_runs=recipe_runs,
                source=recipe,
                jobs=options.jobs,
                gpus=gpus,
                engine=engine,
                stack=stack,
                device=options.device,
                numerics=numerics,
                retry=options.retry,
                fail_fast=options.fail_fast,
            )

    return train


def followed_by(tracker: str | None, runs: Sequence[ArmRun], out: Path, recipe: str) -> AbstractContextManager:
    """Return a context manager inside which a process of its own sends the learning curves and results of runs to a tracker,
    such as "tensorboard". If `tracker` is None, nothing is sent. `runs` are the runs, `out` is the folder of all results, and
    `recipe` is the name of the recipe file.
    """
    if tracker is None:
        return nullcontext()
    return closing(TrackerProcess(tracker, out / recipe, recipe, runs_to_send(runs, out, recipe)))
