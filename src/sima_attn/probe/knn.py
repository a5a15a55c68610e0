"""k nearest neighbors on frozen features: the search, the weighted vote, the picture.

    score of a class = sum over the k neighbors of that class of exp(cosine / T)

Neither side must fit into memory: the bank is read once, block by block, and of each query only its best so far stay.
Shapes: n queries, m images in the bank, W width of the features, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn._settings import PositiveFloat, check_value
from sima_attn.data.sources import Source
from sima_attn.probe.features import Features, check_labels, evenly
from sima_attn.report.figures import figure

Array = np.ndarray | Tensor
DRAWN_IMAGES, DRAWN_NEIGHBORS = 6, 8


@dataclass(frozen=True)
class KnnRow:
    """Accuracy in percent at one number of neighbors."""

    k: int
    temperature: float
    top1: float
    top5: float
    images: int
    bank: int


def _block(values: Array, start: int, size: int, device: torch.device) -> Tensor:
    """Rows from start on, on the device in float32, each of length 1."""
    part = values[start : start + size]
    if not isinstance(part, Tensor):
        part = torch.from_numpy(np.array(part))  # a copy: the array may be a file, read only
    return F.normalize(part.to(device, non_blocking=True).float(), dim=1)


@torch.no_grad()
def nearest(
    queries: Array,
    bank: Array,
    k: int,
    *,
    device: torch.device | str = "cpu",
    query_block: int = 4096,
    bank_block: int = 65536,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Tensor, Tensor]:
    """Cosines [n, k] and indices [n, k] of the nearest features [m, W] to each of [n, W], the nearest first."""
    n, m, device = len(queries), len(bank), torch.device(device)
    if not 1 <= k <= m:
        raise ValueError(f"k must be between 1 and the {m} images of the bank, got {k}; use a smaller one")
    cosines = torch.full((n, k), -torch.inf)
    indices = torch.zeros(n, k, dtype=torch.long)
    for first in range(0, m, bank_block):
        block = _block(bank, first, bank_block, device)  # [block, W]
        for start in range(0, n, query_block):
            rows = slice(start, start + query_block)
            near = _block(queries, start, query_block, device) @ block.mT  # [rows, block]
            best, places = near.topk(min(k, len(block)), dim=1)
            both = torch.cat([cosines[rows].to(device), best], dim=1)
            where = torch.cat([indices[rows].to(device), places + first], dim=1)
            best, places = both.topk(k, dim=1)
            cosines[rows], indices[rows] = best.cpu(), where.gather(1, places).cpu()
        on_step(min(first + bank_block, m), m)
    return cosines, indices


def votes(cosines: Tensor, labels: Tensor, classes: int, temperature: float = 0.07) -> Tensor:
    """Cosines and labels [n, k] of the neighbors -> scores [n, K], in which the nearest one counts 1.

    Which class has most does not change with that unit, and at a low temperature exp(cosine / T) would be infinite.
    """
    weights = ((cosines - cosines.amax(1, keepdim=True)) / temperature).exp()
    return weights.new_zeros(len(cosines), classes).scatter_add_(1, labels, weights)


def knn_accuracy(
    queries: Array,
    labels: Array,
    bank: Array,
    bank_labels: Array,
    *,
    classes: int,
    k: Sequence[int] = (20,),
    temperature: float = 0.07,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> list[KnnRow]:
    """Accuracy of the vote for each k, one search for all of them."""
    check_value(temperature, PositiveFloat, "the temperature")
    truth = check_labels(labels, len(queries), classes, "query").cpu()
    known = check_labels(bank_labels, len(bank), classes, "bank").cpu()
    cosines, indices = nearest(queries, bank, max(k), device=device, on_step=on_step)
    return vote_accuracy(cosines, known[indices], truth, classes=classes, k=k, temperature=temperature, bank=len(bank))


def features_accuracy(queries: Features, bank: Features, **options: Any) -> list[KnnRow]:
    """`knn_accuracy` of features; `options` are its own."""
    sides = (queries.values, queries.labels, bank.values, bank.labels)
    return knn_accuracy(*sides, classes=len(bank.classes), **options)


def vote_accuracy(
    cosines: Tensor,
    neighbors: Tensor,
    truth: Tensor,
    *,
    classes: int,
    k: Sequence[int],
    temperature: float,
    bank: int,
    block: int = 4096,
) -> list[KnnRow]:
    """Accuracy for each k, from the cosines and labels [n, max k] of the neighbors, the nearest first.

    k neighbors vote for k classes at most: with fewer than five the top-5 accuracy is that of the first k.
    """
    n = len(truth)
    hits = {count: [0, 0] for count in k}
    for start in range(0, n, block):
        rows = slice(start, start + block)
        for count in hits:  # each k once, even if given twice
            scores = votes(cosines[rows, :count], neighbors[rows, :count], classes, temperature)  # [rows, K]
            right = scores.topk(min(5, count, classes), dim=1).indices == truth[rows, None]
            hits[count][0] += int(right[:, 0].sum())
            hits[count][1] += int(right.sum())
    return [KnnRow(count, temperature, 100 * one / n, 100 * five / n, n, bank) for count, (one, five) in hits.items()]


def plot_neighbors(
    queries: Features,
    query_source: Source,
    bank: Features,
    bank_source: Source,
    path: Path,
    *,
    device: torch.device | str = "cpu",
    title: str = "",
) -> None:
    """Draw a few images, each with its nearest neighbors in one row; frames show whether the class is the same."""
    # One image per chosen class, so that the rows differ.
    rows = [
        int(np.flatnonzero(queries.labels == label)[0])
        for label in evenly(len(queries.classes), DRAWN_IMAGES)
        if (queries.labels == label).any()
    ]
    cosines, indices = nearest(queries.values[rows], bank.values, min(DRAWN_NEIGHBORS, len(bank.values)), device=device)
    columns = 1 + indices.shape[1]
    size = (1.25 * columns, 1.45 * len(rows))
    with figure(path, rows=len(rows), columns=columns, figsize=size, squeeze=False) as (whole, axes):
        for line, row, near, places in zip(axes, rows, cosines.tolist(), indices.tolist(), strict=True):
            label = queries.labels[row]
            _draw(line[0], query_source.read(int(queries.indices[row])), _short(queries.classes[label]), "black")
            for cell, cosine, place in zip(line[1:], near, places, strict=True):
                caption = f"{cosine:.2f} {_short(bank.classes[bank.labels[place]])}"
                color = "seagreen" if bank.labels[place] == label else "crimson"
                _draw(cell, bank_source.read(int(bank.indices[place])), caption, color)
        whole.suptitle(title, fontsize=10)


def _short(name: str) -> str:
    return name if len(name) <= 12 else f"{name[:11]}…"


def _draw(axes: Any, image: Any, caption: str, color: str) -> None:
    axes.imshow(np.asarray(image))
    axes.set_title(caption, fontsize=7)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=color, linewidth=2)
