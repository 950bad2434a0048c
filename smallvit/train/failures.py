"""What an error says about the machine: too little memory, or a GPU that a process has lost."""

import errno
from collections.abc import Iterable

import torch

# PyTorch raises RuntimeErrors with these texts, besides MemoryError and OutOfMemoryError
NO_MEMORY = ("can't allocate memory", "cannot allocate memory", "not enough memory", "error: out of memory", "alloc_failed")
GPU_LOST = ("cuda error", "cuda driver error", "cudnn error", "[cuda]")


def is_out_of_memory(error: object) -> bool:
    """Return whether the memory of the computer or of a GPU was too small for a run that ended with this error."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or has_text(error, NO_MEMORY)


def is_gpu_lost(error: object) -> bool:
    """Return whether a process may be unable to use its GPU after this error. This is so after an error that CUDA or cuDNN
    reports, such as an illegal address, but not if PyTorch itself finds too little memory.
    """
    return has_text(error, GPU_LOST)


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or the name of its class if there is no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def has_text(error: object, texts: Iterable[str]) -> bool:
    """Return whether an error is a RuntimeError whose message contains one of these texts."""
    return isinstance(error, RuntimeError) and any(text.lower() in str(error).lower() for text in texts)
