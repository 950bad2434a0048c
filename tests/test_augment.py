import dataclasses
from importlib import import_module
from math import cos, exp, log, radians, sin, tan
from pkgutil import iter_modules

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import beta, kstest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from smallvit import augment
from smallvit.augment import Batch, CutMix, Erase, Flip, Jitter, Mixup, Noise, SmoothLabels, Warp, digits, mix, photos

FILES = [import_module(f"smallvit.augment.{file.name}") for file in iter_modules(augment.__path__)]
CLASSES = {thing for file in FILES for thing in vars(file).values() if dataclasses.is_dataclass(thing)}
OFF = [
    Warp(),
    Flip(probability=0),
    Erase(probability=0),
    Mixup(probability=0),
    CutMix(probability=0),
    SmoothLabels(amount=0),
    Noise(std=0),
    Jitter(),
]
ON = [
    Warp(rotate=15, scale=0.15, shear=12, shift=0.07, elastic=0.04),
    Flip(),
    Erase(probability=0.9),
    Mixup(probability=0.9),
    CutMix(probability=0.9),
    SmoothLabels(),
    Noise(),
    Jitter(brightness=0.3, contrast=0.3),
]
OTHER = {
    Warp: dict(rotate=25, scale=0.3, shear=5, shift=0.2, elastic=0.1, smooth=0.3, fill="edge"),
    Flip: dict(probability=0.9),
    Erase: dict(area=(0.3, 0.5), probability=0.1, aspect=1),
    Mixup: dict(alpha=5, probability=0.1),
    CutMix: dict(alpha=5, probability=0.1),
    SmoothLabels: dict(amount=0.3),
    Noise: dict(std=0.2),
    Jitter: dict(brightness=0.9, contrast=0.9, saturation=0.9),
}
named = pytest.mark.parametrize("step", ON, ids=lambda step: type(step).__name__)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(b=8, c=1, h=12, w=12, classes=10):
    targets = F.one_hot(torch.arange(b) % classes, classes).float()
    return Batch(torch.rand(b, c, h, w, generator=seeded(99)), targets)


def numbered(b, h=10, w=14):
    """Image i is filled with i/b and has class i: pixels and targets tell where they came from."""
    return Batch((torch.arange(b) / b).reshape(b, 1, 1, 1).expand(b, 1, h, w).contiguous(), torch.eye(b))


# The contract, for every class


def test_every_class_of_every_file_is_public_and_held_to_the_contract():
    public = {thing for name in augment.__all__ if dataclasses.is_dataclass(thing := getattr(augment, name))}
    assert len(CLASSES) == len(ON) == 8
    assert CLASSES == public == {type(step) for step in ON} == {type(step) for step in OFF} == set(OTHER)


@pytest.mark.parametrize("step", OFF, ids=lambda step: type(step).__name__)
def test_off_returns_the_very_batch_and_draws_nothing(step):
    given, generator = batch(), seeded()
    before = generator.get_state()
    assert step(given, generator) is given
    assert torch.equal(generator.get_state(), before)


@named
def test_all_randomness_is_the_generators(step):
    state = torch.get_rng_state()
    first, again = step(batch(), seeded(1)), step(batch(), seeded(1))
    other = step(batch(), seeded(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.images, again.images) and torch.equal(first.targets, again.targets)
    same = torch.equal(first.images, other.images) and torch.equal(first.targets, other.targets)
    assert same == isinstance(step, SmoothLabels)


@named
@pytest.mark.parametrize("shape", [(8, 1, 12, 12), (1, 1, 8, 8), (7, 3, 9, 14), (5, 4, 16, 5)], ids=str)
def test_any_shape_stays_a_batch_of_images_and_distributions(step, shape):
    given = batch(*shape)
    kept = given.images.clone(), given.targets.clone()
    images, targets = step(given, seeded())
    assert images.shape == shape and targets.shape == given.targets.shape
    assert images.dtype == targets.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(shape[0]))
    assert torch.equal(given.images, kept[0]) and torch.equal(given.targets, kept[1]), "the batch given was changed"


@named
def test_each_image_has_its_own_draw(step):
    b = 32
    alike = batch(1).images.expand(b, -1, -1, -1).contiguous()
    if isinstance(step, SmoothLabels):
        pytest.skip("draws nothing")
    if isinstance(step, Mixup | CutMix):
        outcomes = step(numbered(b), seeded()).targets.diagonal()
    else:
        outcomes = step(Batch(alike, torch.eye(b)), seeded()).images.flatten(1)
    assert len(outcomes.unique(dim=0)) >= (2 if isinstance(step, Flip) else b // 2)


@named
def test_every_argument_matters(step):
    given = batch(16, c=3)
    for field in dataclasses.fields(step):
        if field.name == "force":
            continue
        changed = dataclasses.replace(step, **{field.name: OTHER[type(step)][field.name]})
        before, after = step(given, seeded()), changed(given, seeded())
        assert not all(torch.equal(*pair) for pair in zip(before, after)), field.name


@named
def test_a_step_is_a_plain_value(step):
    again = type(step)(**dataclasses.asdict(step))
    assert again == step and hash(again) == hash(step) and again is not step
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.force = True
    with pytest.raises(TypeError):
        type(step)(0.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@named
def test_a_gpu_sees_the_same_pixels(step):
    given = batch(16, c=3)
    here, there = step(given, seeded()), step(Batch(*(x.cuda() for x in given)), seeded())
    for expected, got in zip(here, there):
        torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Warp(rotate=-1), r"Warp\(rotate=-1\): expected a number from 0 to 180"),
        (lambda: Warp(shift=2), r"Warp\(shift=2\): expected a number from 0 to 1"),
        (lambda: Warp(scale="big"), r"Warp\(scale='big'\): expected a number"),
        (lambda: Warp(elastic=float("nan")), r"Warp\(elastic=nan\)"),
        (lambda: Warp(smooth=0), r"Warp\(smooth=0\)"),
        (lambda: Warp(fill="white"), r"Warp\(fill='white'\): expected \"black\" or \"edge\""),
        (lambda: Flip(probability=1.5), r"Flip\(probability=1.5\)"),
        (lambda: Erase(area=(0.5, 0.1)), r"Erase\(area=\(0.5, 0.1\)\): expected \(low, high\)"),
        (lambda: Erase(area=0.3), r"Erase\(area=0.3\): expected \(low, high\)"),
        (lambda: Erase(aspect=0.5), r"Erase\(aspect=0.5\)"),
        (lambda: Mixup(alpha=0), r"Mixup\(alpha=0\)"),
        (lambda: CutMix(probability=-0.1), r"CutMix\(probability=-0.1\)"),
        (lambda: SmoothLabels(amount=2), r"SmoothLabels\(amount=2\)"),
        (lambda: Noise(std=-1), r"Noise\(std=-1\)"),
        (lambda: Jitter(contrast=3), r"Jitter\(contrast=3\)"),
        (lambda: digits(3), r"digits\(strength=3\): expected 0 to 1.5"),
        (lambda: photos(-1), r"photos\(strength=-1\): expected 0 to 2"),
    ],
)
def test_values_out_of_range_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, 8, 8), torch.zeros(3, 1, 8, 8)],
    ids=["bytes", "no channels", "another count"],
)
def test_what_is_no_batch_is_refused(images):
    with pytest.raises(ValueError, match="expected float images b c h w in"):
        augment.apply(digits(), Batch(images, torch.ones(2, 1)), seeded())


# Warp


@pytest.mark.parametrize(("h", "w"), [(12, 12), (9, 15), (16, 7)])
@pytest.mark.parametrize("seed", range(4))
def test_warp_is_the_affine_map_it_states(h, w, seed):
    warp = Warp(rotate=40, scale=0.3, shear=20, shift=0.2, force=True)
    given = batch(1, 2, h, w)
    u = [2 * x - 1 for x in torch.rand(6, generator=seeded(seed)).tolist()]
    angle, lean, side = radians(40 * u[0]), radians(20 * u[1]), min(h, w)
    turn = torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]])
    slant = torch.tensor([[1, tan(lean)], [0, 1]])
    zoom = torch.diag(torch.tensor([exp(log(1.3) * u[2]), exp(log(1.3) * u[3])]))
    matrix, shift = turn @ slant @ zoom, 0.2 * side * torch.tensor(u[4:])
    pixels = torch.diag(torch.tensor([w / 2, h / 2]))  # from grid_sample's units
    theta = torch.cat([pixels.inverse() @ matrix @ pixels, -(pixels.inverse() @ matrix @ shift)[:, None]], dim=1)
    grid = F.affine_grid(theta[None], given.images.shape, align_corners=False)
    expected = F.grid_sample(given.images, grid, align_corners=False)
    torch.testing.assert_close(warp(given, seeded(seed)).images, expected, atol=1e-5, rtol=0)


def test_warp_shifts_an_impulse_by_up_to_the_stated_part_of_the_shorter_side():
    impulse = torch.zeros(500, 1, 21, 31)
    impulse[:, :, 10, 15] = 1
    images = Warp(shift=0.2)(Batch(impulse, torch.ones(500, 1)), seeded()).images[:, 0]
    x = (images.sum(dim=1) * torch.arange(31)).sum(dim=1) - 15
    y = (images.sum(dim=2) * torch.arange(21)).sum(dim=1) - 10
    for moved in (x, y):
        assert moved.abs().max() <= 0.2 * 21 + 1e-4 and moved.abs().max() > 0.19 * 21
        assert moved.mean().abs() < 0.3


def test_elastic_displacement_has_the_stated_size_and_smoothness_at_every_pixel():
    h, w, side, smooth = 12, 18, 12, 0.25
    field = Warp(elastic=0.05, smooth=smooth).crumple(torch.zeros(6000, 2, h, w), seeded())
    pixels = field * torch.tensor([w / 2, h / 2])[:, None, None]
    rms = pixels.square().mean(dim=0).sqrt()
    torch.testing.assert_close(rms, torch.full((2, h, w), 0.05 * side), rtol=0.05, atol=0)
    assert pixels.mean(dim=0).abs().max() < 0.05 * 0.05 * side * 2
    apart = 3  # pixels: one standard deviation of the smoothing, where two smoothed fields correlate by exp(-1/4)
    together = (pixels[..., apart:] * pixels[..., :-apart]).mean(dim=0) / (rms[..., apart:] * rms[..., :-apart])
    assert apart == smooth * side
    assert together.mean().item() == pytest.approx(exp(-1 / 4), abs=0.03)


def test_outside_the_image_is_black_or_the_edge():
    white = Batch(torch.ones(64, 1, 16, 16), torch.ones(64, 1))
    black = Warp(shift=0.5)(white, seeded()).images
    assert (black == 0).flatten(1).any(dim=1).float().mean() > 0.9
    assert (Warp(shift=0.5, fill="edge")(white, seeded()).images == 1).all()
    nothing = Batch(torch.zeros(4, 1, 16, 16), torch.ones(4, 1))
    assert (augment.apply(digits(), nothing, seeded()).images == 0).all()


@pytest.mark.parametrize(("elastic", "tolerance"), [(0.0, 0.0), (0.04, 0.02)])
def test_coarse_matrix_products_hardly_move_a_pixel(elastic, tolerance):
    warp, given = Warp(rotate=15, scale=0.15, shear=12, shift=0.07, elastic=elastic), batch(64, h=28, w=28)
    exact, precision = warp(given, seeded()).images, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert (warp(given, seeded()).images - exact).abs().max() <= tolerance
    finally:
        torch.set_float32_matmul_precision(precision)


# Erase, Mixup, CutMix


def test_erase_blacks_out_one_rectangle_of_the_stated_size():
    b, h, w = 400, 20, 30
    images = Erase(area=(0.1, 0.3), probability=0.5, aspect=2)(Batch(torch.ones(b, 2, h, w), torch.eye(b)), seeded()).images
    gone = (images == 0).all(dim=1)
    assert torch.equal(images == 0, gone[:, None].expand(-1, 2, -1, -1)) and set(images.unique().tolist()) == {0, 1}
    height, width = gone.any(dim=2).sum(dim=1), gone.any(dim=1).sum(dim=1)
    assert torch.equal(gone.sum(dim=(1, 2)), height * width), "not a rectangle"
    erased = height > 0
    assert erased.float().mean().item() == pytest.approx(0.5, abs=0.1)
    area, aspect = (height * width / (h * w))[erased], (height / h / (width / w))[erased]
    assert 0.08 < area.min() < 0.14 and 0.26 < area.max() < 0.33
    assert 0.4 < aspect.min() < 0.6 and 1.7 < aspect.max() < 2.5
    assert gone.any(dim=0).all(), "some pixels are never erased"


def test_erase_can_take_nearly_everything_whatever_its_aspect():
    images = Erase(area=(0.95, 0.95), probability=1, aspect=50)(batch(50, h=40, w=40), seeded()).images
    left = (images > 0).flatten(1).float().mean(dim=1)
    assert left.max() < 0.1


@pytest.mark.parametrize("b", [1, 2, 33])
def test_mixup_mixes_pixels_as_it_mixes_targets(b):
    given = Batch(batch(b, 3).images, torch.eye(b))
    images, targets = Mixup(alpha=1)(given, seeded())
    torch.testing.assert_close(images, torch.einsum("bk,kchw->bchw", targets, given.images))
    assert (targets > 0).sum(dim=1).max() == min(b, 2)


@pytest.mark.parametrize("b", [1, 2, 33])
def test_cutmix_targets_are_the_pixel_areas_exactly(b):
    given = numbered(b)
    images, targets = CutMix()(given, seeded())
    areas = torch.stack([(images == given.images[k]).flatten(1).float().mean(dim=1) for k in range(b)], dim=1)
    torch.testing.assert_close(targets, areas, atol=1e-6, rtol=0)
    assert (targets > 0).sum(dim=1).max() == min(b, 2)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_the_proportion_kept_is_beta_distributed(alpha):
    _, kept = mix._partners(Mixup(alpha=alpha), torch.empty(4000, 1, 1, 1), seeded())
    assert kstest(kept.double().numpy(), beta(alpha, alpha).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [0.001, 0.01, 1000])
def test_extreme_alphas_give_proportions(alpha):
    _, targets = Mixup(alpha=alpha)(numbered(1000), seeded())
    assert targets.isfinite().all() and targets.min() >= 0 and targets.max() <= 1


@pytest.mark.parametrize("step", [Mixup(probability=0.3), CutMix(probability=0.3)])
def test_probability_is_the_share_of_images_mixed(step):
    targets = step(numbered(2000, 40, 40), seeded()).targets
    assert (targets.diagonal() < 1).float().mean().item() == pytest.approx(0.3, abs=0.04)


# The small ones


def test_flip_mirrors_left_and_right_or_leaves_alone():
    given = batch(100, 3)
    images = Flip()(given, seeded()).images
    mirrored = (images == given.images.flip(-1)).flatten(1).all(dim=1)
    assert torch.equal(mirrored, ~(images == given.images).flatten(1).all(dim=1))
    assert 30 < mirrored.sum() < 70


def test_smooth_labels_share_the_amount_among_all_classes():
    targets = SmoothLabels(amount=0.2)(batch(3, classes=4), seeded()).targets
    torch.testing.assert_close(targets[0], torch.tensor([0.85, 0.05, 0.05, 0.05]))


def test_noise_has_the_stated_deviation():
    grey = Batch(torch.full((20, 1, 28, 28), 0.5), torch.ones(20, 1))
    noise = Noise(std=0.1)(grey, seeded()).images - 0.5
    assert noise.std().item() == pytest.approx(0.1, rel=0.03) and noise.mean().abs() < 0.005


def test_jitter_scales_light_about_black_contrast_about_the_mean_and_saturation_about_grey():
    b = 300
    dim = Batch(0.4 * batch(b, 3).images + 0.1, torch.ones(b, 1))
    factor = Jitter(brightness=0.5)(dim, seeded()).images / dim.images
    assert factor.flatten(1).std(dim=1).max() < 1e-5 and 0.5 <= factor.min() < 0.55 and 1.45 < factor.max() < 1.5001
    contrast = Jitter(contrast=0.5)(dim, seeded()).images
    torch.testing.assert_close(contrast.mean(dim=(1, 2, 3)), dim.images.mean(dim=(1, 2, 3)))
    grey = Batch(dim.images[:, :1].expand(-1, 3, -1, -1), dim.targets)
    torch.testing.assert_close(Jitter(saturation=1)(grey, seeded()).images, grey.images)


@pytest.mark.parametrize("channels", [1, 4])
def test_saturation_needs_colours(channels):
    with pytest.raises(ValueError, match=f"needs 3 channels, got {channels}: set saturation=0"):
        Jitter(saturation=0.1)(batch(c=channels), seeded())


# Digits


def test_what_is_unsafe_for_digits_says_why():
    assert "mirror" in Flip().unsafe_for_digits
    assert Flip(force=True).unsafe_for_digits is None
    assert "30 degrees" in Warp(rotate=31).unsafe_for_digits
    assert Warp(rotate=30).unsafe_for_digits is None and Warp(rotate=90, force=True).unsafe_for_digits is None
    assert [type(step) for step in ON if step.unsafe_for_digits] == [Flip]


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, 1.5])
def test_the_digits_preset_is_safe(strength):
    assert [step.unsafe_for_digits for step in digits(strength)] == [None] * len(digits(strength))


@pytest.mark.parametrize("preset", [digits, photos])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_presets_are_off_at_zero_and_grow_with_strength(preset, channels):
    given = batch(64, channels)
    assert augment.apply(preset(0), given, seeded()) is given
    change = [(augment.apply(preset(s), given, seeded()).images - given.images).square().mean() for s in (0.25, 1)]
    assert 0 < change[0] < change[1]


def test_augmented_digits_are_still_read_right_and_mirrored_ones_are_not():
    data, labels = load_digits(return_X_y=True)
    images = torch.tensor(data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    reader = LogisticRegression(max_iter=300).fit(images[:900].flatten(1), labels[:900])

    def accuracy(steps):
        seen = augment.apply(steps, Batch(images[900:], torch.ones(897, 1)), seeded()).images
        return reader.score(seen.flatten(1), labels[900:])

    assert accuracy(()) > 0.9
    assert accuracy(digits(0.5)) > 0.8
    assert accuracy(digits()) > 0.6
    assert accuracy([Flip(probability=1, force=True)]) < 0.5
