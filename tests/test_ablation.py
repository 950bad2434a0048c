"""Comparisons over training lengths, against named controls, at equal costs and with tuned settings."""

from dataclasses import replace
from functools import partial

import pytest
from toys import TINY_VIT, slow_after

from smallvit import MAE, ArmRun, LocalityAttention, Merge, Pixels, Run, SinCos2d, Weights, ablate, accuracy, knn, log_loss
from smallvit.ablation import longest
from smallvit.commands.explore import exploration_runs
from smallvit.commands.stored import unused_seeds
from smallvit.data import arrays
from smallvit.looks import Looks, with_looks
from smallvit.match import TOLERANCE, match_cost, model_cost
from smallvit.passes import check_same_fold
from smallvit.recipe import check_comparable, only
from smallvit.record import Record
from smallvit.run import difference, fingerprint
from smallvit.tuning import Tune

BASE = Run(model=TINY_VIT, steps=1_000)
LSA = BASE.vary(attention=LocalityAttention)
PRETRAINED = Run(model=TINY_VIT, objective=MAE, unlabelled=True, steps=400, evaluators=(knn,))
CONTROLS = {"a": BASE, "b": BASE.vary(depth=3), "c": BASE.vary(depth=4), "d": BASE.vary(depth=5)}


def by_arm(entries: list[ArmRun], **condition) -> dict[str, ArmRun]:
    return {e.arm: e for e in entries if all(getattr(e, name) == value for name, value in condition.items())}


def test_some_of_the_standard_references_can_be_chosen():
    arms = {"a": BASE, "b": LSA}
    everything = {e.arm: e for e in ablate(arms, seeds=[0]) if e.role == "reference"}
    assert list(everything) == ["pixels, logistic regression", "pixels, nearest neighbor", "small CNN"]
    for names in (["small CNN"], "small CNN", ["pixels, nearest neighbor", "small CNN"]):
        chosen = [names] if isinstance(names, str) else names
        found = [e for e in ablate(arms, seeds=[0], references=names) if e.role == "reference"]
        assert found == [everything[name] for name in chosen]
    with pytest.raises(ValueError, match="references names 'CNN'; expected True, False, or names from pixels, logistic"):
        ablate(arms, seeds=[0], references=["CNN"])


# Lengths


def test_every_arm_and_its_pretraining_is_scaled_to_each_length():
    arms = {"a": BASE, "half": BASE.vary(steps=500), "tuned": BASE.vary(steps=300, init=PRETRAINED)}
    entries = ablate(arms, labels=[50], seeds=range(2), steps=[500, 2_000])
    assert [entry.length for entry in entries[: len(entries) // 2]] == [500] * (len(entries) // 2)
    short, long = by_arm(entries, length=500, seed=0), by_arm(entries, length=2_000, seed=0)
    assert [(each["a"].run.steps, each["half"].run.steps, each["small CNN"].run.steps) for each in (short, long)] == [
        (500, 250, 500), (2_000, 1_000, 2_000),
    ]  # fmt: skip
    assert [(each["tuned"].run.steps, each["tuned"].run.init.steps) for each in (short, long)] == [(150, 200), (600, 800)]
    assert {entry.length for entry in longest(entries)} == {2_000} and longest(longest(entries)) == longest(entries)
    check_comparable(entries, "mine.py")


def test_untrained_reference_is_the_same_run_at_each_length():
    entries = ablate({"a": BASE}, seeds=[0], steps=[500, 1_000, 2_000])
    pixels = [entry for entry in entries if entry.arm == "pixels, nearest neighbor"]
    assert [entry.length for entry in pixels] == [500, 1_000, 2_000] and len({fingerprint(e.run) for e in pixels}) == 1
    assert {entry.run.steps for entry in pixels} == {0}


def test_shortest_trained_run_has_one_step():
    entries = ablate({"a": BASE, "short": BASE.vary(steps=10)}, seeds=[0], steps=[5], references=False)
    assert [entry.run.steps for entry in entries] == [5, 1]


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([2_000, 500], "increase"),
        ([500, 500], "each once"),
        ([], "at least one"),
        (500, "expected several values"),
        ([0, 500], "positive"),
        ([500.0], "whole numbers"),
    ],
)
def test_lengths_that_do_not_increase_are_refused(steps, words):
    with pytest.raises(ValueError, match=words):
        ablate({"a": BASE}, steps=steps)


def test_lengths_need_a_trained_baseline():
    with pytest.raises(ValueError, match="baseline has steps=0"):
        ablate({"a": BASE.vary(steps=0)}, steps=[500])


def test_length_and_settings_can_be_selected():
    entries = ablate({"a": BASE, "b": LSA}, seeds=[0], steps=[500, 2_000], references=False)
    entries += [replace(entry, tuning={"trials": 8}) for entry in longest(entries)]
    check_comparable(entries, "mine.py")
    assert [entry.length for entry in only(entries, ["length=500"])] == [500, 500]
    assert [entry.tuning for entry in only(entries, ["settings=tuned"])] == [{"trials": 8}] * 2
    assert [(e.arm, e.length, e.tuning) for e in only(entries, ["settings=common", "length=2_000", "arm=b"])] == [("b", 2_000, None)]
    assert [entry.condition for entry in only(entries, ["arm=a"])] == [
        "all labels, 500 steps", "all labels, 2,000 steps", "all labels, 2,000 steps, tuned",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"has no length '700'; .*'500'"):
        only(entries, ["length=700"])
    with pytest.raises(ValueError, match="length=2000, tuned 2 times"):
        check_comparable([*entries, entries[-1]], "mine.py")


# Controls


def test_arm_is_compared_with_its_control():
    entries = ablate(CONTROLS, seeds=[0], baseline={"c": "b", "d": "c", "b": "small CNN"})
    found = {arm: (entry.role, entry.baseline) for arm, entry in by_arm(entries).items()}
    assert found["a"] == ("baseline", "a") and found["small CNN"] == ("reference", "a")
    assert [found[arm] for arm in "bcd"] == [("technique", "small CNN"), ("technique", "b"), ("technique", "c")]
    check_comparable(entries, "mine.py")


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        ({"x": "a"}, "names 'x', which is no arm or reference; expected one of a, b"),
        ({"b": "x"}, "names 'x'"),
        ({"b": "b"}, "compares 'b' with itself"),
        ({"a": "b"}, "gives a control to 'a', the first arm"),
        ({"b": "c", "c": "d", "d": "b"}, "circle among 'b' -> 'c' -> 'd'"),
        ("b", "expected a dict from an arm to its control"),
    ],
)
def test_impossible_control_is_refused(baseline, words):
    with pytest.raises(ValueError, match=words):
        ablate(CONTROLS, seeds=[0], baseline=baseline)


def test_recipe_with_a_circle_of_controls_is_refused():
    a, b, c, _ = ablate(CONTROLS, seeds=[0], references=False)
    with pytest.raises(ValueError, match="'b' -> 'c' -> 'b'"):
        check_comparable([a, replace(b, baseline="c"), replace(c, baseline="b")], "mine.py")
    with pytest.raises(ValueError, match=r"'b'.*has the baseline 'elsewhere'"):
        check_comparable([a, replace(b, baseline="elsewhere")], "mine.py")
    with pytest.raises(ValueError, match=r"'c'.*has the baseline 'elsewhere'"):
        check_comparable([a, replace(b, baseline="c"), replace(c, baseline="elsewhere")], "mine.py")


# Equal costs


@pytest.mark.parametrize("of", slow_after(1, ["params", "macs"]))
def test_technique_is_brought_to_the_cost_of_its_control(of):
    arms = {"a": BASE, "deep": BASE.vary(depth=3), "deeper": BASE.vary(depth=4), "+LSA": LSA}
    found = by_arm(ablate(arms, seeds=[0], match=of, baseline={"deeper": "deep"}, references=False))
    costs = {arm: model_cost(entry.run, of) for arm, entry in found.items()}
    assert model_cost(arms["deep"], of) > 1.2 * costs["a"], "the arms must differ without match"
    assert all(abs(cost / costs["a"] - 1) <= 2 * TOLERANCE for cost in costs.values())
    assert abs(costs["deep"] / costs["a"] - 1) <= TOLERANCE and abs(costs["deeper"] / costs["deep"] - 1) <= TOLERANCE
    assert set(difference(BASE, found["deep"].run)) == {"model.depth", "model.block.mlp_ratio"}
    assert set(difference(BASE, found["+LSA"].run)) == {"model.attention"}, "an equal cost needs no change"


def test_cost_of_fixed_positions_is_known():
    assert model_cost(BASE.vary(position=SinCos2d), "macs") == model_cost(BASE, "macs")


def test_pretraining_is_matched_with_the_run_that_uses_it():
    deep = PRETRAINED.vary(depth=3)
    run = match_cost(BASE.vary(depth=3, init=deep), BASE, "params")
    assert run.init.steps == deep.steps and model_cost(run.init, "params") == model_cost(run, "params")


@pytest.mark.parametrize(
    ("run", "of", "words"),
    [
        (BASE.vary(depth=3), "time", "match is 'time'; expected 'params' or 'macs'"),
        pytest.param(
            *(BASE.vary(depth=40), "params", "mlp_ratio=0.25 comes closest with [0-9,]+, which differs by .*; expected at most 2%"),
            marks=pytest.mark.slow,
        ),
        (BASE.vary(model=Pixels, steps=0, evaluators=(knn,)), "params", "Pixels has no option mlp_ratio or dim"),
        (BASE.vary(depth=3, init=Weights(name="vit_tiny_patch16_224")), "params", "pretrained weights fix the shape"),
    ],
)
def test_costs_that_cannot_be_equal_are_refused_with_the_numbers(run, of, words):
    with pytest.raises(ValueError, match=words):
        match_cost(run, BASE, of, "deep", "plain")


def test_no_model_is_matched_with_one_without_parameters():
    with pytest.raises(ValueError, match="'pixels' has no parameters, so 'deep' cannot have as many"):
        match_cost(BASE, BASE.vary(model=Pixels, steps=0, evaluators=(knn,)), "params", "deep", "pixels")


@pytest.mark.slow
def test_matched_reduction_counts_its_own_tokens():
    merged = BASE.vary(reduction=partial(Merge, r=4))
    run = match_cost(merged, BASE, "macs")
    assert model_cost(run, "macs") == pytest.approx(model_cost(BASE, "macs"), rel=TOLERANCE)
    assert model_cost(run, "params") > model_cost(BASE, "params")


# Tuning


def test_runs_know_how_they_are_tuned_without_being_other_runs():
    tune = Tune({"lr": (3e-4, 6e-3)}, trials=4)
    entries = ablate({"a": BASE, "b": LSA}, seeds=[0], tune=tune, references=False)
    assert all(entry.tune is tune and entry.tuning is None for entry in entries)
    assert entries == ablate({"a": BASE, "b": LSA}, seeds=[0], references=False)


def test_tune_of_another_type_is_refused():
    with pytest.raises(ValueError, match=r"tune is {'lr': .*; expected a smallvit.Tune"):
        ablate({"a": BASE}, tune={"lr": (3e-4, 6e-3)})


def test_tune_is_recognized_by_its_class_and_not_by_its_name():
    tune = type("MyTune", (Tune,), {})({"lr": (3e-4, 6e-3)})
    assert ablate({"a": BASE}, tune=tune, references=False)[0].tune is tune
    with pytest.raises(ValueError, match=r"expected a smallvit\.Tune"):
        ablate({"a": BASE}, tune=type("Tune", (), {"common": True})())  # pyright: ignore[reportArgumentType]


# Cross-validation

FOLDED = partial(arrays, path="own.npz", folds=5)
OWN = BASE.vary(data=FOLDED)


def test_seeds_of_a_cross_validation_are_passes_with_one_run_for_each_fold():
    entries = ablate({"a": OWN, "b": OWN.vary(depth=3)}, seeds=range(8))
    assert [entry.seed for entry in entries if entry.arm == "b"] == list(range(40))
    assert {entry.arm for entry in entries} > {"a", "b", "small CNN"} and {entry.run.folds for entry in entries} == {5}
    assert [entries[0].seed_text, by_arm(entries, seed=13)["b"].seed_text] == ["pass 0, fold 0", "pass 2, fold 3"]
    assert [entry.seed for entry in ablate({"a": OWN}, seeds=[2], references=False)] == [10, 11, 12, 13, 14]
    assert ablate({"a": BASE}, seeds=[2])[0].seed_text == "seed 2" and BASE.folds == 0
    check_comparable(entries, "mine.py")


@pytest.mark.parametrize(
    ("arms", "options", "words"),
    [
        ({"a": OWN, "b": BASE}, {}, r"'a' has folds=5 and 'b' has folds=0; expected the same for all arms"),
        ({"a": OWN, "b": OWN.vary(data=partial(FOLDED, folds=10))}, {}, "'b' has folds=10"),
        ({"a": OWN}, {"extra_references": {"pixels": BASE.vary(depth=1)}}, "'pixels' has folds=0"),
        ({"a": OWN}, {"extra_references": [OWN]}, "extra_references is .*; expected a dict from names to runs"),
        ({"a": OWN}, {"extra_references": {"x": FOLDED}}, "extra_references is .*; expected a dict from names to runs"),
        ({"a": OWN}, {"references": 5}, "references is 5; expected True, False, or names from pixels, logistic regression"),
        ({"a": OWN}, {"labels": [[10], [10]]}, r"labels are \[\[10\], \[10\]\]; expected at least one, and each once"),
        ({"a": OWN.vary(init=PRETRAINED.vary(data=partial(FOLDED, folds=4)))}, {}, "its init has folds=4; expected the same"),
        (
            {"a": OWN.vary(init=PRETRAINED.vary(data=partial(FOLDED, digits=True)))}, {},
            "'a' and its init load the same path with different digits; expected equal options",
        ),
        (
            {"a": OWN.vary(init=PRETRAINED.vary(data=partial(arrays, path="./own.npz", test=0.2)))}, {},
            "load the same path with different folds, test; expected equal options",
        ),
        ({"a": OWN}, {"tune": Tune({"lr": (1e-4, 1e-2)})}, r"folds=5 of 'a'.* use a fixed test part, such as folder"),
        ({"a": BASE.vary(evaluators=(log_loss, accuracy))}, {"tune": Tune({"lr": (1e-4, 1e-2)})}, "log_loss, where lower is"),
    ],
)
def test_folds_must_agree_and_cannot_be_tuned(arms, options, words):
    with pytest.raises(ValueError, match=words):
        ablate(arms, **options)


def test_pretraining_must_not_see_the_test_images_of_a_fold():
    run = OWN.vary(init=PRETRAINED.vary(data=partial(FOLDED)))
    check_same_fold(run.at_seed(3))
    check_same_fold(run.vary(seed=3, init=PRETRAINED))  # other data, without folds
    with pytest.raises(ValueError, match=r"seed=3 and its init has seed=0, .* expected equal seeds, such as run.at_seed\(3\)"):
        check_same_fold(run.vary(seed=3))
    with pytest.raises(ValueError, match="seed=3 and its init has seed=0"):
        check_same_fold(OWN.vary(init=run.vary(seed=3)).vary(seed=3))


def test_added_seeds_of_a_cross_validation_are_whole_passes():
    entries = ablate({"a": OWN, "b": OWN.vary(depth=3)}, seeds=[0, 3], references=False)
    cells = {entry.arm: entry.cell for entry in entries}
    added = with_looks(entries, Looks((3, 4), {cells["b"]: 4}))
    passes = {arm: [entry.seed // 5 for entry in added if entry.arm == arm] for arm in "ab"}
    assert passes == {"a": [0] * 5 + [3] * 5 + [4] * 5, "b": [0] * 5 + [3] * 5 + [4] * 5 + [5] * 5}
    tried = exploration_runs(entries, entries, 2)
    assert [entry.seed for entry in tried if entry.arm == "a"] == [*range(5_000, 5_005), *range(5_015, 5_020)]
    stored = [
        Record(recipe="r", arm="b", role="technique", labels=None, seed=seed, status="finished", run={},
               fingerprint=fingerprint(entries[1].run.at_seed(seed)))
        for seed in (0, 19, 21, 38)
    ]  # fmt: skip
    assert unused_seeds(entries, stored) == {cells["b"]: [4, 7]} and unused_seeds(added, stored) == {cells["b"]: [7]}
