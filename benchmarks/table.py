"""From a record to the table that the README shows: `python -m benchmarks.table FILE.json [README.md]`.

Without a README the table is printed; with one it takes the place of what is there between `<!-- speed -->` and `<!-- end -->`.
The record holds what was measured and nothing else: ratios, and what is reckoned from it, are made here.
"""

import json
import re
import sys
from itertools import groupby
from pathlib import Path

FLAGS = ("as shipped", "best flags")
LENGTH = 1_500  # steps of a run in a recipe


def markdown(record: dict) -> str:
    """The table, and in words what was measured and where."""
    works = list(dict.fromkeys(line["work"] for line in record["lines"]))
    lines = sorted(record["lines"] + reckoned(record["lines"]), key=lambda line: works.index(line["work"]))
    rows = ["| work | ours | peer | as shipped | best flags |", "| --- | --- | --- | --- | --- |"]
    for work, of_it in groupby(lines, key=title):
        for at, line in enumerate(of_it):
            how = f" ({line['how']})" if line.get("how") not in (None, "as it is") else ""
            first = (work, amount(line["ours"], line["unit"]) + how) if at == 0 else ("", "")
            rows.append("| " + " | ".join([*first, line["peer"], *cells(line)]) + " |")
    return "\n".join([*rows, "", in_words(record)])


def title(line: dict) -> str:
    steps = "" if line["steps"] is None else f", {line['steps']:,} steps each"
    return line["work"] + steps + (" (reckoned)" if line.get("reckoned") else "")


def cells(line: dict) -> list[str]:
    """What the peer took, and how many times ours that is."""
    if line["as shipped"] is None:
        return ["not installed", ""]
    values = [line[flags] for flags in FLAGS]
    return ["" if value is None else f"{amount(value, line['unit'])}, {value / line['ours']:.1f}x" for value in values]


def amount(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def reckoned(lines: list[dict], length: int = LENGTH) -> list[dict]:
    """Runs of `length` steps, on the straight line through the two longest that were measured; none where one is as long."""
    lengths: dict[tuple, list[dict]] = {}
    for line in lines:
        if line["steps"] is not None and line["as shipped"] is not None:
            lengths.setdefault((line["work"], line["peer"]), []).append(line)
    out = []
    for measured in lengths.values():
        *_, short, long = [measured[0], *sorted(measured, key=lambda line: line["steps"])]  # of one alone: twice that
        if short["steps"] < long["steps"] < length:
            far = (length - short["steps"]) / (long["steps"] - short["steps"])
            numbers = {name: short[name] + far * (long[name] - short[name]) for name in ("ours", *FLAGS)}
            out.append(long | numbers | {"steps": length, "reckoned": True})
    return out


def in_words(record: dict) -> str:
    """How the numbers came about, on which machine."""
    machine, several = record["machine"], "s" if record["machine"]["threads"] > 1 else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    said = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} torch thread{several}; {versions}.",
        "bf16 is among the best flags." if machine["bf16"] else "bf16 is not native here, and not among the best flags.",
        f"Medians of {record['repeats']} turns (of whole recipes and of memory at most 3), everybody in turn in one process,",
        "memory in a fresh one each. 2.0x: the peer takes twice what ours does.",
    ]
    if reckoned(record["lines"]):
        said.append("Reckoned: on the straight line through the two lengths above it.")
    said.append(f"GPU: {machine['gpu']}." if machine["gpu"] else "No GPU was found, and its lines are left out.")
    return " ".join(said)


def put_into(readme: str, table: str) -> str:
    """The README with this table. Raises ValueError if it has no place for one."""
    place = re.compile(r"(<!-- speed -->\n)(?:.*?\n)??(<!-- end -->)", re.S)
    if not place.search(readme):
        raise ValueError("the README has no <!-- speed --> ... <!-- end -->; put these two lines where the table belongs")
    return place.sub(lambda found: found[1] + table + "\n" + found[2], readme)


if __name__ == "__main__":
    made = markdown(json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) > 2:
        page = Path(sys.argv[2])
        page.write_text(put_into(page.read_text(), made))
    else:
        print(made)
