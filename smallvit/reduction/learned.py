"""LearnedPrune (DynamicViT): a small network decides which patches to drop."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import LayerContext, check_context, check_fraction, gather_tokens, pruning_layers, sizes_of


def whole(number: float) -> int:
    """Return a number without its fraction. Rounding errors do not count: 49 is the result also for 48.99999999999999."""
    return int(round(float(number), 6))


class LearnedPrune(nn.Module):
    """Learned token pruning (DynamicViT), a module in the blocks of a ViT. In some of the blocks, a small network decides which
    patches to keep. This network is trained together with the model.

    `keep` is the share of patches that each pruning block keeps; `layers` are these blocks, by default those at 1/4, 2/4 and
    3/4 of the depth. Train with the objective `LearnToPrune`, which holds the shares kept to `keep`. The attribute `target` is
    the share of all patches to be left after the block. The submodule `kept` passes on the decisions (b, patches) unchanged,
    so that a hook can read them.

    Paper    Rao et al. 2021 (DynamicViT), arXiv:2106.02034. From each patch and the mean of the patches still present, a
             predictor of three layers computes two log-probabilities. In training, a Gumbel draw keeps or drops a patch for all
             later blocks. A dropped patch stays in the tensor with size 0, so that the gradient reaches the predictor through
             attention. In evaluation, the k-th predictor keeps the int(patches keep^k) best patches, best first.
    Off      `keep=1`: no predictor.
    Departs  The number of patches follows the image; the authors' code assumes 14 x 14. In training, attention takes
             the largest logit over the present tokens and adds no small constant to the sum, so a removed token cannot weaken
             the others. The predictor's LayerNorm has eps 1e-6, the authors' 1e-5. If a draw would drop every patch, the most
             probable one stays. A removed token whose logit is above those of all present tokens gets a smaller gradient (see
             `attention.attend_with_size_gradient`).
    Raises   ValueError for a `keep` outside (0, 1], or a block that does not exist.
    """

    first, needs = True, ()

    def __init__(self, context: LayerContext, *, keep: float = 0.7, layers: tuple | None = None):
        super().__init__()
        check_context(context)
        blocks = pruning_layers(layers, context.depth)
        self.dim, self.prefix, self.patches = context.dim, context.prefix, context.patches
        prunes = check_fraction(keep) < 1 and context.layer in blocks
        earlier = blocks.index(context.layer) if prunes else 0
        self.expected, self.target = max(1, whole(context.patches * keep**earlier)), keep ** (earlier + 1) if prunes else 1.0
        self.predictor = Predictor(context.dim) if prunes else None
        self.kept = nn.Identity()

    def left(self, n: int) -> int:
        """Return the number of tokens after this module in evaluation, if `n` tokens enter the module. These numbers include
        the prefix tokens (class token and registers).

        The fraction of patches kept is the same for every image size.
        """
        if self.predictor is None:
            return n
        patches = n - self.prefix
        return self.prefix + min(patches, max(1, whole(self.patches * self.target * (patches / self.expected))))

    def macs(self, n: int, head_dim: int) -> float:
        """Return the number of multiply-adds (MACs) of the small network that scores the patches, if `n` tokens enter this
        module. `head_dim`, the width of a key, is not used here: other kinds of token reduction need it.
        """
        return (n - self.prefix) * sum(part.weight.numel() for part in self.modules() if isinstance(part, nn.Linear))

    def forward(self, x: Tensor, size: Tensor | None, key: Any = None, saliency: Any = None) -> tuple[Tensor, Tensor | None]:
        if self.predictor is None:
            return x, size
        p = self.prefix
        present = sizes_of(x, size)
        score = self.predictor(x[:, p:, : self.dim], present[:, p:]).float().log_softmax(-1)
        ranked = score[..., 0].masked_fill(present[:, p:] == 0, float("-inf"))
        if self.training:
            kept = present[:, p:] * F.gumbel_softmax(score, hard=True)[..., 0]
            most_probable = ranked.argmax(-1, keepdim=True)
            rescued = torch.zeros_like(kept).scatter(1, most_probable, 1.0) * (kept.amax(1, keepdim=True) == 0)
            return x, torch.cat([present[:, :p], self.kept(kept + rescued * present[:, p:].detach())], dim=1)
        best = p + ranked.argsort(dim=-1, descending=True, stable=True)[:, : self.left(x.shape[1]) - p]
        x = torch.cat([x[:, :p], gather_tokens(x, best)], dim=1)
        return x, None if size is None else torch.cat([size[:, :p], gather_tokens(size, best)], dim=1)


class Predictor(nn.Module):
    """The small network that scores patches in learned pruning. For patches (batch, patches, width) and their sizes (batch,
    patches), it returns two logits for each patch, to keep or to drop the patch, shape (batch, patches, 2). Removed patches
    have size 0.

    Each patch is judged by its own features and by the mean over all patches.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.embed = nn.Sequential(nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, dim), nn.GELU())
        half, quarter = max(dim // 2, 1), max(dim // 4, 1)
        self.decide = nn.Sequential(nn.Linear(dim, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2))

    def forward(self, x: Tensor, size: Tensor) -> Tensor:
        local, shared = self.embed(x).chunk(2, dim=-1)
        weight = size[..., None].to(x.dtype)
        mean = (shared * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1e-6)
        return self.decide(torch.cat([local, mean.expand_as(shared)], dim=-1))
