"""Ready-made tuples of transforms for digits and photos, each with one option `strength`."""

from dataclasses import replace

from smallvit.components import python_numbers

from .batch import Augmentation
from .color import Blur, Gray, Jitter, Solarize
from .mix import CutMix, Mixup
from .multicrop import MultiCrop
from .pixels import Flip, RandomErasing
from .warp import Warp

UNREADABLE = "; with more, digits can no longer be read"


def digits(strength: float = 1.0) -> tuple[Warp]:
    """Return a tuple with one transform (`Warp`) for handwritten digits: small rotations, zooms, shears, shifts and elastic
    deformations. `strength` scales all of these changes, from 0 (off) to 1.5.

    Up to a strength of 1.5, people can still read the digits.
    """
    strength = _checked("digits", strength, 1.5, UNREADABLE)
    return (
        Warp(rotate=15 * strength, scale=0.15 * strength, shear=12 * strength, shift=0.07 * strength, elastic=0.04 * strength),
    )


def photos(strength: float = 1.0) -> tuple[Augmentation, ...]:
    """Return a tuple of the usual transforms for small photos: flip, shift and zoom, changes of brightness and contrast, random
    erasing, Mixup and CutMix. `strength` scales all of these changes, from 0 (off) to 2.

    The images may be gray or in color.
    """
    strength = _checked("photos", strength, 2)
    return (
        Flip(probability=0.5 * min(strength, 1)),
        Warp(shift=0.125 * strength, scale=0.1 * strength),
        Jitter(brightness=0.2 * strength, contrast=0.2 * strength),
        RandomErasing(probability=0.25 * strength),
        Mixup(probability=0.4 * strength),
        CutMix(probability=0.4 * strength),
    )


def strong_digits(strength: float = 1.0) -> tuple[Augmentation, ...]:
    """Return a tuple of transforms that change handwritten digits more than `digits`, for the strong view of unlabelled images
    in semi-supervised learning: its deformations with 1.25 times the strength, and a black rectangle in half of the images.
    `strength` scales all of these changes, from 0 (off) to 1.2.

    The rectangle covers at most about 0.12 of the image's area (its sides are whole pixels), so that an 8 rarely becomes a 3.
    There are no flips, no inverted images and no large shifts, which the usual strong transforms for photos have: they make
    other digits or cut digits off.
    """
    strength = _checked("strong_digits", strength, 1.2, UNREADABLE)
    return (*digits(1.25 * strength), RandomErasing(probability=0.5 * min(strength, 1), area=(0.02, 0.12)))


def strong_photos(strength: float = 1.0, *, color: bool = True) -> tuple[Augmentation, ...]:
    """Return a tuple of transforms that change small photos strongly, for the strong view of unlabelled images in
    semi-supervised learning: flip, rotation, shear, zoom, shift, changes of brightness, contrast and color, inverted bright
    pixels, blur and a black rectangle. `strength` scales all of these changes, from 0 (off) to 1.5. Use `color=False` for
    images without 3 channels.

    The weak view that FixMatch uses for photos is `(augment.Flip(), augment.Warp(shift=0.125, fill="edge"))`.

    Paper     Cubuk et al. 2020 (RandAugment), arXiv:1909.13719, as in FixMatch, arXiv:2001.07685, whose ranges are 30 degrees
              and 0.3 of the image. Then Cutout, arXiv:1708.04552.
    Departs   RandAugment draws two of 14 changes for each image. Here all changes are made together, so each is about half
              as large. There is no posterizing, equalizing or sharpening.
    """
    strength = _checked("strong_photos", strength, 1.5)
    probability = min(strength, 1)
    color_changes = {"saturation": 0.4 * strength, "hue": 0.1 * strength} if color else {}
    return (
        Flip(probability=0.5 * probability),
        Warp(rotate=20 * strength, scale=0.2 * strength, shear=10 * strength, shift=0.15 * strength, fill="edge"),
        Jitter(brightness=0.4 * strength, contrast=0.4 * strength, **color_changes, probability=0.8),
        Solarize(probability=0.1 * strength),
        Blur(probability=0.1 * strength),
        RandomErasing(probability=probability, area=(0.02, 0.25), aspect=1.0),
    )


def digit_crops(strength: float = 1.0, *, local: int = 4, size: int | tuple[int, int] = 16) -> tuple[Augmentation, ...]:
    """Return a tuple with one transform (`MultiCrop`), which makes several random views of handwritten digits for
    self-supervised learning. Each view is a deformed crop. `strength` scales the deformation, from 0 (off) to 1.5.

    The views are never mirrored and never without ink.

    The two global views show 0.7 to 1 of the image's area. The `local` views show 0.2 to 0.5 of it, at `size` pixels (one side,
    or height and width), about half of those of an image: 16 is for 28 pixels. The deformation is that of `digits`; the
    strength does not change the crops.
    """
    strength = _checked("digit_crops", strength, 1.5, UNREADABLE)
    (warp,) = digits(strength)
    return (
        MultiCrop(
            first=(replace(warp, crop=(0.7, 1.0), aim="ink"),),
            small=(replace(warp, crop=(0.2, 0.5), aim="ink", size=size),),
            local=local,
        ),
    )


def photo_crops(
    strength: float = 1.0, *, local: int = 6, size: int | tuple[int, int] = 16, color: bool = True
) -> tuple[Augmentation, ...]:
    """Return a tuple with one transform (`MultiCrop`) for self-supervised learning on photos. From each photo it makes two
    large crops and `local` small ones of `size` pixels. The crops are flipped, changed in color, blurred and solarized, as in
    DINO. `strength`, from 0 (off) to 2, scales these changes. Use `color=False` for images without 3 channels.

    The two global views show 0.4 to 1 of the image's area. The `local` views show 0.05 to 0.4 of it, at `size` pixels (one
    side, or height and width).

    Paper     Caron et al. 2021, arXiv:2104.14294, with 8 local views of 96 pixels beside 224.
    Departs   Crops are resampled bilinearly, not bicubically. Blur is 0.1 to 2 pixels at 32 pixels, and scales with the size.
    """
    strength = _checked("photo_crops", strength, 2)
    probability = min(strength, 1)
    color_changes = {"saturation": 0.2 * strength, "hue": 0.1 * strength} if color else {}
    shared = (
        Flip(probability=0.5 * probability),
        Jitter(brightness=0.4 * strength, contrast=0.4 * strength, **color_changes, probability=0.8),
        Gray(probability=0.2 * strength if color else 0),
    )
    window = Warp(crop=(0.4, 1.0), fill="edge")  # with "black" the interpolation would darken the border of the crop
    return (
        MultiCrop(
            first=(window, *shared, Blur(probability=probability)),
            second=(window, *shared, Blur(probability=0.1 * probability), Solarize(probability=0.2 * strength)),
            small=(replace(window, crop=(0.05, 0.4), size=size), *shared, Blur(probability=0.5 * probability)),
            local=local,
        ),
    )


def _checked(preset: str, strength: float, highest: float, reason: str = "") -> float:
    """Return `strength`, a NumPy number as a Python number. Raise ValueError unless it is from 0 to `highest`. `preset` is the
    name of the function that was called with this strength, such as "photo_crops". The error message begins with this name and
    ends with `reason`, a text that explains the limit.
    """
    strength = python_numbers(strength)
    if not isinstance(strength, int | float) or not 0 <= strength <= highest:
        raise ValueError(f"{preset}(strength={strength!r}): expected a number from 0 to {highest}{reason}")
    return strength
