"""Table 1 of the paper with our exact counts in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sima_attn.auditing.model import audit_named
from sima_attn.report.tables import TextTable


class PaperRow(NamedTuple):
    """A line of Table 1 (ImageNet-1k, 224 px): millions of parameters, billions of MACs ("FLOPs"), exp(), top-1."""

    model: str
    ours: str
    params: str
    flops: str
    exps: str
    top1: float


TABLE_1 = (
    PaperRow("XCiT-T24/16 -> SimA", "sima_xcit_tiny_24_p16_224", "12M", "2.3B", "0", 79.8),
    PaperRow("XCiT-T12/8 -> SimA", "sima_xcit_tiny_12_p8_224", "7M", "4.8B", "0", 79.4),
    PaperRow("XCiT-S12/16 -> SimA", "sima_xcit_small_12_p16_224", "26M", "4.8B", "0", 82.1),
    PaperRow("DeiT-S -> SimA", "sima_deit_small_patch16_224", "22M", "4.6B", "0", 79.8),
    PaperRow("CvT-13 -> SimA", "sima_cvt_13", "20M", "4.5B", "0", 81.4),
    PaperRow("DeiT-S -> SimA, 1 head", "sima_deit_small_patch16_224_1head", "22M", "4.6B", "0", 79.4),
    PaperRow("DeiT-S -> SimA, ReLU", "sima_deit_small_patch16_224_relu", "22M", "4.6B", "0", 79.6),
)


@dataclass(frozen=True)
class ModelRow:
    """A model of Table 1, counted at its own input size; columns named paper_* are as printed there."""

    model: str
    params: int
    macs: int
    attention_exps: int
    other_exps: int
    paper_params: str
    paper_flops: str
    paper_exps: str
    paper_top1: float


def count_models(
    models: Sequence[PaperRow] = TABLE_1,
    *,
    size: int | None = None,
    on_step: Callable[[str], object] = lambda name: None,
) -> list[ModelRow]:
    """Audit every model of the table; calls `on_step` before each."""
    rows = []
    for printed in models:
        on_step(printed.ours)
        report = audit_named(printed.ours, size)
        assert report.macs is not None  # an ONNX file may leave them open, a module does not
        assert report.attention_exps is not None
        assert report.other_exps is not None
        counts = (report.params, report.macs, report.attention_exps, report.other_exps)
        rows.append(ModelRow(printed.ours, *counts, printed.params, printed.flops, printed.exps, printed.top1))
    return rows


def table_1(rows: Sequence[ModelRow]) -> TextTable:
    """Parameters, MACs and exp-like calls of each model, in brackets what the paper prints, and its accuracy."""
    header = ["model", "params", "GMACs", "exp(), attention", "exp(), rest", "top-1 (paper)"]
    lines = [
        [
            row.model,
            f"{row.params:,} ({row.paper_params})",
            f"{row.macs / 1e9:.3f} ({row.paper_flops})",
            f"{row.attention_exps:,} ({row.paper_exps})",
            f"{row.other_exps:,}",
            f"{row.paper_top1}",
        ]
        for row in rows
    ]
    return TextTable(header, lines)
