"""How much memory a step takes: how far a fresh process grows from before its model is made to its peak in the second step."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.peers import Shape

TINY = Shape(8, 1, 1, 2)


def growth_of_a_fresh_process(make: Callable[[Shape], Callable], shape: Shape) -> float:
    """MiB; a process of its own, since a peak never falls again."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(growth, make, shape, torch.get_num_threads()).result()


def growth(make: Callable[[Shape], Callable], shape: Shape, threads: int = 1) -> float:
    """MiB by which the steps of `make(shape)` grow this process; what is loaded on the way there is loaded before."""
    torch.set_num_threads(threads)
    make(TINY)()
    before = resident("VmRSS")
    step = make(shape)
    step()
    step()
    return (resident("VmHWM") - before) / 1024


def resident(name: str) -> int:
    """VmRSS, what this process holds now, or VmHWM, the most it has held; in KiB.

    Not getrusage's ru_maxrss: that one is inherited from the process that started this one, which may have held far more.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
