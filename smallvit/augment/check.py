"""Checks of transforms before they are used: what they change, and whether they suit the data set."""

from collections.abc import Callable, Sequence
from typing import Any

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
