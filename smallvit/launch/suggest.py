"""The settings of the trials of `smallvit tune`: points of a Sobol sequence, the same for all arms."""

import math
from typing import Any

from smallvit.ranges import Range, Tune
from smallvit.tuning import is_extreme

LOG_RATIO = 10  # a range whose ends have at least this ratio is sampled on a logarithmic scale
EDGE = 0.1  # a value in the outer tenth of its range, on its scale, lies at the edge
POINTS_SEED = 19  # of the Sobol points


def suggestions(tune: Tune, ranges: dict[str, Range], recipe_values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of all trials of an arm (variant), as a list of dicts from name to value. `tune` is the `Tune` object
    of the recipe: ranges, number of trials and seeds. `ranges` has the hyperparameters that are tuned in this arm.
    `recipe_values` are the values that the recipe sets; the first trial uses them if they lie in the ranges.

    The settings are points of a Sobol sequence, which covers the ranges evenly. All arms get the same points; only the values
    of an arm's own ranges come from a second sequence. The values of the recipe replace the nearest point, so the other points
    still cover the rest of the ranges.
    """
    own = [name for name in ranges if tune.ranges.get(name) != ranges[name]]
    columns = dict(zip(tune.ranges, zip(*sobol(len(tune.ranges), tune.trials, POINTS_SEED))))
    columns |= dict(zip(own, zip(*sobol(len(own), tune.trials, POINTS_SEED + 1))))
    found = [{name: value_at(ranges[name], columns[name][i]) for name in ranges} for i in range(tune.trials)]
    if not all(contains(ranges[name], recipe_values[name]) for name in ranges):
        return found
    recipe = {name: position_of(ranges[name], recipe_values[name]) for name in ranges}
    distances = [sum((columns[name][i] - recipe[name]) ** 2 for name in ranges) for i in range(tune.trials)]
    nearest = distances.index(min(distances))
    return [{name: recipe_values[name] for name in ranges}, *found[:nearest], *found[nearest + 1 :]]


def sobol(dimensions: int, count: int, seed: int) -> list[list[float]]:
    """Return the first `count` points of a scrambled Sobol sequence by SciPy, as lists of numbers from 0 to 1."""
    from scipy.stats.qmc import Sobol

    if not dimensions:
        return [[] for _ in range(count)]
    sequence = Sobol(dimensions, seed=seed)  # pyright: ignore[reportCallIssue]  # rng= would give other points
    return sequence.random_base2((count - 1).bit_length())[:count].tolist()


def value_at(values: Range, position: float) -> Any:
    """Return one value from the range of a hyperparameter. `values` is the range: a pair (low, high) or a list of values.
    `position` goes from 0 (low end, or first in the list) to 1 (high end, or last). Positive ranges with high >= 10 * low have
    a logarithmic scale. Numbers are rounded to three digits, of the number or of the width of its range if that is finer.
    """
    if isinstance(values, list):
        return values[min(int(position * len(values)), len(values) - 1)]
    low, high = sampled(values)
    value = low * (high / low) ** position if is_logarithmic(values) else low + (high - low) * position
    if is_whole(values):
        rounded = round(value)
    elif values[1] - values[0] < abs(value):  # a narrow range, such as (0.99, 0.9999)
        rounded = round(value, 2 - math.floor(math.log10(values[1] - values[0])))
    else:
        rounded = float(f"{value:.3g}")
    return min(max(rounded, values[0]), values[1])


def is_whole(values: tuple[float, float]) -> bool:
    """Return whether a range has whole numbers only: both of its ends are whole numbers."""
    return isinstance(values[0], int) and isinstance(values[1], int)


def sampled(values: tuple[float, float]) -> tuple[float, float]:
    """Return the range from which a number is drawn before it is rounded. For whole numbers it begins 0.5 earlier and ends 0.5
    later: on a linear scale, the lowest and the highest value are then as probable as the others.
    """
    return (values[0] - 0.5, values[1] + 0.5) if is_whole(values) else values


def position_of(values: Range, value: Any) -> float:
    """Return the position of a value in its range, from 0 (lowest) to 1 (highest), on the scale on which the range is sampled.
    This is the inverse of `value_at` up to rounding.
    """
    if isinstance(values, list):
        return (values.index(value) + 0.5) / len(values)
    low, high = sampled(values)
    return math.log(value / low) / math.log(high / low) if is_logarithmic(values) else (value - low) / (high - low)


def is_logarithmic(values: tuple[float, float]) -> bool:
    """Return whether a range is sampled on a logarithmic scale: its lower end is positive and its upper end 10 times as large
    or more.
    """
    return values[0] > 0 and values[1] >= LOG_RATIO * values[0]


def contains(values: Range, value: Any) -> bool:
    """Return whether `value` lies in the range `values` of a hyperparameter. A range is a pair (low, high), both ends included,
    or a list, which must contain the value.
    """
    if isinstance(values, list):
        return value in values
    return isinstance(value, int | float) and values[0] <= value <= values[1]


def at_edge(values: Range, value: Any) -> bool:
    """Return whether `value` lies at the edge of the range `values` of a hyperparameter. In a pair (low, high), the edge is the
    lowest and the highest tenth, measured in logarithms if the range is wide. In a list of at least three numbers, it is the
    smallest and the largest number.
    """
    if isinstance(values, list):
        return all(type(one) in (int, float) for one in values) and is_extreme(value, values)
    low, high = values
    if is_logarithmic(values):
        return value <= low * (high / low) ** EDGE or value >= high / (high / low) ** EDGE
    return value <= low + EDGE * (high - low) or value >= high - EDGE * (high - low)
