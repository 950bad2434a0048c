"""What the figures are drawn with: colours and markers, panels, axes that grow towards 100%, and SVG for a page.

Colours are written as CSS variables (`--arm-0` ..., `--ink`, `--faint`), so one picture serves a light and a dark page, and
text stays text in the page's font. Accuracy axes are stretched towards 100%: halving the error is a step of about one length.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager

from smallvit.record import format_labels

from .verdicts import Comparison

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
    """Arm -> its `colour` (for matplotlib), `css`, `marker` and `glyph`: the baseline in ink, references faint, techniques in hues.

    Nine markers over eight hues keep 72 techniques apart.
    """
    turns, out = {"baseline": 0, "technique": 0, "reference": 0}, {}
    for arm, role in comparison.arms.items():
        turn = turns[role]
        turns[role] += 1
        colour = {"baseline": INK, "reference": FAINT, "technique": ARM.format(turn % len(LIGHT))}[role]
        marker = "o" if role == "baseline" else list(GLYPHS)[(turn + 1) % len(GLYPHS)]
        out[arm] = {"colour": colour, "css": css(colour), "marker": marker, "glyph": GLYPHS[marker]}
    return out


@contextmanager
def style():
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def subplots(names: list, arms: Sequence[str] = (), *, height: float = 0, width: float = 0, columns: int = 3) -> tuple:
    """A figure and its panels by name, `columns` to a row, with the arms down the side if they are given; sizes in inches."""
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


def strip(ax, y: int, values: Sequence[float], mean: float, low: float | None, high: float | None, look, scale=1) -> None:
    """One arm's line: its seeds as small dots below, the interval and the mean above them."""
    ax.plot([scale * v for v in values], [y + 0.2] * len(values), "o", color=look["colour"], alpha=0.45, markersize=3.5)
    if low is not None:
        ax.plot([scale * low, scale * high], [y - 0.08] * 2, color=look["colour"], linewidth=2)
    ax.plot([scale * mean], [y - 0.08], look["marker"], color=look["colour"])


def stretch(ax, axis: str, values: list[float | None], most: int) -> None:
    """An axis of accuracies that grows towards 100%, with at most about `most` round ticks."""
    import numpy as np

    def forward(a):
        return -np.log10(np.maximum(1.003 - np.asarray(a, float), 1e-4))  # finite at 100%, which small test sets do reach

    values = [v for v in values if v is not None] or [0.0, 1.0]
    low, high = forward(min(values)), forward(min(1.0, max(values)))
    low, high = (low - 0.06 * (high - low) - 0.005), (high + 0.06 * (high - low) + 0.005)
    bottom, top = float(1.003 - 10**-low), float(1.003 - 10**-high)
    ticks = round_ticks(bottom, min(top, 1.0), lambda a, b: abs(forward(a) - forward(b)) > (high - low) / most)
    getattr(ax, f"set_{axis}scale")("function", functions=(forward, lambda t: 1.003 - 10.0 ** -np.asarray(t, float)))
    getattr(ax, f"set_{axis}ticks")(ticks, [f"{100 * t:.4g}" for t in ticks])
    getattr(ax, f"set_{axis}lim")(bottom, top)


def round_ticks(bottom: float, top: float, apart: Callable[[float, float], bool]) -> list[float]:
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


def name_lines(ax, ends: dict[str, tuple[float, float]], looks: dict[str, dict]) -> None:
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


def beside(x: float, of: Sequence[float], by: float, stretched: bool) -> float:
    """`x`, moved by that fraction of an axis on which all these lie."""
    return x * (max(of) / min(of)) ** by if stretched else x + (max(of) - min(of)) * by


def css(colour: str) -> str:
    known = {INK: "var(--ink)", FAINT: "var(--faint)"}
    return known.get(colour) or f"var(--arm-{int(colour[-2:], 16)})"


def svg(figure, name: str, label: str) -> str:
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
    text = re.sub(f"(?<=: )({INK}|{FAINT}|#0c0c[0-9a-f]{{2}})", lambda match: css(match[0]), text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
