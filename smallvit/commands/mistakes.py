"""smallvit report R --mistakes ARM: the test images that an arm gets wrong most often and most surely, over all seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from smallvit.ablation import ArmRun
from smallvit.record import Record
from smallvit.storage import write_atomic
from smallvit.verdicts.comparison import Comparison
from smallvit.words import how_many

from .predictions import file_beside_report, name_of, predictions_of, tested_runs

if TYPE_CHECKING:
    from torch import Tensor

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
    all seeds. Also draw them and save the drawing as a PNG file beside the report. The trained models predict the classes of
    the test images again. The parameters and the errors are those of `tested_runs`.
    """
    condition, entries = tested_runs(arm, runs, records, comparison, out, recipe, command)
    found = find_mistakes(entries, out, recipe)
    wrong = sorted((m for m in found if m.guesses), key=lambda m: (-len(m.guesses) / m.tested, -m.surety, m.image))
    title = f"Mistakes of {arm} at {condition.title}: {len(wrong):,} of {len(found):,} test images are wrong in at least one of"
    lines = [f"{title} {how_many(len(entries), 'run')}{each_tested_by(found, len(entries))}"]
    if wrong:
        path = file_beside_report("mistakes", arm, runs, out, recipe).with_suffix(".png")
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


def find_mistakes(entries: Sequence[ArmRun], out: Path, recipe: str) -> list[Mistake]:
    """Return the predictions for each test image, in the order of the test set, as a list. `entries` are the runs of one arm
    (variant), `out` is the folder of all results, and `recipe` is the name of the recipe.
    """
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

    titles = [f"{m.true}\n→ {m.guess}\n{len(m.guesses)} of {m.tested} wrong" for m in wrong]
    try:
        figure = gallery(torch.stack([m.pixels for m in wrong]), titles, columns=5)
        write_atomic(path, lambda new: figure.savefig(new, format="png", dpi=150))
    except ValueError as error:
        return f"the images cannot be drawn: {error}"
    return f"drawn in {path}"
