"""Records -> verdicts: every arm against its baseline, seed by seed. Accuracies are fractions here, percent on the pages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from smallvit.record import format_labels

from .budgets import budget, middle, unequal
from .statistics import LEVEL, MIN_PAIRS, TIE, holm, pairs_needed, spread

FORWARD = ("tokens", "macs_sd", "ms", "speedup")  # what the evaluator `cost` may say of a forward pass


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Arm minus baseline, seed by seed, with a paired t-test; no `p_holm` for references and for what cannot be tested."""

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
    """One arm at one number of labels. Baselines and references are not judged: their `verdict` is None.

    against   the arm of its baseline; a baseline's own
    failures  seed -> what became of it (failed, unavailable or missing), for each seed that left no number
    budget    params, macs, images_seen, seconds: medians over the seeds, pretraining included; and extra_labels, the
              validation labels on which something was chosen, and those of a start that had more: a fair competitor would
              have had them too
    unequal   budget -> its relative excess over the baseline's, where they are more than 5% apart
    forward   tokens, macs_sd, ms, speedup of a forward pass: medians over the seeds; None where `cost` has not said
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
        """Whether none of its runs could be, for want of weights: then it is no failure, and nothing is said of it."""
        return bool(self.failures) and not self.values and all(why.startswith("unavailable") for why in self.failures.values())


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows of a recipe, by label count and then arm by arm; `family` counts the comparisons Holm pays for.

    `arms` (arm -> role) and the rows stand baseline by baseline, each with the arms held against it.
    """

    baselines: tuple[str, ...]
    arms: dict[str, str]
    labels: tuple[int | None, ...]
    rows: tuple[Row, ...]
    family: int

    @property
    def baseline(self) -> str:
        """What arms are held against, in words: the baseline, or where there are several, `each arm's own baseline`."""
        return self.baselines[0] if len(self.baselines) == 1 else "each arm's own baseline"

    @property
    def reduced(self) -> bool:
        """Whether the evaluator `cost` has said of some arm what fewer tokens buy."""
        return any(row.forward[name] is not None for row in self.rows for name in ("tokens", "speedup"))

    def at(self, labels: int | None) -> tuple[Row, ...]:
        """The rows of one label count."""
        return tuple(row for row in self.rows if row.labels == labels)

    def parts(self) -> tuple["Comparison", ...]:
        """One comparison for each baseline; the family stays the recipe's."""
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


def compare(records: Sequence[dict]) -> Comparison:
    """Every arm against its baseline at every label count, with one verdict for each technique.

    The grid is, for each baseline, its arms x its label counts x the seeds seen there; a run that nobody recorded is a failure
    like any other, and a cell with a failure gets no verdict. Holm's family is every technique at every label count, testable
    or not, so a run that died never makes its neighbours easier to believe; only an arm whose weights are not to be had here,
    which no result can bring about, is left out of it. A pair whose labelled subsets differ is no pair:
    its cell gets no verdict rather than a `ValueError`, because one stale run should not hide the others.

    Raises ValueError for no baseline, an arm of several of which it names none, a cell recorded twice, an arm of two roles or
    scores, or an unusable score.
    """
    roles = _roles(records)
    against = _against(records, roles)
    planned = {(r["labels"], against[r["arm"]], r["seed"]) for r in records}
    labels = tuple(sorted({n for n, _, _ in planned}, key=lambda n: math.inf if n is None else n))
    seeds = {(n, base): sorted(s for m, other, s in planned if (m, other) == (n, base)) for n, base, _ in planned}
    grid = [(n, arm) for n in labels for arm in against if (n, against[arm]) in seeds]
    found = {(r["labels"], r["arm"], r["seed"]): r for r in records}
    runs = {(n, arm): {s: found.get((n, arm, s), {"status": "missing"}) for s in seeds[n, against[arm]]} for n, arm in grid}
    done = {cell: {s: r for s, r in of.items() if r["status"] == "finished"} for cell, of in runs.items()}
    differences = {(n, arm): _difference(done[n, arm], done[n, against[arm]]) for n, arm in grid if arm != against[arm]}
    gaps = {(n, arm): _gaps(arm, runs[n, arm], against[arm], runs[n, against[arm]]) for n, arm in grid}
    absent = {cell for cell, of in runs.items() if all(r["status"] == "unavailable" for r in of.values())}
    techniques = {cell: d for cell, d in differences.items() if roles[cell[1]] == "technique" and cell not in absent}
    judged = _judge(techniques, gaps)
    costs = {cell: budget(list(of.values())) for cell, of in done.items()}
    rows = []
    for n, arm in grid:
        own = done[n, arm]
        values = tuple(_score(r) for r in own.values())
        mean, sd, low, high = spread(values)
        failures = {s: ": ".join(filter(None, (r["status"], r.get("error")))) for s, r in runs[n, arm].items() if s not in own}
        difference, verdict, reason = judged.get((n, arm), (differences.get((n, arm)), None, gaps[n, arm]))
        score = next((r["score"] for r in records if r["arm"] == arm and r["status"] == "finished"), "accuracy")
        rows.append(
            Row(
                labels=n,
                arm=arm,
                role=roles[arm],
                baseline=against[arm],
                score=score,
                seeds=tuple(own),
                values=values,
                mean=mean,
                sd=sd,
                low=low,
                high=high,
                failures=failures,
                difference=difference,
                verdict=verdict,
                reason=reason,
                budget=costs[n, arm],
                unequal=unequal(costs[n, arm], costs[n, against[arm]]),
                forward={name: middle(r["test"].get(name) for r in own.values()) for name in FORWARD},
            )
        )
    return Comparison(
        baselines=tuple(dict.fromkeys(against.values())),
        arms={arm: roles[arm] for arm in against},
        labels=labels,
        rows=tuple(rows),
        family=len(judged),
    )


def seeds_text(seeds: Sequence[int], of: int | None = None) -> str:
    """`seed 3`, `seeds 0, 2`, or `every seed` where they are all `of` them."""
    return "every seed" if len(seeds) == of else f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _score(record: dict) -> float:
    return record["test"][record["score"]]


def _images(record: dict) -> tuple:
    """What says which images a run saw."""
    return record.get("subset_sha256"), record.get("data_sha256")


def _roles(records: Sequence[dict]) -> dict[str, str]:
    """The role of every arm in order of appearance, once the records are known to be one comparable set."""
    seen, roles, scores = set(), {}, {}
    for r in records:
        cell = f"{r['arm']!r} at {format_labels(r['labels'])}, seed {r['seed']}"
        if r["recipe"] != records[0]["recipe"]:
            raise ValueError(f"records of {records[0]['recipe']!r} and of {r['recipe']!r}: report one recipe at a time")
        if r["role"] not in ("baseline", "technique", "reference") or r["status"] not in (
            "finished",
            "failed",
            "unavailable",
            "missing",
        ):
            raise ValueError(f"{cell}: role {r['role']!r} or status {r['status']!r} is not a known one; write the record again")
        if cell in seen:
            raise ValueError(f"{cell} is recorded twice; keep one record of each run")
        seen.add(cell)
        if roles.setdefault(r["arm"], r["role"]) != r["role"]:
            raise ValueError(f"{cell} is a {r['role']}, but was a {roles[r['arm']]} in an earlier record; give it one role")
        if r["status"] != "finished":
            continue
        if scores.setdefault(r["arm"], r["score"]) != r["score"]:
            raise ValueError(f"{cell} is judged by {r['score']!r}, earlier by {scores[r['arm']]!r}; an arm has one score")
        value = r["test"].get(r["score"])
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{cell}: test has no {r['score']!r} between 0 and 1, but {r['test']}; run it again")
    return roles


def _against(records: Sequence[dict], roles: dict[str, str]) -> dict[str, str]:
    """The baseline of every arm, baseline by baseline; where there is only one, an arm need not name it."""
    baselines = [arm for arm, role in roles.items() if role == "baseline"]
    if not baselines:
        raise ValueError(f"at least one arm must have the role baseline, but of {list(roles)} none has it")
    against = {}
    for r in records:
        possible = [r["arm"]] if r["role"] == "baseline" else baselines
        name = r.get("baseline") or (possible[0] if len(possible) == 1 else "")
        if name not in possible or against.setdefault(r["arm"], name) != name:
            raise ValueError(f"{r['arm']!r} is held against {name!r}; expected one of {possible}, and the same in all its runs")
    return {arm: baseline for baseline in baselines for arm in against if against[arm] == baseline}


def _difference(own: dict[int, dict], base: dict[int, dict]) -> Difference | None:
    """The paired t-test over the seeds that both finished on the same images; no p where the differences do not scatter."""
    from scipy.stats import ttest_rel

    seeds = tuple(s for s in own if s in base and _images(own[s]) == _images(base[s]))
    if not seeds:
        return None
    arm, reference = [_score(own[s]) for s in seeds], [_score(base[s]) for s in seeds]
    values = tuple(a - b for a, b in zip(arm, reference))
    mean, sd, low, high = spread(values)
    p = float(ttest_rel(arm, reference).pvalue) if sd is not None and sd > TIE else None
    return Difference(seeds=seeds, values=values, mean=mean, sd=sd, low=low, high=high, p=p)


def _gaps(arm: str, own: dict[int, dict], baseline: str, base: dict[int, dict]) -> str:
    """What keeps the pairs from being complete, in words; empty where nothing does."""
    found = {}
    for name, runs in {arm: own, baseline: base}.items():
        for s in runs:
            if runs[s]["status"] != "finished":
                found.setdefault((name, runs[s]["status"]), []).append(s)
    for s in own:
        finished = own[s]["status"] == base[s]["status"] == "finished"
        if finished and _images(own[s]) != _images(base[s]):
            found.setdefault((arm, f"not trained and tested on the images of {baseline}"), []).append(s)
    return "; ".join(f"{name}, {seeds_text(s, len(own))}: {what}" for (name, what), s in found.items())


def _judge(differences: dict[tuple, Difference | None], gaps: dict[tuple, str]) -> dict[tuple, tuple]:
    """Cell -> (difference with its Holm p, verdict, reason); a cell that cannot be tested stays in Holm's family with p = 1."""
    family = len(differences)
    out = {cell: (d, *_untestable(d, gaps[cell], family)) for cell, d in differences.items()}
    tested = [cell for cell, (_, verdict, _) in out.items() if not verdict]
    adjusted = holm([differences[cell].p for cell in tested] + [1.0] * (family - len(tested)))
    for cell, p in zip(tested, adjusted):
        d = replace(differences[cell], p_holm=p)
        word = "inconclusive" if p >= LEVEL else "better" if d.mean > 0 else "worse"
        strays = word == "inconclusive" and d.low * d.high > 0
        out[cell] = d, word, f"the interval leaves out zero, but {family} comparisons were made" if strays else ""
    return out


def _untestable(d: Difference | None, gaps: str, family: int) -> tuple[str, str]:
    """The verdict and its reason where no test can be made; two empty strings where one can."""
    if gaps or d is None:
        return "no verdict", gaps
    if (n := len(d.values)) < MIN_PAIRS:
        if d.sd is None:
            return "not enough seeds", f"1 of at least {MIN_PAIRS} pairs, and one has no spread to plan more with"
        need = pairs_needed(d.sd, level=LEVEL / family)
        return "not enough seeds", f"{n} of at least {MIN_PAIRS} pairs; about {need} would show a 1-point effect with 80% power"
    if d.p is None and abs(d.mean) <= TIE:
        return "inconclusive", "equal to the baseline in every seed; did the technique change anything?"
    if d.p is None:
        return "no verdict", "the same difference in every seed, so there is no spread to hold it against; do the seeds differ?"
    return "", ""
