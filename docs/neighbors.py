"""Check whether the verdicts depend on the test images of MNIST being independent.

    python docs/neighbors.py

MNIST does not say who wrote a digit, so each test image counts as independent of the others. But the errors on neighboring test
images are correlated, as if digits of one person lay side by side. This script compares the committed records of all recipes on
MNIST again, with 20, 50 or 100 neighboring test images as one group, which counts as one image. It prints how many verdicts
change, and how much wider the intervals become. It takes a minute.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from smallvit.record import Record, read_records
from smallvit.verdicts import Comparison, compare

RECIPES = Path(__file__).parents[1] / "recipes"
SIZES = (20, 50, 100)  # images in a group


def grouped(records: Iterable[Record], size: int) -> list[Record]:
    """The records with each `size` neighboring test images as a group. Those that do not keep the result of each image stay."""
    return [
        replace(record, test_groups=[image // size for image in range(record.test_images)]) if record.correct else record
        for record in records
    ]


def widths(comparison: Comparison) -> dict[tuple, float]:
    """The widths of the intervals on new test images: of each difference and of each accuracy."""
    found = {}
    for row in comparison.main_rows:
        if row.difference and row.difference.low is not None:
            found["difference", row.condition, row.arm] = row.difference.high - row.difference.low
        if row.new_images:
            found["accuracy", row.condition, row.arm] = row.new_images[1] - row.new_images[0]
    return found


def verdicts(comparison: Comparison) -> dict[tuple, str]:
    """The verdict on each technique in the main conditions."""
    return {(row.condition, row.arm): row.verdict for row in comparison.main_rows if row.role == "technique"}


def on_mnist() -> list[list[Record]]:
    """The committed records of each recipe on MNIST."""
    everything = [read_records(path) for path in sorted(RECIPES.glob("*.jsonl")) if path.with_suffix(".py").exists()]
    return [records for records in everything if records[0].run["data"]["call"] == "smallvit.data.mnist"]


def report(recipes: Sequence[Sequence[Record]], comparisons: Sequence[Comparison], size: int) -> str:
    """What changes in the recipes with these records if `size` neighboring test images are one group, as text. `comparisons`
    are those of the recipes without groups.
    """
    count, decided, changed, wider = 0, 0, [], {"difference": [], "accuracy": []}
    for records, plain in zip(recipes, comparisons):
        other = compare(grouped(records, size))
        before, after = verdicts(plain), verdicts(other)
        count += len(before)
        decided += sum(verdict in ("better", "worse") for verdict in before.values())
        changed += [
            f"  {records[0].recipe}, {condition.title}, {arm}: {before[condition, arm]} becomes {after[condition, arm]}"
            for condition, arm in before
            if before[condition, arm] != after[condition, arm]
        ]
        old, new = widths(plain), widths(other)
        for key in old.keys() & new.keys():
            if old[key] > 0:
                wider[key[0]].append(new[key] / old[key])
    ratios = "; ".join(f"{name}: median {median(each):.2f}, largest {max(each):.2f}" for name, each in wider.items() if each)
    start = f"{size} images a group: {len(changed)} of {count} comparisons change ({decided} are better or worse)"
    return "\n".join([start, *changed, f"  intervals, times as wide: {ratios}"])


if __name__ == "__main__":
    found = on_mnist()
    compared = [compare(each) for each in found]
    for number in SIZES:
        print(report(found, compared, number), flush=True)
