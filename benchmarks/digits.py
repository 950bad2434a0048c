"""The images that all libraries get: the digits of scikit-learn, enlarged. They are real and need no download."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from smallvit import Dataset

TRAIN = 1_297  # training images; the other 500 are test images


@cache
def splits(side: int, channels: int = 1) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return {"train": (images, labels), "test": ...} with images of `side` x `side` pixels.

    Images are bytes of shape (n, height, width), with a last axis for 3 channels.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = F.interpolate(torch.from_numpy(digits.images)[:, None] / 16, (side, side), mode="bilinear")
    images = (255 * images).round().byte().expand(-1, channels, -1, -1).permute(0, 2, 3, 1).squeeze(-1).numpy()
    return {"train": (images[:TRAIN], digits.target[:TRAIN]), "test": (images[TRAIN:], digits.target[TRAIN:])}


def dataset(side: int = 28, channels: int = 1, images: int = TRAIN) -> Dataset:
    """Return a `Dataset` with this number of training images; they repeat if there are not enough."""
    parts = splits(side, channels)
    train = tuple(np.resize(part, (images, *part.shape[1:])) for part in parts["train"])
    return Dataset.from_arrays("digits", parts | {"train": train}, tuple("0123456789"), black=True)


def first_batch(data: Dataset, size: int) -> tuple[Tensor, Tensor]:
    """Return the first `size` training images, normalized, and their labels."""
    return data.spec.normalize(data.train.pixels(slice(size))), data.train.labels[:size]
