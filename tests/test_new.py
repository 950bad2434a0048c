"""smallvit new: what it finds in a folder of images, and that the recipe that it writes can be trained."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from smallvit.__main__ import main
from smallvit.commands import inspection, new
from smallvit.commands.inspection import groups_of, inspect_images
from smallvit.commands.recipe_template import literal, recipe_text
from smallvit.components import function
from smallvit.recipe import load_recipe, smoke_test_runs
from smallvit.train import fit


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random.seed(0)


def draw(kind: str, file: str, size=(40, 30), mode="RGB"):
    """Draw a circle, a square or a line in a random color at a random place."""
    image, (w, h) = Image.new("RGB", size, "white"), size
    r = random.randint(min(size) // 6, min(size) // 4)
    x, y = random.randint(r, w - r), random.randint(r, h - r)
    paint = ImageDraw.Draw(image)
    shape = {"circle": paint.ellipse, "square": paint.rectangle, "line": paint.line}[kind]
    shape((x - r, y - r, x + r, y + r), fill=random.choice(["red", "blue", "green"]))
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    image.convert(mode).save(file)


def gray():
    for kind in ("circle", "square"):
        for number in range(20):
            draw(kind, f"gray/{kind}/{number}.png", (28, 28), "L")


def photos():
    """Photos of several sizes and patients, unequal classes, and a file that is no image."""
    for kind, count in (("circle", 40), ("square", 12), ("line", 4)):
        for number in range(count):
            size = random.choice([(120, 90), (160, 120), (200, 150)])
            draw(kind, f"photos/{kind}/patient_{number // 2:03}_{number % 2}.jpg", size)
    Path("photos/circle/patient_001_7.jpg").write_bytes(b"no image")


def parts():
    for part, count in (("train", 12), ("test", 6)):
        for kind in ("circle", "square"):
            for number in range(count):
                draw(kind, f"parts/{part}/{kind}/{number}.png", (32, 32))


def written(folder: str, digits: bool = False):
    """Write the recipe of a folder, without an estimate of the time, and return the loaded module."""
    file = Path(f"{folder}.py")
    file.write_text(recipe_text(inspect_images(Path(folder), digits), folder), encoding="utf-8")
    return load_recipe(file.resolve())


def baseline(module):
    return module.RUNS[0].run


def data_options(module) -> dict:
    return baseline(module).data.keywords


def test_recipe_of_gray_images_uses_all_techniques_with_five_folds():
    gray()
    module = written("gray")
    assert data_options(module) == {"path": "gray", "size": (28, 28), "channels": 1, "folds": 5}
    assert baseline(module).model.keywords["tokenizer"].keywords == {"patch": 4}
    arms = Counter(entry.arm for entry in module.RUNS if entry.role != "reference")
    assert {*arms.values()} == {30}  # 6 passes of 5 folds
    expected = "augmentation mixup CutMix SPT LSA ToMe DINO distillation dropout"
    assert {f"+{arm}" for arm in expected.split()} <= {*arms} and "+class weights" not in arms
    assert module.__doc__.startswith("Which techniques help") and "Expected  Write here" in module.__doc__
    assert "within reach, with equally many of each class: 10" in Path("gray.py").read_text()


def test_recipe_of_photos_has_groups_unequal_classes_and_skips_broken_files():
    photos()
    images = inspect_images(Path("photos"))
    assert images.counts == {"pool": {"circle": 40, "line": 4, "square": 12}} and [*images.broken] == ["circle/patient_001_7.jpg"]
    module = written("photos")
    options = data_options(module)
    assert options["size"] == (40, 56) and options["channels"] == 3 and options["folds"] == 2 and options["skip_broken"]
    assert options["group_by"].startswith("(?i)(.*?patient")
    data = baseline(module).data()
    assert data.skipped == 1 and len(data.train) == 56 and len(data.groups.unique()) == 20
    assert [function(evaluator).__name__ for evaluator in baseline(module).evaluators] == ["balanced_accuracy", "accuracy"]
    assert "+class weights" in {entry.arm for entry in module.RUNS}


def test_recipe_of_parts_keeps_them():
    parts()
    module = written("parts")
    assert data_options(module) == {"path": "parts", "size": (32, 32), "channels": 3}
    assert {entry.seed for entry in module.RUNS} == {*range(8)} and baseline(module).val is None


def test_arms_of_the_recipe_train(tmp_path):
    """The slow test below trains all of them."""
    photos()
    entries = {entry.arm: entry for entry in smoke_test_runs(written("photos").RUNS)}
    for arm in ("+augmentation", "+SPT", "+conv stem", "+ToMe", "+DINO", "+class weights"):
        record = fit(entries[arm].run, tmp_path / arm)
        assert record.status == "finished" and "balanced_accuracy" in record.test


@pytest.mark.slow
@pytest.mark.parametrize("make", [gray, photos, parts], ids=lambda make: make.__name__)
def test_command_line_from_the_folder_to_the_report(make):
    make()
    assert main(["new", "--data", make.__name__]) == 0
    assert main(["run", f"{make.__name__}.py", "--smoke", "--jobs", "2"]) == 0
    assert Path("runs/smoke", make.__name__, "report", "report.html").exists() or [*Path("runs").rglob("report.html")]


def test_command_prints_what_it_found_and_never_overwrites(capsys):
    photos()
    assert main(["new", "photos", "--data", "photos"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "56 images of 3 classes: circle 40, line 4, square 12",
        "classes are unequal",
        "90 x 120 to 150 x 200; resized to 40 x 56",
        "56 RGB; trained in color",
        "1 file cannot be read and will be left out",
        "circle/patient_001_7.jpg",
        "20 groups, such as 'patient_000'",
        "2 folds instead of 5, because the smallest class has 2 groups",
        "wrote photos.py: 14 arms, ",
        "smallvit run photos.py --dry-run",
    ):
        assert text in printed, text
    before = Path("photos.py").read_text()
    assert main(["new", "--data", "photos"]) == 2
    assert "photos.py exists already and is never overwritten" in capsys.readouterr().err
    assert Path("photos.py").read_text() == before


def test_names_and_paths_of_the_recipe(monkeypatch):
    monkeypatch.setattr(new, "planned", lambda file: "planned")
    gray()
    Path("gray").rename("2 gray")
    assert main(["new", "--data", "2 gray"]) == 0 and Path("images_2_gray.py").exists()
    assert main(["new", "recipes/mine", "--data", "2 gray"]) == 0
    module = load_recipe(Path("recipes/mine.py").resolve())
    assert data_options(module)["path"] == "2 gray" and len(baseline(module).data().train) == 40
    assert main(["new", "a b", "--data", "2 gray"]) == 2
    monkeypatch.chdir("recipes")
    assert main(["new", "other", "--data", "../2 gray"]) == 0
    assert Path(data_options(load_recipe(Path("other.py").resolve()))["path"]).is_absolute()


def test_folders_without_a_comparison_are_refused(capsys):
    draw("circle", "one/circle/1.png")
    draw("circle", "one/circle/2.png")
    assert main(["new", "--data", "one"]) == 2 and "one class, 'circle'" in capsys.readouterr().err
    draw("square", "one/square/1.png")
    assert main(["new", "--data", "one"]) == 2 and "class 'square' in one has 1 images that can be read" in capsys.readouterr().err
    assert main(["new", "--data", "missing"]) == 2 and "there is no such folder" in capsys.readouterr().err
    assert not [*Path().glob("*.py")]


def test_images_with_transparency_and_more_than_8_bits():
    gray()
    Image.fromarray(np.full((30, 30, 4), 100, np.uint8)).save("gray/circle/clear.png")
    Image.fromarray((np.arange(900).reshape(30, 30) * 60).astype(np.uint16)).save("gray/square/deep.png")
    images = inspect_images(Path("gray"))
    assert images.channels == 4 and images.floats and images.unit and images.modes == {"L": 40, "RGBA": 1, "float": 1}
    module = written("gray")
    assert data_options(module)["pixels"] == "float" and data_options(module)["size"] == (48, 48)
    assert baseline(module).data().train.images.dtype.is_floating_point


def test_gray_photos_in_color_files_are_gray():
    for kind in ("circle", "square"):
        for number in range(5):
            draw(kind, f"gray/{kind}/{number}.png", (100, 100), "L")
            Image.open(f"gray/{kind}/{number}.png").convert("RGB").save(f"gray/{kind}/{number}.png")
    assert inspect_images(Path("gray")).channels == 1


def test_digits_are_deformed_and_never_mirrored():
    gray()
    module = written("gray", digits=True)
    augmented = {entry.arm: entry.run.augment for entry in module.RUNS}["+augmentation"]
    assert data_options(module)["digits"] and [type(transform).__name__ for transform in augmented] == ["Warp"]


def test_large_folders_have_a_fixed_test_part(monkeypatch):
    gray()
    monkeypatch.setattr(inspection, "LARGE", 40)
    module = written("gray")
    assert data_options(module)["test"] == 0.2 and "folds" not in data_options(module)
    assert {entry.seed for entry in module.RUNS} == {*range(8)}


@pytest.mark.parametrize(
    ("files", "groups"),
    [
        (["a/patient_001_1.png", "a/patient_001_2.png", "b/patient_002_1.png", "b/patient_002_2.png", "b/patient_003_9.png"], 3),
        (["a/Subject12-left.png", "a/Subject12-right.png", "a/Subject13-left.png", "b/Subject14-left.png", "b/Subject14.png"], 3),
        ([f"{label}/{label}_{number}.png" for label in "ab" for number in range(20)], 0),
        ([f"{label}/{label}{number // 3}_{number}.png" for label in "ab" for number in range(20)], 14),
        ([f"{label}/patient_{index}{number}.png" for index, label in enumerate("ab", 1) for number in range(20)], 0),
        ([f"{label}/patient_{number}.png" for label in "ab" for number in range(20)], 20),
        ([f"{label}/P{number // 3:02}{label}_img{number % 3}.png" for label in "ab" for number in range(18)], 12),
        ([f"{label}/2024-05-{number:02}_scan.png" for label in "ab" for number in range(18)], 0),
    ],
)
def test_groups_in_file_names(files, groups):
    pattern, names = groups_of({file: ord(file[0]) for file in files})
    assert len({*names.values()}) == groups and bool(pattern) == bool(groups)


@pytest.mark.parametrize("text", ["photos", r"C:\photos", 'a "b"', "a\\", r"(.*)_\d+", "ünï", "a\nb"])
def test_texts_are_written_so_that_python_reads_them(text):
    assert eval(literal(text)) == text


def test_records_of_the_new_recipe_are_folds(tmp_path):
    gray()
    module = written("gray")
    runs = [entry.run for entry in module.RUNS if entry.arm == "+LSA"][:5]
    records = [fit(run.with_steps(lambda steps: 2), tmp_path / f"{run.seed}") for run in runs]
    assert [record.seed for record in records] == [*range(5)] and {record.folds for record in records} == {5}
    assert sum(record.test_images for record in records) == 40 and records[0].pool_images == 40
