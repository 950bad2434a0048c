"""Equal tuning: the hyperparameters to tune, the file with the chosen values, and the tuned runs of a comparison.

A recipe states the ranges with `ablate(..., tune=Tune({"lr": (3e-4, 6e-3)}))`. `smallvit tune R` trains the trials (see
`launch/tune.py`) and writes the choice to `R.tuned.json` beside the recipe. `apply` then returns the tuned runs.
"""

from dataclasses import dataclass, field
from typing import Any

# settings of a run that may be tuned, besides the options of its model
TUNABLE = ("batch", "lr", "warmup", "schedule", "weight_decay", "layer_decay", "clip", "ema")

Range = tuple[float, float] | list  # two ends, or the values to choose from


@dataclass(frozen=True)
class Tune:
    """The hyperparameters that `smallvit tune` chooses for each arm (variant in the comparison), their ranges, and the number
    of trials, seeds and validation images. Every arm gets the same number of trials.

    ranges  a dict from the name of a hyperparameter to its range. Names are those that `Run.vary` takes: settings of the run
            (batch, lr, warmup, schedule, weight_decay, layer_decay, clip, ema) or options of its model, such as depth. A range
            is `(low, high)`, for example `(3e-4, 6e-3)`, or a list of values, for example `[2, 4, 8]`. Two whole numbers give
            whole numbers. Where `high` is at least 10 times `low`, values are drawn evenly on a logarithmic scale
    trials  number of settings that are tried for each arm and each number of labels
    seeds   number of random seeds with which the best settings are trained
    val     number of validation images on which the trials are scored
    own     a dict from the name of an arm to ranges that only this arm has, or that replace those in `ranges` for this arm.
            A list with one value fixes a hyperparameter. The number of trials stays the same

    Raises  ValueError for an invalid range, or a setting of a run that cannot be tuned.
    """

    ranges: dict[str, Range]
    trials: int = 8
    seeds: int = 4
    val: int = 3_000
    own: dict[str, dict[str, Range]] = field(default_factory=dict)

    def __post_init__(self):
        if not isinstance(self.ranges, dict) or not self.ranges:
            raise ValueError(f"Tune got the ranges {self.ranges!r}; expected a dict such as {{'lr': (3e-4, 6e-3)}}")
        if not isinstance(self.own, dict) or not all(isinstance(ranges, dict) for ranges in self.own.values()):
            raise ValueError(f"own is {self.own!r}; expected a dict such as {{'+SPT': {{'depth': [2, 4]}}}}")
        for name, low in (("trials", 2), ("seeds", 1), ("val", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} of Tune is {value!r}; expected a whole number, at least {low}")
        for name, values in self.ranges.items():
            check_range(name, values, fewest=2)
        for ranges in self.own.values():
            for name, values in ranges.items():
                check_range(name, values, fewest=1)


def check_range(name: str, values: Any, fewest: int):
    """Raise ValueError if a hyperparameter cannot be tuned or if its range is invalid. A list of values must have at least
    `fewest` of them.
    """
    from smallvit.run import Run

    if name in Run.__dataclass_fields__ and name not in TUNABLE:
        raise ValueError(f"{name!r} cannot be tuned; expected {', '.join(TUNABLE)}, or an option of the model")
    if isinstance(values, list):
        plain = all(value is None or isinstance(value, bool | int | float | str) for value in values)
        if not plain or len(values) < fewest or len(set(map(repr, values))) < len(values):
            raise ValueError(f"the values of {name} are {values!r}; expected at least {fewest} different numbers or texts")
        return
    numbers = isinstance(values, tuple) and len(values) == 2
    numbers = numbers and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    if not numbers or not values[0] < values[1]:
        raise ValueError(f"the range of {name} is {values!r}; expected (low, high) with low < high, or a list of values")
