"""Comparing runs that were trained again with the committed records: each run with the record of its seed, then all seeds."""

from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pytest
from scipy.stats import t

from smallvit.packing import pack_bits
from smallvit.record import Record
from smallvit.report import compare_with_committed
from smallvit.report.reproduce import compare_run, compare_with_seeds, prediction_interval

SCORES = (0.90, 0.92, 0.91, 0.93)
TRACE = {
    "initial": "i",
    "batches": "b",
    "losses": [2.3, 2.29, 2.25],
    "ema_distance": 0.02,
    "final_norm": 48.0,
    "instructions": "AVX512",
}
CURVE = [[30, 2.0, 0.5], [60, 0.5, 0.9]]


def records(scores, arm: str = "scratch", status: str = "finished", error: str | None = None, **more) -> list[Record]:
    """Records of one arm, with one seed for each score; `more` replaces their fields."""
    made = {
        "recipe": "demo", "role": "technique", "labels": 100, "run": {"lr": 0.1}, "score": "accuracy", "test_images": 500,
        "subset_sha256": "s", "data_sha256": "d", "trace": TRACE, "curve": CURVE, "cpu": "A", "device": "cpu", "threads": 1,
        "precision": "fp32", "kernel": "rule", "compiled": False, "versions": {"torch": "2.5", "scipy": "1"},
        "code": {"sha256": "c", "commit": "0123456789abcdef"},
    }  # fmt: skip
    return [
        Record(**{
            **made, "arm": arm, "seed": seed, "fingerprint": f"{arm}{seed}", "status": status, "error": error,
            "test": {"accuracy": score}, "weights_sha256": f"w{seed}", **more,
        })
        for seed, score in enumerate(scores)
    ]  # fmt: skip


def compare(new: Record | list[Record], old: list[Record] | None = None) -> tuple[str, bool]:
    """The text of all lines and the outcome, for records of the same seeds."""
    lines, agree = compare_with_committed(old or records(SCORES), new if isinstance(new, list) else [new])
    return "\n".join(lines), agree


HONEST = records(SCORES)[0]
ELSEWHERE = replace(HONEST, cpu="B", weights_sha256="other")


# Identical runs


def test_equal_weights_and_scores_are_identical():
    text, agree = compare(records(SCORES[:2]))
    assert agree and text.splitlines() == [
        "scratch at 100 labels, seed 0: 90.00%, identical to the record (weights and score)",
        "scratch at 100 labels, seed 1: 92.00%, identical to the record (weights and score)",
    ]


def test_an_equal_score_with_other_weights_is_never_called_identical():
    text, agree = compare(replace(HONEST, weights_sha256="other"))
    assert not agree and "FAILED, the same score but other weights; the same machine and versions must give the same" in text
    assert "identical" not in text
    text, agree = compare(ELSEWHERE)
    assert agree and "identical" not in text and "other weights" in text
    text, agree = compare(replace(HONEST, weights_sha256=None))
    assert not agree and "identical" not in text


def test_a_failure_says_that_the_code_has_changed():
    new = replace(HONEST, weights_sha256="other", code={"sha256": "e", "commit": None})
    assert "the code of smallvit has changed since the record was made (commit 0123456789)" in compare(new)[0]


def test_equal_weights_must_give_an_equal_score():
    text, agree = compare(replace(HONEST, test={"accuracy": 0.902}))
    assert not agree and "FAILED, the same weights score 90.20% instead of 90.00%" in text
    # another version of scipy may fit another probe to the same features
    text, agree = compare(replace(HONEST, test={"accuracy": 0.902}, versions={"torch": "2.5", "scipy": "2"}))
    assert agree and "the same weights" in text and "scipy 1 -> 2" in text


@pytest.mark.parametrize(
    "change, words",
    [
        ({"correct": pack_bits(np.arange(500) >= 50)}, "classify 100 test images differently"),
        ({"correct": None}, "come without the list of correctly classified images"),
        ({"test": {"accuracy": 0.90, "knn": 0.81, "ms": 4.0}}, "give 0.81 instead of 0.8 for knn"),
        ({"test": {"accuracy": 0.90, "ms": 4.0}}, "give nothing instead of 0.8 for knn"),
        ({"test": {"accuracy": 0.90, "knn": 0.8001, "ms": 4.0}}, "give 0.8001 instead of 0.8 for knn"),
        ({"test": {"accuracy": 0.90, "knn": 0.8 + 1e-7, "ms": 4.0}}, ""),
        ({"test": {"accuracy": 0.90, "knn": 0.8, "ms": 5.0}}, ""),
    ],
    ids=["other images", "no images", "probe", "no probe", "one image of the probe", "rounding", "time"],
)
def test_equal_weights_must_classify_the_same_images_correctly_and_give_the_same_numbers(change, words):
    old = records(SCORES, correct=pack_bits(np.arange(500) < 450), test={"accuracy": 0.90, "knn": 0.8, "ms": 4.0})
    text, agree = compare(replace(old[0], **change), old)
    assert (agree, "identical" in text) == (not words, not words) and words in text
    if words:
        assert f"FAILED, the same weights {words}" in text
        text, agree = compare(replace(old[0], cpu="B", **change), old)
        assert agree and f"the same weights {words}; the first training steps agree" in text and "identical" not in text


# Settings and images


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"fingerprint": "f", "run": {"lr": 0.2, "model": {"depth": 3}}},
            "settings: lr was 0.1 and is 0.2, model.depth was None",
        ),
        ({"fingerprint": "f"}, "settings: other code in the recipe"),
        ({"data_sha256": "e"}, "the data set has other pixels or labels"),
        ({"subset_sha256": "e"}, "other labelled images"),
    ],
)
@pytest.mark.parametrize("again", [HONEST, ELSEWHERE], ids=["same machine", "another machine"])
def test_another_run_is_not_compared(again, change, words):
    text, agree = compare(replace(again, **change))
    assert not agree and "not compared, this is another run than the record" in text and words in text


# The first training steps, on the same machine and on another one


@pytest.mark.parametrize(
    "change, words",
    [
        ({"initial": "j"}, "other initial weights"),
        ({"batches": "c"}, "other batches"),
        ({"losses": [2.3, 2.29, 2.26]}, "the loss of step 3 is 2.26 instead of 2.25"),
        ({"losses": [2.3, 2.29]}, "2 losses instead of 3"),
        ({"ema_distance": 0.0}, "weights are 0 away from the last weights instead of 0.02"),
        ({"ema_distance": 0.05}, "weights are 0.05 away from the last weights instead of 0.02"),
        ({"ema_distance": None}, "weights are not known away"),
        ({"final_norm": 50.0}, "the norm of the final weights is 50 instead of 48"),
    ],
)
@pytest.mark.parametrize("again", [HONEST, ELSEWHERE], ids=["same machine", "another machine"])
def test_another_beginning_is_a_failure_on_any_machine(again, change, words):
    text, agree = compare(replace(again, trace=TRACE | change))
    assert not agree and "FAILED, the training differs: " in text and words in text


def test_a_missing_trace():
    text, agree = compare(replace(HONEST, trace=None))
    assert not agree and "the new run does not keep its first steps" in text
    old = [replace(record, trace=None) for record in records(SCORES)]
    text, agree = compare(ELSEWHERE, old)
    assert agree and "the record has no first training steps to compare" in text


def test_rounding_passes_on_another_machine_and_in_bf16():
    rounded = TRACE | {"losses": [2.3001, 2.2901, 2.2501], "ema_distance": 0.021, "final_norm": 48.01}
    new = replace(ELSEWHERE, trace=rounded, test={"accuracy": 0.902}, curve=[[30, 2.0001, 0.5], [60, 0.50001, 0.9]])
    text, agree = compare(new)
    assert agree and "90.20%, the record has 90.00%" in text and "processor A -> B" in text
    coarse = TRACE | {"losses": [2.32, 2.29, 2.25]}
    assert not compare(replace(ELSEWHERE, trace=coarse))[1]
    assert compare(replace(ELSEWHERE, trace=coarse, precision="bf16"))[1]


def test_norms_of_runs_that_rounding_has_driven_apart_may_differ_as_those_of_two_seeds():
    norms = [48.0, 47.5, 48.5, 48.0]
    old = [replace(record, trace=TRACE | {"final_norm": norm}) for record, norm in zip(records(SCORES), norms)]
    allowed = t.ppf(0.995, 3) * 2**0.5 * stdev(norms)
    apart = [[30, 2.0, 0.5], [60, 0.52, 0.9]]
    for factor, curve, again, agrees in [
        (0.99, apart, ELSEWHERE, True),
        (1.01, apart, ELSEWHERE, False),
        (0.99, apart, HONEST, False),  # the same machine must give the same weights
        (0.99, CURVE, ELSEWHERE, False),  # the training losses have stayed together, so the weights should have
    ]:
        trace = TRACE | {"final_norm": norms[0] - factor * allowed}
        text, agree = compare(replace(again, trace=trace, curve=curve), old)
        assert agree is agrees and ("the norm of the final weights is" in text) is not agrees


def test_a_run_that_starts_from_another_one_starts_elsewhere_on_another_machine():
    old = [replace(record, pretraining={"steps": 10}) for record in records(SCORES)]
    start = TRACE | {"initial": "j", "losses": [1.0, 1.0, 1.0]}
    for cpu, agrees in (("A", False), ("B", True)):
        new = replace(old[0], cpu=cpu, trace=start, weights_sha256="other")
        assert compare(new, old)[1] == agrees
    batches = replace(old[0], cpu="B", trace=start | {"batches": "c"}, weights_sha256="other")
    assert not compare(batches, old)[1]
    old = [replace(record, run={"pseudo_labels": {"call": "label_spreading"}}) for record in old]
    assert compare(replace(batches, run=old[0].run), old)[1]


def test_earlier_runs_that_were_trained_in_other_stacks_round_differently():
    def needing(stacked: int | None, record: Record) -> Record:
        runs = {"p": {"steps": 10, "stacked": stacked}, "q": {"steps": 0, "stacked": None}}
        return replace(record, pretraining={"steps": 10, "runs": runs})

    old = [needing(4, record) for record in records(SCORES)]
    new = replace(old[0], weights_sha256="other")
    text, agree = compare(new, old)
    assert agree and "the place of a run in its stack of 4 changes its rounding" in text
    text, agree = compare(needing(None, new), old)
    assert agree and "stack size of earlier runs [4, 1] -> [1, 1]" in text
    assert not compare(needing(None, new), [needing(None, record) for record in old])[1]
    before = [replace(record, pretraining={"steps": 10, "runs": {"p": {"steps": 10}}}) for record in old]
    text, agree = compare(new, before)
    assert agree and "does not say in how large stacks earlier runs were trained" in text and "->" not in text


def test_a_record_without_the_family_of_its_processor_may_be_from_another_one():
    old = records(SCORES, cpu="AMD EPYC")
    text, agree = compare(replace(old[0], cpu="AMD EPYC (family 26, model 2)", weights_sha256="other"), old)
    assert agree and "because of: the record does not name the family and model of its processor)" in text
    text, agree = compare(replace(old[0], cpu="AMD Ryzen (family 26, model 2)", weights_sha256="other"), old)
    assert agree and "processor AMD EPYC -> AMD Ryzen (family 26, model 2)" in text


# The score on another machine


@pytest.mark.parametrize(
    "change, words",
    [
        ({"cpu": "B"}, "processor A -> B"),
        ({"device": "H200"}, "device cpu -> H200"),
        ({"kernel": "fused"}, "attention kernel rule -> fused"),
        ({"compiled": True}, "compilation False -> True"),
        ({"stacked": 8}, "stack size None -> 8"),
        ({"versions": {"torch": "2.6"}}, "torch 2.5 -> 2.6"),
        ({"trace": TRACE | {"instructions": "AVX2"}}, "instruction set AVX512 -> AVX2"),
    ],
)
def test_the_line_says_why_weights_need_not_be_equal(change, words):
    text, agree = compare(replace(HONEST, weights_sha256="other", **change))
    assert agree and f"compared up to rounding because of: {words}" in text and "the first training steps agree" in text


def test_a_stack_may_round_differently():
    old = records(SCORES, stacked=4)
    text, agree = compare(replace(old[0], weights_sha256="other"), old)
    assert agree and "the place of a run in its stack of 4 changes its rounding" in text
    assert "identical" in compare(old[0], old)[0]


def test_a_record_without_hash_is_compared_by_its_score():
    old = [replace(record, weights_sha256=None, trace=None) for record in records(SCORES)]
    text, agree = compare(HONEST, old)
    assert agree and "weights unknown" in text and "the record has no hash of its weights" in text
    assert not compare(replace(HONEST, test={"accuracy": 0.88}), old)[1]


def test_a_run_whose_losses_agree_may_differ_in_three_test_images():
    for images, agrees in ((3, True), (4, False)):
        text, agree = compare(replace(ELSEWHERE, test={"accuracy": 0.9 + images / 500}))
        assert agree == agrees and "allowed are 0.60 points, 3 test images, since the training losses agree" in text
    assert "FAILED, 90.80% instead of 90.00%" in text
    low, high = prediction_interval(SCORES, 1)
    assert low < 0.908 < high, "the band over seeds does not notice"


def test_a_run_that_rounding_drove_apart_may_differ_as_two_seeds_do():
    apart = [[30, 2.01, 0.5], [60, 0.51, 0.9]]
    allowed = t.ppf(0.995, 3) * 2**0.5 * stdev(SCORES)
    for distance, agrees in ((0.9, True), (1.1, False)):
        new = replace(ELSEWHERE, curve=apart, test={"accuracy": 0.9 - distance * allowed})
        text, agree = compare_run(records(SCORES), new)[:2]
        assert (
            agree == agrees and f"allowed are {100 * allowed:.2f} points, the difference of two seeds, since rounding" in text
        )
    text, agree = compare_run(records(SCORES)[:1], replace(ELSEWHERE, curve=apart, test={"accuracy": 0.91}))[:2]
    assert not agree and "fewer than 2 committed seeds" in text


def test_a_model_without_training_steps_is_held_to_three_images_unless_it_was_trained_before():
    old = records(SCORES, curve=[], trace=None, steps=0)
    new = replace(old[0], cpu="B", weights_sha256="other", test={"accuracy": 0.91})
    assert "allowed are 0.60 points" in compare(new, old)[0]
    old = [replace(record, pretraining={"steps": 100}) for record in old]
    assert "the difference of two seeds (" in compare(replace(new, pretraining={"steps": 100}), old)[0]


def test_another_learning_curve_is_a_failure():
    text, agree = compare(replace(ELSEWHERE, curve=[[30, 2.0, 0.5], [60, 1.0, 0.9]]))
    assert not agree and "the mean training loss up to step 60 is 1 instead of 0.5" in text
    text, agree = compare(replace(ELSEWHERE, curve=CURVE[:1]))
    assert not agree and "validated at the steps [30] instead of [30, 60]" in text


# All seeds


def test_the_interval_is_the_prediction_interval_of_the_mean_of_new_runs():
    half = t.ppf(0.995, 3) * stdev(SCORES) * (1 / 4 + 1 / 2) ** 0.5
    low, high = (f"{100 * (mean(SCORES) + side * half):.2f}" for side in (-1, 1))
    for distance, word in ((0.99, "inside"), (1.01, "OUTSIDE")):
        new = mean(SCORES) + distance * half
        text, inside = compare_with_seeds(records(SCORES), records([new - 0.001, new + 0.001]))
        assert text == f"mean {100 * new:.2f}%, interval {low} to {high}% (99%, 4 committed seeds): {word}"
        assert inside == (word == "inside")


def test_a_mean_outside_the_band_fails_although_each_score_is_near_its_record():
    old = records([0.500, 0.501, 0.499, 0.500])
    new = records([0.506, 0.507, 0.505, 0.506], cpu="B")
    text, agree = compare(new, old)
    assert not agree and "OUTSIDE" in text and "FAILED" not in text


def test_equal_scores_of_the_seeds_still_allow_three_images():
    old = [replace(record, test_images=500) for record in records([0.9] * 4)]
    for images, inside in ((3, True), (4, False)):
        new = [replace(old[0], test={"accuracy": 0.9 + images / 500})]
        assert compare_with_seeds(old, new)[1] == inside


def test_a_very_wide_interval_excludes_nothing():
    wide = records([0.4, 0.9])
    text, _ = compare(replace(wide[0], cpu="B", weights_sha256="other"), wide)
    assert "interval 0.00 to 100.00% (99%, 2 committed seeds): inside, but the interval is TOO WIDE" in text


def test_conditions_are_compared_separately():
    short, long = records([0.8, 0.81], length=100), records([0.9, 0.91], length=200)
    text, agree = compare([short[0], long[0]], short + long)
    assert agree and "scratch at 100 labels, 100 steps, seed 0: 80.00%" in text
    assert "scratch at 100 labels, 200 steps, seed 0: 90.00%" in text


# Runs that cannot be compared


@pytest.mark.parametrize(
    "again, words",
    [
        ([], None),
        (records([0.9], status="unavailable", error="no file"), "left out, unavailable here (no file)"),
        (records([0.9], status="failed", error="it broke"), "not compared (it broke)"),
        (records([0.9], arm="never seen"), "no committed record of this seed"),
    ],
    ids=["nothing", "unavailable", "failed", "no seed"],
)
def test_runs_that_were_not_trained_again_are_not_verified(again, words):
    lines, good = compare_with_committed(records(SCORES), again)
    assert not good and (words is None or words in lines[0])


def test_an_unavailable_arm_does_not_affect_the_others():
    again = records([0.90]) + records([0.9], arm="other", status="unavailable", error="no file")
    lines, good = compare_with_committed(records(SCORES), again)
    assert good and len(lines) == 2


def test_log_loss_is_written_as_a_plain_number():
    losses = [
        replace(each, test={"log_loss": 0.2 + 0.01 * each.seed}, score="log_loss", lower_is_better=True, correct=None)
        for each in records([0.9, 0.9, 0.9])
    ]
    text, inside = compare_with_seeds(losses, losses)
    assert inside and text.startswith("mean 0.210, interval 0.") and text.count("%") == 1  # that of the 99% interval
