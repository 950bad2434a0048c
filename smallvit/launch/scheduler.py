"""The schedule: what of a recipe is still to be trained, in which order, and what came of it.

A run is named by its place in a list: those asked for, behind them those that must be trained before. Nothing is lost when
anything dies: what has a record is not trained again, and what failed has one that says why.
"""

import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from smallvit import record as records
from smallvit.components import in_words
from smallvit.pretrained import Unavailable, Weights
from smallvit.run import NAMING, Run, describe, fingerprint

from .progress import Bar


class Scheduler:
    """The runs of a recipe in turn, by their records and by what they need.

    `again(record)` says whether a run that has a record is to be trained once more. With `stack` > 1 runs that differ in their
    seed alone are handed out together. `show(record)` is called for every record as it comes; at the first failure
    `fail_fast` leaves the rest.

    Raises   ValueError where the folder of a run holds another, or where data or a file of weights cannot be read.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        out: str | Path,
        recipe: str,
        *,
        again: Callable[[dict], bool],
        stack: int = 1,
        fail_fast: bool = False,
        show: Callable[[dict], None] | None = None,
    ):
        self.out, self.recipe, self.stack, self.fail_fast, self.show = out, recipe, stack, fail_fast, show
        self.asked = len(runs)
        self.runs, self.dependencies = with_dependencies(runs)
        self.found = [recall(run, out, recipe) for run in self.runs]
        unfinished = [run for run, record in zip(self.runs, self.found) if record is None or record["status"] != "finished"]
        self.absent = unavailable(unfinished)
        wanted = [at for at, record in enumerate(self.found) if record is None or again(record)]
        todo = [at for at in wanted if at < self.asked]
        while more := [at for at in wanted if at not in todo and self.needed(at, todo)]:  # one before may need another
            todo += more
        warn_other_version(self.found)
        for data in dict.fromkeys(self.runs[at].data for at in todo):
            self.look_at(data)
        for reason in self.absent.values():
            print(f"unavailable: {reason}; the runs that start from it are left out", file=sys.stderr)
        self.queue, self.under_way = in_turn(todo, self.dependencies), set()
        self.stopped = False  # at the first failure
        self.alone: set[int] = set()  # to be trained so, since something went wrong in company
        self.kin = [fingerprint(run.at_seed(0)) if stack > 1 else at for at, run in enumerate(self.runs)]
        self.bar = Bar(self.runs, self.found, todo)

    def look_at(self, data: Callable):
        """Refuse data that are not those of the runs that have finished: they would stand in one table. Say what is odd."""
        loaded, plain = data(), describe(data)  # downloaded once and with its own bar, and what is wrong with it said once
        done = [record for record in self.found if record is not None and record.get("data_sha256")]
        if other := sum(record["run"]["data"] == plain and record["data_sha256"] != loaded.sha256 for record in done):
            raise ValueError(
                f"{other} runs have finished on other images or labels than {in_words(plain)} gives today; put those back, or "
                "train all runs on these in another --out"
            )
        if loaded.repeats:
            said = f"{loaded.repeats:,} test images of {in_words(plain)} are training or validation images too"
            print(f"note: {said}", file=sys.stderr)

    @property
    def records(self) -> list[dict]:
        """Those there are, in the order in which the runs were asked for."""
        return [record for record in self.found[: self.asked] if record is not None]

    def needed(self, at: int, todo: Sequence[int]) -> bool:
        """Whether any of those is to be trained from this one, and can be."""
        return any(at in self.dependencies[one].values() and self.runs[one].init not in self.absent for one in todo)

    def take(self, workers: int) -> list[int]:
        """What one of so many workers is to train now: one run, or a stack; nothing where all that is left must wait."""
        while ready := self.ready():
            at = ready[0]
            earlier = self.dependency_records(at)
            stop = self.absent.get(self.runs[at].init) or blocked_by(earlier)
            if stop or None in earlier.values():  # None: another process is at it
                self.queue.remove(at)
                self.ended(at, stop and failed(self.runs[at], self.out, self.recipe, stop))
                continue
            alike = [one for one in ready if self.kin[one] == self.kin[at] and one not in self.alone and self.free(one)]
            share = -(-len(ready) // workers)  # as many as leave the other workers theirs
            group = [at] if at in self.alone else alike[: min(self.stack, share)]
            self.queue = [one for one in self.queue if one not in group]
            self.under_way.update(group)
            return group
        return []

    def ready(self) -> list[int]:
        """Of those in the queue the ones that wait for nothing."""
        unfinished = {*self.queue, *self.under_way}
        return [at for at in self.queue if unfinished.isdisjoint(self.dependencies[at].values())]

    def free(self, at: int) -> bool:
        """Whether all that the run needs has finished."""
        earlier = self.dependency_records(at)
        return None not in earlier.values() and not blocked_by(earlier)

    def dependency_records(self, at: int) -> dict[str, dict | None]:
        return {field: self.found[one] for field, one in self.dependencies[at].items()}

    def task(self, at: int) -> tuple:
        """A run as a worker takes it: see `smallvit.launch.worker.Task`."""
        run, places = self.runs[at], {field: self.folder(one) for field, one in self.dependencies[at].items()}
        return describe(run), {name: getattr(run, name) for name in NAMING}, self.folder(at), places

    def folder(self, at: int) -> Path:
        return folder(self.runs[at], self.out, self.recipe)

    def came(self, group: Sequence[int], result: list[dict] | BaseException):
        """A worker has come back: with a record of each, or with what went wrong."""
        self.under_way.difference_update(group)
        killed = isinstance(result, BrokenProcessPool)
        if isinstance(result, list):
            for at, record in zip(group, result):
                self.ended(at, record)
        elif self.stopped:
            pass  # they are left as they are, to be gone on with
        elif len(group) > 1 or (killed and group[0] not in self.alone):
            self.alone.update(group)  # each once more by itself, so that one failure is no other run's
            self.queue[:0] = group
        else:
            self.ended(group[0], failed(self.runs[group[0]], self.out, self.recipe, result))

    def ended(self, at: int, record: dict | None):
        """A run is over; None if another process is at it."""
        self.found[at] = record
        self.bar.tell(self.runs[at], record)
        if record is not None and self.show:
            self.show(record)
        if record is not None and self.fail_fast and record["status"] == "failed":
            self.queue.clear()
            self.stopped = True


NEEDS = {"init": "start", "teacher": "teacher"}


def with_dependencies(runs: Sequence[Run]) -> tuple[list[Run], list[dict[str, int]]]:
    """The runs, behind them those that must be trained before and that are not among them; and for each where its own are."""
    runs = list(runs)
    place = {fingerprint(run): at for at, run in enumerate(runs)}
    for run in runs:  # grows while it is walked: a start may have a start
        for other in run.dependencies.values():
            if place.setdefault(fingerprint(other), len(runs)) == len(runs):
                runs.append(other)
    return runs, [{field: place[fingerprint(other)] for field, other in run.dependencies.items()} for run in runs]


def in_turn(todo: Sequence[int], dependencies: Sequence[dict[str, int]]) -> list[int]:
    """What is to be done in the order given, each right behind what it needs: so a comparison fills up evenly."""
    wanted, turn = set(todo), {}  # a dict keeps the order

    def add(at: int):
        for one in dependencies[at].values():
            add(one)
        if at in wanted:
            turn[at] = None

    for at in todo:
        add(at)
    return list(turn)


def blocked_by(before: dict[str, dict | None]) -> Exception | None:
    """What keeps a run from being trained, by the records of those before it; the first that has not finished decides."""
    for field, record in before.items():
        if record is None:
            return None
        if record["status"] != "finished":
            kind = Unavailable if record["status"] == "unavailable" else RuntimeError
            return kind(f"its {NEEDS[field]} failed: {record['error']}")
    return None


def unavailable(runs: Sequence[Run]) -> dict[Weights, Unavailable]:
    """The weights that these runs ask for and that cannot be had; the others are downloaded now, by one process."""
    absent = {}
    for weights in dict.fromkeys(run.init for run in runs if isinstance(run.init, Weights)):
        try:
            weights.path()
        except Unavailable as error:
            absent[weights] = error
    return absent


def failed(run: Run, out: str | Path, recipe: str, error: BaseException) -> dict | None:
    """Leave a record of a run that raised, and return it; None where another process is at it. A finished record stays."""
    from filelock import FileLock, Timeout

    from smallvit.train.fit import blank

    killed = isinstance(error, BrokenProcessPool)
    reason = "the worker was killed twice (out of memory?)" if killed else f"{type(error).__name__}: {error}"
    status = "failed"
    if isinstance(error, Unavailable):
        status, reason = "unavailable", str(error)
    record, path = blank(run, recipe, status, reason), folder(run, out, recipe)
    if isinstance(error, Timeout):
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / ".lock", timeout=0):
            done = recall(run, out, recipe)
            if done is not None and done["status"] == "finished":
                return done
            records.write_record(path, record)
    except Timeout:
        return None
    except (OSError, ValueError) as full:
        record["error"] += f"; and {full}"
    return record


def recall(run: Run, out: str | Path, recipe: str) -> dict | None:
    """The record of that run, if there is one, under the names that the recipe gives it today.

    Raises ValueError if its folder holds another run.
    """
    path = folder(run, out, recipe)
    record = records.read_record(path)
    if record is None:
        return None
    if record["fingerprint"] != fingerprint(run):
        raise ValueError(f"{path} holds another run than {run.arm!r}; move it away, or choose another --out")
    return record | {"recipe": recipe} | {name: getattr(run, name) for name in NAMING}


def warn_other_version(found: Sequence[dict | None]):
    """Say how many finished runs come from another version of the library: they are kept, and shown as they are."""
    now = records.code()["sha256"]
    strange = sum(record is not None and record["code"]["sha256"] != now for record in found)
    if strange:
        print(f"note: {strange} runs are of another version of smallvit; --out a new folder trains them again", file=sys.stderr)


def folder(run: Run, out: str | Path, recipe: str) -> Path:
    """Where a run lives: readable, and different for different runs.

    What is trained before others and is no arm lies in one place for all of them: a part of a recipe may call it otherwise.
    """
    arm = re.sub(r"[^A-Za-z0-9+.-]+", "-", run.arm).strip("-") or "arm"
    arm = "before" if run.arm.startswith(("start of ", "teacher of ")) else arm
    return (
        Path(out) / recipe / str("all" if run.labels is None else run.labels) / arm / f"seed{run.seed}-{fingerprint(run)[:8]}"
    )
