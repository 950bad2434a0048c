"""Transforms: the contract that all of them keep, each one against its paper or torchvision, and the presets."""

import dataclasses
from functools import partial
from importlib import import_module
from math import exp, pi
from pkgutil import iter_modules

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.ndimage import grey_dilation, grey_erosion
from scipy.stats import beta, kstest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from toys import default_dtype

from smallvit import augment

from smallvit.augment import Batch, Blur, CutMix, Flip, Gray, Jitter, Mixup, MultiCrop, Noise, RandomErasing  # isort: skip
from smallvit.augment import SmoothLabels, Solarize, StrokeWidth, Warp, digits, photos, strong_digits, strong_photos  # isort: skip
from smallvit.augment.batch import concatenate  # isort: skip

FILES = [import_module(f"smallvit.augment.{file.name}") for file in iter_modules(augment.__path__)]
# MultiCrop takes other transforms and makes views instead of images: see tests/test_multicrop.py
CLASSES = {value for file in FILES for value in vars(file).values() if dataclasses.is_dataclass(value)} - {MultiCrop}
OFF = [
    Warp(), Flip(probability=0), RandomErasing(probability=0), Mixup(probability=0), CutMix(probability=0), SmoothLabels(amount=0),
    Noise(std=0), Jitter(), Jitter(brightness=0.5, hue=0.5, probability=0), Gray(probability=0), Solarize(probability=0),
    Blur(probability=0), Blur(sigma=(0, 0)), StrokeWidth(width=0), StrokeWidth(probability=0),
]  # fmt: skip
ON = [
    Warp(rotate=15, scale=0.15, shear=12, shift=0.07, elastic=0.04, crop=(0.5, 0.9)), Flip(), RandomErasing(probability=0.9),
    Mixup(probability=0.9), CutMix(probability=0.9), SmoothLabels(), Noise(), Jitter(brightness=0.3, contrast=0.3), Gray(), Solarize(),
    Blur(probability=0.9), StrokeWidth(width=0.15, probability=0.9),
]  # fmt: skip
OTHER_VALUES = {
    Warp: dict(rotate=25, scale=0.3, shear=5, shift=0.2, elastic=0.1, smooth=0.3, crop=(0.3, 0.4), aspect=2, aim="ink", size=9, fill="edge"),
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
    StrokeWidth: dict(width=0.08, probability=0.1),
}  # fmt: skip


def class_name(transform):
    return type(transform).__name__


each_transform = pytest.mark.parametrize("transform", ON, ids=class_name)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_batch(b=8, c=1, h=12, w=12, classes=10):
    return Batch(torch.rand(b, c, h, w, generator=seeded(99)), F.one_hot(torch.arange(b) % classes, classes).float())


def numbered_batch(b, h=10, w=14):
    """Image i has all pixels i/b and class i, so that pixels and targets tell which image they come from."""
    return Batch((torch.arange(b) / b).reshape(b, 1, 1, 1).expand(b, 1, h, w).contiguous(), torch.eye(b))


# The contract of every transform


def test_every_public_class_is_tested_here():
    public = {value for name in augment.__all__ if dataclasses.is_dataclass(value := getattr(augment, name))} - {MultiCrop}
    assert len(CLASSES) == len(ON) == 12
    assert CLASSES == public == set(map(type, ON)) == set(map(type, OFF)) == set(OTHER_VALUES)


@pytest.mark.parametrize("transform", OFF, ids=class_name)
def test_off_setting_returns_the_same_batch_and_draws_nothing(transform):
    batch, generator = random_batch(), seeded()
    assert transform(batch, generator) is batch
    assert torch.equal(generator.get_state(), seeded().get_state())


@each_transform
def test_random_numbers_come_from_the_given_generator_only(transform):
    state, batch = torch.get_rng_state(), random_batch(c=3)
    first, again, other = (transform(batch, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.images, again.images) and torch.equal(first.targets, again.targets)
    equal = torch.equal(first.images, other.images) and torch.equal(first.targets, other.targets)
    assert equal == isinstance(transform, SmoothLabels)


@each_transform
@pytest.mark.parametrize("shape", [(8, 1, 12, 12), (1, 1, 8, 8), (7, 3, 9, 14), (5, 4, 16, 5)], ids=str)
def test_result_has_the_same_shape_with_pixels_in_0_1_and_targets_that_sum_to_1(transform, shape):
    if isinstance(transform, Gray) and shape[1] != 3:
        pytest.skip("needs 3 channels")
    batch = random_batch(*shape)
    copy = batch.images.clone(), batch.targets.clone()
    images, targets, *_ = transform(batch, seeded())
    assert images.shape == shape and targets.shape == batch.targets.shape
    assert images.dtype == targets.dtype == torch.float32
    assert images.min() >= 0 and images.max() <= 1
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(shape[0]))
    assert torch.equal(batch.images, copy[0]) and torch.equal(batch.targets, copy[1]), "the input was changed"


@each_transform
def test_bytes_are_refused_and_an_empty_batch_stays_empty(transform):
    bytes_ = Batch(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=f"{type(transform).__name__} got torch.uint8 images; expected float32"):
        transform(bytes_, torch.Generator())
    assert transform(Batch(torch.zeros(0, 3, 8, 8), torch.zeros(0, 4)), torch.Generator()).images.shape == (0, 3, 8, 8)


@each_transform
def test_each_image_has_its_own_random_parameters(transform):
    b = 32
    if isinstance(transform, SmoothLabels):
        pytest.skip("is not random")
    if isinstance(transform, Mixup | CutMix):
        results = transform(numbered_batch(b), seeded()).targets.diagonal()
    else:
        equal_images = random_batch(1, 3).images.expand(b, -1, -1, -1).contiguous()
        results = transform(Batch(equal_images, torch.eye(b)), seeded()).images.flatten(1)
    assert len(results.unique(dim=0)) >= (2 if isinstance(transform, Flip | Gray | Solarize) else b // 2)


@each_transform
def test_every_option_changes_the_result(transform):
    batch = random_batch(16, c=3)
    before = transform(batch, seeded())
    for field in dataclasses.fields(transform):
        if field.name != "force":
            changed = dataclasses.replace(transform, **{field.name: OTHER_VALUES[type(transform)][field.name]})
            assert not all(map(torch.equal, before[:2], changed(batch, seeded())[:2])), field.name


@each_transform
def test_transform_is_a_frozen_value_with_named_options(transform):
    copy = type(transform)(**dataclasses.asdict(transform))
    assert copy == transform and hash(copy) == hash(transform) and copy is not transform
    with pytest.raises(dataclasses.FrozenInstanceError):
        transform.force = True
    with pytest.raises(TypeError):
        type(transform)(0.5)


@each_transform
def test_several_batches_changed_at_once_are_bitwise_equal_to_each_batch_alone(transform):
    batches = [Batch(torch.rand(5, 3, 16, 16, generator=seeded(i)), torch.eye(5)) for i in range(3)]
    draws = [transform.draw(batch.images.shape, seeded(i)) for i, batch in enumerate(batches)]
    joined = Batch(*(torch.cat(tensors) for tensors in zip(*((batch.images, batch.targets) for batch in batches))))
    together = transform.change(joined, concatenate(draws))
    alone = [transform(batch, seeded(i)) for i, batch in enumerate(batches)]
    assert torch.equal(together.images, torch.cat([batch.images for batch in alone]))
    assert torch.equal(together.targets, torch.cat([batch.targets for batch in alone]))


@pytest.mark.parametrize("transforms", [(), (augment.Warp(),), (*digits(), Flip(), *ON)], ids=["none", "off", "all"])
def test_apply_with_several_generators_changes_each_part_as_alone(transforms):
    batches = [Batch(torch.rand(5, 3, 16, 16, generator=seeded(i)), torch.eye(5)) for i in range(3)]
    joined = Batch(*(torch.cat(tensors) for tensors in zip(*((batch.images, batch.targets) for batch in batches))))
    before = joined.images.clone()
    together = augment.apply(transforms, joined, [seeded(i) for i in range(3)])
    alone = [augment.apply(transforms, batch, seeded(i)) for i, batch in enumerate(batches)]
    assert torch.equal(together.images, torch.cat([batch.images for batch in alone]))
    assert torch.equal(together.targets, torch.cat([batch.targets for batch in alone]))
    assert torch.equal(joined.images, before)


def test_apply_refuses_parts_of_different_sizes_and_transforms_that_cannot_change_parts():
    batch = Batch(torch.rand(5, 1, 8, 8), torch.eye(5))
    with pytest.raises(ValueError, match="5 images cannot be divided into 2 equal parts"):
        augment.Flip()(batch, seeded(0), seeded(1))
    with pytest.raises(ValueError, match="5 images cannot be divided into 2 equal parts"):
        augment.apply(digits(), batch, [seeded(0), seeded(1)])
    with pytest.raises(ValueError, match="cannot change several parts of a batch at once"):
        augment.apply([lambda batch, generator: batch], Batch(torch.rand(4, 1, 8, 8), torch.eye(4)), [seeded(0), seeded(1)])
    own = augment.MultiCrop(first=(lambda batch, generator: batch,))
    with pytest.raises(ValueError, match=r"MultiCrop.* cannot change several parts of a batch at once"):
        augment.apply([own], Batch(torch.rand(4, 1, 8, 8), torch.eye(4)), [seeded(0), seeded(1)])
    with pytest.raises(ValueError, match="MultiCrop got several generators and a transform that is not smallvit's; expected one"):
        own(Batch(torch.rand(4, 1, 8, 8), torch.eye(4)), seeded(0), seeded(1))


def test_apply_returns_tensors_that_gradients_can_flow_through():
    transforms, batch = (*photos(), *augment.photo_crops(local=1, size=7)), random_batch(c=3)
    result = augment.apply(transforms, batch, seeded())
    for tensor in (result.images, result.targets, *result.views):
        weight = torch.ones((), requires_grad=True)
        (weight * tensor).sum().backward()
        torch.testing.assert_close(weight.grad, tensor.sum())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_transform
def test_gpu_gives_the_same_pixels(transform):
    batch = random_batch(16, c=3)
    on_gpu = transform(Batch(*(x.cuda() for x in batch[:2])), seeded())
    for expected, result in zip(transform(batch, seeded())[:2], on_gpu[:2]):
        torch.testing.assert_close(result.cpu(), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Warp(rotate=-1), r"Warp\(rotate=-1\): .* from 0 to 180"),
        (lambda: Warp(shift=2), r"Warp\(shift=2\): .* from 0 to 1$"),
        (lambda: Warp(smooth=0), r"Warp\(smooth=0\)"),
        (lambda: Flip(probability=1.5), r"Flip\(probability=1.5\)"),
        (lambda: Gray(probability=2), r"Gray\(probability=2\)"),
        (lambda: CutMix(probability=-0.1), r"CutMix\(probability=-0.1\)"),
        (lambda: Warp(fill="white"), r"Warp\(fill='white'\): .*\"black\" or \"edge\""),
        (lambda: Warp(aim="up"), r"Warp\(aim='up'\): .*\"anywhere\" or \"ink\""),
        (lambda: Warp(crop=(0, 0.5)), r"Warp\(crop=\(0, 0.5\)\): .*1e-06 <= a <= b <= 1$"),
        (lambda: Warp(size=(8, 0)), r"Warp\(size=\(8, 0\)\): .*\(height, width\), or None"),
        (lambda: RandomErasing(area=(0.5, 0.1)), r"RandomErasing\(area=\(0.5, 0.1\)\): .*a <= b"),
        (lambda: RandomErasing(area=0.3), r"RandomErasing\(area=0.3\): .*a <= b"),
        (lambda: RandomErasing(aspect=0.5), r"RandomErasing\(aspect=0.5\)"),
        (lambda: Mixup(alpha=0), r"Mixup\(alpha=0\)"),
        (lambda: SmoothLabels(amount=2), r"SmoothLabels\(amount=2\)"),
        (lambda: Jitter(contrast=3), r"Jitter\(contrast=3\)"),
        (lambda: Jitter(hue=0.6), r"Jitter\(hue=0.6\): .* from 0 to 0.5"),
        (lambda: Solarize(threshold=128), r"Solarize\(threshold=128\): .* from 0 to 1"),
        (lambda: StrokeWidth(width=2), r"StrokeWidth\(width=2\): .* from 0 to 0.15"),
        (lambda: Blur(sigma=(0.1, 2.0)), r"Blur\(sigma=\(0.1, 2.0\)\): .*0 <= a <= b <= 0.5"),
        (lambda: digits(3), r"digits\(strength=3\): .* from 0 to 1.5"),
        (lambda: strong_digits(1.3), r"strong_digits\(strength=1.3\): .* from 0 to 1.2"),
        (lambda: photos(-1), r"photos\(strength=-1\): .* from 0 to 2"),
    ],
)
def test_out_of_range_values_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


BAD = [-1, float("nan"), float("inf"), "x", None, (), (1,), (0.2, 0.1), ("a", "b"), [0.1, 0.2], {}, object, 1e9]


@pytest.mark.parametrize("kind", sorted(CLASSES, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_option_refuses_every_bad_value_with_a_value_error(kind):
    for field in dataclasses.fields(kind):
        for bad in BAD if field.name != "force" else ():
            if (field.name, bad) != ("size", None):
                with pytest.raises(ValueError, match=rf"{kind.__name__}\({field.name}="):
                    kind(**{field.name: bad})


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize(
    ("transform", "message"),
    [(Jitter(saturation=0.1), "set saturation=0"), (Jitter(hue=0.1), "set hue=0"), (Gray(), r"Gray\(probability=0.2\).*leave it out")],
)  # fmt: skip
def test_color_changes_need_three_channels(channels, transform, message):
    with pytest.raises(ValueError, match=message) as error:
        transform(random_batch(c=channels), seeded())
    assert f"needs 3 channels, got {channels}" in str(error.value)


@pytest.mark.parametrize(
    "images",
    [torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.zeros(2, 8, 8), torch.zeros(3, 1, 8, 8)],
    ids=["bytes", "no channels", "another count"],
)
def test_apply_refuses_an_invalid_batch(images):
    with pytest.raises(ValueError, match="float32 images b c h w"):
        augment.apply(digits(), Batch(images, torch.ones(2, 1)), seeded())


# Warp: for its affine map and its crops see tests/test_multicrop.py


def test_warp_shifts_by_up_to_the_given_fraction_of_the_shorter_side():
    impulse = torch.zeros(500, 1, 21, 31)
    impulse[:, :, 10, 15] = 1
    images = Warp(shift=0.2)(Batch(impulse, torch.ones(500, 1)), seeded()).images[:, 0]
    x = (images.sum(dim=1) * torch.arange(31)).sum(dim=1) - 15
    y = (images.sum(dim=2) * torch.arange(21)).sum(dim=1) - 10
    for shift in (x, y):
        assert 0.19 * 21 < shift.abs().max() <= 0.2 * 21 + 1e-4
        assert shift.mean().abs() < 0.3


def test_elastic_displacement_has_the_given_size_and_smoothness_at_every_pixel():
    h, w, side, smooth, b = 12, 18, 12, 0.25, 6000
    warp = Warp(elastic=0.05, smooth=smooth)
    images = torch.empty(b, 1, h, w)
    control = warp.draw(images.shape, seeded())["control"]
    field = warp.add_elastic(torch.zeros(2, b, h, w), images, torch.ones(2, b), control).transpose(0, 1)
    pixels = field * torch.tensor([w / 2, h / 2])[:, None, None]
    rms = pixels.square().mean(dim=0).sqrt()
    torch.testing.assert_close(rms, torch.full((2, h, w), 0.05 * side), rtol=0.05, atol=0)
    assert pixels.mean(dim=0).abs().max() < 0.05 * 0.05 * side * 2
    distance = 3  # pixels: one standard deviation of the smoothing, where two smoothed fields have correlation exp(-1/4)
    correlation = (pixels[..., distance:] * pixels[..., :-distance]).mean(dim=0) / (rms[..., distance:] * rms[..., :-distance])
    assert distance == smooth * side
    assert correlation.mean().item() == pytest.approx(exp(-1 / 4), abs=0.03)


def test_pixels_outside_the_image_are_black_or_the_edge():
    white = Batch(torch.ones(64, 1, 16, 16), torch.ones(64, 1))
    black = Warp(shift=0.5)(white, seeded()).images
    assert (black == 0).flatten(1).any(dim=1).float().mean() > 0.9
    assert (Warp(shift=0.5, fill="edge")(white, seeded()).images == 1).all()
    blank = Batch(torch.zeros(4, 1, 16, 16), torch.ones(4, 1))
    assert (augment.apply(digits(), blank, seeded()).images == 0).all()


@pytest.mark.parametrize(
    ("transform", "tolerance"),
    [
        (Warp(rotate=15, scale=0.15, shear=12, shift=0.07, crop=(0.5, 1.0)), 0.0),
        (Warp(rotate=15, scale=0.15, shear=12, shift=0.07, elastic=0.04), 0.02),
        (Jitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1), 0.02),
        (Blur(probability=1), 0.02),
    ],
    ids=["affine", "elastic", "hue", "blur"],
)
def test_low_precision_matrix_products_hardly_change_pixels(transform, tolerance):
    batch = random_batch(64, c=3, h=28, w=28)
    exact, precision = transform(batch, seeded()).images, torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert (transform(batch, seeded()).images - exact).abs().max() <= tolerance
    finally:
        torch.set_float32_matmul_precision(precision)


IMAGES, ONE_HOT = torch.rand(2, 3, 8, 8), torch.eye(2)
PAIR = Batch(IMAGES, ONE_HOT)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Warp(rotate=9)(IMAGES, seeded()), "Warp got Tensor; expected Batch\\(images, targets\\)"),
        (lambda: augment.apply([Warp(rotate=9)], IMAGES, seeded()), "apply got Tensor; expected Batch"),
        (lambda: augment.apply([Warp(rotate=9)], Batch(IMAGES.numpy(), ONE_HOT), seeded()), "got numpy.ndarray; expected a torch.Tensor"),
        (lambda: Warp(rotate=9)(Batch(IMAGES, ONE_HOT.numpy()), seeded()), "got numpy.ndarray; expected a torch.Tensor"),
        (lambda: augment.apply(Warp(rotate=9), PAIR, seeded()), r"transforms is Warp\(.*; expected several, such as \(Warp\(\),\)"),
        (lambda: Warp(rotate=9)(PAIR), r"Warp got the random number generators \[\]; expected torch.Generator\(\)"),
        (lambda: augment.apply([Warp(rotate=9)], PAIR, 0), r"apply got the random number generators \[0\]"),
        (lambda: MultiCrop(first=(Warp(),))(PAIR, 0), r"MultiCrop got the random number generators \[0\]"),
        (lambda: Mixup()(Batch(IMAGES, torch.tensor([0, 1])), seeded()), r"torch.int64 targets \(2,\); .*such as one-hot labels"),
        (lambda: SmoothLabels()(Batch(IMAGES, torch.eye(2).long()), seeded()), "float targets b k, such as one-hot labels"),
    ],
)
def test_first_mistakes_with_a_single_transform_are_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("transforms", [augment.digits(), augment.strong_photos(), augment.photo_crops()], ids=["digits", "photos", "crops"])
def test_autocast_does_not_round_the_pixels(transforms):
    expected = augment.apply(transforms, PAIR, seeded())
    with torch.autocast("cpu", torch.bfloat16):
        found, alone = augment.apply(transforms, PAIR, seeded()), PAIR
        for transform in transforms[:1]:
            alone = transform(alone, seeded())
    assert torch.equal(found.images, expected.images) and alone.images.dtype == torch.float32
    assert all(torch.equal(one, other) for one, other in zip(found.views, expected.views))


# RandomErasing, Mixup, CutMix


def test_random_erasing_blackens_one_rectangle_of_the_given_size():
    b, h, w = 400, 20, 30
    images = RandomErasing(area=(0.1, 0.3), probability=0.5, aspect=2)(Batch(torch.ones(b, 2, h, w), torch.eye(b)), seeded()).images
    black = (images == 0).all(dim=1)
    assert torch.equal(images == 0, black[:, None].expand(-1, 2, -1, -1)) and set(images.unique().tolist()) == {0, 1}
    height, width = black.any(dim=2).sum(dim=1), black.any(dim=1).sum(dim=1)
    assert torch.equal(black.sum(dim=(1, 2)), height * width), "not a rectangle"
    erased = height > 0
    assert erased.float().mean().item() == pytest.approx(0.5, abs=0.1)
    area, aspect = (height * width / (h * w))[erased], (height / h / (width / w))[erased]
    assert 0.08 < area.min() < 0.14 and 0.26 < area.max() < 0.33
    assert 0.4 < aspect.min() < 0.6 and 1.7 < aspect.max() < 2.5
    assert black.any(dim=0).all(), "some pixels are never erased"


def test_random_erasing_of_nearly_everything_works_for_every_aspect():
    images = RandomErasing(area=(0.95, 0.95), probability=1, aspect=50)(random_batch(50, h=40, w=40), seeded()).images
    assert (images > 0).flatten(1).float().mean(dim=1).max() < 0.1


@pytest.mark.parametrize("b", [1, 2, 33])
def test_mixup_averages_pixels_as_it_averages_targets(b):
    batch = Batch(random_batch(b, 3).images, torch.eye(b))
    images, targets, *_ = Mixup(alpha=1)(batch, seeded())
    torch.testing.assert_close(images, torch.einsum("bk,kchw->bchw", targets, batch.images))
    assert (targets > 0).sum(dim=1).max() == min(b, 2)


@pytest.mark.parametrize("b", [1, 2, 33])
def test_cutmix_targets_are_exactly_the_pixel_areas(b):
    batch = numbered_batch(b)
    images, targets, *_ = CutMix()(batch, seeded())
    areas = torch.stack([(images == batch.images[k]).flatten(1).float().mean(dim=1) for k in range(b)], dim=1)
    torch.testing.assert_close(targets, areas, atol=1e-6, rtol=0)
    assert (targets > 0).sum(dim=1).max() == min(b, 2)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_mixing_weights_are_beta_distributed(alpha):
    weight = Mixup(alpha=alpha).draw((4000, 1, 1, 1), seeded())["weight"]
    assert kstest(weight.double().numpy(), beta(alpha, alpha).cdf).pvalue > 0.01


@pytest.mark.parametrize("alpha", [0.001, 0.01, 1000])
def test_extreme_alphas_give_valid_targets(alpha):
    targets = Mixup(alpha=alpha)(numbered_batch(1000), seeded()).targets
    assert targets.isfinite().all() and targets.min() >= 0 and targets.max() <= 1


@pytest.mark.parametrize("transform", [Mixup(probability=0.3), CutMix(probability=0.3)], ids=class_name)
def test_probability_is_the_share_of_mixed_images(transform):
    targets = transform(numbered_batch(2000, 40, 40), seeded()).targets
    assert (targets.diagonal() < 1).float().mean().item() == pytest.approx(0.3, abs=0.04)


# Flip, StrokeWidth, SmoothLabels, Noise


def test_flip_mirrors_some_images_and_leaves_the_others_unchanged():
    batch = random_batch(100, 3)
    images = Flip()(batch, seeded()).images
    mirrored = (images == batch.images.flip(-1)).flatten(1).all(dim=1)
    assert torch.equal(mirrored, ~(images == batch.images).flatten(1).all(dim=1))
    assert 30 < mirrored.sum() < 70


@pytest.mark.parametrize("edge", [-2.0, -1.25, -0.5, 0.0, 0.4, 1.0, 2.75])
def test_stroke_width_moves_both_edges_of_a_bar(edge):
    images = torch.zeros(1, 1, 9, 20)
    images[..., 6:12] = 1
    changed = StrokeWidth(probability=1).change(Batch(images, torch.ones(1, 1)), {"edge": torch.tensor([edge])}).images
    column = torch.arange(20)
    covered = (12 + edge - column).clamp(0, 1) * (column + 1 - (6 - edge)).clamp(0, 1)  # part of each pixel inside the new bar
    torch.testing.assert_close(changed, covered.expand_as(images))


@pytest.mark.parametrize(("edge", "vanishes"), [(-0.98, False), (-1.0, True)])
@pytest.mark.parametrize("pixels", [1, 2])
def test_thin_stroke_becomes_darker_and_vanishes_at_a_change_of_two_pixels(pixels, edge, vanishes):
    images = torch.zeros(1, 1, 9, 9)
    images[..., 4 : 4 + pixels] = 1
    changed = StrokeWidth().change(Batch(images, torch.ones(1, 1)), {"edge": torch.tensor([edge])}).images
    torch.testing.assert_close(changed, images * (1 + edge))
    assert (changed.max() == 0) == vanishes


def test_dark_strokes_become_thinner_where_bright_ones_become_thicker():
    images, edge = random_batch(4, 1, 11, 14).images, torch.tensor([0.6, -0.6, 1.7, -1.7])
    bright, dark = (
        StrokeWidth().change(Batch(x, torch.eye(4)), {"edge": moved}).images for x, moved in ((images, edge), (1 - images, -edge))
    )
    torch.testing.assert_close(dark, 1 - bright)


@pytest.mark.parametrize("pixels", [1, 2])
def test_stroke_width_of_whole_pixels_is_dilation_and_erosion(pixels):
    images = random_batch(2, 3, 11, 14).images
    edges = {"edge": torch.tensor([pixels, -pixels]).float()}
    thicker, thinner = StrokeWidth().change(Batch(images, torch.eye(2)), edges).images.numpy()
    window = (1, 2 * pixels + 1, 2 * pixels + 1)
    np.testing.assert_array_equal(thicker, grey_dilation(images[0].numpy(), window))
    np.testing.assert_array_equal(thinner, grey_erosion(images[1].numpy(), window))


def test_stroke_width_is_drawn_uniformly_in_fractions_of_the_shorter_side():
    edge = StrokeWidth(width=0.1, probability=0.4).draw((4000, 1, 20, 30), seeded())["edge"]
    assert kstest(edge[edge != 0] / 2 + 0.5, "uniform").pvalue > 0.01, "not uniform from -1 to 1 pixel at each edge"
    assert (edge != 0).float().mean().item() == pytest.approx(0.4, abs=0.03)


def test_smooth_labels_divides_the_amount_among_all_classes():
    targets = SmoothLabels(amount=0.2)(random_batch(3, classes=4), seeded()).targets
    torch.testing.assert_close(targets[0], torch.tensor([0.85, 0.05, 0.05, 0.05]))


def test_smooth_labels_leaves_images_without_a_label_without_one():
    batch = random_batch(3, classes=4)
    batch.targets[1] = 0
    targets = SmoothLabels(amount=0.2)(batch, seeded()).targets
    torch.testing.assert_close(targets.sum(1), torch.tensor([1.0, 0.0, 1.0]))


def test_solarize_clips_pixels_that_lie_outside_of_the_range():
    images = torch.tensor([-500.0, -0.2, 0.3, 0.8, 1.5, 800.0])[:, None, None, None]
    changed = Solarize(probability=1)(Batch(images, torch.ones(6, 1)), seeded()).images.flatten()
    torch.testing.assert_close(changed, torch.tensor([0.0, 0.0, 0.3, 0.2, 0.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8])
def test_other_numbers_than_float32_are_refused(dtype):
    batch = random_batch(3)
    with pytest.raises(ValueError, match=f"Noise got {dtype} images; expected float32"):
        Noise()(batch._replace(images=batch.images.to(dtype)), seeded())


def test_noise_has_the_given_standard_deviation():
    gray = Batch(torch.full((20, 1, 28, 28), 0.5), torch.ones(20, 1))
    noise = Noise(std=0.1)(gray, seeded()).images - 0.5
    assert noise.std().item() == pytest.approx(0.1, rel=0.03) and noise.mean().abs() < 0.005


# Jitter, Gray, Solarize, Blur


def gray_value(images):
    return (images * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=1)


def moderate_colors(b=64, h=12, w=14):
    """Random colors that no jitter of up to 0.2 moves out of [0, 1]."""
    return Batch(0.3 + 0.3 * torch.rand(b, 3, h, w, generator=seeded(5)), torch.ones(b, 1))


def test_brightness_is_relative_to_black_contrast_to_the_mean_and_saturation_to_gray():
    b = 300
    batch = Batch(0.4 * random_batch(b, 3).images + 0.1, torch.ones(b, 1))
    factor = Jitter(brightness=0.5)(batch, seeded()).images / batch.images
    assert factor.flatten(1).std(dim=1).max() < 1e-5 and 0.5 <= factor.min() < 0.55 and 1.45 < factor.max() < 1.5001
    contrast = Jitter(contrast=0.5)(batch, seeded()).images
    torch.testing.assert_close(contrast.mean(dim=(1, 2, 3)), batch.images.mean(dim=(1, 2, 3)))
    gray = Batch(batch.images[:, :1].expand(-1, 3, -1, -1), batch.targets)
    torch.testing.assert_close(Jitter(saturation=1)(gray, seeded()).images, gray.images)


@pytest.mark.parametrize("options", [dict(brightness=0.4, contrast=0.4), dict(contrast=0.9, saturation=1)], ids=str)
def test_jitter_without_hue_is_bitwise_equal_to_its_three_changes_in_order(options):
    batch = random_batch(40, 3)
    uniform = 2 * torch.rand(3, 40, generator=seeded(4)) - 1
    names = ("brightness", "contrast", "saturation")
    brightness, contrast, saturation = ((1 + options.get(name, 0) * u)[:, None, None, None] for name, u in zip(names, uniform))
    images = batch.images * brightness
    images = torch.lerp(images.mean(dim=(1, 2, 3), keepdim=True), images, contrast)
    r, g, b = images.split(1, dim=1)
    images = torch.lerp(0.299 * r + 0.587 * g + 0.114 * b, images, saturation)
    generator, reference = seeded(4), seeded(4)
    assert torch.equal(Jitter(**options)(batch, generator).images, images.clamp(0, 1))
    torch.rand(3, 40, generator=reference)
    assert torch.equal(generator.get_state(), reference.get_state()), "draws more numbers than needed"


def test_jitter_with_hue_is_the_product_of_its_changes():
    """Brightness, contrast, saturation and hue, each as a map of all pixels, one after the other."""
    options, batch = dict(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1), random_batch(40, 3)
    u = 2 * torch.rand(4, 40, generator=seeded(4)) - 1
    brightness, contrast, saturation = (1 + torch.tensor([0.4, 0.4, 0.2])[:, None] * u[:3])[:, :, None, None, None]
    angle = (2 * pi * 0.1 * u[3])[:, None, None, None]
    images = brightness * batch.images
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + contrast * (images - mean)
    gray = gray_value(images)[:, None]
    images = gray + saturation * (images - gray)
    r, g, b = (images - gray).unbind(1)
    turned = torch.stack([b - g, r - b, g - r], dim=1) / 3**0.5  # rotated by 90 degrees
    turned = turned - gray_value(turned)[:, None]
    images = gray + angle.cos() * (images - gray) + angle.sin() * turned
    torch.testing.assert_close(Jitter(**options)(batch, seeded(4)).images, images.clamp(0, 1), atol=2e-6, rtol=0)


def test_tiny_hue_changes_nothing_about_the_other_options():
    options, batch = dict(brightness=0.4, contrast=0.9, saturation=0.7), random_batch(40, 3)
    without, with_hue = Jitter(**options)(batch, seeded()).images, Jitter(**options, hue=1e-7)(batch, seeded()).images
    torch.testing.assert_close(with_hue, without, atol=1e-5, rtol=0)


def test_hue_keeps_gray_values_and_rotates_red_to_green_to_blue():
    batch = moderate_colors()
    images = Jitter(hue=0.2)(batch, seeded()).images
    assert (images - batch.images).abs().flatten(1).amax(1).median() > 0.05
    torch.testing.assert_close(gray_value(images), gray_value(batch.images), atol=1e-6, rtol=0)
    gray = batch._replace(images=batch.images[:, :1].repeat(1, 3, 1, 1))
    torch.testing.assert_close(Jitter(hue=0.5)(gray, seeded()).images, gray.images)
    red = torch.full((500, 3, 1, 1), 0.4)
    red[:, 0] = 0.6
    turn = 0.5 * (2 * torch.rand(4, 500, generator=seeded())[3] - 1)
    colors = Jitter(hue=0.5)(Batch(red, torch.ones(500, 1)), seeded()).images[:, :, 0, 0]
    for channel in (0, 1, 2):
        near = ((turn - channel / 3 + 0.5) % 1 - 0.5).abs() < 0.04
        assert near.sum() > 20 and (colors[near].argmax(dim=1) == channel).all()


def test_hue_angle_is_close_to_torchvisions():
    from torchvision.transforms.functional import adjust_hue

    def angle(images):
        r, g, b = images.unbind(1)
        return torch.atan2(3**0.5 * (g - b), 2 * r - g - b) / (2 * pi)

    batch = moderate_colors(200, 1, 1)
    turn = 0.2 * (2 * torch.rand(4, 200, generator=seeded())[3] - 1)
    expected = torch.stack([adjust_hue(image, factor) for image, factor in zip(batch.images, turn.tolist())])
    images = Jitter(hue=0.2)(batch, seeded()).images
    difference = (angle(images) - angle(expected) + 0.5) % 1 - 0.5
    assert difference.abs().max() < 0.01, "HSV's hexagon and a circle never differ by more"
    assert (gray_value(expected) - gray_value(batch.images)).abs().max() > 0.01, "torchvision keeps gray values too: say so in Jitter"


@pytest.mark.parametrize(
    "transform",
    [
        Jitter(brightness=0.5, contrast=0.5, saturation=0.5, probability=0.3),
        Jitter(brightness=0.5, contrast=0.5, saturation=0.5, hue=0.1, probability=0.3),
        Gray(probability=0.3), Solarize(probability=0.3), Blur(sigma=(0.1, 0.3), probability=0.3),
        StrokeWidth(width=0.15, probability=0.3),
    ],
)  # fmt: skip
def test_probability_is_the_share_of_changed_images_and_the_others_are_bitwise_equal(transform):
    batch = random_batch(1000, 3, 8, 9)
    images = transform(batch, seeded()).images
    changed = (images != batch.images).flatten(1).any(dim=1)
    assert changed.float().mean().item() == pytest.approx(0.3, abs=0.05)
    all_changed = dataclasses.replace(transform, probability=1)(batch, seeded()).images
    torch.testing.assert_close(images[changed], all_changed[changed])


def test_gray_and_solarize_equal_torchvision():
    from torchvision.transforms.functional import rgb_to_grayscale, solarize

    batch = random_batch(20, 3)
    expected = rgb_to_grayscale(batch.images, num_output_channels=3)
    torch.testing.assert_close(Gray(probability=1)(batch, seeded()).images, expected, atol=1e-3, rtol=0)
    levels = batch._replace(images=(8 * batch.images).round() / 8)  # some pixels are equal to the threshold
    for threshold in (0, 0.375, 0.5, 1):
        images = Solarize(threshold=threshold, probability=1)(levels, seeded()).images
        assert torch.equal(images, solarize(levels.images, threshold))


@pytest.mark.parametrize(("h", "w"), [(12, 12), (9, 17)])
def test_blur_is_the_gaussian_mean_of_the_pixels_inside_the_image(h, w):
    batch = random_batch(3, 2, h, w)
    sigmas = min(h, w) * (0.05 + 0.15 * torch.rand(3, generator=seeded(2)))
    expected = torch.zeros_like(batch.images)
    for image, out, sigma in zip(batch.images, expected, sigmas.tolist()):
        for y in range(h):
            for x in range(w):
                distance = (torch.arange(h)[:, None] - y) ** 2 + (torch.arange(w) - x) ** 2
                weights = torch.exp(-distance / (2 * sigma**2))
                out[:, y, x] = (image * weights).sum(dim=(1, 2)) / weights.sum()
    images = Blur(sigma=(0.05, 0.2), probability=1)(batch, seeded(2)).images
    torch.testing.assert_close(images, expected, atol=1e-5, rtol=0)


def test_blur_equals_torchvision_and_nearly_pil_away_from_the_border():
    from PIL import ImageFilter
    from torchvision.transforms.functional import gaussian_blur, pil_to_tensor, to_pil_image

    image = (255 * torch.rand(3, 32, 40, generator=seeded())).round() / 255
    inside = (..., slice(10, -10), slice(10, -10))
    for radius in (0.1, 0.7, 2.0):  # pixels
        blur = Blur(sigma=(radius / 32, radius / 32), probability=1)
        result = blur(Batch(image[None], torch.ones(1, 1)), seeded()).images[0]
        torch.testing.assert_close(result[inside], gaussian_blur(image, 21, radius)[inside], atol=1e-4, rtol=0)
        pil = pil_to_tensor(to_pil_image(image).filter(ImageFilter.GaussianBlur(radius))) / 255
        assert (result - pil)[inside].abs().mean() < 0.02
        white = torch.ones(1, 1, 32, 40)
        torch.testing.assert_close(blur(Batch(white, torch.ones(1, 1)), seeded()).images, white)


def test_tiny_blur_changes_no_pixel():
    batch = random_batch(8)
    torch.testing.assert_close(Blur(sigma=(0, 1e-9), probability=1)(batch, seeded()).images, batch.images, atol=0, rtol=0)


# Digits and presets


def test_transforms_that_are_unsafe_for_digits_give_a_reason():
    assert "mirror" in Flip().unsafe_for_digits
    assert Flip(force=True).unsafe_for_digits is None
    assert "30 degrees" in Warp(rotate=31).unsafe_for_digits
    assert Warp(rotate=30).unsafe_for_digits is None and Warp(rotate=90, force=True).unsafe_for_digits is None
    assert [type(transform) for transform in ON if transform.unsafe_for_digits] == [Flip, Solarize]
    assert "ink" in Solarize().unsafe_for_digits and Solarize(force=True).unsafe_for_digits is None


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0, 1.5])
def test_digits_preset_is_safe_for_digits(strength):
    assert [transform.unsafe_for_digits for transform in digits(strength)] == [None]
    assert [transform.unsafe_for_digits for transform in strong_digits(min(strength, 1.2))] == [None, None]


@pytest.mark.parametrize("preset", [digits, photos, strong_digits, partial(strong_photos, color=False)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_presets_are_off_at_strength_0_and_change_more_with_strength(preset, channels):
    batch = random_batch(64, channels)
    assert augment.apply(preset(0), batch, seeded()) is batch
    change = [(augment.apply(preset(s), batch, seeded()).images - batch.images).square().mean() for s in (0.25, 1)]
    assert 0 < change[0] < change[1]


def test_classifier_still_reads_augmented_digits_and_not_mirrored_ones():
    data, labels = load_digits(return_X_y=True)
    images = torch.tensor(data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    classifier = LogisticRegression(max_iter=300).fit(images[:900].flatten(1), labels[:900])

    def accuracy(transforms):
        augmented = augment.apply(transforms, Batch(images[900:], torch.ones(897, 1)), seeded()).images
        return classifier.score(augmented.flatten(1), labels[900:])

    assert accuracy(()) > 0.9
    assert accuracy(digits(0.5)) > 0.8
    assert accuracy(digits()) > 0.6
    assert accuracy([Flip(probability=1, force=True)]) < 0.5


# Other defaults of torch


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
@pytest.mark.parametrize("transform", [*ON, *(cls(**options) for cls, options in OTHER_VALUES.items())], ids=repr)
def test_a_default_type_or_device_of_torch_changes_nothing(transform, default):
    side = 20 + [torch.float64, torch.bfloat16, "meta"].index(default)  # not in the caches of earlier tests
    batch = random_batch(c=3, h=side, w=side + 5)
    with torch.device("meta") if default == "meta" else default_dtype(default):
        found = augment.apply([transform], batch, seeded())
    expected = augment.apply([transform], batch, seeded())
    assert found.images.dtype == torch.float32 and found.images.device.type == "cpu"
    assert torch.equal(found.images, expected.images) and torch.equal(found.targets, expected.targets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transform", [Mixup(), CutMix(), SmoothLabels()], ids=class_name)
def test_targets_may_have_any_floating_type(transform, dtype):
    batch = random_batch()
    expected = augment.apply([transform], batch, seeded()).targets
    found = augment.apply([transform], batch._replace(targets=batch.targets.to(dtype)), seeded()).targets
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=4 * max(torch.finfo(dtype).eps, 1e-7), rtol=0)


def test_gradients_can_use_everything_that_a_transform_adds_to_the_batch():
    weight = torch.ones(8, requires_grad=True)
    batch = augment.apply(
        [lambda b, g: b._replace(draws=(torch.rand(8, generator=g),), teacher_logits=(b.targets * 2,))], random_batch(), seeded()
    )
    ((weight * batch.draws[0]).sum() + (weight[:, None] * batch.teacher_logits[0]).sum()).backward()
    assert torch.allclose(weight.grad, batch.draws[0] + 2)


def test_transforms_of_your_own_may_have_any_fields():
    from smallvit.augment.batch import Transform, check_range

    class Pair(tuple):
        low, high = property(lambda self: self[0]), property(lambda self: self[1])

    @dataclasses.dataclass(frozen=True)
    class Own(Transform):
        amount: float = 0.5
        limits: Pair = (0, 1)
        table: list = dataclasses.field(init=False)

        def __post_init__(self):
            check_range(self, amount=(0, 1))
            object.__setattr__(self, "table", [self.limits.low, self.limits.high])

    class Plain:
        amount = 0.5

    own = Own(amount=np.float32(0.25), limits=Pair((np.float32(0), np.float32(1))))
    assert type(own.amount) is float and own.amount == 0.25 and own.table == [0, 1]
    check_range(Plain(), amount=(0, 1))
    with pytest.raises(ValueError, match=r"Own\(amount=2\): expected a number from 0 to 1"):
        Own(amount=np.int64(2))
