"""The native kernel: consecutive transformer blocks computed by one call of C++ code, on a CPU. Other C++ code makes views.

`blocks.cpp` computes the forward and the backward pass of what `smallvit.vit.Block` computes step by step. The compiler of the
system translates it once for each processor, and the result is kept in a cache folder. `NativeBlocks` calls it in the place of
`smallvit.vit.Blocks`; blocks that the kernel cannot compute are computed by PyTorch as always.

blocks.cpp     the kernel
views.cpp      the slow computations of `smallvit.augment`
shared.h       what both need: vectors and threads
compiler.py    compiling and loading them
torch_internals.py  the private functions of PyTorch that the kernel needs
memory.py      the structs that C++ reads, the addresses of tensors, and memory that is used again
autograd.py    the call of the kernel as an operation of PyTorch's autograd
merging.py     the merging of tokens between two blocks
branches.py    the branches of consecutive blocks, which one call computes
checks.py      which blocks the kernel can compute, and whether they are still as they were
blocks.py      native_blocks, NativeBlocks: the blocks of an objective in the kernel; start reading here
shortcuts.py   faster ways through a tokenizer and the last norm of a ViT
views.py       native_views: views made by views.cpp
"""

from .autograd import InnerPasses, gradients_in_place
from .blocks import is_native_call, native_blocks
from .checks import reason_against_block
from .compiler import reason_against
from .shortcuts import shortcuts
from .views import native_views

__all__ = [
    "InnerPasses",
    "gradients_in_place",
    "is_native_call",
    "native_blocks",
    "native_views",
    "reason_against",
    "reason_against_block",
    "shortcuts",
]
