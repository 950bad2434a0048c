"""timm's Vision Transformers as ours: the names of their weights, their shape, their function."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from smallvit.attention import Attention
from smallvit.pooling import ClassToken, MeanTokens
from smallvit.positions import Learned
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import Block, ViT

NAMES = {  # parts of timm's names -> ours
    "pos_embed": "position.table",
    "patch_embed.": "tokenizer.",
    ".attn.": ".attention.",
    ".ls1.gamma": ".branch1.1.factor",
    ".ls2.gamma": ".branch2.1.factor",
    ".mlp.fc1.": ".mlp.0.",
    ".mlp.fc2.": ".mlp.3.",
    "fc_norm.": "norm.",
}


def translated(name: str, words: Iterable[tuple[str, str]]) -> str:
    """The name with its parts in other words: one without a dot in front begins the name, one without a dot behind ends it."""
    for old, new in words:
        begins, ends = "" if old.startswith(".") else "^", "" if old.endswith(".") else "$"
        name = re.sub(f"{begins}{re.escape(old)}{ends}", new, name)
    return name


def rename(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A timm `vit_*` state dict under our names: class token and registers joined to `prefix`, their batch axes dropped."""
    widths = [len(tensor) for name, tensor in state.items() if name.endswith(".norm1.weight")]
    if not widths:
        raise ValueError(
            f"got a state dict without norm1.weight in it ({', '.join(list(state)[:3])}, ...); expected a timm vit_*"
        )
    tokens = [state[name][0] for name in ("cls_token", "reg_token") if name in state]
    renamed = {"prefix": torch.cat(tokens) if tokens else torch.empty(0, widths[0])}
    for name, tensor in state.items():
        if name in ("cls_token", "reg_token"):
            continue
        name = translated(name, NAMES.items())
        renamed[name] = tensor[0] if name == "position.table" else tensor
    return renamed


def from_timm(model: nn.Module) -> ViT:
    """A `ViT` that computes what this timm `VisionTransformer` computes, with its weights; the model itself is left alone.

    Class token or mean pooling, registers, LayerScale, qk-norm, learned positions with or without the prefix, any image size
    and number of channels, no head where it has none (`num_classes=0`); on the device and in the precision of the model.
    Dropout of any kind (stochastic depth, patches) is not carried over: give it to a `ViT` of your own.

    Raises   ValueError for a model with parts that a `ViT` does not have, naming them.
    """
    ours = shape(model)(tuple(model.patch_embed.img_size), model.patch_embed.proj.in_channels, model.num_classes)
    ours.to(model.blocks[0].norm1.weight).load_state_dict(rename(model.state_dict()), strict=True)
    return ours.train(model.training)


def like(name: str, **knobs) -> Callable[..., ViT]:
    """A `partial(ViT, ...)` of the shape of timm's model of that name, for a recipe; `knobs` of the ViT go before.

    Nothing is loaded: `Run(model=like(name), init=Weights(name))` does that. A smaller patch suits smaller images,
    `tokenizer=partial(PatchEmbed, patch=4)`; `Weights` then resize its kernel, and the positions.

    Raises   ValueError for a name that timm does not have, naming the nearest, and for a model that is no plain ViT.
    """
    made = shape(skeleton(name))
    return partial(made, **knobs) if knobs else made


def skeleton(name: str) -> nn.Module:
    """timm's model of that name without memory for its weights, and with a head."""
    import timm

    if not timm.is_model(name.partition(".")[0]):
        near = timm.list_models(f"*{name.partition('.')[0][:9]}*")[:3]
        raise ValueError(f"timm has no model {name!r}; expected one of timm.list_models(), such as {', '.join(near) or VIT_S}")
    with torch.device("meta"):
        return timm.create_model(name.partition(".")[0], num_classes=10)


VIT_S = "vit_small_patch16_224.augreg_in21k_ft_in1k"


def shape(model: nn.Module) -> Callable[..., ViT]:
    """The `partial(ViT, ...)` that has a place for all that this timm model computes. Raises ValueError where there is none."""
    strange = strangers(model)
    if strange:
        raise ValueError(f"this timm model has {', '.join(strange)}, which a ViT does not; expected a plain vit_* model")
    first, embed = model.blocks[0], model.patch_embed
    mean = model.global_pool == "avg"
    extra = sum(token.shape[1] for token in (model.cls_token, model.reg_token) if token is not None)
    hidden, dim = first.mlp.fc1.out_features, model.embed_dim
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
        tokenizer=partial(PatchEmbed, patch=embed.patch_size[0]),
        position=None if model.pos_embed is None else position,
        attention=partial(Attention, **attention) if attention else Attention,
        pool=MeanTokens if mean else ClassToken,
        registers=extra - (0 if mean else 1),
        block=partial(Block, **block) if block else Block,
        norm_after_pool=isinstance(model.fc_norm, nn.LayerNorm),
    )


def strangers(model: nn.Module) -> list[str]:
    """The parts of a timm Vision Transformer that our ViT has no place for: classes first, then settings of known classes."""
    import timm.layers as layers
    from timm.models import vision_transformer as vit

    known = {
        vit.VisionTransformer,
        vit.Block,
        layers.PatchEmbed,
        layers.Attention,
        layers.Mlp,
        layers.LayerScale,
        layers.LayerNorm,
    }
    known |= {layers.DropPath, layers.PatchDropout, layers.GELU, nn.GELU, nn.LayerNorm, nn.Linear, nn.Conv2d}
    known |= {nn.Sequential, nn.Dropout, nn.Identity}
    if type(model) is not vit.VisionTransformer:
        return [f"the class {type(model).__name__}"]
    odd = sorted({type(module).__name__ for module in model.modules() if type(module) not in known})
    if odd:
        return odd
    first, embed = model.blocks[0], model.patch_embed
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    found = {
        f"pooling {model.global_pool!r}": model.global_pool not in ("token", "avg"),
        "prefix tokens in its mean": model.global_pool == "avg" and model.pool_include_prefix,
        "no last norm": model.norm not in norms and model.fc_norm not in norms,
        "a norm before the blocks": model.norm_pre in norms,
        "a norm behind the patch embedding": embed.norm in norms,
        "norms inside attention or MLP": first.attn.norm in norms or first.mlp.norm in norms,
        "norms with another epsilon than 1e-6": any(norm.eps != 1e-6 for norm in norms),
        "projections without bias": first.attn.proj.bias is None,
        "GELU by tanh": getattr(first.mlp.act, "approximate", "none") != "none",
        "patches that are not square": embed.patch_size[0] != embed.patch_size[1],
    }
    return [part for part, is_there in found.items() if is_there]
