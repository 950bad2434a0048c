"""The benchmarks. Each yields `Task`s: what is timed, the call of smallvit, and the calls of the other libraries ("peers").

Before anything is timed, a check ensures that all libraries do equal work: the same number of multiply-adds and parameters, of
views and pixels, and a separate random draw for each image.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import ours, peers, verdict
from benchmarks.digits import dataset
from benchmarks.memory import growth_in_new_process
from benchmarks.peers import AUGMENTATIONS, VITS, LightlyDINO, Shape, has_native_bf16, version
from benchmarks.verdict import Job
from smallvit import DINO, Dataset, augment
from smallvit.flops import counted, milliseconds
from smallvit.native import reason_against
from smallvit.numerics import DEFAULT, Numerics

Call = Callable[[], object]

WARM_UP = 0.02  # seconds in which a call is repeated before it is timed
FLAGS = {"default settings": False, "best flags": True}  # name -> argument `best` of the functions in peers.py

TINY = Shape(64, 4, 4, batch=32, patch=7, mlp_ratio=2.0)  # 17 tokens, a typical run of a recipe; the others have 50
SHAPES = (TINY, Shape(64, 6, 4, batch=128), Shape(192, 12, 3, batch=64), Shape(384, 12, 6, batch=64))  # the last is ViT-S
SMALL = Shape(64, 6, 4, batch=64)
RECIPE = Shape(64, 4, 2, batch=32, patch=7, mlp_ratio=2.0)  # 16 patches and the class token
VIT_S = Shape(384, 12, 6, batch=8, patch=16)
MERGING = (  # shape, pixels of a side, channels, merged pairs in each block: some half of the multiply-adds
    *((VIT_S._replace(batch=batch), 224, 3, 13) for batch in (8, 1)),
    *((Shape(192, 12, 3, batch=batch), 28, 1, 4) for batch in (64, 1)),
)
SPT_LSA = Job(
    str(Path(__file__).parents[1] / "recipes" / "spt_lsa.py"), 1_000, 8, Shape(64, 4, 4, batch=32, patch=7, mlp_ratio=2.0)
)


class Task(NamedTuple):
    """One task that is timed for smallvit and for its peers.

    ours       the call of smallvit
    theirs     theirs[peer][flags] is the call of a peer; the inner dict is empty for a peer that is not installed
    unit       unit of the result
    measure    `measure(calls, repeats)` returns one number per call
    steps      number of training steps of each run in a recipe
    numerics   how smallvit computes its steps, as text, if several ways were tried
    macs       multiply-adds of smallvit divided by those of the peers, if this is not 1
    """

    name: str
    ours: Call
    theirs: dict[str, dict[str, Call]]
    unit: str = "ms"
    measure: Callable[[Sequence[Call], int], list[float]] = partial(milliseconds, warm_up=WARM_UP)
    steps: int | None = None
    numerics: str | None = None
    macs: float | None = None


def compare(task: Task, repeats: int) -> Iterator[dict]:
    """Measure a task, and yield one line of the record per peer; None marks what was not measured."""
    calls = {("smallvit", ""): task.ours}
    calls |= {(peer, flags): call for peer, by_flags in task.theirs.items() for flags, call in by_flags.items()}
    numbers = dict(zip(calls, task.measure([*calls.values()], repeats)))
    for peer in task.theirs:
        line = {"task": task.name, "steps": task.steps, "unit": task.unit, "numerics": task.numerics, "macs": task.macs}
        line |= {"smallvit": numbers["smallvit", ""], "peer": peer}
        yield line | {flags: numbers.get((peer, flags)) for flags in FLAGS}


def flags_of(peer: str) -> dict[str, bool]:
    """Return the settings with which a peer is timed; none if it is not installed."""
    return FLAGS if version(peer) else {}


def check_equal(what: str, smallvit: object, peer: object):
    """Raise ValueError unless both values are equal; `what` names them in the error."""
    if smallvit != peer:
        raise ValueError(f"{what}: smallvit {smallvit}, peer {peer}; expected equal, or their times cannot be compared")


# Training step, inference, memory


def with_and_without_bf16() -> list[tuple[bool, str]]:
    """Return whether bf16 may be used, and what the name of the task says about it. If the processor has bf16, a task is
    measured twice: bf16 is allowed for both sides, and then for none.
    """
    return [(True, ""), (False, ", without bf16")] if has_native_bf16() else [(False, "")]


def train(shapes: Sequence[Shape] = SHAPES, given: dict = {}) -> Iterator[Task]:  # noqa: B006
    """One training step of a ViT."""
    for shape, (bf16, suffix) in product(shapes, with_and_without_bf16()):
        check_models(shape)
        theirs = {peer: {flags: peers.step(shape, peer, best, bf16) for flags, best in flags_of(peer).items()} for peer in VITS}
        training = ours.fast(shape, dataset(), bf16, given)
        name = f"training step, {describe_shape(shape)}{suffix}"
        yield Task(name, training.train_step, theirs, numerics=training.numerics.describe())


def inference(shapes: Sequence[Shape] = SHAPES, given: dict = {}) -> Iterator[Task]:  # noqa: B006
    """The logits of one batch."""
    for shape, (bf16, suffix) in product(shapes, with_and_without_bf16()):
        check_models(shape)
        call_of = partial(peers.inference, shape, bf16=bf16)
        theirs = {peer: {flags: call_of(peer, best) for flags, best in flags_of(peer).items()} for peer in VITS}
        call, numerics = ours.inference(shape, bf16, given)
        yield Task(f"inference, {describe_shape(shape)}{suffix}", call, theirs, numerics=numerics.describe())


def reduction(settings: Sequence[tuple[Shape, int, int, int]] = MERGING) -> Iterator[Task]:
    """The logits of one batch with token merging. The "peer" is the same model without it."""
    for shape, side, channels, r in settings:
        check_models(shape, side, channels)
        for numerics in (DEFAULT, *([] if reason_against() else [Numerics(kernel="native")])):
            merging, plain, macs = ours.merging(shape, side, channels, r, numerics)
            name = f"inference, {r} merges in each block, {side} x {side} pixels, {describe_shape(shape, side)}"
            name += ", native kernel" * (numerics != DEFAULT)
            theirs = {"without merging": {"default settings": plain}}
            yield Task(name, merging, theirs, macs=macs)


def memory(shape: Shape = SHAPES[-1], growth: Callable = growth_in_new_process) -> Iterator[Task]:
    """The memory of a model and two training steps, with each attention kernel. On Linux only."""
    if sys.platform == "linux":
        check_models(shape)
        steps = {flags: partial(peers.step, peer="timm", best=best) for flags, best in flags_of("timm").items()}
        theirs = {"timm": {flags: partial(growth, step, shape) for flags, step in steps.items()}}
        for suffix, numerics in (("", DEFAULT), (", fused attention", Numerics(kernel="fused"))):
            call = partial(growth, partial(ours.step, numerics=numerics), shape)
            yield Task(f"peak memory of a training step, {describe_shape(shape)}{suffix}", call, theirs, "MiB", returned)


def returned(calls: Sequence[Call], repeats: int, most: int = 3) -> list[float]:
    """Return the median of the numbers that each call returns, in at most `most` repetitions."""
    return [median(call() for _ in range(min(repeats, most))) for call in calls]


def check_models(shape: Shape, side: int = 28, channels: int = 1):
    """Raise ValueError unless all ViTs have equal multiply-adds, and timm's has as many parameters as ours.

    vit-pytorch has more norms and fewer biases, so its parameters differ slightly.
    """
    model, image = ours.vit(shape)((side, side), channels, 10).eval(), torch.zeros(1, channels, side, side)
    for peer, make in VITS.items():
        if version(peer):
            other = make(shape, side, channels, best=False).eval()
            check_equal(f"multiply-adds of {peer}", counted(model, image), counted(other, image))
            if peer == "timm":
                check_equal(f"parameters of {peer}", count_parameters(model), count_parameters(other))


def count_parameters(model: nn.Module) -> int:
    """Return the number of trained parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def describe_shape(shape: Shape, side: int = 28) -> str:
    """Return number of tokens, width, depth and batch size as text."""
    return f"{count_tokens(shape, side) + 1} tokens, width {shape.dim}, depth {shape.depth}, batch {shape.batch}"


def count_tokens(shape: Shape, side: int = 28) -> int:
    """Return the number of patches of an image with `side` x `side` pixels; a digit has 28."""
    return (side // shape.patch) ** 2


# Augmentation and views


def augmentation(batch: int = 256) -> Iterator[Task]:
    """Affine and elastic transforms and random erasing, drawn for each image. No flags make the peers faster."""
    images = dataset().train.pixels(slice(batch))
    check_augmentation("smallvit", ours.augmentation, images)
    theirs = {}
    for peer, make in AUGMENTATIONS.items():
        theirs[peer] = {}
        if version(peer):
            transform = make()
            check_augmentation(peer, transform, images)
            theirs[peer]["default settings"] = partial(transform, images)
    yield Task(f"affine, elastic and random erasing of {batch} images", partial(ours.augmentation, images), theirs)


def check_augmentation(name: str, transform: Callable[[Tensor], Tensor], images: Tensor):
    """Raise ValueError if a transform changes the image size, or gives equal results for copies of one image."""
    out = transform(images[:1].repeat(4, 1, 1, 1))
    check_equal(f"image size after {name}", images.shape[1:], out.shape[1:])
    check_equal(f"different images after {name}, of 4 equal ones", 4, len({image.numpy().tobytes() for image in out}))


def views(batch: int = 64, given: dict = {}) -> Iterator[Task]:  # noqa: B006
    """The views of images for DINO, from bytes to normalized pixels."""
    numerics = Numerics(kernel=given.get("kernel"))
    can = not (reason_against() or reason_against("views.cpp"))
    label = "native views" if numerics.kernel == "native" and can else None
    for name, data, crops in view_settings():
        ours_views, their_views = partial(ours.views, data, crops, batch, numerics), peers.views(data, crops, batch)
        check_views(ours_views(), their_views())
        theirs = {"lightly": {"default settings": their_views}}
        yield Task(f"views of {name}, batch {batch}", ours_views, theirs, numerics=label)


def dino(shape: Shape = SMALL, given: dict = {}) -> Iterator[Task]:  # noqa: B006
    """One training step of DINO, including its views. Both sides use the ViT of smallvit."""
    for (name, data, crops), (bf16, suffix) in product(view_settings(), with_and_without_bf16()):
        their_views, spec = peers.views(data, crops, shape.batch), data.spec
        check_views(ours.views(data, crops, shape.batch), their_views())
        training = ours.fast(shape, data, bf16, given, objective=DINO, augment=crops, clip=0.0)
        theirs = {}
        for flags, best in flags_of("lightly").items():
            model = LightlyDINO(ours.vit(shape)(spec.size, spec.channels, len(spec.classes)), shape.dim)
            check_equal("parameters that DINO trains", count_parameters(training.objective), count_parameters(model))
            theirs[flags] = peers.dino(model, their_views, best, bf16)
        title, numerics = f"DINO step on {name}, batch {shape.batch}{suffix}", training.numerics.describe()
        yield Task(title, training.train_step, {"lightly": theirs}, numerics=numerics)


def view_settings() -> Iterator[tuple[str, Dataset, tuple[augment.MultiCrop]]]:
    """Yield name, data set and crops of the DINO benchmarks: digits, and photos of another size with colors."""
    for name, side, channels, crops in (("digits", 28, 1, augment.digit_crops()), ("photos", 32, 3, augment.photo_crops())):
        yield f"{name}, 2 global and {crops[0].local} local views", dataset(side, channels), crops


def check_views(smallvit: list[Tensor], peer: list[Tensor]):
    """Raise ValueError unless both lists hold as many views and pixels. Tensors may hold several views of equal size."""
    check_equal("views", *(sum(map(len, views)) for views in (smallvit, peer)))
    check_equal("pixels", *(sum(view.numel() for view in views) for views in (smallvit, peer)))


# A whole recipe


def recipe(
    steps: Sequence[int] = (20, 60), runs: int = 16, labels: int = 1_000, device: str = "cpu", shape: Shape = RECIPE
) -> Iterator[Task]:
    """Many runs of a small ViT, from the start of the process to the test accuracy, with augmentation.

    Runs are short, of two lengths, because the time to start a run matters much for short runs and little for long ones.
    """
    check_models(shape)
    where = "on a GPU" if device == "cuda" else "on all cores"
    of_peer = min(runs, 2) if device == "cuda" else runs  # one after another, all of them would take too long
    scaled = f", the peer: scaled from {of_peer} runs" if of_peer < runs else ""
    stack = ours.STACK_ON_GPU if device == "cuda" else ours.STACK
    stacked = f"smallvit trains {stack} as one model{scaled}"
    name = f"{runs} runs of a {count_tokens(shape)}-token ViT {where}, {labels:,} labels ({stacked})"
    for length in steps:
        job = (length, labels, device)
        theirs = {"timm": {flags: partial(peers.runs, shape, of_peer, *job, best) for flags, best in flags_of("timm").items()}}
        measure = partial(seconds, factor=runs / of_peer)
        yield Task(name, partial(ours.runs, shape, runs, *job, stack), theirs, "s", measure, length)


def gpu(steps: Sequence[int] = (20, 60), runs: Sequence[int] = (1, 16, 64), shape: Shape = TINY) -> Iterator[Task]:
    """On a GPU, if there is one: a training step of several runs at once, and the recipe with 64 runs.

    The peers train one run after another, so their time is that of one run, multiplied by the number of runs.
    """
    if not torch.cuda.is_available():
        return
    for bf16, suffix in [(True, ""), (False, ", without bf16")]:
        step = partial(peers.step, shape, "timm", bf16=bf16, device="cuda")
        of_timm = {flags: step(best) for flags, best in flags_of("timm").items()}
        compiled = {"best flags": step(True, compiled=True)} if of_timm and bf16 else {}
        for number in runs:
            name = f"training step of {number} run{'s' * (number > 1)} on a GPU, {describe_shape(shape)}{suffix}"
            theirs = {"timm, one after another": of_timm}
            theirs |= {"timm, one after another, torch.compile": compiled} if compiled else {}
            measure = partial(steps_on_gpu, number)
            yield Task(name, ours.steps_at_once(shape, number, bf16), theirs, measure=measure)
    yield from recipe(steps, runs=max(runs), device="cuda")


def steps_on_gpu(runs: int, calls: Sequence[Call], repeats: int, steps: int = 20) -> list[float]:
    """Return the milliseconds of a step of so many runs. The first call takes a step of all of them, each of the others a step
    of one run. A GPU works while the program goes on, so it is waited for only after 20 steps.
    """

    def several(call: Call):
        for _ in range(steps):
            call()
        torch.cuda.synchronize()

    own, *others = milliseconds([partial(several, call) for call in calls], repeats)
    return [own / steps, *(runs * other / steps for other in others)]


def seconds(calls: Sequence[Call], repeats: int, factor: float = 1) -> list[float]:
    """Return the time of each call in seconds, in one repetition after one that is not counted, because it takes minutes. The
    times of all calls but the first are multiplied by a factor.
    """
    own, *others = (time / 1_000 for time in milliseconds(calls, repeats=1))
    return [own, *(factor * other for other in others)]


def scale(
    images: Sequence[int] = (100, 1_000, 10_000, 60_000), runs: Sequence[int] = (2, 32), steps: int = 300, shape: Shape = RECIPE
) -> Iterator[Task]:
    """Whether a training step takes longer with more images, and a run with more runs. The "peer" is the smallest setting."""
    few, *more = images
    smallest = {f"{few} labels": {"default settings": ours.step_with_images(shape, few)}}
    for many in more:
        name = f"training step, {count_tokens(shape)} tokens, {many:,} labels"
        yield Task(name, ours.step_with_images(shape, many), smallest)
    few, *more = runs
    launch = partial(ours.runs, shape, steps=steps, labels=100, stack=1)
    smallest = {f"{few} runs": {"default settings": partial(launch, few)}}
    for many in more:
        name = f"each of {many} runs of {steps} steps on all cores"
        yield Task(name, partial(launch, many), smallest, "s", partial(seconds_per_run, (many, few)))


def seconds_per_run(numbers: Sequence[int], calls: Sequence[Call], repeats: int) -> list[float]:
    """Return the core-seconds of one run, for calls that make these numbers of runs on all cores."""
    return [time * min(number, peers.cores()) / number for time, number in zip(seconds(calls, repeats), numbers)]


def time_to_verdict(
    steps: Sequence[int] = (20, 60), job: Job = SPT_LSA, options: Sequence[str] = ("--fast",), length: int = 2_400,
    make_pool: Callable[[], Executor] = verdict.one_thread_processes,
) -> Iterator[Task]:  # fmt: skip
    """A whole recipe from the command to the report, by `smallvit run` with these options, and in a loop like timm's.

    Only smallvit with the options trains for the whole length. The others are timed for fewer steps, and the loop with fewer
    seeds, because they take hours; their times are scaled. Everything is timed once.
    """
    check_models(job.shape)
    few, of_timm = min(peers.cores(), job.seeds), flags_of("timm")
    scaled = partial(verdict.estimate, steps=steps, length=length)
    theirs = {"smallvit run, no options": {"default settings": partial(scaled, partial(verdict.command, job, ()))}}
    for how, seeds, pool in (("one run after another", 1, None), ("one process a core", few, make_pool())):
        loops = {flags: partial(verdict.loop, job._replace(seeds=seeds), best, pool) for flags, best in of_timm.items()}
        for loop in loops.values():
            loop(0)  # loads what is loaded on first use
        theirs[f"timm, {how}"] = {flags: partial(scaled, loop, factor=job.seeds / seeds) for flags, loop in loops.items()}
    runs = f"{len(job.runs()) // job.seeds} arms, {job.seeds} seeds, {job.labels:,} labels, {length:,} steps"
    shorter = f"peers: scaled from {' and '.join(map(str, steps))} steps, timm from 1 or {few} seeds"
    call = partial(verdict.estimate, partial(verdict.command, job, options), [length], length)
    name = f"{Path(job.recipe).stem} from the command to the report, {runs} ({shorter})"
    yield Task(name, call, theirs, "s", partial(returned, most=1), numerics=" ".join(options))


BENCHMARKS = {
    "train": train,
    "inference": inference,
    "augmentation": augmentation,
    "views": views,
    "dino": dino,
    "recipe": recipe,
    "scale": scale,
    "gpu": gpu,
    "memory": memory,
    "reduction": reduction,
    "verdict": time_to_verdict,
}
