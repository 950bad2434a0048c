"""The score by which the arms of a comparison are judged, and the arms that are judged by another one."""

from dataclasses import replace

from smallvit.verdicts.comparison import Comparison, Row
from smallvit.verdicts.score import ACCURACY, Score, score_named


def score_of(row: Row) -> Score:
    """Return how a report writes the score of an arm (variant). `row` holds its results."""
    return score_named(row.score, row.lower_is_better)


def score_in(comparison: Comparison) -> Score:
    """Return how a report writes the score by which a comparison is judged: that of its first baseline."""
    return next((score_of(row) for row in comparison.rows if row.role == "baseline" and row.values), ACCURACY)


def same_score(comparison: Comparison, row: Row) -> bool:
    """Return whether an arm (variant) is judged by the same score as the whole comparison. A reference can have another one,
    such as the accuracy of raw pixels beside models that are judged by their log loss. `row` holds the results of the arm.
    """
    return not row.values or score_of(row) == score_in(comparison)


def with_one_score(comparison: Comparison) -> Comparison:
    """Return the comparison without the results of arms (variants) that are judged by another score, for a figure in which all
    arms share one axis.
    """
    return replace(comparison, rows=tuple(row for row in comparison.rows if same_score(comparison, row)))
