"""Preprocess: turn image files, PIL images, arrays or tensors into the normalized input of a model."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .decode import MODES, read_image
from .files import expanded
from .images import DataSpec, normalize
from .notes import note


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """A callable object that converts images to model input: normalized float32 pixels of shape (batch, channels, height,
    width). The images are files, PIL images, arrays or tensors.

    size        (height, width) of the model input in pixels
    channels    number of channels: 1 (gray), 3 (RGB) or 4 (RGBA)
    mean, std   one number for each channel: the model input is (pixels - mean) / std, for pixels in [0, 1]
    classes     names of the classes, in the order of the logits
    dtype       "uint8" if the model was trained on pixels of 8 bits, or "float32" if it was trained with `pixels="float"`

    Call it with one image or several:

    paths, PIL images   one, or a list or generator of them: turned upright by their EXIF data, converted to `mode` and resized
                        to `size` (bicubic, antialiased), exactly as `folder` reads its files
    numpy arrays        `h w`, `h w c`, `n h w` or `n h w c`, uint8 or floats in [0, 1]
    torch tensors       `c h w` or `b c h w`, uint8 or floats in [0, 1]

    With dtype="float32", files, arrays and tensors of 16 bits are divided by 65535, and floats may have any value.

    Raises    ValueError for a file that cannot be read, and for an array or tensor of another size, number of channels, type
              or range of values. Arrays and tensors are never resized.
    """

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]
    dtype: str = "uint8"

    def __post_init__(self):
        def is_tuple(value: Any, kind: Any, length: int) -> bool:
            fits = isinstance(value, tuple) and len(value) == length
            return fits and all(isinstance(one, kind) and not isinstance(one, bool) for one in value)

        c, numbers = self.channels, (int, float)
        mean, std = is_tuple(self.mean, numbers, c) and all(map(isfinite, self.mean)), is_tuple(self.std, numbers, c)
        for name, valid, expected in (
            ("size", is_tuple(self.size, int, 2) and min(self.size) >= 1, "(height, width) in pixels"),
            ("channels", type(c) is int and c >= 1, "a number of channels, such as 1 or 3"),
            ("mean", mean, "one finite number for each channel"),
            ("std", std and all(0 < one < float("inf") for one in self.std), "one number above 0 for each channel"),
            ("classes", self.classes and is_tuple(self.classes, str, len(self.classes)), "the names of the classes"),
            ("dtype", self.dtype in ("uint8", "float32"), "uint8 or float32"),
        ):
            if not valid:
                raise ValueError(f"Preprocess: {name} is {getattr(self, name)!r}; expected {expected}")

    @classmethod
    def from_spec(cls, spec: DataSpec) -> "Preprocess":
        """Return the `Preprocess` for a model that was trained on a data set. `spec` is the description of the data set."""
        return cls(size=spec.size, channels=spec.channels, mean=spec.mean, std=spec.std, classes=spec.classes, dtype=spec.dtype)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of all fields, which can be saved as JSON. The method `from_dict` converts the dict back. The field
        `dtype` is left out if it is "uint8".
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.dtype == "uint8":  # as in versions without this field
            del values["dtype"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocess":
        """Return a `Preprocess` with the fields in the dict `values`. Raise ValueError if a field is missing, unknown or
        invalid.
        """
        names = {field.name for field in fields(cls)} - {"dtype"}
        if not isinstance(values, dict) or values.keys() - {"dtype"} != names:
            wrong: Any = repr(values)
            if isinstance(values, dict):
                wrong = sorted(map(str, names.symmetric_difference(values) - {"dtype"}))
            raise ValueError(f"Preprocess: expected a dictionary of {', '.join(sorted(names))}; missing or unknown: {wrong}")
        converted: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**converted)

    @property
    def mode(self) -> str:
        """Return PIL's name of the color mode: "L" for 1 channel (gray), "RGB" for 3 channels or "RGBA" for 4. Raise ValueError
        for another number of channels.
        """
        if self.channels not in MODES:
            raise ValueError(f"image files cannot have {self.channels} channels; pass arrays or tensors instead")
        return MODES[self.channels]

    def __call__(self, images: Any) -> Tensor:
        return normalize(self.pixels(images), self.mean, self.std)

    def pixels(self, images: Any) -> Tensor:
        """Return images as float32 pixels in [0, 1] (any values with dtype="float32"), shape (batch, channels, height, width).
        `images` is one image or several: file paths, PIL images, numpy arrays or torch tensors.
        """
        from PIL.Image import Image

        images = list(images) if isinstance(images, Iterator) else images
        if isinstance(images, list | tuple):
            if not images:
                raise ValueError("expected at least one image, got an empty list")
            return torch.cat([self.pixels(image) for image in images])
        is_path = isinstance(images, str | Path)
        images = expanded(str(images)) if is_path else images
        if is_path and (os.path.isdir(images) or ("*" in str(images) and not os.path.exists(images))):
            raise ValueError(
                f"{images} is a folder or a pattern; expected image files: pass a list of them, such as "
                "sorted(Path('scans').glob('*.png'))"
            )
        if isinstance(images, str | Path | Image):
            images, _, several = read_image(images, self.size, self.mode, "uint8" if self.dtype == "uint8" else "float")
            if several:
                note("of TIFF files with several pages, only the first one is read")
        (h, w), c = self.size, self.channels
        if isinstance(images, np.ndarray):
            shapes, is_float = [(h, w, c)] + [(h, w)] * (c == 1), images.dtype.kind == "f"
        elif isinstance(images, Tensor):
            shapes, is_float = [(c, h, w)], images.is_floating_point()
        else:
            raise ValueError(f"got {type(images).__name__}; expected paths, PIL images, numpy arrays or torch tensors")
        if isinstance(images, np.ndarray) and images.dtype.kind in "OSU":
            text = "expected pixels; if it holds paths, pass a list: array.tolist()"
            raise ValueError(f"got an array of texts or objects ({images.dtype}); {text}")
        shape = tuple(images.shape)
        if 0 in shape or (shape not in shapes and shape[1:] not in shapes):
            raise ValueError(
                f"got an array or tensor of shape {shape}; expected {' or '.join(map(str, shapes))} for one image, or (n, ...) "
                "for n images; only paths and PIL images are converted and resized"
            )
        largest = {np.dtype(np.uint8): 255, torch.uint8: 255}
        if self.dtype == "float32":
            largest |= {np.dtype(np.uint16): 65535, torch.uint16: 65535}
        if not is_float and images.dtype not in largest:
            expected = "uint8, uint16 or floats" if self.dtype == "float32" else "uint8, or floats in [0, 1]"
            raise ValueError(f"got pixels of type {images.dtype}; expected {expected}")
        scale = 1 if is_float else largest[images.dtype]
        if isinstance(images, np.ndarray):
            images = np.array(images, np.float32 if is_float else None)  # a copy that torch may write to
            images = torch.from_numpy(images).reshape(-1, h, w, c).movedim(-1, 1)
        pixels = images.reshape(-1, c, h, w).contiguous().float()
        if not is_float:
            if float(pixels.max()) == 1:
                note(f"got images whose largest pixel is 1 of {scale}, so they are nearly black; pass floats for 0 and 1")
            return pixels / scale
        if not pixels.isfinite().all():
            expected = "finite floats" if self.dtype == "float32" else "pixels in [0, 1], not normalized"
            raise ValueError(f"got pixels with NaN or infinite values; expected {expected}")
        if self.dtype == "float32":
            return pixels
        low, high = (float(value) for value in pixels.aminmax())
        if not (low >= 0 and high <= 1):
            advice = "pass uint8 for values from 0 to 255" if high > 20 else "these look normalized already"
            raise ValueError(f"got floats from {low:.3g} to {high:.3g}; {advice}; expected pixels in [0, 1], not normalized")
        return pixels
