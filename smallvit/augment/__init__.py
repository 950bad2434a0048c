"""Augmentation: a batch in, a changed batch out, on the batch's own device and with another draw for each image.

batch.py     Batch, Augmentation, apply: what every augmentation takes and gives
warp.py      Warp: moves the pixels, all ways at once
pixels.py    Flip, Erase, Noise, Jitter: one plain change to the pixels
mix.py       Mixup, CutMix, SmoothLabels: change the targets
presets.py   digits, photos: sets to start from

An augmentation is any callable `(batch, generator) -> batch`. The ones here are frozen dataclasses of plain values, so a run
can be described, compared and rebuilt. Every parameter is drawn on the CPU, from the given generator and nothing else, then
moved: one seed gives the same pixels on every device, up to rounding. `unsafe_for_digits` is None, or a sentence that says
why a digit's label would no longer be true.

Shapes: b images, c channels, h x w pixels, k classes.
"""

from smallvit.augment.batch import Augmentation, Batch, apply
from smallvit.augment.mix import CutMix, Mixup, SmoothLabels
from smallvit.augment.pixels import Erase, Flip, Jitter, Noise
from smallvit.augment.presets import digits, photos
from smallvit.augment.warp import Warp

__all__ = [
    "Augmentation",
    "Batch",
    "CutMix",
    "Erase",
    "Flip",
    "Jitter",
    "Mixup",
    "Noise",
    "SmoothLabels",
    "Warp",
    "apply",
    "digits",
    "photos",
]
