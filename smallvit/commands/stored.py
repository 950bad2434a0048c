"""What the folder of a recipe's runs says beyond the runs that the recipe lists: removed comparisons, other seeds, looks."""

import math
import os
import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from smallvit.ablation import ArmRun, by_cell
from smallvit.looks import Looks, first_seeds, read_looks
from smallvit.passes import passes_of
from smallvit.recipe import by_settings
from smallvit.record import Record, read_record, recorded_folders, settings_of, without_copies
from smallvit.verdicts.compare import schedule
from smallvit.verdicts.comparison import Condition, condition_of


def check_out(out: Path, create: bool = False):
    """Raise ValueError if the folder of all results, `out`, is a file or lies below one. With `create`, create the folder if it
    is not there, and also raise ValueError if this is not possible.
    """
    nearest = next(place for place in (out, *out.absolute().parents) if os.path.exists(place))
    try:
        (out if create else nearest).mkdir(parents=True, exist_ok=True)  # an error if it is a file
    except OSError as error:
        raise ValueError(f"--out {out} cannot be created ({error}); choose another folder") from error


def stored_records(out: Path, recipe: str) -> list[Record]:
    """Return the records (saved results) of all finished runs in the folder of a recipe, also of runs that the recipe no longer
    lists, and also if they were trained when recipe and folder had another name. `out` is the folder of all results, and
    `recipe` is the name of the recipe file. Damaged records, and records of another version of smallvit, are left out.
    """
    return [record for _, record in finished_records(recorded_folders(out / recipe))]


def finished_records(folders: Iterable[Path]) -> list[tuple[Path, Record]]:
    """Return the finished runs in `folders`, in this order, as pairs of the folder and the record (saved results). Folders
    without a record, damaged records, and records of another version of smallvit are left out.
    """
    found = []
    for folder in folders:
        try:
            record = read_record(folder)
        except (OSError, ValueError):
            continue
        if record and record.finished:
            found.append((folder, record))
    return found


def with_other_settings(records: Sequence[Record], runs: Sequence[ArmRun]) -> int:
    """Return how many records (results of runs) have settings that a recipe does not list now, whatever their seed. `runs` are
    the runs of the recipe.
    """
    known = by_settings(runs, seeds_in(records))
    return sum(record.fingerprint not in known for record in records)


def seeds_in(records: Iterable[Record]) -> set[int]:
    """Return the random seeds of records (results of runs)."""
    return {record.seed for record in records}


def removed_comparisons(runs: Sequence[ArmRun], records: Sequence[Record], reads: Sequence[str] = ()) -> int:
    """Return how many comparisons were run and are no longer in the recipe. They still count in the Holm correction of
    p-values: otherwise a comparison could be deleted after its result was seen. `runs` are the current runs of the recipe,
    `records` are the results of all stored runs, and `reads` are the fingerprints of runs in the order in which they were
    scored on test images.

    A comparison is identified by the settings of its arm (variant), with the number of labels and of training steps, but
    without the random seed and without the name of the arm. It counts as removed if no technique of the recipe has these
    settings now, also if the arm became a reference. A technique of the recipe has one more comparison for each control that it
    was compared with before and that has other settings than the present one: it had another name, or the technique was scored
    before the present control was.
    """
    current, removed = by_settings((entry for entry in runs if entry.role == "technique"), seeds_in(records)), set()
    baselines = {entry.arm for entry in runs if entry.role == "baseline"}
    stored: dict[tuple[Condition, str], list[Record]] = {}  # the records of each arm; "" stands for the baselines
    for record in records:
        for arm in {record.arm, *[""] * (record.role == "baseline")}:
            stored.setdefault((condition_of(record), arm), []).append(record)
    place = {run: number for number, run in reversed([*enumerate(reads)])}  # of the first read

    def scored_at(records: Iterable[Record]) -> float:
        return min((place.get(record.fingerprint, math.inf) for record in records), default=math.inf)

    @cache
    def settings_now(controls: frozenset[str], labels: int | None) -> Container[str]:
        return by_settings((entry for entry in runs if entry.arm in controls and entry.labels == labels), seeds_in(records))

    for record in records:
        if record.role != "technique":
            continue
        entries, settings = current.get(record.fingerprint, []), settings_of(record.run, "seed")
        if not entries:
            removed.add((settings, ""))
            continue
        controls = frozenset({entry.baseline for entry in entries if entry.baseline} or baselines)
        now, known = settings_now(controls, record.labels), stored.get((condition_of(record), record.baseline), [])
        earlier = [control for control in known if control.fingerprint not in now]
        has_other_name = record.baseline and record.baseline not in controls
        if has_other_name or scored_at([record]) < scored_at(control for control in known if control.fingerprint in now):
            removed |= {(settings, settings_of(control.run, "seed")) for control in earlier}
    return len(removed)


def with_present_names(records: Sequence[Record], runs: Sequence[ArmRun]) -> list[Record]:
    """Return records (results) with the arm, role and baseline that the recipe now gives runs of these settings in the same
    condition, as a list. A record stays as it is if the recipe has no such run. `runs` are the runs of the recipe. So an arm
    that was renamed keeps its committed records.
    """
    current, found = by_settings(runs, seeds_in(records)), []
    for record in records:
        now = [e for e in current.get(record.fingerprint, []) if e.cell[1:] == tuple(condition_of(record))]
        entry = next((e for e in now if e.arm == record.arm), now[0] if now else None)
        found.append(replace(record, arm=entry.arm, role=entry.role, baseline=entry.baseline) if entry else record)
    return found


def known_looks(runs: Sequence[ArmRun], out: Path, recipe: str, committed: Sequence[Record] = ()) -> Looks | None:
    """Return the planned numbers of seeds at which the comparison is tested (each test is a look), and the present number of
    seeds of each arm (variant), as a `Looks` object. Return None if there are no looks. `runs` are the runs of the recipe,
    `out` is the folder of all results, and `recipe` is the name of the recipe file. `committed` are further records (results).

    They are those of the file `looks.json` and of the records: a comparison that was tested several times stays such a
    comparison if the file is gone, and an arm with a new name has as many seeds as before. The runs of the first look may have
    been trained before the looks were planned. So all runs of an arm count, if one of them was trained for a look.

    Prints a note if several folders hold a record of the same run: each command that reads the records begins here.
    """
    stored, note = without_copies(finished_records(recorded_folders(out / recipe)))
    if note:
        print(f"note: {note}", file=sys.stderr)
    file, records = read_looks(out / recipe), [*(record for _, record in stored), *committed]
    current = by_settings(runs, seeds_in(records)) if any(record.looks for record in records) else {}
    records = [record for record in records if record.fingerprint in current]
    with_looks = [record for record in records if record.looks]
    if not file and not with_looks:
        return None
    planned, seeds = file.schedule if file else schedule(with_looks), {}
    for record in records:
        for entry in current[record.fingerprint]:
            seeds.setdefault(entry.cell, set()).update(passes_of([record.seed], entry.run.folds))
    written = dict(file.seeds) if file else {}
    looked = {entry.cell for record in with_looks for entry in current[record.fingerprint]}
    return Looks(planned, written | {cell: max(written.get(cell, planned[0]), len(seeds[cell])) for cell in looked})


def unused_seeds(runs: Sequence[ArmRun], records: Sequence[Record]) -> dict[tuple, list[int]]:
    """Return the random seeds of stored runs that the recipe does not list, though it lists the same settings with other seeds.
    The result is a dict from the cell of a run (its arm and condition, see `ArmRun.cell`) to a list of seeds. `runs` are the
    runs of the recipe, and `records` are the results of the stored runs. Who chooses seeds by their results gets wrong
    verdicts, so a report must name these runs. If seeds are added at planned numbers of seeds (looks), the next seeds up to the
    last look do not count: they will be used. In a cross-validation, the result has numbers of passes in place of seeds.
    """
    cells = by_cell(runs)
    listed = {cell: {entry.seed for entry in entries} for cell, entries in cells.items()}
    for cell, entries in cells.items():
        if entries[0].looks:
            listed[cell].update(first_seeds(entries, entries[0].looks[-1]))
    current = by_settings((entry for entry in runs if entry.role in ("baseline", "technique")), seeds_in(records))
    found: dict[tuple, set[int]] = {}
    for record in records:
        for entry in current.get(record.fingerprint, []):
            if record.seed not in listed[entry.cell]:
                found.setdefault(entry.cell, set()).update(passes_of([record.seed], entry.run.folds))
    return {cell: sorted(seeds) for cell, seeds in found.items()}
