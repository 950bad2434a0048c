"""The blocks of a model that the kernel computes in the place of PyTorch, and the calls that it leaves to PyTorch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smallvit.attention import logit_bias, mask_diagonal, mean_over_queries
from smallvit.attention import weights as attention_map
from smallvit.convolution import transform
from smallvit.reduction.context import reduce_tokens, runs_before_attention
from smallvit.vit import Block, Blocks, one_after_another

from .branches import ATTENTION, MOST_PROBLEMS, NativeBranches, plain_attention
from .checks import Structure, is_as_made, is_watched, needs_of, reason_against_block
from .compiler import library, note, reason_against
from .memory import POOL
from .merging import NativeMerge, merge_tokens
from .torch_internals import is_functorch_wrapped_tensor, peek_interpreter_stack

MOST_TOKENS = 768  # with more tokens, PyTorch is faster, because it does not keep whole attention maps


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
            pairs.append((blocks, partial(call_parts, parts, blocks, [*blocks])))
    return pairs


def call_parts(parts: Sequence[Any], blocks: Any, members: list[nn.Module], *inputs: Any, **options: Any) -> tuple:
    """Call the parts of a list of blocks one after another. If the list has other blocks than `members`, or hooks, or a forward
    function of its own, call the list itself.
    """
    if torch.compiler.is_compiling() or not is_as_made(blocks, Blocks) or [*blocks._modules.values()] != members:
        return blocks._call_impl(*inputs, **options)
    return one_after_another(parts, *inputs, **options)


def is_native_call(called: Any) -> bool:
    """Return whether what is called in place of a module is what `native_blocks` returned."""
    return getattr(called, "func", None) is call_parts


class NativeBlocks:
    """Consecutive blocks that the kernel can compute. An object of this class is called like `smallvit.vit.Blocks`.

    `blocks` are blocks for which `reason_against_block` gives None, with the same widths and the same kind of attention.

    One call of the kernel computes all branches up to the next block that merges or prunes tokens, and returns the keys by
    which they are merged. Another call merges the best pairs; other reductions are called as always, with what they need of
    the attention. PyTorch computes all of it if a call asks for what the kernel cannot do (see `fallback`), and the rest of it
    after a reduction whose sizes have a gradient. Results agree with those of PyTorch up to rounding, unless rounding decides
    which of two tokens is merged or pruned. With stochastic depth, the random numbers are the same ones, and skipped branches
    take no time.
    """

    def __init__(self, blocks: Sequence[Block]):
        self.blocks, self.structure = list(blocks), Structure(blocks)
        self.dropouts = [module for module in self.structure.modules if isinstance(module, nn.Dropout)]
        self.attentions = self.structure.attentions
        self.width = blocks[0].norm1.normalized_shape[0]
        self.masks_self = plain_attention(self.attentions[0]).mask_self  # pyright: ignore[reportOptionalMemberAccess]
        self.calls = 0  # how often the kernel has computed them
        self.biases: dict[int, Tensor] = {}  # by number of tokens
        self.parts = [*parts_of(blocks)]
        self.branches = [part.branches for part in self.parts if part.branches]
        kinds = [branch.middle == ATTENTION for branches in self.branches for branch in branches.branches]
        # biases of linear maps may be missing, and an MLP has no scale of logits
        self.needed = [need for attends in kinds for need in (True, True, True, False, True, False, attends)]
        self.shapes = [shape for branches in self.branches for shape in branches.shapes]
        POOL.most = max(POOL.most, 2 * len(self.branches) + 4)  # each part needs memory of its own size

    def __call__(self, x: Tensor, size: Tensor | None = None, mask: Tensor | None = None, places: Any = None) -> tuple:
        half, weights = torch.is_autocast_enabled("cpu"), self.weights()
        if self.fallback(x, size, mask, weights, half):
            return one_after_another(self.blocks, x, size, mask, places)
        self.calls += 1
        for branches, reduced, needs in self.parts:
            before, keys = x, None
            if branches is not None:
                own, weights = weights[: len(branches.weights)], weights[len(branches.weights) :]
                x, keys = branches(x, self.logit_bias(x, size, mask), own, half, "key" in needs)
            if reduced is not None:
                key = (lambda keys=keys: keys) if "key" in needs else None
                attended = partial(saliency, self.blocks[reduced], before, size) if "saliency" in needs else None
                x, size, places = self.reduce(self.blocks[reduced].reduction, x, size, places, key, attended)
                if not goes_on(x, size, self.width):
                    return rest(self.blocks[reduced:], x, size, places)
        return (x, size) if places is None else (x, size, places)

    def weights(self) -> list[Any]:
        """Return the weights of all branches as they are now, in the order of the enum `Weight` of blocks.cpp."""
        return [module.get(name, "missing") for branches in self.branches for module, name in branches.weights]

    def reduce(self, reduction: Any, x: Tensor, size: Tensor | None, places: Any, key: Any, attended: Any) -> tuple:
        """Return the tokens, their sizes and their places after a reduction. `key` and `attended` are the functions `key` and
        `saliency` of the attention before it, each None if the reduction does not need it.
        """
        if runs_before_attention(reduction):
            return reduce_tokens(reduction, x, size, places)
        compiled = vars(type(reduction)).get("merges_best_pairs") and places is None
        if not compiled or (size is not None and (size.dtype != torch.float32 or size.requires_grad)):
            return reduce_tokens(reduction, x, size, places, key, attended)
        if not reduction.count(x.shape[1]):
            return x, size, None
        plain = peek_interpreter_stack() is None and not torch.is_grad_enabled()
        merge: Any = merge_tokens if plain else NativeMerge.apply
        return *merge(reduction, x, size, key())[:2], None

    def fallback(
        self, x: Tensor, size: Tensor | None, mask: Tensor | None, weights: Sequence[Tensor | None], half: bool
    ) -> str | None:
        """Return why PyTorch must compute this call, or None if the kernel can.

        The reasons: tokens or weights that are not 32-bit floats on the CPU, shapes that do not fit (PyTorch then raises its
        own error), more tokens than `MOST_TOKENS`, a missing weight, another number format than bf16 or a processor without it,
        dropout, hooks, modules that have been exchanged or have their own forward function, sizes that need a gradient, no
        images at all, a mask for blocks that reduce tokens, merging with stochastic depth, transforms of PyTorch other than one
        `torch.vmap`, and tools of PyTorch that watch each operation or record a graph.
        """
        if is_watched():
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
        if any(each.training and each.rate for part in self.parts if "key" in part.needs for each in part.branches.drop_path):
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


class Part(NamedTuple):
    """Branches of blocks that one call computes, and a reduction after them.

    branches  the branches, None if there is only a reduction
    reduced   the position of the block with the reduction, None if there is none
    needs     what the reduction needs of the attention, see the contract in `smallvit.reduction`
    """

    branches: Any
    reduced: int | None
    needs: tuple[str, ...]


def parts_of(blocks: Sequence[Block]) -> Iterator[Part]:
    """Yield the parts of some blocks that are computed one after another. A reduction ends a part. The attention of a block
    whose reduction asks for its saliency is alone in a part, because the saliency is computed from the tokens before it.
    """
    found: list[tuple[Block, bool]] = []
    for index, block in enumerate(blocks):
        reduction, needs = block.reduction, needs_of(block.reduction) or ()
        first = runs_before_attention(reduction)
        if found and (first or "saliency" in needs):
            yield Part(NativeBranches(found), index if first else None, ())
            found = []
        elif first:
            yield Part(None, index, ())
        found.append((block, True))
        if reduction is not None and not first:
            yield Part(NativeBranches(found), index, needs)
            found = []
        found.append((block, False))
    yield Part(NativeBranches(found), None, ())


def goes_on(x: Tensor, size: Tensor | None, width: int) -> bool:
    """Return whether the kernel can go on with the tokens and the sizes that a reduction returned. It reads 32-bit floats, and
    has no gradient for sizes. `width` is that of the tokens.
    """
    if type(x) is not Tensor or x.dtype != torch.float32 or x.device.type != "cpu" or x.ndim != 3 or not x.numel():
        return False
    return x.shape[2] == width and (size is None or (size.shape == x.shape[:2] and not size.requires_grad))


def rest(blocks: Sequence[Any], x: Tensor, size: Tensor | None, places: Any) -> tuple:
    """Return what PyTorch computes of blocks from the reduction of the first one on, which gave `x`, `size` and `places`."""
    first, *others = blocks
    if runs_before_attention(first.reduction):
        x = x + first.branch1(first.attention(first.norm1(x), size).x)
    x = x + first.branch2(first.mlp(first.norm2(x)))
    return one_after_another(others, x, size, None, places)


def saliency(block: Any, x: Tensor, size: Tensor | None, queries: int | None = None) -> Tensor:
    """Return how much attention each token receives in a block, (b, n), like `AttentionOutput.saliency`. `x` are the tokens
    before the attention. PyTorch computes the keys and the first `queries` queries once more.
    """
    attention, n = block.attention, x.shape[1]
    scale, masks_self = plain_attention(attention)  # pyright: ignore[reportGeneralTypeIssues]
    x = block.norm1(x)
    (q_weight, k_weight, _), (q_bias, k_bias, _) = attention.qkv.weight.chunk(3), split_bias(attention.qkv.bias)
    projected = F.linear(x[:, :queries], q_weight, q_bias), F.linear(x, k_weight, k_bias)
    q, k = (each.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for each in projected)
    scale = getattr(attention, scale)[:, None, None] if isinstance(scale, str) else scale
    mask = mask_diagonal(n, size, None, x.device)[..., :queries, :] if masks_self else None
    rows = attention_map(q * scale, k, size, mask)
    return mean_over_queries(rows.mean(1), None if queries is not None else size)


def split_bias(bias: Tensor | None) -> Sequence[Tensor | None]:
    """Return the parts of the bias of queries, keys and values; None if there is no bias."""
    return [None] * 3 if bias is None else bias.chunk(3)


def kind(block: Any) -> tuple:
    """Return what consecutive blocks must have in common to be computed in one call; None first if they cannot be."""
    if reason_against_block(block):
        return (None,)
    return block.norm1.normalized_shape, plain_attention(block.attention).mask_self  # pyright: ignore
