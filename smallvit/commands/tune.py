"""smallvit tune: choose the settings of each arm on validation images, with equally many trials for all arms."""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from smallvit.ablation import ArmRun
from smallvit.launch.autotune import stack_to_use
from smallvit.launch.gpus import cuda_for_auto
from smallvit.launch.launcher import check_device
from smallvit.launch.tune import Candidates, candidates, run_count, tune_arms
from smallvit.numerics import Numerics, parse_numerics
from smallvit.recipe import find_recipe, load_recipe, only
from smallvit.record import format_labels
from smallvit.report.page import command_text
from smallvit.run import fingerprint
from smallvit.storage import locked
from smallvit.trials import add_trial, read_trials, trials_file
from smallvit.tuning import (
    Tune,
    TunedArm,
    apply,
    one_per_cell,
    read,
    runs_to_tune,
    same_options,
    tune_command,
    tuned_file,
    untuned_cells,
    write,
)
from smallvit.words import how_many, join_names

from .stored import check_out

LARGE_LOSS = 0.002  # the page recommends more validation images or seeds above this expected loss


def main(options: argparse.Namespace) -> int:
    """Choose hyperparameters for the arms (variants) of a recipe file by training several trials of each and comparing them on
    validation images. Write them to the file `R.tuned.json` beside the recipe file `R.py`. `options` are the arguments of the
    command line. Return the exit status 0.

    A recipe file is a Python file that lists the runs of a comparison.

    Arms that this file already contains with unchanged settings are not tuned again. Those that another process writes to it
    in the meantime stay in it.
    """
    device, numerics = cuda_for_auto(options.device), Numerics(**parse_numerics(options.numerics))
    check_device(device)
    check_out(Path(options.out))
    path = find_recipe(options.recipe)
    module = load_recipe(path, tuned=False)
    common = runs_to_tune(module.RUNS)
    tune: Tune = common[0].tune
    selected = one_per_cell(only(common, options.only))
    todo, left_out = candidates(common, selected)
    file = tuned_file(path)
    if file.exists() and not same_options(read(file)[0], tune):
        print(f"note: Tune has changed since {file.name} was written; all arms are tuned again", file=sys.stderr)
    known, suggested = still_valid(file, common, tune, todo), todo
    todo = [arm for arm in todo if (arm.entry.arm, arm.entry.labels) not in known]
    left_out = [arm for arm in left_out if not (before := known.get((arm.arm, arm.labels))) or not before.settings]
    if options.dry_run:
        print(plan(todo, left_out, tune, len(known)))
        return 0
    check_out(Path(options.out), create=True)
    lock = file.with_name(f".{file.stem}.lock")
    with locked(lock, timeout=-1):  # an error now, not after the trials, if nothing can be written here
        read_trials(trials_file(path))
    for arm in left_out:
        print(f"{arm.arm}, {format_labels(arm.labels)}: {arm.note}")
    tuned = tune_arms(
        todo,
        options.out,
        recipe=path.stem,
        source=path,
        jobs=options.jobs,
        stack=stack_to_use(options.stack, [arm.entry for arm in todo], device, numerics),
        device=device,
        numerics=numerics,
    )
    with locked(lock, timeout=-1):
        untuned, tuned = ({(arm.arm, arm.labels): arm for arm in arms} for arms in (left_out, tuned))
        found = untuned | known | still_valid(file, common, tune, suggested) | tuned
        in_order = [found[cell] for cell in one_per_cell(common) if cell in found]
        before = read(file)[1] if file.exists() else []
        write(file, tune, in_order)
    keep_trials(path, before, in_order)
    print(table(in_order))
    left = untuned_text([cell for cell in one_per_cell(common) if cell not in found], options.recipe, options.out)
    run = command_text("run", options.recipe, Path(options.out))
    print(f"written: {file}; {left or f'{run} now trains the tuned runs, too'}")
    apply(common, file)
    return 0


def keep_trials(recipe: Path, before: Sequence[TunedArm], now: Sequence[TunedArm]):
    """Add trials that new ones have replaced to the list of all tried settings, so that they still count. `recipe` is the
    recipe file, and `before` and `now` are the earlier and the present results. Trials without a score are left out: their loss
    was infinite, or they have the settings of an earlier trial.
    """

    def keyed(arms: Sequence[TunedArm]) -> dict[str, tuple[TunedArm, list]]:
        return {
            json.dumps([arm.fingerprint, arm.labels, trial["settings"]], sort_keys=True): (arm, trial["scores"])
            for arm in arms
            for trial in arm.trials
            if trial["scores"]
        }

    present = keyed(now)
    for settings, (arm, scores) in keyed(before).items():
        if settings not in present and (known := [score for score in scores if score is not None]):
            key = hashlib.sha256(settings.encode()).hexdigest()[:16]
            trial = {"arm": arm.arm, "labels": arm.labels, "fingerprint": key, "seeds": len(known), "val": fmean(known)}
            add_trial(trials_file(recipe), trial | {"note": "by smallvit tune"})


def untuned_text(cells: Sequence[tuple[str, int | None]], recipe: str, out: str = "runs") -> str:
    """Return a text that names arms (variants) that have not been tuned, and the command that tunes them. `cells` are pairs
    (arm, number of labels), `recipe` is the name or path of the recipe, and `out` is the folder of all results. Without `cells`
    the text is empty.
    """
    names = [f"{arm} at {format_labels(labels)}" for arm, labels in cells]
    if not names:
        return ""
    return f"not tuned yet: {join_names(names)}; to tune the rest: {command_text('tune', recipe, Path(out))}"


def untuned_note(runs: Sequence[ArmRun], recipe: str, out: str = "runs") -> str:
    """Return a note about arms (variants) that have not been tuned although others have, and the command that tunes them.
    `runs` are all runs of the recipe, `recipe` is its name or path, and `out` is the folder of all results. If all arms have
    been tuned, or none, the text is empty.
    """
    tuned = any(entry.tuning is not None for entry in runs)
    return "note: " + text if tuned and (text := untuned_text(untuned_cells(runs), recipe, out)) else ""


def old_options_note(runs: Sequence[ArmRun], recipe: Path) -> str:
    """Return a warning that the settings of the tuned runs were chosen with other options of `Tune` than the recipe has now.
    `runs` are all runs of the recipe, and `recipe` is its path. Without tuned runs, or if the options are the same, the text is
    empty.
    """
    file, tunes = tuned_file(recipe), [entry.tune for entry in runs if entry.tuning is not None]
    if not tunes or same_options(read(file)[0], tunes[0]):
        return ""
    return (
        f"warning: the tuned settings in {file.name} were chosen with other options of Tune, such as other ranges, than the "
        f"recipe has now; {tune_command(file)} chooses them again"
    )


def still_valid(
    path: Path, common: Sequence[ArmRun], tune: Tune, todo: Sequence[Candidates]
) -> dict[tuple[str, int | None], TunedArm]:
    """Return the arms (variants) that were tuned before and need no new tuning, as a dict from (arm, number of labels) to the
    `TunedArm`. `path` is the file with earlier results, `common` are the untuned runs of the recipe, which must be unchanged,
    `tune` is its `Tune` object (ranges, numbers of trials and seeds), and `todo` are `Candidates` objects with the trials that
    would be trained.

    The ranges, the settings of the arm in the recipe and the suggested trials must be the same as before.
    """
    if not path.exists():
        return {}
    plain, arms = read(path)
    if not same_options(plain, tune):
        return {}
    current = {cell: fingerprint(entry.run.at_seed(0)) for cell, entry in one_per_cell(common).items()}
    settings = {(arm.entry.arm, arm.entry.labels): arm.settings for arm in todo}
    return {
        cell: arm
        for arm in arms
        if current.get(cell := (arm.arm, arm.labels)) == arm.fingerprint
        and (cell not in settings or [trial["settings"] for trial in arm.trials] == settings[cell])
    }


def plan(todo: Sequence[Candidates], left_out: Sequence[TunedArm], tune: Tune, known: int) -> str:
    """Return a text about the planned trials (settings to try) of each arm (variant). `todo` are `Candidates` objects with the
    trials, and `left_out` are the arms without trials. `tune` is the `Tune` object of the recipe: ranges, number of trials and
    seeds. `known` is the number of arms that are tuned already.
    """
    lines = [f"{arm.arm}, {format_labels(arm.labels)}: {arm.note}" for arm in left_out]
    for arm in todo:
        runs = run_count(tune, arm.different)
        lines.append(f"{arm.place}: {tune.trials} trials, {how_many(runs, 'run')} of {arm.runs[0].steps} steps")
        lines += [f"    {format_settings(settings)}" for settings in arm.settings]
    total = sum(run_count(tune, arm.different) for arm in todo)
    text = f"{how_many(total, 'run')} with up to {how_many(tune.seeds, 'seed')}, scored on {tune.val:,} validation images"
    return "\n".join([*lines, text + f"; {how_many(known, 'arm is', 'arms are')} tuned already" * bool(known)])


def format_settings(settings: dict) -> str:
    """Return chosen values as text: `lr=0.002, depth=4`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def table(arms: Sequence[TunedArm]) -> str:
    """Return a table of the tuned arms (variants) as text: chosen values, validation accuracy in percent, and expected loss in
    percentage points. This loss is the accuracy that may be lost because noisy scores hide the best trial. `arms` are
    `TunedArm` objects. Warnings follow, where a value lies at the edge of its range or of what was tried, or the loss is large.
    """
    header = ("arm", "labels", "chosen", "validation", "expected loss")
    rows, warnings = [], []
    for arm in (arm for arm in arms if arm.trials):
        loss = "unknown" if arm.loss is None else f"{100 * arm.loss:.2f}"
        labels = "all" if arm.labels is None else f"{arm.labels:,}"
        rows.append((arm.arm, labels, format_settings(arm.settings), f"{100 * (arm.accuracy or 0):.2f}", loss))
        place = f"{arm.arm}, {format_labels(arm.labels)}"
        if arm.edge:
            names = " and ".join(f"{name}={arm.settings[name]}" for name in arm.edge)
            text = "at the edge of the range, or the smallest or largest value that was tried"
            warnings.append(f"warning: {place}: {names} {text}; a wider range may be better")
        if arm.loss is not None and arm.loss > LARGE_LOSS:
            warnings.append(f"warning: {place}: {loss} points may be lost by tuning noise; more seeds or images lower this")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (header, *rows)]
    cost = [sum(arm.cost[name] for arm in arms) for name in ("runs", "seconds")]
    return "\n".join([*lines, f"{how_many(cost[0], 'run')}, {how_many(round(cost[1]), 'second')} of training", *warnings])
