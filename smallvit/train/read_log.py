"""The file that lists all reads of the test images, over all processes and days. It counts how many settings each arm tried.

Each line is one read: the hash of the test images, the arm, the number of labels, the seed, the fingerprint of the run, and the
fingerprint of its settings, in which the seed and the number of labels do not count. Lines are only added. A kill while a line
is written leaves a part of it, which does not count: its run is scored again.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from smallvit.run import Run, fingerprint, without_seed_and_labels
from smallvit.shapes import shape_problem
from smallvit.storage import failures_named, locked, parse_json, read_bounded, write_atomic

READS = "test_reads.jsonl"  # the name of the file, in the folder of the runs of a recipe
MOST_BYTES = 2**28  # of the file
READ = {name: "text" for name in ("data", "arm", "fingerprint", "settings")} | {"labels": "count?", "seed": "count", ...: "any"}


def log_test_read(path: Path, run: Run, arm: str, test_sha256: str) -> int:
    """Append a line to the file at `path`, which says that a run is scored on the test images (a read). Return how many
    settings of its arm (variant) have been scored on them, because trying many settings makes the best test score too
    optimistic. `run` is the run, `arm` the name of its arm, and `test_sha256` the hash of the test images.

    The number counts different settings, this one included. Several processes may use the file at the same time.

    Raises ValueError if the file is damaged or cannot be written.
    """
    read = {
        "data": test_sha256,
        "arm": arm,
        "labels": run.labels,
        "seed": run.seed,
        "fingerprint": fingerprint(run),
        "settings": fingerprint(without_seed_and_labels(run)),
    }
    with locked(path.with_name(f".{path.name}.lock"), timeout=-1):
        reads = all_reads(path)
        append(path, json.dumps(read).encode())
    return len({each["settings"] for each in [*reads, read] if (each["data"], each["arm"]) == (test_sha256, arm)})


def append(path: Path, line: bytes):
    """Add a line to the file of reads at `path`, and create the file if there is none. If the last line has no end, the file is
    written again, without a line that is not complete.
    """
    lines = lines_in(path)
    if path.exists() and path.stat().st_size != sum(len(each) + 1 for each in lines):
        write_atomic(path, lambda new: new.write_bytes(b"".join(each + b"\n" for each in [*lines, line])))
        return
    with failures_named(path), open(path, "ab") as file:
        file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def lines_in(path: Path) -> list[bytes]:
    """Return the lines of a file, as a list. The list is empty if there is no file. A last line without an end counts only if
    it is complete.
    """
    try:
        lines = read_bounded(path, MOST_BYTES).splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if lines and not lines[-1].endswith(b"\n"):
        try:
            parse_json(lines[-1])
        except ValueError:
            del lines[-1]
    return [line.rstrip(b"\r\n") for line in lines]


def scored_settings(reads: Iterable[dict], runs: Iterable[tuple[str, str]]) -> list[int | None]:
    """Return how many different settings of an arm (variant) have been scored until now on the test images of a run, as a list
    with one number for each run. It is None if the run was not read. `reads` are all reads of the test images, as `all_reads`
    returns them, and `runs` has pairs: the fingerprint of a run, and the present name of its arm.

    Settings that were scored after the run count as well, because the first ones that were tried may have been the best. If the
    run was scored under another name of the arm, the settings under this name count, too, unless it is the name of another arm
    that shares the run.
    """
    places: dict[str, set[tuple[str, str]]] = {}
    settings: dict[tuple[str, str], set[str]] = {}
    of_run: dict[str, set[str]] = {}
    for read in reads:
        places.setdefault(read["fingerprint"], set()).add((read["data"], read["arm"]))
        settings.setdefault((read["data"], read["arm"]), set()).add(read["settings"])
        of_run.setdefault(read["fingerprint"], set()).add(read["settings"])
    arms: dict[str, set[str]] = {}
    for run_hash, arm in (runs := [*runs]):
        arms.setdefault(run_hash, set()).add(arm)
    found: list[int | None] = []
    for run_hash, arm in runs:
        known = places.get(run_hash, set())
        names = {(data, arm) for data, _ in known} | {(data, name) for data, name in known if name not in arms[run_hash]}
        scored = [of_run.get(run_hash, set()), *(settings.get(name, set()) for name in names)]
        found.append(len(set().union(*scored)) or None)
    return found


def all_reads(path: Path) -> list[dict]:
    """Return the lines of the file that lists which runs were scored on the test images, as a list of dicts. `path` is the
    file. The list is empty if there is no file. Raises ValueError if a line is damaged.
    """
    return [parse_read(line, f"{path}, line {number}") for number, line in enumerate(lines_in(path), 1)]


def parse_read(line: bytes, source: str) -> dict:
    """Return a dict from one line of the file that lists which runs were scored on the test images. The dict has the hash of
    the images, the arm (variant), the number of labels, the seed and two hashes of the settings. `line` is the line, and
    `source` says in error messages where it stands. Raises ValueError if it is damaged.
    """
    try:
        read = parse_json(line)
        if wrong := shape_problem(read, READ, "a read"):
            raise ValueError(wrong)
        return read
    except ValueError as error:
        raise ValueError(f"{source} is damaged; expected a line as smallvit wrote it; delete this line") from error
