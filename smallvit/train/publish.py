"""Publishing a record: of several processes that have trained one run by mistake, the first one that finishes counts.

The order is: write the weights under a temporary name, give the record its name, move the weights to their place. The name of a
record can be given only once (`link_new`), also on a file system that several machines share and that has no locks. A kill in
between loses nothing: whoever reads the record next moves the weights (`damaged_weights`).
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from smallvit import record as records
from smallvit.record import Record
from smallvit.storage import failures_named, flush_to_disk, link_new, remove_leftovers, temporary

PATIENCE = 30.0  # seconds in which a living process replaces a record; then it has been killed


def publish(folder: Path, record: Record, weights: Path | None = None) -> Record:
    """Write the record (results) of a run to its folder, and move its weights to their place. Return the record that is now in
    the folder. `weights` is the file of the weights under a temporary name.

    If the folder already has the record of a finished run, that record stays and is returned, and the weights are not moved. A
    record of a run that did not finish, such as a failed one, is replaced.

    Raises NotWritten if the files cannot be written, and ValueError if there is a damaged record.
    """
    target = folder / records.RECORD
    new = temporary(target)
    try:
        with failures_named(target):
            new.write_text(records.to_json(record, indent=1) + "\n", encoding="utf-8")
            flush_to_disk(new)
        winner = first(new, target, record)
        if weights is not None and winner is record:
            with suppress(FileNotFoundError):  # somebody who read the record has moved them already
                os.replace(weights, folder / records.WEIGHTS)
        return winner
    finally:
        with suppress(OSError):
            new.unlink()


def tidy(folder: Path):
    """Delete what a killed process has left beside the record of a finished run in `folder`: the checkpoint and temporary
    files. A folder that is read-only keeps them.
    """
    with suppress(OSError):
        (folder / records.CHECKPOINT).unlink(missing_ok=True)
        remove_leftovers(folder)


def first(new: Path, target: Path, record: Record) -> Record:
    """Give the file `new`, which holds `record`, the name `target`, unless a finished run has this name. Return the record that
    has the name now.
    """
    while not named(new, target):
        there = records.read_record(target.parent)
        if there is not None and there.finished:
            return there
        if there is not None and (replaced := replace_unfinished(new, target, record)):
            return replaced
    return record


def named(new: Path, path: Path) -> bool:
    """Give the file `new` the name `path` if it is free, and return whether it was. Raise NotWritten if that fails."""
    with failures_named(path):
        return link_new(new, path)


def replace_unfinished(new: Path, target: Path, record: Record) -> Record | None:
    """Replace the record of a run that did not finish, at `target`, by the file `new`, which holds `record`. Return the record
    that is there afterwards, or None if another process was replacing it.

    Only one process at a time may do this: the one that could give its file a second name, the claim. It looks once more before
    it replaces the record, so a finished run is never replaced. A claim that does not go away is that of a killed process.
    """
    claim = target.with_name(f".{target.name}.claim")
    if not named(new, claim):
        wait_for(claim)
        return None
    there = records.read_record(target.parent)
    if there is not None and there.finished:
        claim.unlink()
        return there
    os.replace(claim, target)
    return record


def wait_for(claim: Path):
    """Wait until another process has removed the file `claim`. Remove it if this takes longer than a living process needs."""
    deadline = time.monotonic() + PATIENCE
    with suppress(FileNotFoundError):
        number = claim.stat().st_ino
        while claim.stat().st_ino == number:
            if time.monotonic() > deadline:
                claim.unlink()
            time.sleep(0.02)
