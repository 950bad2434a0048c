"""Collapse of training without labels: it is measured, named and stops the run; healthy runs continue."""

import math
from functools import partial

import pytest
import torch

from smallvit import Block, PatchEmbed, Run, ViT, augment, digits, fit
from smallvit.objectives import DINO, Observation
from smallvit.objectives.collapse import (
    CHECKS,
    MIN_STEPS,
    PATIENCE,
    Collapse,
    Monitor,
    collapse_kind,
    collapse_statistics,
    entropy,
)

SPREAD = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
ONE_HOT, UNIFORM = torch.eye(8)[torch.arange(64) % 8], torch.full((64, 8), 1 / 8)
HEALTHY, FLAT = Observation(SPREAD, ONE_HOT), Observation(torch.ones(64, 16))


# Statistics


@pytest.mark.parametrize(
    "features, spread, rank",
    [
        (torch.cat([torch.eye(16), -torch.eye(16)]), 1, 16),
        (torch.cat([torch.eye(16)[:3], -torch.eye(16)[:3]]), 1, 3),
        (torch.ones(8, 16), 0, None),
    ],
    ids=["all directions", "three directions", "one point"],
)
def test_spread_and_rank_of_features(features, spread, rank):
    numbers = collapse_statistics(Observation(features))
    assert numbers.keys() == {"spread", "rank"} and numbers["spread"] == pytest.approx(spread, abs=1e-4)
    assert numbers["rank"] <= 2 if rank is None else numbers["rank"] == pytest.approx(rank, abs=1e-4)


@pytest.mark.parametrize("targets, relative_entropy, information", [(ONE_HOT, 0, math.log(8)), (UNIFORM, 1, 0)])
def test_entropy_and_information_of_targets(targets, relative_entropy, information):
    numbers = collapse_statistics(Observation(SPREAD, targets))
    assert numbers["entropy"] == pytest.approx(relative_entropy) and numbers["information"] == pytest.approx(information, abs=1e-5)


def test_entropy_by_hand():
    assert entropy(torch.tensor([0.5, 0.25, 0.25, 0.0])).item() == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_features_that_are_not_finite_are_refused(number):
    with pytest.raises(FloatingPointError, match="not finite any more; try a smaller lr"):
        collapse_statistics(Observation(torch.tensor([[1.0, number], [0.0, 1.0]])))


# Kinds of collapse


@pytest.mark.parametrize(
    "observation, kind, option",
    [
        (Observation(SPREAD, UNIFORM), "uniform", "lower teacher_temp"),
        (Observation(SPREAD, torch.eye(8)[:1].expand(64, -1)), "one-hot", "raise teacher_temp"),
        (Observation(torch.ones(64, 16) + 1e-4 * SPREAD, ONE_HOT), "flat", "learning rate"),
        (FLAT, "flat", "learning rate"),
    ],
    ids=["uniform", "one-hot", "flat", "flat without a teacher"],
)
def test_every_kind_of_collapse_has_a_name_and_an_option_to_change(observation, kind, option):
    found = collapse_kind(collapse_statistics(observation))
    assert found.startswith(f"{kind}: ") and option in found


@pytest.mark.parametrize("observation", [HEALTHY, Observation(SPREAD)], ids=["with a teacher", "without"])
def test_a_healthy_batch_has_no_kind_of_collapse(observation):
    assert collapse_kind(collapse_statistics(observation)) is None


# The monitor


def test_the_monitor_raises_after_enough_collapsed_checks_in_a_row():
    monitor, steps = Monitor(CHECKS * 20), [20 * (i + 1) for i in range(2 * PATIENCE)]
    for i, step in enumerate(steps[:-1]):
        monitor.check(step, HEALTHY if i == PATIENCE - 1 else FLAT)
    with pytest.raises(Collapse, match=f"collapsed by step {steps[-1]}, flat: .*spread "):
        monitor.check(steps[-1], FLAT)


def test_nothing_is_checked_between_checks_without_an_observation_or_on_one_image():
    monitor = Monitor(50)
    for step in range(1, MIN_STEPS):
        monitor.check(step, "not read")
    for step in range(1, 2 * PATIENCE * MIN_STEPS + 1):
        monitor.check(step, Observation(torch.ones(1, 16)))
        monitor.check(step, None)
    assert collapse_statistics(None) == {}


# Runs

VIT = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), block=partial(Block, mlp_ratio=2.0), dim=32, depth=2, heads=2)


def dino_run(**options) -> Run:
    return Run(
        data=digits,
        model=VIT,
        objective=partial(DINO, prototypes=64, hidden=64, bottleneck=16, **options),
        augment=augment.digit_crops(size=4, local=2),
        steps=400,
        batch=32,
        lr=2e-3,
        clip=0.0,
        ema=0.0,
    )


def train(run: Run, teacher_is_student: bool = False):
    """Train the first 200 steps of a run; optionally with the student in the place of its teacher."""
    from smallvit.train.loop import Training

    data = digits()
    training = Training(run, data, data.subset(labels=None, val=None, seed=0), "cpu")
    objective = training.objective
    if teacher_is_student:
        objective.model, objective.teacher_head = objective.student, objective.head
    training.objective.train()
    for _ in range(200):
        training.train_step()
        training.monitor.check(training.step, objective.observed)


@pytest.mark.slow
def test_uniform_collapse_with_a_high_temperature_stops_within_a_quarter_of_the_run(tmp_path):
    with pytest.raises(Collapse, match=r"by step \d\d0?, uniform: .* lower teacher_temp"):
        fit(dino_run(teacher_temp=1.0, warm_temp=1.0), tmp_path)


@pytest.mark.slow
def test_one_hot_collapse_without_a_center_stops_the_run():
    with pytest.raises(Collapse, match=r"one-hot: .* raise teacher_temp, or lower center_momentum"):
        train(dino_run(center_momentum=1.0, batch_norm=False))


@pytest.mark.slow
def test_one_hot_collapse_of_a_teacher_that_is_the_student_stops_the_run():
    with pytest.raises(Collapse, match=r"by step 1\d\d, one-hot"):
        train(dino_run(batch_norm=False, teacher_temp=0.02, warm_temp=0.02), teacher_is_student=True)


@pytest.mark.slow
def test_a_healthy_run_finishes_and_its_record_has_the_statistics(tmp_path):
    record = fit(dino_run(koleo=0.1).vary(steps=48), tmp_path)
    assert record.status == "finished" and [check["step"] for check in record.health] == list(range(4, 49, 4))
    assert all(set(check) == {"step", "spread", "rank", "entropy", "information", "knn_1"} for check in record.health)
    assert record.health[-1]["information"] > 0.5
    assert [check[2] for check in record.curve] == [check["knn_1"] for check in record.health]
    assert set(record.test) >= {"knn_1", "linear_probe"} and record.score == "knn_1"
