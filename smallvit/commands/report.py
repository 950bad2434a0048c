"""smallvit report: tables, verdicts and figures of the runs that have finished so far."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from smallvit.ablation import ArmRun
from smallvit.data.files import looks_like_image
from smallvit.launch.progress import error_lines
from smallvit.launch.results import Damaged, folders, placed, recall, tags
from smallvit.looks import with_looks
from smallvit.recipe import find_recipe, import_recipe, load_recipe
from smallvit.record import Record, one_picture_per_arm, read_records, write_records
from smallvit.report import csv_table, html, latex_table, markdown, text, text_against
from smallvit.report.page import how_to_predict, reported, run_command
from smallvit.report.provenance import warnings
from smallvit.storage import write_text
from smallvit.trackers import Followed, followed, send
from smallvit.train.fit import Tags, new_record
from smallvit.train.read_log import READS, all_reads, scored_settings
from smallvit.trials import trials
from smallvit.verdicts.compare import compare
from smallvit.verdicts.disagreements import disagreement_text, disagreements
from smallvit.words import how_many

from .mistakes import show_mistakes
from .predictions import image_names, write_predictions
from .stored import (
    check_out,
    known_looks,
    removed_comparisons,
    stored_records,
    unused_seeds,
    with_other_settings,
    with_present_names,
)
from .tune import old_options_note, untuned_note


def main(options: argparse.Namespace) -> int:
    """Write the report of a recipe file, which lists the runs of a comparison. Also print the verdict on each arm (variant),
    such as "better" or "worse" than its baseline. `options` are the arguments of the command line. Return the exit status: 0 if
    all runs have finished, otherwise 1.

    With `--csv` or `--latex`, also writes the results as a table. With `--predictions A`, also writes how the arm A classifies
    each test image. With `--mistakes A`, also lists and draws the test images that it gets wrong most often. With
    `--against A`, also prints the verdicts on all arms with A as their control. With `--disagreements A B`, also prints on
    which test images the arms A and B disagree. With `--log T`, also sends curves and results to the tracker T, such as
    TensorBoard. With `--publish`, writes records and report beside the recipe file. If no run has finished, the report is that
    of the committed records.
    """
    check_excluded({f"--{name}" for name, value in vars(options).items() if value}, EXCLUDED)
    if "-" in (options.csv, options.latex):  # only the table goes to the standard output
        with redirect_stdout(sys.stderr):
            return report(options)
    return report(options)


EXCLUDED = {  # pairs of options that cannot be used together: why, and what to do
    ("--publish", other): f"it only writes the files to be committed; give {other} in a second command"
    for other in ("--against", "--predictions", "--mistakes", "--log", "--disagreements")
}


def check_excluded(given: Set[str], excluded: Mapping[tuple[str, str], str]):
    """Raise ValueError if two options on the command line cannot be used together. `given` are the options that are used, and
    `excluded` is a dict from such a pair of options to the reason and what to do.
    """
    for (first, second), advice in excluded.items():
        if {first, second} <= given:
            raise ValueError(f"{first} cannot be used with {second}: {advice}")


def report(options: argparse.Namespace) -> int:
    """Write the report of a recipe file and everything else that the command `smallvit report` writes. `options` are the
    arguments of the command line. Return the exit status: 0 if all runs have finished, otherwise 1.

    Raises ValueError if a table must not be written to the file that the command line names.
    """
    check_tables(options)
    path = find_recipe(options.recipe)
    module = load_recipe(path, old_options=not options.publish)
    old_ranges = old_options_note(module.RUNS, path)
    for note in filter(None, (untuned_note(module.RUNS, options.recipe, options.out), old_ranges)):
        print(note, file=sys.stderr)
    runs, out = scaled(module.RUNS, options)
    published = path.with_suffix(".jsonl")
    committed = read_records(published) if published.exists() and options.scale_steps == 1 else []
    runs = with_looks(runs, known_looks(runs, out, path.stem, committed if options.publish else ()))
    records = collected = collect(runs, out, path.stem)
    if options.publish:
        publish(with_published(records, committed, published.name), committed, path, module, out, options)
        return 0
    if all(record.status == "missing" for record in records):
        if not committed:
            command = run_command(path, Path(options.out), scale_option(options.scale_steps))
            others = with_other_settings(stored_records(out, path.stem), runs)
            found = f", but {others} finished ones with other settings than {path.name} has now" if others else ""
            raise ValueError(f"no runs of {path.stem} in {out}{found}; start them with: {command}")
        records = with_present_names(committed, module.RUNS)
        print(f"no runs of {path.stem} in {out}; this is the report of the committed records")
        if old := with_other_settings(records, module.RUNS):  # --until-decided may have added seeds
            records_are = how_many(old, "record is of a run", "records are of runs")
            print(f"note: {records_are} with other settings than {path.name} has now")
    trained_here = out if records is collected and options.scale_steps == 1 else None
    if old_ranges:
        reason = old_ranges.removeprefix("warning: ")
        records = [replace(r, superseded=r.superseded or reason) if (r.tuning or {}).get("trials") else r for r in records]
    target, all_results = out / path.stem / "report", Path(options.out)
    write_report(path, module, records, target, options.scale_steps, models=trained_here, out=all_results)
    write_tables(records, target, options)
    for arm, show in ((options.predictions, write_predictions), (options.mistakes, show_mistakes)):
        if arm:
            command = run_command(path, Path(options.out), scale_option(options.scale_steps))
            print("\n" + show(arm, runs, collected, compare(records), out, path.stem, command))
    if options.against:
        print("\n" + text_against(records, options.against))
    if options.log:
        sent = send(options.log, out / path.stem, path.stem, runs_to_send(runs, out, path.stem))
        print(f"{options.log}: sent {how_many(sent, 'run')}")
    if options.disagreements:
        found = disagreements(records, *options.disagreements)
        print("\n" + disagreement_text(found, image_names(runs, records, options.disagreements[0])))
    return status(records)


def publish(
    records: Sequence[Record],
    committed: Sequence[Record],
    path: Path,
    module: ModuleType,
    out: Path,
    options: argparse.Namespace,
):
    """Write the records (results) of all runs of a recipe, and their report, beside the recipe file `path`, to be committed.
    `committed` are the records that an earlier command has written there, `module` is the loaded recipe, `out` is the folder of
    all results, and `options` are the arguments of the command line. Print how many of the committed records have gone.

    Raises ValueError if a run has not finished, and if a report would replace a file although nothing was published before.
    Runs whose external weights are unavailable may be missing, but no baseline.
    """
    if options.scale_steps > 1:
        raise ValueError(
            f"--publish got --scale-steps {options.scale_steps}, but the two cannot be combined: the recipe file"
            f" {path.name} sets other numbers of steps; remove --scale-steps"
        )
    left = sum(not (r.finished or (r.status == "unavailable" and r.role != "baseline")) for r in records)
    if left:
        raise ValueError(f"{left} of {len(records)} runs have not finished; a published report needs all of them")
    published = path.with_suffix(".jsonl")
    mine = [path.with_suffix(suffix).name for suffix in (".md", ".html") if path.with_suffix(suffix).exists()]
    if mine and not published.exists():
        raise ValueError(
            f"{' and '.join(mine)} would be replaced, but there is no {published.name} of an earlier --publish, so smallvit "
            "may not have written it; move it away"
        )
    records, target = one_picture_per_arm(records), path.with_suffix("")
    write_records(published, records)
    for line in replaced_records(committed, records, module.RUNS, published.name):
        print(f"note: {line}")
    write_report(path, module, records, target, models=out)
    write_tables(records, target, options)


def replaced_records(
    committed: Sequence[Record], records: Sequence[Record], runs: Sequence[ArmRun], file: str
) -> list[str]:
    """Return lines of text that say how many committed records (results) are replaced by records of the same runs with other
    results, and how many are not published again. `committed` are the earlier records in the file called `file`, `records` are
    those that replace them, and `runs` are the runs of the recipe.

    The results of a run are other ones if its status, its score or the hash of its weights is another.
    """
    new = {record.fingerprint: record for record in records}
    gone = [record for record in committed if record.fingerprint not in new]
    earlier = with_other_settings(gone, runs)
    lines = {
        f"of these runs %s replaced by others with different results in {file}": sum(
            record.fingerprint in new and has_other_results(record, new[record.fingerprint]) for record in committed
        ),
        f"of earlier settings %s no longer in {file}": earlier,
        f"of seeds that are not used now %s no longer in {file}": len(gone) - earlier,
    }
    return [
        how_many(count, f"committed record {text % 'is'}", f"committed records {text % 'are'}")
        for text, count in lines.items()
        if count
    ]


def has_other_results(record: Record, other: Record) -> bool:
    """Return whether two records of the same run differ in the status, the score or the weights. The hash of the weights does
    not count if a record lacks it.
    """
    hashes = {each.weights_sha256 for each in (record, other)} - {None}
    results = {(each.status, each.score, (each.test or {}).get(each.score or "")) for each in (record, other)}
    return len(hashes) > 1 or len(results) > 1


def with_published(records: Sequence[Record], committed: Sequence[Record], file: str) -> list[Record]:
    """Return the records of a recipe, where runs that have no result here are replaced by `committed` records, if these have
    the same settings. So the runs of a long comparison can be trained on several machines, or on several days. `records` are
    the results of the runs on this machine, and `file` is the name of the file with the committed ones.

    Comparisons that were removed from the recipe count as often as they do here or in the committed records.
    """
    known = {record.fingerprint: record for record in committed if record.finished}
    removed = max((record.removed or 0 for record in [*records, *committed]), default=0)

    def stored(missing: Record) -> Record:
        record = known.get(missing.fingerprint)
        if record is None:
            return missing
        return placed(record, Tags(*(getattr(missing, name) for name in Tags._fields)))  # it may stand for several lengths

    found = [r if r.finished else stored(r) for r in records]
    if count := sum(new is not old for new, old in zip(found, records)):
        print(f"{count} of {len(records)} runs have no result here; their committed records in {file} stay")
    return [replace(record, removed=removed) for record in found]


def scaled(runs: Sequence[ArmRun], options: argparse.Namespace) -> tuple[list[ArmRun], Path]:
    """Return a list of runs with more training steps, and the folder in which their results are stored. The number of steps is
    multiplied by the command-line option `--scale-steps`. Runs with tuned settings are left out, because their settings were
    tuned for another number of steps. The runs are then those that the recipe file itself lists, also if tuned runs have
    replaced them in `runs` because of `Tune(common=False)`. Raises ValueError if the folder `--out` cannot be used.
    """
    factor, out = options.scale_steps, Path(options.out)
    check_out(out)
    if factor == 1:
        return list(runs), out
    if any(entry.tuning is not None for entry in runs):
        print("note: --scale-steps uses the settings of the recipe; the tuned ones were tuned for another number of steps")
        runs = [entry for entry in import_recipe(find_recipe(options.recipe).resolve()).DECLARED if entry.tuning is None]
    return [entry.with_steps(lambda steps: steps * factor) for entry in runs], out / f"scale-steps-{factor}"


def runs_to_send(runs: Sequence[ArmRun], out: Path, recipe: str) -> list[Followed]:
    """Return runs as they are sent to a tracker, such as TensorBoard, each with its folder and its settings. `runs` are the
    runs, `out` is the folder of all results, and `recipe` is the name of the recipe file.
    """
    untrained = (new_record(entry.run, tags(entry, recipe), "missing") for entry in runs)
    return followed(zip(folders(runs, out, recipe), untrained))


def scale_option(factor: int) -> str:
    """Return the option `--scale-steps` as text for a command line, for example ` --scale-steps 2`. The text is empty for a
    factor of 1.
    """
    return f" --scale-steps {factor}" * (factor > 1)


def collect(runs: Sequence[ArmRun], out: Path, recipe: str) -> list[Record]:
    """Return a list with the record (results) of each run. A run without results gets a record with the status "missing", or
    "unavailable" if the external weights of another run of its arm (variant) are unavailable. `out` is the folder of all
    results, and `recipe` is the name of the recipe file.

    Each record also says how many comparisons were removed from the recipe, which other seeds its arm (variant) was trained
    with, and how many settings of this arm have been scored on the test images until now. A damaged record counts as missing,
    and the path of the damaged file is printed. A note says how many runs have no line in the file of these scorings.
    """
    stored = stored_records(out, recipe)
    reads = all_reads(file := out / recipe / READS)
    known = {read["fingerprint"] for read in reads}
    if lost := sum(bool(record.test_settings) and record.fingerprint not in known for record in stored):
        advice = f"if you have copied the runs of several machines into one folder, join their files {READS}"
        runs_were = how_many(lost, "run that was", "runs that were")
        print(f"note: {file} has no line for {runs_were} scored on test images; {advice}", file=sys.stderr)
    removed = removed_comparisons(runs, stored, [read["fingerprint"] for read in reads])
    unused = unused_seeds(runs, stored)
    records = []
    for entry in runs:
        record = None
        try:
            record = recall(entry, out, recipe)
        except Damaged as error:
            print(f"note: {error}", file=sys.stderr)
        if record is None:
            record = new_record(entry.run, tags(entry, recipe), status="missing")
            record.code = record.versions = record.cpu = None  # nothing was computed
        records.append(replace(record, removed=removed, unused_seeds=unused.get(entry.cell)))
    tried = {record.arm: record for record in records if record.status == "unavailable"}
    copied = ("status", "error", "code", "versions", "cpu")
    for index, record in enumerate(records):
        if record.status == "missing" and (other := tried.get(record.arm)):
            records[index] = replace(record, **{name: getattr(other, name) for name in copied})
    scored = scored_settings(reads, [(record.fingerprint, record.arm) for record in records])
    return [
        replace(record, test_settings=max(count, record.test_settings or 0)) if count and record.finished else record
        for record, count in zip(records, scored)
    ]


def write_report(
    path: Path,
    module: ModuleType,
    records: list[Record],
    target: Path,
    scale_steps: int = 1,
    show_warnings: bool = True,
    models: Path | None = None,
    out: Path | None = None,
):
    """Write the report of a comparison to `target.md` and `target.html`, and print its verdicts and warnings. `path` is the
    recipe file, `module` is this file as an imported module, and `records` are the results of its runs. `scale_steps`
    (the command-line option `--scale-steps`) multiplied the training steps, and `show_warnings=False` prints no warnings.
    `models` is the folder of all results, for the printed command that predicts new images with the trained models. None prints
    no such command: `smallvit predict` does not find models that are not there, or that have other numbers of steps. `out`
    is the folder of all results, for commands in the report that run the recipe again; None: they have only its name.
    """
    options, tried = scale_option(scale_steps), trials(path, target.parent, module.RUNS)
    command = "" if out is None else run_command(path, out, options)
    failure = None
    for suffix, page in ((".md", markdown), (".html", html)):
        content = page(
            records, title=path.stem, doc=module.__doc__ or "", options=options, trials=tried, command=command
        )
        try:
            write_text(target.with_suffix(suffix), content)
        except (OSError, ValueError) as error:  # the verdicts are printed nevertheless
            failure = failure or error
    print(text(records))
    if models is not None and (line := how_to_predict(records, path, models)):
        print(f"\n{line}")
    for warning in warnings(reported(records), tried) if show_warnings else ():
        print(f"warning: {warning}")
    if failure is not None:
        raise failure
    print(f"\nreport: {target.with_suffix('.html')}")


def check_tables(options: argparse.Namespace):
    """Raise ValueError if the file of a table, which the command line names, is a folder or has the suffix of a recipe or an
    image. `options` are the arguments of the command line.
    """
    for option, name, example in (("--csv", options.csv, "table.csv"), ("--latex", options.latex, "table.tex")):
        if name and (Path(name).is_dir() or name.lower().endswith(".py") or looks_like_image(name)):
            raise ValueError(
                f"{option} got {name}; expected one file for the table, such as {example}; if you meant the recipe, put it "
                f"before {option}"
            )


def write_tables(records: Sequence[Record], target: Path, options: argparse.Namespace):
    """Write the results of a comparison as a CSV file and as a LaTeX table, if the command line asks for them. `records` are
    the results of the runs, `target` is the path of the report without its suffix, and `options` are the arguments of the
    command line: the path of a file, an empty text for a file beside the report, or "-" for the standard output.
    """
    for name, suffix, table in ((options.csv, ".csv", csv_table), (options.latex, ".tex", latex_table)):
        if name == "-":
            print(table(compare(records)), end="", file=sys.__stdout__)
        elif name is not None:
            file = Path(name) if name else target.with_suffix(suffix)
            write_text(file, table(compare(records)))
            print(f"table: {file}")


def status(records: Sequence[Record]) -> int:
    """Return the exit status of a command: 0 if all runs have finished, otherwise 1. Also print how many runs failed or are
    missing. `records` are the results of the runs.

    Runs whose external weights are unavailable do not count as failed, but at least one run must have finished.
    """
    count = Counter(record.status for record in records)
    total = len(records) - count["unavailable"]
    lost = {"failed": "failed; --retry trains them", "interrupted": "were interrupted; the same command trains them"}
    for kind, words in lost.items():
        if count[kind]:
            print(f"smallvit: {count[kind]} of {total} runs {words} again", file=sys.stderr)
        for line in error_lines(record for record in records if record.status == kind):
            print(line, file=sys.stderr)
    if count["unavailable"]:
        arms = dict.fromkeys(record.arm for record in records if record.status == "unavailable")
        left_out = how_many(count["unavailable"], "run is", "runs are")
        text = f"{left_out} left out, because the weights are unavailable: {', '.join(arms)}"
        print(f"smallvit: {text}", file=sys.stderr)
    left = total - sum(count[kind] for kind in ("finished", *lost))
    if left:
        print(f"smallvit: {left} of {total} runs are still to be trained", file=sys.stderr)
    return int(any(count[kind] for kind in lost) or left > 0 or not count["finished"])
