"""Records: writing is atomic, damaged files are refused by name, fields are type-checked, and code and versions are identified."""

import base64
import errno
import gc
import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from smallvit import record as records
from smallvit.packing import pack_bits, pack_floats, unpack_bits
from smallvit.record import (
    FORMAT,
    NEEDED,
    RECORD,
    Record,
    arm_folder,
    damaged_weights,
    one_picture_per_arm,
    read_record,
    read_records,
    run_folder,
    without_copies,
    write_record,
    write_records,
)
from smallvit.storage import NotWritten, file_sha256, write_atomic, write_text

FULL = Record(
    recipe="spt_lsa", arm="+SPT (ä, 日本, \"quoted\")", role="technique", labels=100, seed=3, status="finished",
    fingerprint="0123456789abcdef", run={"lr": 1e-3, "augment": [{"make": "smallvit.augment.Warp", "rotate": 0.1 + 0.2}]},
    score="accuracy", val={"accuracy": 0.9}, test={"accuracy": 2 / 3, "nll": 5e-324}, test_reads=1, params=10**12,
    curve=[[10, 0.25, None], [20, 0.125, 1.0]], code={"sha256": "ab", "commit": None, "dirty": True}, versions={"torch": "2.15.0"},
)  # fmt: skip
PLAIN = asdict(FULL)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder: name -> bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Writing


def os_error(new: Path):
    new.write_text("half of it")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def torch_error(new: Path):
    new.write_text("half of it")
    raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 704 vs 598")


def safetensors_error(new: Path):
    safetensors = pytest.importorskip("safetensors")
    new.write_text("half of it")
    raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("write", [os_error, torch_error, safetensors_error], ids=lambda f: f.__name__)
def test_full_disk_keeps_the_earlier_file_and_says_what_to_do(write, tmp_path):
    path = tmp_path / "checkpoint.pt"
    write_text(path, "the earlier one")
    with pytest.raises(ValueError, match=r"checkpoint\.pt in ") as raised:
        write_atomic(path, write)
    assert contents(tmp_path) == {"checkpoint.pt": b"the earlier one"}
    assert all(word in str(raised.value) for word in (str(tmp_path), "untouched", "make room"))
    assert "o space left on device" in str(raised.value) or "enforce fail" in str(raised.value)


def test_only_a_full_disk_is_a_reason_to_make_room(tmp_path):
    with pytest.raises(NotWritten, match="Permission denied; an earlier file is untouched; correct this and start again"):
        write_atomic(tmp_path / "a", lambda new: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 64 KiB. Skips the test where none can be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a small tmpfs")
    yield disk
    gc.collect()  # with Python 3.13, a file that torch failed to write is still open
    subprocess.run(["umount", disk], check=True)


def test_disk_that_is_really_full_keeps_the_earlier_files(tiny_disk):
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
    assert sorted(contents(tiny_disk)) == sorted(writers)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_interruption_keeps_the_earlier_file_and_is_passed_on(stop, tmp_path):
    def interrupted(new: Path):
        new.write_text("half of it")
        raise stop

    write_text(tmp_path / "a", "the earlier one")
    with pytest.raises(stop):
        write_atomic(tmp_path / "a", interrupted)
    assert contents(tmp_path) == {"a": b"the earlier one"}


def test_earlier_file_is_replaced_only_when_the_new_one_is_complete(tmp_path):
    path, seen = tmp_path / "a", []

    def write(new: Path):
        new.write_text("new")
        seen.append((path.read_text(), new.parent == path.parent))

    write_text(path, "old")
    with path.open() as reader:  # an open file still reads the old content: it was replaced, not overwritten
        write_atomic(path, write)
        assert reader.read() == "old"
    assert seen == [("old", True)] and contents(tmp_path) == {"a": b"new"}


def test_folders_are_created_and_a_file_in_their_place_is_refused(tmp_path):
    write_text(tmp_path / "a" / "b" / "c.txt", "x")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"
    with pytest.raises(ValueError, match=r"could not write d\.txt in .*c\.txt"):
        write_text(tmp_path / "a" / "b" / "c.txt" / "d.txt", "x")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "x"


# Reading and writing records


def test_every_field_is_read_as_it_was_written(tmp_path):
    assert FULL.format == FORMAT == 2 and len(PLAIN) == 69
    write_record(tmp_path, FULL)
    again = read_record(tmp_path)
    assert again == FULL and list(json.loads((tmp_path / RECORD).read_text())) == [*PLAIN, "checksum"]
    assert type(again.test_reads) is int and type(again.curve[1][2]) is float
    write_records(tmp_path / "all.jsonl", [FULL, replace(FULL, seed=4)])
    assert read_records(tmp_path / "all.jsonl") == [FULL, replace(FULL, seed=4)]
    assert len((tmp_path / "all.jsonl").read_text().split("\n")) == 3


def test_missing_record_is_none_and_an_empty_file_has_no_records(tmp_path):
    assert read_record(tmp_path) is None
    write_records(tmp_path / "all.jsonl", [])
    assert read_records(tmp_path / "all.jsonl") == []


def test_fields_that_a_record_lacks_have_their_defaults(tmp_path):
    minimal = {name: PLAIN[name] for name in (*NEEDED, "format")}
    (tmp_path / RECORD).write_text(json.dumps(minimal))
    record = read_record(tmp_path)
    assert record == Record(**minimal) and record.baseline == "" and record.test is None


@pytest.mark.parametrize(
    "field, value",
    [("test", {"accuracy": 0.5, "nll": float("nan")}), ("curve", [[1, float("inf"), 0.5]]), ("seconds", -float("inf"))],
)
def test_number_that_json_does_not_have_is_refused_with_its_field(field, value, tmp_path):
    write_record(tmp_path, FULL)
    write_records(tmp_path / "all.jsonl", [FULL])
    before, diverged = contents(tmp_path), replace(FULL, **{field: value})
    for write in (lambda: write_record(tmp_path, diverged), lambda: write_records(tmp_path / "all.jsonl", [FULL, diverged])):
        with pytest.raises(ValueError, match=f"^{field} of .*expected finite numbers"):
            write()
    assert contents(tmp_path) == before


# Damaged and foreign files

WRONG_TYPES = {
    "recipe": 3, "arm": None, "labels": "100", "seed": 1.0, "run": [], "val": 0.9, "test": [], "test_reads": True, "curve": {},
    "params": "many", "macs": False, "seconds": "3 s", "compiled": 1, "code": "ab", "preprocess": [], "format": "2", "error": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    "field, value", [*WRONG_TYPES.items(), ("role", "winner"), ("status", "running"), ("role", None), ("status", 1)]
)
def test_value_of_a_wrong_type_is_refused_by_field(field, value, tmp_path):
    with pytest.raises(ValueError, match=f"{field} is .*expected"):
        replace(FULL, **{field: value})
    write_records(tmp_path / "all.jsonl", [FULL])
    with open(tmp_path / "all.jsonl", "a") as file:
        file.write(json.dumps(PLAIN | {field: value}))
    with pytest.raises(ValueError, match=f"line 2 of 2 .*{field}" if field != "format" else "line 2 of 2 has record format '2'"):
        read_records(tmp_path / "all.jsonl")


@pytest.mark.parametrize("format_number", [None, 1, 3], ids=str)
def test_record_of_another_format_is_refused_with_what_to_do(format_number, tmp_path):
    """Version 0.1 wrote no format number."""
    plain = {name: value for name, value in PLAIN.items() if name != "format"}
    plain |= {} if format_number is None else {"format": format_number}
    (tmp_path / RECORD).write_text(json.dumps(plain | {"weights": None, "floor": 3}))
    with pytest.raises(ValueError) as raised:
        read_record(tmp_path)
    words = (str(tmp_path / RECORD), f"record format {format_number or 1}", "reads format 2", "run the recipe again")
    assert all(word in str(raised.value) for word in words)


def test_torn_last_line_is_refused_with_its_number(tmp_path):
    path = tmp_path / "all.jsonl"
    write_records(path, [FULL] * 3)
    complete = path.read_bytes()
    line = len(complete) // 3
    for cut in (1, line // 2, line - 2):
        path.write_bytes(complete[: 2 * line + cut])
        with pytest.raises(ValueError, match=f"{path}, line 3 of 3 is damaged .* delete it"):
            read_records(path)
    path.write_bytes(complete[:-1])  # a missing line break at the end loses nothing
    assert read_records(path) == [FULL] * 3


NOT_RECORDS = {
    "empty": (b"", "damaged"),
    "zeros": (b"\0" * 4096, "damaged"),
    "bytes": (b"\xff\xfe{", "damaged"),
    "python": (b"{'a': 1}", "damaged"),
    "deep": (b"[" * 100_000, "damaged"),
    "torn": (json.dumps(PLAIN).encode()[:-20], "damaged"),
    **{text: (text.encode(), "lacks recipe, arm") for text in ("[]", "3", "null", '"record"', "{}")},
    **{
        f"without {name}": (json.dumps({key: value for key, value in PLAIN.items() if key != name}).encode(), f"lacks {name};")
        for name in NEEDED
    },
    "unknown field": (json.dumps(PLAIN | {"floor": 3}).encode(), "unknown fields floor"),
}


@pytest.mark.parametrize("kind", NOT_RECORDS)
def test_file_that_is_not_a_record_is_refused_by_name(kind, tmp_path):
    content, words = NOT_RECORDS[kind]
    (tmp_path / RECORD).write_bytes(content)
    with pytest.raises(ValueError) as raised:
        read_record(tmp_path)
    assert str(raised.value).startswith(str(tmp_path / RECORD)) and words in str(raised.value)
    assert words != "damaged" or "delete it and run the recipe again" in str(raised.value)


def test_damaged_weights_are_told_from_intact_and_missing_ones(tmp_path):
    weights = tmp_path / records.WEIGHTS
    assert damaged_weights(tmp_path, FULL) is damaged_weights(tmp_path, replace(FULL, weights_sha256="ab")) is None
    weights.write_bytes(b"weights")
    record = replace(FULL, weights_sha256=file_sha256(weights))
    assert damaged_weights(tmp_path, record) is None
    weights.write_bytes(b"wEights")
    assert damaged_weights(tmp_path, record).startswith(f"{weights} is damaged")
    assert "is damaged, or does not belong to the record.json beside it: its hash" in damaged_weights(tmp_path, record)


def test_of_several_records_of_a_run_the_one_in_its_own_folder_is_used():
    run = Path("all", arm_folder(FULL.arm, FULL.role), run_folder(FULL.seed, FULL.fingerprint))
    copies = [run.with_name("a copy"), run, run.with_name(f"{run.name}-m3")]
    other, init = replace(FULL, seed=4, fingerprint="f" * 16), replace(FULL, role="dependency", arm="init")
    found = [(place, FULL) for place in copies] + [(Path("all", "x", "seed4-ffffffff"), other), (Path("all", "dependencies", run.name), init)]
    kept, note = without_copies(found)
    assert kept == [(run, FULL), *found[3:]] and "several" not in note
    assert note.startswith(f"{run} and {copies[0]} hold records of the same run; the first one is used, and the second one is ignored")
    assert without_copies(kept) == (kept, "")
    _, note = without_copies([*found, (Path("all", "y", "seed4-ffffffff"), other)])
    assert note.endswith("; 1 other run also has several records")


# What a record can be asked


def test_result_is_the_number_by_which_the_arm_is_judged():
    assert FULL.finished and FULL.result == 2 / 3
    assert not replace(FULL, status="failed").finished
    for changes in ({"test": None}, {"score": None}, {"score": "knn_1"}, {"test": {"accuracy": 1.5}}):
        with pytest.raises(ValueError, match=r"seed 3: test has no .* between 0 and 1"):
            replace(FULL, **changes).result  # noqa: B018


@pytest.mark.parametrize("count", [1, 7, 8, 9, 500])
def test_bits_are_read_as_they_were_packed(count):
    bits = np.random.default_rng(count).random(count) < 0.7
    found = unpack_bits(pack_bits(bits), count)
    assert found.dtype == bool and np.array_equal(found, bits)
    assert pack_bits(torch.from_numpy(bits)) == pack_bits(bits.astype(float)) == pack_bits(bits)


def test_bits_of_10_000_images_are_short():
    assert len(pack_bits(np.ones(10_000))) == 1668


def scored(bits, **changes) -> Record:
    """A finished record whose accuracy on the test images is the share of the given bits."""
    values = {"test": {"accuracy": float(np.mean(bits))}, "test_images": len(bits), "correct": pack_bits(bits)}
    return replace(FULL, **values | changes)


def test_record_says_which_images_are_right(tmp_path):
    bits = np.arange(30) % 3 > 0
    assert FULL.correct_bits is None
    write_record(tmp_path, scored(bits))
    assert np.array_equal(read_record(tmp_path).correct_bits, bits)
    val = {"test": None, "test_images": None, "val": {"accuracy": bits.mean()}, "val_images": 30}
    validated = scored(bits, **val)
    assert np.array_equal(validated.correct_bits, bits) and validated.val_result == bits.mean()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"test": {"accuracy": 0.7}}, r"0\.666667 of the 30 test images are right in correct, but accuracy is 0\.700000"),
        ({"test_images": 31}, "correct does not fit 31 test images: got 32 bits; expected 31|are right in correct"),
        ({"test_images": 60}, "correct does not fit 60 test images: got 32 bits; expected 60"),
        ({"test_images": 20}, "correct does not fit 20 test images: got 32 bits; expected 20"),
        ({"test_images": None}, "correct does not fit None test images"),
        ({"correct": "no bits"}, "correct does not fit 30 test images"),
        ({"correct": ""}, "correct does not fit 30 test images: got 0 bits; expected 30"),
        ({"test": {"nll": 0.5}}, "test has no 'accuracy'"),
        ({"test": None}, "val"),
    ],
)
def test_bits_that_do_not_agree_with_the_score_are_refused_by_run(changes, words):
    with pytest.raises(ValueError, match=words) as raised:
        scored(np.arange(30) % 3 > 0, **changes).correct_bits  # noqa: B018
    assert "seed 3: " in str(raised.value) and "train it again" in str(raised.value)


@pytest.mark.parametrize("lower", [None, True])
def test_record_keeps_one_number_for_each_image(lower, tmp_path):
    values = np.array([0.1, 2.5, 0.0, -0.75]) + (lower or 0)
    judged = {"score": "loss", "test": {"loss": values.mean()}, "lower_is_better": lower, "contributions": pack_floats(values)}
    write_record(tmp_path, scored(values > 0, correct=None, **judged))
    record = read_record(tmp_path)
    assert np.allclose(record.per_image, values, rtol=1e-6) and record.per_image.dtype == float
    assert record.correct_bits is None and record.result == values.mean()
    right = scored([True, True, False, False])
    assert right.per_image.tolist() == [1, 1, 0, 0] and FULL.per_image is None
    with pytest.raises(ValueError, match=r"the mean of contributions over the 4 test images is .*, but loss is 0\.45"):
        replace(record, test={"loss": 0.45}).per_image  # noqa: B018
    with pytest.raises(ValueError, match="contributions does not fit 5 test images: got 16 bytes; expected 5 numbers of 4 bytes"):
        replace(record, test_images=5).per_image  # noqa: B018
    for wrong in ([1, np.nan, 0, 0], [1, 1e39, 0, 0]):
        with pytest.raises(ValueError, match="infinite or NaN"):
            pack_floats(wrong)
        packed = base64.b64encode(torch.tensor(wrong).numpy().tobytes()).decode()
        with pytest.raises(ValueError, match="infinite or NaN"):
            replace(record, contributions=packed).per_image  # noqa: B018


def test_scores_whose_lower_values_are_better_may_exceed_1():
    assert scored([True], score="loss", test={"loss": 2.5}, lower_is_better=True).result == 2.5
    for changes in ({"test": {"loss": 2.5}}, {"test": {"loss": -0.1}, "lower_is_better": True}):
        with pytest.raises(ValueError, match=r"test has no 'loss' (between 0 and 1|that is finite and at least 0); train it again"):
            scored([True], score="loss", **changes).result  # noqa: B018


def test_pictures_are_kept_for_one_seed_of_each_arm_and_number_of_labels():
    drawn = [replace(FULL, picture={"groups": []}, labels=labels, seed=seed) for labels in (10, 20) for seed in (0, 1)]
    assert [record.picture is not None for record in one_picture_per_arm(drawn)] == [True, False, True, False]
    first_failed = [replace(drawn[0], picture=None), *drawn[1:]]
    assert [record.picture is not None for record in one_picture_per_arm(first_failed)] == [False, True, True, False]
    assert [replace(record, picture=None) for record in one_picture_per_arm(drawn)] == [replace(d, picture=None) for d in drawn]


def test_every_field_is_documented():
    text = Path(records.__file__).read_text()
    for field in fields(Record):
        (line,) = [line for line in text.splitlines() if line.startswith(f"    {field.name}: ")]
        assert len(line.partition("  # ")[2].split()) >= 2, line


# The code and the machine


def load_copy(package: Path):
    """The module `record` of a copy of the package."""
    spec = importlib.util.spec_from_file_location("copied_record", package / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def code_hash(package: Path) -> str:
    return load_copy(package).code()["sha256"]


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of the package in another folder."""
    copied = tmp_path / "somewhere" / "smallvit"
    shutil.copytree(Path(records.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


def test_code_hash_does_not_depend_on_the_folder_or_on_compiled_files(package):
    before = code_hash(package)
    assert before == records.code()["sha256"] and len(before) == 64
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "vit.cpython-311.pyc").write_bytes(b"compiled")
    (package / "recipes").mkdir()
    (package / "recipes" / "mine.py").write_text("RUNS = []")
    assert code_hash(package) == before


@pytest.mark.slow
def test_code_hash_changes_with_every_file_and_its_name(package):
    paths = sorted(path for suffix in ("py", "cpp", "h") for path in package.rglob(f"*.{suffix}"))
    assert {"blocks.cpp", "views.cpp", "shared.h"} <= {path.name for path in paths}
    assert len(paths) >= 30
    found = {code_hash(package)}
    for path in paths:
        text = path.read_bytes()
        path.write_bytes(text + b"#")
        found.add(code_hash(package))
        path.write_bytes(text)
    (package / "pooling.py").rename(package / "pools.py")
    found.add(code_hash(package))
    assert len(found) == len(paths) + 2


def test_copy_inside_another_repository_does_not_report_its_commit(package):
    git = ["git", "-C", package.parent, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    if not shutil.which("git"):
        pytest.skip("needs git")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    module = load_copy(package)
    assert module.code()["commit"] is None and module.code()["dirty"] is None
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "now it is tracked"], check=True)
    module.code.cache_clear()
    assert len(module.code()["commit"]) == 40 and module.code()["dirty"] is False
    (package / "vit.py").write_text("changed = True")
    module.code.cache_clear()
    assert module.code()["dirty"] is True


def test_versions_and_processor_are_recorded():
    found = records.versions()
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    assert {"python", "numpy", "scikit-learn"} <= found.keys() and all(found.values())
    assert records.cpu().strip()


def test_processors_of_one_name_have_different_texts(monkeypatch):
    def named(text: str) -> str:
        monkeypatch.setattr(records.Path, "read_text", lambda path: text)
        records.cpu.cache_clear()
        return records.cpu()

    core = "processor : 0\ncpu family\t: {}\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n"
    try:
        assert named(core.format(26) + core.format(26)) == "AMD EPYC (family 26, model 2)"
        assert named(core.format(25)) == "AMD EPYC (family 25, model 2)"
        assert named("model name : A\n") == "A" and named("").strip()
    finally:
        monkeypatch.undo()
        records.cpu.cache_clear()
