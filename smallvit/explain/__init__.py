"""Pictures of what a model has learned and of what it does with an image.

tokens.py     Trace, trace, plain, draw, token_map: where patches go when tokens are merged and pruned
maps.py       attention_maps, token_shares, patch_attention, rollout: what attention looks at
pictures.py   attention_figure, reconstruction_figure, gallery: sheets of images
sheet.py      sheet: rows and columns of images
plots.py      position_similarity, position_table, feature_view, confusion_figure: plots of what was learned
summary.py    Step, summary: what comes out of a model step by step, as a table
"""

from .maps import attention_maps, patch_attention, rollout, token_shares
from .pictures import attention_figure, gallery, reconstruction_figure
from .plots import confusion_figure, feature_view, position_similarity, position_table
from .summary import Step, Steps, summary
from .tokens import Trace, draw, plain, token_map, trace

__all__ = [
    "Step",
    "Steps",
    "Trace",
    "attention_figure",
    "attention_maps",
    "confusion_figure",
    "draw",
    "feature_view",
    "gallery",
    "patch_attention",
    "plain",
    "position_similarity",
    "position_table",
    "reconstruction_figure",
    "rollout",
    "summary",
    "token_map",
    "token_shares",
    "trace",
]
