"""The command line: smallvit list | run | report | verify | shapes.

Only what a command needs is imported, so `smallvit --help` does not wait for torch.
"""

import argparse
import ast
import shutil
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import ModuleType

from smallvit import __version__
from smallvit.recipe import find_recipe, load_recipe, only, recipe_files, shortened, value, with_length


def main(words: list[str] | None = None) -> int:
    """Run one command. The status is 0 if all went well, 1 if something failed, 2 if the words were wrong, 130 after Ctrl-C."""
    parser = arguments()
    chosen = parser.parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without a minus sign must not cost a report
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return chosen.call(chosen)
    except ValueError as error:
        print(f"smallvit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nsmallvit: stopped; start the same command again and it goes on from here", file=sys.stderr)
        return 130


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smallvit", description="Train Vision Transformers on little data, and know whether it helped."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, (text, choices, call) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(call=call)
        for add in choices:
            add(command)
    return parser


def of_a_recipe(command: argparse.ArgumentParser):
    command.add_argument("recipe", help="a recipe's name (see smallvit list) or the path of a recipe file")
    command.add_argument("--out", default="runs", help="where the runs are kept (default: ./runs)")


def of_length(command: argparse.ArgumentParser):
    longer = "every run N times as long, in a folder of its own"
    command.add_argument("--longer", type=positive, default=1, metavar="N", help=longer)


def of_training(command: argparse.ArgumentParser):
    command.add_argument("--jobs", type=positive, help="worker processes, one thread each (default: one for each core)")
    command.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto (default: cpu)")


def of_run(command: argparse.ArgumentParser):
    add = command.add_argument
    add("--stack", type=positive, metavar="N", help="train N seeds of an arm as one model (default: 1)")
    fast = (
        "compute steps in the way that a few of them show to be fastest here: attention kernel, half precision, seeds as one, "
        "compiled blocks; the choice is kept for the next time"
    )
    add("--fast", action="store_true", help=fast)
    compute = (
        "how the steps are computed, and what --fast does not try: "
        "precision=fp32|bf16  kernel=rule|explicit|fused  compiled=yes|no"
    )
    add("--compute", nargs="+", default=[], metavar="HOW", help=compute)
    only = "some runs only: arm=+SPT,+LSA  labels=100,1000  seed=0-3 (floors: arm=floors)"
    add("--only", nargs="+", default=[], metavar="WHAT", help=only)
    add("--smoke", action="store_true", help="two steps of every arm, to see that all of it works")
    add("--dry-run", action="store_true", help="say what would be run, how the arms differ, and how long it takes")
    add("--retry", action="store_true", help="run failed runs again")
    add("--fail-fast", action="store_true", help="stop at the first failure")


def of_report(command: argparse.ArgumentParser):
    command.add_argument("--publish", action="store_true", help="write records and report beside the recipe, to be committed")


def of_verify(command: argparse.ArgumentParser):
    seeds = "how many committed seeds of each arm to train again (default: 1)"
    command.add_argument("--seeds", type=positive, default=1, help=seeds)
    command.add_argument("--labels", help="which number of labels (default: the smallest committed)")


def of_shapes(command: argparse.ArgumentParser):
    command.add_argument("model", help="a recipe, by name or path, or a model of timm's, such as vit_base_patch16_224")
    command.add_argument("--arm", help="which arm of the recipe (default: its first)")
    command.add_argument("--image", type=positive, metavar="PIXELS", help="side of the image (default: the model's own)")
    command.add_argument("--channels", type=positive, help="of the image (default: the model's own)")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number from 1 on")
    return int(text)


def list_recipes(chosen: argparse.Namespace) -> int:
    for path in recipe_files():
        try:
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "no question asked"
        except SyntaxError as error:
            doc = f"cannot be read: {error.msg} in line {error.lineno}"
        print(f"{path.stem:16} {doc.splitlines()[0]}")
    return 0


def run(chosen: argparse.Namespace) -> int:
    from smallvit.execution import Execution, from_words
    from smallvit.launch import launch
    from smallvit.launch.plan import plan, tokens_left
    from smallvit.launch.trial import fastest

    path = find_recipe(chosen.recipe)
    module = load_recipe(path)
    planned, out = of_that_length(module.RUNS, chosen)
    runs = only(planned, chosen.only)
    if chosen.smoke:
        runs = planned = shortened(runs)
        out = out / "smoke"
    given = from_words(chosen.compute)
    if chosen.dry_run:
        print(plan(runs, chosen.jobs, chosen.device))
        return 0
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made ({error}); choose another folder") from error
    if chosen.smoke:
        shutil.rmtree(out / path.stem, ignore_errors=True)  # to see that all works means to try it now
    for arm, tokens in tokens_left(runs).items():
        print(f"{arm}: {tokens}")
    execution, stack = Execution(**given), chosen.stack or 1
    if chosen.fast:
        given |= {"stack": chosen.stack} if chosen.stack else {}
        print("fast: a few steps are tried in every way", file=sys.stderr)
        execution, stack, why = fastest(planned, out / path.stem, chosen.jobs, chosen.device, given)
        print(f"fast: {why}")
    trained = launch(
        runs,
        out,
        recipe=path.stem,
        source=path,
        jobs=chosen.jobs,
        stack=stack,
        device=chosen.device,
        execution=execution,
        retry=chosen.retry,
        fail_fast=chosen.fail_fast,
    )
    write_report(path, module, gathered(planned, out, path.stem), out / path.stem / "report")
    if chosen.smoke:
        print("smoke: every arm was trained for two steps to see that it works; the numbers mean nothing")
    return status(trained, len(runs))


def of_that_length(runs: list, chosen: argparse.Namespace) -> tuple[list, Path]:
    """The runs of a recipe as long as they were asked for, and where they lie."""
    if chosen.longer == 1:
        return runs, Path(chosen.out)
    return [with_length(run, lambda steps: steps * chosen.longer) for run in runs], Path(chosen.out) / f"longer-{chosen.longer}"


def report(chosen: argparse.Namespace) -> int:
    from smallvit.record import one_picture_each, read_records, write_records
    from smallvit.run import fingerprint

    path = find_recipe(chosen.recipe)
    module = load_recipe(path)
    planned, out = of_that_length(module.RUNS, chosen)
    records = gathered(planned, out, path.stem)
    published = path.with_suffix(".jsonl")
    if chosen.publish:
        if chosen.longer > 1:
            raise ValueError(f"--longer {chosen.longer} is not what {path.name} says; change its steps and publish those runs")
        left = sum(record["status"] not in ("finished", "unavailable") for record in records)
        left += sum(record["status"] == "unavailable" and record["role"] == "baseline" for record in records)
        if left:
            raise ValueError(f"{left} of {len(records)} runs have not finished; a published report has all of them")
        records = one_picture_each(records)
        write_records(published, records)
        write_report(path, module, records, path.with_suffix(""))
        return 0
    if all(record["status"] == "missing" for record in records):
        if not published.exists() or chosen.longer > 1:
            raise ValueError(f"no runs of {path.stem} in {out}; start them with: smallvit run {chosen.recipe}")
        records = read_records(published)
        print(f"no runs of {path.stem} in {out}; this is the report of the committed records")
        now = {fingerprint(run) for run in module.RUNS}
        if old := sum(record["fingerprint"] not in now for record in records):
            print(f"note: {old} of {len(records)} are of runs with other choices or defaults than {path.name} has today")
    write_report(path, module, records, out / path.stem / "report")
    return status(records, len(records))


def gathered(runs: list, out: Path, recipe: str) -> list[dict]:
    """A record of every run: what it left, or that it is missing, since verdicts pay for all that a recipe compares."""
    from smallvit.launch.schedule import recall
    from smallvit.train.fitting import blank

    unknown = dict.fromkeys(("code", "versions", "cpu"))
    return [recall(run, out, recipe) or blank(run, recipe, status="missing") | unknown for run in runs]


def write_report(path: Path, module: ModuleType, records: list[dict], target: Path):
    """Write `target.md` and `target.html`, then print the verdicts."""
    from smallvit.record import write_text
    from smallvit.report import html, markdown, text

    for suffix, page in ((".md", markdown), (".html", html)):
        write_text(target.with_suffix(suffix), page(records, title=path.stem, doc=module.__doc__ or ""))
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


def verify(chosen: argparse.Namespace) -> int:
    from smallvit.launch import launch
    from smallvit.record import code, read_records
    from smallvit.report import band
    from smallvit.run import fingerprint

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


def show_shapes(chosen: argparse.Namespace) -> int:
    from smallvit import shapes

    try:
        path = find_recipe(chosen.model)
    except ValueError as error:
        model, image = of_timm(chosen, error)
    else:
        run = only(load_recipe(path).RUNS, [f"arm={chosen.arm}"] if chosen.arm else [])[0]
        spec = run.data().spec
        size = spec.size if chosen.image is None else (chosen.image, chosen.image)
        image = (chosen.channels or spec.channels, *size)
        model = run.model(size, image[0], len(spec.classes))
        print(f"{path.stem}, {run.arm}:")
    try:
        print(shapes(model, image))
    except (AssertionError, RuntimeError) as error:  # of a model that is not ours
        raise ValueError(f"{chosen.model} does not take images of {' x '.join(map(str, image))}: {error}") from error
    return 0


def of_timm(chosen: argparse.Namespace, error: ValueError) -> tuple:
    """A model of timm's without memory for its weights, as a `ViT` where it is one; and the image that it is for."""
    import timm
    import torch

    from smallvit import like

    name = chosen.model
    if not timm.is_model(name.partition(".")[0]):
        raise ValueError(f"{error} (timm has no model of that name either)") from None
    if chosen.arm:
        raise ValueError(f"{name} is a model of timm's and has no arm {chosen.arm!r}; leave --arm out")
    cfg = timm.get_pretrained_cfg(name)
    size = cfg.input_size[1:] if chosen.image is None else (chosen.image, chosen.image)
    channels = chosen.channels or cfg.input_size[0]
    with torch.device("meta"):
        try:
            made = like(name)
        except ValueError:  # what is no plain ViT is shown as timm has it
            model = timm.create_model(name, in_chans=channels)
        else:
            model = made(size, channels, cfg.num_classes)
    return model, (channels, *size)


COMMANDS = {  # what each does, which words it takes, and who does it
    "list": ("the recipes at hand, and the question that each one asks", (), list_recipes),
    "run": (
        "train what a recipe compares and write its report; run it again to go on where it stopped",
        (of_a_recipe, of_length, of_training, of_run),
        run,
    ),
    "report": ("write the report of what has been run so far", (of_a_recipe, of_length, of_report), report),
    "verify": (
        "train a few committed runs again and hold them against the committed records",
        (of_a_recipe, of_training, of_verify),
        verify,
    ),
    "shapes": (
        "what comes out of a model step by step: shapes, parameters and multiply-adds",
        (of_shapes,),
        show_shapes,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
