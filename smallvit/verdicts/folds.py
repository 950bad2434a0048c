"""Cross-validation: the k runs of one pass over all images become one record, whose values stand in the order of the images.

A pass has one run for each of k folds, and every image is a test image in exactly one of them. The run of pass p and fold f has
the seed p * k + f. Verdicts count passes in place of seeds.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import Any

from smallvit.packing import pack_bits, pack_floats, unpack_bits
from smallvit.record import Record

from .comparison import condition_of

COSTS = ("params", "macs", "tokens", "images_seen", "unlabelled", "steps", "seconds", "val_images")
LARGEST = ("test_reads", "test_settings", "drawn_share", "removed")


@dataclass(kw_only=True)
class Pass(Record):
    """The record (saved results) of one pass of a cross-validation: all k runs together, in which every image is a test image
    once. The seed is the number of the pass.

    fold_scores  the score of each fold, by which the run of this fold is judged; empty if the pass is not complete
    fold_of_image  the number of the fold in which each image was tested; empty if the pass is not complete
    gap          which folds are missing or failed, such as `failed in fold 3`; empty if no fold or every fold is missing
    """

    fold_scores: tuple[float, ...] = ()
    fold_of_image: tuple[int, ...] = ()
    gap: str = ""


def pooled(records: Sequence[Record]) -> list[Record]:
    """Replace the k records of each pass of a cross-validation by one record, a `Pass`, and return all records as a list.
    `records` are the results of the runs. A record without folds, and a `Pass`, is returned unchanged.

    The score of a pass is the mean of the scores of its folds, weighted by their numbers of test images. The values of single
    images are put into the order of all images. Costs are means over the folds, so they are those of one model. If a fold has
    failed or is missing, so has the pass.

    Raises ValueError if records have different numbers of folds, if a run is recorded twice, or if the folds of a pass do not
    contain every image once.
    """
    if len(counts := {r.folds for r in records if r.role != "dependency"}) > 1:
        found = ", ".join(str(count or "no") for count in sorted(counts, key=lambda count: count or 0))
        raise ValueError(f"the records have different numbers of folds: {found}; expected the same for all runs of a recipe")
    passes: dict[Any, dict[int, Record]] = {}
    for position, r in enumerate(records):
        single = not r.folds or isinstance(r, Pass)
        runs = passes.setdefault(position if single else (r.arm, condition_of(r), r.role, r.seed // (r.folds or 1)), {})
        if r.seed in runs:
            run = f"{r.arm!r} at {condition_of(r).title}, seed {r.seed}"
            raise ValueError(f"{run} is recorded twice; keep one record of each run")
        runs[r.seed] = r
    return [records[key] if isinstance(key, int) else pool(list(runs.values())) for key, runs in passes.items()]


def pool(runs: Sequence[Record]) -> Pass:
    """Return the record of one pass of a cross-validation. `runs` are the records of its folds, of which some may be missing or
    failed.

    Raises ValueError if the test images of the folds are not all images once.
    """
    import numpy as np

    runs = sorted(runs, key=lambda r: r.seed)
    first = runs[0]
    k, number = first.folds or 1, first.seed // (first.folds or 1)
    found = {r.seed % k: r for r in runs}
    status_of = {fold: found[fold].status if fold in found else "missing" for fold in range(k)}
    for status in ("failed", "interrupted", "unavailable", "missing"):
        if bad := [fold for fold in range(k) if status_of[fold] == status]:
            return incomplete(found, status, bad, k, number)
    masks = [unpack_bits(r.test_index or "", r.pool_images or 0) for r in runs]
    if len({len(mask) for mask in masks}) > 1 or not (np.stack(masks).sum(0) == 1).all():
        raise ValueError(f"{first.arm!r}, pass {number}: its folds do not contain every image once; train these runs again")
    weights = [r.test_images or 0 for r in runs]
    return as_pass(
        first,
        seed=number,
        fold_scores=tuple(r.result for r in runs),
        fold_of_image=tuple(np.stack(masks).argmax(0).tolist()),
        test=weighted([r.test or {} for r in runs], weights),
        val=weighted([r.val or {} for r in runs], [r.val_images or 0 for r in runs]),
        test_images=sum(weights),
        test_majority=weighted([{"": r.test_majority or 0.0} for r in runs], weights)[""],
        test_repeats=sum(r.test_repeats or 0 for r in runs),
        test_groups=in_pool_order([r.test_groups for r in runs], masks),
        **values_of_images(runs, masks),
        confusion=summed([r.confusion for r in runs]),
        reliability=reliability_of([r.reliability for r in runs]),
        pretraining=pretraining_of(runs),
        subset_sha256=hashlib.sha256("".join(r.subset_sha256 or "" for r in runs).encode()).hexdigest(),
        **{name: average([getattr(r, name) for r in runs]) for name in COSTS},
        **{name: max((v for r in runs if (v := getattr(r, name)) is not None), default=None) for name in LARGEST},
        test_index=None,
        weights_sha256=None,
        trace=None,
    )


def incomplete(found: Mapping[int, Record], status: str, bad: Sequence[int], k: int, number: int) -> Pass:
    """Return the record of a pass whose folds have not all finished. `found` is a dict from a fold to its record, `status` is
    the status of the folds `bad`, such as "failed", `k` is the number of folds, and `number` is that of the pass.
    """
    r = found.get(bad[0], next(iter(found.values())))
    where = f"fold{'s' * (len(bad) > 1)} {', '.join(map(str, bad))}"
    error = f"fold {bad[0]}: {r.error}" if r.error and r.status == status else None
    nothing = dict.fromkeys(("test", "val", "correct", "contributions", "confusion", "reliability", "test_index", "trace"))
    gap = "" if len(bad) == k else f"{status} in {where}"
    return as_pass(r, seed=number, status=status, error=error or (where if gap else None), gap=gap, **nothing)


def as_pass(record: Record, **changes: Any) -> Pass:
    """Return a `Pass` with the fields of `record`, of which some are replaced by `changes`."""
    return Pass(**{f.name: getattr(record, f.name) for f in fields(Record)} | changes)


def values_of_images(runs: Sequence[Record], masks: Sequence[Any]) -> dict[str, str | None]:
    """Return the value of each image in a pass as fields of a record: `correct`, which images are right, and `contributions` if
    the score is no accuracy. A field is None if a fold does not say it. `runs` are the records of the folds, and `masks` are
    boolean arrays that say which images each fold has tested.
    """
    right, values = (in_pool_order(parts, masks) for parts in zip(*[(r.correct_bits, r.per_image) for r in runs]))
    only_bits = all(r.contributions is None for r in runs)
    return {
        "correct": None if right is None else pack_bits(right),
        "contributions": None if values is None or only_bits else pack_floats(values),
    }


def in_pool_order(parts: Sequence[Any], masks: Sequence[Any]) -> list | None:
    """Return the values of all images in the order of the data set, as a list. `parts` has the values of the test images of
    each fold, and `masks` says which images these are. The result is None if the values of a fold are None.
    """
    if any(part is None for part in parts):
        return None
    values: list = [None] * len(masks[0])
    for part, mask in zip(parts, masks):
        for index, value in zip(mask.nonzero()[0], part, strict=True):
            values[index] = value
    return values


def weighted(parts: Sequence[Mapping[str, float]], weights: Sequence[int]) -> dict[str, float]:
    """Return the mean of each number over the folds, weighted by `weights`, the numbers of images. `parts` has a dict from name
    to number for each fold. Numbers that a fold lacks are left out. If all weights are 0, the folds count equally.
    """
    weights = weights if any(weights) else [1] * len(weights)
    names = [name for name in parts[0] if all(name in part for part in parts)]
    return {name: sum(w * part[name] for part, w in zip(parts, weights)) / sum(weights) for name in names}


def average(values: Sequence[float | None]) -> float | None:
    """Return the mean of a cost over the folds, or None if no fold has it. The mean of whole numbers is rounded to one."""
    known = [value for value in values if value is not None]
    if len(set(known)) < 2:
        return known[0] if known else None
    return round(fmean(known)) if all(isinstance(value, int) for value in known) else fmean(known)


def pretraining_of(runs: Sequence[Record]) -> dict | None:
    """Return the costs of the earlier runs that one model needs, as a dict: the means over the folds. `runs` are the records of
    the folds. The result is None if nothing was trained before.
    """
    all_costs = [r.pretraining for r in runs if r.pretraining]
    if not all_costs:
        return None
    numbers = [name for name, value in all_costs[0].items() if isinstance(value, int | float)]
    return all_costs[0] | {name: average([costs.get(name) for costs in all_costs]) for name in numbers}


def summed(tables: Sequence[list | None]) -> list | None:
    """Return the sum of the confusion matrices of the folds, or None if a fold has none."""
    known = [table for table in tables if table is not None]
    if len(known) < len(tables):
        return None
    return [[sum(cells) for cells in zip(*rows, strict=True)] for rows in zip(*known, strict=True)]


def reliability_of(tables: Sequence[list | None]) -> list | None:
    """Return the data of the reliability diagram of all folds, or None if a fold has none. Each table has [number of images,
    mean confidence, accuracy] for each bin of the confidence.
    """
    known = [table for table in tables if table is not None]
    if len(known) < len(tables):
        return None
    bins = []
    for parts in zip(*known, strict=True):
        count = sum(n for n, _, _ in parts)
        bins.append([count, *(sum(part[0] * part[i] for part in parts) / count if count else 0.0 for i in (1, 2))])
    return bins
