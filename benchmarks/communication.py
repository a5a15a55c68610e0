"""What processes that share an image send, and how far DeiT-S would scale: computed, not measured.

    python benchmarks/communication.py --out communication.csv

Bytes are those of `sima_attn.ops.communication_cost`. The time of a training step is computed from the measured speed
of one H200 (`model.csv`), and from assumptions about the network, which are constants below.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from sima_attn.bench.model import ModelSpeedRow
from sima_attn.ops.communication_cost import ring_traffic, sima_traffic, ulysses_traffic
from sima_attn.ops.cost import AttentionShape
from sima_attn.report.rows import read_rows, write_rows
from sima_attn.report.tables import TextTable

MODEL = "sima_deit_small_patch16_224"
LAYERS, HEADS, HEAD_DIM, PATCH, PARAMETERS = 12, 6, 64, 16, 22_050_664
BANDWIDTH = 50e9  # bytes per second that a GPU sends: 400 Gb/s
LATENCY = 5e-6  # seconds of one message between two GPUs
# Image sides in pixels, and the numbers of GPUs; Ulysses needs a divisor of the 6 heads.
CASES = {1024: (2,), 4096: (6,), 16384: (8, 64, 256, 1024), 65536: (8, 64, 256, 1024)}


@dataclass(frozen=True)
class CommunicationRow:
    """One image on some processes. Bytes that one process sends per layer and training step; 0: it cannot be split so.

    Milliseconds of a training step with SimA: the computation, the sums of the attentions, and the average of the
    gradients, none of which overlap.
    """

    pixels: int
    tokens: int
    processes: int
    sima_bytes: float
    ring_bytes: float
    ulysses_bytes: float
    compute_ms: float
    sums_ms: float
    gradients_ms: float

    @property
    def efficiency(self) -> float:
        """The share of the time that is computation."""
        return self.compute_ms / (self.compute_ms + self.sums_ms + self.gradients_ms)


def communication_rows(tokens_per_second: float) -> list[CommunicationRow]:
    """One row per case."""
    return [_row(px, processes, tokens_per_second) for px, counts in CASES.items() for processes in counts]


def _row(pixels: int, processes: int, tokens_per_second: float) -> CommunicationRow:
    tokens = (pixels // PATCH) ** 2
    shape = AttentionShape(B=1, H=HEADS, N=tokens, D=HEAD_DIM)
    sima = sima_traffic(shape, processes)
    gradients = 2 * 4 * PARAMETERS * (processes - 1) / processes
    return CommunicationRow(
        pixels=pixels,
        tokens=tokens,
        processes=processes,
        sima_bytes=round(sima.total),
        ring_bytes=round(ring_traffic(shape, processes).total),
        ulysses_bytes=0 if HEADS % processes else round(ulysses_traffic(shape, processes).total),
        compute_ms=round(1e3 * tokens / processes / tokens_per_second, 3),
        sums_ms=round(1e3 * LAYERS * (sima.total / BANDWIDTH + 2 * _latency(processes)), 3),
        gradients_ms=round(1e3 * (gradients / BANDWIDTH + _latency(processes)), 3),
    )


def _latency(processes: int) -> float:
    """Seconds until the first byte of an all-reduce over a tree has gone up and down."""
    return 2 * math.ceil(math.log2(processes)) * LATENCY


def measured_speed(path: Path) -> float:
    """Tokens per second of one H200 in training, from the rows of `sima bench model`."""
    wanted = (MODEL, "graph", "training", 1024)
    rows = read_rows(path, ModelSpeedRow)
    row = next(row for row in rows if (row.model, row.mode, row.direction, row.pixels) == wanted)
    return row.images_per_second * (row.pixels // PATCH) ** 2


def bytes_table(rows: list[CommunicationRow]) -> TextTable:
    """Bytes per layer and process of a training step."""
    header = ["image, px", "tokens", "processes", "SimA", "ring attention", "Ulysses"]
    lines = [
        [
            str(row.pixels),
            f"{row.tokens:,}",
            str(row.processes),
            *(_bytes(sent) if sent else "-" for sent in (row.sima_bytes, row.ring_bytes, row.ulysses_bytes)),
        ]
        for row in rows
    ]
    return TextTable(header, lines)


def scaling_table(rows: list[CommunicationRow]) -> TextTable:
    """Milliseconds of a training step with SimA, and the share of computation in it."""
    header = ["image, px", "GPUs", "tokens per GPU", "compute, ms", "sums, ms", "gradients, ms", "efficiency"]
    lines = [
        [
            str(row.pixels),
            str(row.processes),
            f"{row.tokens // row.processes:,}",
            *(f"{time:.1f}" for time in (row.compute_ms, row.sums_ms, row.gradients_ms)),
            f"{row.efficiency:.0%}",
        ]
        for row in rows
        if row.processes >= 8
    ]
    return TextTable(header, lines)


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"


def main(arguments: list[str] | None = None) -> None:
    """Compute, write rows, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results = Path(__file__).parent / "results"
    parser.add_argument("--out", type=Path, default=Path("runs/bench/communication.csv"), help="CSV file for the rows")
    parser.add_argument("--speed", type=Path, default=results / "model.csv", help="rows of `sima bench model`")
    given = parser.parse_args(arguments)
    rows = communication_rows(measured_speed(given.speed))
    write_rows(given.out, rows)
    print(f"{bytes_table(rows).markdown()}\n\n{scaling_table(rows).markdown()}\n\nRows: {given.out}")


if __name__ == "__main__":
    main()
