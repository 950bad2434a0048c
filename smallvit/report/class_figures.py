"""Figures about single classes, as inline SVG: confusion matrices and reliability diagrams."""

from collections.abc import Sequence
from textwrap import fill

from smallvit.record import Record
from smallvit.verdicts.comparison import Comparison

from .classes import MOST_CLASSES, class_names, confusions, count, reliabilities
from .drawing import FAINT, INK, PAGE, shortened, style, styles, subplots, svg

RIGHT, WRONG = "#0c0c00", "#0c0c01"  # colors of the first two arms: blue for right predictions, orange for errors
DARKEST = 0.6  # opacity of a cell with all images of its row, so that its number stays readable


@style()
def confusion_matrices(comparison: Comparison, records: Sequence[Record]) -> str:
    """Draw the confusion matrix of each arm (variant) as a heat map, with one panel for each arm. Return the figure as SVG
    text. `records` are the results of the runs. Arms with more classes than can be read are left out. The text is empty if no
    arm remains, or if no record has a confusion matrix.

    Rows are true classes. A cell shows the mean number of images, and its color is the share of its row: blue for right
    predictions, orange for errors. The color scale of the errors ends at the most frequent error of the figure.
    """
    from matplotlib.patches import Rectangle

    names = class_names(records)
    matrices = {arm: matrix for arm, matrix in confusions(comparison, records).items() if len(matrix) <= MOST_CLASSES}
    k = max(map(len, matrices.values()), default=0)
    rotated = max((len(name) for arm in matrices for name in names[arm]), default=0) > 3
    shares = {arm: [[x / (sum(row) or 1) for x in row] for row in matrix] for arm, matrix in matrices.items()}
    errors = [x for matrix in shares.values() for r, row in enumerate(matrix) for c, x in enumerate(row) if r != c]
    most = max(errors, default=0.0) or 1.0
    figure, panels = subplots(list(matrices), height=1.5 + 0.34 * k + 0.5 * rotated, columns=max(1, min(3, 24 // max(k, 1))))
    for arm, ax in panels.items():
        k = len(matrices[arm])
        ax.grid(False)
        for r, c in ((r, c) for r in range(k) for c in range(k) if matrices[arm][r][c]):
            depth = DARKEST * (shares[arm][r][c] if r == c else shares[arm][r][c] / most)
            ax.add_patch(Rectangle((c - 0.5, r - 0.5), 1, 1, color=RIGHT if r == c else WRONG, alpha=depth, linewidth=0))
            ax.text(c, r, count(matrices[arm][r][c]), ha="center", va="center", fontsize=7.5 if k <= 12 else 5.5)
        ax.set_title(fill(shortened(arm), 26))
        ax.set(xlim=(-0.5, k - 0.5), ylim=(k - 0.5, -0.5), xlabel="predicted class", ylabel="true class")
        ax.set_xticks(range(k), names[arm], rotation=90 if rotated else 0)
        ax.set_yticks(range(k), names[arm])
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return svg(figure, "confusion", "confusion matrix of each arm")


@style()
def reliability_diagrams(comparison: Comparison, records: Sequence[Record]) -> str:
    """Draw the reliability diagram of each arm (variant) whose calibration was measured, with one panel for each arm. Return
    the figure as SVG text. `records` are the results of the runs. The text is empty if no calibration was measured.

    A point is a bin of images with similar confidence. Larger points have more images. Points below the dotted line belong to
    images for which the model is too confident.
    """
    found = reliabilities(comparison, records)
    figure, panels = subplots(list(found), height=3.4)
    for arm, ax in panels.items():
        bins = [(images, confidence, accuracy) for images, confidence, accuracy in found[arm] if images]
        most, look = max(images for images, _, _ in bins), styles(comparison)[arm]
        ax.plot([0, 1], [0, 1], ":", color=INK, linewidth=1)
        ax.plot([confidence for _, confidence, _ in bins], [right for _, _, right in bins], color=look["color"], linewidth=1)
        for images, confidence, right in bins:
            ax.plot([confidence, confidence], [confidence, right], color=FAINT, linewidth=0.8)
            size = 3.5 + 8 * (images / most) ** 0.5
            ax.plot([confidence], [right], "o", color=look["color"], markersize=size, markeredgecolor=PAGE)
        ax.set_title(fill(shortened(arm), 26))
        ticks = [0, 0.2, 0.4, 0.6, 0.8, 1]
        ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="mean confidence, %", ylabel="accuracy, %")
        ax.set_xticks(ticks, [f"{100 * t:.0f}" for t in ticks])
        ax.set_yticks(ticks, [f"{100 * t:.0f}" for t in ticks])
        ax.set_aspect("equal")
    return svg(figure, "reliability", "reliability diagram of each arm")
