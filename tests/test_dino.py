"""DINO: loss, center, gradients and steps are those of lightly; the teacher is an exponential moving average."""

import copy
import math
from functools import partial

import pytest
import torch
from lightly.loss import DINOLoss, IBOTPatchLoss, KoLeoLoss
from lightly.models.modules import DINOProjectionHead
from lightly.models.utils import update_momentum
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import normalize
from toys import MOVES, check_average_after_a_move, slow_after, tiny_vit

from smallvit import augment
from smallvit.attention import Attention
from smallvit.augment import Batch, MultiCrop, Warp
from smallvit.objectives import DINO
from smallvit.objectives.dino_parts import image_hashes
from smallvit.objectives.mae import pixels_of_patches
from smallvit.pooling import MeanTokens, Projected
from smallvit.reduction import Merge, Prune
from smallvit.references import SmallCNN
from smallvit.run import Run, fingerprint
from smallvit.tokenizers import ConvStem, PatchEmbed, ShiftedPatchEmbed
from smallvit.vit import ViT

# without a bias of the keys, which does not change the softmax; Adam would amplify its rounding errors
VIT = partial(tiny_vit, (8, 8), classes=10, attention=partial(Attention, qkv_bias=False))
PROJECTED = partial(VIT, pool=partial(Projected, pool=MeanTokens, hidden=16))
SMALL = {"prototypes": 12, "hidden": 16, "bottleneck": 8}


def make_batch(b=6, local=2, size=4, seed=0, dtype=torch.float32) -> Batch:
    torch.manual_seed(seed)
    views = torch.randn(2 * b, 1, 8, 8).to(dtype), torch.randn(local * b, 1, size, size).to(dtype)
    return Batch(torch.randn(b, 1, 8, 8).to(dtype), torch.ones(b, 10) / 10, views if local else views[:1])


def make_dino(vit=VIT, **options) -> DINO:
    torch.manual_seed(3)
    return DINO(vit(), **SMALL | options).train()


def parameter_pairs(dino):
    """Pairs of a teacher's and a student's parameter."""
    models = (dino.model, dino.student), (dino.teacher_head, dino.head)
    return [pair for teacher, student in models for pair in zip(teacher.parameters(), student.parameters())]


def crops(batch):
    """The views as tensors of six images each."""
    return [crop for views in batch.views for crop in views.split(6)]


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("vit", slow_after(1, [PROJECTED, VIT]), ids=["batch norm", "plain"])
def test_the_teacher_follows_the_student_after_a_move(vit, move):
    check_average_after_a_move(make_dino(vit, momentum=0.0), move)


# As in lightly


@pytest.mark.parametrize(("local", "batch_norm"), slow_after(2, [(2, True), (0, False), (2, False), (0, True)]))
def test_four_steps_are_those_of_lightly(local, batch_norm):
    """With lightly's head, loss and EMA update, as in its example except that the update comes after the step."""
    dino = make_dino(batch_norm=batch_norm, momentum=0.9, teacher_temp=0.07, warmup=0.5, freeze=0.3, clip=0.0)
    dino.double()  # in float32 Adam would amplify rounding errors
    student, teacher = copy.deepcopy(dino.student), copy.deepcopy(dino.student)
    head, teacher_head = (
        DINOProjectionHead(16, 16, 8, 12, batch_norm=batch_norm, freeze_last_layer=1).double() for _ in range(2)
    )
    for module in (head, teacher_head):
        module.load_state_dict(dino.head.state_dict())
    criterion = DINOLoss(12, teacher_temp=0.07, warmup_teacher_temp=0.04).double()
    expected_parameters = [*student.parameters(), *head.parameters()]
    parameters = [*dino.student.parameters(), *dino.head.parameters()]
    optimizers = [
        torch.optim.AdamW([p for p in group if p.requires_grad], lr=0.01) for group in (parameters, expected_parameters)
    ]

    for step in range(4):
        batch, progress = make_batch(local=local, seed=step, dtype=torch.float64), step / 4
        loss = dino(batch, progress)["loss"]
        # BatchNorm in the head sees all views of the student together, and both views of the teacher
        targets = teacher_head(torch.cat([teacher.features(x) for x in crops(batch)[:2]])).split(6)
        outputs = head(torch.cat([student.features(x) for x in crops(batch)])).split(6)
        expected = criterion([x.detach() for x in targets], list(outputs), teacher_temp=dino.temperature(progress))
        for optimizer, value in zip(optimizers, (loss, expected)):
            optimizer.zero_grad()
            value.backward()
        dino.before_step(progress)
        head.cancel_last_layer_gradients(0 if progress < 0.3 else 1)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
        torch.testing.assert_close(dino.loss.center, criterion.center)
        for p, q in zip(parameters, expected_parameters):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-8)  # lightly's temperature is float32

        for optimizer in optimizers:
            optimizer.step()
        dino.after_step((step + 1) / 4)
        momentum = 1 - 0.1 * (math.cos(math.pi * (step + 1) / 4) + 1) / 2
        update_momentum(student, teacher, momentum)
        update_momentum(head, teacher_head, momentum)
        pairs = (dino.student, student), (dino.head, head), (dino.model, teacher), (dino.teacher_head, teacher_head)
        for module, other in pairs:
            for p, q in zip(module.parameters(), other.parameters()):
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_koleo_is_that_of_lightly_on_each_global_view():
    plain, spread, batch = make_dino(), make_dino(koleo=0.3), make_batch()
    first, second = spread.student.features(batch.views[0]).split(6)
    expected = 0.3 * (KoLeoLoss()(first) + KoLeoLoss()(second)) / 2
    assert (spread(batch, 0.0)["loss"] - plain(batch, 0.0)["loss"]).item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_projected_pool_with_one_head_layer_is_the_full_head():
    """Loss and gradients of `Projected` with `layers=1` are those of a head with hidden layers after the plain pool."""
    projected = make_dino(PROJECTED, layers=1, clip=0.0)
    plain = make_dino(partial(VIT, pool=MeanTokens), clip=0.0)
    for model, other in ((projected.student, plain.student), (projected.model, plain.model)):
        pool = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("pool.")}
        model.load_state_dict({**other.state_dict(), **pool, "head.weight": model.head.weight.detach()}, strict=True)
    for model, head, full_head in (
        (projected.student, projected.head, plain.head),
        (projected.model, projected.teacher_head, plain.teacher_head),
    ):
        hidden = {name: tensor for name, tensor in full_head.layers.state_dict().items() if int(name.split(".")[0]) < 6}
        model.pool.layers.load_state_dict(hidden)
        head.layers[0].load_state_dict(full_head.layers[6].state_dict())
        head.last_layer.load_state_dict(full_head.last_layer.state_dict())
    projected.double(), plain.double()
    for step in range(3):  # without local views: BatchNorm in the model sees views of one size, in the head all views
        batch = make_batch(seed=step, local=0, dtype=torch.float64)
        losses = [dino(batch, 0.5)["loss"] for dino in (projected, plain)]
        assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-10)
        for dino, loss in zip((projected, plain), losses):
            dino.zero_grad()
            loss.backward()
        expected = plain.head.layers[0].weight.grad
        assert expected.abs().max() > 1e-6
        assert torch.allclose(projected.student.pool.layers[0].weight.grad, expected, atol=1e-12)
        gradients = [dino.student.get_parameter("blocks.0.mlp.0.weight").grad for dino in (projected, plain)]
        assert torch.allclose(*gradients, atol=1e-12)
    assert projected.student.features(torch.randn(2, 1, 8, 8).double()).shape == (2, 16)


# Neighbors


def test_neighbors_change_nothing_before_the_run_has_settled():
    plain, other = make_dino(), make_dino(neighbors=2, settle=0.5, bank=8)
    assert not [name for name in plain.state_dict() if "bank" in name]
    for step in range(3):
        losses = [dino(make_batch(seed=step), step / 10)["loss"] for dino in (plain, other)]
        assert losses[0].item() == losses[1].item() and torch.equal(plain.loss.center, other.loss.center)
    assert make_dino(neighbors=2, share=0.0, settle=0.0, bank=8)(make_batch(), 0.1)["loss"].isfinite()


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_targets_with_neighbors_by_hand(share):
    """A loop over images: the nearest images, the current teacher's outputs for them, the cross-entropy of each pair."""
    dino = make_dino(neighbors=3, share=share, settle=0.25, bank=10, batch_norm=False, koleo=0.0).eval()
    bank: list[tuple] = []
    for step in range(4):  # 24 images for a bank of 10
        batch = make_batch(seed=step, local=0)
        with torch.no_grad():
            rows = [dino.model.features(x[None]) for x in batch.images]
            features = [normalize(row[0], dim=0) for row in rows]
            projections = [normalize(dino.teacher_head.layers(row), dim=1) for row in rows]
        nearest = [sorted(bank, key=lambda other: -float(features[i] @ other[0]))[:3] for i in range(6)]
        if step == 3:
            center, temperature = dino.loss.center[0].clone(), dino.temperature(0.7)
            targets = []
            for i in range(6):
                others = [((dino.teacher_head.last_layer(x) - center) / temperature).softmax(-1) for _, x in nearest[i]]
                pair = []
                for view in (batch.views[0][i], batch.views[0][6 + i]):
                    own = ((dino.teacher_head(dino.model.features(view[None])) - center) / temperature).softmax(-1)
                    pair.append(((1 - share) * own + share * sum(others) / len(others))[0])
                targets.append(pair)
            student = [dino.head(dino.student.features(views)).div(0.1).log_softmax(-1) for views in batch.views[0].split(6)]
            expected = sum(-(targets[i][v] * student[1 - v][i]).sum() for i in range(6) for v in (0, 1)) / 12
            mean = dino.teacher_head(dino.model.features(batch.views[0])).mean(0)
        loss = dino(batch, 0.2 * step + 0.1)["loss"]
        bank = (bank + list(zip(features, projections)))[-10:]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert torch.allclose(dino.loss.center[0, 0], 0.9 * center[0] + 0.1 * mean, atol=1e-6)  # of the teacher's own outputs


def test_an_image_is_not_its_own_neighbor():
    """While all batches have the same single image, there is no neighbor and the loss is the plain one."""
    plain, dino = make_dino(batch_norm=False), make_dino(neighbors=1, settle=0.0, bank=8, batch_norm=False)
    for seed, equal in ((0, True), (0, True), (0, True), (1, False), (0, False)):
        losses = [made(make_batch(b=1, seed=seed), 0.5)["loss"].item() for made in (plain, dino)]
        assert (losses[0] == losses[1]) == equal


def test_the_bank_has_features_before_and_after_the_projection_and_is_saved():
    dino = make_dino(PROJECTED, layers=1, neighbors=1, bank=8).eval()
    batch = make_batch(local=0)
    dino(batch, 0.0)
    tokens, _ = dino.model.tokens(batch.images)
    assert torch.allclose(dino.bank.features[:6], normalize(tokens.mean(1), dim=-1), atol=1e-6)
    projections = normalize(dino.teacher_head.layers(dino.model.features(batch.images)), dim=-1)
    assert torch.allclose(dino.bank.projections[:6], projections, atol=1e-6)
    loaded = make_dino(PROJECTED, layers=1, neighbors=1, bank=8)
    loaded.load_state_dict(dino.state_dict())
    assert torch.equal(loaded.bank.features, dino.bank.features) and loaded.bank.count == dino.bank.count == 6


# By the equations of the paper


def test_the_loss_is_the_mean_over_pairs_of_different_views():
    dino, batch = make_dino(batch_norm=False), make_batch(local=2)
    targets = [(dino.teacher_head(dino.model.features(x)) / 0.04).softmax(-1) for x in crops(batch)[:2]]
    outputs = [(dino.head(dino.student.features(x)) / 0.1).log_softmax(-1) for x in crops(batch)]
    pairs = [-(targets[i] * outputs[j]).sum(-1).mean() for i in range(2) for j in range(4) if i != j]
    assert len(pairs) == 6
    assert dino(batch, 0.0)["loss"].item() == pytest.approx((sum(pairs) / 6).item(), abs=1e-5)


def test_a_uniform_teacher_has_the_loss_log_k():
    dino = make_dino(batch_norm=False, teacher_temp=10.0, warm_temp=10.0, student_temp=10.0)
    for head in (dino.head, dino.teacher_head):
        head.last_layer.weight_v.data.fill_(1.0)
    assert dino(make_batch(), 0.0)["loss"].item() == pytest.approx(math.log(12), abs=1e-5)


def test_equal_views_and_temperatures_have_the_entropy_as_loss():
    dino = make_dino(batch_norm=False, teacher_temp=0.1, warm_temp=0.1)
    x = torch.randn(6, 1, 8, 8)
    p = (dino.head(dino.student.features(x)) / 0.1).softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean().item()
    assert dino(Batch(x, torch.ones(6, 10) / 10, (torch.cat([x, x]),)), 0.0)["loss"].item() == pytest.approx(entropy, abs=1e-4)


# The teacher


def test_the_teacher_starts_equal_and_shares_nothing_with_the_student():
    dino = make_dino()
    pairs = parameter_pairs(dino)
    assert len(pairs) > 20 and dino.model is not dino.student and dino.model.head.weight.shape == (10, 16)
    for teacher, student in pairs:
        assert torch.equal(teacher, student) and teacher.data_ptr() != student.data_ptr() and not teacher.requires_grad
    dino(make_batch(), 0.0)["loss"].backward()
    assert all(teacher.grad is None for teacher, _ in pairs)


@pytest.mark.parametrize("momentum, progress, moved", [(1.0, 0.0, 0), (0.0, 0.0, 1), (0.5, 0.0, 0.5), (0.5, 0.5, 0.25), (0.5, 1.0, 0)])
def test_the_momentum_rises_to_one_over_the_run(momentum, progress, moved):
    dino = make_dino(momentum=momentum)
    with torch.no_grad():
        for _, student in parameter_pairs(dino):
            student.add_(1.0)
    before = [teacher.clone() for teacher, _ in parameter_pairs(dino)]
    dino.after_step(progress)
    for old, (teacher, _) in zip(before, parameter_pairs(dino)):
        torch.testing.assert_close(teacher, old + moved, atol=1e-6, rtol=1e-6)


def test_the_teacher_has_neither_dropout_nor_drop_path_but_statistics_of_the_batch():
    dino = make_dino(partial(VIT, dropout=0.5, drop_path=0.5))
    batch_norm = DINO(SmallCNN((8, 8), 1, 10), **SMALL).train().model.body[1]
    assert isinstance(batch_norm, nn.BatchNorm2d) and batch_norm.training
    assert dino.student.training and not any(module.training for module in dino.model.modules())
    x = make_batch().views[0]
    assert torch.equal(dino.model.features(x), dino.model.features(x))
    assert not torch.equal(dino.student.features(x), dino.student.features(x))


def test_the_teacher_has_no_dropout_in_a_loop_that_never_calls_train():
    model, batch = VIT(dropout=0.5), make_batch()
    model.train()
    dino = DINO(model, **SMALL)
    assert dino.training and torch.equal(dino.model.features(batch.views[0]), dino.model.features(batch.views[0]))


def test_image_is_recognized_in_a_batch_of_another_size():
    """Several threads add up the pixels of one large image otherwise than those of several images."""
    images, threads = torch.rand(24, 3, 224, 224), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = torch.cat([image_hashes(image[None]) for image in images])
        assert alone.tolist() == image_hashes(images).tolist() and len(alone.unique()) == 24
    finally:
        torch.set_num_threads(threads)


def test_neighbors_are_found_in_half_precision():
    dino = make_dino(neighbors=2, bank=16, settle=0.0).bfloat16()
    losses = [dino(make_batch(seed=seed, dtype=torch.bfloat16), 0.5)["loss"] for seed in range(3)]
    assert all(loss.isfinite() for loss in losses)


def test_the_temperature_of_the_teacher_rises_linearly():
    dino = make_dino(warm_temp=0.02, teacher_temp=0.06, warmup=0.4)
    assert [dino.temperature(p) for p in (0.0, 0.2, 0.4, 1.0)] == pytest.approx([0.02, 0.04, 0.06, 0.06])


def test_progress_is_set_in_the_student_and_not_in_the_teacher():
    dino = make_dino(partial(VIT, reduction=partial(Prune, shrink=(0.0, 0.9))))
    assert dino.trained_model is dino.student
    for progress in (0.1, 0.5):
        dino(make_batch(), progress)
        assert {block.reduction.progress for block in dino.student.blocks} == {progress}
        assert {block.reduction.progress for block in dino.model.blocks} == {1.0}


# Gradients


def test_the_gradient_of_each_parameter_is_clipped_separately():
    dino = make_dino(clip=0.01, freeze=0.0)
    (100 * dino(make_batch(), 0.5)["loss"]).backward()
    before = {name: p.grad.norm().item() for name, p in dino.named_parameters() if p.grad is not None}
    dino.before_step(0.5)
    assert sum(norm > 0.01 for norm in before.values()) > 5
    for name, norm in before.items():
        assert dino.get_parameter(name).grad.norm().item() == pytest.approx(min(norm, 0.01), rel=1e-3, abs=1e-5)


def test_the_last_layer_is_frozen_at_first():
    dino = make_dino(freeze=0.5)
    for progress, frozen in ((0.0, True), (0.49, True), (0.5, False)):
        dino.zero_grad()
        dino(make_batch(), progress)["loss"].backward()
        dino.before_step(progress)
        assert (dino.head.last_layer.weight_v.grad is None) == frozen
    assert not dino.head.last_layer.weight_g.requires_grad
    assert make_dino(norm_last_layer=False).head.last_layer.weight_g.requires_grad


# Views and models


def test_views_of_one_size_take_one_forward_pass():
    dino, batch, calls = make_dino().eval(), make_batch(local=3), []
    dino.student.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    dino(batch, 0.0)
    assert len(calls) == 2
    for views in batch.views:
        separate = torch.cat([dino.student.features(view) for view in views.split(6)])
        torch.testing.assert_close(separate, dino.student.features(views), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("image, channels", [((28, 28), 1), ((32, 32), 3), ((24, 40), 4)], ids=str)
@pytest.mark.parametrize("tokenizer", [partial(PatchEmbed, patch=4), partial(ShiftedPatchEmbed, patch=4), ConvStem], ids=["patch", "spt", "stem"])
def test_any_image_size_number_of_channels_and_tokenizer(channels, image, tokenizer):
    model = ViT(image, channels, 5, tokenizer=tokenizer, dim=16, depth=1, heads=2, pool=MeanTokens, registers=1)
    dino = DINO(model, **SMALL).train()
    views = MultiCrop(first=(Warp(crop=(0.4, 1.0)),), small=(Warp(crop=(0.2, 0.5), size=(12, 16)),), local=2)
    batch = views(Batch(torch.rand(3, channels, *image), torch.ones(3, 5) / 5), torch.Generator().manual_seed(0))
    assert [tuple(v.shape) for v in batch.views] == [(6, channels, *image), (6, channels, 12, 16)]
    dino(batch, 0.0)["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for n, p in dino.student.named_parameters() if "head" not in n)


@pytest.mark.parametrize(
    "model, local", [(partial(VIT, reduction=partial(Merge, r=3)), 2), (partial(SmallCNN, (8, 8), 1, 10), 0)], ids=["merging", "cnn"]
)
def test_a_model_that_merges_tokens_and_a_cnn_can_be_trained(model, local):
    dino = make_dino(model)
    loss = dino(make_batch(local=local), 0.0)["loss"]
    loss.backward()
    dino.after_step(0.1)
    assert loss.isfinite()


def test_model_and_objective_can_be_copied_and_loaded():
    dino = make_dino()
    dino(make_batch(), 0.0)["loss"].backward()
    copy.deepcopy(dino.model)  # torch cannot copy a head with weight norm after a forward pass
    other = make_dino(momentum=0.5)
    other.load_state_dict(dino.state_dict())
    torch.testing.assert_close(other.loss.center, dino.loss.center)


def test_a_run_with_dino_reads_no_labels_and_is_evaluated_by_probes():
    run = Run(objective=DINO, augment=augment.digit_crops(size=4), clip=0.0)
    assert not run.reads_labels and [e.__name__ for e in run.evaluators] == ["knn", "linear_probe"]


# Bad input

RANGES = ("freeze", "momentum", "warmup", "clip", "center_momentum", "student_temp", "teacher_temp", "warm_temp", "koleo")


@pytest.mark.parametrize(
    "options, message",
    [({name: -1}, f"^{name} is -1") for name in RANGES]
    + [
        ({"neighbors": 9, "bank": 8}, "neighbors is 9"),
        ({"share": 1.5}, "share is 1.5"),
        ({"layers": 2}, "layers is 2; expected 3, or 1"),
        ({"vit": lambda: nn.Linear(2, 2)}, r"Linear has no features.* give it a method features\(x\) .* attribute head, an nn.Linear"),
        ({"vit": lambda: tiny_vit(classes=0)}, "this ViT was built with 0 classes, so it has no head; build it with at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_dino(**options)


@pytest.mark.parametrize(
    "options, batch, message",
    [
        ({}, make_batch()._replace(views=()), r"compares views .* use augment=augment\.digit_crops"),
        ({}, make_batch()._replace(views=torch.randn(2, 6, 1, 8, 8).unbind()), r"tensors of \[6, 6\] images for a batch of 6; expected 12"),
        ({}, make_batch()._replace(views=(torch.randn(18, 1, 8, 8),)), r"tensors of \[18\] images for a batch of 6; expected 12"),
        ({}, make_batch()._replace(views=(torch.randn(12, 1, 8, 8), torch.randn(5, 1, 4, 4))), r"tensors of \[12, 5\] images"),
        ({}, make_batch(b=0), r"tensors of \[0, 0\] images for a batch of 0"),
        ({}, make_batch(size=5), r"patches of 2 pixels do not tile an image of 5 x 5; .* 4 x 4 or 6 x 6"),
        ({"neighbors": 2, "bank": 4}, make_batch(), "the bank holds 4 images and a batch has 6"),
    ],
    ids=["no views", "separate views", "three views", "part of the views", "no images", "size of views", "small bank"],
)
def test_batches_that_do_not_fit_are_refused(options, batch, message):
    with pytest.raises(ValueError, match=message):
        make_dino(**options)(batch, 0.5)


# The patch term of iBOT

PATCHES = {"patches": 1.0, "patch_ratio": 0.5}


def hide(dino, hidden):
    """The objective with these hidden patches instead of random ones."""
    dino.patch_term.draw_hidden = lambda views, grid: hidden
    return dino


def test_without_the_patch_term_nothing_changes():
    state, patterns = torch.get_rng_state(), []
    for options in ({}, {"patches": 0.0, "patch_ratio": 0.9, "patch_temp": 1.0}):
        torch.set_rng_state(state)
        dino = make_dino(partial(VIT, dropout=0.3), **options)
        loss = dino(make_batch(), 0.5)["loss"]
        loss.backward()
        patterns.append([loss, torch.get_rng_state(), *(p.grad for p in dino.student.parameters() if p.grad is not None)])
        names = dino.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(*patterns, strict=True)) and not [n for n in names if "patch_" in n or "hidden" in n]
    run = Run(objective=DINO, augment=augment.digit_crops(size=4), clip=0.0)
    assert fingerprint(run) == fingerprint(run.vary(objective=partial(DINO, patches=0.0)))


def test_the_patch_term_is_that_of_lightly_and_its_center_that_of_all_patches():
    dino = make_dino(batch_norm=False, **PATCHES, patch_temp=0.06, warmup=0.0).double()
    batch, criterion = make_batch(local=0, dtype=torch.float64), IBOTPatchLoss(12, teacher_temp=0.06).double()
    hidden = torch.rand(12, 16) < 0.4
    hidden[3], hidden[8] = False, True
    with torch.no_grad():
        tokens = dino.model.tokens(batch.views[0])[0][:, 1:]
        targets = dino.patch_term.teacher_head(tokens.flatten(0, 1)).unflatten(0, (12, 16))
    found = hide(dino, hidden).features_and_patches(dino.student, batch.views[0], hidden)[1]
    outputs = dino.patch_term.head(found.flatten(0, 1)).unflatten(0, (12, 16))
    mask = hidden.unflatten(1, (4, 4))
    expected = criterion(targets[hidden], outputs[hidden], mask)
    loss = dino.patch_term.loss(tokens, found, hidden, 0.06, 0.1, 0.9)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(dino.patch_term.center, 0.1 * targets.mean((0, 1)))  # lightly: of the hidden patches only
    gradients = [torch.autograd.grad(value, list(dino.patch_term.head.layers.parameters()), retain_graph=True) for value in (loss, expected)]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-9) for a, b in zip(*gradients))


def test_the_whole_loss_with_the_patch_term_by_a_loop_over_views():
    dino = make_dino(batch_norm=False, patches=0.7, warmup=0.5, warm_temp=0.04, patch_temp=0.08)
    batch, hidden = make_batch(local=0), torch.rand(12, 16) < 0.4
    hidden[2] = False
    loss = hide(dino, hidden)(batch, 0.25)["loss"].item()
    terms, features = [], []
    for view, mask in zip(batch.views[0], hidden):
        pixels = mask.view(1, 4, 1, 4, 1).expand(1, 4, 2, 4, 2).reshape(1, 8, 8)
        embedded = dino.student.tokenizer(torch.where(pixels, 0.0, view)[None])
        embedded[0, mask] = dino.patch_term.hidden_token
        x = dino.student.position(torch.cat([dino.student.prefix[None], embedded], 1), (4, 4))
        tokens = dino.student.norm(dino.student.blocks(x)[0])
        features.append(tokens[0, 0])
        targets = (dino.patch_term.teacher_head(dino.model.tokens(view[None])[0][0, 1:]) / 0.06).softmax(-1)
        logs = (dino.patch_term.head(tokens[0, 1:]) / 0.1).log_softmax(-1)
        each = [-(targets[i] * logs[i]).sum().item() for i in range(16) if mask[i]]
        terms.append(sum(each) / max(len(each), 1))
    targets = (dino.teacher_head(dino.model.features(batch.views[0])) / 0.04).softmax(-1)
    logs = (dino.head(torch.stack(features)) / 0.1).log_softmax(-1)
    whole = -(targets * logs.roll(6, 0)).sum(-1).mean().item()
    assert loss == pytest.approx(whole + 0.7 * sum(terms) / 12, rel=1e-4)


def test_views_without_hidden_patches_have_no_patch_term():
    dino, batch = make_dino(**PATCHES), make_batch()
    plain = make_dino()
    plain.load_state_dict({name: dino.state_dict()[name] for name in plain.state_dict()})
    loss = hide(dino, torch.zeros(12, 16, dtype=torch.bool))(batch, 0.5)["loss"]
    assert loss.item() == pytest.approx(plain(batch, 0.5)["loss"].item(), rel=1e-6)
    loss.backward()
    assert not dino.patch_term.hidden_token.grad.any()


def test_a_uniform_teacher_has_the_patch_loss_log_k():
    dino = make_dino(batch_norm=False, **PATCHES)
    for head in (dino.patch_term.head, dino.patch_term.teacher_head):
        head.last_layer.weight_v.data.fill_(1.0)
    tokens, hidden = torch.randn(12, 16, 16), torch.rand(12, 16) < 0.5
    hidden[:, 0] = True
    assert dino.patch_term.loss(tokens, tokens, hidden, 0.06, 0.1, 0.9).item() == pytest.approx(math.log(12), abs=1e-5)


def test_half_of_the_views_hide_equally_many_patches_uniformly():
    dino = make_dino(**PATCHES | {"patch_ratio": 0.3})
    hidden = dino.patch_term.draw_hidden(torch.zeros(4000, 1, 8, 8), (4, 4))
    counts = hidden.sum(1)
    assert set(counts.tolist()) == {0, 5} and (counts > 0).float().mean() == pytest.approx(0.5, abs=0.03)
    assert (hidden.float().mean(0) - 0.5 * 5 / 16).abs().max() < 0.03


@pytest.mark.parametrize("tokenizer", [partial(ShiftedPatchEmbed, patch=2), partial(ConvStem, layers=2), partial(PatchEmbed, patch=2)])
def test_hidden_pixels_do_not_reach_the_student(tokenizer):
    dino = make_dino(partial(VIT, tokenizer=tokenizer), **PATCHES)
    n = 4 if tokenizer.func is ConvStem else 16
    views, hidden = torch.randn(4, 1, 8, 8), torch.arange(n).expand(4, n) % 3 == 0
    pixels = pixels_of_patches(hidden, (2, 2) if n == 4 else (4, 4), (8, 8))
    found = [dino.features_and_patches(dino.student, x, hidden)[1] for x in (views, torch.where(pixels, 100.0, views))]
    assert torch.equal(*found)


def test_the_patch_teacher_starts_equal_gets_no_gradient_and_follows():
    dino = make_dino(**PATCHES, momentum=0.5, freeze=0.4)
    pairs = list(zip(dino.patch_term.teacher_head.parameters(), dino.patch_term.head.parameters()))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() and not a.requires_grad for a, b in pairs)
    dino(make_batch(), 0.3)["loss"].backward()
    assert all(a.grad is None for a, _ in pairs) and dino.patch_term.hidden_token.grad.any()
    for progress, frozen in ((0.3, True), (0.5, False)):
        dino.zero_grad()
        dino(make_batch(), progress)["loss"].backward()
        dino.before_step(progress)
        assert (dino.patch_term.head.last_layer.weight_v.grad is None) == frozen
    with torch.no_grad():
        for _, student in pairs:
            student.add_(1.0)
    before = [teacher.clone() for teacher, _ in pairs]
    dino.after_step(0.0)
    for old, (teacher, _) in zip(before, pairs):
        torch.testing.assert_close(teacher, old + 0.5)


def test_losses_are_computed_in_full_precision_inside_autocast():
    """In bf16, KoLeo would take other features for the nearest ones."""
    losses = []
    for koleo in (0.0, 1.0):
        dino, batch = make_dino(koleo=koleo), make_batch(b=32, local=0)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(dino(batch, 0.5)["loss"])
        torch.clear_autocast_cache()
    features = dino.observed.features.float()
    expected = sum(KoLeoLoss()(x) for x in features.split(32)) / 2
    assert losses[0].dtype == torch.float32 and (losses[1] - losses[0]).item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("pool", [MeanTokens, partial(Projected, pool=MeanTokens, hidden=16)], ids=["mean", "projected"])
def test_the_patch_term_works_with_other_pools_and_half_precision(pool):
    dino = make_dino(partial(VIT, pool=pool), **PATCHES, neighbors=1, settle=0.0, bank=16, koleo=0.1)
    for _ in range(2):
        torch.manual_seed(1)
        loss = dino(make_batch(), 0.5)["loss"]
    center = dino.patch_term.center.clone()
    with torch.autocast("cpu", torch.bfloat16):
        half = dino(make_batch(), 0.5)["loss"]
    half.backward()
    assert half.item() == pytest.approx(loss.item(), rel=0.05) and not torch.equal(center, dino.patch_term.center)
    assert all(p.grad.isfinite().all() for p in dino.parameters() if p.grad is not None)
    whole = make_dino(partial(VIT, pool=pool), **PATCHES).bfloat16()  # the objective itself is in half precision
    whole(make_batch(dtype=torch.bfloat16), 0.5)["loss"].backward()
    assert whole.patch_term.center.isfinite().all() and whole.patch_term.center.any()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"patches": -1}, "patches is -1"),
        ({"patch_ratio": 1.5}, "patch_ratio is 1.5"),
        ({"patch_temp": 0}, "patch_temp is 0"),
        ({"patches": 1, "vit": partial(VIT, reduction=partial(Merge, r=2))}, "patches needs a ViT with a token for each patch"),
        ({"patches": 1, "vit": partial(SmallCNN, (8, 8), 1, 10)}, "patches needs a ViT .* or patches=0"),
    ],
)
def test_what_does_not_fit_the_patch_term_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_dino(**options)


# Models that are wrapped or changed after the objective was made


@pytest.mark.parametrize("wrap", slow_after(1, [checkpoint_wrapper, torch.compile]), ids=["checkpoint", "compile"])
def test_the_teacher_follows_a_student_whose_parts_are_wrapped(wrap):
    dino = make_dino(VIT, momentum=0.0)
    student = dict(dino.student.named_parameters())
    for block in dino.student.blocks:
        block.mlp = wrap(block.mlp)
    with torch.no_grad():
        for parameter in student.values():
            parameter.add_(torch.randn_like(parameter))
    dino.after_step(0.0)
    for name, parameter in dino.model.named_parameters():
        assert torch.allclose(parameter, student[name]), name


def test_student_with_other_parts_than_its_teacher_is_refused():
    dino = make_dino(VIT)
    torch.nn.utils.parametrizations.weight_norm(dino.student.blocks[0].attention.qkv)
    with pytest.raises(ValueError, match=r"moving average differ in blocks\.0\.attention\.qkv: .*before its average is made"):
        dino.after_step(0.0)
