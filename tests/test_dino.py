"""DINO: the loss, the centre, the gradients and the steps are lightly's; the teacher only follows."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from smallvit import (
    Attention,
    ConvStem,
    MeanTokens,
    Merge,
    PatchEmbed,
    Projected,
    Prune,
    Run,
    ShiftedPatchEmbed,
    SmallCNN,
    ViT,
    augment,
)
from smallvit.augment import Batch, MultiCrop, Warp
from smallvit.objectives import DINO

# no bias in the keys: it moves no softmax, and Adam would make full steps of its rounding
ATTENTION = partial(Attention, qkv_bias=False)
VIT = partial(ViT, (8, 8), 1, 10, tokenizer=partial(PatchEmbed, patch=2), attention=ATTENTION, dim=16, depth=2, heads=2)
SMALL = {"prototypes": 12, "hidden": 16, "bottleneck": 8}


def batch(b=6, local=2, size=4, image=8, channels=1, seed=0) -> Batch:
    torch.manual_seed(seed)
    views = (torch.randn(2 * b, channels, image, image), torch.randn(local * b, channels, size, size))
    return Batch(torch.randn(b, channels, image, image), torch.ones(b, 10) / 10, views if local else views[:1])


def objective(**knobs) -> DINO:
    torch.manual_seed(3)
    return DINO(VIT(), **SMALL | knobs).train()


def state(module: nn.Module) -> dict:
    return {name: value.clone() for name, value in module.state_dict().items()}


# As lightly does it


def test_a_head_whose_hidden_layers_the_model_keeps_is_the_same_head():
    """Loss, gradients and teacher of `Projected` with a shallow head are those of a deep head on the bare pool."""
    kept = DINO(VIT(pool=partial(Projected, pool=MeanTokens, hidden=16)), layers=1, **SMALL, clip=0.0)
    bare = DINO(VIT(pool=MeanTokens), **SMALL, clip=0.0)
    for shallow, whole in ((kept.student, bare.student), (kept.model, bare.model)):
        pool = {name: tensor for name, tensor in shallow.state_dict().items() if name.startswith("pool.")}
        shallow.load_state_dict({**whole.state_dict(), **pool, "head.weight": shallow.head.weight.detach()}, strict=True)
    for model, small, large in ((kept.student, kept.head, bare.head), (kept.model, kept.teacher_head, bare.teacher_head)):
        model.pool.layers.load_state_dict({n: t for n, t in large.layers.state_dict().items() if int(n.split(".")[0]) < 6})
        small.layers[0].load_state_dict(large.layers[6].state_dict())
        small.last_layer.load_state_dict(large.last_layer.state_dict())
    one, other = (made.double().train() for made in (kept, bare))
    for step in range(3):
        given = batch(seed=step, local=0)  # BatchNorm in the model sees views of one size, in the head those of all
        given = given._replace(images=given.images.double(), views=tuple(views.double() for views in given.views))
        losses = [made(given, 0.5)["loss"] for made in (one, other)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-10)
        for made, loss in zip((one, other), losses):
            made.zero_grad()
            loss.backward()
        wanted = other.head.layers[0].weight.grad
        assert wanted.abs().max() > 1e-6 and torch.allclose(one.student.pool.layers[0].weight.grad, wanted, atol=1e-12)
        first = "blocks.0.mlp.0.weight"
        grads = [dict(made.student.named_parameters())[first].grad for made in (one, other)]
        assert torch.allclose(*grads, atol=1e-12)
    assert kept.student.features(torch.randn(2, 1, 8, 8).double()).shape == (2, 16)
    with pytest.raises(ValueError, match="layers is 2; expected 3, or 1"):
        objective(layers=2)


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("local", [0, 2])
def test_four_steps_are_lightlys(local, batch_norm):
    """One view at a time, with lightly's head, loss and momentum update, as its example does it but for the order of the update."""
    from lightly.loss import DINOLoss
    from lightly.models.modules import DINOProjectionHead
    from lightly.models.utils import update_momentum

    knobs = SMALL | {"batch_norm": batch_norm}
    mine = objective(batch_norm=batch_norm, momentum=0.9, warm_temp=0.04, teacher_temp=0.07, warmup=0.5, freeze=0.3, clip=0.0)
    mine.double()  # Adam makes full steps of what is rounding in float32
    student, teacher = copy.deepcopy(mine.student), copy.deepcopy(mine.student)
    head, teacher_head = (
        DINOProjectionHead(16, 16, 8, 12, batch_norm=batch_norm, freeze_last_layer=1).double() for _ in range(2)
    )
    head.load_state_dict(mine.head.state_dict())
    teacher_head.load_state_dict(mine.head.state_dict())
    loss_of = DINOLoss(12, teacher_temp=0.07, warmup_teacher_temp=0.04).double()
    theirs = [*student.parameters(), *head.parameters()]
    ours = torch.optim.AdamW([p for p in mine.parameters() if p.requires_grad], lr=0.01)
    yours = torch.optim.AdamW([p for p in theirs if p.requires_grad], lr=0.01)

    for step in range(4):
        given, progress = batch(local=local, seed=step), step / 4
        given = given._replace(images=given.images.double(), views=tuple(views.double() for views in given.views))
        loss = mine(given, progress)["loss"]
        ours.zero_grad()
        loss.backward()
        mine.before_step(progress)

        # BatchNorm sees what a head is called with, and ours is called once for all views of the student and once for the teacher's
        crops = [crop for group in given.views for crop in group.split(6)]
        wanted = teacher_head(torch.cat([teacher.features(x) for x in crops[:2]])).split(6)
        found = head(torch.cat([student.features(x) for x in crops])).split(6)
        expected = loss_of([x.detach() for x in wanted], list(found), teacher_temp=mine.temperature(progress))
        yours.zero_grad()
        expected.backward()
        head.cancel_last_layer_gradients(0 if progress < 0.3 else 1)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
        torch.testing.assert_close(mine.loss.center, loss_of.center)
        grads = {id(p): p.grad for p in mine.parameters()}
        for p, q in zip([*mine.student.parameters(), *mine.head.parameters()], theirs):
            assert (grads[id(p)] is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(grads[id(p)], q.grad, rtol=1e-5, atol=1e-8)  # lightly's temperature is float32

        ours.step(), yours.step()
        mine.after_step((step + 1) / 4)
        m = 1 - 0.1 * (math.cos(math.pi * (step + 1) / 4) + 1) / 2
        update_momentum(student, teacher, m)
        update_momentum(head, teacher_head, m)
        for module, other in (
            (mine.student, student),
            (mine.head, head),
            (mine.model, teacher),
            (mine.teacher_head, teacher_head),
        ):
            for p, q in zip(module.parameters(), other.parameters()):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert knobs["prototypes"] == 12


def test_koleo_is_lightlys_on_each_global_view():
    from lightly.loss import KoLeoLoss

    plain, spread, given = objective(), objective(koleo=0.3), batch()
    first, second = spread.student.features(given.views[0]).split(6)
    expected = 0.3 * (KoLeoLoss()(first) + KoLeoLoss()(second)) / 2
    assert (spread(given, 0.0)["loss"] - plain(given, 0.0)["loss"]).item() == pytest.approx(expected.item(), abs=1e-5)


# Neighbours


def test_without_neighbours_nothing_is_kept_and_until_they_settle_nothing_changes():
    plain, other = objective(), objective(neighbours=2, settle=0.5, bank=8)
    assert not [name for name in plain.state_dict() if "bank" in name]
    for step in range(3):
        losses = [made(batch(seed=step), step / 10)["loss"] for made in (plain, other)]
        assert losses[0].item() == losses[1].item() and torch.equal(plain.loss.center, other.loss.center)
    assert objective(neighbours=2, share=0.0, settle=0.0, bank=8)(batch(), 0.1)["loss"].isfinite()


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_a_target_is_shared_with_the_nearest_images_of_the_bank(share):
    """Against a loop over images: who is nearest, what the teacher says of them now, the cross-entropy, pair by pair."""
    made = objective(neighbours=3, share=share, settle=0.25, bank=10, batch_norm=False, koleo=0.0).eval()
    bank: list[tuple] = []
    for step in range(4):  # 24 images into a bank of 10
        given = batch(seed=step, local=0)
        with torch.no_grad():
            whole = [torch.nn.functional.normalize(made.model.features(x[None])[0], dim=0) for x in given.images]
            heads = [
                torch.nn.functional.normalize(made.teacher_head.layers(made.model.features(x[None])), dim=1)
                for x in given.images
            ]
        nearest = [sorted(bank, key=lambda other: -float(whole[at] @ other[0]))[:3] for at in range(6)]
        if step == 3:
            center, temperature = made.loss.center[0].clone(), made.temperature(0.7)
            targets = []
            for at in range(6):
                said = [((made.teacher_head.last_layer(place) - center) / temperature).softmax(-1) for _, place in nearest[at]]
                both = []
                for view in (given.views[0][at], given.views[0][6 + at]):
                    own = ((made.teacher_head(made.model.features(view[None])) - center) / temperature).softmax(-1)
                    both.append(((1 - share) * own + share * sum(said) / len(said))[0])
                targets.append(both)
            student = [made.head(made.student.features(views)).div(0.1).log_softmax(-1) for views in given.views[0].split(6)]
            wanted = sum(-(targets[at][v] * student[1 - v][at]).sum() for at in range(6) for v in (0, 1)) / 12
            raw = made.teacher_head(made.model.features(given.views[0])).mean(0)
        found = made(given, 0.2 * step + 0.1)["loss"]
        bank = (bank + list(zip(whole, heads)))[-10:]
    assert found.item() == pytest.approx(wanted.item(), rel=1e-4)
    assert torch.allclose(made.loss.center[0, 0], 0.9 * center[0] + 0.1 * raw, atol=1e-6)  # of the teacher's own words alone


def test_an_image_is_no_neighbour_of_its_own():
    """With one image again and again nobody else is there to learn from, and the plain loss is left."""
    plain, made = objective(batch_norm=False), objective(neighbours=1, settle=0.0, bank=8, batch_norm=False)
    for _ in range(3):
        losses = [one(batch(b=1), 0.5)["loss"] for one in (plain, made)]
        assert losses[0].item() == losses[1].item()
    for one in (plain, made):
        one(batch(b=1, seed=1), 0.5)
    assert made(batch(b=1), 0.5)["loss"].item() != plain(batch(b=1), 0.5)["loss"].item()
    with pytest.raises(ValueError, match="the bank holds 4 images and a batch 6"):
        objective(neighbours=2, bank=4)(batch(), 0.5)


def test_neighbours_are_those_before_the_projection_that_a_model_keeps():
    made = DINO(VIT(pool=partial(Projected, pool=MeanTokens, hidden=12)), layers=1, **SMALL, neighbours=1, bank=8).eval()
    given = batch(local=0)
    made(given, 0.0)
    tokens, _ = made.model.tokens(given.images)
    assert torch.allclose(made.bank_features[:6], nn.functional.normalize(tokens.mean(1), dim=-1), atol=1e-6)
    behind = nn.functional.normalize(made.teacher_head.layers(made.model.features(given.images)), dim=-1)
    assert torch.allclose(made.bank_places[:6], behind, atol=1e-6)


def test_the_bank_is_in_the_checkpoint_and_bad_numbers_are_refused():
    one, other = objective(neighbours=2, bank=8), objective(neighbours=2, bank=8)
    one(batch(), 0.1)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.bank_features, other.bank_features) and one.banked == other.banked == 6
    for knobs, said in (({"neighbours": 9, "bank": 8}, "neighbours is 9"), ({"share": 1.5}, "share is 1.5")):
        with pytest.raises(ValueError, match=said):
            objective(**knobs)


# By the paper's equations


def test_the_loss_is_the_mean_over_pairs_of_different_views():
    mine, given = objective(batch_norm=False), batch(local=2)
    crops = [crop for group in given.views for crop in group.split(6)]
    wanted = [(mine.teacher_head(mine.model.features(x)) / 0.04).softmax(-1) for x in crops[:2]]
    said = [(mine.head(mine.student.features(x)) / 0.1).log_softmax(-1) for x in crops]
    pairs = [-(wanted[i] * said[j]).sum(-1).mean() for i in range(2) for j in range(4) if i != j]
    assert len(pairs) == 6
    assert mine(given, 0.0)["loss"].item() == pytest.approx((sum(pairs) / 6).item(), abs=1e-5)


def test_a_teacher_that_knows_nothing_costs_log_k():
    mine, given = objective(batch_norm=False, teacher_temp=10.0, warm_temp=10.0, student_temp=10.0), batch()
    for head in (mine.head, mine.teacher_head):
        head.last_layer.weight_v.data.fill_(1.0)
    assert mine(given, 0.0)["loss"].item() == pytest.approx(math.log(12), abs=1e-5)


def test_the_same_view_at_the_same_temperature_costs_the_entropy():
    mine = objective(batch_norm=False, teacher_temp=0.1, warm_temp=0.1)
    x = torch.randn(6, 1, 8, 8)
    p = (mine.head(mine.student.features(x)) / 0.1).softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean()
    assert mine(Batch(x, torch.ones(6, 10) / 10, (torch.cat([x, x]),)), 0.0)["loss"].item() == pytest.approx(
        entropy.item(), abs=1e-4
    )


# The teacher


def test_the_teacher_starts_equal_and_shares_nothing():
    mine = objective()
    pairs = [
        *zip(mine.model.parameters(), mine.student.parameters()),
        *zip(mine.teacher_head.parameters(), mine.head.parameters()),
    ]
    assert len(pairs) > 20
    for teacher, student in pairs:
        assert torch.equal(teacher, student) and teacher.data_ptr() != student.data_ptr() and not teacher.requires_grad
    mine(batch(), 0.0)["loss"].backward()
    assert all(teacher.grad is None for teacher, _ in pairs)


@pytest.mark.parametrize(("momentum", "follows"), [(1.0, False), (0.0, True)])
def test_momentum_one_stays_and_momentum_zero_copies(momentum, follows):
    mine = objective(momentum=momentum)
    before = state(mine.model)
    with torch.no_grad():
        for p in [*mine.student.parameters(), *mine.head.parameters()]:
            p.add_(1.0)
    mine.after_step(0.0)
    after = state(mine.model)
    for name, student in mine.student.state_dict().items():
        assert torch.allclose(after[name], student if follows else before[name])


def test_momentum_rises_to_one_over_the_run():
    mine = objective(momentum=0.5)
    moved = []
    for progress in (0.0, 0.5, 1.0):
        before = state(mine.model)["norm.bias"]
        with torch.no_grad():
            mine.student.norm.bias.copy_(before + 1)
        mine.after_step(progress)
        moved.append((state(mine.model)["norm.bias"] - before).mean().item())
    assert moved == pytest.approx([0.5, 0.25, 0.0], abs=1e-6)


def test_the_teacher_has_neither_dropout_nor_drop_path():
    torch.manual_seed(0)
    mine = DINO(VIT(dropout=0.5, drop_path=0.5), **SMALL).train()
    batch_norm = DINO(SmallCNN((8, 8), 1, 10), **SMALL).train().model.body[1]
    assert isinstance(batch_norm, nn.BatchNorm2d) and batch_norm.training
    assert mine.student.training and not any(module.training for module in mine.model.modules())
    x = batch().views[0]
    assert torch.equal(mine.model.features(x), mine.model.features(x))
    assert not torch.equal(mine.student.features(x), mine.student.features(x))


def test_the_teacher_is_what_is_saved():
    mine = objective(momentum=0.0)
    assert mine.model is not mine.student and mine.model.head.weight.shape == (10, 16)


# Gradients


def test_every_parameter_is_cut_on_its_own():
    mine = objective(clip=0.01, freeze=0.0)
    (100 * mine(batch(), 0.5)["loss"]).backward()
    uncut = {name: p.grad.norm().item() for name, p in mine.named_parameters() if p.grad is not None}
    mine.before_step(0.5)
    cut = {name: p.grad.norm().item() for name, p in mine.named_parameters() if p.grad is not None}
    assert sum(norm > 0.01 for norm in uncut.values()) > 5
    assert all(cut[name] == pytest.approx(min(uncut[name], 0.01), rel=1e-3, abs=1e-5) for name in uncut)


def test_the_last_layer_rests_at_first():
    mine = objective(freeze=0.5)
    for progress, rests in ((0.0, True), (0.49, True), (0.5, False)):
        mine.zero_grad()
        mine(batch(), progress)["loss"].backward()
        mine.before_step(progress)
        assert (mine.head.last_layer.weight_v.grad is None) == rests
    assert not mine.head.last_layer.weight_g.requires_grad
    assert objective(norm_last_layer=False).head.last_layer.weight_g.requires_grad


def test_the_teachers_temperature_rises_in_a_line():
    mine = objective(warm_temp=0.02, teacher_temp=0.06, warmup=0.4)
    assert [mine.temperature(p) for p in (0.0, 0.2, 0.4, 1.0)] == pytest.approx([0.02, 0.04, 0.06, 0.06])


# MultiCrop of several sizes


def test_views_of_one_size_are_one_forward_and_equal_many():
    mine, given = objective(), batch(local=3)
    calls = []
    mine.student.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    mine.eval()
    together = [mine.student.features(group) for group in given.views]
    assert len(calls) == 2
    for group, features in zip(given.views, together):
        alone = torch.cat([mine.student.features(view) for view in group.split(6)])
        torch.testing.assert_close(alone, features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("image", [(28, 28), (32, 32), (24, 40)], ids=str)
@pytest.mark.parametrize(
    "tokenizer", [partial(PatchEmbed, patch=4), partial(ShiftedPatchEmbed, patch=4), ConvStem], ids=["patch", "spt", "stem"]
)
def test_every_image(channels, image, tokenizer):
    model = ViT(image, channels, 5, tokenizer=tokenizer, dim=16, depth=1, heads=2, pool=MeanTokens, registers=1)
    mine = DINO(model, **SMALL).train()
    views = MultiCrop(first=(Warp(crop=(0.4, 1.0)),), small=(Warp(crop=(0.2, 0.5), size=(12, 16)),), local=2)
    given = views(Batch(torch.rand(3, channels, *image), torch.ones(3, 5) / 5), torch.Generator().manual_seed(0))
    assert [tuple(v.shape) for v in given.views] == [(6, channels, *image), (6, channels, 12, 16)]
    mine(given, 0.0)["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in mine.student.named_parameters() if "head" not in n)


def test_a_local_view_that_the_patches_do_not_tile_says_what_fits():
    with pytest.raises(ValueError, match=r"patches of 2 pixels do not tile an image of 5 x 5; .* 4 x 4 or 6 x 6"):
        objective()(batch(size=5), 0.0)


def test_with_merged_tokens_small_views_work():
    torch.manual_seed(0)
    mine = DINO(VIT(reduction=partial(Merge, r=3)), **SMALL).train()
    mine(batch(local=2), 0.0)["loss"].backward()


def test_a_cnn_can_be_the_model():
    mine = DINO(SmallCNN((8, 8), 1, 10), **SMALL).train()
    mine(batch(local=0), 0.0)["loss"].backward()
    mine.after_step(0.1)


# Bad input


def test_no_views():
    with pytest.raises(ValueError, match=r"compares views .* expected augment=augment\.digit_crops"):
        objective()(batch()._replace(views=()), 0.0)


@pytest.mark.parametrize(
    "knob", ["freeze", "momentum", "warmup", "clip", "center_momentum", "student_temp", "teacher_temp", "warm_temp", "koleo"]
)
def test_a_knob_out_of_range_is_named(knob):
    with pytest.raises(ValueError, match=f"^{knob} is -1"):
        objective(**{knob: -1})


def test_a_model_without_features():
    with pytest.raises(ValueError, match="Linear has no features"):
        DINO(nn.Linear(2, 2))


def test_it_can_be_copied_and_loaded():
    mine = objective()
    mine(batch(), 0.0)["loss"].backward()
    copy.deepcopy(mine.model)  # a head that has run cannot be copied: torch's norm of weights does not allow it
    other = objective(momentum=0.5)
    other.load_state_dict(mine.state_dict())
    torch.testing.assert_close(other.loss.center, mine.loss.center)


def test_a_run_of_it_reads_no_label():
    run = Run(objective=DINO, augment=augment.digit_crops(size=4), clip=0.0)
    assert not run.reads_labels and [e.__name__ for e in run.evaluators] == ["knn", "linear_probe"]


def test_the_student_reduces_as_the_progress_says_and_the_teacher_as_it_is_evaluated():
    objective = DINO(VIT(reduction=partial(Prune, shrink=(0.0, 0.9))), **SMALL).train()
    for progress in (0.1, 0.5):
        objective(batch(), progress)
        assert {block.reduction.progress for block in objective.student.blocks} == {progress}
        assert {block.reduction.progress for block in objective.model.blocks} == {1.0}
