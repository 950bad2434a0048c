"""Decoding many image files with threads, into memory or into a memory-mapped file that several processes share.

Decoded pixels are kept on disk if they would take more than a quarter of the free memory: in the folder
`folders/<hash>` of the cache folder of smallvit, where <hash> depends on the names, sizes and times of the files and on the
options. The cache can be deleted at any time.
"""

import hashlib
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from smallvit.storage import cache_folder, locked, parse_json, remove_leftovers, temporary

from .decode import MissingPackage, read_image
from .files import size_and_times
from .images import Rows
from .notes import note

FORMAT = 6  # of the files in the cache; increased when decoding changes
FACTS = "facts.json"  # beside the pixels: the files that could not be read, and remarks
MANY = 2_000  # files from which a progress bar is shown
CONVERTED = "files in the color mode CMYK were converted to RGB"
SEVERAL_PAGES = "TIFF files with several pages, of which only the first one is read"
LISTED = 200  # how many unreadable files an error message lists
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")  # control groups of Linux, and the names of our own
CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
CGROUP_V2 = ("memory.max", "memory.current", "inactive_file")  # files with limit and usage, and the cached part in memory.stat


class Options(NamedTuple):
    """How image files are decoded: `size` (height, width) and color `mode` to convert to, or None, and "uint8" or "float"
    pixels. With `skip_broken`, files that cannot be read are left out.
    """

    size: tuple[int, int] | None
    mode: str | None
    pixels: str
    skip_broken: bool


class Loaded(NamedTuple):
    """The decoded images of a folder (images, channels, height, width), and the positions of their files in the list of all
    files. The images are a tensor, or a `Rows` object over a memory-mapped file, which is used like a tensor.
    """

    images: Tensor
    kept: list[int]


class Problem(NamedTuple):
    """Why the image file at position `index` cannot be used: a `reason` in words, or another `shape` (h, w, c) than that of the
    first image.
    """

    index: int
    reason: str
    shape: tuple[int, ...] | None = None


def load_pixels(top: Path, files: Sequence[str], options: Options, cache: str | None) -> Loaded:
    """Decode image files and return their pixels.

    top, files   the folder, and the names of the files in it
    options      how the files are decoded
    cache        "memory", "disk" for a memory-mapped file, or None: "disk" if the pixels take more than a quarter of the free
                 memory

    Warns once if CMYK images were converted to RGB, and once if files have several pages, of which the first one is read.

    Raises    ValueError for files that cannot be read or that differ in size or channels; all of them are listed. Also raises
              it if a package is missing that a file needs, even with `skip_broken`.
    """
    first, shape = _first_shape(top, files, options)
    dtype = np.dtype(np.uint8 if options.pixels == "uint8" else np.float32)
    stored = (len(files), shape[2], *shape[:2])
    needed = math.prod(stored) * dtype.itemsize
    on_disk = needed > available_memory() / 4 if cache is None else cache == "disk"
    if on_disk:
        images, problems, remarks = _from_disk(top, files, options, first, shape, dtype, needed)
    else:
        images = np.empty(stored, dtype)
        problems, remarks = _decode_all(images, top, files, options, shape)
        _check(top, files, problems, options, first, shape)
    for remark, count in remarks.items():
        note(f"{top}: {remark}: {count:,}")
    broken = {problem.index for problem in problems}
    kept = [index for index in range(len(files)) if index not in broken]
    tensor, index = torch.from_numpy(images), torch.tensor(kept)
    if on_disk:
        return Loaded(cast(Tensor, Rows(tensor, index)), kept)
    return Loaded(tensor[index] if broken else tensor, kept)


def _first_shape(top: Path, files: Sequence[str], options: Options) -> tuple[str, tuple[int, ...]]:
    """Return the name of the first image file that can be read, and its shape (h, w, c) after conversion and resizing. Raise
    ValueError if no file can be read.
    """
    problems = []
    for index, file in enumerate(files):
        try:
            return file, read_image(top / file, options.size, options.mode, options.pixels, file).pixels.shape
        except MissingPackage:
            raise
        except ValueError as error:
            problems.append(Problem(index, str(error)))
    raise ValueError(f"{_broken_text(top, files, problems)}\nno image file can be read")


def _decode_all(
    out: np.ndarray, top: Path, files: Sequence[str], options: Options, shape: tuple[int, ...]
) -> tuple[list[Problem], dict[str, int]]:
    """Decode all files into the array `out` (images, channels, height, width), with threads. Return the problems, and a dict
    from what a user should know about some files to the number of these files. `shape` (h, w, c) is that of the first image. A
    progress bar is shown for many files, on a terminal.
    """
    from tqdm import tqdm

    def decode(index: int) -> tuple[Problem | None, list[str]]:
        try:
            pixels, mode, several = read_image(top / files[index], options.size, options.mode, options.pixels, files[index])
        except MissingPackage:
            raise
        except ValueError as error:
            return Problem(index, str(error)), []
        if pixels.shape != shape:
            return Problem(index, "", pixels.shape), []
        out[index] = pixels.transpose(2, 0, 1)
        return None, [CONVERTED] * (mode == "CMYK") + [SEVERAL_PAGES] * several

    threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        decoded = pool.map(decode, range(len(files)))
        if len(files) > MANY and sys.stderr.isatty():  # only then: in a worker process, the lock of tqdm would be left behind
            decoded = tqdm(decoded, total=len(files), desc=f"reading {top.name}", unit=" images", leave=False)
        found = list(decoded)
    return [problem for problem, _ in found if problem], dict(Counter(remark for _, remarks in found for remark in remarks))


def _check(
    top: Path, files: Sequence[str], problems: list[Problem], options: Options, first: str, shape: tuple[int, ...]
) -> None:
    """Raise ValueError if files cannot be used: those that cannot be read, unless `options.skip_broken` is set, and those whose
    shape differs from the `shape` (h, w, c) of the `first` image.
    """
    broken = [problem for problem in problems if problem.shape is None]
    other = [(problem.index, problem.shape) for problem in problems if problem.shape is not None]
    messages = []
    if broken and not options.skip_broken:
        advice = "remove or replace them, or go on without them: skip_broken=True"
        messages.append(f"{_broken_text(top, files, broken)}\n{advice}")
    if other:
        names = {"size=": any(s[:2] != shape[:2] for _, s in other), "channels=": any(s[2] != shape[2] for _, s in other)}
        advice = " and ".join(name for name, differs in names.items() if differs)
        index, found = other[0]
        count = f" ({len(other):,} of {len(files):,} images differ from the first one)" if len(other) > 1 else ""
        messages.append(f"{files[index]} is {found} (h, w, c) but {first} is {shape}: set {advice}{count}")
    if messages:
        text = "\n".join(messages)
        raise ValueError(text)


def _broken_text(top: Path, files: Sequence[str], problems: list[Problem]) -> str:
    """Return the beginning of an error message: which files cannot be used, one on a line, and why."""
    lines = [f"  {problem.reason}" for problem in problems[:LISTED]]
    more = [f"  and {len(problems) - LISTED:,} more"] if len(problems) > LISTED else []
    return "\n".join([f"{top}: {len(problems):,} of {len(files):,} image files cannot be used:", *lines, *more])


def _from_disk(
    top: Path, files: Sequence[str], options: Options, first: str, shape: tuple[int, ...], dtype: np.dtype, needed: int
) -> tuple[np.ndarray, list[Problem], dict[str, int]]:
    """Return decoded pixels as a memory-mapped array, the problems, and the remarks of `_decode_all`. The files are decoded if
    they are not in the cache yet. Other processes that need the same files wait, and then share the array. Where files cannot
    be locked, they decode the files too, and the array that is complete first is used.

    `shape` (h, w, c) and `dtype` are those of each image, `first` is the first readable file, and `needed` is the number of
    bytes.
    """
    folder = cache_folder() / "folders" / _key(top, files, options)
    new, array = temporary(folder), (len(files), shape[2], *shape[:2])
    with locked(folder.with_name(f"{folder.name}.lock"), timeout=-1):
        stored = _stored(folder, array, dtype)
        if stored is None:
            shutil.rmtree(folder, ignore_errors=True)  # damaged, or deleted in part
        if not folder.is_dir():
            remove_leftovers(folder.parent, folder.name)
            if needed > (free := shutil.disk_usage(folder.parent).free):
                raise ValueError(
                    f"{top}: the decoded images take {needed / 1e9:.1f} GB, but {folder.parent} has {free / 1e9:.1f} GB left; "
                    "set a smaller size=, or set the environment variable SMALLVIT_CACHE to another folder"
                )
            new.mkdir()
            try:
                out = np.lib.format.open_memmap(new / "pixels.npy", "w+", dtype, array)
                problems, remarks = _decode_all(out, top, files, options, shape)
                out.flush()
                del out
                _check(top, files, problems, options, first, shape)
                (new / FACTS).write_text(json.dumps({"problems": problems, "remarks": remarks}), encoding="utf-8")
                try:
                    new.rename(folder)
                except OSError:
                    if not folder.is_dir():  # if it is there, another process was faster
                        raise
            finally:
                shutil.rmtree(new, ignore_errors=True)
            stored = _stored(folder, array, dtype)
    if stored is None:
        raise ValueError(f"{folder} is damaged and cannot be replaced; expected decoded images of {top}: delete this folder")
    return stored


def _stored(folder: Path, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, list[Problem], dict[str, int]] | None:
    """Return what `_from_disk` has stored in `folder`: the memory-mapped pixels, the problems and the remarks. Return None if
    a file is missing or damaged, or if the pixels are not an array of this `shape` and `dtype`.
    """
    try:
        facts = parse_json((folder / FACTS).read_text(encoding="utf-8"))
        problems, remarks = [Problem(*problem) for problem in facts["problems"]], facts["remarks"]
        pixels = np.load(folder / "pixels.npy", mmap_mode="c")  # never written: "c" only spares torch's warning
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    return (pixels, problems, remarks) if (pixels.shape, pixels.dtype) == (shape, dtype) else None


def _key(top: Path, files: Sequence[str], options: Options) -> str:
    """Return a hash of the names, sizes and times of the files and of the options. It changes when a file changes, also where
    a program restores the time of modification, because the time of the last change of status is included.
    """
    import PIL

    stats = [(file, *size_and_times(top / file)) for file in files]
    text = json.dumps([FORMAT, PIL.__version__, str(top), options, stats])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def available_memory() -> int:
    """Return the number of bytes of memory that this process can still take: what is free on the machine, or less if its
    control group has a limit, as in a container or in a job of SLURM. Where the operating system does not say what is free, it
    is half of all memory.
    """
    return min(free_memory(), group_memory())


def free_memory() -> int:
    """Return the number of bytes of memory that are free on this machine for a new program, or half of all memory where the
    operating system does not say.
    """
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30


def group_memory() -> int:
    """Return the number of bytes of memory that the control group of this process (cgroup, version 1 or 2) and the groups
    around it still allow, or a very large number without a limit. Cached files, which the system drops when memory is needed,
    count as free.
    """
    free = [sys.maxsize]
    try:
        lines = OWN_CGROUP.read_text().splitlines()  # such as `0::/system.slice/job` or, in version 1, `5:memory:/slurm/job`
    except OSError:
        return sys.maxsize
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds and "memory" not in kinds.split(","):
            continue
        top = CGROUPS / "memory" if kinds else CGROUPS
        limit, used, cached = CGROUP_V1 if kinds else CGROUP_V2
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            with suppress(OSError, ValueError, KeyError):  # no such file here, or the limit is the word "max"
                most, taken = int((folder / limit).read_text()), int((folder / used).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                free.append(max(0, most - taken + int(stat[cached])))
    return min(free)
