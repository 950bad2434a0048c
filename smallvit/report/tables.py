"""Tables of a report, which both pages show: accuracies and verdicts, tuned against common settings, costs, measurements."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from smallvit.record import Record
from smallvit.verdicts.comparison import Comparison, Condition, Difference, Row, condition_of
from smallvit.verdicts.contrasts import Trend, trends, tuned_pairs
from smallvit.verdicts.score import ACCURACY

from .format import (
    BUDGETS,
    REDUCED,
    TUNING,
    beyond_reach,
    cost,
    few_units,
    interval,
    mean_sd,
    often,
    p_value,
    percent,
    seeds_interval,
)
from .settings import option_name, options_at_edge, tuning_of
from .units import score_in, score_of

TUNED, LENGTHS, OTHER_COSTS = "Tuned against common settings", "Difference and training length", "Costs under other conditions"
# ends of headings whose tables are shown on request
FOLDED = (" with common settings", OTHER_COSTS, " of every seed", " of every pass")
Cell = tuple[str, list[str]]  # text and remarks


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table in a report, with one line for each arm (variant in the comparison). `rows` is a dict from the name of an arm to
    a list of cells. A cell is a pair: a text and a list of remarks. `head` stands above the names; a table whose lines are no
    arms has another text there.
    """

    title: str
    columns: tuple[str, ...]
    rows: dict[str, list[Cell]]
    head: str = "Arm"
    # columns that are not numbers
    text: tuple[str, ...] = ("Verdict", "Verdict, common", "Verdict, tuned", "Chosen settings", "With longer training")


def tables(comparison: Comparison, records: Sequence[Record]) -> dict[str, list[Table]]:
    """Return all tables of a report, as a dict from a heading to the list of tables below it. `records` are the results of the
    runs. Headings without a table are left out.

    The tables of the main conditions, which the answer is about, come first.
    """
    main = comparison.main
    tuned = any(condition.tuned for condition in main)
    others = [condition for condition in comparison.conditions if condition not in main and condition in comparison.done]
    common = [condition for condition in others if tuned and not condition.tuned]
    longest = max(condition.length or 0 for condition in main)
    shorter = [c for c in others if c.tuned == tuned and (c.length or 0) < longest]
    score = score_in(comparison).capital
    found = {
        score: score_tables(comparison, main),
        TUNED: tuning_tables(comparison, records),
        LENGTHS: length_tables(comparison),
        f"{score} after shorter training": score_tables(comparison, shorter),
        f"{score} with common settings": score_tables(comparison, common),
        "Conditions without a result": missing_tables(comparison),
        "Costs": cost_tables(comparison, main),
        OTHER_COSTS: cost_tables(comparison, others),
        "Probes of frozen features": probe_tables(comparison, records),
        "Other measurements": other_tables(comparison, records),
        f"{score} of every {'pass' if comparison.rows[0].folds else 'seed'}": seed_tables(comparison),
    }
    return {heading: each for heading, each in found.items() if each}


def each_table(comparison: Comparison, conditions: Sequence[Condition]) -> list[tuple[str, list[Row]]]:
    """Return a list of pairs (title, rows), one for each table of a report. There is one table for each of the conditions and
    each baseline (the variant that others are compared with). If nothing is compared, all baselines share a table. A row holds
    the results of one arm (variant).

    Arms whose external weights could not be obtained are left out.
    """
    found, several = [], is_compared(comparison.rows) and len(comparison.baselines) > 1
    for condition in conditions:
        for part in comparison.parts() if several else [comparison]:
            rows = [row for row in part.at(condition) if not row.unavailable]
            compared = "compared with " * is_compared(rows)
            title = condition.title.capitalize() + f", {compared}{part.baseline}" * several
            found += [(title, rows)] if rows else []
    return found


def is_compared(rows: Iterable[Row]) -> bool:
    """Return whether any arm (variant) is compared with another one: whether not all are baselines or references."""
    return any(row.role not in ("baseline", "reference") for row in rows)


def score_tables(comparison: Comparison, conditions: Sequence[Condition]) -> list[Table]:
    """Return the main tables of a report as a list, for some conditions. They show the test score of each arm (variant), its
    difference from the baseline, the Holm-corrected p-value and the verdict.

    Below the interval on new test images stands the narrower one over seeds alone, on the test images that were used.

    If nothing is compared, because all arms are baselines or references, the 95% interval of the score itself stands in the
    place of the difference, and there is no p-value and no verdict.
    """
    score = score_in(comparison)
    name = f"Test {score.title}{score.unit} (mean ± SD over {comparison.rows[0].units}{score.direction})"
    compared = is_compared(comparison.rows)
    columns = (
        name,
        f"Difference{score.points and ', points'} [95% CI on new images]",
        "Holm p",
        "Verdict",
    ) if compared else (name, f"95% CI on new {comparison.rows[0].units} and images")  # fmt: skip

    def cells(row: Row) -> list[Cell]:
        d, mean = row.difference, (mean_sd(row, "%" * (score_of(row).percent and not score.percent)), [])
        if not compared:
            return [mean, (score.interval(*row.new_images) if row.new_images else "–", judged_by(comparison, row))]
        return [
            mean,
            (f"{score.difference(d.mean)} {interval(d, score)}", difference_remarks(row, d)) if d else ("–", []),
            (p_value(d and d.p_holm), []),
            (row.verdict or row.role, verdict_remarks(row) + judged_by(comparison, row)),
        ]

    found = [(title, {row.arm: cells(row) for row in rows}) for title, rows in each_table(comparison, conditions)]
    return [Table(title=title, columns=columns, rows=rows) for title, rows in found]


def missing_tables(comparison: Comparison) -> list[Table]:
    """Return a table of the conditions without any result, such as numbers of labels with which nothing was trained so far, as
    a list with one table. It shows how many arms (variants) each of them has, and why the first one has no result. The list is
    empty if there are no such conditions, or if they are the main ones, which have tables of their own.
    """
    cells: dict[str, list[Cell]] = {}
    for condition in comparison.conditions:
        rows = [row for row in comparison.rows if row.condition == condition and not row.unavailable]
        if rows and condition not in comparison.done and condition not in comparison.main:
            cells[condition.title.capitalize()] = [(str(len(rows)), []), (rows[0].reason or "–", [])]
    columns = ("Arms", "Reason")
    return [Table(title="", columns=columns, rows=cells, head="Condition", text=("Reason",))] if cells else []


def difference_remarks(row: Row, d: Difference) -> list[str]:
    """Return remarks on the difference between an arm (variant) and its control (the arm it is compared with), as a list of
    texts: the control if it is not the baseline, the interval for the same test images, and the number of seeds if some are not
    used. `row` holds the results of the arm, and `d` holds its differences.
    """
    remarks = [f"from {row.control}"] if row.control else []
    remarks += filter(None, [seeds_interval(d, score_of(row))])
    return remarks + [f"n = {len(d.values)}"] * (d.seeds != row.seeds)


def verdict_remarks(row: Row) -> list[str]:
    """Return remarks on the verdict about an arm (variant) as a list of texts: its reason, how often a repetition would give it
    again, the smallest difference that would have been found with 80% probability, and at which numbers of seeds it was tested.
    `row` holds the results of the arm.
    """
    d = row.difference
    remarks = [row.reason] if row.reason else []
    if d and d.replication is not None:
        again = f"again in {often(d)} of 100" + ", fragile" * d.fragile
        more = d.seeds_for_90 if d.replication < 0.9 else None
        remarks.append(again + (f"; with {more} {row.units} in 90" if more else ""))
    if d and d.detectable is not None:
        power = f"80% power at {score_of(row).number(d.detectable)}{score_of(row).points}"
        remarks.append("no possible score would have been shown to be better" if beyond_reach(row) else power)
        remarks += [text[0].lower() + text[1:].rstrip(".") for text in few_units(row)]
    if d and d.looks:
        remarks.append(f"look{'s' * (len(d.looks) > 1)} at {', '.join(map(str, d.looks))} {row.units}")
    return remarks


def judged_by(comparison: Comparison, row: Row) -> list[str]:
    """Return a remark that names the score of an arm (variant), such as `by linear_probe`, as a list. The list is empty if the
    head of the table has this name. `row` holds the results of the arm.
    """
    title = score_in(comparison).title
    named = row.score == title if score_of(row) == ACCURACY else score_of(row).title == title
    return [] if named or row.reason.startswith("judged by ") else [f"by {row.score}"]


def tuning_tables(comparison: Comparison, records: Sequence[Record]) -> list[Table]:
    """Return tables that compare tuned settings (chosen for each arm) with common ones (those of the recipe), as a list. They
    show for each arm (variant) the chosen settings, both accuracies and verdicts, the number of trials, and the expected loss
    of accuracy because trials are scored with noise. `comparison` holds all results, and `records` are the results of the runs.

    The list is empty if no arm was tuned, or if no arm was run with common settings of the same training length.
    """
    score = score_in(comparison)
    columns = (
        "Chosen settings", f"{score.capital}, common{score.unit}", f"{score.capital}, tuned{score.unit}", "Verdict, common",
        "Verdict, tuned", "Trials", f"Expected loss{score.points and ', points'}",
    )  # fmt: skip
    tuning = tuning_of(comparison, records)
    settings = {(condition_of(r), r.arm): r.run for r in records}
    common = {(row.condition, row.arm): before for before, row in tuned_pairs(comparison)}
    found = []
    for title, rows in each_table(comparison, comparison.main):
        cells: dict[str, list[Cell]] = {}
        for row in rows:
            before, how = common.get((row.condition, row.arm)), tuning.get((row.labels, row.arm))
            if before and how:
                cells[row.arm] = [
                    chosen_settings(how, settings.get((before.condition, row.arm), {})),
                    ("–" if before.mean is None else score.number(before.mean), []),
                    ("–" if row.mean is None else score.number(row.mean), []),
                    verdict_of(before),
                    verdict_of(row),
                    (str(how.get("trials", "–")), []),
                    (score.number(how["loss"]) if how.get("loss") is not None else "–", []),
                ]
        found += [Table(title=title.replace(", tuned", ""), columns=columns, rows=cells)] if cells else []
    return found


def length_tables(comparison: Comparison) -> list[Table]:
    """Return tables that show the difference of each arm (variant) from its baseline after each training length, as a list. The
    last column says whether the difference holds, fades (gets smaller), turns (to the opposite) or appears.
    There is one table for each number of labelled images, and for common and tuned settings. `comparison` holds all results.

    The list is empty if there is only one length.
    """
    found = []
    for part in comparison.parts():
        groups: dict[tuple, list[Trend]] = {}
        for trend in trends(part):
            groups.setdefault((trend.labels, trend.tuned), []).append(trend)
        for (labels, tuned), each in groups.items():
            lengths = sorted({row.length or 0 for trend in each for row in trend.rows})
            title = Condition(labels, None, tuned).title.capitalize()
            rows = {}
            for trend in each:
                cells = {row.length: length_cell(row) for row in trend.rows}
                what = trend.outcome or "no difference is shown"
                rows[trend.arm] = [*(cells.get(n, ("–", [])) for n in lengths), (what, [])]
            columns = *(f"{n:,} steps" for n in lengths), "With longer training"
            title += f", compared with {part.baseline}" * (len(comparison.baselines) > 1)
            found.append(Table(title=title, columns=columns, rows=rows))
    return found


def length_cell(row: Row) -> Cell:
    """Return the difference of an arm (variant) from the arm it is compared with as text, with its interval, the name of that
    other arm if it is not the baseline, and the verdict as remarks. `row` holds the results of the arm.
    """
    d = row.difference
    score, word = score_of(row), row.verdict or row.role
    control = [f"from {row.control}"] if row.control else []
    return (score.difference(d.mean), [interval(d, score), *control, word]) if d else ("–", [word])


def chosen_settings(tuning: dict, common: dict) -> Cell:
    """Return the settings that were chosen for an arm (variant) as text, and remarks: the common values (those of the recipe),
    and the options of `options_at_edge`. `tuning` is a dict with the chosen settings and the result of the tuning. `common` is
    a dict with all settings of the run with common settings.
    """

    def form(value) -> str:
        return f"{value:.3g}" if isinstance(value, float) else f"{value}"

    if not tuning["settings"]:
        return tuning.get("note") or "nothing to tune", []
    chosen = [f"{option_name(option)} {form(value)}" for option, value in tuning["settings"].items()]
    before = [f"{option_name(option)} {form(common[option])}" for option in tuning["settings"] if option in common]
    if len(before) == len(chosen) == 1:
        before = [form(common[option]) for option in tuning["settings"]]
    remarks = ["common: " + ", ".join(before)] if before else []
    return ", ".join(chosen), remarks + [
        f"{option_name(option)} at the edge of its range" for option in options_at_edge(tuning)
    ]


def verdict_of(row: Row) -> Cell:
    """Return the verdict on an arm (variant) as text, with the difference from its baseline as a remark. `row` holds the
    results of the arm. Arms without a verdict have their role as text.
    """
    d, score = row.difference, score_of(row)
    return row.verdict or row.role, [f"{score.difference(d.mean)} {interval(d, score)}"] if d else []


def cost_tables(comparison: Comparison, conditions: Sequence[Condition]) -> list[Table]:
    """Return the tables with the costs of each arm (variant) as a list, such as parameters, multiply-adds (MACs) and training
    seconds, for some conditions.

    If the evaluator `cost` has measured token reductions, they begin with tokens, MACs, time and speed-up. If settings were
    tuned, they end with the number of trials and their training time. If an arm is compared with another one than the baseline,
    a column names the arms with which the costs are compared.
    """
    tuned = any(condition.tuned for condition in conditions)
    columns = (REDUCED if comparison.reduced else {}) | BUDGETS | (TUNING if tuned else {})
    found = []
    for title, rows in each_table(comparison, conditions):
        cells = {row.arm: [cost(row, name) for name in columns] for row in rows}
        names = list(columns.values())
        if any(row.control for row in rows):
            names.append("Compared with")
            for row in rows:
                cells[row.arm].append(("–" if row.role == "baseline" else row.baseline, []))
        found.append(Table(title=title, columns=tuple(names), rows=cells, text=("Compared with",)))
    return found


def seed_tables(comparison: Comparison) -> list[Table]:
    """Return the tables with the test score of every seed as a list. They also show the range of these scores and the p-value
    before the Holm correction, for each arm (variant).
    """

    def cells(row: Row) -> list[Cell]:
        number = score_of(row).number
        seeds = [f"{number(value)} ({seed})" for seed, value in zip(row.seeds, row.values)]
        extent = f"{number(min(row.values))} to {number(max(row.values))}"
        return [(extent, []), (p_value(row.difference and row.difference.p), []), (", ".join(seeds), [])]

    score = score_in(comparison)
    columns = ("Range", "p, not corrected", f"{score.capital}{score.unit} ({'pass' if comparison.rows[0].folds else 'seed'})")
    conditions = [*comparison.main, *(c for c in comparison.conditions if c not in comparison.main)]
    found = [(title, {row.arm: cells(row) for row in rows if row.values}) for title, rows in each_table(comparison, conditions)]
    return [Table(title=title, columns=columns, rows=rows, text=columns[2:]) for title, rows in found if rows]


def probe_tables(comparison: Comparison, records: Sequence[Record]) -> list[Table]:
    """Return the tables with the mean accuracy of each probe (a classifier on frozen features) as a list, in percent. `records`
    are the results of the runs.

    A condition has a table only if it is a main one and an arm other than the references was probed.
    """
    probed = {condition_of(r) for r in records if r.finished and r.probes and r.role != "reference"}
    conditions = [condition for condition in comparison.main if condition in probed]
    return measurement_tables(conditions, records, lambda r: r.probes or (), percent)


def other_tables(comparison: Comparison, records: Sequence[Record]) -> list[Table]:
    """Return the tables with all measured numbers that no other table of the report shows, as a list. The numbers are means
    over the seeds, under the main conditions. `records` are the results of the runs.

    Scores, probes and the numbers in the tables of costs are left out, because other tables show them. How a probe was fitted
    (its regularization, whether this lies at the edge of its range, its iterations) is also left out; the records keep it.
    """
    shown = {"macs", "macs_sd", "linear_probe_c", "linear_probe_edge", "linear_probe_iterations"}
    shown |= set(REDUCED) if comparison.reduced else set()

    def others(r: Record) -> list[str]:
        return [name for name in r.test or () if name not in {r.score, *(r.probes or ()), *shown}]

    return measurement_tables(comparison.main, records, others, lambda x: f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}")


def measurement_tables(
    conditions: Sequence[Condition],
    records: Sequence[Record],
    names_of: Callable[[Record], Iterable[str]],
    form: Callable[[float], str],
) -> list[Table]:
    """Return a list of tables with means over the seeds of measured numbers. There is one table for each of `conditions`
    (number of labels, training length, tuned or not). `records` are the results of the runs. The function `names_of` takes the
    results of one run and returns the names of the numbers to show, and `form` converts a mean to text.

    A record holds the results of one run, and the numbers are those in its field `test`.
    """
    tables = []
    for condition in conditions:
        found: dict[str, dict[str, list[float]]] = {}
        for r in records:
            for name in names_of(r) if r.finished and condition_of(r) == condition else ():
                if r.test and name in r.test:
                    found.setdefault(r.arm, {}).setdefault(name, []).append(r.test[name])
        columns = tuple(dict.fromkeys(name for numbers in found.values() for name in numbers))
        rows: dict[str, list[Cell]] = {
            arm: [(form(fmean(numbers[name])) if name in numbers else "–", []) for name in columns]
            for arm, numbers in found.items()
        }
        tables += [Table(title=condition.title.capitalize(), columns=columns, rows=rows)] if columns else []
    return tables
