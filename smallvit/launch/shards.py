"""Shards: the runs of a recipe, divided into parts that need nothing from each other.

`smallvit run R --shard 3/64` trains the third of 64 parts, so the parts can be trained by the jobs of a cluster, or on several
machines with a common folder. Each process computes the same division, because it depends only on the runs and not on what has
finished.
"""

from collections.abc import Iterable, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

from smallvit.ablation import ArmRun, with_dependencies
from smallvit.run import fingerprint

# exit status of a shard of which another process trains some runs, or whose runs were interrupted: start it again later (as in
# sysexits.h)
BUSY = 75
UNEVEN = 1.1  # seeds of an arm are kept together if the largest shard then has at most so many times as many training steps


class Part(NamedTuple):
    """Runs that must be trained in one shard. One may need another one first, for example for pretraining.

    positions  the positions of these runs in the list of the requested runs
    steps      the training steps of all of them, and of the earlier runs that they need; each run counts once
    runs       how many runs that are
    """

    positions: tuple[int, ...]
    steps: int
    runs: int


def divide(runs: Sequence[ArmRun], recipe_runs: Iterable[ArmRun], count: int, stack: int = 1) -> list[list[ArmRun]]:
    """Divide runs into `count` shards, and return the list of the runs of each shard. Runs that share an earlier run, such as
    pretraining, lie in one shard together with this run. Otherwise the runs are spread so that all shards have about equally
    many training steps. `runs` are the runs to divide. `recipe_runs` are all runs of the recipe: an earlier run that is one of
    them keeps the name of its arm (variant). `stack` is the number of runs that are trained as one model.

    Each run lies in exactly one shard. An earlier run that is not in `runs` is not listed, but counts as work. The division
    does not depend on which runs have finished. If there are fewer independent parts than shards, the last shards are empty.

    With `stack` > 1, up to so many seeds of an arm lie in the same shard, as long as the shards stay balanced.

    Raises ValueError if `count` is not at least 1.
    """
    if count < 1:
        raise ValueError(f"the number of shards is {count}; expected at least 1")
    parts, kinds = independent_parts(runs, recipe_runs, stack)
    even = spread(parts, count)
    chosen = even
    for size in range(min(stack, len(parts)), 1, -1):
        together = spread(bundles(parts, kinds, size), count)
        if largest(together) <= UNEVEN * largest(even):
            chosen = together
            break
    return [[runs[position] for position in sorted(p for part in shard for p in part.positions)] for shard in chosen]


def independent_parts(
    runs: Sequence[ArmRun], recipe_runs: Iterable[ArmRun], stack: int
) -> tuple[list[Part], list[tuple[str, ...]]]:
    """Return the smallest parts into which runs can be divided, in the order of their first runs, and the kind of each part.
    Runs that need the same earlier run, such as pretraining, lie in one part, and so do equal runs of several conditions.
    Parts of the same kind differ only in seeds, learning rates and numbers of labels, so their runs can train as one model.
    The parameters are those of `divide`. If `stack` is 1, the kinds are not needed and are all equal.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    entries, dependencies = with_dependencies(runs, recipe_runs)
    first: dict[str, int] = {}
    pairs = [(index, first.setdefault(fingerprint(entry.run), index)) for index, entry in enumerate(entries)]
    distinct = set(first.values())
    pairs += [(index, other) for index, needed in enumerate(dependencies) for other in needed.values()]
    ones, size = [1] * len(pairs), len(entries)
    graph = coo_array((ones, tuple(zip(*pairs)) or ((), ())), shape=(size, size)) if entries else None
    labels = [] if graph is None else connected_components(graph, directed=False)[1].tolist()
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    parts, kinds = [], []
    for group in members.values():  # in the order of their first runs
        trained = [entries[index].run for index in group if index in distinct]
        positions = tuple(index for index in group if index < len(runs))
        parts.append(Part(positions, sum(run.steps for run in trained), len(trained)))
        kinds.append(tuple(sorted(run.stack_key for run in trained)) if stack > 1 else ())
    return parts, kinds


def bundles(parts: Sequence[Part], kinds: Sequence[tuple[str, ...]], size: int) -> list[Part]:
    """Join up to `size` parts of the same kind to one part, and return the joined parts as a list. `parts` and `kinds` are what
    `independent_parts` returns: runs that must be trained in one shard, and which of these parts could be trained as one model.
    """
    same: dict[tuple[str, ...], list[Part]] = {}
    for part, kind in zip(parts, kinds):
        same.setdefault(kind, []).append(part)
    joined = []
    for group in same.values():
        for start in range(0, len(group), size):
            positions, steps, runs = zip(*group[start : start + size])
            joined.append(Part(sum(positions, ()), sum(steps), sum(runs)))
    return joined


def spread(parts: Iterable[Part], count: int) -> list[list[Part]]:
    """Spread parts (runs that must be trained in one shard) over `count` shards, and return the parts of each shard. The parts
    with the most training steps come first, and each goes to the shard that has the fewest steps so far.

    Among shards with equally many steps, the one with the fewest runs gets the part: untrained references also take some time.
    """
    shards: list[list[Part]] = [[] for _ in range(count)]
    loads = [(0, 0, index) for index in range(count)]  # training steps, runs, number of the shard
    heapify(loads)
    for part in sorted(parts, key=lambda part: (-part.steps, -part.runs, part.positions)):
        steps, runs, index = loads[0]
        shards[index].append(part)
        heapreplace(loads, (steps + part.steps, runs + part.runs, index))
    return shards


def largest(shards: Iterable[Iterable[Part]]) -> int:
    """Return the number of training steps of the shard that has the most."""
    return max(sum(part.steps for part in shard) for shard in shards)
