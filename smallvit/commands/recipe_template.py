"""The text of a new recipe that compares all techniques on a folder of images."""

import ast

import smallvit

from .inspection import Inspection

BATCH = 32
FEWEST_STEPS, MOST_STEPS, EPOCHS = 300, 1_000, 30


def recipe_text(images: Inspection, path: str) -> str:
    """Return the text of a recipe file (a Python file that lists the runs of a comparison). `images` is what was found in the
    folder of images, and `path` is the path of this folder as the recipe should write it.
    """
    body = "\n\n".join([data_text(images, path), baseline_text(images), arms_text(images), runs_text(images)])
    names = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    used = sorted(names & {*smallvit.__all__}, key=lambda each: (not each.isupper(), not each[0].isupper(), each))
    imports = "from functools import partial\n\nfrom smallvit import (\n" + "".join(f"    {each},\n" for each in used) + ")"
    return f'"""{docstring(images, path)}"""\n\n{imports}\n\n{body}\n'


def docstring(images: Inspection, path: str) -> str:
    """Return the docstring of the recipe: the question, the setup and what the user expects, which is left to write.

    images, path  what was found in the folder of images, and the path of this folder
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
        "          Arms: a small ViT from scratch (scratch), and the same ViT with one technique each.\n\n"
        "Expected  Write here, before the first run, which technique you expect to help, and by how many points.\n"
    )


def data_text(images: Inspection, path: str) -> str:
    """Return the lines of the recipe that load the data set."""
    options = {"path": path, "size": images.size, "channels": images.channels}
    options |= {"digits": True} if images.digits else {}
    options |= {"folds": images.folds} if images.folds else {"test": images.test} if images.test else {}
    options |= {"group_by": images.group_by} if images.grouped else {}
    options |= {"skip_broken": True} if images.broken else {}
    options |= {"pixels": "float"} if images.floats else {}
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
    return "data = partial(\n    folder,\n" + "\n".join(lines) + "\n)"


def literal(value: object) -> str:
    """Return a value as Python code. A text is written in double quotes, and as a raw string if it contains a backslash."""
    if not isinstance(value, str):
        return repr(value)
    plain = '"' not in value and value.isprintable() and not value.endswith("\\")
    return repr(value) if not plain else f'r"{value}"' if "\\" in value else f'"{value}"'


def baseline_text(images: Inspection) -> str:
    """Return the lines of the recipe that define the baseline, the run from scratch."""
    tokens = images.size[0] * images.size[1] // images.patch**2
    steps = min(max(round(EPOCHS * images.training / BATCH, -2), FEWEST_STEPS), MOST_STEPS)
    lines = [
        f"patch = {images.patch}  # side of a patch in pixels: {tokens} patches in an image",
        "scratch = Run(",
        "    data=data,",
        "    model=partial(",
        "        ViT,",
        "        tokenizer=partial(PatchEmbed, patch=patch),",
        "        block=partial(Block, mlp_ratio=2.0),",
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
        lines.append("    evaluators=(balanced_accuracy, accuracy),  # the first one judges: every class counts the same")
    return "\n".join([*lines, ")"])


def validates(images: Inspection) -> bool:
    """Return whether runs set aside a fifth of their training images for validation: only if there are a fixed test part and at
    least 10 training images of each class, since `smallvit tune` and `smallvit explore` then can use them.
    """
    return "val" in images.counts or (not images.folds and images.smallest >= 10)


def arms_text(images: Inspection) -> str:
    """Return the lines of the recipe that define the arms (variants), in groups with a comment for each group."""
    color = images.channels == 3
    if images.digits:
        photos, crops = "augment.digits()", "augment.digit_crops(local=0)"
    elif images.unit:
        photos, crops = "augment.photos()", f"augment.photo_crops(local=0{'' if color else ', colour=False'})"
    else:  # the transforms of brightness and contrast expect pixels in [0, 1]
        photos, crops = "(augment.Flip(), augment.Warp(shift=0.125, scale=0.1))", ""
    shifted = images.patch > 1
    stem = max(images.patch.bit_length() - 1, 1)
    lines = [
        "cnn = scratch.vary(model=SmallCNN)",
        *(
            [
                "pretraining = scratch.vary(  # on the same images, without their labels",
                "    objective=partial(DINO, koleo=0.1, prototypes=64, momentum=0.97),",
                f"    augment={crops},",
                "    unlabelled=True,",
                "    batch=64,",
                "    clip=0.0,",
                "    ema=0.0,",
                "    evaluators=(knn,),",
                ")",
            ]
            if crops
            else []
        ),
        "",
        "arms = {",
        '    "scratch": scratch,  # the first arm is the baseline',
        "    # more varied images: random deformations, mirroring or colors; mixtures of two images; smoothed labels",
        f'    "+augmentation": scratch.vary(augment={photos}),',
        '    "+mixup": scratch.vary(augment=(augment.Mixup(),)),',
        '    "+CutMix": scratch.vary(augment=(augment.CutMix(),)),',
        '    "+label smoothing": scratch.vary(augment=(augment.SmoothLabels(amount=0.1),)),',
        "    # other tokens: shifted patches (SPT), a convolutional stem",
        *(['    "+SPT": scratch.vary(tokenizer=partial(ShiftedPatchEmbed, patch=patch)),'] if shifted else []),
        f'    "+conv stem": scratch.vary(tokenizer=partial(ConvStem, layers={stem})),',
        "    # other attention: a learned temperature, and no attention of a token to itself (LSA)",
        '    "+LSA": scratch.vary(attention=LocalityAttention),',
        "    # regularization: dropout, stochastic depth",
        '    "+dropout": scratch.vary(dropout=0.1, block=partial(Block, mlp_ratio=2.0, dropout=0.1)),',
        '    "+stochastic depth": scratch.vary(drop_path=0.1),',
        "    # fewer tokens: similar ones are merged (ToMe), which saves multiply-adds",
        '    "+ToMe": scratch.vary(reduction=partial(Merge, r=0.2)),',
        *(["    # learning without labels first (DINO)", '    "+DINO": scratch.vary(init=pretraining),'] if crops else []),
        "    # learning from a trained model (distillation): a small CNN with the same labels",
        '    "+distillation": scratch.vary(objective=Distill, teacher=cnn),',
    ]
    if images.unequal:
        lines += [
            "    # classes of different sizes: every class has the same weight in the loss",
            '    "+class weights": scratch.vary(objective=partial(Supervised, class_weight="balanced")),',
        ]
    return "\n".join([*lines, "}"])


def runs_text(images: Inspection) -> str:
    """Return the lines of the recipe that list its runs: numbers of labels and seeds."""
    most = images.smallest * len(images.classes)
    numbers = [n for n in (10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000) if 2 * len(images.classes) <= n <= most]
    numbers = [n for n in numbers if n <= images.training // 2][-3:]
    fewer = [f"{n:_}" for n in numbers]
    labels = [fewer[0], "None"] if images.training >= 1_000 and fewer else ["None"]
    reach = f"; within reach, with equally many of each class: {', '.join(fewer)}" if fewer else ""
    seeds = (
        f"    seeds=range(6),  # passes: {images.folds} runs of each arm in a pass, so that every image is tested once"
        if images.folds
        else "    seeds=range(8),"
    )
    return "\n".join(
        [
            "# To be faster, delete arms first. Fewer seeds or folds make a verdict less likely. With fewer steps, an arm may",
            "# learn nothing; the references (raw pixels, a small CNN) show it, and references=False leaves them out.",
            "RUNS = ablate(",
            "    arms,",
            f"    labels=[{', '.join(labels)}],  # None: all labelled images{reach}",
            seeds,
            ")",
        ]
    )
