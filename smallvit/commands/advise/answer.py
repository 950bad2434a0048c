"""The answer of `smallvit advise` in a few sentences, from the records of the models that were tested."""

from collections.abc import Sequence

from smallvit.record import Record
from smallvit.report.alarms import nothing_learned
from smallvit.report.answer import cost_ratio
from smallvit.report.units import score_of
from smallvit.verdicts.comparison import Comparison, Row

from .options import Option
from .recipes import ADVICE, CNN, FINE_TUNED, FROZEN, PLAIN


def main_rows(comparison: Comparison) -> dict[str, Row]:
    """Return the results of each arm (variant) that was trained with all images, by the name of the arm."""
    return {row.arm: row for row in comparison.rows if row.labels is None}


def model_to_keep(comparison: Comparison) -> str:
    """Return the name of the arm (variant) whose model is given to the user. By default this is the ViT with the chosen
    options, or the plain ViT if the chosen options were shown to be worse. If the small CNN or the fine-tuned ViT-S from
    ImageNet was shown to be better than this ViT, it is the better one of these, by its mean.
    """
    rows = main_rows(comparison)
    vit = rows[PLAIN] if ADVICE not in rows or rows[ADVICE].verdict == "worse" else rows[ADVICE]
    others = [rows[arm] for arm in (CNN, FINE_TUNED) if arm in rows and rows[arm].verdict == "better"]
    return max([vit, *others], key=lambda row: row.mean or 0).arm


NOTHING_LEARNED = (
    "No model was shown to be better than guessing, so do not rely on what follows: give the command more time (--minutes) or "
    "more images."
)


def answer(comparison: Comparison, chosen: Sequence[Option], records: Sequence[Record] = ()) -> list[str]:
    """Return the answer as a list of sentences: which model and which technique to use, and how they compare with a small CNN
    and a ViT-S from ImageNet. `comparison` holds the results of the runs in `records`, and `chosen` are the options that were
    best in the trials. If no model was shown to be better than guessing, the first sentence says so.
    """
    rows = main_rows(comparison)
    best = rows.get(ADVICE, rows[PLAIN])
    kept = model_to_keep(comparison)
    if kept in OTHERS:
        sentences = [better_model(rows[kept], best), technique(rows, chosen, "If you want a small ViT, use")]
    else:
        sentences = [technique(rows, chosen)]
    sentences += [compared(rows[arm], best) for arm in OTHERS if arm in rows and arm != kept]
    all_labels = [record for record in records if record.labels is None]
    return [*[NOTHING_LEARNED] * bool(nothing_learned(all_labels)), *sentences, *raw_pixels(rows, best)]


def technique(rows: dict[str, Row], chosen: Sequence[Option], use: str = "Use") -> str:
    """Return a sentence that says which technique to use. `use` is the first word or words of this sentence."""
    plain, advice = rows[PLAIN], rows.get(ADVICE)
    if advice is None:
        tested = "on images that no trial has used"
        return f"{use} the plain ViT: no option was better in the trials. It reaches {value(plain)} {tested}."
    names = join([option.name for option in chosen])
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
    CNN: "small CNN with the same augmentation",
    FINE_TUNED: "ViT-S with weights from ImageNet, fine-tuned on these images,",
    FROZEN: "logistic regression on the features of a ViT-S from ImageNet",
}


def better_model(row: Row, best: Row) -> str:
    """Return a sentence that recommends another model than the small ViT, because it was shown to be better."""
    ratio = cost_ratio(row, best)
    cost = f", with {ratio} times its multiply-adds" * bool(ratio)
    reaches = f"{value(row)} on images that no trial has used"
    return f"Use a {OTHERS[row.arm].rstrip(',')}: it reaches {reaches}, {gap(row, 'the small ViT')}{cost}."


def compared(row: Row, best: Row) -> str:
    """Return a sentence that compares another model with the recommended small ViT."""
    ratio = cost_ratio(row, best)
    cost = f" with {ratio} times the multiply-adds" * bool(ratio)
    difference, name = gap(row, "this ViT"), f"A {OTHERS[row.arm]}"
    if row.verdict == "inconclusive":
        return f"{name} reaches {value(row)}{cost}; no difference was shown: it is {difference}."
    return f"{name} reaches {value(row)}{cost}, {difference}."


def raw_pixels(rows: dict[str, Row], best: Row) -> list[str]:
    """Return a list with a warning if a classifier on raw pixels is at least as good as the recommended ViT; otherwise an empty
    list.
    """
    sign = -1 if best.lower_is_better else 1
    found = [row for row in rows.values() if row.role == "reference" and row.mean is not None and best.mean is not None]
    above = [row for row in found if sign * (row.mean or 0) >= sign * (best.mean or 0)]
    if not above:
        return []
    top = max(above, key=lambda row: sign * (row.mean or 0))
    name = top.arm.removeprefix("pixels, ")
    return [f"Even {name} on raw pixels reaches {value(top)}: the images are too few, or the training is too short, for a ViT."]


def value(row: Row) -> str:
    """Return the mean score of an arm (variant) as text, such as `93.1% accuracy`."""
    score = score_of(row)
    if row.mean is None:
        return "no score"
    return f"{100 * row.mean:.1f}% {score.title}" if score.percent else f"a {score.title} of {row.mean:.3f}"


def gap(row: Row, control: str) -> str:
    """Return the difference between an arm (variant) and its control as text with its interval, such as
    `4.2 points above the plain ViT (95% interval: 2.1 to 6.3)`. `control` is the name of the control in this text.
    """
    d, score = row.difference, score_of(row)
    if d is None:
        return f"an unknown difference from {control}"

    def number(x: float) -> str:
        return (f"{100 * x:.1f}" if score.percent else f"{x:.3f}").replace("-", "−")

    interval = "" if d.low is None or d.high is None else f" (95% interval: {number(d.low)} to {number(d.high)})"
    return f"{number(abs(d.mean))}{score.points} {'above' if d.mean >= 0 else 'below'} {control}{interval}"


def join(names: Sequence[str]) -> str:
    """Return names as text, such as `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
