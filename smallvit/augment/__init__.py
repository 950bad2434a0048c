"""Augmentation: a batch in, a changed batch out, on the batch's own device and with another draw for each image.

batch.py     Batch, Augmentation, apply: what every augmentation takes and gives
warp.py      Warp: moves the pixels, all ways at once
pixels.py    Flip, RandomErasing, Noise: one plain change to the pixels
light.py     Jitter, Gray, Solarize, Blur: what light, colour and lens do to a picture
mix.py       Mixup, CutMix, SmoothLabels: change the targets
views.py     MultiCrop: several looks at each image, for self-supervision
presets.py   digits, photos, digit_crops, photo_crops: sets to start from

An augmentation is any callable `(batch, generator) -> batch`. The ones here are frozen dataclasses of plain values, so a run
can be described, compared and rebuilt. Every parameter is drawn on the CPU, from the given generator and nothing else, then
moved: one seed gives the same pixels on every device, up to rounding. `unsafe_for_digits` is None, or a sentence that says
why a digit's label would no longer be true.

Shapes: b images, c channels, h x w pixels, k classes.
"""

from .batch import Augmentation, Batch, apply
from .color import Blur, Gray, Jitter, Solarize
from .mix import CutMix, Mixup, SmoothLabels
from .multicrop import MultiCrop
from .pixels import Flip, Noise, RandomErasing
from .presets import digit_crops, digits, photo_crops, photos
from .warp import Warp

__all__ = [
    "Augmentation",
    "Batch",
    "Blur",
    "CutMix",
    "Flip",
    "Gray",
    "Jitter",
    "Mixup",
    "MultiCrop",
    "Noise",
    "RandomErasing",
    "SmoothLabels",
    "Solarize",
    "Warp",
    "apply",
    "digit_crops",
    "digits",
    "photo_crops",
    "photos",
]
