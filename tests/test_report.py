"""Would a user be told the truth, the whole truth, and in words they cannot misread?"""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from smallvit.report import compare, figures, holm, html, markdown, pairs_needed, text
from smallvit.report import provenance as facts
from smallvit.report.choices import knobs

DOC = "Does it help?\n\nPaper   arXiv:0000.00000.    Expect  <a gain> of `some` size."
# what a run that died has not lived to record
UNKNOWN = dict.fromkeys(
    ("score", "val", "test", "params", "macs", "images_seen", "seconds", "device", "subset_sha256", "curve")
)
WORDS = {"title": "demo", "doc": DOC}


def records(arms: dict[str, float], *, labels=(1000,), seeds=8, noise=0.002, rng=0, references=()) -> list[dict]:
    """One finished record per cell: the first arm is the baseline, and each arm's effect comes with its own noise."""
    draw, out = np.random.default_rng(rng), []
    for n in labels:
        level = draw.normal(0.9, 0.003, seeds)
        for place, (arm, effect) in enumerate(arms.items()):
            role = "baseline" if place == 0 else "reference" if arm in references else "technique"
            for seed, accuracy in enumerate(level + effect + draw.normal(0, noise, seeds)):
                curve = [[step, 1.0, float(accuracy) * step / 300] for step in (100, 200, 300)]
                out.append(
                    {
                        "recipe": "demo", "arm": arm, "role": role, "labels": n, "seed": seed, "status": "finished",
                        "error": None, "fingerprint": "f0", "run": {"model": {"arm": arm, "dim": 64}, "seed": seed},
                        "score": "accuracy", "val": {"accuracy": 0.9}, "test": {"accuracy": float(accuracy)},
                        "chosen_on_val": None, "params": 1000, "macs": 5_000_000, "images_seen": 6400, "steps": 300,
                        "seconds": 10.0, "pretraining": None, "device": "cpu", "precision": "fp32", "kernel": "rule", "compiled": False, "threads": 1,
                        "subset_sha256": f"{n}/{seed}", "curve": curve, "cpu": "a cpu", "weights": None, "test_reads": 1,
                        "code": {"sha256": "c0de", "commit": "abc", "dirty": False}, "versions": {"python": "3.12"},
                    }
                )  # fmt: skip
    return out


def change(rows: list[dict], arm: str, seed: int | None = None, **fields) -> list[dict]:
    """The records with these fields of one arm (of one seed) replaced."""
    return [r | fields if r["arm"] == arm and seed in (None, r["seed"]) else r for r in rows]


def differ(rows: list[dict], arm: str, differences: list[float]) -> list[dict]:
    """The records with this arm exactly so far from the baseline, seed by seed."""
    scores = [a + d for a, d in zip(accuracies(rows, "scratch"), differences)]
    return [r | {"test": {"accuracy": scores[r["seed"]]}} if r["arm"] == arm else r for r in rows]


def two_baselines(labels=(1000,)) -> list[dict]:
    """Two recipes in one: patches of 2 and of 4 pixels, each with its own baseline, the reference with the first."""
    small = records({"patch 2": 0.05, "ToMe, patch 2": 0.03, "kNN": -0.1}, labels=labels, references=("kNN",))
    large = records({"patch 4": 0, "ToMe, patch 4": 0.02}, labels=labels, rng=1)
    return [r | {"baseline": "patch 2"} for r in small] + [r | {"baseline": "patch 4"} for r in large]


MS = 3.0  # of a forward pass, in every arm


def costed(rows: list[dict], **arms: tuple) -> list[dict]:
    """The records with what the evaluator `cost` says of the reduced arms: MACs, their SD over images, tokens and speed-up."""
    made = [{"call": "smallvit.evaluate.cost", "batch": 32}]
    out = [r | {"run": r["run"] | {"evaluators": made}, "test": r["test"] | {"macs": 8e6, "ms": MS}} for r in rows]
    for r in out:
        if r["arm"] in arms:
            macs, sd, tokens, speedup = arms[r["arm"]]
            r["test"] |= {"macs": macs, "tokens": tokens, "speedup": speedup + (r["seed"] - 3.5) / 100}
            r["test"] |= {"macs_sd": sd} if sd else {}
    return out


def accuracies(rows: list[dict], arm: str) -> list[float]:
    return [r["test"]["accuracy"] for r in rows if r["arm"] == arm]


def row_of(rows: list[dict], arm: str):
    return next(row for row in compare(rows).rows if row.arm == arm)


def test_differences_agree_with_scipy():
    rows = records({"scratch": 0, "+A": 0.001})
    row, base, own = row_of(rows, "+A"), accuracies(rows, "scratch"), accuracies(rows, "+A")
    test = stats.ttest_rel(own, base)
    interval = test.confidence_interval(0.95)
    assert row.difference.p == test.pvalue
    assert [row.difference.low, row.difference.high] == pytest.approx([interval.low, interval.high], rel=1e-12)
    assert row.sd == pytest.approx(np.std(own, ddof=1), rel=1e-12)
    assert [row.low, row.high] == pytest.approx(stats.t.interval(0.95, 7, np.mean(own), stats.sem(own)), rel=1e-12)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_pays_for_every_technique_at_every_label_count_but_not_for_floors():
    rows = records({"scratch": 0, "+A": 0.001, "+B": 0.002, "kNN": -0.1}, labels=(100, 1000), references=("kNN",))
    judged = [row for row in compare(rows).rows if row.verdict]
    assert len(judged) == compare(rows).family == 4
    assert [row.difference.p_holm for row in judged] == holm([row.difference.p for row in judged])
    reference = row_of(rows, "kNN")
    assert reference.verdict is None and reference.difference.p_holm is None and reference.difference.high < 0


def test_no_effect_gives_a_false_verdict_in_no_more_than_one_recipe_in_twenty():
    """The rate is 5% by design, so a sample of it is above 5% about as often as not: the test is that it is not shown to be."""
    arms = {"scratch": 0, "+A": 0, "+B": 0, "+C": 0}
    wrong = [{row.verdict for row in compare(records(arms, rng=k)).rows} & {"better", "worse"} for k in range(400)]
    assert stats.binomtest(sum(map(bool, wrong)), len(wrong), 0.05, alternative="greater").pvalue > 0.01


def test_the_interval_holds_a_known_effect_nineteen_times_in_twenty():
    found = [row_of(records({"scratch": 0, "+A": 0.004}, rng=k), "+A").difference for k in range(400)]
    assert np.mean([d.low <= 0.004 <= d.high for d in found]) == pytest.approx(0.95, abs=0.025)


@pytest.mark.parametrize("effect, word", [(0.02, "better"), (-0.02, "worse"), (0.0, "inconclusive")])
def test_verdict_words(effect, word):
    rows = differ(records({"scratch": 0, "+A": 0}), "+A", [effect + 0.002, effect - 0.002] * 4)
    assert row_of(rows, "+A").verdict == word


def test_five_pairs_are_never_a_verdict_and_say_how_many_would_be():
    row = row_of(records({"scratch": 0, "+A": 0.05}, seeds=5, noise=0.01), "+A")
    assert row.verdict == "not enough seeds" and f"about {pairs_needed(row.difference.sd)} would show" in row.reason
    lone = row_of(records({"scratch": 0, "+A": 0.05}, seeds=1), "+A")
    assert lone.verdict == "not enough seeds" and lone.difference.low is None
    assert row_of(records({"scratch": 0, "+A": 0.05}, seeds=6), "+A").verdict == "better"


@pytest.mark.parametrize("sd", [0.008, 0.015, 0.03])
def test_pairs_needed_have_the_power_they_promise(sd):
    n = pairs_needed(sd)
    enough, too_few = (stats.nct.sf(stats.t.isf(0.025, k - 1), k - 1, 0.01 / sd * math.sqrt(k)) for k in (n, n - 2))
    assert enough >= 0.79 and too_few < 0.8
    assert pairs_needed(0.0) == 6


def broken(rows: list[dict], how: str) -> list[dict]:
    if how == "missing":
        return [r for r in rows if (r["arm"], r["seed"]) != ("+A", 3)]
    if how == "other images":
        return change(rows, "+A", 3, subset_sha256="other")
    if how == "changed data":
        return change(rows, "+A", 3, data_sha256="other")
    if how == "not yet trained":
        return change(rows, "+A", 3, status="missing", **UNKNOWN)
    arm, status = ("scratch", "failed") if how == "baseline failed" else ("+A", how)
    return change(rows, arm, 3, status=status, error="out of <memory>", **UNKNOWN)


@pytest.mark.parametrize(
    "how", ["missing", "failed", "unavailable", "baseline failed", "other images", "changed data", "not yet trained"]
)
def test_an_incomplete_cell_gets_no_verdict_but_its_reason(how):
    rows = differ(records({"scratch": 0, "+A": 0.02, "+B": 0}, labels=(100,)), "+B", [0.002, -0.002] * 4)
    rows = broken(rows, how)
    row, other = row_of(rows, "+A"), row_of(rows, "+B")
    assert row.verdict == "no verdict" and "seed 3" in row.reason and len(row.difference.seeds) == 7
    assert other.verdict == ("no verdict" if "baseline" in how else "inconclusive")
    text = markdown(rows, **WORDS)
    assert "+A at 100 labels: no verdict" in text and row.reason in text
    assert ("out of &lt;memory&gt;" in text) == (how in ("failed", "unavailable", "baseline failed"))


def test_a_dead_run_makes_no_neighbour_easier_to_believe():
    rows = records({"scratch": 0, "+A": 0.02, "+B": 0.002})
    whole, after = row_of(rows, "+B").difference, row_of(broken(rows, "failed"), "+B").difference
    assert after.p == whole.p and after.p_holm == 2 * whole.p >= whole.p_holm


def test_differences_that_do_not_scatter():
    for shift, verdict in ((0.0, "inconclusive"), (0.001, "no verdict")):
        row = row_of(differ(records({"scratch": 0, "+A": 0}), "+A", [shift] * 8), "+A")
        assert (row.verdict, row.difference.p) == (verdict, None) and "every seed" in row.reason


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda rows: change(rows, "scratch", role="technique"), "baseline"),
        (lambda rows: change(rows, "+A", baseline="+B"), "'\\+A' is held against '\\+B'; expected one of \\['scratch'\\]"),
        (lambda rows: change(rows, "scratch", baseline="+A"), "'scratch' is held against '\\+A'"),
        (lambda rows: [*rows, *two_baselines()[:1]], "'\\+A' is held against ''"),
        (lambda rows: change(two_baselines(), "ToMe, patch 4", 2, baseline="patch 2"), "the same in all its runs"),
        (lambda rows: [*rows, rows[3]], "twice"),
        (lambda rows: change(rows, "+A", 2, role="reference"), "one role"),
        (lambda rows: change(rows, "+A", 2, score="knn_5"), "one score"),
        (lambda rows: change(rows, "+A", 2, recipe="other"), "one recipe"),
        (lambda rows: change(rows, "+A", 2, status="running"), "status"),
        (lambda rows: change(rows, "+A", 2, test={"accuracy": 93.1}), "between 0 and 1"),
        (lambda rows: change(rows, "+A", 2, test={"accuracy": math.nan}), "between 0 and 1"),
        (lambda rows: change(rows, "+A", 2, test={}), "has no 'accuracy'"),
        (lambda rows: [], "baseline"),
    ],
)
def test_records_that_cannot_be_compared_are_refused(spoil, says):
    with pytest.raises(ValueError, match=says):
        compare(spoil(records({"scratch": 0, "+A": 0})))


def test_unequal_budgets_are_flagged_with_pretraining_and_borrowed_labels_counted():
    rows = records({"scratch": 0, "+A": 0, "+B": 0})
    rows = change(rows, "+A", params=1040, macs=6_000_000, chosen_on_val={"what": "early stop", "labels": 500})
    rows = change(rows, "+B", pretraining={"images_seen": 640_000, "seconds": 0.1})
    assert row_of(rows, "+A").unequal == {"macs": pytest.approx(0.2), "extra_labels": math.inf}
    assert row_of(rows, "+B").unequal == {"images_seen": pytest.approx(100)}
    text = markdown(rows, **WORDS)
    assert "6.00 M (+20%)" in text and "646,400 (101× baseline)" in text and "Parameters: equal within 5%" in text
    assert "not recorded" not in text and "+A (not recorded)" in markdown(change(rows, "+A", macs=None), **WORDS)


@pytest.mark.parametrize(
    "fields",
    [{"device": "cuda:0"}, {"threads": 2}, {"precision": "bf16"}, {"cpu": "another"}, {"code": {"sha256": "beef"}},
     {"kernel": "fused"}, {"compiled": True},
     {"versions": {"python": "3.13"}}, {"test_reads": 2}, {"score": "knn_5", "test": {"knn_5": 0.9}},
     {"code": {"sha256": "c0de", "dirty": True}}],
)  # fmt: skip
def test_arms_run_under_other_conditions_are_warned_of(fields):
    rows = records({"scratch": 0, "+A": 0})
    assert "## Warnings" not in markdown(rows, **WORDS)
    assert "## Warnings" in markdown(change(rows, "+A", **fields), **WORDS)
    assert "Warnings" in html(change(rows, "+A", **fields), **WORDS)


def test_markdown_leads_with_the_verdicts_and_labels_every_plus_minus():
    rows = records({"scratch": 0, "+A": 0.02, "kNN": -0.1}, labels=(100, None), references=("kNN",))
    text, d = markdown(rows, **WORDS), row_of(rows, "+A").difference
    assert f"+A at 100 labels: better by {100 * d.mean:.2f} points [{100 * d.low:.2f}, {100 * d.high:.2f}]" in text
    assert DOC in text and text.index("better by") < text.index("| Arm |") and "smallvit report demo" in text
    assert all(re.match(r"± (SD over seeds|\d+\.\d\d \(SD, n = 8\))", text[at.start() :]) for at in re.finditer("±", text))
    assert len(re.findall(r"^\| (scratch|\+A|kNN)", text, re.MULTILINE)) == 6 and "Results at all labels" in text


def test_what_differs_is_read_from_the_runs_and_partial_differences_say_so():
    rows = change(records({"scratch": 0, "+A": 0}), "+A", 5, run={"model": {"arm": "+A", "dim": 96}, "seed": 5})
    assert facts.changes(compare(rows), rows) == {"+A": ['model.arm: "scratch" → "+A"', "model.dim: 64 → 96 (in 1 of 8 runs)"]}


def started(rows: list[dict], arm: str, of: str, missing=()) -> list[dict]:
    """The records with the runs of one arm started from runs with the fingerprints `of<seed>`."""
    for r in rows:
        if r["arm"] == arm:
            r["run"] |= {"init": {"model": {"dim": 64}, "seed": r["seed"]}}
            r["pretraining"] = {"images_seen": 6400, "steps": 300, "seconds": 10.0, "fingerprint": f"{of}{r['seed']}"}
            r["weights"] = {"loaded": 53, "missing": list(missing)}
    return rows


def test_a_run_that_starts_from_another_says_so_in_one_line():
    rows = [r | {"fingerprint": f"{r['arm']}{r['seed']}"} for r in records({"scratch": 0, "+A": 0, "+B": 0})]
    rows = started(started(rows, "+A", "scratch", [f"blocks.{k}.reduction.weight" for k in range(12)]), "+B", "elsewhere")
    rows = change(rows, "+A", 4, status="failed", error="boom", pretraining=None, weights=None, **UNKNOWN)
    said = facts.changes(compare(rows), [r | {"run": {"init": None} | r["run"]} for r in rows])
    assert said["+A"] == ['model.arm: "scratch" → "+A"', "init: absent → weights of scratch"]
    assert said["+B"][1:] == ["init: absent → weights of elsewhere0 and 7 more"]
    whence = facts.provenance(rows, "")["Pretrained weights"]
    assert "weights of scratch, loaded 53, missing blocks.0.reduction.weight" in whence and "and 9 more (7 runs)" in whence
    assert "weights of elsewhere0 and 7 more, loaded 53, missing none (8 runs)" in whence and len(whence) < 300


def test_html_is_one_page_that_fetches_nothing_and_trusts_no_name():
    name = "<b>$x$ & _y</b>"
    rows = records({"scratch": 0, name: 0.01}, labels=(100, 1000))
    rows = change(rows, name, 0, status="failed", error="<script>", **UNKNOWN)
    page = html(rows, title="<i>", doc=DOC)
    assert "<b>$x" not in page and "<script" not in page and "<i>" not in page and "&lt;a gain&gt;" in page
    assert "&lt;b&gt;$x$ &amp; _y&lt;/b&gt;" in page and "src=" not in page
    assert not re.search(r"https?://(?!www\.w3\.org/)", page) and not re.search(r"url\((?!#)|@import|<link", page)
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(pictures) == 4 and page == html(rows, title="<i>", doc=DOC)
    assert all(name in "".join(picture.itertext()) for picture in pictures[:3])
    assert page.count("var(--arm-0)") > 8 and "#0c0c" not in page


def test_every_seed_is_on_the_page_and_one_label_count_needs_no_label_axis():
    rows = records({"scratch": 0, "+A": 0.01})
    page = html(rows, **WORDS)
    assert page.count("<svg") == 3 and "labelled images" not in page
    assert all(f"{100 * r['test']['accuracy']:.2f}" in page for r in rows)
    assert html([r | {"curve": []} for r in rows], **WORDS).count("<svg") == 2


def test_test_images_that_were_trained_on_are_warned_of():
    rows = records({"scratch": 0, "+A": 0})
    assert not facts.warnings([r | {"test_repeats": 0} for r in rows])
    said = facts.warnings(change(rows, "+A", 3, test_repeats=1_200))
    assert said == ["Test images that are training or validation images too, pixel by pixel: 1,200"]


@pytest.mark.parametrize("seeds", [2, 8])
def test_an_arm_that_has_learned_nothing_is_warned_of_and_a_floor_is_not(seeds):
    rows = records({"scratch": 0, "+A": -0.65, "Pixels": -0.7}, seeds=seeds, references=("Pixels",))  # the levels are about 90%
    assert not facts.warnings([r | {"test_majority": 0.1} for r in rows]) and not facts.warnings(rows)
    (said,) = facts.warnings([r | {"test_majority": 0.3} for r in rows])
    assert re.match(
        r"\+A at 1,000 labels: 2\d\.\d\d%, not shown to be better than calling every image by the most frequent class \(30\.00%\)",
        said,
    )
    assert said in html([r | {"test_majority": 0.3} for r in rows], **WORDS)


def test_one_that_always_names_the_same_class_is_told_whatever_the_mean_rounds_to():
    rows = [r | {"test": {"accuracy": 51 / 500}, "test_majority": 51 / 500} for r in records({"scratch": 0}, seeds=10)]
    assert len(facts.warnings(rows)) == 1


def test_an_empty_slot_that_is_filled_is_one_difference():
    rows = records({"scratch": 0, "+A": 0})
    rows = change(rows, "scratch", run={"model": {"reduction": None}})
    rows = change(rows, "+A", run={"model": {"reduction": {"call": "smallvit.reduction.Merge", "r": 4}}})
    (said,) = facts.changes(compare(rows), rows).values()
    assert said == ['model.reduction.call: absent → "smallvit.reduction.Merge"', "model.reduction.r: absent → 4"]


def test_data_that_changed_between_runs_are_warned_of():
    rows = records({"scratch": 0, "+A": 0})
    data = {"run": {"data": {"call": "smallvit.data.folder", "path": "mine", "size": None}}}
    rows = [r | data | {"data_sha256": "new" if r["arm"] == "+A" and r["seed"] == 3 else "old"} for r in rows]
    said = [line for line in facts.warnings(rows) if "content" in line]
    assert said == ["AttentionOutput content of folder(path=mine): old in scratch, +A; new in +A"]
    assert not [line for line in facts.warnings(rows[:-8]) if "content" in line]


def test_nothing_to_show_is_said():
    rows = records({"scratch": 0, "+A": 0}, labels=(100, 1000))
    rows = [r | UNKNOWN | {"status": "failed", "error": "boom"} for r in rows]
    for write in (markdown, html):
        assert "No runs are recorded yet" in write([], **WORDS) and "Does it help?" in write([], **WORDS)
        assert "boom" in write(rows, **WORDS) and "32 of 32 runs left no number" in write(rows, **WORDS)
        assert "No runs are recorded yet" in write([r | {"status": "missing"} for r in rows], **WORDS)
    assert "<svg" not in html(rows, **WORDS)


def test_unusual_numbers_are_drawn():
    perfect = [r | {"test": {"accuracy": 1.0}} for r in records({"scratch": 0, "+A": 0}, labels=(10, 20))]
    zero = [r | {"test": {"accuracy": 0.0}} for r in records({"scratch": 0, "+A": 0}, seeds=1)]
    uneven = [r | {"curve": [[r["seed"], 1.0, 0.5]]} for r in records({"scratch": 0, "+A": 0})]
    assert html(perfect, **WORDS).count("<svg") == 4 and html(zero, **WORDS).count("<svg") == 3
    assert "seeds share no step: scratch, +A" in html(uneven, **WORDS)


def test_every_arm_is_held_against_its_own_baseline_and_holm_pays_for_all():
    rows = two_baselines(labels=(100, 1000))
    c, alone = compare(rows), compare([r for r in rows if r["baseline"] == "patch 4"])
    row, same = (next(r for r in x.at(1000) if r.arm == "ToMe, patch 4") for x in (c, alone))
    assert (row.baseline, row.verdict, c.family) == ("patch 4", "better", 4) and row.difference.values == same.difference.values
    judged = [r.difference for r in c.rows if r.verdict]
    assert [d.p_holm for d in judged] == holm([d.p for d in judged])
    assert c.baselines == ("patch 2", "patch 4") and [p.baseline for p in c.parts()] == ["patch 2", "patch 4"]
    assert [list(p.arms) for p in c.parts()] == [["patch 2", "ToMe, patch 2", "kNN"], ["patch 4", "ToMe, patch 4"]]


def test_budgets_and_gaps_are_those_of_the_own_baseline():
    rows = change(two_baselines(), "patch 2", macs=40_000_000)
    rows = change(rows, "patch 2", 3, status="failed", error="boom", **UNKNOWN)
    two, four = row_of(rows, "ToMe, patch 2"), row_of(rows, "ToMe, patch 4")
    assert (two.verdict, two.unequal) == ("no verdict", {"macs": -0.875}) and "patch 2, seed 3: failed" in two.reason
    assert (four.verdict, four.unequal) == ("better", {})


def test_each_baseline_has_label_counts_and_seeds_of_its_own():
    rows = [r for r in two_baselines(labels=(100, 1000)) if r["baseline"] == "patch 2" or (r["labels"] == 100 and r["seed"] < 7)]
    c = compare(rows)
    assert not any(row.failures for row in c.rows) and [part.labels for part in c.parts()] == [(100, 1000), (100,)]
    assert "Against patch 4" not in markdown(rows, **WORDS).partition("Results at 1,000 labels")[2]
    assert [bool(figures.by_labels(part)) for part in c.parts()] == [True, False]


def test_records_from_before_there_were_several_baselines_are_held_against_the_only_one():
    rows = [r | {"baseline": None} for r in records({"scratch": 0, "+A": 0.02})]
    assert markdown(rows, **WORDS) == markdown(records({"scratch": 0, "+A": 0.02}), **WORDS)
    assert row_of(rows, "+A").baseline == "scratch" and "Against scratch, 1 comparison" in markdown(rows, **WORDS)


def test_with_several_baselines_every_page_says_which():
    rows = two_baselines()
    page, d = markdown(rows, **WORDS), row_of(rows, "ToMe, patch 2").difference
    assert "Against each arm's own baseline, 2 comparisons: 1 better, 1 worse." in page
    told = f"ToMe, patch 2 at 1,000 labels: worse than patch 2 by {-100 * d.mean:.2f} points"
    assert told in page and told in text(rows) and "ToMe, patch 4 at 1,000 labels: better than patch 4 by" in page
    assert "### Against patch 2" in page and page.count("kNN (reference)") == 1
    assert '- ToMe, patch 4: model.arm: "patch 4" → "ToMe, patch 4"' in page
    short = markdown([r for r in rows if r["seed"] < 3], **WORDS)
    assert "ToMe, patch 4 at 1,000 labels: not enough seeds against patch 4, +" in short
    seen = html(rows, **WORDS)
    pictures = ["".join(ElementTree.fromstring(svg).itertext()) for svg in re.findall(r"<svg.*?</svg>", seen, re.DOTALL)]
    assert len(pictures) == 6 and "points above patch 2" in pictures[0] and "points above patch 4" in pictures[1]
    assert not any("patch 2" in picture and "patch 4" in picture for picture in pictures)
    assert seen.count("<h3>Against patch 4</h3>") == 3 and "<th>Against patch 4</th>" in seen


def test_what_fewer_tokens_cost_and_buy_is_in_the_tables_and_a_loss_of_time_is_called_one():
    rows = costed(records({"scratch": 0, "+A": 0, "+B": 0}), **{"+A": (4e6, 0.25e6, 12.34, 0.9), "+B": (6e6, 0, 20, 1.4)})
    page, row = markdown(rows, **WORDS), row_of(rows, "+A")
    assert (row.budget["macs"], row.forward) == (
        4e6,
        {"tokens": 12.34, "macs_sd": 0.25e6, "ms": MS, "speedup": pytest.approx(0.9)},
    )
    assert "| Tokens left | MACs per image | ms per batch | Speed-up |" in page
    assert (
        f"| 12.3 | 4.00 M (± 0.25 M SD; −50%) | {MS} | 0.90× (loses time) |" in page
        and f"| 20.0 | 6.00 M (−25%) | {MS} | 1.40× |" in page
    )
    assert f"| – | 8.00 M | {MS} | – |" in page and "under 1 means that the reduction loses time" in page
    assert "on batches of 32 images" in page and page.index("0.90×") < page.index("under 1 means")
    seen = html(rows, **WORDS)
    assert all(words in seen for words in ("Tokens left", "Speed-up", "± 0.25 M SD", "0.90×<small>loses time", "under 1"))
    assert seen.count("<svg") == 4 and "Accuracy against MACs" in seen
    for plain in (markdown(records({"scratch": 0, "+A": 0}), **WORDS), html(records({"scratch": 0, "+A": 0}), **WORDS)):
        assert "Tokens left" not in plain and "loses time" not in plain


@pytest.mark.parametrize("macs, drawn", [(6e6, True), (4.1e6, False)])
def test_accuracy_is_drawn_against_macs_where_techniques_differ_in_them(macs, drawn):
    rows = records({"scratch": 0, "+A": -0.01, "+B": 0}, labels=(100, 1000))
    seen = figures.by_macs(compare(costed(rows, **{"+A": (4e6, 0, 12, 1.5), "+B": (macs, 0, 20, 1.2)})))
    assert seen.count("MACs, relative to scratch") == (2 if drawn else 0)
    assert figures.by_macs(compare(change(rows, "+B", macs=9_000_000))) == ""  # nothing is reduced


def turned(*arms: tuple, labels=(1000,), **fields) -> list[dict]:
    """Records of a baseline and of arms in which these choices are others, `(arm, effect, {dotted name: value})`."""
    rows = records({"scratch": 0} | {arm: effect for arm, effect, _ in arms}, labels=labels)
    start = {"model.dim": 64, "model.depth": 4, "model.tokenizer.patch": 7, "model.fused": False, "steps": 300, "batch": 50}
    others = {arm: choices for arm, _, choices in arms}
    for r in rows:
        r["run"] = {"seed": r["seed"], "model": {"tokenizer": {}}}
        for path, value in (start | others.get(r["arm"], {})).items():
            inner = r["run"]
            for key in path.split(".")[:-1]:
                inner = inner[key]
            inner[path.rpartition(".")[2]] = value
    return [r | fields for r in rows]


WIDTHS = [(f"width {dim}", (dim - 64) / 5000, {"model.dim": dim}) for dim in (16, 32, 128)]


def told(rows: list[dict]) -> dict:
    return knobs(compare(rows), rows)


def test_a_knob_is_the_one_number_in_which_arms_differ_from_their_baseline():
    rows = turned(*WIDTHS, ("+A", 0, {"model.fused": True}), ("both", 0, {"model.dim": 32, "model.depth": 2}))
    assert told(rows) == {"width": {"scratch": 64, "width 16": 16, "width 32": 32, "width 128": 128}}
    shallow = [(f"depth {n}", 0, {"model.depth": n}) for n in (2, 6)]
    assert list(told(turned(*WIDTHS, *shallow))) == ["width", "depth"]
    assert told(turned(*shallow[:1])) == {}, "two values are a difference, not a curve"
    assert told(turned(*[(f"{k}", 0, {"model.dim": k}) for k in ("a", None, True)])) == {}
    references = [r | {"role": "reference"} if r["arm"].startswith("width") else r for r in rows]
    assert told(references) == {}


def test_tokens_are_a_knob_where_the_records_know_them():
    tokens = {2: 197, 4: 50, 7: 17}
    rows = turned(*[(f"patch {p}", 0, {"model.tokenizer.patch": p}) for p in (2, 4)])
    assert list(told(rows)) == ["patch"]
    rows = [r | {"tokens": tokens[r["run"]["model"]["tokenizer"]["patch"]]} for r in rows]
    assert told(rows)["tokens"] == {"scratch": 17, "patch 2": 197, "patch 4": 50}


def drawn(rows: list[dict], label: str) -> str:
    """The text in the picture whose label has these words in it, nothing if there is none."""
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html(rows, **WORDS), re.DOTALL)]
    return "\n".join(text for svg in pictures if label in svg.get("aria-label") for text in svg.itertext() if text.strip())


def test_accuracy_is_drawn_against_a_knob_with_what_each_value_costs():
    rows = change(turned(*WIDTHS, labels=(100, 1000)), "width 128", macs=9_870_000)
    seen = drawn(rows, "one number").split("\n")
    assert "width, 100 labels" in seen and "width, 1,000 labels" in seen and "width, and MACs per image" in seen
    assert all(seen.count(str(dim)) == 2 for dim in (16, 32, 64, 128))
    assert seen.count("9.87 M") == 2 and seen.count("5.00 M") == 6
    assert "Accuracy against one number" in html(rows, **WORDS)
    assert "Accuracy against one number" not in html(records({"scratch": 0, "+A": 0}), **WORDS)


@pytest.mark.parametrize("values, stretched", [((2, 4, 28), True), ((3, 5, 9), False), ((0, 5, 60), False)])
def test_a_knob_that_doubles_again_and_again_has_a_logarithmic_axis(values, stretched, monkeypatch):
    kept = []
    monkeypatch.setattr(figures, "svg", lambda figure, *_: kept.append(figure) or "")
    rows = turned(*[(f"{k}", -0.01 * k / 60, {"model.tokenizer.patch": k}) for k in values])
    figures.by_knob(compare(rows), told(rows))
    (ax,) = kept[0].axes
    assert ax.get_xscale() == ("log" if stretched else "linear")
    assert list(ax.get_xticks()) == sorted({*values, 7})
    means = {row.arm: row.mean for row in compare(rows).rows}
    found = [line.get_ydata()[0] for line in ax.lines if len(line.get_ydata()) == 1]
    assert found == [means[arm] for arm in sorted(means, key=lambda arm: 7 if arm == "scratch" else int(arm))]


def test_a_run_that_died_leaves_its_knob_standing():
    rows = change(turned(*WIDTHS), "width 16", status="failed", error="boom", **UNKNOWN)
    seen = drawn(rows, "one number").split("\n")
    assert "16" not in seen and {"32", "64", "128"} <= set(seen)


def test_learning_curves_show_the_loss_and_how_long_an_epoch_is(monkeypatch):
    rows = turned(*WIDTHS, labels=(100, 1000))
    rows = [r | {"curve": [[step, 2.0 / step, value] for step, _, value in r["curve"]]} for r in rows]
    seen = drawn(rows, "training loss")
    assert seen.count("training loss") == seen.count("validation accuracy, %") == 2
    assert "an epoch is 2)" in seen and "an epoch is 20)" in seen
    unsaid = drawn([r | {"curve": [[step, -1.0, None] for step, *_ in r["curve"]]} for r in rows], "training loss")
    assert unsaid.count("training loss") == 2 and "validation accuracy" not in unsaid
    mixed = change(rows, "width 16", run={"batch": 10})
    assert "an epoch is" not in drawn(mixed, "training loss")
    kept = []
    monkeypatch.setattr(figures, "svg", lambda figure, *_: kept.append(figure) or "")
    figures.learning_curves(compare(rows), rows)
    assert [ax.get_yscale() for ax in kept[0].axes] == ["function", "function", "log", "log"]
    assert list(kept[0].axes[2].lines[0].get_ydata()) == [2.0 / step for step in (100, 200, 300)]
