"""Where attention goes: the attention map of each head, attention from one query to the patches, and attention roll-out.

Shapes: b images, h heads, n tokens (prefix tokens first), p patches. "Contents" (b n p) say how much of each patch each token
contains: with merging, a token contains several patches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from numbers import Integral, Real
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from .tokens import MAX_ELEMENTS, require_tensor, track_patches

if TYPE_CHECKING:
    from torch import Tensor, nn

Query = tuple[int, int] | None
HEADS = ("mean", "max", "min")


def attention_maps(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return a list with the attention map of each transformer block, tensors of shape (batch, heads, tokens, tokens). Row i
    holds the attention of token i to all tokens. `model` is a `ViT` with any attention and reduction, or a Vision Transformer
    of timm. `images` are normalized pixels of shape (batch, channels, height, width).

    Rows sum to 1, except for an attention that says otherwise by `rows_sum_to_1 = False` (`SigmoidAttention`,
    `DifferentialAttention`, `TalkingHeadsAttention`). The map is computed a second time from the same queries and keys; the
    output of the model still comes from its own attention kernel. The model runs in evaluation mode and is left unchanged. With
    merging or pruning the number of tokens falls from block to block; `token_shares` says which patches they contain.

    Raises   ValueError for no images, and for a block that gives no attention map (the error names the class).
    """
    parts = find_attention_parts(model, images)
    return [weights.clone() for weights in collect_maps(model, images, parts)]  # clone: no tensors of inference mode


def token_shares(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return which patches each token consists of, for a model that merges tokens: a list with one tensor (batch, tokens,
    patches) for each block. A row holds the shares of all patches in one token; a token that was merged from two patches has a
    share of 0.5 of each. `images` are normalized pixels.

    Rows sum to 1, or to 0 for a prefix token or a token of size 0. `maps[i] @ shares[i][:, None]` is attention to patches,
    shape (batch, heads, tokens, patches). It divides the attention to a merged token among its patches, in proportion to how
    much of each it contains (equal parts for `Merge`). The column of a pruned patch is 0.

    Raises   ValueError as `attention_maps` and `trace` do.
    """
    parts = find_attention_parts(model, images)
    contents = contents_before_attention(model, token_contents(model, images, parts))
    return [divide_by_token_sums(of_block) for of_block in contents]


def patch_attention(model: nn.Module, images: Tensor, *, block: int = -1, query: Query = None) -> Tensor:
    """Return the attention of one token (the query) to each patch, for each head of one block, as a tensor (batch, heads, rows,
    columns). `images` are normalized pixels.

    Rows and columns are those of the patch grid, also after merging. `block` counts from 0, or from the last block if negative.
    `query` is the (row, column) of a patch, from 0. None uses the class token; if the model does not classify by a class token,
    it uses the mean over all remaining patches. A map sums to the attention to patches, without that to prefix tokens.

    Raises   ValueError as `token_shares` does, for a block that does not exist, and for a query that is pruned before it.
    """
    parts = find_attention_parts(model, images)
    depth = len(parts.attentions)
    if not isinstance(block, Integral) or not -depth <= block < depth:
        raise ValueError(f"block is {block}; expected one of this model, from 0 to {depth - 1}")
    weights = collect_maps(model, images, parts)[block]
    contents = contents_before_attention(model, token_contents(model, images, parts))[block]
    start = query_weights(parts, contents, query, f"block {block % depth}")
    return ((start[:, None, None] @ weights).squeeze(2) @ divide_by_token_sums(contents)).unflatten(-1, parts.grid)


def rollout(
    model: nn.Module, images: Tensor, *, query: Query = None, heads: str = "mean", residual: float = 0.5
) -> Tensor:
    """Return the attention roll-out, a tensor of shape (batch, rows, columns): how much each patch contributes to one output
    token when the attention maps of all blocks are multiplied. The option `query` selects this token, by default the class
    token.

    `query` is a patch or None, as in `patch_attention`, after the last block. `heads` is "mean", "max" or "min": how the heads
    of a block are combined. `residual` is the weight of the residual connection, 0 to 1. A map sums to the share that comes
    from patches; the rest of 1 comes from prefix tokens.

    Paper    Abnar, Zuidema 2020, arXiv:2005.00928: each block is half its attention map (mean over heads) and half the identity
             for the residual connection. Rows are normalized and the blocks multiplied. Values and MLPs are ignored.
    Departs  Supports token reduction: what a merged token got from earlier blocks is divided among the tokens that were merged,
             in proportion to how much it contains of each. The paper has neither `heads` nor `residual`.
    Raises   ValueError as `patch_attention` does, for unknown `heads`, and for a `residual` outside of [0, 1].
    """
    import torch

    if heads not in HEADS or not isinstance(residual, Real) or not 0 <= residual <= 1:
        raise ValueError(
            f"got heads={heads!r}, residual={residual}; expected one of {', '.join(HEADS)}, and a share from 0 to 1"
        )
    parts = find_attention_parts(model, images)
    n = parts.prefix + parts.grid[0] * parts.grid[1]
    size = max(1, MAX_ELEMENTS // (len(parts.attentions) * n**2))
    return torch.cat([rollout_batch(model, x, parts, query, heads, residual) for x in images.split(size)])


def rollout_batch(model: nn.Module, x: Tensor, parts: AttentionParts, query: Query, heads: str, residual: float) -> Tensor:
    """Return the attention roll-out of a batch of images `x`: how much each patch contributes to the token `query`. `parts`
    holds the attention modules of the model. `heads` is "mean", "max" or "min": how the attention maps of the heads are
    combined. `residual` is the weight of the residual connection.

    The computation starts with the query after the last block and goes back block by block to the patches.
    """
    import torch

    def combine_heads(weights: Tensor) -> Tensor:
        """Return one attention map (batch, tokens, tokens) for a block, from the maps of all heads (batch, heads, tokens,
        tokens). The result is the mean, maximum or minimum over the heads, as the option `heads` of the roll-out says, with the
        residual connection added.
        """
        combined = {"mean": weights.mean, "max": weights.amax, "min": weights.amin}[heads](1)
        combined = (1 - residual) * combined + residual * torch.eye(combined.shape[-1]).to(combined)
        total = combined.sum(-1, keepdim=True)
        return combined / total.where(total > 0, 1)  # the minimum over heads can be 0 everywhere

    def undo_reduction(weights: Tensor, after: Tensor, before: Tensor) -> Tensor:
        """Convert `weights` of the tokens after a merging or pruning to weights of the tokens before it, shape (batch, tokens).
        The weight of a merged token is divided among the tokens that were merged. `after` and `before` (batch, tokens, patches)
        say how much of each patch is in each token.
        """
        if after is before:
            return weights
        back = ((weights[:, None] @ divide_by_token_sums(after)) @ divide_by_patch_sums(before).mT).squeeze(1)
        return torch.cat([weights[:, : parts.prefix], back[:, parts.prefix :]], dim=1)

    maps = collect_maps(model, x, parts, combine_heads)
    contents = token_contents(model, x, parts)
    flow = query_weights(parts, contents[-1], query, "the last block has done")
    for block in reversed(range(len(maps))):
        first = reduces_first(model, block)
        flow = flow if first else undo_reduction(flow, contents[block + 1], contents[block])
        flow = (flow[:, None] @ maps[block]).squeeze(1)
        flow = undo_reduction(flow, contents[block + 1], contents[block]) if first else flow
    return flow[:, parts.prefix :].unflatten(-1, parts.grid)


class AttentionParts(NamedTuple):
    """The parts of a model that are needed to compute its attention maps: the attention modules, the patch grid, and the number
    of prefix tokens (class token and registers).

    attentions    the attention module of each block
    grid          rows and columns of patches, for the images at hand
    prefix        number of prefix tokens, which come before the patches
    class_token   whether the model classifies by the first prefix token, the class token
    """

    attentions: list[Any]
    grid: tuple[int, int]
    prefix: int
    class_token: bool


def find_attention_parts(model: Any, images: Tensor) -> AttentionParts:
    """Return the `AttentionParts` of a Vision Transformer of smallvit or timm: its attention modules, its patch grid, and its
    number of prefix tokens (class token and registers). The patch grid depends on the size of `images`.

    Raises   ValueError for no images, another kind of model, and a block without attention.
    """
    from smallvit.vit import ViT

    require_tensor(images)
    size = tuple(images.shape[-2:])
    if isinstance(model, ViT):
        attentions = [getattr(block, "attention", None) for block in model.blocks]
        grid, prefix, class_token = model.tokenizer.grid(size), len(model.prefix), model.pool.class_tokens > 0
    else:
        attentions = [getattr(block, "attn", None) for block in getattr(model, "blocks", [])]
        embed: Any = getattr(model, "patch_embed", None)
        if not hasattr(embed, "dynamic_feat_size") or not hasattr(model, "num_prefix_tokens"):
            raise ValueError(f"got a {type(model).__name__}; expected a ViT, or a Vision Transformer of timm (vit_*)")
        grid, prefix = embed.dynamic_feat_size(size), model.num_prefix_tokens
        class_token = model.cls_token is not None and model.global_pool not in ("avg", "avgmax", "max", "map")
    without = [type(block).__name__ for block, attention in zip(model.blocks, attentions) if attention is None]
    if not attentions or without:
        what = f"a {without[0]}, in which no attention is found" if without else "no blocks"
        raise ValueError(f"this {type(model).__name__} has {what}; expected blocks, each with one attention")
    return AttentionParts(attentions, tuple(grid), prefix, class_token)


def collect_maps(
    model: nn.Module, images: Tensor, parts: AttentionParts, convert: Callable = lambda weights: weights
) -> list[Tensor]:
    """Run a model on images and return a list with the attention map of each block. The function `convert` is applied to each
    map (batch, heads, tokens, tokens), for example to average over the heads; by default it changes nothing. `parts` holds the
    attention modules of the model.

    Raises   ValueError if a block gives no valid map, or calls its attention not exactly once.
    """
    from smallvit.attention import at_least_float32
    from smallvit.evaluate import frozen

    maps = []

    def save_map(attention, inputs, output):
        maps.append(convert(at_least_float32(check_map(attention, compute_map(attention, inputs, output), output))))

    with frozen(model), ExitStack() as hooks:
        for attention in dict.fromkeys(parts.attentions):  # one module may serve several blocks
            hooks.enter_context(attention.register_forward_hook(save_map))
        model(images.to(next(model.parameters())))
    if len(maps) != len(parts.attentions):
        raise ValueError(
            f"attention was called {len(maps)} times in the {len(parts.attentions)} blocks of this {type(model).__name__}; "
            "expected once in each"
        )
    return maps


def compute_map(attention: Any, inputs: tuple, output: Any) -> Tensor | None:
    """Return the attention map of an attention module, shape (batch, heads, tokens, tokens). `inputs` and `output` are the
    inputs and the output of its forward pass. The module must return an `AttentionOutput` with a map, or be an attention module
    of timm; otherwise, return None.
    """
    from smallvit.attention import AttentionOutput, split_heads, weights

    if isinstance(output, AttentionOutput):
        return None if output.map is None else output.map()
    own_forward = getattr(attention, "own_forward", None)  # of timm_attention, which returns a plain tensor in a timm model
    if own_forward is not None:
        found = own_forward(*inputs).map
        return None if found is None else found()
    from timm.layers.attention import Attention as TimmAttention

    if type(attention) is not TimmAttention:
        return None
    q, k, _ = split_heads(attention.qkv(*inputs), attention.num_heads)
    return weights(attention.q_norm(q) * attention.scale, attention.k_norm(k), None, None)


def check_map(attention: nn.Module, weights: Tensor | None, output: Any) -> Tensor:
    """Return the attention map `weights` unchanged if it is valid, else raise ValueError. A valid map is finite, has the right
    shape, and its rows sum to 1. `output` is the output of the attention module `attention`.

    None is not valid. Rows may have any sum if the module has an attribute `rows_sum_to_1` that is False.
    """
    name = type(attention).__name__
    if weights is None:
        raise ValueError(
            f"{name} gives no attention map; expected AttentionOutput(x, map=...), with a function that makes it, b heads n n"
        )
    b, n = getattr(output, "x", output).shape[:2]
    if weights.ndim != 4 or weights.shape[0] != b or weights.shape[2:] != (n, n):
        raise ValueError(f"the map of {name} has shape {tuple(weights.shape)}; expected b heads n n, here {b} heads {n} {n}")
    if not weights.isfinite().all():
        raise ValueError(f"the map of {name} is not finite; expected a model that has not diverged")
    if getattr(attention, "rows_sum_to_1", True) and not ((weights.float().sum(-1) - 1).abs() < 0.02).all():
        raise ValueError(f"the rows of the map of {name} do not sum to 1; expected the weights after the softmax")
    return weights


def token_contents(model: nn.Module, images: Tensor, parts: AttentionParts) -> list[Tensor]:
    """Return how much of each patch is in each token, before the first block and after each block: a list of tensors (batch,
    tokens, patches). The value is 1 for the patch of an unmerged token, for all patches of a merged token, and else 0. `parts`
    holds the patch grid and the attention modules of the model.

    Where pruned patches are fused into one token, the value is in proportion to the weight of the patch.
    """
    import torch
    import torch.nn.functional as F

    from smallvit.attention import at_least_float32
    from smallvit.evaluate import frozen
    from smallvit.flops import reduces
    from smallvit.vit import ViT

    patches = parts.grid[0] * parts.grid[1]
    x = images.to(next(model.parameters()))
    start = at_least_float32(F.pad(torch.eye(patches).to(x), (0, 0, parts.prefix, 0)).expand(len(x), -1, -1))
    if not isinstance(model, ViT) or not reduces(model):
        return [start] * (1 + len(parts.attentions))
    with frozen(model):
        return [start, *track_patches(model, x, patches, lambda contents: at_least_float32(contents.abs()))]


def contents_before_attention(model: nn.Module, contents: list[Tensor]) -> list[Tensor]:
    """Return a list with one tensor (batch, tokens, patches) for each block: how much of each patch is in each token that
    enters the attention. `contents` holds such tensors before the first block and after each block. If a block merges or prunes
    before its attention, the tensor after the block is taken, else the tensor before the block.
    """
    return [contents[block + reduces_first(model, block)] for block in range(len(contents) - 1)]


def reduces_first(model: Any, block: int) -> bool:
    """Return True if a block merges or prunes its tokens before its attention, else False. `block` is the index of the block.
    """
    from smallvit.reduction.context import runs_before_attention

    return runs_before_attention(getattr(model.blocks[block], "reduction", None))


def divide_by_token_sums(contents: Tensor) -> Tensor:
    """Return `contents` with each row divided by its sum. `contents` says how much of each patch is in each token, shape
    (batch, tokens, patches). Each row of the result belongs to a token and sums to 1.

    The rows of prefix tokens (class token and registers) stay 0.
    """
    total = contents.sum(2, keepdim=True)
    return contents / total.where(total > 0, 1)


def divide_by_patch_sums(contents: Tensor) -> Tensor:
    """Return `contents` with each column divided by its sum. `contents` says how much of each patch is in each token, shape
    (batch, tokens, patches). Each column of the result belongs to a patch and sums to 1.

    The columns of pruned patches stay 0.
    """
    total = contents.sum(1, keepdim=True)
    return contents / total.where(total > 0, 1)


def query_weights(parts: AttentionParts, contents: Tensor, query: Query, place: str) -> Tensor:
    """Return the weight of each token in a query, shape (batch, tokens); each row sums to 1. The `query` is a patch (row,
    column): its weight is on the tokens that contain it. None means the class token or, without one, the mean of all patches.
    `contents` says how much of each patch is in each token. `place` names a block in error messages; `parts` holds the patch
    grid.

    Raises   ValueError for a patch outside of the grid, and for a pruned patch.
    """
    rows, columns = parts.grid
    shares = divide_by_patch_sums(contents)
    if query is not None:
        try:
            row, column = map(index, query)
        except (TypeError, ValueError):  # other than two whole numbers
            row = column = -1
        if not (0 <= row < rows and 0 <= column < columns):
            raise ValueError(f"query is {query}; expected row and column of a patch, below {rows} and {columns}")
        weights = shares[:, :, row * columns + column]
        gone = int((weights.sum(1) == 0).sum())
        if gone:
            raise ValueError(
                f"patch {query} is gone before {place} in {gone} of {len(weights)} images; expected one that is still there"
            )
        return weights
    if parts.class_token:
        weights = shares.new_zeros(shares.shape[:2])
        weights[:, 0] = 1
        return weights
    return shares.sum(2) / shares.sum((1, 2))[:, None]
