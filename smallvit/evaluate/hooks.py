"""The features of a frozen model, read at a place in the model that is given by name.

Letters: b images, n tokens, p prefix tokens, d width.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smallvit.data import Images
from smallvit.flops import evaluating
from smallvit.pooling import MeanTokens
from smallvit.vit import ViT

from .cache import cached
from .splits import NotFinite, refuse_others, require_images

TOKENS = ("class token", "mean", "both")
Array = Any  # numpy.ndarray; numpy is imported only where it is used


def features(model: nn.Module, images: Images, *, of: str = "head", layers: int = 1, norm: str = "after") -> Array:
    """Return the features of images as a float32 numpy array of shape (images, features). The trained model runs in evaluation
    mode.

    of      the place where the features are read. "head": the input of the classifier. For a ViT of smallvit or timm also
            "class token", "mean" (of the patch tokens) or "both" (side by side). In the mean, a merged token counts as many
            times as the number of its patches; class token and registers are left out. The features of a `DeepEnsemble` are
            those of its members, side by side.
    layers  read the last `layers` blocks and put them side by side, in the order of depth. Not for "head".
    norm    "after" the last norm of the model, or "before" it, as each block returns its tokens. Where the model applies this
            norm after its pool, it is applied after the mean here too.

    Read what was trained: the head for supervised training and DINO, the mean for MAE, which does not train its class token.
    "head" calls `model.features(x)` where the model has this method, else `forward_features` and `forward_head` as in timm.

    Raises   ValueError if the model does not have such features, or if its features are not of shape (n, d) and finite.
    """
    read = feature_reader(model, of, layers, norm)
    refuse_others(images)
    batches = (x for x, _ in require_images(images).batches())
    rows = cached(lambda: read_batches(model, batches, read), "features", model, images, of, layers, norm)
    return rows.copy()  # a caller may change its copy


def read_batches(model: nn.Module, batches: Iterable[Tensor], read: Callable[[Tensor], Tensor]) -> Array:
    """Return the features of all `batches` of images as one numpy array. `read` is a function that maps a batch of normalized
    images to its features, by means of `model`. During the calls, `model` is in evaluation mode and computes no gradients.

    Raises ValueError if they are not of shape (b, d) for each batch, or not finite.
    """
    with frozen(model) as reference:
        rows = torch.cat([check_features(read(x.to(reference)), len(x), model).float().cpu() for x in batches])
    wrong = int((~rows.isfinite()).any(1).sum())
    if wrong:
        raise NotFinite(f"features of {wrong} of {len(rows)} images are not finite; expected a model that has not diverged")
    return rows.numpy()


def check_features(features: Any, images: int, model: nn.Module) -> Tensor:
    """Return `features` unchanged if they are a tensor with one row for each image, else raise ValueError. `images` is the
    number of images. The error message names the class of `model`.
    """
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != images:
        shape = f"shape {tuple(features.shape)}" if isinstance(features, Tensor) else f"a {type(features).__name__}"
        raise ValueError(
            f"{type(model).__name__} gave features of {shape} for {images} images; expected b d, a row for each: pool them in a"
            " method features(x), or in a function for FeatureExtractor(features=...)"
        )
    return features


def feature_reader(model: Any, of: str, layers: int, norm: str) -> Callable[[Tensor], Tensor]:
    """Return a function that maps a batch of normalized images to features of the model. `of` is the kind of features, such as
    "class token". The features of the last `layers` blocks are concatenated. `norm` is "after" or "before": they are read after
    or before the final norm layer. The features of an ensemble are those of its members, side by side.

    Raises ValueError for an unknown name, or a name that does not apply to this model.
    """
    check_place(of, layers, norm)
    if getattr(model, "divides_batches", False):  # an ensemble, of which each member sees all images in evaluation
        readers = [feature_reader(member, of, layers, norm) for member in model.members]
        return lambda x: torch.cat([read(x) for read in readers], dim=1)
    if of == "head":
        return head_input(model)
    if not isinstance(model, ViT) and not is_timm_vit(model):
        raise ValueError(f"{type(model).__name__} has no named tokens; expected a ViT of smallvit or timm, or of='head'")
    if not 1 <= layers <= len(model.blocks):
        raise ValueError(f"layers is {layers}; expected from 1 to {len(model.blocks)}, the number of blocks of this model")
    if of != "mean" and not has_class_token(model):
        raise ValueError(f"this {type(model).__name__} has no class token; expected of='mean', or of='head' for its pool")
    return partial(token_features, model, of, int(layers), norm == "after")


def check_features_exist(model: Any, evaluators: Iterable[Callable]):
    """Raise ValueError if one of the evaluators (functions that score a model) reads features that the model does not have, as
    those of ten blocks. It is called before the training. Evaluators without the options `of`, `layers` and `norm` are not
    checked.
    """
    for evaluator in evaluators:
        chosen = {name: option.default for name, option in signature(evaluator).parameters.items()}
        if chosen.keys() >= {"of", "layers", "norm"}:
            feature_reader(model, chosen["of"], chosen["layers"], chosen["norm"])


def check_place(of: Any, layers: Any, norm: Any):
    """Raise ValueError if no model has features at this place. `of`, `layers` and `norm` are the options of `features`."""
    if of not in ("head", *TOKENS) or norm not in ("after", "before"):
        raise ValueError(
            f"of is {of!r} and norm {norm!r}; expected of 'head', {', '.join(map(repr, TOKENS))}, and norm 'after' or 'before'"
        )
    if not isinstance(layers, Integral):
        raise ValueError(f"layers is {layers!r}; expected a whole number from 1 on")
    if of == "head" and (layers != 1 or norm != "after"):
        raise ValueError(
            f"got layers={layers} and norm={norm!r} with of='head', which is one feature only; with these options use"
            " of='class token', 'mean' or 'both'"
        )


def head_input(model: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that maps a batch of images to the features that enter the classification head of the model.

    The function uses `model.features`, or the methods that timm's models have.

    With timm, `forward_head(..., pre_logits=True)` follows. Layers called `features` are used only if there is nothing else.
    """
    method = getattr(model, "features", None)
    if callable(method) and not isinstance(method, nn.Module):
        return model.features
    if all(callable(getattr(model, name, None)) for name in ("forward_features", "forward_head")):
        return lambda x: model.forward_head(model.forward_features(x), pre_logits=True)
    if callable(method):
        return model.features
    raise ValueError(
        f"{type(model).__name__} does not say what its head receives; expected a method features(x) that gives b d. Or use"
        " FeatureExtractor(model, features=...), with a function (model, x) -> b d"
    )


class BlockTokens(NamedTuple):
    """The tokens after one transformer block: `prefix` tokens (class token and registers) and `patches`, two tensors of shape
    (batch, tokens, width). `size` (batch, patches) is the number of patches that were merged into each patch token; None means
    1 for all.
    """

    prefix: Tensor
    patches: Tensor
    size: Tensor | None


def token_features(model: nn.Module, of: str, layers: int, apply_norm: bool, x: Tensor) -> Tensor:
    """Return features of the images `x`, shape (batch, features), from the tokens of the last `layers` blocks; those of
    different blocks are concatenated. `of` is "class token", "mean" (of the patch tokens) or "both". `apply_norm` says whether
    to apply the final norm.
    """
    norm, norm_after_pool = final_norms(model) if apply_norm else (nn.Identity(), nn.Identity())
    mean, parts = MeanTokens(0), []
    for tokens in (tokens_of_vit if isinstance(model, ViT) else tokens_of_timm)(model, x, layers):
        if of != "mean":
            parts.append(norm(tokens.prefix[:, 0]))
        if of != "class token":
            parts.append(mean(norm(tokens.patches), tokens.size))
    return torch.cat([norm_after_pool(part) for part in parts], dim=-1)


def tokens_of_vit(model: Any, x: Tensor, layers: int) -> list[BlockTokens]:
    """Run a `ViT` of smallvit on the images `x`. Return a list with the tokens after each of its last `layers` blocks."""
    found, p = [], len(model.prefix)

    def save_tokens(block, inputs, output):
        """Forward hook of a block: append the output tokens of the block to the list of results."""
        tokens, size = output[:2]
        found.append(BlockTokens(tokens[:, :p], tokens[:, p:], None if size is None else size[:, p:]))

    with ExitStack() as hooks:
        for block in dict.fromkeys(model.blocks[-layers:]):  # a block may serve several layers
            hooks.enter_context(block.register_forward_hook(save_tokens))
        model.tokens(x)
    return found[-layers:]


def tokens_of_timm(model: Any, x: Tensor, layers: int) -> list[BlockTokens]:
    """Run a Vision Transformer of timm on the images `x`. Return a list with the tokens after each of its last `layers` blocks.
    """
    options = {"return_prefix_tokens": model.num_prefix_tokens > 0, "output_fmt": "NLC", "intermediates_only": True}
    outputs = model.forward_intermediates(x, indices=layers, **options)
    return [BlockTokens(*(part[::-1] if isinstance(part, tuple) else (part[:, :0], part)), size=None) for part in outputs]


def final_norms(model: Any) -> tuple[nn.Module, nn.Module]:
    """Return two modules: the final norm layer that `model` applies before its pooling, and the one that it applies after its
    pooling. If the model has no norm layer at one of these places, the module is `nn.Identity`, which changes nothing.
    """
    if isinstance(model, ViT):
        return (nn.Identity(), model.norm) if model.norm_after_pool else (model.norm, nn.Identity())
    return model.norm, getattr(model, "fc_norm", nn.Identity())


def is_timm_vit(model: nn.Module) -> bool:
    """Return True if the model is a Vision Transformer of timm that can return the tokens of its blocks, else False.

    The method of timm for this is `forward_intermediates`.
    """
    method = getattr(model, "forward_intermediates", None)
    gives_tokens = callable(method) and "return_prefix_tokens" in signature(method).parameters
    return gives_tokens and hasattr(model, "blocks") and hasattr(model, "num_prefix_tokens")


def has_class_token(model: nn.Module) -> bool:
    """Return True if a Vision Transformer (of smallvit or timm) has a class token, else False."""
    return model.pool.class_tokens > 0 if isinstance(model, ViT) else getattr(model, "cls_token", None) is not None


@contextmanager
def frozen(model: nn.Module):
    """Context manager for evaluation: the model is in evaluation mode, and no gradients are computed. At the end, each module
    gets its earlier mode (training or evaluation) back.

    Yields a tensor that has the device and dtype of the model, for `images.to(tensor)`. Raises ValueError for a model that is
    no module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"got a {type(model).__name__} as model; expected a torch.nn.Module")
    with evaluating(model):
        yield next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
