"""Reduction: fewer tokens.

Contract: `reduction(place)` makes a module for one block; `place` says where that is (see `LayerContext`). The block calls it between
attention and the MLP, `(x, size, key, saliency) -> (x, size)`; one with a true attribute `first` stands before attention
instead and is called `(x, size)`.

- `x` is b n d, its prefix tokens first; they stay first and are never merged or dropped. What stands in `x` behind the first
  `place.dim` channels is moved along and decides nothing, so that whoever wants to know where the patches went sends them
  along.
- `size`, b n or None (all ones), says how many patches a token stands for. Its sum is conserved, or lowered by a pruner that
  does not carry on what it drops. 0 is a token that is gone and still in the tensor: attention and pools do not see it.
- `key()` is b n e, `saliency(queries)` b n (see `attention.AttentionOutput`): called only when needed.
- `left(n)` says how many of n tokens go on from here in evaluation, None, as without it, where that depends on the image.
- `macs(n, head_dim)`, where there is one, says what the reduction itself costs. An attribute `progress`, a float, is set to
  the progress of the run while it is trained.

Parts of the layers may be left alone: there the module is the identity, as it is at its off setting.
"""

from .context import LayerContext
from .learned import LearnedPrune
from .merge import Merge
from .prune import Prune
from .thresholds import LearnedThresholds

__all__ = ["LayerContext", "LearnedPrune", "LearnedThresholds", "Merge", "Prune"]
