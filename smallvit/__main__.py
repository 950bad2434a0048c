"""The command line: smallvit list | run | report | verify | summary.

The file of a command is imported when the command is used, so `smallvit --help` does not import torch.
"""

import argparse
import signal
import sys
import threading
import time
from importlib import import_module
from io import TextIOWrapper

from smallvit import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 if something failed, 2 for wrong arguments and 130 after Ctrl-C."""
    options = parser().parse_args(arguments)
    options.started = time.perf_counter()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not lose a report
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.command in ("run", "verify"):  # importing torch takes seconds
        print(f"smallvit: loading {options.recipe}", file=sys.stderr, flush=True)
    try:
        return import_module(f"smallvit.commands.{options.command}").main(options)
    except ValueError as error:
        print(f"smallvit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nsmallvit: stopped; run the same command again to continue", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    """The parser of the command line, with one subparser for each command."""
    whole = argparse.ArgumentParser(
        prog="smallvit", description="Train Vision Transformers on little data, and measure whether a technique helps."
    )
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(dest="command", required=True, metavar=" | ".join(COMMANDS))
    for name, (text, groups) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        for add_options in groups:
            add_options(command)
    return whole


def recipe_options(command: argparse.ArgumentParser):
    """Add the recipe, and where its runs are stored."""
    command.add_argument("recipe", help="the name of a recipe (see smallvit list) or the path of a recipe file")
    command.add_argument("--out", default="runs", help="folder in which the runs are stored (default: ./runs)")


def length_options(command: argparse.ArgumentParser):
    """Add the option for longer runs."""
    text = "multiply the training steps of every run by N; these runs are stored in a folder of their own"
    command.add_argument("--scale-steps", type=positive, default=1, metavar="N", help=text)


def training_options(command: argparse.ArgumentParser):
    """Add the options for the processes and the device that train."""
    command.add_argument("--jobs", type=positive, help="number of worker processes, with one thread each (default: the cores)")
    command.add_argument("--device", default="cpu", help="cpu, cuda, mps or auto (default: cpu)")


def run_options(command: argparse.ArgumentParser):
    """Add the options of `smallvit run`."""
    add = command.add_argument
    add("--stack", type=positive, metavar="N", help="train N seeds of an arm as one model, which is faster (default: 1)")
    fast = (
        "measure a few steps and choose the fastest attention kernel, precision, stack size and compilation for this machine; "
        "the choice is stored for the next time"
    )
    add("--fast", action="store_true", help=fast)
    numerics = (
        "how training steps are computed; --fast does not change what is given here: "
        "precision=fp32|bf16  kernel=rule|explicit|fused  compiled=yes|no"
    )
    add("--numerics", nargs="+", default=[], metavar="OPTION", help=numerics)
    only = "train only some runs: arm=+SPT,+LSA  labels=100,1000  seed=0-3  (arm=references selects all references)"
    add("--only", nargs="+", default=[], metavar="FILTER", help=only)
    add("--smoke", action="store_true", help="train every arm for two steps only, to test that everything works")
    add("--dry-run", action="store_true", help="train nothing; print the runs, how the arms differ, and the estimated time")
    add("--retry", action="store_true", help="train failed runs again")
    add("--fail-fast", action="store_true", help="stop after the first failed run")


def report_options(command: argparse.ArgumentParser):
    """Add the options of `smallvit report`."""
    text = "write the records and the report beside the recipe file, to be committed"
    command.add_argument("--publish", action="store_true", help=text)


def verify_options(command: argparse.ArgumentParser):
    """Add the options of `smallvit verify`."""
    text = "number of committed seeds of each arm to train again (default: 1)"
    command.add_argument("--seeds", type=positive, default=1, help=text)
    command.add_argument("--labels", help="number of labels of these runs (default: the smallest committed one)")


def summary_options(command: argparse.ArgumentParser):
    """Add the options of `smallvit summary`."""
    command.add_argument("model", help="a recipe (name or path), or the name of a timm model, such as vit_base_patch16_224")
    command.add_argument("--arm", help="arm of the recipe (default: the first one)")
    command.add_argument("--image", type=positive, metavar="PIXELS", help="side of the image (default: that of the model)")
    command.add_argument("--channels", type=positive, help="channels of the image (default: those of the model)")


def positive(text: str) -> int:
    """The number in a text. Raises argparse.ArgumentTypeError unless it is a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a whole number, at least 1")
    return int(text)


COMMANDS = {  # name -> help text, and the functions that add its options; the code is in smallvit/commands
    "list": ("list the available recipes and the question that each one asks", ()),
    "run": (
        "train the runs of a recipe and write its report; run it again to continue after an interruption",
        (recipe_options, length_options, training_options, run_options),
    ),
    "report": ("write the report of the runs that have finished so far", (recipe_options, length_options, report_options)),
    "verify": (
        "train a few committed runs again and compare the results with the committed records",
        (recipe_options, training_options, verify_options),
    ),
    "summary": ("print the output shapes, parameters and multiply-adds of a model, layer by layer", (summary_options,)),
}


if __name__ == "__main__":
    sys.exit(main())
