"""On which test images two arms disagree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from smallvit.record import Record

from .comparison import Condition, condition_of
from .differences import comparable, same_test_images
from .folds import pooled

SHOWN = 10  # test images on which two arms disagree most often


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """On which test images two arms (variants in the comparison) are right or wrong, under one condition.

    seeds   seed -> four numbers of images: both arms right, only the first one, only the second one, both wrong
    images  the test images on which the arms differ most often, as tuples: position in the test set, number of seeds in which
            only the first arm is right, number of seeds in which only the second arm is right
    folds   number of folds of a cross-validation, in which `seeds` are passes over all images; None: there is a fixed test part
    """

    condition: Condition
    arm: str
    other: str
    seeds: dict[int, tuple[int, int, int, int]]
    images: tuple[tuple[int, int, int], ...]
    folds: int | None = None


def disagreements(records: Sequence[Record], arm: str, other: str, condition: Condition | None = None) -> list[Disagreement]:
    """Return on which test images two arms (variants) disagree, as a list with one `Disagreement` for each condition. `records`
    are the results of all runs, and `arm` and `other` are the names of the two arms.

    condition   the only condition to look at; None: all in which both arms have runs

    In a cross-validation, a complete pass over all folds takes the place of a seed, and the images are all images.

    Raises ValueError for an unknown arm, or if no two runs can be compared: they must have finished with the same seed and
    images, and their records must say which test images were right. Records of earlier versions do not, nor do runs that are
    judged by another score than an accuracy. The test images must be the same for all seeds.
    """
    arms = list(dict.fromkeys(r.arm for r in records if r.role != "dependency"))
    if unknown := [name for name in (arm, other) if name not in arms]:
        raise ValueError(f"unknown arm {unknown[0]!r}; expected two of {', '.join(map(repr, arms))}")
    if arm == other:
        raise ValueError(f"the two arms are both {arm!r}; expected two different arms")
    records, found, compared = pooled(records), [], 0
    conditions = sorted({condition_of(r) for r in records if r.arm in (arm, other)}, key=lambda c: c.order)
    for c in conditions if condition is None else [condition]:
        runs, others = (
            {r.seed: r for r in records if r.arm == name and condition_of(r) == c and r.finished} for name in (arm, other)
        )
        seeds = [s for s in sorted(runs) if comparable(runs[s], others.get(s))]
        both = {s: (right_images(runs[s]), right_images(others[s])) for s in seeds}
        bits = {s: (a, b) for s, (a, b) in both.items() if a is not None and b is not None}
        if not same_test_images(each[s] for each in (runs, others) for s in bits):
            raise ValueError(
                f"runs of {arm!r} and {other!r} at {c.title} were scored on different test images; expected the same ones for "
                "all seeds: train the runs of the other data set again"
            )
        compared += len(seeds)
        if bits:
            folds = next(iter(runs.values())).folds
            found.append(replace(count_disagreements(c, arm, other, bits), folds=folds))
    if not found and not compared:
        raise ValueError(
            f"no runs of {arm!r} and {other!r} have finished with the same seed and images; train them, or choose other arms"
        )
    if not found:
        judge = next(r.score or "accuracy" for r in records if r.arm == arm and r.finished)
        raise ValueError(
            f"the records of {arm!r} and {other!r}, judged by {judge}, do not say which test images were right; expected "
            "records judged by accuracy (the first evaluator of the runs) or balanced_accuracy, and not of an earlier version"
        )
    return found


def right_images(record: Record) -> Any:
    """Return which test images a run classified correctly, as a boolean array, or None if its record does not say it. `record`
    holds its results. In older records of runs that are judged by their balanced accuracy, each right image has a value above
    0, and the others 0.
    """
    bits = record.correct_bits
    if bits is None and record.score == "balanced_accuracy" and (values := record.per_image) is not None:
        return values > 0
    return bits


def count_disagreements(condition: Condition, arm: str, other: str, bits: dict) -> Disagreement:
    """Return on which test images two arms (variants) disagree under one condition. `bits` is a dict from a seed to two boolean
    arrays, which say for each test image whether the first and the second arm are right.
    """
    import numpy as np

    seeds = {
        s: (int((a & b).sum()), int((a & ~b).sum()), int((~a & b).sum()), int((~a & ~b).sum())) for s, (a, b) in bits.items()
    }
    first = np.sum([a & ~b for a, b in bits.values()], axis=0)
    second = np.sum([~a & b for a, b in bits.values()], axis=0)
    order = sorted(range(len(first)), key=lambda i: (-abs(first[i] - second[i]), -first[i] - second[i], i))
    images = [(i, int(first[i]), int(second[i])) for i in order[:SHOWN] if first[i] + second[i]]
    return Disagreement(condition=condition, arm=arm, other=other, seeds=seeds, images=tuple(images))


def disagreement_text(found: Sequence[Disagreement], names: Sequence[str] | None = None) -> str:
    """Return tables for the terminal that show on which test images two arms (variants) disagree, one for each condition.
    `found` is the result of `disagreements`, and `names` are the names of the test images in the order of the test set, such as
    their files; None: an image is shown as its position, from 0.
    """
    blocks = []
    for d in found:
        unit, units = ("pass", "passes") if d.folds else ("seed", "seeds")
        lines = [f"{d.condition.title}: test images that “{d.arm}” (first) and “{d.other}” (second) classify correctly", ""]
        lines += [f"{unit:>6}{'both':>10}{'only first':>12}{'only second':>13}{'neither':>10}"]
        lines += [f"{s:>6}{a:>10,}{b:>12,}{c:>13,}{n:>10,}" for s, (a, b, c, n) in d.seeds.items()]
        if d.images:
            count = f"{len(d.seeds)} {units if len(d.seeds) > 1 else unit}"
            lines += ["", f"Of {count}, the images with the most disagreement{' (positions from 0)' * (names is None)}:"]
            shown = [f"{i:>8,}" if names is None else f"  {names[i]}" for i, _, _ in d.images]
            width = max(map(len, shown))
            head = f"{'image':>8}" if names is None else f"{'  image':{width}}"
            lines += [f"{head}{'only first':>12}{'only second':>13}"]
            lines += [f"{name:{width}}{a:>12,}{b:>13,}" for name, (_, a, b) in zip(shown, d.images)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
