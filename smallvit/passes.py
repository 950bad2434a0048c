"""Passes of a cross-validation: which seeds belong to one pass over all folds, and whether all runs have the same folds.

A pass over the images is one run for each of k folds, so that every image is a test image once. The run of pass p and fold f
has the seed p * k + f. Without cross-validation (k = 0), a pass is a single run and its number is the seed.
"""

from collections.abc import Iterable

from smallvit.run import Run


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
    """Raise ValueError if an earlier run that `run` needs, such as pretraining, has another number of folds. `name` is the name
    of the arm in the message. Earlier runs on data without folds are allowed.
    """
    for field, earlier in run.dependencies.items():
        if earlier.folds not in (0, run.folds):
            raise ValueError(
                f"{name!r} has folds={run.folds} and its {field} has folds={earlier.folds}; expected the same number, because "
                f"the {field} could otherwise be trained on test images"
            )
        check_earlier_folds(earlier, name)
