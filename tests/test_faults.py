"""Kills, full disks, lost folders, too few open files, wrong clocks, dead trackers: after each fault, the results are the same.

Each test trains the recipe below, lets something go wrong, and trains it again with the same command. The records and the
weights must then be those of a training in which nothing went wrong.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest

from smallvit import ArmRun, Block, fit, load_recipe, trackers
from smallvit.commands.report import runs_to_send
from smallvit.launch import launch
from smallvit.launch.local import process_context
from smallvit.launch.results import folder, is_interruption, tags
from smallvit.launch.status import RecipeState
from smallvit.record import CHECKPOINT, RECORD, WEIGHTS, Record, read_record
from smallvit.storage import HOST
from smallvit.train import checkpoint, fit_stacked, loop
from smallvit.train.loop import Training
from smallvit.train.publish import publish

ROOT = Path(__file__).parents[1]
RECIPE = '''
"""Which of two settings is best?"""
from functools import partial
from smallvit import PatchEmbed, Run, ViT, ablate, augment
from smallvit.train import loop

loop.CHECKPOINT_SECONDS = 0.05  # so that short runs are interrupted between two checkpoints
short = Run(model=partial(ViT, tokenizer=partial(PatchEmbed, patch=2), dim=16, depth=2, heads=2), labels=50, val=20, steps=24,
            batch=8, augment=augment.digits())
arms = {"scratch": short, "tuned": short.vary(init=short.vary(lr=5e-4), lr=2e-3)}
RUNS = ablate(arms, labels=[50], seeds=range(3), references=False)
'''
KILLS = int(os.environ.get("SMALLVIT_KILLS", "300"))  # of each long test
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The file of the recipe."""
    path = tmp_path_factory.mktemp("recipe") / "mine.py"
    path.write_text(RECIPE)
    yield path
    sys.modules.pop("recipes.mine", None)


@pytest.fixture(scope="module")
def runs(source) -> list[ArmRun]:
    """The runs of the recipe: two arms with three seeds. Three more runs are the initializations of the second arm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", loop.CHECKPOINT_SECONDS)  # which the recipe changes
        yield load_recipe(source).RUNS


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory) -> dict[str, tuple]:
    """The results of a launch in which nothing goes wrong."""
    out = tmp_path_factory.mktemp("whole")
    launch(runs, out, recipe="mine", jobs=2)
    found = results(out)
    assert len(found) == 9
    return found


def results(out: Path) -> dict[str, tuple]:
    """For each run below a folder, by its path: its weights, and its record without times and without the number of settings of
    its arm that were scored, which counts those in the whole folder.
    """
    found = {}
    for path in sorted(out.rglob(RECORD)):
        record = read_record(path.parent)
        earlier = record.pretraining and {**record.pretraining, "seconds": 0, "runs": sorted(record.pretraining["runs"])}
        plain = replace(record, seconds=0, pretraining=earlier, test_settings=None)
        weights = path.with_name(WEIGHTS)
        found[str(path.relative_to(out))] = plain, weights.read_bytes() if weights.exists() else None
    return found


def train(entry: ArmRun, out: Path, **options) -> Record:
    """Train one run in this process, in its folder below `out`."""
    return fit(entry.run, folder(entry, out, "mine"), tags=tags(entry, "mine"), **options)


def only(entry: ArmRun, found: dict[str, tuple]) -> dict[str, tuple]:
    """Of all results, those of one run."""
    return {key: result for key, result in found.items() if result[0].arm == entry.arm and result[0].seed == entry.seed}


def left_over(out: Path) -> list[Path]:
    """Files that no run needs after its end."""
    return [path for path in out.rglob("*") if path.name == CHECKPOINT or path.name.endswith((".new", ".claim", ".damaged"))]


class Stopped(BaseException):
    """As if the process were killed here."""


def ended(call: Callable[[], object]) -> BaseException | None:
    """The error that ended a call, which must be no fault of the run; None if there was none."""
    try:
        call()
    except (Exception, Stopped) as error:
        assert isinstance(error, Stopped) or is_interruption(error), f"{type(error).__name__}: {error}"
        return error
    return None


# Folders


def vanish(place: Path):
    shutil.rmtree(place)


def move_away(place: Path):
    place.rename(place.with_name("elsewhere"))


def become_a_file(place: Path):
    shutil.rmtree(place)
    place.write_text("a file in place of the folder")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["a step", "its record"])
@pytest.mark.parametrize("fault", [vanish, move_away, become_a_file])
def test_run_whose_folder_is_lost_ends_equal_or_is_tried_again(fault, moment, runs, whole, tmp_path, monkeypatch):
    entry = runs[0]
    place = folder(entry, tmp_path, "mine")

    def lose(step: int, accuracy: float | None):
        if step == 12:
            fault(place)

    def lose_and_publish(*arguments):
        fault(place)
        return publish(*arguments)

    with monkeypatch.context() as patch:
        if moment == "its record":
            patch.setattr(sys.modules["smallvit.train.fit"], "publish", lose_and_publish)
            ended(lambda: train(entry, tmp_path))
        else:
            patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
            ended(lambda: train(entry, tmp_path, watch=lose))
    if place.is_file():
        place.unlink()
    shutil.rmtree(place.with_name("elsewhere"), ignore_errors=True)
    train(entry, tmp_path)
    assert results(tmp_path) == only(entry, whole)


@pytest.mark.slow
def test_folder_that_was_moved_to_another_path_is_continued_there(runs, whole, tmp_path, monkeypatch):
    """Its checkpoint is resumed, its finished runs are not trained again, and no record holds the old path."""
    launch(runs[:1], tmp_path / "old", recipe="mine", jobs=1)
    entry, steps, train_step = runs[2], [], Training.train_step
    assert [runs[0].arm, entry.arm] == ["scratch"] * 2

    def stop(step: int, accuracy: float | None):
        if step == 12:
            raise Stopped

    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    assert isinstance(ended(lambda: train(entry, tmp_path / "old", watch=stop)), Stopped)
    (tmp_path / "old").rename(tmp_path / "new")
    monkeypatch.setattr(Training, "train_step", lambda self: (steps.append(self.step), train_step(self)))
    train(entry, tmp_path / "new")
    assert 10 <= steps[0] <= 12, "it was not resumed"
    shown: list[Record] = []
    launch(runs, tmp_path / "new", recipe="mine", jobs=2, show=shown.append)
    assert len(shown) == 7 and results(tmp_path / "new") == whole and not (tmp_path / "old").exists()
    assert all(str(tmp_path) not in path.read_text() for path in (tmp_path / "new").rglob(RECORD))


@contextmanager
def disk(place: Path, size: str):
    """Mount a file system of this size. Skips the test where that is not permitted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.slow
def test_disk_that_becomes_full_interrupts_runs_which_the_same_command_trains_when_there_is_room(runs, whole, tmp_path, capfd):
    out = tmp_path / "disk"
    with disk(out, "260k"):
        first = launch(runs, out, recipe="mine", jobs=2)
        stopped = [record for record in first if record.status == "interrupted"]
        assert stopped and {record.status for record in first} <= {"finished", "interrupted"}
        assert all("make room and start again" in record.error for record in stopped)
        kept = {path: path.read_bytes() for path in out.rglob(WEIGHTS)}
        subprocess.run(["mount", "-o", "remount,size=10m", out], check=True)
        launch(runs, out, recipe="mine", jobs=2)
        assert results(out) == whole and not left_over(out)
        assert kept and all(path.read_bytes() == content for path, content in kept.items())


@pytest.mark.slow
def test_read_only_folder_is_no_fault_of_the_runs_and_its_results_can_be_read(runs, whole, tmp_path, capfd):
    out = tmp_path / "disk"
    with disk(out, "10m"):
        launch(runs[:1], out, recipe="mine", jobs=1)
        subprocess.run(["mount", "-o", "remount,ro", out], check=True)
        first = launch(runs[:2], out, recipe="mine", jobs=2)
        assert [record.status for record in first] == ["finished", "interrupted"] and "Read-only" in first[1].error
        subprocess.run(["mount", "-o", "remount,rw", out], check=True)
        launch(runs, out, recipe="mine", jobs=2)
        assert results(out) == whole


# Limits of the system


@pytest.mark.slow
def test_run_that_gets_too_few_open_files_ends_equal_or_is_tried_again(runs, whole, tmp_path):
    """One more file may be opened in each try, so that another file of the run is the first that cannot be opened."""
    entry, limits = runs[0], resource.getrlimit(resource.RLIMIT_NOFILE)
    errors: list[BaseException | None] = []
    opened: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
        with suppress(OSError):
            while True:
                opened.append(os.dup(0))
        for _ in range(8):
            errors.append(ended(lambda: train(entry, tmp_path)))
            os.close(opened.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for number in opened:
            os.close(number)
    assert errors[0] is not None and errors[-1] is None
    assert results(tmp_path) == only(entry, whole) and not left_over(tmp_path)


@pytest.mark.slow
def test_run_without_memory_and_run_with_an_infinite_loss_are_recorded_and_the_rest_go_on(runs, whole, tmp_path, capfd):
    short = runs[0].run
    large = ArmRun(run=short.vary(dim=2**21), arm="large")
    settings = {"lr": 10.0, "clip": 0.0, "weight_decay": 10.0, "block": partial(Block, layer_scale=1e30)}
    broken = ArmRun(run=short.vary(**settings), arm="diverges")
    found = launch([large, broken, *runs], tmp_path, recipe="mine", jobs=2)
    assert [record.status for record in found] == ["interrupted", "failed"] + ["finished"] * 6
    assert "memory" in found[0].error and "loss is" in found[1].error
    assert {key: result for key, result in results(tmp_path).items() if key in whole} == whole


# Files of killed processes


@pytest.mark.slow
def test_temporary_files_of_an_earlier_process_with_the_same_number_are_removed(runs, whole, tmp_path):
    """Numbers begin again when a machine or a container starts. Files of another living process stay."""
    place = folder(runs[0], tmp_path, "mine")
    place.mkdir(parents=True)
    mine, other = (place / f".checkpoint.pt.{HOST}.{pid}.0123abcd.new" for pid in (os.getpid(), os.getppid()))
    for path in (mine, other):
        path.write_bytes(b"half of it")
    train(runs[0], tmp_path)
    assert left_over(tmp_path) == [other] and results(tmp_path) == only(runs[0], whole)


# Clocks


@pytest.mark.slow
@pytest.mark.parametrize("jump", [-10.0**9, 10.0**9], ids=["back", "forward"])
def test_clock_that_jumps_changes_no_result(jump, runs, whole, tmp_path, monkeypatch):
    """The clock jumps by 31 years when a run is half-way, and the files that it leaves have times of the other age."""
    entry, now = runs[0], time.time
    place = folder(entry, tmp_path, "mine")

    def jump_and_stop(step: int, accuracy: float | None):
        if step == 6:
            monkeypatch.setattr(time, "time", lambda: now() + jump)
        if step == 12:
            raise Stopped

    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    ended(lambda: train(entry, tmp_path, watch=jump_and_stop))
    os.utime(place / CHECKPOINT, (now() - jump, now() - jump))
    state = RecipeState(runs, runs, tmp_path, "mine")
    state.update()
    launch(runs, tmp_path, recipe="mine", jobs=2)
    state.update()
    assert state.ended and results(tmp_path) == whole
    assert all(read_record(path.parent).seconds >= 0 for path in tmp_path.rglob(RECORD))


# Trackers and the network


WRITER = """
import socket, time
class Writer:
    def __init__(self, folder):
        open("{place}/begun", "a").close()
        {begin}
    def add_scalar(self, *values, **more): time.sleep(0.01)
    def flush(self): pass
    def close(self): pass
"""
BLOCKED = """
import socket, sys
plain = socket.socket.__init__
def guarded(self, family=-1, *more, **options):
    if family != socket.AF_UNIX:
        open("{place}/sockets", "a").write(" ".join(sys.argv) + "\\n")
        raise OSError("no network in this test")
    plain(self, family, *more, **options)
socket.socket.__init__ = guarded
"""


def tracker_in(place: Path, begin: str = "pass") -> str:
    """Write a package `tensorboard` whose writer does `begin` first. Return the folder for the search path of Python."""
    (place / "tensorboard").mkdir(parents=True)
    (place / "tensorboard" / "__init__.py").write_text("")
    (place / "tensorboard" / "summary.py").write_text(WRITER.format(place=place, begin=begin))
    return os.pathsep.join([str(place), str(ROOT)])


@pytest.mark.slow
def test_tracker_killed_half_way_changes_no_record(runs, whole, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", tracker_in(tmp_path / "path"))
    monkeypatch.setattr(trackers, "check_tracker", lambda name: None)
    out, ends = tmp_path / "out", []
    tracker = trackers.TrackerProcess("tensorboard", out / "mine", "mine", runs_to_send(runs, out, "mine"))

    def kill_half_way(record: Record):
        ends.append(record)
        if len(ends) == 4:
            tracker.process.kill()

    launch(runs, out, recipe="mine", jobs=2, show=kill_half_way)
    tracker.close()
    assert tracker.process.returncode == -signal.SIGKILL
    assert "the records are complete: send them with smallvit report --log" in capfd.readouterr().err
    assert results(out) == whole


@pytest.mark.slow
def test_without_a_network_the_records_are_the_same_and_only_the_tracker_asks_for_one(whole, source, tmp_path):
    place = tmp_path / "path"
    path = tracker_in(place, begin="socket.create_connection(('127.0.0.1', 9))")
    (place / "sitecustomize.py").write_text(BLOCKED.format(place=place))
    words = ["run", str(source), "--jobs", "2", "--out", "runs", "--log", "tensorboard"]
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": path}, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-m", "smallvit", *words], **options)
    assert done.returncode == 0, done.stderr
    assert "tensorboard failed, training goes on without it (OSError" in done.stderr
    asked = (place / "sockets").read_text().splitlines()
    assert asked and all("trackers" in line for line in asked), asked
    assert results(tmp_path / "runs") == whole


# Kills


def children(parent: int) -> list[int]:
    """The processes with this parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def launch_here(runs: list[ArmRun], out: Path, source: Path, stack: int, shown: Path):
    """Launch the recipe in a process that is a fork of this one. Its workers are forks of a server that has started before."""
    for owner in (forkserver, forkserver._forkserver):
        owner.ensure_running = lambda: None  # the server is no child of this process
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(shown, "a", buffering=1) as file:
        os.dup2(file.fileno(), 2)
        launch(
            runs, out, recipe="mine", source=source, jobs=2, stack=stack, validation_only=stack > 1,
            show=lambda record: print("ended:", record.arm, record.seed, record.status, file=file),
        )  # fmt: skip


def start(*arguments) -> multiprocessing.Process:
    process_context("cpu")
    process = multiprocessing.get_context("fork").Process(target=launch_here, args=arguments)
    process.start()
    return process


@pytest.mark.slow
@needs_proc
def test_two_launchers_at_once_train_each_run_once(runs, whole, source, tmp_path):
    out = tmp_path / "out"
    both = [start(runs, out, source, 1, tmp_path / f"{name}.txt") for name in ("first", "second")]
    for process in both:
        process.join()
    launch(runs, out, recipe="mine", jobs=2)
    assert [process.exitcode for process in both] == [0, 0] and results(out) == whole and not left_over(out)
    reads = (out / "mine" / "test_reads.jsonl").read_text().splitlines()
    assert len({json.loads(line)["fingerprint"] for line in reads}) == len(reads) == 9


VICTIMS = ("worker", "launcher", "launcher and workers")


def finished_in(out: Path) -> dict[Path, bytes]:
    """The records of the runs that have finished."""
    found = {path: path.read_bytes() for path in out.rglob(RECORD)}
    return {path: content for path, content in found.items() if b'"status": "finished"' in content}


@pytest.mark.long
@needs_proc
def test_launchers_and_workers_killed_at_random_moments_lose_nothing(runs, source, tmp_path, capsys):
    """Recipes are trained one after another, single runs and stacks in turn, until there were enough kills."""
    dice, kills, lost, changed, recipes = random.Random(1), Counter(), 0, 0, 0
    expected = {}
    for stack in (1, 3):
        launch(runs, tmp_path / f"whole{stack}", recipe="mine", source=source, jobs=2, stack=stack, validation_only=stack > 1)
        expected[stack] = results(tmp_path / f"whole{stack}")
    server, began = forkserver._forkserver._forkserver_pid, time.monotonic()
    while sum(kills.values()) < KILLS:
        stack, out, before = (1, 3)[recipes % 2], tmp_path / f"out{recipes}", {}
        while len(before) < len(expected[stack]):
            process, victims = start(runs, out, source, stack, tmp_path / "shown.txt"), VICTIMS
            while process.is_alive():
                process.join(dice.uniform(0.02, 2.0))
                if process.is_alive():
                    victim = dice.choice(victims)
                    kills.update(kill(victim, process, server, dice))
                    if stack > 1 and victim == "worker":  # its runs are trained alone if this happens twice in one launch
                        victims = VICTIMS[1:]
            process.join()
            after = finished_in(out)
            lost += len(before.keys() - after.keys())
            changed += sum(after.get(path) != content for path, content in before.items())
            before = after
        found = results(out)
        assert found == expected[stack], [key for key in expected[stack] if found.get(key) != expected[stack][key]]
        launch(runs, out, recipe="mine", source=source, jobs=2, stack=stack, validation_only=stack > 1)
        assert not left_over(out), left_over(out)
        shutil.rmtree(out)
        recipes += 1
    figures = {"kills": dict(kills), "recipes": recipes, "records": 9 * recipes, "lost": lost, "changed": changed}
    with capsys.disabled():
        print(f"\n{json.dumps(figures | {'minutes': round((time.monotonic() - began) / 60, 1)}, indent=1)}")
    assert (lost, changed) == (0, 0)


def kill(victim: str, launcher: multiprocessing.Process, server: int, dice: random.Random) -> list[str]:
    """Kill processes at once; returns what was killed, once for each process or pair of processes."""
    workers = children(server)
    killed = [launcher.pid] if "launcher" in victim else []
    killed += [dice.choice(workers)] if victim == "worker" and workers else workers if "workers" in victim else []
    for pid in killed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [victim] if killed else []


FILE_CALLS = [(os, name) for name in ("replace", "link", "fsync", "unlink", "open", "rename")] + [(checkpoint, "content_hash")]


def killed_in_file_call(number: int, after: bool, train: Callable[[], object], steps: int):
    """Train, and end this process with SIGKILL before or after the call of this number with which it changes or writes files.
    Each training step writes a byte to the file descriptor `steps`.
    """
    count_step, seen = Training.count_step, [0]

    def counted(self, *arguments):
        os.write(steps, b".")
        return count_step(self, *arguments)

    def fatal(function: Callable, *arguments, **options):
        seen[0] += 1
        mine = seen[0] == number
        if mine and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **options)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Training.count_step = counted
    for module, name in FILE_CALLS:
        setattr(module, name, partial(fatal, getattr(module, name)))
    train()


def kills_in_file_calls(runs: list[ArmRun], stack: int, place: Path, seed: int) -> tuple[int, int, int]:
    """Train one run with its initialization, or a stack of runs, in processes that are killed in calls that write files, until
    the training ends. Return the number of kills, of steps taken, and of steps that were necessary.
    """
    dice, kills = random.Random(seed), 0
    tuned, members = runs[-1].run, [entry.run for entry in runs[:stack]]
    train = partial(fit_stacked, members, [place / str(k) for k in range(stack)]) if stack > 1 else partial(fit, tuned, place)
    counter = os.open(place.with_name(f"{place.name}.steps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        arguments = dice.randint(1, 60), dice.random() < 0.5, train, counter
        process = multiprocessing.get_context("fork").Process(target=killed_in_file_call, args=arguments)
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, f"a training ended with status {process.exitcode}"
        kills += 1
    os.close(counter)
    return kills, os.path.getsize(place.with_name(f"{place.name}.steps")), 24 * (stack if stack > 1 else 2)


def check_kills_in_file_calls(runs: list[ArmRun], tmp_path: Path, least: int) -> Counter:
    """Kill at least so many processes. The results must be those of trainings that were not killed. Returns the counts."""
    counts, whole = Counter(), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", 0.05)
        for stack in (1, 3):
            while stack not in whole or counts[f"kills, stack of {stack}"] < least // 2:
                place = tmp_path / f"{stack}-{counts['trainings']}"
                if stack not in whole:
                    members = [entry.run for entry in runs[:stack]]
                    fit_stacked(members, [place / str(k) for k in range(stack)]) if stack > 1 else fit(runs[-1].run, place)
                    whole[stack] = results(place)
                else:
                    kills, taken, needed = kills_in_file_calls(runs, stack, place, counts["trainings"])
                    assert results(place) == whole[stack] and not left_over(place), left_over(place)
                    counts.update({f"kills, stack of {stack}": kills, "steps taken": taken, "steps needed": needed})
                    counts["records"] += len(whole[stack])
                counts["trainings"] += 1
    return counts


@pytest.mark.slow
def test_processes_killed_while_they_write_files_end_with_equal_results(runs, tmp_path):
    assert check_kills_in_file_calls(runs, tmp_path, 4)["records"] >= 5


@pytest.mark.long
def test_hundreds_of_processes_killed_while_they_write_files_end_with_equal_results(runs, tmp_path, capsys):
    began = time.monotonic()
    counts = check_kills_in_file_calls(runs, tmp_path, KILLS)
    with capsys.disabled():
        print(f"\n{json.dumps(counts | {'minutes': round((time.monotonic() - began) / 60, 1)}, indent=1)}")
