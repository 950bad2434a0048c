"""A worker: a process with one thread that trains the runs it is handed, one after another.

Loading torch takes as long as training a small run. On Linux a server loads this file once and every worker is a fork of it
(see `launch.processes`), so all that a run needs is imported here, at the top.
"""

import os
import signal
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread

import torch
import torch._dynamo  # the first step of an optimizer would
import torch.utils.flop_counter

from smallvit import record as records
from smallvit.recipe import load_recipe
from smallvit.run import rebuild
from smallvit.train import fit

records.code()  # of the files as they were loaded: somebody may edit them while this worker trains
PROGRESS = None  # where this worker tells its steps


def prepare(progress, environment: dict[str, str]):
    """Make a worker: one thread, deaf to Ctrl-C (its parent decides), gone when its parent is, in its parent's environment."""
    global PROGRESS
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    os.environ.clear()  # a server knows only the one that it was started in
    os.environ.update(environment)
    torch.set_num_threads(1)
    PROGRESS = progress


def work(
    plain: dict, naming: dict, path: Path, places: dict[str, Path], recipe: str, source: str | Path | None, device: str
) -> dict:
    """Train one run, handed over as plain JSON, and return its record; `places` are the folders of those before it."""

    def watch(step: int, accuracy: float | None):
        PROGRESS[0] = step

    if source is not None:
        load_recipe(source)
    start, teacher = places.get("init"), places.get("teacher")
    return fit(replace(rebuild(plain), **naming), path, recipe=recipe, device=device, watch=watch, start=start, teacher=teacher)
