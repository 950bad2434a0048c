"""Views made by compiled code (the kernel "native") equal those of PyTorch, and other images are left to PyTorch."""

import threading
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toys import TINY_VIT

from smallvit import DINO, Run, arrays, augment, native
from smallvit.augment import Batch, Blur, Flip, Gray, Jitter, MultiCrop, Solarize, Warp
from smallvit.augment.kernels import KERNELS, PYTORCH
from smallvit.native import native_views
from smallvit.numerics import Numerics
from smallvit.train.loop import Training
from smallvit.train.stack import Stack

NATIVE = Numerics(kernel="native")
MISSING = native.reason_against("views.cpp") or ""
pytestmark = pytest.mark.skipif(MISSING.startswith("no C++ compiler"), reason=MISSING)  # one that fails is no reason to skip
close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rand(*shape, seed=0):
    return torch.rand(shape, generator=seeded(seed))


def batch_of(images):
    return Batch(images, torch.ones(len(images), 1))


@pytest.fixture
def calls(monkeypatch):
    """The compiled functions that were looked up, which fills up while a test runs."""
    found, usual = [], native.views.library
    monkeypatch.setattr(native.views, "library", lambda source: (found.append(source), usual(source))[1])
    return found


# Each computation


def grid_sample(images, grid, padding):
    """Crops as in `Kernels`, one at a time by PyTorch's function."""
    crops = []
    for number in range(grid.shape[1]):
        image, points = images[number % len(images)][None], grid[:, number].permute(1, 2, 0)[None]
        crops.append(F.grid_sample(image, points, padding_mode=padding, align_corners=False))
    return torch.cat(crops)


SHAPES = [  # images, channels, height, width, crops of each, rows, columns
    (1, 3, 32, 32, 1, 16, 16), (3, 3, 32, 32, 2, 32, 32), (2, 4, 7, 11, 3, 5, 17), (2, 5, 11, 7, 1, 17, 5), (1, 8, 1, 9, 2, 3, 33),
    (2, 3, 9, 1, 2, 1, 1), (1, 9, 1, 1, 1, 4, 4), (2, 1, 8, 8, 2, 6, 6), (2, 2, 8, 8, 2, 6, 6), (40, 3, 5, 6, 7, 8, 9),
]  # fmt: skip


@pytest.mark.parametrize("reach", [0.5, 1.5, 100.0])
@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_crops_are_sampled_as_by_grid_sample(shape, padding, reach, calls):
    b, c, h, w, count, rows, columns = shape
    images, grid = rand(b, c, h, w), reach * (2 * rand(2, count * b, rows, columns) - 1)
    with native_views():
        crops = KERNELS.get().sample(images, grid, padding)
        strided = KERNELS.get().sample(images, grid.mT.contiguous().mT, padding)
    assert len(calls) == 2 and torch.equal(crops, strided)
    close(crops, grid_sample(images, grid, padding))


@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_pixels_that_are_nan_or_infinite_spread_as_in_grid_sample(padding):
    images = rand(4, 3, 6, 6)
    images[0, 1, 2, 3] = images[1, :, 0, 0] = images[2, 2, 5, 5] = float("nan")
    images[3, 0, 5, 0] = float("inf")
    grid = 1.5 * (2 * rand(2, 12, 20, 20) - 1)
    with native_views():
        crops = KERNELS.get().sample(images, grid, padding)
    expected = grid_sample(images, grid, padding)
    assert expected.isnan().any() and not expected.isnan().all() and expected.isinf().any()
    close(crops, expected, equal_nan=True)


def test_points_far_outside_do_not_see_a_nan_at_the_border():
    far = torch.tensor([-1e30, -1e9, -5.0, 5.0, 1e9, 1e30])
    grid = torch.stack([far, torch.zeros(6)])[:, None, None]
    for channels in (1, 3):
        images = torch.full((1, channels, 4, 4), float("nan"))
        with native_views():
            assert torch.equal(KERNELS.get().sample(images, grid, "zeros"), torch.zeros(1, channels, 1, 6))
            assert torch.equal(KERNELS.get().sample(images, grid.flip(0), "zeros"), torch.zeros(1, channels, 1, 6))


def test_images_that_are_not_contiguous_give_the_same_crops(calls):
    images = rand(3, 8, 10, 5).permute(0, 3, 1, 2)[:, 1:, ::2]
    warp = Warp(rotate=20, shift=0.3)
    expected = warp(batch_of(images), seeded()).images
    with native_views():
        close(warp(batch_of(images), seeded()).images, expected)
        close(warp(batch_of(images.to(memory_format=torch.channels_last)), seeded()).images, expected)
    assert len(calls) == 2


TRANSFORMS = [
    Jitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1), Jitter(brightness=1.0, contrast=1.0, hue=0.5, probability=0.3),
    Gray(probability=1.0), Gray(probability=0.4), Blur(probability=1.0), Blur(probability=0.5, sigma=(0, 0.02)),
    Blur(sigma=(0.5, 0.5)), Blur(sigma=(0, 1e-7)), Warp(rotate=15, shear=12, scale=0.2, shift=0.1, crop=(0.1, 0.6), size=(9, 20)),
]  # fmt: skip


@pytest.mark.parametrize("size", [(1, 1), (16, 16), (5, 37), (32, 3)], ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_transforms_change_images_as_without_the_kernel_and_not_their_input(transform, size, calls):
    images = 1.4 * rand(9, 3, *size) - 0.2
    before = images.clone()
    expected = transform(batch_of(images), seeded()).images
    strange = images.to(memory_format=torch.channels_last)
    with native_views():
        found = transform(batch_of(images), seeded()).images
        assert len(calls) == 1
        close(found, expected)
        close(transform(batch_of(strange), seeded()).images, expected)
        alone = transform(batch_of(images[:1]), seeded()).images
    assert torch.equal(images, before) and torch.equal(strange, before)
    close(alone, transform(batch_of(images[:1]), seeded()).images)


def test_gray_images_have_three_equal_channels():
    with native_views():
        red, green, blue = Gray(probability=1.0)(batch_of(rand(5, 3, 7, 19)), seeded()).images.unbind(1)
    assert torch.equal(red, green) and torch.equal(red, blue)


def test_pixels_that_are_nan_stay_nan_in_a_change_of_color():
    images = rand(2, 3, 4, 4)
    images[0, 1, 2, 3] = float("nan")
    jitter = Jitter(brightness=0.4, hue=0.1)
    with native_views():
        close(jitter(batch_of(images), seeded()).images, jitter(batch_of(images), seeded()).images, equal_nan=True)
        assert jitter(batch_of(images), seeded()).images[0].isnan().any()


# Whole views

VIEWS = {
    "photos": augment.photo_crops(local=3, size=7),
    "strong photos": augment.photo_crops(2.0, local=1, size=20),
    "photos without color": augment.photo_crops(local=2, size=7, color=False),
    "digits": augment.digit_crops(local=2, size=7),
    "black outside": (
        MultiCrop(
            first=(Warp(rotate=40, shift=0.4, force=True), Flip()), second=(Warp(scale=0.9), Solarize()),
            small=(Warp(crop=(0.1, 0.4), size=5), Blur()), local=3,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crops", VIEWS.values(), ids=VIEWS)
def test_views_agree_with_those_without_the_kernel(crops, channels, calls):
    if channels == 1 and crops in (VIEWS["photos"], VIEWS["strong photos"]):
        crops = VIEWS["photos without color"]
    batch = batch_of(rand(6, channels, 12, 15))
    expected = augment.apply(crops, batch, seeded()).views
    assert not calls
    with native_views():
        views = augment.apply(crops, batch, seeded()).views
    assert calls
    assert len(views) == len(expected) == 2
    for found, other in zip(views, expected):
        close(found, other)


@pytest.mark.parametrize("crops", VIEWS.values(), ids=VIEWS)
def test_parts_and_threads_do_not_change_a_bit(crops):
    batch = batch_of(rand(64, 3, 32, 32))
    parts = [batch_of(part) for part in batch.images.split(16)]
    before = torch.get_num_threads()
    results = []
    with native_views():
        alone = [augment.apply(crops, part, seeded(seed)).views for seed, part in enumerate(parts)]
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                results.append(augment.apply(crops, batch, [seeded(seed) for seed in range(4)]).views)
            finally:
                torch.set_num_threads(before)
    for number, views in enumerate(results[0]):
        assert torch.equal(views, torch.cat([part[number] for part in alone]))
        assert torch.equal(views, results[1][number])


# Who gets the kernel


@pytest.fixture
def photos(tmp_path):
    """Random photos of 12 x 12 pixels in color, as a data set."""
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (69, 12, 12, 3), dtype=np.uint8), np.arange(69) % 3
    parts = {"train_images": images[:60], "train_labels": labels[:60], "test_images": images[60:], "test_labels": labels[60:]}
    np.savez(tmp_path / "photos.npz", **parts)
    return partial(arrays, path=str(tmp_path / "photos.npz"))


RUN = Run(model=TINY_VIT, val=0, steps=4, batch=5)
RUNS = {"views": RUN.vary(objective=DINO, augment=augment.photo_crops(local=2, size=8)), "photos": RUN.vary(augment=augment.photos())}


def trainings(run, data, numerics, seeds):
    return [Training(run.vary(seed=seed), data, data.subset(labels=None, val=0, seed=seed), "cpu", numerics=numerics) for seed in seeds]


@pytest.mark.parametrize("name", RUNS)
def test_training_with_the_kernel_sees_the_same_batches(name, photos, calls):
    data = photos()
    (plain,), (other,) = (trainings(RUNS[name], data, numerics, [0]) for numerics in (Numerics(), NATIVE))
    for _ in range(3):
        batches = [training.next_batch() for training in (plain, other)]
        close(batches[1].images, batches[0].images)
        assert len(batches[0].views) == len(batches[1].views) == 2 * (name == "views")
        for expected, found in zip(batches[0].views, batches[1].views):
            close(found, expected)
        for training in (plain, other):
            training.step += 1
    assert calls and plain.trace.batches == other.trace.batches


def test_stack_with_the_kernel_sees_the_batches_of_its_members(photos, calls):
    data, run = photos(), RUNS["photos"]
    stack = Stack(trainings(run, data, NATIVE, [0, 1]))
    before = len(calls)
    together = stack.next_batch()
    assert len(calls) == before + 1
    for number, member in enumerate(trainings(run, data, NATIVE, [0, 1])):
        assert torch.equal(together.images[number], member.next_batch().images)
    for number, member in enumerate(trainings(run, data, Numerics(), [0, 1])):
        close(together.images[number], member.next_batch().images)


def test_without_a_compiler_nothing_changes(tmp_path, monkeypatch):
    crops, batch = VIEWS["photos"], batch_of(rand(6, 3, 12, 15))
    expected = augment.apply(crops, batch, seeded()).views
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    forget_compiler()
    try:
        with native_views():
            views = augment.apply(crops, batch, seeded()).views
    finally:
        forget_compiler()
    assert all(map(torch.equal, views, expected))


def forget_compiler():
    """Let the next call look for a compiler again."""
    native.compiler.library.cache_clear()
    native.compiler.reason_against.cache_clear()


def test_images_with_a_gradient_are_left_to_pytorch(calls):
    images = rand(3, 3, 8, 8).requires_grad_()
    with native_views():
        changed = Warp(shift=0.1)(Jitter(hue=0.1)(batch_of(images), seeded()), seeded()).images
        changed = Gray(probability=1.0)(Blur(probability=1.0)(batch_of(changed), seeded()), seeded()).images
    (gradient,) = torch.autograd.grad(changed.sum(), images)
    assert gradient.abs().sum() > 1 and not calls


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # of PyTorch, about its own speed and future
def test_transforms_of_pytorch_and_tools_that_watch_it_see_its_operations(calls):
    jitter, images = Jitter(contrast=0.4, hue=0.1), rand(2, 3, 3, 4, 4)
    random = jitter.draw(images[0].shape, seeded())

    def change(images):
        return jitter.change(batch_of(images), random).images

    expected = torch.stack([change(each) for each in images])
    with native_views():
        assert torch.equal(torch.vmap(change)(images), expected)
        close(torch.func.functionalize(change)(images[0]), expected[0])
        assert torch.func.jvp(change, (images[0],), (images[0],))[1].abs().sum() > 1
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(images[0], images[0])
            assert torch.autograd.forward_ad.unpack_dual(change(dual)).tangent is not None
    assert not calls


def test_small_crops_of_large_images_are_left_to_pytorch(calls):
    with native_views():
        Warp(crop=(0.01, 0.02), size=8)(batch_of(rand(2, 3, 64, 64)), seeded())
        assert not calls
        Warp(crop=(0.01, 0.02), size=64)(batch_of(rand(2, 3, 64, 64)), seeded())
    assert calls == ["views.cpp"]


def test_images_that_are_changed_in_place_cannot_be_used_in_a_backward_pass():
    for transform in (Gray(probability=1.0), Blur(probability=1.0)):
        images = rand(2, 3, 6, 6)
        weight = torch.ones(1, requires_grad=True)
        product = images * weight
        with native_views():
            transform.change(batch_of(images), transform.draw(images.shape, seeded()))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_no_images_and_other_types_are_as_in_pytorch():
    empty, none = rand(0, 3, 5, 5), torch.zeros(0, dtype=torch.int64)
    images, index, sigma = rand(2, 3, 5, 5), torch.tensor([1], dtype=torch.int32), torch.tensor([0.7], dtype=torch.float64)
    expected = [images.clone(), images.clone()]
    PYTORCH.gray(expected[0], index.long())
    PYTORCH.blur(expected[1], index.long(), sigma.float())
    with native_views():
        kernels = KERNELS.get()
        kernels.gray(empty, none)
        kernels.blur(empty, none, sigma[:0])
        assert kernels.recolor(empty, rand(0, 3, 3), rand(0, 1, 1)).shape == empty.shape
        for change, options, wanted in ((kernels.gray, (), expected[0]), (kernels.blur, (sigma,), expected[1])):
            changed = images.clone()
            change(changed, index, *options)
            close(changed, wanted)


def test_a_note_says_if_only_the_code_for_views_cannot_be_compiled(monkeypatch, capsys):
    usual = native.views.reason_against
    monkeypatch.setattr(native.views, "reason_against", lambda *source: "no space" if source else usual())
    native.views.note.cache_clear()
    with native_views():
        assert KERNELS.get() is PYTORCH
    assert capsys.readouterr().err == "note: the native kernel cannot make views: no space; PyTorch makes them\n"
    native.views.note.cache_clear()


def test_nothing_is_compiled_for_a_run_without_transforms(photos, monkeypatch):
    monkeypatch.setattr("smallvit.train.batches.making_views", None)  # a call would be an error
    (training,) = trainings(RUN.vary(augment=()), photos(), NATIVE, [0])
    assert len(training.next_batch().images) == RUN.batch


def test_other_threads_and_code_after_an_error_do_not_use_the_kernel():
    seen = []
    with pytest.raises(KeyboardInterrupt), native_views():
        assert KERNELS.get() is not PYTORCH
        thread = threading.Thread(target=lambda: seen.append(KERNELS.get()))
        thread.start()
        thread.join()
        raise KeyboardInterrupt
    assert seen == [PYTORCH] and KERNELS.get() is PYTORCH


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("-mavx2", "-mfma"), ()], ids=["AVX2", "portable"])
def test_other_processors(flags, tmp_path, monkeypatch):
    if "avx2" not in native.compiler.processor():
        pytest.skip("this processor has no AVX2")
    batch = batch_of(rand(6, 3, 12, 15))
    expected = augment.apply(VIEWS["photos"], batch, seeded()).views
    monkeypatch.setenv("SMALLVIT_CACHE", str(tmp_path))
    monkeypatch.setattr(native.compiler, "FOR_THIS_PROCESSOR", (flags,))
    forget_compiler()
    try:
        with native_views():
            views = augment.apply(VIEWS["photos"], batch, seeded()).views
            assert KERNELS.get() is not PYTORCH
    finally:
        forget_compiler()
    for found, other in zip(views, expected):
        close(found, other)
