"""timm: its weights in our ViT, and our slots in its models. The only file that knows timm's names.

`from_timm` turns a timm Vision Transformer into the same function as a `ViT`; `apply` reduces the tokens of a finished model,
ours or timm's. `timm_attention` and `timm_tokenizer` make of our
slots what timm's constructors ask for (`attn_layer`, `embed_layer`), by adapting and never by patching timm's classes.
"""

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from smallvit.attention import Attention
from smallvit.compute import speedup, unreduced
from smallvit.pooling import ClassToken, MeanTokens
from smallvit.positions import Learned
from smallvit.tokenizers import PatchEmbed
from smallvit.vit import Block, ViT

NAMES = (
    (r"^pos_embed$", "position.table"),
    (r"^patch_embed\.", "tokenizer."),
    (r"\.attn\.", ".attention."),
    (r"\.ls([12])\.gamma$", r".branch\1.1.factor"),
    (r"\.mlp\.fc1\.", ".mlp.0."),
    (r"\.mlp\.fc2\.", ".mlp.3."),
    (r"^fc_norm\.", "norm."),
)


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
        for pattern, ours in NAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor[0] if name == "position.table" else tensor
    return renamed


def from_timm(model: nn.Module) -> ViT:
    """A `ViT` that computes what this timm `VisionTransformer` computes, with its weights; the model itself is left alone.

    Class token or mean pooling, registers, LayerScale, qk-norm, learned positions with or without the prefix, any image size
    and number of channels; on the device and in the precision of the model. Dropout of any kind (stochastic depth, patches) is
    not carried over: give it to a `ViT` of your own.

    Raises   ValueError for a model with parts that a `ViT` does not have, naming them.
    """
    strange = strangers(model)
    if strange:
        raise ValueError(f"this timm model has {', '.join(strange)}, which a ViT does not; expected a plain vit_* model")
    first, embed = model.blocks[0], model.patch_embed
    mean = model.global_pool == "avg"
    extra = sum(token.shape[1] for token in (model.cls_token, model.reg_token) if token is not None)
    attention = partial(
        Attention,
        head_dim=first.attn.head_dim,
        qk_norm=isinstance(first.attn.q_norm, nn.LayerNorm),
        qkv_bias=first.attn.qkv.bias is not None,
    )
    block = partial(
        Block,
        mlp_ratio=(first.mlp.fc1.out_features + 0.5) / model.embed_dim,  # the half survives the rounding down to a width
        layer_scale=None if isinstance(first.ls1, nn.Identity) else 1.0,
    )
    ours = ViT(
        tuple(embed.img_size),
        embed.proj.in_channels,
        model.num_classes,
        dim=model.embed_dim,
        depth=len(model.blocks),
        heads=first.attn.num_heads,
        tokenizer=partial(PatchEmbed, patch=embed.patch_size[0]),
        position=partial(Learned, on_prefix=not model.no_embed_class) if model.pos_embed is not None else None,
        attention=attention,
        pool=MeanTokens if mean else ClassToken,
        registers=extra - (0 if mean else 1),
        block=block,
        norm_after_pool=isinstance(model.fc_norm, nn.LayerNorm),
    )
    ours.load_state_dict(rename(model.state_dict()), strict=True)
    return ours.to(model.head.weight).train(model.training)


def apply(model: nn.Module, reduction: Callable | None, timed_on: Tensor | None = None) -> ViT:
    """A new model that is `model` with this reduction in its blocks, in the place of any it had; no training, nothing patched.

    `model` is a `ViT`, or a timm Vision Transformer, which goes through `from_timm` first; it is left alone. Weights are
    copied. `None` takes a reduction out. What a reduction learns (`LearnedPrune`, `LearnedThresholds`) starts anew. With
    `timed_on`, a batch of images, the reduction stays only if it saves time on them, here and now; else the new model comes
    without it, and a warning says how much time it would have lost.

    Raises   ValueError for another kind of model.
    """
    if not isinstance(model, ViT):
        return apply(from_timm(model), reduction, timed_on)
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
        "no classifier": not isinstance(model.head, nn.Linear),
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


def timm_attention(attention: Callable) -> type[nn.Module]:
    """A class for timm's `attn_layer=` (timm >= 1.0.23): our attention with its knobs, under timm's calling convention.

    `qkv`, `proj` and the norms keep timm's names, so that pretrained weights load; what only ours has (a temperature) keeps its
    start, and timm's strict loading has to be told (`pretrained_strict=False`).

    Raises   ValueError for options of timm's that ours does not have: `scale_norm`, `proj_bias=False`, `qk_norm` by another
             norm than a LayerNorm with epsilon 1e-6.
    """
    slot, knobs = (attention.func, attention.keywords) if isinstance(attention, partial) else (attention, {})
    takes_norm = "qk_norm" in inspect.signature(slot).parameters

    class TimmAttention(slot):
        def __init__(
            self,
            dim,
            num_heads=8,
            qkv_bias=False,
            qk_norm=False,
            proj_bias=True,
            attn_drop=0.0,
            proj_drop=0.0,
            norm_layer=None,
            device=None,
            dtype=None,
            **others,
        ):
            norm = norm_layer(1) if norm_layer else nn.LayerNorm(1, eps=1e-6)
            fits = takes_norm and isinstance(norm, nn.LayerNorm) and norm.eps == 1e-6
            refuse(slot, others | {"qk_norm": qk_norm and not fits, "proj_bias=False": not proj_bias})
            chosen = {"qkv_bias": qkv_bias, "dropout": attn_drop} | ({"qk_norm": True} if qk_norm else {}) | knobs
            super().__init__(dim, num_heads, **chosen)
            self.proj_drop = nn.Dropout(proj_drop)
            self.to(device=device, dtype=dtype)

        def forward(self, x, attn_mask=None, is_causal=False):
            if is_causal:
                n = x.shape[1]
                causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
                attn_mask = causal if attn_mask is None else attn_mask & causal
            return self.proj_drop(super().forward(x, None, attn_mask).x)

    TimmAttention.__name__ = TimmAttention.__qualname__ = f"Timm{slot.__name__}"
    return TimmAttention


def timm_tokenizer(tokenizer: Callable) -> Callable[..., nn.Module]:
    """A class for timm's `embed_layer=`: our tokenizer with its knobs, under timm's calling convention.

    timm's `patch_size` goes to a tokenizer that has a knob `patch` and leaves it open; a convolutional stem has its own stride.

    Raises   ValueError for options of timm's that ours do not have: a norm behind the embedding, no bias (`pre_norm`), padding,
             patches that are not square; and for images of another size without `dynamic_img_size=True`.
    """
    slot, knobs = (tokenizer.func, tokenizer.keywords) if isinstance(tokenizer, partial) else (tokenizer, {})
    takes_patch = "patch" in inspect.signature(slot).parameters

    class TimmTokenizer(nn.Module):
        def __init__(
            self,
            img_size=224,
            patch_size=16,
            in_chans=3,
            embed_dim=768,
            bias=True,
            output_fmt=None,
            strict_img_size=True,
            device=None,
            dtype=None,
            **others,
        ):
            super().__init__()
            image, (patch, width) = pair(img_size), pair(patch_size)
            unlike = {"bias=False": not bias, "patch_size": patch != width, "output_fmt": output_fmt not in (None, "NHWC")}
            refuse(slot, others | unlike)
            self.img_size, self.strict, self.as_image = image, strict_img_size, output_fmt is not None
            self.tokens = slot(image, in_chans, embed_dim, **({"patch": patch} if takes_patch else {}) | knobs)
            self.grid_size = self.tokens.grid(image)
            self.num_patches = self.grid_size[0] * self.grid_size[1]
            self.patch_size = (image[0] // self.grid_size[0], image[1] // self.grid_size[1])
            self.to(device=device, dtype=dtype)

        def feat_ratio(self, as_scalar=True):
            return max(self.patch_size) if as_scalar else self.patch_size

        def dynamic_feat_size(self, img_size):
            return self.tokens.grid(img_size)

        def forward(self, x):
            image = tuple(x.shape[-2:])
            if self.strict and image != self.img_size:
                raise ValueError(
                    f"got images of {image}, expected {self.img_size}; build with dynamic_img_size=True for any size"
                )
            return self.tokens(x).unflatten(1, self.tokens.grid(image)) if self.as_image else self.tokens(x)

    TimmTokenizer.__name__ = TimmTokenizer.__qualname__ = f"Timm{slot.__name__}"
    return TimmTokenizer


def refuse(slot: Callable, options: Mapping[str, object]):
    """Raise for options of timm's that are set and that a slot of ours does not have."""
    asked = [name for name, value in options.items() if value]
    if asked:
        raise ValueError(
            f"timm asks {slot.__name__} for {', '.join(asked)}, which it does not have; leave it as timm has it by default"
        )


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
