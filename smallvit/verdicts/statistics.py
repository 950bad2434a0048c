"""Statistics of a comparison of two arms: intervals and p-values over seeds and test images, Holm's correction, replication
and the planning of further seeds.

Accuracies and their differences are fractions, so 0.01 is one point. The simulated error rates of these methods are tested by
tests/test_verdict_rates.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

LEVEL = 0.05  # probability of at least one false verdict in a recipe
TIE = 1e-9  # a smaller spread is rounding error, because accuracies are counts of images
MIN_PAIRS = 6  # with five pairs, even five wins have p = 0.0625 in a sign-flip test
MIN_IMAGES = 6  # the same holds for test images
EQUIVALENCE = 0.005  # an effect within half a point is too small to matter
FOLDS_FACTOR = 1.6  # of the variance over images in a cross-validation: all folds share the same images


# Single arms and families of comparisons


def spread(values: Sequence[float]) -> tuple[float | None, float | None, float | None, float | None]:
    """Return a tuple of four numbers: the mean of the values, their standard deviation (with divisor n - 1), and the lower and
    upper end of the 95% t interval of the mean.

    All four are None for no values; the last three are None for a single value.
    """
    if len(values) < 2:
        return (values[0] if values else None), None, None, None
    mean, sd = fmean(values), stdev(values)
    half = critical_t(0.05, len(values) - 1) * sd / math.sqrt(len(values))
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
    """Return the smallest rate of collapse (share of runs whose training fails) that is excluded with 95% confidence if none of
    `seeds` runs collapsed. For 8 seeds it is 0.31.
    """
    return 1 - 0.05 ** (1 / seeds)


# The variance of a paired difference


@dataclass(frozen=True)
class Variance:
    """Estimated variances of the mean difference in accuracy between two arms (variants in a comparison), which are run with
    the same seeds and tested on the same images. One part comes from the choice of the seeds, the other part from the choice of
    the test images.

    The unbiased variance of the mean is `over_seeds + over_images - rest`.

    seeds, images: numbers of paired seeds and of test images
    over_seeds: squared standard error when new seeds are drawn and the test images stay the same
    over_images: squared standard error when new test images are drawn and the trained models stay the same
    rest: the part that both of them contain, from what seeds and images do to each other
    n_eff: effective number of test images, which is small if few images tell the arms apart
    bound: True if `over_images` is an upper bound because it is not recorded which images each run classified correctly
    unseen: True if no test image tells the arms apart, so that `over_images` is a bound for rare images that do
    df: degrees of freedom of `over_seeds`; None: `seeds` - 1
    """

    seeds: int
    images: int
    over_seeds: float
    over_images: float
    rest: float
    n_eff: float
    bound: bool = False
    unseen: bool = False
    df: float | None = None

    @property
    def freedom(self) -> float:
        """The degrees of freedom of the t distribution of the part over seeds: `df`, or `seeds` - 1."""
        return self.seeds - 1 if self.df is None else self.df


def paired_variance(d: Any) -> tuple[float, Variance]:
    """Return the mean of a table of differences between two arms (variants) and its estimated `Variance`. `d` is an array of
    shape (seeds, test images). Its values are 1 where only the arm classifies the image correctly, -1 where only its control
    (the arm it is compared with) does, and 0 otherwise. Other scores that are means over images are allowed.

    The variances are the mean squares of a two-way analysis of variance without replication.

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


def in_groups(d: Any, groups: Sequence[int]) -> Any:
    """Return the differences of groups of test images in place of those of single images, as an array (seeds, groups). `d` is
    an array (seeds, test images) of paired differences, and `groups` has the number of the group of each image, such as a
    patient. Images of a group are alike, so the groups are the independent units.

    The value of a group is the sum over its images, times the number of groups, divided by the number of images. So the mean
    over groups is the mean over images. With an unequal number of images in each group, such sums would differ even if all
    images were equal. So the group also gets the mean of all images for each image that it has fewer than an average group, and
    loses it for each further one, in the same unit. This keeps the mean over groups, up to rounding.

    Paper     Cochran 1977, Sampling Techniques, section 6.3 (the variance of a ratio estimator).
    """
    import numpy as np

    d, numbers = np.asarray(d, dtype=float), np.unique(groups, return_inverse=True)[1]
    sums, sizes = np.stack([np.bincount(numbers, row) for row in d]), np.bincount(numbers)
    unit = len(sizes) / d.shape[1]
    return sums * unit - d.mean() * (sizes * unit - 1)


def of_groups(v: Variance, groups: Sequence[int]) -> Variance:
    """Return the `Variance` of a mean difference over groups of test images of unequal sizes. `v` is the estimate from the
    values of the groups, which `in_groups` returns, and `groups` has the number of the group of each image.

    A group with most of the images almost is the mean, so its own deviation from the mean vanishes. With the shares w of the
    groups, there are at most 1 / sum(w²) effective groups, and the part over images is divided by 1 - sum(w²) in place of
    1 - 1 / (number of groups). For groups of equal size nothing changes.
    """
    import numpy as np

    sizes = np.unique(groups, return_counts=True)[1]
    squares = float(((sizes / sizes.sum()) ** 2).sum())
    if squares >= 1:
        return v
    factor = (1 - 1 / len(sizes)) / (1 - squares)
    return replace(v, n_eff=min(v.n_eff, 1 / squares), over_images=factor * v.over_images)


def without_differences(v: Variance, largest: float = 1.0) -> Variance:
    """Return the `Variance` of a mean difference of two scores if no test image tells the arms apart. `v` is the estimate,
    which is 0: it says nothing about images that differ, but are rare. The part over images becomes an upper bound, so that the
    95% interval reaches as far as Wilson's interval of a share of which 0 of the test images were seen: about 3.8 / images,
    times `largest`, the largest value of an image. That is 1 for an accuracy.
    """
    z = critical_t(LEVEL, math.inf)
    return replace(v, over_images=(largest * z / (v.images + z**2)) ** 2, unseen=True)


def of_folds(v: Variance) -> Variance:
    """Return the `Variance` of a mean difference whose test images come from a cross-validation. `v` is the estimate from the
    pooled results of the folds, with a pass over all images as a seed. Its part over images is multiplied by 1.6.

    All folds share one set of images, both for training and for testing. The variance over such sets is 1.05 to 1.6 times the
    part over images, for five kinds of classifiers in simulations with real training.
    """
    return replace(v, over_images=FOLDS_FACTOR * v.over_images)


def of_few_passes(v: Variance, d: Any, folds: Any) -> Variance:
    """Return the `Variance` of a mean difference in a cross-validation with few passes over all images, with a part over seeds
    that is estimated from the single folds. `d` is the array (passes, images) of paired differences, `folds` has the same shape
    and says in which fold each image was tested, and `v` is the estimate from the means of the passes.

    Two or three passes say little about the chance in training again, but there are k times as many folds as passes. From the
    differences of each image, their mean over all passes is subtracted. Without chance in training, nothing would be left. What
    is left in a fold of n images has the mean z, and n z² estimates how much the difference of one image varies by chance in
    training. The sum over all folds is divided by its (passes - 1) k degrees of freedom, and then by passes times images.

    The mean over all passes contains some of the chance, too. If single images vary independently, the degrees of freedom count
    this exactly. If all images of a fold vary together, with their model, too much is subtracted: only the share 1 - 1/passes +
    c/passes of the variance is left, where c is the sum of the squared shares that a fold has in the folds of another pass. So
    what exceeds the variance of single images (`rest`) is divided by this share.

    The part over images stays. With images in groups, the columns of `d` are groups, as `in_groups` returns them.
    """
    import numpy as np

    d, folds = np.asarray(d, dtype=float), np.asarray(folds)
    passes, k = len(d), int(folds.max()) + 1
    member = (folds[:, None, :] == np.arange(k)[:, None]).astype(float)  # (passes, folds, images)
    counts = np.maximum(member.sum(2), 1)
    sums = np.einsum("pfi,pi->pf", member, d - d.mean(0))
    df = (passes - 1) * k
    over_seeds = float((sums**2 / counts).sum()) / df / d.size
    shares = np.einsum("pfi,qgi->pfqg", member, member) / counts[:, :, None, None]
    squares = (shares**2).sum(3).mean(1)  # (passes, passes)
    c = (squares.sum() - np.trace(squares)) / (passes * (passes - 1))
    left = 1 - 1 / passes + c / passes
    return replace(v, over_seeds=over_seeds + (1 / left - 1) * max(0.0, over_seeds - v.rest), df=df)


def variance_bound(values: Sequence[float], errors: float, images: int) -> Variance:
    """Return the estimated `Variance` of the mean difference in accuracy between two arms (variants). `values` are the
    differences of the seeds, `errors` is the sum of the mean error rates of both arms, and `images` is the number of test
    images. The part over test images is an upper bound. It is used for old records, which do not say which images were
    classified correctly.

    Two arms differ on at most as many images as both together classify wrongly, which gives the bound.

    Raises ValueError for fewer than two seeds or images.
    """
    if len(values) < 2 or images < 2:
        raise ValueError(f"{len(values)} seeds and {images} test images; allowed are at least two of each")
    over_seeds = stdev(values) ** 2 / len(values)
    return Variance(len(values), images, over_seeds, errors / (images - 1), rest=0.0, n_eff=float(images), bound=True)


# Intervals and p-values


def half_width(v: Variance, level: float, *, overlap: float = 0.0) -> float:
    """Return half the width of the confidence interval of the mean difference between two arms (variants), for new seeds and
    new test images. `v` is the `Variance` (estimated variances) of the difference, and `level` is 1 minus the confidence, for
    example 0.05. `overlap` is n / (m - n) if each seed draws n of m labelled images, and 0 if seeds share no training images:
    the results of two seeds correlate by the share n/m of images that both use.

    The interval over seeds alone is one side of a right triangle, the part over test images is the other side, and the result
    is the hypotenuse. Equal arms of accuracy 0.6 to 0.995 were told apart in 3.8 to 4.4% of simulated comparisons at level 5%.

    Paper     Zou and Donner 2008 (the combination of two intervals, "MOVER"); Nadeau and Bengio 2003 (overlap).
    """
    t_images = critical_t(level, max(0.5, v.n_eff - 1))
    seeds_part = critical_t(level, v.freedom) ** 2 * v.over_seeds * (1 + v.seeds * overlap)
    images_part = t_images**2 * max(0.0, v.over_images - v.rest)
    return math.sqrt(max(seeds_part + images_part, t_images**2 * v.over_images))


def two_part_p(mean: float, v: Variance, *, overlap: float = 0.0) -> float | None:
    """Return the p-value of a mean difference between two arms (variants), for new seeds and new test images. It is the level
    at which one end of the confidence interval is zero. `mean` is the difference, and `v` is its `Variance` (estimated
    variances). `overlap` says how strongly the training images of two seeds overlap, as in `half_width`.

    The result is None if no verdict is possible: fewer than six seeds (five degrees of freedom) or six test images, fewer than
    two effective test images, or the same difference, other than zero, for every seed.
    """
    constant = math.sqrt(v.seeds * v.over_seeds) <= TIE
    if v.freedom < MIN_PAIRS - 1 or v.images < MIN_IMAGES or v.n_eff < 2 or (constant and abs(mean) > TIE):
        return None
    if constant:
        return 1.0
    return _crossing(abs(mean), lambda level: half_width(v, level, overlap=overlap))


def seeds_half_width(v: Variance, level: float) -> float:
    """Return half the width of the paired t interval of a mean difference over seeds. The interval covers the chance in the
    seeds, and not the chance in the choice of the test images. `v` is the `Variance` (estimated variances) of the difference,
    and `level` is 1 minus the confidence.
    """
    return critical_t(level, v.freedom) * math.sqrt(v.over_seeds)


def seeds_p(mean: float, v: Variance) -> float | None:
    """Return the p-value of the paired t-test over seeds for a mean difference between two arms (variants). It is about new
    seeds on the same test images. `mean` is the difference, and `v` is its `Variance` (estimated variances). The result is None
    if all seeds have the same difference, other than zero.
    """
    from scipy.special import stdtr

    if math.sqrt(v.seeds * v.over_seeds) <= TIE:
        return None if abs(mean) > TIE else 1.0
    return float(2 * stdtr(v.freedom, -abs(mean) / math.sqrt(v.over_seeds)))


def wilson(share: float, count: float, level: float = LEVEL) -> tuple[float, float]:
    """Return Wilson's confidence interval of a share, as a tuple (low, high). `share` is the observed share of `count`
    independent units, such as test images, and `level` is 1 minus the confidence. Also an observed share of 0 or 1 has an
    interval with a width above 0.

    Paper     Wilson 1927.
    """
    z = critical_t(level, math.inf)
    middle, scale = share + z**2 / (2 * count), 1 + z**2 / count
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return (middle - half) / scale, (middle + half) / scale


def critical_t(level: float, df: float) -> float:
    """Return the critical value of a two-sided t-test: |t| exceeds it with probability `level` by chance."""
    from scipy.special import stdtrit

    return -float(stdtrit(df, level / 2))


def _crossing(value: float, falling: Callable[[float], float]) -> float:
    """Return the significance level, between 1e-100 and 1, at which the function `falling` has the value `value`. The function
    takes a level and returns, for example, half the width of the confidence interval at this level. It falls when the level
    rises.
    """
    from scipy.optimize import brentq

    if falling(1e-100) <= value:
        return 1e-100
    if falling(1.0) >= value:
        return 1.0
    return math.exp(float(brentq(lambda x: falling(math.exp(x)) - value, math.log(1e-100), 0.0, xtol=1e-13)))  # type: ignore


# Planning and replication


def planned(v: Variance, seeds: int, images: int | None = None) -> Variance:
    """Return the `Variance` object that a mean difference would have with `seeds` seeds and `images` test images (None: as many
    as now). `v` is its `Variance` now, an object with one variance over seeds and one over test images. Both are scaled to the
    new numbers.
    """
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
        unseen=v.unseen,
        df=None if v.df is None else v.df * (seeds - 1) / (v.seeds - 1),
    )


def standard_error(v: Variance, overlap: float = 0.0) -> float:
    """Return the standard error of the mean difference between two arms (variants), for new seeds and new test images. `v` is
    the `Variance` (estimated variances) of the difference. `overlap` says how strongly the training images of two seeds
    overlap: n / (m - n) if each seed draws n of m labelled images, else 0.
    """
    return math.sqrt(v.over_seeds * (1 + v.seeds * overlap) + max(0.0, v.over_images - v.rest))


def replication(mean: float, v: Variance, *, level: float = LEVEL, seeds: int | None = None, overlap: float = 0.0) -> float:
    """Return the probability that a repetition with `seeds` new seeds (None: as many as before) and as many new test images
    gives the same verdict again. `mean` is the mean difference between two arms (variants), and `v` is its `Variance`
    (estimated variances). `level` is the significance level, and `overlap` says how strongly the training images of two seeds
    overlap.

    The true effect is unknown, so it is averaged over what the observed mean and its standard error make likely (a flat prior).
    This is an upper estimate if effects are small. A p-value equal to the level gives 50%.
    """
    from scipy.special import stdtr

    again = v if seeds in (None, v.seeds) else planned(v, seeds)
    spread_of_both = math.hypot(standard_error(v, overlap), standard_error(again, overlap))
    missing = half_width(again, level, overlap=overlap) - abs(mean)
    if spread_of_both <= TIE:
        return float(missing <= 0)
    return float(stdtr(v.freedom, -missing / spread_of_both))


def seeds_to_replicate(
    mean: float, v: Variance, *, level: float = LEVEL, target: float = 0.9, overlap: float = 0.0
) -> int | None:
    """Return the smallest number of new seeds with which a repetition gives the same verdict with 90% probability (option
    `target`), and None if 1,000 seeds are not enough. `mean` is the mean difference between two arms (variants), and `v` is its
    `Variance` (estimated variances). `level` is the significance level, and `overlap` says how strongly the training images of
    two seeds overlap.

    The result is at least six. More seeds alone may not be enough, because the test images vary, too.
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
    """Return the smallest true difference between two arms (variants) that the test for new seeds and new test images would
    find with 80% probability (option `power`). `v` is the `Variance` (estimated variances) of the observed difference. `level`
    is the significance level, and `overlap` says how strongly the training images of two seeds overlap.

    It is an approximation: half the interval plus a quantile of the t distribution times the standard error.
    """
    return half_width(v, level, overlap=overlap) + critical_t(2 * (1 - power), v.freedom) * standard_error(v, overlap)


def limit_of_seeds(v: Variance, effect: float, *, level: float = LEVEL, overlap: float = 0.0) -> str:
    """Return what is needed besides more seeds to show a difference of the size `effect` between two arms (variants): "images"
    (more test images), "pool" (more images from which each seed draws its training images) or "" (more seeds are enough). `v`
    is the `Variance` (estimated variances) of the observed difference. `level` is the significance level, and `overlap` says
    how strongly the training images of two seeds overlap.

    It is computed for infinitely many seeds. Of two reasons, the one with the larger variance is returned.
    """
    images = critical_t(level, max(0.5, v.n_eff - 1)) ** 2 * max(0.0, v.over_images - v.rest)
    pool = critical_t(level, math.inf) ** 2 * v.over_seeds * v.seeds * overlap
    if math.sqrt(images + pool) < abs(effect):
        return ""
    return "images" if images >= pool else "pool"


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
    """Return the accuracy, as a fraction, that tuning loses at most on average because trials are scored with noise, so that
    not the best one is chosen. Each item of `differences` is for two trials: an array (seeds, validation images) of right (1)
    or wrong (0) of the first trial minus that of the second. The formula is for 8 trials, the default of `Tune`. The result is
    NaN if there are no items.

    The noise comes from few seeds and few validation images.

    The loss is largest if the true accuracies of the trials differ about as much as the noise. It is 0.43 times the standard
    deviation of the noise of one trial.

    Raises ValueError for fewer than two seeds or images.
    """
    squares = [standard_error(paired_variance(d)[1]) ** 2 for d in differences]
    return 0.43 * math.sqrt(fmean(squares) / 2) if squares else math.nan
