"""Launching: many runs over the cores of this machine, one process a core, one thread a process.

Each run is independent and each process has one thread, so results are bitwise the same for any number of workers. A worker
takes a run as plain JSON; what it leaves is its record. Nothing is lost when anything dies: finished runs are skipped the next
time, started ones go on from their checkpoint.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path

from smallvit import record as records
from smallvit.pretrained import Unavailable, Weights
from smallvit.progress import Bar
from smallvit.run import NAMING, Run, describe, fingerprint


def launch(
    runs: Sequence[Run],
    out: str | Path,
    *,
    recipe: str,
    source: str | Path | None = None,
    jobs: int | None = None,
    stack: int = 1,
    device: str = "cpu",
    retry: bool = False,
    fail_fast: bool = False,
    show: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Train every run that has no record yet, in `out/<recipe>/...`, and return all records in the order of `runs`.

    `jobs` workers, by default one for each core; `source` is the recipe's file, which workers load for the components defined
    there. With `stack` > 1 so many runs that differ only in their seed are trained as one model, which is faster where models
    are small: they agree with those trained alone to rounding, and their records say so. A failed run is reported at once,
    leaves a record that says why, and is tried again only with `retry=True`; one whose weights were not to be had is tried
    again every time. A worker that is killed has its run taken up once more from its checkpoint. `show(record)` is called for
    every record as it comes.
    """
    refuse_absent(device)
    if stack < 1:
        raise ValueError(f"stack is {stack}; expected how many runs to train as one, at least 1")
    for library in ("OMP", "MKL", "OPENBLAS"):  # read when a worker loads it; what torch is told does not reach the others
        os.environ[f"{library}_NUM_THREADS"] = "1"
    context = processes(device)
    asked = len(runs)
    runs, before = with_those_before(runs)
    found = [recall(run, out, recipe) for run in runs]
    todo: list[int] = []
    absent = unavailable([run for run, record in zip(runs, found) if record is None or record["status"] != "finished"])
    for at, record in enumerate(found):
        wanted = at < asked or any(at in before[one].values() for one in todo if runs[one].init not in absent)
        again = record is None or record["status"] == "unavailable" or (retry and record["status"] != "finished")
        if wanted and again:
            todo.append(at)
    announce_strangers(found)
    for data in dict.fromkeys(runs[at].data for at in todo):
        data()  # downloaded once and with its own bar, and what is wrong with it said once
    for reason in absent.values():
        print(f"unavailable: {reason}; the runs that start from it are left out", file=sys.stderr)
    bar = Bar(runs, found, todo)
    slots = [Slot(context, source, device) for _ in range(min(jobs or cores(), len(todo)))]
    queue, busy, alone = in_turn(todo, before), {}, set()  # alone: those that are to be trained so, since something went wrong
    kin = [fingerprint(at_seed(run, 0)) if stack > 1 else at for at, run in enumerate(runs)]

    def records_before(at: int) -> dict[str, dict | None]:
        return {field: found[one] for field, one in before[at].items()}

    def task(at: int) -> tuple:
        places = {field: folder(runs[one], out, recipe) for field, one in before[at].items()}
        return describe(runs[at]), {name: getattr(runs[at], name) for name in NAMING}, folder(runs[at], out, recipe), places

    def ended(at: int, record: dict | None):
        found[at] = record
        bar.tell(runs[at], record)
        if record is not None and show:
            show(record)
        if record is not None and fail_fast and record["status"] == "failed":
            queue.clear()

    try:
        while queue or busy:
            for slot in slots:
                if slot in busy.values():
                    continue
                under_way = {*queue, *(at for slot in busy.values() for at in slot.at)}
                ready = [at for at in queue if under_way.isdisjoint(before[at].values())]
                if not ready:
                    continue
                at = ready[0]
                stop = absent.get(runs[at].init) or obstacle(earlier := records_before(at))
                if stop or None in earlier.values():  # None: another process is at it
                    queue.remove(at)
                    ended(at, stop and failed(runs[at], out, recipe, stop))
                    continue
                alike = [one for one in ready if kin[one] == kin[at] and not obstacle(records_before(one))]
                share = -(-len(alike) // len(slots))  # as many as leave the other workers theirs
                group = [at] if at in alone else [one for one in alike if one not in alone][: min(stack, share)]
                for one in group:
                    queue.remove(one)
                busy[slot.start(group, [task(one) for one in group], recipe)] = slot
            through, _ = wait(busy, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in through:
                slot = busy.pop(future)
                error, group = future.exception(), slot.at
                if isinstance(error, BrokenProcessPool):
                    slot.replace()
                if error is None:
                    for at, record in zip(group, future.result()):
                        ended(at, record)
                elif len(group) > 1 or (isinstance(error, BrokenProcessPool) and group[0] not in alone):
                    alone.update(group)  # each once more by itself, so that one failure is no other run's
                    queue[:0] = group
                else:
                    ended(group[0], failed(runs[group[0]], out, recipe, error))
            bar.move([slot.progress[0] for slot in busy.values()])
    finally:
        for slot in slots:
            slot.kill()
        for slot in slots:
            slot.pool.shutdown(wait=True, cancel_futures=True)
        bar.close()
    return [record for record in found[:asked] if record is not None]


NEEDS = {"init": "start", "teacher": "teacher"}


def with_those_before(runs: Sequence[Run]) -> tuple[list[Run], list[dict[str, int]]]:
    """The runs, behind them those that must be trained before and that are not among them; and for each where its own are."""
    runs = list(runs)
    place = {fingerprint(run): at for at, run in enumerate(runs)}
    for run in runs:  # grows while it is walked: a start may have a start
        for other in run.before.values():
            if place.setdefault(fingerprint(other), len(runs)) == len(runs):
                runs.append(other)
    return runs, [{field: place[fingerprint(other)] for field, other in run.before.items()} for run in runs]


def in_turn(todo: Sequence[int], before: Sequence[dict[str, int]]) -> list[int]:
    """What is to be done in the order given, each right behind what it needs: so a comparison fills up evenly."""
    wanted, turn = set(todo), {}  # a dict keeps the order

    def add(at: int):
        for one in before[at].values():
            add(one)
        if at in wanted:
            turn[at] = None

    for at in todo:
        add(at)
    return list(turn)


def at_seed(run: Run, seed: int) -> Run:
    """The run, and all that is trained before it, at that seed: what runs have in common that differ in nothing else."""
    return replace(run, seed=seed, **{field: at_seed(other, seed) for field, other in run.before.items()})


def obstacle(before: dict[str, dict | None]) -> Exception | None:
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


def processes(device: str) -> BaseContext:
    """Where workers come from: on Linux they are forks of a server, which begins now to load what they need, and loads it once.

    An accelerator does not survive a fork, and other systems do not fork well: there each worker loads its own.
    """
    from multiprocessing import forkserver

    if sys.platform != "linux" or device != "cpu":
        return get_context("spawn")
    # with what the first step of an optimizer would load, and this process never needs
    forkserver.set_forkserver_preload(["smallvit.worker", "torch._dynamo", "torch.utils.flop_counter"])
    forkserver.ensure_running()
    return get_context("forkserver")


class Slot:
    """A worker process of its own, so that when it dies it is known which run died with it."""

    def __init__(self, context: BaseContext, source: str | Path | None, device: str):
        self.context, self.source, self.device = context, source, device
        self.at: list[int] = []  # which runs it is at
        self.replace()

    def replace(self):
        from smallvit.worker import prepare

        self.progress = self.context.RawArray("d", 1)  # steps done; no lock that a killed worker could keep
        self.pool = ProcessPoolExecutor(1, self.context, prepare, (self.progress, dict(os.environ)))

    def start(self, at: list[int], tasks: list[tuple], recipe: str) -> Future:
        from smallvit.worker import work

        self.at, self.progress[0] = at, 0
        words = (tasks, recipe, self.source, self.device)
        try:
            return self.pool.submit(work, *words)
        except BrokenProcessPool:  # it died idle
            self.replace()
            return self.pool.submit(work, *words)

    def kill(self):
        for process in list((self.pool._processes or {}).values()):
            process.kill()  # nothing to tidy up: checkpoints are written beside and moved into place


def failed(run: Run, out: str | Path, recipe: str, error: BaseException) -> dict | None:
    """Leave a record of a run that raised, and return it; None where another process is at it. A finished record stays."""
    from filelock import FileLock, Timeout

    from smallvit.train import blank

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


def announce_strangers(found: Sequence[dict | None]):
    """Say how many finished runs come from another version of the library: they are kept, and shown as they are."""
    now = records.code()["sha256"]
    strange = sum(record is not None and record["code"]["sha256"] != now for record in found)
    if strange:
        print(f"note: {strange} runs are of another version of smallvit; --out a new folder trains them again", file=sys.stderr)


def refuse_absent(device: str):
    """Refuse a device that torch does not know or this machine does not have."""
    import torch

    if device not in ("cpu", "cuda", "mps", "auto"):
        raise ValueError(f"device is {device!r}; expected cpu, cuda, mps or auto")
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device in there and not there[device]():
        raise ValueError(f"device is {device!r} but torch finds none here; take --device cpu, or install a torch built for it")


def folder(run: Run, out: str | Path, recipe: str) -> Path:
    """Where a run lives: readable, and different for different runs.

    What is trained before others and is no arm lies in one place for all of them: a part of a recipe may call it otherwise.
    """
    arm = re.sub(r"[^A-Za-z0-9+.-]+", "-", run.arm).strip("-") or "arm"
    arm = "before" if run.arm.startswith(("start of ", "teacher of ")) else arm
    return (
        Path(out) / recipe / str("all" if run.labels is None else run.labels) / arm / f"seed{run.seed}-{fingerprint(run)[:8]}"
    )


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
