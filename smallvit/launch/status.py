"""The state of every run of a recipe, also while other processes or other machines train them.

The state is read from the folders of the runs only. A finished run has a record (its saved results). While a run is trained,
its worker process (a process that trains runs) renews the small file `progress.json` in its folder every 5 seconds. If the
process is killed, the file is no longer renewed.
"""

import json
import math
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from heapq import heapify, heappop, heappush
from pathlib import Path
from threading import Event, Thread
from typing import NamedTuple

from smallvit.ablation import ArmRun, with_dependencies
from smallvit.record import CHECKPOINT, RECORD, Record, read_record
from smallvit.run import fingerprint
from smallvit.storage import check_size, parse_json, temporary

from .progress import FINISHED, RECENT, UNAVAILABLE, WAITING
from .results import folders
from .scheduler import Task

FILE = "progress.json"
SECONDS = 5.0  # between two writes of this file
SILENT = 60.0  # a run whose file is older, in seconds, is no longer trained
BETWEEN = 20.0  # seconds in which a worker process that was seen may be between two runs
MOST_BYTES = 10_000  # of this file

RECENT_RUNS = 3  # finished runs of an arm by which the time of its waiting runs is estimated

RUNNING, INTERRUPTED = "running", "interrupted"


class Progress(NamedTuple):
    """How far the training of a run is, as its worker process has written it.

    host, pid  the machine and the number of the worker process
    step       training steps taken
    steps      training steps of the whole run
    runs       how many runs this process trains together as one model
    seconds    how long this process has been training
    left       estimated seconds until the last step; None before the second step
    age        seconds since the file was written
    """

    host: str
    pid: int
    step: int
    steps: int
    runs: int
    seconds: float
    left: float | None
    age: float

    @property
    def silent(self) -> bool:
        """Whether the worker process gives no sign of life: its file should have been renewed long ago."""
        return self.age > SILENT


class ProgressFiles:
    """Context manager for the training of a group of runs. Inside it, the file `progress.json` in the folder of each run says
    how far the training is. The files are removed at the end. `tasks` has the settings and the folder of each run.

    A thread writes the files every 5 seconds, so they also show that the process is alive during a long step or a long
    evaluation. The first files are written at the first training step, or after 5 seconds: a process that finds a run locked by
    another process has ended by then, and must not replace the file of that process.

    Files that cannot be written are left out, because the training must not depend on them.
    """

    def __init__(self, tasks: Sequence[Task]):
        self.folders, self.steps = [task.folder for task in tasks], int(tasks[0].run["steps"])
        self.started = time.monotonic()
        self.step = 0
        self.recent: deque[tuple[float, int]] = deque(maxlen=int(RECENT / SECONDS))  # steps that were seen, with their times
        self.written, self.ended, self.wake = 0.0, False, Event()
        self.thread = Thread(target=self.keep_writing, daemon=True)

    def __enter__(self) -> "ProgressFiles":
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended = True
        self.wake.set()
        self.thread.join()
        if self.written:
            for place in self.folders:
                remove_progress(place)

    def watch(self, step: int, accuracy: float | None):
        """Note that the training has taken the step number `step`. After the first step, and at a check of the validation
        accuracy (`accuracy` is not None), the files are written soon, otherwise within 5 seconds.
        """
        now = time.monotonic()
        if not self.recent or step < self.step:  # runs that cannot be trained as one model are trained one after another
            self.recent.clear()
            self.recent.append((now, step))
        self.step = step
        if not self.written or (accuracy is not None and now - self.written > 1):
            self.wake.set()

    def keep_writing(self):
        """Write the files every 5 seconds, or earlier when `watch` asks for it, until the training has ended."""
        while True:
            self.wake.wait(SECONDS)
            self.wake.clear()
            if self.ended:
                return
            self.written = time.monotonic()
            seconds, left = self.written - self.started, self.seconds_left(self.written)
            if self.recent:
                self.recent.append((self.written, self.step))
            for place in self.folders:
                write_progress(place, step=self.step, steps=self.steps, runs=len(self.folders), seconds=seconds, left=left)

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated seconds until the last training step, by the speed of the last five minutes. Return None before
        the second step. Steps that were taken before an interruption do not count, nor does the time before the first step.
        `now` is the present time in seconds.
        """
        began, first = self.recent[0] if self.recent else (now, self.step)
        taken = self.step - first
        return (now - began) / taken * (self.steps - self.step) if taken > 0 else None


def write_progress(place: Path, *, step: int, steps: int, runs: int, seconds: float, left: float | None):
    """Write the file `progress.json` in the folder `place` of a run. For the other parameters see `Progress`. Nothing is
    written if the folder does not exist or cannot be written.

    A reader never sees a half-written file. The file is not forced to the disk, because it is worth nothing after a crash.
    """
    plain = {"host": socket.gethostname(), "pid": os.getpid(), "step": step, "steps": steps, "runs": runs}
    plain |= {"seconds": round(seconds, 1), "left": None if left is None else round(left, 1)}
    put_progress(place, json.dumps(plain).encode())


def put_progress(place: Path, content: bytes):
    """Replace the file `progress.json` in the folder `place` of a run, if that is possible."""
    new = temporary(place / FILE)
    with suppress(OSError):
        try:
            new.write_bytes(content)
            os.replace(new, place / FILE)
        except OSError:  # a full disk: do not leave an empty file every few seconds
            new.unlink(missing_ok=True)


def remove_progress(place: Path):
    """Remove the file `progress.json` from the folder of a run, if it is there."""
    with suppress(OSError):
        (place / FILE).unlink()


def read_progress(place: Path, now: float) -> Progress | None:
    """Return how far the training of a run is, from the file `progress.json` in its folder `place`. `now` is the present time
    of the file system, in seconds. The result is None if there is no such file, or if it is damaged.
    """
    try:
        check_size(place / FILE, MOST_BYTES)
        with open(place / FILE, "rb") as file:  # opening asks a network file system for the present file
            age = max(now - os.fstat(file.fileno()).st_mtime, 0.0)
            plain = parse_json(file.read(MOST_BYTES))
        found = Progress(**{**plain, "age": age})
    except (OSError, ValueError, TypeError):
        return None
    counts = (found.pid, found.step, found.steps, found.runs)
    times = [found.seconds, *([] if found.left is None else [found.left])]
    valid = isinstance(found.host, str) and all(type(n) is int and 0 <= n < 10**12 for n in counts) and found.runs > 0
    valid &= all(type(t) in (int, float) and math.isfinite(t) and t >= 0 for t in times)
    return found if valid else None


def file_system_time(place: Path) -> float:
    """Return the present time in seconds, by the clock of the file system that holds the folder `place`. It may be the clock of
    another machine. If the folder cannot be written, return the time of this machine.
    """
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b".")
            file.flush()
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


class RunState(NamedTuple):
    """What is known about one run.

    state     "running", "waiting", "interrupted" (its training has begun, and no process continues it at present), or the
              status of its record (saved results), such as "finished" or "failed". A run that waits is "unavailable" if the
              weights of another run of its arm are
    progress  how far the training is; None if no process trains the run
    seconds   the training time of a finished run
    ended     when a finished run ended, as the time of its record in seconds
    problem   why its record cannot be used, or an empty text
    """

    state: str = WAITING
    progress: Progress | None = None
    seconds: float | None = None
    ended: float = 0.0
    problem: str = ""


class RecipeState:
    """The states of all runs of a recipe and of the earlier runs that they need, as the files say. `runs` are the runs,
    `recipe_runs` all runs of the recipe, and `out/recipe` is the folder in which they are stored.

    entries  the runs, with these earlier runs. Those without a record that only finished runs need are left out
    states   their states when `update` was called last
    """

    def __init__(self, runs: Sequence[ArmRun], recipe_runs: Iterable[ArmRun], out: Path, recipe: str):
        self.entries, dependencies = with_dependencies(runs, recipe_runs)
        self.top = Path(out, recipe)
        self.folders = folders(self.entries, out, recipe)
        self.fingerprints = [fingerprint(entry.run) for entry in self.entries]
        self.states = [RunState() for _ in self.entries]
        self.workers: dict[tuple[str, int], float] = {}  # host and number of worker processes -> when they were seen last
        self.known: dict[Path, tuple[tuple[int, int], Record | str]] = {}  # records by the time and size of their file
        self.leave_out_unneeded(len(runs), dependencies)

    def leave_out_unneeded(self, requested: int, dependencies: Sequence[dict[str, int]]):
        """Leave out the earlier runs without a record that only finished runs need: they are not trained again. The first
        `requested` runs stay. `dependencies` are those that `with_dependencies` returns.
        """
        found = [self.read_record(index) for index in range(len(self.entries))]
        needed = set(queue := [*range(requested)])
        for index in queue:  # grows during the loop
            record = found[index]
            if not isinstance(record, Record) or not record.finished:
                queue += {*dependencies[index].values()} - needed
                needed.update(dependencies[index].values())
        kept = [index for index, record in enumerate(found) if index in needed or record is not None]
        for name in ("entries", "folders", "fingerprints", "states"):
            setattr(self, name, [getattr(self, name)[index] for index in kept])

    def update(self):
        """Read the states of all runs that had not finished at the last call."""
        now = file_system_time(self.top)
        read: dict[Path, RunState] = {}  # a run that occurs in several conditions has one folder
        for index, place in enumerate(self.folders):
            if self.states[index].state != FINISHED:
                read[place] = read.get(place) or self.read_state(index, now)
                self.states[index] = read[place]
        without_weights = {e.arm for e, state in zip(self.entries, self.states) if state.state == UNAVAILABLE}
        for index, entry in enumerate(self.entries):
            if entry.arm in without_weights and self.states[index].state == WAITING:
                self.states[index] = self.states[index]._replace(state=UNAVAILABLE)
        self.workers |= {(one.host, one.pid): now for _, one in self.running if not one.silent}
        self.workers = {worker: seen for worker, seen in self.workers.items() if now - seen < BETWEEN}

    def read_state(self, index: int, now: float) -> RunState:
        """Return the present state of the run at position `index`. `now` is the time of the file system, in seconds."""
        place = self.folders[index]
        record = self.read_record(index)
        if isinstance(record, Record) and record.finished:
            return RunState(record.status, seconds=record.seconds, ended=self.known[place / RECORD][0][0] / 1e9)
        progress = read_progress(place, now)
        if progress is not None and not progress.silent:
            return RunState(RUNNING, progress)  # also a failed run that is trained again
        if isinstance(record, Record):
            return RunState(record.status)
        begun = progress is not None or (place / CHECKPOINT).exists()
        return RunState(INTERRUPTED if begun else WAITING, progress, problem=record or "")

    def read_record(self, index: int) -> Record | str | None:
        """Return the record (saved results) of the run at position `index`, or None if there is none. A text says why the
        record cannot be used.
        """
        path = self.folders[index] / RECORD
        try:
            stat = path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{path} cannot be read ({error.strerror or error})"
        version = stat.st_mtime_ns, stat.st_size
        if path not in self.known or self.known[path][0] != version:
            self.known[path] = version, self.parse_record(index)
        return self.known[path][1]

    def parse_record(self, index: int) -> Record | str:
        """Read and check the record (saved results) of the run at position `index`. Return it, or a text that says why it
        cannot be used.
        """
        try:
            record = read_record(self.folders[index])
        except (OSError, ValueError) as error:
            return str(error)
        if record is None or record.fingerprint != self.fingerprints[index]:
            return f"{self.folders[index]} holds another run than {self.entries[index].arm!r}"
        return record

    @property
    def running(self) -> list[tuple[ArmRun, Progress]]:
        """The runs that are in training, or whose worker process gives no sign of life, each with its progress."""
        folders: dict[Path, tuple[ArmRun, Progress]] = {}
        for entry, place, state in zip(self.entries, self.folders, self.states):
            if state.progress is not None:
                folders.setdefault(place, (entry, state.progress))
        return list(folders.values())

    @property
    def ended(self) -> bool:
        """Whether all runs have ended: none is running, waiting or interrupted."""
        return all(state.state not in (RUNNING, WAITING, INTERRUPTED) for state in self.states)

    def seconds_left(self) -> float | None:
        """Return the estimated seconds until the last run has been trained, without its evaluation. Return None if no run is in
        training, or if no step has been timed. Runs that wait are expected to take as long as the last finished runs of their
        arm (variant) and condition, or else as long for each step as other runs.
        """
        steps = seconds = 0.0  # of which the time is known
        times: dict[tuple, list[tuple[float, float]]] = {}
        waiting: dict[Path, tuple[ArmRun, float]] = {}  # and the share of its steps that is left
        for entry, place, state in zip(self.entries, self.folders, self.states):
            if state.seconds is not None and entry.run.steps:
                steps, seconds = steps + entry.run.steps, seconds + state.seconds
                times.setdefault(entry.cell, []).append((state.ended, state.seconds))
            elif state.state in (WAITING, INTERRUPTED):
                begun = state.progress
                left = 1 - begun.step / begun.steps if begun and begun.steps else 1.0  # a reference may have no steps
                waiting[place] = entry, left
        alive = [progress for _, progress in self.running if not progress.silent]
        for progress in alive:
            if progress.left:
                steps, seconds = steps + progress.steps - progress.step, seconds + progress.left / progress.runs
        if not alive or not steps:
            return None
        pace, workers = seconds / steps, dict.fromkeys(self.workers, 0.0)
        for progress in alive:
            left = pace * progress.runs * progress.steps if progress.left is None else progress.left
            workers[progress.host, progress.pid] = left
        busy = list(workers.values())
        heapify(busy)
        for entry, share in waiting.values():
            same = [each for _, each in sorted(times.get(entry.cell, ()))[-RECENT_RUNS:]]
            heappush(busy, heappop(busy) + share * (sum(same) / len(same) if same else pace * entry.run.steps))
        return max(busy)
