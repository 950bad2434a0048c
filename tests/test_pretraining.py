"""Learning before labels, in runs: what is seen without labels, what is started from it, how it is probed and what that costs."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smallvit import (
    DINO,
    MAE,
    Distill,
    PatchEmbed,
    Run,
    Splits,
    ViT,
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
    load,
    markdown,
)
from smallvit.ablation import placed
from smallvit.launch.scheduler import with_dependencies
from smallvit.record import RANDOM, WEIGHTS
from smallvit.report.probes import no_better_than_random, probed

TINY = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2)
HEAD = partial(DINO, prototypes=16, hidden=16, bottleneck=8)
SHORT = Run(model=TINY, val=50, steps=6, batch=8, augment=augment.digits(), ema=0.0)
VIEWS = SHORT.vary(objective=HEAD, augment=augment.digit_crops(local=0), clip=0.0, unlabelled=True)
FROZEN = SHORT.vary(init=VIEWS, steps=0, augment=(), evaluators=(knn, partial(few_shot, shots=2, draws=2)))


# What a run sees


def test_unlabelled_means_all_images_but_those_of_validation_whatever_the_labels(tmp_path):
    seen = {labels: fit(VIEWS.vary(labels=labels), tmp_path / str(labels)) for labels in (20, None)}
    total = len(digits().train)
    assert {record["unlabelled"] for record in seen.values()} == {total - 50}
    few, many = (load_file(tmp_path / str(labels) / WEIGHTS) for labels in seen)
    assert all(torch.equal(few[name], many[name]) for name in few)
    assert seen[20]["subset_sha256"] != seen[None]["subset_sha256"]


def test_labels_that_an_objective_does_not_read_change_nothing(tmp_path):
    from smallvit.train import fit as train

    mae = VIEWS.vary(arm="mae", objective=partial(MAE, decoder_dim=16), augment=())
    records = [train(run, tmp_path / run.arm) for run in (VIEWS, mae)]
    assert all(record["status"] == "finished" for record in records)
    assert all(len(record["curve"]) == len(record["health"]) > 0 for record in records)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"unlabelled": True}, "Supervised reads labels; take DINO or MAE"),
        ({"objective": HEAD, "evaluators": (accuracy,)}, "a head that DINO does not train"),
        ({"unlabelled": 1}, "unlabelled is 1; expected True or False"),
    ],
    ids=["supervised", "accuracy", "number"],
)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Run(**changes)


def test_a_probe_that_has_too_few_labels_is_refused_before_anything_is_trained(tmp_path):
    run = SHORT.vary(labels=20, evaluators=(accuracy, partial(few_shot, shots=16)))
    with pytest.raises(ValueError, match="expected at least shots=16 of each class"):
        fit(run, tmp_path)
    assert not list(tmp_path.glob("*.pt"))


def test_a_teacher_alone_is_heard_on_images_without_labels(tmp_path, monkeypatch):
    """The last stage of SimCLR v2: the student sees all images and no label, and what it learns is what its teacher says."""
    shown, forward = [], Distill.forward

    def watched(self, batch, progress):
        shown.append(batch.targets)
        loss = forward(self, batch, progress)
        assert torch.equal(loss["loss"], self.gap(self.model(batch.images), self.teacher(batch.images)))
        return loss

    monkeypatch.setattr(Distill, "forward", watched)
    teacher = SHORT.vary(labels=20, val=0)
    run = teacher.vary(unlabelled=True, objective=partial(Distill, weight=1.0), teacher=teacher)
    record = fit(run, tmp_path)
    assert record["unlabelled"] == len(digits().train) and record["pretraining"]["labels"] == 20
    assert record["score"] == "accuracy" and len(shown) == run.steps and not torch.stack(shown).any()


# Starting from it


def test_all_images_are_seen_once_and_the_same_images_once_for_each_number_of_labels():
    same = VIEWS.vary(unlabelled=False)
    arms = {"scratch": SHORT, "all": SHORT.vary(init=VIEWS), "frozen": FROZEN, "same": SHORT.vary(init=same)}
    runs = ablate(arms, labels=[20, 40], seeds=range(3), references=False)
    starts = with_dependencies(runs)[0][len(runs) :]
    assert len(runs) == 24 and len(starts) == 3 + 2 * 3
    assert sorted(run.labels or 0 for run in starts) == [0] * 3 + [20] * 3 + [40] * 3
    assert {run.seed for run in starts} == {0, 1, 2} and {run.arm for run in starts} == {"start of all", "start of same"}


def test_what_is_taught_on_all_images_has_a_teacher_of_as_many_labels():
    taught = SHORT.vary(unlabelled=True, objective=partial(Distill, weight=1.0), teacher=SHORT)
    run = placed(SHORT.vary(init=taught), 20, 0)
    assert run.init.teacher.labels == 20 and run.labels == 20


def test_the_budget_counts_what_was_seen_and_no_label(tmp_path):
    record = fit(placed(SHORT.vary(init=VIEWS), 20, 0), tmp_path)
    cost = record["pretraining"]
    assert cost["labels"] is None and cost["unlabelled"] == len(digits().train) - 50 and cost["images_seen"] == 48


def test_only_the_head_that_nothing_trained_is_new(tmp_path):
    record = fit(placed(FROZEN, 40, 0), tmp_path)
    ours, theirs = load_file(tmp_path / WEIGHTS), load_file(tmp_path / "init" / WEIGHTS)
    assert record["weights"]["loaded"] == len(ours) and record["weights"]["missing"] == []
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_data_set_with_other_classes_starts_with_its_own_head(tmp_path):
    generator = np.random.default_rng(0)
    images = {f"{part}_images": generator.integers(0, 255, (60, 8, 8), dtype=np.uint8) for part in ("train", "test")}
    labels = {f"{part}_labels": np.arange(60) % 3 for part in ("train", "test")}
    np.savez(tmp_path / "mine.npz", **images, **labels)
    mine = SHORT.vary(data=partial(arrays, path=str(tmp_path / "mine.npz")), val=10, init=VIEWS, augment=())
    record = fit(mine, tmp_path / "run")
    assert record["weights"]["missing"] == ["head.weight", "head.bias"]
    with pytest.raises(ValueError, match=r"do not fit: .*expected the same model"):
        fit(mine.vary(dim=8), tmp_path / "other")
    pupil = mine.vary(init=None, objective=Distill, teacher=SHORT.vary(labels=30))
    with pytest.raises(ValueError, match="was trained on other classes"):  # a head that is new here would teach noise
        fit(pupil, tmp_path / "pupil")


# Probes in a recipe


def records(**scores) -> list[dict]:
    """Records of made-up probes: arm -> one number for each seed."""
    runs = ablate({"one": FROZEN, "two": FROZEN.vary(dim=8)}, labels=[20], seeds=range(6))
    out = []
    for run in runs:
        value = scores.get(run.arm.split()[0], [0.5] * 6)[run.seed]
        blank = {"recipe": "r", "arm": run.arm, "role": run.role, "baseline": run.baseline, "labels": 20, "seed": run.seed}
        blank |= {"status": "finished", "fingerprint": "f", "run": {}, "score": "knn_1", "test": {"knn_1": value}}
        out.append(blank | {"params": 1, "macs": 1, "images_seen": 1, "seconds": 1.0})
    return out


def test_a_probed_recipe_has_its_random_weights_as_a_floor():
    runs = {run.arm: run for run in ablate({"frozen": FROZEN}, labels=[20], seeds=[0])}
    reference = runs[RANDOM]
    assert reference.role == "reference" and reference.steps == 0 and reference.init is None and reference.evaluators == FROZEN.evaluators
    assert [e.func for e in runs["pixels, logistic regression"].evaluators] == [linear_probe, few_shot]
    assert RANDOM not in {run.arm for run in ablate({"scratch": SHORT}, seeds=[0])}


def test_an_arm_no_better_than_random_is_said_to_be():
    weak = [0.5, 0.4, 0.6, 0.5, 0.45, 0.55]
    assert no_better_than_random(records(one=[0.9] * 6, two=[0.8, 0.81, 0.82, 0.8, 0.8, 0.81])) == []
    (said,) = no_better_than_random(records(one=[0.9] * 6, two=weak))
    assert said.startswith("two at 20 labels, knn_1: not better than random initialisation (+0.00 points, 95% interval from −")


def test_every_probe_stands_in_one_table_with_its_anchors():
    (table,) = probed(records(one=[0.9] * 6))
    assert table.names == ("knn_1",) and table.rows["one"] == (pytest.approx(0.9),)
    assert set(table.rows) == {"one", "two", RANDOM, "pixels, logistic regression", "pixels, nearest neighbour"}
    page = markdown(records(one=[0.9] * 6), title="t", doc="d")
    assert "## Probes at 20 labels" in page and "| one | 90.00 |" in page
    assert "<h3>Probes</h3>" in html(records(one=[0.9] * 6), title="t", doc="d")
    assert compare(records()).family == 1


# Taking a finished run up again


def test_load_gives_the_run_and_the_model_that_was_evaluated(tmp_path):
    record = fit(SHORT.vary(arm="mine", labels=40), tmp_path)
    run, model = load(tmp_path)
    assert run == SHORT.vary(labels=40) and run.arm == "mine" and not model.training
    data = run.data()
    unseen = data.test.open()
    assert dict(accuracy(model, Splits(unseen, unseen, unseen))) == record["test"]


def test_load_says_where_nothing_has_finished(tmp_path):
    with pytest.raises(ValueError, match="no run has finished in"):
        load(tmp_path)
    fit(SHORT.vary(labels=40), tmp_path)
    other = fit(replace(SHORT, labels=40, seed=1), tmp_path / "other")
    assert other["seed"] == 1
    (tmp_path / "other" / WEIGHTS).replace(tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match="whose weights are asked for"):
        load(tmp_path)
