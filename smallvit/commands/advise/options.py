"""The options that `smallvit advise` tries on a folder of images, in groups. Each option has its code for a recipe."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..recipe_template import dino_settings, stem_layers

if TYPE_CHECKING:
    from ..inspection import Inspection

EXPENSIVE_MINUTES = 10  # a shorter search leaves out pretraining and the tokenizer of CCT, which take longer than other options


class Option(NamedTuple):
    """One choice in a group of options.

    name      its name on the page, such as "flips + shifts"
    changes   the settings of a run that it changes: a dict from name to code, for `Run.vary`. Empty for the plain ViT
    cost      approximate time of a training step, divided by that of the plain ViT
    means     what it is, in plain words, for somebody who does not know the term; empty for the plain ViT
    """

    name: str
    changes: dict[str, str]
    cost: float = 1.0
    means: str = ""


@dataclass(frozen=True)
class Group:
    """A group of options. A ViT has exactly one of them. The first option changes nothing.

    name      the part of the model or of the training that the options change, such as "first layer"
    options   the options
    gain      the gain in points of such an option in a recipe of smallvit, with a similar number of labels. It determines the
              order in which the groups are tried. None if no recipe measured it
    source    the name of this recipe
    """

    name: str
    options: tuple[Option, ...]
    gain: float | None = None
    source: str = ""


# The recipes and the arms that measured an option of a group, with its gain in points by number of labels. The gains determine
# the order of the groups; a test compares them with the records. An arm "no ..." leaves the option out of its baseline.
KNOWN = {
    "augmentation": (
        ("regularize", "deformations", {100: 26.87, 1_000: 5.62}),
        ("few_and_many", "no deformations", {10: 29.52, 10_000: 0.39}),
    ),
    "first layer": (
        ("inductive_bias", "convolutional stem", {100: 3.01, 1_000: 1.07}),
        ("few_and_many", "convolutional stem", {10: 10.23, 10_000: 1.05}),
    ),
    "optimizer": (
        ("optimizers", "Muon", {100: 0.90, 1_000: 0.76}),
        ("few_and_many", "Muon", {10: 1.75, 10_000: 0.87}),
    ),
    "blocks": (
        ("blocks", "SwiGLU", {100: 0.62, 1_000: 0.58}),
        ("few_and_many", "SwiGLU", {10: 2.87, 10_000: 0.45}),
    ),
    "attention": (("spt_lsa", "+LSA", {100: 0.24, 1_000: 0.13}),),
    "pretraining": (("dino", "DINO on the same digits", {10: -0.31, 100: -0.01, 1_000: -0.10}),),
}
SPT = "partial(sv.ShiftedPatchEmbed, patch=patch)"
SWIGLU, CONVOLUTION = 'partial(sv.Block, mlp_ratio=2.0, activation="swiglu")', "partial(sv.ConvShortcutBlock, mlp_ratio=2.0)"
FILTERS = "convolutions, the small filters of a CNN,"
UNKNOWN = 0.5  # the assumed gain of groups that no recipe has measured


def groups_of_options(images: "Inspection", minutes: float) -> list[Group]:
    """Return the groups of options to try on a folder of images, in the order in which they are tried: the group with the
    largest gain in the recipes of smallvit, with a similar number of labels, comes first. `images` is what was found in the
    folder, and `minutes` is the time for everything.
    """
    layers = stem_layers(images.patch)
    cct = f"partial(sv.ConvTokenizer, layers={layers}, hidden=32)"
    found = {
        "augmentation": augmentations(images),
        "first layer": (
            Option("patches", {}),
            Option("shifted patches (SPT)", {"tokenizer": SPT}, 1.2, "each piece of the image also sees what is around it"),
            Option("convolutional stem", {"tokenizer": f"partial(sv.ConvStem, layers={layers})"}, 1.5, f"{FILTERS} in front"),
            *[Option("tokenizer of CCT", {"tokenizer": cct}, 3.5, f"{FILTERS} in front, more than in the convolutional stem")]
            * (minutes >= EXPENSIVE_MINUTES),
        ),
        "optimizer": (
            Option("AdamW", {}),
            # its best learning rate in the recipe
            Option("Muon", {"optimizer": "sv.Muon", "lr": "5e-3"}, 1.3, "another rule by which training changes the weights"),
        ),
        "blocks": (
            Option("plain blocks", {}),
            Option("gated MLP (SwiGLU)", {"block": SWIGLU}, 2.0, "another form of the layers that follow each attention"),
            Option("convolution in the blocks", {"block": CONVOLUTION}, 2.3, f"{FILTERS} beside each attention"),
        ),
        "size": (
            Option("width 64, 4 blocks", {}),
            # heads of width 16, which the native kernel computes
            Option("width 96", {"dim": "96", "heads": "6"}, 1.8, "a larger model: more numbers for each piece of the image"),
            Option("6 blocks", {"depth": "6"}, 1.5, "a larger model, with more layers"),
        ),
        "attention": (
            Option("plain attention", {}),
            Option("locality attention (LSA)", {"attention": "sv.LocalityAttention"}, 1.1, "no piece of an image reads itself"),
        ),
        "pretraining": pretrainings(images) if minutes >= EXPENSIVE_MINUTES else (),
    }
    groups = [
        Group(name, tuple(options), *known_gain(name, images.training)) for name, options in found.items() if len(options) > 1
    ]
    return sorted(groups, key=lambda group: -(UNKNOWN if group.gain is None else group.gain))


def known_gain(group: str, labels: int) -> tuple[float | None, str]:
    """Return the gain in points that a recipe of smallvit measured for a group of options, at the number of labels most similar
    to `labels`, and the name of the recipe. (None, "") if no recipe measured it.
    """
    measured = {count: (gain, recipe) for recipe, _, gains in KNOWN.get(group, ()) for count, gain in gains.items()}
    nearest = min(measured, key=lambda count: abs(math.log(count / labels)), default=None)
    return (None, "") if nearest is None else measured[nearest]


MOVED = "training images are mirrored and moved at random"
BENT = "training images are turned, moved, scaled and bent"


def augmentations(images: "Inspection") -> tuple[Option, ...]:
    """Return the options for augmentation. `images` is what was found in the folder of images."""
    if images.digits:
        return (
            Option("no augmentation", {}),
            Option("mild deformations", {"augment": "sv.augment.digits(0.5)"}, means=f"{BENT} a little at random"),
            Option("deformations", {"augment": "sv.augment.digits()"}, means=f"{BENT} at random"),
            Option("strong deformations", {"augment": "sv.augment.digits(1.5)"}, means=f"{BENT} strongly at random"),
        )
    if not images.unit:  # transforms of color expect pixels in [0, 1]
        moves = "(sv.augment.Flip(), sv.augment.Warp(shift={shift}, scale={scale}))"
        return (
            Option("no augmentation", {}),
            Option("flips + small shifts", {"augment": moves.format(shift=0.06, scale=0.05)}, means=MOVED),
            Option("flips + shifts", {"augment": moves.format(shift=0.125, scale=0.1)}, means=MOVED),
        )
    geometry = "sv.augment.Flip(), sv.augment.Warp(shift=0.125, scale=0.1)"
    more = f"{MOVED}, their light changes, and a part is erased"
    photos = "sv.augment.photos()"
    return (
        Option("no augmentation", {}),
        Option("flips + shifts", {"augment": f"({geometry})"}, means=MOVED),
        Option("flips + shifts + light + erasing", {"augment": f"{photos}[:4]"}, means=more),
        Option("flips + shifts + light + erasing + mixup + CutMix", {"augment": photos}, means=f"{more}; two images are mixed"),
    )


def pretrainings(images: "Inspection") -> tuple[Option, ...]:
    """Return the options for pretraining on the same images without their labels. `images` is what was found in the folder of
    images.
    """
    dino = "{run}.vary(" + ", ".join(f"{name}={value}" for name, value in dino_settings(images).items()) + ")"
    first = "the model first learns from the images without labels"
    possible = images.digits or images.unit  # transforms of color expect pixels in [0, 1]
    return (
        Option("random weights", {}),
        *[Option("DINO on the same images", {"init": dino}, 6.0, first)] * possible,
    )
