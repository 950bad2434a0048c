"""Pictures of a comparison with one baseline, each one inline SVG; an arm keeps its colour and marker in all of them.

Colours are written as CSS variables (`--arm-0` ..., `--ink`, `--faint`), so one picture serves a light and a dark page, and
text stays text in the page's font. Accuracy axes are stretched towards 100%: halving the error is a step of about one length.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from statistics import fmean, stdev

from smallvit.record import amount

from .budgets import TOLERANCE
from .verdicts import Comparison, Row

# Eight hues that stay apart, from each other and from the ink, in all three kinds of colour blindness.
LIGHT = ("#006aff", "#f65914", "#0aa696", "#da01b9", "#977543", "#025084", "#8f424f", "#2e0099")
DARK = ("#5891ff", "#ff937f", "#38706c", "#b41eab", "#f0cb59", "#12d7ff", "#fc0017", "#6845ef")
GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★", "p": "⬟"}
INK, FAINT, ARM = "#0a0a0a", "#0b0b0b", "#0c0c{:02x}"  # stand for the CSS variables until the SVG is written
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.axisbelow": True, "grid.linewidth": 0.5, "grid.color": FAINT, "grid.alpha": 0.35, "axes.facecolor": "none",
    "figure.facecolor": "none", "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "lines.markersize": 6, "lines.linewidth": 1.5,
}  # fmt: skip


def styles(comparison: Comparison) -> dict[str, dict]:
    """Arm -> its `colour` (for matplotlib), `css`, `marker` and `glyph`: the baseline in ink, floors faint, techniques in hues.

    Nine markers over eight hues keep 72 techniques apart.
    """
    turns, out = {"baseline": 0, "technique": 0, "floor": 0}, {}
    for arm, role in comparison.arms.items():
        turn = turns[role]
        turns[role] += 1
        colour = {"baseline": INK, "floor": FAINT, "technique": ARM.format(turn % len(LIGHT))}[role]
        marker = "o" if role == "baseline" else list(GLYPHS)[(turn + 1) % len(GLYPHS)]
        out[arm] = {"colour": colour, "css": _css(colour), "marker": marker, "glyph": GLYPHS[marker]}
    return out


@contextmanager
def _style():
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


@_style()
def forest(comparison: Comparison) -> str:
    """Paired differences to the baseline in points: each seed a dot, the mean a marker, the 95% t interval a bar."""
    arms = [arm for arm, role in comparison.arms.items() if role == "technique"]
    rows = {n: [r for r in comparison.at(n) if r.arm in arms and r.difference] for n in comparison.labels}
    figure, panels = _panels([n for n in rows if rows[n]], arms)
    for n, ax in panels.items():
        ax.axvline(0, color=INK, linewidth=1)
        for r in rows[n]:
            d = r.difference
            _strip(ax, arms.index(r.arm), d.values, d.mean, d.low, d.high, styles(comparison)[r.arm], scale=100)
        ax.locator_params(axis="x", nbins=6)
        ax.set(xlabel=f"points above {comparison.baseline}")
    return _svg(figure, "forest", "paired differences to the baseline")


@_style()
def dots(comparison: Comparison) -> str:
    """Test accuracy of every single run, arm by arm, with the mean and its 95% t interval."""
    rows = {n: [r for r in comparison.at(n) if r.values] for n in comparison.labels}
    arms = [arm for arm in comparison.arms if any(r.arm == arm for of in rows.values() for r in of)]
    figure, panels = _panels([n for n in rows if rows[n]], arms)
    for n, ax in panels.items():
        for r in rows[n]:
            _strip(ax, arms.index(r.arm), r.values, r.mean, r.low, r.high, styles(comparison)[r.arm])
        _stretch(ax, "x", [v for r in rows[n] for v in (*r.values, r.low, r.high)], most=5)
        ax.set(xlabel="test accuracy, %")
    return _svg(figure, "dots", "test accuracy of every run")


@_style()
def by_macs(comparison: Comparison) -> str:
    """Mean test accuracy against MACs relative to the baseline's, with 95% t intervals; nothing for equal MACs."""

    def told_apart(rows: list[Row]) -> bool:
        spent = [r.budget["macs"] for r in rows if r.role == "technique"]
        return len(spent) < len(rows) and max(spent, default=0) > (1 + TOLERANCE) * min(spent, default=0)

    known = {n: [r for r in comparison.at(n) if r.role != "floor" and r.values and r.budget["macs"]] for n in comparison.labels}
    rows = {n: of for n, of in known.items() if comparison.reduced and told_apart(of)}
    figure, panels = _panels(list(rows), height=3.9)
    looks = styles(comparison)
    for n, ax in panels.items():
        whole = next(r for r in rows[n] if r.role == "baseline")
        ax.axhline(whole.mean, color=INK, linewidth=0.8, linestyle=":")
        share = {r.arm: r.budget["macs"] / whole.budget["macs"] for r in rows[n]}
        for r in rows[n]:
            equal = [arm for arm in share if abs(share[arm] - share[r.arm]) < 0.01]
            x, look = share[r.arm] + 0.01 * (equal.index(r.arm) - (len(equal) - 1) / 2), looks[r.arm]
            ax.plot([x, x], [r.mean, r.mean] if r.low is None else [r.low, r.high], color=look["colour"])
            ax.plot([x], [r.mean], look["marker"], color=look["colour"])
        _stretch(ax, "y", [v for r in rows[n] for v in (r.mean, r.low, r.high)], most=7)
        ax.set(xlabel=f"MACs, relative to {comparison.baseline}")
    figure.supylabel("test accuracy, %", fontsize="medium")
    return _svg(figure, "macs", "test accuracy against MACs")


@_style()
def by_labels(comparison: Comparison) -> str:
    """Mean test accuracy against the number of labels, with 95% t intervals; nothing where there is only one number."""
    lines = {arm: [r for r in comparison.rows if r.arm == arm and r.labels and r.values] for arm in comparison.arms}
    sizes = sorted({r.labels for of in lines.values() for r in of})
    if len(sizes) < 2:
        return ""
    figure, panels = _panels(["Accuracy against number of labels"], height=5.6, width=11)
    ax = panels.popitem()[1]
    ends, looks = {}, styles(comparison)
    apart = (sizes[-1] / sizes[0]) ** 0.007  # neighbours stand side by side, so that no interval hides another
    for place, (arm, of) in enumerate((arm, of) for arm, of in lines.items() if of):
        x = [r.labels * apart ** (place - len(lines) / 2) for r in of]
        dashes = ":" if comparison.arms[arm] == "floor" else "-"
        ax.plot(x, [r.mean for r in of], dashes, marker=looks[arm]["marker"], color=looks[arm]["colour"])
        for at, r in zip(x, of):
            ax.plot([at, at], [r.mean, r.mean] if r.low is None else [r.low, r.high], color=looks[arm]["colour"])
        ends[arm] = x[-1], of[-1].mean
    ax.set(title="", xscale="log", xlabel="labelled images", ylabel="test accuracy, %")
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
    ax.minorticks_off()
    _stretch(ax, "y", [v for of in lines.values() for r in of for v in (r.mean, r.low, r.high)], most=9)
    _name(ax, ends, looks)
    return _svg(figure, "labels", "test accuracy against number of labels")


@_style()
def by_knob(comparison: Comparison, knobs: dict[str, dict[str, float]]) -> str:
    """Test accuracy against each number that alone tells arms from the baseline: seeds as dots, the mean, its 95% t interval.

    `knobs` is name -> arm -> value. All panels of one number of labels have one axis, so that knobs can be held against each
    other. Under each value stand the MACs of an image.
    """
    cells = {}
    for n in comparison.labels:
        for knob, values in knobs.items():
            rows = sorted((r for r in comparison.at(n) if r.arm in values and r.values), key=lambda r: values[r.arm])
            if len(rows) > 1:
                cells[f"{knob}, {amount(n)}" if len(comparison.labels) > 1 else knob] = n, knob, rows
    figure, panels = _panels(list(cells), height=3.4)
    looks = styles(comparison)
    for title, ax in panels.items():
        n, knob, rows = cells[title]
        at = [knobs[knob][r.arm] for r in rows]
        stretched = min(at) > 0 and max(at) >= 8 * min(at)
        ax.set(xscale="log" if stretched else "linear", xlabel=f"{knob}, and MACs per image")
        ax.plot(at, [r.mean for r in rows], color=FAINT, linewidth=0.8)
        for x, r in zip(at, rows):
            look, beside = looks[r.arm], _beside(x, at, 0.035, stretched)
            ax.plot([beside] * len(r.values), r.values, "o", color=look["colour"], alpha=0.45, markersize=3)
            ax.plot([x, x], [r.mean, r.mean] if r.low is None else [r.low, r.high], color=look["colour"], linewidth=2)
            ax.plot([x], [r.mean], look["marker"], color=look["colour"])
        macs = [r.budget["macs"] for r in rows]
        ax.set_xticks(at, [f"{x:,g}" + (f"\n{m / 1e6:,.2f} M" if m else "") for x, m in zip(at, macs)])
        ax.minorticks_off()
        ax.set_xlim(_beside(min(at), at, -0.08, stretched), _beside(max(at), at, 0.08, stretched))
        shown = [r for m, _, of in cells.values() if m == n for r in of]
        _stretch(ax, "y", [v for r in shown for v in (*r.values, r.low, r.high)], most=7)
    figure.supylabel("test accuracy, %", fontsize="medium")
    return _svg(figure, "knobs", "test accuracy against the one number that arms differ in")


@_style()
def learning_curves(comparison: Comparison, records: Sequence[dict]) -> str:
    """Validation accuracy and training loss against training step: means over seeds, bands of one SD over seeds to either side.

    Means are drawn at the steps at which all finished seeds of the cell were looked at, so that no mean changes company.
    """
    cells: dict[tuple, list[dict]] = {}
    for r in records:
        for kind, at in (("accuracy", 2), ("loss", 1)):
            points = {point[0]: point[at] for point in r.get("curve") or [] if point[at] is not None}
            if r["status"] == "finished" and points:
                cells.setdefault((r["labels"], kind, r["arm"]), []).append(points)
    names = {
        n if kind == "accuracy" else (kind, n): (n, kind)
        for kind in ("accuracy", "loss")
        for n in comparison.labels
        if any(cell[:2] == (n, kind) for cell in cells)
    }
    wide = min(3, len({n for n, _ in names.values()}))
    figure, panels = _panels(list(names), height=3.6, columns=wide)
    for name, ax in panels.items():
        n, kind = names[name]
        shown, lost = [], []
        for arm, look in styles(comparison).items():
            seeds = cells.get((n, kind, arm), [])
            steps = sorted(set.intersection(*map(set, seeds))) if seeds else []
            lost += [arm] if seeds and not steps else []
            means = [fmean(of[s] for of in seeds) for s in steps]
            sds = [stdev(of[s] for of in seeds) if len(seeds) > 1 else 0 for s in steps]
            bottom, top = [m - sd for m, sd in zip(means, sds)], [m + sd for m, sd in zip(means, sds)]
            if kind == "loss":  # a band that would reach 0 has no place on a logarithmic axis
                bottom = [max(low, m / 10) if m > 0 else low for low, m in zip(bottom, means)]
            ax.fill_between(steps, bottom, top, color=look["colour"], alpha=0.13, linewidth=0)
            ax.plot(steps, means, marker=look["marker"], markevery=[-1] if steps else [], color=look["colour"])
            shown += bottom + top
        if kind == "accuracy":
            _stretch(ax, "y", shown, most=7)
        else:
            ax.set(title="", yscale="log" if min(shown, default=0) > 0 else "linear")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("")
        ax.set(xlabel="training step" + _epoch(records, n) + f" (seeds share no step: {', '.join(lost)})" * bool(lost))
        ax.set_ylabel("validation accuracy, %" if kind == "accuracy" else "training loss")
    return _svg(figure, "curves", "validation accuracy and training loss against training step")


def _epoch(records: Sequence[dict], labels: int | None) -> str:
    """How many steps make an epoch, where all runs agree on it and the records say."""
    runs = [r["run"] for r in records if r["labels"] == labels and r.get("curve") and r.get("run")]
    batches = {None if run.get("unlabelled") else run.get("batch") for run in runs}
    if labels is None or len(batches) != 1 or None in batches:
        return ""
    return f" (an epoch is {labels / batches.pop():.3g})"


@_style()
def tokens(picture: dict) -> str:
    """What a record's model left of the patches of a few images, block by block (see `explain.draw`)."""
    from smallvit.explain import draw

    return _svg(draw(picture), "tokens", "which patches share a token, and which are gone")


def _panels(names: list, arms: Sequence[str] = (), *, height: float = 0, width: float = 0, columns: int = 3) -> tuple:
    """A figure and its panels by name, `columns` to a row, with the arms down the side if they are given; sizes in inches."""
    from matplotlib.figure import Figure

    columns = min(len(names), columns)
    lines = math.ceil(len(names) / max(columns, 1))
    size = (width or (0, 7.5, 11, 11)[columns], lines * (height or 0.9 + 0.34 * len(arms)))
    figure = Figure(figsize=size, layout="constrained")
    panels = {}
    for place, name in enumerate(names):
        ax = panels[name] = figure.add_subplot(lines, columns, place + 1)
        ax.set(title=amount(name) if isinstance(name, int | None) else name)
        if arms:
            first = place % columns == 0
            ax.set_yticks(range(len(arms)), arms if first else [""] * len(arms))
            ax.set_ylim(len(arms) - 0.4, -0.6)
    return figure, panels


def _strip(ax, y: int, values: Sequence[float], mean: float, low: float | None, high: float | None, look, scale=1) -> None:
    """One arm's line: its seeds as small dots below, the interval and the mean above them."""
    ax.plot([scale * v for v in values], [y + 0.2] * len(values), "o", color=look["colour"], alpha=0.45, markersize=3.5)
    if low is not None:
        ax.plot([scale * low, scale * high], [y - 0.08] * 2, color=look["colour"], linewidth=2)
    ax.plot([scale * mean], [y - 0.08], look["marker"], color=look["colour"])


def _stretch(ax, axis: str, values: list[float | None], most: int) -> None:
    """An axis of accuracies that grows towards 100%, with at most about `most` round ticks."""
    import numpy as np

    def forward(a):
        return -np.log10(np.maximum(1.003 - np.asarray(a, float), 1e-4))  # finite at 100%, which small test sets do reach

    values = [v for v in values if v is not None] or [0.0, 1.0]
    low, high = forward(min(values)), forward(min(1.0, max(values)))
    low, high = (low - 0.06 * (high - low) - 0.005), (high + 0.06 * (high - low) + 0.005)
    bottom, top = float(1.003 - 10**-low), float(1.003 - 10**-high)
    ticks = _ticks(bottom, min(top, 1.0), lambda a, b: abs(forward(a) - forward(b)) > (high - low) / most)
    getattr(ax, f"set_{axis}scale")("function", functions=(forward, lambda t: 1.003 - 10.0 ** -np.asarray(t, float)))
    getattr(ax, f"set_{axis}ticks")(ticks, [f"{100 * t:.4g}" for t in ticks])
    getattr(ax, f"set_{axis}lim")(bottom, top)


def _ticks(bottom: float, top: float, apart: Callable[[float, float], bool]) -> list[float]:
    """Values to label, roundest first: finer ones only near 100%, unless a narrow range would be left with fewer than three."""
    kept: list[float] = []
    for reach in (10, math.inf):
        for unit in (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001, 0.0005):
            for k in range(math.floor(top / unit + 1e-9), math.ceil(bottom / unit) - 1, -1):
                if 1 - k * unit <= reach * unit + 1e-9 and all(apart(k * unit, t) for t in kept):
                    kept.append(k * unit)
        if len(kept) >= 3:
            break
    return kept


def _name(ax, ends: dict[str, tuple[float, float]], looks: dict[str, dict]) -> None:
    """Each line's name at its right end, moved apart where names would touch; heights are fractions of the axis."""
    gap = 0.042
    place = ax.transScale + ax.transLimits
    heights = {arm: float(place.transform(end)[1]) for arm, end in ends.items()}
    order, at = sorted(heights, key=heights.__getitem__), {}
    for rank, arm in enumerate(order):
        room = 1.0 - gap * (len(order) - 1 - rank)
        at[arm] = min(room, max(heights[arm], at[order[rank - 1]] + gap if rank else 0.0))
    for arm, (x, _) in ends.items():
        start = float(place.transform((x, 0.5))[0]) + 0.008, heights[arm]
        line = {"arrowstyle": "-", "color": looks[arm]["colour"], "linewidth": 0.8, "relpos": (0, 0.5), "shrinkB": 0}
        ax.annotate(arm, xy=start, xytext=(1.06, at[arm]), xycoords="axes fraction", va="center", arrowprops=line)


def _beside(x: float, of: Sequence[float], by: float, stretched: bool) -> float:
    """`x`, moved by that fraction of an axis on which all these lie."""
    return x * (max(of) / min(of)) ** by if stretched else x + (max(of) - min(of)) * by


def _css(colour: str) -> str:
    known = {INK: "var(--ink)", FAINT: "var(--faint)"}
    return known.get(colour) or f"var(--arm-{int(colour[-2:], 16)})"


def _svg(figure, name: str, label: str) -> str:
    """The figure as an SVG element for a page: no metadata, no ids of its own but those it refers to, CSS colours."""
    import matplotlib

    if not figure.axes:
        return ""
    page = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):  # the same records give the same bytes
        figure.savefig(page, format="svg", metadata={"Date": None})
    text = page.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    text = re.sub(f"(?<=: )({INK}|{FAINT}|#0c0c[0-9a-f]{{2}})", lambda match: _css(match[0]), text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
