"""One image file -> an array of pixels: color modes, bits, transparency, orientation and resizing."""

import re
from contextlib import nullcontext, suppress
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MODES = {1: "L", 3: "RGB", 4: "RGBA"}
DICOM, TIFF = (".dcm", ".dicom"), (".tif", ".tiff")
# the color mode to which an 8-bit image is converted if the user asks for none
NATURAL = {
    "1": "L", "L": "L", "LA": "L", "La": "L", "RGB": "RGB", "P": "RGB", "PA": "RGB", "CMYK": "RGB", "YCbCr": "RGB",
    "LAB": "RGB", "HSV": "RGB", "RGBA": "RGBA", "RGBa": "RGBA",
}  # fmt: skip
NO_ALPHA = "save it without transparency, or train with the option channels=4 of the data"  # what to do
OR_FLOAT = 'pixels="float", an option of the training data, keeps its values'
ORIENTATION = 274  # the number of the EXIF entry that says how a photo was turned
NEW_SUBFILE_TYPE = 254  # the number of the TIFF tag that says what kind of image a page is
PREVIEW_OR_MASK = 0b101  # its bits for an image of lower resolution and for a mask
LUMA = np.array([299, 587, 114], np.float32) / 1000  # ITU-R 601, with which Pillow converts RGB to gray


class MissingPackage(ValueError):
    """Raised if a package is missing that is needed to read an image. The image itself may be in order."""


class Decoded(NamedTuple):
    """The pixels of an image file as an array (height, width, channels), the color mode of the file, such as "CMYK", and
    whether it is a TIFF file with several images, its pages.
    """

    pixels: np.ndarray
    mode: str
    several_pages: bool = False


def read_image(
    source: Any, size: tuple[int, int] | None, mode: str | None, pixels: str = "uint8", name: str | None = None
) -> Decoded:
    """Return the pixels and the color mode of an image. `source` is an image file or a PIL image. The image is converted to the
    color `mode` ("L", "RGB" or "RGBA") and resized to `size`, if given.

    The image is first turned upright by its EXIF data. Of an animation or a file with several pages, the first image is read.

    size    (height, width) to resize to, bicubic and antialiased; None keeps the size
    mode    "L", "RGB" or "RGBA" to convert to; None: L for gray, RGB for palettes, CMYK and other color modes, RGBA as it is
    pixels  "uint8" for values from 0 to 255; "float" for float32: 8-bit values are divided by 255 and 16-bit values by 65535;
            values of float images are kept
    name    name of the image in error messages; None: its path

    Raises    ValueError for an unreadable file, more than 8 bits a channel with pixels="uint8", and transparency that the mode
              cannot hold; `MissingPackage`, which is a ValueError, too, if a package for this format is not installed.
    """
    name = name or (str(source) if isinstance(source, str | Path) else "the PIL image")
    image, several = _load(source, pixels, name)
    if isinstance(image, np.ndarray):
        return Decoded(fit_floats(image, size, mode, name), "float", several)
    array = _fit_bytes(image, size, mode, name)
    return Decoded(array if pixels == "uint8" else array.astype(np.float32) / np.float32(255), image.mode, several)


def _load(source: Any, pixels: str, name: str) -> tuple[Any, bool]:
    """Return an image, and whether its file has several pages (TIFF only). `source` is an image file or a PIL image, and `name`
    is its name in error messages.

    The image is an upright PIL image if it has 8 bits a channel. Otherwise it is a float32 array (h, w, c) if `pixels` is
    "float", and ValueError is raised if it is "uint8".
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    file = Path(source) if isinstance(source, str | Path) else None
    if file and file.suffix.lower() in DICOM:
        return _read_dicom(file, pixels, name), False
    opened: Any
    try:
        if file and file.is_fifo():  # to open it would wait for a program that writes into it
            raise ValueError("it is a pipe, and no file")
        # not Image.open(file): from a path, Pillow maps some TIFF files into memory, and scrambles those that lie on their side
        with (
            file.open("rb") if file else nullcontext() as stream,
            Image.open(stream) if stream else nullcontext(source) as opened,
        ):
            raw, kind, tags = _raw_mode(opened), opened.format, _tiff_tags(opened)  # before the pixels are read
            image = ImageOps.exif_transpose(opened)
            several = bool(file) and kind == "TIFF" and _has_later_page(opened)
    except Exception as error:  # each image format raises its own kinds of errors
        reason = f"{type(error).__name__}: {error}" if not str(error) else str(error)
        if isinstance(error, UnidentifiedImageError):
            is_tiff = file and file.suffix.lower() in TIFF and file.stat().st_size
            if file and is_tiff and pixels == "float":
                return _read_tiff(file, name)
            reason = "the file is empty" if file and not file.stat().st_size else "its content is no known image format"
            reason += '; pixels="float" reads TIFF files with floats or more than 8 bits a channel' * bool(is_tiff)
        if isinstance(error, Image.DecompressionBombError):
            most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
            reason = f"it has more than {most:,} pixels; make it smaller, or cut it into several images"
        raise ValueError(f"{name} cannot be read as an image ({reason})") from error
    _check_tiff(tags, name)
    bits = 16 if ";16" in raw or max(tags.bits) > 8 else 8
    if bits == 8 and image.mode[0] not in "IF":
        if image.mode not in NATURAL:
            raise ValueError(f"{name} has the color mode {image.mode}; expected gray, RGB, RGBA, a palette or CMYK")
        return image, several
    if pixels == "uint8":  # converting 16-bit and float images would clip them at 255
        depth = image.mode if image.mode[0] in "IF" else f"{image.mode} with 16 bits a channel"
        raise ValueError(f'{name} is {depth}: expected 8-bit gray (L), RGB or RGBA; {OR_FLOAT}')
    if image.mode == "F":
        return _check_finite(np.array(image)[..., None], name), several
    if image.mode.startswith("I;16") or (image.mode == "I" and kind in ("PNG", "PPM")):
        values = _shares_of_16_bits(np.array(image)[..., None], image.info.get("transparency"))
        return np.float32(1) - values if tags.inverted else values, several
    if file and kind == "PNG":
        from torchvision.io import ImageReadMode, decode_image  # Pillow has no color images of 16 bits

        values = decode_image(str(file), ImageReadMode.UNCHANGED, apply_exif_orientation=True)
        return _shares_of_16_bits(values.permute(1, 2, 0).numpy(), image.info.get("transparency")), several
    if file and kind == "TIFF" and image.mode != "I":
        return _read_tiff(file, name)
    what = "integers of more than 16 bits or with a sign" if image.mode == "I" else "16 bits a channel in color"
    raise ValueError(f"{name} has {what}, which cannot be read here; save it as a 16-bit PNG file or a float TIFF file")


def _shares_of_16_bits(values: np.ndarray, transparent: Any) -> np.ndarray:
    """Return 16-bit values, an array (h, w, c), divided by 65535, as float32. `transparent` is the gray value or the color of
    all transparent pixels, in which some PNG files store transparency, or None. If a pixel has it, alpha is the last channel.
    """
    shares = values.astype(np.float32) / np.float32(65535)
    opaque = (values != np.array(transparent)).any(-1, keepdims=True) if transparent is not None else np.True_
    return shares if opaque.all() else np.concatenate([shares, opaque.astype(np.float32)], -1)


def _has_later_page(opened: Any) -> bool:
    """Return whether an open TIFF file, as a PIL image, has more than one image. Smaller previews and masks of its pages do not
    count; a later page that cannot be read does.
    """
    with suppress(Exception):  # damaged, or of a kind that Pillow cannot read
        for page in count(1):
            try:
                opened.seek(page)
            except EOFError:
                return False
            if not opened.tag_v2.get(NEW_SUBFILE_TYPE, 0) & PREVIEW_OR_MASK:
                break
    return True


class TiffTags(NamedTuple):
    """How the pixels of a TIFF file are stored: the bits of each channel, whether one has a sign, whether 0 is white, whether a
    channel after gray or RGB has no stated meaning, and whether they are floats. The defaults are those of another file.
    """

    bits: tuple[int, ...] = (8,)
    signed: bool = False
    inverted: bool = False
    unknown_channel: bool = False
    floats: bool = False


def _tiff_tags(image: Any) -> TiffTags:
    """Return how the pixels of a PIL image are stored in its file, if that is a TIFF file."""
    if image.format != "TIFF":
        return TiffTags()
    found = image.tag_v2
    bits, signs = tuple(found.get(258, (1,))), tuple(found.get(339, (1,)))
    return TiffTags(bits, 2 in signs, found.get(262) == 0, 0 in tuple(found.get(338, ())), 3 in signs)


def _check_tiff(tags: TiffTags, name: str):
    """Raise ValueError for a TIFF file whose pixels would be read as others: bytes with a sign, a further channel that need not
    be transparency, and floats of which 0 is white. `name` is the name of the file in error messages.
    """
    if tags.signed and max(tags.bits) <= 8:
        raise ValueError(f"{name} has bytes with a sign; expected 8-bit values from 0 to 255; save it as a float TIFF file")
    if tags.unknown_channel:
        raise ValueError(
            f"{name} has a further channel besides gray or RGB, and does not say what it is (TIFF ExtraSamples 0); expected "
            "gray, RGB, or RGB with transparency: save it without this channel, or use arrays"
        )
    if tags.inverted and tags.floats:
        raise ValueError(
            f"{name} has floats of which 0 is white (TIFF WhiteIsZero), and does not say which value is black; expected floats "
            "of which 0 is black: save it as such a file (TIFF BlackIsZero)"
        )


def _raw_mode(image: Any) -> str:
    """Return how the pixels of a PIL image are stored in its file, in Pillow's notation: "RGB;16B" means 16 bits a channel,
    which Pillow would cut to 8. The text is empty for an image that comes from no file.
    """
    arguments = [tile[3] for tile in getattr(image, "tile", ())]
    first = arguments[0] if arguments else ""
    raw, rest = (first, ()) if isinstance(first, str) else (first[0], first[1:]) if first else ("", ())
    if image.format == "PPM" and rest and isinstance(rest[0], int) and rest[0] > 255:
        return f"{raw};16"
    return raw if isinstance(raw, str) and re.match(r"(I|L|LA|RGB|RGBA|RGBX|RGBa|CMYK);16", raw) else ""


def _fit_bytes(image: Any, size: tuple[int, int] | None, mode: str | None, name: str) -> np.ndarray:
    """Return an 8-bit PIL image as a uint8 array (h, w, c), converted to the color `mode` and resized to `size`, if given.
    Raise ValueError, with the image's `name`, for transparency that the mode cannot hold.
    """
    from PIL import Image

    mode = mode or NATURAL[image.mode]
    image = image.convert("LA") if image.mode == "La" else image  # the only mode to which Pillow converts it
    alpha = {"A", "a"} & {*image.getbands()} or "transparency" in image.info
    if mode != "RGBA" and alpha and np.array(image.convert("RGBA"))[..., 3].min() < 255:
        raise ValueError(f"{name} is transparent in places, and its background is unknown: {NO_ALPHA}")
    if mode != "RGBA":
        image.info.pop("transparency", None)  # all pixels are opaque, and Pillow would warn of a palette with transparency
    converted = image.convert("RGB").convert(mode) if image.mode in ("CMYK", "LAB", "HSV") else image.convert(mode)
    if size is not None:
        converted = converted.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    return np.array(converted).reshape(converted.height, converted.width, len(mode))


def fit_floats(values: np.ndarray, size: tuple[int, int] | None, mode: str | None, name: str) -> np.ndarray:
    """Return a float32 array (h, w, c), converted to the color `mode` and resized to `size`, if given. Raise ValueError, with
    the image's `name`, for transparency that the mode cannot hold.

    The values stay between the smallest and the largest one of the image, which bicubic resizing alone would exceed. Colors are
    weighted by their opacity (alpha), as Pillow does for bytes, so that the hidden color of a transparent pixel has no effect.
    """
    from PIL import Image

    c = values.shape[-1]
    color, alpha = (values[..., :-1], values[..., -1:]) if c in (2, 4) else (values, None)
    mode = mode or {1: "L", 2: "L", 3: "RGB", 4: "RGBA"}[c]
    if mode != "RGBA" and alpha is not None and alpha.min() < 1:
        raise ValueError(f"{name} is transparent in places, and its background is unknown: {NO_ALPHA}")
    if mode == "L" and color.shape[-1] == 3:
        color = (color @ LUMA)[..., None]
    elif mode != "L":
        color = np.broadcast_to(color, (*color.shape[:2], 3))
    if mode == "RGBA":
        color = np.concatenate([color, np.ones_like(color[..., :1]) if alpha is None else alpha], -1)
    if size is not None:
        low, high = color.min((0, 1)), color.max((0, 1))
        transparent = mode == "RGBA" and low[3] < 1
        if transparent:
            color = np.concatenate([color[..., :3] * color[..., 3:], color[..., 3:]], -1)
        bands = [Image.fromarray(np.ascontiguousarray(band)) for band in np.moveaxis(color, -1, 0)]
        resized = [np.array(band.resize((size[1], size[0]), Image.Resampling.BICUBIC)) for band in bands]
        color = np.stack(resized, -1)
        if transparent:
            opacity = color[..., 3:].clip(0, 1)
            shown = np.divide(color[..., :3], opacity, out=np.zeros_like(color[..., :3]), where=opacity > 0)
            color = np.concatenate([shown, opacity], -1)
        color = color.clip(low, high)
    return np.ascontiguousarray(color, np.float32)


def _read_tiff(file: Path, name: str) -> tuple[np.ndarray, bool]:
    """Return the first page of a TIFF file as an upright float32 array (h, w, c), and whether there are more pages. It is used
    for files that Pillow cannot hold: color with 16 bits or floats, and 64-bit floats. `name` is the file's name in error
    messages.
    """
    try:
        import tifffile
    except ImportError as error:
        raise MissingPackage(f"{name} needs the package tifffile: pip install 'smallvit[tiff]'") from error
    try:
        with tifffile.TiffFile(file) as tiff:
            page: Any = tiff.pages.first
            orientation = page.tags.valueof(ORIENTATION, 1)
            values = np.asarray(tiff.asarray(key=0))
            values = np.moveaxis(values, 0, -1) if page.planarconfig == 2 and values.ndim == 3 else values  # c h w
            inverted, unknown = page.photometric == 0, 0 in tuple(page.extrasamples or ())
            several = True
            with suppress(Exception):  # a damaged later page is one, too
                later = islice(tiff.pages, 1, None)
                several = any(not int(getattr(page, "subfiletype", 0)) & PREVIEW_OR_MASK for page in later)
    except Exception as error:  # tifffile and its codecs raise their own kinds of errors
        raise ValueError(f"{name} cannot be read as an image ({error})") from error
    is_float = values.dtype.kind == "f"
    _check_tiff(TiffTags(inverted=inverted, unknown_channel=unknown, floats=is_float), name)
    values = values[..., None] if values.ndim == 2 else values
    if values.ndim != 3 or values.shape[-1] > 4 or not (is_float or values.dtype in (np.uint8, np.uint16)):
        raise ValueError(f"{name} holds {values.dtype} {values.shape}; expected h w or h w c of 8 or 16 bits, or floats")
    scale = 1 if is_float else np.iinfo(values.dtype).max
    if inverted:  # gray, also with transparency
        values = np.concatenate([scale - values[..., :1], values[..., 1:]], axis=-1)
    return _check_finite(_upright(values, orientation).astype(np.float32) / np.float32(scale), name), several


def _upright(values: np.ndarray, orientation: int) -> np.ndarray:
    """Return an image, an array (h, w, c), turned upright. `orientation` is the number from 1 to 8 that EXIF data have for it.
    Any other number leaves the image as it is.
    """
    values = values[::-1] if orientation in (3, 4, 6, 7) else values
    values = values[:, ::-1] if orientation in (2, 3, 7, 8) else values
    return values.swapaxes(0, 1) if orientation in (5, 6, 7, 8) else values


def _read_dicom(file: Path, pixels: str, name: str) -> Any:
    """Return the image of a DICOM file: a PIL image if it has 8 bits, otherwise a float32 array (h, w, c) if `pixels` is
    "float". `name` is the file's name in error messages.

    A rescale that changes the values is applied, so that they have their unit (Hounsfield units in CT). Other values are
    divided by the largest possible one, and inverted gray values (MONOCHROME1) are turned, so that larger is brighter.
    """
    try:
        import pydicom
        from pydicom.pixels.processing import apply_color_lut
        from pydicom.pixels.utils import pixel_array
    except ImportError as error:
        raise MissingPackage(f"{name} is a DICOM file and needs the package pydicom: pip install 'smallvit[dicom]'") from error
    from PIL import Image

    try:
        header = pydicom.dcmread(file)
        frames = int(header.get("NumberOfFrames", 1) or 1)
        stored = pixel_array(header) if frames == 1 else np.zeros(0)
        palette = header.PhotometricInterpretation == "PALETTE COLOR"
        stored = apply_color_lut(stored, header) if palette else stored
        given = [header.get(tag) for tag in ("RescaleSlope", "RescaleIntercept")]
        slope, intercept = (default if value in (None, "") else float(value) for value, default in zip(given, (1.0, 0.0)))
    except Exception as error:  # pydicom and its decoders raise their own kinds of errors
        raise ValueError(f"{name} cannot be read as an image ({error})") from error
    if frames != 1:
        raise ValueError(f"{name} has {frames} frames; expected one image")
    bits = stored.dtype.itemsize * 8 if palette else int(header.BitsStored)
    signed = stored.dtype.kind == "i"
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    has_unit = (slope, intercept) != (1, 0) or (signed and given[0] not in (None, ""))
    if header.PhotometricInterpretation == "MONOCHROME1" and not has_unit:
        stored = (low + high - stored.astype(np.int64)).astype(stored.dtype)
    if bits == 8 and not signed and not has_unit:
        return Image.fromarray(stored.astype(np.uint8))
    if pixels == "uint8":
        depth = "rescaled values" if has_unit else f"{bits} bits a channel"
        raise ValueError(f'{name} is a DICOM file with {depth}: expected 8 bits; {OR_FLOAT}')
    values = stored * slope + intercept if has_unit else (stored.astype(np.float64) - low) / (high - low)
    return _check_finite((values[..., None] if values.ndim == 2 else values).astype(np.float32), name)


def _check_finite(values: np.ndarray, name: str) -> np.ndarray:
    """Return the array `values`. Raise ValueError, with the image's `name`, if it holds NaN or infinite values."""
    if not np.isfinite(values).all():
        raise ValueError(f"{name} has NaN or infinite values; expected finite numbers")
    return values
