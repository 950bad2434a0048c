"""Data sets in memory: images and labels, how pixels are normalized, held-out test images, and labelled subsets.

Pixels are normalized with the mean and standard deviation of all training images, labelled or not; no label is used. For
images on a black background (digits, characters, Fashion-MNIST) the mean is set to 0, so that black stays exactly 0. Every zero
padding inside a model (shifted patches, convolutions) is then background and not a gray frame.

Shapes: n images in a data set, b in a batch, c channels, h x w pixels, k classes.
"""

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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
    """A description of a data set: name, number of channels, image size, class names, and the mean and standard deviation that
    normalize its pixels.

    `size` is (height, width) in pixels. `mean` and `std` have one number for each channel, for pixels in [0, 1].
    `digits=True` says that mirroring an image or rotating it by 180 degrees changes its label, as for digits and letters.
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
        """Return normalized images, (pixels - mean) / std, which are the input of a model. `pixels` are floats in [0, 1] of
        shape (batch, channels, height, width), with any height and width.
        """
        if not pixels.is_floating_point() or pixels.shape[-3] != self.channels:
            expected = f"floats in [0, 1] with {self.channels} channels, b c h w"
            raise ValueError(f"{self.name}: expected {expected}, got {pixels.dtype} {tuple(pixels.shape)}")
        return normalize(pixels, self.mean, self.std)


def normalize(pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return normalized images, (pixels - mean) / std. `pixels` has the shape (batch, channels, height, width). `mean` and
    `std` hold one number for each channel.
    """
    means, stds = pixels.new_tensor([mean, std])[..., None, None]
    return (pixels - means) / stds


@dataclass(frozen=True, eq=False)
class Images:
    """A set of images in memory as uint8 (images, channels, height, width), with their labels as int64 (images) and a
    description of their data set (`DataSpec`).

    Raises    ValueError if the images or labels do not fit the spec.
    """

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
        """Return selected images as float32 pixels in [0, 1], shape (batch, channels, height, width). `index` selects the
        images, by default all. `device` is the torch device of the result.
        """
        return self.images[index].to(device).float() / 255

    def targets(self, index: Index = slice(None), device: Device = None) -> Tensor:
        """Return selected labels as one-hot vectors, float32 of shape (batch, classes). `index` selects the labels, by default
        all. `device` is the torch device of the result.
        """
        return F.one_hot(self.labels[index].to(device), len(self.spec.classes)).float()

    @functools.cached_property
    def sha256(self) -> str:
        """Return the SHA-256 hash of all pixels and labels, as a hexadecimal string."""
        digest = hashlib.sha256(self.images.contiguous().numpy().data)
        digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()

    def take(self, index: Index) -> "Images":
        """Return a new `Images` object with the images and labels at the positions `index`, in the order of `index`."""
        return Images(self.images[index], self.labels[index], self.spec)

    def batches(self, size: int = 1024, device: Device = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches in the stored order, as pairs: normalized images (batch, channels, height, width) and labels (batch).
        `size` is the number of images in a batch; the last batch may be smaller.
        """
        if size < 1:
            raise ValueError(f"a batch needs at least 1 image, got size={size}")
        for start in range(0, len(self), size):
            index = slice(start, start + size)
            yield self.spec.normalise(self.pixels(index, device)), self.labels[index].to(device)


SEALED: ContextVar[str | None] = ContextVar("SEALED", default=None)


@contextmanager
def sealed_test_images(reason: str | None):
    """Context manager inside which the test images of all data sets cannot be read: the method `open` of `HeldOut` (a set of
    test images) raises ValueError with the text `reason`. Inside an inner context with `reason=None`, they can be read again.
    """
    token = SEALED.set(reason)
    try:
        yield
    finally:
        SEALED.reset(token)


class HeldOut:
    """A set of test images that can only be read by calling the method `open`, so that training code cannot use them by
    mistake.

    `reads` counts the calls of `open()`. Length, iteration and indexing raise TypeError.
    """

    def __init__(self, images: Images):
        self.__images = images
        self.reads = 0

    @property
    def sha256(self) -> str:
        """Return the SHA-256 hash of the pixels and labels of the test images, as a hexadecimal string."""
        return self.__images.sha256

    @property
    def count(self) -> int:
        """The number of test images. Asking for this number does not open the images and is not counted as a use of the test
        set.
        """
        return len(self.__images)

    def open(self) -> Images:
        """Return the test images. Each call adds 1 to the attribute `reads`, which counts how often the test images were read.

        Raises ValueError inside the context manager `sealed_test_images`.
        """
        if reason := SEALED.get():
            raise ValueError(f"the test images are sealed: {reason}; use the training or validation images instead")
        self.reads += 1
        return self.__images

    def among(self, *others: Images) -> int:
        """Return the number of test images that also occur, with exactly the same pixels, in other sets of images. The
        arguments `others` are these sets, for example the training images.

        This does not count as reading the test images.
        """
        seen = {hash(image.tobytes()) for images in others for image in images.images.numpy()}
        return sum(hash(image.tobytes()) in seen for image in self.__images.images.numpy())

    def _refuse(self, *_):
        """Raise TypeError, because held-out test images cannot be used like a list. They can only be read through the method
        `open`.
        """
        raise TypeError("the test images are held out: train and choose on train and val, then call .open() once at the end")

    __len__ = __iter__ = __getitem__ = _refuse


@dataclass(frozen=True, eq=False)
class Subset:
    """The images of one training run: labelled training images and validation images. The positions of these images in the data
    set are stored too.

    `index` are the indices of `train` in the training images of the data set. `val_index` are the indices of `val` in the
    validation images of the data set or, if it has none, in its training images.
    """

    train: Images
    val: Images
    index: Tensor
    val_index: Tensor

    @property
    def sha256(self) -> str:
        """Return the SHA-256 hash of the indices of the labelled images, as a hexadecimal string. Subsets with the same
        labelled images in the same order have the same hash.

        The attribute `index` is hashed as little-endian int64.
        """
        return hashlib.sha256(self.index.numpy().astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: a description, training images, held-out test images and, if there are any, validation images."""

    spec: DataSpec
    train: Images
    test: HeldOut
    val: Images | None = None

    @functools.cached_property
    def sha256(self) -> str:
        """Return the SHA-256 hash of the pixels and labels of all images (training, test and validation), as a hexadecimal
        string.

        The hash depends only on the data, not on where the files are.
        """
        parts = [self.train.sha256, self.test.sha256] + ([] if self.val is None else [self.val.sha256])
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    @functools.cached_property
    def repeats(self) -> int:
        """Return the number of test images that also occur, with exactly the same pixels, among the training or validation
        images.
        """
        return self.test.among(self.train, *([] if self.val is None else [self.val]))

    @classmethod
    def from_arrays(
        cls, name: str, splits: dict[str, tuple], classes: tuple[str, ...], *, black: bool = False, digits: bool = False
    ) -> "Dataset":
        """Return a `Dataset` made from numpy arrays. `splits` is a dict that maps "train", "test" and optionally "val" to a
        pair (images, labels). `name` is the name of the data set, and `classes` holds the class names.

        Images are `n h w` or `n h w c`, uint8 or floats in [0, 1]; labels are integers, `n` or `n 1`. `black=True` says that
        the background is black: the mean for normalization is then 0. `digits` as in `DataSpec`.

        Raises    ValueError for fewer than 2 classes, or naming the split whose images or labels do not fit.
        """
        pixels = {split: _to_uint8(images, f"{name}, {split} images") for split, (images, _) in splits.items()}
        if len(classes) < 2:
            raise ValueError(f"{name}: expected at least 2 classes, got {list(classes)}")
        if pixels["train"].max() == 1:
            raise ValueError(f"{name}: the training images are bytes of 0 and 1, nearly black; expected 0 to 255, or floats")
        mean, std = _mean_and_std(pixels["train"])
        channels, h, w = pixels["train"].shape[1:]
        mean = (0.0,) * channels if black else mean
        spec = DataSpec(name=name, channels=channels, size=(h, w), classes=classes, mean=mean, std=std, digits=digits)
        images = {}
        for split, (_, labels) in splits.items():
            n = len(pixels[split])
            if labels.dtype.kind not in "iu" or labels.shape not in ((n,), (n, 1)):
                raise ValueError(f"{name}, {split} labels: expected {n} integers, got {labels.dtype} {labels.shape}")
            try:
                images[split] = Images(pixels[split], torch.from_numpy(labels.astype(np.int64).reshape(n)), spec)
            except ValueError as error:
                raise ValueError(f"{name}, {split}: {error}") from error
        return cls(spec, images["train"], HeldOut(images["test"]), images.get("val"))

    def subset(self, *, labels: int | None, val: int | None, seed: int) -> Subset:
        """Draw the images of one training run and return them as a `Subset`. The option `labels` is the number of labelled
        images, divided among the classes as equally as possible. The option `val` is the number of validation images. The
        option `seed` is the random seed.

        labels   number of labelled training images; None: all training images that are not used for validation
        val      number of validation images; None: all of the data set's own, or, if it has none, a fifth of the training
                 images, at most 1,000

        The classes take turns, in an order drawn by the seed, and each class gives its images in a shuffled order. So the first
        images of a large subset are a smaller subset: every prefix is class-balanced, and the first 100 of 1,000 labels are the
        subset with labels=100. A data set without validation images gives some training images: those at the end of each
        class's order, in proportion to the class sizes. They are never labelled, and are the same for every `labels`. The own
        validation images of a data set are shuffled, and the first `val` are taken.

        Raises    ValueError if there are fewer images than requested, or a class has too few images for a balanced subset.
        """
        source = self.train if self.val is None else self.val
        for name, count, most in (("labels", labels, len(self.train)), ("val", val, len(source))):
            if count is not None and (not isinstance(count, int) or not 0 <= count <= most):
                raise ValueError(f"{name}={count!r}: expected None or a number from 0 to {most}, the number of images")
        if self.val is None:
            held_out = min(1000, len(self.train) // 5) if val is None else val
            order, val_index = balanced_split(self.train.labels, held_out, seed, "subset")
        else:
            order, _ = balanced_split(self.train.labels, 0, seed, "subset")
            val_index = torch.tensor(shuffled(list(range(len(self.val))), seed, "val")[:val], dtype=torch.int64)
        self._check_class_sizes(labels, order, seed)
        return Subset(self.train.take(order[:labels]), source.take(val_index), order[:labels], val_index)

    def _check_class_sizes(self, labels: int | None, order: Tensor, seed: int) -> None:
        """Raise ValueError if a class has too few training images for a random class-balanced subset of `labels` labelled
        images. With `labels=None`, one image per class is enough. `order` holds the indices of the training images that the
        subset may use. `seed` is the random seed, which decides which classes get one image more than others.
        """
        k = len(self.spec.classes)
        if labels is not None and labels < k:
            raise ValueError(f"labels={labels} leaves classes without a training image: expected at least {k}, one for each")
        left = torch.bincount(self.train.labels[order], minlength=k).tolist()
        turns = shuffled(list(range(k)), seed, "subset/class")
        most = min(left[label] * k + turn for turn, label in enumerate(turns))
        for turn, label in enumerate(turns):
            needed = 1 if labels is None else labels // k + (turn < labels % k)
            if left[label] < needed:
                name, held_out = self.spec.classes[label], len(self.train) - len(order)
                raise ValueError(
                    f"labels={labels} needs {needed} training images of class {name!r}, which has {left[label]} besides the "
                    f"{held_out} validation images; the largest balanced subset here has {most} labels"
                )


def balanced_split(labels: Tensor, held_out: int, seed: int, stream: str) -> tuple[Tensor, Tensor]:
    """Split images at random into two parts, and return two tensors: the indices of each part. The second part has `held_out`
    images, in proportion to the class sizes. In the first part the classes alternate. `labels` holds the labels of all images.
    The number `seed` and the text `stream`, the name of a random stream, determine the order.

    The order of the classes, and of the images within a class, is random. The held-out images are the last ones of each class.
    """
    index = torch.tensor(shuffled(list(range(len(labels))), seed, stream))
    label = labels[index]
    count = torch.bincount(label)
    rank = torch.empty_like(index)  # the position of an image within its class
    rank[label.argsort(stable=True)] = torch.cat([torch.arange(n) for n in count.tolist()])
    turn = torch.tensor(shuffled(list(range(len(count))), seed, f"{stream}/class")).argsort()
    order = (rank * len(count) + turn[label]).argsort()
    is_held_out = (rank >= (count - _proportional(held_out, count))[label])[order]
    return index[order][~is_held_out], index[order][is_held_out]


def _proportional(total: int, count: Tensor) -> Tensor:
    """Return integers (a tensor) that sum to `total` and are proportional to the numbers in `count`, as nearly as possible
    (largest remainder method).
    """
    share, remainder = total * count // count.sum(), total * count % count.sum()
    share[remainder.argsort(descending=True, stable=True)[: total - int(share.sum())]] += 1
    return share


def _to_uint8(array: np.ndarray, name: str) -> Tensor:
    """Return images as a uint8 tensor (n, c, h, w). `array` is a numpy array (n, h, w) or (n, h, w, c) of uint8, or of floats
    in [0, 1]. `name` describes the array in error messages.
    """
    array = array[..., None] if array.ndim == 3 else array
    if array.ndim != 4 or array.shape[-1] not in (1, 3, 4) or not array.size:
        raise ValueError(f"{name}: expected n h w or n h w c with 1, 3 or 4 channels and at least one image, got {array.shape}")
    if array.dtype.kind == "f":
        wrong = np.argwhere(~((array >= 0) & (array <= 1)))  # also finds NaN
        if len(wrong):
            raise ValueError(f"{name}: expected floats in [0, 1], but image {wrong[0][0]} has {array[tuple(wrong[0])]}")
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(f"{name}: expected uint8 or floats in [0, 1], got {array.dtype}")
    return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))


def _mean_and_std(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return two tuples: the mean and the standard deviation of each channel of uint8 images, scaled to [0, 1]. A constant
    channel gets the standard deviation 1.
    """
    count = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    share = count / count.sum(1, keepdim=True)
    value = torch.arange(256).double() / 255
    mean = share @ value
    std = (share * (value - mean[:, None]) ** 2).sum(1).sqrt()
    return tuple(mean.tolist()), tuple(torch.where(std > 0, std, 1.0).tolist())
