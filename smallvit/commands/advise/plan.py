"""The plan of `smallvit advise`: how the images are divided, which groups of options are tried, and for how long.

The plan is kept in a file, with every decision that was made from measurements. So a command that is started again after an
interruption makes the same decisions.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smallvit.record import write_text
from smallvit.verdicts.statistics import MIN_PAIRS

from .options import Group

if TYPE_CHECKING:
    from ..inspection import Inspection

SCREENING = 0.40  # share of the time for trying options
SEEDS = (2, 4)  # seeds of all options of a group in the trials, and of the two best ones
FEWEST_STEPS, MOST_STEPS = 200, 2_400  # of a training run in the trials
WORTHWHILE_STEPS = 300  # with fewer steps, fewer groups are tried
SHORTEST, LONGEST = 0.5, 4  # times the steps of a trial: the steps of a training run of the models that are judged
MOST_PASSES, WANTED_PASSES, FEWEST_PASSES = 8, MIN_PAIRS, 2  # over the images on which the choice is judged
MOST_FOLDS = 5
SPARE = 0.96  # share of the time after which nothing new is begun
BATCH = 32


@dataclass
class Plan:
    """What `smallvit advise` does on a folder of images, and what it has decided so far.

    folder, minutes, digits, jobs   the options of the command: these must not change
    share, folds    share of the images on which the choice is judged, and the number of folds into which they are divided: the
                    largest possible one, and after the trials the one that there is time for; None if the folder has test
                    images of its own
    val             number of validation images of a trial
    step            seconds of a training step of the plain ViT, with all worker processes busy
    best_step       the same for the ViT with all options that were chosen so far
    slower          how many times as long as planned the last trials took, for example because of other programs
    groups          names of the groups of options, in the order in which they are tried
    steps           training steps of a trial
    chosen          the chosen option of each group that was tried
    trials          for each group: the mean validation score of each option, and its number of seeds
    imagenet        names of the arms with weights from ImageNet that are judged; None before this is decided
    final_steps     training steps of the models that are judged
    passes          number of passes (or of seeds, with test images of its own) in which the choice is judged
    judging_from    seconds that had been spent when the judging began
    judged          how many of them were trained before the number of all was decided
    sizes           numbers of labelled images in the learning curve, besides all of them
    spent           seconds that the command has taken so far, in all its starts
    """

    folder: str
    minutes: float
    digits: bool
    jobs: int
    share: float | None = None
    folds: int | None = None
    val: int = 0
    step: float = 0.0
    best_step: float = 0.0
    slower: float = 1.0
    groups: list[str] = field(default_factory=list)
    steps: int = 0
    chosen: dict[str, str] = field(default_factory=dict)
    trials: dict[str, list] = field(default_factory=dict)
    imagenet: list[str] | None = None
    final_steps: int = 0
    passes: int = 0
    judging_from: float = 0.0
    judged: int = 0
    sizes: list[int] = field(default_factory=list)
    spent: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "Plan | None":
        """Return the plan in the file `path`, or None if there is no such file.

        Raises ValueError for a file that is no plan of this version.
        """
        if not path.exists():
            return None
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            reason = f"{path} is not a plan of this version of smallvit ({error}); delete it, or use another --into"
            raise ValueError(reason) from error

    def write(self, path: Path):
        """Write the plan to the file `path`, in one step."""
        write_text(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")


def divide(images: "Inspection") -> tuple[float | None, int | None]:
    """Return the share of the images on which the choice is judged and which the trials never see, and the largest number of
    folds into which these images can be divided. Both are None if the folder has test images of its own. `images` is what was
    found in the folder.

    Small folders need a large share, because a verdict needs many images: 40% of up to 1,000 images, then 400 to 1,000 images.

    Raises ValueError if a class has too few images to be divided.
    """
    if "pool" not in images.counts:
        return None, None
    counts = images.counts["pool"]
    total, (name, smallest) = sum(counts.values()), min(counts.items(), key=lambda item: item[1])
    share = round(0.4 if total <= 1_000 else max(400 / total, 0.1), 3)
    folds = min(MOST_FOLDS, round(smallest * share))
    if folds < 2 or smallest < 8:
        raise ValueError(
            f"class {name!r} has {smallest} images; smallvit advise chooses on one part of them and judges on another one, and "
            "needs at least 8 of each class: add images, or move the class out of the folder"
        )
    return share, folds


def validation_images(images: "Inspection", share: float | None) -> int:
    """Return the number of validation images of a trial: a quarter of the images that trials may use, at most 1,000. `share`
    is the share of images that trials never see.
    """
    counts = next(iter(images.counts.values()))
    return min(round(sum(counts.values()) * (1 - (share or 0)) / 4), 1_000)


def runs_of(group: Group) -> list[float]:
    """Return how often a plain ViT could be trained in the time of each option of a group, for all its trials. The best two
    options have more seeds than the others, and the two of highest cost are counted as the best ones.
    """
    costs = sorted(option.cost for option in group.options)
    return [cost * (SEEDS[1] if rank >= len(costs) - 2 else SEEDS[0]) for rank, cost in enumerate(costs)]


def steps_of_trials(groups: Sequence[Group], minutes: float, spent: float, step: float, jobs: int) -> tuple[int, int]:
    """Return the number of training steps of a trial, and how many of `groups` are tried, so that the trials end in time.

    minutes, spent  the time for everything, and the seconds that have passed
    step            seconds of a training step of the plain ViT, with all worker processes busy
    jobs            number of worker processes
    """
    seconds = max(60 * minutes * SCREENING - spent, 0.1 * 60 * minutes) * jobs
    for count in range(len(groups), 0, -1):
        steps = seconds / (step * sum(sum(runs_of(group)) for group in groups[:count]))
        if steps >= WORTHWHILE_STEPS or count == 1:
            break
    return rounded(min(max(steps, FEWEST_STEPS), MOST_STEPS)), count


def rounded(steps: float) -> int:
    """Return a number of steps without more digits than it deserves: a multiple of 50, or of 10 below 200."""
    unit = 50 if steps >= 200 else 10
    return max(unit, int(steps // unit * unit))


def folds_of_judging(most: int, fold_seconds: float, last_seconds: float, left: float) -> int:
    """Return into how many folds the images on which the choice is judged are divided.

    most          the largest number of folds
    fold_seconds  seconds of one fold, with the training steps of the trials
    last_seconds  seconds of the last training, with all images
    left          seconds that are left for both

    A verdict needs six passes, and they take longer with more folds. So there are as many folds as there is time for in six
    passes. If there is no time for six passes of two folds, even with training that is half as long, the verdict comes from the
    single folds of fewer passes, and more folds are better.
    """
    for folds in range(most, 1, -1):
        if WANTED_PASSES * folds * fold_seconds + last_seconds <= left:
            return folds
    return 2 if SHORTEST * (WANTED_PASSES * 2 * fold_seconds + last_seconds) <= left else most


def length_of_judging(pass_seconds: float, last_seconds: float, left: float, steps: int) -> tuple[int, int]:
    """Return the number of training steps of the models that are judged, and the number of passes.

    pass_seconds  seconds of one pass with `steps` training steps
    last_seconds  seconds of the last training, with all images and `steps` training steps
    left          seconds that are left for both

    Six passes with the steps of the trials are wanted first, then longer training, then more passes. If there is too little
    time, training is up to twice as short, then there are fewer passes, then still fewer steps.
    """
    wanted = WANTED_PASSES * pass_seconds + last_seconds
    factor = min(max(left / wanted, SHORTEST), LONGEST)
    passes = int((left / factor - last_seconds) / pass_seconds + 1e-9) if pass_seconds else MOST_PASSES
    if passes >= FEWEST_PASSES:
        return rounded(steps * factor), min(passes, MOST_PASSES)
    factor = left / (FEWEST_PASSES * pass_seconds + last_seconds)
    return rounded(max(steps * factor, 10)), FEWEST_PASSES
