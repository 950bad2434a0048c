"""`smallvit status`: the state of every run from another process, with damaged files, stopped clocks and killed workers."""

import json
import multiprocessing
import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from toys import TINY_VIT

from smallvit import ArmRun, LocalityAttention, Run, ablate
from smallvit.__main__ import main
from smallvit.commands import status as command
from smallvit.launch import launch, status
from smallvit.launch.results import folder, tags
from smallvit.launch.scheduler import Task
from smallvit.launch.status import FILE, ProgressFiles, RecipeState, read_progress
from smallvit.record import CHECKPOINT, RECORD, write_record
from smallvit.run import describe
from smallvit.train.fit import new_record

pytestmark = pytest.mark.usefixtures("without_figures")
SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=100, batch=8)
RUNS = ablate({"scratch": SHORT, "+LSA": SHORT.vary(attention=LocalityAttention)}, labels=[50], seeds=range(4), references=False)
RECIPE = '''
"""How far are the runs?"""
from functools import partial
from smallvit import PatchEmbed, Run, ViT, ablate

scratch = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2), steps=6, batch=8, val=20)
RUNS = ablate({"scratch": scratch, "other": scratch.vary(lr=2e-3)}, labels=[20], seeds=range(2), references=False)
'''
PROGRESS = {"host": "node7", "pid": 4, "step": 40, "steps": 100, "runs": 1, "seconds": 20.0, "left": 30.0}


def place_of(entry: ArmRun, out: Path) -> Path:
    place = folder(entry, out, "t")
    place.mkdir(parents=True, exist_ok=True)
    return place


def end(entry: ArmRun, out: Path, kind: str = "finished", seconds: float | None = 60.0):
    """Write a record as a worker or the launcher does."""
    record = replace(new_record(entry.run, tags(entry, "t"), kind), seconds=seconds)
    write_record(place_of(entry, out), record)


def train(entry: ArmRun, out: Path, age: float = 0.0, **changes):
    """Write a progress file that was renewed `age` seconds ago."""
    path = place_of(entry, out) / FILE
    path.write_text(json.dumps(PROGRESS | changes))
    os.utime(path, (time.time() - age, time.time() - age))


def state_of(runs: list[ArmRun], out: Path) -> RecipeState:
    state = RecipeState(runs, runs, out, "t")
    state.update()
    return state


def counts(state: RecipeState) -> dict[str, int]:
    return dict(Counter(one.state for one in state.states))


# What the files say


def test_state_of_each_run_is_shown_with_those_in_training_and_the_time_left(tmp_path):
    end(RUNS[0], tmp_path)
    end(RUNS[2], tmp_path, "failed")
    train(RUNS[4], tmp_path)
    train(RUNS[6], tmp_path, age=180, step=20)
    (place_of(RUNS[1], tmp_path) / CHECKPOINT).touch()
    lines = command.page(state_of(RUNS, tmp_path))
    assert [line.split() for line in lines[:3]] == [
        ["arm", "condition", "finished", "running", "waiting", "failed", "interrupted"],
        ["scratch", "50", "labels", "1", "1", "-", "1", "1"],
        ["+LSA", "50", "labels", "-", "-", "3", "-", "1"],
    ]
    assert "  scratch, 50 labels, seed 2: step 40 of 100, about 30 s left, node7, process 4" in lines
    assert "  scratch, 50 labels, seed 3: stopped (no sign of life for 3 min) at step 20 of 100, node7, process 4" in lines
    # one worker: 30 s, then 60 s as seed 0 for the interrupted run of scratch, and 0.58 s a step for each of the four other runs
    start = "1 of 8 runs have finished, 1 failed, 2 interrupted, 1 running, 3 waiting; about "
    assert lines[-1].startswith(start)


def test_time_left_is_that_of_the_slowest_worker(tmp_path):
    state = state_of(RUNS, tmp_path)
    assert state.seconds_left() is None, "nothing has been timed"
    train(RUNS[0], tmp_path, left=None)
    assert state_of(RUNS, tmp_path).seconds_left() is None, "no step has been timed"
    train(RUNS[1], tmp_path, pid=5, left=60.0)  # 1 s for each of the 60 steps that are left
    assert state_of(RUNS[:2], tmp_path).seconds_left() == 100.0, "the first run has a whole run before it"
    assert state_of(RUNS[:4], tmp_path).seconds_left() == 200.0, "60 + 100 s beside 100 + 100 s"
    train(RUNS[0], tmp_path, runs=2, left=10.0, step=50)
    train(RUNS[2], tmp_path, runs=2, left=10.0, step=50)
    assert state_of(RUNS[:3], tmp_path).seconds_left() == 60.0, "two runs as one model are one worker"
    end(RUNS[3], tmp_path, seconds=200.0)
    assert state_of([*RUNS[:4], RUNS[5]], tmp_path).seconds_left() == 210.0, "its arm takes 200 s"
    assert state_of(RUNS[3:], tmp_path).seconds_left() is None, "nothing is being trained"


def test_interrupted_reference_without_steps_waits_as_a_whole(tmp_path):
    """A classifier of raw pixels that was killed has written no steps."""
    train(RUNS[0], tmp_path, steps=0, step=0, age=600)
    train(RUNS[1], tmp_path, pid=5, left=60.0)
    state = state_of(RUNS[:2], tmp_path)
    assert counts(state) == {"interrupted": 1, "running": 1} and state.seconds_left() == 160.0


def test_worker_between_two_runs_still_counts(tmp_path):
    for entry, pid in zip(RUNS, (4, 5)):
        train(entry, tmp_path, pid=pid, left=60.0)
    state = state_of(RUNS[:4], tmp_path)
    assert state.seconds_left() == 160.0
    end(RUNS[0], tmp_path, seconds=100.0)
    (place_of(RUNS[0], tmp_path) / FILE).unlink()
    state.update()
    assert state.seconds_left() == 160.0, "one worker takes the run that waits, and the other one has 60 + 100 s"


def test_progress_file_beside_a_record_is_ignored_unless_a_failed_run_is_trained_again(tmp_path):
    for entry, kind in zip(RUNS, ("finished", "failed", "unavailable")):
        end(entry, tmp_path, kind)
        train(entry, tmp_path)
    assert counts(state_of(RUNS[:3], tmp_path)) == {"finished": 1, "running": 2}
    for entry in RUNS[:3]:
        train(entry, tmp_path, age=600)
    state = state_of(RUNS[:3], tmp_path)
    assert counts(state) == {"finished": 1, "failed": 1, "unavailable": 1} and state.ended and not state.running


def test_deleted_pretraining_of_finished_runs_does_not_wait(tmp_path):
    arms = {"scratch": SHORT, "+init": SHORT.vary(init=SHORT.vary(lr=2e-3, init=SHORT.vary(lr=3e-3)))}
    runs = ablate(arms, labels=[50], seeds=[0], references=False)
    for entry in runs:
        end(entry, tmp_path)
    state = state_of(runs, tmp_path)
    assert counts(state) == {"finished": 2} and state.ended, "smallvit run would not train the pretraining again"
    (place_of(runs[1], tmp_path) / RECORD).unlink()
    assert counts(state_of(runs, tmp_path)) == {"finished": 1, "waiting": 3}


def test_arm_without_weights_is_not_among_the_runs_that_are_counted(tmp_path):
    """One run of the arm was tried, so the others cannot be trained either."""
    end(RUNS[1], tmp_path, "unavailable")
    train(RUNS[0], tmp_path, step=0, left=100.0)
    state = state_of(RUNS, tmp_path)
    assert counts(state) == {"running": 1, "waiting": 3, "unavailable": 4}
    assert command.page(state)[-1] == "0 of 4 runs have finished, 1 running, 3 waiting, 4 left out (no weights); about 7 min left"
    for entry in RUNS[::2]:
        end(entry, tmp_path)
    state.update()
    assert state.ended and command.page(state)[-1] == "4 of 4 runs have finished, 4 left out (no weights)"


def test_runs_that_wait_take_as_long_as_the_last_ones(tmp_path):
    """Since two hours, other programs use the machine."""
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(8), references=False)
    for hour, entry in enumerate(runs[:6]):
        end(entry, tmp_path, seconds=60.0 if hour < 3 else 600.0)
        os.utime(place_of(entry, tmp_path) / RECORD, (3600 * hour, 3600 * hour))
    train(runs[6], tmp_path, left=10.0)
    assert state_of(runs, tmp_path).seconds_left() == 610.0


def test_time_left_of_a_run_follows_its_recent_speed(tmp_path, monkeypatch):
    """The first 1,000 steps took a second each, later ones ten seconds each."""
    clock, written = [0.0], []
    files = ProgressFiles([Task(describe(SHORT.vary(steps=2_000)), tags(RUNS[0], "t"), tmp_path, {})])
    monkeypatch.setattr(status.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(status, "write_progress", lambda place, **values: written.append(values["left"]))

    def wait(seconds):  # in place of five seconds
        clock[0] += 10 if files.step >= 1_000 else 5
        files.watch(files.step + (1 if files.step >= 1_000 else 5), None)
        files.ended = files.step == 1_500

    monkeypatch.setattr(files.wake, "wait", wait)
    files.keep_writing()
    assert written[0] is None and written[5] == pytest.approx(1970) and written[-1] == pytest.approx(10 * 501)


def test_age_is_measured_by_the_clock_of_the_file_system(tmp_path, monkeypatch):
    """The clock of the machine that asks is an hour ahead."""
    train(RUNS[0], tmp_path)
    train(RUNS[1], tmp_path, age=100)
    now = time.time()
    monkeypatch.setattr(status.time, "time", lambda: now + 3600)
    assert counts(state_of(RUNS[:2], tmp_path)) == {"running": 1, "interrupted": 1}


def test_runs_of_several_conditions_and_initializations_are_shown_once_in_training(tmp_path):
    runs = ablate({"tuned": SHORT.vary(init=SHORT)}, labels=[50], seeds=[0], references=False)
    runs += [replace(runs[0], tuning={"trials": 2})]
    train(runs[0], tmp_path)
    state = state_of(runs, tmp_path)
    assert counts(state) == {"running": 2, "waiting": 1} and len(state.running) == 1
    assert "initialization of tuned" in "\n".join(command.page(state))


def test_finished_records_are_read_once(tmp_path, monkeypatch):
    end(RUNS[0], tmp_path)
    end(RUNS[1], tmp_path, "failed")
    state = state_of(RUNS, tmp_path)
    monkeypatch.setattr(status, "read_record", lambda place: pytest.fail(f"{place} was read again"))
    state.update()
    assert counts(state) == {"finished": 1, "failed": 1, "waiting": 6}


# Damaged files


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 9_000,
        b"1" * 100_000,
        json.dumps({"step": 1}).encode(),
        *(json.dumps(PROGRESS | change).encode() for change in (
            {"step": -1}, {"step": "40"}, {"step": True}, {"steps": 10**30}, {"pid": 1.5}, {"runs": 0}, {"left": -1},
            {"left": "soon"}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"seconds": None}, {"host": 7}, {"more": 1},
        )),
    ],
    ids=range(21),
)  # fmt: skip
def test_damaged_progress_file_is_ignored(content, tmp_path):
    place = place_of(RUNS[0], tmp_path)
    (place / FILE).write_bytes(content)
    assert read_progress(place, time.time()) is None
    assert counts(state_of(RUNS[:1], tmp_path)) == {"waiting": 1}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_progress_file_that_is_a_folder_or_a_pipe_is_ignored(tmp_path):
    (place_of(RUNS[0], tmp_path) / FILE).mkdir()
    os.mkfifo(place_of(RUNS[1], tmp_path) / FILE)  # reading it would wait for ever
    assert counts(state_of(RUNS[:2], tmp_path)) == {"waiting": 2}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe\x00", b"[" * 9_000, b'{"format": 99}'], ids=range(6))
def test_damaged_record_is_named_and_its_run_waits(content, tmp_path):
    end(RUNS[1], tmp_path)
    (place_of(RUNS[0], tmp_path) / RECORD).write_bytes(content)
    state = state_of(RUNS[:2], tmp_path)
    assert counts(state) == {"finished": 1, "waiting": 1} and not state.ended
    assert f"1 record cannot be used, such as: {place_of(RUNS[0], tmp_path)}" in command.page(state)[-1]


def test_record_of_another_run_is_named(tmp_path):
    end(RUNS[0], tmp_path)
    place_of(RUNS[1], tmp_path).rmdir()
    place_of(RUNS[0], tmp_path).rename(folder(RUNS[1], tmp_path, "t"))
    assert "holds another run than '+LSA'" in command.page(state_of(RUNS[1:2], tmp_path))[-1]


def test_names_that_would_change_the_terminal_are_shown_with_codes(tmp_path):
    with pytest.raises(ValueError, match="names without control characters"):
        replace(RUNS[0], arm="red\x1b[31m\u202e")
    train(RUNS[0], tmp_path, host="\x1b[2Jnode\x00")
    text = "\n".join(command.page(state_of(RUNS[:1], tmp_path)))
    assert r"\x1b[2Jnode\x00" in text and "\x1b" not in text and "\x00" not in text


# What a worker writes


def task(entry: ArmRun, out: Path) -> Task:
    return Task(describe(entry.run), tags(entry, "t"), place_of(entry, out), {})


def waited(condition) -> bool:
    """Whether a condition becomes true within a minute."""
    deadline = time.monotonic() + 60
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(found)


def test_progress_is_written_for_each_run_of_a_stack_and_removed_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "SECONDS", 0.01)
    tasks = [task(entry, tmp_path) for entry in RUNS[:4:2]]
    with ProgressFiles(tasks) as files:
        for step in (51, 60, 70):
            files.watch(step, None)
        assert waited(lambda: all((found := read_progress(one.folder, 0.0)) and found.step == 70 for one in tasks))
        for one in tasks:
            found = read_progress(one.folder, 0.0)
            assert found.pid == os.getpid() and found.runs == 2 and found.steps == 100 and found.left is not None
    assert not [*tmp_path.rglob("*progress*")]


def test_time_left_of_a_run_counts_the_steps_since_it_was_resumed(tmp_path, monkeypatch):
    clock = [10.0]
    monkeypatch.setattr(status, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    files = ProgressFiles([task(RUNS[0], tmp_path)])
    files.watch(50, None)
    assert files.seconds_left(20.0) is None
    files.watch(60, None)
    assert files.seconds_left(20.0) == 40.0, "10 steps in 10 s, and 40 steps are left"
    clock[0] = 30.0
    files.watch(1, None)  # the next run of a group that cannot be trained as one model
    files.watch(11, None)
    assert files.seconds_left(35.0) == 44.5


def test_process_that_takes_no_step_leaves_the_file_of_another_one_alone(tmp_path):
    """It has found that another process trains the run."""
    one = task(RUNS[0], tmp_path)
    train(RUNS[0], tmp_path)
    with ProgressFiles([one]):
        pass
    assert read_progress(one.folder, time.time()).host == "node7"


def test_folder_that_cannot_be_written_does_not_stop_the_training(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "SECONDS", 0.001)
    one = task(RUNS[0], tmp_path)
    one.folder.rmdir()
    with ProgressFiles([one]) as files:
        files.watch(1, 0.5)
        time.sleep(0.05)
        assert files.thread.is_alive()
    assert not one.folder.exists()


def long_runs(steps: int) -> list[ArmRun]:
    """Two runs that are trained as one model."""
    return [replace(entry, run=entry.run.vary(steps=steps)) for entry in RUNS if entry.arm == "scratch"][:2]


@pytest.mark.slow
def test_runs_of_another_process_are_seen_in_training_until_they_have_finished(tmp_path):
    runs, options = long_runs(200), {"recipe": "t", "jobs": 1, "stack": 2}
    training = threading.Thread(target=launch, args=(runs, tmp_path), kwargs=options)
    training.start()
    assert waited(lambda: counts(state_of(runs, tmp_path)) == {"running": 2})
    (first, progress), _ = state_of(runs, tmp_path).running
    assert first == runs[0] and progress.runs == 2 and progress.steps == 200 and progress.step > 0
    training.join()
    assert counts(state_of(runs, tmp_path)) == {"finished": 2} and not [*tmp_path.rglob(FILE)]


def train_long(out: Path):
    launch(long_runs(100_000), out, recipe="t", jobs=1, stack=2)


@pytest.mark.slow
def test_runs_of_a_killed_process_are_interrupted(tmp_path, monkeypatch):
    runs = long_runs(100_000)
    process = multiprocessing.get_context("spawn").Process(target=train_long, args=(tmp_path,))
    process.start()
    try:
        assert waited(lambda: counts(state_of(runs, tmp_path)) == {"running": 2})
    finally:
        process.kill()
        process.join()
    monkeypatch.setattr(status, "SILENT", -1.0)  # as if a minute had passed
    state = state_of(runs, tmp_path)
    assert counts(state) == {"interrupted": 2} and not state.ended
    assert all("stopped (no sign of life for" in line for line in command.page(state)[3:5])


# The command


def test_status_of_a_recipe_before_and_after_it_has_run(workdir, capsys):
    assert main(["status", "mine.py"]) == 1
    captured = capsys.readouterr()
    assert "0 of 4 runs have finished, 4 waiting" in captured.out and not Path("runs").exists()
    assert f"there is no folder {workdir / 'runs' / 'mine'}; if the runs are elsewhere" in captured.err
    assert main(["run", "mine.py", "--jobs", "1", "--only", "arm=scratch"]) == 0
    capsys.readouterr()
    assert main(["status", "mine.py"]) == 1
    captured = capsys.readouterr()
    assert "2 of 4 runs have finished, 2 waiting" in captured.out and "no folder" not in captured.err
    assert main(["status", "mine.py", "--only", "arm=scratch", "--watch"]) == 0
    out = capsys.readouterr().out
    assert out.endswith("2 of 2 runs have finished\n") and len(out.splitlines()) == 1, "not a terminal: one line"
    assert main(["status", "mine.py", "--scale-steps", "2"]) == 1
    assert "0 of 4 runs have finished" in capsys.readouterr().out


def test_watching_shows_changes_until_all_runs_have_ended(tmp_path, monkeypatch, capsys):
    ends = iter([lambda: None, lambda: end(RUNS[0], tmp_path), lambda: end(RUNS[1], tmp_path, "failed")])
    monkeypatch.setattr(command.time, "sleep", lambda seconds: next(ends)())
    command.watch(state_of(RUNS[:2], tmp_path))
    shown = [line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["0 of 2 runs have finished, 2 waiting", "1 of 2 runs have finished, 1 waiting", "1 of 2 runs have finished, 1 failed"]


def test_watching_on_a_terminal_fits_it_and_ends_with_ctrl_c(tmp_path, monkeypatch, capsys):
    for entry in RUNS:
        train(entry, tmp_path)
    monkeypatch.setattr(command, "get_terminal_size", lambda: os.terminal_size((80, 12)))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.time, "sleep", interrupt)
    command.watch(state_of(RUNS, tmp_path))
    out = capsys.readouterr().out
    assert out.startswith(command.CLEAR) and len(out.splitlines()) == 12 and "  and 4 more" in out
