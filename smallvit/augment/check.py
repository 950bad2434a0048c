"""Checks of transforms before they are used: what they change, and whether they suit the data set."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from .batch import Batch, changes_parts, size_after
from .mix import CutMix, Mixup, SmoothLabels
from .multicrop import MultiCrop


def check_pixel_transforms(name: str, transforms: Any):
    """Raise ValueError unless `transforms`, the value of the option `name`, is a tuple of transforms that change only the
    pixels of each image.
    """
    if not isinstance(transforms, tuple | list) or not all(map(callable, transforms)):
        raise ValueError(f"{name} is {transforms!r}; expected a tuple of transforms, such as {name}=augment.digits(0.3)")
    for transform in transforms:
        if isinstance(transform, Mixup | CutMix | SmoothLabels | MultiCrop):
            kind = type(transform).__name__
            reason = "makes several views" if isinstance(transform, MultiCrop) else "changes targets"
            raise ValueError(f"{name} has {kind}, which {reason}; expected changes of the pixels of one image, remove {kind}")


def check_labels_kept(transforms: Sequence[Callable], spec: Any):
    """Raise ValueError if the data set contains digits and one of the `transforms` would change one digit to another, such as a
    flip. `spec`, a `DataSpec`, describes the data set.
    """
    for transform in transforms if spec.digits else ():
        reason = getattr(transform, "unsafe_for_digits", None)
        if reason:
            raise ValueError(
                f"{type(transform).__name__} on {spec.name}: {reason}; remove it from augment, or set force=True in it"
            )


def check_own_transforms(transforms: Sequence[Callable], batch: Batch):
    """Raise ValueError if one of the `transforms` that are not of this package cannot be used in training. `batch` holds some
    training images. Each transform is called twice with the same random numbers: it must return a batch of as many images of
    the same size, and the second time the same one.
    """
    for transform in transforms:
        first = called(transform, batch)
        if not is_of_this_package(transform):
            check_changed(transform, batch, first)
            if not all(map(equal, tensors_of(first), tensors_of(called(transform, batch)))):
                raise ValueError(
                    f"{name_of(transform)} in augment returned two different batches for the same batch and the same random "
                    "numbers, so the run could not be repeated; draw all numbers from the generator that it is given, as in "
                    "torch.rand(shape, generator=generator), and not from numpy or random"
                )
        batch = first


def is_of_this_package(transform: Callable) -> bool:
    """Return whether a transform, with all transforms inside it, is one of this package."""
    if not isinstance(transform, MultiCrop):
        return changes_parts(transform)
    return all(map(changes_parts, (*transform.first, *(transform.second or ()), *transform.small)))


def called(transform: Callable, batch: Batch) -> Any:
    """Return what a transform gives for a copy of a batch and for random numbers that are always the same, also those of torch
    without a generator, as transforms of torchvision draw them: a run seeds torch in each step.
    """
    copied, device = Batch(batch.images.clone(), batch.targets.clone()), batch.images.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.inference_mode():
        torch.manual_seed(0)
        return transform(copied, Generator().manual_seed(0))


def check_changed(transform: Callable, batch: Batch, changed: Any):
    """Raise ValueError unless `changed`, which a transform returned for a batch, can be used in its place."""
    if not isinstance(changed, Batch):
        raise ValueError(
            f"{name_of(transform)} in augment returned a {type(changed).__name__}; expected a Batch, such as "
            "batch._replace(images=images)"
        )
    b, c, h, w = batch.images.shape
    expected, targets = (b, c, *size_after(transform, h, w)), tuple(batch.targets.shape)
    if tuple(changed.images.shape) != expected or tuple(changed.targets.shape) != targets:
        raise ValueError(
            f"{name_of(transform)} in augment returned images {tuple(changed.images.shape)} and targets "
            f"{tuple(changed.targets.shape)}; expected {expected} and {targets}: a transform that changes the size of images "
            "needs a method output_size(height, width), which returns the new size"
        )
    if changed.images.dtype != torch.float32:
        raise ValueError(f"{name_of(transform)} in augment returned images of {changed.images.dtype}; expected torch.float32")


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return all tensors of a batch."""
    return [batch.images, batch.targets, *batch.views]


def equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal up to rounding, which may differ from call to call on a GPU."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def name_of(transform: Callable) -> str:
    """Return the name of a transform for a message: that of its class, or that of a function."""
    return getattr(transform, "__name__", type(transform).__name__)
