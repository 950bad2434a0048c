"""Passes of a cross-validation: which seeds belong to one pass over all folds, and whether all runs have the same folds.

A pass over the images is one run for each of k folds, so that every image is a test image once. The run of pass p and fold f
has the seed p * k + f. Without cross-validation (k = 0), a pass is a single run and its number is the seed.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from smallvit.components import neutral_options, options
from smallvit.run import Run
from smallvit.words import how_many


def seeds_of(passes: Iterable[int], folds: int) -> list[int]:
    """Return the seeds of all runs of some passes over the images, as a list. A pass is one run for each of the `folds` folds
    of a cross-validation; pass p has the seeds p * folds to p * folds + folds - 1. `passes` are the numbers of the passes.

    Without cross-validation (`folds=0`), a pass is a single run, and its number is its seed.
    """
    return [number * folds + fold for number in passes for fold in range(folds)] if folds else list(passes)


def passes_of(seeds: Iterable[int], folds: int) -> list[int]:
    """Return the numbers of the passes over the images to which the runs with the given seeds belong, in increasing order. It
    is the inverse of `seeds_of`. Without cross-validation (`folds=0`), the number of a pass is the seed.
    """
    return sorted({seed // folds for seed in seeds} if folds else set(seeds))


def run_count(seeds: Sequence[int], folds: int) -> str:
    """Return the number of runs of an arm (variant) as text, such as `8 runs`. A run is one training of one model, so a pass
    over `folds` folds of a cross-validation has that many runs: `10 runs (2 passes of 5 folds)`. `seeds` are the seeds of all
    its runs; a seed occurs several times if the arm is trained in several conditions, such as numbers of labelled images.
    """
    text = how_many(len(seeds), "run")
    if not folds:
        return text
    passes, single = len(passes_of(seeds, folds)), len(set(seeds))
    several = f"{passes} pass{'es' * (passes > 1)}"
    if single < passes * folds:
        return f"{text} ({single} of the {passes * folds} folds of {several})"
    conditions = len(seeds) // single
    return f"{text} ({several} of {folds} folds" + f" in {conditions} conditions" * (conditions > 1) + ")"


def common_folds(runs: dict[str, Run]) -> int:
    """Return the number of folds of a comparison, or 0 if its data set is not divided into folds. `runs` is a dict from the
    name of each arm (variant) to its run.

    Raises ValueError if two arms have different numbers of folds, or if an arm and an earlier run that it needs, such as
    pretraining, have different ones: the earlier run could then be trained on test images of the arm.
    """
    first, folds = next((name, run.folds) for name, run in runs.items())
    for name, run in runs.items():
        if run.folds != folds:
            raise ValueError(f"{first!r} has folds={folds} and {name!r} has folds={run.folds}; expected the same for all arms")
        check_earlier_folds(run, name)
    return folds


def check_earlier_folds(run: Run, name: str):
    """Raise ValueError if an earlier run that `run` needs, such as pretraining, could be trained on test images of `run`: if it
    has another number of folds, or if it loads the same path with other options, which divide the images in another way. `name`
    is the name of the arm in the message. Earlier runs on other data without folds are allowed.
    """
    for field, earlier in run.dependencies.items():
        if earlier.folds not in (0, run.folds):
            raise ValueError(
                f"{name!r} has folds={run.folds} and its {field} has folds={earlier.folds}; expected the same number, because "
                f"the {field} could otherwise be trained on test images"
            )
        mine, other = data_options(run), data_options(earlier)
        differing = sorted(option for option in mine.keys() | other.keys() if mine.get(option) != other.get(option))
        is_divided = any(found.get(option) is not None for found in (mine, other) for option in ("folds", "test"))
        if is_divided and differing and mine.get("path") is not None and mine["path"] == other.get("path"):
            raise ValueError(
                f"{name!r} and its {field} load the same path with different {', '.join(differing)}; expected equal options, "
                f"because the {field} could otherwise be trained on test images"
            )
        check_earlier_folds(earlier, name)


def check_same_fold(run: Run):
    """Raise ValueError if an earlier run that `run` needs, such as pretraining, could be trained on test images of `run`: see
    `check_earlier_folds`, or if both are runs of a cross-validation and have different seeds, which name different folds.
    """
    check_earlier_folds(run, f"the run with seed {run.seed}")
    for field, earlier in run.dependencies.items():
        if earlier.folds and earlier.seed != run.seed:
            raise ValueError(
                f"the run has seed={run.seed} and its {field} has seed={earlier.seed}, so they have different test images, and "
                f"the {field} is trained on test images of the run; expected equal seeds, such as run.at_seed({run.seed})"
            )
        check_same_fold(earlier)


def data_options(run: Run) -> dict[str, Any]:
    """Return the options with which a run loads its data, as a dict from name to value. An option `path` is written in full.
    Options that do not change the data, such as `cache` of `folder`, are left out.
    """
    neutral = neutral_options(run.data)
    found: dict[str, Any] = {name: option.default for name, option in options(run.data).items() if name not in neutral}
    path = found.get("path")
    return found | {"path": Path(path).expanduser().absolute() if isinstance(path, str | Path) else None}
