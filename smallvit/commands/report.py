"""smallvit report: the tables, verdicts and figures of what has been run so far."""

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

from smallvit.launch.scheduler import recall
from smallvit.recipe import find_recipe, load_recipe, with_length
from smallvit.record import one_picture_each, read_records, write_records, write_text
from smallvit.report import html, markdown, text
from smallvit.run import fingerprint
from smallvit.train.fit import blank


def main(chosen: argparse.Namespace) -> int:
    path = find_recipe(chosen.recipe)
    module = load_recipe(path)
    planned, out = of_that_length(module.RUNS, chosen)
    records = gathered(planned, out, path.stem)
    published = path.with_suffix(".jsonl")
    if chosen.publish:
        if chosen.scale_steps > 1:
            raise ValueError(f"--scale-steps {chosen.scale_steps} is not what {path.name} says; change its steps and publish those runs")
        left = sum(record["status"] not in ("finished", "unavailable") for record in records)
        left += sum(record["status"] == "unavailable" and record["role"] == "baseline" for record in records)
        if left:
            raise ValueError(f"{left} of {len(records)} runs have not finished; a published report has all of them")
        records = one_picture_each(records)
        write_records(published, records)
        write_report(path, module, records, path.with_suffix(""))
        return 0
    if all(record["status"] == "missing" for record in records):
        if not published.exists() or chosen.scale_steps > 1:
            start = f"smallvit run {chosen.recipe}{length_option(chosen.scale_steps)}"
            raise ValueError(f"no runs of {path.stem} in {out}; start them with: {start}")
        records = read_records(published)
        print(f"no runs of {path.stem} in {out}; this is the report of the committed records")
        now = {fingerprint(run) for run in module.RUNS}
        if old := sum(record["fingerprint"] not in now for record in records):
            print(f"note: {old} of {len(records)} are of runs with other choices or defaults than {path.name} has today")
    write_report(path, module, records, out / path.stem / "report", chosen.scale_steps)
    return status(records, len(records))


def of_that_length(runs: list, chosen: argparse.Namespace) -> tuple[list, Path]:
    """The runs of a recipe as long as they were asked for, and where they lie."""
    if chosen.scale_steps == 1:
        return runs, Path(chosen.out)
    return [with_length(run, lambda steps: steps * chosen.scale_steps) for run in runs], Path(chosen.out) / f"scale-steps-{chosen.scale_steps}"


def length_option(scale_steps: int) -> str:
    """How `--scale-steps` is said on the command line, nothing where it changes nothing."""
    return f" --scale-steps {scale_steps}" * (scale_steps > 1)


def gathered(runs: list, out: Path, recipe: str) -> list[dict]:
    """A record of every run: what it left, or that it is missing, since verdicts pay for all that a recipe compares."""
    unknown = dict.fromkeys(("code", "versions", "cpu"))
    return [recall(run, out, recipe) or blank(run, recipe, status="missing") | unknown for run in runs]


def write_report(path: Path, module: ModuleType, records: list[dict], target: Path, scale_steps: int = 1):
    """Write `target.md` and `target.html`, then print the verdicts."""
    for suffix, page in ((".md", markdown), (".html", html)):
        said = page(records, title=path.stem, doc=module.__doc__ or "", options=length_option(scale_steps))
        write_text(target.with_suffix(suffix), said)
    print(text(records))
    print(f"\nreport: {target.with_suffix('.html')}")


def status(records: list[dict], expected: int) -> int:
    """0 if every run asked for has finished, those aside whose weights are not to be had; else 1 and a word about it."""
    finished = sum(record["status"] in ("finished", "unavailable") for record in records)
    failed = sum(record["status"] == "failed" for record in records)
    if failed:
        print(f"smallvit: {failed} of {expected} runs failed; --retry tries them again", file=sys.stderr)
        why = Counter((record["arm"], record["error"]) for record in records if record["status"] == "failed")
        for (arm, error), times in why.items():
            print(f"  {arm}: {error}" + f" ({times} runs)" * (times > 1), file=sys.stderr)
    if expected - finished - failed:
        print(f"smallvit: {expected - finished - failed} of {expected} runs are still to be trained", file=sys.stderr)
    nothing = not any(record["status"] == "finished" for record in records)
    return int(finished < expected or nothing)
