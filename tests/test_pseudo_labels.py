"""Pseudo-labels: label spreading against the equation of the paper, and runs that train on pseudo-labels."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import TINY_VIT, tiny_vit

from smallvit import (
    DINO,
    DeepEnsemble,
    Distill,
    EachMember,
    Pixels,
    Run,
    Splits,
    ablate,
    arrays,
    augment,
    data,
    digits,
    knn,
    label_spreading,
)
from smallvit.data import Images
from smallvit.launch.plan import plan
from smallvit.record import WEIGHTS
from smallvit.train import fit, load, loop

PIXELS = Pixels((1, 2), 1, 3)  # its features are the pixels


def points_as_images(points, labels=None) -> Images:
    """Images of 1 x 2 pixels whose two pixels are the coordinates of a point; without labels, all labels are 0."""
    labels = torch.as_tensor([0] * len(points) if labels is None else labels)
    spec = data.DataSpec(name="points", channels=1, size=(1, 2), classes=("a", "b", "c"), mean=(0.0,), std=(1.0,))
    return Images(torch.as_tensor(np.array(points)).round().to(torch.uint8).view(-1, 1, 1, 2), labels, spec)


def random_images(n: int, seed: int, labels=None) -> Images:
    return points_as_images(np.random.default_rng(seed).integers(1, 256, (n, 2)), labels)


def arc(start: float, end: float, n: int) -> list[np.ndarray]:
    """`n` points on a circle of radius 250, between two angles."""
    return [250 * np.array([np.cos(a), np.sin(a)]) for a in np.linspace(start, end, n)]


def scores_of_the_paper(labelled: Images, unlabelled: Images, neighbors: int, alpha: float) -> np.ndarray:
    """F* = (1 - alpha)(I - alpha S)^-1 Y (Zhou et al., equation 3), S = D^-1/2 W D^-1/2, W by a loop over all pairs."""
    x = np.concatenate([part.images.numpy().reshape(-1, 2).astype(float) for part in (labelled, unlabelled)])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    n, w = len(x), np.zeros((len(x), len(x)))
    for i in range(n):
        for j in sorted((j for j in range(n) if j != i), key=lambda j: np.linalg.norm(x[i] - x[j]))[:neighbors]:
            w[i, j] = w[j, i] = 1
    root = np.diag(w.sum(0) ** -0.5)
    y = np.zeros((n, 3))
    y[range(len(labelled)), labelled.labels] = 1
    return (1 - alpha) * np.linalg.solve(np.eye(n) - alpha * root @ w @ root, y)


@pytest.mark.parametrize(("neighbors", "alpha"), [(1, 0.9), (3, 0.5), (5, 0.99)])
def test_labels_equal_the_closed_form_of_the_paper(neighbors, alpha):
    labelled, unlabelled = random_images(9, 0, [0, 1, 2] * 3), random_images(40, 1)
    f = scores_of_the_paper(labelled, unlabelled, neighbors, alpha)
    unique = (f.max(1) > np.sort(f, 1)[:, -2] + 1e-9)[9:]  # with one neighbor, no label reaches some images
    result = label_spreading(PIXELS, labelled, unlabelled, neighbors=neighbors, alpha=alpha, steps=3_000).numpy()
    assert unique.sum() >= 15 and (result == f.argmax(1)[9:])[unique].all()


def test_labels_follow_a_chain_of_neighbors_even_where_another_class_is_nearer():
    chain, others = arc(0, 1, 40), arc(1.3, 1.5, 9)
    labelled = points_as_images([chain[0], others[4]], [0, 1])
    unlabelled = points_as_images([*chain[1:], *others[:4], *others[5:]])
    result = label_spreading(PIXELS, labelled, unlabelled, neighbors=2, steps=1_000)
    assert result.tolist() == [0] * 39 + [1] * 8  # the end of the chain is nearer to the other labelled image


def test_image_that_no_label_reaches_gets_the_label_of_the_nearest_labelled_image():
    first, second, unreachable = arc(0.2, 0.25, 4), arc(0.6, 0.65, 4), arc(1.4, 1.45, 6)
    labelled = points_as_images([first[0], second[0]], [0, 1])
    unlabelled = points_as_images([*first[1:], *second[1:], *unreachable])
    assert label_spreading(PIXELS, labelled, unlabelled, neighbors=2).tolist() == [0] * 3 + [1] * 9


def test_on_digits_label_spreading_is_better_than_the_nearest_labelled_image():
    labelled, unlabelled = digits().subset(labels=50, val=0, seed=0).train, digits().train
    spread = label_spreading(PIXELS, labelled, unlabelled)
    nearest = next(knn(PIXELS, Splits(labelled, labelled, unlabelled)))[1]
    assert (spread == unlabelled.labels).double().mean() > nearest + 0.05


def test_stored_labels_of_unlabelled_images_are_not_used_and_labelled_images_keep_theirs():
    labelled, unlabelled = digits().subset(labels=50, val=50, seed=0).train, digits().train.take(slice(300))
    model = tiny_vit((8, 8), 1, 10, depth=1)
    first, second = (
        label_spreading(model, labelled, images) for images in (unlabelled, replace(unlabelled, labels=unlabelled.labels.flip(0)))
    )
    assert torch.equal(first, second) and first.dtype == torch.int64 and len(first.unique()) > 3
    assert torch.equal(label_spreading(model, labelled, labelled, neighbors=1, alpha=0.01), labelled.labels)


def test_balanced_scores_of_the_classes_are_in_proportion_to_the_labelled_images():
    """Rows of F with sum 1, then one factor for each class. Unequal classes move the border between them."""
    labelled, unlabelled = random_images(9, 0, [0, 0, 0, 0, 0, 1, 1, 2, 2]), random_images(60, 1)
    plain = label_spreading(PIXELS, labelled, unlabelled, neighbors=4, alpha=0.9, steps=3_000).numpy()
    balanced = label_spreading(PIXELS, labelled, unlabelled, neighbors=4, alpha=0.9, steps=3_000, balanced=True).numpy()
    f = scores_of_the_paper(labelled, unlabelled, 4, 0.9)
    f /= f.sum(1, keepdims=True)
    factors = np.array([5, 2, 2]) / f.sum(0)
    assert (f * factors).sum(0) == pytest.approx([5, 2, 2])
    assert plain.tolist() == f.argmax(1)[9:].tolist()
    assert balanced.tolist() == (f * factors).argmax(1)[9:].tolist() != plain.tolist()


def test_balanced_labels_keep_images_that_no_label_reaches_and_classes_without_labels():
    first, second, unreachable = arc(0.2, 0.25, 4), arc(0.6, 0.65, 4), arc(1.4, 1.45, 6)
    labelled = points_as_images([first[0], second[0]], [0, 2])
    unlabelled = points_as_images([*first[1:], *second[1:], *unreachable])
    assert label_spreading(PIXELS, labelled, unlabelled, neighbors=2, balanced=True).tolist() == [0] * 3 + [2] * 9


@pytest.mark.parametrize(
    "options", [{"neighbors": 0}, {"neighbors": 49}, {"alpha": 1.0}, {"alpha": 0.0}, {"steps": 0}, {"balanced": 1}]
)
def test_out_of_range_options_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        label_spreading(PIXELS, random_images(9, 0, [0, 1, 2] * 3), random_images(40, 1), **options)


# In a run

SHORT = Run(model=partial(TINY_VIT, depth=1), labels=50, val=100, steps=12, batch=8, augment=augment.digits())
PRETRAINED = SHORT.vary(
    objective=partial(DINO, prototypes=16, hidden=16, bottleneck=8),
    augment=augment.digit_crops(local=0),
    unlabelled=True,
    clip=0.0,
    ema=0.0,
)
PSEUDO = SHORT.vary(init=PRETRAINED, unlabelled=True, pseudo_labels=partial(label_spreading, neighbors=5))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The folder of the finished run PRETRAINED. Tests must not change it."""
    folder = tmp_path_factory.mktemp("pretrained")
    fit(PRETRAINED, folder)
    return folder


def test_run_trains_on_pseudo_labels_of_all_images_and_never_sees_their_true_labels(pretrained, tmp_path, monkeypatch):
    calls, training = [], {}

    def from_pixels(model, labelled, unlabelled, **options):
        calls.append((len(labelled), len(unlabelled), unlabelled.labels.unique().tolist()))
        return (unlabelled.images.sum((1, 2, 3)) % 10).long()

    monkeypatch.setattr("smallvit.pseudo_labels.label_spreading", from_pixels)
    from_pixels.__module__, from_pixels.__qualname__ = "smallvit.pseudo_labels", "label_spreading"
    next_batch = loop.Training.next_batch

    def observe(self):
        batch = next_batch(self)
        if self.run.pseudo_labels:
            training["images"] = self.images
            assert (batch.targets.sum(1) == 1).all()
        return batch

    monkeypatch.setattr(loop.Training, "next_batch", observe)
    record = fit(SHORT.vary(init=PRETRAINED, unlabelled=True, pseudo_labels=from_pixels), tmp_path, init=pretrained)
    total = len(digits().train) - 100
    assert calls == [(50, total, [0])] and record.unlabelled == total and record.labels == 50
    assert torch.equal(training["images"].labels, (training["images"].images.sum((1, 2, 3)) % 10).long())


def test_without_init_the_teacher_guesses_the_labels_that_another_model_learns(pretrained, tmp_path):
    run = SHORT.vary(teacher=PRETRAINED, unlabelled=True, pseudo_labels=partial(label_spreading, neighbors=5), depth=2)
    record = fit(run, tmp_path, teacher=pretrained)
    data = digits().subset(labels=50, val=100, seed=0)
    images = digits().subset(labels=None, val=100, seed=0).train
    training = loop.Training(run, digits(), data, "cpu", teacher=pretrained)
    guessed = label_spreading(load(pretrained).model, data.train, images, neighbors=5)
    assert torch.equal(training.images.labels, guessed) and record.unlabelled == len(images) and record.labels == 50
    assert len(load(tmp_path).model.blocks) == 2
    with pytest.raises(ValueError, match="the run has a teacher and Supervised takes none"):
        run.vary(init=SHORT.vary(depth=2))  # then the model of `init` guesses the labels


@pytest.mark.parametrize("field", ["teacher", "init"])
@pytest.mark.parametrize("ensemble", [False, True], ids=["one model", "ensemble"])
def test_the_head_of_a_model_that_learned_no_labels_may_have_other_classes(field, ensemble, tmp_path):
    model = partial(DeepEnsemble, of=TINY_VIT, count=2) if ensemble else TINY_VIT
    pixels, labels = digits().train.images[:, 0].numpy(), digits().train.labels.numpy()
    for name, classes in (("two", 2), ("ten", 10)):
        np.savez(tmp_path / f"{name}.npz", images=pixels[:200], labels=labels[:200] % classes)
    two, ten = (partial(arrays, path=str(tmp_path / f"{name}.npz"), test=0.2) for name in ("two", "ten"))
    objective = partial(DINO, prototypes=16, hidden=16, bottleneck=8)
    pretrained = PRETRAINED.vary(
        data=two, model=model, objective=partial(EachMember, of=objective) if ensemble else objective, labels=None, val=20
    )
    run = SHORT.vary(
        data=ten, model=model, labels=50, val=20, unlabelled=True, pseudo_labels=label_spreading, **{field: pretrained}
    )
    assert fit(run, tmp_path / "run", validation_only=True).finished


def test_a_teacher_of_a_distilled_run_guesses_the_labels_too(pretrained, tmp_path):
    teacher = SHORT.vary(init=PRETRAINED)
    run = SHORT.vary(
        teacher=teacher, objective=partial(Distill, weight=0.5), unlabelled=True,
        pseudo_labels=partial(label_spreading, neighbors=5),
    )  # fmt: skip
    assert fit(run, tmp_path).finished
    with pytest.raises(ValueError, match="the teacher has a head that learned from no labels"):
        run.vary(teacher=PRETRAINED)


@pytest.mark.slow
def test_resumed_run_ends_with_equal_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    fit(PSEUDO, tmp_path / "complete")
    train_step, steps = loop.Training.train_step, []

    def stop_after_five_steps(self):
        if self.run.pseudo_labels and len(steps) == 5:
            raise KeyboardInterrupt
        train_step(self)
        steps.extend([1] * bool(self.run.pseudo_labels))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Training, "train_step", stop_after_five_steps)
        fit(PSEUDO, tmp_path / "resumed")
    fit(PSEUDO, tmp_path / "resumed")
    complete, resumed = (load_file(tmp_path / name / WEIGHTS) for name in ("complete", "resumed"))
    assert all(torch.equal(complete[name], resumed[name]) for name in complete)


def test_dependency_with_pseudo_labels_uses_as_many_labels_as_the_run_that_needs_it():
    pseudo = replace(PSEUDO, labels=None, init=replace(PRETRAINED, labels=None))
    plain = replace(SHORT, labels=None)
    arms = {"base": plain, "tuned": plain.vary(init=pseudo), "distilled": plain.vary(objective=Distill, teacher=pseudo)}
    entries = ablate(arms, labels=[20, 40], seeds=[0], references=False)
    needed = {(entry.arm, entry.labels): entry.run.init or entry.run.teacher for entry in entries if entry.arm != "base"}
    assert {key: run.labels for key, run in needed.items()} == {key: key[1] for key in needed} and len(needed) == 4
    assert all(run.init.labels is None for run in needed.values()), "pretraining without labels is shared"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda labels: labels[1:], r"returned torch.int64 \(1196,\); expected an int64 tensor with one label for each of 1197 images"),
        (lambda labels: labels.float(), r"returned torch.float32 \(1197,\)"),
        (lambda labels: labels.tolist(), "returned list"),
        (lambda labels: labels + 10, "expected labels from 0 to 9, got"),
    ],
    ids=["one too few", "float", "list", "no class"],
)
def test_wrong_pseudo_labels_are_refused(made, message, pretrained, tmp_path, monkeypatch):
    def wrong(model, labelled, unlabelled):
        return made(torch.zeros(len(unlabelled), dtype=torch.int64))

    wrong.__module__, wrong.__qualname__ = "smallvit.pseudo_labels", "label_spreading"
    monkeypatch.setattr("smallvit.pseudo_labels.label_spreading", wrong)
    with pytest.raises(ValueError, match=message):
        fit(SHORT.vary(init=PRETRAINED, unlabelled=True, pseudo_labels=wrong), tmp_path, init=pretrained)


@pytest.mark.parametrize(
    "changes",
    [
        {"unlabelled": False},
        {"init": None},
        {"steps": 0},
        {"objective": partial(DINO, prototypes=16), "augment": augment.digit_crops()},
        {"pseudo_labels": "spread"},
        {"pseudo_labels": None},
    ],
)
def test_impossible_combinations_are_refused(changes):
    with pytest.raises(ValueError, match=r"expected|take|pseudo_labels"):
        PSEUDO.vary(**changes)


@pytest.mark.slow
def test_pseudo_labels_are_an_arm_of_a_comparison():
    entries = ablate({"scratch": SHORT, "pseudo": PSEUDO}, labels=[50], seeds=range(2))
    text = plan(entries, 1, "cpu")
    assert "pseudo_labels: None -> label_spreading(" in text and "pseudo: 2 runs of 12 steps" in text
    assert all(entry.run.pseudo_labels is None for entry in entries if entry.arm != "pseudo")
