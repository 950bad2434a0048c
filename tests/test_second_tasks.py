"""SSAT and DrLoc: supervised training with a second task. Off they equal Supervised; their terms are those of the equations."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from toys import TINY_VIT, slow_after, tiny_vit

from smallvit import (
    MAE,
    SSAT,
    ClassToken,
    ConvStem,
    DistilledTokens,
    DrLoc,
    LocalityAttention,
    MeanTokens,
    Merge,
    Run,
    ShiftedPatchEmbed,
    SmallCNN,
    Supervised,
    augment,
    fit,
)
from smallvit.augment import Batch, RandomErasing
from smallvit.numerics import Numerics
from smallvit.objectives.drloc import relative_distances
from smallvit.objectives.mae import patchify
from smallvit.record import WEIGHTS
from smallvit.train import fit_stacked, loop

VIT = partial(tiny_vit, (8, 8), classes=5)
DECODER = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}
SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=6, batch=8, clip=0.5, augment=augment.digits())
SECOND = {"SSAT": partial(SSAT, **DECODER), "DrLoc": partial(DrLoc, pairs=6, hidden=8)}
OFF = {"SSAT": partial(SSAT, weight=1.0, **DECODER), "DrLoc": partial(DrLoc, weight=0.0)}
each = pytest.mark.parametrize("name", SECOND)
one_quickly = pytest.mark.parametrize("name", slow_after(1, SECOND))


@pytest.fixture
def batch():
    return Batch(torch.randn(6, 1, 8, 8), torch.rand(6, 5).softmax(-1))


def gradients(objective, loss) -> dict[str, torch.Tensor | None]:
    parameters = dict(objective.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)))


# Off


@each
def test_off_is_supervised_bit_for_bit_and_draws_nothing(name, batch, tmp_path):
    model = VIT(dropout=0.3).train()
    objective, plain, results = OFF[name](model), Supervised(model), []
    assert objective.prepare(batch) is batch
    for one in (objective, plain):
        torch.manual_seed(1)
        loss = one(one.prepare(batch), 0.3)["loss"]
        results.append((loss, gradients(plain, loss), torch.get_rng_state()))
    (loss, found, state), (other, expected, other_state) = results
    assert torch.equal(loss, other) and torch.equal(state, other_state)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    run = SHORT.vary(steps=3, dropout=0.1)
    records = [fit(run.vary(objective=one), tmp_path / str(n)) for n, one in enumerate((OFF[name], Supervised))]
    assert records[0].curve == records[1].curve and records[0].test == records[1].test


def test_ssat_without_labels_has_the_loss_of_mae_for_the_same_masks(batch):
    objective = SSAT(VIT(), weight=0.0, ratio=0.5, **DECODER)
    mae = MAE(objective.model, ratio=0.5, normalize=False, **DECODER)
    mae.decoder.load_state_dict(objective.decoder.state_dict())
    losses = []
    for one in (objective, mae):
        torch.manual_seed(2)
        losses.append(one(one.prepare(batch), 0.0)["loss"])
    assert torch.equal(*losses)


# SSAT


def test_the_loss_of_ssat_is_linear_in_its_weight_between_both_losses(batch):
    model, losses = VIT(), {}
    decoder = SSAT(model, **DECODER).decoder.state_dict()
    for weight in (0.0, 0.1, 0.7, 1.0):
        objective = SSAT(model, weight=weight, **DECODER)
        objective.decoder.load_state_dict(decoder)
        torch.manual_seed(3)
        losses[weight] = objective(objective.prepare(batch), 0.0)["loss"].item()
    for weight, loss in losses.items():
        assert loss == pytest.approx(weight * losses[1.0] + (1 - weight) * losses[0.0], rel=1e-6)
    assert losses[1.0] == pytest.approx(Supervised(model)(batch, 0.0)["loss"].item())


def test_the_reconstruction_of_ssat_by_hand(batch):
    """The mean over hidden patches of the squared error of the pixels, for the patches that `prepare` draws."""
    objective = SSAT(VIT(), **DECODER)
    prepared = objective.prepare(batch)
    visible, hidden = prepared.draws
    assert visible.shape == (6, 4) and hidden.shape == (6, 12)
    shown = torch.zeros(6, 4, 2, 4, 2)
    for image, index in enumerate(visible.tolist()):
        for patch in index:
            shown[image, patch // 4, :, patch % 4, :] = 1
    tokens = objective.model.tokens(batch.images * shown.reshape(6, 1, 8, 8), keep=visible)[0]
    predicted, squares = objective.decoder(tokens, visible, hidden, (4, 4)), []
    for image, index in enumerate(hidden.tolist()):
        for position, patch in enumerate(index):
            target = patchify(batch.images, (4, 4))[image, patch]
            squares += (predicted[image, position] - target).square().tolist()
    found = objective(prepared, 0.0)
    assert found["reconstruction"].item() == pytest.approx(sum(squares) / len(squares), rel=1e-5)
    assert found["cross_entropy"].item() == pytest.approx(F.cross_entropy(objective.model(batch.images), batch.targets).item(), rel=1e-5)


def test_head_and_decoder_of_ssat_learn_from_their_own_term_only(batch):
    objective = SSAT(VIT(), **DECODER)
    prepared = objective.prepare(batch)
    for weight, own, other in ((0.0, "decoder.", "model.head."), (1.0, "model.head.", "decoder.")):
        objective.weight = weight
        found = gradients(objective, objective(prepared, 0.0)["loss"])
        assert all(found[name] is None for name in found if name.startswith(other))
        assert all(found[name] is not None for name in found if name.startswith(own))
        assert found["model.blocks.0.mlp.0.weight"].abs().max() > 0


def test_hidden_pixels_reach_the_reconstruction_as_targets_only(batch):
    objective = SSAT(VIT(tokenizer=partial(ShiftedPatchEmbed, patch=2)), weight=0.0, **DECODER)
    visible, hidden = objective.mae.hide(batch.images)
    images = batch.images.clone().requires_grad_()
    predicted = objective.decoder(objective.mae.encode(images, visible), visible, hidden, (4, 4))
    (gradient,) = torch.autograd.grad(predicted.square().sum(), images)
    patches = patchify(gradient, (4, 4)).abs().sum(-1)
    assert (patches.gather(1, hidden) == 0).all() and (patches.gather(1, visible) > 0).all()


def test_a_trained_ssat_reconstructs_and_copies_keep_one_model():
    objective = copy.deepcopy(SSAT(VIT(), **DECODER))
    assert objective.mae.model is objective.model and objective.mae.decoder is objective.decoder
    assert {name.partition(".")[0] for name in objective.state_dict()} == {"model", "decoder"}
    assert len(objective.state_dict()) == len(set(map(id, objective.state_dict(keep_vars=True).values())))
    assert objective.mae.reconstruct(torch.randn(2, 1, 8, 8)).predicted.shape == (2, 1, 8, 8)


# DrLoc


def test_the_loss_of_drloc_by_hand(batch):
    objective = DrLoc(VIT(pool=MeanTokens, registers=1), weight=0.7, pairs=9, hidden=8)
    prepared = objective.prepare(batch)
    (pairs,) = prepared.draws
    assert pairs.shape == (6, 2, 9)
    inputs: list = []
    objective.model.norm.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    loss, errors = objective(prepared, 0.0)["loss"].item(), []
    for image in range(6):
        for p, q in pairs[image].T.tolist():
            both = torch.cat([inputs[0][image, 1 + p], inputs[0][image, 1 + q]])
            target = torch.tensor([abs(p // 4 - q // 4) / 4, abs(p % 4 - q % 4) / 4])
            errors += (objective.distance(both) - target).abs().tolist()
    expected = F.cross_entropy(objective.model(batch.images), batch.targets).item() + 0.7 * sum(errors) / len(errors)
    assert loss == pytest.approx(expected, rel=1e-5)


def test_distances_are_relative_to_the_grid():
    pairs = torch.tensor([[[0, 3, 9], [0, 8, 0]]])
    assert relative_distances(pairs, (2, 5)).tolist() == [[[0, 0], [0.5, 0], [0.5, pytest.approx(0.8)]]]
    every = torch.cartesian_prod(torch.arange(49), torch.arange(49)).T[None]
    distances = relative_distances(every, (7, 7))
    assert distances.mean().item() == pytest.approx(48 / 21 / 7) and torch.equal(distances, relative_distances(every.flip(1), (7, 7)))


def test_pairs_are_uniform_with_replacement_and_follow_the_size_of_the_image():
    objective = DrLoc(VIT(), pairs=50)
    pairs = objective.draw_pairs(torch.zeros(400, 1, 8, 8))
    share = pairs.flatten().bincount(minlength=16) / pairs.numel()
    assert (share - 1 / 16).abs().max() < 0.01 and (pairs[:, 0] == pairs[:, 1]).float().mean() == pytest.approx(1 / 16, abs=0.01)
    assert objective.draw_pairs(torch.zeros(50, 1, 12, 6)).max() == 17
    objective(Batch(torch.randn(2, 1, 12, 6), torch.eye(5)[:2]), 0.0)["loss"].backward()
    one_token = DrLoc(VIT(tokenizer=partial(ConvStem, layers=3)))
    assert one_token(Batch(torch.randn(2, 1, 8, 8), torch.eye(5)[:2]), 0.0)["distance"] < 1


@pytest.mark.parametrize("norm_after_pool", [False, True])
def test_the_second_task_reaches_the_blocks_and_neither_class_token_nor_norm_nor_head(norm_after_pool, batch):
    objective = DrLoc(VIT(pool=ClassToken, norm_after_pool=norm_after_pool), weight=1e6)
    with torch.no_grad():  # no gradient from the labels
        objective.model.head.weight.zero_()
    objective.prepare(batch)
    loss = objective(batch, 0.0)["loss"]
    found = gradients(objective, loss)
    assert found["model.blocks.1.mlp.0.weight"].norm() > 0 and found["distance.0.weight"].norm() > 0
    assert found["model.norm.weight"].norm() == 0


def test_tokens_that_are_coordinates_are_learned():
    """With tokens that are the coordinates of their patches, the small network learns the distances."""
    objective = DrLoc(VIT(dim=16), pairs=64, hidden=32)
    coordinates = torch.zeros(16, 16)
    coordinates[:, 0], coordinates[:, 1] = torch.arange(16) // 4 / 4, torch.arange(16) % 4 / 4
    optimizer = torch.optim.Adam(objective.distance.parameters(), lr=1e-2)
    for step in range(300):
        pairs = objective.draw_pairs(torch.zeros(8, 1, 8, 8))
        predicted = objective.distance(torch.cat([coordinates[pairs[:, 0]], coordinates[pairs[:, 1]]], dim=-1))
        error = (predicted - relative_distances(pairs, (4, 4))).abs().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 300)
        optimizer.step()
    assert error < 0.01


# Both, with everything else


MODELS = {
    "LSA": partial(VIT, attention=LocalityAttention),
    "SPT": partial(VIT, tokenizer=partial(ShiftedPatchEmbed, patch=2), registers=2),
    "norm after pool": partial(VIT, pool=MeanTokens, norm_after_pool=True),
    "two heads": partial(VIT, pool=DistilledTokens),
    "no blocks": partial(VIT, depth=0),
}


@each
@pytest.mark.parametrize("model", MODELS)
def test_models_with_other_slots_learn_both_tasks(name, model, batch):
    objective = SECOND[name](MODELS[model]()).train()
    objective(objective.prepare(batch), 0.0)["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in objective.parameters())


@each
def test_half_precision_gives_nearly_the_same_loss(name, batch):
    objective = SECOND[name](VIT())
    prepared = objective.prepare(batch)
    loss = objective(prepared, 0.0)["loss"].item()
    with torch.autocast("cpu", torch.bfloat16):
        assert objective(prepared, 0.0)["loss"].item() == pytest.approx(loss, rel=0.03)


@each
def test_balanced_classes_change_the_cross_entropy(name, batch):
    counts, model = torch.tensor([1, 2, 3, 4, 10]), VIT()
    made = [one(model, class_weight="balanced") for one in (Supervised, OFF[name], SECOND[name])]
    for one in made:
        one.set_class_counts(counts)
    losses = [one(one.prepare(batch), 0.0) for one in made]
    assert torch.equal(losses[0]["loss"], losses[1]["loss"])
    extra = 0.5 * losses[0]["loss"] + 0.5 * losses[2]["reconstruction"] if name == "SSAT" else losses[0]["loss"] + losses[2]["distance"]
    assert losses[2]["loss"].item() == pytest.approx(extra.item(), rel=1e-6)


@one_quickly
def test_records_of_a_stack_and_of_the_native_kernel_agree_with_single_runs(name, tmp_path):
    run = SHORT.vary(objective=SECOND[name], ema=0.0)
    runs = [run.at_seed(seed) for seed in range(2)]
    together = fit_stacked(runs, [tmp_path / str(seed) for seed in range(2)])
    for one, other in zip([fit(one, tmp_path / f"alone{one.seed}") for one in runs], together):
        assert other.stacked == 2 and other.curve[-1][1] == pytest.approx(one.curve[-1][1], abs=1e-4)
    native = fit(runs[0], tmp_path / "native", numerics=Numerics(kernel="native"))
    assert native.curve[-1][1] == pytest.approx(together[0].curve[-1][1], abs=1e-3)


@pytest.mark.slow
@each
def test_resumed_run_ends_with_equal_weights(name, tmp_path, monkeypatch):
    run = SHORT.vary(objective=SECOND[name])
    fit(run, tmp_path / "whole")
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    train_step = loop.Training.train_step

    def interrupted(self):
        if self.step == 3:
            raise KeyboardInterrupt
        train_step(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Training, "train_step", interrupted)
        fit(run, tmp_path / "resumed")
    fit(run, tmp_path / "resumed")
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (tmp_path / "resumed" / WEIGHTS).read_bytes()


# Bad input


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: SSAT(VIT(), weight=1.5), "weight is 1.5; expected a number from 0 to 1"),
        (lambda: SSAT(VIT(), weight=math.nan), "weight is nan"),
        (lambda: SSAT(VIT(reduction=partial(Merge, r=2))), "reduces its tokens, expected reduction=None"),
        (lambda: SSAT(SmallCNN((8, 8), 1, 5)), "hides patches from a ViT; got a SmallCNN"),
        (lambda: SSAT(VIT(), ratio=0.99), "ratio 0.99 of 16 patches shows 0"),
        (lambda: SHORT.vary(objective=SSAT, augment=(RandomErasing(),)), "RandomErasing .* remove RandomErasing from augment"),
        (lambda: SHORT.vary(objective=SSAT, augment=augment.digit_crops()), "augment makes views and SSAT reads none"),
        (lambda: DrLoc(VIT(), weight=-1), "weight is -1; expected a number from 0"),
        (lambda: DrLoc(VIT(), pairs=0), "pairs is 0"),
        (lambda: DrLoc(VIT(), hidden=0), "hidden is 0"),
        (lambda: DrLoc(VIT(reduction=partial(Merge, r=2))), "model that reduces its tokens, expected reduction=None"),
        (lambda: DrLoc(SmallCNN((8, 8), 1, 5)), "patches of a ViT, not of a SmallCNN; use model="),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_erasing_that_is_off_is_accepted():
    assert SHORT.vary(objective=SSAT, augment=(RandomErasing(probability=0.0),)).objective is SSAT
