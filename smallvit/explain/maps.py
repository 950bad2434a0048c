"""What attention looks at: the map of every head, what of each patch a query sees, and roll-out through all blocks.

Letters: b images, h heads, n tokens (prefix first), p patches.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

from .tokens import AT_ONCE, follow

HEADS = ("mean", "max", "min")


def attention_maps(model: "torch.nn.Module", images: "torch.Tensor") -> list["torch.Tensor"]:  # noqa: F821
    """The attention map of every block, each b h n n: how a token (row) shares its attention out over all (columns).

    `model` is a `ViT` with any attention and any reduction, or a Vision Transformer of timm; `images` are what it sees,
    normalised pixels b c h w. Rows sum to 1. The map is made beside the output, from the same queries and keys: whichever
    kernel makes the output goes on making it, and the model, in evaluation mode meanwhile, is left as it was. Where tokens are
    merged or pruned, n shrinks from block to block; `token_shares` says what patches they are.

    Raises   ValueError for no images, and for a model with a block whose map cannot be had: it names the class.
    """
    parts = opened(model, some(images))
    return [weights.clone() for weights in watched(model, images, parts)]  # no longer tensors of inference mode


def token_shares(model: "torch.nn.Module", images: "torch.Tensor") -> list["torch.Tensor"]:  # noqa: F821
    """For every map of `attention_maps`, which patches its tokens stand for, b n p: rows sum to 1, or to 0 for a prefix token.

    `maps[i] @ shares[i]` is attention to patches, b h n p. A merged token's attention is shared out over its patches in
    proportion to what it carries of each: equally for `Merge`. A patch that is gone has a column of zeros.

    Raises   ValueError as `attention_maps` does, and for a reduction that breaks its contract (see `trace`).
    """
    parts = opened(model, some(images))
    return [shared_out(carried) for carried in attended(model, carriers(model, images, parts))]


def patch_attention(
    model: "torch.nn.Module",  # noqa: F821
    images: "torch.Tensor",  # noqa: F821
    *,
    block: int = -1,
    query: tuple[int, int] | None = None,
) -> "torch.Tensor":  # noqa: F821
    """What each head of one block looks at, as pictures of the full grid, b h rows columns, whatever has been merged.

    The query is the class token; in a model whose feature is not read from one, the mean of all patches that are still there;
    or, with `query`, the patch in that row and column, from 0. A picture sums to the attention that reaches patches: what the
    query pays to prefix tokens is not in it.

    Raises   ValueError as `token_shares` does, for a block that is not there, and for a query that is gone before it.
    """
    parts = opened(model, some(images))
    if not -len(parts.attentions) <= block < len(parts.attentions):
        raise ValueError(f"block is {block}; expected one of this model, from 0 to {len(parts.attentions) - 1}")
    weights = watched(model, images, parts)[block]
    carried = attended(model, carriers(model, images, parts))[block]
    asked = asking(parts, carried, query, f"block {block % len(parts.attentions)}")
    return ((asked[:, None, None] @ weights).squeeze(2) @ shared_out(carried)).unflatten(-1, parts.grid)


def rollout(
    model: "torch.nn.Module",  # noqa: F821
    images: "torch.Tensor",  # noqa: F821
    *,
    query: tuple[int, int] | None = None,
    heads: str = "mean",
    residual: float = 0.5,
) -> "torch.Tensor":  # noqa: F821
    """Attention roll-out: what of each patch reaches the query through all blocks, b rows columns.

    Paper    Abnar, Zuidema 2020, arXiv:2005.00928: half of each block is its attention map, the mean over heads, and half is
             the residual connection; rows are normalised and the blocks multiplied. It knows neither values nor the MLP.
    Departs  Goes back through a reduction: what a merged token got from a block before is shared out over the tokens that
             were merged, in proportion to what it carries of each. `heads="max"` or `"min"` takes that of the heads in the
             place of their mean; `residual` is the share of the residual connection.

    The query is that of `patch_attention`, behind the last block. Here too a picture sums to what reaches patches: the rest of
    1 comes from the prefix tokens themselves.

    Raises   ValueError as `patch_attention` does, for other `heads`, and for a `residual` that is no share.
    """
    import torch

    if heads not in HEADS or not 0 <= residual <= 1:
        raise ValueError(
            f"got heads={heads!r}, residual={residual}; expected one of {', '.join(HEADS)}, and a share from 0 to 1"
        )
    parts = opened(model, some(images))
    n = parts.prefix + parts.grid[0] * parts.grid[1]
    size = max(1, AT_ONCE // (len(parts.attentions) * n**2))
    return torch.cat([rolled(model, x, parts, query, heads, residual) for x in images.split(size)])


def rolled(model, x, parts: "Parts", query, heads: str, residual: float):
    """The roll-out of one batch, from the query back to the patches."""
    import torch

    def step(weights):
        one = {"mean": weights.mean, "max": weights.amax, "min": weights.amin}[heads](1)
        mixed = (1 - residual) * one + residual * torch.eye(one.shape[-1]).to(one)
        return mixed / mixed.sum(-1, keepdim=True)

    def before(asked, after, given):
        """From the tokens behind a reduction to those that it was given."""
        if after is given:
            return asked
        back = ((asked[:, None] @ shared_out(after)) @ spread(given).mT).squeeze(1)
        return torch.cat([asked[:, : parts.prefix], back[:, parts.prefix :]], dim=1)

    steps = watched(model, x, parts, step)
    carried = carriers(model, x, parts)
    asked = asking(parts, carried[-1], query, "the last block has done")
    for block in reversed(range(len(steps))):
        first = reduces_first(model, block)
        asked = asked if first else before(asked, carried[block + 1], carried[block])
        asked = (asked[:, None] @ steps[block]).squeeze(1)
        asked = before(asked, carried[block + 1], carried[block]) if first else asked
    return asked[:, parts.prefix :].unflatten(-1, parts.grid)


class Parts(NamedTuple):
    """What there is to look at: the attention of each block, the grid of patches of these images, how many prefix tokens stand
    before them, and whether the feature is read from the first of those, the class token."""

    attentions: list
    grid: tuple[int, int]
    prefix: int
    class_token: bool


def opened(model, images) -> Parts:
    """The parts of a `ViT`, or of a timm model that is built like its VisionTransformer."""
    from smallvit.vit import ViT

    size = tuple(images.shape[-2:])
    if isinstance(model, ViT):
        attentions = [getattr(block, "attention", None) for block in model.blocks]
        grid, prefix, class_token = model.tokenizer.grid(size), len(model.prefix), model.pool.class_tokens > 0
    else:
        attentions = [getattr(block, "attn", None) for block in getattr(model, "blocks", [])]
        embed = getattr(model, "patch_embed", None)
        if not hasattr(embed, "dynamic_feat_size") or not hasattr(model, "num_prefix_tokens"):
            raise ValueError(f"got a {type(model).__name__}; expected a ViT, or a Vision Transformer of timm (vit_*)")
        grid, prefix = embed.dynamic_feat_size(size), model.num_prefix_tokens
        class_token = model.cls_token is not None and model.global_pool not in ("avg", "avgmax", "max")
    without = [type(block).__name__ for block, attention in zip(model.blocks, attentions) if attention is None]
    if not attentions or without:
        what = f"a {without[0]}, in which no attention is found" if without else "no blocks"
        raise ValueError(f"this {type(model).__name__} has {what}; expected blocks, each with one attention")
    return Parts(attentions, tuple(grid), prefix, class_token)


def watched(model, images, parts: Parts, keep: Callable = lambda weights: weights) -> list:
    """What `keep` makes of the attention map of each block."""
    from smallvit.evaluate import frozen

    kept = []

    def note(attention, given, result):
        kept.append(keep(precise(checked(attention, map_of(attention, given, result), result))))

    with frozen(model), ExitStack() as hooks:
        for attention in dict.fromkeys(parts.attentions):  # blocks may share one
            hooks.enter_context(attention.register_forward_hook(note))
        model(images.to(next(model.parameters())))
    if len(kept) != len(parts.attentions):
        raise ValueError(
            f"attention was called {len(kept)} times in the {len(parts.attentions)} blocks of this {type(model).__name__}; "
            "expected once in each"
        )
    return kept


def map_of(attention, given, result):
    """The attention map behind this result of one attention, b h n n, or None."""
    from smallvit.attention import Attention, AttentionOutput, LocalityAttention, split_heads, weights

    if isinstance(result, AttentionOutput):
        return None if result.map is None else result.map()
    ours = next((kind for kind in (Attention, LocalityAttention) if isinstance(attention, kind)), None)
    if ours:  # under timm's calling convention, see timm_attention
        return ours.forward(attention, *given).map()
    from timm.layers import Attention as Timm

    if type(attention) is not Timm:
        return None
    q, k, _ = split_heads(attention.qkv(*given), attention.num_heads)
    return weights(attention.q_norm(q) * attention.scale, attention.k_norm(k), None, None)


def checked(attention, weights, result):
    """The map, if it is one."""
    name = type(attention).__name__
    if weights is None:
        raise ValueError(
            f"{name} gives no attention map; expected AttentionOutput(x, map=...), with a function that makes it, b heads n n"
        )
    b, n = getattr(result, "x", result).shape[:2]
    if weights.ndim != 4 or weights.shape[0] != b or weights.shape[2:] != (n, n):
        raise ValueError(f"the map of {name} has shape {tuple(weights.shape)}; expected b heads n n, here {b} heads {n} {n}")
    if not ((weights.float().sum(-1) - 1).abs() < 0.02).all():
        raise ValueError(f"the rows of the map of {name} do not sum to 1; expected what the tokens see, behind the softmax")
    return weights


def precise(x):
    """In single precision at least, so that half precision is lost once and not block by block."""
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))


def carriers(model, images, parts: Parts) -> list:
    """How much of each patch each token carries, b n p: as the tokens come to the first block, then behind each block."""
    import torch
    import torch.nn.functional as F

    from smallvit.evaluate import frozen
    from smallvit.flops import reduces

    patches = parts.grid[0] * parts.grid[1]
    x = images.to(next(model.parameters()))
    start = F.pad(torch.eye(patches).to(x), (0, 0, parts.prefix, 0)).expand(len(x), -1, -1)
    if not reduces(model):
        return [precise(start)] * (1 + len(parts.attentions))
    with frozen(model):
        return [precise(start), *follow(model, x, patches, keep=lambda carried: precise(carried.abs()))]


def attended(model, carried: list) -> list:
    """Of these, those that the attention of each block sees."""
    return [carried[block + reduces_first(model, block)] for block in range(len(carried) - 1)]


def reduces_first(model, block: int) -> bool:
    from smallvit.reduction.context import stands_first

    return stands_first(getattr(model.blocks[block], "reduction", None))


def shared_out(carried):
    """What share of a token each patch is, b n p: rows sum to 1, or to 0 where a token stands for no patch."""
    total = carried.sum(2, keepdim=True)
    return carried / total.where(total > 0, 1)


def spread(carried):
    """What share of a patch each token has, b n p: columns sum to 1, or to 0 where a patch is gone."""
    total = carried.sum(1, keepdim=True)
    return carried / total.where(total > 0, 1)


def asking(parts: Parts, carried, query, where: str):
    """How much each token counts in asking, b n: rows sum to 1."""
    rows, columns = parts.grid
    held = spread(carried)
    if query is not None:
        if not (0 <= query[0] < rows and 0 <= query[1] < columns):
            raise ValueError(f"query is {query}; expected row and column of a patch, below {rows} and {columns}")
        asked = held[:, :, query[0] * columns + query[1]]
        gone = int((asked.sum(1) == 0).sum())
        if gone:
            raise ValueError(
                f"patch {query} is gone before {where} in {gone} of {len(asked)} images; expected one that is still there"
            )
        return asked
    if parts.class_token:
        asked = held.new_zeros(held.shape[:2])
        asked[:, 0] = 1
        return asked
    return held.sum(2) / held.sum((1, 2))[:, None]


def some(images):
    """The images, of which there is at least one."""
    if not len(images):
        raise ValueError("there are no images to look at; expected at least one, b c h w")
    return images
