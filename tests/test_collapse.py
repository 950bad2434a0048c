"""Collapse is seen, called by its name, and stops the run; a healthy run goes on."""

import math
from functools import partial

import pytest
import torch

from smallvit import Block, PatchEmbed, Run, ViT, augment, digits, fit
from smallvit.objectives import DINO
from smallvit.objectives.collapse import APART, LOOKS, PATIENCE, Collapse, Monitor, Observation, entropy, measure, mode

GENERATOR = torch.Generator().manual_seed(0)
SPREAD_OUT = torch.randn(64, 16, generator=GENERATOR)
SURE = torch.eye(8)[torch.arange(64) % 8]


def seen(features=SPREAD_OUT, targets=SURE) -> Observation:
    return Observation(features, targets)


# The numbers


def test_numbers_of_features_that_point_all_ways():
    axes = torch.cat([torch.eye(16), -torch.eye(16)])
    numbers = measure(Observation(axes))
    assert numbers == pytest.approx({"spread": 1.0, "rank": 16.0}, abs=1e-4)


def test_numbers_of_features_that_are_one():
    numbers = measure(Observation(torch.ones(8, 16)))
    assert numbers["spread"] == pytest.approx(0, abs=1e-6) and numbers["rank"] <= 2


def test_rank_counts_directions():
    axes = torch.cat([torch.eye(16)[:3], -torch.eye(16)[:3]])
    assert measure(Observation(axes))["rank"] == pytest.approx(3, abs=1e-4)


def test_the_teachers_numbers():
    assert measure(seen()) == measure(seen()) | {"entropy": 0.0, "information": pytest.approx(math.log(8), abs=1e-5)}
    even = measure(seen(targets=torch.full((64, 8), 1 / 8)))
    assert even["entropy"] == pytest.approx(1) and even["information"] == pytest.approx(0, abs=1e-5)


def test_entropy_by_hand():
    assert entropy(torch.tensor([0.5, 0.25, 0.25, 0.0])).item() == pytest.approx(1.5 * math.log(2))


# The modes


@pytest.mark.parametrize(
    ("what", "word", "knob"),
    [
        (seen(targets=torch.full((64, 8), 1 / 8)), "uniform", "lower teacher_temp"),
        (seen(targets=torch.eye(8)[:1].expand(64, -1)), "one-hot", "raise teacher_temp"),
        (seen(features=torch.ones(64, 16) + 1e-4 * SPREAD_OUT), "flat", "learning rate"),
        (Observation(torch.ones(64, 16)), "flat", "learning rate"),
    ],
    ids=["uniform", "one-hot", "flat", "flat without a teacher"],
)
def test_every_mode_has_a_name_and_a_first_knob(what, word, knob):
    assert mode(measure(what)).startswith(f"{word}: ") and knob in mode(measure(what))


@pytest.mark.parametrize("what", [seen(), Observation(SPREAD_OUT)], ids=["with a teacher", "without"])
def test_a_healthy_batch_has_no_mode(what):
    assert mode(measure(what)) is None


def test_the_monitor_stops_after_patience_and_forgets_when_it_has_recovered():
    monitor, flat = Monitor(LOOKS * 20), Observation(torch.ones(64, 16))
    looks = [20 * (i + 1) for i in range(2 * PATIENCE)]
    for step in looks[: PATIENCE - 1]:
        monitor.check(step, flat)
    monitor.check(looks[PATIENCE - 1], seen())
    for step in looks[PATIENCE:-1]:
        monitor.check(step, flat)
    with pytest.raises(Collapse, match=f"collapsed by step {looks[-1]}, flat: .*spread "):
        monitor.check(looks[-1], flat)


def test_between_looks_nothing_is_computed():
    monitor = Monitor(50)
    for step in range(1, APART):
        monitor.check(step, None)


def test_one_image_alone_is_not_taken_for_a_collapse():
    monitor = Monitor(50)
    for step in range(1, 2 * PATIENCE * APART + 1):
        monitor.check(step, Observation(torch.ones(1, 16)))


# In runs


VIT = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), block=partial(Block, mlp_ratio=2.0), dim=32, depth=2, heads=2)


def dino(**knobs) -> Run:
    return Run(
        data=digits,
        model=VIT,
        objective=partial(DINO, prototypes=64, hidden=64, bottleneck=16, **knobs),
        augment=augment.digit_crops(size=4, local=2),
        steps=400,
        batch=32,
        lr=2e-3,
        clip=0.0,
        ema=0.0,
    )


def train(run: Run, alias: bool = False):
    """The run's first 200 steps; with `alias` the teacher is the student itself: no momentum, no copy."""
    from smallvit.train.loop import Training

    data = digits()
    training = Training(run, data, data.subset(labels=None, val=None, seed=0), "cpu")
    objective = training.objective
    if alias:
        objective.model, objective.teacher_head = objective.student, objective.head
    training.objective.train()
    for _ in range(200):
        training.train_step()
        training.monitor.check(training.step, objective.observed)


def test_a_teacher_too_hot_is_caught_within_a_quarter_of_the_run(tmp_path):
    with pytest.raises(Collapse, match=r"by step \d\d0?, uniform: .* lower teacher_temp"):
        fit(dino(teacher_temp=1.0, warm_temp=1.0), tmp_path)


def test_a_teacher_without_centre_is_caught_and_called_one_hot():
    with pytest.raises(Collapse, match=r"one-hot: .* raise teacher_temp, or lower center_momentum"):
        train(dino(center_momentum=1.0, batch_norm=False))


def test_a_teacher_that_is_the_student_is_caught():
    with pytest.raises(Collapse, match=r"by step 1\d\d, one-hot"):
        train(dino(batch_norm=False), alias=True)


def test_a_healthy_run_goes_on_and_its_record_says_how_it_fared(tmp_path):
    record = fit(dino(koleo=0.1).vary(steps=48), tmp_path)
    assert record["status"] == "finished" and len(record["health"]) == 12
    assert [look["step"] for look in record["health"]] == list(range(4, 49, 4))
    assert all(set(look) == {"step", "spread", "rank", "entropy", "information", "knn_1"} for look in record["health"])
    assert record["health"][-1]["information"] > 0.5
    assert [check[2] for check in record["curve"]] == [look["knn_1"] for look in record["health"]]
    assert set(record["test"]) >= {"knn_1", "linear_probe"} and record["score"] == "knn_1"


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_features_that_are_no_numbers_are_not_measured(number):
    with pytest.raises(FloatingPointError, match="not finite any more; try a smaller lr"):
        measure(Observation(torch.tensor([[1.0, number], [0.0, 1.0]])))
