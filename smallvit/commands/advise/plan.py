"""The plan of `smallvit advise`: how the images are split, which groups of options are tried, and for how long.

The plan is stored in a file, with every decision that depends on measurements. So a command that is started again after an
interruption makes the same decisions.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smallvit.storage import parse_json, write_text
from smallvit.verdicts.statistics import MIN_PAIRS
from smallvit.words import how_many

from .options import Group

if TYPE_CHECKING:
    from ..inspection import Inspection

SCREENING = 0.40  # share of the time for the trials
START = 8.0  # seconds to start the runs of a group and to score them
SEEDS = (2, 4)  # number of seeds in the trials: all options of a group, and the better half
FEWEST_STEPS, MOST_STEPS = 200, 2_400  # training steps of a trial
WORTHWHILE_STEPS = 300  # if the trials would have fewer steps, fewer groups are tried
LONGEST = 4  # largest number of training steps in the test, divided by those of a trial
MOST_PASSES, WANTED_PASSES, FEWEST_PASSES = 8, MIN_PAIRS, 2  # passes over the test images
MOST_FOLDS = 5
SPARE = 0.96  # share of the time that may be planned; the rest is a reserve
BATCH = 32


@dataclass
class Plan:
    """What `smallvit advise` does on a folder of images, and what it has decided so far.

    folder, minutes, digits, jobs, group_by   the options of the command; group_by is "" if there are no groups
    size            height and width in pixels to which the images are resized, and side of the patches
    share, folds    share of the images on which the chosen ViT is tested, and the number of folds of these images: the largest
                    possible one, and after the trials the one that there is time for; None if the folder has test images
    val             number of validation images of a trial
    step            seconds of a training step of the plain ViT, with all worker processes busy
    cnn_step        the same for the small CNN
    best_step       the same for the ViT with all options that were chosen so far
    slower          real time of the last trials divided by the planned time, which is that of the plain ViT on a quiet machine
    groups          names of the groups of options, in the order in which they are tried
    steps           training steps of a trial
    chosen          the chosen option of each group that was tried
    trials          for each group: the mean validation score of each option, and its number of seeds
    imagenet        names of the arms with weights from ImageNet that are tested; None before this is decided
    final_steps     training steps of the models that are tested
    passes          number of passes of the test (or of seeds, if the folder has test images)
    judging_from    seconds that had been spent when the test began
    judged          number of passes that were trained before `passes` was decided
    pass_seconds    seconds of one of these passes
    sizes           numbers of labelled images in the learning curve, besides all of them
    spent           seconds that the command has run so far, including earlier starts
    """

    folder: str
    minutes: float
    digits: bool
    jobs: int
    share: float | None = None
    folds: int | None = None
    val: int = 0
    step: float = 0.0
    cnn_step: float = 0.0
    best_step: float = 0.0
    slower: float = 1.0
    groups: list[str] = field(default_factory=list)
    steps: int = 0
    chosen: dict[str, str] = field(default_factory=dict)
    trials: dict[str, list] = field(default_factory=dict)
    imagenet: list[str] | None = None
    group_by: str = ""
    size: list[int] = field(default_factory=list)
    final_steps: int = 0
    passes: int = 0
    judging_from: float = 0.0
    judged: int = 0
    pass_seconds: float = 0.0
    sizes: list[int] = field(default_factory=list)
    spent: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "Plan | None":
        """Return the plan in the file `path`, or None if there is no such file.

        Raises ValueError for a file that is not a plan of this version.
        """
        if not path.exists():
            return None
        try:
            stored = parse_json(path.read_text(encoding="utf-8"))
            if "size" not in stored:
                raise KeyError("size")
            return cls(**stored)
        except (ValueError, TypeError, KeyError) as error:
            reason = f"{path} is not a plan of this version of smallvit ({error}); delete it, or use another --into"
            raise ValueError(reason) from error

    def write(self, path: Path):
        """Write the plan to the file `path`, in one step."""
        write_text(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def divide(images: "Inspection") -> tuple[float | None, int | None]:
    """Return the share of the images on which the chosen ViT is tested, and the largest number of folds of these images. No
    trial uses them. Both are None if the folder has test images. `images` is what was found in the folder.

    The share is 40% of up to 1,000 images. In larger folders it is 10%, but at least 400 images. It is large in small folders,
    because a verdict needs many test images.

    Raises ValueError if a class has too few images.
    """
    if "pool" not in images.counts:
        return None, None
    counts = images.counts["pool"]
    total, (name, smallest) = sum(counts.values()), min(counts.items(), key=lambda item: item[1])
    share = round(0.4 if total <= 1_000 else max(400 / total, 0.1), 3)
    folds = min(MOST_FOLDS, round(smallest * share))
    if folds < 2 or smallest < 8:
        raise ValueError(
            f"class {name!r} has {how_many(smallest, 'image')}; smallvit advise chooses on one part of them, tests on another "
            "one, and needs at least 8 of each class; add images, or move the class out of the folder"
        )
    return share, folds


def validation_images(images: "Inspection", share: float | None) -> int:
    """Return the number of validation images of a trial: a quarter of the images that trials may use, at most 1,000. If the
    folder has validation images of its own, there are at most as many. `share` is the share of the images that no trial uses.
    """
    counts = next(iter(images.counts.values()))
    quarter = min(round(sum(counts.values()) * (1 - (share or 0)) / 4), 1_000)
    return min(quarter, sum(images.counts["val"].values())) if "val" in images.counts else quarter


def runs_of(group: Group) -> list[float]:
    """Return the time of all trials of each option of a group, in units of one training run of the plain ViT. The best two
    options have more seeds than the others. To be safe, the two options of highest cost are assumed to be the best.
    """
    costs = sorted(option.cost for option in group.options)
    return [cost * (SEEDS[1] if rank >= len(costs) - 2 else SEEDS[0]) for rank, cost in enumerate(costs)]


def steps_of_trials(
    groups: Sequence[Group], minutes: float, spent: float, step: float, jobs: int, test: float
) -> tuple[int, int]:
    """Return the number of training steps of a trial, and how many of `groups` are tried. The trials must end in time, and
    leave enough time for a test and a final training of as many steps: a model that was chosen after long training may not be
    the best one after a short one. The runs of each group have to be started and scored, too, so with little time there are
    fewer groups.

    minutes, spent  the time for everything, and the seconds that have passed
    step            seconds of a training step of the plain ViT, with all worker processes busy
    jobs            number of worker processes
    test            time of the shortest test and of the final training, in units of one training run of the plain ViT
    """
    least = 0.1 * 60 * minutes  # seconds, however much time has passed
    for count in range(len(groups), 0, -1):
        trials = sum(sum(runs_of(group)) for group in groups[:count])
        screening = max(60 * minutes * SCREENING - spent - START * count, least)
        everything = max(60 * minutes * SPARE - spent - START * (count + 2), least)
        steps = min(screening / trials, everything / (trials + test)) * jobs / step
        if steps >= WORTHWHILE_STEPS or count == 1:
            break
    return rounded(min(max(steps, FEWEST_STEPS), MOST_STEPS)), count


def rounded(steps: float) -> int:
    """Return a number of steps rounded down to a multiple of 50, or of 10 below 200."""
    unit = 50 if steps >= 200 else 10
    return max(unit, int(steps // unit * unit))


def folds_of_judging(most: int, fold_seconds: float, last_seconds: float, left: float) -> int:
    """Return the number of folds of the images on which the chosen ViT is tested.

    most          the largest number of folds
    fold_seconds  seconds of one fold, with the training steps of the trials
    last_seconds  seconds of the final training
    left          seconds that are left for both

    A precise verdict needs six passes. A pass takes longer with more folds, so the result is the largest number of folds for
    which six passes are possible in time. If there is not even time for two folds, there are fewer passes, and the result is
    `most`.
    """
    for folds in range(most, 1, -1):
        if WANTED_PASSES * folds * fold_seconds + last_seconds <= left:
            return folds
    return most


def length_of_judging(pass_seconds: float, last_seconds: float, left: float, steps: int) -> tuple[int, int]:
    """Return the number of training steps of the models that are tested, and the number of passes.

    pass_seconds  seconds of one pass with `steps` training steps
    last_seconds  seconds of the final training, with `steps` training steps
    left          seconds that are left for both
    steps         training steps of a trial

    The aim is six passes with `steps` training steps. If there is more time, training is longer (at most 4 times), and then
    there are more passes. If there is too little time, there are fewer passes, and then training is shorter.
    """
    wanted = WANTED_PASSES * pass_seconds + last_seconds
    factor = min(max(left / wanted, 1.0), LONGEST)
    passes = int((left / factor - last_seconds) / pass_seconds + 1e-9) if pass_seconds else MOST_PASSES
    if passes >= FEWEST_PASSES:
        return rounded(steps * factor), min(passes, MOST_PASSES)
    factor = left / (FEWEST_PASSES * pass_seconds + last_seconds)
    return rounded(max(steps * factor, 10)), FEWEST_PASSES
