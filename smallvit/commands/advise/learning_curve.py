"""The learning curve of one arm (variant in a comparison): how its error falls with the number of training images, and how much
twice as many images would bring.

The true curve is unknown, and three numbers of images do not determine its form. So the prediction is an average over thousands
of curves that are plausible before the runs are seen, weighted by how well they agree with the runs (a Bayesian average over
models). `error(n)` is proportional to

    floor + (1 - floor) ((n + offset) / (largest + offset))^-exponent

- exponent: uniform from 0 to 1.5.
- floor: the share of the present error that no number of images removes. 45% of the curves have no floor, 45% have one between
  0 and 1 (uniform), and for 10% it is 1, so that more images bring nothing.
- offset: a curve with an offset starts to fall late. Half of the curves have none, and half have one between 0 and the largest
  number of images (uniform).

The errors of real models follow none of these curves exactly, so a curve may miss each measured error by 2% of it (standard
deviation). Measured errors are not put on a log scale, so an error of 0 needs no special case.

The weights use the chance in the passes (or seeds) and in the choice of the test images. The 95% interval therefore covers
both, and the uncertainty about the form. It was tested by simulation: tests/test_advise_statistics.py.

Limits  A curve whose error falls faster and faster is predicted too low, for example one that is near chance at all numbers of
        images. New images are taken to be like those in the folder, and the model and its training to stay the same.

Paper   Viering and Loog 2022 (forms of learning curves); Hoeting et al. 1999 (Bayesian model averaging).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smallvit.verdicts.statistics import FOLDS_FACTOR, LEVEL, critical_t, paired_variance

CURVES = 5000  # plausible curves
VARIANCES = 60  # values of the variance over passes for each curve, because few passes do not determine it
DRAWS = 10_000  # of the weighted average
INEXACT = 0.02  # share of a measured error by which a curve may miss it (standard deviation)
NOTHING = 0.0005  # a gain that is shown as 0.0 points
LITTLE = 0.01  # a gain below one point is little
MISFIT = 0.01  # p-value below which no curve agrees with the runs
BETWEEN = 4  # fitted values for each doubling of the number of images, for a figure


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 95% interval. Errors and their differences are fractions, so 0.01 is one point.

    mean        the estimate
    low, high   ends of the interval
    """

    mean: float
    low: float
    high: float

    @property
    def points(self) -> str:
        """The estimate in points, as text: `2.1 points [0.4, 3.5]`."""
        return f"{100 * self.mean:.1f} points [{100 * self.low:.1f}, {100 * self.high:.1f}]"


@dataclass(frozen=True, kw_only=True)
class LearningCurve:
    """How the error of one arm (variant) falls with the number of training images, and what twice as many images would bring.

    measured   number of training images -> mean error, with its interval for new passes and new test images
    fitted     number of training images -> fitted or predicted error, with its interval. The numbers reach from the smallest
               measured one to `2 * now`, with some in between for a figure
    now        the number of images of which the gain is counted
    gain       by how much the error at `2 * now` images is smaller than at `now` images
    outcome    "more": the interval of the gain leaves out zero. "little": the gain is below one point. "unknown": neither is
               shown. "misfit": no plausible curve agrees with the runs, so the fit and the gain mean nothing
    text       a sentence for a page
    """

    measured: dict[int, Estimate]
    fitted: dict[int, Estimate]
    now: int
    gain: Estimate
    outcome: str
    text: str

    @property
    def twice(self) -> Estimate:
        """The predicted error with twice as many images."""
        return self.fitted[2 * self.now]


@dataclass(frozen=True, kw_only=True)
class ImagesOrTechnique:
    """Whether twice as many images or a technique brings more.

    outcome      "images", "technique" or "unknown"
    difference   the gain from twice as many images minus the gain from the technique
    text         a sentence for a page
    """

    outcome: str
    difference: Estimate
    text: str


def learning_curve(
    accuracies: Mapping[int, Any], *, test_images: int | None = None, folds: bool = False, now: int | None = None
) -> LearningCurve:
    """Return the learning curve of one arm (variant), with the gain from twice as many images.

    The intervals are narrower if the results of single test images are given, because it is then known how alike the errors at
    two numbers of training images are.

    accuracies: dict from the number of training images of a run to its accuracies. They are a list with one accuracy, as a
    fraction, for each pass or seed, or an array (passes, test images) that is 1 where an image was classified correctly and
    else 0. Every number of images needs the same passes, in the same order, and the same test images
    test_images: the number of test images of a pass; needed if `accuracies` has no results of single images
    folds: True if a pass is a cross-validation, in which all folds share one set of images. The variance over test images is
    then multiplied by 1.6, as in `smallvit.verdicts.statistics.of_folds`
    now: the number of images of which the gain is counted, such as all images of the folder; at least the largest number of
    training images (the default). The gain is for `2 * now` images

    Raises ValueError for fewer than two numbers of images or two passes, and for values that are no accuracies.
    """
    numbers, values, images = _checked(accuracies, test_images)
    largest, now = numbers[-1], now if now is not None else numbers[-1]
    if now < largest:
        raise ValueError(f"now={now}; expected at least {largest}, the largest number of training images")
    noise = _noise(values, images, FOLDS_FACTOR if folds else 1.0)
    line = [round(numbers[0] * 2 ** (step / BETWEEN)) for step in range(math.floor(BETWEEN * math.log2(2 * now / numbers[0])))]
    shown = sorted({*line, *numbers, now, 2 * now})
    drawn, p = _average(numbers, values, noise, shown)
    gain = _estimate(drawn[:, shown.index(now)] - drawn[:, shown.index(2 * now)])
    outcome, text = _sentence(gain, now, p)
    return LearningCurve(
        measured={n: _measured(mean, noise, k) for k, (n, mean) in enumerate(zip(numbers, noise.means))},
        fitted={n: _estimate(drawn[:, k]) for k, n in enumerate(shown)},
        now=now,
        gain=gain,
        outcome=outcome,
        text=text,
    )


def images_or_technique(
    curve: LearningCurve, name: str, mean: float, low: float | None, high: float | None
) -> ImagesOrTechnique:
    """Return whether twice as many images or a technique brings more.

    The two intervals are combined as if their errors were independent. Both contain the error of the present arm, so that an
    error in it moves both in the same direction, and the interval of their difference is rather too wide.

    curve: the learning curve of the arm without the technique
    name: the technique, as it is called on the page
    mean, low, high: the difference in accuracy that the technique brings, as a fraction, and its 95% interval; None: there is
    no interval, so nothing is decided

    Raises ValueError if the difference is not in its interval.

    Paper  Zou and Donner 2008 (the combination of two intervals).
    """
    if low is None or high is None:
        low, high = -1.0, 1.0
    if not low <= mean <= high:
        raise ValueError(f"the difference {mean} of {name!r} is outside its interval [{low}, {high}]; expected it inside")
    gain = curve.gain
    middle = gain.mean - mean
    difference = Estimate(
        mean=middle,
        low=middle - math.hypot(gain.mean - gain.low, high - mean),
        high=middle + math.hypot(gain.high - gain.mean, mean - low),
    )
    technique = Estimate(mean=mean, low=low, high=high).points.replace("-", "−")
    both = f"{gain.points} against {technique}"
    if curve.outcome == "misfit" or difference.low <= 0 <= difference.high:
        text = f"Whether {name} or twice as many images would bring more cannot be told from these runs."
        return ImagesOrTechnique(outcome="unknown", difference=difference, text=text)
    if difference.low > 0:
        text = f"Twice as many images ({2 * curve.now:,}) would bring more than {name}: {both}."
        return ImagesOrTechnique(outcome="images", difference=difference, text=text)
    both = f"{technique} against {gain.points}"
    text = f"{name[:1].upper()}{name[1:]} brings more than twice as many images ({2 * curve.now:,}) would: {both}."
    return ImagesOrTechnique(outcome="technique", difference=difference, text=text)


# The runs and their noise


def _checked(accuracies: Mapping[int, Any], test_images: int | None) -> tuple[list[int], Any, int]:
    """Return the numbers of training images in rising order, an array (numbers, passes) of errors or (numbers, passes, images)
    of wrong classifications, and the number of test images.
    """
    import numpy as np

    numbers = sorted(accuracies)
    if len(numbers) < 2 or numbers[0] < 1:
        raise ValueError(f"accuracies for {numbers} training images; expected at least two numbers of images from 1 on")
    rows = [np.asarray(accuracies[n], dtype=float) for n in numbers]
    shapes = {row.shape for row in rows}
    if len(shapes) > 1 or rows[0].ndim not in (1, 2) or len(rows[0]) < 2:
        found = ", ".join(f"{n}: {row.shape}" for n, row in zip(numbers, rows))
        raise ValueError(
            f"accuracies of shape {found}; expected the same for all numbers of images: at least two passes, or an array "
            "(passes, test images)"
        )
    values = 1 - np.stack(rows)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("a value is not between 0 and 1; expected accuracies as fractions, and no missing values")
    images = values.shape[2] if values.ndim == 3 else test_images
    if images is None or images < 2:
        raise ValueError(f"test_images={images}; expected the number of test images, at least 2, or results of single images")
    return numbers, values, images


@dataclass(frozen=True)
class _Noise:
    """The chance in the mean errors.

    means            mean error at each number of training images
    passes, images   numbers of passes and of test images
    of_images        array (numbers, numbers): covariance of the means over the choice of the test images
    of_form          the same for the errors of the form of the curve
    rest             the variance of a mean over passes that `of_images` contains, too: what passes and images do to each other
    common, single   sums of squares over passes: of what all numbers of a pass have in common, and of the rest
    """

    means: Any
    passes: int
    images: int
    of_images: Any
    of_form: Any
    rest: float
    common: float
    single: float

    @property
    def df(self) -> tuple[int, int]:
        """Degrees of freedom of `common` and of `single`."""
        return self.passes - 1, (self.passes - 1) * (len(self.means) - 1)

    def covariance(self, common: Any, single: Any) -> Any:
        """Return the covariance of the means, as an array (..., numbers, numbers). `common` and `single` are the mean squares
        over passes, as arrays (...).
        """
        import numpy as np

        size = len(self.means)
        shared = np.maximum(0, common - single) / size / self.passes
        own = np.maximum(0, single / self.passes - self.rest)
        fixed = self.of_images + self.of_form
        return fixed + own[..., None, None] * np.eye(size) + shared[..., None, None] * np.ones((size, size))


def _noise(values: Any, images: int, factor: float) -> _Noise:
    """Return the chance in the mean errors.

    Without the results of single images, the errors at two numbers of training images count as independent. They are alike in
    truth, and this makes the prediction more certain, so the interval is too wide rather than too narrow. In both cases, the
    variance of one image is added, so that no error among few images is not taken for an error that is surely 0.
    """
    import numpy as np

    errors = values.mean(2) if values.ndim == 3 else values
    means, (size, passes) = errors.mean(1), errors.shape
    deviations = errors - means[:, None]
    common, total = size * float((deviations.mean(0) ** 2).sum()), float((deviations**2).sum())
    of_images, rest = np.diag(means * (1 - means)), 0.0
    if values.ndim == 3:
        of_images = np.cov(values.mean(1))
        rest = float(np.mean([paired_variance(of_number)[1].rest for of_number in values]))
    return _Noise(
        means,
        passes,
        images,
        factor * of_images / images + np.eye(size) / images**2,
        np.diag((INEXACT * means) ** 2),
        rest,
        common,
        max(0.0, total - common),
    )


def _measured(mean: float, noise: _Noise, k: int) -> Estimate:
    """Return the k-th mean error with its interval: that over passes, with the interval over test images as the second side of
    a right triangle. All numbers of images count as equally variable over passes.
    """
    df = sum(noise.df)
    over_passes = critical_t(LEVEL, df) ** 2 * (noise.common + noise.single) / df / noise.passes
    half = math.sqrt(over_passes + critical_t(LEVEL, noise.images - 1) ** 2 * noise.of_images[k, k])
    return Estimate(mean=float(mean), low=max(0.0, float(mean) - half), high=min(1.0, float(mean) + half))


# Plausible curves


def _shapes(numbers: Sequence[int], largest: int, exponents: Any, floors: Any, offsets: Any) -> Any:
    """Return the errors of curves as an array (curves, numbers), divided by the error at the largest number of images."""
    import numpy as np

    relative = (np.asarray(numbers) / largest + offsets[:, None]) / (1 + offsets[:, None])
    return floors[:, None] + (1 - floors[:, None]) * relative ** -exponents[:, None]


def _average(numbers: Sequence[int], values: Any, noise: _Noise, shown: Sequence[int]) -> tuple[Any, float]:
    """Return errors at the numbers of images `shown`, as an array (draws, numbers), and a p-value. The draws come from the
    average over plausible curves, each at all levels, weighted by their agreement with the runs. The p-value says how well the
    best curve agrees with the runs.

    The variances over passes are drawn from their distribution given the sums of squares. For each of them, all curves are
    fitted by weighted least squares, which has one unknown: the level. A uniform distribution of the level is integrated.
    """
    import numpy as np
    from scipy.stats import f

    random = np.random.default_rng(0)  # the same runs always give the same answer
    exponents, floors, offsets = random.uniform(0, (1.5, 1, 1), (CURVES, 3)).T
    kind = random.random(CURVES)
    floors = np.where(kind < 0.45, 0.0, np.where(kind < 0.9, floors, 1.0))
    offsets = np.where(random.random(CURVES) < 0.5, 0.0, offsets)
    shapes = _shapes(numbers, numbers[-1], exponents, floors, offsets)

    common_df, single_df = noise.df
    common = noise.common / random.chisquare(common_df, VARIANCES)
    single = noise.single / random.chisquare(single_df, VARIANCES)
    precision = np.linalg.inv(noise.covariance(common, single))
    level, information, distance = _fit(noise.means, shapes, precision)
    log_weights = (np.linalg.slogdet(precision)[1][:, None] - distance - np.log(information)) / 2 + np.log(shapes.mean(1))
    weights = np.exp(log_weights - log_weights.max()).ravel()
    picked = random.choice(len(weights), DRAWS, p=weights / weights.sum())
    variance, curve = np.divmod(picked, CURVES)
    levels = level[variance, curve] + random.standard_normal(DRAWS) / np.sqrt(information[variance, curve])
    all_shapes = _shapes(shown, numbers[-1], exponents, floors, offsets)
    drawn = np.clip(levels, 0, 1)[:, None] * all_shapes[curve]

    expected = noise.covariance(np.array(noise.common / common_df), np.array(noise.single / single_df))
    best = float(_fit(noise.means, shapes, np.linalg.inv(expected)[None])[2].min())
    return np.minimum(drawn, 1), float(f.sf(best / (len(numbers) - 1), len(numbers) - 1, single_df))


def _fit(means: Any, shapes: Any, precision: Any) -> tuple[Any, Any, Any]:
    """Fit the level of each curve to the mean errors by weighted least squares. Return the levels, the inverse of their
    variances, and the weighted sums of squares that are left, each as an array (variances, curves).
    """
    squares = (shapes[:, :, None] * shapes[:, None, :]).reshape(len(shapes), -1)
    information = precision.reshape(len(precision), -1) @ squares.T
    weighted = precision @ means
    products = weighted @ shapes.T
    return products / information, information, (weighted @ means)[:, None] - products**2 / information


def _estimate(drawn: Any) -> Estimate:
    """Return the mean of draws and the interval that contains 95% of them."""
    import numpy as np

    low, high = np.quantile(drawn, (LEVEL / 2, 1 - LEVEL / 2))
    return Estimate(mean=float(drawn.mean()), low=float(low), high=float(high))


def _sentence(gain: Estimate, now: int, p: float) -> tuple[str, str]:
    """Return the outcome and a sentence for a page."""
    more = f"wice as many images ({2 * now:,} in place of {now:,}) would bring"
    unknown = "How much more images would bring cannot be told from these runs"
    if p < MISFIT:
        return "misfit", f"{unknown}: the error does not fall with the number of images as learning curves do."
    if gain.low >= NOTHING:
        return "more", f"T{more} about {gain.points}."
    if gain.high < LITTLE:
        return "little", f"T{more} at most {max(0.1, 100 * gain.high):.1f} points."
    return "unknown", f"{unknown}: t{more} between 0 and {100 * gain.high:.1f} points."
