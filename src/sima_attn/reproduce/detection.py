"""Table 4 of the paper: Mask R-CNN on COCO minival after 36 epochs, and our rows beside it."""

from __future__ import annotations

import math
from typing import NamedTuple

from sima_attn.detect.scores import CocoScores
from sima_attn.report.tables import TextTable


class PaperRow(NamedTuple):
    """A line of Table 4: millions of parameters, then AP, AP50 and AP75 of boxes and of masks."""

    model: str
    params: float
    box: tuple[float, float, float]
    mask: tuple[float, float, float]


TABLE_4 = (
    PaperRow("ResNet50", 44.2, (41.0, 61.7, 44.9), (37.1, 58.4, 40.1)),
    PaperRow("PVT-Small", 44.1, (43.0, 65.3, 46.9), (39.9, 62.5, 42.8)),
    PaperRow("ViL-Small", 45.0, (43.4, 64.9, 47.0), (39.6, 62.1, 42.4)),
    PaperRow("Swin-T", 47.8, (46.0, 68.1, 50.3), (41.6, 65.1, 44.9)),
    PaperRow("XCiT-S12/16", 44.3, (45.0, 66.7, 48.9), (40.5, 63.6, 43.2)),
    PaperRow("XCiT-S12/16 -> SimA", 44.3, (44.8, 66.5, 48.8), (40.3, 63.2, 43.3)),
)


def table_4(name: str, params: int, scores: CocoScores) -> TextTable:
    """The paper's rows, marked so, and one of ours; without masks, its mask AP is "-"."""
    header = ["model", "params", "box AP", "AP50", "AP75", "mask AP", "AP50", "AP75"]
    lines = [
        [f"{row.model} (paper)", f"{row.params:.1f}M", *(f"{x:.1f}" for x in (*row.box, *row.mask))] for row in TABLE_4
    ]
    ours = [f"{name} (here, {scores.images} images)", f"{params / 1e6:.1f}M"]
    mask = (math.nan,) * 3 if scores.mask is None else scores.mask[:3]
    lines.append(ours + [shown(x) for x in (*scores.box[:3], *mask)])
    return TextTable(header, lines, bold={len(lines) - 1})


def size_table(scores: CocoScores) -> TextTable:
    """AP by the size of the objects: under 32^2, up to 96^2, and larger, in pixels."""
    lines = [
        [kind, *(shown(x) for x in (precision.small, precision.medium, precision.large))]
        for kind, precision in scores.by_kind().items()
    ]
    return TextTable(["AP", "small", "medium", "large"], lines)


def shown(number: float) -> str:
    """One decimal; "-" where there is nothing to measure."""
    return "-" if math.isnan(number) else f"{number:.1f}"
