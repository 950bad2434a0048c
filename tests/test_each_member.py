"""EachMember: the members of an ensemble learn without labels, each as it would alone."""

from functools import partial

import pytest
import torch
from toys import TINY_VIT, assert_close

from smallvit import (
    DINO,
    MAE,
    SAM,
    Data2Vec,
    DeepEnsemble,
    EachMember,
    LeJEPA,
    Objective,
    Run,
    ScheduleFree,
    Supervised,
    augment,
    digits,
    features,
    fit,
    initialize,
    knn,
    label_spreading,
    load,
)
from smallvit.augment import Batch
from smallvit.objectives import Observation, Unlabelled
from smallvit.objectives.collapse import collapse_kind, collapse_statistics

SMALL_DINO = partial(DINO, prototypes=8, hidden=16, bottleneck=8, layers=1, neighbors=2, settle=0.0, koleo=0.1)
VIEWS = augment.digit_crops(local=2, size=8)
PRETRAINED = Run(
    data=digits,
    model=partial(DeepEnsemble, of=TINY_VIT, count=2),
    objective=partial(EachMember, of=SMALL_DINO),
    augment=VIEWS,
    unlabelled=True,
    steps=4,
    batch=16,
    val=50,
    clip=0.0,
    ema=0.0,
    evaluators=(knn,),
)


def batch(count=8, views=True):
    images = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    crops = torch.randn(4 * count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(images, torch.zeros(count, 10), (crops[: 2 * count], crops[2 * count :]) if views else ())


def ensemble(count=2):
    return initialize(DeepEnsemble((8, 8), 1, 10, of=TINY_VIT, count=count), 0)


@pytest.mark.parametrize("of", [SMALL_DINO, LeJEPA, MAE, Data2Vec], ids=["DINO", "LeJEPA", "MAE", "Data2Vec"])
def test_each_member_learns_as_it_would_alone(of):
    torch.manual_seed(0)
    together = EachMember(ensemble(), of=of)
    torch.manual_seed(0)
    alone = [of(member) for member in ensemble().members]
    whole = batch()
    own = [
        Batch(
            whole.images[part], whole.targets[part],
            tuple(each.reshape(2, 8, 1, 8, 8)[:, part].flatten(0, 1) for each in whole.views),
        )
        for part in (slice(4), slice(4, 8))
    ]  # fmt: skip
    together.train()
    for step in range(3):
        torch.manual_seed(step)
        loss = together(together.prepare(whole), step / 3)["loss"]
        loss.backward()
        together.before_step(step / 3)
        torch.manual_seed(step)
        prepared = [objective.train().prepare(part) for objective, part in zip(alone, own)]
        losses = [objective(part, step / 3)["loss"] for objective, part in zip(alone, prepared)]
        assert_close(loss, sum(losses), atol=1e-5)
        for objective, each in zip(alone, losses):
            each.backward()
            objective.before_step(step / 3)
        expected = {name: p.grad for i, o in enumerate(alone) for name, p in o.named_parameters(prefix=f"parts.{i}")}
        found = {name: p.grad for name, p in together.parts.named_parameters(prefix="parts")}
        assert found.keys() == expected.keys() and any(grad is not None for grad in found.values())
        for name, grad in found.items():
            assert (grad is None) == (expected[name] is None)
            assert_close(grad if grad is not None else torch.zeros(1), expected[name] if grad is not None else torch.zeros(1))
        for objective in (together, *alone):
            with torch.no_grad():
                for parameter in objective.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            objective.after_step(step / 3)
            objective.zero_grad()
    for member, objective in zip(together.model.members, alone):
        for one, other in zip(member.state_dict().values(), objective.model.state_dict().values()):
            assert_close(one, other, atol=1e-6)


def test_ensemble_of_one_learns_as_its_member_does(tmp_path):
    one = PRETRAINED.vary(model=partial(DeepEnsemble, of=TINY_VIT, count=1))
    alone = PRETRAINED.vary(model=TINY_VIT, objective=SMALL_DINO)
    torch.manual_seed(0)
    ensemble_of_one = EachMember(ensemble(1), of=SMALL_DINO)
    torch.manual_seed(0)
    member = SMALL_DINO(ensemble(1).members[0])
    assert_close(ensemble_of_one(batch(), 0.5)["loss"], member(batch(), 0.5)["loss"], atol=1e-6)
    records = [fit(run, tmp_path / name, validation_only=True) for name, run in (("one", one), ("alone", alone))]
    assert records[0].images_seen == records[1].images_seen and records[0].macs == records[1].macs


def test_members_of_a_trained_ensemble_differ_and_their_features_stand_side_by_side(tmp_path):
    fit(PRETRAINED, tmp_path, validation_only=True)
    model, images = load(tmp_path).model, digits().subset(labels=50, val=50, seed=0).train
    for of in ("head", "mean"):
        both = features(model, images, of=of)
        own = [features(member, images, of=of) for member in model.members]
        assert both.shape == (50, 2 * own[0].shape[1])
        assert_close(torch.from_numpy(both), torch.cat([torch.from_numpy(each) for each in own], 1))
        assert abs(own[0] - own[1]).max() > 0.1
    assert len(label_spreading(model, images, images, neighbors=3, of="mean")) == 50


def test_labels_spread_by_an_ensemble_are_learned_by_all_members(tmp_path):
    run = Run(
        data=digits, model=PRETRAINED.model, init=PRETRAINED, pseudo_labels=partial(label_spreading, of="mean"),
        unlabelled=True, labels=20, val=50, steps=3, batch=16, augment=augment.digits(),
    )  # fmt: skip
    record = fit(run, tmp_path, validation_only=True)
    before, after = load(tmp_path / "init").model, load(tmp_path).model
    assert 0 < record.val["accuracy"] <= 1
    for one, other in zip(before.members, after.members):
        assert not torch.equal(one.blocks[0].mlp[0].weight, other.blocks[0].mlp[0].weight)


def test_interrupted_training_of_members_continues_with_the_same_weights(tmp_path):
    class Interrupted(Exception):
        pass

    def stop(step, accuracy):
        if step == 2:
            raise Interrupted

    fit(PRETRAINED, tmp_path / "whole", validation_only=True)
    with pytest.raises(Interrupted):
        fit(PRETRAINED, tmp_path / "parts", watch=stop, validation_only=True)
    fit(PRETRAINED, tmp_path / "parts", validation_only=True)
    whole, parts = (load(tmp_path / name).model.state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


class Own(Objective):
    """Features near a number that `prepare` adds to the batch. Nothing is observed."""

    needs_labels = False

    def prepare(self, batch):
        return batch._replace(teacher_logits=(batch.images.mean((1, 2, 3)),))

    def forward(self, batch, progress):
        (goal,) = batch.teacher_logits
        return {"loss": (self.model.features(batch.images).mean(1) - goal).square().mean()}


class NeedsTeacher(Own):
    needs_teacher = True


class MoreImages(Own):
    unlabelled = Unlabelled(1, ((),))


def test_own_objective_of_a_member_keeps_what_it_adds_to_its_batch():
    whole, together = batch(8, views=False), EachMember(ensemble(), of=Own)
    alone = [Own(member) for member in ensemble().members]
    expected = sum(
        one(one.prepare(Batch(images, targets)), 0.0)["loss"]
        for one, images, targets in zip(alone, whole.images.chunk(2), whole.targets.chunk(2))
    )
    assert_close(together(together.prepare(whole), 0.0)["loss"], expected)
    assert together.observed is None and together.phase(0.5) is None


def test_a_member_of_dino_has_the_phase_of_dino():
    together = EachMember(ensemble(), of=SMALL_DINO)
    assert together.phase(0.5) == (SMALL_DINO(ensemble().members[0]).phase(0.5),) * 2


@pytest.mark.parametrize(("of", "averaged"), [(MAE, True), (LeJEPA, True), (SMALL_DINO, False)], ids=["MAE", "LeJEPA", "DINO"])
def test_schedule_free_averages_members_that_are_trained_themselves(of, averaged, tmp_path):
    views = () if of is MAE else VIEWS
    run = PRETRAINED.vary(
        objective=partial(EachMember, of=of), augment=views, optimizer=ScheduleFree, schedule="constant"
    )
    if averaged:
        assert fit(run, tmp_path, validation_only=True).finished
    else:
        with pytest.raises(ValueError, match="evaluates another model than the one it trains"):
            fit(run, tmp_path, validation_only=True)


def test_sam_takes_both_passes_of_a_step_with_the_same_draws(tmp_path):
    run = PRETRAINED.vary(objective=partial(EachMember, of=MAE), augment=(), optimizer=SAM)
    assert fit(run, tmp_path, validation_only=True).finished


def test_collapse_of_one_member_is_seen():
    varied, flat = torch.randn(16, 8), torch.ones(16, 8)
    healthy = Observation(torch.stack([varied, varied.flip(1)]))
    one_flat = Observation(torch.stack([varied, flat]))
    assert collapse_kind(collapse_statistics(healthy)) is None
    assert str(collapse_kind(collapse_statistics(one_flat))).startswith("flat")
    assert collapse_statistics(healthy) == collapse_statistics(Observation(varied))
    targets = torch.stack([torch.eye(16), torch.full((16, 16), 1 / 16)])
    uniform = Observation(torch.stack([varied, varied]), targets)
    assert str(collapse_kind(collapse_statistics(uniform))).startswith("uniform")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EachMember(TINY_VIT((8, 8), 1, 10), of=DINO), "the model is a ViT; use DeepEnsemble"),
        (lambda: EachMember(DeepEnsemble, of=DINO), "the model of EachMember is the class DeepEnsemble"),
        (lambda: EachMember(ensemble(), of=NeedsTeacher), "of is NeedsTeacher; expected an objective that needs no labels and no other"),
        (lambda: EachMember(ensemble(), of=MoreImages), "MoreImages needs images beside the batch"),
        (lambda: EachMember(ensemble(), of=Supervised), "of is Supervised; expected an objective that needs no labels"),
        (lambda: EachMember(ensemble(), of=partial(EachMember, of=DINO)), "of is EachMember; expected an objective"),
        (lambda: EachMember(ensemble(), of="DINO"), "of is 'DINO'; expected an objective that needs no labels"),
        (lambda: EachMember(ensemble(), of=SMALL_DINO)(batch(7), 0.0), "a batch of 7 images cannot be divided among 2"),
        (lambda: EachMember(ensemble(), of=SMALL_DINO)(batch(8, views=False), 0.0), "EachMember compares views and the batch has none"),
        (lambda: PRETRAINED.vary(objective=partial(EachMember, of=Supervised)), "of is Supervised"),
        (lambda: PRETRAINED.vary(objective=partial(EachMember, of=MAE)), "augment makes views and MAE reads none"),
        (lambda: PRETRAINED.vary(objective=EachMember), "of"),
    ],
    ids=["no ensemble", "a class", "teacher", "more images", "labels", "nested", "text", "batch", "no views", "run with labels", "views without need", "no objective"],
)
def test_what_cannot_be_trained_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
