"""Bands: whether what was trained again is what the records say."""

from statistics import mean, stdev

import pytest
from scipy.stats import t

from smallvit.report.reproduce import band

COMMITTED = (0.90, 0.92, 0.91, 0.93)


def records(scores, arm: str = "scratch", status: str = "finished", error: str | None = None) -> list[dict]:
    return [
        {"arm": arm, "labels": 100, "status": status, "error": error, "fingerprint": f"{arm}{seed}"}
        | {"score": "accuracy", "test": {"accuracy": score}}
        for seed, score in enumerate(scores)
    ]


def test_the_band_is_the_prediction_interval_of_the_mean_of_new_runs():
    half = t.ppf(0.995, 3) * stdev(COMMITTED) * (1 / 4 + 1 / 2) ** 0.5
    for step, good in ((0.99, True), (1.01, False)):
        at = mean(COMMITTED) + step * half
        lines, found = band(records(COMMITTED), records([at - 0.001, at + 0.001]))
        assert found == good and ("inside" if good else "OUTSIDE") in lines[0]
    low, high = (f"{100 * (mean(COMMITTED) + side * half):.2f}" for side in (-1, 1))
    assert f"band {low} to {high}%" in lines[0] and "4 committed seeds" in lines[0]


def test_a_band_in_which_everything_would_lie_verifies_nothing():
    wide = records([0.4, 0.9])
    lines, good = band(wide, records([0.1]))
    assert not good and "band 0.00 to 100.00% (99%, 2 committed seeds): TOO WIDE" in lines[0]
    assert band(wide, records([0.4])) == (["scratch at 100 labels: 40.00%, identical to the record"], True)


def test_equal_numbers_of_equal_runs_are_identical():
    assert "identical to the record" in band(records(COMMITTED), records(COMMITTED[:2]))[0][0]
    assert "inside" in band(records(COMMITTED), records([COMMITTED[1]]))[0][0]


@pytest.mark.parametrize(
    "again, said",
    [
        ([], None),
        (records([0.9], status="unavailable", error="no file"), "left out, unavailable here (no file)"),
        (records([0.9]) + records([0.9], status="failed", error="it broke"), "no band (it broke)"),
        (records([0.9], arm="never seen"), "fewer than 2 committed seeds"),
    ],
    ids=["nothing", "unavailable", "failed", "no seeds"],
)
def test_what_was_not_trained_again_is_not_verified(again, said):
    lines, good = band(records(COMMITTED), again)
    assert not good and (said is None or said in lines[0])


def test_an_arm_that_is_unavailable_does_not_spoil_the_others():
    again = records([0.915]) + records([0.9], arm="other", status="unavailable", error="no file")
    lines, good = band(records(COMMITTED), again)
    assert good and len(lines) == 2
