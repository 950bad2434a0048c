"""The HTML page of `smallvit advise`: the answer first, then the evidence."""

import base64
import io
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smallvit.ablation import ArmRun
from smallvit.record import Record
from smallvit.report.class_figures import confusion_matrices
from smallvit.report.drawing import DARK, LIGHT
from smallvit.report.figures import forest
from smallvit.report.page import page_template, predict_command, reported, run_command
from smallvit.report.units import score_in, score_of
from smallvit.storage import write_text
from smallvit.verdicts.compare import compare
from smallvit.verdicts.comparison import Comparison, Row
from smallvit.words import unit, units

from ..predictions import name_of, predictions_of
from .answer import answer, any_learned, goodness, interval, main_rows, model_to_keep, names_of, number
from .doubts import doubts, weak_class
from .learning_curve import images_or_technique, learning_curve
from .options import Group, Option
from .plan import SCREENING, WANTED_PASSES, Plan
from .recipes import ADVICE, CNN, FINE_TUNED, PLAIN

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SHOWN = 12  # images that are drawn
SIDE = 96  # pixels of a drawn image


@dataclass(frozen=True)
class Judged:
    """The predictions of all models of one arm (variant) for the images on which they were tested.

    names          the file name of each image
    labels         the class of each image, as a number
    classes        the names of the classes
    probabilities  the class probabilities, shape (models, images, classes); NaN for images on which a model was not tested
    pixels         the pixels of each image, shape (channels, height, width), from 0 to 1
    """

    names: list[str]
    labels: "np.ndarray"
    classes: tuple[str, ...]
    probabilities: "np.ndarray"
    pixels: list["Tensor"]


def judged_images(entries: Sequence[ArmRun], out: Path, recipe: str) -> Judged:
    """Return the predictions of finished runs for their test images. `entries` are the runs of one arm (variant), `out` is the
    folder of all results, and `recipe` is the name of the recipe.
    """
    import numpy as np

    found: dict[int, int] = {}  # position of an image -> its row
    names, labels, pixels, rows = [], [], [], []
    classes: tuple[str, ...] = ()
    for images, positions, probabilities in predictions_of(entries, out, recipe):
        classes = images.spec.classes
        for place, position in enumerate(positions):
            if position not in found:
                found[position] = len(found)
                names.append(name_of(images, place, position))
                labels.append(int(images.labels[place]))
                pixels.append(images.pixels(slice(place, place + 1))[0])
        rows.append(([found[position] for position in positions], np.asarray(probabilities)))
    table = np.full((len(rows), len(found), len(classes)), np.nan)
    for model, (places, values) in enumerate(rows):
        table[model, places] = values
    return Judged(names, np.array(labels), classes, table, pixels)


def write_page(
    path: Path, plan: Plan, groups: Sequence[Group], chosen: Sequence[Option], runs: Sequence[ArmRun], records: Sequence[Record]
) -> list[str]:
    """Write the page to `path`, and return the sentences of the answer as a list.

    plan            the plan, with the scores of all trials
    groups, chosen  the groups that were tried, and the chosen options
    runs, records   the runs of the recipe that tests the chosen ViT, and their results
    """
    from markupsafe import Markup

    comparison = compare(records)
    best = model_to_keep(comparison)
    entries = [entry for entry in runs if entry.arm == best and entry.labels is None]
    judged = judged_images(entries, path.parent / "runs", "recipe")
    sentences = [*short_training(plan, path.parent), *answer(comparison, chosen, records)]
    labels = judged.labels.tolist()
    found = doubts(judged.probabilities, labels, classes=judged.classes, names=judged.names, shown=SHOWN)
    with_all = replace(comparison, rows=tuple(row for row in comparison.rows if row.labels is None))
    own = [record for record in reported(records) if record.arm == best and record.labels is None]
    score = score_in(comparison)
    groups_of_images = len({group for record in own for group in record.test_groups or ()}) if plan.group_by else 0
    what_helps = what_would_help(comparison, judged, own, training_images(entries[0]), bool(plan.group_by))
    page = {
        "title": f"Advice for {Path(plan.folder).name}",
        "light": LIGHT,
        "dark": DARK,
        "sentences": sentences,
        "learned": any_learned(records),
        "means": "; ".join(f"{option.name}: {option.means}" for option in chosen if option.means),
        "score": score.capital + score.unit,
        "rows": [row_of(row, chosen) for row in main_rows(comparison).values()],
        "judged": division(plan, len(judged.names), groups_of_images),
        "unit": unit(plan.folds),
        "forest": Markup(forest(with_all)),
        "confusion": Markup(confusion_matrices(with_all, own)),
        "trials": trial_tables(plan, groups),
        "commands": commands(path.parent),
        "others": other_models(with_all, best, path.parent),
        "kept": kept_text(best, chosen),
        "trained": final_training(plan),
        "help": [*more_time(plan, path.parent), *what_helps],
        "doubted": [(picture(judged.pixels[doubt.image]), doubt) for doubt in found.images],
        "doubts": found.wrong.text,
        "division": division_of_trials(plan, own_val=entries[0].run.data().val is not None),
        "deeper": deeper(path.parent),
    }
    write_text(path, page_template("smallvit.commands.advise", "page.html").render(page))
    return sentences


def row_of(row: Row, chosen: Sequence[Option]) -> dict[str, str]:
    """Return the texts of one row of the table of models. `row` holds the results of an arm (variant), and `chosen` are the
    options that were best in the trials.
    """
    score = score_of(row)
    no_difference = dict.fromkeys(("inconclusive", "not enough seeds", "no verdict"), "no difference from {} was shown")
    verdict = {"better": "better than {}", "worse": "worse than {}"} | no_difference
    text = verdict.get(row.verdict or "", "").format(row.baseline)
    reason = f" ({row.reason})" * bool(row.reason and text)
    params, macs = row.budget.get("params"), row.budget.get("macs")
    return {
        "name": f"{ADVICE}: a ViT with {names_of(chosen)}" if row.arm == ADVICE else row.arm,
        "value": "–" if row.mean is None else number(row.mean, score.percent),
        "interval": interval(*row.new_images, score.percent) if row.new_images else "–",
        "params": f"{params:,.0f}" if params else "–",
        "macs": f"{macs / 1e6:,.2f} M" if macs else "–",
        "verdict": text + reason,
    }


def division(plan: Plan, images: int, groups: int = 0) -> str:
    """Return sentences that say on which images the models were tested. `images` is their number, and `groups` is the number
    of groups, such as patients, to which they belong.
    """
    spread = (
        "With 95% confidence, the interval contains the mean score on many new images of the same kind. It is about models "
        "that are trained in the same way. "
    ) + independence(groups)
    if plan.folds:
        return (
            f"Means over {plan.passes} passes, on {images:,} test images that no trial has used. {spread} "
            f"A pass divides these images into {plan.folds} parts, and tests each part with a model that was trained for "
            f"{plan.final_steps:,} steps on all other images, also on those of the trials."
        )
    return (
        f"Means over {plan.passes} seeds, on the {images:,} test images, which no trial has used, after "
        f"{plan.final_steps:,} training steps. {spread}"
    )


def independence(groups: int) -> str:
    """Return a sentence that says which images were kept together, such as those of one patient, or what to do if some should
    have been. `groups` is the number of groups to which the test images belong.
    """
    if groups:
        return (
            f"These images belong to {groups:,} groups, such as patients. Images of one group were never both in training and "
            "in the test, and a group counts as one image for the intervals."
        )
    return (
        "All images were taken to be independent. If several images show the same thing, such as one patient or one plant, the "
        "scores are too high: start again with --group-by."
    )


def final_training(plan: Plan) -> str:
    """Return sentences that say on which images the model that is given to the user was trained."""
    if plan.share:
        return (
            "It was trained like the models of the test, but on all images, so no images are left to test it. The scores above "
            "are those of models that were not trained on their test images."
        )
    return "Like the models that were tested, it was trained on the images in train/, so the scores above also apply to it."


def division_of_trials(plan: Plan, own_val: bool) -> str:
    """Return sentences that say how the options were tried. `own_val` says that the folder has validation images."""
    part = f"{1 - (plan.share or 0):.0%} of the images" if plan.folds else "the training images"
    number = "about " * bool(plan.group_by) + f"{plan.val:,}"  # groups stay together
    val = f"{plan.val:,} images in val/ were" if own_val else f"{number} of these images, drawn anew for each seed, were"
    return (
        f"Options were tried in sets, one set after another, on {part}, with {plan.steps:,} training steps. In each run, "
        f"{val} validation images. The best option of a set was kept for the following sets. The validation score of the "
        "best option is too high, because it is the best of several trials. So the chosen ViT was tested on other "
        "images. Only options that were trained with the most seeds could be chosen; of equal scores, the first one was. "
        "The plain ViT and the small CNN were not tuned."
    )


def trial_tables(plan: Plan, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the scores of all trials for the page: for each group its name and its options."""
    tables = []
    for group in groups:
        options = [
            {
                "name": name,
                "value": "–" if score is None else f"{100 * score:.1f}",
                "seeds": seeds,
                "chosen": name == plan.chosen[group.name],
            }
            for name, score, seeds in plan.trials.get(group.name, [])
        ]
        if options:
            tables.append({"name": f"{group.name[0].upper()}{group.name[1:]}", "options": options})
    return tables


def commands(out: Path) -> list[str]:
    """Return the commands that use the model in the folder `out`."""
    model = shlex.quote(str(out / "model"))
    return [
        f"smallvit predict {model} IMAGES -o predictions.csv",
        f"smallvit export {model} {shlex.quote(str(out / 'model.onnx'))}",
    ]


def other_models(comparison: Comparison, kept: str, out: Path) -> list[tuple[str, str]]:
    """Return a sentence and a command for each model with a better mean than the one that is given to the user: how to predict
    with the models of the test. `comparison` holds the results with all images, `kept` is the name of the arm (variant) of the
    model that is given to the user, and `out` is the folder with the advice.
    """
    rows = main_rows(comparison)
    better = [arm for arm in (CNN, FINE_TUNED) if arm in rows and goodness(rows[arm]) > goodness(rows[kept])]
    return [
        (
            f"“{arm}” has a better mean in the table, but was not shown to be better, and a ViT is kept unless another model "
            "is. If you prefer it, this command predicts with the mean of all its models that were tested:",
            predict_command(out / "recipe.py", arm, out / "runs"),
        )
        for arm in better
    ]


def deeper(out: Path) -> list[str]:
    """Return sentences that list the files with the evidence in the folder `out`."""
    return [
        "`recipe.py`: the comparison above as a recipe. You can change it and run it with "
        f"`{run_command(out / 'recipe.py', out / 'runs')}`.",
        "`runs/recipe/report.html`: the full report of this comparison, with all tables and figures.",
        "`trials_*.py`: the trials as recipes. `plan.json`: every decision.",
    ]


def kept_text(arm: str, chosen: Sequence[Option]) -> str:
    """Return a description of the model that is given to the user, such as `a ViT with flips + shifts`. `arm` is the name of
    the arm (variant).
    """
    if arm != ADVICE:
        return f"a {arm}"
    return f"a ViT with {names_of(chosen)}"


def more_time(plan: Plan, out: Path) -> list[str]:
    """Return a list with the advice to use more time, if there were too few passes or seeds for a precise verdict; otherwise an
    empty list. `out` is the folder with the advice.
    """
    if plan.passes >= WANTED_PASSES:
        return []
    return [
        f"More time: there was time for {plan.passes} {units(plan.folds)}; {WANTED_PASSES} would give narrower intervals. "
        f"Training is then longer, too, which often gives a better model. Use the same command with {longer(plan, out)}."
    ]


def short_training(plan: Plan, out: Path) -> list[str]:
    """Return a list with a text that says that the test and the model had fewer training steps than the trials, and why;
    otherwise an empty list. `out` is the folder with the advice.
    """
    if not plan.final_steps < plan.steps:
        return []
    brief = "A model that was trained so briefly is of little use"
    use = brief if plan.final_steps < plan.steps / 2 else "More steps would probably give a better model"
    return [
        f"The test and the model had {plan.final_steps:,} training steps in place of the {plan.steps:,} of the trials, because "
        f"{plan.judging_from / 60:.1f} of the {plan.minutes:g} minutes had passed when the trials ended. {use}: use the same "
        f"command with {longer(plan, out)}."
    ]


def longer(plan: Plan, out: Path) -> str:
    """Return the options that give the command enough time, as text: for six passes, and for trials that end in their share of
    the time if they left too little for the test. `out` is the folder with the advice.
    """
    minutes = plan.minutes * WANTED_PASSES / plan.passes
    if plan.final_steps < plan.steps:
        minutes = max(minutes, plan.judging_from / 60 / SCREENING)
    rounded = 5 * math.ceil(minutes / 5)
    return f"--minutes {rounded} and another folder for the result, such as --into {shlex.quote(f'{out}-{rounded}')}"


def what_would_help(
    comparison: Comparison, judged: Judged, own: Sequence[Record], training: int, grouped: bool
) -> list[str]:
    """Return sentences about what would improve the model: more images, and images of which class. `comparison` holds the
    results, `judged` the predictions of the model that is given to the user, and `own` the records of its runs. `training` is
    the number of training images of a run. If the images are `grouped`, for example by patients, nothing is said about classes,
    because a few difficult groups can make a class look weak.
    """
    lines = []
    best = ADVICE if ADVICE in comparison.arms else PLAIN  # with fewer images only this arm was trained
    rows = [row for row in comparison.rows if row.arm == best and row.values]
    passes = min(len(row.values) for row in rows)
    if len(rows) > 1 and passes > 1 and score_of(rows[0]).percent:
        measured = {row.labels or training: row.values[:passes] for row in rows}
        curve = learning_curve(measured, test_images=independent_images(judged, own), folds=bool(rows[0].folds), now=training)
        each = ", ".join(f"{100 * (1 - curve.measured[n].mean):.1f}% with {n:,}" for n in measured if n != training)
        last = f"{100 * (1 - curve.measured[training].mean):.1f}% with {training:,} images"
        lines.append(f"{curve.text} Measured: {each}, and {last}.")
        technique = main_rows(comparison).get(ADVICE)
        if technique and technique.difference:
            d = technique.difference
            lines.append(images_or_technique(curve, "the chosen technique", d.mean, d.low, d.high).text)
    else:
        new = ", above all those of new groups (such as patients)" if grouped else ""
        lines.append(f"More labelled images probably help{new}. By how much was not measured, because this takes more time.")
    if grouped:
        return lines
    return [*lines, weak_class(judged.probabilities, judged.labels.tolist(), classes=judged.classes).text]


def independent_images(judged: Judged, own: Sequence[Record]) -> int:
    """Return how many independent test images tell as much about the score as those that were used. `judged` has the
    predictions of a model, and `own` the records of its runs. Images of one group, such as a patient, count as one image. For
    the balanced accuracy, the few images of a small class weigh as much as the many of a large one.
    """
    images, first = len(judged.names), min(record.seed // (record.folds or 1) for record in own)
    of_pass = [record for record in own if record.seed // (record.folds or 1) == first]
    share = 1.0
    if sizes := Counter(group for record in of_pass for group in record.test_groups or ()).values():
        share *= sum(sizes) / sum(n**2 for n in sizes)
    if own[0].score == "balanced_accuracy":
        counts = [n for n in Counter(judged.labels.tolist()).values() if n]
        share *= len(counts) ** 2 / sum(1 / n for n in counts) / images
    return max(2, round(share * images))


def training_images(entry: ArmRun) -> int:
    """Return the number of training images of a run."""
    data = entry.run.data().at_seed(entry.run.seed)
    return len(data.subset(labels=entry.run.labels, val=entry.run.val, seed=entry.run.seed).train)


def picture(pixels: "Tensor") -> str:
    """Return an image (channels, height, width), with pixels from 0 to 1, as a data URL of a PNG image for HTML."""
    from PIL import Image

    values = (255 * pixels.clamp(0, 1)).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)
    factor = max(1, SIDE // max(image.size))
    buffer = io.BytesIO()
    image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
