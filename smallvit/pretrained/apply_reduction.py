"""A reduction in the blocks of a finished model."""

import copy
import warnings
from collections.abc import Callable

from torch import Tensor, nn

from smallvit.flops import speedup, unreduced
from smallvit.vit import ViT, refuse_slots

from .convert import from_timm


def apply(model: nn.Module, reduction: Callable | None, timed_on: Tensor | None = None) -> ViT:
    """A new model that is `model` with this reduction in its blocks, in the place of any it had; no training, nothing patched.

    `model` is a `ViT`, or a timm Vision Transformer, which goes through `from_timm` first; it is left alone. Weights are
    copied. `None` takes a reduction out. What a reduction learns (`LearnedPrune`, `LearnedThresholds`) starts anew. With
    `timed_on`, a batch of images, the reduction stays only if it saves time on them, here and now; else the new model comes
    without it, and a warning says how much time it would have lost.

    Raises   ValueError for another kind of model, and for a reduction that is made already.
    """
    if not isinstance(model, ViT):
        return apply(from_timm(model), reduction, timed_on)
    refuse_slots(none=True, reduction=reduction)
    new = unreduced(model)
    if reduction is None:
        return new
    like = new.norm.weight
    for block, place in zip(new.blocks, new.places(len(new.blocks), new.image)):
        made = reduction(place)
        block.reduction = None if made is None else made.to(like).train(new.training)
    if timed_on is None:
        return new
    times = speedup(copy.deepcopy(new).eval(), timed_on)[1]
    if times >= 1:
        return new
    warnings.warn(
        f"the reduction is left out: on images of shape {tuple(timed_on.shape)} it runs at {times:.2f} of the speed without it",
        stacklevel=2,
    )
    return unreduced(new)
