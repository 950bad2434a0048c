"""The costs of an arm: medians over its runs, pretraining included, and how far they are from those of its baseline."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from smallvit.record import Record

FORWARD = ("tokens", "macs_sd", "ms", "speedup")  # numbers of the evaluator `cost` for a forward pass
TOLERANCE = 0.05  # costs closer than this to the baseline's count as equal


def costs_of(records: Sequence[Record]) -> dict[str, float | None]:
    """Return the costs of an arm (variant), such as parameters and training seconds, as a dict by name. `records` are the
    results of its runs. Each cost is the median over these runs, and it includes pretraining.

    The number of extra labels is the maximum over the runs. A cost that does not apply is None, such as the training time of an
    untrained model.

    In a cross-validation, the costs of a pass are means over its folds: those of one model. MACs are those measured on test
    images if the evaluator `cost` has counted them. Tuning is counted by itself: the number of trials and their seconds.
    """

    def paid(r: Record, name: str) -> float | None:
        own = (r.test or {}).get("macs", r.macs) if name == "macs" else getattr(r, name)
        return None if own is None else own + (r.pretraining or {}).get(name, 0)

    spent = {name: known_median(paid(r, name) for r in records) for name in ("params", "macs", "images_seen", "seconds")}
    tuning = {
        "trials": known_median((r.tuning or {}).get("trials") for r in records),
        "tuning_seconds": known_median((r.tuning or {}).get("seconds") for r in records),
    }
    return spent | {"extra_labels": max(map(extra_labels, records), default=None)} | tuning


def extra_labels(record: Record) -> int:
    """Return how many labels a run used in addition to the labels of its training images. `record` holds the results of the
    run. Extra labels are validation labels for choices such as early stopping, labels of the trials that tuned its settings,
    and labels that an earlier run, which it needs, had beyond its own.
    """
    earlier = record.pretraining or {}
    before = earlier.get("labels") or 0
    chosen = max((record.chosen_on_val or {}).get("labels", 0), earlier.get("chosen_labels") or 0)
    tuned = (record.tuning or {}).get("labels") or 0
    return chosen + tuned + max(0, before - (record.labels or before))


def unequal(costs: dict[str, float | None], baseline_costs: dict[str, float | None]) -> dict[str, float]:
    """Return the relative difference of each cost from the same cost of the baseline, as a dict by name: 0.2 means 20% more,
    and -0.2 means 20% less. Differences of at most 5% are left out.
    """
    excess = {}
    for name, value in costs.items():
        other = baseline_costs[name]
        if value is not None and other is not None and abs(value - other) > TOLERANCE * other:
            excess[name] = value / other - 1 if other else math.inf
    return excess


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None. If all values are None, return None."""
    known = [value for value in values if value is not None]
    return median(known) if known else None
