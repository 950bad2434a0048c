"""A comparison as a page: Markdown to commit beside a recipe, and one HTML file to look at. Both lead with the verdicts."""

import html as entities
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import groupby

from . import figures
from .verdicts import LEVEL, MIN_PAIRS, Comparison, Difference, Row, amount, compare, seeds_text

BUDGETS = {
    "params": "Parameters",
    "macs": "MACs per image",
    "images_seen": "Images seen",
    "seconds": "Seconds",
    "extra_labels": "Extra labels",
}
WORDS = ("better", "worse", "inconclusive", "not enough seeds", "no verdict")
EMPTY = "No runs are recorded yet, so there is nothing to compare. Run the recipe first: smallvit run"


def markdown(records: Sequence[dict], *, title: str, doc: str) -> str:
    """The report as Markdown, to be committed beside its recipe. `doc` (the recipe's docstring) stands at the top as it is."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", doc)), default=0))
    parts = [f"# {_md(title)}", f"{fence}text\n{doc.strip()}\n{fence}"]
    if not records:
        return "\n\n".join([*parts, EMPTY]) + "\n"
    c, records = compare(records), present(records)
    parts += ["## Verdicts", _md(summary(c))]
    for n in c.labels:
        judged = sorted((row for row in c.at(n) if row.verdict), key=lambda row: WORDS.index(row.verdict))
        parts += _section(amount(n).capitalize(), [sentence(row) for row in judged], level=3)
    parts += [_md(how_to_read(c))] if c.family else []
    parts += _section("Warnings", warnings(records)) + _section("Failures", failures(c))
    for n in c.labels:
        parts += [f"## Results at {amount(n)}", _table(c, n)]
    parts += _section("Budgets", budgets(c))
    parts += _section("What differs from the baseline", [f"{arm}: {'; '.join(of)}" for arm, of in changes(records).items()])
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
    if not records:
        return page.render(given)
    c, records = compare(records), present(records)
    drawn = {"forest": figures.forest(c), "labels": figures.by_labels(c), "dots": figures.dots(c)}
    drawn["curves"] = figures.learning_curves(c, records)
    given |= {"c": c, "figures": {name: Markup(svg) for name, svg in drawn.items()}, "looks": figures.styles(c)}
    given |= {"cost": cost, "zip": zip, "budget_names": BUDGETS, "summary": summary(c), "how_to_read": how_to_read(c)}
    given |= {"warnings": warnings(records), "failures": failures(c), "budgets": budgets(c)}
    return page.render(given | {"changes": changes(records), "provenance": provenance(records)})


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


def cost(row: Row, name: str) -> tuple[str, str]:
    """One budget of a row, and how far it is from the baseline's if that is more than 5%."""
    value = row.budget[name]
    if value is None:
        return "–", ""
    number = f"{value / 1e6:,.2f} M" if name == "macs" else f"{value:,.1f}" if name == "seconds" else f"{value:,.0f}"
    return number, _excess(row.unequal[name]) if name in row.unequal else ""


def sentence(row: Row) -> str:
    """A verdict in words: `+SPT at 1,000 labels: better by 0.42 points [0.20, 0.64]`."""
    d, why = row.difference, f" ({row.reason})" if row.reason else ""
    start = f"{row.arm} at {amount(row.labels)}: {row.verdict}"
    if d is None:
        return start + why
    if row.verdict in ("better", "worse"):
        return f"{start} by {percent(abs(d.mean))} points {interval(d)}"
    return f"{start}, {points(d.mean)} points {interval(d)}{why}"


def summary(c: Comparison) -> str:
    """How many comparisons came out how."""
    counts = Counter(row.verdict for row in c.rows)
    said = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word]) or "none to judge"
    lost, finished = sum(len(row.failures) for row in c.rows), sum(len(row.values) for row in c.rows)
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


def budgets(c: Comparison) -> list[str]:
    """Which budgets every technique shares with the baseline (within 5%), and which it does not."""
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
        by_reason = groupby(sorted(row.failures, key=row.failures.get), key=row.failures.get)
        out += [f"{row.arm} at {amount(row.labels)}, {seeds_text(list(seeds))}: {why}" for why, seeds in by_reason]
    return out


def warnings(records: Sequence[dict]) -> list[str]:
    """What makes the arms less comparable than the table looks."""
    facts: dict[str, dict[str, dict]] = {}
    for r in records:
        mine = {name: r.get(name) for name in ("device", "precision", "threads", "cpu")}
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
    out += [f"Baseline and techniques are judged by different numbers: {', '.join(scores)}"] if len(scores) > 1 else []
    out += [f"Runs of code with uncommitted changes, so that the commit does not say what ran: {dirty}"] if dirty else []
    return out + ([f"Runs that read the test split more than once: {reads}"] if reads else [])


def changes(records: Sequence[dict]) -> dict[str, list[str]]:
    """Arm -> the fields of its runs that differ from the baseline's run with the same labels and seed."""
    base = {(r["labels"], r["seed"]): _flat(r["run"]) for r in records if r["role"] == "baseline" and r.get("run")}
    runs, seen = Counter(), {}
    for r in records:
        theirs = base.get((r["labels"], r["seed"]))
        if r["role"] == "baseline" or theirs is None or not r.get("run"):
            continue
        mine = _flat(r["run"])
        fields = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
        swapped = tuple(name.removesuffix("call") for name in fields if name.endswith(".call") and name in mine)
        fields = [name for name in fields if name in mine or not name.startswith(swapped)]  # what went with its component
        runs[r["arm"]] += 1
        lines = (f"{name}: {theirs.get(name, 'absent')} → {mine.get(name, 'absent')}" for name in fields)
        seen.setdefault(r["arm"], Counter()).update(lines)
    for arm, of in seen.items():
        seen[arm] = [line + f" (in {k} of {runs[arm]} runs)" * (k < runs[arm]) for line, k in of.items()] or ["nothing"]
    return seen


def provenance(records: Sequence[dict]) -> dict[str, str]:
    """Where the numbers come from and how to make them again."""

    def each(values: Iterable[str]) -> str:
        return "; ".join(f"{value} ({k} run{'s' * (k > 1)})" for value, k in Counter(values).items())

    def code(k: dict) -> str:
        state = {True: "with uncommitted changes", False: "clean", None: "state unknown"}[k.get("dirty")]
        return f"{k.get('sha256')}, commit {k.get('commit') or 'unknown'}, {state}"

    return {
        "Records": each(r["status"] for r in records),
        "Code": each(code(r.get("code") or {}) for r in records),
        "Versions": each(", ".join(f"{k} {v}" for k, v in (r.get("versions") or {}).items()) for r in records),
        "Machine": each(
            ", ".join(f"{k} {r.get(k)}" for k in ("cpu", "device", "precision", "threads") if r.get(k)) for r in records
        ),
        "Chosen on validation": each(json.dumps(k) for r in records if (k := r.get("chosen_on_val"))) or "nothing",
        "Pretrained weights": each(f"{r['arm']}: {json.dumps(k)}" for r in records if (k := r.get("weights"))) or "none",
        "Run again": f"smallvit run {records[0]['recipe']}.py (or its path)",
        "Write this page again": f"smallvit report {records[0]['recipe']}.py (or its path)",
    }


def _flat(value: object, path: str = "") -> dict[str, str]:
    if not isinstance(value, dict):
        return {path: json.dumps(value, ensure_ascii=False)}
    return {k: v for key, inner in value.items() for k, v in _flat(inner, f"{path}.{key}".lstrip(".")).items()}


def _excess(share: float) -> str:
    if share >= 1:
        return "baseline: 0" if math.isinf(share) else f"{1 + share:,.0f}× baseline"
    return f"{share:+.0%}".replace("-", "−")


def _table(c: Comparison, labels: int | None) -> str:
    head = ["Arm", "Test accuracy, % (mean ± SD over seeds)", "Range", "Difference, points [95% CI]", "p", "Holm p", "Verdict"]
    lines = [[*head, *BUDGETS.values()], ["-"] * (len(head) + len(BUDGETS))]
    for row in c.at(labels):
        d = row.difference
        name = row.arm + f" ({row.role})" * (row.verdict is None) + f", {row.score}" * (row.score != "accuracy")
        extent = f"{percent(min(row.values))} to {percent(max(row.values))}" if row.values else "–"
        gain = f"{points(d.mean)} {interval(d)} (n = {len(d.values)})" if d else "–"
        word = ": ".join(filter(None, (row.verdict, row.reason))) or "–"
        spent = (f"{number} ({more})" if more else number for number, more in (cost(row, key) for key in BUDGETS))
        tests = [p_value(d and d.p), p_value(d and d.p_holm)]
        lines.append([_md(name), mean_sd(row), extent, gain, *tests, _md(word), *spent])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _section(name: str, lines: list[str], level: int = 2) -> list[str]:
    return [f"{'#' * level} {name}", "\n".join(f"- {_md(line)}" for line in lines)] if lines else []


def _md(text: str) -> str:
    """Text that Markdown leaves alone, whatever an arm or an error is called."""
    text = re.sub(r"([\\`*|~$]|\](?=[(\[:])|(?<![^\W_])_|_(?![^\W_])|^[+#-](?=\s))", r"\\\1", " ".join(text.split()))
    return entities.escape(text, quote=False)
