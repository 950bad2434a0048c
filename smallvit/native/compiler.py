"""The compiled kernel: compiling `blocks.cpp` and `views.cpp` once for each processor, and loading them."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from smallvit.storage import cache_folder, locked, write_atomic, write_text

FOLDER = Path(__file__).parent
SIZES = {"blocks.cpp": ("blocks_kept_floats", "blocks_scratch_floats", "blocks_merge_floats")}  # functions that return a long
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
FOR_THIS_PROCESSOR = (("-march=native",), ("-mcpu=native",), ())  # the first one that the compiler accepts
COMPILE_SECONDS = 300  # how long to wait for another process that compiles the kernel


class NotAvailable(RuntimeError):
    """Error that says why the native kernel cannot be used on this machine."""


@functools.cache
def library(source: str = "blocks.cpp") -> ctypes.CDLL:
    """Return the compiled kernel, as a library of C functions. It is compiled if the cache has none for this source, compiler
    and processor, which takes some seconds. `source` is the name of the file.

    The file lies in `code_folder()`; the environment variable CXX names another compiler.

    Raises NotAvailable if there is no compiler, if compilation fails, or if another process compiles for very long.
    """
    folder = code_folder()
    try:
        compiler = find_compiler()
        version = run([*compiler, "--version"])
        target = run([*compiler, "-march=native", "-E", "-v", "-"], input="")  # what "native" means on this processor
        code = [(FOLDER / name).read_text() for name in (source, "shared.h")]
        key = hashlib.sha256("\n".join([*code, *FLAGS, *compiler, version, target, processor()]).encode())
        path = folder / f"{Path(source).stem}-{key.hexdigest()[:20]}.so"
        if not is_whole(path):  # a library that is there can also be used in a folder that cannot be written
            with locked(path.with_suffix(".lock"), timeout=COMPILE_SECONDS):
                if not is_whole(path):
                    compiled = compile_source(compiler, FOLDER / source)
                    write_atomic(path, lambda new: new.write_bytes(compiled))
                    write_text(path.with_suffix(".sha256"), hashlib.sha256(compiled).hexdigest())
        found = ctypes.CDLL(str(path))
    except (OSError, ValueError) as error:
        raise NotAvailable(f"the kernel could not be compiled or loaded in {folder}: {error}") from error
    for name in SIZES.get(source, ()):
        getattr(found, name).restype = ctypes.c_long
    return found


def is_whole(path: Path) -> bool:
    """Return whether a compiled library exists and has the hash that lies beside it. A library that a full disk or the like has
    damaged would end the process when it is loaded.
    """
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == path.with_suffix(".sha256").read_text()
    except (OSError, ValueError):
        return False


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler, with its options: that of `$CXX`, or the first one that is found."""
    if given := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(given[0]) is None:
            raise NotAvailable(f"CXX is {' '.join(given)!r}, and there is no such program; expected a C++ compiler")
        return given
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise NotAvailable("no C++ compiler was found; install g++ or clang++, or set CXX")
    return [found]


def run(command: Sequence[str], input: str | None = None) -> str:
    """Return the output of a command as text, with its messages."""
    done = subprocess.run(command, input=input, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.stdout


def processor() -> str:
    """Return a text that differs between processors with different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.system()} {platform.machine()} {platform.processor()}"


def code_folder() -> Path:
    """Return the folder for compiled code. If the user has no cache folder that can be written, it is a temporary folder, which
    nobody else can write.

    Raises NotAvailable if another user owns or can write the temporary folder, because its code would be run.
    """
    with suppress(ValueError):  # there is no home folder
        folder = cache_folder()
        if os.environ.get("SMALLVIT_CACHE"):
            return folder
        parents = [parent for parent in (folder, *folder.parents) if parent.exists()]
        if parents and os.access(parents[0], os.W_OK):
            return folder
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = Path(tempfile.gettempdir()) / f"smallvit-{'cache' if user is None else user}"
    with suppress(OSError):  # `library` says if it cannot be made
        folder.mkdir(mode=0o700, exist_ok=True)
        if user is not None and (folder.lstat().st_uid != user or folder.lstat().st_mode & 0o022):
            raise NotAvailable(f"others can write the cache folder {folder}; set SMALLVIT_CACHE to a folder of your own")
    return folder


def compile_source(compiler: Sequence[str], source: Path) -> bytes:
    """Compile a file, and return the content of the library. Raise NotAvailable with the compiler's message."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compiled.so"
        for flags in FOR_THIS_PROCESSOR:
            message = run([*compiler, *FLAGS, *flags, str(source), "-o", str(path)])
            if path.exists():
                return path.read_bytes()
    raise NotAvailable(f"{' '.join(compiler)} could not compile {source.name}: {message.strip()[:500]}")


@functools.cache
def has_tiles() -> bool:
    """Return whether this processor has tile registers for products of bf16 (AMX), and this process may use them."""
    return bool(library().blocks_has_tiles())


@functools.cache
def note(text: str):
    """Print a note on the error stream, once in a process."""
    print(f"note: {text}", file=sys.stderr, flush=True)


@functools.cache
def reason_against(*source: str) -> str | None:
    """Return why the kernel cannot be used on this machine, or None if it can. `source` is the name of another file than
    blocks.cpp.
    """
    try:
        library(*source)
    except NotAvailable as error:
        return str(error)
    return None
