"""The trial: how this machine trains the runs of a recipe autotune, found out by a few steps in every way that there is.

One choice for the whole recipe, so that its arms stay comparable, and made once: it is kept beside the runs.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from smallvit import record as records
from smallvit.components import function
from smallvit.numerics import CHOICES, DEFAULT, Numerics, check_numerics
from smallvit.pretrained import Weights
from smallvit.run import Run, describe

from .local import cores, refuse_absent
from .scheduler import with_dependencies

if TYPE_CHECKING:
    from smallvit.train.loop import Training

STEPS, FEWEST = 8, 3  # timed of each; the fewest where they take long
LONG_ENOUGH = 20.0  # seconds
STACKS = (1, 2, 4, 8)
GAIN = 0.95  # what takes more than this share of the time is not worth another rounding
STACK_GAIN = 0.9
HOPELESS = 3.0  # who takes so many times as long as another is not asked again
HOPELESS_IN_WORDS = f"over {HOPELESS:g} times as long as another"
WORTH_COMPILING = 600.0  # seconds that the recipe takes; to try it takes up to a minute
MOST = 8  # kinds of runs that are asked
KEPT = "fast.json"

Shapes = list[tuple[Run, int]]
"""Runs that stand for all that are alike in model and objective, and how many steps those take."""


def autotune(
    runs: Sequence[Run], folder: Path, jobs: int | None, device: str, given: dict | None = None
) -> tuple[Numerics, int, str]:
    """How to compute the steps of these runs here, how many seeds to train as one, and in words why.

    What is `given`, fields of an `Numerics` and `stack`, is settled; the rest is tried: kernels of attention, half precision
    where all runs are in full precision, seeds as one, and compiling where the recipe is long enough for that to pay. The
    choice is kept in `folder` for this machine and what was given, and taken the next time, also for arms that came since: all
    of a recipe is computed alike. References have no say in it.

    Raises   ValueError for a device that is not there, and for what is given and is no choice.
    """
    from filelock import FileLock

    refuse_absent(device)
    given = given or {}
    check_numerics(settled(given), given.get("stack", 1))
    path, kept = Path(folder) / KEPT, {}
    key = json.dumps([machine(device), sorted(given.items())])
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):  # two at once would disturb each other's clock
        with suppress(OSError, ValueError):  # none yet, or none that can be read
            kept = json.loads(path.read_text(encoding="utf-8"))
        if key in kept:
            numerics, stack, why = kept[key]
            return Numerics(*numerics), stack, f"{why} (as tried before; without {path} it is tried again)"
        if not (shapes := shapes_of(runs)):
            return settled(given), given.get("stack", 1), "nothing is trained"
        numerics, stack, why = tried(runs, shapes, jobs, device, given)
        records.write_text(path, json.dumps(kept | {key: (numerics, stack, why)}, indent=1) + "\n")
    return numerics, stack, why


def settled(given: dict) -> Numerics:
    """What is given, and else as it is."""
    return Numerics(**{name: value for name, value in given.items() if name in CHOICES})


def tried(runs: Sequence[Run], shapes: Shapes, jobs: int | None, device: str, given: dict) -> tuple[Numerics, int, str]:
    """The choice by trial: first kernel and precision, then how many as one, then whether to compile."""
    import torch

    torch.set_num_threads(1)  # as a worker has it

    def begin(way: Numerics) -> list["Training"]:
        return [begun(run, way, device) for run, _ in shapes]

    counts = [steps for _, steps in shapes]
    ways = ways_to_try(given, full=all(run.precision == "fp32" for run in with_dependencies(runs)[0]))
    times, said = race(ways, begin, counts)
    best = winner(times, ways)
    stack = given.get("stack", 1 if given.get("compiled") else None)
    if stack is None:
        stack, words = stack_size(runs, jobs, device, best)
        said.append(words)
    share = times.get(best, 0) / min(jobs or cores(), len(runs))  # the seconds that the recipe takes
    if given.get("compiled"):
        best = best._replace(compiled=True)
    elif "compiled" not in given and stack == 1 and share > WORTH_COMPILING:
        started, compiled = time.perf_counter(), best._replace(compiled=True)
        again, words = race([best, compiled], begin, counts)
        said += words[1:]
        gained = share * (1 - again[compiled] / again[best]) if {best, compiled} <= again.keys() else 0
        if gained > time.perf_counter() - started:
            best = compiled
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return best, stack, f"{best.describe()}, {stack} as one; {'; '.join(said)}"


def ways_to_try(given: dict, full: bool = True) -> list[Numerics]:
    """What is given as it is, and what is not in every way; half precision only for runs in `full` precision."""
    kernels = [given["kernel"]] if "kernel" in given else [*CHOICES["kernel"].values()]
    precisions = [given["precision"]] if "precision" in given else [None, "bf16"] if full else [None]
    return [Numerics(precision, kernel) for precision in precisions for kernel in kernels]


def race(
    ways: Sequence[Numerics], begin: Callable[[Numerics], list["Training"]], counts: Sequence[int]
) -> tuple[dict[Numerics, float], list[str]]:
    """The seconds that so many steps of each training take in each way, and the same in words.

    They take turns, so that what disturbs one disturbs all. Left out is who fails, who comes to other losses than the first,
    and who is hopelessly slow.
    """
    import torch

    from smallvit.train.stack import TOLERANCE

    field: dict[Numerics, list[Training]] = {}
    warmed: dict[Numerics, float] = {}
    times: dict[Numerics, list[float]] = {}
    out: dict[Numerics, str] = {}
    first: list[float] = []
    for way in ways:
        try:
            field[way] = begin(way)
            warmed[way] = sum(a_step(one.train_step, one, 1) for one in field[way])  # it also loads things, most for the first
            losses = [training.loss.item() for training in field[way]]
        except Exception as error:  # what is wrong with a run its record will say
            out[way] = in_words(error)
            field.pop(way, None)  # and its memory
            continue
        first = first or losses
        near = TOLERANCE["bf16" if any(one.precision == "bf16" for one in field[way]) else "fp32"]
        if not torch.allclose(torch.tensor(losses), torch.tensor(first), rtol=near, atol=near):
            out[way] = f"losses {losses} where {first} was expected"
        elif not way.compiled and warmed[way] > HOPELESS * min(warmed.values()):
            out[way] = HOPELESS_IN_WORDS
        else:
            times[way] = []
    began = time.perf_counter()
    for turn in range(STEPS):
        if turn >= FEWEST and time.perf_counter() - began > LONG_ENOUGH:
            break
        for way in [way for way in times if way not in out]:
            times[way].append(sum(count * a_step(one.train_step, one, 1) for one, count in zip(field[way], counts)))
            if min(times[way]) > HOPELESS * min(min(of) for of in times.values() if of):
                out[way] = HOPELESS_IN_WORDS
    found = {way: sorted(of)[len(of) // 2] for way, of in times.items() if way not in out}
    return found, [f"{way.describe()}: {out.get(way) or f'{1e3 * found[way] / sum(counts):.3g} ms a step'}" for way in ways]


def winner(times: dict[Numerics, float], ways: Sequence[Numerics]) -> Numerics:
    """The autotune; the first of all if nobody gains enough on it."""
    best = min(times, key=times.get, default=ways[0])
    return ways[0] if times.get(ways[0], float("inf")) * GAIN < times.get(best, 0) else best


def begun(run: Run, numerics: Numerics, device: str) -> "Training":
    """A training before its first step, with more steps than are tried, where it has any."""
    from smallvit.train.fit import drawn
    from smallvit.train.loop import Training

    run = replace(unstarted(run), steps=max(run.steps, 2 * STEPS) if run.steps else 0)
    training = Training(run, *drawn(run), device, numerics=numerics)
    training.objective.train()
    return training


def stack_size(runs: Sequence[Run], jobs: int | None, device: str, numerics: Numerics = DEFAULT) -> tuple[int, str]:
    """How many seeds are best trained as one, and in words why; measured by a few steps of every kind of run.

    One choice for the whole recipe. It is 1 unless that many together take a tenth less for all steps, and never so many that a
    worker is idle. A kind that cannot be stacked counts as it is alone.
    """
    from smallvit.train.stack import Stack

    refuse_absent(device)
    if not (shapes := shapes_of(runs)):
        return 1, "nothing is trained"
    seeds = sorted({run.seed for run in runs})
    most = min(len(seeds), sum(run.steps > 0 for run in runs) // (jobs or cores()))
    alone: list[float] = [0.0] * len(shapes)  # what fails alone its record will say
    refused: dict[int, str] = {}
    times, said = {}, []
    for size in (size for size in STACKS if size <= max(most, 1)):
        each = list(alone)
        for at in (at for at in range(len(shapes)) if at not in refused):
            try:
                members = [begun(replace(shapes[at][0], seed=seed), numerics, device) for seed in seeds[:size]]
                train_step = members[0].train_step if size == 1 else Stack(members).train_step
                each[at] = a_step(train_step, members[0]) / size
            except Exception as error:
                refused[at] = in_words(error)
        if len(refused) == len(shapes):
            said.append(f"{size} together: {refused[max(refused)]}")
            break
        alone = each if size == 1 else alone
        times[size] = sum(count * step for step, (_, count) in zip(each, shapes))
        said.append(f"{size} together: {1e3 * times[size] / sum(count for _, count in shapes):.3g} ms a step of each")
    said += [f"of {len(shapes)} kinds of runs {len(refused)} are trained alone"] if 0 < len(refused) < len(shapes) else []
    best = min(times, key=times.get, default=1)
    return best if times and times[best] < STACK_GAIN * times[1] else 1, "; ".join(said)


def a_step(train_step: Callable[[], None], training: "Training", steps: int = STEPS) -> float:
    """The seconds that a step of this training takes, alone or among others: the median of so many."""
    times = []
    for _ in range(steps):
        started = time.perf_counter()
        train_step()
        training.loss.item()  # an accelerator is waited for
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def unstarted(run: Run) -> Run:
    """The run without weights to be found first, and without what its start would take images for: a step takes as long."""
    init = None if isinstance(run.init, Weights) else run.init  # what another run would leave is not looked for
    return replace(run, init=init, pseudo_labels=None, unlabelled=run.unlabelled and not run.pseudo_labels)


def shapes_of(runs: Sequence[Run]) -> Shapes:
    """One run for each model, objective and batch among the arms and what they start from: those with the most steps."""
    found: dict[tuple, tuple[Run, int]] = {}
    for run in with_dependencies(runs)[0]:
        if run.steps and run.role != "reference":
            key = json.dumps(describe(run)["model"], sort_keys=True), function(run.objective), run.batch
            first, steps = found.get(key, (run, 0))
            found[key] = first, steps + run.steps
    return sorted(found.values(), key=lambda shape: -shape[1])[:MOST]


def in_words(error: Exception) -> str:
    return ", ".join([type(error).__name__, *str(error).splitlines()[:1]])


def machine(device: str) -> list[str]:
    """What a trial holds for: the processor, the accelerator, and the library that computes."""
    import torch

    return [
        records.cpu(),
        torch.cuda.get_device_name() if device in ("cuda", "auto") and torch.cuda.is_available() else device,
        torch.__version__,
    ]
