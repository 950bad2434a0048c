"""Use our attentions and tokenizers in models of timm, through timm's arguments `attn_layer=` and `embed_layer=`."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


def timm_attention(attention: Callable) -> type[nn.Module]:
    """Return a class that makes one of our attention modules usable in a timm model. Pass the class to timm as the argument
    `attn_layer=`. `attention` is the class of our attention module.

    This needs timm 1.0.23 or newer.

    `attention` is a class or a partial with options, such as `partial(LocalityAttention, mask_self=False)`. Its weights have
    timm's names, so that pretrained weights of timm load. Parameters that timm does not have, such as a temperature, keep their
    initial value; timm then needs `pretrained_strict=False`.

    Raises   ValueError for a function such as `mimetic_start`; when timm builds the model, for options of timm that our
             attention does not have: `scale_norm`, `proj_bias=False`, and `qk_norm` with a norm other than LayerNorm with
             epsilon 1e-6.
    """
    slot, options = split_partial(attention)
    if not isinstance(slot, type):
        raise ValueError(
            f"timm_attention got {getattr(slot, '__name__', slot)!r}, which is no class; expected an attention class, such as"
            " Attention. For mimetic initialization, build the model with timm_attention(Attention), and then call"
            " smallvit.attention_starts.draw_mimetic(block.attn, (0.7, 0.7), (0.4, 0.4)) for each block"
        )
    takes_norm = "qk_norm" in inspect.signature(slot).parameters

    class TimmAttention(slot):
        """One of our attention modules, in a form that timm can use in its models. Its constructor accepts the same arguments
        as the attention of timm.
        """

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
            refuse_options(slot, others | {"qk_norm": qk_norm and not fits, "proj_bias=False": not proj_bias})
            timms = {"qkv_bias": qkv_bias, "dropout": attn_drop} | ({"qk_norm": True} if qk_norm else {})
            super().__init__(dim, num_heads, **timms | options)
            self.proj_drop = nn.Dropout(proj_drop)
            self.to(device=device, dtype=dtype)

        def forward(self, x, attn_mask=None, is_causal=False):
            if is_causal:
                n = x.shape[1]
                causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
                attn_mask = causal if attn_mask is None else attn_mask & causal
            return self.proj_drop(super().forward(x, None, attn_mask).x)

    TimmAttention.slot = slot  # for attention_maps, which needs the output of our own forward
    TimmAttention.__name__ = TimmAttention.__qualname__ = f"Timm{slot.__name__}"
    return TimmAttention


def timm_tokenizer(tokenizer: Callable) -> Callable[..., nn.Module]:
    """Return a class that makes one of smallvit's tokenizers (modules that convert images to tokens) usable in a timm model.
    Pass this class to timm as the argument `embed_layer=`. `tokenizer` is the class of the tokenizer.

    `tokenizer` is a class or a partial with options. timm's `patch_size` sets the option `patch` of the tokenizer, unless the
    partial sets it. A convolutional stem ignores `patch_size`, because its layers set its stride.

    Raises   ValueError, when timm builds the model, for options of timm that our tokenizers do not have: a norm after the
             embedding, no bias (`pre_norm`), padding (`dynamic_img_pad`) and patches that are not square. The model raises it
             for images of another size, unless it has `dynamic_img_size=True`.
    """
    slot, options = split_partial(tokenizer)
    takes_patch = "patch" in inspect.signature(slot).parameters

    class TimmTokenizer(nn.Module):
        """One of our tokenizers, in a form that timm can use in its models. It has the same constructor arguments and
        attributes as the class `PatchEmbed` of timm.
        """

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
            image, (patch, width) = as_pair(img_size), as_pair(patch_size)
            unlike = {"bias=False": not bias, "patch_size": patch != width, "output_fmt": output_fmt not in (None, "NHWC")}
            refuse_options(slot, others | unlike)
            self.img_size, self.strict, self.as_image = image, strict_img_size, output_fmt is not None
            self.tokens = slot(image, in_chans, embed_dim, **({"patch": patch} if takes_patch else {}) | options)
            self.grid_size = self.tokens.grid(image)
            self.num_patches = self.grid_size[0] * self.grid_size[1]
            self.patch_size = (image[0] // self.grid_size[0], image[1] // self.grid_size[1])
            self.to(device=device, dtype=dtype)

        def feat_ratio(self, as_scalar=True):
            """Return the side of a patch in pixels: one number, the larger of height and width, if `as_scalar` is True, else
            the pair (height, width). Models of timm call this method.
            """
            return max(self.patch_size) if as_scalar else self.patch_size

        def dynamic_feat_size(self, img_size):
            """Return the number of (rows, columns) of patches in an image. `img_size` is the (height, width) of the image.
            Models of timm call this method.
            """
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


def split_partial(component: Callable) -> tuple[Any, dict[str, Any]]:
    """Return a class and a dict of its options. `component` is a `functools.partial` of the class, or the class itself without
    options.
    """
    return (component.func, component.keywords) if isinstance(component, partial) else (component, {})


def refuse_options(component: Callable, options: Mapping[str, object]):
    """Raise ValueError if timm sets an option that smallvit's class `component` does not have. `options` is a dict from the
    names of such options to timm's values. A value such as None or False counts as not set.
    """
    if names := [name for name, value in options.items() if value]:
        raise ValueError(
            f"timm asks {component.__name__} for {', '.join(names)}, which it does not have; leave it as timm has it by default"
        )


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return a size as a pair (height, width). `size` is a single number, for squares, or a pair of numbers."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])
