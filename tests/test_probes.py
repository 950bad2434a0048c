"""Probes: kNN and logistic regression on frozen features are scikit-learn's own, and choose where they may."""

import hashlib
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from torch import nn

from smallvit import Images, PatchEmbed, Splits, ViT, accuracy, data, features, initialize, knn, linear_probe
from smallvit.evaluate import declaration, few_shot, probes, remembering

PROBES = [knn, linear_probe, few_shot]


@pytest.fixture(scope="module")
def splits() -> Splits:
    digits = data.digits()
    drawn = digits.subset(labels=100, val=100, seed=0)
    return Splits(drawn.train, drawn.val, digits.test.open())


@pytest.fixture
def vit() -> ViT:
    model = ViT((8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2, dropout=0.5, drop_path=0.5)
    return initialize(model, 0)


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


def test_equally_near_images_may_stand_for_one_another_and_nothing_else():
    """Every labelled image twice: scikit-learn and we may take another of two twins, which have the same label."""
    generator = np.random.default_rng(0)
    labels = np.tile(generator.integers(0, 4, 100), 2)
    rows = np.tile(generator.normal(size=(100, 6)).astype(np.float32), (2, 1))
    asked, wanted = generator.normal(size=(150, 6)), generator.integers(0, 4, 150)
    model, splits = scene(np.concatenate([rows, asked]), np.concatenate([labels, wanted]), 4, n=(200, 0))
    found = dict(knn(model, splits, ks=(2, 6, 20)))
    for k in (2, 6, 20):
        theirs = KNeighborsClassifier(k, metric="cosine", algorithm="brute").fit(rows, labels)
        assert found[f"knn_{k}"] == theirs.score(asked, wanted)


def test_knn_holds_a_few_queries_at_a_time(monkeypatch):
    rows, labels = clouds(n=600)
    model, splits = scene(rows, labels, 4, n=(100, 50))
    at_once = dict(knn(model, splits))
    monkeypatch.setattr(probes, "AT_ONCE", 7 * 100)
    held, topk = [], torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda x, k: held.append(x.numel()) or topk(x, k))
    assert dict(knn(model, splits)) == at_once and max(held) == 700 and sum(held) == 450 * 100


def test_features_that_point_almost_the_same_way_are_still_told_apart():
    """As those of an untrained model do: cosines differ from the eighth digit on, which float32 does not hold."""
    labels = np.arange(300) % 3
    rows = 1e4 + np.random.default_rng(0).normal(size=(300, 3)) * 0.1 + np.eye(3)[labels]
    model, splits = scene(rows, labels, 3, n=(150, 0))
    rows = rows.astype(np.float32).astype(float)
    theirs = KNeighborsClassifier(5, metric="cosine", algorithm="brute").fit(rows[:150], labels[:150])
    assert dict(knn(model, splits))["knn_5"] == theirs.score(rows[150:], labels[150:]) == 1


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
    rows = (rows * np.logspace(-1, 1, 8)).astype(np.float32).astype(float)  # features of very different size
    model, splits = scene(rows, labels, 4, n=(80, 60))
    found = dict(linear_probe(model, splits, standardise=standardise))
    scaler = StandardScaler().fit(rows[:80]) if standardise else None
    train, val, test = (scaler.transform(part) if scaler else part for part in (rows[:80], rows[80:140], rows[140:]))
    theirs = {
        c: LogisticRegression(C=c, tol=1e-5, max_iter=5000).fit(train, labels[:80]) for c in (1e-3, 1e-2, 1e-1, 1.0, 10.0)
    }
    scores = {c: probe.score(val, labels[80:140]) for c, probe in theirs.items()}
    best = min(c for c in scores if scores[c] == max(scores.values()))
    assert found == {
        "linear_probe": theirs[best].score(test, labels[140:]),
        "linear_probe_c": best,
        "linear_probe_edge": float(best in (1e-3, 10.0)),
        "linear_probe_iterations": theirs[best].n_iter_[0],
    }
    assert len(set(scores.values())) > 1


def test_the_probe_is_at_the_minimum_of_its_loss():
    """Written down: mean cross-entropy + |w|^2 / (2 C n), by Newton's method from zero."""
    rows, labels = clouds(n=400)
    model, splits = scene(rows, labels, 4, n=(150, 0))
    x = StandardScaler().fit(rows[:150].astype(np.float32).astype(float)).transform(rows.astype(np.float32).astype(float))
    x, y = torch.from_numpy(np.c_[x, np.ones(len(x))]), torch.from_numpy(labels)
    penalty = torch.ones(4, 9, dtype=torch.float64)
    penalty[:, -1] = 0  # the intercept is free

    def loss(w):
        return nn.functional.cross_entropy(x[:150] @ w.view(4, 9).T, y[:150]) + (penalty * w.view(4, 9) ** 2).sum() / (2 * 150)

    w = torch.zeros(36, dtype=torch.float64)
    for _ in range(30):
        slope = torch.autograd.functional.jacobian(loss, w)
        w = w - torch.linalg.lstsq(torch.autograd.functional.hessian(loss, w), slope, driver="gelsd").solution
    assert slope.abs().max() < 1e-9
    right = ((x[150:] @ w.view(4, 9).T).argmax(1) == y[150:]).double().mean().item()
    assert dict(linear_probe(model, splits))["linear_probe"] == right


@pytest.mark.parametrize("strengths", [(1e-3, 1e-2, 1e-1), (1e-1, 1.0, 1e-3), (0.1,), (1e-2, 1e-1, 1.0)], ids=str)
def test_the_edge_of_the_grid_is_said(strengths):
    """C = 0.1 is best here: at an edge of the first grid, inside the second and fourth, and all there is of the third."""
    generator = np.random.default_rng(4)
    labels = generator.integers(0, 2, 900)
    rows = generator.normal(size=(900, 40)) + 1.0 * labels[:, None] * (np.arange(40) < 2)
    model, splits = scene(rows, labels, 2, n=(60, 700))
    found = dict(linear_probe(model, splits, strengths=strengths))
    assert found["linear_probe_c"] == 0.1
    assert found["linear_probe_edge"] == (strengths == (1e-3, 1e-2, 1e-1))
    assert found["linear_probe_iterations"] == int(found["linear_probe_iterations"]) > 1


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
    scaler = StandardScaler().fit(rows[:60])
    probe = LogisticRegression(C=1.0, tol=1e-5, max_iter=5000).fit(scaler.transform(rows[:60]), labels[:60])
    assert found["linear_probe"] == probe.score(scaler.transform(rows[100:]), labels[100:])
    assert found["linear_probe_c"] == 1 and found["linear_probe_edge"] == 0
    for evaluator in (knn, partial(few_shot, shots=5)):
        assert dict(evaluator(model, bare)) == dict(evaluator(model, splits))
    assert "C" in declaration(linear_probe).chooses and not any(declaration(e).chooses for e in (knn, accuracy, few_shot))


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_the_unit_of_the_features_does_not_matter(factor):
    rows, labels = clouds(n=6200)
    (model, splits), (scaled, _) = (scene(rows * by, labels, 4, n=(150, 50)) for by in (1, factor))
    for evaluator in (knn, linear_probe, few_shot):
        ours, theirs = list(evaluator(model, splits)), list(evaluator(scaled, splits))
        assert abs(ours[0][1] - theirs[0][1]) < 0.001
    assert dict(linear_probe(model, splits))["linear_probe_c"] == dict(linear_probe(scaled, splits))["linear_probe_c"]
    as_is = [dict(linear_probe(m, splits, standardise=False)) for m in (model, scaled)]
    assert as_is[0] != as_is[1]


@pytest.mark.parametrize("evaluator", [knn, linear_probe, partial(few_shot, shots=5)], ids=["knn", "linear_probe", "few_shot"])
def test_permuted_labels_give_chance(evaluator):
    """8 shuffles of 500 images in 4 classes: the mean has a standard deviation of 0.7 points."""
    scores = []
    for seed in range(8):
        rows, labels = clouds(seed, n=600)
        model, splits = scene(rows, np.random.default_rng(seed).permutation(labels), 4)
        scores.append(next(evaluator(model, splits))[1])
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


# Few shots


def by_hand(rows, splits, shots, draws, seen=None):
    """The protocol, written down; `seen` collects the places drawn."""
    labels, scores = splits.train.labels.numpy(), []
    for draw in range(draws):
        order = sorted(range(len(labels)), key=lambda i: hashlib.sha256(f"{draw}/few_shot/{i}".encode()).digest())
        drawn = [i for k in range(4) for i in [i for i in order if labels[i] == k][:shots]]
        x = rows.astype(np.float32).astype(float)
        mean, sd = x[drawn].mean(0), x[drawn].std(0)
        probe = LogisticRegression(C=1.0, tol=1e-5, max_iter=5000).fit((x[drawn] - mean) / sd, labels[drawn])
        scores.append(probe.score((x[-len(splits.test) :] - mean) / sd, splits.test.labels.numpy()))
        if seen is not None:
            seen.append(drawn)
    return scores


@pytest.mark.parametrize("shots, draws", [(16, 5), (3, 2)])
def test_few_shot_is_the_protocol_written_down(shots, draws):
    rows, labels = clouds(n=900)
    model, splits = scene(rows, labels, 4, n=(300, 0))
    seen = []
    scores = by_hand(rows, splits, shots, draws, seen)
    found = dict(few_shot(model, splits, shots=shots, draws=draws))
    assert found == {"few_shot": pytest.approx(np.mean(scores)), "few_shot_sd": pytest.approx(np.std(scores, ddof=1))}
    assert len(set(scores)) > 1 and len({frozenset(drawn) for drawn in seen}) == draws
    for drawn in seen:
        assert np.bincount(labels[drawn]).tolist() == [shots] * 4 and len(set(drawn)) == 4 * shots


def test_every_model_gets_the_same_images_and_no_other(vit, splits, monkeypatch):
    whole = Splits(data.digits().train, splits.val, splits.test)
    looked = []

    def note(model, images, **names):
        looked.append(images.sha256)
        return features(model, images, **names)

    monkeypatch.setattr(probes, "features", note)
    first = list(few_shot(vit, whole))
    second = list(few_shot(initialize(vit, 1), whole._replace(val=whole.val.take(slice(0, 0)))))
    assert first != second and looked[:6] == looked[6:] and len(set(looked)) == 6
    assert looked[0] == splits.test.sha256 and dict(first)["few_shot"] > 0.3


def test_fewer_shots_are_among_more():
    _, labels = clouds(n=300)
    _, splits = scene(np.zeros((300, 1)), labels, 4, n=(300, 0))
    many, few = (probes.balanced(splits.train, shots, 3).tolist() for shots in (16, 4))
    assert set(few) < set(many)


def test_one_draw_has_no_spread(vit, splits):
    assert list(dict(few_shot(vit, splits, shots=2, draws=1))) == ["few_shot"]


def test_more_of_a_regularisation_is_another_number():
    rows, labels = clouds(n=600)
    model, splits = scene(rows, labels, 4, n=(200, 0))
    assert dict(few_shot(model, splits, strength=1e-4)) != dict(few_shot(model, splits))


def test_too_few_of_a_class_are_refused(vit, splits):
    with pytest.raises(ValueError, match=r"class '\d' has 10 labelled images; expected at least shots=16 of each"):
        dict(few_shot(vit, splits))
    lacking = splits._replace(train=splits.train.take((splits.train.labels != 7).nonzero()[:, 0]))
    with pytest.raises(ValueError, match="class '7' has 0 labelled images"):
        dict(few_shot(vit, lacking, shots=5))
    for choice in ({"shots": 0}, {"draws": 0}):
        with pytest.raises(ValueError, match="expected at least 1 of each"):
            dict(few_shot(vit, splits, **choice))


# All of them


@pytest.mark.parametrize(
    "names", [{"of": "mean"}, {"of": "both", "layers": 2}, {"of": "class token", "norm": "before"}], ids=str
)
@pytest.mark.parametrize("evaluator", [knn, linear_probe, partial(few_shot, shots=5)], ids=["knn", "linear_probe", "few_shot"])
def test_a_probe_reads_the_features_that_it_is_told(evaluator, names, vit, splits):
    """The same as a model that has these features and no others."""
    parts = [splits.train, splits.val, splits.test]
    rows = np.concatenate([features(vit, part, **names) for part in parts])
    cuts = np.cumsum([0, *map(len, parts)])
    written = Splits(*(numbered(range(a, b), part.labels) for part, a, b in zip(parts, cuts, cuts[1:])))
    told = dict(evaluator(vit, splits, **names))
    assert told == dict(evaluator(Table(rows), written)) and told != dict(evaluator(vit, splits))


@pytest.mark.parametrize("evaluator", PROBES)
def test_features_that_are_not_finite_are_no_number(evaluator):
    rows, labels = clouds(n=300)
    rows[7] = np.nan
    model, splits = scene(rows, labels, 4, n=(150, 50))
    with pytest.raises(ValueError, match=r"features of 1 of \d+ images are not finite"):
        dict(evaluator(model, splits))


# Remembering: what one evaluator has computed the next need not


def test_evaluators_in_a_row_say_what_each_says_alone_and_ask_the_model_once_for_each_split(vit, splits, monkeypatch):
    asked, fitted = [], []
    whole, fit = type(vit).features, probes.logistic
    monkeypatch.setattr(type(vit), "features", lambda self, x: asked.append(len(x)) or whole(self, x))
    monkeypatch.setattr(probes, "logistic", lambda *words: fitted.append(words[2]) or fit(*words))
    on_val = splits._replace(test=splits.val)
    row = [(probe, at) for at in (on_val, splits) for probe in (knn, linear_probe)]
    alone = [dict(probe(vit, at)) for probe, at in row]
    apart = sum(asked), len(fitted)
    asked.clear(), fitted.clear()
    with remembering():
        assert [dict(probe(vit, at)) for probe, at in row] == alone
    assert sum(asked) == 100 + 100 + len(splits.test) < apart[0] / 2 and len(fitted) == 5 == apart[1] / 2


def test_what_is_remembered_is_forgotten_after_and_nobody_spoils_it(vit, splits):
    with remembering():
        first = features(vit, splits.val)
        spoilt = features(vit, splits.val)
        spoilt += 1
        assert (features(vit, splits.val) == first).all(), "what one did to its features reached another"
        assert (features(vit, splits.val.take(slice(None))) == first).all()
    with torch.no_grad():
        vit.norm.bias.add_(1)
    assert not np.allclose(features(vit, splits.val), first)
