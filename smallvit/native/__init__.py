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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from threading import RLock, local
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch.jit._trace import is_tracing
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_mode

from smallvit.attention import PlainAttention, logit_bias, mask_diagonal
from smallvit.convolution import leading, transform
from smallvit.pooling import ClassToken
from smallvit.reduction.context import gather_tokens, reduce_tokens, runs_before_attention
from smallvit.storage import cache_folder, write_atomic
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import Block, Blocks, GatedUnit, ViT, one_after_another

SOURCE = Path(__file__).with_name("blocks.cpp")
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
FOR_THIS_PROCESSOR = (("-march=native",), ("-mcpu=native",), ())  # the first one that the compiler accepts
GROUP_ROWS = 256  # tokens of the images that go through all blocks together
MOST_TOKENS_KEPT = 128  # with more tokens, the backward pass computes the insides of branches again, instead of keeping them
TOKENS_PER_THREAD = 2_048  # a further thread merges tokens only if there are so many more; starting it takes time
MOST_PROBLEMS = 8  # descriptions of a call that are kept for the next one
ATTENTION, MIDDLES = 0, {nn.GELU: 1, nn.ReLU: 2}  # the enum `Middle` of blocks.cpp
GATED_MIDDLES = {F.silu: 3, F.gelu: 4}  # the same, for gated MLPs
PRECISIONS = {"fp32": 0, "bf16": 1, "bf16 tiles": 2}  # the enum `Precision` of blocks.cpp
HUGE_PAGE = 2**21  # bytes
WEIGHTS = 7  # of a branch, as the enum `Weight` of blocks.cpp; the last one is the scale of the logits


class NotAvailable(RuntimeError):
    """Error that says why the native kernel cannot be used on this machine."""


# Compilation


@functools.cache
def library() -> ctypes.CDLL:
    """Return the compiled kernel, as a library of C functions. It is compiled if the cache has none for this source, compiler
    and processor, which takes some seconds.

    The file lies in `code_folder()`; the environment variable CXX names another compiler.

    Raises NotAvailable if there is no compiler, or if compilation fails.
    """
    from filelock import FileLock

    folder = code_folder()
    try:
        compiler = find_compiler()
        version = run([*compiler, "--version"])
        target = run([*compiler, "-march=native", "-E", "-v", "-"], input="")  # what "native" means on this processor
        key = hashlib.sha256("\n".join([SOURCE.read_text(), *FLAGS, *compiler, version, target, processor()]).encode())
        path = folder / f"blocks-{key.hexdigest()[:20]}.so"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                compiled = compile_source(compiler)
                write_atomic(path, lambda new: new.write_bytes(compiled))
        found = ctypes.CDLL(str(path))
    except (OSError, ValueError) as error:
        raise NotAvailable(f"the kernel could not be compiled or loaded in {folder}: {error}") from error
    for count in (found.blocks_kept_floats, found.blocks_scratch_floats, found.blocks_merge_floats):
        count.restype = ctypes.c_long
    return found


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
        self.free: list[Tensor] = []
        self.most = most
        self.lock = RLock()  # for several threads; a loan may also end in the middle of `lend`

    def lend(self, floats: int) -> "Loan":
        """Return a `Loan` of at least so many floats."""
        with self.lock:
            fitting = [memory for memory in self.free if floats <= memory.numel() <= 2 * floats]
            memory = min(fitting, key=Tensor.numel, default=None)
            self.free = [other for other in self.free if other is not memory]
        return Loan(self, new_memory(floats) if memory is None else memory)


class Loan:
    """Memory of a pool, to which it returns when nobody refers to this object any more."""

    def __init__(self, pool: Pool, memory: Tensor):
        self.pool, self.memory, self.pointer = pool, memory, pointer(memory)

    def __del__(self):
        with self.pool.lock:
            self.pool.free = [*self.pool.free, self.memory][-self.pool.most :]


def new_memory(floats: int) -> Tensor:
    """Return a new tensor of so many floats, without values. On Linux a large one lies on pages of 2 MB instead of 4 kB: the
    processor then looks up fewer addresses, and reads it up to twice as fast if it is larger than the cache.
    """
    size = 4 * floats
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(floats)
    with suppress(OSError):  # a system without such pages, or too little memory, which PyTorch then says
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.float32)
    return torch.empty(floats)


POOL = Pool()


class InPlace(local):
    """Whether gradients are added to `.grad` directly, in each thread."""

    on = False


IN_PLACE = InPlace()


@contextmanager
def gradients_in_place() -> Iterator[None]:
    """Context manager for a forward pass. Its backward pass adds the gradients of weights to their existing `.grad` itself,
    which saves time. So `torch.autograd.grad`, which expects gradients as results, must not be used after it.
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
    keep: list[Tensor | None]  # for each branch: a factor for each image (stochastic depth)
    half: bool
    gradients: bool  # whether a backward pass may follow
    kept: list[Loan]  # what the forward pass leaves for it, one for each model
    keys: bool = False  # whether the keys of the last branch, an attention, are wanted too
    weights: Sequence[Tensor | None] = ()  # read by `NativeFunctionInPlace` only, which hides them from autograd
    stacked: bool = False  # whether the tensors have a leading axis: models with weights of their own


def compute(call: Call, x: Tensor, bias: Tensor, weights: Sequence[Tensor | None]) -> Any:
    """Return the output of the branches for tokens `x`, and keep what a backward pass needs in `call.kept`. If `call.keys`,
    return also the mean over heads of the keys of the last branch.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    keys = x.new_empty(*x.shape[:-1], call.branches.key_width) if call.keys else None
    for index, (tokens, result) in enumerate(zip(x, out) if call.stacked else [(x, out)]):
        problem = call.branches.problem(call, tokens, member(bias, call, index), [member(w, call, index) for w in weights])
        kept = POOL.lend(library().blocks_kept_floats(problem)) if call.gradients else None
        scratch = POOL.lend(library().blocks_scratch_floats(problem, call.gradients, 0))
        to_keys = pointer(member(keys, call, index))
        library().blocks_forward(problem, pointer(tokens), pointer(result), to_keys, kept and kept.pointer, scratch.pointer)
        if kept:
            call.kept.append(kept)
    return out if keys is None else (out, keys)


def compute_backward(
    call: Call, x: Tensor, bias: Tensor, d_out: Tensor, weights: Sequence[Tensor | None], targets: Sequence[Tensor | None]
) -> Tensor:
    """Return the gradient of the tokens `x`, from the gradient `d_out` of the output. The gradients of `weights` are added to
    the tensors in `targets`.
    """
    if torch.is_grad_enabled():  # with create_graph=True; a result without a graph would count as a constant
        raise RuntimeError("the native kernel has no second derivative; use --numerics kernel=rule, or leave native_kernel()")
    x, d_x = x.contiguous(), d_out.clone(memory_format=torch.contiguous_format)
    for index, (tokens, d) in enumerate(zip(x, d_x) if call.stacked else [(x, d_x)]):
        own = [[member(t, call, index) for t in tensors] for tensors in (weights, targets)]
        problem = call.branches.problem(call, tokens, member(bias, call, index), *own)
        scratch = POOL.lend(library().blocks_scratch_floats(problem, 1, 1))
        library().blocks_backward(problem, pointer(tokens), pointer(d), call.kept[index].pointer, scratch.pointer)
    return d_x


class NativeFunction(torch.autograd.Function):
    """The blocks as one operation of autograd. Under `torch.vmap` it computes one model after another."""

    @staticmethod
    def forward(call: Call, x: Tensor, bias: Tensor, *weights: Tensor | None) -> Any:
        return compute(call, x, bias, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any):
        call, *tensors = inputs
        if call.keys:
            ctx.mark_non_differentiable(output[1])
        ctx.call = call
        ctx.in_place = IN_PLACE.on and have_gradients(tensors[2:])
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, (x, bias, *weights) = ctx.call, ctx.saved_tensors
        targets = existing_gradients(weights) if ctx.in_place else new_gradients(weights, ctx.needs_input_grad[3:])
        d_x = compute_backward(call, x, bias, d_out, weights, targets)
        return None, d_x, None, *([None] * len(weights) if ctx.in_place else targets)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, call: Call, x: Tensor, bias: Tensor, *weights: Tensor | None) -> tuple[Any, Any]:
        tensors = models_first((x, bias, *weights), in_dims[1:], info.batch_size)
        return NativeFunction.apply(call._replace(stacked=True), *tensors), (0, 0) if call.keys else 0


# PyTorch asks for the signature in each call; working it out takes as long as a small matrix product
vars(NativeFunction.forward)["__signature__"] = inspect.signature(NativeFunction.forward)


class NativeFunctionInPlace(torch.autograd.Function):
    """Like `NativeFunction`, but autograd does not see the weights: their gradients are added to their `.grad`. With 56 weights
    less to look at, a call of a small model takes noticeably less time. It does not work under `torch.vmap`.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, bias: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call = call
        ctx.save_for_backward(x, bias)
        output = compute(call, x, bias, call.weights)
        if call.keys:
            ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, (x, bias) = ctx.call, ctx.saved_tensors
        return None, compute_backward(call, x, bias, d_out, call.weights, existing_gradients(call.weights)), None


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
    (images, n, width), x, keys = x.shape, x.contiguous(), keys.contiguous()
    size = None if size is None else size.contiguous()
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


def existing_gradients(weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the `.grad` of each weight that needs a gradient, and None for the others."""
    return [weight.grad if weight is not None and weight.requires_grad else None for weight in weights]


def have_gradients(weights: Sequence[Tensor | None]) -> bool:
    """Return whether all weights that need a gradient have one already, to which more can be added."""
    return all(weight is None or not weight.requires_grad or weight.grad is not None for weight in weights)


def member(tensor: Any, call: Call, index: int) -> Any:
    """Return the part of a tensor that belongs to one model of a stack, or the tensor itself if there is no stack."""
    return tensor[index] if call.stacked and tensor is not None else tensor


def new_gradients(weights: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return a tensor of zeros for each weight that needs a gradient, all in one piece of memory, and None for the others."""
    sizes = [weight.numel() if need and weight is not None else 0 for weight, need in zip(weights, needed)]
    pieces = torch.zeros(sum(sizes)).split(sizes)
    triples = zip(pieces, weights, sizes)
    return [piece.view(weight.shape) if weight is not None and size else None for piece, weight, size in triples]


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
        for (block, is_attention), branch in zip(branches, self.branches):
            (self.describe_attention if is_attention else self.describe_mlp)(block, branch)
        self.drop_path: list[Any] = [(block.branch1 if is_attention else block.branch2)[-1] for block, is_attention in branches]
        self.key_width = self.branches[-1].outer // self.branches[-1].heads
        self.problems: dict[tuple, Any] = {}  # see the method `problem`

    def describe_attention(self, block: Any, branch: Branch):
        """Fill in what C++ needs to know about the attention of a block."""
        attention = block.attention
        branch.middle, branch.heads, branch.epsilon = ATTENTION, attention.heads, block.norm1.eps
        branch.inner, branch.outer = attention.qkv.out_features, attention.proj.in_features
        scale: Any = plain_attention(attention).scale  # pyright: ignore[reportOptionalMemberAccess]
        where = (attention._parameters, scale) if isinstance(scale, str) else ({"": torch.full((attention.heads,), scale)}, "")
        self.weights += [*addresses(block.norm1), *addresses(attention.qkv), *addresses(attention.proj), where]

    def describe_mlp(self, block: Any, branch: Branch):
        """Fill in what C++ needs to know about the MLP of a block."""
        first, activation, _, second = block.mlp
        branch.middle, branch.heads, branch.epsilon = middle_of(activation), 1, block.norm2.eps
        branch.hidden, branch.outer = second.in_features, -(-second.in_features // 16) * 16
        branch.inner = branch.outer * (2 if type(activation) is GatedUnit else 1)
        self.weights += [*addresses(block.norm2), *addresses(first), *addresses(second), ({}, "")]

    def __call__(
        self, x: Tensor, bias: Tensor, weights: Sequence[Tensor | None], half: bool, keys: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens after these branches, and the mean over heads of the keys of the last one, (b, n, e), if `keys`,
        otherwise None. `bias` is what is added to the attention logits, and `half` says whether to multiply in bf16.
        """
        call = Call(self, self.kept_images(x), half, torch.is_grad_enabled(), [], keys, weights)
        plain = peek_interpreter_stack() is None  # not under `torch.vmap`
        if plain and not call.gradients:
            out = compute(call, x, bias, weights)
        elif plain and IN_PLACE.on and x.requires_grad and have_gradients(weights):
            out = NativeFunctionInPlace.apply(call, x, bias)
        else:
            out = NativeFunction.apply(call, x, bias, *weights)
        return out if keys else (out, None)  # pyright: ignore[reportReturnType]

    def kept_images(self, x: Tensor) -> list[Tensor | None]:
        """Return the factor of each image for each branch, or None for a branch without stochastic depth. The numbers are drawn
        as in `smallvit.vit.DropPath`.
        """
        drawn = [drop_path.training and drop_path.rate > 0 for drop_path in self.drop_path]
        ones = x.new_ones(len(x), 1, 1) if any(drawn) else x
        return [drop_path(ones).flatten() if draws else None for drop_path, draws in zip(self.drop_path, drawn)]

    def problem(
        self, call: Call, x: Tensor, bias: Tensor, weights: Sequence, gradients: Sequence | None = None
    ) -> Any:
        """Return a reference to the `Problem` for C++. `x` (b, n, d) are the tokens of one model, `gradients` the tensors to
        which the gradients of `weights` are added. The last few problems are kept, because most steps repeat them.
        """
        threads, pointers = torch.get_num_threads(), [0 if w is None else w.data_ptr() for w in weights]
        targets = pointers if gradients is None else [0 if g is None else g.data_ptr() for g in gradients]
        key = (x.shape, bias.shape, bias.data_ptr(), call.half, threads, *pointers, *targets)
        repeats = call.keep.count(None) == len(call.keep)  # without stochastic depth
        if repeats and (found := self.problems.get(key)):
            return found
        (images, tokens, width), branches = x.shape, type(self.branches).from_buffer_copy(self.branches)
        strides = [stride if length > 1 else 0 for stride, length in zip(bias.stride(), bias.shape[:2])]
        for index, (branch, keep) in enumerate(zip(branches, call.keep)):
            own = slice(index * WEIGHTS, (index + 1) * WEIGHTS)
            branch.weight[:], branch.gradient[:] = pointers[own], targets[own]
            branch.keep = 0 if keep is None else keep.data_ptr()
            branch.logit_bias = bias.data_ptr()
            branch.bias_image, branch.bias_head, branch.bias_key = *strides, bias.stride(2)
        group = max(1, min(images, GROUP_ROWS // tokens))
        precision = PRECISIONS["fp32" if not call.half else "bf16 tiles" if has_tiles() else "bf16"]
        again = tokens > MOST_TOKENS_KEPT or precision == PRECISIONS["bf16 tiles"]  # products take less time than memory
        problem = ctypes.byref(Problem(images, tokens, width, len(branches), group, threads, precision, again, branches))
        if repeats:
            self.problems = dict([*self.problems.items()][-MOST_PROBLEMS + 1 :]) | {key: problem}
        return problem


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
        self.blocks = list(blocks)
        self.modules: list[Any] = [module for block in blocks for module in block.modules()]
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self.hooks = [getattr(module, kind) for module in self.modules for kind in hooks]  # PyTorch adds hooks to these dicts
        self.dropouts = [module for module in self.modules if isinstance(module, nn.Dropout)]
        self.attentions: list[Any] = [block.attention for block in blocks]
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
        POOL.most = max(POOL.most, 2 * len(self.parts) + 4)  # each part needs memory of its own size

    def __call__(
        self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Any = None
    ) -> tuple:
        half = torch.is_autocast_enabled("cpu")
        weights = [[module.get(name) for module, name in branches.weights] for branches, _ in self.parts]
        if self.fallback(x, size, mask, [weight for own in weights for weight in own], half):
            return one_after_another(self.blocks, x, size, mask, places)
        for (branches, reduction), own in zip(self.parts, weights):
            x, keys = branches(x, self.logit_bias(x, size, mask), own, half, reduction is not None)
            if reduction is not None:
                x, size, places = self.reduce(reduction, x, size, places, keys)
        return (x, size) if places is None else (x, size, places)

    def reduce(self, reduction: Any, x: Tensor, size: Tensor | None, places: Any, keys: Any) -> tuple:
        """Return the tokens, their sizes and their places after a reduction by the keys of the attention before it."""
        compiled = vars(type(reduction)).get("merges_best_pairs") and "forward" not in vars(reduction) and places is None
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
        own error), a missing weight, another number format than bf16 or a processor without it, hooks, dropout, sizes that need
        a gradient, no images at all, a reduction that has been exchanged, merging with a mask or with stochastic depth,
        transforms of PyTorch other than one `torch.vmap`, and tools of PyTorch that watch each operation or record a graph.
        """
        if type(x) is not Tensor or x.device.type != "cpu" or x.dtype != torch.float32 or not x.numel():
            return "the tokens are not 32-bit floats on the CPU"
        if x.ndim != 3 or x.shape[2] != self.width or (size is not None and size.shape != x.shape[:2]):
            return "the tokens or their sizes have another shape than (images, tokens, width) or (images, tokens)"
        if mask is not None and not self.fits(mask, x):
            return "the mask has another shape than the attention map"
        if any(w is None and needed for w, needed in zip(weights, self.needed)):
            return "a weight is missing"
        if any(w is not None and (w.dtype != torch.float32 or not w.is_contiguous()) for w in weights):
            return "the weights are not 32-bit floats, one after another"
        if half and (torch.get_autocast_dtype("cpu") != torch.bfloat16 or not library().blocks_has_bf16()):
            return "this processor does not multiply in bf16"
        if size is not None and size.requires_grad:
            return "the sizes need a gradient"
        if torch.compiler.is_compiling() or is_tracing() or dispatch_mode() is not None:
            return "PyTorch records or watches its operations"
        if transform() == "other":
            return "PyTorch transforms its operations by something else than one torch.vmap"
        if torch_modules._has_any_global_hook() or any(self.hooks):
            return "a module has a hook"
        if any(module.training and module.p for module in self.dropouts):
            return "there is dropout"
        if any(attention.training and attention.dropout for attention in self.attentions):
            return "there is dropout of the attention map"
        if [block.reduction for block in self.blocks if block.reduction is not None] != [each for _, each in self.parts[:-1]]:
            return "a reduction has been exchanged"
        if len(self.parts) > 1 and mask is not None:
            return "a mask cannot follow merged tokens"
        if any(each.training and each.rate for branches, _ in self.parts[:-1] for each in branches.drop_path):
            return "an image that skips the attention has no keys by which tokens could be merged"
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
        bias = torch.zeros(n) if bias is None else bias
        bias = bias.reshape(*[1] * (4 - bias.ndim), *bias.shape).float()
        if bias.shape[-1] == 1:
            bias = bias.expand(*bias.shape[:-1], n)
        if bias.shape[2] == 1:
            bias = bias[:, :, 0].contiguous()
        else:
            bias = F.pad(bias.transpose(2, 3), (0, -n % library().blocks_lanes())).contiguous()
        if plain and not bias.is_inference() and not is_functorch_wrapped_tensor(bias):  # those are of no use in a later call
            self.biases[n] = bias
        return bias


def addresses(module: nn.Module) -> list[tuple[dict, str]]:
    """Return where the weight and the bias of a module are found when they are needed: they may be exchanged until then."""
    return [(module._parameters, name) for name in ("weight", "bias")]


def reason_against_block(block: Any) -> str | None:
    """Return why the kernel cannot compute a block, as text, or None if it can."""
    if type(block) is not Block:
        return f"{type(block).__name__} is another kind of block"
    attention: Any = block.attention
    parts = [block.norm1, block.norm2, getattr(attention, "qkv", None), getattr(attention, "proj", None), *block.mlp[::3]]
    if getattr(attention, "position", None) is not None:
        return f"its attention has positions ({type(attention.position).__name__})"
    if plain_attention(attention) is None:
        return f"{type(attention).__name__} computes its logits in another way"
    if [type(part) for part in parts] != [nn.LayerNorm] * 2 + [nn.Linear] * 4:
        return "a norm or a linear map has been replaced"
    if any(norm.weight is None or norm.bias is None for norm in (block.norm1, block.norm2)):
        return "a norm has no weight or no bias"
    if not block.norm_first:
        return "its norms follow the branches"
    alone = block.reduction is None or vars(type(block.reduction)).get("needs_keys_alone")
    if not alone or runs_before_attention(block.reduction):
        return f"{type(block.reduction).__name__} does not say that the keys of the attention are all that it needs"
    if block.branch1[1].factor is not None:
        return "it has a LayerScale"
    width: Any = block.norm1.normalized_shape[0]
    if any(each % 16 for each in (width, attention.proj.in_features // attention.heads)):
        return "the width of the tokens or of a head is not a multiple of 16"
    if middle_of(block.mlp[1]) is None:
        return f"{block.mlp[1]} is another activation"
    return None


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
        for reason, count in Counter(filter(None, map(reason_against_block, blocks))).items():
            note(f"PyTorch computes {count} of {len(blocks)} blocks: {reason}")
        runs = [(key[0], list(run)) for key, run in groupby(blocks, kind)]
        if any(first is not None for first, _ in runs):
            parts = [part for first, run in runs for part in (run if first is None else [NativeBlocks(run)])]
            pairs.append((blocks, functools.partial(one_after_another, parts)))
    return pairs


def shortcuts(objective: nn.Module) -> list[tuple[Any, str]]:
    """Return pairs of a module inside a training objective and the name of an attribute. If the attribute is True, the module
    computes the same function in less time. Nothing is returned if the kernel cannot be used on this machine.

    A tokenizer computes its convolution as a matrix product. A ViT that uses only the class token of its last block normalizes
    only this token.
    """
    if reason_against():
        return []
    modules: list[Any] = [*objective.modules()]
    tokenizers = [m for m in modules if type(m) is PatchEmbed and m.can_be_linear and not m.linear]
    models = [m for m in modules if isinstance(m, ViT) and type(m).tokens is ViT.tokens]
    models = [m for m in models if type(m.pool) is ClassToken and type(m.norm) is nn.LayerNorm and not m.norm_after_pool]
    return [*((m, "linear") for m in tokenizers), *((m, "skips_unused_norms") for m in models)]


@functools.cache
def note(text: str):
    """Print a note on the error stream, once in a process."""
    print(f"note: {text}", file=sys.stderr, flush=True)
