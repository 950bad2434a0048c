"""The batch that every transform takes and returns, and the checks of the transforms' options."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from smallvit.components import python_numbers


class Batch(NamedTuple):
    """A batch of training images (batch, channels, height, width) with the target probabilities of each image (batch, classes).
    Transforms take images before they are normalized, objectives take images and views after that. The batch may also hold
    augmented views of the images, the logits of teacher models, and random numbers of the objective.

    images           float32. For transforms: pixels in [0, 1], where 0 is black, such as bytes / 255. For objectives: the same
                     pixels after normalization, (pixels - mean) / std. Neither checks this
    targets          one row for each image; each row sums to 1, or is all 0 for an image without a label
    views            for self-supervised learning: one tensor for each size of view, `(views b) c h w`, all images' first views
                     first, then all images' second views, and so on
    teacher_logits   logits of teacher models, `b k` each; empty without a teacher
    draws            what an objective draws for the step in `prepare`, such as the patches to hide
    """

    images: Tensor
    targets: Tensor
    views: tuple[Tensor, ...] = ()
    teacher_logits: tuple[Tensor, ...] = ()
    draws: tuple[Tensor, ...] = ()


Augmentation = Callable[[Batch, Generator], Batch]
Random = dict[str, Tensor]
"""The random numbers of a transform, by name. The first axis of each tensor is the image."""

ON_CPU: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}  # where numbers are drawn, whatever the defaults of torch


class Transform:
    """Base class of the transforms of this package. A transform first draws all its random numbers (`draw`), and then changes
    the batch (`change`). Several batches can therefore be changed at once, which is faster, while each has random numbers of
    its own: draw for each of them, `concatenate` the numbers and the batches, and change the result.

    off         True if the options turn the transform off; by default, if its option `probability` is 0. Then `draw` and
                `change` must not be called.
    in_place    True if `change` overwrites the images of the batch
    """

    in_place = False

    @property
    def off(self) -> bool:
        return not getattr(self, "probability", 1.0)

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        """Return random numbers for images of a `shape` (batch, channels, height, width). `generator` is the random number
        generator.
        """
        raise NotImplementedError

    def change(self, batch: Batch, random: Random) -> Batch:
        """Return the changed batch. `random` holds its random numbers, from `draw`."""
        raise NotImplementedError

    def __call__(self, batch: Batch, *generators: Generator) -> Batch:
        """Return the changed batch. With several generators, the batch consists of as many parts of equal size, and each part
        has random numbers of its own generator.

        Raises ValueError for images, targets or generators that do not fit together; see `apply`.
        """
        check_batch(type(self).__name__, batch, generators)
        images = batch.images
        if self.off or not len(images):
            return batch
        shape = (len(images) // len(generators), *images.shape[1:])
        draws = [self.draw(shape, generator) for generator in generators]
        random = concatenate(draws) if len(draws) > 1 else draws[0]
        with torch.autocast(images.device.type, enabled=False):  # pixels are not rounded to half precision
            return self.change(batch._replace(images=images.clone()) if self.in_place else batch, random)


class ChosenTransform(Transform):
    """Base class of the transforms that change randomly chosen images. Each image is chosen with the option `probability`."""

    probability: float

    def draw(self, shape: Sequence[int], generator: Generator) -> Random:
        return {"chosen": torch.rand(shape[0], generator=generator, **ON_CPU) < self.probability}


def check_batch(name: str, batch: Any, generators: Sequence[Any]):
    """Raise ValueError unless a transform with this `name` can change the batch with these generators of random numbers."""
    if not isinstance(batch, Batch):
        raise ValueError(f"{name} got {type(batch).__name__}; expected Batch(images, targets), a row of targets for each image")
    images, targets = batch.images, batch.targets
    if not (isinstance(images, Tensor) and isinstance(targets, Tensor)):
        given = type(targets if isinstance(images, Tensor) else images)
        raise ValueError(
            f"{name} got {given.__module__}.{given.__name__}; expected a torch.Tensor for images and for targets: "
            "torch.from_numpy(array) makes one"
        )
    if images.dtype != torch.float32:
        raise ValueError(f"{name} got {images.dtype} images; expected float32 images b c h w in [0, 1]: bytes.float() / 255")
    if images.ndim != 4 or targets.ndim != 2 or len(images) != len(targets) or not targets.is_floating_point():
        got = f"images {tuple(images.shape)} and {targets.dtype} targets {tuple(targets.shape)}"
        raise ValueError(f"{name} got {got}; expected float32 images b c h w and float targets b k, such as one-hot labels")
    if not generators or not all(isinstance(generator, Generator) for generator in generators):
        raise ValueError(f"{name} got the random number generators {list(generators)!r}; expected torch.Generator()")
    if len(images) % len(generators):
        raise ValueError(f"{len(images)} images cannot be divided into {len(generators)} equal parts, one for each generator")


def concatenate(draws: Sequence[Random]) -> Random:
    """Return the random numbers of several batches as those of one batch."""
    return {name: torch.cat([random[name] for random in draws]) for name in draws[0]}


def apply(transforms: Sequence[Augmentation], batch: Batch, generator: Generator | Sequence[Generator]) -> Batch:
    """Apply all transforms to a batch, one after the other, and return the new batch. `generator` is the random number
    generator. The images are pixels in [0, 1] that are not normalized yet; this range is not checked, because it takes time.

    `generator` may also be a list of generators. Then the batch consists of as many parts of equal size, and each part changes
    as it does alone with its own generator. All parts are changed at once, which is faster.

    Raises    ValueError if the images are not float32 `b c h w`, if there is not one row of targets for each image, or if the
              batch cannot be divided into as many parts as there are generators.
    """
    if not isinstance(transforms, tuple | list):
        raise ValueError(f"transforms is {transforms!r}; expected several, such as ({type(transforms).__name__}(),)")
    generators: list[Generator] = [*generator] if isinstance(generator, Sequence) else [generator]
    check_batch("apply", batch, generators)
    unknown = [transform for transform in transforms if len(generators) > 1 and not changes_parts(transform)]
    if unknown:
        raise ValueError(
            f"{unknown[0]!r} cannot change several parts of a batch at once; expected one generator, or only transforms of "
            "smallvit"
        )
    changed = batch
    exact = torch.autocast(batch.images.device.type, enabled=False)  # pixels are not rounded to half precision
    with exact, torch.inference_mode():  # records nothing for gradients, which makes small operations faster
        for transform in transforms:
            changed = transform(changed, *generators)
    if changed is batch:
        return batch
    images, targets, *lists = changed
    return Batch(_usual(images), _usual(targets), *(tuple(map(_usual, tensors)) for tensors in lists))


def changes_parts(transform: Augmentation) -> bool:
    """Return whether a transform can change several parts of a batch at once, each with its own random numbers. Those of this
    package can; a `MultiCrop` can if all its transforms can. A `Transform` of somebody else could mix images of two parts.
    """
    inner = getattr(transform, "transforms", None)  # of a MultiCrop
    known = isinstance(transform, Transform) if inner is None else all(map(changes_parts, inner))
    return known and type(transform).__module__.startswith("smallvit.augment.")


def size_after(transform: Any, h: int, w: int) -> tuple[int, int]:
    """Return the (height, width) in pixels of an image after a transform, as its method `output_size` says, if it has one. `h`
    and `w` are the height and the width before.
    """
    return transform.output_size(h, w) if hasattr(transform, "output_size") else (h, w)


def _usual(tensor: Tensor) -> Tensor:
    """Return a tensor that can be used to compute gradients, a copy of a tensor that was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, as `tensor.to(device)` does. The program goes on while a GPU still computes: for this, the
    values are first copied to memory that the GPU can read at any time ("pinned").
    """
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def symmetric_uniform(*shape: int, generator: Generator) -> Tensor:
    """Return random numbers of the given shape, drawn uniformly from -1 to 1. `generator` is the random number generator."""
    return torch.empty(shape, **ON_CPU).uniform_(-1, 1, generator=generator)  # faster than 2 * torch.rand() - 1, and equal


def use_python_numbers(transform: Any):
    """Replace NumPy numbers in the options of a transform by Python numbers, if it is a dataclass."""
    for name in getattr(transform, "__dataclass_fields__", ()):
        value = getattr(transform, name, None)
        if (number := python_numbers(value)) is not value:
            object.__setattr__(transform, name, number)


def check_range(transform: Any, **ranges: tuple[float, float]) -> None:
    """Raise ValueError unless some options of a transform are numbers in the allowed range. Each keyword argument in `ranges`
    is the name of an option with its (lowest, highest) value. For example, `probability=(0, 1)` checks that
    `transform.probability` is from 0 to 1. Before, NumPy numbers in any option are replaced by Python numbers.
    """
    use_python_numbers(transform)
    for name, (low, high) in ranges.items():
        value = getattr(transform, name)
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{type(transform).__name__}({name}={value!r}): expected a number from {low} to {high}")


def check_interval(transform: object, name: str, low: float, high: float) -> None:
    """Raise ValueError unless an option of a transform is a pair of numbers (a, b) with low <= a <= b <= high. `name` is the
    name of the option.
    """
    value = getattr(transform, name)
    pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, int | float) for end in value)
    if not (pair and low <= value[0] <= value[1] <= high):
        raise ValueError(f"{type(transform).__name__}({name}={value!r}): expected (a, b) with {low} <= a <= b <= {high}")


def is_whole_number(value: Any, minimum: int = 1) -> bool:
    """Return True if `value` is an integer of at least `minimum`, else False. True and False do not count as integers."""
    return type(value) is int and value >= minimum


def height_width(size: Any) -> tuple[int, int] | None:
    """Return a size in pixels as a pair (height, width). `size` is a pair of this form, or one integer for a square. For
    anything else, return None.
    """
    pair = (size, size) if isinstance(size, int) else size
    return (pair[0], pair[1]) if isinstance(pair, tuple) and len(pair) == 2 and all(map(is_whole_number, pair)) else None
