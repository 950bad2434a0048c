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
    """A fraction as percent with two decimals."""
    return f"{100 * x:.2f}"


def points(x: float) -> str:
    """A difference of two fractions in percentage points, with its sign."""
    return f"{100 * x:+.2f}".replace("-", "−")


def interval(d: Difference) -> str:
    """The 95% interval in points, `[−0.10, 0.35]`; a single pair has none."""
    if d.low is None or d.high is None:
        return "[no interval]"
    return f"[{100 * d.low:.2f}, {100 * d.high:.2f}]".replace("-", "−")


def p_value(p: float | None) -> str:
    """A p-value with three decimals; a dash if no test was made."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def mean_sd(row: Row) -> str:
    """Mean and standard deviation over seeds, in percent: `93.10 ± 0.24 (SD, n = 8)`."""
    if row.mean is None:
        return "–"
    if row.sd is None:
        return f"{percent(row.mean)} (n = 1)"
    return f"{percent(row.mean)} ± {percent(row.sd)} (SD, n = {len(row.values)})"


def listed(names: Sequence[str], limit: int = 3, word: str = "more") -> str:
    """Names as `A, B and C`. Names beyond the limit are counted: `A, B, C and 2 more`."""
    shown = list(names) if len(names) <= limit else [*names[:limit], f"{len(names) - limit} {word}"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def at_labels(labels: Sequence[int | None]) -> str:
    """Numbers of labels as text: `at 10, 100 and all labels`."""
    numbers = ["all" if n is None else f"{n:,}" for n in labels]
    return f"at {listed(numbers, len(numbers))} label{'s' * (numbers != ['1'])}"


def cost(row: Row, name: str) -> tuple[str, list[str]]:
    """One cost of a row as text, and remarks: its SD over images, and its distance from the baseline's if that is over 5%."""
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


def excess(share: float) -> str:
    """A relative excess over the baseline as text: `+20%`, `3× baseline`."""
    if share >= 1:
        return "baseline: 0" if math.isinf(share) else f"{1 + share:,.0f}× baseline"
    return f"{share:+.0%}".replace("-", "−")


def sentence(c: Comparison, row: Row) -> str:
    """A verdict as one line: `+SPT at 1,000 labels: better by 0.42 points [0.20, 0.64]`. Names one of several baselines."""
    d, reason = row.difference, f" ({row.reason})" if row.reason else ""
    certain = row.verdict in ("better", "worse")
    start = f"{row.arm} at {format_labels(row.labels)}: {row.verdict}"
    start += f" {'than' if certain else 'compared with'} {row.baseline}" if len(c.baselines) > 1 else ""
    if d is None:
        return start + reason
    if certain:
        return f"{start} by {percent(abs(d.mean))} points {interval(d)}"
    return f"{start}, {points(d.mean)} points {interval(d)}{reason}"


def answer(c: Comparison) -> str:
    """The result of the recipe in two sentences: what is better or worse than its baseline, and what was not shown."""
    judged = [row for row in c.rows if row.verdict]
    if not judged:
        return f"No technique has been compared with {baselines(c.rows, 'its own baseline')}."
    better, worse, undecided = ([row for row in judged if row.verdict == word] for word in ("better", "worse", "inconclusive"))
    place = f"At {format_labels(c.labels[0])}, no" if len(c.labels) == 1 else "No"
    first = f"{place} technique was shown to be better than {baselines(judged, 'its own baseline')}"
    if better:
        first = place[:-2] + decided(c, better, baselines(better, "their own baselines"))
    elif not worse and not undecided:
        first = "No verdict is possible yet"
    first += f", and {decided(c, worse, baselines(worse, 'their own baselines'))}" if worse else ""
    second = [f"no difference was shown for {undecided_arms(c, judged, undecided)}"] if undecided else []
    for verdict, problem in (
        ("not enough seeds", f"fewer than the {MIN_PAIRS} seeds that a verdict needs"),
        ("no verdict", "no verdict, for the reasons in the table"),
    ):
        if count := sum(row.verdict == verdict for row in judged):
            every = "all " if 1 < count == len(judged) else ""
            second += [f"{every}{count} comparison{'s have' if count > 1 else ' has'} {problem}"]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in (first, "; ".join(second)) if text)


def decided(c: Comparison, rows: Sequence[Row], than: str) -> str:
    """`“A” (+2.30 points at 100 labels, +0.40 at 1,000) and “B” (+1.00 points) are better than `than``, largest first."""
    arms: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: -abs(row.difference.mean) if row.difference else 0):
        arms.setdefault(row.arm, [])
    for row in rows:
        value = points(row.difference.mean) if row.difference else ""
        value += " points" if not arms[row.arm] else ""
        place = at_labels([row.labels]) if not arms[row.arm] or row.labels is None else f"at {row.labels:,}"
        arms[row.arm] += [value + f" {place}" * (len(c.labels) > 1)]
    names = [f"“{arm}” ({', '.join(values)})" for arm, values in arms.items()]
    verb = "is" if len(names) == 1 else "are"
    return f"{listed(names, NAMED, 'more arm' + 's' * (len(names) > NAMED + 1))} {verb} {rows[0].verdict} than {than}"


def undecided_arms(c: Comparison, judged: Sequence[Row], rows: Sequence[Row]) -> str:
    """For which arms no difference was shown: `“A” at 100 labels and any of the 3 arms at 1,000 and 10,000 labels`."""
    found: dict[str, list[int | None]] = {}
    for n in c.labels:
        arms, total = [row.arm for row in rows if row.labels == n], sum(row.labels == n for row in judged)
        names = listed([f"“{arm}”" for arm in arms])
        which = names if len(arms) <= 2 else f"{'any' if len(arms) == total else len(arms)} of the {total} arms"
        if arms:
            found.setdefault(which, []).append(n)
    several = len(c.labels) > 1
    return listed([which + f" {at_labels(labels)}" * several for which, labels in found.items()], len(found))


def baselines(rows: Sequence[Row], several: str) -> str:
    """The name of the baseline of these rows, in quotes; the text `several` if they have more than one."""
    names = {row.baseline for row in rows}
    return f"“{names.pop()}”" if len(names) == 1 else several


def superseded(records: Sequence[Record]) -> str:
    """Says which part of the runs the recipe no longer contains, and why; empty if it contains all."""
    reasons = [r.superseded for r in records if r.superseded]
    if not reasons:
        return ""
    count = f"All {len(reasons)}" if len(reasons) == len(records) else f"{len(reasons)} of {len(records)}"
    texts = (f"{reason[0].upper()}{reason[1:].rstrip('.')}." for reason in dict.fromkeys(reasons))
    return f"{count} runs on this page come from an earlier version. {' '.join(texts)}"


def notes(c: Comparison, warnings: Sequence[str]) -> str:
    """What a reader must know beside the answer: arms that were removed, runs without a result, warnings."""
    lost = sum(len(row.failures) for row in c.rows if not row.unavailable)
    total, s = lost + sum(len(row.values) for row in c.rows), "s" * (c.earlier > 1)
    removed = f"{c.earlier} further comparison{s} whose arms were removed from the recipe after they had been run"
    out = [f"The family counts {removed}."] if c.earlier else []
    out += [f"{lost} of {total} runs have no result; see Failures."] if lost else []
    if warnings:
        out.append("There is 1 warning below." if len(warnings) == 1 else f"There are {len(warnings)} warnings below.")
    return " ".join(out)


def how_to_read(c: Comparison) -> list[str]:
    """What the terms and brackets of a page mean, for a reader without the code."""
    text = f"""
    Differences are paired: runs with the same seed are trained on the same images in the same order. Brackets are the 95% t
    interval of the mean paired difference, in percentage points of test accuracy. This interval is not corrected for the number
    of comparisons.

    p-values are Holm-corrected for the number of comparisons ({c.family} in this recipe). A verdict of better or worse needs a
    corrected p below {LEVEL}, at least {MIN_PAIRS} seeds and no missing run. Inconclusive means that no difference was shown.
    It does not mean that the arms are equal. References are rows for orientation and get no verdict.

    All intervals and standard deviations (SD) are over seeds, on one fixed set of test images. They do not tell how much the
    results would change with other test images.

    Costs are medians over seeds and include pretraining. A cost that differs from the baseline's by more than 5% is marked.
    Extra labels are validation labels that were used to choose something, and labels of an earlier run that the arm starts
    from.
    """
    return [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]


def how_it_was_timed(records: Sequence[Record]) -> str:
    """What the columns on tokens, MACs and speed-up mean."""
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


def failures(c: Comparison, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Each failed or missing run, with its error and the line of the recipe that raised it, and the Python traceback."""
    tracebacks = {(r.arm, r.labels, r.seed): r.traceback or "" for r in records}
    out = []
    for row in c.rows:
        reasons = {} if row.unavailable else row.failures
        for reason, group in groupby(sorted(reasons, key=reasons.__getitem__), key=reasons.__getitem__):
            seeds = list(group)
            traceback = next((text for s in seeds if (text := tracebacks.get((row.arm, row.labels, s)))), "")
            line = user_line(traceback)
            text = f"{row.arm} at {format_labels(row.labels)}, {format_seeds(seeds)}: {reason}"
            out.append((text + f" ({line})" * bool(line), traceback))
    return out


def unavailable(c: Comparison) -> str:
    """One line on the arms whose weights were unavailable here, with the reasons; empty if there are none."""
    arms: dict[str, list[str]] = {}
    for row in c.rows:
        if row.unavailable:
            reason = next(iter(row.failures.values())).removeprefix("unavailable: ")
            arms.setdefault(reason, [])
            arms[reason] += [row.arm] if row.arm not in arms[reason] else []
    return "; ".join(f"{listed(names, len(names))} ({reason})" for reason, names in arms.items())
