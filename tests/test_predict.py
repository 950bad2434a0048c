"""smallvit predict: files into a table, for one run, for an arm of a recipe, and for all its seeds together."""

import csv
import os
import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from toys import TINY_VIT, write_recipe

from smallvit import MAE, Ensemble, Run, SmallCNN, arrays, digits, export, fit, load, load_all, load_recipe
from smallvit.__main__ import main
from smallvit.commands import finished
from smallvit.deploy.predict import find_files, ignored_files, predict_files
from smallvit.launch.results import folder, tags
from smallvit.record import WEIGHTS

RECIPE = '''"""Does a second arm help?"""

from functools import partial
from smallvit import Run, SmallCNN, ablate, digits

base = Run(data=digits, model=SmallCNN, val=50, steps=2, batch=16)
RUNS = ablate({"scratch": base, "+slow": base.vary(lr=1e-4)}, labels=(100,), seeds=range(2), references=())
'''
WITH_REFERENCES = '''"""Does a ViT help?"""

from functools import partial
from smallvit import MAE, PatchEmbed, Run, ViT, ablate, digits

base = Run(data=digits, model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), val=50, steps=2)
masked = base.vary(objective=partial(MAE, decoder_dim=16))
RUNS = ablate({"scratch": base, "+small steps": base.vary(lr=1e-4), "masked": masked}, labels=(100,), seeds=range(1))
'''
FOLDS = '''"""Does a second arm help in a cross-validation?"""

from functools import partial
from smallvit import Run, SmallCNN, ablate, folder

base = Run(data=partial(folder, path="pool", folds=2), model=SmallCNN, val=0, steps=1, batch=4)
RUNS = ablate({"scratch": base, "+slow": base.vary(lr=1e-4)}, seeds=range(2), references=False)
'''


@pytest.fixture
def images(tmp_path):
    """A folder with 10 digits as PNG files, some in a subfolder, and a hidden file."""
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    test = digits().test.open()
    for index in range(10):
        place = folder / "more" if index > 6 else folder
        Image.fromarray(test.images[index, 0].numpy()).save(place / f"{index}.png")
    (folder / ".hidden.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """A folder with two finished runs that differ in the seed."""
    folder = tmp_path_factory.mktemp("arm")
    for seed in (0, 1):
        fit(Run(model=SmallCNN, labels=100, val=50, steps=8, batch=16, seed=seed), folder / f"seed{seed}")
    return folder


def rows(text: str) -> list[dict]:
    return list(csv.DictReader(text.splitlines()))


# One run


@pytest.mark.parametrize("output", [[], ["-o", "-"]], ids=["", "-o -"])
def test_table_has_file_class_and_probabilities(output, arm, images, capsys):
    assert main(["predict", str(arm / "seed0"), str(images), *output]) == 0
    printed = rows(capsys.readouterr().out)
    model = load(arm / "seed0")
    files = sorted(map(str, images.rglob("[0-9].png")))
    assert sorted(row["file"] for row in printed) == files
    for row in printed:
        expected = model.predict_proba(row["file"])[0]
        assert [*row] == ["file", "class", *(f"p_{name}" for name in model.classes)]
        assert row["class"] == model.predict(row["file"])[0]
        assert np.allclose([float(row[f"p_{name}"]) for name in model.classes], expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["image", "other image", "folder"])
def test_table_never_replaces_an_image(kind, arm, images, capsys):
    """`-o *.png` gives the first image as the name of the table."""
    target = {"image": images / "1.png", "other image": images / "new.JPG", "folder": images}[kind]
    before = (images / "1.png").read_bytes()
    assert main(["predict", str(arm / "seed0"), str(images / "1.png"), "-o", str(target)]) == 2
    message = capsys.readouterr().err
    assert "expected one file, such as predictions.csv; if you meant the images, put the pattern before -o" in message
    assert (images / "1.png").read_bytes() == before and not (images / "new.JPG").exists()


@pytest.mark.parametrize("name", ["mine.py", "record.json", "model.safetensors", "page.HTML"])
def test_table_never_replaces_a_file_that_is_no_table(name, arm, images, tmp_path, capsys):
    (tmp_path / name).write_text("kept")
    assert main(["predict", str(arm / "seed0"), str(images / "1.png"), "-o", str(tmp_path / name)]) == 2
    assert "which ends in .csv, .tsv or .txt" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "kept"


def test_names_that_are_not_utf_8_are_printed_unchanged(arm, images, capfdbinary):
    name = os.fsdecode(b"\xff.png")
    try:
        (images / "1.png").rename(images / name)
    except OSError:
        pytest.skip("this file system takes no such names")
    assert main(["predict", str(arm / "seed0"), str(images / name)]) == 0
    assert b"/\xff.png," in capfdbinary.readouterr().out


def test_files_folders_and_patterns_give_each_image_once(images):
    one = str(images / "3.png")
    found = find_files([one, str(images), str(images / "more" / "*.png"), str(images / "**" / "*.png")])
    assert found[0] == one and len(found) == len(set(found)) == 10


def test_home_folder_in_a_quoted_pattern_is_found(images, monkeypatch):
    monkeypatch.setenv("HOME", str(images.parent))
    assert len(find_files(["~/images/*.png"])) == 7 and len(find_files(["~/images"])) == 10
    (images / "notes.txt").touch()
    assert ignored_files(["~/images"]) == {".txt": 1}


def test_folders_that_match_a_pattern_are_searched(images, monkeypatch):
    (images / "notes.txt").touch()
    (images / "more" / "table.csv").touch()
    for pattern in (images / "*", images.parent / "im*"):
        found = find_files([str(pattern)])
        assert {str(images / "0.png"), str(images / "more" / "9.png")} < {*found} and len(found) == len({*found})
        assert len(found) == 10 + (pattern.name == "*"), "a file that matches itself is kept, whatever it is called"
    assert ignored_files([str(images / "*")]) == {".csv": 1}
    assert ignored_files([str(images), str(images / "notes.txt")]) == {".csv": 1}
    everything = find_files([str(images / "**")])
    assert len(everything) == len({*everything}) == 12 and not ignored_files([str(images / "**")])


def test_other_spellings_of_a_path_mean_the_same_file(images, monkeypatch):
    monkeypatch.chdir(images.parent)
    found = find_files(["images/3.png", "./images", str(images), "images/more/../3.png"])
    assert found[0] == "images/3.png" and len(found) == 10


@pytest.mark.parametrize("name", ["nothing.png", "*.tiff", "empty"])
def test_text_without_images_is_an_error(name, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="expected image files, folders with images, or patterns"):
        find_files([str(tmp_path / name)])


def test_empty_text_is_no_folder(images, monkeypatch):
    """An unset variable, as in predict RUN "$DIR", must not stand for the current folder."""
    monkeypatch.chdir(images)
    with pytest.raises(ValueError, match="an empty text is no file, no folder and no pattern of which a file exists; expected image"):
        find_files([""])


def test_formats_that_are_not_read_are_named_if_there_are_no_images(tmp_path):
    for name in ("a.heic", "b.heic", "c.nii.gz", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "more").mkdir()
    unread = r"has no images \(files of these formats are not read: 2 .heic, 1 .nii.gz; convert them, for example to PNG\); expected"
    with pytest.raises(ValueError, match=unread):
        find_files([str(tmp_path)])
    with pytest.raises(ValueError, match=r"mor\* has no images; expected image files"):
        find_files([str(tmp_path / "mor*")])


def test_missing_package_is_no_broken_file(arm, images, monkeypatch):
    (images / "x.dcm").write_bytes(b"DICM")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ValueError, match=r"x.dcm is a DICOM file and needs the package pydicom: pip install 'smallvit\[dicom\]'"):
        predict_files(load(arm / "seed0"), find_files([str(images)]), skip_broken=True)


def test_table_in_a_tsv_file_is_separated_by_tabs(arm, images, tmp_path):
    for name in ("one.tsv", "two.TSV", "three.csv"):
        assert main(["predict", str(arm / "seed0"), str(images), "-o", str(tmp_path / name)]) == 0
    tables = [(tmp_path / name).read_text() for name in ("one.tsv", "two.TSV", "three.csv")]
    assert tables[0] == tables[1] == tables[2].replace(",", "\t") and tables[0].startswith("file\tclass\tp_0\t")


def test_unreadable_files_are_listed_together(arm, images, tmp_path, capsys):
    for name in ("broken.png", "torn.jpg"):
        (images / name).write_bytes(b"no image")
    table = tmp_path / "out.csv"
    assert main(["predict", str(arm / "seed0"), str(images), "-o", str(table)]) == 2
    error = capsys.readouterr().err
    assert "2 of 12 files cannot be read" in error and "broken.png" in error and "torn.jpg" in error
    assert "--skip-broken:" in error and "skip_broken" not in error
    assert not table.exists()
    assert main(["predict", str(arm / "seed0"), str(images), "-o", str(table), "--skip-broken"]) == 0
    assert len(rows(table.read_text())) == 10 and capsys.readouterr().err.count("skipped:") == 2


def test_nothing_but_broken_files_is_an_error(arm, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="none of the 1 files can be read"):
        predict_files(load(arm / "seed0"), [str(tmp_path / "a.png")], skip_broken=True)


def test_only_one_batch_of_images_is_in_memory(arm, images, monkeypatch):
    model, largest = load(arm / "seed0"), []
    probabilities = model.probabilities
    monkeypatch.setattr(model, "probabilities", lambda pixels: largest.append(len(pixels)) or probabilities(pixels))
    files = find_files([str(images)]) * 3
    together = predict_files(model, files, batch=4).probabilities
    assert max(largest) == 4 and torch.allclose(together[:10], model.predict_proba(files[:10]), atol=1e-6)
    largest.clear()
    assert model.predict_proba(files, batch=7).shape == (30, 10) and max(largest) == 7


# Several runs


def test_ensemble_is_the_mean_of_the_probabilities(arm, images, tmp_path):
    files = find_files([str(images)])
    expected = torch.stack([load(arm / f"seed{seed}").predict_proba(files) for seed in (0, 1)]).mean(0)
    ensemble = load_all(arm)
    assert isinstance(ensemble, Ensemble) and len(ensemble.models) == 2
    assert torch.allclose(ensemble.predict_proba(files), expected, atol=1e-6)
    assert ensemble.predict(files) == [ensemble.classes[index] for index in expected.argmax(1)]
    assert main(["predict", str(arm), *files, "--ensemble", "-o", str(tmp_path / "out.csv")]) == 0
    table = rows((tmp_path / "out.csv").read_text())
    assert np.allclose([[float(row[f"p_{c}"]) for c in ensemble.classes] for row in table], expected, atol=1e-5)


def test_what_is_no_folder_of_runs_says_what_python_takes(arm, monkeypatch):
    monkeypatch.setenv("HOME", str(arm.parent))
    assert len(load_all(f"~/{arm.name}").models) == len(load_all([f"~/{arm.name}/seed0", arm / "seed1"]).models) == 2
    with pytest.raises(ValueError, match="no folder quickstart:\\+SPT; expected the folder of a finished run \\(on the command line also RECIPE:ARM\\)"):
        load_all("quickstart:+SPT")
    model = load(arm / "seed0")
    for given in (model, [model], [arm / "seed0", model]):
        with pytest.raises(ValueError, match=r"got a TrainedModel; expected folders of runs; for models that are loaded already, use Ensemble\("):
            load_all(given)


def test_models_of_other_pixels_are_no_ensemble(arm):
    one, other = load(arm / "seed0"), load(arm / "seed1")
    other.preprocess = replace(other.preprocess, dtype="float32")
    with pytest.raises(ValueError, match="the models differ in dtype: uint8 and float32"):
        Ensemble([one, other])


def test_several_runs_need_ensemble_or_seed(arm, images, capsys):
    assert main(["predict", str(arm), str(images)]) == 2
    assert re.search("2 finished runs .*--ensemble .*--seed", capsys.readouterr().err)
    assert main(["predict", str(arm), str(images), "--seed", "1"]) == 0
    assert "seed 1" in capsys.readouterr().err
    assert main(["predict", str(arm), str(images), "--seed", "5"]) == 2
    assert "has the seeds 0, 1" in capsys.readouterr().err


def test_arm_of_a_recipe_is_found(workdir, images, capsys):
    Path("runs/mine").mkdir(parents=True)
    assert main(["predict", "mine.py:+slow", str(images)]) == 2
    error = capsys.readouterr().err
    assert "smallvit run mine.py --only arm=+slow" in error and str(workdir / "runs" / "mine") in error and "--out" in error
    for entry in load_recipe("mine.py").RUNS:
        fit(entry.run, folder(entry, "runs", "mine"), tags=tags(entry, "mine"))
    assert main(["predict", "mine.py:+slow", str(images), "--seed", "1"]) == 0
    one = capsys.readouterr()
    assert len(rows(one.out)) == 10 and "+slow, seed 1" in one.err
    assert main(["predict", "mine.py:+slow", str(images), "--ensemble", "--labels", "100"]) == 0
    assert "the mean of 2 models" in capsys.readouterr().err
    assert main(["predict", "mine.py:+slwo", str(images)]) == 2
    assert "did you mean '+slow'?" in capsys.readouterr().err
    assert "have finished" not in one.err
    with pytest.raises(ValueError, match=r"several arms: .*slow.*scratch"):
        load_all("runs/mine")


CONDITIONS = """
from dataclasses import replace
RUNS += [replace(e, run=e.run.vary(lr=1e-3), tuning={"trials": 2}) for e in RUNS if TUNED]
"""


@pytest.mark.parametrize(
    ("folds", "options", "tuned", "choices"),
    [
        ("folds=2", "", True, ["labels=all settings=common", "labels=all settings=tuned"]),
        ("test=0.25", ", labels=(2, 4)", False, ["labels=2", "labels=4"]),
        ("folds=2", ", steps=(1, 2)", False, ["labels=all length=1", "labels=all length=2"]),
        ("test=0.25", ", labels=(2, None), steps=(1, 2)", False, ["labels=2 length=1", "labels=2 length=2", "labels=all length=1", "labels=all length=2"]),
    ],
)
def test_each_choice_among_several_conditions_is_one(folds, options, tuned, choices, workdir, images, monkeypatch, capsys):
    write_pool()
    text = FOLDS.replace("folds=2", folds).replace(", references=False", f"{options}, references=False")
    write_recipe(text + CONDITIONS.replace("TUNED", str(tuned)))
    monkeypatch.setattr(finished, "recall", lambda *words: SimpleNamespace(finished=True))
    words = ["share", "mine.py:+slow", "out", "--seed", "0"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"several conditions; choose one with --only: {', '.join(choices[:-1])} or {choices[-1]}\n" in error
    for choice in choices:
        assert main([*words, "--only", *choice.split()]) == 2
        assert "no run has finished in" in capsys.readouterr().err, "one folder, which is not there"


@pytest.mark.parametrize(("recipe", "has"), [(None, "it has seed=0-1; choose"), (FOLDS, "it has seed=0-3 (a seed is one of 2 folds of a pass); choose")])
def test_seed_that_the_recipe_does_not_have_is_refused_with_those_that_it_has(recipe, has, workdir, images, capsys):
    if recipe:
        write_pool()
        write_recipe(recipe)
    assert main(["predict", "mine.py:+slow", str(images), "--seed", "99"]) == 2
    error = capsys.readouterr().err
    assert f"mine.py has no run of +slow with seed 99; {has} one of these with --seed" in error and "smallvit run" not in error


def test_ensemble_of_an_unfinished_arm_says_how_many_runs_have_finished(workdir, images, capsys):
    first = next(entry for entry in load_recipe("mine.py").RUNS if entry.arm == "+slow")
    fit(first.run, folder(first, "runs", "mine"), tags=tags(first, "mine"))
    assert main(["predict", "mine.py:+slow", str(images), "--ensemble"]) == 0
    printed = capsys.readouterr()
    assert "1 of 2 runs of +slow have finished" in printed.err and len(rows(printed.out)) == 10


def test_predictions_for_training_images_come_with_a_note(workdir, images, tmp_path, capsys):
    """The mean of all folds has seen every image of the folder, but those in test/."""
    write_pool()
    write_recipe(FOLDS)
    for entry in load_recipe("mine.py").RUNS:
        if entry.arm == "+slow" and entry.seed < 2:
            fit(entry.run, folder(entry, "runs", "mine"), tags=tags(entry, "mine"))
    files = sorted(map(str, Path("pool").rglob("*.png")))
    for words, count in (([*files[:3], str(images)], "3 images lie"), (files[:1], "1 image lies")):
        assert main(["predict", "mine.py:+slow", *words, "--ensemble"]) == 0
        assert f"note: {count} in pool, from which the training images of these models come" in capsys.readouterr().err
    assert main(["predict", "mine.py:+slow", str(images), "--seed", "1"]) == 0
    assert "training images" not in capsys.readouterr().err
    for name in ("a", "train"):  # a link to a class, and a class whose name could be that of a part
        Path("pool", "b").rename(Path("pool", "train"))
        Path("pool", "a").rename("a")
        Path("pool", "a").symlink_to(Path("a").resolve())
        assert main(["predict", "mine.py:+slow", f"pool/{name}", "--seed", "1"]) == 0
        assert "in pool, from which the training images of this model come" in capsys.readouterr().err
        Path("pool", "a").unlink()
        Path("a").rename(Path("pool", "a"))
        Path("pool", "train").rename(Path("pool", "b"))
    Path("pool").rename("old")
    Path("pool").mkdir()
    Path("old").rename("pool/Training")
    for name in ("a", "b"):
        (Path("pool") / "Testing" / name).mkdir(parents=True)
        (Path("pool") / "Testing" / name / "1.png").write_bytes((images / "1.png").read_bytes())
    for name, note in (("Testing", False), ("Training", True)):
        assert main(["predict", "mine.py:+slow", f"pool/{name}", "--seed", "1"]) == 0
        assert ("in pool, from which the training images of this model come" in capsys.readouterr().err) == note


@pytest.mark.parametrize("terminal, copies, bar", [(True, 1, False), (True, 20, True), (False, 20, False)])
def test_progress_bar_needs_a_terminal_and_many_files(terminal, copies, bar, arm, images, monkeypatch, capsys):
    files = [file for file in find_files([str(images)]) for _ in range(copies)]
    monkeypatch.setattr("smallvit.commands.predict.find_files", lambda names: files)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    assert main(["predict", str(arm / "seed0"), str(images)]) == 0
    error = capsys.readouterr().err
    assert ("image/s" in error) == bar and f"predicting {len(files)} images" in error


# What cannot predict


def test_recipe_without_an_arm_lists_those_that_predict(workdir, images, capsys):
    write_recipe(WITH_REFERENCES)
    for run in ("mine.py", "mine.py:", "mine"):
        assert main(["predict", run, str(images)]) == 2
        error = capsys.readouterr().err
        name = run.rstrip(":")
        listed = f'add the arm whose model is to be used: {name}:scratch, "{name}:+small steps", "{name}:small CNN"\n'
        assert error.endswith(listed) and "there is no folder" not in error


def test_file_name_of_a_recipe_is_corrected(workdir, images, capsys):
    assert main(["predict", "mien.py", str(images)]) == 2
    assert f"there is no file mien.py in {workdir}; did you mean 'mine.py'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine.py:small", "CNN"], 'CNN is no file with images; did you mean "mine.py:small CNN" in quotes?'),
        (["mine.py:pixels,", "nearest", "neighbor"], 'nearest is no file with images; did you mean "mine.py:pixels, nearest neighbor"'),
        (["mine.py:small", "VGG"], "VGG is no file, no folder and no pattern"),
        (["nowhere.py:small", "CNN"], "CNN is no file, no folder and no pattern"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_name_of_an_arm_without_quotes_is_guessed(words, message, workdir, images, capsys):
    write_recipe(WITH_REFERENCES)
    assert main(["predict", *words, str(images)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arm", "reason"),
    [
        ("pixels, logistic regression", "this reference is no trained network"),
        ("pixels, nearest neighbor", "this reference is no trained network"),
        ("masked", "its head was not trained on labels; train a run with this one as init=... on labels"),
    ],
)
def test_arm_that_is_no_classifier_is_refused_and_others_are_named(arm, reason, workdir, images, capsys):
    write_recipe(WITH_REFERENCES)
    assert main(["predict", f"mine.py:{arm}", str(images)]) == 2
    error = capsys.readouterr().err
    assert f"{arm!r} cannot predict: {reason}" in error
    assert error.endswith('arms that can: mine.py:scratch, "mine.py:+small steps", "mine.py:small CNN"\n')


def test_several_arms_are_refused(workdir, images, capsys):
    write_recipe(WITH_REFERENCES)
    for arms, names in (("scratch,+small steps", "scratch, +small steps"), ("references", "pixels, .*small CNN")):
        assert main(["predict", f"mine.py:{arms}", str(images)]) == 2
        assert re.search(rf"mine.py:{re.escape(arms)} names \d arms: {names if '.' in names else re.escape(names)}.*; expected one arm", capsys.readouterr().err)


def test_runs_of_another_folder_are_looked_for_by_their_full_path(workdir, images, monkeypatch, capsys):
    (workdir / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["predict", "../mine.py:+slow", str(images)]) == 2
    error = capsys.readouterr().err
    assert f"there is no folder {workdir / 'elsewhere' / 'runs' / 'mine'}" in error and "use --out" in error
    assert "train" not in error


def test_files_that_are_no_images_are_counted(arm, images, capsys):
    for name in ("notes.txt", "more/table.csv", "more/LIST.TXT", "Makefile", ".hidden.txt"):
        (images / name).write_text("text")
    assert main(["predict", str(arm / "seed0"), str(images), str(images / "*.png")]) == 0
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if "ignored" in line]
    assert lines == ["smallvit: 4 files that are no images are ignored: 2 .txt, 1 without a suffix, 1 .csv"]
    assert len(rows(printed.out)) == 10


def test_images_of_formats_that_are_not_read_are_not_called_no_images(arm, images, capsys):
    for name in ("a.HEIC", "more/b.heic", "scan.nii.gz", "notes.txt"):
        (images / name).write_text("text")
    assert main(["predict", str(arm / "seed0"), str(images)]) == 0
    printed = capsys.readouterr()
    assert "note: files of these formats are not read: 2 .heic, 1 .nii.gz; convert them" in printed.err
    assert "smallvit: 1 file that is no image is ignored: 1 .txt\n" in printed.err
    assert len(rows(printed.out)) == 10


def write_pool():
    """Write 8 digits into the folders of two classes, pool/a and pool/b."""
    test = digits().test.open()
    for index in range(8):
        file = Path("pool", "ab"[index % 2], f"{index}.png")
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(test.images[index, 0].numpy()).save(file)


@pytest.mark.slow
def test_model_that_was_trained_on_all_images_predicts_and_is_not_run_or_lost(workdir, images, capsys):
    write_pool()
    write_recipe(FOLDS.replace("folds=2", "test=0.0"))
    entry = load_recipe("mine.py").RUNS[0]
    fit(entry.run, "final", validation_only=True)
    weights = Path("final", WEIGHTS).read_bytes()
    for words in (["run", "mine.py"], ["run", "mine.py", "--dry-run"], ["run", "mine.py", "--smoke"]):
        assert main([*words, "--jobs", "1"]) == 2
        assert "pool has no test images (test=0.0), so no run can be scored on them; set test=0.2 or" in capsys.readouterr().err
    assert main(["status", "mine.py"]) == 1 and "0 of 4 runs have finished, 4 waiting" in capsys.readouterr().out
    assert main(["explore", "mine.py", "--jobs", "1"]) == 2 and "'scratch' has val=0" in capsys.readouterr().err
    assert not list(Path("runs").rglob("record.json")) and Path("final", WEIGHTS).read_bytes() == weights
    assert main(["predict", "final", str(images)]) == 0 and len(rows(capsys.readouterr().out)) == 10
    assert main(["export", "final", "model.pt2"]) == 0 and Path("model.pt2").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conditions", "out", "chosen"),
    [
        ("", "runs", ""),
        (", labels=(2, 4)", "runs", " --labels [24]"),
        (", labels=(2, 4), steps=(1, 2)", "my runs", " --labels [24] --only length=2"),
    ],
)
def test_the_printed_command_predicts(conditions, out, chosen, workdir, images, capsys):
    """The best arm may have finished under several conditions, in another folder than ./runs, and below another one."""
    write_pool()
    Path("below").mkdir()
    text = FOLDS.replace("folds=2", "test=0.25").replace('path="pool"', f'path="{workdir}/pool"')
    Path("below/mine.py").write_text(text.replace(", references=False", f"{conditions}, references=False"))
    assert main(["run", "below/mine.py", "--jobs", "1", "--out", out]) == 0
    command = re.search(r"^predictions by the arm with the best mean: smallvit (.*)$", capsys.readouterr().out, re.MULTILINE)[1]
    where = "" if out == "runs" else f" --out '{out}'"
    assert re.fullmatch(rf"predict below/mine.py:[a-z+]+ IMAGES{chosen}{where} --ensemble -o predictions.csv", command)
    assert main([str(images) if word == "IMAGES" else word for word in shlex.split(command)]) == 0
    assert len(rows(Path("predictions.csv").read_text())) == 10 and "the mean of 2 models" in capsys.readouterr().err
    assert main(["run", "below/mine.py", "--jobs", "1", "--out", out, "--scale-steps", "2"]) == 0
    assert "smallvit predict" not in capsys.readouterr().out, "these models have other numbers of steps"


def test_a_model_of_a_cross_validation_says_which_images_it_was_trained_without(workdir, images, capsys):
    write_pool()
    write_recipe(FOLDS)
    for entry in load_recipe("mine.py").RUNS:
        if entry.arm == "+slow":
            fit(entry.run, folder(entry, "runs", "mine"), tags=tags(entry, "mine"))
    assert main(["predict", "mine.py:+slow", str(images), "--seed", "3"]) == 0
    assert "+slow, seed 3 (fold 1 of pass 1: trained without the images of this fold)" in capsys.readouterr().err
    assert main(["predict", "mine.py:+slow", str(images), "--ensemble", "--only", "pass=0"]) == 0
    assert "the mean of 2 models" in capsys.readouterr().err
    assert main(["predict", "runs/mine/all/slow", str(images), "--ensemble", "--only", "pass=0"]) == 2
    assert "--only and --labels choose runs of RECIPE:ARM" in capsys.readouterr().err


def test_name_of_an_arm_may_contain_colons(workdir, images, capsys):
    write_pool()
    write_recipe(FOLDS.replace('"+slow"', '"lr: 1:2"'))
    entry = next(entry for entry in load_recipe("mine.py").RUNS if entry.arm == "lr: 1:2")
    fit(entry.run, folder(entry, "runs", "mine"), tags=tags(entry, "mine"))
    assert main(["predict", "mine.py:lr: 1:2", str(images)]) == 0
    assert "lr: 1:2, seed 0" in capsys.readouterr().err
    assert main(["predict", "mine.py:lr: 1:3", str(images)]) == 2
    assert "has no arm 'lr: 1:3'" in capsys.readouterr().err


def test_folder_without_a_finished_run_is_refused(tmp_path, images, capsys):
    for place, words in ((tmp_path / "nowhere", "there is no folder"), (images, "no run has finished in")):
        assert main(["predict", str(place), str(images)]) == 2
        assert words in capsys.readouterr().err


def test_model_without_a_trained_head_says_what_to_do(tmp_path, images, capsys):
    fit(Run(model=TINY_VIT, objective=partial(MAE, decoder_dim=16), labels=100, val=50, steps=1, batch=16), tmp_path / "run")
    assert main(["predict", str(tmp_path / "run"), str(images)]) == 2
    assert re.search("not trained on labels.*train a run with this one as init", capsys.readouterr().err)


def test_models_of_other_images_make_no_ensemble(arm, tmp_path):
    pixels, labels = np.zeros((20, 9, 9), np.uint8), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)
    fit(Run(data=partial(arrays, path=str(tmp_path / "a.npz")), model=SmallCNN, val=2, steps=1, batch=8), tmp_path / "run")
    with pytest.raises(ValueError, match="the models differ in classes"):
        load_all([arm / "seed0", tmp_path / "run"])
    with pytest.raises(ValueError, match=r"got a ViT; expected trained models, as smallvit.load returns them"):
        Ensemble([TINY_VIT((8, 8), 1, 10)])
    with pytest.raises(ValueError, match=r"got a ViT; expected a trained model, such as smallvit.load\(folder\)"):
        export(TINY_VIT((8, 8), 1, 10), "model.onnx")
    with pytest.raises(ValueError, match="got no files; expected at least one image"):
        predict_files(SimpleNamespace(), [])
    with pytest.raises(ValueError, match="got no models"):
        load_all([])
