"""What Python and C++ share: the structs that C++ reads, the addresses of tensors, and memory that is used again."""

import ctypes
import mmap
from contextlib import suppress
from threading import RLock
from typing import Any

import torch
from torch import Tensor

WEIGHTS = 7  # of a branch, as the enum `Weight` of blocks.cpp; the last one is the scale of the logits
HUGE_PAGE = 2**21  # bytes
IDLE_LOANS = 8  # memory is given back if so many loans, times the number of free pieces, did not need it


# The fields of these structs are those of the structs in blocks.cpp


class Branch(ctypes.Structure):
    """A residual branch of a block: the attention or the MLP."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("middle", "inner", "outer", "hidden", "heads")),
        ("epsilon", ctypes.c_float),
        ("weight", ctypes.c_void_p * WEIGHTS),
        ("gradient", ctypes.c_void_p * WEIGHTS),
        ("keep", ctypes.c_void_p),
        ("logit_bias", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("bias_image", "bias_head", "bias_key")),
    ]


class Problem(ctypes.Structure):
    """All branches, and the tokens to which they are applied."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("images", "tokens", "width", "branches")),
        *((name, ctypes.c_long) for name in ("group", "threads", "precision", "again")),
        ("branch", ctypes.POINTER(Branch)),
    ]


class Merging(ctypes.Structure):
    """Tokens of which some are merged between two blocks."""

    _fields_ = [
        *((name, ctypes.c_long) for name in ("images", "tokens", "width", "key_width", "prefix", "pairs", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "keys", "size", "out", "new_size", "place", "share")),
    ]


def pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    """Return the address of the first number of a tensor, for a C function. None gives a null pointer."""
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def in_memory(tensor: Tensor) -> Tensor:
    """Return a tensor whose values lie in memory one after another. In one with the negative bit, PyTorch would negate them."""
    return tensor.contiguous().resolve_neg()


class Pool:
    """Memory that is used again. The first use of each page of new memory takes time, as long as computing on it."""

    def __init__(self, most: int = 8):
        self.free: dict[Tensor, int] = {}  # memory that nobody uses -> the number of loans when it came back
        self.most, self.loans = most, 0
        self.lock = RLock()  # for several threads; a loan may also end in the middle of `lend`

    def lend(self, floats: int) -> "Loan":
        """Return a `Loan` of at least so many floats. Memory that was not needed for a while goes back to the system."""
        with self.lock:
            self.loans += 1
            fitting = [memory for memory in self.free if floats <= memory.numel() <= 2 * floats]
            memory = min(fitting, key=Tensor.numel, default=None)
            oldest = self.loans - IDLE_LOANS * self.most
            self.free = {other: loan for other, loan in self.free.items() if other is not memory and loan >= oldest}
        return Loan(self, new_memory(floats) if memory is None else memory, floats)


class Loan:
    """Memory of a pool, to which it returns when nobody refers to this object any more."""

    def __init__(self, pool: Pool, memory: Tensor, floats: int):
        self.pool, self.memory, self.floats, self.pointer = pool, memory, floats, pointer(memory)

    def as_tensor(self) -> Tensor:
        """Return the memory as a tensor of as many floats as were asked for, which autograd can save and free. The loan ends
        when the tensor is gone.
        """
        tensor: Any = self.memory.detach()[: self.floats]
        tensor.loan = self
        return tensor

    def __del__(self):
        with self.pool.lock:
            free = [*self.pool.free.items(), (self.memory, self.pool.loans)]
            self.pool.free = dict(free[-self.pool.most :])


@torch.inference_mode(False)  # autograd cannot save memory that was made in inference mode
def new_memory(floats: int) -> Tensor:
    """Return a new tensor of so many floats, without values. On Linux a large one lies on pages of 2 MB instead of 4 kB: the
    processor then looks up fewer addresses, and reads it up to twice as fast if it is larger than the cache.
    """
    size = 4 * floats
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(floats, dtype=torch.float32, device="cpu")
    with suppress(OSError):  # a system without such pages, or too little memory, which PyTorch then says
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.float32)
    return torch.empty(floats, dtype=torch.float32, device="cpu")


POOL = Pool()
