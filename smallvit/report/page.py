"""The report of a recipe as Markdown, as one HTML file and as text for the terminal. Both pages show the same tables."""

import html as entities
import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from smallvit.recipe import recipe_files
from smallvit.record import Record
from smallvit.verdicts.compare import compare
from smallvit.verdicts.comparison import Comparison, Condition, condition_of
from smallvit.words import how_many

from . import class_figures, figures, format, remarks
from .alarms import nothing_learned
from .answer import answer, passes_done
from .classes import CALIBRATION, CLASSES, CONFUSION, class_tables
from .drawing import DARK, LIGHT, styles
from .format import mean_sd
from .provenance import provenance, warnings
from .settings import changes, hyperparameters, tuning_curves
from .tables import FOLDED as FOLDED_TABLES
from .tables import LENGTHS, TUNED, Table, is_compared, tables
from .units import score_in, score_of, with_one_score

EMPTY = "No runs are recorded yet, so there is nothing to compare. Run the recipe first: smallvit run"

FOLDED = (*FOLDED_TABLES, CLASSES, CONFUSION, CALIBRATION)  # ends of headings whose tables are shown on request
EXPLAINED = {  # heading -> a paragraph below its tables
    TUNED: "Settings were chosen by trials on validation images, with equally many trials for each arm that was tuned. The "
    "verdicts are about the chosen settings: other trials would have chosen others. The expected loss is the accuracy that "
    "chance in the trials costs.",
    LENGTHS: "Holds: the last verdict is that of the first. Fades: the difference has become smaller, and the last verdict is "
    "inconclusive or the difference has fallen below half. Is no longer shown: the last verdict is inconclusive, but the "
    "difference may be as large as before. Turns: the verdict becomes the opposite. Appears: only the last one is better or "
    "worse. In between: so at a length between the first and the last one.",
    CLASSES: "Recall: the share of the images of a class that are classified correctly. Precision: the share of the images "
    "predicted as this class that belong to it. F1: the harmonic mean of both. Numbers of images are means over seeds.",
    CONFUSION: "Mean numbers of test images over seeds. Rows are true classes, columns are predicted classes.",
    CALIBRATION: "Test images of all seeds in bins of equal width by confidence, the probability of the predicted class. "
    "Numbers of images are means over seeds. A model is calibrated if mean confidence and accuracy are equal in each bin.",
}


def markdown(
    records: Sequence[Record],
    *,
    title: str,
    doc: str,
    options: str = "",
    trials: Mapping[str, int] | None = None,
    command: str = "",
) -> str:
    """Return the report of a comparison as Markdown text. `records` are the results of its runs. The options `title` and `doc`
    are the name and the docstring of the recipe file (the Python file that lists the runs).

    `options` are the command-line options of the runs, such as " --scale-steps 2". `trials` is a dict from the name of an arm
    (variant) to the number of its settings that were tried on validation images. `command` runs the recipe again; the report
    names it where more seeds would help, and `smallvit report` with the same options. The default is `smallvit run` with the
    name of the recipe.
    """
    page = content(records, title, doc, options, trials, command)
    parts = [f"# {_md(title)}", _prose(page["question"]), *(_md(page[name]) for name in ("superseded", "answer", "notes"))]
    if page["comparison"]:
        for heading, found in page["tables"].items():
            folded = heading.endswith(FOLDED)
            parts += [f"<details>\n<summary>{entities.escape(heading)}</summary>" if folded else f"## {_md(heading)}"]
            parts += [part for table in found for part in (f"### {_md(table.title)}" * bool(table.title), _table(table))]
            parts += [_md(page["explained"][heading])] if heading in page["explained"] else []
            parts += ["</details>"] if folded else []
        failures = [text for text, _ in page["failures"]]
        for heading, lines in (("Warnings", page["warnings"]), ("Failures and missing runs", failures)):
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


def html(
    records: Sequence[Record],
    *,
    title: str,
    doc: str,
    options: str = "",
    trials: Mapping[str, int] | None = None,
    command: str = "",
) -> str:
    """Return the report of a comparison as the text of one HTML page, with tables and figures. `records` are the results of its
    runs. The page needs no scripts and no other files.

    The page has light and dark colors. The parameters are those of `markdown`.
    """
    from markupsafe import Markup

    template = page_template("smallvit.report", "page.html")
    page = content(records, title, doc, options, trials, command)
    page |= {"light": LIGHT, "dark": DARK, "folded": FOLDED, "tuned": TUNED, "lengths": LENGTHS}
    page |= {"confusion": CONFUSION, "calibration": CALIBRATION, "units": "seeds", "is_compared": is_compared}
    if comparison := page["comparison"]:
        shown = reported(records)
        draw: dict[str, Callable[[Comparison], str]] = {
            "forest": figures.forest,
            "length": figures.by_length,
            "tuning": lambda part: figures.by_tuning(part, tuning_curves(part, shown)),
            "macs": figures.by_macs,
            "labels": figures.by_labels,
            "hyperparameters": lambda part: figures.by_hyperparameter(part, hyperparameters(part, shown)),
            "dots": figures.dots,
            "curves": lambda part: figures.learning_curves(part, shown),
            "confusion": lambda part: class_figures.confusion_matrices(part, shown),
            "reliability": lambda part: class_figures.reliability_diagrams(part, shown),
        }
        parts = with_one_score(comparison).parts()
        page["controls"] = any(row.control for row in comparison.rows)
        page["marked"] = any(row.unequal for condition in comparison.main for row in comparison.at(condition))
        page["figures"] = {name: [(part, Markup(svg)) for part in parts if (svg := f(part))] for name, f in draw.items()}
        page["styles"] = {arm: look for part in comparison.parts() for arm, look in styles(part).items()}
        page["score"], page["units"] = score_in(comparison), comparison.rows[0].units
        pictures = {r.arm: r.picture for r in reversed(shown) if r.picture and "groups" in r.picture}
        page["pictures"] = {arm: Markup(figures.tokens(pictures[arm])) for arm in comparison.arms if arm in pictures}
    return template.render(page)


def page_template(package: str, name: str) -> Any:
    """Return a template for an HTML page, from the file `name` in a package. It may include `head.html`, which has the style of
    all pages. The function `prose` in it converts a text with code between backticks, such as `Run`.
    """
    import jinja2
    from markupsafe import Markup

    def prose(text: str) -> Markup:
        return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", entities.escape(text)))

    def source(file: str) -> str:
        return resources.files("smallvit.report" if file == "head.html" else package).joinpath(file).read_text(encoding="utf-8")

    loader = jinja2.FunctionLoader(source)
    env = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    env.filters["zip"] = zip
    env.globals["prose"] = prose
    return env.get_template(name)


def text(records: Sequence[Record]) -> str:
    """Return a short report for the terminal: the mean score of every arm (variant), then one line for each verdict.
    `records` are the results of the runs.

    Only the main conditions are shown: tuned settings if there are any, and the longest training. An arm without any result
    has a line with the reason if its runs failed.
    """
    comparison = compare(records)
    if not any(row.values for row in comparison.rows):
        return passes_done(comparison, records) or "no run has finished, so there is nothing to compare"
    rows = [row for row in comparison.main_rows if row.values]
    width = max((len(row.arm) for row in rows), default=0)
    guessing, score = nothing_learned(reported(records)), score_in(comparison)
    lines = [f"{line.rstrip('.')}." for line in (guessing, passes_done(comparison, records)) if line]
    for condition in dict.fromkeys(row.condition for row in rows):
        units = rows[0].units
        lines.append(f"{condition.title}: test {score.title}, mean and SD over {units}{score.direction}")
        for row in (row for row in rows if row.condition == condition):
            lines.append(f"  {row.arm:{width}}  {mean_sd(row)}" + f" ({row.score})" * (score_of(row) != score))
    judged = [row for row in comparison.main_rows if row.role == "technique" and not row.unavailable]
    lines += ["", *(format.sentence(comparison, row) for row in judged if row.values or row.failed)]
    if others := comparison.done.difference(comparison.main):
        untuned = any(c.tuned for c in comparison.main) and not all(c.tuned for c in others)
        shorter = not {c.length for c in others} <= {c.length for c in comparison.main}
        kinds = ", ".join(["common settings"] * untuned + ["shorter training"] * shorter)
        lines.append(f"The report also shows {how_many(len(others), 'other condition')} ({kinds}).")
    if waiting := [condition.title for condition in comparison.conditions if condition not in comparison.done]:
        lines.append(f"Without a result: {'; '.join(waiting)}.")
    return "\n".join(lines)


def text_against(records: Sequence[Record], control: str) -> str:
    """Return a text for the terminal with the verdict on each arm (variant) if the arm `control` is the control of all others.
    `records` are the results of all runs. The text says that the recipe did not plan this control.

    Like `text`, it shows the main conditions only. Raises ValueError for an unknown arm.
    """
    comparison = compare(records, against=control)
    judged = [row for row in comparison.main_rows if row.role == "technique" and row.values]
    lines = [format.sentence(comparison, row) for row in judged] or ["No other arm has finished under the same conditions."]
    count = how_many(comparison.family, "comparison") + f", {comparison.earlier} of them removed" * bool(comparison.earlier)
    note = (
        f"With {control} as the control, which the recipe did not plan for all arms (p-values are corrected for these {count}, "
        "but not for the verdicts above):"
    )
    return "\n".join([note, *lines])


def how_to_predict(records: Sequence[Record], recipe: Path, out: Path) -> str:
    """Return a line with the command that predicts the classes of new images by the arm (variant) with the best mean score. If
    this arm was trained under several conditions, such as numbers of labels, the command names that of the best score.
    References count too, if their model is a trained network. The text is empty unless the images are your own files, or if no
    arm was trained on labels. `records` are the results of the runs, `recipe` is the path of the recipe file, and `out` is the
    folder of all results.
    """
    own = [r for r in records if str((r.run.get("data") or {}).get("call", "")).rpartition(".")[2] == "folder"]
    trained = {r.arm for r in own if r.finished and r.steps and r.confusion is not None}
    rows = [row for row in compare(records).main_rows if row.arm in trained and row.mean is not None] if trained else []
    if not rows:
        return ""
    best = (min if rows[0].lower_is_better else max)(rows, key=lambda row: row.mean or 0.0)
    trained_at = [condition_of(r) for r in own if r.arm == best.arm and r.finished]
    command = predict_command(recipe, best.arm, out, condition_options(best.condition, trained_at))
    return f"predictions by the arm with the best mean: {command}"


def predict_command(recipe: Path, arm: str, out: Path, options: str = "") -> str:
    """Return the command that predicts the classes of new images with all models of an arm (variant in the comparison).
    `recipe` is the recipe file, `arm` is the name of the arm, `out` is the folder of all results, and `options` are further
    command-line options, such as ` --labels 100`.
    """
    source = shlex.quote(f"{recipe}:{arm}")
    return f"smallvit predict {source} IMAGES{options}{out_option(out)} --ensemble -o predictions.csv"


def run_command(recipe: Path, out: Path, scale: str = "") -> str:
    """Return the command that trains the missing runs of a recipe. `recipe` is the recipe file, `out` is the folder of all
    results, and `scale` is the option ` --scale-steps` or an empty text. A recipe of the package is called by its name.
    """
    known = {path.resolve() for path in recipe_files()}
    name = recipe.stem if recipe.resolve() in known else str(recipe)
    return command_text("run", name, out, scale)


def command_text(command: str, recipe: str, out: Path, options: str = "") -> str:
    """Return a command that can be copied into a shell, such as `smallvit tune R`. `command` is its name, `recipe` is the name
    or the path of the recipe, `out` is the folder of all results, and `options` are further options, such as ` --labels 100`.
    """
    return f"smallvit {command} {shlex.quote(recipe)}{options}{out_option(out)}"


def out_option(out: Path) -> str:
    """Return the option `--out` for the folder of all results as text. It is empty for the default, `runs`."""
    return f" --out {shlex.quote(str(out))}" * (out != Path("runs"))


def condition_options(condition: Condition, others: Iterable[Condition]) -> str:
    """Return the command-line options that choose the runs of one condition (number of labels, training length, tuned or not),
    such as ` --labels 100 --only settings=tuned`. Only those in which the conditions `others` differ are named.
    """
    labels, lengths, tuned = (len(set(values)) > 1 for values in zip(*others))
    only = [f"length={condition.length or 'all'}"] * lengths
    only += [f"settings={'tuned' if condition.tuned else 'common'}"] * tuned
    return f" --labels {condition.labels or 'all'}" * labels + f" --only {' '.join(only)}" * bool(only)


def content(
    records: Sequence[Record], title: str, doc: str, options: str, trials: Mapping[str, int] | None, command: str
) -> dict[str, Any]:
    """Return everything that a report shows as a dict. `records` are the results of the runs, and `options` are their
    command-line options. `title` and `doc` are the name and the docstring of the recipe file. `trials` is a dict from an arm
    (variant) to the number of settings tried on validation images. `command` runs the recipe again.

    The item `comparison` is None if no run has started. The parameters are those of `markdown`.
    """
    question, about = sections(doc)
    page = {"title": title, "question": question, "about": about}
    page |= {"comparison": None, "superseded": "", "answer": EMPTY, "notes": ""}
    shown = reported(records)
    if not shown:
        return page
    comparison, warned = replace(compare(records), command=command), warnings(shown, trials)
    done = passes_done(comparison, records)
    first = [nothing_learned(shown), *([f"{done[0].upper()}{done[1:]}."] if done else [])]
    if any(row.values for row in comparison.rows) or not done:
        first.append(answer(comparison))
    again = {"Run again": command, "Write this page again": command.replace(" run ", " report ", 1)} if command else {}
    timed = {"Costs": remarks.how_it_was_timed(shown)} if comparison.reduced else {}
    return page | {
        "comparison": comparison,
        "superseded": remarks.superseded(shown),
        "answer": " ".join(filter(None, first)),
        "notes": remarks.notes(comparison, warned, records, more_seeds=not first[0]),
        "tables": tables(comparison, shown) | class_tables(comparison, shown),
        "explained": {name: in_units(text, comparison) for name, text in EXPLAINED.items()} | timed,
        "warnings": warned,
        "failures": remarks.failures(comparison, shown),
        "unavailable": remarks.unavailable(comparison),
        "changes": changes(comparison, shown),
        "provenance": provenance(shown, options, trials) | again,
        "how_to_read": remarks.how_to_read(comparison, shown),
    }


def in_units(text: str, comparison: Comparison) -> str:
    """Return a text with the word "passes" in place of "seeds" if the comparison is a cross-validation, otherwise unchanged."""
    return text.replace("seeds", comparison.rows[0].units)


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


def _table(table: Table) -> str:
    """Return a `Table` as Markdown text. The remarks on a cell stand in brackets after the text of the cell."""
    lines = [[table.head, *map(_md, table.columns)], ["-"] * (1 + len(table.columns))]
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
