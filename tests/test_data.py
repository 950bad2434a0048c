import hashlib
import os
import pickle
import socket
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from smallvit import data
from smallvit.rng import shuffled

ROOT = Path(os.environ.get("SMALLVIT_DATA") or Path(__file__).parents[2] / "shared" / "data")
needs_mnist = pytest.mark.skipif(not (ROOT / "MNIST" / "raw").is_dir(), reason=f"needs MNIST and there is none in {ROOT}")

GOLDEN = {
    ("digits", 100, 0): "89e8405ff9da54822a78110140a17db34ed49b6162a5003052b74f8829bc911f",
    ("digits", 100, 1): "a4e274866f0547008ae1bb2bbfcf71b218e324f1d81115e1b0eb58310e31939b",
    ("mnist", 100, 0): "848b3277a2f3e834052ee1220605fa45d815e84cd621d4403f0a911241026af0",
    ("mnist", 100, 1): "93bd08f30a1886bb020d5116a92a76fd4c0b50e150f887fda34ddbbb52f38338",
    ("mnist", 1000, 0): "d6c653f6fdfa1d2abd772401eed289eaae0158561f9925d31896915b3acd43d6",
    ("mnist", 1000, 1): "60138b34a7169032a27a74df7b5035c3d2949ac48fdbfa34154dd3fd5235ed94",
}


def toy(counts=(40, 25, 15, 20), val=None):
    """So many 1 x 2 images of each class, every one another; image i reads i // 256, i % 256."""
    number = torch.arange(sum(counts)).view(-1, 1, 1, 1)
    mixed = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[mixed]
    spec = data.DataSpec(name="toy", channels=1, size=(1, 2), classes=tuple("abcd"[: len(counts)]), mean=(0.0,), std=(1.0,))
    images = data.Images(torch.cat([number // 256, number % 256], 3).to(torch.uint8), labels, spec)
    return data.Dataset(spec=spec, train=images, test=data.HeldOut(images), val=val and images.take(torch.arange(val)))


def identity(images):
    return [tuple(image.flatten().tolist()) for image in images.images]


# Subsets


@pytest.mark.parametrize("key", [pytest.param(key, marks=[needs_mnist] * (key[0] == "mnist")) for key in GOLDEN], ids=str)
def test_a_subset_is_what_the_published_records_say_and_draws_from_no_generator(key):
    name, labels, seed = key
    found = data.digits() if name == "digits" else data.mnist(str(ROOT))
    torch.manual_seed(3)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    subset = found.subset(labels=labels, val=None, seed=seed)
    assert subset.sha256 == GOLDEN[key]
    assert subset.sha256 == hashlib.sha256(np.array(subset.index.tolist(), "<i8").tobytes()).hexdigest()
    assert torch.equal(torch_state, torch.get_rng_state()) and np.array_equal(numpy_state, np.random.get_state()[1])


def test_the_test_split_of_the_digits_is_fixed():
    test = data.digits().test.open()
    assert hashlib.sha256(test.images.numpy().tobytes()).hexdigest()[:16] == "7e37f66151bdbcf8"
    assert len(test) == 500 and len(data.digits().train) == 1297
    assert not set(identity(test)) & set(identity(data.digits().train))


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_subset_follows_the_rule_written_out_slowly(seed):
    found, val, counts = toy(), 11, (40, 25, 15, 20)
    queues = [[i for i in shuffled(range(100), seed, "subset") if found.train.labels[i] == label] for label in range(4)]
    exact = [val * count / 100 for count in counts]
    held = [int(share) for share in exact]
    for label in sorted(range(4), key=lambda label: held[label] - exact[label])[: val - sum(held)]:
        held[label] += 1
    validating = {i for queue, count in zip(queues, held) for i in queue[len(queue) - count :]}
    queues = [queue[: len(queue) - count] for queue, count in zip(queues, held)]
    drawn = [queues[label][turn] for turn in range(12) for label in shuffled(range(4), seed, "subset/class")][:46]
    subset = found.subset(labels=46, val=val, seed=seed)
    assert subset.index.tolist() == drawn
    assert set(subset.val_index.tolist()) == validating
    assert identity(subset.train) == [(i // 256, i % 256) for i in drawn]


def test_every_prefix_of_a_subset_is_a_subset_and_balanced():
    found = toy()
    largest = found.subset(labels=52, val=10, seed=2).index.tolist()
    for labels in range(4, 52):
        subset = found.subset(labels=labels, val=10, seed=2)
        assert subset.index.tolist() == largest[:labels]
        share = Counter(subset.train.labels.tolist()).values()
        assert len(share) == 4 and max(share) - min(share) <= 1
    assert found.subset(labels=None, val=10, seed=2).index.tolist()[:52] == largest


def test_who_gets_the_odd_label_depends_on_the_seed():
    assert len({int(toy().subset(labels=5, val=0, seed=seed).train.labels[4]) for seed in range(20)}) > 1


@pytest.mark.parametrize("val", [None, 0, 1, 10, 33])
def test_validation_is_proportional_never_labelled_and_the_same_for_every_number_of_labels(val):
    found, size = toy(), 20 if val is None else val
    subsets = [found.subset(labels=labels, val=val, seed=5) for labels in (4, 20, 30, None)]
    for subset in subsets:
        assert len(subset.val) == size and torch.equal(subset.val_index, subsets[0].val_index)
        assert not set(identity(subset.val)) & set(identity(subset.train))
        share = torch.bincount(subset.val.labels, minlength=4) - torch.tensor([40, 25, 15, 20]) * size / 100
        assert share.abs().max() < 1
    assert len(subsets[-1].train) + size == 100


@needs_mnist
def test_mnist_validates_on_a_thousand_by_default():
    subset = data.mnist(str(ROOT)).subset(labels=None, val=None, seed=0)
    assert (len(subset.train), len(subset.val)) == (59_000, 1_000)


def test_a_validation_split_that_the_data_brings_is_used_and_costs_no_training_image():
    found = toy(val=30)
    few, all_of_it = found.subset(labels=None, val=8, seed=0), found.subset(labels=8, val=None, seed=0)
    assert len(few.train) == 100 and len(few.val) == 8 and len(all_of_it.val) == 30
    assert identity(few.val) == identity(all_of_it.val)[:8] == identity(found.val.take(few.val_index))
    with pytest.raises(ValueError, match="val=31: expected None or a number from 0 to 30"):
        found.subset(labels=8, val=31, seed=0)


@pytest.mark.parametrize(
    ("labels", "val", "message"),
    [
        (101, 0, "labels=101: .* from 0 to 100"),
        (10, 101, "val=101: .* from 0 to 100"),
        (-1, 0, "labels=-1"),
        (10, -3, "val=-3"),
        (0.1, 0, "labels=0.1"),
        (3, 0, "labels=3 leaves classes without a training example: expected at least 4"),
        (0, 0, "labels=0 leaves classes without"),
        (95, 10, "labels=95 needs 24 images of class '.', which has .* beside the 10 for validation"),
        (None, 100, "needs 1 images of class '.', which has 0 beside the 100 for validation"),
    ],
)
def test_a_subset_that_cannot_be_drawn_says_why(labels, val, message):
    with pytest.raises(ValueError, match=message):
        toy().subset(labels=labels, val=val, seed=0)


@pytest.mark.parametrize("seed", range(4))
def test_a_class_that_is_too_small_is_named_with_the_largest_subset_that_works(seed):
    found = toy((40, 3, 40, 40))
    with pytest.raises(ValueError, match="labels=40 needs 10 images of class 'b', which has 3 beside the 0 ") as error:
        found.subset(labels=40, val=0, seed=seed)
    most = int(str(error.value).split("at most ")[1].split()[0])
    assert len(found.subset(labels=most, val=0, seed=seed).train) == most
    with pytest.raises(ValueError, match="class 'b'"):
        found.subset(labels=most + 1, val=0, seed=seed)


def test_a_class_without_a_training_image_is_named():
    with pytest.raises(ValueError, match="needs 1 images of class 'b', which has 0"):
        toy((10, 0, 10)).subset(labels=None, val=0, seed=0)


# Images, their spec and the seal


def test_images_come_as_pixels_targets_and_normalised_batches():
    train = data.digits().train
    index = torch.tensor([3, 1, 1])
    assert train.pixels().min() == 0 and train.pixels().max() == 1 and train.pixels(index).shape == (3, 1, 8, 8)
    assert train.targets(index).shape == (3, 10) and train.targets(index).argmax(1).equal(train.labels[index])
    assert train.take(index).images.equal(train.images[index])
    images, labels = (torch.cat(pieces) for pieces in zip(*train.batches(100)))
    assert images.equal(train.spec.normalise(train.pixels())) and labels.equal(train.labels)
    assert list(train.take(slice(0)).batches()) == []
    with pytest.raises(ValueError, match="size=-1"):
        list(train.batches(-1))


def test_black_stays_zero_on_a_black_background_and_photos_are_centred(tmp_path):
    spec = data.digits().spec
    assert spec.normalise(torch.zeros(1, 1, 8, 8)).eq(0).all() and spec.digits
    assert spec.std == pytest.approx((data.digits().train.pixels().std().item(),), rel=1e-3)
    photos = data.arrays(archive(tmp_path, shape=(20, 6, 5, 3))).train
    normal = photos.spec.normalise(photos.pixels())
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normal.std((0, 2, 3), correction=0), torch.ones(3))


@needs_mnist
def test_mnist_has_the_published_spread():
    spec = data.mnist(str(ROOT)).spec
    assert spec.mean == (0.0,) and spec.std == pytest.approx((0.3081,), abs=1e-4)
    assert (spec.channels, spec.size, spec.classes, spec.digits) == (1, (28, 28), tuple("0123456789"), True)


@pytest.mark.parametrize("pixels", [torch.zeros(2, 3, 8, 8), torch.zeros(2, 1, 8, 8, dtype=torch.uint8)])
def test_normalising_what_is_not_of_this_data_is_refused(pixels):
    with pytest.raises(ValueError, match="expected floats in"):
        data.digits().spec.normalise(pixels)


@pytest.mark.parametrize(("mean", "std"), [((0.0,), (0.0,)), ((0.0,), (float("nan"),)), ((0.0, 0.0), (1.0,))])
def test_a_spec_that_cannot_normalise_is_refused(mean, std):
    with pytest.raises(ValueError, match="expected 1 means and standard deviations above 0"):
        data.DataSpec(name="toy", channels=1, size=(1, 1), classes=("a",), mean=mean, std=std)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(2, 1, 8, 8)}, "uint8"),
        ({"images": torch.zeros(2, 1, 8, 9, dtype=torch.uint8)}, r"\(2, 1, 8, 8\), got .* \(2, 1, 8, 9\)"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "expected uint8 images"),
        ({"labels": torch.zeros(2)}, "expected int64 labels"),
        ({"labels": torch.tensor([-1, 10])}, r"labels from 0 to 9, got \[-1, 10\]"),
    ],
)
def test_images_that_do_not_fit_their_spec_are_refused(change, message):
    fields = {"images": torch.zeros(2, 1, 8, 8, dtype=torch.uint8), "labels": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        data.Images(**(fields | change), spec=data.digits().spec)


def test_sealed_images_come_only_through_open_which_counts():
    found = toy()
    for use in (len, iter, list, lambda sealed: sealed[0], lambda sealed: next(iter(DataLoader(sealed)))):
        with pytest.raises(TypeError, match="the test images are sealed"):
            use(found.test)
    for name in ("images", "labels", "pixels", "targets", "take", "batches"):
        assert not hasattr(found.test, name)
    assert found.test.reads == 0
    assert found.test.open() is found.train and found.test.reads == 1


def test_test_images_that_were_trained_on_are_counted_and_the_seal_is_whole():
    def own(n):
        return np.random.default_rng(n).integers(0, 256, (n, 4, 4), np.uint8)

    def found(test, **val):
        splits = {"train": own(12), "test": test} | val
        labels = {part: np.arange(len(images)) % 2 for part, images in splits.items()}
        splits = {part: (images, labels[part]) for part, images in splits.items()}
        return data.Dataset.from_arrays("own", splits, ("a", "b"))

    leaky = found(np.concatenate([own(12)[[3, 3, 7]], own(5)]))
    assert leaky.repeats == 3 and leaky.test.reads == 0
    assert found(own(5)).repeats == 0 and found(own(5), val=own(5)[:2]).repeats == 2


# People's own arrays


def archive(folder, shape=(20, 6, 5), val=False, **change):
    """An .npz in the MedMNIST layout; `change` replaces an array, or leaves it out with None."""
    draw = np.random.default_rng(0)
    content = {}
    for part in ("train", "test", "val")[: 2 + val]:
        content[f"{part}_images"] = draw.integers(0, 256, shape, np.uint8)
        content[f"{part}_labels"] = np.arange(shape[0], dtype=np.uint8)[:, None] % 4
    path = folder / "own.npz"
    np.savez_compressed(path, **{key: array for key, array in (content | change).items() if array is not None})
    return str(path)


@pytest.mark.parametrize("shape", [(20, 6, 5), (20, 5, 5, 1), (20, 6, 5, 3), (20, 5, 6, 4)])
def test_own_arrays_of_any_channels_and_size(tmp_path, shape):
    path = archive(tmp_path, shape, val=True)
    found, stored = data.arrays(path, digits=True), np.load(path)
    channels = shape[3] if len(shape) == 4 else 1
    assert (found.spec.channels, found.spec.size, found.spec.digits) == (channels, shape[1:3], True)
    assert found.spec.classes == ("0", "1", "2", "3") and found.spec.name == "own.npz"
    for part, images in {"train": found.train, "test": found.test.open(), "val": found.val}.items():
        assert np.array_equal(images.images.permute(0, 2, 3, 1).numpy().reshape(shape), stored[f"{part}_images"])
        assert images.labels.tolist() == [i % 4 for i in range(20)]


def test_own_floats_become_bytes(tmp_path):
    floats = np.linspace(0, 1, 20 * 6 * 5, dtype=np.float32).reshape(20, 6, 5)
    found = data.arrays(archive(tmp_path, train_images=floats))
    assert np.abs(found.train.pixels().numpy()[:, 0] - floats).max() <= 0.5 / 255 + 1e-6
    assert found.val is None


def test_a_channel_that_never_varies_does_not_become_nan(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (20, 6, 5, 4), np.uint8)
    images[..., 3] = 255
    train = data.arrays(archive(tmp_path, train_images=images, test_images=images)).train
    assert train.spec.normalise(train.pixels())[:, 3].eq(0).all()


BYTES = np.zeros((20, 6, 5), np.uint8)
FLOATS = np.zeros((20, 6, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_labels": None, "train_images": None}, "has no test_labels, train_images; it has train_labels, test_images"),
        ({"val_images": BYTES}, "has no val_labels"),
        ({"train_images": np.where(np.arange(20) == 7, np.nan, 0.0)[:, None, None] + FLOATS}, "train .* image 7 has nan"),
        ({"test_images": FLOATS + 1.5}, "own.npz, test images: expected floats in .* image 0 has 1.5"),
        ({"test_images": FLOATS + np.inf}, "image 0 has inf"),
        ({"train_images": BYTES.astype(np.int64)}, "uint8 or floats .* got int64"),
        (
            {"train_images": BYTES + np.eye(6, 5, dtype=np.uint8)},
            "training images are bytes of 0 and 1, nearly black; expected 0 to 255",
        ),
        ({"train_images": BYTES[0]}, r"expected n h w or n h w c .* got \(6, 5\)"),
        ({"train_images": np.zeros((20, 3, 6, 5), np.uint8)}, "1, 3 or 4 channels"),
        ({"train_images": BYTES[:0], "train_labels": np.zeros(0, int)}, "at least one image"),
        ({"test_images": np.zeros((20, 6, 6), np.uint8)}, r"own.npz, test: .* \(20, 1, 6, 5\), got .* \(20, 1, 6, 6\)"),
        ({"test_images": np.zeros((20, 6, 5, 3), np.uint8)}, "own.npz, test: expected uint8 images"),
        ({"test_labels": np.arange(19) % 4}, r"own.npz, test labels: expected 20 integers, got .* \(19,\)"),
        ({"test_labels": np.zeros((20, 2), int)}, "test labels: expected 20 integers"),
        ({"train_labels": np.arange(20) % 4.0}, "train labels: expected 20 integers, got float64"),
        ({"train_labels": np.arange(20) % 4 - 1}, r"train_labels must be 0, 1, 2, .* got \[-1, 0, 1, 2\]"),
        ({"train_labels": np.arange(20) % 4 * 2}, r"train_labels must be .* got \[0, 2, 4, 6\]"),
        ({"test_labels": np.arange(20)}, r"own.npz, test: expected labels from 0 to 3, got \[4, 5"),
        ({"train_images": np.array([{}] * 20)}, "own.npz cannot be read as an .npz of plain arrays .*allow_pickle"),
    ],
)
def test_own_arrays_that_are_wrong_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        data.arrays(archive(tmp_path, **change))


@pytest.mark.parametrize("spoil", [lambda b: b[:200], lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"PK nonsense"])
def test_a_truncated_archive_is_named_and_left_alone(tmp_path, spoil):
    path = Path(archive(tmp_path))
    path.write_bytes(spoil(path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"own\.npz cannot be read as an \.npz"):
        data.arrays(str(path))
    assert path.read_bytes() == before


def test_an_archive_with_flipped_bytes_or_none_at_all_is_named(tmp_path):
    path = Path(archive(tmp_path))
    content = bytearray(path.read_bytes())
    content[100:140] = bytes(40)
    path.write_bytes(content)
    for wrong in (path, tmp_path / "absent.npz"):
        with pytest.raises(ValueError, match=f"{wrong.name} cannot be read as an .npz"):
            data.arrays(str(wrong))


# People's own image files


MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def pictures(folder, channels=1, size=(6, 9), parts=("train", "test"), classes=("cat", "dog")):
    """Three PNG files of (height, width) `size` for every part and class."""
    draw = np.random.default_rng(0)
    for part in parts:
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for i in range(3):
                pixels = draw.integers(0, 256, (*size, channels), np.uint8)
                Image.fromarray(pixels.squeeze()).convert(MODES[channels]).save(folder / part / name / f"{i}.png")
    return folder


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_own_files_of_any_channels_and_size(tmp_path, channels):
    found = data.folder(str(pictures(tmp_path, channels, parts=("train", "test", "val"))))
    assert (found.spec.channels, found.spec.size, found.spec.classes) == (channels, (6, 9), ("cat", "dog"))
    assert found.train.labels.tolist() == found.val.labels.tolist() == [0, 0, 0, 1, 1, 1]
    stored = np.array(Image.open(tmp_path / "test" / "dog" / "1.png")).reshape(6, 9, channels)
    assert np.array_equal(found.test.open().images[4].permute(1, 2, 0).numpy(), stored)
    assert not found.spec.digits and data.folder(str(tmp_path), digits=True).spec.digits


@pytest.mark.parametrize(("size", "expected"), [(4, (4, 4)), ((3, 5), (3, 5))])
def test_own_files_are_resized_and_converted_on_request(tmp_path, size, expected):
    pictures(tmp_path)
    Image.new("RGB", (20, 20), (255, 255, 255)).save(tmp_path / "train" / "cat" / "other.png")
    Image.new("P", (8, 8)).save(tmp_path / "test" / "cat" / "palette.png")
    found = data.folder(str(tmp_path), size=size, channels=3)
    assert found.spec.size == expected and found.spec.channels == 3 and found.val is None
    assert found.train.images[3].eq(255).all()


def test_a_picture_is_transparent_only_where_that_is_asked_for(tmp_path):
    pictures(tmp_path, channels=4)
    with pytest.raises(ValueError, match=r"png is transparent in places.*expected channels=4, or no alpha"):
        data.folder(str(tmp_path), channels=3)
    for file in tmp_path.rglob("*.png"):
        picture = Image.open(file)
        picture.putalpha(255)
        picture.save(file)
    assert data.folder(str(tmp_path), channels=3, size=4).spec.channels == 3


def test_a_photograph_stands_the_way_up_that_its_camera_says(tmp_path):
    turned = Image.new("L", (9, 6))
    turned.paste(255, (0, 0, 3, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by a quarter, clockwise
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / part / name).mkdir(parents=True)
            turned.save(tmp_path / part / name / "0.jpg", exif=exif, quality=95)
    image = data.folder(str(tmp_path)).train.images[0, 0]
    assert image.shape == (9, 6) and image[:2].min() > 200 and image[4:].max() < 50


def other_size(top):
    Image.new("L", (9, 7)).save(top / "test" / "dog" / "x.png")


def other_channels(top):
    Image.new("RGB", (9, 6)).save(top / "train" / "dog" / "x.png")


def palette(top):
    Image.new("P", (9, 6)).save(top / "train" / "dog" / "x.png")


def sixteen_bits(top):
    Image.fromarray(np.full((6, 9), 40_000, np.uint16)).save(top / "train" / "dog" / "x.png")


def truncated(top):
    whole = (top / "train" / "dog" / "0.png").read_bytes()
    (top / "train" / "dog" / "x.png").write_bytes(whole[: len(whole) // 2])


def no_image(top):
    (top / "train" / "dog" / "x.png").write_text("<html>404</html>")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (other_size, r"dog.x.png is \(7, 9, 1\) .* but .*cat.0.png is \(6, 9, 1\): pass size="),
        (other_channels, r"dog.x.png is \(6, 9, 3\) .*: pass channels="),
        (palette, "dog.x.png is P: expected 8-bit grey"),
        (sixteen_bits, "dog.x.png is I;16: expected 8-bit grey"),
        (truncated, "dog.x.png cannot be read as an image"),
        (no_image, "dog.x.png cannot be read as an image"),
        (lambda top: (top / "test" / "dog").rename(top / "test" / "cow"), r"train and test differ in \['cow', 'dog'\]"),
        (lambda top: (top / "train" / "eel").mkdir(), "expected train/<class>/.*eel"),
        (lambda top: (top / "test").rename(top / "tset"), "expected train/<class>/.*test"),
        (
            lambda top: [(top / "test" / name).rename(top / "test" / f".{name}") for name in ("cat", "dog")],
            "no folder in .*test",
        ),
    ],
)
def test_own_files_that_are_wrong_are_named(tmp_path, spoil, message):
    spoil(pictures(tmp_path))
    with pytest.raises(ValueError, match=message):
        data.folder(str(tmp_path))


def test_what_a_notebook_and_a_mac_leave_behind_is_no_class_and_no_image(tmp_path):
    pictures(tmp_path)
    for place in (tmp_path / "train", tmp_path / "test", tmp_path / "train" / "dog"):
        (place / ".ipynb_checkpoints").mkdir()
        Image.new("L", (9, 6)).save(place / ".ipynb_checkpoints" / "0-checkpoint.png")
    (tmp_path / "train" / "cat" / "._0.png").write_bytes(b"Mac OS X")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("three cats")
    found = data.folder(str(tmp_path))
    assert found.spec.classes == ("cat", "dog") and found.train.labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_path_means_what_it_means_from_where_one_stands(tmp_path, monkeypatch):
    for name, classes in (("here", ("cat", "dog")), ("there", ("cow", "eel"))):
        pictures(tmp_path / name / "mine", classes=classes)
        monkeypatch.chdir(tmp_path / name)
        assert data.folder("mine").spec.classes == classes
    assert data.folder("mine", size=[4, 4]) is data.folder(str(tmp_path / "there" / "mine"), (4, 4), channels=None)


def test_greys_of_sixteen_bits_are_not_cut_off_by_a_conversion_either(tmp_path):
    sixteen_bits(pictures(tmp_path))
    with pytest.raises(ValueError, match="I;16"):
        data.folder(str(tmp_path), channels=1)


@pytest.mark.parametrize("wrong", [{"channels": 2}, {"size": 0}, {"size": (4, 4, 4)}])
def test_a_size_or_channels_that_cannot_be_are_refused(tmp_path, wrong):
    with pytest.raises(ValueError, match="expected channels 1, 3 or 4 and a size"):
        data.folder(str(tmp_path), **wrong)


# The sets that torchvision knows


def write_idx(path, array):
    """`array`, of bytes or of 32-bit integers, as the format says: magic, shape and values, all big-endian."""
    path.parent.mkdir(parents=True, exist_ok=True)
    magic = bytes([0, 0, 0x08 if array.dtype == np.uint8 else 0x0C, array.ndim])
    path.write_bytes(magic + np.array(array.shape, ">u4").tobytes() + array.astype(array.dtype.newbyteorder(">")).tobytes())


def write_set(raw, stems=("train", "t10k"), classes=10, first=0, labels="idx1-ubyte"):
    draw = np.random.default_rng(0)
    for stem in stems:
        write_idx(raw / f"{stem}-images-idx3-ubyte", draw.integers(0, 256, (2 * classes, 28, 28), np.uint8))
        label = np.arange(2 * classes, dtype=np.uint8) % classes + first
        if labels == "idx2-int":
            label = np.stack([label.astype(np.int32), np.full(2 * classes, 70_000, np.int32)], 1)
        write_idx(raw / f"{stem}-labels-{labels}", label)
    return raw


@pytest.fixture
def offline(monkeypatch):
    """Whatever reaches for the network fails, and says so."""

    def refuse(*_, **__):
        raise OSError("the network is off")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)


@pytest.mark.parametrize(
    ("load", "folder"), [(data.mnist, "MNIST"), (data.fashion_mnist, "FashionMNIST"), (data.kmnist, "KMNIST")]
)
def test_sets_that_are_there_are_read_without_a_network(tmp_path, offline, load, folder):
    raw = write_set(tmp_path / folder / "raw")
    found = load(str(tmp_path))
    stored = np.frombuffer((raw / "train-images-idx3-ubyte").read_bytes()[16:], np.uint8).reshape(20, 1, 28, 28)
    assert np.array_equal(found.train.images.numpy(), stored) and found.train.labels.tolist() == [*range(10)] * 2
    assert len(found.test.open()) == 20 and len(found.spec.classes) == 10
    assert found.spec.digits == (load is not data.fashion_mnist) and found.spec.mean == (0.0,)
    assert load(str(tmp_path)) is found


def test_emnist_is_turned_upright_and_counts_from_zero(tmp_path, offline):
    raw = write_set(tmp_path / "EMNIST" / "raw", ("emnist-letters-train", "emnist-letters-test"), 26, first=1)
    found = data.emnist(root=str(tmp_path))
    stored = np.frombuffer((raw / "emnist-letters-train-images-idx3-ubyte").read_bytes()[16:], np.uint8).reshape(52, 28, 28)
    assert np.array_equal(found.train.images[:, 0].numpy(), stored.transpose(0, 2, 1))
    assert found.spec.classes == tuple("abcdefghijklmnopqrstuvwxyz") and found.train.labels[:26].tolist() == [*range(26)]
    with pytest.raises(ValueError, match="no split 'letter', expected one of byclass, bymerge"):
        data.emnist("letter", root=str(tmp_path))


def test_qmnist_reads_the_class_out_of_its_eight_columns(tmp_path, offline):
    write_set(tmp_path / "QMNIST" / "raw", ("qmnist-train", "qmnist-test"), labels="idx2-int")
    assert data.qmnist(str(tmp_path)).train.labels.tolist() == [*range(10)] * 2


def test_cifar10_and_its_checksums(tmp_path, offline, monkeypatch):
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
    found = data.cifar10(str(tmp_path))
    assert np.array_equal(found.train.images[10:20].numpy(), pixels.reshape(10, 3, 32, 32))
    assert found.spec.classes == tuple(classes) and found.spec.mean[0] > 0 and len(found.test.open()) == 10


def test_svhn_counts_its_noughts_as_nought(tmp_path, offline, monkeypatch):
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    pixels, listed = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 20), np.uint8), {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}_32x32.mat"
        savemat(path, {"X": pixels, "y": np.arange(20, dtype=np.uint8)[:, None] % 10 + 1})
        listed[split] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(SVHN, "split_list", listed)
    found = data.svhn(str(tmp_path))
    assert np.array_equal(found.train.images.numpy(), pixels.transpose(3, 2, 0, 1)) and found.spec.digits
    assert found.train.labels[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


@pytest.mark.parametrize(
    ("load", "below", "file"),
    [
        (data.mnist, "MNIST/raw", "t10k-labels-idx1-ubyte"),
        (data.emnist, "EMNIST/raw", "emnist-letters-train-images-idx3-ubyte"),
        (data.qmnist, "QMNIST/raw", "qmnist-test-labels-idx2-int"),
        (data.cifar10, "cifar-10-batches-py", "data_batch_5"),
        (data.svhn, "", "test_32x32.mat"),
    ],
)
def test_without_a_network_one_sentence_says_what_to_put_where(tmp_path, offline, monkeypatch, load, below, file):
    monkeypatch.setenv("SMALLVIT_DATA", str(tmp_path))
    load.cache_clear()
    with pytest.raises(ValueError) as error:
        load()
    message = str(error.value)
    assert f"not complete in {tmp_path / below} and cannot be downloaded" in message and "\n" not in message
    assert file in message and "SMALLVIT_DATA" in message and "the network is off" in message
    assert not [path for path in tmp_path.rglob("*") if path.name != ".download.lock"]


def test_the_folder_is_the_argument_else_the_variable_else_a_cache(tmp_path, offline, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SMALLVIT_DATA", str(tmp_path / "variable"))
    for root, expected in ((str(tmp_path / "argument"), "argument"), (None, "variable")):
        with pytest.raises(ValueError, match=f"{tmp_path / expected / 'KMNIST'}"):
            data.kmnist(root)
    monkeypatch.delenv("SMALLVIT_DATA")
    with pytest.raises(ValueError, match=f"{tmp_path / 'cache' / 'smallvit' / 'KMNIST'}"):
        data.kmnist()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:1000], r"has 1000 bytes, but its header says \[20, 28, 28\], 15696 bytes"),
        ("train-images-idx3-ubyte", lambda b: b + b"x", "has 15697 bytes, .* 15696 bytes"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:20], r"has 20 bytes, but its header says \[20\], 28 bytes"),
        ("t10k-images-idx3-ubyte", lambda b: b[:9], r"at least 16 bytes that start with \[0, 0, 8, 3\], got 9 bytes"),
        ("t10k-images-idx3-ubyte", lambda b: b"", "got 0 bytes"),
        ("train-labels-idx1-ubyte", lambda b: b"\x1f\x8b\x08\x08" + b[4:], r"start with \[0, 0, 8, 1\], got .* \[31, 139"),
        ("t10k-labels-idx1-ubyte", lambda b: b[:7] + b"\x13" + b[8:27], r"expected 20 integers, got uint8 \(19,\)"),
        ("train-labels-idx1-ubyte", lambda b: b[:8] + b"\x0b" + b[9:], r"mnist, train: .* from 0 to 9, got \[11\]"),
    ],
)
def test_a_damaged_idx_file_is_named_and_nothing_is_touched(tmp_path, offline, file, spoil, message):
    raw = write_set(tmp_path / "MNIST" / "raw")
    (raw / file).write_bytes(spoil((raw / file).read_bytes()))
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        data.mnist(str(tmp_path))
    assert file in str(error.value) or "mnist, " in str(error.value)
    assert contents(tmp_path) == before


class Published:
    """Stands in for a torchvision set: `download=True` writes all four files."""

    calls = 0

    def __init__(self, root, download):
        assert download
        Published.calls += 1
        write_set(Path(root) / "FashionMNIST" / "raw")


def test_a_missing_file_is_downloaded_and_what_was_there_is_kept(tmp_path, offline, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.FashionMNIST", Published)
    raw = write_set(tmp_path / "FashionMNIST" / "raw")
    (raw / "t10k-labels-idx1-ubyte").unlink()
    write_idx(raw / "train-images-idx3-ubyte", np.full((20, 28, 28), 9, np.uint8))
    before = contents(raw)
    found = data.fashion_mnist(str(tmp_path))
    assert Published.calls == 1 and found.train.images.eq(9).all()
    assert contents(raw).items() > before.items()
    assert not list(tmp_path.glob(".download-*"))


LOADERS = [name for name, value in vars(data).items() if hasattr(value, "cache_clear")]


def test_a_record_can_name_every_loader_and_many_runs_share_one_copy():
    assert len(LOADERS) == 10
    for name in LOADERS:
        load = getattr(data, name)
        home = "own" if name in ("arrays", "folder") else "published"
        assert (load.__module__, load.__qualname__) == (f"smallvit.data.{home}", name) and load.__doc__
    assert data.digits() is data.digits()


def test_every_public_name_is_found_in_the_file_that_it_says_it_comes_from():
    assert len(data.__all__) == 15 and {*LOADERS} < {*data.__all__}
    for name in data.__all__:
        thing = getattr(data, name)
        assert vars(sys.modules[thing.__module__])[name] is thing


def test_importing_the_data_imports_no_torchvision_and_no_sklearn():
    code = "import sys, smallvit.data; print({'torchvision', 'sklearn'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert found.stdout.strip() == "set()", found.stdout + found.stderr
