"""Alarms of a report: arms that were probably trained too briefly, that only guess, or that lose to a simpler model."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from smallvit.record import RANDOM, Record, format_labels, settings_of
from smallvit.verdicts.compare import chain_of
from smallvit.verdicts.comparison import Condition, condition_of, main_of_groups
from smallvit.verdicts.folds import pooled
from smallvit.verdicts.score import ACCURACIES, ACCURACY, Score, score_named
from smallvit.verdicts.single_folds import FoldVariance
from smallvit.verdicts.statistics import FOLDS_FACTOR, MIN_PAIRS, TIE, spread
from smallvit.words import join_names, units

from .settings import option_name, options_at_edge

PIXELS = "smallvit.references.Pixels"  # the model of the references that classify raw pixels
RISE = 0.003  # of the validation accuracy over the last quarter of training; less than 0.3 points is no alarm
FALL, MEMORIZED = 0.02, 0.01  # of the training loss: smallest relative fall, and a loss from which nothing is left to learn
LONGER = "Try more steps, such as --scale-steps 4"


def main_cells(records: Sequence[Record]) -> dict[tuple[Condition, str], list[Record]]:
    """Return the finished runs of baselines and techniques under the main conditions, which are those of `Comparison.main`: the
    longest training, because a shorter one is short on purpose, and tuned settings if the recipe has any. Settings and lengths
    without a result do not count. The result is a dict from (condition, arm) to a list of records (results of a run). An arm is
    a variant in the comparison; a condition is a number of labels, a training length, and tuned or not. `records` are the
    results of all runs, also of those without results.
    """
    shown, group = [r for r in records if r.role in ("baseline", "technique")], baseline_of_arms(records)
    done = {(r.arm, condition_of(r)) for r in pooled(shown) if r.finished}  # as in `Comparison.main`: of folds, whole passes
    found = [(group[r.arm], condition_of(r), (r.arm, condition_of(r)) in done) for r in shown]
    main = main_of_groups(found)
    cells: dict[tuple[Condition, str], list[Record]] = {}
    for r in shown:
        if r.finished and condition_of(r) in main[group[r.arm]]:
            cells.setdefault((condition_of(r), r.arm), []).append(r)
    return cells


def baseline_of_arms(records: Sequence[Record]) -> dict[str, str]:
    """Return a dict from each arm (variant) and reference to the baseline at the end of its chain of controls. `records` are
    the results of all runs, or of those that have started: a control without any run ends the chain.
    """
    shown = [r for r in records if r.role != "dependency"]
    baselines = {r.arm for r in shown if r.role == "baseline"}
    default = next(iter(baselines)) if len(baselines) == 1 else ""
    controls = {r.arm: r.baseline or default for r in shown if r.role != "baseline"}
    return {arm: chain_of(arm, controls)[-1] for arm in dict.fromkeys(r.arm for r in shown)}


def named(cells: Iterable[tuple[Condition, str]], among: Iterable[tuple[Condition, str]]) -> str:
    """Return the names of some arms (variants) with their numbers of labels as text: `“A” and “B” at 100 labels; all 4 arms at
    1,000 labels`. `cells` are the pairs (condition, arm) to name. `among` are the pairs of all arms, from which the text `all 4
    arms` follows. The number of labels is left out if there is only one.
    """
    found: dict[Condition, list[str]] = {}
    for condition, arm in cells:
        found.setdefault(condition, []).append(arm)
    total = Counter(condition for condition, _ in among)
    names = {
        condition: f"all {len(arms)} arms" if len(arms) == total[condition] > 2 else join_names([f"“{arm}”" for arm in arms])
        for condition, arms in found.items()
    }
    several = len({condition.labels for condition in total}) > 1
    return "; ".join(text + f" at {format_labels(condition.labels)}" * several for condition, text in names.items())


def undertrained(records: Sequence[Record]) -> list[str]:
    """Return a warning if some arms (variants in the comparison) were probably trained too briefly. `records` are the results
    of the runs.

    This is the case if both hold for the last quarter of the training steps. The validation accuracy rose by at least 0.3
    points on average over the seeds, and by more than twice the standard error of this mean. The training loss fell by at least
    2%, and it is not yet below 0.01. A cosine schedule raises the accuracy at the end of any training, but only a little once
    the model has learned what it can.
    """
    cells = main_cells(records)
    rises = {cell: rise for cell, runs in cells.items() if (rise := late_rise(runs)) is not None}
    if not rises:
        return []
    extent = " to ".join(dict.fromkeys(f"{100 * rise:.1f}" for rise in (min(rises.values()), max(rises.values()))))
    return [
        f"Probably not trained long enough: {named(rises, cells)}. Over the last quarter of the steps, the validation "
        f"accuracy still rose by {extent} points, and the training loss still fell. {LONGER}"
    ]


def length_not_checked(records: Sequence[Record]) -> list[str]:
    """Return a sentence that says that it was not checked whether the arms (variants) were trained long enough, because there
    are no validation images, as a list. The list is empty if it was checked. `records` are the results of the runs.
    """
    trained = [r for runs in main_cells(records).values() for r in runs if r.curve and r.run.get("objective") and r.steps]
    if not trained or any(point[2] is not None for r in trained for point in r.curve or ()):
        return []
    text = "Whether the training was long enough is not checked, because there are no validation images"
    return [f"{text}: compare with --scale-steps 4, or set val."]


def late_rise(runs: Sequence[Record]) -> float | None:
    """Return by how much the validation accuracy of an arm (variant) rose over the last quarter of training, as a mean over its
    runs. Return None unless this rise and the falling training loss show that the training was probably too short. `runs` are
    the results of the runs of the arm.

    The rule is that of `undertrained`.
    """
    ends = [(r.curve[-1 - len(r.curve) // 4], r.curve[-1]) for r in runs if r.curve and len(r.curve) >= 4]
    ends = [(before, last) for before, last in ends if None not in (*before, *last)]
    if len(ends) < 2:
        return None
    rises = [last[2] - before[2] for before, last in ends]
    loss_before, loss = (fmean(point[1] for point in points) for points in zip(*ends))
    rise, error = fmean(rises), stdev(rises) / math.sqrt(len(rises))
    falls = MEMORIZED < loss <= (1 - FALL) * loss_before
    return rise if falls and rise >= RISE and rise > 2 * error else None


def below_raw_pixels(records: Sequence[Record]) -> list[str]:
    """Return a warning if some arms (variants in the comparison) are less accurate on average than logistic regression or the
    nearest neighbor on raw pixels, with the same number of labelled images. `records` are the results of the runs.

    Arms without training steps of their own are left out. If the arms and the raw pixels are judged by the same score, such as
    the balanced accuracy, this score is compared; otherwise their accuracies are.
    """
    references = [r for r in records if r.finished and (r.run.get("model") or {}).get("call") == PIXELS]
    cells = {cell: runs for cell, runs in main_cells(records).items() if runs[0].steps}  # an untrained arm cannot train longer
    same = len({r.score for r in (*references, *(r for runs in cells.values() for r in runs))}) == 1

    def mean_of(runs: Sequence[Record]) -> float | None:
        values = [value for r in runs if (value := r.result if same else accuracy_of(r)) is not None]
        return fmean(values) if values else None

    pixels: dict[tuple, dict[str, list[Record]]] = {}  # (data set, labels) -> reference -> its runs
    for r in references:
        pixels.setdefault((r.data_sha256, r.labels), {}).setdefault(r.arm, []).append(r)
    best = {place: max((mean_of(runs) or 0.0 for runs in arms.values()), default=0.0) for place, arms in pixels.items()}
    means = {cell: mean for cell, runs in cells.items() if (mean := mean_of(runs)) is not None}
    lost = [cell for cell, mean in means.items() if mean < best.get((cells[cell][0].data_sha256, cell[0].labels), 0.0) - TIE]
    if not lost:
        return []
    return [
        "Less accurate than a simple classifier of raw pixels (logistic regression or the nearest neighbor): "
        f"{named(lost, cells)}. {LONGER}, or other settings"
    ]


def accuracy_of(record: Record) -> float | None:
    """Return the test accuracy of a run: the number that judges it if this is an accuracy, else the number `accuracy` that was
    measured beside it. None if there is none. `record` holds the results of the run.
    """
    return record.result if ACCURACIES.fullmatch(record.score or "") else (record.test or {}).get("accuracy")


def at_the_edge(records: Sequence[Record]) -> list[str]:
    """Return a list of warnings, one for each tuned option whose best value lies at the edge of its range or of the values that
    were tried, with the names of the arms (variants) for which this holds. `records` are the results of the runs.
    """
    cells = main_cells(records)
    found: dict[str, list[tuple[Condition, str]]] = {}
    for cell, runs in cells.items():
        for option in options_at_edge(runs[0].tuning) if runs[0].tuning else ():
            found.setdefault(option, []).append(cell)
    return [
        f"The best {option_name(option)} lies at the edge of its range, so a better one may lie outside, for "
        f"{named(edge, cells)}. Widen the range and tune again"
        for option, edge in found.items()
    ]


def one_token(records: Sequence[Record]) -> list[str]:
    """Return a warning if the images of some arms (variants in the comparison) become a single patch, because attention between
    patches is then impossible. `records` are the results of the runs.
    """
    arms = list(dict.fromkeys(r.arm for r in records if 1 in (r.patches, r.tokens)))
    return [f"The image is a single patch, so attention has nothing to compare, in: {join_names(arms)}"] if arms else []


class Guess(NamedTuple):
    """The score of an arm (variant) that is not shown to be better than guessing. `score` says how a report writes it, `mean`
    is the mean score over seeds or passes, and `chance` is the score of guesses.
    """

    score: Score
    mean: float
    chance: float


def guesses(records: Sequence[Record]) -> dict[tuple[Condition, str], Guess]:
    """Return the arms (variants) that are not shown to be better than guessing, as a dict from (condition, arm) to a `Guess`.
    `records` are the results of the runs. References and scores whose value for guesses is unknown are left out.

    The mean score must exceed that of guesses by more than the chance of the seeds and of the test images explain. The part of
    the seeds is their 95% interval; the part of the test images is 1.96 times the standard error of the score of guesses. In a
    cross-validation, a complete pass over all folds takes the place of a seed, and the variance over images is larger by the
    same factor as in verdicts. With fewer than six seeds, the part of the seeds is left out.
    """
    cells: dict[tuple[Condition, str], list[Record]] = {}
    for r in pooled(records):
        if r.finished and r.role in ("baseline", "technique") and chance_of(r) is not None:
            cells.setdefault((condition_of(r), r.arm), []).append(r)
    found = {}
    for cell, runs in cells.items():
        mean, _, low, _ = spread([r.result for r in runs])
        chance, error = chance_of(runs[0]) or (0.0, 0.0)
        over_seeds = mean - low if mean is not None and low is not None and len(runs) >= MIN_PAIRS else 0.0
        if mean is not None and mean - math.hypot(over_seeds, 1.96 * error) <= chance + TIE:
            found[cell] = Guess(score_named(runs[0].score or "", False), mean, chance)
    return found


def chance_of(record: Record) -> tuple[float, float] | None:
    """Return the score of guesses and its standard error over test images, or None if it is unknown. `record` holds the results
    of a run or of a pass over all folds.

    For the accuracy, this is the share of the most frequent class. Guesses have the balanced accuracy 1/k with k classes, if
    they name each class equally often, and the AUC 0.5. The AUC of more than two classes is a mean over classes, whose errors
    are taken to be fully dependent. If the images belong to groups, such as patients, all images of a group are taken to have
    one class, so a group counts as a single image.
    """
    images, matrix = record.test_images or 0, record.confusion
    k = len(matrix or (record.preprocess or {}).get("classes") or ())
    counts = [sum(row) or 1 for row in matrix] if matrix else [images / k] * k if images and k else []
    sizes = Counter(record.test_groups or ()).values()
    factor = (FOLDS_FACTOR if record.folds else 1.0) * (sum(n**2 for n in sizes) / sum(sizes) if sizes else 1.0)
    if record.score == "accuracy" and record.test_majority:
        chance = record.test_majority
        variance = chance * (1 - chance) / images if images else 0.0
    elif record.score == "balanced_accuracy" and k:
        chance = 1 / k
        variance = chance * (1 - chance) * sum(1 / n for n in counts) / k**2
    elif record.score == "auc":
        chance, total = 0.5, sum(counts)
        errors = [math.sqrt((total + 1) / (12 * n * (total - n))) for n in counts if n < total]  # of the Mann-Whitney statistic
        variance = fmean(errors) ** 2 if errors else 0.0
    else:
        return None
    return chance, math.sqrt(factor * variance)


def no_better_than_guessing(records: Sequence[Record]) -> list[str]:
    """Return a list of warnings, one for each arm (variant) that may be no better than guessing, by the rule of `guesses`. An
    accuracy is compared with that of a model that always predicts the most frequent class. `records` are the results of the
    runs.
    """
    return [
        f"{arm} at {condition.title}: {score.title} {100 * mean:.2f}%, not shown to be better than "
        f"{'always naming the most frequent class' if score == ACCURACY else 'guessing'} ({100 * chance:.2f}%). "
        "Check the learning rate and the number of steps"
        for (condition, arm), (score, mean, chance) in guesses(records).items()
    ]


def level_of(found: Iterable[Guess], digits: int = 2) -> str:
    """Return the score of guesses as text with a space before it, such as ` (10.00%)`. It is empty if the arms (variants) that
    were `found` to be no better than guessing have different ones.
    """
    chances = {f"{100 * guess.chance:.{digits}f}%" for guess in found}
    return f" ({chances.pop()})" if len(chances) == 1 else ""


def nothing_learned(records: Sequence[Record]) -> str:
    """Return a sentence that says that no arm (variant) was shown to be better than guessing, and what to do. The text is empty
    if an arm was, or if this is unknown for an arm. `records` are the results of the runs. Only the main conditions count: the
    longest training, and tuned settings if there are any.
    """
    found, cells = guesses(records), main_cells(records)
    if not found or any(cell not in found for cell in cells):
        return ""
    level = level_of(found[cell] for cell in cells)
    more = units(any(r.folds for runs in cells.values() for r in runs))
    return f"No arm was shown to be better than guessing{level}: train longer or change the settings before adding {more}."


def no_better_than_random(records: Sequence[Record]) -> list[str]:
    """Return a list of warnings, one for each arm (variant) and each probe (a classifier on frozen features) that is not shown
    to be better than the same probe of an untrained model. `records` are the results of the runs.

    Runs with the same condition and the same seed are compared. The folds of a cross-validation share training images, so they
    count for less than independent seeds.
    """
    finished = {(r.arm, condition_of(r), r.seed): r for r in records if r.finished}
    cells = dict.fromkeys((r.arm, condition_of(r)) for r in finished.values() if r.role != "reference")
    probes = dict.fromkeys(name for r in finished.values() for name in r.probes or ())
    out = []
    for arm, condition in cells:
        pairs = [
            (r.test or {}, finished[RANDOM, condition, seed].test or {})
            for (name, c, seed), r in finished.items()
            if (name, c) == (arm, condition) and (RANDOM, c, seed) in finished
        ]
        for probe in probes:
            first = next(r for (name, c, _), r in finished.items() if (name, c) == (arm, condition))
            score, folds = score_named(probe, bool(first.lower_is_better) and probe == first.score), first.folds
            sign = -1 if score.lower else 1
            gains = [sign * (new[probe] - random[probe]) for new, random in pairs if probe in new and probe in random]
            mean, sd, low, _ = spread(gains)
            if folds and mean is not None and low is not None and sd:  # folds share training images
                low = mean - FoldVariance(sd, len(gains), folds).half_width(0.05)
            if mean is not None and (mean if low is None else low) <= 0:
                bound = "" if low is None else f" (95% interval{' over folds' if folds else ''} from {score.difference(low)})"
                gain = f"{score.difference(mean)}{score.points}{bound}"
                out.append(f"{arm} at {condition.title}, {probe}: not shown to be better than an untrained model, {gain}")
    return out


def unequal_trials(records: Sequence[Record], trials: Mapping[str, int] | None = None) -> list[str]:
    """Return warnings about two unfair cases: some arms (variants) were tried with more settings than others, or an arm was
    scored on the test images with more settings than the report shows, so the shown ones may be lucky. `records` are the
    results of the runs. `trials` is a dict from an arm to the number of its settings that were tried on validation images.
    """
    out = []
    judged = {r.arm for r in records if r.role in ("baseline", "technique")}
    fixed = {r.arm for r in records if r.tuning and not r.tuning.get("trials") and r.steps == 0}  # nothing to tune
    counts = {arm: n for arm, n in trials_of(records, trials).items() if arm in judged and (n or arm not in fixed)}
    group = baseline_of_arms(records)
    if len({(group[arm], n) for arm, n in counts.items()}) > len({group[arm] for arm in counts}):
        out.append(
            "The arms had different numbers of trials on validation images, so one arm may have better settings than another: "
            + "; ".join(f"{arm}: {count}" for arm, count in counts.items())
        )
    shown: dict[str, set[str]] = {}
    for r in records:
        shown.setdefault(r.arm, set()).add(f"{r.length} {settings_of(r.run, 'seed', 'labels')}")
    if more := [f"{arm}: {count}" for arm, count in scored_settings(records).items() if count > len(shown[arm])]:
        out.append(
            "More settings of an arm were scored on the test images than this page shows, so the best may be here by luck: "
            + "; ".join(more)
        )
    return out


def unused_seeds(records: Sequence[Record]) -> list[str]:
    """Return a warning if arms (variants) were also trained with random seeds that the recipe does not list. Choosing seeds by
    their results makes verdicts wrong. In a cross-validation, they are numbers of passes. `records` are the results of the
    runs.
    """
    found: dict[str, set[int]] = {}
    for r in records:
        if r.unused_seeds:
            found.setdefault(r.arm, set()).update(r.unused_seeds)
    several = units(any(r.folds for r in records if r.unused_seeds))
    arms: dict[str, list[str]] = {}
    for arm, seeds in found.items():
        arms.setdefault(seed_ranges(seeds), []).append(f"“{arm}”")
    return [
        f"Finished runs of {join_names(names)} with other {several} ({seeds}) are not used. Deciding by their results which "
        f"{several} to use makes verdicts invalid"
        for seeds, names in arms.items()
    ]


def seed_ranges(seeds: Iterable[int]) -> str:
    """Return random seeds as text, with ranges: `0, 2, 8 to 15`."""
    ranges: list[list[int]] = []
    for seed in sorted(seeds):
        if ranges and seed == ranges[-1][-1] + 1:
            ranges[-1].append(seed)
        else:
            ranges.append([seed])
    return ", ".join(f"{each[0]} to {each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in ranges)


def trials_of(records: Sequence[Record], trials: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return how many settings of each arm (variant) were tried on validation images, as a dict from its name to this number.
    `records` are the results of the runs; they contain the number of trials of the tuning. `trials` is a dict of the same form
    that also counts tries with the command `smallvit explore`. The larger number counts.

    The dict is empty if there were no trials.
    """
    tuned: dict[tuple[str, int | None], int] = {}
    for r in records:
        tuned[r.arm, r.labels] = max(tuned.get((r.arm, r.labels), 0), (r.tuning or {}).get("trials", 0))
    arms = dict.fromkeys(r.arm for r in records)
    counted = {arm: sum(n for (name, _), n in tuned.items() if name == arm) for arm in arms}
    found = {arm: max(n, (trials or {}).get(arm, 0)) for arm, n in counted.items()}
    return found if any(found.values()) else {}


def scored_settings(records: Sequence[Record]) -> dict[str, int]:
    """Return how many different settings of each arm (variant) were scored on the test images, as a dict from its name to this
    number. `records` are the results of the runs. Arms whose records do not say it are left out.
    """
    found: dict[str, int] = {}
    for r in records:
        if r.test_settings is not None:
            found[r.arm] = max(found.get(r.arm, 0), r.test_settings)
    return found
