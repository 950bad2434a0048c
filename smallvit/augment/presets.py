"""digits, photos, digit_crops, photo_crops: sets to start from, with one knob for their strength."""

from dataclasses import replace

from .batch import Augmentation
from .color import Blur, Gray, Jitter, Solarize
from .mix import CutMix, Mixup
from .multicrop import MultiCrop
from .pixels import Flip, RandomErasing
from .warp import Warp


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
        RandomErasing(probability=0.25 * strength),
        Mixup(probability=0.4 * strength),
        CutMix(probability=0.4 * strength),
    )


def digit_crops(strength: float = 1.0, *, local: int = 4, size: int | tuple[int, int] = 16) -> tuple[Augmentation, ...]:
    """MultiCrop for self-supervision that leave a digit what it is: bent, slanted, in windows of two sizes; none blank, no flips.

    Two windows show 0.7 to 1 of the image, `local` ones 0.2 to 0.5 of it, drawn with `size` pixels. Strength goes from 0 to
    1.5; the windows stay as they are.
    """
    if not 0 <= strength <= 1.5:
        raise ValueError(f"digit_crops(strength={strength}): expected 0 to 1.5, beyond which digits can no longer be read")
    (bent,) = digits(strength)
    return (
        MultiCrop(
            first=(replace(bent, crop=(0.7, 1.0), aim="ink"),),
            small=(replace(bent, crop=(0.2, 0.5), aim="ink", size=size),),
            local=local,
        ),
    )


def photo_crops(
    strength: float = 1.0, *, local: int = 6, size: int | tuple[int, int] = 16, colour: bool = True
) -> tuple[Augmentation, ...]:
    """DINO's views for small photos: windows of two sizes, mirrored, in another light and other colours, blurred, solarised.

    Two windows show 0.4 to 1 of the image, `local` ones 0.05 to 0.4 of it, drawn with `size` pixels. Strength goes from 0 to 2;
    the windows stay as they are. `colour=False` is for images without red, green and blue.

    Paper     Caron et al. 2021, arXiv:2104.14294, with 8 local views of 96 pixels beside 224.
    Departs   Windows are read bilinearly, not bicubically. Blur is 0.1 to 2 pixels at 32, and in proportion.
    """
    if not 0 <= strength <= 2:
        raise ValueError(f"photo_crops(strength={strength}): expected 0 to 2")
    often = min(strength, 1)
    tint = {"saturation": 0.2 * strength, "hue": 0.1 * strength} if colour else {}
    light = (
        Flip(probability=0.5 * often),
        Jitter(brightness=0.4 * strength, contrast=0.4 * strength, **tint, probability=0.8),
        Gray(probability=0.2 * strength if colour else 0),
    )
    window = Warp(crop=(0.4, 1.0), fill="edge")  # as it lies inside the image, no edge is seen: but black would darken its rim
    part = replace(window, crop=(0.05, 0.4), size=size)
    return (
        MultiCrop(
            first=(window, *light, Blur(probability=often)),
            second=(window, *light, Blur(probability=0.1 * often), Solarize(probability=0.2 * strength)),
            small=(part, *light, Blur(probability=0.5 * often)),
            local=local,
        ),
    )
