"""Cross-validation, groups and other scores in verdicts: hand computations, and simulations with real training (`-m slow`,
`-m long`; run with `-s` to see the rates).

In the simulations two arms are exactly equal: one sees the left half of each image and the other its right half, turned around,
and each image is mirrored at random. A verdict about them is false.
"""

import shutil
from dataclasses import astuple, replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from toys import TINY_VIT

from smallvit import ArmRun, Run, SmallCNN, ablate, accuracy, folder, knn, log_loss
from smallvit.commands.mistakes import find_mistakes
from smallvit.commands.predictions import image_names
from smallvit.data import arrays
from smallvit.data.folds import draw_folds
from smallvit.evaluate.metrics import auc_without, balanced_accuracy_of, jackknife, macro_f1_without
from smallvit.launch.results import folder as folder_of
from smallvit.packing import pack_bits, pack_floats
from smallvit.record import CHECKPOINT, Record
from smallvit.report.answer import answer
from smallvit.report.remarks import how_to_read
from smallvit.train import fit_stacked
from smallvit.train.fit import Tags, fit
from smallvit.verdicts import compare, disagreement_text, disagreements, next_looks, pooled
from smallvit.verdicts.statistics import half_width, in_groups, of_few_passes, of_folds, of_groups, paired_variance, two_part_p

K = 5


def records(values, folds, *, groups=None, bits=True, **fields) -> list[Record]:
    """One finished record for each arm, pass and fold. `values` are (arms, passes, images) and `folds` the fold of each image,
    (passes, images). The first arm is the baseline. The score of a fold is the mean of its values.
    """
    made = []
    for arm, of_arm in enumerate(np.asarray(values, float)):
        for number, (row, fold) in enumerate(zip(of_arm, np.asarray(folds))):
            for f in range(fold.max() + 1):
                own, seed = row[fold == f], number * (fold.max() + 1) + f
                kept = {"correct": pack_bits(own)} if bits else {"contributions": pack_floats(own)}
                made.append(
                    Record(
                        recipe="demo", arm="ab"[arm], role="technique" if arm else "baseline", labels=None, seed=int(seed),
                        status="finished", fingerprint=f"{arm}{seed}", run={}, score="accuracy" if bits else "balanced_accuracy",
                        test={"accuracy" if bits else "balanced_accuracy": float(own.mean())}, test_images=len(own),
                        test_index=pack_bits(fold == f), pool_images=len(row), folds=int(fold.max()) + 1, data_sha256="d",
                        subset_sha256=str(seed), test_groups=None if groups is None else [int(g) for g in groups[fold == f]],
                        seconds=10.0 + seed, steps=100, params=7, **kept,
                    )
                )  # fmt: skip
    return [replace(r, **fields) for r in made]


def drawn_folds(rng, passes: int, images: int, k: int = K) -> np.ndarray:
    """Folds of equal size, drawn anew for each pass: (passes, images)."""
    return np.stack([rng.permutation(np.arange(images) % k) for _ in range(passes)])


def random_values(rng, passes=8, images=60, effect=0.15) -> np.ndarray:
    """Right or wrong for two arms, (arms, passes, images): an image is hard or easy for both."""
    hard = rng.uniform(size=images)
    draws = hard + 0.1 * rng.normal(size=(2, passes, images))
    return draws < np.array([0.7, 0.7 + effect])[:, None, None]


def row_of(rows: list[Record], arm="b"):
    return next(row for row in compare(rows).rows if row.arm == arm)


RNG = np.random.default_rng(0)
FOLDS = drawn_folds(RNG, 8, 60)
VALUES = random_values(RNG)
RECORDS = records(VALUES, FOLDS)


# Pooling


def test_bits_of_a_pass_stand_in_the_order_of_the_images():
    passes = pooled(RECORDS)
    assert [(r.arm, r.seed) for r in passes] == [(arm, p) for arm in "ab" for p in range(8)]
    for r, expected in zip(passes, VALUES.reshape(16, 60)):
        assert r.correct_bits.tolist() == expected.tolist() and r.test_images == 60
        assert r.result == pytest.approx(expected.mean())
    assert pooled(passes) == passes, "a record of a pass is not pooled again"


def test_score_of_a_pass_is_weighted_by_images_and_costs_are_those_of_one_model():
    fold = np.array([[0, 0, 0, 0, 1, 1]])
    tables = {"confusion": [[2, 1], [0, 1]], "reliability": [[3, 0.5, 0.25], [0, 0.0, 0.0]]}
    first, second = records([[[1, 1, 1, 0, 0, 0]]], fold, **tables)
    second = replace(second, reliability=[[1, 0.9, 0.25], [0, 0.0, 0.0]], pretraining={"seconds": 4.0, "runs": {}})
    first = replace(first, pretraining={"seconds": 2.0, "runs": {}})
    (r,) = pooled([second, first])
    assert r.result == pytest.approx(0.5) and r.fold_scores == (0.75, 0.0) and r.seed == 0
    assert (r.seconds, r.steps, r.params, r.pretraining["seconds"]) == (10.5, 100, 7, 3.0)
    assert r.confusion == [[4, 2], [0, 2]] and r.reliability == [[4, pytest.approx(0.6), 0.25], [0, 0, 0]]


def test_contributions_are_pooled_like_bits():
    values = RNG.normal(0.5, 0.1, size=(2, 6, 20))
    fold = np.stack([np.arange(20) % 4] * 6)
    passes = pooled(records(values, fold, bits=False))
    assert np.allclose([r.per_image for r in passes], values.reshape(12, 20), atol=1e-6)
    assert all(r.correct_bits is None for r in passes)


@pytest.mark.parametrize(
    "status, error, words",
    [("failed", "out of memory", "b, pass 2: failed in fold 3"), ("missing", None, "b, pass 2: missing in fold 3")],
)
def test_pass_with_a_fold_without_a_result_has_none(status, error, words):
    broken = [
        replace(r, status=status, error=error, test=None, correct=None) if (r.arm, r.seed) == ("b", 13) else r for r in RECORDS
    ]
    row = row_of(broken)
    assert (row.verdict, row.reason) == ("no verdict", words) and row.seeds == (0, 1, 3, 4, 5, 6, 7)
    assert row.failures == {2: f"{status}: fold 3" + f": {error}" * bool(error)}
    left_out = row_of([r for r in RECORDS if (r.arm, r.seed) != ("b", 13)])
    assert left_out.reason == "b, pass 2: missing in fold 3"
    whole = row_of([r for r in RECORDS if r.arm == "a" or r.seed // K != 2])
    assert whole.reason == "b, pass 2: missing, no such run" and whole.failures == {2: "missing: no such run"}


def test_records_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="different numbers of folds: no, 5; expected the same"):
        compare([*RECORDS[:-1], replace(RECORDS[-1], folds=None)])
    with pytest.raises(ValueError, match="'b' at all labels, seed 39 is recorded twice"):
        pooled([*RECORDS, RECORDS[-1]])
    other = replace(RECORDS[1], test_index=RECORDS[0].test_index)
    with pytest.raises(ValueError, match="'a', pass 0: its folds do not contain every image once"):
        compare([RECORDS[0], other, *RECORDS[2:]])


def test_disagreements_are_counted_over_passes():
    (found,) = disagreements(RECORDS, "b", "a")
    b, a = VALUES[1, 3], VALUES[0, 3]
    assert found.seeds[3] == ((b & a).sum(), (b & ~a).sum(), (~b & a).sum(), (~b & ~a).sum()) and len(found.seeds) == 8
    text = disagreement_text([found])
    assert "\n  pass      both" in text and "Of 8 passes, the images" in text and "seed" not in text


def test_images_of_a_disagreement_are_shown_by_the_names_of_their_files(tmp_path):
    for i in range(60):
        file = tmp_path / "pool" / "xy"[i % 2] / f"{i:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(file)
    base = Run(data=partial(folder, path=str(tmp_path / "pool"), folds=K), model=SmallCNN)
    runs = ablate({"a": base, "b": base.vary(lr=1e-4)}, seeds=range(8), references=False)
    names = image_names(runs, [], "b")
    assert names[:2] == ["x/00.png", "x/02.png"] and len(names) == 60
    (found,) = disagreements(RECORDS, "b", "a")
    position, first, second = found.images[0]
    lines = disagreement_text([found], names).splitlines()
    assert lines[-len(found.images)] == f"  {names[position]}{first:>12}{second:>13}" and "positions" not in "".join(lines)
    assert lines[-len(found.images) - 1].split() == ["image", "only", "first", "only", "second"]
    shutil.rmtree(tmp_path / "pool")
    folder.cache_clear()
    assert image_names(runs, [], "b") is None
    assert image_names(ablate({"a": Run(model=TINY_VIT)}), [], "a")[7] == "test image 7"


# Tests of a difference


def test_score_without_values_of_images_cannot_be_tested_in_a_cross_validation():
    reasons = {
        None: "the score is not recorded for each test image, and for a cross-validation a test needs that",
        tuple(range(60)): "the score is not recorded for each test image, and for images in groups a test needs that",
    }
    for groups, reason in reasons.items():
        rows = [replace(r, correct=None) for r in records(VALUES, FOLDS, groups=None if groups is None else np.array(groups))]
        assert (row_of(rows).verdict, row_of(rows).reason) == ("no verdict", reason)


def test_folds_with_equal_accuracies_on_other_images_are_not_called_equal():
    folds, values = np.arange(20)[None] % 5, np.ones((2, 1, 20))
    values[0, 0, :5] = values[1, 0, 5:10] = 0
    row = row_of(records(values, folds))
    assert row.reason == "the same accuracy as the baseline for every fold; the predictions differ"
    values[1] = values[0]
    assert row_of(records(values, folds)).reason.endswith("check that the technique changes anything")


def test_six_passes_are_judged_over_passes_and_images_with_a_larger_part_over_images():
    row = row_of(RECORDS)
    mean, v = paired_variance(VALUES[1].astype(float) - VALUES[0])
    larger = replace(v, over_images=1.6 * v.over_images)
    half = half_width(larger, 0.05)
    d = row.difference
    assert [d.mean, d.low, d.high, d.p] == pytest.approx([mean, mean - half, mean + half, two_part_p(mean, larger)])
    assert (row.folds, row.units, d.pool, d.overlap, d.images, d.groups) == (5, "passes", "folds", 0.0, 60, None)
    assert d.seeds == tuple(range(8)) and row.verdict == "better" and d.replication is not None
    assert "8 passes of 5 folds and 60 images" in d.method and "multiplied by 1.6" in d.method
    plain = row_of([replace(r, folds=None, test_index=None, drawn_share=0.0, labels=10) for r in pooled(RECORDS)])
    assert plain.difference.p < d.p and plain.difference.method == "" and plain.units == "seeds"


@pytest.mark.parametrize("passes", [2, 5])
def test_few_passes_are_judged_with_a_part_over_seeds_from_single_folds(passes):
    row = row_of([r for r in RECORDS if r.seed < passes * K])
    d = VALUES[1, :passes].astype(float) - VALUES[0, :passes]
    left, df, v = d - d.mean(0), (passes - 1) * K, of_folds(paired_variance(d)[1])
    single = [(p, FOLDS[p] == f) for p in range(passes) for f in range(K)]
    over_seeds = sum(left[p][fold].sum() ** 2 / fold.sum() for p, fold in single) / df / d.size
    c = np.mean([sum((fold & other).sum() ** 2 for q, other in single if q != p) / (passes - 1) / fold.sum() ** 2
                 for p, fold in single])  # fmt: skip
    over_seeds += (1 / (1 - 1 / passes + c / passes) - 1) * max(0, over_seeds - v.rest)
    variance, found = replace(v, over_seeds=over_seeds, df=df), row.difference
    assert found.variance.over_seeds == pytest.approx(variance.over_seeds) and found.variance.df == df
    images = stats.t.isf(0.025, max(0.5, variance.n_eff - 1)) ** 2
    half = np.sqrt(
        max(
            stats.t.isf(0.025, df) ** 2 * variance.over_seeds + images * max(0, variance.over_images - variance.rest),
            images * variance.over_images,
        )
    )
    assert [found.mean, found.low, found.high] == pytest.approx([d.mean(), d.mean() - half, d.mean() + half])
    assert found.single_folds is None and found.p == pytest.approx(two_part_p(d.mean(), variance))
    assert f"{passes} passes of 5 folds and 60 images" in found.method and "comes from the single folds" in found.method
    assert row.verdict == ("better" if found.p < 0.05 else "inconclusive")


def test_a_training_without_chance_leaves_no_part_over_seeds():
    folds = drawn_folds(np.random.default_rng(0), 3, 60)
    d = np.tile(np.random.default_rng(1).integers(-1, 2, 60).astype(float), (3, 1))
    assert of_few_passes(paired_variance(d)[1], d, folds).over_seeds == 0


@pytest.mark.parametrize("of_model, of_image", [(0.3, 0.0), (0.3, 0.5), (0.0, 0.5)])
@pytest.mark.parametrize("passes", [2, 4])
def test_the_part_over_seeds_of_few_passes_is_right_on_average(passes, of_model, of_image):
    rng, found = np.random.default_rng(0), []
    for _ in range(400):
        folds = drawn_folds(rng, passes, 60)
        chance = np.take_along_axis(of_model * rng.normal(size=(passes, K)), folds, 1)
        d = rng.normal(size=60) + chance + of_image * rng.normal(size=(passes, 60))
        found.append(of_few_passes(paired_variance(d)[1], d, folds).over_seeds)
    assert np.mean(found) == pytest.approx((of_model**2 / K + of_image**2 / 60) / passes, rel=0.12)


def test_groups_are_the_units_of_few_passes():
    groups = np.repeat(np.arange(15), 4)
    folds = np.stack([np.random.default_rng(p).permutation(np.arange(15) % K)[groups] for p in range(2)])
    row = row_of(records(VALUES[:, :2], folds, groups=groups))
    d = VALUES[1, :2].astype(float) - VALUES[0, :2]
    units = d.reshape(2, 15, 4).sum(2) * 15 / 60
    variance = of_few_passes(of_folds(paired_variance(units)[1]), units, folds[:, ::4])
    assert row.difference.variance == variance and row.difference.p == pytest.approx(two_part_p(d.mean(), variance))
    assert "the 15 groups count and not the 60 images" in row.difference.method


def test_passes_with_one_difference_are_not_called_equal():
    values = np.ones((2, 2, 60), bool)
    values[:, :, :10] = False
    values[1, 0, :4], values[1, 0, 50] = True, False
    values[1, 1, 4:9], values[1, 1, [51, 52]] = True, False
    row = row_of(records(values, drawn_folds(np.random.default_rng(0), 2, 60)))
    assert row.difference.values == pytest.approx([0.05, 0.05]) and row.verdict == "inconclusive"
    assert "the same accuracy" not in row.reason and row.difference.detectable > 0


def test_few_folds_need_more_passes():
    rows = records(VALUES[:, :4], drawn_folds(np.random.default_rng(0), 4, 60, k=2))
    assert [row_of([r for r in rows if r.seed < 2 * n]).difference.single_folds is None for n in (2, 3, 4)] == [False, False, True]


def test_one_pass_is_judged_over_single_folds():
    row = row_of([r for r in RECORDS if r.seed < K])
    d, j = VALUES[1, 0].astype(float) - VALUES[0, 0], K
    values = np.array([d[FOLDS[0] == f].mean() for f in range(K)])
    se = np.sqrt(values.var(ddof=1) * (1 / j + 1 / (K - 1)))
    p = 2 * stats.t.sf(abs(values.mean()) / se, j - 1)
    half = stats.t.isf(0.025, j - 1) * se
    d = row.difference
    assert [d.mean, d.low, d.high, d.p] == pytest.approx([values.mean(), values.mean() - half, values.mean() + half, p])
    assert d.variance is None and d.seeds_low is None and d.single_folds.runs == j
    assert f"the {j} single folds with Nadeau and Bengio's correction" in row.reason and "at least 2 passes" in row.reason
    assert row.verdict == ("better" if p < 0.05 else "inconclusive")
    if row.verdict == "inconclusive":
        assert d.needs == "seeds" and d.detectable == pytest.approx(half + stats.t.isf(0.2, j - 1) * se)
    else:
        expected = stats.t.cdf((abs(values.mean()) - half) / se / np.sqrt(2), j - 1)
        assert d.replication == pytest.approx(expected)


@pytest.mark.parametrize("passes", [2, 8])
def test_score_of_an_arm_has_an_interval_for_new_images(passes):
    row = row_of([r for r in RECORDS if r.seed < passes * K])
    right = VALUES[1, :passes].astype(float)
    v = of_folds(paired_variance(right)[1])
    half = half_width(of_few_passes(v, right, FOLDS[:passes]) if passes < 6 else v, 0.05)
    assert row.new_images == pytest.approx((right.mean() - half, min(1.0, right.mean() + half)))
    assert row_of([replace(r, correct=None) for r in RECORDS if r.arm == "b"] + RECORDS[:40]).new_images is None
    assert row_of([r for r in RECORDS if r.seed < K]).new_images is None, "one pass does not say how much models vary"


@pytest.mark.parametrize("wrong", [0, 1, 3])
def test_score_with_few_errors_has_an_interval_that_allows_for_more(wrong):
    right = np.ones((1, 6, 60), bool)
    right[0, :, :wrong] = False
    low, high = row_of(records(right, FOLDS[:6]), arm="a").new_images
    expected = stats.binomtest(wrong, 60).proportion_ci(method="wilson")
    assert low < 1 - expected.high and low > 1 - 1.6 * expected.high and high >= 1 - wrong / 60
    plain = row_of([replace(r, folds=None, test_index=None, drawn_share=0.0, labels=10)
                    for r in pooled(records(right, FOLDS[:6]))], arm="a")  # fmt: skip
    assert plain.new_images == pytest.approx((1 - expected.high, 1 - expected.low))


@pytest.mark.parametrize("passes", [1, 2, 6])
def test_score_without_values_of_images_has_the_same_reason_for_any_number_of_passes(passes):
    rows = [replace(r, correct=None, score="hit", test={"hit": r.result}) for r in RECORDS if r.seed < passes * K]
    row = row_of(rows)
    assert row.verdict == "no verdict" and row.reason.startswith("the score hit is neither an accuracy nor recorded for each")


def test_equal_predictions_in_few_passes_are_inconclusive():
    same = [replace(r, correct=VALUES_OF[r.seed], test=TEST_OF[r.seed]) if r.arm == "b" else r for r in RECORDS if r.seed < K]
    row = row_of(same)
    assert row.verdict == "inconclusive" and row.reason.startswith("the same accuracy as the baseline for every fold")


VALUES_OF = {r.seed: r.correct for r in RECORDS if r.arm == "a"}
TEST_OF = {r.seed: r.test for r in RECORDS if r.arm == "a"}


def test_looks_count_passes():
    few = [r for r in RECORDS if r.seed < 6 * K]
    row = row_of([replace(r, looks=[6, 8, 12]) for r in few])
    assert row.difference.looks == (6,) and (row.stopped, row.next_look) in {("decided", None), ("", 8)}
    weak = records(random_values(np.random.default_rng(1), effect=0.01), FOLDS)
    wanted = next_looks([r for r in weak if r.seed < 6 * K], [6, 8, 12])
    assert set(wanted.values()) == {8}
    row = row_of([replace(r, looks=[6, 8, 12]) for r in weak if r.seed < 6 * K])
    assert row.reason.endswith("the next look is at 8 passes")
    early = row_of([replace(r, looks=[6, 8, 12]) for r in weak if r.seed < 3 * K])
    assert (early.verdict, early.reason) == ("not enough seeds", "3 of the 6 passes of the first look")
    words = "1 comparison has fewer than the 6 passes of the first look."
    assert answer(compare([replace(r, looks=[6, 8, 12]) for r in weak if r.seed < 3 * K])).endswith(words)


# Groups


@pytest.mark.parametrize("folded", [True, False])
def test_groups_are_the_units(folded):
    groups = np.repeat(np.arange(15), 4)
    fold = np.stack([np.random.default_rng(p).permutation(np.arange(15) % K)[groups] for p in range(8)])
    rows = records(VALUES, fold, groups=groups)
    if not folded:
        rows = [replace(r, folds=None, pool_images=None, drawn_share=0.0, labels=10) for r in pooled(rows)]
    row = row_of(rows)
    d = VALUES[1].astype(float) - VALUES[0]
    mean, v = paired_variance(d.reshape(8, 15, 4).sum(2) * 15 / 60)
    v = of_folds(v) if folded else v
    assert row.difference.variance == v and mean == pytest.approx(d.mean()) == row.difference.mean
    assert row.difference.p == pytest.approx(two_part_p(mean, v)) and row.difference.groups == v.images == 15
    assert "the 15 groups count and not the 60 images" in row.difference.method
    few = row_of([replace(r, test_groups=[g // 4 for g in r.test_groups]) for r in rows])
    assert (few.verdict, few.reason) == ("no verdict", "fewer than 6 groups of test images, so no test is possible")


def test_groups_of_unequal_size_need_no_wider_interval_than_equal_ones():
    """If all images have the same difference, nothing varies, whatever the sizes of the groups are."""
    groups = np.repeat([0, 1, 2, 3, 4, 5], [1, 2, 3, 10, 20, 24])
    assert np.allclose(in_groups(np.full((2, 60), 0.3), groups), 0.3)
    values = np.random.default_rng(0).normal(size=(2, 60))
    assert in_groups(values, groups).mean(1) == pytest.approx(values.mean(1))


def test_one_large_group_is_not_many_groups():
    """Its own deviation from the mean almost vanishes, because it almost is the mean."""
    d, equal = np.random.default_rng(1).normal(size=(8, 60)), np.repeat(np.arange(6), 10)
    groups = np.repeat(np.arange(6), [35, 5, 5, 5, 5, 5])
    v, shares = paired_variance(in_groups(d, groups))[1], np.bincount(groups) / 60
    found, squares = of_groups(v, groups), float((shares**2).sum())
    assert found.n_eff == min(v.n_eff, 1 / squares) and found.over_images == pytest.approx(v.over_images * (5 / 6) / (1 - squares))
    same = paired_variance(in_groups(d, equal))[1]
    assert astuple(of_groups(same, equal)) == pytest.approx(astuple(replace(same, n_eff=min(same.n_eff, 6))))
    rows = [replace(r, folds=None, pool_images=None, drawn_share=0.0, labels=10) for r in pooled(records(VALUES, np.zeros((8, 60), int) + np.arange(60) % K))]
    large = np.repeat(np.arange(6), [55, 1, 1, 1, 1, 1]).tolist()
    row = row_of([replace(r, test_groups=large) for r in rows])
    assert (row.verdict, row.reason[:52]) == ("no verdict", "fewer than two groups of test images count, because ")


# Other scores


@pytest.mark.parametrize("lower", [False, True])
def test_verdict_follows_the_direction_of_the_score(lower):
    losses = np.random.default_rng(2).exponential(size=(2, 8, 60)) + np.linspace(0, 2, 60)
    losses[1] -= 0.5 * losses[0].mean()
    values = losses if lower else losses / losses.max()
    rows = records(values, FOLDS, bits=False, lower_is_better=lower or None)
    for r in rows:
        r.score = "log_loss" if lower else "balanced_accuracy"
        r.test = {r.score: r.test["balanced_accuracy"]}
    row = row_of(rows)
    assert row.difference.mean < 0 and row.verdict == ("better" if lower else "worse")
    assert row.lower_is_better == row.difference.lower_is_better == lower and row.difference.metric == row.score
    single = row_of([r for r in rows if r.seed < K])
    assert single.difference.single_folds and (not single.decided or single.verdict == row.verdict)
    unknown = row_of([replace(r, contributions=None) for r in rows])
    assert unknown.verdict == "no verdict" and "nor recorded for each test image" in unknown.reason


def test_arms_with_different_scores_get_no_verdict():
    rows = [replace(r, score="log_loss", test={"log_loss": 0.5}, correct=None, contributions=pack_floats([0.5] * 12),
                    lower_is_better=True) if r.arm == "b" else r for r in RECORDS]  # fmt: skip
    row = row_of(rows)
    assert (row.verdict, row.reason, row.difference) == ("no verdict", "judged by log_loss, and a by accuracy", None)


# From images to a verdict


@pytest.fixture(scope="module")
def own_images(tmp_path_factory):
    """The path of an archive with 48 noisy images of three classes, in groups of two."""
    path, rng = tmp_path_factory.mktemp("own") / "own.npz", np.random.default_rng(0)
    labels = np.repeat(np.arange(24) % 3, 2)
    images = rng.integers(0, 100, (48, 8, 8), np.uint8)
    images[np.arange(48), labels] += 100
    np.savez(path, images=images, labels=labels, groups=np.repeat(np.arange(24), 2))
    return str(path)


def two_arms(own_images, test=None, **settings) -> list[ArmRun]:
    """The runs of two arms in one pass of three folds."""
    data = partial(arrays, path=own_images, folds=3, test=test)
    base = Run(data=data, model=TINY_VIT, steps=4, batch=8, val=6, **settings)
    return ablate({"a": base, "b": base.vary(steps=8)}, seeds=[1], references=False)


def trained(entries, out) -> list[Record]:
    """The records of runs, which are trained here."""
    tags = [Tags("demo", entry.arm, entry.role, entry.baseline) for entry in entries]
    places = [folder_of(entry, out, "demo") for entry in entries]
    reads = out / "reads.jsonl"
    return [fit(entry.run, place, tags=tag, reads=reads) for entry, place, tag in zip(entries, places, tags)]


@pytest.mark.slow
def test_runs_of_a_cross_validation_test_every_image_once(own_images, tmp_path):
    found = trained(two_arms(own_images, evaluators=(accuracy, knn)), tmp_path)
    assert {(r.folds, r.pool_images, r.test_settings, r.test_reads) for r in found} == {(3, 48, 1, 1)}
    groups = [set(r.test_groups) for r in found if r.arm == "a"]
    assert set.union(*groups) == set(range(24)) and sum(map(len, groups)) == 24
    passes = pooled(found)
    assert [(r.arm, r.seed, r.test_images) for r in passes] == [("a", 1, 48), ("b", 1, 48)]
    assert passes[0].test_groups == [i // 2 for i in range(48)]
    for r in passes:
        assert r.correct_bits.mean() == pytest.approx(r.result)
        assert np.sum(r.confusion) == 48 and np.trace(r.confusion) == r.correct_bits.sum()
        assert sum(n for n, _, _ in r.reliability) == 48 and len(r.reliability) == 15
        assert sum(n * right for n, _, right in r.reliability) == pytest.approx(r.correct_bits.sum())
    row = row_of(found)
    assert row.difference.single_folds.runs == 3 and row.difference.groups == 24 and row.verdict in ("better", "inconclusive")


@pytest.mark.slow
def test_runs_of_folds_of_a_part_test_every_image_of_the_part_once(own_images, tmp_path):
    entries = two_arms(own_images, test=0.5)
    found = trained(entries, tmp_path)
    part = arrays(own_images, folds=3, test=0.5).pool_index.tolist()
    groups = [i // 2 for i in part]
    assert {(r.folds, r.pool_images, r.test_settings, r.test_reads) for r in found} == {(3, 24, 1, 1)}
    passes = pooled(found)
    assert [(r.arm, r.seed, r.test_images, r.test_groups) for r in passes] == [("a", 1, 24, groups), ("b", 1, 24, groups)]
    for r in passes:
        assert r.correct_bits.mean() == pytest.approx(r.result) and np.sum(r.confusion) == 24
        mistakes = find_mistakes([entry for entry in entries if entry.arm == r.arm], tmp_path, "demo")
        assert [m.image for m in mistakes] == part and [not m.guesses for m in mistakes] == r.correct_bits.tolist()
    assert image_names(entries, found, "b") == [m.name for m in mistakes] == [f"test image {i}" for i in part]
    row = row_of(found)
    assert (row.difference.single_folds.runs, row.difference.groups, row.difference.images) == (3, 12, 24)
    text = "".join(how_to_read(compare(found), found))
    assert "A fixed part of the data is divided into 3 folds." in text and "are training images of all models. Each pass" in text
    (counted,) = disagreements(found, "b", "a")
    assert sum(counted.seeds[1]) == 24
    other = trained(two_arms(own_images, test=0.4)[1:2], tmp_path)
    with pytest.raises(ValueError, match="do not contain every image once"):
        pooled([r for r in found if (r.arm, r.seed) != ("b", 3)] + other)


@pytest.mark.slow
def test_run_on_a_fold_of_a_part_is_resumed_bitwise(own_images, tmp_path, monkeypatch):
    run = two_arms(own_images, test=0.5)[1].run
    monkeypatch.setattr("smallvit.train.loop.CHECKPOINT_SECONDS", 0.0)

    def interrupt(step, accuracy):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(run, tmp_path / "killed", watch=interrupt)
    assert (tmp_path / "killed" / CHECKPOINT).exists()
    steps: list[int] = []
    resumed = fit(run, tmp_path / "killed", watch=lambda step, accuracy: steps.append(step))
    assert steps[0] > 1 and resumed.weights_sha256 == fit(run, tmp_path / "whole").weights_sha256


def test_runs_can_be_judged_by_a_loss(own_images, tmp_path):
    found = trained(two_arms(own_images, evaluators=(log_loss, accuracy)), tmp_path)
    assert all(r.lower_is_better and r.score == "log_loss" and r.correct is None and r.result > 0.3 for r in found)
    for r in pooled(found):
        assert r.per_image.mean() == pytest.approx(r.result, rel=1e-6) and r.result == pytest.approx(r.test["nll"], rel=1e-6)
    row = row_of(found)
    assert row.lower_is_better and row.verdict in ("better", "worse", "inconclusive") and row.difference.metric == "log_loss"


# Simulations with real training


@cache
def digit_images() -> tuple[np.ndarray, np.ndarray]:
    """The 1,797 digits of scikit-learn, (images, 8, 8) between 0 and 1, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return data.images / 16, data.target


def halves(rng, images: np.ndarray, groups=None) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of the two arms, (images, pixels): the left half, and the right half turned around, of images mirrored at
    random. Images of a group are mirrored together.
    """
    units = np.arange(len(images)) if groups is None else groups
    mirrored = rng.random(units.max() + 1) < 0.5
    images = np.where(mirrored[units][:, None, None], images[:, :, ::-1], images)
    return images[:, :, :4].reshape(len(images), -1), images[:, :, :3:-1].reshape(len(images), -1)


def nearest(train, labels, test, seed) -> np.ndarray:
    """Scores (images, classes) of 1-NN."""
    distance = (test**2).sum(1)[:, None] - 2 * test @ train.T + (train**2).sum(1)
    return np.eye(labels.max() + 1)[labels[distance.argmin(1)]]


def random_features(train, labels, test, seed, width=100) -> np.ndarray:
    """Scores (images, classes) of ridge regression on a layer of random ReLU features."""
    draw = np.random.default_rng(seed)
    weights, bias = draw.normal(size=(train.shape[1], width)), draw.normal(size=width)
    a, b = (np.maximum((x - 0.3) @ weights + bias, 0) for x in (train, test))
    target = np.eye(labels.max() + 1)[labels] - 1 / (labels.max() + 1)
    return b @ np.linalg.solve(a.T @ a + 3.0 * np.eye(width), a.T @ target)


def moody(train, labels, test, seed) -> np.ndarray:
    """The same, with a random preference for some classes in each training."""
    draw = np.random.default_rng(seed + int(1e6 * train.sum()) % 10_000)
    return random_features(train, labels, test, seed) + 0.25 * draw.normal(size=labels.max() + 1)


def failing(train, labels, test, seed) -> np.ndarray:
    """The same, but one of ten trainings fails: the model names the first class for every image."""
    draw = np.random.default_rng(seed + int(1e6 * train.sum()) % 10_000)
    scores = random_features(train, labels, test, seed)
    return scores if draw.random() > 0.1 else np.eye(labels.max() + 1)[np.zeros(len(test), int)]


def out_of_fold(train_and_score, arms, labels, folds) -> np.ndarray:
    """Whether each arm classifies each image correctly when it is a test image, (arms, passes, images)."""
    right = np.zeros((2, *folds.shape), bool)
    for number, fold in enumerate(folds):
        for f in range(fold.max() + 1):
            out = fold == f
            for arm, x in enumerate(arms):
                found = train_and_score(x[~out], labels[~out], x[out], number * (fold.max() + 1) + f)
                right[arm, number, out] = found.argmax(1) == labels[out]
    return right


def fold_of_images(labels, passes, groups=None, k=K) -> np.ndarray:
    """The fold of each image in each pass, drawn as a data set draws them: (passes, images)."""
    table = np.empty((passes, len(labels)), int)
    groups = None if groups is None else torch.from_numpy(groups)
    for number in range(passes):
        for f, index in enumerate(draw_folds(torch.from_numpy(labels), groups, k, number, int(labels.max()) + 1)):
            table[number, index.numpy()] = f
    return table


def t_test(values) -> bool:
    return bool(stats.ttest_1samp(values, 0).pvalue < 0.05)


def null_of_folds(rng, train_and_score, images=300, passes=8, outside=0) -> dict[str, bool]:
    """Which tests call two equal arms different in one cross-validation. Some more images are `outside` of all folds: they are
    training images of all models.
    """
    pixels, labels = digit_images()
    chosen = rng.choice(len(labels), images + outside, replace=False)
    folds = fold_of_images(labels[chosen[:images]], passes)
    fold_or_none = np.pad(folds, ((0, 0), (0, outside)), constant_values=-1)
    right = out_of_fold(train_and_score, halves(rng, pixels[chosen]), labels[chosen], fold_or_none)
    return called_different(right[:, :, :images], folds)


def called_different(right, folds) -> dict[str, bool]:
    """Which tests call two arms different. `right` says which images they classify correctly, (arms, passes, images)."""
    rows = records(right, folds)
    each = right[1].astype(float) - right[0]
    single = [each[p][fold == f].mean() for p, fold in enumerate(folds) for f in range(K)]
    return {
        "two-part": row_of(rows).decided,
        "Nadeau-Bengio": row_of([r for r in rows if r.seed < K]).decided,
        "two passes": row_of([r for r in rows if r.seed < 2 * K]).decided,
        "plain t, passes": t_test(each.mean(1)),
        "plain t, all folds": t_test(single),
        "plain t, folds of one pass": t_test(single[:K]),
    }


def rates(name: str, draw, repetitions: int, seed: int) -> dict[str, float]:
    """The share of repetitions in which each test gives a false verdict."""
    rng = np.random.default_rng(seed)
    found = [draw(rng) for _ in range(repetitions)]
    shares = {test: float(np.mean([each[test] for each in found])) for test in found[0]}
    print(f"\n{name}, {repetitions} repetitions: " + ", ".join(f"{test} {share:.1%}" for test, share in shares.items()))
    return shares


def accuracy_of(found, labels) -> np.ndarray:
    return (found.argmax(1) == labels).astype(float)


def macro_f1_of(found, labels) -> np.ndarray:
    from sklearn.metrics import f1_score

    predicted, k = found.argmax(1), found.shape[1]
    score = f1_score(labels, predicted, labels=np.arange(k), average="macro", zero_division=0)
    return jackknife(float(score), macro_f1_without(labels, predicted, k))


def auc_of(found, labels) -> np.ndarray:
    from sklearn.metrics import roc_auc_score

    score = np.mean([roc_auc_score(labels == c, found[:, c]) for c in range(found.shape[1])])
    return jackknife(float(score), auc_without(labels, found))


SCORES = {"accuracy": accuracy_of, "balanced accuracy": lambda found, labels: balanced_accuracy_of(found, labels).values, "macro F1": macro_f1_of, "AUC": auc_of}


def below(p: float | None) -> bool:
    return p is not None and p < 0.05


def transformers(rng, folder, images=300, passes=6) -> dict[str, bool]:
    """Which tests call two equal arms different, with small ViTs that are trained as in a recipe. `folder` is a new folder."""
    pixels, labels = digit_images()
    chosen = rng.choice(len(labels), images, replace=False)
    folds = fold_of_images(labels[chosen], passes)
    right = np.empty((2, *folds.shape), bool)
    for arm, x in enumerate(halves(rng, pixels[chosen])):
        path = folder / f"{arm}.npz"
        np.savez(path, images=np.uint8(255 * x).reshape(-1, 8, 4), labels=labels[chosen])
        data = partial(arrays, path=str(path), folds=K, digits=True)
        run = Run(data=data, model=partial(TINY_VIT, dim=32), steps=80, batch=60, lr=3e-3, val=0)
        seeds = range(passes * K)
        found = fit_stacked([run.at_seed(s) for s in seeds], [folder / f"{arm}-{s}" for s in seeds])
        for number, r in enumerate(pooled(found)):
            right[arm, number] = r.correct_bits
            assert r.seed == number
    return called_different(right, folds)


def null_of_scores(rng, seeds=8, labelled=100, tested=(150, 80, 45, 25)) -> dict[str, bool]:
    """Which scores call two equal arms different on one fixed test part with classes of different sizes. Each seed draws its
    training images from the rest.
    """
    pixels, digits = digit_images()
    labels = digits % 4
    order = rng.permutation(len(labels))
    test = np.concatenate([order[labels[order] == c][:n] for c, n in enumerate(tested)])
    pool = np.setdiff1d(order, test)
    both = halves(rng, pixels)
    values = {name: np.empty((2, seeds, len(test))) for name in SCORES}
    for seed in range(seeds):
        train = rng.choice(pool, labelled, replace=False)
        for arm, x in enumerate(both):
            found = random_features(x[train], labels[train], x[test], seed)
            for name, value_of in SCORES.items():
                values[name][arm, seed] = value_of(found, labels[test])
    overlap = labelled / (len(pool) - labelled)
    decided = {}
    for name, (a, b) in values.items():
        mean, v = paired_variance(b - a)
        decided[name] = below(two_part_p(mean, v, overlap=overlap))
        decided[f"{name}, plain t"] = t_test((b - a).mean(1))
    return decided


def alike(rng, images, groups: int, size: int):
    """Images in groups, such as the images of one patient: the indices of one image of each group, repeated, and the pixels
    with a little noise, so that the images of a group are strongly alike. Return pixels, indices and groups.
    """
    chosen = rng.choice(len(images), groups, replace=False).repeat(size)
    pixels = images[chosen] + 0.05 * rng.normal(size=(groups * size, 8, 8))
    return pixels, chosen, np.arange(groups).repeat(size)


def null_of_groups(rng, groups=50, size=6, seeds=8, labelled=100) -> dict[str, bool]:
    """Which tests call two equal arms different on a fixed test part whose images are strongly alike within a group."""
    images, labels = digit_images()
    pixels, chosen, group = alike(rng, images, groups, size)
    pool = np.setdiff1d(np.arange(len(labels)), chosen)
    both, tested = halves(rng, images), halves(rng, pixels, group)
    right = np.empty((2, seeds, len(group)))
    for seed in range(seeds):
        train = rng.choice(pool, labelled, replace=False)
        for arm in range(2):
            found = random_features(both[arm][train], labels[train], tested[arm], seed)
            right[arm, seed] = found.argmax(1) == labels[chosen]
    d, overlap = right[1] - right[0], labelled / (len(pool) - labelled)
    return {
        "images": below(two_part_p(*paired_variance(d), overlap=overlap)),
        "groups": below(two_part_p(*paired_variance(in_groups(d, group)), overlap=overlap)),
    }


def null_of_groups_in_folds(rng, train_and_score, groups=75, size=4, passes=6) -> dict[str, bool]:
    """The same in a cross-validation whose folds keep groups together. The digits are put into three classes."""
    images, digits = digit_images()
    labels = digits % 3
    pixels, chosen, group = alike(rng, images, groups, size)
    folds = fold_of_images(labels[chosen], passes, group)
    right = out_of_fold(train_and_score, halves(rng, pixels, group), labels[chosen], folds)
    return {
        "images": row_of(records(right, folds)).decided,
        "groups": row_of(records(right, folds, groups=group)).decided,
    }


def covered(rng, train_and_score, images=300, passes=2) -> tuple[float, float, float]:
    """The accuracy of one arm in one cross-validation, and its interval for new images."""
    pixels, labels = digit_images()
    chosen = rng.choice(len(labels), images, replace=False)
    folds = fold_of_images(labels[chosen], passes)
    right = out_of_fold(train_and_score, [pixels[chosen].reshape(images, -1)], labels[chosen], folds)
    row = row_of(records(right[:1], folds), "a")
    return row.mean, *row.new_images


USED = ("two-part", "Nadeau-Bengio", "two passes")  # the others show what would be wrong
CLASSIFIERS = {"random features": random_features, "1-NN": nearest}


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_cross_validation_errs_in_at_most_five_percent(name):
    shares = rates(name, partial(null_of_folds, train_and_score=CLASSIFIERS[name]), 120, 0)
    assert all(shares[test] <= 0.05 for test in USED)
    assert shares["plain t, passes"] > 0.3, "the plain t-test takes the luck of the images for an effect"


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_interval_of_an_accuracy_contains_the_mean_accuracy(name):
    rng = np.random.default_rng(0)
    mean, low, high = np.array([covered(rng, CLASSIFIERS[name]) for _ in range(200)]).T
    assert ((low <= mean.mean()) & (mean.mean() <= high)).mean() >= 0.93
    assert (high - low).mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_folds_of_a_part_err_in_at_most_five_percent(name):
    draw = partial(null_of_folds, train_and_score=CLASSIFIERS[name], outside=300)
    shares = rates(f"part, {name}", draw, 120, 0)
    assert all(shares[test] <= 0.05 for test in USED)


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_cross_validation_errs_in_at_most_five_percent_often(name):
    shares = rates(name, partial(null_of_folds, train_and_score=CLASSIFIERS[name]), 1000, 0)
    assert all(shares[test] <= 0.05 for test in USED)


@pytest.mark.long
@pytest.mark.parametrize("train_and_score", [random_features, nearest, moody, failing])
@pytest.mark.parametrize(("passes", "k"), [(2, 5), (4, 5), (3, 3), (5, 3), (2, 10), (5, 10), (4, 2)])
def test_few_passes_err_in_at_most_five_percent(passes, k, train_and_score):
    rng, false = np.random.default_rng(0), 0
    pixels, labels = digit_images()
    for _ in range(200):
        chosen = rng.choice(len(labels), 300, replace=False)
        folds = fold_of_images(labels[chosen], passes, k=k)
        row = row_of(records(out_of_fold(train_and_score, halves(rng, pixels[chosen]), labels[chosen], folds), folds))
        assert row.difference.single_folds is None
        false += row.decided
    assert stats.binomtest(false, 200, 0.05, alternative="greater").pvalue > 0.01


@pytest.mark.long
def test_cross_validation_of_transformers_errs_rarely(tmp_path_factory):
    shares = rates("ViT", lambda rng: transformers(rng, tmp_path_factory.mktemp("runs")), 20, 0)
    for name in USED:
        assert stats.binomtest(round(20 * shares[name]), 20, 0.05, alternative="greater").pvalue > 0.01


@pytest.mark.long
def test_other_scores_err_in_at_most_five_percent():
    shares = rates("other scores", null_of_scores, 1000, 0)
    assert all(shares[name] <= 0.05 for name in SCORES)


@pytest.mark.slow
def test_groups_that_are_counted_as_images_give_false_verdicts():
    shares = rates("groups", null_of_groups, 400, 0)
    assert shares["groups"] <= 0.05 and shares["images"] > 2 * shares["groups"] and shares["images"] > 0.06


@pytest.mark.long
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_groups_in_folds_err_in_about_five_percent(name):
    shares = rates(f"groups, {name}", partial(null_of_groups_in_folds, train_and_score=CLASSIFIERS[name]), 400, 0)
    assert shares["groups"] <= 0.06, "its standard error is 1.1 points; 4.9% of 900 repetitions with random features"
    assert shares["images"] > 0.1


def test_page_says_where_single_folds_were_tested_if_other_arms_were_tested_over_passes():
    rng = np.random.default_rng(1)
    folds, values = drawn_folds(rng, 4, 60), random_values(rng, 4, 60, 0.3)
    values[0][:, 0] = False
    alike = values[0].copy()
    alike[:, 0] = True  # differs from the baseline on one image only
    third = [replace(r, arm="c", fingerprint=f"c{r.fingerprint}") for r in records(np.stack([values[0], alike]), folds) if r.arm == "b"]
    rows = [*records(values, folds), *third]
    assert row_of(rows).difference.single_folds is None and row_of(rows, "c").difference.single_folds
    page = " ".join(how_to_read(compare(rows), rows))
    assert "Each difference has two 95% intervals" in page and "so the first interval is widened" in page
    assert "Where too few images differ between the arms for a test over passes and images, there is one interval" in page
    assert "too few passes" not in page and "With more complete passes" not in page
    alone = " ".join(how_to_read(compare([*rows[: len(rows) // 3], *third]), [*rows[: len(rows) // 3], *third]))
    assert "because too few images differ between the arms for an interval over passes and images" in alone
    one = records(values[:, :1], folds[:1])
    assert "because there are too few passes" in " ".join(how_to_read(compare(one), one))


def test_images_of_folds_that_never_differ_also_widen_the_interval():
    rng = np.random.default_rng(0)
    folds, values = drawn_folds(rng, 8, 200), random_values(rng, 8, 200, 0)
    values[1] = values[0]
    found = row_of(records(values, folds)).difference
    wilson = 1.96**2 / (200 + 1.96**2)  # the end of the interval without folds
    assert found.high == pytest.approx(1.6**0.5 * wilson, rel=1e-2) and found.low == -found.high
    assert "multiplied by 1.6" in found.method
