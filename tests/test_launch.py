"""Many runs: equal for any number of workers, nothing lost when something dies."""

import multiprocessing
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate, arrays, augment
from smallvit.launch import launch
from smallvit.launch.scheduler import Scheduler, failed, folder, in_turn, recall
from smallvit.record import RECORD, WEIGHTS, read_record
from smallvit.train.fit import blank

TINY = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2)
SHORT = Run(model=TINY, labels=50, val=20, steps=12, batch=8, augment=augment.digits())
ARMS = {"scratch": SHORT, "+LSA": SHORT.vary(attention=LocalityAttention)}


def left(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob(WEIGHTS))}


def test_one_worker_and_two_leave_the_same_weights_and_numbers_and_nothing_is_done_twice(tmp_path):
    runs = ablate(ARMS, labels=[50], seeds=range(2), references=False)
    told = []
    one = launch(runs, tmp_path / "1", recipe="t", jobs=1)
    two = launch(runs, tmp_path / "2", recipe="t", jobs=2, show=told.append)
    assert len(one) == len(two) == len(told) == 4 and len(left(tmp_path / "1")) == 4
    assert left(tmp_path / "1") == left(tmp_path / "2")
    assert [r["test"] for r in one] == [r["test"] for r in two] and all(r["threads"] == 1 for r in one)
    assert [(r["arm"], r["seed"]) for r in two] == [(run.arm, run.seed) for run in runs]
    again = launch(runs, tmp_path / "2", recipe="t", show=lambda record: pytest.fail("a finished run was trained again"))
    assert again == two


def test_a_failure_is_shown_and_recorded_the_others_go_on_and_it_is_retried_on_request(tmp_path, capfd):
    broken = replace(SHORT.vary(tokenizer=partial(PatchEmbed, patch=3)), arm="broken")
    runs = [broken, SHORT]
    records = launch(runs, tmp_path, recipe="t", jobs=1)
    assert [r["status"] for r in records] == ["failed", "finished"]
    assert "patches of 3 pixels do not tile" in records[0]["error"] and "FAILED broken" in capfd.readouterr().err
    kept = (folder(broken, tmp_path, "t") / RECORD).stat().st_mtime_ns
    assert launch(runs, tmp_path, recipe="t", jobs=1) == records, "a failed run was tried again without being asked for"
    assert (folder(broken, tmp_path, "t") / RECORD).stat().st_mtime_ns == kept
    tried = []
    launch(runs, tmp_path, recipe="t", jobs=1, retry=True, show=tried.append)
    assert [r["arm"] for r in tried] == ["broken"] and read_record(folder(broken, tmp_path, "t"))["status"] == "failed"


def test_fail_fast_stops_at_the_first_failure(tmp_path):
    broken = replace(SHORT.vary(tokenizer=partial(PatchEmbed, patch=3)), arm="broken")
    records = launch(
        [broken, *ablate(ARMS, labels=[50], seeds=range(2), references=False)], tmp_path, recipe="t", jobs=1, fail_fast=True
    )
    assert [r["status"] for r in records] == ["failed"]


def workers(parent: int) -> list[int]:
    """The training processes of that one: forks of its server."""
    return [pid for server in children(parent) for pid in children(server)]


def children(parent: int) -> list[int]:
    """Those started by multiprocessing's server of forks, and the server itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words, line = path.read_text().rpartition(")")[2].split(), (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(words[1]) == parent and b"forkserver" in line:
            found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers in /proc")
def test_a_killed_worker_has_its_run_taken_up_again(tmp_path, monkeypatch):
    import threading

    run = SHORT.vary(steps=400)
    place = folder(run, tmp_path, "t")

    killed = []

    def kill():
        deadline = time.monotonic() + 120
        while not (place / ".lock").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in workers(os.getpid()):
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    records = launch([run], tmp_path, recipe="t", jobs=1)
    killer.join()
    assert killed and [r["status"] for r in records] == ["finished"]
    launch([run], tmp_path / "whole", recipe="t", jobs=1)
    assert list(left(tmp_path / "whole").values()) == list(left(place).values())


def interrupted(out: Path, runs: list[Run]):
    try:
        launch(runs, out, recipe="t", jobs=2)
    except KeyboardInterrupt:
        os._exit(130)


def test_ctrl_c_leaves_everything_resumable_and_no_process_behind(tmp_path):
    runs = ablate(ARMS, labels=[50], seeds=range(2), references=False)
    runs = [run.vary(steps=150) for run in runs]
    process = multiprocessing.get_context("spawn").Process(target=interrupted, args=(tmp_path, runs))
    process.start()
    while not list(tmp_path.rglob(RECORD)) and process.is_alive():
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    assert process.exitcode == 130
    finished = len(list(tmp_path.rglob(RECORD)))
    assert 1 <= finished < 4, f"{finished} runs had finished when Ctrl-C came"
    records = launch(runs, tmp_path, recipe="t", jobs=2)
    launch(runs, tmp_path / "whole", recipe="t", jobs=2)
    assert all(r["status"] == "finished" for r in records)
    assert list(left(tmp_path / "t").values()) == list(left(tmp_path / "whole" / "t").values())


# The schedule, without processes


def schedule(runs: list[Run], out: Path, **choices) -> Scheduler:
    return Scheduler(runs, out, "t", again=lambda record: False, **choices)


def finished(run: Run) -> dict:
    return blank(run, "t") | {"status": "finished", "score": "accuracy", "test": {"accuracy": 0.5}, "val": {"accuracy": 0.5}}


def test_seeds_go_out_together_as_far_as_there_is_work_for_the_others(tmp_path):
    runs = ablate(ARMS, labels=[50], seeds=range(6), references=False)
    waiting = schedule(runs, tmp_path, stack=4)
    groups = [waiting.take(2), waiting.take(2), waiting.take(2), waiting.take(2), waiting.take(2)]
    assert [[(runs[at].arm, runs[at].seed) for at in group] for group in groups[:2]] == [
        [("scratch", seed) for seed in range(4)],
        [("+LSA", seed) for seed in range(4)],
    ]
    assert [len(group) for group in groups] == [4, 4, 2, 1, 1] and sorted(at for group in groups for at in group) == list(
        range(12)
    )
    assert waiting.take(2) == [] and not waiting.queue


def test_of_a_stack_that_failed_each_is_tried_alone_and_killed_twice_is_a_record(tmp_path):
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(2), references=False)
    waiting = schedule(runs, tmp_path, stack=2)
    waiting.came(waiting.take(1), BrokenProcessPool("killed"))
    assert waiting.take(1) == [0] and waiting.take(1) == [1]
    waiting.came([0], [finished(runs[0])])
    waiting.came([1], BrokenProcessPool("killed"))
    assert [r["status"] for r in waiting.records] == ["finished", "failed"] and "killed twice" in waiting.records[1]["error"]
    assert not waiting.queue and not waiting.under_way


def test_after_the_first_failure_nothing_is_begun_again(tmp_path):
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(5), references=False)
    waiting = schedule(runs, tmp_path, stack=2, fail_fast=True)
    one, other = waiting.take(2), waiting.take(2)
    waiting.came(other, RuntimeError("together they failed"))
    assert waiting.queue == [2, 3, 4]
    waiting.came(one[:1], RuntimeError("no luck"))
    waiting.came(waiting.take(2), BrokenProcessPool("killed"))
    assert waiting.queue == [] and [r["status"] for r in waiting.records] == ["failed"]


def test_a_run_whose_start_is_at_another_process_is_left_to_it_and_its_kin_go_on_together(tmp_path):
    runs = ablate({"tuned": SHORT.vary(init=SHORT.vary(lr=0.5))}, labels=[50], seeds=range(3), references=False)
    waiting = schedule(runs, tmp_path, stack=3)
    starts = waiting.take(1)
    assert [waiting.runs[at].lr for at in starts] == [0.5] * 3
    waiting.came(starts, [finished(waiting.runs[starts[0]]), None, finished(waiting.runs[starts[2]])])
    assert waiting.take(1) == [0, 2]
    waiting.came([0, 2], [finished(runs[0]), finished(runs[2])])
    assert waiting.take(1) == [] and len(waiting.records) == 2


def test_what_a_run_needs_comes_right_before_it():
    before = [{}, {"init": 5}, {"init": 6, "teacher": 1}, {}, {"init": 5}, {}, {}]
    assert in_turn(range(7), before) == [0, 5, 1, 6, 2, 3, 4]
    assert in_turn([0, 2, 3], before) == [0, 2, 3], "what has finished is not done again"


def test_data_that_cannot_be_read_are_refused_once_before_anything_trains(tmp_path):
    from smallvit import arrays

    (tmp_path / "broken.npz").write_bytes(b"PK")
    runs = [SHORT.vary(data=partial(arrays, path=str(tmp_path / "broken.npz")), seed=seed) for seed in range(2)]
    with pytest.raises(ValueError, match=r"broken\.npz"):
        launch(runs, tmp_path / "runs", recipe="t", jobs=2)
    assert not list(tmp_path.rglob(RECORD))


def test_data_that_changed_under_the_same_name_are_refused_before_old_and_new_stand_in_one_table(tmp_path):
    file, images = tmp_path / "images.npz", np.random.default_rng(0).integers(0, 255, (80, 8, 8), dtype=np.uint8)
    labels = np.arange(80) % 2

    def write(labels: np.ndarray):
        np.savez(file, train_images=images[:60], train_labels=labels[:60], test_images=images[60:], test_labels=labels[60:])
        arrays.cache_clear()

    runs = [SHORT.vary(data=partial(arrays, path=str(file)), labels=None, steps=1, seed=seed) for seed in range(2)]
    write(labels)
    launch(runs[:1], tmp_path, recipe="t", jobs=1)
    write(1 - labels)
    with pytest.raises(ValueError, match=r"1 runs have finished on other images or labels than arrays\(.* gives today"):
        launch(runs, tmp_path, recipe="t", jobs=1)
    write(labels)
    assert [r["status"] for r in launch(runs, tmp_path, recipe="t", jobs=1)] == ["finished"] * 2


def test_the_folder_of_another_run_is_refused_before_anything_trains(tmp_path):
    run = SHORT
    launch([run], tmp_path, recipe="t", jobs=1)
    other = run.vary(lr=2e-3)
    folder(other, tmp_path, "t").parent.mkdir(parents=True, exist_ok=True)
    folder(run, tmp_path, "t").rename(folder(other, tmp_path, "t"))
    with pytest.raises(ValueError, match="holds another run"):
        launch([other], tmp_path, recipe="t", jobs=1)


def test_a_run_that_another_process_trains_is_left_to_it(tmp_path, capfd):
    from filelock import FileLock

    place = folder(SHORT, tmp_path, "t")
    place.mkdir(parents=True)
    with FileLock(place / ".lock"):
        assert launch([SHORT], tmp_path, recipe="t", jobs=1) == []
    assert "is trained by another process" in capfd.readouterr().err and not (place / RECORD).exists()
    assert launch([SHORT], tmp_path, recipe="t", jobs=1)[0]["status"] == "finished"


def test_a_failure_never_takes_the_place_of_a_finished_record(tmp_path):
    launch([SHORT], tmp_path, recipe="t", jobs=1)
    before = (folder(SHORT, tmp_path, "t") / RECORD).read_bytes()
    assert failed(SHORT, tmp_path, "t", OSError("late"))["status"] == "finished"
    assert (folder(SHORT, tmp_path, "t") / RECORD).read_bytes() == before


def test_a_record_is_read_under_the_names_that_the_recipe_gives_today(tmp_path):
    launch([SHORT], tmp_path, recipe="t", jobs=1)
    renamed = replace(SHORT, role="baseline")
    assert recall(renamed, tmp_path, "t")["role"] == "baseline" and recall(SHORT.vary(lr=0.5), tmp_path, "t") is None


def killed_from_outside(out: Path):
    launch([SHORT.vary(steps=100_000)], out, recipe="t", jobs=1)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers in /proc")
def test_a_worker_does_not_outlive_its_parent(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=killed_from_outside, args=(tmp_path,))
    process.start()
    while not list(tmp_path.rglob(".lock")) and process.is_alive():
        time.sleep(0.05)
    orphans = workers(process.pid)
    process.kill()
    process.join()
    for _ in range(100):
        if not any(
            Path(f"/proc/{pid}/cmdline").exists() and b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
            for pid in orphans
        ):
            break
        time.sleep(0.1)
    else:
        pytest.fail("a worker went on without its parent")
    assert len(orphans) >= 1
