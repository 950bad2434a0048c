"""Compare runs that were trained again with the committed records: first steps, weights, score of the same seed, and seeds.

A run depends on its settings and its seed alone, so the same machine must give the same weights. Another processor, another
version of torch, another attention kernel or a stack rounds differently. What rounding does was measured on same-seed pairs:

training                          pairs  first losses  mean losses  score, points
quickstart, 500 steps, fp32          26       2e-7         3e-5     0.2 (one image) in one pair, otherwise 0
regularize, 800 steps, fp32           6       2e-7         0        0 of 10,000 images
quickstart, bf16 and fp32             4       1e-4         5e-2     0.2, 0, -0.6, 0
quickstart, 2,000 steps, lr 6e-3      3       2e-7         1e-1     -1.0, -1.0, 0 (SD over seeds: 0.3)
records, 9,600 steps, 10,000 labels   4       1e-7         8e-2     -0.1, -0.1, 0, 0 (SD over seeds: 0.07)

(relative differences, the largest one; AVX-512 against AVX2 and SSE, both attention kernels, single runs against a stack of 8.)
So a short training keeps the scores of a seed together, and `score_tolerance` allows 3 images. A long training at a high rate
amplifies rounding; there only the first steps and the difference of two seeds can tell. In the last line, the norms of the
final weights differed by up to 1.2%, as those of two seeds do.
"""

import math
from collections.abc import Sequence
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from smallvit.record import Record, short_name
from smallvit.verdicts.comparison import condition_of
from smallvit.verdicts.score import Score, score_named
from smallvit.words import how_many

LEVEL = 0.99  # of the prediction interval: by chance one arm in a hundred lies outside
MAX_WIDTH = 0.6  # a wider interval contains almost any result and excludes nothing
LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # relative, of the loss in each of the first steps
NORM_TOLERANCE = {"fp32": 1e-2, "bf16": 5e-2}  # relative, of the norm of the final weights
EMA_FACTOR = 2  # between two distances from the averaged weights to the last weights
CURVE_TOLERANCE = 0.1  # relative to the first point of the curve, of each mean training loss
DRIFT = 1e-3  # relative, of the mean training losses: rounding has not driven the two runs apart
NUMBER_TOLERANCE = 1e-5  # relative, of the other numbers on the test images, such as the log loss, if the weights are equal
SMALL_LOSS = 0.05  # differences are relative to at least this loss
TIMES = ("ms", "speedup")  # numbers of the evaluator `cost` that differ from run to run
FEWEST_IMAGES = 3  # test images by which the scores of such runs may differ

# fields that decide how a run rounds, with the words of a message
MACHINE = {
    "cpu": "processor",
    "device": "device",
    "threads": "number of threads",
    "precision": "precision",
    "kernel": "attention kernel",
    "compiled": "compilation",
    "stacked": "stack size",
    "processes": "number of processes",
}


class Outcome(NamedTuple):
    """The outcome of comparing a run that was trained again with its published record: a text for the user, and whether the two
    agree.

    agrees     None if the external weights of the run cannot be obtained on this machine
    identical  whether the weights and the score are equal
    """

    text: str
    agrees: bool | None
    identical: bool = False


def compare_with_committed(committed: Sequence[Record], again: Sequence[Record]) -> tuple[list[str], bool]:
    """Check whether runs that were trained again reproduce their published results. Return a list of text lines and whether all
    runs agree. `committed` are the published records (results of a run), and `again` are the new ones.

    There is one line for each new run, which `compare_run` writes. Where the runs of an arm (variant) are not identical to
    their records, one more line compares their mean with all committed seeds: it must lie in the 99% prediction interval that
    follows from the mean and standard deviation of these seeds (t distribution), or differ by what a few test images change.

    Arms whose external weights are unavailable here are skipped. At least one run must agree.
    """
    lines, results = [], []
    for condition, arm in dict.fromkeys((condition_of(record), record.arm) for record in again):
        new = [r for r in again if (condition_of(r), r.arm) == (condition, arm)]
        old = [r for r in committed if (condition_of(r), r.arm) == (condition, arm) and r.finished]
        outcomes = [compare_run(old, record) for record in new]
        lines += [f"{arm} at {condition.title}, seed {r.seed}: {outcome.text}" for r, outcome in zip(new, outcomes)]
        results += [outcome.agrees for outcome in outcomes if outcome.agrees is not None]
        if any(outcome.agrees and not outcome.identical for outcome in outcomes):
            line, inside = compare_with_seeds(old, [r for r, outcome in zip(new, outcomes) if outcome.agrees])
            lines.append(f"{arm} at {condition.title}: {line}")
            results.append(inside)
    return lines, bool(results) and all(results)


def compare_run(committed: Sequence[Record], new: Record) -> Outcome:
    """Compare a run that was trained again with the published record of the same seed, and return the `Outcome`. `committed`
    are the published records (results of a run) of its arm, and `new` is the new record.

    These comparisons are made in this order, and the first difference is reported:

    1. Settings, labelled images and data must be equal.
    2. The first training steps, the distance to the averaged weights and the norm of the weights must agree up to rounding
       (`trace_problems`), on every machine.
    3. On the same machine with the same versions, the weights, the score and the images that were classified correctly must be
       equal, and the other numbers on the test images equal up to rounding (`test_differences`).
    4. On another machine, the score must agree up to rounding (`score_tolerance`), and so must the learning curve.
    """
    if new.status == "unavailable":
        return Outcome(f"left out, unavailable here ({new.error})", None)
    if not new.finished:
        return Outcome(f"not compared ({new.error or 'the run failed'})", False)
    old = same_seed(committed, new)
    if old is None:
        return Outcome("not compared (no committed record of this seed)", False)
    if changes := input_changes(old, new):
        return Outcome(f"not compared, this is another run than the record: {'; '.join(changes)}", False)
    machine = machine_changes(old, new)
    if problems := trace_problems(committed, old, new, same_machine=not machine):
        return Outcome(f"FAILED, the training differs: {'; '.join(problems)}", False)
    same_weights = bool(old.weights_sha256) and old.weights_sha256 == new.weights_sha256
    differences = test_differences(old, new)
    if same_weights and not differences:
        return Outcome(f"{result_text(new)}, identical to the record (weights and score)", True, identical=True)
    reasons = machine or (version_changes(old, new, list(new.versions or ())) if same_weights else excuses(old))
    if reasons:
        return compare_scores(committed, old, new, same_weights, reasons)
    if same_weights:
        return Outcome(f"FAILED, the same weights {', '.join(differences)}", False)
    score = "the same score" if new.result == old.result else f"{result_text(new)} instead of {result_text(old)}"
    text = f"FAILED, {score} but other weights; the same machine and versions must give the same weights"
    libraries = version_changes(old, new, list(new.versions or ()))  # not of torch
    return Outcome(text + f"; not the same: {', '.join(libraries)}" * bool(libraries) + code_change(old, new), False)


def excuses(old: Record) -> list[str]:
    """Return a list of reasons why a run that is trained again may get other weights than its published record, although the
    machine and the versions are the same. The list is empty if the weights must be equal. `old` is the record (results of the
    run).
    """
    found = [] if old.weights_sha256 else ["the record has no hash of its weights"]
    stacks = stacks_of_earlier(old)
    if stacks is None:
        found.append("the record does not say in how large stacks earlier runs were trained")
    largest = max(old.stacked or 1, *(stacks or [1]))
    return found + [f"the place of a run in its stack of {largest} changes its rounding"] * (largest > 1)


def compare_scores(
    committed: Sequence[Record], old: Record, new: Record, same_weights: bool, reasons: Sequence[str]
) -> Outcome:
    """Compare the score and the learning curve of a run that was trained again with its published record, up to rounding, and
    return the `Outcome`. `committed` are the records (results of a run) of all seeds, `old` is the one of this seed, and `new`
    is the new one. `same_weights` says whether both have the same weights, and `reasons` are texts that say why the two may
    differ.
    """
    same = " ".join(["the same weights", ", ".join(test_differences(old, new))]).strip()
    weights = same if same_weights else "other weights" if old.weights_sha256 else "weights unknown"
    trace = "the first training steps agree" if old.trace else "the record has no first training steps to compare"
    why = f"{weights}; {trace}; compared up to rounding because of: {'; '.join(reasons)}"
    if problem := curve_problem(old, new):
        return Outcome(f"FAILED, {problem} ({why})", False)
    allowed, rule = score_tolerance(committed, old, new)
    if abs(new.result - old.result) > allowed + 1e-12:
        text = f"{result_text(new)} instead of {result_text(old)}; allowed are {difference_text(new, allowed)}, {rule}"
        return Outcome(f"FAILED, {text} ({why})", False)
    record = "as in the record" if new.result == old.result else f"the record has {result_text(old)}"
    return Outcome(f"{result_text(new)}, {record}; allowed are {difference_text(new, allowed)}, {rule} ({why})", True)


def test_differences(old: Record, new: Record) -> list[str]:
    """Return a list of texts that name the differences between the test results of two runs: the score, the other numbers, such
    as those of probes, and the number of test images that only one of them classified correctly. The list is empty if there are
    none. `old` is the published record (results of the run), and `new` is the new one.

    Times are not compared. A log loss may differ by rounding, for example if the images were evaluated in batches of another
    size. So all numbers but an accuracy that judges the run may differ by `NUMBER_TOLERANCE`, which is less than one image of
    10,000 changes. An old record may lack the list of correctly classified images.
    """
    found = []
    exact = old.correct is not None and old.contributions is None  # an accuracy
    if not (old.result == new.result if exact else equal_up_to_rounding(old.result, new.result)):
        found.append(f"score {result_text(new)} instead of {result_text(old)}")
    before, now = old.test or {}, new.test or {}
    for name in {**before, **now}:
        one, other = before.get(name), now.get(name)
        if name not in (*TIMES, old.score) and not equal_up_to_rounding(one, other):
            one, other = (f"{value:.6g}" if value is not None else "nothing" for value in (one, other))
            found.append(f"give {other} instead of {one} for {name}")
    if old.correct is not None and old.correct != new.correct:
        one, other = old.correct_bits, new.correct_bits
        if one is None or other is None or len(one) != len(other):
            found.append("come without the list of correctly classified images")
        elif changed := int((one != other).sum()):
            found.append(f"classify {how_many(changed, 'test image')} differently")
    return found


def equal_up_to_rounding(one: float | None, other: float | None) -> bool:
    """Return whether two numbers are equal, or differ so little that rounding explains it (`NUMBER_TOLERANCE`). None stands for
    a number that is missing.
    """
    if one is None or other is None:
        return one == other
    return math.isclose(one, other, rel_tol=NUMBER_TOLERANCE)


def same_seed(committed: Sequence[Record], new: Record) -> Record | None:
    """Return the published record (results of a run) with the seed of a new record, or None if there is none."""
    return next((record for record in committed if record.seed == new.seed), None)


def input_changes(old: Record, new: Record) -> list[str]:
    """Return a list of texts that say in which settings, labelled images or data two runs differ. The list is empty if they
    have none of these differences. `old` and `new` are their records (results of a run).
    """
    changes = []
    if old.fingerprint != new.fingerprint:
        changes.append(setting_changes(old.run, new.run))
    for name, words in (("data_sha256", "the data set has other pixels or labels"), ("subset_sha256", "other labelled images")):
        before, now = getattr(old, name), getattr(new, name)
        if before is not None and now != before:
            changes.append(words)
    return changes


def setting_changes(old: dict, new: dict) -> str:
    """Return a text that says in which settings two runs differ. `old` and `new` are these settings, as records have them."""
    before, now = flatten(old), flatten(new)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name) and not name.endswith("recipe_sha256")]
    shown = [f"{name} was {before.get(name)!r:.60} and is {now.get(name)!r:.60}" for name in names[:5]]
    return "settings: " + (", ".join(shown) or "other code in the recipe")


def flatten(plain: dict | list, prefix: str = "") -> dict[str, object]:
    """Return the values of the nested dicts and lists in `plain` as one dict without nesting. The keys are paths such as
    `model.depth`, and each path begins with the text `prefix`.
    """
    items = plain.items() if isinstance(plain, dict) else enumerate(plain)
    flat: dict[str, object] = {}
    for name, value in items:
        nested = isinstance(value, dict | list) and value
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def machine_changes(old: Record, new: Record) -> list[str]:
    """Return a list of texts that name the differences between two runs that change rounding: processor, number format, version
    of torch and so on. If the list is empty, the rounding should be the same. `old` and `new` are their records (results of a
    run).
    """
    fields = {
        name: f"{words} {getattr(old, name)} -> {getattr(new, name)}"
        for name, words in MACHINE.items()
        if getattr(old, name) != getattr(new, name)
    }
    if "cpu" in fields and short_name(new.cpu, [old.cpu]) == old.cpu:
        fields["cpu"] = "the record does not name the family and model of its processor"
    changes = list(fields.values())
    before, now = [(record.trace or {}).get("instructions") for record in (old, new)]
    if before and now and before != now:  # processors of one name may have different ones
        changes.append(f"instruction set {before} -> {now}")
    before, now = stacks_of_earlier(old), stacks_of_earlier(new)
    if before != now and None not in (before, now):
        changes.append(f"stack size of earlier runs {before} -> {now}")
    return changes + version_changes(old, new, ["torch"])


def stacks_of_earlier(record: Record) -> list[int] | None:
    """Return how many runs were trained together as one model in each of the earlier runs that a run needed, such as
    pretraining, in a fixed order; 1 for a run that was trained alone. The result is None if the record does not say this, as
    before version 0.3.0. `record` holds the results of the run.
    """
    runs = (record.pretraining or {}).get("runs") or {}
    if record.pretraining and not (runs and all("stacked" in costs for costs in runs.values())):
        return None
    return [runs[name]["stacked"] or 1 for name in sorted(runs)]


def version_changes(old: Record, new: Record, names: Sequence[str]) -> list[str]:
    """Return a list of texts that say which of the named libraries have another version, such as `torch 2.5 -> 2.6`. `old` and
    `new` are the records of two runs.
    """
    before, now = old.versions or {}, new.versions or {}
    return [f"{name} {before.get(name)} -> {now.get(name)}" for name in names if before.get(name) != now.get(name)]


def code_change(old: Record, new: Record) -> str:
    """Return a text, for the end of a message, that says that two runs were trained by different code of smallvit. The text is
    empty if the code was the same. `old` and `new` are the records of the runs.
    """
    before, now = (old.code or {}).get("sha256"), (new.code or {}).get("sha256")
    commit = ((old.code or {}).get("commit") or "unknown")[:10]
    return "" if before == now else f"; the code of smallvit has changed since the record was made (commit {commit})"


def trace_problems(committed: Sequence[Record], old: Record, new: Record, *, same_machine: bool) -> list[str]:
    """Return a list of texts that name differences between two runs that are too large for rounding: in the first training
    steps or in the final weights. The list is empty if there are none. `old` and `new` are the records (results of a run), and
    `same_machine` says whether both were trained on the same machine.

    The list is also empty if the old record does not keep the first steps.

    The seed decides the initial weights, the batches and the augmentation, on every machine. Their hashes must be equal; these
    hashes do not depend on rounding. The losses of the first steps must agree within `LOSS_TOLERANCE`.

    The distance between the averaged (EMA) and the last weights must be 0 in both runs or in none, and agree within a factor of
    2. The norm of the final weights must agree within `NORM_TOLERANCE` or, on another machine, if rounding has driven the two
    runs apart, as well as the norms of two seeds do (`norm_tolerance`). `committed` are the published records of all seeds.

    A run that starts from another run, or learns from one, depends on weights that round differently on another machine
    (`same_machine=False`). There, its initial weights and losses are not compared, nor its batches if they contain pseudo
    labels.
    """
    if not old.trace:
        return []
    if not new.trace:
        return ["the new run does not keep its first steps"]
    before, now, problems = old.trace, new.trace, []
    precision = "bf16" if "bf16" in (old.precision, new.precision) else "fp32"
    from_other_runs = bool(old.pretraining) and not same_machine
    if before.get("initial") != now.get("initial") and not from_other_runs:
        problems.append("other initial weights")
    if before.get("batches") != now.get("batches") and not (from_other_runs and old.run.get("pseudo_labels")):
        problems.append("other batches (order, augmentation, images or labels)")
    losses = [trace.get("losses") or [] for trace in (before, now)]
    if len(losses[0]) != len(losses[1]):
        problems.append(f"{len(losses[1])} losses instead of {len(losses[0])}")
    for step, (one, other) in enumerate(zip(*losses), 1):
        if not from_other_runs and not math.isclose(one, other, rel_tol=LOSS_TOLERANCE[precision]):
            problems.append(f"the loss of step {step} is {other:.6g} instead of {one:.6g}")
            break
    one, other = before.get("ema_distance"), now.get("ema_distance")
    if (one is None) != (other is None) or (one is not None and other is not None and not within_factor(one, other)):
        distances = f"{number_text(other)} away from the last weights instead of {number_text(one)}"
        problems.append(f"the averaged (EMA) weights are {distances}")
    one, other = before.get("final_norm"), now.get("final_norm")
    allowed = NORM_TOLERANCE[precision] if same_machine else norm_tolerance(committed, old, new, NORM_TOLERANCE[precision])
    if one is not None and (other is None or not math.isclose(one, other, rel_tol=allowed)):
        problems.append(f"the norm of the final weights is {number_text(other)} instead of {number_text(one)}")
    return problems


def norm_tolerance(committed: Sequence[Record], old: Record, new: Record, least: float) -> float:
    """Return the largest allowed relative difference between the norms of the final weights of a run on another machine and
    that of its published record: at least `least`. If rounding has driven the two runs apart, it is as large as the difference
    of two seeds (`seed_difference`). `old` is the published record, `new` is the new record, and `committed` are the published
    records of all seeds.
    """
    norms = [norm for record in committed if (norm := (record.trace or {}).get("final_norm"))]
    moved = drift(old, new)
    if len(norms) < 2 or (moved is not None and moved <= DRIFT):
        return least
    return max(least, seed_difference(norms) / fmean(norms))


def seed_difference(values: Sequence[float]) -> float:
    """Return how far apart the results of two seeds are, at most, in 99% of cases. `values` are the results of several seeds,
    and a t distribution is assumed.
    """
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * sqrt(2) * stdev(values)


def number_text(value: float | None) -> str:
    """Return a number as text with 4 significant digits. For None the text is `not known`."""
    return "not known" if value is None else f"{value:.4g}"


def within_factor(one: float, other: float) -> bool:
    """Return whether the numbers `one` and `other` are both 0, or differ by at most a factor of 2. They are the distances
    between the averaged (EMA) weights and the last weights in two runs.
    """
    return one == other or (min(one, other) > 0 and max(one, other) <= EMA_FACTOR * min(one, other))


def curve_problem(old: Record, new: Record) -> str:
    """Return a text that says where the mean training losses of two runs differ by more than rounding. The text is empty if
    they agree. `old` and `new` are the records of the runs.

    At each check the losses may differ by a tenth of the first loss of the record.
    """
    before, now = old.curve or [], new.curve or []
    if [check[0] for check in before] != [check[0] for check in now]:
        return f"validated at the steps {[check[0] for check in now]} instead of {[check[0] for check in before]}"
    for (step, one, _), (_, other, _) in zip(before, now):
        if abs(other - one) > CURVE_TOLERANCE * abs(before[0][1]):
            return f"the mean training loss up to step {step} is {other:.4g} instead of {one:.4g}"
    return ""


def score_tolerance(committed: Sequence[Record], old: Record, new: Record) -> tuple[float, str]:
    """Return the largest allowed difference between the score of a run and that of its published record, as a fraction, and a
    text that says why. Only rounding may differ between the two. `old` is the published record (results of the run), `new` is
    the new record, and `committed` are the published records of all seeds.

    If the mean training losses of the two runs agree within 0.1%, their weights have stayed together, and so have their scores:
    `FEWEST_IMAGES` test images may differ. For a score that weights images, these are the images with the largest weights. A
    long training at a high learning rate amplifies rounding until the weights have nothing more in common than those of two
    seeds. Then the scores may differ as much as those of two seeds: 99% of such differences are smaller, by the standard
    deviation of the committed seeds (t distribution). With fewer than 2 committed seeds this is not known, and nothing more is
    allowed.
    """
    images = tolerance_in_images(old)
    moved = drift(old, new)
    if moved is not None and moved <= DRIFT:
        return images, f"{FEWEST_IMAGES} test images, since the training losses agree"
    values = [record.result for record in committed]
    if len(values) < 2:
        return images, f"{FEWEST_IMAGES} test images, since there are fewer than 2 committed seeds"
    why = "" if moved is None else f", since rounding has changed the training losses by up to {100 * moved:.2g}%"
    return max(images, seed_difference(values)), f"the difference of two seeds{why}"


def tolerance_in_images(record: Record) -> float:
    """Return by how much the score of a run changes, at most, if `FEWEST_IMAGES` test images are classified in another way.
    `record` holds its results.
    """
    largest = 1.0  # change of the score, times the number of test images, for one image
    if record.contributions is not None:
        largest = float(abs(record.per_image).max())  # pyright: ignore[reportArgumentType]
    return FEWEST_IMAGES * largest / record.test_images if record.test_images else 0.0


def drift(old: Record, new: Record) -> float | None:
    """Return the largest relative difference between the training losses of two runs. Each validation during training records
    the mean training loss since the validation before; these means are compared. `old` and `new` are the records (results) of
    the runs.

    It is 0 for a model that was neither trained nor loaded from a trained run. It is None if it is not known, as for a model
    that was only loaded from a trained run.
    """
    if not old.curve or not new.curve:
        return None if old.pretraining or old.steps else 0.0
    return max(abs(other - one) / max(abs(one), SMALL_LOSS) for (_, one, _), (_, other, _) in zip(old.curve, new.curve))


def compare_with_seeds(old: Sequence[Record], new: Sequence[Record]) -> tuple[str, bool]:
    """Compare the mean score of new runs of one arm (variant) with its published runs. Return a text, and whether the mean lies
    inside the 99% prediction interval, which follows from the mean and the standard deviation of the published scores. The
    interval reaches at least as far as `tolerance_in_images` says, divided by the root of the number of new runs: scores that
    are equal by chance would leave none. `old` are the published records (results of a run), and `new` are the new ones.

    With fewer than 2 published runs there is no interval, and nothing is compared. An interval wider than 60 points excludes
    nothing, which the text says.
    """
    mean = fmean(record.result for record in new)
    if len(old) < 2:
        return "no interval over seeds (fewer than 2 committed seeds)", True
    low, high = prediction_interval([record.result for record in old], len(new))
    allowed = max(map(tolerance_in_images, old)) / sqrt(len(new))
    middle = fmean(record.result for record in old)
    low, high = min(low, middle - allowed), max(high, middle + allowed)
    inside = low - 1e-12 <= mean <= high + 1e-12
    low, high = max(low, 0.0), high if score_of_record(old[0]).lower else min(high, 1.0)
    verdict = "inside" if inside else "OUTSIDE"
    if inside and high - low > MAX_WIDTH:
        verdict = "inside, but the interval is TOO WIDE to exclude anything"
    interval = f"interval {score_of_record(old[0]).number(low)} to {written(old[0], high)} (99%, {len(old)} committed seeds)"
    return f"mean {written(old[0], mean)}, {interval}: {verdict}", inside


def prediction_interval(values: Sequence[float], new: int) -> tuple[float, float]:
    """Return the lower and upper end of the 99% prediction interval for the mean of `new` further runs. `values` are the
    results of the runs so far, and a t distribution is assumed.
    """
    from scipy.stats import t

    half = float(t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) * sqrt(1 / len(values) + 1 / new)
    return fmean(values) - half, fmean(values) + half


def score_of_record(record: Record) -> Score:
    """Return how a report writes the score by which a run is judged, such as an accuracy in percent or a log loss as a plain
    number. `record` holds the results of the run.
    """
    return score_named(record.score or "accuracy", bool(record.lower_is_better))


def written(record: Record, value: float) -> str:
    """Return the score `value` as text with its unit, such as `94.20%`, or `0.214` for a log loss. `record` holds the results
    of a run with this score.
    """
    score = score_of_record(record)
    return score.number(value) + "%" * score.percent


def result_text(record: Record) -> str:
    """Return the score by which a run is judged as text with its unit, such as `94.20%`. `record` holds the results."""
    return written(record, record.result)


def difference_text(record: Record, value: float) -> str:
    """Return a difference of two scores as text with its unit, such as `0.60 points`. `value` is the difference, and `record`
    holds the results of a run with this score.
    """
    score = score_of_record(record)
    return score.number(value) + score.points
