"""Our slots in timm's constructors: `attn_layer=` and `embed_layer=`, by adapting and never by patching timm's classes."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn


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
