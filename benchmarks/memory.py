"""The peak memory of a training step: how much a new process grows from before its model is built to its second step."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.peers import Shape

TINY = Shape(8, 1, 1, 2)


def growth_in_new_process(make: Callable[[Shape], Callable], shape: Shape) -> float:
    """Return `growth(make, shape)` of a new process, in MiB. The peak of a process never falls."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(growth, make, shape, torch.get_num_threads()).result()


def growth(make: Callable[[Shape], Callable], shape: Shape, threads: int = 1) -> float:
    """Return by how many MiB this process grows when it builds `make(shape)` and calls the result twice.

    A tiny model runs first, so that libraries which are loaded on first use do not count.
    """
    torch.set_num_threads(threads)
    make(TINY)()
    before = process_memory("VmRSS")
    step = make(shape)
    step()
    step()
    return (process_memory("VmHWM") - before) / 1024


def process_memory(name: str) -> int:
    """Return the memory of this process in KiB: "VmRSS" is the current value, "VmHWM" the peak.

    ru_maxrss of getrusage is not used: a process inherits it from its parent, which may have used more.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
