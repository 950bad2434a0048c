"""Execution: how the steps of a run are computed. What they compute is the run's own affair, but for rounding."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

CHOICES = {"precision": ("fp32", "bf16"), "kernel": ("explicit", "fused"), "compiled": (False, True)}


class Execution(NamedTuple):
    """None leaves it as it is: to the run, and to the rule of `smallvit.attention.attend`.

    precision   of the products: "fp32" or "bf16", whatever the run says
    kernel      of attention: "explicit" (two products and a softmax) or "fused", for any number of tokens
    compiled    blocks are compiled, once for all that are alike; workers share what was compiled. Random draws stay as they
                are. Evaluation and stacked runs are not compiled
    """

    precision: str | None = None
    kernel: str | None = None
    compiled: bool = False

    def prepare(self, objective: "nn.Module"):
        """Set the kernel of all attention inside."""
        for module in objective.modules():
            if self.kernel is not None and hasattr(module, "fused"):
                module.fused = self.kernel == "fused"

    def in_words(self) -> str:
        said = [self.precision, self.kernel and f"{self.kernel} attention", "compiled" if self.compiled else None]
        return ", ".join(filter(None, said)) or "as it is"


AS_IT_IS = Execution()


def refuse_unknown(execution: Execution):
    """Refuse what is no choice of that name."""
    for name, values in CHOICES.items():
        if getattr(execution, name) not in (None, *values):
            expected = " or ".join(map(repr, values))
            raise ValueError(f"{name} of the execution is {getattr(execution, name)!r}; expected {expected}")


class Compiled:
    """The blocks of the models in an objective, compiled when they are first called in `here()`; elsewhere they are as ever."""

    def __init__(self, objective: "nn.Module"):
        import torch

        # block by block: those that are alike are compiled once, in seconds where the model as a whole takes minutes
        self.blocks = [block for module in objective.modules() for block in getattr(module, "blocks", ())]
        once = partial(torch.compile, dynamic=False, options={"fallback_random": True})  # draws are those of the plain block
        self.calls = [once(block._call_impl) for block in self.blocks]

    @contextmanager
    def here(self) -> Iterator[None]:
        for block, call in zip(self.blocks, self.calls):
            block._compiled_call_impl = call
        try:
            yield
        finally:
            for block in self.blocks:
                block._compiled_call_impl = None
