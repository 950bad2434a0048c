"""Checks of what a model is made of and called with: its slots, its numbers, its blocks, and the indices of patches."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from smallvit.tokenizers import is_whole_number


def check_slots(none: bool = False, **slots):
    """Raise ValueError unless each part of a model, such as the tokenizer, is given as a class or a function that creates a
    module. The keyword arguments `slots` are these parts, for example `tokenizer=PatchEmbed`. If `none` is True, a part may
    also be None.

    Strings and module instances are refused.
    """
    for name, slot in slots.items():
        if isinstance(slot, nn.Module) or not (callable(slot) or (none and slot is None)):
            given = f"a finished {type(slot).__name__}" if isinstance(slot, nn.Module) else repr(slot)
            raise ValueError(f"{name} is {given}; expected a class, or functools.partial of a class with its options")


def check_integers(**numbers: tuple[int, int]):
    """Raise ValueError unless all given numbers are integers and not too small. Each keyword argument is a pair (number,
    smallest allowed number). For example, `depth=(6, 0)` checks that the option `depth`, which has the value 6, is an integer
    of at least 0.
    """
    for name, (number, minimum) in numbers.items():
        if not is_whole_number(number, minimum):
            raise ValueError(f"{name} is {number!r}; expected an integer of at least {minimum}")


def check_blocks(blocks: Iterable[Any]):
    """Raise ValueError if a block needs to know where its tokens are, but a block cannot pass this on."""
    blocks = list(blocks)
    without = [block for block in blocks if "places" not in inspect.signature(block.forward).parameters]
    if without and (needing := [block for block in blocks if needs_places(block)]):
        part = needing[0] if getattr(needing[0], "needs_places", False) else needing[0].attention.position
        raise ValueError(
            f"{type(part).__name__} needs to know where the tokens are, and a "
            f"{type(without[0]).__name__} does not pass it on; expected forward(x, size, mask, places) -> (x, size, places)"
        )


def needs_places(block: Any) -> bool:
    """Return True if a transformer block must know where its tokens are: it says so, or its attention has positions."""
    return getattr(block, "needs_places", False) or getattr(getattr(block, "attention", None), "position", None) is not None


def check_indices(keep: Tensor, images: int, patches: int):
    """Raise ValueError unless `keep` (images, any number) holds indices of patches. Indices on a GPU are not read, because this
    would wait for all earlier work, nor those of models that are computed together by `torch.func.vmap`.
    """
    if keep.ndim != 2 or len(keep) != images or keep.dtype != torch.int64:
        raise ValueError(
            f"keep has shape {tuple(keep.shape)} and dtype {keep.dtype}; expected the indices of patches (torch.int64), a row "
            f"for each of the {images} images"
        )
    readable = keep.device.type == "cpu" and not (torch.compiler.is_compiling() or is_functorch_wrapped_tensor(keep))
    if readable and keep.numel():
        first, last = keep.aminmax()
        if first < 0 or last >= patches:
            raise ValueError(f"keep has indices from {first} to {last}; expected 0 to {patches - 1}, for {patches} patches")
