"""Statistics of a comparison of two arms: intervals and p-values over seeds and test images, looks while seeds are added,
Holm's correction and the planning of further seeds.

Accuracies and their differences are fractions, so 0.01 is one point. The simulated error rates of these methods are tested by
tests/test_verdict_rates.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

LEVEL = 0.05  # probability of at least one false verdict in a recipe
TIE = 1e-9  # a smaller spread is rounding error, because accuracies are counts of images
MIN_PAIRS = 6  # with five pairs, even five wins have p = 0.0625 in a sign-flip test
EQUIVALENCE = 0.005  # an effect within half a point is too small to matter
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


# Single arms and families of comparisons


def spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None, float | None]:
    """Return a tuple of four numbers: the mean of the values, their standard deviation (with divisor n - 1), and the lower and
    upper end of the 95% t interval of the mean.

    All four are None for no values; the last three are None for a single value.
    """
    if len(values) < 2:
        return (values[0] if values else None), None, None, None
    mean, sd = fmean(values), stdev(values)
    half = _t(0.05, len(values) - 1) * sd / math.sqrt(len(values))
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


def collapse_rate(seeds: int) -> float:
    """Return the smallest rate of collapsed runs that is excluded with 95% confidence when none of `seeds` runs collapsed."""
    return 1 - 0.05 ** (1 / seeds)


# The variance of a paired difference


@dataclass(frozen=True)
class Variance:
    """Estimated variances of the mean paired difference between two arms, over seeds and over test images.

    The unbiased variance of the mean is `over_seeds + over_images - rest`.

    seeds, images: numbers of paired seeds and of test images
    over_seeds: squared standard error when new seeds are drawn and the test images stay the same
    over_images: squared standard error when new test images are drawn and the trained models stay the same
    rest: the part that both of them contain, from what seeds and images do to each other
    n_eff: effective number of test images, which is small if few images tell the arms apart
    bound: True if `over_images` is an upper bound because it is not recorded which images each run classified correctly
    """

    seeds: int
    images: int
    over_seeds: float
    over_images: float
    rest: float
    n_eff: float
    bound: bool = False


def paired_variance(d: Any) -> tuple[float, Variance]:
    """Return the mean of a table of paired differences and its estimated variance over seeds and test images.

    The variances are the mean squares of a two-way analysis of variance without replication.

    d: array (seeds, images) of the score of the arm minus the score of the baseline on each test image: 1 if only the arm is
    right, -1 if only the baseline is right, else 0. Other scores that are means over images are allowed.

    Raises ValueError for fewer than two seeds or images.
    """
    import numpy as np

    d = np.asarray(d, dtype=float)
    if d.ndim != 2 or min(d.shape) < 2:
        raise ValueError(f"differences of shape {d.shape}; allowed is (seeds, images) with at least two of each")
    seeds, images = d.shape
    mean = float(d.mean())
    seed_effects, image_effects = d.mean(1) - mean, d.mean(0) - mean
    between_seeds, between_images = float((seed_effects**2).sum()), float((image_effects**2).sum())
    total = float(((d - mean) ** 2).sum())
    rest = max(0.0, total - images * between_seeds - seeds * between_images)
    fourth = float((image_effects**4).sum())
    return mean, Variance(
        seeds,
        images,
        over_seeds=between_seeds / (seeds - 1) / seeds,
        over_images=between_images / (images - 1) / images,
        rest=rest / ((seeds - 1) * (images - 1)) / (seeds * images),
        n_eff=between_images**2 / fourth if fourth > 0 else float(images),
    )


def variance_bound(values: Sequence[float], errors: float, images: int) -> Variance:
    """Return the variance of a mean paired difference, with an upper bound of the part over test images. It is for old records,
    which do not say which test images a run classified correctly.

    Two arms differ on at most as many images as both together classify wrongly, which gives the bound.

    values: difference in accuracy for each seed
    errors: mean error (1 - accuracy) of the arm plus that of the baseline
    images: number of test images

    Raises ValueError for fewer than two seeds or images.
    """
    if len(values) < 2 or images < 2:
        raise ValueError(f"{len(values)} seeds and {images} test images; allowed are at least two of each")
    over_seeds = stdev(values) ** 2 / len(values)
    return Variance(len(values), images, over_seeds, errors / (images - 1), rest=0.0, n_eff=float(images), bound=True)


# Intervals and p-values


def half_width(v: Variance, level: float, *, overlap: float = 0.0, folds: float = 1.0) -> float:
    """Return half the width of the confidence interval of a mean paired difference for new seeds and new test images.

    The interval over seeds alone is one side of a right triangle, the part over test images is the other side, and the result
    is the hypotenuse. Equal arms of accuracy 0.6 to 0.995 were told apart in 3.8 to 4.4% of simulated comparisons at level 5%.

    level: 1 minus the confidence, for example 0.05
    overlap: n / (m - n) if each seed draws n of m labelled images, 0 if seeds share no training images. The results of two
    seeds correlate by the share n/m of images that both use.
    folds: factor of the variance over images: 1.6 for pooled predictions of cross-validation, else 1

    Paper     Zou and Donner 2008 (the combination of two intervals, "MOVER"); Nadeau and Bengio 2003 (overlap).
    """
    t_images = _t(level, max(0.5, v.n_eff - 1))
    seeds_part = _t(level, v.seeds - 1) ** 2 * v.over_seeds * (1 + v.seeds * overlap)
    images_part = t_images**2 * max(0.0, folds * v.over_images - v.rest)
    return math.sqrt(max(seeds_part + images_part, t_images**2 * folds * v.over_images))


def two_part_p(mean: float, v: Variance, *, overlap: float = 0.0, folds: float = 1.0) -> float | None:
    """Return the p-value of a mean paired difference for new seeds and new test images: the level at which the interval of
    `half_width` just reaches zero.

    The result is None if no verdict is possible: fewer than six seeds, fewer than two effective test images, or the same
    difference, other than zero, for every seed. `overlap` and `folds` are those of `half_width`.
    """
    constant = math.sqrt(v.seeds * v.over_seeds) <= TIE
    if v.seeds < MIN_PAIRS or v.n_eff < 2 or (constant and abs(mean) > TIE):
        return None
    if constant:
        return 1.0
    return _crossing(abs(mean), lambda level: half_width(v, level, overlap=overlap, folds=folds))


def seeds_half_width(v: Variance, level: float) -> float:
    """Return half the width of the paired t interval over seeds. It speaks of the same test images only."""
    return _t(level, v.seeds - 1) * math.sqrt(v.over_seeds)


def seeds_p(mean: float, v: Variance) -> float | None:
    """Return the p-value of the paired t-test over seeds. It speaks of the same test images only. The result is None if all
    seeds have the same difference, other than zero.
    """
    from scipy.special import stdtr

    if math.sqrt(v.seeds * v.over_seeds) <= TIE:
        return None if abs(mean) > TIE else 1.0
    return float(2 * stdtr(v.seeds - 1, -abs(mean) / math.sqrt(v.over_seeds)))


def _t(level: float, df: float) -> float:
    """Return the critical value of a two-sided t-test: |t| exceeds it with probability `level` by chance."""
    from scipy.special import stdtrit

    return -float(stdtrit(df, level / 2))


def _crossing(value: float, falling: Callable[[float], float]) -> float:
    """Return the level, between 1e-100 and 1, at which a falling function of the level equals `value`."""
    from scipy.optimize import brentq

    if falling(1e-100) <= value:
        return 1e-100
    if falling(1.0) >= value:
        return 1.0
    return math.exp(float(brentq(lambda x: falling(math.exp(x)) - value, math.log(1e-100), 0.0, xtol=1e-13)))  # type: ignore


# Looks while seeds are added


def sequential_p(p_values: Mapping[int, float | None], looks: Sequence[int] = LOOKS) -> float:
    """Return the p-value of a comparison that was tested several times while seeds were added. It is valid at every look and
    for any rule of stopping, and Holm's method may be applied to it.

    Each p-value at n seeds is multiplied by sqrt(last look / n); the smallest product is compared with boundaries that were
    simulated for the schedules in `BOUNDARIES`. Other schedules add up the error probabilities of their looks.

    p_values: p-value at each look so far, by the number of seeds; None means that no test was possible
    looks: the planned schedule, in rising order

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
    """Return the p-value that a test at `n` seeds must reach so that all looks of the schedule together err with probability
    `level`. The intervals at these levels cover the true difference at all looks together with probability 1 - `level`.

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
    """Return why an undecided comparison needs no further seeds at the look at `n` seeds, or an empty text if it goes on.

    "excluded": the interval that is valid at all looks lies within `equivalence`, so an effect of that size is excluded.
    "hopeless": from 12 seeds on, if the last look is expected neither to find a difference nor to exclude an effect.
    """
    half = half_width(v, nominal_level(n, looks), overlap=overlap)
    if v.seeds >= MIN_PAIRS and v.n_eff >= 2 and abs(mean) + half < equivalence:
        return "excluded"
    last = looks[-1]
    if not 12 <= n < last:
        return ""
    se = standard_error(v, overlap)
    final = _t(nominal_level(last, looks), last - 1) * standard_error(planned(v, last), overlap)
    return "hopeless" if abs(mean) + se < final and max(abs(mean) - se, 0) + final > equivalence else ""


def _sum_of_roots(looks: Sequence[int]) -> float:
    """Return the sum of sqrt(n / last look) over all looks: the probability that some look errs is at most this times q."""
    return sum(math.sqrt(n / looks[-1]) for n in looks)


def _interpolate(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the value at x of the curve through falling points (xs, ys), straight between points in logarithms of both."""
    import numpy as np

    return float(np.exp(np.interp(math.log(x), np.log(xs[::-1]), np.log(ys[::-1]))))


# Planning and replication


def planned(v: Variance, seeds: int, images: int | None = None) -> Variance:
    """Return the variances that are expected for another number of seeds and, if given, of test images."""
    images = images or v.images
    more_seeds, more_images = v.seeds / seeds, v.images / images
    rest = v.rest * more_seeds * more_images
    return Variance(
        seeds,
        images,
        over_seeds=max(0.0, v.over_seeds - v.rest) * more_seeds + rest,
        over_images=max(0.0, v.over_images - v.rest) * more_images + rest,
        rest=rest,
        n_eff=v.n_eff / more_images,
        bound=v.bound,
    )


def expected_variance(v: Variance, seeds: int, images: int | None = None) -> float:
    """Return the variance of the mean paired difference that is expected for another number of seeds and, if given, of test
    images.
    """
    p = planned(v, seeds, images)
    return p.over_seeds + p.over_images - p.rest


def standard_error(v: Variance, overlap: float = 0.0) -> float:
    """Return the standard error of a mean paired difference for new seeds and new test images."""
    return math.sqrt(v.over_seeds * (1 + v.seeds * overlap) + max(0.0, v.over_images - v.rest))


def replication(mean: float, v: Variance, *, level: float = LEVEL, seeds: int | None = None, overlap: float = 0.0) -> float:
    """Return the probability that a repetition with fresh seeds and as many new test images gives the same verdict again.

    The true effect is unknown, so it is averaged over what the observed mean and its standard error make likely (a flat prior).
    This is an upper estimate if effects are small. A p-value equal to the level gives 50%.

    level: significance level of the verdict
    seeds: number of fresh seeds; the default is the number that was observed
    """
    from scipy.special import stdtr

    again = v if seeds in (None, v.seeds) else planned(v, seeds)
    spread_of_both = math.hypot(standard_error(v, overlap), standard_error(again, overlap))
    missing = half_width(again, level, overlap=overlap) - abs(mean)
    if spread_of_both <= TIE:
        return float(missing <= 0)
    return float(stdtr(v.seeds - 1, -missing / spread_of_both))


def seeds_to_replicate(
    mean: float, v: Variance, *, level: float = LEVEL, target: float = 0.9, overlap: float = 0.0
) -> int | None:
    """Return the smallest number of fresh seeds with which the same verdict comes out again with probability `target`. The
    result is at least six, and None if more seeds alone (up to 1,000) do not reach the target.
    """

    def enough(n: int) -> bool:
        return replication(mean, v, level=level, seeds=n, overlap=overlap) >= target

    low, high = MIN_PAIRS, 1000
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def detectable(v: Variance, *, level: float = LEVEL, power: float = 0.8, overlap: float = 0.0) -> float:
    """Return the smallest true difference that the two-part test would find with probability `power`.

    It is an approximation: half the interval plus a quantile of the t distribution times the standard error.
    """
    return half_width(v, level, overlap=overlap) + _t(2 * (1 - power), v.seeds - 1) * standard_error(v, overlap)


def more_images_needed(v: Variance, effect: float, *, level: float = LEVEL) -> bool:
    """Return whether no number of seeds would tell a difference of `effect` from zero on this number of test images."""
    between_images = max(0.0, v.over_images - v.rest)
    return _t(level, max(0.5, v.n_eff - 1)) * math.sqrt(between_images) >= abs(effect)


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


def tuning_loss(differences: Sequence[Any]) -> float:
    """Return the accuracy, as a fraction, that a choice among about 8 trials is expected to lose at most because trials are
    scored with noise: with few seeds, on few validation images.

    The loss is largest if the true accuracies of the trials differ about as much as the noise. It is 0.43 times the standard
    deviation of the noise of one trial.

    differences: for pairs of trials, an array (seeds, validation images) of right (1) or wrong (0) of one trial minus that of
    the other. The result is NaN without such pairs.

    Raises ValueError for fewer than two seeds or images.
    """
    squares = [standard_error(paired_variance(d)[1]) ** 2 for d in differences]
    return 0.43 * math.sqrt(fmean(squares) / 2) if squares else math.nan
