"""What becomes of a verdict with longer training and with tuned settings."""

from collections.abc import Sequence
from dataclasses import dataclass

from .comparison import Comparison, Row

OUTCOMES = ("holds", "fades", "is no longer shown", "turns", "turns in between", "appears", "appears in between")


@dataclass(frozen=True, kw_only=True)
class Trend:
    """How the verdict about one arm (variant in the comparison) changes when all arms are trained longer, such as "holds"
    (stays the same) or "fades" (the difference gets smaller). `outcome` says all words.

    arm, labels, tuned   the arm, the number of labelled images (None: all), and whether the settings were tuned
    rows                 the results of the arm, from the shortest to the longest training
    outcome              one of `OUTCOMES`, or "" if no training length shows a difference
    """

    arm: str
    labels: int | None
    tuned: bool
    rows: tuple[Row, ...]
    outcome: str


def trends(comparison: Comparison) -> list[Trend]:
    """Return how the verdict about each arm (variant) changes when all arms are trained longer, as a list of `Trend` objects. A
    `Trend` holds the results at all lengths and one word, such as "fades". `comparison` holds all results. The list is empty if
    there is a single training length.

    Techniques without a verdict at one of the lengths (missing runs or too few seeds) are left out.
    """
    found: dict[tuple, list[Row]] = {}
    for row in comparison.rows:
        if row.role == "technique" and row.length is not None:
            found.setdefault((row.arm, row.labels, row.tuned), []).append(row)
    return [
        Trend(arm=arm, labels=labels, tuned=tuned, rows=tuple(rows), outcome=outcome(rows))
        for (arm, labels, tuned), rows in found.items()
        if len(rows) > 1 and all(row.decided or row.verdict == "inconclusive" for row in rows)
    ]


def outcome(rows: Sequence[Row]) -> str:
    """Return how a verdict changes with longer training, as one of `OUTCOMES`. The result is "" if no training length shows a
    difference. `rows` are the results of one arm (variant), from the shortest to the longest training.

    "holds": the last verdict is that of the first. "turns": it is the opposite. "fades": the difference has become smaller, and
    the last interval leaves out the first difference; either the last verdict is inconclusive, or it is the same and the
    difference has fallen below half. "is no longer shown": the last verdict is inconclusive, but it is not known whether the
    difference has become smaller. "appears": the first verdict is inconclusive, and the last one is better or worse. "turns in
    between" and "appears in between": a length between the first and the last one shows the opposite, or it alone shows a
    difference.
    """
    first, last = rows[0], rows[-1]
    ends = {row.verdict for row in (first, last) if row.decided}
    between = {row.verdict for row in rows[1:-1] if row.decided}
    if between - ends:
        return "turns in between" if ends else "appears in between"
    if not first.decided:
        return "appears" if last.decided else ""
    if last.decided and first.verdict != last.verdict:
        return "turns"
    before, now = first.difference, last.difference
    smaller = 0.0
    if before and now and not (now.low or 0) <= before.mean <= (now.high or 0):
        smaller = 1 - now.mean / before.mean
    if not last.decided:
        return "fades" if smaller > 0 else "is no longer shown"
    return "fades" if smaller > 0.5 else "holds"


def tuned_pairs(comparison: Comparison) -> list[tuple[Row, Row]]:
    """Return pairs of results of the same arm (variant) as a list of tuples of two `Row` objects: the result with common
    settings (those of the recipe), and the one with tuned settings (chosen for this arm). Both have the same number of labelled
    images and the same training length. `comparison` holds all results.

    Numbers of labels at which nothing has a result with common settings are left out.
    """
    done = comparison.done
    common = {(row.arm, row.condition): row for row in comparison.rows if not row.tuned and row.condition in done}
    pairs = [(common.get((row.arm, row.condition._replace(tuned=False))), row) for row in comparison.rows if row.tuned]
    return [(before, row) for before, row in pairs if before]
