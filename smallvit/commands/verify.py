"""smallvit verify: train some runs again and compare them with the committed records."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smallvit.ablation import ArmRun, by_cell
from smallvit.launch import launch
from smallvit.launch.launcher import check_device
from smallvit.numerics import Numerics, parse_numerics
from smallvit.recipe import filter_value, find_recipe, load_recipe, only
from smallvit.record import Record, code, read_records
from smallvit.report import compare_with_committed
from smallvit.report.reproduce import setting_changes
from smallvit.run import describe, fingerprint
from smallvit.words import how_many

from .stored import check_out, with_present_names


def main(options: argparse.Namespace) -> int:
    """Train a few runs of a recipe again, and compare the results with the published ones, which are stored beside the recipe
    file. `options` are the arguments of the command line. Return the exit status: 0 if all results agree, otherwise 1.

    By default these are the first seeds of the condition that is cheapest to train: the fewest labels, common settings and the
    shortest training. With `--only`, they are all runs that have what it names, such as a seed. Each run is computed as its
    record says: with the same precision, attention kernel and compilation, and in a stack of the same size where the records
    contain the other members of this stack. `--numerics` replaces parts of the first three, for example bf16 on a processor
    that computes it slowly.
    """
    given = parse_numerics(options.numerics)
    check_device(options.device)
    check_out(Path(options.out))
    path = find_recipe(options.recipe)
    module = load_recipe(path)
    published = path.with_suffix(".jsonl")
    if not published.exists():
        raise ValueError(f"{path.stem} has no committed records ({published.name} beside it); create them with --publish")
    committed = with_present_names(read_records(published), module.RUNS)
    if not committed:
        raise ValueError(f"{published} is empty; expected committed records; restore the file, or create it with --publish")
    recorded = {key(record): record for record in committed if record.finished}
    runs = with_committed_seeds(module.RUNS, committed)
    published_runs = [entry for entry in runs if key(entry) in recorded]
    if not published_runs:
        raise ValueError(f"none of the committed records is of a run in {path.name}: its arms, labels or seeds have changed")
    known = {key(record) for record in committed}
    if without := sum(key(entry) not in known for entry in module.RUNS):
        print(f"{without} of {len(module.RUNS)} runs of the recipe have no committed record, so they cannot be verified")
    filters = [*options.only, *([f"labels={options.labels}"] if options.labels else [])]
    requested = runs_to_verify(published_runs, filters, options.seeds)
    same = []
    for entry in requested:
        old = recorded[key(entry)]
        if old.fingerprint == fingerprint(entry.run):
            same.append(entry)
        else:
            changes = setting_changes(old.run, describe(entry.run))
            place = f"{entry.arm} at {entry.condition}, {entry.seed_text}"
            print(f"{place}: not trained, because the recipe has changed: {changes}")
    again: dict[tuple, Record] = {}
    for (numerics, stack), group in launches(same, published_runs, recorded, given).items():
        settings = f"{numerics.describe()}{f' stack {stack}' if stack > 1 else ''}".replace(", ", "-").replace(" ", "-")
        done = launch(
            group,
            Path(options.out, "verify", code()["sha256"][:12], settings),  # changed code or numerics train all runs again
            recipe=path.stem,
            recipe_runs=runs,
            source=path,
            jobs=1 if stack > 1 else options.jobs,  # several workers would share the members of a stack
            stack=stack,
            device=options.device,
            numerics=numerics,
            retry=True,
        )
        again |= {key(record): record for record in done}
    compared = [again[key(entry)] for entry in same if key(entry) in again]
    lines, agree = compare_with_committed(committed, compared)
    print("\n".join(lines), end="\n" * bool(lines))
    agree &= len(same) == len(requested)
    if left := len(same) - len(compared):
        runs_are = how_many(left, "run is", "runs are")
        print(f"{runs_are} being trained by another process; start the command again when it has ended")
        agree = False
    print("verified: every run agrees with its committed record" if agree else "NOT verified: see above")
    return 0 if agree else 1


def with_committed_seeds(runs: Sequence[ArmRun], committed: Sequence[Record]) -> list[ArmRun]:
    """Return the runs of a recipe, followed by those with other seeds that have a committed record: `smallvit run
    --until-decided` adds seeds to those of the recipe. `runs` are the runs of the recipe, and `committed` are these records.
    """
    listed, cells = {key(entry) for entry in runs}, by_cell(runs)
    added = [record for record in committed if key(record) not in listed and key(record)[:-1] in cells]
    first = [cells[key(record)[:-1]][0] for record in added]
    return [*runs, *(replace(entry, run=entry.run.at_seed(record.seed)) for entry, record in zip(first, added))]


def runs_to_verify(runs: Sequence[ArmRun], filters: Sequence[str], seeds: int) -> list[ArmRun]:
    """Return the list of the runs to train again: those of `runs` that pass all `filters`, which are texts as `--only` gets
    them, such as "seed=0-3". What no filter names is chosen: the fewest labels, common settings, the shortest training, and the
    `seeds` smallest seeds.

    Raises ValueError if `seeds` is larger than 1 and a filter names seeds.
    """
    named, selected = {text.partition("=")[0] for text in filters}, only(runs, filters)
    cheapest = min(selected, key=lambda e: (e.labels is None, e.labels or 0, e.tuning is not None, e.length or 0))
    for name in {"labels", "length", "settings"} - named:
        selected = [entry for entry in selected if filter_value(entry, name) == filter_value(cheapest, name)]
    if named & {"seed", "pass"}:
        if seeds > 1:
            raise ValueError(f"--seeds {seeds} cannot be used with --only seed=..., which names all seeds; remove one of them")
        return selected
    first = sorted({entry.seed for entry in selected})[:seeds]
    return [entry for entry in selected if entry.seed in first]


def key(run: ArmRun | Record) -> tuple:
    """Return a tuple that identifies a run in its recipe: arm (variant), number of labels, training length, whether its
    settings were tuned, and seed. `run` is a run of the recipe or its record (results).
    """
    return run.arm, run.labels, run.length, run.tuning is not None, run.seed


def launches(
    requested: Sequence[ArmRun], published: Sequence[ArmRun], recorded: dict[tuple, Record], given: dict[str, Any]
) -> dict[tuple[Numerics, int], list[ArmRun]]:
    """Group runs by how they must be computed, so that their published results can be repeated. Return a dict from (numerics,
    stack size) to a list of runs. Numerics are precision, attention kernel and compilation; the stack size is the number of
    runs that are trained as one model.

    requested  the runs to verify
    published  all runs with a published record; the runs that were trained as one model with a requested run are found here
    recorded   the published record of each run, by its `key`
    given      options of `Numerics` that replace those of the records

    Runs of a stack are cut into stacks in the order of their seeds. A run whose stack is not complete in the records is trained
    alone.
    """
    groups: dict[tuple[Numerics, int], dict[tuple, ArmRun]] = {}
    for entry in requested:
        record = recorded[key(entry)]
        stack = record.stacked or 1
        alike = [
            other for other in published if key(other)[:-1] == key(entry)[:-1] and (recorded[key(other)].stacked or 1) == stack
        ]
        start = alike.index(entry) // stack * stack
        members = alike[start : start + stack]
        if len(members) < stack:
            stack, members = 1, [entry]
        group = groups.setdefault((recorded_numerics(entry, record)._replace(**given), stack), {})
        group |= {key(member): member for member in members}
    return {settings: list(group.values()) for settings, group in groups.items()}


def recorded_numerics(entry: ArmRun, record: Record) -> Numerics:
    """Return how the training steps of a published run were computed: precision, attention kernel and compilation. `entry` is
    the run, and `record` is its record (results).
    """
    precision = None if record.precision in (None, entry.run.precision) else record.precision
    kernel = None if record.kernel in (None, "rule") else record.kernel
    return Numerics(precision, kernel, bool(record.compiled))
