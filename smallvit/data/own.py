"""Loaders for your own data: a folder of image files, or arrays in an .npz archive."""

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable
from difflib import get_close_matches
from itertools import combinations
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .cache import Options, load_pixels
from .dataset import DTYPES, Dataset, as_images, to_pixels, unnormalized
from .decode import MODES
from .files import Found, composed, find_images, find_parts, find_unlabelled, groups_by_name, groups_in_file, listed, state_of
from .images import Images
from .notes import note

PART_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels", "val_images", "val_labels")
POOL_ARRAYS = ("images", "labels", "groups")  # of an archive without a test part
# options that are paths -> what is expected of them
PATHS = {
    "path": "the path of a folder of images or of an .npz archive, such as 'scans'",
    "groups": "the name of a CSV file in the folder of the images, such as groups='patients.csv'",
    "unlabelled": "a folder of images, such as unlabelled='../more'; Run(unlabelled=True) trains on them",
}


def cached_by_path(load: Callable[..., Dataset]) -> Any:
    """Decorator for a function that loads a data set (`load`), so that the files are read only once. A second call with the
    same path and options returns the same data set from memory, unless a file has changed: then the files are read again.
    """
    loaded: dict[str, tuple[str, Dataset]] = {}  # path and options -> the state of the files, and the data set
    signature = inspect.signature(load)

    @functools.wraps(load)
    def loader(*args, **options):
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name in PATHS and not isinstance(value, str | Path) and (value is not None or name == "path"):
                raise ValueError(f"got {name}={value!r}, which is no path; expected {PATHS[name]}")
        top = Path(bound.arguments["path"]).expanduser().absolute()
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in bound.arguments.items()}
        options["path"] = str(top)
        given = [bound.arguments.get(name) for name in ("unlabelled", "groups")]
        unlabelled, groups = [None if name is None else top / Path(name).expanduser() for name in given]
        images = find_parts(top, unlabelled).values() if top.is_dir() else [top]
        state, key = state_of([*images, *filter(None, (unlabelled, groups))]), repr(options)
        if key not in loaded or loaded[key][0] != state:
            loaded.pop(key, None)  # the old images need not stay in memory while the new ones are read
            loaded[key] = state, load(**options)
        return loaded[key][1]

    vars(loader)["cache_clear"] = loaded.clear
    return loader


@cached_by_path
def folder(
    path: str,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    digits: bool = False,
    *,
    folds: int | None = None,
    test: float | None = None,
    groups: str | None = None,
    group_by: str | None = None,
    skip_broken: bool = False,
    pixels: str = "uint8",
    cache: str | None = None,
    unlabelled: str | None = None,
) -> Dataset:
    """Return a `Dataset` of your own image files in the folders `path/train/<class>` and `path/test/<class>`, or in
    `path/<class>` with `folds`, `test` or both. Images are resized to `size` pixels (one side, or height and width) and
    converted to `channels` color channels, if given. Set `digits=True` if a mirrored image shows something else, as with digits
    and letters.

    The folders `path/val/<class>` may hold validation images. The folders of these parts may have other usual names, such as
    `Training` and `Testing`. Hidden files, hidden folders and files that are no images are ignored. Photos are turned upright
    by their EXIF data.

    A second call with the same options returns the same object. The images are read again if a file has changed since.

    size         (height, width) or one number for both, to resize to (bicubic, antialiased); None: all images have the same
                 size
    channels     1 (gray), 3 (RGB) or 4 (RGBA), to convert to; None: all images have the same number of channels
    digits       True if mirroring an image or rotating it by 180 degrees changes its label
    folds        k-fold cross-validation: k runs with successive seeds test every image once; see `Dataset.at_seed`
    test         share of the images that is held out for testing, such as 0.2; the same images for all seeds. 0.0: no test
                 images, for the last training on everything. With `folds`, these images are divided into folds: k runs with
                 successive seeds test each of them once, and the other images are training images of all runs
    groups       CSV file, relative to `path`, with a line `file,group` for each image; images of one group (of one patient,
                 say) are never on different sides of a split
    group_by     regular expression for the group instead: it must match the whole file name without suffix, and its first pair
                 of parentheses is the group
    skip_broken  True: leave out files that cannot be read; `Dataset.skipped` is their number
    pixels       "uint8": 8 bits a channel; "float": float32, which keeps 16-bit values (divided by 65535) and float values
    cache        where decoded images are kept: "memory", "disk" (a memory-mapped file), or None: "disk" if they take more than
                 a quarter of the free memory
    unlabelled   a folder, relative to `path`, with more training images whose class is not known, in any subfolders. Training
                 without labels uses them, such as DINO with `Run(unlabelled=True)`. It should have no images of the groups
                 (patients, say) that are tested

    Without groups, identical images are one group where images are split: by `folds` or `test`, or into training and validation
    images.

    Warns        about CMYK images (converted to RGB), TIFF files with several pages (the first one is read), images of formats
                 that are not read, images outside of the class folders, classes that all have the same subfolders, identical
                 images on both sides of a split or with different labels, unlabelled images that are identical to a test image,
                 and float pixels outside of [0, 1].

    Raises       ValueError for contradicting options, fewer than 2 classes, classes that differ between the parts or look like
                 parts (`Training_set`, `Test_set`), two folders for one part (`val` and `validation`), too few images or groups
                 for a split, groups on both sides, files that cannot be read or differ in size or channels, and a folder
                 `unlabelled` without images or with images of the class folders.
    """
    sides = size if isinstance(size, tuple | None) else (size, size)
    is_size = sides is None or (len(sides) == 2 and all(_is_whole(side) and side > 0 for side in sides))
    if channels not in (None, *MODES) or not is_size:
        expected = "expected channels 1, 3 or 4 and a size in whole pixels, such as 32 or (32, 48) for (height, width)"
        raise ValueError(f"{expected}, got channels={channels!r} and size={size!r}")
    if pixels not in DTYPES or cache not in (None, "memory", "disk"):
        expected = 'expected pixels="uint8" or "float" and cache="memory" or "disk"'
        raise ValueError(f"{expected}, got pixels={pixels!r} and cache={cache!r}")
    top = Path(path)
    further = None if unlabelled is None else top / Path(unlabelled).expanduser()
    found = find_images(top, further)
    labelled = len(found.files)
    files = found.files if further is None else found.files + find_unlabelled(top, further, found.files)
    _check_split(str(top), "pool" not in found.parts, folds, test)
    if groups is not None and group_by is not None:
        raise ValueError(f"got groups={groups!r} and group_by={group_by!r}; expected one of them")

    def group_names(names: list[str]) -> list[str] | None:
        if groups is not None:
            return groups_in_file(names, top / Path(groups).expanduser(), files)
        return None if group_by is None else groups_by_name(names, group_by)

    names = group_names([] if skip_broken else found.files)  # an error comes before the images are read
    mode = MODES[channels] if channels else None
    loaded = load_pixels(top, files, Options(sides, mode, pixels, skip_broken), cache)
    kept = [i for i in loaded.kept if i < labelled]
    if skip_broken:
        names = group_names([files[i] for i in kept])
    name = (top.resolve() if top.name == ".." else top).name
    spec = unnormalized(name, found.classes, loaded.images.shape, digits, DTYPES[pixels])
    no_labels = torch.zeros(len(loaded.kept) - len(kept), dtype=torch.int64)
    everything = Images(loaded.images, torch.cat([found.labels[kept], no_labels]), spec, tuple(files[i] for i in loaded.kept))
    images = everything.take(slice(len(kept)))
    numbers = None if names is None else torch.from_numpy(np.unique(names, return_inverse=True)[1].astype(np.int64))
    if names is not None and len(set(names)) == len(names):
        option = f"groups={groups!r}" if groups is not None else f'group_by=r"{group_by}"'
        note(f"{top}: {option} gives each of the {len(names):,} images a group of its own; expected some images in one group")
    parts = _slices(found, kept)
    for part, where in parts.items():
        if missing := {*range(len(found.classes))} - {*images.labels[where].tolist()}:
            name = found.classes[min(missing)]
            raise ValueError(f"{top}: no image of class {name!r} in {part} can be read; replace the files, or remove the class")
    if pixels == "float":
        _warn_of_range(images)
    skipped = len(files) - len(loaded.kept)
    if "pool" in parts:
        data = Dataset.from_pool(images, numbers, folds=folds, test=test, skipped=skipped)
    else:
        if names is not None:
            _check_groups(top, {part: set(names[where]) for part, where in parts.items()})
        data = Dataset.from_parts(images, parts, numbers, skipped=skipped)
    if further is None:
        return data
    if not len(no_labels):
        raise ValueError(f"unlabelled={unlabelled!r}: no image in it can be read; replace the files, or leave unlabelled= out")
    return data.with_unlabelled(everything.take(slice(len(kept), None)))


# Options added since version 0.2.0, each with the value at which the data are what they were before
folder.added_options = {"skip_broken": False, "pixels": "uint8", "unlabelled": None}
# Options that do not change the data: a run with another value is the same run
folder.neutral_options = ("cache",)


def _is_whole(number: Any) -> bool:
    """Return whether a value is a whole number; True and False are none."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _check_split(name: str, has_parts: bool, folds: int | None, test: float | None):
    """Raise ValueError unless it is clear which images are test images. `name` is that of the folder or archive. If it
    `has_parts` train and test, neither `folds` nor `test` may be given; otherwise one of them, or both.
    """
    given = [f"{option}={value!r}" for option, value in (("folds", folds), ("test", test)) if value is not None]
    if has_parts and given:
        raise ValueError(f"{name} has training and test images of its own, got {given[0]}; leave it out")
    if not has_parts and not given:
        raise ValueError(
            f"{name} has no train and test parts; expected either folds=5 (cross-validation: 5 runs test every image once), "
            "test=0.2 (a fixed fifth of the images is held out), or both (5 runs test every image of it once), got neither"
        )


def _slices(found: Found, kept: list[int]) -> dict[str, slice]:
    """Return where the images of each part are among the images that could be read. `found` are all files, part by part, and
    `kept` are the positions of the readable ones.
    """
    slices, start, end = {}, 0, 0
    for part, files in found.parts.items():
        end += len(files)
        stop = bisect_left(kept, end)
        slices[part], start = slice(start, stop), stop
    return slices


def _check_groups(top: Path, parts: dict[str, set[str]]):
    """Raise ValueError if a group has images in two parts. `parts` are the names of the groups in each part of the folder
    `top`.
    """
    for one, other in combinations(parts, 2):
        if both := sorted(parts[one] & parts[other]):
            text = f"{one} and {other} both have images of {listed(both)}"
            raise ValueError(f"{top}: expected all images of a group in one part, but {text}; move them to one part")


def _warn_of_range(images: Images):
    """Warn if float pixels lie outside of [0, 1], because transforms of color and noise would cut them there."""
    bounds = [part.aminmax() for part in images.parts()]
    low, high = min(float(b.min) for b in bounds), max(float(b.max) for b in bounds)
    if low < 0 or high > 1:
        text = "they are kept, but transforms that change colors or add noise cut them at 0 and 1"
        note(f"{images.spec.name}: pixel values go from {low:.4g} to {high:.4g}; {text}")


@cached_by_path
def arrays(
    path: str, digits: bool = False, *, folds: int | None = None, test: float | None = None, pixels: str = "uint8"
) -> Dataset:
    """Return a `Dataset` from your own .npz archive at `path`. The archive holds the arrays train_images, train_labels,
    test_images and test_labels, and optionally val_images and val_labels. Set `digits=True` if a mirrored image shows something
    else, as with digits and letters.

    This is MedMNIST's layout. Images are `n h w` or `n h w c` with 1, 3 or 4 channels, uint8 or floats in [0, 1], which are
    rounded to 8 bits. `pixels="float"` keeps the values of floats and of 16 bits (divided by 65535), as in `folder`. Labels are
    integers from 0, `n` or `n 1`. `digits=True` says that mirroring an image or rotating it by 180 degrees changes its label.

    An archive without a test part holds the arrays images, labels and optionally groups (`n`, integers or text), and needs one
    of the options `folds` and `test`, or both. They are those of `folder`. Any archive may also hold the array
    unlabelled_images: more training images whose class is not known, for training without labels.

    A second call with the same options returns the same object. The archive is read again if it has changed since.

    Warns     about floats that are rounded to 8 bits and have more values than that, about float pixels outside of [0, 1],
              about identical images in different parts, and about identical images with different labels.

    Raises    ValueError for fewer than 2 classes, several labels for each image, 3-D volumes, floats beside integers with
              pixels="float", and for an archive that cannot be read, lacks an array, or has one that would not be used.
    """
    if pixels not in DTYPES:
        raise ValueError(f'expected pixels="uint8" or "float", got pixels={pixels!r}')
    file = Path(path)
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
    except Exception as error:  # numpy, zipfile and zlib each raise their own errors for a damaged file
        raise ValueError(f"{file} cannot be read as an .npz of plain arrays ({error})") from error
    is_pool = not found.keys().isdisjoint(POOL_ARRAYS) and "train_images" not in found
    _check_layout(file, found, is_pool)
    prefixes = [""] if is_pool else ["train_", "test_"] + ["val_"] * bool({"val_images", "val_labels"} & found.keys())
    missing = {prefix + kind for prefix in prefixes for kind in ("images", "labels")} - found.keys()
    if missing:
        raise ValueError(f"{file} has no {', '.join(sorted(missing))}; it has {', '.join(found)}")
    _check_split(str(file), not is_pool, folds, test)
    for prefix in prefixes:
        _check_kind(file.name, found[f"{prefix}images"], found[f"{prefix}labels"], prefix[:-1] or "all")
    _check_one_scale(file, found, pixels)
    present = np.unique(found[f"{prefixes[0]}labels"]).tolist()
    if present != [*range(len(present))]:
        name = f"{prefixes[0]}labels"
        raise ValueError(f"{file}: {name} must be 0, 1, 2, ... with an image for each, got {present[:20]}")
    classes = tuple(str(label) for label in present)
    if not is_pool:
        content = {prefix[:-1]: (found[f"{prefix}images"], found[f"{prefix}labels"]) for prefix in prefixes}
        data = Dataset.from_arrays(file.name, content, classes, digits=digits, pixels=pixels, warn=True)
        _check_values(data.train, found["train_images"])
        return _with_unlabelled(data.with_repeats_together(), found, pixels)
    tensor = to_pixels(found["images"], f"{file.name}, images", pixels)
    images = as_images(tensor, found["labels"], unnormalized(file.name, classes, tensor.shape, digits, DTYPES[pixels]), "all")
    _check_values(images, found["images"])
    groups = found.get("groups")
    if groups is not None:
        if groups.shape not in ((len(images),), (len(images), 1)) or groups.dtype.kind not in "iuU":
            expected = f"expected {len(images)} integers or texts"
            raise ValueError(f"{file.name}, groups: {expected}, got {groups.dtype} {groups.shape}")
        names = [composed(name.strip()) for name in groups.ravel().tolist()] if groups.dtype.kind == "U" else groups.ravel()
        groups = torch.from_numpy(np.unique(names, return_inverse=True)[1].astype(np.int64))
    return _with_unlabelled(Dataset.from_pool(images, groups, folds=folds, test=test), found, pixels)


# Options added since version 0.2.0, as in `folder`
arrays.added_options = {"pixels": "uint8"}


def _check_layout(file: Path, archive: dict[str, np.ndarray], is_pool: bool):
    """Raise ValueError for arrays of an archive that would not be used: those with unknown names, parts beside `images`, and
    `groups` or `images` beside parts. `archive` is a dict from the names of the arrays in `file` to the arrays.
    """
    known = (*PART_ARRAYS, *POOL_ARRAYS, "unlabelled_images")
    if unknown := sorted(archive.keys() - {*known}):
        near = [get_close_matches(name, known, 1, 0.8) for name in unknown]
        texts = [f"{name} (did you mean {match[0]}?)" if match else name for name, match in zip(unknown, near)]
        raise ValueError(
            f"{file} has arrays with unknown names, which would not be used: {listed(texts)}; expected only the names "
            f"{', '.join(known)}; save the archive with these names, and without other arrays"
        )
    if unused := sorted(archive.keys() & {*(PART_ARRAYS if is_pool else POOL_ARRAYS)}):
        used = ", ".join(sorted(archive.keys() & {*POOL_ARRAYS})) if is_pool else "the parts train and test"
        raise ValueError(
            f"{file} has {used}, and also {', '.join(unused)}, which would not be used; expected train_images, train_labels, "
            "test_images and test_labels, or images, labels and groups; save an archive with one of them"
        )


def _check_one_scale(file: Path, archive: dict[str, np.ndarray], pixels: str):
    """Raise ValueError if the images of an archive are partly floats, which keep their values, and partly integers, which are
    divided by the largest possible one. `archive` is a dict from the names of the arrays in `file` to the arrays, and `pixels`
    is the option of `arrays`.
    """
    kinds = {name: array.dtype for name, array in archive.items() if name.endswith("images")}
    if pixels == "float" and len({kind.kind == "f" for kind in kinds.values()}) > 1:
        found = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        raise ValueError(f"{file} has images of floats and of integers ({found}); expected one kind of pixels in all arrays")


def _with_unlabelled(data: Dataset, archive: dict[str, np.ndarray], pixels: str) -> Dataset:
    """Return the data set with the images without labels of an archive, if it has any. `archive` is a dict from the names of
    its arrays to the arrays, and `pixels` is the option of `arrays`.
    """
    if "unlabelled_images" not in archive:
        return data
    tensor = to_pixels(archive["unlabelled_images"], f"{data.spec.name}, unlabelled images", pixels)
    return data.with_unlabelled(as_images(tensor, np.zeros(len(tensor), dtype=np.int64), data.spec, "unlabelled images"))


def _check_values(images: Images, array: np.ndarray):
    """Warn if pixels have lost values, or lie outside of [0, 1]. `images` were made from `array`."""
    if images.spec.dtype == "float32":
        _warn_of_range(images)
    elif array.dtype.kind == "f" and np.abs(array * 255 - np.rint(array * 255)).max() > 1e-3:
        note(f'{images.spec.name}: floats are rounded to 8 bits (256 values); pixels="float" keeps them')


def _check_kind(name: str, images: np.ndarray, labels: np.ndarray, part: str):
    """Raise ValueError for 3-D volumes and for several labels an image, which some sets of MedMNIST have, and for one-hot
    labels. `name` is that of the archive, and `part` that of its part.
    """
    if images.ndim == 5 or (images.ndim == 4 and min(images.shape[1:]) > 4):
        raise ValueError(
            f"{name}, {part} images: {images.shape} are 3-D volumes, such as those of OrganMNIST3D, or images with more than 4 "
            "channels; expected n h w, or n h w c with 1, 3 or 4 channels: save one slice of each volume, for example "
            "images[:, images.shape[1] // 2]"
        )
    if labels.ndim == 2 and labels.shape[1] > 1:
        if np.isin(labels, (0, 1)).all() and (labels.sum(1) == 1).all():
            raise ValueError(
                f"{name}, {part} labels: expected one integer for each image, got one-hot labels of {labels.shape[1]} classes; "
                "save labels.argmax(1)"
            )
        raise ValueError(
            f"{name}, {part} labels: expected one integer for each image, got {labels.shape[1]} labels "
            "(multi-label), such as those of ChestMNIST; save one column as the labels, for example labels[:, 0]"
        )
