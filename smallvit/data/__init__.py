"""Data sets in memory as uint8 tensors, with labelled subsets drawn by a seed and train, validation and test splits.

images.py       DataSpec, Images, HeldOut: images with labels, in memory or in a memory-mapped file
dataset.py      Subset, Dataset: a data set, the subsets that a seed draws from it, and its folds
folds.py        Fold: random splits by class and group
repeats.py      identical images: warnings, and groups of them
preprocess.py   Preprocess: image files, PIL images, arrays or tensors -> normalized model input
decode.py       one image file -> an array of pixels
published.py    digits, mnist and related sets, cifar10, svhn: public data sets, read from disk or downloaded
drawn.py        textured_shapes: color images that are drawn by a program
resize.py       at_size: another data set in another image size
own.py          folder, arrays: your own image files and .npz archives
files.py        finding the image files, classes and groups of a folder
cache.py        decoding many files, into memory or into a memory-mapped file
notes.py        warnings about data

Every loader returns a `Dataset` and reads the files once per process, so that many runs share one copy; `folder` and `arrays`
read them again when they change. A loader takes plain values only, so that a record can store the call.
"""

from .dataset import Dataset, Subset
from .drawn import textured_shapes
from .folds import Fold
from .images import DataSpec, HeldOut, Images, sealed_test_images
from .own import arrays, folder
from .preprocess import Preprocess
from .published import cifar10, digits, emnist, fashion_mnist, kmnist, mnist, qmnist, svhn
from .resize import at_size

__all__ = [
    "DataSpec", "Dataset", "Fold", "HeldOut", "Images", "Preprocess", "Subset", "arrays", "at_size", "cifar10", "digits",
    "emnist", "fashion_mnist", "folder", "kmnist", "mnist", "qmnist", "sealed_test_images", "svhn", "textured_shapes",
]  # fmt: skip
