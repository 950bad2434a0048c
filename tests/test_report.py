"""Reports: statistics, verdicts, what the pages say, and how the figures are drawn."""

import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from markupsafe import escape
from scipy import stats
from toys import slow_after, slow_but

from smallvit.components import describe_value, differences
from smallvit.packing import pack_bits
from smallvit.record import RANDOM, Record, user_line
from smallvit.report import figures, html, markdown, text
from smallvit.report.alarms import no_better_than_random
from smallvit.report.answer import answer
from smallvit.report.format import excess
from smallvit.report.page import sections
from smallvit.report.provenance import provenance, warnings
from smallvit.report.remarks import failures
from smallvit.report.settings import changes, hyperparameters, option_names
from smallvit.verdicts import Condition, compare, holm, pairs_needed

pytestmark = pytest.mark.usefixtures("without_figures")
DOC = "Does it help?\n\nPaper     arXiv:0000.00000.\nExpected  <a gain>\n          of `some` size.\n\nThe end."
# fields that a failed run does not have
UNKNOWN = dict.fromkeys(
    ("score", "val", "test", "params", "macs", "images_seen", "seconds", "device", "subset_sha256", "curve")
)
PAGE = {"title": "demo", "doc": DOC}
TRACEBACK = '''Traceback (most recent call last):
  File "/home/a/smallvit/smallvit/vit.py", line 7, in forward
    return self.block(x)
  File "/home/a/smallvit/recipes/mine.py", line 12, in forward
    return attention(x) + 1
  File "/usr/lib/python3.11/site-packages/torch/nn.py", line 3, in f
    raise TypeError
TypeError: unsupported operand
'''


def records(arms: dict[str, float], *, labels=(1000,), seeds=8, noise=0.002, rng=0, references=()) -> list[Record]:
    """One finished record for each arm, number of labels and seed. The first arm is the baseline; values are effects."""
    draw, out = np.random.default_rng(rng), []
    for n in labels:
        level = draw.normal(0.9, 0.003, seeds)
        for place, (arm, effect) in enumerate(arms.items()):
            role = "baseline" if place == 0 else "reference" if arm in references else "technique"
            for seed, accuracy in enumerate(level + effect + draw.normal(0, noise, seeds)):
                curve = [[step, 1.0, float(accuracy) * step / 300] for step in (100, 200, 300)]
                out.append(
                    Record(
                        recipe="demo", arm=arm, role=role, labels=n, seed=seed, status="finished", fingerprint="f0",
                        run={"model": {"arm": arm, "dim": 64}, "seed": seed}, score="accuracy", val={"accuracy": 0.9},
                        test={"accuracy": float(accuracy)}, params=1000, macs=5_000_000, images_seen=6400, steps=300,
                        seconds=10.0, device="cpu", precision="fp32", kernel="rule", compiled=False, threads=1,
                        subset_sha256=f"{n}/{seed}", curve=curve, cpu="a cpu", test_reads=1,
                        code={"sha256": "c0de", "commit": "abc", "dirty": False}, versions={"python": "3.12"},
                    )
                )  # fmt: skip
    return out


def change(rows: list[Record], arm: str | None, seed: int | None = None, **fields) -> list[Record]:
    """The records with these fields of one arm (None: all arms) and seed (None: all seeds) replaced."""
    return [replace(r, **fields) if arm in (None, r.arm) and seed in (None, r.seed) else r for r in rows]


def differ(rows: list[Record], arm: str, effects: list[float]) -> list[Record]:
    """The records, with the accuracy of this arm exactly these differences from the baseline's, seed by seed."""
    base = {r.seed: r.result for r in rows if r.role == "baseline"}
    return [replace(r, test={"accuracy": base[r.seed] + effects[r.seed]}) if r.arm == arm else r for r in rows]


def fail(rows: list[Record], arm: str, seed: int | None = None, status="failed", error="boom", **fields) -> list[Record]:
    """The records, with runs of this arm failed."""
    return change(rows, arm, seed, status=status, error=error, **UNKNOWN, **fields)


def two_baselines(labels=(1000,)) -> list[Record]:
    """Patches of 2 and of 4 pixels, each with a baseline and a technique; the reference belongs to the first."""
    small = records({"patch 2": 0.05, "ToMe, patch 2": 0.03, "kNN": -0.1}, labels=labels, references=("kNN",))
    large = records({"patch 4": 0, "ToMe, patch 4": 0.02}, labels=labels, rng=1)
    return change(small, None, baseline="patch 2") + change(large, None, baseline="patch 4")


MS = 3.0  # of a forward pass, in every arm


def costed(rows: list[Record], **arms: tuple) -> list[Record]:
    """The records with numbers of the evaluator `cost`: MACs, their SD over images, tokens and speed-up of reduced arms."""
    out = []
    for r in rows:
        test = (r.test or {}) | {"macs": 8e6, "ms": MS}
        if r.arm in arms:
            macs, sd, tokens, speedup = arms[r.arm]
            test |= {"macs": macs, "tokens": tokens, "speedup": speedup + (r.seed - 3.5) / 100} | ({"macs_sd": sd} if sd else {})
        out.append(replace(r, run=r.run | {"evaluators": [{"call": "smallvit.evaluate.cost", "batch": 32}]}, test=test))
    return out


def accuracies(rows: list[Record], arm: str) -> list[float]:
    return [r.result for r in rows if r.arm == arm]


def row_of(rows: list[Record], arm: str):
    return next(row for row in compare(rows).rows if row.arm == arm)


PLAIN = records({"scratch": 0, "+A": 0})


# Statistics


def test_differences_agree_with_scipy():
    rows = records({"scratch": 0, "+A": 0.001})
    row, base, own = row_of(rows, "+A"), accuracies(rows, "scratch"), accuracies(rows, "+A")
    expected = stats.ttest_rel(own, base)
    interval = expected.confidence_interval(0.95)
    assert row.difference.p_seeds == pytest.approx(expected.pvalue, rel=1e-6)
    assert [row.difference.seeds_low, row.difference.seeds_high] == pytest.approx([interval.low, interval.high], rel=1e-9)
    assert row.sd == pytest.approx(np.std(own, ddof=1), rel=1e-12)
    assert [row.low, row.high] == pytest.approx(stats.t.interval(0.95, 7, np.mean(own), stats.sem(own)), rel=1e-12)


@pytest.mark.parametrize("recipes", slow_after(1, [200, 400]))
def test_no_effect_gives_a_false_verdict_in_at_most_one_recipe_in_twenty(recipes):
    """The rate is 5% by design, so a sample of it is often above; the test is that it is not shown to be above."""
    arms = {"scratch": 0, "+A": 0, "+B": 0, "+C": 0}
    wrong = [{row.verdict for row in compare(records(arms, rng=k)).rows} & {"better", "worse"} for k in range(recipes)]
    assert stats.binomtest(sum(map(bool, wrong)), len(wrong), 0.05, alternative="greater").pvalue > 0.01


def test_interval_over_seeds_contains_a_known_effect_in_95_percent():
    found = [row_of(records({"scratch": 0, "+A": 0.004}, rng=k), "+A").difference for k in range(400)]
    assert np.mean([d.seeds_low <= 0.004 <= d.seeds_high for d in found]) == pytest.approx(0.95, abs=0.025)


# Verdicts


def test_holm_family_counts_every_technique_at_every_number_of_labels_but_no_reference():
    rows = records({"scratch": 0, "+A": 0.001, "+B": 0.002, "kNN": -0.1}, labels=(100, 1000), references=("kNN",))
    judged = [row for row in compare(rows).rows if row.verdict]
    assert len(judged) == compare(rows).family == 4
    assert [row.difference.p_holm for row in judged] == holm([row.difference.p for row in judged])
    reference = row_of(rows, "kNN")
    assert reference.verdict is None and reference.difference.p_holm is None and reference.difference.high < 0
    assert compare([*rows, *(replace(r, arm="first stage", role="dependency") for r in rows[:2])]) == compare(rows)


def test_comparisons_removed_from_the_recipe_stay_in_the_family():
    rows = records({"scratch": 0, "+A": 0.002, "+B": 0.002})
    found, alone = (next(row for row in compare(rows, earlier=k).rows if row.arm == "+A").difference for k in (3, 0))
    with_more = holm([d.p for d in (row_of(rows, arm).difference for arm in ("+A", "+B"))] + [1.0] * 3)
    assert found.p_holm == with_more[0] > alone.p_holm and compare(rows, earlier=3).family == 5
    note = "The family counts 3 further comparisons whose arms were removed from the recipe after they had been run"
    for write in (markdown, html):
        assert note in write(change(rows, None, removed=3), **PAGE) and "removed" not in write(rows, **PAGE)
    one = change(rows, None, removed=1)
    assert "1 further comparison whose" in markdown(one, **PAGE) and "better" in text(one)


@pytest.mark.parametrize("effect, word", [(0.02, "better"), (-0.02, "worse"), (0.0, "inconclusive")])
def test_verdicts(effect, word):
    assert row_of(differ(PLAIN, "+A", [effect + 0.002, effect - 0.002] * 4), "+A").verdict == word


def test_five_pairs_give_no_verdict_and_say_how_many_would():
    row = row_of(records({"scratch": 0, "+A": 0.05}, seeds=5, noise=0.01), "+A")
    assert row.verdict == "not enough seeds" and f"about {pairs_needed(row.difference.sd)} would show" in row.reason
    single = row_of(records({"scratch": 0, "+A": 0.05}, seeds=1), "+A")
    assert single.verdict == "not enough seeds" and single.difference.low is None
    assert row_of(records({"scratch": 0, "+A": 0.05}, seeds=6), "+A").verdict == "better"


@pytest.mark.parametrize("seeds, factor", [(3, "2.4"), (4, "1.5"), (6, "")])
def test_few_seeds_have_a_remark_about_their_wide_intervals(seeds, factor):
    page = markdown(records({"scratch": 0, "+A": 0.05}, seeds=seeds, noise=0.01), **PAGE)
    assert (f"Comparisons with {seeds} seeds have wide intervals" in page) is bool(factor)
    assert f"narrower by a factor of {factor}." in page or not factor


BROKEN = {
    "missing": lambda rows: [r for r in rows if (r.arm, r.seed) != ("+A", 3)],
    "other images": lambda rows: change(rows, "+A", 3, subset_sha256="other"),
    "changed data": lambda rows: change(rows, "+A", 3, data_sha256="other"),
    "not yet trained": lambda rows: fail(rows, "+A", 3, "missing", None),
    "failed": lambda rows: fail(rows, "+A", 3, "failed", "out of <memory>"),
    "unavailable": lambda rows: fail(rows, "+A", 3, "unavailable", "out of <memory>"),
    "baseline failed": lambda rows: fail(rows, "scratch", 3, "failed", "out of <memory>"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_incomplete_comparison_has_no_verdict_but_a_reason(how):
    rows = differ(records({"scratch": 0, "+A": 0.02, "+B": 0}, labels=(100,)), "+B", [0.002, -0.002] * 4)
    rows = BROKEN[how](rows)
    row, other = row_of(rows, "+A"), row_of(rows, "+B")
    assert row.verdict == "no verdict" and "seed 3" in row.reason and len(row.difference.seeds) == 7
    assert other.verdict == ("no verdict" if "baseline" in how else "inconclusive")
    page = markdown(rows, **PAGE)
    assert f"no verdict ({row.reason})" in page and f"+A at 100 labels: no verdict, {100 * row.difference.mean:+.2f}" in text(rows)
    assert ("out of &lt;memory&gt;" in page) == (how in ("failed", "unavailable", "baseline failed"))


def test_failed_run_makes_no_other_verdict_easier():
    rows = records({"scratch": 0, "+A": 0.02, "+B": 0.002})
    whole, after = row_of(rows, "+B").difference, row_of(BROKEN["failed"](rows), "+B").difference
    assert after.p == whole.p and after.p_holm == 2 * whole.p >= whole.p_holm


def test_differences_that_do_not_vary():
    for shift, verdict, p in ((0.0, "inconclusive", 1.0), (0.001, "no verdict", None)):
        row = row_of(differ(PLAIN, "+A", [shift] * 8), "+A")
        assert (row.verdict, row.difference.p) == (verdict, p) and "every seed" in row.reason


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda rows: change(rows, "scratch", role="technique"), "baseline"),
        (lambda rows: change(rows, "+A", baseline="+B"), "'\\+A' has the baseline '\\+B'; expected one of \\['scratch'\\]"),
        (lambda rows: change(rows, "scratch", baseline="+A"), "'scratch' has the baseline '\\+A'"),
        (lambda rows: [*rows, *two_baselines()[:1]], "'\\+A' has the baseline ''"),
        (lambda rows: change(two_baselines(), "ToMe, patch 4", 2, baseline="patch 2"), "the same in all its runs"),
        (lambda rows: [*rows, rows[3]], "twice"),
        (lambda rows: change(rows, "+A", 2, role="reference"), "one role"),
        (lambda rows: change(rows, "+A", 2, score="knn_5"), "one score"),
        (lambda rows: change(rows, "+A", 2, recipe="other"), "one recipe"),
        (lambda rows: change(rows, "+A", 2, test={"accuracy": 93.1}), "between 0 and 1"),
        (lambda rows: change(rows, "+A", 2, test={"accuracy": math.nan}), "between 0 and 1"),
        (lambda rows: change(rows, "+A", 2, test={}), "no 'accuracy'"),
        (lambda rows: [], "baseline"),
    ],
)
def test_records_that_cannot_be_compared_are_refused(spoil, words):
    with pytest.raises(ValueError, match=words):
        compare(spoil(PLAIN))


def test_unequal_costs_are_marked_with_pretraining_and_further_labels_counted():
    rows = records({"scratch": 0, "+A": 0, "+B": 0})
    rows = change(rows, "+A", params=1040, macs=6_000_000, chosen_on_val={"what": "early stop", "labels": 500})
    rows = change(rows, "+B", pretraining={"images_seen": 640_000, "seconds": 0.1})
    assert row_of(rows, "+A").unequal == {"macs": pytest.approx(0.2), "extra_labels": math.inf}
    assert row_of(rows, "+B").unequal == {"images_seen": pytest.approx(100)}
    page = markdown(rows, **PAGE)
    assert "| +A | 1,040 | 6.00 M (+20%) | 6,400 | 10.0 | 500 (baseline: 0) |" in page and "646,400 (101× baseline)" in page
    assert "| +A | 1,040 | – |" in markdown(change(rows, "+A", macs=None), **PAGE)


def test_marks_of_costs_are_explained_where_there_are_some():
    equal, other = html(PLAIN, **PAGE), html(change(PLAIN, "+A", macs=6_000_000), **PAGE)
    assert "pretraining included.</p>" in equal and "Marked costs differ" not in equal
    assert "Marked costs differ from the baseline's by more than 5%." in other


# Several baselines


def test_every_arm_is_compared_with_its_own_baseline_in_one_holm_family():
    rows = two_baselines(labels=(100, 1000))
    c, alone = compare(rows), compare([r for r in rows if r.baseline == "patch 4"])
    row, same = (next(r for r in x.at(Condition(1000)) if r.arm == "ToMe, patch 4") for x in (c, alone))
    assert (row.baseline, row.verdict, c.family) == ("patch 4", "better", 4) and row.difference.values == same.difference.values
    judged = [r.difference for r in c.rows if r.verdict]
    assert [d.p_holm for d in judged] == holm([d.p for d in judged])
    assert c.baselines == ("patch 2", "patch 4") and [p.baseline for p in c.parts()] == ["patch 2", "patch 4"]
    assert [list(p.arms) for p in c.parts()] == [["patch 2", "ToMe, patch 2", "kNN"], ["patch 4", "ToMe, patch 4"]]


def test_costs_and_missing_runs_concern_only_the_own_baseline():
    rows = fail(change(two_baselines(), "patch 2", macs=40_000_000), "patch 2", 3)
    two, four = row_of(rows, "ToMe, patch 2"), row_of(rows, "ToMe, patch 4")
    assert (two.verdict, two.unequal) == ("no verdict", {"macs": -0.875}) and "patch 2, seed 3: failed" in two.reason
    assert (four.verdict, four.unequal) == ("better", {})


@pytest.mark.figures
def test_each_baseline_has_its_own_numbers_of_labels_and_seeds():
    rows = [r for r in two_baselines(labels=(100, 1000)) if r.baseline == "patch 2" or (r.labels == 100 and r.seed < 7)]
    c = compare(rows)
    assert not any(row.failures for row in c.rows) and [part.labels for part in c.parts()] == [(100, 1000), (100,)]
    page = markdown(rows, **PAGE)
    assert "### 100 labels, compared with patch 4" in page and "### 1,000 labels, compared with patch 4" not in page
    assert [bool(figures.by_labels(part)) for part in c.parts()] == [True, False]


def test_records_without_a_baseline_name_are_compared_with_the_only_baseline():
    rows = records({"scratch": 0, "+A": 0.02})
    assert markdown(rows, **PAGE) == markdown(change(rows, None, baseline="scratch"), **PAGE)
    assert row_of(rows, "+A").baseline == "scratch"


@pytest.mark.figures
def test_pages_name_each_of_several_baselines():
    rows = two_baselines()
    page, d = markdown(rows, **PAGE), row_of(rows, "ToMe, patch 2").difference
    assert f"ToMe, patch 2 at 1,000 labels: worse than patch 2 by {-100 * d.mean:.2f} points" in text(rows)
    assert "“ToMe, patch 2” (" in page and "is worse than “patch 2”" in page and "is better than “patch 4”" in page
    assert "1,000 labels, compared with patch 2" in page and len(re.findall(r"^\| kNN .*\| reference \|$", page, re.M)) == 1
    assert '- ToMe, patch 4: arm: "patch 4" → "ToMe, patch 4"' in page
    short = text([r for r in rows if r.seed < 3])
    assert "ToMe, patch 4 at 1,000 labels: not enough seeds compared with patch 4, +" in short
    seen = html(rows, **PAGE)
    pictures = ["".join(ElementTree.fromstring(svg).itertext()) for svg in re.findall(r"<svg.*?</svg>", seen, re.DOTALL)]
    assert len(pictures) == 6 and "points above patch 2" in pictures[0] and "points above patch 4" in pictures[1]
    assert not any("patch 2" in picture and "patch 4" in picture for picture in pictures)
    assert seen.count("<h3>Compared with patch 4</h3>") == 3


@pytest.mark.figures
def test_a_baseline_without_arms_is_not_said_to_be_compared_with_itself():
    rows = [r for r in two_baselines() if r.arm in ("patch 2", "ToMe, patch 2", "patch 4")]
    page, seen = markdown(rows, **PAGE), html(rows, **PAGE)
    assert "### 1,000 labels, patch 4" in page and "compared with patch 4" not in page
    assert "### 1,000 labels, compared with patch 2" in page
    assert "<h3>patch 4</h3>" in seen and "ompared with patch 4" not in seen and "<h3>Compared with patch 2</h3>" in seen


@pytest.mark.figures
def test_a_reference_is_not_said_to_be_compared_with_a_baseline():
    rows = [r for r in two_baselines() if r.arm in ("patch 2", "patch 4")]
    rows += [replace(r, arm="CNN", role="reference", baseline="patch 2") for r in rows if r.arm == "patch 2"]
    seen = html(rows, **PAGE)
    assert "<h3>patch 2</h3>" in seen and "<h3>patch 4</h3>" in seen and "ompared with patch" not in seen + markdown(rows, **PAGE)


def test_baselines_without_arms_share_a_table():
    page = markdown([r for r in two_baselines() if r.arm in ("patch 2", "patch 4")], **PAGE)
    (table,) = re.findall(r"## Accuracy\n\n### 1,000 labels\n\n(.*?)\n\n", page, re.DOTALL)
    assert [line.split("|")[1].strip(" *") for line in table.splitlines()[2:]] == ["patch 2", "patch 4"]


# The answer


ANSWERS = {
    "better": (records({"scratch": 0, "+A": 0.02}), r"At 1,000 labels, “\+A” \(\+2\.\d\d points\) is better than “scratch”\."),
    "all kinds": (
        fail(records({"s": 0, "+A": 0.05, "+B": -0.05, "+C": 0, "+D": 0}, rng=1), "+D", 3),
        r"At 1,000 labels, “\+A” \(.*\) is better than “s”, and “\+B” \(−5.*\) is worse than “s”\. "
        r"No difference was shown for “\+C”; 1 comparison has no verdict, for the reasons in the table\.",
    ),
    "several numbers of labels": (
        records({"s": 0, "+A": 0.05, "+B": 0, "+C": 0, "+D": 0}, labels=(10, 100), rng=1),
        r"“\+A” \(\+\d\.\d\d points at 10 labels, \+\d\.\d\d at 100\) is better than “s”\. "
        r"No difference was shown for 3 of the 4 arms at 10 and 100 labels\.",
    ),
    "nothing shown": (
        records({"s": 0, "+A": 0, "+B": 0, "+C": 0}, labels=(None,), rng=1),
        r"At all labels, no technique was shown to be better than “s”\. No difference was shown for any of the 3 arms\.",
    ),
    "many arms": (
        records({"s": 0, **{f"+{k}": k / 100 for k in range(1, 7)}}),
        r"At 1,000 labels, “\+6” \(.*\), “\+5” \(.*\), “\+4” \(.*\) and 3 more arms are better than “s”\.",
    ),
    "several baselines": (
        two_baselines(),
        r"At 1,000 labels, “ToMe, patch 4” \(.*\) is better than “patch 4”, and “ToMe, patch 2” \(.*\) is worse than “patch 2”\.",
    ),
    "too few seeds": (
        records({"s": 0, "+A": 0.05, "+B": 0}, seeds=5),
        r"No verdict is possible yet\. Both comparisons have fewer than the 6 seeds that a verdict needs\.",
    ),
    "before the first look": (
        change(records({"s": 0, "+A": 0.05}, seeds=7), None, looks=[8, 16, 32]),
        r"No verdict is possible yet\. 1 comparison has fewer than the 8 seeds of the first look\.",
    ),
    "everything failed": (
        fail(records({"s": 0, "+A": 0}), "+A"),
        r"No verdict is possible yet\. 1 comparison has no verdict, for the reasons in the table\.",
    ),
    "unavailable": (fail(PLAIN, "+A", status="unavailable"), r"No technique has been compared with “scratch”\."),
}


@pytest.mark.parametrize("case", slow_but(("better", "all kinds", "nothing shown", "unavailable", "too few seeds"), ANSWERS))
def test_answer_states_the_verdicts_in_two_sentences(case):
    rows, expected = ANSWERS[case]
    assert re.fullmatch(expected, answer(compare(rows)))
    assert re.search(expected, markdown(rows, **PAGE)) and re.search(expected, html(rows, **PAGE).replace("&#43;", "+"))


# Warnings and provenance


OTHER_CONDITIONS = [
    {"device": "cuda:0"}, {"threads": 2}, {"precision": "bf16"}, {"cpu": "another"}, {"code": {"sha256": "beef"}},
    {"kernel": "fused"}, {"compiled": True},
    {"versions": {"python": "3.13"}}, {"test_reads": 2}, {"score": "knn_5", "test": {"knn_5": 0.9}},
    {"code": {"sha256": "c0de", "dirty": True}},
]  # fmt: skip


@pytest.mark.parametrize("fields", OTHER_CONDITIONS)
def test_arms_run_under_other_conditions_give_a_warning(fields):
    assert "## Warnings" not in markdown(PLAIN, **PAGE)
    page = markdown(change(PLAIN, "+A", **fields), **PAGE)
    assert "## Warnings" in page and re.search("There (is|are) . warnings? below", page)


def test_html_page_has_the_warnings_of_the_markdown_page():
    """Drawing the figures takes the longest, so one page has all warnings."""
    rows = PLAIN
    for fields in OTHER_CONDITIONS:
        rows = change(rows, "+A", **fields)
    page = html(rows, **PAGE)
    found = warnings(rows)
    assert "Warnings" not in html(PLAIN, **PAGE) and len(found) >= 9
    assert all(str(escape(text)) in page for text in found)


def test_test_images_that_were_trained_on_give_a_warning():
    assert not warnings(change(PLAIN, None, test_repeats=0))
    (line,) = warnings(change(PLAIN, "+A", 3, test_repeats=1_200))
    assert "also training or validation images" in line and line.endswith(": 1,200")


@pytest.mark.parametrize("seeds", [2, 8])
def test_an_arm_at_chance_gives_a_warning_and_a_reference_does_not(seeds):
    rows = records({"scratch": 0, "+A": -0.65, "Pixels": -0.7}, seeds=seeds, references=("Pixels",))  # the levels are about 90%
    assert not warnings(change(rows, None, test_majority=0.1)) and not warnings(rows)
    rows = change(rows, None, test_majority=0.3)
    (line,) = warnings(rows)
    assert re.match(r"\+A at 1,000 labels: accuracy 2\d\.\d\d%, .*most frequent class \(30\.00%\)", line)
    assert "learning rate" in line and "most frequent class (30.00%)" in html(rows, **PAGE)
    assert len(warnings(change(records({"scratch": 0}), None, test={"accuracy": 51 / 500}, test_majority=51 / 500))) == 1


def test_data_that_changed_between_runs_give_a_warning():
    data = {"data": {"call": "smallvit.data.folder", "path": "mine", "size": None}}
    rows = change(change(PLAIN, None, run=data, data_sha256="old"), "+A", 3, data_sha256="new")
    (line,) = warnings(rows)
    assert re.match(r"Runs differ in content of folder\(path=\"mine\".*\): old in scratch and \+A; new in \+A", line)
    assert not warnings(rows[:-8])


def test_settings_that_differ_between_numbers_of_labels_are_named_with_them():
    rows = change(records({"scratch": 0, "+A": 0}, labels=(10, 100, 1_000)), None, precision="fp32")
    rows = [replace(r, precision="bf16") if r.labels == 100 else r for r in rows]
    (line,) = warnings(rows)
    few = "fp32 in scratch at 10 and 1,000 labels and +A at 10 and 1,000 labels"
    assert line == f"Runs differ in precision: {few}; bf16 in scratch at 100 labels and +A at 100 labels"


def probed(**scores: list[float]) -> list[Record]:
    """Records of a probe, `knn_1`, of arms and of an untrained model."""
    rows = records({"one": 0, "two": 0, RANDOM: 0}, labels=(20,), seeds=6, references=(RANDOM,))
    values = {r.arm: scores.get(r.arm, [0.5] * 6) for r in rows}
    return [replace(r, score="knn_1", test={"knn_1": values[r.arm][r.seed]}, probes=["knn_1"]) for r in rows]


def test_an_arm_not_better_than_an_untrained_model_gives_a_warning():
    weak = [0.5, 0.4, 0.6, 0.5, 0.45, 0.55]
    assert no_better_than_random(probed(one=[0.9] * 6, two=[0.8, 0.81, 0.82, 0.8, 0.8, 0.81])) == []
    (line,) = no_better_than_random(probed(one=[0.9] * 6, two=weak))
    assert re.match(r"two at 20 labels, knn_1: not .* untrained model, \+0\.00 points \(95% interval from −", line)


def test_probe_with_lower_values_is_better_than_an_untrained_model():
    def rows(trained: float) -> list[Record]:
        found = probed(one=[trained] * 6, two=[0.2] * 6, **{RANDOM: [0.9] * 6})
        return [replace(r, lower_is_better=True) for r in found]

    assert no_better_than_random(rows(0.4)) == []
    (line,) = no_better_than_random(rows(0.95))
    assert "one at 20 labels, knn_1: not shown" in line and line.endswith("model, −0.050 (95% interval from −0.050)")


def test_folds_are_no_independent_seeds_for_the_warning_about_an_untrained_model():
    rows = probed(one=[0.56, 0.51, 0.56, 0.52, 0.56, 0.51], two=[0.9] * 6)
    assert no_better_than_random(rows) == []
    (line,) = no_better_than_random([replace(r, folds=3) for r in rows])
    assert line.startswith("one at") and "(95% interval over folds from −" in line


def test_probes_are_in_a_table_of_their_own():
    page = markdown(probed(one=[0.9] * 6), **PAGE)
    table = page.partition("## Probes of frozen features")[2].partition("##")[2].partition("##")[0]
    assert "| one | 90.00 |" in table and f"| {RANDOM} | 50.00 |" in table and "Other measurements" not in page
    assert "Probes of frozen features" in html(probed(), **PAGE) and "Probes" not in markdown(PLAIN, **PAGE)


def test_every_other_number_of_the_evaluators_is_in_a_table():
    rows = [replace(r, test=r.test | {"nll": 0.25, "my_count": 12345.0 + r.seed - 3.5}) if r.arm == "+A" else r for r in PLAIN]
    assert "| Arm | nll | my_count |\n| - | - | - |\n| +A | 0.25 | 12,345 |" in markdown(rows, **PAGE).replace("my\\_count", "my_count")
    assert "my_count" in html(rows, **PAGE) and "Other measurements" not in html(PLAIN, **PAGE)


# Differences between arms


def test_a_value_is_described_as_a_person_writes_it():
    patch = {"call": "smallvit.tokenizers.ShiftedPatchEmbed", "patch": 2, "norm": True}
    model = {"call": "smallvit.vit.ViT", "depth": 4, "tokenizer": patch}
    assert describe_value(patch) == "ShiftedPatchEmbed(patch=2)"
    assert describe_value([{"call": "recipes.mine.Mine", "rates": [1, 2]}, None]) == "[Mine(rates=[1, 2]), None]"
    assert describe_value(model) == "ViT(depth=4, tokenizer=ShiftedPatchEmbed(patch=2))"
    assert describe_value({"model": model, "steps": 3, "batch": 8}) == "Run(model=ViT, steps=3)"


def test_arms_with_another_control_are_no_points_of_a_curve_and_their_control_is_named():
    wide = [(f"fused, width {n}", 0.0, {"model.fused": True, "model.dim": n}) for n in (16, 32)]
    rows = varied(("fused", 0.0, {"model.fused": True}), *wide)
    controls = {name: "fused" for name, _, _ in wide}
    rows = [replace(r, baseline=controls.get(r.arm, "scratch")) for r in rows]
    assert found_in(rows) == {}
    found = changes(compare(rows), rows)
    assert found["fused"] == ["fused: False → True"] and found["fused, width 16"] == ["dim: 64 → 16 (against fused)"]


def test_an_exchanged_component_is_one_difference():
    merge, prune = {"call": "smallvit.reduction.Merge", "r": 4}, {"call": "smallvit.reduction.Prune", "keep": 0.5}
    plain = {"model": {"reduction": None, "dim": 8}, "augment": [], "steps": 2}
    other = {"model": {"reduction": merge, "dim": 8, "pool": None}, "augment": [prune], "steps": 2.0}
    assert differences(plain, other) == {"model.reduction": (None, merge), "augment": ([], [prune])}
    assert differences({"a": [merge]}, {"a": [merge | {"r": 5}]}) == {"a[0].r": (4, 5)}
    rows = change(change(PLAIN, "scratch", run=plain), "+A", run=other)
    assert changes(compare(rows), rows) == {"+A": ["reduction: None → Merge(r=4)", "augment: [] → [Prune(keep=0.5)]"]}


def test_a_difference_of_some_seeds_says_so():
    rows = change(PLAIN, "+A", 5, run={"model": {"arm": "+A", "dim": 96}, "seed": 5})
    assert changes(compare(rows), rows) == {"+A": ['arm: "scratch" → "+A"', "dim: 64 → 96 (in 1 of 8 runs)"]}


def start_from(rows: list[Record], arm: str, source: str, missing=()) -> list[Record]:
    """The records, with the runs of one arm initialized from runs that have the fingerprints `source` + seed."""
    cost = {"images_seen": 6400, "steps": 300, "seconds": 10.0}
    return [
        replace(
            r,
            run=r.run | {"init": {"model": {"dim": 64}, "steps": 300, "seed": r.seed}},
            pretraining=cost | {"fingerprint": f"{source}{r.seed}"},
            init_weights={"loaded": 53, "missing": list(missing)},
        )
        if r.arm == arm
        else r
        for r in rows
    ]


def test_initial_weights_of_another_run_are_one_line():
    rows = [replace(r, fingerprint=f"{r.arm}{r.seed}") for r in records({"scratch": 0, "+A": 0, "+B": 0})]
    rows = start_from(rows, "+A", "scratch", [f"blocks.{k}.reduction.weight" for k in range(12)])
    rows = fail(start_from(rows, "+B", "elsewhere"), "+A", 4, pretraining=None, init_weights=None)
    lines = changes(compare(rows), rows)
    assert lines["+A"] == ['arm: "scratch" → "+A"', "init: None → weights of scratch"]
    assert lines["+B"][1].startswith("init: None → Run(model=") and len(lines["+B"]) == 2
    source = provenance(rows, "")["Pretrained weights"]
    assert "weights of scratch, loaded 53, missing blocks.0.reduction.weight" in source and "and 9 more (7 runs)" in source
    assert "loaded 53, missing none (8 runs)" in source and len(source) < 300


# The pages


def test_markdown_begins_with_the_answer_and_labels_every_plus_minus():
    rows = records({"scratch": 0, "+A": 0.02, "kNN": -0.1}, labels=(100, None), references=("kNN",))
    page, d = markdown(rows, **PAGE), row_of(rows, "+A").difference
    new, here = f"[{100 * d.low:.2f}, {100 * d.high:.2f}]", f"[{100 * d.seeds_low:.2f}, {100 * d.seeds_high:.2f}]"
    assert f"| {100 * d.mean:+.2f} {new} ({here} on these test images) | < 0.001 | better (again in " in page
    assert f"+A at 100 labels: better by {100 * d.mean:.2f} points {new}; again in " in text(rows)
    assert page.startswith("# demo\n\nDoes it help?\n\n“+A”") and "smallvit report demo" in page
    order = ["is better than", "## Accuracy", "## Costs", "## Differences", "## About", "## Provenance", "## How to read"]
    assert sorted(order, key=page.index) == order
    assert all(re.match(r"± (SD over seeds|\d+\.\d\d \(SD, n = 8\))", page[at.start() :]) for at in re.finditer("±", page))
    assert len(re.findall(r"^\| (scratch|\+A|kNN) .*(baseline|better \(.*\)|reference) \|$", page, re.M)) == 6 and "### All labels" in page


def test_docstring_becomes_prose():
    question, others = sections(DOC)
    assert question == "Does it help?"
    assert others == [("Paper", "arXiv:0000.00000."), ("Expected", "<a gain> of `some` size."), ("", "The end.")]
    assert sections("Question  Is it\n          so?\n\nFound     Yes.") == ("Is it so?", [("Found", "Yes.")])
    assert "**Expected.** &lt;a gain&gt; of `some` size." in markdown(PLAIN, **PAGE)
    assert "<b>Expected.</b> &lt;a gain&gt; of <code>some</code> size." in html(PLAIN, **PAGE)


@pytest.mark.figures
def test_html_is_one_page_that_fetches_nothing_and_escapes_every_name():
    name = "<b>$x$ & _y</b>"
    rows = records({"scratch": 0, name: 0.01}, labels=(100, 1000))
    rows = fail(rows, name, 0, error="<script>", traceback="<script>")
    page = html(rows, title="<i>", doc=DOC)
    assert "<b>$x" not in page and "<script" not in page and "<i>" not in page and "&lt;a gain&gt;" in page
    assert "&lt;b&gt;$x$ &amp; _y&lt;/b&gt;" in page and "src=" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/)", page) and not re.search(r"url\((?!#)|@import|<link", page)
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(pictures) == 4 and page == html(rows, title="<i>", doc=DOC)
    assert all(name in "".join(picture.itertext()) for picture in pictures[:3])
    assert page.count("var(--arm-0)") > 8 and "#0c0c" not in page


@pytest.mark.figures
def test_every_seed_is_on_the_page_and_one_number_of_labels_needs_no_label_axis():
    rows = records({"scratch": 0, "+A": 0.01})
    page = html(rows, **PAGE)
    assert page.count("<svg") == 3 and "labelled images" not in page
    assert all(f"{100 * r.result:.2f} ({r.seed})" in shown for r in rows for shown in (page, markdown(rows, **PAGE)))
    assert html(change(rows, None, curve=[]), **PAGE).count("<svg") == 2


def test_an_arm_whose_runs_all_failed_has_a_line_in_the_terminal():
    rows = records({"scratch": 0, "+A": 0, "+B": 0}, labels=(100, 1000))
    broken = [fail([r], "+A")[0] if r.labels == 1000 else r for r in rows]
    assert "\n+A at 1,000 labels: no verdict (+A, every seed: failed)\n" in text(broken) and "+A at 100 labels: inc" in text(broken)
    waiting = [replace(r, status="missing", error=None) if r.status == "failed" else r for r in broken]
    assert "+A at 1,000 labels" not in text(waiting), "an arm that has not started is no news"


def test_failures_show_the_line_of_the_recipe_and_fold_the_traceback():
    assert user_line(TRACEBACK) == "mine.py, line 12: return attention(x) + 1" and user_line("") == ""
    rows = fail(PLAIN, "+A", 3, error="TypeError: no", traceback=TRACEBACK)
    line = "+A at 1,000 labels, seed 3: failed: TypeError: no (mine.py, line 12: return attention(x) + 1)"
    page = html(rows, **PAGE)
    assert line in page and "<summary>Traceback</summary><pre>Traceback (most" in page and line in markdown(rows, **PAGE)
    assert "1 of 16 runs have no result; see Failures." in page


def test_without_a_comparison_the_table_shows_the_interval_of_the_accuracy():
    """One arm and a reference, which is not compared: no difference, p or verdict; with a technique they come back."""
    draw = np.random.default_rng(0)
    rows = records({"one ViT": 0.0, "pixels": -0.2, "+A": 0.0}, references=("pixels",), labels=(100,))
    correct = {r.seed: draw.random(2_000) < 0.9 for r in rows}
    fields = [{"correct": pack_bits(correct[r.seed]), "test": {"accuracy": correct[r.seed].mean()}, "test_images": 2_000} for r in rows]
    rows = [replace(r, **each) for r, each in zip(rows, fields)]
    alone = [r for r in rows if r.arm != "+A"]
    row = compare(alone).rows[0]
    low, high = row.new_images
    assert low < row.mean < high
    for make in (markdown, html):
        page, three = make(alone, **PAGE), make(rows, **PAGE)
        assert "95% CI on new seeds and images" in page and f"[{100 * low:.2f}, {100 * high:.2f}]" in page
        assert "Holm p" not in page.split("Costs")[0] and "Holm p" in three and "95% CI on new seeds and images" not in three


def test_failed_pass_shows_the_traceback_of_its_own_fold():
    """Of arm +A, fold 1 of pass 2 has failed. Seed 2 is a fold of pass 1, and must not lend its traceback."""
    other = TRACEBACK.replace("unsupported operand", "elsewhere")
    fields = {"folds": 2, "pool_images": 16, "test_images": 8}
    rows = [replace(r, **fields, test_index=pack_bits([k % 2 == r.seed % 2 for k in range(16)])) for r in PLAIN]
    rows = fail(fail(rows, "+A", 5, error="TypeError: no", traceback=TRACEBACK), "+A", 2, error="TypeError: elsewhere", traceback=other)
    rows = fail(rows, "+A", 4, status="missing", error=None)
    first, second = failures(compare(rows), rows)
    assert first[0].startswith("+A at 1,000 labels, pass 1: failed: fold 0: TypeError: elsewhere (mine.py, line 12") and first[1] == other
    assert second[0].startswith("+A at 1,000 labels, pass 2: failed: fold 1: TypeError: no (mine.py, line 12") and second[1] == TRACEBACK


def test_unavailable_arms_are_one_line():
    rows = records({"scratch": 0, "+A": 0, "A": 0, "B": 0}, labels=(10, 20), references=("A", "B"))
    rows = fail(fail(rows, "A", status="unavailable", error="no file"), "B", status="unavailable", error="no file")
    page = markdown(rows, **PAGE)
    text = "Not run: A and B. The weights are not on disk and could not be downloaded (no file)."
    assert f"## Unavailable here\n\n{text}\n" in page and "| A |" not in page and text in html(rows, **PAGE)


def test_superseded_runs_are_named_at_the_top():
    page = markdown(change(PLAIN, "+A", superseded="the default of `ema` has changed."), **PAGE)
    assert "8 of 16 runs on this page (“+A”) do not follow the recipe as it is now. The default of \\`ema\\` has changed." in page[:200]
    assert "All 16 runs on this page" in html(change(PLAIN, None, superseded="x"), **PAGE)


@pytest.mark.figures
def test_pages_without_results_say_so():
    rows = records({"scratch": 0, "+A": 0}, labels=(100, 1000))
    failed = change(rows, None, status="failed", error="boom", **UNKNOWN)
    for write in (markdown, html):
        assert "No runs are recorded yet" in write([], **PAGE) and "Does it help?" in write([], **PAGE)
        assert "boom" in write(failed, **PAGE) and "32 of 32 runs have no result" in write(failed, **PAGE)
        assert "No runs are recorded yet" in write(change(rows, None, status="missing"), **PAGE)
    assert "<svg" not in html(failed, **PAGE) and "nothing to compare" in text(failed)


@pytest.mark.figures
@pytest.mark.slow
def test_unusual_numbers_are_drawn():
    perfect = change(records({"scratch": 0, "+A": 0}, labels=(10, 20)), None, test={"accuracy": 1.0})
    zero = change(records({"scratch": 0, "+A": 0}, seeds=1), None, test={"accuracy": 0.0})
    uneven = [replace(r, curve=[[r.seed, 1.0, 0.5]]) for r in PLAIN]
    assert html(perfect, **PAGE).count("<svg") == 4 and html(zero, **PAGE).count("<svg") == 3
    assert "seeds share no step: scratch, +A" in html(uneven, **PAGE)


@pytest.mark.parametrize(("fraction", "words"), [(0.2, "+20%"), (1.0, "2× baseline"), (1.49, "2.5× baseline"), (99.4, "100× baseline"), (math.inf, "baseline: 0")])
def test_unequal_costs_as_text(fraction, words):
    assert excess(fraction) == words


@pytest.mark.parametrize(("tokens", "patches", "warned"), [(1, None, True), (2, 1, True), (17, 16, False), (None, None, False)])
def test_images_of_a_single_patch_give_a_warning(tokens, patches, warned):
    rows = [replace(r, tokens=tokens, patches=patches) for r in records({"scratch": 0, "+A": 0.01})]
    assert any("single patch, so attention has nothing to compare, in: scratch and +A" in line for line in warnings(rows)) == warned


def test_few_multiply_adds_are_in_thousands():
    rows = change(change(PLAIN, None, macs=1_000), "+A", macs=80_000)
    assert "| +A | 1,000 | 80.00 k (80× baseline) |" in markdown(rows, **PAGE)
    assert "| scratch | 1,000 | 0.10 M |" in markdown(change(PLAIN, None, macs=100_000), **PAGE)


@pytest.mark.figures
def test_costs_of_fewer_tokens_are_in_the_tables_and_a_slower_arm_is_marked():
    rows = costed(records({"scratch": 0, "+A": 0, "+B": 0}), **{"+A": (4e6, 0.25e6, 12.34, 0.9), "+B": (6e6, 0, 20, 1.4)})
    page, row = markdown(rows, **PAGE), row_of(rows, "+A")
    assert row.budget["macs"] == 4e6
    assert row.forward == {"tokens": 12.34, "macs_sd": 0.25e6, "ms": MS, "speedup": pytest.approx(0.9)}
    assert "| Tokens left | MACs per image | ms per batch | Speed-up |" in page
    assert f"| 12.3 | 4.00 M (± 0.25 M SD; −50%) | {MS} | 0.90× (slower) |" in page
    assert f"| 20.0 | 6.00 M (−25%) | {MS} | 1.40× |" in page and f"| – | 8.00 M | {MS} | – |" in page
    assert "below 1 means" in page and "on batches of 32 images" in page and page.index("0.90×") < page.index("below 1 means")
    assert "Other measurements" not in page
    seen = html(rows, **PAGE)
    assert all(words in seen for words in ("Tokens left", "Speed-up", "± 0.25 M SD", "0.90×<small>slower", "below 1 means"))
    assert seen.count("<svg") == 4 and "Accuracy and MACs" in seen
    for plain in (markdown(PLAIN, **PAGE), html(PLAIN, **PAGE)):
        assert "Tokens left" not in plain and "slower" not in plain


# Figures


@pytest.mark.figures
@pytest.mark.filterwarnings("error")
def test_long_names_are_shortened_in_figures_and_any_script_is_drawn():
    name = f"{'A ' * 75}with a long name, 2"
    seen = figures.forest(compare(records({"scratch": 0, name: 0.01, "视觉": 0})))
    assert f"{name[:39]}…{name[-20:]}" in seen and name not in seen and "视觉" in seen
    seen = figures.by_labels(compare(records({name: 0, "视觉": 0.01}, labels=(100, 1000))))
    assert f"{name[:39]}…{name[-20:]}" in seen and name not in seen


@pytest.mark.figures
@pytest.mark.parametrize("worst, log", [(-0.3, True), (-0.03, False)])
@pytest.mark.parametrize("others", [1, 4])
def test_one_very_bad_arm_does_not_hide_the_differences_of_the_others(worst, log, others, kept, monkeypatch):
    rows = records({"scratch": 0, **{f"+{k}": 0.01 for k in range(others)}, "+bad": worst}, noise=0.005)
    figures.forest(compare(rows))
    (ax,) = kept[0].axes
    assert ax.get_xscale() == ("symlog" if log else "linear")
    place = (ax.transScale + ax.transLimits).transform
    small, zero = (float(place((x, 0))[0]) for x in (1, 0))
    assert small - zero > 0.1, "the width of one point, as a part of the panel"
    monkeypatch.undo()
    seen = figures.forest(compare(rows))
    assert ("logarithmic beyond ±2" in seen) == (">−20</text>" in seen) == log


@pytest.mark.figures
def test_an_axis_of_log_losses_is_logarithmic_beyond_a_power_of_ten_near_the_median():
    rows = records({"scratch": 0, "+A": -0.02, "+B": 0.025, "+bad": -0.8})
    rows = [replace(r, score="log_loss", test={"log_loss": 1 - (r.result or 0)}, lower_is_better=True) for r in rows]
    seen = figures.forest(compare(rows))
    assert "logarithmic beyond ±0.01" in seen and ">+0.5</text>" in seen
    assert "logarithmic" not in figures.forest(compare([r for r in rows if r.arm != "+bad"]))


@pytest.mark.figures
@pytest.mark.parametrize("n, by_verdict", [(11, False), (12, True)])
def test_colors_of_many_arms_show_the_verdict(n, by_verdict, kept, monkeypatch):
    rows = records({"scratch": 0, "+A": 0.02, "+B": -0.02, **{f"+{k}": 0 for k in range(2, n)}})
    rows = fail(rows, "+3", 0)
    verdicts = {row.arm: row.verdict for row in compare(rows).rows if row.verdict}
    assert len(verdicts) == n and set(verdicts.values()) == {"better", "worse", "inconclusive", "no verdict"}
    figures.forest(compare(rows))
    (ax,) = kept[0].axes
    means = [line for line in ax.lines if len(line.get_xdata()) == 1]
    looks = {arm: (m.get_color(), m.get_marker(), m.get_markerfacecolor()) for arm, m in zip(verdicts, means, strict=True)}
    of_verdicts = {"better": ("#0e0e0e", "^", "#0e0e0e"), "worse": ("#0f0f0f", "v", "#0f0f0f")}
    if by_verdict:
        assert looks == {arm: of_verdicts.get(verdict, ("#0b0b0b", "o", "#0d0d0d")) for arm, verdict in verdicts.items()}
        texts = [text.get_text() for text in kept[0].legends[0].get_texts()]
        assert texts == ["better", "worse", "inconclusive or no verdict"]
    else:
        assert len(set(looks.values())) == n and not kept[0].legends
    monkeypatch.undo()
    seen = figures.forest(compare(rows))
    assert ("var(--good)" in seen) == ("var(--bad)" in seen) == by_verdict and "#0e0e0e" not in seen and "#0f0f0f" not in seen


@pytest.mark.figures
@pytest.mark.parametrize("macs, drawn", [(6e6, True), (4.1e6, False)])
def test_accuracy_is_drawn_against_macs_if_techniques_differ_in_them(macs, drawn):
    rows = records({"scratch": 0, "+A": -0.01, "+B": 0}, labels=(100, 1000))
    seen = figures.by_macs(compare(costed(rows, **{"+A": (4e6, 0, 12, 1.5), "+B": (macs, 0, 20, 1.2)})))
    assert seen.count("MACs, relative to scratch") == (2 if drawn else 0)
    assert figures.by_macs(compare(change(rows, "+B", macs=9_000_000))) == ""  # nothing is reduced


def varied(*arms: tuple, labels=(1000,)) -> list[Record]:
    """Records of a baseline and of arms with other options: `(arm, effect, {dotted path: value})`."""
    defaults = {"model.dim": 64, "model.depth": 4, "model.tokenizer.patch": 7, "model.fused": False, "steps": 300, "batch": 50}
    changed = {arm: options for arm, _, options in arms}
    out = []
    for r in records({"scratch": 0} | {arm: effect for arm, effect, _ in arms}, labels=labels):
        run = {"seed": r.seed, "model": {"tokenizer": {}}}
        for path, value in (defaults | changed.get(r.arm, {})).items():
            inner = run
            for key in path.split(".")[:-1]:
                inner = inner[key]
            inner[path.rpartition(".")[2]] = value
        out.append(replace(r, run=run))
    return out


WIDTHS = [(f"width {dim}", (dim - 64) / 5000, {"model.dim": dim}) for dim in (16, 32, 128)]


def found_in(rows: list[Record]) -> dict:
    return hyperparameters(compare(rows), rows)


def test_a_hyperparameter_is_the_one_number_in_which_arms_differ():
    rows = varied(*WIDTHS, ("+A", 0, {"model.fused": True}), ("both", 0, {"model.dim": 32, "model.depth": 2}))
    assert found_in(rows) == {"width": {"scratch": 64, "width 16": 16, "width 32": 32, "width 128": 128}}
    shallow = [(f"depth {n}", 0, {"model.depth": n}) for n in (2, 6)]
    assert list(found_in(varied(*WIDTHS, *shallow))) == ["width", "depth"]
    assert found_in(varied(*shallow[:1])) == {}, "two values are no curve"
    assert found_in(varied(*[(f"{k}", 0, {"model.dim": k}) for k in ("a", None, True)])) == {}
    assert found_in([replace(r, role="reference") if r.arm.startswith("width") else r for r in rows]) == {}


def test_options_of_the_same_name_are_different_hyperparameters():
    """The dropout of the model and that of its tokenizer, with four values each."""
    model = [(f"dropout {k}", 0, {"model.fused": k / 10}) for k in (1, 2, 3)]
    rows = varied(*model, *[(f"tokenizer {k}", 0, {"model.tokenizer.fused": k / 10}) for k in (1, 2, 3)])
    for r in rows:
        r.run["model"]["fused"] = r.run["model"]["fused"] or 0.0
        r.run["model"]["tokenizer"].setdefault("fused", 0.0)
    found = found_in(rows)
    assert list(found) == ["model fused", "tokenizer fused"]
    assert all(list(values.values()) == [0.0, 0.1, 0.2, 0.3] for values in found.values())
    names = option_names(["model.dropout", "model.block.dropout", "model.dim", "model.width", "lr", "a.x.drop_path", "b.x.drop_path"])
    assert list(names.values()) == [
        "model dropout", "block dropout", "model.dim", "model.width", "learning rate", "a x drop path", "b x drop path"
    ]  # fmt: skip


def test_tokens_are_a_hyperparameter_if_the_records_have_them():
    tokens = {2: 197, 4: 50, 7: 17}
    rows = varied(*[(f"patch {p}", 0, {"model.tokenizer.patch": p}) for p in (2, 4)])
    assert list(found_in(rows)) == ["patch"]
    rows = [replace(r, tokens=tokens[r.run["model"]["tokenizer"]["patch"]]) for r in rows]
    assert found_in(rows)["tokens"] == {"scratch": 17, "patch 2": 197, "patch 4": 50}


def drawn(rows: list[Record], label: str) -> str:
    """The text of the figures whose label contains these words."""
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html(rows, **PAGE), re.DOTALL)]
    return "\n".join(text for svg in pictures if label in svg.get("aria-label") for text in svg.itertext() if text.strip())


@pytest.mark.figures
@pytest.mark.slow
def test_accuracy_is_drawn_against_a_hyperparameter_with_the_cost_of_each_value():
    rows = change(varied(*WIDTHS, labels=(100, 1000)), "width 128", macs=9_870_000)
    seen = drawn(rows, "one number").split("\n")
    assert "width, 100 labels" in seen and "width, 1,000 labels" in seen and "width, and MACs per image" in seen
    assert all(seen.count(str(dim)) == 2 for dim in (16, 32, 64, 128))
    assert seen.count("9.87 M") == 2 and seen.count("5.00 M") == 6
    assert "Accuracy and one hyperparameter" in html(rows, **PAGE)
    assert "Accuracy and one hyperparameter" not in html(PLAIN, **PAGE)
    seen = drawn(fail(varied(*WIDTHS), "width 16"), "one number").split("\n")
    assert "16" not in seen and {"32", "64", "128"} <= set(seen)


@pytest.fixture
def kept(monkeypatch) -> list:
    """The figures that are drawn during the test."""
    found: list = []
    monkeypatch.setattr(figures, "svg", lambda figure, *_: found.append(figure) or "")
    return found


@pytest.mark.figures
@pytest.mark.parametrize("values, log", [((2, 4, 28), True), ((3, 5, 9), False), ((0, 5, 60), False)])
def test_a_hyperparameter_with_a_wide_range_has_a_logarithmic_axis(values, log, kept):
    rows = varied(*[(f"{k}", -0.01 * k / 60, {"model.tokenizer.patch": k}) for k in values])
    figures.by_hyperparameter(compare(rows), found_in(rows))
    (ax,) = kept[0].axes
    assert ax.get_xscale() == ("log" if log else "linear")
    assert list(ax.get_xticks()) == sorted({*values, 7})
    means = {row.arm: row.mean for row in compare(rows).rows}
    found = [line.get_ydata()[0] for line in ax.lines if len(line.get_ydata()) == 1]
    assert found == [means[arm] for arm in sorted(means, key=lambda arm: 7 if arm == "scratch" else int(arm))]


@pytest.mark.figures
@pytest.mark.slow
def test_learning_curves_show_the_loss_and_the_length_of_an_epoch(kept, monkeypatch):
    rows = varied(*WIDTHS, labels=(100, 1000))
    rows = [replace(r, curve=[[step, 2.0 / step, value] for step, _, value in r.curve or []]) for r in rows]
    figures.learning_curves(compare(rows), rows)
    assert [ax.get_yscale() for ax in kept[0].axes] == ["function", "function", "log", "log"]
    assert list(kept[0].axes[2].lines[0].get_ydata()) == [2.0 / step for step in (100, 200, 300)]
    monkeypatch.undo()
    seen = drawn(rows, "training loss")
    assert seen.count("training loss") == seen.count("validation accuracy, %") == 2
    assert "an epoch is 2)" in seen and "an epoch is 20)" in seen
    no_accuracy = drawn([replace(r, curve=[[step, -1.0, None] for step, *_ in r.curve or []]) for r in rows], "training loss")
    assert no_accuracy.count("training loss") == 2 and "validation accuracy" not in no_accuracy
    assert "an epoch is" not in drawn(change(rows, "width 16", run={"batch": 10}), "training loss")
