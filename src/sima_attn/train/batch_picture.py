"""Batches -> pictures: what the model gets in its first step, with the labels that it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from torch import Tensor

from sima_attn._files import atomic_write
from sima_attn.data.cache import denormalize
from sima_attn.data.sources import Source, class_words
from sima_attn.report.drawing import Tile, sheet

if TYPE_CHECKING:
    from sima_attn.data.loader import Batch
    from sima_attn.data.settings import Data

ROWS, COLUMNS = 4, 6
CELL = 200  # pixels: room for the name of a class
LEAST_SHARE = 0.005  # a smaller one would be shown as 0 %


def to_pictures(images: Tensor, data: Data) -> list[Image.Image]:
    """Normalized images [B, 3, S, S] -> what they show."""
    pixels = (255 * denormalize(images.detach().float(), data)).round().permute(0, 2, 3, 1)  # [B, S, S, 3]
    return [Image.fromarray(each) for each in pixels.cpu().numpy().astype(np.uint8)]


def draw_labeled(path: Path, batch: Batch, source: Source, data: Data, smoothing: float = 0.0) -> None:
    """The first images of a batch, each with its class, or with the shares of the classes that mixup has mixed.

    Args:
        source: Has the names of the classes; without classes the images have no captions.
        smoothing: Label smoothing of soft targets, which is not shown.
    """
    shown = min(ROWS * COLUMNS, len(batch.images))
    captions = [""] * shown
    if source.classes:
        words = class_words(data.path)
        names = [words.get(name, name) for name in source.classes]
        captions = label_captions(batch.labels[:shown], names, smoothing)
    tiles = list(map(Tile, to_pictures(batch.images[:shown], data), captions))
    rows = [tiles[first : first + COLUMNS] for first in range(0, shown, COLUMNS)]
    save_sheet(path, rows, f"first training batch: {shown} of {len(batch.images)} images, {data.size} px", CELL)


def label_captions(labels: Tensor, names: Sequence[str], smoothing: float) -> list[str]:
    """The name of each label [B]; of soft targets [B, K] one line per class and its share, the larger one first."""
    if labels.dim() == 1:
        return [names[label] for label in labels.tolist()]
    shares = (labels.float() - smoothing / len(names)) / (1 - smoothing)
    return ["\n".join(_share_lines(row, names)) for row in shares.cpu()]


def _share_lines(shares: Tensor, names: Sequence[str]) -> list[str]:
    """Mixup mixes two images: up to two lines, and one where both have the same class."""
    values, classes = (each.tolist() for each in shares.topk(min(2, len(names))))
    return [f"{names[k]} {share:.0%}" for share, k in zip(values, classes, strict=True) if share >= LEAST_SHARE]


def save_sheet(path: Path, rows: Sequence[Sequence[Tile]], title: str, cell: int) -> None:
    """Write rows of tiles as a PNG."""
    with atomic_write(path) as temporary:
        sheet(rows, title, cell).save(temporary, format="PNG")
