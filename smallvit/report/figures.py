"""Pictures of a comparison with one baseline, each one inline SVG; an arm keeps its colour and marker in all of them."""

from collections.abc import Sequence
from statistics import fmean, stdev

from smallvit.record import format_labels

from .axes import FAINT, INK, beside, name_lines, stretch, strip, style, styles, subplots, svg
from .budgets import TOLERANCE
from .verdicts import Comparison, Row


@style()
def forest(comparison: Comparison) -> str:
    """Paired differences to the baseline in points: each seed a dot, the mean a marker, the 95% t interval a bar."""
    arms = [arm for arm, role in comparison.arms.items() if role == "technique"]
    rows = {n: [r for r in comparison.at(n) if r.arm in arms and r.difference] for n in comparison.labels}
    figure, panels = subplots([n for n in rows if rows[n]], arms)
    for n, ax in panels.items():
        ax.axvline(0, color=INK, linewidth=1)
        for r in rows[n]:
            d = r.difference
            strip(ax, arms.index(r.arm), d.values, d.mean, d.low, d.high, styles(comparison)[r.arm], scale=100)
        ax.locator_params(axis="x", nbins=6)
        ax.set(xlabel=f"points above {comparison.baseline}")
    return svg(figure, "forest", "paired differences to the baseline")


@style()
def dots(comparison: Comparison) -> str:
    """Test accuracy of every single run, arm by arm, with the mean and its 95% t interval."""
    rows = {n: [r for r in comparison.at(n) if r.values] for n in comparison.labels}
    arms = [arm for arm in comparison.arms if any(r.arm == arm for of in rows.values() for r in of)]
    figure, panels = subplots([n for n in rows if rows[n]], arms)
    for n, ax in panels.items():
        for r in rows[n]:
            strip(ax, arms.index(r.arm), r.values, r.mean, r.low, r.high, styles(comparison)[r.arm])
        stretch(ax, "x", [v for r in rows[n] for v in (*r.values, r.low, r.high)], most=5)
        ax.set(xlabel="test accuracy, %")
    return svg(figure, "dots", "test accuracy of every run")


@style()
def by_macs(comparison: Comparison) -> str:
    """Mean test accuracy against MACs relative to the baseline's, with 95% t intervals; nothing for equal MACs."""

    def told_apart(rows: list[Row]) -> bool:
        spent = [r.budget["macs"] for r in rows if r.role == "technique"]
        return len(spent) < len(rows) and max(spent, default=0) > (1 + TOLERANCE) * min(spent, default=0)

    known = {n: [r for r in comparison.at(n) if r.role != "reference" and r.values and r.budget["macs"]] for n in comparison.labels}
    rows = {n: of for n, of in known.items() if comparison.reduced and told_apart(of)}
    figure, panels = subplots(list(rows), height=3.9)
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
        stretch(ax, "y", [v for r in rows[n] for v in (r.mean, r.low, r.high)], most=7)
        ax.set(xlabel=f"MACs, relative to {comparison.baseline}")
    figure.supylabel("test accuracy, %", fontsize="medium")
    return svg(figure, "macs", "test accuracy against MACs")


@style()
def by_labels(comparison: Comparison) -> str:
    """Mean test accuracy against the number of labels, with 95% t intervals; nothing where there is only one number."""
    lines = {arm: [r for r in comparison.rows if r.arm == arm and r.labels and r.values] for arm in comparison.arms}
    sizes = sorted({r.labels for of in lines.values() for r in of})
    if len(sizes) < 2:
        return ""
    figure, panels = subplots(["Accuracy against number of labels"], height=5.6, width=11)
    ax = panels.popitem()[1]
    ends, looks = {}, styles(comparison)
    apart = (sizes[-1] / sizes[0]) ** 0.007  # neighbours stand side by side, so that no interval hides another
    for place, (arm, of) in enumerate((arm, of) for arm, of in lines.items() if of):
        x = [r.labels * apart ** (place - len(lines) / 2) for r in of]
        dashes = ":" if comparison.arms[arm] == "reference" else "-"
        ax.plot(x, [r.mean for r in of], dashes, marker=looks[arm]["marker"], color=looks[arm]["colour"])
        for at, r in zip(x, of):
            ax.plot([at, at], [r.mean, r.mean] if r.low is None else [r.low, r.high], color=looks[arm]["colour"])
        ends[arm] = x[-1], of[-1].mean
    ax.set(title="", xscale="log", xlabel="labelled images", ylabel="test accuracy, %")
    ax.set_xticks(sizes, [f"{n:,}" for n in sizes])
    ax.minorticks_off()
    stretch(ax, "y", [v for of in lines.values() for r in of for v in (r.mean, r.low, r.high)], most=9)
    name_lines(ax, ends, looks)
    return svg(figure, "labels", "test accuracy against number of labels")


@style()
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
                cells[f"{knob}, {format_labels(n)}" if len(comparison.labels) > 1 else knob] = n, knob, rows
    figure, panels = subplots(list(cells), height=3.4)
    looks = styles(comparison)
    for title, ax in panels.items():
        n, knob, rows = cells[title]
        at = [knobs[knob][r.arm] for r in rows]
        stretched = min(at) > 0 and max(at) >= 8 * min(at)
        ax.set(xscale="log" if stretched else "linear", xlabel=f"{knob}, and MACs per image")
        ax.plot(at, [r.mean for r in rows], color=FAINT, linewidth=0.8)
        for x, r in zip(at, rows):
            look, aside = looks[r.arm], beside(x, at, 0.035, stretched)
            ax.plot([aside] * len(r.values), r.values, "o", color=look["colour"], alpha=0.45, markersize=3)
            ax.plot([x, x], [r.mean, r.mean] if r.low is None else [r.low, r.high], color=look["colour"], linewidth=2)
            ax.plot([x], [r.mean], look["marker"], color=look["colour"])
        macs = [r.budget["macs"] for r in rows]
        ax.set_xticks(at, [f"{x:,g}" + (f"\n{m / 1e6:,.2f} M" if m else "") for x, m in zip(at, macs)])
        ax.minorticks_off()
        ax.set_xlim(beside(min(at), at, -0.08, stretched), beside(max(at), at, 0.08, stretched))
        shown = [r for m, _, of in cells.values() if m == n for r in of]
        stretch(ax, "y", [v for r in shown for v in (*r.values, r.low, r.high)], most=7)
    figure.supylabel("test accuracy, %", fontsize="medium")
    return svg(figure, "knobs", "test accuracy against the one number that arms differ in")


@style()
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
    figure, panels = subplots(list(names), height=3.6, columns=wide)
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
            stretch(ax, "y", shown, most=7)
        else:
            ax.set(title="", yscale="log" if min(shown, default=0) > 0 else "linear")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("")
        ax.set(xlabel="training step" + _epoch(records, n) + f" (seeds share no step: {', '.join(lost)})" * bool(lost))
        ax.set_ylabel("validation accuracy, %" if kind == "accuracy" else "training loss")
    return svg(figure, "curves", "validation accuracy and training loss against training step")


def _epoch(records: Sequence[dict], labels: int | None) -> str:
    """How many steps make an epoch, where all runs agree on it and the records say."""
    runs = [r["run"] for r in records if r["labels"] == labels and r.get("curve") and r.get("run")]
    batches = {None if run.get("unlabelled") else run.get("batch") for run in runs}
    if labels is None or len(batches) != 1 or None in batches:
        return ""
    return f" (an epoch is {labels / batches.pop():.3g})"


@style()
def tokens(picture: dict) -> str:
    """What a record's model left of the patches of a few images, block by block (see `explain.draw`)."""
    from smallvit.explain import draw

    return svg(draw(picture), "tokens", "which patches share a token, and which are gone")
