"""Model and image -> heat map.

photo_model a model, and how a photo enters it at its own aspect ratio
reading     queries, keys and token grids of every layer, read with hooks from the running model
maps        a layer -> a map in [0, 1] at the size of the image
effects     what one token takes from every other; what the attention of a layer is like, in numbers
deletion    does the model need what the map says it looks at?
drawing, figures    maps -> pictures, rows -> plots
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
