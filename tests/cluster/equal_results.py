"""Comparing the results of a recipe that was interrupted with those of one that was not."""

from collections import Counter
from pathlib import Path

from smallvit.record import CHECKPOINT, RECORD, WEIGHTS, Record, read_record


def weights_in(out: Path) -> dict[str, bytes]:
    """Return a dict from the path of each weights file below a folder to its bytes."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob(WEIGHTS))}


def records_in(out: Path) -> list[Record]:
    """Return the records below a folder, in the order of their paths."""
    return [record for path in sorted(out.rglob(RECORD)) if (record := read_record(path.parent))]


def outcome(record: Record) -> tuple:
    """Return what must not depend on where a run was trained, and how often it was interrupted."""
    return record.arm, record.seed, record.fingerprint, record.status, record.weights_sha256, record.test, record.val, record.correct


def check_equal(out: Path, whole: Path) -> dict[str, int]:
    """Check that the runs in the folder `out` are those in `whole`, where nothing was interrupted, each once and bitwise equal, and
    that no temporary files are left. Return how many records there are, and how many were lost and doubled.
    """
    found, expected = records_in(out), records_in(whole)
    times = Counter((record.arm, record.seed) for record in found)
    lost = len({(record.arm, record.seed) for record in expected} - times.keys())
    doubled = sum(times.values()) - len(times)
    assert (lost, doubled) == (0, 0)
    assert [outcome(record) for record in found] == [outcome(record) for record in expected]
    assert weights_in(out) == weights_in(whole) and len(weights_in(out)) == len(found)
    left = [path for path in out.rglob("*") if path.name == CHECKPOINT or path.name.endswith((".new", ".damaged"))]
    assert not left, left
    return {"records": len(found), "lost": lost, "doubled": doubled, "weights bitwise equal": len(weights_in(out))}
