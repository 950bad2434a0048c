"""smallvit report R --mistakes ARM and --predictions ARM: what trained models predict for their test images."""

import csv
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from toys import TINY_VIT

from smallvit import ArmRun, Run, SmallCNN, ablate, arrays, digits, fit, load
from smallvit.commands.mistakes import Mistake, draw, each_tested_by, show_mistakes
from smallvit.commands.predictions import file_beside_report, image_names, write_predictions
from smallvit.launch.results import folder
from smallvit.train.fit import Tags
from smallvit.verdicts import compare


def mistake() -> Mistake:
    """An image of 4 x 4 pixels that two of three models have classified wrongly."""
    pixels = torch.rand(1, 4, 4)
    return Mistake(image=0, name="a.png", true="$1_$5", pixels=pixels, tested=3, guesses=["$5_$10"] * 2, confidence=[0.9, 0.6])


def test_names_of_classes_with_dollars_are_drawn(tmp_path):
    path = tmp_path / "mistakes.png"
    assert draw([mistake()], path) == f"drawn in {path}" and path.read_bytes().startswith(b"\x89PNG")


def test_figure_that_cannot_be_drawn_is_no_error(tmp_path, monkeypatch):
    def savefig(*_, **options):
        raise ValueError("no such font")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", savefig)
    line = draw([mistake()], tmp_path / "mistakes.png")
    assert line.startswith("the images cannot be drawn: ") and "no such font" in line
    assert not list(tmp_path.iterdir())


def test_mistakes_on_images_that_have_changed_are_refused(tmp_path):
    """Among the test images of the changed folder are images on which the model was trained."""
    pixels = np.random.default_rng(0).integers(0, 256, (22, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels[:20], labels=np.arange(20) % 2)
    run = Run(data=partial(arrays, path=str(tmp_path / "a.npz"), test=0.5), model=TINY_VIT, val=2, steps=1, batch=8)
    entry = ArmRun(run=run, arm="scratch", role="baseline")
    record = fit(run, folder(entry, tmp_path, "lab"), tags=Tags("lab", "scratch", "baseline"))
    given = "scratch", [entry], [record], compare([record]), tmp_path, "lab", "smallvit run lab"
    assert show_mistakes(*given).startswith("Mistakes of scratch")
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(22) % 2)
    with pytest.raises(ValueError, match=r"have changed since 'scratch' was trained.*; restore the data, or"):
        show_mistakes(*given)


def test_mistakes_in_a_cross_validation_say_how_many_runs_tested_each_image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (22, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(22) % 2)
    run = Run(data=partial(arrays, path=str(tmp_path / "a.npz"), folds=2), model=TINY_VIT, val=2, steps=1, batch=8)
    entries = [ArmRun(run=run.at_seed(seed), arm="scratch", role="baseline") for seed in range(2)]
    found = [fit(e.run, folder(e, tmp_path, "lab"), tags=Tags("lab", "scratch", "baseline")) for e in entries]
    text = show_mistakes("scratch", entries, found, compare(found), tmp_path, "lab", "smallvit run lab")
    assert " of 22 test images are wrong in at least one of 2 runs; each image was tested by 1 of them\n" in text
    assert each_tested_by([mistake()], 3) == "" and each_tested_by([mistake(), replace(mistake(), tested=2)], 9).endswith("by 2 to 3 of them")


def test_images_of_a_cross_validation_are_predicted_by_models_that_were_not_trained_on_them(tmp_path):
    """Two passes of three folds: the table has the mean of the two models without the image, as a slow loop finds them."""
    pixels = np.random.default_rng(0).integers(0, 256, (22, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(22) % 2)
    run = Run(data=partial(arrays, path=str(tmp_path / "a.npz"), folds=3), model=TINY_VIT, val=2, steps=3, batch=8)
    entries = [ArmRun(run=run.at_seed(seed), arm="+a b", role="baseline") for seed in range(6)]
    found = [fit(e.run, folder(e, tmp_path, "lab"), tags=Tags("lab", "+a b", "baseline")) for e in entries]
    given = compare(found), tmp_path, "lab", "smallvit run lab"
    path = tmp_path / "lab" / "predictions-a-b.csv"
    line = write_predictions("+a b", entries[:4], found[:4], *given)
    assert line == f"predictions of +a b at all labels for 22 test images by 4 models: {path}"
    missing = replace(found[5], status="missing")
    line = write_predictions("+a b", entries[4:], [found[4], missing], *given)
    assert " for 7 test images by 1 model (1 of the 2 runs have not finished): " in line
    line = write_predictions("+a b", entries, found, *given)
    assert line == f"predictions of +a b at all labels for 22 test images by 6 models: {path}"
    rows = list(csv.DictReader((tmp_path / "lab" / "predictions-a-b.csv").read_text().splitlines()))
    assert [*rows[0]] == ["file", "class", "label", "models", "p_0", "p_1"] and len(rows) == 22
    models = {e.run.seed: load(folder(e, tmp_path, "lab")) for e in entries}
    tests = {e.run.seed: e.run.data().at_seed(e.run.seed).fold.positions.tolist() for e in entries}
    for image, row in enumerate(rows):
        assert row["file"] == f"test image {image}" and row["label"] == str(image % 2) and row["models"] == "2"
        mine = [models[seed].predict_proba(pixels[image : image + 1])[0] for seed in models if image in tests[seed]]
        mean = np.mean(np.asarray(mine), 0)
        assert len(mine) == 2 and np.allclose(mean, [float(row["p_0"]), float(row["p_1"])], atol=2e-6)
        assert row["class"] == str(mean.argmax())


def test_arms_with_similar_names_have_files_of_their_own(tmp_path):
    runs = [ArmRun(run=Run(model=SmallCNN, labels=10, steps=1), arm=arm) for arm in ("SPT", "+SPT", "a b", "\u6570", "\u57fa")]
    names = [file_beside_report("predictions", entry.arm, runs, tmp_path, "lab").name for entry in runs]
    assert len(set(names)) == 5 and names[2] == "predictions-a-b"
    assert names[:2] == ["predictions-SPT-" + hashlib.sha256(arm.encode()).hexdigest()[:8] for arm in ("SPT", "+SPT")]


def test_data_that_cannot_be_loaded_are_an_error_with_its_reason(tmp_path, monkeypatch):
    run = Run(data=digits, model=TINY_VIT, labels=20, val=10, steps=1, batch=8)
    entry = ArmRun(run=run, arm="scratch", role="baseline")
    record = fit(run, folder(entry, tmp_path, "lab"), tags=Tags("lab", "scratch", "baseline"))
    given = "scratch", [entry], [record], compare([record]), tmp_path, "lab", "smallvit run lab"
    assert image_names([entry], [record], "scratch")[0] == "test image 0"

    def missing(**_):
        raise RuntimeError("Dataset not found")

    monkeypatch.setattr("sklearn.datasets.load_digits", missing)
    digits.cache_clear()
    assert image_names([entry], [record], "scratch") is None
    for command in (show_mistakes, write_predictions):
        with pytest.raises(ValueError, match=r"the data .* cannot be loaded: RuntimeError: Dataset not found"):
            command(*given)
    monkeypatch.undo()
    digits.cache_clear()


def test_arm_without_models_is_refused_with_the_command_that_trains_it():
    base = Run(model=SmallCNN, labels=100, val=50, steps=1)
    runs = ablate({"scratch": base, "small steps": base.vary(lr=1e-4)}, labels=[100], seeds=range(1), references=())
    advice = "train them with: smallvit run sub/lab.py --out other --only 'arm=small steps'$"
    with pytest.raises(ValueError, match=f"no finished run of 'small steps' is in other, .* {advice}"):
        show_mistakes("small steps", runs, [], None, Path("other"), "lab", "smallvit run sub/lab.py --out other")
    with pytest.raises(ValueError, match="the recipe lab has no arm 'none'; expected one of 'scratch', 'small steps'"):
        write_predictions("none", runs, [], None, Path("other"), "lab", "smallvit run sub/lab.py --out other")
