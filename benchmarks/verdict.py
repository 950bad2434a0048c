"""Time to a verdict: a recipe from the command `smallvit run` to its report, and the same runs in a loop of PyTorch and timm.

The loop trains a model of timm for the baseline of the recipe. timm has no counterpart of the other arms, so the loop trains
our modules for them. It leaves out what smallvit does besides: the schedule of the learning rate, the moving average of the
weights, the scores on validation images, and the report.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from benchmarks.peers import Shape, cores, run, threads, timm_vit
from smallvit.ablation import ArmRun
from smallvit.recipe import load_recipe
from smallvit.train.fit import load_data

FILE = '''"""Time to a verdict."""

from dataclasses import replace

from smallvit.recipe import load_recipe

RUNS = [
    replace(entry, tune=None).with_steps(lambda steps: {steps})
    for entry in load_recipe({recipe!r}, tuned=False).RUNS
    if entry.labels == {labels} and entry.seed in range({seeds}) and entry.role != "reference"
]
'''


class Job(NamedTuple):
    """The runs of a recipe that are trained: all arms at one number of labels, with the first seeds. `shape` is that of the
    baseline.
    """

    recipe: str
    labels: int
    seeds: int
    shape: Shape

    def runs(self) -> list[ArmRun]:
        """Return these runs, without references."""
        runs = load_recipe(self.recipe, tuned=False).RUNS
        return [e for e in runs if e.labels == self.labels and e.seed in range(self.seeds) and e.role != "reference"]


def command(job: Job, options: Sequence[str], steps: int):
    """Train the runs of a job for this number of steps with `smallvit run` and these options in an empty folder, and write the
    report. Raises RuntimeError if the command fails.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "verdict.py"
        file.write_text(FILE.format(**job._asdict(), steps=steps))
        words = [sys.executable, "-m", "smallvit", "run", str(file), "--out", f"{folder}/runs", *options]
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"smallvit run failed: {done.stderr[-1000:]}")
    for line in done.stdout.splitlines():
        if line.startswith("fast: "):  # what --fast has chosen
            print(line, file=sys.stderr, flush=True)


def loop(job: Job, best: bool, pool: Executor | None, steps: int):
    """Train and test the runs of a job for this number of steps. Without a pool of processes, they are trained one after
    another on all cores; with best flags half of the cores make batches.
    """
    workers = cores() // 2 if best and pool is None else 0
    train = partial(train_one, job, best, steps, workers)
    with threads(cores() - workers):
        list((map if pool is None else pool.map)(train, range(len(job.runs()))))


def train_one(job: Job, best: bool, steps: int, workers: int, index: int) -> float:
    """Train one run of a job in the loop, and return its test accuracy."""
    entry = job.runs()[index]
    data, subset = load_data(entry.run)
    train, test = ((part.images[:].squeeze(1).numpy(), part.labels.numpy()) for part in (subset.train, data.test.open()))
    make = partial(model_of, job, entry, best)
    return run(make, entry.seed, steps, entry.run.batch, train, test, best, workers=workers)


def model_of(job: Job, entry: ArmRun, best: bool = False) -> torch.nn.Module:
    """Return timm's model for the baseline of a job, and our model for another arm."""
    return timm_vit(job.shape, 28, 1, best) if entry.role == "baseline" else entry.run.model((28, 28), 1, 10)


def one_thread_processes() -> ProcessPoolExecutor:
    """Return a pool with one process for each core, each with one thread."""
    return ProcessPoolExecutor(cores(), get_context("spawn"), torch.set_num_threads, (1,))


def estimate(call: Callable[[int], object], steps: Sequence[int], length: int, factor: float = 1) -> float:
    """Return the seconds of `call(length)` times `factor`. The call is made for the numbers in `steps`, and a straight line
    through the first and the last of them is followed to `length`.
    """
    seconds = []
    for number in steps:
        started = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - started)
    per_step = (seconds[-1] - seconds[0]) / (steps[-1] - steps[0]) if len(steps) > 1 else 0
    return factor * (seconds[-1] + per_step * (length - steps[-1]))
