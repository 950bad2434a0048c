"""Images and labels, how pixels are normalized, and held-out test images.

Pixels are normalized with the mean and standard deviation of all training images, labelled or not; no label is used. For
images on a black background (digits, characters, Fashion-MNIST) the mean is set to 0, so that black stays exactly 0. Every zero
padding inside a model (shifted patches, convolutions) is then background and not a gray frame.

Shapes: n images in a data set, b in a batch, c channels, h x w pixels, k classes.
"""

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Index = Tensor | slice
Device = torch.device | str | None


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """A description of a data set: name, number of channels, image size, class names, and the mean and standard deviation that
    normalize its pixels.

    `size` is (height, width) in pixels. `mean` and `std` have one number for each channel, for pixels in [0, 1].
    `digits=True` says that mirroring an image or rotating it by 180 degrees changes its label, as for digits and letters.
    `dtype` is the type of the stored pixels: "uint8" for 0 to 255, which stand for 0 to 1, or "float32".

    Raises   ValueError for a `size` that is not a pair, for one number or one text in place of a tuple, for another number of
             means or standard deviations than channels, and for a standard deviation of 0.
    """

    name: str
    channels: int
    size: tuple[int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digits: bool = False
    dtype: str = "uint8"

    def __post_init__(self):
        several = all(hasattr(each, "__len__") and not isinstance(each, str) for each in (self.classes, self.mean, self.std))
        if not several or not hasattr(self.size, "__len__") or len(self.size) != 2:
            raise ValueError(
                f"{self.name}: got size={self.size!r}, classes={self.classes!r:.60}, mean={self.mean!r}, std={self.std!r}; "
                "expected size=(height, width), and tuples of the names of the classes and of the mean and std of each channel"
            )
        if not len(self.mean) == len(self.std) == self.channels or not all(std > 0 for std in self.std):
            raise ValueError(
                f"{self.name}: expected {self.channels} means and standard deviations above 0, got {self.mean} and {self.std}"
            )

    def normalize(self, pixels: Tensor) -> Tensor:
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
    if type(pixels) is Tensor and pixels.is_cuda:
        means, stds = _moments(tuple(mean), tuple(std), pixels.device, pixels.dtype)
    else:
        means, stds = pixels.new_tensor([mean, std])[..., None, None]
    return (pixels - means).div_(stds)  # in place: no fresh memory, which takes longer than the division


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the tensors are kept, and may be used where gradients are computed
def _moments(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return means and standard deviations as a tensor of shape (2, channels, 1, 1) on a GPU. It is kept: to copy numbers to a
    GPU in each step would mean to wait for it.
    """
    return torch.tensor([mean, std], dtype=dtype, device=device)[..., None, None]


class Rows:
    """Selected images in a memory-mapped file. An object of this class is used like a tensor of these images: indexing reads
    only the images that are asked for. Everything else first reads all selected images into memory: an index with several axes
    such as `images[:, 0]`, the methods of a tensor, arithmetic, and comparisons.

    stored   a tensor over the memory-mapped file, with all its images
    index    positions of the selected images in the file
    """

    def __init__(self, stored: Tensor, index: Tensor):
        self.stored, self.index = stored, index
        self.dtype, self.shape, self.device = stored.dtype, torch.Size([len(index), *stored.shape[1:]]), stored.device

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: Any) -> Tensor:
        if index is None or index is Ellipsis or isinstance(index, tuple) or getattr(index, "ndim", 1) > 1:
            return self.stored[self.index][index]
        return self.stored[self.index[index]]

    def rows(self, index: Index) -> "Rows":
        """Return the images at the positions `index` among the selected ones, without reading them."""
        return Rows(self.stored, self.index[index])

    def to(self, device: Device) -> "Rows | Tensor":
        """Return this object if `device` is the CPU. For another device, return a tensor with all selected images there."""
        return self if device is None or torch.device(device).type == "cpu" else self[:].to(device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("stored", "index"):
            raise AttributeError(name)
        return getattr(self[:], name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        def read(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(read, value))
            return value[:] if isinstance(value, Rows) else value

        return function(*read(args), **{name: read(value) for name, value in (kwargs or {}).items()})


def _on_all(name: str) -> Callable[..., Tensor]:
    """Return a method of `Rows` that reads all selected images and calls the method `name` of the tensor of them."""
    return lambda rows, *others: getattr(rows[:], name)(*others)


# Python looks for the methods of operators in the class itself, where `Rows.__getattr__` does not add them
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
for _name in (*ARITHMETIC, *(f"r{name}" for name in ARITHMETIC), "neg", "abs", "invert", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Rows, f"__{_name}__", _on_all(f"__{_name}__"))


@dataclass(frozen=True, eq=False)
class Images:
    """A set of images (images, channels, height, width), with their labels as int64 (images) and a description of their data
    set (`DataSpec`). Pixels are uint8, or float32 if the description says so.

    The pixels are in memory, or in a memory-mapped file (then `images` is a `Rows` object, which is used like a tensor).
    `files` are the paths of the image files, relative to the folder of the data set, or None if the images come from no files.

    Raises    ValueError if the images, labels or files do not fit the spec.
    """

    images: Tensor
    labels: Tensor
    spec: DataSpec
    files: tuple[str, ...] | None = None

    def __post_init__(self):
        for name in ("images", "labels"):
            if type(getattr(self, name)).__module__ == "numpy":
                raise ValueError(f"got {name} as an array of NumPy; expected a tensor of torch: torch.from_numpy(array)")
        expected, dtype = (len(self.labels), self.spec.channels, *self.spec.size), self.spec.dtype
        if self.images.dtype != getattr(torch, dtype) or self.images.shape != expected:
            raise ValueError(f"expected {dtype} images {expected}, got {self.images.dtype} {tuple(self.images.shape)}")
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise ValueError(f"expected int64 labels ({len(self)},), got {self.labels.dtype} {tuple(self.labels.shape)}")
        unknown = self.labels[(self.labels < 0) | (self.labels >= len(self.spec.classes))].unique().tolist()
        if unknown:
            raise ValueError(f"expected labels from 0 to {len(self.spec.classes) - 1}, got {unknown[:5]}")
        if self.files is not None and len(self.files) != len(self):
            raise ValueError(f"expected the name of a file for each of the {len(self)} images, got {len(self.files)} names")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        """Return the number of images, the name of their data set, their size, and the number of classes."""
        name, (height, width), classes = self.spec.name, self.spec.size, len(self.spec.classes)
        return f"Images({len(self):,} of {name}, {self.spec.channels} x {height} x {width}, {classes} classes)"

    def pixels(self, index: Index = slice(None), device: Device = None) -> Tensor:
        """Return selected images as float32 pixels in [0, 1], shape (batch, channels, height, width). `index` selects the
        images, by default all. `device` is the torch device of the result.

        The result is a copy. Images that are stored as float32 keep their values, which may lie outside of [0, 1].
        """
        stored = self.images[index]
        images = stored.to(device)
        if not images.is_floating_point():
            return images.float().div_(255)
        return images.clone() if images is stored and isinstance(index, slice) else images

    def targets(self, index: Index = slice(None), device: Device = None) -> Tensor:
        """Return selected labels as one-hot vectors, float32 of shape (batch, classes). `index` selects the labels, by default
        all. `device` is the torch device of the result.
        """
        return F.one_hot(self.labels[index].to(device), len(self.spec.classes)).float()

    @functools.cached_property
    def sha256(self) -> str:
        """Return the SHA-256 hash of all pixels and labels, as a hexadecimal string."""
        digest = hashlib.sha256()
        for part in self.parts():
            digest.update(part.contiguous().numpy().data)
        digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()

    def take(self, index: Index) -> "Images":
        """Return a new `Images` object with the images and labels at the positions `index`, in the order of `index`. Images in
        a memory-mapped file are not read.
        """
        images: Any = self.images.rows(index) if isinstance(self.images, Rows) else self.images[index]
        positions = torch.arange(len(self))[index].tolist() if self.files or "pixel_hashes" in vars(self) else []
        taken = Images(images, self.labels[index], self.spec, self.files and tuple(self.files[i] for i in positions))
        if "pixel_hashes" in vars(self):  # known already
            vars(taken)["pixel_hashes"] = [self.pixel_hashes[i] for i in positions]
        return taken

    def with_spec(self, spec: DataSpec) -> "Images":
        """Return the same images with another description, for example another mean and standard deviation."""
        images = copy.copy(self)  # keeps the hashes that are known already
        object.__setattr__(images, "spec", spec)
        return images

    def parts(self) -> Iterator[Tensor]:
        """Yield the stored pixels in the stored order, in parts of at most 16 million values. So the pixels in a memory-mapped
        file are not all in memory at once.
        """
        size = max(1, 2**24 // max(1, self.images.shape[1:].numel()))
        for start in range(0, len(self), size):
            yield self.images[start : start + size]

    @functools.cached_property
    def pixel_hashes(self) -> list[bytes]:
        """Return a hash of the pixels of each image. Images with exactly the same pixels have the same hash."""
        return [hashlib.blake2b(image.tobytes(), digest_size=16).digest() for part in self.parts() for image in part.numpy()]

    def batches(self, size: int = 1024, device: Device = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches in the stored order, as pairs: normalized images (batch, channels, height, width) and labels (batch).
        `size` is the number of images in a batch; the last batch may be smaller.
        """
        if size < 1:
            raise ValueError(f"a batch needs at least 1 image, got size={size}")
        for start in range(0, len(self), size):
            index = slice(start, start + size)
            yield self.spec.normalize(self.pixels(index, device)), self.labels[index].to(device)


def joined(first: Images, second: Images | None) -> Images:
    """Return the images of two sets with the same description in one, `first` before `second`. Without `second`, the result is
    `first`. Images that lie in the same memory-mapped file are not read.
    """
    if second is None:
        return first
    one: Any = first.images
    other: Any = second.images
    if isinstance(one, Rows) and isinstance(other, Rows) and one.stored is other.stored:
        images: Any = Rows(one.stored, torch.cat([one.index, other.index]))
    else:
        images = torch.cat([one[:], other[:]])
    files = None if first.files is None or second.files is None else first.files + second.files
    return Images(images, torch.cat([first.labels, second.labels]), first.spec, files)


def with_moments(spec: DataSpec, images: Images) -> DataSpec:
    """Return the description `spec` with the mean and standard deviation of each channel of `images`, for pixels in [0, 1]. A
    constant channel gets the standard deviation 1.

    The images are read in parts, so that they need not fit into memory.

    Raises    ValueError for bytes that are all 0 or 1, which are nearly black.
    """
    if spec.dtype == "uint8":
        count = torch.zeros(spec.channels, 256, dtype=torch.int64)
        for part in images.parts():
            count += torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in part.unbind(1)])
        if count[:, 1].any() and not count[:, 2:].any():
            expected = "expected 0 to 255, or floats"
            raise ValueError(f"{spec.name}: the training images are bytes of 0 and 1, nearly black; {expected}")
        share = count.double() / count.sum(1, keepdim=True)
        value = torch.arange(256).double() / 255
        mean = share @ value
        std = (share * (value - mean[:, None]) ** 2).sum(1).sqrt()
    else:
        total = len(images) * spec.size[0] * spec.size[1]
        zero = torch.zeros(spec.channels, dtype=torch.float64)
        mean = sum((part.double().sum((0, 2, 3)) for part in images.parts()), zero) / total
        squares = (((part.double() - mean[:, None, None]) ** 2).sum((0, 2, 3)) for part in images.parts())
        std = (sum(squares, zero) / total).sqrt()
    return replace(spec, mean=tuple(mean.tolist()), std=tuple(torch.where(std > 0, std, 1.0).tolist()))


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

    def __init__(self, images: Images, pool: Images | None = None):
        """`images` are the test images. `pool` are the images of all folds if the test images are one of several folds."""
        self.__images, self.__pool = images, pool
        self.reads = 0

    def __repr__(self) -> str:
        """Return the number of test images, and how often they were read."""
        return f"HeldOut({self.count:,} test images, read {self.reads} times)"

    @property
    def sha256(self) -> str:
        """Return the SHA-256 hash of the pixels and labels of the test images, as a hexadecimal string. All folds of a data set
        have the same hash, that of the images of all folds.
        """
        return (self.__pool or self.__images).sha256

    @property
    def count(self) -> int:
        """The number of test images. Asking for this number does not open the images and is not counted as a use of the test
        set.
        """
        return len(self.__images)

    def without_pixels(self) -> Images:
        """Return the labels of the test images with blank pixels, for checks before training, such as that every class has a
        test image. This does not count as reading the test images.
        """
        images = self.__images
        blank = torch.zeros((), dtype=images.images.dtype, device=images.images.device)
        return Images(blank.expand(images.images.shape), images.labels, images.spec)

    def open(self) -> Images:
        """Return the test images. Each call adds 1 to the attribute `reads`, which counts how often the test images were read.

        Raises ValueError inside the context manager `sealed_test_images`.
        """
        if reason := SEALED.get():
            raise ValueError(f"the test images are sealed: {reason}; use the training or validation images instead")
        self.reads += 1
        return self.__images

    def changed(self, change: Callable[[Images], Images]) -> "HeldOut":
        """Return held-out test images that `change` has made from these, for example in another size. The function `change`
        takes and returns `Images`. This does not count as reading the test images.
        """
        return HeldOut(change(self.__images), self.__pool and change(self.__pool))

    def among(self, *others: Images) -> int:
        """Return the number of test images that also occur, with exactly the same pixels, in other sets of images. The
        arguments `others` are these sets, for example the training images.

        This does not count as reading the test images.
        """
        seen = {one for images in others for one in images.pixel_hashes}
        return sum(one in seen for one in self.__images.pixel_hashes)

    def _refuse(self, *_):
        """Raise TypeError, because held-out test images cannot be used like a list. They can only be read through the method
        `open`.
        """
        raise TypeError("the test images are held out: train and choose on train and val, then call .open() once at the end")

    __len__ = __iter__ = __getitem__ = _refuse
