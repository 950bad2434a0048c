"""Evaluators: their numbers are the field's own numbers, and the model is afterwards what it was before."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch import nn

from smallvit import (
    Images,
    LearnedPrune,
    LearnedThresholds,
    Merge,
    PatchEmbed,
    Prune,
    SmallCNN,
    Splits,
    ViT,
    accuracy,
    cost,
    data,
    initialize,
    knn,
    linear_probe,
)
from smallvit.evaluate import few_shot
from smallvit.flops import closed_form, footprint, seen_tokens, tokens_per_layer

TIMED = partial(cost, batch=4, repeats=1)
FEW = partial(few_shot, shots=5)
EVALUATORS = [accuracy, knn, linear_probe, partial(linear_probe, standardise=False), FEW, TIMED]
NAMES = ["accuracy", "knn", "linear_probe", "linear_probe as is", "few_shot", "cost"]


@pytest.fixture(scope="module")
def splits() -> Splits:
    digits = data.digits()
    drawn = digits.subset(labels=100, val=100, seed=0)
    return Splits(drawn.train, drawn.val, digits.test.open())


@pytest.fixture
def vit() -> ViT:
    model = ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2, dropout=0.5, drop_path=0.5)
    return initialize(model, 0)


@pytest.fixture
def cnn() -> SmallCNN:
    return initialize(SmallCNN((8, 8), 1, 10, width=4, hidden=16), 0)


# Accuracy


def test_accuracy_and_nll_are_those_of_sklearn(vit, splits):
    found = dict(accuracy(vit, splits))
    with torch.no_grad():
        logits = vit.eval()(splits.test.spec.normalise(splits.test.pixels()))
    labels = splits.test.labels.numpy()
    assert list(found) == ["accuracy", "nll"]
    assert found["accuracy"] == accuracy_score(labels, logits.argmax(1).numpy())
    assert found["nll"] == pytest.approx(log_loss(labels, logits.double().softmax(1).numpy(), labels=range(10)), abs=1e-6)
    assert found["nll"] == pytest.approx(nn.functional.cross_entropy(logits.double(), splits.test.labels).item(), abs=1e-6)


class Reads(nn.Module):
    """A model for images of one pixel: the logit of the class that the pixel names is 20, all others are 0."""

    def forward(self, x):
        return 20 * nn.functional.one_hot((x.flatten() * 255).round().long(), 10).float()


def test_accuracy_counts_the_images_of_every_batch_alike():
    """2,500 images make batches of 1,024, 1,024 and 452; only the last are wrong."""
    spec = data.DataSpec(name="t", channels=1, size=(1, 1), classes=tuple("0123456789"), mean=(0.0,), std=(1.0,))
    pixels = (torch.arange(2500) % 10).to(torch.uint8)
    labels = torch.arange(2500) % 10
    labels[2048:] = (labels[2048:] + 1) % 10
    found = dict(accuracy(Reads(), Splits(None, None, Images(pixels.view(-1, 1, 1, 1), labels, spec))))
    assert found["accuracy"] == 2048 / 2500
    assert found["nll"] == pytest.approx(20 * 452 / 2500, rel=1e-4)


# All of them


def hooked(model) -> int:
    return sum(len(hooks) for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks))


@pytest.mark.parametrize("evaluator", EVALUATORS, ids=NAMES)
@pytest.mark.parametrize("kind", ["vit", "cnn", "merge", "thresholds"])
def test_the_model_is_left_bit_for_bit_as_it_was(evaluator, kind, splits, request):
    model = reduced(kind) if kind in REDUCTIONS else request.getfixturevalue(kind)
    model.train()
    for module in list(model.modules())[1::3]:
        module.training = False  # as a frozen part has it
    modes = [module.training for module in model.modules()]
    before, needs = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    hooks = hooked(model)
    drawn = torch.get_rng_state()
    assert 0 < sum(modes) < len(modes)
    dict(evaluator(model, splits))
    assert [module.training for module in model.modules()] == modes and hooked(model) == hooks
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters()) and [p.requires_grad for p in model.parameters()] == needs
    assert torch.equal(drawn, torch.get_rng_state())
    model.train()(splits.test.spec.normalise(splits.test.pixels(slice(0, 4)))).sum().backward()  # and it still learns
    assert kind != "cnn" or any("running_mean" in name for name in before)


def test_the_modes_come_back_even_when_the_model_raises(splits):
    class Broken(nn.Module):
        def features(self, x):
            raise ArithmeticError

    model = Broken().train()
    with pytest.raises(ArithmeticError):
        dict(knn(model, splits))
    assert model.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("evaluator", EVALUATORS[:-1], ids=NAMES[:-1])  # cost reads a clock
def test_the_same_model_gives_the_same_bits_again(evaluator, vit, splits):
    first = list(evaluator(vit.train(), splits))
    torch.manual_seed(1)
    np.random.seed(1)
    assert list(evaluator(vit.train(), splits)) == first == list(evaluator(copy.deepcopy(vit).eval(), splits))


@pytest.mark.parametrize("evaluator", EVALUATORS, ids=NAMES)
def test_names_and_plain_finite_numbers_come_out(evaluator, cnn, splits):
    found = list(evaluator(cnn, splits))
    assert len({name for name, _ in found}) == len(found) >= 2
    assert all(type(name) is str and type(value) is float and np.isfinite(value) for name, value in found)


@pytest.mark.parametrize("evaluator", EVALUATORS, ids=NAMES)
def test_nothing_to_score_is_refused(evaluator, vit, splits):
    with pytest.raises(ValueError, match="no images to evaluate"):
        dict(evaluator(vit, splits._replace(test=splits.test.take(slice(0, 0)))))


class Says(nn.Module):
    def __init__(self, classes, value):
        super().__init__()
        self.classes, self.value = classes, value

    def forward(self, x):
        return torch.full((len(x), self.classes), self.value)


@pytest.mark.parametrize(
    "model, said",
    [
        (Says(9, 0.0), r"Says gives \(500, 9\) for 500 images; expected a logit for each of 10 classes"),
        (ViT((8, 8), 1, 0, dim=8, depth=1, heads=1, tokenizer=partial(PatchEmbed, patch=4)), r"ViT gives \(500, 8\) for 500"),
        (Says(10, float("nan")), "the logits of Says are not finite; expected a model that has not diverged"),
    ],
    ids=["too few", "no head", "nan"],
)
def test_what_are_no_logits_of_these_classes_is_not_scored(model, said, splits):
    with pytest.raises(ValueError, match=said):
        dict(accuracy(model, splits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("evaluator", [accuracy, knn, TIMED], ids=["accuracy", "knn", "cost"])
def test_a_model_in_another_precision_is_evaluated_in_it(evaluator, dtype, vit, splits):
    few = splits._replace(test=splits.test.take(slice(50)))
    plain, found = dict(evaluator(vit, few)), dict(evaluator(copy.deepcopy(vit).to(dtype), few))
    first = next(iter(plain))
    assert plain.keys() == found.keys() and found[first] == pytest.approx(plain[first], abs=0.1)


# Cost

REDUCTIONS = {
    "none": None,
    "off": Merge,
    "merge": partial(Merge, r=3),
    "prune": partial(Prune, layers=(0,)),
    "learned prune": partial(LearnedPrune, layers=(1,)),
    "thresholds": partial(LearnedThresholds, merge=0.7, prune=0.9),
}


def reduced(kind) -> ViT:
    model = ViT(
        (8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2, reduction=REDUCTIONS[kind], dropout=0.5
    )
    with torch.no_grad():
        for block in initialize(model, 0).blocks:
            block.attention.qkv.weight.mul_(3)  # images that differ in what can go
    return model


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_cost_says_what_a_forward_pass_takes(kind, splits):
    model = reduced(kind).train()
    found = dict(cost(model, splits, batch=4, repeats=1))
    names = {
        "none": ["macs", "ms"],
        "thresholds": ["macs", "macs_sd", "tokens", "ms", "speedup"],
    }.get(kind, ["macs", "flops", "tokens", "ms", "speedup"])
    assert list(found) == names and all(type(value) is float for value in found.values())
    assert found["ms"] > 0 and found.get("speedup", 1) > 0
    model.eval()
    if kind == "thresholds":
        images = splits.test.spec.normalise(splits.test.pixels())
        macs = np.array([sum(closed_form(model, rows).values()) for rows in seen_tokens(model, images).tolist()])
        assert (
            len(macs) == 500 and found["macs"] == pytest.approx(macs.mean()) and found["macs_sd"] == pytest.approx(macs.std())
        )
        assert found["macs_sd"] > 0 and 2 < found["tokens"] == seen_tokens(model, images)[:, -1, 1].double().mean() < 17
    elif kind == "none":
        assert found["macs"] == footprint(model, torch.zeros(1, 1, 8, 8))["macs"]
    else:
        assert found["macs"] == sum(closed_form(model).values()) == pytest.approx(found["flops"] / 2, rel=0.02)
        assert found["tokens"] == tokens_per_layer(model)[-1][1]


def test_cost_of_a_model_without_blocks(cnn, splits):
    assert list(dict(cost(cnn, splits, repeats=1))) == ["macs", "ms"]


def test_a_reduction_that_reduces_costs_fewer_multiplications(splits):
    macs = {kind: dict(cost(reduced(kind), splits, batch=2, repeats=1))["macs"] for kind in REDUCTIONS}
    assert macs["none"] == pytest.approx(macs["off"], rel=0.02)
    assert max(macs[kind] for kind in ("merge", "prune", "learned prune", "thresholds")) < 0.95 * macs["none"]
