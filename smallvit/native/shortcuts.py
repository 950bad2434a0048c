"""Parts of a model outside its blocks that compute the same function in less time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smallvit.pooling import ClassToken
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import ViT

from .blocks import is_as_made
from .compiler import reason_against


class Shortcut:
    """The value of an attribute that makes a module compute the same function in less time if it is True. It is as good as True
    while `allowed(module)` is True. A copy of it, also by pickle, is False, because copies of a model do not use the kernel.
    """

    def __init__(self, allowed: Callable[[Any], bool], module: Any):
        self.allowed, self.module = allowed, module

    def __bool__(self) -> bool:
        return not torch.compiler.is_compiling() and self.allowed(self.module)

    def __reduce__(self) -> tuple:
        return bool, (False,)


def shortcuts(objective: nn.Module) -> list[tuple[Any, str, Shortcut]]:
    """Return triples: a module inside a training objective, the name of an attribute, and the value that makes the module
    compute the same function in less time. Nothing is returned if the kernel cannot be used on this machine.

    A tokenizer computes its convolution as a matrix product. A ViT that uses only the class token of its last block normalizes
    only this token.
    """
    if reason_against():
        return []
    modules: list[Any] = [*objective.modules()]
    tokenizers = [m for m in modules if type(m) is PatchEmbed and m.can_be_linear and m.linear is not True]
    models = [m for m in modules if isinstance(m, ViT) and normalizes_class_token_alone(m)]
    return [
        *((m, "linear", Shortcut(has_plain_convolution, m)) for m in tokenizers),
        *((m, "skips_unused_norms", Shortcut(normalizes_class_token_alone, m)) for m in models),
    ]


def has_plain_convolution(tokenizer: Any) -> bool:
    """Return whether a `PatchEmbed` may compute its convolution as a matrix product: nobody takes part in it."""
    return is_as_made(tokenizer.proj, nn.Conv2d)


def normalizes_class_token_alone(model: Any) -> bool:
    """Return whether the last LayerNorm of a ViT may normalize only the class token: nobody sees the other tokens after it."""
    own = any(name in vars(model) or getattr(type(model), name) is not getattr(ViT, name) for name in ("tokens", "pooled"))
    plain = is_as_made(model.pool, ClassToken) and is_as_made(model.norm, nn.LayerNorm)
    return plain and not own and not model.norm_after_pool
