"""The code that a worker process executes: it has one thread and trains the runs that it is sent.

Importing torch takes as long as training a small run. On Linux a server process imports this module once, and every worker is
a fork of that server (see `local.process_context`). So everything that a run needs is imported at the top of this file.
"""

import gc
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

import torch

from smallvit import record as records
from smallvit.recipe import import_recipe
from smallvit.record import Record
from smallvit.run import Run, rebuild
from smallvit.train import fit_stacked

from .engine import Settings
from .scheduler import Task
from .status import ProgressFiles

records.code()  # hash the files as they were imported: they may be edited while this worker trains
PROGRESS: Any = [0.0]  # steps done, shared with the parent process


def prepare(progress: Any, environment: dict[str, str]):
    """Prepare a worker process (a process that trains runs): use one thread, set the environment variables in `environment`,
    and ignore Ctrl-C. `progress` is a shared array of one number, in which training steps are counted.

    The parent decides what Ctrl-C does. The worker exits when its parent has exited.
    """
    global PROGRESS
    gc.freeze()  # what was imported stays: searching it for garbage would take a quarter of a second, and copy its memory
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=exit_with, args=(parent_process(),), daemon=True).start()
    os.environ.clear()  # a server process has the environment of the moment when it was started
    os.environ.update(environment)
    torch.set_num_threads(1)
    PROGRESS = progress


def exit_with(parent: BaseProcess | None):
    """Wait until the parent process has ended, and then end this process. So no worker process is left behind."""
    if parent is not None:
        parent.join()
    os._exit(1)


def work(tasks: list[Task], settings: Settings) -> list[Record]:
    """Train one run, or several runs that differ only in seed, learning rate and number of labels, and return their records
    (results). `tasks` has the settings and the folder of each run, and `settings` what is the same for all runs: the recipe
    file, the device, the numerics, and what is measured.

    The recipe is needed if it defines components that the runs use. While the runs are trained, the file `progress.json`
    in their folders says how far they are.

    An error of a run is raised as it is, or as a RuntimeError if its class cannot be pickled.
    """

    def report(steps: float):
        PROGRESS[0] = steps

    report(0)
    if settings.source is not None:
        import_recipe(settings.source, settings.recipe_text)
    try:
        return fit_group([rebuild(task.run) for task in tasks], tasks, settings, report)
    except Exception as error:
        if (sent := picklable(error)) is not error:
            raise sent from error
        raise


def fit_group(runs: Sequence[Run], tasks: Sequence[Task], settings: Settings, report: Callable[[float], Any]) -> list[Record]:
    """Train one run, or several runs that differ only in seed, learning rate and number of labels, and return their records
    (results). `tasks` has their folders, and `settings` what is the same for all runs. `report` is called after each step with
    the number of steps that all runs have taken together.
    """
    _, tags, folders, dependencies = zip(*tasks)
    options: dict[str, Any] = settings._asdict() | {"tags": tags, "dependencies": dependencies}
    del options["source"], options["recipe_text"]
    with ProgressFiles(tasks) as files:

        def watch(step: int, accuracy: float | None):
            files.watch(step, accuracy)
            report(step * len(runs))

        return fit_stacked(runs, folders, watch=watch, **options)


def picklable(error: Exception) -> Exception:
    """Return an error, or a RuntimeError with its text if its class cannot be pickled. Another process can receive this error,
    which may be of a class that the user has defined.
    """
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
