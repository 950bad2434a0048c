"""What `smallvit tune` chooses: the hyperparameters of a comparison, their ranges, and the number of trials."""

from dataclasses import dataclass, field, fields
from typing import Any

from smallvit.components import python_numbers
from smallvit.run import Run
from smallvit.shapes import is_number

# settings of a run that may be tuned, besides the options of its model and of its optimizer
TUNABLE = ("batch", "lr", "warmup", "schedule", "weight_decay", "layer_decay", "clip", "ema")

Range = tuple[float, float] | list  # two ends, or the values to choose from


@dataclass(frozen=True)
class Tune:
    """The hyperparameters that `smallvit tune` chooses for each arm (variant in the comparison), their ranges, and the number
    of trials, seeds and validation images. Every arm gets the same number of trials.

    ranges  a dict from the name of a hyperparameter to its range. Names are those that `Run.vary` takes: settings of the run
            (batch, lr, warmup, schedule, weight_decay, layer_decay, clip, ema), options of its model, such as depth, or options
            of its optimizer, such as rho of SAM. A range is `(low, high)`, for example `(3e-4, 6e-3)`, or a list of values, for
            example `[2, 4, 8]`. Two whole numbers give whole numbers. Where `low` is above 0 and `high` at least 10 times
            `low`, values are drawn evenly on a logarithmic scale
    trials  number of settings that are tried for each arm and each number of labels
    seeds   number of random seeds with which the best settings are trained
    val     number of validation images on which the trials are scored
    steps   length of a trial as a fraction of the training steps of its arm. Shorter trials cost less, but the best learning
            rate may be smaller for longer training
    own     a dict from the name of an arm to ranges that only this arm has, or that replace those in `ranges` for this arm.
            A list with one value fixes a hyperparameter. The number of trials stays the same
    common  False: once the settings are chosen, the runs with the settings of the recipe are left out of the comparison, which
            halves its cost. The report then does not show what tuning changed

    A technique that differs from its baseline in nothing but tuned hyperparameters keeps them, because they are what the arm
    asks about. An option that an arm does not have, in its model or its optimizer, is not tuned in this arm. Runs that are
    trained before an arm, such as pretraining, keep the settings of the recipe.

    Raises  ValueError for an invalid range, or a setting of a run that cannot be tuned.
    """

    ranges: dict[str, Range]
    trials: int = 8
    seeds: int = 4
    val: int = 3_000
    steps: float = 1.0
    own: dict[str, dict[str, Range]] = field(default_factory=dict)
    common: bool = True

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(self, f.name, python_numbers(getattr(self, f.name)))
        if not isinstance(self.ranges, dict) or not self.ranges:
            raise ValueError(f"Tune got the ranges {self.ranges!r}; expected a dict such as {{'lr': (3e-4, 6e-3)}}")
        if not isinstance(self.own, dict) or not all(isinstance(ranges, dict) for ranges in self.own.values()):
            raise ValueError(f"own is {self.own!r}; expected a dict such as {{'+SPT': {{'depth': [2, 4]}}}}")
        for name, low in (("trials", 2), ("seeds", 1), ("val", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < low:
                raise ValueError(f"{name} of Tune is {value!r}; expected a whole number, at least {low}")
        if not isinstance(self.steps, int | float) or isinstance(self.steps, bool) or not 0 < self.steps <= 1:
            raise ValueError(f"steps of Tune is {self.steps!r}; expected a fraction of the training steps, above 0, at most 1")
        if not isinstance(self.common, bool):
            raise ValueError(f"common of Tune is {self.common!r}; expected True, or False to leave out the untuned runs")
        for name, values in self.ranges.items():
            check_range(name, values, fewest=2)
        for ranges in self.own.values():
            for name, values in ranges.items():
                check_range(name, values, fewest=1)

    def plain(self) -> dict[str, Any]:
        """Return the options of this object (ranges, number of trials and so on) as JSON data, for the file with the chosen
        values. The ends of a range become a dict with the keys "from" and "to".
        """

        def write(ranges: dict[str, Range]) -> dict[str, Any]:
            return {n: {"from": r[0], "to": r[1]} if isinstance(r, tuple) else r for n, r in ranges.items()}

        numbers = {name: getattr(self, name) for name in ("trials", "seeds", "val", "steps")}
        numbers |= {} if self.common else {"common": False}
        return {"ranges": write(self.ranges), **numbers, "own": {arm: write(ranges) for arm, ranges in self.own.items()}}


def check_range(name: str, values: Any, fewest: int):
    """Raise ValueError if a hyperparameter cannot be tuned or if its range is invalid. A list of values must have at least
    `fewest` of them.
    """
    if name in Run.__dataclass_fields__ and name not in TUNABLE:
        raise ValueError(f"{name!r} cannot be tuned; expected {', '.join(TUNABLE)}, or an option of the model or the optimizer")
    if isinstance(values, list):
        plain = all(value is None or isinstance(value, bool | str) or is_number(value) for value in values)
        if not plain or len(values) < fewest or len(set(map(repr, values))) < len(values):
            raise ValueError(f"the values of {name} are {values!r}; expected at least {fewest} different numbers or texts")
        return
    numbers = isinstance(values, tuple) and len(values) == 2
    numbers = numbers and all(map(is_number, values))
    if not numbers or not values[0] < values[1]:
        raise ValueError(f"the range of {name} is {values!r}; expected finite numbers (low, high) with low < high, or a list")
