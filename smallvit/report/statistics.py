"""What a few seeds can tell: the spread of a mean, Holm's adjustment, and how many pairs an effect takes."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

LEVEL = 0.05  # the chance of one or more false verdicts in a recipe
TIE = 1e-9  # accuracies count images, so a smaller spread is rounding
MIN_PAIRS = 6  # with five pairs even five wins of five have p = 0.0625 in a sign-flip test


def spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None, float | None]:
    """Mean, SD (n - 1) and the 95% t interval of the mean; None where there are too few values to say."""
    from scipy.stats import t

    if len(values) < 2:
        return (values[0] if values else None), None, None, None
    mean, sd = fmean(values), stdev(values)
    half = float(t.isf(0.025, len(values) - 1)) * sd / math.sqrt(len(values))
    return mean, sd, mean - half, mean + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment: the smallest of m p-values times m, the next times m - 1, never below the one before."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def pairs_needed(sd: float, effect: float = 0.01, level: float = LEVEL, power: float = 0.8) -> int:
    """How many pairs show `effect` with this power, if paired differences scatter by `sd`; at least the six a verdict needs."""
    from scipy.stats import norm, t

    n = max(MIN_PAIRS, math.ceil(((norm.isf(level / 2) + norm.ppf(power)) * sd / effect) ** 2))
    while (t.isf(level / 2, n - 1) + t.ppf(power, n - 1)) * sd / math.sqrt(n) > effect:
        n += 1
    return n
