"""The results of a recipe's runs as a pandas DataFrame."""

import warnings
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallvit.recipe import by_settings, find_recipe, load_recipe
from smallvit.record import TYPES, Record, read_record, read_records, recorded_folders, without_copies
from smallvit.run import fingerprint
from smallvit.verdicts.comparison import condition_of
from smallvit.words import how_many

from .page import command_text

if TYPE_CHECKING:
    from pandas import DataFrame

PACKED = ("correct", "contributions", "test_index", "traceback")  # long texts, which are left out


def records(recipe: str | Path, out: str | Path = "runs") -> "DataFrame":
    """Return the results of all runs of a recipe as a pandas DataFrame, with one row for each run. `recipe` is the name or the
    path of a recipe file. The rows are the runs in the folder `out/<recipe>`, and the committed records in the `.jsonl` file
    beside the recipe. A run that both have is taken from the folder.

    If there are several runs of an arm in one condition with one seed, because the recipe was changed, there is a row only for
    the run with the settings of the recipe as it is now.

        frame = smallvit.records("quickstart")
        now = frame[frame["current"]]
        now.groupby(["labels", "arm"], dropna=False)["result"].agg(["mean", "std"])

    The columns are the fields of `Record` that hold a number or a short text, such as `arm`, `labels`, `seed`, `status` and
    `score`. `result` is the number by which the run is judged. `test_<name>` and `val_<name>` are the numbers measured on
    the test and validation images. `tuned` says whether the settings were tuned. `source` is "runs" or "committed". `current`
    is True for runs with the settings of the recipe as it is now, and False for runs of an earlier version; seeds may differ. A
    value that does not exist is missing, such as `labels` if all images have labels: `dropna=False` keeps these rows. Scores
    are not in percent.

    In a cross-validation, a row is one fold of one pass, and the columns `pass` and `fold` say which one; without folds, they
    are missing. Folds may have different numbers of test images, so the score of a pass is a mean that is weighted by them. A
    report shows the mean and the standard deviation over the complete passes, here of 5 folds:

        share = now["result"] * now["test_images"] / now["pool_images"]
        passes = share.groupby([now["labels"], now["arm"], now["pass"]], dropna=False).sum(min_count=5)
        passes.groupby(["labels", "arm"], dropna=False).agg(["mean", "std"])

    If the recipe has several training lengths or tuned settings, add `length` or `tuned` to the columns that form the groups.

    Warns if there are rows of an earlier version of the recipe, and if several folders hold a record of the same run.

    Raises   ValueError if there is no such recipe, if it cannot be loaded or has no records, if a file is damaged, or if pandas
             is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ValueError("records needs pandas, which is not installed; install it with: pip install pandas") from error
    path = find_recipe(str(recipe))
    stored, note = stored_records(Path(out).expanduser() / path.stem)
    before, now = [(record, "committed") for record in committed(path)], [(record, "runs") for record in stored]
    if note:
        warnings.warn(note, stacklevel=2)
    runs = load_recipe(path, old_options=True).RUNS
    seeds = {record.seed for record, _ in before + now}
    current, entries = fingerprints(runs, seeds), by_settings(runs, seeds)
    # a later row replaces an earlier one: a stored run replaces a committed record only if it is a run of the present recipe
    outdated = [row for row in now + before if row[0].fingerprint not in current]
    present = [row for row in before + now if row[0].fingerprint in current]
    found: dict[tuple, dict[str, Any]] = {}
    names = ("arm", "role", "baseline", "length", "tuning")  # as the recipe has them now; two lengths may share a run
    for each, source in outdated + present:
        renamed = [replace(each, **{name: getattr(e, name) for name in names}) for e in entries.get(each.fingerprint, [])]
        for record in renamed or [each]:
            row = flat(record) | {"recipe": path.stem, "source": source, "current": record.fingerprint in current}
            found[record.arm, condition_of(record), record.seed] = row
    if not found:
        raise ValueError(
            f"the recipe {path.stem} has no records, neither in {Path(out) / path.stem} nor in {path.with_suffix('.jsonl')}; "
            f"start its runs with: {command_text('run', str(recipe), Path(out))}"
        )
    if earlier := sum(not row["current"] for row in found.values()):
        rows_are = how_many(earlier, "row is of a run", "rows are of runs")
        warnings.warn(
            f"{rows_are} with other settings than {path.name} has now; to leave them out, use frame[frame['current']]",
            stacklevel=2,
        )
    return pandas.DataFrame(list(found.values()))


def fingerprints(runs: Iterable[Any], seeds: Iterable[int]) -> set[str]:
    """Return the fingerprints (hashes of the settings) of the runs of a recipe with each of the given seeds, and of the earlier
    runs that they need, such as pretraining. `runs` are all runs of the recipe, as `ArmRun` objects.
    """
    each = {entry.cell: entry.run for entry in runs}.values()
    left, found = [run.at_seed(seed) for run in each for seed in seeds], set()
    while left:
        run = left.pop()
        found.add(fingerprint(run))
        left += run.dependencies.values()
    return found


def committed(path: Path) -> list[Record]:
    """Return the records (results of a run) in the `.jsonl` file beside the recipe file `path`."""
    file = path.with_suffix(".jsonl")
    return read_records(file) if file.exists() else []


def stored_records(folder: Path) -> tuple[list[Record], str]:
    """Return the records (results of a run) of a recipe in its folder of runs, and a note if several folders hold a record of
    the same run, of which one is used. Runs that other runs need, such as pretraining, are included, and runs that were trained
    when the recipe had another name.
    """
    found = [(place, record) for place in recorded_folders(folder) if (record := read_record(place)) is not None]
    kept, note = without_copies(found)
    return [record for _, record in kept], note


def flat(record: Record) -> dict[str, Any]:
    """Return the fields of a record (results of a run) that hold a number or a short text, as a dict. The measured numbers have
    their own keys, such as `test_accuracy`.
    """
    short = [f.name for f in fields(Record) if f.name not in PACKED and not {dict, list} & set(TYPES[f.name])]
    values = {name: getattr(record, name) for name in short} | {"tuned": record.tuning is not None}
    values["result"] = (record.test or {}).get(record.score)
    values["pass"], values["fold"] = divmod(record.seed, record.folds) if record.folds else (None, None)
    for part in ("test", "val"):
        values |= {f"{part}_{name}": number for name, number in (getattr(record, part) or {}).items()}
    return values
