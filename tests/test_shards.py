"""Shards: every run is in exactly one part, no part needs another one, and the parts are the same in every process."""

import itertools
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import TINY_VIT, slow_after

from smallvit import ArmRun, Run, ablate
from smallvit.__main__ import main
from smallvit.ablation import with_dependencies
from smallvit.commands.run import end_shard
from smallvit.launch.results import folder, tags
from smallvit.launch.shards import divide
from smallvit.recipe import load_recipe
from smallvit.record import RECORD, WEIGHTS, read_record
from smallvit.run import fingerprint
from smallvit.train.fit import new_record

SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=12, batch=8)
RECIPE = '''
"""Does a start from other weights help a very small model?"""
from functools import partial
from smallvit import PatchEmbed, Run, ViT, ablate

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=6, batch=8, val=20)
ARMS = {"scratch": scratch, "other": scratch.vary(lr=2e-3), "tuned": scratch.vary(init=scratch.vary(lr=5e-3))}
RUNS = ablate(ARMS, labels=[20], seeds=range(3), references=False)
'''


def trained_with(runs: list[ArmRun], recipe: list[ArmRun]) -> dict[str, int]:
    """The runs that a process trains for these runs, with those that they need: fingerprint and steps."""
    entries, _ = with_dependencies(runs, recipe)
    return {fingerprint(entry.run): entry.run.steps for entry in entries}


@st.composite
def recipes(draw) -> tuple[list[ArmRun], list[ArmRun]]:
    """All runs of a recipe, some of which start from others, and a part of them."""
    runs: list[Run] = []
    for number in range(draw(st.integers(1, 9))):
        init = draw(st.sampled_from([None, None, *runs]))
        runs.append(SHORT.vary(lr=1e-3 * (number + 1), steps=draw(st.integers(0, 50)), init=init))
    listed = draw(st.lists(st.sampled_from(runs), min_size=1, unique_by=id))
    recipe = [ArmRun(run=run, arm=f"arm {number}") for number, run in enumerate(listed)]
    return recipe, draw(st.lists(st.sampled_from(recipe), min_size=1, unique_by=id))


@pytest.mark.parametrize("examples", slow_after(1, [15, 40]))
def test_shards_are_disjoint_complete_and_need_nothing_from_each_other(examples):
    settings(max_examples=examples, deadline=None)(given(recipes(), st.integers(1, 12), st.integers(1, 3))(check_shards))()


def check_shards(recipe_and_runs, count, stack):
    recipe, runs = recipe_and_runs
    shards = divide(runs, recipe, count, stack)
    assert len(shards) == count
    assert Counter(map(id, itertools.chain(*shards))) == Counter(map(id, runs))
    work = [trained_with(shard, recipe) for shard in shards]
    for one, other in itertools.combinations(work, 2):
        assert not one.keys() & other.keys(), "two shards would train the same run"
    again = divide(list(runs), list(recipe), count, stack)
    assert [[entry.arm for entry in shard] for shard in again] == [[entry.arm for entry in shard] for shard in shards]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(recipes(), st.integers(1, 5))
def test_no_shard_has_more_work_than_an_even_share_and_one_part(recipe_and_runs, count):
    recipe, runs = recipe_and_runs
    loads = [sum(trained_with(shard, recipe).values()) for shard in divide(runs, recipe, count)]
    (whole,) = divide(runs, recipe, 1)
    parts = [sum(trained_with(shard, recipe).values()) for shard in divide(runs, recipe, len(whole)) if shard]
    assert max(loads) <= sum(loads) / count + max(parts)


def test_runs_of_equal_length_are_spread_evenly_and_untrained_references_too():
    arms = {"scratch": SHORT, "pixels": SHORT.vary(steps=0, ema=0.0)}
    shards = divide(runs := ablate(arms, labels=[50], seeds=range(8), references=False), runs, 4)
    assert [Counter(entry.arm for entry in shard) for shard in shards] == [{"scratch": 2, "pixels": 2}] * 4


def test_seeds_of_an_arm_lie_in_one_shard_where_they_are_trained_as_one_model():
    arms = {f"arm {number}": SHORT.vary(weight_decay=0.1 * number) for number in range(4)}
    arms["pretrained"] = SHORT.vary(init=SHORT.vary(weight_decay=0.7))
    runs = ablate(arms, labels=[50], seeds=range(8), references=False)
    shards = divide(runs, runs, 6, stack=8)  # the pretrained arm has twice the work: two shards
    assert sorted(len({entry.arm for entry in shard}) for shard in shards) == [1] * 6
    assert sorted(map(len, shards)) == [4, 4, 8, 8, 8, 8]
    assert all(len({entry.arm for entry in shard}) > 1 for shard in divide(runs, runs, 6))


def test_shards_stay_balanced_where_stacks_would_leave_some_without_work():
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(8), references=False)
    assert [len(shard) for shard in divide(runs, runs, 8, stack=8)] == [1] * 8
    assert [len(shard) for shard in divide(runs, runs, 4, stack=8)] == [2] * 4


@pytest.mark.slow
def test_division_is_the_same_in_another_process_with_other_hashes_of_strings(workdir):
    code = """
from smallvit.launch.shards import divide
from smallvit.recipe import load_recipe
runs = load_recipe("mine.py").RUNS
print([[(e.arm, e.seed) for e in shard] for shard in divide(runs, runs, 4)])
"""
    path, runs = str(Path(__file__).parents[1]), load_recipe("mine.py").RUNS
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": path})
    assert done.stdout.strip() == str([[(e.arm, e.seed) for e in shard] for shard in divide(runs, runs, 4)]), done.stderr


def test_number_of_shards_must_be_positive():
    with pytest.raises(ValueError, match="the number of shards is 0; expected at least 1"):
        divide([], [], 0)


# The command


def stored(workdir: Path) -> dict[str, float]:
    return {str(path.parent): path.stat().st_mtime_ns for path in workdir.rglob(RECORD)}


@pytest.mark.slow
def test_shards_train_everything_once_and_the_report_is_complete(workdir, capsys):
    seen: dict[str, float] = {}
    for index in (2, 1, 3):
        assert main(["run", "mine.py", "--shard", f"{index}/3", "--jobs", "1"]) == 0
        captured = capsys.readouterr()
        assert f"shard {index}/3: 3 of 9 runs" in captured.err
        assert "when all shards have ended: smallvit report mine.py --out runs" in captured.out
        assert not list(workdir.rglob("report.*")), "a shard wrote a report"
        assert stored(workdir).items() >= seen.items(), "a shard trained a run of another one"
        seen = stored(workdir)
    assert len(seen) == 12  # with three initializations
    assert main(["report", "mine.py"]) == 0
    assert main(["run", "mine.py", "--jobs", "1", "--out", "whole"]) == 0
    weights = {path.relative_to(workdir / "runs"): path.read_bytes() for path in (workdir / "runs").rglob(WEIGHTS)}
    assert weights == {path.relative_to(workdir / "whole"): path.read_bytes() for path in (workdir / "whole").rglob(WEIGHTS)}


def test_shard_without_runs_ends_at_once_with_status_0(workdir, capsys, monkeypatch):
    monkeypatch.setattr("smallvit.commands.run.launch", lambda *words, **options: pytest.fail("something was launched"))
    for more in ([], ["--fast"], ["--dry-run"]):
        assert main(["run", "mine.py", "--shard", "12/12", *more]) == 0
    captured = capsys.readouterr()
    assert "shard 12/12: 0 of 9 runs" in captured.err and not (workdir / "runs").exists()


def test_shard_with_a_failed_run_has_status_1(workdir, capsys):
    text = RECIPE.replace("scratch.vary(lr=2e-3)", "scratch.vary(heads=3)")
    Path("mine.py").write_text(text)
    assert sorted(main(["run", "mine.py", "--shard", f"{index}/3", "--only", "seed=0", "--jobs", "1"]) for index in (1, 2, 3)) == [0, 0, 1]
    assert "3 heads do not divide width 16" in capsys.readouterr().err


def test_shard_of_which_another_process_trains_a_run_has_status_75(workdir, capsys):
    entry = load_recipe("mine.py").RUNS[0]
    place = folder(entry, Path("runs"), "mine")
    place.mkdir(parents=True)
    with FileLock(place / ".lock"):
        assert main(["run", "mine.py", "--shard", "1/1", "--only", "seed=0", "--jobs", "1"]) == 75
    captured = capsys.readouterr()
    assert "is being trained by another process" in captured.err and "1 of 3 runs are still to be trained" in captured.err
    assert main(["run", "mine.py", "--shard", "1/1", "--only", "seed=0", "--jobs", "1"]) == 0


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["finished", "unavailable"], 0),
        (["finished", "interrupted"], 75),
        (["missing", "interrupted"], 75),
        (["interrupted", "failed"], 1),
        (["missing", "failed"], 1),
    ],
)
def test_shard_whose_runs_the_same_command_trains_again_has_status_75(statuses, expected, workdir):
    entries = load_recipe("mine.py").RUNS
    records = [new_record(entry.run, tags(entry, "mine"), status) for entry, status in zip(entries, statuses)]
    options = Namespace(recipe="mine.py", out="runs", scale_steps=1, smoke=False, shard=(1, 2))
    assert end_shard(records, options) == expected


def test_smoke_tests_of_shards_do_not_delete_each_other(workdir, capsys):
    for index in (1, 2):
        assert main(["run", "mine.py", "--shard", f"{index}/2", "--smoke", "--jobs", "1"]) == 0
        assert "a smoke test of a shard has no report" in capsys.readouterr().out
    arms = {read_record(path.parent).arm for path in workdir.rglob(RECORD)}
    assert arms == {"scratch", "other", "tuned", "initialization of tuned"}
    assert {path.name for path in (workdir / "runs" / "smoke").iterdir()} == {"shard-1-of-2", "shard-2-of-2"}


@pytest.mark.parametrize(
    "words, message",
    [
        (["--shard", "1/2", "--until-decided"], "--shard cannot be used with --until-decided: a look needs the results of all shards; "),
        *((["--shard", text], f"{text!r} is not allowed; expected I/N") for text in ("0/4", "5/4", "3", "a/b", "1/0", "1/999999999")),
    ],
)
def test_wrong_shards_are_refused(words, message, workdir, capsys):
    try:
        status = main(["run", "mine.py", *words])
    except SystemExit as end:  # of argparse
        status = end.code
    assert status == 2 and message in capsys.readouterr().err and not (workdir / "runs").exists()
