"""Pretrained weights, and conversion between our models and timm's. No other module of smallvit knows timm's names.

weights.py           Weights: a pretrained model of timm's hub or a file, as the initialization of a run
files.py             reading files of weights
convert.py           from_timm: a timm Vision Transformer as a `ViT`; like: the `ViT` with the shape of a timm model
export.py            to_timm: a `ViT` as a timm Vision Transformer
apply_reduction.py   apply: a trained model with merging or pruning of tokens
slots.py             timm_attention, timm_tokenizer: our slots as arguments of timm's constructors
"""

from .apply_reduction import apply
from .convert import VIT_S, from_timm, like
from .export import to_timm
from .slots import timm_attention, timm_tokenizer
from .weights import Unavailable, Weights, enlarged

__all__ = [
    "VIT_S", "Unavailable", "Weights", "apply", "enlarged", "from_timm", "like", "timm_attention", "timm_tokenizer", "to_timm",
]  # fmt: skip
