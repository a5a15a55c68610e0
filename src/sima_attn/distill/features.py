"""Final tokens of teacher and student, compared: nearest neighbors, and a picture in colors.

Shapes: n images, N tokens, C channels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sima_attn._files import atomic_write
from sima_attn.data.cache import denormalize
from sima_attn.data.settings import Data
from sima_attn.nn.grid import token_layout
from sima_attn.probe.knn import nearest
from sima_attn.report.drawing import Tile, sheet
from sima_attn.report.feature_colors import FeatureColors

SIDE = 224  # of a picture, in pixels


def knn_agreement(teacher: Tensor, student: Tensor) -> float:
    """Percentage of images whose nearest other image is the same by both features [n, C], compared by cosine."""
    first, second = _nearest_other(teacher), _nearest_other(student)
    return 100 * (first == second).float().mean().item()


def _nearest_other(features: Tensor) -> Tensor:
    """Index of the nearest other image [n]."""
    _, indices = nearest(features, features, k=2, device=features.device)
    itself = torch.arange(len(features))
    return torch.where(indices[:, 0] == itself, indices[:, 1], indices[:, 0])


def feature_colors(teacher: Tensor, student: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [n, N, C] of both -> colors [n, N, 3] in [0, 1]: the three principal components of the teacher's tokens.

    Both are projected on the same components and scaled alike, so that equal features have equal colors.
    """
    colors = FeatureColors(teacher.flatten(0, 1))
    return colors(teacher), colors(student)


def draw_features(path: Path, images: Tensor, teacher: Tensor, student: Tensor, data: Data, attention: str) -> None:
    """A row per photo: the photo, and its patch tokens by the teacher and by the student as colors.

    Args:
        images: Normalized, [n, 3, S, S].
        teacher, student: Final tokens [n, N, C].
        attention: Of the student, for its caption.

    Raises:
        ValueError: The tokens do not form a square grid.
    """
    prefix, rows, columns = token_layout(teacher.shape[1], [None], None, "a picture of features")
    colors = feature_colors(teacher[:, prefix:].cpu().float(), student[:, prefix:].cpu().float())
    photos = denormalize(images.cpu().float(), data).permute(0, 2, 3, 1)  # [n, S, S, 3]
    lines = []
    for photo, *maps in zip(photos, *colors, strict=True):
        grids = [each.unflatten(0, (rows, columns)) for each in maps]
        captions = ("photo", "teacher", f"student, {attention}")
        lines.append([Tile(_picture(p), text) for p, text in zip([photo, *grids], captions, strict=True)])
    with atomic_write(path) as temporary:
        sheet(lines, title="Final patch tokens: principal components of the teacher's").save(temporary, format="png")


def _picture(values: Tensor) -> Image.Image:
    """Values [rows, columns, 3] in [0, 1] -> a square picture in which each of them is a rectangle of one color."""
    pixels = Image.fromarray((255 * values).round().numpy().astype(np.uint8))
    return pixels.resize((SIDE, SIDE), Image.Resampling.NEAREST if max(pixels.size) < SIDE else Image.Resampling.BOX)
