"""LeJEPA: SIGReg and the loss are those of lightly and of the equations; features stay spread, and draws are those of the step."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from lightly.loss.lejepa_loss import LeJEPALoss, SIGReg, lejepa_invariance_loss
from torch.nn.functional import normalize
from toys import TINY_VIT, tiny_vit

from smallvit import (
    DistilledTokens,
    Merge,
    Projected,
    Run,
    ShiftedPatchEmbed,
    SmallCNN,
    accuracy,
    arrays,
    augment,
    digits,
    fit,
    knn,
)
from smallvit.augment import Batch
from smallvit.objectives import LeJEPA
from smallvit.objectives.collapse import Collapse, collapse_statistics
from smallvit.objectives.lejepa import sigreg
from smallvit.train.loop import Training

VIT = partial(tiny_vit, (8, 8), classes=10)
SMALL = {"slices": 12, "hidden": 16, "dim": 8}
RUN = Run(
    model=TINY_VIT, objective=partial(LeJEPA, **SMALL), augment=augment.digit_crops(local=0), unlabelled=True, labels=50, val=50, steps=9,
    batch=16, lr=2e-3, evaluators=(knn,),
)  # fmt: skip


def make_batch(b=6, local=2, dtype=torch.float32) -> Batch:
    views = torch.randn(2 * b, 1, 8, 8, dtype=dtype), torch.randn(local * b, 1, 4, 4, dtype=dtype)
    return Batch(torch.randn(b, 1, 8, 8, dtype=dtype), torch.ones(b, 10) / 10, views if local else views[:1])


def directions(dim: int, slices: int) -> torch.Tensor:
    return normalize(torch.randn(dim, slices), dim=0)


def sigreg_of_lightly(outputs, slices, monkeypatch):
    """lightly's statistic, with these directions instead of random ones."""
    monkeypatch.setattr(SIGReg, "_generate_unit_vectors", lambda self, device, dtype, width: slices.to(dtype))
    return SIGReg(num_vectors=slices.shape[1]).to(outputs.dtype)(outputs)


# SIGReg


def test_sigreg_and_its_gradient_are_those_of_lightly(monkeypatch):
    slices = directions(8, 20)
    z = (torch.randn(3, 10, 8, dtype=torch.float64) * 2 + 0.5).requires_grad_()
    found, expected = sigreg(z, slices.double()), sigreg_of_lightly(z, slices, monkeypatch)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,), (other,) = torch.autograd.grad(found, z), torch.autograd.grad(expected, z)
    torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-8)


def test_sigreg_by_numerical_integration():
    """For each view and direction, n times the integral of |c(t) - phi(t)|^2 phi(t) from -3 to 3."""
    z, slices = np.random.default_rng(0).normal(size=(2, 7, 4)) * 1.5 + 0.3, directions(4, 5)
    t = np.linspace(-3, 3, 33)
    phi, values = np.exp(-(t**2) / 2), []
    for view in z:
        for a in slices.double().numpy().T:
            characteristic = np.exp(1j * np.outer(view @ a, t)).mean(0)
            values.append(7 * np.trapezoid(abs(characteristic - phi) ** 2 * phi, t))
    assert sigreg(torch.tensor(z), slices.double()).item() == pytest.approx(np.mean(values), rel=1e-6)


@pytest.mark.parametrize("n", [8, 64, 1024])
def test_features_of_a_gaussian_have_the_floor_whatever_the_batch(n):
    values = [sigreg(torch.randn(2, n, 32), directions(32, 32)).item() for _ in range(30)]
    assert sum(values) / len(values) == pytest.approx(1.0525, abs=0.06)


def test_collapsed_and_scattered_features_have_the_closed_forms():
    slices = directions(8, 16)
    zero = torch.zeros(1, 64, 8, requires_grad=True)
    value = sigreg(zero, slices)
    assert value.item() == pytest.approx(0.40205 * 64, rel=1e-4)
    assert torch.autograd.grad(value, zero)[0].abs().max() == 0  # as the docstring says of BatchNorm
    # far apart, |c(t)|^2 is 1 / n, except at t = 0, where c is 1 and the weight is 3 / 16
    apart = 64 * (1.4472 - 3 / 16) + math.sqrt(2 * math.pi) - 3 / 16
    assert sigreg(1e3 * torch.randn(20, 64, 8), slices).item() == pytest.approx(apart, rel=0.02)


def test_sigreg_is_of_each_view_and_does_not_depend_on_order_or_rotation():
    z, slices = torch.randn(2, 9, 8, dtype=torch.float64), directions(8, 16).double()
    value, rotation = sigreg(z, slices), torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0]
    assert torch.allclose(sigreg(z @ rotation, rotation.T @ slices), value)
    assert torch.allclose(sigreg(z[:, torch.randperm(9)], slices), value)
    assert torch.allclose(sigreg(torch.cat([z, z], dim=1), slices), 2 * value)
    assert torch.allclose((sigreg(z[0], slices) + sigreg(z[1], slices)) / 2, value)
    assert not torch.allclose(sigreg(z.flatten(0, 1), slices), value, rtol=1e-2)


# The loss


@pytest.mark.parametrize("local", [0, 2])
def test_the_loss_is_that_of_lightly(local, monkeypatch):
    objective, batch = LeJEPA(VIT(), weight=0.2, **SMALL).train().double(), make_batch(local=local, dtype=torch.float64)
    slices = directions(8, 12)
    monkeypatch.setattr(objective, "draw_directions", lambda: slices)
    found = objective(batch, 0.0)
    features = [objective.model.features(view) for views in batch.views for view in views.split(6)]
    outputs = objective.projector(torch.cat(features)).unflatten(0, (-1, 6))  # BatchNorm sees all views
    monkeypatch.setattr(SIGReg, "_generate_unit_vectors", lambda self, device, dtype, width: slices.to(dtype))
    if local:
        loss = LeJEPALoss(0.2, sigreg_num_vectors=12).double()
        expected = loss(local_proj=outputs[2:], global_proj=outputs[:2])
    else:
        invariance = lejepa_invariance_loss(all_proj=outputs, global_proj=outputs)
        expected = 0.2 * SIGReg(num_vectors=12).double()(outputs) + 0.8 * invariance
    assert found["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    assert 0.2 * found["sigreg"] + 0.8 * found["invariance"] == pytest.approx(found["loss"].item())


def loss_of(objective, batch) -> float:
    """The loss with the same directions at each call."""
    torch.manual_seed(1)
    return objective(batch, 0.0)["loss"].item()


def test_with_weight_1_it_does_not_matter_which_views_belong_together():
    batch = make_batch(local=0)
    first, second = batch.views[0].split(6)
    other = batch._replace(views=(torch.cat([first, second.roll(1, 0)]),))
    for weight, equal in ((1.0, True), (0.5, False)):
        objective = LeJEPA(VIT(), weight=weight, **SMALL).train()
        assert (loss_of(objective, batch) == pytest.approx(loss_of(objective, other), rel=1e-5)) == equal


def test_weight_0_draws_no_random_numbers():
    objective, batch, state = LeJEPA(VIT(), weight=0.0, **SMALL), make_batch(), torch.get_rng_state()
    assert objective(batch, 0.0).keys() == {"loss", "invariance"}
    assert torch.equal(torch.get_rng_state(), state)


def test_directions_have_length_1_and_are_the_first_draw_of_a_step():
    objective, plain = (LeJEPA(VIT(dropout=rate), **SMALL) for rate in (0.5, 0.0))
    drawn = []
    for one in (objective, plain):
        torch.manual_seed(5)
        drawn.append(one.draw_directions())
    assert torch.equal(*drawn) and torch.allclose(drawn[0].norm(dim=0), torch.ones(12))
    assert not torch.equal(plain.draw_directions(), drawn[0])


def test_half_precision_gives_nearly_the_same_loss():
    objective, batch = LeJEPA(VIT(), **SMALL).train(), make_batch()
    losses = [loss_of(objective, batch)]
    with torch.autocast("cpu", torch.bfloat16):
        losses.append(loss_of(objective, batch))
        assert objective(batch, 0.0)["loss"].dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.parametrize(
    "model",
    [
        VIT, partial(VIT, reduction=partial(Merge, r=2)), partial(VIT, pool=Projected), partial(SmallCNN, (8, 8), 1, 10),
        partial(VIT, tokenizer=partial(ShiftedPatchEmbed, patch=2), registers=1),
    ],
    ids=["vit", "merge", "projected", "cnn", "spt"],
)  # fmt: skip
def test_every_model_with_features_learns(model):
    objective = LeJEPA(model(), **SMALL).train()
    batch = make_batch(local=0 if model.func is SmallCNN else 2)
    objective(batch, 0.0)["loss"].backward()
    trained = [p for name, p in objective.named_parameters() if "model.head" not in name]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained) and objective.observed.features.shape[0] == 12


# Runs


def trained(weight: float, steps: int = 40) -> dict[str, float]:
    """Collapse statistics of the outputs after a short training on digits."""
    data = digits()
    run = RUN.vary(objective=partial(LeJEPA, weight=weight, **SMALL), steps=steps, batch=32, lr=5e-3, schedule="constant", clip=0.0)
    training = Training(run, data, data.subset(labels=50, val=50, seed=0), "cpu")
    training.objective.train()
    for _ in range(steps):
        training.train_step()
    return collapse_statistics(training.objective.observed)


@pytest.mark.slow
def test_outputs_are_spread_with_sigreg_and_not_without():
    assert trained(0.1)["spread"] > 0.95 and trained(0.0)["spread"] < 0.4


@pytest.mark.slow
def test_a_run_in_which_all_images_give_the_same_output_stops(tmp_path):
    black, labels = np.zeros((60, 8, 8), dtype=np.uint8), np.arange(60) % 10
    images = {f"{part}_images": black for part in ("train", "test")} | {f"{part}_labels": labels for part in ("train", "test")}
    np.savez(tmp_path / "black.npz", **images)
    data = partial(arrays, path=str(tmp_path / "black.npz"))
    with pytest.raises(Collapse, match=r"flat: .* or LeJEPA a larger weight"):
        fit(RUN.vary(data=data, labels=30, val=10, steps=120), tmp_path / "run")


def test_a_run_has_collapse_statistics_and_probes(tmp_path):
    record = fit(RUN, tmp_path)
    assert record.finished and set(record.health[-1]) == {"step", "spread", "rank", "knn_1"} and record.stacked is None
    assert set(record.test) >= {"knn_1"} and RUN.vary(evaluators=None).evaluators[1].__name__ == "linear_probe"


# Bad input


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: LeJEPA(VIT())(make_batch()._replace(views=()), 0.0), r"compares views .* use augment=augment\.digit_crops"),
        (lambda: LeJEPA(VIT())(make_batch(local=1)._replace(views=torch.randn(2, 6, 1, 8, 8).unbind()), 0.0), r"tensors of \[6, 6\] images for a batch of 6; expected 12"),
        (lambda: LeJEPA(VIT(pool=DistilledTokens)), "has no features.* one linear head"),
        (lambda: LeJEPA(VIT(), weight=1.5), "weight is 1.5; expected a number from 0 to 1"),
        (lambda: LeJEPA(VIT(), weight=math.nan), "weight is nan"),
        (lambda: LeJEPA(VIT(), slices=0), "slices is 0; expected an integer of at least 1"),
        (lambda: RUN.vary(evaluators=(accuracy,)), "accuracy needs a trained head and LeJEPA trains none"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
