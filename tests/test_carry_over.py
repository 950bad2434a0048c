"""carry_over and at_size: the comparison of a recipe on other images, with nothing else changed."""

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from smallvit import at_size, carry_over, digits, fit, folder, load_recipe, textured_shapes
from smallvit.run import describe, fingerprint, rebuild
from smallvit.tuning import TunedArm, one_per_cell, write

RECIPE = """
from functools import partial
from smallvit import DINO, PatchEmbed, Run, ViT, ablate, augment, digits
from smallvit.tuning import Tune

scratch = Run(
    data=digits, model=partial(ViT, tokenizer=partial(PatchEmbed, patch=4), dim=8, depth=1, heads=1), steps=2, batch=4, val=20
)
dino = scratch.vary(objective=partial(DINO, prototypes=4), augment=augment.digit_crops(local=0), unlabelled=True)
RUNS = ablate(
    {"scratch": scratch, "DINO": scratch.vary(init=dino), "deep": scratch.vary(depth=2)},
    labels=[10, 20], seeds=range(2), references=["small CNN"], tune=Tune({"lr": (1e-3, 1e-2)}, trials=2, seeds=1, val=20),
)
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "first.py"
    path.write_text(RECIPE)
    return path


shapes = partial(at_size, data=partial(textured_shapes, train=80, test=16), size=8)
few_shapes = partial(textured_shapes, train=16, test=8)


def test_only_the_data_changes_also_in_the_pretraining(recipe):
    runs = load_recipe(recipe).RUNS
    carried = carry_over(str(recipe), shapes)
    assert [(one.arm, one.role, one.baseline, one.seed) for one in carried] == [(o.arm, o.role, o.baseline, o.seed) for o in runs]
    for before, after in zip(runs, carried):
        assert after.run.data is shapes and after.run.with_data(digits) == before.run and after.tune is None
    assert {run.data for one in carried for run in one.run.dependencies.values()} == {shapes}


def test_one_number_of_labels_and_a_recipe_that_loads_itself_are_refused(recipe, monkeypatch):
    with pytest.raises(ValueError, match=r"labels is 20; expected several values, such as labels=\[20\]"):
        carry_over(str(recipe), shapes, labels=20)
    own = recipe.with_name("own.py")
    own.write_text("from smallvit import carry_over, digits\nRUNS = carry_over('own', digits)\n")
    monkeypatch.chdir(own.parent)
    with pytest.raises(ValueError, match=r"own\.py loads itself; rename this file, or give the path of the other recipe"):
        load_recipe(own)
    other = recipe.parent / "more" / "first.py"
    other.parent.mkdir()
    other.write_text(f"from smallvit import carry_over, digits\nRUNS = carry_over({str(recipe)!r}, digits)\n")
    with pytest.raises(ValueError, match=r"more/first\.py loads another recipe of this name, .*first\.py; rename one of them"):
        load_recipe(other)
    assert load_recipe(recipe).RUNS


def test_tuned_settings_are_used_and_belong_to_no_tuning_of_the_new_comparison(recipe):
    runs = load_recipe(recipe).RUNS
    arms = [
        TunedArm(
            arm=arm, labels=labels, fingerprint=fingerprint(entry.run.at_seed(0)), settings={"lr": rate}, accuracy=0.5,
            trials=[{"settings": {"lr": rate}, "scores": [0.5]}],
        )
        for rate, ((arm, labels), entry) in enumerate(one_per_cell(runs).items(), 2)
    ]  # fmt: skip
    write(recipe.with_suffix(".tuned.json"), runs[0].tune, arms)
    carried = carry_over(str(recipe), shapes, labels=[20])
    assert len(carried) == len(runs) / 2 and {one.labels for one in carried} == {20}
    chosen = {(tuned.arm, tuned.labels): tuned.settings["lr"] for tuned in arms}
    assert all(one.run.lr == chosen[one.arm, one.labels] and one.tuning is None for one in carried)


def test_carried_run_is_trained_and_written_down(recipe, tmp_path):
    (run,) = {one.run for one in carry_over(str(recipe), shapes, labels=[20]) if (one.arm, one.seed) == ("deep", 0)}
    record = fit(run, tmp_path / "out")
    assert record.finished and record.run["data"]["size"] == 8 and rebuild(describe(run)) == run


def test_seeds_become_passes_if_the_data_are_divided_into_folds(recipe, tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    pets = partial(folder, path=str(tmp_path / "pets"), size=8)
    runs = load_recipe(recipe).RUNS
    in_folds = carry_over(str(recipe), partial(pets, folds=3), labels=[20])
    found = {}
    for one in in_folds:
        assert one.seed == one.run.seed and all(run.seed == one.seed for run in one.run.dependencies.values())
        found.setdefault(one.arm, []).append(one.seed)
    assert len(found) == len({one.arm for one in runs}) and all(seeds == [*range(6)] for seeds in found.values())
    recipe.with_name("second.py").write_text(
        f"from functools import partial\nfrom smallvit import carry_over, folder\n"
        f"pets = partial(folder, path={str(tmp_path / 'pets')!r}, size=8, folds=3)\n"
        f"RUNS = carry_over({str(recipe)!r}, pets, labels=[20])"
    )
    back = carry_over(str(recipe.with_name("second.py")), partial(pets, test=0.2))
    assert back == carry_over(str(recipe), partial(pets, test=0.2), labels=[20])
    assert [one.seed for one in in_folds] == sorted(one.seed for one in in_folds)


def test_earlier_runs_of_a_recipe_without_ablate_stay_as_they_are(recipe):
    path = recipe.with_name("by_hand.py")
    path.write_text(
        RECIPE.partition("RUNS =")[0] + "from smallvit import ArmRun\nearlier = scratch.vary(seed=100)\n"
        'RUNS = [ArmRun(run=scratch.vary(seed=s, labels=10, init=earlier), arm="scratch", role="baseline") for s in range(2)]\n'
    )
    carried = carry_over(str(path), shapes)
    assert [(one.seed, one.labels, one.run.init.seed, one.run.init.labels) for one in carried] == [(0, 10, 100, None), (1, 10, 100, None)]


def test_options_of_the_inner_loader_are_checked(recipe):
    with pytest.raises(ValueError, match=r"data\.data has no 'path', a required option; write partial"):
        carry_over(str(recipe), partial(at_size, data=folder, size=8))
    with pytest.raises(ValueError, match="folder has no option 'fold'; did you mean 'folds'"):
        carry_over(str(recipe), partial(at_size, data=partial(folder, path="images", fold=2), size=8))


def test_wrong_requests_are_refused(recipe):
    with pytest.raises(ValueError, match=r"labels has 30; expected some of \[10, 20\], for which the recipe .* has settings"):
        carry_over(str(recipe), shapes, labels=[10, 30])
    with pytest.raises(ValueError, match="data is an object of class Dataset; expected a function"):
        carry_over(str(recipe), digits())
    with pytest.raises(ValueError, match="there is no recipe 'fist'"):
        carry_over("fist", shapes)


# Images of another size


def test_images_are_resized_as_folder_does(tmp_path):
    data = few_shapes()
    for part, images in (("train", data.train), ("test", data.test.open())):
        for number, (pixels, label) in enumerate(zip(images.images.numpy(), images.labels.tolist())):
            place = tmp_path / part / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(place / f"{number:02}.png")
    from_files, resized = folder(str(tmp_path), size=(20, 28)), at_size(few_shapes, (20, 28))
    for one, other in ((from_files.train, resized.train), (from_files.test.open(), resized.test.open())):
        order = sorted(range(len(other)), key=lambda index: (other.labels[index], index))
        assert torch.equal(one.images, other.images[order]) and torch.equal(one.labels, other.labels[order])
    assert from_files.spec.mean == resized.spec.mean and from_files.spec.std == resized.spec.std


def test_black_stays_the_mean_and_nothing_else_changes():
    small, large = digits(), at_size(digits, 28)
    assert large is at_size(digits, (28, 28)) and large.spec.size == (28, 28)
    assert large.spec.mean == (0.0,) and large.spec.std != small.spec.std and large.spec.digits
    assert torch.equal(large.train.labels, small.train.labels) and large.test.count == small.test.count
    assert large.train.spec == large.test.without_pixels().spec == large.spec
    again = at_size(partial(at_size, data=digits, size=8), 8)
    assert torch.equal(again.train.images, small.train.images) and again.spec == small.spec


def test_data_without_test_images_are_resized(tmp_path):
    generator = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.fromarray(generator.integers(0, 256, (6, 6), dtype=np.uint8)).save(tmp_path / name / f"{i}.png")
    resized = at_size(partial(folder, str(tmp_path), test=0.0), (4, 5))
    assert resized.test.count == 0 and resized.train.images.shape == (6, 1, 4, 5)


def test_resizing_does_not_count_as_reading_the_test_images():
    reads = few_shapes().test.reads
    assert at_size(few_shapes, 12).test.reads == 0 and few_shapes().test.reads == reads


@pytest.mark.parametrize("size", [0, -3, 2.5, "28", (28,), (28, 0), True])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match=r"size is .*; expected a number of pixels, such as 28, or a pair"):
        at_size(digits, size)


def test_folds_are_refused_with_another_way(tmp_path):
    for label in "ab":
        (tmp_path / label).mkdir()
        for number in range(4):
            pixels = np.random.default_rng([ord(label), number]).integers(256, size=(6, 6), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{number}.png")
    with pytest.raises(ValueError, match=r"has 2 folds, which at_size does not support; .*folder\(..., size=28\)"):
        at_size(partial(folder, str(tmp_path), folds=2), 3)
