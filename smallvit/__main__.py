"""The command line: smallvit list | run | report | verify | summary.

A command is imported when it is called, so `smallvit --help` does not wait for torch.
"""

import argparse
import signal
import sys
import threading
from importlib import import_module

from smallvit import __version__


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
        return import_module(f"smallvit.commands.{chosen.command}").main(chosen)
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
    for name, (text, choices) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        for add in choices:
            add(command)
    return parser


def of_a_recipe(command: argparse.ArgumentParser):
    command.add_argument("recipe", help="a recipe's name (see smallvit list) or the path of a recipe file")
    command.add_argument("--out", default="runs", help="where the runs are kept (default: ./runs)")


def of_length(command: argparse.ArgumentParser):
    longer = "every run N times as long, in a folder of its own"
    command.add_argument("--scale-steps", type=positive, default=1, metavar="N", help=longer)


def of_training(command: argparse.ArgumentParser):
    command.add_argument("--jobs", type=positive, help="worker processes, one thread each (default: one for each core)")
    command.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto (default: cpu)")


def of_run(command: argparse.ArgumentParser):
    add = command.add_argument
    add("--stack", type=positive, metavar="N", help="train N seeds of an arm as one model (default: 1)")
    fast = (
        "compute steps in the way that a few of them show to be autotune here: attention kernel, half precision, seeds as one, "
        "compiled blocks; the choice is kept for the next time"
    )
    add("--fast", action="store_true", help=fast)
    compute = (
        "how the steps are computed, and what --fast does not try: "
        "precision=fp32|bf16  kernel=rule|explicit|fused  compiled=yes|no"
    )
    add("--numerics", nargs="+", default=[], metavar="HOW", help=compute)
    only = "some runs only: arm=+SPT,+LSA  labels=100,1000  seed=0-3 (references: arm=references)"
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


def of_summary(command: argparse.ArgumentParser):
    command.add_argument("model", help="a recipe, by name or path, or a model of timm's, such as vit_base_patch16_224")
    command.add_argument("--arm", help="which arm of the recipe (default: its first)")
    command.add_argument("--image", type=positive, metavar="PIXELS", help="side of the image (default: the model's own)")
    command.add_argument("--channels", type=positive, help="of the image (default: the model's own)")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number from 1 on")
    return int(text)


COMMANDS = {  # what each does, and which words it takes; who does it stands in smallvit/commands
    "list": ("the recipes at hand, and the question that each one asks", ()),
    "run": (
        "train what a recipe compares and write its report; run it again to go on where it stopped",
        (of_a_recipe, of_length, of_training, of_run),
    ),
    "report": ("write the report of what has been run so far", (of_a_recipe, of_length, of_report)),
    "verify": (
        "train a few committed runs again and hold them against the committed records",
        (of_a_recipe, of_training, of_verify),
    ),
    "summary": ("what comes out of a model step by step: shapes, parameters and multiply-adds", (of_summary,)),
}


if __name__ == "__main__":
    sys.exit(main())
