"""Data sets: the subsets that a seed draws, your own files and arrays, public data sets, and the preprocessing of model input."""

import gc
import hashlib
import json
import os
import pickle
import socket
import subprocess
import sys
import urllib.request
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from toys import slow_but

from smallvit import data
from smallvit.data import Preprocess
from smallvit.data.dataset import to_pixels
from smallvit.data.decode import read_image
from smallvit.rng import shuffled

ROOT = Path(os.environ.get("SMALLVIT_DATA") or Path(__file__).parents[2] / "shared" / "data")
needs_mnist = pytest.mark.skipif(not (ROOT / "MNIST" / "raw").is_dir(), reason=f"needs MNIST and there is none in {ROOT}")

PUBLISHED = {
    ("digits", 100, 0): "89e8405ff9da54822a78110140a17db34ed49b6162a5003052b74f8829bc911f",
    ("digits", 100, 1): "a4e274866f0547008ae1bb2bbfcf71b218e324f1d81115e1b0eb58310e31939b",
    ("mnist", 100, 0): "848b3277a2f3e834052ee1220605fa45d815e84cd621d4403f0a911241026af0",
    ("mnist", 100, 1): "93bd08f30a1886bb020d5116a92a76fd4c0b50e150f887fda34ddbbb52f38338",
    ("mnist", 1000, 0): "d6c653f6fdfa1d2abd772401eed289eaae0158561f9925d31896915b3acd43d6",
    ("mnist", 1000, 1): "60138b34a7169032a27a74df7b5035c3d2949ac48fdbfa34154dd3fd5235ed94",
}


def toy_dataset(counts=(40, 25, 15, 20), val=None):
    """Distinct 1 x 2 images, `counts` of each class; image i has the pixels i // 256 and i % 256."""
    number = torch.arange(sum(counts)).view(-1, 1, 1, 1)
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[order]
    spec = data.DataSpec(name="toy", channels=1, size=(1, 2), classes=tuple("abcdefghij"[: len(counts)]), mean=(0.0,), std=(1.0,))
    images = data.Images(torch.cat([number // 256, number % 256], 3).to(torch.uint8), labels, spec)
    return data.Dataset(spec=spec, train=images, test=data.HeldOut(images), val=val and images.take(torch.arange(val)))


def pixel_tuples(images):
    return [tuple(image.flatten().tolist()) for image in images.images]


# Subsets


@pytest.mark.parametrize("key", [pytest.param(key, marks=[needs_mnist] * (key[0] == "mnist")) for key in PUBLISHED], ids=str)
def test_subsets_equal_the_published_ones_and_use_no_global_generator(key):
    name, labels, seed = key
    dataset = data.digits() if name == "digits" else data.mnist(str(ROOT))
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    subset = dataset.subset(labels=labels, val=None, seed=seed)
    assert subset.sha256 == PUBLISHED[key]
    assert subset.sha256 == hashlib.sha256(np.array(subset.index.tolist(), "<i8").tobytes()).hexdigest()
    assert torch.equal(torch_state, torch.get_rng_state()) and np.array_equal(numpy_state, np.random.get_state()[1])


def test_test_split_of_digits_is_fixed():
    test = data.digits().test.open()
    assert hashlib.sha256(test.images.numpy().tobytes()).hexdigest()[:16] == "7e37f66151bdbcf8"
    assert len(test) == 500 and len(data.digits().train) == 1297
    assert not set(pixel_tuples(test)) & set(pixel_tuples(data.digits().train))


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_subset_equals_a_slow_implementation_of_the_documented_rule(seed):
    dataset, val, counts = toy_dataset(), 11, (40, 25, 15, 20)
    queues = [[i for i in shuffled(range(100), seed, "subset") if dataset.train.labels[i] == label] for label in range(4)]
    exact = [val * count / 100 for count in counts]
    held_out = [int(share) for share in exact]
    for label in sorted(range(4), key=lambda label: held_out[label] - exact[label])[: val - sum(held_out)]:
        held_out[label] += 1
    validation = {i for queue, count in zip(queues, held_out) for i in queue[len(queue) - count :]}
    queues = [queue[: len(queue) - count] for queue, count in zip(queues, held_out)]
    expected = [queues[label][turn] for turn in range(12) for label in shuffled(range(4), seed, "subset/class")][:46]
    subset = dataset.subset(labels=46, val=val, seed=seed)
    assert subset.index.tolist() == expected
    assert set(subset.val_index.tolist()) == validation
    assert pixel_tuples(subset.train) == [(i // 256, i % 256) for i in expected]


def test_every_prefix_of_a_subset_is_a_subset_and_balanced():
    dataset = toy_dataset()
    largest = dataset.subset(labels=52, val=10, seed=2).index.tolist()
    for labels in range(4, 52):
        subset = dataset.subset(labels=labels, val=10, seed=2)
        assert subset.index.tolist() == largest[:labels]
        counts = Counter(subset.train.labels.tolist()).values()
        assert len(counts) == 4 and max(counts) - min(counts) <= 1
    assert dataset.subset(labels=None, val=10, seed=2).index.tolist()[:52] == largest


def test_class_with_one_more_label_depends_on_the_seed():
    assert len({int(toy_dataset().subset(labels=5, val=0, seed=seed).train.labels[4]) for seed in range(20)}) > 1


@pytest.mark.parametrize("val", [None, 0, 1, 10, 33])
def test_validation_images_are_proportional_never_labelled_and_the_same_for_all_numbers_of_labels(val):
    dataset, size = toy_dataset(), 20 if val is None else val
    subsets = [dataset.subset(labels=labels, val=val, seed=5) for labels in (4, 20, 30, None)]
    for subset in subsets:
        assert len(subset.val) == size and torch.equal(subset.val_index, subsets[0].val_index)
        assert not set(pixel_tuples(subset.val)) & set(pixel_tuples(subset.train))
        difference = torch.bincount(subset.val.labels, minlength=4) - torch.tensor([40, 25, 15, 20]) * size / 100
        assert difference.abs().max() < 1
    assert len(subsets[-1].train) + size == 100


def test_own_validation_images_are_used_instead_of_training_images():
    dataset = toy_dataset(val=30)
    few, many = dataset.subset(labels=None, val=8, seed=0), dataset.subset(labels=8, val=None, seed=0)
    assert len(few.train) == 100 and len(few.val) == 8 and len(many.val) == 30
    assert pixel_tuples(few.val) == pixel_tuples(many.val)[:8] == pixel_tuples(dataset.val.take(few.val_index))
    few.val_index.zero_()  # a caller's own copy
    assert pixel_tuples(dataset.subset(labels=None, val=8, seed=0).val) == pixel_tuples(few.val)
    with pytest.raises(ValueError, match=r"val=31: .* from 0 to 30"):
        dataset.subset(labels=8, val=31, seed=0)


@pytest.mark.parametrize(
    ("counts", "labels", "val", "message"),
    [
        ((40, 25, 15, 20), 101, 0, "labels=101: .* from 0 to 100"),
        ((40, 25, 15, 20), 10, 101, "val=101: .* from 0 to 100"),
        ((40, 25, 15, 20), -1, 0, "labels=-1"),
        ((40, 25, 15, 20), 10, -3, "val=-3"),
        ((40, 25, 15, 20), 0.1, 0, "labels=0.1"),
        ((40, 25, 15, 20), 3, 0, "labels=3 leaves classes without .* at least 4"),
        ((40, 25, 15, 20), 0, 0, "labels=0 leaves classes without"),
        ((40, 25, 15, 20), 95, 10, "labels=95 needs 24 .* class '.', which has .* 10 validation images"),
        ((40, 25, 15, 20), None, 100, "needs 1 .* class '.', which has 0 .* 100 validation images"),
        ((10, 0, 10), None, 0, "needs 1 .* class 'b', which has 0"),
    ],
)
def test_impossible_subsets_are_refused_with_the_reason(counts, labels, val, message):
    with pytest.raises(ValueError, match=message):
        toy_dataset(counts).subset(labels=labels, val=val, seed=0)


def test_the_only_image_of_a_class_is_never_a_validation_image():
    for seed in range(20):
        subset = toy_dataset((91, *[1] * 9)).subset(labels=None, val=None, seed=seed)
        assert subset.train.labels.unique().tolist() == [*range(10)] and subset.val.labels.unique().tolist() == [0]


@pytest.mark.parametrize("seed", range(4))
def test_small_class_is_named_with_the_largest_possible_subset(seed):
    dataset = toy_dataset((40, 3, 40, 40))
    with pytest.raises(ValueError, match=r"labels=40 needs 10 .* class 'b', which has 3 .* has (\d+) labels") as error:
        dataset.subset(labels=40, val=0, seed=seed)
    most = int(str(error.value).split()[-2])
    assert len(dataset.subset(labels=most, val=0, seed=seed).train) == most
    with pytest.raises(ValueError, match="class 'b'"):
        dataset.subset(labels=most + 1, val=0, seed=seed)


# Images, DataSpec and HeldOut


def test_printed_data_names_no_pixels():
    digits = data.digits()
    assert repr(digits.train) == "Images(1,297 of digits, 1 x 8 x 8, 10 classes)"
    assert f"HeldOut(500 test images, read {digits.test.reads} times)" in repr(digits) and len(repr(digits)) < 1_000 and "tensor" not in repr(digits)


def test_images_give_pixels_targets_and_normalized_batches():
    train, index = data.digits().train, torch.tensor([3, 1, 1])
    assert train.pixels().min() == 0 and train.pixels().max() == 1 and train.pixels(index).shape == (3, 1, 8, 8)
    assert train.targets(index).shape == (3, 10) and train.targets(index).argmax(1).equal(train.labels[index])
    assert train.take(index).images.equal(train.images[index])
    images, labels = (torch.cat(parts) for parts in zip(*train.batches(100)))
    assert images.equal(train.spec.normalize(train.pixels())) and labels.equal(train.labels)
    assert list(train.take(slice(0)).batches()) == []
    with pytest.raises(ValueError, match="size=-1"):
        list(train.batches(-1))


def test_black_background_stays_zero_and_photos_get_mean_0_and_std_1(tmp_path):
    spec = data.digits().spec
    assert spec.normalize(torch.zeros(1, 1, 8, 8)).eq(0).all() and spec.digits
    assert spec.std == pytest.approx((data.digits().train.pixels().std().item(),), rel=1e-3)
    photos = data.arrays(write_archive(tmp_path, shape=(20, 6, 5, 3))).train
    normalized = photos.spec.normalize(photos.pixels())
    torch.testing.assert_close(normalized.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normalized.std((0, 2, 3), correction=0), torch.ones(3))


@needs_mnist
def test_mnist_has_the_published_std_and_1000_validation_images_by_default():
    mnist = data.mnist(str(ROOT))
    assert mnist.spec.mean == (0.0,) and mnist.spec.std == pytest.approx((0.3081,), abs=1e-4)
    assert (mnist.spec.channels, mnist.spec.size, mnist.spec.classes) == (1, (28, 28), tuple("0123456789")) and mnist.spec.digits
    subset = mnist.subset(labels=None, val=None, seed=0)
    assert (len(subset.train), len(subset.val)) == (59_000, 1_000)


def images_like_digits(**changes):
    fields = {"images": torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "labels": torch.zeros(2, dtype=torch.int64)}
    return data.Images(**(fields | changes), spec=data.digits().spec)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: data.digits().spec.normalize(torch.zeros(2, 3, 8, 8)), "expected floats in"),
        (lambda: data.digits().spec.normalize(torch.zeros(2, 1, 8, 8, dtype=torch.uint8)), "expected floats in"),
        (lambda: replace(data.digits().spec, std=(0.0,)), "1 means and standard deviations above 0"),
        (lambda: replace(data.digits().spec, std=(float("nan"),)), "1 means and standard deviations above 0"),
        (lambda: replace(data.digits().spec, mean=(0.0, 0.0)), "1 means and standard deviations above 0"),
        (lambda: replace(data.digits().spec, mean=0.5, std=0.5), r"mean=0.5, std=0.5; expected size=\(height, width\), and tuples"),
        (lambda: replace(data.digits().spec, size=8), r"size=8, .* expected size=\(height, width\)"),
        (lambda: replace(data.digits().spec, size=(8,)), r"size=\(8,\), .* expected size=\(height, width\)"),
        (lambda: replace(data.digits().spec, classes=10), "classes=10, .* tuples of the names of the classes"),
        (lambda: replace(data.digits().spec, classes="cat"), "classes='cat', .* tuples of the names of the classes"),
        (lambda: images_like_digits(images=torch.zeros(2, 1, 8, 8)), "uint8"),
        (lambda: images_like_digits(images=torch.zeros(2, 1, 8, 9, dtype=torch.uint8)), r"\(2, 1, 8, 8\), got .* \(2, 1, 8, 9\)"),
        (lambda: images_like_digits(labels=torch.zeros(3, dtype=torch.int64)), "expected uint8 images"),
        (lambda: images_like_digits(labels=torch.zeros(2)), "expected int64 labels"),
        (lambda: images_like_digits(images=BYTES[:2]), r"got images as an array of NumPy; expected a tensor of torch: torch.from_n"),
        (lambda: images_like_digits(labels=np.zeros(2, int)), "got labels as an array of NumPy"),
        (lambda: images_like_digits(labels=torch.tensor([-1, 10])), r"labels from 0 to 9, got \[-1, 10\]"),
    ],
)
def test_pixels_labels_and_specs_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_test_images_are_only_readable_through_open_which_counts():
    dataset = toy_dataset()
    for use in (len, iter, list, lambda test: test[0], lambda test: next(iter(DataLoader(test)))):
        with pytest.raises(TypeError, match=r"held out.*open"):
            use(dataset.test)
    for name in ("images", "labels", "pixels", "targets", "take", "batches"):
        assert not hasattr(dataset.test, name)
    assert dataset.test.reads == 0
    assert dataset.test.open() is dataset.train and dataset.test.reads == 1


def test_test_images_that_repeat_training_or_validation_images_are_counted_without_a_read():
    def random_images(n):
        return np.random.default_rng(n).integers(0, 256, (n, 4, 4), np.uint8)

    def dataset(test, **val):
        splits = {"train": random_images(12), "test": test} | val
        return data.Dataset.from_arrays("own", {k: (x, np.arange(len(x)) % 2) for k, x in splits.items()}, ("a", "b"))

    leaky = dataset(np.concatenate([random_images(12)[[3, 3, 7]], random_images(5)]))
    assert leaky.repeats == 3 and leaky.test.reads == 0
    assert dataset(random_images(5)).repeats == 0 and dataset(random_images(5), val=random_images(5)[:2]).repeats == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": None}, r"own: expected the splits train, test and, if there is one, val, got \['train'\]"),
        ({"train": None}, r"got \['test'\]"),
        ({"valid": "test"}, r"got \['train', 'test', 'valid'\]"),
        ({"test": (np.zeros((2, 6, 5), np.uint8), [0, 1])}, "own, test labels: expected a numpy array, got a list; use np.asarray"),
        ({"train": (torch.zeros(2, 6, 5), np.arange(2))}, "own, train images: expected a numpy array, got a Tensor; use np.asarray"),
    ],
)
def test_arrays_of_other_kinds_and_missing_parts_are_refused(changes, message):
    part = np.zeros((2, 6, 5), np.uint8), np.arange(2)
    splits = {"train": part, "test": part} | {name: part if given == "test" else given for name, given in changes.items()}
    with pytest.raises(ValueError, match=message):
        data.Dataset.from_arrays("own", {name: given for name, given in splits.items() if given is not None}, ("a", "b"))


def test_two_classes_with_the_same_name_are_refused():
    splits = dict.fromkeys(("train", "test"), (np.full((4, 2, 2), 9, np.uint8), np.arange(4) % 2))
    with pytest.raises(ValueError, match=r"own: expected another name for each class, got \['cat', 'cat'\]"):
        data.Dataset.from_arrays("own", splits, ("cat", "cat"))


# Your own arrays


def write_archive(folder, shape=(20, 6, 5), val=False, **changes):
    """Write an .npz in the MedMNIST layout and return its path; `changes` replace arrays, or omit them with None."""
    generator = np.random.default_rng(0)
    content = {}
    for split in ("train", "test", "val")[: 2 + val]:
        content[f"{split}_images"] = generator.integers(0, 256, shape, np.uint8)
        content[f"{split}_labels"] = np.arange(shape[0], dtype=np.uint8)[:, None] % 4
    path = folder / "own.npz"
    np.savez_compressed(path, **{key: array for key, array in (content | changes).items() if array is not None})
    return str(path)


@pytest.mark.parametrize("shape", [(20, 6, 5), (20, 5, 5, 1), (20, 6, 5, 3), (20, 5, 6, 4)])
def test_arrays_of_any_channels_and_size_are_loaded(tmp_path, shape):
    path = write_archive(tmp_path, shape, val=True)
    dataset, stored = data.arrays(path, digits=True), np.load(path)
    channels = shape[3] if len(shape) == 4 else 1
    assert (dataset.spec.channels, dataset.spec.size, dataset.spec.digits) == (channels, shape[1:3], True)
    assert dataset.spec.classes == ("0", "1", "2", "3") and dataset.spec.name == "own.npz"
    for split, images in {"train": dataset.train, "test": dataset.test.open(), "val": dataset.val}.items():
        assert np.array_equal(images.images.permute(0, 2, 3, 1).numpy().reshape(shape), stored[f"{split}_images"])
        assert images.labels.tolist() == [i % 4 for i in range(20)]


@pytest.mark.parametrize("channels", [(), (1,), (3,)], ids=["gray", "one channel", "color"])
def test_images_in_memory_have_the_usual_strides(channels):
    """With the strides (64, 1, 8, 1), which are also contiguous, convolutions rounded differently on a CPU with AVX2."""
    pixels = to_pixels(np.zeros((5, 8, 8, *channels), np.uint8), "images")
    assert pixels.stride() == torch.empty(pixels.shape).stride()


def test_identical_images_in_an_archive_are_named(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 5), np.uint8)
    across = r"own.npz: images that are identical to an image of another part: 20, train image 0 = test image 0, train image 1 = "
    with pytest.warns(UserWarning, match=across):
        assert data.arrays(write_archive(tmp_path, train_images=images, test_images=images)).repeats == 20
    images[1] = images[0]
    with pytest.warns(UserWarning, match="identical to an image with another label: 1, train image 0 = train image 1"):
        data.arrays(write_archive(tmp_path, train_images=images))


def test_float_arrays_are_rounded_to_bytes(tmp_path):
    floats = np.linspace(0, 1, 20 * 6 * 5, dtype=np.float32).reshape(20, 6, 5)
    dataset = data.arrays(write_archive(tmp_path, train_images=floats))
    assert np.abs(dataset.train.pixels().numpy()[:, 0] - floats).max() <= 0.5 / 255 + 1e-6
    assert dataset.val is None


def test_float_and_16_bit_arrays_keep_their_values_on_request(tmp_path):
    narrow = np.linspace(0.5, 0.51, 20 * 6 * 5, dtype=np.float32).reshape(20, 6, 5)
    path = write_archive(tmp_path, train_images=narrow, test_images=narrow)
    with pytest.warns(UserWarning, match=r'rounded to 8 bits \(256 values\); pixels="float" keeps them'):
        assert len(data.arrays(path).train.images.unique()) < 5
    kept = data.arrays(path, pixels="float")
    assert np.array_equal(kept.train.pixels().numpy()[:, 0], narrow) and kept.spec.dtype == "float32"
    assert next(kept.train.batches())[0].std() == pytest.approx(1, abs=0.01)
    wide = np.arange(20 * 6 * 5, dtype=np.uint16).reshape(20, 6, 5)
    with pytest.raises(ValueError, match=r'expected uint8 or floats .*16 bits: pixels="float".*, got uint16'):
        data.arrays(write_archive(tmp_path, train_images=wide))
    stored = data.arrays(write_archive(tmp_path, train_images=wide, test_images=wide), pixels="float").train
    assert np.allclose(stored.pixels().numpy()[:, 0] * 65535, wide, atol=1e-2)
    with pytest.raises(ValueError, match="pixels='16'"):
        data.arrays(path, pixels="16")


def test_pixels_are_a_copy(tmp_path):
    images = data.arrays(write_archive(tmp_path, **dict.fromkeys(["train_images", "test_images"], np.full((20, 6, 5), 0.5))), pixels="float").train
    images.pixels(slice(0, 2)).zero_()
    assert images.pixels().eq(0.5).all()


def test_constant_channel_is_normalized_to_zero(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 5, 4), np.uint8)
    images[..., 3] = 255
    train = data.arrays(write_archive(tmp_path, train_images=images, test_images=images)).train
    assert train.spec.normalize(train.pixels())[:, 3].eq(0).all()


BYTES, FLOATS, LABELS = np.zeros((20, 6, 5), np.uint8), np.zeros((20, 6, 5)), np.arange(20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_labels": None, "train_images": None}, "has no test_labels, train_images; it has train_labels, test_images"),
        ({"val_images": BYTES}, "has no val_labels"),
        ({"train_images": np.where(LABELS == 7, np.nan, 0.0)[:, None, None] + FLOATS}, "train .* image 7 has nan"),
        ({"test_images": FLOATS + 1.5}, "own.npz, test images: .*floats in .* image 0 has 1.5"),
        ({"test_images": FLOATS + np.inf}, "image 0 has inf"),
        ({"train_images": BYTES.astype(np.int64)}, "uint8 or floats .* got int64"),
        ({"train_images": BYTES + np.eye(6, 5, dtype=np.uint8)}, "bytes of 0 and 1, nearly black; expected 0 to 255"),
        ({"train_images": BYTES[0]}, r"n h w or n h w c .* got \(6, 5\)"),
        ({"train_images": np.zeros((20, 3, 6, 5), np.uint8)}, "1, 3 or 4 channels"),
        ({"train_images": BYTES[:0], "train_labels": np.zeros(0, int)}, "at least one image"),
        ({"test_images": np.zeros((20, 6, 6), np.uint8)}, r"own.npz, test: .* \(20, 1, 6, 5\), got .* \(20, 1, 6, 6\)"),
        ({"test_images": np.zeros((20, 6, 5, 3), np.uint8)}, "own.npz, test: .*uint8 images"),
        ({"test_labels": np.arange(19) % 4}, r"own.npz, test labels: .*20 integers, got .* \(19,\)"),
        ({"test_labels": np.zeros((20, 2), int)}, "test labels: expected one integer for each image, got 2 labels"),
        ({"train_labels": LABELS % 4.0}, "train labels: .*20 integers, got float64"),
        ({"train_labels": LABELS % 4 - 1}, r"train_labels must be 0, 1, 2, .* got \[-1, 0, 1, 2\]"),
        ({"train_labels": LABELS % 4 * 2}, r"train_labels must be .* got \[0, 2, 4, 6\]"),
        ({"train_labels": LABELS * 0, "test_labels": LABELS * 0}, r"own.npz: expected at least 2 classes, got \['0'\]"),
        ({"test_labels": LABELS}, r"own.npz, test: .*labels from 0 to 3, got \[4, 5"),
        ({"train_images": np.array([{}] * 20)}, "own.npz cannot be read as an .npz of plain arrays .*allow_pickle"),
    ],
)
def test_invalid_arrays_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        data.arrays(write_archive(tmp_path, **changes))


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:200],
        lambda b: b[: len(b) // 2],
        lambda b: b"",
        lambda b: b"PK nonsense",
        lambda b: b[:100] + bytes(40) + b[140:],
        None,
    ],
)
def test_damaged_or_missing_archive_is_named_and_not_changed(tmp_path, damage):
    path = Path(write_archive(tmp_path))
    content = damage and damage(path.read_bytes())
    path.write_bytes(content) if damage else path.unlink()
    with pytest.raises(ValueError, match=r"own\.npz cannot be read as an \.npz"):
        data.arrays(str(path))
    assert path.read_bytes() == content if damage else not path.exists()


# Your own image files

MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def write_images(folder, channels=1, size=(6, 9), splits=("train", "test"), classes=("cat", "dog")):
    """Write three random PNG files of `size` (height, width) for every split and class."""
    generator = np.random.default_rng(0)
    for split in splits:
        for name in classes:
            (folder / split / name).mkdir(parents=True)
            for i in range(3):
                pixels = generator.integers(0, 256, (*size, channels), np.uint8)
                Image.fromarray(pixels.squeeze()).convert(MODES[channels]).save(folder / split / name / f"{i}.png")
    return folder


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_image_files_of_any_channels_and_size_are_loaded(tmp_path, channels):
    dataset = data.folder(str(write_images(tmp_path, channels, splits=("train", "test", "val"))))
    assert (dataset.spec.channels, dataset.spec.size, dataset.spec.classes) == (channels, (6, 9), ("cat", "dog"))
    assert dataset.train.labels.tolist() == dataset.val.labels.tolist() == [0, 0, 0, 1, 1, 1]
    stored = np.array(Image.open(tmp_path / "test" / "dog" / "1.png")).reshape(6, 9, channels)
    assert np.array_equal(dataset.test.open().images[4].permute(1, 2, 0).numpy(), stored)
    assert not dataset.spec.digits and data.folder(str(tmp_path), digits=True).spec.digits


@pytest.mark.parametrize(("size", "expected"), [(4, (4, 4)), ((3, 5), (3, 5))])
def test_image_files_are_resized_and_converted_on_request(tmp_path, size, expected):
    write_images(tmp_path)
    Image.new("RGB", (20, 20), (255, 255, 255)).save(tmp_path / "train" / "cat" / "other.png")
    Image.new("P", (8, 8)).save(tmp_path / "test" / "cat" / "palette.png")
    dataset = data.folder(str(tmp_path), size=size, channels=3)
    assert dataset.spec.size == expected and dataset.spec.channels == 3 and dataset.val is None
    assert dataset.train.images[3].eq(255).all()


def test_transparent_images_need_four_channels(tmp_path):
    write_images(tmp_path, channels=4)
    with pytest.raises(ValueError, match=r"png is transparent in places.*channels=4"):
        data.folder(str(tmp_path), channels=3)
    for file in tmp_path.rglob("*.png"):
        image = Image.open(file)
        image.putalpha(255)
        image.save(file)
    assert data.folder(str(tmp_path), channels=3, size=4).spec.channels == 3


def write_rotated_photos(folder):
    """Write JPEG files whose EXIF data says that they must be rotated by 90 degrees clockwise; their left third is white."""
    image = Image.new("L", (9, 6))
    image.paste(255, (0, 0, 3, 6))
    exif = Image.Exif()
    exif[0x0112] = 6
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (folder / split / name).mkdir(parents=True)
            image.save(folder / split / name / "0.jpg", exif=exif, quality=95)
    return folder


def test_photos_are_turned_upright_by_their_exif_data(tmp_path):
    image = data.folder(str(write_rotated_photos(tmp_path))).train.images[0, 0]
    assert image.shape == (9, 6) and image[:2].min() > 200 and image[4:].max() < 50


UPRIGHT = {
    1: lambda image: image,
    2: np.fliplr,
    3: lambda image: np.rot90(image, 2),
    4: np.flipud,
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: np.rot90(image, 2).swapaxes(0, 1),
    8: np.rot90,
}


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_tiff_files_are_turned_upright(tmp_path, orientation, compression):
    file, generator = tmp_path / "x.tif", np.random.default_rng(0)
    for shape, high in (((4, 6), 256), ((4, 6, 3), 256), ((4, 6, 4), 256), ((4, 6), 65536)):
        stored = generator.integers(0, high, shape).astype(np.uint8 if high == 256 else np.uint16)
        Image.fromarray(stored).save(file, tiffinfo={274: orientation}, compression=compression)
        pixels = read_image(file, None, None, "float").pixels.squeeze() * (high - 1)
        assert np.array_equal(pixels.round(), UPRIGHT[orientation](stored))


@pytest.mark.parametrize("kind", [np.uint16, np.float64])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_tiff_files_that_tifffile_reads_are_turned_upright(tmp_path, orientation, kind):
    tifffile = pytest.importorskip("tifffile")
    stored = np.random.default_rng(0).integers(0, 65536, (4, 6, 3)).astype(kind)
    tifffile.imwrite(tmp_path / "x.tif", stored, photometric="rgb", extratags=[(274, 3, 1, orientation, True)])
    pixels = read_image(tmp_path / "x.tif", None, None, "float").pixels * (65535 if kind == np.uint16 else 1)
    assert np.array_equal(pixels.round(), UPRIGHT[orientation](stored))


SIXTEEN_BITS = Image.fromarray(np.full((6, 9), 40_000, np.uint16))


def add_image(image, split="train"):
    return lambda folder: image.save(folder / split / "dog" / "x.png")


def add_truncated_image(folder):
    content = (folder / "train" / "dog" / "0.png").read_bytes()
    (folder / "train" / "dog" / "x.png").write_bytes(content[: len(content) // 2])


def hide_test_classes(folder):
    for name in ("cat", "dog"):
        (folder / "test" / name).rename(folder / "test" / f".{name}")


def keep_one_class(folder):
    for split in ("train", "test"):
        (folder / split / "dog").rename(folder / f"{split}-dog")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (add_image(Image.new("L", (9, 7)), "test"), {}, r"dog.x.png is \(7, 9, 1\) .*cat.0.png is \(6, 9, 1\): set size="),
        (add_image(Image.new("RGB", (9, 6))), {}, r"dog.x.png is \(6, 9, 3\) .*: set channels="),
        (add_image(Image.new("P", (9, 6))), {}, r"dog.x.png is \(6, 9, 3\) .*: set channels="),
        (add_image(SIXTEEN_BITS), {}, "dog.x.png is I;16: expected 8-bit gray"),
        (add_image(SIXTEEN_BITS), {"channels": 1}, "dog.x.png is I;16: expected 8-bit gray"),
        (add_truncated_image, {}, "dog.x.png cannot be read as an image"),
        (lambda top: (top / "train" / "dog" / "x.png").write_text("<html>404</html>"), {}, "dog.x.png cannot be read as an image"),
        (lambda top: (top / "test" / "dog").rename(top / "test" / "cow"), {}, r"train and test differ in \['cow', 'dog'\]"),
        (lambda top: (top / "train" / "eel").mkdir(), {}, "expected train/<class>/.*eel"),
        (lambda top: (top / "test").rename(top / "tset"), {}, "expected train/<class>/.*test"),
        (hide_test_classes, {}, "no folder in .*test"),
        (keep_one_class, {}, r"at least 2 classes, got \['cat'\]"),
        (lambda top: None, {"channels": 2}, "channels 1, 3 or 4 and a size"),
        (lambda top: None, {"size": 0}, "channels 1, 3 or 4 and a size"),
        (lambda top: None, {"size": (4, 4, 4)}, "channels 1, 3 or 4 and a size"),
        (lambda top: None, {"size": "32"}, r"a size in whole pixels, such as 32 or \(32, 48\) for .*, got channels=None and size='32'"),
        (lambda top: None, {"size": 32.0}, "a size in whole pixels, .* and size=32.0"),
        (lambda top: None, {"size": True}, "a size in whole pixels, .* and size=True"),
        (lambda top: None, {"size": (32, "32")}, "a size in whole pixels"),
    ],
)
def test_invalid_image_folders_are_refused_with_the_reason(tmp_path, change, options, message):
    change(write_images(tmp_path))
    with pytest.raises(ValueError, match=message):
        data.folder(str(tmp_path), **options)


def test_hidden_files_and_other_files_are_ignored(tmp_path):
    write_images(tmp_path)
    for folder in (tmp_path / "train", tmp_path / "test", tmp_path / "train" / "dog"):
        (folder / ".ipynb_checkpoints").mkdir()
        Image.new("L", (9, 6)).save(folder / ".ipynb_checkpoints" / "0-checkpoint.png")
    (tmp_path / "train" / "cat" / "._0.png").write_bytes(b"Mac OS X")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("three cats")
    dataset = data.folder(str(tmp_path))
    assert dataset.spec.classes == ("cat", "dog") and dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_relative_path_depends_on_the_current_folder_and_equal_calls_share_one_copy(tmp_path, monkeypatch):
    for name, classes in (("first", ("cat", "dog")), ("second", ("cow", "eel"))):
        write_images(tmp_path / name / "own", classes=classes)
        monkeypatch.chdir(tmp_path / name)
        assert data.folder("own").spec.classes == classes
    assert data.folder("own", size=[4, 4]) is data.folder(str(tmp_path / "second" / "own"), (4, 4), channels=None)
    data.folder("own", size=1)
    with pytest.raises(ValueError, match="size=True"):
        data.folder("own", size=True)


def write_constant_archive(file, value):
    pixels, labels = np.full((4, 6, 5), value, np.uint8), np.arange(4) % 2
    np.savez(file, train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)


@pytest.mark.filterwarnings("ignore:.*identical")
def test_archive_that_has_changed_is_read_again(tmp_path):
    file = tmp_path / "a.npz"
    for value in (7, 8):
        write_constant_archive(file, value)
        dataset = data.arrays(str(file))
        assert dataset.train.images.eq(value).all() and data.arrays(str(file)) is dataset
    sized = data.at_size(partial(data.arrays, str(file)), 3)
    assert data.at_size(partial(data.arrays, str(file)), 3) is sized
    write_constant_archive(file, 9)
    assert data.at_size(partial(data.arrays, str(file)), 3).train.images.eq(9).all()
    file.unlink()
    with pytest.raises(ValueError, match=r"a\.npz cannot be read"):
        data.arrays(str(file))


def test_size_of_a_data_set_that_was_loaded_already_is_refused(tmp_path):
    write_constant_archive(tmp_path / "a.npz", 7)
    with pytest.raises(ValueError, match="data is a Dataset; expected a loader without the call"):
        data.at_size(data.arrays(str(tmp_path / "a.npz")), 3)


CHANGES = ["content", "content with the old time", "new file", "deleted file", "file without a label"]


@pytest.mark.parametrize("change", slow_but(("content", "deleted file"), CHANGES))
def test_folder_that_has_changed_is_read_again(tmp_path, change):
    top = write_images(tmp_path / "top")
    write_images(tmp_path / "more", splits=(".",), classes=("any",))
    file = top / "train" / "cat" / "1.png"
    options = {"path": str(top), "unlabelled": "../more"}
    first = data.folder(**options)
    (top / "train" / "notes.txt").write_text("the files are the same")
    assert data.folder(**options) is first and data.folder(**options, digits=True) is not first
    times = file.stat()
    if change == "new file":
        Image.new("L", (9, 6)).save(top / "test" / "dog" / "new.png")
    elif change == "deleted file":
        file.unlink()
    else:
        Image.new("L", (9, 6)).save(tmp_path / "more" / "any" / "0.png" if "label" in change else file)
    if change == "content with the old time":
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    hashed, gone = first.sha256, weakref.ref(first)
    del first
    second = data.folder(**options)
    assert second.sha256 != hashed and data.folder(**options) is second
    gc.collect()
    assert gone() is None, "the old images stay in memory"


# Preprocess


def files_in_order(folder):
    return sorted((folder / "train").rglob("*.*g"))


@pytest.mark.parametrize(
    ("channels", "options"), [(1, {}), (3, {}), (4, {}), (3, {"size": (4, 7)}), (1, {"size": 12, "channels": 3})], ids=str
)
def test_preprocess_of_paths_and_pil_images_equals_the_pixels_of_folder(tmp_path, channels, options):
    dataset = data.folder(str(write_images(tmp_path, channels)), **options)
    preprocess, files = Preprocess.from_spec(dataset.spec), files_in_order(tmp_path)
    expected = dataset.spec.normalize(dataset.train.pixels())
    assert torch.equal(preprocess(files), expected) and torch.equal(preprocess([Image.open(file) for file in files]), expected)
    for file, image in zip(files, expected):
        assert torch.equal(preprocess(str(file)), image[None])
    assert preprocess(files).is_contiguous()


def test_preprocess_turns_photos_upright_as_folder_does(tmp_path):
    dataset = data.folder(str(write_rotated_photos(tmp_path)))
    preprocess, files = Preprocess.from_spec(dataset.spec), files_in_order(tmp_path)
    assert torch.equal(preprocess(files), dataset.spec.normalize(dataset.train.pixels()))
    assert torch.equal(preprocess(Image.open(files[0])), preprocess(files[0]))


@pytest.mark.parametrize("name", ["digits", pytest.param("mnist", marks=needs_mnist), "color"])
def test_preprocess_of_arrays_and_tensors_equals_the_normalized_data_set(name, tmp_path):
    if name == "color":
        train = data.arrays(write_archive(tmp_path, (20, 6, 5, 3))).train
    else:
        train = (data.digits() if name == "digits" else data.mnist(str(ROOT))).train.take(slice(50))
    preprocess, expected = Preprocess.from_spec(train.spec), train.spec.normalize(train.pixels())
    bytes_last = train.images.permute(0, 2, 3, 1).numpy()
    floats_last = train.pixels().permute(0, 2, 3, 1).numpy()
    batches = [train.images, train.pixels(), bytes_last, floats_last, floats_last.astype(np.float64), list(train.images)]
    singles = [train.images[0], train.pixels()[0], bytes_last[0], floats_last[0]]
    if train.spec.channels == 1:
        batches += [bytes_last[..., 0], floats_last[..., 0]]
        singles += [bytes_last[0, ..., 0], floats_last[0, ..., 0]]
    for images in batches:
        assert torch.equal(preprocess(images), expected)
    for image in singles:
        assert torch.equal(preprocess(image), expected[:1])
    assert preprocess(bytes_last).is_contiguous() and preprocess(bytes_last).dtype == torch.float32


def test_preprocess_survives_json_and_knows_its_mode():
    for channels, mode in MODES.items():
        spec = replace(data.digits().spec, channels=channels, mean=(0.5,) * channels, std=(1,) * channels)
        preprocess = Preprocess.from_spec(spec)
        stored = preprocess.to_dict()
        assert json.loads(json.dumps(stored)) == stored and Preprocess.from_dict(stored) == preprocess
        assert preprocess.mode == mode and preprocess.classes == spec.classes and preprocess.size == (8, 8)


DIGITS = {"size": [8, 8], "channels": 1, "mean": [0.0], "std": [0.3], "classes": ["a", "b"]}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", [8]), ("size", 8), ("size", [8, 0]), ("size", [8.0, 8.0]), ("channels", 0), ("channels", "1"), ("channels", True),
        ("mean", 0.0), ("mean", [0.0, 0.0]), ("mean", [float("nan")]), ("mean", ["0"]), ("std", [0.0]), ("std", [float("inf")]),
        ("std", None), ("classes", []), ("classes", "ab"), ("classes", [0, 1]),
    ],
)  # fmt: skip
def test_invalid_preprocess_is_refused_by_the_name_of_the_field(field, value):
    with pytest.raises(ValueError, match=f"Preprocess: {field} is "):
        Preprocess.from_dict(DIGITS | {field: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": [8, 8]}, r"missing or unknown: \['channels', 'classes', 'mean', 'std'\]"),
        (DIGITS | {"crop": 1}, r"missing or unknown: \['crop'\]"),
        (None, "missing or unknown: None"),
    ],
)
def test_dictionary_with_missing_or_unknown_fields_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        Preprocess.from_dict(values)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((8, 9), np.uint8), r"shape \(8, 9\); expected \(8, 8, 1\) or \(8, 8\)"),
        (np.zeros((5, 28, 28), np.uint8), r"shape \(5, 28, 28\); expected \(8, 8, 1\) or \(8, 8\)"),
        (np.zeros((8, 8, 3), np.uint8), r"shape \(8, 8, 3\)"),
        (np.zeros((1, 8, 8, 1, 1), np.uint8), r"shape \(1, 8, 8, 1, 1\)"),
        (np.zeros((0, 8, 8), np.uint8), r"shape \(0, 8, 8\)"),
        (torch.zeros(8, 8), r"shape \(8, 8\); expected \(1, 8, 8\)"),
        (torch.zeros(2, 3, 8, 8), r"shape \(2, 3, 8, 8\); expected \(1, 8, 8\)"),
        (torch.zeros(1, 8, 8, dtype=torch.int64), "int64; expected uint8, or floats"),
        (np.zeros((8, 8), bool), "bool; expected uint8, or floats"),
        (np.zeros((8, 8), object), "array of texts or objects .object.; expected pixels"),
        (torch.full((1, 8, 8), -0.4), r"from -0.4 to -0.4; .*normalized already.*pixels in \[0, 1\]"),
        (torch.full((1, 8, 8), 2.8), "normalized already"),
        (np.full((8, 8), np.nan), r"NaN or infinite values; expected pixels in \[0, 1\], not normalized"),
        (torch.full((1, 8, 8), -np.inf), r"NaN or infinite values; expected pixels in \[0, 1\], not normalized"),
        (np.array(["one.png", "two.png"]), r"got an array of texts or objects .<U7.; expected pixels; if it holds paths, pass a list: array.tolist\(\)"),
        (np.array([Path("one.png")], object), r"got an array of texts or objects .object.; expected pixels; if it holds paths, pass a list: array.tolist"),
        (np.full((8, 8), 255.0), "from 255 to 255; pass uint8"),
        (SIXTEEN_BITS, "PIL image is I;16: expected 8-bit gray"),
        (Image.new("LA", (8, 8)), "PIL image is transparent in places"),
        ("absent.png", "absent.png cannot be read as an image"),
        (["absent.png"], "absent.png cannot be read as an image"),
        ([], "at least one image"),
        (7, "got int; expected paths, PIL images, numpy arrays or torch tensors"),
    ],
)
def test_preprocess_refuses_other_input_with_what_came_and_what_is_expected(images, message):
    with pytest.raises(ValueError, match=message):
        Preprocess.from_dict(DIGITS)(images)


def test_preprocess_with_two_channels_takes_tensors_but_no_files():
    preprocess = Preprocess.from_dict(DIGITS | {"channels": 2, "mean": [0.0, 0.5], "std": [1, 2]})
    assert torch.equal(preprocess(torch.ones(2, 8, 8))[0, :, 0, 0], torch.tensor([1.0, 0.25]))
    with pytest.raises(ValueError, match="cannot have 2 channels"):
        preprocess("x.png")


# Public data sets


def write_idx(path, array):
    """Write an array of bytes or of 32-bit integers as an IDX file: magic number, shape and values, all big-endian."""
    path.parent.mkdir(parents=True, exist_ok=True)
    magic = bytes([0, 0, 0x08 if array.dtype == np.uint8 else 0x0C, array.ndim])
    path.write_bytes(magic + np.array(array.shape, ">u4").tobytes() + array.astype(array.dtype.newbyteorder(">")).tobytes())


def write_idx_files(folder, stems=("train", "t10k"), classes=10, first=0, labels="idx1-ubyte"):
    generator = np.random.default_rng(0)
    for stem in stems:
        write_idx(folder / f"{stem}-images-idx3-ubyte", generator.integers(0, 256, (2 * classes, 28, 28), np.uint8))
        label = np.arange(2 * classes, dtype=np.uint8) % classes + first
        if labels == "idx2-int":
            writer = 100 * (stem == "qmnist-test") + np.arange(2 * classes, dtype=np.int32) // 4
            label = np.stack([label.astype(np.int32), np.full(2 * classes, 70_000, np.int32), writer], 1)
        write_idx(folder / f"{stem}-labels-{labels}", label)
    return folder


def stored_images(path, n):
    return np.frombuffer(path.read_bytes()[16:], np.uint8).reshape(n, 28, 28)


@pytest.fixture
def offline(monkeypatch):
    """Make every access to the network fail."""

    def fail(*_, **__):
        raise OSError("the network is off")

    monkeypatch.setattr(socket, "socket", fail)
    monkeypatch.setattr(urllib.request, "urlopen", fail)


@pytest.mark.parametrize(
    ("load", "folder"), [(data.mnist, "MNIST"), (data.fashion_mnist, "FashionMNIST"), (data.kmnist, "KMNIST")]
)
def test_complete_data_sets_are_read_without_network(tmp_path, offline, load, folder):
    raw = write_idx_files(tmp_path / folder / "raw")
    dataset = load(str(tmp_path))
    assert np.array_equal(dataset.train.images[:, 0].numpy(), stored_images(raw / "train-images-idx3-ubyte", 20))
    assert dataset.train.labels.tolist() == [*range(10)] * 2
    assert len(dataset.test.open()) == 20 and len(dataset.spec.classes) == 10
    assert dataset.spec.digits == (load is not data.fashion_mnist) and dataset.spec.mean == (0.0,)
    assert load(str(tmp_path)) is dataset


def test_emnist_is_transposed_and_its_labels_start_at_zero(tmp_path, offline):
    raw = write_idx_files(tmp_path / "EMNIST" / "raw", ("emnist-letters-train", "emnist-letters-test"), 26, first=1)
    dataset = data.emnist(root=str(tmp_path))
    stored = stored_images(raw / "emnist-letters-train-images-idx3-ubyte", 52)
    assert np.array_equal(dataset.train.images[:, 0].numpy(), stored.transpose(0, 2, 1))
    assert dataset.spec.classes == tuple("abcdefghijklmnopqrstuvwxyz") and dataset.train.labels[:26].tolist() == [*range(26)]
    with pytest.raises(ValueError, match="no split 'letter'; expected one of byclass, bymerge"):
        data.emnist("letter", root=str(tmp_path))


def test_qmnist_has_its_labels_in_the_first_column_and_its_writers_in_the_third(tmp_path, offline):
    write_idx_files(tmp_path / "QMNIST" / "raw", ("qmnist-train", "qmnist-test"), labels="idx2-int")
    dataset = data.qmnist(str(tmp_path))
    assert dataset.train.labels.tolist() == [*range(10)] * 2
    assert dataset.groups.tolist() == [image // 4 for image in range(20)]
    assert dataset.test_groups.tolist() == [100 + image // 4 for image in range(20)]


def test_cifar10_is_read_if_its_checksums_are_right(tmp_path, offline, monkeypatch):
    from torchvision.datasets import CIFAR10

    folder, classes = tmp_path / "cifar-10-batches-py", [f"class {i}" for i in range(10)]
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (10, 3072), np.uint8)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [*range(10)]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": classes}))
    with pytest.raises(ValueError, match="cifar-10-batches-py: expected the published files, unchanged"):
        data.cifar10(str(tmp_path))

    def checksum(name):
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    monkeypatch.setattr(CIFAR10, "train_list", [[name, checksum(name)] for name, _ in CIFAR10.train_list])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", checksum("test_batch")]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": checksum("batches.meta")})
    dataset = data.cifar10(str(tmp_path))
    assert np.array_equal(dataset.train.images[10:20].numpy(), pixels.reshape(10, 3, 32, 32))
    assert dataset.spec.classes == tuple(classes) and dataset.spec.mean[0] > 0 and len(dataset.test.open()) == 10


def test_svhn_label_10_becomes_0(tmp_path, offline, monkeypatch):
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    pixels, files = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 20), np.uint8), {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}_32x32.mat"
        savemat(path, {"X": pixels, "y": np.arange(20, dtype=np.uint8)[:, None] % 10 + 1})
        files[split] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(SVHN, "split_list", files)
    dataset = data.svhn(str(tmp_path))
    assert np.array_equal(dataset.train.images.numpy(), pixels.transpose(3, 2, 0, 1)) and dataset.spec.digits
    assert dataset.train.labels[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


@pytest.mark.parametrize(
    ("load", "folder", "file"),
    [
        (data.mnist, "MNIST/raw", "t10k-labels-idx1-ubyte"),
        (data.emnist, "EMNIST/raw", "emnist-letters-train-images-idx3-ubyte"),
        (data.qmnist, "QMNIST/raw", "qmnist-test-labels-idx2-int"),
        (data.cifar10, "cifar-10-batches-py", "data_batch_5"),
        (data.svhn, "", "test_32x32.mat"),
    ],
)
def test_error_without_network_says_which_files_to_put_where(tmp_path, offline, monkeypatch, load, folder, file):
    monkeypatch.setenv("SMALLVIT_DATA", str(tmp_path))
    load.cache_clear()
    with pytest.raises(ValueError) as error:
        load()
    message = str(error.value)
    assert f"not complete in {tmp_path / folder} and cannot be downloaded" in message and "\n" not in message
    assert file in message and "SMALLVIT_DATA" in message and "the network is off" in message
    assert not [path for path in tmp_path.rglob("*") if path.name != ".download.lock"]


def test_data_folder_is_the_argument_or_the_variable_or_a_cache(tmp_path, offline, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SMALLVIT_DATA", str(tmp_path / "variable"))
    for root, expected in ((str(tmp_path / "argument"), "argument"), (None, "variable"), (None, "cache/smallvit")):
        if expected.startswith("cache"):
            monkeypatch.delenv("SMALLVIT_DATA")
        with pytest.raises(ValueError, match=f"{tmp_path / expected / 'KMNIST'}"):
            data.kmnist(root)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:1000], r"has 1000 bytes, but its header says \[20, 28, 28\], 15696 bytes"),
        ("train-images-idx3-ubyte", lambda b: b + b"x", "has 15697 bytes, .* 15696 bytes"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:20], r"has 20 bytes, but its header says \[20\], 28 bytes"),
        ("t10k-images-idx3-ubyte", lambda b: b[:9], r"at least 16 bytes that start with \[0, 0, 8, 3\], got 9 bytes"),
        ("t10k-images-idx3-ubyte", lambda b: b"", "got 0 bytes"),
        ("train-labels-idx1-ubyte", lambda b: b"\x1f\x8b\x08\x08" + b[4:], r"start with \[0, 0, 8, 1\], got .* \[31, 139"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:7] + b"\x13" + b[8:27], r"20 integers, got uint8 \(19,\)"),
        ("train-labels-idx1-ubyte", lambda b: b[:8] + b"\x0b" + b[9:], r"mnist, train: .* from 0 to 9, got \[11\]"),
    ],
)
def test_damaged_idx_file_is_named_and_not_changed(tmp_path, offline, file, damage, message):
    raw = write_idx_files(tmp_path / "MNIST" / "raw")
    (raw / file).write_bytes(damage((raw / file).read_bytes()))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        data.mnist(str(tmp_path))
    assert file in str(error.value) or "mnist, " in str(error.value)
    assert contents(tmp_path) == before


def test_missing_file_is_downloaded_and_existing_files_are_kept(tmp_path, offline, monkeypatch):
    calls = []

    def download(root, download):
        assert download
        calls.append(write_idx_files(Path(root) / "FashionMNIST" / "raw"))

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", download)
    raw = write_idx_files(tmp_path / "FashionMNIST" / "raw")
    (raw / "t10k-labels-idx1-ubyte").unlink()
    write_idx(raw / "train-images-idx3-ubyte", np.full((20, 28, 28), 9, np.uint8))
    before = contents(raw)
    dataset = data.fashion_mnist(str(tmp_path))
    assert len(calls) == 1 and dataset.train.images.eq(9).all()
    assert contents(raw).items() > before.items()
    assert not list(tmp_path.glob(".download-*"))


# The package


def test_records_can_name_every_loader_and_equal_calls_share_one_copy():
    loaders = [name for name, value in vars(data).items() if hasattr(value, "cache_clear")]
    assert len(loaders) == 11 and {*loaders} < {*data.__all__}
    for name in loaders:
        file = {"arrays": "own", "folder": "own", "textured_shapes": "drawn"}.get(name, "published")
        assert (getattr(data, name).__module__, getattr(data, name).__qualname__) == (f"smallvit.data.{file}", name)
        assert getattr(data, name).__doc__
    assert data.digits() is data.digits()


def test_every_public_name_is_defined_in_its_module():
    assert len(data.__all__) == 20
    for name in data.__all__:
        value = getattr(data, name)
        assert vars(sys.modules[value.__module__])[name] is value


@pytest.mark.slow
def test_importing_data_does_not_import_torchvision_pil_or_sklearn():
    code = "import sys, smallvit.data; print({'torchvision', 'sklearn', 'PIL'} & {*sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert result.stdout.strip() == "set()", result.stdout + result.stderr
