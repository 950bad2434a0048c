"""smallvit new: what it finds in a folder of images, and that the recipe that it writes can be trained."""

import ast
import random
import re
import shlex
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from toys import slow_after

from smallvit.__main__ import main, parser
from smallvit.commands import inspection, new
from smallvit.commands.inspection import groups_of, inspect_images
from smallvit.commands.recipe_template import QUICK_ARMS, literal, recipe_text
from smallvit.components import function
from smallvit.launch import plan
from smallvit.recipe import load_recipe, smoke_test_runs
from smallvit.report.page import sections
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


def written(folder: str, digits: bool = False, quick: bool = False, change=lambda text: text):
    """Write the recipe of a folder, without an estimate of the time, and return the loaded module."""
    file = Path(f"{folder}.py")
    file.write_text(change(recipe_text(inspect_images(Path(folder), digits), folder, quick)), encoding="utf-8")
    return load_recipe(file.resolve())


def one_pass(text: str) -> str:
    """The text of a recipe with one pass. Fewer runs are loaded faster."""
    return re.sub(r"\bseeds=range\(\d+\)", "seeds=range(1)", text)


def loaded_quickly(file: str):
    """The module of a recipe that has been written, with one pass."""
    Path(file).write_text(one_pass(Path(file).read_text(encoding="utf-8")), encoding="utf-8")
    return load_recipe(Path(file).resolve())


@pytest.fixture
def estimates(monkeypatch):
    """The arms of which steps were measured for an estimate of the time. A run takes 60 s, with DINO 600 s."""
    measured = []

    def estimate(run, device):
        measured.append(run)
        return 600.0 if function(run.objective).__name__ == "DINO" else 60.0

    monkeypatch.setattr(plan, "estimate", estimate)
    monkeypatch.setattr("smallvit.launch.local.cores", lambda: 2)
    monkeypatch.setattr(plan, "computing_processes", lambda: 0.0)
    monkeypatch.setattr(plan.os, "cpu_count", lambda: 2)
    return measured


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
    assert module.__doc__.startswith("Which techniques help")
    assert "within reach, with equally many of each class: 10" in Path("gray.py").read_text()


@pytest.mark.parametrize(("images", "steps"), slow_after(2, [(40, 300), (500, 400), (880, 700), (5_000, 1_000)]))
def test_steps_are_a_whole_number_that_grows_with_the_images(images, steps):
    gray()
    found = replace(inspect_images(Path("gray")), counts={"pool": {"circle": images // 2, "square": images // 2}})
    Path("recipe.py").write_text(one_pass(recipe_text(found, "gray", False)))
    assert baseline(load_recipe(Path("recipe.py"))).steps == steps


@pytest.mark.parametrize(
    ("size", "patches", "tokens", "comment"), slow_after(1, [((25, 25), 25, 49, ": 49 tokens in an image"), ((42, 28), 24, 24, "")])
)
def test_convolutional_stem_has_about_as_many_tokens_as_there_are_patches(size, patches, tokens, comment):
    for kind in ("circle", "square"):
        for number in range(5):
            draw(kind, f"odd/{kind}/{number}.png", size, "L")
    first = {entry.arm: entry.run for entry in reversed(written("odd", change=one_pass).RUNS)}
    grids = [first[arm].model((size[1], size[0]), 1, 2).tokenizer.grid((size[1], size[0])) for arm in ("scratch", "+conv stem")]
    assert [rows * columns for rows, columns in grids] == [patches, tokens]
    assert f"# convolutions in place of patches{comment}\n" in Path("odd.py").read_text()


def test_missing_package_is_no_broken_image(monkeypatch):
    gray()
    Path("gray/circle/scan.dcm").write_bytes(b"DICM")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ValueError, match=r"circle/scan.dcm is a DICOM file and needs the package pydicom: pip install"):
        inspect_images(Path("gray"))


def test_recipe_of_photos_has_groups_unequal_classes_and_skips_broken_files():
    photos()
    images = inspect_images(Path("photos"))
    assert images.counts == {"pool": {"circle": 40, "line": 4, "square": 12}} and [*images.broken] == ["circle/patient_001_7.jpg"]
    module = written("photos", change=one_pass)
    options = data_options(module)
    assert options["size"] == (40, 56) and options["channels"] == 3 and options["folds"] == 2 and options["skip_broken"]
    assert options["group_by"].startswith("(?i).*?(patient")
    data = baseline(module).data()
    assert data.skipped == 1 and len(data.train) == 56 and len(data.groups.unique()) == 20
    assert [function(evaluator).__name__ for evaluator in baseline(module).evaluators] == ["balanced_accuracy", "accuracy"]
    assert "+class weights" in {entry.arm for entry in module.RUNS}


def test_recipe_of_parts_keeps_them():
    parts()
    module = written("parts")
    assert data_options(module) == {"path": "parts", "size": (32, 32), "channels": 3}
    assert {entry.seed for entry in module.RUNS} == {*range(8)} and baseline(module).val is None


def test_parts_under_other_names_are_no_classes():
    parts()
    Path("parts/train").rename("parts/Training")
    Path("parts/test").rename("parts/Testing")
    images = inspect_images(Path("parts"))
    assert images.counts == {"train": {"circle": 12, "square": 12}, "test": {"circle": 6, "square": 6}}
    assert baseline(written("parts", change=one_pass)).data().test.count == 12


def test_arms_of_the_recipe_train(tmp_path):
    """The slow test below trains all arms."""
    photos()
    entries = {entry.arm: entry for entry in smoke_test_runs(written("photos", change=one_pass).RUNS)}
    for arm in ("+augmentation", "+DINO", "+class weights"):
        record = fit(entries[arm].run, tmp_path / arm)
        assert record.status == "finished" and "balanced_accuracy" in record.test


@pytest.mark.slow
@pytest.mark.parametrize("make", [gray, photos, parts], ids=lambda make: make.__name__)
def test_command_line_from_the_folder_to_the_report(make):
    make()
    assert main(["new", "--data", make.__name__]) == 0
    assert main(["run", f"{make.__name__}.py", "--smoke", "--jobs", "2"]) == 0
    assert Path("runs/smoke", make.__name__, "report", "report.html").exists() or [*Path("runs").rglob("report.html")]


def test_command_prints_what_it_found_and_never_overwrites(capsys, estimates):
    photos()
    assert main(["new", "photos", "--data", "photos"]) == 0
    printed = capsys.readouterr().out
    assert "skip_broken=True" not in printed
    for text in (
        "56 images of 3 classes: circle 40, line 4, square 12",
        "classes are unequal",
        "90 x 120 to 150 x 200; resized to 40 x 56",
        "56 RGB; trained in color",
        "1 file cannot be read and will be left out",
        "circle/patient_001_7.jpg",
        "20 groups, such as 'patient_000'",
        r'the pattern is group_by=r"(?i).*?(patient[_ -]?\d+)(?:\D.*)?";',
        "2 folds instead of 5, because the smallest class has 2 groups",
        "wrote photos.py\n14 arms and 4 references and earlier runs, ",
        "smallvit run photos.py --dry-run",
    ):
        assert text in printed, text
    before = Path("photos.py").read_text()
    assert main(["new", "--data", "photos"]) == 2
    assert "photos.py exists already and is never overwritten" in capsys.readouterr().err
    assert Path("photos.py").read_text() == before
    assert main(["new", "photos.py/recipe", "--data", "photos"]) == 2  # a file in the place of a folder
    assert "recipe.py cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "side", "size", "patch"),
    [
        ((40, 30), 48, (42, 54), 6), ((30, 30), 96, (96, 96), 12), ((30, 30), 224, (224, 224), 28), ((64, 16), 64, (32, 128), 8),
        ((28, 28), 28, (28, 28), 4), ((64, 64), 65, (64, 64), 8), ((30, 30), 16, (16, 16), 2), ((30, 30), 17, (16, 16), 2),
    ],
)
def test_chosen_size_keeps_the_proportions_and_few_patches(shape, side, size, patch):
    for kind in ("circle", "square"):
        for number in range(2):
            draw(kind, f"large/{kind}/{number}.png", shape)
    images = inspect_images(Path("large"), size=side)
    assert (images.size, images.patch) == (size, patch)
    assert 16 <= size[0] * size[1] / patch**2 <= 81
    with pytest.raises(ValueError, match="--size is 8; expected the side of the images in pixels, 16 to 1,024"):
        inspect_images(Path("large"), size=8)


def test_size_of_the_command_is_that_of_the_recipe_and_of_the_smaller_one(capsys, estimates):
    photos()
    assert main(["new", "--data", "photos", "--size", "96"]) == 0
    printed = capsys.readouterr().out
    assert "resized to 84 x 108 (small details are lost; a larger --size keeps more)" in printed
    assert "smallvit new photos_quick.py --data photos --size 96 --quick" in printed
    module = load_recipe("photos.py")
    assert data_options(module)["size"] == (84, 108) and baseline(module).data().spec.size == (84, 108)


@pytest.mark.parametrize(("size", "lost"), [((150, 40), True), ((40, 150), True), ((24, 24), False)])
def test_lost_details_are_named_if_one_side_becomes_smaller(size, lost):
    for kind in ("circle", "square"):
        for number in range(2):
            draw(kind, f"sides/{kind}/{number}.png", size)
    assert ("small details are lost" in " ".join(new.findings(inspect_images(Path("sides"), size=64)))) == lost


def test_names_and_paths_of_the_recipe(monkeypatch, capsys):
    monkeypatch.setattr(new, "planned", lambda *arguments: "planned")
    gray()
    Path("gray").rename("2 gray")
    assert main(["new", "--data", "2 gray"]) == 0 and Path("images_2_gray.py").exists()
    assert main(["new", "recipes/mine", "--data", "2 gray"]) == 0
    module = loaded_quickly("recipes/mine.py")
    assert data_options(module)["path"] == "2 gray" and len(baseline(module).data().train) == 40
    assert main(["new", "a b", "--data", "2 gray"]) == 2
    assert main(["new", ".", "--data", "2 gray"]) == 2
    assert "the recipe would be called '.', which is a folder; expected a name such as cells.py" in capsys.readouterr().err
    monkeypatch.chdir("recipes")
    assert main(["new", "other", "--data", "../2 gray"]) == 0
    assert Path(data_options(loaded_quickly("other.py"))["path"]).is_absolute()


def test_folders_without_a_comparison_are_refused(capsys):
    draw("circle", "one/circle/1.png")
    draw("circle", "one/circle/2.png")
    assert main(["new", "--data", "one"]) == 2 and "one class, 'circle'" in capsys.readouterr().err
    draw("square", "one/square/1.png")
    assert main(["new", "--data", "one"]) == 2 and "class 'square' in one has 1 image that can be read; expected at least 2" in capsys.readouterr().err
    assert main(["new", "--data", "missing"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"smallvit: there is no folder {Path('missing').absolute()}; expected") and "folds=" not in error
    assert not [*Path().glob("*.py")]


# The text of the recipe


@pytest.mark.parametrize("make", [gray, photos, parts], ids=lambda make: make.__name__)
def test_nothing_of_an_arm_stays_when_its_lines_are_deleted(make):
    """All arms but the baseline are deleted: no comment, option or import of another arm is left."""
    make()

    def without_arms(text: str) -> str:
        arms = next(node.value for node in ast.parse(text).body if ast.unparse(node).startswith("arms ="))
        lines = text.splitlines()
        for key, value in reversed(list(zip(arms.keys[1:], arms.values[1:]))):
            del lines[key.lineno - 1 : value.end_lineno]
        return "\n".join(lines) + "\n"

    module = written(make.__name__, change=without_arms)
    text = Path(f"{make.__name__}.py").read_text()
    assert {entry.arm for entry in module.RUNS if entry.role != "reference"} == {"scratch"}
    left = "DINO koleo prototypes CutMix mixup SPT LSA ToMe stem Distill SmallCNN dropout merged shifted weight"
    assert not [word for word in left.split() if word in text.partition("arms = {")[2].partition("# To be faster")[0]]
    assert not [word for word in left.split() if word in text.partition("data = partial")[0]]
    assert max(map(len, text.splitlines())) <= 128


def test_arm_says_which_transforms_it_holds():
    photos()
    runs = {entry.arm: entry.run for entry in written("photos", change=one_pass).RUNS}
    held = {arm: [type(transform).__name__ for transform in run.augment] for arm, run in runs.items()}
    assert held["+augmentation"] == ["Flip", "Warp", "Jitter", "RandomErasing"]
    assert held["+mixup"] == ["Mixup"] and held["+CutMix"] == ["CutMix"]


def test_report_shows_no_instruction_of_the_recipe_but_what_the_user_expects():
    gray()
    assert dict(sections(written("gray", change=one_pass).__doc__)[1]).keys() == {"Setup"}
    assert "# Expected  (your guess)\n" in Path("gray.py").read_text()
    Path("gray").rename("own")
    expects = lambda text: one_pass(text).replace(' each.\n"""', ' each.\n\nExpected  Nothing helps.\n"""')  # noqa: E731
    assert dict(sections(written("own", change=expects).__doc__)[1])["Expected"] == "Nothing helps."


# What is printed after the file is written


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError('group_by=r"x" must match'), r'group_by=r"x" must match; change line \d+: group_by=r"\(\?i\)\.\*\?\(patient'),
        (RuntimeError("no luck"), r"RuntimeError: no luck; change line \d+: data = partial\("),
    ],
    ids=["named option", "anything else"],
)
def test_recipe_that_cannot_be_planned_is_written_and_the_line_is_named(error, message, monkeypatch, capsys):
    photos()

    def estimate(run, device):
        raise error

    monkeypatch.setattr(plan, "estimate", estimate)
    assert main(["new", "--data", "photos"]) == 2
    printed = capsys.readouterr()
    assert printed.out.endswith("wrote photos.py\n") and Path("photos.py").exists()
    found = re.search(f"photos.py is written, but its runs cannot be planned: {message}", printed.err)
    number, line = re.search(r"line (\d+): (.*)", found[0]).groups()
    assert line in Path("photos.py").read_text().splitlines()[int(number) - 1]


def test_estimate_measures_what_is_slower_than_the_baseline_and_names_it(capsys, estimates):
    photos()
    assert main(["new", "--data", "photos"]) == 0
    printed = capsys.readouterr().out
    # 6 passes of 2 folds: 14 arms, 3 references and the pretraining, of which the latter takes 10 times as long
    assert "12 runs (6 passes of 2 folds) of each arm, 216 runs in all\nabout 2.7 h with 2 worker processes" in printed
    assert "(measured: a few steps of scratch, +distillation, small CNN, initialization of +DINO; the others" in printed
    assert len(estimates) == 4 and all(run.steps for run in estimates)
    command = re.search(r"to make it smaller, delete arms; or take (\d+) runs \(about (.*?)\): smallvit (.*)", printed)
    assert command[1] == "70" and command[2] == "35 min"
    assert shlex.split(command[3]) == ["new", "photos_quick.py", "--data", "photos", "--quick"]
    assert parser().parse_args(shlex.split(command[3])).quick, "the command line must know the option that is advised"
    assert "other programs" not in printed


def test_estimate_says_that_other_programs_make_it_slower(capsys, estimates, monkeypatch):
    photos()
    monkeypatch.setattr(plan, "computing_processes", lambda: 1.0)
    assert main(["new", "--data", "photos", "--quick"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "(measured: a few steps" in line)
    assert line.endswith("); other programs keep about 1 core busy, which makes it slower")


@pytest.mark.parametrize(
    ("make", "seeds", "verdicts"),
    [
        (gray, 10, "2 passes of 5 folds are enough for a verdict on a large difference"),
        (photos, 10, "5 passes of 2 folds are enough for a verdict on a large difference"),
        (parts, 6, "6 seeds are the fewest with which a verdict is possible"),
    ],
    ids=["gray", "photos", "parts"],
)
def test_quick_recipe_has_few_runs_that_can_still_be_judged(make, seeds, verdicts, capsys, estimates):
    make()
    options = Namespace(data=make.__name__, name=None, digits=False, quick=True, size=None)
    assert new.main(options) == 0
    module = load_recipe(Path(f"{make.__name__}.py").resolve())
    assert [*dict.fromkeys(entry.arm for entry in module.RUNS if entry.role != "reference")] == [*QUICK_ARMS]
    assert {entry.seed for entry in module.RUNS} == {*range(seeds)}
    printed = capsys.readouterr().out
    assert verdicts in printed and "--quick" not in printed and verdicts in Path(f"{make.__name__}.py").read_text()


def test_images_with_transparency_and_more_than_8_bits():
    gray()
    Image.fromarray(np.full((30, 30, 4), 100, np.uint8)).save("gray/circle/clear.png")
    Image.fromarray((np.arange(900).reshape(30, 30) * 60).astype(np.uint16)).save("gray/square/deep.png")
    images = inspect_images(Path("gray"))
    assert images.channels == 4 and images.floats and images.unit and images.modes == {"L": 40, "RGBA": 1, "float": 1}
    module = written("gray", change=one_pass)
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
    module = written("gray", digits=True, change=one_pass)
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
        ([f"{label}/scan{number}.png" for label in "ab" for number in range(20)], 0),
        ([f"{label}/scan{number // 2}_{number % 2}.png" for label in "ab" for number in range(20)], 10),
        ([f"{label}/P{number // 3:02}{label}_img{number % 3}.png" for label in "ab" for number in range(18)], 12),
        ([f"{label}/{side}_{word}{n}_{n}.png" for label in "ab" for n in range(9) for side, word in (("left", "patient"), ("right", "Patient"))], 9),
        ([f"{label}/2024-05-{number:02}_scan.png" for label in "ab" for number in range(18)], 0),
    ],
)
def test_groups_in_file_names(files, groups):
    pattern, names = groups_of({file: ord(file[0]) for file in files})
    assert len({*names.values()}) == groups and bool(pattern) == bool(groups)


@pytest.mark.parametrize("text", ["photos", r"C:\photos", 'a "b"', "a\\", r"(.*)_\d+", "ünï", "a\nb"])
def test_texts_are_written_so_that_python_reads_them(text):
    assert eval(literal(text)) == text


@pytest.mark.slow
def test_records_of_the_new_recipe_are_folds(tmp_path):
    gray()
    module = written("gray")
    runs = [entry.run for entry in module.RUNS if entry.arm == "+LSA"][:5]
    records = [fit(run.with_steps(lambda steps: 2), tmp_path / f"{run.seed}") for run in runs]
    assert [record.seed for record in records] == [*range(5)] and {record.folds for record in records} == {5}
    assert sum(record.test_images for record in records) == 40 and records[0].pool_images == 40


@pytest.mark.filterwarnings("error")
def test_files_that_are_not_read_are_named_once_in_plain_words(estimates, capsys):
    gray()
    Path("gray/circle/phone.heic").write_bytes(b"no image")
    assert main(["new", "shapes.py", "--data", "gray", "--quick"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "heic" in line]
    assert line.startswith("note: ") and line.endswith("formats are not read: 1 .heic; convert them, for example to PNG")
