"""Compare runs that were trained again with the committed records."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev

from smallvit.record import Record, format_labels

LEVEL = 0.99  # of the prediction interval: by chance one arm in a hundred lies outside
MAX_WIDTH = 0.6  # a wider interval contains almost any result and verifies nothing


def compare_with_committed(committed: Sequence[Record], again: Sequence[Record]) -> tuple[list[str], bool]:
    """Check whether runs that were trained again reproduce their published results. Return a list of text lines and whether all
    results agree. `committed` are the published records (results of a run), and `again` are the new ones.

    There is one line for each arm (variant) and each number of labelled images.

    An arm agrees if its runs are identical to the committed ones, or if their mean lies in the 99% prediction interval that
    follows from the mean and standard deviation of the committed seeds (t distribution). It does not agree if a run failed, if
    fewer than 2 seeds are committed, or if the interval is wider than 60 points. Arms whose weights are unavailable here are
    skipped; at least one arm must agree.
    """
    lines, results = [], []
    for arm, labels in dict.fromkeys((record.arm, record.labels) for record in again):
        new = [r for r in again if (r.arm, r.labels) == (arm, labels)]
        old = [r for r in committed if (r.arm, r.labels) == (arm, labels) and r.finished]
        line, agrees = compare_arm(old, new)
        lines.append(f"{arm} at {format_labels(labels)}: {line}")
        results += [] if agrees is None else [agrees]
    return lines, bool(results) and all(results)


def compare_arm(old: Sequence[Record], new: Sequence[Record]) -> tuple[str, bool | None]:
    """Compare the new runs of one arm (variant) with its published runs. Return the outcome as text and whether they agree.
    `old` and `new` are lists of records (results of a run).

    The second value is None if the external weights of the arm cannot be obtained on this machine.
    """
    if all(r.status == "unavailable" for r in new):
        return f"left out, unavailable here ({new[0].error})", None
    if not all(r.finished for r in new):
        return f"not compared ({next((r.error for r in new if r.error), 'a run failed')})", False
    mean = fmean(r.result for r in new)
    if {(r.fingerprint, r.result) for r in new} <= {(r.fingerprint, r.result) for r in old}:
        return f"{100 * mean:.2f}%, identical to the record", True
    if len(old) < 2:
        return "not compared (fewer than 2 committed seeds)", False
    low, high = prediction_interval([r.result for r in old], len(new))
    low, high, agrees = max(low, 0.0), min(high, 1.0), low - 1e-12 <= mean <= high + 1e-12
    verdict = "inside" if agrees else "OUTSIDE"
    if high - low > MAX_WIDTH:
        verdict, agrees = "TOO WIDE to verify anything; commit more seeds, or verify with more labels", False
    interval = f"interval {100 * low:.2f} to {100 * high:.2f}% (99%, {len(old)} committed seeds)"
    return f"{100 * mean:.2f}%, {interval}: {verdict}", agrees


def prediction_interval(values: Sequence[float], new: int) -> tuple[float, float]:
    """Return the lower and upper end of the 99% prediction interval for the mean of `new` further runs. `values` are the
    results of the runs so far, and a t distribution is assumed.
    """
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) * sqrt(1 / len(values) + 1 / new)
    return fmean(values) - half, fmean(values) + half
