"""What the kernel can compute: checks of blocks before they are given to it, and of what may change between two calls."""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from smallvit.vit import Block, DropPath, GatedUnit, LayerScale

from .branches import middle_of, plain_attention
from .torch_internals import DeviceContext, count_function_modes, dispatch_mode, function_modes, has_global_hook, is_tracing

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
VALUES: dict[type, tuple[str, ...]] = {  # what the forward functions of a block read, besides weights and other modules
    Block: ("norm_first", "reduction"),
    nn.LayerNorm: ("normalized_shape", "eps"),
    nn.GELU: ("approximate",),
    GatedUnit: ("act",),
    LayerScale: ("factor",),
}


def reason_against_block(block: Any) -> str | None:
    """Return why the kernel cannot compute a block, as text, or None if it can."""
    if type(block) is not Block:
        return f"{type(block).__name__} is another kind of block"
    attention: Any = block.attention
    if getattr(attention, "position", None) is not None:
        return f"its attention has positions ({type(attention.position).__name__})"
    normalizes = any(type(getattr(attention, name, None)) not in (nn.Identity, type(None)) for name in ("q_norm", "k_norm"))
    if plain_attention(attention) is None or normalizes:
        return f"{type(attention).__name__} computes its logits in another way"
    if kinds_of(block.mlp)[2::2] != [nn.Dropout] or len(block.mlp) != 4:
        return "its MLP has other parts than a linear map, an activation, dropout and a linear map"
    norms = [block.norm1, block.norm2]
    parts = [*norms, getattr(attention, "qkv", None), getattr(attention, "proj", None), *block.mlp[::3]]
    if [type(part) for part in parts] != [nn.LayerNorm] * 2 + [nn.Linear] * 4:
        return "a norm or a linear map has been replaced"
    if any(norm.weight is None or norm.bias is None or len(norm.normalized_shape) != 1 for norm in norms):
        return "a norm has no weight or no bias, or normalizes more than one axis"
    if not block.norm_first:
        return "its norms follow the branches"
    if block.reduction is not None and needs_of(block.reduction) is None:
        return f"{type(block.reduction).__name__} does not say what it needs of the attention"
    branches: list[Any] = [block.branch1, block.branch2]
    if any(kinds_of(branch) != [nn.Dropout, LayerScale, DropPath] for branch in branches):
        return "a branch has other parts than dropout, LayerScale and stochastic depth"
    if any(branch[1].factor is not None for branch in branches):
        return "it has a LayerScale"
    width: Any = block.norm1.normalized_shape[0]
    if width % 16 or attention.proj.in_features % (16 * attention.heads):
        return "the width of the tokens or of a head is not a multiple of 16"
    if middle_of(block.mlp[1]) is None:
        return f"{block.mlp[1]} is another activation"
    return None


def kinds_of(sequence: Any) -> list[type]:
    """Return the classes of the modules that an `nn.Sequential` calls, or an empty list for another module."""
    return [*map(type, sequence._modules.values())] if type(sequence) is nn.Sequential else []


def needs_of(reduction: Any) -> tuple[str, ...] | None:
    """Return what the class of a reduction says about its needs, or None if it says nothing that is known. What only a parent
    class says does not count.
    """
    needs = vars(type(reduction)).get("needs")
    return needs if isinstance(needs, tuple) and {*needs} <= {"key", "saliency"} else None


class Structure:
    """The modules of some blocks, and the values that decide what they compute, apart from weights. It says whether they are
    still the same: modules may be exchanged at any time.
    """

    def __init__(self, blocks: Sequence[Block]):
        self.modules: list[Any] = [module for block in blocks for module in block.modules()]
        self.attentions: list[Any] = [block.attention for block in blocks]
        self.attributes = [vars(module) for module in self.modules]
        self.parts = [module._modules for module in self.modules if module._modules]
        self.values = [(vars(module), name) for module in self.modules for name in VALUES.get(type(module), ())]
        self.values += [(vars(each), name) for each in self.attentions for name in vars(each) if is_option(name)]
        self.hooks = [getattr(module, kind) for module in self.modules for kind in HOOKS]  # PyTorch adds hooks to these dicts
        self.first = self.now()

    def now(self) -> list[Any]:
        """Return the classes of all modules, the values that they read, and their parts, in one list."""
        values = [attributes.get(name, "missing") for attributes, name in self.values]
        return [*map(type, self.modules), *values, *chain.from_iterable([parts.values() for parts in self.parts])]

    def reason_against(self) -> str | None:
        """Return why PyTorch must compute these blocks in this call, or None if it need not."""
        if has_global_hook() or any(self.hooks):
            return "a module has a hook"
        if any(["forward" in attributes for attributes in self.attributes]):
            return "a module has a forward function of its own"
        now = self.now()
        if len(now) != len(self.first) or not all(map(is_, now, self.first)):
            return "a part of a block has been exchanged, or one of its options has been changed"
        return None


def is_option(name: str) -> bool:
    """Return whether an attribute of an attention, by its name, decides what it computes, and is not read in each call."""
    return not name.startswith("_") and name not in ("training", "dropout", "fused")


def has_function_mode() -> bool:
    """Return whether a tool of PyTorch, a `TorchFunctionMode`, watches each function. A default device is no such tool."""
    return count_function_modes() > 0 and any(type(mode) is not DeviceContext for mode in function_modes())


def is_watched() -> bool:
    """Return whether PyTorch compiles or traces code, or a tool of PyTorch watches each of its operations or functions."""
    return torch.compiler.is_compiling() or is_tracing() or dispatch_mode() is not None or has_function_mode()


def is_as_made(module: Any, kind: type) -> bool:
    """Return whether calling a module computes what its class `kind` says, and nobody else takes part in the call by a hook."""
    own = vars(module)
    hooked = has_global_hook() or any(own[hooks] for hooks in HOOKS)
    return type(module) is kind and "forward" not in own and not hooked
