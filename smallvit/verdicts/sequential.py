"""Tests at several numbers of seeds, called looks: sequential p-values and the reasons to stop adding seeds.

A test at 5% after each added seed would find a difference between equal arms in far more than 5% of comparisons. The p-values
of this file allow the looks of a planned schedule.
"""

import math
from collections.abc import Mapping, Sequence

from .statistics import EQUIVALENCE, LEVEL, MIN_IMAGES, MIN_PAIRS, Variance, critical_t, half_width, planned, standard_error

LOOKS = (6, 8, 12, 16, 24, 32)  # numbers of seeds at which a comparison is tested while seeds are added until it is decided
ADDED_LOOKS = (8, 16, 32)  # the same for a comparison of 8 seeds to which seeds are added after its result was seen

# Significance level P of a whole schedule of looks, and the boundary q for each schedule: the share P of 6 million simulated
# comparisons without an effect had p * sqrt(last look / n) < q at some look at n seeds.
SEQUENTIAL_LEVELS = (
    0.5, 0.2, 0.1, 0.05, 0.025, 0.05 / 3, 0.0125, 0.01, 0.005, 0.0025, 0.05 / 24, 0.001, 0.0005, 0.0002,
)  # fmt: skip
BOUNDARIES = {
    (6, 8, 12, 16, 24, 32): (
        0.277, 0.09, 0.0403, 0.0185, 0.00864, 0.00556, 0.00407, 0.0032, 0.00152, 7.31e-4, 6.03e-4, 2.82e-4, 1.38e-4, 5.29e-5,
    ),
    (8, 12, 16, 24, 32): (
        0.296, 0.0982, 0.0444, 0.0205, 0.00963, 0.00621, 0.00456, 0.00359, 0.0017, 8.19e-4, 6.79e-4, 3.16e-4, 1.58e-4, 6.07e-5,
    ),
    (8, 16, 32): (
        0.346, 0.121, 0.0564, 0.0268, 0.0129, 0.00845, 0.00625, 0.00495, 0.0024, 0.00118, 9.79e-4, 4.68e-4, 2.33e-4, 9.47e-5,
    ),
    (6, 8, 12, 16): (
        0.318, 0.107, 0.0488, 0.0226, 0.0106, 0.00686, 0.00503, 0.00397, 0.00191, 9.19e-4, 7.61e-4, 3.57e-4, 1.74e-4, 6.76e-5,
    ),
}  # fmt: skip


def sequential_p(p_values: Mapping[int, float | None], looks: Sequence[int] = LOOKS) -> float:
    """Return one p-value for a comparison that is tested several times while seeds are added. `p_values` is a dict from a
    number of seeds to the p-value of the test with these seeds; None means that no test was possible. `looks` lists all planned
    numbers of seeds, in rising order. The result is valid after every test and for any rule of stopping, and Holm's method may
    be applied to it.

    Each p-value at n seeds is multiplied by sqrt(last look / n); the smallest product is compared with boundaries that were
    simulated for the schedules in `BOUNDARIES`. Other schedules add up the error probabilities of their looks.

    Raises ValueError for a number of seeds that is not in the schedule.
    """
    if wrong := [n for n in p_values if n not in looks]:
        raise ValueError(f"p-values at {wrong} seeds, but the looks are at {list(looks)}; use p-values at the looks only")
    q = min((p * math.sqrt(looks[-1] / n) for n, p in p_values.items() if p is not None), default=math.inf)
    union = q * _sum_of_roots(looks)
    if len(looks) == 1 or tuple(looks) not in BOUNDARIES:
        return min(1.0, union)
    boundary = BOUNDARIES[tuple(looks)]
    if q > boundary[0]:
        return 1.0
    if q < boundary[-1]:
        return min(union, SEQUENTIAL_LEVELS[-1])
    return _interpolate(q, boundary, SEQUENTIAL_LEVELS)


def nominal_level(n: int, looks: Sequence[int], level: float = LEVEL) -> float:
    """Return the largest p-value that counts as significant in a test with `n` seeds, if a comparison is tested several times
    while seeds are added. `looks` lists all planned numbers of seeds. Without an effect, the probability that at least one of
    these tests is significant is at most `level`.

    Confidence intervals at these levels cover the true difference in all tests together with probability 1 - `level`.

    Raises ValueError if `n` is not in the schedule.
    """
    if n not in looks:
        raise ValueError(f"no look at {n} seeds; the looks are at {list(looks)}")
    if len(looks) == 1:
        return level
    boundary = BOUNDARIES.get(tuple(looks))
    if boundary is None or level < SEQUENTIAL_LEVELS[-1]:
        q = level / _sum_of_roots(looks)
    else:
        q = _interpolate(min(level, SEQUENTIAL_LEVELS[0]), SEQUENTIAL_LEVELS, boundary)
    return q * math.sqrt(n / looks[-1])


def stop_reason(
    mean: float,
    v: Variance,
    n: int,
    looks: Sequence[int] = LOOKS,
    *,
    overlap: float = 0.0,
    equivalence: float = EQUIVALENCE,
) -> str:
    """Return why an inconclusive comparison needs no more seeds after a test with `n` seeds: "excluded" (an effect as large as
    `equivalence` is excluded), "hopeless" (a result is unlikely even with all seeds) or "" (continue). `mean` is the mean
    difference, `v` its `Variance` (estimated variances), and `overlap` says how strongly the training images of two seeds
    overlap. `looks` lists the planned numbers of seeds.

    "excluded": the interval that is valid at all looks lies within `equivalence`, so an effect of that size is excluded.
    "hopeless": from 12 seeds on, if the last look is expected neither to find a difference nor to exclude an effect; and if no
    test image tells the arms apart.
    """
    half = half_width(v, nominal_level(n, looks), overlap=overlap)
    if v.seeds >= MIN_PAIRS and v.images >= MIN_IMAGES and v.n_eff >= 2 and abs(mean) + half < equivalence:
        return "excluded"
    if v.unseen:
        return "hopeless"  # the arms classify all images alike, and more seeds do not show images that are rare
    last = looks[-1]
    if not 12 <= n < last:
        return ""
    se = standard_error(v, overlap)
    final = critical_t(nominal_level(last, looks), last - 1) * standard_error(planned(v, last), overlap)
    return "hopeless" if abs(mean) + se < final and max(abs(mean) - se, 0) + final > equivalence else ""


def _sum_of_roots(looks: Sequence[int]) -> float:
    """Return the sum of sqrt(n / N) over `looks`, the planned numbers n of seeds at which a comparison is tested; N is the last
    one. It gives a Bonferroni bound: without an effect, the probability that p < q * sqrt(n / N) in at least one of the tests
    is at most q times this sum.
    """
    return sum(math.sqrt(n / looks[-1]) for n in looks)


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the value at `x` of a curve through points with the coordinates `xs` and `ys`, both in falling order. Between two
    points, log(y) is linear in log(x).
    """
    import numpy as np

    return float(np.exp(np.interp(math.log(x), np.log(xs[::-1]), np.log(ys[::-1]))))
