"""Numbers, tables and sentences of a report, for both pages and the terminal."""

import math
from collections.abc import Sequence
from itertools import groupby

from smallvit.record import Record, format_labels, user_line

from .compare import Comparison, Difference, Row, format_seeds
from .statistics import LEVEL, MIN_PAIRS

BUDGETS = {
    "params": "Parameters",
    "macs": "MACs per image",
    "images_seen": "Images seen",
    "seconds": "Seconds",
    "extra_labels": "Extra labels",
}
COST = "smallvit.evaluate.cost"
REDUCED = {"tokens": "Tokens left", "macs": "MACs per image", "ms": "ms per batch", "speedup": "Speed-up"}
NAMED = 3  # arms named in one sentence; more are counted


def percent(x: float) -> str:
    """Return a fraction as text in percent, with two decimals and no percent sign: 0.931 becomes `93.10`."""
    return f"{100 * x:.2f}"


def points(x: float) -> str:
    """Return the difference `x` of two accuracies as text in percentage points, with its sign: 0.004 becomes `+0.40`."""
    return f"{100 * x:+.2f}".replace("-", "−")


def interval(difference: Difference) -> str:
    """Return the 95% interval of a difference from the baseline as text, in percentage points: `[−0.10, 0.35]`. With a single
    seed there is no interval, and the text is `[no interval]`.
    """
    if difference.low is None or difference.high is None:
        return "[no interval]"
    return f"[{100 * difference.low:.2f}, {100 * difference.high:.2f}]".replace("-", "−")


def p_value(p: float | None) -> str:
    """Return a p-value as text with three decimals. If `p` is None because no test was made, the text is a dash."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def mean_sd(row: Row) -> str:
    """Return the mean accuracy of an arm (variant) over its seeds as text, in percent and with the standard deviation (SD):
    `93.10 ± 0.24 (SD, n = 8)`. `row` holds the results of the arm.
    """
    if row.mean is None:
        return "–"
    if row.sd is None:
        return f"{percent(row.mean)} (n = 1)"
    return f"{percent(row.mean)} ± {percent(row.sd)} (SD, n = {len(row.values)})"


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
    """Return a relative difference from the baseline as text: 0.2 becomes `+20%`, and 2.0 becomes `3× baseline`. For infinity
    the text is `baseline: 0`.
    """
    if fraction >= 1:
        return "baseline: 0" if math.isinf(fraction) else f"{1 + fraction:,.0f}× baseline"
    return f"{fraction:+.0%}".replace("-", "−")


def sentence(comparison: Comparison, row: Row) -> str:
    """Return the verdict on one arm (variant) as one line of text: `+SPT at 1,000 labels: better by 0.42 points [0.20, 0.64]`.
    `row` holds the results of the arm.

    The line names the baseline only if the comparison has several baselines.
    """
    d, reason = row.difference, f" ({row.reason})" if row.reason else ""
    certain = row.verdict in ("better", "worse")
    start = f"{row.arm} at {format_labels(row.labels)}: {row.verdict}"
    start += f" {'than' if certain else 'compared with'} {row.baseline}" if len(comparison.baselines) > 1 else ""
    if d is None:
        return start + reason
    if certain:
        return f"{start} by {percent(abs(d.mean))} points {interval(d)}"
    return f"{start}, {points(d.mean)} points {interval(d)}{reason}"


def answer(comparison: Comparison) -> str:
    """Return the main result of a comparison as one or two sentences. They say which arms (variants) are better or worse than
    their baseline, and for which arms no difference was shown.
    """
    judged = [row for row in comparison.rows if row.verdict]
    if not judged:
        return f"No technique has been compared with {baselines(comparison.rows, 'its own baseline')}."
    better, worse, undecided = ([row for row in judged if row.verdict == word] for word in ("better", "worse", "inconclusive"))
    place = f"At {format_labels(comparison.labels[0])}, no" if len(comparison.labels) == 1 else "No"
    first = f"{place} technique was shown to be better than {baselines(judged, 'its own baseline')}"
    if better:
        first = place[:-2] + decided_arms(comparison, better, baselines(better, "their own baselines"))
    elif not worse and not undecided:
        first = "No verdict is possible yet"
    first += f", and {decided_arms(comparison, worse, baselines(worse, 'their own baselines'))}" if worse else ""
    second = [f"no difference was shown for {undecided_arms(comparison, judged, undecided)}"] if undecided else []
    for verdict, problem in (
        ("not enough seeds", f"fewer than the {MIN_PAIRS} seeds that a verdict needs"),
        ("no verdict", "no verdict, for the reasons in the table"),
    ):
        if count := sum(row.verdict == verdict for row in judged):
            every = "all " if 1 < count == len(judged) else ""
            second += [f"{every}{count} comparison{'s have' if count > 1 else ' has'} {problem}"]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in (first, "; ".join(second)) if text)


def decided_arms(comparison: Comparison, rows: Sequence[Row], baseline: str) -> str:
    """Return a part of a sentence about arms (variants) with the same verdict: `“A” (+2.30 points) and “B” (+1.00 points) are
    better than “vit”`. `rows` are the results of these arms, and `baseline` is the text after "than".
    """
    arms: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: -abs(row.difference.mean) if row.difference else 0):
        arms.setdefault(row.arm, [])
    for row in rows:
        value = points(row.difference.mean) if row.difference else ""
        value += " points" if not arms[row.arm] else ""
        place = at_labels([row.labels]) if not arms[row.arm] or row.labels is None else f"at {row.labels:,}"
        arms[row.arm] += [value + f" {place}" * (len(comparison.labels) > 1)]
    names = [f"“{arm}” ({', '.join(values)})" for arm, values in arms.items()]
    verb = "is" if len(names) == 1 else "are"
    return f"{join_names(names, NAMED, 'more arm' + 's' * (len(names) > NAMED + 1))} {verb} {rows[0].verdict} than {baseline}"


def undecided_arms(comparison: Comparison, judged: Sequence[Row], rows: Sequence[Row]) -> str:
    """Return a text that names the arms (variants) in `rows`, for which no difference from the baseline was shown: `“A” at 100
    labels and any of the 3 arms at 1,000 labels`. `judged` are the results of all arms that have a verdict.
    """
    found: dict[str, list[int | None]] = {}
    for n in comparison.labels:
        arms, total = [row.arm for row in rows if row.labels == n], sum(row.labels == n for row in judged)
        names = join_names([f"“{arm}”" for arm in arms])
        which = names if len(arms) <= 2 else f"{'any' if len(arms) == total else len(arms)} of the {total} arms"
        if arms:
            found.setdefault(which, []).append(n)
    several = len(comparison.labels) > 1
    return join_names([which + f" {at_labels(labels)}" * several for which, labels in found.items()], len(found))


def baselines(rows: Sequence[Row], several: str) -> str:
    """Return the name of the baseline of some results, in quotes. If the results have different baselines, return the text
    `several` instead.
    """
    names = {row.baseline for row in rows}
    return f"“{names.pop()}”" if len(names) == 1 else several


def superseded(records: Sequence[Record]) -> str:
    """Return a text that says how many runs come from an earlier version of the recipe file, and why they were replaced. The
    text is empty if there are no such runs. `records` are the results of the runs.
    """
    reasons = [r.superseded for r in records if r.superseded]
    if not reasons:
        return ""
    count = f"All {len(reasons)}" if len(reasons) == len(records) else f"{len(reasons)} of {len(records)}"
    texts = (f"{reason[0].upper()}{reason[1:].rstrip('.')}." for reason in dict.fromkeys(reasons))
    return f"{count} runs on this page come from an earlier version. {' '.join(texts)}"


def notes(comparison: Comparison, warnings: Sequence[str]) -> str:
    """Return sentences for the reader of a report: how many comparisons were removed from the recipe file, how many runs have
    no result, and how many warnings there are. `warnings` are the texts of the warnings.
    """
    lost = sum(len(row.failures) for row in comparison.rows if not row.unavailable)
    total, s = lost + sum(len(row.values) for row in comparison.rows), "s" * (comparison.earlier > 1)
    removed = f"{comparison.earlier} further comparison{s} whose arms were removed from the recipe after they had been run"
    out = [f"The family counts {removed}."] if comparison.earlier else []
    out += [f"{lost} of {total} runs have no result; see Failures."] if lost else []
    if warnings:
        out.append("There is 1 warning below." if len(warnings) == 1 else f"There are {len(warnings)} warnings below.")
    return " ".join(out)


def how_to_read(comparison: Comparison) -> list[str]:
    """Return paragraphs of text for a reader who does not know the code. They explain the terms of a report, such as intervals,
    p-values, verdicts and costs.
    """
    text = f"""
    Differences are paired: runs with the same seed are trained on the same images in the same order. Brackets are the 95% t
    interval of the mean paired difference, in percentage points of test accuracy. This interval is not corrected for the number
    of comparisons.

    p-values are Holm-corrected for the number of comparisons ({comparison.family} in this recipe). A verdict of better or worse
    needs a corrected p below {LEVEL}, at least {MIN_PAIRS} seeds and no missing run. Inconclusive means that no difference was
    shown. It does not mean that the arms are equal. References are rows for orientation and get no verdict.

    All intervals and standard deviations (SD) are over seeds, on one fixed set of test images. They do not tell how much the
    results would change with other test images.

    Costs are medians over seeds and include pretraining. A cost that differs from the baseline's by more than 5% is marked.
    Extra labels are validation labels that were used to choose something, and labels of an earlier run that the arm starts
    from.
    """
    return [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]


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
    tracebacks = {(r.arm, r.labels, r.seed): r.traceback or "" for r in records}
    out = []
    for row in comparison.rows:
        reasons = {} if row.unavailable else row.failures
        for reason, group in groupby(sorted(reasons, key=reasons.__getitem__), key=reasons.__getitem__):
            seeds = list(group)
            traceback = next((text for s in seeds if (text := tracebacks.get((row.arm, row.labels, s)))), "")
            line = user_line(traceback)
            text = f"{row.arm} at {format_labels(row.labels)}, {format_seeds(seeds)}: {reason}"
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
