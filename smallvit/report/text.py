"""The report in a terminal: means, and the verdicts in words."""

from collections.abc import Sequence

from smallvit.record import format_labels

from .format import mean_sd, sentence
from .verdicts import compare


def text(records: Sequence[dict]) -> str:
    """Mean and SD of every arm that has run, at every number of labels, then one sentence for each verdict."""
    comparison = compare(records)
    rows = [row for row in comparison.rows if row.values]
    if not rows:
        return "no run has finished, so there is nothing to compare"
    width = max(len(row.arm) for row in rows)
    lines = []
    for labels in dict.fromkeys(row.labels for row in rows):
        lines.append(f"{format_labels(labels)}: test accuracy, mean and SD over seeds")
        lines += [f"  {row.arm:{width}}  {mean_sd(row)}" for row in rows if row.labels == labels]
    lines += ["", *(sentence(comparison, row) for row in rows if row.role == "technique")]
    return "\n".join(lines)
