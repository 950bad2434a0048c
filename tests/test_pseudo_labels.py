"""Pseudo-labels: labels spread over the graph of neighbours as the paper's equation says, and a run that learns them reads no others."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from smallvit import DINO, Distill, PatchEmbed, Pixels, Run, Splits, ViT, ablate, augment, data, digits, knn, label_spreading
from smallvit.data import Images
from smallvit.launch.plan import plan
from smallvit.record import WEIGHTS
from smallvit.train import fit
from smallvit.train import loop as trainings

PIXELS = Pixels((1, 2), 1, 3)  # whose features are those of any image


def images(points, labels) -> Images:
    """Points of the plane as images of 1 x 2 pixels."""
    labels = torch.as_tensor(labels)
    spec = data.DataSpec(name="t", channels=1, size=(1, 2), classes=("a", "b", "c"), mean=(0.0,), std=(1.0,))
    return Images(torch.as_tensor(np.array(points)).round().to(torch.uint8).view(-1, 1, 1, 2), labels, spec)


def scattered(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, (n, 2))


@pytest.mark.parametrize(("neighbours", "alpha"), [(1, 0.9), (3, 0.5), (5, 0.99)])
def test_labels_are_the_papers(neighbours, alpha):
    """F* = (1 - alpha)(I - alpha S)^-1 Y (Zhou et al., equation 3), S = D^-1/2 W D^-1/2, W by a loop over all pairs."""
    known, asked = images(scattered(9, 0), [0, 1, 2] * 3), images(scattered(40, 1), [0] * 40)
    x = np.concatenate([part.images.numpy().reshape(-1, 2).astype(float) for part in (known, asked)])
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    n, w = len(x), np.zeros((len(x), len(x)))
    for i in range(n):
        for j in sorted((j for j in range(n) if j != i), key=lambda j: np.linalg.norm(x[i] - x[j]))[:neighbours]:
            w[i, j] = w[j, i] = 1
    root = np.diag(w.sum(0) ** -0.5)
    y = np.zeros((n, 3))
    y[range(9), known.labels] = 1
    f = (1 - alpha) * np.linalg.solve(np.eye(n) - alpha * root @ w @ root, y)
    told = f.max(1) > np.sort(f, 1)[:, -2] + 1e-9  # with one neighbour some images are reached by nobody
    found = label_spreading(PIXELS, known, asked, neighbours=neighbours, alpha=alpha, steps=3_000).numpy()
    assert told[9:].sum() >= 15 and (found == f.argmax(1)[9:])[told[9:]].all()


def test_labels_follow_a_chain_where_the_nearest_labelled_image_is_of_another_class():
    chain, others = (
        [250 * np.array([np.cos(a), np.sin(a)]) for a in np.linspace(*ends)] for ends in ((0, 1, 40), (1.3, 1.5, 9))
    )
    known = images([chain[0], others[4]], [0, 1])
    asked = images([*chain[1:], *others[:4], *others[5:]], [0] * 47)
    found = label_spreading(PIXELS, known, asked, neighbours=2, steps=1_000)
    assert found.tolist() == [0] * 39 + [1] * 8  # the chain ends at 1, nearer to 1.4 than to 0


def test_of_real_digits_more_are_right_than_by_the_nearest_that_is_known():
    drawn, all_of_them = digits().subset(labels=50, val=0, seed=0), digits().train
    spread = label_spreading(PIXELS, drawn.train, all_of_them)
    nearest = next(knn(PIXELS, Splits(drawn.train, drawn.train, all_of_them)))[1]
    assert (spread == all_of_them.labels).double().mean() > nearest + 0.05


def test_what_the_images_are_called_changes_nothing_and_an_image_that_is_known_keeps_its_label():
    drawn = digits().subset(labels=50, val=50, seed=0)
    model = ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2)
    asked = digits().train.take(slice(300))
    found = [label_spreading(model, drawn.train, part) for part in (asked, replace(asked, labels=asked.labels.flip(0)))]
    assert torch.equal(*found) and found[0].dtype == torch.int64 and len(found[0].unique()) > 3
    again = label_spreading(model, drawn.train, drawn.train, neighbours=1, alpha=0.01)
    assert torch.equal(again, drawn.train.labels)


@pytest.mark.parametrize("knobs", [{"neighbours": 0}, {"neighbours": 49}, {"alpha": 1.0}, {"alpha": 0.0}, {"steps": 0}])
def test_numbers_out_of_range_are_refused(knobs):
    with pytest.raises(ValueError, match="expected"):
        label_spreading(PIXELS, images(scattered(9, 0), [0, 1, 2] * 3), images(scattered(40, 1), [0] * 40), **knobs)


# In a run

TINY = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2)
SHORT = Run(model=TINY, labels=50, val=100, steps=12, batch=8, augment=augment.digits())
DEPENDENCIES = SHORT.vary(
    objective=partial(DINO, prototypes=16, hidden=16, bottleneck=8),
    augment=augment.digit_crops(local=0),
    unlabelled=True,
    clip=0.0,
    ema=0.0,
)
GUESSED = SHORT.vary(init=DEPENDENCIES, unlabelled=True, pseudo_labels=partial(label_spreading, neighbours=5))


def test_a_run_learns_what_it_was_told_of_all_images_and_reads_no_label(tmp_path, monkeypatch):
    given = []

    def told(model, known, others, **knobs):
        given.append((len(known), len(others), others.labels.unique().tolist()))
        return (others.images.sum((1, 2, 3)) % 10).long()

    monkeypatch.setattr("smallvit.pseudo_labels.label_spreading", told)
    told.__module__, told.__qualname__ = "smallvit.pseudo_labels", "label_spreading"
    run = SHORT.vary(init=DEPENDENCIES, unlabelled=True, pseudo_labels=told)
    set_up = {}
    before = trainings.Training.next_batch

    def draw(self):
        batch = before(self)
        if self.run.pseudo_labels:
            set_up["images"] = self.images
            assert (batch.targets.sum(1) == 1).all()
        return batch

    monkeypatch.setattr(trainings.Training, "next_batch", draw)
    record = fit(run, tmp_path)
    total = len(digits().train) - 100
    assert given == [(50, total, [0])] and record["unlabelled"] == total and record["labels"] == 50
    seen = set_up["images"]
    assert torch.equal(seen.labels, (seen.images.sum((1, 2, 3)) % 10).long())


def test_put_down_and_taken_up_again_the_labels_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "CHECKPOINT_SECONDS", 0.0)
    fit(GUESSED, tmp_path / "whole")
    train_step, steps = trainings.Training.train_step, []

    def until(self):
        if self.run.pseudo_labels and len(steps) == 5:
            raise KeyboardInterrupt
        train_step(self)
        steps.extend([1] * bool(self.run.pseudo_labels))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainings.Training, "train_step", until)
        fit(GUESSED, tmp_path / "broken")
    fit(GUESSED, tmp_path / "broken")
    one, other = (load_file(tmp_path / name / WEIGHTS) for name in ("whole", "broken"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_spreads_labels_has_no_more_of_them_where_it_is_the_start_of_another():
    guessed = replace(GUESSED, labels=None, init=replace(DEPENDENCIES, labels=None))
    plain = replace(SHORT, labels=None)
    arms = {"base": plain, "tuned": plain.vary(init=guessed), "taught": plain.vary(objective=Distill, teacher=guessed)}
    runs = ablate(arms, labels=[20, 40], seeds=[0], references=False)
    before = {(run.arm, run.labels): (run.init or run.teacher) for run in runs if run.arm != "base"}
    assert {key: run.labels for key, run in before.items()} == {key: key[1] for key in before} and len(before) == 4
    assert all(run.init.labels is None for run in before.values()), "what reads no label is one for all"


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
def test_pseudo_labels_that_make_no_sense_are_refused(changes):
    with pytest.raises(ValueError, match=r"expected|take"):
        GUESSED.vary(**changes)


def test_it_stands_in_a_recipe_beside_the_others():
    runs = ablate({"scratch": SHORT, "guessed": GUESSED}, labels=[50], seeds=range(2))
    said = plan(runs, 1, "cpu")
    assert "pseudo_labels: None -> label_spreading(" in said and "guessed: 2 runs of 12 steps" in said
    assert all(run.pseudo_labels is None for run in runs if run.arm != "guessed")


def test_an_image_that_no_label_reaches_has_that_of_the_nearest_labelled_one():
    def around(angle: float, n: int) -> list[np.ndarray]:
        return [250 * np.array([np.cos(a), np.sin(a)]) for a in np.linspace(angle, angle + 0.05, n)]

    known = images([around(0.2, 4)[0], around(0.6, 4)[0]], [0, 1])
    asked = images([*around(0.2, 4)[1:], *around(0.6, 4)[1:], *around(1.4, 6)], [0] * 12)  # the last are an island
    assert label_spreading(PIXELS, known, asked, neighbours=2).tolist() == [0] * 3 + [1] * 9
