"""Make the speed table of the documentation: `python -m benchmarks.table FILE.json [docs/explanation/speed.md]`.

Without a page the table is printed. With one it replaces the text between `<!-- speed FILE.json -->` and `<!-- end -->`. The
record holds measured numbers, and those that a task says it has scaled; ratios and other extrapolated times are computed here.
"""

import json
import re
import sys
from itertools import groupby
from pathlib import Path

FLAGS = ("default settings", "best flags")
LENGTH = 1_500  # steps of a run in a recipe, to which short runs are extrapolated


def markdown(record: dict) -> str:
    """Return the table of a record in Markdown, and a paragraph on how and where it was measured."""
    tasks = list(dict.fromkeys(line["task"] for line in record["lines"]))
    lines = sorted(record["lines"] + extrapolate(record["lines"]), key=lambda line: tasks.index(line["task"]))
    rows = ["| task | smallvit | peer | peer, default settings | peer, best flags |", "| --- | --- | --- | --- | --- |"]
    for task, same_task in groupby(lines, key=title):
        for index, line in enumerate(same_task):
            numerics = f" ({line['numerics']})" if line.get("numerics") not in (None, "default") else ""
            first = (task, amount(line["smallvit"], line["unit"]) + numerics) if index == 0 else ("", "")
            rows.append("| " + " | ".join([*first, line["peer"], *peer_cells(line)]) + " |")
    return "\n".join([*rows, "", describe_method(record)])


def title(line: dict) -> str:
    """Return the first cell of a line: the task, and the number of steps if it has one."""
    steps = "" if line["steps"] is None else f", {line['steps']:,} steps each"
    return line["task"] + steps + (" (extrapolated)" if line.get("extrapolated") else "")


def peer_cells(line: dict) -> list[str]:
    """Return two cells: what the peer needs with each of its settings, and how many times that of smallvit this is."""
    if all(line[flags] is None for flags in FLAGS):
        return ["not installed", ""]
    return ["" if line[flags] is None else peer_cell(line, line[flags]) for flags in FLAGS]


def peer_cell(line: dict, value: float) -> str:
    """Return what a peer needs, how many times that of smallvit this is, and the share of the saved multiply-adds (see
    `describe_method`) if smallvit makes fewer of them.
    """
    share = f", share {(1 - line['smallvit'] / value) / (1 - line['macs']):.2f}" if line.get("macs") else ""
    return f"{amount(value, line['unit'])}, {value / line['smallvit']:.1f}x{share}"


def amount(value: float, unit: str) -> str:
    """Return a number with three significant digits or more, and its unit."""
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def extrapolate(lines: list[dict], length: int = LENGTH) -> list[dict]:
    """Return lines for runs of `length` steps, by a straight line through the two longest measured runs.

    A task gets no line if only one length was measured, or if one run was as long as `length`.
    """
    lengths: dict[tuple, list[dict]] = {}
    for line in lines:
        if line["steps"] is not None and line[FLAGS[0]] is not None:
            lengths.setdefault((line["task"], line["peer"]), []).append(line)
    extrapolated = []
    for measured in lengths.values():
        *_, short, long = [measured[0], *sorted(measured, key=lambda line: line["steps"])]  # one length: short is long
        if short["steps"] < long["steps"] < length:
            factor = (length - short["steps"]) / (long["steps"] - short["steps"])
            numbers = {name: short[name] + factor * (long[name] - short[name]) for name in ("smallvit", *FLAGS)}
            extrapolated.append(long | numbers | {"steps": length, "extrapolated": True})
    return extrapolated


def describe_method(record: dict) -> str:
    """Return a paragraph: the machine, the versions, and how the numbers were measured."""
    machine, plural = record["machine"], "s" if record["machine"]["threads"] > 1 else ""
    warm_up = f", and repeat their task for {1e3 * record['warm_up']:g} ms before it is timed" if record.get("warm_up") else ""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    sentences = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} torch thread{plural}; {versions}.",
        "The best flags include bf16." if machine["bf16"] else "The CPU has no native bf16; the best flags do not include it.",
        f"Numbers are medians of {record['repeats']} repetitions (1 for whole recipes, at most 3 for memory).",
        f"All libraries take turns in one process{warm_up}; memory is measured in a new process each time.",
        "2.0x: the peer needs twice the time or memory of smallvit.",
    ]
    if any(line.get("macs") for line in record["lines"]):
        sentences.append("Share: saved time divided by saved multiply-adds; 1.00 if all of them become time.")
    if extrapolate(record["lines"]):
        sentences.append("Extrapolated: a straight line through the two run lengths above.")
    sentences.append(f"GPU: {machine['gpu']}." if machine["gpu"] else "There is no GPU; its benchmarks are left out.")
    return " ".join(sentences)


def insert_table(page: str, table: str, name: str) -> str:
    """Return the text of a page with the table of the record with this file name between its two markers. Raises ValueError if
    the page has no such markers.
    """
    place = re.compile(rf"(<!-- speed {re.escape(name)} -->\n)(?:.*?\n)??(<!-- end -->)", re.S)
    if not place.search(page):
        raise ValueError(f"the page has no <!-- speed {name} --> ... <!-- end -->; put these two lines where the table belongs")
    return place.sub(lambda match: match[1] + table + "\n" + match[2], page)


if __name__ == "__main__":
    table = markdown(json.loads(Path(sys.argv[1]).read_text()))
    if len(sys.argv) > 2:
        path = Path(sys.argv[2])
        path.write_text(insert_table(path.read_text(), table, Path(sys.argv[1]).name))
    else:
        print(table)
