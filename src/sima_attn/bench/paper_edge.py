"""The paper's timing protocols: Table 3 and Figure 1 on this processor, Figure A1 on a GPU.

Both fix the order of the product Q K^T V to that of the baseline, to show the time of exp() alone. SimA as this package
computes it, with folded norms and free order, is measured too.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sima_attn.bench.cores import check_error, torch_threads, unpack
from sima_attn.nn import create_attention
from sima_attn.ops import choose_order, sima_attention
from sima_attn.ops.reference import algorithm_1
from sima_attn.report.cuda_timing import check_cuda
from sima_attn.report.rows import provenance_columns
from sima_attn.report.tables import TextTable
from sima_attn.report.timing import percentiles, time_interleaved

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
HEADS = 8
LARGEST_ERROR = 1e-4
PAPER_DEVICES = ("Nano", "M1", "RPi 4")  # NVIDIA Jetson Nano, Apple M1, Raspberry Pi 4
OURS = "SimA, ours"  # norms folded, order free


# Milliseconds in the halves of Table 3, on PAPER_DEVICES.
LEFT = {"vanilla": (177.4, 35.8, 180.6), "ELU": (144.5, 26.2, 160.0), "SimA": (63.6, 20.4, 51.9)}
RIGHT = {
    "SOFT": (145.9, 36.0, 177.4),
    "XCA": (144.4, 36.1, 178.7),
    "ELU": (105.2, 26.4, 160.1),
    "SimA": (58.0, 20.5, 53.2),
}


@dataclass(frozen=True)
class EdgeCase:
    """One half of Table 3."""

    N: int
    D: int
    order: str  # fixed by the paper
    goal: float  # target of the speedup of SimA with free order over vanilla, on this processor
    paper_ms: dict[str, tuple[float, float, float]]


CASES = (EdgeCase(256, 64, "qk", 2.5, LEFT), EdgeCase(64, 256, "kv", 1.05, RIGHT))


@dataclass(frozen=True)
class PaperEdgeRow:
    """One attention at one shape; the paper's times are 0 if it has none."""

    attention: str
    order: str
    H: int
    N: int
    D: int
    threads: int
    speedup: float  # over vanilla
    goal: float
    mean_ms: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    runs: int
    paper_nano_ms: float
    paper_m1_ms: float
    paper_rpi4_ms: float
    error: float
    device: str
    torch: str
    date: str


def cores(N: int, D: int, order: str, H: int = HEADS, **factory) -> dict[str, tuple[str, Core]]:
    """Name -> order and core. Vanilla, SOFT and XCA have only one order.

    SOFT is its kernel exp(-|q_i - q_j|^2 / 2) without the low-rank step: the part with the exp() calls.
    """

    def core_of(name: str, **options) -> Core:
        return create_attention(name, H * D, H, **options, **factory).eval().core

    return {
        "vanilla": ("qk", core_of("softmax_explicit")),
        "SOFT": ("qk", core_of("soft_full")),
        "XCA": ("kv", core_of("xca")),
        "ELU": (order, core_of("elu", order=order)),
        "SimA": (order, partial(algorithm_1, order=order)),
        OURS: (choose_order(N, N, D, D), sima_attention),
    }


@torch.no_grad()
def bench_paper_edge(*, runs: int = 1000, threads: int = 1) -> Generator[list[PaperEdgeRow]]:
    """The rows of each half of Table 3: each run calls all attentions in turn."""
    with torch_threads(threads):
        for case in CASES:
            yield _bench_edge_case(case, runs, threads)


def _bench_edge_case(case: EdgeCase, runs: int, threads: int) -> list[PaperEdgeRow]:
    q, k, v = _packed(1, case.N, HEADS, case.D, "cpu")
    methods = cores(case.N, case.D, case.order)
    errors = {name: _check(name, methods[name][1], q, k, v) for name in ("SimA", OURS)}
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(runs):
        for name, (_, core) in methods.items():
            core(q, k, v)  # untimed: brings q, k and v into the cache, as a projection would
            start = time.perf_counter()
            core(q, k, v)
            times[name].append(time.perf_counter() - start)
    rows = []
    baseline = percentiles(times["vanilla"]).p50
    for name, (order, _) in methods.items():
        timing = percentiles(times[name])
        percentile_columns = timing.columns("ms", 4)
        percentile_columns["runs"] = percentile_columns.pop("samples")
        paper = case.paper_ms.get(name, (0.0, 0.0, 0.0))
        rows.append(
            PaperEdgeRow(
                attention=name,
                order=order,
                H=HEADS,
                N=case.N,
                D=case.D,
                threads=threads,
                speedup=round(baseline / timing.p50, 3),
                goal=case.goal if name == OURS else 0.0,
                mean_ms=round(sum(times[name]) / runs * 1e3, 4),
                **percentile_columns,
                paper_nano_ms=paper[0],
                paper_m1_ms=paper[1],
                paper_rpi4_ms=paper[2],
                error=errors.get(name, 0.0),
                **provenance_columns("cpu"),
            )
        )
    return rows


def paper_edge_table(rows: Sequence[PaperEdgeRow]) -> TextTable:
    """Milliseconds of one case on this processor and, marked "paper", on its three devices."""
    header = ["attention", "order", "mean ms", "speed", "goal", *(f"paper: {name}" for name in PAPER_DEVICES)]
    lines = []
    for row in rows:
        ours = [f"{row.mean_ms:.3f}", f"{row.speedup:.2f}x", f"{row.goal:g}x" if row.goal else "-"]
        paper = [f"{ms:g}" if ms else "-" for ms in (row.paper_nano_ms, row.paper_m1_ms, row.paper_rpi4_ms)]
        lines.append([row.attention, row.order, *ours, *paper])
    return TextTable(header, lines, {i for i, row in enumerate(rows) if row.attention.startswith("SimA")})


@dataclass(frozen=True)
class Sweep:
    """One half of Figure A1: the quantity that grows, the baseline, and its order."""

    name: str
    baseline: str
    order: str
    shapes: tuple[tuple[int, int, int, int], ...]  # what grows (pixels or width), N, H, D
    paper_slower: float  # how much slower the baseline is at the last shape in the paper


BATCH = 8
# DeiT-S's 384 channels in 6 heads, patches of 16.
RESOLUTIONS = tuple((px, (px // 16) ** 2, 6, 64) for px in (224, 384, 512, 768, 1024, 1280, 1536))
# 224 px. The paper does not give the heads; one head makes the width of Q and K the one that grows.
WIDTHS = tuple((C, 196, 1, C) for C in (384, 768, 1536, 3072, 4096, 8192))
SWEEPS = (Sweep("resolution", "vanilla", "qk", RESOLUTIONS, 0.58), Sweep("width", "XCA", "kv", WIDTHS, 0.22))


@dataclass(frozen=True)
class PaperGpuRow:
    """One attention at one point of Figure A1.

    `baseline_slower` is the additional time of the baseline in the same run: 0.58 means 58 % slower. `paper_slower` is
    the paper's number, 0 if it has none.
    """

    sweep: str
    attention: str
    order: str
    grows: int
    B: int
    N: int
    H: int
    D: int
    dtype: str
    baseline: str
    baseline_slower: float
    paper_slower: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int
    device: str
    torch: str
    date: str


@torch.no_grad()
def bench_paper_gpu(
    *, sweeps: Sequence[Sweep] = SWEEPS, seconds: float = 1.0, device: str = "cuda", batch: int = BATCH
) -> Generator[list[PaperGpuRow]]:
    """The rows of each point of Figure A1, in float32 and eager mode, as in the paper's code."""
    if device == "cuda":
        check_cuda()
    for sweep in sweeps:
        for shape in sweep.shapes:
            yield _bench_point(sweep, shape, seconds, device, batch)


def _bench_point(
    sweep: Sweep, shape: tuple[int, int, int, int], seconds: float, device: str, batch: int
) -> list[PaperGpuRow]:
    grows, N, H, D = shape
    q, k, v = _packed(batch, N, H, D, device)
    everything = cores(N, D, sweep.order, H, device=device)
    methods = {name: everything[name] for name in (sweep.baseline, "SimA", OURS)}
    for name in ("SimA", OURS):
        _check(name, methods[name][1], q[:1], k[:1], v[:1])
    is_cuda = device == "cuda"

    def call(core: Core) -> None:
        core(q, k, v)
        if is_cuda:
            torch.cuda.synchronize()

    timings = time_interleaved({name: partial(call, core) for name, (_, core) in methods.items()}, seconds=seconds)
    baseline = timings[sweep.baseline].p50
    is_last = shape == sweep.shapes[-1]
    return [
        PaperGpuRow(
            sweep=sweep.name,
            attention=name,
            order=order,
            grows=grows,
            B=batch,
            N=N,
            H=H,
            D=D,
            dtype="float32",
            baseline=sweep.baseline,
            baseline_slower=round(baseline / timings[name].p50 - 1, 3),
            paper_slower=sweep.paper_slower if is_last and name == "SimA" else 0.0,
            **timings[name].columns("ms", 4),
            **provenance_columns(device),
        )
        for name, (order, _) in methods.items()
    ]


def paper_gpu_table(rows: Sequence[PaperGpuRow]) -> TextTable:
    """How much slower the baseline is than SimA, one line per point of both sweeps; "paper": its number."""
    header = ["sweep", "at", "baseline", "ms", "SimA as in the paper, ms", "baseline slower by", "paper"]
    header += ["SimA, ours, ms", "baseline slower by"]
    lines = []
    for baseline, sima, ours in zip(rows[::3], rows[1::3], rows[2::3], strict=True):  # rows come in threes
        point = [sima.sweep, str(sima.grows), baseline.attention, f"{baseline.p50_ms:.3f}"]
        paper = f"{sima.paper_slower:+.0%}" if sima.paper_slower else "-"
        as_paper = [f"{sima.p50_ms:.3f}", f"{sima.baseline_slower:+.0%}", paper]
        lines.append([*point, *as_paper, f"{ours.p50_ms:.3f}", f"{ours.baseline_slower:+,.0%}"])
    return TextTable(header, lines)


def _packed(B: int, N: int, H: int, D: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v [B, H, N, D], views of one packed tensor, as in a module."""
    generator = torch.Generator(device).manual_seed(0)
    return unpack(torch.randn(B, N, 3, H, D, generator=generator, device=device))


def _check(name: str, core: Core, q: Tensor, k: Tensor, v: Tensor) -> float:
    truth = sima_attention(q.double(), k.double(), v.double(), order="kv", backend="eager")  # no N x N matrix
    return check_error(name, core(q, k, v), truth, LARGEST_ERROR)
