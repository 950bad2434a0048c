"""Nadeau and Bengio's test: paired differences over the single folds of a cross-validation."""

import math
from dataclasses import dataclass, replace

from .statistics import TIE, critical_t


@dataclass(frozen=True)
class FoldVariance:
    """The variance of the mean of paired differences over single folds of a cross-validation, and functions of it. It is used
    for one pass over all images, and for few passes of 2 or 3 folds: too few for the interval over passes and images.

    The runs of different folds share training images, so their differences vary less than those of independent runs. Nadeau and
    Bengio's correction replaces the factor 1/J of the variance by 1/J + 1/(k - 1). The t distribution has J - 1 degrees of
    freedom.

    sd     standard deviation of the differences of the single folds, with divisor J - 1
    runs   number J of differences: number of passes times number of folds
    folds  number k of folds

    Paper     Nadeau and Bengio 2003.
    """

    sd: float
    runs: int
    folds: int

    @property
    def standard_error(self) -> float:
        """The standard error of the mean difference, for new runs and new images."""
        return self.sd * math.sqrt(1 / self.runs + 1 / (self.folds - 1))

    def half_width(self, level: float) -> float:
        """Return half the width of the confidence interval. `level` is 1 minus the confidence, for example 0.05."""
        return critical_t(level, self.runs - 1) * self.standard_error

    def p(self, mean: float) -> float | None:
        """Return the p-value of the mean difference `mean`, and None if all folds have the same difference, other than zero."""
        from scipy.special import stdtr

        if self.sd <= TIE:
            return None if abs(mean) > TIE else 1.0
        return float(2 * stdtr(self.runs - 1, -abs(mean) / self.standard_error))

    def detectable(self, level: float, power: float = 0.8) -> float:
        """Return the smallest true difference that this test would find with the probability `power`. `level` is the
        significance level.
        """
        return self.half_width(level) + critical_t(2 * (1 - power), self.runs - 1) * self.standard_error

    def replication(self, mean: float, level: float, passes: int | None = None) -> float:
        """Return the probability that a repetition with `passes` new passes (None: as many as before) over as many new images
        gives the same verdict. `mean` is the mean difference, and `level` is the significance level.

        The true effect is unknown, so it is averaged over what the observed mean makes likely, as in the function
        `replication`.
        """
        from scipy.special import stdtr

        again = self if passes is None else replace(self, runs=passes * self.folds)
        spread_of_both = math.hypot(self.standard_error, again.standard_error)
        return float(stdtr(self.runs - 1, (abs(mean) - again.half_width(level)) / spread_of_both))

    def passes_to_replicate(self, mean: float, level: float, target: float = 0.9) -> int | None:
        """Return the smallest number of new passes with which a repetition gives the same verdict with probability `target`, or
        None if 1,000 passes are not enough. `mean` is the mean difference, and `level` is the significance level.
        """
        return next((n for n in range(1, 1001) if self.replication(mean, level, n) >= target), None)
