"""Records: what is written is whole, what is read is named when it is not, and nothing that was there is lost."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from smallvit import record as records
from smallvit.record import (
    FIELDS,
    NEEDED,
    RECORD,
    read_record,
    read_records,
    write_atomic,
    write_record,
    write_records,
    write_text,
)

FULL = dict.fromkeys(FIELDS) | {
    "recipe": "spt_lsa", "arm": "+SPT (ä, \u2028, \"quoted\")", "role": "technique", "labels": 100, "seed": 3, "status": "finished",
    "fingerprint": "0123456789abcdef", "run": {"lr": 1e-3, "augment": [{"make": "smallvit.augment.Warp", "rotate": 0.1 + 0.2}]},
    "score": "accuracy", "val": {"accuracy": 0.9}, "test": {"accuracy": 2 / 3, "nll": 5e-324}, "test_reads": 1, "params": 10**12,
    "curve": [[10, 0.25, None], [20, 0.125, 1.0]], "code": {"sha256": "ab", "commit": None, "dirty": True}, "versions": {"torch": "2.15.0"},
}  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Writing


def torn(new: Path):
    new.write_text("half of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def torch_runs_out_of_space(new: Path):
    new.write_text("half of it")
    raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 704 vs 598")


def safetensors_runs_out_of_space(new: Path):
    safetensors = pytest.importorskip("safetensors")
    new.write_text("half of it")
    raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("write", [torn, torch_runs_out_of_space, safetensors_runs_out_of_space], ids=lambda f: f.__name__)
def test_a_full_disk_leaves_the_earlier_file_whole_and_says_what_to_do(write, tmp_path):
    path = tmp_path / "checkpoint.pt"
    write_text(path, "the earlier one")
    with pytest.raises(ValueError, match=r"checkpoint\.pt in ") as raised:
        write_atomic(path, write)
    assert files(tmp_path) == {"checkpoint.pt": b"the earlier one"}
    assert all(word in str(raised.value) for word in (str(tmp_path), "untouched", "make room"))
    assert "o space left on device" in str(raised.value) or "enforce fail" in str(raised.value)


@pytest.fixture
def tiny_disk(tmp_path):
    """A disk of 64 KiB, where the tests may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_on_a_disk_that_is_really_full(tiny_disk):
    safetensors = pytest.importorskip("safetensors.torch")
    weights = {"w": torch.zeros(100_000)}
    writers = {
        "text": lambda new: new.write_text("x" * 400_000),
        "torch": lambda new: torch.save(weights, new),
        "safetensors": lambda new: safetensors.save_file(weights, new),
    }
    for name, write in writers.items():
        write_text(tiny_disk / name, "the earlier one")
        with pytest.raises(ValueError, match="make room"):
            write_atomic(tiny_disk / name, write)
        assert (tiny_disk / name).read_text() == "the earlier one"
    assert sorted(files(tiny_disk)) == sorted(writers)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_the_earlier_file_and_stays_an_interruption(stop, tmp_path):
    def interrupted(new: Path):
        new.write_text("half of it")
        raise stop

    write_text(tmp_path / "a", "the earlier one")
    with pytest.raises(stop):
        write_atomic(tmp_path / "a", interrupted)
    assert files(tmp_path) == {"a": b"the earlier one"}


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    path, seen = tmp_path / "a", []

    def write(new: Path):
        new.write_text("new")
        seen.append((path.read_text(), new.parent == path.parent))

    write_text(path, "old")
    with path.open() as reader:  # whoever was reading goes on reading the old one: it was replaced, not written over
        write_atomic(path, write)
        assert reader.read() == "old"
    assert seen == [("old", True)] and files(tmp_path) == {"a": b"new"}


def test_folders_are_made_and_a_file_in_their_place_is_named(tmp_path):
    write_text(tmp_path / "a" / "b" / "c.txt", "x")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"
    with pytest.raises(ValueError, match=r"could not write d\.txt in .*c\.txt"):
        write_text(tmp_path / "a" / "b" / "c.txt" / "d.txt", "x")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"


# A record


def test_every_field_comes_back_as_it_went(tmp_path):
    assert len(FIELDS) == len(set(FIELDS)) == 41
    write_record(tmp_path, FULL)
    assert read_record(tmp_path) == FULL and list(read_record(tmp_path)) == list(FIELDS)
    assert type(read_record(tmp_path)["test_reads"]) is int and type(read_record(tmp_path)["curve"][1][2]) is float
    write_records(tmp_path / "all.jsonl", [FULL, FULL | {"seed": 4}])
    assert read_records(tmp_path / "all.jsonl") == [FULL, FULL | {"seed": 4}]
    assert len((tmp_path / "all.jsonl").read_text().split("\n")) == 3


def test_no_record_yet_is_none_and_no_records_are_none(tmp_path):
    assert read_record(tmp_path) is None
    write_records(tmp_path / "all.jsonl", [])
    assert read_records(tmp_path / "all.jsonl") == []


@pytest.mark.parametrize(
    "field, value",
    [("test", {"accuracy": 0.5, "nll": float("nan")}), ("curve", [[1, float("inf"), 0.5]]), ("seconds", -float("inf"))],
)
def test_a_number_that_json_does_not_have_is_refused_and_its_field_named(field, value, tmp_path):
    write_record(tmp_path, FULL)
    write_records(tmp_path / "all.jsonl", [FULL])
    before = files(tmp_path)
    with pytest.raises(ValueError, match=f"^{field} of .*expected finite numbers"):
        write_record(tmp_path, FULL | {field: value})
    with pytest.raises(ValueError, match=f"^{field} of .*expected finite numbers"):
        write_records(tmp_path / "all.jsonl", [FULL, FULL | {field: value}])
    assert files(tmp_path) == before


def test_a_torn_last_line_is_named_with_its_number(tmp_path):
    path = tmp_path / "all.jsonl"
    write_records(path, [FULL] * 3)
    whole = path.read_bytes()
    line = len(whole) // 3
    for cut in (1, line // 2, line - 2):
        path.write_bytes(whole[: 2 * line + cut])
        with pytest.raises(ValueError, match=f"{path}, line 3 of 3 is torn .* delete it"):
            read_records(path)
    path.write_bytes(whole[:-1])  # a missing end of line loses nothing
    assert read_records(path) == [FULL] * 3


BROKEN = {"empty": b"", "zeros": b"\0" * 4096, "bytes": b"\xff\xfe{", "python": b"{'a': 1}", "deep": b"[" * 100_000}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_file_that_is_no_json_is_named(kind, tmp_path):
    (tmp_path / RECORD).write_bytes(BROKEN[kind])
    with pytest.raises(ValueError, match=f"{tmp_path / RECORD} is torn or no JSON .* delete it"):
        read_record(tmp_path)


def test_a_name_that_came_later_is_none_in_earlier_records(tmp_path):
    write_records(tmp_path / "old.jsonl", [{name: value for name, value in FULL.items() if name in NEEDED}])
    assert read_records(tmp_path / "old.jsonl")[0] == dict.fromkeys(FIELDS) | {name: FULL[name] for name in NEEDED}


@pytest.mark.parametrize("field", NEEDED)
def test_a_record_that_lacks_a_field_is_refused_and_the_field_named(field, tmp_path):
    path = tmp_path / "all.jsonl"
    write_records(path, [FULL, {name: value for name, value in FULL.items() if name != field}])
    with pytest.raises(ValueError, match=f"line 2 of 2 is no record: it lacks {field};"):
        read_records(path)


@pytest.mark.parametrize("other", [[], 3, None, "record", {}])
def test_json_that_is_no_record_is_refused(other, tmp_path):
    (tmp_path / RECORD).write_text(json.dumps(other))
    with pytest.raises(ValueError, match="is no record: it lacks recipe, arm"):
        read_record(tmp_path)


# Which code


def hash_of(package: Path) -> str:
    """What the copy of the package in that folder says of its own code."""
    spec = importlib.util.spec_from_file_location("copied_record", package / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.code()["sha256"]


@pytest.fixture
def package(tmp_path) -> Path:
    copied = tmp_path / "somewhere" / "smallvit"
    shutil.copytree(Path(records.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


def test_the_hash_is_of_the_files_not_of_their_place_or_of_what_python_leaves_there(package):
    before = hash_of(package)
    assert before == records.code()["sha256"] and len(before) == 64
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "vit.cpython-311.pyc").write_bytes(b"compiled")
    (package / "recipes").mkdir()
    (package / "recipes" / "mine.py").write_text("RUNS = []")
    assert hash_of(package) == before


def test_the_hash_changes_with_every_file_and_its_name(package):
    paths = sorted(package.rglob("*.py"))
    assert len(paths) >= 30
    found = {hash_of(package)}
    for path in paths:
        text = path.read_bytes()
        path.write_bytes(text + b"#")
        found.add(hash_of(package))
        path.write_bytes(text)
    (package / "pooling.py").rename(package / "pools.py")
    found.add(hash_of(package))
    assert len(found) == len(paths) + 2


def test_a_copy_in_somebody_elses_repository_does_not_borrow_its_commit(package):
    git = ["git", "-C", package.parent, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    if not shutil.which("git"):
        pytest.skip("needs git")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    spec = importlib.util.spec_from_file_location("copied_record", package / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.code()["commit"] is None and module.code()["dirty"] is None
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "now it is tracked"], check=True)
    module.code.cache_clear()
    assert len(module.code()["commit"]) == 40 and module.code()["dirty"] is False
    (package / "vit.py").write_text("changed = True")
    module.code.cache_clear()
    assert module.code()["dirty"] is True


def test_versions_and_processor_are_named():
    found = records.versions()
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    assert {"python", "numpy", "scikit-learn"} <= found.keys() and all(found.values())
    assert records.cpu().strip()
