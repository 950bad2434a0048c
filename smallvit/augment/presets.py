"""digits, photos: sets to start from, with one knob for their strength."""

from smallvit.augment.batch import Augmentation
from smallvit.augment.mix import CutMix, Mixup
from smallvit.augment.pixels import Erase, Flip, Jitter
from smallvit.augment.warp import Warp


def digits(strength: float = 1.0) -> tuple[Augmentation, ...]:
    """Strong, yet safe for handwritten digits: a reader still sees what was written. Strength goes from 0 (off) to 1.5."""
    if not 0 <= strength <= 1.5:
        raise ValueError(f"digits(strength={strength}): expected 0 to 1.5, beyond which digits can no longer be read")
    return (
        Warp(rotate=15 * strength, scale=0.15 * strength, shear=12 * strength, shift=0.07 * strength, elastic=0.04 * strength),
    )


def photos(strength: float = 1.0) -> tuple[Augmentation, ...]:
    """The usual set for small photos, grey or in colour: mirror, shift, light, erase, mix. Strength goes from 0 (off) to 2."""
    if not 0 <= strength <= 2:
        raise ValueError(f"photos(strength={strength}): expected 0 to 2")
    return (
        Flip(probability=0.5 * min(strength, 1)),
        Warp(shift=0.125 * strength, scale=0.1 * strength),
        Jitter(brightness=0.2 * strength, contrast=0.2 * strength),
        Erase(probability=0.25 * strength),
        Mixup(probability=0.4 * strength),
        CutMix(probability=0.4 * strength),
    )
