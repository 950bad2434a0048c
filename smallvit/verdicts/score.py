"""The score by which arms are judged, as a text writes it: its name, its unit, and whether a lower one is better."""

import re
from typing import NamedTuple

# Names in records -> names in a text. Accuracies, also those of probes, are all called accuracy.
TITLES = {"macro_f1": "macro F1", "auc": "AUC", "ece": "ECE"}
ACCURACIES = re.compile(r"accuracy|knn_\d+|linear_probe|few_shot")
ERRORS = ("ece",)  # scores of which a lower one is better and that are shares from 0 to 1, so that they are written in percent


class Score(NamedTuple):
    """How a text writes a score, such as an accuracy. `title` is its name in a text. It is written in percent if `percent` is
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
        return f"{100 * x:z.2f}" if self.percent else f"{x:z.3f}"  # z: no negative zero

    def amount(self, x: float, sign: str = "-") -> str:
        """Return a difference of two scores as text: in percentage points with two decimals, or as a plain number with three
        decimals, or four if it is below 0.01. With `sign="+"`, positive numbers have a plus sign.
        """
        decimals = 2 if self.percent else 4 if 0.00005 < abs(x) < 0.01 else 3
        return f"{100 * x if self.percent else x:{sign}z.{decimals}f}".replace("-", "−")

    def difference(self, x: float) -> str:
        """Return a difference of two scores as text with its sign: `+0.42` or `−0.10`. See `amount` for the decimals."""
        return self.amount(x, "+")

    def interval(self, low: float, high: float) -> str:
        """Return an interval of differences as text: `[−0.10, 0.35]`."""
        return f"[{self.amount(low)}, {self.amount(high)}]"


ACCURACY = Score()


def score_named(name: str, lower: bool) -> Score:
    """Return how a text writes the score that has this `name` in the records. `lower` says whether a lower score is better:
    then it may be any number from 0 on, such as a loss, and is written as a plain number.
    """
    title = "accuracy" if ACCURACIES.fullmatch(name) else TITLES.get(name, name.replace("_", " "))
    return Score(title, not lower or name in ERRORS, lower)
