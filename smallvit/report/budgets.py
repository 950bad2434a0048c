"""What a cell of the table cost, and where that is not what its baseline cost."""

import math
from collections.abc import Iterable
from statistics import median

TOLERANCE = 0.05  # budgets closer than this to the baseline's count as equal


def unequal(own: dict[str, float | None], base: dict[str, float | None]) -> dict[str, float]:
    """Budget -> its relative excess over the baseline's, where they are not equal within `TOLERANCE`."""
    both = [name for name in own if own[name] is not None and base[name] is not None]
    apart = [name for name in both if abs(own[name] - base[name]) > TOLERANCE * base[name]]
    return {name: own[name] / base[name] - 1 if base[name] else math.inf for name in apart}


def budget(records: list[dict]) -> dict[str, float | None]:
    """Medians over the seeds, pretraining included; None for what does not apply: a kNN has no parameters.

    MACs are those of test images where the evaluator `cost` has counted them.
    """
    records = [r | {"macs": r["test"].get("macs", r.get("macs"))} for r in records]
    spent = {}
    for name in ("params", "macs", "images_seen", "seconds"):
        spent[name] = middle(r[name] + (r.get("pretraining") or {}).get(name, 0) for r in records if r.get(name) is not None)
    return spent | {"extra_labels": max(map(extra_labels, records), default=None)}


def extra_labels(record: dict) -> int:
    """Labels beyond those of its column that a run has had: to choose by, or to train what it starts from."""
    earlier = record.get("pretraining") or {}
    before = earlier.get("labels") or 0
    chosen = max((record.get("chosen_on_val") or {}).get("labels", 0), earlier.get("chosen_labels") or 0)
    return chosen + max(0, before - (record["labels"] or before))


def middle(values: Iterable[float | None]) -> float | None:
    """The median of the numbers that there are."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
