"""Finding the finished runs that predict, export and share are given: a folder, RECIPE:ARM, or hf:user/name."""

import argparse
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from smallvit.ablation import ArmRun
from smallvit.deploy.predict import Ensemble, finished_runs
from smallvit.launch.results import folder, recall
from smallvit.looks import with_looks
from smallvit.recipe import filter_value, find_recipe, load_recipe, only, seed_filter
from smallvit.record import Record, read_record
from smallvit.report.page import command_text
from smallvit.train import load
from smallvit.train.trained_model import HUB, ImageClassifier, trains_classifier

from .stored import known_looks, stored_records, with_other_settings


def load_model(options: argparse.Namespace) -> ImageClassifier:
    """Return the trained model that the command-line `options` name, or an ensemble of several with `--ensemble`. Raise
    ValueError if there is none, or if there are several without `--ensemble`.
    """
    folders = find_folders(options)
    if options.ensemble:
        print(f"smallvit: the mean of {len(folders)} models, which are loaded now", file=sys.stderr, flush=True)
        return Ensemble([load(each) for each in folders])
    model = load(one_folder(folders, options, "use --ensemble for the mean of all, or choose one with --seed"))
    print(f"smallvit: {model.record.arm}, {seed_text(model.record)}, {folders[0]}", file=sys.stderr)
    return model


def seed_text(record: Record) -> str:
    """Return the seed of a run as text. `record` holds the results of the run. In a cross-validation, where a seed is one fold
    of a pass over all images, the text says that other images were left out of the training.
    """
    if not record.folds:
        return f"seed {record.seed}"
    number, fold = divmod(record.seed, record.folds)
    return f"seed {record.seed} (fold {fold} of pass {number}: trained without the images of this fold)"


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
    Face Hub. `options.labels`, `options.seed` and `options.only` choose among several.

    Raises ValueError for a recipe without an arm, with the arms that it has, and for a choice where there is none.
    """
    name = options.run
    if name.startswith(HUB):
        if options.only or options.labels is not None or options.seed is not None:
            raise ValueError(f"--only, --labels and --seed choose among several runs, and {name} is one model; leave them out")
        return [name]
    recipe, colon, arm = recipe_and_arm(name) if ":" in name else (name, "", "")
    if Path(name).is_dir() or not (colon or is_recipe(name)):
        if options.only or options.labels is not None:
            raise ValueError(f"--only and --labels choose runs of RECIPE:ARM, and {name} is a folder; leave them out")
        folders = finished_runs(Path(name))
        seeds = {str(each): getattr(read_record(each), "seed", None) for each in folders}
        found = [each for each, seed in seeds.items() if options.seed in (None, seed)]
        if not found:
            existing = ", ".join(map(str, seeds.values()))
            raise ValueError(f"{name} has no finished run of seed {options.seed}; it has the seeds {existing}")
        return found
    if not arm:
        known = able_arms(load_recipe(find_recipe(recipe), old_options=True).RUNS)
        raise ValueError(f"{recipe} is a recipe; add the arm whose model is to be used: {', '.join(quoted(recipe, known))}")
    return arm_folders(recipe, arm, options)


def recipe_and_arm(name: str) -> tuple[str, str, str]:
    """Return RECIPE:ARM as three texts: the recipe, the colon between them, and the arm (variant). Both parts may contain more
    colons: the recipe is the shortest part that means one. `name` without a recipe is divided at its last colon.
    """
    for match in re.finditer(":", name):
        if is_recipe(recipe := name[: match.start()]):
            return recipe, ":", name[match.end() :]
    return name.rpartition(":")


def is_recipe(name: str) -> bool:
    """Return whether a text on the command line means a recipe and not a folder: if it is the name of a recipe, or the path of
    a Python file. The file need not exist.
    """
    try:
        return Path(name).suffix == ".py" or bool(find_recipe(name))
    except ValueError:
        return False


def able_arms(runs: Iterable[ArmRun]) -> list[str]:
    """Return the names of the arms (variants) and references of a recipe whose models can predict classes. `runs` are its runs.
    Those without a trained head cannot, such as a classifier of raw pixels.
    """
    return list(dict.fromkeys(entry.arm for entry in runs if trains_classifier(entry.run)))


def quoted(recipe: str, arms: Iterable[str]) -> list[str]:
    """Return RECIPE:ARM for each arm (variant) of a recipe, in quotes where the shell needs them. `recipe` is the name or path
    of the recipe.
    """

    def for_shell(name: str) -> str:
        if re.fullmatch(r"[\w@%+=:,./-]+", name):
            return name
        return shlex.quote(name) if re.search(r'["$`\\!]', name) else f'"{name}"'

    return [for_shell(f"{recipe}:{arm}") for arm in arms]


def with_words(name: str, words: Sequence[str]) -> str:
    """Return the text in quotes that somebody probably meant who wrote RECIPE:ARM without them, so that the shell cut the name
    of the arm (variant) at its spaces. `name` is the first part, such as `cells.py:small`, and `words` are the following
    arguments, such as `CNN`. The result is empty if no arm of the recipe has such a name.
    """
    recipe, colon, arm = recipe_and_arm(name)
    if not colon or not is_recipe(recipe):
        return ""
    try:
        arms = {entry.arm for entry in load_recipe(find_recipe(recipe), old_options=True).RUNS}
    except ValueError:
        return ""
    texts = (" ".join([arm, *words[: count + 1]]) for count in range(len(words)))
    return next((f'"{recipe}:{text}"' for text in texts if text in arms), "")


def arm_folders(recipe: str, arm: str, options: argparse.Namespace) -> list[str]:
    """Return the folders of the finished runs of one arm of a recipe, in the order of their seeds. `options` are the arguments
    of the command line: the folder of all runs, the number of labels and the seed. If some of these runs have not finished, a
    note on stderr says how many have.

    Raises ValueError for an unknown recipe or arm, for an arm that cannot predict, for a seed that the recipe does not have, if
    no run has finished, and for several conditions, such as numbers of labels.
    """
    path, out = find_recipe(recipe), Path(options.out)
    declared = load_recipe(path, old_options=True).RUNS
    able = able_arms(declared)
    runs = with_looks(declared, known_looks(declared, out, path.stem))
    filters = [f"arm={arm}", *options.only, *([f"labels={options.labels}"] if options.labels is not None else [])]
    runs = only(runs, filters)
    chosen = list(dict.fromkeys(entry.arm for entry in runs))
    if len(chosen) > 1:
        raise ValueError(f"{options.run} names {len(chosen)} arms: {', '.join(chosen)}; expected one arm")
    arm = chosen[0]
    if arm not in able:
        raise ValueError(f"{arm!r} cannot predict: {reason_of(runs[0])}; arms that can: {', '.join(quoted(recipe, able))}")
    seeds, folds = list({str(entry.seed): None for entry in runs}), runs[0].run.folds
    runs = [entry for entry in runs if options.seed in (None, entry.seed)]
    if not runs:
        one_of = f" (a seed is one of {folds} folds of a pass)" if folds else ""
        raise ValueError(
            f"{path.name} has no run of {arm} with seed {options.seed}; it has {seed_filter(seeds)}{one_of}; choose one of "
            "these with --seed, or add seeds to the recipe"
        )
    recalled = [(entry, recall(entry, out, path.stem)) for entry in runs]
    finished = [entry for entry, record in recalled if record and record.finished]
    if not finished:
        place = (out / path.stem).absolute()
        if not place.is_dir():
            raise ValueError(
                f"there is no folder {place}, where the runs of {recipe} are looked for; use --out for the folder in which "
                f"`smallvit run` stored them, such as --out {Path('path', 'to', 'runs')}"
            )
        seed = f", seed {options.seed}" if options.seed is not None else ""
        failed = any(record and record.status == "failed" for _, record in recalled)
        command = command_text("run", recipe, out, f" --only {shlex.quote(f'arm={arm}')}" + " --retry" * failed)
        advice = f"if it was trained elsewhere, name the folder with --out; otherwise train it with: {command}"
        of_arm = [record for record in stored_records(out, path.stem) if record.arm == arm]
        others = with_other_settings(of_arm, declared)
        found = f", but {others} with other settings than {path.name} has now" if others else ""
        raise ValueError(f"no run of {arm}{seed} has finished in {place}{found}; {advice}")
    cells = {entry.cell: entry for entry in finished}
    if len(cells) > 1:
        *others, last = condition_filters(list(cells.values()))
        raise ValueError(
            f"{options.run} has finished runs of several conditions; choose one with --only: {', '.join(others)} or {last}"
        )
    planned = sum(entry.cell in cells for entry in runs)
    if len(finished) < planned:
        text = f"note: {len(finished)} of {planned} runs of {arm} have finished; the others are left out"
        print(text, file=sys.stderr, flush=True)
    return [str(folder(entry, out, path.stem)) for entry in sorted(finished, key=lambda entry: entry.seed)]


def condition_filters(entries: Sequence[ArmRun]) -> list[str]:
    """Return the filters for `--only` that choose each of some runs of one arm (variant), which differ in their conditions, as
    a list of texts such as `labels=100 settings=common`. Training lengths and settings are left out if no run has a length, or
    if none is tuned.
    """
    named = ["labels"]
    named += ["length"] * any(entry.length is not None for entry in entries)
    named += ["settings"] * any(entry.tuning is not None for entry in entries)
    return [" ".join(f"{name}={filter_value(entry, name)}" for name in named) for entry in entries]


def reason_of(entry: ArmRun) -> str:
    """Return why the model of a run cannot predict classes, as text. `entry` is the run of an arm or of a reference."""
    if entry.role == "reference":
        return "this reference is no trained network; it is a classifier of raw pixels or of untrained features"
    return "its head was not trained on labels; train a run with this one as init=... on labels"
