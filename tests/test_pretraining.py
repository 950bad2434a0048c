"""Learning without labels: which images a run sees, what starts from it, and how its features are probed and reported."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import TINY_VIT, slow_after

from smallvit import (
    DINO,
    MAE,
    Distill,
    Run,
    ablate,
    accuracy,
    arrays,
    augment,
    compare,
    digits,
    few_shot,
    fit,
    html,
    knn,
    linear_probe,
    markdown,
)
from smallvit.ablation import at_cell, with_dependencies
from smallvit.record import RANDOM, WEIGHTS, Record
from smallvit.report.provenance import no_better_than_random
from smallvit.report.tables import probe_tables

SMALL_DINO = partial(DINO, prototypes=16, hidden=16, bottleneck=8)
SHORT = Run(model=TINY_VIT, val=50, steps=6, batch=8, augment=augment.digits(), ema=0.0)
UNLABELLED = SHORT.vary(objective=SMALL_DINO, augment=augment.digit_crops(local=0), clip=0.0, unlabelled=True)
PROBED = SHORT.vary(init=UNLABELLED, steps=0, augment=(), evaluators=(knn, partial(few_shot, shots=2, draws=2)))
TOTAL = len(digits().train)


# Which images a run sees


def test_unlabelled_run_sees_all_images_but_those_for_validation(tmp_path):
    few, every = (fit(UNLABELLED.vary(labels=labels), tmp_path / str(labels)) for labels in (20, None))
    assert few.unlabelled == every.unlabelled == TOTAL - 50
    assert few.weights_sha256 != every.weights_sha256  # of the fingerprint in the file
    one, two = (load_file(tmp_path / str(labels) / WEIGHTS) for labels in (20, None))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert few.subset_sha256 != every.subset_sha256


@pytest.mark.parametrize(
    "run", slow_after(1, [UNLABELLED, UNLABELLED.vary(objective=partial(MAE, decoder_dim=16), augment=())]), ids=["DINO", "MAE"]
)
def test_run_without_labels_has_collapse_statistics_at_every_check(run, tmp_path):
    record = fit(run, tmp_path)
    assert record.finished and len(record.curve) == len(record.health) > 0


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"unlabelled": True}, ("unlabelled=True", "Supervised", "DINO", "MAE")),
        ({"objective": SMALL_DINO, "evaluators": (accuracy,)}, ("accuracy", "DINO", "knn")),
    ],
    ids=["supervised", "accuracy"],
)
def test_settings_that_need_labels_are_refused_without_labels(changes, words):
    with pytest.raises(ValueError) as raised:
        Run(**changes)
    assert all(word in str(raised.value) for word in words)


def test_probe_with_too_few_labels_is_refused_before_training(tmp_path):
    run = SHORT.vary(labels=20, evaluators=(accuracy, partial(few_shot, shots=16)))
    with pytest.raises(ValueError, match="expected at least shots=16 of each"):
        fit(run, tmp_path, watch=lambda *_: pytest.fail("it was trained"))
    assert not list(tmp_path.glob("*.pt"))


def test_student_on_unlabelled_images_learns_only_from_its_teacher(tmp_path, monkeypatch):
    """The last stage of SimCLR v2: the student sees all images without labels, and its loss is the distance to its teacher."""
    targets, forward = [], Distill.forward

    def recorded(self, batch, progress):
        targets.append(batch.targets)
        loss = forward(self, batch, progress)
        assert torch.equal(loss["loss"], self.distillation_loss(self.model(batch.images), self.teacher(batch.images)))
        return loss

    monkeypatch.setattr(Distill, "forward", recorded)
    teacher = SHORT.vary(labels=20, val=0)
    run = teacher.vary(unlabelled=True, objective=partial(Distill, weight=1.0), teacher=teacher)
    record = fit(run, tmp_path)
    assert record.unlabelled == TOTAL and record.pretraining["labels"] == 20
    assert record.score == "accuracy" and len(targets) == run.steps and not torch.stack(targets).any()


# Runs that start from it


def test_unlabelled_run_is_shared_by_all_numbers_of_labels():
    labelled = UNLABELLED.vary(unlabelled=False)
    arms = {"scratch": SHORT, "all": SHORT.vary(init=UNLABELLED), "frozen": PROBED, "same": SHORT.vary(init=labelled)}
    entries = ablate(arms, labels=[20, 40], seeds=range(3), references=False)
    added = with_dependencies(entries)[0][len(entries) :]
    assert len(entries) == 24 and len(added) == 3 + 2 * 3
    assert sorted(entry.labels or 0 for entry in added) == [0] * 3 + [20] * 3 + [40] * 3
    assert {entry.seed for entry in added} == {0, 1, 2}
    assert {entry.arm for entry in added} == {"initialization of all", "initialization of same"}


def test_teacher_of_an_unlabelled_run_has_the_labels_of_the_comparison():
    student = SHORT.vary(unlabelled=True, objective=partial(Distill, weight=1.0), teacher=SHORT)
    run = at_cell(SHORT.vary(init=student), 20, 0)
    assert run.init.teacher.labels == 20 and run.labels == 20


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory):
    """The folder of the finished run UNLABELLED, with which the runs of a comparison at 20 labels begin. Tests must not change
    it.
    """
    folder = tmp_path_factory.mktemp("unlabelled")
    fit(at_cell(PROBED, 20, 0).init, folder)
    return folder


def test_cost_of_unlabelled_pretraining_counts_images_and_no_labels(unlabelled, tmp_path):
    cost = fit(at_cell(SHORT.vary(init=UNLABELLED), 20, 0), tmp_path, init=unlabelled).pretraining
    assert cost["labels"] is None and cost["unlabelled"] == TOTAL - 50 and cost["images_seen"] == 48


def test_frozen_model_has_the_weights_of_pretraining(unlabelled, tmp_path):
    record = fit(at_cell(PROBED, 20, 0), tmp_path, init=unlabelled)
    loaded, expected = load_file(tmp_path / WEIGHTS), load_file(unlabelled / WEIGHTS)
    assert record.init_weights["loaded"] == len(loaded) and record.init_weights["missing"] == []
    assert all(torch.equal(loaded[name], expected[name]) for name in loaded)


@pytest.mark.slow
def test_data_set_with_other_classes_gets_a_new_head(tmp_path):
    generator = np.random.default_rng(0)
    images = {f"{part}_images": generator.integers(0, 255, (60, 8, 8), dtype=np.uint8) for part in ("train", "test")}
    labels = {f"{part}_labels": np.arange(60) % 3 for part in ("train", "test")}
    np.savez(tmp_path / "mine.npz", **images, **labels)
    mine = SHORT.vary(data=partial(arrays, path=str(tmp_path / "mine.npz")), val=10, init=UNLABELLED, augment=())
    record = fit(mine, tmp_path / "run")
    assert record.init_weights["missing"] == ["head.weight", "head.bias"]
    with pytest.raises(ValueError, match=r"do not fit: .*expected the same model"):
        fit(mine.vary(dim=8), tmp_path / "other")
    student = mine.vary(init=None, objective=Distill, teacher=SHORT.vary(labels=30))
    with pytest.raises(ValueError, match="was trained on other classes"):  # a new head of the teacher would teach noise
        fit(student, tmp_path / "student")


# Probes in a comparison


def probe_records(**scores) -> list[Record]:
    """Made-up records of probed arms: arm -> one number for each seed; 0.5 for every other arm."""
    arms = {"one": PROBED, "two": PROBED.vary(dim=8)}
    template = Record(
        recipe="r", arm="", role="technique", labels=20, seed=0, status="finished", fingerprint="f", run={}, score="knn_1",
        probes=["knn_1"], params=1, macs=1, images_seen=1, seconds=1.0,
    )  # fmt: skip
    return [
        replace(
            template, arm=entry.arm, role=entry.role, baseline=entry.baseline, seed=entry.seed,
            test={"knn_1": scores.get(entry.arm, [0.5] * 6)[entry.seed]},
        )
        for entry in ablate(arms, labels=[20], seeds=range(6))
    ]  # fmt: skip


def test_comparison_by_probes_has_an_untrained_model_as_reference():
    entries = {entry.arm: entry for entry in ablate({"frozen": PROBED}, labels=[20], seeds=[0])}
    untrained = entries[RANDOM]
    assert untrained.role == "reference" and untrained.run.steps == 0 and untrained.run.init is None
    assert untrained.run.evaluators == PROBED.evaluators
    assert [e.func for e in entries["pixels, logistic regression"].run.evaluators] == [linear_probe, few_shot]
    assert RANDOM not in {entry.arm for entry in ablate({"scratch": SHORT}, seeds=[0])}


def test_arm_that_is_no_better_than_an_untrained_model_is_warned_of():
    good, weak = [0.8, 0.81, 0.82, 0.8, 0.8, 0.81], [0.5, 0.4, 0.6, 0.5, 0.45, 0.55]
    assert no_better_than_random(probe_records(one=[0.9] * 6, two=good)) == []
    (warning,) = no_better_than_random(probe_records(one=[0.9] * 6, two=weak))
    assert warning.startswith("two at 20 labels, knn_1: not") and "untrained" in warning
    assert "+0.00 points" in warning and "95% interval from −" in warning


def test_every_probe_is_in_one_table_with_its_references():
    records = probe_records(one=[0.9] * 6)
    (table,) = probe_tables(compare(records), records)
    assert table.columns == ("knn_1",) and table.rows["one"] == [("90.00", [])]
    assert set(table.rows) == {"one", "two", RANDOM, "pixels, logistic regression", "pixels, nearest neighbor"}
    page = markdown(records, title="t", doc="d")
    assert "| one | 90.00 |" in page and "Probes" in page
    assert "Probes" in html(records, title="t", doc="d")
    assert compare(probe_records()).family == 1
