"""Launching runs on this machine: one worker process for each core, with one thread each.

Runs are independent and every worker has one thread, so the results are bitwise equal for any number of workers. A worker gets
a run as plain JSON and leaves a record. Nothing is lost when a process dies: finished runs are skipped the next time, and
interrupted ones continue from their checkpoint.
"""

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from smallvit.ablation import ArmRun
from smallvit.numerics import DEFAULT, Numerics, check_numerics
from smallvit.record import Record

from .scheduler import Scheduler, Task

READS = "test_reads.jsonl"  # which settings have been scored on which test images


def launch(
    runs: Sequence[ArmRun],
    out: str | Path,
    *,
    recipe: str,
    recipe_runs: Iterable[ArmRun] = (),
    source: str | Path | None = None,
    jobs: int | None = None,
    stack: int = 1,
    device: str = "cpu",
    numerics: Numerics = DEFAULT,
    retry: bool = False,
    fail_fast: bool = False,
    validation_only: bool = False,
    curves: bool = True,
    show: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Train runs in several worker processes. Return a list with the record (settings, results and costs) of each run, in the
    order of `runs`. Runs that already have a record in the folder `out` are not trained again.

    A run that fails leaves a record with its error, and the other runs go on. Failed runs are trained again only with
    `retry=True`; runs whose external weights were unavailable are tried again each time. If a worker is killed, its run is
    resumed once from its checkpoint.

    runs         the runs to train, as `ablate` returns them
    out, recipe  the runs lie in the folder `out/recipe`
    recipe_runs  all runs of the recipe, if `runs` is a part of them. A dependency that is one of them keeps its folder
    source       the recipe file, if it defines components that the runs use
    jobs         number of worker processes; None means one for each core
    stack        train so many runs that differ only in their seed and learning rate as one model. This is faster for small
                 models. The weights agree with those of single runs up to rounding
    device       "cpu", "cuda", "mps" or "auto"
    numerics     precision, attention kernel and compilation; `smallvit.launch.autotune.autotune` finds the fastest
    fail_fast    start no further run after the first failure
    validation_only  score the runs on validation images only; the test images cannot be read. `out` must be a folder in which
                 no other runs lie
    curves       measure the validation accuracy 12 times during training; False saves this time
    show         called with each new record

    Raises       ValueError for a device that is not there, for invalid options, for a folder that holds another run, and for
                 data that cannot be read or have changed.
    """
    check_device(device)
    if stack < 1:
        raise ValueError(f"stack is {stack}; expected the number of runs to train as one model, at least 1")
    if wrong := [run for run in runs if not isinstance(run, ArmRun)]:
        raise ValueError(f"runs contains {type(wrong[0]).__name__}; expected ArmRun(run=..., arm=...), as ablate returns")
    check_numerics(numerics, stack)
    for library in ("OMP", "MKL", "OPENBLAS"):  # read when a worker loads it; torch.set_num_threads does not reach them all
        os.environ[f"{library}_NUM_THREADS"] = "1"

    def try_again(record: Record) -> bool:
        return record.status == "unavailable" or (retry and not record.finished)

    context = process_context(device)
    schedule = Scheduler(
        runs,
        out,
        recipe,
        recipe_runs=recipe_runs,
        try_again=try_again,
        stack=stack,
        full_stacks=validation_only,  # choices by validation images must not depend on the number of workers
        fail_fast=fail_fast,
        show=show,
    )
    reads = None if validation_only else Path(out, recipe, READS)
    settings = (source, device, numerics, validation_only, reads, curves)
    workers = [Worker(context, *settings) for _ in range(min(jobs or cores(), len(schedule.queue)))]
    if workers:
        text = f"{recipe}: training {len(schedule.queue)} runs; starting {len(workers)} worker processes"
        print(text, file=sys.stderr, flush=True)
    busy: dict[Future, Worker] = {}
    try:
        while schedule.queue or busy:
            for worker in workers:
                if worker not in busy.values() and (group := schedule.next_group(len(workers))):
                    busy[worker.start(group, [schedule.task(index) for index in group])] = worker
            ended, _ = wait(busy, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in ended:
                worker = busy.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    worker.restart()
                schedule.handle(worker.group, future.result() if error is None else error)
            working = busy.values()
            schedule.bar.show_progress([worker.progress[0] for worker in working], [worker.group for worker in working])
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.pool.shutdown(wait=True, cancel_futures=True)
        schedule.bar.close()
    return schedule.requested_records


def process_context(device: str) -> Any:
    """Return the multiprocessing context that starts worker processes (processes that train runs) on this device.

    On Linux the workers are forks of a server process, which imports torch once; the server is started here. With an
    accelerator, which does not survive a fork, and on other systems, every worker imports torch itself.
    """
    from multiprocessing import forkserver

    if sys.platform != "linux" or device != "cpu":
        return get_context("spawn")
    # includes what the first optimizer step, the first digits and the first probe import: two seconds in each worker
    imported_once = ["torch._dynamo", "torch.utils.flop_counter", "sklearn.datasets", "sklearn.linear_model"]
    forkserver.set_forkserver_preload(["smallvit.launch.worker", *imported_once])
    with ignore_sigint():
        forkserver.ensure_running()
    return get_context("forkserver")


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Context manager inside which new processes are started that ignore Ctrl-C (SIGINT). Their parent process receives Ctrl-C
    and ends them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Worker:
    """A worker process (a process that trains runs) and the runs that it is training at the moment. If the process dies, it is
    therefore known which runs were interrupted.

    Each worker has a process pool of its own, which is why the parent knows this.

    context   the multiprocessing context
    source    the recipe file, or None
    reads     the file in which reads of the test images are counted, or None
    group     positions of the runs that it trains
    progress  shared array with one number: the steps done, or -1 before the worker has begun
    """

    def __init__(
        self,
        context: Any,
        source: str | Path | None,
        device: str,
        numerics: Numerics,
        validation_only: bool = False,
        reads: Path | None = None,
        curves: bool = True,
    ):
        self.context, self.settings = context, (source, device, numerics, validation_only, reads, curves)
        self.group: list[int] = []
        self.restart()

    def restart(self):
        """Create a new worker process (a process that trains runs), as a process pool of size one. This method is called at the
        beginning, and again if the process has died.
        """
        from .worker import prepare

        self.progress = self.context.RawArray("d", 1)  # without a lock, which a killed worker would keep
        self.pool = ProcessPoolExecutor(1, self.context, prepare, (self.progress, dict(os.environ)))

    def start(self, group: list[int], tasks: list[Task]) -> Future:
        """Send a group of runs to the worker process, and return a future of their results. `group` are the positions of these
        runs in the list of all runs, and `tasks` are their settings and folders.
        """
        from .worker import work

        self.group, self.progress[0] = group, -1
        try:
            return self.pool.submit(work, tasks, *self.settings)
        except BrokenProcessPool:  # the process died while it was idle
            self.restart()
            return self.start(group, tasks)

    def kill(self):
        """Kill the worker process. Its files stay intact, because every file is first written under a temporary name and then
        moved to its place.
        """
        for process in list((self.pool._processes or {}).values()):
            process.kill()


def check_device(device: str):
    """Raise ValueError if the device, such as "cpu" or "cuda", is unknown or is not available on this machine."""
    import torch

    if device not in ("cpu", "cuda", "mps", "auto"):
        raise ValueError(f"device is {device!r}; expected cpu, cuda, mps or auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}.get(device, bool)
        if device in ("cuda", "mps") and not found():
            raise ValueError(f"device is {device!r}, but torch finds no such GPU on this machine; use --device cpu")


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
