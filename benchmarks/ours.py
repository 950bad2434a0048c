"""How smallvit does it: the steps that `fit` makes, the views that `DINO` compares, the runs that `launch` starts."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from benchmarks.digits import batch_of, dataset, splits
from benchmarks.peers import Shape, native_bf16, predict
from smallvit import Block, Dataset, PatchEmbed, Run, ViT, arrays, augment
from smallvit.augment import Batch, apply
from smallvit.launch import launch
from smallvit.launch.autotune import race, ways_to_try, winner
from smallvit.numerics import DEFAULT, Numerics
from smallvit.train.loop import Training

STACK = 4


def vit(shape: Shape) -> Callable:
    block, tokenizer = partial(Block, mlp_ratio=shape.mlp_ratio), partial(PatchEmbed, patch=shape.patch)
    return partial(ViT, tokenizer=tokenizer, block=block, dim=shape.dim, depth=shape.depth, heads=shape.heads)


def training(shape: Shape, data: Dataset, numerics: Numerics = DEFAULT, **choices) -> Training:
    """A training under way, as `fit` starts it; weights are not averaged, since the peers do not either."""
    run = Run(model=vit(shape), batch=shape.batch, steps=10**6, ema=0.0, **choices)
    started = Training(run, data, data.subset(labels=None, val=0, seed=0), "cpu", numerics=numerics)
    started.objective.train()
    return started


def fast(shape: Shape, data: Dataset, **choices) -> Training:
    """The same as `smallvit run --fast` computes it: tried before the clock starts, and not compiled, as the peers are not.

    Half precision is tried where the peers have it among their best flags.
    """
    ways = ways_to_try({} if native_bf16() else {"precision": None})
    times, _ = race(ways, lambda way: [training(shape, data, way, **choices)], [1])
    return training(shape, data, winner(times, ways), **choices)


def step(shape: Shape, numerics: Numerics = DEFAULT) -> Callable[[], None]:
    """One step of training; it also picks its images, normalises them and sets its learning rate."""
    return training(shape, dataset(), numerics).train_step


def step_among(shape: Shape, images: int) -> Callable[[], None]:
    """One step of training with so many images to choose from, augmentation included."""
    return training(shape, dataset(images=images), augment=augment.digits()).train_step


def inference(shape: Shape) -> Callable[[], Tensor]:
    """The logits of one batch, by the model that is evaluated."""
    data = dataset()
    return partial(predict, training(shape, data).model.eval(), batch_of(data, shape.batch)[0])


def augmentation(images: Tensor) -> Tensor:
    """Affine, elastic and erase."""
    steps = (*augment.digits(), augment.RandomErasing())
    return apply(steps, Batch(images, images.new_ones(len(images), 1)), torch.Generator().manual_seed(0)).images


def views(data: Dataset, steps: Sequence[Callable], batch: int) -> list[Tensor]:
    """Normalised, those of one size together."""
    chosen = slice(batch)
    seen = apply(steps, Batch(data.train.pixels(chosen), data.train.targets(chosen)), torch.Generator().manual_seed(0))
    return [data.spec.normalise(views) for views in seen.views]


def runs(shape: Shape, number: int, steps: int, labels: int, device: str = "cpu", stack: int = STACK):
    """Launched in an empty folder, on all cores, so many seeds as one model. Raises RuntimeError if one has failed."""
    with TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
        file = Path(folder) / "digits.npz"
        (images, known), (unseen, asked) = splits(28).values()
        np.savez(file, train_images=images, train_labels=known, test_images=unseen, test_labels=asked)
        one = Run(
            data=partial(arrays, path=str(file)),
            labels=labels,
            val=0,
            model=vit(shape),
            augment=augment.digits(),
            steps=steps,
            batch=shape.batch,
            ema=0.0,
        )
        seeds = [one.vary(seed=seed) for seed in range(number)]
        records = launch(seeds, folder, recipe="benchmark", stack=stack, device=device)
    failed = [record["error"] for record in records if record["status"] != "finished"]
    if failed:
        raise RuntimeError(failed[0])
