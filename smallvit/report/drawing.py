"""Parts of the figures of a report: the look of each arm, panels, accuracy axes and the conversion to SVG.

Colors are CSS variables (`--arm-0` ..., `--ink`, `--faint`), so a figure follows a light or dark page, and text uses the page's
font. Accuracy axes are stretched towards 100%: halving the error is a step of about the same length everywhere.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from statistics import median_low
from typing import Any

from smallvit.verdicts.comparison import Comparison, Condition, Difference, Row
from smallvit.verdicts.score import Score

# Eight hues that can be distinguished from each other and from the ink with any kind of color blindness.
LIGHT = ("#006aff", "#f65914", "#0aa696", "#da01b9", "#977543", "#025084", "#8f424f", "#2e0099")
DARK = ("#5891ff", "#ff937f", "#38706c", "#b41eab", "#f0cb59", "#12d7ff", "#fc0017", "#6845ef")
GLYPHS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼", "P": "✚", "X": "✖", "*": "★", "p": "⬟"}
LONGEST = 60  # characters of a name in a figure; longer names leave no room for the panels
# replaced by the CSS variables when the SVG is written
INK, FAINT, PAGE, GOOD, BAD, ARM = "#0a0a0a", "#0b0b0b", "#0d0d0d", "#0e0e0e", "#0f0f0f", "#0c0c{:02x}"
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
    """Create a matplotlib figure with one panel (axes) for each of `names`. Return the figure and a dict from name to panel. A
    name is a text or a `Condition`, and it becomes the title. `arms` are names of variants, which label the vertical axis of
    each panel; without them it is a normal axis.

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
        ax.set(title=name.title if isinstance(name, Condition) else name)
        if arms:
            first = place % columns == 0
            ax.set_yticks(range(len(arms)), map(shortened, arms) if first else [""] * len(arms))
            ax.set_ylim(len(arms) - 0.4, -0.6)
    return figure, panels


def shortened(name: str) -> str:
    """Return the name of an arm (variant) as text for a figure. Only the beginning and the end of a long line are kept: `a very
    … name`.
    """
    lines = (line if len(line) <= LONGEST else f"{line[:39]}…{line[-20:]}" for line in name.split("\n"))
    return "\n".join(lines)


def draw_arm(ax, y: int, result: Row | Difference, look: dict, scale: int = 1):
    """Draw the results of one arm (variant) into the matplotlib axes `ax` at height `y`: a dot for each seed, the mean and its
    95% interval. `look` is a dict with color and marker, and it may have a `markerfacecolor`. All values are multiplied by
    `scale`.
    """
    values = [scale * v for v in result.values]
    ax.plot(values, [y + 0.2] * len(values), "o", color=look["color"], alpha=0.45, markersize=3.5)
    if result.low is not None and result.high is not None:
        ax.plot([scale * result.low, scale * result.high], [y - 0.08] * 2, color=look["color"], linewidth=2)
    fill = look.get("markerfacecolor", look["color"])
    ax.plot([scale * (result.mean or 0.0)], [y - 0.08], look["marker"], color=look["color"], markerfacecolor=fill)


def draw_mean(ax, x: float, result: Row | Difference, look: dict, *, scale: int = 1, hollow: bool = False, **options):
    """Draw the mean of the results of one arm (variant) into the matplotlib axes `ax` at the position `x`, with its 95%
    interval as a vertical bar. `result` holds the mean and the interval, and `look` is a dict with color and marker. The option
    `scale` multiplies all values, for example by 100.

    `hollow=True` fills the marker with the color of the page.
    """
    ends = (result.mean, result.mean) if result.low is None or result.high is None else (result.low, result.high)
    ax.plot([x, x], [scale * (end or 0.0) for end in ends], color=look["color"], **options)
    fill = {"markerfacecolor": PAGE} if hollow else {}
    ax.plot([x], [scale * (result.mean or 0.0)], look["marker"], color=look["color"], **fill)


def set_score_axis(ax, axis: str, values: Sequence[float | None], max_ticks: int, score: Score):
    """Set the limits and the ticks of an axis of the matplotlib axes `ax` that shows scores, such as accuracies. `axis` is "x"
    or "y", `values` are the scores that must be visible, and `max_ticks` is the largest number of ticks, approximately. `score`
    says in which unit they are written and whether a lower one is better.

    Axes of scores whose best value is 100% are stretched towards it, see `stretch_axis`. Others are linear.
    """
    if score.percent and not score.lower:
        return stretch_axis(ax, axis, values, max_ticks)
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    known = [v for v in values if v is not None] or [0.0, 1.0]
    margin = 0.06 * (max(known) - min(known)) or 0.01
    getattr(ax, f"set_{axis}lim")(max(0.0, min(known) - margin), max(known) + margin)
    place = getattr(ax, f"{axis}axis")
    place.set_major_locator(MaxNLocator(max_ticks))
    place.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x if score.percent else x:.4g}"))


def stretch_axis(ax, axis: str, values: Sequence[float | None], max_ticks: int):
    """Scale the accuracy axis of the matplotlib axes `ax` so that accuracies near 100% are further apart: equal distances mean
    about equal ratios of the error (1 - accuracy). `axis` is "x" or "y", `values` are the accuracies that must be visible, and
    `max_ticks` is the largest number of ticks, approximately.
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


def set_log_ticks(ax, low: float, high: float):
    """Put ticks at 1, 2 and 5 times powers of ten on the logarithmic x axis of a plot, between `low` and `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    ticks = [k * 10.0**power for power in powers for k in (1, 2, 5)]
    inside = [tick for tick in ticks if 0.999 * low <= tick <= 1.001 * high]
    ax.set_xticks(inside, [f"{tick:g}" for tick in inside])
    ax.minorticks_off()


def set_difference_axis(ax, axis: str, differences: Sequence[Difference], max_ticks: int, score: Score) -> str:
    """Make an axis of a plot of differences logarithmic beyond a small one, if the largest would hide a typical one. Return a
    note for the label of the axis, which is empty if the axis stays linear. `ax` is the matplotlib axes, in which everything is
    drawn, `axis` is "x" or "y", and `max_ticks` is the largest number of ticks, approximately. `score` says in which unit the
    differences are drawn: those of an accuracy are in percentage points.

    The size of a difference is the largest absolute value in its interval. The axis is logarithmic if the largest size is more
    than five times the median and more than twice the linear part. This ends at 2 points, or, for a score that is not in
    percent, at the power of ten that is nearest to the median.
    """
    scale = 100 if score.percent else 1
    sizes = [scale * max(abs(x) for x in (d.mean, d.low, d.high) if x is not None) for d in differences]
    sizes = [size for size in sizes if 0 < size < math.inf]
    typical = median_low(sizes or [1.0])
    linear = 2.0 if score.percent else 10.0 ** round(math.log10(typical))
    if max(sizes, default=0.0) <= max(5 * typical, 2 * linear):
        return ""
    getattr(ax, f"set_{axis}scale")("symlog", linthresh=linear, linscale=1)
    low, high = getattr(ax, f"get_{axis}lim")()
    place = getattr(ax, f"{axis}axis").get_transform().transform
    apart, kept = (place(high) - place(low)) / max_ticks, [0.0]
    powers = range(math.floor(math.log10(linear)) - 1, math.ceil(math.log10(max(-low, high))))
    for first in (linear, *(10.0**power for power in powers), *(k * 10.0**power for power in powers for k in (2, 5))):
        for tick in (-first, first):
            if first >= linear / 2 and low <= tick <= high and all(abs(place(tick) - place(t)) > apart for t in kept):
                kept.append(tick)
    getattr(ax, f"set_{axis}ticks")(sorted(kept), [f"{x:+g}".replace("-", "−") if x else "0" for x in sorted(kept)])
    return f"\nlogarithmic beyond ±{linear:g}"


def name_lines(ax, ends: Mapping[str, tuple[float, float]], looks: Mapping[str, dict], words: Mapping[str, str] | None = None):
    """Write the name of each arm (variant) beside the right end of its line in the plot `ax`, without overlap. `ends` is a dict
    from an arm to the last point (x, y) of its line, `looks` is one to its color and marker, and `words` is one to a text that
    is written after its name.
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
        text = ": ".join(filter(None, (shortened(arm), (words or {}).get(arm))))
        ax.annotate(text, xy=start, xytext=(1.06, text_heights[arm]), xycoords="axes fraction", va="center", arrowprops=line)


def shifted(x: float, values: Sequence[float], fraction: float, log: bool) -> float:
    """Return the position `x`, moved to the right by a fraction of the axis length. The axis reaches from the smallest to the
    largest of `values`. `log` says whether the axis is logarithmic.
    """
    return x * (max(values) / min(values)) ** fraction if log else x + (max(values) - min(values)) * fraction


def css(color: str) -> str:
    """Return the name of the CSS variable that replaces a matplotlib color in an SVG text, such as `var(--ink)` for the color
    of text.
    """
    names = {INK: "ink", FAINT: "faint", PAGE: "page", GOOD: "good", BAD: "bad"}
    return f"var(--{names.get(color) or f'arm-{int(color[-2:], 16)}'})"


def svg(figure, name: str, label: str) -> str:
    """Return a matplotlib figure as SVG text. `name` makes the ids inside the SVG unique, and `label` describes the figure for
    screen readers.

    The colors are CSS variables. Equal figures give equal texts. A figure without panels gives an empty text. Characters that
    the font of matplotlib lacks are no problem, because the page has a font of its own.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    if not figure.axes:
        return ""
    page, canvas = io.StringIO(), FigureCanvasSVG(figure)
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        figure.dpi = 72  # the unit of SVG
        if layout := figure.get_layout_engine():
            layout.execute(figure)  # `figure.savefig` would draw everything once more to find the layout
            figure.set_layout_engine("none")
        canvas.print_svg(page, metadata={"Date": None})
    text = page.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)
    text = re.sub(f"(?<=: )({INK}|{FAINT}|{PAGE}|{GOOD}|{BAD}|#0c0c[0-9a-f]{{2}})", lambda match: css(match[0]), text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}" ', 1)
