"""Bands: does a run that is trained again still give what its committed record says?"""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from smallvit.record import format_labels

LEVEL = 0.99  # of the prediction interval: one arm in a hundred falls out by chance
WIDEST = 0.6  # of a band that tells anything: in a wider one nearly every run would lie


def band(committed: Sequence[dict], again: Sequence[dict]) -> tuple[list[str], bool]:
    """A line for every arm trained again, saying whether its mean lies in the band of the committed seeds; and whether all do.

    The band is the 99% prediction interval for the mean of as many new runs, from the mean and the SD over the committed seeds
    (t distribution). A run that failed, or an arm with fewer than 2 committed seeds or a band wider than 60 points, is not in
    its band, unless it is identical to its record; nor is all well where no arm has one.
    """
    lines, found = [], []
    for arm, labels in dict.fromkeys((record["arm"], record["labels"]) for record in again):
        mine = [r for r in again if (r["arm"], r["labels"]) == (arm, labels)]
        old = [r for r in committed if (r["arm"], r["labels"], r["status"]) == (arm, labels, "finished")]
        said, good = held(old, mine)
        lines.append(f"{arm} at {format_labels(labels)}: {said}")
        found += [] if good is None else [good]
    return lines, bool(found) and all(found)


def held(old: Sequence[dict], mine: Sequence[dict]) -> tuple[str, bool | None]:
    """What is to be said of one arm, and whether it lies in its band; None where it could not be trained here."""
    if all(r["status"] == "unavailable" for r in mine):
        return f"left out, unavailable here ({mine[0]['error']})", None
    if any(r["status"] != "finished" for r in mine):
        return f"no band ({next((r['error'] for r in mine if r['error']), 'a run failed')})", False
    mean = fmean(map(score, mine))
    if {(r["fingerprint"], score(r)) for r in mine} <= {(r["fingerprint"], score(r)) for r in old}:
        return f"{100 * mean:.2f}%, identical to the record", True
    if len(old) < 2:
        return "no band (fewer than 2 committed seeds)", False
    low, high = prediction([score(r) for r in old], len(mine))
    low, high, inside = max(low, 0.0), min(high, 1.0), low - 1e-12 <= mean <= high + 1e-12
    word = "inside" if inside else "OUTSIDE"
    if high - low > WIDEST:
        word, inside = "TOO WIDE to tell anything; commit more seeds, or verify at more labels", False
    return f"{100 * mean:.2f}%, band {100 * low:.2f} to {100 * high:.2f}% (99%, {len(old)} committed seeds): {word}", inside


def prediction(values: Sequence[float], new: int) -> tuple[float, float]:
    """The interval in which the mean of `new` more values lies with probability `LEVEL`."""
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) * sqrt(1 / len(values) + 1 / new)
    return fmean(values) - half, fmean(values) + half


def score(record: dict) -> float:
    """The number by which a run is judged."""
    return record["test"][record["score"]]
