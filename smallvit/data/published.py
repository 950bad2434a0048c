"""The sets that everybody knows: scikit-learn's digits, and torchvision's, checked as they are read, downloaded if absent."""

import functools
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from .images import Dataset, draw

DIGITS = tuple("0123456789")


@functools.cache
def digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8 x 8 in 17 greys, no download; a fixed 500 of them are the test split."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = np.rint(found.images * 255 / 16).astype(np.uint8), found.target
    train, test = (place.sort().values for place in draw(torch.from_numpy(labels), 500, 0, "digits/test"))
    splits = {"train": (images[train], labels[train]), "test": (images[test], labels[test])}
    return Dataset.from_arrays("digits", splits, DIGITS, black=True, digits=True)


@functools.cache
def mnist(root: str | None = None) -> Dataset:
    """MNIST: 60,000 + 10,000 handwritten digits, 28 x 28. `root`: default SMALLVIT_DATA, else a cache folder."""
    return Dataset.from_arrays("mnist", _idx("MNIST", root), DIGITS, black=True, digits=True)


@functools.cache
def fashion_mnist(root: str | None = None) -> Dataset:
    """Fashion-MNIST: 60,000 + 10,000 pictures of clothes, 28 x 28; `root` as for `mnist`."""
    classes = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
    return Dataset.from_arrays("fashion_mnist", _idx("FashionMNIST", root), classes, black=True)


@functools.cache
def kmnist(root: str | None = None) -> Dataset:
    """Kuzushiji-MNIST: 60,000 + 10,000 cursive Japanese characters, 28 x 28; `root` as for `mnist`."""
    classes = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
    return Dataset.from_arrays("kmnist", _idx("KMNIST", root), classes, black=True, digits=True)


@functools.cache
def emnist(split: str = "letters", root: str | None = None) -> Dataset:
    """EMNIST: handwritten letters or digits, 28 x 28, turned upright (they are stored transposed); `root` as for `mnist`."""
    from torchvision.datasets import EMNIST

    if split not in EMNIST.splits:
        raise ValueError(f"EMNIST has no split {split!r}, expected one of {', '.join(EMNIST.splits)}")
    first = 1 if split == "letters" else 0  # the letters are counted from 1
    found = _idx("EMNIST", root, (f"emnist-{split}-train", f"emnist-{split}-test"), parts=({"split": split},))
    splits = {part: (images.transpose(0, 2, 1), labels - first) for part, (images, labels) in found.items()}
    classes = tuple(EMNIST.classes_split_dict[split][first:])
    return Dataset.from_arrays(f"emnist-{split}", splits, classes, black=True, digits=True)


@functools.cache
def qmnist(root: str | None = None) -> Dataset:
    """QMNIST: MNIST's 60,000 training digits and all 60,000 reconstructed test digits, 28 x 28; `root` as for `mnist`."""
    found = _idx("QMNIST", root, ("qmnist-train", "qmnist-test"), "idx2-int", ({"train": True}, {"train": False}))
    splits = {part: (images, labels[:, 0]) for part, (images, labels) in found.items()}  # the other columns: who wrote it
    return Dataset.from_arrays("qmnist", splits, DIGITS, black=True, digits=True)


@functools.cache
def cifar10(root: str | None = None) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour photos of ten things, 32 x 32; `root` as for `mnist`."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]
    train, test = _verified("CIFAR10", root, "cifar-10-batches-py", names, ({"train": True}, {"train": False}))
    splits = {"train": (train.data, np.array(train.targets)), "test": (test.data, np.array(test.targets))}
    return Dataset.from_arrays("cifar10", splits, tuple(train.classes))


@functools.cache
def svhn(root: str | None = None) -> Dataset:
    """SVHN: 73,257 + 26,032 colour photos of house numbers around one digit, 32 x 32; `root` as for `mnist`."""
    names = ["train_32x32.mat", "test_32x32.mat"]
    found = _verified("SVHN", root, "", names, ({"split": "train"}, {"split": "test"}))
    splits = {part.split: (part.data.transpose(0, 2, 3, 1), part.labels) for part in found}
    return Dataset.from_arrays("svhn", splits, DIGITS, digits=True)


def _idx(name: str, root: str | None, stems=("train", "t10k"), kind="idx1-ubyte", parts: Sequence[dict] = ({},)) -> dict:
    """Training and test images and labels of a set that is stored as four IDX files."""
    names = [f"{stem}-{what}" for stem in stems for what in ("images-idx3-ubyte", f"labels-{kind}")]
    images, labels, test_images, test_labels = map(_read_idx, _files(name, root, f"{name}/raw", names, parts))
    return {"train": (images, labels), "test": (test_images, test_labels)}


def _read_idx(path: Path) -> np.ndarray:
    """An IDX file as an array, held against its own header; the name says the format: ...-idx<dimensions>-<type>."""
    dimensions, kind = path.name.split("-idx")[1].split("-")
    code, dtype = {"ubyte": (0x08, "u1"), "int": (0x0C, ">i4")}[kind]
    data = np.fromfile(path, np.uint8)
    magic, start = [0, 0, code, int(dimensions)], 4 + 4 * int(dimensions)
    if data[:4].tolist() != magic or len(data) < start:
        got = f"{len(data)} bytes that start with {data[:4].tolist()}"
        raise ValueError(f"{path} is no whole IDX file: expected at least {start} bytes that start with {magic}, got {got}")
    shape = data[4:start].view(">u4").tolist()
    expected = start + math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise ValueError(f"{path} has {len(data)} bytes, but its header says {shape}, {expected} bytes: put a whole copy there")
    return data[start:].view(dtype).reshape(shape)


def _verified(name: str, root: str | None, below: str, names: Sequence[str], parts: Sequence[dict]) -> list:
    """torchvision's data sets, whose files are held against their published checksums before they are read."""
    from torchvision import datasets

    _files(name, root, below, names, parts)
    try:
        return [getattr(datasets, name)(_root(root), **part) for part in parts]
    except RuntimeError as error:
        raise ValueError(f"{', '.join(names)} in {_root(root) / below}: expected the published files, unchanged") from error


def _files(name: str, root: str | None, below: str, names: Sequence[str], parts: Sequence[dict]) -> list[Path]:
    """The files of a torchvision data set, downloaded where one is missing."""
    top = _root(root)
    files = [top / below / file for file in names]
    try:
        if not all(map(Path.is_file, files)):
            _download(name, top, files, parts)
    except Exception as error:  # whatever fails on the way, the way out is the same
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{name} is not complete in {top / below} and cannot be downloaded: put {', '.join(names)} there, "
            f"uncompressed, or set SMALLVIT_DATA to the folder that holds {below or 'them'} ({reason})"
        ) from error
    return files


def _download(name: str, top: Path, files: list[Path], parts: Sequence[dict]) -> None:
    """Fetch into a scratch folder and move over what is not there yet: nobody meets half a file, nothing is overwritten."""
    from filelock import FileLock
    from torchvision import datasets

    top.mkdir(parents=True, exist_ok=True)
    with FileLock(top / ".download.lock"), tempfile.TemporaryDirectory(dir=top, prefix=".download-") as scratch:
        if all(map(Path.is_file, files)):
            return  # another process was faster
        for part in parts:
            getattr(datasets, name)(scratch, download=True, **part)
        for file in [*filter(Path.is_file, Path(scratch).rglob("*"))]:
            place = top / file.relative_to(scratch)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                file.rename(place)


def _root(root: str | None) -> Path:
    """The folder of downloaded data: the argument, else SMALLVIT_DATA, else a cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "smallvit"
    return Path(root or os.environ.get("SMALLVIT_DATA") or cache).expanduser().absolute()
