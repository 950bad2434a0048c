"""Progress: one bar for a whole recipe."""

import sys
from collections.abc import Sequence
from shutil import get_terminal_size

from smallvit.record import format_labels
from smallvit.run import Run


class Bar:
    """One progress bar for the whole recipe, in steps, with the time left and the accuracies so far.

    They are those on validation images, since whoever watches may stop or change the recipe. Where nobody watches (a log file)
    there is a line for every tenth of the runs and for every failure.
    """

    def __init__(self, runs: Sequence[Run], found: Sequence[dict | None], todo: Sequence[int]):
        from tqdm import tqdm

        self.runs, self.todo = runs, len(todo)
        self.ended, self.done = len(runs) - len(todo), 0.0
        self.scores: dict[tuple, list[float]] = {}
        for record in found:
            self.count(record)
        steps = max(sum(runs[at].steps for at in todo), 1)
        self.watched = sys.stderr.isatty() and bool(todo)
        self.bar = tqdm(total=steps, file=sys.stderr, bar_format=FORMAT, nrows=20, disable=not self.watched)
        self.move()

    def count(self, record: dict | None):
        if record is not None and record["status"] == "finished" and record["role"] != "reference" and record["val"]:
            self.scores.setdefault((record["arm"], record["labels"]), []).append(record["val"][record["score"]])

    def tell(self, run: Run, record: dict | None):
        """One run has ended; None if another process is at it."""
        self.ended += 1
        self.done += run.steps
        self.count(record)
        if record is None:
            self.bar.write(f"{run.arm}, {format_labels(run.labels)}, seed {run.seed} is trained by another process", file=sys.stderr)
        elif record["status"] == "failed":
            self.bar.write(f"FAILED {run.arm}, {format_labels(run.labels)}, seed {run.seed}: {record['error']}", file=sys.stderr)
        elif not self.watched and self.ended % max(self.todo // 10, 1) == 0:
            print(self.headline(), file=sys.stderr, flush=True)

    def headline(self) -> str:
        """How many runs have ended, and the mean validation accuracies at the number of labels that is being trained."""
        labels = list(self.scores)[-1][1] if self.scores else None
        means = [f"{arm} {100 * sum(s) / len(s):.1f}" for (arm, count), s in self.scores.items() if count == labels]
        return f"{self.ended}/{len(self.runs)} runs" + (f", {format_labels(labels)}: {'  '.join(means)}" if means else "")

    def move(self, steps: Sequence[float] = ()):
        """Show how far it is, with the steps done of runs that have not ended."""
        if self.watched:
            self.bar.n = min(self.done + sum(steps), self.bar.total)
            room = get_terminal_size().columns - 45  # what the bar itself takes
            self.bar.set_postfix_str(self.headline()[:room])

    def close(self):
        self.bar.close()


FORMAT = "{percentage:3.0f}% |{bar:15}| [{elapsed} < {remaining}]{postfix}"
