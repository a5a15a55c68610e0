"""Does a model need what the map says it looks at?

Deletion hides patches of an image, step by step, and watches the score of its class fall; insertion starts with
a blur of the image and sharpens them. (With the same cover for both, insertion would be deletion read backwards.) If
the map is right, hiding the patches with the highest scores lowers the class faster than
hiding random ones, and hiding the lowest-scored does so more slowly.

Shapes: B images, K classes, G patches of the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.explain.reading import read_attention
from sima_attn.explain.subject import Subject
from sima_attn.train.data.loader import evaluation_transform
from sima_attn.train.data.sources import Source, open_data
from sima_attn.train.recipes import Data

MODES = ("deletion", "insertion")
ORDERS = ("highest first", "random", "lowest first")
BLUR = 4
FRACTIONS = tuple(i / 10 for i in range(11))


@dataclass(frozen=True)
class DeletionRow:
    """Images with a share of their patches hidden (deletion) or sharpened (insertion), in one order.

    `probability` is the mean of the right class, `top1` the per cent of images classified rightly, and
    `area` the mean probability of the whole curve: the lower, the faster it falls.
    """

    model: str
    mode: str
    order: str
    of: str
    layer: int
    fraction: float
    images: int
    probability: float
    top1: float
    area: float


@torch.no_grad()
def deletion_test(
    model: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]] | Sequence[tuple[Tensor, Tensor]],
    *,
    of: str = "k",
    layer: int = -1,
    fractions: Sequence[float] = FRACTIONS,
    seed: int = 0,
    name: str | None = None,
    on_batch: Callable[[int], object] = lambda images: None,
) -> list[DeletionRow]:
    """Rows for both modes and the three orders over batches of (images [B, 3, h, w], labels [B]).

    Hidden means 0, the mean colour of normalised images; before it is sharpened, a patch is what is left of it in
    the image averaged down to BLUR x BLUR places. A patch is a cell of the layer's token grid.
    """
    fractions = _checked(fractions)
    model.eval()
    sums = np.zeros((len(MODES), len(ORDERS), len(fractions), 2))
    count, generator = 0, torch.Generator().manual_seed(seed)
    for images, labels in batches:
        reading = read_attention(model, images)
        scores = reading.layer(layer).scores(of).cpu()  # [B, rows, columns]
        images = images.to(reading.output.device)
        covers = {"deletion": torch.zeros_like(images), "insertion": _blurred(images)}
        for j, ranks in enumerate(_rankings(scores, generator)):
            for f, fraction in enumerate(fractions):
                chosen = _cells_to_pixels(ranks < round(fraction * ranks[0].numel()), images, reading.share)
                for i, mode in enumerate(MODES):
                    shown = ~chosen if mode == "deletion" else chosen
                    sums[i, j, f] += _right(model, torch.where(shown, images, covers[mode]), labels)
        count += len(images)
        on_batch(len(images))
    if not count:
        raise ValueError("there are no images to test on")
    means = sums / count
    facts: dict[str, Any] = {"model": name or type(model).__name__, "of": of, "layer": layer, "images": count}
    return [
        DeletionRow(
            mode=mode,
            order=order,
            fraction=fraction,
            probability=round(means[i, j, f, 0], 6),
            top1=round(100 * means[i, j, f, 1], 3),
            area=round(float(np.trapezoid(means[i, j, :, 0], fractions)), 6),
            **facts,
        )
        for i, mode in enumerate(MODES)
        for j, order in enumerate(ORDERS)
        for f, fraction in enumerate(fractions)
    ]


def validation_batches(
    subject: Subject, data: str | Path, *, images: int, size: int | None = None, batch: int = 32
) -> list[tuple[Tensor, Tensor]]:
    """Up to so many images of the val split, spread evenly over it, resized and normalised for the subject."""
    source = open_data(data, "val")
    K = getattr(subject.model, "num_classes", len(source.classes))
    if len(source.classes) != K or (subject.classes is not None and subject.classes != source.classes):
        raise ValueError(
            f"{subject.name} has {K} classes, {data} has {len(source.classes)}, or other ones: the score of the right "
            "class would mean nothing"
        )
    settings = Data(str(data), size=size or subject.size)
    transform = evaluation_transform(replace(settings, mean=_three(subject.mean), std=_three(subject.std)))
    chosen = np.linspace(0, len(source) - 1, min(images, len(source))).round().astype(int)
    parts = np.split(chosen, range(batch, len(chosen), batch))
    return [
        (torch.stack([transform(_read(source, int(i))) for i in part]), torch.from_numpy(source.labels[part]).long())
        for part in parts
    ]


def _read(source: Source, index: int) -> Any:
    try:
        return source.read(index)
    except Exception as error:  # whatever the decoder says
        raise ValueError(f"{source.name(index)} cannot be read as an image: {error}") from None


def _three(values: tuple[float, ...]) -> tuple[float, float, float]:
    red, green, blue = values
    return red, green, blue


def _checked(fractions: Sequence[float]) -> list[float]:
    ordered = [float(f) for f in fractions]
    if len(ordered) < 2 or ordered != sorted(set(ordered)) or ordered[0] != 0 or ordered[-1] != 1:
        raise ValueError(f"fractions must grow from 0 to 1, got {list(fractions)}")
    return ordered


def _rankings(scores: Tensor, generator: torch.Generator) -> list[Tensor]:
    """For each order of ORDERS, the place of every patch in it [B, rows, columns]."""
    flat = scores.flatten(1)  # [B, G]
    chance = torch.rand(flat.shape, generator=generator)
    by_order = {"highest first": -flat, "random": chance, "lowest first": flat}
    return [by_order[order].argsort(dim=1, stable=True).argsort(dim=1).view_as(scores) for order in ORDERS]


def _cells_to_pixels(cells: Tensor, images: Tensor, share: tuple[float, float]) -> Tensor:
    """Cells [B, rows, columns] -> the pixels they cover [B, 1, height, width]."""
    height, width = images.shape[2:]
    whole = (max(height, round(height / share[0])), max(width, round(width / share[1])))
    pixels = F.interpolate(cells[:, None].float(), size=whole, mode="nearest")[..., :height, :width]
    return (pixels > 0).to(images.device)


def _blurred(images: Tensor) -> Tensor:
    small = F.adaptive_avg_pool2d(images, BLUR)
    return F.interpolate(small, size=images.shape[2:], mode="bilinear", align_corners=False)


def _right(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Summed probability of the right class, and how many images are classified rightly."""
    output = model(images.to(next(model.parameters())))
    logits = getattr(output, "logits", output).float()  # [B, K]
    labels = labels.to(logits.device)
    right = logits.softmax(1).gather(1, labels[:, None])
    return float(right.sum()), float((logits.argmax(1) == labels).sum())
