"""timm: its weights in our ViT, and our slots in its models. The only file that knows timm's names.

`from_timm` turns a timm Vision Transformer into the same function as a `ViT`. `timm_attention` and `timm_tokenizer` make of our slots what
timm's constructors ask for (`attn_layer`, `embed_layer`), by adapting and never by patching timm's classes.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from smallvit.attention import Attention
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
    """A timm `vit_*` state dict under our names: class token and registers joined to `prefix`, batch axes of parameters dropped."""
    tokens = [state[name][0] for name in ("cls_token", "reg_token") if name in state]
    width = next(len(tensor) for name, tensor in state.items() if name.endswith("norm1.weight"))
    renamed = {"prefix": torch.cat(tokens) if tokens else torch.empty(0, width)}
    for name, tensor in state.items():
        if name in ("cls_token", "reg_token"):
            continue
        for pattern, ours in NAMES:
            name = re.sub(pattern, ours, name)
        renamed[name] = tensor[0] if name == "position.table" else tensor
    return renamed


def from_timm(model: nn.Module) -> ViT:
    """A `ViT` that computes what this timm `VisionTransformer` computes, with its weights; the model itself is left alone.

    Class token or mean pooling, registers, LayerScale, qk-norm, learned positions with or without the prefix, any image size and
    number of channels. Dropout and stochastic depth are not carried over: give them to a `ViT` of your own.

    Raises   ValueError for a model with parts that a `ViT` does not have, naming them.
    """
    first, embed = model.blocks[0], model.patch_embed
    strange = strangers(model)
    if strange:
        raise ValueError(f"this timm model has {', '.join(strange)}, which a ViT does not; expected a plain vit_* model")
    mean = model.global_pool == "avg"
    extra = sum(token.shape[1] for token in (model.cls_token, model.reg_token) if token is not None)
    head_dim = first.attn.qkv.out_features // 3 // first.attn.num_heads
    attention = partial(Attention, head_dim=head_dim, qk_norm=isinstance(first.attn.q_norm, nn.LayerNorm), qkv_bias=first.attn.qkv.bias is not None)
    scale = getattr(first.ls1, "gamma", None)
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
        block=partial(Block, mlp_ratio=first.mlp.fc1.out_features / model.embed_dim, layer_scale=None if scale is None else 1.0),
        norm_after_pool=isinstance(model.fc_norm, nn.LayerNorm),
    )
    ours.load_state_dict(rename(model.state_dict()), strict=True)
    return ours.train(model.training)


def strangers(model: nn.Module) -> list[str]:
    """The parts of a timm Vision Transformer that our ViT has no place for."""
    first, embed = model.blocks[0], model.patch_embed
    found = {
        "pooling " + repr(model.global_pool): model.global_pool not in ("token", "avg"),
        "no class token for its class-token pooling": model.global_pool == "token" and model.cls_token is None,
        "a norm before the blocks": not isinstance(model.norm_pre, nn.Identity),
        f"blocks of type {type(first).__name__}": type(first).__name__ != "Block",
        f"an MLP of type {type(first.mlp).__name__}": type(first.mlp).__name__ != "Mlp",
        f"the activation {type(first.mlp.act).__name__}": not isinstance(first.mlp.act, nn.GELU),
        "norms inside attention or MLP": any(not isinstance(m, nn.Identity) for m in (getattr(first.attn, "norm", nn.Identity()), first.mlp.norm)),
        "patches that are not square": embed.patch_size[0] != embed.patch_size[1],
        "a norm behind the patch embedding": not isinstance(embed.norm, nn.Identity),
        f"norms of type {type(first.norm1).__name__}": not isinstance(first.norm1, nn.LayerNorm) or first.norm1.eps != 1e-6,
        "no classifier": not isinstance(model.head, nn.Linear),
    }
    return [part for part, there in found.items() if there]


def timm_attention(attention: Callable) -> type[nn.Module]:
    """A class for timm's `attn_layer=` (timm >= 1.0.23): our attention with its knobs, under timm's calling convention.

    `qkv`, `proj` and the norms keep timm's names, so that pretrained weights load; what only ours has (a temperature) keeps its
    start, and timm's strict loading has to be told (`pretrained_strict=False`).
    """
    slot, knobs = (attention.func, attention.keywords) if isinstance(attention, partial) else (attention, {})

    class TimmAttention(slot):
        def __init__(self, dim, num_heads=8, qkv_bias=False, qk_norm=False, attn_drop=0.0, proj_drop=0.0, **others):
            chosen = {"qkv_bias": qkv_bias, "dropout": attn_drop} | ({"qk_norm": True} if qk_norm else {}) | knobs
            super().__init__(dim, num_heads, **chosen)
            self.proj_drop = nn.Dropout(proj_drop)

        def forward(self, x, attn_mask=None, is_causal=False):
            if is_causal:
                n = x.shape[1]
                causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
                attn_mask = causal if attn_mask is None else attn_mask & causal
            return self.proj_drop(super().forward(x, None, attn_mask).x)

    TimmAttention.__name__ = TimmAttention.__qualname__ = f"Timm{slot.__name__}"
    return TimmAttention


def timm_tokenizer(tokenizer: Callable) -> Callable[..., nn.Module]:
    """A callable for timm's `embed_layer=`: our tokenizer with its knobs; timm's `patch_size` is passed on unless a knob says otherwise."""

    class TimmTokenizer(nn.Module):
        def __init__(self, img_size=224, patch_size=16, in_chans=3, embed_dim=768, output_fmt=None, **others):
            super().__init__()
            pair = (lambda size: (size, size) if isinstance(size, int) else tuple(size))
            slot = tokenizer if isinstance(tokenizer, partial) else partial(tokenizer)
            patch = slot.keywords.get("patch", pair(patch_size)[0])
            self.img_size, self.patch_size, self.output_fmt = pair(img_size), (patch, patch), output_fmt
            self.tokens = slot(self.img_size, in_chans, embed_dim, **{"patch": patch})
            self.grid_size = self.tokens.grid(self.img_size)
            self.num_patches = self.grid_size[0] * self.grid_size[1]

        def feat_ratio(self, as_scalar=True):
            return self.patch_size[0] if as_scalar else self.patch_size

        def dynamic_feat_size(self, img_size):
            return self.tokens.grid(img_size)

        def forward(self, x):
            tokens = self.tokens(x)
            return tokens.unflatten(1, self.tokens.grid(x.shape[-2:])) if str(self.output_fmt).endswith("NHWC") else tokens

    return TimmTokenizer
