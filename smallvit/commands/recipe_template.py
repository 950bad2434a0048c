"""The text of a new recipe that compares all techniques, or three of them, on a folder of images."""

import math
from textwrap import wrap
from typing import Any

from .inspection import Inspection

BATCH = 32
FEWEST_STEPS, MOST_STEPS, EPOCHS = 300, 1_000, 30
QUICK_ARMS = ("scratch", "+augmentation", "+SPT", "+LSA")  # of a quick recipe
QUICK_FOLDS = 10  # runs of each arm in a quick cross-validation: fewer do not allow a test over passes and images


def recipe_text(images: Inspection, path: str, quick: bool = False) -> str:
    """Return the text of a recipe file (a Python file that lists the runs of a comparison). `images` is what was found in the
    folder of images, and `path` is the path of this folder as the recipe should write it. A `quick` recipe has only three
    techniques, and as few runs as a verdict needs.

    All names of smallvit are written as `sv.name`, so that an arm (variant) can be deleted or added without a change elsewhere.
    """
    head = f'"""{docstring(images, path)}"""\n' + EXPECTED + "\nfrom functools import partial\n\nimport smallvit as sv"
    parts = [data_text(images, path), baseline_text(images), arms_text(images, quick), runs_text(images, quick)]
    return "\n\n".join([head, *parts]) + "\n"


# A comment, and not a part of the docstring, because a report shows the docstring
EXPECTED = """
# Before the first run, write down which technique you expect to help, and by how many points. The report shows it if
# it is the last paragraph of the text above, in this form:
# Expected  (your guess)
"""


def docstring(images: Inspection, path: str) -> str:
    """Return the docstring of the recipe: the question and the setup. `images` is what was found in the folder of images, and
    `path` is the path of this folder.
    """
    count = sum(map(sum, (of_class.values() for of_class in images.counts.values())))
    unit = "groups of images" if images.grouped else "images"
    split = (
        f"{images.folds}-fold cross-validation, divided by {unit}"
        if images.folds
        else f"a fixed fifth of the {unit} for testing"
        if images.test
        else "the folders train and test"
    )
    size = f"{images.size[0]} x {images.size[1]} pixels"
    shown = path.replace("\\", "/").replace('"', "'")
    return (
        f"Which techniques help a small ViT on the images in {shown}?\n\n"
        f"Setup     Data: {count:,} images of {len(images.classes)} classes at {size}; {split}.\n"
        "          Arms: a small ViT from scratch (scratch), and the same ViT with one technique each.\n"
    )


def data_text(images: Inspection, path: str) -> str:
    """Return the lines of the recipe that load the data set."""
    options = data_options(images, path)
    comments = {
        "size": "height and width in pixels; larger images show more detail and cost more",
        "channels": "1 gray, 3 color, 4 color with transparency",
        "digits": "mirroring an image changes its label",
        "folds": "every image is tested once in a pass",
        "test": "the same test images for all runs",
        "skip_broken": "leave out files that cannot be read",
        "pixels": "keep the values of images with more than 8 bits",
    }
    lines = [f"    {key}={literal(value)}," + f"  # {comments.get(key)}" * (key in comments) for key, value in options.items()]
    if images.grouped:
        where = next(index for index, line in enumerate(lines) if line.startswith("    group_by="))
        lines.insert(where, "    # the group of an image in its file name; images of one group stay on one side of a split")
    elif images.folds or images.test:
        lines += [
            "    # If several images show the same patient, object or video, say which; otherwise the scores are too high.",
            "    # This pattern takes everything before the first _ of the file name; see also groups= of `folder`.",
            '    # group_by=r"([^_]+)_.*",',
        ]
    lines.append('    # unlabelled="../more",  # a folder, relative to path, of images without a class: for pretraining')
    return "data = partial(\n    sv.folder,\n" + "\n".join(lines) + "\n)"


def data_options(images: Inspection, path: str) -> dict[str, Any]:
    """Return the options with which `folder` loads the data set in the folder `path`."""
    options: dict[str, Any] = {"path": path, "size": images.size, "channels": images.channels}
    options |= {"digits": True} if images.digits else {}
    options |= {name: value for name in ("folds", "test") if (value := getattr(images, name)) is not None}
    options |= {"group_by": images.group_by} if images.grouped else {}
    options |= {"skip_broken": True} if images.broken else {}
    options |= {"pixels": "float"} if images.floats else {}
    return options


def literal(value: object) -> str:
    """Return a value as Python code. A text is written in double quotes, and as a raw string if it contains a backslash."""
    if not isinstance(value, str):
        return repr(value)
    plain = '"' not in value and value.isprintable() and not value.endswith("\\")
    return repr(value) if not plain else f'r"{value}"' if "\\" in value else f'"{value}"'


def stem_layers(patch: int) -> int:
    """Return the number of layers of a convolutional stem that gives about as many tokens as patches of `patch` pixels. Each
    layer halves both sides of the image.
    """
    return max(round(math.log2(patch)), 1)


def dino_settings(images: Inspection) -> dict[str, str]:
    """Return the settings of a run that pretrains a model with DINO, as a dict from name to code. `images` is what was found in
    the folder of images, on which the views depend.
    """
    colors = "" if images.channels == 3 else ", color=False"
    return {
        "objective": "partial(sv.DINO, koleo=0.1, prototypes=64, momentum=0.97)",
        "augment": "sv.augment." + ("digit_crops(local=0)" if images.digits else f"photo_crops(local=0{colors})"),
        "unlabelled": "True",
        "batch": "64",
        "clip": "0.0",
        "ema": "0.0",
        "evaluators": "(sv.knn,)",
    }


def baseline_text(images: Inspection) -> str:
    """Return the lines of the recipe that define the baseline, the run from scratch."""
    steps = min(max(100 * round(EPOCHS * images.training / BATCH / 100), FEWEST_STEPS), MOST_STEPS)
    lines = [
        f"patch = {images.patch}  # side of a patch in pixels: {patches(images)} patches in an image",
        "scratch = sv.Run(",
        "    data=data,",
        "    model=partial(",
        "        sv.ViT,",
        "        tokenizer=partial(sv.PatchEmbed, patch=patch),",
        "        block=partial(sv.Block, mlp_ratio=2.0),",
        "        dim=48,",
        "        depth=4,",
        "        heads=4,",
        "    ),",
        f"    steps={steps:_},  # chosen to take minutes; `smallvit run ... --scale-steps 4` trains four times as long",
        f"    batch={BATCH},",
        "    lr=2e-3,",
    ]
    if not validates(images):
        lines.append("    val=0,  # no validation images: nothing is chosen on them, and so all images are trained on")
    if images.unequal:
        lines.append("    evaluators=(sv.balanced_accuracy, sv.accuracy),  # the first one judges: every class counts the same")
    return "\n".join([*lines, ")"])


def patches(images: Inspection) -> int:
    """Return the number of patches into which the baseline divides an image."""
    return images.size[0] * images.size[1] // images.patch**2


def validates(images: Inspection) -> bool:
    """Return whether runs set aside a fifth of their training images for validation: only if there are a fixed test part and at
    least 10 training images of each class, since `smallvit tune` and `smallvit explore` then can use them.
    """
    return "val" in images.counts or (not images.folds and images.smallest >= 10)


def arms_text(images: Inspection, quick: bool) -> str:
    """Return the lines of the recipe that define the arms (variants). `images` is what was found in the folder of images. Each
    arm is one line or one block, with its comments in it, so that nothing of it stays if it is deleted. A `quick` recipe has
    only some of the arms.
    """
    arms = techniques(images)
    names = [name for name in arms if name in QUICK_ARMS] if quick else [*arms]
    lines = [
        "arms = {",
        "    # Each entry is an arm, complete in itself: delete those that do not interest you.",
        '    "scratch": scratch,  # the first arm is the baseline, with which the others are compared',
    ]
    for name in names:
        code, comment = arms[name]
        lines.append(f'    "{name}": {code},' + f"  # {comment}" * bool(comment))
    return "\n".join([*lines, "}"])


def techniques(images: Inspection) -> dict[str, tuple[str, str]]:
    """Return the code and the comment of each arm (variant) except the baseline, as a dict by the name of the arm. A comment is
    empty where the code has comments inside. `images` is what was found in the folder of images, on which the choice depends.
    """
    layers = stem_layers(images.patch)  # a token of the stem has 2^layers x 2^layers pixels
    tokens = math.prod(-(-side // 2**layers) for side in images.size)
    others = f": {tokens} tokens in an image" * (tokens != patches(images))
    arms = {
        "+augmentation": (augmentation(images), ""),
        "+mixup": ("scratch.vary(augment=(sv.augment.Mixup(),))", "two images and their labels are mixed"),
        "+CutMix": ("scratch.vary(augment=(sv.augment.CutMix(),))", "a part of an image is that of another one"),
        "+label smoothing": ("scratch.vary(augment=(sv.augment.SmoothLabels(amount=0.1),))", "labels less sure than 0 and 1"),
        "+SPT": ("scratch.vary(tokenizer=partial(sv.ShiftedPatchEmbed, patch=patch))", "shifted patches"),
        "+conv stem": (
            f"scratch.vary(tokenizer=partial(sv.ConvStem, layers={layers}))",
            f"convolutions in place of patches{others}",
        ),
        "+LSA": (
            "scratch.vary(attention=sv.LocalityAttention)",
            "a learned temperature, and no attention of a token to itself",
        ),
        "+dropout": (
            "scratch.vary(dropout=0.1, block=partial(sv.Block, mlp_ratio=2.0, dropout=0.1))",
            "some features are 0",
        ),
        "+stochastic depth": ("scratch.vary(drop_path=0.1)", "blocks are left out at random"),
        "+ToMe": (
            "scratch.vary(reduction=partial(sv.Merge, r=0.2))",
            "similar tokens are merged, which saves multiply-adds",
        ),
        "+DINO": (pretraining(images), ""),
        "+distillation": (
            "scratch.vary(objective=sv.Distill, teacher=scratch.vary(model=sv.SmallCNN))",
            "learns from a CNN",
        ),
        "+class weights": (
            'scratch.vary(objective=partial(sv.Supervised, class_weight="balanced"))',
            "every class has the same weight in the loss",
        ),
    }
    impossible = {
        "+DINO": not (images.digits or images.unit),  # its transforms of color expect pixels in [0, 1]
        "+class weights": not images.unequal,
    }
    return {name: arm for name, arm in arms.items() if not impossible.get(name)}


def augmentation(images: Inspection) -> str:
    """Return the code of the arm with augmented images. `images` is what was found in the folder of images, on which the
    transforms depend.
    """
    if images.digits:
        lines = ["augment=sv.augment.digits(),  # rotated, zoomed, sheared, shifted and bent, and never mirrored"]
    else:
        colors = [
            "    sv.augment.Jitter(brightness=0.2, contrast=0.2),",
            "    sv.augment.RandomErasing(probability=0.25),  # a rectangle is set to black",
        ]
        lines = [
            "augment=(  # mixup and CutMix are arms of their own; augment.photos() has everything together"
            if images.unit
            else "augment=(",
            "    sv.augment.Flip(),  # mirrored",
            "    sv.augment.Warp(shift=0.125, scale=0.1),  # shifted and zoomed",
            *(colors if images.unit else []),  # which expect pixels in [0, 1]
            "),",
        ]
    return "scratch.vary(\n" + "".join(f"        {line}\n" for line in lines) + "    )"


def pretraining(images: Inspection) -> str:
    """Return the code of the arm that is first trained without labels. `images` is what was found in the folder of images."""
    lines = [
        "scratch.vary(",
        "    init=scratch.vary(  # first trained on the same images without their labels (DINO)",
        *[f"        {name}={value}," for name, value in dino_settings(images).items()],
        "    ),",
        ")",
    ]
    return "\n    ".join(lines)


def seeds_of(images: Inspection, quick: bool) -> int:
    """Return the number of seeds, or of passes over all images in a cross-validation. `images` is what was found in the folder
    of images. A `quick` recipe has the fewest with which a verdict is possible.
    """
    if not images.folds:
        return 6 if quick else 8
    return max(2, -(-QUICK_FOLDS // images.folds)) if quick else 6


def possible_verdicts(images: Inspection, quick: bool) -> str:
    """Return a sentence that says which verdicts the runs of a recipe allow. `images` is what was found in the folder of
    images, and a `quick` recipe has the fewest runs with which a verdict is possible.
    """
    count = seeds_of(images, quick)
    if images.folds and quick:
        return (
            f"{count} passes of {images.folds} folds are enough for a verdict on a large difference; 6 passes find smaller ones"
        )
    if quick:
        return f"{count} seeds are the fewest with which a verdict is possible, on a large difference"
    unit = f"passes of {images.folds} folds" if images.folds else "seeds"
    return f"{count} {unit} allow a verdict on each technique; fewer make one less likely"


def runs_text(images: Inspection, quick: bool) -> str:
    """Return the lines of the recipe that list its runs: numbers of labels and seeds. `images` is what was found in the folder
    of images, and a `quick` recipe has fewer seeds.
    """
    most = images.smallest * len(images.classes)
    numbers = [n for n in (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000) if 2 * len(images.classes) <= n <= most]
    numbers = [n for n in numbers if n <= images.training // 2][-3:]
    fewer = [f"{n:_}" for n in numbers]
    labels = [fewer[0], "None"] if images.training >= 1_000 and fewer and not quick else ["None"]
    reach = f"; within reach, with equally many of each class: {', '.join(fewer)}" if fewer else ""
    each = f"  # passes: {images.folds} runs of each arm in a pass, so that every image is tested once" if images.folds else ""
    text = possible_verdicts(images, quick)
    comment = [
        f"{text}. Choose the number before the first run." if quick else f"To be faster, delete arms first. {text}.",
        "With fewer steps, an arm may learn nothing; the references (raw pixels, a small CNN) show it. "
        'references=["small CNN"] keeps only that one.',
    ]
    return "\n".join(
        [
            *(f"# {line}" for part in comment for line in wrap(part, 116)),
            "RUNS = sv.ablate(",
            "    arms,",
            f"    labels=[{', '.join(labels)}],  # None: all labelled images{reach}",
            f"    seeds=range({seeds_of(images, quick)}),{each}",
            ")",
        ]
    )
