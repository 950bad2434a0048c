"""Training on this machine: one worker process for each core or for each GPU, with one thread each.

Runs are independent and every worker has one thread, so the results are bitwise equal for any number of workers. A worker gets
a run as plain JSON and leaves a record.
"""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from smallvit.record import Record
from smallvit.train.failures import is_gpu_lost
from smallvit.words import how_many

from .engine import ONE_THREAD, Engine, Settings
from .gpus import VISIBLE
from .results import Killed
from .scheduler import Task
from .status import remove_progress

# Linux then gives large tensors memory in pages of 2 MB instead of 4 kB. New pages are a large part of the time that a
# convolution takes: a training step with the tokenizer of CCT takes three quarters of the time. Other systems ignore it.
HUGE_PAGES = "glibc.malloc.hugetlb=1"


FILES = 8  # that stay open in this process for each worker process
OTHER_FILES = 32  # that this process opens besides


class LocalEngine(Engine):
    """Trains runs in worker processes of this machine, each with one thread. `settings` are the `Settings` of the runs,
    `groups` is the largest number of groups of runs that could be trained at once, and `jobs` the number of processes; None
    means one for each core. `gpus` is the GPU of each process, as a value of CUDA_VISIBLE_DEVICES. If there are such values,
    they decide the number of processes.

    Raises ValueError if this process cannot open enough files for so many processes.
    """

    def __init__(self, settings: Settings, groups: int, jobs: int | None = None, gpus: Sequence[str] = ()):
        self.slots = max(1, min(len(gpus) or jobs or cores(), groups))
        allow_open_files(self.slots)
        context = get_context("spawn") if gpus else process_context(settings.device)
        self.forks = context.get_start_method() == "forkserver"
        variables = [{VISIBLE: gpu} for gpu in gpus] or [{}] * self.slots
        self.workers = [Worker(context, settings, variables[slot]) for slot in range(self.slots)]
        self.busy: dict[Future, Worker] = {}

    def start(self, group: list[int], tasks: list[Task]):
        worker = next(worker for worker in self.workers if worker not in self.busy.values())
        self.busy[worker.start(group, tasks)] = worker

    def wait(self, seconds: float) -> list[tuple[list[int], list[Record] | BaseException]]:
        ended, _ = wait(self.busy, timeout=seconds, return_when=FIRST_COMPLETED)
        found: list[tuple[list[int], list[Record] | BaseException]] = []
        for future in ended:
            worker, error = self.busy.pop(future), future.exception()
            if isinstance(error, BrokenProcessPool):
                worker.check_begun()
                worker.restart()
                error = Killed()
            elif is_gpu_lost(error):  # every later run of this process would fail as well
                worker.kill()
                worker.restart()
            found.append((worker.group, future.result() if error is None else error))
        return found

    def progress(self) -> list[tuple[list[int], float]]:
        return [(worker.group, worker.progress[0]) for worker in self.busy.values()]

    def close(self):
        if self.forks and any(worker.progress[0] < 0 for worker in self.workers):
            kill_server()
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.pool.shutdown(wait=True, cancel_futures=True)
        for worker in self.busy.values():  # whose runs were interrupted
            for place in worker.folders:
                remove_progress(place)


def allow_open_files(workers: int):
    """Raise the limit of open files of this process to what it needs for so many worker processes. Raise ValueError if the
    system does not allow that. Windows has no such limit.
    """
    try:
        import resource
    except ImportError:
        return
    needed = FILES * workers + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (OSError, ValueError) as error:
        processes_need = how_many(workers, "worker process needs", "worker processes need")
        raise ValueError(
            f"{processes_need} {needed:,} open files, and the limit is {hard:,}; use fewer --jobs, "
            "or raise the limit (ulimit -n)"
        ) from error


def process_context(device: str) -> Any:
    """Return the multiprocessing context that starts worker processes (processes that train runs) on this device.

    On Linux the workers are forks of a server process, which imports torch once; the server is started here. With an
    accelerator, which does not survive a fork, and on other systems, every worker imports torch itself.
    """
    from multiprocessing import forkserver

    if sys.platform != "linux" or device != "cpu":
        return get_context("spawn")
    # includes what the first optimizer step, the first digits, the first probe and the first record import: two seconds
    imported_once = ["torch._dynamo", "torch.utils.flop_counter", "sklearn.datasets", "sklearn.linear_model"]
    imported_once += ["einops._torch_specific", "safetensors.torch", "smallvit.explain", "smallvit.native"]
    forkserver.set_forkserver_preload(["smallvit.launch.worker", *imported_once])
    with delay_sigint(), environment_variables(worker_variables()):  # some are read when a process starts
        forkserver.ensure_running()
    return get_context("forkserver")


def kill_server():
    """Kill the server process from which workers are forked. If it is still importing torch, it would otherwise fork a worker
    after the command was stopped, and the traceback of this worker would appear in the terminal. The next worker starts another
    server. Other pools of this process whose workers are forked from the same server end, too.
    """
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)


def worker_variables() -> dict[str, str]:
    """Return the environment variables of a worker process: one thread, and large pages of memory unless the user has settings
    of their own.
    """
    return ONE_THREAD | {"GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", HUGE_PAGES)}


@contextmanager
def delay_sigint() -> Iterator[None]:
    """Context manager inside which new processes are started that never get Ctrl-C (SIGINT). Their parent process gets it, also
    if it comes meanwhile, and ends them. Unix only.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would let signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Context manager inside which the environment has additional `variables`, for processes that are started there."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Worker:
    """A worker process (a process that trains runs) and the runs that it is training at the moment. If the process dies, it is
    therefore known which runs were interrupted.

    Each worker has a process pool of its own, which is why the parent knows this.

    context    the multiprocessing context
    settings   what is the same for all runs
    variables  environment variables that only this process has, such as the GPU that it uses; see also `worker_variables`
    group      positions of the runs that it trains
    folders    the folders of these runs
    progress   shared array with one number: the steps done, or -1 before the worker has begun
    """

    def __init__(self, context: Any, settings: Settings, variables: Mapping[str, str] | None = None):
        self.context, self.settings, self.variables = context, settings, worker_variables() | dict(variables or {})
        self.group: list[int] = []
        self.folders: list[Path] = []
        self.restart()

    def restart(self):
        """Create a new worker process (a process that trains runs), as a process pool of size one. This method is called at the
        beginning, and again if the process has died.
        """
        from .worker import prepare

        self.progress = self.context.RawArray("d", 1)  # without a lock, which a killed worker would keep
        environment = dict(os.environ) | self.variables
        self.pool = ProcessPoolExecutor(1, self.context, prepare, (self.progress, environment))

    def start(self, group: list[int], tasks: list[Task]) -> Future:
        """Send a group of runs to the worker process, and return a future of their results. `group` are the positions of these
        runs in the list of all runs, and `tasks` are their settings and folders.
        """
        from .worker import work

        self.group, self.folders, self.progress[0] = group, [task.folder for task in tasks], -1
        try:
            with environment_variables(self.variables):  # the pool starts its process here, which then imports torch
                return self.pool.submit(work, tasks, self.settings)
        except BrokenProcessPool:  # the process died while it was idle
            self.restart()
            return self.start(group, tasks)

    def check_begun(self):
        """Raise ValueError if the process, which has died, ended with an error before it began to train. The next one would end
        in the same way.
        """
        processes = list((self.pool._processes or {}).values())
        self.pool.shutdown()  # waits until the exit status is known
        if self.progress[0] < 0 and any(process.exitcode == 1 for process in processes):
            raise ValueError(
                "a worker process ended with the error above before it could train; each worker process imports the script "
                'that calls launch, so write this call below the line: if __name__ == "__main__":'
            )

    def kill(self):
        """Kill the worker process. Its files stay intact, because every file is first written under a temporary name and then
        moved to its place.
        """
        for process in list((self.pool._processes or {}).values()):
            process.kill()


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
