"""Rows -> the tables of the README, the docs and the terminal: a header and cells of text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sima_attn.bench.cpu import CpuRow
    from sima_attn.bench.demo import DemoRow
    from sima_attn.bench.gpu import GpuRow
    from sima_attn.bench.model import ModelSpeedRow


class TextTable(NamedTuple):
    """A table of text; the lines in `bold` are SimA's."""

    header: list[str]
    lines: list[list[str]]
    bold: set[int]

    def markdown(self) -> str:
        """The table as Markdown."""
        shown = [[f"**{cell}**" for cell in line] if i in self.bold else line for i, line in enumerate(self.lines)]
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.header, ["---"] * len(self.header), *shown])


def cpu_table(rows: Sequence[CpuRow], threads: int) -> TextTable:
    """Speed against softmax at every shape."""
    found: dict[tuple[int, int, int, int], dict[tuple[str, bool], CpuRow]] = {}
    for row in rows:
        if row.threads == threads:
            found.setdefault((row.B, row.H, row.N, row.D), {})[row.method, row.compiled] = row
    if not found:
        raise ValueError(f"there are no rows for {threads} threads; there are: {sorted({row.threads for row in rows})}")
    header = ["B, H, N, D", "order", "paper", "SimA", "goal", "paper, compiled", "SimA, compiled", "GFLOP/s", "matmul"]
    lines = []
    for shape, forms in found.items():
        if ("sima", False) not in forms:
            raise ValueError(f"there is no row of sima for B, H, N, D = {shape}: the rows were cut; measure again")
        sima = forms["sima", False]
        lines.append(
            [
                ", ".join(map(str, shape)),
                sima.order,
                _times(forms.get(("paper", False))),
                _times(sima),
                f"{sima.goal:g}x" if threads == 1 else "-",
                _times(forms.get(("paper", True))),
                _times(forms.get(("sima", True))),
                f"{sima.gflops:.0f}",
                f"{sima.matmul_gflops:.0f}",
            ]
        )
    return TextTable(header, lines, bold=set())


def demo_table(rows: Sequence[DemoRow], counted_tokens: int) -> TextTable:
    """Error, counts and speed against softmax of every attention; the counts are those at `counted_tokens`."""
    tokens = sorted({row.N for row in rows})
    header = ["attention", "error", "exp()", "in paper", "MMACs", *(f"N={n}" for n in tokens)]
    lines: list[list[str]] = []
    bold = set()
    for name in dict.fromkeys(row.attention for row in rows):
        mine = {row.N: row for row in rows if row.attention == name}
        counted = mine[counted_tokens]
        facts = [f"{counted.error:.0e}", f"{counted.exps:,}", counted.exps_in_paper, f"{counted.macs / 1e6:.1f}"]
        if name == "sima":
            bold.add(len(lines))
        lines.append([name, *facts, *(_times(mine[n]) for n in tokens)])
    return TextTable(header, lines, bold)


def gpu_table(rows: Sequence[GpuRow], direction: str) -> TextTable:
    """Microseconds of every method at the shapes where all were measured."""
    found: dict[tuple[int, int, int, int], dict[tuple[str, bool], GpuRow]] = {}
    for row in rows:
        if row.direction == direction:
            found.setdefault((row.B, row.N, row.H, row.D), {})[row.method, row.compiled] = row
    methods = {
        "flash": ("flash", False),
        "cuDNN": ("cudnn", False),
        "paper": ("paper", False),
        "paper, compiled": ("paper", True),
        "XCA": ("xca", False),
        "ELU": ("elu", False),
    }
    header = ["B, N, H, D", "limit", *methods, "SimA", "of the limit", "goal", "against softmax"]
    lines = []
    for shape, forms in found.items():
        if ("paper", False) not in forms:
            continue
        sima = forms["sima", False]
        lines.append(
            [
                ", ".join(map(str, shape)),
                _us(sima.limit_us),
                *(_us(forms[form].p50_us) for form in methods.values()),
                _us(sima.p50_us),
                f"{sima.share_of_limit:.0%}",
                f"{sima.goal_us:g}" if sima.goal_us else "-",
                _times(sima),
            ]
        )
    return TextTable(header, lines, bold=set())


def called_table(rows: Sequence[GpuRow]) -> TextTable:
    """Microseconds of a call from Python: softmax attention as torch chooses it, and SimA."""
    calls = {((row.B, row.N, row.H, row.D), row.direction, row.method): row.called_us for row in rows}
    lines = [
        [", ".join(map(str, shape)), direction, _us(us), _us(calls[shape, direction, "sima"])]
        for (shape, direction, method), us in calls.items()
        if method == "sdpa"
    ]
    return TextTable(["B, N, H, D", "", "called: softmax", "SimA"], lines, bold=set())


def gpu_summary(rows: Sequence[GpuRow]) -> TextTable:
    """The measured shapes at a glance: softmax's two kernels, the paper's code and SimA, forward and in training."""
    from sima_attn.bench.gpu import FORWARD, TRAINING

    times: dict[tuple[int, int, int, int], dict[tuple[str, str], GpuRow]] = {}
    for row in rows:
        if not row.compiled:
            times.setdefault((row.B, row.N, row.H, row.D), {})[row.method, row.direction] = row
    header = ["B, N, H, D", "flash", "cuDNN", "paper's code", "SimA", "speed"]
    header += ["training: flash", "cuDNN", "SimA", "speed"]
    lines = []
    for shape, found in times.items():
        if ("paper", FORWARD) not in found:
            continue
        methods = [("flash", FORWARD), ("cudnn", FORWARD), ("paper", FORWARD), ("sima", FORWARD)]
        trained = [("flash", TRAINING), ("cudnn", TRAINING), ("sima", TRAINING)]
        lines.append(
            [
                ", ".join(map(str, shape)),
                *(_us(found[key].p50_us) for key in methods),
                _times(found["sima", FORWARD]),
                *(_us(found[key].p50_us) if key in found else "-" for key in trained),
                _times(found.get(("sima", TRAINING))),
            ]
        )
    return TextTable(header, lines, bold=set())


def model_table(rows: Sequence[ModelSpeedRow]) -> TextTable:
    """Images a second of each model and its SimA twin, as CUDA graphs; `called` is the speed without them."""
    header = ["model", "px, batch", "", "twin", "SimA", "speed", "goal", "called", "twin, MiB", "SimA, MiB"]
    lines = []
    for twin, sima in zip(rows[::2], rows[1::2], strict=True):  # they are written in pairs
        lines.append(
            [
                twin.model,
                f"{sima.pixels}, {sima.batch}",
                sima.direction,
                f"{twin.images_per_second:,.0f}",
                f"{sima.images_per_second:,.0f}",
                f"{sima.speedup:.2f}x",
                f"{sima.goal:.2f}x" if sima.goal else "-",
                f"{sima.called_speedup:.2f}x",
                f"{twin.peak_mib:,.0f}",
                f"{sima.peak_mib:,.0f}",
            ]
        )
    return TextTable(header, lines, bold=set())


def _us(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:,.0f}"


def _times(row: CpuRow | DemoRow | GpuRow | None) -> str:
    return "-" if row is None else f"{row.speedup:.2f}x" if row.speedup < 10 else f"{row.speedup:.1f}x"
