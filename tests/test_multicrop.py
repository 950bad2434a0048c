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
from smallvit.augment import Batch, Flip, Mixup, MultiCrop, Noise, Warp, digit_crops, photo_crops
from smallvit.components import describe, rebuild
from smallvit.data import mnist

MNIST = Path(os.environ.get("SMALLVIT_DATA", "")) / "MNIST" / "raw"
needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"needs MNIST and there is none in {MNIST}")
STRENGTHS = (0.0, 0.5, 1.0, 1.5)
PRESETS = {
    "digits": digit_crops(local=3, size=7),
    "photos": photo_crops(local=3, size=7),
    "photos without colour": photo_crops(local=3, size=7, colour=False),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(b=8, c=1, h=12, w=12):
    return Batch(torch.rand(b, c, h, w, generator=seeded(99)), F.one_hot(torch.arange(b) % 10, 10).float())


def views(steps, given, seed=0):
    return augment.apply(steps if isinstance(steps, tuple) else (steps,), given, seeded(seed)).views


# The window of Warp


@pytest.mark.parametrize(("h", "w", "size"), [(12, 12, None), (9, 15, (6, 7)), (16, 7, 20)])
@pytest.mark.parametrize("aim", ["anywhere", "ink"])
@pytest.mark.parametrize("turned", [False, True], ids=["upright", "turned"])
def test_the_window_is_the_one_drawn_and_what_is_in_it_is_warped(h, w, size, aim, turned):
    moves = dict(rotate=25, scale=0.3, shear=20, shift=0.1) if turned else {}
    given, b = batch(6, 2, h, w), 6
    given.images[:, :, : h // 2] *= 0.7
    images = Warp(**moves, crop=(0.1, 0.6), aspect=2, aim=aim, size=size)(given, seeded(3)).images
    generator = seeded(3)
    window, affine = torch.rand(4, b, generator=generator).tolist(), (2 * torch.rand(6, b, generator=generator) - 1).tolist()
    rows, columns = (h, w) if size is None else (size, size) if isinstance(size, int) else size
    for i in range(b):
        area, shape, at_x, at_y = (draw[i] for draw in window)
        area = 0.1 + 0.5 * area
        wide = exp((2 * shape - 1) * min(log(2), -log(area)))
        part_x, part_y = (area * wide) ** 0.5, (area / wide) ** 0.5
        x, y = (2 * at_x - 1) * (1 - part_x), (2 * at_y - 1) * (1 - part_y)
        if aim == "ink":
            left, pixel = at_x * given.images[i].mean(0).sum().item(), -1
            while left >= 0:
                pixel += 1
                left -= given.images[i, :, pixel // w, pixel % w].mean().item()
            x, y = (2 * (pixel % w) + 1) / w - 1, (2 * (pixel // w) + 1) / h - 1
            x, y = min(max(x, part_x - 1), 1 - part_x), min(max(y, part_y - 1), 1 - part_y)
        u = [draw[i] for draw in affine]
        angle, lean = radians(25 * u[0]), radians(20 * u[1])
        turn = torch.tensor([[cos(angle), -sin(angle)], [sin(angle), cos(angle)]])
        zoom = torch.diag(torch.tensor([exp(log(1.3) * u[2]), exp(log(1.3) * u[3])]))
        matrix, shift = turn @ torch.tensor([[1, tan(lean)], [0, 1]]) @ zoom, 0.1 * min(h, w) * torch.tensor(u[4:])
        if not turned:
            matrix, shift = torch.eye(2), torch.zeros(2)
        pixels = torch.diag(torch.tensor([w / 2, h / 2]))  # from grid_sample's units
        window_of = torch.diag(torch.tensor([part_x, part_y]))
        linear = window_of @ pixels.inverse() @ matrix @ pixels
        offset = torch.tensor([x, y]) - window_of @ pixels.inverse() @ matrix @ shift
        grid = F.affine_grid(torch.cat([linear, offset[:, None]], dim=1)[None], [1, 2, rows, columns], align_corners=False)
        expected = F.grid_sample(given.images[i : i + 1], grid, align_corners=False)[0]
        torch.testing.assert_close(images[i], expected, atol=2e-5, rtol=0)


def test_a_window_of_whole_pixels_is_a_slice():
    h, w = 10, 14
    given = batch(h * w, 2, h, w)
    images = given.images * 1e-5
    for i in range(h * w):
        images[i, :, i // w, i % w] = 1  # so bright that the windows are about it
    seen = Warp(crop=(0.25, 0.25), aspect=1, aim="ink", size=(5, 7))(given._replace(images=images), seeded(1)).images
    for i in range(h * w):
        top, left = min(max(i // w - 2, 0), h - 5), min(max(i % w - 3, 0), w - 7)
        torch.testing.assert_close(seen[i], images[i, :, top : top + 5, left : left + 7], atol=2e-6, rtol=0)


def test_windows_are_spread_evenly_over_areas_shapes_and_places():
    warp, b = Warp(crop=(0.2, 0.7), aspect=4 / 3), 4000
    middle, part = warp.window(torch.empty(b, 1, 20, 30), 1, seeded())
    area, wide = part[0] * part[1], (part[0] / part[1]).log()
    assert kstest(area, uniform(0.2, 0.5).cdf).pvalue > 0.01
    assert kstest(wide, uniform(-log(4 / 3), 2 * log(4 / 3)).cdf).pvalue > 0.01
    assert ((middle.abs() + part) < 1 + 1e-6).all(), "a window leaves the image"
    for place in middle / (1 - part):
        assert kstest(place, uniform(-1, 2).cdf).pvalue > 0.01


@pytest.mark.parametrize("crop", [(0.05, 0.4), (0.4, 1.0)], ids=str)
def test_windows_are_much_like_those_of_random_resized_crop(crop):
    from torchvision.transforms import RandomResizedCrop

    middle, part = Warp(crop=crop).window(torch.empty(3000, 1, 64, 64), 1, seeded())
    torch.manual_seed(0)
    theirs = torch.tensor([RandomResizedCrop.get_params(torch.empty(1, 64, 64), crop, (3 / 4, 4 / 3)) for _ in range(3000)])
    top, left, height, width = theirs.T / 64
    for ours, other in (
        (part[0] * part[1], height * width),
        ((part[0] / part[1]).log(), (width / height).log()),
        (part[0], width),
        ((middle[0] + 1) / 2, left + width / 2),
        ((middle[1] + 1) / 2, top + height / 2),
    ):
        assert ours.mean().item() == pytest.approx(other.mean().item(), abs=0.02 if crop[1] < 1 else 0.07)
        assert ours.std().item() == pytest.approx(other.std().item(), rel=0.1 if crop[1] < 1 else 0.2)


def test_another_size_without_a_window_is_a_plain_resize():
    given = batch(3, 2, 12, 8)
    seen = Warp(size=(7, 20))(given, seeded()).images
    expected = F.interpolate(given.images, (7, 20), mode="bilinear", align_corners=False)
    assert (seen - expected)[:, :, 1:-1, 2:-2].abs().max() < 1e-5, "at the border there is black outside"


@pytest.mark.parametrize("times", [1, 3])
def test_views_of_many_are_warps_of_copies(times):
    warp, given = Warp(rotate=20, elastic=0.05, crop=(0.2, 0.5), aim="ink", size=9), batch(5, 3)
    copies = Batch(given.images.repeat(times, 1, 1, 1), given.targets.repeat(times, 1))
    torch.testing.assert_close(warp.views(given.images, times, seeded()), warp(copies, seeded()).images)


# No window is blank


@cache
def handwritten(name):
    if name == "mnist":
        return mnist().train.pixels(slice(0, 3000))
    return torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16


def peak(images):
    return images.flatten(1).amax(dim=1)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize(
    ("name", "size"), [("bundled", 4), ("bundled", 16), pytest.param("mnist", 16, marks=needs_mnist)], ids=str
)
def test_every_view_of_a_digit_shows_ink_half_as_bright_as_its_brightest(name, size, strength):
    images = handwritten(name)
    for seen in views(digit_crops(strength, local=2, size=size), Batch(images, torch.ones(len(images), 1))):
        assert (peak(seen) >= peak(images).repeat(2) / 2 - 1e-5).all()


def test_ink_stays_in_sight_through_the_wildest_warp_and_the_smallest_window():
    images = handwritten("bundled")[:500]
    given = Batch(images, torch.ones(500, 1))
    wild = Warp(rotate=180, scale=1, shift=1, elastic=0.5, crop=(0.01, 0.05), size=5, force=True)
    assert (peak(wild(given, seeded()).images) < peak(images) / 2).float().mean() > 0.2
    for warp in (dataclasses.replace(wild, aim="ink"), dataclasses.replace(wild, crop=(1.0, 1.0), aim="ink")):
        assert (peak(warp(given, seeded()).images) >= peak(images) / 2 - 1e-5).all()


def test_only_blank_windows_are_moved(monkeypatch):
    images = handwritten("bundled")[:500]
    warp, given = (
        Warp(rotate=30, shift=0.3, elastic=0.1, crop=(0.05, 0.1), aim="ink", size=8),
        Batch(images, torch.ones(500, 1)),
    )
    moved = warp(given, seeded()).images
    monkeypatch.setattr(Warp, "onto_ink", lambda self, seen, images, grid: seen)
    plain = warp(given, seeded()).images
    blank = peak(plain) < peak(images) / 2
    assert 0 < blank.sum() < 250
    assert torch.equal(moved[~blank], plain[~blank]) and not torch.equal(moved[blank], plain[blank])


def test_a_black_image_is_no_error():
    given = Batch(torch.zeros(4, 1, 28, 28), torch.ones(4, 1))
    assert all((seen == 0).all() for seen in views(digit_crops(), given))


# MultiCrop


def test_views_come_view_after_view_each_its_own_draw_and_leave_the_batch_alone():
    b = 16
    level = torch.arange(1, b + 1).reshape(b, 1, 1, 1) / b
    given = Batch(level.expand(b, 1, 12, 12).contiguous(), torch.eye(b))
    window, part = Warp(crop=(0.4, 1.0), fill="edge"), Warp(crop=(0.1, 0.4), fill="edge", size=6)
    step = MultiCrop(first=(window,), small=(part,), local=3)
    out = step(given, seeded())
    assert out.images is given.images and out.targets is given.targets
    whole, small = out.views
    assert whole.shape == (2 * b, 1, 12, 12) and small.shape == (3 * b, 1, 6, 6)
    assert torch.allclose(whole, level.repeat(2, 1, 1, 1)) and torch.allclose(small, level.repeat(3, 1, 1, 1))
    alike = Batch(batch(1).images.repeat(b, 1, 1, 1), torch.eye(b))
    for seen in step(alike, seeded()).views:
        assert len(seen.flatten(1).unique(dim=0)) == len(seen)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("c", "h", "w"), [(1, 28, 28), (3, 32, 32), (3, 24, 40), (4, 30, 18)], ids=str)
def test_views_of_any_channels_and_rectangles(name, c, h, w):
    if name == "photos" and c != 3:
        with pytest.raises(ValueError, match=f"needs 3 channels, got {c}"):
            views(PRESETS[name], batch(4, c, h, w))
        return
    given = batch(4, c, h, w)
    kept, state = given.images.clone(), torch.get_rng_state()
    seen = views(PRESETS[name], given)
    assert [tuple(one.shape) for one in seen] == [(8, c, h, w), (12, c, 7, 7)]
    assert all(one.dtype == torch.float32 and one.min() >= 0 and one.max() <= 1 + 1e-6 for one in seen)
    assert torch.equal(given.images, kept), "the batch given was changed"
    assert all(map(torch.equal, seen, views(PRESETS[name], given)))
    assert not any(map(torch.equal, seen, views(PRESETS[name], given, seed=1)))
    assert torch.equal(torch.get_rng_state(), state), "something is drawn elsewhere"


@pytest.mark.parametrize("preset", [digit_crops, photo_crops])
def test_without_local_views_the_global_ones_are_the_same(preset):
    given = batch(6, 3)
    (alone,) = views(preset(local=0), given)
    whole, small = views(preset(local=5), given)
    assert torch.equal(alone, whole) and len(small) == 30


def test_the_second_view_and_steps_of_other_kinds_are_used():
    given = batch(6)
    (seen,) = views(MultiCrop(first=(), second=(Flip(probability=1),)), given)
    assert torch.equal(seen, torch.cat([given.images, given.images.flip(-1)]))
    (seen,) = views(MultiCrop(first=(Noise(std=0.1), Warp(crop=(0.5, 0.9)))), given)
    assert not torch.equal(seen[:6], seen[6:])
    kept = Mixup()(MultiCrop(first=())(given, seeded()), seeded()).views
    assert len(kept) == 1, "a step after MultiCrop lost them"


def test_the_table_says_what_a_model_will_see():
    (step,) = digit_crops(local=4, size=16)
    assert step.table(28) == [("global", 2, (28, 28)), ("local", 4, (16, 16))]
    assert step.table((24, 40)) == [("global", 2, (24, 40)), ("local", 4, (16, 16))]
    assert MultiCrop(first=()).table(28) == [("global", 2, (28, 28))]
    step = MultiCrop(first=(Warp(size=(20, 24)), Flip()), small=(Flip(), Warp(size=8)), local=1)
    assert step.table(28) == [("global", 2, (20, 24)), ("local", 1, (8, 8))]
    assert [tuple(one.shape[2:]) for one in views(step, batch(2))] == [size for _, _, size in step.table(12)]


@pytest.mark.parametrize("preset", [digit_crops, photo_crops])
def test_views_are_values_that_a_record_can_hold(preset):
    (step,) = preset()
    assert rebuild(describe(step)) == step and hash(rebuild(describe(step))) == hash(step)
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.local = 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MultiCrop(first=Warp()), r"MultiCrop\(first=Warp\(.*expected a tuple of steps"),
        (lambda: MultiCrop(first=None), r"MultiCrop\(first=None\): expected a tuple of steps"),
        (lambda: MultiCrop(first=(), small=(3,)), r"MultiCrop\(small=\(3,\)\): expected a tuple of steps"),
        (lambda: MultiCrop(first=(), local=-1), r"MultiCrop\(local=-1\): expected how many"),
        (lambda: MultiCrop(first=(), small=(Flip(),), local=2.0), r"MultiCrop\(local=2.0\): expected how many"),
        (lambda: MultiCrop(first=(), local=2), r"MultiCrop\(local=2\) has no steps for them"),
        (lambda: MultiCrop(first=()).table("28"), r"image_size is '28'; expected a side"),
        (lambda: MultiCrop(first=(Warp(size=8),), second=(Warp(size=9),))(batch(), seeded()), r"\(8, 8\) and \(9, 9\) pixels"),
        (lambda: digit_crops(1.6), r"digit_crops\(strength=1.6\): expected 0 to 1.5"),
        (lambda: photo_crops(-1), r"photo_crops\(strength=-1\): expected 0 to 2"),
        (lambda: digit_crops(size=0), r"Warp\(size=0\)"),
        (lambda: photo_crops(local=True), r"MultiCrop\(local=True\)"),
    ],
)  # fmt: skip
def test_what_is_no_set_of_views_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# Presets


def test_digits_are_safe_in_digit_views_and_not_in_photo_views():
    assert all(step.unsafe_for_digits is None for strength in STRENGTHS for step in digit_crops(strength))
    assert "mirror" in photo_crops()[0].unsafe_for_digits
    assert "mirror" in MultiCrop(first=(), small=(Flip(),), local=1).unsafe_for_digits


@pytest.mark.parametrize(("preset", "most"), [(digit_crops, 1.5), (photo_crops, 2)])
def test_strength_changes_what_is_in_the_windows_and_not_the_windows(preset, most):
    sets = (off,), _, _ = preset(0), preset(), preset(most)
    crops = [[steps[0].crop for steps in (one.first, one.small)] for (one,) in sets]
    assert crops[0] == crops[1] == crops[2]
    given = batch(32, 3, 28, 28)
    drift = [
        sum((a - b).square().mean() for a, b in zip(views(preset(strength), given), views((off,), given)))
        for strength in (0.25, 1)
    ]
    assert 0 < drift[0] < drift[1]


def test_photo_views_are_dinos():
    """Caron et al. 2021, appendix, and its published code."""
    (step,) = photo_crops()
    chances = {
        name: {type(part).__name__: getattr(part, "probability", 1) for part in getattr(step, name)}
        for name in ("first", "second", "small")
    }
    usual = {"Warp": 1, "Flip": 0.5, "Jitter": 0.8, "Gray": 0.2}
    assert chances == {
        "first": usual | {"Blur": 1.0},
        "second": usual | {"Blur": 0.1, "Solarize": 0.2},
        "small": usual | {"Blur": 0.5},
    }
    jitter = step.first[2]
    assert (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) == (0.4, 0.4, 0.2, 0.1)
    assert {one[0].fill for one in (step.first, step.second, step.small)} == {"edge"}, "black would darken the rim of a window"
    assert [one[0].crop for one in (step.first, step.second, step.small)] == [(0.4, 1.0), (0.4, 1.0), (0.05, 0.4)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", PRESETS)
def test_a_gpu_sees_the_same_views(name):
    given = batch(16, 3, 28, 28)
    there = views(PRESETS[name], Batch(given.images.cuda(), given.targets.cuda()))
    for expected, got in zip(views(PRESETS[name], given), there):
        assert (got.cpu() - expected).abs().mean() < 1e-3
