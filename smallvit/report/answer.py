"""The main result of a comparison in a few sentences: verdicts of the main conditions, and how the small CNN compares."""

from collections.abc import Sequence

from smallvit.record import Record, format_labels
from smallvit.verdicts.comparison import Comparison, Row, condition_of
from smallvit.verdicts.contrasts import tuned_pairs
from smallvit.verdicts.statistics import MIN_PAIRS
from smallvit.words import how_many, join_names

from .format import NAMED, at_labels, baselines
from .units import same_score, score_in, score_of

CNN = "small CNN"  # the reference that is trained like the baseline


def answer(comparison: Comparison) -> str:
    """Return the main result of a comparison in a few sentences. They say which arms (variants) are better or worse than their
    baseline, how a small convolutional network compares (a reference model for orientation), and for which arms no difference
    was shown. `comparison` holds all results.

    Only the main conditions count: tuned settings if there are any, and the longest training. Settings and lengths without a
    result do not count. If a verdict differs with common settings, the last sentence says so.
    """
    judged = [row for row in comparison.main_rows if row.verdict]
    if not judged:
        return f"No technique has been compared with {baselines(comparison.rows, 'its own baseline')}."
    better, worse, undecided = ([row for row in judged if row.verdict == word] for word in ("better", "worse", "inconclusive"))
    place = setting(comparison)
    first = f"{place}{'no' if place else 'No'} technique was shown to be better than {baselines(judged, 'its own baseline')}"
    if better:
        first = place + decided_arms(comparison, better, baselines(better, "their own baselines"))
    elif not worse and not undecided:
        first = "No verdict is possible yet"
    first += f", and {decided_arms(comparison, worse, baselines(worse, 'their own baselines'))}" if worse else ""
    second = [f"no difference was shown for {undecided_arms(comparison, judged, undecided)}"] if undecided else []
    units, looks = judged[0].units, judged[0].looks
    needed = f"{looks[0]} {units} of the first look" if looks else f"{MIN_PAIRS} {units} that a verdict needs"
    for verdict, problem in (
        ("not enough seeds", f"fewer than the {needed}"),
        ("no verdict", "no verdict, for the reasons in the table"),
    ):
        if count := sum(row.verdict == verdict for row in judged):
            every = "both" if count == 2 else f"all {count:,}"
            some = how_many(count, "comparison has", "comparisons have")
            second += [f"{f'{every} comparisons have' if 1 < count == len(judged) else some} {problem}"]
    texts = (first, small_cnn(comparison), "; ".join(second), common_settings(comparison))
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in texts if text)


def runs_done(comparison: Comparison, records: Sequence[Record]) -> tuple[int, int]:
    """Return how many runs of a comparison have finished, and how many runs it has. A run is one training of one model: in a
    cross-validation, one fold of one pass. Arms (variants) whose external weights are unavailable do not count. `records` are
    the results of the runs, and those that have not started have the status "missing".
    """
    cells = {(row.condition, row.arm) for row in comparison.rows if not row.unavailable}
    runs = [r for r in records if r.role != "dependency" and (condition_of(r), r.arm) in cells]
    return sum(r.finished for r in runs), len(runs)


def passes_done(comparison: Comparison, records: Sequence[Record]) -> str:
    """Return a sentence, without its final period, that says how many passes over all folds of a cross-validation are complete,
    and which arms (variants) or references lack runs: `1 of 6 passes is complete for all arms; runs of “A” are missing`.
    `records` are the results of the runs, and those that have not started have the status "missing". Arms whose external
    weights are unavailable do not count. The text is empty if no pass is missing, without folds, and if no run has finished.
    """
    rows = [row for row in comparison.main_rows if not row.unavailable]
    finished, total = runs_done(comparison, records)
    if not finished or not any(row.folds for row in rows):
        return ""
    if not any(row.values for row in comparison.rows):
        runs = f"{finished} of {total} runs {'has' if finished == 1 else 'have'} finished"
        return f"no pass over all folds is complete yet ({runs}), so there is nothing to compare"
    arms, lacking = [row for row in rows if row.role != "reference"], [row for row in rows if row.failures]
    if not lacking:
        return ""
    missing = {number for row in arms for number in row.failures}
    complete = {number for row in arms for number in row.seeds} - missing
    number = f"{len(complete)} of {len(missing | complete)} pass{'es' * (len(missing | complete) > 1)}"
    text = f"{number} {'is' if len(complete) == 1 else 'are'} complete for all arms"
    if all(row.failures for row in arms):
        return text
    names = list(dict.fromkeys(f"{'the reference ' * (row.role == 'reference')}“{row.arm}”" for row in lacking))
    return f"{text}; runs of {join_names(names, NAMED)} are missing"


def setting(comparison: Comparison) -> str:
    """Return the beginning of a sentence that names the main conditions: `At 1,000 labels with tuned settings, `. It names the
    number of labels if there is only one, the training length if there are several, and tuned or common settings if any are
    tuned. Several baselines may differ in them: `With tuned settings where there are any`. The text is empty if none of these
    applies. `comparison` holds all results.
    """
    one, main = comparison.main[0], comparison.main
    label = f"at {format_labels(one.labels)}" if len(main) == 1 else ""
    tuned = "tuned settings" + " where there are any" * (not all(c.tuned for c in main))
    settings = [tuned if one.tuned else "common settings"] * any(c.tuned for c in comparison.conditions)
    several = len({c.length for c in main}) > 1
    others = settings + (["the longest training" if several else f"{one.length:,} training steps"] if one.length else [])
    text = " ".join(filter(None, (label, f"with {' and '.join(others)}" if others else "")))
    return f"{text[0].upper()}{text[1:]}, " if text else ""


def decided_arms(comparison: Comparison, rows: Sequence[Row], baseline: str) -> str:
    """Return a part of a sentence about arms (variants) with the same verdict: `“A” (+2.30 points) and “B” (+1.00 points) are
    better than “vit”`. `rows` are the results of these arms, and `baseline` is the text after "than".

    A verdict that would often not come out again is marked as fragile.
    """
    arms: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: -abs(row.difference.mean) if row.difference else 0):
        arms.setdefault(row.arm, [])
    for row in rows:
        value = score_of(row).difference(row.difference.mean) if row.difference else ""
        value += score_of(row).points if not arms[row.arm] else ""
        place = at_labels([row.labels]) if not arms[row.arm] or row.labels is None else f"at {row.labels:,}"
        fragile = " but fragile" if row.difference and row.difference.fragile else ""
        arms[row.arm] += [value + f" {place}" * (len(comparison.main) > 1) + fragile]
    names = [f"“{arm}” ({', '.join(values)})" for arm, values in arms.items()]
    verb = "is" if len(names) == 1 else "are"
    return f"{join_names(names, NAMED, 'more arm' + 's' * (len(names) > NAMED + 1))} {verb} {rows[0].verdict} than {baseline}"


def undecided_arms(comparison: Comparison, judged: Sequence[Row], rows: Sequence[Row]) -> str:
    """Return a text that names the arms (variants) in `rows`, for which no difference from the baseline was shown: `“A” at 100
    labels and any of the 3 arms at 1,000 labels`. Up to two arms are named; more are only counted. `judged` are the results of
    all arms that have a verdict, and `comparison` holds all results.
    """
    found: dict[str, list[int | None]] = {}
    for n in (condition.labels for condition in comparison.main):
        arms, total = [row.arm for row in rows if row.labels == n], sum(row.labels == n for row in judged)
        names = join_names([f"“{arm}”" for arm in arms])
        which = names if len(arms) <= 2 else f"{'any' if len(arms) == total else len(arms)} of the {total} arms"
        if arms:
            found.setdefault(which, []).append(n)
    several = len(comparison.main) > 1
    return join_names([which + f" {at_labels(labels)}" * several for which, labels in found.items()], len(found))


def small_cnn(comparison: Comparison) -> str:
    """Return a sentence, without its final period, that compares the mean accuracy of the small CNN (a convolutional network
    for orientation) with that of the best arm (variant). It is about the main conditions: the longest training, and tuned
    settings if there are any. The text is empty without results of this network. `comparison` holds all results.
    """
    behind, ahead, score = [], [], score_in(comparison)
    sign = -1 if score.lower else 1

    def text(mean: float) -> str:
        return score.number(mean) + "%" * score.percent

    for condition in comparison.main:
        rows = [row for row in comparison.at(condition) if same_score(comparison, row)]
        cnn = next((row for row in rows if row.arm == CNN and row.role == "reference" and row.mean is not None), None)
        arms = [row for row in rows if row.role != "reference" and row.mean is not None and cnn and row.data == cnn.data]
        best = max(arms, key=lambda row: sign * (row.mean or 0), default=None)
        if cnn is None or cnn.mean is None or best is None or best.mean is None or cnn.mean == best.mean:
            continue
        place, numbers = at_labels([condition.labels]), f"{text(cnn.mean)} against {text(best.mean)}"
        if sign * cnn.mean > sign * best.mean:
            behind.append((place, numbers))
        else:
            ratio = cost_ratio(best, cnn)
            needs = f", which needs {ratio} times the multiply-adds" * bool(ratio)
            ahead.append((place, f"{numbers} for “{best.arm}”{needs}"))
    form = "{}: {}" if len(behind + ahead) == 1 else "{} ({})"
    texts = []
    better, worse = ("lower", "higher") if score.lower else ("higher", "lower")
    for found, words in ((behind, f"a {better} mean than every arm"), (ahead, f"a {worse} mean than the best arm")):
        texts += [f"{words} {join_names([form.format(*each) for each in found], len(found))}"] if found else []
    return f"the {CNN} (a reference) has {', and '.join(texts)}" if texts else ""


def cost_ratio(row: Row, other: Row) -> str:
    """Return how many times as many multiply-adds one arm (variant) needs as another one, as text, such as `3.2`. `row` holds
    the results of the first arm, and `other` holds those of the second. The text is empty if one of the two numbers is unknown.
    """
    macs, reference = row.budget["macs"], other.budget["macs"]
    if not macs or not reference:
        return ""
    ratio = macs / reference
    return f"{ratio:,.0f}" if ratio >= 9.5 else f"{ratio:.1f}"


def with_points(row: Row) -> str:
    """Return the mean difference between an arm (variant) and its baseline as text, with its unit: `+0.40 points`. The text is
    empty without a difference. `row` holds the results of the arm.
    """
    return score_of(row).difference(row.difference.mean) + score_of(row).points if row.difference else ""


def common_settings(comparison: Comparison) -> str:
    """Return a sentence, without its final period, that names the arms (variants) whose verdict with common settings (those of
    the recipe) is not the same as with tuned settings (chosen for each arm). The text is empty if there are none. `comparison`
    holds all results.
    """
    changed: dict[str, list[str]] = {}
    for before, row in tuned_pairs(comparison):
        if row.condition in comparison.main and before.verdict and row.verdict and before.verdict != row.verdict:
            difference = f", {amount}" if (amount := with_points(before)) else ""
            place = f" {at_labels([row.labels])}" if len(comparison.main) > 1 else ""
            changed.setdefault(row.arm, []).append(f"{before.verdict}{place}{difference}")
    names = [f"“{arm}” ({'; '.join(texts)})" for arm, texts in changed.items()]
    return f"with common settings, the verdict differs for {join_names(names, NAMED)}" if names else ""
