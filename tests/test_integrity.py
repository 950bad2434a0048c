"""Nothing is lost or bent: two processes at one run, kills between two files, damaged files, full disks, and killed stacks."""

import errno
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from toys import TINY_VIT, slow_after, slow_but

from smallvit import ArmRun, Run, ablate, augment, fit, load, storage
from smallvit import record as records
from smallvit.launch import autotune, launch
from smallvit.launch.results import (
    Damaged,
    Interrupted,
    Killed,
    blocked_by,
    folder,
    is_interruption,
    recall,
    record_failure,
    tags,
)
from smallvit.launch.scheduler import Scheduler
from smallvit.launch.status import write_progress
from smallvit.launch.tune import open_journal
from smallvit.numerics import Numerics
from smallvit.record import CHECKPOINT, CURVE, RECORD, WEIGHTS, Record, checksum, parse, read_record, to_json, write_record
from smallvit.shapes import printable
from smallvit.storage import NotWritten, file_sha256, write_atomic, write_text
from smallvit.train import checkpoint, fit_stacked
from smallvit.train.fit import NO_TAGS, new_record, prepare_training
from smallvit.train.loop import Training
from smallvit.train.publish import publish
from smallvit.trials import read_trials, trials_file

fit_module = sys.modules["smallvit.train.fit"]
SHORT = Run(model=TINY_VIT, labels=50, val=20, steps=12, batch=8, augment=augment.digits())
ENTRY = ArmRun(run=SHORT, arm="scratch")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of a finished run. Tests must not change it."""
    place = tmp_path_factory.mktemp("trained")
    fit(SHORT, place)
    return place


@pytest.fixture
def finished(trained, tmp_path) -> Path:
    """A copy of the folder of the finished run."""
    for name in (RECORD, WEIGHTS):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    return tmp_path


def names_in(place: Path) -> list[str]:
    """The names of the files in a folder, without the lock."""
    return sorted(path.name for path in place.iterdir() if path.name != ".lock")


# The hash of a record


def test_changed_record_is_refused_and_one_without_a_hash_is_read(finished):
    record, text = read_record(finished), (finished / RECORD).read_text()
    plain = json.loads(text)
    assert plain["checksum"] == checksum(plain) and [*plain][-1] == "checksum"
    (finished / RECORD).write_text(text.replace('"steps": 12', '"steps": 13'))
    with pytest.raises(ValueError, match=rf"^{finished / RECORD} is damaged: its content has another hash"):
        read_record(finished)
    del plain["checksum"]
    (finished / RECORD).write_text(json.dumps(plain))  # as version 0.2.0 wrote it
    assert read_record(finished) == record
    (finished / RECORD).write_text(json.dumps({name: plain[name] for name in sorted(plain)} | {"checksum": checksum(plain)}, indent=3))
    assert read_record(finished) == record, "neither the order of the fields nor spaces count"


WRONG_SHAPES = {
    "test": {"accuracy": "0.5"}, "val": {"accuracy": None}, "curve": [[1, 0.5]], "confusion": [[1, 2], [3]], "labels": 0,
    "seed": -1, "reliability": [[3, 0.5, 1.5]], "preprocess": {"size": [8]}, "pretraining": {"runs": {"a": {"seconds": "1"}}},
    "tuning": {"curve": [[{"lr": 0.1}, 0.5]]}, "trace": {"losses": ["1"]}, "code": {"sha256": 3}, "versions": {"torch": 2},
    "run": {"model": "ViT"}, "init_weights": {"missing": 3}, "health": [{"spread": 1.0}], "looks": [8, 4], "picture": {"error": 3},
    "test_groups": [1, 2], "params": 10**400, "chosen_on_val": {"labels": -1}, "arm": " ", "test_majority": 1.1,
}  # fmt: skip


@pytest.mark.parametrize("field", WRONG_SHAPES)
def test_value_of_a_wrong_shape_is_refused_with_file_and_field(field, trained):
    plain = json.loads((trained / RECORD).read_text()) | {field: WRONG_SHAPES[field]}
    with pytest.raises(ValueError, match=rf"^some/file is not a valid record: {field}") as refused:
        parse(json.dumps(plain | {"checksum": checksum(plain)}).encode(), "some/file")
    assert len(str(refused.value)) < 300
    with pytest.raises(ValueError, match=field):
        to_json(replace(read_record(trained), **{field: WRONG_SHAPES[field]}))


def test_committed_records_are_valid():
    folder_of_recipes = Path(__file__).parents[1] / "recipes"
    for path in sorted(folder_of_recipes.glob("*.jsonl")) or [pytest.skip("needs the recipes of a clone")]:
        if path.name == trials_file(path.name.partition(".")[0]).name:
            assert read_trials(path)
            continue
        first = path.read_bytes().splitlines()[0]
        assert parse(first, str(path)).recipe == path.stem


def test_huge_and_endless_files_are_refused_before_they_are_read(finished, monkeypatch):
    monkeypatch.setattr(records, "MOST_BYTES", 1_000)
    with pytest.raises(ValueError, match=r"record\.json is damaged: it has .* bytes; expected at most 1,000"):
        read_record(finished)
    (finished / RECORD).unlink()
    os.mkfifo(finished / RECORD)  # reading it would wait for ever
    with pytest.raises(ValueError, match=r"record\.json is no ordinary file"):
        read_record(finished)


# Names


def test_characters_that_deceive_a_terminal_are_replaced_in_a_record(finished):
    evil = "a\x1b[2Jb\0c\u202ed\u0085e\nf\ud800"
    record = replace(read_record(finished), arm=evil, score=evil, test={evil: 0.5}, correct=None, error=evil, traceback="a\n\tb\x1b[2J")
    (finished / RECORD).write_text(to_json(record))
    found, safe = read_record(finished), r"a\x1b[2Jb\x00c\u202ed\x85e f\ud800"
    assert found.arm == found.score == found.error == safe and found.test == {safe: 0.5} and found.traceback == "a\n\tb\\x1b[2J"
    assert found.run == record.run and printable("größer, 日本 👩\u200d🔬") == "größer, 日本 👩\u200d🔬"
    failure = new_record(SHORT, NO_TAGS, "failed", evil, f"Traceback\n  {evil}")
    assert failure.error == safe and failure.traceback == "Traceback\n  " + safe.replace(" f", "\nf")


@pytest.mark.parametrize("arm", ["x" * 300, "..", "../../up", "a\\b/c", "ä" * 200], ids=["long", "dots", "up", "slashes", "letters"])
def test_run_of_an_arm_with_any_name_stays_in_its_folder(arm, tmp_path):
    entries = [replace(ENTRY, arm=arm), replace(ENTRY, arm=arm + "y", run=SHORT.vary(lr=2e-3))]
    places = [folder(entry, tmp_path / "out", "t") for entry in entries]
    assert places[0] != places[1]
    for entry, place in zip(entries, places):
        record = replace(new_record(entry.run, tags(entry, "t")), status="finished")
        write_record(place, record)
        assert recall(entry, tmp_path / "out", "t").arm == entry.arm
    assert all(place.resolve().is_relative_to(tmp_path / "out" / "t" / "50") for place in places) and names_in(tmp_path) == ["out"]


# Two processes at one run


def weights_file(place: Path, content: bytes) -> tuple[Path, str]:
    """A file of weights under a temporary name, and its hash."""
    path = storage.temporary(place / WEIGHTS)
    path.write_bytes(content)
    return path, file_sha256(path)


def numbered(place: Path, number: int, status: str = "finished") -> Record:
    """Publish a record with this number, and weights that contain it. Returns the record that is there then."""
    record = new_record(SHORT, NO_TAGS, status, error=None if status == "finished" else f"boom {number}")
    if status != "finished":
        return publish(place, record)
    path, sha256 = weights_file(place, b"weights %d" % number)
    return publish(place, replace(record, seconds=number, weights_sha256=sha256), path)


def test_first_finisher_counts_and_a_failure_never_replaces_it(tmp_path):
    assert numbered(tmp_path, 1, "failed").error == "boom 1"
    assert numbered(tmp_path, 2, "interrupted").error == "boom 2"
    assert numbered(tmp_path, 3).seconds == 3
    assert numbered(tmp_path, 4).seconds == 3 and numbered(tmp_path, 5, "failed").seconds == 3
    assert (tmp_path / WEIGHTS).read_bytes() == b"weights 3" and read_record(tmp_path).seconds == 3
    assert names_in(tmp_path) == [WEIGHTS, RECORD] or ".model" in names_in(tmp_path)[0]


def publish_many(place: Path, number: int, rounds: int, barrier):
    for one in range(rounds):
        inside = place / str(one)
        barrier.wait()
        if one % 2 and number % 2:
            numbered(inside, number, "failed")
        winner = numbered(inside, number)
        assert winner.finished
        (inside / f"winner{number}").write_text(str(int(winner.seconds)))


def test_of_several_processes_exactly_one_publishes(tmp_path):
    """Without any lock: half of the rounds begin with failed records that are replaced."""
    rounds, context = 30, multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    for one in range(rounds):
        (tmp_path / str(one)).mkdir()
    processes = [context.Process(target=publish_many, args=(tmp_path, number, rounds, barrier)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    for one in range(rounds):
        record = read_record(tmp_path / str(one))
        assert {(tmp_path / str(one) / f"winner{number}").read_text() for number in range(4)} == {str(int(record.seconds))}
        assert (tmp_path / str(one) / WEIGHTS).read_bytes() == b"weights %d" % record.seconds
        assert not list((tmp_path / str(one)).glob(".record*"))


def test_claim_that_another_process_removes_at_the_wrong_moment_loses_no_record(tmp_path, monkeypatch):
    """It is there when the link is made, and gone when the two files are compared."""
    numbered(tmp_path, 1, "failed")
    claim, samefile, compared = tmp_path / f".{RECORD}.claim", os.path.samefile, []
    claim.write_text("of another process")

    def removed(one, other):
        if Path(other) == claim:
            compared.append(other)
            claim.unlink()
        return samefile(one, other)

    monkeypatch.setattr(os.path, "samefile", removed)
    assert numbered(tmp_path, 2).seconds == read_record(tmp_path).seconds == 2 and len(compared) == 1


def test_claim_of_a_killed_process_is_removed(tmp_path, monkeypatch):
    numbered(tmp_path, 1, "failed")
    (tmp_path / f".{RECORD}.claim").write_text("left by a kill")
    monkeypatch.setattr("smallvit.train.publish.PATIENCE", 0.05)
    assert numbered(tmp_path, 2).seconds == read_record(tmp_path).seconds == 2
    assert not (tmp_path / f".{RECORD}.claim").exists()


def no_links(*_, **__):
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_file_system_without_hard_links_keeps_the_first_finisher_too(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", no_links)
    assert numbered(tmp_path, 1, "failed").error == "boom 1"
    assert numbered(tmp_path, 2).seconds == 2 and numbered(tmp_path, 3).seconds == 2
    assert (tmp_path / WEIGHTS).read_bytes() == b"weights 2" and not list(tmp_path.glob(".record*"))


@pytest.fixture
def no_locks(monkeypatch):
    """A file system whose files cannot be locked."""

    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refused)
    monkeypatch.setattr(storage, "LOCKABLE", {})


def test_second_process_at_a_run_returns_the_record_of_the_first(tmp_path, no_locks, trained, capsys):
    with ExitStack() as both:
        opened = [both.enter_context(prepare_training(SHORT, tmp_path, NO_TAGS, "cpu", None, None)) for _ in range(2)]
        for training, _ in opened:
            fit_module.train([training], training.train_step, lambda *_: None)
        winner, second = [close() for _, close in opened]
    assert winner == second
    assert names_in(tmp_path) == [CURVE, WEIGHTS, RECORD] and (tmp_path / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    assert capsys.readouterr().err.count("cannot be locked") == 1


def test_settings_can_be_measured_where_files_cannot_be_locked(tmp_path, no_locks, monkeypatch):
    monkeypatch.setattr(autotune, "measure", lambda *_: (Numerics(), 1, "measured"))
    numerics, stack, _ = autotune.autotune([ArmRun(run=SHORT, arm="scratch")], tmp_path, None, "cpu")
    assert (numerics, stack) == (Numerics(), 1)
    with open_journal(tmp_path / "journal"):  # of `smallvit tune`
        assert (tmp_path / "journal").is_dir()


def test_progress_on_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(self, *_, **__):
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    write_progress(tmp_path, step=1, steps=2, runs=1, seconds=1.0, left=None)
    assert not [*tmp_path.iterdir()]


def test_lock_that_another_process_holds_is_still_respected(tmp_path):
    with FileLock(tmp_path / ".lock"), pytest.raises(TimeoutError):
        fit(SHORT, tmp_path)


# Kills between two files


@pytest.mark.parametrize("reader", [load, lambda place: fit(SHORT, place), lambda place: fit(SHORT.vary(init=SHORT, steps=1), place / "next", init=place)])
def test_weights_of_a_run_killed_after_its_record_are_moved_by_the_next_reader(reader, finished):
    content = (finished / WEIGHTS).read_bytes()
    (finished / WEIGHTS).rename(finished / f".{WEIGHTS}.elsewhere.1.01234567.new")
    (finished / f".{WEIGHTS}.elsewhere.2.01234567.new").write_bytes(b"of another process")
    (finished / WEIGHTS).write_bytes(b"older ones")
    reader(finished)
    assert (finished / WEIGHTS).read_bytes() == content and read_record(finished).finished


def test_finished_record_without_any_right_weights_is_damaged(tmp_path, trained):
    place = folder(ENTRY, tmp_path, "t")
    place.mkdir(parents=True)
    (place / RECORD).write_bytes((trained / RECORD).read_bytes())
    (place / WEIGHTS).write_bytes(b"others")
    (place / f".{WEIGHTS}.elsewhere.1.01234567.new").write_bytes(b"others, too")
    with pytest.raises(Damaged, match=WEIGHTS):
        recall(ENTRY, tmp_path, "t")


def test_checkpoint_that_a_kill_left_beside_a_finished_record_is_deleted(tmp_path, trained):
    place = folder(ENTRY, tmp_path, "t")
    place.mkdir(parents=True)
    for name in (RECORD, WEIGHTS):
        (place / name).write_bytes((trained / name).read_bytes())
    for read in (lambda: fit(SHORT, place), lambda: launch([ENTRY], tmp_path, recipe="t", jobs=1)):
        (place / CHECKPOINT).write_bytes(b"left")
        read()
        assert names_in(place) == [WEIGHTS, RECORD]


# Checkpoints


def left_checkpoint(place: Path, run: Run = SHORT, steps: int = 5):
    """Leave the checkpoint of a run in a folder, as a kill does."""
    with prepare_training(run, place, NO_TAGS, "cpu", None, None) as (training, _):
        training.objective.train()
        for _ in range(steps):
            training.train_step()
        checkpoint.save([training], place / CHECKPOINT)


DAMAGES = {
    "one bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "one bit of its end": lambda content: content[:-30] + bytes([content[-30] ^ 1]) + content[-29:],
    "cut": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "longer": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", slow_after(1, DAMAGES.values()), ids=DAMAGES)
def test_damaged_checkpoint_is_set_aside_and_the_run_starts_again(damage, tmp_path, trained, monkeypatch, capsys):
    left_checkpoint(tmp_path)
    damaged = damage((tmp_path / CHECKPOINT).read_bytes())
    (tmp_path / CHECKPOINT).write_bytes(damaged)
    steps, train_step = [], Training.train_step
    monkeypatch.setattr(Training, "train_step", lambda self: (steps.append(self.step), train_step(self)))
    fit(SHORT, tmp_path)
    assert steps == [*range(12)] and (tmp_path / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    assert (tmp_path / f"{CHECKPOINT}.damaged").read_bytes() == damaged
    assert capsys.readouterr().err.count("note: ") == 1


@pytest.mark.slow
def test_intact_checkpoint_is_resumed(tmp_path, trained, monkeypatch):
    left_checkpoint(tmp_path)
    steps, train_step = [], Training.train_step
    monkeypatch.setattr(Training, "train_step", lambda self: (steps.append(self.step), train_step(self)))
    fit(SHORT, tmp_path)
    assert steps == [*range(5, 12)] and (tmp_path / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()


# What was no fault of the run


ENVIRONMENT = [
    OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota"), OSError(errno.EROFS, "read-only"),
    OSError(errno.EIO, "I/O"), OSError(errno.EMFILE, "too many files"), MemoryError(), Killed("killed"), NotWritten("full"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    RuntimeError("unable to open file </tmp/x>: Too many open files (24)"), torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: out of memory"),
]  # fmt: skip
FAULTS = [FloatingPointError("the loss is nan"), ValueError("wrong"), FileNotFoundError(2, "no"), RuntimeError("shape"), KeyError(3)]


@pytest.mark.parametrize("error", ENVIRONMENT, ids=lambda error: f"{type(error).__name__} {error}"[:30])
def test_run_that_was_interrupted_says_so_and_is_tried_again(error, tmp_path):
    record = record_failure(ENTRY, tmp_path, "t", error)
    assert record.status == read_record(folder(ENTRY, tmp_path, "t")).status == "interrupted" and record.error
    assert Scheduler([ENTRY], tmp_path, "t").queue == [0], "the same command does not try it again"
    assert isinstance(blocked_by({"init": record}), Interrupted)


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_run_that_failed_by_its_own_fault_is_not_tried_again(error, tmp_path):
    record = record_failure(ENTRY, tmp_path, "t", error)
    assert record.status == "failed" and not is_interruption(error)
    assert Scheduler([ENTRY], tmp_path, "t").queue == []
    assert Scheduler([ENTRY], tmp_path, "t", retry=lambda record: True).queue == [0]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), Killed("killed")], ids=["disk", "killed"])
def test_interrupted_run_is_tried_once_more_in_one_launch_and_so_are_those_that_need_it(error, tmp_path):
    runs = ablate({"tuned": SHORT.vary(init=SHORT.vary(lr=0.5))}, labels=[50], seeds=[0], references=False)
    schedule = Scheduler(runs, tmp_path, "t")
    for _ in range(2):
        assert schedule.next_group(1) == [1]
        schedule.handle([1], error)
    assert schedule.next_group(1) == [] and [r.status for r in schedule.records] == ["interrupted"] * 2
    assert Scheduler(runs, tmp_path, "t").queue == [1, 0], "the same command tries both again"


def test_full_disk_is_an_error_of_the_disk_and_a_wrong_value_is_not(tmp_path):
    def write(error: Exception):
        def fail(path: Path):
            raise error

        return partial(write_atomic, tmp_path / "a", fail)

    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("unexpected pos 704 vs 598")):
        with pytest.raises(NotWritten, match="could not write a in"):
            write(error)()
    with pytest.raises(ValueError, match="could not write a in") as wrong:
        write(TypeError("cannot be saved"))()
    assert not isinstance(wrong.value, NotWritten)
    with pytest.raises(MemoryError):
        write(MemoryError())()


def test_a_link_keeps_pointing_to_the_file_that_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "table.csv").symlink_to(tmp_path / "disk" / "table.csv")
    for text in ("new", "again"):
        write_text(tmp_path / "table.csv", text)
        assert (tmp_path / "table.csv").is_symlink() and (tmp_path / "disk" / "table.csv").read_text() == text
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["table.csv"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    """As with `-o /dev/null`: a device must not become a file."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_text(pipe, "some text")
        assert os.read(reader, 100) == b"some text" and pipe.is_fifo()
        assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    finally:
        os.close(reader)


def test_launch_goes_on_when_the_folder_of_a_run_can_be_written_again(tmp_path, capfd):
    runs = ablate({"scratch": SHORT, "other": SHORT.vary(lr=2e-3)}, labels=[50], seeds=[0], references=False)
    (tmp_path / "t" / "50").mkdir(parents=True)
    (tmp_path / "t" / "50" / "scratch").write_text("a file in place of the folder")
    found = launch(runs, tmp_path, recipe="t", jobs=1)
    assert [r.status for r in found] == ["interrupted", "finished"] and "could not write" in found[0].error
    (tmp_path / "t" / "50" / "scratch").unlink()
    assert [r.status for r in launch(runs, tmp_path, recipe="t", jobs=1)] == ["finished"] * 2


# Stacks


def seeds_of(run: Run, count: int, place: Path) -> tuple[list[Run], list[Path]]:
    """The run with several seeds, and a folder for each."""
    return [run.at_seed(seed) for seed in range(count)], [place / str(seed) for seed in range(count)]


class Stopped(BaseException):
    """As if the process were killed here."""


def stop_at(monkeypatch, moment: str):
    """Let a stack of three runs end as if it were killed at a moment."""
    seen: list[Path] = []

    def count(function, number: int, after: bool):
        def counted(*args, **options):
            seen.append(Path())
            if len(seen) == number and not after:
                raise Stopped
            result = function(*args, **options)
            if len(seen) == number:
                raise Stopped
            return result

        return counted

    target, name, number, after = {
        "first checkpoint": (checkpoint, "save", 1, True),
        "step 5": (Training, "count_step", 16, False),
        "second own checkpoint": (checkpoint, "save", 3, True),
        "last own checkpoint": (checkpoint, "save", 4, True),
        "first record": (fit_module, "publish", 1, True),
        "before the first record": (fit_module, "publish", 1, False),
        "second record": (fit_module, "publish", 2, True),
    }[moment]
    monkeypatch.setattr(target, name, count(getattr(target, name), number, after))


MOMENTS = ["first checkpoint", "step 5", "second own checkpoint", "last own checkpoint", "before the first record", "first record", "second record"]


@pytest.fixture(scope="module")
def whole_stack(tmp_path_factory) -> tuple[list[Record], list[Path]]:
    """The records and the folders of three runs that were trained together without an interruption."""
    runs, places = seeds_of(SHORT, 3, tmp_path_factory.mktemp("whole"))
    return fit_stacked(runs, places), places


@pytest.mark.parametrize("moment", slow_but(("first checkpoint",), MOMENTS))
def test_stack_killed_at_any_moment_ends_bitwise_equal(moment, tmp_path, monkeypatch, whole_stack):
    runs, places = seeds_of(SHORT, 3, tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, moment)
        with pytest.raises(Stopped):
            fit_stacked(runs, places)
    monkeypatch.setattr("smallvit.train.stack.Stack.check_first_step", lambda *_: None if moment == "first checkpoint" else 1 / 0)
    found = fit_stacked(runs, places)
    assert [replace(r, seconds=0) for r in found] == [replace(r, seconds=0) for r in whole_stack[0]]
    assert [r.stacked for r in found] == [3] * 3
    for place, whole in zip(places, whole_stack[1]):
        assert (place / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes() and names_in(place) == [CURVE, WEIGHTS, RECORD]


@pytest.mark.slow
def test_run_of_a_killed_stack_starts_again_alone_with_a_note(tmp_path, trained, monkeypatch, capsys):
    runs, places = seeds_of(SHORT, 3, tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, "step 5")
        with pytest.raises(Stopped):
            fit_stacked(runs, places)
    alone = [fit(run, place) for run, place in zip(runs, places)]
    assert [r.stacked for r in alone] == [None] * 3 and (places[0] / WEIGHTS).read_bytes() == (trained / WEIGHTS).read_bytes()
    assert capsys.readouterr().err.count("note: 3 runs were trained together") == 1


def killed_stack(monkeypatch, out: Path) -> list[ArmRun]:
    """Leave runs whose stack of three was killed; returns five runs, the first of which has finished."""
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(5), references=False)
    members = [runs[3], runs[1], runs[4]]
    with monkeypatch.context() as patch:
        stop_at(patch, "step 5")
        with pytest.raises(Stopped):
            fit_stacked([entry.run for entry in members], [folder(entry, out, "t") for entry in members])
    fit(runs[0].run, folder(runs[0], out, "t"))
    return runs


def test_scheduler_forms_an_interrupted_stack_again(tmp_path, monkeypatch):
    runs = killed_stack(monkeypatch, tmp_path)
    schedule = Scheduler(runs, tmp_path, "t", stack=4)
    assert [schedule.next_group(2) for _ in range(2)] == [[3, 1, 4], [2]]
    for stack, chosen in ((2, runs), (4, runs[:4]), (1, runs)):
        schedule = Scheduler(chosen, tmp_path, "t", stack=stack)
        assert not schedule.stacks and len(schedule.next_group(1)) == min(stack, 3)


def test_stack_whose_worker_is_killed_is_continued_and_then_tried_alone(tmp_path):
    runs = ablate({"scratch": SHORT}, labels=[50], seeds=range(4), references=False)
    schedule = Scheduler(runs, tmp_path, "t", stack=2)
    first, second = schedule.next_group(1), schedule.next_group(1)
    schedule.handle(second, Killed("killed"))
    schedule.handle(first, Killed("killed"))
    assert [schedule.next_group(1), schedule.next_group(1)] == [first, second]
    schedule.handle(first, Killed("killed"))
    assert [schedule.next_group(1), schedule.next_group(1)] == [[0], [1]]
    schedule.handle([0], Killed("killed"))
    assert schedule.records[0].status == "interrupted" and "killed twice" in schedule.records[0].error


def kill_soon(pid: int, seconds: float):
    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()


def train_stack_often_saved(runs: list[Run], places: list[Path]):
    """Train a stack in another process, with a checkpoint every 50 ms."""
    importlib.import_module("smallvit.train.loop").CHECKPOINT_SECONDS = 0.05
    fit_stacked(runs, places)


@pytest.mark.slow
def test_stack_killed_at_random_moments_ends_bitwise_equal(tmp_path, monkeypatch):
    monkeypatch.setattr("smallvit.train.loop.CHECKPOINT_SECONDS", 0.05)
    runs, whole = seeds_of(SHORT.vary(steps=300), 3, tmp_path / "whole")
    _, places = seeds_of(SHORT.vary(steps=300), 3, tmp_path / "killed")
    fit_stacked(runs, whole)
    exits, start = [], multiprocessing.get_context("spawn")  # a forked process cannot compute gradients after its parent has
    for attempt in range(4):
        process = start.Process(target=train_stack_often_saved, args=(runs, places))
        process.start()
        before = time.time()
        while process.is_alive() and not any(path.stat().st_mtime > before for path in places[0].glob(CHECKPOINT)):
            time.sleep(0.01)
        time.sleep(0.07 * attempt)
        process.kill()
        process.join()
        exits.append(process.exitcode)
    found = fit_stacked(runs, places)
    assert -signal.SIGKILL in exits and [r.stacked for r in found] == [3] * 3
    for place, other in zip(places, whole):
        assert (place / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()
