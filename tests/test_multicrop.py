"""MultiCrop, the crops of Warp that it uses, and the presets for self-supervised learning."""

import dataclasses
import os
from functools import cache
from math import cos, exp, log, radians, sin, tan
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import kstest, uniform
from sklearn.datasets import load_digits

from smallvit import augment
from smallvit.components import describe, rebuild
from smallvit.data import mnist

from smallvit.augment import Batch, Blur, CutMix, Flip, Gray, Jitter, Mixup, MultiCrop, Noise, RandomErasing  # isort: skip
from smallvit.augment import Solarize, Warp, digit_crops, digits, photo_crops  # isort: skip
from smallvit.augment.batch import Transform  # isort: skip

MNIST = Path(os.environ.get("SMALLVIT_DATA", "")) / "MNIST" / "raw"
needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"needs MNIST and there is none in {MNIST}")
STRENGTHS = (0.0, 0.5, 1.0, 1.5)
PRESETS = {
    "digits": digit_crops(local=3, size=7),
    "photos": photo_crops(local=3, size=7),
    "photos without color": photo_crops(local=3, size=7, color=False),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_batch(b=8, c=1, h=12, w=12):
    return Batch(torch.rand(b, c, h, w, generator=seeded(99)), F.one_hot(torch.arange(b) % 10, 10).float())


def views_of(batch, *transforms, seed=0):
    return augment.apply(transforms, batch, seeded(seed)).views


CROP, SMALL_CROP = Warp(crop=(0.4, 1.0), size=10), Warp(crop=(0.1, 0.4), size=6)
SEVERAL = PRESETS | {
    "no local views": digit_crops(local=0),
    "two ends": (MultiCrop(first=(CROP, Flip(), Blur()), second=(CROP, Solarize()), small=(SMALL_CROP,), local=2),),
    "no crop": (Flip(), MultiCrop(first=(Noise(),), second=(Flip(), Noise()), small=(Gray(),), local=2)),
}


@pytest.mark.parametrize("transforms", SEVERAL.values(), ids=SEVERAL)
def test_views_of_several_parts_made_at_once_are_bitwise_those_of_each_part_alone(transforms):
    batch = random_batch(12, c=3)
    parts = [Batch(batch.images[start : start + 4], batch.targets[start : start + 4]) for start in (0, 4, 8)]
    alone = [augment.apply(transforms, part, seeded(seed)) for seed, part in enumerate(parts)]
    together = augment.apply(transforms, batch, [seeded(seed) for seed in range(3)])
    assert torch.equal(together.images, torch.cat([part.images for part in alone]))
    assert len(together.views) == len(alone[0].views)
    for number, views in enumerate(together.views):
        assert torch.equal(views, torch.cat([part.views[number] for part in alone]))


# The crops of Warp


@pytest.mark.parametrize(("h", "w", "size"), [(12, 12, None), (9, 15, (6, 7)), (16, 7, 20)])
@pytest.mark.parametrize(("crop", "aim"), [((1.0, 1.0), "anywhere"), ((0.1, 0.6), "anywhere"), ((0.1, 0.6), "ink")], ids=str)
@pytest.mark.parametrize("moved", [False, True], ids=["crop only", "crop and moves"])
def test_warp_is_the_documented_affine_map_of_the_documented_crop(h, w, size, crop, aim, moved):
    moves = dict(rotate=40, scale=0.3, shear=20, shift=0.2, force=True) if moved else {}
    batch, b = random_batch(6, 2, h, w), 6
    batch.images[:, :, : h // 2] *= 0.7
    images = Warp(**moves, crop=crop, aspect=2, aim=aim, size=size)(batch, seeded(3)).images
    generator = seeded(3)
    window = torch.rand(4, b, generator=generator).T.tolist() if crop[0] < 1 else [(1, 0.5, 0.5, 0.5)] * b
    affine = (2 * torch.rand(6, b, generator=generator) - 1).T.tolist()
    rows, columns = (h, w) if size is None else (size, size) if isinstance(size, int) else size
    for i, ((area, shape, place_x, place_y), u) in enumerate(zip(window, affine)):
        area = crop[0] + (crop[1] - crop[0]) * area
        aspect = exp((2 * shape - 1) * min(log(2), -log(area)))
        width, height = (area * aspect) ** 0.5, (area / aspect) ** 0.5
        x, y = (2 * place_x - 1) * (1 - width), (2 * place_y - 1) * (1 - height)
        if aim == "ink":
            left, pixel = place_x * batch.images[i].mean(0).sum().item(), -1
            while left >= 0:
                pixel += 1
                left -= batch.images[i, :, pixel // w, pixel % w].mean().item()
            x, y = (2 * (pixel % w) + 1) / w - 1, (2 * (pixel // w) + 1) / h - 1
            x, y = min(max(x, width - 1), 1 - width), min(max(y, height - 1), 1 - height)
        matrix, shift = torch.eye(2), torch.zeros(2)
        if moved:
            angle, lean = radians(40 * u[0]), radians(20 * u[1])
            rotation = torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]])
            zoom = torch.diag(torch.tensor([exp(log(1.3) * u[2]), exp(log(1.3) * u[3])]))
            matrix, shift = rotation @ torch.tensor([[1, tan(lean)], [0, 1]]) @ zoom, 0.2 * min(h, w) * torch.tensor(u[4:])
        to_pixels = torch.diag(torch.tensor([w / 2, h / 2]))  # from the coordinates of grid_sample
        extent = torch.diag(torch.tensor([width, height]))
        linear = extent @ to_pixels.inverse() @ matrix @ to_pixels
        offset = torch.tensor([x, y]) - extent @ to_pixels.inverse() @ matrix @ shift
        grid = F.affine_grid(torch.cat([linear, offset[:, None]], dim=1)[None], [1, 2, rows, columns], align_corners=False)
        expected = F.grid_sample(batch.images[i : i + 1], grid, align_corners=False)[0]
        torch.testing.assert_close(images[i], expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("crops", PRESETS.values(), ids=PRESETS)
def test_batch_without_images_is_refused(crops):
    with pytest.raises(ValueError, match="MultiCrop got a batch without images; expected at least one"):
        views_of(random_batch(b=0, c=3), *crops)


def test_crop_of_whole_pixels_is_a_slice():
    h, w = 10, 14
    images = random_batch(h * w, 2, h, w).images * 1e-5
    for i in range(h * w):
        images[i, :, i // w, i % w] = 1  # so bright that the crop is centered on this pixel
    crop = Warp(crop=(0.25, 0.25), aspect=1, aim="ink", size=(5, 7))
    crops = crop(Batch(images, torch.ones(h * w, 1)), seeded(1)).images
    for i in range(h * w):
        top, left = min(max(i // w - 2, 0), h - 5), min(max(i % w - 3, 0), w - 7)
        torch.testing.assert_close(crops[i], images[i, :, top : top + 5, left : left + 7], atol=2e-6, rtol=0)


def test_crops_are_uniform_in_area_aspect_and_position():
    warp, b = Warp(crop=(0.2, 0.7), aspect=4 / 3), 4000
    images = torch.empty(b, 1, 20, 30)
    center, extent, *_ = warp.crops(images, warp.draw(images.shape, seeded()))
    area, log_aspect = extent[0] * extent[1], (extent[0] / extent[1]).log()
    assert kstest(area, uniform(0.2, 0.5).cdf).pvalue > 0.01
    assert kstest(log_aspect, uniform(-log(4 / 3), 2 * log(4 / 3)).cdf).pvalue > 0.01
    assert ((center.abs() + extent) < 1 + 1e-6).all(), "a crop leaves the image"
    for position in center / (1 - extent):
        assert kstest(position, uniform(-1, 2).cdf).pvalue > 0.01


@pytest.mark.parametrize("crop", [(0.05, 0.4), (0.4, 1.0)], ids=str)
def test_crops_resemble_those_of_random_resized_crop(crop):
    from torchvision.transforms import RandomResizedCrop

    warp, images = Warp(crop=crop), torch.empty(3000, 1, 64, 64)
    center, extent, *_ = warp.crops(images, warp.draw(images.shape, seeded()))
    boxes = [RandomResizedCrop.get_params(torch.empty(1, 64, 64), crop, (3 / 4, 4 / 3)) for _ in range(3000)]
    top, left, height, width = torch.tensor(boxes).T / 64
    for result, expected in (
        (extent[0] * extent[1], height * width),
        ((extent[0] / extent[1]).log(), (width / height).log()),
        (extent[0], width),
        ((center[0] + 1) / 2, left + width / 2),
        ((center[1] + 1) / 2, top + height / 2),
    ):
        assert result.mean().item() == pytest.approx(expected.mean().item(), abs=0.02 if crop[1] < 1 else 0.07)
        assert result.std().item() == pytest.approx(expected.std().item(), rel=0.1 if crop[1] < 1 else 0.2)


def test_size_without_crop_is_a_bilinear_resize():
    batch = random_batch(3, 2, 12, 8)
    resized = Warp(size=(7, 20))(batch, seeded()).images
    expected = F.interpolate(batch.images, (7, 20), mode="bilinear", align_corners=False)
    assert (resized - expected)[:, :, 1:-1, 2:-2].abs().max() < 1e-5, "except at the border, which is black outside"


@pytest.mark.parametrize("count", [1, 3])
def test_several_views_equal_one_view_of_copies(count):
    warp, batch = Warp(rotate=20, elastic=0.05, crop=(0.2, 0.5), aim="ink", size=9), random_batch(5, 3)
    copies = Batch(batch.images.repeat(count, 1, 1, 1), batch.targets.repeat(count, 1))
    random = warp.draw(copies.images.shape, seeded())
    assert torch.equal(warp.change(batch, random).images, warp.change(copies, random).images)


# With aim="ink" no crop is blank


@cache
def digit_batch(name, count):
    if name == "mnist":
        return Batch(mnist().train.pixels(slice(0, count)), torch.ones(count, 1))
    images = torch.tensor(load_digits().images[:count], dtype=torch.float32)[:, None] / 16
    return Batch(images, torch.ones(len(images), 1))


def brightest(images):
    return images.flatten(1).amax(dim=1)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize(
    ("name", "size"), [("bundled", 4), ("bundled", 16), pytest.param("mnist", 16, marks=[needs_mnist, pytest.mark.slow])], ids=str
)
def test_every_view_of_a_digit_is_at_least_half_as_bright_as_the_image(name, size, strength):
    batch = digit_batch(name, 3000)
    for views in views_of(batch, *digit_crops(strength, local=2, size=size)):
        assert (brightest(views) >= brightest(batch.images).repeat(2) / 2 - 1e-5).all()


def test_ink_stays_visible_in_extreme_warps_and_small_crops():
    batch = digit_batch("bundled", 500)
    extreme = Warp(rotate=180, scale=1, shift=1, elastic=0.5, crop=(0.01, 0.05), size=5, force=True)
    assert (brightest(extreme(batch, seeded()).images) < brightest(batch.images) / 2).float().mean() > 0.2
    for warp in (dataclasses.replace(extreme, aim="ink"), dataclasses.replace(extreme, crop=(1.0, 1.0), aim="ink")):
        assert (brightest(warp(batch, seeded()).images) >= brightest(batch.images) / 2 - 1e-5).all()


def test_only_blank_crops_are_moved(monkeypatch):
    batch, warp = digit_batch("bundled", 500), Warp(rotate=30, shift=0.3, elastic=0.1, crop=(0.05, 0.1), aim="ink", size=8)
    moved = warp(batch, seeded()).images
    monkeypatch.setattr(Warp, "move_blank", lambda self, views, images, grid: views)
    original = warp(batch, seeded()).images
    blank = brightest(original) < brightest(batch.images) / 2
    assert 0 < blank.sum() < 250
    assert torch.equal(moved[~blank], original[~blank]) and not torch.equal(moved[blank], original[blank])


def test_black_images_raise_no_error():
    batch = Batch(torch.zeros(4, 1, 28, 28), torch.ones(4, 1))
    assert all((views == 0).all() for views in views_of(batch, *digit_crops()))


# MultiCrop


def test_views_are_ordered_differ_from_each_other_and_leave_the_batch_unchanged():
    b = 16
    level = torch.arange(1, b + 1).reshape(b, 1, 1, 1) / b
    batch = Batch(level.expand(b, 1, 12, 12).contiguous(), torch.eye(b))
    window, part = Warp(crop=(0.4, 1.0), fill="edge"), Warp(crop=(0.1, 0.4), fill="edge", size=6)
    multicrop = MultiCrop(first=(window,), small=(part,), local=3)
    result = multicrop(batch, seeded())
    assert result.images is batch.images and result.targets is batch.targets
    global_views, local_views = result.views
    assert global_views.shape == (2 * b, 1, 12, 12) and local_views.shape == (3 * b, 1, 6, 6)
    assert torch.allclose(global_views, level.repeat(2, 1, 1, 1)) and torch.allclose(local_views, level.repeat(3, 1, 1, 1))
    equal_images = Batch(random_batch(1).images.repeat(b, 1, 1, 1), torch.eye(b))
    for views in multicrop(equal_images, seeded()).views:
        assert len(views.flatten(1).unique(dim=0)) == len(views)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("c", "h", "w"), [(1, 28, 28), (3, 32, 32), (3, 24, 40), (4, 30, 18)], ids=str)
def test_presets_make_views_of_any_channels_and_size(name, c, h, w):
    batch = random_batch(4, c, h, w)
    if name == "photos" and c != 3:
        with pytest.raises(ValueError, match=f"needs 3 channels, got {c}"):
            views_of(batch, *PRESETS[name])
        return
    copy, state = batch.images.clone(), torch.get_rng_state()
    views = views_of(batch, *PRESETS[name])
    assert [tuple(one.shape) for one in views] == [(8, c, h, w), (12, c, 7, 7)]
    assert all(one.dtype == torch.float32 and one.min() >= 0 and one.max() <= 1 + 1e-6 for one in views)
    assert torch.equal(batch.images, copy), "the input was changed"
    assert all(map(torch.equal, views, views_of(batch, *PRESETS[name])))
    assert not any(map(torch.equal, views, views_of(batch, *PRESETS[name], seed=1)))
    assert torch.equal(torch.get_rng_state(), state), "another generator was used"


def views_one_by_one(batch, multicrop, generator):
    """The reference of MultiCrop: each transform changes the copies of the images of one kind of view, one after the other."""
    kinds = [(multicrop.first, 2)] if multicrop.second is None else [(multicrop.first, 1), (multicrop.second, 1)]
    views = []
    for transforms, count in (*kinds, (multicrop.small, multicrop.local)):
        copies = Batch(batch.images.repeat(count, 1, 1, 1), batch.targets.repeat(count, 1))
        for transform in transforms:
            copies = transform(copies, generator)
        views.append(copies.images)
    *pair, small = views
    return torch.cat(pair), small


MOVED = Warp(rotate=20, scale=0.2, shear=10, shift=0.1, crop=(0.3, 0.8))
MULTICROPS = {
    "digits": digit_crops()[0],
    "photos": photo_crops()[0],
    "mirrored by the warp": MultiCrop(first=(MOVED, Flip()), small=(dataclasses.replace(MOVED, size=9), Flip()), local=3),
    "mirrored after elastic": MultiCrop(first=(digits()[0], Flip(), Mixup()), small=(Warp(size=5),), local=1),
    "mirrored after ink": MultiCrop(first=(Warp(aim="ink", crop=(0.1, 0.2)), Flip()), small=(MOVED,), local=2),
    "flip in one kind": MultiCrop(first=(MOVED, Flip()), second=(MOVED, Jitter(contrast=0.5)), small=(MOVED,), local=2),
    "different from the start": MultiCrop(first=(Flip(), MOVED), second=(MOVED, Flip(), Noise()), small=(MOVED, CutMix()), local=2),
    "without a warp": MultiCrop(first=(Noise(), Solarize()), second=(Noise(), RandomErasing()), small=(Warp(), Blur()), local=1),
}


@pytest.mark.parametrize("multicrop", MULTICROPS.values(), ids=MULTICROPS)
def test_views_made_together_are_bitwise_equal_to_views_made_one_by_one(multicrop):
    batch, generator, reference = random_batch(16, 3, 32, 32), seeded(5), seeded(5)
    expected = views_one_by_one(batch, multicrop, reference)
    result = augment.apply([multicrop], batch, generator)
    assert all(map(torch.equal, result.views, expected)) and len(result.views) == 2
    assert torch.equal(generator.get_state(), reference.get_state()), "other random numbers were drawn"


@pytest.mark.parametrize("name", MULTICROPS)
def test_views_of_images_that_need_a_gradient_are_the_same(name):
    batch, multicrop = random_batch(16, 3, 32, 32), MULTICROPS[name]
    expected = multicrop(batch, seeded(5)).views
    views = multicrop(batch._replace(images=batch.images.clone().requires_grad_()), seeded(5)).views
    assert all(map(torch.equal, views, expected))
    assert all(view.requires_grad for view in views)


def test_views_may_be_made_by_any_callable():
    def invert(batch, generator):
        return batch._replace(images=torch.rand((), generator=generator) - batch.images)

    batch = random_batch(6)
    (views,) = views_of(batch, MultiCrop(first=(Flip(probability=1), invert)))
    level = views[0] + batch.images[0].flip(-1)
    torch.testing.assert_close(views, level.flatten()[0] - batch.images.flip(-1).repeat(2, 1, 1, 1))


@pytest.mark.parametrize("preset", [digit_crops, photo_crops])
def test_global_views_are_the_same_with_and_without_local_views(preset):
    batch = random_batch(6, 3)
    (alone,) = views_of(batch, *preset(local=0))
    global_views, local_views = views_of(batch, *preset(local=5))
    assert torch.equal(alone, global_views) and len(local_views) == 30


def test_second_transforms_and_transforms_other_than_warp_are_used():
    batch = random_batch(6)
    (views,) = views_of(batch, MultiCrop(first=(), second=(Flip(probability=1),)))
    assert torch.equal(views, torch.cat([batch.images, batch.images.flip(-1)]))
    (views,) = views_of(batch, MultiCrop(first=(Noise(std=0.1), Warp(crop=(0.5, 0.9)))))
    assert not torch.equal(views[:6], views[6:])
    assert len(views_of(batch, MultiCrop(first=()), Mixup())) == 1, "a transform after MultiCrop lost the views"


def test_table_lists_the_views_and_their_sizes():
    (step,) = digit_crops(local=4, size=16)
    assert step.table(28) == [("global", 2, (28, 28)), ("local", 4, (16, 16))]
    assert step.table((24, 40)) == [("global", 2, (24, 40)), ("local", 4, (16, 16))]
    assert MultiCrop(first=()).table(28) == [("global", 2, (28, 28))]
    step = MultiCrop(first=(Warp(size=(20, 24)), Flip()), small=(Flip(), Warp(size=8)), local=1)
    assert step.table(28) == [("global", 2, (20, 24)), ("local", 1, (8, 8))]
    assert [tuple(views.shape[2:]) for views in views_of(random_batch(2), step)] == [size for _, _, size in step.table(12)]


@pytest.mark.parametrize("preset", [digit_crops, photo_crops])
def test_multicrop_can_be_stored_in_a_record(preset):
    (multicrop,) = preset()
    copy = rebuild(describe(multicrop))
    assert copy == multicrop and hash(copy) == hash(multicrop)
    with pytest.raises(dataclasses.FrozenInstanceError):
        multicrop.local = 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MultiCrop(first=Warp()), r"MultiCrop\(first=Warp\(.*tuple of transforms"),
        (lambda: MultiCrop(first=None), r"MultiCrop\(first=None\).*tuple of transforms"),
        (lambda: MultiCrop(first=(), small=(3,)), r"MultiCrop\(small=\(3,\)\).*tuple of transforms"),
        (lambda: MultiCrop(first=(), local=-1), r"MultiCrop\(local=-1\).*number of local views"),
        (lambda: MultiCrop(first=(), small=(Flip(),), local=2.0), r"MultiCrop\(local=2.0\).*number of local views"),
        (lambda: MultiCrop(first=(), local=2), r"MultiCrop\(local=2\).*set small="),
        (lambda: MultiCrop(first=()).table("28"), r"image_size is '28'.*side in pixels"),
        (lambda: MultiCrop(first=(Warp(size=8),), second=(Warp(size=9),))(random_batch(), seeded()), r"\(8, 8\) and \(9, 9\) pixels"),
        (lambda: digit_crops(1.6), r"digit_crops\(strength=1.6\): .* from 0 to 1.5"),
        (lambda: photo_crops(-1), r"photo_crops\(strength=-1\): .* from 0 to 2"),
        (lambda: digit_crops(size=0), r"Warp\(size=0\)"),
        (lambda: photo_crops(local=True), r"MultiCrop\(local=True\)"),
    ],
)
def test_invalid_views_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# Presets


def test_digit_crops_are_safe_for_digits_and_photo_crops_are_not():
    assert all(transform.unsafe_for_digits is None for strength in STRENGTHS for transform in digit_crops(strength))
    assert "mirror" in photo_crops()[0].unsafe_for_digits
    assert "mirror" in MultiCrop(first=(), small=(Flip(),), local=1).unsafe_for_digits


@pytest.mark.parametrize(("preset", "most"), [(digit_crops, 1.5), (photo_crops, 2)])
def test_strength_changes_the_content_of_the_crops_but_not_the_crops(preset, most):
    crops = [[part[0].crop for part in (one.first, one.small)] for strength in (0, 1, most) for one in preset(strength)]
    assert crops[0] == crops[1] == crops[2]
    batch = random_batch(32, 3, 28, 28)
    change = [
        sum((a - b).square().mean() for a, b in zip(views_of(batch, *preset(strength)), views_of(batch, *preset(0))))
        for strength in (0.25, 1)
    ]
    assert 0 < change[0] < change[1]


def test_photo_crops_have_the_options_of_dino():
    """Caron et al. 2021, appendix, and its published code."""
    (multicrop,) = photo_crops()
    parts = {name: getattr(multicrop, name) for name in ("first", "second", "small")}
    probabilities = {
        name: {type(part).__name__: getattr(part, "probability", 1) for part in transforms} for name, transforms in parts.items()
    }
    shared = {"Warp": 1, "Flip": 0.5, "Jitter": 0.8, "Gray": 0.2}
    assert probabilities == {
        "first": shared | {"Blur": 1.0},
        "second": shared | {"Blur": 0.1, "Solarize": 0.2},
        "small": shared | {"Blur": 0.5},
    }
    jitter = multicrop.first[2]
    assert (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) == (0.4, 0.4, 0.2, 0.1)
    assert {part[0].fill for part in parts.values()} == {"edge"}, "black would darken the border of a crop"
    assert [part[0].crop for part in parts.values()] == [(0.4, 1.0), (0.4, 1.0), (0.05, 0.4)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PRESETS)
def test_gpu_gives_the_same_views(name):
    batch = random_batch(16, 3, 28, 28)
    on_gpu = views_of(Batch(batch.images.cuda(), batch.targets.cuda()), *PRESETS[name])
    for expected, result in zip(views_of(batch, *PRESETS[name]), on_gpu):
        assert (result.cpu() - expected).abs().mean() < 1e-3


def test_a_callable_in_a_multicrop_may_return_images_that_must_not_be_overwritten():
    kept = torch.rand(8, 3, 32, 32)
    before = kept.clone()
    constant = lambda batch, generator: batch._replace(images=kept)  # noqa: E731
    views = augment.apply([MultiCrop(first=(constant, Solarize(probability=1.0)))], random_batch(4, 3, 32, 32), seeded()).views
    assert torch.equal(kept, before) and torch.equal(views[0], torch.where(kept >= 0.5, 1 - kept, kept))
    to_rgb = lambda batch, generator: batch._replace(images=batch.images.expand(-1, 3, -1, -1))  # noqa: E731
    views = augment.apply([MultiCrop(first=(to_rgb, Gray(probability=1.0)))], random_batch(4, 1, 32, 32), seeded()).views
    assert views[0].shape == (8, 3, 32, 32)


def test_a_callable_or_transform_in_a_multicrop_may_change_the_size():
    class Half:
        def __call__(self, batch, generator):
            return batch._replace(images=F.avg_pool2d(batch.images, 2))

        def output_size(self, height, width):
            return height // 2, width // 2

    class HalfTransform(Transform):
        output_size = Half.output_size

        def draw(self, shape, generator):
            return {}

        def change(self, batch, random):
            return Half()(batch, None)

    for half in (Half(), HalfTransform()):
        crops = MultiCrop(first=(half, Noise()))
        assert crops.table(32) == [("global", 2, (16, 16))]
        assert augment.apply([crops], random_batch(4, 3, 32, 32), seeded()).views[0].shape == (8, 3, 16, 16)
