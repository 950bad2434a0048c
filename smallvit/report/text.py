"""The report in a terminal: means, and the verdicts in words."""

from collections.abc import Sequence

from .page import mean_sd, sentence
from .verdicts import amount, compare


def text(records: Sequence[dict]) -> str:
    """Mean and SD of every arm at every number of labels, then one sentence for each verdict."""
    if not any(record["status"] == "finished" for record in records):
        return "no run has finished, so there is nothing to compare"
    if not any(record["role"] == "baseline" for record in records):
        return "\n".join(f"{r['arm']} at {amount(r['labels'])}, seed {r['seed']}: {outcome(r)}" for r in records)
    comparison = compare(records)
    width = max(len(row.arm) for row in comparison.rows)
    lines = []
    for labels in dict.fromkeys(row.labels for row in comparison.rows):
        lines.append(f"{amount(labels)}: test accuracy, mean and SD over seeds")
        lines += [f"  {row.arm:{width}}  {mean_sd(row)}" for row in comparison.rows if row.labels == labels]
    lines += ["", *(sentence(row) for row in comparison.rows if row.role == "technique")]
    return "\n".join(lines)


def outcome(record: dict) -> str:
    """What one run gave."""
    return (
        f"{100 * record['test'][record['score']]:.2f}%"
        if record["status"] == "finished"
        else f"{record['status']}: {record['error']}"
    )
