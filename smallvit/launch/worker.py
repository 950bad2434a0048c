"""A worker: a process with one thread that trains the runs it is handed, one after another.

Loading torch takes as long as training a small run. On Linux a server loads this file once and every worker is a fork of it
(see `launch.processes`), so what a run needs is imported here, at the top.
"""

import os
import signal
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

import torch

from smallvit import record as records
from smallvit.numerics import Numerics
from smallvit.recipe import load_recipe
from smallvit.run import rebuild
from smallvit.train import fit_stacked

records.code()  # of the files as they were loaded: somebody may edit them while this worker trains
PROGRESS = None  # where this worker tells its steps


def prepare(progress, environment: dict[str, str]):
    """Make a worker: one thread, ignore_sigint to Ctrl-C (its parent decides), gone when its parent is, in its parent's environment."""
    global PROGRESS
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    os.environ.clear()  # a server knows only the one that it was started in
    os.environ.update(environment)
    torch.set_num_threads(1)
    PROGRESS = progress


Task = tuple[dict, dict, Path, dict[str, Path]]
"""A run as plain JSON, its names, its folder, and the folders of those before it, by the fields that ask for them."""


def work(tasks: list[Task], recipe: str, source: str | Path | None, device: str, numerics: Numerics) -> list[dict]:
    """Train a run, or several that differ only in their seed, and return their records."""

    def watch(step: int, accuracy: float | None):
        PROGRESS[0] = step * len(tasks)

    if source is not None:
        load_recipe(source)
    plains, namings, folders, dependencies = zip(*tasks)
    runs = [replace(rebuild(plain), **naming) for plain, naming in zip(plains, namings)]
    return fit_stacked(runs, folders, recipe=recipe, device=device, watch=watch, dependencies=dependencies, numerics=numerics)
