"""smallvit verify: train some committed runs again, and hold them against their band."""

import argparse
from pathlib import Path

from smallvit.launch import launch
from smallvit.recipe import find_recipe, load_recipe, only, value
from smallvit.record import code, read_records
from smallvit.report import band
from smallvit.run import fingerprint


def main(chosen: argparse.Namespace) -> int:
    path = find_recipe(chosen.recipe)
    module = load_recipe(path)
    if not path.with_suffix(".jsonl").exists():
        raise ValueError(
            f"{path.stem} has no committed records ({path.with_suffix('.jsonl').name} beside it); publish them first"
        )
    committed = read_records(path.with_suffix(".jsonl"))
    names = {(record["arm"], record["labels"], record["seed"]) for record in committed if record["status"] == "finished"}
    runs = [run for run in module.RUNS if (run.arm, run.labels, run.seed) in names]
    if not runs:
        raise ValueError(
            f"no committed record is of a run that {path.name} asks for today: its arms, labels or seeds have changed"
        )
    labels = chosen.labels or str(value(min(runs, key=lambda run: (run.labels is None, run.labels or 0)), "labels"))
    seeds = sorted({run.seed for run in runs})[: chosen.seeds]
    runs = [run for run in only(runs, [f"labels={labels}"]) if run.seed in seeds]
    out = Path(chosen.out) / "verify" / code()["sha256"][:12]  # other code makes other runs, whatever was verified before
    again = launch(runs, out, recipe=path.stem, source=path, jobs=chosen.jobs, device=chosen.device, retry=True)
    recorded = {record["fingerprint"] for record in committed}
    changed = sorted({run.arm for run in runs if fingerprint(run) not in recorded})
    if changed:
        print(f"note: {', '.join(changed)}: a choice or a default has changed since the records were made")
    lines, good = band(committed, again)
    print("\n".join(lines))
    if left := len(runs) - len(again):
        print(f"{left} runs are being trained by another process; verify again when it is through")
        good = False
    print("verified: every arm lies in its band" if good else "NOT verified: see above")
    return 0 if good else 1
