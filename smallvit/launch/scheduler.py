"""Scheduler: which runs of a recipe are still to be trained, in which order, and what became of them.

A run is identified by its position in one list: the requested runs, then the runs that they depend on. Every run that ended has
a record on disk, also if it failed. So nothing is lost when a process dies.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
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
    """A run as it is sent to a worker process (a process that trains runs): its settings as JSON data, its names, its folder,
    and the folders of earlier runs that it needs, such as pretraining.
    """

    run: dict
    tags: Tags
    folder: Path
    dependencies: dict[str, Path]


class Killed(RuntimeError):
    """Error for runs whose worker process was killed, or whose machine was lost, while it trained them. It is not their fault,
    so they are tried once more.
    """


class Damaged(ValueError):
    """Error for a run whose results or weights file is damaged, so that the run must be trained again. `files` are the files to
    rename. The first one is the damaged file.
    """

    def __init__(self, *files: Path):
        super().__init__(f"{files[0]} is damaged")
        self.files = files

    def set_aside(self):
        """Rename the damaged files to `*.damaged`, and print a note. After that, the run can be trained again."""
        for path in self.files:
            os.replace(path, path.with_name(f"{path.name}.damaged"))
        print(f"note: {self}; renamed to *.damaged, and the run is trained again", file=sys.stderr)


class Scheduler:
    """The queue of the runs to train, which decides which run is trained next. It knows which runs have finished, and which
    earlier runs each run needs, such as pretraining.

    runs         the requested runs
    out, recipe  the runs lie in the folder `out/recipe`
    recipe_runs  all runs of the recipe. A dependency that is one of them keeps its arm and its folder
    try_again    a function of a record: whether a run that has this record is trained once more
    stack        the largest number of runs, equal except for seed and learning rate, that are trained together
    full_stacks  train as many runs together as `stack` allows, also if other workers then have nothing to do. Which runs are
                 trained together, and so how they round, then does not depend on the number of workers
    fail_fast    start no further run after the first failure
    show         called with each new record

    A run that occurs in several conditions, such as a reference without training at each training length, has one folder. It
    is trained once, and each condition gets its record.

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
        full_stacks: bool = False,
        fail_fast: bool = False,
        show: Callable[[Record], None] | None = None,
    ):
        self.out, self.recipe, self.stack, self.fail_fast, self.show = out, recipe, stack, fail_fast, show
        self.requested, self.full_stacks = len(runs), full_stacks
        self.runs, self.dependencies = with_dependencies(runs, recipe_runs)
        self.folders = [folder(entry, out, recipe) for entry in self.runs]
        places: dict[Path, int] = {}
        self.same_run: dict[int, list[int]] = {}  # position of a run -> positions of equal runs in other conditions
        for index, place in enumerate(self.folders):
            first = places.setdefault(place, index)
            self.same_run.setdefault(first, []).append(index)
        self.records = [self.existing_record(entry) for entry in self.runs]
        unfinished = [entry.run for entry, record in zip(self.runs, self.records) if record is None or not record.finished]
        self.unavailable = unavailable_weights(unfinished)
        untrained = [index for index in self.same_run if (record := self.records[index]) is None or try_again(record)]
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
        self.stack_keys = [e.run.stack_key if stack > 1 else index for index, e in enumerate(self.runs)]
        self.bar = Bar(self.runs, self.records, todo)

    def existing_record(self, entry: ArmRun) -> Record | None:
        """Return the record (results) of a run from its folder, or None if there is none. Damaged files are renamed to
        `*.damaged`, and the result is then None.
        """
        try:
            return recall(entry, self.out, self.recipe)
        except Damaged as error:
            error.set_aside()
            return None

    def check_data(self, data: Callable):
        """Load a data set, and raise ValueError if its images or labels have changed since earlier runs were trained on it. The
        function `data` loads the data set.

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
        """The records (results) of the requested runs as a list, in the order of these runs. Runs without a record are left
        out, because another process is training them.
        """
        return [record for record in self.records[: self.requested] if record is not None]

    def is_needed(self, index: int, todo: Sequence[int]) -> bool:
        """Return whether a run must be trained because another run needs it first, for example for pretraining. `index` is the
        position of the earlier run in the list of all runs. `todo` are the positions of the runs that may need it.

        Runs in `todo` whose external weights are unavailable do not count.
        """
        return any(
            index in self.dependencies[other].values() and self.runs[other].run.init not in self.unavailable for other in todo
        )

    def next_group(self, workers: int) -> list[int]:
        """Choose the runs that a free worker process trains next, and return their positions in the list of all runs. The
        result is one run, or several that are trained together as one model. `workers` is the number of processes: a group is
        not larger than the share of one process, so that the others also have work, except with the option `full_stacks`.

        The list is empty if no run can start now.

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
            rate = self.runs[index].run.lr
            equal = [i for i in ready if self.stack_keys[i] == key and i not in self.alone and self.is_free(i)]
            equal.sort(key=lambda i: self.runs[i].run.lr != rate)  # stable: seeds of one arm first
            share = self.stack if self.full_stacks else -(-len(ready) // workers)  # leaves enough runs for the other workers
            group = [index] if index in self.alone else equal[: min(self.stack, share)]
            self.queue = [other for other in self.queue if other not in group]
            self.in_training.update(group)
            return group
        return []

    def ready(self) -> list[int]:
        """Return the positions of the waiting runs that are ready to start, as a list. A run is ready if all earlier runs that
        it needs, such as pretraining, have ended.

        With `full_stacks`, this must hold for all runs that could be trained together with it, because otherwise the groups
        would depend on the order in which runs end.
        """
        unfinished = {*self.queue, *self.in_training}
        found = [index for index in self.queue if unfinished.isdisjoint(self.dependencies[index].values())]
        waiting = {self.stack_keys[index] for index in {*self.queue} - {*found}} if self.full_stacks else ()
        return [index for index in found if self.stack_keys[index] not in waiting]

    def is_free(self, index: int) -> bool:
        """Return whether all earlier runs that a run needs, such as pretraining, have finished without an error. `index` is the
        position of the run in the list of all runs.
        """
        earlier = self.dependency_records(index)
        return None not in earlier.values() and not blocked_by(earlier)

    def dependency_records(self, index: int) -> dict[str, Record | None]:
        """Return the records (saved results) of the earlier runs that a run needs, as a dict. The key is "init" for the run
        that gives the initial weights, and "teacher" for a teacher. A key is absent if there is no such earlier run. `index` is
        the position of the run in the list of all runs.

        A record is None if there is none.
        """
        return {field: self.records[other] for field, other in self.dependencies[index].items()}

    def task(self, index: int) -> Task:
        """Return the `Task` that describes a run for a worker process (a process that trains runs). `index` is the position of
        the run in the list of all runs.
        """
        entry = self.runs[index]
        folders = [self.folders[i] for i in (index, *self.dependencies[index].values())]
        return Task(describe(entry.run), tags(entry, self.recipe), folders[0], dict(zip(self.dependencies[index], folders[1:])))

    def handle(self, group: Sequence[int], result: list[Record] | BaseException):
        """Process what a worker process returned. `group` are the positions of the runs that it trained, in the list of all
        runs. `result` is the list of their records (results), or an exception.

        If a stack fails, or if the worker of a run is killed for the first time, each of its runs is tried once more, alone.
        """
        self.in_training.difference_update(group)
        killed = isinstance(result, Killed)
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
        """Store the record (results) of a run that has ended, and update the progress bar. `index` is the position of the run
        in the list of all runs. `record` is None if another process trains this run.
        """
        for same in self.same_run[index]:
            self.records[same] = record and replace(record, **tags(self.runs[same], self.recipe)._asdict())
        record = self.records[index]
        self.bar.run_ended(self.runs[index], record)
        if record is not None and self.show:
            self.show(record)
        if record is not None and self.fail_fast and record.status == "failed":
            self.queue.clear()
            self.stopped = True


def dependencies_first(todo: Sequence[int], dependencies: Sequence[dict[str, int]]) -> list[int]:
    """Sort runs so that each run comes after the earlier runs that it needs, such as pretraining. Return the sorted positions;
    no other run is added. `todo` are positions in the list of all runs. `dependencies` has one dict for each run of that list,
    from "init" (initial weights) or "teacher" to the position of the earlier run.

    Otherwise the order stays.
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
    """Return the error that prevents the training of a run: an earlier run that it needs has failed. Return None if there is no
    such error. `earlier` is a dict with the records (results) of these earlier runs.

    Its keys are "init" and "teacher".

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
    """Download the pretrained weights that these runs use. Return a dict from the weights that could not be obtained to the
    error.
    """
    found: dict[object, Unavailable] = {}
    for weights in dict.fromkeys(run.init for run in runs if isinstance(run.init, Weights)):
        try:
            weights.path()
        except Unavailable as error:
            found[weights] = error
    return found


def tags(entry: ArmRun, recipe: str) -> Tags:
    """Return the place of a run in the comparison, as a `Tags` object: the recipe, the arm (variant), its role (such as
    "baseline" or "technique"), its baseline, the training length, the tuning, and the looks (numbers of seeds at which the
    comparison is tested). `entry` is the run, and `recipe` is the name of the recipe file.
    """
    looks = None if entry.looks is None else list(entry.looks)
    return Tags(recipe, entry.arm, entry.role, entry.baseline, entry.length, entry.tuning, looks)


def record_failure(entry: ArmRun, out: str | Path, recipe: str, error: BaseException) -> Record | None:
    """Save the record (settings and error) of a run that failed with `error`, and return this record. `entry` is the run, `out`
    is the folder of all results, and `recipe` is the name of the recipe file.

    The record contains the Python traceback of the worker process.

    Returns None if another process trains the run. The record of a finished run is never replaced; it is returned.
    """
    from filelock import FileLock, Timeout

    if isinstance(error, Timeout):
        return None
    status, reason, traceback = "failed", f"{type(error).__name__}: {error}", None
    if isinstance(error, Killed):
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
    """Return the record (results) of a run from its folder, or None if there is none. `entry` is the run. `out` is the folder
    of all results, and `recipe` is the name of the recipe file.

    Arm, role and baseline are replaced by those that the recipe gives the run now. The looks (numbers of seeds at which the
    comparison is tested) of the stored record stay if the run has none.

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
    current = tags(entry, recipe)
    return replace(record, **current._replace(looks=current.looks or record.looks)._asdict())


def of_another_version(path: Path) -> bool:
    """Return whether the record (saved results) of a run is intact, but has other fields, because another version of smallvit
    has written it. `path` is the file of the record. The result is False if the file is damaged.
    """
    try:
        plain = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(plain, dict) or not plain.keys() >= set(records.NEEDED):
        return False
    return plain.get("format", 1) != records.FORMAT or bool(plain.keys() - {field.name for field in fields(Record)})


def warn_other_version(found: Iterable[Record | None]):
    """Print how many runs were trained by another version of smallvit. `found` holds the records (saved results) of the runs,
    or None for a run without results. Records of other versions are still used.
    """
    current = records.code()["sha256"]
    count = sum(record is not None and bool(record.code) and record.code["sha256"] != current for record in found)
    if count:
        text = f"note: {count} runs were trained by another version of smallvit; a new --out folder trains them again"
        print(text, file=sys.stderr)


def folder(entry: ArmRun, out: str | Path, recipe: str) -> Path:
    """Return the path of the folder of a run: `out/recipe/labels/arm/seed-fingerprint`. It contains the number of labelled
    images, the arm (variant), the seed and a hash of the settings.

    Different runs have different folders, and the names are readable for people. If there is no record in this folder, but the
    same run has one under another name of the arm, the result is that folder: the arm was renamed.

    The name of the arm is reduced to letters, digits, "+", "-" and ".". Runs that are trained only because another run needs
    them lie in `dependencies`, because different comparisons may give them different names.
    """
    arm = re.sub(r"[^A-Za-z0-9+.-]+", "-", entry.arm)[:LONGEST_NAME].strip("-.") or "arm"
    labels = "all" if entry.labels is None else str(entry.labels)
    arms, name = Path(out, recipe, labels), f"seed{entry.seed}-{fingerprint(entry.run)[:8]}"
    place = arms / ("dependencies" if entry.role == "dependency" else arm) / name
    if entry.role == "dependency" or (place / records.RECORD).exists():
        return place
    others = [path.parent for path in sorted(arms.glob(f"*/{name}/{records.RECORD}")) if path.parts[-3] != "dependencies"]
    return next((other for other in others if holds(other, entry.run)), place)


def holds(place: Path, run: Run) -> bool:
    """Return whether a folder has an intact record (saved results) of a run. `place` is the folder, and `run` is the run."""
    try:
        record = records.read_record(place)
    except (OSError, ValueError):
        return False
    return record is not None and record.fingerprint == fingerprint(run)
