"""Evaluators: declarations, accuracy and cost have the right values, and every evaluator leaves the model unchanged."""

import copy
import inspect
import math
import pickle
import re
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch import nn
from toys import TINY_VIT, slow_after, slow_but

from smallvit import augment, data, evaluate
from smallvit.data import Images
from smallvit.evaluate import (
    Declaration,
    PerImage,
    Splits,
    accuracy,
    augmented_accuracy,
    cost,
    declaration,
    evaluator,
    few_shot,
    knn,
    linear_probe,
)
from smallvit.flops import closed_form, footprint, seen_tokens, tokens_per_layer
from smallvit.random_weights import initialize
from smallvit.reduction import LearnedPrune, LearnedThresholds, Merge, Prune
from smallvit.references import SmallCNN
from smallvit.vit import ViT

EVALUATORS = {
    "accuracy": accuracy,
    "augmented accuracy": partial(augmented_accuracy, augment=augment.digits(), copies=2),
    "knn": knn,
    "linear_probe": linear_probe,
    "linear_probe unscaled": partial(linear_probe, standardize=False),
    "few_shot": partial(few_shot, shots=5),
    "cost": partial(cost, batch=4, repeats=1),
}
all_evaluators = pytest.mark.parametrize("evaluator", EVALUATORS.values(), ids=EVALUATORS)
REDUCTIONS = {
    "none": None,
    "off": Merge,
    "merge": partial(Merge, r=3),
    "prune": partial(Prune, layers=(0,)),
    "learned prune": partial(LearnedPrune, layers=(1,)),
    "thresholds": partial(LearnedThresholds, merge=0.7, prune=0.9),
}


@pytest.fixture(scope="module")
def splits() -> Splits:
    digits = data.digits()
    subset = digits.subset(labels=100, val=100, seed=0)
    return Splits(subset.train, subset.val, digits.test.open())


@pytest.fixture
def vit() -> ViT:
    return initialize(TINY_VIT((8, 8), 1, 10, dropout=0.5, drop_path=0.5), 0)


@pytest.fixture
def cnn() -> SmallCNN:
    return initialize(SmallCNN((8, 8), 1, 10, width=4, hidden=16), 0)


def reduced_vit(kind) -> ViT:
    """A ViT with this reduction and large attention weights, so that images differ in the tokens that are dropped."""
    model = initialize(TINY_VIT((8, 8), 1, 10, reduction=REDUCTIONS[kind], dropout=0.5), 0)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.mul_(3)
    return model


# Declarations


def test_a_declaration_is_read_from_the_function_and_from_a_partial():
    def check(splits):
        """Accept all splits."""

    def plain(model, splits):
        yield "plain", 0.5

    declared = evaluator(probe=True, judges=False, chooses="k", needs=check, pixel_options=["shots"])(plain)
    assert declared is plain and list(plain(None, None)) == [("plain", 0.5)]
    for found in (plain, partial(plain), partial(partial(plain, x=1), y=2)):
        assert declaration(found) == Declaration(True, False, "k", check, ("shots",), False)
    assert declaration(lambda model, splits: []) == Declaration() and declaration(accuracy) == Declaration(head=True)
    assert Declaration() == (False, True, None, None, (), False, False)


def test_declarations_of_the_evaluators():
    declared = {name: declaration(e) for name, e in EVALUATORS.items()}
    assert {name for name, d in declared.items() if d.probe} == {"knn", "linear_probe", "linear_probe unscaled", "few_shot"}
    assert {name for name, d in declared.items() if not d.judges} == {"cost"}
    assert {name for name, d in declared.items() if d.chooses} == {"linear_probe", "linear_probe unscaled"}
    checked = {"knn", "linear_probe", "linear_probe unscaled", "few_shot", "augmented accuracy", "cost"}
    assert {name for name, d in declared.items() if d.needs} == checked
    for name, d in declared.items():
        function = getattr(EVALUATORS[name], "func", EVALUATORS[name])
        assert set(d.pixel_options) <= set(inspect.signature(function).parameters)
    assert declared["few_shot"].pixel_options == ("shots", "draws", "strength")


def test_the_example_of_the_documentation_is_an_evaluator(vit, splits):
    example = re.search(r"    @evaluator.*?(?=\n    Run)", evaluate.__doc__, re.DOTALL).group()
    namespace = {"evaluator": evaluator, "features": evaluate.features}
    exec(inspect.cleandoc("\n" + example), namespace)
    numbers = dict(namespace["feature_size"](vit, splits))
    assert numbers["feature_width"] == 16 and numbers["feature_norm"] > 0
    assert not declaration(namespace["feature_size"]).judges


METRICS = (evaluate.balanced_accuracy, evaluate.macro_f1, evaluate.auc, evaluate.log_loss, evaluate.calibration)


@pytest.mark.parametrize("evaluator", (*EVALUATORS.values(), *METRICS), ids=(*EVALUATORS, *(m.__name__ for m in METRICS)))
def test_one_set_of_images_in_place_of_three_is_refused(evaluator, vit, splits):
    with pytest.raises(ValueError, match=r"of the type Images; expected three sets of Images: Splits\(train"):
        list(evaluator(vit, splits.test))


# Accuracy


def test_accuracy_and_nll_are_those_of_sklearn(vit, splits):
    found = dict(accuracy(vit, splits))
    with torch.no_grad():
        logits = vit.eval()(splits.test.spec.normalize(splits.test.pixels()))
    labels = splits.test.labels.numpy()
    assert list(found) == ["accuracy", "nll"]
    assert found["accuracy"] == accuracy_score(labels, logits.argmax(1).numpy())
    assert found["nll"] == pytest.approx(log_loss(labels, logits.double().softmax(1).numpy(), labels=range(10)), abs=1e-6)
    assert found["nll"] == pytest.approx(nn.functional.cross_entropy(logits.double(), splits.test.labels).item(), abs=1e-6)


# Test-time augmentation


def test_augmented_accuracy_is_that_of_the_mean_of_the_probabilities(vit, splits):
    transforms, copies = augment.digits(1.5), 3
    images, labels = splits.test, splits.test.labels
    with torch.no_grad():
        mean = vit.eval()(images.spec.normalize(images.pixels())).double().softmax(1)
        for seed in range(copies):
            batch = augment.Batch(images.pixels(), images.targets())
            changed = augment.apply(transforms, batch, torch.Generator().manual_seed(seed)).images
            assert not torch.equal(changed, batch.images)
            mean += vit(images.spec.normalize(changed)).double().softmax(1)
    found = dict(augmented_accuracy(vit, splits, augment=transforms, copies=copies))
    assert list(found) == ["augmented_accuracy", "augmented_nll"]
    assert found["augmented_accuracy"] == accuracy_score(labels.numpy(), mean.argmax(1).numpy())
    assert found["augmented_nll"] == pytest.approx(log_loss(labels.numpy(), mean.numpy() / 4, labels=range(10)), abs=1e-9)
    plain = [value for _, value in accuracy(vit, splits)]
    for off in ({"augment": transforms, "copies": 0}, {"augment": ()}):
        assert [value for _, value in augmented_accuracy(vit, splits, **off)] == pytest.approx(plain, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": (augment.Mixup(),)}, "augment has Mixup, which changes targets"),
        ({"augment": augment.digit_crops()}, "several views"),
        ({"augment": (), "copies": -1}, "expected a whole number"),
        ({"augment": (), "copies": True}, "expected a whole number"),
        ({"augment": augment.digits}, "expected a tuple of transforms"),
        ({"augment": (augment.Flip(),)}, "is no digit"),
    ],
)
def test_augmented_accuracy_refuses_what_it_cannot_average(options, message, vit, splits):
    with pytest.raises(ValueError, match=message):
        list(augmented_accuracy(vit, splits, **options))


def test_a_tensor_in_the_place_of_images_is_refused(vit):
    for function in (evaluate.features, evaluate.predictions):
        with pytest.raises(ValueError, match="got a tensor; expected Images"):
            function(vit, torch.rand(2, 1, 8, 8))
        with pytest.raises(ValueError, match="got a ndarray; expected Images"):
            function(vit, np.zeros((2, 1, 8, 8)))
        with pytest.raises(TypeError, match="the test images are held out"):
            function(vit, data.digits().test)


class ReadsPixel(nn.Module):
    """A model for images of one pixel: the logit of the class that the pixel names is 20, all others are 0."""

    def forward(self, x):
        return 20 * nn.functional.one_hot((x.flatten() * 255).round().long(), 10).float()


def test_accuracy_gives_every_image_the_same_weight():
    """2,500 images make batches of 1,024, 1,024 and 452; only the last batch is wrong."""
    spec = data.DataSpec(name="t", channels=1, size=(1, 1), classes=tuple("0123456789"), mean=(0.0,), std=(1.0,))
    pixels = (torch.arange(2500) % 10).to(torch.uint8)
    labels = torch.arange(2500) % 10
    labels[2048:] = (labels[2048:] + 1) % 10
    found = dict(accuracy(ReadsPixel(), Splits(None, None, Images(pixels.view(-1, 1, 1, 1), labels, spec))))
    assert found["accuracy"] == 2048 / 2500
    assert found["nll"] == pytest.approx(20 * 452 / 2500, rel=1e-4)


class Constant(nn.Module):
    def __init__(self, classes, value):
        super().__init__()
        self.classes, self.value = classes, value

    def forward(self, x):
        return torch.full((len(x), self.classes), self.value)


class Pair(nn.Module):
    """A model that returns features, too, as many models outside of smallvit do."""

    def forward(self, x):
        return torch.zeros(len(x), 10), x


@pytest.mark.parametrize(
    "model, message",
    [
        (Pair(), "Pair gives a tuple for 500 images; expected a logit for each of 10 classes, in one tensor"),
        (lambda x: torch.zeros(len(x), 10), "got a function as model; expected a torch.nn.Module"),
        (Constant(9, 0.0), r"Constant gives \(500, 9\) for 500 images; expected a logit for each of 10 classes"),
        (TINY_VIT((8, 8), 1, 0), r"ViT gives \(500, 16\) for 500"),
        (Constant(10, float("nan")), "the logits of Constant are not finite; expected a model that has not diverged"),
    ],
    ids=["pair", "function", "too few", "no head", "nan"],
)
def test_outputs_that_are_no_finite_logits_of_the_classes_are_refused(model, message, splits):
    with pytest.raises(ValueError, match=message):
        dict(accuracy(model, splits))


# Scores with a value for each image


@pytest.mark.parametrize(
    "values",
    [torch.arange(7) % 3 > 0, np.arange(7) % 3 > 0, [0.25, 0.5, 1.0], torch.tensor([0.1, 0.7])],
    ids=["tensor", "array", "list", "floats"],
)
def test_a_score_with_values_is_the_float_of_their_mean(values):
    score, expected = PerImage(values), float(np.asarray(values).mean(dtype=float))
    assert isinstance(score, float) and score == expected and type(float(score)) is float
    assert np.array_equal(score.values, np.asarray(values))
    for again in (copy.deepcopy(score), pickle.loads(pickle.dumps(score))):
        assert again == score and np.array_equal(again.values, score.values)


def test_values_in_half_precision_are_accepted_and_those_that_are_not_finite_refused():
    assert PerImage(torch.tensor([0.25, 1.0], dtype=torch.bfloat16)).values.tolist() == [0.25, 1.0]
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="values that are NaN or infinite; expected a finite number for each image"):
            PerImage([1.0, value])


@pytest.mark.parametrize("values", [0.5, torch.zeros(2, 3), []])
def test_values_that_are_not_one_for_each_image_are_refused(values):
    with pytest.raises(ValueError, match="expected one value for each image"):
        PerImage(values)


def test_accuracy_and_probes_say_which_images_are_right(vit, splits):
    with torch.no_grad():
        predicted = vit.eval()(splits.test.spec.normalize(splits.test.pixels())).argmax(1)
    first = {name: next(EVALUATORS[name](vit, splits))[1] for name in ("accuracy", "knn", "linear_probe")}
    first["few_shot"] = next(few_shot(vit, splits, shots=5, draws=1))[1]
    assert np.array_equal(first["accuracy"].values, predicted == splits.test.labels)
    for name, score in first.items():
        assert score.values.dtype == bool and len(score.values) == 500, name
        assert score == int(score.values.sum()) / 500, name


def test_the_values_of_the_images_are_in_the_order_of_the_test_set(vit, splits):
    order = torch.randperm(500)
    shuffled = splits._replace(test=splits.test.take(order))
    for name in ("accuracy", "knn", "linear_probe"):
        one, other = (next(EVALUATORS[name](vit, each))[1] for each in (splits, shuffled))
        assert one == other and np.mean(one.values[order] != other.values) <= 0.002, name  # a logit may round differently


# All evaluators


def count_hooks(model) -> int:
    return sum(len(hooks) for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks))


@all_evaluators
@pytest.mark.parametrize("kind", slow_after(2, ["cnn", "merge", "vit", "thresholds"]))
def test_the_model_is_bitwise_unchanged(evaluator, kind, splits, request):
    model = reduced_vit(kind) if kind in REDUCTIONS else request.getfixturevalue(kind)
    model.train()
    for module in list(model.modules())[1::3]:
        module.training = False  # as in a frozen part
    modes, hooks = [module.training for module in model.modules()], count_hooks(model)
    before, trainable = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    generator = torch.get_rng_state()
    assert 0 < sum(modes) < len(modes)
    dict(evaluator(model, splits))
    assert [module.training for module in model.modules()] == modes and count_hooks(model) == hooks
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters()) and [p.requires_grad for p in model.parameters()] == trainable
    assert torch.equal(generator, torch.get_rng_state())
    model.train()(splits.test.spec.normalize(splits.test.pixels(slice(0, 4)))).sum().backward()  # training goes on
    assert kind != "cnn" or any("running_mean" in name for name in before)


class LowRank(nn.Linear):
    """A layer that adds a low-rank product to its weight in evaluation, as LoRA does, and takes it away in training."""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.low_rank, self.added = nn.Parameter(torch.ones(inputs)), False

    def train(self, mode=True):
        if self.added == mode:
            self.weight.data += (-1 if mode else 1) * self.low_rank.detach()
            self.added = not mode
        return super().train(mode)

    def forward(self, x):
        return nn.functional.linear(x, self.weight if self.added else self.weight + self.low_rank, self.bias)


@pytest.mark.parametrize("outer_trains", [True, False])
def test_a_layer_that_changes_with_its_mode_can_be_trained_after_the_evaluation(splits, outer_trains):
    layer = LowRank(64, 10)
    model = nn.Sequential(nn.Flatten(), layer, nn.Dropout())
    model.training, model[2].training, layer.weight.data[:] = outer_trains, False, 0
    dict(accuracy(model, splits))
    assert [module.training for module in model.modules()] == [outer_trains, True, True, False]
    model(torch.ones(1, 1, 8, 8)).sum().backward()
    assert not layer.weight.any() and layer.low_rank.grad is not None


def test_modes_are_restored_if_the_model_raises(splits):
    class Broken(nn.Module):
        def features(self, x):
            raise ArithmeticError

    model = Broken().train()
    with pytest.raises(ArithmeticError):
        dict(knn(model, splits))
    assert model.training and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("name", slow_but(("accuracy", "knn", "linear_probe"), [name for name in EVALUATORS if name != "cost"]))  # cost measures time
def test_evaluators_are_deterministic(name, vit, splits):
    first = list(EVALUATORS[name](vit.train(), splits))
    torch.manual_seed(1)
    np.random.seed(1)
    assert list(EVALUATORS[name](vit.train(), splits)) == first == list(EVALUATORS[name](copy.deepcopy(vit).eval(), splits))


@all_evaluators
def test_names_are_unique_numbers_are_finite_and_empty_splits_are_refused(evaluator, cnn, splits):
    found = list(evaluator(cnn, splits))
    assert len({name for name, _ in found}) == len(found) >= 2
    assert all(type(name) is str and isinstance(value, float) and np.isfinite(value) for name, value in found)
    with pytest.raises(ValueError, match="no images to evaluate"):
        dict(evaluator(cnn, splits._replace(test=splits.test.take(slice(0, 0)))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["accuracy", "knn", "cost"])
def test_a_model_is_evaluated_in_its_own_precision(name, dtype, vit, splits):
    few = splits._replace(test=splits.test.take(slice(50)))
    plain, found = (dict(EVALUATORS[name](model, few)) for model in (vit, copy.deepcopy(vit).to(dtype)))
    first = next(iter(plain))
    assert plain.keys() == found.keys() and found[first] == pytest.approx(plain[first], abs=0.1)


# Cost


@pytest.mark.parametrize("kind", slow_but({*REDUCTIONS} - {"thresholds"}, REDUCTIONS))
def test_cost_is_that_of_a_forward_pass(kind, splits):
    model = reduced_vit(kind).train()
    found = dict(cost(model, splits, batch=4, repeats=1))
    names = {"none": ["macs", "ms"], "thresholds": ["macs", "macs_sd", "tokens", "ms", "speedup"]}
    assert list(found) == names.get(kind, ["macs", "flops", "tokens", "ms", "speedup"])
    assert all(type(value) is float for value in found.values()) and found["ms"] > 0 and found.get("speedup", 1) > 0
    model.eval()
    if kind == "thresholds":
        images = splits.test.spec.normalize(splits.test.pixels())
        tokens = seen_tokens(model, images)
        macs = np.array([sum(closed_form(model, rows).values()) for rows in tokens.tolist()])
        assert len(macs) == 500 and found["macs"] == pytest.approx(macs.mean())
        assert 0 < found["macs_sd"] == pytest.approx(macs.std())
        assert 2 < found["tokens"] == tokens[:, -1, 1].double().mean() < 17
    elif kind == "none":
        assert found["macs"] == footprint(model, torch.zeros(1, 1, 8, 8))["macs"]
    else:
        assert found["macs"] == sum(closed_form(model).values()) == pytest.approx(found["flops"] / 2, rel=0.02)
        assert found["tokens"] == tokens_per_layer(model)[-1][1]


def test_cost_of_a_model_without_blocks(cnn, splits):
    assert list(dict(cost(cnn, splits, repeats=1))) == ["macs", "ms"]


@pytest.mark.parametrize("options", [{"repeats": 0}, {"batch": 0}, {"batch": 2.5}], ids=str)
def test_cost_refuses_impossible_options(options, cnn, splits):
    with pytest.raises(ValueError, match=r"got batch=.* and repeats=.*; expected whole numbers of at least 1"):
        dict(cost(cnn, splits, **options))


def test_reductions_need_fewer_multiply_adds(splits):
    macs = {kind: dict(cost(reduced_vit(kind), splits, batch=2, repeats=1))["macs"] for kind in REDUCTIONS}
    assert macs["none"] == pytest.approx(macs["off"], rel=0.02)
    assert max(macs[kind] for kind in ("merge", "prune", "learned prune", "thresholds")) < 0.95 * macs["none"]
