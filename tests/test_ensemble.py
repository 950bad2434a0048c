"""DeepEnsemble: members that learn for themselves and predict together."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from toys import TINY_VIT, assert_close

from smallvit import (
    DeepEnsemble,
    Distill,
    Run,
    SmallCNN,
    Splits,
    augment,
    digits,
    fit,
    initialize,
    linear_probe,
    load,
)
from smallvit.numerics import Numerics
from smallvit.train.fit import fit_stacked

SHORT = Run(model=partial(DeepEnsemble, of=TINY_VIT, count=3), labels=30, val=10, steps=2, batch=12, augment=augment.digits())


def made(count=3, of=TINY_VIT):
    return initialize(DeepEnsemble((8, 8), 1, 10, of=of, count=count), 0)


def test_probabilities_are_the_mean_of_those_of_the_members():
    model, x = made().eval(), torch.randn(5, 1, 8, 8)
    expected = sum(F.softmax(member(x), -1) for member in model.members) / 3
    assert_close(F.softmax(model(x), -1), expected, atol=1e-6)
    assert_close(model(x), expected.log(), atol=1e-5)
    assert_close(model.features(x), torch.cat([member.features(x) for member in model.members], 1))


def test_an_ensemble_of_one_has_the_probabilities_of_its_model():
    model, x = made(1).eval(), torch.randn(5, 1, 8, 8)
    assert_close(F.softmax(model(x), -1), F.softmax(model.members[0](x), -1), atol=1e-6)


def test_members_start_from_other_weights_and_learn_from_their_own_images_alone():
    model, x, targets = made(), torch.randn(6, 1, 8, 8), torch.arange(6)
    first, second = (dict(model.members[index].named_parameters()) for index in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first)

    def gradients(images, member):
        loss = F.cross_entropy(model(images), targets)
        return torch.autograd.grad(loss, list(model.members[member].parameters()))

    changed = x.clone()
    changed[2:4] = 1.0  # the images of the second member
    for one, other in zip(gradients(x, 0), gradients(changed, 0)):
        assert torch.equal(one, other)
    assert any(not torch.equal(one, other) for one, other in zip(gradients(x, 1), gradients(changed, 1)))
    alone = torch.autograd.grad(F.cross_entropy(model.members[1](x[2:4]), targets[2:4]), list(model.members[1].parameters()))
    for one, other in zip(gradients(x, 1), alone):
        assert_close(3 * one, other, atol=1e-6)


def test_a_batch_that_cannot_be_divided_is_refused_with_one_that_can():
    model = made()
    with pytest.raises(ValueError, match=r"a batch of 7 images cannot be divided among 3 members.*batch=6"):
        model(torch.randn(7, 1, 8, 8))
    assert model.eval()(torch.randn(7, 1, 8, 8)).shape == (7, 10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"of": TINY_VIT, "count": 0}, "count of the ensemble is 0; expected a whole number, at least 1"),
        ({"of": TINY_VIT, "count": 2.0}, "count of the ensemble is 2.0"),
        ({"of": TINY_VIT((8, 8), 1, 10)}, "of is a finished ViT; expected a class"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DeepEnsemble((8, 8), 1, 10, **options)


def test_training_loading_and_predicting_give_the_same_model(tmp_path):
    record = fit(SHORT, tmp_path / "run")
    trained = load(tmp_path / "run")
    assert record.finished and len(trained.model.members) == 3
    assert record.params == 3 * sum(p.numel() for p in trained.model.members[0].parameters())
    x = torch.rand(4, 1, 8, 8)
    assert_close(trained.model(x), load(tmp_path / "run").model(x))


def test_options_of_the_ensemble_can_be_varied_and_other_models_be_members():
    five = SHORT.vary(count=5, batch=20)
    assert len(five.model((8, 8), 1, 10).members) == 5
    assert isinstance(SHORT.vary(of=SmallCNN).model((8, 8), 1, 10).members[0], SmallCNN)


def test_seeds_of_ensembles_can_be_stacked_with_the_native_kernel(tmp_path):
    runs = [SHORT.at_seed(seed) for seed in (0, 1)]
    records = fit_stacked(runs, [tmp_path / "0", tmp_path / "1"], numerics=Numerics(kernel="native"))
    assert [record.stacked for record in records] == [2, 2]
    alone = fit(runs[1], tmp_path / "alone")
    assert records[1].test["nll"] == pytest.approx(alone.test["nll"], abs=1e-3)


def test_an_ensemble_can_teach_and_be_probed(tmp_path):
    student = SHORT.vary(model=TINY_VIT, objective=partial(Distill, weight=1.0, temperature=1.0), teacher=SHORT)
    assert fit(student, tmp_path / "student").finished
    subset = digits().subset(labels=30, val=10, seed=0)
    splits = Splits(subset.train, subset.val, subset.val)
    assert 0 <= dict(linear_probe(made(), splits))["linear_probe"] <= 1
