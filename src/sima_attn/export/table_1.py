"""Table 1 of the paper with our exact counts in it."""

from collections.abc import Sequence

from sima_attn.bench.tables import TextTable
from sima_attn.export.audit_report import AuditReport
from sima_attn.models.paper_table import PaperRow


def table_1(rows: Sequence[PaperRow], reports: Sequence[AuditReport]) -> TextTable:
    """Parameters, MACs and exp-like calls of each model, in brackets what the paper prints, and its accuracy."""
    header = ["model", "params", "GMACs", "exp(), attention", "exp(), rest", "top-1"]
    lines = []
    for row, report in zip(rows, reports, strict=True):
        macs = "?" if report.macs is None else f"{report.macs / 1e9:.3f}"
        lines.append(
            [
                row.ours,
                f"{report.params:,} ({row.params})",
                f"{macs} ({row.flops})",
                f"{report.attention_exps:,} ({row.exps})",
                f"{report.other_exps:,}",
                f"{row.top1}",
            ]
        )
    return TextTable(header, lines, bold=set())
