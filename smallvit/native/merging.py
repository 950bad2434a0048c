"""The merging of tokens between two blocks, by the kernel."""

import ctypes
import inspect
from typing import Any

import torch
from torch import Tensor

from smallvit.reduction.context import gather_tokens

from .autograd import models_first
from .compiler import library
from .memory import POOL, Merging, in_memory, pointer

TOKENS_PER_THREAD = 2_048  # a further thread merges tokens only if there are so many more; starting it takes time


class NativeMerge(torch.autograd.Function):
    """The merging of the best pairs of tokens as one operation of autograd. Under `torch.vmap`, the images of all models are
    merged in one call.
    """

    @staticmethod
    def forward(reduction: Any, x: Tensor, size: Tensor | None, keys: Tensor) -> Any:
        return merge_tokens(reduction, x, size, keys)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any):
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[2:])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        place, share = ctx.saved_tensors
        return None, gather_tokens(d_out.contiguous(), place) * share[..., None], None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, reduction: Any, *tensors: Tensor | None) -> tuple[Any, Any]:
        flat = [t if t is None else t.flatten(0, 1) for t in models_first(tensors, in_dims[1:], info.batch_size)]
        found: Any = NativeMerge.apply(reduction, *flat)
        shape = (info.batch_size, -1) if info.batch_size else (0, 0)
        return tuple(each.unflatten(0, shape) for each in found), (0,) * len(found)


vars(NativeMerge.forward)["__signature__"] = inspect.signature(NativeMerge.forward)


def merge_tokens(reduction: Any, x: Tensor, size: Tensor | None, keys: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Merge the best pairs of tokens `x` (b, n, d) of sizes `size` (b, n) by their keys (b, n, e), as the module `reduction`
    does. Return the new tokens and their sizes, and for each old token its place among the new ones and its share in the token
    there, both (b, n).

    Raises ValueError if the module merges more than half of its patches.
    """
    (images, n, width), x, keys = x.shape, in_memory(x), in_memory(keys)
    size = None if size is None else in_memory(size)
    pairs, prefix = reduction.count(n), reduction.prefix
    if prefix < 0 or not 0 <= 2 * pairs <= n - prefix:
        raise ValueError(
            f"{type(reduction).__name__} merges {pairs} pairs of {n - prefix} patches; expected at most half as many pairs"
        )
    out, new_size = x.new_empty(images, n - pairs, width), x.new_empty(images, n - pairs)
    place, share = x.new_empty(images, n, dtype=torch.long), x.new_empty(images, n)
    threads = min(torch.get_num_threads(), 1 + images * n // TOKENS_PER_THREAD)
    tensors = (x, keys, size, out, new_size, place, share)
    merging = Merging(images, n, width, keys.shape[2], prefix, pairs, threads, *map(pointer, tensors))
    scratch = POOL.lend(threads * library().blocks_merge_floats(ctypes.byref(merging)))
    library().blocks_merge(ctypes.byref(merging), scratch.pointer)
    return out, new_size, place, share
