"""Figures of a comparison with one baseline, as inline SVG. An arm has the same color and marker in all of them, except in a
forest plot of many arms.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from smallvit.record import Record, format_labels
from smallvit.verdicts.comparison import Comparison, Row, condition_of
from smallvit.verdicts.contrasts import trends
from smallvit.verdicts.costs import TOLERANCE
from smallvit.verdicts.score import ACCURACY

from .drawing import (
    BAD,
    FAINT,
    GOOD,
    INK,
    PAGE,
    draw_arm,
    draw_mean,
    name_lines,
    set_difference_axis,
    set_log_ticks,
    set_score_axis,
    shifted,
    shortened,
    style,
    styles,
    subplots,
    svg,
)
from .format import multiply_adds
from .settings import Trial, option_names
from .units import score_in

MANY_ARMS = 12  # from so many arms on, colors of a forest plot show verdicts: eight hues do not tell them apart


@style()
def forest(comparison: Comparison) -> str:
    """Draw a forest plot: the difference in score between each arm (variant) and its baseline, under the main conditions.
    Return the figure as SVG text.

    The differences are paired, for an accuracy in percentage points. Small dots are seeds, the marker is their mean and the bar
    is its 95% interval on new test images. From `MANY_ARMS` arms on, colors and markers show the verdicts. If an arm is much
    worse or better than the others, the axis is logarithmic for large differences.
    """
    judged = [row for row in comparison.main_rows if row.role == "technique"]
    arms = list(dict.fromkeys(row.arm for row in judged))
    score = score_in(comparison)
    names = [next(arm_and_control(row) for row in judged if row.arm == arm) for arm in arms]
    rows = {c: [(r, r.difference) for r in judged if r.condition == c and r.difference] for c in comparison.main}
    figure, panels = subplots([c for c in rows if rows[c]], names)
    looks = verdict_looks(figure, judged) if len(arms) >= MANY_ARMS else {}
    scale = 100 if score.percent else 1
    for c, ax in panels.items():
        ax.axvline(0, color=INK, linewidth=1)
        for r, d in rows[c]:
            draw_arm(ax, arms.index(r.arm), d, looks[r.verdict] if looks else styles(comparison)[r.arm], scale)
        ax.locator_params(axis="x", nbins=6)
        note = set_difference_axis(ax, "x", [d for _, d in rows[c]], 28 // min(3, len(panels)), score)
        control = shortened(comparison.baseline) if names == arms else "the arm that it is compared with"
        ax.set(xlabel=f"{'points' if score.percent else score.title} above {control}{note}")
    return svg(figure, "forest", "paired differences to the baseline")


def verdict_looks(figure, rows: Sequence[Row]) -> dict[str | None, dict]:
    """Return the look of each verdict of `rows` as a dict from the verdict to a dict with color and marker, and explain them in
    a legend of the matplotlib figure. Colors and markers are those of the tables. Only better and worse have filled markers.
    """
    from matplotlib.lines import Line2D

    looks: dict[str | None, dict] = {"better": {"color": GOOD, "marker": "^"}, "worse": {"color": BAD, "marker": "v"}}
    found = list(dict.fromkeys(r.verdict or "" for r in rows if r.difference))
    others = [verdict for verdict in found if verdict not in looks]
    looks |= {verdict: {"color": FAINT, "marker": "o", "markerfacecolor": PAGE} for verdict in others}
    names = {verdict: verdict for verdict in ("better", "worse") if verdict in found}
    names |= {verdict: " or ".join(others) for verdict in others[:1]}
    handles = [Line2D([], [], **looks[verdict], label=name) for verdict, name in names.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=max(1, len(handles)), frameon=False)
    return looks


def arm_and_control(row: Row) -> str:
    """Return the name of an arm (variant) as a label for a figure. If the arm is compared with another arm than the baseline, a
    second line names that arm: `against +SPT`. `row` holds the results of the arm.
    """
    return row.arm + f"\nagainst {row.control}" * bool(row.control)


@style()
def dots(comparison: Comparison) -> str:
    """Draw the test score of every run under the main conditions as a small dot, with one line for each arm (variant).
    Return the figure as SVG text. A marker shows the mean, and a bar shows its 95% t interval over the seeds.
    """
    score = score_in(comparison)
    rows = {c: [r for r in comparison.at(c) if r.values] for c in comparison.main}
    arms = [arm for arm in comparison.arms if any(r.arm == arm for cells in rows.values() for r in cells)]
    figure, panels = subplots([c for c in rows if rows[c]], arms)
    for c, ax in panels.items():
        for r in rows[c]:
            draw_arm(ax, arms.index(r.arm), r, styles(comparison)[r.arm])
        set_score_axis(ax, "x", [v for r in rows[c] for v in (*r.values, r.low, r.high)], 5, score)
        ax.set(xlabel=f"test {score.title}{score.unit}")
    return svg(figure, "dots", f"test {score.title} of every run")


@style()
def by_macs(comparison: Comparison) -> str:
    """Plot the mean test score of each arm (variant) against its relative compute: its multiply-adds (MACs) divided by those
    of the baseline. Return the figure as SVG text.

    Bars are 95% t intervals. The text is empty if no arm reduces tokens, or if all arms but the baseline need about
    equally many MACs.
    """
    rows = {
        c: [r for r in comparison.at(c) if r.role != "reference" and r.values and r.budget["macs"]] for c in comparison.main
    }

    def unequal(cells: list[Row]) -> bool:
        macs = [r.budget["macs"] or 0 for r in cells if r.role == "technique"]
        return len(macs) < len(cells) and max(macs, default=0) > (1 + TOLERANCE) * min(macs, default=0)

    rows = {c: cells for c, cells in rows.items() if comparison.reduced and unequal(cells)}
    figure, panels = subplots(list(rows), height=3.9)
    looks, score = styles(comparison), score_in(comparison)
    for c, ax in panels.items():
        whole = next(r for r in rows[c] if r.role == "baseline")
        ax.axhline(whole.mean, color=INK, linewidth=0.8, linestyle=":")
        share = {r.arm: (r.budget["macs"] or 0) / (whole.budget["macs"] or 1) for r in rows[c]}
        for r in rows[c]:
            equal = [arm for arm in share if abs(share[arm] - share[r.arm]) < 0.01]
            x, look = share[r.arm] + 0.01 * (equal.index(r.arm) - (len(equal) - 1) / 2), looks[r.arm]
            draw_mean(ax, x, r, look)
        set_score_axis(ax, "y", [v for r in rows[c] for v in (r.mean, r.low, r.high)], 7, score)
        ax.set(xlabel=f"MACs, relative to {shortened(comparison.baseline)}")
    figure.supylabel(f"test {score.title}{score.unit}", fontsize="medium")
    return svg(figure, "macs", f"test {score.title} against MACs")


@style()
def by_labels(comparison: Comparison) -> str:
    """Plot the mean test score of each arm (variant) against the number of labelled images. Return the figure as SVG text.
    The text is empty if there is only one number of labelled images.

    Bars are 95% t intervals.
    """
    lines = {arm: [r for r in comparison.main_rows if r.arm == arm and r.labels and r.values] for arm in comparison.arms}
    lines = {arm: rows for arm, rows in lines.items() if rows}
    sizes = sorted({r.labels for rows in lines.values() for r in rows if r.labels})
    if len(sizes) < 2:
        return ""
    score = score_in(comparison)
    figure, panels = subplots([f"{score.capital} against number of labels"], height=5.6, width=11)
    ax = panels.popitem()[1]
    ends, looks = {}, styles(comparison)
    apart = (sizes[-1] / sizes[0]) ** 0.007  # arms stand side by side, so that no interval hides another
    for place, (arm, rows) in enumerate(lines.items()):
        xs = [(r.labels or 0) * apart ** (place - len(comparison.arms) / 2) for r in rows]
        dashes = ":" if comparison.arms[arm] == "reference" else "-"
        ax.plot(xs, [r.mean for r in rows], dashes, color=looks[arm]["color"])
        for x, r in zip(xs, rows):
            draw_mean(ax, x, r, looks[arm])
        ends[arm] = xs[-1], rows[-1].mean
    ax.set(title="", xscale="log", xlabel="labelled images", ylabel=f"test {score.title}{score.unit}")
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
    ax.minorticks_off()
    set_score_axis(ax, "y", [v for rows in lines.values() for r in rows for v in (r.mean, r.low, r.high)], 9, score)
    name_lines(ax, ends, looks)
    return svg(figure, "labels", f"test {score.title} against number of labels")


@style()
def by_hyperparameter(comparison: Comparison, hyperparameters: Mapping[str, Mapping[str, float]]) -> str:
    """Plot the test score against the value of each hyperparameter. Return the figure as SVG text. The nested dict
    `hyperparameters[name][arm]` holds the value of a hyperparameter in an arm (variant).

    Each arm differs from the baseline in one hyperparameter only. The figure shows a dot for each seed, the mean and its 95% t
    interval.

    All panels of one number of labels share their axis of scores. Below each value stand the MACs of one image.
    """
    cells = {}
    for c in comparison.main:
        for name, values in hyperparameters.items():
            rows = sorted((r for r in comparison.at(c) if r.arm in values and r.values), key=lambda r: values[r.arm])
            if len(rows) > 1:
                cells[f"{name}, {format_labels(c.labels)}" if len(comparison.main) > 1 else name] = c, name, rows
    figure, panels = subplots(list(cells), height=3.4)
    looks, score = styles(comparison), score_in(comparison)
    for title, ax in panels.items():
        condition, name, rows = cells[title]
        xs = [hyperparameters[name][r.arm] for r in rows]
        log = min(xs) > 0 and max(xs) >= 8 * min(xs)
        ax.set(xscale="log" if log else "linear", xlabel=f"{name}, and MACs per image")
        ax.plot(xs, [r.mean for r in rows], color=FAINT, linewidth=0.8)
        for x, r in zip(xs, rows):
            xs_seeds, look = [shifted(x, xs, 0.035, log)] * len(r.values), looks[r.arm]
            ax.plot(xs_seeds, r.values, "o", color=look["color"], alpha=0.45, markersize=3)
            draw_mean(ax, x, r, look, linewidth=2)
        macs = [r.budget["macs"] for r in rows]
        ax.set_xticks(xs, [f"{x:,g}" + (f"\n{multiply_adds(m)}" if m else "") for x, m in zip(xs, macs)])
        ax.minorticks_off()
        ax.set_xlim(shifted(min(xs), xs, -0.08, log), shifted(max(xs), xs, 0.08, log))
        shown = [r for c, _, others in cells.values() if c == condition for r in others]
        set_score_axis(ax, "y", [v for r in shown for v in (*r.values, r.low, r.high)], 7, score)
    figure.supylabel(f"test {score.title}{score.unit}", fontsize="medium")
    return svg(figure, "hyperparameters", f"test {score.title} against the one number that arms differ in")


@style()
def by_length(comparison: Comparison) -> str:
    """Plot the difference in score between each arm (variant) and its baseline against the training length. Return the
    figure as SVG text. The text is empty if there is only one length.

    Bars are 95% intervals on new test images. Filled markers are common settings, hollow ones are tuned settings. The word
    beside the name of an arm says what becomes of its verdict with common settings, such as "fades".
    """
    judged = [r for r in comparison.rows if r.role == "technique" and r.length and r.difference]
    lengths = sorted({r.length for r in judged if r.length})
    labels = list(dict.fromkeys(r.labels for r in judged)) if len(lengths) > 1 else []
    names = {f"Difference against training length, {format_labels(n)}": n for n in labels}
    figure, panels = subplots(list(names), height=4.6, width=11, columns=1)
    looks, score = styles(comparison), score_in(comparison)
    scale = 100 if score.percent else 1
    apart = (max(lengths, default=1) / min(lengths, default=1)) ** 0.007  # so that no interval hides another
    for title, ax in panels.items():
        ends, arms = {}, list(dict.fromkeys(r.arm for r in judged if r.labels == names[title]))
        ax.axhline(0, color=INK, linewidth=1)
        for place, arm in enumerate(arms):
            rows = sorted((r for r in judged if (r.labels, r.arm) == (names[title], arm)), key=lambda r: (r.tuned, r.length))
            steps = {tuned: place - (len(arms) - 1) / 2 + (len(arms) + 1) * tuned for tuned in (False, True)}
            points = [(r.length * apart ** steps[r.tuned], r) for r in rows if r.length and r.difference]
            for tuned in (False, True):
                line = [(x, scale * r.difference.mean) for x, r in points if r.tuned == tuned and r.difference]
                ax.plot(*zip(*line) if line else ((), ()), color=looks[arm]["color"], linestyle=":" if tuned else "-")
            for x, r in points:
                if r.difference:
                    draw_mean(ax, x, r.difference, looks[arm], scale=scale, hollow=r.tuned)
                    ends[arm] = x, scale * r.difference.mean
        ax.set(xscale="log", xlabel="training steps of the baseline")
        ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
        ax.minorticks_off()
        shown = [r.difference for r in judged if r.labels == names[title] and r.difference]
        ax.set_ylabel(f"difference{score.points and ', points'}{set_difference_axis(ax, 'y', shown, 20, score)}")
        name_lines(ax, ends, looks, {t.arm: t.outcome for t in trends(comparison) if t.labels == names[title] and not t.tuned})
    return svg(figure, "length", "difference from the baseline against training length")


@style()
def by_tuning(comparison: Comparison, curves: Mapping[tuple[int | None, str], Mapping[str, Sequence[Trial]]]) -> str:
    """Plot the validation score of all trials of the tuning against each option that was tuned. Return the figure as SVG
    text. `comparison` holds all results, and `curves` is a nested dict: `curves[labels, option][arm]` lists the trials of an
    arm (variant) with `labels` labelled images.

    A large marker with an outline is the choice. Small markers are the other trials, and the smallest ones used fewer seeds.
    Trials are joined by a line if only one option was tuned.
    """
    several = len({labels for labels, _ in curves}) > 1
    names = option_names(dict.fromkeys(option for _, option in curves))
    cells = {names[option] + f", {format_labels(n)}" * several: (n, option) for n, option in curves}
    figure, panels = subplots(list(cells), height=3.6, columns=3)
    looks, score = styles(comparison), score_in(comparison)
    for title, ax in panels.items():
        labels, option = cells[title]
        alone = sum(n == labels for n, _ in curves) == 1
        trials = [trial for found in curves[labels, option].values() for trial in found]
        values, most = [trial.value for trial in trials], max(trial.seeds for trial in trials)
        log = min(values) > 0 and max(values) >= 8 * min(values)
        for arm, found in curves[labels, option].items():
            look = looks[arm]
            full = [trial for trial in found if trial.seeds == most]
            if alone:
                ax.plot([t.value for t in full], [t.accuracy for t in full], color=look["color"], linewidth=0.9, alpha=0.7)
            for t in found:
                size = {"markersize": 9, "markeredgecolor": INK} if t.chosen else {"markersize": 5 if t.seeds == most else 3}
                ax.plot([t.value], [t.accuracy], look["marker"], color=look["color"], zorder=3 if t.chosen else 2, **size)
        ax.set(xscale="log" if log else "linear", xlabel=names[option])
        if log:
            set_log_ticks(ax, min(values), max(values))
        set_score_axis(ax, "y", [trial.accuracy for trial in trials], 7, score)
    figure.supylabel(f"validation {score.title}{score.unit}", fontsize="medium")
    return svg(figure, "tuning", f"validation {score.title} of the trials against the tuned option")


@style()
def learning_curves(comparison: Comparison, records: Sequence[Record]) -> str:
    """Plot the validation accuracy and the training loss of each arm (variant) against the training step. Return the figure as
    SVG text. `records` are the results of the runs. Only runs under the main conditions are shown.

    Lines are means over the seeds, and bands show one standard deviation above and below the mean.

    A mean is drawn only at steps that all finished seeds of the arm have, so that it is always over the same seeds.
    """
    curves: dict[tuple, list[dict]] = {}
    for r in records:
        for kind, index in (("accuracy", 2), ("loss", 1)):
            values = {point[0]: point[index] for point in r.curve or [] if point[index] is not None}
            if r.finished and values:
                curves.setdefault((condition_of(r), kind, r.arm), []).append(values)
    names = {
        c if kind == "accuracy" else (kind, c): (c, kind)
        for kind in ("accuracy", "loss")
        for c in comparison.main
        if any(cell[:2] == (c, kind) for cell in curves)
    }
    figure, panels = subplots(list(names), height=3.6, columns=min(3, len({c for c, _ in names.values()})))
    for name, ax in panels.items():
        condition, kind = names[name]
        shown, disjoint = [], []
        for arm, look in styles(comparison).items():
            seeds = curves.get((condition, kind, arm), [])
            steps = sorted(set.intersection(*map(set, seeds))) if seeds else []
            disjoint += [arm] if seeds and not steps else []
            means = [fmean(values[s] for values in seeds) for s in steps]
            sds = [stdev(values[s] for values in seeds) if len(seeds) > 1 else 0 for s in steps]
            bottom, top = [m - sd for m, sd in zip(means, sds)], [m + sd for m, sd in zip(means, sds)]
            if kind == "loss":  # a logarithmic axis cannot show a band that reaches 0
                bottom = [max(low, m / 10) if m > 0 else low for low, m in zip(bottom, means)]
            ax.fill_between(steps, bottom, top, color=look["color"], alpha=0.13, linewidth=0)
            ax.plot(steps, means, marker=look["marker"], markevery=[-1] if steps else [], color=look["color"])
            shown += bottom + top
        if kind == "accuracy":
            set_score_axis(ax, "y", shown, 7, ACCURACY)
        else:
            ax.set(title="", yscale="log" if min(shown, default=0) > 0 else "linear")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("")
        remark = f" (seeds share no step: {', '.join(map(shortened, disjoint))})" if disjoint else ""
        ax.set(xlabel="training step" + epoch_length(records, condition.labels) + remark)
        ax.set_ylabel("validation accuracy, %" if kind == "accuracy" else "training loss")
    return svg(figure, "curves", "validation accuracy and training loss against training step")


def epoch_length(records: Sequence[Record], labels: int | None) -> str:
    """Return a text for an axis label that says how many training steps an epoch (one pass over the labelled images) has:
    `(an epoch is 15.6)`. `records` are the results of the runs. Only runs with `labels` labelled images are used.

    The text is empty if the batch sizes of the runs differ or if the number of training images is unknown.
    """
    runs = [r.run for r in records if r.labels == labels and r.curve]
    batches = {None if run.get("unlabelled") else run.get("batch") for run in runs}
    batch = batches.pop() if len(batches) == 1 else None
    return "" if labels is None or batch is None else f" (an epoch is {labels / batch:.3g})"


@style()
def tokens(picture: dict) -> str:
    """Draw which patches of a few images were merged or removed by a token reduction, in each block of a model. Return the
    figure as SVG text. `picture` is a dict with the pixels of these images and the groups of their patches; the record
    (results) of a run contains it.
    """
    from smallvit.explain import draw_token_map

    return svg(draw_token_map(picture), "tokens", "which patches share a token, and which were removed")
