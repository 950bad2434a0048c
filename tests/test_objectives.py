"""Objectives: their losses by hand, whom they teach and whom they leave alone, and that they reach what they ask for."""

import copy
import inspect
import math
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from smallvit import (
    LearnedPrune,
    LearnedThresholds,
    LearnThresholds,
    LearnToPrune,
    MeanTokens,
    Merge,
    PatchEmbed,
    Pixels,
    Prune,
    SmallCNN,
    Supervised,
    ViT,
    objectives,
)
from smallvit.augment import Batch
from smallvit.flops import closed_form, seen_tokens, unreduced
from smallvit.optim import decay_groups

TINY = partial(ViT, (8, 8), 1, 5, dim=16, depth=4, heads=2, tokenizer=partial(PatchEmbed, patch=2))
PRUNED = partial(TINY, reduction=partial(LearnedPrune, keep=0.5))
THRESHOLDS = partial(TINY, reduction=partial(LearnedThresholds, merge=0.9, prune=0.5))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def batch():
    """Targets as mixing and smoothing leave them: rows of shares."""
    return Batch(torch.randn(6, 1, 8, 8), torch.rand(6, 5).softmax(-1))


def drawn(model):
    """Attention and predictors that are far from indifferent."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attention." in name or ".predictor." in name:
                parameter.normal_(std=0.3)
    return model


def surprise(logits, targets):
    rows = [[-t * (z - math.log(sum(map(math.exp, row)))) for t, z in zip(wanted, row)] for wanted, row in zip(targets, logits)]
    return sum(map(sum, rows)) / len(rows)


def test_every_objective_is_tested():
    found = {name for name, made in vars(objectives).items() if inspect.isclass(made) and issubclass(made, nn.Module)}
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert found == {"DINO", "Distill", "LearnThresholds", "LearnToPrune", "MAE", "Supervised"}
    assert all(f"import {name}" in tests or f"{name}," in tests for name in found)


# Supervised


@pytest.mark.parametrize("make", [TINY, partial(SmallCNN, (8, 8), 1, 5, width=4, hidden=8)], ids=["vit", "cnn"])
def test_supervised_is_the_cross_entropy_with_the_targets(make, batch):
    model = make().eval()
    loss = Supervised(model)(batch, 0.3)["loss"]
    assert loss.item() == pytest.approx(surprise(model(batch.images).tolist(), batch.targets.tolist()), rel=1e-5)


def test_supervised_tells_the_progress_to_whoever_asks(batch):
    model = TINY(reduction=partial(Prune, shrink=(0.0, 0.5)))
    objective = Supervised(model)
    for progress in (0.0, 0.25, 1.0):
        objective(batch, progress)
        assert [block.reduction.progress for block in model.blocks] == [progress] * 4


def squashed(row):
    """A row of logits as probabilities, by the definition."""
    whole = sum(map(math.exp, row))
    return [math.exp(z) / whole for z in row]


@pytest.mark.parametrize("off", [{"softmax_first": False}, {"softmax_first": None}])
def test_supervised_switched_off_is_supervised_bit_for_bit(off, batch):
    model = TINY()
    losses = [Supervised(model, **knobs)(batch, 0.3)["loss"] for knobs in ({}, off)]
    gradients = [torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in losses]
    assert torch.equal(*losses) and all(a is b is None or torch.equal(a, b) for a, b in zip(*gradients))


def test_a_softmax_before_the_cross_entropy_takes_probabilities_for_logits(batch):
    model = TINY().eval()
    rows = [squashed(row) for row in model(batch.images).tolist()]
    loss = Supervised(model, softmax_first=True)(batch, 0.0)["loss"]
    assert loss.item() == pytest.approx(surprise(rows, batch.targets.tolist()), rel=1e-5)


class Sure(nn.Module):
    """Logits as they are, 10 classes; the images are the logits."""

    def forward(self, x):
        return x


def test_what_that_mistake_costs_is_what_its_docstring_says():
    """Sure and right still costs 1.46; sure and wrong hardly teaches."""
    right, chance, wrong = 50 * torch.eye(10)[:1], torch.zeros(1, 10), 50 * torch.eye(10)[1:2]
    first, targets = Supervised(Sure(), softmax_first=True), torch.eye(10)[:1]
    losses = [first(Batch(x, targets), 0.0)["loss"].item() for x in (right, chance)]
    assert losses == pytest.approx([math.log(math.e + 9) - 1, math.log(10)]) and "log(e + k - 1) - 1" in Supervised.__doc__
    assert [round(loss, 2) for loss in losses] == [1.46, 2.30]
    steep = []
    for objective in (first, Supervised(Sure())):
        x = wrong.clone().requires_grad_()
        steep.append(torch.autograd.grad(objective(Batch(x, targets), 0.0)["loss"], x)[0].abs().max().item())
    assert steep[0] < 1e-6 and steep[1] == pytest.approx(1)


def test_the_mistake_is_made_or_not():
    with pytest.raises(ValueError, match="softmax_first is 'no'; expected True for the mistake"):
        Supervised(TINY(), softmax_first="no")


# LearnToPrune


def decided(monkeypatch, shares, patches=16):
    """Each predictor keeps this share, whatever it says."""
    policies = [torch.stack([(torch.arange(patches) < share * patches).float()] * 6) for share in shares]

    def draw(score, hard):
        policies.append(policies.pop(0))
        return torch.stack([policies[-1], 1 - policies[-1]], -1) + (score - score.detach())

    monkeypatch.setattr(F, "gumbel_softmax", draw)
    return policies


def test_the_loss_of_dynamicvit_is_the_sum_of_its_four_terms(batch, monkeypatch):
    model = drawn(PRUNED())
    policies = decided(monkeypatch, (0.75, 0.5, 0.25))
    objective = LearnToPrune(model, ratio=3.0, distil=0.7, distil_tokens=0.2).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))  # the student has learned something since
    said = objective(batch, 0.5)

    logits, (tokens, _) = model.train()(batch.images).tolist(), model.tokens(batch.images)
    wanted, likely = objective.teacher.tokens(batch.images)[0], objective.teacher(batch.images).tolist()
    ratio = sum((policy.mean(1) - 0.5**k).square().mean().item() for k, policy in enumerate(policies, 1)) / 3
    divergence = 0.0
    for student, teacher in zip(logits, likely):
        s, t = (math.log(sum(map(math.exp, row))) for row in (student, teacher))
        divergence += sum(math.exp(b - t) * ((b - t) - (a - s)) for a, b in zip(student, teacher)) / 6
    kept = [(image, 1 + patch) for image in range(6) for patch in range(16) if policies[-1][image, patch] > 0]
    error = sum((tokens[at] - wanted[at]).square().mean().item() for at in kept) / len(kept)
    expected = surprise(logits, batch.targets.tolist()) + 3.0 * ratio + 0.7 * divergence + 0.2 * error
    assert min(ratio, divergence, error) > 1e-4
    assert said["loss"].item() == pytest.approx(expected, rel=1e-4)
    assert said["kept"].tolist() == pytest.approx([0.75, 0.5, 0.25])


@pytest.mark.parametrize("shares, met", [((0.5, 0.25, 0.125), True), ((0.5, 0.25, 0.25), False)])
def test_the_ratio_costs_nothing_where_it_is_met(shares, met, batch, monkeypatch):
    decided(monkeypatch, shares)
    model = PRUNED()
    losses = [LearnToPrune(model, ratio=ratio).train()(batch, 0.5)["loss"].item() for ratio in (0.0, 1e3)]
    assert (losses[0] == losses[1]) == met


def test_the_weights_of_the_loss_are_the_papers():
    knobs = inspect.signature(LearnToPrune).parameters
    assert [knobs[name].default for name in ("ratio", "distil", "distil_tokens", "backbone")] == [2.0, 0.5, 0.5, 0.01]


def test_the_teacher_is_the_model_as_it_came_and_never_learns(batch):
    model = PRUNED()
    plain = unreduced(model).eval()
    objective = LearnToPrune(model).train()
    assert not objective.teacher.training and model.training
    assert torch.equal(objective.teacher(batch.images), plain(batch.images))
    optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        objective(batch, 0.5)["loss"].backward()
        optimizer.step()
    assert all(p.grad is None and not p.requires_grad for p in objective.teacher.parameters())
    assert torch.equal(objective.teacher(batch.images), plain(batch.images))
    assert not torch.equal(unreduced(model).eval()(batch.images), plain(batch.images))
    assert not {id(p) for p in model.parameters()} & {id(p) for p in objective.teacher.parameters()}


def test_all_else_rests_for_a_sixth_and_then_follows_slowly(batch):
    model = PRUNED()
    objective = LearnToPrune(model, backbone=0.02).train()
    groups, paces = decay_groups(objective, 0.1)
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    held = [id(p) for group in groups for p in group["params"]]
    assert len(held) == len(set(held)) and set(held) == {id(p) for p in model.parameters()}

    def moved(progress, pace):
        before = copy.deepcopy(model.state_dict())
        for group, own in zip(optimizer.param_groups, paces):
            group["lr"] = 0.01 * own(progress, pace)
        optimizer.zero_grad()
        objective(batch, progress)["loss"].backward()
        optimizer.step()
        after = model.state_dict()
        return {name for name in before if not torch.equal(before[name], after[name])}

    predictors = {name for name in model.state_dict() if ".predictor." in name}
    for progress in (0.0, 0.1, 0.166):
        assert 0 < len(moved(progress, 1.0)) <= len(predictors) and moved(progress, 1.0) <= predictors
    assert moved(0.17, 1.0) == set(model.state_dict())
    fast, slow = paces[0], paces[-1]
    assert [slow(0.5, pace) for pace in (1.0, 0.02, 0.001)] == [0.02, 0.02, 0.001]
    assert [fast(progress, 0.3) for progress in (0.0, 0.5)] == [0.3, 0.3]


def test_it_learns_to_keep_what_it_is_told(batch):
    """The share kept goes to its target, from a predictor that keeps nearly all."""
    model = PRUNED(reduction=partial(LearnedPrune, keep=0.5, layers=(1,)), pool=MeanTokens)
    predictor = model.blocks[1].reduction.predictor
    nn.init.constant_(predictor.decide[-1].bias[:1], 3.0)
    objective, kept = LearnToPrune(model, distil_tokens=0.0).train(), []
    optimizer = torch.optim.Adam(predictor.parameters(), lr=0.05)
    for _ in range(40):
        said = objective(batch, 0.0)
        optimizer.zero_grad()
        said["loss"].backward()
        optimizer.step()
        kept.append(said["kept"].item())
    assert kept[0] > 0.85 and abs(sum(kept[-10:]) / 10 - 0.5) < 0.15


# LearnThresholds


def test_the_loss_of_ltmp_is_cross_entropy_and_the_squared_gap_to_the_budget(batch):
    model = drawn(THRESHOLDS()).train()
    said = LearnThresholds(model, budget=0.4, weight=7.0)(batch, 0.5)
    expected = surprise(model(batch.images).tolist(), batch.targets.tolist()) + 7.0 * (said["spent"].item() - 0.4) ** 2
    assert 0.4 < said["spent"] < 1 and said["loss"].item() == pytest.approx(expected, rel=1e-5)
    knobs = inspect.signature(LearnThresholds).parameters
    assert [knobs[name].default for name in ("budget", "weight")] == [0.75, 10.0]


def test_all_kept_is_all_spent_and_less_kept_is_less_spent():
    objective = LearnThresholds(THRESHOLDS())
    kept = [torch.ones(6, 17) for _ in range(4)]
    assert objective.spent(kept).item() == 1
    spent = [1.0]
    for block, place in [(3, 1), (3, 2), (2, 5), (1, 9), (0, 3), (0, 4)]:
        kept[block][:, place] = 0
        spent.append(objective.spent(kept).item())
    assert spent == sorted(spent, reverse=True) and len(set(spent)) == len(spent)
    again = kept[1].clone()
    kept[1][:, 3] = 0  # it is gone since block 0
    assert objective.spent(kept).item() == pytest.approx(spent[-1]) and not torch.equal(again, kept[1])


def spent_by_hand(model, rows):
    """LTMP equation 8 with r = 4: tokens n before and m behind the reduction of each block, one image."""
    d = 16
    whole = sum(4 * 17 * d * d + 2 * 17 * 17 * d + 8 * 17 * d * d for _ in rows)
    return sum(4 * n * d * d + 2 * n * n * d + 8 * m * d * d for n, m in rows) / whole


@pytest.mark.parametrize("merge", [0.6, None])
def test_the_share_spent_is_that_of_the_closed_form_for_one_image(merge):
    model = drawn(TINY(reduction=partial(LearnedThresholds, merge=merge, prune=0.8)))
    for _ in range(4):
        x = torch.randn(1, 1, 8, 8)
        rows = seen_tokens(model.eval(), x)[0].tolist()
        share = closed_form(model, rows)["blocks"] / closed_form(unreduced(model))["blocks"]
        said = LearnThresholds(model).train()(Batch(x, torch.eye(5)[:1]), 0.0)["spent"].item()
        assert said == pytest.approx(share, rel=1e-5) == pytest.approx(spent_by_hand(model, rows), rel=1e-5) and said < 1


def test_a_block_without_thresholds_is_counted_too(batch):
    def second(place):
        return LearnedThresholds(place, merge=None, prune=0.9) if place.layer == 1 else None

    model = drawn(TINY(reduction=second))
    kept = torch.ones(6, 17)
    kept[:, :9] = 0
    spent = LearnThresholds(model).spent([kept]).item()
    assert spent == pytest.approx(spent_by_hand(model, [(17, 17), (17, 8), (8, 8), (8, 8)]))
    assert LearnThresholds(model).train()(batch, 0.0)["loss"].isfinite()


def test_only_thresholds_learn_and_they_stay_in_their_range(batch):
    model = drawn(THRESHOLDS())
    objective = LearnThresholds(model, budget=0.05).train()
    trained = {name for name, p in objective.named_parameters() if p.requires_grad}
    assert trained == {f"model.blocks.{layer}.reduction.{name}" for layer in range(4) for name in ("merge", "prune")}
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD([p for p in objective.parameters() if p.requires_grad], lr=100.0)
    objective(batch, 0.0)["loss"].backward()
    optimizer.step()
    outside = [block.reduction.merge.item() for block in model.blocks]
    assert not all(0 <= value <= 1 for value in outside)
    objective.after_step(0.1)
    for block in model.blocks:
        assert 0 <= block.reduction.merge <= 1 and 0 <= block.reduction.prune <= 17
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if ".reduction." not in name)


@pytest.mark.parametrize("budget", [0.4, 0.8])
def test_the_thresholds_find_the_budget(budget, batch):
    model = drawn(TINY(reduction=partial(LearnedThresholds, merge=0.9, prune=0.0)))
    objective = LearnThresholds(model, budget=budget).train()
    optimizer = torch.optim.Adam([p for p in objective.parameters() if p.requires_grad], lr=0.03)
    spent = []
    for _ in range(40):
        said = objective(batch, 0.0)
        optimizer.zero_grad()
        said["loss"].backward()
        optimizer.step()
        objective.after_step(0.0)
        spent.append(said["spent"].item())
    assert spent[0] > 0.85 and abs(sum(spent[-10:]) / 10 - budget) < 0.1


# Bad input


NOTHING = {
    "plain": TINY,
    "merge": partial(TINY, reduction=Merge),
    "off": partial(TINY, reduction=partial(LearnedPrune, keep=1)),
    "cnn": partial(SmallCNN, (8, 8), 1, 5),
    "pixels": partial(Pixels, (8, 8), 1, 5),
}


@pytest.mark.parametrize("objective", [LearnToPrune, LearnThresholds])
@pytest.mark.parametrize("model", NOTHING)
def test_a_model_that_has_nothing_to_learn_is_refused(objective, model):
    taught = {LearnToPrune: "LearnedPrune", LearnThresholds: "LearnedThresholds"}[objective]
    with pytest.raises(ValueError, match=rf"teaches {taught} and .*none.*reduction={taught}"):
        objective(NOTHING[model]())


@pytest.mark.parametrize("budget", [0, -0.1, 1.1])
def test_a_budget_is_a_fraction(budget):
    with pytest.raises(ValueError, match=f"budget is {budget}; expected a fraction of the unreduced compute"):
        LearnThresholds(THRESHOLDS(), budget=budget)
