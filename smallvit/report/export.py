"""The results of a comparison as a CSV file and as a LaTeX table."""

import csv
import io
import re
from collections.abc import Sequence

from smallvit.verdicts.comparison import Comparison, Row
from smallvit.verdicts.score import Score
from smallvit.words import join_names

from .format import p_value
from .units import score_in, score_of

COLUMNS = (
    "recipe", "arm", "role", "baseline", "labels", "length", "tuned", "score", "lower_is_better", "folds", "n", "mean", "sd",
    "difference", "low", "high", "p_holm", "verdict", "reason", "params", "macs", "images_seen", "seconds", "extra_labels",
)  # fmt: skip
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "–": "--"}
LATEX |= {character: "\\" + character for character in "&%$#_{}"}
LATEX |= {"<": "$<$", ">": "$>$", "…": r"\ldots{}", "×": r"$\times$", "“": "``", "”": "''"}


def csv_table(comparison: Comparison) -> str:
    """Return the results of a comparison as the text of a CSV file, with one line for each condition and arm (variant). The
    first line has the names of the columns.

    Scores and differences are not in percent: an accuracy is between 0 and 1. `n` is the number of seeds (or passes over the
    folds), `low` and `high` are the 95% interval on new test images, and a value that does not exist is empty.
    """
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in comparison.rows:
        d = row.difference
        values = {"recipe": comparison.recipe, "n": len(row.values), "difference": d and d.mean, "low": d and d.low}
        values |= {"high": d and d.high, "p_holm": d and d.p_holm} | row.budget
        writer.writerow([values[name] if name in values else getattr(row, name) for name in COLUMNS])
    return page.getvalue()


def latex_table(comparison: Comparison) -> str:
    """Return the main results of a comparison as the text of a LaTeX table for a paper. It needs the package booktabs. The
    table has the main conditions: the longest training, and tuned settings if there are any.

    Each line has the score of an arm (mean and standard deviation), its difference from the baseline with the 95% interval, the
    Holm-corrected p-value and the verdict. The best mean of each condition, references aside, is bold.
    """
    score, main = score_in(comparison), comparison.main
    several = len(main) > 1
    difference = f"Difference{score.points and ', points'} [95% CI]"
    heads = [*map(latex, ("Arm", f"{score.capital}{score.unit}", difference)), "Holm $p$", "Verdict"]
    lines = [r"% \usepackage{booktabs}", r"\begin{table}", r"\centering", f"\\caption{{{caption(comparison)}}}"]
    lines += [r"\begin{tabular}{lrrrl}", r"\toprule", f"{' & '.join(heads)} \\\\"]
    for condition in main:
        rows = [row for row in comparison.at(condition) if row.values]
        lines += [r"\midrule"]
        lines += [f"\\multicolumn{{5}}{{l}}{{\\emph{{{latex(condition.title)}}}}} \\\\"] if several else []
        best = best_arms(rows)
        lines += [f"{' & '.join(cells(row, row.arm in best, score_of(row) != score))} \\\\" for row in rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def best_arms(rows: Sequence[Row]) -> list[str]:
    """Return the names of the arms (variants) with the best mean of each score, references aside. `rows` are the results of the
    arms.
    """
    best: dict[Score, float] = {}
    arms = [(row, score_of(row), row.mean) for row in rows if row.role != "reference" and row.mean is not None]
    for _, score, mean in arms:
        best[score] = (min if score.lower else max)(mean, best.get(score, mean))
    return [row.arm for row, score, mean in arms if mean == best[score]]


def cells(row: Row, bold: bool, other: bool) -> list[str]:
    """Return the cells of one line of a LaTeX table as a list of texts. `row` holds the results of an arm (variant). With
    `bold`, its score is bold. With `other`, the arm has another score than the table, which is named.
    """
    score, d = score_of(row), row.difference
    value = score.number(row.mean or 0.0)
    value = (f"\\textbf{{{value}}}" if bold else value) + (f" $\\pm$ {score.number(row.sd)}" if row.sd is not None else "")
    difference = latex(score.difference(d.mean)) if d else "--"
    if d and d.low is not None and d.high is not None:
        difference += " " + latex(score.interval(d.low, d.high))
    difference += latex(f" (from {row.control})") * (d is not None and bool(row.control))
    name = row.arm + f" (by {row.score})" * other
    name = "{}" * name.startswith(("[", "*")) + latex(name)  # otherwise LaTeX takes it for an option of the row above
    return [name, value, difference, latex(p_value(d and d.p_holm)), latex(row.verdict or row.role)]


def caption(comparison: Comparison) -> str:
    """Return the caption of a LaTeX table: the score, the number of seeds, and what the intervals and p-values are about."""
    score = score_in(comparison)
    counts = sorted({len(row.values) for row in comparison.main_rows if row.values})
    unit, units = ("pass", "passes") if any(row.folds for row in comparison.rows) else ("seed", "seeds")
    numbers = join_names([str(n) for n in counts], len(counts)) or "0"
    conditions = comparison.main
    place = f" at {latex(conditions[0].title)}" if len(conditions) == 1 else ""
    text = f"Test {latex(score.title)}{place}: mean and standard deviation over {numbers} {unit if counts == [1] else units}"
    text += " (lower is better)" * score.lower
    baselines = join_names([f"“{name}”" for name in comparison.baselines])
    text += f". Differences are paired and from {latex(baselines)}"
    text += " or from the arm that is named" * any(row.control for row in comparison.main_rows)
    return text + (
        f"; intervals and $p$-values are about new test images, and $p$ is Holm-corrected for {comparison.family} comparisons."
    )


def latex(text: str) -> str:
    """Return a text with the special characters of LaTeX escaped, so that LaTeX shows it unchanged."""
    return re.sub(r"[\\~^±−–&%$#_{}<>…×“”]", lambda match: LATEX[match[0]], text)
