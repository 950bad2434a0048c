"""Where the numbers of a report come from: what the arms were, what ran them, and what makes them less comparable."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from smallvit.record import format_labels

from .choices import choices
from .statistics import MIN_PAIRS, TIE, spread
from .verdicts import Comparison

COMPUTED = ("device", "precision", "threads", "kernel", "compiled")  # how, as the records say it


def warnings(records: Sequence[dict]) -> list[str]:
    """What makes the arms less comparable than the table looks."""
    facts: dict[str, dict[str, dict]] = {}
    for r in records:
        mine = {name: r.get(name) for name in ("cpu", *COMPUTED)}
        mine |= {"code": r["code"].get("sha256")} if r.get("code") else {}
        if data := (r.get("run") or {}).get("data"):
            mine[f"content of {loader(data)}"] = r.get("data_sha256")
        mine |= {f"{name} version": version for name, version in (r.get("versions") or {}).items()}
        for name, value in mine.items():
            if value is not None:
                facts.setdefault(name, {}).setdefault(str(value), {})[r["arm"]] = None
    mixed = {name: of for name, of in facts.items() if len(of) > 1}
    out = [f"AttentionOutput {name}: " + "; ".join(f"{v} in {', '.join(arms)}" for v, arms in of.items()) for name, of in mixed.items()]
    scores = dict.fromkeys(r["score"] for r in records if r["score"] and r["role"] != "reference")
    dirty = sum(bool((r.get("code") or {}).get("dirty")) for r in records)
    reads = sum((r.get("test_reads") or 0) > 1 for r in records)
    elsewhere = list(dict.fromkeys(r["arm"] for r in records if "make" in ((r.get("run") or {}).get("init") or {})))
    repeats = max((r.get("test_repeats") or 0 for r in records), default=0)
    out += [f"Test images that are training or validation images too, pixel by pixel: {repeats:,}"] if repeats else []
    out += [f"What it took to train weights elsewhere is in no budget: {', '.join(elsewhere)}"] if elsewhere else []
    out += [f"Baseline and techniques are judged by different numbers: {', '.join(scores)}"] if len(scores) > 1 else []
    out += [f"Runs of code with uncommitted changes, so that the commit does not say what ran: {dirty}"] if dirty else []
    out += [f"Runs that read the test split more than once: {reads}"] if reads else []
    return out + no_better_than_guessing(records)


def no_better_than_guessing(records: Sequence[dict]) -> list[str]:
    """Every arm that is not shown to do better than calling each test image by the most frequent class."""
    cells: dict[tuple, list[dict]] = {}
    for r in records:
        if r["status"] == "finished" and r.get("test_majority") and r["role"] != "reference" and r["score"] == "accuracy":
            cells.setdefault((r["arm"], r["labels"]), []).append(r)
    out = []
    for (arm, labels), own in cells.items():
        mean, _, low, _ = spread([r["test"]["accuracy"] for r in own])
        majority = own[0]["test_majority"]
        if (mean if len(own) < MIN_PAIRS else low) <= majority + TIE:
            out.append(
                f"{arm} at {format_labels(labels)}: {100 * mean:.2f}%, not shown to be better than calling every image by the most "
                f"frequent class ({100 * majority:.2f}%); was it trained long enough?"
            )
    return out


def loader(data: dict) -> str:
    """What loads the data, with its choices."""
    choices = ", ".join(f"{name}={value}" for name, value in data.items() if name != "call" and value is not None)
    return f"{data.get('call', '').rpartition('.')[2]}({choices})"


def changes(c: Comparison, records: Sequence[dict]) -> dict[str, list[str]]:
    """Arm -> the fields of its runs that differ from its baseline's run with the same labels and seed."""
    against, starts = {row.arm: row.baseline for row in c.rows}, started_from(records)
    base = {(r["arm"], r["labels"], r["seed"]): choices(r["run"]) for r in records if r["role"] == "baseline" and r.get("run")}
    runs, seen = Counter(), {}
    for r in records:
        theirs = base.get((against[r["arm"]], r["labels"], r["seed"]))
        if r["role"] == "baseline" or theirs is None or not r.get("run"):
            continue
        mine = choices(r["run"])
        fields = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
        swapped = tuple(name.removesuffix("call") for name in fields if name.endswith(".call") and name in mine)
        fields = [name for name in fields if name in mine or not name.startswith(swapped)]  # what went with its component
        fields = [name for name in fields if f"{name}.call" not in mine]  # an empty slot that is filled has its own line
        runs[r["arm"]] += 1
        said = {name: (theirs.get(name, "absent"), mine.get(name, "absent")) for name in fields}
        if "init" in said:
            said["init"] = starts.get(against[r["arm"]], "absent"), starts.get(r["arm"], "absent")
        if "teacher" in said:
            said["teacher"] = taught_by(theirs), taught_by(mine)
        seen.setdefault(r["arm"], Counter()).update(f"{name}: {there} → {here}" for name, (there, here) in said.items())
    for arm, of in seen.items():
        seen[arm] = [line + f" (in {k} of {runs[arm]} runs)" * (k < runs[arm]) for line, k in of.items()] or ["nothing"]
    return seen


def taught_by(choices: dict[str, str]) -> str:
    """Who teaches a run with these choices."""
    teacher = json.loads(choices.get("teacher", "null"))
    return f"a run of {teacher['model']['call'].rpartition('.')[2]}" if teacher else "absent"


def started_from(records: Sequence[dict]) -> dict[str, str]:
    """Arm -> whose weights its runs start from, in a few words: an arm's, or those of runs that are no arm here."""
    arms, found = {r["fingerprint"]: r["arm"] for r in records}, {}
    for r in records:
        init = (r.get("run") or {}).get("init") or {}
        if "make" in init:
            found[r["arm"]] = {init["name"]: None}
        elif init:
            start = (r.get("pretraining") or {}).get("fingerprint")  # a run that failed does not say
            found.setdefault(r["arm"], {}).update({arms.get(start, start): None} if start else {})
    return {arm: f"weights of {cut(names, 1) or 'another run'}" for arm, names in found.items()}


def unlabelled(records: Sequence[dict]) -> list[str]:
    """How many images an arm, or what it starts from, has seen whose labels it did not read."""
    found = {}
    for r in records:
        count = max(r.get("unlabelled") or 0, (r.get("pretraining") or {}).get("unlabelled") or 0)
        found[r["arm"]] = max(found.get(r["arm"], 0), count)
    return [f"{arm}: {count:,}" for arm, count in found.items() if count]


def provenance(records: Sequence[dict], options: str) -> dict[str, str]:
    """Where the numbers come from and how to make them again."""
    starts, recipe = started_from(records), f"{records[0]['recipe']}.py{options} (or its path)"

    def each(values: Iterable[str]) -> str:
        return "; ".join(f"{value} ({k} run{'s' * (k > 1)})" for value, k in Counter(values).items())

    def code(k: dict) -> str:
        state = {True: "with uncommitted changes", False: "clean", None: "state unknown"}[k.get("dirty")]
        return f"{k.get('sha256')}, commit {k.get('commit') or 'unknown'}, {state}"

    def loaded(r: dict) -> str:
        told = {name: of for name, of in r["weights"].items() if name != "sha256" or "name" in r["weights"]}
        said = {name: (cut(of) or "none") if isinstance(of, list) else json.dumps(of) for name, of in told.items()}
        return ", ".join([*filter(None, [starts.get(r["arm"])]), *(f"{name} {of}" for name, of in said.items())])

    return {
        "Records": each(r["status"] for r in records),
        "Code": each(code(r.get("code") or {}) for r in records),
        "Versions": each(", ".join(f"{k} {v}" for k, v in (r.get("versions") or {}).items()) for r in records),
        "Machine": each(
            ", ".join(f"{k} {r[k]}" for k in ("cpu", *COMPUTED) if r.get(k) not in (None, False, "rule")) for r in records
        ),
        "Chosen on validation": each(json.dumps(k) for r in records if (k := r.get("chosen_on_val"))) or "nothing",
        "Images seen without labels": "; ".join(unlabelled(records)) or "none",
        "Pretrained weights": each(loaded(r) for r in records if r.get("weights")) or "none",
        "Run again": f"smallvit run {recipe}",
        "Write this page again": f"smallvit report {recipe}",
    }


def cut(names: Iterable[str], most: int = 3) -> str:
    """The first of many names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def pictures(records: Sequence[dict]) -> dict[str, dict]:
    """Arm -> where the patches went in its first run that has a picture."""
    found: dict[str, dict] = {}
    for record in records:
        if "groups" in (record.get("picture") or {}):
            found.setdefault(record["arm"], record["picture"])
    return found
