"""Figures of a comparison with one baseline, as inline SVG. An arm has the same color and marker in all of them.

Colors are CSS variables (`--arm-0` ..., `--ink`, `--faint`), so a figure follows a light or dark page, and text uses the page's
font. Accuracy axes are stretched towards 100%: halving the error is a step of about the same length everywhere.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean, stdev
from typing import Any

from smallvit.record import Record, format_labels

from .compare import TOLERANCE, Comparison, Difference, Row

# Eight hues that can be distinguished from each other and from the ink with any kind of color blindness.
LIGHT = ("#006aff", "#f65914", "#0aa696", "#da01b9", "#977543", "#025084", "#8f424f", "#2e0099")
DARK = ("#5891ff", "#ff937f", "#38706c", "#b41eab", "#f0cb59", "#12d7ff", "#fc0017", "#6845ef")
GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★", "p": "⬟"}
INK, FAINT, ARM = "#0a0a0a", "#0b0b0b", "#0c0c{:02x}"  # replaced by the CSS variables when the SVG is written
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.linewidth": 0.5, "grid.color": FAINT, "grid.alpha": 0.35, "axes.facecolor": "none",
    "figure.facecolor": "none", "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "lines.markersize": 6, "lines.linewidth": 1.5,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    """Context manager and decorator that applies the matplotlib settings of the report while a figure is drawn."""
    import matplotlib

    with matplotlib.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        yield


@style()
def forest(comparison: Comparison) -> str:
    """Draw a forest plot: the difference in accuracy between each arm (variant) and its baseline. Return the figure as SVG
    text.

    The differences are paired, in percentage points. Small dots are seeds, the marker is their mean and the bar is its 95% t
    interval.
    """
    arms = [arm for arm, role in comparison.arms.items() if role == "technique"]
    rows = {n: {r.arm: r.difference for r in comparison.at(n) if r.arm in arms and r.difference} for n in comparison.labels}
    figure, panels = subplots([n for n in rows if rows[n]], arms)
    for n, ax in panels.items():
        ax.axvline(0, color=INK, linewidth=1)
        for arm, d in rows[n].items():
            draw_arm(ax, arms.index(arm), d, styles(comparison)[arm], scale=100)
        ax.locator_params(axis="x", nbins=6)
        ax.set(xlabel=f"points above {comparison.baseline}")
    return svg(figure, "forest", "paired differences to the baseline")


@style()
def dots(comparison: Comparison) -> str:
    """Draw the test accuracy of every run as a small dot, with one line for each arm (variant). Return the figure as SVG text.
    A marker shows the mean, and a bar shows its 95% t interval.
    """
    rows = {n: [r for r in comparison.at(n) if r.values] for n in comparison.labels}
    arms = [arm for arm in comparison.arms if any(r.arm == arm for cells in rows.values() for r in cells)]
    figure, panels = subplots([n for n in rows if rows[n]], arms)
    for n, ax in panels.items():
        for r in rows[n]:
            draw_arm(ax, arms.index(r.arm), r, styles(comparison)[r.arm])
        stretch_axis(ax, "x", [v for r in rows[n] for v in (*r.values, r.low, r.high)], max_ticks=5)
        ax.set(xlabel="test accuracy, %")
    return svg(figure, "dots", "test accuracy of every run")


@style()
def by_macs(comparison: Comparison) -> str:
    """Plot the mean test accuracy of each arm (variant) against its relative compute: its multiply-adds (MACs) divided by those
    of the baseline. Return the figure as SVG text.

    Bars are 95% t intervals. The text is empty if no arm reduces tokens or if all arms need about equally many MACs.
    """
    rows = {
        n: [r for r in comparison.at(n) if r.role != "reference" and r.values and r.budget["macs"]] for n in comparison.labels
    }

    def unequal(cells: list[Row]) -> bool:
        macs = [r.budget["macs"] or 0 for r in cells if r.role == "technique"]
        return len(macs) < len(cells) and max(macs, default=0) > (1 + TOLERANCE) * min(macs, default=0)

    rows = {n: cells for n, cells in rows.items() if comparison.reduced and unequal(cells)}
    figure, panels = subplots(list(rows), height=3.9)
    looks = styles(comparison)
    for n, ax in panels.items():
        whole = next(r for r in rows[n] if r.role == "baseline")
        ax.axhline(whole.mean, color=INK, linewidth=0.8, linestyle=":")
        share = {r.arm: (r.budget["macs"] or 0) / (whole.budget["macs"] or 1) for r in rows[n]}
        for r in rows[n]:
            equal = [arm for arm in share if abs(share[arm] - share[r.arm]) < 0.01]
            x, look = share[r.arm] + 0.01 * (equal.index(r.arm) - (len(equal) - 1) / 2), looks[r.arm]
            draw_mean(ax, x, r, look)
        stretch_axis(ax, "y", [v for r in rows[n] for v in (r.mean, r.low, r.high)], max_ticks=7)
        ax.set(xlabel=f"MACs, relative to {comparison.baseline}")
    figure.supylabel("test accuracy, %", fontsize="medium")
    return svg(figure, "macs", "test accuracy against MACs")


@style()
def by_labels(comparison: Comparison) -> str:
    """Plot the mean test accuracy of each arm (variant) against the number of labelled images. Return the figure as SVG text.
    The text is empty if there is only one number of labelled images.

    Bars are 95% t intervals.
    """
    lines = {arm: [r for r in comparison.rows if r.arm == arm and r.labels and r.values] for arm in comparison.arms}
    lines = {arm: rows for arm, rows in lines.items() if rows}
    sizes = sorted({r.labels for rows in lines.values() for r in rows if r.labels})
    if len(sizes) < 2:
        return ""
    figure, panels = subplots(["Accuracy against number of labels"], height=5.6, width=11)
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
    ax.set(title="", xscale="log", xlabel="labelled images", ylabel="test accuracy, %")
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
    ax.minorticks_off()
    stretch_axis(ax, "y", [v for rows in lines.values() for r in rows for v in (r.mean, r.low, r.high)], max_ticks=9)
    name_lines(ax, ends, looks)
    return svg(figure, "labels", "test accuracy against number of labels")


@style()
def by_hyperparameter(comparison: Comparison, hyperparameters: Mapping[str, Mapping[str, float]]) -> str:
    """Plot the test accuracy against the value of each hyperparameter. Return the figure as SVG text. The nested dict
    `hyperparameters[name][arm]` holds the value of a hyperparameter in an arm (variant).

    Each arm differs from the baseline in one hyperparameter only. The figure shows a dot for each seed, the mean and its 95% t
    interval.

    All panels of one number of labels share their accuracy axis. Below each value stand the MACs of one image.
    """
    cells = {}
    for n in comparison.labels:
        for name, values in hyperparameters.items():
            rows = sorted((r for r in comparison.at(n) if r.arm in values and r.values), key=lambda r: values[r.arm])
            if len(rows) > 1:
                cells[f"{name}, {format_labels(n)}" if len(comparison.labels) > 1 else name] = n, name, rows
    figure, panels = subplots(list(cells), height=3.4)
    looks = styles(comparison)
    for title, ax in panels.items():
        n, name, rows = cells[title]
        xs = [hyperparameters[name][r.arm] for r in rows]
        log = min(xs) > 0 and max(xs) >= 8 * min(xs)
        ax.set(xscale="log" if log else "linear", xlabel=f"{name}, and MACs per image")
        ax.plot(xs, [r.mean for r in rows], color=FAINT, linewidth=0.8)
        for x, r in zip(xs, rows):
            xs_seeds, look = [shifted(x, xs, 0.035, log)] * len(r.values), looks[r.arm]
            ax.plot(xs_seeds, r.values, "o", color=look["color"], alpha=0.45, markersize=3)
            draw_mean(ax, x, r, look, linewidth=2)
        macs = [r.budget["macs"] for r in rows]
        ax.set_xticks(xs, [f"{x:,g}" + (f"\n{m / 1e6:,.2f} M" if m else "") for x, m in zip(xs, macs)])
        ax.minorticks_off()
        ax.set_xlim(shifted(min(xs), xs, -0.08, log), shifted(max(xs), xs, 0.08, log))
        shown = [r for labels, _, others in cells.values() if labels == n for r in others]
        stretch_axis(ax, "y", [v for r in shown for v in (*r.values, r.low, r.high)], max_ticks=7)
    figure.supylabel("test accuracy, %", fontsize="medium")
    return svg(figure, "hyperparameters", "test accuracy against the one number that arms differ in")


@style()
def learning_curves(comparison: Comparison, records: Sequence[Record]) -> str:
    """Plot the validation accuracy and the training loss of each arm (variant) against the training step. Return the figure as
    SVG text. `records` are the results of the runs.

    Lines are means over the seeds, and bands show one standard deviation above and below the mean.

    A mean is drawn only at steps that all finished seeds of the arm have, so that it is always over the same seeds.
    """
    curves: dict[tuple, list[dict]] = {}
    for r in records:
        for kind, index in (("accuracy", 2), ("loss", 1)):
            values = {point[0]: point[index] for point in r.curve or [] if point[index] is not None}
            if r.finished and values:
                curves.setdefault((r.labels, kind, r.arm), []).append(values)
    names = {
        n if kind == "accuracy" else (kind, n): (n, kind)
        for kind in ("accuracy", "loss")
        for n in comparison.labels
        if any(cell[:2] == (n, kind) for cell in curves)
    }
    figure, panels = subplots(list(names), height=3.6, columns=min(3, len({n for n, _ in names.values()})))
    for name, ax in panels.items():
        n, kind = names[name]
        shown, disjoint = [], []
        for arm, look in styles(comparison).items():
            seeds = curves.get((n, kind, arm), [])
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
            stretch_axis(ax, "y", shown, max_ticks=7)
        else:
            ax.set(title="", yscale="log" if min(shown, default=0) > 0 else "linear")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("")
        remark = f" (seeds share no step: {', '.join(disjoint)})" if disjoint else ""
        ax.set(xlabel="training step" + epoch_length(records, n) + remark)
        ax.set_ylabel("validation accuracy, %" if kind == "accuracy" else "training loss")
    return svg(figure, "curves", "validation accuracy and training loss against training step")


def epoch_length(records: Sequence[Record], labels: int | None) -> str:
    """Return a text for an axis label that says how many training steps an epoch has: `(an epoch is 15.6)`. `records` are the
    results of the runs, and `labels` is their number of labelled images.

    The text is empty if the batch sizes of the runs differ or if the number of training images is unknown.
    """
    runs = [r.run for r in records if r.labels == labels and r.curve]
    batches = {None if run.get("unlabelled") else run.get("batch") for run in runs}
    batch = batches.pop() if len(batches) == 1 else None
    return "" if labels is None or batch is None else f" (an epoch is {labels / batch:.3g})"


@style()
def tokens(picture: dict) -> str:
    """Draw which patches of a few images a token reduction merged or removed in each block. Return the figure as SVG text.
    `picture` is a dict with the data of this figure, which the results of a run contain.
    """
    from smallvit.explain import draw_token_map

    return svg(draw_token_map(picture), "tokens", "which patches share a token, and which were removed")


def styles(comparison: Comparison) -> dict[str, dict]:
    """Return the look of each arm (variant) as a dict from its name to a dict. Its keys are `color` and `marker` (for
    matplotlib), `css` (the color as a CSS variable) and `glyph` (the marker as a character).

    The baseline has the color of the text, and references are gray.

    Nine markers and eight hues distinguish 72 techniques.
    """
    counts, looks = {"baseline": 0, "technique": 0, "reference": 0}, {}
    for arm, role in comparison.arms.items():
        count = counts[role]
        counts[role] += 1
        color = {"baseline": INK, "reference": FAINT, "technique": ARM.format(count % len(LIGHT))}[role]
        marker = "o" if role == "baseline" else list(GLYPHS)[(count + 1) % len(GLYPHS)]
        looks[arm] = {"color": color, "css": css(color), "marker": marker, "glyph": GLYPHS[marker]}
    return looks


def subplots(names: list, arms: Sequence[str] = (), *, height=0.0, width=0.0, columns: int = 3) -> tuple[Any, dict[Any, Any]]:
    """Create a matplotlib figure with one panel (axes) for each name. Return the figure and a dict from name to panel. The
    vertical axis shows the names in `arms`.

    At most `columns` panels stand side by side. `height` (of one row of panels) and `width` (of the figure) are in inches.
    """
    from matplotlib.figure import Figure

    columns = min(len(names), columns)
    lines = math.ceil(len(names) / max(columns, 1))
    size = (width or (0, 7.5, 11, 11)[columns], lines * (height or 0.9 + 0.34 * len(arms)))
    figure = Figure(figsize=size, layout="constrained")
    panels = {}
    for place, name in enumerate(names):
        ax = panels[name] = figure.add_subplot(lines, columns, place + 1)
        ax.set(title=format_labels(name) if isinstance(name, int | None) else name)
        if arms:
            first = place % columns == 0
            ax.set_yticks(range(len(arms)), arms if first else [""] * len(arms))
            ax.set_ylim(len(arms) - 0.4, -0.6)
    return figure, panels


def draw_arm(ax, y: int, result: Row | Difference, look: dict, scale: int = 1):
    """Draw the results of one arm (variant) into the matplotlib axes `ax` at height `y`: a dot for each seed, the mean and its
    95% interval. `look` is a dict with color and marker. All values are multiplied by `scale`.
    """
    values = [scale * v for v in result.values]
    ax.plot(values, [y + 0.2] * len(values), "o", color=look["color"], alpha=0.45, markersize=3.5)
    if result.low is not None and result.high is not None:
        ax.plot([scale * result.low, scale * result.high], [y - 0.08] * 2, color=look["color"], linewidth=2)
    ax.plot([scale * (result.mean or 0.0)], [y - 0.08], look["marker"], color=look["color"])


def draw_mean(ax, x: float, row: Row, look: dict, **options):
    """Draw the mean accuracy of one arm (variant) into the matplotlib axes `ax` at the position `x`, with its 95% interval as a
    vertical bar. `row` holds the results of the arm, and `look` is a dict with color and marker.
    """
    ax.plot([x, x], [row.mean, row.mean] if row.low is None else [row.low, row.high], color=look["color"], **options)
    ax.plot([x], [row.mean], look["marker"], color=look["color"])


def stretch_axis(ax, axis: str, values: Sequence[float | None], max_ticks: int):
    """Scale the accuracy axis of a plot by the logarithm of the error, so that accuracies near 100% are further apart. `axis`
    is "x" or "y", `values` are the accuracies, and about `max_ticks` ticks are drawn at most.
    """
    import numpy as np

    def forward(a):
        return -np.log10(np.maximum(1.003 - np.asarray(a, float), 1e-4))  # finite at 100%, which small test sets reach

    known = [v for v in values if v is not None] or [0.0, 1.0]
    low, high = forward(min(known)), forward(min(1.0, max(known)))
    low, high = (low - 0.06 * (high - low) - 0.005), (high + 0.06 * (high - low) + 0.005)
    bottom, top = float(1.003 - 10**-low), float(1.003 - 10**-high)
    ticks = round_ticks(bottom, min(top, 1.0), lambda a, b: bool(abs(forward(a) - forward(b)) > (high - low) / max_ticks))
    getattr(ax, f"set_{axis}scale")("function", functions=(forward, lambda t: 1.003 - 10.0 ** -np.asarray(t, float)))
    getattr(ax, f"set_{axis}ticks")(ticks, [f"{100 * t:.4g}" for t in ticks])
    getattr(ax, f"set_{axis}lim")(bottom, top)


def round_ticks(bottom: float, top: float, far_apart: Callable[[float, float], bool]) -> list[float]:
    """Return round numbers from `bottom` to `top` as the ticks of an accuracy axis. The function `far_apart(a, b)` returns
    whether two ticks are far enough apart to be readable.

    Fine ticks are chosen only near 100%, where the axis is stretched. If this gives fewer than three ticks, fine ticks are
    allowed everywhere.
    """
    kept: list[float] = []
    for reach in (10, math.inf):
        for unit in (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005):
            for k in range(math.floor(top / unit + 1e-9), math.ceil(bottom / unit) - 1, -1):
                if 1 - k * unit <= reach * unit + 1e-9 and all(far_apart(k * unit, t) for t in kept):
                    kept.append(k * unit)
        if len(kept) >= 3:
            break
    return kept


def name_lines(ax, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, dict]):
    """Write the name of each arm (variant) beside the right end of its line in a plot, without overlap. `ends` is a dict from
    arm to the last point (x, y) of its line, and `looks` is a dict from arm to color and marker.
    """
    gap = 0.042  # between two names, as a fraction of the axis
    place = ax.transScale + ax.transLimits
    heights = {arm: float(place.transform(end)[1]) for arm, end in ends.items()}
    order, text_heights = sorted(heights, key=heights.__getitem__), {}
    for rank, arm in enumerate(order):
        highest = 1.0 - gap * (len(order) - 1 - rank)
        text_heights[arm] = min(highest, max(heights[arm], text_heights[order[rank - 1]] + gap if rank else 0.0))
    for arm, (x, _) in ends.items():
        start = float(place.transform((x, 0.5))[0]) + 0.008, heights[arm]
        line = {"arrowstyle": "-", "color": looks[arm]["color"], "linewidth": 0.8, "relpos": (0, 0.5), "shrinkB": 0}
        ax.annotate(arm, xy=start, xytext=(1.06, text_heights[arm]), xycoords="axes fraction", va="center", arrowprops=line)


def shifted(x: float, values: Sequence[float], fraction: float, log: bool) -> float:
    """Return the position `x`, moved to the right by a fraction of the axis length. The axis reaches from the smallest to the
    largest of `values`. `log` says whether the axis is logarithmic.
    """
    return x * (max(values) / min(values)) ** fraction if log else x + (max(values) - min(values)) * fraction


def css(color: str) -> str:
    """Return the name of the CSS variable that replaces a matplotlib color in an SVG text, such as `var(--ink)` for the color
    of text.
    """
    return {INK: "var(--ink)", FAINT: "var(--faint)"}.get(color) or f"var(--arm-{int(color[-2:], 16)})"


def svg(figure, name: str, label: str) -> str:
    """Return a matplotlib figure as SVG text. `name` makes the ids inside the SVG unique, and `label` describes the figure for
    screen readers.

    The colors are CSS variables. Equal figures give equal texts. A figure without panels gives an empty text.
    """
    import matplotlib

    if not figure.axes:
        return ""
    page = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(page, format="svg", metadata={"Date": None})
    text = page.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    text = re.sub(f"(?<=: )({INK}|{FAINT}|#0c0c[0-9a-f]{{2}})", lambda match: css(match[0]), text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
