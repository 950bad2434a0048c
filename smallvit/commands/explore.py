"""smallvit explore: try arms out on validation images, with seeds of their own, and keep a list of what was tried."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean

from smallvit.ablation import ArmRun, by_cell
from smallvit.launch import launch
from smallvit.launch.autotune import stack_to_use
from smallvit.launch.gpus import cuda_for_auto
from smallvit.launch.launcher import check_device
from smallvit.launch.progress import error_lines
from smallvit.launch.tune import may_succeed
from smallvit.looks import seed_list
from smallvit.numerics import Numerics, parse_numerics
from smallvit.passes import passes_of, run_count, seeds_of
from smallvit.recipe import find_recipe, load_recipe, only
from smallvit.record import Record, code
from smallvit.run import fingerprint
from smallvit.trials import add_trial, trials, trials_file
from smallvit.verdicts.score import score_named
from smallvit.words import how_many

from .stored import check_out

SEEDS = 1_000  # an exploration seed is a seed of the recipe plus this number
MOST_SEEDS = 32  # `--until-decided` may add seeds up to this number


def main(options: argparse.Namespace) -> int:
    """Try out arms (variants) of a recipe file: train them and print their scores on validation images. The random seeds are
    others than those of the comparison, so that its results stay independent of what is tried here. `options` are the arguments
    of the command line. Return the exit status: 0 if all runs have finished, otherwise 1.

    A recipe file is a Python file that lists the runs of a comparison.

    The test images are not read. Each setting of an arm that was tried is written to `R.trials.jsonl`.

    Raises ValueError for an arm without validation images.
    """
    device, numerics = cuda_for_auto(options.device), Numerics(**parse_numerics(options.numerics))
    check_device(device)
    check_out(Path(options.out))
    path = find_recipe(options.recipe)
    module = load_recipe(path)
    if wrong := next((text for text in options.only if text.startswith(("seed=", "pass="))), None):
        raise ValueError(f"--only {wrong[:5]}... cannot be used here: smallvit explore uses seeds of its own; use --seeds N")
    chosen = only(module.RUNS, options.only) if options.only else [e for e in module.RUNS if e.role != "reference"]
    runs = exploration_runs(chosen, module.RUNS, options.seeds)
    if without := next((entry.arm for entry in runs if entry.run.val == 0), None):
        raise ValueError(f"{without!r} has val=0, so there are no images to score it on; set val in the recipe, such as val=40")
    if any(entry.run.folds for entry in runs):
        print(
            "note: in a cross-validation, validation images of one fold are test images of other folds. Choosing by them makes "
            "the test scores a little too high; use test=0.2 without folds to explore without this",
            file=sys.stderr,
        )
    out = Path(options.out) / "explore"
    check_out(out, create=True)
    trials(path, Path(options.out) / path.stem)  # a damaged list is found before the training
    records = launch(
        runs,
        out,
        recipe=path.stem,
        recipe_runs=exploration_runs(module.RUNS, module.RUNS, options.seeds),
        source=path,
        jobs=options.jobs,
        stack=stack_to_use(options.stack, runs, device, numerics),
        device=device,
        numerics=numerics,
        retry=may_succeed,
        validation_only=True,
    )
    found = {(record.fingerprint, record.arm): record for record in records if record.finished}
    left = 0
    for entries in by_cell(runs).values():
        done = [record for e in entries if (record := found.get((fingerprint(e.run), e.arm)))]
        left += len(entries) - len(done)
        name = f"{entries[0].arm}, {entries[0].condition}"
        if not done:
            print(f"{name}: no run has finished")
            continue
        note = write_trial(path, Path(options.out) / path.stem, entries[0], done)
        score = score_named(done[0].score or "", bool(done[0].lower_is_better))
        mean = fmean(record.val_result for record in done)
        text = f"validation {score.title} {score.number(mean)}{'%' * score.percent}"
        count, folds = f" ({how_many(len(done), 'seed')})", entries[0].run.folds
        count = f", {run_count([record.seed for record in done], folds)}" if folds else count
        print(f"{name}: {text}{count}{note}")
    counts = trials(path, Path(options.out) / path.stem, module.RUNS)
    arms = dict.fromkeys(entry.arm for entry in runs)
    print("trials of each arm so far: " + ", ".join(f"{arm} {counts.get(arm, 0)}" for arm in arms))
    for line in error_lines(record for record in records if not record.finished):
        print(line, file=sys.stderr)
    if infinite := sum(record.status == "failed" and "FloatingPointError: " in str(record.error) for record in records):
        print(f"{infinite} of {len(runs)} runs had an infinite loss and are not trained again; lower their learning rate")
    if left > infinite:
        print(f"{left - infinite} of {len(runs)} runs have not finished; start the command again to train them")
    return int(left > 0)


def exploration_runs(chosen: Sequence[ArmRun], runs: Sequence[ArmRun], count: int) -> list[ArmRun]:
    """Return the runs to train when arms (variants) are tried out: each arm in each condition (number of labels, training
    length, tuned or not) with `count` random seeds. The comparison itself does not use these seeds. `chosen` are the runs of
    the selected arms, and `runs` are all runs of the recipe file.

    In a cross-validation, `count` is the number of complete passes over all folds.

    Raises ValueError if the recipe itself uses these seeds.
    """
    folds = runs[0].run.folds
    declared = passes_of((entry.seed for entry in runs), folds)
    seeds = [SEEDS + seed for seed in seed_list(declared, count)]
    if taken := sorted(set(seeds) & set(seed_list(declared, max(len(declared), MOST_SEEDS)))):
        raise ValueError(f"the recipe uses the seeds {taken}, with which smallvit explore would train; use smaller seeds")
    first = {entry.cell: entry for entry in reversed(chosen)}
    return [
        replace(first[cell], run=first[cell].run.at_seed(seed)) for seed in seeds_of(seeds, folds) for cell in reversed(first)
    ]


def write_trial(recipe: Path, folder: Path, entry: ArmRun, records: Sequence[Record]) -> str:
    """Add one trial (settings of an arm, with their mean validation score) to the list of trials beside the recipe file.
    `recipe` is the path of this file, `folder` is the folder of its runs, `entry` is one run with these settings, and `records`
    are the results of all its seeds. Return a note for the terminal, for example that the list contains this trial already, or
    an empty text.

    If the folder of the recipe file cannot be written, the list lies in `folder`.
    """
    trial = {
        "arm": entry.arm,
        "labels": entry.labels,
        "length": entry.length,
        "tuned": entry.tuning is not None,
        "fingerprint": fingerprint(entry.run.at_seed(0)),
        "seeds": len(records),
        "score": records[0].score,
        "val": fmean(record.val_result for record in records),
        "date": date.today().isoformat(),
        "commit": code()["commit"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = trials_file(recipe)
    if not all(os.access(place, os.W_OK) for place in (path.parent, path) if place.exists()):
        path = folder / path.name
    added = add_trial(path, trial)
    return ("" if added else "; this trial is in the list already") + f"; the list is {path}" * (path.parent == folder)
