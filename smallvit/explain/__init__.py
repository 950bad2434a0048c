"""Figures of what a model has learned and of how it processes an image.

tokens.py     Trace, trace, token_map_data, draw_token_map, token_map: which patches are merged or pruned, block by block
maps.py       attention_maps, token_shares, patch_attention, rollout: where attention goes
pictures.py   attention_figure, reconstruction_figure, gallery: rows of images
sheet.py      image_grid: the figure layout and the pixel conversion that these figures share
plots.py      position_similarity, position_table, feature_view, confusion_figure: plots of what was learned
summary.py    Step, Steps, summary: a table of the layers of a model
"""

from .maps import attention_maps, patch_attention, rollout, token_shares
from .pictures import attention_figure, gallery, reconstruction_figure
from .plots import confusion_figure, feature_view, position_similarity, position_table
from .summary import Step, Steps, summary
from .tokens import Trace, draw_token_map, token_map, token_map_data, trace

__all__ = [
    "Step", "Steps", "Trace", "attention_figure", "attention_maps", "confusion_figure", "draw_token_map", "feature_view",
    "gallery", "patch_attention", "position_similarity", "position_table", "reconstruction_figure", "rollout", "summary",
    "token_map", "token_map_data", "token_shares", "trace",
]  # fmt: skip
