"""Transforms that change a batch of training images at random, with independent parameters for each image.

batch.py       Batch, Augmentation, apply: the input and output of every transform; Transform, the base class of those here
warp.py        Warp: rotate, zoom, shear, shift, deform and crop in one resampling
pixels.py      Flip, StrokeWidth, RandomErasing, Noise
color.py       Jitter, Gray, Solarize, Blur
mix.py         Mixup, CutMix, SmoothLabels: these also change the targets
multicrop.py   MultiCrop: several views of each image, for self-supervised learning
kernels.py     the computations that take most of the time, and which code does them: PyTorch, or the native kernel
presets.py     digits, photos, strong_digits, strong_photos, digit_crops, photo_crops: ready-made tuples of transforms

A transform is any callable `(batch, generator) -> batch`. The transforms here are frozen dataclasses of plain values, so that
a run can be described, compared and rebuilt. They work on the device of the batch. All random numbers are drawn on the CPU,
only from the given generator: one seed gives the same pixels on every device, up to rounding. The attribute
`unsafe_for_digits` is None, or a sentence that says why the transform can make the label of a digit wrong. An option out of its
range raises ValueError.

Shapes: b images, c channels, h x w pixels, k classes.
"""

from .batch import Augmentation, Batch, apply
from .color import Blur, Gray, Jitter, Solarize
from .mix import CutMix, Mixup, SmoothLabels
from .multicrop import MultiCrop
from .pixels import Flip, Noise, RandomErasing, StrokeWidth
from .presets import digit_crops, digits, photo_crops, photos, strong_digits, strong_photos
from .warp import Warp

__all__ = [
    "Augmentation", "Batch", "Blur", "CutMix", "Flip", "Gray", "Jitter", "Mixup", "MultiCrop", "Noise", "RandomErasing",
    "SmoothLabels", "Solarize", "StrokeWidth", "Warp", "apply", "digit_crops", "digits", "photo_crops", "photos",
    "strong_digits", "strong_photos",
]  # fmt: skip
