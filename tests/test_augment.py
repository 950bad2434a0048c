import dataclasses
from importlib import import_module
from math import cos, exp, log, pi, radians, sin, tan
from pkgutil import iter_modules

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import beta, kstest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

from smallvit import augment
from smallvit.augment import (
    Batch,
    Blur,
    CutMix,
    Flip,
    Gray,
    Jitter,
    Mixup,
    MultiCrop,
    Noise,
    RandomErasing,
    SmoothLabels,
    Solarize,
    Warp,
    digits,
    mix,
    photos,
)

FILES = [import_module(f"smallvit.augment.{file.name}") for file in iter_modules(augment.__path__)]
# MultiCrop is no plain value but has steps, and gives no images but views: tests/test_views.py
CLASSES = {thing for file in FILES for thing in vars(file).values() if dataclasses.is_dataclass(thing)} - {MultiCrop}
OFF = [
    Warp(),
    Flip(probability=0),
    RandomErasing(probability=0),
    Mixup(probability=0),
    CutMix(probability=0),
    SmoothLabels(amount=0),
    Noise(std=0),
    Jitter(),
    Jitter(brightness=0.5, hue=0.5, probability=0),
    Gray(probability=0),
    Solarize(probability=0),
    Blur(probability=0),
    Blur(sigma=(0, 0)),
]
ON = [
    Warp(rotate=15, scale=0.15, shear=12, shift=0.07, elastic=0.04, crop=(0.5, 0.9)),
    Flip(),
    RandomErasing(probability=0.9),
    Mixup(probability=0.9),
    CutMix(probability=0.9),
    SmoothLabels(),
    Noise(),
    Jitter(brightness=0.3, contrast=0.3),
    Gray(),
    Solarize(),
    Blur(probability=0.9),
]
OTHER = {
    Warp: dict(
        rotate=25,
        scale=0.3,
        shear=5,
        shift=0.2,
        elastic=0.1,
        smooth=0.3,
        crop=(0.3, 0.4),
        aspect=2,
        aim="ink",
        size=9,
        fill="edge",
    ),
    Flip: dict(probability=0.9),
    RandomErasing: dict(area=(0.3, 0.5), probability=0.1, aspect=1),
    Mixup: dict(alpha=5, probability=0.1),
    CutMix: dict(alpha=5, probability=0.1),
    SmoothLabels: dict(amount=0.3),
    Noise: dict(std=0.2),
    Jitter: dict(brightness=0.9, contrast=0.9, saturation=0.9, hue=0.3, probability=0.3),
    Gray: dict(probability=0.8),
    Solarize: dict(threshold=0.2, probability=0.8),
    Blur: dict(sigma=(0.1, 0.2), probability=0.1),
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
    public = {thing for name in augment.__all__ if dataclasses.is_dataclass(thing := getattr(augment, name))} - {MultiCrop}
    assert len(CLASSES) == len(ON) == 11
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
    given = batch(c=3)
    first, again, other = step(given, seeded(1)), step(given, seeded(1)), step(given, seeded(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.images, again.images) and torch.equal(first.targets, again.targets)
    same = torch.equal(first.images, other.images) and torch.equal(first.targets, other.targets)
    assert same == isinstance(step, SmoothLabels)


@named
@pytest.mark.parametrize("shape", [(8, 1, 12, 12), (1, 1, 8, 8), (7, 3, 9, 14), (5, 4, 16, 5)], ids=str)
def test_any_shape_stays_a_batch_of_images_and_distributions(step, shape):
    if isinstance(step, Gray) and shape[1] != 3:
        pytest.skip("needs colours")
    given = batch(*shape)
    kept = given.images.clone(), given.targets.clone()
    images, targets, *_ = step(given, seeded())
    assert images.shape == shape and targets.shape == given.targets.shape
    assert images.dtype == targets.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(shape[0]))
    assert torch.equal(given.images, kept[0]) and torch.equal(given.targets, kept[1]), "the batch given was changed"


@named
def test_each_image_has_its_own_draw(step):
    b = 32
    alike = batch(1, 3).images.expand(b, -1, -1, -1).contiguous()
    if isinstance(step, SmoothLabels):
        pytest.skip("draws nothing")
    if isinstance(step, Mixup | CutMix):
        outcomes = step(numbered(b), seeded()).targets.diagonal()
    else:
        outcomes = step(Batch(alike, torch.eye(b)), seeded()).images.flatten(1)
    assert len(outcomes.unique(dim=0)) >= (2 if isinstance(step, Flip | Gray | Solarize) else b // 2)


@named
def test_every_argument_matters(step):
    given = batch(16, c=3)
    for field in dataclasses.fields(step):
        if field.name == "force":
            continue
        changed = dataclasses.replace(step, **{field.name: OTHER[type(step)][field.name]})
        before, after = step(given, seeded()), changed(given, seeded())
        assert not all(torch.equal(*pair) for pair in zip(before[:2], after[:2])), field.name


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
    here, there = step(given, seeded()), step(Batch(*(x.cuda() for x in given[:2])), seeded())
    for expected, got in zip(here[:2], there[:2]):
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
        (lambda: RandomErasing(area=(0.5, 0.1)), r"RandomErasing\(area=\(0.5, 0.1\)\): expected \(low, high\)"),
        (lambda: RandomErasing(area=0.3), r"RandomErasing\(area=0.3\): expected \(low, high\)"),
        (lambda: RandomErasing(aspect=0.5), r"RandomErasing\(aspect=0.5\)"),
        (lambda: Mixup(alpha=0), r"Mixup\(alpha=0\)"),
        (lambda: CutMix(probability=-0.1), r"CutMix\(probability=-0.1\)"),
        (lambda: SmoothLabels(amount=2), r"SmoothLabels\(amount=2\)"),
        (lambda: Noise(std=-1), r"Noise\(std=-1\)"),
        (lambda: Warp(aim="up"), r"Warp\(aim='up'\): expected \"anywhere\" or \"ink\""),
        (lambda: Warp(crop=(0, 0.5)), r"Warp\(crop=\(0, 0.5\)\): expected \(low, high\), two numbers"),
        (lambda: Warp(size=(8, 0)), r"Warp\(size=\(8, 0\)\): expected a side in pixels, \(height, width\), or None"),
        (lambda: Jitter(contrast=3), r"Jitter\(contrast=3\)"),
        (lambda: Jitter(hue=0.6), r"Jitter\(hue=0.6\): expected a number from 0 to 0.5"),
        (lambda: Gray(probability=2), r"Gray\(probability=2\)"),
        (lambda: Solarize(threshold=128), r"Solarize\(threshold=128\): expected a number from 0 to 1"),
        (lambda: Blur(sigma=(0.1, 2.0)), r"Blur\(sigma=\(0.1, 2.0\)\): expected \(low, high\), two numbers from 0 to 0.5"),
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
    with pytest.raises(ValueError, match="expected float32 images b c h w in"):
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
    field = Warp(elastic=0.05, smooth=smooth).crumple(
        torch.zeros(6000, 2, h, w), torch.empty(6000, 1, h, w), torch.ones(2, 6000), seeded()
    )
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


@pytest.mark.parametrize(
    ("step", "tolerance"),
    [
        (Warp(rotate=15, scale=0.15, shear=12, shift=0.07, crop=(0.5, 1.0)), 0.0),
        (Warp(rotate=15, scale=0.15, shear=12, shift=0.07, elastic=0.04), 0.02),
        (Jitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1), 0.02),
        (Blur(probability=1), 0.02),
    ],
    ids=["affine", "elastic", "hue", "blur"],
)
def test_coarse_matrix_products_hardly_move_a_pixel(step, tolerance):
    given = batch(64, c=3, h=28, w=28)
    exact, precision = step(given, seeded()).images, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert (step(given, seeded()).images - exact).abs().max() <= tolerance
    finally:
        torch.set_float32_matmul_precision(precision)


# RandomErasing, Mixup, CutMix


def test_erase_blacks_out_one_rectangle_of_the_stated_size():
    b, h, w = 400, 20, 30
    images = RandomErasing(area=(0.1, 0.3), probability=0.5, aspect=2)(Batch(torch.ones(b, 2, h, w), torch.eye(b)), seeded()).images
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
    images = RandomErasing(area=(0.95, 0.95), probability=1, aspect=50)(batch(50, h=40, w=40), seeded()).images
    left = (images > 0).flatten(1).float().mean(dim=1)
    assert left.max() < 0.1


@pytest.mark.parametrize("b", [1, 2, 33])
def test_mixup_mixes_pixels_as_it_mixes_targets(b):
    given = Batch(batch(b, 3).images, torch.eye(b))
    images, targets, *_ = Mixup(alpha=1)(given, seeded())
    torch.testing.assert_close(images, torch.einsum("bk,kchw->bchw", targets, given.images))
    assert (targets > 0).sum(dim=1).max() == min(b, 2)


@pytest.mark.parametrize("b", [1, 2, 33])
def test_cutmix_targets_are_the_pixel_areas_exactly(b):
    given = numbered(b)
    images, targets, *_ = CutMix()(given, seeded())
    areas = torch.stack([(images == given.images[k]).flatten(1).float().mean(dim=1) for k in range(b)], dim=1)
    torch.testing.assert_close(targets, areas, atol=1e-6, rtol=0)
    assert (targets > 0).sum(dim=1).max() == min(b, 2)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_the_proportion_kept_is_beta_distributed(alpha):
    _, kept = mix._partners(Mixup(alpha=alpha), torch.empty(4000, 1, 1, 1), seeded())
    assert kstest(kept.double().numpy(), beta(alpha, alpha).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [0.001, 0.01, 1000])
def test_extreme_alphas_give_proportions(alpha):
    targets = Mixup(alpha=alpha)(numbered(1000), seeded()).targets
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
def test_colours_need_three_channels(channels):
    for name in ("saturation", "hue"):
        with pytest.raises(ValueError, match=f"needs 3 channels, got {channels}: set {name}=0"):
            Jitter(**{name: 0.1})(batch(c=channels), seeded())
    with pytest.raises(ValueError, match=rf"Gray\(probability=0.2\) needs 3 channels, got {channels}: leave it out"):
        Gray()(batch(c=channels), seeded())


# Light, colour, lens


def luma(images):
    return (images * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1)


def coloured(b=64, h=12, w=14):
    """Colours that no jitter of up to 0.2 drives out of [0, 1]."""
    return Batch(0.3 + 0.3 * torch.rand(b, 3, h, w, generator=seeded(5)), torch.ones(b, 1))


@pytest.mark.parametrize("knobs", [dict(brightness=0.4, contrast=0.4), dict(contrast=0.9, saturation=1)], ids=str)
def test_jitter_without_hue_is_its_three_steps_to_the_last_bit(knobs):
    given = batch(40, 3)
    draws = 2 * torch.rand(3, 40, generator=seeded(4)) - 1
    names = ("brightness", "contrast", "saturation")
    light, contrast, saturation = ((1 + knobs.get(name, 0) * draw)[:, None, None, None] for name, draw in zip(names, draws))
    images = given.images * light
    images = torch.lerp(images.mean(dim=(1, 2, 3), keepdim=True), images, contrast)
    r, g, b = images.split(1, dim=1)
    images = torch.lerp(0.299 * r + 0.587 * g + 0.114 * b, images, saturation)
    generator, drawn = seeded(4), seeded(4)
    assert torch.equal(Jitter(**knobs)(given, generator).images, images.clamp(0, 1))
    torch.rand(3, 40, generator=drawn)
    assert torch.equal(generator.get_state(), drawn.get_state()), "more is drawn than before there was hue"


def test_with_hue_the_other_three_are_what_they_were():
    knobs, given = dict(brightness=0.4, contrast=0.9, saturation=0.7), batch(40, 3)
    without, hardly = Jitter(**knobs)(given, seeded()).images, Jitter(**knobs, hue=1e-7)(given, seeded()).images
    torch.testing.assert_close(hardly, without, atol=1e-5, rtol=0)


def test_hue_keeps_grey_and_luma_and_turns_red_through_green_and_blue():
    given = coloured()
    images = Jitter(hue=0.2)(given, seeded()).images
    assert (images - given.images).abs().flatten(1).amax(1).median() > 0.05
    torch.testing.assert_close(luma(images), luma(given.images), atol=1e-6, rtol=0)
    grey = given._replace(images=given.images[:, :1].repeat(1, 3, 1, 1))
    torch.testing.assert_close(Jitter(hue=0.5)(grey, seeded()).images, grey.images)
    red = torch.full((500, 3, 1, 1), 0.4)
    red[:, 0] = 0.6
    turn = 0.5 * (2 * torch.rand(4, 500, generator=seeded())[3] - 1)
    seen = Jitter(hue=0.5)(Batch(red, torch.ones(500, 1)), seeded()).images[:, :, 0, 0]
    for third in (0, 1, 2):
        near = ((turn - third / 3 + 0.5) % 1 - 0.5).abs() < 0.04
        assert near.sum() > 20 and (seen[near].argmax(dim=1) == third).all()


def test_hue_turns_as_far_as_torchvisions():
    from torchvision.transforms.functional import adjust_hue

    def angle(images):
        r, g, b = images.unbind(1)
        return torch.atan2(3**0.5 * (g - b), 2 * r - g - b) / (2 * pi)

    given = coloured(200, 1, 1)
    turn = 0.2 * (2 * torch.rand(4, 200, generator=seeded())[3] - 1)
    theirs = torch.stack([adjust_hue(image, by) for image, by in zip(given.images, turn.tolist())])
    ours = Jitter(hue=0.2)(given, seeded()).images
    apart = (angle(ours) - angle(theirs) + 0.5) % 1 - 0.5
    assert apart.abs().max() < 0.01, "HSV's hexagon and a circle are never further apart"
    assert (luma(theirs) - luma(given.images)).abs().max() > 0.01, "theirs keeps luma too: say so in Jitter"


@pytest.mark.parametrize("hue", [0, 0.1])
def test_jitter_leaves_the_others_alone_to_the_last_bit(hue):
    given = batch(1000, 3, 4, 4)
    images = Jitter(brightness=0.5, contrast=0.5, saturation=0.5, hue=hue, probability=0.3)(given, seeded()).images
    changed = (images != given.images).flatten(1).any(dim=1)
    assert changed.float().mean().item() == pytest.approx(0.3, abs=0.05)
    always = Jitter(brightness=0.5, contrast=0.5, saturation=0.5, hue=hue)(given, seeded()).images
    torch.testing.assert_close(images[changed], always[changed])


@pytest.mark.parametrize("step", [Gray(probability=0.3), Solarize(probability=0.3), Blur(sigma=(0.1, 0.3), probability=0.3)])
def test_some_images_are_changed_whatever_becomes_of_the_others(step):
    given = batch(1000, 3, 8, 9)
    images = step(given, seeded()).images
    changed = (images != given.images).flatten(1).any(dim=1)
    assert changed.float().mean().item() == pytest.approx(0.3, abs=0.05)
    everyone = dataclasses.replace(step, probability=1)(given, seeded()).images
    torch.testing.assert_close(images[changed], everyone[changed])


def test_gray_and_solarize_are_torchvisions():
    from torchvision.transforms.functional import rgb_to_grayscale, solarize

    given = batch(20, 3)
    expected = rgb_to_grayscale(given.images, num_output_channels=3)
    torch.testing.assert_close(Gray(probability=1)(given, seeded()).images, expected, atol=1e-3, rtol=0)
    steps = given._replace(images=(8 * given.images).round() / 8)  # some are just as bright as the threshold
    for threshold in (0, 0.375, 0.5, 1):
        images = Solarize(threshold=threshold, probability=1)(steps, seeded()).images
        assert torch.equal(images, solarize(steps.images, threshold))


@pytest.mark.parametrize(("h", "w"), [(12, 12), (9, 17)])
def test_blur_is_the_gaussian_mean_of_the_pixels_that_there_are(h, w):
    given = batch(3, 2, h, w)
    sigmas = min(h, w) * (0.05 + 0.15 * torch.rand(3, generator=seeded(2)))
    expected = torch.zeros_like(given.images)
    for image, out, sigma in zip(given.images, expected, sigmas.tolist()):
        for y in range(h):
            for x in range(w):
                apart = (torch.arange(h)[:, None] - y) ** 2 + (torch.arange(w) - x) ** 2
                weights = torch.exp(-apart / (2 * sigma**2))
                out[:, y, x] = (image * weights).sum(dim=(1, 2)) / weights.sum()
    images = Blur(sigma=(0.05, 0.2), probability=1)(given, seeded(2)).images
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_blur_is_torchvisions_and_nearly_pils_away_from_the_border():
    from PIL import Image, ImageFilter
    from torchvision.transforms.functional import gaussian_blur, pil_to_tensor, to_pil_image

    image = (255 * torch.rand(3, 32, 40, generator=seeded())).round() / 255
    for radius in (0.1, 0.7, 2.0):  # pixels
        ours = Blur(sigma=(radius / 32, radius / 32), probability=1)(Batch(image[None], torch.ones(1, 1)), seeded()).images[0]
        torch.testing.assert_close(
            ours[:, 10:-10, 10:-10], gaussian_blur(image, 21, radius)[:, 10:-10, 10:-10], atol=1e-4, rtol=0
        )
        picture: Image.Image = to_pil_image(image).filter(ImageFilter.GaussianBlur(radius))
        assert (ours - pil_to_tensor(picture) / 255)[:, 10:-10, 10:-10].abs().mean() < 0.02
        white = Blur(sigma=(radius / 32, radius / 32), probability=1)(
            Batch(torch.ones(1, 1, 32, 40), torch.ones(1, 1)), seeded()
        )
        torch.testing.assert_close(white.images, torch.ones(1, 1, 32, 40))


def test_no_blur_and_nearly_none_are_the_same():
    given = batch(8)
    torch.testing.assert_close(Blur(sigma=(0, 1e-9), probability=1)(given, seeded()).images, given.images, atol=0, rtol=0)


BAD = [-1, float("nan"), float("inf"), "x", None, (), (1,), (0.2, 0.1), ("a", "b"), [0.1, 0.2], {}, object, 1e9]


@pytest.mark.parametrize("kind", sorted(CLASSES, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_no_value_is_refused_but_by_a_value_error(kind):
    for field in dataclasses.fields(kind):
        for bad in BAD if field.name != "force" else ():
            if (field.name, bad) != ("size", None):
                with pytest.raises(ValueError, match=rf"{kind.__name__}\({field.name}="):
                    kind(**{field.name: bad})


# Digits


def test_what_is_unsafe_for_digits_says_why():
    assert "mirror" in Flip().unsafe_for_digits
    assert Flip(force=True).unsafe_for_digits is None
    assert "30 degrees" in Warp(rotate=31).unsafe_for_digits
    assert Warp(rotate=30).unsafe_for_digits is None and Warp(rotate=90, force=True).unsafe_for_digits is None
    assert [type(step) for step in ON if step.unsafe_for_digits] == [Flip, Solarize]
    assert "ink" in Solarize().unsafe_for_digits and Solarize(force=True).unsafe_for_digits is None


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
