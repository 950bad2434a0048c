"""People's own data: a folder of image files, or arrays in an .npz."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .images import Dataset


def remembered(load: Callable) -> Callable:
    """Load once, by the place that the path means today and by the choices, however they are written."""
    cached, signature = functools.cache(load), inspect.signature(load)

    @functools.wraps(load)
    def loader(*args, **choices):
        bound = signature.bind(*args, **choices)
        bound.apply_defaults()
        chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in bound.arguments.items()}
        return cached(**chosen | {"path": str(Path(chosen["path"]).expanduser().absolute())})

    loader.cache_clear = cached.cache_clear
    return loader


@remembered
def folder(path: str, size: int | tuple[int, int] | None = None, channels: int | None = None, digits: bool = False) -> Dataset:
    """Your own image files, in torchvision's ImageFolder layout: `path/train/<class>/*.png`, `path/test`, maybe `path/val`.

    `size`, (height, width) or one number for both, resizes (bicubic, antialiased); without it all images must be of one size.
    `channels` converts to 1 (grey), 3 (RGB) or 4 (RGBA); without it the files decide, and must agree. Photographs are turned
    the way up that their EXIF says. What is hidden (`.ipynb_checkpoints`, `._1.png`) is passed over.
    """
    size = (size, size) if isinstance(size, int) else size
    if channels not in (None, 1, 3, 4) or (size is not None and (len(size) != 2 or min(size) < 1)):
        raise ValueError(f"expected channels 1, 3 or 4 and a size (height, width), got channels={channels} and size={size}")
    top = Path(path)
    parts = ["train", "test"] + ["val"] * (top / "val").is_dir()
    try:
        found = {part: _listed(top / part) for part in parts}
    except OSError as error:
        raise ValueError(f"{top}: expected train/<class>/*.png and test/<class>/*.png ({error})") from error
    classes, files = found["train"]
    for part in parts:
        if found[part][0] != classes:
            differ = sorted({*classes} ^ {*found[part][0]})
            raise ValueError(f"{top}: expected the same classes in all parts, but train and {part} differ in {differ[:20]}")

    first = next(iter(files))
    shape = _read_image(first, size, channels).shape
    splits = {}
    for part in parts:
        labels = found[part][1]
        images = {file: _read_image(file, size, channels) for file in labels}
        for file, image in images.items():
            if image.shape != shape:
                cure = "channels=" if image.shape[:2] == shape[:2] else "size="
                raise ValueError(f"{file} is {image.shape} (h, w, c) but {first} is {shape}: pass {cure}")
        splits[part] = np.stack([*images.values()]), np.array([*labels.values()])
    return Dataset.from_arrays(top.name, splits, tuple(classes), digits=digits)


def _listed(place: Path) -> tuple[list[str], dict[str, int]]:
    """The classes, which are the folders in `place`, and the class of each image file below them; nothing that is hidden."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    def shown(file: str) -> bool:
        parts = Path(file).relative_to(place).parts
        return file.lower().endswith(IMG_EXTENSIONS) and not any(part.startswith(".") for part in parts)

    classes = [name for name in find_classes(place)[0] if not name.startswith(".")]
    if not classes:
        raise FileNotFoundError(f"there is no folder in {place}")
    return classes, dict(make_dataset(place, {name: at for at, name in enumerate(classes)}, is_valid_file=shown))


def _read_image(file: str, size: tuple[int, int] | None, channels: int | None) -> np.ndarray:
    """One image file as uint8 h w c, the way up that the camera says."""
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as image:
            image = ImageOps.exif_transpose(image)
    except Exception as error:  # every format has its own kinds
        raise ValueError(f"{file} cannot be read as an image ({error})") from error
    channels = channels or {"1": 1, "L": 1, "RGB": 3, "RGBA": 4}.get(image.mode)
    if channels is None or image.mode[0] in "IF":  # 16-bit and float greys would be cut off at 255
        raise ValueError(f"{file} is {image.mode}: expected 8-bit grey (L), RGB or RGBA; channels= converts other 8-bit modes")
    alpha = "A" in image.getbands() or "transparency" in image.info
    if channels < 4 and alpha and np.array(image.convert("RGBA"))[..., 3].min() < 255:
        raise ValueError(
            f"{file} is transparent in places, and what is behind it is not known; expected channels=4, or no alpha"
        )
    image = image.convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])
    if size is not None:
        image = image.resize(size[::-1], Image.Resampling.BICUBIC)
    return np.array(image).reshape(image.height, image.width, channels)


@remembered
def arrays(path: str, digits: bool = False) -> Dataset:
    """Your own arrays, an .npz in MedMNIST's layout: train_images, train_labels, test_images, test_labels, maybe val_*.

    Images are n h w or n h w c with 1, 3 or 4 channels, uint8 or floats in [0, 1]; labels are integers from 0, n or n 1.
    """
    file = Path(path)
    try:
        with np.load(file, allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
    except Exception as error:  # numpy, zipfile and zlib each have their own for a file that is cut short
        raise ValueError(f"{file} cannot be read as an .npz of plain arrays ({error})") from error
    parts = ["train", "test"] + ["val"] * bool({"val_images", "val_labels"} & found.keys())
    missing = {f"{part}_{kind}" for part in parts for kind in ("images", "labels")} - found.keys()
    if missing:
        raise ValueError(f"{file} has no {', '.join(sorted(missing))}; it has {', '.join(found)}")
    present = np.unique(found["train_labels"]).tolist()
    if present != [*range(len(present))]:
        raise ValueError(f"{file}: train_labels must be 0, 1, 2, ... with an image for each, got {present[:20]}")
    splits = {part: (found[f"{part}_images"], found[f"{part}_labels"]) for part in parts}
    return Dataset.from_arrays(file.name, splits, tuple(str(label) for label in present), digits=digits)
