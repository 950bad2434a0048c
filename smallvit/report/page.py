"""The report of a recipe as Markdown, as one HTML file and as text for the terminal. Both pages show the same tables."""

import html as entities
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean
from typing import Any

from smallvit.record import Record, format_labels

from . import figures, format
from .compare import Comparison, Row, compare
from .format import BUDGETS, REDUCED, cost, interval, mean_sd, p_value, percent, points
from .provenance import changes, hyperparameters, provenance, warnings

EMPTY = "No runs are recorded yet, so there is nothing to compare. Run the recipe first: smallvit run"


def markdown(records: Sequence[Record], *, title: str, doc: str, options: str = "", earlier: int = 0) -> str:
    """Return the report of a comparison as Markdown text. `records` are the results of its runs. The options `title` and `doc`
    are the name and the docstring of the recipe file (the Python file that lists the runs).

    `options` are the command-line options of the runs, such as " --scale-steps 2". `earlier` is the number of finished
    comparisons whose arms were removed from the recipe.
    """
    page = content(records, title, doc, options, earlier)
    parts = [f"# {_md(title)}", _prose(page["question"]), *(_md(page[name]) for name in ("superseded", "answer", "notes"))]
    if page["comparison"]:
        for heading, found in page["tables"].items():
            folded = heading == "Accuracy of every seed"
            parts += [f"<details>\n<summary>{heading}</summary>" if folded else f"## {heading}"]
            parts += [part for table in found for part in (f"### {_md(table.title)}", _table(table))]
            parts += ["</details>"] if folded else []
            parts += [_md(page["how_it_was_timed"])] if heading == "Costs" else []
        failures = [text for text, _ in page["failures"]]
        for heading, lines in (("Warnings", page["warnings"]), ("Failures", failures)):
            parts += [f"## {heading}", _list(lines)] if lines else []
        parts += ["## Unavailable here", _md(page["unavailable"])] if page["unavailable"] else []
        differences = [f"{arm}: {'; '.join(lines)}" for arm, lines in page["changes"].items()]
        parts += [f"## Differences from {_md(page['comparison'].baseline)}", _list(differences)] if differences else []
    if page["about"]:
        parts += ["## About this experiment", *(f"**{name}.** " * bool(name) + _prose(text) for name, text in page["about"])]
    if page["comparison"]:
        parts += ["## Provenance", _list(f"{name}: {text}" for name, text in page["provenance"].items())]
        parts += ["## How to read this page", *map(_md, page["how_to_read"])]
    return "\n\n".join(filter(None, parts)) + "\n"


def html(records: Sequence[Record], *, title: str, doc: str, options: str = "", earlier: int = 0) -> str:
    """Return the report of a comparison as the text of one HTML page, with tables and figures. `records` are the results of its
    runs. The page needs no scripts and no other files.

    The page has light and dark colors. The parameters are those of `markdown`.
    """
    import jinja2
    from markupsafe import Markup

    def prose(text: str) -> Markup:
        return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", entities.escape(text)))

    env = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    env.filters["zip"] = zip
    template = env.from_string(resources.files("smallvit.report").joinpath("page.html").read_text(encoding="utf-8"))
    page = content(records, title, doc, options, earlier) | {"light": figures.LIGHT, "dark": figures.DARK, "prose": prose}
    if comparison := page["comparison"]:
        shown = reported(records)
        draw: dict[str, Callable[[Comparison], str]] = {
            "forest": figures.forest,
            "macs": figures.by_macs,
            "labels": figures.by_labels,
            "hyperparameters": lambda part: figures.by_hyperparameter(part, hyperparameters(part, shown)),
            "dots": figures.dots,
            "curves": lambda part: figures.learning_curves(part, shown),
        }
        parts = comparison.parts()
        page["figures"] = {name: [(part, Markup(svg)) for part in parts if (svg := f(part))] for name, f in draw.items()}
        page["looks"] = {arm: look for part in parts for arm, look in figures.styles(part).items()}
        pictures = {r.arm: r.picture for r in reversed(shown) if r.picture and "groups" in r.picture}
        page["pictures"] = {arm: Markup(figures.tokens(pictures[arm])) for arm in comparison.arms if arm in pictures}
    return template.render(page)


def text(records: Sequence[Record], earlier: int = 0) -> str:
    """Return a short report for the terminal: the mean accuracy of every arm (variant), then one line for each verdict.
    `records` are the results of the runs. `earlier` is the number of finished comparisons that were removed from the recipe
    file.
    """
    comparison = compare(records, earlier)
    rows = [row for row in comparison.rows if row.values]
    if not rows:
        return "no run has finished, so there is nothing to compare"
    width = max(len(row.arm) for row in rows)
    lines = []
    for labels in dict.fromkeys(row.labels for row in rows):
        lines.append(f"{format_labels(labels)}: test accuracy, mean and SD over seeds")
        lines += [f"  {row.arm:{width}}  {mean_sd(row)}" for row in rows if row.labels == labels]
    return "\n".join([*lines, "", *(format.sentence(comparison, row) for row in rows if row.role == "technique")])


def content(records: Sequence[Record], title: str, doc: str, options: str, earlier: int) -> dict[str, Any]:
    """Return everything that a report shows as a dict, such as the question, the tables and the warnings. `records` are the
    results of the runs, `title` and `doc` are the name and the docstring of the recipe file.

    The item `comparison` is None if no run has started. The parameters are those of `markdown`.
    """
    question, about = sections(doc)
    page = {"title": title, "question": question, "about": about}
    page |= {"comparison": None, "superseded": "", "answer": EMPTY, "notes": ""}
    shown = reported(records)
    if not shown:
        return page
    comparison, warned = compare(records, earlier), warnings(shown)
    return page | {
        "comparison": comparison,
        "superseded": format.superseded(shown),
        "answer": format.answer(comparison),
        "notes": format.notes(comparison, warned),
        "tables": tables(comparison, shown),
        "how_it_was_timed": format.how_it_was_timed(shown) if comparison.reduced else "",
        "warnings": warned,
        "failures": format.failures(comparison, shown),
        "unavailable": format.unavailable(comparison),
        "changes": changes(comparison, shown),
        "provenance": provenance(shown, options),
        "how_to_read": format.how_to_read(comparison),
    }


def reported(records: Sequence[Record]) -> list[Record]:
    """Return the list of the records (results of a run) that a report shows. Runs that have not started are left out, and so
    are runs that were trained only because another run needs their weights.
    """
    return [r for r in records if r.status != "missing" and r.role != "dependency"]


def sections(doc: str) -> tuple[str, list[tuple[str, str]]]:
    """Split the docstring of a recipe file into paragraphs. Return the question at its beginning, and a list of pairs (name,
    text) for the other paragraphs, such as ("Setup", "We train ...").

    A named paragraph begins with `Name   text`; its further lines are indented. Other paragraphs have an empty name.
    """
    found: list[tuple[str, str]] = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(doc)):
        for number, line in enumerate(block.splitlines()):
            name, text = match.groups() if (match := re.match(r"([A-Z]\w*) {2,}(\S.*)", line)) else ("", line.strip())
            if name or number == 0:
                found.append((name, text))
            else:
                found[-1] = found[-1][0], f"{found[-1][1]} {text}"
    if found and found[0][0] in ("", "Question"):
        return found[0][1], found[1:]
    return "", found


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table in a report, with one line for each arm (variant in the comparison). `rows` is a dict from the name of an arm to
    a list of cells. A cell is a pair: a text and a list of remarks.
    """

    title: str
    columns: tuple[str, ...]
    rows: dict[str, list[tuple[str, list[str]]]]
    text: tuple[str, ...] = ("Verdict", "Accuracy, % (seed)")  # columns that are not numbers


def tables(comparison: Comparison, records: Sequence[Record]) -> dict[str, list[Table]]:
    """Return all tables of a report, as a dict from a heading to the list of tables below it. `records` are the results of the
    runs. Headings without a table are left out.
    """
    found = {
        "Accuracy": accuracy_tables(comparison),
        "Costs": cost_tables(comparison),
        "Probes of frozen features": probe_tables(records),
        "Other measurements": other_tables(comparison, records),
        "Accuracy of every seed": seed_tables(comparison),
    }
    return {heading: each for heading, each in found.items() if each}


def each_table(comparison: Comparison) -> list[tuple[str, list[Row]]]:
    """Return a list of pairs (title, rows), one for each table of a report. There is one table for each pair of a number
    of labelled images and a baseline (the variant that others are compared with). A row holds the results of one arm (variant).

    Arms whose external weights could not be obtained are left out.
    """
    found = []
    for n in comparison.labels:
        for part in comparison.parts():
            title = format_labels(n).capitalize() + f", compared with {part.baseline}" * (len(comparison.baselines) > 1)
            found += [(title, [row for row in part.at(n) if not row.unavailable])] if n in part.labels else []
    return found


def accuracy_tables(comparison: Comparison) -> list[Table]:
    """Return the main tables of a report as a list. They show the test accuracy of each arm (variant), its difference from the
    baseline, the Holm-corrected p-value and the verdict.
    """
    columns = ("Test accuracy, % (mean ± SD over seeds)", "Difference, points [95% CI]", "Holm p", "Verdict")

    def cells(row: Row) -> list[tuple[str, list[str]]]:
        d = row.difference
        return [
            (mean_sd(row), []),
            (f"{points(d.mean)} {interval(d)}", [f"n = {len(d.values)}"] * (d.seeds != row.seeds)) if d else ("–", []),
            (p_value(d and d.p_holm), []),
            (row.verdict or row.role, [row.reason] * bool(row.reason) + [f"by {row.score}"] * (row.score != "accuracy")),
        ]

    found = [(title, {row.arm: cells(row) for row in rows}) for title, rows in each_table(comparison)]
    return [Table(title=title, columns=columns, rows=rows) for title, rows in found]


def cost_tables(comparison: Comparison) -> list[Table]:
    """Return the tables with the costs of each arm (variant) as a list, such as parameters, multiply-adds (MACs) and training
    seconds.

    If the evaluator `cost` has measured token reductions, they begin with tokens, MACs, time and speed-up.
    """
    columns = (REDUCED if comparison.reduced else {}) | BUDGETS
    cells = [
        (title, {row.arm: [cost(row, name) for name in columns] for row in rows}) for title, rows in each_table(comparison)
    ]
    return [Table(title=title, columns=tuple(columns.values()), rows=rows) for title, rows in cells]


def seed_tables(comparison: Comparison) -> list[Table]:
    """Return the tables with the test accuracy of every seed as a list. They also show the range of these accuracies and the
    p-value before the Holm correction, for each arm (variant).
    """

    def cells(row: Row) -> list[tuple[str, list[str]]]:
        seeds = [f"{percent(value)} ({seed})" for seed, value in zip(row.seeds, row.values)]
        extent = f"{percent(min(row.values))} to {percent(max(row.values))}"
        return [(extent, []), (p_value(row.difference and row.difference.p), []), (", ".join(seeds), [])]

    columns = ("Range", "p, not corrected", "Accuracy, % (seed)")
    found = [(title, {row.arm: cells(row) for row in rows if row.values}) for title, rows in each_table(comparison)]
    return [Table(title=title, columns=columns, rows=rows) for title, rows in found if rows]


def probe_tables(records: Sequence[Record]) -> list[Table]:
    """Return the tables with the mean accuracy of each probe (a classifier on frozen features) as a list, in percent. `records`
    are the results of the runs.

    A number of labelled images has a table only if an arm other than the references was probed.
    """
    labels = {r.labels for r in records if r.finished and r.probes and r.role != "reference"}
    return measurement_tables([r for r in records if r.labels in labels], lambda r: r.probes or (), percent)


def other_tables(comparison: Comparison, records: Sequence[Record]) -> list[Table]:
    """Return the tables with all measured numbers that no other table of the report shows, as a list. The numbers are means
    over the seeds. `records` are the results of the runs.

    Scores, probes and the numbers in the tables of costs are left out, because other tables show them.
    """
    shown = {"macs", "macs_sd"} | (set(REDUCED) if comparison.reduced else set())

    def others(r: Record) -> list[str]:
        return [name for name in r.test or () if name not in {r.score, *(r.probes or ()), *shown}]

    return measurement_tables(records, others, lambda x: f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}")


def measurement_tables(
    records: Sequence[Record], names_of: Callable[[Record], Iterable[str]], form: Callable[[float], str]
) -> list[Table]:
    """Return a list of tables, one for each number of labelled images. They show means over the seeds of measured numbers. The
    function `names_of` returns the names of these numbers for the results of a run, and `form` converts a mean to text.

    A record holds the results of one run, and the numbers are those in its field `test`.
    """
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


def _table(table: Table) -> str:
    """Return a `Table` as Markdown text. The remarks on a cell stand in brackets after the text of the cell."""
    lines = [["Arm", *table.columns], ["-"] * (1 + len(table.columns))]
    for arm, cells in table.rows.items():
        lines.append([_md(arm), *(_md(text + f" ({'; '.join(remarks)})" * bool(remarks)) for text, remarks in cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _list(lines: Iterable[str]) -> str:
    """Return lines of text as a bullet list in Markdown."""
    return "\n".join(f"- {_md(line)}" for line in lines)


def _md(text: str) -> str:
    """Return the text with the special characters of Markdown escaped, so that Markdown shows it unchanged."""
    text = re.sub(r"([\\`*|~$]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])|^[+#-](?=\s))", r"\\\1", re.sub(r"\s+", " ", text))
    return entities.escape(text, quote=False).replace("&lt; ", "< ")


def _prose(text: str) -> str:
    """Return the text with the special characters of Markdown escaped, except in code between backticks, such as `Run`."""
    return "".join(part if k % 2 else _md(part) for k, part in enumerate(re.split(r"(`[^`]+`)", text)))
