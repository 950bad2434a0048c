"""Finding the finished runs that predict, export and share are given: a folder, RECIPE:ARM, or hf:user/name."""

import argparse
import sys
from pathlib import Path

from smallvit.deploy.predict import Ensemble, finished_runs
from smallvit.launch.scheduler import folder, recall
from smallvit.looks import with_looks
from smallvit.recipe import find_recipe, load_recipe, only
from smallvit.record import read_record
from smallvit.train import load
from smallvit.train.trained_model import HUB, ImageClassifier

from .stored import known_looks


def load_model(options: argparse.Namespace) -> ImageClassifier:
    """Return the trained model that the command-line `options` name, or an ensemble of several with `--ensemble`. Raise
    ValueError if there is none, or if there are several without `--ensemble`.
    """
    folders = find_folders(options)
    if options.ensemble:
        print(f"smallvit: the mean of {len(folders)} models, which are loaded now", file=sys.stderr, flush=True)
        return Ensemble([load(each) for each in folders])
    model = load(one_folder(folders, options, "use --ensemble for the mean of all, or choose one with --seed"))
    print(f"smallvit: {model.record.arm}, seed {model.record.seed}, {folders[0]}", file=sys.stderr)
    return model


def one_folder(folders: list[str], options: argparse.Namespace, advice: str) -> str:
    """Return the only folder in the list `folders`. Raise ValueError with the `advice` if there are several. `options` are the
    arguments of the command line.
    """
    if len(folders) > 1:
        shown = ", ".join(folders[:3]) + ", ..." * (len(folders) > 3)
        raise ValueError(f"{options.run} stands for {len(folders)} finished runs ({shown}); {advice}")
    return folders[0]


def find_folders(options: argparse.Namespace) -> list[str]:
    """Return the folders of the finished runs that the command-line `options` name, in the order of their seeds. Raise
    ValueError if there is none.

    `options.run` is the folder of a run, a folder of runs that differ in the seed, RECIPE:ARM, or an address on the Hugging
    Face Hub. `options.labels` and `options.seed` choose among several.
    """
    name = options.run
    if name.startswith(HUB):
        return [name]
    recipe, colon, arm = name.rpartition(":")
    if not colon or Path(name).is_dir():
        folders = finished_runs(Path(name))
        seeds = {str(each): getattr(read_record(each), "seed", None) for each in folders}
        found = [each for each, seed in seeds.items() if options.seed in (None, seed)]
        if not found:
            existing = ", ".join(map(str, seeds.values()))
            raise ValueError(f"{name} has no finished run of seed {options.seed}; it has the seeds {existing}")
        return found
    return arm_folders(recipe, arm, options)


def arm_folders(recipe: str, arm: str, options: argparse.Namespace) -> list[str]:
    """Return the folders of the finished runs of one arm of a recipe, in the order of their seeds. `options` are the arguments
    of the command line: the folder of all runs, the number of labels and the seed. If some of these runs have not finished, a
    note on stderr says how many have.

    Raises ValueError for an unknown recipe or arm, if no run has finished, and for several numbers of labels.
    """
    path, out = find_recipe(recipe), Path(options.out)
    runs = load_recipe(path).RUNS
    runs = with_looks(runs, known_looks(runs, out, path.stem))
    filters = [f"arm={arm}", *options.only, *([f"labels={options.labels}"] if options.labels is not None else [])]
    runs = [entry for entry in only(runs, filters) if options.seed in (None, entry.seed)]
    finished = [entry for entry in runs if (record := recall(entry, out, path.stem)) and record.finished]
    if not finished:
        seed = f", seed {options.seed}" if options.seed is not None else ""
        command = f"smallvit run {recipe} --only 'arm={arm}'"
        raise ValueError(f"no run of {arm}{seed} has finished in {out / path.stem}; train it with: {command}")
    cells = {entry.cell: entry for entry in finished}
    if len(cells) > 1:
        listed = ", ".join(
            f"labels={'all' if entry.labels is None else entry.labels}"
            + f" length={entry.length}" * (entry.length is not None)
            + " settings=tuned" * (entry.tuning is not None)
            for entry in cells.values()
        )
        raise ValueError(f"{options.run} has finished runs of several conditions: {listed}; choose one with --only")
    planned = sum(entry.cell in cells for entry in runs)
    if len(finished) < planned:
        text = f"note: {len(finished)} of {planned} runs of {arm} have finished; the others are left out"
        print(text, file=sys.stderr, flush=True)
    return [str(folder(entry, out, path.stem)) for entry in sorted(finished, key=lambda entry: entry.seed)]
