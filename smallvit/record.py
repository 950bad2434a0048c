"""Records: what a run leaves on disk, and reading it back.

A run's folder holds `record.json` (everything a table needs), `model.safetensors` (the weights that were evaluated) and, until
it has ended, `checkpoint.pt`. Every file is written beside itself first and then moved into place, so that a kill or a full
disk leaves the earlier one whole. `<recipe>.jsonl` holds the records of a recipe, one a line.
"""

import functools
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

RECORD, WEIGHTS, CHECKPOINT = "record.json", "model.safetensors", "checkpoint.pt"

# Names once published keep their meaning; a name that came later is None in earlier records.
FIELDS = (
    "recipe", "arm", "role", "baseline", "labels", "seed", "status", "error", "fingerprint", "run", "score", "val", "test",
    "test_reads", "chosen_on_val", "params", "macs", "images_seen", "steps", "seconds", "pretraining", "device", "precision",
    "threads", "cpu", "subset_sha256", "data_sha256", "test_images", "curve", "code", "versions", "weights", "picture",
    "health", "unlabelled", "tokens", "stacked", "kernel", "compiled", "test_repeats", "test_majority",
)  # fmt: skip
NEEDED = ("recipe", "arm", "role", "labels", "seed", "status", "fingerprint", "run")
RANDOM = "random initialisation"  # the arm that is the reference of what is probed


def write_atomic(path: Path, write: Callable[[Path], None]):
    """Let `write` make the file under another name, then move it into place; a failure leaves what was there.

    Raises ValueError, with the folder and the reason, when the disk does not take it.
    """
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(new)
        with open(new, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    except Exception as error:  # for a full disk torch and safetensors each have their own
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(
            f"could not write {path.name} in {path.parent}: {reason}; what was there is untouched, make room and start again"
        ) from error
    finally:
        with suppress(OSError):
            new.unlink()


def write_text(path: Path, text: str):
    write_atomic(path, lambda new: new.write_text(text, encoding="utf-8"))


def write_record(folder: Path, record: dict):
    write_text(Path(folder) / RECORD, dumped(record, indent=1) + "\n")


def read_record(folder: Path) -> dict | None:
    """The record in that folder, None where there is none yet."""
    path = Path(folder) / RECORD
    return parse(path.read_bytes(), str(path)) if path.exists() else None


def write_records(path: Path, records: Iterable[dict]):
    """One line for each record."""
    write_text(path, "".join(dumped(record) + "\n" for record in records))


def read_records(path: Path) -> list[dict]:
    """The records of a `.jsonl` file. Raises ValueError, naming the line, where one is torn or is no record."""
    lines = Path(path).read_bytes().splitlines()
    return [parse(line, f"{path}, line {number} of {len(lines)}") for number, line in enumerate(lines, 1) if line.strip()]


def one_picture_each(records: Iterable[dict]) -> list[dict]:
    """The records, with a picture in the first of each arm alone: the others say the same of other seeds, at length."""
    seen: set[tuple] = set()
    out = []
    for record in records:
        cell = record["arm"], record["labels"]
        out.append(record | {"picture": None} if cell in seen else record)
        seen.add(cell)
    return out


def dumped(record: dict, indent: int | None = None) -> str:
    """The record as JSON, which knows no NaN and no infinity. Raises ValueError, naming the field, where there is one."""
    for name, value in record.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"{name} of {record.get('arm')!r} is {value}; expected finite numbers, the run has diverged"
            ) from error
    return json.dumps(record, indent=indent)


def parse(text: bytes, where: str) -> dict:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is torn or no JSON ({error}); the other records are intact: delete it and start the recipe again"
        ) from error
    missing = [name for name in NEEDED if name not in record] if isinstance(record, dict) else NEEDED
    if missing:
        raise ValueError(f"{where} is no record: it lacks {', '.join(missing)}; expected the file as smallvit wrote it")
    return dict.fromkeys(FIELDS) | record


@functools.cache
def code() -> dict:
    """Which code this is: a hash of the library's files and, in a clone, the commit and whether the files differ from it."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if "recipes" not in path.relative_to(root).parts:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "--no-optional-locks", "-C", str(root), *words], capture_output=True, text=True, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # a wheel inside somebody's repository must not be taken for that repository's commit
    tracked = git("ls-files", "--error-unmatch", "record.py") is not None
    return {
        "sha256": digest.hexdigest(),
        "commit": git("rev-parse", "HEAD") if tracked else None,
        "dirty": bool(git("status", "--porcelain", "--", ".")) if tracked else None,
    }


@functools.cache
def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "numpy", "scikit-learn", "scipy", "timm", "lightly"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def amount(labels: int | None) -> str:
    """`1,000 labels`, or `all labels`."""
    return "all labels" if labels is None else f"{labels:,} label{'s' * (labels != 1)}"


@functools.cache
def cpu() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
