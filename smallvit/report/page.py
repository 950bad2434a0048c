"""A comparison as a page: Markdown to commit beside a recipe, and one HTML file to look at. Both lead with the verdicts."""

import html as entities
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import resources
from itertools import groupby

from smallvit.record import amount

from . import figures
from .knobs import choices, knobs
from .probes import Probed, no_better_than_random, probed
from .verdicts import LEVEL, MIN_PAIRS, Comparison, Difference, Row, compare, seeds_text

BUDGETS = {
    "params": "Parameters",
    "macs": "MACs per image",
    "images_seen": "Images seen",
    "seconds": "Seconds",
    "extra_labels": "Extra labels",
}
COST = "smallvit.evaluate.cost"
REDUCED = {"tokens": "Tokens left", "macs": "MACs per image", "ms": "ms per batch", "speedup": "Speed-up"}
WORDS = ("better", "worse", "inconclusive", "not enough seeds", "no verdict")
COMPUTED = ("device", "precision", "threads", "kernel", "compiled")  # how, as the records say it
EMPTY = "No runs are recorded yet, so there is nothing to compare. Run the recipe first: smallvit run"


def markdown(records: Sequence[dict], *, title: str, doc: str) -> str:
    """The report as Markdown, to be committed beside its recipe. `doc` (the recipe's docstring) stands at the top as it is."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", doc)), default=0))
    parts = [f"# {_md(title)}", f"{fence}text\n{doc.strip()}\n{fence}"]
    if not present(records):
        return "\n\n".join([*parts, EMPTY]) + "\n"
    c, records = compare(records), present(records)
    parts += ["## Verdicts", _md(summary(c))]
    for n in c.labels:
        judged = sorted((row for row in c.at(n) if row.verdict), key=lambda row: WORDS.index(row.verdict))
        parts += _section(amount(n).capitalize(), [sentence(c, row) for row in judged], level=3)
    parts += [_md(how_to_read(c))] if c.family else []
    parts += _section("Warnings", warnings(records) + no_better_than_random(records)) + _section("Failures", failures(c))
    parts += _section("Unavailable here", unavailable(c))
    for n in c.labels:
        parts += [f"## Results at {amount(n)}"]
        for part in c.parts():
            parts += [f"### Against {_md(part.baseline)}"] if n in part.labels and len(c.baselines) > 1 else []
            parts += [_table(part, n, columns(c))] if n in part.labels else []
    for table in probed(records):
        parts += [f"## Probes at {amount(table.labels)}", _probes(table)]
    parts += [_md(how_it_was_timed(records))] if c.reduced else []
    parts += _section("Budgets", budgets(c))
    parts += _section("What differs from the baseline", [f"{arm}: {'; '.join(of)}" for arm, of in changes(c, records).items()])
    parts += _section("Provenance", [f"{name}: {text}" for name, text in provenance(records).items()])
    return "\n\n".join(parts) + "\n"


def html(records: Sequence[dict], *, title: str, doc: str) -> str:
    """The report as one self-contained page: nothing is fetched, no script runs, and it follows the reader's light or dark."""
    import jinja2
    from markupsafe import Markup

    env = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    env.filters |= {f.__name__: f for f in (amount, percent, points, interval, p_value, mean_sd)}
    page = env.from_string(resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    given = {"title": title, "doc": doc.strip(), "light": figures.LIGHT, "dark": figures.DARK, "empty": EMPTY, "c": None}
    if not present(records):
        return page.render(given)
    c, records = compare(records), present(records)
    parts = c.parts()
    draw = {"forest": figures.forest, "macs": figures.by_macs, "labels": figures.by_labels, "dots": figures.dots}
    draw["curves"] = partial(figures.learning_curves, records=records)
    draw["knobs"] = lambda part: figures.by_knob(part, knobs(part, records))
    drawn = {name: [(part, Markup(svg)) for part in parts if (svg := of(part))] for name, of in draw.items()}
    looks = {arm: look for part in parts for arm, look in figures.styles(part).items()}
    given |= {"c": c, "parts": parts, "figures": drawn, "looks": looks}
    given |= {"cost": cost, "zip": zip, "columns": columns(c), "summary": summary(c), "how_to_read": how_to_read(c)}
    given |= {"pictures": {arm: Markup(figures.tokens(picture)) for arm, picture in pictures(records).items()}}
    given |= {"how_it_was_timed": how_it_was_timed(records) if c.reduced else ""}
    given |= {"warnings": warnings(records) + no_better_than_random(records), "failures": failures(c), "budgets": budgets(c)}
    given |= {"unavailable": unavailable(c)}
    given |= {"probed": probed(records)}
    return page.render(given | {"changes": changes(c, records), "provenance": provenance(records)})


def pictures(records: Sequence[dict]) -> dict[str, dict]:
    """Arm -> where the patches went in its first run that has a picture."""
    found: dict[str, dict] = {}
    for record in records:
        if "groups" in (record.get("picture") or {}):
            found.setdefault(record["arm"], record["picture"])
    return found


def present(records: Sequence[dict]) -> list[dict]:
    """The records of runs that there are; a missing one says nothing of machine or code."""
    return [record for record in records if record["status"] != "missing"]


def percent(x: float) -> str:
    """A fraction as percent, two decimals."""
    return f"{100 * x:.2f}"


def points(x: float) -> str:
    """A signed difference of fractions, in points."""
    return f"{100 * x:+.2f}".replace("-", "−")


def interval(d: Difference) -> str:
    """`[−0.10, 0.35]` in points; one pair has none."""
    return "[no interval]" if d.low is None else f"[{100 * d.low:.2f}, {100 * d.high:.2f}]".replace("-", "−")


def p_value(p: float | None) -> str:
    """A p-value as it is quoted; a dash where no test was made."""
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def mean_sd(row: Row) -> str:
    """`93.10 ± 0.24 (SD, n = 8)`: no ± leaves this module without saying what it is."""
    if row.sd is None:
        return f"{percent(row.mean)} (n = 1)" if row.values else "–"
    return f"{percent(row.mean)} ± {percent(row.sd)} (SD, n = {len(row.values)})"


def columns(c: Comparison) -> dict[str, str]:
    """What a row costs -> the column's title; first what fewer tokens cost and buy, where the evaluator `cost` says so."""
    return (REDUCED if c.reduced else {}) | BUDGETS


def cost(row: Row, name: str) -> tuple[str, list[str]]:
    """One cost of a row, and what is to be said of it: its SD over images, and how far it is from the baseline's if over 5%."""
    value = (row.budget | row.forward)[name]
    if value is None:
        return "–", []
    forms = {
        "macs": f"{value / 1e6:,.2f} M",
        "seconds": f"{value:,.1f}",
        "tokens": f"{value:,.1f}",
        "ms": f"{value:,.1f}",
        "speedup": f"{value:.2f}×",
    }
    sd = row.forward["macs_sd"] if name == "macs" else None
    remarks = [f"± {sd / 1e6:,.2f} M SD"] if sd is not None else []
    remarks += [_excess(row.unequal[name])] if name in row.unequal else []
    remarks += ["loses time"] if name == "speedup" and value < 1 else []
    return forms.get(name, f"{value:,.0f}"), remarks


def sentence(c: Comparison, row: Row) -> str:
    """A verdict in words: `+SPT at 1,000 labels: better by 0.42 points [0.20, 0.64]`; of several baselines it names its own."""
    d, why = row.difference, f" ({row.reason})" if row.reason else ""
    found = row.verdict in ("better", "worse")
    start = f"{row.arm} at {amount(row.labels)}: {row.verdict}"
    start += f" {'than' if found else 'against'} {row.against}" if len(c.baselines) > 1 else ""
    if d is None:
        return start + why
    if found:
        return f"{start} by {percent(abs(d.mean))} points {interval(d)}"
    return f"{start}, {points(d.mean)} points {interval(d)}{why}"


def summary(c: Comparison) -> str:
    """How many comparisons came out how."""
    counts = Counter(row.verdict for row in c.rows)
    said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) or "none to judge"
    lost = sum(len(row.failures) for row in c.rows if not row.unavailable)
    finished = sum(len(row.values) for row in c.rows)
    tail = f" {lost} of {lost + finished} runs left no number; see Failures." if lost else ""
    return f"Against {c.baseline}, {c.family} comparison{'s' * (c.family != 1)}: {said}.{tail}"


def how_to_read(c: Comparison) -> str:
    """What the words and brackets mean, for somebody who reads the page without the code."""
    return (
        "Differences are paired: the same seed means the same images in the same order. Brackets are the 95% t interval of "
        f"one paired difference, in points of test accuracy. A verdict also pays for all {c.family} comparisons of this recipe "
        f"(Holm, {LEVEL:.0%}) and takes at least {MIN_PAIRS} pairs and no missing run. Inconclusive means not shown, not "
        "equal. Floors are yardsticks and get no verdict. Intervals are over seeds on one fixed set of test images: they say "
        "nothing of other images."
    )


def how_it_was_timed(records: Sequence[dict]) -> str:
    """What tokens left, MACs and speed-up are, and that a speed-up can be a loss."""
    evaluators = [e for r in records if r.get("run") for e in r["run"].get("evaluators", ()) if e.get("call") == COST]
    sizes = sorted({e["batch"] for e in evaluators})
    on = f" on batches of {' and '.join(map(str, sizes))} images" if sizes else ""
    return (
        "Tokens left are those that leave the last block, MACs those of test images; where they depend on the image they are "
        "means, and the SD beside the MACs is over images. Speed-up is the time of a forward pass of the same model unreduced, "
        f"at its fastest attention kernel, over that of the reduced one, in the same process{on} (median over seeds). A value "
        "under 1 means that the reduction loses time. The milliseconds of different arms come from different processes, with "
        "other runs beside them: go by the speed-up where there is one."
    )


def budgets(c: Comparison) -> list[str]:
    """Which budgets every technique shares with its baseline (within 5%), and which it does not."""
    rows, out = [row for row in c.rows if row.role != "floor"], []
    for name, title in BUDGETS.items():
        said = [f"{arm} (not recorded)" for arm in dict.fromkeys(row.arm for row in rows if row.budget[name] is None)]
        for arm in dict.fromkeys(row.arm for row in rows if name in row.unequal):
            shares = [row.unequal[name] for row in rows if row.arm == arm and name in row.unequal]
            said.append(f"{arm} ({' to '.join(dict.fromkeys(map(_excess, (min(shares), max(shares)))))})")
        out.append(f"{title}: " + (f"not within 5% of the baseline's: {', '.join(said)}" if said else "equal within 5%"))
    return out


def failures(c: Comparison) -> list[str]:
    """Every run that left no number, and why."""
    out = []
    for row in c.rows:
        if row.unavailable:
            continue
        by_reason = groupby(sorted(row.failures, key=row.failures.get), key=row.failures.get)
        out += [f"{row.arm} at {amount(row.labels)}, {seeds_text(list(seeds))}: {why}" for why, seeds in by_reason]
    return out


def unavailable(c: Comparison) -> list[str]:
    """The arms whose weights were not to be had where this ran, and why."""
    absent = [row for row in c.rows if row.unavailable]
    return list(
        dict.fromkeys(f"{row.arm}: {next(iter(row.failures.values())).removeprefix('unavailable: ')}" for row in absent)
    )


def warnings(records: Sequence[dict]) -> list[str]:
    """What makes the arms less comparable than the table looks."""
    facts: dict[str, dict[str, dict]] = {}
    for r in records:
        mine = {name: r.get(name) for name in ("cpu", *COMPUTED)}
        mine |= {"code": r["code"].get("sha256")} if r.get("code") else {}
        mine |= {f"{name} version": version for name, version in (r.get("versions") or {}).items()}
        for name, value in mine.items():
            if value is not None:
                facts.setdefault(name, {}).setdefault(str(value), {})[r["arm"]] = None
    mixed = {name: of for name, of in facts.items() if len(of) > 1}
    out = [f"Mixed {name}: " + "; ".join(f"{v} in {', '.join(arms)}" for v, arms in of.items()) for name, of in mixed.items()]
    scores = dict.fromkeys(r["score"] for r in records if r["score"] and r["role"] != "floor")
    dirty = sum(bool((r.get("code") or {}).get("dirty")) for r in records)
    reads = sum((r.get("test_reads") or 0) > 1 for r in records)
    elsewhere = list(dict.fromkeys(r["arm"] for r in records if "make" in ((r.get("run") or {}).get("init") or {})))
    out += [f"What it took to train weights elsewhere is in no budget: {', '.join(elsewhere)}"] if elsewhere else []
    out += [f"Baseline and techniques are judged by different numbers: {', '.join(scores)}"] if len(scores) > 1 else []
    out += [f"Runs of code with uncommitted changes, so that the commit does not say what ran: {dirty}"] if dirty else []
    return out + ([f"Runs that read the test split more than once: {reads}"] if reads else [])


def changes(c: Comparison, records: Sequence[dict]) -> dict[str, list[str]]:
    """Arm -> the fields of its runs that differ from its baseline's run with the same labels and seed."""
    against, starts = {row.arm: row.against for row in c.rows}, started_from(records)
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
    return {arm: f"weights of {_cut(names, 1) or 'another run'}" for arm, names in found.items()}


def unlabelled(records: Sequence[dict]) -> list[str]:
    """How many images an arm, or what it starts from, has seen whose labels it did not read."""
    found = {}
    for r in records:
        count = max(r.get("unlabelled") or 0, (r.get("pretraining") or {}).get("unlabelled") or 0)
        found[r["arm"]] = max(found.get(r["arm"], 0), count)
    return [f"{arm}: {count:,}" for arm, count in found.items() if count]


def provenance(records: Sequence[dict]) -> dict[str, str]:
    """Where the numbers come from and how to make them again."""
    starts = started_from(records)

    def each(values: Iterable[str]) -> str:
        return "; ".join(f"{value} ({k} run{'s' * (k > 1)})" for value, k in Counter(values).items())

    def code(k: dict) -> str:
        state = {True: "with uncommitted changes", False: "clean", None: "state unknown"}[k.get("dirty")]
        return f"{k.get('sha256')}, commit {k.get('commit') or 'unknown'}, {state}"

    def loaded(r: dict) -> str:
        told = {name: of for name, of in r["weights"].items() if name != "sha256" or "name" in r["weights"]}
        said = {name: (_cut(of) or "none") if isinstance(of, list) else json.dumps(of) for name, of in told.items()}
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
        "Run again": f"smallvit run {records[0]['recipe']}.py (or its path)",
        "Write this page again": f"smallvit report {records[0]['recipe']}.py (or its path)",
    }


def _cut(names: Iterable[str], most: int = 3) -> str:
    """The first of many names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


def _excess(share: float) -> str:
    if share >= 1:
        return "baseline: 0" if math.isinf(share) else f"{1 + share:,.0f}× baseline"
    return f"{share:+.0%}".replace("-", "−")


def _table(c: Comparison, labels: int | None, costs: dict[str, str]) -> str:
    head = ["Arm", "Test accuracy, % (mean ± SD over seeds)", "Range", "Difference, points [95% CI]", "p", "Holm p", "Verdict"]
    lines = [[*head, *costs.values()], ["-"] * (len(head) + len(costs))]
    for row in c.at(labels):
        d = row.difference
        name = row.arm + f" ({row.role})" * (row.verdict is None) + f", {row.score}" * (row.score != "accuracy")
        extent = f"{percent(min(row.values))} to {percent(max(row.values))}" if row.values else "–"
        gain = f"{points(d.mean)} {interval(d)} (n = {len(d.values)})" if d else "–"
        word = ": ".join(filter(None, (row.verdict, row.reason))) or "–"
        spent = (number + f" ({'; '.join(more)})" * bool(more) for number, more in (cost(row, key) for key in costs))
        tests = [p_value(d and d.p), p_value(d and d.p_holm)]
        lines.append([_md(name), mean_sd(row), extent, gain, *tests, _md(word), *spent])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _probes(table: Probed) -> str:
    lines = [["Arm", *table.names], ["-"] * (1 + len(table.names))]
    lines += [[_md(arm), *("–" if x is None else percent(x) for x in row)] for arm, row in table.rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _section(name: str, lines: list[str], level: int = 2) -> list[str]:
    return [f"{'#' * level} {name}", "\n".join(f"- {_md(line)}" for line in lines)] if lines else []


def _md(text: str) -> str:
    """Text that Markdown leaves alone, whatever an arm or an error is called."""
    text = re.sub(r"([\\`*|~$]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])|^[+#-](?=\s))", r"\\\1", " ".join(text.split()))
    return entities.escape(text, quote=False)
