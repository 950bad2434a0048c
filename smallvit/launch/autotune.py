"""Autotune: measure a few training steps of a recipe to find its fastest numerics and stack size on this machine.

All runs of a recipe use the same choice, so that its arms stay comparable. The choice is stored beside the runs.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallvit import record as records
from smallvit.ablation import ArmRun, with_dependencies
from smallvit.components import function
from smallvit.numerics import CHOICES, DEFAULT, Numerics, check_numerics
from smallvit.pretrained import Weights
from smallvit.run import Run, describe
from smallvit.storage import locked, parse_json, write_text
from smallvit.words import how_many

from .launcher import check_device
from .local import cores

if TYPE_CHECKING:
    from smallvit.train.loop import Training

STEPS, FEWEST_STEPS = 8, 3  # timed for each variant; the smaller number for slow ones
TIME_LIMIT = 20.0  # seconds for the timed steps of all variants
STACKS = (1, 2, 4, 8)
GPU_WORK, GPU_STACK = 8e9, 64  # multiply-adds of a step, and runs, from which on a larger stack saves no more time on a GPU
GAIN = 0.95  # another variant is chosen only if it takes less than this share of the time: it also changes rounding
STACK_GAIN = 0.9
TOO_SLOW = 3.0  # a variant that takes so many times as long as another one is not timed further
WORTH_COMPILING = 600.0  # seconds of the whole recipe from which compilation is tried, which takes up to a minute
MOST_KINDS = 8  # kinds of runs that are measured
STORED = "fast.json"

Kinds = list[tuple[Run, int]]
"""One run of each kind (equal model, objective and batch size), with the number of steps of all runs of this kind."""


def autotune(
    runs: Sequence[ArmRun], folder: Path, jobs: int | None, device: str, given: dict | None = None
) -> tuple[Numerics, int, str]:
    """Find the fastest way to train `runs` on this machine by measuring a few steps. Return the best `Numerics` (attention
    kernel, precision, compilation), the number of runs to train as one model, and a text. `folder` stores the choice for the
    next time, `jobs` is the number of worker processes, and `device` is, for example, "cpu".

    Tries attention kernels, bf16 (only if all runs use fp32), stacks of seeds and, for long recipes, compilation. The options
    in `given` (fields of `Numerics`, and "stack") are fixed and are not tried. References are not measured.

    The choice is stored in `folder/fast.json` for this machine and these given options, and is used again the next time, also
    for arms that were added since.

    Raises   ValueError for a device that is not there, and for invalid values in `given`.
    """
    check_device(device)
    given = given or {}
    check_numerics(fixed_numerics(given), given.get("stack", 1))
    path, stored = Path(folder) / STORED, {}
    key = json.dumps([machine(device), sorted(given.items())])
    with locked(path.with_suffix(".lock"), timeout=-1):  # two measurements at once would disturb each other
        with suppress(OSError, ValueError):  # no file yet, or a damaged one
            stored = parse_json(path.read_text(encoding="utf-8"))
        stored = stored if isinstance(stored, dict) else {}
        with suppress(KeyError, TypeError, ValueError):  # not measured yet, or an entry that is damaged
            numerics, stack, reason = stored[key]
            check_numerics(Numerics(*numerics), stack)
            return Numerics(*numerics), stack, f"{reason} (measured earlier; delete {path} to measure again)"
        if not (kinds := kinds_of(runs)):
            return fixed_numerics(given), given.get("stack", 1), "there is nothing to train"
        numerics, stack, reason = measure(runs, kinds, jobs, device, given)
        write_text(path, json.dumps(stored | {key: (numerics, stack, reason)}, indent=1) + "\n")
    return numerics, stack, reason


def fixed_numerics(given: dict) -> Numerics:
    """Return a `Numerics` object (attention kernel, precision, compilation) with the options in the dict `given`. All other
    options have their default.
    """
    return Numerics(**{name: value for name, value in given.items() if name in CHOICES})


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager or decorator with which PyTorch computes in one thread, as in a worker process. Afterwards it has as many
    threads as before.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()  # as in a worker
def measure(runs: Sequence[ArmRun], kinds: Kinds, jobs: int | None, device: str, given: dict) -> tuple[Numerics, int, str]:
    """Measure the speed of training with different settings; unlike `autotune`, store nothing. Return the fastest `Numerics`
    (attention kernel, precision, compilation), the number of runs to train as one model, and a text. `runs` are all runs. Only
    those in `kinds` are measured: one of each group that takes equally long, with its steps. `jobs` is the number of worker
    processes; options in `given` are fixed.

    First the attention kernel and the precision are measured, then the number of runs in a stack, then whether to compile. On a
    GPU the number of runs is not measured: it is that of `stack_for_gpu`, as without this measurement.
    `kinds` is the result of `kinds_of`, and `device` is the device of the training, such as "cpu".
    """
    import torch

    def begin(numerics: Numerics) -> list["Training"]:
        return [begun(run, numerics, device) for run, _ in kinds]

    counts = [steps for _, steps in kinds]
    variants = ways_to_try(given, fp32=all(entry.run.precision == "fp32" for entry in with_dependencies(runs)[0]))
    stack = given.get("stack", 1 if given.get("compiled") else None)
    if stack is None and device == "cuda":
        stack = stack_for_gpu(runs)
        if given.get("kernel") == "fused":  # cannot be stacked
            stack = 1
        elif stack > 1:
            variants = [variant for variant in variants if variant.kernel in (None, "explicit")] or variants
    times, texts = race(variants, begin, counts)
    best = winner(times, variants)
    if stack is None:
        stack, text = stack_size(runs, jobs, device, best)
        texts.append(text)
    seconds = times.get(best, 0) / min(jobs or cores(), len(runs))  # of the whole recipe
    if given.get("compiled"):
        best = best._replace(compiled=True)
    elif "compiled" not in given and stack == 1 and best.kernel != "native" and seconds > WORTH_COMPILING:
        started, compiled = time.perf_counter(), best._replace(compiled=True)
        again, more = race([best, compiled], begin, counts)
        texts += more[1:]
        saved = seconds * (1 - again[compiled] / again[best]) if {best, compiled} <= again.keys() else 0
        if saved > time.perf_counter() - started:
            best = compiled
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return best, stack, f"{best.describe()}, {how_many(stack, 'run')} as one model; {'; '.join(texts)}"


def ways_to_try(given: dict, fp32: bool = True) -> list[Numerics]:
    """Return a list of all combinations of attention kernel and precision to measure, as `Numerics` objects. Options in the
    dict `given` are fixed and not varied. `fp32` says whether all runs use the precision fp32. If not, each run keeps its own
    precision, and bf16 is not tried. The kernel "native" is left out where it cannot be used, and with compilation.
    """
    from smallvit.native import reason_against

    kernels = [given["kernel"]] if "kernel" in given else [*CHOICES["kernel"].values()]
    if "kernel" not in given and (given.get("compiled") or reason_against()):
        kernels.remove("native")
    precisions = [given["precision"]] if "precision" in given else [None, "bf16"] if fp32 else [None]
    return [Numerics(precision, kernel) for precision in precisions for kernel in kernels]


def race(
    variants: Sequence[Numerics], begin: Callable[[Numerics], list["Training"]], counts: Sequence[int]
) -> tuple[dict[Numerics, float], list[str]]:
    """Measure the training time with several variants of `Numerics` (attention kernel, precision, compilation). Return a dict
    from variant to seconds, and a line of text for each variant. `begin(variant)` creates the `Training` objects to measure.
    `counts` has the number of steps of the full training for each of them, by which the measured seconds per step are
    multiplied.

    The variants take turns, so that a disturbance affects all. Variants that fail, whose first losses differ from those of the
    first variant, or that are much slower than another one have no seconds.
    """
    import torch

    from smallvit.train.stack import TOLERANCE

    trainings: dict[Numerics, list[Training]] = {}
    single: dict[Numerics, float] = {}  # seconds of one step of each training
    excluded: dict[Numerics, str] = {}
    expected: list[float] = []
    for variant in variants:
        try:
            created, losses = begin(variant), []
            for _ in range(2):  # the first step loads or compiles something, so the second one is timed
                started = time.perf_counter()
                for training in created:
                    training.train_step()
                values = [training.loss.item() for training in created]  # waits for an accelerator
                losses = losses or values
            seconds = time.perf_counter() - started
        except Exception as error:  # if the run itself is at fault, its record will say so
            excluded[variant] = type_and_line(error)
            continue
        single[variant] = seconds
        expected = expected or losses
        tolerance = TOLERANCE["bf16" if any(training.precision == "bf16" for training in created) else "fp32"]
        if not torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=tolerance, atol=tolerance):
            excluded[variant] = f"the losses are {losses} instead of {expected}"
        elif seconds > TOO_SLOW * min(single.values()):
            excluded[variant] = f"more than {TOO_SLOW:g} times as slow as another one"
        else:
            trainings[variant] = created
    limit = TIME_LIMIT / max(2 * sum(single[variant] for variant in trainings), 1e-9)  # two steps for each that is timed
    repeats = int(max(FEWEST_STEPS, min(STEPS, limit)))
    pairs = [(training.train_step, training) for created in trainings.values() for training in created]
    medians = iter(step_seconds(pairs, repeats))
    times = {variant: sum(count * next(medians) for count in counts) for variant in trainings}
    texts = [excluded.get(v) or f"{1e3 * times[v] / sum(counts):.3g} ms per step" for v in variants]
    return times, [f"{variant.describe()}: {text}" for variant, text in zip(variants, texts)]


def winner(times: dict[Numerics, float], variants: Sequence[Numerics]) -> Numerics:
    """Return the fastest of several variants of `Numerics` (attention kernel, precision, compilation). `times` is a dict from
    variant to seconds. `variants` are all variants; the first one has the default options. If the fastest one saves less than
    5% of the time of the first one, return the first one.

    Options that the user has fixed are the same in all variants.
    """
    best = min(times, key=times.__getitem__, default=variants[0])
    return variants[0] if times.get(variants[0], float("inf")) * GAIN < times.get(best, 0) else best


def step_seconds(pairs: Sequence[tuple[Callable[[], None], "Training"]], repeats: int = STEPS) -> list[float]:
    """Measure the time of one training step for several training runs. Return a list of the median times in seconds. `pairs`
    are pairs (function that takes one step, `Training` object), and `repeats` is the number of measured steps.

    The pairs take turns of two steps, of which the second is measured; a pair alone has one step before all measurements. For a
    stack, the `Training` is one of its members.
    """
    from smallvit.flops import milliseconds

    def step(train_step: Callable[[], None], training: "Training"):
        train_step()
        training.loss.item()  # waits for an accelerator

    return [each / 1e3 for each in milliseconds([partial(step, *pair) for pair in pairs], repeats)]


def begun(run: Run, numerics: Numerics, device: str, measured: int = STEPS) -> "Training":
    """Create a `Training` object for a run whose speed is to be measured. Pretrained weights are not loaded, because the speed
    does not depend on them. `numerics` sets the attention kernel, the precision and compilation, and `measured` is the number
    of steps that are measured.

    The run gets more steps than are measured, unless it has none.
    """
    from smallvit.train.fit import load_data
    from smallvit.train.loop import Training

    init = None if isinstance(run.init, Weights) else run.init  # without a folder, weights of another run are not loaded
    unlabelled = run.unlabelled and not run.pseudo_labels
    steps = max(run.steps, 3 * measured) if run.steps else 0
    teacher = run.teacher if run.learns_from_teacher else None
    run = replace(run, init=init, teacher=teacher, pseudo_labels=None, unlabelled=unlabelled, steps=steps)
    training = Training(run, *load_data(run), device, numerics=numerics)
    training.objective.train()
    return training


def stack_size(runs: Sequence[ArmRun], jobs: int | None, device: str, numerics: Numerics = DEFAULT) -> tuple[int, str]:
    """Measure whether training several seeds as one model (a stack) saves time. Return the best number of runs in a stack and a
    text with the measurements. The number is 1 if stacks do not save at least 10%. `runs` are the runs to train, `jobs` is the
    number of worker processes, `device` is, for example, "cpu", and `numerics` sets attention kernel, precision and
    compilation.

    The number is the same for the whole recipe. The 10% are a part of the time of all steps. The number never leaves a worker
    without a run. Kinds of runs that cannot be stacked count with their time alone.
    """
    from smallvit.train.stack import Stack

    check_device(device)
    if not (kinds := kinds_of(runs)):
        return 1, "there is nothing to train"
    seeds = sorted({entry.seed for entry in runs})
    most = min(len(seeds), sum(entry.run.steps > 0 for entry in runs) // (jobs or cores()))
    alone = [0.0] * len(kinds)  # seconds per step; 0 for a run that fails, whose record will say why
    failed: dict[int, str] = {}
    times, texts = {}, []
    for size in (size for size in STACKS if size <= max(most, 1)):
        seconds = list(alone)
        for index, (run, _) in enumerate(kinds):
            if index in failed:
                continue
            try:
                members = [begun(replace(run, seed=seed), numerics, device) for seed in seeds[:size]]
                train_step = members[0].train_step if size == 1 else Stack(members).train_step
                seconds[index] = step_seconds([(train_step, members[0])])[0] / size
            except Exception as error:
                failed[index] = type_and_line(error)
        if len(failed) == len(kinds):
            texts.append(f"stack of {size}: {failed[max(failed)]}")
            break
        alone = seconds if size == 1 else alone
        times[size] = sum(count * step for step, (_, count) in zip(seconds, kinds))
        texts.append(f"stack of {size}: {1e3 * times[size] / sum(count for _, count in kinds):.3g} ms per step of each run")
    if 0 < len(failed) < len(kinds):
        texts.append(f"{len(failed)} of {len(kinds)} kinds of runs cannot be stacked")
    best = min(times, key=times.__getitem__, default=1)
    return best if times and times[best] < STACK_GAIN * times[1] else 1, "; ".join(texts)


def stack_to_use(given: int | None, runs: Sequence[ArmRun], device: str, numerics: Numerics) -> int:
    """Return how many of the `runs` are trained as one model (a stack). `given` is the number that the user has chosen, if any.
    Otherwise the number is 1 on a CPU, and with `numerics` (attention kernel, precision, compilation) that do not allow stacks
    on a GPU. For the device "cuda" it is else that of `stack_for_gpu`, and a line is printed.
    """
    if given or device != "cuda" or not runs or numerics.compiled or numerics.kernel == "fused":
        return given or 1
    stack = stack_for_gpu(runs)
    same = "runs that differ only in seed, learning rate or number of labels are trained as one model"
    print(f"on a GPU: {f'up to {stack} {same}' if stack > 1 else 'each run alone'}; --stack N changes this", file=sys.stderr)
    return stack


def stack_for_gpu(runs: Sequence[ArmRun]) -> int:
    """Return how many of the `runs` are best trained as one model (a stack) on a GPU. Nothing is measured: a step of a small
    model takes as long as it takes to start its operations, so runs are put together until a step has about 8 billion
    multiply-adds, or 64 runs. The number is the same for the whole recipe; the run with the most multiply-adds decides.
    """
    most = 0.0
    for run, _ in kinds_of(runs, most=None):
        with suppress(Exception):  # the record of a run that fails will say why
            training = begun(run, DEFAULT, "cpu")
            unlabelled = training.objective.unlabelled
            images: float = run.batch * (1 if unlabelled is None else 1 + unlabelled.ratio * len(unlabelled.views))
            if training.objective.needs_views:  # the model sees the views, and not the images
                batch = training.next_batch()
                images = sum(views.numel() for views in batch.views) / batch.images[0].numel()
            most = max(most, images * training.footprint()["macs"])
    return max(1, min(GPU_STACK, int(GPU_WORK / most))) if most else 1


def kinds_of(runs: Sequence[ArmRun], most: int | None = MOST_KINDS) -> Kinds:
    """Group runs for a measurement of speed. The runs in a group have the same model, objective and batch size, so that their
    training steps take equally long. Return a list of pairs: one run of each group, and the total number of training steps of
    the group. `runs` are all runs to train.

    At most 8 groups are returned, or `most`, those with the most steps first. Reference models are left out.
    """
    found: dict[tuple, tuple[Run, int]] = {}
    for entry in with_dependencies(runs)[0]:
        run = entry.run
        if run.steps and entry.role != "reference":
            key = json.dumps(describe(run)["model"], sort_keys=True), function(run.objective), run.batch
            first, steps = found.get(key, (run, 0))
            found[key] = first, steps + run.steps
    return sorted(found.values(), key=lambda kind: -kind[1])[:most]


def type_and_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, as one line of text."""
    return ", ".join([type(error).__name__, *str(error).splitlines()[:1]])


def machine(device: str) -> list[Any]:
    """Return a list that identifies this machine: the name of the processor, the name of the GPU (or else of the device), and
    the version of torch.
    """
    import torch

    gpu = torch.cuda.get_device_name() if device in ("cuda", "auto") and torch.cuda.is_available() else device
    return [records.cpu(), gpu, torch.__version__]
