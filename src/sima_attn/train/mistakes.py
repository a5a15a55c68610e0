"""The most confident mistakes of a classifier, kept during an evaluation and drawn.

Shapes: B batch, K classes, S side in pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from sima_attn.report.captions import drawable
from sima_attn.report.drawing import Tile
from sima_attn.report.figures import figure
from sima_attn.train.batch_picture import CELL, COLUMNS, ROWS, save_sheet, to_pictures

if TYPE_CHECKING:
    from sima_attn.data.loader import Batch
    from sima_attn.data.settings import Data

MOST = ROWS * COLUMNS
MOST_BARS = 40  # classes in the figure


class Mistake(NamedTuple):
    """An image [3, S, S] as the model gets it, its label, the class that the model gives, and its probability."""

    image: Tensor
    label: int
    predicted: int
    probability: float


def most_confident(kept: Sequence[Mistake], batch: Batch, logits: Tensor) -> list[Mistake]:
    """The mistakes with the highest probabilities, of those kept so far and of a batch with its logits [B, K]."""
    probabilities, predicted = logits.softmax(1).max(1)
    confidence = probabilities.masked_fill(predicted == batch.labels, -1.0)
    found = [
        Mistake(batch.images[i].cpu(), int(batch.labels[i]), int(predicted[i]), float(confidence[i]))
        for i in confidence.topk(min(MOST, len(confidence))).indices.tolist()
        if confidence[i] >= 0
    ]
    return sorted([*kept, *found], key=lambda mistake: -mistake.probability)[:MOST]


def draw_mistakes(path: Path, mistakes: Sequence[Mistake], names: Sequence[str], data: Data, title: str) -> None:
    """One picture per mistake with its label, the predicted class and its probability."""
    tiles = [
        Tile(picture, f"{names[m.label]}\nas {names[m.predicted]} {m.probability:.0%}")
        for m in mistakes
        for picture in to_pictures(m.image[None], data)
    ]
    save_sheet(path, [tiles[first : first + COLUMNS] for first in range(0, len(tiles), COLUMNS)], title, CELL)


def plot_classes(path: Path, rows: Sequence[Any], names: Sequence[str], title: str) -> None:
    """Accuracy of each class as bars, the lowest first; of many classes the lowest ones."""
    shown = sorted((row for row in rows if row.images), key=lambda row: row.top1)[:MOST_BARS]
    left_out = sum(row.images > 0 for row in rows) - len(shown)
    labels = [f"{drawable(names[row.label])} ({row.images})" for row in shown]
    with figure(path, figsize=(8, 1.4 + 0.24 * len(shown))) as (_, axes):
        axes.barh(range(len(shown)), [row.top1 for row in shown], color="steelblue")
        axes.set_yticks(range(len(shown)), labels, fontsize="small")
        axes.set(xlim=(0, 100), xlabel="top-1 in %; number of images in brackets", ylim=(len(shown) - 0.4, -0.6))
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(f"{title}: the lowest {len(shown)} classes" if left_out else title)
