"""smallvit advise: read a folder of images, try techniques for a given time, and write an answer and a trained model."""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from smallvit.baselines import fitting_patch
from smallvit.launch.gpus import cuda_for_auto, gpu_workers
from smallvit.launch.launcher import check_device
from smallvit.launch.local import cores
from smallvit.words import join_names

from ..inspection import Inspection, inspect_images
from ..new import findings
from ..recipe_template import data_options
from .advisor import MEASURE, Advisor
from .plan import Plan, divide, validation_images

FEWEST_MINUTES = 2
PLAN = "plan.json"  # the file of the plan in the folder of all results
MOST_PATCHES = 36  # largest number of patches of an image, because models with more patches need longer training
SHOWN = 100  # number of images that are read to find out whether they show characters
EXTREME, STROKES = 0.8, (0.03, 0.5)  # of images of characters: share of pixels that are nearly black or white; share of strokes


def main(options: argparse.Namespace) -> int:
    """Run `smallvit advise`. `options` are the arguments of the command line: `folder` has a folder of images for each class,
    `minutes` is the time for everything, and `into` is the folder for all results. Return the exit status 0.

    The trials, the comparison and the final training are recipes in this folder. If the command is started again, it continues
    where it was stopped.

    Raises ValueError for a folder that does not exist or has too few images, for too little time, and for a folder `into` that
    belongs to other images or options, or has files of something else.
    """
    folder, out = Path(options.folder).expanduser(), Path(options.into)
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder.absolute()}; expected one with a folder of images for each class")
    if not FEWEST_MINUTES <= options.minutes < math.inf:
        raise ValueError(
            f"--minutes is {options.minutes:g}; expected at least {FEWEST_MINUTES}, 15 or more for a reliable answer, and no "
            "infinite number"
        )
    if options.digits and options.photos:
        raise ValueError("got --digits and --photos; expected one of them, or none to let smallvit guess")
    check_into(out)
    options.device = cuda_for_auto(options.device)
    check_device(options.device)
    print(f"smallvit: reading the images in {folder}", file=sys.stderr, flush=True)
    images = inspect_images(folder, options.digits, options.group_by, options.size, MOST_PATCHES)
    guessed = not (options.digits or options.photos)
    if guessed and shows_characters(folder, images):
        images = replace(images, digits=True)
    if options.size is None:
        images = replace(images, patch=fitting_patch(images.size, MOST_PATCHES))
    print("\n".join([*findings(images, recipe=False), kind(images, guessed)]), flush=True)
    advisor = Advisor(images, opened_plan(folder, images, out, options), out, options.device, options.started)
    advisor.plan_trials()
    print(advisor.describe(), flush=True)
    advisor.try_groups()
    advisor.judge()
    advisor.train_last()
    print("\n" + " ".join(advisor.write_page()))
    print(f"\nread {out / 'report.html'}; the model is in {out / 'model'}")
    return 0


def check_into(out: Path):
    """Raise ValueError if `out`, the folder for all results, has files but none of those by which `smallvit advise` knows its
    own folder: they could be overwritten. Hidden files do not count.
    """
    if not out.exists() or any((out / name).exists() for name in (PLAN, f"{MEASURE}.py")):
        return
    if not out.is_dir() or any(not file.name.startswith(".") for file in out.iterdir()):
        found = "a folder with files that smallvit advise did not write" if out.is_dir() else "a file"
        raise ValueError(f"--into {out} is {found}; expected a new or an empty folder; use another --into")


def kind(images: Inspection, guessed: bool) -> str:
    """Return a line that says whether the images show digits or letters, and how to correct this if it was `guessed`."""
    if images.digits:
        correct = "; if mirroring does not change the label of an image, use --photos" * guessed
        return f"the images show digits or letters and will not be mirrored{correct}"
    return "the images may be mirrored" + "; if mirroring changes the label of an image, use --digits" * guessed


def shows_characters(folder: Path, images: Inspection) -> bool:
    """Return whether images seem to show digits or letters: all classes are named by a single character, or the images are
    gray, nearly all pixels are black or white, and the strokes cover a small part. `images` is what was found in `folder`.
    """
    import numpy as np

    from smallvit.data.decode import read_image
    from smallvit.data.files import find_images

    if all(len(name) == 1 for name in images.classes):
        return True
    if images.channels != 1 or not images.unit:
        return False
    files = [file for file in find_images(folder).files if file not in images.broken]
    chosen = files[:: max(1, len(files) // SHOWN)]
    pixels = [np.asarray(read_image(folder / file, None, "L", "float", name=file)[0], dtype=float).ravel() for file in chosen]
    extreme = [float(((one < 0.2) | (one > 0.8)).mean()) for one in pixels]
    strokes = [min(float((one < 0.5).mean()), float((one >= 0.5).mean())) for one in pixels]
    return float(np.mean(extreme)) >= EXTREME and STROKES[0] <= float(np.mean(strokes)) <= STROKES[1]


def opened_plan(folder: Path, images: Inspection, out: Path, options: argparse.Namespace) -> Plan:
    """Return the plan in the folder `out`, or a new one if there is none. `images` is what was found in `folder`, and `options`
    are the arguments of the command line. The options `jobs` and `no_imagenet` change a plan that was found.

    Raises ValueError if the plan there belongs to another folder or other options.
    """
    share, folds = divide(images)
    new = Plan(
        folder=str(folder.resolve()),
        minutes=options.minutes,
        digits=images.digits,
        size=[*images.size, images.patch],
        group_by=images.group_by if images.grouped else "",
        jobs=options.jobs or len(gpu_workers(None, None, None, options.device)) or cores(),
        share=share,
        folds=folds,
        val=validation_images(images, share),
        imagenet=[] if options.no_imagenet else None,
    )
    found = Plan.read(out / PLAN)
    if found is None:
        if share and folds:
            new.folds = possible_folds(images, new.folder, share, folds)
        out.mkdir(parents=True, exist_ok=True)
        return new
    for name in ("folder", "minutes", "digits", "size", "group_by", "share", "val"):
        before, now = getattr(found, name), getattr(new, name)
        if name == "folder" and Path(before).resolve() == Path(now):
            continue  # a link to the images, which were moved
        if before != now:
            link = "; if the images were moved, leave a link to them there" * (name == "folder")
            raise ValueError(
                f"{out} holds advice with {name} {before}, and now it is {now}{link}; use another --into, or delete {out} to "
                "start again"
            )
    change_plan(found, out, options)
    return found


def change_plan(plan: Plan, out: Path, options: argparse.Namespace):
    """Change the plan in the folder `out` by the options of the command line `jobs` and `no_imagenet`. The decisions that were
    made with another number of worker processes stay, and those that follow use the new one.

    Raises ValueError for `no_imagenet` if the plan already contains models with weights from ImageNet.
    """
    if options.no_imagenet and plan.imagenet:
        raise ValueError(
            f"got --no-imagenet, but the test in {out} already contains models with weights from ImageNet "
            f"({join_names(plan.imagenet, len(plan.imagenet))}); leave out --no-imagenet, or use another --into"
        )
    if options.no_imagenet:
        plan.imagenet = []
    if options.jobs and options.jobs != plan.jobs:
        text = f"note: --jobs is now {options.jobs}; the time was planned for {plan.jobs} worker processes and may differ"
        print(text, file=sys.stderr)
        plan.jobs = options.jobs


def possible_folds(images: Inspection, folder: str, share: float, most: int) -> int:
    """Return the largest number of folds, at most `most`, into which a part of the images can be divided. `share` is this part,
    and `images` is what was found in `folder`. Images of a group, and identical images, stay together.

    Raises ValueError if the classes have too few groups, or too few different images, for two folds.
    """
    from smallvit.data import folder as load_folder

    for folds in range(most, 1, -1):
        try:
            load_folder(**data_options(replace(images, folds=folds, test=share), folder))
            return folds
        except ValueError as error:
            reason = error
    if not images.grouped:
        raise ValueError(f"smallvit advise chooses on one part of the images and tests on another, and {reason}; add images")
    raise ValueError(
        f"the images have too few groups for smallvit advise, which chooses on some groups and tests on others ({reason}); add "
        "groups, or use --group-by '' if images of one group may be on both sides"
    )
