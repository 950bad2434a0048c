"""The residual branches of blocks, which one call of the kernel computes: what C++ needs to know about them."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.attention import PlainAttention
from smallvit.vit import Block, GatedUnit

from .autograd import IN_PLACE, Call, NativeFunction, NativeFunctionInPlace, compute, gradients_to_fill
from .compiler import has_tiles
from .memory import WEIGHTS, Branch, Problem
from .torch_internals import peek_interpreter_stack

GROUP_ROWS = 256  # tokens of the images that go through all blocks together
MOST_TOKENS_KEPT = 128  # with more tokens, the backward pass computes the insides of branches again, instead of keeping them
MOST_PROBLEMS = 8  # descriptions of a call that are kept for the next one
ATTENTION, MIDDLES = 0, {nn.GELU: 1, nn.ReLU: 2}  # the enum `Middle` of blocks.cpp
GATED_MIDDLES = {F.silu: 3, F.gelu: 4}  # the same, for gated MLPs
PRECISIONS = {"fp32": 0, "bf16": 1, "bf16 tiles": 2}  # the enum `Precision` of blocks.cpp


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
        with torch.inference_mode(False):  # a tensor that autograd can save later
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


def addresses(module: nn.Module) -> list[tuple[dict, str]]:
    """Return where the weight and the bias of a module are found when they are needed: they may be exchanged until then."""
    return [(module._parameters, name) for name in ("weight", "bias")]


def weight_shapes(block: Any, inner: int, outer: int, heads: int) -> list[tuple[int, ...]]:
    """Return the shapes of the weights of a branch, in the order of the enum `Weight` of blocks.cpp."""
    width: Any = block.norm1.normalized_shape[0]
    return [(width,), (width,), (inner, width), (inner,), (width, outer), (width,), (heads,)]


def middle_of(activation: Any) -> int | None:
    """Return the number of an activation in the enum `Middle` of blocks.cpp, or None if the kernel cannot compute it."""
    if type(activation) is GatedUnit:
        return GATED_MIDDLES.get(activation.act)
    return MIDDLES.get(type(activation)) if getattr(activation, "approximate", "none") == "none" else None


def plain_attention(attention: Any) -> PlainAttention | None:
    """Return what the class of an attention module says about it by `as_plain`; None if only a parent class says something."""
    return attention.as_plain() if "as_plain" in vars(type(attention)) else None
