"""LearnedThresholds (LTMP): merge and prune the patches that pass two learned thresholds."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import LayerContext, check_function, exact_keys, expand_index, gather_tokens, sizes_of


class LearnedThresholds(nn.Module):
    """Token merging and pruning with learned thresholds (LTMP), a module in each block. Patches are merged if their similarity
    is above the first threshold. Patches are pruned if they receive less attention than the second threshold.

    Each block learns its two thresholds in training.

    `merge` and `prune` are the initial values of the thresholds, and their values if nobody trains them. `merge=None` only
    prunes. `temperature` is that of the sigmoid in the gradient. Train with the objective `LearnThresholds`, which holds the
    cost to a budget. The submodule `kept` passes on the decisions (b, n) unchanged, so that a hook can read them.

    Paper    Bonnaerens, Dambre 2023 (LTMP), arXiv:2305.17328. Every source patch whose most similar destination (matched as in
             ToMe) has a similarity above `merge` joins it. Then every patch whose received attention, the mean over heads and
             queries, is not above `prune` is dropped. A merged patch has the importance of its most important member. Decisions
             are hard; their gradients are those of a sigmoid (straight through). The number of patches left depends on the
             image.
    Off      `merge=1, prune=0`: no similarity is above 1, and attention is never 0.
    Departs  The authors use different functions in training and inference, since masked patches change the matching and the
             importance, and inference takes one image at a time. Here patches keep their order, sources and destinations
             alternate among the patches still present, and importance is the attention of present tokens only. So masked
             training and inference agree, and inference takes a batch, padded to its longest image with tokens of size 0.
             The prune threshold is in units of the mean importance without reduction, 1 / tokens, so that one value suits 17
             and 197 tokens; for images of another size this unit stays. The most important patch always stays. Similarity and
             importance carry no gradient. In the gradient to a token's size its attention to itself is left out, and a
             removed token whose logit is above those of all present tokens counts less (see
             `attention.attend_with_size_gradient`).
    Raises   ValueError for a `merge` outside [-1, 1], a negative `prune`, or a temperature of 0 or less.
    """

    not_stackable = "learns from the sizes of tokens, whose gradient is lost in torch.func.vmap"

    def __init__(self, context: LayerContext, *, merge: float | None = 0.9, prune: float = 0.0, temperature: float = 0.1):
        super().__init__()
        if merge is not None and not -1 <= merge <= 1:
            raise ValueError(f"merge is {merge}; expected a cosine from -1 (merge all possible) to 1 (merge none), or None")
        if not prune >= 0 or not temperature > 0:
            raise ValueError(f"got prune={prune}, temperature={temperature}; expected prune of at least 0, temperature above 0")
        self.prefix, self.tokens, self.temperature = context.prefix, context.tokens, temperature
        self.start_merge, self.start_prune = merge, float(prune)
        self.prune = nn.Parameter(torch.empty(()))
        self.merge = None if merge is None else nn.Parameter(torch.empty(()))
        self.kept = nn.Identity()
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.prune, self.start_prune)
        if self.merge is not None and self.start_merge is not None:
            nn.init.constant_(self.merge, self.start_merge)

    def clamp(self):
        """Limit the two learned thresholds to their valid ranges, in place. The threshold of similarity for merging is from 0
        to 1. The threshold of attention for pruning is from 0 to the number of tokens; 1 stands for the mean attention to a
        token.

        The authors of the method do so after each training step.
        """
        with torch.no_grad():
            self.prune.clamp_(0, self.tokens)
            if self.merge is not None:
                self.merge.clamp_(0, 1)

    def left(self, n: int) -> None:
        """Return None, because the number of tokens after this module depends on the image. `n` is the number of tokens that
        enter the module.
        """

    def macs(self, n: float, head_dim: int) -> float:
        """Return the number of multiply-adds (MACs) that are needed to compare all pairs of `n` tokens by their keys, or 0 if
        this module does not merge. `head_dim` is the width of a key.
        """
        return 0 if self.merge is None else n * n * head_dim

    def forward(self, x: Tensor, size: Tensor | None, key: Any = None, saliency: Any = None) -> tuple[Tensor, Tensor | None]:
        if key is None or saliency is None:
            raise ValueError("LearnedThresholds needs keys and saliency; return AttentionOutput(x, key=..., saliency=...)")
        check_function("LearnedThresholds", "key", key)
        check_function("LearnedThresholds", "saliency", saliency)
        new_size = sizes_of(x, size)
        is_patch = torch.arange(x.shape[1], device=x.device) >= self.prefix
        with torch.no_grad():  # the thresholds learn from their decisions, not from the importance
            importance = saliency(None).float() * self.tokens
        kept = torch.ones_like(importance)
        if self.merge is not None:
            similarity, match = self.best_matches(key().detach().float(), new_size.detach() > 0)
            merged = torch.where(similarity > -2, self.above_threshold(similarity, self.merge), 0.0)  # sources only
            x, new_size, importance = self.merge_tokens(x, new_size, importance, merged, match)
            kept = kept - merged
        present = is_patch & (kept * new_size > 0)
        top = torch.where(present, importance, float("-inf")).argmax(-1, keepdim=True)
        protected = (~is_patch).expand_as(kept).scatter(1, top, True)
        kept = kept * torch.where(protected, 1.0, self.above_threshold(importance, self.prune))
        new_size = new_size * self.kept(kept).to(new_size.dtype)
        if self.training or torch.compiler.is_compiling():
            return x, new_size
        return remove_empty(x, new_size, size)

    def best_matches(self, key: Tensor, is_present: Tensor) -> tuple[Tensor, Tensor]:
        """Return the highest cosine similarity of each source patch to a destination patch, and the position of this
        destination: two tensors of shape (batch, tokens). Every second patch that is present is a source, and the others are
        destinations. Tokens that are not sources get the similarity -2. `key` holds the keys (batch, tokens, width).
        `is_present` (batch, tokens) is False for removed tokens.

        Sources and destinations are those of ToMe.
        """
        rank = is_present.cumsum(1) - 1
        free = is_present & (torch.arange(key.shape[1], device=key.device) >= self.prefix)
        source, target = free & (rank % 2 == 0), free & (rank % 2 == 1)
        with exact_keys(key) as key:
            key = F.normalize(key, dim=-1)
            cosine = (key @ key.transpose(1, 2)).clamp(max=1)  # rounding can give equal keys a cosine above 1
        return torch.where(source[:, :, None] & target[:, None, :], cosine, -2.0).max(-1)

    def merge_tokens(self, x: Tensor, size: Tensor, importance: Tensor, is_merged: Tensor, destination: Tensor):
        """Merge source tokens of `x` (batch, tokens, width) into destination tokens. Return the new `x`, `size` and
        `importance`. `size` is the number of patches in each token. `importance` is the attention that each token receives; a
        merged token gets the largest value. `is_merged` is 1 for each source to merge, and `destination` is the position of the
        token that it joins. All but `x` have the shape (batch, tokens).

        A merged token is the mean of its tokens, weighted by `size`. The sources stay in the tensors; the caller
        sets their size to 0.
        """
        mass = size * is_merged.to(size.dtype)
        total = size.scatter_add(1, destination, mass)
        moved = (x * size[..., None]).scatter_add(1, expand_index(destination, x), x * mass[..., None])
        received = torch.zeros_like(total).scatter_add(1, destination, mass.detach()) > 0
        x = torch.where(received[..., None], (moved / total.clamp_min(1e-6)[..., None]).to(x.dtype), x)
        source_importance = torch.where(is_merged > 0, importance, float("-inf"))
        return x, total, importance.scatter_reduce(1, destination, source_importance, "amax")

    def above_threshold(self, value: Tensor, threshold: Tensor) -> Tensor:
        """Return a tensor with 1 where `value` is above `threshold`, else 0. In the backward pass, the gradient of a sigmoid is
        used instead (straight-through estimator).
        """
        soft = ((value - threshold) / self.temperature).sigmoid()
        return (value > threshold).to(soft.dtype) + (soft - soft.detach())  # the bracket is exactly 0


def remove_empty(x: Tensor, size: Tensor, original_size: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Remove tokens of size 0 from `x` (batch, tokens, width), and return the remaining tokens and their sizes. `size` holds
    the number of patches in each token after merging and pruning, and `original_size` before it; None means 1 for all. Images
    with fewer tokens are padded with tokens of size 0. If no token has size 0, nothing was merged or pruned, so `original_size`
    is returned. Raise ValueError on the device "meta", whose tensors have no values.
    """
    if x.is_meta:
        raise ValueError(
            "LearnedThresholds got tokens on the device 'meta'; the number of tokens that it leaves depends on the values of "
            "an image, so use a model on a device such as 'cpu'"
        )
    present = size > 0
    longest = int(present.sum(1).max()) if len(x) else x.shape[1]
    if longest == x.shape[1]:
        return x, original_size if present.all() else size
    order = (~present).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
    return gather_tokens(x, order), gather_tokens(size, order)
