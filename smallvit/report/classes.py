"""What a report says about single classes: the confusion matrix, recall and precision of each class, and the calibration."""

from collections.abc import Sequence

from smallvit.record import Record
from smallvit.verdicts.comparison import Comparison, Condition, condition_of
from smallvit.verdicts.folds import reliability_of, summed

from .tables import Cell, Table

CONFUSION, CLASSES, CALIBRATION = "Confusion matrix", "Recall and precision of each class", "Calibration"
MOST_CLASSES = 30  # a larger confusion matrix cannot be read

Matrix = list[list[float]]  # rows: true classes; columns: predicted classes, or columns of a reliability diagram


def class_tables(comparison: Comparison, records: Sequence[Record]) -> dict[str, list[Table]]:
    """Return the tables of a report about single classes, as a dict from a heading to its tables. There is one table for each
    arm (variant) that is not a reference. They show the condition of `shown_condition`. `records` are the results of the runs.
    Records of earlier versions have no data on single classes; then the dict is empty.
    """
    matrices, names = confusions(comparison, records), class_names(records)
    found = {
        CLASSES: [class_table(comparison, arm, matrix, names[arm]) for arm, matrix in matrices.items()],
        CONFUSION: [
            confusion_table(comparison, arm, matrix, names[arm])
            for arm, matrix in matrices.items()
            if len(matrix) <= MOST_CLASSES
        ],
        CALIBRATION: [bin_table(comparison, arm, bins) for arm, bins in reliabilities(comparison, records).items()],
    }
    return {heading: tables for heading, tables in found.items() if tables}


def class_names(records: Sequence[Record]) -> dict[str, list[str]]:
    """Return the names of the classes of each arm (variant), as a dict from its name to a list. The arms of different baselines
    may have different data sets. Classes without names get numbers. `records` are the results of the runs.
    """
    return {
        r.arm: list(r.preprocess["classes"]) if r.preprocess else [str(number) for number in range(len(r.confusion))]
        for r in records
        if r.confusion
    }


def shown_condition(comparison: Comparison) -> Condition:
    """Return the condition whose classes are shown: of the main conditions with a result, that with the most labelled images,
    and a tuned one if there is one.
    """
    done = [row.condition for row in comparison.main_rows if row.values and row.role != "reference"]
    return max(done or comparison.main, key=lambda condition: condition.order)


def runs_of_arms(comparison: Comparison, records: Sequence[Record]) -> dict[str, list[Record]]:
    """Return the finished runs of each arm (variant) that is not a reference, as a dict from its name to a list of records.
    They are those of `shown_condition`. `records` are the results of all runs.
    """
    shown, arms = shown_condition(comparison), comparison.arms
    found: dict[str, list[Record]] = {}
    for r in records:
        if r.finished and r.role in ("baseline", "technique") and condition_of(r) == shown and r.arm in arms:
            found.setdefault(r.arm, []).append(r)
    return found


def confusions(comparison: Comparison, records: Sequence[Record]) -> dict[str, Matrix]:
    """Return the confusion matrix of each arm (variant), as a dict from its name to a matrix of counts. A row is a true class
    and a column is a predicted class. The counts are means over the seeds. In a cross-validation, they are means over the
    passes, so that each image counts once. `records` are the results of the runs.
    """
    found = {}
    for arm, runs in runs_of_arms(comparison, records).items():
        matrices = [r.confusion for r in runs if r.confusion]
        passes = len(matrices) / (runs[0].folds or 1)
        if total := summed(matrices):
            found[arm] = [[count / passes for count in row] for row in total]
    return found


def reliabilities(comparison: Comparison, records: Sequence[Record]) -> dict[str, Matrix]:
    """Return the reliability diagram of each arm (variant) whose calibration was measured, as a dict from its name to a list of
    bins. A bin is a list: number of images, mean confidence and accuracy, over the test images of all seeds. The number of
    images is a mean over the seeds. `records` are the results of the runs.
    """
    found = {}
    for arm, runs in runs_of_arms(comparison, records).items():
        diagrams = [r.reliability for r in runs if r.reliability and "ece" in (r.test or {})]
        bins = reliability_of(diagrams) or []
        if any(images for images, _, _ in bins):
            found[arm] = [[images * (runs[0].folds or 1) / len(diagrams), *means] for images, *means in bins]
    return found


def count(x: float) -> str:
    """Return a mean number of images as text: with one decimal, or without any if it is a whole number."""
    return f"{x:,.0f}" if abs(x - round(x)) < 0.005 else f"{x:,.1f}"


def share(part: float, whole: float) -> Cell:
    """Return the share of `part` in `whole` in percent, as a table cell. It is a dash if `whole` is 0."""
    return (f"{100 * part / whole:.2f}" if whole else "–"), []


def title_of(comparison: Comparison, arm: str) -> str:
    """Return the title of a table about the classes of one arm (variant): its name and the condition."""
    return f"{arm}, {shown_condition(comparison).title}"


def class_table(comparison: Comparison, arm: str, matrix: Matrix, names: Sequence[str]) -> Table:
    """Return a table with the recall, the precision and the F1 score of each class for one arm (variant). `matrix` is its
    confusion matrix, and `names` are the names of the classes.
    """
    rows = {}
    for c, name in enumerate(names):
        right, images, predicted = matrix[c][c], sum(matrix[c]), sum(row[c] for row in matrix)
        cells = share(right, images), share(right, predicted), share(2 * right, images + predicted)
        rows[name] = [(count(images), []), *cells]
    columns = ("Test images", "Recall, %", "Precision, %", "F1, %")
    return Table(title=title_of(comparison, arm), columns=columns, rows=rows, head="Class")


def confusion_table(comparison: Comparison, arm: str, matrix: Matrix, names: Sequence[str]) -> Table:
    """Return the confusion matrix of one arm (variant) as a table. `matrix` holds the mean counts of test images, and `names`
    are the names of the classes.
    """
    rows: dict[str, list[Cell]] = {name: [(count(x), []) for x in matrix[c]] for c, name in enumerate(names)}
    title = title_of(comparison, arm)
    return Table(title=title, columns=tuple(f"predicted {name}" for name in names), rows=rows, head="True class")


def bin_table(comparison: Comparison, arm: str, bins: Matrix) -> Table:
    """Return a table with the data of a reliability diagram of one arm (variant). `bins` lists the number of images, the mean
    confidence and the accuracy in bins of equal width. Empty bins are left out.
    """
    rows: dict[str, list[Cell]] = {}
    for number, (images, confidence, accuracy) in enumerate(bins):
        if images:
            name = f"{100 * number / len(bins):.0f} to {100 * (number + 1) / len(bins):.0f}%"
            rows[name] = [(count(images), []), *((f"{100 * x:.2f}", []) for x in (confidence, accuracy))]
    columns = ("Test images", "Mean confidence, %", "Accuracy, %")
    return Table(title=title_of(comparison, arm), columns=columns, rows=rows, head="Confidence")
