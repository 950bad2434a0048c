"""The images that all are given: scikit-learn's digits, enlarged. Real ink, no download."""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from smallvit import Dataset

TRAIN = 1_297  # the other 500 are to test on


@cache
def splits(side: int, channels: int = 1) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images `n h w` or `n h w c` and labels, to train on and to test on."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = F.interpolate(torch.from_numpy(found.images)[:, None] / 16, (side, side), mode="bilinear")
    images = (255 * images).round().byte().expand(-1, channels, -1, -1).permute(0, 2, 3, 1).squeeze(-1).numpy()
    return {"train": (images[:TRAIN], found.target[:TRAIN]), "test": (images[TRAIN:], found.target[TRAIN:])}


def dataset(side: int = 28, channels: int = 1, images: int = TRAIN) -> Dataset:
    """So many to train on, the same again and again where there are not as many."""
    parts = splits(side, channels)
    again = tuple(np.resize(part, (images, *part.shape[1:])) for part in parts["train"])
    return Dataset.from_arrays("digits", parts | {"train": again}, tuple("0123456789"), black=True)


def batch_of(data: Dataset, size: int) -> tuple[Tensor, Tensor]:
    """Normalised images and their labels."""
    return data.spec.normalise(data.train.pixels(slice(size))), data.train.labels[:size]
