"""Errors that are put into training or evaluation on purpose: `verify` must find each of them with one seed.

Records are made by the correct code. Then one part of the library is replaced, and one run is trained again. The comparison is
made twice: with the record as it is (the same machine must give the same weights), and with a record that claims another
processor, where only the first steps and the score can be compared.
"""

import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from toys import TINY_VIT

import smallvit
from smallvit import Run, ablate, augment, digits
from smallvit.__main__ import main
from smallvit.data import Images
from smallvit.evaluate import scores
from smallvit.record import read_records
from smallvit.report import compare_with_committed
from smallvit.train import batches, loop
from smallvit.train.loop import Training

pytestmark = pytest.mark.slow
FIT = importlib.import_module("smallvit.train.fit")
BASE = Run(data=digits, model=partial(TINY_VIT, dim=32), augment=augment.digits(), steps=60, batch=32, lr=4e-3, ema=0.1)
RUNS = ablate({"scratch": BASE, "no decay": BASE.vary(weight_decay=0.0)}, labels=[100], seeds=range(3), references=False)


def train_again(folder, seed=0, arm="scratch", **options):
    """Train one run of the recipe in a new folder and return its record."""
    entry = next(entry for entry in RUNS if (entry.arm, entry.seed) == (arm, seed))
    tags = FIT.Tags("toy", entry.arm, entry.role, entry.baseline)
    return FIT.fit(entry.run, folder, tags=tags, **options)


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    """The records of all runs, as the correct code makes them."""
    folder = tmp_path_factory.mktemp("committed")
    return [train_again(folder / f"{e.arm}{e.seed}", e.seed, e.arm) for e in RUNS]


def on_another_machine(records):
    """The same records as if another processor had made them: with other weights."""
    return [replace(record, cpu="Another CPU", weights_sha256="0" * 64) for record in records]


MACHINES = pytest.mark.parametrize("made", [list, on_another_machine], ids=["same machine", "another machine"])


# Errors: each function takes `monkeypatch` and makes one change


def evaluates_the_last_weights(patch):
    patch.setattr(Training, "model", property(lambda self: self.objective.model))


def never_updates_the_average(patch):
    patch.setattr(loop, "ema_update", lambda pairs, weight: None)


def draws_by_arm(name, patch):
    """Random draws of one kind depend on something else than the seed, such as the name of the arm."""
    patch.setattr(batches, "stream", lambda seed, kind, step=0: stream(seed + 7 * (kind == name), kind, step))
    patch.setattr(batches, "epoch_order", batches.epoch_order.__wrapped__)  # its cache would keep the wrong orders for other tests


def initializes_by_arm(patch):
    module = importlib.import_module("smallvit.train.initialize")
    patch.setattr(module, "initialize", lambda model, seed: initialize(model, seed + 7))


def trains_on_test_images(share, patch):
    """Test images, with their labels, replace or join the labelled images. The indices of the subset do not change."""

    def leak(run):
        data, subset = load_data(run)
        train, test = subset.train, data.test._HeldOut__images  # `open()` refuses during training
        if share == "all":
            images, labels = torch.cat([train.images, test.images]), torch.cat([train.labels, test.labels])
        else:
            images, labels = train.images.clone(), train.labels.clone()
            images[:5], labels[:5] = test.images[:5], test.labels[:5]
        return data, replace(subset, train=Images(images, labels, train.spec))

    patch.setattr(FIT, "load_data", leak)


def adapts_to_test_labels(patch):
    """The model is trained on the test images before it is evaluated."""

    def adapt(run, model, subset, test, *numerics):
        images = test._HeldOut__images
        optimizer = torch.optim.Adam([p.requires_grad_() for p in model.parameters()], 3e-3)
        for pixels, labels in [*images.batches(100)] * 4:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(pixels), labels).backward()
            optimizer.step()
        return evaluate(run, model, subset, test, *numerics)

    patch.setattr(FIT, "evaluate", adapt)


def evaluates_without_normalization(patch):
    (mean,), (std,) = digits().spec.mean, digits().spec.std
    patch.setattr(scores, "apply", lambda transforms, batch, generator: batch._replace(images=batch.images * std + mean))


def never_lowers_the_rate(patch):
    patch.setattr(loop, "learning_rate", lambda *words: learning_rate(*words[:3], "constant"))


def has_no_warmup(patch):
    patch.setattr(loop, "learning_rate", lambda progress, warmup, *words: learning_rate(progress, 0.0, *words))


def draws_another_subset(patch):
    def other(run):
        data, _ = load_data(run)
        return data, data.subset(labels=run.labels, val=run.val, seed=run.seed + 1)

    patch.setattr(FIT, "load_data", other)


def swaps_labels(patch):
    """The images keep their places, and some get the label of another image."""

    def swap(run):
        data, subset = load_data(run)
        return data, replace(subset, train=replace(subset.train, labels=subset.train.labels.roll(1)))

    patch.setattr(FIT, "load_data", swap)


stream, initialize, load_data = batches.stream, importlib.import_module("smallvit.random_weights").initialize, FIT.load_data
evaluate, learning_rate = FIT.evaluate, loop.learning_rate

ERRORS = {  # name -> the error and what the message says on another machine
    "EMA not evaluated": (evaluates_the_last_weights, "EMA"),
    "EMA not updated": (never_updates_the_average, "EMA"),
    "order by arm": (partial(draws_by_arm, "order"), "other batches"),
    "augmentation by arm": (partial(draws_by_arm, "augment"), "other batches"),
    "initial weights by arm": (initializes_by_arm, "other initial weights"),
    "all test images in training": (partial(trains_on_test_images, "all"), "other batches"),
    "five test images in training": (partial(trains_on_test_images, "five"), "other batches"),
    "training on test labels": (adapts_to_test_labels, ""),
    "evaluation without normalization": (evaluates_without_normalization, ""),
    "constant learning rate": (never_lowers_the_rate, ""),
    "no warmup": (has_no_warmup, ""),
    "another subset": (draws_another_subset, "other labelled images"),
    "labels of other images": (swaps_labels, "other batches"),
}


@MACHINES
@pytest.mark.parametrize("error", ERRORS)
def test_one_seed_shows_an_error(committed, tmp_path, monkeypatch, error, made):
    plant, words = ERRORS[error]
    plant(monkeypatch)
    again = train_again(tmp_path)
    lines, agree = compare_with_committed(made(committed), [again])
    assert not agree and words in lines[0]
    assert ("FAILED" in lines[0]) or error == "another subset"


@pytest.mark.parametrize("made", [list, on_another_machine], ids=["same machine", "another machine"])
def test_correct_runs_agree(committed, tmp_path, made):
    again = [train_again(tmp_path / arm, 0, arm) for arm in ("scratch", "no decay")]
    lines, agree = compare_with_committed(made(committed), again)
    assert agree
    words = "identical to the record (weights and score)" if made is list else "up to rounding"
    assert all(words in line for line in lines if ", seed 0: " in line)


RECIPE = '''
"""Does an option help a very small model?"""
from functools import partial
from smallvit import PatchEmbed, Run, ViT, ablate

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=20, batch=8, ema=0.2)
RUNS = ablate({"scratch": scratch, "no decay": scratch.vary(weight_decay=0.0)}, labels=[20], seeds=range(3), references=False)
'''


PACKAGE = Path(smallvit.__file__).parent


def verify(path: str | Path, **environment: str) -> tuple[int, str]:
    """Verify one seed in another process that imports smallvit from `path`. Return its exit status and what it prints."""
    words = [sys.executable, "-m", "smallvit", "verify", "mine.py", "--jobs", "1", "--only", "seed=2"]
    changed = os.environ | {"PYTHONPATH": str(path)} | environment
    done = subprocess.run(words, env=changed, capture_output=True, text=True)
    return done.returncode, done.stdout


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A working directory with the recipe and its published records."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(RECIPE)
    assert main(["run", "mine.py", "--jobs", "1", "--stack", "2", "--numerics", "kernel=explicit"]) == 0
    assert main(["report", "mine.py", "--publish"]) == 0


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="there is no smaller instruction set")
def test_the_command_accepts_another_instruction_set(published):
    status, out = verify(PACKAGE.parent, ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41")
    assert status == 0 and out.count("the first training steps agree") == out.count("instruction set") == 2


def test_the_command_accepts_equal_runs_and_finds_an_error_in_the_package(published, capsys):
    records = read_records(Path("mine.jsonl"))
    assert {(record.kernel, record.stacked) for record in records} == {("explicit", 2), ("explicit", None)}
    capsys.readouterr()
    assert main(["verify", "mine.py", "--jobs", "1", "--seeds", "3"]) == 0
    out = capsys.readouterr().out
    assert out.count("identical to the record (weights and score)") == 6 and "verified: every run agrees" in out
    shutil.copytree(PACKAGE, "buggy/smallvit", ignore=shutil.ignore_patterns("__pycache__"))
    path = Path("buggy/smallvit/train/loop.py")
    update = "ema_update(self.ema_pairs, self.ema_weight)"
    text = path.read_text()
    assert text.count(update) == 1
    path.write_text(text.replace(update, "pass"))
    status, out = verify(Path("buggy").resolve())
    assert status == 1 and out.count("FAILED, the training differs: the averaged (EMA) weights") == 2 and "NOT verified" in out
