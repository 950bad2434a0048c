"""smallvit run: train the runs of a recipe and write its report."""

import argparse
import shutil
import sys
import time
from contextlib import suppress

from smallvit.ablation import ArmRun
from smallvit.launch import launch
from smallvit.launch.autotune import autotune
from smallvit.launch.local import check_device
from smallvit.launch.plan import plan, tokens_left
from smallvit.launch.scheduler import Damaged, recall
from smallvit.numerics import Numerics, parse_numerics
from smallvit.recipe import find_recipe, load_recipe, only, smoke_test_runs

from .report import collect, removed_comparisons, scaled, status, write_report


def main(options: argparse.Namespace) -> int:
    """Train the runs of a recipe file (a Python file that lists the runs of a comparison), and write the report. `options` are
    the arguments of the command line. Return the exit status: 0 if all runs have finished, otherwise 1.

    Runs that have finished earlier are not trained again.
    """
    check_device(options.device)
    path = find_recipe(options.recipe)
    module = load_recipe(path)
    recipe_runs, out = scaled(module.RUNS, options)
    runs = only(recipe_runs, options.only)
    if options.smoke:
        runs = recipe_runs = smoke_test_runs(runs)
        out = out / "smoke"
    given = parse_numerics(options.numerics)

    def finished(entry: ArmRun) -> bool:
        record = None
        with suppress(Damaged):
            record = recall(entry, out, path.stem)
        return not options.smoke and record is not None and record.finished

    if options.dry_run:
        print(plan(runs, options.jobs, options.device, finished, recipe_runs, time.perf_counter() - options.started))
        return 0
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be created ({error}); choose another folder") from error
    if options.smoke:
        shutil.rmtree(out / path.stem, ignore_errors=True)  # a smoke test trains again each time
    for arm, tokens in tokens_left(runs).items():
        print(f"{arm}: {tokens}")
    numerics, stack = Numerics(**given), options.stack or 1
    if options.fast:
        given |= {"stack": options.stack} if options.stack else {}
        print("fast: measuring a few steps with each kernel, precision and stack size", file=sys.stderr)
        numerics, stack, reason = autotune(recipe_runs, out / path.stem, options.jobs, options.device, given)
        print(f"fast: {reason}")
    launch(
        runs,
        out,
        recipe=path.stem,
        recipe_runs=recipe_runs,
        source=path,
        jobs=options.jobs,
        stack=stack,
        device=options.device,
        numerics=numerics,
        retry=options.retry,
        fail_fast=options.fail_fast,
    )
    records, earlier = collect(recipe_runs, out, path.stem), removed_comparisons(recipe_runs, out, path.stem)
    target = out / path.stem / "report"
    write_report(path, module, records, target, options.scale_steps, earlier, show_warnings=not options.smoke)
    if options.smoke:
        print("smoke test: every arm was trained for at most two steps to see that it works; the numbers mean nothing")
    requested = {(entry.arm, entry.labels, entry.seed) for entry in runs}
    return status([record for record in records if (record.arm, record.labels, record.seed) in requested])
