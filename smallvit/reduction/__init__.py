"""Reduction: fewer tokens, by merging or pruning patches inside the blocks.

Contract: `reduction(context)` makes a module for one block, or None; `context` is the block's `LayerContext`. The block calls
the module between attention and the MLP, `(x, size, key, saliency) -> (x, size)`. If the module has a true attribute `first`,
it is called before attention instead, as `(x, size)`.

- `x` is (b, n, d), prefix tokens first. Prefix tokens stay first and are never merged or dropped. Only the first `context.dim`
  channels decide; further channels are carried along with the same weights, which allows tracing where each patch went, and
  gives the place of each token to positions inside attention.
- `size`, (b, n) or None (all ones), is the number of patches that each token stands for. Its sum stays the same, or decreases
  if a pruner drops patches without fusing them. A token of size 0 is removed but still in the tensor: attention and pools
  ignore it.
- `key()` returns (b, n, e), `saliency(queries)` (b, n); see `attention.AttentionOutput`. They are computed only when called.
- `left(n)` returns how many of n tokens are left after the module in evaluation, or None if that depends on the image, as
  without `left`. `macs(n, head_dim)`, if present, returns the cost of the reduction itself in multiply-adds.
- An attribute `needs`, which each class sets for itself, names the functions of the attention that the module calls: "key",
  "saliency", both or none of them, as a tuple; the others are None. It says that the module uses the keys without a
  gradient. The native kernel then computes the block, and PyTorch computes what follows sizes with a gradient.
- A true attribute `merges_best_pairs`, which each class sets for itself, says in addition that the module merges the
  `count(n)` best pairs of patches behind `prefix` tokens as `Merge` does. `count(n)` is at most half of the patches. Compiled
  code then merges them, and does not call the module.
- An attribute `progress` (a float), if present, is set to the progress of the run, from 0 to 1, during training.

A reduction may act in some layers only; in the others its module is the identity, as with the off setting.
"""

from .context import LayerContext
from .learned import LearnedPrune
from .merge import Merge
from .prune import Prune
from .thresholds import LearnedThresholds

__all__ = ["LayerContext", "LearnedPrune", "LearnedThresholds", "Merge", "Prune"]
