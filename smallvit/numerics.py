"""Numerics: how the steps of a run are computed. What they compute is the run's own affair, but for rounding."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn

CHOICES = {  # by the words of the command line
    "precision": {"fp32": "fp32", "bf16": "bf16"},
    "kernel": {"rule": None, "explicit": "explicit", "fused": "fused"},
    "compiled": {"yes": True, "no": False},
}
VARIANTS = 64  # of a block that are compiled in a process; after that torch goes on without


class Numerics(NamedTuple):
    """How steps are computed; None leaves the precision to the run, and the kernel to the rule of `smallvit.attention.attend`.

    precision   of the products: "fp32" or "bf16", whatever the run says
    kernel      of attention: "explicit" (two products and a softmax) or "fused", for any number of tokens
    compiled    blocks without a reduction are compiled, once for all that are alike, and workers share what was compiled;
                random draws stay as they are

    That is how steps of training are computed. What is evaluated is computed as ever.
    """

    precision: str | None = None
    kernel: str | None = None
    compiled: bool = False

    def describe(self) -> str:
        said = [self.precision, self.kernel and f"{self.kernel} attention", "compiled" if self.compiled else None]
        return ", ".join(filter(None, said)) or "as it is"


DEFAULT = Numerics()


def check_numerics(numerics: Numerics, stack: int = 1):
    """Refuse what is no choice of that name, and to compile what is trained as one."""
    for name, values in CHOICES.items():
        if getattr(numerics, name) not in (None, *values.values()):
            expected = " or ".join(repr(value) for value in values.values() if value is not None)
            raise ValueError(f"{name} of the numerics is {getattr(numerics, name)!r}; expected {expected}")
    if numerics.compiled and stack > 1:
        raise ValueError(f"got {stack} runs as one and compiled; expected one or the other, since a stack is not compiled")


def parse_numerics(words: Iterable[str]) -> dict:
    """`precision=bf16 compiled=no` as fields of an `Numerics`. Raises ValueError for what is no choice."""
    found = {}
    for word in words:
        name, _, said = word.partition("=")
        if said not in CHOICES.get(name, ()):
            expected = ", ".join(f"{name}={'|'.join(values)}" for name, values in CHOICES.items())
            raise ValueError(f"--numerics got {word!r}; expected some of {expected}")
        if name in found:
            raise ValueError(f"--numerics got {name} twice; expected each choice once")
        found[name] = CHOICES[name][said]
    return found


class NumericsContext:
    """The models in an objective, with the kernel and the compiled blocks of an numerics within `active()`."""

    def __init__(self, objective: "nn.Module", numerics: Numerics):
        self.fused = numerics.kernel == "fused"
        self.attention = [module for module in objective.modules() if hasattr(module, "fused")] if numerics.kernel else []
        self.calls = compiled_blocks(objective) if numerics.compiled else []

    @contextmanager
    def active(self) -> Iterator[None]:
        before = [module.fused for module in self.attention]
        for module in self.attention:
            module.fused = self.fused
        for block, call in self.calls:
            block._compiled_call_impl = call
        try:
            yield
        finally:
            for module, fused in zip(self.attention, before):
                module.fused = fused
            for block, _ in self.calls:
                block._compiled_call_impl = None


def compiled_blocks(objective: "nn.Module") -> list[tuple]:
    """The blocks of the models inside, each with what is called in its place.

    Block by block: those that are alike are compiled once, in seconds where a whole model takes minutes. One that reduces
    tokens is left alone: what its reduction is told from step to step would be compiled into it each time.
    """
    import torch
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    lists = [
        module.blocks for module in objective.modules() if isinstance(getattr(module, "blocks", None), torch.nn.ModuleList)
    ]
    plain = [block for blocks in lists for block in blocks if getattr(block, "reduction", None) is None]
    once = partial(torch.compile, dynamic=False, options={"fallback_random": True})  # draws are those of the plain block
    return [(block, once(block._call_impl)) for block in plain]
