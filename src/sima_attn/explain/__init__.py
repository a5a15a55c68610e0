"""Model and image -> heat map, or the most likely classes.

answer      a photo -> the most likely classes, or "unsure"
photo_model a model, and how a photo enters it at its own aspect ratio
reading     queries, keys and token grids of all layers, recorded by forward hooks
maps        a layer -> a map in [0, 1] at the size of the image
effects     contributions of all tokens to one token; statistics of the attention
deletion    deletion and insertion test of the maps
gallery, figures    maps -> pictures, rows -> plots
"""

from sima_attn.data.images import open_photo
from sima_attn.explain.deletion import DeletionRow, deletion_test
from sima_attn.explain.effects import AttentionRow, attention_statistics, effect
from sima_attn.explain.maps import heatmap, heatmaps
from sima_attn.explain.photo_model import PhotoModel, load_photo_model
from sima_attn.explain.reading import Layer, Reading, read_attention

__all__ = [
    "AttentionRow",
    "DeletionRow",
    "Layer",
    "PhotoModel",
    "Reading",
    "attention_statistics",
    "deletion_test",
    "effect",
    "heatmap",
    "heatmaps",
    "load_photo_model",
    "open_photo",
    "read_attention",
]
