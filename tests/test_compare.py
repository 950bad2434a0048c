"""Comparisons: conditions, controls, two intervals, looks while seeds are added, training lengths and disagreements."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from smallvit.evaluate.metrics import balanced_accuracy_of
from smallvit.packing import pack_bits, pack_floats
from smallvit.recipe import find_recipe
from smallvit.record import Record
from smallvit.report import format, remarks
from smallvit.report.answer import answer, runs_done
from smallvit.report.page import markdown, run_command, text_against
from smallvit.report.tables import verdict_remarks
from smallvit.verdicts import ADDED_LOOKS, LOOKS, Condition, compare, disagreement_text, disagreements, next_looks
from smallvit.verdicts.contrasts import trends, tuned_pairs
from smallvit.verdicts.score import ACCURACY
from smallvit.verdicts.sequential import nominal_level, sequential_p
from smallvit.verdicts.statistics import detectable, half_width, holm, paired_variance, replication, two_part_p

IMAGES = 1000


def records(
    arms: dict[str, float], *, seeds=8, labels=100, rng=0, noise=0.01, bits=True, images=IMAGES, **fields
) -> list[Record]:
    """One finished record for each arm and seed. The first arm is the baseline; values are differences in accuracy from it.

    An image is hard or easy for all arms, and each seed of each arm has some luck.
    """
    draw, out = np.random.default_rng(rng), []
    hard = draw.uniform(size=images)
    for place, (arm, effect) in enumerate(arms.items()):
        for seed in range(seeds):
            level = 0.9 + effect + noise * draw.normal()
            right = hard + 0.05 * draw.normal(size=images) < level
            out.append(
                Record(
                    recipe="demo", arm=arm, role="baseline" if place == 0 else "technique", labels=labels, seed=seed,
                    status="finished", fingerprint="f", run={}, score="accuracy", test={"accuracy": float(right.mean())},
                    correct=pack_bits(right) if bits else None, test_images=images, drawn_share=0.0, subset_sha256=str(seed),
                    params=1000, macs=5_000_000,
                )
            )  # fmt: skip
    return [replace(r, **fields) for r in out]


def change(rows: list[Record], arm: str, seeds=None, **fields) -> list[Record]:
    """The records with some fields of one arm replaced, for all seeds or for those given."""
    return [replace(r, **fields) if r.arm == arm and (seeds is None or r.seed in seeds) else r for r in rows]


def row_of(rows: list[Record], arm: str, condition: Condition | None = None):
    return next(row for row in compare(rows).rows if row.arm == arm and condition in (None, row.condition))


def table(rows: list[Record], arm: str, other: str, seeds=8) -> np.ndarray:
    """Right minus right for each seed and test image."""
    found = {(r.arm, r.seed): r.correct_bits.astype(int) for r in rows}
    return np.array([found[arm, s] - found[other, s] for s in range(seeds)])


PLAIN = records({"scratch": 0, "+A": 0.03})


# Two intervals


def test_the_verdict_is_that_of_the_two_part_test_and_the_interval_over_seeds_is_inside():
    d = row_of(PLAIN, "+A").difference
    mean, variance = paired_variance(table(PLAIN, "+A", "scratch"))
    half = half_width(variance, 0.05)
    assert [d.mean, d.low, d.high] == pytest.approx([mean, mean - half, mean + half])
    assert d.p == pytest.approx(two_part_p(mean, variance)) and not d.bound and d.variance == variance
    assert d.low <= d.seeds_low < d.mean < d.seeds_high <= d.high and d.p >= d.p_seeds


def test_records_without_bits_use_an_upper_bound_and_the_page_says_so():
    with_bits, old = row_of(PLAIN, "+A").difference, [replace(r, correct=None) for r in PLAIN]
    d = row_of(old, "+A").difference
    assert d.bound and [d.seeds_low, d.seeds_high] == pytest.approx([with_bits.seeds_low, with_bits.seeds_high])
    assert d.high - d.low > with_bits.high - with_bits.low
    assert "earlier version keep no data on single test images" in remarks.notes(compare(old), [])
    assert "earlier version" not in remarks.notes(compare(PLAIN), [])
    one_old = change(PLAIN, "+A", [3], correct=None)
    assert row_of(one_old, "+A").difference.bound, "bits of seven pairs are not used for eight"
    unknown = [replace(r, correct=None, test_images=None) for r in PLAIN]
    assert row_of(unknown, "+A").difference.variance.images == 10_000


def test_interval_of_a_difference_of_shares_stays_within_100_points():
    rows = []
    for r in records({"scratch": 0, "+A": 0}, images=20):
        right = np.arange(20) != 4
        right[3] = r.arm == "+A" or r.seed % 2 == 0  # the only image that tells the arms apart
        rows.append(replace(r, correct=pack_bits(right), test={"accuracy": float(right.mean())}))
    d = row_of(rows, "+A").difference
    assert (d.low, d.high) == (-1, 1) and d.variance.n_eff < 2


def test_arm_that_is_right_on_all_images_but_one_gets_a_true_reason():
    rows = []
    for r in records({"scratch": 0, "+A": 0}, images=50):
        right = np.full(50, r.arm == "+A")
        right[0], right[1] = False, right[1] or r.seed % 2 == 0
        rows.append(replace(r, correct=pack_bits(right), test={"accuracy": float(right.mean())}))
    row = row_of(rows, "+A")
    assert row.verdict == "no verdict" and row.reason.startswith("all but a few test images show the same difference")


def test_better_on_these_images_only_is_inconclusive_and_says_why():
    wrong = {"scratch": range(12), "+A": range(12, 19)}  # of 200 images, and one more that depends on the seed
    rows = []
    for r in records({"scratch": 0, "+A": 0}, images=200):
        right = np.array([i not in wrong[r.arm] and i != 50 + (r.seed * len(r.arm)) % 3 for i in range(200)])
        right[60] = r.seed % 2 == 0 and r.arm == "+A"
        rows.append(replace(r, correct=pack_bits(right), test={"accuracy": float(right.mean())}))
    row = row_of(rows, "+A")
    assert row.verdict == "inconclusive" and row.difference.low < 0 < row.difference.seeds_low
    assert row.reason == "better on these 200 test images in every retraining; too few images to claim the same for new ones"
    assert format.what_helps(compare(rows), row) == "More test images would help, not more seeds."
    few = row_of(records({"scratch": 0, "+A": 0.01}, images=200, noise=0.0005, rng=2), "+A")
    assert few.reason.endswith("on average over retrainings; not shown on new ones") and min(few.difference.values) <= 0
    assert few.difference.needs == "seeds"
    noisy = records({"scratch": 0, "+A": 0}, images=2000, noise=0.03, rng=1)
    assert row_of(noisy, "+A").difference.needs == "seeds"
    assert format.what_helps(compare(noisy), row_of(noisy, "+A")) == "More seeds would help: smallvit run demo --until-decided"
    command = run_command(Path("my advice/recipe.py"), Path("my advice/runs"))
    assert command == "smallvit run 'my advice/recipe.py' --out 'my advice/runs'"
    assert f"{command} --until-decided" in markdown(noisy, title="demo", doc="", command=command)
    assert run_command(find_recipe("quickstart"), Path("runs")) == "smallvit run quickstart"
    assert "false verdict in about 8 of 100 comparisons" in remarks.notes(compare(noisy), [])
    assert "in about 8 of 100" not in remarks.notes(compare([replace(r, looks=list(LOOKS)) for r in noisy]), [])


def test_records_say_how_many_comparisons_count_besides_their_own():
    rows = records({"scratch": 0, "+A": 0.01, "+B": 0})
    published = [replace(r, removed=3) for r in rows]
    assert compare(published) == compare(rows, earlier=3) != compare(rows) and compare(published, earlier=4).earlier == 4


def test_training_images_that_seeds_share_widen_the_interval():
    width = {}
    for share in (0.0, 0.1, 0.5):
        d = row_of([replace(r, drawn_share=share) for r in PLAIN], "+A").difference
        width[share] = d.high - d.low
        assert d.overlap == pytest.approx(share / (1 - share)) and d.pool == "drawn"
    assert width[0.0] < width[0.1] < width[0.5]
    different = change([replace(r, drawn_share=0.1) for r in PLAIN], "+A", [2], drawn_share=0.5)
    assert row_of(different, "+A").difference.overlap == 1.0, "the largest share counts"


@pytest.mark.parametrize("fields", [{"drawn_share": 1.0}, {"labels": None, "drawn_share": None}])
def test_shared_training_images_are_named(fields):
    rows = [replace(r, **fields) for r in PLAIN]
    d = row_of(rows, "+A").difference
    assert (d.overlap, d.pool) == (0.0, "fixed") and "for this pool of training images and not for others" in remarks.notes(
        compare(rows), []
    )


@pytest.mark.parametrize("data, overlap", [("smallvit.data.mnist", 1000 / 53_210), ("smallvit.data.digits", 1000 / 260)])
def test_old_records_of_known_data_sets_give_the_overlap(data, overlap):
    rows = [replace(r, labels=1000, drawn_share=None, run={"data": {"call": data}}) for r in PLAIN]
    assert row_of(rows, "+A").difference.overlap == pytest.approx(overlap)
    unknown = [replace(r, drawn_share=None) for r in PLAIN]
    assert row_of(unknown, "+A").difference.pool == "unknown" and "It is not recorded" in remarks.notes(compare(unknown), [])


def test_a_verdict_that_shared_training_images_undo_says_so():
    rows = [replace(r, drawn_share=0.97) for r in PLAIN]
    assert row_of(PLAIN, "+A").verdict == "better"
    assert row_of(rows, "+A").verdict == "inconclusive" and row_of(rows, "+A").difference.needs == "pool"
    same = "better with these training images; "
    assert row_of(rows, "+A").reason == f"{same}the seeds share too many of them to claim the same for others"
    few = [replace(r, drawn_share=0.5) for r in PLAIN]
    assert row_of(few, "+A").reason == f"{same}too few seeds to claim the same for others"
    assert format.what_helps(compare(few), row_of(few, "+A")).startswith("More seeds would help")


def test_a_verdict_says_how_often_it_would_come_out_again():
    row = row_of(PLAIN, "+A")
    assert f"again in {format.often(row.difference)} of 100 repetitions" in format.sentence(compare(PLAIN), row)
    assert format.collapse(8) == "No collapse in 8 seeds excludes only collapse rates above 31%."
    weak = records({"scratch": 0, "+A": 0.012}, rng=3, noise=0.008)
    row = row_of(weak, "+A")
    assert row.verdict == "better" and row.difference.fragile and row.difference.seeds_for_90 > 8
    (remark,) = verdict_remarks(row)
    assert remark.endswith(f", fragile; with {row.difference.seeds_for_90} seeds in 90")
    assert "but fragile" in answer(compare(weak)) and format.sentence(compare(weak), row).endswith("fragile")


def test_probabilities_of_replication_are_rounded_down():
    d = row_of(PLAIN, "+A").difference
    found = {p: format.often(replace(d, replication=p)) for p in (0.796, 0.899, 0.9, 0.994, 0.996)}
    assert list(found.values()) == ["about 79", "about 89", "about 90", "about 99", "more than 99"]


def test_equal_accuracies_of_different_predictions_are_named():
    rows = records({"scratch": 0, "+A": 0})
    same = [replace(r, correct=pack_bits(np.arange(IMAGES) < 900), test={"accuracy": 0.9}) for r in rows]
    assert (
        row_of(same, "+A").reason
        == "the same accuracy as the baseline for every seed; check that the technique changes anything"
    )
    other = change(same, "+A", correct=pack_bits(np.arange(IMAGES) >= 100))
    assert row_of(other, "+A").reason == "the same accuracy as the baseline for every seed; the predictions differ"


def test_more_seeds_do_not_help_where_they_share_their_training_images():
    rows = [replace(r, drawn_share=0.5) for r in records({"scratch": 0, "+A": 0.01}, images=2000, noise=0.03, rng=1)]
    row = row_of(rows, "+A")
    assert row.difference.needs == "pool"
    assert format.what_helps(compare(rows), row) == "More images to draw the labelled ones from would help, not more seeds."
    assert "more images to draw the labelled ones from would help" in remarks.notes(compare(rows), [])


def test_an_inconclusive_verdict_says_what_would_have_been_found():
    rows = records({"scratch": 0, "+A": 0})
    row = row_of(rows, "+A")
    assert (row.difference.high - row.difference.low) / 2 < row.difference.detectable
    assert f"80% power at {100 * row.difference.detectable:.2f} points" in verdict_remarks(row)


# Verdicts that cannot be given


@pytest.mark.parametrize("score", ["balanced_accuracy", "macro_f1", "linear_probe_c"])
@pytest.mark.parametrize("looks", [None, list(LOOKS)])
def test_a_score_that_is_neither_an_accuracy_nor_recorded_per_image_gets_no_verdict(score, looks):
    rows = [replace(r, correct=None, score=score, test={score: r.result}, looks=looks) for r in PLAIN]
    row = row_of(rows, "+A")
    assert row.verdict == "no verdict" and f"the score {score} is neither an accuracy nor recorded for each" in row.reason
    assert row.difference.p is None and row.difference.low is None and row.difference.seeds_low is not None
    assert row.next_look is None and next_looks([r for r in rows if r.seed < 6]) == {}
    assert "earlier version" not in remarks.notes(compare(rows), [])
    assert row_of([r for r in rows if r.seed == 0], "+A").verdict == "not enough seeds"
    kept = [replace(r, score=score, test={score: r.result}) for r in PLAIN]
    assert row_of(kept, "+A").verdict == "better", "with bits, every score is a mean over images"


@pytest.mark.parametrize("score", ["knn_5", "linear_probe", "few_shot"])
def test_accuracies_of_probes_without_bits_use_the_upper_bound(score):
    rows = [replace(r, correct=None, score=score, probes=[score], test={score: r.result} | {"few_shot_sd": 0.1}) for r in PLAIN]
    assert row_of(rows, "+A").difference.bound
    assert ("earlier version" in remarks.notes(compare(rows), [])) == (score != "few_shot")


@pytest.mark.parametrize("images", [2, 5])
def test_fewer_than_six_test_images_give_no_verdict(images):
    rows = []
    for r in records({"scratch": 0, "+A": 0}, images=images):
        right = np.arange(images) < (images - (r.seed == 0) if r.arm == "+A" else r.seed == 1)
        rows.append(replace(r, correct=pack_bits(right), test={"accuracy": float(right.mean())}))
    row = row_of(rows, "+A")
    assert (row.verdict, row.reason) == ("no verdict", "fewer than 6 test images, so no test is possible")


@pytest.mark.parametrize("looks", [None, list(LOOKS)])
@pytest.mark.parametrize("fields", [{"data_sha256": "other"}, {"test_images": 999}])
def test_all_pairs_must_have_the_same_test_images(looks, fields):
    rows = [replace(r, data_sha256="one", looks=looks) for r in records({"scratch": 0, "+A": 0.08}, bits=False)]
    assert row_of(rows, "+A").verdict == "better"
    rows = [replace(r, **fields) if r.seed == 5 else r for r in rows]
    row = row_of(rows, "+A")
    assert (row.verdict, row.reason) == ("no verdict", "the runs of +A and scratch were scored on different test images")
    assert row.next_look is None


def test_disagreements_on_different_test_images_are_refused():
    other = [r for r in records({"scratch": 0, "+A": 0.03}, images=500) if r.seed == 7]
    with pytest.raises(ValueError, match="'\\+A' and 'scratch' at 100 labels were scored on different test images"):
        disagreements([*(r for r in PLAIN if r.seed < 7), *other], "+A", "scratch")
    with pytest.raises(ValueError, match="different test images"):
        disagreements([replace(r, data_sha256=str(r.seed)) for r in PLAIN], "+A", "scratch")


# Conditions


def conditions(effects: dict[Condition, float], **options) -> list[Record]:
    """Records of a baseline and of +A, whose difference depends on the condition."""
    out = []
    for place, (c, effect) in enumerate(effects.items()):
        tuning = {"settings": {"lr": 0.001}, "trials": 8, "labels": 3100, "seconds": 60.0} if c.tuned else None
        fields = {"labels": c.labels, "length": c.length, "tuning": tuning}
        out += records({"scratch": 0, "+A": effect}, rng=place, **options, **fields)
    return out


LONG = {Condition(100, 500): -0.1, Condition(100, 2000): -0.03, Condition(100, 2000, True): 0.0}


def test_each_condition_is_a_comparison_of_its_own_in_one_family():
    c = compare(conditions(LONG))
    assert c.conditions == tuple(LONG) and c.labels == (100,) and c.family == 3
    judged = [row.difference for row in c.rows if row.verdict]
    assert [d.p_holm for d in judged] == pytest.approx(holm([d.p for d in judged]))
    assert c.main == (Condition(100, 2000, True),) and [row.arm for row in c.main_rows] == ["scratch", "+A"]
    assert [c.title for c in LONG][1:] == ["100 labels, 2,000 steps", "100 labels, 2,000 steps, tuned"]
    assert c.at(Condition(100, 500))[1].length == 500 and c.at(Condition(5)) == ()


def test_the_answer_speaks_of_tuned_settings_and_of_what_differs_without():
    rows = conditions(LONG)
    text = answer(compare(rows))
    assert text.startswith("At 100 labels with tuned settings and 2,000 training steps, no technique was shown to be better")
    assert "With common settings, the verdict differs for “+A” (worse, −" in text
    ((before, row),) = [pair for pair in tuned_pairs(compare(rows)) if pair[0].arm == "+A"]
    assert (before.verdict, row.verdict, before.length) == ("worse", "inconclusive", 2000)
    assert row.budget["trials"] == 8 and row.budget["extra_labels"] == 3100 and before.budget["trials"] is None


@pytest.mark.parametrize(
    "effects, word",
    [((-0.1, -0.09), "holds"), ((-0.1, -0.03), "fades"), ((-0.1, 0.0), "fades"), ((-0.1, 0.05), "turns"), ((0.0, 0.05), "appears"),
     ((0.0, 0.0), ""), ((-0.1, 0.0, -0.1), "holds"), ((-0.1, 0.05, -0.1), "turns in between"),
     ((-0.1, 0.05, 0.0), "turns in between"), ((0.0, 0.05, 0.0), "appears in between")],
)  # fmt: skip
def test_what_becomes_of_a_verdict_with_longer_training(effects, word):
    lengths = [500, 2000] if len(effects) == 2 else [500, 1000, 2000]
    rows = conditions({Condition(100, n): effect for n, effect in zip(lengths, effects)})
    (trend,) = trends(compare(rows))
    assert (trend.arm, trend.outcome, [row.length for row in trend.rows]) == ("+A", word, lengths)
    note = f"From 500 to 2,000 training steps, the difference {word} for “+A”."
    assert (note in remarks.notes(compare(rows), [])) == bool(word)
    assert trends(compare(PLAIN)) == []


def test_a_difference_that_may_have_grown_does_not_fade():
    rows = [replace(r, length=500) for r in records({"scratch": 0, "+A": 0.02}, rng=3, noise=0.004)]
    rows += [replace(r, length=2000) for r in records({"scratch": 0, "+A": 0.04}, rng=5, noise=0.08)]
    (trend,) = trends(compare(rows))
    first, last = trend.rows
    assert (
        first.decided and last.verdict == "inconclusive" and last.difference.low < first.difference.mean < last.difference.high
    )
    assert trend.outcome == "is no longer shown"
    assert "the difference is no longer shown for “+A”." in remarks.notes(compare(rows), [])


def test_the_small_cnn_is_part_of_the_answer():
    rows = records({"scratch": 0, "+A": 0.0, "small CNN": 0.05})
    rows = change(rows, "small CNN", role="reference", macs=1_000_000)
    cnn, best = row_of(rows, "small CNN").mean, max(row_of(rows, arm).mean for arm in ("scratch", "+A"))
    numbers = f"at 100 labels: {100 * cnn:.2f}% against {100 * best:.2f}%"
    assert f"The small CNN (a reference) has a higher mean than every arm {numbers}." in answer(compare(rows))
    rows = change(records({"scratch": 0, "+A": 0.03, "small CNN": -0.05}), "small CNN", role="reference", macs=1_000_000)
    found = answer(compare(rows))
    assert "a lower mean than the best arm" in found and "% for “+A”, which needs 5.0 times the multiply-adds." in found


# Controls


def test_an_arm_can_be_compared_with_another_arm():
    rows = records({"scratch": 0, "+A": 0.05, "+A +B": 0.05, "+A +B +C": 0.0})
    rows = change(change(rows, "+A +B", baseline="+A"), "+A +B +C", baseline="+A +B")
    c, row = compare(rows), row_of(rows, "+A +B")
    assert (row.baseline, row.group, row.verdict) == ("+A", "scratch", "inconclusive") and c.baselines == ("scratch",)
    assert row.difference.mean == pytest.approx(row_of(rows, "+A +B").mean - row_of(rows, "+A").mean)
    assert row_of(rows, "+A +B +C").verdict == "worse" and len(c.parts()[0].rows) == 4
    line = format.sentence(c, row_of(rows, "+A +B +C"))
    amount, low, high = map(float, re.search(r"worse than \+A \+B by (\S+) points \[(\S+), (\S+)\]", line).groups())
    assert line.startswith("+A +B +C at 100 labels: ") and 0 < low < amount < high  # amounts, as "worse" gives the sign


def test_a_reference_can_become_the_control_of_all_arms():
    rows = records({"scratch": 0, "+A": 0.04, "pixels": -0.2, "CNN": 0.04})
    rows = change(change(rows, "CNN", role="reference"), "pixels", role="reference")
    planned, c = compare(rows), compare(rows, against="CNN")
    assert planned.family == 1 and c.family == 2 and c.baselines == ("CNN",)
    found = {row.arm: row for row in c.rows}
    assert {arm: row.verdict for arm, row in found.items()} == {"CNN": None, "scratch": "worse", "+A": "inconclusive", "pixels": None}
    mean = {row.arm: row.mean for row in planned.rows}
    assert found["scratch"].difference.mean == pytest.approx(mean["scratch"] - mean["CNN"])
    p = {arm: found[arm].difference.p for arm in ("scratch", "+A")}
    assert found["scratch"].difference.p_holm == pytest.approx(2 * p["scratch"]) and p["scratch"] < p["+A"]
    planned_arm, against_baseline = row_of(rows, "+A"), compare(rows, against="scratch").rows[1]
    assert against_baseline.difference == planned_arm.difference and against_baseline.verdict == planned_arm.verdict == "better"
    said = text_against(rows, "CNN")
    assert said.startswith("With CNN as the control, which the recipe did not plan for all arms (p-values are corrected for these 2 comp")
    assert format.sentence(c, found["scratch"]) in said and "+A at 100 labels: inconclusive" in said and "pixels" not in said
    with pytest.raises(ValueError, match="no arm 'MLP' that could be the control; expected one of 'scratch', '\\+A', 'pixels', 'CNN'"):
        compare(rows, against="MLP")


def test_arms_are_not_expected_in_all_conditions_of_a_new_control():
    rows = records({"scratch": 0, "+A": 0.0, "CNN": 0.05})
    more = [replace(r, labels=1000, arm="large", role="baseline") for r in rows if r.arm == "scratch"]
    more += [replace(r, labels=1000) for r in rows if r.arm == "CNN"]
    named = [replace(r, baseline="" if r.role == "baseline" else "scratch") for r in [*rows, *more]]
    c = compare(change(named, "CNN", role="reference", baseline="scratch"), against="CNN")
    judged = [(row.labels, row.arm, row.verdict) for row in c.rows if row.verdict]
    assert judged == [(100, "scratch", "worse"), (100, "+A", "worse"), (1000, "large", "worse")] and c.family == 3
    assert text_against(rows[:8], "scratch").endswith("No other arm has finished under the same conditions.")


def test_controls_in_a_circle_or_unknown_are_refused():
    rows = records({"scratch": 0, "+A": 0.05, "+B": 0.05})
    with pytest.raises(ValueError, match="circle: \\+A -> \\+B -> \\+A"):
        compare(change(change(rows, "+A", baseline="+B"), "+B", baseline="+A"))
    with pytest.raises(ValueError, match="'\\+A' has the baseline '\\+X'; expected one of \\['scratch', '\\+B'\\]"):
        compare(change(rows, "+A", baseline="+X"))
    with pytest.raises(ValueError, match="'\\+A' has the baseline '\\+A'"):
        compare(change(rows, "+A", baseline="+A"))


def test_a_reference_that_was_not_run_in_a_condition_is_left_out_there():
    rows = conditions({Condition(100, 500): 0.0, Condition(100, 2000): 0.0})
    kept = [replace(r, arm="pixels", role="reference") for r in rows if r.arm == "+A" and r.length == 2000]
    c = compare([*rows, *kept])
    assert [row.length for row in c.rows if row.arm == "pixels"] == [2000] and not any(row.failures for row in c.rows)


# Looks


def sequential(arms: dict[str, float], *, seeds=32, looks=LOOKS, **options) -> list[Record]:
    return records(arms, seeds=seeds, looks=list(looks), **options)


def first(rows: list[Record], **seeds: int) -> list[Record]:
    """The records of the first seeds of each arm."""
    return [r for r in rows if r.seed < seeds[r.arm.strip("+")]]


def test_an_arm_is_judged_at_the_last_look_that_it_has_reached():
    rows = first(sequential({"scratch": 0, "+A": 0.005}), scratch=13, A=9)
    row = row_of(rows, "+A")
    d = row.difference
    assert d.looks == (6, 8) and d.seeds == tuple(range(8)) and len(row.values) == 9
    p = {n: two_part_p(*paired_variance(table(rows, "+A", "scratch", n))) for n in (6, 8)}
    assert d.p == pytest.approx(sequential_p(p, LOOKS))
    assert not row.failures and row.next_look == 12 and "the next look is at 12 seeds" in row.reason
    early = row_of(first(rows, scratch=13, A=5), "+A")
    assert early.verdict == "no verdict" and "seed 5: missing" in early.reason
    waiting = row_of(first(rows, scratch=5, A=5), "+A")
    assert (waiting.verdict, waiting.reason) == ("not enough seeds", "5 of the 6 pairs of the first look")


def test_an_arm_that_has_stopped_is_complete():
    rows = first(sequential({"scratch": 0, "+A": 0.08, "+B": 0.005}), scratch=16, A=6, B=16)
    c = compare(rows)
    row = row_of(rows, "+A")
    assert (row.verdict, row.stopped, row.next_look) == ("better", "decided", None) and not any(r.failures for r in c.rows)
    assert "have no result" not in remarks.notes(c, [], rows) and len(row.difference.seeds) == 6
    assert "An arm stops when it is better or worse" in " ".join(remarks.how_to_read(c))


def test_only_runs_of_the_recipe_are_counted_as_missing():
    failed = {"status": "failed", "test": None, "correct": None, "score": None}
    rows = first(sequential({"scratch": 0, "+A": 0.02, "+B": 0}), scratch=12, A=6, B=12)
    rows = change(rows, "+A", **failed)
    assert row_of(rows, "+A").failures == dict.fromkeys(range(6), "failed") and runs_done(compare(rows), rows) == (24, 30)
    assert row_of(change(rows, "+A", status="missing"), "+A").failures == dict.fromkeys(range(6), "missing")
    fewer = first(records({"scratch": 0, "+A": 0.02, "+B": 0}), scratch=6, A=4, B=6)
    row = row_of(fewer, "+A")
    assert (row.verdict, row.reason) == ("no verdict", "+A, seeds 4, 5: missing, no such run")
    assert row.failures == dict.fromkeys((4, 5), "missing: no such run") and runs_done(compare(fewer), fewer) == (16, 16)
    assert "have no result" not in markdown(fewer, title="demo", doc="")


def test_looks_make_a_verdict_harder_than_a_single_test():
    rows = records({"scratch": 0, "+A": 0.02})
    fixed, looked = row_of(rows, "+A").difference, row_of([replace(r, looks=list(LOOKS)) for r in rows], "+A").difference
    assert looked.p >= fixed.p and looked.high - looked.low > fixed.high - fixed.low and looked.level < 0.05


def test_seeds_added_to_a_finished_recipe_change_its_test():
    rows = records({"scratch": 0, "+A": 0.02}, seeds=10)
    rows = [replace(r, looks=list(ADDED_LOOKS)) if r.seed >= 8 else r for r in rows]
    assert row_of(rows, "+A").difference.looks == (8,) and row_of(rows, "+A").looks == ADDED_LOOKS


def test_next_looks_stop_what_is_decided_and_keep_the_baseline_going():
    rows = sequential({"scratch": 0, "+A": 0.08, "+B": 0.004}, noise=0.02)
    c = Condition(100)
    waiting = [replace(r, status="missing", test=None, correct=None, score=None) for r in rows if r.seed < 6]
    assert next_looks(waiting) == {(c, "scratch"): 6, (c, "+A"): 6, (c, "+B"): 6}
    assert next_looks(first(rows, scratch=6, A=6, B=6)) == {(c, "scratch"): 8, (c, "+B"): 8}
    assert next_looks(first(rows, scratch=8, A=6, B=6)) == {(c, "+B"): 8}
    assert next_looks(first(rows, scratch=6, A=6, B=6), max_seeds=6) == {}
    failed = change(
        first(rows, scratch=8, A=6, B=8), "+B", [7], status="failed", error="boom", test=None, correct=None, score=None
    )
    assert next_looks(failed) == {} and row_of(failed, "+B").failures == {7: "failed: boom"}
    assert next_looks(first([replace(r, looks=None) for r in rows], scratch=8, A=8, B=8), ADDED_LOOKS) == {
        (c, "scratch"): 16, (c, "+B"): 16,
    }  # fmt: skip


def test_arm_that_equals_its_baseline_is_decided_at_the_first_look():
    rows = [r for r in sequential({"scratch": 0, "+A": 0.08}, noise=0.02) if r.arm == "scratch"]
    copies = [replace(r, arm="copy", role="technique") for r in rows]
    assert next_looks(first(rows + copies, scratch=6, copy=6)) == {}


def test_the_control_of_an_undecided_arm_goes_on_too():
    rows = first(sequential({"scratch": 0, "+A": 0.08, "+B": 0.08}, noise=0.02), scratch=6, A=6, B=6)
    found = next_looks(change(rows, "+B", baseline="+A"))
    assert found == dict.fromkeys([(Condition(100), arm) for arm in ("scratch", "+A", "+B")], 8)


def test_until_decided_ends_and_no_later_look_is_asked_of_a_stopped_arm():
    """The loop of `smallvit run --until-decided`, with three arms of which one is equal to the baseline."""
    rows = sequential({"scratch": 0, "+A": 0.06, "+B": -0.06, "+C": 0.0}, images=4000, noise=0.004)
    have = dict.fromkeys(("scratch", "+A", "+B", "+C"), 6)
    for _ in range(20):
        now = [r for r in rows if r.seed < have[r.arm]]
        if not (more := next_looks(now)):
            break
        have |= {arm: n for (_, arm), n in more.items()}
    c = compare(now)
    assert not more and have["+A"] == have["+B"] == 6 and have["scratch"] == max(have.values())
    assert {row.arm: row.stopped for row in c.rows if row.verdict} == {"+A": "decided", "+B": "decided", "+C": "excluded"}
    assert "a difference of 0.5 points is excluded" in row_of(now, "+C").reason


def test_a_failed_run_after_the_first_look_leaves_no_verdict():
    rows = first(sequential({"scratch": 0, "+A": 0.08, "+B": 0.004}, noise=0.02), scratch=12, A=8, B=8)
    boom = {"status": "failed", "error": "boom", "test": None, "correct": None, "score": None}
    row = row_of(change(rows, "+A", [7], **boom), "+A")
    assert (row.verdict, row.reason) == ("no verdict", "+A, seed 7: failed")
    other = change(rows, "+A", [7], subset_sha256="other")
    assert row_of(other, "+A").verdict == "no verdict" and "used other images than scratch" in row_of(other, "+A").reason
    failed = change(rows, "scratch", [9], **boom)
    assert row_of(failed, "+A").verdict == "better", "the arm had stopped before"
    row = row_of(failed, "+B")
    assert row.verdict == "inconclusive" and "no look at 12 seeds is possible (scratch, seed 9: failed)" in row.reason
    assert not format.what_helps(compare(failed), row)


def test_planning_under_looks_uses_the_level_of_the_last_look():
    rows = first(sequential({"scratch": 0, "+A": 0.08, "+B": 0.004}, noise=0.02), scratch=8, A=8, B=8)
    a, b = row_of(rows, "+A").difference, row_of(rows, "+B").difference
    assert a.replication == pytest.approx(replication(a.mean, a.variance, level=nominal_level(8, LOOKS, 0.05 / 2)))
    assert b.detectable == pytest.approx(detectable(b.variance, level=nominal_level(8, LOOKS, 0.05)))


def test_a_verdict_of_an_earlier_look_is_shown_with_its_difference():
    rows = sequential({"scratch": 0, "+A": 0.05}, noise=0.01, seeds=8)
    for s, right in {6: 0.65, 7: 1.0}.items():  # two later seeds in which the difference is very different
        bits = np.arange(IMAGES) < 1000 * right
        rows = change(rows, "+A", [s], correct=pack_bits(bits), test={"accuracy": float(bits.mean())})
    row, c = row_of(rows, "+A"), compare(rows)
    d = row.difference
    assert row.verdict == "better" and d.low < 0 < d.mean and d.strongest.low > 0
    assert row.reason == f"decided at the look at 6 seeds: {ACCURACY.difference(d.strongest.mean)} {format.interval(d.strongest, ACCURACY)}"
    assert row.reason in format.sentence(c, row)


def test_a_hopeless_arm_stops():
    rows = first(sequential({"scratch": 0, "+A": 0.0}, images=300), scratch=12, A=12)
    row = row_of(rows, "+A")
    assert row.stopped == "hopeless" and "unlikely even with 32 seeds" in row.reason and next_looks(rows) == {}


# Disagreements


def test_disagreements_are_counted_for_each_seed_and_image():
    rows = records({"scratch": 0, "+A": 0.03}, seeds=3)
    (found,) = disagreements(rows, "+A", "scratch")
    d = table(rows, "+A", "scratch", 3)
    for s, (both, only_first, only_second, neither) in found.seeds.items():
        assert both + only_first + only_second + neither == IMAGES
        assert (only_first, only_second) == ((d[s] == 1).sum(), (d[s] == -1).sum())
    position, gained, lost = found.images[0]
    assert abs(d.sum(0)).max() == abs(gained - lost) and d.sum(0)[position] == gained - lost
    text = disagreement_text([found])
    assert "100 labels: test images that “+A” (first) and “scratch” (second) classify correctly" in text
    assert all(f"{s:>6}{counts[0]:>10,}{counts[1]:>12,}" in text for s, counts in found.seeds.items())
    assert f"{position:>8,}{gained:>12,}{lost:>13,}" in text


def balanced(rows: list[Record], counts: tuple[int, ...]) -> list[Record]:
    """The records judged by the balanced accuracy, for classes of so many images."""
    labels, found = np.repeat(np.arange(len(counts)), counts), []
    for r in rows:
        guesses = np.where(r.correct_bits, labels, (labels + 1) % len(counts))
        score = balanced_accuracy_of(np.eye(len(counts))[guesses], labels)
        values = {"contributions": pack_floats(score.values), "correct": pack_bits(score.right)}
        matrix = [np.bincount(guesses[labels == c], minlength=len(counts)).tolist() for c in range(len(counts))]
        found.append(replace(r, score="balanced_accuracy", test={"balanced_accuracy": float(score)}, confusion=matrix, **values))
    return found


def test_interval_of_a_balanced_accuracy_is_that_of_its_classes():
    """The weights of the classes do not vary from one test set to the next."""
    rows = balanced(records({"scratch": -0.05}, noise=0), (900, 100))
    bits = np.array([r.correct_bits for r in rows])
    row = row_of(rows, "scratch")
    low, high = row.new_images
    shares = [bits[:, :900].mean(), bits[:, 900:].mean()]
    expected = 1.96 * np.sqrt(sum(p * (1 - p) / n for p, n in zip(shares, (900, 100)))) / 2
    assert (high - low) / 2 == pytest.approx(expected, rel=0.15)


def test_equal_balanced_accuracies_exclude_no_difference():
    rows = balanced(records({"scratch": 1, "+A": 1}, seeds=8, images=60), (20, 40))
    d = row_of(rows, "+A").difference
    assert d.mean == 0 and d.variance.unseen and d.high > 0.06 and d.low < -0.06
    assert row_of(records({"scratch": 1, "+A": 1}, seeds=8, images=60), "+A").difference.high < d.high


def test_disagreements_need_the_bits_of_a_balanced_accuracy():
    rows = records({"scratch": 0, "+A": 0.03}, seeds=3)
    assert disagreements(balanced(rows, (700, 300)), "+A", "scratch") == disagreements(rows, "+A", "scratch")


def test_disagreements_of_older_runs_that_are_judged_by_their_balanced_accuracy():
    """An image that is right has a value above 0; for other scores the values do not say it."""
    rows, weights = records({"scratch": 0, "+A": 0.03}, seeds=3), np.linspace(0.5, 1.5, IMAGES)
    (expected,) = disagreements(rows, "+A", "scratch")
    weighted = []
    for r in rows:
        values = r.correct_bits * weights
        found = {"score": "balanced_accuracy", "test": {"balanced_accuracy": float(values.mean())}}
        weighted.append(replace(r, correct=None, contributions=pack_floats(values), **found))
    assert disagreements(weighted, "+A", "scratch") == [expected]
    f1 = [replace(r, score="macro_f1", test={"macro_f1": r.result}) for r in weighted]
    with pytest.raises(ValueError, match="judged by macro_f1, do not say which test images were right"):
        disagreements(f1, "+A", "scratch")


def test_disagreements_need_two_known_arms_with_bits():
    with pytest.raises(ValueError, match="unknown arm '\\+X'; expected two of 'scratch', '\\+A'"):
        disagreements(PLAIN, "+X", "+A")
    with pytest.raises(ValueError, match="two different arms"):
        disagreements(PLAIN, "+A", "+A")
    with pytest.raises(ValueError, match=r"judged by accuracy, do not say which test images were right; .*not of an earlier version"):
        disagreements(records({"scratch": 0, "+A": 0}, bits=False), "+A", "scratch")
    for change in ({"status": "failed"}, {"subset_sha256": "other"}):
        rows = [replace(r, **change) if r.arm == "+A" else r for r in PLAIN]
        with pytest.raises(ValueError, match="no runs of '\\+A' and 'scratch' have finished with the same seed and images"):
            disagreements(rows, "+A", "scratch")


def test_a_score_of_another_name_is_not_compared_with_an_accuracy():
    """Both may be shares of the test images without a value for each, but their difference means nothing."""
    rows = records({"scratch": 0, "+A": 0.05}, bits=False)
    assert row_of([replace(r, score="knn_1", test={"knn_1": r.result}, probes=["knn_1"]) if r.arm == "+A" else r for r in rows], "+A").difference
    row = row_of([replace(r, score="my_f1", test={"my_f1": r.result}) if r.arm == "+A" else r for r in rows], "+A")
    assert (row.verdict, row.reason) == ("no verdict", "judged by my_f1, and scratch by accuracy")


@pytest.mark.slow
def test_equal_arms_are_seldom_told_apart_until_decided():
    """The whole loop with two arms that are equal to the baseline on new images, though not on the test images of one series."""
    wrong = []
    for k in range(300):
        draw = np.random.default_rng(k)
        skill = {arm: 1.5 + 0.5 * draw.normal(size=300) for arm in ("scratch", "A", "B")}  # of each arm at each test image
        rows = []
        for arm, each in skill.items():
            for seed in range(32):
                right = each + 0.1 * draw.normal() + draw.normal(size=300) > 0
                role = "baseline" if arm == "scratch" else "technique"
                rows.append(replace(PLAIN[0], arm=arm, role=role, seed=seed, looks=list(LOOKS), subset_sha256=str(seed),
                                    test={"accuracy": float(right.mean())}, correct=pack_bits(right), test_images=300))  # fmt: skip
        have = dict.fromkeys(skill, 6)
        while more := next_looks([r for r in rows if r.seed < have[r.arm]]):
            have |= {arm: n for (_, arm), n in more.items()}
        wrong.append(any(row.decided for row in compare([r for r in rows if r.seed < have[r.arm]]).rows))
    assert np.mean(wrong) <= 0.06, "at most 5% are allowed; the standard error is 1.3 points"


def test_arm_without_weights_stays_out_of_the_family_when_others_get_more_seeds():
    """A verdict that was reached at the first look must not be withdrawn at the second one."""
    rows = [replace(r, looks=list(LOOKS)) for r in records({"vit": 0, "+A": 0.05, "+B": 0.0, "weights": 0})]
    rows = change(rows, "weights", status="unavailable", test=None, correct=None, error="no file")
    first = [r for r in rows if r.seed < 6]
    wanted = {arm for _, arm in next_looks(first)}
    assert wanted == {"vit", "+B"}
    second = [r for r in rows if r.seed < 6 or r.arm in wanted]
    for later in (second, [*second, *(replace(r, status="missing", error=None) for r in rows if r.arm == "weights" and r.seed >= 6)]):
        assert compare(first).family == compare(later).family == 2
        assert row_of(later, "weights").unavailable and row_of(later, "+A").verdict == "better"
        assert "for the reasons in the table" not in answer(compare(later))
    failed = change(second, "weights", seeds=[0], status="failed")
    assert compare(failed).family == 3 and not row_of(failed, "weights").unavailable


def test_further_seed_of_a_reference_is_not_expected_of_other_arms():
    rows = records({"vit": 0, "+A": 0.05, "CNN": 0.1}, seeds=9)
    rows = [replace(r, role="reference") if r.arm == "CNN" else r for r in rows if r.arm == "CNN" or r.seed < 8]
    assert row_of(rows, "+A").verdict == "better" and row_of(rows, "CNN").seeds == tuple(range(9))
    assert {row.arm: len(row.failures) for row in compare(rows).rows} == {"vit": 0, "+A": 0, "CNN": 0}


def test_equal_scores_of_different_predictions_are_said_to_differ():
    """In each seed other images are right, in such a way that the means of all seeds and of all images are equal."""
    rows = records({"vit": 0, "+A": 0}, seeds=6)
    right = np.arange(IMAGES) % 2 == 0
    for_seed = [right if seed % 2 else ~right for seed in range(7)]
    bits = {("vit", seed): for_seed[seed] for seed in range(6)} | {("+A", seed): for_seed[seed + 1] for seed in range(6)}
    rows = [replace(r, correct=pack_bits(bits[r.arm, r.seed]), test={"accuracy": 0.5}) for r in rows]
    assert row_of(rows, "+A").reason == "the same accuracy as the baseline for every seed; the predictions differ"


def test_number_of_test_images_is_not_invented():
    rows = [replace(r, test_images=None) for r in records({"vit": 0, "+A": 0.006}, noise=0.002, bits=False)]
    assert "better on these test images on average over retrainings" in row_of(rows, "+A").reason
