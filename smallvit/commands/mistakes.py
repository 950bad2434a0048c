"""smallvit report R --mistakes ARM: the test images that an arm gets wrong most often and most surely, over all seeds."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smallvit.ablation import ArmRun
from smallvit.launch.results import folder
from smallvit.record import Record
from smallvit.storage import write_atomic
from smallvit.verdicts.comparison import Comparison, condition_of
from smallvit.words import how_many

if TYPE_CHECKING:
    from torch import Tensor

    from smallvit.data import Images

SHOWN = 20  # images


@dataclass(kw_only=True)
class Mistake:
    """The predictions that the models of one arm (variant) make for one test image.

    image       the position of the image in the test set; in a cross-validation, among all images of the data set
    name        the name of its file, or a text with its position
    true        the name of its class
    pixels      the image, shape (channels, height, width), from 0 to 1; pixels that the data set keeps as floats may have any
                value
    tested      how many models predicted its class
    guesses     the name of the predicted class of each model that was wrong
    confidence  the probability that each of these models gave to its prediction
    """

    image: int
    name: str
    true: str
    pixels: "Tensor"
    tested: int = 0
    guesses: list[str] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @property
    def guess(self) -> str:
        """The class that was predicted most often by the models that were wrong."""
        return max(dict.fromkeys(self.guesses), key=self.guesses.count)

    @property
    def surety(self) -> float:
        """The mean probability that the models that were wrong gave to their prediction."""
        return sum(self.confidence) / len(self.confidence)


def show_mistakes(
    arm: str, runs: Sequence[ArmRun], records: Sequence[Record], comparison: Comparison, out: Path, recipe: str, command: str
) -> str:
    """Return a text that lists the test images that an arm (variant) gets wrong most often, and among these most surely, over
    all seeds. Also draw them and save the drawing as a PNG file beside the report. `runs` are the runs of the recipe `recipe`,
    `records` are their results, `comparison` holds all results, and `out` is the folder of all results. `command` is the
    command that trains the runs, such as `smallvit run lab/cells.py --out elsewhere`, for an error message.

    The trained models in `out` predict the classes of the test images again. No setting is scored by this, so it is not counted
    as a use of the test images. A setting that is changed after looking at the mistakes is counted when it is scored.

    The runs are those of the main condition with the most labelled images in which the arm has finished.

    Raises ValueError for an unknown arm, an arm without finished runs in `out`, an arm whose models have no trained head, and
    images or labels that have changed since the arm was trained.
    """
    known = list(dict.fromkeys(entry.arm for entry in runs))
    if arm not in known:
        raise ValueError(f"the recipe {recipe} has no arm {arm!r}; expected one of {', '.join(map(repr, known))}")
    pairs = [(entry, record) for entry, record in zip(runs, records) if entry.arm == arm and record.finished]
    pairs = [pair for pair in pairs if folder(pair[0], out, recipe).exists()]
    if not pairs:
        raise ValueError(
            f"no finished run of {arm!r} is in {out}, and its mistakes are found with the trained models; train them with: "
            f"{command} --only {shlex.quote(f'arm={arm}')}"
        )
    finished = {condition_of(record) for _, record in pairs}
    condition = next(c for c in reversed((*comparison.conditions, *comparison.main)) if c in finished)
    shown = [(entry, record) for entry, record in pairs if condition_of(record) == condition]
    entries = [entry for entry, _ in shown]
    check_same_images(shown)
    found = find_mistakes(entries, out, recipe)
    wrong = sorted((m for m in found if m.guesses), key=lambda m: (-len(m.guesses) / m.tested, -m.surety, m.image))
    title = f"Mistakes of {arm} at {condition.title}: {len(wrong):,} of {len(found):,} test images are wrong in at least one of"
    lines = [f"{title} {how_many(len(entries), 'run')}{each_tested_by(found, len(entries))}"]
    if wrong:
        path = out / recipe / f"mistakes-{re.sub(r'[^A-Za-z0-9]+', '-', arm).strip('-') or 'arm'}.png"
        lines += [table(wrong[:SHOWN]), draw(wrong[:SHOWN], path)]
    return "\n".join(lines)


def each_tested_by(found: Sequence[Mistake], runs: int) -> str:
    """Return a text that says how many of `runs` runs tested each image, such as `; each image was tested by 8 of them`. In a
    cross-validation, these are the runs of one fold of each pass. The text is empty if all runs tested all images. `found` are
    the predictions for each test image.
    """
    counts = {mistake.tested for mistake in found}
    if counts <= {runs}:
        return ""
    number = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"; each image was tested by {number} of them"


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
    except (OSError, ValueError):
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


def check_same_images(pairs: Sequence[tuple[ArmRun, Record]]):
    """Raise ValueError if the images, labels or names of classes have changed since runs were trained: other images may then be
    test images, and the models may have been trained on them. `pairs` are the runs and their results.
    """
    for entry, record in pairs:
        if record.has_other_data(*entry.run.data().content):
            raise ValueError(
                f"the images, labels or names of classes have changed since {entry.arm!r} was trained, so its test images may "
                "be others now; restore the data, or train all runs again in another --out folder"
            )


def predictions_of(entries: Sequence[ArmRun], out: Path, recipe: str) -> "Iterator[tuple[Images, list[int], Tensor]]":
    """Let finished runs predict the classes of their test images again. Yield for each run the images; their positions in the
    test set or, in a cross-validation, among all images of the data set; and the class probabilities, shape (images, classes).
    `entries` are the runs, `out` is the folder of all results, and `recipe` is the name of the recipe.
    """
    from smallvit.evaluate import predictions
    from smallvit.train import load

    for entry in entries:
        data = entry.run.data().at_seed(entry.run.seed)
        images = data.test.open()
        positions = range(len(images)) if data.fold is None else data.fold.positions.tolist()
        yield images, [*positions], predictions(load(folder(entry, out, recipe)).model, images)


def find_mistakes(entries: Sequence[ArmRun], out: Path, recipe: str) -> list[Mistake]:
    """Return the predictions for each test image, in the order of the test set, as a list. `entries` are the runs of one arm
    (variant), `out` is the folder of all results, and `recipe` is the name of the recipe.

    Raises ValueError for runs whose head was not trained on labels.
    """
    from smallvit.train.trained_model import trains_classifier

    for entry in entries:
        if not trains_classifier(entry.run):
            raise ValueError(f"the head of {entry.arm!r} was not trained on labels, so it predicts nothing; choose another arm")
    found: dict[int, Mistake] = {}
    for images, positions, probabilities in predictions_of(entries, out, recipe):
        guesses = probabilities.argmax(1).tolist()
        for place, image in enumerate(positions):
            if image not in found:
                name = name_of(images, place, image)
                true = images.spec.classes[int(images.labels[place])]
                found[image] = Mistake(image=image, name=name, true=true, pixels=images.pixels(slice(place, place + 1))[0])
            found[image].tested += 1
            if guesses[place] != images.labels[place]:
                found[image].guesses.append(images.spec.classes[guesses[place]])
                found[image].confidence.append(float(probabilities[place, guesses[place]]))
    return [found[image] for image in sorted(found)]


def table(wrong: Sequence[Mistake]) -> str:
    """Return a table of mistakes as text for the terminal, with one line for each image."""
    lines = [("image", "class", "predicted", "wrong", "confidence")]
    lines += [(m.name, m.true, m.guess, f"{len(m.guesses)} of {m.tested}", f"{100 * m.surety:.1f}%") for m in wrong]
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)


def draw(wrong: Sequence[Mistake], path: Path) -> str:
    """Draw the images of some mistakes, save the figure as a PNG file at `path`, and return a line of text with the path. The
    title of an image is its class, the predicted class, and how often it was wrong.
    """
    import torch

    from smallvit.explain import gallery

    titles = [f"{m.true[:20]}\n→ {m.guess[:18]}\n{len(m.guesses)} of {m.tested} wrong" for m in wrong]
    try:
        figure = gallery(torch.stack([m.pixels for m in wrong]), titles, columns=5)
        write_atomic(path, lambda new: figure.savefig(new, format="png", dpi=150))
    except ValueError as error:
        return f"the images cannot be drawn: {error}"
    return f"drawn in {path}"
