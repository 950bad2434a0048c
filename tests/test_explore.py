"""The list of trials of `smallvit explore`: several processes may add trials at once."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from toys import TINY_VIT

from smallvit import ArmRun, Run, trials
from smallvit.commands.explore import write_trial


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
