"""What frozen features already know: one table of every probe's number, and whether an arm beats random weights."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from smallvit.record import RANDOM, format_labels

from .statistics import spread


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Arm by arm the means over its seeds, fractions, of the probes in `names`; None for a probe that did not look at it."""

    labels: int | None
    names: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]


def probed(records: Sequence[dict]) -> list[Probed]:
    """One table for each number of labels at which a probe has looked at an arm that is not a reference."""
    done = [r for r in records if r["status"] == "finished"]
    out = []
    for labels in dict.fromkeys(r["labels"] for r in done):
        here = [r for r in done if r["labels"] == labels and probes([r])]
        if all(r["role"] == "reference" for r in here):
            continue
        names = probes(here)
        rows = {}
        for arm in dict.fromkeys(r["arm"] for r in here):
            found = [[r["test"][name] for r in here if r["arm"] == arm and name in r["test"]] for name in names]
            rows[arm] = tuple(fmean(values) if values else None for values in found)
        out.append(Probed(labels=labels, names=names, rows=rows))
    return out


def probes(records: Iterable[dict]) -> tuple[str, ...]:
    """The probes that looked at any of these: kNN by the number of its neighbours, then the others."""
    there = {name for r in records for name in r["test"]}
    near = sorted((name for name in there if re.fullmatch(r"knn_\d+", name)), key=lambda name: int(name[4:]))
    return (*near, *(name for name in ("linear_probe", "few_shot") if name in there))


def no_better_than_random(records: Sequence[dict]) -> list[str]:
    """Every arm, labels and probe whose interval over seeds, paired with that of random weights, does not lie above 0."""
    done = {(r["arm"], r["labels"], r["seed"]): r for r in records if r["status"] == "finished"}
    cells = dict.fromkeys((r["arm"], r["labels"]) for r in done.values() if r["role"] != "reference")
    names, out = probes(done.values()), []
    for arm, labels in cells:
        pairs = [
            (r["test"], done[RANDOM, labels, seed]["test"])
            for (name, n, seed), r in done.items()
            if (name, n) == (arm, labels) and (RANDOM, n, seed) in done
        ]
        for probe in names:
            gains = [own[probe] - random[probe] for own, random in pairs if probe in own and probe in random]
            mean, _, low, _ = spread(gains)
            if gains and (mean if low is None else low) <= 0:
                sure = "" if low is None else f", 95% interval from {100 * low:+.2f}"
                gain = f"{100 * mean:+.2f} points{sure}".replace("-", "−")
                out.append(f"{arm} at {format_labels(labels)}, {probe}: not better than random initialisation ({gain})")
    return out
