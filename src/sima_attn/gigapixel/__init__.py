"""Features of images that do not fit in memory.

tiles, positions   rectangles of the token grid, and their position embeddings
attentions         the attention of a block, on a tile
network            a model -> its parts, each of which runs on a tile
sources            TIFF, zarr, .npy and photos -> any rectangle of their pixels
stores             tokens on disk, in host memory or on an accelerator
sweeps             all tokens through all blocks, tile by tile
pictures           features, queries and keys -> pictures of reduced size
api                `features`, which does it all, and goes on with an interrupted run
"""

from sima_attn.gigapixel.api import FeatureGrid, features

__all__ = ["FeatureGrid", "features"]
