"""The tables of a report, as text, for both pages."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from smallvit.record import Record, format_labels

from .compare import Comparison, Row
from .format import BUDGETS, REDUCED, cost, interval, mean_sd, p_value, percent, points


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a page: arm -> one cell for each column. A cell is its text and a list of remarks on it."""

    title: str
    columns: tuple[str, ...]
    rows: dict[str, list[tuple[str, list[str]]]]
    text: tuple[str, ...] = ("Verdict", "Accuracy, % (seed)")  # columns that are not numbers


def tables(c: Comparison, records: Sequence[Record]) -> dict[str, list[Table]]:
    """Heading -> the tables below it, most important first. Headings without a table are left out."""
    found = {
        "Accuracy": accuracy_tables(c),
        "Costs": cost_tables(c),
        "Probes of frozen features": probe_tables(records),
        "Other measurements": other_tables(c, records),
        "Accuracy of every seed": seed_tables(c),
    }
    return {heading: each for heading, each in found.items() if each}


def each_table(c: Comparison) -> list[tuple[str, tuple[Row, ...]]]:
    """Title and rows of each table: one for every number of labels and baseline."""
    several = len(c.baselines) > 1
    return [
        (format_labels(n).capitalize() + f", compared with {part.baseline}" * several, part.at(n))
        for n in c.labels
        for part in c.parts()
        if n in part.labels
    ]


def accuracy_tables(c: Comparison) -> list[Table]:
    """Accuracy, difference to the baseline, Holm-corrected p and verdict of each arm."""
    columns = ("Test accuracy, % (mean ± SD over seeds)", "Difference, points [95% CI]", "Holm p", "Verdict")

    def cells(row: Row) -> list[tuple[str, list[str]]]:
        d = row.difference
        return [
            (mean_sd(row), []),
            (f"{points(d.mean)} {interval(d)}", [f"n = {len(d.values)}"] * (d.seeds != row.seeds)) if d else ("–", []),
            (p_value(d and d.p_holm), []),
            (row.verdict or row.role, [row.reason] * bool(row.reason) + [f"by {row.score}"] * (row.score != "accuracy")),
        ]

    return [Table(title=title, columns=columns, rows={row.arm: cells(row) for row in rows}) for title, rows in each_table(c)]


def cost_tables(c: Comparison) -> list[Table]:
    """The costs of each arm; those of fewer tokens come first where the evaluator `cost` has measured them."""
    columns = (REDUCED if c.reduced else {}) | BUDGETS
    cells = [(title, {row.arm: [cost(row, name) for name in columns] for row in rows}) for title, rows in each_table(c)]
    return [Table(title=title, columns=tuple(columns.values()), rows=rows) for title, rows in cells]


def seed_tables(c: Comparison) -> list[Table]:
    """The range of the accuracies, p before the Holm correction, and the accuracy of every seed."""

    def cells(row: Row) -> list[tuple[str, list[str]]]:
        seeds = [f"{percent(value)} ({seed})" for seed, value in zip(row.seeds, row.values)]
        extent = f"{percent(min(row.values))} to {percent(max(row.values))}"
        return [(extent, []), (p_value(row.difference and row.difference.p), []), (", ".join(seeds), [])]

    columns = ("Range", "p, not corrected", "Accuracy, % (seed)")
    found = [(title, {row.arm: cells(row) for row in rows if row.values}) for title, rows in each_table(c)]
    return [Table(title=title, columns=columns, rows=rows) for title, rows in found if rows]


def probe_tables(records: Sequence[Record]) -> list[Table]:
    """Mean accuracy of each probe of frozen features, in percent, at each number of labels where a non-reference was probed."""
    labels = {r.labels for r in records if r.finished and r.probes and r.role != "reference"}
    return measurement_tables([r for r in records if r.labels in labels], lambda r: r.probes or (), percent)


def other_tables(c: Comparison, records: Sequence[Record]) -> list[Table]:
    """Mean of every further number that the evaluators measured: no score, no probe and not in the cost tables."""
    shown = {"macs", "macs_sd"} | (set(REDUCED) if c.reduced else set())

    def others(r: Record) -> list[str]:
        return [name for name in r.test or () if name not in {r.score, *(r.probes or ()), *shown}]

    return measurement_tables(records, others, lambda x: f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}")


def measurement_tables(
    records: Sequence[Record], names_of: Callable[[Record], Iterable[str]], form: Callable[[float], str]
) -> list[Table]:
    """One table for each number of labels: mean over seeds of the numbers in `record.test` that `names_of(record)` names."""
    tables = []
    for labels in dict.fromkeys(r.labels for r in records):
        found: dict[str, dict[str, list[float]]] = {}
        for r in records:
            for name in names_of(r) if r.finished and r.labels == labels else ():
                found.setdefault(r.arm, {}).setdefault(name, []).append((r.test or {})[name])
        columns = tuple(dict.fromkeys(name for numbers in found.values() for name in numbers))
        rows = {
            arm: [(form(fmean(numbers[name])) if name in numbers else "–", []) for name in columns]
            for arm, numbers in found.items()
        }
        tables += [Table(title=format_labels(labels).capitalize(), columns=columns, rows=rows)] if columns else []
    return tables
