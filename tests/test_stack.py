"""Stacked runs: the same training as one by one, up to rounding; runs that cannot be stacked are trained alone."""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._C._functorch import is_batchedtensor
from toys import TINY_VIT, slow_after

from smallvit import (
    DINO,
    MAE,
    SAM,
    AdamW,
    ArmRun,
    Distill,
    DistilledTokens,
    LearnedPrune,
    LearnedThresholds,
    LearnToPrune,
    LeJEPA,
    LocalityAttention,
    MeanTokens,
    Merge,
    PatchEmbed,
    Projected,
    Run,
    SemiSupervised,
    ShiftedPatchEmbed,
    SmallCNN,
    Supervised,
    ablate,
    arrays,
    augment,
    digits,
    knn,
    linear_probe,
)
from smallvit.launch import autotune, launch
from smallvit.objectives.collapse import Collapse, Monitor
from smallvit.optim import tensor_pairs
from smallvit.record import CHECKPOINT, WEIGHTS
from smallvit.train import checkpoint, fit, fit_stacked, loop
from smallvit.train.loop import Training
from smallvit.train.stack import NotStackable, Stack, can_draw_together

fit_module = import_module("smallvit.train.fit")  # the attribute `fit` of the package is the function
SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=12, batch=8, clip=0.5, augment=augment.digits())
WITHOUT_LABELS = SHORT.vary(objective=MAE, augment=(), unlabelled=True, evaluators=(knn,))
STACKABLE = {
    "plain": SHORT,
    "LSA": SHORT.vary(attention=LocalityAttention),
    "one temperature per layer": SHORT.vary(attention=partial(LocalityAttention, temperature="per layer")),
    "SPT": SHORT.vary(tokenizer=partial(ShiftedPatchEmbed, patch=2), pool=MeanTokens, registers=2),
    "merge": SHORT.vary(reduction=partial(Merge, r=2)),
    "batch norm": SHORT.vary(pool=Projected),
    "layer decay": SHORT.vary(layer_decay=0.5, ema=0.0, clip=0.0),
    "cnn": SHORT.vary(model=SmallCNN),
    "class weights": SHORT.vary(objective=partial(Supervised, class_weight="balanced")),
    "MAE": WITHOUT_LABELS,
    "LeJEPA": WITHOUT_LABELS.vary(objective=partial(LeJEPA, hidden=16, dim=4), augment=augment.digit_crops()),
}


def training(run: Run, seed: int) -> Training:
    """A training in double precision, so that rounding cannot hide a mistake."""
    run, data = run.vary(seed=seed), digits()
    made = Training(run, data, data.subset(labels=run.labels, val=run.val, seed=seed), "cpu")
    for module in (made.objective, made.ema_model):
        if module is not None:
            module.double()
    made.ema_pairs = tensor_pairs(made.ema_model, made.objective.model) if made.ema_model else []
    next_batch = made.next_batch

    def double_batch():
        batch = next_batch()
        views = tuple(view.double() for view in batch.views)
        return batch._replace(images=batch.images.double(), targets=batch.targets.double(), views=views)

    made.next_batch = double_batch
    return made


def weights(one: Training) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in one.model.state_dict().items()}


def seeds_of(run: Run, count: int, folder) -> tuple[list[Run], list]:
    """The run with several seeds, and a folder for each."""
    return [run.at_seed(seed) for seed in range(count)], [folder / str(seed) for seed in range(count)]


def assert_equal_weights(one, other):
    expected, found = load_file(one / WEIGHTS), load_file(other / WEIGHTS)
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def double_cross_entropy(logits, targets, weights=None):
    each = -(targets * logits.log_softmax(-1)).sum(-1)
    return (each if weights is None else weights * each).mean()


@pytest.mark.parametrize(
    ("rates", "labels"),
    slow_after(1, [((0.3, 3, 1), (50, 50, 50)), ((1, 1, 1), (50, 50, 50)), ((1, 1, 1), (10, 400, None))]),
    ids=["three rates", "equal", "three numbers of labels"],
)
@pytest.mark.parametrize("run", slow_after(1, STACKABLE.values()), ids=STACKABLE)
def test_stack_takes_the_same_steps_as_its_members_alone(run, rates, labels, monkeypatch):
    monkeypatch.setattr("smallvit.objectives.supervised.cross_entropy", double_cross_entropy)
    runs = [run.vary(lr=rate * run.lr, labels=count) for rate, count in zip(rates, labels)]
    alone, together = ([training(one, seed) for one, seed in zip(runs, (3, 1, 4))] for _ in range(2))
    initial = [weights(one) for one in together]
    stack = Stack(together)
    stack.source = None  # each draws its own batch, in double precision
    for one in (*alone, *together):
        one.objective.train()
    for _ in range(6):
        stack.train_step()
        for one in alone:
            one.train_step()
    for before, one, other in zip(initial, alone, together):
        assert other.step == 6 and other.stacked == 3
        torch.testing.assert_close(other.loss.double(), one.loss.double(), rtol=1e-6, atol=1e-6)
        found, expected = weights(other), weights(one)
        assert any(not torch.equal(found[name], before[name]) for name in found)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-7, msg=name)
        for p, q in zip(other.objective.parameters(), one.objective.parameters()):
            for moment in ("exp_avg", "exp_avg_sq"):
                if one.optimizer.state[q]:
                    torch.testing.assert_close(other.optimizer.state[p][moment], one.optimizer.state[q][moment])


def distilled(**options) -> Run:
    pool = {"pool": DistilledTokens} if "token" in options else {}
    return SHORT.vary(objective=partial(Distill, **options), steps=6, teacher=SHORT.vary(model=SmallCNN, steps=6), **pool)


SEMI = partial(SemiSupervised, weak=augment.digits(0.3), strong=augment.strong_digits(), threshold=0.5)
DRAWN = {
    "plain": SHORT,
    "no augmentation": SHORT.vary(augment=()),
    "mixed": SHORT.vary(augment=(*augment.digits(), augment.Mixup(), augment.RandomErasing())),
    "unlabelled images": SHORT.vary(objective=SEMI),
    "hidden patches": STACKABLE["MAE"],
    "views": STACKABLE["LeJEPA"],
}


def members_of(run: Run, seeds=(3, 1, 4), labels=(50, 50, 50)) -> list[Training]:
    data = digits()
    runs = [run.vary(seed=seed, labels=count) for seed, count in zip(seeds, labels)]
    return [Training(one, data, data.subset(labels=one.labels, val=one.val, seed=one.seed), "cpu") for one in runs]


@pytest.mark.parametrize("labels", [(50, 50, 50), (10, 400, None)], ids=["equal", "three numbers of labels"])
@pytest.mark.parametrize("name", slow_after(1, DRAWN))
def test_batches_that_are_drawn_together_are_those_of_each_run_bit_for_bit(name, labels, monkeypatch):
    if name == "views":  # which are drawn together on a GPU only
        assert not can_draw_together(members_of(DRAWN[name]))
        monkeypatch.setattr("smallvit.train.stack.can_draw_together", lambda members: True)
    alone, together = members_of(DRAWN[name], labels=labels), members_of(DRAWN[name], labels=labels)
    stack = Stack(together)
    assert stack.source is not None
    for step in (0, 1, 5, 40):
        for one in (*alone, *together):
            one.step = step
        batch, expected = stack.next_batch(), [one.next_batch() for one in alone]
        for number, own in enumerate(expected):
            assert torch.equal(batch.images[number], own.images) and torch.equal(batch.targets[number], own.targets)
            for found, one in ((batch.views, own.views), (batch.draws, own.draws)):
                assert len(found) == len(one)
                assert all(torch.equal(tensor[number], tensor_of_one) for tensor, tensor_of_one in zip(found, one))
        assert [one.trace.batches for one in together] == [one.trace.batches for one in alone]


def test_runs_with_a_transform_of_somebody_else_draw_their_own_batches():
    def brighter(batch, generator):
        return batch._replace(images=batch.images + 0.1 * torch.rand(1, generator=generator))

    members = members_of(SHORT)
    assert can_draw_together(members)
    for one in members:
        object.__setattr__(one.run, "augment", (*one.run.augment, brighter))
    assert not can_draw_together(members)


@pytest.mark.parametrize(
    "run, tolerance",
    slow_after(1, [
        (distilled(), 1e-3),
        (SHORT, 1e-3),
        (SHORT.vary(precision="bf16"), 2e-2),
        (distilled(kind="hard"), 1e-3),
        (distilled(token=True), 1e-3),
        (distilled(weight=0.0), 1e-3),
        (distilled(weight=0.0, token=True), 1e-3),  # the head of the distillation token gets no gradient
    ]),
    ids=["soft", "plain", "bf16", "hard", "token", "no weight", "no weight, token"],
)
def test_each_stacked_run_has_the_record_of_the_run_alone_and_its_own_teacher(run, tolerance, tmp_path):
    runs, folders = seeds_of(run, 2, tmp_path)
    alone = [fit(one, tmp_path / f"alone{one.seed}") for one in runs]
    together = fit_stacked(runs, folders)
    assert [r.stacked for r in alone] == [None] * 2 and [r.stacked for r in together] == [2] * 2
    for one, other in zip(alone, together):
        for name in ("seed", "fingerprint", "subset_sha256", "steps", "images_seen", "params"):
            assert getattr(one, name) == getattr(other, name)
        assert [point[1] for point in other.curve] == pytest.approx([point[1] for point in one.curve], abs=tolerance)
        assert other.test["nll"] == pytest.approx(one.test["nll"], abs=tolerance)
    assert fit_stacked(runs, folders) == together, "finished runs were trained again"


# Interrupted stacks


class Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"objective": partial(Supervised, class_weight="balanced")}], ids=["plain", "class weights"]
)
def test_runs_of_all_folds_and_passes_can_be_stacked(changes, tmp_path):
    """The folds have 6, 6 and 5 test images, so that the runs have different numbers of training images."""
    pixels = np.random.default_rng(0).integers(0, 256, (17, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.arange(17) % 3 % 2)
    run = Run(data=partial(arrays, path=str(tmp_path / "a.npz"), folds=3), model=TINY_VIT, steps=6, batch=4, val=0, **changes)
    runs = ablate({"a": run}, seeds=range(2), references=False)
    together, alone = (launch(runs, tmp_path / str(n), recipe="t", jobs=1, stack=n) for n in (6, 1))
    assert [record.stacked for record in together] == [6] * 6 and {record.test_images for record in together} == {5, 6}
    for one, other in zip(together, alone):
        assert one.subset_sha256 == other.subset_sha256 and one.test_index == other.test_index
        assert one.curve[-1][1] == pytest.approx(other.curve[-1][1], abs=1e-4) and one.result == pytest.approx(other.result)


def interrupt(runs, folders, monkeypatch):
    """Train the runs as a stack, save their checkpoints after five steps, and stop."""

    def train(members, train_step, watch):
        for member in members:
            member.objective.train()
        for _ in range(5):
            train_step()
        checkpoint.save(members, members[0].checkpoint_file)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(fit_module, "train", train)
        with pytest.raises(Killed):
            fit_stacked(runs, folders)


@pytest.mark.slow  # test_integrity has the same for a stack that is killed after its first checkpoint
def test_resumed_stack_ends_with_equal_weights(tmp_path, monkeypatch):
    (runs, whole), (_, broken) = seeds_of(SHORT, 2, tmp_path / "whole"), seeds_of(SHORT, 2, tmp_path / "broken")
    fit_stacked(runs, whole)
    interrupt(runs, broken, monkeypatch)
    assert [(folder / CHECKPOINT).exists() for folder in broken] == [True, False]
    assert [r.steps for r in fit_stacked(runs, broken)] == [12, 12]
    for one, other in zip(whole, broken):
        assert_equal_weights(one, other)


@pytest.mark.slow
def test_run_that_cannot_be_stacked_is_trained_once_although_one_of_its_group_diverges(tmp_path, monkeypatch):
    """The launcher divides a group that failed. Runs that had reached their last step are only scored then."""
    runs = [SHORT.vary(dropout=0.1).at_seed(seed) for seed in range(4)]
    steps, train_step = [], Training.train_step

    def one_step(self):
        steps.append(self.run.seed)
        train_step(self)
        if self.run.seed == 3:
            raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(Training, "train_step", one_step)
    records = []
    for group in (runs, runs[:2], runs[2:], runs[2:3]):
        with suppress(FloatingPointError):
            records += fit_stacked(group, [tmp_path / str(one.seed) for one in group])
    assert [steps.count(seed) for seed in range(3)] == [SHORT.steps] * 3 and len(records) == 3
    assert all(record.finished and record.stacked is None for record in records)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed"])
def test_runs_of_a_stack_are_not_trained_again_if_one_of_them_diverges(failing, killed, tmp_path, monkeypatch):
    """They are those of a stack in which no run diverges, bit for bit, also if the stack is killed after the divergence."""
    runs, whole = seeds_of(SHORT, 3, tmp_path / "whole")
    _, folders = seeds_of(SHORT, 3, tmp_path / "diverges")
    expected, seen = fit_stacked(runs, whole), []
    validate = Training.validate

    def diverge(self):
        if self.run.seed == failing and self.step == 4:
            self.loss += float("inf")
        validate(self)

    def kill(step, accuracy):
        if step == 7:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Training, "validate", diverge)
        patch.setattr(loop, "CHECKPOINT_SECONDS", 0)
        with pytest.raises(Killed if killed else FloatingPointError):
            fit_stacked(runs, folders, **{"watch": kill} if killed else {})
    if killed:
        with pytest.raises(FloatingPointError, match=rf"step 7 of 12 \(seed {failing}\)"):
            fit_stacked(runs, folders, watch=lambda step, accuracy: seen.append(step))
        assert seen == [7, 8, 9, 10, 11, 12]
    others = [number for number in range(3) if number != failing]
    found = fit_stacked([runs[n] for n in others], [folders[n] for n in others], watch=lambda *_: pytest.fail("trained again"))
    assert [replace(one, seconds=0) for one in found] == [replace(expected[n], seconds=0) for n in others]
    for number in others:
        assert_equal_weights(whole[number], folders[number])
    assert fit(runs[failing], folders[failing]).finished  # from the beginning, without a checkpoint of the others


def test_stack_of_which_all_runs_diverge_leaves_no_checkpoint(tmp_path, monkeypatch, capsys):
    runs, folders = seeds_of(SHORT, 2, tmp_path)
    validate = Training.validate

    def diverge(self):
        self.loss += float("inf")
        validate(self)

    with monkeypatch.context() as patch, pytest.raises(FloatingPointError, match="seed 0"):
        patch.setattr(Training, "validate", diverge)
        fit_stacked(runs, folders)
    assert not [*tmp_path.rglob(CHECKPOINT)]
    assert fit(runs[0], folders[0]).finished and not capsys.readouterr().err


def test_stack_continues_if_it_is_killed_between_an_infinite_loss_and_the_next_check(tmp_path, monkeypatch):
    def kill(step, accuracy):
        if step == 12:
            raise Killed

    lasting = SHORT.vary(steps=240, weight_decay=10.0, clip=0.0, warmup=0.0)  # the first check is after step 20
    runs, folders = [lasting.vary(lr=rate) for rate in (1e-3, 10.0)], [tmp_path / "0", tmp_path / "1"]
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(loop, "CHECKPOINT_SECONDS", 0)
        fit_stacked(runs, folders, watch=kill)
    seen = []
    with pytest.raises(FloatingPointError, match="step 20 of 240"):
        fit_stacked(runs, folders, watch=lambda step, accuracy: seen.append(step))
    assert seen == [*range(12, 241)] and not [*tmp_path.rglob("*.damaged")]


def test_run_that_diverges_in_a_stack_is_recorded_and_the_others_are_finished(tmp_path):
    lasting = SHORT.vary(steps=24, weight_decay=10.0, clip=0.0)
    runs = [ArmRun(run=lasting.vary(lr=rate), arm=f"{rate}") for rate in (1e-3, 10.0, 2e-3)]
    found = launch(runs, tmp_path, recipe="t", jobs=1, stack=3)
    assert [record.status for record in found] == ["finished", "failed", "finished"] and "the loss is" in found[1].error
    assert [record.stacked for record in found] == [3, None, 3]


def test_run_of_a_stack_that_diverges_in_the_step_before_a_check_costs_the_others_nothing(tmp_path):
    """Its losses are finite then, but its logits are not."""
    wild = SHORT.vary(steps=12, weight_decay=10.0, clip=0.0, ema=0.0, warmup=0.0)  # a check after each step
    runs, folders = [wild.vary(lr=rate) for rate in (1e-3, 10.0)], [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(FloatingPointError, match=r"at step 5 of 12 \(seed 0\), the logits of ViT are not finite.*smaller lr"):
        fit_stacked(runs, folders)
    (record,) = fit_stacked(runs[:1], folders[:1], watch=lambda *_: pytest.fail("trained again"))
    assert record.finished and record.stacked == 2


def test_trial_that_diverges_in_its_last_step_fails_as_one_with_an_infinite_loss(tmp_path):
    run = SHORT.vary(lr=10.0, steps=6, weight_decay=10.0, clip=0.0, ema=0.0, warmup=0.0)
    with pytest.raises(FloatingPointError, match=r"at step 6 of 6 \(seed 0\), the logits"):
        fit_stacked([run], [tmp_path], validation_only=True, curves=False)


def test_lists_of_different_lengths_are_refused(tmp_path):
    runs, folders = seeds_of(SHORT, 2, tmp_path)
    with pytest.raises(ValueError, match="got 2 runs, 1 folders, 2 tags and 2 dependencies; expected as many of each"):
        fit_stacked(runs, folders[:1])
    assert not folders[0].exists()


def test_run_that_is_further_than_the_others_is_trained_alone(tmp_path):
    runs, folders = seeds_of(SHORT.vary(steps=6), 2, tmp_path)
    with fit_module.prepare_training(runs[0], folders[0], fit_module.NO_TAGS, "cpu", None, None) as (ahead, _):
        ahead.objective.train()
        ahead.train_step()
        checkpoint.save([ahead], ahead.checkpoint_file)
    assert [r.stacked for r in fit_stacked(runs, folders)] == [None, None]
    fit(runs[0], tmp_path / "alone")
    assert_equal_weights(tmp_path / "alone", folders[0])


@pytest.mark.slow
def test_steps_of_runs_that_are_trained_one_after_another_are_those_of_the_group(tmp_path):
    runs, folders = seeds_of(SHORT.vary(dropout=0.1), 3, tmp_path)
    seen = []
    fit_stacked(runs, folders, watch=lambda step, accuracy: seen.append(step))
    assert seen == sorted(seen) and seen[-1] == 12 and len(seen) >= 30


def test_training_without_a_file_for_checkpoints_writes_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    training = Training(SHORT, digits(), digits().subset(labels=50, val=20, seed=0), "cpu")
    loop.train([training], training.train_step, lambda step, accuracy: None)
    assert training.ended and not list(tmp_path.iterdir())


def test_time_to_write_a_checkpoint_is_no_training_time_and_delays_the_next_one(tmp_path, monkeypatch):
    clock, saves = [0.0], []

    def step():
        clock[0] += 0.5
        training.step += 1

    def save(members, path):
        saves.append(training.step)
        clock[0] += 12.0

    training = Training(SHORT.vary(steps=60), digits(), digits().subset(labels=50, val=20, seed=0), "cpu")
    training.checkpoint_file, training.seconds = tmp_path / "c", 0.0
    monkeypatch.setattr(loop.checkpoint, "save", save)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: clock[0])
    loop.train([training], step, lambda step, accuracy: None)
    assert saves == [21, 42] and training.seconds == 30.0


def test_checkpoint_of_a_stack_is_as_small_as_those_of_its_runs_alone(tmp_path, monkeypatch):
    runs, folders = seeds_of(SHORT.vary(ema=0.1), 4, tmp_path)
    interrupt(runs, folders, monkeypatch)
    alone = Training(runs[0], digits(), digits().subset(labels=50, val=20, seed=0), "cpu")
    alone.checkpoint_file = tmp_path / "alone"
    checkpoint.resume([alone])
    alone.train_step()
    checkpoint.save([alone], alone.checkpoint_file)
    assert (folders[0] / CHECKPOINT).stat().st_size < 1.1 * 4 * (tmp_path / "alone").stat().st_size


# Runs that cannot be stacked


@pytest.mark.parametrize(
    "run, reason",
    [
        (SHORT.vary(dropout=0.1, steps=6), "random"),
        pytest.param(SHORT.vary(drop_path=0.1, steps=6), "random", marks=pytest.mark.slow),
        (SHORT.vary(early_stop=2), "early_stop"),
        (SHORT.vary(init=SHORT, steps=0), "nothing to train"),
        (SHORT.vary(objective=partial(DINO, prototypes=16), augment=augment.digit_crops(local=0)), "DINO changes state"),
    ],
    ids=["dropout", "drop path", "early stop", "frozen", "objective"],
)
def test_run_that_cannot_be_stacked_is_trained_alone(run, reason, tmp_path):
    runs, folders = seeds_of(run, 2, tmp_path)
    with pytest.raises(NotStackable, match=reason):
        Stack([training(one, one.seed) for one in runs])
    if reason == "random":
        fit(runs[1], tmp_path / "alone")
        assert [r.stacked for r in fit_stacked(runs, folders)] == [None, None]
        assert_equal_weights(tmp_path / "alone", folders[1])


@pytest.mark.parametrize("change", slow_after(1, [{"weight_decay": 0.5}, {"steps": 24}, {"val": 40}]), ids=lambda x: next(iter(x)))
def test_runs_that_differ_in_more_than_seed_learning_rate_and_labels_are_trained_alone(change, tmp_path):
    runs = [SHORT, SHORT.vary(seed=1, **change)]
    with pytest.raises(NotStackable, match="more than seed, learning rate and number of labels"):
        Stack([training(run, run.seed) for run in runs])
    assert [r.stacked for r in fit_stacked(runs, [tmp_path / "0", tmp_path / "1"])] == [None, None]


def test_members_whose_losses_differ_from_those_alone_are_not_stacked():
    members = [training(SHORT, seed) for seed in range(2)]
    members[1].objective.model.blocks[0].attention.scale *= 3  # a number of one member that is no weight
    with pytest.raises(NotStackable, match="in the stack and"):
        Stack(members)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("factor", [0.0, -1.0], ids=["no gradient", "opposite gradient"])
def test_members_whose_gradients_differ_from_those_alone_are_not_stacked(factor, precision):
    """The tokens get another gradient in a stack, and the same values."""

    def change(module, inputs, out):
        return out.detach() * (1 - factor) + out * factor if is_batchedtensor(out) else out

    members = [training(SHORT.vary(precision=precision), seed) for seed in range(2)]
    for member in members:
        member.objective.model.tokenizer.register_forward_hook(change)
    with pytest.raises(NotStackable, match=r"another gradient of .* in the stack than alone"):
        Stack(members)


def test_batch_normalization_in_the_pool_is_stacked_in_half_precision(tmp_path):
    runs, folders = seeds_of(SHORT.vary(pool=Projected, precision="bf16", steps=6), 2, tmp_path)
    records = fit_stacked(runs, folders)
    assert [r.stacked for r in records] == [2, 2]
    alone = fit(runs[1], tmp_path / "alone")
    assert alone.curve[0][1] == pytest.approx(records[1].curve[0][1], rel=0.02)


def test_a_learning_rate_of_0_trains_nothing_in_a_stack(tmp_path):
    runs, folders = seeds_of(SHORT.vary(lr=0.0, steps=4), 2, tmp_path)
    assert [r.stacked for r in fit_stacked(runs, folders)] == [2, 2]
    fit(runs[1], tmp_path / "alone")
    assert_equal_weights(tmp_path / "alone", folders[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(reduction=LearnedThresholds), "LearnedThresholds learns from the sizes of tokens"),
        (dict(reduction=LearnedPrune, objective=LearnToPrune, init=SHORT), "the model draws random numbers inside a step"),
        (dict(dropout=0.1), "the model draws random numbers inside a step"),
    ],
    ids=["thresholds", "DynamicViT", "dropout"],
)
def test_reason_against_a_stack_says_what_is_in_the_way(changes, reason):
    with pytest.raises(NotStackable, match=reason):
        Stack([training(SHORT.vary(**changes), seed) for seed in range(2)])


# Stacks of a recipe


def comparison(seeds: int, **arms: Run) -> list[ArmRun]:
    return ablate(arms, labels=[50], seeds=range(seeds), references=False)


@pytest.mark.slow
def test_recipe_in_stacks_has_the_same_runs_as_without(tmp_path):
    start = SHORT.vary(lr=2e-3)
    frozen = SHORT.vary(init=start, steps=0, augment=(), ema=0.0, evaluators=(linear_probe,))
    runs = comparison(3, scratch=SHORT, dropout=SHORT.vary(dropout=0.1), tuned=SHORT.vary(init=start, lr=5e-4), frozen=frozen)
    shown = []
    records = launch(runs, tmp_path, recipe="t", jobs=1, stack=3, show=shown.append)
    assert [(r.arm, r.seed) for r in records] == [(entry.arm, entry.seed) for entry in runs]
    assert {(r.arm, r.stacked) for r in records} == {("scratch", 3), ("dropout", None), ("tuned", 3), ("frozen", None)}
    assert len(shown) == 15 and all(r.finished for r in shown)  # with the 3 runs that "tuned" and "frozen" depend on


def test_failing_arm_does_not_affect_other_stacks(tmp_path):
    runs = comparison(2, scratch=SHORT, broken=SHORT.vary(tokenizer=partial(PatchEmbed, patch=3)))
    records = launch(runs, tmp_path, recipe="t", jobs=1, stack=2)
    assert [(r.arm, r.status, r.stacked) for r in records] == [("scratch", "finished", 2), ("broken", "failed", None)] * 2


def as_if(monkeypatch, seconds):
    """Let a step seem to take `seconds(training)`."""
    measured = lambda pairs, repeats=8: [step() or seconds(member) for step, member in pairs]  # noqa: E731
    monkeypatch.setattr(autotune, "step_seconds", measured)


def root(member: Training) -> float:
    """As if k runs together took the square root of k times as long as one."""
    return (member.stacked or 1) ** 0.5


@pytest.mark.slow
def test_stack_size_is_measured_and_leaves_no_worker_idle(monkeypatch):
    runs = comparison(9, scratch=SHORT)
    as_if(monkeypatch, root)
    size, text = autotune.stack_size(runs, jobs=2, device="cpu")
    assert size == 4 and "stack of 4: 500 ms per step" in text and "stack of 8" not in text
    assert autotune.stack_size(runs, jobs=1, device="cpu")[0] == 8 and autotune.stack_size(runs[:1], jobs=1, device="cpu")[0] == 1
    size, text = autotune.stack_size(comparison(4, dropout=SHORT.vary(dropout=0.1)), jobs=1, device="cpu")
    assert size == 1 and "stack of 2: NotStackable" in text and "random" in text
    as_if(monkeypatch, lambda member: float(member.stacked or 1))
    assert autotune.stack_size(runs, jobs=1, device="cpu")[0] == 1


@pytest.mark.parametrize("steps, expected, milliseconds", slow_after(1, [(12, 4, 750), (1_200, 1, 995)]))
def test_stack_size_weighs_all_kinds_of_runs_by_their_steps(steps, expected, milliseconds, monkeypatch):
    start = SHORT.vary(objective=partial(DINO, prototypes=16), augment=augment.digit_crops(local=0), clip=0.0, ema=0.0)
    as_if(monkeypatch, root)  # DINO cannot be stacked
    size, text = autotune.stack_size(comparison(4, tuned=SHORT.vary(init=start.vary(steps=steps))), jobs=1, device="cpu")
    assert size == expected and f"stack of 4: {milliseconds} ms" in text and "1 of 2 kinds of runs cannot be stacked" in text


def test_stack_size_reports_what_fails(monkeypatch):
    runs = comparison(8, scratch=SHORT)

    def seconds(member):
        if member.stacked == 4:
            raise RuntimeError("out of memory")
        return root(member)

    as_if(monkeypatch, seconds)
    size, text = autotune.stack_size(runs, jobs=1, device="cpu")
    assert size == 2 and "stack of 4: RuntimeError, out of memory" in text and "stack of 8" not in text
    broken = [replace(entry, run=entry.run.vary(tokenizer=partial(PatchEmbed, patch=3))) for entry in runs]
    size, text = autotune.stack_size(broken, jobs=1, device="cpu")
    assert size == 1 and "patches of 3 pixels" in text
    untrained = [replace(entry, run=entry.run.vary(steps=0)) for entry in runs]
    assert autotune.stack_size(untrained, jobs=1, device="cpu") == (1, "there is nothing to train")
    with pytest.raises(ValueError, match="device is 'cdua'"):
        autotune.stack_size(runs, jobs=1, device="cdua")


@pytest.mark.parametrize("optimizer", slow_after(1, [AdamW, partial(SAM, rho=0.2)]), ids=["AdamW", "SAM"])
@pytest.mark.parametrize("name", ["MAE", "LeJEPA"])
def test_each_run_of_a_stack_without_labels_is_checked_for_collapse(name, optimizer, tmp_path, monkeypatch):
    runs, folders = seeds_of(STACKABLE[name].vary(optimizer=optimizer), 2, tmp_path)
    alone = [fit(run, tmp_path / f"alone{run.seed}") for run in runs]
    seen = {}
    monkeypatch.setattr(Monitor, "check", lambda monitor, step, observation: seen.update({(id(monitor), step): observation.features}))
    together = fit_stacked(runs, folders)
    assert len(seen) == 2 * SHORT.steps and all(not is_batchedtensor(features) for features in seen.values())
    for one, other in zip(alone, together):
        assert other.stacked == 2
        for point, expected in zip(other.health, one.health, strict=True):
            assert point == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("error", [Collapse, FloatingPointError])
def test_run_that_collapses_in_a_stack_is_named(error, tmp_path, monkeypatch):
    def check(monitor, step, observation):
        monitors.append(monitor)
        if step == 4 and monitor is not monitors[0]:
            raise error("no features")

    monitors = []
    monkeypatch.setattr(Monitor, "check", check)
    runs, folders = seeds_of(WITHOUT_LABELS, 2, tmp_path)
    with pytest.raises(error, match=r"no features \(seed 1\)"):
        fit_stacked(runs, folders)


def test_runs_keep_their_features_if_a_step_observes_none():
    members = members_of(STACKABLE["MAE"])
    stack, objective = Stack(members), members[0].objective
    stack.train_step()
    seen, forward = [one.objective.observed.features for one in members], objective.forward
    objective.forward = lambda *inputs: (forward(*inputs), setattr(objective, "observed", None))[0]
    stack.train_step()
    assert all(one.objective.observed.features is features for one, features in zip(members, seen))
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("run", [SHORT, STACKABLE["LeJEPA"]], ids=["labels", "LeJEPA"])
def test_stack_in_bf16(run, tmp_path):
    runs, folders = seeds_of(run.vary(precision="bf16"), 2, tmp_path)
    assert [record.stacked for record in fit_stacked(runs, folders)] == [2, 2]
