"""The paper's heat maps (Figures 3 and A2).

    score of a token = |q-hat|_2 over its channels, q-hat = Q / |Q|_1 over the tokens; the same for keys

on the token grid, resized to the image and scaled to [0, 1]. For softmax attention, for comparison, it is the norm of q
or k itself.

Shapes: images [1, 3, height, width]; maps [height, width].
"""

from pathlib import Path

import numpy as np
import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor, nn

from sima_attn.data.images import open_photo
from sima_attn.explain.photo_model import photo_model
from sima_attn.explain.reading import Grid, Reading, read_attention

Photo = Tensor | Image | str | Path


def heatmap(model: nn.Module, image: Photo, *, layer: int = -1, of: str = "q") -> np.ndarray:
    """A map in [0, 1] at image size [height, width]: where the queries ("q") or keys ("k") of a layer are large.

    Args:
        model: Any model with self-attention, of timm, transformers or this package: SimA, converted, or softmax.
        image: A photo (path or PIL image), or a normalized tensor [3, height, width] or [1, 3, height, width].
        layer: Index of the layer, from 0, or from the end if negative.
        of: "q" or "k".
    """
    reading, size = read_image(model, image)
    return to_map(reading.layer(layer).scores(of), reading.share, size)


def heatmaps(model: nn.Module, image: Photo, *, of: str = "q") -> dict[str, np.ndarray]:
    """Path of the layer -> map, for all layers, from one forward pass."""
    reading, size = read_image(model, image)
    return {layer.path: to_map(layer.scores(of), reading.share, size) for layer in reading.layers}


def read_image(model: nn.Module, image: Photo) -> tuple[Reading, Grid]:
    """The reading of one image, and the size (height, width) of its maps."""
    if isinstance(image, Tensor):
        batch = image[None] if image.dim() == 3 else image
        if batch.dim() != 4 or len(batch) != 1:
            raise ValueError(f"image must be [3, height, width] or [1, 3, height, width], got {[*image.shape]}")
        return read_attention(model, batch), (batch.shape[2], batch.shape[3])
    photo = open_photo(image) if isinstance(image, str | Path) else image
    if not isinstance(photo, Image):
        raise ValueError(
            f"image must be a path, a PIL image or a normalized tensor, got {type(image).__name__}; of an array of "
            "bytes use PIL.Image.fromarray"
        )
    entered = photo_model(model)
    return read_attention(entered.model, entered.prepare(photo)), (photo.height, photo.width)


def to_map(scores: Tensor, share: tuple[float, float], size: Grid) -> np.ndarray:
    """Scores [1, rows, columns] -> a map of the image, scaled to [0, 1]; arguments as in `spread`."""
    return unit_range(spread(scores, share, size))


def spread(scores: Tensor, share: tuple[float, float], size: Grid) -> np.ndarray:
    """Scores [1, rows, columns] -> resized to the image (height, width), bilinear.

    The image covers a share of the grid from the top left; the rest is padding, and removed.
    """
    height, width = size
    whole = (max(height, round(height / share[0])), max(width, round(width / share[1])))
    large = F.interpolate(scores[None], size=whole, mode="bilinear", align_corners=False)[0, 0]
    return large[:height, :width].cpu().numpy()


def unit_range(values: np.ndarray) -> np.ndarray:
    """Values scaled to [0, 1]; zeros if all are equal."""
    low, high = float(values.min()), float(values.max())
    return (values - low) / (high - low) if high > low else np.zeros_like(values)
