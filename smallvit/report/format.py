"""A comparison in words: numbers as they are quoted, verdicts as sentences, and what is equal and what is not."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from smallvit.record import format_labels

from .statistics import LEVEL, MIN_PAIRS
from .verdicts import Comparison, Difference, Row, seeds_text

BUDGETS = {
    "params": "Parameters",
    "macs": "MACs per image",
    "images_seen": "Images seen",
    "seconds": "Seconds",
    "extra_labels": "Extra labels",
}
COST = "smallvit.evaluate.cost"
REDUCED = {"tokens": "Tokens left", "macs": "MACs per image", "ms": "ms per batch", "speedup": "Speed-up"}
WORDS = ("better", "worse", "inconclusive", "not enough seeds", "no verdict")


def percent(x: float) -> str:
    """A fraction as percent, two decimals."""
    return f"{100 * x:.2f}"


def points(x: float) -> str:
    """A signed difference of fractions, in points."""
    return f"{100 * x:+.2f}".replace("-", "−")


def interval(d: Difference) -> str:
    """`[−0.10, 0.35]` in points; one pair has none."""
    return "[no interval]" if d.low is None else f"[{100 * d.low:.2f}, {100 * d.high:.2f}]".replace("-", "−")


def p_value(p: float | None) -> str:
    """A p-value as it is quoted; a dash where no test was made."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def mean_sd(row: Row) -> str:
    """`93.10 ± 0.24 (SD, n = 8)`: no ± leaves this module without saying what it is."""
    if row.sd is None:
        return f"{percent(row.mean)} (n = 1)" if row.values else "–"
    return f"{percent(row.mean)} ± {percent(row.sd)} (SD, n = {len(row.values)})"


def columns(c: Comparison) -> dict[str, str]:
    """What a row costs -> the column's title; first what fewer tokens cost and buy, where the evaluator `cost` says so."""
    return (REDUCED if c.reduced else {}) | BUDGETS


def cost(row: Row, name: str) -> tuple[str, list[str]]:
    """One cost of a row, and what is to be said of it: its SD over images, and how far it is from the baseline's if over 5%."""
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
    remarks += ["loses time"] if name == "speedup" and value < 1 else []
    return forms.get(name, f"{value:,.0f}"), remarks


def excess(share: float) -> str:
    if share >= 1:
        return "baseline: 0" if math.isinf(share) else f"{1 + share:,.0f}× baseline"
    return f"{share:+.0%}".replace("-", "−")


def sentence(c: Comparison, row: Row) -> str:
    """A verdict in words: `+SPT at 1,000 labels: better by 0.42 points [0.20, 0.64]`; of several baselines it names its own."""
    d, why = row.difference, f" ({row.reason})" if row.reason else ""
    found = row.verdict in ("better", "worse")
    start = f"{row.arm} at {format_labels(row.labels)}: {row.verdict}"
    start += f" {'than' if found else 'against'} {row.baseline}" if len(c.baselines) > 1 else ""
    if d is None:
        return start + why
    if found:
        return f"{start} by {percent(abs(d.mean))} points {interval(d)}"
    return f"{start}, {points(d.mean)} points {interval(d)}{why}"


def summary(c: Comparison) -> str:
    """How many comparisons came out how."""
    counts = Counter(row.verdict for row in c.rows)
    said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) or "none to judge"
    lost = sum(len(row.failures) for row in c.rows if not row.unavailable)
    finished = sum(len(row.values) for row in c.rows)
    tail = f" {lost} of {lost + finished} runs left no number; see Failures." if lost else ""
    return f"Against {c.baseline}, {c.family} comparison{'s' * (c.family != 1)}: {said}.{tail}"


def how_to_read(c: Comparison) -> str:
    """What the words and brackets mean, for somebody who reads the page without the code."""
    return (
        "Differences are paired: the same seed means the same images in the same order. Brackets are the 95% t interval of "
        f"one paired difference, in points of test accuracy. A verdict also pays for all {c.family} comparisons of this recipe "
        f"(Holm, {LEVEL:.0%}) and takes at least {MIN_PAIRS} pairs and no missing run. Inconclusive means not shown, not "
        "equal. References are extra_references and get no verdict. Intervals are over seeds on one fixed set of test images: they say "
        "nothing of other images."
    )


def how_it_was_timed(records: Sequence[dict]) -> str:
    """What tokens left, MACs and speed-up are, and that a speed-up can be a loss."""
    evaluators = [e for r in records if r.get("run") for e in r["run"].get("evaluators", ()) if e.get("call") == COST]
    sizes = sorted({e["batch"] for e in evaluators})
    on = f" on batches of {' and '.join(map(str, sizes))} images" if sizes else ""
    return (
        "Tokens left are those that leave the last block, MACs those of test images; where they depend on the image they are "
        "means, and the SD beside the MACs is over images. Speed-up is the time of a forward pass of the same model unreduced, "
        f"at its autotune attention kernel, over that of the reduced one, in the same process{on} (median over seeds). A value "
        "under 1 means that the reduction loses time. The milliseconds of different arms come from different processes, with "
        "other runs beside them: go by the speed-up where there is one."
    )


def budgets(c: Comparison) -> list[str]:
    """Which budgets every technique shares with its baseline (within 5%), and which it does not."""
    rows, out = [row for row in c.rows if row.role != "reference"], []
    for name, title in BUDGETS.items():
        said = [f"{arm} (not recorded)" for arm in dict.fromkeys(row.arm for row in rows if row.budget[name] is None)]
        for arm in dict.fromkeys(row.arm for row in rows if name in row.unequal):
            shares = [row.unequal[name] for row in rows if row.arm == arm and name in row.unequal]
            said.append(f"{arm} ({' to '.join(dict.fromkeys(map(excess, (min(shares), max(shares)))))})")
        out.append(f"{title}: " + (f"not within 5% of the baseline's: {', '.join(said)}" if said else "equal within 5%"))
    return out


def failures(c: Comparison) -> list[str]:
    """Every run that left no number, and why."""
    out = []
    for row in c.rows:
        if row.unavailable:
            continue
        by_reason = groupby(sorted(row.failures, key=row.failures.get), key=row.failures.get)
        out += [f"{row.arm} at {format_labels(row.labels)}, {seeds_text(list(seeds))}: {why}" for why, seeds in by_reason]
    return out


def unavailable(c: Comparison) -> list[str]:
    """The arms whose weights were not to be had where this ran, and why."""
    absent = [row for row in c.rows if row.unavailable]
    return list(
        dict.fromkeys(f"{row.arm}: {next(iter(row.failures.values())).removeprefix('unavailable: ')}" for row in absent)
    )
