"""smallvit run: train what a recipe compares, and report it."""

import argparse
import shutil
import sys

from smallvit.launch import launch
from smallvit.launch.autotune import autotune
from smallvit.launch.plan import plan, tokens_left
from smallvit.launch.scheduler import folder
from smallvit.numerics import Numerics, parse_numerics
from smallvit.recipe import find_recipe, load_recipe, only, shortened
from smallvit.train.fit import finished

from .report import gathered, of_that_length, status, write_report


def main(chosen: argparse.Namespace) -> int:
    path = find_recipe(chosen.recipe)
    module = load_recipe(path)
    planned, out = of_that_length(module.RUNS, chosen)
    runs = only(planned, chosen.only)
    if chosen.smoke:
        runs = planned = shortened(runs)
        out = out / "smoke"
    given = parse_numerics(chosen.numerics)
    if chosen.dry_run:
        print(
            plan(runs, chosen.jobs, chosen.device, lambda run: not chosen.smoke and finished(run, folder(run, out, path.stem)))
        )
        return 0
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made ({error}); choose another folder") from error
    if chosen.smoke:
        shutil.rmtree(out / path.stem, ignore_errors=True)  # to see that all works means to try it now
    for arm, tokens in tokens_left(runs).items():
        print(f"{arm}: {tokens}")
    numerics, stack = Numerics(**given), chosen.stack or 1
    if chosen.fast:
        given |= {"stack": chosen.stack} if chosen.stack else {}
        print("fast: a few steps are tried in every way", file=sys.stderr)
        numerics, stack, why = autotune(planned, out / path.stem, chosen.jobs, chosen.device, given)
        print(f"fast: {why}")
    launch(
        runs,
        out,
        recipe=path.stem,
        source=path,
        jobs=chosen.jobs,
        stack=stack,
        device=chosen.device,
        numerics=numerics,
        retry=chosen.retry,
        fail_fast=chosen.fail_fast,
    )
    records = gathered(planned, out, path.stem)
    write_report(path, module, records, out / path.stem / "report", chosen.scale_steps)
    if chosen.smoke:
        print("smoke: every arm was trained for two steps to see that it works; the numbers mean nothing")
    asked = {(run.arm, run.labels, run.seed) for run in runs}
    return status([r for r in records if (r["arm"], r["labels"], r["seed"]) in asked], len(runs))
