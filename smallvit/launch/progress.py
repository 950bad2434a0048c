"""Progress in the terminal: one bar for a whole recipe, and one line for each failure."""

import sys
import time
from collections.abc import Sequence
from shutil import get_terminal_size

from smallvit.ablation import ArmRun
from smallvit.record import Record, user_line

FORMAT = "{percentage:3.0f}% |{bar:15}| [{elapsed} < {remaining}]{postfix}"
# a log file gets a line after so many seconds, and later after this share of the time that has passed, so that it stays short
SECONDS, SHARE = 30, 0.05


class Bar:
    """A progress bar in the terminal for all runs of a comparison. It counts training steps. It shows the remaining time and
    the mean validation accuracies of the finished runs.

    The accuracies are those on validation images, because a reader may stop or change the recipe after seeing them. The clock
    starts with the first training step, so the time left does not include the start of the workers. If the output is not a
    terminal (a log file or a notebook), lines are printed instead: one for every tenth of the runs, one for every failure, and
    one after 30 seconds without a line. In a long training, the time without a line grows to a twentieth of the time passed.

    runs   all runs
    found  their records, None for a run without one
    todo   positions of the runs that will be trained
    """

    def __init__(self, runs: Sequence[ArmRun], found: Sequence[Record | None], todo: Sequence[int]):
        from tqdm import tqdm

        self.runs, self.todo = runs, len(todo)
        self.ended, self.steps, self.started = len(runs) - len(todo), 0.0, False
        self.scores: dict[tuple[str, str], tuple[float, int]] = {}  # arm and condition -> sum and number of the accuracies
        self.percent = True  # scores are shares, shown in percent
        for entry, record in zip(runs, found):
            self.add_score(entry, record)
        steps = max(sum(runs[index].run.steps for index in todo), 1)
        self.watched = sys.stderr.isatty() and bool(todo)
        self.bar = tqdm(total=steps, file=sys.stderr, bar_format=FORMAT, nrows=20, disable=not self.watched)
        self.training: dict[str, float] = {}  # arms in training -> share of their steps that is done
        self.steps_now, self.began, self.printed, self.line_due = 0.0, time.time(), time.time(), False
        self.show_progress()

    def add_score(self, entry: ArmRun, record: Record | None):
        """Add the validation accuracy of a run to those of its arm (variant), whose mean is shown. `entry` is the run, and
        `record` holds its results, or is None. Nothing is added for a run that has not finished, or for a reference model,
        which is trained only for orientation.
        """
        if record is not None and record.finished and record.role != "reference" and record.val:
            cell = record.arm, entry.condition
            total, count = self.scores.get(cell, (0.0, 0))
            self.scores[cell] = total + record.val[record.score], count + 1
            self.percent &= not record.lower_is_better

    def run_ended(self, entry: ArmRun, record: Record | None):
        """Count one run that has ended, and print its error if it failed. `entry` is the run, and `record` is its record (saved
        results). `record` is None if another process is training this run at the moment, so that this process leaves it out.
        """
        self.ended += 1
        self.steps += entry.run.steps
        self.add_score(entry, record)
        name = f"{entry.arm}, {entry.condition}, {entry.seed_text}"
        if record is None:
            self.bar.write(f"{name} is being trained by another process", file=sys.stderr)
        elif record.status in ("failed", "interrupted"):
            self.bar.write(f"{record.status.upper()} {name}: {error_text(record)}", file=sys.stderr)
        elif self.ended % max(self.todo // 10, 1) == 0:
            self.line_due = True  # printed by the next show_progress, which knows what is in training then

    def print_line(self):
        """Print a line with the number of finished runs, the validation accuracies, the arms (variants) in training, and the
        estimated time left. This line replaces the progress bar where the output is not a terminal.
        """
        parts = [self.headline()]
        if self.training:
            states = {arm: f"{share:.0%} of the steps" if share < 0.995 else "scoring" for arm, share in self.training.items()}
            parts.append("training " + ", ".join(f"{arm} ({state})" for arm, state in states.items()))
        if self.started and (left := self.seconds_left()):
            parts.append(f"about {clock(left)} left")
        if not self.started and self.ended < len(self.runs):
            parts.append("starting the workers")
        self.printed, self.line_due = time.time(), False
        print("; ".join(parts), file=sys.stderr, flush=True)

    def seconds_left(self) -> float:
        """Return the estimated time until all runs have ended, in seconds. The estimate assumes that the remaining training
        steps take as long as those since the first one. Returns 0 if no steps have been taken, or if none remain.
        """
        done, total = self.steps + self.steps_now, self.bar.total
        return (time.time() - self.began) * max(total - done, 0) / done if done else 0.0

    def headline(self) -> str:
        """Return a line of text with the number of runs that have ended. It also shows the mean validation accuracy of each arm
        (variant) in the current condition, such as the number of labelled images.
        """
        current = list(self.scores)[-1][1] if self.scores else ""
        shown = {arm: total / count for (arm, condition), (total, count) in self.scores.items() if condition == current}
        means = [f"{arm} {100 * mean:.1f}" if self.percent else f"{arm} {mean:.3f}" for arm, mean in shown.items()]
        scores = f", {current}, validation: {'  '.join(means)}" if means else ""
        return f"{self.ended}/{len(self.runs)} runs{scores}"

    def show_progress(self, groups: Sequence[tuple[Sequence[int], float]] = ()):
        """Redraw the progress bar, or print a line if the output is not a terminal and the last line is old. `groups` has a
        pair for each group of runs in training: the positions of its runs in the list of all runs, and the training steps that
        they have taken together, or -1 if the training has not started.
        """
        steps = [step for _, step in groups]
        now = time.time()
        if not self.started and any(step >= 0 for step in steps):
            self.started, self.began, self.bar.start_t = True, now, now
        self.steps_now = sum(step for step in steps if step > 0)
        self.training = self.arms_in_training(groups)
        if self.watched:
            self.bar.n = min(self.steps + self.steps_now, self.bar.total)
            text = self.headline() if self.started else f"starting the workers, {self.headline()}"
            self.bar.set_postfix_str(text[: get_terminal_size().columns - 45])  # the bar itself takes 45 columns
        elif self.line_due or (steps and now - self.printed >= max(SECONDS, SHARE * (now - self.began))):
            self.print_line()

    def arms_in_training(self, groups: Sequence[tuple[Sequence[int], float]]) -> dict[str, float]:
        """Return a dict from each arm (variant) that is in training to the share of the steps of its current runs that is done.
        `groups` is that of `show_progress`.
        """
        done: dict[str, tuple[float, float]] = {}
        for group, step in groups:
            if step >= 0:
                before, total = done.get(arm := self.runs[group[0]].arm, (0.0, 0.0))
                done[arm] = before + step, total + sum(self.runs[index].run.steps for index in group)
        return {arm: min(some / total, 1.0) if total else 1.0 for arm, (some, total) in done.items()}

    def close(self):
        """End the line of the progress bar. The bar stays visible in the terminal."""
        self.bar.close()


def error_text(record: Record) -> str:
    """Return the error of a failed run as text. If the error occurred in code outside the library, such as a recipe file of the
    user, the text ends with the line of this code. `record` is the record (saved results) of the run.
    """
    line = user_line(record.traceback or "")
    return f"{record.error} ({line})" if line else str(record.error)


def clock(seconds: float) -> str:
    """Return a time as text, in seconds, minutes or hours: `90 s`, `15 min` or `2.5 h`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
