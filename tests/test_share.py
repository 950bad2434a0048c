"""smallvit share: a folder or a page on the hub that others can load, and everything that is refused on the way."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from toys import TINY_VIT, write_recipe

from smallvit import MAE, Merge, Run, arrays, digits, fit, load, load_recipe, share
from smallvit.__main__ import main
from smallvit.data import Preprocess
from smallvit.deploy import onnx
from smallvit.deploy.hub import model_card, onnx_text, result_lines
from smallvit.record import Record, read_record
from smallvit.storage import file_sha256

SHORT = Run(model=partial(TINY_VIT, reduction=partial(Merge, r=2)), labels=100, val=50, steps=4, batch=16)
RECIPE = '''"""Is my own model better?"""

from smallvit import Run, SmallCNN, ablate, digits

class Mine(SmallCNN):
    """A small CNN of my own."""

RUNS = ablate({"mine": Run(data=digits, model=Mine, val=50, steps=1, batch=16)}, labels=(100,), seeds=range(1), references=())
'''


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with three finished runs that differ in the seed."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        fit(SHORT.at_seed(seed), folder / f"seed{seed}")
    return folder


@pytest.fixture
def shared(runs, tmp_path) -> Path:
    """The folder of a shared model."""
    return Path(share(runs / "seed1", tmp_path / "shared"))


def test_shared_folder_loads_and_predicts_the_same(runs, shared):
    images = digits().train.images[:9]
    assert torch.equal(load(shared).predict_proba(images), load(runs / "seed1").predict_proba(images))
    assert {path.name for path in shared.iterdir()} == {"README.md", "config.json", "model.safetensors", "record.json"}


def test_pictures_of_images_are_not_shared(runs, shared):
    assert read_record(runs / "seed1").picture and read_record(shared).picture is None


def test_model_card_says_what_a_reader_needs(runs, tmp_path, capsys):
    place = tmp_path / "shared"
    assert main(["share", str(runs), str(place), "--seed", "2", "--license", "mit"]) == 0
    assert f"smallvit.load({str(place)!r})" in capsys.readouterr().out
    _, front, text = (place / "README.md").read_text().split("---\n", 2)
    values = {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in front.splitlines()}
    assert values["library_name"] == "smallvit" and values["license"] == "mit" and values["datasets"] == ["digits"]
    record = read_record(runs / "seed2")
    assert f"accuracy of this model on 500 test images: {record.test['accuracy']:.4g}" in text
    assert "accuracy of 3 models that differ in the seed" in text and "95% interval" in text
    assert "0, 1, 2, 3, 4, 5, 6, 7, 8, 9" in text and "8 x 8" in text and "100 labels" in text and "Limits" in text


def test_model_card_of_float_pixels_says_how_they_are_read(runs):
    trained = load(runs / "seed0")
    assert "scaled to [0, 1] and normalized" in model_card(trained, [], None, False, "x")
    trained.preprocess = replace(trained.preprocess, dtype="float32")
    text = model_card(trained, [], None, False, "x")
    assert "kept as floats (16-bit values divided by 65535) and normalized" in text and "[0, 1]" not in text


def test_model_card_of_a_cross_validation_counts_passes_and_not_folds(runs):
    def fold(seed: int, score: float) -> Record:
        """One of two folds, with 3 of 4 images, or with 1 of 4."""
        return replace(read_record(runs / "seed0"), seed=seed, folds=2, test={"accuracy": score}, test_images=1 if seed % 2 else 3)

    complete = [fold(seed, score) for seed, score in enumerate((0.8, 0.4, 0.6, 0.6, 0.4, 0.8))]
    (line,) = [line for line in result_lines(complete[0], complete) if "interval" in line]
    assert line.startswith("- accuracy of 3 passes over all images, each with 2 models: 0.6 ± 0.25 (95% interval of the mean over passes")
    assert "interval" not in "".join(result_lines(complete[0], complete[:-1])), "the third pass is not complete"


@pytest.mark.parametrize(("options", "together"), [({"group_by": "(.*)_"}, "of one group, such as a patient,"), ({}, "with identical pixels"), (None, "")])
def test_model_card_of_one_fold_says_which_images_the_model_was_trained_without(runs, options, together):
    trained = load(runs / "seed0")
    data = {"call": "smallvit.data.folder", "path": "cells", **(options or {})}
    groups = None if options is None else [0, 0, 1]
    known = {"folds": 2, "run": trained.record.run | {"data": data}, "test_groups": groups}
    folds = [replace(trained.record, seed=seed, **known) for seed in range(6)]
    trained.record = folds[3]
    text = model_card(trained, folds, None, False, "x")
    assert "this is the model of fold 1 of pass 1 (both from 0)" in text and "trained without the images of its fold" in text
    assert re.findall(r"Images (.*) were kept together", text) == [together] * bool(together)
    assert "This is the result of one of 6 models (2 folds x 3 passes), on the images of its fold." in text
    assert "one of the 2 models of a pass" in model_card(trained, folds[:4:3], None, False, "x")
    trained.record = replace(folds[3], folds=None)
    assert not re.search(r"\bfolds?\b|\bpass|together", model_card(trained, [], None, False, "x"))


def test_license_is_unknown_unless_given(shared):
    assert 'license: "unknown"' in (shared / "README.md").read_text()


@pytest.mark.parametrize(
    ("dtype", "channels", "text"),
    [("uint8", 3, "the same in ONNX Runtime, from bytes"), ("float32", 1, "as float32 in .* resized 8-bit"), ("float32", 4, r"as float32 in \[0, 1\]\.$")],
)
def test_model_card_says_which_pixels_the_onnx_file_takes(dtype, channels, text):
    mean, std = (0.5,) * channels, (0.2,) * channels
    preprocess = Preprocess(size=(8, 8), channels=channels, mean=mean, std=std, classes=("a", "b"), dtype=dtype)
    assert re.search(text, onnx_text(preprocess))


@pytest.mark.slow
def test_onnx_file_is_shared_on_request(runs, tmp_path):
    pytest.importorskip("onnxscript")
    place = Path(share(runs / "seed0", tmp_path / "shared", onnx=True))
    assert (place / "model.onnx").exists() and "onnx" in (place / "README.md").read_text()
    (place / "model.onnx").write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"model.onnx is different from what was shared"):
        load(place)


def test_model_that_cannot_be_exported_leaves_no_half_written_folder(runs, tmp_path, monkeypatch):
    def fail(model, path):
        raise ValueError("the model cannot be exported")

    monkeypatch.setattr(onnx, "check_packages", lambda: None)
    monkeypatch.setattr(onnx, "export", fail)
    with pytest.raises(ValueError, match="cannot be exported"):
        share(runs / "seed0", tmp_path / "shared", onnx=True)
    assert not [*(tmp_path / "shared").iterdir()]
    assert load(share(runs / "seed0", tmp_path / "shared")).record.seed == 0


# The hub


class Hub:
    """A hub in a folder, in place of the one in the internet. It has the functions that smallvit calls."""

    def __init__(self, folder: Path):
        self.folder, self.asked, self.private = folder, [], None

    def HfApi(self):
        return self

    def create_repo(self, name, repo_type, private, exist_ok):
        self.private = private
        return f"https://huggingface.co/{name}"

    def upload_folder(self, repo_id, folder_path, commit_message):
        shutil.copytree(folder_path, self.folder / repo_id)

    def snapshot_download(self, name, revision, allow_patterns):
        self.asked.append((name, revision))
        if not (self.folder / name).exists():
            raise FileNotFoundError("404 Client Error")
        copy = self.folder / "cache" / name
        copy.mkdir(parents=True, exist_ok=True)
        for file in (self.folder / name).iterdir():
            if file.name in allow_patterns:
                shutil.copy(file, copy)
        return str(copy)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path / "hub")
    for name in ("HfApi", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    return hub


def test_model_goes_to_the_hub_and_comes_back(runs, hub, capsys):
    assert main(["share", str(runs / "seed0"), "hf:user/name", "--private"]) == 0
    assert "https://huggingface.co/user/name" in capsys.readouterr().out and hub.private
    assert 'smallvit.load("hf:user/name")' in (hub.folder / "user/name/README.md").read_text()
    (hub.folder / "user/name/pytorch_model.bin").write_bytes(b"a pickle")
    images = digits().train.images[:5]
    expected = load(runs / "seed0").predict_proba(images)
    assert torch.equal(load("hf:user/name").predict_proba(images), expected)
    assert torch.equal(load("hf:user/name@a1b2c3").predict_proba(images), expected)
    assert hub.asked == [("user/name", None), ("user/name", "a1b2c3")]
    assert not (hub.folder / "cache/user/name/pytorch_model.bin").exists()


@pytest.mark.parametrize("address, words", [("hf:name", "expected hf:user/name"), ("hf:user/none", "could not be downloaded")])
def test_address_without_a_model_is_refused(address, words, hub):
    with pytest.raises(ValueError, match=words):
        load(address)


def test_failed_upload_says_what_to_check(runs, hub, monkeypatch):
    def fail(*_, **__):
        raise PermissionError("401 Client Error")

    monkeypatch.setattr(hub, "create_repo", fail)
    with pytest.raises(ValueError, match=r"could not be uploaded .*401.*hf auth login"):
        share(runs / "seed0", "hf:user/name")
    with pytest.raises(ValueError, match="expected hf:user/name"):
        share(runs / "seed0", "hf:name")


# Refused


@pytest.mark.parametrize("name", ["model.safetensors", "record.json"])
def test_changed_file_is_refused(name, shared):
    content = bytearray((shared / name).read_bytes())
    content[-2] ^= 1
    (shared / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is different from what was shared.*download the model again"):
        load(shared)
    (shared / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        load(shared)


def test_damaged_config_is_refused(shared):
    (shared / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config.json is damaged or not of smallvit"):
        load(shared)


def test_changed_settings_are_refused(runs, tmp_path):
    shutil.copytree(runs / "seed0", tmp_path / "run")
    plain = json.loads((tmp_path / "run/record.json").read_text())
    plain["run"]["lr"] = 0.5
    (tmp_path / "run/record.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="is damaged: its content has another hash"):
        load(tmp_path / "run")
    del plain["checksum"]  # an older record has none
    (tmp_path / "run/record.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=r"settings in .* were changed after training"):
        load(tmp_path / "run")


def test_own_code_is_neither_shared_nor_loaded(workdir, shared):
    write_recipe(RECIPE)
    run = Path("run")
    fit(load_recipe("mine.py").RUNS[0].run, run)
    with pytest.raises(ValueError, match=r"code that is not part of smallvit: recipes.mine.Mine; .*smallvit export"):
        share(run, "out")
    for name in ("record.json", "model.safetensors"):
        shutil.copy(run / name, shared / name)
    config = json.loads((shared / "config.json").read_text())
    config["files"] = {name: file_sha256(shared / name) for name in config["files"]}
    (shared / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"recipes.mine.Mine; smallvit never runs code of a shared model"):
        load(shared)


def test_folder_that_is_not_empty_is_refused(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not an empty folder"):
        share(runs / "seed0", tmp_path)


def test_home_folder_in_the_names_of_folders(runs, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs").symlink_to(runs)
    assert share("~/runs/seed0", "~/shared") == str(tmp_path / "shared")
    assert load("~/shared").record.fingerprint == load("~/runs/seed0").record.fingerprint


def test_folder_cannot_be_private(runs, tmp_path):
    with pytest.raises(ValueError, match=r"and .*shared is a folder; leave it out"):
        share(runs / "seed0", tmp_path / "shared", private=True)
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize("option", [["--seed", "0"], ["--labels", "50"], ["--only", "settings=tuned"]])
def test_nothing_is_chosen_of_a_model_on_the_hub(option, hub, tmp_path, capsys):
    assert main(["export", "hf:user/name", str(tmp_path / "a.onnx"), *option]) == 2
    assert "choose among several runs, and hf:user/name is one model; leave them out" in capsys.readouterr().err
    assert not hub.asked


def test_model_without_a_trained_head_is_refused(tmp_path):
    fit(Run(model=TINY_VIT, objective=partial(MAE, decoder_dim=16), labels=100, val=50, steps=1, batch=16), tmp_path / "run")
    with pytest.raises(ValueError, match="not trained on labels"):
        share(tmp_path / "run", tmp_path / "shared")


def test_paths_in_the_settings_are_named(tmp_path, capsys):
    pixels, labels = np.arange(20 * 64).reshape(20, 8, 8).astype(np.uint8), np.arange(20) % 2
    np.savez(tmp_path / "a.npz", train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)
    data = partial(arrays, path=str(tmp_path / "a.npz"))
    fit(Run(data=data, model=TINY_VIT, val=2, steps=1, batch=8), tmp_path / "run")
    assert main(["share", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert f"note: {tmp_path / 'a.npz'} is a path of this machine" in capsys.readouterr().err
    assert str(tmp_path) not in (tmp_path / "out" / "README.md").read_text().replace("path/to", "")


def test_paths_are_named_before_an_upload_and_only_if_there_is_one(runs, tmp_path, hub, monkeypatch, capsys):
    monkeypatch.setattr("smallvit.commands.share.local_paths", lambda record: ["/home/me"])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for target, error in ((str(tmp_path / "full"), "is not an empty folder"), ("hf:name", "expected hf:user/name")):
        assert main(["share", str(runs / "seed0"), target]) == 2
        assert error in (printed := capsys.readouterr().err) and "note:" not in printed
    before = []
    monkeypatch.setattr(hub, "upload_folder", lambda **_: before.append(capsys.readouterr().err))
    assert main(["share", str(runs / "seed0"), "hf:user/name"]) == 0
    assert "note: /home/me is a path of this machine" in before[0]
