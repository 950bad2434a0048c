"""`smallvit run R --until-decided`: look at the verdicts after a few seeds, and add seeds to the arms without a verdict."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from smallvit.ablation import ArmRun, by_cell, only_baseline
from smallvit.looks import Looks, choose_schedule, first_seeds, with_looks, write_looks
from smallvit.passes import passes_of
from smallvit.recipe import only
from smallvit.record import Record, read_records
from smallvit.run import fingerprint
from smallvit.tuning import FIRST_SEED
from smallvit.verdicts.compare import compare, next_looks, schedule
from smallvit.verdicts.comparison import Condition, Row
from smallvit.verdicts.sequential import ADDED_LOOKS, LOOKS
from smallvit.words import units

from .report import collect

Train = Callable[[Sequence[ArmRun], Sequence[ArmRun]], None]


def begin(runs: Sequence[ArmRun], looks: Looks | None, options: argparse.Namespace, out: Path, recipe: Path) -> Looks:
    """Return the schedule of looks (numbers of seeds at which a comparison is tested) and the present number of seeds of each
    arm (variant), as a `Looks` object. `runs` are the runs of the recipe file, `looks` is the object that an earlier command
    saved, or None. `options` are the command-line arguments, `out` is the folder of all results, and `recipe` is the path of
    the recipe file.

    The saved object is the content of `looks.json` in the folder of the runs, or that of the records if the file is gone. If it
    is None, `first_schedule` chooses the schedule.

    In a cross-validation, `--max-seeds` and the looks count passes over all folds.

    Raises ValueError if `--max-seeds` is below the first look or the present number of seeds of a selected arm, or above the
    last look, if `--only` leaves out the control of a selected arm, and if the added seeds would be those of the trials of
    `smallvit tune`.
    """
    if looks is None:
        looks = Looks(first_schedule(runs, out, recipe), {})
    first, several = looks.schedule[0], units(runs[0].run.folds)
    if options.max_seeds is not None and options.max_seeds < first:
        raise ValueError(f"--max-seeds is {options.max_seeds}; expected at least {first}, the {several} of the first look")
    if options.max_seeds is not None and options.max_seeds > LOOKS[-1]:
        raise ValueError(f"--max-seeds is {options.max_seeds}; expected at most {LOOKS[-1]}, the {several} of the last look")
    selected = {entry.cell for entry in only(runs, options.only)}
    most = max(looks.at(cell) for cell in selected)
    if options.max_seeds is not None and options.max_seeds < most:
        raise ValueError(
            f"--max-seeds is {options.max_seeds}, but an earlier command has chosen {most} {several} for an arm; expected at "
            f"least {most}; to see what there is now, use smallvit report"
        )
    baseline = only_baseline(runs)
    controls = {entry.arm: entry.baseline or baseline for entry in runs}
    for arm, *condition in selected:
        control = controls[arm]
        if control and (control, *condition) not in selected and any(e.cell == (control, *condition) for e in runs):
            raise ValueError(
                f"--only leaves out {control!r}, the baseline of {arm!r}, without which --until-decided has no verdict; add it"
            )
    trials = {FIRST_SEED + seed for entry in runs if entry.tune is not None for seed in range(entry.tune.seeds)}
    added = {seed for entries in by_cell(runs).values() for seed in first_seeds(entries, looks.schedule[-1])}
    if trials & added:
        raise ValueError(
            f"--until-decided would use seed {min(trials & added)}, which the trials of smallvit tune use; expected a recipe "
            f"with seeds below {FIRST_SEED - looks.schedule[-1]}"
        )
    return looks


def first_schedule(runs: Sequence[ArmRun], out: Path, recipe: Path) -> tuple[int, ...]:
    """Return the numbers of seeds at which a new comparison will be tested (looks), as a tuple in rising order. They are fixed
    before seeds are added, because each additional test can find a difference by chance. `runs` are the runs of the recipe
    file, `out` is the folder of all results, and `recipe` is the path of the recipe file.

    If the committed records contain all these runs and a schedule, this schedule stays. If the results of the recipe's own
    seeds are known already, they count as the first look, unless there are too few seeds for a verdict. They are known if all
    runs have ended in the folder `out`, or if their records are committed.
    """
    published = recipe.with_suffix(".jsonl")
    current = {fingerprint(entry.run) for entry in runs}
    committed = read_records(published) if published.exists() else []
    if len({record.fingerprint for record in committed} & current) == len(current) and (known := schedule(committed)):
        return known
    seen = all_finished(collect(runs, out, recipe.stem), current) or all_finished(committed, current)
    cells, folds = by_cell(runs).values(), runs[0].run.folds
    declared = max(len(passes_of((entry.seed for entry in entries), folds)) for entries in cells)
    return choose_schedule(declared, seen, LOOKS, ADDED_LOOKS, bool(folds))


def all_finished(records: Iterable[Record], fingerprints: set[str]) -> bool:
    """Return whether each run of a comparison has ended. Runs that failed count, because they have been tried. `fingerprints`
    are the hashes of the settings of these runs, and `records` are their records (saved results). A record with the status
    "missing" means that the run is still to be trained.
    """
    return fingerprints <= {record.fingerprint for record in records if record.status != "missing"}


def train_until_decided(
    declared: Sequence[ArmRun],
    runs: Sequence[ArmRun],
    looks: Looks,
    train: Train,
    options: argparse.Namespace,
    out: Path,
    recipe: str,
) -> list[ArmRun]:
    """Train runs, test the comparison at each planned number of seeds (a look), and add seeds to arms (variants) without a
    verdict, until none needs more. Return all runs with the added seeds.

    The number of seeds of each arm is written to `looks.json` before its runs are trained, so the command can be started again
    after an interruption.

    declared  all runs that the recipe file lists, with its own seeds
    runs      the runs to train first, which may be a part of `declared` (`--only`); seeds are added to their arms and
              conditions only
    looks     the schedule, and the present number of seeds of each arm in each condition
    train     the function that trains runs; it is called with these runs and with all runs of the recipe
    options   the arguments of the command line
    out       the folder of all results; `recipe` is the name of the recipe file
    """
    cells = {entry.cell for entry in runs}
    while True:
        write_looks(out / recipe, looks)
        everything = with_looks(declared, looks)
        train([entry for entry in everything if entry.cell in cells], everything)
        records = collect(everything, out, recipe)
        needed = next_looks(records, looks.schedule, max_seeds=options.max_seeds)
        more = {cell: n for key, n in needed.items() if (cell := cell_of(*key)) in cells and n > looks.at(cell)}
        rows = [row for row in compare(records).rows if row.role == "technique"]
        for row in rows:
            if (cell := cell_of(row.condition, row.arm)) in cells:
                print(f"{row.arm}, {row.condition.title}: {progress(row, more.get(cell), options.max_seeds)}", flush=True)
        failed = options.fail_fast and any(record.status in ("failed", "interrupted") for record in records)
        if not more or failed:
            return everything
        looks = looks._replace(seeds={entry.cell: looks.at(entry.cell) for entry in everything} | more)


def cell_of(condition: Condition, arm: str) -> tuple:
    """Return a tuple that identifies an arm (variant) in one condition: name of the arm, number of labelled images, training
    length, and whether the settings were tuned. All seeds of this arm share the tuple. `condition` is a `Condition` object with
    the last three values, and `arm` is the name.

    The tuple is equal to `ArmRun.cell` of these runs.
    """
    return arm, condition.labels, condition.length, condition.tuned


def progress(row: Row, more: int | None, most: int | None) -> str:
    """Return a text about one arm (variant) after a test at a planned number of seeds (a look). It says whether the comparison
    is decided (better or worse than the baseline), and why it goes on or stops. `row` is the result of the arm, `more` is its
    number of seeds at the next look, or None, and `most` is the value of `--max-seeds`. P is corrected for the number of
    comparisons (Holm), as in the report.
    """
    taken = row.difference.looks if row.difference else ()
    p = f", P = {row.difference.p_holm:.3g}" if row.difference and row.difference.p_holm is not None else ""
    several = row.units
    start = f"after {taken[-1]} {several}" if taken else f"{len(row.seeds)} {several}"
    if row.stopped == "decided":
        return f"{start}, decided: {row.verdict}{p}"
    if row.stopped:
        return f"{start}, {row.stopped}: {row.reason}{p}"
    if more:
        return f"{start}, goes on to {more} {several}{p}"
    if row.next_look and most is not None and row.next_look > most:
        return f"{start}, {row.verdict}: stopped by --max-seeds {most}{p}"
    return f"{start}, {row.verdict}" + f": {row.reason}" * bool(row.reason) + p
