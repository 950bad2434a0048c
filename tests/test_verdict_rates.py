"""Simulations: how often equal arms are called better or worse, and once with real training. They need minutes: `-m slow`,
`-m long`. Run with `-s` to see the rates.
"""

import math
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from smallvit.data import arrays, mnist
from smallvit.recipe import load_recipe
from smallvit.train import fit_stacked
from smallvit.train.fit import Tags
from smallvit.verdicts import compare
from smallvit.verdicts.sequential import ADDED_LOOKS, LOOKS, nominal_level, sequential_p, stop_reason
from smallvit.verdicts.statistics import (
    Variance,
    holm,
    of_folds,
    paired_variance,
    replication,
    seeds_p,
    two_part_p,
)


def rate(wrong) -> float:
    """The share of true values."""
    return float(np.mean(np.asarray(wrong, dtype=bool)))


def bits(rng, seeds, images, accuracy, correlation, *, arms=2, tau=2.0, seed_sd=0.1, effect=0.0, collapse=0.0) -> np.ndarray:
    """Whether each arm (first axis), seed and image is right, from a probit model in which the arms are equal but for `effect`.

    tau: spread of the images' difficulty; `correlation` of it is common to all arms. effect: added to all arms but the first,
    in accuracy. collapse: share of runs, in every arm, that only guess.
    """
    common, own = rng.standard_normal((1, 1, images)), rng.standard_normal((arms, 1, images))
    difficulty = tau * (math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own)
    total = math.sqrt(1 + tau**2 + seed_sd**2)
    level = np.full((arms, 1, 1), stats.norm.ppf(accuracy) * total)
    level[1:] = stats.norm.ppf(min(accuracy + effect, 1 - 1e-6)) * total
    latent = level + difficulty + seed_sd * rng.standard_normal((arms, seeds, 1))
    right = rng.standard_normal((arms, seeds, images), dtype=np.float32) + latent > 0
    guesses = rng.random((arms, seeds, 1)) < collapse
    return np.where(guesses, rng.random((arms, seeds, images)) < 0.1, right)


def tables(rng, repetitions, *cell, **options):
    """Yield tables of paired differences, arm minus baseline, of two arms."""
    for _ in range(repetitions):
        baseline, arm = bits(rng, *cell, **options).astype(np.int8)
        yield arm - baseline


def below(p: float | None, level: float = 0.05) -> bool:
    return p is not None and p < level


def both_rates(found) -> tuple[float, float]:
    """The shares of tables that the two-part test and the paired t-test call different."""
    measured = [paired_variance(d) for d in found]
    return rate([below(two_part_p(m, v)) for m, v in measured]), rate([below(seeds_p(m, v)) for m, v in measured])


# Seeds and images


@pytest.mark.slow
@pytest.mark.parametrize("seeds, images, accuracy, correlation", [(6, 500, 0.6, 0.0), (8, 2000, 0.9, 0.8)])
def test_two_part_test_errs_in_at_most_six_percent(seeds, images, accuracy, correlation):
    two_part, seeds_only = both_rates(tables(np.random.default_rng(0), 2000, seeds, images, accuracy, correlation))
    print(f"\n{seeds} seeds, {images} images, accuracy {accuracy}: two-part {two_part:.1%}, paired t {seeds_only:.1%}")
    assert two_part <= 0.06 and seeds_only > 0.1, "the paired t-test takes the luck of the test images for an effect"


@pytest.mark.slow
def test_two_part_test_finds_real_effects():
    """2 points at 8 seeds: 500 images find them sometimes, 2,000 nearly always."""
    rng = np.random.default_rng(1)
    found = [both_rates(tables(rng, 400, 8, images, 0.9, 0.8, effect=0.02))[0] for images in (500, 2000)]
    print(f"\n2 points found with 500 and 2,000 images: {found}")
    assert found[0] > 0.35 and found[1] > 0.85


@pytest.mark.slow
def test_two_part_test_with_collapses_and_at_ceilings():
    rng = np.random.default_rng(2)
    cells = {
        "one seed in ten collapses": tables(rng, 1000, 8, 500, 0.9, 0.8, collapse=0.1),
        "500 images at 99.5%": tables(rng, 2000, 8, 500, 0.995, 0.8),
        "6 seeds, 500 images at 99.5%": tables(rng, 2000, 6, 500, 0.995, 0.0),
        "no seed effect": tables(rng, 1000, 8, 500, 0.9, 0.8, seed_sd=0.0),
        "large seed effect": tables(rng, 1000, 8, 500, 0.9, 0.8, seed_sd=0.5),
    }
    for name, found in cells.items():
        two_part, seeds_only = both_rates(found)
        print(f"\n{name}: two-part {two_part:.1%}, paired t {seeds_only:.1%}", end="")
        assert two_part <= 0.06, name


@pytest.mark.slow
@pytest.mark.parametrize("arms", [3, 24])
def test_two_part_test_under_holm(arms):
    """All arms are equal; any verdict among them is false."""
    rng, wrong = np.random.default_rng(3), []
    for _ in range(400):
        baseline, *others = bits(rng, 6, 500, 0.9, 0.8, arms=arms + 1).astype(np.int8)
        p_values = [two_part_p(*paired_variance(other - baseline)) for other in others]
        wrong.append(min(holm([1.0 if p is None else p for p in p_values])) < 0.05)
    print(f"\nHolm, {arms} arms: {rate(wrong):.1%}")
    assert rate(wrong) <= 0.06


@pytest.mark.long
@pytest.mark.parametrize("images, repetitions", [(500, 400), (2000, 200)])
def test_two_part_test_over_a_grid_of_cells(images, repetitions):
    rng, found = np.random.default_rng(4), {}
    for accuracy in (0.6, 0.9, 0.98, 0.995):
        for correlation in (0.0, 0.8, 0.98):
            for seeds in (6, 8, 16):
                cell = (seeds, images, accuracy, correlation)
                found[cell] = both_rates(tables(rng, repetitions, *cell))
    two_part, seeds_only = np.array([*found.values()]).T
    print(f"\n{images} images: two-part {two_part.mean():.1%} (max {two_part.max():.1%})", end="; ")
    print(f"paired t {seeds_only.mean():.1%} (max {seeds_only.max():.1%})")
    assert two_part.mean() <= 0.05
    for cell, share in zip(found, two_part):
        assert stats.binomtest(round(share * repetitions), repetitions, 0.055, alternative="greater").pvalue > 1e-3, cell


# Looks while seeds are added


def normal(rng, shape):
    return rng.standard_normal(shape)


def heavy_tails(rng, shape):
    """Student's t with 3 degrees of freedom."""
    return rng.standard_t(3, shape)


def collapses(rng, shape):
    """Accuracy falls by far in one seed of ten."""
    return rng.standard_normal(shape) - 50 * (rng.random(shape) < 0.1)


def ceiling(rng, shape):
    """The accuracy on 500 images, of which 99.5% are right."""
    return rng.binomial(500, 0.995, shape) / 500


def seed_p_values(d: np.ndarray, looks=LOOKS) -> np.ndarray:
    """p-values of the paired t-test at each look (last axis), for differences of shape (..., seeds).
    Equal differences have none and count as 1.
    """
    p_values = []
    for n in looks:
        mean, sd = d[..., :n].mean(-1), d[..., :n].std(-1, ddof=1)
        p = 2 * stats.t.sf(np.abs(mean) / np.maximum(sd, 1e-12) * math.sqrt(n), n - 1)
        p_values.append(np.where(sd > 1e-9, p, 1.0))
    return np.stack(p_values, axis=-1)


def ever_wrong(p_values: np.ndarray, looks=LOOKS) -> list[bool]:
    """Whether some look of each path, shape (paths, looks), ends in a verdict. A sequential p-value only falls."""
    return [sequential_p(dict(zip(looks, path)), looks) < 0.05 for path in p_values.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("shape", [normal, heavy_tails, collapses, ceiling])
@pytest.mark.parametrize("looks", [LOOKS, (8, 12, 16, 24, 32), ADDED_LOOKS, (6, 8, 12, 16)], ids=str)
def test_looks_together_err_in_at_most_six_percent(shape, looks):
    rng = np.random.default_rng(5)
    d = shape(rng, (20_000, looks[-1])) - shape(rng, (20_000, looks[-1]))
    p_values = seed_p_values(d, looks)
    found, naive = rate(ever_wrong(p_values, looks)), rate((p_values < 0.05).any(1))
    print(f"\n{shape.__name__}, looks at {looks}: {found:.1%}; 0.05 at every look: {naive:.1%}")
    assert found <= 0.06
    if shape is normal:
        assert found == pytest.approx(0.05, abs=0.006) and naive > 0.1


@pytest.mark.slow
def test_sequential_p_is_valid_at_every_level():
    rng = np.random.default_rng(6)
    found = np.array([sequential_p(dict(zip(LOOKS, p))) for p in seed_p_values(normal(rng, (100_000, 32))).tolist()])
    for level in (0.5, 0.3, 0.1, 0.05, 0.025, 0.01, 0.05 / 24, 0.001):
        share = (found <= level).mean()
        print(f"\nlevel {level:.4f}: {share:.4f}", end="")
        assert share <= level + 4 * math.sqrt(level * (1 - level) / len(found))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [normal, heavy_tails, collapses, ceiling])
@pytest.mark.parametrize("arms, real", [(1, 0), (3, 0), (3, 1), (24, 0), (24, 8)])
def test_looks_under_holm(shape, arms, real):
    """Verdicts at any look about the arms without an effect; all arms share one baseline."""
    rng, wrong, families = np.random.default_rng(7), 0, 2000
    for _ in range(families):
        d = shape(rng, (arms, 32)) - shape(rng, 32)
        d[:real] += 2 * d.std()
        p_values = [sequential_p(dict(zip(LOOKS, path))) for path in seed_p_values(d).tolist()]
        wrong += min(holm(p_values)[real:]) < 0.05
    print(f"\n{shape.__name__}, {arms} arms, {real} with an effect: {wrong / families:.1%}")
    assert stats.binomtest(wrong, families, 0.05, alternative="greater").pvalue > 0.01


def looks_at_tables(found, looks=LOOKS) -> tuple[float, float]:
    """The shares of tables that the two-part test and the paired t-test call different at some look."""
    two_part, seeds_only = [], []
    for d in found:
        measured = {n: paired_variance(d[:n]) for n in looks}
        two_part.append(sequential_p({n: two_part_p(*m) for n, m in measured.items()}, looks) < 0.05)
        seeds_only.append(sequential_p({n: seeds_p(*m) for n, m in measured.items()}, looks) < 0.05)
    return rate(two_part), rate(seeds_only)


@pytest.mark.slow
@pytest.mark.parametrize("images, accuracy, correlation, collapse", [
    (500, 0.995, 0.8, 0.0), (500, 0.6, 0.0, 0.0), (2000, 0.9, 0.8, 0.0), (500, 0.9, 0.8, 0.1),
])  # fmt: skip
def test_looks_with_the_two_part_test(images, accuracy, correlation, collapse):
    rng, repetitions = np.random.default_rng(8), 1000 if images == 500 else 300
    found = tables(rng, repetitions, 32, images, accuracy, correlation, collapse=collapse)
    two_part, seeds_only = looks_at_tables(found)
    print(f"\n{images} images at {accuracy}, collapse {collapse}: two-part {two_part:.1%}, paired t {seeds_only:.1%}")
    assert two_part <= 0.06


@pytest.mark.slow
@pytest.mark.parametrize("arms, families", [(3, 300), (24, 60)])
def test_looks_with_the_two_part_test_under_holm_at_a_ceiling(arms, families):
    rng, wrong = np.random.default_rng(15), 0
    for _ in range(families):
        baseline, *others = bits(rng, 32, 500, 0.995, 0.8, arms=arms + 1).astype(np.int8)
        found = [{n: two_part_p(*paired_variance((other - baseline)[:n])) for n in LOOKS} for other in others]
        wrong += min(holm([sequential_p(p_values) for p_values in found])) < 0.05
    print(f"\nceiling, {arms} arms: {wrong / families:.1%}")
    assert stats.binomtest(wrong, families, 0.05, alternative="greater").pvalue > 0.01


@pytest.mark.slow
def test_repeated_intervals_cover_the_truth_at_all_looks():
    rng, missed, excluded_wrongly = np.random.default_rng(9), [], []
    levels = {n: nominal_level(n, LOOKS) for n in LOOKS}
    for scores in rng.standard_normal((4000, 32)):
        d = 0.005 + 0.008 * scores  # an effect of exactly half a point
        at_look = {n: (d[:n].mean(), stats.sem(d[:n])) for n in LOOKS}
        halves = {n: stats.t.isf(levels[n] / 2, n - 1) * se for n, (_, se) in at_look.items()}
        missed.append(any(abs(m - 0.005) > halves[n] for n, (m, _) in at_look.items()))
        excluded_wrongly.append(any(abs(m) + halves[n] < 0.005 for n, (m, _) in at_look.items()))
    print(f"\nmissed at some look: {rate(missed):.1%}; excluded wrongly: {rate(excluded_wrongly):.1%}")
    assert rate(missed) <= 0.06 and rate(excluded_wrongly) <= 0.035


@pytest.mark.slow
def test_stopping_for_nothing_saves_seeds_and_hardly_costs_power():
    """Half a point is 0.8 SD of the differences over seeds. Without an effect nearly all series end early; with an effect of
    0.75 SD hardly any verdict is lost.
    """
    rng, sd = np.random.default_rng(10), 0.005 / 0.8
    stops, decided, lost = [], [], []
    for effect in (0.0, 0.75 * sd):
        for d in rng.normal(effect, sd, (1000, 32)):
            stop, verdict, p_values = 0, 0, {}
            for n in LOOKS:
                mean, v = d[:n].mean(), Variance(n, 10_000, d[:n].var(ddof=1) / n, 0.0, 0.0, n_eff=10_000)
                p_values[n] = two_part_p(mean, v)
                verdict = verdict or n * (sequential_p(p_values) < 0.05)
                stop = stop or n * bool(stop_reason(mean, v, n, LOOKS))
            if effect:
                decided.append(verdict)
                lost.append(stop and verdict > stop)
            else:
                stops.append(stop or math.inf)
    stopped, seeds = rate(np.isfinite(stops)), np.mean(np.minimum(stops, 32))
    print(f"\nno effect: {stopped:.0%} stopped, {seeds:.1f} seeds", end="; ")
    print(f"0.75 SD: {rate(decided):.0%} decided, {rate(lost):.1%} lost by stopping")
    assert stopped > 0.9 and seeds < 24 and rate(decided) > 0.9 and rate(lost) < 0.03


@pytest.mark.slow
def test_replication_on_new_seeds_and_images_agrees_with_the_promise():
    rng, promised, came_out = np.random.default_rng(11), [], []
    for _ in range(1500):
        effect = rng.uniform(-0.06, 0.06)
        cell = dict(arms=2, effect=effect)
        first, again = (np.subtract(*bits(rng, 8, 500, 0.85, 0.8, **cell).astype(np.int8)[::-1]) for _ in range(2))
        (mean, v), (new_mean, new_v) = paired_variance(first), paired_variance(again)
        if below(two_part_p(mean, v)) and not below(two_part_p(mean, v), 0.002):
            promised.append(replication(mean, v))
            came_out.append(below(two_part_p(new_mean, new_v)) and mean * new_mean > 0)
    print(f"\npromised {np.mean(promised):.0%}, came out again {rate(came_out):.0%} of {len(promised)}")
    assert len(promised) > 100 and rate(came_out) == pytest.approx(np.mean(promised), abs=0.1)


# Real training

ROOT = Path(os.environ.get("SMALLVIT_DATA") or Path(__file__).parents[2] / "shared" / "data")
needs_mnist = pytest.mark.skipif(not (ROOT / "MNIST" / "raw").is_dir(), reason=f"needs MNIST and there is none in {ROOT}")
REPETITIONS, SEEDS, LABELS, POOL, TEST = 40, 6, 100, 1200, 300
RECIPE = '''"""Do ViTs learn more from the left half of a digit than from the right half?"""

from functools import partial

from smallvit import PatchEmbed, Run, ViT, ablate


class HalfPatches(PatchEmbed):
    """Patches of the left half of an image, or of the left half of its mirror image."""

    def __init__(self, image, channels, dim, *, patch, mirror=False):
        super().__init__(image, channels, dim, patch=patch)
        self.mirror = mirror

    def grid(self, image):
        return super().grid((image[0], image[1] // 2))

    def forward(self, x):
        x = x.flip(-1) if self.mirror else x
        return self.proj(x[..., : x.shape[-1] // 2]).flatten(2).transpose(1, 2)


def half_vit(mirror):
    return partial(ViT, tokenizer=partial(HalfPatches, patch=7, mirror=mirror), dim=32, depth=2, heads=2)


LEFT = Run(model=half_vit(False), val=0, steps=100, batch=32, lr=3e-3)
RUNS = ablate({"left": LEFT, "right": LEFT.vary(model=half_vit(True))}, labels=[100], seeds=range(6))
'''


def mirrored_digits() -> tuple[np.ndarray, np.ndarray]:
    """All 70,000 digits of MNIST with their labels, in a random order. Every digit is mirrored at random, so the left half and
    the mirrored right half are drawn from the same distribution.
    """
    data, rng = mnist(), np.random.default_rng(12)
    parts, order = (data.train, data.test.open()), rng.permutation(70_000)
    labels = np.concatenate([part.labels.numpy() for part in parts])[order]
    pixels = np.concatenate([part.images.numpy() for part in parts])[order].reshape(-1, 28, 28)
    return np.where(rng.random((70_000, 1, 1)) < 0.5, pixels, pixels[..., ::-1]), labels


@pytest.fixture(scope="module")
def halves() -> tuple[list[np.ndarray], np.ndarray]:
    """The left and the mirrored right halves of all digits, reduced to 14 x 7 pixels in [0, 1], and one-hot labels."""
    pixels, labels = mirrored_digits()
    small = pixels.reshape(-1, 14, 2, 14, 2).mean((2, 4)) / 255
    return [side[..., :7].reshape(-1, 98) for side in (small, small[..., ::-1])], np.eye(10)[labels]


def learn(train, targets, test, weights) -> np.ndarray:
    """The classes that ridge regression on random features predicts for test images."""
    hidden, new = np.maximum(train @ weights, 0), np.maximum(test @ weights, 0)
    return (new @ np.linalg.solve(hidden.T @ hidden + 0.1 * np.eye(weights.shape[1]), hidden.T @ targets)).argmax(1)


@needs_mnist
@pytest.mark.slow
@pytest.mark.parametrize("drawn", [100, 200])
def test_seeds_that_draw_from_one_pool(halves, drawn):
    """8 seeds draw 100 or 200 of 300 labelled images; both arms are equal."""
    (sides, targets), rng = halves, np.random.default_rng(13)
    found = []
    for _ in range(200):
        images = rng.choice(len(targets), 300 + 2000, replace=False)
        pool, test = images[:300], images[300:]
        answers = targets[test].argmax(1)
        d = []
        for _ in range(8):
            train, weights = rng.choice(pool, drawn, replace=False), rng.standard_normal((98, 150)) / 5
            left, right = (learn(side[train], targets[train], side[test], weights) == answers for side in sides)
            d.append(left.astype(int) - right)
        found.append(paired_variance(np.array(d)))
    overlap = drawn / (300 - drawn)
    plain, without = rate([below(seeds_p(*m)) for m in found]), rate([below(two_part_p(*m)) for m in found])
    corrected = rate([below(two_part_p(*m, overlap=overlap)) for m in found])
    print(f"\n{drawn} of 300: two-part {corrected:.1%}, without overlap {without:.1%}, paired t {plain:.1%}")
    assert corrected <= 0.04 < without < plain


@needs_mnist
@pytest.mark.slow
def test_pooled_folds(halves):
    """6 passes of cross-validation with 5 folds over 300 images; both arms are equal."""
    (sides, targets), rng = halves, np.random.default_rng(14)
    found = []
    for _ in range(300):
        images = rng.choice(len(targets), 300, replace=False)
        d = np.zeros((6, 300))
        for one_pass in d:
            for test in np.split(rng.permutation(300), 5):
                train, test_images = np.delete(images, test), images[test]
                answers, weights = targets[test_images].argmax(1), rng.standard_normal((98, 150)) / 5
                left, right = (learn(side[train], targets[train], side[test_images], weights) == answers for side in sides)
                one_pass[test] = left.astype(int) - right
        found.append(paired_variance(d))
    plain, without = rate([below(seeds_p(*m)) for m in found]), rate([below(two_part_p(*m)) for m in found])
    corrected = rate([below(two_part_p(mean, of_folds(v))) for mean, v in found])
    print(f"\n5 folds: two-part with factor 1.6 {corrected:.1%}, with factor 1 {without:.1%}, paired t {plain:.1%}")
    assert corrected <= 0.06 and corrected <= without < plain


def write_mirrored_digits(folder) -> list[Path]:
    """Write a file of arrays for each repetition, with digits that no other repetition has."""
    (pixels, labels), paths = mirrored_digits(), []
    for start in range(0, REPETITIONS * (POOL + TEST), POOL + TEST):
        train, test = slice(start, start + POOL), slice(start + POOL, start + POOL + TEST)
        splits = {"train_images": pixels[train], "train_labels": labels[train]}
        splits |= {"test_images": pixels[test], "test_labels": labels[test]}
        paths.append(folder / f"{start}.npz")
        np.savez(paths[-1], **splits)
    return paths


@needs_mnist
@pytest.mark.long
def test_equal_arms_of_real_training(tmp_path):
    """Small ViTs see the left or the right half of digits. Each repetition has its own images, of which each seed draws 100
    labels, so the two-part test corrects for training images that seeds share.
    """
    (tmp_path / "halves.py").write_text(RECIPE)
    entries = load_recipe(tmp_path / "halves.py").RUNS
    found, without_overlap = [], []
    for path in write_mirrored_digits(tmp_path):
        records = []
        for arm in ("left", "right"):
            own = [entry for entry in entries if entry.arm == arm]
            assert [(entry.run.labels, entry.run.seed) for entry in own] == [(LABELS, seed) for seed in range(SEEDS)]
            runs = [entry.run.vary(data=partial(arrays, path=str(path))) for entry in own]
            folders = [tmp_path / path.stem / f"{arm}-{seed}" for seed in range(SEEDS)]
            tags = [Tags("halves", arm, entry.role, entry.baseline) for entry in own]
            records += fit_stacked(runs, folders, tags=tags)
        row = next(row for row in compare(records).rows if row.arm == "right")
        found.append(row)
        assert row.verdict in ("better", "worse", "inconclusive") and not row.difference.bound
        assert LABELS / POOL < row.difference.overlap < 2 * LABELS / POOL
        without_overlap.append(below(two_part_p(row.difference.mean, row.difference.variance)))
    wrong = sum(row.verdict != "inconclusive" for row in found)
    seeds_only = sum(below(row.difference.p_seeds) for row in found)
    differences = [row.difference.mean for row in found]
    print(f"\nfalse verdicts in {len(found)} repetitions: {wrong}; without overlap {sum(without_overlap)}", end="; ")
    print(f"paired t-test {seeds_only}; accuracy {np.mean([row.mean for row in found]):.1%}", end="; ")
    print(f"difference {np.mean(differences):+.2%}, SD {np.std(differences, ddof=1):.2%}")
    assert len(found) == REPETITIONS
    assert stats.binomtest(wrong, REPETITIONS, 0.05, alternative="greater").pvalue > 0.01
    assert stats.ttest_1samp(differences, 0).pvalue > 0.001, "the arms are equal by construction"
