"""The docstring of every recipe: its sections are present, and the numbers under "Found" agree with the committed records.

Conventions for "Found": `95.82%` is an accuracy (the mean of an arm or of one of its probes, or its lowest or highest seed),
`SD 0.42` a standard deviation, `[0.29, 1.71]` a 95% interval (of a difference or an accuracy) for new seeds and new test images,
`[0.29, 1.71] on these test images` one for new seeds alone, `1.5 times` a speed-up of predictions, and any other decimal number a
difference to the baseline in points. `better by 1.00` and `worse by 1.00` are verdicts. A number right before an interval is the difference that the interval is for: `-0.63 [-0.85, -0.41]` or, if a loss is
written without a sign, `worse by 0.63 points [0.41, 0.85]`.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from toys import load_script, slow_but

from smallvit.packing import pack_bits
from smallvit.record import read_records
from smallvit.verdicts import compare

neighbors = load_script("neighbors")

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("[!_]*.py"))
PUBLISHED = [path for path in RECIPES if path.with_suffix(".jsonl").exists()]
PLANNED = [path for path in RECIPES if path not in PUBLISHED]  # their expectation is written, and they were not run yet
each = pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
LABELS = ("Paper", "Setup", "Expected", "Found", "Limits")
INTERVAL = re.compile(r"(\[-?[\d.]+, -?[\d.]+\])( on these test images)?")
PAIR = re.compile(r"(-?\d+\.\d+)(?: points)?(?: less)? (\[-?[\d.]+, -?[\d.]+\])(?! on these test images)")
VERDICT = re.compile(r"(better|worse) by (\d+\.\d+)")
NUMBER = re.compile(r"(SD )?-?(\d+\.\d+)(%| times)?")
NAMES = re.compile("learned from 0.02")  # names of arms that contain a decimal number


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")), clean=False) or ""


def sections(doc: str) -> dict[str, str]:
    """Label -> text of the paragraphs that start with a label. Continuation lines must be indented to the column of the text."""
    texts: dict[str, str] = {}
    for line in filter(None, doc.splitlines()[1:]):
        if start := re.match(r"([A-Z][a-z]+) {2,}(?=\S)", line):
            assert start.end() == 10 and start[1] not in texts, line
            texts[label := start[1]] = line[10:]
        else:
            assert re.match(r" {10}\S", line) and texts, line
            texts[label] += f" {line[10:]}"
    return texts


@pytest.fixture(scope="module")
def results():
    """A function from a recipe, and perhaps another control, to the numbers of its records, in percent or points, by kind."""
    known: dict[tuple[Path, str], dict[str, list]] = {}

    def percent(intervals) -> list[tuple[float, float]]:
        return [(100 * low, 100 * high) for low, high in intervals if low is not None and high is not None]

    def read(path: Path, control: str = "") -> dict[str, list]:
        if (path, control) not in known:
            records = read_records(path.with_suffix(".jsonl"))
            rows = [row for row in compare(records, against=control).rows if row.values]
            differences = [row.difference for row in rows if row.difference]
            probes: dict[tuple, list[float]] = {}
            for record in records:
                for name in (*(record.probes or ()), "augmented_accuracy"):
                    if record.finished and record.test and name in record.test:
                        probes.setdefault((record.labels, record.arm, name), []).append(record.test[name])
            known[path, control] = {
                "accuracy": [100 * x for row in rows for x in (fmean(row.values), min(row.values), max(row.values))]
                + [100 * fmean(values) for values in probes.values()],
                "SD": [100 * row.sd for row in rows if row.sd is not None],
                "interval": percent([*((d.low, d.high) for d in differences), *(row.new_images for row in rows if row.new_images)]),
                "interval on these test images": percent((d.seeds_low, d.seeds_high) for d in differences),
                "with its interval": [(100 * d.mean, 100 * d.low, 100 * d.high) for d in differences if d.low is not None],
                "speed-up": [row.forward["speedup"] for row in rows if row.forward["speedup"] is not None],
                "difference": [abs(100 * d.mean) for d in differences],
                "better": [100 * row.difference.mean for row in rows if row.difference and row.verdict == "better"],
                "worse": [-100 * row.difference.mean for row in rows if row.difference and row.verdict == "worse"],
            }
        return known[path, control]

    return read


def wrong_numbers(text: str, results: dict[str, list]) -> list[str]:
    """The decimal numbers in a "Found" section that equal no result of their kind at the precision of the text, and the verdicts
    "better by" and "worse by" with the number of a row that has another verdict.
    """

    def equal(quoted: str, values) -> bool:
        digits = len(quoted.partition(".")[2])
        return any(f"{value:z.{digits}f}" == quoted for value in values)  # z: no negative zero

    wrong = []
    signed = results["with its interval"]
    unsigned = [(-mean, -high, -low) for mean, low, high in signed if mean < 0]
    for number, interval in PAIR.findall(text):
        quoted = [number, *interval.strip("[]").split(", ")]
        if not any(all(map(equal, quoted, ([value] for value in row))) for row in (*signed, *unsigned)):
            wrong.append(f"{number} {interval}")
    for interval, here in INTERVAL.findall(PAIR.sub("", text)):
        low, high = interval.strip("[]").split(", ")
        if not any(equal(low, [value[0]]) and equal(high, [value[1]]) for value in results[f"interval{here}"]):
            wrong.append(interval + here)
    wrong += [f"{verdict} by {number}" for verdict, number in VERDICT.findall(text) if not equal(number, results[verdict])]
    for sd, number, unit in NUMBER.findall(INTERVAL.sub("", text)):
        kind = "SD" if sd else {"%": "accuracy", " times": "speed-up", "": "difference"}[unit]
        if not equal(number, results[kind]):
            wrong.append(f"{kind} {number}")
    return wrong


@each
def test_docstring_has_all_sections(path):
    question, empty, *_ = docstring(path).splitlines()
    assert question.endswith("?") and not empty
    texts = sections(docstring(path))
    assert tuple(texts)[: len(LABELS)] == LABELS
    assert all(text.rstrip().endswith(".") for text in texts.values())
    assert "Data: " in texts["Setup"] and "Cost: " in texts["Setup"]
    assert "Written before the runs" in texts["Expected"]
    assert "learning rate" in texts["Limits"] or "seeds" in texts["Limits"]


@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_recipe_without_records_has_an_expectation_and_no_results(path):
    question, empty, *_ = docstring(path).splitlines()
    assert question.endswith("?") and not empty
    texts = sections(docstring(path))
    assert tuple(texts) == ("Paper", "Setup", "Expected")
    assert "Data: " in texts["Setup"] and texts["Expected"].rstrip().endswith("Written before the runs.")
    assert not path.with_suffix(".md").exists()


QUICK = [path for path in PUBLISHED if path.stem in ("mae", "optimizers", "distill")]  # few records


@pytest.mark.parametrize("path", slow_but(QUICK, PUBLISHED), ids=lambda path: path.stem)
def test_numbers_under_found_are_those_of_the_records(path, results):
    text = NAMES.sub("", sections(docstring(path))["Found"])
    assert len(NUMBER.findall(text)) >= 4
    assert not wrong_numbers(text, results(path))


@pytest.mark.parametrize("path", slow_but(QUICK[:2], PUBLISHED), ids=lambda path: path.stem)
def test_changed_number_under_found_is_noticed(path, results):
    """Each number is raised by 7 in its last digit, one at a time. At least 85% of these changes must be noticed."""
    text = NAMES.sub("", sections(docstring(path))["Found"])
    quoted = list(re.finditer(r"\d+\.\d+", text))
    noticed = []
    for match in quoted:
        digits = len(match[0].partition(".")[2])
        changed = f"{float(match[0]) + 7 * 10**-digits:.{digits}f}"
        noticed.append(bool(wrong_numbers(text[: match.start()] + changed + text[match.end() :], results(path))))
    assert sum(noticed) >= 0.85 * len(quoted)


def test_labels_of_a_docstring_are_found():
    assert sections("Is it?\n\nPaper     One\n          two.\n\nSetup     Three.\n") == {"Paper": "One two.", "Setup": "Three."}
    with pytest.raises(AssertionError):
        sections("Is it?\n\nPaper     One\n  two.\n")


def test_interval_or_verdict_of_another_kind_is_wrong():
    results = {
        "interval": [(-0.13, 1.29)], "interval on these test images": [(0.39, 0.77)], "difference": [0.58, 2.85],
        "better": [2.85], "worse": [], "speed-up": [1.49], "with its interval": [(0.58, -0.13, 1.29), (-2.13, -3.4, -0.86)],
    }  # fmt: skip
    right = "0.58 points [-0.13, 1.29], or [0.39, 0.77] on these test images; better by 2.85."
    assert not wrong_numbers(right, results)
    assert not wrong_numbers("1.5 times as fast", results)
    assert wrong_numbers("1.4 times as fast, by 1.5 points", results) == ["speed-up 1.4", "difference 1.5"]
    assert wrong_numbers("0.58 points [0.39, 0.77]", results) == ["0.58 [0.39, 0.77]"]
    assert wrong_numbers("[0.39, 0.77]", results) == ["[0.39, 0.77]"]
    assert not wrong_numbers("worse by 2.13 [0.86, 3.40], or -2.13 points [-3.40, -0.86]", results | {"worse": [2.13], "difference": [2.13]})
    for wrong in ("2.13 [-3.40, -0.86]", "-2.13 [0.86, 3.40]", "-0.58 [-0.13, 1.29]", "0.58 [-1.29, 0.13]"):
        assert wrong_numbers(wrong, results | {"difference": [0.58, 2.13]}) == [wrong]
    assert wrong_numbers("[-0.13, 1.29] on these test images", results) == ["[-0.13, 1.29] on these test images"]
    assert wrong_numbers("better by 0.58", results) == ["better by 0.58"]
    assert wrong_numbers("worse by 2.85", results) == ["worse by 2.85"]


# The report

REPORT = Path(__file__).parents[1] / "docs" / "report.md"
# a size, a level, an axis, and numbers of papers
NOT_RESULTS = re.compile(r"2.4 million|p < 0.05|above 0.05|between −2 and 2 points|more than 1.1 points|arXiv:[\d.]+")


def paragraphs(page: str) -> list[str]:
    """The paragraphs and the list items of a page, without its generated tables."""
    text = re.sub(r"<!-- (results: |against: |accuracies: |carried: |frozen |recipes |best |counts ).*?<!-- end -->", "", page, flags=re.S)
    return [" ".join(part.split()) for part in re.split(r"\n\n|\n(?=\d+\. |- )", text) if part.strip()]


def unfounded(page: str, results) -> list[str]:
    """The decimal numbers of a page that are no result of the recipes to which their paragraph links. Tables of the page may
    compare the arms of a recipe with another control.
    """
    wrong, tables = [], re.findall(r"<!-- against: (\w+) \| (.+?) \|", page)
    for paragraph in paragraphs(page):
        linked = re.findall(r"\]\(\.\./recipes/(\w+)\.md\)", paragraph)
        kinds: dict[str, list] = {}
        for recipe, control in [*((recipe, "") for recipe in linked), *(pair for pair in tables if pair[0] in linked)]:
            for kind, values in results(REPORT.parents[1] / "recipes" / f"{recipe}.py", control).items():
                kinds.setdefault(kind, []).extend(values)
        # losses are written without a sign, "worse by 2.1 points [1.2, 3.0]": their intervals may be turned around
        kinds["interval"] = [pair for low, high in kinds.get("interval", []) for pair in ((low, high), (-high, -low))]
        text = NOT_RESULTS.sub("", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)).replace("−", "-")
        if re.search(r"\d\.\d", text):
            wrong += [f"{number}: {text[:60]}" for number in (wrong_numbers(text, kinds) if linked else ["no link"])]
    return wrong


@pytest.mark.slow
def test_numbers_of_the_report_are_those_of_the_linked_records(results):
    page = REPORT.read_text(encoding="utf-8")
    assert sum(len(NUMBER.findall(part)) for part in paragraphs(page)) >= 40
    assert not unfounded(page, results)


TECHNIQUES = REPORT.parent / "techniques"
# costs, settings, single trials, earlier results, the end of an interval, and losses
OTHER_NUMBERS = re.compile(
    r"\d\.\d+( to \d\.\d+)? times|best one of Muon was 0.005, and that of AdamW 0.002|17.6 points behind|from 0.8 to 4.6 points"
    r"|0.19, against 0.23"
)


def technique_page(path: Path) -> str:
    """The part of a technique page on results, where each paragraph links all recipes that the page names."""
    whole = path.read_text(encoding="utf-8")
    part = re.sub(r"```.*?```", "", whole.partition("## When it helps")[2].partition("## Paper")[0], flags=re.S)
    named = {name for names in re.findall(r"recipes/(\w+)\.md|<!-- \w+: (\w+) \||`(\w+)`", whole) for name in names}
    links = "".join(f" [{path.stem}](../recipes/{path.stem}.md)" for path in PUBLISHED if path.stem in named)
    found = [OTHER_NUMBERS.sub("", each) + links for each in paragraphs(part) if not each.startswith("*One trial, not a comparison*")]
    return "\n\n".join([*found, *re.findall(r"<!-- against: .*?-->", part)])


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(TECHNIQUES.glob("*.md")), ids=lambda path: path.stem)
def test_numbers_of_a_technique_page_are_those_of_its_recipes(path, results):
    assert not unfounded(technique_page(path), results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, right, other",
    [("deep_ensembles", "92.9%", "92.4%"), ("token_pruning", "4.1 points", "8.3 points"), ("label_spreading", "98.5%", "99.8%")],
)
def test_changed_number_of_a_technique_page_is_noticed(name, right, other, results):
    page = technique_page(TECHNIQUES / f"{name}.md")
    assert right in page and unfounded(page.replace(right, other), results)


def test_equal_neighbors_count_as_one_image():
    single = [record for record in read_records(RECIPES[0].with_name("quickstart.jsonl")) if record.correct]
    twice = [
        replace(record, correct=pack_bits(record.correct_bits.repeat(2)), test_images=2 * record.test_images) for record in single
    ]
    of_single, of_pairs = (neighbors.widths(compare(records)) for records in (single, neighbors.grouped(twice, 2)))
    assert of_pairs == pytest.approx(of_single, rel=1e-3) and len(of_single) >= 8
    of_images = neighbors.widths(compare(twice))
    assert all(of_images[key] < 0.95 * width for key, width in of_single.items() if key[0] == "accuracy")


@pytest.mark.slow
def test_verdicts_hold_if_neighboring_test_images_count_as_one():
    """What the report says under "Limits"."""
    recipes = neighbors.on_mnist()
    comparisons = [compare(records) for records in recipes]
    lines = {size: neighbors.report(recipes, comparisons, size).splitlines()[0] for size in neighbors.SIZES}
    page = " ".join(REPORT.read_text(encoding="utf-8").split())
    counts = re.search(r"none of the (\d+) verdicts \(of (\d+) comparisons\) changes; with 100, (\w+) become inconclusive", page)
    for size, changed in ((20, 0), (50, 0), (100, ("none", "one", "two", "three").index(counts[3]))):
        assert lines[size] == f"{size} images a group: {changed} of {counts[2]} comparisons change ({counts[1]} are better or worse)"


@pytest.mark.slow
def test_changed_number_of_the_report_is_noticed(results):
    page = REPORT.read_text(encoding="utf-8")
    for right, other in (("26.9 points", "26.8 points"), ("[1.8, 3.0]", "[1.7, 3.0]"), ("89.1%", "83.1%"), ("14.5 points", "14.2 points")):
        assert right in page and unfounded(page.replace(right, other), results), right
