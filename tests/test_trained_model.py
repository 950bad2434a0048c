"""Trained models: `load` needs no training data, predicts from every kind of image alike, and refuses damaged folders by name."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from toys import TINY_VIT, slow_but

from smallvit import (
    MAE,
    Dataset,
    Pixels,
    Preprocess,
    Run,
    SmallCNN,
    Splits,
    TrainedModel,
    accuracy,
    arrays,
    augment,
    digits,
    fit,
    knn,
    load,
)
from smallvit.data.images import HeldOut
from smallvit.deploy.predict import predict_files
from smallvit.record import RECORD, WEIGHTS, checksum, read_record

SHORT = Run(model=TINY_VIT, labels=300, val=50, steps=100, batch=32, lr=4e-3, augment=augment.digits())
RUNS = {"CNN": SHORT.vary(model=SmallCNN, steps=60), "ViT": SHORT}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, Path]:
    """The folders of a trained CNN and of a trained ViT, which are trained when they are first asked for. Tests must not change
    them.
    """

    class Trained(dict):
        def __missing__(self, name: str) -> Path:
            self[name] = tmp_path_factory.mktemp(name)
            fit(RUNS[name], self[name])
            return self[name]

    return Trained()


@pytest.fixture
def finished(trained, tmp_path) -> Path:
    """A copy of the folder of the trained ViT."""
    for name in (RECORD, WEIGHTS):
        (tmp_path / name).write_bytes((trained["ViT"] / name).read_bytes())
    return tmp_path


@pytest.fixture
def no_data(monkeypatch):
    """Any access to a data set fails."""

    def fail(*_, **__):
        pytest.fail("the data set was read")

    digits.cache_clear()
    monkeypatch.setattr("sklearn.datasets.load_digits", fail)
    monkeypatch.setattr(Dataset, "from_arrays", fail)
    monkeypatch.setattr(HeldOut, "open", fail)


@pytest.mark.parametrize("name", slow_but(("ViT",), RUNS))
def test_predictions_are_the_recorded_ones_for_every_kind_of_image(name, trained, tmp_path, request):
    test, folder = digits().test.open(), trained[name]
    request.getfixturevalue("no_data")
    files = [tmp_path / f"{index}.png" for index in range(len(test))]
    drawn = [Image.fromarray(image.squeeze(0).numpy()) for image in test.images]
    for file, image in zip(files, drawn):
        image.save(file)
    trained_model = load(folder)
    kinds = {
        "bytes": test.images,
        "floats": test.images.float() / 255,
        "array": test.images.squeeze(1).numpy(),
        "array of floats": test.images.movedim(1, -1).numpy() / np.float32(255),
        "paths": files,
        "names of files": [str(file) for file in files],
        "PIL images": drawn,
    }
    predicted = {kind: trained_model.predict(images) for kind, images in kinds.items()}
    expected = predicted["bytes"]
    assert all(labels == expected for labels in predicted.values())
    right = sum(label == trained_model.classes[target] for label, target in zip(expected, test.labels.tolist()))
    record = read_record(folder)
    assert right / len(test) == record.test["accuracy"] > 0.5
    probabilities = trained_model.predict_proba(files[:3])
    assert probabilities.shape == (3, 10) and torch.allclose(probabilities.sum(1), torch.ones(3))
    one = trained_model.predict_proba(files[0])
    assert torch.allclose(one, probabilities[:1], atol=1e-6) and trained_model.predict(drawn[0]) == expected[:1]


def test_batch_of_predict_proba_changes_nothing(trained):
    images, trained_model = digits().train.images[:20], load(trained["ViT"])
    assert torch.allclose(trained_model.predict_proba(images, batch=7), trained_model.predict_proba(images), atol=1e-6)


@pytest.mark.parametrize("batch", [0, -1, 1.5, True, "8"])
def test_wrong_batches_are_refused(batch, trained):
    images, trained_model = digits().train.images[:2], load(trained["ViT"])
    for given in (images, [*images]):
        with pytest.raises(ValueError, match="expected the number of images in one forward pass"):
            trained_model.predict_proba(given, batch=batch)
    with pytest.raises(ValueError, match="expected the number of images in one forward pass"):
        predict_files(trained_model, ["a.png"], batch=batch)


def test_generator_of_files_is_predicted(trained, tmp_path):
    for index in range(3):
        Image.fromarray(digits().train.images[index, 0].numpy()).save(tmp_path / f"{index}.png")
    trained_model, files = load(trained["ViT"]), sorted(tmp_path.glob("*.png"))
    assert trained_model.predict(file for file in files) == trained_model.predict(files)
    assert torch.equal(trained_model.preprocess(iter(files)), trained_model.preprocess(files))


def test_trained_model_is_shown_by_architecture_classes_and_score(trained):
    trained_model = load(trained["ViT"])
    score = f"{trained_model.record.test['accuracy']:.4g}"
    assert repr(trained_model) == f"TrainedModel(ViT, classes 0, 1, 2 and 7 more, accuracy {score})"
    trained_model.record = replace(trained_model.record, test=None)
    assert repr(trained_model) == "TrainedModel(ViT, classes 0, 1, 2 and 7 more)"


def test_load_returns_run_model_preprocessing_and_record(trained):
    trained_model, data = load(trained["ViT"]), digits()
    assert isinstance(trained_model, TrainedModel) and trained_model.run == SHORT and not trained_model.model.training
    assert trained_model.record == read_record(trained["ViT"]) and trained_model.classes == data.spec.classes
    assert trained_model.preprocess == Preprocess.from_spec(data.spec)
    test = data.test.open()
    assert dict(accuracy(trained_model.model, Splits(test, test, test))) == trained_model.record.test


def test_weights_file_contains_fingerprint_and_preprocessing(trained):
    with safe_open(trained["ViT"] / WEIGHTS, "pt") as file:
        description = json.loads(file.metadata()["smallvit"])
    record = read_record(trained["ViT"])
    assert description == {"fingerprint": record.fingerprint, "preprocess": record.preprocess}
    assert record.preprocess["classes"] == [*"0123456789"] and record.preprocess["mean"] == [0.0]
    assert Preprocess.from_dict(description["preprocess"]).mode == "L"


def test_color_images_are_predicted_from_files_of_another_size_and_mode(tmp_path):
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 255, (90, 12, 10, 3), dtype=np.uint8)
    labels = np.arange(90) % 3
    np.savez(tmp_path / "a.npz", train_images=pixels, train_labels=labels, test_images=pixels[:30], test_labels=labels[:30])
    fit(Run(data=partial(arrays, path=str(tmp_path / "a.npz")), model=SmallCNN, val=9, steps=2, batch=8), tmp_path / "run")
    (tmp_path / "a.npz").unlink()
    trained_model = load(tmp_path / "run")
    Image.fromarray(pixels[0]).resize((50, 60)).convert("L").save(tmp_path / "gray.jpg")
    assert trained_model.predict(tmp_path / "gray.jpg")[0] in trained_model.classes == ("0", "1", "2")
    assert trained_model.predict_proba(pixels).shape == (90, 3)


# Refused


def replace_weights(folder: Path, change):
    (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def edit_record(folder: Path, **changes):
    """Change fields of a record as somebody does who also knows the hash of its content."""
    plain = json.loads((folder / RECORD).read_text()) | changes
    plain = {name: value for name, value in plain.items() if value != "gone"}
    (folder / RECORD).write_text(json.dumps(plain | {"checksum": checksum(plain)}))


def weights_of_another_run(folder: Path):
    other = fit(SHORT.vary(steps=2), folder / "other")
    (folder / WEIGHTS).write_bytes((folder / "other" / WEIGHTS).read_bytes())
    edit_record(folder, weights_sha256=other.weights_sha256)


DAMAGE = {
    "nothing there": (lambda folder: (folder / RECORD).unlink(), "no run has finished in"),
    "failed run": (lambda folder: edit_record(folder, status="failed"), "no run has finished in"),
    "torn record": (lambda folder: (folder / RECORD).write_bytes((folder / RECORD).read_bytes()[:-9]), "record.json is damaged"),
    "record of version 0.1": (lambda folder: edit_record(folder, format="gone"), "record format 1"),
    "no preprocessing": (lambda folder: edit_record(folder, preprocess=None), "how images are preprocessed"),
    "wrong preprocessing": (lambda folder: edit_record(folder, preprocess={"mean": [0.0]}), "missing"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "has no model.safetensors"),
    "empty weights": (lambda folder: replace_weights(folder, lambda content: b""), "model.safetensors is damaged"),
    "torn weights": (lambda folder: replace_weights(folder, lambda content: content[:-9]), "model.safetensors is damaged"),
    "changed weights": (
        lambda folder: replace_weights(folder, lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        "model.safetensors is damaged",
    ),
    "weights of another run": (weights_of_another_run, r"holds the weights of run \w+, not of"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_folder_that_cannot_be_loaded_is_refused_by_name(kind, finished):
    damage, words = DAMAGE[kind]
    damage(finished)
    with pytest.raises(ValueError, match=words):
        load(finished)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x08\0\0\0\0\0\0\0[1, 2]  "], ids=["empty", "no header", "no tensors"])
def test_weights_without_a_recorded_hash_are_still_checked(content, finished):
    edit_record(finished, weights_sha256=None)
    (finished / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load(finished)


UNTRAINED = SHORT.vary(steps=0, evaluators=(knn,), ema=0.0, augment=())
MAE_RUN = SHORT.vary(objective=partial(MAE, decoder_dim=16), steps=2, augment=())
WITHOUT_CLASSES = {
    "pixels": UNTRAINED.vary(model=Pixels),
    "untrained": UNTRAINED,
    "MAE": MAE_RUN,
    "frozen MAE": UNTRAINED.vary(init=MAE_RUN),
}


@pytest.mark.parametrize("kind", slow_but(("pixels", "untrained", "frozen MAE"), WITHOUT_CLASSES))
def test_model_without_a_trained_head_does_not_predict(kind, tmp_path):
    fit(WITHOUT_CLASSES[kind], tmp_path)
    trained_model = load(tmp_path)
    with pytest.raises(ValueError, match="not trained on labels"):
        trained_model.predict(digits().train.images[:2])
    if kind != "pixels":
        features = trained_model.model.features(trained_model.preprocess(digits().train.images[:2]))
        assert features.shape == (2, 16)


def test_head_for_other_classes_does_not_predict_before_training(tmp_path):
    generator = np.random.default_rng(0)
    pixels, labels = generator.integers(0, 255, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
    np.savez(tmp_path / "a.npz", train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)
    three = partial(arrays, path=str(tmp_path / "a.npz"))
    fit(UNTRAINED.vary(data=three, labels=None, val=10, init=SHORT.vary(steps=2)), tmp_path / "frozen")
    fit(UNTRAINED.vary(init=SHORT.vary(steps=2)), tmp_path / "same classes")
    with pytest.raises(ValueError, match="not trained on labels"):
        load(tmp_path / "frozen").predict(pixels)
    assert len(load(tmp_path / "same classes").predict(pixels)) == 60


@pytest.mark.parametrize(
    "images, words",
    [
        (torch.randn(2, 1, 8, 8), "normalized already"),
        (torch.rand(2, 1, 9, 8), "expected"),
        (torch.rand(2, 3, 8, 8), "expected"),
        ("missing.png", "missing.png"),
        ("scans/*.png", r"scans/\*.png is a folder or a pattern; expected image files: pass a list of them, such as sorted"),
        (str(Path(__file__).parent), "tests is a folder or a pattern; expected image files"),
        ([], "at least one image"),
        ({"a": 1}, "paths, PIL images"),
    ],
)
def test_images_that_do_not_fit_are_refused(images, words, trained):
    with pytest.raises(ValueError, match=words):
        load(trained["ViT"]).predict(images)
