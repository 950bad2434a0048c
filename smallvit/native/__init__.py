"""The native kernel: consecutive transformer blocks computed by one call of C++ code, on a CPU.

`blocks.cpp` beside this file computes the forward and the backward pass of what `smallvit.vit.Block` computes step by step. The
compiler of the system translates it once for each processor, and the result is kept in a cache folder. `NativeBlocks` calls it
in the place of `smallvit.vit.Blocks`; blocks that the kernel cannot compute are computed by PyTorch as always.
"""

import ctypes
import functools
import hashlib
import inspect
import mmap
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, groupby
from operator import is_
from pathlib import Path
from threading import RLock, local
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks  # pyright: ignore[reportMissingImports]
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor, peek_interpreter_stack
from torch.jit._trace import is_tracing
from torch.nn.modules import module as torch_modules
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_mode

from smallvit.attention import PlainAttention, logit_bias, mask_diagonal
from smallvit.convolution import leading, transform
from smallvit.pooling import ClassToken
from smallvit.reduction.context import gather_tokens, reduce_tokens, runs_before_attention
from smallvit.storage import cache_folder, locked, write_atomic, write_text
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import Block, Blocks, DropPath, GatedUnit, LayerScale, ViT, one_after_another

SOURCE = Path(__file__).with_name("blocks.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
FOR_THIS_PROCESSOR = (("-march=native",), ("-mcpu=native",), ())  # the first one that the compiler accepts
COMPILE_SECONDS = 300  # how long to wait for another process that compiles the kernel
GROUP_ROWS = 256  # tokens of the images that go through all blocks together
MOST_TOKENS_KEPT = 128  # with more tokens, the backward pass computes the insides of branches again, instead of keeping them
MOST_TOKENS = 768  # with more tokens, PyTorch is faster, because it does not keep whole attention maps
TOKENS_PER_THREAD = 2_048  # a further thread merges tokens only if there are so many more; starting it takes time
MOST_PROBLEMS = 8  # descriptions of a call that are kept for the next one
IDLE_LOANS = 8  # memory is given back if so many loans, times the number of free pieces, did not need it
ATTENTION, MIDDLES = 0, {nn.GELU: 1, nn.ReLU: 2}  # the enum `Middle` of blocks.cpp
GATED_MIDDLES = {F.silu: 3, F.gelu: 4}  # the same, for gated MLPs
PRECISIONS = {"fp32": 0, "bf16": 1, "bf16 tiles": 2}  # the enum `Precision` of blocks.cpp
HUGE_PAGE = 2**21  # bytes
WEIGHTS = 7  # of a branch, as the enum `Weight` of blocks.cpp; the last one is the scale of the logits
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
VALUES: dict[type, tuple[str, ...]] = {  # what the forward functions of a block read, besides weights and other modules
    Block: ("norm_first", "reduction"),
    nn.LayerNorm: ("normalized_shape", "eps"),
    nn.GELU: ("approximate",),
    GatedUnit: ("act",),
    LayerScale: ("factor",),
}


class NotAvailable(RuntimeError):
    """Error that says why the native kernel cannot be used on this machine."""


# Compilation


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernel, as a library of C functions. It is compiled if the cache has none for this source, compiler
    and processor, which takes some seconds.

    The file lies in `code_folder()`; the environment variable CXX names another compiler.

    Raises NotAvailable if there is no compiler, if compilation fails, or if another process compiles for very long.
    """
    folder = code_folder()
    try:
        compiler = find_compiler()
        version = run([*compiler, "--version"])
        target = run([*compiler, "-march=native", "-E", "-v", "-"], input="")  # what "native" means on this processor
        key = hashlib.sha256("\n".join([SOURCE.read_text(), *FLAGS, *compiler, version, target, processor()]).encode())
        path = folder / f"blocks-{key.hexdigest()[:20]}.so"
        with locked(path.with_suffix(".lock"), timeout=COMPILE_SECONDS):
            if not is_whole(path):
                compiled = compile_source(compiler)
                write_atomic(path, lambda new: new.write_bytes(compiled))
                write_text(path.with_suffix(".size"), str(len(compiled)))
        found = ctypes.CDLL(str(path))
    except (OSError, ValueError) as error:
        raise NotAvailable(f"the kernel could not be compiled or loaded in {folder}: {error}") from error
    for count in (found.blocks_kept_floats, found.blocks_scratch_floats, found.blocks_merge_floats):
        count.restype = ctypes.c_long
    return found


def is_whole(path: Path) -> bool:
    """Return whether a compiled library exists and has the size that lies beside it. A library that a full disk or the like has
    cut off would end the process when it is loaded.
    """
    try:
        return path.stat().st_size == int(path.with_suffix(".size").read_text())
    except (OSError, ValueError):
        return False


def find_compiler() -> list[str]:
    """Return the command of the C++ compiler, with its options: that of `$CXX`, or the first one that is found."""
    if given := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(given[0]) is None:
            raise NotAvailable(f"CXX is {' '.join(given)!r}, and there is no such program; expected a C++ compiler")
        return given
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found is None:
        raise NotAvailable("no C++ compiler was found; install g++ or clang++, or set CXX")
    return [found]


def run(command: Sequence[str], input: str | None = None) -> str:
    """Return the output of a command as text, with its messages."""
    done = subprocess.run(command, input=input, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.stdout


def processor() -> str:
    """Return a text that differs between processors with different instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.system()} {platform.machine()} {platform.processor()}"


def code_folder() -> Path:
    """Return the folder for compiled code. If the user's own cache folder cannot be written, it is a temporary folder, which
    nobody else can write.

    Raises NotAvailable if another user owns or can write the temporary folder, because its code would be run.
    """
    folder = cache_folder()
    if os.environ.get("SMALLVIT_CACHE"):
        return folder
    parents = [parent for parent in (folder, *folder.parents) if parent.exists()]
    if parents and os.access(parents[0], os.W_OK):
        return folder
    user = os.getuid() if hasattr(os, "getuid") else None
    folder = Path(tempfile.gettempdir()) / f"smallvit-{'cache' if user is None else user}"
    with suppress(OSError):  # `library` says if it cannot be made
        folder.mkdir(mode=0o700, exist_ok=True)
        if user is not None and (folder.lstat().st_uid != user or folder.lstat().st_mode & 0o022):
            raise NotAvailable(f"others can write the cache folder {folder}; set SMALLVIT_CACHE to a folder of your own")
    return folder


def compile_source(compiler: Sequence[str]) -> bytes:
    """Compile the kernel, and return the content of the library. Raise NotAvailable with the compiler's message."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "blocks.so"
        for flags in FOR_THIS_PROCESSOR:
            message = run([*compiler, *FLAGS, *flags, str(SOURCE), "-o", str(path)])
            if path.exists():
                return path.read_bytes()
    raise NotAvailable(f"{' '.join(compiler)} could not compile {SOURCE.name}: {message.strip()[:500]}")


@functools.cache
def has_tiles() -> bool:
    """Return whether this processor has tile registers for products of bf16 (AMX), and this process may use them."""
    return bool(library().blocks_has_tiles())


@functools.cache
def reason_against() -> str | None:
    """Return why the kernel cannot be used on this machine, or None if it can."""
    try:
        library()
    except NotAvailable as error:
        return str(error)
    return None


# What C++ reads; the fields are those of the structs `Branch` and `Blocks` in blocks.cpp


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


# Memory


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
        return Loan(self, new_memory(floats) if memory is None else memory)


class Loan:
    """Memory of a pool, to which it returns when nobody refers to this object any more."""

    def __init__(self, pool: Pool, memory: Tensor):
        self.pool, self.memory, self.pointer = pool, memory, pointer(memory)

    def __del__(self):
        with self.pool.lock:
            free = [*self.pool.free.items(), (self.memory, self.pool.loans)]
            self.pool.free = dict(free[-self.pool.most :])


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


class InPlace(local):
    """Whether gradients are added to `.grad` directly, in each thread."""

    on = False


IN_PLACE = InPlace()


@contextmanager
def gradients_in_place() -> Iterator[None]:
    """Context manager for a forward pass. Its backward pass adds the gradients of weights to their existing `.grad` itself,
    which saves time. So `torch.autograd.grad`, which expects gradients as results, must not be used after it. Where the kernel
    cannot add them, such as for weights with hooks, autograd does it: see `gradients_to_fill`.
    """
    before, IN_PLACE.on = IN_PLACE.on, True
    try:
        yield
    finally:
        IN_PLACE.on = before


# The call


class Call(NamedTuple):
    """What one forward pass hands to its backward pass, besides tensors that may need a gradient."""

    branches: "NativeBranches"
    draws: list[bool]  # for each branch: whether random images skip it (stochastic depth)
    half: bool
    gradients: bool  # whether a backward pass may follow
    kept: list[Loan]  # what the forward pass leaves for it, one for each model
    keys: bool = False  # whether the keys of the last branch, an attention, are wanted too
    weights: Sequence[Tensor | None] = ()  # read by `NativeFunctionInPlace` only, which hides them from autograd
    targets: Sequence[Tensor | None] = ()  # for it, too: the `.grad` of each weight
    stacked: bool = False  # whether the tensors have a leading axis: models with weights of their own


def compute(call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, weights: Sequence[Tensor | None]) -> Any:
    """Return the output of the branches for tokens `x`, and keep what a backward pass needs in `call.kept`. If `call.keys`,
    return also the mean over heads of the keys of the last branch. For `keep`, see `NativeBranches.kept_images`.
    """
    x, keep = in_memory(x), None if keep is None else keep.contiguous()
    out = torch.empty_like(x)
    keys = x.new_empty(*x.shape[:-1], call.branches.key_width) if call.keys else None
    for index, (tokens, result) in enumerate(zip(x, out) if call.stacked else [(x, out)]):
        own = [member(w, call, index) for w in weights]
        problem = call.branches.problem(call, tokens, member(bias, call, index), member(keep, call, index), own)
        kept = POOL.lend(library().blocks_kept_floats(problem)) if call.gradients else None
        scratch = POOL.lend(library().blocks_scratch_floats(problem, call.gradients, 0))
        to_keys = pointer(member(keys, call, index))
        library().blocks_forward(problem, pointer(tokens), pointer(result), to_keys, kept and kept.pointer, scratch.pointer)
        if kept:
            call.kept.append(kept)
    return out if keys is None else (out, keys)


def compute_backward(
    call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, d_out: Tensor, weights: Sequence[Tensor | None],
    targets: Sequence[Tensor | None],
) -> Tensor:  # fmt: skip
    """Return the gradient of the tokens `x`, from the gradient `d_out` of the output. The gradients of `weights` are added to
    the tensors in `targets`.

    Raises RuntimeError if a second derivative may follow, and if PyTorch asks for several gradients at once.
    """
    if torch.is_grad_enabled():  # with create_graph=True; a result without a graph would count as a constant
        raise RuntimeError("the native kernel has no second derivative; use --numerics kernel=rule, or leave native_kernel()")
    if is_functorch_wrapped_tensor(d_out) or is_legacy_batchedtensor(d_out):
        raise RuntimeError(
            "the native kernel computes one gradient at a time, and got several (is_grads_batched=True, or a jacobian with "
            "vectorize=True); ask for them one after another, or leave native_kernel()"
        )
    x, keep = in_memory(x), None if keep is None else keep.contiguous()
    d_x = d_out.clone(memory_format=torch.contiguous_format)
    for index, (tokens, d) in enumerate(zip(x, d_x) if call.stacked else [(x, d_x)]):
        own = [[member(t, call, index) for t in tensors] for tensors in (weights, targets)]
        problem = call.branches.problem(call, tokens, member(bias, call, index), member(keep, call, index), *own)
        scratch = POOL.lend(library().blocks_scratch_floats(problem, 1, 1))
        library().blocks_backward(problem, pointer(tokens), pointer(d), call.kept[index].pointer, scratch.pointer)
    return d_x


def compute_backward_in_place(
    call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, d_out: Tensor, weights: Sequence[Any], targets: Sequence[Any]
) -> tuple[Tensor, list[Tensor | None]]:
    """Like `compute_backward`, for `targets` that were the `.grad` of the weights in the forward pass. Return also a list
    with the gradients that autograd must add: those of weights that have another `.grad` or a hook since then. The others are
    None.
    """
    changed = [
        t is not None and not (w.grad is t and w.requires_grad and not w._backward_hooks and not w._post_accumulate_grad_hooks)
        for w, t in zip(weights, targets)
    ]
    added: list[Tensor | None] = new_gradients(weights, changed) if any(changed) else [None] * len(changed)
    own = [gradient if other else target for gradient, other, target in zip(added, changed, targets)]
    return compute_backward(call, x, bias, keep, d_out, weights, own), added


class NativeFunction(torch.autograd.Function):
    """The blocks as one operation of autograd. Under `torch.vmap` it computes one model after another."""

    @staticmethod
    def forward(call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, *weights: Tensor | None) -> Any:
        return compute(call, x, bias, keep, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any):
        call, *tensors = inputs
        if call.keys:
            ctx.mark_non_differentiable(output[1])
        ctx.call = call
        ctx.targets = gradients_to_fill(tensors[3:]) if IN_PLACE.on else None
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, (x, bias, keep, *weights) = ctx.call, ctx.saved_tensors
        if ctx.targets is not None:
            d_x, targets = compute_backward_in_place(call, x, bias, keep, d_out, weights, ctx.targets)
            return None, d_x, None, None, *targets
        targets = new_gradients(weights, ctx.needs_input_grad[4:])
        return None, compute_backward(call, x, bias, keep, d_out, weights, targets), None, None, *targets

    @staticmethod
    def vmap(info: Any, in_dims: tuple, call: Call, *tensors: Tensor | None) -> tuple[Any, Any]:
        tensors = tuple(models_first(tensors, in_dims[1:], info.batch_size))
        return NativeFunction.apply(call._replace(stacked=True), *tensors), (0, 0) if call.keys else 0


# PyTorch asks for the signature in each call; working it out takes as long as a small matrix product
vars(NativeFunction.forward)["__signature__"] = inspect.signature(NativeFunction.forward)


class NativeFunctionInPlace(torch.autograd.Function):
    """Like `NativeFunction`, but autograd does not see the weights: their gradients are added to their `.grad`. With 56 weights
    less to look at, a call of a small model takes noticeably less time. It does not work under `torch.vmap`.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, bias: Tensor, keep: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call, ctx.versions = call, versions(call.weights)
        ctx.save_for_backward(x, bias, keep)
        output = compute(call, x, bias, keep, call.weights)
        if call.keys:
            ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, (x, bias, keep) = ctx.call, ctx.saved_tensors
        if versions(call.weights) != ctx.versions:
            raise RuntimeError(
                "a weight of the native blocks was changed in place between the forward and the backward pass, which needs the "
                "old value; change weights after the backward pass"
            )
        d_x, gradients = compute_backward_in_place(call, x, bias, keep, d_out, call.weights, call.targets)
        for weight, gradient in zip(call.weights, gradients):
            # autograd, too, drops the gradient of a weight that needs none any more
            if weight is not None and gradient is not None and weight.requires_grad:
                with torch.enable_grad():
                    weight.view_as(weight).backward(gradient)
        return None, d_x, None, None


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


def models_first(tensors: Sequence[Tensor | None], axes: Sequence[int | None], models: int) -> list[Tensor | None]:
    """Return tensors with the axis of the models of a stack first, as `leading` does. What is None stays None."""
    return [None if tensor is None else leading(tensor, axis, models) for tensor, axis in zip(tensors, axes)]


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


def gradients_to_fill(weights: Sequence[Tensor | None]) -> list[Tensor | None] | None:
    """Return the `.grad` of each weight that needs a gradient, and None for the others.

    The result is None instead of a list if the kernel cannot add to each `.grad`, so that autograd must do it: one is missing,
    is not contiguous or has another number format, a weight is computed from others, a weight has a hook, or saved tensors have
    hooks.
    """
    if saved_tensors_hooks(False) is not None:
        return None
    needing: list[Any] = [weight for weight in weights if weight is not None and weight.requires_grad]
    if not all([w.is_leaf and not w._backward_hooks and not w._post_accumulate_grad_hooks for w in needing]):
        return None
    if not all([(g := w.grad) is not None and g.dtype == torch.float32 and g.is_contiguous() for w in needing]):
        return None
    return [weight.grad if weight is not None and weight.requires_grad else None for weight in weights]


def versions(weights: Sequence[Tensor | None]) -> list[int | None]:
    """Return how often PyTorch has changed each weight in place."""
    return [None if weight is None else weight._version for weight in weights]


def in_memory(tensor: Tensor) -> Tensor:
    """Return a tensor whose values lie in memory one after another. In one with the negative bit, PyTorch would negate them."""
    return tensor.contiguous().resolve_neg()


def member(tensor: Any, call: Call, index: int) -> Any:
    """Return the part of a tensor that belongs to one model of a stack, or the tensor itself if there is no stack."""
    return tensor[index] if call.stacked and tensor is not None else tensor


def new_gradients(weights: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return a tensor of zeros for each weight that needs a gradient, all in one piece of memory, and None for the others."""
    sizes = [weight.numel() if need and weight is not None else 0 for weight, need in zip(weights, needed)]
    pieces = torch.zeros(sum(sizes), dtype=torch.float32, device="cpu").split(sizes)
    triples = zip(pieces, weights, needed)
    return [piece.view(weight.shape) if weight is not None and need else None for piece, weight, need in triples]


def pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    """Return the address of the first number of a tensor, for a C function. None gives a null pointer."""
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


class NativeBranches:
    """Consecutive residual branches of blocks (attentions and MLPs), which one call of the kernel computes.

    branches   pairs of a block and whether the branch is its attention; otherwise it is its MLP
    """

    def __init__(self, branches: Sequence[tuple[Block, bool]]):
        self.branches = (Branch * len(branches))()
        self.weights: list[tuple[dict, str]] = []  # where the weights are, in the order of the enum `Weight` of blocks.cpp
        self.shapes: list[tuple[int, ...]] = []  # of the weights, as the kernel needs them
        for (block, is_attention), branch in zip(branches, self.branches):
            (self.describe_attention if is_attention else self.describe_mlp)(block, branch)
        self.drop_path: list[Any] = [(block.branch1 if is_attention else block.branch2)[-1] for block, is_attention in branches]
        self.key_width = self.branches[-1].outer // self.branches[-1].heads
        self.problems: dict[tuple, Any] = {}  # see the method `problem`

    def describe_attention(self, block: Any, branch: Branch):
        """Fill in what C++ needs to know about the attention of a block."""
        attention = block.attention
        branch.middle, branch.heads, branch.epsilon = ATTENTION, attention.heads, block.norm1.eps
        branch.outer = attention.proj.in_features
        branch.inner = 3 * branch.outer
        scale: Any = plain_attention(attention).scale  # pyright: ignore[reportOptionalMemberAccess]
        constant = None if isinstance(scale, str) else torch.full((branch.heads,), scale, dtype=torch.float32, device="cpu")
        where = (attention._parameters, scale) if constant is None else ({"": constant}, "")
        self.weights += [*addresses(block.norm1), *addresses(attention.qkv), *addresses(attention.proj), where]
        self.shapes += weight_shapes(block, branch.inner, branch.outer, branch.heads)

    def describe_mlp(self, block: Any, branch: Branch):
        """Fill in what C++ needs to know about the MLP of a block."""
        first, activation, _, second = block.mlp
        branch.middle, branch.heads, branch.epsilon = middle_of(activation), 1, block.norm2.eps
        branch.hidden, branch.outer = second.in_features, -(-second.in_features // 16) * 16
        maps = 2 if type(activation) is GatedUnit else 1
        branch.inner = maps * branch.outer
        self.weights += [*addresses(block.norm2), *addresses(first), *addresses(second), ({"": None}, "")]
        self.shapes += weight_shapes(block, maps * branch.hidden, branch.hidden, branch.heads)

    def __call__(
        self, x: Tensor, bias: Tensor, weights: Sequence[Tensor | None], half: bool, keys: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens after these branches, and the mean over heads of the keys of the last one, (b, n, e), if `keys`,
        otherwise None. `bias` is what is added to the attention logits, and `half` says whether to multiply in bf16.
        """
        draws = [drop_path.training and drop_path.rate > 0 for drop_path in self.drop_path]
        keep = self.kept_images(x, draws)
        call = Call(self, draws, half, torch.is_grad_enabled(), [], keys, weights)
        plain = peek_interpreter_stack() is None  # not under `torch.vmap`
        if plain and not call.gradients:
            out = compute(call, x, bias, keep, weights)
        elif plain and IN_PLACE.on and x.requires_grad and (targets := gradients_to_fill(weights)) is not None:
            out = NativeFunctionInPlace.apply(call._replace(targets=targets), x, bias, keep)
        else:
            out = NativeFunction.apply(call, x, bias, keep, *weights)
        return out if keys else (out, None)  # pyright: ignore[reportReturnType]

    def kept_images(self, x: Tensor, draws: Sequence[bool]) -> Tensor | None:
        """Return the factor of each image for each branch that images skip, (branches, b), or None without such branches.
        `draws` says for each branch whether images skip it. The numbers are drawn as in `smallvit.vit.DropPath`.
        """
        if not any(draws):
            return None
        ones = x.new_ones(len(x), 1, 1)
        return torch.stack([drop_path(ones).flatten() for drop_path, drawn in zip(self.drop_path, draws) if drawn])

    def problem(
        self, call: Call, x: Tensor, bias: Tensor, keep: Tensor | None, weights: Sequence, gradients: Sequence | None = None
    ) -> Any:
        """Return a reference to the `Problem` for C++. `x` (b, n, d) are the tokens of one model, `gradients` the tensors to
        which the gradients of `weights` are added. The last few problems are kept, because most steps repeat them.
        """
        threads, pointers = torch.get_num_threads(), [0 if w is None else w.data_ptr() for w in weights]
        targets = pointers if gradients is None else [0 if g is None else g.data_ptr() for g in gradients]
        key = (x.shape, bias.shape, bias.data_ptr(), call.half, threads, *pointers, *targets)
        if keep is None and (found := self.problems.get(key)):
            return found
        (images, tokens, width), branches = x.shape, type(self.branches).from_buffer_copy(self.branches)
        strides = [stride if length > 1 else 0 for stride, length in zip(bias.stride(), bias.shape[:2])]
        kept = iter(() if keep is None else keep)
        for index, (branch, drawn) in enumerate(zip(branches, call.draws)):
            own = slice(index * WEIGHTS, (index + 1) * WEIGHTS)
            branch.weight[:], branch.gradient[:] = pointers[own], targets[own]
            branch.keep = next(kept).data_ptr() if drawn else 0
            branch.logit_bias = bias.data_ptr()
            branch.bias_image, branch.bias_head, branch.bias_key = *strides, bias.stride(2)
        group = max(1, min(images, GROUP_ROWS // tokens))
        precision = PRECISIONS["fp32" if not call.half else "bf16 tiles" if has_tiles() else "bf16"]
        again = tokens > MOST_TOKENS_KEPT or precision == PRECISIONS["bf16 tiles"]  # products take less time than memory
        threads = min(threads, -(-images // group))
        problem = ctypes.byref(Problem(images, tokens, width, len(branches), group, threads, precision, again, branches))
        if keep is None:
            self.problems = dict([*self.problems.items()][-MOST_PROBLEMS + 1 :]) | {key: problem}
        return problem


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
        if torch_modules._has_any_global_hook() or any(self.hooks):
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


class NativeBlocks:
    """Consecutive blocks that the kernel can compute. An object of this class is called like `smallvit.vit.Blocks`.

    `blocks` are blocks for which `reason_against_block` gives None, with the same widths and the same kind of attention.

    One call of the kernel computes all branches up to the attention of the next block that merges tokens, and returns the keys
    by which they are merged. Another call merges the best pairs; other reductions are called as always. PyTorch
    computes all of it if a call asks for what the kernel cannot do: see `fallback`. Results agree with those of PyTorch up to
    rounding, unless rounding decides which of two tokens is more similar to a third one. With stochastic depth, the random
    numbers are the same ones, and skipped branches take no time.
    """

    def __init__(self, blocks: Sequence[Block]):
        self.blocks, self.structure = list(blocks), Structure(blocks)
        self.dropouts = [module for module in self.structure.modules if isinstance(module, nn.Dropout)]
        self.attentions = self.structure.attentions
        self.width = blocks[0].norm1.normalized_shape[0]
        self.masks_self = plain_attention(self.attentions[0]).mask_self  # pyright: ignore[reportOptionalMemberAccess]
        self.biases: dict[int, Tensor] = {}  # by number of tokens
        self.parts: list[tuple[NativeBranches, Any]] = []  # branches, and the reduction after them
        found: list[tuple[Block, bool]] = []
        for block in blocks:
            found.append((block, True))
            if block.reduction is not None:
                self.parts.append((NativeBranches(found), block.reduction))
                found = []
            found.append((block, False))
        self.parts.append((NativeBranches(found), None))
        kinds = [branch.middle == ATTENTION for branches, _ in self.parts for branch in branches.branches]
        # biases of linear maps may be missing, and an MLP has no scale of logits
        self.needed = [need for attends in kinds for need in (True, True, True, False, True, False, attends)]
        self.shapes = [shape for branches, _ in self.parts for shape in branches.shapes]
        POOL.most = max(POOL.most, 2 * len(self.parts) + 4)  # each part needs memory of its own size

    def __call__(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Any = None
    ) -> tuple:
        half, weights = torch.is_autocast_enabled("cpu"), self.weights()
        if self.fallback(x, size, mask, weights, half):
            return one_after_another(self.blocks, x, size, mask, places)
        for branches, reduction in self.parts:
            own, weights = weights[: len(branches.weights)], weights[len(branches.weights) :]
            x, keys = branches(x, self.logit_bias(x, size, mask), own, half, reduction is not None)
            if reduction is not None:
                x, size, places = self.reduce(reduction, x, size, places, keys)
        return (x, size) if places is None else (x, size, places)

    def weights(self) -> list[Any]:
        """Return the weights of all branches as they are now, in the order of the enum `Weight` of blocks.cpp."""
        return [module.get(name, "missing") for branches, _ in self.parts for module, name in branches.weights]

    def reduce(self, reduction: Any, x: Tensor, size: Tensor | None, places: Any, keys: Any) -> tuple:
        """Return the tokens, their sizes and their places after a reduction by the keys of the attention before it."""
        compiled = vars(type(reduction)).get("merges_best_pairs") and places is None
        if not compiled or (size is not None and (size.dtype != torch.float32 or size.requires_grad)):
            return reduce_tokens(reduction, x, size, places, lambda: keys)
        if not reduction.count(x.shape[1]):
            return x, size, None
        plain = peek_interpreter_stack() is None and not torch.is_grad_enabled()
        merge: Any = merge_tokens if plain else NativeMerge.apply
        return *merge(reduction, x, size, keys)[:2], None

    def fallback(
        self, x: Tensor, size: Tensor | None, mask: Tensor | None, weights: Sequence[Tensor | None], half: bool
    ) -> str | None:
        """Return why PyTorch must compute this call, or None if the kernel can.

        The reasons: tokens or weights that are not 32-bit floats on the CPU, shapes that do not fit (PyTorch then raises its
        own error), more tokens than `MOST_TOKENS`, a missing weight, another number format than bf16 or a processor without it,
        dropout, hooks, modules that have been exchanged or have their own forward function, sizes that need a gradient, no
        images at all, merging with a mask or with stochastic depth, transforms of PyTorch other than one `torch.vmap`, and
        tools of PyTorch that watch each operation or record a graph.
        """
        if torch.compiler.is_compiling() or is_tracing() or dispatch_mode() is not None or has_function_mode():
            return "PyTorch records or watches its operations"
        if type(x) is not Tensor or x.device.type != "cpu" or x.dtype != torch.float32 or not x.numel():
            return "the tokens are not 32-bit floats on the CPU"
        if x.ndim != 3 or x.shape[2] != self.width or (size is not None and size.shape != x.shape[:2]):
            return "the tokens or their sizes have another shape than (images, tokens, width) or (images, tokens)"
        if x.shape[1] > MOST_TOKENS:
            return "PyTorch is faster for so many tokens"
        if mask is not None and not self.fits(mask, x):
            return "the mask has another shape than the attention map"
        if transform() == "other":
            return "PyTorch transforms its operations by something else than one torch.vmap"
        if reason := self.structure.reason_against():
            return reason
        if reason := self.reason_against_weights(weights):
            return reason
        if half and (torch.get_autocast_dtype("cpu") != torch.bfloat16 or not library().blocks_has_bf16()):
            return "this processor does not multiply in bf16"
        if size is not None and size.requires_grad:
            return "the sizes need a gradient"
        if any(module.training and module.p for module in self.dropouts):
            return "there is dropout"
        if any(attention.training and attention.dropout for attention in self.attentions):
            return "there is dropout of the attention map"
        if len(self.parts) > 1 and mask is not None:
            return "a mask cannot follow merged tokens"
        if any(each.training and each.rate for branches, _ in self.parts[:-1] for each in branches.drop_path):
            return "an image that skips the attention has no keys by which tokens could be merged"
        return None

    def reason_against_weights(self, weights: Sequence[Any]) -> str | None:
        """Return why the kernel cannot compute with these weights, or None if it can."""
        if any([weight is None and needed for weight, needed in zip(weights, self.needed)]):
            return "a weight is missing"
        given = [weight for weight in weights if weight is not None]
        if not {*map(type, given)} <= {nn.Parameter, Tensor}:
            return "a weight is no plain tensor"
        if not all([w.dtype == torch.float32 and w.is_cpu and w.is_contiguous() and not w.is_neg() for w in given]):
            return "the weights are not 32-bit floats on the CPU, one after another"
        if [w.shape for w in given] != [shape for weight, shape in zip(weights, self.shapes) if weight is not None]:
            return "a weight has another shape than in the blocks at first"
        return None

    def fits(self, mask: Tensor, x: Tensor) -> bool:
        """Return whether a mask can be expanded to the attention maps of all blocks for tokens `x`."""
        b, n, _ = x.shape
        shape = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        maps = [(b, attention.heads, n, n) for attention in self.attentions]
        return all(len(shape) == 4 and all(own in (1, full) for own, full in zip(shape, one)) for one in maps)

    def logit_bias(self, x: Tensor, size: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return what is added to the attention logits: log(size), and -inf where the mask is False.

        The shape is (b, heads, keys) if it is the same for all queries, or else (b, heads, keys, m), where m is the number of
        queries rounded up to whole vectors. The first two may be 1.
        """
        n = x.shape[1]
        plain = size is None and mask is None
        if plain and n in self.biases:
            return self.biases[n]
        if self.masks_self:
            mask = mask_diagonal(n, size, mask, x.device)
        bias = logit_bias(None if size is None else size.detach(), mask)
        bias = torch.zeros(n, dtype=torch.float32, device="cpu") if bias is None else bias
        bias = bias.reshape(*[1] * (4 - bias.ndim), *bias.shape).float()
        if bias.shape[-1] == 1:
            bias = bias.expand(*bias.shape[:-1], n)
        if bias.shape[2] == 1:
            bias = bias[:, :, 0].contiguous()
        else:
            bias = F.pad(bias.transpose(2, 3), (0, -n % library().blocks_lanes())).contiguous()
        if plain and not bias.is_inference() and not is_functorch_wrapped_tensor(bias):  # those are of no use in a later call
            self.biases = dict([*self.biases.items()][-MOST_PROBLEMS + 1 :]) | {n: bias}
        return bias


def addresses(module: nn.Module) -> list[tuple[dict, str]]:
    """Return where the weight and the bias of a module are found when they are needed: they may be exchanged until then."""
    return [(module._parameters, name) for name in ("weight", "bias")]


def weight_shapes(block: Any, inner: int, outer: int, heads: int) -> list[tuple[int, ...]]:
    """Return the shapes of the weights of a branch, in the order of the enum `Weight` of blocks.cpp."""
    width: Any = block.norm1.normalized_shape[0]
    return [(width,), (width,), (inner, width), (inner,), (width, outer), (width,), (heads,)]


def has_function_mode() -> bool:
    """Return whether a tool of PyTorch, a `TorchFunctionMode`, watches each function. A default device is no such tool."""
    return torch._C._len_torch_function_stack() > 0 and any(type(mode) is not DeviceContext for mode in function_modes())


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
    alone = block.reduction is None or vars(type(block.reduction)).get("needs_keys_alone")
    if not alone or runs_before_attention(block.reduction):
        return f"{type(block.reduction).__name__} does not say that the keys of the attention are all that it needs"
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


def middle_of(activation: Any) -> int | None:
    """Return the number of an activation in the enum `Middle` of blocks.cpp, or None if the kernel cannot compute it."""
    if type(activation) is GatedUnit:
        return GATED_MIDDLES.get(activation.act)
    return MIDDLES.get(type(activation)) if getattr(activation, "approximate", "none") == "none" else None


def kind(block: Any) -> tuple:
    """Return what consecutive blocks must have in common to be computed in one call; None first if they cannot be."""
    if reason_against_block(block):
        return (None,)
    return block.norm1.normalized_shape, plain_attention(block.attention).mask_self  # pyright: ignore


def plain_attention(attention: Any) -> PlainAttention | None:
    """Return what the class of an attention module says about it by `as_plain`; None if only a parent class says something."""
    return attention.as_plain() if "as_plain" in vars(type(attention)) else None


def native_blocks(objective: nn.Module) -> list[tuple[Any, Any]]:
    """Return a list of pairs: each list of blocks inside a training objective, and what is called in its place. Lists of which
    the kernel can compute no block are left out, and all lists if the kernel cannot be used on this machine.

    A note on the error stream names the blocks that PyTorch computes, and the reason.
    """
    found: list[Any] = [module for module in objective.modules() if isinstance(module, Blocks)]
    if not found:
        return []
    if reason := reason_against():
        note(f"the native kernel cannot be used: {reason}; PyTorch computes all blocks")
        return []
    pairs = []
    for blocks in found:
        if type(blocks) is not Blocks:
            note(f"PyTorch computes {len(blocks)} of {len(blocks)} blocks: {type(blocks).__name__} is another kind of list")
            continue
        for reason, count in Counter(filter(None, map(reason_against_block, blocks))).items():
            note(f"PyTorch computes {count} of {len(blocks)} blocks: {reason}")
        runs: list[Any] = [(key[0], list(run)) for key, run in groupby(blocks, kind)]
        if any(first is not None for first, _ in runs):
            parts = [part for first, run in runs for part in (run if first is None else [NativeBlocks(run)])]
            pairs.append((blocks, functools.partial(call_parts, parts, blocks, [*blocks])))
    return pairs


def call_parts(parts: Sequence[Any], blocks: Any, members: list[nn.Module], *inputs: Any, **options: Any) -> tuple:
    """Call the parts of a list of blocks one after another. If the list has other blocks than `members`, or hooks, or a forward
    function of its own, call the list itself.
    """
    if torch.compiler.is_compiling() or not is_as_made(blocks, Blocks) or [*blocks._modules.values()] != members:
        return blocks._call_impl(*inputs, **options)
    return one_after_another(parts, *inputs, **options)


def is_as_made(module: Any, kind: type) -> bool:
    """Return whether calling a module computes what its class `kind` says, and nobody else takes part in the call by a hook."""
    own = vars(module)
    hooked = torch_modules._has_any_global_hook() or any(own[hooks] for hooks in HOOKS)
    return type(module) is kind and "forward" not in own and not hooked


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


@functools.cache
def note(text: str):
    """Print a note on the error stream, once in a process."""
    print(f"note: {text}", file=sys.stderr, flush=True)
