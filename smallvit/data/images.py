"""What a data set is: its images and how they are normalised, the sealed test images, and the labelled subset of a seed.

One `DataSpec` carries what a model and a pipeline must know: channels, size, classes and how pixels are normalised. Images on
a black background (digits, characters, Fashion-MNIST) keep mean 0 and are divided by the standard deviation: black stays
exactly 0, so every zero padding inside a model (shifted patches, convolutions) is background rather than a grey frame.
Photos, and people's own data, use mean and standard deviation. Both come from the pixels of all training images, labelled or
not, and from no label.

Letters: n images in a data set, b in a batch, c channels, h w pixels, k classes.
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from smallvit.rng import shuffled

Index = Tensor | slice
Device = torch.device | str | None


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What a model and a pipeline must know about images; `size` is (height, width) in pixels.

    `digits` says that a mirror image or a half turn changes the label, as it does for digits and letters.
    """

    name: str
    channels: int
    size: tuple[int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digits: bool = False

    def __post_init__(self):
        if not len(self.mean) == len(self.std) == self.channels or not all(std > 0 for std in self.std):
            raise ValueError(
                f"{self.name}: expected {self.channels} means and standard deviations above 0, got {self.mean} and {self.std}"
            )

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] -> what the model sees; b c h w of any height and width."""
        if not pixels.is_floating_point() or pixels.shape[-3] != self.channels:
            expected = f"floats in [0, 1] with {self.channels} channels, b c h w"
            raise ValueError(f"{self.name}: expected {expected}, got {pixels.dtype} {tuple(pixels.shape)}")
        mean, std = pixels.new_tensor([self.mean, self.std])[..., None, None]
        return (pixels - mean) / std


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images in memory: `images` uint8 n c h w, `labels` int64 n."""

    images: Tensor
    labels: Tensor
    spec: DataSpec

    def __post_init__(self):
        expected = (len(self.labels), self.spec.channels, *self.spec.size)
        if self.images.dtype != torch.uint8 or self.images.shape != expected:
            raise ValueError(f"expected uint8 images {expected}, got {self.images.dtype} {tuple(self.images.shape)}")
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise ValueError(f"expected int64 labels ({len(self)},), got {self.labels.dtype} {tuple(self.labels.shape)}")
        unknown = self.labels[(self.labels < 0) | (self.labels >= len(self.spec.classes))].unique().tolist()
        if unknown:
            raise ValueError(f"expected labels from 0 to {len(self.spec.classes) - 1}, got {unknown[:5]}")

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, index: Index = slice(None), device: Device = None) -> Tensor:
        """The chosen images as float32 in [0, 1], b c h w; they travel to the device as bytes."""
        return self.images[index].to(device).float() / 255

    def targets(self, index: Index = slice(None), device: Device = None) -> Tensor:
        """The chosen labels as float32 rows that sum to 1, b k: what mixup and label smoothing work on."""
        return F.one_hot(self.labels[index].to(device), len(self.spec.classes)).float()

    @functools.cached_property
    def sha256(self) -> str:
        """Of all pixels and labels."""
        digest = hashlib.sha256(self.images.contiguous().numpy())
        digest.update(self.labels.contiguous().numpy())
        return digest.hexdigest()

    def take(self, index: Index) -> "Images":
        """The images at `index`, in that order."""
        return Images(self.images[index], self.labels[index], self.spec)

    def batches(self, size: int = 1024, device: Device = None) -> Iterator[tuple[Tensor, Tensor]]:
        """(normalised images b c h w, labels b) in stored order; the last batch may be shorter."""
        if size < 1:
            raise ValueError(f"a batch needs at least 1 image, got size={size}")
        for start in range(0, len(self), size):
            chosen = slice(start, start + size)
            yield self.spec.normalise(self.pixels(chosen, device)), self.labels[chosen].to(device)


class HeldOut:
    """The test images behind one door: `open()` hands them out and counts it in `reads`; nothing else reaches them."""

    def __init__(self, images: Images):
        self.__images = images
        self.reads = 0

    @property
    def sha256(self) -> str:
        return self.__images.sha256

    def open(self) -> Images:
        self.reads += 1
        return self.__images

    def among(self, *others: Images) -> int:
        """How many test images are, pixel by pixel, among these others too."""
        seen = {hash(image.tobytes()) for images in others for image in images.images.numpy()}
        return sum(hash(image.tobytes()) in seen for image in self.__images.images.numpy())

    def _refuse(self, *_):
        raise TypeError("the test images are sealed: train and choose on train and val, then call .open() once at the end")

    __len__ = __iter__ = __getitem__ = _refuse


@dataclass(frozen=True, eq=False)
class Subset:
    """What one run may see: its labelled images, from the places `index` of the training images, and its validation images.

    `val_index` are their places in the data's own validation images or, without these, in the training images.
    """

    train: Images
    val: Images
    index: Tensor
    val_index: Tensor

    @property
    def sha256(self) -> str:
        """Of the labelled images' places as little-endian int64, in the order drawn: equal means the same labels were seen."""
        return hashlib.sha256(self.index.numpy().astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training images, sealed test images and, where the data brings them, its own validation images."""

    spec: DataSpec
    train: Images
    test: HeldOut
    val: Images | None = None

    @functools.cached_property
    def sha256(self) -> str:
        """Of all pixels and labels of all splits: equal means the same data, wherever the files lie."""
        parts = [self.train.sha256, self.test.sha256] + ([] if self.val is None else [self.val.sha256])
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @functools.cached_property
    def repeats(self) -> int:
        """How many test images are training or validation images too."""
        return self.test.among(self.train, *([] if self.val is None else [self.val]))

    @classmethod
    def from_arrays(
        cls, name: str, splits: dict[str, tuple], classes: tuple[str, ...], *, black: bool = False, digits: bool = False
    ) -> "Dataset":
        """A data set out of numpy arrays: `splits` are train, test and maybe val, each (images, labels).

        Images n h w or n h w c, uint8 or floats in [0, 1]; labels n or n 1. `black`: the background is, so the mean is 0.

        Raises: ValueError naming the split whose pixels or labels do not fit.
        """
        pixels = {part: _pixels(images, f"{name}, {part} images") for part, (images, _) in splits.items()}
        if pixels["train"].max() == 1:
            raise ValueError(f"{name}: the training images are bytes of 0 and 1, nearly black; expected 0 to 255, or floats")
        mean, std = _statistics(pixels["train"])
        channels, *size = pixels["train"].shape[1:]
        mean = (0.0,) * channels if black else mean
        spec = DataSpec(name=name, channels=channels, size=tuple(size), classes=classes, mean=mean, std=std, digits=digits)
        images = {}
        for part, (_, labels) in splits.items():
            n = len(pixels[part])
            if labels.dtype.kind not in "iu" or labels.shape not in ((n,), (n, 1)):
                raise ValueError(f"{name}, {part} labels: expected {n} integers, got {labels.dtype} {labels.shape}")
            try:
                images[part] = Images(pixels[part], torch.from_numpy(labels.astype(np.int64).reshape(n)), spec)
            except ValueError as error:
                raise ValueError(f"{name}, {part}: {error}") from error
        return cls(spec, images["train"], HeldOut(images["test"]), images.get("val"))

    def subset(self, *, labels: int | None, val: int | None, seed: int) -> Subset:
        """`labels` class-balanced training images and `val` validation images, fixed by `seed` alone.

        The classes take turns, in an order that the seed decides, and each gives its images in a shuffled order. So every
        prefix is balanced, and the first 100 of 1,000 are the 100. Validation images come from the other end of the same
        orders, in proportion to the class frequencies: never among the labelled, and the same for every `labels`. Where the
        data has its own validation images, these are shuffled and the first `val` taken.

        `labels=None`: all training images that do not validate. `val=None`: a fifth of the training images, at most 1,000,
        or all of the data's own validation images.

        Raises: ValueError if there are fewer images than asked for, or a class has too few for its turns.
        """
        source = self.train if self.val is None else self.val
        for name, count, most in (("labels", labels, len(self.train)), ("val", val, len(source))):
            if count is not None and (not isinstance(count, int) or not 0 <= count <= most):
                raise ValueError(f"{name}={count!r}: expected None or a number from 0 to {most}, the images that there are")
        if self.val is None:
            held = min(1000, len(self.train) // 5) if val is None else val
            order, val_index = draw(self.train.labels, held, seed, "subset")
        else:
            order, _ = draw(self.train.labels, 0, seed, "subset")
            val_index = torch.tensor(shuffled(range(len(self.val)), seed, "val")[:val], dtype=torch.int64)
        self._check_turns(labels, order, seed)
        return Subset(self.train.take(order[:labels]), source.take(val_index), order[:labels], val_index)

    def _check_turns(self, labels: int | None, order: Tensor, seed: int) -> None:
        """Refuse `labels` if a class has fewer images left in `order` than turns to give one, or no turn at all."""
        k = len(self.spec.classes)
        if labels is not None and labels < k:
            raise ValueError(f"labels={labels} leaves classes without a training example: expected at least {k}, one for each")
        left = torch.bincount(self.train.labels[order], minlength=k).tolist()
        turns = shuffled(range(k), seed, "subset/class")
        most = min(left[label] * k + turn for turn, label in enumerate(turns))
        for turn, label in enumerate(turns):
            needed = 1 if labels is None else labels // k + (turn < labels % k)
            if left[label] < needed:
                name, held = self.spec.classes[label], len(self.train) - len(order)
                raise ValueError(
                    f"labels={labels} needs {needed} images of class {name!r}, which has {left[label]} beside the {held} for "
                    f"validation; a balanced subset here has at most {most} labels"
                )


def draw(labels: Tensor, held: int, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Places of the images in turns of the classes: those to draw from, and `held` ones from the end of each class."""
    place = torch.tensor(shuffled(range(len(labels)), seed, name))
    label = labels[place]
    count = torch.bincount(label)
    rank = torch.empty_like(place)  # the rank of an image within its class
    rank[label.argsort(stable=True)] = torch.cat([torch.arange(n) for n in count.tolist()])
    turn = torch.tensor(shuffled(range(len(count)), seed, f"{name}/class")).argsort()
    order = (rank * len(count) + turn[label]).argsort()
    is_held = (rank >= (count - _proportional(held, count))[label])[order]
    return place[order][~is_held], place[order][is_held]


def _proportional(total: int, count: Tensor) -> Tensor:
    """`total` shared out in proportion to `count` by the largest remainder, in whole numbers throughout."""
    share, remainder = total * count // count.sum(), total * count % count.sum()
    share[remainder.argsort(descending=True, stable=True)[: total - int(share.sum())]] += 1
    return share


def _pixels(array: np.ndarray, what: str) -> Tensor:
    """Images n h w or n h w c, bytes or fractions -> uint8 n c h w."""
    array = array[..., None] if array.ndim == 3 else array
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4) or not array.size:
        raise ValueError(f"{what}: expected n h w or n h w c with 1, 3 or 4 channels and at least one image, got {array.shape}")
    if array.dtype.kind == "f":
        wrong = np.argwhere(~((array >= 0) & (array <= 1)))  # NaN fails both
        if len(wrong):
            raise ValueError(f"{what}: expected floats in [0, 1], but image {wrong[0][0]} has {array[tuple(wrong[0])]}")
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(f"{what}: expected uint8 or floats in [0, 1], got {array.dtype}")
    return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))


def _statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1], from its histogram; a channel that never varies gets 1."""
    count = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    share = count / count.sum(1, keepdim=True)
    value = torch.arange(256).double() / 255
    mean = share @ value
    std = (share * (value - mean[:, None]) ** 2).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
