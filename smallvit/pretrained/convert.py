"""Convert Vision Transformers of timm to our `ViT`: names of weights, shape, and the whole model."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from smallvit.attention import Attention
from smallvit.pooling import ClassToken, MeanTokens
from smallvit.positions import Learned
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import Block, ViT

VIT_S = "vit_small_patch16_224.augreg_in21k_ft_in1k"
NAMES = {  # parts of timm's names of weights -> ours
    "pos_embed": "position.table",
    "patch_embed.": "tokenizer.",
    ".attn.": ".attention.",
    ".ls1.gamma": ".branch1.1.factor",
    ".ls2.gamma": ".branch2.1.factor",
    ".mlp.fc1.": ".mlp.0.",
    ".mlp.fc2.": ".mlp.3.",
    "fc_norm.": "norm.",
}


def replace_parts(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Return the name of a weight in which some parts are replaced, to translate between the names of timm and smallvit. `name`
    is the old name, and `pairs` is a list of (old part, new part).

    An old part without a leading dot matches only at the start of the name; one without a trailing dot only at its end.
    """
    for old, new in pairs:
        start, end = "" if old.startswith(".") else "^", "" if old.endswith(".") else "$"
        name = re.sub(f"{start}{re.escape(old)}{end}", new, name)
    return name


def rename(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict of timm with the weights renamed for smallvit's `ViT`. `state` is the state dict (a dict from names
    to weights) of a Vision Transformer of timm.

    Class token and registers are joined to `prefix`. The batch axis of these tokens and of the positions is removed.

    Raises   ValueError for the state dict of another kind of model.
    """
    widths = [len(tensor) for name, tensor in state.items() if name.endswith(".norm1.weight")]
    if not widths:
        raise ValueError(
            f"got a state dict without norm1.weight in it ({', '.join(list(state)[:3])}, ...); expected a timm vit_*"
        )
    tokens = [state[name][0] for name in ("cls_token", "reg_token") if name in state]
    renamed = {"prefix": torch.cat(tokens) if tokens else torch.empty(0, widths[0])}
    for name, tensor in state.items():
        if name not in ("cls_token", "reg_token"):
            name = replace_parts(name, NAMES.items())
            renamed[name] = tensor[0] if name == "position.table" else tensor
    return renamed


def from_timm(model: nn.Module) -> ViT:
    """Return a `ViT` of smallvit that has the same weights and gives the same outputs as a Vision Transformer of timm
    (`model`).

    The weights are copied.

    The timm model is left unchanged; the new one has its device, precision and mode. Frozen parameters (`requires_grad=False`)
    stay frozen. Class token and registers become one parameter, `prefix`, which is frozen only if all of them are. Supported
    are class token or mean pooling, registers, LayerScale, qk-norm, learned positions (with or without the prefix tokens) or
    none, any image size and number of channels, and models without a head (`num_classes=0`). The number of classes is that of
    the head, which may be a new `nn.Linear`.

    Departs  Dropout of any kind (also stochastic depth and patch dropout) is not copied; build a `ViT` with these options.
             `dynamic_img_pad=True` has no effect: timm pads images that the patches do not tile, a `ViT` raises ValueError.
             Hooks are not copied, nor are methods that were replaced in this one model. Weights that several blocks share
             become a copy for each block.
    Raises   ValueError for a model with parts or weights that a `ViT` does not have; the error names them.
    """
    timm_model: Any = model
    new = vit_with_shape_of(model)(
        tuple(timm_model.patch_embed.img_size),
        timm_model.patch_embed.proj.in_channels,
        timm_model.head.out_features if isinstance(timm_model.head, nn.Linear) else 0,
    )
    load_all(new.to(timm_model.blocks[0].norm1.weight), rename(model.state_dict()), "timm model")
    trained = rename(trained_weights(model))
    if not len(new.prefix):  # without class token and registers it is frozen only if the whole model is
        trained["prefix"] = torch.tensor([p.requires_grad for p in model.parameters()])
    copy_frozen(trained, new)
    return new.train(model.training)


def load_all(new: nn.Module, state: dict[str, Tensor], kind: str):
    """Load the state dict `state` (a dict from names to weights) of a converted model into `new`. `kind` says in the error
    message what the original is. Raises ValueError if the names or shapes are not those of `new`.
    """
    expected = {name: tuple(weight.shape) for name, weight in new.state_dict().items()}
    found = {name: tuple(weight.shape) for name, weight in state.items()}
    wrong = [f"{name} {found.get(name, 'missing')}" for name in {**expected, **found} if found.get(name) != expected.get(name)]
    if wrong:
        raise ValueError(
            f"the weights of this {kind}, with the names of the new model, do not fit: {', '.join(wrong[:4])}; expected those "
            "of the model as it was built, with no weight added, removed, pruned or normalized"
        )
    new.load_state_dict(state)


def trained_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from the name of each weight to its `requires_grad`, as a tensor of the shape of the weight. So a function
    that renames, joins or splits weights does the same with it. A buffer counts as frozen.
    """
    weights = model.state_dict(keep_vars=True)
    return {name: torch.tensor(weight.requires_grad).expand(weight.shape) for name, weight in weights.items()}


def copy_frozen(trained: dict[str, Tensor], new: nn.Module):
    """Freeze the parameters of `new`, a converted model, of which no part is True in `trained`, and no others. `trained` is the
    result of `trained_weights` for the original model, with the names of the new one.
    """
    for name, parameter in new.named_parameters():
        parameter.requires_grad_(bool(trained[name].any()))


def like(name: str, **options) -> Callable[..., ViT]:
    """Return a function that builds a `ViT` with the same architecture as the timm model `name`. Keyword arguments change
    options of the `ViT`. The function is a `functools.partial`, made for `Run(model=...)`.

    No weights are loaded; `Run(model=like(name), init=Weights(name=name))` loads them. `options` of the `ViT` override the
    shape, such as `tokenizer=partial(PatchEmbed, patch=4)` for small images: `Weights` then resizes the patch kernel and the
    positions.

    Raises   ValueError for a name that timm does not know (the error lists similar names), and for a model that a `ViT` cannot
             represent.
    """
    made = vit_with_shape_of(timm_on_meta(name))
    return partial(made, **options) if options else made


def timm_on_meta(name: str) -> nn.Module:
    """Return the timm model `name` without memory for its weights, to look at its architecture. It must not be changed: the
    next call for this architecture returns the same model.

    The model is on torch's device "meta". Its head has 10 classes.
    """
    if not isinstance(name, str):
        raise ValueError(f"got the name {name!r}; expected the name of a timm model as text, such as {VIT_S!r}")
    return made_on_meta(name.partition(".")[0])


@lru_cache(maxsize=8)  # timm takes longer to make a model than to read a file of weights
def made_on_meta(name: str) -> nn.Module:
    """Return the model of timm's architecture `name` on torch's device "meta"."""
    import timm

    if not timm.is_model(name):
        similar = timm.list_models(f"*{name[:9]}*")[:3]
        raise ValueError(
            f"timm has no model {name!r}; expected one of timm.list_models(), such as {', '.join(similar) or VIT_S}"
        )
    with torch.device("meta"):
        return timm.create_model(name, num_classes=10)


def vit_with_shape_of(model: Any) -> Callable[..., ViT]:
    """Return a function that builds a `ViT` with the same architecture as `model`, a timm model that exists already. Its
    weights are not copied. Raise ValueError if a `ViT` cannot have this architecture.

    The function is a `functools.partial`.
    """
    from timm.models.vision_transformer import VisionTransformer

    kind = type(model)
    if kind is not VisionTransformer:
        expected = "a plain Vision Transformer of timm (vit_*), or for `apply` also a ViT"
        raise ValueError(f"got a {kind.__name__}; expected {expected}")
    if parts := unsupported_parts(model):
        raise ValueError(f"this timm model has {', '.join(parts)}, which a ViT does not; expected a plain vit_* model")
    first, dim = model.blocks[0], model.embed_dim
    mean = model.global_pool == "avg"
    prefix = sum(token.shape[1] for token in (model.cls_token, model.reg_token) if token is not None)
    hidden = first.mlp.fc1.out_features
    attention, block = {}, {}
    if first.attn.head_dim * first.attn.num_heads != dim:
        attention["head_dim"] = first.attn.head_dim
    if isinstance(first.attn.q_norm, nn.LayerNorm):
        attention["qk_norm"] = True
    if first.attn.qkv.bias is None:
        attention["qkv_bias"] = False
    if hidden != 4 * dim:
        block["mlp_ratio"] = hidden / dim if int(dim * (hidden / dim)) == hidden else (hidden + 0.5) / dim
    if not isinstance(first.ls1, nn.Identity):
        block["layer_scale"] = first.ls1.init_values
    position = partial(Learned, on_prefix=False) if model.no_embed_class else Learned
    return partial(
        ViT,
        dim=dim,
        depth=len(model.blocks),
        heads=first.attn.num_heads,
        tokenizer=partial(PatchEmbed, patch=model.patch_embed.patch_size[0]),
        position=None if model.pos_embed is None else position,
        attention=partial(Attention, **attention) if attention else Attention,
        pool=MeanTokens if mean else ClassToken,
        registers=prefix - (0 if mean else 1),
        block=partial(Block, **block) if block else Block,
        norm_after_pool=isinstance(model.fc_norm, nn.LayerNorm),
    )


def settings_in(block: nn.Module) -> list[tuple]:
    """Return what decides what a block of timm computes besides its weights: its layers, the shapes of their weights, the heads
    and the scale of attention, and the form of GELU. Layers that drop something at random are left out.
    """
    kept = [(name, m) for name, m in block.named_modules() if type(m).__name__ not in ("DropPath", "Dropout", "Identity")]
    return [
        (
            name, type(m), [tuple(p.shape) for p in m.parameters(recurse=False)],
            *(getattr(m, option, None) for option in ("num_heads", "scale", "approximate")),
        )
        for name, m in kept
    ]  # fmt: skip


def is_tiling(proj: nn.Conv2d, patch_size: tuple[int, int]) -> bool:
    """Return whether a convolution takes each pixel once, in patches of the given size (height, width)."""
    padding = proj.padding in ((0, 0), "valid")
    return padding and proj.kernel_size == proj.stride == tuple(patch_size) and proj.dilation == (1, 1) and proj.groups == 1


def replaced_part(module: nn.Module, allowed: Mapping[str, tuple[type, ...]]) -> str:
    """Return the first part of a module that is missing or has another class than it may have, as text, or an empty text.
    `allowed` is a dict from the name of each part, such as "mlp.act", to its classes. The name of the module itself is "".
    """
    for name, kinds in allowed.items():
        try:
            part = module.get_submodule(name)
        except AttributeError:
            return f"no {name}"
        if type(part) not in kinds:
            return f"{type(part).__name__} as {name or 'a block'}"
    return ""


def unsupported_parts(model: Any) -> list[str]:
    """Return a list of the classes and settings in a Vision Transformer of timm that our `ViT` does not support, as text. The
    list is empty if the timm model can be converted to a `ViT`.
    """
    import timm.layers
    from timm.models import vision_transformer as vit

    layers: Any = timm.layers
    if not len(model.blocks):
        return ["no blocks"]
    norm, none, dropout = (layers.LayerNorm, nn.LayerNorm), (nn.Identity,), (nn.Dropout, nn.Identity)
    whole = {
        "patch_embed": (layers.PatchEmbed,), "patch_embed.proj": (nn.Conv2d,), "patch_embed.norm": norm + none,
        "pos_drop": dropout, "patch_drop": (layers.PatchDropout, *none), "norm_pre": norm + none, "norm": norm + none,
        "fc_norm": norm + none, "head_drop": dropout,
    }  # fmt: skip
    in_block = {
        "": (vit.Block,), "norm1": norm, "attn": (layers.Attention,), "attn.qkv": (nn.Linear,), "attn.q_norm": norm + none,
        "attn.k_norm": norm + none, "attn.attn_drop": dropout, "attn.norm": norm + none, "attn.proj": (nn.Linear,),
        "attn.proj_drop": dropout, "ls1": (layers.LayerScale, *none), "drop_path1": (layers.DropPath, *none), "norm2": norm,
        "mlp": (layers.Mlp,), "mlp.fc1": (nn.Linear,), "mlp.act": (layers.GELU, nn.GELU), "mlp.drop1": dropout,
        "mlp.norm": norm + none, "mlp.fc2": (nn.Linear,), "mlp.drop2": dropout, "ls2": (layers.LayerScale, *none),
        "drop_path2": (layers.DropPath, *none),
    }  # fmt: skip
    known = {vit.VisionTransformer, nn.Sequential}.union(*whole.values(), *in_block.values())
    names = {kind.__name__ for kind in known}
    unknown = {type(part) for name, part in model.named_modules() if not f"{name}.".startswith("head.")} - known
    if unknown:  # a class of another library may have the name of a known one
        return sorted(f"{kind.__module__}.{kind.__name__}" if kind.__name__ in names else kind.__name__ for kind in unknown)
    if other := replaced_part(model, whole) or next(filter(None, (replaced_part(b, in_block) for b in model.blocks)), ""):
        return [other]
    first: Any = model.blocks[0]
    embed: Any = model.patch_embed
    head = model.head
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    settings = {
        f"pooling {model.global_pool!r}": model.global_pool not in ("token", "avg"),
        "prefix tokens in its mean": model.global_pool == "avg" and model.pool_include_prefix,
        "no last norm": model.norm not in norms and model.fc_norm not in norms,
        "two last norms": model.norm in norms and model.fc_norm in norms,
        "a norm before the blocks": model.norm_pre in norms,
        "a norm behind the patch embedding": embed.norm in norms,
        "norms inside attention or MLP": first.attn.norm in norms or first.mlp.norm in norms,
        "norms with another epsilon than 1e-6": any(norm.eps != 1e-6 for norm in norms),
        "norms without weight or bias": any(norm.weight is None or norm.bias is None for norm in norms),
        "projections without bias": None in (first.attn.proj.bias, first.mlp.fc1.bias, first.mlp.fc2.bias),
        "GELU by tanh": getattr(first.mlp.act, "approximate", "none") != "none",
        "attention with another scale": first.attn.scale != first.attn.head_dim**-0.5,
        "patches that overlap or leave gaps (stride, padding, dilation or groups)": not is_tiling(embed.proj, embed.patch_size),
        "patches that are not square": embed.patch_size[0] != embed.patch_size[1],
        f"a {type(head).__name__} as head (instead of nn.Linear)": type(head) not in (nn.Linear, nn.Identity),
        "a head without bias": type(head) is nn.Linear and head.bias is None,
        "blocks that are not all alike": any(settings_in(block) != settings_in(first) for block in model.blocks),
    }
    return [setting for setting, present in settings.items() if present]
