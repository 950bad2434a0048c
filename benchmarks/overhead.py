"""What launching and resuming cost: processor time a run, with few and with many tiny runs, and the time of a checkpoint.

python -m benchmarks.overhead                          100 and 1,000 runs of one step, in two worker processes
python -m benchmarks.overhead --runs 50 200 --jobs 4

A run takes one training step with a tiny model, on digits. The rest of its time is scheduling, loading data, locks, the
evaluation and the files of the run. Processor time is given, because it does not depend on what else the machine does; the last
column has the elapsed time. It needs Linux, whose /proc has the times of the workers.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from smallvit import PatchEmbed, Run, ViT, ablate, digits
from smallvit.launch import launch
from smallvit.launch.engine import Settings
from smallvit.launch.local import LocalEngine
from smallvit.record import CHECKPOINT
from smallvit.train import checkpoint
from smallvit.train.loop import Training

MODEL = partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=4, depth=1, heads=1)
TINY = Run(model=MODEL, labels=10, val=10, steps=1, batch=1)


class Cost(NamedTuple):
    """The cost of a launch: its number of runs, the processor seconds of the launcher and of all workers, the elapsed seconds,
    and the processor seconds of a second launch, which finds that all runs have finished.
    """

    runs: int
    launcher: float
    workers: float
    elapsed: float
    again: float


class TimedEngine(LocalEngine):
    """The worker processes of this machine. When they end, their processor time in seconds is added to the list `times`."""

    def __init__(self, settings: Settings, groups: int, *, jobs: int, times: list[float]):
        super().__init__(settings, groups, jobs)
        self.times = times

    def close(self):
        self.times += [processor_time(number) for worker in self.workers for number in worker.pool._processes or {}]
        super().close()


def processor_time(process: int) -> float:
    """Return the processor time in seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(count: int, jobs: int) -> Cost:
    """Launch `count` tiny runs in `jobs` worker processes, twice, and return what it cost."""
    runs = ablate({"tiny": TINY}, labels=[10], seeds=range(count), references=False)
    times: list[float] = []
    with tempfile.TemporaryDirectory() as out:
        begun, elapsed = time.process_time(), time.monotonic()
        records = launch(runs, out, recipe="tiny", engine=partial(TimedEngine, jobs=jobs, times=times))
        launcher, elapsed = time.process_time() - begun, time.monotonic() - elapsed
        begun = time.process_time()
        again = launch(runs, out, recipe="tiny", jobs=jobs)
        if again != records or not all(record.finished for record in records):
            raise RuntimeError("a run did not finish, or a finished run was trained again")
        return Cost(count, launcher, sum(times), elapsed, time.process_time() - begun)


def markdown(costs: Sequence[Cost]) -> str:
    """Return the costs as a table in Markdown, in milliseconds for each run."""
    rows = ["| runs | launcher, ms a run | worker, ms a run | finished runs read again, ms a run | elapsed, ms a run |"]
    rows.append("| ---: | ---: | ---: | ---: | ---: |")
    for cost in costs:
        values = (1000 * seconds / cost.runs for seconds in (cost.launcher, cost.workers, cost.again, cost.elapsed))
        rows.append(f"| {cost.runs:,} | " + " | ".join(f"{value:.1f}" for value in values) + " |")
    return "\n".join(rows)


def checkpoint_costs(widths: Sequence[int] = (64, 192)) -> str:
    """Return a table in Markdown: how long it takes to write and to read the checkpoint of models of these widths with 6
    blocks. The smallest of five times is given.
    """
    rows = ["| parameters | checkpoint, MB | written in, ms | read in, ms |", "| ---: | ---: | ---: | ---: |"]
    for width in widths:
        run = TINY.vary(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=width, depth=6, heads=4), steps=2)
        written, read = [], []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, CHECKPOINT)
            begun, resumed = training_of(run, path), training_of(run, path)
            begun.train_step()
            for _ in range(5):
                started = time.perf_counter()
                checkpoint.save([begun], path)
                between = time.perf_counter()
                resumed.step = 0
                checkpoint.resume([resumed])
                written, read = [*written, between - started], [*read, time.perf_counter() - between]
            if resumed.step != 1:
                raise RuntimeError("the checkpoint was not resumed")
            count, size = sum(parameter.numel() for parameter in begun.model.parameters()), path.stat().st_size / 1e6
        rows.append(f"| {count:,} | {size:.1f} | {1000 * min(written):.0f} | {1000 * min(read):.0f} |")
    return "\n".join(rows)


def training_of(run: Run, path: Path) -> Training:
    """Return the training of a run, at step 0, with its checkpoint in the file `path`."""
    training = Training(run, digits(), digits().subset(labels=run.labels, val=run.val, seed=0), "cpu")
    training.checkpoint_file = path
    return training


def main(words: Sequence[str] | None = None) -> int:
    """Measure what the command line names, print the tables, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="Measure what launching costs.")
    parser.add_argument("--runs", type=int, nargs="+", default=[100, 1000], help="numbers of runs (default 100 1000)")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    args = parser.parse_args(words)
    measure(2, args.jobs)  # imports, and the server of the workers
    print(markdown([measure(count, args.jobs) for count in args.runs]))
    torch.set_num_threads(1)
    print(f"\n{checkpoint_costs()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
