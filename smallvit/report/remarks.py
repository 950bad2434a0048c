"""Sentences about a whole report: what its verdicts hold for, what would help, how to read it, and which runs failed."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from smallvit.record import Record, only_copies_are_grouped, user_line
from smallvit.verdicts import contrasts
from smallvit.verdicts.compare import format_seeds
from smallvit.verdicts.comparison import Comparison, condition_of
from smallvit.verdicts.statistics import EQUIVALENCE, LEVEL, MIN_PAIRS, critical_t
from smallvit.words import how_many, join_names

from .alarms import length_not_checked
from .answer import runs_done
from .format import COST, at_labels, collapse, trends, until_decided, what_helps
from .units import score_in


def notes(comparison: Comparison, warnings: Sequence[str], records: Sequence[Record] = (), *, more_seeds: bool = True) -> str:
    """Return sentences for the reader of a report: how the verdicts change with longer training, what would help to decide
    inconclusive ones, how a cross-validation or groups of images were tested, which kinds of chance the confidence intervals
    leave out, how many image files were left out, and how many runs have no result. `comparison` holds all results, `warnings`
    are the texts of the warnings, which are counted, and `records` are the results of the runs. With `more_seeds=False`, more
    seeds are not advised, because no arm was shown to be better than guessing.
    """
    finished, total = runs_done(comparison, records)
    further = how_many(comparison.earlier, "further comparison")
    removed = f"{further} whose arms were removed from the recipe after they had been run, "
    removed += "or had other settings when they were run"
    out = [longer(comparison), *help_for_undecided(comparison, more_seeds), *methods(comparison), *limits(comparison)]
    skipped = max((r.skipped_files or 0 for r in records), default=0)
    what = f"{skipped:,} image files could not be read and were" if skipped > 1 else "1 image file could not be read and was"
    out += [f"{what} left out."] if skipped else []
    out += [f"The family counts {removed}."] if comparison.earlier else []
    out += length_not_checked(records)
    out += [f"{total - finished} of {total} runs have no result; see Failures."] if finished < total else []
    if warnings:
        out.append("There is 1 warning below." if len(warnings) == 1 else f"There are {len(warnings)} warnings below.")
    return " ".join(filter(None, out))


def longer(comparison: Comparison) -> str:
    """Return a sentence that says for which arms (variants) the difference from the baseline holds (stays), fades (gets
    smaller), turns (to the opposite) or appears with longer training. The text is empty if there is a single training length.
    `comparison` holds all results.
    """
    lengths = [
        sorted({c.length for c in part.conditions if c.length is not None and not c.tuned}) for part in comparison.parts()
    ]
    ranges = {(each[0], each[-1]) for each in lengths if len(each) > 1}
    several = len({c.labels for c in comparison.conditions}) > 1
    found: dict[str, list[str]] = {}
    for (labels, arm), outcome in trends(comparison).items():
        found.setdefault(outcome, []).append(f"“{arm}”" + f" {at_labels([labels])}" * several)
    words = [word for word in contrasts.OUTCOMES if word in found]
    texts = [f"{word} for {join_names(found[word])}" for word in words]
    start = "From {:,} to {:,} training steps".format(*ranges.pop()) if len(ranges) == 1 else "With longer training"
    return f"{start}, the difference {'; it '.join(texts)}." if texts else ""


def help_for_undecided(comparison: Comparison, more_seeds: bool = True) -> list[str]:
    """Return sentences that say how many inconclusive verdicts more seeds, more images or new runs would help to decide, as a
    list. New runs help if old records do not say which test images were right. Only the main conditions count: the longest
    training, and tuned settings if there are any. `comparison` holds all results. With `more_seeds=False`, comparisons that
    more seeds would help are left out.
    """
    count = Counter(row.difference.needs for row in comparison.main_rows if row.difference and what_helps(comparison, row))
    first = not any(row.looks for row in comparison.rows)
    twice = " (this report and the next one together give a false verdict in about 8 of 100 comparisons, each alone in 5)"
    grouped = any(row.difference.groups for row in comparison.main_rows if row.difference)
    more_images = "more groups of test images (such as patients)" if grouped else "more test images"
    forms = {
        "seeds": f"more {comparison.rows[0].units} would help: {until_decided(comparison)}{twice * first}",
        "images": f"{more_images} would help, not more {comparison.rows[0].units}",
        "pool": "more images to draw the labelled ones from would help, not more seeds",
        "records": "new runs would help, because earlier records do not say which test images were right",
    }
    if not more_seeds:
        del forms["seeds"]
    return [f"For {how_many(count[k], 'inconclusive comparison')}, {text}." for k, text in forms.items() if count[k]]


def methods(comparison: Comparison) -> list[str]:
    """Return sentences that say how the differences were tested, and why, if the data are divided into folds or the images
    belong to groups, such as patients. `comparison` holds all results. Other data need no sentence.
    """
    found = dict.fromkeys(row.difference.method for row in comparison.main_rows if row.verdict and row.difference)
    texts = [f"the differences are {text}" if text.startswith("tested") else text for text in found if text]
    return [f"{text[0].upper()}{text[1:]}." for text in texts]


def limits(comparison: Comparison) -> list[str]:
    """Return sentences about the limits of the confidence intervals, as a list: records do not say which test images were
    classified correctly, there are few seeds, seeds draw nearly all images of one pool, or it is unknown how many training
    images two seeds share. `comparison` holds all results.
    """
    differences = [(row.condition, row.difference) for row in comparison.rows if row.verdict and row.difference]
    out = []
    few = min((len(d.values) for _, d in differences if d.sd is not None and not d.folds), default=MIN_PAIRS)
    if few < MIN_PAIRS:
        wide, narrow = (critical_t(LEVEL, n - 1) / math.sqrt(n) for n in (few, MIN_PAIRS))
        out.append(
            f"Comparisons with {few} seeds have wide intervals: so few say little about how much seeds differ. "
            f"With {MIN_PAIRS} seeds that differ as much, the interval over seeds would be narrower by a factor of "
            f"{wide / narrow:.1f}."
        )
    if any(d.bound and not d.renewable for _, d in differences):
        out.append(
            "Scores that are means over several draws are not recorded for each test image; their intervals use an upper bound."
        )
    if any(d.renewable for _, d in differences):
        out.append(
            "Records of an earlier version keep no data on single test images; their intervals use an upper bound of the "
            "variance over images."
        )
    fixed = list(dict.fromkeys(c.labels for c, d in differences if d.pool == "fixed"))
    if fixed:
        out.append(
            f"Seeds {at_labels(fixed)} draw nearly all images of one pool. The verdicts hold for this pool of training images "
            "and not for others."
        )
    if any(d.pool == "unknown" for _, d in differences):
        out.append("It is not recorded from how many images each seed drew its training images; the intervals do not count it.")
    return out


def how_to_read(comparison: Comparison, records: Sequence[Record] = ()) -> list[str]:
    """Return paragraphs of text for a reader who does not know the code. They explain the terms of a report, such as intervals,
    p-values, verdicts and costs. `records` are the results of the runs, whose measured numbers are explained too.
    """
    folds = next((row.folds for row in comparison.rows if row.folds), None)
    units, run = ("passes", "the same pass and fold") if folds else ("seeds", "the same seed")
    single = [d for row in comparison.rows if (d := row.difference) and d.single_folds]
    all_single = bool(single) and all(row.difference.single_folds for row in comparison.rows if row.difference)
    few_passes = any(d.too_few_passes for d in single)
    why = "there are too few passes" if few_passes else "too few images differ between the arms"
    judged = [row.difference for row in comparison.rows if row.verdict and row.difference]
    seeds = max((len(d.values) for d in judged), default=MIN_PAIRS)
    looks = next((row.looks for row in comparison.rows if row.looks), ())
    score = score_in(comparison)
    excluded = f"{100 * EQUIVALENCE:g} points" if score.percent else f"{EQUIVALENCE:g}"
    unit = f"in percentage points of test {score.title}" if score.percent else f"in units of the test {score.title}"
    intervals = f"""
    Each difference has two 95% intervals, {unit}. The first one is about new test images: it covers the chance in the {units}
    and in the choice of the test images. The second one, over {units} alone, is about these test images: about the mean
    over many trainings, and not about other images. Neither is corrected for the number of comparisons.
    """
    shared = (
        "All folds share the same images, so the first interval is widened."
        if folds
        else "If each seed draws its training images from the same pool, two seeds share some of them. The first interval is "
        "widened for this share."
    )
    needed = " and no missing run" if folds else f", at least {MIN_PAIRS} {units} and no missing run"
    if all_single:
        intervals = f"""
    Each difference has a 95% interval, {unit}, that is about new test images. It is computed from the differences of the single
    folds, because {why} for an interval over passes and images. It is not corrected for the number of
    comparisons.
    """
        shared, needed = "", " and no missing run"
    text = f"""
    Differences are paired: runs with {run} are trained on the same images in the same order. {intervals}

    The verdict answers whether the arm is better on new images. p-values are Holm-corrected for the number of comparisons
    ({comparison.family} in this recipe): “Holm p” is the p-value, made larger so that chance alone gives one or more
    false verdicts in at most 5 of 100 recipes. A verdict of better or worse needs a corrected p below {LEVEL}{needed}.
    Inconclusive means that no difference was shown. It does not mean that the arms are equal. “80% power at” a difference means
    that a true difference of this size would be found in 80 of 100 repetitions. References are rows for orientation and get no
    verdict.

    {shared} Standard deviations (SD) are over {units}.

    “Again in 78 of 100” means: if the comparison is run again with as many fresh {units} and as many new test images, the
    verdict comes out again in about 78 of 100 repetitions. It is an upper estimate if effects are small. Below 80 the verdict
    is fragile. {"" if folds else collapse(seeds)}
    """
    if looks:
        text += f"""
    {units.capitalize()} are added until a comparison is decided. It is tested at
    {join_names([str(n) for n in looks], len(looks))} {units} and at no other number. The p-values and intervals stay valid with
    all these looks. An arm stops when it is better or worse, when a difference of {excluded} is excluded, or when a verdict is
    unlikely even with {looks[-1]} {units}, so arms can have fewer {units} than their baseline.
    """
    if folds:
        of_part = any((r.run.get("data") or {}).get("test") for r in records)
        data, image = ("A fixed part of the data is", "image of this part") if of_part else ("The data are", "image")
        others = "The other images are training images of all models." if of_part else ""
        text += f"""
    {data} divided into {folds} folds. A pass trains {folds} models, and each of them is tested on the fold that it was
    not trained on, so each {image} is a test image once in a pass. {others} Each pass divides the images anew. The score of a
    pass is the mean of the scores of its folds, weighted by their images. Passes take the place of seeds on this page.
    """
    if count := len({group for r in records for group in r.test_groups or ()}):
        if all(only_copies_are_grouped(r.run.get("data") or {}) for r in records):
            text += f"""
    There are {count:,} different images. Images with identical pixels stay together: a model is never tested on an image that
    it was trained on. For intervals and verdicts, identical images count as one unit.
    """
        else:
            text += f"""
    The images belong to {count:,} groups, such as patients, and images of one group stay together: a model is never tested on a
    group that it was trained on. For intervals and verdicts, a group counts as one unit.
    """
    if single:
        start = "The" if all_single else f"Where {why} for a test over passes and images, there is one interval, and the"
        passes = "from 2 passes of 5 folds, 3 of 3 or 4 folds, or 4 of 2 folds on."
        more = f" With more complete passes, the test is over passes and images: {passes}" * few_passes
        text += f"""
    {start} verdict is about the differences of the single folds. The models of two folds share training images, so
    their scores are alike, and a usual t-test would be too sure. Nadeau and Bengio's correction makes the variance of the mean
    difference larger by the share of test images, and the interval wider.{more}
    """
    elif any(row.difference.variance and row.difference.variance.df is not None for row in comparison.rows if row.difference):
        text += f"""
    With fewer than {MIN_PAIRS} passes, the means of the passes say little about the chance in training again. The difference of
    each fold says more: from the differences of its images, their means over all passes are subtracted. Without chance in
    training, nothing would be left, so the rest shows how much training again changes.
    """
    if any("nll" in (r.test or {}) for r in records):
        text += """
    nll (negative log-likelihood) is the mean of -log(probability of the true class) over the test images, and lower is better.
    """
    if any(condition.tuned for condition in comparison.conditions):
        text += """
    Tuned means that each arm has its own settings, chosen on validation images by the same number of trials over the same
    ranges, with seeds that the comparison does not use. The verdict is about the arms at their chosen settings. A trained arm
    without trials keeps its settings, and gets no verdict if its baseline was tuned. Common means that all arms have the
    settings of the recipe.
    """
    control = " (or from that of the arm in the column “Compared with”)" * any(row.control for row in comparison.rows)
    text += f"""
    Costs are medians over {units} and include pretraining. A cost that differs from the baseline's{control} by more than 5% is
    marked.
    Extra labels are validation labels that were used to choose something, labels of the trials that tuned the settings, and
    labels of an earlier run that the arm needs. Labels of trials outside the recipe are not counted.
    """
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip())]


def how_it_was_timed(records: Sequence[Record]) -> str:
    """Return a paragraph of text that explains how the tokens, MACs and speed-ups in the report were measured. `records` are
    the results of the runs.
    """
    evaluators = [e for r in records for e in r.run.get("evaluators") or () if e.get("call") == COST]
    sizes = sorted({e["batch"] for e in evaluators})
    batches = f" on batches of {' and '.join(map(str, sizes))} images" if sizes else ""
    text = f"""
    Tokens left is the number of tokens after the last block. MACs are counted on test images. Where they depend on the image,
    both are means, and the SD is over images. Speed-up is the time of a forward pass of the same model without reduction, with
    its fastest attention kernel, divided by the time of the reduced model, in the same process{batches} (median over seeds). A
    speed-up below 1 means that the reduction makes the model slower. The milliseconds of different arms were measured in
    different processes while other runs were active, so compare speed-ups, not milliseconds.
    """
    return " ".join(text.split())


def superseded(records: Sequence[Record]) -> str:
    """Return a text that says how many runs do not follow the recipe (the file that lists the runs) as it is now, and why: they
    come from an earlier version of it, or their settings were tuned with other ranges. The text is empty if there are no such
    runs. `records` are the results of the runs.
    """
    reasons = [r.superseded for r in records if r.superseded]
    if not reasons:
        return ""
    count = f"All {len(reasons)}" if len(reasons) == len(records) else f"{len(reasons)} of {len(records)}"
    texts = (f"{reason[0].upper()}{reason[1:].rstrip('.')}." for reason in dict.fromkeys(reasons))
    arms = [*dict.fromkeys(r.arm for r in records if r.superseded)]
    names = f" ({', '.join(f'“{arm}”' for arm in arms)})" if len(reasons) < len(records) and len(arms) <= 3 else ""
    return f"{count} runs on this page{names} do not follow the recipe as it is now. {' '.join(texts)}"


def failures(comparison: Comparison, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return a list of pairs (text, Python traceback) for the failed and missing runs. The text names the arm (variant), its
    seeds and the error. `records` are the results of the runs.

    The text also names the line of the recipe that raised the error. Seeds with equal errors share one pair.
    """
    tracebacks: dict[tuple, str] = {}
    for r in sorted(records, key=lambda r: (r.status != "failed", r.seed)):  # the reason of a pass is its first failed fold
        if r.traceback:
            tracebacks.setdefault((r.arm, condition_of(r), r.seed // (r.folds or 1)), r.traceback)
    out = []
    for row in comparison.rows:
        reasons = {} if row.unavailable else row.failures
        for reason, group in groupby(sorted(reasons, key=reasons.__getitem__), key=reasons.__getitem__):
            seeds = list(group)
            traceback = next((text for s in seeds if (text := tracebacks.get((row.arm, row.condition, s)))), "")
            line = user_line(traceback)
            text = f"{row.arm} at {row.condition.title}, {format_seeds(seeds, unit='pass' if row.folds else 'seed')}: {reason}"
            out.append((text + f" ({line})" * bool(line), traceback))
    return out


def unavailable(comparison: Comparison) -> str:
    """Return a text that names the arms (variants) without any result because their pretrained weights could not be
    obtained, with the reasons. The text is empty if there are no such arms.
    """
    arms: dict[str, list[str]] = {}
    for row in comparison.rows:
        if row.unavailable:
            reason = next(why for why in row.failures.values() if why.startswith("unavailable")).removeprefix("unavailable: ")
            arms.setdefault(reason, [])
            arms[reason] += [row.arm] if row.arm not in arms[reason] else []
    texts = []
    for reason, names in arms.items():
        problem, _, advice = reason.partition("; ")
        problem = problem.rpartition(" (")[2].removesuffix(")")  # the name of the weights is also in the advice
        pronoun = "it" if len(names) == 1 else "them"
        texts.append(f"Not run: {join_names(names, len(names))}.")
        texts.append(f"The weights are not on disk and could not be downloaded ({problem}).")
        texts += [f"To run {pronoun}, {advice}."] if advice else []
    return " ".join(texts)
