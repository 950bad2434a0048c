"""Paired differences between an arm and its control: which runs form pairs, and how sure the mean difference is."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from smallvit.record import Record

from .comparison import Difference
from .folds import Pass
from .score import score_named
from .sequential import nominal_level, sequential_p
from .single_folds import FoldVariance
from .statistics import (
    FOLDS_FACTOR,
    LEVEL,
    MIN_IMAGES,
    MIN_PAIRS,
    TIE,
    Variance,
    critical_t,
    half_width,
    in_groups,
    of_few_passes,
    of_folds,
    of_groups,
    paired_variance,
    seeds_half_width,
    seeds_p,
    spread,
    two_part_p,
    variance_bound,
    wilson,
    without_differences,
)

# Scores of which the mean of few or many images is biased, by a different amount for each arm. In simulations of two perfectly
# calibrated models with other confidences, a test of the ECE nearly always called one of them better.
BIASED = ("ece",)
IMAGES = 10_000  # test images that are supposed where an old record does not say their number
# Training images from which the data sets of old records draw: the number of classes x the size of the smallest class.
POOLS = {"smallvit.data.mnist": 54_210, "smallvit.data.digits": 1_260}

Runs = Mapping[int, Record | None]  # seed -> results of the run; None: the run has not finished or does not exist


def comparable(run: Record | None, other: Record | None) -> bool:
    """Return whether two runs with the same seed form a pair: both have finished, and both used the same labelled images of the
    same data set.
    """
    return bool(run and other and run.finished and other.finished and images_of(run) == images_of(other))


def images_of(record: Record) -> tuple:
    """Return two hashes that identify the images of a run, as a tuple: the hash of its choice of labelled images and the hash
    of the whole data set. `record` holds the results of the run.
    """
    return record.subset_sha256, record.data_sha256


def same_test_images(records: Iterable[Record | None]) -> bool:
    """Return whether all finished runs were scored on the same test images, as far as this is known. `records` are the results
    of the runs; None stands for a run without a result.
    """
    done = [r for r in records if r and r.finished]
    return all(
        len({value for r in done if (value := getattr(r, name)) is not None}) < 2 for name in ("data_sha256", "test_images")
    )


def obstacle(runs: Runs, control: Runs, looks: Sequence[int]) -> str:
    """Return why an arm (variant) cannot be tested at the next of the planned numbers of seeds, as text: `+A, seed 3: failed`.
    The text is empty if nothing prevents it. `runs` and `control` are dicts from a seed to the results of a run of the arm and
    of the arm it is compared with. `looks` lists the planned numbers of seeds.
    """
    after = len(leading_seeds(runs, control))
    seeds = sorted(runs)[: next((n for n in looks if n > after), looks[-1])]
    for s in seeds:
        pair = [r for r in (runs[s], control.get(s)) if r]
        for r in pair:
            if r.status in ("failed", "interrupted", "unavailable"):
                return f"{r.arm}, {'pass' if r.folds else 'seed'} {s}: {r.status}"
        if len(pair) == 2 and all(r.finished for r in pair) and not comparable(*pair):
            return f"{pair[0].arm}, {'pass' if pair[0].folds else 'seed'} {s}: used other images than {pair[1].arm}"
    if not same_test_images(each.get(s) for each in (runs, control) for s in seeds):
        return "the runs were scored on different test images"
    return ""


def is_accuracy(record: Record) -> bool:
    """Return whether a run is scored by an accuracy, the share of test images that are classified correctly: by the score
    `accuracy`, or by a probe (a classifier on frozen features). `record` holds the results of the run.

    Of other scores only a name is known. They may be no mean over images, such as the balanced accuracy or an F1 score.
    """
    return record.score == "accuracy" or record.score in (record.probes or ())


def difference(runs: Runs, control: Runs, looks: Sequence[int] = ()) -> Difference | None:
    """Return the differences between an arm (variant) and its control (the arm it is compared with), with intervals and
    p-values, as a `Difference`. `runs` and `control` are dicts from a seed to the results of a run of these arms. `looks` lists
    the planned numbers of seeds at which the comparison is tested; empty: one test with all seeds.

    Only seeds for which both runs used the same images are compared. The result is None if there is no such seed.

    With `looks` (numbers of seeds at which the comparison is tested), only the leading seeds that form pairs are used, and of
    these as many as the last look that was reached. Before the first look, the result has no p-value.
    """
    if not looks:
        seeds = [s for s in runs if comparable(runs[s], control.get(s))]
        return measure(runs, control, seeds) if seeds else None
    seeds = leading_seeds(runs, control)
    taken, blocked = [n for n in looks if n <= len(seeds)], obstacle(runs, control, looks)
    if not taken:
        return replace(measure(runs, control, seeds), p=None, blocked=blocked) if seeds else None
    found = {n: measure(runs, control, seeds[:n], nominal_level(n, looks)) for n in taken}
    last = found[taken[-1]]
    # a look counts only if its difference has the sign of the last one; this can only raise the p-value
    p_values = {n: d.p if d.p is None or d.mean * last.mean > 0 else 1.0 for n, d in found.items()}
    if last.p is None:
        return replace(last, looks=tuple(taken), blocked=blocked)
    strongest = min(taken, key=lambda n: math.inf if (p := p_values[n]) is None else p / math.sqrt(n))
    return replace(
        last,
        p=sequential_p(p_values, looks),
        looks=tuple(taken),
        strongest=found[strongest] if strongest != taken[-1] else None,
        blocked=blocked,
    )


def leading_seeds(runs: Runs, control: Runs) -> list[int]:
    """Return the seeds, in rising order, before the first seed without a usable pair of runs. A pair is usable if the runs of
    both arms (variants) have finished with the same images. `runs` and `control` are dicts from a seed to the results of a run
    of these arms. Later seeds are not used, because repeated tests must add the seeds in order.
    """
    found = []
    for s in sorted(runs):
        if not comparable(runs[s], control.get(s)):
            break
        found.append(s)
    return found


def measure(runs: Runs, control: Runs, seeds: Sequence[int], level: float = LEVEL) -> Difference:
    """Return the differences between an arm (variant) and its control (the arm it is compared with) for the given `seeds`, with
    intervals and p-values, as a `Difference`. `runs` and `control` are dicts from a seed to the results of a run of these arms.
    The intervals have the confidence 1 - `level`.

    The p-value is None if no test is possible, as `two_part_p` says, or if the score is neither an accuracy nor recorded for
    each test image. Then only the interval over the seeds is given.

    In a cross-validation, a seed is a complete pass over all folds. With 2 to 5 of them, the part over seeds comes from the
    single folds. With one, or with too few folds for this, the differences of the single folds are tested with Nadeau and
    Bengio's correction.
    """
    pairs = [(run, other) for s in seeds if (run := runs[s]) and (other := control[s])]
    values = tuple(run.result - other.result for run, other in pairs)
    mean, sd = fmean(values), spread(values)[1]
    records = [record for pair in pairs for record in pair]
    overlap, pool = overlap_of(records)
    groups = next((r.test_groups for r in records if r.test_groups is not None), None)
    first = pairs[0][0]
    found = Difference(
        seeds=tuple(seeds),
        values=values,
        mean=mean,
        sd=sd,
        low=None,
        high=None,
        p=None,
        overlap=overlap,
        pool=pool,
        level=level,
        metric=next((r.score or "" for r in records if not is_accuracy(r)), "accuracy"),
        lower_is_better=bool(first.lower_is_better),
        folds=first.folds,
        images=min((r.test_images for r in records if r.test_images is not None), default=None),
        groups=None if groups is None else len(set(groups)),
    )
    table = None if found.metric in BIASED else differences_of_images(pairs)
    found = replace(found, differ=table is not None and bool(table.any()))
    variance = variance_of(pairs, values, table, groups)
    p = None if variance is None else two_part_p(mean, variance, overlap=overlap)
    if found.folds and len(pairs) < MIN_PAIRS and table is not None and p is None:
        return over_folds(found, pairs)
    largest = largest_difference(found)
    if variance is None:
        found = replace(found, score="" if table is not None or found.metric == "accuracy" else found.metric)
        if sd is None:
            return found
        each_half = critical_t(level, len(values) - 1) * sd / math.sqrt(len(values))
        return replace(found, seeds_low=max(mean - each_half, -largest), seeds_high=min(mean + each_half, largest))
    half, seeds_half = half_width(variance, level, overlap=overlap), seeds_half_width(variance, level)
    return replace(
        found,
        low=max(mean - half, -largest),
        high=min(mean + half, largest),
        seeds_low=max(mean - seeds_half, -largest),
        seeds_high=min(mean + seeds_half, largest),
        p=p,
        p_seeds=seeds_p(mean, variance) if len(seeds) >= MIN_PAIRS and sd is not None and sd > TIE else None,
        variance=variance,
        bound=variance.bound,
        renewable=variance.bound and all(f"{r.score}_sd" not in (r.test or {}) for pair in pairs for r in pair),
    )


def over_folds(found: Difference, pairs: Sequence[tuple[Record, Record]]) -> Difference:
    """Return the `Difference` of a cross-validation with one pass, or with few folds, tested over its single folds. `found`
    holds the differences of the passes. `pairs` holds for each pass the results of both arms (variants), as a tuple (arm,
    control).
    """
    scores = [(run.fold_scores, other.fold_scores) for run, other in pairs if isinstance(run, Pass) and isinstance(other, Pass)]
    values = [a - b for run, other in scores for a, b in zip(run, other, strict=True)]
    if len(values) < 2:
        return found
    single = FoldVariance(stdev(values), len(values), found.folds or 0)
    half, largest = single.half_width(found.level), largest_difference(found)
    low, high = max(found.mean - half, -largest), min(found.mean + half, largest)
    return replace(found, low=low, high=high, p=single.p(found.mean), single_folds=single)


def largest_difference(found: Difference) -> float:
    """Return the largest difference that two arms (variants) can have in a score: 1 for shares, such as accuracies, and
    infinity for losses.
    """
    return 1.0 if score_named(found.metric, found.lower_is_better).percent else math.inf


def differences_of_images(pairs: Sequence[tuple[Record, Record]]) -> Any:
    """Return the difference of two arms (variants) on each test image, as an array of shape (seeds, images): the value of the
    image for the arm minus that for its control. For an accuracy it is 1, 0 or -1. `pairs` holds for each seed the results of
    both runs, as a tuple (arm, control). The result is None if a record has no such values, or another number of images.
    """
    import numpy as np

    values = [(run.per_image, other.per_image) for run, other in pairs]
    known = [(a, b) for a, b in values if a is not None and b is not None]
    if len(known) < len(pairs) or len({len(part) for both in known for part in both}) != 1:
        return None
    return np.stack([a - b for a, b in known])


def largest_value(pairs: Sequence[tuple[Record, Record]]) -> float:
    """Return how much one test image can change a score, times the number of images: 1 for an accuracy. For other scores it is
    about the largest value of an image or, if that is more, the weight of an image of the rarest class, where all classes have
    the same weight. `pairs` holds for each seed the results of both runs.
    """
    records = [record for pair in pairs for record in pair]
    if all(map(is_accuracy, records)):
        return 1.0
    found = [1.0, *(float(abs(values).max()) for r in records if (values := r.per_image) is not None)]
    for counts in ([sum(row) for row in r.confusion if sum(row)] for r in records if r.confusion):
        found.append(sum(counts) / (len(counts) * min(counts)))
    return max(found)


def variance_of(
    pairs: Sequence[tuple[Record, Record]], values: Sequence[float], table: Any, groups: Sequence[int] | None
) -> Variance | None:
    """Return the estimated `Variance` of the mean difference between an arm (variant) and its control (the arm it is compared
    with). The object has one variance over seeds and one over test images. `pairs` holds for each seed the results of both
    runs, as a tuple (arm, control). `values` are their differences, `table` those of each image or None, and `groups` the group
    of each image or None. The result is None for fewer than two seeds or test images.

    Records that do not say which test images a run classified correctly give an upper bound of the part over images. It is
    valid only for an accuracy. For other scores, for groups and for a cross-validation the result is None.
    """
    images = min(r.test_images or IMAGES for pair in pairs for r in pair)
    if len(values) < 2 or images < 2:
        return None
    if table is not None:
        variance = variance_of_table(table, [run for run, _ in pairs], groups)
        if variance is None or table.any():
            return variance
        bound = without_differences(variance, largest_value(pairs))
        return of_folds(bound) if pairs[0][0].folds else bound
    if groups is not None or pairs[0][0].folds or not all(is_accuracy(r) for pair in pairs for r in pair):
        return None
    errors = fmean(2 - run.result - other.result for run, other in pairs)
    return variance_bound(values, errors, images)


def variance_of_table(table: Any, runs: Sequence[Record], groups: Sequence[int] | None) -> Variance | None:
    """Return the estimated `Variance` of the mean of a table of differences or of scores, of shape (seeds, test images). `runs`
    are the results of the runs of these seeds, and `groups` is the group of each image or None. The result is None for a single
    unit: test image or group of images.
    """
    units = table if groups is None else in_groups(table, groups)
    if units.shape[1] < 2:
        return None
    variance = paired_variance(units)[1]
    variance = variance if groups is None else of_groups(variance, groups)
    if not runs[0].folds:
        return variance
    folds = folds_of_units(runs, groups)
    few = len(table) < MIN_PAIRS and folds is not None
    return of_few_passes(of_folds(variance), units, folds) if few else of_folds(variance)


def interval_on_new_images(runs: Sequence[Record]) -> tuple[float, float] | None:
    """Return the 95% interval of the mean score of an arm (variant) for new seeds and new test images, as a tuple (low, high).
    `runs` are the results of its finished runs, one for each seed or each pass of a cross-validation. The result is None if the
    records do not have a value for each test image, or with too few seeds or images for a test.

    An accuracy near 1 with errors on few images, or on none, says little about the variance over images. Its part over images
    is then Wilson's interval of a share.
    """
    import numpy as np

    known = [values for r in runs if (values := r.per_image) is not None]
    if len(known) < max(2, len(runs)) or len({len(values) for values in known}) > 1:
        return None
    groups = next((r.test_groups for r in runs if r.test_groups is not None), None)
    variance = variance_of_table(np.stack(known), runs, groups)
    if variance is None or variance.freedom < MIN_PAIRS - 1 or variance.images < MIN_IMAGES:
        return None
    mean, overlap, share = fmean(r.result for r in runs), overlap_of(runs)[0], all(map(is_accuracy, runs))
    if variance.over_images > 0 and variance.n_eff >= MIN_IMAGES:
        half = half_width(variance, LEVEL, overlap=overlap)
        highest = math.inf if runs[0].lower_is_better else 1.0
        return max(0.0, mean - half), min(highest, mean + half)
    if not share:
        return None
    over_seeds = math.sqrt(1 + variance.seeds * overlap) * seeds_half_width(variance, LEVEL)
    low, high = wilson(mean, variance.images / (FOLDS_FACTOR if runs[0].folds else 1))
    return max(0.0, mean - math.hypot(mean - low, over_seeds)), min(1.0, mean + math.hypot(high - mean, over_seeds))


def folds_of_units(runs: Sequence[Record], groups: Sequence[int] | None) -> Any:
    """Return the number of the fold in which each image was tested, as an array (passes, images), or (passes, groups) if the
    images have `groups`: a group is never divided. `runs` are the passes of a cross-validation. The result is None if a pass is
    not complete.
    """
    import numpy as np

    folds = [run.fold_of_image for run in runs if isinstance(run, Pass) and run.fold_of_image]
    if len(folds) < len(runs):
        return None
    table = np.array(folds)
    return table if groups is None else table[:, np.unique(groups, return_index=True)[1]]


def overlap_of(records: Sequence[Record]) -> tuple[float, str]:
    """Return how strongly the training images of two seeds overlap, as a pair (number, word). If each seed draws n of m
    labelled images, the pair is (n / (m - n), "drawn"). If all seeds have the same images, it is (0, "fixed"). In a
    cross-validation, it is (0, "folds"). If a record does not say it, the word is "unknown", and the number is the largest one
    that the other records give, or 0. `records` are the results of the runs.
    """
    if any(r.folds for r in records):
        return 0.0, "folds"
    shares = [drawn_share(r) for r in records]
    known = [share for share in shares if share is not None]
    if any(share >= 1 for share in known):
        return 0.0, "fixed"
    share = max(known, default=0.0)
    return share / (1 - share), "drawn" if len(known) == len(shares) else "unknown"


def drawn_share(record: Record) -> float | None:
    """Return the share of the available training images that a run uses as its labelled images: a fraction, and the largest one
    if the classes have different shares. It is 1 if all images are used, and None if it is unknown. `record` holds the results
    of the run.

    Old records do not have this number. For them it is computed for the data sets in `POOLS`.
    """
    if record.labels is None:
        return 1.0
    pool = POOLS.get((record.run.get("data") or {}).get("call", ""))
    if record.drawn_share is None and pool:
        return min(1.0, record.labels / pool)
    return record.drawn_share
