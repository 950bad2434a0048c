"""Scheduler: which runs of a recipe are still to be trained, in which order, and what became of them.

A run is identified by its position in one list: the requested runs, then the runs that they depend on. Every run that ended has
a record on disk, also if it failed. So nothing is lost when a process dies.
"""

import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from smallvit import record as records
from smallvit.ablation import ArmRun, with_dependencies
from smallvit.components import canonical, describe_value
from smallvit.data import Dataset
from smallvit.data.dataset import current_content, loaded
from smallvit.pretrained import Unavailable, Weights
from smallvit.record import Record
from smallvit.run import Run, describe, fingerprint
from smallvit.storage import can_lock
from smallvit.train.failures import is_out_of_memory
from smallvit.train.fit import Tags
from smallvit.train.publish import tidy
from smallvit.words import how_many

from .progress import Bar
from .results import (
    Damaged,
    Killed,
    blocked_by,
    checkpoint_runs,
    folders,
    is_interruption,
    placed,
    recall,
    record_failure,
    tags,
)

START_ANEW = "train all runs again in another folder for the results (--out; of smallvit advise: --into)"


def check_unchanged(found: Iterable[Record | None], data: Callable, content: tuple[str, tuple[str, ...]] | None):
    """Raise ValueError if runs have finished on other images, labels or names of classes than a data set has now. `found` are
    the results of the runs, None for a run without any. The function `data` loads the data set, and `content` is the hash of
    its content and the names of its classes. Data that cannot be loaded any more (None) are no error.
    """
    if content is None:
        return
    plain = describe(data)
    changed = sum(
        record is not None and record.has_other_data(*content) and canonical(record.run["data"]) == canonical(plain)
        for record in found
    )
    if changed:
        runs_have = how_many(changed, "run has", "runs have")
        raise ValueError(
            f"{runs_have} finished on other images or labels than {describe_value(plain)} contains now; restore the "
            f"data, also the names of its classes, or {START_ANEW}"
        )


class Task(NamedTuple):
    """A run as it is sent to a worker process (a process that trains runs): its settings as JSON data, its names, its folder,
    and the folders of earlier runs that it needs, such as pretraining.
    """

    run: dict
    tags: Tags
    folder: Path
    dependencies: dict[str, Path]


class Scheduler:
    """The queue of the runs to train, which decides which run is trained next. It knows which runs have finished, and which
    earlier runs each run needs, such as pretraining.

    runs         the requested runs
    out, recipe  the runs lie in the folder `out/recipe`
    recipe_runs  all runs of the recipe. A dependency that is one of them keeps its arm and its folder
    retry        whether failed runs are trained again: True, False, or a function of their record
    stack        the largest number of runs that are trained together. These runs differ only in seed, learning rate and number
                 of labels. If they are interrupted, they are trained together again
    full_stacks  train as many runs together as `stack` allows, also if other workers then have nothing to do. Which runs are
                 trained together, and so how they round, then does not depend on the number of workers
    test_images  the runs are scored on test images: data without any are an error
    fail_fast    start no further run after the first failure
    show         called with each new record

    A run that occurs in several conditions, such as a reference without training at each training length, has one folder. It
    is trained once, and each condition gets its record. So does a run of several arms, such as an arm whose tuned settings are
    the common settings of another one.

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
        retry: bool | Callable[[Record], bool] = False,
        stack: int = 1,
        full_stacks: bool = False,
        test_images: bool = True,
        fail_fast: bool = False,
        show: Callable[[Record], None] | None = None,
    ):
        self.out, self.recipe, self.stack, self.fail_fast, self.show = out, recipe, stack, fail_fast, show
        self.requested, self.full_stacks = len(runs), full_stacks
        self.runs, self.dependencies = with_dependencies(runs, recipe_runs)
        self.folders = folders(self.runs, out, recipe)
        places: dict[Path, int] = {}
        self.same_run: dict[int, list[int]] = {}  # position of a run -> positions of equal runs in other conditions
        for index, place in enumerate(self.folders):
            first = places.setdefault(place, index)
            self.same_run.setdefault(first, []).append(index)
        self.records = [self.existing_record(entry, place) for entry, place in zip(self.runs, self.folders)]
        unfinished = [entry.run for entry, record in zip(self.runs, self.records) if record is None or not record.finished]
        self.unavailable = unavailable_weights(unfinished)
        untrained = [index for index in self.same_run if is_untrained(self.records[index], retry)]
        todo = [index for index in untrained if index < self.requested]
        while more := [index for index in untrained if index not in todo and self.is_needed(index, todo)]:
            todo += more
        warn_other_version(self.records)
        self.contents: dict[Callable, tuple[str, tuple[str, ...]]] = {}  # of each data set that was loaded here
        needed = dict.fromkeys(self.runs[index].run.data for index in todo)
        for data in needed:
            self.check_data(data, test_images)
        for data in dict.fromkeys(entry.run.data for entry in self.runs[: self.requested]):
            if data not in needed:
                check_unchanged(self.records, data, current_content(data))
        for start in dict.fromkeys(self.runs[index].run.init for index in todo):
            if isinstance(start, Weights):
                self.check_weights(start)
        for reason in self.unavailable.values():
            print(f"unavailable: {reason}; the runs that need these weights are left out", file=sys.stderr)
        self.queue, self.in_training = dependencies_first(todo, self.dependencies), set[int]()
        self.stopped = False  # by fail_fast
        self.tried = set[int]()  # runs that were interrupted in this launch, and are not tried once more
        self.stacks = self.interrupted_stacks()
        self.stack_keys = [e.run.stack_key if stack > 1 and e.run.stackable else i for i, e in enumerate(self.runs)]
        with suppress(OSError):
            can_lock(next(place for place in (Path(out), *Path(out).absolute().parents) if place.exists()))
        self.bar = Bar(self.runs, self.records, todo)

    def existing_record(self, entry: ArmRun, place: Path) -> Record | None:
        """Return the record (results) of a run from its folder `place`, or None if there is none. Damaged files are renamed to
        `*.damaged`, and the result is then None. A checkpoint beside the record of a finished run is deleted: a kill has left
        it.
        """
        try:
            record = recall(entry, self.out, self.recipe)
        except Damaged as error:
            error.set_aside()
            return None
        if record is not None and record.finished:
            tidy(place)
        return record

    def interrupted_stacks(self) -> dict[int, list[int]]:
        """Return which waiting runs were trained together as one model (a stack) when they were interrupted, as a dict from the
        position of each of these runs to the positions of all runs of its stack, in their order. Only together they can be
        continued from their checkpoint, so they form a group again.

        Stacks with a run that is not to be trained now, or with more runs than `stack` allows, are left out: their runs start
        again.
        """
        found: dict[int, list[int]] = {}
        for place in [self.folders[index] for index in self.queue] if self.stack > 1 else []:
            names = checkpoint_runs(place)  # none without a checkpoint
            if not 1 < len(names) <= self.stack:
                continue
            waiting = {fingerprint(self.runs[index].run): index for index in self.queue if index not in found}
            if waiting.keys() >= set(names):
                group = [waiting[name] for name in names]
                found |= {index: group for index in group}
        return found

    def check_data(self, data: Callable, test_images: bool):
        """Load a data set, and raise ValueError if its images, labels or names of classes have changed since earlier runs were
        trained on it, or if `test_images` are needed and there are none. The function `data` loads the data set.

        Also prints how many test images occur in the training images. The data are downloaded here, once, by one process.
        """
        loaded = read_data(data)
        if test_images:
            loaded.check_test_images()
        check_unchanged(self.records, data, loaded.content)
        self.contents[data] = loaded.content
        if loaded.repeats:
            text = f"{loaded.repeats:,} test images of {describe_value(describe(data))} are also training or validation images"
            print(f"note: {text}", file=sys.stderr)

    def check_weights(self, weights: Weights):
        """Raise ValueError if the file of pretrained weights has been replaced since earlier runs began with it."""
        sha256 = weights.sha256()
        begun = [record for entry, record in zip(self.runs, self.records) if record is not None and entry.run.init == weights]
        if changed := sum(record.has_other_weights(sha256) for record in begun):
            runs_have = how_many(changed, "run that has", "runs that have")
            raise ValueError(
                f"{runs_have} finished began with another file of the pretrained weights {weights.name} than there is now; put "
                f"the old file back, or {START_ANEW}"
            )

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
            group = self.stacks.get(index) or self.new_group(index, ready, workers)
            if any(i not in ready or not self.is_free(i) for i in group):  # a stack that cannot be continued as it was
                self.part(group)
                continue
            self.queue = [other for other in self.queue if other not in group]
            self.in_training.update(group)
            return group
        return []

    def new_group(self, index: int, ready: Sequence[int], workers: int) -> list[int]:
        """Return the positions of the runs that are trained together with a run. `index` is its position, `ready` are those of
        all runs that can start, and `workers` is the number of processes.
        """
        key, labels, rate = self.stack_keys[index], self.runs[index].labels, self.runs[index].run.lr
        equal = [i for i in ready if self.stack_keys[i] == key and i not in self.stacks and self.is_free(i)]
        # stable: seeds of one arm first, then the same number of labels
        equal.sort(key=lambda i: (self.runs[i].labels != labels, self.runs[i].run.lr != rate))
        if self.full_stacks:
            return equal[: self.stack]
        most = min(self.stack, -(-len(ready) // workers))  # leaves enough runs for the other workers
        groups = -(-len(equal) // most)
        return equal[: -(-len(equal) // groups)]  # groups of equal size: 5 and 5 instead of 8 and 2

    def part(self, group: Sequence[int]):
        """Forget that runs were trained together. `group` are their positions."""
        for index in group:
            self.stacks.pop(index, None)

    def halve(self, group: Sequence[int]):
        """Divide runs that were trained together into two groups. `group` are their positions. A single run is trained
        alone.
        """
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            self.stacks |= {index: [*half] for index in half}

    def ready(self) -> list[int]:
        """Return the positions of the waiting runs that are ready to start, as a list. A run is ready if all earlier runs that
        it needs, such as pretraining, have ended.

        Runs come last if others that could be trained together with them are not ready. With `full_stacks` they are left out,
        because otherwise the groups would depend on the order in which runs end.
        """
        unfinished = {*self.queue, *self.in_training}
        found = [index for index in self.queue if unfinished.isdisjoint(self.dependencies[index].values())]
        waiting = {self.stack_keys[index] for index in {*self.queue} - {*found}}
        if self.full_stacks:
            return [index for index in found if self.stack_keys[index] not in waiting]
        return sorted(found, key=lambda index: self.stack_keys[index] in waiting)  # stable: otherwise in the order of the queue

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
        dependencies = {field: self.folders[other] for field, other in self.dependencies[index].items()}
        return Task(describe(entry.run), tags(entry, self.recipe), self.folders[index], dependencies)

    def handle(self, group: Sequence[int], result: list[Record] | BaseException):
        """Process what a worker process returned. `group` are the positions of the runs that it trained, in the list of all
        runs. `result` is the list of their records (results), or an exception.

        What was no fault of the runs, such as a killed worker or a full disk, is tried once more: a stack with the same runs,
        so that it continues from its checkpoint. If a stack fails, or if its worker is killed or out of memory twice, it is
        divided into two halves, and these again, so that in the end only the runs at fault fail.
        """
        self.in_training.difference_update(group)
        interrupted = is_interruption(result)
        if isinstance(result, list):
            for index, record in zip(group, result):
                self.end_run(index, record)
        elif self.stopped and (interrupted or len(group) > 1):
            pass  # the runs keep their checkpoints and can be resumed
        elif interrupted and self.tried.isdisjoint(group):
            self.tried.update(group)
            self.stacks |= {index: [*group] for index in group if len(group) > 1}
            self.queue[:0] = group
        elif len(group) > 1 and (isinstance(result, Killed) or is_out_of_memory(result) or not interrupted):
            self.halve(group)
            self.queue[:0] = group
        else:
            for index in group:
                self.end_run(index, record_failure(self.runs[index], self.out, self.recipe, result))

    def end_run(self, index: int, record: Record | None):
        """Store the record (results) of a run that has ended, and update the progress bar. `index` is the position of the run
        in the list of all runs. `record` is None if another process trains this run.
        """
        for same in self.same_run[index]:
            self.records[same] = record and placed(record, tags(self.runs[same], self.recipe))
        record = self.records[index]
        data = self.runs[index].run.data
        if record is not None and record.finished and data in self.contents and record.has_other_data(*self.contents[data]):
            raise ValueError(
                f"{describe_value(describe(data))} contained other images or labels in a worker process than here; expected "
                "the same ones each time: draw random numbers from a generator with a fixed seed, and leave the files unchanged"
            )
        self.bar.run_ended(self.runs[index], record)
        if record is not None and self.show:
            self.show(record)
        if record is not None and self.fail_fast and record.status in ("failed", "interrupted"):
            self.queue.clear()
            self.stopped = True


def read_data(data: Callable) -> Dataset:
    """Return the data set that the function `data` loads. Raise ValueError, with the line of the user's code, if it fails."""
    try:
        return loaded(data)
    except ValueError:
        raise
    except Exception as error:
        line = records.user_line("".join(traceback.format_exception(error)))
        raise ValueError(
            f"the data {describe_value(describe(data))} cannot be loaded: {type(error).__name__}: {error}"
            + f" ({line})" * bool(line)
            + "; correct this, and start again"
        ) from error


def is_untrained(record: Record | None, retry: bool | Callable[[Record], bool]) -> bool:
    """Return whether a run is to be trained. `record` is the record (results) that it has, or None. Runs that were interrupted,
    and runs whose external weights were unavailable, are always tried again. Failed runs are tried again if `retry` is True, or
    if it is a function that returns True for their record.
    """
    if record is None or record.status in records.RETRIED:
        return True
    return not record.finished and (retry(record) if callable(retry) else retry)


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


def warn_other_version(found: Iterable[Record | None]):
    """Print how many finished runs were trained by another version of smallvit. `found` holds the records (saved results) of
    the runs, or None for a run without results. Records of other versions are still used.
    """
    current = records.code()["sha256"]
    codes = [record.code for record in found if record is not None and record.finished]
    count = sum(bool(code) and code.get("sha256") != current for code in codes)
    if count:
        were = how_many(count, "run was", "runs were")
        text = f"note: {were} trained by another version of smallvit; a new --out folder trains them again"
        print(text, file=sys.stderr)
