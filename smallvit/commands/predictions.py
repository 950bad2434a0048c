"""The predictions of trained models for the test images of their runs, and smallvit report R --predictions ARM."""

import hashlib
import re
import shlex
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from smallvit.ablation import ArmRun
from smallvit.deploy.predict import Predictions, table
from smallvit.launch.results import folder
from smallvit.launch.scheduler import read_data
from smallvit.record import Record
from smallvit.storage import write_atomic
from smallvit.verdicts.comparison import Comparison, Condition, condition_of
from smallvit.words import how_many

if TYPE_CHECKING:
    from torch import Tensor

    from smallvit.data import Images


def write_predictions(
    arm: str, runs: Sequence[ArmRun], records: Sequence[Record], comparison: Comparison, out: Path, recipe: str, command: str
) -> str:
    """Write a table in CSV format with the predictions of an arm (variant) for all test images, and return a line of text with
    its path. In a cross-validation, these are all images, and each is predicted by the models that were not trained on it. The
    parameters are those of `tested_runs`, and `recipe` is the name of the recipe.

    The columns are the file of the image, the most probable class, the label, the number of models, and the mean of their
    probabilities for each class.
    """
    import torch

    condition, entries = tested_runs(arm, runs, records, comparison, out, recipe, command)
    classes: Sequence[str] = ()
    found: dict[int, tuple[str, str, list[Tensor]]] = {}  # name, label and the probabilities that each model gives to an image
    for images, positions, probabilities in predictions_of(entries, out, recipe):
        classes = images.spec.classes
        for place, image in enumerate(positions):
            name, label = name_of(images, place, image), classes[int(images.labels[place])]
            found.setdefault(image, (name, label, []))[2].append(probabilities[place])
    names, labels, given = zip(*(found[image] for image in sorted(found)))
    means = torch.stack([torch.stack(each).mean(0) for each in given])
    text = table(Predictions([*names], means, {}), classes, {"label": labels, "models": [str(len(each)) for each in given]})
    path = file_beside_report("predictions", arm, runs, out, recipe).with_suffix(".csv")
    write_atomic(path, lambda new: new.write_bytes(text.encode("utf-8", "surrogateescape")))
    planned = sum(entry.cell == entries[0].cell for entry in runs)
    left = f" ({planned - len(entries)} of the {planned} runs have not finished)" * (planned > len(entries))
    images, models = how_many(len(names), "test image"), how_many(len(entries), "model")
    return f"predictions of {arm} at {condition.title} for {images} by {models}{left}: {path}"


def tested_runs(
    arm: str, runs: Sequence[ArmRun], records: Sequence[Record], comparison: Comparison, out: Path, recipe: str, command: str
) -> tuple[Condition, list[ArmRun]]:
    """Return the runs of an arm (variant) whose trained models predict its test images, and their condition: the main one with
    the most labelled images in which the arm has finished.

    `runs` are the runs of the recipe `recipe`, `records` are their results, `comparison` holds all results, and `out` is the
    folder of all results. `command` is the command that trains the runs, such as `smallvit run lab/cells.py --out elsewhere`,
    for an error message.

    Predictions score no setting, so they are not counted as a use of the test images. A setting that is changed after looking
    at them is counted when it is scored.

    Raises ValueError for an unknown arm, an arm without finished runs in `out`, an arm whose models have no trained head, and
    images or labels that have changed since the arm was trained.
    """
    from smallvit.train.trained_model import trains_classifier

    known = list(dict.fromkeys(entry.arm for entry in runs))
    if arm not in known:
        raise ValueError(f"the recipe {recipe} has no arm {arm!r}; expected one of {', '.join(map(repr, known))}")
    of_arm = [(entry, record) for entry, record in zip(runs, records) if entry.arm == arm]
    pairs = [pair for pair in of_arm if pair[1].finished and folder(pair[0], out, recipe).exists()]
    if not pairs:
        retry = " --retry" * any(record.status == "failed" for _, record in of_arm)
        raise ValueError(
            f"no finished run of {arm!r} is in {out}, and only trained models predict the test images; train them with: "
            f"{command} --only {shlex.quote(f'arm={arm}')}{retry}"
        )
    finished = {condition_of(record) for _, record in pairs}
    condition = max(finished.intersection(comparison.main) or finished, key=attrgetter("order"))
    shown = [(entry, record) for entry, record in pairs if condition_of(record) == condition]
    check_same_images(shown)
    for entry, _ in shown:
        if not trains_classifier(entry.run):
            raise ValueError(f"the head of {arm!r} was not trained on labels, so it predicts nothing; choose another arm")
    return condition, [entry for entry, _ in shown]


def file_beside_report(what: str, arm: str, runs: Sequence[ArmRun], out: Path, recipe: str) -> Path:
    """Return the path of a file about an arm (variant), without suffix, beside the report of the recipe in the folder `out`.
    In the name of the arm, other characters than letters and digits are replaced. If another arm among the `runs` would have
    the same file, a hash of the name follows.
    """

    def short(name: str) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "arm"

    shared = any(short(entry.arm) == short(arm) for entry in runs if entry.arm != arm)
    name = short(arm) + f"-{hashlib.sha256(arm.encode()).hexdigest()[:8]}" * shared
    return out / recipe / f"{what}-{name}"


def predictions_of(entries: Sequence[ArmRun], out: Path, recipe: str) -> "Iterator[tuple[Images, list[int], Tensor]]":
    """Let finished runs predict the classes of their test images again. Yield for each run the images; their positions in the
    test set or, in a cross-validation, among all images of the data set; and the class probabilities, shape (images, classes).
    `entries` are the runs, `out` is the folder of all results, and `recipe` is the name of the recipe.
    """
    from smallvit.evaluate import predictions
    from smallvit.train import load

    for entry in entries:
        data = read_data(entry.run.data).at_seed(entry.run.seed)
        images = data.test.open()
        positions = range(len(images)) if data.fold is None else data.fold.positions.tolist()
        trained = load(folder(entry, out, recipe))
        trained.check_classes()
        yield images, [*positions], predictions(trained.model, images)


def check_same_images(pairs: Sequence[tuple[ArmRun, Record]]):
    """Raise ValueError if the images, labels or names of classes have changed since runs were trained: other images may then be
    test images, and the models may have been trained on them. `pairs` are the runs and their results.
    """
    for entry, record in pairs:
        if record.has_other_data(*read_data(entry.run.data).content):
            raise ValueError(
                f"the images, labels or names of classes have changed since {entry.arm!r} was trained, so its test images may "
                "be others now; restore the data, or train all runs again in another --out folder"
            )


def image_names(runs: Sequence[ArmRun], records: Sequence[Record], arm: str) -> list[str] | None:
    """Return the names of all test images in the order of the test set, or of all images that are divided into folds in a
    cross-validation, as in the list of the mistakes: the name of the file, or a text with the position. `runs` are the runs of
    a recipe, `records` are their results, and `arm` is one of the arms (variants), whose data set it is. The result is None if
    the recipe does not list the arm any more, and if the data set cannot be loaded any more or has other images than the
    results.
    """
    entry = next((entry for entry in runs if entry.arm == arm), None)
    if entry is None:
        return None
    try:
        data = entry.run.data()
    except Exception:  # of the user's own code
        return None
    if any(record.data_sha256 != data.sha256 for record in records if record.arm == arm and record.finished):
        return None
    images: Images = data.pool if data.folds else data.test.open()
    positions = range(len(images)) if data.pool_index is None else data.pool_index.tolist()
    return [name_of(images, place, position) for place, position in enumerate(positions)]


def name_of(images: "Images", place: int, image: int) -> str:
    """Return the name of a test image: that of its file, if there is one, or a text with its position. `place` is its position
    in `images`, and `image` that in the test set or, in a cross-validation, among all images of the data set.
    """
    return images.files[place] if images.files else f"test image {image}"
