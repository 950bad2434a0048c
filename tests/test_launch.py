"""Launching many runs: equal results for any number of workers, and nothing lost when a process dies."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from toys import TINY_VIT, training_of

from smallvit import DINO, ArmRun, LocalityAttention, PatchEmbed, Pixels, Run, ablate, arrays, augment, fit, knn
from smallvit import folder as image_folder
from smallvit import record as records
from smallvit.launch import launch, progress
from smallvit.launch.local import HUGE_PAGES, allow_open_files, delay_sigint, process_context
from smallvit.launch.plan import parallel, plan
from smallvit.launch.results import Damaged, Killed, folder, recall, record_failure, tags
from smallvit.launch.scheduler import Scheduler, dependencies_first
from smallvit.launch.status import RecipeState
from smallvit.recipe import load_recipe
from smallvit.record import CHECKPOINT, RECORD, WEIGHTS, Record, read_record, read_records, user_line
from smallvit.storage import NotWritten
from smallvit.train import checkpoint
from smallvit.train.fit import new_record
from smallvit.train.publish import publish
from smallvit.train.read_log import READS

SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=12, batch=8, augment=augment.digits())
ARMS = {"scratch": SHORT, "+LSA": SHORT.vary(attention=LocalityAttention)}
ENTRY = ArmRun(run=SHORT, arm="scratch")
BROKEN = ArmRun(run=SHORT.vary(tokenizer=partial(PatchEmbed, patch=3)), arm="broken")
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds the workers in /proc")


def comparison(seeds: int, arms: dict[str, Run] = ARMS) -> list[ArmRun]:
    return ablate(arms, labels=[50], seeds=range(seeds), references=False)


def names(records: list) -> list[tuple[str, int]]:
    return [(record.arm, record.seed) for record in records]


def weights_in(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob(WEIGHTS))}


def test_damaged_file_of_reads_is_named_before_anything_is_trained(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / READS).write_text('{"data": "ab", "arm"\n')
    with pytest.raises(ValueError, match=r"test_reads\.jsonl, line 1 is damaged.*delete this line"):
        launch([ENTRY], tmp_path, recipe="t", engine=lambda settings, groups: pytest.fail("the engine was started"))


def test_damaged_file_that_another_process_has_renamed_or_that_cannot_be_renamed(tmp_path, monkeypatch, capsys):
    Damaged(tmp_path / RECORD).set_aside()
    assert f"{RECORD} is damaged; renamed" in capsys.readouterr().err
    Damaged(tmp_path / WEIGHTS, tmp_path / RECORD).set_aside()
    assert f"{WEIGHTS} does not belong to the {RECORD} beside it, or is damaged; renamed" in capsys.readouterr().err
    assert "is damaged, or does not belong to the record.json beside it; smallvit run" in str(Damaged(tmp_path / WEIGHTS))
    (tmp_path / RECORD).touch()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(NotWritten, match="is damaged and cannot be renamed: Permission denied; make its folder writable"):
        Damaged(tmp_path / RECORD).set_aside()


def test_limit_of_open_files_is_raised_as_far_as_the_workers_need_and_the_system_allows(monkeypatch):
    resource, limits = pytest.importorskip("resource"), []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    allow_open_files(8)
    allow_open_files(64)
    assert limits == [(544, 1024)]
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: (_ for _ in ()).throw(ValueError("not allowed")))
    with pytest.raises(ValueError, match="200 worker processes need 1,632 open files, and the limit is 1,024; use fewer --jobs"):
        allow_open_files(200)


def test_number_of_workers_changes_no_result_and_finished_runs_are_not_trained_again(tmp_path):
    runs = comparison(seeds=2)
    shown = []
    one = launch(runs, tmp_path / "1", recipe="t", jobs=1)
    two = launch(runs, tmp_path / "2", recipe="t", jobs=2, show=shown.append)
    assert len(one) == len(two) == len(shown) == len(weights_in(tmp_path / "1")) == 4
    assert weights_in(tmp_path / "1") == weights_in(tmp_path / "2")
    assert [r.test for r in one] == [r.test for r in two] and all(r.threads == 1 for r in one)
    assert names(two) == names(runs)
    again = launch(runs, tmp_path / "2", recipe="t", show=lambda record: pytest.fail("a finished run was trained again"))
    assert again == two


def test_failed_run_leaves_a_record_with_traceback_and_is_retried_only_on_request(tmp_path, capfd):
    runs, place = [BROKEN, ENTRY], folder(BROKEN, tmp_path, "t")
    records = launch(runs, tmp_path, recipe="t", jobs=1)
    assert [r.status for r in records] == ["failed", "finished"]
    assert "patches of 3 pixels do not tile" in records[0].error and "FAILED broken" in capfd.readouterr().err
    assert records[0].traceback.startswith("Traceback") and records[0].traceback.endswith(records[0].error)
    assert "tokenizers.py" in records[0].traceback and records[1].traceback is None
    written = (place / RECORD).stat().st_mtime_ns
    assert launch(runs, tmp_path, recipe="t", jobs=1) == records, "a failed run was tried again without being asked for"
    assert (place / RECORD).stat().st_mtime_ns == written
    tried = []
    launch(runs, tmp_path, recipe="t", jobs=1, retry=True, show=tried.append)
    assert names(tried) == [("broken", 0)] and read_record(place).status == "failed"


OWN = '''"""A recipe with components of its own."""

from functools import partial

from smallvit import LocalityAttention, PatchEmbed, Run, ViT, ablate


class Own(LocalityAttention):
    """An attention that only this file knows."""


class Broken(LocalityAttention):
    """An attention that cannot be created."""

    def __init__(self, *arguments, **options):
        raise ValueError("broken on purpose")


model = partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=1, heads=2)
RUN = Run(model=model, labels=50, val=20, steps=2, batch=8)
RUNS = ablate({"own": RUN.vary(attention=Own), "broken": RUN.vary(attention=Broken)}, labels=[50], seeds=range(2), references=False)
'''


@pytest.mark.parametrize("edited", ["\n\ndef half-typed(", OWN.replace("class", "x = 1\n\nclass").replace("    def", "    x = 1\n    def")], ids=["half-typed", "changed"])
def test_workers_use_the_recipe_as_it_was_when_the_command_started(edited, tmp_path):
    """The file is edited after the first run. A failure still shows the line that failed."""
    path = tmp_path / "own.py"
    path.write_text(OWN)
    runs = load_recipe(path).RUNS

    try:
        records = launch(runs, tmp_path, recipe="own", source=path, jobs=1, show=lambda record: path.write_text(edited))
    finally:
        del sys.modules["recipes.own"]
    assert [(record.arm, record.status) for record in records] == [("own", "finished"), ("broken", "failed")] * 2
    assert all('raise ValueError("broken on purpose")' in (record.traceback or "") for record in records[1::2])
    assert f'File "{path}", line 16' in records[3].traceback


def test_fail_fast_stops_at_the_first_failure(tmp_path):
    records = launch([BROKEN, *comparison(seeds=2)], tmp_path, recipe="t", jobs=1, fail_fast=True)
    assert [r.status for r in records] == ["failed"]


def test_run_that_several_conditions_share_is_trained_once_and_each_has_its_record(tmp_path):
    """An untrained reference at two lengths, and an arm whose tuned settings are the common ones."""
    arms = {"scratch": SHORT, "pixels": SHORT.vary(model=Pixels, steps=0, ema=0.0, evaluators=(knn,))}
    entries = ablate(arms, labels=[50], seeds=range(2), steps=[6, 12], references=False)
    entries += [replace(entry, tuning={"trials": 2}) for entry in entries if entry.length == 12]
    new: list[Record] = []
    records = launch(entries, tmp_path, recipe="test", jobs=2, show=new.append)
    assert len(new) == len([*tmp_path.rglob(RECORD)]) == 2 * 2 + 2
    assert [(r.arm, r.seed, r.length, r.tuning) for r in records] == [(e.arm, e.seed, e.length, e.tuning) for e in entries]
    pixels = [record for record in records if record.arm == "pixels" and record.seed == 0]
    assert len(pixels) == 3 and len({record.weights_sha256 for record in pixels}) == 1
    again = launch(entries, tmp_path, recipe="test", jobs=1, show=new.append)
    assert len(new) == 6 and again == records
    assert [recall(entry, tmp_path, "test") for entry in entries] == records


def test_run_that_several_arms_share_is_trained_once_and_counts_in_each(tmp_path, capsys, monkeypatch):
    """An arm with more steps at the first length has the settings of another arm at the second length."""
    arms = {"short": SHORT, "long": SHORT.vary(steps=24)}
    entries = ablate(arms, labels=[50], seeds=[0], steps=[12, 24], references=False)
    for name, value in (("estimate", 60.0), ("worker_start", 0.0), ("computing_processes", 0.0)):
        monkeypatch.setattr(f"smallvit.launch.plan.{name}", lambda *options, value=value: value)
    assert "3 runs, about 3 min with 1 worker process" in plan(entries, 1, "cpu")
    watched, schedule = RecipeState(entries, entries, tmp_path, "t"), scheduler(entries, tmp_path)
    while group := schedule.next_group(1):
        task = schedule.task(group[0])
        task.folder.mkdir(parents=True)
        schedule.handle(group, [publish(task.folder, replace(finished(schedule.runs[group[0]]), arm=task.tags.arm))])
    assert len([*tmp_path.rglob(RECORD)]) == 3 and "4 of 4 runs have finished" in lines_of(schedule.bar, capsys)
    assert [record.arm for record in schedule.requested_records] == ["short", "long"] * 2
    assert scheduler(entries, tmp_path).requested_records == schedule.requested_records
    watched.update()
    assert watched.ended


def test_records_are_read_from_a_folder_of_runs(tmp_path):
    runs = ablate({"scratch": SHORT, "other": SHORT.vary(lr=2e-3)}, labels=[50], seeds=[0, 1], references=False)
    records = launch(runs, tmp_path, recipe="test", jobs=1)
    found = read_records(tmp_path / "test")
    assert [(r.arm, r.seed) for r in found] == [("other", 0), ("other", 1), ("scratch", 0), ("scratch", 1)]
    assert sorted(found, key=lambda r: r.fingerprint) == sorted(records, key=lambda r: r.fingerprint)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no record.json in .*empty.*; expected the folder of finished runs"):
        read_records(tmp_path / "empty")


def test_launching_leaves_the_environment_as_it_is(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    assert [record.threads for record in launch([ENTRY], tmp_path, recipe="test", jobs=1)] == [1]
    assert dict(os.environ) == before


def test_run_without_test_images_has_no_test_score(tmp_path):
    (record,) = launch([ENTRY], tmp_path, recipe="test", jobs=1, validation_only=True)
    assert record.finished and record.test is None and 0 <= record.val_result <= 1 and record.test_reads == 0
    (record,) = launch([ENTRY], tmp_path / "scored", recipe="test", jobs=1)
    assert record.test and record.test_reads == 1 and record.test_settings == 1
    other = replace(ENTRY, run=SHORT.vary(lr=2e-3))
    (record,) = launch([other], tmp_path / "scored", recipe="test", jobs=1)
    assert record.test_settings == 2, "another setting of the arm was scored on the same test images"


def test_renamed_arm_keeps_its_runs_also_as_the_start_of_another_run(tmp_path):
    launch([ENTRY], tmp_path, recipe="t", jobs=1)
    renamed = replace(ENTRY, arm="plain")
    assert folder(renamed, tmp_path, "t") == folder(ENTRY, tmp_path, "t") and recall(renamed, tmp_path, "t").arm == "plain"
    recipe = comparison(1, {"plain": SHORT, "tuned": SHORT.vary(init=SHORT)})
    trained = []
    launch(recipe, tmp_path, recipe="t", jobs=1, show=trained.append)
    assert names(trained) == [("tuned", 0)] and trained[0].finished
    other = replace(renamed, run=SHORT.at_seed(1))
    assert recall(other, tmp_path, "t") is None and "plain" in folder(other, tmp_path, "t").parts


def test_run_of_a_removed_arm_is_kept_if_another_run_needs_it(tmp_path):
    place = folder(ENTRY, tmp_path, "t")
    place.mkdir(parents=True)
    publish(place, finished(ENTRY))
    schedule = scheduler([ArmRun(run=SHORT.vary(init=SHORT), arm="tuned")], tmp_path)
    assert [entry.role for entry in schedule.runs] == ["technique", "dependency"] and schedule.queue == [0]
    assert schedule.task(0).dependencies == {"init": place}


def test_only_runs_that_have_finished_count_as_trained_by_another_version(tmp_path, monkeypatch, capfd):
    launch([ENTRY], tmp_path, recipe="t", jobs=1)
    record_failure(BROKEN, tmp_path, "t", ValueError("broken"))
    monkeypatch.setattr("smallvit.launch.scheduler.records.code", lambda: {"sha256": "another"})
    Scheduler([ENTRY, BROKEN], tmp_path, "t")
    assert "note: 1 run was trained by another version of smallvit" in capfd.readouterr().err


def test_renamed_arm_keeps_the_checkpoint_of_its_interrupted_run(tmp_path):
    old, renamed = folder(ENTRY, tmp_path, "t"), replace(ENTRY, arm="plain")
    training = training_of(SHORT, 0)
    for _ in range(3):
        training.train_step()
    training.origin, training.seconds = records.code()["sha256"] + SHORT.data().sha256, 1000.0
    checkpoint.save([training], old / CHECKPOINT)
    assert folder(renamed, tmp_path, "t") == old != folder(replace(renamed, run=SHORT.at_seed(1)), tmp_path, "t")
    (record,) = launch([renamed], tmp_path, recipe="t", jobs=1)
    assert (record.arm, read_record(old).status) == ("plain", "finished") and not (old / CHECKPOINT).exists()
    assert record.seconds > 1000, "the run was not resumed"
    (old / RECORD).unlink()
    new = folder(renamed, tmp_path, "t")
    for place in (old, new):
        checkpoint.save([training], place / CHECKPOINT)
    assert folder(renamed, tmp_path, "t") == new != old, "a checkpoint under the present name comes first"


@pytest.mark.slow
def test_dependency_that_is_an_arm_keeps_its_folder_when_only_a_part_of_the_recipe_is_launched(tmp_path):
    recipe = comparison(1, {"base": SHORT, "tuned": SHORT.vary(init=SHORT), "other": SHORT.vary(init=SHORT.vary(lr=0.5))})
    launch(recipe[1:2], tmp_path, recipe="t", recipe_runs=recipe, jobs=1)
    assert recall(recipe[0], tmp_path, "t").role == "baseline" and not list(tmp_path.rglob("dependencies"))
    trained = []
    launch(recipe, tmp_path, recipe="t", jobs=1, show=trained.append)
    assert names(trained) == [("initialization of other", 0), ("other", 0)]
    assert [r.role for r in trained] == ["dependency", "technique"] and len(list(tmp_path.rglob("dependencies/*"))) == 1


# Processes that die


def children(parent: int) -> list[int]:
    """The processes of multiprocessing's fork server with this parent: the server, or the workers of a server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields, command = path.read_text().rpartition(")")[2].split(), (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"forkserver" in command:
            found.append(int(path.parent.name))
    return found


def workers(parent: int) -> list[int]:
    return [pid for server in children(parent) for pid in children(server)]


@needs_proc
@pytest.mark.slow
def test_run_of_a_killed_worker_is_resumed(tmp_path):
    entry = replace(ENTRY, run=SHORT.vary(steps=400))
    place, killed = folder(entry, tmp_path, "t"), []

    def kill():
        deadline = time.monotonic() + 120
        while not (place / ".lock").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for pid in workers(os.getpid()):
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    records = launch([entry], tmp_path, recipe="t", jobs=1)
    killer.join()
    assert killed and [r.status for r in records] == ["finished"]
    launch([entry], tmp_path / "whole", recipe="t", jobs=1)
    assert list(weights_in(tmp_path / "whole").values()) == list(weights_in(place).values())


def start(target: Callable, *arguments) -> multiprocessing.Process:
    """Call a function that launches runs in a fork of this process. Both use the same server of worker processes."""
    process_context("cpu")
    process = multiprocessing.get_context("fork").Process(target=forked, args=(target, *arguments))
    process.start()
    return process


def forked(target: Callable, *arguments):
    for owner in (forkserver, forkserver._forkserver):
        owner.ensure_running = lambda: None  # the server is no child of this process
    target(*arguments)


def interrupted(out: Path, runs: list[ArmRun]):
    """Launch the runs, and press Ctrl-C a moment after the first one has finished."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if the tests were started in the background
    try:
        launch(runs, out, recipe="t", jobs=2, show=lambda _: Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start())
    except KeyboardInterrupt:
        os._exit(130)


@pytest.fixture
def obeys_ctrl_c():
    """Let this process and those that it starts obey SIGINT. It is ignored if the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
def test_ctrl_c_while_a_process_is_started_is_not_lost(obeys_ctrl_c):
    with pytest.raises(KeyboardInterrupt), delay_sigint():
        blocked = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=True).stdout
        signal.raise_signal(signal.SIGINT)
    assert blocked.strip() == "True"
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"  # whether a process never gets it


@pytest.mark.slow
def test_ctrl_c_while_the_workers_start_leaves_no_process_behind(tmp_path, obeys_ctrl_c):
    command = [sys.executable, "-m", "smallvit", "run", "quickstart", "--smoke", "--out", str(tmp_path / "runs")]
    with open(tmp_path / "shown", "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    shown = (tmp_path / "shown").read_text
    while "starting" not in shown() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(120) == 130
    with suppress(ProcessLookupError):
        for _ in range(600):  # until the last process of the group has ended
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    assert "stopped; run the same command again" in shown() and "Traceback" not in shown()


@pytest.mark.slow
def test_ctrl_c_leaves_everything_resumable(tmp_path):
    steps = dict(zip(ARMS, (50, 500)))  # one arm finishes long before the other, on any machine
    runs = comparison(2, {name: run.vary(steps=steps[name]) for name, run in ARMS.items()})
    process = start(interrupted, tmp_path, runs)
    process.join(120)
    assert process.exitcode == 130
    finished = len(list(tmp_path.rglob(RECORD)))
    assert 1 <= finished < 4, f"{finished} runs had finished when Ctrl-C came"
    records = launch(runs, tmp_path, recipe="t", jobs=2)
    launch(runs, tmp_path / "whole", recipe="t", jobs=2)
    assert all(r.finished for r in records)
    assert list(weights_in(tmp_path / "t").values()) == list(weights_in(tmp_path / "whole" / "t").values())


def long_run(out: Path):
    launch([replace(ENTRY, run=SHORT.vary(steps=100_000))], out, recipe="t", jobs=1)


@needs_proc
def test_worker_ends_with_its_parent(tmp_path):
    process = start(long_run, tmp_path)
    while not list(tmp_path.rglob(".lock")) and process.is_alive():
        time.sleep(0.05)
    orphans = [Path(f"/proc/{pid}/cmdline") for pid in workers(os.getpid())]
    process.kill()
    process.join()
    deadline = time.monotonic() + 60
    while any(path.exists() and b"forkserver" in path.read_bytes() for path in orphans):
        assert time.monotonic() < deadline, "a worker went on without its parent"
        time.sleep(0.1)
    assert len(orphans) >= 1


def environment_of_a_server(found: Any):
    process_context("cpu")
    file = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/environ")  # pyright: ignore
    while not file.read_bytes():  # the server is about to begin
        time.sleep(0.01)
    found.put(file.read_bytes())


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("own", [None, "glibc.malloc.check=0"])
def test_server_of_the_workers_starts_with_large_pages_of_memory_unless_the_user_has_settings(own, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=environment_of_a_server, args=(found,))
    process.start()
    assert f"GLIBC_TUNABLES={own or HUGE_PAGES}".encode() in found.get(timeout=120).split(b"\0")
    process.join()


# Damaged files


def damage_record(place: Path):
    (place / RECORD).write_bytes((place / RECORD).read_bytes()[:100])


def damage_weights(place: Path):
    (place / WEIGHTS).write_bytes((place / WEIGHTS).read_bytes()[:-1] + b"?")


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage, file",
    [
        (damage_record, RECORD),
        (lambda place: (place / RECORD).write_text("[]"), RECORD),
        (damage_weights, WEIGHTS),
    ],
    ids=["cut record", "no record", "weights"],
)
def test_damaged_run_is_set_aside_and_trained_again(damage, file, tmp_path, capfd):
    runs = comparison(seeds=1)
    records, place, trained = launch(runs, tmp_path, recipe="t", jobs=1), folder(runs[0], tmp_path, "t"), []
    whole = (place / WEIGHTS).read_bytes()
    damage(place)
    with pytest.raises(Damaged, match=file):
        recall(runs[0], tmp_path, "t")
    damaged = (place / file).read_bytes()
    again = launch(runs, tmp_path, recipe="t", jobs=1, show=trained.append)
    lines = [line for line in capfd.readouterr().err.splitlines() if "damaged" in line]
    assert len(lines) == 1 and str(place / file) in lines[0]
    assert names(trained) == [("scratch", 0)] and [r.test for r in again] == [r.test for r in records]
    assert (place / f"{file}.damaged").read_bytes() == damaged and (place / f"{RECORD}.damaged").exists()
    assert (place / WEIGHTS).read_bytes() == whole


def test_record_of_another_format_is_an_error_and_stays(tmp_path):
    place = folder(ENTRY, tmp_path, "t")
    launch([ENTRY], tmp_path, recipe="t", jobs=1)
    plain = json.loads((place / RECORD).read_text())
    del plain["checksum"]  # with which it would be damaged
    for change in ({"format": 1}, {"option_of_the_future": 1}):
        (place / RECORD).write_text(text := json.dumps(plain | change))
        with pytest.raises(ValueError, match=r"record format 1|unknown fields"):
            launch([ENTRY], tmp_path, recipe="t", jobs=1)
        assert (place / RECORD).read_text() == text


# Names of folders


@pytest.mark.parametrize(
    "arm, name",
    [
        ("+SPT, k=2.5", "+SPT-k-2.5"),
        ("..", "arm"),
        ("../../etc", "etc"),
        ("/*?|", "arm"),
        ("ends with dots...", "ends-with-dots"),
        ("x" * 300, "x" * 100),
    ],
)
def test_folder_of_any_arm_is_safe_and_different_for_different_runs(arm, name, tmp_path):
    place = folder(replace(ENTRY, arm=arm), tmp_path, "t")
    assert place.parent == tmp_path / "t" / "50" / name
    assert place != folder(ArmRun(run=SHORT.vary(lr=0.5), arm=arm), tmp_path, "t")
    place.mkdir(parents=True)


# The scheduler, without processes


def scheduler(runs: list[ArmRun], out: Path, **options) -> Scheduler:
    return Scheduler(runs, out, "t", **options)


def finished(entry: ArmRun) -> Record:
    done = new_record(entry.run, tags(entry, "t"), status="finished")
    return replace(done, score="accuracy", test={"accuracy": 0.5}, val={"accuracy": 0.5})


def test_seeds_are_stacked_in_equal_groups_while_the_other_workers_still_have_runs(tmp_path):
    runs = comparison(seeds=6)
    schedule = scheduler(runs, tmp_path, stack=4)
    groups = [schedule.next_group(2) for _ in range(5)]
    assert [names([runs[i] for i in group]) for group in groups[:2]] == [
        [("scratch", seed) for seed in range(3)],
        [("+LSA", seed) for seed in range(3)],
    ]
    assert [len(group) for group in groups] == [3, 3, 3, 2, 1]
    assert sorted(i for group in groups for i in group) == list(range(12))
    assert schedule.next_group(2) == [] and not schedule.queue


def test_runs_with_other_numbers_of_labels_fill_up_a_stack(tmp_path):
    arms = {"scratch": SHORT, "+LSA": SHORT.vary(attention=LocalityAttention)}
    runs = ablate(arms, labels=[50, 100], seeds=range(3), references=False)

    def groups(stack: int) -> list[list[tuple[str, int | None]]]:
        schedule, found = scheduler(runs, tmp_path, stack=stack), []
        while group := schedule.next_group(1):
            found.append([(schedule.runs[i].arm, schedule.runs[i].labels) for i in group])
        return found

    cells = [[("scratch", 50)] * 3, [("+LSA", 50)] * 3, [("scratch", 100)] * 3, [("+LSA", 100)] * 3]
    assert groups(4) == cells, "seeds of one number of labels first"
    assert groups(6) == [cells[0] + cells[2], cells[1] + cells[3]]


def test_runs_that_cannot_be_stacked_are_divided_among_the_workers(tmp_path):
    dino = SHORT.vary(objective=DINO, unlabelled=True, augment=augment.digit_crops())
    arms = {"DINO": dino, "stops early": SHORT.vary(early_stop=2), "scratch": SHORT}
    schedule = scheduler(comparison(4, arms), tmp_path, stack=4)
    groups = [schedule.next_group(2) for _ in range(9)]
    assert [len(group) for group in groups] == [1, 1, 4, 1, 1, 1, 1, 1, 1]


def test_runs_that_can_be_stacked_wait_for_each_other_while_there_is_other_work(tmp_path):
    dino = SHORT.vary(objective=DINO, unlabelled=True, augment=augment.digit_crops())
    schedule = scheduler(comparison(4, {"fine-tuned": SHORT.vary(init=dino)}), tmp_path, stack=4)
    sizes = []
    while group := schedule.next_group(1):
        sizes.append(len(group))
        schedule.handle(group, [finished(schedule.runs[index]) for index in group])
    assert sizes == [1, 1, 1, 1, 4]
    schedule = scheduler(comparison(3, {"fine-tuned": SHORT.vary(init=dino)}), tmp_path / "busy", stack=4)
    first, second, third = (schedule.next_group(3) for _ in range(3))
    schedule.handle(first, [finished(schedule.runs[index]) for index in first])
    alone = schedule.next_group(3)  # nothing else is left for this worker
    assert [schedule.runs[index].arm for index in alone] == ["fine-tuned"] and len(second) == len(third) == 1


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_full_stacks_depend_neither_on_the_workers_nor_on_the_order_in_which_runs_end(workers, tmp_path):
    runs = comparison(3, {"scratch": SHORT, "+LSA": SHORT.vary(init=SHORT.vary(weight_decay=0.5))})
    schedule = scheduler(runs, tmp_path, stack=2, full_stacks=True)
    groups: list[list[int]] = []
    while schedule.queue:
        started = [group for _ in range(workers) if (group := schedule.next_group(workers))]
        groups += started
        for group in reversed(started):
            schedule.handle(group, [finished(schedule.runs[i]) for i in group])
    assert sorted(names([schedule.runs[i] for i in group]) for group in groups) == sorted(
        [(arm, seed) for seed in seeds] for arm in ("scratch", "+LSA", "initialization of +LSA") for seeds in ((0, 1), (2,))
    )


def test_runs_of_a_failed_stack_are_tried_alone_and_a_run_killed_twice_is_interrupted(tmp_path):
    runs = comparison(2, {"scratch": SHORT})
    schedule = scheduler(runs, tmp_path, stack=2)
    schedule.handle(schedule.next_group(1), Killed("killed"))
    assert schedule.next_group(1) == [0, 1], "a stack is continued from its checkpoint once"
    schedule.handle([0, 1], Killed("killed"))
    assert schedule.next_group(1) == [0] and schedule.next_group(1) == [1]
    schedule.handle([0], [finished(runs[0])])
    schedule.handle([1], Killed("Ray lost it"))
    first, second = schedule.requested_records
    assert first.finished and second.status == "interrupted" and "killed twice" in second.error
    assert second.error.endswith(": Ray lost it")
    assert not schedule.queue and not schedule.in_training


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("CUDA error: out of memory")])
def test_stack_that_needs_too_much_memory_is_halved_until_it_fits(error, tmp_path):
    runs = comparison(4, {"scratch": SHORT})
    schedule = scheduler(runs, tmp_path, stack=4)
    for _ in range(2):
        schedule.handle(schedule.next_group(1), error)
    assert schedule.next_group(1) == [0, 1] and schedule.next_group(1) == [2, 3]
    schedule.handle([2, 3], error)
    schedule.handle([0, 1], [finished(entry) for entry in runs[:2]])
    assert schedule.next_group(1) == [2] and schedule.next_group(1) == [3] and len(schedule.requested_records) == 2


def test_one_diverging_run_costs_the_others_of_its_stack_little(tmp_path):
    """Of 16 runs, the 7th diverges in every stack. The others are trained in stacks of 8, 4, 2 and 1."""
    runs = comparison(16, {"scratch": SHORT})
    schedule, trained = scheduler(runs, tmp_path, stack=16), []
    while group := schedule.next_group(1):
        trained.append(group)
        ended = [finished(runs[index]) for index in group]
        schedule.handle(group, FloatingPointError("the loss is nan") if 6 in group else ended)
    assert [len(group) for group in trained if 6 in group] == [16, 8, 4, 2, 1]
    assert sorted(len(group) for group in trained if 6 not in group) == [1, 2, 4, 8]
    assert [r.status for r in schedule.requested_records] == ["finished"] * 6 + ["failed"] + ["finished"] * 9


def test_fail_fast_starts_nothing_after_the_first_failure(tmp_path):
    schedule = scheduler(comparison(5, {"scratch": SHORT}), tmp_path, stack=2, fail_fast=True)
    first, second = schedule.next_group(2), schedule.next_group(2)
    schedule.handle(second, RuntimeError("the stack failed"))
    assert schedule.queue == [2, 3, 4]
    schedule.handle(first[:1], RuntimeError("failed"))
    schedule.handle(schedule.next_group(2), Killed("killed"))
    assert schedule.queue == [] and [r.status for r in schedule.requested_records] == ["failed"]


def test_fail_fast_records_a_second_failure_of_a_run_in_training(tmp_path):
    schedule = scheduler(comparison(3, {"scratch": SHORT}), tmp_path, fail_fast=True)
    for group, error in [(schedule.next_group(3), error) for error in (RuntimeError("first"), Killed(), RuntimeError("third"))]:
        schedule.handle(group, error)
    assert [r.error for r in schedule.requested_records] == ["RuntimeError: first", "RuntimeError: third"]


def test_run_whose_dependency_another_process_trains_is_left_out(tmp_path):
    runs = comparison(3, {"tuned": SHORT.vary(init=SHORT.vary(lr=0.5))})
    schedule = scheduler(runs, tmp_path, stack=3)
    group = schedule.next_group(1)
    assert [schedule.runs[i].run.lr for i in group] == [0.5] * 3
    schedule.handle(group, [finished(schedule.runs[group[0]]), None, finished(schedule.runs[group[2]])])
    assert schedule.next_group(1) == [0, 2]
    schedule.handle([0, 2], [finished(runs[0]), finished(runs[2])])
    assert schedule.next_group(1) == [] and len(schedule.requested_records) == 2


def test_script_that_launches_without_a_guard_ends_with_what_to_do(tmp_path):
    lines = ("from test_launch import comparison, launch", f"launch(comparison(1), {str(tmp_path)!r}, recipe='t', jobs=1)")
    script = tmp_path / "unguarded.py"
    script.write_text("\n".join(lines))
    path = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run([sys.executable, script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == 1 and 'below the line: if __name__ == "__main__":' in ended.stderr.splitlines()[-1]
    assert not [*tmp_path.rglob(RECORD)], "no run is said to have been interrupted"


def test_dependencies_come_right_before_the_run_that_needs_them():
    dependencies = [{}, {"init": 5}, {"init": 6, "teacher": 1}, {}, {"init": 5}, {}, {}]
    assert dependencies_first(range(7), dependencies) == [0, 5, 1, 6, 2, 3, 4]
    assert dependencies_first([0, 2, 3], dependencies) == [0, 2, 3], "a finished dependency is not trained again"


# What is refused before anything is trained


@pytest.mark.parametrize(
    "options, words",
    [
        ({"stack": 0}, "stack is 0; expected"),
        ({"device": "cdua"}, "device is 'cdua'; expected"),
        ({"device": "cuda"}, "no such GPU"),
        ({"runs": [SHORT]}, "contains Run; expected ArmRun"),
    ],
)
def test_invalid_options_are_refused(options, words, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=words) as refused:
        launch(**{"runs": [ENTRY], "out": tmp_path, "recipe": "t"} | options)
    assert "driver" not in str(refused.value) and not list(tmp_path.iterdir())


def test_unreadable_data_are_refused_once(tmp_path):
    (tmp_path / "broken.npz").write_bytes(b"PK")
    data = partial(arrays, path=str(tmp_path / "broken.npz"))
    with pytest.raises(ValueError, match=r"broken\.npz"):
        launch(comparison(2, {"a": SHORT.vary(data=data)}), tmp_path / "runs", recipe="t", jobs=2)
    assert not list(tmp_path.rglob(RECORD))


def test_data_that_changed_since_a_run_finished_are_refused(tmp_path):
    file, images = tmp_path / "images.npz", np.random.default_rng(0).integers(0, 255, (80, 8, 8), dtype=np.uint8)
    labels = np.arange(80) % 2

    def write(labels: np.ndarray):
        np.savez(file, train_images=images[:60], train_labels=labels[:60], test_images=images[60:], test_labels=labels[60:])
        arrays.cache_clear()

    run = SHORT.vary(data=partial(arrays, path=str(file)), labels=None, steps=1)
    runs = ablate({"a": run}, seeds=range(2), references=False)
    write(labels)
    launch(runs[:1], tmp_path, recipe="t", jobs=1)
    write(1 - labels)
    for some in (runs, runs[:1]):  # also if nothing is left to train
        with pytest.raises(ValueError, match=r"1 run has finished on other images or labels than arrays\("):
            launch(some, tmp_path, recipe="t", jobs=1)
    write(labels)
    assert [r.status for r in launch(runs, tmp_path, recipe="t", jobs=1)] == ["finished"] * 2
    file.unlink()
    arrays.cache_clear()
    assert [r.status for r in launch(runs, tmp_path, recipe="t", jobs=1)] == ["finished"] * 2, "they do not need their data"


def test_data_whose_classes_have_unprintable_names_have_not_changed(tmp_path):
    """In a record, which is printed, such characters are replaced by their code."""
    for name in ("abc\u200f", "b"):
        (tmp_path / "pool" / name).mkdir(parents=True)
        for index in range(8):
            Image.fromarray(np.full((8, 8), 20 * index + len(name), np.uint8)).save(tmp_path / "pool" / name / f"{index}.png")
    run = SHORT.vary(data=partial(image_folder, path=str(tmp_path / "pool"), test=0.5), labels=None, val=2, steps=1)
    runs = ablate({"a": run, "b": run.vary(init=run)}, seeds=range(1), references=False)
    for _ in range(2):
        assert [r.status for r in launch(runs, tmp_path / "runs", recipe="t", jobs=1)] == ["finished"] * 2
    assert not fit(run, tmp_path / "alone").has_other_data(*run.data().content)
    assert read_record(tmp_path / "alone").preprocess["classes"] == ["abc\\u200f", "b"]


def test_files_of_ones_own_that_a_recipe_imports_are_named_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "own_parts_of_a_lab.py").write_text("STEPS = 1\n")
    monkeypatch.syspath_prepend(tmp_path / "lab")
    path = tmp_path / "imports.py"
    path.write_text(f"import numpy\nimport torch\nfrom own_parts_of_a_lab import STEPS\n{OWN}")
    for _ in range(2):
        launch([], tmp_path, recipe="imports", source=path, jobs=1)
    notes = [line for line in capsys.readouterr().err.splitlines() if "does not notice a change" in line]
    assert len(notes) == 1 and str(tmp_path / "lab" / "own_parts_of_a_lab.py") in notes[0]


def test_loader_that_draws_other_images_each_time_is_refused_after_the_first_run(tmp_path):
    text = '''
import os
import torch
from dataclasses import replace
from smallvit import Run, ablate, digits
def noisy():
    data, generator = digits(), torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "big"))
    noise = torch.randint(0, 2, data.train.images.shape, generator=generator, dtype=torch.uint8)
    return replace(data, train=replace(data.train, images=data.train.images | noise))
RUNS = ablate({"a": Run(data=noisy, steps=1, batch=8)}, labels=[20], seeds=range(3), references=False)
'''
    (tmp_path / "noisy.py").write_text(text)
    runs = load_recipe(tmp_path / "noisy.py").RUNS
    with pytest.raises(ValueError, match="noisy contained other images or labels in a worker process than here"):
        launch(runs, tmp_path, recipe="noisy", source=tmp_path / "noisy.py", jobs=1)
    assert len(list(tmp_path.rglob(RECORD))) == 1


def test_folder_of_another_run_is_refused(tmp_path):
    other = ArmRun(run=SHORT.vary(lr=2e-3), arm="scratch")
    launch([ENTRY], tmp_path, recipe="t", jobs=1)
    folder(ENTRY, tmp_path, "t").rename(folder(other, tmp_path, "t"))
    with pytest.raises(ValueError, match="holds another run"):
        launch([other], tmp_path, recipe="t", jobs=1)


def test_run_that_another_process_trains_is_left_to_it(tmp_path, capfd):
    place = folder(ENTRY, tmp_path, "t")
    place.mkdir(parents=True)
    with FileLock(place / ".lock"):
        assert launch([ENTRY], tmp_path, recipe="t", jobs=1) == []
    assert "is being trained by another process" in capfd.readouterr().err and not (place / RECORD).exists()
    assert launch([ENTRY], tmp_path, recipe="t", jobs=1)[0].finished


def test_finished_record_is_never_replaced_by_a_failure_and_takes_the_current_names(tmp_path):
    launch([ENTRY], tmp_path, recipe="t", jobs=1)
    path = folder(ENTRY, tmp_path, "t") / RECORD
    before = path.read_bytes()
    assert record_failure(ENTRY, tmp_path, "t", OSError("late")).finished and path.read_bytes() == before
    assert recall(replace(ENTRY, role="baseline"), tmp_path, "t").role == "baseline"
    assert recall(replace(ENTRY, run=SHORT.vary(lr=0.5)), tmp_path, "t") is None


# Progress


def test_bar_shows_the_start_at_once_and_the_time_left_with_the_first_steps(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    entry = ArmRun(run=SHORT.vary(steps=100), arm="scratch")
    bar = progress.Bar([entry], [None], [0])
    bar.bar._time = lambda: clock[0]
    assert "starting the workers" in capsys.readouterr().err
    clock[0] += 10
    bar.show_progress([([0], -1)])
    assert "starting the workers" in capsys.readouterr().err
    bar.show_progress([([0], 0.0)])
    clock[0] += 1
    bar.show_progress([([0], 10.0)])
    assert "[00:01 < ?]" in capsys.readouterr().err
    clock[0] += 2
    bar.show_progress([([0], 30.0)])  # 2 s for 20 of 100 steps, not counting the 10 s of the start
    assert "[00:03 < 00:07]" in capsys.readouterr().err
    bar.run_ended(entry, finished(entry))
    bar.close()
    assert "scratch 50.0" in bar.headline()


def test_log_file_gets_a_line_from_within_a_stack(monkeypatch, capsys):
    clock = [1000.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    runs = [ArmRun(run=SHORT.vary(steps=100, seed=seed), arm=arm) for arm in ("scratch", "+LSA") for seed in range(8)]
    bar, groups = progress.Bar(runs, [None] * 16, range(16)), [range(8), range(8, 16)]
    clock[0] += 31
    bar.show_progress([*zip(groups, [-1, -1])])
    assert capsys.readouterr().err == "0 of 16 runs have finished; starting the workers\n"
    bar.show_progress([*zip(groups, [0.0, 0.0])])
    clock[0] += 20
    bar.show_progress([*zip(groups, [160.0, 40.0])])
    assert capsys.readouterr().err == ""
    clock[0] += 20
    bar.show_progress([*zip(groups, [320.0, 80.0])])  # 20 s for 200 of 1,600 steps
    line = "training scratch (40% of the steps), +LSA (10% of the steps); about 2 min left\n"
    assert capsys.readouterr().err == f"0 of 16 runs have finished; {line}"
    clock[0] += 1
    bar.show_progress([*zip(groups, [320.0, 80.0])])
    assert capsys.readouterr().err == ""
    for entry in runs[:8]:
        bar.run_ended(entry, finished(entry))
    clock[0] += 9
    bar.show_progress([*zip(groups[1:], [200.0])])  # one line for a whole stack; 30 s for 800 of 1,600 steps
    line = f"{runs[0].condition}, validation: scratch 50.0; training +LSA (25% of the steps); about 22 s left\n"
    assert capsys.readouterr().err == f"8 of 16 runs have finished, {line}"
    for entry in runs[8:]:
        bar.run_ended(entry, finished(entry))
    bar.show_progress()
    assert capsys.readouterr().err.endswith("validation: scratch 50.0  +LSA 50.0\n")
    bar.close()


def lines_of(bar: progress.Bar, capsys) -> str:
    bar.print_line()
    return capsys.readouterr().err


def test_no_time_left_is_shown_before_steps_were_timed(monkeypatch, capsys):
    """Runs that ended without a training, for lack of weights or because they failed, say nothing about the speed."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    arms = ("ViT-S", "six", "seven", "eight")
    runs = [ArmRun(run=SHORT.vary(steps=300, seed=seed), arm=arm) for seed in range(2) for arm in arms]
    bar = progress.Bar(runs, [None] * 8, range(8))
    bar.run_ended(runs[0], replace(finished(runs[0]), status="unavailable", error="no file"))
    bar.run_ended(runs[3], replace(finished(runs[3]), status="failed", error="boom"))
    clock[0] += 1
    bar.show_progress([([1], 0.0), ([2], 0.0)])
    clock[0] += 1
    bar.show_progress([([1], 1.0), ([2], 1.0)])
    assert lines_of(bar, capsys).endswith("training six (0% of the steps), seven (0% of the steps)\n")
    clock[0] += 4
    bar.show_progress([([1], 21.0), ([2], 21.0)])  # 10 steps a second, for 5 runs of 300 steps
    assert lines_of(bar, capsys).endswith("; about 2 min left\n") and bar.seconds_left() == pytest.approx(145.8)


def test_steps_before_an_interruption_are_not_timed(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    runs = [ArmRun(run=SHORT.vary(steps=1_000, seed=seed), arm="scratch") for seed in range(3)]
    bar = progress.Bar(runs, [None] * 3, range(3))
    for seconds, steps in ((0, [0.0, 0.0]), (1, [900.0, 0.0]), (10, [910.0, 0.0]), (10, [920.0, 700.0]), (10, [930.0, 710.0])):
        clock[0] += seconds
        bar.show_progress([([0], steps[0]), ([1], steps[1])])
    # 40 steps in 30 s, and 70 + 290 + 1,000 steps are left
    assert bar.seconds_left() == pytest.approx(1360 * 30 / 40)
    bar.run_ended(runs[0], replace(finished(runs[0]), seconds=1_000.0))
    bar.show_progress([([1], 710.0)])
    assert bar.seconds_left() == pytest.approx(1290 * 30 / 110)
    bar.run_ended(runs[2], replace(finished(runs[2]), seconds=1_000.0))  # it had only to be scored
    assert bar.seconds_left() == pytest.approx(290 * 30 / 110)


def test_sleep_of_the_computer_does_not_change_the_time_left(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    bar = progress.Bar([ArmRun(run=SHORT.vary(steps=1_000), arm="scratch")], [None], [0])
    for seconds, steps in ((0, 0.0), (20, 100.0), (36_000, 101.0), (20, 201.0)):
        clock[0] += seconds
        bar.show_progress([([0], steps)])
    assert bar.seconds_left() == pytest.approx(799 * 20 / 101)


def test_time_left_follows_the_recent_speed(monkeypatch):
    """After 1,000 s, another program takes nine tenths of the processor."""
    clock = [0.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    bar, done = progress.Bar([ArmRun(run=SHORT.vary(steps=200_000), arm="scratch")], [None], [0]), 0.0
    for second in range(1, 2_001):
        clock[0], done = float(second), done + (100 if second < 1_000 else 10)
        bar.show_progress([([0], done)])
    assert bar.seconds_left() == pytest.approx((200_000 - done) / 10, rel=0.01)


def test_runs_without_weights_are_not_among_those_that_are_counted(monkeypatch, capsys):
    runs = [ArmRun(run=SHORT.vary(seed=seed), arm=arm) for seed in range(3) for arm in ("scratch", "ViT-S")]
    bar = progress.Bar(runs, [None] * 6, range(6))
    assert lines_of(bar, capsys).startswith("0 of 6 runs have finished")
    bar.run_ended(runs[1], replace(finished(runs[1]), status="unavailable", error="no file"))
    assert lines_of(bar, capsys).startswith("0 of 3 runs have finished, 3 left out (no weights)"), "the arm has 3 runs"
    for index in (0, 2, 3, 5):
        status = "finished" if index == 0 else "failed" if index == 2 else "unavailable"
        bar.run_ended(runs[index], replace(finished(runs[index]), status=status, error="boom"))
    bar.run_ended(runs[4], None)
    counts = "1 of 3 runs have finished, 1 failed, 1 trained by another process, 3 left out (no weights)"
    assert lines_of(bar, capsys).splitlines()[-1].startswith(counts)


def test_run_of_several_conditions_counts_in_each(capsys):
    run = SHORT.vary(steps=0)
    runs = [ArmRun(run=run, arm="pixels", length=length) for length in (10, 20)]
    bar = progress.Bar(runs, [None, None], [0])
    bar.run_ended(runs[0], finished(runs[0]))
    assert lines_of(bar, capsys).startswith("2 of 2 runs have finished")


def test_lines_of_a_long_training_are_few(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    bar = progress.Bar([ArmRun(run=SHORT.vary(steps=36_000), arm="scratch")], [None], [0])
    for second in range(36_000):
        clock[0] = float(second)
        bar.show_progress([([0], float(second))])
    assert 60 < len(capsys.readouterr().err.splitlines()) < 150


def test_last_line_of_the_users_code_is_found_in_a_traceback():
    package = Path(progress.__file__).parents[1]
    lines = [("/home/me/mine.py", "return f(x)"), ("/home/me/mine.py", "return x + 1"), (package / "vit.py", "raise")]
    lines.append(("/v/lib/python3.11/site-packages/torch/nn.py", "call()"))
    text = "".join(f'  File "{path}", line {n}, in forward\n    {code}\n    ^^^^\n' for n, (path, code) in enumerate(lines, 7))
    assert user_line(text) == "mine.py, line 8: return x + 1"
    assert user_line(f'  File "{package}/vit.py", line 8, in forward\n    return x\n') == ""


def test_runs_are_spread_over_the_workers_in_the_estimate():
    assert parallel([3, 3, 3], 2) == 6 and parallel([4, 1, 1, 1], 2) == 4 and parallel([], 2) == 0
