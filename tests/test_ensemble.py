"""DeepEnsemble: members that learn for themselves and predict together."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from toys import TINY_VIT, assert_close

from smallvit import (
    DeepEnsemble,
    Distill,
    LearnedThresholds,
    Run,
    SemiSupervised,
    SmallCNN,
    Splits,
    augment,
    digits,
    export,
    fit,
    initialize,
    linear_probe,
    load,
)
from smallvit.flops import footprint
from smallvit.native import native_blocks, reason_against
from smallvit.numerics import Numerics
from smallvit.train.fit import fit_stacked
from smallvit.train.trained_model import too_large

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
        ({"of": TINY_VIT, "count": 0}, "count is 0; expected an integer of at least 1"),
        ({"of": TINY_VIT, "count": 2.0}, "count is 2.0"),
        ({"of": TINY_VIT((8, 8), 1, 10)}, "of is a finished ViT; expected a class"),
        ({"of": partial(DeepEnsemble, of=TINY_VIT)}, "of makes a DeepEnsemble, which has members itself"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        DeepEnsemble((8, 8), 1, 10, **options)


@pytest.mark.slow
def test_a_trained_ensemble_is_loaded_predicts_and_is_exported(tmp_path):
    record = fit(SHORT, tmp_path / "run")
    trained, test = load(tmp_path / "run"), digits().test.open()
    assert record.params == 3 * sum(p.numel() for p in trained.model.members[0].parameters())
    x = test.spec.normalize(test.pixels(slice(None)))
    members = sum(F.softmax(member(x), -1) for member in trained.model.members) / 3
    assert (members.argmax(1) == test.labels).float().mean().item() == pytest.approx(record.test["accuracy"], abs=1e-6)
    assert_close(torch.as_tensor(trained.predict_proba(test.images[:9])), members[:9], atol=1e-5)
    pytest.importorskip("onnxruntime", reason="comes with the extra export")
    assert export(trained, tmp_path / "model.onnx") < 1e-4  # the largest difference of a probability


def test_a_batch_size_that_cannot_be_divided_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ValueError, match=r"a batch of 10 images cannot be divided among 3 members; .*batch=9"):
        fit(SHORT.vary(batch=10), tmp_path / "run")


def test_multiply_adds_are_those_of_the_members_also_if_they_depend_on_the_image():
    torch.manual_seed(0)
    thresholds = partial(LearnedThresholds, merge=0.2, prune=0.8)
    model, images = made(2, partial(TINY_VIT, reduction=thresholds)).eval(), torch.randn(20, 1, 8, 8)
    each = [footprint(member, images)["macs"] for member in model.members]
    assert footprint(model, images)["macs"] == sum(each)
    assert footprint(model, images[:1])["macs"] != sum(each), "the images must need different numbers of tokens"


def test_labelled_and_unlabelled_images_in_one_batch_are_refused():
    with pytest.raises(ValueError, match="a DeepEnsemble divides a batch among its members, and SemiSupervised has labelled"):
        SemiSupervised(made(), weak=(), strong=augment.digits())


def test_a_record_that_asks_for_a_huge_ensemble_is_refused_before_it_is_made(tmp_path):
    fit(SHORT, tmp_path / "run")
    trained = load(tmp_path / "run")
    shapes = {name: tuple(tensor.shape) for name, tensor in trained.model.state_dict().items()}
    assert not too_large(SHORT, trained.preprocess, shapes)
    for change in ({"count": 10**6}, {"of": partial(TINY_VIT, depth=10**6)}):
        assert too_large(SHORT.vary(**change), trained.preprocess, shapes)


def test_options_of_the_ensemble_can_be_varied_and_other_models_be_members():
    five = SHORT.vary(count=5, batch=20)
    assert len(five.model((8, 8), 1, 10).members) == 5
    assert isinstance(SHORT.vary(of=SmallCNN).model((8, 8), 1, 10).members[0], SmallCNN)


@pytest.mark.slow
def test_seeds_of_ensembles_can_be_stacked_with_the_native_kernel(tmp_path):
    runs = [SHORT.vary(of=partial(TINY_VIT, dim=32)).at_seed(seed) for seed in (0, 1)]
    assert len(native_blocks(runs[0].model((8, 8), 1, 10))) == (0 if reason_against() else 3)
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
