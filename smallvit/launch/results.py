"""The results of a run on disk: in which folder they lie, how they are read, and how a failure is recorded."""

import errno
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path

from smallvit import record as records
from smallvit.ablation import ArmRun
from smallvit.pretrained import Unavailable
from smallvit.record import Record
from smallvit.run import Run, fingerprint
from smallvit.shapes import printable
from smallvit.storage import NotWritten, locked, parse_json, read_bounded, rename_damaged
from smallvit.train.checkpoint import runs_in
from smallvit.train.failures import has_text, is_out_of_memory
from smallvit.train.fit import Tags, new_record
from smallvit.train.publish import publish

# What the system reports if a disk, a folder, the memory or a limit is the reason of an error, and not the run
ENVIRONMENT = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EAGAIN,
)  # fmt: skip


class Interrupted(RuntimeError):
    """Error for runs that were not trained to their end, which is not their fault. The same command tries them again."""


class Killed(Interrupted):
    """Error for runs whose worker process was killed, or whose machine was lost, while it trained them. It is not their fault,
    so they are tried once more. Its text is empty, or says more than that.
    """


class Damaged(ValueError):
    """Error for a run whose results or weights file is damaged, so that the run must be trained again. `files` are the files to
    rename. The first one is the damaged file. A weights file may also be intact and belong to another record, which was copied
    from another machine.
    """

    def __init__(self, *files: Path):
        foreign = f", or does not belong to the {records.RECORD} beside it" * (files[0].name == records.WEIGHTS)
        super().__init__(f"{files[0]} is damaged{foreign}; smallvit run trains this run again")
        self.files = files

    def set_aside(self):
        """Rename the damaged files to `*.damaged`, and print a note. After that, the run can be trained again. Files that
        another process has renamed at the same moment are left out. Raises NotWritten if the folder is read-only.
        """
        for path in self.files:
            rename_damaged(path)
        foreign = f"does not belong to the {records.RECORD} beside it, or " * (self.files[0].name == records.WEIGHTS)
        text = f"note: {self.files[0]} {foreign}is damaged; renamed to *.damaged, and the run is trained again"
        print(text, file=sys.stderr)


def folder(entry: ArmRun, out: str | Path, recipe: str) -> Path:
    """Return the path of the folder of a run: `out/recipe/labels/arm/seed-fingerprint`. It contains the number of labelled
    images, the arm (variant), the seed and a hash of the settings.

    Different runs have different folders, and the names are readable for people. If there is no record in this folder, but the
    same run has one under another name of the arm, the result is that folder: the arm was renamed. The same holds for a
    checkpoint, if the run was interrupted before the arm was renamed.

    The name of the arm is reduced to letters, digits, "+", "-" and "." (see `arm_folder`). Runs that are trained only because
    another run needs them lie in `dependencies`, because different comparisons may give them different names. If such a run was
    an arm before, it stays in the folder of this arm.
    """
    labels = "all" if entry.labels is None else str(entry.labels)
    arms, name = Path(out, recipe, labels), records.run_folder(entry.seed, fingerprint(entry.run))
    place = arms / records.arm_folder(entry.arm, entry.role) / name
    if (place / records.RECORD).exists():
        return place
    others = [path for path in sorted(arms.glob(f"*/{name}")) if path.parent.name != "dependencies"]
    if recorded := next((other for other in others if holds(other, entry.run)), None):
        return recorded
    return next((other for other in (place, *others) if fingerprint(entry.run) in checkpoint_runs(other)), place)


def folders(entries: Iterable[ArmRun], out: str | Path, recipe: str) -> list[Path]:
    """Return the folder of each of several runs, as `folder` gives it. Equal runs of several arms (variants) that have no
    record yet get one folder, that of the first arm, so that they are trained once.
    """
    first: dict[str, Path] = {}
    found = []
    for entry in entries:
        place = folder(entry, out, recipe)
        recorded = (place / records.RECORD).exists()
        found.append(place if recorded else first.setdefault(fingerprint(entry.run), place))
    return found


def holds(place: Path, run: Run) -> bool:
    """Return whether a folder has an intact record (saved results) of a run. `place` is the folder, and `run` is the run."""
    try:
        record = records.read_record(place)
    except (OSError, ValueError):
        return False
    return record is not None and record.fingerprint == fingerprint(run)


def checkpoint_runs(place: Path) -> list[str]:
    """Return the fingerprints of the runs in the checkpoint in a folder, or an empty list if there is none. There are several
    if they were trained together as one model.
    """
    try:
        return runs_in(place / records.CHECKPOINT)
    except OSError:
        return []


def tags(entry: ArmRun, recipe: str) -> Tags:
    """Return the place of a run in the comparison, as a `Tags` object: the recipe, the arm (variant), its role (such as
    "baseline" or "technique"), its baseline, the training length, the tuning, and the looks (numbers of seeds at which the
    comparison is tested). `entry` is the run, and `recipe` is the name of the recipe file.
    """
    looks = None if entry.looks is None else list(entry.looks)
    return Tags(recipe, entry.arm, entry.role, entry.baseline, entry.length, entry.tuning, looks)


def recall(entry: ArmRun, out: str | Path, recipe: str) -> Record | None:
    """Return the record (results) of a run from its folder, or None if there is none. `entry` is the run. `out` is the folder
    of all results, and `recipe` is the name of the recipe file.

    Arm, role and baseline are replaced by those that the recipe gives the run now. The looks (numbers of seeds at which the
    comparison is tested) of the stored record stay if the run has none.

    Raises Damaged if the record cannot be read, or if the weights of a finished run differ from the record. Raises ValueError
    if the folder holds another run, or a record of another version of smallvit.
    """
    place = folder(entry, out, recipe)
    try:
        record = records.read_record(place)
    except OSError as error:  # such as too many open files: the record may be intact
        raise ValueError(f"{place / records.RECORD} cannot be read: {error.strerror or error}; try again") from error
    except ValueError as error:
        if of_another_version(place / records.RECORD):
            raise
        raise Damaged(place / records.RECORD) from error
    if record is None:
        return None
    if record.fingerprint != fingerprint(entry.run):
        raise ValueError(f"{place} holds another run than {entry.arm!r}; move it away, or choose another --out folder")
    if record.finished and records.damaged_weights(place, record):
        raise Damaged(place / records.WEIGHTS, place / records.RECORD)
    return placed(record, tags(entry, recipe))


def placed(record: Record, current: Tags) -> Record:
    """Return a stored record (results) of a run with the place in the comparison that the recipe gives the run now. The looks
    (numbers of seeds at which the comparison is tested) of the record stay if the run has none.
    """
    return replace(record, **current._replace(looks=current.looks or record.looks)._asdict())


def of_another_version(path: Path) -> bool:
    """Return whether the record (saved results) of a run is intact, but has other fields, because another version of smallvit
    has written it. `path` is the file of the record. The result is False if the file is damaged.
    """
    try:
        plain = parse_json(read_bounded(path, records.MOST_BYTES))
    except (OSError, ValueError):
        return False
    if not isinstance(plain, dict) or not plain.keys() >= set(records.NEEDED) or records.is_damaged(plain):
        return False
    known = {records.CHECKSUM, *(field.name for field in fields(Record))}
    return plain.get("format", 1) != records.FORMAT or bool(plain.keys() - known)


def record_failure(entry: ArmRun, out: str | Path, recipe: str, error: BaseException) -> Record | None:
    """Save the record (settings and error) of a run that failed with `error`, and return this record. `entry` is the run, `out`
    is the folder of all results, and `recipe` is the name of the recipe file.

    The record contains the Python traceback of the worker process. Its status is "failed", or "interrupted" if the error was no
    fault of the run (see `is_interruption`), or "unavailable" if its external weights could not be downloaded.

    Returns None if another process trains the run. The record of a finished run is never replaced; it is returned.
    """
    from filelock import Timeout

    if isinstance(error, Timeout):
        return None
    reason, traceback = f"{type(error).__name__}: {error}", None
    if isinstance(error, Killed):
        reason = f"the worker process was killed twice (out of memory?){f': {error}' if str(error) else ''}"
    elif isinstance(error, Unavailable | Interrupted):
        reason = str(error)
    elif error.__cause__ is not None:  # concurrent.futures puts the traceback of the worker there, in triple quotes
        traceback = str(error.__cause__).strip().removeprefix('"""').removesuffix('"""').strip()
    status = "unavailable" if isinstance(error, Unavailable) else "interrupted" if is_interruption(error) else "failed"
    record = new_record(entry.run, tags(entry, recipe), status, reason, traceback)
    place = folder(entry, out, recipe)
    try:
        with locked(place / ".lock"):
            done = recall(entry, out, recipe)
            if done is not None and done.finished:
                return done
            return publish(place, record)
    except Timeout:
        return None
    except (OSError, ValueError) as problem:
        record.error = printable(f"{reason}; and {problem}")
    return record


def is_interruption(error: object) -> bool:
    """Return whether an error is no fault of the run that ended with it: a lost worker process, a full disk, a folder that is
    read-only or gone, too little memory, too many open files. Another try may succeed.
    """
    if isinstance(error, Interrupted | NotWritten):
        return True
    if isinstance(error, OSError):
        return error.errno in ENVIRONMENT
    return has_text(error, map(os.strerror, ENVIRONMENT)) or is_out_of_memory(error)


def blocked_by(earlier: Mapping[str, Record | None]) -> Exception | None:
    """Return the error that prevents the training of a run: an earlier run that it needs has failed. Return None if there is no
    such error. `earlier` is a dict with the records (results) of these earlier runs.

    Its keys are "init" and "teacher".

    The first dependency without success decides. None as its record means that another process trains it.
    """
    for field, record in earlier.items():
        if record is None:
            return None
        if not record.finished:
            kind = {"unavailable": Unavailable, "interrupted": Interrupted}.get(record.status, RuntimeError)
            return kind(f"its {'initialization' if field == 'init' else 'teacher'} failed: {record.error}")
    return None
