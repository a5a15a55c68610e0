"""Table 1 of the paper with our exact counts in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sima_attn.auditing.model import audit_named
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.paper_models import TABLE_1, PaperRow


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
    return TextTable(header, lines, bold=set())
