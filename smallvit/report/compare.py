"""Compare each arm with its baseline, seed by seed: accuracies, differences, verdicts and costs.

Accuracies are fractions here; the pages show percent.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from smallvit.record import Record, format_labels

from .statistics import LEVEL, MIN_PAIRS, TIE, holm, pairs_needed, spread

FORWARD = ("tokens", "macs_sd", "ms", "speedup")  # numbers of the evaluator `cost` for a forward pass
TOLERANCE = 0.05  # costs closer than this to the baseline's count as equal
Cell = tuple[int | None, str]  # number of labels, arm


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The differences in accuracy between an arm (one variant in the comparison) and its baseline. The object holds one
    difference for each seed, their mean, and the result of a paired t-test.

    `low` and `high` are the 95% t interval of the mean. `p` is None if no test was possible, `p_holm` (Holm-corrected) also for
    references.
    """

    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """The results of one arm (one variant in the comparison) for one number of labelled images: the scores of all seeds, the
    costs and the verdict.

    `verdict` is None for baselines and for reference models, which are not judged.

    baseline  the arm it is compared with; for a baseline, its own name
    score     name of the number in `record.test` by which the arm is judged
    values    the score of each seed in `seeds`, with `mean`, `sd` and the 95% t interval `low` to `high`
    failures  seed -> status and error, for each seed without a result
    verdict   better, worse, inconclusive, not enough seeds or no verdict; `reason` says why where that is not obvious
    budget    params, macs, images_seen, seconds: medians over the seeds, pretraining included; and extra_labels: validation
              labels used to choose something, and labels of earlier runs beyond those of this row
    unequal   budget -> relative excess over the baseline's, where the two are more than 5% apart
    forward   tokens, macs_sd, ms, speedup of a forward pass: medians over the seeds; None without the evaluator `cost`
    """

    labels: int | None
    arm: str
    role: str
    baseline: str
    score: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    failures: dict[int, str]
    difference: Difference | None
    verdict: str | None
    reason: str
    budget: dict[str, float | None]
    unequal: dict[str, float]
    forward: dict[str, float | None]

    @property
    def unavailable(self) -> bool:
        """Whether all runs of this arm (variant in the comparison) were left out because their pretrained weights could not be
        obtained. This does not count as a failure.
        """
        return bool(self.failures) and not self.values and all(why.startswith("unavailable") for why in self.failures.values())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All results of a comparison. Each row holds the results of one arm (one variant in the comparison) for one number of
    labelled images.

    Rows are sorted by number of labelled images, and then by baseline: a baseline and the arms that are compared with it stand
    together.

    arms     arm -> role
    family   number of comparisons for which the p-values are Holm-corrected
    earlier  how many of them belong to arms that were removed from the recipe after they had been run
    """

    baselines: tuple[str, ...]
    arms: dict[str, str]
    labels: tuple[int | None, ...]
    rows: tuple[Row, ...]
    family: int
    earlier: int = 0

    @property
    def baseline(self) -> str:
        """The name of the baseline, for headings and axis labels. If the comparison has several baselines, the text is `the
        baseline of each arm`, where an arm is one variant in the comparison.
        """
        return self.baselines[0] if len(self.baselines) == 1 else "the baseline of each arm"

    @property
    def reduced(self) -> bool:
        """Whether at least one arm (variant in the comparison) has measurements of token reduction, such as the speed-up. The
        report then also shows tokens and speed-ups.

        The evaluator `cost` makes these measurements.
        """
        return any(row.forward[name] is not None for row in self.rows for name in ("tokens", "speedup"))

    def at(self, labels: int | None) -> tuple[Row, ...]:
        """Return the results of all arms (variants) for one number of labelled images, as a tuple with one `Row` for each arm.
        `labels` is this number, and None means that all images have labels.
        """
        return tuple(row for row in self.rows if row.labels == labels)

    def parts(self) -> tuple["Comparison", ...]:
        """Split this comparison by baseline. Return a tuple of comparisons, each with one baseline and the arms (variants) that
        are compared with this baseline.

        `family`, the number of comparisons for the Holm correction, stays that of the whole comparison.
        """
        groups = {baseline: tuple(row for row in self.rows if row.baseline == baseline) for baseline in self.baselines}
        return tuple(
            replace(
                self,
                baselines=(baseline,),
                arms={row.arm: row.role for row in rows},
                labels=tuple(dict.fromkeys(row.labels for row in rows)),
                rows=rows,
            )
            for baseline, rows in groups.items()
        )


def compare(records: Sequence[Record], earlier: int = 0) -> Comparison:
    """Compare each arm (variant) with its baseline by a paired t-test over the seeds, and return a `Comparison`. `records` are
    the results of all runs. `earlier` is the number of finished comparisons whose arms were removed from the recipe file.

    Each number of labelled images is compared separately. Each technique gets a verdict, such as better or inconclusive. The
    `earlier` comparisons still count for the Holm correction.

    A run without a record counts as missing: every arm is expected to have the same seeds and numbers of labels as its
    baseline. A comparison with a missing or failed run, or with runs that used different images, gets no verdict. p-values are
    Holm-corrected for all comparisons of techniques, including those without a test, so a failed run never makes the other
    verdicts easier to reach. Arms whose weights are unavailable are not counted. Records with the role "dependency" are
    ignored.

    Raises ValueError for records of several recipes, no baseline, an arm without a clear baseline, a run that is recorded
    twice, an arm with two roles or two scores, or a score that is not between 0 and 1.
    """
    records = [r for r in records if r.role != "dependency"]
    roles = _roles(records)
    baseline_of = _baselines(records, roles)
    seeds: dict[Cell, set[int]] = {}
    for r in records:
        seeds.setdefault((r.labels, baseline_of[r.arm]), set()).add(r.seed)
    labels = tuple(sorted({n for n, _ in seeds}, key=lambda n: math.inf if n is None else n))
    grid = [(n, arm) for n in labels for arm in baseline_of if (n, baseline_of[arm]) in seeds]
    found = {(r.labels, r.arm, r.seed): r for r in records}
    runs = {(n, arm): {s: found.get((n, arm, s)) for s in sorted(seeds[n, baseline_of[arm]])} for n, arm in grid}
    finished = {cell: {s: r for s, r in cell_runs.items() if r and r.finished} for cell, cell_runs in runs.items()}
    pairs = [(n, arm) for n, arm in grid if roles[arm] != "baseline"]
    differences = {(n, arm): _difference(finished[n, arm], finished[n, baseline_of[arm]]) for n, arm in pairs}
    gaps = {(n, arm): _gaps(arm, runs[n, arm], baseline_of[arm], runs[n, baseline_of[arm]]) for n, arm in grid}
    unavailable = {cell for cell, cell_runs in runs.items() if all(_status(r) == "unavailable" for r in cell_runs.values())}
    judged = [cell for cell in pairs if roles[cell[1]] == "technique" and cell not in unavailable]
    verdicts = _judge({cell: differences[cell] for cell in judged}, gaps, len(judged) + earlier)
    costs = {cell: costs_of(list(cell_runs.values())) for cell, cell_runs in finished.items()}
    rows = []
    for n, arm in grid:
        done, baseline = finished[n, arm], baseline_of[arm]
        values = tuple(r.result for r in done.values())
        mean, sd, low, high = spread(values)
        failed = {s: r for s, r in runs[n, arm].items() if s not in done}
        difference, verdict, reason = verdicts.get((n, arm), (differences.get((n, arm)), None, gaps[n, arm]))
        rows.append(
            Row(
                labels=n,
                arm=arm,
                role=roles[arm],
                baseline=baseline,
                score=next((r.score for r in records if r.arm == arm and r.finished and r.score), "accuracy"),
                seeds=tuple(done),
                values=values,
                mean=mean,
                sd=sd,
                low=low,
                high=high,
                failures={s: ": ".join(filter(None, (_status(r), r and r.error))) for s, r in failed.items()},
                difference=difference,
                verdict=verdict,
                reason=reason,
                budget=costs[n, arm],
                unequal=unequal(costs[n, arm], costs[n, baseline]),
                forward={name: known_median((r.test or {}).get(name) for r in done.values()) for name in FORWARD},
            )
        )
    return Comparison(
        baselines=tuple(dict.fromkeys(baseline_of.values())),
        arms={arm: roles[arm] for arm in baseline_of},
        labels=labels,
        rows=tuple(rows),
        family=len(judged) + earlier,
        earlier=earlier,
    )


def costs_of(records: Sequence[Record]) -> dict[str, float | None]:
    """Return the costs of an arm (variant), such as parameters and training seconds, as a dict by name. `records` are the
    results of its runs. Each cost is the median over these runs, and it includes pretraining.

    The number of extra labels is the maximum over the runs. A cost that does not apply is None, such as the training time of an
    untrained model.

    MACs are those measured on test images if the evaluator `cost` has counted them.
    """

    def paid(r: Record, name: str) -> float | None:
        own = (r.test or {}).get("macs", r.macs) if name == "macs" else getattr(r, name)
        return None if own is None else own + (r.pretraining or {}).get(name, 0)

    spent = {name: known_median(paid(r, name) for r in records) for name in ("params", "macs", "images_seen", "seconds")}
    return spent | {"extra_labels": max(map(extra_labels, records), default=None)}


def extra_labels(record: Record) -> int:
    """Return how many labels a run used in addition to the labels of its training images. These are validation labels for
    choices such as early stopping, and further labels of earlier runs whose weights it uses. `record` holds the results of the
    run.
    """
    earlier = record.pretraining or {}
    before = earlier.get("labels") or 0
    chosen = max((record.chosen_on_val or {}).get("labels", 0), earlier.get("chosen_labels") or 0)
    return chosen + max(0, before - (record.labels or before))


def unequal(costs: dict[str, float | None], baseline_costs: dict[str, float | None]) -> dict[str, float]:
    """Return the relative difference of each cost from the same cost of the baseline, as a dict by name: 0.2 means 20% more,
    and -0.2 means 20% less. Differences of at most 5% are left out.
    """
    excess = {}
    for name, value in costs.items():
        other = baseline_costs[name]
        if value is not None and other is not None and abs(value - other) > TOLERANCE * other:
            excess[name] = value / other - 1 if other else math.inf
    return excess


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None. If all values are None, return None."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def format_seeds(seeds: Sequence[int], total: int | None = None) -> str:
    """Return seeds as text: `seed 3` or `seeds 0, 2`. `total` is the number of all seeds. If the list contains all of them, the
    text is `every seed`.
    """
    return "every seed" if len(seeds) == total else f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _status(record: Record | None) -> str:
    """Return the status of a run as text: `finished`, `failed`, `unavailable` (its pretrained weights could not be obtained) or
    `missing`. If `record` (the results of the run) is None, the run is `missing`.
    """
    return record.status if record else "missing"


def _images(record: Record) -> tuple:
    """Return two hashes that identify the images of a run, as a tuple: the hash of its choice of labelled images and the hash
    of the whole data set. `record` holds the results of the run.
    """
    return record.subset_sha256, record.data_sha256


def _roles(records: Sequence[Record]) -> dict[str, str]:
    """Return a dict from the name of each arm (variant) to its role: "baseline", "technique" or "reference" (a model for
    orientation). `records` are the results of all runs.

    Raises ValueError if the records are of several recipes, if a run occurs twice, or if an arm has two roles or two scores.
    """
    seen: set[tuple] = set()
    roles: dict[str, str] = {}
    scores: dict[str, str | None] = {}
    for r in records:
        run = f"{r.arm!r} at {format_labels(r.labels)}, seed {r.seed}"
        if r.recipe != records[0].recipe:
            raise ValueError(f"records of {records[0].recipe!r} and of {r.recipe!r}: report one recipe at a time")
        if (r.arm, r.labels, r.seed) in seen:
            raise ValueError(f"{run} is recorded twice; keep one record of each run")
        seen.add((r.arm, r.labels, r.seed))
        if roles.setdefault(r.arm, r.role) != r.role:
            raise ValueError(f"{run} is a {r.role}, but was a {roles[r.arm]} in an earlier record; give it one role")
        if r.finished and scores.setdefault(r.arm, r.score) != r.score:
            raise ValueError(f"{run} is judged by {r.score!r}, earlier by {scores[r.arm]!r}; an arm has one score")
    return roles


def _baselines(records: Sequence[Record], roles: dict[str, str]) -> dict[str, str]:
    """Return a dict from the name of each arm (variant) to the name of its baseline. `records` are the results of all runs, and
    `roles` is a dict from the name of each arm to its role, such as "baseline".

    If there is only one baseline, records need not contain its name. The dict lists the arms of one baseline together.
    """
    baselines = [arm for arm, role in roles.items() if role == "baseline"]
    if not baselines:
        raise ValueError(f"at least one arm must have the role baseline; none of {list(roles)} has it")
    baseline_of: dict[str, str] = {}
    for r in records:
        possible = [r.arm] if r.role == "baseline" else baselines
        name = r.baseline or (possible[0] if len(possible) == 1 else "")
        if name not in possible or baseline_of.setdefault(r.arm, name) != name:
            raise ValueError(f"{r.arm!r} has the baseline {name!r}; expected one of {possible}, and the same in all its runs")
    return {arm: baseline for baseline in baselines for arm in baseline_of if baseline_of[arm] == baseline}


def _difference(runs: dict[int, Record], baseline_runs: dict[int, Record]) -> Difference | None:
    """Return the differences between an arm (variant) and its baseline with a paired t-test, as a `Difference`. Both arguments
    are dicts from a seed to the results of the finished run with this seed.

    Only seeds for which both runs used the same images are compared. The result is None if there is no such seed.

    p is None if the differences do not vary.
    """
    from scipy.stats import ttest_rel

    seeds = tuple(s for s in runs if s in baseline_runs and _images(runs[s]) == _images(baseline_runs[s]))
    if not seeds:
        return None
    scores, baseline_scores = [runs[s].result for s in seeds], [baseline_runs[s].result for s in seeds]
    values = tuple(a - b for a, b in zip(scores, baseline_scores))
    _, sd, low, high = spread(values)
    p = float(ttest_rel(scores, baseline_scores).pvalue) if sd is not None and sd > TIE else None
    return Difference(seeds=seeds, values=values, mean=fmean(values), sd=sd, low=low, high=high, p=p)


def _gaps(arm: str, runs: dict[int, Record | None], baseline: str, baseline_runs: dict[int, Record | None]) -> str:
    """Return a text that says for which seeds an arm (variant) cannot be compared with its baseline, and why. The text is empty
    if all seeds can be compared. `runs` and `baseline_runs` are dicts from a seed to the results of a run.

    A seed cannot be compared if a run is missing or failed, or if the two runs used different images.
    """
    found: dict[tuple[str, str], list[int]] = {}
    for name, cell_runs in {arm: runs, baseline: baseline_runs}.items():
        for s, r in cell_runs.items():
            if not (r and r.finished):
                found.setdefault((name, _status(r)), []).append(s)
    for s, r in runs.items():
        other = baseline_runs[s]
        if r and other and r.finished and other.finished and _images(r) != _images(other):
            found.setdefault((arm, f"used other images than {baseline}"), []).append(s)
    return "; ".join(f"{name}, {format_seeds(s, len(runs))}: {problem}" for (name, problem), s in found.items())


def _judge(differences: dict[Cell, Difference | None], gaps: dict[Cell, str], family: int) -> dict[Cell, tuple]:
    """Decide for each arm (variant) whether it is better or worse than its baseline, or inconclusive. `differences` are its
    paired differences, `gaps` are texts about missing runs, and `family` is the number of tests that Holm corrects for.

    A key is the pair (number of labelled images, arm). A value is the tuple (difference with its Holm-corrected p-value,
    verdict, reason as text).
    """
    results: dict[Cell, tuple] = {}
    tested: dict[Cell, Difference] = {}
    for cell, d in differences.items():
        verdict, reason = _untestable(d, gaps[cell], family)
        results[cell] = d, verdict, reason
        if d and not verdict:
            tested[cell] = d
    p_values = [1.0 if d.p is None else d.p for d in tested.values()]
    for (cell, d), p in zip(tested.items(), holm(p_values + [1.0] * (family - len(tested)))):
        verdict = "inconclusive" if p >= LEVEL else "better" if d.mean > 0 else "worse"
        excludes_zero = d.low is not None and d.high is not None and d.low * d.high > 0
        reason = "p is below 0.05 only before the Holm correction" if verdict == "inconclusive" and excludes_zero else ""
        results[cell] = replace(d, p_holm=p), verdict, reason
    return results


def _untestable(difference: Difference | None, gaps: str, family: int) -> tuple[str, str]:
    """Return a verdict and its reason as two texts if no t-test is possible, for example with too few seeds. Otherwise return
    two empty texts. `gaps` is a text about missing runs, and `family` is the number of comparisons.

    A t-test is not possible if runs are missing, if there are too few seeds, or if all differences are equal.
    """
    if gaps or difference is None:
        return "no verdict", gaps
    if (n := len(difference.values)) < MIN_PAIRS:
        if difference.sd is None:
            return "not enough seeds", f"1 of at least {MIN_PAIRS} pairs; a single pair does not tell how many more are needed"
        need = pairs_needed(difference.sd, level=LEVEL / family)
        enough = f"about {need} would show a difference of 1 point with 80% power"
        return "not enough seeds", f"{n} of at least {MIN_PAIRS} pairs; {enough}"
    if difference.p is None and abs(difference.mean) <= TIE:
        return "inconclusive", "equal to the baseline for every seed; check that the technique changes anything"
    if difference.p is None:
        return "no verdict", "the same difference for every seed, so no test is possible; check that the seeds differ"
    return "", ""
