"""Statistics of a few seeds: confidence intervals, Holm's correction and the number of pairs that a test needs."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

LEVEL = 0.05  # probability of at least one false verdict in a recipe
TIE = 1e-9  # a smaller spread is rounding error, because accuracies are counts of images
MIN_PAIRS = 6  # with five pairs, even five wins have p = 0.0625 in a sign-flip test


def spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None, float | None]:
    """Return a tuple of four numbers: the mean of the values, their standard deviation (with divisor n - 1), and the lower and
    upper end of the 95% t interval of the mean.

    All four are None for no values; the last three are None for a single value.
    """
    from scipy.stats import t

    if len(values) < 2:
        return (values[0] if values else None), None, None, None
    mean, sd = fmean(values), stdev(values)
    half = float(t.isf(0.025, len(values) - 1)) * sd / math.sqrt(len(values))
    return mean, sd, mean - half, mean + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Return a list of p-values, corrected for multiple comparisons by Holm's method. The order is that of the given p-values.

    The smallest of m p-values is multiplied by m, the next by m - 1, and so on; each is at least as large as the one before.
    """
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def pairs_needed(sd: float, effect: float = 0.01, level: float = LEVEL, power: float = 0.8) -> int:
    """Return the number of pairs (seeds) that a paired t-test needs to detect a difference of `effect` with probability
    `power`. `sd` is the standard deviation of the differences, and `level` is the significance level.

    The result is at least six, the number of pairs that a verdict needs.
    """
    from scipy.stats import norm, t

    n = max(MIN_PAIRS, math.ceil(((norm.isf(level / 2) + norm.ppf(power)) * sd / effect) ** 2))
    while (t.isf(level / 2, n - 1) + t.ppf(power, n - 1)) * sd / math.sqrt(n) > effect:
        n += 1
    return n
