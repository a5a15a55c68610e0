"""Deletion and insertion test: does a model depend on the patches that its map marks?

Deletion hides patches of an image step by step and measures the probability of the right class; insertion starts with
a blurred image and sharpens patches. (With the same fill for both, insertion would be deletion in reverse.) If the map
is right, hiding the patches with the highest scores lowers the probability faster than hiding random ones, and hiding
those with the lowest scores lowers it more slowly.

Shapes: B images, K classes, G patches of the grid; curves [B, fractions, 2]: probability of the right class, and
whether it came first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.data.loader import BrokenImages, Samples, batch_loader, evaluation_transform
from sima_attn.data.settings import Data
from sima_attn.data.splits import open_trained_split
from sima_attn.explain.reading import PARTS, read_attention
from sima_attn.models.loading import LoadedModel

MODES = ("deletion", "insertion")
HIGHEST, RANDOM, LOWEST = ORDERS = ("highest first", "random", "lowest first")
BLUR = 4
STEPS = 10


@dataclass(frozen=True)
class DeletionRow:
    """A fraction of the patches hidden (deletion) or sharpened (insertion), in one order of one map.

    `layer` counts from 0. `probability` is the mean probability of the right class, `top1` the accuracy in percent, and
    `area` the mean probability over the whole curve: the lower, the faster it falls. `over_random` is the mean over
    images of the area minus that of the random order, and `error` its standard error.
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
    over_random: float
    error: float


@torch.no_grad()
def deletion_test(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    of: Sequence[str] = PARTS,
    layers: Sequence[int] | None = (-1,),
    steps: int = STEPS,
    seed: int = 0,
    name: str | None = None,
    on_map: Callable[[int], object] = lambda images: None,
) -> list[DeletionRow]:
    """Rows for each map, both modes and the three orders, over batches of (images [B, 3, h, w], labels [B]).

    A hidden patch is 0, the mean color of normalized images; a blurred patch comes from the image averaged down to
    BLUR x BLUR pixels. A patch is a cell of the layer's token grid.

    Args:
        of: "q", "k" or both.
        layers: Indices from 0, or from the end if negative; None for all.
        steps: Number of steps from none of the patches to all.
        on_map: Called with the number of images after each map of a batch.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    found: dict[tuple[int, str, str, str], list[np.ndarray]] = defaultdict(list)
    for images, labels in batches:
        reading = read_attention(model, images)
        device = reading.output.device
        test = _PatchTest(model, images.to(device), labels.to(device), reading.share, steps)
        random_order: dict[torch.Size, dict[str, np.ndarray]] = {}  # shared by maps of the same grid
        depth = len(reading.layers)
        for number in range(depth) if layers is None else layers:
            for part in of:
                scores = reading.layer(number).scores(part).cpu()  # [B, rows, columns]
                if scores.shape not in random_order:
                    random_order[scores.shape] = test.curves(torch.rand(scores.shape, generator=generator))
                for order, curves in zip(
                    ORDERS, (test.curves(scores), random_order[scores.shape], test.curves(-scores)), strict=True
                ):
                    for mode in MODES:
                        found[number % depth, part, mode, order].append(curves[mode])
                on_map(len(images))
    return _rows({key: np.concatenate(parts) for key, parts in found.items()}, name or type(model).__name__)


@dataclass(frozen=True)
class _PatchTest:
    """Runs a model on a batch of images with more and more changed patches."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    share: tuple[float, float]
    steps: int

    def curves(self, scores: Tensor) -> dict[str, np.ndarray]:
        """Mode -> curve [B, steps + 1, 2], patches in the order of decreasing scores [B, rows, columns]."""
        ranks = (-scores).flatten(1).argsort(dim=1, stable=True).argsort(dim=1).view_as(scores)
        patches = ranks[0].numel()
        whole, nothing, blurred = self._ends
        hidden, sharpened = [whole], [blurred]
        for step in range(1, self.steps):
            first = _cells_to_pixels(ranks < round(step / self.steps * patches), self.images, self.share)
            hidden.append(self._right(self.images.masked_fill(first, 0)))
            sharpened.append(self._right(torch.where(first, self.images, self._blurred)))
        curves = ([*hidden, nothing], [*sharpened, whole])
        return {mode: np.stack(curve, axis=1) for mode, curve in zip(MODES, curves, strict=True)}

    @cached_property
    def _ends(self) -> list[np.ndarray]:
        """Results for the original, the fully hidden and the fully blurred images."""
        return [self._right(shown) for shown in (self.images, torch.zeros_like(self.images), self._blurred)]

    @cached_property
    def _blurred(self) -> Tensor:
        small = F.adaptive_avg_pool2d(self.images, BLUR)
        return F.interpolate(small, size=self.images.shape[2:], mode="bilinear", align_corners=False)

    def _right(self, images: Tensor) -> np.ndarray:
        """Probability of the right class, and whether it came first [B, 2]."""
        output = self.model(images.to(next(self.model.parameters())))
        logits = getattr(output, "logits", output).float()  # [B, K]
        right = logits.softmax(1).gather(1, self.labels[:, None])[:, 0]
        return torch.stack([right, (logits.argmax(1) == self.labels).to(right)], dim=1).cpu().numpy()


def _rows(curves: dict[tuple[int, str, str, str], np.ndarray], model: str) -> list[DeletionRow]:
    """Curves [images, steps + 1, 2] by layer, part, mode and order -> rows."""
    rows = []
    for (layer, part, mode, order), curve in curves.items():
        images, fractions = len(curve), np.linspace(0, 1, curve.shape[1])
        areas = np.trapezoid(curve[..., 0], fractions, axis=1)  # [images]
        gaps = areas - np.trapezoid(curves[layer, part, mode, RANDOM][..., 0], fractions, axis=1)
        facts: dict[str, Any] = {
            "images": images,
            "area": round(float(areas.mean()), 6),
            "over_random": round(float(gaps.mean()), 6),
            "error": round(float(gaps.std(ddof=1) / images**0.5), 6) if images > 1 else float("nan"),
        }
        for fraction, (probability, right) in zip(fractions, curve.mean(axis=0), strict=True):
            rows.append(
                DeletionRow(
                    model=model,
                    mode=mode,
                    order=order,
                    of=part,
                    layer=layer,
                    fraction=round(float(fraction), 6),
                    probability=round(float(probability), 6),
                    top1=round(100 * float(right), 3),
                    **facts,
                )
            )
    return rows


def validation_batches(
    loaded: LoadedModel,
    data: str | Path,
    *,
    images: int,
    size: int | None = None,
    batch: int = 32,
    say: Callable[[str], None] = print,
) -> list[tuple[Tensor, Tensor]]:
    """At most `images` images of the val split, evenly spaced, resized and normalized for the model.

    Unreadable ones are reported through `say` and skipped.
    """
    loaded.check_has_classes()
    source = open_trained_split(Data.of_model(loaded), "val", data)
    K = getattr(loaded.model, "num_classes", len(source.classes))
    if len(source.classes) != K or (loaded.classes is not None and loaded.classes != source.classes):
        raise ValueError(
            f"the {K} classes of {loaded.name} are not the {len(source.classes)} classes of {data}: use the data that "
            "the model was trained on"
        )
    transform = evaluation_transform(replace(loaded.preprocessing, size=size or loaded.preprocessing.size))
    chosen = np.linspace(0, len(source) - 1, min(images, len(source))).round().astype(int)
    parts = np.split(chosen, range(batch, len(chosen), batch))
    broken, batches = BrokenImages(source, say), []
    decoded = batch_loader(Samples(source, transform, seed=None), ((0, p, p) for p in parts), workers=0, pin=False)
    for pictures, labels, passed in decoded:
        broken.add(passed)
        if len(labels):
            batches.append((pictures, labels))
    if not batches:
        raise ValueError(f"none of the {len(chosen)} images chosen from {data} can be read")
    return batches


def _cells_to_pixels(cells: Tensor, images: Tensor, share: tuple[float, float]) -> Tensor:
    """Cells [B, rows, columns] -> the pixels they cover [B, 1, height, width]."""
    height, width = images.shape[2:]
    whole = (max(height, round(height / share[0])), max(width, round(width / share[1])))
    pixels = F.interpolate(cells[:, None].float(), size=whole, mode="nearest")[..., :height, :width]
    return (pixels > 0).to(images.device)
