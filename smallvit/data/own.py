"""Loaders for your own data: a folder of image files, or arrays in an .npz archive."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .dataset import Dataset
from .preprocess import MODES, read_image


def cached_by_path(load: Callable[..., Dataset]) -> Any:
    """Decorator for a function that loads a data set (`load`), so that the files are read only once. A second call with the
    same path and options returns the same data set from memory.
    """
    cached, signature = functools.cache(load), inspect.signature(load)

    @functools.wraps(load)
    def loader(*args, **options):
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in bound.arguments.items()}
        return cached(**options | {"path": str(Path(bound.arguments["path"]).expanduser().absolute())})

    vars(loader)["cache_clear"] = cached.cache_clear
    return loader


@cached_by_path
def folder(
    path: str,
    size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    digits: bool = False,
    *,
    folds: int | None = None,
) -> Dataset:
    """Return a `Dataset` of your own image files in the folders `path/train/<class>` and `path/test/<class>`. Images are
    resized to `size` pixels (one side, or height and width) and converted to `channels` color channels, if given. Set
    `digits=True` if a mirrored image shows something else, as with digits and letters.

    The folders `path/val/<class>` may hold validation images.

    This is the layout of torchvision's ImageFolder; all its image formats are read, and hidden files and folders are ignored.
    Photos are turned upright by their EXIF data.

    size       (height, width) or one number for both, to resize to (bicubic, antialiased); None: all images have the same size
    channels   1 (gray), 3 (RGB) or 4 (RGBA), to convert to; None: all images have the same mode
    digits     True if mirroring an image or rotating it by 180 degrees changes its label

    Raises     ValueError for fewer than 2 classes, classes that differ between the parts, and files that cannot be read or
               differ in size or channels.
    """
    size = (size, size) if isinstance(size, int) else size
    if channels not in (None, *MODES) or (size is not None and (len(size) != 2 or min(size) < 1)):
        raise ValueError(f"expected channels 1, 3 or 4 and a size (height, width), got channels={channels} and size={size}")
    top = Path(path)
    splits = ["train", "test"] + ["val"] * (top / "val").is_dir()
    if folds is not None:
        splits, names = ["train"], {"train": top}
    else:
        names = {split: top / split for split in splits}
    try:
        listed = {split: _list_images(names[split]) for split in splits}
    except OSError as error:
        raise ValueError(f"{top}: expected train/<class>/*.png and test/<class>/*.png ({error})") from error
    classes, files = listed["train"]
    for split in splits:
        if listed[split][0] != classes:
            differ = sorted({*classes} ^ {*listed[split][0]})
            raise ValueError(f"{top}: expected the same classes in all parts, but train and {split} differ in {differ[:20]}")

    mode, first = MODES[channels] if channels else None, next(iter(files))
    shape = read_image(first, size, mode).shape
    arrays = {}
    for split, (_, labels) in listed.items():
        images = {file: read_image(file, size, mode) for file in labels}
        for file, image in images.items():
            if image.shape != shape:
                option = "channels=" if image.shape[:2] == shape[:2] else "size="
                raise ValueError(f"{file} is {image.shape} (h, w, c) but {first} is {shape}: set {option}")
        arrays[split] = np.stack([*images.values()]), np.array([*labels.values()])
    return Dataset.from_arrays(top.name, arrays, tuple(classes), digits=digits, folds=folds)


def _list_images(directory: Path) -> tuple[list[str], dict[str, int]]:
    """Return a list of class names and a dict from image file to class index. The class names are the names of the folders in
    `directory`.

    Hidden files and folders are ignored.

    Raises    OSError if there are no class folders, or a class has no images.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    def is_visible_image(file: str) -> bool:
        parts = Path(file).relative_to(directory).parts
        return file.lower().endswith(IMG_EXTENSIONS) and not any(part.startswith(".") for part in parts)

    classes = [name for name in find_classes(directory)[0] if not name.startswith(".")]
    if not classes:
        raise FileNotFoundError(f"there is no folder in {directory}")
    index = {name: i for i, name in enumerate(classes)}
    return classes, dict(make_dataset(directory, index, is_valid_file=is_visible_image))


@cached_by_path
def arrays(path: str, digits: bool = False) -> Dataset:
    """Return a `Dataset` from your own .npz archive at `path`. The archive holds the arrays train_images, train_labels,
    test_images and test_labels, and optionally val_images and val_labels. Set `digits=True` if a mirrored image shows something
    else, as with digits and letters.

    This is MedMNIST's layout. Images are `n h w` or `n h w c` with 1, 3 or 4 channels, uint8 or floats in [0, 1]. Labels are
    integers from 0, `n` or `n 1`. `digits=True` says that mirroring an image or rotating it by 180 degrees changes its label.

    Raises    ValueError for fewer than 2 classes, and for an archive that cannot be read or lacks an array.
    """
    file = Path(path)
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
    except Exception as error:  # numpy, zipfile and zlib each raise their own errors for a damaged file
        raise ValueError(f"{file} cannot be read as an .npz of plain arrays ({error})") from error
    splits = ["train", "test"] + ["val"] * bool({"val_images", "val_labels"} & found.keys())
    missing = {f"{split}_{kind}" for split in splits for kind in ("images", "labels")} - found.keys()
    if missing:
        raise ValueError(f"{file} has no {', '.join(sorted(missing))}; it has {', '.join(found)}")
    present = np.unique(found["train_labels"]).tolist()
    if present != [*range(len(present))]:
        raise ValueError(f"{file}: train_labels must be 0, 1, 2, ... with an image for each, got {present[:20]}")
    content = {split: (found[f"{split}_images"], found[f"{split}_labels"]) for split in splits}
    return Dataset.from_arrays(file.name, content, tuple(str(label) for label in present), digits=digits)
