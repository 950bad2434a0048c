"""Alarms of a report: arms that were trained too briefly, that lose to raw pixels or that only guess."""

import math
import re
from dataclasses import replace

import pytest

from smallvit.record import Record
from smallvit.report.alarms import at_the_edge, below_raw_pixels, no_better_than_guessing, undertrained
from smallvit.report.provenance import warnings

PIXELS = {"model": {"call": "smallvit.references.Pixels"}}


def runs(arm: str, curve=None, *, accuracy=0.9, labels=1000, seeds=4, role="technique", **fields) -> list[Record]:
    """The records of one arm. `curve` is a function from the seed to the field `curve`."""
    return [
        Record(
            recipe="demo", arm=arm, role=role, labels=labels, seed=seed, fingerprint=f"{arm}{seed}", status="finished",
            score="accuracy", test={"accuracy": accuracy}, curve=curve(seed) if curve else None,
            **{"run": {"model": {"call": "smallvit.vit.ViT"}}, "steps": 600, **fields},
        )
        for seed in range(seeds)
    ]  # fmt: skip


def curve(losses, accuracies, noise=0.0):
    """A curve of 12 checks of which the last four are given: the training losses and the validation accuracies."""
    first = [(2.3, 0.2)] * 8
    return lambda seed: [
        [50 * (k + 1), loss, accuracy + noise * (seed - 1.5) * (k - 8)]
        for k, (loss, accuracy) in enumerate([*first, *zip(losses, accuracies)])
    ]


# Loss and accuracy at the last four checks, as means over the seeds of committed records.
CURVES = {
    "explain, 2-D sines, 600 steps": (True, [1.30, 1.24, 1.18, 1.14], [0.632, 0.66, 0.68, 0.687]),
    "explain, no positions, 600 steps": (True, [1.715, 1.69, 1.67, 1.647], [0.403, 0.41, 0.413, 0.417]),
    "mixup, whose loss stays high": (True, [1.70, 1.69, 1.68, 1.665], [0.846, 0.85, 0.86, 0.866]),
    "dino, scratch as long at 1,000 labels": (False, [0.113, 0.10, 0.09, 0.077], [0.9801, 0.9802, 0.9803, 0.9803]),
    "regularise, plain ViT, all images learned by heart": (False, [0.0022, 0.0021, 0.002, 0.0019], [0.885, 0.889, 0.89, 0.893]),
    "the loss does not fall": (False, [0.50, 0.50, 0.50, 0.50], [0.86, 0.87, 0.88, 0.89]),
}


@pytest.mark.parametrize("case", CURVES)
def test_training_that_was_too_short_gives_a_warning(case):
    short, losses, accuracies = CURVES[case]
    lines = undertrained(runs("A", curve(losses, accuracies)))
    assert bool(lines) == short
    if short:
        assert re.match(r"Probably not trained long enough: “A”\. .* rose by \d\.\d points.*--scale-steps 4$", lines[0])


def test_a_rise_that_chance_explains_gives_no_warning():
    losses, accuracies = [0.6, 0.58, 0.56, 0.54], [0.90, 0.902, 0.903, 0.905]
    assert undertrained(runs("A", curve(losses, accuracies, noise=0.0001)))
    assert not undertrained(runs("A", curve(losses, accuracies, noise=0.005)))
    assert not undertrained(runs("A", curve(losses, accuracies), seeds=1)) and not undertrained(runs("A"))


def test_arms_with_the_same_alarm_share_one_sentence():
    steep = curve([1.30, 1.24, 1.18, 1.14], [0.632, 0.66, 0.68, 0.687])
    flat = curve([1.0] * 4, [0.7] * 4)
    rows = [*runs("A", steep), *runs("B", steep), *runs("C", steep), *runs("pixels", steep, role="reference")]
    (line,) = undertrained(rows)
    assert "all 3 arms." in line and "5.5 points" in line
    (line,) = undertrained([*rows, *runs("D", flat), *runs("A", steep, labels=100), *runs("B", flat, labels=100)])
    assert "“A”, “B” and “C” at 1,000 labels; “A” at 100 labels." in line
    (line,) = undertrained([*rows, *runs("D, tall", steep), *runs("E", flat)])
    assert "“A”, “B”, “C” and 1 more." in line


def test_only_the_longest_training_can_be_too_short():
    steep = curve([1.30, 1.24, 1.18, 1.14], [0.632, 0.66, 0.68, 0.687])
    flat = curve([1.0] * 4, [0.7] * 4)
    assert not undertrained([*runs("A", steep, length=500), *runs("A", flat, length=2_000)])
    assert undertrained([*runs("A", flat, length=500), *runs("A", steep, length=2_000)])


def test_an_arm_that_loses_to_raw_pixels_gives_a_warning():
    pixels = runs("pixels, nearest neighbour", accuracy=0.85, role="reference", run=PIXELS, steps=0)
    pixels += runs("pixels, logistic regression", accuracy=0.88, role="reference", run=PIXELS, steps=0)
    good, bad, cnn = runs("A", accuracy=0.9), runs("B", accuracy=0.86), runs("small CNN", accuracy=0.5, role="reference")
    (line,) = below_raw_pixels([*pixels, *good, *bad, *cnn])
    assert "raw pixels" in line and ": “B”." in line and "--scale-steps 4" in line
    assert not below_raw_pixels([*pixels, *good]) and not below_raw_pixels(bad)
    assert not below_raw_pixels([*pixels, *runs("off the shelf", accuracy=0.5, steps=0)]), "it has no training to lengthen"
    assert not below_raw_pixels([*pixels, *runs("B", accuracy=0.86, labels=100)]), "another number of labels"


def test_a_best_value_at_the_edge_of_its_range_gives_one_warning_for_each_option():
    edge = {"settings": {"lr": 0.006, "weight_decay": 0.1}, "trials": 8, "edge": ["lr"], "curve": []}
    rows = [*runs("A", tuning=edge), *runs("B", tuning=edge), *runs("C", tuning=edge | {"edge": ["weight_decay"]})]
    lines = at_the_edge(rows)
    assert (
        len(lines) == 2 and "best learning rate lies at the edge of its range" in lines[0] and "“A” and “B”. Widen" in lines[0]
    )
    assert "best weight decay" in lines[1] and "“C”" in lines[1]
    assert not at_the_edge(runs("A", tuning=edge | {"edge": []})) and set(lines) <= set(warnings(rows))


@pytest.mark.parametrize("images, guesses", [(100, True), (10_000, False), (None, False)])
def test_guessing_depends_on_the_number_of_test_images(images, guesses):
    rows = [replace(r, test={"accuracy": 0.135 + r.seed / 10_000}) for r in runs("A", seeds=8, test_majority=0.1135)]
    lines = no_better_than_guessing([replace(r, test_images=images) for r in rows])
    assert bool(lines) == guesses
    if images:
        assert guesses == (1.96 * math.sqrt(0.1135 * 0.8865 / images) > 0.1354 - 0.1135)
