"""Reads of the test images: only the final scoring of a run reads them, or nothing does; a file counts the settings that did."""

import json
import multiprocessing
from functools import partial

import numpy as np
import pytest
from toys import TINY_VIT

from smallvit import MAE, ArmRun, Run, arrays, augment, digits, fit, knn, linear_probe, load, load_recipe
from smallvit.data import sealed_test_images
from smallvit.launch import launch
from smallvit.record import RECORD, read_record
from smallvit.train import fit_stacked
from smallvit.train.fit import Tags
from smallvit.train.loop import Training
from smallvit.train.read_log import log_test_read, scored_settings

SHORT = Run(model=TINY_VIT, labels=50, val=40, steps=6, batch=8, augment=augment.digits())


LEAKY = """
from smallvit import Run, ablate, accuracy, digits

def score(model, splits):
    yield from accuracy(model, splits._replace(test=digits().test.open()))  # also when it is to score validation images

def transform(batch, generator):
    return batch._replace(images=digits().test.open().pixels(slice(len(batch.images))))

RUNS = ablate({"scratch": Run(steps=10)}, labels=[50], seeds=[0], references=False)
"""


@pytest.mark.parametrize("validation_only", [True, False])
@pytest.mark.parametrize("leak", ["augment", "evaluators"])
def test_read_of_the_test_images_by_a_component_of_a_recipe_fails(leak, validation_only, tmp_path):
    (tmp_path / "leaky.py").write_text(LEAKY)
    recipe = load_recipe(tmp_path / "leaky.py")
    run = SHORT.vary(**{leak: ({"augment": recipe.transform, "evaluators": recipe.score}[leak],)})
    with pytest.raises(ValueError, match=r"test images are sealed: .*scored"):
        fit(run, tmp_path / "run", validation_only=validation_only)
    assert read_record(tmp_path / "run") is None


@pytest.mark.parametrize("stacked", [False, True])
def test_training_on_the_test_images_fails(stacked, tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "training_images", lambda self, data, teacher: data.test.open())
    with pytest.raises(ValueError, match="test images are sealed"):
        if stacked:
            fit_stacked([SHORT, SHORT.at_seed(1)], [tmp_path / "0", tmp_path / "1"], validation_only=True)
        else:
            fit(SHORT, tmp_path)


def test_test_images_can_be_read_again_after_a_run_and_after_its_failure(tmp_path):
    fit(SHORT, tmp_path / "1", validation_only=True)
    assert len(digits().test.open()) == 500
    with pytest.raises(ValueError):
        fit(SHORT.vary(heads=3), tmp_path / "2", validation_only=True)
    assert len(digits().test.open()) == 500
    with sealed_test_images("a reason"), pytest.raises(ValueError, match="sealed: a reason; use the training or validation"):
        digits().test.open()


# Runs that are scored on validation images only


def test_validation_only_run_is_the_same_training_without_test_results(tmp_path):
    reads = digits().test.reads
    validated = fit(SHORT, tmp_path / "validated", validation_only=True)
    assert digits().test.reads == reads
    assert (validated.test, validated.test_reads, validated.test_images, validated.test_repeats) == (None, 0, None, None)
    assert validated.finished and validated.score == "accuracy" and validated.val_images == 40
    scored = fit(SHORT, tmp_path / "scored")
    assert validated.val == scored.val and validated.val_result == scored.val_result == scored.val["accuracy"]
    assert validated.weights_sha256 == scored.weights_sha256 and validated.trace == scored.trace
    val, trained = digits().subset(labels=50, val=40, seed=0).val, load(tmp_path / "validated")
    assert validated.correct_bits.tolist() == (trained.predict_proba(val.images).argmax(1) == val.labels).tolist()
    assert len(scored.correct_bits) == 500
    with pytest.raises(ValueError, match="test has no 'accuracy'"):
        validated.result  # noqa: B018


def test_a_run_without_learning_curves_has_the_same_weights_and_score(tmp_path):
    """Trials of `smallvit tune` are scored once, at their end."""
    for run in (SHORT, SHORT.vary(early_stop=2)):
        (full,), (bare,) = (
            fit_stacked([run], [tmp_path / f"{run.early_stop} {curves}"], validation_only=True, curves=curves)
            for curves in (True, False)
        )
        assert bare.weights_sha256 == full.weights_sha256 and bare.val == full.val and bare.steps == full.steps
        scores = [point[2] for point in bare.curve]
        assert scores == ([point[2] for point in full.curve] if run.early_stop else [None] * len(full.curve))
        assert all(point[2] is not None for point in full.curve)


@pytest.mark.slow
def test_dependencies_of_a_validation_only_run_are_validation_only_too(tmp_path):
    reads = digits().test.reads
    tuned = SHORT.vary(init=SHORT, lr=5e-4)
    fit(tuned, tmp_path / "a", validation_only=True)
    stacked = fit_stacked([tuned, tuned.at_seed(1)], [tmp_path / "b", tmp_path / "c"], validation_only=True)
    assert digits().test.reads == reads and [r.test for r in stacked] == [None, None]
    for folder in "abc":
        earlier = read_record(tmp_path / folder / "init")
        assert earlier.finished and earlier.test is None and earlier.test_reads == 0
    with pytest.raises(ValueError, match="init holds this run scored on validation images, and it is now to be scored on test"):
        fit(tuned, tmp_path / "d", init=tmp_path / "a" / "init")


@pytest.mark.parametrize("first", [True, False])
def test_run_that_was_scored_on_other_images_is_refused(first, tmp_path):
    fit(SHORT, tmp_path, validation_only=first)
    before = (tmp_path / RECORD).read_bytes()
    assert fit(SHORT, tmp_path, validation_only=first, watch=lambda *_: pytest.fail("it was trained again")).finished
    kinds = ("validation", "test") if first else ("test", "validation")
    with pytest.raises(ValueError, match="scored on {} images, and .* scored on {} images; use another folder".format(*kinds)):
        fit(SHORT, tmp_path, validation_only=not first)
    with pytest.raises(ValueError, match="use another folder"):
        fit_stacked([SHORT, SHORT.at_seed(1)], [tmp_path, tmp_path / "1"], validation_only=not first)
    assert (tmp_path / RECORD).read_bytes() == before


def test_validation_only_run_needs_validation_images(tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "train_step", lambda self: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match=r"val=0 leaves no validation images .*set val > 0"):
        fit(SHORT.vary(val=0), tmp_path, validation_only=True)


def all_images_train(tmp_path, **changes) -> Run:
    """A run on 12 random images, none of which are test or validation images."""
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", images=rng.integers(0, 256, (12, 8, 8), np.uint8), labels=np.arange(12) % 2)
    data = partial(arrays, path=str(tmp_path / "own.npz"), test=0.0)
    return Run(**{"data": data, "model": TINY_VIT, "val": 0, "steps": 4, "batch": 4} | changes)


def test_run_without_test_and_validation_images_trains_on_everything(tmp_path):
    run = all_images_train(tmp_path)
    for options in ({"seed": 0}, {"init": run.vary(objective=partial(MAE, decoder_dim=16))}, {"ema": 0.0, "evaluators": (knn, linear_probe)}):
        place = tmp_path / next(iter(options))
        record = fit(run.vary(**options), place, validation_only=True)
        assert record.finished and (record.score, record.val, record.test, record.images_seen) == (None, {}, None, 16)
        assert record == fit(run.vary(**options), place, validation_only=True) == read_record(place)
        model = load(place)
        assert model.predict_proba(run.data().train.images).shape == (12, 2)
    scored = fit(run.vary(val=4), tmp_path / "scored", validation_only=True)
    assert scored.score == "accuracy" and scored.val_images == 4 and 0 <= scored.val_result <= 1


def test_run_cannot_be_scored_without_test_images(tmp_path, monkeypatch):
    run = all_images_train(tmp_path)
    fit(run, tmp_path / "finished", validation_only=True)
    before = (tmp_path / "finished" / RECORD).read_bytes()
    monkeypatch.setattr(Training, "train_step", lambda self: pytest.fail("it was trained"))
    words = r"own.npz has no test images \(test=0.0\), so no run can be scored on them; set test=0.2 or folds=5, or .*validation_only"
    with pytest.raises(ValueError, match=words):
        fit(run, tmp_path / "new")
    with pytest.raises(ValueError, match="scored on validation images, and it is now to be scored on test images"):
        fit(run, tmp_path / "finished")
    with pytest.raises(ValueError, match=words):
        launch([ArmRun(run=run.at_seed(seed), arm="a") for seed in range(2)], tmp_path / "out", recipe="t", jobs=1)
    with pytest.raises(ValueError, match="early_stop=2 needs validation images"):
        fit(run.vary(early_stop=2), tmp_path / "stop", validation_only=True)
    assert (tmp_path / "finished" / RECORD).read_bytes() == before and not list((tmp_path / "out").rglob(RECORD))


def test_one_group_for_each_class_leaves_no_validation_images_and_the_error_says_so(tmp_path):
    labels = np.arange(40) % 2
    np.savez(tmp_path / "own.npz", images=np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8), labels=labels, groups=labels)
    run = SHORT.vary(data=partial(arrays, path=str(tmp_path / "own.npz"), test=0.0), labels=None, val=5, early_stop=2)
    words = "early_stop=2 needs validation images, and val=5 leaves none; set val > 0, with training images of at least 2 groups .without groups, 2 images. in each class"
    with pytest.raises(ValueError, match=words):
        fit(run, tmp_path / "run", validation_only=True)


def test_probes_of_a_validation_only_run_are_recorded(tmp_path):
    record = fit(SHORT.vary(steps=0, evaluators=(linear_probe, knn)), tmp_path, validation_only=True)
    assert record.probes[:2] == ["linear_probe", "knn_1"] and record.chosen_on_val["labels"] == 40
    assert record.correct_bits.mean() == pytest.approx(record.val_result)


# The file of all reads


@pytest.mark.slow
def test_settings_of_an_arm_are_counted_over_all_runs_on_these_test_images(tmp_path):
    reads = tmp_path / "out" / "test_reads.jsonl"

    def settings(arm="a", **changes):
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        return fit(SHORT.vary(**changes), place, tags=Tags(arm=arm), reads=reads).test_settings

    assert settings() == 1
    assert settings(seed=1) == settings(labels=60) == 1, "another seed and more labels are no other settings"
    assert settings(lr=2e-3) == 2 and settings(arm="b", lr=2e-3) == 1
    assert settings(lr=2e-3, seed=4) == 2 and settings(steps=7) == 3
    assert settings(init=SHORT.vary(seed=3)) == 4 and settings(init=SHORT.vary(seed=4, labels=20), seed=4) == 4
    lines = [json.loads(line) for line in reads.read_text().splitlines()]
    assert len(lines) == 11 and {line["data"] for line in lines} == {digits().test.sha256}, "9 runs, 2 of which train another"
    assert lines[2]["labels"] == 60 and [line["seed"] for line in lines[:2]] == [0, 1]
    assert {line["arm"] for line in lines} == {"a", "b", "init of a"}


def test_settings_of_arms_that_share_a_run_are_counted_apart_and_those_of_a_renamed_arm_together():
    reads = [
        {"data": "a", "fingerprint": run, "arm": arm, "settings": settings}
        for run, arm, settings in (("1", "short", "S"), ("2", "short", "M"), ("3", "long", "L"), ("4", "old", "O"))
    ]
    shared = [("1", "short"), ("2", "short"), ("2", "long"), ("3", "long")]
    assert scored_settings(reads, shared) == [2, 2, 2, 1]
    assert scored_settings([*reads, reads[0] | {"fingerprint": "5", "settings": "N"}], [("4", "short")]) == [4]


def test_home_folder_in_the_paths_of_fit_and_fit_stacked(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    earlier = SHORT.vary(steps=1)
    fit(earlier, "~/earlier")
    record = fit(SHORT.vary(init=earlier, steps=1), "~/run", init="~/earlier", reads="~/reads.jsonl")
    assert fit(SHORT.vary(init=earlier, steps=1), tmp_path / "run") == record and record.test_settings == 1
    again = [SHORT.vary(init=earlier, steps=1, seed=seed) for seed in (1, 2)]
    fit_stacked(again, ["~/1", "~/2"], dependencies=[{"init": "~/earlier"}] * 2, reads="~/reads.jsonl")
    folders = {"earlier", "run", "1", "2"}
    assert {path.name for path in tmp_path.iterdir()} == folders | {"reads.jsonl", ".reads.jsonl.lock"}


def test_without_the_file_and_without_a_read_nothing_is_counted(tmp_path):
    assert fit(SHORT, tmp_path / "1").test_settings is None
    assert fit(SHORT, tmp_path / "2", validation_only=True, reads=tmp_path / "reads.jsonl").test_settings is None
    assert not (tmp_path / "reads.jsonl").exists()
    stacked = fit_stacked([SHORT, SHORT.at_seed(1)], [tmp_path / "3", tmp_path / "4"], reads=tmp_path / "reads.jsonl")
    assert [record.test_settings for record in stacked] == [1, 1]
    assert len((tmp_path / "reads.jsonl").read_text().splitlines()) == 2
    fit(SHORT, tmp_path / "3", reads=tmp_path / "reads.jsonl")  # it has finished, and reads nothing
    assert len((tmp_path / "reads.jsonl").read_text().splitlines()) == 2


def log_many(path, worker):
    for seed in range(20):
        log_test_read(path, SHORT.vary(seed=seed, lr=1e-3 * (worker + 1)), "a", "ab")


def test_several_processes_lose_no_read(tmp_path):
    path = tmp_path / "reads.jsonl"
    workers = [multiprocessing.get_context("fork").Process(target=log_many, args=(path, worker)) for worker in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(path.read_text().splitlines()) == 60
    assert log_test_read(path, SHORT, "a", "ab") == 3 and log_test_read(path, SHORT, "a", "other images") == 1


@pytest.mark.parametrize("line", ['{"data": "ab", "arm"', "3", '{"data": "ab"}'])
def test_damaged_file_of_reads_is_refused_by_line_and_kept(line, tmp_path):
    path = tmp_path / "reads.jsonl"
    log_test_read(path, SHORT, "a", "ab")
    path.write_text(path.read_text() + line + "\n")
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"reads\.jsonl, line 2 is damaged"):
        log_test_read(path, SHORT, "a", "ab")
    assert path.read_bytes() == before


# The share of the training images that a seed draws


def test_drawn_share_is_the_largest_of_a_class(tmp_path):
    train = digits().train
    record = fit(SHORT.vary(labels=95), tmp_path / "95")
    subset = digits().subset(labels=95, val=40, seed=0)
    shares = [(subset.train.labels == k).sum().item() / (train.labels == k).sum().item() for k in range(10)]
    assert record.drawn_share == pytest.approx(max(shares)) and max(shares) > min(shares)
    assert fit(SHORT.vary(labels=None), tmp_path / "all").drawn_share == 1.0


def test_number_of_test_images_is_known_without_a_read():
    reads = digits().test.reads
    assert digits().test.count == 500 and digits().test.reads == reads
