"""The computations of `smallvit.augment.kernels` by the compiled code of `views.cpp`, on a CPU."""

import ctypes
import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import increment_version

from smallvit.augment.color import GRAY
from smallvit.augment.kernels import PYTORCH, Kernels, using

from .checks import is_watched
from .compiler import library, note, reason_against
from .memory import in_memory, pointer
from .torch_internals import peek_interpreter_stack

PIXELS_PER_POINT = 8  # with more pixels of the images for each point of the crops, PyTorch is faster: it does not copy images
VALUES_PER_THREAD = 100_000  # a further thread computes pixels only if there are so many more values; starting it takes time


class Sampling(ctypes.Structure):
    """Images and crops. The fields are those of the struct in views.cpp."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("images", "channels", "height", "width")),
        *((name, ctypes.c_long) for name in ("crops", "area", "edge", "threads")),
        *((name, ctypes.c_void_p) for name in ("pixels", "grid", "out")),
    ]


def native_views() -> AbstractContextManager[None]:
    """Context manager inside which compiled code makes views on a CPU. Nothing changes if there is none on this machine; a note
    on the error stream says so if there is compiled code for blocks only.
    """
    if reason_against():
        return nullcontext()
    if reason := reason_against("views.cpp"):
        note(f"the native kernel cannot make views: {reason}; PyTorch makes them")
        return nullcontext()
    return using(NATIVE)


def sample(images: Tensor, grid: Tensor, padding: str) -> Tensor:
    small = grid[0].numel() * PIXELS_PER_POINT < images[:, :1].numel()  # the crops are much smaller than the images
    if small or not is_plain(images, grid):
        return PYTORCH.sample(images, grid, padding)
    images, grid = in_memory(images), in_memory(grid)
    _, crops, rows, columns = grid.shape
    out = images.new_empty(crops, images.shape[1], rows, columns)
    shape = (*images.shape, crops, rows * columns, padding == "border", threads(out.numel()))
    library("views.cpp").views_sample(ctypes.byref(Sampling(*shape, *map(pointer, (images, grid, out)))))
    return out


def recolor(images: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    if not is_plain(images, matrix, offset):
        return PYTORCH.recolor(images, matrix, offset)
    images, matrix, offset = in_memory(images), in_memory(matrix), in_memory(offset)
    out = torch.empty_like(images)
    call_recolor(images, out, None, len(images), matrix, 9, offset, 0.0, 1.0)
    return out


def gray(images: Tensor, index: Tensor):
    if not is_plain(images) or not images.is_contiguous():
        return PYTORCH.gray(images, index)
    call_recolor(images, images, index.long(), len(index), GRAY.contiguous(), 0, None, -math.inf, math.inf)
    count_change(images)


def call_recolor(
    images: Tensor, out: Tensor, index: Tensor | None, count: int, matrix: Tensor, step: int, offset: Tensor | None, low: float,
    high: float,
):  # fmt: skip
    """Call the function `views_recolor` of views.cpp."""
    pixels, long, number = math.prod(images.shape[2:]), ctypes.c_long, ctypes.c_float
    tensors = map(pointer, (images, out, index))
    sizes = (long(count), long(pixels), pointer(matrix), long(step), pointer(offset), number(low), number(high))
    library("views.cpp").views_recolor(*tensors, *sizes, long(threads(3 * count * pixels)))


def blur(images: Tensor, index: Tensor, sigma: Tensor):
    if not is_plain(images) or not images.is_contiguous():
        return PYTORCH.blur(images, index, sigma)
    index, sigma = index.long(), sigma.float().clamp(min=1e-3)
    sizes = (len(index), *images.shape[1:], threads(len(index) * math.prod(images.shape[1:])))
    library("views.cpp").views_blur(*map(pointer, (images, index, sigma)), *map(ctypes.c_long, sizes))
    count_change(images)


def is_plain(*tensors: Tensor) -> bool:
    """Return whether compiled code can read these tensors: float32 numbers on a CPU that need no gradient, while nothing in
    PyTorch transforms, records or watches operations.
    """
    if is_watched() or peek_interpreter_stack() is not None:
        return False
    return all(
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and unpack_dual(tensor).tangent is None
        for tensor in tensors
    )


def count_change(images: Tensor):
    """Tell PyTorch that images were changed in place, so that a backward pass that needs the old ones is an error."""
    if not images.is_inference():
        increment_version(images)


def threads(values: int) -> int:
    """Return how many threads compute so many values."""
    return min(torch.get_num_threads(), 1 + values // VALUES_PER_THREAD)


NATIVE = Kernels(sample, recolor, gray, blur)
