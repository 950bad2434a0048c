"""Reports of comparisons over training lengths, tuned settings and looks: what a reader of the page sees."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from smallvit.__main__ import main
from smallvit.packing import pack_bits
from smallvit.record import Record, write_records
from smallvit.report import html, markdown, text
from smallvit.report.alarms import main_cells
from smallvit.report.export import latex_table
from smallvit.report.figures import by_length, by_tuning, forest
from smallvit.report.provenance import warnings
from smallvit.report.settings import Trial, tuning_curves
from smallvit.verdicts import Condition, compare

pytestmark = pytest.mark.usefixtures("without_figures")
PAGE = {"title": "demo", "doc": "Does it help?"}
IMAGES = 2_000
RATES = (0.0005, 0.001, 0.002, 0.004)


def tuning(best: float, edge=(), trials=4) -> dict:
    """The field `tuning` of a record: a learning rate that was chosen among four."""
    curve = [[{"lr": rate}, 0.8 - abs(rate - best), 4 if rate >= 0.001 else 1] for rate in RATES]
    cost = {"labels": 500, "images_seen": 10_000, "seconds": 40.0}
    return {"settings": {"lr": best}, "trials": trials, "loss": 0.0012, "edge": list(edge), "curve": curve, **cost}


def cell(arms: dict[str, float], *, role="technique", labels=100, length=None, tuned=None, seeds=8, looks=None, **fields):
    """Records under one condition, with a bit for each test image. The first arm is the baseline; values are effects."""
    rng, out = np.random.default_rng(7), []
    hard, luck = rng.normal(size=IMAGES), rng.normal(0, 0.01, seeds)
    for place, (arm, effect) in enumerate(arms.items()):
        for seed in range(seeds):
            ease = hard + 0.5 * rng.normal(size=IMAGES)
            bits = ease > np.quantile(ease, 0.2 - luck[seed] - effect + rng.normal(0, 0.002))
            accuracy = float(bits.mean())
            out.append(
                Record(
                    recipe="demo", arm=arm, role=role if place else "baseline", labels=labels, seed=seed, length=length,
                    baseline=next(iter(arms)), tuning=tuned and tuned.get(arm), looks=looks, fingerprint=f"{arm}{seed}",
                    run={"model": {"arm": arm}, "lr": tuned[arm]["settings"]["lr"] if tuned else 0.0007, "seed": seed},
                    status="finished", score="accuracy", test={"accuracy": accuracy}, correct=pack_bits(bits),
                    test_images=IMAGES, drawn_share=0.01, params=1000, macs=5_000_000, images_seen=6400, steps=length or 300,
                    seconds=10.0, subset_sha256=f"{labels}/{seed}", **fields,
                )
            )  # fmt: skip
    return out


SHORT = {"scratch": 0, "+A": 0.10, "+B": -0.06, "+C": 0.0}
LONG = {"scratch": 0.05, "+A": 0.14, "+B": 0.05, "+C": 0.05}
TUNED = {"scratch": tuning(0.002), "+A": tuning(0.004, edge=["lr"]), "+B": tuning(0.001), "+C": tuning(0.002)}


@pytest.fixture(scope="module")
def rows() -> list[Record]:
    """Two training lengths with common settings, and tuned settings at the longer one."""
    return [*cell(SHORT, length=500), *cell(LONG, length=2_000), *cell(LONG, length=2_000, tuned=TUNED)]


def row_of(rows: list[Record], arm: str):
    """The result of an arm under the main condition."""
    return next(row for row in compare(rows).main_rows if row.arm == arm)


def section(page: str, heading: str) -> str:
    """The part of a Markdown page below a heading or inside a folded block, to the next one."""
    return re.split(r"\n## |\n<details>|\n</details>", page.partition(f"{heading}\n")[2] or page.partition(heading)[2])[0]


def test_tuned_settings_and_long_training_come_first_and_common_settings_are_folded(rows):
    page = markdown(rows, **PAGE)
    order = [
        "## Accuracy\n",
        "### 100 labels, 2,000 steps, tuned",
        "## Tuned against common settings",
        "## Difference and training",
    ]
    order += ["<summary>Accuracy with common settings</summary>", "### 100 labels, 500 steps", "## Costs"]
    assert sorted(order, key=page.index) == order
    assert section(page, "## Accuracy").count("### ") == 1 and "Accuracy after shorter training" not in page
    assert page.index("### 100 labels, 500 steps\n") < page.index("</details>") < page.index("## Costs")
    seen = html(rows, **PAGE)
    folded = seen.partition("<summary>Accuracy with common settings</summary>")[2].partition("</details>")[0]
    assert "<h3>100 labels, 500 steps</h3>" in folded and "<h3>100 labels, 2,000 steps</h3>" in folded and "tuned" not in folded


def test_without_tuning_shorter_training_is_not_folded(rows):
    page = markdown([r for r in rows if not r.tuning], **PAGE)
    assert "### 100 labels, 500 steps" in section(page, "## Accuracy after shorter training")
    assert "common settings" not in page.partition("## How to read")[0] and "### 100 labels, 2,000 steps" in section(
        page, "## Accuracy"
    )


def test_tuned_and_common_settings_stand_side_by_side(rows):
    table = section(markdown(rows, **PAGE), "## Tuned against common settings")
    (line,) = re.findall(r"^\| \+A .*$", table, re.M)
    assert "learning rate 0.004 (common: 0.0007; learning rate at the edge of its range)" in line
    assert line.count("| better (+") == 2 and line.endswith("| 4 | 0.12 |")
    assert "Verdict, common | Verdict, tuned | Trials | Expected loss, points" in table and "equally many trials" in table
    assert "| Trials | Seconds of tuning |" in markdown(rows, **PAGE)
    assert "Tuned against" not in markdown([r for r in rows if not r.tuning], **PAGE)


def test_the_page_says_what_becomes_of_a_verdict_with_longer_training(rows):
    table = section(markdown(rows, **PAGE), "## Difference and training length")
    assert "| Arm | 500 steps | 2,000 steps | With longer training |" in table
    assert re.search(r"\| \+A \| \+.* better\) \| \+.* better\) \| holds \|", table)
    assert (
        re.search(r"\| \+B \| −.* worse\) \| .* inconclusive\) \| fades \|", table)
        and "Fades: the difference has become smaller" in table
    )
    assert re.search(r"\| \+C .*\| no difference is shown \|", table)
    seen = by_length(compare(rows))
    assert "+A: holds" in seen and "+B: fades" in seen and "training steps of the baseline" in seen
    assert "Difference and training length" not in html(cell(SHORT), **PAGE)


def test_a_verdict_says_how_often_it_comes_out_again_and_which_effect_would_have_been_found(rows):
    table = section(markdown(rows, **PAGE), "## Accuracy")
    (better,), (open_,) = (re.findall(rf"^\| \+{arm} .*$", table, re.M) for arm in "AC")
    d = row_of(rows, "+C").difference
    assert "better (again in more than 99 of 100)" in better and "fragile" not in better
    assert f"inconclusive (80% power at {100 * d.detectable:.2f} points)" in open_
    assert f"([{100 * d.seeds_low:.2f}, {100 * d.seeds_high:.2f}] on these test images)".replace("-", "−") in open_
    weak = next(r for k in range(5, 40) if row_of(r := cell({"scratch": 0, "+A": k / 2000}, seeds=8), "+A").decided)
    difference = row_of(weak, "+A").difference
    assert difference.fragile
    again = rf"better \(again in about {100 * difference.replication:.0f} of 100, fragile; with \d+ seeds in 90\)"
    assert re.search(again, markdown(weak, **PAGE))


def test_looks_are_on_the_page():
    rows = cell({"scratch": 0, "+A": 0.1}, looks=[6, 8, 12])
    assert re.search(r"\| \+A .*looks at 6, 8 seeds\) \|", markdown(rows, **PAGE))
    assert "looks at" not in markdown(cell({"scratch": 0, "+A": 0.1}), **PAGE).partition("## How to read")[0]


@pytest.mark.figures
def test_an_arm_that_is_compared_with_another_arm_says_so():
    rows = cell({"scratch": 0, "+A": 0.05, "+A +B": 0.06})
    rows = [replace(r, baseline="+A") if r.arm == "+A +B" else r for r in rows]
    assert re.search(r"^\| \+A \+B \|.*\(from \+A; \[", markdown(rows, **PAGE), re.M)
    seen = forest(compare(rows))
    assert "against +A" in seen and "points above the arm that it is compared with" in seen
    assert "Difference from the arm that it is compared with" in html(rows, **PAGE)


def test_the_terminal_shows_the_main_condition_and_names_the_others(rows):
    seen = text(rows)
    assert "100 labels, 2,000 steps, tuned: test accuracy" in seen and "500 steps:" not in seen
    assert seen.splitlines()[-1] == "The report also shows 2 other conditions (common settings, shorter training)."
    assert "The report also shows" not in text(cell(SHORT))
    of_one_length = [record for record in rows if record.length == max(record.length for record in rows)]
    assert text(of_one_length).splitlines()[-1] == "The report also shows 1 other condition (common settings)."


@pytest.mark.parametrize(
    "waits, main, place",
    [
        (lambda r: r.tuning, Condition(100, 2_000), "At 100 labels with common settings and 2,000 training steps, "),
        (lambda r: r.length == 2_000, Condition(100, 500), "At 100 labels with common settings and 500 training steps, "),
        (lambda r: r.tuning or r.arm == "+A", Condition(100, 2_000), "At 100 labels with common settings and 2,000 "),
    ],
)
def test_conditions_without_a_result_do_not_hide_the_others(waits, main, place, rows):
    nothing = dict.fromkeys(("test", "correct", "score"))
    rows = [replace(r, status="missing", **nothing) if waits(r) else r for r in rows]
    c, seen, page = compare(rows), text(rows), markdown(rows, **PAGE)
    waiting = [condition for condition in c.conditions if condition.tuned or condition.length > main.length]
    assert c.main == (main,) and {condition for condition, _ in main_cells(rows)} == {main}
    assert seen.splitlines()[-1] == f"Without a result: {'; '.join(condition.title for condition in waiting)}."
    assert f"+B at {main.title}: " in seen and ("The report also shows 1 other condition" in seen) == (main.length == 2_000)
    assert page.partition("\n\n")[2].partition("\n\n")[2].startswith(place) and "No verdict is possible" not in page
    order = [f"## Accuracy\n\n### {main.title}\n", "## Conditions without a result\n\n| Condition | Arms | Reason |", "## Costs"]
    assert sorted(order, key=page.index) == order and "verdict differs" not in page and "Tuned against common" not in page
    assert all(f"| {condition.title} | 4 | scratch, every seed: missing |" in page for condition in waiting if condition.tuned)
    assert not any(f"### {condition.title}\n" in page for condition in waiting), "no tables without numbers"


def test_numbers_of_labels_without_a_result_stay_in_the_main_conditions():
    broken = dict.fromkeys(("test", "correct", "score")) | {"status": "failed"}
    rows = [replace(r, **broken) if r.labels == 1_000 else r for n in (100, 1_000) for r in cell(SHORT, labels=n)]
    assert compare(rows).main == (Condition(100), Condition(1_000)) and "3 comparisons have no verdict" in markdown(rows, **PAGE)
    assert "+A at 1,000 labels: no verdict (" in text(rows) and text(rows).endswith("\nWithout a result: 1,000 labels.")


def test_untuned_comparison_beside_a_tuned_one_is_not_hidden():
    """A recipe may probe frozen features, without tuning, beside a tuned comparison with another baseline."""
    probes = {"random weights": 0, "pretrained": 0.1}
    rows = [*cell(LONG, tuned=TUNED), *cell(probes, labels=1_000)]
    c, page, seen = compare(rows), markdown(rows, **PAGE), text(rows)
    assert c.main == (Condition(100, None, True), Condition(1_000)) and {arm for _, arm in main_cells(rows)} == {*LONG, *probes}
    assert "common settings" not in section(page, "## Accuracy") and "### 1,000 labels" in section(page, "## Accuracy")
    assert page.partition("\n\n")[2].partition("\n\n")[2].startswith("With tuned settings where there are any, ") and "“pretrained” (" in page
    assert "pretrained at 1,000 labels" in seen and "The report also shows" not in seen
    assert "different numbers of trials" not in page and "judged by different numbers" not in page
    changes = section(page, "Differences from")
    assert all(f"- {arm}: " in page for arm in ("+A", "+B", "+C", "pretrained")), changes


def test_arm_that_starts_from_its_control_before_the_tuning_gets_no_verdict():
    """Weights of the untuned control are compared with the tuned control: the tuning would count as an effect."""
    rows = cell(LONG, tuned=TUNED)
    control = next(r.run for r in rows if r.arm == "scratch")
    for start, verdict in ((control | {"lr": 0.0007}, "no verdict"), (control, "better"), (control | {"model": {}, "lr": 1}, "better")):
        shelf = [
            replace(r, steps=0, run=r.run | {"init": start}, tuning=tuning(0.002, trials=0)) if r.arm == "+A" else r for r in rows
        ]
        row = row_of(shelf, "+A")
        assert row.verdict == verdict and ("starts from scratch as it was before the tuning" in row.reason) == (verdict != "better")


def test_without_any_result_the_main_condition_is_that_of_the_longest_training(rows):
    nothing = dict.fromkeys(("test", "correct", "score"))
    c = compare([replace(r, status="missing", **nothing) for r in rows])
    assert c.main == (Condition(100, 2_000, True),) and not c.done


# Trials


def test_the_page_says_how_often_each_arm_was_tried(rows):
    for page in (markdown(rows, **PAGE), html(rows, **PAGE)):
        assert "4 of scratch, +A, +B and +C" in page.replace("&#43;", "+") and "different numbers of trials" not in page
    more = {"scratch": 4, "+A": 9, "+B": 4, "+C": 4}
    (line,) = [line for line in warnings(rows, more) if "different numbers of trials" in line]
    assert line.endswith("scratch: 4; +A: 9; +B: 4; +C: 4")
    assert "9 of +A" in markdown(rows, **PAGE, trials=more)
    assert "tried on validation images" not in markdown(cell(SHORT), **PAGE)


def test_settings_that_were_scored_on_test_images_but_are_not_shown_give_a_warning(rows):
    counted = [replace(r, test_settings=3) for r in rows]
    assert not any("More settings" in line for line in warnings(counted)), "two lengths and tuned settings are on the page"
    counted = [replace(r, test_settings=5) if r.arm == "+B" else r for r in counted]
    (line,) = [line for line in warnings(counted) if "More settings" in line]
    assert line.endswith("by luck: +B: 5") and "5 of +B" in markdown(counted, **PAGE)


def test_the_trials_of_all_arms_are_drawn_with_the_choice(rows, monkeypatch):
    found = []
    monkeypatch.setattr("smallvit.report.figures.svg", lambda figure, *_: found.append(figure) or "")
    by_tuning(compare(rows), tuning_curves(compare(rows), rows))
    (ax,) = found[0].axes
    chosen = [(line.get_xdata()[0], line.get_markersize()) for line in ax.lines if line.get_markersize() == 9]
    assert [x for x, _ in chosen] == [0.002, 0.004, 0.001, 0.002]
    assert ax.get_xscale() == "log" and ax.get_xlabel() == "learning rate"
    joined = [list(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) > 1]
    assert joined == [list(RATES[1:])] * 4, "a trial with fewer seeds is not part of the line"


def test_tuned_options_with_equal_names_have_a_panel_each(rows, monkeypatch):
    found = []
    monkeypatch.setattr("smallvit.report.figures.svg", lambda figure, *_: found.append(figure) or "")
    curves = {(100, option): {"+A": [Trial(1.0, 0.8, 1, True), Trial(2.0, 0.7, 1, False)]} for option in ("dim", "width")}
    by_tuning(compare(rows), curves)
    assert [ax.get_xlabel() for ax in found[0].axes] == ["dim", "width"]


@pytest.mark.parametrize("wide", [False, True])
def test_large_differences_against_the_length_do_not_hide_small_ones(wide, monkeypatch):
    found = []
    monkeypatch.setattr("smallvit.report.figures.svg", lambda figure, *_: found.append(figure) or "")
    rows = [*cell({"scratch": 0, "+A": 0.12 if wide else 0.01}, length=500), *cell({"scratch": 0, "+A": 0.01}, length=2_000)]
    by_length(compare([*rows, *cell({"scratch": 0, "+A": 0.01}, length=2_000, tuned=TUNED)]))
    (ax,) = found[0].axes
    assert ax.get_yscale() == ("symlog" if wide else "linear") and ax.get_xscale() == "log"
    assert ax.get_ylabel() == "difference, points" + "\nlogarithmic beyond ±2" * wide
    assert list(ax.get_xticks()) == [500, 2_000]
    hollow = [line for line in ax.lines if line.get_markerfacecolor() == "#0d0d0d"]
    assert len(hollow) == 1 and hollow[0].get_xdata()[0] > 2_000


# The command


def test_the_command_prints_where_two_arms_disagree(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("demo.py").write_text(
        '"""Does it help?"""\nfrom smallvit import Run, ViT, ablate\nscratch = Run(model=ViT, steps=2)\n'
        'RUNS = ablate({"scratch": scratch, "+A": scratch.vary(steps=3)}, labels=[100], references=False)\n'
    )
    write_records(Path("demo.jsonl"), cell({"scratch": 0, "+A": 0.05}))
    try:
        main(["report", "demo.py", "--disagreements", "scratch", "+A"])
        seen = capsys.readouterr().out
        assert "100 labels: test images that “scratch” (first) and “+A” (second)" in seen and "only second" in seen
        assert main(["report", "demo.py", "--disagreements", "scratch", "+B"]) == 2
        assert "unknown arm '+B'" in capsys.readouterr().err
        write_records(Path("demo.jsonl"), cell({"scratch": 0, "+A": 0.05, "removed": 0.02}))
        main(["report", "demo.py", "--disagreements", "removed", "+A"])
        assert "test images that “removed” (first) and “+A” (second)" in capsys.readouterr().out
    finally:
        sys.modules.pop("recipes.demo", None)


# Several baselines, and arms that are compared with another arm

FAMILY = {"vit": 0, "+A": 0.1}


def test_each_group_shows_its_own_main_conditions():
    """One baseline was trained for longer than the other: shorter training of it is no main result."""
    two = [*cell(FAMILY, length=500), *cell({"vit": 0, "+A": -0.1}, length=2_000)]
    four = cell({"cnn": 0, "+B": -0.1}, length=2_000) + cell({"cnn": 0, "+B": 0.1}, length=8_000)
    rows = [*two, *four]
    shown = {(row.arm, row.length) for row in compare(rows).main_rows}
    assert shown == {("vit", 2_000), ("+A", 2_000), ("cnn", 8_000), ("+B", 8_000)}
    assert {(arm, condition.length) for condition, arm in main_cells(rows)} == shown
    page = markdown(rows, **PAGE)
    assert "With the longest training, “+B” (" in page and "“+A” (−" in page and "“+B” (−" not in page.partition("## ")[0]
    assert "With longer training, the difference" in page and "8,000 training steps, the difference" not in page
    assert "500 steps" in section(page, "Accuracy after shorter training")


def test_page_is_made_before_the_control_of_an_arm_has_started():
    rows = cell({"vit": 0, "+A": 0.1, "+A +B": 0.15})
    rows = [replace(r, baseline="+A") if r.arm == "+A +B" else r for r in rows]
    waiting = [replace(r, status="missing", test=None) if r.arm == "+A" else r for r in rows]
    assert warnings([r for r in waiting if r.status != "missing"]) == []
    assert {arm for _, arm in main_cells([r for r in rows if r.arm != "+A"])} == {"vit", "+A +B"}
    page = markdown(waiting, **PAGE)
    assert "+A, every seed: missing" in page and "| +A +B |" in page


def test_costs_that_differ_from_another_arm_than_the_baseline_name_it():
    rows = [replace(r, baseline="+A") if r.arm == "+A +B" else r for r in cell({"vit": 0, "+A": 0.1, "+A +B": 0.15})]
    macs = {"vit": 5_000_000, "+A": 20_000_000, "+A +B": 42_000_000}
    seconds = {"vit": 10.0, "+A": 40.0, "+A +B": 48.0}
    page = markdown([replace(r, macs=macs[r.arm], seconds=seconds[r.arm]) for r in rows], **PAGE)
    costs = section(page, "## Costs")
    assert "20.00 M (4× baseline)" in costs and "42.00 M (2.1×)" in costs and "48.0 (+20%)" in costs
    assert [line.split("|")[-2].strip() for line in costs.splitlines() if line.startswith(("| Arm", "| vit", "| +A"))] == [
        "Compared with", "–", "vit", "+A",
    ]  # fmt: skip
    table = latex_table(compare(rows))
    assert "from ``vit'' or from the arm that is named" in table and table.count("(from +A)") == 1
    lengths = [*(replace(r, length=100) for r in rows), *(replace(r, length=300) for r in rows)]
    table = section(markdown(lengths, **PAGE), "Difference and training length")
    assert [line.count("from +A") for line in table.splitlines() if line.startswith("| +A")] == [0, 2]


def test_baselines_of_two_data_sets_have_their_own_classes_and_references():
    matrices = {"digits": [[5, 0, 0], [0, 5, 0], [0, 0, 5]], "photos": [[8, 2], [1, 4]]}
    classes = {"digits": ("a", "b", "c"), "photos": ("cat", "dog")}

    def group(arms: dict[str, float], data: str) -> list[Record]:
        return [
            replace(r, confusion=matrices[data], preprocess={"classes": classes[data]}, data_sha256=data) for r in cell(arms)
        ]

    pixels = {"digits": 0, "pixels": 0.1}
    references = [r for r in group(pixels, "digits") if r.arm == "pixels"]
    raw = [replace(r, role="reference", run={"model": {"call": "smallvit.references.Pixels"}}) for r in references]
    small = [replace(r, arm="small CNN", run={"model": {"arm": "small CNN"}}) for r in raw]
    rows = [*group({"digits": 0.15}, "digits"), *raw, *small, *group({"photos": -0.1, "+A": 0}, "photos")]
    for order in (rows, rows[::-1]):
        page = markdown(order, **PAGE)
        assert "| cat | 10 |" in page and "| c | 5 |" in page and not [w for w in warnings(order) if "raw pixels" in w]
        assert "has a lower mean than the best arm" in page and "for “digits”" in page
    assert [w for w in warnings([replace(r, data_sha256="d") for r in rows]) if "raw pixels" in w]


def test_best_mean_of_each_score_is_bold():
    scores = {"b": 0.3, "+B": 0.2}
    loss = [
        replace(r, score="log_loss", lower_is_better=True, test={"log_loss": scores[r.arm]}, correct=None)
        for r in cell({"b": 0, "+B": 0})
    ]
    table = latex_table(compare([*cell(FAMILY), *loss]))
    assert re.findall(r"^(\S+).*\\textbf", table, re.M) == ["+A", "+B"]
