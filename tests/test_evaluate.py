"""Evaluators: their numbers are the field's own numbers, and the model is afterwards what it was before."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, log_loss
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import nn

from smallvit import (
    Images,
    LearnedPrune,
    LearnedThresholds,
    Merge,
    PatchEmbed,
    Pixels,
    Prune,
    SmallCNN,
    Splits,
    ViT,
    accuracy,
    cost,
    data,
    features,
    initialise,
    knn,
    linear_probe,
)
from smallvit.compute import closed_form, footprint, seen_tokens, tokens_per_layer

TIMED = partial(cost, batch=4, repeats=1)
EVALUATORS = [accuracy, knn, linear_probe, partial(linear_probe, standardise=False), TIMED]
NAMES = ["accuracy", "knn", "linear_probe", "linear_probe as is", "cost"]


@pytest.fixture(scope="module")
def splits() -> Splits:
    digits = data.digits()
    drawn = digits.subset(labels=100, val=100, seed=0)
    return Splits(drawn.train, drawn.val, digits.test.open())


@pytest.fixture
def vit() -> ViT:
    model = ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2, dropout=0.5, drop_path=0.5)
    return initialise(model, 0)


@pytest.fixture
def cnn() -> SmallCNN:
    return initialise(SmallCNN((8, 8), 1, 10, width=4, hidden=16), 0)


class Table(nn.Module):
    """A model whose features are written down: those of image i are row i of a table."""

    def __init__(self, rows):
        super().__init__()
        self.register_buffer("rows", torch.as_tensor(rows, dtype=torch.float32))

    def features(self, x):
        return self.rows[(x.flatten(1) @ torch.tensor([256.0 * 255, 255.0])).round().long()]

    forward = features


def numbered(places, labels, classes=10) -> Images:
    """Images that carry their place in a table, 1 x 2 pixels."""
    places = torch.as_tensor(places).view(-1, 1, 1, 1)
    spec = data.DataSpec(
        name="t", channels=1, size=(1, 2), classes=tuple(str(k) for k in range(classes)), mean=(0.0,), std=(1.0,)
    )
    pixels = torch.cat([places // 256, places % 256], 3).to(torch.uint8)
    return Images(pixels, torch.as_tensor(labels, dtype=torch.int64), spec)


def scene(rows, labels, classes=10, n=(60, 40)) -> tuple[Table, Splits]:
    """A table as model, its first rows labelled, the next for validation, the rest to be scored."""
    labels, (train, val) = np.asarray(labels), n
    cuts = [range(train), range(train, train + val), range(train + val, len(labels))]
    return Table(rows), Splits(*(numbered(list(cut), labels[list(cut)], classes) for cut in cuts))


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


def test_accuracy_counts_the_images_of_every_batch_alike():
    """2,500 images make batches of 1,024, 1,024 and 452; only the last are wrong."""
    rows = nn.functional.one_hot(torch.arange(2500) % 10, 10) * 20.0
    labels = np.arange(2500) % 10
    labels[2048:] = (labels[2048:] + 1) % 10
    found = dict(accuracy(Table(rows), Splits(None, None, numbered(range(2500), labels))))
    assert found["accuracy"] == 2048 / 2500
    assert found["nll"] == pytest.approx(20 * 452 / 2500, rel=1e-4)


# Nearest neighbours


@pytest.mark.parametrize("seed", range(3))
def test_knn_votes_as_sklearn_does(seed):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 4, 400)
    rows = generator.normal(size=(400, 6)) + 0.7 * np.eye(4, 6)[labels]
    model, splits = scene(rows, labels, 4, n=(100, 20))
    found = dict(knn(model, splits, ks=(1, 2, 3, 4, 7, 20)))
    for k in (1, 2, 3, 4, 7, 20):
        theirs = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(rows[:100], labels[:100])
        assert found[f"knn_{k}"] == theirs.score(rows[120:], labels[120:])
    assert len(set(found.values())) > 3


def test_a_tie_goes_to_the_smaller_class_whoever_is_nearer():
    """Two neighbours of two classes: the vote is even, and class 3 is the nearer one."""
    rows = [[1, 0.1], [1, 0.2], [-1, 0.0], [1, 0.0]]
    model, splits = Table(rows), Splits(numbered(range(3), [3, 1, 0]), numbered([], []), numbered([3], [1]))
    assert dict(knn(model, splits, ks=(1, 2, 3))) == {"knn_1": 0.0, "knn_2": 1.0, "knn_3": 0.0}
    assert KNeighborsClassifier(2, metric="cosine").fit(rows[:3], [3, 1, 0]).predict(rows[3:]) == [1]


def test_knn_asks_for_directions_not_for_lengths(splits):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 3, 200)
    rows = generator.normal(size=(200, 5)) + np.eye(3, 5)[labels]
    model, splits = scene(rows, labels, 3)
    longer = Table(rows * generator.uniform(0.1, 10, (200, 1)))
    assert dict(knn(model, splits)) == dict(knn(longer, splits))


def test_a_k_beyond_the_labelled_images_is_left_out(vit, splits):
    few = splits._replace(train=splits.train.take(slice(0, 10)))
    assert list(dict(knn(vit, few))) == ["knn_1", "knn_5"]
    with pytest.raises(ValueError, match="10 labelled images"):
        dict(knn(vit, few, ks=(11, 12)))


@pytest.mark.parametrize("ks", [(), (0,), (5, 0), (-1, 3)])
def test_ks_that_mean_nothing_are_refused(ks, vit, splits):
    with pytest.raises(ValueError, match=r"ks is .* from 1 on"):
        dict(knn(vit, splits, ks=ks))


# Linear probe


def clouds(seed=0, n=400, k=4, spread=0.8):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, k, n)
    return generator.normal(size=(n, 8)) + spread * np.eye(k, 8)[labels], labels


@pytest.mark.parametrize("standardise", [True, False])
def test_the_probe_is_sklearns_with_the_c_that_validates_best(standardise):
    rows, labels = clouds()
    rows = (rows * np.logspace(-1, 1, 8)).astype(np.float32)  # features of very different size
    model, splits = scene(rows, labels, 4, n=(80, 60))
    found = dict(linear_probe(model, splits, standardise=standardise))
    scaler = StandardScaler().fit(rows[:80]) if standardise else None
    train, val, test = (scaler.transform(part) if scaler else part for part in (rows[:80], rows[80:140], rows[140:]))
    probes = {c: LogisticRegression(C=c, max_iter=2000).fit(train, labels[:80]) for c in (1e-3, 1e-2, 1e-1, 1.0, 10.0)}
    scores = {c: probe.score(val, labels[80:140]) for c, probe in probes.items()}
    best = min(c for c in scores if scores[c] == max(scores.values()))
    assert found == {"linear_probe": probes[best].score(test, labels[140:]), "linear_probe_c": best}
    assert len(set(scores.values())) > 1


def test_c_is_chosen_on_validation_images_and_never_on_test():
    """The labels of validation and test disagree: what is best for one is worst for the other."""
    generator = np.random.default_rng(1)
    labels = generator.integers(0, 2, 300)
    rows = generator.normal(size=(300, 20)) + 1.0 * labels[:, None] * (np.arange(20) == 0)
    model, splits = scene(rows, labels, 2, n=(40, 130))
    flipped = splits._replace(test=numbered(range(170, 300), 1 - labels[170:], 2))
    ours, theirs = dict(linear_probe(model, splits)), dict(linear_probe(model, flipped))
    assert ours["linear_probe_c"] == theirs["linear_probe_c"]
    assert ours["linear_probe"] == pytest.approx(1 - theirs["linear_probe"])
    swapped = dict(linear_probe(model, splits._replace(val=numbered(range(40, 170), 1 - labels[40:170], 2))))
    assert swapped["linear_probe_c"] != ours["linear_probe_c"]


def test_of_equally_good_strengths_the_smaller_is_taken_in_whatever_order_they_come():
    rows, labels = clouds(spread=30)  # anything separates these
    model, splits = scene(rows, labels, 4)
    for strengths in ((1.0, 10.0), (10.0, 1.0)):
        assert dict(linear_probe(model, splits, strengths=strengths))["linear_probe_c"] == 1.0


def test_without_validation_images_c_is_1_and_nothing_is_chosen():
    rows, labels = clouds()
    model, splits = scene(rows, labels, 4)
    bare = splits._replace(val=splits.val.take(slice(0, 0)))
    found = dict(linear_probe(model, bare))
    probe = LogisticRegression(C=1.0, max_iter=2000).fit(StandardScaler().fit_transform(rows[:60]), labels[:60])
    scaler = StandardScaler().fit(rows[:60])
    assert found == {"linear_probe": probe.score(scaler.transform(rows[100:]), labels[100:]), "linear_probe_c": 1.0}
    assert dict(accuracy(model, bare)) == dict(accuracy(model, splits))
    assert dict(knn(model, bare)) == dict(knn(model, splits))
    assert "C" in linear_probe.chooses and not hasattr(knn, "chooses") and not hasattr(accuracy, "chooses")


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_the_unit_of_the_features_does_not_matter(factor):
    rows, labels = clouds(n=1200)
    (model, splits), (scaled, _) = scene(rows, labels, 4), scene(rows * factor, labels, 4)
    ours, theirs = dict(linear_probe(model, splits)), dict(linear_probe(scaled, splits))
    assert ours["linear_probe_c"] == theirs["linear_probe_c"]
    assert abs(ours["linear_probe"] - theirs["linear_probe"]) <= 2 / 1100  # rounding may turn an image or two
    as_is = [dict(linear_probe(m, splits, standardise=False)) for m in (model, scaled)]
    assert as_is[0] != as_is[1]


def test_permuted_labels_give_chance():
    """8 shuffles of 500 images in 4 classes: the mean has a standard deviation of 0.7 points."""
    scores = []
    for seed in range(8):
        rows, labels = clouds(seed, n=600)
        model, splits = scene(rows, np.random.default_rng(seed).permutation(labels), 4)
        scores.append(dict(linear_probe(model, splits))["linear_probe"])
    assert abs(np.mean(scores) - 0.25) < 0.03


def test_a_probe_that_does_not_converge_is_no_number():
    rows = np.random.default_rng(0).normal(size=(600, 40)) * np.logspace(-2, 2, 40)
    model, splits = scene(rows, np.arange(600) % 4, 4, n=(500, 50))
    with pytest.raises(RuntimeError, match=r"C=1e\+06 did not converge .* smaller C"):
        dict(linear_probe(model, splits, strengths=(1e6,), standardise=False))


@pytest.mark.parametrize("evaluator", [knn, linear_probe])
def test_a_class_without_a_labelled_image_is_never_guessed(evaluator):
    rows, labels = clouds(n=500)
    model, splits = scene(rows, labels, 4, n=(100, 100))
    known = (splits.train.labels != 2).nonzero()[:, 0]
    lacking = splits._replace(train=splits.train.take(known))
    only_2 = lacking._replace(test=splits.test.take((splits.test.labels == 2).nonzero()[:, 0]))
    assert next(iter(dict(evaluator(model, only_2)).values())) == 0
    assert next(iter(dict(evaluator(model, splits)).values())) > next(iter(dict(evaluator(model, lacking)).values())) > 0


# All of them


@pytest.mark.parametrize("evaluator", EVALUATORS, ids=NAMES)
@pytest.mark.parametrize("kind", ["vit", "cnn", "merge", "thresholds"])
def test_the_model_is_left_bit_for_bit_as_it_was(evaluator, kind, splits, request):
    model = reduced(kind) if kind in REDUCTIONS else request.getfixturevalue(kind)
    model.train()
    for module in list(model.modules())[1::3]:
        module.training = False  # as a frozen part has it
    modes = [module.training for module in model.modules()]
    before, needs = copy.deepcopy(model.state_dict()), [p.requires_grad for p in model.parameters()]
    drawn = torch.get_rng_state()
    assert 0 < sum(modes) < len(modes)
    dict(evaluator(model, splits))
    assert [module.training for module in model.modules()] == modes
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters()) and [p.requires_grad for p in model.parameters()] == needs
    assert torch.equal(drawn, torch.get_rng_state())
    model.train()(splits.test.spec.normalise(splits.test.pixels(slice(0, 4)))).sum().backward()  # and it still learns
    assert kind != "cnn" or any("running_mean" in name for name in before)


def test_the_modes_come_back_even_when_the_model_raises(splits):
    class Broken(Table):
        def features(self, x):
            raise ArithmeticError

    model = Broken([[0.0]]).train()
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


def test_pixels_are_probed_as_they_are_and_give_no_logits(splits):
    pixels = Pixels((8, 8), 1, 10)
    images = splits.train.spec.normalise(splits.train.pixels()).flatten(1)
    assert np.array_equal(features(pixels, splits.train), images.numpy())
    assert dict(knn(pixels, splits))["knn_1"] > 0.7
    assert dict(linear_probe(pixels, splits, standardise=False))["linear_probe"] > 0.7
    with pytest.raises(ValueError, match="knn or linear_probe"):
        dict(accuracy(pixels, splits))


def test_features_are_those_that_the_head_sees(vit, splits):
    found = features(vit.train(), splits.test)
    assert found.shape == (500, 16) and found.dtype == np.float32
    with torch.no_grad():
        logits = vit.eval()(splits.test.spec.normalise(splits.test.pixels()))
        assert torch.allclose(vit.head(torch.from_numpy(found)), logits, atol=1e-5)


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
        for block in initialise(model, 0).blocks:
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
