"""Statistics of a comparison: intervals over seeds and test images, p-values at several looks, and what they promise."""

import math
from dataclasses import astuple, replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from smallvit.verdicts.sequential import ADDED_LOOKS, BOUNDARIES, LOOKS, nominal_level, sequential_p, stop_reason
from smallvit.verdicts.statistics import (
    Variance,
    collapse_rate,
    detectable,
    half_width,
    holm,
    limit_of_seeds,
    of_folds,
    paired_variance,
    pairs_needed,
    planned,
    replication,
    seeds_half_width,
    seeds_p,
    seeds_to_replicate,
    tuning_loss,
    two_part_p,
    variance_bound,
    wilson,
    without_differences,
)

FIRST = Variance(8, 2000, over_seeds=4e-5, over_images=3e-5, rest=1e-5, n_eff=200)
SECOND = Variance(6, 500, over_seeds=9e-6, over_images=1e-6, rest=5e-7, n_eff=50)
PAIRED = Variance(8, 2000, over_seeds=1e-4, over_images=0.0, rest=0.0, n_eff=2000)  # only seeds vary, as in a paired t-test
SCHEDULES = [*BOUNDARIES, (6, 12, 24), (8,), (10, 20)]

variances = st.builds(
    Variance,
    seeds=st.integers(6, 40),
    images=st.integers(100, 10_000),
    over_seeds=st.floats(1e-8, 1e-2),
    over_images=st.floats(0, 1e-2),
    rest=st.floats(0, 1e-2),
    n_eff=st.floats(2, 10_000),
)
levels = st.floats(1e-6, 0.9)
means = st.floats(1e-5, 0.3)
p_values = st.floats(1e-9, 1)


def table() -> np.ndarray:
    """A fixed table of differences for 8 seeds and 60 images."""
    s, i = np.arange(8)[:, None], np.arange(60)[None]
    only_arm = ((3 * s**2 + 5 * i + 7 * (i == 4 * s)) % 11 < 2) & (i % 3 > 0)
    return only_arm * 1 - ((s * i + 2 * i**2) % 13 < 1)


def random_table(rng: np.random.Generator, seeds: int = 7, images: int = 40) -> np.ndarray:
    return rng.choice([-1, 0, 1], p=[0.1, 0.75, 0.15], size=(seeds, images))


def paired_t(p: float) -> float:
    """The mean difference that has this p-value in a paired t-test with the variance `PAIRED`."""
    return stats.t.isf(p / 2, 7) * 0.01


# The variance of a paired difference


def test_variance_of_a_fixed_table():
    mean, v = paired_variance(table())
    assert mean == pytest.approx(-0.035417, abs=1e-6)
    expected = (8, 60, 1.333085e-4, 1.422066e-3, 3.615672e-4, 8.5631, False, False)
    assert astuple(replace(v, df=v.freedom)) == pytest.approx((*expected, 7), rel=1e-5)


def test_variances_are_the_mean_squares_of_a_two_way_analysis_of_variance():
    d = random_table(np.random.default_rng(0))
    (seeds, images), (mean, v) = d.shape, paired_variance(d)
    fitted = d.mean(1, keepdims=True) + d.mean(0, keepdims=True) - mean
    mean_squares = (
        images * ((d.mean(1) - mean) ** 2).sum() / (seeds - 1),
        seeds * ((d.mean(0) - mean) ** 2).sum() / (images - 1),
        ((d - fitted) ** 2).sum() / ((seeds - 1) * (images - 1)),
    )
    found = [seeds * images * part for part in (v.over_seeds, v.over_images, v.rest)]
    assert found == pytest.approx(mean_squares, rel=1e-9)


@pytest.mark.parametrize("k", range(5))
def test_order_of_seeds_and_images_changes_nothing_and_swapped_arms_change_the_sign(k):
    rng = np.random.default_rng(k)
    d = random_table(rng)
    mean, v = paired_variance(d)
    shuffled = d[rng.permutation(len(d))][:, rng.permutation(d.shape[1])]
    for other, sign in ((shuffled, 1), (-d, -1)):
        its_mean, its_v = paired_variance(other)
        assert its_mean == pytest.approx(sign * mean, abs=1e-12) and its_v.freedom == v.freedom
        assert astuple(its_v)[:-1] == pytest.approx(astuple(v)[:-1], rel=1e-9)
        assert two_part_p(its_mean, its_v) == pytest.approx(two_part_p(mean, v), rel=1e-6)


def test_images_given_twice_halve_the_variance_over_images_alone():
    d = random_table(np.random.default_rng(1))
    (mean, v), (same, twice) = paired_variance(d), paired_variance(np.repeat(d, 2, axis=1))
    assert same == pytest.approx(mean) and twice.over_seeds == pytest.approx(v.over_seeds, rel=1e-9)
    assert twice.over_images == pytest.approx(v.over_images / 2, rel=1 / d.shape[1])
    assert twice.n_eff == pytest.approx(2 * v.n_eff)


def test_variance_is_unbiased_for_random_seeds_and_images():
    rng = np.random.default_rng(2)
    shape, (seed_sd, image_sd, rest_sd) = (6, 30), (0.1, 0.4, 0.5)
    tables = [
        0.1 + rng.normal(0, seed_sd, (6, 1)) + rng.normal(0, image_sd, (1, 30)) + rng.normal(0, rest_sd, shape)
        for _ in range(3000)
    ]
    found = [paired_variance(d) for d in tables]
    true = seed_sd**2 / 6 + image_sd**2 / 30 + rest_sd**2 / 180
    assert np.mean([v.over_seeds + v.over_images - v.rest for _, v in found]) == pytest.approx(true, rel=0.04)
    assert np.var([mean for mean, _ in found]) == pytest.approx(true, rel=0.1)


def test_scores_other_than_right_and_wrong_have_a_variance_too():
    rng = np.random.default_rng(3)
    losses = rng.gamma(1.0, 0.3, (8, 200)) - rng.gamma(1.0, 0.3, (8, 200))
    mean, v = paired_variance(losses)
    assert mean == pytest.approx(losses.mean()) and 2 < v.n_eff < 200 and 0 < two_part_p(mean, v) <= 1


@pytest.mark.parametrize("shape", [(8,), (1, 60), (8, 1), (0, 0)])
def test_table_needs_two_seeds_and_two_images(shape):
    with pytest.raises(ValueError, match="at least two of each"):
        paired_variance(np.zeros(shape))


def test_bound_for_old_records_is_never_below_the_variance_of_the_bits():
    rng = np.random.default_rng(4)
    for accuracy in (0.6, 0.9, 0.98):
        arm, baseline = (rng.random((8, 300)) < accuracy for _ in range(2))
        d = arm.astype(float) - baseline
        _, v = paired_variance(d)
        bound = variance_bound([*d.mean(1)], (1 - arm.mean()) + (1 - baseline.mean()), 300)
        assert bound.bound and not v.bound and bound.over_seeds == pytest.approx(v.over_seeds)
        assert bound.over_images >= v.over_images and half_width(bound, 0.05) >= seeds_half_width(v, 0.05)
    assert bound.n_eff == 300 and bound.rest == 0
    with pytest.raises(ValueError, match="at least two of each"):
        variance_bound([0.1], 0.2, 300)


# Intervals and p-values


@pytest.mark.parametrize("v, level, expected", [
    (FIRST, 0.05, 0.017362), (FIRST, 0.01, 0.025003), (FIRST, 0.05 / 24, 0.033123), (SECOND, 0.05, 0.007842),
])  # fmt: skip
def test_half_width(v, level, expected):
    assert half_width(v, level) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("mean, v, overlap, expected", [
    (0.02, FIRST, 0.0, 0.028483), (-0.02, FIRST, 0.2, 0.109887), (0.01, SECOND, 0.0, 0.021804),
])  # fmt: skip
def test_two_part_p(mean, v, overlap, expected):
    assert two_part_p(mean, v, overlap=overlap) == pytest.approx(expected, abs=1e-6)


@settings(deadline=None)
@given(variances, levels, levels)
def test_interval_contains_those_of_seeds_and_of_images_and_shrinks_with_the_level(v, level, other):
    half = half_width(v, level)
    assert half >= seeds_half_width(v, level) * (1 - 1e-12)
    assert half >= stats.t.isf(level / 2, max(0.5, v.n_eff - 1)) * math.sqrt(v.over_images) * (1 - 1e-6)
    assert (half - half_width(v, other)) * (level - other) <= 0


@settings(deadline=None)
@given(means, variances, levels, st.floats(0, 2), st.booleans())
def test_p_is_below_the_level_exactly_if_the_interval_excludes_zero(mean, v, level, overlap, folds):
    used = of_folds(v) if folds else v
    p, half = two_part_p(mean, used, overlap=overlap), half_width(used, level, overlap=overlap)
    if abs(mean - half) > 1e-9 * half:
        assert (p < level) == (mean > half)
    assert p >= two_part_p(mean, v) * (1 - 1e-9), "an overlap and folds never make a difference more certain"
    assert p >= seeds_p(mean, v) * (1 - 1e-9), "better on new images implies better on these"


@settings(deadline=None)
@given(st.lists(st.floats(-0.1, 0.1), min_size=6, max_size=30, unique=True))
def test_p_without_images_is_that_of_the_paired_t_test(values):
    if np.std(values) < 1e-6 or abs(np.mean(values)) < 1e-6:
        return
    v = Variance(len(values), 100, float(np.var(values, ddof=1)) / len(values), 0.0, 0.0, n_eff=100)
    expected = stats.ttest_1samp(values, 0).pvalue
    assert two_part_p(float(np.mean(values)), v) == pytest.approx(expected, rel=1e-9)
    assert seeds_p(float(np.mean(values)), v) == pytest.approx(expected, rel=1e-9)


def test_five_wins_on_the_same_few_images_are_no_proof():
    """At 99.5% of 500 images few images decide. A test over seeds alone believes them."""
    d = np.zeros((8, 500))
    d[:, :3] = 1
    d[::2, 3] = 1
    mean, v = paired_variance(d)
    assert seeds_p(mean, v) < 0.001 and v.n_eff < 5 and two_part_p(mean, v) > 0.05


def test_no_verdict_where_none_is_possible():
    assert two_part_p(0.05, replace(FIRST, seeds=5)) is None
    assert two_part_p(0.05, replace(FIRST, n_eff=1.9)) is None
    constant = np.zeros((8, 100))
    constant[:, :10] = 1
    assert two_part_p(*paired_variance(constant)) is None and seeds_p(*paired_variance(constant)) is None
    equal = paired_variance(np.zeros((8, 100)))
    assert two_part_p(*equal) == seeds_p(*equal) == 1


@pytest.mark.parametrize("images", [20, 100, 10_000])
def test_interval_reaches_to_images_that_differ_but_are_rare(images):
    """The arms differ on no test image. The end of the interval is about Wilson's for a share of 0."""
    mean, v = paired_variance(np.zeros((8, images)))
    bound = without_differences(v)
    assert half_width(v, 0.05) == 0 and two_part_p(mean, bound) == 1
    assert half_width(bound, 0.05) == pytest.approx(wilson(0.0, images)[1], rel=0.08 if images > 20 else 0.1)
    assert stop_reason(mean, bound, 6) == ("excluded" if images == 10_000 else "hopeless")


def test_huge_differences_have_a_tiny_p_and_no_error():
    assert 0 < two_part_p(0.9, replace(FIRST, over_seeds=1e-12, over_images=1e-14, rest=0.0)) < 1e-20


# Looks while seeds are added


@pytest.mark.parametrize("found, expected", [
    ({6: 0.03}, 0.15959), ({6: 0.03, 8: 0.004}, 0.02329), ({6: 0.0001}, 0.000824),
])  # fmt: skip
def test_sequential_p(found, expected):
    assert sequential_p(found) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("level, expected", [
    (0.05, (4.26, 3.56, 3.04, 2.81, 2.60, 2.49)), (0.05 / 3, (5.65, 4.51, 3.72, 3.40, 3.12, 2.98)),
    (0.05 / 24, (9.15, 6.61, 5.05, 4.50, 4.03, 3.82)),
])  # fmt: skip
def test_nominal_levels_give_the_published_critical_values(level, expected):
    assert [stats.t.isf(nominal_level(n, LOOKS, level) / 2, n - 1) for n in LOOKS] == pytest.approx(expected, abs=0.005)


@settings(deadline=None)
@given(st.sampled_from(SCHEDULES), st.lists(p_values, min_size=1, max_size=6))
def test_sequential_p_is_a_p_value_that_further_looks_never_raise(looks, found):
    taken = dict(zip(looks, found))
    p = [sequential_p({n: taken[n] for n in looks[:k]}, looks) for k in range(1, len(taken) + 1)]
    union = min(p * math.sqrt(looks[-1] / n) for n, p in taken.items()) * sum(math.sqrt(n / looks[-1]) for n in looks)
    assert p == sorted(p, reverse=True) and min(taken.values()) <= p[-1] * (1 + 1e-12)
    boundary = BOUNDARIES.get(looks)
    assert p[-1] == 1 or p[-1] <= union * 1.01, "never worse than adding up the errors of all looks"
    if boundary is None:
        assert p[-1] == pytest.approx(min(1, union))


@settings(deadline=None)
@given(st.sampled_from(SCHEDULES), st.data(), st.floats(1e-5, 0.4), p_values)
def test_p_at_a_look_decides_exactly_at_its_nominal_level(looks, data, level, p):
    n = data.draw(st.sampled_from(looks))
    nominal = nominal_level(n, looks, level)
    if abs(p - nominal) > 1e-9 * nominal and not 1.8e-4 < level < 2.3e-4:  # where the table ends, the two ends overlap
        assert (p < nominal) == (sequential_p({n: p}, looks) < level)


@settings(deadline=None)
@given(st.lists(st.lists(p_values, min_size=6, max_size=6), min_size=1, max_size=8))
def test_a_decided_arm_stays_decided_under_holm(arms):
    decided = set()
    for k in range(1, 7):
        corrected = holm([sequential_p(dict(zip(LOOKS[:k], found))) for found in arms])
        now = {arm for arm, p in enumerate(corrected) if p < 0.05}
        assert decided <= now
        decided = now


def test_one_look_is_an_ordinary_test_and_looks_that_allow_no_test_count_as_one():
    assert sequential_p({8: 0.04}, (8,)) == pytest.approx(0.04) and nominal_level(8, (8,)) == 0.05
    assert sequential_p({6: None}) == sequential_p({}) == 1
    assert sequential_p({6: None, 8: 0.004}) == sequential_p({8: 0.004})


def test_numbers_of_seeds_between_the_looks_are_refused():
    with pytest.raises(ValueError, match=r"\[7\] seeds, but the looks are at \[6, 8, 12, 16, 24, 32\]"):
        sequential_p({6: 0.1, 7: 0.01})
    with pytest.raises(ValueError, match="no look at 12 seeds"):
        nominal_level(12, ADDED_LOOKS)


def test_adding_seeds_to_a_finished_comparison_can_withdraw_its_verdict():
    assert sequential_p({8: 0.04}, ADDED_LOOKS) > 0.05 > 0.04


@pytest.mark.parametrize("mean, sd, n, expected", [
    (0.0, 0.002, 6, "excluded"),      # the interval lies within half a point
    (0.0, 0.02, 16, "hopeless"),      # neither a difference nor its absence can be shown with 32 seeds
    (0.0, 0.02, 8, ""),               # too early to give up
    (0.0, 0.02, 32, ""),              # the last look
    (0.015, 0.02, 16, ""),            # a difference is in sight
    (0.0, 0.006, 12, ""),             # 32 seeds will exclude an effect
])  # fmt: skip
def test_reasons_to_stop(mean, sd, n, expected):
    v = Variance(n, 10_000, sd**2 / n, 0.0, 0.0, n_eff=10_000)
    assert stop_reason(mean, v, n, LOOKS) == expected


def test_overlap_makes_it_harder_to_exclude_an_effect():
    v = Variance(16, 10_000, 0.005**2 / 16, 0.0, 0.0, n_eff=10_000)
    assert stop_reason(0.0, v, 16, LOOKS) == "excluded" != stop_reason(0.0, v, 16, LOOKS, overlap=0.5)
    assert stop_reason(0.0, v, 16, LOOKS, equivalence=0.002) != "excluded"


# Planning and replication


def test_variance_of_more_seeds_and_images():
    for numbers, total in (((16,), 4.0e-5), ((16, 8000), 2.125e-5), ((8,), 6e-5)):
        part = planned(FIRST, *numbers)
        assert part.over_seeds + part.over_images - part.rest == pytest.approx(total)
    assert astuple(planned(FIRST, 8)) == pytest.approx(astuple(FIRST))


@pytest.mark.parametrize("p, expected", [(0.05, 0.50), (0.03, 0.59), (0.02, 0.67), (0.01, 0.78), (0.005, 0.86), (0.001, 0.97)])
def test_replication(p, expected):
    assert replication(paired_t(p), PAIRED) == replication(-paired_t(p), PAIRED) == pytest.approx(expected, abs=0.007)


def test_replication_at_the_level_of_the_verdict_is_one_half():
    for v in (FIRST, SECOND):
        for level in (0.05, 0.05 / 24):
            assert replication(half_width(v, level), v, level=level) == pytest.approx(0.5)
            assert replication(half_width(v, level, overlap=0.3), v, level=level, overlap=0.3) == pytest.approx(0.5)


def test_more_seeds_replicate_more_often_up_to_what_the_images_allow():
    chances = [replication(paired_t(0.01), PAIRED, seeds=n) for n in (6, 8, 12, 16, 24, 32)]
    assert chances == sorted(chances) and chances[2] == pytest.approx(0.89, abs=0.01)
    enough = seeds_to_replicate(paired_t(0.01), PAIRED)
    at_it, before = (replication(paired_t(0.01), PAIRED, seeds=n) for n in (enough, enough - 1))
    assert 12 <= enough <= 15 and at_it >= 0.9 > before
    assert seeds_to_replicate(0.2, PAIRED) == 6
    few_images = replace(PAIRED, over_images=1e-4, n_eff=100)
    assert seeds_to_replicate(0.025, few_images) is None
    assert limit_of_seeds(few_images, 0.019) == "images" and limit_of_seeds(few_images, 0.021) == ""
    assert limit_of_seeds(PAIRED, 0.001) == ""


def test_replication_of_repeated_experiments_agrees_with_the_promise():
    """Effects from a wide distribution, experiments that end with p about 0.01, and a second experiment each."""
    rng = np.random.default_rng(5)
    effect = rng.uniform(-0.06, 0.06, 40_000)
    runs = rng.normal(effect[:, None], 0.03, (40_000, 16))
    first, again = stats.ttest_1samp(runs[:, :8], 0, axis=1), stats.ttest_1samp(runs[:, 8:], 0, axis=1)
    chosen = (first.pvalue > 0.008) & (first.pvalue < 0.012)
    came_out = (again.pvalue < 0.05) & (np.sign(again.statistic) == np.sign(first.statistic))
    assert chosen.sum() > 300 and came_out[chosen].mean() == pytest.approx(0.78, abs=0.08)


@pytest.mark.parametrize("v", [FIRST, SECOND, PAIRED])
def test_detectable_difference_is_found_in_about_80_percent(v):
    """Normal means and chi-squared variances around the given ones."""
    rng, effect, found = np.random.default_rng(6), detectable(v), 0
    sd = math.sqrt(v.over_seeds + max(0, v.over_images - v.rest))
    for mean, share in zip(rng.normal(effect, sd, 2000), rng.chisquare(v.seeds - 1, 2000) / (v.seeds - 1)):
        found += mean > half_width(replace(v, over_seeds=v.over_seeds * share), 0.05)
    assert found / 2000 == pytest.approx(0.8, abs=0.06)
    assert detectable(v, level=0.05 / 24) > detectable(v) < detectable(v, overlap=0.2)


@pytest.mark.parametrize("sd", [0.008, 0.015, 0.03])
def test_pairs_needed_have_the_promised_power(sd):
    n = pairs_needed(sd)
    enough, too_few = (stats.nct.sf(stats.t.isf(0.025, k - 1), k - 1, 0.01 / sd * math.sqrt(k)) for k in (n, n - 2))
    assert enough >= 0.79 and too_few < 0.8
    assert pairs_needed(0.0) == 6


@pytest.mark.parametrize("seeds, expected", [(8, 0.31), (16, 0.17), (32, 0.09)])
def test_rate_of_collapse_that_is_excluded(seeds, expected):
    assert collapse_rate(seeds) == pytest.approx(expected, abs=0.005)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


# Tuning


@pytest.mark.parametrize("images, seeds", [(300, 4), (1000, 4), (3000, 4), (1000, 8)])
def test_choice_among_eight_trials_loses_at_most_what_is_said(images, seeds):
    """Trials whose true accuracies scatter by 0.75 of the noise, where the loss is largest."""
    rng = np.random.default_rng(7)
    noise = math.sqrt((0.05 / images + 0.01**2 / seeds) / 2)
    lost, said = [], []
    for _ in range(150):
        true = rng.normal(0, 0.75 * noise, 8)
        seed_luck = rng.normal(0, 0.01 / math.sqrt(2), (8, seeds, 1))
        image_luck = rng.normal(0, math.sqrt(0.05 / 2), (8, 1, images))
        scores = true[:, None, None] + seed_luck + image_luck
        lost.append(true.max() - true[scores.mean((1, 2)).argmax()])
        said.append(tuning_loss([a - b for a, b in list(combinations(scores, 2))[:6]]))
    assert np.mean(said) == pytest.approx(0.43 * noise, rel=0.1)
    assert np.mean(lost) == pytest.approx(np.mean(said), rel=0.3)


def test_tuning_loss_of_3000_images_and_4_seeds_is_a_fifth_of_a_point():
    rng = np.random.default_rng(8)
    d = rng.normal(0, 0.01, (200, 4, 1)) + rng.normal(0, math.sqrt(0.055), (200, 1, 3000))
    assert tuning_loss(d) == pytest.approx(0.002, abs=0.0002)
    assert math.isnan(tuning_loss([]))
