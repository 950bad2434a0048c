"""The answer of `smallvit advise` in a few sentences, from the records of the models that were tested."""

import math
from collections.abc import Sequence

from smallvit.record import Record
from smallvit.report.alarms import guesses, level_of, nothing_learned
from smallvit.report.answer import cost_ratio
from smallvit.report.units import score_of
from smallvit.verdicts.comparison import Comparison, Row
from smallvit.words import join_names

from .options import Option
from .recipes import ADVICE, CNN, FINE_TUNED, FROZEN, PLAIN


def main_rows(comparison: Comparison) -> dict[str, Row]:
    """Return the results of each arm (variant) that was trained with all images, by the name of the arm."""
    return {row.arm: row for row in comparison.rows if row.labels is None}


def names_of(chosen: Sequence[Option]) -> str:
    """Return the names of options as text, such as `flips + shifts, convolutional stem and wide`."""
    return join_names([option.name for option in chosen], len(chosen))


def recommended_vit(rows: dict[str, Row]) -> Row:
    """Return the results of the small ViT to use: the ViT with the chosen options, or the plain ViT if there are none, or if
    they were shown to be worse. `rows` are the results of each arm (variant).
    """
    return rows[PLAIN] if ADVICE not in rows or rows[ADVICE].verdict == "worse" else rows[ADVICE]


def model_to_keep(comparison: Comparison) -> str:
    """Return the name of the arm (variant) whose model is given to the user. By default this is the recommended small ViT. If
    the small CNN or the fine-tuned ViT-S from ImageNet was shown to be better than the ViT that it is compared with, it is the
    one of these models with the highest mean.
    """
    rows = main_rows(comparison)
    vit = recommended_vit(rows)
    others = [rows[arm] for arm in (CNN, FINE_TUNED) if arm in rows and rows[arm].verdict == "better"]
    return max([vit, *others], key=goodness).arm


NOTHING_LEARNED = "No model was shown to be better than guessing{}, so do not use these models."
WHAT_TO_TRY = (
    "Give the command more time (--minutes), or more images. If this does not help, check the labels, and whether a person can "
    "see the classes in images of this size."
)


def answer(comparison: Comparison, chosen: Sequence[Option], records: Sequence[Record] = ()) -> list[str]:
    """Return the answer as a list of sentences: which model and which technique to use, and how they compare with a small CNN
    and a ViT-S from ImageNet. `comparison` holds the results of the runs in `records`, and `chosen` are the options that were
    best in the trials. If no model was shown to be better than guessing, the answer says only this, who has the highest mean,
    and what to try.
    """
    rows = main_rows(comparison)
    if not any_learned(records):
        found = guesses(with_all_labels(records)).values()
        reached = highest_mean(rows, chosen, max(guess.chance for guess in found))
        return [NOTHING_LEARNED.format(level_of(found, digits=1)), reached, WHAT_TO_TRY]
    control = rows.get(ADVICE, rows[PLAIN])  # the ViT with which the other models are compared
    kept = model_to_keep(comparison)
    other = "" if recommended_vit(rows) is control else f"the ViT with {names_of(chosen)}"
    if kept in OTHERS:
        first = better_model(rows[kept], control, other or "the small ViT")
        sentences = [first, technique(rows, chosen, "If you want a small ViT, use")]
    else:
        sentences = [technique(rows, chosen)]
    sentences += [compared(rows[arm], control, other or "this ViT") for arm in OTHERS if arm in rows and arm != kept]
    return [*sentences, *raw_pixels(rows, rows[kept])]


def highest_mean(rows: dict[str, Row], chosen: Sequence[Option], chance: float) -> str:
    """Return sentences that say which model or reference has the highest mean, and why it does not count, if no model was shown
    to be better than guessing. `rows` are the results of each arm (variant), `chosen` are the options that were best in the
    trials, and `chance` is the score of guesses.
    """
    best, model = (max(found, key=goodness) for found in (rows.values(), [r for r in rows.values() if r.role != "reference"]))
    arm = f"the ViT with {names_of(chosen)}" if model.arm == ADVICE else f"the {model.arm}"
    text = f"The highest mean is {value(best)}, on images that no trial has used, by "
    if best is model:
        return f"{text}{arm}: not enough above guessing to exclude chance, because the score of guesses varies, too."
    above = (
        " Its interval lies above guessing, so these images show something of the classes, but they are too few, or the "
        "training is too short, for the models."
    ) * bool(best.new_images and best.new_images[0] > chance)
    return (
        f"{text}the reference “{best.arm}”. A reference is a simple classifier for orientation: it is not compared with "
        f"guessing, and the command does not keep it.{above} Of the models, {arm} has the highest mean, {value(model)}."
    )


def any_learned(records: Sequence[Record]) -> bool:
    """Return whether some model was shown to be better than guessing, or whether this is unknown. `records` are the results of
    the runs; only those with all images count.
    """
    return not nothing_learned(with_all_labels(records))


def with_all_labels(records: Sequence[Record]) -> list[Record]:
    """Return the records of the runs that were trained with all images, without those of the learning curve."""
    return [record for record in records if record.labels is None]


def goodness(row: Row) -> float:
    """Return the mean score of an arm (variant), with its sign changed if a lower score is better. Without a score it is minus
    infinity.
    """
    if row.mean is None:
        return -math.inf
    return -row.mean if row.lower_is_better else row.mean


def technique(rows: dict[str, Row], chosen: Sequence[Option], use: str = "Use") -> str:
    """Return a sentence that says which technique to use. `use` is the first word or words of this sentence."""
    plain, advice = rows[PLAIN], rows.get(ADVICE)
    if advice is None:
        tested = "on images that no trial has used"
        return f"{use} the plain ViT: no option was better in the trials. It reaches {value(plain)} {tested}."
    names = names_of(chosen)
    reaches = f"{value(advice)} on images that no trial has used"
    if advice.verdict == "better":
        return f"{use} a ViT with {names}: it reaches {reaches}, {gap(advice, 'the plain ViT')}."
    if advice.verdict == "worse":
        return (
            f"{use} the plain ViT, which reaches {value(plain)}: the options that were best in the trials ({names}) reach "
            f"{reaches}, {gap(advice, 'the plain ViT')}."
        )
    return (
        f"A ViT with {names} was best in the trials and reaches {reaches}, but it was not shown to be better than the plain "
        f"ViT, which reaches {value(plain)}: it is {gap(advice, 'the plain ViT')}."
    )


# the other models besides the small ViT, as the answer calls them
OTHERS = {
    CNN: "small CNN, trained in the same way,",
    FINE_TUNED: "ViT-S with weights from ImageNet, fine-tuned on these images,",
    FROZEN: "logistic regression on the features of a ViT-S from ImageNet",
}


def better_model(row: Row, control: Row, name: str) -> str:
    """Return a sentence that recommends another model than the small ViT, because it was shown to be better than `control`, a
    small ViT with this `name`.
    """
    ratio = cost_ratio(row, control)
    cost = f", with {ratio} times its multiply-adds" * bool(ratio)
    reaches = f"{value(row)} on images that no trial has used"
    return f"Use a {OTHERS[row.arm].rstrip(',')}: it reaches {reaches}, {gap(row, name)}{cost}."


def compared(row: Row, control: Row, name: str) -> str:
    """Return a sentence that compares another model with `control`, a small ViT with this `name`."""
    ratio = cost_ratio(row, control)
    cost = f" with {ratio} times the multiply-adds" * bool(ratio)
    reaches, difference = f"A {OTHERS[row.arm]} reaches {value(row)}{cost}", gap(row, name)
    if row.verdict not in ("better", "worse"):
        return f"{reaches}; no difference was shown: it is {difference}."
    return f"{reaches}, {difference}."


def raw_pixels(rows: dict[str, Row], best: Row) -> list[str]:
    """Return a list with a warning if a classifier on raw pixels is at least as good as the recommended model; otherwise an
    empty list. `best` are the results of the recommended model.
    """
    found = [row for row in rows.values() if row.role == "reference" and row.mean is not None and best.mean is not None]
    above = [row for row in found if goodness(row) >= goodness(best)]
    if not above:
        return []
    top = max(above, key=goodness)
    name = top.arm.removeprefix("pixels, ")
    return [f"Even {name} on raw pixels reaches {value(top)}: the images are too few, or the training is too short, for a ViT."]


def value(row: Row) -> str:
    """Return the mean score of an arm (variant) as text with its interval for new images, such as
    `93.1% accuracy (95% interval: 90.9 to 95.3)`.
    """
    score = score_of(row)
    if row.mean is None:
        return "no score"
    mean = number(row.mean, score.percent)
    text = f"{mean}% {score.title}" if score.percent else f"a {score.title} of {mean}"
    return text + (f" (95% interval: {interval(*row.new_images, score.percent)})" if row.new_images else "")


def number(x: float, percent: bool) -> str:
    """Return a score or a difference as text: `93.1` if it is shown in percent, otherwise `0.931`."""
    return (f"{100 * x:.1f}" if percent else f"{x:.3f}").replace("-", "−")


def interval(low: float, high: float, percent: bool) -> str:
    """Return an interval from `low` to `high` as text, such as `90.9 to 95.3` if it is shown in percent."""
    return f"{number(low, percent)} to {number(high, percent)}"


def gap(row: Row, control: str) -> str:
    """Return the difference between an arm (variant) and its control as text with its interval, such as
    `4.2 points above the plain ViT (95% interval: 2.1 to 6.3)`. `control` is the name of the control in this text.
    """
    d, score = row.difference, score_of(row)
    if d is None:
        return f"an unknown difference from {control}"
    bounds = "" if d.low is None or d.high is None else f" (95% interval: {interval(d.low, d.high, score.percent)})"
    return f"{number(abs(d.mean), score.percent)}{score.points} {'above' if d.mean >= 0 else 'below'} {control}{bounds}"
