"""The list of trials of `smallvit explore`, to which several processes may add, and what it says of runs that did not finish."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from toys import TINY_VIT

from smallvit import ArmRun, Run, trials
from smallvit.__main__ import main
from smallvit.commands import explore
from smallvit.commands.explore import write_trial
from smallvit.launch.results import Interrupted, record_failure
from smallvit.launch.scheduler import Scheduler

RECIPE = """
from functools import partial
from smallvit import PatchEmbed, Run, ViT, ablate

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=6, batch=8, val=20)
RUNS = ablate({"scratch": scratch, "high": scratch.vary(lr=9.0)}, labels=[20], references=False)
"""


def test_two_explorations_with_different_out_folders_lose_no_trial(tmp_path, monkeypatch):
    """Both read the list before one of them writes it, unless a lock beside the list prevents this."""
    read = trials.read_trials

    def slow(path):
        found = read(path)
        time.sleep(0.3)
        return found

    monkeypatch.setattr(trials, "read_trials", slow)
    run, record = Run(model=TINY_VIT, labels=100, val=50, steps=1), SimpleNamespace(val_result=0.5, score="accuracy")

    def explore(name: str) -> str:
        return write_trial(tmp_path / "mine.py", tmp_path / name / "mine", ArmRun(run=run, arm=name), [record])

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(explore, "ab")] == ["", ""]
    assert sorted(trial["arm"] for trial in read(tmp_path / "mine.trials.jsonl")) == ["a", "b"]


def test_earlier_run_that_is_an_arm_has_one_folder_whichever_arms_are_explored(workdir, monkeypatch):
    text = (workdir / "mine.py").read_text().replace("high\": scratch.vary(lr=9.0)", "longer\": scratch.vary(init=scratch)")
    (workdir / "mine.py").write_text(text)
    folders: list[set] = []

    def launch(runs, out, *, recipe, recipe_runs, **options):
        folders.append({*Scheduler(runs, out, recipe, recipe_runs=recipe_runs).folders})
        return []

    monkeypatch.setattr(explore, "launch", launch)
    for words in ([], ["--only", "arm=longer"]):
        assert main(["explore", "mine.py", *words]) == 1
    assert folders[0] == folders[1] and len(folders[0]) == 2


@pytest.mark.parametrize(
    ("error", "printed"),
    [
        (FloatingPointError("the loss is nan"), "2 of 2 runs had an infinite loss and are not trained again; lower their learning rate\n"),
        (
            RuntimeError("its initialization failed: FloatingPointError: the loss is nan"),
            "2 of 2 runs had an infinite loss and are not trained again; lower their learning rate\n",
        ),
        (ValueError("broken"), "2 of 2 runs have not finished; start the command again to train them\n"),
        (Interrupted("the disk is full"), "2 of 2 runs have not finished; start the command again to train them\n"),
    ],
)
def test_exploring_shows_errors_and_says_which_runs_are_trained_again(error, printed, workdir, monkeypatch, capsys):
    def launch(runs, out, *, recipe, **options):
        return [record_failure(entry, out, recipe, error) for entry in runs]

    monkeypatch.setattr(explore, "launch", launch)
    assert main(["explore", "mine.py"]) == 1
    out, err = capsys.readouterr()
    assert out.endswith(printed) and out.count("runs ha") == 1
    assert all(f"  {arm}: " in err for arm in ("scratch", "high")) and err.count(str(error)) == 2
