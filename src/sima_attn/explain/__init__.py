"""Model and image -> heat map.

subject     a model by name, run or file, and how it wants its photos
reading     queries, keys and token grids of all layers, recorded by forward hooks
maps        a layer -> a map in [0, 1] at the size of the image
effects     contributions of all tokens to one token; statistics of the attention
deletion    deletion and insertion test of the maps
drawing, gallery, figures    maps -> pictures, rows -> plots
"""

from sima_attn.data.images import open_photo
from sima_attn.explain.deletion import DeletionRow, deletion_test
from sima_attn.explain.effects import AttentionRow, attention_statistics, effect
from sima_attn.explain.maps import heatmap, heatmaps
from sima_attn.explain.reading import Layer, Reading, read_attention
from sima_attn.explain.subject import Subject, load_subject

__all__ = [
    "AttentionRow",
    "DeletionRow",
    "Layer",
    "Reading",
    "Subject",
    "attention_statistics",
    "deletion_test",
    "effect",
    "heatmap",
    "heatmaps",
    "load_subject",
    "open_photo",
    "read_attention",
]
