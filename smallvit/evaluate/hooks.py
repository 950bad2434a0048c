"""Features by name: what a frozen model says of each image, and where in the model that is read off.

Letters: b images, n tokens, p prefix tokens, d width.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor, nn

from smallvit.data import Images
from smallvit.pooling import MeanTokens
from smallvit.vit import ViT

from .memory import once
from .splits import some

TOKENS = ("class token", "mean", "both")


def features(model: nn.Module, images: Images, *, of: str = "head", layers: int = 1, norm: str = "after") -> "numpy.ndarray":  # noqa: F821
    """What a frozen model says of each image, n d, float32, on the CPU.

    `of` says what is read: "head", what the classifier sees; or, of the tokens of a ViT, ours or timm's, the "class token", the
    "mean" of the patches, or "both", side by side. A merged token weighs in the mean as many patches as it stands for; class
    token and registers are left out of it. `layers=k` reads the last k blocks, side by side in the order of depth, `norm`
    "after" the model's last norm or "before" it, as each block left its tokens. Where the model has that norm behind its pool,
    so has the mean here.

    Read what was trained: the head for supervised training and DINO, the mean for MAE, which teaches its class token nothing.

    "head" is `model.features(x)`, b d, where the model has such a method, else timm's `forward_features` and `forward_head`.

    Raises   ValueError for a model that does not have what is asked for, or whose features are not b d and finite.
    """
    read = tap(model, of, layers, norm)
    batches = (x for x, _ in some(images).batches())
    found = once(lambda: gathered(model, batches, read), "features", model, images, of, layers, norm)
    return found.copy()  # the caller's own, whatever it does to them


def gathered(model: nn.Module, batches: Iterable[Tensor], read: Callable[[Tensor], Tensor]) -> "numpy.ndarray":  # noqa: F821
    """What `read` says of these batches, normalised images b c h w, while the model is frozen; n d."""
    with frozen(model) as like:
        found = torch.cat([checked(read(x.to(like)), len(x), model).float().cpu() for x in batches])
    wrong = int((~found.isfinite()).any(1).sum())
    if wrong:
        raise ValueError(
            f"the features of {wrong} of {len(found)} images are not finite; expected a model that has not diverged"
        )
    return found.numpy()


def checked(found: Tensor, images: int, model: nn.Module) -> Tensor:
    if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != images:
        shape = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(
            f"{type(model).__name__} gave features of {shape} for {images} images; expected b d, a row for each: pool them in a"
            " method features(x), or in a function for FeatureExtractor(features=...)"
        )
    return found


def tap(model: nn.Module, of: str, layers: int, norm: str) -> Callable[[Tensor], Tensor]:
    """The function from normalised images b c h w to the features that go by this name, b d."""
    if of not in ("head", *TOKENS) or norm not in ("after", "before"):
        raise ValueError(
            f"of is {of!r} and norm {norm!r}; expected of 'head', {', '.join(map(repr, TOKENS))}, and norm 'after' or 'before'"
        )
    if of == "head":
        if layers != 1 or norm != "after":
            raise ValueError(
                f"got layers={layers} and norm={norm!r}, and the head sees one feature only; expected with them of 'class"
                " token', 'mean' or 'both'"
            )
        return seen_by_head(model)
    if not isinstance(model, ViT) and not like_timm(model):
        raise ValueError(f"{type(model).__name__} has no tokens with a name; expected a ViT, ours or timm's, or of='head'")
    if not 1 <= layers <= len(model.blocks):
        raise ValueError(f"layers is {layers}; expected from 1 to {len(model.blocks)}, the blocks that this model has")
    if of != "mean" and not has_class_token(model):
        raise ValueError(f"this {type(model).__name__} has no class token; expected of='mean', or of='head' for what it pools")
    return partial(named, model, of, layers, norm == "after")


def seen_by_head(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """`model.features`; of timm's models, which may have layers of that name, what its documented two steps give."""
    own = getattr(model, "features", None)
    if callable(own) and not isinstance(own, nn.Module):
        return own
    if all(callable(getattr(model, name, None)) for name in ("forward_features", "forward_head")):
        return lambda x: model.forward_head(model.forward_features(x), pre_logits=True)
    if callable(own):
        return own
    raise ValueError(
        f"{type(model).__name__} does not say what its head sees; expected a method features(x) that gives b d. Or take"
        " FeatureExtractor(model, features=...), with a function (model, x) -> b d"
    )


class Tokens(NamedTuple):
    """What a block left: prefix tokens b p d, patches b n d, and how many patches each stands for, b n (None: one each)."""

    prefix: Tensor
    patches: Tensor
    size: Tensor | None


def named(model: nn.Module, of: str, layers: int, normed: bool, x: Tensor) -> Tensor:
    """The last blocks' class tokens and means, side by side, b d."""
    norm, norm_behind = norms(model) if normed else (nn.Identity(), nn.Identity())
    mean, parts = MeanTokens(0), []
    for left in (ours if isinstance(model, ViT) else timms)(model, x, layers):
        if of != "mean":
            parts.append(norm(left.prefix[:, 0]))
        if of != "class token":
            parts.append(mean(norm(left.patches), left.size))
    return torch.cat([norm_behind(part) for part in parts], dim=-1)


def ours(model: ViT, x: Tensor, layers: int) -> list[Tokens]:
    left, p = [], len(model.prefix)

    def note(block, given, result):
        tokens, size = result
        left.append(Tokens(tokens[:, :p], tokens[:, p:], None if size is None else size[:, p:]))

    with ExitStack() as hooks:
        for block in model.blocks[-layers:]:
            hooks.enter_context(block.register_forward_hook(note))
        model.tokens(x)
    return left


def timms(model: nn.Module, x: Tensor, layers: int) -> list[Tokens]:
    asked = {"return_prefix_tokens": model.num_prefix_tokens > 0, "output_fmt": "NLC", "intermediates_only": True}
    left = model.forward_intermediates(x, indices=layers, **asked)
    return [Tokens(*(part[::-1] if isinstance(part, tuple) else (part[:, :0], part)), size=None) for part in left]


def norms(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The norm of each token behind the last block, and that of what is pooled; one of them does nothing."""
    if isinstance(model, ViT):
        return (nn.Identity(), model.norm) if model.norm_after_pool else (model.norm, nn.Identity())
    return model.norm, getattr(model, "fc_norm", nn.Identity())


def like_timm(model: nn.Module) -> bool:
    """Whether this is a Vision Transformer that gives its tokens as timm documents it."""
    ask = getattr(model, "forward_intermediates", None)
    tokens = callable(ask) and "return_prefix_tokens" in signature(ask).parameters
    return tokens and hasattr(model, "blocks") and hasattr(model, "num_prefix_tokens")


def has_class_token(model: nn.Module) -> bool:
    return model.pool.class_tokens > 0 if isinstance(model, ViT) else getattr(model, "cls_token", None) is not None


@contextmanager
def frozen(model: nn.Module):
    """The model in evaluation mode without gradients, its mode restored after; yields a tensor of its device and precision."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    finally:
        for module, mode in modes.items():
            module.training = mode
