"""Folds, held-out parts and groups: what is tested when, and which images are on one side."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smallvit import data
from smallvit.data import DataSpec, Images
from smallvit.data.dataset import Dataset


def pool(labels, groups=None, **options):
    """A data set made from distinct 1 x 2 images with the given labels and group numbers."""
    n, k = len(labels), max(labels) + 1
    number = torch.arange(n).view(-1, 1, 1, 1)
    spec = DataSpec(name="toy", channels=1, size=(1, 2), classes=tuple("abcdefgh"[:k]), mean=(0.0,), std=(1.0,))
    images = Images(torch.cat([number // 250, number % 250 + 2], 3).to(torch.uint8), torch.tensor(labels), spec)
    groups = None if groups is None else torch.tensor(groups)
    return Dataset.from_pool(images, groups, **({"folds": None, "test": None} | options))


def numbers(images):
    """The numbers of the images in the data set of `pool`."""
    return [250 * high + low - 2 for high, low in images.images[:, 0, 0].tolist()]


# Cross-validation


def test_one_pass_tests_every_image_once_and_passes_differ():
    dataset = pool([i % 3 for i in range(50)], folds=4)
    assert (dataset.folds, dataset.test.count, dataset.fold, len(dataset.train)) == (4, 0, None, 50)
    passes = []
    for number in range(3):
        tested = []
        for seed in range(4 * number, 4 * number + 4):
            part = dataset.at_seed(seed)
            assert part.fold.folds == 4 and part.fold.pool == 50 and part.folds == 0 and part.at_seed(7) is part
            assert numbers(part.test.open()) == part.fold.index.tolist() == sorted(part.fold.index.tolist())
            assert sorted(numbers(part.train) + numbers(part.test.open())) == [*range(50)]
            counts = part.test.open().labels.bincount(minlength=3)
            assert counts.max() - counts.min() <= 2
            tested.append(part.fold.index.tolist())
        assert sorted(i for part in tested for i in part) == [*range(50)]
        passes.append(tested)
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_split_of_a_seed_is_fixed_and_hashes_are_those_of_the_pool():
    one, other = (pool([i % 3 for i in range(50)], folds=5) for _ in range(2))
    for seed in (0, 3, 11):
        assert torch.equal(one.at_seed(seed).fold.index, other.at_seed(seed).fold.index)
        assert one.at_seed(seed).sha256 == one.sha256 and one.at_seed(seed).test.sha256 == one.train.sha256
        assert one.at_seed(seed).test.reads == 0 and one.at_seed(seed).repeats == 0
    assert one.sha256.startswith("db6ad5c08741f739") and one.at_seed(7).test.sha256.startswith("5db2072bb9d00deb"), "version 0.3.0"
    assert one.sha256 != pool([i % 3 for i in range(49)] + [0], folds=5).sha256


def test_hash_of_a_data_set_depends_on_the_division_into_groups_and_not_on_their_numbers():
    labels = [i % 3 for i in range(60)]
    hashes = [pool(labels, groups, folds=2).sha256 for groups in ([i // 6 for i in range(60)], [90 - i // 6 for i in range(60)])]
    assert hashes[0] == hashes[1] != pool(labels, [i // 5 for i in range(60)], folds=2).sha256
    assert pool(labels, folds=2).sha256 not in hashes


def test_images_are_drawn_from_a_fold_and_not_from_all_images():
    dataset = pool([i % 3 for i in range(60)], folds=4)
    with pytest.raises(ValueError, match=r"divided into 4 folds, .* take the fold of a run first: data.at_seed\(5\)"):
        dataset.subset(labels=None, val=6, seed=5)
    assert len(dataset.at_seed(5).subset(labels=None, val=6, seed=5).train) == 60 - 15 - 6


def test_folds_are_those_of_scikit_learn():
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    labels, groups = [i % 2 for i in range(60)], [i // 4 for i in range(60)]
    for dataset, splitter in ((pool(labels, folds=3), StratifiedKFold), (pool(labels, groups, folds=3), StratifiedGroupKFold)):
        for number in (0, 1):
            split = splitter(3, shuffle=True, random_state=number).split(np.zeros(60), labels, groups)
            for fold, (_, test) in enumerate(split):
                assert dataset.at_seed(3 * number + fold).fold.index.tolist() == test.tolist()


def test_normalization_uses_the_training_images_of_the_fold():
    for seed in range(3):
        part = pool([i % 2 for i in range(60)], folds=3).at_seed(seed)
        normalized = part.spec.normalize(part.train.pixels())
        assert abs(normalized.mean()) < 1e-5 and abs(normalized.std(correction=0) - 1) < 1e-5
        assert part.spec == part.train.spec == part.test.open().spec


def test_data_set_without_folds_is_the_same_for_all_seeds():
    digits = data.digits()
    assert digits.at_seed(3) is digits and digits.folds == 0 and digits.groups is None and digits.test_groups is None


def test_groups_stay_on_one_side_also_for_validation():
    labels, groups = [i % 2 for i in range(200)], [i // 5 for i in range(200)]
    for dataset in (pool(labels, groups, folds=4), pool(labels, groups, test=0.25)):
        for seed in range(8):
            part = dataset.at_seed(seed)
            subset = part.subset(labels=20, val=None, seed=seed)
            of = [{number // 5 for number in numbers(images)} for images in (subset.train, subset.val, part.test.open())]
            assert not of[0] & of[1] and not (of[0] | of[1]) & of[2]
            assert [number // 5 for number in numbers(part.test.open())] == part.test_groups.tolist()
            assert [number // 5 for number in numbers(part.train)] == part.groups.tolist()
            assert subset.train.labels.bincount().tolist() == [10, 10] and abs(len(subset.val) - 30) <= 3
            larger = part.subset(labels=60, val=None, seed=seed)
            assert torch.equal(larger.index[:20], subset.index) and torch.equal(larger.val_index, subset.val_index)


# A held-out part


def test_held_out_part_is_the_same_for_all_seeds_and_proportional():
    labels = [0] * 60 + [1] * 30 + [2] * 3
    dataset, again = (pool(labels, test=0.2) for _ in range(2))
    assert dataset.at_seed(5) is dataset and numbers(dataset.test.open()) == numbers(again.test.open())
    assert dataset.test.open().labels.bincount().tolist() == [12, 6, 1] and len(dataset.train) == 74
    assert set(numbers(dataset.train)) | set(numbers(dataset.test.open())) == {*range(93)}
    assert dataset.fold is None and dataset.folds == 0


def test_without_test_images_all_images_train():
    for groups in (None, [i // 2 for i in range(50)]):
        dataset = pool([i % 3 for i in range(49)] + [3], groups, test=0.0)  # the last class has one image
        assert (dataset.test.count, dataset.folds, dataset.fold, dataset.repeats) == (0, 0, None, 0)
        assert numbers(dataset.train) == [*range(50)] and dataset.at_seed(3) is dataset
        everything = dataset.subset(labels=None, val=0, seed=0)
        assert sorted(numbers(everything.train)) == [*range(50)] and not len(everything.val)
        with pytest.raises(ValueError, match=r"toy has no test images \(test=0.0\).* set test=0.2 or folds=5, or .*validation_only=True"):
            dataset.check_test_images()
    for options in ({"test": 0.2}, {"folds": 5}, {"folds": 3, "test": 0.4}):
        pool([i % 3 for i in range(50)], **options).check_test_images()


# Folds of a held-out part


def test_one_pass_tests_every_image_of_the_part_once_and_no_other():
    labels = [i % 3 for i in range(60)]
    part = numbers(pool(labels, test=0.5).test.open())
    dataset = pool(labels, folds=4, test=0.5)
    assert (dataset.folds, dataset.test.count, len(dataset.train)) == (4, 0, 60) and numbers(dataset.pool) == part
    passes = []
    for number in range(2):
        tested = []
        for seed in range(4 * number, 4 * number + 4):
            one = dataset.at_seed(seed)
            assert (one.fold.folds, one.fold.pool, one.folds, one.pool_index) == (4, 30, 0, None) and one.at_seed(9) is one
            assert numbers(one.test.open()) == one.fold.positions.tolist() == [part[i] for i in one.fold.index.tolist()]
            assert sorted(numbers(one.train) + numbers(one.test.open())) == [*range(60)]
            assert one.test.open().labels.unique().tolist() == [0, 1, 2] and one.spec == one.train.spec
            subset = one.subset(labels=None, val=None, seed=seed)
            assert sorted(numbers(subset.train) + numbers(subset.val)) == numbers(one.train)
            tested.append(one.fold.index.tolist())
        assert sorted(i for fold in tested for i in fold) == [*range(30)]
        passes.append(tested)
    assert passes[0] != passes[1]
    assert part[:15] == [1, 2, 3, 6, 9, 10, 12, 14, 15, 16, 17, 19, 21, 23, 25], "version 0.3.0"
    assert dataset.at_seed(5).fold.positions.tolist() == [6, 9, 17, 19, 34, 42, 47, 58]


def test_folds_of_a_part_are_those_of_scikit_learn():
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    labels, groups = [i % 2 for i in range(80)], [i // 4 for i in range(80)]
    for chosen, splitter in ((None, StratifiedKFold), (groups, StratifiedGroupKFold)):
        dataset = pool(labels, chosen, folds=3, test=0.5)
        part = numbers(pool(labels, chosen, test=0.5).test.open())
        of_part = [[values[i] for i in part] for values in (labels, groups)]
        for number in (0, 1):
            split = splitter(3, shuffle=True, random_state=number).split(np.zeros(len(part)), *of_part)
            for fold, (_, test) in enumerate(split):
                assert dataset.at_seed(3 * number + fold).fold.index.tolist() == test.tolist()


def test_hashes_of_folds_of_a_part_name_the_part():
    labels = [i % 3 for i in range(60)]
    dataset, fixed = pool(labels, folds=4, test=0.5), pool(labels, test=0.5)
    assert {dataset.at_seed(seed).test.sha256 for seed in (0, 5)} == {fixed.test.sha256}, "settings are counted on the same images"
    assert {dataset.at_seed(seed).sha256 for seed in (0, 5)} == {dataset.sha256}
    others = (pool(labels, folds=4), fixed, pool(labels, folds=4, test=0.4))
    assert dataset.sha256 not in {other.sha256 for other in others} and dataset.sha256 == pool(labels, folds=4, test=0.5).sha256


def test_groups_and_identical_images_stay_on_one_side_of_the_folds_of_a_part():
    labels, groups = [i % 2 for i in range(200)], [i // 5 for i in range(200)]
    dataset = pool(labels, groups, folds=4, test=0.5)
    for seed in range(8):
        part = dataset.at_seed(seed)
        subset = part.subset(labels=20, val=None, seed=seed)
        of = [{number // 5 for number in numbers(images)} for images in (subset.train, subset.val, part.test.open())]
        assert not of[0] & of[1] and not (of[0] | of[1]) & of[2]
        assert [number // 5 for number in numbers(part.test.open())] == part.test_groups.tolist()
        assert [number // 5 for number in numbers(part.train)] == part.groups.tolist()
    spec = replace(dataset.spec, mean=(0.0,), std=(1.0,))
    copies = torch.arange(60).view(-1, 1, 1, 1).expand(60, 1, 1, 2).repeat_interleave(2, 0)
    images = Images(copies.to(torch.uint8).contiguous(), torch.arange(60).repeat_interleave(2) % 2, spec)
    whole = Dataset.from_pool(images, None, folds=3, test=0.5)
    assert {whole.at_seed(seed).repeats for seed in range(6)} == {0} and len(whole.groups.unique()) == 60


def test_number_of_folds_may_be_a_numpy_integer():
    dataset = pool([0, 1] * 10, folds=np.int64(5))
    assert type(dataset.folds) is type(dataset.at_seed(0).fold.folds) is int and dataset.folds == 5


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ([20, 6], {"folds": 5, "test": 0.5}, "folds=5 needs 5 images of each class in the part test=0.5, but 'b' has 3; at most "
                                             "folds=3 is possible, or a larger part than test=0.5"),
        ([20, 6], {"folds": 2, "test": 0.2}, "in the part test=0.2, but 'b' has 1; set a larger test="),
        ([20, 1], {"folds": 2, "test": 0.5}, "test=0.5 needs 2 images of each class, but 'b' has 1; add images"),
        ([20, 6], {"folds": 2, "test": 0.0}, "test=0.0 leaves no images for folds=2; remove one of them"),
        ([20, 6], {"folds": 1, "test": 0.5}, "folds=1; expected a number of folds of at least 2"),
        ([20, 6], {"folds": 2, "test": 1.0}, "test=1.0; expected a share of the images between 0 and 1"),
        ([20, 6], {"test": 0}, "test=0; expected a share of the images between 0 and 1, .* or 0.0 for no test images"),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_divided_are_refused(counts, options, message):
    with pytest.raises(ValueError, match=message):
        pool([label for label, count in enumerate(counts) for _ in range(count)], **options)


# Any groups


@st.composite
def grouped(draw):
    """Labels and group numbers of 2 to 4 classes, with groups of 1 to 6 images that may hold several classes."""
    classes = draw(st.integers(2, 4))
    labels, groups = [], []
    for group in range(draw(st.integers(2, 25))):
        members = draw(st.lists(st.integers(0, classes - 1), min_size=1, max_size=6))
        labels += members
        groups += [group] * len(members)
    return labels, groups, classes


@settings(deadline=None, max_examples=60)
@given(grouped(), st.integers(2, 5), st.integers(0, 30))
@pytest.mark.slow
def test_no_group_is_on_both_sides_and_every_fold_has_every_class(case, folds, seed):
    labels, groups, classes = case
    if {*labels} != {*range(classes)}:
        return
    fewest = min(len({g for g, one in zip(groups, labels) if one == label}) for label in range(classes))
    try:
        dataset = pool(labels, groups, folds=folds)
    except ValueError as error:
        message = str(error)
        if fewest < folds:
            assert f"has {fewest}; " in message and (fewest < 2 or f"at most folds={fewest} is possible" in message)
        else:
            assert "cannot be divided into" in message
        return
    assert fewest >= folds
    tested = []
    for k in range(folds):
        part = dataset.at_seed(seed // folds * folds + k)
        assert not set(part.groups.tolist()) & set(part.test_groups.tolist())
        assert {*part.test.open().labels.tolist()} == {*part.train.labels.tolist()} == {*range(classes)}
        tested += part.fold.index.tolist()
        try:
            subset = part.subset(labels=None, val=None, seed=seed)
        except ValueError:
            continue
        train, val = ({groups[i] for i in numbers(images)} for images in (subset.train, subset.val))
        assert not train & val and {*subset.train.labels.tolist()} == {*range(classes)}
    assert sorted(tested) == [*range(len(labels))]


@settings(deadline=None, max_examples=60)
@given(grouped(), st.integers(2, 4), st.sampled_from([0.3, 0.5, 0.7]), st.integers(0, 30))
@pytest.mark.slow
def test_no_group_is_on_both_sides_of_the_folds_of_a_part(case, folds, share, number):
    labels, groups, classes = case
    if {*labels} != {*range(classes)}:
        return
    try:
        dataset, held_out = pool(labels, groups, folds=folds, test=share), pool(labels, groups, test=share)
        parts = [dataset.at_seed(number * folds + k) for k in range(folds)]
    except ValueError as error:
        assert f"test={share}" in str(error) or "cannot be divided into" in str(error)
        return
    for part in parts:
        assert not set(part.groups.tolist()) & set(part.test_groups.tolist())
        assert {*part.test.open().labels.tolist()} == {*part.train.labels.tolist()} == {*range(classes)}
    assert sorted(i for part in parts for i in numbers(part.test.open())) == numbers(held_out.test.open())


@settings(deadline=None, max_examples=60)
@given(grouped(), st.sampled_from([0.1, 0.2, 0.5]))
def test_held_out_part_never_divides_a_group_and_has_every_class(case, share):
    labels, groups, classes = case
    if {*labels} != {*range(classes)}:
        return
    try:
        dataset = pool(labels, groups, test=share)
    except ValueError as error:
        assert f"test={share}" in str(error)
        return
    assert not set(dataset.groups.tolist()) & set(dataset.test_groups.tolist())
    assert {*dataset.test.open().labels.tolist()} == {*dataset.train.labels.tolist()} == {*range(classes)}


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(2, 30), min_size=2, max_size=5), st.integers(2, 8), st.integers(0, 50))
def test_every_image_is_tested_once_in_a_pass(counts, folds, number):
    labels = [label for label, count in enumerate(counts) for _ in range(count)]
    if min(counts) < folds:
        with pytest.raises(ValueError, match=rf"has {min(counts)}; at most folds={min(counts)} is possible, or test=0.2"):
            pool(labels, folds=folds)
        return
    dataset = pool(labels, folds=folds)
    index = [dataset.at_seed(number * folds + fold).fold.index.tolist() for fold in range(folds)]
    assert sorted(i for part in index for i in part) == [*range(len(labels))]


def test_class_with_one_image_can_neither_be_divided_nor_held_out():
    for options in ({"folds": 2}, {"test": 0.2}):
        with pytest.raises(ValueError, match="needs 2 images of each class, but 'b' has 1; add images, or leave the class out"):
            pool([0] * 9 + [1], **options)


# A leak through patients


def one_nearest_neighbor(train, test):
    """Accuracy of the label of the nearest training image, by the distance of pixels."""
    distance = torch.cdist(test.pixels().flatten(1), train.pixels().flatten(1))
    return (train.labels[distance.argmin(1)] == test.labels).double().mean().item()


def planted_leak(patients=40, images=6):
    """Images of patients, whose pixels show the patient and nothing about the disease, which is a property of the patient."""
    generator = torch.Generator().manual_seed(0)
    faces = torch.rand(patients, 1, 8, 8, generator=generator).repeat_interleave(images, 0)
    noise = 0.05 * torch.randn(faces.shape, generator=generator)
    labels = (torch.arange(patients) % 2).repeat_interleave(images)
    spec = DataSpec(name="leak", channels=1, size=(8, 8), classes=("well", "ill"), mean=(0.0,), std=(1.0,))
    pixels = ((faces + noise).clamp(0, 1) * 255).round().to(torch.uint8)
    return Images(pixels, labels, spec), torch.arange(patients).repeat_interleave(images)


def accuracy_of_a_pass(dataset):
    parts = [dataset.at_seed(seed) for seed in range(dataset.folds)]
    scores = [(one_nearest_neighbor(part.train, part.test.open()), part.test.count) for part in parts]
    return sum(score * count for score, count in scores) / sum(count for _, count in scores)


def test_planted_leak_of_patients_inflates_the_score_without_groups_only():
    images, patients = planted_leak()
    ignored = accuracy_of_a_pass(Dataset.from_pool(images, None, folds=5, test=None))
    honest = accuracy_of_a_pass(Dataset.from_pool(images, patients, folds=5, test=None))
    print(f"groups ignored {ignored:.3f}, with groups {honest:.3f}")
    assert ignored > 0.99 and 0.3 < honest < 0.7
    for groups, leaks in ((None, True), (patients, False)):
        part = Dataset.from_pool(images, groups, folds=None, test=0.2)
        assert (one_nearest_neighbor(part.train, part.test.open()) > 0.95) == leaks


def test_validation_score_is_honest_with_groups():
    images, patients = planted_leak()
    for groups, leaks in ((None, True), (patients, False)):
        subset = Dataset.from_pool(images, groups, folds=5, test=None).at_seed(0).subset(labels=None, val=None, seed=0)
        assert (one_nearest_neighbor(subset.train, subset.val) > 0.95) == leaks and Counter(subset.val.labels.tolist()).keys() == {0, 1}
