"""Evaluators that run the model itself: its class probabilities, its accuracy, and the cost of a forward pass."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from smallvit import flops
from smallvit.augment import Augmentation, Batch, apply
from smallvit.augment.check import check_labels_kept, check_pixel_transforms
from smallvit.data import Images

from .cache import cached
from .declare import evaluator
from .hooks import frozen
from .splits import NamedScores, NotFinite, PerImage, Splits, is_whole_number, refuse_others, require_images, require_splits

BATCH = 1024  # images in a forward pass


def logits(model: nn.Module, images: Images) -> Tensor:
    """Return the logits of a model for `images`, as a float32 tensor of shape (images, classes) on the CPU. Inside the context
    manager `cached_features`, the evaluators of a model share them, so that the model runs once.

    Raises   ValueError if there are no images, if the model does not give one logit for each class, or if the logits are not
             finite.
    """
    return cached(partial(compute_logits, model, images), "logits", model, images)


def compute_logits(model: nn.Module, images: Images, augment: Sequence[Augmentation] = (), seed: int = 0) -> Tensor:
    """Run the model on all `images`, or on a copy of them that the transforms `augment` have changed with random numbers of
    this `seed`. Return its logits as a float32 tensor of shape (images, classes) on the CPU.

    Raises   ValueError if a transform changes the targets or makes several views, and the errors of `logits`.
    """
    refuse_others(images)
    parts, classes, generator = [], len(require_images(images).spec.classes), Generator().manual_seed(seed)
    with frozen(model) as reference:
        for start in range(0, len(images), BATCH):
            index = slice(start, start + BATCH)
            batch = Batch(images.pixels(index, reference.device), images.targets(index, reference.device))
            changed = apply(augment, batch, generator)
            if changed.views or not torch.equal(changed.targets, batch.targets):
                raise ValueError("a transform changes the targets or makes several views; expected such as augment.digits()")
            part = model(images.spec.normalize(changed.images).to(reference))
            if not isinstance(part, Tensor) or part.shape != batch.targets.shape:
                given = tuple(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
                raise ValueError(
                    f"{type(model).__name__} gives {given} for {len(batch.images)} images; expected a logit for each of"
                    f" {classes} classes, in one tensor"
                )
            parts.append(part.float().cpu())
    found = torch.cat(parts)
    if not found.isfinite().all():
        raise NotFinite(f"the logits of {type(model).__name__} are not finite; expected a model that has not diverged")
    return found


def predictions(model: nn.Module, images: Images) -> Tensor:
    """Return the class probabilities that a model gives to `images`, as a float64 tensor of shape (images, classes). They are
    the softmax of its logits. Inside the context manager `cached_features`, the model runs once for all evaluators.

    Raises   the errors of `logits`.
    """
    return logits(model, images).double().softmax(-1)


@evaluator(head=True)
def accuracy(model: nn.Module, splits: Splits) -> NamedScores:
    """Evaluator (a function that scores a model): classify the test images with the model itself. Yield the accuracy and the
    mean negative log-likelihood of the labels. `splits` holds the training, validation and test images.

    The two numbers are named `accuracy` and `nll`; `nll` is in nats. The accuracy is a `PerImage`: it knows which images are
    classified correctly.

    Raises   ValueError if the model does not give one logit for each class, or if the logits are not finite.
    """
    require_splits(splits)
    found, labels = logits(model, splits.test), splits.test.labels
    nll = sum(F.cross_entropy(*part, reduction="sum").item() for part in zip(found.split(BATCH), labels.split(BATCH)))
    yield "accuracy", PerImage(found.argmax(-1) == labels)
    yield "nll", nll / len(labels)


def require_copies(splits: Splits, *, augment: Sequence[Augmentation], copies: int = 8):
    """Raise ValueError unless `augmented_accuracy` can be computed with these options. They are tried on two images of
    `splits`.
    """
    if not is_whole_number(copies, 0):
        raise ValueError(f"copies is {copies!r}; expected a whole number of at least 0")
    images = require_images(splits.train if len(splits.train) else splits.test)
    check_pixel_transforms("augment", augment)
    check_labels_kept(augment, images.spec)
    two = slice(0, 2)
    apply(augment, Batch(images.pixels(two, "cpu"), images.targets(two, "cpu")), Generator().manual_seed(0))


@evaluator(head=True, needs=require_copies)
def augmented_accuracy(
    model: nn.Module, splits: Splits, *, augment: Sequence[Augmentation], copies: int = 8
) -> NamedScores:
    """Evaluator (a function that scores a model) with test-time augmentation: classify each test image by the mean of the class
    probabilities of the image and of `copies` randomly changed copies of it. Yield the accuracy and the mean negative
    log-likelihood of the labels. `splits` holds the training, validation and test images, and `augment` are the transforms that
    change the copies, such as `augment.digits(0.5)`.

    The numbers are named `augmented_accuracy` and `augmented_nll`. With copies=0 they are those of `accuracy`. The random
    numbers are the same in each call. The cost is `copies` + 1 forward passes for each image.

    Source   Krizhevsky et al. 2012 (AlexNet), section 4.1, with 10 fixed crops. Here the copies are drawn at random.
    Raises   ValueError if `copies` is no whole number from 0 on, if a transform changes the targets (such as Mixup), makes
             several views, or changes a digit to another, and the errors of `accuracy`.
    """
    require_splits(splits)
    require_copies(splits, augment=augment, copies=copies)
    images = splits.test
    total = logits(model, images).double().log_softmax(-1)  # logarithm of the sum of the probabilities
    for seed in range(copies):
        total = torch.logaddexp(total, compute_logits(model, images, augment, seed).double().log_softmax(-1))
    yield "augmented_accuracy", PerImage(total.argmax(-1) == images.labels)
    yield "augmented_nll", F.nll_loss(total - math.log(copies + 1), images.labels).item()


def require_cost(splits: Splits, *, batch: int = 32, repeats: int = 9):
    """Raise ValueError unless `cost` can be measured with these options. `splits` is not used."""
    if not (is_whole_number(batch) and is_whole_number(repeats)):
        raise ValueError(f"got batch={batch!r} and repeats={repeats!r}; expected whole numbers of at least 1")


@evaluator(judges=False, needs=require_cost)
def cost(model: nn.Module, splits: Splits, *, batch: int = 32, repeats: int = 9) -> NamedScores:
    """Evaluator (a function that scores a model): measure the cost of a forward pass. Yield the number of multiply-adds for one
    image (`macs`) and the time for a batch in milliseconds (`ms`). `splits` holds the training, validation and test images.

    `ms` is the median of `repeats` passes of `batch` images on this device, or of all test images if there are fewer. For a
    model that reduces its tokens, also:

    tokens   the mean number of tokens after the last block.
    speedup  time of the same model without reduction, with the fastest of its attention kernels, divided by the time of the
             model. All are measured side by side. Below 1 the reduction costs time.
    flops    the count of torch's FLOP counter, where the number of tokens does not depend on the image.
    macs_sd  the standard deviation of the MACs over images, where the number of tokens depends on the image; `macs` is then the
             mean. At most 1,000 images are used.

    `macs` of a model that reduces its tokens comes from a formula if every attention has an output projection `proj`, else it
    is `flops / 2`. The times are measured, so this is the only evaluator that is not deterministic.

    Raises   ValueError for `batch` or `repeats` below 1, and if there are no images.
    """
    require_splits(splits)
    require_cost(splits, batch=batch, repeats=repeats)
    images = next(iter(require_images(splits.test).batches(min(batch, len(splits.test)))))[0]
    with frozen(model) as reference:
        images = images.to(reference)
        if flops.reduces(model):
            numbers = reduced_cost(model, splits, images, repeats)
        else:
            times = flops.milliseconds([partial(flops.forward(model), images)], repeats)
            numbers = {"macs": float(flops.footprint(model, images)["macs"]), "ms": times[0]}
    yield from numbers.items()


def reduced_cost(model: Any, splits: Splits, images: Tensor, repeats: int) -> dict[str, float]:
    """Return the cost of a model that merges or prunes tokens, as a dict: multiply-adds, tokens, time, and speedup over the
    same model without merging or pruning. The time is measured `repeats` times on the batch `images`. The test images in
    `splits` are used where the number of tokens depends on the image: the result is then a mean over them.
    """
    size = (images.shape[2], images.shape[3])
    if tokens := flops.tokens_per_layer(model, size):
        counted = float(flops.counted(model, images[:1]))
        macs = sum(flops.closed_form(model, image=size).values()) if flops.has_closed_form(model) else counted / 2
        numbers = {"macs": macs, "flops": counted, "tokens": float(tokens[-1][1])}
    else:
        pixels = next(x for x, _ in splits.test.batches(1_000)).to(images)
        tokens = flops.seen_tokens(model, pixels)
        macs = torch.tensor(flops.macs_of_each(model, pixels, tokens), dtype=torch.float64)
        numbers = {"macs": macs.mean().item(), "macs_sd": macs.std(correction=0).item()}
        numbers["tokens"] = tokens[:, -1, 1].double().mean().item()
    ms, speedup = flops.speedup(model, images, repeats)
    return numbers | {"ms": ms, "speedup": speedup}
