"""The learning curve of one arm (variant in a comparison): how its error falls with the number of training images, and the
expected gain from twice as many images.

The form of the true curve is unknown, and three numbers of images do not determine it. So the prediction is a Bayesian model
average: thousands of curves are drawn from a prior, and weighted by how well they agree with the runs. `error(n)` is
proportional to

    floor + (1 - floor) ((n + offset) / (largest + offset))^-exponent

- exponent: uniform from 0 to 1.5.
- floor: the share of the present error that no number of images removes. It is 0 for 45% of the curves, uniform between 0 and 1
  for another 45%, and 1 for 10%, for which more images have no effect.
- offset: a curve with an offset starts to fall late. It is 0 for half of the curves, and uniform between 0 and the largest
  number of images for the others.

The errors of real models do not follow these curves exactly. So each measured error may deviate from the curve by 2% of its
value (standard deviation). The fit does not use a log scale, so an error of 0 needs no special case.

The weights include the random variation between passes (or seeds) and between test images. So the 95% interval covers both, and
the uncertainty about the form. It was tested by simulation: tests/test_advise_statistics.py.

Limits  If the error falls faster and faster, for example if it is near chance for all numbers of images, the predicted gain is
        too small. New images are assumed to be like those in the folder, and the model and its training to stay the same.

Paper   Viering and Loog 2022 (forms of learning curves); Hoeting et al. 1999 (Bayesian model averaging).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smallvit.verdicts.statistics import FOLDS_FACTOR, LEVEL, critical_t, paired_variance

CURVES = 5000  # curves drawn from the prior
VARIANCES = 60  # values of the variance over passes for each curve, because few passes do not determine it
DRAWS = 10_000  # draws from the weighted average
INEXACT = 0.02  # standard deviation of a measured error from the curve, as a share of the error
NOTHING = 0.0005  # smaller gains are shown as 0.0 points
LITTLE = 0.01  # a gain below one point is little
MISFIT = 0.01  # below this p-value, no curve agrees with the runs
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
    """How the error of one arm (variant) falls with the number of training images, and the gain from twice as many images.

    measured   number of training images -> mean error, with its interval for new passes and new test images
    fitted     number of training images -> fitted or predicted error, with its interval. The numbers reach from the smallest
               measured one to `2 * now`, with some in between for a figure
    now        the present number of images
    gain       the error with `now` images minus the error with `2 * now` images
    outcome    "more": the interval of the gain excludes zero. "little": the whole interval is below one point. "unknown":
               neither. "misfit": no curve agrees with the runs, so the fit and the gain are not valid
    text       a sentence for the page
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
    """Whether twice as many images would bring more than a technique has brought.

    outcome      "images", "technique" or "unknown"
    difference   the gain from twice as many images, with the technique, minus the gain from the technique
    text         a sentence for the page
    """

    outcome: str
    difference: Estimate
    text: str


def learning_curve(
    accuracies: Mapping[int, Any], *, test_images: int | None = None, folds: bool = False, now: int | None = None
) -> LearningCurve:
    """Return the learning curve of one arm (variant), with the gain from twice as many images.

    The intervals are narrower if the results of single test images are given, because they show how strongly the errors at two
    numbers of training images are correlated.

    accuracies: dict from the number of training images of a run to its accuracies: a list with one accuracy (a fraction) for
    each pass or seed, or an array (passes, test images) that is 1 where an image was classified correctly and 0 elsewhere. All
    numbers of images need the same passes, in the same order, and the same test images
    test_images: the number of test images of a pass; needed if `accuracies` has no results of single images
    folds: True if a pass is a cross-validation, in which all folds share one set of images. The variance over test images is
    then multiplied by 1.6, as in `smallvit.verdicts.statistics.of_folds`
    now: the present number of images, such as all images of the folder; at least the largest number of training images (the
    default). The gain is that from `now` to `2 * now` images

    Raises ValueError for fewer than two numbers of images or two passes, and for values that are not accuracies.
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
    """Return whether twice as many images would bring more than a technique has brought: "images", "technique" or "unknown".

    Both gains are computed from the error rate of the arm with the technique. If this is too low by chance, the gain from the
    technique looks too large, and that from more images too small. So the widths of both intervals are added, which is valid
    for any correlation. For independent gains, the root of the sum of squares would be enough.

    curve: the learning curve of the arm with the technique
    name: the name of the technique on the page
    mean, low, high: the gain in accuracy from the technique, as a fraction, and its 95% interval. Without an interval (None),
    the outcome is "unknown"

    Raises ValueError if the gain is not in its interval.
    """
    if low is None or high is None:
        low, high = -1.0, 1.0
    if not low <= mean <= high:
        raise ValueError(f"the difference {mean} of {name!r} is outside its interval [{low}, {high}]; expected it inside")
    gain = curve.gain
    difference = Estimate(mean=gain.mean - mean, low=gain.low - high, high=gain.high - low)
    technique = Estimate(mean=mean, low=low, high=high).points.replace("-", "−")
    both = f"{gain.points} against {technique}"
    if curve.outcome == "misfit" or difference.low <= 0 <= difference.high:
        text = f"Whether twice as many images would bring more than {name} cannot be told from these runs."
        return ImagesOrTechnique(outcome="unknown", difference=difference, text=text)
    if difference.low > 0:
        text = f"Twice as many images ({2 * curve.now:,}) would bring more than {name} has brought: {both}."
        return ImagesOrTechnique(outcome="images", difference=difference, text=text)
    both = f"{technique} against {gain.points}"
    text = f"{name[:1].upper()}{name[1:]} has brought more than twice as many images ({2 * curve.now:,}) would: {both}."
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
    """The random variation of the mean errors.

    means            mean error at each number of training images
    passes, images   numbers of passes and of test images
    of_images        array (numbers, numbers): covariance of the means over the sampling of test images
    of_form          the same for the deviation of real errors from the form of the curve
    rest             the variance of a mean by the interaction of passes and test images, which `of_images` contains too
    common, single   sums of squares over passes: of the part that is common to all numbers of a pass, and of the rest
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
    """Return the random variation of the mean errors.

    Without the results of single images, the errors at two numbers of training images are treated as independent over test
    images. In fact they are correlated, so the interval is wider than necessary. In both cases, the variance of one image is
    added. Otherwise, zero errors among a few images would look like a certain error of 0.
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
    """Return the k-th mean error with its interval: the square root of the sum of squares of the intervals over passes and over
    test images. The variance over passes is assumed to be equal for all numbers of images.
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
    average over curves and levels, weighted by their agreement with the runs. The level of a curve is its error at the largest
    number of images. The p-value says how well the best curve agrees with the runs.

    The variances over passes are drawn from their distribution, given the sums of squares. For each of them, the level of each
    curve is fitted by weighted least squares. The prior of the mean error over the measured numbers of images is
    uniform, and the level is integrated out.
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
    variances, and the weighted residual sums of squares, each as an array (variances, curves).
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
