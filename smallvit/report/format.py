"""Numbers, tables and sentences of a report, for both pages and the terminal."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from smallvit.record import Record, user_line
from smallvit.verdicts import contrasts
from smallvit.verdicts.compare import format_seeds
from smallvit.verdicts.comparison import Comparison, Difference, Row, condition_of
from smallvit.verdicts.statistics import EQUIVALENCE, LEVEL, MIN_PAIRS, collapse_rate

from .units import Score, score_in, score_of

BUDGETS = {
    "params": "Parameters",
    "macs": "MACs per image",
    "images_seen": "Images seen",
    "seconds": "Seconds",
    "extra_labels": "Extra labels",
}
TUNING = {"trials": "Trials", "tuning_seconds": "Seconds of tuning"}  # shown if settings were tuned
COST = "smallvit.evaluate.cost"
REDUCED = {"tokens": "Tokens left", "macs": "MACs per image", "ms": "ms per batch", "speedup": "Speed-up"}
NAMED = 3  # arms named in one sentence; more are counted


def percent(x: float) -> str:
    """Return a fraction as text in percent, with two decimals and no percent sign: 0.931 becomes `93.10`."""
    return f"{100 * x:.2f}"


def interval(difference: Difference, score: Score) -> str:
    """Return the 95% confidence interval of the mean difference between an arm (variant) and its control (the arm it is
    compared with) as text: `[−0.10, 0.35]`. It covers the chance in the seeds and in the choice of the test images.
    `difference` holds the differences, and `score` gives the unit. With a single seed, the text is `[no interval]`.
    """
    if difference.low is None or difference.high is None:
        return "[no interval]"
    return score.interval(difference.low, difference.high)


def p_value(p: float | None) -> str:
    """Return a p-value as text with three decimals. If `p` is None because no test was made, the text is a dash."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def mean_sd(row: Row, unit: str = "") -> str:
    """Return the mean score of an arm (variant) over its seeds as text, with the standard deviation (SD):
    `93.10 ± 0.24 (SD, n = 8)`. `row` holds the results of the arm, and `unit` is written after the numbers.
    """
    score = score_of(row)
    if row.mean is None:
        return "–"
    if row.sd is None:
        return f"{score.number(row.mean)}{unit} (n = 1)"
    return f"{score.number(row.mean)} ± {score.number(row.sd)}{unit} (SD, n = {len(row.values)})"


def join_names(names: Sequence[str], limit: int = 3, word: str = "more") -> str:
    """Join names to one text: `A, B and C`. Only the first `limit` names are shown, and the text says how many more there are:
    `A, B, C and 2 more`. `word` is used in place of "more".
    """
    shown = list(names) if len(names) <= limit else [*names[:limit], f"{len(names) - limit} {word}"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def at_labels(labels: Sequence[int | None]) -> str:
    """Return several numbers of labelled images as text: `at 10, 100 and all labels`. None in the list means that all images
    have labels.
    """
    numbers = ["all" if n is None else f"{n:,}" for n in labels]
    return f"at {join_names(numbers, len(numbers))} label{'s' * (numbers != ['1'])}"


def cost(row: Row, name: str) -> tuple[str, list[str]]:
    """Return one cost of an arm (variant) as text, and a list of remarks, such as a large difference from the baseline. `row`
    holds the results of the arm. `name` is the name of the cost, such as "macs".

    The remarks give the standard deviation over images, a difference of more than 5% from the baseline, and a speed-up below 1.
    """
    value = (row.budget | row.forward)[name]
    if value is None:
        return "–", []
    forms = {
        "macs": f"{value / 1e6:,.2f} M",
        "seconds": f"{value:,.1f}",
        "tuning_seconds": f"{value:,.1f}",
        "tokens": f"{value:,.1f}",
        "ms": f"{value:,.1f}",
        "speedup": f"{value:.2f}×",
    }
    sd = row.forward["macs_sd"] if name == "macs" else None
    remarks = [f"± {sd / 1e6:,.2f} M SD"] if sd is not None else []
    remarks += [excess(row.unequal[name])] if name in row.unequal else []
    remarks += ["slower"] if name == "speedup" and value < 1 else []
    return forms.get(name, f"{value:,.0f}"), remarks


def excess(fraction: float) -> str:
    """Return the relative difference `fraction` of a cost from that of the baseline as text. Values below 1 are in
    percent: 0.2 becomes `+20%`. Values from 1 on are a multiple: 2.0 becomes `3× baseline`. Infinity becomes `baseline: 0`.
    """
    if fraction >= 1:
        return "baseline: 0" if math.isinf(fraction) else f"{1 + fraction:,.0f}× baseline"
    return f"{fraction:+.0%}".replace("-", "−")


def sentence(comparison: Comparison, row: Row) -> str:
    """Return the verdict on one arm (variant) as one line of text: `+SPT at 1,000 labels: better by 0.42 points [0.20, 0.64]`.
    `row` holds the results of the arm.

    The line names the arm it is compared with only if this is not the only baseline. It ends with how often the verdict would
    come out again, or with the reason why there is none.
    """
    d, reason, score = row.difference, f" ({row.reason})" if row.reason else "", score_of(row)
    start = f"{row.arm} at {row.condition.title}: {row.verdict}"
    if len(comparison.baselines) > 1 or row.baseline != row.group:
        start += f" {'than' if row.decided else 'compared with'} {row.baseline}"
    if d is None:
        return start + reason
    if not row.decided:
        return f"{start}, {score.difference(d.mean)}{score.points} {interval(d, score)}{reason}"
    again = f"; again in {often(d)} of 100 repetitions" if d.replication is not None else ""
    amount = f"{score.number(abs(d.mean))}{score.points} {interval(d, score)}"
    return f"{start} by {amount}{again}{', fragile' * d.fragile}{reason}"


def seeds_interval(difference: Difference, score: Score) -> str:
    """Return the confidence interval of a mean difference over new seeds on the same test images as text:
    `[−0.10, 0.35] on these test images`. `difference` holds the differences between an arm (variant) and its control (the arm
    it is compared with), and `score` gives the unit. Without such an interval the text is empty.
    """
    if difference.seeds_low is None or difference.seeds_high is None:
        return ""
    return f"{score.interval(difference.seeds_low, difference.seeds_high)} on these test images"


def often(difference: Difference) -> str:
    """Return in how many of 100 repetitions, with new seeds and new test images, a verdict would come out again, as text:
    `about 78`. The number is rounded down. The text is `at least 78` if records do not say which test images were classified
    correctly. `difference` holds the differences between an arm (variant) and its control (the arm it is compared with).
    """
    count = 100 * (difference.replication or 0)
    return "more than 99" if count >= 99.5 else f"{'at least' if difference.bound else 'about'} {math.floor(count)}"


def certainty(comparison: Comparison, row: Row) -> list[str]:
    """Return sentences about the certainty of the verdict on an arm (variant), as a list. For better and worse: in how many of
    100 repetitions the verdict would come out again. For inconclusive: the smallest difference that would have been found, and
    what would help. `row` holds the results of the arm, and `comparison` holds all results.

    For better and worse, they also say how rare a collapse of the training must be if no seed shows one.
    """
    d = row.difference
    if d is None or d.variance is None:
        return []
    n = len(d.values)
    if d.replication is not None:
        text = f"Run again with {n} fresh seeds and new test images, this verdict would come out again in {often(d)}"
        text += " of 100 repetitions"
        if d.replication < 0.9:
            text += (
                f"; {d.seeds_for_90} seeds would make it about 90"
                if d.seeds_for_90
                else "; more seeds alone would not make it 90"
            )
        return [f"{text}." + " It is fragile." * d.fragile, collapse(n)]
    if d.detectable is None:
        return []
    amount = score_of(row).number(d.detectable) + score_of(row).points
    found = f"A difference of {amount} would have been found with 80% probability."
    return [found, *([advice] if (advice := what_helps(comparison, row)) else [])]


def collapse(seeds: int) -> str:
    """Return a sentence that says which rates of collapse (share of runs whose training fails) are excluded if none of `seeds`
    runs collapsed: `No collapse in 8 seeds excludes only collapse rates above 31%.`
    """
    return f"No collapse in {seeds} seeds excludes only collapse rates above {100 * collapse_rate(seeds):.0f}%."


def what_helps(comparison: Comparison, row: Row) -> str:
    """Return a sentence that says what would help to decide an inconclusive verdict: more seeds (with the command that adds
    them), more test images, more images to draw the training images from, or new runs. The text is empty if nothing is known to
    help. `row` holds the results of the arm (variant), and `comparison` holds all results.
    """
    d = row.difference
    if d is None or row.stopped:
        return ""
    return {
        "seeds": "" if row.looks and row.next_look is None else f"More seeds would help: {until_decided(comparison)}",
        "images": "More test images would help, not more seeds.",
        "pool": "More images to draw the labelled ones from would help, not more seeds.",
        "records": "Run it again: the interval is wide because earlier records do not say which test images were right.",
    }.get(d.needs, "")


def until_decided(comparison: Comparison) -> str:
    """Return the command that trains more seeds until the verdicts are decided, as text: `smallvit run R --until-decided`.
    `comparison` holds the results and the name R of the recipe (the file that lists the runs).
    """
    return f"smallvit run {comparison.recipe} --until-decided"


def trends(comparison: Comparison) -> dict[tuple[int | None, str], str]:
    """Return how each verdict changes with longer training at common settings, as a dict from (number of labels, arm) to a
    word. An arm is a variant. For example, the verdict holds (stays the same) or fades (the difference gets smaller). The word
    is empty if no length shows a difference. `comparison` holds all results.
    """
    return {(trend.labels, trend.arm): trend.outcome for trend in contrasts.trends(comparison) if not trend.tuned}


def baselines(rows: Sequence[Row], several: str) -> str:
    """Return the name of the baseline of some results, in quotes. If the results have different baselines, return the text
    `several` instead.
    """
    names = {row.baseline for row in rows}
    return f"“{names.pop()}”" if len(names) == 1 else several


def superseded(records: Sequence[Record]) -> str:
    """Return a text that says how many runs were made with an earlier version of the recipe (the file that lists the runs), and
    why the recipe no longer contains them. The text is empty if there are no such runs. `records` are the results of the runs.
    """
    reasons = [r.superseded for r in records if r.superseded]
    if not reasons:
        return ""
    count = f"All {len(reasons)}" if len(reasons) == len(records) else f"{len(reasons)} of {len(records)}"
    texts = (f"{reason[0].upper()}{reason[1:].rstrip('.')}." for reason in dict.fromkeys(reasons))
    return f"{count} runs on this page come from an earlier version. {' '.join(texts)}"


def notes(
    comparison: Comparison, warnings: Sequence[str], records: Sequence[Record] = (), *, more_seeds: bool = True
) -> str:
    """Return sentences for the reader of a report: how the verdicts change with longer training, what would help to decide
    inconclusive ones, how a cross-validation or groups of images were tested, which kinds of chance the confidence intervals
    leave out, how many image files were left out, and how many runs have no result. `comparison` holds all results, `warnings`
    are the texts of the warnings, which are counted, and `records` are the results of the runs. With `more_seeds=False`, more
    seeds are not advised, because no arm was shown to be better than guessing.
    """
    lost = sum(len(row.failures) for row in comparison.rows if not row.unavailable)
    total, s = lost + sum(len(row.values) for row in comparison.rows), "s" * (comparison.earlier > 1)
    removed = f"{comparison.earlier} further comparison{s} whose arms were removed from the recipe after they had been run"
    out = [longer(comparison), *help_for_undecided(comparison, more_seeds), *methods(comparison), *limits(comparison)]
    skipped = max((r.skipped_files or 0 for r in records), default=0)
    what = f"{skipped:,} image files could not be read and were" if skipped > 1 else "1 image file could not be read and was"
    out += [f"{what} left out."] if skipped else []
    out += [f"The family counts {removed}."] if comparison.earlier else []
    out += [f"{lost} of {total} runs have no result; see Failures."] if lost else []
    if warnings:
        out.append("There is 1 warning below." if len(warnings) == 1 else f"There are {len(warnings)} warnings below.")
    return " ".join(filter(None, out))


def longer(comparison: Comparison) -> str:
    """Return a sentence that says for which arms (variants) the difference from the baseline holds (stays), fades (gets
    smaller), turns (to the opposite) or appears with longer training. The text is empty if there is a single training length.
    `comparison` holds all results.
    """
    lengths = sorted({c.length for c in comparison.conditions if c.length is not None and not c.tuned})
    several = len({c.labels for c in comparison.conditions}) > 1
    found: dict[str, list[str]] = {}
    for (labels, arm), outcome in trends(comparison).items():
        found.setdefault(outcome, []).append(f"“{arm}”" + f" {at_labels([labels])}" * several)
    words = [word for word in contrasts.OUTCOMES if word in found]
    texts = [f"{word} for {join_names(found[word])}" for word in words]
    return f"From {lengths[0]:,} to {lengths[-1]:,} training steps, the difference {'; it '.join(texts)}." if texts else ""


def help_for_undecided(comparison: Comparison, more_seeds: bool = True) -> list[str]:
    """Return sentences that say how many inconclusive verdicts more seeds, more images or new runs would help to decide, as a
    list. New runs help if old records do not say which test images were right. Only the main conditions count: the longest
    training, and tuned settings if there are any. `comparison` holds all results. With `more_seeds=False`, comparisons that
    more seeds would help are left out.
    """
    count = Counter(row.difference.needs for row in comparison.main_rows if row.difference and what_helps(comparison, row))
    first = not any(row.looks for row in comparison.rows)
    twice = " (this report and the next one together give a false verdict in about 8 of 100 comparisons, each alone in 5)"
    forms = {
        "seeds": f"more {comparison.rows[0].units} would help: {until_decided(comparison)}{twice * first}",
        "images": f"more test images would help, not more {comparison.rows[0].units}",
        "pool": "more images to draw the labelled ones from would help, not more seeds",
        "records": "new runs would help, because earlier records do not say which test images were right",
    }
    if not more_seeds:
        del forms["seeds"]
    return [f"For {count[k]} inconclusive comparison{'s' * (count[k] > 1)}, {text}." for k, text in forms.items() if count[k]]


def methods(comparison: Comparison) -> list[str]:
    """Return sentences that say how the differences were tested, and why, if the data are divided into folds or the images
    belong to groups, such as patients. `comparison` holds all results. Other data need no sentence.
    """
    found = dict.fromkeys(row.difference.method for row in comparison.main_rows if row.verdict and row.difference)
    texts = [f"the differences are {text}" if text.startswith("tested") else text for text in found if text]
    return [f"{text[0].upper()}{text[1:]}." for text in texts]


def limits(comparison: Comparison) -> list[str]:
    """Return sentences about the limits of the confidence intervals, as a list: records do not say which test images were
    classified correctly, seeds draw nearly all images of one pool, or it is unknown how many training images two seeds share.
    `comparison` holds all results.
    """
    differences = [(row.condition, row.difference) for row in comparison.rows if row.verdict and row.difference]
    out = []
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
    single = any(row.difference.single_folds for row in comparison.rows if row.difference)
    judged = [row.difference for row in comparison.rows if row.verdict and row.difference]
    seeds = max((len(d.values) for d in judged), default=MIN_PAIRS)
    looks = next((row.looks for row in comparison.rows if row.looks), ())
    score = score_in(comparison)
    excluded = f"{100 * EQUIVALENCE:g} points" if score.percent else f"{EQUIVALENCE:g}"
    unit = f"in percentage points of test {score.title}" if score.percent else f"in units of the test {score.title}"
    intervals = f"""
    Each difference has two 95% intervals, {unit}. The first one is about new test images: it covers the chance in the {units}
    and in the choice of the test images. The second one, over {units} alone, is about these test images. It says what
    training again would give, and nothing about other images. Neither is corrected for the number of comparisons.
    """
    shared = (
        "All folds share the same images, so the first interval is widened."
        if folds
        else "If each seed draws its training images from the same pool, two seeds share some of them. The first interval is "
        "widened for this share."
    )
    needed = f", at least {MIN_PAIRS} {units} and no missing run"
    if single:
        intervals = f"""
    Each difference has a 95% interval, {unit}, that is about new test images. It is computed from the differences of the single
    folds, because there are fewer than {MIN_PAIRS} passes. It is not corrected for the number of comparisons.
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
        text += f"""
    The data are divided into {folds} folds. A pass trains {folds} models, and each of them is tested on the fold that it was
    not trained on, so each image is a test image once in a pass. Each pass divides the images anew. The score of a pass is the
    mean of the scores of its folds, weighted by their images. Passes take the place of seeds on this page.
    """
    if single:
        text += f"""
    With fewer than {MIN_PAIRS} passes, the verdict is about the differences of the single folds. The models of two folds share
    training images, so their scores are alike, and a usual t-test would be too sure. Nadeau and Bengio's correction makes the
    variance of the mean difference larger by the share of test images, and the interval wider. From {MIN_PAIRS} complete passes
    on, the test is over passes and images.
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
    text += f"""
    Costs are medians over {units} and include pretraining. A cost that differs from the baseline's by more than 5% is marked.
    Extra labels are validation labels that were used to choose something, labels of the trials that tuned the settings, and
    labels of an earlier run that the arm starts from.
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


def failures(comparison: Comparison, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return a list of pairs (text, Python traceback) for the failed and missing runs. The text names the arm (variant), its
    seeds and the error. `records` are the results of the runs.

    The text also names the line of the recipe that raised the error. Seeds with equal errors share one pair.
    """
    tracebacks = {(r.arm, condition_of(r), r.seed): r.traceback or "" for r in records}
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
            reason = next(iter(row.failures.values())).removeprefix("unavailable: ")
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
