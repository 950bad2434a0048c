"""How the steps of a run are computed: precision, attention kernel and compilation. These change rounding and speed only."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

CHOICES: dict[str, dict[str, Any]] = {  # option of --numerics -> its values as typed on the command line -> values in Python
    "precision": {"fp32": "fp32", "bf16": "bf16"},
    "kernel": {"rule": None, "explicit": "explicit", "fused": "fused", "native": "native"},
    "compiled": {"yes": True, "no": False},
}
MAX_VARIANTS = 64  # compiled versions of a block in one process; beyond that torch runs the block uncompiled


class Numerics(NamedTuple):
    """Options for how the training steps of a run are computed: precision, attention kernel and compilation. These options
    change speed and rounding, but not the method.

    precision   "fp32" or "bf16" for matrix products and convolutions; None uses the precision of the run
    kernel      "explicit" (two matrix products and a softmax) or "fused" attention, for any number of tokens; "native" computes
                whole blocks and views of images by compiled code (`smallvit.native`), and leaves the rest to PyTorch; None lets
                `smallvit.attention.attend` choose
    compiled    True compiles the transformer blocks with torch.compile, except blocks with a token reduction

    Equal blocks are compiled once and worker processes share the compiled code. Random draws do not change. Evaluation
    uses the native kernel where it predicts the same classes, and else none of these options.
    """

    precision: str | None = None
    kernel: str | None = None
    compiled: bool = False

    def describe(self) -> str:
        """Return a short text that describes the options, such as "bf16, fused attention". The text is "default" if no option
        is set.
        """
        kernel = self.kernel and f"{self.kernel} {'blocks' if self.kernel == 'native' else 'attention'}"
        parts = [self.precision, kernel, "compiled" if self.compiled else None]
        return ", ".join(filter(None, parts)) or "default"


DEFAULT = Numerics()
ABSENT = object()  # in place of the value of an attribute that an object does not have itself
# (id of a module, name of an attribute) -> who has set it, and the value; the first pair is the value before all of them
VALUES: dict[tuple[int, str], list[tuple[Any, Any]]] = {}
LOCK = Lock()  # several threads may use the same model


def check_numerics(numerics: Numerics, stack: int = 1):
    """Raise ValueError if an option in `numerics` (how training steps are computed) has an unknown value. `stack` is the number
    of runs, such as seeds, that are trained together as one model; compilation is an error if it is above 1.
    """
    if not isinstance(numerics, Numerics):
        raise ValueError(f"numerics is {numerics!r:.60}; expected such as Numerics(kernel='native')")
    for name, values in CHOICES.items():
        if getattr(numerics, name) not in (None, *values.values()):
            expected = " or ".join(repr(value) for value in values.values() if value is not None)
            raise ValueError(f"{name} of the numerics is {getattr(numerics, name)!r}; expected {expected}")
    if numerics.compiled and stack > 1:
        raise ValueError(f"got {stack} runs as one and compiled; expected one or the other, since a stack is not compiled")
    if numerics.compiled and numerics.kernel == "native":
        raise ValueError("got native blocks and compiled; expected one or the other, since native blocks are compiled already")


def parse_numerics(words: Iterable[str]) -> dict[str, Any]:
    """Return a dict of keyword arguments for `Numerics` (options for how training steps are computed). `words` are command-line
    words such as `precision=bf16` and `compiled=no`.

    Raises   ValueError for an unknown option or value, and for an option that is given twice.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if value not in CHOICES.get(name, ()):
            expected = ", ".join(f"{name}={'|'.join(values)}" for name, values in CHOICES.items())
            raise ValueError(f"--numerics got {word!r}; expected some of {expected}")
        if name in options:
            raise ValueError(f"--numerics got {name} twice; expected each choice once")
        options[name] = CHOICES[name][value]
    return options


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Context manager inside which new tensors are float32 numbers on the CPU, also if the caller has changed torch's default
    data type or default device.
    """
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext():
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def full_float32() -> Iterator[None]:
    """Context manager inside which a GPU computes convolutions of float32 numbers in float32, forward and backward.

    By default PyTorch computes them in TF32, which keeps 10 of the 23 bits after the leading one, and matrix products in
    float32. A stack (runs that are trained as one model) would then give other convolutions than its runs alone. At the end the
    switches have the values that PyTorch returned before: one that followed `torch.backends.fp32_precision` then has its value.
    """
    import torch

    cudnn: Any = torch.backends.cudnn
    switches: list[tuple[Any, str, Any, Any]] = []  # object, attribute, its value for full precision, and its value before
    with suppress(RuntimeError):  # PyTorch refuses to read the older switch if somebody has set one of the newer ones
        switches.append((cudnn, "allow_tf32", False, cudnn.allow_tf32))
    if hasattr(cudnn, "conv"):  # since PyTorch 2.9
        switches += [(each, "fp32_precision", "ieee", each.fp32_precision) for each in (cudnn.conv, cudnn.rnn)]
    for owner, name, exact, _ in switches:
        setattr(owner, name, exact)
    try:
        yield
    finally:
        for owner, name, _, before in switches:
            setattr(owner, name, before)


class NumericsContext:
    """An object that makes the models inside a training objective use the kernel and the compilation that `numerics` asks for.
    They do so only inside its context manager `active()`.
    """

    def __init__(self, objective: "nn.Module", numerics: Numerics):
        self.fused, self.native = numerics.kernel == "fused", numerics.kernel == "native"
        chosen = numerics.kernel in ("explicit", "fused")
        self.attention: list[Any] = [m for m in objective.modules() if hasattr(m, "fused")] if chosen else []
        self.compiled = compiled_blocks(objective) if numerics.compiled else []
        self.shortcuts: list[tuple[Any, str, Any]] = []  # modules, and the attribute and value that make each of them faster
        if self.native:
            from smallvit.native import InnerPasses, native_blocks, shortcuts

            self.compiled = native_blocks(objective)
            self.shortcuts = shortcuts(objective)
            self.inner_passes = InnerPasses()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context manager inside which the models use the chosen attention kernel and the compiled blocks. At the end, the
        models are as before. If several contexts overlap, also in several threads, the one that was entered last counts.
        """
        changes = [(module, "fused", self.fused) for module in self.attention]
        changes += [(block, "_compiled_call_impl", compiled) for block, compiled in self.compiled]
        changes += self.shortcuts
        user = object()
        with LOCK:
            for module, name, value in changes:
                values = VALUES.setdefault((id(module), name), [(None, vars(module).get(name, ABSENT))])
                values.append((user, value))
                vars(module)[name] = value
        try:
            yield
        finally:
            with LOCK:
                for module, name, _ in changes:
                    leave(module, name, user)

    def gradients_in_place(self, wanted: bool) -> AbstractContextManager:
        """Context manager for the forward pass of a training step. If `wanted`, and if the kernel is "native", the backward
        pass adds the gradients of the blocks to their existing `.grad` without the help of autograd, which takes less time. An
        objective that computes gradients itself, and does so from the first step on, always gets them from autograd.
        """
        if not self.native:
            return nullcontext()
        from smallvit.native import gradients_in_place

        return gradients_in_place(wanted, self.inner_passes)

    @property
    def native_calls(self) -> int:
        """How often the native kernel has computed blocks of the models in this context."""
        return sum(getattr(part, "calls", 0) for _, call in self.compiled if self.native for part in call.args[0])


def leave(module: "nn.Module", name: str, user: object):
    """Undo the change of an attribute of a module by one `user`. The attribute gets the latest value of the other users, or the
    value from before all of them.
    """
    values = [pair for pair in VALUES[id(module), name] if pair[0] is not user]
    VALUES[id(module), name] = values
    _, value = values[-1]
    if value is ABSENT:
        vars(module).pop(name, None)
    else:
        vars(module)[name] = value
    if len(values) == 1:
        del VALUES[id(module), name]


def making_views(numerics: Numerics, device: str) -> AbstractContextManager[None]:
    """Context manager for making the batch of a training step on a `device`, such as "cpu". With the kernel "native", compiled
    code does the slow parts of random transforms on a CPU: see `smallvit.augment.kernels`. Otherwise nothing changes.
    """
    if numerics.kernel != "native" or device != "cpu":
        return nullcontext()
    from smallvit.native import native_views

    return native_views()


@contextmanager
def native_kernel(*models: Any) -> Iterator[None]:
    """Context manager inside which the native kernel computes the transformer blocks of models on a CPU: in predictions, and in
    a training loop of your own. At the end, the models are as before. A model is a torch module with blocks of a smallvit
    `ViT`, such as an objective, or what `load` and `load_all` return.

        with native_kernel(model):
            logits = model(images)

    The outputs differ from those of PyTorch by rounding only. With `torch.autocast("cpu", torch.bfloat16)` around it, they are
    computed in bf16, on a processor that has it. What the kernel cannot compute is computed by PyTorch. A note on the error
    stream says so if there is no C++ compiler, and for options of blocks; it does not for single calls, such as those with
    dropout or hooks, or on a GPU. The kernel has no second derivatives.

    Raises ValueError without a model, and for a model without such blocks, such as one of timm, which `from_timm` converts.
    """
    from torch import nn

    from smallvit.vit import Blocks

    loaded = [part for model in models for part in getattr(model, "models", [model])]  # an ensemble has several
    modules = [part if isinstance(part, nn.Module) else getattr(part, "model", part) for part in loaded]
    for module in modules or [None]:
        if not isinstance(module, nn.Module) or not any(isinstance(part, Blocks) for part in module.modules()):
            raise ValueError(
                f"native_kernel got {'no model' if module is None else type(module).__name__}, which has no blocks of a "
                "smallvit ViT; expected such a model, what load() returns, or a model of timm that was converted by from_timm"
            )
    with ExitStack() as entered:
        for module in modules:
            entered.enter_context(NumericsContext(module, Numerics(kernel="native")).active())
        yield


def uses_native_kernel(model: "nn.Module") -> bool:
    """Return whether the native kernel computes transformer blocks of a model now: inside `native_kernel(model)`, and in a run
    with the kernel "native".
    """
    from smallvit.native import is_native_call

    return any(is_native_call(vars(part).get("_compiled_call_impl")) for part in model.modules())


def compiled_blocks(objective: "nn.Module") -> list[tuple[Any, Any]]:
    """Return a list of pairs: each transformer block inside a training objective, and its forward function compiled by
    `torch.compile`. Blocks that merge or prune tokens are left out, because they would be compiled again at every step.

    Blocks are compiled one by one: equal blocks share one compilation, which takes seconds; a whole model takes minutes. The
    values that a reduction is given change at every step, and each change would recompile its block.
    """
    import torch
    import torch._dynamo

    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
    lists = [blocks for m in objective.modules() if isinstance(blocks := getattr(m, "blocks", None), torch.nn.ModuleList)]
    blocks = [block for blocks in lists for block in blocks if getattr(block, "reduction", None) is None]
    # fallback_random: a compiled block draws the same random numbers as an uncompiled one
    compile_block = partial(torch.compile, dynamic=False, options={"fallback_random": True})
    return [(block, compile_block(block._call_impl)) for block in blocks]
