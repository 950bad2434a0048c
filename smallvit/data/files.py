"""Finding the image files of a folder: classes, parts (train, test, val), and the groups to which files belong."""

import csv
import hashlib
import io
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from .decode import DICOM, TIFF
from .notes import note

# the parts of a data set, each with the names that its folder may have
PARTS = {"train": ("train", "training"), "test": ("test", "testing"), "val": ("val", "valid", "validation")}
SUFFIXES = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".ppm", ".pgm", ".pbm", ".pnm", ".bmp", ".webp", ".gif", *TIFF, *DICOM,
)  # fmt: skip
# suffixes of images that are not read: the user is told how many such files there are
OTHER_IMAGES = (
    ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".svg", ".eps", ".pdf", ".psd", ".ico", ".tga", ".exr", ".hdr", ".npy",
    ".raw", ".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".raf", ".rw2", ".nii", ".nrrd", ".mha", ".mhd", ".czi", ".lif",
    ".nd2", ".svs", ".ndpi", ".nii.gz", ".mpo", ".apng", ".dib",
)  # fmt: skip
HIDDEN = ("__MACOSX", "@eaDir")  # folders that macOS and network storage add
EXPECTED = "expected train/<class>/*.png and test/<class>/*.png, or <class>/*.png with folds= or test="
SHOWN = 20  # how many files an error message lists


@dataclass(frozen=True)
class Found:
    """The image files of a folder: the class names, and for each part ("train", "test" and "val", or "pool" if the folder has
    no parts) its files with their class indices. File names are relative to `top`, with "/" between folders.
    """

    top: Path
    classes: tuple[str, ...]
    parts: dict[str, dict[str, int]]

    @property
    def files(self) -> list[str]:
        """Return the names of all files, part by part."""
        return [file for part in self.parts.values() for file in part]

    @property
    def labels(self) -> Tensor:
        """Return the class index of each file, in the order of `files`, as an int64 tensor."""
        return torch.tensor([label for part in self.parts.values() for label in part.values()])


def find_images(top: Path, unlabelled: Path | None = None) -> Found:
    """Find the image files in `top/train/<class>` and `top/test/<class>` (and `top/val/<class>`, if it exists), or otherwise in
    `top/<class>`. The folders of the parts may have other names: see `find_parts`. A class may have subfolders. Hidden files,
    hidden folders and files that are no images are ignored. The folder `unlabelled` is no class.

    Warns once about images with an unsupported suffix, about images outside of the class folders, and if all classes have the
    same subfolders, because these may be the classes.

    Raises    ValueError if there are no classes, a class has no images, the parts have different classes, the classes look like
              parts of a data set, or a folder in them cannot be read.
    """
    folders = find_parts(top, unlabelled)
    unlabelled = unlabelled and unlabelled.resolve()
    other, parts, classes = Counter(), {}, {}
    for part, folder in folders.items():
        names = [entry.name for entry in folders_in(folder) if entry.resolve() != unlabelled]
        classes[part] = sorted(names, key=composed)  # the same order in all parts, however accents are stored
        if not classes[part]:
            raise ValueError(f"{top}: {EXPECTED} (there is no folder in {folder})")
        parts[part] = {}
        for label, name in enumerate(classes[part]):
            unread = Counter()
            files = _walk(folder / name, unread)
            if not files:
                advice = unread_text(unread) or "add some, or remove the folder"
                raise ValueError(f"{top}: {EXPECTED} (there are no images in {folder / name}; {advice})")
            other += unread
            parts[part] |= {(file.relative_to(top)).as_posix(): label for file in files}
    first = classes[next(iter(parts))]
    for part, found in classes.items():
        if repeated := [name for name, count in Counter(map(composed, found)).items() if count > 1]:
            text = f"two folders have the name {repeated[0]}, with its accents stored in two ways"
            raise ValueError(f"{top}: {text}; expected one folder for each class; join them")
        if [*map(composed, found)] != [*map(composed, first)]:
            differ = sorted({*map(composed, first)} ^ {*map(composed, found)})
            raise ValueError(f"{top}: expected the same classes in all parts, but train and {part} differ in {differ[:SHOWN]}")
    outside = [folder / file for folder in {top, *folders.values()} for file in filter(is_image, _files_in(folder))]
    if "pool" in parts:
        _check_subfolders(top, parts["pool"])
    else:
        further = [folder for folder in folders_in(top) if folder not in folders.values() and folder.resolve() != unlabelled]
        for folder in further:
            with suppress(ValueError):  # a folder that cannot be read, such as lost+found, is not needed
                outside += _walk(folder, Counter(), unlabelled)
    _warn_of_other_files(top, other, [file.relative_to(top).as_posix() for file in outside])
    return Found(top, tuple(first), parts)


def find_parts(top: Path, unlabelled: Path | None = None) -> dict[str, Path]:
    """Return the folder of each part of a data set in the folder `top`: "train", "test" and "val", if there is one. Without
    such folders, `top` itself is the only part, "pool".

    The folder of a part has one of the names in `PARTS`, in small or large letters. A folder that has images in it, and not in
    subfolders, is a class and no part. A folder with images both in it and in subfolders is a part only where training and test
    images are found. The same holds for other names than train, test and val, because classes may have these names. Under such
    a name, the folder `unlabelled` is no part.

    Raises    ValueError if there is no folder `top`, if only one of train and test exists, and for two folders of one part.
    """
    if not top.is_dir():
        raise ValueError(f"{top}: {EXPECTED} (there is no such folder)")
    found: dict[str, list[Path]] = {part: [] for part in PARTS}
    mixed: set[Path] = set()  # folders with images both in them and in subfolders
    flat: dict[str, Path] = {}  # folders with the name of a part and with images, but not in subfolders
    for folder in folders_in(top):
        part = next((part for part, names in PARTS.items() if folder.name.lower() in names), None)
        if part is None:
            continue
        has_own = any(map(is_image, _files_in(folder)))
        if has_own and not any(map(_has_images, folders_in(folder))):
            flat[part] = folder
            continue
        mixed |= {folder} if has_own else set()
        is_unlabelled = unlabelled is not None and folder.resolve() == unlabelled.resolve()
        if folder.name == part or (not is_unlabelled and _has_images(folder)):
            found[part].append(folder)
    if not (found["train"] and found["test"]):
        found = {part: [folder for folder in folders if folder not in mixed] for part, folders in found.items()}
    exact = {folder.name for folders in found.values() for folder in folders} & {"train", "test"}
    if not exact and not (found["train"] and found["test"]):
        return {"pool": top}
    for part, folders in found.items():
        if len(folders) > 1:
            names = " and ".join(folder.name for folder in folders)
            raise ValueError(f"{top}: expected one folder of {part} images, got {names}; join them, or rename all but one")
    for part, other in (("train", "test"), ("test", "train")):
        if not found[part]:
            load = f"load {top / other} with folds= or test="
            reason, advice = f"there is a folder {other}, but none named {part}", f"if {other} has all images, {load}"
            if part in flat:
                reason, advice = f"{flat[part].name} has images, but no class folders", f"to use {other} alone, {load}"
            elif part == "test" and found["val"]:
                advice = f"rename {found['val'][0].name} to test, or {load}"
            raise ValueError(f"{top}: {EXPECTED} ({reason}; {advice})")
    return {part: folders[0] for part, folders in found.items() if folders}


def _check_subfolders(top: Path, files: dict[str, int]):
    """Warn if the image files of all classes lie in subfolders with the same names, at least two of them: these may be the
    classes. `files` are the files of the folder `top` and their class indices.

    Raises ValueError if the names of two classes also say that one is for training, and the other for testing or validation.
    """
    subfolders: dict[str, set[str]] = {}
    for file in files:
        name, *middle, _ = PurePosixPath(file).parts
        subfolders.setdefault(name, set()).add(middle[0] if middle else "")
    names, first = sorted(subfolders), next(iter(subfolders.values()))
    if len(names) < 2 or len(first) < 2 or "" in first or any(other != first for other in subfolders.values()):
        return
    text = f"the class folders {listed(names)} all have the subfolders {listed(sorted(first))}"
    words = {name: {word.lower() for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", name)} for name in names}
    training = [name for name in names if words[name] & {*PARTS["train"]}]
    if any(words[name] & {*PARTS["test"], *PARTS["val"]} for name in {*names} - {*training}) and training:
        raise ValueError(f"{top}: {EXPECTED} ({text}, which look like the classes; rename the outer folders to train and test)")
    advice = "move their images to one folder for each class, or rename the outer folders to train and test"
    note(f"{top}: {text}; if the subfolders are the classes, {advice}")


def state_of(paths: Iterable[Path]) -> str:
    """Return a hash of the names, sizes and times of image files. It changes when a file is changed, added or removed. `paths`
    are files of any kind, and folders with all their visible image files and subfolders.
    """
    facts = []
    for path in paths:
        if not path.is_dir():
            facts.append((str(path), *size_and_times(path)))
            continue
        for root, names in sorted(_visible(path)):
            facts.append(root)
            facts += [(name, *size_and_times(f"{root}/{name}")) for name in sorted(names) if is_image(name)]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def size_and_times(file: Path | str) -> tuple[int, int, int]:
    """Return the size of a file in bytes, and the times of its last change in ns: of the content, and of the status, which also
    tells that a program has set the first one back. All are 0 for a file that cannot be found.
    """
    try:
        stat = os.stat(file)
    except OSError:
        return 0, 0, 0
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def find_unlabelled(top: Path, folder: Path, labelled: list[str]) -> list[str]:
    """Find the image files in `folder` and its subfolders, whose classes are not known. Return their names relative to `top`,
    the folder of the data set. `labelled` are the names of the files whose classes are known.

    Warns about images with an unsupported suffix.

    Raises    ValueError if there is no such folder, or if it has no images or labelled ones.
    """
    expected = f"expected a folder of images whose class is not known; its path is relative to {top}"
    if not folder.is_dir():
        raise ValueError(f"unlabelled={str(folder)!r}: there is no such folder; {expected}")
    other = Counter()
    found = _walk(folder, other)
    known = {(top / file).resolve() for file in labelled}
    if both := [str(file) for file in found if file.resolve() in known]:
        raise ValueError(f"unlabelled={str(folder)!r} has images of the class folders, {listed(both)}; {expected}")
    _warn_of_other_files(folder, other, [])
    if not found:
        raise ValueError(f"unlabelled={str(folder)!r}: there are no images in it; {expected}")
    return [Path(os.path.relpath(file, top)).as_posix() for file in found]


def expanded(name: str) -> str:
    """Return a path or pattern with the home folder in place of `~`, which the shell keeps in quotes. A file that really has
    such a name stays.
    """
    return name if os.path.exists(name) else os.path.expanduser(name)


def is_image(name: str) -> bool:
    """Return whether a file name ends like that of an image that can be read."""
    return name.lower().endswith(SUFFIXES)


def looks_like_image(name: str) -> bool:
    """Return whether a file name ends like that of an image, also of one that cannot be read."""
    return is_image(name) or bool(unread_suffix(name))


def unread_suffix(name: str) -> str:
    """Return the suffix of a file name if it is that of an image that is not read, such as ".heic", otherwise an empty text."""
    return next(filter(name.lower().endswith, OTHER_IMAGES), "")


def unread_text(counts: Counter[str]) -> str:
    """Return a text about images that are not read, or an empty one. `counts` is the number of files with each suffix."""
    shown = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(counts.items()) if suffix)
    return shown and f"files of these formats are not read: {shown}; convert them, for example to PNG"


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name in HIDDEN


def _files_in(folder: Path) -> list[str]:
    """Return the names of the visible files in a folder, without its subfolders."""
    return [entry.name for entry in folder.iterdir() if entry.is_file() and not _is_hidden(entry.name)]


def folders_in(folder: Path) -> list[Path]:
    """Return the visible folders in a folder, sorted by name."""
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not _is_hidden(entry.name))


def visible_files(folder: Path) -> list[Path]:
    """Return the visible files in a folder and its subfolders, sorted by path."""
    return sorted(Path(root, name) for root, names in _visible(folder) for name in names)


def _visible(folder: Path, skipped: Path | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield a folder and each visible folder below it, with the names of the visible files in it. The folder `skipped`, a path
    without symbolic links, is left out, and so are links to a folder that contains them. Raise ValueError for a folder that
    cannot be read.
    """

    def refuse(error: OSError):
        advice = "make it readable, or move it elsewhere"
        raise ValueError(f"{error.filename} cannot be read ({error.strerror}); {advice}") from error

    top = folder.resolve()
    above = {str(folder): {top, *top.parents}}  # the folders that contain the files of a folder
    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        containing = above.pop(root)
        real = {name: Path(root, name).resolve() for name in folders if not _is_hidden(name)}
        folders[:] = [name for name, path in real.items() if path != skipped and path not in containing]
        above |= {os.path.join(root, name): {real[name], *containing} for name in folders}
        yield root, [name for name in files if not _is_hidden(name)]


def _has_images(folder: Path) -> bool:
    """Return whether there is a visible image file in a folder or its subfolders."""
    return any(is_image(name) for _, names in _visible(folder) for name in names)


def _walk(folder: Path, other: Counter, skipped: Path | None = None) -> list[Path]:
    """Return the image files in a folder and its subfolders, in the order of torchvision's ImageFolder. Add the suffixes of
    images that cannot be read to `other`. The subfolder `skipped`, a path without symbolic links, is left out.
    """
    found = []
    for root, names in _visible(folder, skipped):
        images = [name for name in names if is_image(name)]
        found += [(root, name) for name in images]
        other.update(filter(None, map(unread_suffix, {*names} - {*images})))
    return [Path(root, name) for root, name in sorted(found)]


def _warn_of_other_files(top: Path, other: Counter, outside: list[str]):
    """Warn about images that are not used. `other` counts files by unsupported suffix, and `outside` are images outside of the
    class folders.
    """
    if unread := unread_text(other):
        note(f"{top}: {unread}")
    if outside:
        note(f"{top}: images outside of the class folders are not used: {listed(sorted(outside))}")


def groups_by_name(files: list[str], pattern: str) -> list[str]:
    """Return the name of the group of each file. `pattern` is a regular expression that must match the whole file name, without
    folder and suffix; its first pair of parentheses is the name of the group. With `(?i)` in the pattern, large and small
    letters make no difference between groups.

    Raises    ValueError for an invalid expression, and for files that do not match, which are listed.
    """
    try:
        compiled = re.compile(composed(pattern) if isinstance(pattern, str) else pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"group_by={pattern!r} is no regular expression ({error}); expected one like r'(.*)_\\d+'") from error
    if not compiled.groups:
        raise ValueError(f"group_by={pattern!r} has no parentheses around the group; expected one like r'(.*)_\\d+'")
    matches = [compiled.fullmatch(composed(PurePosixPath(file).stem)) for file in files]
    if unmatched := [file for file, match in zip(files, matches) if match is None or match[1] is None]:
        shown, more = ", ".join(unmatched[:3]), f" and {len(unmatched) - 3:,} more" * (len(unmatched) > 3)
        raise ValueError(
            f'group_by=r"{pattern}" must match the whole file name without its suffix, and does not match {shown}{more}; for '
            'example, r"([^_]+)_.*" takes everything before the first _ as the group'
        )
    found = [composed(match[1]) for match in matches if match is not None]
    return [composed(name.lower()) for name in found] if compiled.flags & re.IGNORECASE else found


def groups_in_file(files: list[str], table: Path, known: list[str]) -> list[str]:
    """Return the name of the group of each file in `files`, read from a CSV file with two columns: the image file, relative to
    the folder of the data set, and the name of its group. The name of a file without its folders is enough if no other file has
    it. A first line that names no image is a header. Lines with other files of the list `known`, which has all files of the
    data set, are ignored.

    Raises    ValueError for a file that cannot be read, lines without two columns, and images that are missing in the CSV file
              or in the folder, which are listed.
    """
    try:
        with table.open(newline="", encoding="utf-8-sig") as stream:
            text = stream.read()
    except (OSError, UnicodeDecodeError) as error:
        expected = "expected a CSV file in UTF-8 with the columns file, group, its path relative to the folder of images"
        raise ValueError(f"groups={str(table)!r} cannot be read ({error}); {expected}") from error
    head = re.sub('"[^"]*"', "", text).partition("\n")[0]  # the first line, without what is in quotes
    separator = ";" if ";" in head and "," not in head else ","
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    rows, begin = [], 1  # the first line of the next row
    try:
        for row in lines:
            rows += [(lines.line_num, row)] * any(row)
            begin = lines.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{table}, line {begin}, cannot be read ({error}); expected two columns, file and group: look for a quotation mark "
            "that is not closed"
        ) from error
    names = {_normal(file): file for file in known}
    count = Counter(map(_name, names))
    names |= {_name(path): file for path, file in names.items() if count[_name(path)] == 1}
    group: dict[str, str] = {}
    unknown = []
    for number, row in rows:
        if len(row) != 2 or not row[1].strip():
            raise ValueError(f"{table}, line {number}: expected two columns, file and group, got {row}")
        file, name = names.get(_normal(row[0])), composed(row[1].strip())
        if file is None:
            unknown += [row[0]] * (number > rows[0][0])
        elif group.setdefault(file, name) != name:
            raise ValueError(f"{table}: {file} is in two groups, {group[file]} and {name}; expected one")
    missing = [file for file in files if file not in group]
    if missing or unknown:
        wrong = [f"no group for {listed(missing)}"] * bool(missing)
        wrong += [f"lines without an image: {listed(unknown)}"] * bool(unknown)
        expected = f"expected a line for each image, with its path in the folder, such as {(files or known)[0]}"
        raise ValueError(f"{table} has {' and '.join(wrong)}; {expected}")
    return [group[file] for file in files]


def _normal(file: str) -> str:
    """Return a file name in one form: "/" between folders, and accents as single characters."""
    return composed(PurePosixPath(file.strip().replace("\\", "/")).as_posix())


def composed(name: str) -> str:
    """Return a name with its accents as single characters (Unicode NFC)."""
    return unicodedata.normalize("NFC", name)


def _name(path: str) -> str:
    """Return the last part of a path, the name of the file."""
    return path.rpartition("/")[2]


def listed(items: list[str]) -> str:
    """Return the first items of a list as text, and how many more there are."""
    more = f" and {len(items) - SHOWN:,} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
