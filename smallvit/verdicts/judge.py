"""Verdicts: Holm's correction over all planned comparisons, the reasons of a verdict, and when an arm needs no more seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from smallvit.words import unit, units

from .comparison import Cell, Difference
from .differences import BIASED
from .score import score_named
from .sequential import nominal_level, stop_reason
from .statistics import (
    EQUIVALENCE,
    LEVEL,
    MIN_IMAGES,
    MIN_PAIRS,
    TIE,
    detectable,
    holm,
    limit_of_seeds,
    pairs_needed,
    replication,
    seeds_to_replicate,
    two_part_p,
)


@dataclass(frozen=True)
class Verdict:
    """The verdict about one arm (variant in the comparison), such as better or inconclusive, with the reason where it is not
    obvious. The object also holds the paired difference with its corrected p-value, and `stopped`: why the arm needs no more
    seeds ("decided", "excluded", "hopeless" or an empty text).
    """

    verdict: str
    reason: str
    difference: Difference | None
    stopped: str = ""


def judge(
    differences: Mapping[Cell, Difference | None], gaps: Mapping[Cell, str], family: int, looks: Sequence[int] = ()
) -> dict[Cell, Verdict]:
    """Decide for each arm (variant) whether it is better or worse than its control (the arm it is compared with), or
    inconclusive. Keys of dicts are pairs (condition, arm). `differences` are paired differences, `gaps` are texts about missing
    runs, and `family` is the number of comparisons for Holm's correction. `looks` lists the planned numbers of seeds at which
    arms are tested; empty: one test with all seeds.

    Comparisons that cannot be tested count with p = 1.

    The level of a decided comparison is the one that Holm's method asked of it: 0.05 / (family - number of smaller p-values).
    The probability of replication is computed at this level. The level of the others is the one that the next rejection needs.
    With looks, both are the nominal levels of the last look that was taken.
    """
    results: dict[Cell, Verdict] = {}
    tested: dict[Cell, Difference] = {}
    for cell, d in differences.items():
        verdict, reason = untestable(d, gaps[cell], family, looks)
        results[cell] = Verdict(verdict, reason, d)
        if d and not verdict:
            tested[cell] = d
    p_values = [1.0 if d.p is None else d.p for d in tested.values()]
    corrected = holm(p_values + [1.0] * (family - len(tested)))
    rejected = sum(p < LEVEL for p in corrected)
    by_p = sorted(zip(p_values, tested, corrected), key=lambda each: each[0])  # stable: equal p-values keep their order
    for rank, (_, cell, p_holm) in enumerate(by_p):
        d, level = replace(tested[cell], p_holm=p_holm), LEVEL / (family - min(rank, rejected))
        results[cell] = decided(d, level, looks) if p_holm < LEVEL else undecided(d, level, looks)
    return results


def decided(d: Difference, level: float, looks: Sequence[int] = ()) -> Verdict:
    """Return the `Verdict` better or worse for a significant difference, with the probability that a repetition gives the same
    verdict. `d` holds the differences between an arm (variant) and its control (the arm it is compared with). `level` is the
    significance level after Holm's correction, for example 0.05 / 5 for the smallest of five p-values. `looks` lists the
    planned numbers of seeds at which the arm is tested; empty: one test with all seeds.

    With looks, the verdict of an earlier look stays valid. If the interval of the last look contains zero, the reason gives the
    difference at the look that decided.
    """
    level, reason = nominal_level(d.looks[-1], looks, level) if d.looks else level, ""
    if d.strongest and not excludes_zero(d.low, d.high):
        first = d.strongest
        score = score_named(d.metric, d.lower_is_better)
        numbers = f"{score.difference(first.mean)} {score.interval(first.low or 0.0, first.high or 0.0)}"
        reason = f"decided at the look at {len(first.values)} {units(d.folds)}: {numbers}"
    if d.single_folds:
        again = d.single_folds.replication(d.mean, level)
        passes = d.single_folds.passes_to_replicate(d.mean, level)
        d, reason = replace(d, replication=again, seeds_for_90=passes), d.method
    elif d.variance:
        again = replication(d.mean, d.variance, level=level, overlap=d.overlap)
        seeds = seeds_to_replicate(d.mean, d.variance, level=level, overlap=d.overlap)
        d = replace(d, replication=again, seeds_for_90=seeds)
    return Verdict("better" if d.better else "worse", reason, d, "decided" if d.looks else "")


def undecided(d: Difference, level: float, looks: Sequence[int]) -> Verdict:
    """Return the `Verdict` inconclusive, with its reason and with the smallest true difference that would have been found with
    80% probability. `d` holds the differences between an arm (variant) and its control (the arm it is compared with). `level`
    is the significance level after Holm's correction. `looks` lists the planned numbers of seeds at which the arm is tested;
    empty: one test with all seeds.
    """
    score = score_named(d.metric, d.lower_is_better)
    if d.single_folds and d.single_folds.sd > TIE:
        d = replace(d, detectable=d.single_folds.detectable(level), needs="seeds")
        return Verdict("inconclusive", "; ".join(filter(None, (partial_evidence(d), d.method))), d)
    if d.p is None or d.variance is None or (d.sd is not None and d.sd <= TIE and abs(d.mean) <= TIE):
        more = "the predictions differ" if d.differ else "check that the technique changes anything"
        one = "fold" if d.single_folds else unit(d.folds)
        stopped = stop_reason(d.mean, d.variance, d.looks[-1], looks, overlap=d.overlap) if d.looks and d.variance else ""
        return Verdict("inconclusive", f"the same {score.title} as the baseline for every {one}; {more}", d, stopped)
    variance = d.variance
    now, final = (nominal_level(n, looks, level) for n in (d.looks[-1], looks[-1])) if d.looks else (level, level)
    d = replace(d, detectable=detectable(variance, level=now, overlap=d.overlap), needs=needs(d, final))
    reason, stopped = partial_evidence(d), ""
    if d.looks:
        last, several = d.looks[-1], units(d.folds)
        stopped = stop_reason(d.mean, variance, last, looks, overlap=d.overlap)
        reasons = {
            "excluded": f"a difference of {EQUIVALENCE * (100 if score.percent else 1):g}{score.points} is excluded",
            "hopeless": f"stopped after {last} {several}: a verdict is unlikely even with {looks[-1]} {several}",
            "": "",
        }
        if last < looks[-1]:
            n = next(n for n in looks if n > last)
            next_text = f"the next look is at {n} {several}"
            reasons[""] = f"no look at {n} {several} is possible ({d.blocked})" if d.blocked else next_text
        reason = "; ".join(filter(None, (reason, reasons[stopped])))
    return Verdict("inconclusive", reason, d, stopped)


def needs(d: Difference, level: float) -> str:
    """Return what would help most to decide an inconclusive comparison: "seeds" (more seeds), "images" (more test images),
    "pool" (more images from which each seed draws its training images), "records" (new runs, because old records do not say
    which test images were right) or "" (unknown). `d` holds the differences between an arm (variant) and its control (the arm
    it is compared with). `level` is the significance level for a verdict.

    "images": on these test images, no number of seeds would tell a difference of this size, or of 0.5 points if it is smaller,
    from zero. "pool": the same, because the seeds share too many training images. "records": this is so only by an upper
    bound, which new runs would replace.
    """
    if d.variance is None:
        return ""
    limit = limit_of_seeds(d.variance, max(abs(d.mean), EQUIVALENCE), level=level, overlap=d.overlap)
    return "records" if limit == "images" and d.renewable else limit or "seeds"


def partial_evidence(d: Difference) -> str:
    """Return a reason to show with an inconclusive verdict if a weaker test finds a difference. Weaker tests have no Holm
    correction, or are valid only for the same training images or the same test images. The text is empty if none finds a
    difference. `d` holds the differences between an arm (variant) and its control (the arm it is compared with).

    The weaker tests are the one without Holm's correction, the one about the same training images, and the one about the same
    test images.
    """
    word = "better" if d.better else "worse"
    if d.p is not None and d.p < LEVEL:
        return "p is below 0.05 only before the Holm correction"
    if not excludes_zero(d.seeds_low, d.seeds_high) or d.variance is None:
        return ""
    p = two_part_p(d.mean, d.variance)
    if p is not None and p < d.level:
        problem = {
            "pool": "the seeds share too many of them to claim the same for others",
            "seeds": "too few seeds to claim the same for others",
        }.get(d.needs, "not shown for others")
        return f"{word} with these training images; {problem}"
    problem = {
        "images": "too few images to claim the same for new ones",
        "records": "earlier records cannot claim the same for new ones",
    }.get(d.needs, "not shown on new ones")
    often = "in every retraining" if all(value * d.mean > 0 for value in d.values) else "on average over retrainings"
    where = f" {d.groups:,} groups of" if d.groups else f" {d.images:,}" if d.images else ""
    return f"{word} on these{where} test images {often}; {problem}"


def excludes_zero(low: float | None, high: float | None) -> bool:
    """Return whether an interval leaves out zero. An interval that is not known (None) does not."""
    return low is not None and high is not None and low * high > 0


def untestable(d: Difference | None, gaps: str, family: int, looks: Sequence[int] = ()) -> tuple[str, str]:
    """Return a verdict and its reason as two texts if an arm (variant) cannot be tested, for example with too few seeds;
    otherwise return two empty texts. `d` holds its differences, `gaps` is a text about missing runs, and `family` is the number
    of comparisons for Holm's correction. `looks` lists the planned numbers of seeds at which it is tested; empty: one test with
    all seeds.
    """
    if gaps or d is None:
        return "no verdict", gaps
    n = len(d.values)
    if d.score in BIASED and (n > 1 or d.folds):
        return "no verdict", "chance makes the ECE too large, and not equally for all arms, so no test of it is valid"
    if d.score and (n > 1 or d.folds):
        problem = f"the score {d.score} is neither an accuracy nor recorded for each test image"
        return "no verdict", f"{problem}, so it may not be a mean over images; no test for such scores is built yet"
    if (n > 1 or d.single_folds) and not d.enough_images:
        what = "groups of test images" if d.groups else "test images"
        if (d.groups or d.images or 0) < MIN_IMAGES:
            return "no verdict", f"fewer than {MIN_IMAGES} {what}, so no test is possible"
        where = "images in groups" if d.groups else "a cross-validation"
        return "no verdict", f"the score is not recorded for each test image, and for {where} a test needs that"
    if looks and not d.looks:
        return "not enough seeds", f"{n} of the {looks[0]} {'passes' if d.folds else 'pairs'} of the first look"
    if d.single_folds:
        same = "the same difference for every fold, so no test is possible; check that the folds differ"
        return ("no verdict", same) if d.p is None else ("", "")
    if d.p is not None:
        return "", ""
    if n < MIN_PAIRS and not d.folds:
        if d.sd is None:
            return "not enough seeds", f"1 of at least {MIN_PAIRS} pairs; a single pair does not tell how many more are needed"
        need = pairs_needed(d.sd, level=LEVEL / family)
        size = "0.01" if d.lower_is_better else "1 point"
        enough = f"about {need} would show a difference of {size} on these test images with 80% power"
        return "not enough seeds", f"{n} of at least {MIN_PAIRS} pairs; {enough}"
    if d.sd is not None and d.sd <= TIE and abs(d.mean) > TIE:
        every = f"the same difference for every {unit(d.folds)}"
        return "no verdict", f"{every}, so no test is possible; check that the {units(d.folds)} differ"
    if d.groups:
        return "no verdict", "fewer than two groups of test images count, because one is large or tells the arms apart alone"
    if abs(d.mean) > 0.5:
        return "no verdict", "all but a few test images show the same difference, so its spread over images is not known"
    return "no verdict", "fewer than two test images tell the arms apart, so no test is possible"
