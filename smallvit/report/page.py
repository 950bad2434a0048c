"""A comparison as a page: Markdown to commit beside a recipe, and one HTML file to look at. Both lead with the verdicts."""

import html as entities
import re
from collections.abc import Sequence
from functools import partial
from importlib import resources
from typing import Any

from smallvit.record import format_labels

from . import axes, figures
from .choices import knobs
from .format import (
    WORDS,
    budgets,
    columns,
    cost,
    failures,
    how_it_was_timed,
    how_to_read,
    interval,
    mean_sd,
    p_value,
    percent,
    points,
    sentence,
    summary,
    unavailable,
)
from .probes import Probed, no_better_than_random, probed
from .provenance import changes, pictures, provenance, warnings
from .verdicts import Comparison, compare

EMPTY = "No runs are recorded yet, so there is nothing to compare. Run the recipe first: smallvit run"


def markdown(records: Sequence[dict], *, title: str, doc: str, options: str = "") -> str:
    """The report as Markdown, to be committed beside its recipe. `doc` (the recipe's docstring) stands at the top as it is;
    `options` are the words, such as " --scale-steps 2", with which the recipe was run.
    """
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", doc)), default=0))
    parts = [f"# {_md(title)}", f"{fence}text\n{doc.strip()}\n{fence}"]
    if not present(records):
        return "\n\n".join([*parts, EMPTY]) + "\n"
    c, records = compare(records), present(records)
    said = sections(c, records, options)
    parts += ["## Verdicts", _md(said["summary"])]
    for n in c.labels:
        judged = sorted((row for row in c.at(n) if row.verdict), key=lambda row: WORDS.index(row.verdict))
        parts += _section(format_labels(n).capitalize(), [sentence(c, row) for row in judged], level=3)
    parts += [_md(said["how_to_read"])] if c.family else []
    parts += _section("Warnings", said["warnings"]) + _section("Failures", said["failures"])
    parts += _section("Unavailable here", said["unavailable"])
    for n in c.labels:
        parts += [f"## Results at {format_labels(n)}"]
        for part in c.parts():
            parts += [f"### Against {_md(part.baseline)}"] if n in part.labels and len(c.baselines) > 1 else []
            parts += [_table(part, n, said["columns"])] if n in part.labels else []
    for table in said["probed"]:
        parts += [f"## Probes at {format_labels(table.labels)}", _probes(table)]
    parts += [_md(said["how_it_was_timed"])] if said["how_it_was_timed"] else []
    parts += _section("Budgets", said["budgets"])
    parts += _section("What differs from the baseline", [f"{arm}: {'; '.join(of)}" for arm, of in said["changes"].items()])
    parts += _section("Provenance", [f"{name}: {text}" for name, text in said["provenance"].items()])
    return "\n\n".join(parts) + "\n"


def html(records: Sequence[dict], *, title: str, doc: str, options: str = "") -> str:
    """The report as one self-contained page: nothing is fetched, no script runs, and it follows the reader's light or dark."""
    import jinja2
    from markupsafe import Markup

    env = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    env.filters |= {f.__name__: f for f in (format_labels, percent, points, interval, p_value, mean_sd)}
    page = env.from_string(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    given = {"title": title, "doc": doc.strip(), "light": axes.LIGHT, "dark": axes.DARK, "empty": EMPTY, "c": None}
    if not present(records):
        return page.render(given)
    c, records = compare(records), present(records)
    parts = c.parts()
    draw = {"forest": figures.forest, "macs": figures.by_macs, "labels": figures.by_labels, "dots": figures.dots}
    draw["curves"] = partial(figures.learning_curves, records=records)
    draw["knobs"] = lambda part: figures.by_knob(part, knobs(part, records))
    drawn = {name: [(part, Markup(svg)) for part in parts if (svg := of(part))] for name, of in draw.items()}
    looks = {arm: look for part in parts for arm, look in axes.styles(part).items()}
    given |= {"c": c, "parts": parts, "figures": drawn, "looks": looks, "cost": cost, "zip": zip}
    given |= {"pictures": {arm: Markup(figures.tokens(picture)) for arm, picture in pictures(records).items()}}
    return page.render(given | sections(c, records, options))


def sections(c: Comparison, records: Sequence[dict], options: str) -> dict[str, Any]:
    """What both pages say, by the names of the functions that say it."""
    of_rows = (summary, how_to_read, failures, unavailable, columns, budgets)
    said = {f.__name__: f(c) for f in of_rows} | {"probed": probed(records), "provenance": provenance(records, options)}
    said |= {"warnings": warnings(records) + no_better_than_random(records), "changes": changes(c, records)}
    return said | {"how_it_was_timed": how_it_was_timed(records) if c.reduced else ""}


def present(records: Sequence[dict]) -> list[dict]:
    """The records of runs that there are; a missing one says nothing of machine or code."""
    return [record for record in records if record["status"] != "missing"]


def _table(c: Comparison, labels: int | None, costs: dict[str, str]) -> str:
    head = ["Arm", "Test accuracy, % (mean ± SD over seeds)", "Range", "Difference, points [95% CI]", "p", "Holm p", "Verdict"]
    lines = [[*head, *costs.values()], ["-"] * (len(head) + len(costs))]
    for row in c.at(labels):
        d = row.difference
        name = row.arm + f" ({row.role})" * (row.verdict is None) + f", {row.score}" * (row.score != "accuracy")
        extent = f"{percent(min(row.values))} to {percent(max(row.values))}" if row.values else "–"
        gain = f"{points(d.mean)} {interval(d)} (n = {len(d.values)})" if d else "–"
        word = ": ".join(filter(None, (row.verdict, row.reason))) or "–"
        spent = (number + f" ({'; '.join(more)})" * bool(more) for number, more in (cost(row, key) for key in costs))
        tests = [p_value(d and d.p), p_value(d and d.p_holm)]
        lines.append([_md(name), mean_sd(row), extent, gain, *tests, _md(word), *spent])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _probes(table: Probed) -> str:
    lines = [["Arm", *table.names], ["-"] * (1 + len(table.names))]
    lines += [[_md(arm), *("–" if x is None else percent(x) for x in row)] for arm, row in table.rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _section(name: str, lines: list[str], level: int = 2) -> list[str]:
    return [f"{'#' * level} {name}", "\n".join(f"- {_md(line)}" for line in lines)] if lines else []


def _md(text: str) -> str:
    """Text that Markdown leaves alone, whatever an arm or an error is called."""
    text = re.sub(r"([\\`*|~$]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])|^[+#-](?=\s))", r"\\\1", " ".join(text.split()))
    return entities.escape(text, quote=False)
