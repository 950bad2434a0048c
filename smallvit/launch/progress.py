"""Progress in the terminal: one bar for a whole recipe, and one line for each failure."""

import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size

from smallvit.ablation import ArmRun
from smallvit.record import Record, user_line
from smallvit.verdicts.score import score_named

FORMAT = "{percentage:3.0f}% |{bar:15}| [{elapsed} < {desc}]{postfix}"
# a log file gets a line after so many seconds, and later after this share of the time that has passed, so that it stays short
SECONDS, SHARE = 30, 0.05
FINISHED, UNAVAILABLE = "finished", "unavailable"  # states of a run: those of its record, and two more
WAITING, ELSEWHERE = "waiting", "trained by another process"
BASIS = 2.0  # seconds of training from which the time left is estimated
RECENT, RECENT_SHARE = 300.0, 0.25  # the speed is that of the last seconds, or of this share of the time passed if it is longer
FIRST_CHECKPOINT = 10.0  # seconds of training before which a run has no checkpoint, so that it was not resumed
ASLEEP = 120.0  # after so many seconds without news of the workers, the computer was asleep: news come every half a second


class Speed:
    """Measures how fast the runs of a recipe are trained at present, by all worker processes together. Steps that were taken
    before an interruption do not count, and neither does the time in which the computer was asleep. `runs` are all runs.

    taken    steps that were taken since the first one was seen
    samples  pairs (time, steps taken until then), the oldest one first, of the time over which the speed is measured
    seen     positions of a group of runs in training -> steps of the group when it was seen first, and when it was seen last.
             The former is 0 if time is measured only since then
    heard    time of the last news, in seconds, or None before the first ones
    asleep   seconds in which the computer was asleep
    """

    def __init__(self, runs: Sequence[ArmRun]):
        self.runs, self.taken, self.began = runs, 0.0, 0.0
        self.samples: deque[tuple[float, float]] = deque()
        self.seen: dict[tuple[int, ...], tuple[float, float]] = {}
        self.heard: float | None = None
        self.asleep = 0.0

    def update(self, groups: Sequence[tuple[Sequence[int], float]], now: float):
        """Note how many steps each group of runs in training has taken. `groups` is that of `Bar.show_progress`, and `now` is
        the present time in seconds.
        """
        if self.heard is not None and now - self.heard > ASLEEP:
            self.asleep += now - self.heard
        self.heard, now = now, now - self.asleep
        seen, self.seen = self.seen, {}
        for group, steps in groups:
            if steps > 0:  # the first number that is seen is large if the run continues after an interruption
                first, last = seen.get(tuple(group), (steps if self.samples else 0.0, steps))
                self.taken += max(steps - last, 0)
                self.seen[tuple(group)] = first, max(steps, last)
        if self.seen and not self.samples:
            self.began = now
        if self.seen and (not self.samples or now - self.samples[-1][0] >= 1):
            self.samples.append((now, self.taken))
        oldest = now - max(RECENT, RECENT_SHARE * (now - self.began))
        while len(self.samples) > 1 and self.samples[1][0] <= oldest:
            self.samples.popleft()

    def run_finished(self, position: int, record: Record):
        """Count the steps that a run has taken since it was seen last. `position` is its position in the list of all runs, and
        `record` is its record (saved results).
        """
        steps = self.runs[position].run.steps
        group = next((group for group in self.seen if position in group), (position,))
        first, last = self.seen.get(group, (steps, steps))
        self.taken += max(steps - last / len(group), 0)
        if (record.seconds or 0) * (record.stacked or 1) < FIRST_CHECKPOINT:  # a new run: the first steps seen were its own
            self.taken += first / len(group)

    def seconds_for(self, steps: float, now: float) -> float | None:
        """Return the estimated time for a number of training steps, in seconds. The result is None as long as too few steps
        have been timed.
        """
        now -= self.asleep
        began, before = self.samples[0] if self.samples else (now, 0.0)
        taken = self.taken - before
        return (now - began) * steps / taken if taken > 0 and now - began >= BASIS else None


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

        self.runs, self.todo = runs, set(todo)
        self.positions = {id(entry): index for index, entry in reversed([*enumerate(runs)])}
        self.states = [
            WAITING if record is None or index in self.todo else record.status for index, record in enumerate(found)
        ]
        self.counts = Counter(self.states)
        # runs that occur once more in another condition; they end together with the first one
        self.copies = [i for i, record in enumerate(found) if record is None and i not in self.todo]
        self.ended, self.steps, self.started = 0, 0.0, False
        self.total = sum(runs[index].run.steps for index in todo)
        self.scores: dict[tuple[str, str], tuple[float, int]] = {}  # arm and condition -> sum and number of the accuracies
        self.percent = True  # scores are shares, shown in percent
        for entry, record in zip(runs, found):
            self.add_score(entry, record)
        self.watched = sys.stderr.isatty() and bool(todo)
        self.bar = tqdm(total=max(self.total, 1), file=sys.stderr, bar_format=FORMAT, nrows=20, disable=not self.watched)
        self.training: dict[str, float] = {}  # arms in training -> share of their steps that is done
        self.speed = Speed(runs)
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
            self.percent &= score_named(record.score or "", bool(record.lower_is_better)).percent

    def run_ended(self, entry: ArmRun, record: Record | None):
        """Count one run that has ended, and print its error if it failed. `entry` is the run, and `record` is its record (saved
        results). `record` is None if another process is training this run at the moment, so that this process leaves it out.
        """
        self.ended += 1
        position = self.positions[id(entry)]
        if record is not None and record.finished:
            self.speed.run_finished(position, record)
        self.note_state(position, record.status if record is not None else ELSEWHERE)
        self.add_score(entry, record)
        name = f"{entry.arm}, {entry.condition}, {entry.seed_text}"
        if record is None:
            self.bar.write(f"{name} is being trained by another process", file=sys.stderr)
        elif record.status in ("failed", "interrupted"):
            self.bar.write(f"{record.status.upper()} {name}: {error_text(record)}", file=sys.stderr)
        elif self.ended % max(len(self.todo) // 10, 1) == 0:
            self.line_due = True  # printed by the next show_progress, which knows what is in training then

    def note_state(self, position: int, state: str):
        """Count a run that has ended in its new state, such as "finished" or "failed". `position` is its position in the list
        of all runs. If it is the first run of its arm (variant) whose weights are unavailable, the waiting runs of this arm
        count as unavailable from now on, too. The steps of runs that were not trained are no longer expected.
        """
        ended = self.runs[position]
        similar = [i for i in self.copies if self.runs[i].seed == ended.seed]
        together = [position, *(i for i in similar if self.runs[i].run == ended.run)]
        if state == UNAVAILABLE and self.states[position] == WAITING:
            together += [i for i, entry in enumerate(self.runs) if entry.arm == ended.arm and self.states[i] == WAITING]
        for index in dict.fromkeys(together):
            steps = self.runs[index].run.steps if index in self.todo and self.states[index] == WAITING else 0
            self.steps += steps if state == FINISHED else 0
            self.total -= 0 if state == FINISHED else steps
            self.counts[self.states[index]] -= 1
            self.counts[state] += 1
            self.states[index] = state

    def print_line(self):
        """Print a line with the number of finished runs, the validation accuracies, the arms (variants) in training, and the
        estimated time left. This line replaces the progress bar where the output is not a terminal.
        """
        parts = [self.headline()]
        if self.training:
            states = {arm: f"{share:.0%} of the steps" if share < 0.995 else "scoring" for arm, share in self.training.items()}
            parts.append("training " + ", ".join(f"{arm} ({state})" for arm, state in states.items()))
        if (left := self.seconds_left()) is not None and left >= 1:
            parts.append(f"about {clock(left)} left")
        if not self.started and self.counts[WAITING]:
            parts.append("starting the workers")
        self.printed, self.line_due = time.time(), False
        print("; ".join(parts), file=sys.stderr, flush=True)

    def seconds_left(self) -> float | None:
        """Return the estimated time until all runs have ended, in seconds. The estimate assumes that the remaining training
        steps take as long as the recent ones. The result is None if too few steps have been timed.
        """
        return self.speed.seconds_for(max(self.total - self.steps - self.steps_now, 0), time.time())

    def headline(self) -> str:
        """Return a line of text with the number of runs that have finished. It also shows the mean validation accuracy of each
        arm (variant) in the current condition, such as the number of labelled images.
        """
        current = list(self.scores)[-1][1] if self.scores else ""
        shown = {arm: total / count for (arm, condition), (total, count) in self.scores.items() if condition == current}
        means = [f"{arm} {100 * mean:.1f}" if self.percent else f"{arm} {mean:.3f}" for arm, mean in shown.items()]
        scores = f", {current}, validation: {'  '.join(means)}" if means else ""
        ended = {state: count for state, count in self.counts.items() if state != WAITING}
        return count_text(ended, self.counts.total()) + scores

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
        self.speed.update(groups, now)
        if self.watched:
            self.bar.total = max(self.total, 1)
            self.bar.n = min(self.steps + self.steps_now, self.bar.total)
            left = self.seconds_left()
            self.bar.set_description_str("?" if left is None else self.bar.format_interval(left), refresh=False)
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


def count_text(counts: Mapping[str, int], total: int) -> str:
    """Return the numbers of runs in each state as text, such as `12 of 20 runs have finished, 2 running`. A run is one training
    of one model: in a cross-validation, one fold of one pass. `counts` is a dict from a state to a number of runs, and `total`
    is the number of all runs.

    Runs whose external weights are unavailable are not expected to finish: they are named at the end, and `12 of 20` is without
    them.
    """
    unavailable = counts.get(UNAVAILABLE, 0)
    others = [f"{n} {state}" for state, n in sorted(counts.items()) if n and state not in (FINISHED, UNAVAILABLE)]
    others += [f"{unavailable} left out (no weights)"] * bool(unavailable)
    return ", ".join([f"{counts.get(FINISHED, 0)} of {total - unavailable} runs have finished", *others])


def error_text(record: Record) -> str:
    """Return the error of a failed run as text. If the error occurred in code outside the library, such as a recipe file of the
    user, the text ends with the line of this code. `record` is the record (saved results) of the run.
    """
    line = user_line(record.traceback or "")
    return f"{record.error} ({line})" if line else str(record.error)


def error_lines(records: Iterable[Record]) -> list[str]:
    """Return a line of text for each arm (variant) and error of runs that did not finish, with the number of these runs.
    `records` are their records (saved results).
    """
    errors = Counter((record.arm, error_text(record)) for record in records)
    return [f"  {arm}: {error}" + f" ({times} runs)" * (times > 1) for (arm, error), times in errors.items()]


def clock(seconds: float) -> str:
    """Return a time as text, in seconds, minutes or hours: `90 s`, `15 min` or `2.5 h`."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
