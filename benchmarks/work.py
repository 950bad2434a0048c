"""What is timed. Each benchmark yields `Work`: what is to be done, our call that does it, and the peers'.

Before the clock starts it is checked that all do the same work: as many multiply-adds and parameters, as many views and pixels,
an own draw for each image.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import ours, peers
from benchmarks.digits import dataset
from benchmarks.memory import growth_of_a_fresh_process
from benchmarks.peers import AUGMENTATIONS, VITS, LightlyDINO, Shape, version
from smallvit import DINO, Dataset, augment
from smallvit.flops import counted, milliseconds
from smallvit.numerics import DEFAULT, Numerics

Call = Callable[[], object]

FLAGS = {"as shipped": False, "best flags": True}  # whether a peer is at its best

SHAPES = (Shape(64, 6, 4, batch=128), Shape(192, 12, 3, batch=128), Shape(384, 12, 6, batch=64))  # the last is ViT-S
SMALL = Shape(64, 6, 4, batch=64)
RECIPE = Shape(64, 4, 2, batch=32, patch=7, mlp_ratio=2.0)  # 16 tokens and the class token


class Work(NamedTuple):
    """One thing to do. `theirs[peer][flags]` are the peers' calls; of one that is not installed there are none.

    `measure(calls, repeats)` gives a number for each call, in `unit`s. `steps` is how long the runs of a recipe are, `how` in
    which way our steps are computed, where that was tried.
    """

    name: str
    ours: Call
    theirs: dict[str, dict[str, Call]]
    unit: str = "ms"
    measure: Callable[[Sequence[Call], int], list[float]] = milliseconds
    steps: int | None = None
    how: str | None = None


def compare(work: Work, repeats: int) -> Iterator[dict]:
    """One line of the record for each peer; None for what was not measured."""
    calls = {("ours", ""): work.ours}
    calls |= {(peer, flags): call for peer, by_flags in work.theirs.items() for flags, call in by_flags.items()}
    found = dict(zip(calls, work.measure([*calls.values()], repeats)))
    for peer in work.theirs:
        theirs = {flags: found.get((peer, flags)) for flags in FLAGS}
        what = {"work": work.name, "steps": work.steps, "unit": work.unit, "how": work.how}
        yield what | {"ours": found["ours", ""], "peer": peer, **theirs}


def ways(peer: str) -> dict[str, bool]:
    """In which ways a peer is timed: none where it is not installed."""
    return FLAGS if version(peer) else {}


def same(what: str, ours: object, theirs: object):
    """Refuse to time two who do not do the same."""
    if ours != theirs:
        raise ValueError(f"{what}: ours {ours}, theirs {theirs}; expected equal, or their times cannot be compared")


# A step of training, inference, memory


def train(shapes: Sequence[Shape] = SHAPES) -> Iterator[Work]:
    """One step of training."""
    for shape in shapes:
        check_models(shape)
        theirs = {peer: {name: peers.step(shape, peer, best) for name, best in ways(peer).items()} for peer in VITS}
        training = ours.fast(shape, dataset())
        yield Work(f"training step, {in_words(shape)}", training.train_step, theirs, how=training.numerics.describe())


def inference(shapes: Sequence[Shape] = SHAPES) -> Iterator[Work]:
    """The logits of one batch."""
    for shape in shapes:
        check_models(shape)
        theirs = {peer: {name: peers.inference(shape, peer, best) for name, best in ways(peer).items()} for peer in VITS}
        yield Work(f"inference, {in_words(shape)}", ours.inference(shape), theirs)


def memory(shape: Shape = SHAPES[-1], growth: Callable = growth_of_a_fresh_process) -> Iterator[Work]:
    """How far a fresh process grows by a model and two steps of its training, with each kernel; where Linux tells."""
    if sys.platform == "linux":
        check_models(shape)
        steps = {name: partial(peers.step, peer="timm", best=best) for name, best in ways("timm").items()}
        theirs = {"timm": {name: partial(growth, step, shape) for name, step in steps.items()}}
        for name, numerics in (("", DEFAULT), (", fused attention", Numerics(kernel="fused"))):
            call = partial(growth, partial(ours.step, numerics=numerics), shape)
            yield Work(f"peak memory of a training step, {in_words(shape)}{name}", call, theirs, "MiB", told)


def told(calls: Sequence[Call], repeats: int) -> list[float]:
    """What the calls themselves say, the median of no more than three."""
    return [median(call() for _ in range(min(repeats, 3))) for call in calls]


def check_models(shape: Shape):
    """Multiply-adds are equal for all. vit-pytorch has more norms and fewer biases, so that its parameters differ a little."""
    model, image = ours.vit(shape)((28, 28), 1, 10).eval(), torch.zeros(1, 1, 28, 28)
    for peer, made in VITS.items():
        if version(peer):
            theirs = made(shape, 28, 1, best=False).eval()
            same(f"multiply-adds of {peer}", counted(model, image), counted(theirs, image))
            if peer == "timm":
                same(f"parameters of {peer}", trained(model), trained(theirs))


def trained(model: nn.Module) -> int:
    """How many parameters are trained."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def in_words(shape: Shape) -> str:
    return f"width {shape.dim}, depth {shape.depth}, batch {shape.batch}"


def tokens(shape: Shape) -> int:
    """Patches of a digit."""
    return (28 // shape.patch) ** 2


# Augmentation and views


def augmentation(batch: int = 256) -> Iterator[Work]:
    """Affine, elastic and erase, each image its own draw; the peers have no flags that would make theirs faster."""
    images = dataset().train.pixels(slice(batch))
    check_augmentation("ours", ours.augmentation, images)
    theirs = {}
    for peer, made in AUGMENTATIONS.items():
        theirs[peer] = {}
        if version(peer):
            change = made()
            check_augmentation(peer, change, images)
            theirs[peer]["as shipped"] = partial(change, images)
    yield Work(f"affine, elastic and erase on {batch} images", partial(ours.augmentation, images), theirs)


def check_augmentation(who: str, change: Callable[[Tensor], Tensor], images: Tensor):
    """Images keep their size, and of equal ones no two come out alike."""
    out = change(images[:1].repeat(4, 1, 1, 1))
    same(f"size of what {who} gives", images.shape[1:], out.shape[1:])
    same(f"different images that {who} makes of 4 equal ones", 4, len({image.numpy().tobytes() for image in out}))


def views(batch: int = 64) -> Iterator[Work]:
    """The views that DINO compares, from bytes to normalised pixels."""
    for name, data, steps in looks():
        mine, look = partial(ours.views, data, steps, batch), peers.views(data, steps, batch)
        check_views(mine(), look())
        yield Work(f"views of {name}, batch {batch}", mine, {"lightly": {"as shipped": look}})


def dino(shape: Shape = SMALL) -> Iterator[Work]:
    """One step of DINO, its views included. The ViT is ours on both sides."""
    for name, data, steps in looks():
        look, spec = peers.views(data, steps, shape.batch), data.spec
        check_views(ours.views(data, steps, shape.batch), look())
        training = ours.fast(shape, data, objective=DINO, augment=steps, clip=0.0)
        theirs = {}
        for flags, best in ways("lightly").items():
            model = LightlyDINO(ours.vit(shape)(spec.size, spec.channels, len(spec.classes)), shape.dim)
            same("parameters that DINO trains", trained(training.objective), trained(model))
            theirs[flags] = peers.dino(model, look, best)
        how = training.numerics.describe()
        yield Work(f"DINO step on {name}, batch {shape.batch}", training.train_step, {"lightly": theirs}, how=how)


def looks() -> Iterator[tuple[str, Dataset, tuple[augment.MultiCrop]]]:
    """Images, and how they are looked at."""
    for name, side, channels, steps in (("digits", 28, 1, augment.digit_crops()), ("photos", 32, 3, augment.photo_crops())):
        yield f"{name}, 2 views and {steps[0].local} small ones", dataset(side, channels), steps


def check_views(mine: list[Tensor], theirs: list[Tensor]):
    """As many views and as many pixels; ours stand together by size."""
    same("views", *(sum(map(len, looks)) for looks in (mine, theirs)))
    same("pixels", *(sum(views.numel() for views in looks) for looks in (mine, theirs)))


# A whole recipe


def recipe(
    steps: Sequence[int] = (20, 60), runs: int = 16, labels: int = 1_000, device: str = "cpu", shape: Shape = RECIPE
) -> Iterator[Work]:
    """Many runs of a small ViT, from nothing to the accuracy on test images, augmentation included, by the wall clock.

    Short runs, of two lengths: what every run takes to start weighs much in them, and little in a recipe.
    """
    check_models(shape)
    where = "on a GPU" if device == "cuda" else "on all cores"
    name = f"{runs} runs of a {tokens(shape)}-token ViT {where}, {labels:,} labels (ours {ours.STACK} as one)"
    for length in steps:
        job = (shape, runs, length, labels, device)
        theirs = {"timm": {flags: partial(peers.runs, *job, best) for flags, best in ways("timm").items()}}
        yield Work(name, partial(ours.runs, *job), theirs, "s", seconds, length)


def gpu(steps: Sequence[int] = (20, 60)) -> Iterator[Work]:
    """The recipe with 64 runs on a GPU, where there is one."""
    if torch.cuda.is_available():
        yield from recipe(steps, runs=64, device="cuda")


def seconds(calls: Sequence[Call], repeats: int) -> list[float]:
    """No more than three turns count: one takes minutes."""
    return [time / 1_000 for time in milliseconds(calls, min(repeats, 3))]


def scale(
    images: Sequence[int] = (100, 1_000, 10_000, 60_000), runs: Sequence[int] = (2, 32), steps: int = 300, shape: Shape = RECIPE
) -> Iterator[Work]:
    """Whether an image costs as much when there are many, and a run among many: each beside the fewest."""
    few, *more = images
    beside = {f"{few} labels": {"as shipped": ours.step_among(shape, few)}}
    for many in more:
        yield Work(f"training step, {tokens(shape)} tokens, {many:,} labels", ours.step_among(shape, many), beside)
    few, *more = runs
    each = partial(ours.runs, shape, steps=steps, labels=100, stack=1)
    beside = {f"{few} runs": {"as shipped": partial(each, few)}}
    for many in more:
        name = f"each of {many} runs of {steps} steps on all cores"
        yield Work(name, partial(each, many), beside, "s", partial(each_of, (many, few)))


def each_of(numbers: Sequence[int], calls: Sequence[Call], repeats: int) -> list[float]:
    """The seconds of a core that each of so many runs takes."""
    return [time * min(number, peers.cores()) / number for time, number in zip(seconds(calls, repeats), numbers)]


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
}
