"""Looks: numbers of seeds at which a comparison is tested while seeds are added, and the file that says how many each arm has.

In a cross-validation, a complete pass over all folds counts as one seed here.

`smallvit run R --until-decided` writes `looks.json` into the folder of the runs. `smallvit run` and `smallvit report` read it,
so that they know the seeds that were added to those of the recipe.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from smallvit.ablation import ArmRun, by_cell
from smallvit.passes import passes_of, seeds_of
from smallvit.storage import parse_json, write_text
from smallvit.words import how_many, units

FILE = "looks.json"


class Looks(NamedTuple):
    """The numbers of seeds of a comparison of arms (variants). It is tested at planned numbers of seeds; each test is a look.
    Until it is decided, runs with more seeds are trained.

    schedule  the numbers of seeds at which the comparison is tested, in rising order
    seeds     a dict from the cell of a run, its arm and its condition (see `ArmRun.cell`), to its present number of seeds. A
              cell that is absent has the seeds of the first look
    """

    schedule: tuple[int, ...]
    seeds: Mapping[tuple, int]

    def at(self, cell: tuple) -> int:
        """Return the present number of seeds of one arm (variant in a comparison) under one condition. `cell` is a tuple with
        both: arm, number of labels, training length, and whether the settings were tuned. A cell that is not listed has the
        first number of seeds in the schedule.
        """
        return self.seeds.get(cell, self.schedule[0])


def read_looks(folder: str | Path) -> Looks | None:
    """Read the file `looks.json` in `folder`, the folder of a recipe's runs, and return a `Looks` object, or None if there is
    no such file. It holds the planned numbers of seeds at which the comparison is tested (each test is a look), and the present
    number of seeds of each arm (variant). Raises ValueError if the file is damaged.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        plain = parse_json(path.read_text(encoding="utf-8"))
        cells = {(each["arm"], each["labels"], each["length"], each["tuned"]): each["seeds"] for each in plain["cells"]}
        schedule = tuple(plain["looks"])
        valid = schedule and all(type(n) is int and n > 0 for n in schedule)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); restore it, or delete it: records name the looks") from error
    if not valid or list(schedule) != sorted(set(schedule)):
        raise ValueError(f"{path} has the looks {list(schedule)}; expected increasing numbers of seeds, as smallvit wrote them")
    if wrong := [n for n in cells.values() if type(n) is not int or n < 1]:
        raise ValueError(f"{path} has the number of seeds {wrong[0]!r:.20}; expected 1 or more, as smallvit wrote it")
    return Looks(schedule, cells)


def write_looks(folder: str | Path, looks: Looks):
    """Write `looks` to the file `looks.json` in `folder`, the folder of a recipe's runs. `looks` holds the planned numbers of
    seeds at which a comparison is tested (each test is a look), and the present number of seeds of each arm (variant).
    """
    names = ("arm", "labels", "length", "tuned")
    cells = [json.dumps(dict(zip(names, cell)) | {"seeds": seeds}) for cell, seeds in looks.seeds.items()]
    lines = ",\n  ".join(cells)
    write_text(Path(folder) / FILE, f'{{"looks": {json.dumps(looks.schedule)}, "cells": [\n  {lines}\n]}}\n')


def with_looks(runs: Sequence[ArmRun], looks: Looks | None) -> list[ArmRun]:
    """Return the runs of a comparison with as many seeds for each arm (variant) and condition as `looks` says; missing runs are
    added. Each run also gets the planned numbers of seeds at which the comparison is tested (each test is a look). `runs` are
    all runs of the recipe. If `looks` is None, they are returned as they are.

    The seeds are those of the recipe in increasing order, followed by the next whole numbers. In a cross-validation, whole
    passes over all folds are counted and added.
    """
    if looks is None:
        return list(runs)
    cells = by_cell(runs)
    seeds = {cell: first_seeds(entries, looks.at(cell)) for cell, entries in cells.items()}
    return [
        replace(entries[0], run=entries[0].run.at_seed(seeds[cell][place]), looks=looks.schedule)
        for place in range(max(map(len, seeds.values()), default=0))
        for cell, entries in cells.items()
        if place < len(seeds[cell])
    ]


def first_seeds(entries: Sequence[ArmRun], count: int) -> list[int]:
    """Return the seeds of the first `count` seeds of an arm (variant) under one condition, as a list. `entries` are its runs in
    the recipe. In a cross-validation, `count` is a number of complete passes, and each has one seed for each fold.
    """
    folds = entries[0].run.folds
    return seeds_of(seed_list(passes_of([entry.seed for entry in entries], folds), count), folds)


def seed_list(seeds: Sequence[int], count: int) -> list[int]:
    """Return a list of `count` random seeds of a comparison: the given `seeds` in increasing order, followed by the next whole
    numbers if more are needed. For example, the seeds [0, 1] and a count of 4 give [0, 1, 2, 3].
    """
    ordered = sorted(set(seeds))
    return [*ordered, *range(ordered[-1] + 1, ordered[-1] + 1 + count)][:count]


def seeds_left_out(runs: Sequence[ArmRun], looks: Looks | None) -> str:
    """Return a note if a recipe lists more seeds than its comparison uses, because an earlier command with `--until-decided`
    has chosen the numbers of seeds. The text is empty if all listed seeds are used. `runs` are the runs that the recipe lists,
    and `looks` are the chosen numbers of seeds, or None.
    """
    if looks is None:
        return ""
    fewer = {}
    for cell, entries in by_cell(runs).items():
        folds = entries[0].run.folds
        listed = passes_of([entry.seed for entry in entries], folds)
        if len(listed) > looks.at(cell):
            fewer[entries[0].arm] = f"{looks.at(cell)} of the {len(listed)} {units(folds)}"
    if not fewer:
        return ""
    arm, share = next(iter(fewer.items()))
    others = f" (and {how_many(len(fewer) - 1, 'other arm')} less than listed)" if len(fewer) > 1 else ""
    return (
        f"note: an earlier command with --until-decided chose {share} of the recipe for {arm!r}{others}; to add seeds, use "
        f"--until-decided again; to train all that the recipe lists, choose another folder with --out"
    )


def choose_schedule(
    declared: int, seen: bool, looks: Sequence[int], added: Sequence[int], folds: bool = False
) -> tuple[int, ...]:
    """Return the numbers of seeds at which a comparison is tested while seeds are added; each test is a look. `declared` is the
    recipe's number of seeds, and `seen` is True if their results exist. Without results, return `looks`, such as (6, 8, 12).
    Results count as the first look: then return `added` if it begins with `declared`, else `declared` and the larger numbers in
    `looks`.

    Results with fewer seeds than the first of `looks` do not count, because there was no verdict to see: return `looks`. In a
    cross-validation (`folds`), where `declared` is a number of passes, any number of them has a verdict, so they count.

    Raises ValueError if the known result has as many seeds as the last look.
    """
    if not seen or (declared < looks[0] and not folds):
        return tuple(looks)
    if declared >= looks[-1]:
        known = f"{declared} {units(folds)}"
        raise ValueError(f"the recipe has {known} with results, and the last look is at {looks[-1]}; nothing to add")
    return tuple(added) if declared == added[0] else (declared, *(n for n in looks if n > declared))
