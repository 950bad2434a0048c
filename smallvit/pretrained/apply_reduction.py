"""Add merging or pruning of tokens to a trained model."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from smallvit.flops import speedup, unreduced
from smallvit.random_weights import initialize
from smallvit.slot_checks import check_slots
from smallvit.vit import ViT

from .convert import from_timm


def apply(model: nn.Module, reduction: Callable | None, timed_on: Tensor | None = None) -> ViT:
    """Return a copy of a trained model that merges or prunes tokens, without training it again.

    `model` is a `ViT`, or a timm Vision Transformer, which is converted by `from_timm` first. It is left unchanged. Its frozen
    parameters (`requires_grad=False`) are frozen in the copy too. `reduction` is a class or a partial, such as
    `partial(Merge, r=8)`; it replaces a reduction that the model has. None removes the reduction. The parameters of a learned
    reduction (`LearnedPrune`, `LearnedThresholds`) are initialized anew. `timed_on` is a batch of images: if the reduction
    makes the model slower on them, the copy comes without it, and a warning tells the measured speed.

    Raises   ValueError for another kind of model, for a reduction that is an instance instead of a class, and if `timed_on` is
             no batch of images as floats.
    """
    if timed_on is not None and not (isinstance(timed_on, Tensor) and timed_on.is_floating_point() and timed_on.ndim == 4):
        got = f"{timed_on.dtype} {tuple(timed_on.shape)}" if isinstance(timed_on, Tensor) else type(timed_on).__name__
        raise ValueError(f"timed_on is {got}; expected a tensor of images as floats, shape (images, channels, height, width)")
    if not isinstance(model, ViT):
        return apply(from_timm(model), reduction, timed_on)
    check_slots(none=True, reduction=reduction)
    new: Any = unreduced(model)
    if reduction is None:
        return new
    for block, place in zip(new.blocks, new.layer_contexts(len(new.blocks), new.image)):
        made = reduction(place)
        block.reduction = None if made is None else initialize(made).to(new.norm.weight).train(new.training)
    if timed_on is None:
        return new
    times = speedup(copy.deepcopy(new).eval(), timed_on)[1]
    if times >= 1:
        return new
    warnings.warn(
        f"the reduction is left out: on images of shape {tuple(timed_on.shape)} it runs at {times:.2f} of the speed without it",
        stacklevel=2,
    )
    return apply(new, None)
