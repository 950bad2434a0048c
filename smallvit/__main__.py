"""The command line: smallvit list | run | status | tune | explore | report | verify | new | advise | predict |
export | share | summary.

The file of a command is imported when the command is used, so `smallvit --help` does not import torch.
"""

import argparse
import os
import re
import signal
import sys
import threading
import time
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from io import TextIOWrapper

from smallvit import __version__

MOST_PARTS = 100_000  # into which the runs of a recipe are divided
CONTINUED = ("run", "tune", "explore", "verify", "advise")  # commands that keep what they have trained when they are stopped


def main(arguments: list[str] | None = None) -> int:
    """Run one command of the command line, such as `smallvit run`. Return the exit status: 0 for success, 1 if something
    failed, 2 for wrong arguments, and 130 after Ctrl-C.
    """
    whole = parser()
    options = whole.parse_args(joined(sys.argv[1:] if arguments is None else arguments))
    if options.command is None:
        whole.error(f"there is no command; expected {', '.join(COMMANDS)} (see smallvit --help)")
    options.started = time.perf_counter()
    if "device" in options and options.device is None:
        options.device = "cuda" if getattr(options, "gpus", None) else "cpu"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not lose a report
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    if options.command in ("run", "status", "tune", "explore", "verify"):  # importing torch takes seconds
        print(f"smallvit: loading {options.recipe}", file=sys.stderr, flush=True)
    try:
        return import_module(f"smallvit.commands.{options.command}").main(options)
    except BrokenPipeError:  # the program that reads the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"smallvit: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "; run the same command again to continue" * (options.command in CONTINUED)
        print(f"\nsmallvit: stopped{again}", file=sys.stderr)
        return 130


class CommandParser(argparse.ArgumentParser):
    """Parser of one command. The error for an unknown option or a superfluous argument shows the usage of this command, and not
    that of `smallvit` as a whole, as it would with argparse alone.
    """

    def parse_known_args(self, args=None, namespace=None):
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self.unknown_text(unknown[0].partition("=")[0]))
        return found, unknown

    def unknown_text(self, word: str) -> str:
        """Return an error message for a word of the command line that this command does not understand. It names a similar
        option, or the commands that have this option.
        """
        if not word.startswith("-"):
            return f"there is one argument too many: {word!r}"
        if others := [f"smallvit {name}" for name, (_, options) in COMMANDS.items() if word in options.split()]:
            return f"there is no option {word} here; it belongs to {', '.join(others)}"
        near = get_close_matches(word, self._option_string_actions, 1)
        return f"there is no option {word}" + "".join(f"; did you mean {other}?" for other in near)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. It has one subparser for each command, such as `smallvit run`. Options cannot be
    abbreviated: in a command with `--seeds`, `--seed` would otherwise mean this one.
    """
    whole = argparse.ArgumentParser(
        prog="smallvit", description="Train Vision Transformers on little data, and measure whether a technique helps."
    )
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", parser_class=CommandParser)
    for name, (text, options) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        for option in options.split():
            command.add_argument(option, help=HELP.get(f"{name} {option}", HELP[option]), **SETTINGS.get(option, {}))
    return whole


def joined(words: list[str]) -> list[str]:
    """Return the words of a command line, all values of `--sbatch` in one, `--sbatch=...`, and a space before names of arms.
    So argparse takes neither options of sbatch, such as "--requeue", nor arms, such as "-EMA", for options of smallvit.
    """
    found, values, rest, arms = [], [], iter(words), 0
    for word in rest:
        name, equals, value = word.partition("=")
        is_value = name == "--sbatch" and (equals or (value := next(rest, None)) is not None)
        is_arm = arms > 0 and (word[:2] != "--" or word not in HELP)
        (values if is_value else found).append(value if is_value else " " * is_arm + word)
        arms = ARMS.get(word, arms - 1)
    return found + [f"--sbatch={' '.join(values)}"] * bool(values)


def whole_number(text: str, least: int = 1) -> int:
    """Return a command-line argument as a whole number, or raise argparse.ArgumentTypeError if it is none, or too small."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a whole number, at least {least}")
    return int(text)


def per_gpu(text: str) -> float:
    """Return the value of `--per-gpu`, such as 4 or 0.25, as a number. Raises argparse.ArgumentTypeError for any other text."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    if re.fullmatch(r"0?\.\d+", text) and float(text) > 0:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not allowed; expected a whole number, or a share of a GPU such as 0.25")


def part(text: str) -> tuple[int, int]:
    """Return a command-line argument such as `3/64`, the third of 64 parts, as a pair of numbers. Raises
    argparse.ArgumentTypeError for any other text, and for a part that does not exist.
    """
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count) <= MOST_PARTS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; expected I/N from 1/N to N/N, such as 3/64, and N at most {MOST_PARTS:,}"
        )
    return int(index), int(count)


COMMANDS = {  # name -> help text and options; the code of a command is in smallvit/commands
    "list": ("list the available recipes and the question that each one asks", ""),
    "run": (
        "train the runs of a recipe and write its report; run it again to continue after an interruption",
        "recipe --out --scale-steps --jobs --device --gpus --per-gpu --stack --fast --numerics --only --until-decided"
        " --max-seeds --log --smoke --dry-run --retry --fail-fast --shard --on --sbatch --address",
    ),
    "status": (
        "show which runs of a recipe have finished, which are being trained and where, and the time left",
        "recipe --out --scale-steps --only --watch",
    ),
    "tune": (
        "choose the settings of each arm on validation images, with equally many trials for all arms",
        "recipe --out --jobs --device --stack --numerics --only --dry-run",
    ),
    "explore": (
        "train arms with other seeds and score them on validation images only, to try something out",
        "recipe --out --jobs --device --stack --numerics --only --seeds",
    ),
    "report": (
        "write the report of the runs that have finished so far",
        "recipe --out --scale-steps --csv --latex --against --predictions --mistakes --disagreements --log --publish",
    ),
    "verify": (
        "train a few committed runs again and compare the results with the committed records",
        "recipe --out --jobs --device --numerics --seeds --labels --only",
    ),
    "new": (
        "look at a folder of your images and write a recipe that compares all techniques on them",
        "name --data --size --digits --quick",
    ),
    "advise": (
        "try techniques on a folder of your images for some minutes; leave an answer with evidence, and a trained model",
        "folder --minutes --size --digits --photos --group-by --no-imagenet --into --jobs --device",
    ),
    "predict": (
        "predict the classes of image files with a trained model, as a table in CSV format",
        "run images -o --ensemble --skip-broken --labels --seed --only --out",
    ),
    "export": (
        "write a trained model to one file: .onnx for ONNX Runtime, .pt2 for torch.export",
        "run file --fixed-size --ensemble --labels --seed --only --out",
    ),
    "share": (
        "write a trained model with a model card to a folder, or upload it to the Hugging Face Hub",
        "run target --license --onnx --private --labels --seed --only --out",
    ),
    "summary": (
        "print the output shapes, parameters and multiply-adds of a model, layer by layer",
        "model --arm --image --channels",
    ),
}
NUMERICS = "precision=fp32|bf16  kernel=rule|explicit|fused|native  compiled=yes|no"
HELP = {  # of an option in all commands, or of "COMMAND OPTION"
    "recipe": "the name of a recipe (see smallvit list) or the path of a recipe file",
    "--out": "folder in which the runs are stored (default: ./runs)",
    "--scale-steps": "multiply the training steps of every run by N; these runs are stored in a folder of their own",
    "--jobs": "number of worker processes, with one thread each (default: one for each core, or 4 on each GPU)",
    "--device": "cpu, cuda, mps or auto (default: cpu)",
    "--gpus": "train on all GPUs of this machine (all) or on some (0,2), with one worker process on each; means --device cuda",
    "--per-gpu": "with --gpus or --on: N worker processes share each GPU (default: 1); with --on ray also a share such as 0.25",
    "--stack": "train N runs of an arm as one model, which is faster for small models (default: 1, with --device cuda by "
    "the size of the models); in a cross-validation N runs of any folds, best a multiple of the number of folds",
    "--fast": "measure a few steps and choose the fastest attention kernel, precision, stack size and compilation for this "
    "machine; the choice is stored for the next time",
    "--numerics": f"how training steps are computed; --fast does not change what is given here: {NUMERICS}",
    "verify --numerics": f"how training steps are computed (default: as in the record): {NUMERICS}",
    "--only": "only some runs: arm=+SPT,+LSA  labels=100,1000  seed=0-3  (arm=references selects all references)  "
    "length=2000  settings=tuned|common  pass=0 (of a cross-validation)",
    "--shard": "train part I of N independent parts of the runs, such as 3/64, for example in a job of a cluster; no report",
    "--on": "where to train: here (default), slurm (submit jobs to a SLURM cluster) or ray (a Ray cluster)",
    "--sbatch": 'with --on slurm: options of sbatch in quotes, such as "-p gpu --gres=gpu:1 -t 60"',
    "--address": "with --on ray: host:port of the cluster, or local to start Ray on this machine (default: auto)",
    "--log": "send learning curves and results to tensorboard, wandb or mlflow",
    "--watch": "show it again every 2 seconds until all runs have ended",
    "--until-decided": "look at the verdicts after 6, 8, 12, 16, 24 and 32 seeds (in a cross-validation: passes), and train "
    "more seeds only of the arms without a verdict so far",
    "--max-seeds": "with --until-decided: use at most N seeds, or passes in a cross-validation (default: 32)",
    "--smoke": "train every arm for two steps only, to test that everything works",
    "--dry-run": "train nothing; print the runs, how the arms differ, and the estimated time",
    "--retry": "train failed runs again",
    "--fail-fast": "stop after the first failed run",
    "--against": "also print the verdicts on all arms with ARM as the control, which may be a reference such as 'small CNN'",
    "--disagreements": "also write a table of the test images on which two arms disagree",
    "--csv": "also write the results as a CSV file: report.csv beside the report, or FILE; - prints it",
    "--latex": "also write the main results as a LaTeX table: report.tex beside the report, or FILE; - prints it",
    "--predictions": "also write how an arm classifies each test image: a table in CSV format beside the report",
    "--mistakes": "also list and draw the test images that an arm gets wrong most often, with its trained models",
    "--publish": "write the records and the report beside the recipe file, to be committed",
    "--seeds": "number of new seeds of each arm (default: 1)",
    "verify --seeds": "number of committed seeds of each arm that are trained again (default: 1)",
    "--labels": "number of labels with which the model was trained, or all (default: the only one)",
    "verify --labels": "number of labels of the runs that are trained again, or all (default: the smallest)",
    "name": "the recipe file to write, such as cells.py (default: the name of the folder of images)",
    "--data": "folder of images: <class>/*.png, or train/<class>/*.png and test/<class>/*.png",
    "--size": "side to which images are resized, in pixels, about (default: small ones keep theirs, others get about 48)",
    "--digits": "mirroring an image changes its label, as for digits and letters",
    "folder": "folder of images: <class>/*.png, or train/<class>/*.png and test/<class>/*.png",
    "--minutes": "the time for everything (default: 30)",
    "--photos": "the images may be mirrored; without --digits and --photos, smallvit guesses",
    "--group-by": "regular expression whose parentheses give the group of an image, such as a patient, in its file name: "
    "'(P\\d+)_.*'; images of one group stay together; '' for no groups (default: smallvit guesses)",
    "--no-imagenet": "do not compare with a ViT-S from ImageNet, whose weights are downloaded if this machine lacks them",
    "--into": "folder for the answer, the model and all runs (default: ./advice)",
    "--quick": "a recipe with three techniques and as few runs as a verdict needs",
    "run": "a trained model: the folder of a finished run, RECIPE:ARM (such as quickstart:+SPT), or hf:user/name",
    "images": "image files, folders (searched with their subfolders), or patterns in quotes, such as 'scans/*.png'",
    "file": "the file to write; its name ends in .onnx or .pt2",
    "target": "a new folder, or hf:user/name for the Hugging Face Hub",
    "-o": "file for the table (default: print it): file, class, and the probability of each class",
    "--ensemble": "use the mean of the probabilities of all finished seeds (or folds) of the arm",
    "--skip-broken": "leave out files that cannot be read; without it, they are listed and nothing is written",
    "--seed": "random seed of the run, if several have finished",
    "--fixed-size": "take only images of the size of the model; otherwise images of any size are resized inside the file",
    "--license": "license of the model in the notation of the hub, such as mit (default: unknown)",
    "--onnx": "also write model.onnx",
    "--private": "on the hub, only you can see the model",
    "model": "a recipe (name or path), or the name of a timm model, such as vit_base_patch16_224",
    "--arm": "arm of the recipe (default: the first one)",
    "--image": "side of the image (default: that of the model)",
    "--channels": "channels of the image (default: those of the model)",
}
ARMS = {"--arm": 1, "--against": 1, "--predictions": 1, "--mistakes": 1, "--disagreements": 2}  # how many names of arms follow
ARM = {"type": lambda text: text.removeprefix(" "), "metavar": "ARM"}  # the space is that of `joined`
NUMBER = {"type": whole_number, "metavar": "N"}
PATH = {"type": os.path.expanduser}  # the shell leaves the ~ in --out=~/runs
SETTINGS = {  # how an option is parsed; an option that is not listed takes one text
    "--out": PATH | {"default": "runs"},
    "--scale-steps": NUMBER | {"default": 1},
    "--minutes": {"type": float, "default": 30.0, "metavar": "M"},
    "--into": PATH | {"default": "advice", "metavar": "DIR"},
    "--group-by": {"metavar": "PATTERN"},
    "--jobs": NUMBER,
    "--gpus": {"metavar": "GPUS"},
    "--per-gpu": {"type": per_gpu, "metavar": "N"},
    "--on": {"choices": ("here", "slurm", "ray"), "default": "here"},
    "--sbatch": {"default": "", "metavar": "OPTIONS"},
    "--address": {"metavar": "HOST:PORT"},
    "--log": {"choices": ("tensorboard", "wandb", "mlflow")},
    "--shard": {"type": part, "metavar": "I/N"},
    "--stack": NUMBER,
    "--numerics": {"nargs": "+", "default": [], "metavar": "OPTION"},
    "--only": {"nargs": "+", "action": "extend", "default": [], "metavar": "FILTER"},
    "--max-seeds": NUMBER,
    **{table: PATH | {"nargs": "?", "const": "", "metavar": "FILE"} for table in ("--csv", "--latex")},
    **{option: {"nargs": 2} | ARM if count == 2 else ARM for option, count in ARMS.items()},
    "--seeds": NUMBER | {"default": 1},
    "images": {"nargs": "+"},
    "-o": PATH | {"dest": "output", "metavar": "FILE.csv"},
    "--seed": {"type": partial(whole_number, least=0), "metavar": "N"},
    **{side: NUMBER | {"metavar": "PIXELS"} for side in ("--image", "--size")},
    "name": {"nargs": "?"},
    "--data": {"required": True, "metavar": "DIR"},
    "--channels": NUMBER,
    **{flag: {"action": "store_true"} for flag in ("--fast", "--until-decided", "--smoke", "--dry-run", "--quick", "--photos")},
    **{flag: {"action": "store_true"} for flag in ("--retry", "--fail-fast", "--publish", "--watch", "--private", "--digits")},
    **{flag: {"action": "store_true"} for flag in ("--ensemble", "--skip-broken", "--fixed-size", "--onnx", "--no-imagenet")},
}


if __name__ == "__main__":
    sys.exit(main())
