"""Comparing runs that were trained again with the committed records."""

from statistics import mean, stdev

import pytest
from scipy.stats import t

from smallvit.record import Record
from smallvit.report import compare_with_committed

SCORES = (0.90, 0.92, 0.91, 0.93)


def records(scores, arm: str = "scratch", status: str = "finished", error: str | None = None) -> list[Record]:
    shared = {"recipe": "demo", "role": "technique", "labels": 100, "run": {}, "score": "accuracy"}
    return [
        Record(**shared, arm=arm, seed=seed, fingerprint=f"{arm}{seed}", status=status, error=error, test={"accuracy": score})
        for seed, score in enumerate(scores)
    ]


def test_the_interval_is_the_prediction_interval_of_the_mean_of_new_runs():
    half = t.ppf(0.995, 3) * stdev(SCORES) * (1 / 4 + 1 / 2) ** 0.5
    low, high = (f"{100 * (mean(SCORES) + side * half):.2f}" for side in (-1, 1))
    for distance, agrees in ((0.99, True), (1.01, False)):
        new = mean(SCORES) + distance * half
        lines, found = compare_with_committed(records(SCORES), records([new - 0.001, new + 0.001]))
        assert found == agrees and lines[0].endswith(": inside" if agrees else ": OUTSIDE")
        assert f"interval {low} to {high}% (99%, 4 committed seeds)" in lines[0]


def test_a_very_wide_interval_verifies_nothing():
    wide = records([0.4, 0.9])
    lines, good = compare_with_committed(wide, records([0.1]))
    assert not good and "interval 0.00 to 100.00% (99%, 2 committed seeds): TOO WIDE" in lines[0]
    assert compare_with_committed(wide, records([0.4])) == (["scratch at 100 labels: 40.00%, identical to the record"], True)


def test_equal_numbers_of_equal_runs_are_identical():
    assert "identical to the record" in compare_with_committed(records(SCORES), records(SCORES[:2]))[0][0]
    assert "inside" in compare_with_committed(records(SCORES), records([SCORES[1]]))[0][0]


@pytest.mark.parametrize(
    "again, words",
    [
        ([], None),
        (records([0.9], status="unavailable", error="no file"), "left out, unavailable here (no file)"),
        (records([0.9]) + records([0.9], status="failed", error="it broke"), "not compared (it broke)"),
        (records([0.9], arm="never seen"), "fewer than 2 committed seeds"),
    ],
    ids=["nothing", "unavailable", "failed", "no seeds"],
)
def test_runs_that_were_not_trained_again_are_not_verified(again, words):
    lines, good = compare_with_committed(records(SCORES), again)
    assert not good and (words is None or words in lines[0])


def test_an_unavailable_arm_does_not_affect_the_others():
    again = records([0.915]) + records([0.9], arm="other", status="unavailable", error="no file")
    lines, good = compare_with_committed(records(SCORES), again)
    assert good and len(lines) == 2
