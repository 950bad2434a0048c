"""Compare each arm with its control, seed by seed: accuracies, differences, verdicts and costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from smallvit.record import Record
from smallvit.words import unit

from .comparison import Cell, Comparison, Row, condition_of, is_unavailable
from .costs import FORWARD, costs_of, known_median, unequal
from .differences import Runs, difference, images_of, interval_on_new_images, is_accuracy, obstacle, same_test_images
from .folds import Pass, pooled
from .judge import Verdict, judge
from .sequential import LOOKS
from .statistics import spread

NO_RUN = "no such run"  # of an arm that lacks a seed of its baseline, in the recipe and in the records


def compare(records: Sequence[Record], earlier: int = 0, *, against: str = "") -> Comparison:
    """Compare each arm (variant) with its control, the arm it is compared with, and return a `Comparison` with all verdicts.
    `records` are the results of all runs. `earlier` is the number of finished comparisons whose arms were later removed from
    the recipe file (the Python file that lists the arms). They still count for the Holm correction of the p-values.

    Each condition (number of labelled images, training length, tuned or not) is compared separately. Each technique gets a
    verdict about new seeds and new test images, such as better or inconclusive.

    The control of an arm is the arm that `Record.baseline` names, by default the only baseline.

    A run without a record counts as missing: every arm is expected to have the same seeds and conditions as its baseline. A
    comparison with a missing or failed run, or with runs that used different images, gets no verdict. p-values are
    Holm-corrected for all comparisons of techniques, including those without a test, so a failed run never makes the other
    verdicts easier to reach. Arms whose weights are unavailable are not counted. Records with the role "dependency" are
    ignored.

    Published records say themselves how many comparisons were removed (`Record.removed`). The larger of this number and
    `earlier` counts.

    If any record has `looks` (numbers of seeds at which the comparison is tested), all comparisons of the recipe are tested at
    these looks. An arm then needs no more seeds than its last look, and later runs are not expected of it.

    In a cross-validation, a complete pass over all folds takes the place of a seed.

    against    the name of an arm that becomes the control of all others, for example a reference such as "small CNN"; empty:
               each arm has the control that the recipe names. The Holm correction counts these comparisons only. If the control
               is chosen after the results are known, say so beside the verdicts.

    Raises ValueError for records of several recipes, an unknown arm in `against`, no baseline, an arm without a clear control,
    controls that form a circle, a run that is recorded twice, an arm with two roles or two scores, folds that differ or do not
    contain every image once, and a score that is not between 0 and 1 or, if lower scores are better, not finite and at least 0.
    """
    earlier = max([earlier, *(r.removed or 0 for r in records)])
    records = [r for r in records if r.role != "dependency"]
    if against:
        records = with_control(records, against)
    roles = roles_of(records)
    records = pooled(records)
    controls = controls_of(records, roles)
    groups = groups_of(controls, roles)
    looks = schedule(records)
    runs = runs_by_cell(records, roles, groups)
    if against:  # an arm is not expected in all conditions of a control that the recipe did not choose for it
        runs = {cell: each for cell, each in runs.items() if any(each.values())}
    others: dict[Cell, Runs] = {cell: runs.get((cell[0], controls[cell[1]]), {}) for cell in runs}
    pairs = [(c, arm) for c, arm in runs if roles[arm] != "baseline"]
    unavailable = {cell for cell in pairs if is_unavailable(map(status_of, runs[cell].values()))}
    judged = [cell for cell in pairs if roles[cell[1]] == "technique" and cell not in unavailable]
    scores = {cell: why for cell in pairs if (why := unequal_scores(runs[cell], controls[cell[1]], others[cell]))}
    measured = [cell for cell in pairs if cell not in scores]
    tests = {cell: difference(runs[cell], others[cell], looks if cell in judged else ()) for cell in measured}
    gaps = {cell: gaps_of(cell[1], runs[cell], controls[cell[1]], others[cell], looks) for cell in runs}
    untuned = {cell: why for cell in judged if (why := unequal_tuning(runs[cell], controls[cell[1]], others[cell]))}
    gaps |= untuned | scores
    verdicts = judge({cell: tests.get(cell) for cell in judged}, gaps, len(judged) + earlier, looks)
    costs = {cell: costs_of([r for r in each.values() if r and r.finished]) for cell, each in runs.items()}
    rows = []
    for cell, each in runs.items():
        c, arm = cell
        done = {s: r for s, r in each.items() if r and r.finished}
        values = tuple(r.result for r in done.values())
        mean, sd, low, high = spread(values)
        found = verdicts.get(cell)
        rows.append(
            Row(
                condition=c,
                arm=arm,
                role=roles[arm],
                baseline=controls[arm],
                group=groups[arm],
                score=next((r.score for r in records if r.arm == arm and r.finished and r.score), "accuracy"),
                lower_is_better=any(r.lower_is_better for r in done.values()),
                folds=next((r.folds for r in each.values() if r), None),
                data=next((r.data_sha256 for r in done.values()), None),
                seeds=tuple(done),
                values=values,
                mean=mean,
                sd=sd,
                low=low,
                high=high,
                new_images=interval_on_new_images(list(done.values())),
                failures=failures_of(each, bool(looks)),
                difference=found.difference if found else tests.get(cell),
                verdict=found.verdict if found else None,
                reason=found.reason if found else gaps[cell],
                looks=looks or None,
                stopped=found.stopped if found else "",
                next_look=next_look(found, each, others[cell], looks) if found and looks and cell not in untuned else None,
                budget=costs[cell],
                unequal=unequal(costs[cell], costs.get((c, controls[arm]), costs[cell])),
                forward={name: known_median((r.test or {}).get(name) for r in done.values()) for name in FORWARD},
            )
        )
    return Comparison(
        recipe=records[0].recipe,
        baselines=tuple(dict.fromkeys(groups.values())),
        arms={arm: roles[arm] for arm in groups},
        conditions=tuple(dict.fromkeys(c for c, _ in runs)),
        rows=tuple(rows),
        family=len(judged) + earlier,
        earlier=earlier,
    )


def with_control(records: Sequence[Record], control: str) -> list[Record]:
    """Return records in which all arms (variants) have the same control, the arm called `control`. It becomes the baseline, and
    baselines become techniques. Other references stay references. `records` are the results of all runs of a comparison.
    """
    if control not in (arms := list(dict.fromkeys(r.arm for r in records))):
        raise ValueError(f"there is no arm {control!r} that could be the control; expected one of {', '.join(map(repr, arms))}")
    roles = {"baseline": "technique"}
    return [
        replace(r, role="baseline", baseline="")
        if r.arm == control
        else replace(r, role=roles.get(r.role, r.role), baseline=control)
        for r in records
    ]


def next_looks(
    records: Sequence[Record], looks: Sequence[int] = LOOKS, *, max_seeds: int | None = None, earlier: int = 0
) -> dict[Cell, int]:
    """Return which arms (variants) need more seeds before they are decided, as a dict from (condition, arm) to a number of
    seeds. A look is a test at a planned number of seeds. `records` are the results of all runs so far.

    The number is that of the next look of an arm. The dict is empty if nothing is left to do.

    A technique needs more seeds unless it is decided (better or worse), an effect of 0.5 points is excluded, a verdict is
    hopeless, a run has failed, or all looks are taken. Its control needs as many seeds as it does, and so on up to the
    baseline. Baselines and references need at least those of the first look.

    Call it after each batch of runs with all records so far. Then run each arm with its first `result[condition, arm]` seeds,
    and call it again. Arms without any record are unknown here: give them records with the status "missing".

    looks      numbers of seeds at which the comparisons are tested: `LOOKS`, or `ADDED_LOOKS` if the recipe had a result
               with 8 seeds before
    max_seeds  looks with more seeds are not asked for; the tests stay those of the whole schedule
    earlier    number of finished comparisons whose arms were removed from the recipe file; they count for the Holm correction
    """
    comparison = compare([replace(r, looks=list(looks)) for r in records], earlier)
    rows = {(row.condition, row.arm): row for row in comparison.rows}
    found: dict[Cell, int] = {}
    for (c, arm), row in rows.items():
        wanted = row.next_look if row.role == "technique" else None if row.failed or len(row.seeds) >= looks[0] else looks[0]
        if wanted is None or wanted > (max_seeds or looks[-1]):
            continue
        while True:  # from the arm to its control, and so on up to the baseline
            found[c, arm] = max(wanted, found.get((c, arm), 0))
            if rows[c, arm].role == "baseline" or (c, rows[c, arm].baseline) not in rows:
                break
            arm = rows[c, arm].baseline
    return {cell: n for cell, n in found.items() if len(rows[cell].seeds) < n}


def next_look(found: Verdict, runs: Runs, control: Runs, looks: Sequence[int]) -> int | None:
    """Return the number of seeds at the next planned test (look) of an arm (variant). None means that it needs no more seeds,
    or that a failed run makes later tests impossible. `found` is its verdict so far. `runs` and `control` are dicts from a seed
    to the results of a run of the arm and of the arm it is compared with. `looks` lists the planned numbers of seeds.

    A failed run, or a pair of runs with different images, stops an arm: no later look can be taken. The same holds for a score
    that cannot be tested and for too few test images.
    """
    d = found.difference
    later = [n for n in looks if d is None or not d.looks or n > d.looks[-1]]
    untestable = d is not None and len(d.values) > 1 and not d.enough_images
    return None if found.stopped or not later or untestable or obstacle(runs, control, looks) else later[0]


def schedule(records: Sequence[Record]) -> tuple[int, ...]:
    """Return the planned numbers of seeds at which a comparison is tested while seeds are added, as a tuple. `records` are the
    results of the runs, which contain these numbers. The tuple is empty if the comparison is tested once, with all seeds.

    Some records may lack the schedule, because seeds were added to a recipe that had a result before. The longest schedule
    counts for all: its p-values are valid wherever the series stopped.
    """
    return max((tuple(r.looks) for r in records if r.looks), key=lambda looks: (looks[-1], len(looks)), default=())


def runs_by_cell(
    records: Sequence[Record], roles: Mapping[str, str], groups: Mapping[str, str]
) -> dict[Cell, dict[int, Record | None]]:
    """Return the runs of each condition (number of labels, training length, tuned or not) and arm (variant), as a nested dict:
    `result[condition, arm][seed]` is a record (results of a run), or None if there is none. `records` are the results of all
    runs. `roles` is a dict from an arm to its role, such as "technique", and `groups` is a dict from an arm to its baseline.

    Every arm is expected to have all seeds of its group. References have seeds of their own, which nobody else needs; one
    without any run in a condition is left out there.
    """
    found: dict[Cell, dict[int, Record]] = {}
    seeds: dict[Cell, set[int]] = {}
    for r in records:
        found.setdefault((condition_of(r), r.arm), {})[r.seed] = r
        if roles[r.arm] != "reference":
            seeds.setdefault((condition_of(r), groups[r.arm]), set()).add(r.seed)
    return {
        (c, arm): {s: found.get((c, arm), {}).get(s) for s in sorted({*seeds.get((c, group), ()), *found.get((c, arm), ())})}
        for c in sorted({c for c, _ in found}, key=lambda c: c.order)
        for arm, group in groups.items()
        if (c, arm) in found or (roles[arm] != "reference" and (c, group) in seeds)
    }


def roles_of(records: Sequence[Record]) -> dict[str, str]:
    """Return a dict from the name of each arm (variant) to its role: "baseline", "technique" or "reference" (a model for
    orientation). `records` are the results of all runs.

    Raises ValueError if the records are of several recipes, if a run occurs twice, or if an arm has two roles or two scores.
    """
    seen: set[tuple] = set()
    roles: dict[str, str] = {}
    scores: dict[str, str | None] = {}
    for r in records:
        run = f"{r.arm!r} at {condition_of(r).title}, seed {r.seed}"
        if r.recipe != records[0].recipe:
            raise ValueError(f"records of {records[0].recipe!r} and of {r.recipe!r}: report one recipe at a time")
        if (r.arm, condition_of(r), r.seed) in seen:
            raise ValueError(f"{run} is recorded twice; keep one record of each run")
        seen.add((r.arm, condition_of(r), r.seed))
        if roles.setdefault(r.arm, r.role) != r.role:
            raise ValueError(f"{run} is a {r.role}, but was a {roles[r.arm]} in an earlier record; give it one role")
        if r.finished and scores.setdefault(r.arm, r.score) != r.score:
            raise ValueError(f"{run} is judged by {r.score!r}, earlier by {scores[r.arm]!r}; an arm has one score")
    return roles


def controls_of(records: Sequence[Record], roles: Mapping[str, str]) -> dict[str, str]:
    """Return a dict from the name of each arm (variant) to the name of the arm it is compared with. `records` are the results
    of all runs, and `roles` is a dict from the name of each arm to its role, such as "baseline".

    A baseline is compared with itself. If there is only one baseline, records need not contain its name.
    """
    baselines = [arm for arm, role in roles.items() if role == "baseline"]
    if not baselines:
        raise ValueError(f"at least one arm must have the role baseline; none of {list(roles)} has it")
    controls: dict[str, str] = {}
    for r in records:
        default = r.arm if r.role == "baseline" else baselines[0] if len(baselines) == 1 else ""
        name = r.baseline or default
        possible = [r.arm] if r.role == "baseline" else [arm for arm in roles if arm != r.arm]
        if name not in possible or controls.setdefault(r.arm, name) != name:
            raise ValueError(f"{r.arm!r} has the baseline {name!r}; expected one of {possible}, and the same in all its runs")
    return controls


def chain_of(arm: str, controls: Mapping[str, str]) -> list[str]:
    """Return an arm (variant), its control, the control of this control, and so on. The chain ends at an arm that has no
    control but itself, or before it would be a circle. `controls` is a dict from an arm to the arm it is compared with.
    """
    chain = [arm]
    while (control := controls.get(chain[-1], arm)) not in chain:
        chain.append(control)
    return chain


def groups_of(controls: Mapping[str, str], roles: Mapping[str, str]) -> dict[str, str]:
    """Return a dict from the name of each arm (variant) to its baseline. `controls` is a dict from an arm to its control, the
    arm it is compared with. A control may have a control itself; this chain is followed up to a baseline. `roles` is a dict
    from an arm to its role, such as "baseline".

    The dict lists the arms of one baseline together, after the baseline itself. Raises ValueError if the controls of some arms
    form a circle.
    """
    ends: dict[str, str] = {}
    for arm in controls:
        chain = chain_of(arm, controls)
        if roles[chain[-1]] != "baseline":
            circle = " -> ".join([*chain, controls[chain[-1]]])
            raise ValueError(f"the baselines of these arms form a circle: {circle}; expected a chain that ends at a baseline")
        ends[arm] = chain[-1]
    baselines = [arm for arm in controls if roles[arm] == "baseline"]
    ordered = sorted(ends, key=lambda arm: roles[arm] != "baseline")  # stable: the other arms keep their order
    return {arm: baseline for baseline in baselines for arm in ordered if ends[arm] == baseline}


def gaps_of(arm: str, runs: Runs, control: str, control_runs: Runs, looks: Sequence[int] = ()) -> str:
    """Return a text that says for which seeds the arm (variant) `arm` cannot be compared with the arm `control`, and why. The
    text is empty if all seeds can be compared. `runs` and `control_runs` are dicts from a seed to the results of a run of these
    arms. `looks` lists the planned numbers of seeds at which they are tested; empty: one test with all seeds.

    A seed cannot be compared if a run is missing or failed, or if the two runs used different images. All runs must be scored
    on the same test images. With `looks` (numbers of seeds at which the comparison is tested), runs that are still to come are
    no gap: runs may be missing after the seeds of the first look. All runs up to the last one of the arm count, so that a
    failure is never left out.
    """
    found: dict[tuple[str, str], list[int]] = {}
    seeds = needed = list(runs)
    if looks:
        last, control_last = (
            max((s for s, r in each.items() if status_of(r) != "missing"), default=-1) for each in (runs, control_runs)
        )
        needed = [s for s in sorted(runs)[: looks[0]] if s <= max(last, control_last)]
        seeds = [s for s in sorted(runs) if s in needed or s <= last]
    for name, each in {arm: runs, control: control_runs}.items():
        for s in seeds:
            if not ((r := each.get(s)) and r.finished) and (s in needed or status_of(r) != "missing"):
                problem = (r.gap if isinstance(r, Pass) else "") or status_of(r)
                problem += f", {NO_RUN}" * (r is None and any(each.values()))
                found.setdefault((name, problem), []).append(s)
    for s in seeds:
        r, other = runs[s], control_runs.get(s)
        if r and other and r.finished and other.finished and images_of(r) != images_of(other):
            found.setdefault((arm, f"used other images than {control}"), []).append(s)
    if not found and not same_test_images(each.get(s) for each in (runs, control_runs) for s in seeds):
        return f"the runs of {arm} and {control} were scored on different test images"
    one = unit(any(r and r.folds for r in (*runs.values(), *control_runs.values())))
    return "; ".join(f"{name}, {format_seeds(s, len(runs), one)}: {problem}" for (name, problem), s in found.items())


def unequal_tuning(runs: Runs, control: str, control_runs: Runs) -> str:
    """Return a text that says that an arm (variant) and the arm `control`, with which it is compared, were tuned with different
    numbers of trials. The text is empty if the numbers are equal, or if one of the two was not trained, so that it has nothing
    to tune. But an arm that is the trained control, with something exchanged afterwards, must be the tuned one. `runs` and
    `control_runs` are dicts from a seed to the results of a run of these arms.
    """
    mine, other = first_finished(runs), first_finished(control_runs)
    if mine is None or other is None or not mine.tuning or not other.tuning:
        return ""
    if 0 in (mine.steps, other.steps):
        return "" if not starts_untuned(mine, other) else f"starts from {control} as it was before the tuning"
    counts = [tuning.get("trials", 0) for tuning in (mine.tuning, other.tuning)]
    if counts[0] == counts[1]:
        return ""
    if not counts[0]:
        return "not tuned, while its baseline was"
    return f"tuned with {counts[0]} trials, and {control} with {counts[1]}"


def starts_untuned(run: Record, control: Record) -> bool:
    """Return whether a run that is not trained itself has the weights of its control, but of a training with the settings from
    before the tuning. `run` and `control` are their records.
    """
    start, settings = run.run.get("init"), (control.tuning or {}).get("settings") or {}
    if not isinstance(start, dict) or not start.keys() >= control.run.keys():
        return False
    changed = {name for name, value in control.run.items() if start[name] != value}
    return bool(changed) and changed <= {name if name in control.run else "model" for name in settings}


def unequal_scores(runs: Runs, control: str, control_runs: Runs) -> str:
    """Return a text that says that an arm (variant) and the arm `control`, with which it is compared, are judged by different
    scores, whose difference has no meaning. The text is empty if the scores are the same, or if both are accuracies. `runs` and
    `control_runs` are dicts from a seed to the results of a run of these arms.
    """
    mine, other = first_finished(runs), first_finished(control_runs)
    if mine is None or other is None or mine.score == other.score:
        return ""
    return "" if is_accuracy(mine) and is_accuracy(other) else f"judged by {mine.score}, and {control} by {other.score}"


def first_finished(runs: Runs) -> Record | None:
    """Return the record (results) of the first finished run of an arm (variant), or None if none has finished. `runs` is a dict
    from a seed to the results of a run of this arm.
    """
    return next((record for record in runs.values() if record and record.finished), None)


def failures_of(runs: Runs, sequential: bool) -> dict[int, str]:
    """Return a dict from each seed without a result to the status and the error of its run, as text. `runs` is a dict from a
    seed to the results of a run of one arm (variant). A seed that only other arms have is one too: its reason is that there is
    no such run.

    With `sequential=True`, seeds are added step by step. Seeds after the last run of the arm are then left out: the arm has
    stopped, or waits for its next look.
    """
    last = max((s for s, r in runs.items() if r), default=-1)
    return {
        s: ": ".join(filter(None, (status_of(r), r.error if r else NO_RUN)))
        for s, r in runs.items()
        if not (r and r.finished) and not (sequential and s > last)
    }


def format_seeds(seeds: Sequence[int], total: int | None = None, unit: str = "seed") -> str:
    """Return seeds as text: `seed 3` or `seeds 0, 2`. `total` is the number of all seeds. If the list contains all of them, the
    text is `every seed`. `unit` is the word for one of them: "seed", or "pass" in a cross-validation.
    """
    if len(seeds) == total:
        return f"every {unit}"
    plural = {"seed": "seeds", "pass": "passes"}[unit]
    return f"{plural if len(seeds) > 1 else unit} {', '.join(map(str, seeds))}"


def status_of(record: Record | None) -> str:
    """Return the status of a run as text: `finished`, `failed`, `interrupted` (by a full disk or the like), `unavailable` (its
    pretrained weights could not be obtained) or `missing`. If `record` (the results of the run) is None, the run is `missing`.
    """
    return record.status if record else "missing"
