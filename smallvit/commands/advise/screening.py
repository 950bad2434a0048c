"""The trials of `smallvit advise`: the options of one group are compared on validation images, and the best one is chosen.

All options are trained with two seeds, and the better half with four (successive halving). The code of `smallvit tune` trains
the trials. The choice depends on the scores only, not on the order in which runs end.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from smallvit.ablation import ArmRun
from smallvit.launch.tune import Candidates, close_study, new_study, open_journal, report_trials, train
from smallvit.recipe import load_recipe
from smallvit.record import Record
from smallvit.run import fingerprint
from smallvit.tuning import FIRST_SEED

from .plan import SEEDS


def try_options(
    name: str, recipe: Path, out: Path, show: Callable[[Record], None], **options: Any
) -> tuple[str, list[tuple[str, float | None, int]], float]:
    """Train the options of one group, the arms of a recipe file. Return the name of the best option; a list with the name, the
    mean validation score (None if a loss became infinite) and the number of seeds of each option; and the seconds of a run of
    the best option. If two options are equally good, the first one is chosen.

    name     the name of the group
    recipe   the path of the recipe file
    out      the folder for the runs
    show     called with each new record (results of a run)
    options  `jobs`, `stack`, `device` and `numerics`, as for `launch`

    Raises   ValueError if a run fails for another reason than an infinite loss.
    """
    arms = [entry for entry in load_recipe(recipe).RUNS if entry.seed == 0]
    group = candidates(arms, name)
    options |= {"recipe": recipe.stem, "source": recipe, "show": show}
    with open_journal(out / recipe.stem) as storage:
        group.trials = new_study(storage, group)
        for left, seeds in ((len(arms), SEEDS[0]), (max(2, -(-len(arms) // 2)), SEEDS[1])):
            trained = group.best(left)
            train([(group, trained)], range(FIRST_SEED, FIRST_SEED + seeds), out, options)
            report_trials(group, trained, seeds)
        close_study(group)
    (best,) = group.best(1)
    scores = [(arm.arm, score_of(own), len(own)) for arm, own in zip(arms, group.scores)]
    of_best = {fingerprint(group.runs[best].at_seed(FIRST_SEED + i)) for i in range(SEEDS[1])}
    seconds = median(record.seconds or 0.0 for key, record in group.records.items() if key in of_best)
    return arms[best].arm, scores, seconds


def score_of(scores: Sequence[float | None]) -> float | None:
    """Return the mean of validation scores, or None if a loss became infinite."""
    found = [score for score in scores if score is not None]
    return fmean(found) if found and len(found) == len(scores) else None


def candidates(arms: Sequence[ArmRun], name: str) -> Candidates:
    """Return the trials of a group of options. `arms` has one run of each option, and `name` is the name of the group."""
    names = [entry.arm for entry in arms]
    entry = ArmRun(run=arms[0].run, arm=name)
    runs = [arm.run for arm in arms]
    return Candidates(entry, {"option": names}, [{"option": option} for option in names], runs, [[] for _ in names])
