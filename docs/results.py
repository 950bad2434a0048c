"""Draw the picture and write the tables of results in the README and on the technique pages, from the committed records.

    python docs/results.py

writes `docs/_static/results-light.svg` and `accuracy-light.svg`, both also for a dark screen, and replaces blocks of text. A
block begins with one of these lines and ends with `<!-- end -->`:

results                           README.md: the techniques that gain most, at each number of labels
quickstart output                 README.md, docs/index.md: what the recipe `quickstart` prints
settings                          docs/explanation/settings.md: short and long runs, tuned and not tuned
recipes                           docs/report.md: the settings of the recipes that it links
frozen                            docs/report.md, docs/howto/probe_features.md: classifiers on frozen features
results: RECIPE | ARM; ARM        any page: differences of these arms to their baseline
against: RECIPE | ARM | ARM; ARM  any page: differences of the arms after the second | to the arm before it
trials: RECIPE | ARM; ARM         any page: validation accuracy of these arms in the trials of `smallvit tune`
accuracies: RECIPE | ARM          any page: test accuracy of one arm
carried: RECIPE | RECIPE; RECIPE  any page: differences of a recipe beside those of the same arms on other data sets

*Any page* is one of `docs/techniques/*.md`, `docs/explanation/negative-results.md` and `docs/report.md`.
"""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from smallvit.recipe import load_recipe
from smallvit.record import Record, format_labels, read_records
from smallvit.report import text as report_text
from smallvit.tuning import read as read_tuned
from smallvit.verdicts import Comparison, Row, compare
from smallvit.verdicts.comparison import Difference, condition_of
from smallvit.words import join_names

ROOT = Path(__file__).parents[1]

# what the table says -> recipe and arm that measured it (`ablation` where it has the technique, so that most rows have one
# baseline), and the documentation page of the technique, if there is one
TECHNIQUES = {
    "Deformed images": ("regularize", "deformations", "augmentation"),
    "Other stroke widths": ("deformations", "+ stroke width", "augmentation"),
    "Mixup": ("ablation", "mixup", "augmentation"),
    "Dropout": ("ablation", "dropout", "regularization"),
    "Stochastic depth": ("ablation", "stochastic depth", "regularization"),
    "Shifted patches (SPT)": ("ablation", "shifted patches", "shifted_patches"),
    "Locality attention (LSA)": ("ablation", "locality attention", "locality_attention"),
    "Convolutional stem": ("ablation", "convolutional stem", "conv_stem"),
    "Tokenizer of CCT": ("ablation", "CCT tokenizer", "conv_stem"),
    "Depth-wise convolution in the blocks": ("ablation", "depth-wise convolution", "conv_shortcut"),
    "Mimetic initialization": ("ablation", "mimetic initialization", "mimetic_start"),
    "Impulse initialization": ("ablation", "impulse initialization", "impulse_start"),
    "Gated MLP: SwiGLU": ("ablation", "SwiGLU", "gated_mlp"),
    "Gated MLP: GEGLU": ("blocks", "GEGLU", "gated_mlp"),
    "Sigmoid attention": ("ablation", "sigmoid attention", "attention_variants"),
    "Differential attention": ("ablation", "differential attention", "attention_variants"),
    "Talking-heads attention": ("ablation", "talking heads", "attention_variants"),
    "Four registers": ("blocks", "four registers", "pooling"),
    "Mean of the tokens": ("ablation", "mean of the tokens", "pooling"),
    "Sequence pooling": ("ablation", "sequence pooling", "pooling"),
    "Muon instead of AdamW": ("ablation", "Muon", "optimizers"),
    "SAM (two gradients a step)": ("ablation", "SAM", "optimizers"),
    "Schedule-free AdamW": ("ablation", "schedule-free AdamW", "optimizers"),
    "Twice the steps": ("ablation", "twice the steps", None),
    "Six times the steps": ("ablation", "six times the steps", None),
    "FixMatch, against 6x steps": ("semi_supervised", "FixMatch", "semi_supervised"),
    "Mean teacher, against 6x steps": ("semi_supervised", "mean teacher", "semi_supervised"),
    "DINO, against 6x steps": ("dino", "DINO on all digits", "dino"),
    "DINO, simpler, against as many steps": ("self_supervised", "DINO", "dino"),
    "MAE, against as many steps": ("self_supervised", "MAE", "mae"),
    "data2vec, against as many steps": ("self_supervised", "data2vec", "data2vec"),
    "LeJEPA, against as many steps": ("self_supervised", "LeJEPA", "lejepa"),
    "Labels and reconstruction (SSAT)": ("ablation", "SSAT", "ssat"),
    "Distances between patches (DrLoc)": ("ablation", "DrLoc", "drloc"),
    "Label spreading, against DINO": ("pseudo_labels", "DINO, labels spread", "label_spreading"),
    "Distillation from a CNN": ("ablation", "distilled from a CNN", "distillation"),
    "Ensemble of 4, against 4x steps": ("ensembles", "ensemble of 4", "deep_ensembles"),
    "Distilled ensemble, against 4x steps": (
        "ensembles", "distilled from the ensemble, four times the steps", "deep_ensembles",
    ),
    "2-D sines, temperature 10,000": ("explain", "2-D sines", "positions"),
    "2-D sines, default": ("ablation", "2-D sines", "positions"),
    "PEG for learned positions": ("ablation", "PEG", "conditional_positions"),
    "Rotary for learned positions": ("positions", "rotary, mixed", "attention_positions"),
    "Rotary and learned positions": ("ablation", "rotary positions", "attention_positions"),
    "Relative bias and learned positions": ("ablation", "relative bias", "attention_positions"),
    "Token merging (ToMe), half the MACs": ("many_tokens", "ToMe, as long again", "token_merging"),
    "Token pruning (EViT), half the MACs": ("many_tokens", "EViT, as long again", "token_pruning"),
}
# techniques with results at other numbers of labels -> recipe and arm that measured these
OTHER_LABELS = {
    "Deformed images": ("few_and_many", "no deformations"),
    "Mixup": ("few_and_many", "mixup"),
    "Shifted patches (SPT)": ("few_and_many", "shifted patches"),
    "Convolutional stem": ("few_and_many", "convolutional stem"),
    "Tokenizer of CCT": ("few_and_many", "CCT tokenizer"),
    "Gated MLP: SwiGLU": ("few_and_many", "SwiGLU"),
    "Muon instead of AdamW": ("few_and_many", "Muon"),
    "Six times the steps": ("few_and_many", "six times the steps"),
    "FixMatch, against 6x steps": ("few_and_many", "FixMatch"),
}
# techniques that are shown against another control than their recipe names -> this control
CONTROLS = {f"{name}, against as many steps": "scratch as long" for name in ("DINO, simpler", "MAE", "data2vec", "LeJEPA")}
LEFT_OUT = {"no deformations"}  # arms without a technique of the baseline: the table shows the opposite of their differences
# frozen features -> recipe, arm with few labels, and arm with all labels
FROZEN = {
    "raw pixels": ("dino", "pixels, logistic regression", "raw pixels (all labels)"),
    "random weights": ("dino", "random initialization", "random weights (all labels)"),
    "MAE on all digits": ("mae", "MAE on all digits (frozen)", None),
    "DINO on all digits": ("dino", "DINO on all digits (frozen)", "DINO on all digits (all labels)"),
}
# recipes that repeat a comparison on other images -> their data set
OTHER_DATA = {
    "ablation_textures": "textured shapes",
    "ablation_digits": "scikit-learn's digits",
    "inductive_bias_textures": "textured shapes",
    "inductive_bias_digits": "scikit-learn's digits",
}
# recipe and arm -> its name in the tables, where other recipes name it otherwise
SHOWN_NAMES = {
    (recipe, f"{kind} start"): f"{kind} initialization"
    for recipe in ("inductive_bias", "inductive_bias_textures", "inductive_bias_digits")
    for kind in ("mimetic", "impulse")
} | {("regularize", "plain ViT"): "plain ViT, no deformations"}
# lines of the figure of accuracy against labels -> recipes and arm
MODELS = {
    "small ViT with convolutions, Muon, 9,600 steps": (["records"], "small ViT"),
    "plain ViT, 2,400 steps": (["inductive_bias", "few_and_many"], "scratch"),
    "small CNN, 2,400 steps": (["inductive_bias", "few_and_many"], "small CNN"),
    "nearest neighbor on pixels": (["inductive_bias", "few_and_many"], "pixels, nearest neighbor"),
    "DINO, label spreading, unlabelled digits": (["pseudo_labels"], "DINO, labels spread"),
    "FixMatch, unlabelled digits": (["semi_supervised", "few_and_many"], "FixMatch"),
}
INKS = (("#1f2328", "#656d76", "#ffffff"), ("#e6edf3", "#8b949e", "#0d1117"))  # text, lines and background: light, dark
LABELS = (10, 100, 1_000, 10_000)  # numbers of labels that are shown
ALL_DIGITS = 59_000  # the training digits of MNIST without the 1,000 that are used for validation
WORTH_A_ROW = 0.01  # change of accuracy from which a technique stands in the table of the README
FRAGILE, PERHAPS = "†", "‡"
COSTS = {"macs": "MACs", "images_seen": "Images seen"}  # columns of a technique page, where an arm differs by more than 5%
BLOCK = r"(?P<start><!-- {}: (?P<recipe>\w+) \| (?P<arms>.+?) -->\n).*?(?P<end><!-- end -->)"
TABLE, AGAINST, TRIALS, ACCURACIES, CARRIED = (
    re.compile(BLOCK.format(name), re.DOTALL) for name in ("results", "against", "trials", "accuracies", "carried")
)


@cache
def records_of(recipe: str) -> list[Record]:
    """The committed records of a recipe."""
    return read_records(ROOT / "recipes" / f"{recipe}.jsonl")


@cache
def comparison(recipe: str, control: str = "") -> Comparison:
    """The comparison that the committed records of a recipe give. With `control`, this arm is the control of all others."""
    return compare(records_of(recipe), against=control)


def rows_of(recipe: str, arm: str, control: str = "") -> list[Row]:
    """The results of one arm under the main conditions (tuned, longest training), one row for each number of labels. With
    `control`, they are compared with this arm.
    """
    return [row for row in comparison(recipe, control).main_rows if row.arm == arm]


def rows_of_technique(name: str) -> list[tuple[str, Row]]:
    """The results of a technique, in the order of the numbers of labels, each with the recipe that measured it."""
    measured = [TECHNIQUES[name][:2], *([OTHER_LABELS[name]] if name in OTHER_LABELS else [])]
    compared = [(recipe, row) for recipe, arm in measured for row in rows_of(recipe, arm, CONTROLS.get(name, ""))]
    found = [(recipe, row) for recipe, row in compared if row.labels and row.difference]
    turned = [(recipe, turned_around(row) if row.arm in LEFT_OUT else row) for recipe, row in found]
    return sorted(turned, key=lambda pair: pair[1].labels)


def turned_around(row: Row) -> Row:
    """The comparison of the baseline with an arm, from that of the arm with the baseline."""
    d = row.difference
    opposite = replace(d, mean=-d.mean, low=-d.high, high=-d.low)
    verdict = {"better": "worse", "worse": "better"}.get(row.verdict, row.verdict)
    return replace(row, arm=row.baseline, baseline=row.arm, difference=opposite, verdict=verdict)


def shown_labels() -> list[int]:
    """The numbers of labels for which at least one technique has a result."""
    found = {row.labels for name in TECHNIQUES for _, row in rows_of_technique(name)}
    return [labels for labels in LABELS if labels in found]


def labelled_digits(row: Row) -> int:
    """The number of labelled digits of a result on MNIST, also where all training digits have labels."""
    return row.labels or ALL_DIGITS


def points(value: float) -> str:
    """A difference of accuracies in percentage points, with its sign: `+1.2`, `−0.4`, `0.0`."""
    text = f"{100 * value:+.1f}".replace("-", "−")
    return "0.0" if text[1:] == "0.0" else text


def with_interval(mean: float, low: float, high: float) -> str:
    """A difference in percentage points and its interval: `+1.2 [0.3, 2.1]`."""
    low_end, high_end = (points(end).removeprefix("+") for end in (low, high))
    return f"{points(mean)} [{low_end}, {high_end}]"


def cell(row: Row | None) -> str:
    """A difference with its 95% interval on new test images, bold if the verdict is better or worse, with a sign if it is
    fragile, or if it may be; empty without a run.
    """
    if row is None or row.difference is None:
        return ""
    d = row.difference
    text = with_interval(d.mean, d.low, d.high) if d.low is not None else points(d.mean)
    sign = FRAGILE * d.fragile or PERHAPS * may_be_fragile(d)
    return f"**{text}**{sign}" if row.verdict in ("better", "worse") else text


def may_be_fragile(d: Difference) -> bool:
    """Whether a verdict is fragile, or older records do not show whether it is: they have only an upper bound of the variance.
    """
    return replace(d, bound=False).fragile


def markdown_table(lines: Iterable[Iterable[str]]) -> str:
    """A Markdown table from the cells of its lines. The second line has a `---` for each column."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table() -> str:
    """The Markdown table of the README: technique x number of labels, for the techniques that are better by at least
    `WORTH_A_ROW` for one of these numbers.
    """
    columns = shown_labels()
    lines = [["Technique", *(format_labels(n) for n in columns), "Baseline, %"], ["-"] * (len(columns) + 2)]
    linked: set[str | None] = {None}  # each page is linked once
    for name, (*_, page) in TECHNIQUES.items():
        rows = {row.labels: (recipe, row) for recipe, row in rows_of_technique(name)}
        if not any(row.verdict == "better" and row.difference.mean >= WORTH_A_ROW for _, row in rows.values()):
            continue
        title = name if page in linked else f"[{name}](docs/techniques/{page}.md)"
        linked.add(page)
        accuracies = ", ".join(f"{100 * baseline_of(*rows[n]).mean:.1f}" for n in columns if n in rows)
        lines.append([title, *(cell(rows[n][1]) if n in rows else "" for n in columns), accuracies])
    return markdown_table(lines)


def baseline_of(recipe: str, row: Row) -> Row:
    """The results of the arm with which an arm is compared, with as many labels."""
    return next(other for other in rows_of(recipe, row.baseline) if other.labels == row.labels)


def picture(dark: bool) -> str:
    """The results as an SVG: for each technique and number of labels the mean difference and its 95% interval."""
    import matplotlib
    from matplotlib.figure import Figure

    ink, soft, background = INKS[dark]
    bright, deep = ("#ff9f45", "#e05c8a", "#7a74ff", "#35a7c8"), ("#c25700", "#b52a5f", "#4f46d6", "#0e7490")
    colors = dict(zip(LABELS, bright if dark else deep))
    style = {"svg.fonttype": "path", "svg.hashsalt": "results", "font.size": 10, "text.color": ink, "axes.labelcolor": ink}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 0.28 * len(TECHNIQUES)), layout="constrained", facecolor=background)
        ax = figure.add_subplot(facecolor=background)
        for y, name in enumerate(TECHNIQUES):
            rows = [row for _, row in rows_of_technique(name) if row.labels in LABELS]
            for index, row in enumerate(rows):
                d, height = row.difference, y + 0.22 * (index - (len(rows) - 1) / 2)
                found = row.verdict in ("better", "worse")
                color = colors[row.labels]
                ax.plot([100 * d.low, 100 * d.high], [height] * 2, color=color, linewidth=2, alpha=1 if found else 0.55)
                face = color if found else background
                ax.plot([100 * d.mean], [height], "o", color=color, markersize=5.5, markerfacecolor=face)
        for labels in shown_labels():
            ax.plot([], [], "o-", color=colors[labels], label=format_labels(labels))
        ax.axvline(0, color=ink, linewidth=1)
        ax.set_xscale("symlog", linthresh=2, linscale=1)
        ticks = [-20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20]
        ax.set_xticks(ticks, [f"{t:+d}".replace("-", "−") if t else "0" for t in ticks])
        ax.minorticks_off()
        ax.set_yticks(range(len(TECHNIQUES)), TECHNIQUES)
        ax.set_ylim(len(TECHNIQUES) - 0.4, -0.6)
        ax.set_xlabel("change of test accuracy in percentage points, 95% interval (filled: better or worse)")
        ax.tick_params(colors=ink, length=0)
        ax.grid(axis="x", color=soft, alpha=0.25, linewidth=0.7)
        ax.set_axisbelow(True)
        for side in ax.spines.values():
            side.set_visible(False)
        figure.legend(loc="outside upper right", ncols=len(LABELS), frameon=False, labelcolor=ink)
        return as_svg(figure)


def as_svg(figure: Any) -> str:
    """A figure as the text of an SVG file that is the same each time it is drawn."""
    import io

    import matplotlib

    page = io.StringIO()
    figure.savefig(page, format="svg", metadata={"Date": None}, facecolor=figure.get_facecolor())
    text = page.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    return f"<!-- drawn by matplotlib {matplotlib.__version__} -->\n{text}"


def accuracy_picture(dark: bool) -> str:
    """Test error against the number of labels as an SVG, with 95% intervals for new seeds and new test images."""
    import matplotlib
    from matplotlib.figure import Figure

    ink, soft, background = INKS[dark]
    colors = ("#ff9f45", "#9aa4ae", "#35a7c8", "#6e7681", "#e05c8a", "#7a74ff")
    colors = colors if dark else ("#c25700", "#57606a", "#0e7490", "#8c959f", "#b52a5f", "#4f46d6")
    style = {"svg.fonttype": "path", "svg.hashsalt": "accuracy", "font.size": 10, "text.color": ink, "axes.labelcolor": ink}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.5, 5.4), layout="constrained", facecolor=background)
        ax = figure.add_subplot(facecolor=background)
        for (name, (recipes, arm)), color, marker in zip(MODELS.items(), colors, "osD^vP"):
            rows = sorted((row for recipe in recipes for row in rows_of(recipe, arm)), key=labelled_digits)
            labels, errors = [labelled_digits(row) for row in rows], [100 * (1 - row.mean) for row in rows]
            ax.plot(labels, errors, marker=marker, color=color, linewidth=1.6, markersize=5.5, label=name)
            for row in rows:
                low, high = row.new_images or (row.mean, row.mean)  # older records do not say which images were right
                ax.plot([labelled_digits(row)] * 2, [100 * (1 - low), 100 * (1 - high)], color=color, linewidth=3, alpha=0.35)
        ax.set_xscale("log")
        ax.set_yscale("log")
        shown = [10, 100, 500, 1_000, 5_000, 10_000, ALL_DIGITS]
        ax.set_xticks(shown, [f"{n:,}" for n in shown])
        ticks = [0.5, 1, 2, 5, 10, 20, 50]
        ax.set_yticks(ticks, [f"{t:g}%" for t in ticks])
        ax.minorticks_off()
        ax.set_xlabel("labelled digits")
        ax.set_ylabel("wrong test images (lower is better)")
        ax.tick_params(colors=ink, length=0)
        ax.grid(color=soft, alpha=0.25, linewidth=0.7)
        ax.set_axisbelow(True)
        for side in ax.spines.values():
            side.set_visible(False)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=ink, fontsize=9)
        return as_svg(figure)


def quickstart_output() -> str:
    """What `smallvit run quickstart` prints at its end, as a Markdown block, from the committed records."""
    return f"```text\n{report_text(records_of('quickstart')).strip()}\n```"


def with_block(text: str, name: str, content: str) -> str:
    """The text with the part between `<!-- name -->` and `<!-- end -->` replaced. Raises ValueError if it is not there once."""
    block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, found = block.subn(lambda match: f"{match[1]}{content}\n{match[2]}", text)
    if found != 1:
        raise ValueError(f"the block {name!r} was found {found} times; expected it once")
    return text


def name_of(recipe: str, row: Row) -> str:
    """The name of an arm in a table, which says so if the arm is the baseline, or is compared with another arm than that."""
    name = SHOWN_NAMES.get((recipe, row.arm), row.arm)
    if not row.difference:
        return f"{name} (baseline)"
    return name + f" (against {row.baseline})" * (row.baseline != row.group)


def arms_table(recipe: str, arms: Sequence[str], page: str) -> tuple[str, list[str], str]:
    """The Markdown table of a page: the baseline's accuracy, the differences of the arms, and their cost. Also the sentences
    that explain its signs (none in "report.md"), and a note about its runs.

    The name of an arm that is compared with another arm than the baseline says so.

    Raises ValueError for an arm without results in the committed records, and for arms with different baselines.
    """
    rows = {arm: {row.labels: row for row in rows_of(recipe, arm) if row.difference} for arm in arms}
    if missing := [arm for arm in arms if not rows[arm]]:
        raise ValueError(f"the records of {recipe} have no results of {missing}; expected arms with a baseline")
    names = {row.group for of_arm in rows.values() for row in of_arm.values()}
    if len(names) > 1:
        raise ValueError(f"{list(arms)} of {recipe} have the baselines {sorted(names)}; expected one baseline for each table")
    baseline = {row.labels: row for row in rows_of(recipe, names.pop())}
    labels = [count for count in baseline if any(count in of_arm for of_arm in rows.values())]
    shown = [row for of_arm in rows.values() for row in of_arm.values()]
    costs = [name for name in COSTS if any(name in row.unequal for row in shown)]
    faster = any(row.forward["speedup"] for row in shown)
    lines = [["Arm", *(format_labels(n) for n in labels), *(COSTS[name] for name in costs), *["Speed-up"] * faster]]
    lines.append(["---"] * len(lines[0]))
    accuracies = [f"{100 * baseline[n].mean:.1f}%" for n in labels]
    lines.append([name_of(recipe, baseline[labels[0]]), *accuracies, *["1x"] * (len(costs) + faster)])
    for of_arm in rows.values():
        first = next(iter(of_arm.values()))
        relative = [times([1 + row.unequal.get(name, 0) for row in of_arm.values()]) for name in costs]
        speed = [f"{first.forward['speedup']:.2f}x" if first.forward["speedup"] else "–"] * faster
        lines.append([name_of(recipe, first), *(cell(of_arm.get(n)) for n in labels), *relative, *speed])
    seeds = " or ".join(map(str, sorted({len(row.difference.seeds) for row in shown})))
    steps = max(record.steps or 0 for record in records_of(recipe) if record.arm == baseline[labels[0]].arm)
    table = markdown_table(lines)
    tuned = any(row.condition.tuned is True for row in shown)
    signs = [
        "The first row is the test accuracy of the baseline. The other rows are differences from the baseline in percentage "
        "points, with 95% intervals for new seeds and new test images.",
        "A row with *(against X)* is the difference from arm X." * ("(against " in table),
        "Costs are multiples of those of the arm that the row is compared with." * bool(costs),
        "MACs: multiply-adds for an image." * ("macs" in costs),
        "Speed-up: against the same model without reduction." * faster,
        "Bold: the [verdict](../explanation/verdicts.md) is *better* or *worse*. Verdicts are corrected for all comparisons of "
        "the recipe; the intervals are not.",
        f"{FRAGILE} Fragile: a repetition would give this verdict in fewer than 80 of 100 cases." * (FRAGILE in table),
        f"{PERHAPS} May be fragile: these older records do not keep the result of each test image, so it is not known."
        * (PERHAPS in table),
        "Tuning used many more labelled images than the training has." * tuned,
    ]
    short = page == "report.md"
    of_whom, rates = " for the baseline" * (not short), ", learning rates tuned for each arm" * (tuned and not short)
    runs = f"{steps:,} steps{of_whom}, {seeds} seeds{rates}. The full report is [{recipe}](../../recipes/{recipe}.md)."
    return table, [sign for sign in signs if sign and not short], runs


def against_table(recipe: str, names: str) -> str:
    """The Markdown table of arms that are compared with another control than the recipe names. `names` are the control and,
    after a `|`, the arms. The first row is the accuracy of the control.

    Raises ValueError for an arm without results in the committed records.
    """
    control, arms = names.split(" | ")
    accuracy = {row.labels: f"{100 * row.mean:.1f}%" for row in rows_of(recipe, control)}
    lines = [["Arm", *map(format_labels, accuracy)], ["---"] * (len(accuracy) + 1)]
    lines.append([f"{control} (control)", *accuracy.values()])
    for arm in arms_in(arms):
        rows = {row.labels: row for row in rows_of(recipe, arm, control)}
        if not rows:
            raise ValueError(f"the records of {recipe} have no results of {arm!r}; expected one of its arms")
        first = next(iter(rows.values()))
        lines.append([name_of(recipe, first), *(cell(rows.get(labels)) for labels in accuracy)])
    count = comparison(recipe, control).family
    note = (
        f"The recipe did not plan these comparisons. P-values are corrected for all {count} with this control (`smallvit "
        f"report {recipe} --against \"{control}\"`). The full report is [{recipe}](../../recipes/{recipe}.md)."
    )
    return f"{markdown_table(lines)}\n\n{note}"


STROKE_WIDTHS = "tokenizer of CCT, Muon, deformations and stroke widths"
LONGER = f"{STROKE_WIDTHS}, 19,200 steps of 64 digits"
UNLABELLED = "two DINOs with 49 tokens, label spreading, then a new ViT"
# labels, whether unlabelled images are used -> the recipe and arm of the highest mean, and how it was made
BEST = {
    (10, False): ("leave_one_out", "SwiGLU added", "tokenizer of CCT, Muon, deformations and SwiGLU, 4,800 steps"),
    (10, True): ("records_unlabelled", "two DINOs", UNLABELLED),
    (100, False): ("records", "small ViT (longer, stroke widths)", LONGER),
    (100, True): ("records_unlabelled", "two DINOs", UNLABELLED),
    (1_000, False): ("records", "small ViT (stroke widths)", f"{STROKE_WIDTHS}, 9,600 steps"),
    (10_000, False): ("records", "small ViT (longer, stroke widths)", LONGER),
}


def best_table() -> str:
    """The Markdown table of the arms with the highest mean accuracy, and of a small CNN, by the number of labels.

    Raises ValueError if an arm of another recipe on MNIST has a higher mean.
    """
    on_mnist = [recipe for recipe in published() if records_of(recipe)[0].run["data"]["call"] == "smallvit.data.mnist"]
    everywhere = [row for recipe in on_mnist for row in comparison(recipe).main_rows if row.mean is not None]
    lines = [["Labels", "Unlabelled digits", "How", "Accuracy", "Lowest and highest seed", "A small CNN"], ["---"] * 6]
    chosen = {key: next(row for row in rows_of(*arm[:2]) if row.labels == key[0]) for key, arm in BEST.items()}
    for (labels, unlabelled), row in chosen.items():
        others = [other for other in everywhere if other.labels == labels]
        if max(other.mean for other in others) > max(each.mean for key, each in chosen.items() if key[0] == labels):
            raise ValueError(f"BEST has no longer the arm of the highest mean at {labels} labels; exchange its entry")
        cnn = "" if unlabelled else f"{100 * max(other.mean for other in others if other.arm == 'small CNN'):.1f}%"
        recipe, _, how = BEST[labels, unlabelled]
        cells = [f"{100 * row.mean:.1f}%", f"{100 * min(row.values):.1f}%, {100 * max(row.values):.1f}%", cnn]
        further = f"{ALL_DIGITS:,}" if unlabelled else "none"
        lines.append([f"{labels:,}", further, f"{how} ([{recipe}](../recipes/{recipe}.md))", *cells])
    return markdown_table(lines)


def counts(linked: Sequence[str]) -> str:
    """An item of a list: how many comparisons and verdicts all recipes together have. `linked` are those that the report links.
    """
    recipes = [recipe for recipe in published() if any(row.verdict for row in comparison(recipe).main_rows)]
    compared = [(recipe, row) for recipe in recipes for row in comparison(recipe).main_rows]
    found = [(recipe, row) for recipe, row in compared if row.verdict and row.role != "reference"]
    rows, measured = [row for _, row in found], {}
    for recipe, row in found:
        measured.setdefault(runs_compared(recipe, row), []).append(recipe)
    twice = Counter(tuple(names) for names in measured.values() if len(names) > 1)
    again = ", ".join(f"{count} in {join_names([f'`{name}`' for name in names])}" for names, count in twice.items())
    decided = [row.difference for row in rows if row.verdict in ("better", "worse")]
    fragile = sum(d.fragile for d in decided)
    unknown = sum(map(may_be_fragile, decided)) - fragile
    others = [f"`{name}`" for name in recipes if name not in linked]
    text = (
        f"- The {len(recipes)} recipes with verdicts (those of the table of recipes, and "
        f"{join_names(others, len(others))}) together have "
        f"{len(rows)} comparisons, counting only tuned settings and the longest training where there are several. Of these, "
        f"{len(decided)} have the verdict *better* or *worse*. {'At least ' * bool(unknown)}{fragile} of these verdicts are "
        f"fragile{f'; for {unknown} more, older records do not show it' * bool(unknown)}. {sum(twice.values())} of the "
        f"comparisons are counted twice, because two recipes have them with equal settings and seeds: {again}."
    )
    return "\n".join(textwrap.wrap(text, 143, subsequent_indent="  ", break_on_hyphens=False))


def runs_compared(recipe: str, row: Row) -> frozenset[tuple[bool, str]]:
    """The fingerprints of the runs that a row compares, each with whether it is one of the arm: equal for equal comparisons."""
    of_condition = [record for record in records_of(recipe) if condition_of(record) == row.condition and record.finished]
    return frozenset(
        (record.arm == row.arm, record.fingerprint) for record in of_condition if record.arm in (row.arm, row.baseline)
    )


def reports(names: Iterable[str]) -> str:
    """A list of the reports of recipes, each with the question of the recipe."""
    questions = {name: load_recipe(ROOT / "recipes" / f"{name}.py").__doc__.splitlines()[0] for name in names}
    return "\n".join(f"- [{name}](../../recipes/{name}.md): {question}" for name, question in questions.items())


def published() -> list[str]:
    """The names of the recipes with committed records."""
    return sorted(path.stem for path in (ROOT / "recipes").glob("*.jsonl") if path.with_suffix(".py").exists())


def accuracies_table(recipe: str, arm: str) -> str:
    """A Markdown table of the test accuracy of one arm at each number of labels, with its 95% interval for new seeds and new
    test images, and with test-time augmentation if it was measured.

    Raises ValueError for an arm without results in the committed records.
    """
    header, rows = ["Labelled digits", "Accuracy", "95% interval", "Lowest and highest seed"], rows_of(recipe, arm)
    if not rows:
        raise ValueError(f"the records of {recipe} have no results of {arm!r}")
    conditions = {row.condition for row in rows}
    of_arm = [r for r in records_of(recipe) if r.arm == arm and r.finished and condition_of(r) in conditions]
    augmented = all("augmented_accuracy" in (record.test or {}) for record in of_arm)
    if augmented:
        header.append("With test-time augmentation")
    lines = [header, ["---"] * len(header)]
    for row in rows:
        ends = [f"{100 * end:.2f}%" for end in row.new_images or ()]
        line = [f"{labelled_digits(row):,}", f"{100 * row.mean:.2f}%", " to ".join(ends) or "–"]
        line.append(f"{100 * min(row.values):.2f}%, {100 * max(row.values):.2f}%")
        if augmented:
            line.append(f"{100 * fmean(r.test['augmented_accuracy'] for r in of_arm if condition_of(r) == row.condition):.2f}%")
        lines.append(line)
    return markdown_table(lines)


def frozen_table() -> str:
    """The Markdown table of the mean test accuracy of classifiers on frozen features: logistic regression with some numbers of
    labels and with all of them, and, with all labels, the five nearest neighbors and 16 labelled images of each class.
    """
    few = (10, 100, 1_000)
    lines = [["Frozen features", *(format_labels(n) for n in few), "all labels", "all labels, 5 nearest", "16 of each class"]]
    lines.append(["---"] * len(lines[0]))
    for name, (recipe, arm, arm_with_all) in FROZEN.items():
        cells = [probed(recipe, arm, labels, "linear_probe") for labels in few]
        cells += [probed(recipe, arm_with_all, None, probe) for probe in ("linear_probe", "knn_5", "few_shot")]
        lines.append([name, *cells])
    return markdown_table(lines)


def probed(recipe: str, arm: str | None, labels: int | None, probe: str) -> str:
    """The mean test accuracy of a probe over the seeds of an arm in percent, or a dash if it was not measured."""
    records = [r for r in records_of(recipe) if r.arm == arm and r.labels == labels and r.finished]
    found = [r.test[probe] for r in records if r.test and probe in r.test]
    return f"{100 * fmean(found):.1f}%" if found else "–"


def carried_tables(recipe: str, copies: Sequence[str]) -> str:
    """A Markdown table for each number of labels, with the differences of all arms on MNIST and on other data sets. `copies`
    are the recipes that repeat the comparison of `recipe` there. The first row is the accuracy of the baseline.
    """
    blocks = []
    compared = [row for row in comparison(recipe).main_rows if row.role != "reference"]
    for labels in dict.fromkeys(row.labels for row in compared):
        there = [copy for copy in copies if any(row.labels == labels for row in comparison(copy).main_rows)]
        if not there:
            continue
        lines = [["Arm", "MNIST", *(OTHER_DATA[copy] for copy in there)], ["---"] * (len(there) + 2)]
        for row in compared:
            if row.labels == labels:
                of_arm = [{each.labels: each for each in rows_of(one, row.arm)}.get(labels) for one in (recipe, *there)]
                cells = map(cell, of_arm) if row.difference else (f"{100 * each.mean:.1f}%" if each else "" for each in of_arm)
                lines.append([name_of(recipe, row), *cells])
        blocks.append(f"With {format_labels(labels)}:\n\n{markdown_table(lines)}")
    return "\n\n".join(blocks)


def times(factors: Sequence[float]) -> str:
    """Cost as a multiple of the baseline's: `1.1x`, or `0.5x to 1x` where it depends on the number of labels."""
    texts = list(dict.fromkeys(f"{round(factor, 2):g}x" if factor < 2 else f"{factor:.2g}x" for factor in sorted(factors)))
    return texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"


def arms_in(names: str) -> list[str]:
    """The names of the arms in the first line of a block, or in a part of this line."""
    return [arm.strip() for arm in names.split(";")]


def with_tables(text: str, page: str) -> str:
    """The text of a page with its tables written again, and a note below each. A sign is explained once on each page, below the
    first table that has it. A note that fits several tables in a row stands below the first.
    """
    contents, explained, before = [], set(), ""
    for match in TABLE.finditer(text):
        table, signs, runs = arms_table(match["recipe"], arms_in(match["arms"]), page)
        new = [sign for sign in signs if sign not in explained]
        note = " ".join([*["Read it like the tables above."] * (len(new) < len(signs)), *new, runs])
        contents.append(table if runs == before and not new else f"{table}\n\n{note}")
        explained.update(new)
        before = runs
    parts = iter(contents)
    return TABLE.sub(lambda match: f"{match['start']}{next(parts)}\n{match['end']}", text)


# recipes that were run again with more steps and tuned learning rates; what they are about
RUN_AGAIN = {
    "explain": "Positions, compared with learned ones",
    "hyperparameters": "Sizes and options of the model",
    "regularize": "Regularization",
    "spt_lsa": "Shifted patches, locality attention, stem",
}


def earlier() -> dict[str, dict]:
    """For each recipe that was run again, its earlier number of training steps ("steps") and its earlier results ("arms"): a
    dict from an arm, its number of labels and its control to the mean, the ends of the interval and the verdict. The intervals
    are those for new test images. The earlier records do not say which images were right, so they are upper bounds.
    """
    stored = json.loads((ROOT / "docs" / "earlier.json").read_text(encoding="utf-8"))
    return {r: {"steps": one["steps"], "arms": {tuple(a[:3]): a[3:] for a in one["arms"]}} for r, one in stored.items()}


def settings_tables() -> str:
    """For each recipe that was run again and number of labels, a Markdown table with the differences and verdicts of the short
    runs at one learning rate, the long ones at this rate, and the long ones at tuned rates. Before: how many verdicts changed.
    """
    blocks, changed, counted = [], 0, 0
    for recipe, about in RUN_AGAIN.items():
        old = earlier()[recipe]
        rows = [row for row in comparison(recipe).rows if row.difference and row.role == "technique"]
        final = [row for row in rows if row.condition.tuned]
        common = {(row.arm, row.labels): row for row in rows if not row.condition.tuned}  # the longest comes last
        now = next(record.run["steps"] for record in records_of(recipe) if record.role == "baseline" and record.tuning)
        header = [["Arm", f"{old['steps']:,} steps", f"{now:,} steps", f"{now:,} steps, tuned"], ["---"] * 4]
        tables = {row.labels: list(header) for row in final}
        for row in final:
            before = old["arms"].get((row.arm, row.labels, row.baseline))
            counted += before is not None
            changed += before is not None and before[3] != row.verdict
            first = judged(*before) if before else "not compared"
            both = ((one.difference, one.verdict) for one in (common[row.arm, row.labels], row))
            shown = [judged(d.mean, d.low, d.high, verdict) for d, verdict in both]
            tables[row.labels].append([name_of(recipe, row), first, *shown])
        blocks.append(f"### {about} ([{recipe}](../../recipes/{recipe}.md))")
        blocks += [f"With {format_labels(labels)}:\n\n{markdown_table(lines)}" for labels, lines in tables.items()]
    summary = f"{changed} of {counted} verdicts changed from the short runs at one learning rate to the long, tuned runs."
    return "\n\n".join([summary, *blocks])


def judged(mean: float, low: float, high: float, verdict: str) -> str:
    """A difference in percentage points with its interval and its verdict; bold if it is better or worse."""
    text = with_interval(mean, low, high)
    return f"**{text} {verdict}**" if verdict in ("better", "worse") else text


def trials_table(recipe: str, arms: Sequence[str]) -> str:
    """The Markdown table of a page with the validation accuracy of some arms in the trials of a recipe that was tuned and not
    run yet, at the best of their learning rates, and a note below it.

    Raises ValueError for an arm without trials.
    """
    options, tuned = read_tuned(ROOT / "recipes" / f"{recipe}.tuned.json")
    found = {(arm.arm, arm.labels): arm for arm in tuned if arm.accuracy is not None}
    labels = list(dict.fromkeys(count for _, count in found))
    if missing := [arm for arm in arms if (arm, labels[0]) not in found]:
        raise ValueError(f"{recipe}.tuned.json has no trials of {missing}; expected tuned arms")
    lines = [["Arm", *(format_labels(n) for n in labels)], ["---"] * (len(labels) + 1)]
    lines += [[arm, *(f"{100 * found[arm, n].accuracy:.1f}%" for n in labels)] for arm in arms]
    steps = round(options["steps"] * load_recipe(ROOT / "recipes" / f"{recipe}.py").RUNS[0].run.steps)
    note = (
        f"These are trials, not a comparison: accuracy on {options['val']:,} validation images after {steps:,} steps, mean of "
        f"{options['seeds']} seeds, at the best of {options['trials']} learning rates for each arm. The recipe `{recipe}` was "
        "not run yet."
    )
    return markdown_table(lines) + f"\n\n{note}"


def recipes_table(recipes: Iterable[str]) -> str:
    """The Markdown table of the settings of some recipes, from their records."""
    lines = [["Recipe", "Parameters", "Steps", "Batch", "Seeds", "Labels", "Learning rates"], ["---"] * 7]
    for recipe in recipes:
        rows = comparison(recipe).main_rows
        baselines = [row for row in rows if row.role == "baseline"]
        first = max(baselines, key=lambda row: (row.condition.tuned, len(row.seeds)))  # the first of these, if several
        records = [record for record in records_of(recipe) if record.arm == first.arm]
        longest, batch = max(record.steps or 0 for record in records), records[0].run["batch"]
        labels = ", ".join(f"{n:,}" if n else "all" for n in dict.fromkeys(row.labels for row in rows if row.arm == first.arm))
        tuned = "tuned" if first.condition.tuned else "not tuned"
        parameters = f"{round(first.budget['params'], -3):,.0f}"
        linked = f"[{recipe}](../recipes/{recipe}.md)"
        lines.append([linked, parameters, f"{longest:,}", f"{batch}", f"{len(first.seeds)}", labels, tuned])
    return markdown_table(lines)


def in_report(text: str) -> str:
    """The text of docs/report.md with links that are right there, and its tables of recipes and of frozen features."""
    text = text.replace("](../../recipes/", "](../recipes/")
    recipes = re.findall(r"\]\(\.\./recipes/(\w+)\.md\)", with_block(text, "recipes", ""))
    text = with_block(text, "recipes", recipes_table(dict.fromkeys(recipes)))
    text = with_block(with_block(text, "best", best_table()), "counts", counts(recipes))
    return with_block(text, "frozen", frozen_table())


def with_trials(text: str) -> str:
    """The text of a page with its tables of trials written again."""

    def block(match: re.Match) -> str:
        table = trials_table(match["recipe"], arms_in(match["arms"]))
        return f"{match['start']}{table}\n{match['end']}"

    return TRIALS.sub(block, text)


def with_accuracies(text: str) -> str:
    """The text of a page with its tables of accuracies written again."""
    return ACCURACIES.sub(lambda m: f"{m['start']}{accuracies_table(m['recipe'], m['arms'])}\n{m['end']}", text)


def with_against(text: str) -> str:
    """The text of a page with its tables of arms that are compared with another control written again."""
    return AGAINST.sub(lambda m: f"{m['start']}{against_table(m['recipe'], m['arms'])}\n{m['end']}", text)


def with_carried(text: str) -> str:
    """The text of a page with its tables of several data sets written again."""
    return CARRIED.sub(lambda m: f"{m['start']}{carried_tables(m['recipe'], arms_in(m['arms']))}\n{m['end']}", text)


def written() -> Iterable[tuple[Path, str]]:
    """The files that this script writes, with their contents."""
    for mode in ("light", "dark"):
        yield ROOT / "docs" / "_static" / f"results-{mode}.svg", picture(mode == "dark")
        yield ROOT / "docs" / "_static" / f"accuracy-{mode}.svg", accuracy_picture(mode == "dark")
    readme = ROOT / "README.md"
    printed = quickstart_output()
    yield readme, with_block(with_block(readme.read_text(encoding="utf-8"), "quickstart output", printed), "results", table())
    docs = ROOT / "docs"
    front = docs / "index.md"
    yield front, with_block(front.read_text(encoding="utf-8"), "quickstart output", printed)
    index = docs / "recipes" / "index.md"
    text = index.read_text(encoding="utf-8")
    yield index, with_block(text, "reports", reports(re.findall(r"^\w+$", text.partition("{toctree}")[2], re.MULTILINE)))
    settings = docs / "explanation" / "settings.md"
    yield settings, with_block(settings.read_text(encoding="utf-8"), "settings", settings_tables())
    probes = docs / "howto" / "probe_features.md"
    yield probes, with_block(probes.read_text(encoding="utf-8"), "frozen", frozen_table())
    pages = (*sorted((docs / "techniques").glob("*.md")), docs / "explanation" / "negative-results.md", docs / "report.md")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if any(kind.search(text) for kind in (TABLE, AGAINST, TRIALS, ACCURACIES, CARRIED)):
            text = with_against(with_carried(with_accuracies(with_trials(with_tables(text, page.name)))))
            yield page, in_report(text) if page.name == "report.md" else text


if __name__ == "__main__":
    for path, text in written():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))
