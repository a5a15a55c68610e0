"""Rows of the speed benchmarks -> tables of the README, the docs and the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from sima_attn.report.tables import TextTable

if TYPE_CHECKING:
    from sima_attn.bench.call_overhead import CallOverheadRow
    from sima_attn.bench.cpu import CpuRow
    from sima_attn.bench.demo import DemoRow
    from sima_attn.bench.gpu import GpuRow
    from sima_attn.bench.model import ModelSpeedRow


PairedRow = TypeVar("PairedRow")


def cpu_table(rows: Sequence[CpuRow], threads: int, direction: str) -> TextTable:
    """Speed relative to softmax at each shape; with columns for torch.compile if it was measured."""
    found: dict[tuple[int, int, int, int], dict[tuple[str, bool], CpuRow]] = {}
    for row in rows:
        if row.threads == threads and row.direction == direction:
            found.setdefault((row.B, row.H, row.N, row.D), {})[row.method, row.compiled] = row
    if not found:
        raise ValueError(f"there are no rows for {threads} threads; there are: {sorted({row.threads for row in rows})}")
    forms = {"paper": ("paper", False), "SimA": ("sima", False)}
    compiled = {"paper, compiled": ("paper", True), "SimA, compiled": ("sima", True)}
    if not any(row.compiled for measured in found.values() for row in measured.values()):
        compiled = {}
    lines = []
    for shape, measured in found.items():
        if ("sima", False) not in measured:
            raise ValueError(f"there is no row of sima for B, H, N, D = {shape}: rows are missing; measure again")
        sima = measured["sima", False]
        lines.append(
            [
                ", ".join(map(str, shape)),
                sima.order,
                *(_times(measured.get(form)) for form in forms.values()),
                f"{sima.goal:g}x" if threads == 1 else "-",
                *(_times(measured.get(form)) for form in compiled.values()),
                f"{sima.gflops:.0f}",
                f"{sima.matmul_gflops:.0f}",
            ]
        )
    return TextTable(["B, H, N, D", "order", *forms, "goal", *compiled, "GFLOP/s", "matmul"], lines)


def demo_table(rows: Sequence[DemoRow], counted_tokens: int) -> TextTable:
    """Error, counts at `counted_tokens`, and speed relative to softmax, of each attention."""
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
    """Microseconds of each method in bfloat16 at the shapes where all were measured."""
    found: dict[tuple[int, int, int, int], dict[tuple[str, bool], GpuRow]] = {}
    for row in rows:
        if row.direction == direction and row.dtype == "bfloat16":
            found.setdefault(row.shape, {})[row.method, row.compiled] = row
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
    return TextTable(header, lines)


def dtype_table(rows: Sequence[GpuRow]) -> TextTable:
    """Microseconds in the other dtypes: the fastest softmax kernel, and SimA."""
    header = ["B, N, H, D", "dtype", "", "fastest softmax", "us", "SimA", "goal", "against softmax"]
    found: dict[tuple, list[GpuRow]] = {}
    for row in rows:
        if row.dtype != "bfloat16":
            found.setdefault((row.shape, row.dtype, row.direction), []).append(row)
    lines = []
    for (shape, dtype, direction), methods in found.items():
        sima = next(row for row in methods if row.method == "sima")
        softmax = min((row for row in methods if row.method != "sima"), key=lambda row: row.p50_us)
        names = [", ".join(map(str, shape)), dtype, direction, softmax.method]
        lines.append([*names, _us(softmax.p50_us), _us(sima.p50_us), _us(sima.goal_us), _times(sima)])
    return TextTable(header, lines)


def gpu_summary(rows: Sequence[GpuRow]) -> TextTable:
    """Both softmax kernels, the paper's code and SimA at all shapes, forward and in training."""
    from sima_attn.bench.cores import FORWARD, TRAINING

    times: dict[tuple[int, int, int, int], dict[tuple[str, str], GpuRow]] = {}
    for row in rows:
        if not row.compiled and row.dtype == "bfloat16":
            times.setdefault(row.shape, {})[row.method, row.direction] = row
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
    return TextTable(header, lines)


def model_table(rows: Sequence[ModelSpeedRow]) -> TextTable:
    """Images per second and memory of each model and its SimA twin, compiled, as CUDA graphs."""
    from sima_attn.bench.model import GRAPH

    header = ["model", "px, batch", "", "baseline", "SimA", "ratio", "target", "baseline, MiB", "SimA, MiB"]
    lines = [
        [
            twin.model,
            f"{sima.pixels}, {sima.batch}",
            sima.direction,
            f"{twin.images_per_second:,.0f}",
            f"{sima.images_per_second:,.0f}",
            f"{sima.speedup:.2f}x",
            f"{sima.target:.2f}x" if sima.target else "-",
            f"{twin.peak_mib:,.0f}",
            f"{sima.peak_mib:,.0f}",
        ]
        for twin, sima in _pairs(rows)
        if sima.mode == GRAPH
    ]
    return TextTable(header, lines)


def step_table(rows: Sequence[ModelSpeedRow]) -> TextTable:
    """Milliseconds per step called from Python, of a softmax model and its SimA twin."""
    from sima_attn.bench.model import GRAPH

    header = ["mode", "", "px, batch", "softmax, ms", "SimA, ms", "ratio", "target"]
    lines = [
        [
            sima.mode,
            sima.direction,
            f"{sima.pixels}, {sima.batch}",
            f"{twin.p50_ms:.2f}",
            f"{sima.p50_ms:.2f}",
            f"{sima.speedup:.2f}x",
            f"{sima.target:.2f}x" if sima.target else "-",
        ]
        for twin, sima in _pairs(rows)
        if sima.mode != GRAPH and twin.attention == "softmax"
    ]
    return TextTable(header, lines)


def call_overhead_table(rows: Sequence[CallOverheadRow]) -> TextTable:
    """Microseconds of CPU time per call, softmax attention and SimA, with and without the views of a module."""
    header = ["B, N, H, D", "", "form", "softmax, us", "SimA, us", "ratio"]
    lines = [
        [
            f"{sima.B}, {sima.N}, {sima.H}, {sima.D}",
            sima.direction,
            sima.form,
            f"{softmax.p50_us:.1f}",
            f"{sima.p50_us:.1f}",
            f"{sima.speedup:.2f}x",
        ]
        for softmax, sima in _pairs(rows)
    ]
    return TextTable(header, lines)


def targets_table(models: Sequence[ModelSpeedRow], calls: Sequence[CallOverheadRow] = ()) -> TextTable:
    """All rows with a target: both times, the ratio softmax / SimA, the target, and whether it is met."""
    header = ["what", "softmax", "SimA", "ratio", "target", "result"]
    lines = [
        [
            f"call overhead, {sima.direction}, {sima.B} x {sima.N}",
            f"{softmax.p50_us:.1f} us",
            f"{sima.p50_us:.1f} us",
            *_verdict(sima.speedup, sima.target),
        ]
        for softmax, sima in _pairs(calls)
        if sima.target
    ]
    lines += [
        [
            f"{sima.mode}, {sima.direction}, {sima.pixels} px, batch {sima.batch}",
            f"{softmax.p50_ms:.2f} ms",
            f"{sima.p50_ms:.2f} ms",
            *_verdict(sima.speedup, sima.target),
        ]
        for softmax, sima in _pairs(models)
        if sima.target
    ]
    return TextTable(header, lines)


def _verdict(ratio: float, target: float) -> list[str]:
    return [f"{ratio:.3f}", f">= {target:.2f}", "met" if ratio >= target else "missed"]


def _pairs(rows: Sequence[PairedRow]) -> Iterator[tuple[PairedRow, PairedRow]]:
    """Each twin with its SimA row: rows come in pairs."""
    return zip(rows[::2], rows[1::2], strict=True)


def _us(microseconds: float) -> str:
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:,.0f}"


def _times(row: CpuRow | DemoRow | GpuRow | None) -> str:
    return "-" if row is None else f"{row.speedup:.2f}x" if row.speedup < 10 else f"{row.speedup:.1f}x"
