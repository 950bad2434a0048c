"""Scheduler: which runs of a recipe are still to be trained, in which order, and what became of them.

A run is identified by its position in one list: the requested runs, then the runs that they depend on. Every run that ended has
a record on disk, also if it failed. So nothing is lost when a process dies.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from smallvit import record as records
from smallvit.ablation import ArmRun, with_dependencies
from smallvit.components import describe_value
from smallvit.pretrained import Unavailable, Weights
from smallvit.record import Record
from smallvit.run import Run, describe, fingerprint
from smallvit.train.fit import Tags, new_record

from .progress import Bar

LONGEST_NAME = 100  # characters of an arm in the name of its folder


class Task(NamedTuple):
    """A run in the form in which it is sent to a worker process: its settings as JSON data, its tags, its folder, and the
    folders of the earlier runs that it depends on.
    """

    run: dict
    tags: Tags
    folder: Path
    dependencies: dict[str, Path]


class Damaged(ValueError):
    """Error for a run whose record or weights file is damaged, so that it must be trained again. `files` are the files to set
    aside; the first one is the damaged file.
    """

    def __init__(self, *files: Path):
        super().__init__(f"{files[0]} is damaged")
        self.files = files

    def set_aside(self):
        """Rename the files to `*.damaged` and print a note. The run can then be trained again."""
        for path in self.files:
            os.replace(path, path.with_name(f"{path.name}.damaged"))
        print(f"note: {self}; renamed to *.damaged, and the run is trained again", file=sys.stderr)


class Scheduler:
    """Decides which run is trained next. It knows the records on disk and the earlier runs that each run depends on.

    runs         the requested runs
    out, recipe  the runs lie in the folder `out/recipe`
    recipe_runs  all runs of the recipe. A dependency that is one of them keeps its arm and its folder
    try_again    a function of a record: whether a run that has this record is trained once more
    stack        the largest number of runs, equal except for their seed, that are trained together
    fail_fast    start no further run after the first failure
    show         called with each new record

    Damaged records and weights are renamed, with a message, and these runs are trained again.

    Raises       ValueError if a folder holds another run, and if data or a file of weights cannot be read.
    """

    def __init__(
        self,
        runs: Sequence[ArmRun],
        out: str | Path,
        recipe: str,
        *,
        recipe_runs: Iterable[ArmRun] = (),
        try_again: Callable[[Record], bool] = lambda record: False,
        stack: int = 1,
        fail_fast: bool = False,
        show: Callable[[Record], None] | None = None,
    ):
        self.out, self.recipe, self.stack, self.fail_fast, self.show = out, recipe, stack, fail_fast, show
        self.requested = len(runs)
        self.runs, self.dependencies = with_dependencies(runs, recipe_runs)
        self.records = [self.existing_record(entry) for entry in self.runs]
        unfinished = [entry.run for entry, record in zip(self.runs, self.records) if record is None or not record.finished]
        self.unavailable = unavailable_weights(unfinished)
        untrained = [index for index, record in enumerate(self.records) if record is None or try_again(record)]
        todo = [index for index in untrained if index < self.requested]
        while more := [index for index in untrained if index not in todo and self.is_needed(index, todo)]:
            todo += more
        warn_other_version(self.records)
        for data in dict.fromkeys(self.runs[index].run.data for index in todo):
            self.check_data(data)
        for reason in self.unavailable.values():
            print(f"unavailable: {reason}; the runs that need these weights are left out", file=sys.stderr)
        self.queue, self.in_training = dependencies_first(todo, self.dependencies), set[int]()
        self.stopped = False  # by fail_fast
        self.alone = set[int]()  # runs that are not stacked any more, because a stack with them has failed
        self.stack_keys = [fingerprint(e.run.at_seed(0)) if stack > 1 else index for index, e in enumerate(self.runs)]
        self.bar = Bar(self.runs, self.records, todo)

    def existing_record(self, entry: ArmRun) -> Record | None:
        """Return the record of a run, or None if there is none. Damaged files are renamed to `*.damaged`, and the result is
        then None.
        """
        try:
            return recall(entry, self.out, self.recipe)
        except Damaged as error:
            error.set_aside()
            return None

    def check_data(self, data: Callable):
        """Load a data set and raise ValueError if finished runs used other images or labels than it contains now. `data` is the
        function that loads it.

        Also prints how many test images occur in the training images. The data are downloaded here, once, by one process.
        """
        loaded, plain = data(), describe(data)
        changed = sum(
            record is not None and record.data_sha256 not in (None, loaded.sha256) and record.run["data"] == plain
            for record in self.records
        )
        if changed:
            raise ValueError(
                f"{changed} runs have finished on other images or labels than {describe_value(plain)} contains now; restore "
                "the data, or train all runs again in another --out folder"
            )
        if loaded.repeats:
            text = f"{loaded.repeats:,} test images of {describe_value(plain)} are also training or validation images"
            print(f"note: {text}", file=sys.stderr)

    @property
    def requested_records(self) -> list[Record]:
        """The records of the requested runs, in the order of these runs. Runs that another process is training have no record
        and are left out.
        """
        return [record for record in self.records[: self.requested] if record is not None]

    def is_needed(self, index: int, todo: Sequence[int]) -> bool:
        """Whether a run must be trained because a run in `todo` depends on it. `index` and `todo` are positions in the list of
        runs. Runs in `todo` whose external weights are unavailable do not count.
        """
        return any(
            index in self.dependencies[other].values() and self.runs[other].run.init not in self.unavailable for other in todo
        )

    def next_group(self, workers: int) -> list[int]:
        """Choose the runs that a free worker trains next: one run, or several runs that are stacked as one model. Empty if no
        run can start now. `workers` is the number of workers.

        Runs that cannot be trained, because a dependency failed, get a failure record here.
        """
        while ready := self.ready():
            index = ready[0]
            earlier = self.dependency_records(index)
            obstacle = self.unavailable.get(self.runs[index].run.init) or blocked_by(earlier)
            if obstacle or None in earlier.values():  # None: another process trains the dependency
                self.queue.remove(index)
                self.end_run(index, record_failure(self.runs[index], self.out, self.recipe, obstacle) if obstacle else None)
                continue
            key = self.stack_keys[index]
            equal = [i for i in ready if self.stack_keys[i] == key and i not in self.alone and self.is_free(i)]
            share = -(-len(ready) // workers)  # leaves enough runs for the other workers
            group = [index] if index in self.alone else equal[: min(self.stack, share)]
            self.queue = [other for other in self.queue if other not in group]
            self.in_training.update(group)
            return group
        return []

    def ready(self) -> list[int]:
        """Return the waiting runs whose dependencies (the earlier runs that they need) have all ended, as positions in the list
        of runs.
        """
        unfinished = {*self.queue, *self.in_training}
        return [index for index in self.queue if unfinished.isdisjoint(self.dependencies[index].values())]

    def is_free(self, index: int) -> bool:
        """Whether all earlier runs that a run depends on have finished without an error. `index` is its position in the list of
        runs.
        """
        earlier = self.dependency_records(index)
        return None not in earlier.values() and not blocked_by(earlier)

    def dependency_records(self, index: int) -> dict[str, Record | None]:
        """Return the records of the earlier runs that a run depends on, as a dict by field ("init" or "teacher"). A record is
        None if there is none.
        """
        return {field: self.records[other] for field, other in self.dependencies[index].items()}

    def task(self, index: int) -> Task:
        """Return the task that is sent to a worker for a run. `index` is the position of the run in the list of runs."""
        entry = self.runs[index]
        folders = [folder(self.runs[i], self.out, self.recipe) for i in (index, *self.dependencies[index].values())]
        return Task(describe(entry.run), tags(entry, self.recipe), folders[0], dict(zip(self.dependencies[index], folders[1:])))

    def handle(self, group: Sequence[int], result: list[Record] | BaseException):
        """Process the result of a worker. `group` are the positions of the runs that it trained. `result` is the list of their
        records, or the exception that the worker raised.

        If a stack fails, or if the worker of a run is killed for the first time, each of its runs is tried once more, alone.
        """
        self.in_training.difference_update(group)
        killed = isinstance(result, BrokenProcessPool)
        if isinstance(result, list):
            for index, record in zip(group, result):
                self.end_run(index, record)
        elif self.stopped:
            pass  # the runs keep their checkpoints and can be resumed
        elif len(group) > 1 or (killed and group[0] not in self.alone):
            self.alone.update(group)
            self.queue[:0] = group
        else:
            self.end_run(group[0], record_failure(self.runs[group[0]], self.out, self.recipe, result))

    def end_run(self, index: int, record: Record | None):
        """Store the record of a run that has ended, and update the progress bar. `record` is None if another process trains the
        run.
        """
        self.records[index] = record
        self.bar.run_ended(self.runs[index], record)
        if record is not None and self.show:
            self.show(record)
        if record is not None and self.fail_fast and record.status == "failed":
            self.queue.clear()
            self.stopped = True


def dependencies_first(todo: Sequence[int], dependencies: Sequence[dict[str, int]]) -> list[int]:
    """Sort runs so that each comes after the runs that it depends on, and keep their order otherwise. `todo` are positions in
    the list of runs; `dependencies` gives, for each run, the positions of its dependencies by field.
    """
    selected, order = set(todo), {}  # a dict keeps the order

    def add(index: int):
        for other in dependencies[index].values():
            add(other)
        if index in selected:
            order[index] = None

    for index in todo:
        add(index)
    return list(order)


def blocked_by(earlier: dict[str, Record | None]) -> Exception | None:
    """Return the error because of which a run cannot be trained: an earlier run that it depends on has failed. Return None if
    there is no such error. `earlier` are the records of these earlier runs by field ("init" or "teacher").

    The first dependency without success decides. None as its record means that another process trains it.
    """
    for field, record in earlier.items():
        if record is None:
            return None
        if not record.finished:
            kind = Unavailable if record.status == "unavailable" else RuntimeError
            return kind(f"its {'initialization' if field == 'init' else 'teacher'} failed: {record.error}")
    return None


def unavailable_weights(runs: Iterable[Run]) -> dict[object, Unavailable]:
    """Download the external weights of these runs, each once. Returns a dict from the weights that cannot be obtained to the
    error for each.
    """
    found: dict[object, Unavailable] = {}
    for weights in dict.fromkeys(run.init for run in runs if isinstance(run.init, Weights)):
        try:
            weights.path()
        except Unavailable as error:
            found[weights] = error
    return found


def tags(entry: ArmRun, recipe: str) -> Tags:
    """Return the tags of a run, which are its names in a record: recipe, arm, role and baseline."""
    return Tags(recipe, entry.arm, entry.role, entry.baseline)


def record_failure(entry: ArmRun, out: str | Path, recipe: str, error: BaseException) -> Record | None:
    """Save the record of a run that raised an error, and return this record. It contains the Python traceback of the worker
    process.

    Returns None if another process trains the run. The record of a finished run is never replaced; it is returned.
    """
    from filelock import FileLock, Timeout

    if isinstance(error, Timeout):
        return None
    status, reason, traceback = "failed", f"{type(error).__name__}: {error}", None
    if isinstance(error, BrokenProcessPool):
        reason = "the worker process was killed twice (out of memory?)"
    elif isinstance(error, Unavailable):
        status, reason = "unavailable", str(error)
    elif error.__cause__ is not None:  # concurrent.futures puts the traceback of the worker there, in triple quotes
        traceback = str(error.__cause__).strip().removeprefix('"""').removesuffix('"""').strip()
    record, place = new_record(entry.run, tags(entry, recipe), status, reason, traceback), folder(entry, out, recipe)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / ".lock", timeout=0):
            done = recall(entry, out, recipe)
            if done is not None and done.finished:
                return done
            records.write_record(place, record)
    except Timeout:
        return None
    except (OSError, ValueError) as problem:
        record.error = f"{reason}; and {problem}"
    return record


def recall(entry: ArmRun, out: str | Path, recipe: str) -> Record | None:
    """Read the record of a run from its folder. Returns None if there is no record. Arm, role and baseline are replaced by
    those that the recipe gives the run now.

    Raises Damaged if the record cannot be read, or if the weights of a finished run differ from the record. Raises ValueError
    if the folder holds another run, or a record of another version of smallvit.
    """
    place = folder(entry, out, recipe)
    try:
        record = records.read_record(place)
    except (OSError, ValueError) as error:
        if of_another_version(place / records.RECORD):
            raise
        raise Damaged(place / records.RECORD) from error
    if record is None:
        return None
    if record.fingerprint != fingerprint(entry.run):
        raise ValueError(f"{place} holds another run than {entry.arm!r}; move it away, or choose another --out folder")
    if record.finished and records.damaged_weights(place, record):
        raise Damaged(place / records.WEIGHTS, place / records.RECORD)
    return replace(record, **tags(entry, recipe)._asdict())


def of_another_version(path: Path) -> bool:
    """Whether the record at `path` is intact, and cannot be read only because another version of smallvit has written it."""
    try:
        plain = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(plain, dict) or not plain.keys() >= set(records.NEEDED):
        return False
    return plain.get("format", 1) != records.FORMAT or bool(plain.keys() - {field.name for field in fields(Record)})


def warn_other_version(found: Iterable[Record | None]):
    """Print how many of these records were made with another version of smallvit. The records are still used."""
    current = records.code()["sha256"]
    count = sum(record is not None and bool(record.code) and record.code["sha256"] != current for record in found)
    if count:
        text = f"note: {count} runs were trained by another version of smallvit; a new --out folder trains them again"
        print(text, file=sys.stderr)


def folder(entry: ArmRun, out: str | Path, recipe: str) -> Path:
    """Return the folder of a run: `out/recipe/labels/arm/seed-fingerprint`. Different runs have different folders, and the
    names are readable for people.

    The name of the arm is reduced to letters, digits, "+", "-" and ".". Runs that are trained only because another run needs
    them lie in `dependencies`, because different comparisons may give them different names.
    """
    arm = re.sub(r"[^A-Za-z0-9+.-]+", "-", entry.arm)[:LONGEST_NAME].strip("-.") or "arm"
    labels = "all" if entry.labels is None else str(entry.labels)
    parts = (labels, "dependencies" if entry.role == "dependency" else arm)
    return Path(out, recipe, *parts, f"seed{entry.seed}-{fingerprint(entry.run)[:8]}")
