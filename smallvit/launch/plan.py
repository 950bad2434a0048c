"""The plan of a recipe, which `--dry-run` prints: its arms, how they differ, and how long the runs take on this machine."""

import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from smallvit.ablation import ArmRun, at_cell, only_baseline, with_dependencies
from smallvit.components import function, options
from smallvit.data import Dataset, HeldOut
from smallvit.numerics import DEFAULT, Numerics
from smallvit.passes import run_count
from smallvit.pretrained import Weights
from smallvit.record import user_line
from smallvit.run import Run, difference, fingerprint
from smallvit.words import how_many

from .autotune import begun, one_thread
from .engine import Settings
from .launcher import check_device
from .local import Worker, cores, process_context
from .progress import clock
from .scheduler import read_data

if TYPE_CHECKING:
    from smallvit.train.loop import Training

# images that are evaluated for the estimate; the time for more is extrapolated
MOST_TRAIN = 2_000
TEST_COUNTS = (250, 1_000)
FEW, SLOW = (4, 32), 0.001  # images that a model scores which needs more than 0.001 seconds for an image
MOST_STEPS, SECONDS = 500, 1.0  # training steps that are timed at most, and for how long


def plan(
    runs: Sequence[ArmRun],
    jobs: int | None,
    device: str,
    ended: Callable[[ArmRun], str | None] = lambda entry: None,
    recipe_runs: Sequence[ArmRun] = (),
    startup: float = 0.0,
    numerics: Numerics = DEFAULT,
) -> str:
    """Return a text about the planned runs: the arms (variants), how they differ from their baseline, and the expected training
    time. `runs` are the selected runs, `recipe_runs` all runs of the recipe. `jobs` is the number of worker processes, `device`
    is, for example, "cpu", and `startup` are the seconds that the command has taken so far. `numerics` is how training steps
    are computed. The function `ended` returns how a run that is not trained any more has ended, "finished" or "failed", and
    None for the others.

    The time is that of the runs that are still to be trained. An earlier run that is needed and is one of `recipe_runs` keeps
    the name of its arm. An arm whose loss becomes infinite in the measured steps has no time.

    The time is measured: a few training steps, the validation and the evaluation of one run of each arm, and the start of the
    workers. `startup` is added to it. It is longer if other programs use the processor. Nothing is trained to the end and
    nothing is downloaded.

    Raises ValueError for a device that is not there, for data without test images, and, with its name, for an arm that cannot
    be trained.
    """
    check_device(device)
    runs, _ = with_dependencies(runs, recipe_runs)
    runs = list({fingerprint(entry.run): entry for entry in reversed(runs)}.values())[::-1]  # each run once
    endings = {id(entry): ended(entry) for entry in runs}
    left = [entry for entry in runs if endings[id(entry)] is None]
    jobs = max(1, min(jobs or cores(), len(left)))
    tokens, others = tokens_left(runs), computing_processes() if device == "cpu" else 0.0
    data = []
    for load in dict.fromkeys(entry.run.data for entry in runs):
        loaded = read_data(load)
        loaded.check_test_images()
        data.append(data_text(loaded))
    listed = [*runs, *recipe_runs]
    baseline_arm = only_baseline(listed)
    now: list[float] = []
    after_download: list[float] = []
    lines, untimed = [], 0
    for arm, length, tuned in dict.fromkeys(kind(entry) for entry in runs):
        same = [entry for entry in runs if kind(entry) == (arm, length, tuned)]
        entry, run = same[0], same[0].run
        untrained = sum(kind(other) == (arm, length, tuned) for other in left)
        try:
            weights = run.init if isinstance(run.init, Weights) and run.init.local_path() is None else None
            seconds = estimate(run, device, numerics)
            time_text = f"about {seconds:.0f} s each"
            (after_download if weights else now).extend([seconds] * untrained)
        except FloatingPointError as error:
            time_text, untimed = f"cannot be timed: {error}", untimed + untrained
        except Exception as error:
            line = user_line("".join(traceback.format_exception(error)))
            raise ValueError(f"arm {arm!r}: {type(error).__name__}: {error}" + f" ({line})" * bool(line)) from error
        note = "".join(f"; {text}" for text in ending_texts([endings[id(other)] for other in same]))
        note += f"; {weights.name} must be downloaded" if weights else ""
        runs_text = run_count([e.seed for e in same], run.folds)
        lines.append(f"{arm}{', tuned' * tuned}: {runs_text} of {run.steps} steps, {time_text}{note}")
        lines += [f"    {tokens[arm]}"] if arm in tokens else []
        control = entry.baseline or baseline_arm
        same_arm = [e for e in listed if e.arm == control != arm]
        if same_arm:
            baseline = min(same_arm, key=lambda e: (kind(e)[1:] != (length, tuned), e.labels != run.labels))
            changes = difference(at_cell(baseline.run, run.labels, run.seed), run)
            lines += [f"    {name}: {old} -> {new}" for name, (old, new) in changes.items()]
    start, factor = startup + worker_start(device) if left else 0.0, slowdown(others, jobs)
    total, later = start + factor * parallel(now, jobs), factor * parallel(after_download, jobs)
    more = f" (and {clock(later)} for the runs whose weights must be downloaded)" if later else ""
    source = "estimated from a few steps and one evaluation of each arm"
    text = f"about {clock(total)}{more} with {how_many(jobs, 'worker process', 'worker processes')} on {device}, {source}"
    text += f"; without {how_many(untimed, 'run')} that cannot be timed" * bool(untimed)
    text += busy(others)
    done = [*ending_texts([*endings.values()]), "the others take "] if len(left) < len(runs) else [""]
    return "\n".join([*data, *lines, f"{how_many(len(runs), 'run')}, {', '.join(done)}{text}"])


def ending_texts(endings: Sequence[str | None]) -> list[str]:
    """Return texts that say how many runs have finished, and how many have failed, without those that are 0. `endings` has
    "finished", "failed" or None for each run.
    """
    texts = {"finished": "have finished", "failed": "have failed (--retry trains them again)"}
    return [f"{endings.count(ending)} {text}" for ending, text in texts.items() if ending in endings]


def data_text(data: Dataset) -> str:
    """Return a line of text about a data set: how many images, classes and folds it has, how many images without labels, and
    into how many groups, such as patients, the images are divided.
    """
    spec, parts = data.spec, [f"{len(data.train):,} images of {len(data.spec.classes)} classes"]
    if data.folds:
        parts.append(f"{data.folds} folds" + f" of {len(data.pool):,} of them" * (data.pool_index is not None))
    else:
        parts[0] = f"{len(data.train):,} training and {data.test.count:,} test images of {len(spec.classes)} classes"
    if data.unlabelled is not None:
        parts.append(f"{how_many(len(data.unlabelled), 'image')} without labels")
    if data.groups is not None:
        sizes = data.groups.unique(return_counts=True)[1].tolist()
        extent = f"{min(sizes)}" + f" to {max(sizes)}" * (min(sizes) < max(sizes))
        parts.append(f"{len(sizes):,} groups of {extent} images, which stay together")
    return f"data: {spec.name}, {', '.join(parts)}"


def kind(entry: ArmRun) -> tuple:
    """Return the arm (variant) of a run, its training length, and whether its hyperparameters were tuned, as a tuple. `entry`
    is the run. Runs with equal tuples take about equally long, so the time of one of them is measured for all.
    """
    return entry.arm, entry.length, entry.tuning is not None


@one_thread()
def estimate(run: Run, device: str, numerics: Numerics = DEFAULT) -> float:
    """Return the estimated time of a run on this machine in seconds, including validation and evaluation. A few training steps,
    computed as `numerics` says, and one evaluation are measured, with one thread.
    """
    from smallvit.evaluate import Splits, cost
    from smallvit.flops import milliseconds
    from smallvit.train.loop import CHECKS

    # the time of `cost` does not grow with the number of images
    costs = [evaluator for evaluator in run.evaluators if function(evaluator) is cost]
    run = replace(run, evaluators=tuple(evaluator for evaluator in run.evaluators if evaluator not in costs))
    training = begun(run, numerics, device, MOST_STEPS)  # other initial weights would take as long
    of_large_model = seconds_of_large_model(training)
    seconds = of_large_model[1] if of_large_model else evaluation_seconds(training)
    images, started = training.subset.train, time.perf_counter()
    for evaluator in costs:
        list(evaluator(training.model, Splits(images, images, images)))
    seconds += 2 * (time.perf_counter() - started)  # once with the validation images, and once with the test images
    if not run.steps:
        return seconds
    if of_large_model:
        return seconds + run.steps * step_time(training) + min(CHECKS, run.steps) * of_large_model[0]

    def step_and_validate():
        training.train_step()
        training.validate()

    both = milliseconds([step_and_validate], repeats=1)[0] / 1e3  # first: after many more steps, the loss may be infinite
    step = step_time(training)
    return seconds + run.steps * step + min(CHECKS, run.steps) * max(both - step, 0.0)


def step_time(training: "Training") -> float:
    """Return the mean time of a training step in seconds. Steps are timed for a second, and at least one. The mean, unlike the
    median, also counts the time in which other programs use the processor.
    """

    def step():
        training.train_step()
        training.loss.item()  # waits for an accelerator

    step()  # the first one loads or compiles something
    count, started = 0, time.perf_counter()
    while not count or (count < MOST_STEPS and time.perf_counter() - started < SECONDS):
        step()
        count += 1
    return (time.perf_counter() - started) / count


def computing_processes() -> float:
    """Return how many processes of other programs are using the processor of this machine at the moment, as a mean over half a
    second. The result is 0 where the operating system does not say, which only Linux does.
    """
    counts = []
    with suppress(OSError, ValueError, IndexError):
        for _ in range(10):
            time.sleep(0.05)
            counts.append(int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)  # without this process
    return fmean(counts) if counts else 0.0


def busy(others: float) -> str:
    """Return the end of a sentence about a time, which says that other programs make it longer. `others` is the number of their
    processes. The text is empty if they hardly use the processor.
    """
    cores = how_many(max(1, round(others)), "core")
    return f"; other programs keep about {cores} busy, which makes it slower" * (others >= 0.5)


def slowdown(others: float, jobs: int) -> float:
    """Return how many times as long a training step takes in one of `jobs` worker processes as it took when it was measured in
    a single process. It is more than 1 if the processor has too few cores for the workers and the `others`, the number of
    processes of other programs.
    """
    available = os.cpu_count() or 1
    return max(1.0, (others + jobs) / available) / max(1.0, (others + 1) / available)


def seconds_of_large_model(training: "Training") -> tuple[float, float] | None:
    """Return the estimated times of one validation and of the final evaluation of a training run in seconds, or None if the
    model is so fast that they can be measured. They are computed from the time of a few images, because a ViT-S needs minutes
    to score a thousand images on a CPU.
    """
    from smallvit.evaluate import declaration
    from smallvit.train.fit import evaluate, load_data

    run, subset, data = training.run, training.subset, load_data(training.run)[0]
    train, scored, times = subset.train.take(slice(FEW[-1])), [], []
    for count in FEW:  # the first one also loads or compiles something
        val, test = subset.val.take(slice(count)), data.train.take(slice(count))
        started = time.perf_counter()
        try:
            evaluate(run, training.model, replace(subset, train=train, val=val), HeldOut(test))
        except ValueError:  # too few images for an evaluator
            return None
        scored.append(len(val) + len(test))
        times.append(time.perf_counter() - started)
    per_image = (times[1] - times[0]) / max(1, scored[1] - scored[0])  # with a handful of images, both are equal
    # an evaluator of the user's own may read the training images, too
    reads = (declaration(each).probe or not function(each).__module__.startswith("smallvit.") for each in run.evaluators)
    probed = len(subset.train) if any(reads) else 0
    if per_image <= SLOW:
        return None
    return per_image * len(subset.val), per_image * (len(subset.val) + data.test.count + probed)


def evaluation_seconds(training: "Training") -> float:
    """Return the estimated time of the final evaluation of a training run in seconds. The time for counting multiply-adds
    (MACs) is included.

    Measured with training images in place of the test images. With many images a part is measured, and the time for the others
    is extrapolated. Returns 0 if a part of the images is not enough for an evaluator.
    """
    from smallvit.flops import milliseconds
    from smallvit.train.fit import evaluate, load_data

    run, subset, data = training.run, training.subset, load_data(training.run)[0]
    all_train, all_test = len(subset.train), data.test.count
    train, (fewer, more) = min(MOST_TRAIN, all_train), (min(count, all_test, len(data.train)) for count in TEST_COUNTS)

    def seconds(train: int, test: int) -> float:
        part, images = replace(subset, train=subset.train.take(slice(train))), HeldOut(data.train.take(slice(test)))
        return milliseconds([partial(evaluate, run, training.model, part, images)], repeats=1)[0] / 1e3

    total = milliseconds([training.facts], repeats=1)[0] / 1e3
    with suppress(ValueError):  # too few images for an evaluator
        measured = seconds(train, more)
        total += measured
        if all_test > more > fewer:
            total += max(measured - seconds(train, fewer), 0) / (more - fewer) * (all_test - more)
        if all_train > train:
            total += max(measured - seconds(train // 2, more), 0) / (train - train // 2) * (all_train - train)
    return total


def worker_start(device: str) -> float:
    """Return how many seconds pass until a new worker process is ready to train on this device. One process is started to
    measure this time.
    """
    started = time.perf_counter()
    worker = Worker(process_context(device), Settings(None, device, DEFAULT))
    try:
        worker.pool.submit(os.getpid).result()
    finally:
        worker.pool.shutdown()
    return time.perf_counter() - started


def parallel(seconds: Sequence[float], jobs: int) -> float:
    """Return the total time in seconds of several runs on `jobs` worker processes. `seconds` are the times of the single runs.
    Each run starts as soon as a process is free.
    """
    busy = [0.0] * jobs
    for each in seconds:
        busy[busy.index(min(busy))] += each
    return max(busy)


def tokens_left(runs: Sequence[ArmRun]) -> dict[str, str]:
    """Return a dict from the name of each arm (variant) with token reduction to a text. The text says how many tokens are left
    after each block of the model.
    """
    # a model is built only if it may reduce tokens, which most arms do not
    first = {entry.arm: entry for entry in runs if entry.role != "reference"}
    reducing = {arm: entry.run for arm, entry in first.items() if may_reduce(entry.run.model)}
    if not reducing:
        return {}
    from smallvit.flops import describe_tokens, reduces, without_memory

    texts = {}
    for arm, run in reducing.items():
        spec = read_data(run.data).spec
        with suppress(Exception):  # a model that cannot be built fails in its own run
            model = without_memory(partial(run.model, spec.size, spec.channels, len(spec.classes)))
            texts |= {arm: describe_tokens(model)} if reduces(model) else {}
    return texts


def may_reduce(model: Callable) -> bool:
    """Return whether a model may merge or remove tokens. `model` is the class or function that creates it. The result is False
    only if this class has an option `reduction` with the value None. In all other cases the model must be built to know.
    """
    slot = options(model).get("reduction")
    return slot is None or slot.default is not None
