"""Knobs: where an arm differs from its baseline, as recorded; and the one number in which it does, if it is one."""

import json
from collections.abc import Sequence

from .verdicts import Comparison

WORTH_A_PICTURE = 3  # values of a knob, the baseline's included: two are a difference, and the paired one says more
WORDS = {"dim": "width", "lr": "learning rate", "mlp_ratio": "MLP ratio"}


def choices(run: dict) -> dict[str, str]:
    """A described run, choice by choice; what is trained before it is one of them, however much that says of itself."""
    whole = ("init", "teacher")
    rest = flat({name: value for name, value in run.items() if name not in whole})
    return rest | {name: json.dumps(run[name]) for name in whole if run.get(name)}


def flat(value: object, path: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {path: json.dumps(value, ensure_ascii=False)}
    return {k: v for key, inner in value.items() for k, v in flat(inner, f"{path}.{key}".lstrip(".")).items()}


def knobs(comparison: Comparison, records: Sequence[dict]) -> dict[str, dict[str, float]]:
    """For each number that alone tells arms from their one baseline, its name -> arm -> value, the baseline first.

    `tokens`, those that come to the first block, stand beside the patch that made them, where the records have them.
    """
    (baseline,) = comparison.baselines
    of = [r for r in records if r.get("run") and r["arm"] in comparison.arms]
    base = {(r["labels"], r["seed"]): r for r in of if r["arm"] == baseline}
    found: dict[str, dict[str, float]] = {}
    for r in of:
        theirs = base.get((r["labels"], r["seed"]))
        if theirs is None or comparison.arms[r["arm"]] != "technique":
            continue
        said = alone(choices(theirs["run"]), choices(r["run"]))
        if said is None:
            continue
        path, *values = said
        pairs = {name(path): values}
        if theirs.get("tokens") and r.get("tokens") and theirs["tokens"] != r["tokens"]:
            pairs["tokens"] = theirs["tokens"], r["tokens"]
        for knob, (there, here) in pairs.items():
            found.setdefault(knob, {baseline: there})[r["arm"]] = here
    return {knob: arms for knob, arms in found.items() if len(set(arms.values())) >= WORTH_A_PICTURE}


def alone(theirs: dict[str, str], mine: dict[str, str]) -> tuple[str, float, float] | None:
    """The one choice in which two runs differ, there and here, if it is one and both are numbers."""
    differ = [path for path in theirs | mine if theirs.get(path) != mine.get(path)]
    values = [json.loads(of.get(path, "null")) for path in differ for of in (theirs, mine)]
    if len(differ) != 1 or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return None
    return differ[0], *values


def name(path: str) -> str:
    """A knob as one says it: `model.tokenizer.patch` is the patch, `model.dim` the width."""
    last = path.rpartition(".")[2]
    return WORDS.get(last, last.replace("_", " "))
