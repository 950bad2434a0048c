"""Launching: many runs over the cores of this machine, one process a core, one thread a process.

Each run is independent and each process has one thread, so results are bitwise the same for any number of workers. A worker
takes a run as plain JSON; what it leaves is its record. Nothing is lost when anything dies: finished runs are skipped the next
time, started ones go on from their checkpoint.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path

from smallvit.numerics import DEFAULT, Numerics, check_numerics
from smallvit.run import Run

from .scheduler import Scheduler


def launch(
    runs: Sequence[Run],
    out: str | Path,
    *,
    recipe: str,
    source: str | Path | None = None,
    jobs: int | None = None,
    stack: int = 1,
    device: str = "cpu",
    numerics: Numerics = DEFAULT,
    retry: bool = False,
    fail_fast: bool = False,
    show: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Train every run that has no record yet, in `out/<recipe>/...`, and return all records in the order of `runs`.

    `jobs` workers, by default one for each core; `source` is the recipe's file, which workers load for the components defined
    there. With `stack` > 1 so many runs that differ only in their seed are trained as one model, which is faster where models
    are small: they agree with those trained alone to rounding, and their records say so. All steps are computed as `numerics`
    says, which `smallvit.launch.autotune.autotune` finds; the records say that too. A failed run is reported at once,
    leaves a record that says why, and is tried again only with `retry=True`; one whose weights were not to be had is tried
    again every time. A worker that is killed has its run taken up once more from its checkpoint. `show(record)` is called for
    every record as it comes.
    """
    refuse_absent(device)
    if stack < 1:
        raise ValueError(f"stack is {stack}; expected how many runs to train as one, at least 1")
    check_numerics(numerics, stack)
    for library in ("OMP", "MKL", "OPENBLAS"):  # read when a worker loads it; what torch is told does not reach the others
        os.environ[f"{library}_NUM_THREADS"] = "1"

    def again(record: dict) -> bool:
        return record["status"] == "unavailable" or (retry and record["status"] != "finished")

    context = processes(device)
    schedule = Scheduler(runs, out, recipe, again=again, stack=stack, fail_fast=fail_fast, show=show)
    slots = [Worker(context, source, device, numerics) for _ in range(min(jobs or cores(), len(schedule.queue)))]
    busy: dict[Future, Worker] = {}
    try:
        while schedule.queue or busy:
            for slot in slots:
                if slot not in busy.values() and (group := schedule.take(len(slots))):
                    busy[slot.start(group, [schedule.task(at) for at in group], recipe)] = slot
            through, _ = wait(busy, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in through:
                slot = busy.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    slot.replace()
                schedule.came(slot.at, future.result() if error is None else error)
            schedule.bar.move([slot.progress[0] for slot in busy.values()])
    finally:
        for slot in slots:
            slot.kill()
        for slot in slots:
            slot.pool.shutdown(wait=True, cancel_futures=True)
        schedule.bar.close()
    return schedule.records


def processes(device: str) -> BaseContext:
    """Where workers come from: on Linux they are forks of a server, which begins now to load what they need, and loads it once.

    An accelerator does not survive a fork, and other systems do not fork well: there each worker loads its own.
    """
    from multiprocessing import forkserver

    if sys.platform != "linux" or device != "cpu":
        return get_context("spawn")
    # with what the first step of an optimizer, the first digits and the first probe would load: two seconds of each worker's
    loaded_once = ["torch._dynamo", "torch.utils.flop_counter", "sklearn.datasets", "sklearn.linear_model"]
    forkserver.set_forkserver_preload(["smallvit.launch.worker", *loaded_once])
    with ignore_sigint():
        forkserver.ensure_running()
    return get_context("forkserver")


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """A process that is started meanwhile does not hear Ctrl-C, not while it loads either; its parent decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Worker:
    """A worker process of its own, so that when it dies it is known which run died with it."""

    def __init__(self, context: BaseContext, source: str | Path | None, device: str, numerics: Numerics):
        self.context, self.settings = context, (source, device, numerics)
        self.at: list[int] = []  # which runs it is at
        self.replace()

    def replace(self):
        from .worker import prepare

        self.progress = self.context.RawArray("d", 1)  # steps done; no lock that a killed worker could keep
        self.pool = ProcessPoolExecutor(1, self.context, prepare, (self.progress, dict(os.environ)))

    def start(self, at: list[int], tasks: list[tuple], recipe: str) -> Future:
        from .worker import work

        self.at, self.progress[0] = at, 0
        words = (tasks, recipe, *self.settings)
        try:
            return self.pool.submit(work, *words)
        except BrokenProcessPool:  # it died idle
            self.replace()
            return self.pool.submit(work, *words)

    def kill(self):
        for process in list((self.pool._processes or {}).values()):
            process.kill()  # nothing to tidy up: checkpoints are written beside and moved into place


def refuse_absent(device: str):
    """Refuse a device that torch does not know or this machine does not have."""
    import torch

    if device not in ("cpu", "cuda", "mps", "auto"):
        raise ValueError(f"device is {device!r}; expected cpu, cuda, mps or auto")
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device in there and not there[device]():
        raise ValueError(f"device is {device!r} but torch finds none here; take --device cpu, or install a torch built for it")


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
