"""Files that survive kills, full disks and several writers: written whole or not at all, locked, and read within bounds.

A file is first written under a temporary name, which names the machine and the process, and then moved to its place. So a kill
never damages an existing file, and two processes never write to one file.
"""

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

HOST = re.sub(r"[^A-Za-z0-9-]+", "-", platform.node())[:20] or "host"
LEFT = re.compile(r"\..+\.(?P<host>[A-Za-z0-9-]+)\.(?P<pid>\d+)\.[0-9a-f]{8}\.new")  # a temporary name
DAY = 86_400  # seconds after which a temporary file belongs to nobody
# what a system call reports if a disk or the share of a user is full, or if a file system cannot lock or has no hard links
FULL = {errno.ENOSPC, errno.EDQUOT}
WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
WITHOUT_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}


class NotWritten(ValueError):
    """Error for a file that could not be written, because the disk is full, the folder is read-only or gone, or the like. It is
    no fault of the run, so the run can be trained again.
    """


def cache_folder() -> Path:
    """Return the folder of the user for files that smallvit can make or download again: the one that the environment variable
    SMALLVIT_CACHE names, or `smallvit` in that of XDG_CACHE_HOME, by default in `~/.cache`.

    Raises ValueError if the user has no home folder, as in some containers, and the folder depends on it.
    """
    try:
        if own := os.environ.get("SMALLVIT_CACHE"):
            return Path(own).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "smallvit"
    except RuntimeError as error:
        raise ValueError("you have no home folder for files to keep; set SMALLVIT_CACHE to a folder of your own") from error


def write_atomic(path: Path, write: Callable[[Path], object]):
    """Write a file safely: if writing is interrupted, an existing file at `path` stays unchanged. The function
    `write(temporary_path)` writes the new content to a temporary file, which is then moved to `path`. If `path` is a link, the
    file that it points to is replaced, and the link stays. A device or a pipe, such as `/dev/null`, is written to directly.

    Raises NotWritten, which is a ValueError, with the folder and the reason, when the file cannot be written.
    """
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path
    new = temporary(path)
    with failures_named(path):
        if path.exists() and not (path.is_file() or path.is_dir()):
            write(path)
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(new)
            flush_to_disk(new)
            os.replace(new, path)
        finally:
            with suppress(OSError):
                os.truncate(new, 0)  # gives its space back also if it is still open, as after an error of torch.save
            with suppress(OSError):
                new.unlink()


def rename_damaged(path: Path):
    """Rename a damaged file to `*.damaged`, unless another process has done so at the same moment. Raise NotWritten if its
    folder is read-only.
    """
    try:
        os.replace(path, path.with_name(f"{path.name}.damaged"))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise NotWritten(
            f"{path} is damaged and cannot be renamed: {error.strerror}; make its folder writable, start again"
        ) from error


def write_text(path: Path, text: str):
    """Write a text file. If writing fails, an existing file at `path` stays unchanged."""
    write_atomic(path, lambda new: new.write_text(text, encoding="utf-8"))


@contextmanager
def failures_named(path: Path) -> Iterator[None]:
    """Context manager in which the file `path` is written. Errors become a ValueError, with the name of the file, its folder
    and the reason. It is `NotWritten` if the reason is the disk or the folder.
    """
    try:
        yield
    except (NotWritten, MemoryError):
        raise
    except Exception as error:
        # torch and safetensors raise their own errors when a disk is full
        by_the_disk = isinstance(error, OSError | RuntimeError) or type(error).__name__ == "SafetensorError"
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        is_full = error.errno in FULL if isinstance(error, OSError) else by_the_disk
        advice = "make room and start again" if is_full else "correct this and start again"
        raise (NotWritten if by_the_disk else ValueError)(
            f"could not write {path.name} in {path.parent}: {reason}; an earlier file is untouched; {advice}"
        ) from error


def flush_to_disk(path: Path):
    """Wait until the content of a file is on the disk, so that it survives a power failure."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


# Temporary files


def temporary(path: Path) -> Path:
    """Return a path beside `path` under which the new file or folder is written. No other process on any machine uses it. The
    name contains the machine and the process, by which `remove_leftovers` decides whether the file is still needed.
    """
    return path.with_name(f".{path.name}.{HOST}.{os.getpid()}.{secrets.token_hex(4)}.new")


def remove_leftovers(folder: Path, name: str = "*"):
    """Delete the temporary files and folders in a folder that killed processes have left, or only those for a file `name`.
    Those of another living process of this machine stay, and so do files of other machines, unless they are older than a day. A
    file with the number of this process is that of an earlier one: numbers begin again when a machine or a container starts.
    """
    for path in folder.glob(f".{name}.*.new"):
        match = LEFT.fullmatch(path.name)
        pid = int(match["pid"]) if match is not None and match["host"] == HOST else None
        dead = pid is not None and (pid == os.getpid() or not is_running(pid))
        with suppress(OSError):
            if dead or time.time() - path.stat().st_mtime > DAY:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_running(pid: int) -> bool:
    """Return whether a process with the number `pid` runs on this machine. On Windows, where asking would end it, the result is
    always True.
    """
    if sys.platform == "win32":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it belongs to another user
        return True
    return True


# Several processes at one file


@contextmanager
def locked(path: Path, timeout: float = 0) -> Iterator[None]:
    """Context manager that holds the lock file `path`, so that only one process at a time is inside. `timeout` is how many
    seconds to wait for another process; -1 waits without end.

    On a file system without locks there is no lock, which a note says once. What is written there must therefore be safe
    without it: see `publish`.

    Raises filelock.Timeout if another process holds the lock, and NotWritten if the folder cannot be written to.
    """
    from filelock import FileLock

    lock = FileLock(path, timeout=timeout)
    with failures_named(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        supported = can_lock(path.parent)
    if not supported:
        yield
        return
    try:
        lock.acquire()
    except TimeoutError:  # filelock.Timeout
        raise
    except OSError as error:
        raise NotWritten(f"could not lock {path}: {error.strerror or error}; make the folder writable, start again") from error
    try:
        yield
    finally:
        with suppress(OSError):  # the folder has vanished
            lock.release()


LOCKABLE: dict[int, bool] = {}  # number of a file system -> whether its files can be locked


def can_lock(folder: Path) -> bool:
    """Return whether files in a folder can be locked. A file system of a cluster may have no locks. A note then says so, once
    for each file system.
    """
    device = folder.stat().st_dev
    if sys.platform == "win32" or LOCKABLE.get(device):
        return True
    if device not in LOCKABLE:
        if (reason := refusal(folder)) and parent_process() is None:  # worker processes say nothing: their parent has said it
            text = "do not train one run in two processes; if it happens, the first one that finishes counts"
            print(f"note: files in {folder} cannot be locked ({reason}); {text}", file=sys.stderr)
        LOCKABLE[device] = not reason
    return LOCKABLE[device]


def refusal(folder: Path) -> str:
    """Return why files in a folder cannot be locked, as text. The text is empty if they can."""
    import fcntl

    probe = temporary(folder / "lock")
    try:
        with open(probe, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return error.strerror or "no locks"
    finally:
        with suppress(OSError):
            probe.unlink()
    return ""


def link_new(new: Path, path: Path) -> bool:
    """Give the file `new` the second name `path`, if this name is free. Return False if it is taken, or was at that moment: of
    several processes, only one gets the name, also on file systems that are shared by machines.

    A file system without hard links cannot promise that. There, the file is moved to `path` if nothing is there, so of two
    processes that do this at the same moment the later one wins.
    """
    try:
        os.link(new, path)
    except FileExistsError:
        try:
            return os.path.samefile(new, path)  # a server may make the link and lose its answer
        except FileNotFoundError:  # another process has removed it since
            return False
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        if path.exists():
            return False
        os.replace(new, path)
    return True


# Reading


def read_bounded(path: Path, most: int) -> bytes:
    """Return the content of a file. Raise ValueError, with its name, if it is larger than `most` bytes or is no ordinary file,
    such as a folder or a device without an end.
    """
    check_size(path, most)
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:  # it has grown since
        raise ValueError(f"{path} is damaged: it has more than {most:,} bytes")
    return content


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the content of a JSON text. `options` are those of `json.loads`. Raises ValueError for a text that is not JSON,
    also if its lists and dicts are nested too deeply for Python.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("its lists and dicts are nested too deeply") from error


def check_size(path: Path, most: int):
    """Raise ValueError, with the name of the file at `path`, if it is larger than `most` bytes or is no ordinary file."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is no ordinary file; expected a file as smallvit wrote it")
    if found.st_size > most:
        raise ValueError(f"{path} is damaged: it has {found.st_size:,} bytes; expected at most {most:,}")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 hash of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
