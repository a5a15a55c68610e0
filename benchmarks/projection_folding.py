"""What folding the projection into the attention gains in compiled inference: O P = Q (W P), and O is never written.

    python benchmarks/projection_folding.py --out projection_folding.csv     # needs a CUDA device, a minute

One SimA module of DeiT-S, from tokens to tokens, compiled with and without folding, as CUDA graphs that take turns.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from sima_attn.nn import SimAttention
from sima_attn.ops import api
from sima_attn.report.cuda_timing import check_cuda, time_graphs
from sima_attn.report.rows import provenance_columns, write_rows
from sima_attn.report.tables import TextTable

WIDTH, HEADS = 384, 6  # DeiT-S
SHAPES = ((64, 1025), (16, 4097), (8, 9217))  # batch and tokens at 512, 1024 and 1536 px


@dataclass(frozen=True)
class FoldingRow:
    """Time of the module with and without folding; `speedup` is the second over the first."""

    B: int
    N: int
    C: int
    H: int
    folded_us: float
    separate_us: float
    speedup: float
    error: float  # relative difference of the two outputs
    precision: str
    device: str
    torch: str
    date: str


def bench_folding(seconds: float = 1.0) -> Iterator[FoldingRow]:
    """One row for each shape."""
    check_cuda()
    module = SimAttention(WIDTH, HEADS).cuda().to(torch.bfloat16).eval()
    compiled = torch.compile(module, dynamic=False)
    for B, N in SHAPES:
        tokens = torch.randn(B, N, WIDTH, device="cuda", dtype=torch.bfloat16)
        folded = partial(compiled, tokens)
        separate = partial(_without_folding, compiled, tokens)
        with torch.inference_mode():
            truth = separate().float()
            error = ((folded().float() - truth).norm() / truth.norm()).item()
            times = time_graphs({"folded": folded, "separate": separate}, seconds=seconds)
        yield FoldingRow(
            B=B,
            N=N,
            C=WIDTH,
            H=HEADS,
            folded_us=round(times["folded"].p50 * 1e6, 1),
            separate_us=round(times["separate"].p50 * 1e6, 1),
            speedup=round(times["separate"].p50 / times["folded"].p50, 3),
            error=round(error, 5),
            precision="bfloat16",
            **provenance_columns("cuda"),
        )


def _without_folding(module: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    # torch.compile compiles the module again for another value of the limit, and keeps both.
    with mock.patch.object(api, "PROJECTED_NUMBERS", 2**62):
        return module(tokens)


def main() -> None:
    """Measure, write rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path("runs/bench/projection_folding.csv")
    parser.add_argument("--out", type=Path, default=out, help="CSV file for the rows")
    parser.add_argument("--seconds", type=float, default=1.0, help="time per form and shape")
    arguments = parser.parse_args()
    rows = list(bench_folding(arguments.seconds))
    write_rows(arguments.out, rows)
    lines = [[f"{r.B}, {r.N}", f"{r.separate_us:.1f}", f"{r.folded_us:.1f}", f"{r.speedup:.2f}x"] for r in rows]
    print(TextTable(["B, N", "separate, us", "folded, us", "gain"], lines).markdown())
    print(f"Rows: {arguments.out}")


if __name__ == "__main__":
    main()
