"""Predictions of trained models: several models together, and many image files into a table."""

import csv
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smallvit.components import differences
from smallvit.data.decode import MissingPackage
from smallvit.data.files import expanded, is_image, unread_suffix, unread_text, visible_files
from smallvit.record import RECORD, Record, format_labels, read_record, settings_of
from smallvit.run import fingerprint, rebuild
from smallvit.train.trained_model import ImageClassifier, TrainedModel, check_batch, load
from smallvit.words import how_many

SHOWN = 20  # how many files an error message lists


class Ensemble(ImageClassifier):
    """Several trained models that predict together: the probability of a class is the mean of the probabilities of all models.
    `models` is a list of `TrainedModel` objects, for example the runs of one arm with different seeds.

        ensemble = smallvit.load_all("runs/quickstart/50/+SPT")
        ensemble.predict(["one.png", "two.png"])        # names of classes
        ensemble.predict_proba(pixels)                  # probabilities, shape (images, classes)

    Raises   ValueError without models, and for models with other classes or another kind of images.
    """

    def __init__(self, models: Sequence[TrainedModel]):
        if not models:
            raise ValueError("got no models; expected at least one TrainedModel, as smallvit.load returns it")
        if wrong := [model for model in models if not isinstance(model, TrainedModel)]:
            raise ValueError(f"got a {type(wrong[0]).__name__}; expected trained models, as smallvit.load returns them")
        self.models, self.preprocess = list(models), models[0].preprocess
        for model in models:
            for name in ("classes", "size", "channels", "dtype"):
                one, other = getattr(self.preprocess, name), getattr(model.preprocess, name)
                if one != other:
                    raise ValueError(f"the models differ in {name}: {one} and {other}; expected models of the same images")

    def check_classes(self):
        for model in self.models:
            model.check_classes()

    def probabilities(self, pixels: Tensor) -> Tensor:
        return torch.stack([model.probabilities(pixels) for model in self.models]).mean(0)


def load_all(folders: str | Path | Iterable[str | Path]) -> Ensemble:
    """Return an `Ensemble` of the trained models of several finished runs. `folders` is a list of folders of runs, or one
    folder that contains them, such as "runs/quickstart/50/+SPT".

    Raises ValueError for anything but folders, if no run has finished there, if one cannot be loaded (see `load`), and for one
    folder whose runs differ in more than the seed.
    """
    if isinstance(folders, str | Path):
        found = finished_runs(Path(folders).expanduser())
    else:
        found = list(folders) if isinstance(folders, Iterable) else [folders]
    if wrong := [one for one in found if not isinstance(one, str | Path)]:
        text = "expected folders of runs; for models that are loaded already, use Ensemble([...])"
        raise ValueError(f"got a {type(wrong[0]).__name__}; {text}")
    return Ensemble([load(folder) for folder in found])


def finished_runs(folder: Path) -> list[Path]:
    """Return the folders of the finished runs in `folder`, sorted by seed. These are the folder itself, if it is the folder of
    a run, or all folders in it. Runs that were trained only because another run needs them are left out.

    Raises ValueError if no run has finished there, and for runs that differ in more than the seed: in the arm, in the number of
    labels or in other settings, such as runs of an earlier version of the recipe.
    """
    if not folder.is_dir():
        also = "on the command line also RECIPE:ARM"
        raise ValueError(f"there is no folder {folder}; expected the folder of a finished run ({also})")
    if (folder / RECORD).exists():
        return [folder]
    found = {path.parent: read_record(path.parent) for path in sorted(folder.rglob(RECORD))}
    finished = {path: record for path, record in found.items() if record and record.finished and record.role != "dependency"}
    if not finished:
        left = f" ({how_many(len(found), 'run there has', 'runs there have')} not finished)" if found else ""
        raise ValueError(f"no run has finished in {folder}{left}; expected a folder with {RECORD}, which smallvit run writes")
    kinds = sorted({f"{record.arm} with {format_labels(record.labels)}" for record in finished.values()})
    if len(kinds) > 1:
        raise ValueError(f"{folder} contains runs of several arms: {', '.join(kinds)}; give the folder of one of them")
    first = {settings_key(record): path for path, record in reversed(finished.items())}
    if len(first) > 1:
        one, other = sorted(first.values())[:2]
        changed = differences(*(json.loads(settings_of(finished[path].run, "seed")) for path in (one, other)))
        names = ", ".join(list(changed)[:3])
        raise ValueError(
            f"{folder} contains runs with {len(first)} different settings, such as {one} and {other}, which differ in {names}; "
            "use RECIPE:ARM on the command line for the runs of the recipe as it is now, or name the folder of one run"
        )
    return sorted(finished, key=lambda path: finished[path].seed)


def settings_key(record: Record) -> str:
    """Return a text that is equal for runs that differ only in the seed. `record` holds the settings of the run."""
    try:
        return fingerprint(rebuild(record.run).at_seed(0))
    except (ValueError, AttributeError, TypeError, KeyError, OverflowError):  # such as a component of a recipe not loaded here
        return settings_of(record.run, "seed")


def find_files(names: Iterable[str]) -> list[str]:
    """Return the image files that the texts `names` stand for, each once, also if several texts mean it. A text is a file, a
    folder, which is searched with its subfolders, or a pattern such as "scans/*.png", which may match both. A file that is
    named or matched itself is always kept; in folders only files with the suffix of an image count, and hidden files and
    folders do not.

    Raises ValueError if a text stands for no image.
    """
    found: dict[str, str] = {}
    for name in map(expanded, names):
        matches = matching(name)
        inside = [file for match in matches if os.path.isdir(match) for file in visible_files(Path(match))]
        files = [match for match in matches if not os.path.isdir(match)]
        files += [str(file) for file in inside if is_image(file.name)]
        if not files:
            unread = unread_text(Counter(unread_suffix(file.name) for file in inside))
            what = "has no images" if matches else "is no file, no folder and no pattern of which a file exists"
            text = f"{name or 'an empty text'} {what}{unread and f' ({unread})'}"
            raise ValueError(f"{text}; expected image files, folders with images, or patterns such as 'scans/*.png'")
        for file in files:
            found.setdefault(os.path.abspath(file), file)
    return list(found.values())


def matching(name: str) -> list[str]:
    """Return what exists of a path or pattern: the path itself, or the files and then the folders that the pattern matches."""
    if os.path.exists(name):
        return [name]
    matches = sorted(glob(name, recursive=True))
    return [*filter(os.path.isfile, matches), *filter(os.path.isdir, matches)]


def ignored_files(names: Iterable[str]) -> Counter[str]:
    """Return how many files `find_files` leaves out of the folders for which the texts `names` stand, because they do not have
    the suffix of an image that is read, for each suffix.
    """
    matches = [match for name in names for match in matching(expanded(name))]
    folders = [Path(match) for match in matches if os.path.isdir(match)]
    files = {os.path.abspath(file): file for folder in folders for file in visible_files(folder) if not is_image(file.name)}
    named = {*map(os.path.abspath, matches)}
    left = [file for path, file in files.items() if path not in named]
    return Counter(unread_suffix(file.name) or file.suffix.lower() for file in left)


class Predictions(NamedTuple):
    """The predictions for image files: the files, their probabilities as a tensor (files, classes), and for each file that
    could not be read the reason.
    """

    files: list[str]
    probabilities: Tensor
    broken: dict[str, str]


def predict_files(
    model: ImageClassifier,
    files: Sequence[str],
    *,
    skip_broken: bool = False,
    batch: int = 64,
    watch: Callable[[int], Any] = lambda done: None,
) -> Predictions:
    """Return the predictions of `model`, a trained model or an ensemble, for image files. Only one batch of images is in memory
    at a time. `watch` is called after each batch with the number of files in it.

    Raises ValueError with a list of all files that cannot be read, unless `skip_broken` is True: then they are left out. Also
    raises it without files, if a package is missing that a file needs, and for a `batch` that is no whole number of at least 1.
    """
    check_batch(batch)
    if not files:
        raise ValueError("got no files; expected at least one image")
    model.check_classes()
    read, probabilities, broken = [], [], {}
    for start in range(0, len(files), batch):
        pixels = []
        for file in files[start : start + batch]:
            try:
                pixels.append(model.preprocess.pixels(file))
            except MissingPackage:
                raise
            except ValueError as error:
                broken[file] = str(error)
            else:
                read.append(file)
        if pixels and (skip_broken or not broken):  # otherwise the remaining files are only checked
            probabilities.append(model.probabilities(torch.cat(pixels)))
        watch(len(files[start : start + batch]))
    if broken and not skip_broken:
        more = f"\n  and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        listed = "".join(f"\n  {reason}" for reason in list(broken.values())[:SHOWN])
        raise ValueError(
            f"{len(broken)} of {len(files)} files cannot be read; remove them, or leave them out with --skip-broken:"
            f"{listed}{more}"
        )
    if not read:
        raise ValueError(f"none of the {len(files)} files can be read; the first: {next(iter(broken.values()))}")
    return Predictions(read, torch.cat(probabilities), broken)


def table(
    predictions: Predictions, classes: Sequence[str], more: Mapping[str, Sequence[str]] | None = None, separator: str = ","
) -> str:
    """Return predictions as text in CSV format: one line for each file, with the file, the most probable class and the
    probability of each class. The column of a class is called `p_<class>`. `more` are further columns, from their names to
    their texts, one for each file. `separator` is the character between two columns.
    """
    columns = more or {}
    text = io.StringIO()
    writer = csv.writer(text, delimiter=separator, lineterminator="\n")
    writer.writerow(["file", "class", *columns, *(f"p_{name}" for name in classes)])
    for index, (file, row) in enumerate(zip(predictions.files, predictions.probabilities)):
        texts = [column[index] for column in columns.values()]
        writer.writerow([file, classes[int(row.argmax())], *texts, *(f"{value:.6f}" for value in row.tolist())])
    return text.getvalue()
