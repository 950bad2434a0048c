"""Launching: many runs over the cores of this machine, one process a core, one thread a process.

Each run is independent and each process has one thread, so results are bitwise the same for any number of workers. A worker
takes a run as plain JSON; what it leaves is its record. Nothing is lost when anything dies: finished runs are skipped the next
time, started ones go on from their checkpoint.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from shutil import get_terminal_size

from smallvit import record as records
from smallvit.run import Run, describe, fingerprint, rebuild


def launch(
    runs: Sequence[Run],
    out: str | Path,
    *,
    recipe: str,
    source: str | Path | None = None,
    jobs: int | None = None,
    device: str = "cpu",
    retry: bool = False,
    fail_fast: bool = False,
    show: Callable[[dict], None] | None = None,
) -> list[dict]:
    """Train every run that has no record yet, in `out/<recipe>/...`, and return all records in the order of `runs`.

    `jobs` workers, by default one for each core; `source` is the recipe's file, which workers load for the components defined
    there. A failed run is reported at once, leaves a record that says why, and is tried again only with `retry=True`. A worker
    that is killed has its run taken up once more from its checkpoint. `show(record)` is called for every record as it comes.
    """
    refuse_absent(device)
    folders = [folder(run, out, recipe) for run in runs]
    found = [records.read_record(path) for path in folders]
    todo = [at for at, record in enumerate(found) if record is None or (retry and record["status"] != "finished")]
    for at, record in enumerate(found):
        if record is not None and record["fingerprint"] != fingerprint(runs[at]):
            raise ValueError(f"{folders[at]} holds another run than {runs[at].arm!r}; move it away, or choose another --out")
    for data in dict.fromkeys(runs[at].data for at in todo):
        data()  # downloaded once and with its own bar, and what is wrong with it said once
    bar = Bar(runs, found, todo)
    slots = [Slot(source, device) for _ in range(min(jobs or cores(), len(todo)))]
    queue, busy, died = list(reversed(todo)), {}, set()
    try:
        while queue or busy:
            for slot in slots:
                if slot not in busy.values() and queue:
                    at = queue.pop()
                    busy[slot.start(runs[at], folders[at], recipe, at)] = slot
            ended, _ = wait(busy, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in ended:
                slot = busy.pop(future)
                at = slot.at
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    slot.replace()
                    if at not in died:
                        died.add(at)
                        queue.append(at)
                        continue
                found[at] = future.result() if error is None else failed(runs[at], folders[at], recipe, error)
                bar.tell(runs[at], found[at])
                if show:
                    show(found[at])
                if fail_fast and found[at]["status"] == "failed":
                    queue.clear()
            bar.move([slot for slot in slots if slot in busy.values()])
    finally:
        for slot in slots:
            slot.stop()
        bar.close()
    return [record for record in found if record is not None]


class Slot:
    """A worker process of its own, so that when it dies it is known which run died with it."""

    def __init__(self, source: str | Path | None, device: str):
        from multiprocessing import get_context

        self.context, self.source, self.device = get_context("spawn"), source, device
        self.at = -1
        self.replace()

    def replace(self):
        self.progress = self.context.RawArray("d", 1)  # steps done; no lock that a killed worker could keep
        self.pool = ProcessPoolExecutor(1, self.context, prepare, (self.source, self.progress))

    def start(self, run: Run, path: Path, recipe: str, at: int) -> Future:
        self.at, self.progress[0] = at, 0
        return self.pool.submit(work, describe(run), run.arm, run.role, str(path), recipe, self.device)

    def stop(self):
        for process in list((self.pool._processes or {}).values()):
            process.kill()  # nothing to tidy up: checkpoints are written beside and moved into place
        self.pool.shutdown(wait=True, cancel_futures=True)


PROGRESS = None  # in a worker: where it tells its steps


def prepare(source: str | Path | None, progress):
    """Make a worker: one thread, deaf to Ctrl-C (its parent decides), the recipe loaded."""
    global PROGRESS
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    PROGRESS = progress
    if source is not None:
        from smallvit.recipe import load_recipe

        load_recipe(source)


def work(plain: dict, arm: str, role: str, path: str, recipe: str, device: str) -> dict:
    """One run in a worker."""
    from dataclasses import replace

    from smallvit.train import fit

    def watch(step: int, accuracy: float | None):
        PROGRESS[0] = step

    return fit(replace(rebuild(plain), arm=arm, role=role), path, recipe=recipe, device=device, watch=watch)


def failed(run: Run, path: Path, recipe: str, error: BaseException) -> dict:
    """Leave a record of a run that raised, and return it."""
    from smallvit.train import blank

    reason = (
        "the worker was killed twice (out of memory?)"
        if isinstance(error, BrokenProcessPool)
        else f"{type(error).__name__}: {error}"
    )
    record = blank(run, recipe, error=reason)
    try:
        records.write_record(path, record)
    except ValueError as full:
        record["error"] += f"; and {full}"
    return record


def refuse_absent(device: str):
    """Refuse a device that torch does not know or this machine does not have."""
    import torch

    if device not in ("cpu", "cuda", "mps", "auto"):
        raise ValueError(f"device is {device!r}; expected cpu, cuda, mps or auto")
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if device in there and not there[device]():
        raise ValueError(f"device is {device!r} but torch finds none here; take --device cpu, or install a torch built for it")


def folder(run: Run, out: str | Path, recipe: str) -> Path:
    """Where a run lives: readable, and different for different runs."""
    arm = re.sub(r"[^A-Za-z0-9+.-]+", "-", run.arm).strip("-") or "arm"
    return (
        Path(out) / recipe / str("all" if run.labels is None else run.labels) / arm / f"seed{run.seed}-{fingerprint(run)[:8]}"
    )


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Bar:
    """One progress bar for the whole recipe, in steps, with the time left and the accuracies so far.

    Where nobody watches (a log file), a line for every tenth of the runs and for every failure.
    """

    def __init__(self, runs: Sequence[Run], found: Sequence[dict | None], todo: Sequence[int]):
        from tqdm import tqdm

        self.runs, self.todo = runs, len(todo)
        self.ended, self.done = len(runs) - len(todo), 0.0
        self.scores: dict[tuple, list[float]] = {}
        for record in found:
            self.count(record)
        steps = max(sum(runs[at].steps for at in todo), 1)
        self.watched = sys.stderr.isatty() and bool(todo)
        self.bar = tqdm(total=steps, file=sys.stderr, bar_format=FORMAT, disable=not self.watched)
        self.move([])

    def count(self, record: dict | None):
        if record is not None and record["status"] == "finished" and record["role"] != "floor":
            self.scores.setdefault((record["arm"], record["labels"]), []).append(record["test"][record["score"]])

    def tell(self, run: Run, record: dict):
        """One run has ended."""
        self.ended += 1
        self.done += run.steps
        self.count(record)
        if record["status"] == "failed":
            self.bar.write(f"FAILED {run.arm}, {amount(run.labels)}, seed {run.seed}: {record['error']}", file=sys.stderr)
        elif not self.watched and self.ended % max(self.todo // 10, 1) == 0:
            print(self.headline(), file=sys.stderr, flush=True)

    def headline(self) -> str:
        """How many runs have ended, and the mean accuracies at the number of labels that is being trained."""
        labels = list(self.scores)[-1][1] if self.scores else None
        means = [f"{arm} {100 * sum(s) / len(s):.1f}" for (arm, count), s in self.scores.items() if count == labels]
        return f"{self.ended}/{len(self.runs)} runs" + (f", {amount(labels)}: {'  '.join(means)}" if means else "")

    def move(self, slots: Sequence[Slot]):
        """Show the steps that the workers have done."""
        if self.watched:
            self.bar.n = min(self.done + sum(slot.progress[0] for slot in slots), self.bar.total)
            room = get_terminal_size().columns - 45  # what the bar itself takes
            self.bar.set_postfix_str(self.headline()[:room])

    def close(self):
        self.bar.close()


FORMAT = "{percentage:3.0f}% |{bar:15}| [{elapsed} < {remaining}] {postfix}"


def amount(labels: int | None) -> str:
    return "all labels" if labels is None else f"{labels:,} labels"
