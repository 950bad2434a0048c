"""Images in memory as uint8 tensors, the labelled subset that a seed draws, and the line between train, val and test.

images.py       DataSpec, Images, HeldOut, Subset, Dataset: what a data set is, and how a seed draws labelled images from it
published.py    digits, mnist and its family, cifar10, svhn: the sets that everybody knows, read from disk or downloaded
own.py          folder, arrays: people's own image files and .npz archives

Every loader returns a `Dataset`, reads once per process so that many runs share one copy, and takes plain values only, so
that a record can name the call.
"""

from .images import Dataset, DataSpec, HeldOut, Images, Subset
from .own import arrays, folder
from .published import cifar10, digits, emnist, fashion_mnist, kmnist, mnist, qmnist, svhn

__all__ = [
    "DataSpec",
    "Dataset",
    "HeldOut",
    "Images",
    "Subset",
    "arrays",
    "cifar10",
    "digits",
    "emnist",
    "fashion_mnist",
    "folder",
    "kmnist",
    "mnist",
    "qmnist",
    "svhn",
]
