"""The results of a comparison: `Comparison` holds one `Row` for each condition and arm, and a row holds its `Difference`.

Accuracies are fractions here; the pages show percent.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from smallvit.record import Record, condition_text
from smallvit.words import units

from .single_folds import FoldVariance
from .statistics import FOLDS_FACTOR, LEVEL, MIN_IMAGES, MIN_PAIRS, Variance


class Condition(NamedTuple):
    """The circumstances under which arms (variants) are compared: the number of labelled images, the number of training steps
    and whether the settings were tuned.

    labels   number of labelled images; None: all
    length   training steps of the baseline, in a comparison over several training lengths; None otherwise
    tuned    whether each arm has its own tuned settings; False: all arms have common settings
    """

    labels: int | None
    length: int | None = None
    tuned: bool = False

    @property
    def title(self) -> str:
        """The condition as text, such as `1,000 labels, 2,000 steps, tuned`."""
        return condition_text(self.labels, self.length, self.tuned)

    @property
    def order(self) -> tuple:
        """A tuple by which conditions are sorted. Common settings (those of the recipe) come before tuned settings (chosen for
        each arm), few labelled images before many, and short training before long training.
        """
        return self.tuned, math.inf if self.labels is None else self.labels, self.length or 0


def condition_of(record: Record) -> Condition:
    """Return the condition (number of labelled images, training length, tuned or not) of a run. `record` holds its results."""
    return Condition(record.labels, record.length, record.tuning is not None)


def main_conditions(cells: Iterable[tuple[str, Condition, bool]]) -> tuple[Condition, ...]:
    """Return the main conditions of a comparison as a tuple: those with tuned settings, if there are any, and of these the ones
    with the longest training. They are chosen for each group, that is a baseline with the arms that are compared with it.
    Settings and lengths without a result do not count, unless there is no result at all. `cells` are tuples: a group, one of
    its conditions, and whether there is a result. Tuned groups come first.
    """
    cells = list(cells)
    with_result, main = {group for group, _, done in cells if done}, main_of_groups(cells)
    found = [conditions for group, conditions in main.items() if group in with_result] or [*main.values()]
    found.sort(key=lambda conditions: not conditions[0].tuned)
    return tuple(dict.fromkeys(c for conditions in found for c in conditions))


def main_of_groups(cells: Iterable[tuple[str, Condition, bool]]) -> dict[str, list[Condition]]:
    """Return the main conditions of each group alone, also of a group without any result. `cells` are those of
    `main_conditions`, which says what the main conditions are.
    """
    groups: dict[str, dict[Condition, bool]] = {}
    for group, condition, done in cells:
        conditions = groups.setdefault(group, {})
        conditions[condition] = conditions.get(condition, False) or done
    found: dict[str, list[Condition]] = {}
    for group, conditions in groups.items():
        among = [c for c, done in conditions.items() if done] or [*conditions]
        tuned = any(c.tuned for c in among)
        longest = max(c.length or 0 for c in among if c.tuned == tuned)
        main = [c for c in conditions if c.tuned == tuned and (c.length or 0) == longest]
        found[group] = sorted(main, key=lambda c: c.order)
    return found


def is_unavailable(statuses: Iterable[str]) -> bool:
    """Return whether an arm was left out because its pretrained weights could not be obtained. `statuses` are those of its
    runs. Runs that only other arms got, later, are missing; they change nothing.
    """
    found = {*statuses}
    return "unavailable" in found and found <= {"unavailable", "missing"}


Cell = tuple[Condition, str]  # condition, arm


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences in accuracy, or in another score, between an arm (one variant in the comparison) and its control, the arm
    it is compared with. The object holds one difference for each seed, their mean, and two confidence intervals of the mean:
    one for new seeds and new test images, and one for new seeds on the same test images.

    The second interval is never wider than the first one. In a cross-validation, a seed is a complete pass over all folds.

    seeds        the seeds that are used (at a look, the first ones); in a cross-validation the numbers of the passes
    values       the difference of each seed, with `mean` and standard deviation `sd`
    low, high    95% interval on new test images; with looks, the repeated interval at the nominal level of the last look
    seeds_low, seeds_high   interval of the same level over the seeds alone, on the same test images
    p            p-value of the test on new images, with looks the sequential p-value; None if no test was possible
    p_seeds      p-value of the paired t-test over the seeds
    p_holm       `p` after Holm's correction; None for references
    variance     the parts of the variance over seeds and images; None with a single seed, and with `single_folds`
    overlap      n / (m - n), if each seed draws n of m training images: how strongly the training images of two seeds overlap
    pool         "drawn": each seed draws its own training images; "fixed": all seeds share them; "folds": they are the other
                 folds of a cross-validation; "unknown": old records
    looks        the numbers of seeds at which the difference has been tested; empty: once, with all seeds
    bound        whether the variance over images is an upper bound, because records do not keep the bits of the images
    level        1 minus the confidence of both intervals: 0.05, or the nominal level of the last look
    replication  probability that the same verdict comes out again with as many fresh seeds and new images; None if undecided
    seeds_for_90  number of seeds for which this probability is 90%; None: more seeds alone are not enough
    detectable   the effect that would have been found with 80% probability; only for inconclusive verdicts
    needs        what would help an inconclusive verdict: "seeds", "images", "pool" (more images from which each seed draws its
                 training images), "records" (new runs) or "" (not known)
    score        the name of the score if it is neither an accuracy nor recorded for each test image: it cannot be tested
    renewable    whether `bound` is due to old records, so that new runs would replace the upper bound
    strongest    the difference at the look with the strongest evidence, if this is an earlier look; None otherwise
    blocked      why no further look can be taken, such as a failed run
    metric       "accuracy", or the name of the score if it is no accuracy
    lower_is_better  whether a negative difference is better, as for a loss
    folds        number of folds of a cross-validation; None: there is a fixed test part
    single_folds  the variance over single folds, if there is one pass, or too few folds for another test; `low`, `high` and `p`
                 are then those of Nadeau and Bengio's test, and there is no interval over the seeds
    differ       whether the records show different results of the two arms on any image
    images       number of test images; in a cross-validation, of the images of all folds; None if unknown
    groups       number of groups of test images, such as patients, if the images have groups: then a group counts as one image
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    seeds_low: float | None = None
    seeds_high: float | None = None
    p: float | None
    p_seeds: float | None = None
    p_holm: float | None = None
    variance: Variance | None = None
    overlap: float = 0.0
    pool: str = "drawn"
    looks: tuple[int, ...] = ()
    bound: bool = False
    level: float = LEVEL
    replication: float | None = None
    seeds_for_90: int | None = None
    detectable: float | None = None
    needs: str = ""
    score: str = ""
    renewable: bool = False
    strongest: "Difference | None" = None
    blocked: str = ""
    metric: str = "accuracy"
    lower_is_better: bool = False
    folds: int | None = None
    single_folds: FoldVariance | None = None
    differ: bool = False
    images: int | None = None
    groups: int | None = None

    @property
    def better(self) -> bool:
        """Whether the arm has the better mean score: a higher one or, if lower scores are better, a lower one."""
        return self.mean < 0 if self.lower_is_better else self.mean > 0

    @property
    def enough_images(self) -> bool:
        """Whether there are enough test images, or groups of them, for a test, and records that say how each was classified."""
        if self.single_folds:
            return (self.groups or self.images or 0) >= MIN_IMAGES
        return self.variance is not None and self.variance.images >= MIN_IMAGES

    @property
    def too_few_passes(self) -> bool:
        """Whether a cross-validation has too few passes for a test over passes and images."""
        return self.folds is not None and (len(self.values) - 1) * self.folds < MIN_PAIRS - 1

    @property
    def method(self) -> str:
        """A text that says how a cross-validation or images in groups were tested, and why. It is empty for other data, which
        are tested over seeds and test images.
        """
        images = "" if self.images is None else f"{self.images:,} "
        parts = []
        if self.single_folds:
            reason = (
                "the test over passes and images needs at least 2 passes, or up to 4 if there are fewer than 5 folds"
                if self.too_few_passes
                else "too few images differ between the arms for a test over passes and images"
            )
            parts.append(
                f"tested over the {self.single_folds.runs} single folds with Nadeau and Bengio's correction, because {reason}"
            )
        elif self.folds:
            parts.append(
                f"tested over {len(self.values)} passes of {self.folds} folds and {images}images; the variance over images is "
                f"multiplied by {FOLDS_FACTOR:g}, because all folds share the same images"
            )
            if self.variance and self.variance.df is not None:
                parts.append("the variance over passes comes from the single folds, because there are few passes")
        if self.groups and not self.single_folds:  # then single folds count
            parts.append(f"the {self.groups:,} groups count and not the {images}images, because images of a group are alike")
        return "; ".join(parts)

    @property
    def fragile(self) -> bool:
        """Whether a repetition with new seeds and new test images would give the same verdict in less than 80% of cases. It is
        False if old records do not say which test images were classified correctly, because the true percentage may then be
        higher.
        """
        return self.replication is not None and self.replication < 0.8 and not self.bound


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one arm (one variant in the comparison) under one condition: the scores of all seeds, the costs and the
    verdict.

    `verdict` is None for baselines and for reference models, which are not judged.

    condition  number of labelled images, training length, and whether the settings were tuned
    baseline   the arm it is compared with (its control); for a baseline, its own name
    group      the baseline at the end of the chain of controls, by which tables and figures are grouped
    score      name of the number in `record.test` by which the arm is judged
    values     the score of each seed in `seeds`, with `mean`, `sd` and the 95% t interval `low` to `high`
    seeds      the seeds with a result; in a cross-validation (`folds` is not None), the numbers of complete passes
    failures   seed -> status and error, for each seed without a result
    new_images  95% interval of the mean score for new seeds and new test images, as a tuple (low, high), and None where it is
               not known, as `interval_on_new_images` says
    lower_is_better  whether a lower score is better, as for a loss
    folds      number of folds of a cross-validation; None: there is a fixed test part
    verdict    better, worse, inconclusive, not enough seeds or no verdict; `reason` says why where that is not obvious
    looks      numbers of seeds at which the arm is tested; None: once, with all seeds
    stopped    why an arm with looks needs no more seeds: "decided", "excluded" (an effect of 0.5 points is excluded),
               "hopeless" (a verdict is unlikely even with all seeds), or "" (it goes on, or has taken all looks)
    next_look  the number of seeds at its next look; None if there is none
    budget     params, macs, images_seen, seconds: medians over the seeds, pretraining included; and extra_labels: validation
               labels used to choose something, and labels of earlier runs beyond those of this row
    unequal    budget -> relative excess over that of the control, where the two are more than 5% apart
    forward    tokens, macs_sd, ms, speedup of a forward pass: medians over the seeds; None without the evaluator `cost`
    data       hash of the data set; None if the records do not say it
    """

    condition: Condition
    arm: str
    role: str
    baseline: str
    group: str
    score: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    failures: dict[int, str]
    difference: Difference | None
    verdict: str | None
    reason: str
    looks: tuple[int, ...] | None = None
    stopped: str = ""
    next_look: int | None = None
    budget: dict[str, float | None]
    unequal: dict[str, float]
    forward: dict[str, float | None]
    new_images: tuple[float, float] | None = None
    lower_is_better: bool = False
    folds: int | None = None
    data: str | None = None

    @property
    def control(self) -> str:
        """The name of the arm it is compared with, if this is another one than the baseline; otherwise an empty text."""
        return "" if self.baseline == self.group else self.baseline

    @property
    def units(self) -> str:
        """The word for several seeds: "seeds", or "passes" in a cross-validation."""
        return units(self.folds)

    @property
    def labels(self) -> int | None:
        """The number of labelled images. None means that all images have labels."""
        return self.condition.labels

    @property
    def length(self) -> int | None:
        """The number of training steps of the baseline if the comparison has several training lengths; None otherwise. The
        steps of the other arms (variants) are scaled by the same factor, so the number of the baseline names the length.
        """
        return self.condition.length

    @property
    def tuned(self) -> bool:
        """Whether each arm (variant) has its own tuned settings."""
        return self.condition.tuned

    @property
    def decided(self) -> bool:
        """Whether the verdict is better or worse."""
        return self.verdict in ("better", "worse")

    @property
    def unavailable(self) -> bool:
        """Whether the runs of this arm (variant in the comparison) were left out because their pretrained weights could not be
        obtained. This does not count as a failure.
        """
        return not self.values and is_unavailable(why.partition(":")[0] for why in self.failures.values())

    @property
    def failed(self) -> bool:
        """Whether a run of this arm (variant in the comparison) has started and gave no result. Missing runs do not count."""
        return any(not why.startswith("missing") for why in self.failures.values())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All results of a comparison. Each row holds the results of one arm (one variant in the comparison) under one condition,
    which is a number of labelled images, a training length, and whether the settings were tuned.

    Rows are sorted by condition, and then by group: a baseline and the arms that are compared with it stand together.

    recipe     name of the recipe
    baselines  the arms with the role baseline
    arms       arm -> role
    family     number of comparisons for which the p-values are Holm-corrected
    earlier    how many of them belong to arms that were removed from the recipe after they had been run
    command    the command that runs the recipe, for texts that say how to go on; empty: `smallvit run` and its name
    """

    recipe: str = ""
    baselines: tuple[str, ...]
    arms: dict[str, str]
    conditions: tuple[Condition, ...]
    rows: tuple[Row, ...]
    family: int
    earlier: int = 0
    command: str = ""

    @property
    def labels(self) -> tuple[int | None, ...]:
        """The different numbers of labelled images, in ascending order. None means that all images have labels."""
        return tuple(sorted({c.labels for c in self.conditions}, key=lambda n: math.inf if n is None else n))

    @property
    def main(self) -> tuple[Condition, ...]:
        """The main conditions as a tuple. A condition is a number of labelled images, a training length, and whether the
        settings were tuned. The main ones have the longest training, and tuned settings if there are any, among those of the
        same baseline. The summary of a report is about them.

        Settings and lengths without a result do not count: see `main_conditions`.
        """
        return main_conditions(self._cells)

    @property
    def _cells(self) -> list[tuple[str, Condition, bool]]:
        """The group and the condition of each row, and whether it is a result of more than a reference."""
        rows = sorted(self.rows, key=lambda row: self.baselines.index(row.group))
        return [(row.group, row.condition, bool(row.values) and row.role != "reference") for row in rows]

    @property
    def done(self) -> set[Condition]:
        """The conditions in which a baseline or a technique has a result, as a set. Elsewhere, runs are missing or failed."""
        return {row.condition for row in self.rows if row.values and row.role != "reference"}

    @property
    def main_rows(self) -> tuple[Row, ...]:
        """The results of all arms (variants) under the main conditions, as a tuple with one `Row` for each arm and condition.
        The main conditions have the longest training, and tuned settings if there are any. The summary of a report is about
        them.
        """
        main, of_group = self.main, main_of_groups(self._cells)
        return tuple(row for row in self.rows if row.condition in main and row.condition in of_group[row.group])

    @property
    def baseline(self) -> str:
        """The name of the baseline, for headings and axis labels. If the comparison has several baselines, the text is `the
        baseline of each arm`, where an arm is one variant in the comparison.
        """
        return self.baselines[0] if len(self.baselines) == 1 else "the baseline of each arm"

    @property
    def reduced(self) -> bool:
        """Whether the effect of token reduction was measured for at least one arm (variant in the comparison): the number of
        tokens that are left, or the speed-up of a forward pass. The report then also shows these numbers.

        The evaluator `cost` makes these measurements.
        """
        return any(row.forward[name] is not None for row in self.rows for name in ("tokens", "speedup"))

    def at(self, condition: Condition) -> tuple[Row, ...]:
        """Return the results of all arms (variants) under one condition, as a tuple with one `Row` for each arm."""
        return tuple(row for row in self.rows if row.condition == condition)

    def parts(self) -> tuple["Comparison", ...]:
        """Split this comparison by baseline. Return a tuple of comparisons, each with one baseline and the arms (variants) of
        its group. An arm is in this group if it is compared with the baseline or with another arm of the group.

        `family`, the number of comparisons for the Holm correction, stays that of the whole comparison.
        """
        groups = {baseline: tuple(row for row in self.rows if row.group == baseline) for baseline in self.baselines}
        return tuple(
            replace(
                self,
                baselines=(baseline,),
                arms={row.arm: row.role for row in rows},
                conditions=tuple(dict.fromkeys(row.condition for row in rows)),
                rows=rows,
            )
            for baseline, rows in groups.items()
        )
