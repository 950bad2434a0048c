"""The score by which arms are judged, as a report writes it: its name, its unit, and whether a lower one is better."""

import re
from dataclasses import replace
from typing import NamedTuple

from smallvit.verdicts.comparison import Comparison, Row

# Names in records -> names in a text. Accuracies, also those of probes, are all called accuracy.
TITLES = {"macro_f1": "macro F1", "auc": "AUC", "ece": "ECE"}
ACCURACIES = re.compile(r"accuracy|knn_\d+|linear_probe|few_shot")
ERRORS = ("ece",)  # scores of which a lower one is better and that are shares from 0 to 1, so that they are written in percent


class Score(NamedTuple):
    """How a report writes a score, such as an accuracy. `title` is its name in a text. It is written in percent if `percent` is
    True, otherwise as a plain number with three decimals. `lower` says whether a lower score is better.
    """

    title: str = "accuracy"
    percent: bool = True
    lower: bool = False

    @property
    def capital(self) -> str:
        """The name of the score with a capital first letter, for a heading."""
        return self.title[0].upper() + self.title[1:]

    @property
    def unit(self) -> str:
        """The unit after the name of the score in a table or at an axis: `, %`, or an empty text for a plain number."""
        return ", %" * self.percent

    @property
    def points(self) -> str:
        """The unit of a difference of two scores, after its number: ` points`, or an empty text for a plain number."""
        return " points" * self.percent

    @property
    def direction(self) -> str:
        """A text for the head of a table: `; lower is better`, or an empty text if a higher score is better."""
        return "; lower is better" * self.lower

    def number(self, x: float) -> str:
        """Return a score as text without its unit: in percent with two decimals, or as a plain number with three decimals."""
        return f"{100 * x:.2f}" if self.percent else f"{x:.3f}"

    def difference(self, x: float) -> str:
        """Return the difference of two scores as text with its sign: in percentage points with two decimals, or as a plain
        number with three decimals.
        """
        return (f"{100 * x:+.2f}" if self.percent else f"{x:+.3f}").replace("-", "−")

    def interval(self, low: float, high: float) -> str:
        """Return an interval of differences as text: `[−0.10, 0.35]`."""
        return f"[{self.number(low)}, {self.number(high)}]".replace("-", "−")


ACCURACY = Score()


def score_named(name: str, lower: bool) -> Score:
    """Return how a report writes the score that has this `name` in the records. `lower` says whether a lower score is better:
    then it may be any number from 0 on, such as a loss, and is written as a plain number.
    """
    title = "accuracy" if ACCURACIES.fullmatch(name) else TITLES.get(name, name.replace("_", " "))
    return Score(title, not lower or name in ERRORS, lower)


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
