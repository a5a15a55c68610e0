"""Where a model looks: the paper's heat maps (Figures 3 and A2).

    score of a token = |q-hat|_2 over its channels, q-hat = Q / |Q|_1 over the tokens; the same for keys

laid out on the token grid, brought to the size of the image, scaled to [0, 1]. For softmax attention it is the norm
of q or k itself, so that the two can be put side by side.

Shapes: images [1, 3, height, width]; maps [height, width].
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Union

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.data.images import open_photo
from sima_attn.explain.photo_model import photo_model
from sima_attn.explain.reading import Grid, Reading, read_attention

if TYPE_CHECKING:
    from PIL.Image import Image

Photo = Union[Tensor, "Image", str, Path]


def heatmap(model: nn.Module, image: Photo, *, layer: int = -1, of: str = "q") -> np.ndarray:
    """A map in [0, 1] at image size [height, width]: where the queries ("q") or keys ("k") of a layer are large.

    Args:
        model: Any model with self-attention: ours, converted ones, and softmax ones.
        image: A photo (path or PIL image), or a normalised tensor [3, height, width] or [1, 3, height, width].
        layer: Number of the layer, from 0, or from the end if negative.
        of: "q" or "k".
    """
    reading, size = look_at(model, image)
    return to_map(reading.layer(layer).scores(of), reading.share, size)


def heatmaps(model: nn.Module, image: Photo, *, of: str = "q") -> dict[str, np.ndarray]:
    """The maps of all layers from one forward, first to last, by the path of the layer."""
    reading, size = look_at(model, image)
    return {layer.path: to_map(layer.scores(of), reading.share, size) for layer in reading.layers}


def look_at(model: nn.Module, image: Photo) -> tuple[Reading, Grid]:
    """One forward of one image, and the size (height, width) that its maps should have."""
    if isinstance(image, Tensor):
        batch = image[None] if image.dim() == 3 else image
        if batch.dim() != 4 or len(batch) != 1:
            raise ValueError(f"one image at a time: [3, height, width] or [1, 3, height, width], got {[*image.shape]}")
        return read_attention(model, batch), (batch.shape[2], batch.shape[3])
    photo = open_photo(image) if isinstance(image, str | Path) else image
    return read_attention(model, photo_model(model).prepare(photo)), (photo.height, photo.width)


def to_map(scores: Tensor, share: tuple[float, float], size: Grid) -> np.ndarray:
    """Scores [1, rows, columns] -> a map of the image, scaled to [0, 1]; arguments as in `spread`."""
    return unit_range(spread(scores, share, size))


def spread(scores: Tensor, share: tuple[float, float], size: Grid) -> np.ndarray:
    """Scores [1, rows, columns] -> the same numbers at image size (height, width), in between linearly.

    The image covers a share of the grid, downwards and to the right; the rest is padding, and goes.
    """
    height, width = size
    whole = (max(height, round(height / share[0])), max(width, round(width / share[1])))
    large = F.interpolate(scores[None], size=whole, mode="bilinear", align_corners=False)[0, 0]
    return large[:height, :width].cpu().numpy()


def unit_range(values: np.ndarray) -> np.ndarray:
    """Values scaled so that the least is 0 and the greatest 1; zeros where all are the same."""
    low, high = float(values.min()), float(values.max())
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def raw_scores(reading: Reading, layers: Iterable[int], of: Iterable[str]) -> dict[str, np.ndarray]:
    """Token scores [rows, columns], neither scaled nor enlarged, by "PATH.q" and "PATH.k"."""
    return {
        f"{layer.path}.{part}": layer.scores(part)[0].cpu().numpy()
        for layer in (reading.layer(index) for index in layers)
        for part in of
    }
