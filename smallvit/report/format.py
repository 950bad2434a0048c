"""Numbers, tables and sentences of a report, for both pages and the terminal."""

import math
from collections.abc import Sequence
from dataclasses import replace

from smallvit.verdicts import contrasts
from smallvit.verdicts.comparison import Comparison, Difference, Row
from smallvit.verdicts.score import Score
from smallvit.verdicts.statistics import collapse_rate
from smallvit.words import join_names

from .units import score_of

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
FEW = 8.0  # effective number of test images below which a report says that they are few
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


def at_labels(labels: Sequence[int | None]) -> str:
    """Return several numbers of labelled images as text: `at 10, 100 and all labels`. None in the list means that all images
    have labels.
    """
    numbers = ["all" if n is None else f"{n:,}" for n in labels]
    return f"at {join_names(numbers, len(numbers))} label{'s' * (numbers != ['1'])}"


def cost(row: Row, name: str) -> tuple[str, list[str]]:
    """Return one cost of an arm (variant) as text, and a list of remarks, such as a large difference from the arm that it is
    compared with. `row` holds the results of the arm. `name` is the name of the cost, such as "macs".

    The remarks give the standard deviation over images, a difference of more than 5% from the other arm, and a speed-up below
    1.
    """
    value = (row.budget | row.forward)[name]
    if value is None:
        return "–", []
    forms = {
        "macs": multiply_adds(value),
        "seconds": f"{value:,.1f}",
        "tuning_seconds": f"{value:,.1f}",
        "tokens": f"{value:,.1f}",
        "ms": f"{value:,.1f}",
        "speedup": f"{value:.2f}×",
    }
    sd = row.forward["macs_sd"] if name == "macs" else None
    remarks = [f"± {multiply_adds(sd, value)} SD"] if sd is not None else []
    remarks += [excess(row.unequal[name], not row.control)] if name in row.unequal else []
    remarks += ["slower"] if name == "speedup" and value < 1 else []
    return forms.get(name, f"{value:,.0f}"), remarks


def multiply_adds(x: float, like: float | None = None) -> str:
    """Return a number of multiply-adds (MACs) as text: `2.43 M`, or `80.00 k` if there are fewer than 0.1 million of them. The
    number `like` chooses the unit; the default is `x` itself.
    """
    return f"{x / 1e3:,.2f} k" if 0 < (x if like is None else like) < 1e5 else f"{x / 1e6:,.2f} M"


def excess(fraction: float, from_baseline: bool = True) -> str:
    """Return the relative difference `fraction` of a cost from that of the baseline as text. Values below 1 are in
    percent: 0.2 becomes `+20%`. Values from 1 on are a multiple: 1.5 becomes `2.5× baseline`. Infinity becomes `baseline: 0`.
    With `from_baseline=False`, the difference is from another arm (variant), and the texts are `2.5×` and `instead of 0`.
    """
    if math.isinf(fraction):
        return "baseline: 0" if from_baseline else "instead of 0"
    if fraction >= 1:
        return f"{1 + fraction:,.{int(fraction < 9)}f}".removesuffix(".0") + "×" + " baseline" * from_baseline
    return f"{fraction:+.0%}".replace("-", "−")


def sentence(comparison: Comparison, row: Row) -> str:
    """Return the verdict on one arm (variant) as one line of text: `+SPT at 1,000 labels: better by 0.42 points [0.20, 0.64]`.
    `row` holds the results of the arm.

    The line names the arm it is compared with only if this is not the only baseline. It ends with how often the verdict would
    come out again, or with the reason why there is none.
    """
    d, reason, score = row.difference, f" ({row.reason})" if row.reason else "", score_of(row)
    start = f"{row.arm} at {row.condition.title}: {row.verdict}"
    if len(comparison.baselines) > 1 or row.control:
        start += f" {'than' if row.decided else 'compared with'} {row.baseline}"
    if d is None:
        return start + reason
    if not row.decided:
        return f"{start}, {score.difference(d.mean)}{score.points} {interval(d, score)}{reason}"
    again = f"; again in {often(d)} of 100 repetitions" if d.replication is not None else ""
    if d.mean < 0 and d.low is not None and d.high is not None:
        d = replace(d, low=-d.high, high=-d.low)
    amount = f"{score.amount(abs(d.mean))}{score.points} {interval(d, score)}"
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


def beyond_reach(row: Row) -> bool:
    """Return whether even the best possible score of an arm (variant), 100%, would probably not have been shown to be better
    than its control. `row` holds the results of the arm. The result is False for scores without a largest value.
    """
    d, score = row.difference, score_of(row)
    if d is None or d.detectable is None or row.mean is None or score.lower or not score.percent:
        return False
    return d.detectable > 1 - (row.mean - d.mean)


def few_units(row: Row) -> list[str]:
    """Return a sentence that says that the difference between an arm (variant) and its control comes from a few test images, or
    groups of them, as a list. Such a difference has a wide interval. The list is empty if it comes from many. `row` holds the
    results of the arm.
    """
    d = row.difference
    variance = d and d.variance
    if d is None or variance is None or variance.n_eff >= FEW:
        return []
    what = f"of the {d.groups:,} groups of test images" if d.groups else "test images"
    return [f"The interval is wide because the difference comes from only about {max(round(variance.n_eff), 1)} {what}."]


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
        "images": f"More groups of test images would help, not more {row.units} or more images of these groups."
        if d.groups
        else f"More test images would help, not more {row.units}.",
        "pool": "More images to draw the labelled ones from would help, not more seeds.",
        "records": "Run it again: the interval is wide because earlier records do not say which test images were right.",
    }.get(d.needs, "")


def until_decided(comparison: Comparison) -> str:
    """Return the command that trains more seeds until the verdicts are decided, as text: `smallvit run R --until-decided`.
    `comparison` holds the results, and the name R of the recipe (the file that lists the runs) or a command that runs it.
    """
    return f"{comparison.command or f'smallvit run {comparison.recipe}'} --until-decided"


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
