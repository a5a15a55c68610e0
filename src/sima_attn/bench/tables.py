"""Rows -> the tables in the README and the terminal."""

from collections.abc import Sequence

from sima_attn.bench.cpu import CpuRow

Cells = list[list[str]]


def cpu_table(rows: Sequence[CpuRow], threads: int) -> tuple[list[str], Cells]:
    """Speed against softmax, a line a shape: header and cells."""
    found: dict[tuple[int, int, int, int], dict[str, CpuRow]] = {}
    for row in rows:
        if row.threads == threads:
            name = f"{row.method}, compiled" if row.compiled else row.method
            found.setdefault((row.B, row.H, row.N, row.D), {})[name] = row
    if not found:
        raise ValueError(f"there are no rows for {threads} threads; there are: {sorted({row.threads for row in rows})}")
    header = [
        "B, H, N, D",
        "order",
        "softmax",
        "paper",
        "SimA",
        "paper, compiled",
        "SimA, compiled",
        "SimA GFLOP/s",
        "matmul GFLOP/s",
    ]
    if threads == 1:
        header.insert(5, "goal")
    cells = []
    for shape, by_name in found.items():
        sima = by_name["sima"]
        line = [", ".join(map(str, shape)), sima.order, "1.0x", _times(by_name.get("paper")), f"**{_times(sima)}**"]
        line += [f"{sima.goal:g}x"] if threads == 1 else []
        line += [_times(by_name.get("paper, compiled")), _times(by_name.get("sima, compiled"))]
        line += [f"{sima.gflops:.0f}", f"{sima.matmul_gflops:.0f}"]
        cells.append(line)
    return header, cells


def _times(row: CpuRow | None) -> str:
    return "-" if row is None else f"{row.speedup:.2f}x" if row.speedup < 10 else f"{row.speedup:.1f}x"


def markdown(header: Sequence[str], cells: Cells) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
