"""timm: its weights in our ViT, and our slots in its models. The only room that knows timm's names.

`Weights` are what a run may start from: a name of timm's hub, or a file. `from_timm` turns a timm Vision Transformer into the
same function as a `ViT`, `to_timm` is the way back, and `like` names the `ViT` of that shape; `apply` reduces the tokens of a
finished model, ours or timm's. `timm_attention` and `timm_tokenizer` make of our slots what timm's constructors ask for.
"""

from .apply_reduction import apply
from .convert import VIT_S, from_timm, like
from .export import to_timm
from .slots import timm_attention, timm_tokenizer
from .weights import Unavailable, Weights, enlarged

__all__ = [
    "VIT_S",
    "Unavailable",
    "Weights",
    "apply",
    "enlarged",
    "from_timm",
    "like",
    "timm_attention",
    "timm_tokenizer",
    "to_timm",
]
