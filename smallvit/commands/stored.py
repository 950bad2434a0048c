"""What the folder of a recipe's runs says beyond the runs that the recipe lists: removed comparisons, other seeds, looks."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from smallvit.ablation import ArmRun, by_cell
from smallvit.looks import Looks, first_seeds, read_looks
from smallvit.passes import passes_of
from smallvit.record import RECORD, Record, read_record, settings_of
from smallvit.run import fingerprint
from smallvit.verdicts.compare import schedule


def stored_records(out: Path, recipe: str) -> list[Record]:
    """Return the records (saved results) of all finished runs in the folder of a recipe, also of runs that the recipe no longer
    lists. `out` is the folder of all results, and `recipe` is the name of the recipe file. Damaged records, and records of
    another version of smallvit, are left out.
    """
    folders = [path.parent for path in sorted((out / recipe).rglob(RECORD))]
    return [record for record in finished_records(folders) if record.recipe == recipe]


def finished_records(folders: Iterable[Path]) -> list[Record]:
    """Return the records (saved results) of the finished runs in `folders`, in this order. Folders without a record, damaged
    records, and records of another version of smallvit are left out.
    """
    found = []
    for folder in folders:
        try:
            record = read_record(folder)
        except (OSError, ValueError):
            continue
        if record and record.finished:
            found.append(record)
    return found


def by_settings(runs: Iterable[ArmRun], records: Sequence[Record]) -> dict[str, list[ArmRun]]:
    """Return which runs of a recipe have the settings of a stored run, as a dict from the fingerprint (hash of the settings) to
    a list of runs. The random seed does not count: the dict also has the fingerprint of each run with the seed of each stored
    run. `runs` are the runs of the recipe, and `records` are the results of the stored ones.
    """
    seeds = {record.seed for record in records}
    found: dict[str, list[ArmRun]] = {}
    for entry in {entry.cell: entry for entry in runs}.values():
        for run in {entry.seed: entry.run, **{seed: entry.run.at_seed(seed) for seed in seeds}}.values():
            found.setdefault(fingerprint(run), []).append(entry)
    return found


def removed_comparisons(runs: Sequence[ArmRun], records: Sequence[Record]) -> int:
    """Return how many comparisons were run and are no longer in the recipe. They still count in the Holm correction of
    p-values: otherwise a comparison could be deleted after its result was seen. `runs` are the current runs of the recipe, and
    `records` are the results of all stored runs.

    A comparison is identified by the settings of its arm (variant), with the number of labels and of training steps, but
    without the random seed and without the name of the arm. It counts as removed if no technique of the recipe has these
    settings now, also if the arm became a reference. It counts as another comparison if the arm was compared with another
    control before: then the stored runs of the earlier control have other settings than those of the present one.
    """
    current, removed = by_settings((entry for entry in runs if entry.role == "technique"), records), set()
    baselines = {entry.arm for entry in runs if entry.role == "baseline"}
    for record in records:
        if record.role != "technique":
            continue
        entries = current.get(record.fingerprint, [])
        controls = {entry.baseline for entry in entries if entry.baseline} or baselines
        if not entries:
            removed.add((settings_of(record.run, "seed"), ""))
        elif record.baseline and record.baseline not in controls:
            now = by_settings((e for e in runs if e.arm in controls and e.labels == record.labels), records)
            before = {r.fingerprint for r in records if (r.arm, r.labels) == (record.baseline, record.labels)}
            if before.isdisjoint(now):  # otherwise the control was only renamed
                removed.add((settings_of(record.run, "seed"), record.baseline))
    return len(removed)


def known_looks(runs: Sequence[ArmRun], out: Path, recipe: str) -> Looks | None:
    """Return the planned numbers of seeds at which the comparison is tested (each test is a look), and the present number of
    seeds of each arm (variant), as a `Looks` object. Return None if there are no looks. `runs` are the runs of the recipe,
    `out` is the folder of all results, and `recipe` is the name of the recipe file.

    They are those of the file `looks.json`. If it is gone, they are those of the stored records: a comparison that was tested
    several times stays such a comparison.
    """
    if looks := read_looks(out / recipe):
        return looks
    records = stored_records(out, recipe)
    if not any(record.looks for record in records):
        return None
    current = by_settings(runs, records)
    with_looks = [record for record in records if record.looks and record.fingerprint in current]
    if not with_looks:
        return None
    planned, seeds = schedule(with_looks), {}
    for record in with_looks:
        for entry in current[record.fingerprint]:
            seeds.setdefault(entry.cell, set()).update(passes_of([record.seed], entry.run.folds))
    return Looks(planned, {cell: max(planned[0], len(each)) for cell, each in seeds.items()})


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
    current = by_settings((entry for entry in runs if entry.role in ("baseline", "technique")), records)
    found: dict[tuple, set[int]] = {}
    for record in records:
        for entry in current.get(record.fingerprint, []):
            if record.seed not in listed[entry.cell]:
                found.setdefault(entry.cell, set()).update(passes_of([record.seed], entry.run.folds))
    return {cell: sorted(seeds) for cell, seeds in found.items()}
