"""Resizing as PIL does it, written as matrix products, so that it can be part of an exported model."""

import torch
from torch import Tensor

PRECISION = 2**22  # PIL rounds its weights to multiples of 1 / PRECISION


def resize_bytes(images: Tensor, size: tuple[int, int], tall_first: bool) -> Tensor:
    """Return images that are resized to `size` (height, width) by bicubic interpolation with antialiasing. `images` holds bytes
    (uint8), shape (images, channels, height, width). The result has whole numbers from 0 to 255, as float64. `tall_first` says
    in which order the installed PIL works, see `pil_orders_passes`.

    The result equals PIL's `resize(..., BICUBIC)` in every pixel, for gray and RGB images. Width and height are changed one
    after the other, and after each the values are rounded and cut to 0 to 255. All sums are of whole numbers below 2^53, which
    float64 holds exactly.
    """
    pixels = images.double()
    if not tall_first:
        return width_first(pixels, size)
    # sides as tensors: an exported graph must decide for each batch anew
    rows, columns = (torch.ones(side, device=pixels.device).sum() for side in pixels.shape[-2:])
    is_tall = (rows > size[0]) & (rows - size[0] > 2 * (columns - size[1]))
    if not torch.compiler.is_compiling():  # outside of an export, torch.cond would compile both functions
        return height_first(pixels, size) if is_tall else width_first(pixels, size)
    return torch.cond(is_tall, lambda x: height_first(x, size), lambda x: width_first(x, size), (pixels,))


def width_first(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images that are resized to `size` (height, width), first along the width. See `resize_bytes`."""
    return change_height(change_width(pixels, size[1]), size[0])


def height_first(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images that are resized to `size` (height, width), first along the height. See `resize_bytes`."""
    return change_width(change_height(pixels, size[0]), size[1])


def change_width(pixels: Tensor, width: int) -> Tensor:
    """Return images (images, channels, height, width before) with another width, as bytes stored in float64."""
    return rounded(pixels @ quantized(bicubic_weights(pixels.shape[-1], width)).T)


def change_height(pixels: Tensor, height: int) -> Tensor:
    """Return images (images, channels, height before, width) with another height, as bytes stored in float64."""
    return rounded(quantized(bicubic_weights(pixels.shape[-2], height)) @ pixels)


def pil_orders_passes() -> bool:
    """Return whether the installed PIL changes the height of an image first if the height shrinks by more than twice as many
    pixels as the width. Older versions (before about Pillow 13) always change the width first.
    """
    from PIL import Image

    image = (torch.arange(4096) ** 2 % 251).to(torch.uint8).reshape(64, 64)
    resized = Image.fromarray(image.numpy()).resize((96, 8), Image.Resampling.BICUBIC)
    return not torch.equal(
        torch.frombuffer(bytearray(resized.tobytes()), dtype=torch.uint8).reshape(8, 96),
        resize_bytes(image[None, None], (8, 96), False)[0, 0].to(torch.uint8),
    )


def resize_floats(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images that are resized to `size` (height, width) by bicubic interpolation with antialiasing. `images` holds
    floats, shape (images, channels, height, width). No value is rounded or cut, as in PIL's mode "F".
    """
    pixels = images.double() @ bicubic_weights(images.shape[-1], size[1]).T
    return bicubic_weights(images.shape[-2], size[0]) @ pixels


def bicubic_weights(before: int, after: int) -> Tensor:
    """Return a matrix of shape (after, before) that resizes a row of `before` pixels to `after` pixels: each new pixel is a
    weighted mean of the old ones. The weights are those of bicubic interpolation with antialiasing, in float64.
    """
    old = torch.arange(before, dtype=torch.float64)
    scale = (old[-1] + 1) / after  # from a tensor: an exporter would divide the two integers in float32
    center = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    distance = ((old + 0.5 - center[:, None]) / scale.clamp(min=1)).abs()
    near, far = (1.5 * distance - 2.5) * distance**2 + 1, ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    weights = torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))
    return weights / weights.sum(1, keepdim=True)


def linear_weights(before: int, after: int) -> Tensor:
    """Return a matrix of shape (after, before) that resizes a row of `before` pixels to `after` pixels by linear interpolation
    with antialiasing, in float64. It is like `bicubic_weights`.
    """
    scale = before / after
    center = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    distance = ((torch.arange(before, dtype=torch.float64) + 0.5 - center[:, None]) / max(scale, 1)).abs()
    weights = (1 - distance).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def quantized(weights: Tensor) -> Tensor:
    """Return weights as multiples of 1 / PRECISION, times PRECISION, so that they are whole numbers. PIL rounds half away from
    zero.
    """
    return torch.floor(weights.abs() * PRECISION + 0.5) * weights.sign()


def rounded(sums: Tensor) -> Tensor:
    """Return sums of bytes times whole-number weights as bytes: divided by PRECISION, rounded and cut to 0 to 255."""
    return torch.floor((sums + PRECISION / 2) / PRECISION).clamp(0, 255)
