"""Preprocess: turn image files, PIL images, arrays or tensors into the normalized input of a model."""

from contextlib import nullcontext
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .images import DataSpec, normalize

MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """A callable object that converts images to model input: normalized float32 pixels of shape (batch, channels, height,
    width). The images are files, PIL images, arrays or tensors.

    size        (height, width) of the model input in pixels
    channels    number of channels: 1 (gray), 3 (RGB) or 4 (RGBA)
    mean, std   one number for each channel: the model input is (pixels - mean) / std, for pixels in [0, 1]
    classes     names of the classes, in the order of the logits

    Call it with one image or several:

    paths, PIL images   one, or a list of them: turned upright by their EXIF data, converted to `mode` and resized to `size`
                        (bicubic, antialiased), exactly as `folder` reads its files
    numpy arrays        `h w`, `h w c`, `n h w` or `n h w c`, uint8 or floats in [0, 1]
    torch tensors       `c h w` or `b c h w`, uint8 or floats in [0, 1]

    Raises    ValueError for a file that cannot be read, and for an array or tensor of another size, number of channels, type
              or range of values. Arrays and tensors are never resized.
    """

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: tuple[str, ...]

    def __post_init__(self):
        def is_tuple(value: Any, kind: Any, length: int) -> bool:
            return isinstance(value, tuple) and len(value) == length and all(isinstance(one, kind) for one in value)

        c, numbers = self.channels, (int, float)
        mean, std = is_tuple(self.mean, numbers, c) and all(map(isfinite, self.mean)), is_tuple(self.std, numbers, c)
        for name, valid, expected in (
            ("size", is_tuple(self.size, int, 2) and min(self.size) >= 1, "(height, width) in pixels"),
            ("channels", type(c) is int and c >= 1, "a number of channels, such as 1 or 3"),
            ("mean", mean, "one finite number for each channel"),
            ("std", std and all(0 < one < float("inf") for one in self.std), "one number above 0 for each channel"),
            ("classes", self.classes and is_tuple(self.classes, str, len(self.classes)), "the names of the classes"),
        ):
            if not valid:
                raise ValueError(f"Preprocess: {name} is {getattr(self, name)!r}; expected {expected}")

    @classmethod
    def from_spec(cls, spec: DataSpec) -> "Preprocess":
        """Return the `Preprocess` for a model that was trained on a data set. `spec` is the description of the data set."""
        return cls(size=spec.size, channels=spec.channels, mean=spec.mean, std=spec.std, classes=spec.classes)

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of all fields, which can be saved as JSON. The method `from_dict` converts the dict back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocess":
        """Return a `Preprocess` with the fields in the dict `values`. Raise ValueError if a field is missing, unknown or
        invalid.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            wrong = sorted(map(str, names.symmetric_difference(values))) if isinstance(values, dict) else repr(values)
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
        """Return images as float32 pixels in [0, 1], shape (batch, channels, height, width). `images` is one image or several:
        file paths, PIL images, numpy arrays or torch tensors.
        """
        from PIL.Image import Image

        if isinstance(images, list | tuple):
            if not images:
                raise ValueError("expected at least one image, got an empty list")
            return torch.cat([self.pixels(image) for image in images])
        if isinstance(images, str | Path | Image):
            images = read_image(images, self.size, self.mode)
        (h, w), c = self.size, self.channels
        if isinstance(images, np.ndarray):
            shapes, is_float = [(h, w, c)] + [(h, w)] * (c == 1), images.dtype.kind == "f"
        elif isinstance(images, Tensor):
            shapes, is_float = [(c, h, w)], images.is_floating_point()
        else:
            raise ValueError(f"got {type(images).__name__}; expected paths, PIL images, numpy arrays or torch tensors")
        shape = tuple(images.shape)
        if 0 in shape or (shape not in shapes and shape[1:] not in shapes):
            raise ValueError(
                f"got an array or tensor of shape {shape}; expected {' or '.join(map(str, shapes))} for one image, or (n, ...) "
                "for n images; only paths and PIL images are converted and resized"
            )
        if not is_float and images.dtype not in (np.uint8, torch.uint8):
            raise ValueError(f"got pixels of type {images.dtype}; expected uint8, or floats in [0, 1]")
        if isinstance(images, np.ndarray):
            images = np.ascontiguousarray(images.astype(np.float32) if is_float else images)
            images = torch.from_numpy(images).reshape(-1, h, w, c).movedim(-1, 1)
        pixels = images.reshape(-1, c, h, w).contiguous().float()
        if not is_float:
            return pixels / 255
        low, high = (float(value) for value in pixels.aminmax())
        if not (low >= 0 and high <= 1):
            advice = "pass uint8 for values from 0 to 255" if high > 20 else "these look normalized already"
            raise ValueError(f"got floats from {low:.3g} to {high:.3g}; {advice}; expected pixels in [0, 1], not normalized")
        return pixels


def read_image(source: Any, size: tuple[int, int] | None, mode: str | None) -> np.ndarray:
    """Return an image as a uint8 array (h, w, c). `source` is an image file or a PIL image. The image is converted to the color
    `mode` ("L", "RGB" or "RGBA") and resized to `size`, if given.

    The image is first turned upright by its EXIF data.

    size    (height, width) to resize to, bicubic and antialiased; None keeps the size
    mode    "L", "RGB" or "RGBA" to convert to; None keeps the mode of the image, which must be one of these

    Raises    ValueError for an unreadable file, more than 8 bits a channel, and transparency that the mode cannot hold.
    """
    from PIL import Image, ImageOps

    is_file = isinstance(source, str | Path)
    name = source if is_file else "the PIL image"
    try:
        with Image.open(source) if is_file else nullcontext(source) as image:
            image = ImageOps.exif_transpose(image)
    except Exception as error:  # each image format raises its own kinds of errors
        raise ValueError(f"{name} cannot be read as an image ({error})") from error
    mode = mode or {"1": "L", "L": "L", "RGB": "RGB", "RGBA": "RGBA"}.get(image.mode)
    if mode is None or image.mode[0] in "IF":  # converting 16-bit and float grays would clip them at 255
        raise ValueError(f"{name} is {image.mode}: expected 8-bit gray (L), RGB or RGBA; channels= converts other 8-bit modes")
    alpha = "A" in image.getbands() or "transparency" in image.info
    if mode != "RGBA" and alpha and np.array(image.convert("RGBA"))[..., 3].min() < 255:
        raise ValueError(f"{name} is transparent in places, and its background is unknown: use channels=4, or remove the alpha")
    image = image.convert(mode)
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return np.array(image).reshape(image.height, image.width, len(mode))
