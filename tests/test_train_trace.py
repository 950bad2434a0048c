"""Traces: equal for equal trainings, also stacked and after a kill; other draws, other data and a missing EMA show in them."""

from functools import cache, partial

import pytest
import torch
from toys import TINY_VIT, slow_after

from smallvit import MAE, Attention, Pixels, Run, ShiftedPatchEmbed, augment, fit, knn
from smallvit.optim import ema_update
from smallvit.train import fit_stacked
from smallvit.train.batches import batch_index
from smallvit.train.loop import Training
from smallvit.train.trace import digest, distance, norm

SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=12, batch=8, ema=0.25, augment=augment.digits())


def training_of(run: Run) -> Training:
    data = run.data()
    return Training(run, data, data.subset(labels=run.labels, val=run.val, seed=run.seed), "cpu")


def test_trace_describes_the_first_steps_and_the_last_weights(tmp_path):
    trace = fit(SHORT, tmp_path).trace
    training = training_of(SHORT)
    training.objective.train()
    losses = []
    training.count_step = lambda loss: losses.append(loss.item()) or Training.count_step(training, loss)
    for _ in range(12):
        training.train_step()
    assert trace["losses"] == losses[:8] and len(trace["initial"]) == len(trace["batches"]) == 64
    raw = torch.cat([p.detach().flatten() for p in training.objective.model.parameters()])
    ema = torch.cat([p.flatten() for p in training.ema_model.parameters()])
    assert trace["final_norm"] == pytest.approx(ema.norm().item(), rel=1e-5)
    assert (
        trace["ema_distance"] == pytest.approx(((raw - ema).norm() / raw.norm()).item(), rel=1e-3) and trace["ema_distance"] > 0
    )


class Killed(Exception):
    pass


MAE_RUN = SHORT.vary(objective=partial(MAE, decoder_dim=16, decoder_depth=1, decoder_heads=2), augment=())


@pytest.mark.parametrize("stop", slow_after(1, [5, 1, 2, 10]))
@pytest.mark.parametrize("run", slow_after(1, [SHORT, SHORT.vary(early_stop=12), MAE_RUN]), ids=["accuracy", "early stop", "without labels"])
def test_trace_and_curve_of_a_resumed_run_are_those_of_an_uninterrupted_one(run, stop, tmp_path, monkeypatch):
    def kill(step, accuracy):
        if step > stop:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("smallvit.train.loop.CHECKPOINT_SECONDS", 0.0)
        with pytest.raises(Killed):
            fit(run, tmp_path / "killed", watch=kill)
    steps = []
    resumed = fit(run, tmp_path / "killed", watch=lambda step, _: steps.append(step))
    whole = fit(run, tmp_path / "whole")
    assert steps[0] == stop + 1 and resumed.trace == whole.trace
    assert (resumed.curve, resumed.health) == (whole.curve, whole.health) and resumed.correct == whole.correct


@pytest.mark.slow
def test_trace_of_a_stacked_run_is_that_of_the_run_alone_up_to_rounding(tmp_path):
    runs = [SHORT.at_seed(seed) for seed in range(3)]
    alone = [fit(run, tmp_path / f"alone{run.seed}").trace for run in runs]
    stacked = fit_stacked(runs, [tmp_path / str(run.seed) for run in runs])
    assert [record.stacked for record in stacked] == [3] * 3
    for one, record in zip(alone, stacked):
        assert (record.trace["initial"], record.trace["batches"]) == (one["initial"], one["batches"])
        assert record.trace["losses"] == pytest.approx(one["losses"], rel=1e-3) and len(one["losses"]) == 8
        assert record.trace["ema_distance"] == pytest.approx(one["ema_distance"], rel=0.05)
        assert record.trace["final_norm"] == pytest.approx(one["final_norm"], rel=1e-3)
    assert len({trace["initial"] for trace in alone}) == len({trace["batches"] for trace in alone}) == 3


def trace(run: Run, steps: int = 4) -> dict:
    """The trace of a run after a few steps."""
    training = training_of(run)
    for _ in range(min(steps, run.steps)):
        training.train_step()
    return training.facts()["trace"]


@cache
def trace_of_short() -> dict:
    """The trace of SHORT after a few steps."""
    return trace(SHORT)


def test_technique_sees_the_same_batches_from_other_initial_weights():
    one, other = trace_of_short(), trace(SHORT.vary(tokenizer=partial(ShiftedPatchEmbed, patch=2)))
    assert one["batches"] == other["batches"] and one["initial"] != other["initial"]
    dropout = trace(SHORT.vary(attention=partial(Attention, dropout=0.2)))
    assert (dropout["initial"], dropout["batches"]) == (one["initial"], one["batches"]) and dropout["losses"] != one["losses"]


@pytest.mark.parametrize(
    "change, differs",
    [
        ({"seed": 1}, {"initial", "batches"}),
        ({"augment": ()}, {"batches"}),
        ({"batch": 9}, {"batches"}),
        ({"labels": 60}, {"batches"}),
        ({"depth": 3}, {"initial"}),
        ({"lr": 2e-3}, set()),
    ],
)
def test_other_data_and_other_weights_show_in_the_trace(change, differs):
    one, other = trace_of_short(), trace(SHORT.vary(**change))
    assert {name for name in ("initial", "batches") if one[name] != other[name]} == differs
    assert one["losses"] != other["losses"]


@pytest.mark.parametrize("step, shown", [(0, True), (2, True), (3, False)])
def test_one_other_image_in_the_first_batches_shows(step, shown, monkeypatch):
    before = trace_of_short()

    def other_index(n, batch, now, seed):
        found = batch_index(n, batch, now, seed).clone()
        found[0] = (found[0] + 1) % n if now == step else found[0]
        return found

    monkeypatch.setattr("smallvit.train.batches.batch_index", other_index)
    assert (trace(SHORT)["batches"] != before["batches"]) == shown


def test_average_that_is_not_updated_shows(tmp_path, monkeypatch):
    def copy_instead(pairs, weight):
        ema_update(pairs, 1.0)

    monkeypatch.setattr("smallvit.train.loop.ema_update", copy_instead)
    monkeypatch.setattr("smallvit.train.stack.ema_update", copy_instead)
    run = SHORT.vary(steps=8)
    assert fit(run, tmp_path / "alone").trace["ema_distance"] == 0.0
    stacked = fit_stacked([run, run.at_seed(1)], [tmp_path / "0", tmp_path / "1"])
    assert [record.trace["ema_distance"] for record in stacked] == [0.0, 0.0]


@pytest.mark.parametrize("change", [{"ema": 0.0}, {"ema": 0.08}, {"steps": 0}, {"steps": 1, "ema": 1.0}], ids=str)
def test_run_without_an_average_over_several_steps_has_no_distance(change, tmp_path):
    found = fit(SHORT.vary(**change), tmp_path).trace
    assert found["ema_distance"] is None and found["final_norm"] > 0
    if change.get("steps") == 0:
        assert found["batches"] is None and found["losses"] == []


def test_models_without_weights_and_objectives_without_labels_have_a_trace(tmp_path):
    pixels = fit(SHORT.vary(model=Pixels, steps=0, augment=(), evaluators=(knn,)), tmp_path / "pixels").trace
    assert pixels["final_norm"] == 0 and pixels["ema_distance"] is None
    mae = fit(MAE_RUN, tmp_path / "mae").trace
    assert len(mae["losses"]) == 8 and mae["ema_distance"] > 0


# What is hashed


def test_rounding_changes_no_hash_and_another_draw_does():
    """As float32 products that are summed in another order. 3,000 tensors; one other value in 2,000 shows as well."""
    generator = torch.Generator().manual_seed(0)
    changed = 0
    for _ in range(3_000):
        values = torch.randn(40, 50, generator=generator)
        noise = 1 + 6e-8 * torch.randn(40, 50, generator=generator, dtype=torch.float64)
        changed += digest([("w", values)]) != digest([("w", values.double() * noise)])
    assert changed <= 2
    assert digest([("w", values)]) != digest([("w", torch.randn(40, 50, generator=generator))])
    assert (
        digest([("w", values)])
        != digest([("w", values.T)])
        != digest([("w", values.flatten()[torch.randperm(2000)].view(50, 40))])
    )


def test_names_shapes_scales_and_constants_are_told_apart():
    ones = torch.ones(6)
    tensors = [ones, 2 * ones, 0 * ones, ones.view(2, 3), ones.view(3, 2), -torch.arange(6.0), torch.arange(6.0), torch.ones(0)]
    found = [digest([("w", tensor)]) for tensor in tensors] + [digest([("v", ones)]), digest([])]
    assert len(set(found)) == len(found)
    assert digest([("w", 0 * ones)]) == digest([("w", -0.0 * ones)])
    assert digest([("n", torch.tensor(3))]) == digest([("n", torch.tensor(3))])


def test_norm_and_distance():
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    with torch.no_grad():
        for parameter, value in zip((*one.parameters(), *other.parameters()), (3.0, 4.0, 3.0, 9.0)):
            parameter.fill_(value)
    assert norm(one.parameters()) == 5 and distance(one, other) == 1 and distance(one, one) == 0
    assert distance(torch.nn.Module(), torch.nn.Module()) is None
