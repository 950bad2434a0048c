"""The computations of `smallvit.augment.kernels` by the compiled code of `views.cpp`, on a CPU."""

import ctypes
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

import torch
from torch import Tensor

from smallvit.augment.color import GRAY
from smallvit.augment.kernels import PYTORCH, Kernels, using

from .compiler import library, reason_against
from .memory import in_memory, pointer

VALUES_PER_THREAD = 100_000  # a further thread computes pixels only if there are so many more values; starting it takes time


class Sampling(ctypes.Structure):
    """Images and crops. The fields are those of the struct in views.cpp."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("images", "channels", "height", "width")),
        *((name, ctypes.c_long) for name in ("crops", "area", "edge", "threads")),
        *((name, ctypes.c_void_p) for name in ("pixels", "grid", "out")),
    ]


def native_views() -> AbstractContextManager[None]:
    """Context manager inside which compiled code makes views on a CPU. Nothing changes if there is none on this machine."""
    return nullcontext() if reason_against() or reason_against("views.cpp") else using(NATIVE)


def sample(images: Tensor, grid: Tensor, padding: str) -> Tensor:
    if not is_plain(images):
        return PYTORCH.sample(images, grid, padding)
    images, grid = in_memory(images), in_memory(grid)
    _, crops, rows, columns = grid.shape
    out = images.new_empty(crops, images.shape[1], rows, columns)
    shape = (*images.shape, crops, rows * columns, padding == "border", threads(out.numel()))
    library("views.cpp").views_sample(ctypes.byref(Sampling(*shape, *map(pointer, (images, grid, out)))))
    return out


def recolor(images: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    if not is_plain(images):
        return PYTORCH.recolor(images, matrix, offset)
    images, matrix, offset = in_memory(images), in_memory(matrix), in_memory(offset)
    out = torch.empty_like(images)
    call_recolor(images, out, None, len(images), matrix, 9, offset, 0.0, 1.0)
    return out


def gray(images: Tensor, index: Tensor):
    if not is_plain(images) or not images.is_contiguous():
        return PYTORCH.gray(images, index)
    call_recolor(images, images, index, len(index), GRAY.contiguous(), 0, None, -inf, inf)


def call_recolor(
    images: Tensor, out: Tensor, index: Tensor | None, count: int, matrix: Tensor, step: int, offset: Tensor | None, low: float,
    high: float,
):  # fmt: skip
    """Call the function `views_recolor` of views.cpp."""
    pixels, long, number = images[0, 0].numel(), ctypes.c_long, ctypes.c_float
    tensors = map(pointer, (images, out, index))
    sizes = (long(count), long(pixels), pointer(matrix), long(step), pointer(offset), number(low), number(high))
    library("views.cpp").views_recolor(*tensors, *sizes, long(threads(3 * count * pixels)))


def blur(images: Tensor, index: Tensor, sigma: Tensor):
    if not is_plain(images) or not images.is_contiguous():
        return PYTORCH.blur(images, index, sigma)
    sigma = sigma.clamp(min=1e-3)
    sizes = (len(index), *images.shape[1:], threads(len(index) * images[0].numel()))
    library("views.cpp").views_blur(*map(pointer, (images, index, sigma)), *map(ctypes.c_long, sizes))


def is_plain(images: Any) -> bool:
    """Return whether compiled code can read these images: float32 numbers on a CPU that need no gradient."""
    differentiable = images.requires_grad and torch.is_grad_enabled()
    return type(images) is Tensor and images.device.type == "cpu" and images.dtype == torch.float32 and not differentiable


def threads(values: int) -> int:
    """Return how many threads compute so many values."""
    return min(torch.get_num_threads(), 1 + values // VALUES_PER_THREAD)


NATIVE = Kernels(sample, recolor, gray, blur)
