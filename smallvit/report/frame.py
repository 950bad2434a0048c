"""The results of a recipe's runs as a pandas DataFrame."""

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallvit.recipe import find_recipe
from smallvit.record import RECORD, TYPES, Record, read_record, read_records
from smallvit.verdicts.comparison import condition_of

if TYPE_CHECKING:
    from pandas import DataFrame

PACKED = ("correct", "contributions", "test_index", "traceback")  # long texts, which are left out


def records(recipe: str | Path, out: str | Path = "runs") -> "DataFrame":
    """Return the results of all runs of a recipe as a pandas DataFrame, with one row for each run. `recipe` is the name or the
    path of a recipe file. The rows are the runs in the folder `out/<recipe>`, and the committed records in the `.jsonl` file
    beside the recipe. A run that both have is taken from the folder.

        frame = smallvit.records("quickstart")
        frame.groupby(["labels", "arm"])["result"].agg(["mean", "std"])

    The columns are the fields of `Record` that hold a number or a short text, such as `arm`, `labels`, `seed`, `status` and
    `score`. `result` is the number by which the run is judged. `test_<name>` and `val_<name>` are the numbers measured on
    the test and validation images. `tuned` says whether the settings were tuned. `source` is "runs" or "committed". A value
    that does not exist is missing. Scores are not in percent.

    Raises   ValueError if there is no such recipe, if it has no records, if a file is damaged, or if pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ValueError("records needs pandas, which is not installed; install it with: pip install pandas") from error
    path = find_recipe(str(recipe))
    found: dict[tuple, dict[str, Any]] = {}
    for record, source in [*committed(path), *stored(Path(out) / path.stem, path.stem)]:
        found[record.arm, condition_of(record), record.seed] = flat(record) | {"source": source}
    if not found:
        raise ValueError(
            f"the recipe {path.stem} has no records, neither in {Path(out) / path.stem} nor in {path.with_suffix('.jsonl')}; "
            f"start its runs with: smallvit run {recipe}"
        )
    return pandas.DataFrame(list(found.values()))


def committed(path: Path) -> list[tuple[Record, str]]:
    """Return the records (results of a run) in the `.jsonl` file beside the recipe file `path`, as pairs with the text
    "committed".
    """
    file = path.with_suffix(".jsonl")
    return [(record, "committed") for record in read_records(file)] if file.exists() else []


def stored(folder: Path, recipe: str) -> list[tuple[Record, str]]:
    """Return the records (results of a run) of the recipe `recipe` in its folder of runs, as pairs with the text "runs". Runs
    that other runs need, such as pretraining, are included.
    """
    each = [read_record(path.parent) for path in sorted(folder.rglob(RECORD))]
    return [(record, "runs") for record in each if record is not None and record.recipe == recipe]


def flat(record: Record) -> dict[str, Any]:
    """Return the fields of a record (results of a run) that hold a number or a short text, as a dict. The measured numbers have
    their own keys, such as `test_accuracy`.
    """
    short = [f.name for f in fields(Record) if f.name not in PACKED and not {dict, list} & set(TYPES[f.name])]
    values = {name: getattr(record, name) for name in short} | {"tuned": record.tuning is not None}
    values["result"] = (record.test or {}).get(record.score)
    for part in ("test", "val"):
        values |= {f"{part}_{name}": number for name, number in (getattr(record, part) or {}).items()}
    return values
