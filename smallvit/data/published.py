"""Loaders for public data sets: scikit-learn's digits, and sets of torchvision, which are downloaded if a file is missing.

`root` is the folder of all downloaded data sets; by default the environment variable SMALLVIT_DATA, else a cache folder. Files
are checked against their headers or published checksums when they are read.
"""

import functools
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from smallvit.storage import cache_folder, locked

from .dataset import Dataset
from .folds import balanced_split

DIGITS = tuple("0123456789")


@functools.cache
def digits() -> Dataset:
    """Return scikit-learn's data set of handwritten digits: 1,797 images of 8 x 8 pixels. The same 500 images are always the
    test images. Nothing is downloaded. Thirteen people wrote the digits. It is not recorded who wrote which, so the same people
    wrote training and test images.
    """
    from sklearn.datasets import load_digits

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    images = np.rint(images.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    train, test = (index.sort().values for index in balanced_split(torch.from_numpy(labels), 500, 0, "digits/test"))
    splits = {"train": (images[train], labels[train]), "test": (images[test], labels[test])}
    return Dataset.from_arrays("digits", splits, DIGITS, black=True, digits=True)


@functools.cache
def mnist(root: str | None = None) -> Dataset:
    """Return the data set MNIST: 60,000 training and 10,000 test images of handwritten digits, 28 x 28 pixels. It is downloaded
    if a file is missing. `root` is the folder of downloaded data sets, by default the environment variable SMALLVIT_DATA, else
    a cache folder.
    """
    return Dataset.from_arrays("mnist", _load_idx("MNIST", root), DIGITS, black=True, digits=True)


@functools.cache
def fashion_mnist(root: str | None = None) -> Dataset:
    """Return the data set Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28 x 28 pixels. It is downloaded if
    a file is missing. `root` is the folder of downloaded data sets, by default the environment variable SMALLVIT_DATA, else a
    cache folder.
    """
    classes = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
    return Dataset.from_arrays("fashion_mnist", _load_idx("FashionMNIST", root), classes, black=True)


@functools.cache
def kmnist(root: str | None = None) -> Dataset:
    """Return the data set Kuzushiji-MNIST: 60,000 training and 10,000 test images of cursive Japanese characters, 28 x 28
    pixels. It is downloaded if a file is missing. `root` is the folder of downloaded data sets, by default the environment
    variable SMALLVIT_DATA, else a cache folder.
    """
    classes = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
    return Dataset.from_arrays("kmnist", _load_idx("KMNIST", root), classes, black=True, digits=True)


@functools.cache
def emnist(split: str = "letters", root: str | None = None) -> Dataset:
    """Return one part of the data set EMNIST: images of handwritten characters, 28 x 28 pixels. `split` is the name of the
    part, such as "letters" or "digits". It is downloaded if a file is missing. `root` is the folder of downloaded data sets, by
    default the environment variable SMALLVIT_DATA, else a cache folder.

    Raises ValueError for another `split`.
    """
    from torchvision.datasets import EMNIST

    if split not in EMNIST.splits:
        raise ValueError(f"EMNIST has no split {split!r}; expected one of {', '.join(EMNIST.splits)}")
    first = 1 if split == "letters" else 0  # the labels of letters start at 1, and all images are stored transposed
    found = _load_idx("EMNIST", root, (f"emnist-{split}-train", f"emnist-{split}-test"), options=({"split": split},))
    splits = {part: (images.transpose(0, 2, 1), labels - first) for part, (images, labels) in found.items()}
    classes = tuple(EMNIST.classes_split_dict[split][first:])
    return Dataset.from_arrays(f"emnist-{split}", splits, classes, black=True, digits=True)


@functools.cache
def qmnist(root: str | None = None) -> Dataset:
    """Return the data set QMNIST: the 60,000 training images of MNIST and 60,000 reconstructed test images, 28 x 28 pixels.
    It is downloaded if a file is missing. `root` is the folder of downloaded data sets, by default the environment variable
    SMALLVIT_DATA, else a cache folder.

    The digits of one person are one group, as in `folder`: validation and training images come from different people, and the
    interval of a verdict is for new people.
    """
    found = _load_idx("QMNIST", root, ("qmnist-train", "qmnist-test"), "idx2-int", ({"train": True}, {"train": False}))
    splits = {part: (images, labels[:, 0]) for part, (images, labels) in found.items()}
    writers = {part: torch.from_numpy(labels[:, 2].astype(np.int64)) for part, (_, labels) in found.items()}
    data = Dataset.from_arrays("qmnist", splits, DIGITS, black=True, digits=True)
    return replace(data, groups=writers["train"], test_groups=writers["test"])


@functools.cache
def cifar10(root: str | None = None) -> Dataset:
    """Return the data set CIFAR-10: 50,000 training and 10,000 test color photos of 10 classes, 32 x 32 pixels. It is
    downloaded if a file is missing. `root` is the folder of downloaded data sets, by default the environment variable
    SMALLVIT_DATA, else a cache folder.
    """
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    train, test = _load_verified("CIFAR10", root, "cifar-10-batches-py", names, ({"train": True}, {"train": False}))
    splits = {"train": (train.data, np.array(train.targets)), "test": (test.data, np.array(test.targets))}
    return Dataset.from_arrays("cifar10", splits, tuple(train.classes))


@functools.cache
def svhn(root: str | None = None) -> Dataset:
    """Return the data set SVHN: 73,257 training and 26,032 test color photos of house number digits, 32 x 32 pixels. It is
    downloaded if a file is missing. `root` is the folder of downloaded data sets, by default the environment variable
    SMALLVIT_DATA, else a cache folder.
    """
    names = ["train_32x32.mat", "test_32x32.mat"]
    found = _load_verified("SVHN", root, "", names, ({"split": "train"}, {"split": "test"}))
    splits = {part.split: (part.data.transpose(0, 2, 3, 1), part.labels) for part in found}
    return Dataset.from_arrays("svhn", splits, DIGITS, digits=True)


def _load_idx(
    name: str, root: str | None, prefixes=("train", "t10k"), label_suffix="idx1-ubyte", options: Sequence[dict] = ({},)
) -> dict:
    """Load a data set from four IDX files (the format of MNIST). Return a dict from "train" and "test" to a pair (images,
    labels). If a file is missing, the torchvision class `name` downloads all to the folder `root`; it is called once with each
    dict of keyword arguments in `options`. The two `prefixes`, for training and test, begin the file names; `label_suffix` ends
    those of labels.
    """
    files = [f"{prefix}-{content}" for prefix in prefixes for content in ("images-idx3-ubyte", f"labels-{label_suffix}")]
    images, labels, test_images, test_labels = map(_read_idx, _find_or_download(name, root, f"{name}/raw", files, options))
    return {"train": (images, labels), "test": (test_images, test_labels)}


def _read_idx(path: Path) -> np.ndarray:
    """Return the content of an IDX file (the format of MNIST) as a numpy array. Raise ValueError if the header or the size of
    the file is wrong.
    """
    dimensions, kind = path.name.split("-idx")[1].split("-")
    code, dtype = {"ubyte": (0x08, "u1"), "int": (0x0C, ">i4")}[kind]
    data = np.fromfile(path, np.uint8)
    magic, start = [0, 0, code, int(dimensions)], 4 + 4 * int(dimensions)
    if data[:4].tolist() != magic or len(data) < start:
        got = f"{len(data)} bytes that start with {data[:4].tolist()}"
        raise ValueError(f"{path} is no IDX file: expected at least {start} bytes that start with {magic}, got {got}")
    shape = data[4:start].view(">u4").tolist()
    expected = start + math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise ValueError(f"{path} has {len(data)} bytes, but its header says {shape}, {expected} bytes: replace the file")
    return data[start:].view(dtype).reshape(shape)


def _load_verified(name: str, root: str | None, folder: str, files: Sequence[str], options: Sequence[dict]) -> list:
    """Return the data sets that the torchvision class `name` loads from the folder `root`, as a list. torchvision verifies the
    checksums. The class is called once with each dict of keyword arguments in `options`, for example once for training and once
    for test images. `files` are the names of all needed files in `root/folder`; if one is missing, the data set is downloaded
    first.

    Raise ValueError if a file has a wrong checksum.
    """
    from torchvision import datasets

    _find_or_download(name, root, folder, files, options)
    try:
        return [getattr(datasets, name)(_root(root), **option) for option in options]
    except RuntimeError as error:
        raise ValueError(f"{', '.join(files)} in {_root(root) / folder}: expected the published files, unchanged") from error


def _find_or_download(name: str, root: str | None, folder: str, files: Sequence[str], options: Sequence[dict]) -> list[Path]:
    """Return the paths of the files of a data set as a list. `files` are their names in `root/folder`. If a file is missing,
    the torchvision class `name` downloads the data set; it is called once with each dict of keyword arguments in `options`, for
    example once for training and once for test images.
    """
    top = _root(root)
    paths = [top / folder / file for file in files]
    try:
        if not all(map(Path.is_file, paths)):
            _download(name, top, paths, options)
    except Exception as error:  # for every cause the remedy is the same
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{name} is not complete in {top / folder} and cannot be downloaded: put {', '.join(files)} there, "
            f"uncompressed, or set SMALLVIT_DATA to the folder that holds {folder or 'them'} ({reason})"
        ) from error
    return paths


def _download(name: str, root: Path, paths: list[Path], options: Sequence[dict]) -> None:
    """Download a data set to the folder `root`, unless all files in `paths` exist already. `name` is the torchvision class of
    the data set. It is called once with each dict of keyword arguments in `options`, for example once for training and once for
    test images.

    The files are downloaded to a temporary folder and then moved, without overwriting any file in `root`.
    """
    from torchvision import datasets

    root.mkdir(parents=True, exist_ok=True)
    with locked(root / ".download.lock", timeout=-1), tempfile.TemporaryDirectory(dir=root, prefix=".download-") as temporary:
        if all(map(Path.is_file, paths)):
            return  # another process has downloaded them meanwhile
        for option in options:
            getattr(datasets, name)(temporary, download=True, **option)
        for file in [*filter(Path.is_file, Path(temporary).rglob("*"))]:
            target = root / file.relative_to(temporary)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                file.rename(target)


def _root(root: str | None) -> Path:
    """Return the folder of downloaded data sets: the argument `root` if given, else the environment variable SMALLVIT_DATA,
    else a cache folder.
    """
    return Path(root or os.environ.get("SMALLVIT_DATA") or cache_folder()).expanduser().absolute()
