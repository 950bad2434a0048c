"""data2vec: the targets and the loss are those of the equations, and the teacher is an exponential moving average."""

import copy
from functools import partial

import pytest
import torch
from toys import MOVES, TINY_VIT, check_average_after_a_move, randomize, tiny_vit

from smallvit import ConvStem, MeanTokens, Merge, Run, ShiftedPatchEmbed, SmallCNN, fit, knn
from smallvit.augment import Batch
from smallvit.numerics import Numerics
from smallvit.objectives import Data2Vec
from smallvit.objectives.collapse import collapse_kind, collapse_statistics
from smallvit.record import WEIGHTS
from smallvit.train import loop

VIT = partial(tiny_vit, (8, 8), classes=5, pool=MeanTokens)
SMALL = {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2, "masks": 2}
RUN = Run(
    model=TINY_VIT, objective=partial(Data2Vec, **SMALL), unlabelled=True, labels=50, val=50, steps=6, batch=16, evaluators=(knn,)
).vary(pool=MeanTokens)  # fmt: skip


@pytest.fixture
def batch():
    return Batch(torch.randn(6, 1, 8, 8), torch.full((6, 5), torch.nan))


def standardized(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()


@pytest.mark.parametrize("layers, used", [(None, (0, 1)), (1, (1,))])
def test_targets_by_a_loop_over_blocks_and_tokens(layers, used, batch):
    objective = Data2Vec(randomize(VIT(registers=1)), layers=layers, **SMALL)
    found, teacher = objective.targets(batch.images), objective.model
    x = teacher.position(torch.cat([teacher.prefix.expand(6, -1, -1), teacher.tokenizer(batch.images)], 1), (4, 4))
    outputs = []
    for block in teacher.blocks:
        x = x + block.attention(block.norm1(x)).x
        outputs.append(block.mlp(block.norm2(x)))
        x = x + outputs[-1]
    mean = torch.stack([
        torch.stack([sum(standardized(outputs[block][image, 1 + patch]) for block in used) / len(used) for patch in range(16)])
        for image in range(6)
    ])  # fmt: skip
    mean = mean - mean.mean(0)
    expected = torch.stack([torch.stack([standardized(token) for token in image]) for image in mean])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found.mean(-1).abs().max() < 1e-5 and (found.var(-1, correction=0) - 1).abs().max() < 1e-2
    assert not found.requires_grad and objective.observed.features.shape == (6, 16)


def test_the_loss_by_a_loop_over_hidden_patches(batch):
    objective = Data2Vec(VIT(), ratio=0.5, **SMALL)
    torch.manual_seed(1)
    visible, hidden = objective.parts[0].hide(batch.images.repeat(2, 1, 1, 1))
    torch.manual_seed(1)
    loss = objective(batch, 0.0)["loss"].item()
    targets, squares = objective.targets(batch.images), []
    assert visible.shape == hidden.shape == (12, 8) and not torch.equal(hidden[:6], hidden[6:])
    for choice in range(12):
        image, seen = batch.images[choice % 6 : choice % 6 + 1], visible[choice : choice + 1]
        shown = torch.zeros(16).scatter(0, seen[0], 1.0).view(1, 1, 4, 1, 4, 1).expand(1, 1, 4, 2, 4, 2).reshape(1, 1, 8, 8)
        tokens = objective.student.tokens(image * shown, keep=seen)[0]
        predicted = objective.decoder(tokens, seen, hidden[choice : choice + 1], (4, 4))[0]
        squares += [(p - targets[choice % 6, patch]).square().sum().item() / 4 for p, patch in zip(predicted, hidden[choice].tolist())]
    assert loss == pytest.approx(sum(squares) / len(squares), rel=1e-5)


def test_equal_choices_of_patches_count_as_one(batch):
    one, three = (Data2Vec(VIT(), **SMALL | {"masks": masks}) for masks in (1, 3))
    three.load_state_dict(one.state_dict())
    choice = one.parts[0].hide(batch.images)
    losses = []
    for objective in (one, three):
        objective.parts[0].hide = lambda images: tuple(index.repeat(len(images) // 6, 1) for index in choice)
        losses.append(objective(batch, 0.0)["loss"].item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("tokenizer", [partial(ShiftedPatchEmbed, patch=2), partial(ConvStem, layers=1)], ids=["spt", "stem"])
def test_hidden_pixels_reach_the_targets_and_not_the_prediction(tokenizer, batch):
    objective = Data2Vec(VIT(tokenizer=tokenizer), **SMALL).eval()
    mae = objective.parts[0]
    visible, _ = mae.hide(batch.images)
    shown = mae.encode(batch.images, visible)
    pixels = torch.zeros(6, 16).scatter(1, visible, 1.0).view(6, 1, 4, 1, 4, 1).expand(6, 1, 4, 2, 4, 2).reshape(6, 1, 8, 8)
    other = batch.images + (1 - pixels) * torch.randn(6, 1, 8, 8)
    assert torch.equal(mae.encode(other, visible), shown)
    assert not torch.allclose(objective.targets(other), objective.targets(batch.images), atol=1e-2)


def test_equal_images_are_a_flat_collapse():
    objective = Data2Vec(VIT(), **SMALL)
    objective(Batch(torch.ones(6, 1, 8, 8), torch.zeros(6, 5)), 0.0)
    assert collapse_kind(collapse_statistics(objective.observed)).startswith("flat")


@pytest.mark.parametrize("move", [*MOVES.values(), copy.deepcopy], ids=[*MOVES, "copied"])
def test_the_teacher_follows_the_student_after_a_move(move):
    check_average_after_a_move(Data2Vec(VIT(), momentum=0.0, **SMALL).train(), move)


@pytest.mark.parametrize("progress, momentum", [(0.0, 0.9), (0.5, 0.94995), (1.0, 0.9999)])
def test_the_teacher_starts_equal_gets_no_gradient_and_follows(progress, momentum, batch):
    objective = Data2Vec(VIT(dropout=0.5, registers=1), momentum=0.9, **SMALL).train()
    pairs = list(zip(objective.model.parameters(), objective.student.parameters()))
    assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() and not a.requires_grad for a, b in pairs)
    assert objective.trained_model is objective.student and not any(m.training for m in objective.model.modules())
    assert torch.equal(objective.targets(batch.images), objective.targets(batch.images))  # without dropout
    objective(batch, 0.0)["loss"].backward()
    assert all(a.grad is None for a, _ in pairs)
    unused = ("head.", "pool.")
    assert all(p.grad is not None for name, p in objective.student.named_parameters() if not name.startswith(unused))
    with torch.no_grad():
        for _, student in pairs:
            student.add_(1.0)
    before = [teacher.clone() for teacher, _ in pairs]
    objective.after_step(progress)
    for old, (teacher, _) in zip(before, pairs):
        torch.testing.assert_close(teacher, old + 1 - momentum, rtol=1e-4, atol=1e-6)


def test_the_teacher_has_no_dropout_in_a_loop_that_never_calls_train(batch):
    objective = Data2Vec(VIT(dropout=0.5).train(), **SMALL)
    assert objective.training and torch.equal(objective.targets(batch.images), objective.targets(batch.images))


def test_copies_keep_one_student_and_half_precision_gives_nearly_the_same_loss(batch):
    objective, losses = Data2Vec(VIT(), **SMALL), []
    other = copy.deepcopy(objective)
    assert other.parts[0].model is other.student and other.parts[0].decoder is other.decoder
    assert {name.partition(".")[0] for name in other.state_dict()} == {"model", "student", "decoder"}
    for half in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            losses.append(objective(batch, 0.0)["loss"].item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


# Runs


def test_a_run_learns_to_predict_and_its_record_has_collapse_statistics(tmp_path):
    record = fit(RUN.vary(steps=36, lr=5e-3, ema=0.0), tmp_path)
    assert record.curve[-1][1] < 0.8 * record.curve[0][1] and set(record.health[-1]) == {"step", "spread", "rank", "knn_1"}
    assert record.health[-1]["spread"] > 0.05 and record.stacked is None


def test_the_native_kernel_gives_the_same_training(tmp_path):
    records = [fit(RUN, tmp_path / str(kernel), numerics=Numerics(kernel=kernel)) for kernel in (None, "native")]
    assert records[0].curve[-1][1] == pytest.approx(records[1].curve[-1][1], abs=1e-3)


@pytest.mark.slow
def test_resumed_run_ends_with_equal_weights(tmp_path, monkeypatch):
    fit(RUN, tmp_path / "whole")
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    train_step = loop.Training.train_step

    def interrupted(self):
        if self.step == 3:
            raise KeyboardInterrupt
        train_step(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop.Training, "train_step", interrupted)
        fit(RUN, tmp_path / "resumed")
    fit(RUN, tmp_path / "resumed")
    assert (tmp_path / "whole" / WEIGHTS).read_bytes() == (tmp_path / "resumed" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Data2Vec(VIT(), masks=0), "masks is 0; expected an integer of at least 1"),
        (lambda: Data2Vec(VIT(), masks=2.5), "masks is 2.5; expected an integer"),
        (lambda: Data2Vec(VIT())(Batch(torch.rand(1, 1, 8, 8), torch.ones(1, 5)), 0.0), "got one image; expected a batch of at least two"),
        (lambda: Data2Vec(VIT(), momentum=1.0), "momentum is 1.0; expected a number from 0 to 0.9999"),
        (lambda: Data2Vec(VIT(), layers=3), "layers is 3 for a model of 2 blocks; expected from 1 to 2, or None"),
        (lambda: Data2Vec(VIT(), layers=0), "layers is 0 for a model of 2 blocks"),
        (lambda: Data2Vec(VIT(depth=0)), "model of 0 blocks"),
        (lambda: Data2Vec(VIT(), ratio=0.99), "ratio 0.99 of 16 patches shows 0"),
        (lambda: Data2Vec(VIT(reduction=partial(Merge, r=2))), "reduces its tokens, expected reduction=None"),
        (lambda: Data2Vec(SmallCNN((8, 8), 1, 5)), "hides patches from a ViT; got a SmallCNN"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
