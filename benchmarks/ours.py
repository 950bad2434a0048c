"""How smallvit does each task: training steps as in `fit`, views for `DINO`, and runs started by `launch`."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.digits import dataset, first_batch, splits
from benchmarks.peers import Shape, has_native_bf16, predict
from smallvit import Block, Dataset, Merge, PatchEmbed, Run, ViT, arrays, augment
from smallvit import apply as reduce
from smallvit.ablation import ArmRun
from smallvit.augment import Batch, apply
from smallvit.flops import counted, milliseconds
from smallvit.launch import launch
from smallvit.launch.autotune import race, ways_to_try, winner
from smallvit.launch.gpus import SHARING
from smallvit.native import reason_against
from smallvit.numerics import DEFAULT, Numerics, NumericsContext, making_views
from smallvit.train.loop import Training
from smallvit.train.stack import Stack

STACK, STACK_ON_GPU = 4, 16


def vit(shape: Shape) -> Callable:
    """Return the `partial(ViT, ...)` of this shape."""
    block, tokenizer = partial(Block, mlp_ratio=shape.mlp_ratio), partial(PatchEmbed, patch=shape.patch)
    return partial(ViT, tokenizer=tokenizer, block=block, dim=shape.dim, depth=shape.depth, heads=shape.heads)


def training(shape: Shape, data: Dataset, numerics: Numerics = DEFAULT, device: str = "cpu", **choices) -> Training:
    """Return a training as `fit` starts it, but without the moving average of weights, which the peers do not have."""
    run = Run(model=vit(shape), batch=shape.batch, steps=10**6, ema=0.0, **choices)
    started = Training(run, data, data.subset(labels=None, val=0, seed=0), device, numerics=numerics)
    started.objective.train()
    return started


def ways(bf16: bool, given: dict) -> list[Numerics]:
    """Return the numerics that are tried; the options in `given` are fixed. Half precision is tried only if the best flags of
    the peers include it.
    """
    return ways_to_try(given if bf16 and has_native_bf16() else given | {"precision": None})


def fast(shape: Shape, data: Dataset, bf16: bool = True, given: dict = {}, **choices) -> Training:  # noqa: B006
    """Return a training with the fastest numerics (see `ways`), as `smallvit run --fast` chooses them, but never compiled. The
    choice is made before anything is timed.
    """
    tried = ways(bf16, given)
    times, _ = race(tried, lambda way: [training(shape, data, way, **choices)], [1])
    return training(shape, data, winner(times, tried), **choices)


def step(shape: Shape, numerics: Numerics = DEFAULT) -> Callable[[], None]:
    """Return a call that makes one training step, including the choice of the batch, normalization and learning rate."""
    return training(shape, dataset(), numerics).train_step


def steps_at_once(shape: Shape, runs: int, bf16: bool) -> Callable[[], None]:
    """Return a call that makes one training step of several runs on a GPU, as one model, including the choice of the batches.
    They differ in their seeds. With `bf16`, matrix products have half precision.
    """
    data, numerics = dataset(), Numerics("bf16" if bf16 else "fp32")
    members = [training(shape, data, numerics, "cuda", seed=seed) for seed in range(runs)]
    return (Stack(members) if runs > 1 else members[0]).train_step


def step_with_images(shape: Shape, images: int) -> Callable[[], None]:
    """Return a call that makes one training step with augmentation, on a training set of this many images."""
    return training(shape, dataset(images=images), augment=augment.digits()).train_step


def inference(shape: Shape, bf16: bool = True, given: dict = {}) -> tuple[Callable[[], Tensor], Numerics]:  # noqa: B006
    """Return a call that computes the logits of one batch, with the fastest numerics (see `ways`), and these numerics. They are
    chosen before anything is timed.
    """
    data = dataset()
    model, images = training(shape, data).model.eval(), first_batch(data, shape.batch)[0]
    tried = ways(bf16, given)
    calls = [partial(predict_with, NumericsContext(model, way), way, model, images) for way in tried]
    times = dict(zip(tried, milliseconds(calls, 5)))
    return calls[tried.index(best := winner(times, tried))], best


def predict_with(context: NumericsContext, numerics: Numerics, model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of images, computed with some numerics."""
    with context.active():
        return predict(model, images, best=numerics.precision == "bf16")


def merging(shape: Shape, side: int, channels: int, r: int, numerics: Numerics) -> tuple[Callable, Callable, float]:
    """Return a call that computes the logits of one batch with `r` merges in each block, a call that does so without merging,
    and the multiply-adds of the first divided by those of the second.
    """
    images = torch.randn(shape.batch, channels, side, side, generator=torch.Generator().manual_seed(0))
    plain = vit(shape)((side, side), channels, 10).eval()
    merging = reduce(plain, partial(Merge, r=r))
    calls = [partial(predict_with, NumericsContext(model, numerics), numerics, model, images) for model in (merging, plain)]
    return *calls, counted(merging, images) / counted(plain, images)


def augmentation(images: Tensor) -> Tensor:
    """Apply affine and elastic transforms and random erasing to images of shape (batch, channels, height, width)."""
    transforms = (*augment.digits(), augment.RandomErasing())
    return apply(transforms, Batch(images, images.new_ones(len(images), 1)), torch.Generator().manual_seed(0)).images


def views(data: Dataset, crops: Sequence[Callable], batch: int, numerics: Numerics = DEFAULT) -> list[Tensor]:
    """Return the normalized views of the first `batch` images; views of one size are in one tensor. With the kernel "native",
    they are made as in training with it.
    """
    images = Batch(data.train.pixels(slice(batch)), data.train.targets(slice(batch)))
    with making_views(numerics, "cpu"):
        made = apply(crops, images, torch.Generator().manual_seed(0)).views
    return [data.spec.normalize(views) for views in made]


def runs(shape: Shape, number: int, steps: int, labels: int, device: str = "cpu", stack: int = STACK):
    """Train `number` seeds in an empty folder, `stack` of them as one model: on all cores, or in four processes on a GPU.
    Raises RuntimeError if one fails.
    """
    with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        file = Path(folder) / "digits.npz"
        (train, train_labels), (test, test_labels) = splits(28).values()
        np.savez(file, train_images=train, train_labels=train_labels, test_images=test, test_labels=test_labels)
        run = Run(
            data=partial(arrays, path=str(file)),
            labels=labels,
            val=0,
            model=vit(shape),
            augment=augment.digits(),
            steps=steps,
            batch=shape.batch,
            ema=0.0,
        )
        seeds = [ArmRun(run=run.vary(seed=seed), arm="ViT") for seed in range(number)]
        numerics = Numerics(kernel=None if device != "cpu" or reason_against() else "native")
        jobs = None if device == "cpu" else SHARING
        records = launch(seeds, folder, recipe="benchmark", jobs=jobs, stack=stack, device=device, numerics=numerics)
    failed = [record.error for record in records if record.status != "finished"]
    if failed:
        raise RuntimeError(failed[0])
