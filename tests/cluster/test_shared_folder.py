"""Two machines with a shared folder train two shards of a recipe. They crash and start again, and train the same shard at once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from equal_results import check_equal
from machines import Machine, machines, why_not
from slurm import wait_until

pytestmark = [pytest.mark.long, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]
ROOT = Path(__file__).parents[2]
RECIPE = '''
"""Which of three settings is best?"""
from functools import partial
from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate, augment
from smallvit.train import loop

loop.CHECKPOINT_SECONDS = 1.0  # so that short runs are interrupted between two checkpoints
short = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2), labels=50, val=20, steps=400,
            batch=8, augment=augment.digits())
arms = {"scratch": short, "+LSA": short.vary(attention=LocalityAttention),
        "continued": short.vary(steps=200, init=short.vary(steps=200, lr=3e-3))}
RUNS = ablate(arms, labels=[50], seeds=range(8), references=False)
'''
MINUTES = 60.0


@pytest.fixture
def shared(tmp_path, monkeypatch) -> Path:
    """The shared folder, with a recipe."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / "mine.py").write_text(RECIPE)
    return folder


def start(machine: Machine, shard: str) -> subprocess.Popen:
    """Begin to train a shard on a machine."""
    command = [sys.executable, "-m", "smallvit", "run", "mine.py", "--shard", shard, "--jobs", "1"]
    return machine.start(*command, output=machine.shared.parent / f"{machine.name}.log")


def records(shared: Path) -> int:
    return len(list((shared / "runs").rglob("record.json")))


def finish(shared: Path, run: dict[str, subprocess.Popen], machine_of: dict[str, Machine], shard_of: dict[str, str]):
    """Wait until all shards have ended. A shard of which the other machine trains some runs is started again, as an engine does."""
    while run:
        for name, process in list(run.items()):
            if process.poll() is not None:
                del run[name]
                assert process.returncode in (0, 75), (shared.parent / f"{name}.log").read_text()[-3000:]
                if process.returncode == 75:
                    run[name] = start(machine_of[name], shard_of[name])
        time.sleep(0.5)


@pytest.mark.parametrize("shards", [("1/2", "2/2"), ("1/1", "1/1")], ids=["two shards", "the same shard twice"])
def test_nothing_is_lost_or_doubled_when_a_machine_crashes(shared, capsys, shards):
    """The first machine loses its power twice: while it trains, and again after it has started again."""
    started = time.monotonic()
    with machines(shared, "first", "second") as found:
        machine_of = {machine.name: machine for machine in found}
        shard_of = dict(zip(machine_of, shards))
        run = {name: start(machine, shard_of[name]) for name, machine in machine_of.items()}
        first = machine_of["first"]
        for count in (3, 8):  # records after which it crashes
            wait_until(lambda least=count: records(shared) >= least, 30 * MINUTES)
            time.sleep(3)  # into the next run
            assert run["first"].poll() is None, "it ended before the crash"
            first.crash()
            run.pop("first").wait()
            time.sleep(2)
            first.boot()
            run["first"] = start(first, shard_of["first"])
        finish(shared, run, machine_of, shard_of)
        report = [sys.executable, "-m", "smallvit", "report", "mine.py"]
        done = first.start(*report, output=shared.parent / "report.log").wait()
        assert done == 0, (shared.parent / "report.log").read_text()
    seconds = time.monotonic() - started
    command = [sys.executable, "-m", "smallvit", "run", "mine.py", "--jobs", "2", "--out", "../whole"]
    done = subprocess.run(command, cwd=shared, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reads = (shared / "runs/mine/test_reads.jsonl").read_text().splitlines()
    figures = {
        "shards": shards,
        "crashes": 2,
        "times that a run was left to the other machine": sum(
            (shared.parent / f"{name}.log").read_text().count("trained by another process") for name in machine_of
        ),
        "reads of the test images": len(reads),
        "minutes": round(seconds / 60, 1),
        **check_equal(shared / "runs/mine", shared.parent / "whole/mine"),
    }
    with capsys.disabled():
        print(f"\n{json.dumps(figures, indent=1)}")
