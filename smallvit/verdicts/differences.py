"""Paired differences between an arm and its control: which runs form pairs, and how sure the mean difference is."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from smallvit.record import Record

from .comparison import Difference
from .sequential import nominal_level, sequential_p
from .statistics import (
    LEVEL,
    MIN_PAIRS,
    TIE,
    Variance,
    critical_t,
    half_width,
    paired_variance,
    seeds_half_width,
    seeds_p,
    spread,
    two_part_p,
    variance_bound,
)

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
            if r.status in ("failed", "unavailable"):
                return f"{r.arm}, seed {s}: {r.status}"
        if len(pair) == 2 and all(r.finished for r in pair) and not comparable(*pair):
            return f"{pair[0].arm}, seed {s}: used other images than {pair[1].arm}"
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
    """
    pairs = [(run, other) for s in seeds if (run := runs[s]) and (other := control[s])]
    values = tuple(run.result - other.result for run, other in pairs)
    mean, sd = fmean(values), spread(values)[1]
    overlap, pool = overlap_of([record for pair in pairs for record in pair])
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
    )
    variance = variance_of(pairs, values)
    if variance is None:
        score = next((r.score or "" for pair in pairs for r in pair if not is_accuracy(r)), "")
        each_half = 0.0 if sd is None else critical_t(level, len(values) - 1) * sd / math.sqrt(len(values))
        return found if sd is None else replace(found, seeds_low=mean - each_half, seeds_high=mean + each_half, score=score)
    half, seeds_half = half_width(variance, level, overlap=overlap), seeds_half_width(variance, level)
    return replace(
        found,
        low=mean - half,
        high=mean + half,
        seeds_low=mean - seeds_half,
        seeds_high=mean + seeds_half,
        p=two_part_p(mean, variance, overlap=overlap),
        p_seeds=seeds_p(mean, variance) if len(seeds) >= MIN_PAIRS and sd is not None and sd > TIE else None,
        variance=variance,
        bound=variance.bound,
        renewable=variance.bound and all(f"{r.score}_sd" not in (r.test or {}) for pair in pairs for r in pair),
    )


def variance_of(pairs: Sequence[tuple[Record, Record]], values: Sequence[float]) -> Variance | None:
    """Return the estimated `Variance` of the mean difference between an arm (variant) and its control (the arm it is compared
    with). The object has one variance over seeds and one over test images. `pairs` holds for each seed the results of both
    runs, as a tuple (arm, control). `values` are their differences. The result is None for fewer than two seeds or test images.

    Records that do not say which test images a run classified correctly give an upper bound of the part over images. It is
    valid only for an accuracy. For other scores the result is None.
    """
    images = min(r.test_images or IMAGES for pair in pairs for r in pair)
    if len(values) < 2 or images < 2:
        return None
    bits = [(run.correct_bits, other.correct_bits) for run, other in pairs]
    known = [(a.astype("int8"), b.astype("int8")) for a, b in bits if a is not None and b is not None]
    if len(known) == len(pairs) and len({len(part) for both in known for part in both}) == 1:
        return paired_variance([a - b for a, b in known])[1]
    if not all(is_accuracy(r) for pair in pairs for r in pair):
        return None
    errors = fmean(2 - run.result - other.result for run, other in pairs)
    return variance_bound(values, errors, images)


def overlap_of(records: Sequence[Record]) -> tuple[float, str]:
    """Return how strongly the training images of two seeds overlap, as a pair (number, word). If each seed draws n of m
    labelled images, the pair is (n / (m - n), "drawn"). If all seeds have the same images, it is (0, "fixed"). If a record does
    not say it, the word is "unknown". `records` are the results of the runs.

    The first value is n / (m - n) where each seed draws n of m labelled images. The second value is "drawn" in this case. If
    all seeds have the same training images, it is "fixed" and the overlap is 0. If a record does not say, it is "unknown", and
    the overlap is the largest one that the other records give, or 0.
    """
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
