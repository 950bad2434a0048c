"""smallvit verify: train some runs again and compare them with the committed records."""

import argparse
from pathlib import Path

from smallvit.launch import launch
from smallvit.launch.local import check_device
from smallvit.recipe import filter_value, find_recipe, load_recipe, only
from smallvit.record import code, read_records
from smallvit.report import compare_with_committed
from smallvit.run import fingerprint


def main(options: argparse.Namespace) -> int:
    """Train a few published runs again, and compare the new results with the published ones. `options` are the arguments of the
    command line. Return the exit status: 0 if all results agree, otherwise 1.
    """
    check_device(options.device)
    path = find_recipe(options.recipe)
    module = load_recipe(path)
    published = path.with_suffix(".jsonl")
    if not published.exists():
        raise ValueError(f"{path.stem} has no committed records ({published.name} beside it); create them with --publish")
    committed = read_records(published)
    names = {(record.arm, record.labels, record.seed) for record in committed if record.finished}
    runs = [entry for entry in module.RUNS if (entry.arm, entry.labels, entry.seed) in names]
    if not runs:
        raise ValueError(f"none of the committed records is of a run in {path.name}: its arms, labels or seeds have changed")
    smallest = min(runs, key=lambda entry: (entry.labels is None, entry.labels or 0))
    seeds = sorted({entry.seed for entry in runs})[: options.seeds]
    runs = [e for e in only(runs, [f"labels={options.labels or filter_value(smallest, 'labels')}"]) if e.seed in seeds]
    out = Path(options.out) / "verify" / code()["sha256"][:12]  # changed code trains all runs again
    again = launch(
        runs,
        out,
        recipe=path.stem,
        recipe_runs=module.RUNS,
        source=path,
        jobs=options.jobs,
        device=options.device,
        retry=True,
    )
    recorded = {record.fingerprint for record in committed}
    if changed := sorted({entry.arm for entry in runs if fingerprint(entry.run) not in recorded}):
        print(f"note: {', '.join(changed)}: a setting or a default has changed since the records were made")
    lines, agree = compare_with_committed(committed, again)
    print("\n".join(lines))
    if left := len(runs) - len(again):
        print(f"{left} runs are being trained by another process; start the command again when it has ended")
        agree = False
    print("verified: every arm agrees with its committed records" if agree else "NOT verified: see above")
    return 0 if agree else 1
