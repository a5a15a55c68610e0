"""Detection at high resolution: time and memory of backbone and whole detector, SimA against its twins.

One image at a time. On a CUDA device the backbone is timed as a CUDA graph, which is what the chip does: called from
Python, a small image is the time of the launches. The whole detector cannot be a graph, since what it does depends on
what it finds; it is called, and waited for in every call.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sima_attn.detect.mask_rcnn import SimaMaskRCNN, build_mask_rcnn
from sima_attn.report.cuda_timing import time_graphs
from sima_attn.report.rows import processor_name, today
from sima_attn.report.tables import TextTable
from sima_attn.report.timing import Function, time_interleaved

BACKBONE, DETECTOR = "backbone", "detector"
GRAPH, CALLED = "graph", "called"
PIXELS = {"cuda": (480, 800, 1333, 2048), "cpu": (480, 800)}
DETECTIONS = 100  # what a picture of COCO may have; an untrained detector must be told to give them
GOAL_PIXELS, GOAL = 1333, 2.2  # of DeiT-S, on a GPU


@dataclass(frozen=True)
class Twins:
    """A model of the zoo, and the attention that is its SimA's twin."""

    model: str
    attention: str


TWINS = (Twins("sima_deit_small_patch16_224", "softmax"), Twins("sima_xcit_small_12_p16_224", "xca"))


@dataclass(frozen=True)
class DetectSpeedRow:
    """One part of one detector at one size; `speedup` is against its twin in the same run.

    `backbone` is the feature pyramid with all below it. `timed` says whether the percentiles and the speedup are of a
    CUDA graph or of calls from Python; `called_ms` is the median call in both. `peak_mib` is 0 on the CPU, where it is
    not measured.
    """

    model: str
    attention: str
    part: str
    pixels: int
    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int
    speedup: float
    goal: float
    timed: str
    called_ms: float
    peak_mib: float
    detections: int
    precision: str
    device: str
    threads: int
    torch: str
    date: str


def bench_detect(
    device: str,
    *,
    twins: Sequence[Twins] = TWINS,
    pixels: Sequence[int] | None = None,
    seconds: float = 2.0,
    **kwargs: object,
) -> Generator[list[DetectSpeedRow]]:
    """The rows of one pair at one size after the other; `kwargs` are arguments of the models."""
    if device not in PIXELS:
        raise ValueError(f"device must be one of {', '.join(PIXELS)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but torch sees no GPU here; use --device cpu")
    for pair in twins:
        models = {attention: _build(pair.model, attention, device, kwargs) for attention in (pair.attention, "sima")}
        for side in pixels or PIXELS[device]:
            yield _bench_pair(pair, models, side, device, seconds)


def _build(name: str, attention: str, device: str, kwargs: dict) -> SimaMaskRCNN:
    torch.manual_seed(0)
    model = build_mask_rcnn(name, score_threshold=0.0, detections=DETECTIONS, attention=attention, **kwargs)
    return model.to(device).eval()


@torch.inference_mode()
def _bench_pair(
    pair: Twins, models: dict[str, SimaMaskRCNN], side: int, device: str, seconds: float
) -> list[DetectSpeedRow]:
    image = torch.rand(3, side, side, device=device)
    forwards: dict[str, dict[str, Function]] = {BACKBONE: {}, DETECTOR: {}}
    found: dict[str, int] = {}
    for attention, model in models.items():
        model.transform.min_size, model.transform.max_size = (side,), side
        batch = model.transform([image])[0].tensors
        forwards[BACKBONE][attention] = partial(_forward, model.backbone, batch)
        forwards[DETECTOR][attention] = partial(_forward, model, [image])
        found[attention] = len(_forward(model, [image])[0]["boxes"])
    rows = []
    for part, mine in forwards.items():
        steps = {attention: partial(_waited_for, forward, device) for attention, forward in mine.items()}
        peaks = {attention: _peak_mib(step, device) for attention, step in steps.items()}
        called = time_interleaved(steps, seconds=seconds * len(steps))
        as_graph = device == "cuda" and part == BACKBONE
        timings = time_graphs(mine, seconds=seconds) if as_graph else called
        for attention, timing in timings.items():
            has_goal = attention == "sima" and pair.attention == "softmax" and (part, side) == (BACKBONE, GOAL_PIXELS)
            rows.append(
                DetectSpeedRow(
                    model=pair.model,
                    attention=attention,
                    part=part,
                    pixels=side,
                    p20_ms=round(timing.p20 * 1e3, 3),
                    p50_ms=round(timing.p50 * 1e3, 3),
                    p80_ms=round(timing.p80 * 1e3, 3),
                    samples=timing.samples,
                    speedup=round(timings[pair.attention].p50 / timing.p50, 3),
                    goal=GOAL if has_goal and device == "cuda" else 0.0,
                    timed=GRAPH if as_graph else CALLED,
                    called_ms=round(called[attention].p50 * 1e3, 3),
                    peak_mib=round(peaks[attention], 1),
                    detections=found[attention] if part == DETECTOR else 0,
                    precision="bfloat16 autocast" if device == "cuda" else "float32",
                    device=processor_name(device),
                    threads=torch.get_num_threads(),
                    torch=torch.__version__,
                    date=today(),
                )
            )
    return rows


def _forward(model: torch.nn.Module, images: Tensor | list[Tensor]) -> list[dict[str, Tensor]]:
    with torch.autocast("cuda", torch.bfloat16, enabled=images[0].is_cuda):
        return model(images)


def _waited_for(forward: Function, device: str) -> None:
    forward()
    if device == "cuda":
        torch.cuda.synchronize()


def _peak_mib(step: Function, device: str) -> float:
    """Memory that a call needs beyond what is there before it, after a first one has tuned the kernels."""
    if device != "cuda":
        return 0.0
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def detect_table(rows: Sequence[DetectSpeedRow]) -> TextTable:
    """Milliseconds and memory of each part beside its twin's; where there are graphs, the plain calls too."""
    graphs = any(row.timed == GRAPH for row in rows)
    header = ["model", "part", "px", "twin", "twin, ms", "SimA, ms", "speed", "goal"]
    header += ["timed", "twin called, ms", "SimA called, ms"] * graphs + ["twin, MiB", "SimA, MiB"]
    lines = []
    for twin, sima in zip(rows[::2], rows[1::2], strict=True):  # they are written in pairs
        called = [sima.timed, f"{twin.called_ms:,.1f}", f"{sima.called_ms:,.1f}"]
        lines.append(
            [
                sima.model,
                sima.part,
                str(sima.pixels),
                twin.attention,
                f"{twin.p50_ms:,.1f}",
                f"{sima.p50_ms:,.1f}",
                f"{sima.speedup:.2f}x",
                f"{sima.goal:.1f}x" if sima.goal else "-",
                *called * graphs,
                *(f"{row.peak_mib:,.0f}" if row.peak_mib else "-" for row in (twin, sima)),
            ]
        )
    return TextTable(header, lines, bold=set())
