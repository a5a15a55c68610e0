"""Detection at high resolution: time and memory of backbone and whole detector, SimA against its twins.

One image at a time. The same code runs on the CPU and on a CUDA device: there it waits for the device in every call,
so what is timed is what a caller waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sima_attn.bench.rows import cpu_name, today
from sima_attn.bench.tables import TextTable
from sima_attn.bench.timing import time_interleaved
from sima_attn.detect.mask_rcnn import SimaMaskRCNN, build_mask_rcnn

BACKBONE, DETECTOR = "backbone", "detector"
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

    `backbone` is the feature pyramid with all below it; `peak_mib` is 0 on the CPU, where it is not measured.
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
        for side in pixels or PIXELS[device]:
            yield _bench_pair(pair, side, device, seconds, kwargs)


@torch.inference_mode()
def _bench_pair(pair: Twins, side: int, device: str, seconds: float, kwargs: dict) -> list[DetectSpeedRow]:
    steps: dict[tuple[str, str], Callable[[], object]] = {}
    found: dict[str, int] = {}
    for attention in (pair.attention, "sima"):
        torch.manual_seed(0)
        model = build_mask_rcnn(
            pair.model,
            side=side,
            longest=side,
            score_threshold=0.0,
            detections=DETECTIONS,
            attention=attention,
            **kwargs,
        )
        model = model.to(device).eval()
        image = torch.rand(3, side, side, device=device)
        batch = model.transform([image])[0].tensors
        steps[attention, BACKBONE] = partial(_run, model.backbone, batch)
        steps[attention, DETECTOR] = partial(_run, model, [image])
        found[attention] = len(_run(model, [image])[0]["boxes"])
    rows = []
    for part in (BACKBONE, DETECTOR):
        mine = {attention: step for (attention, of), step in steps.items() if of == part}
        peaks = {attention: _peak_mib(step, device) for attention, step in mine.items()}
        timings = time_interleaved(mine, seconds=seconds * len(mine))
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
                    peak_mib=round(peaks[attention], 1),
                    detections=found[attention] if part == DETECTOR else 0,
                    precision="bfloat16 autocast" if device == "cuda" else "float32",
                    device=torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
                    threads=torch.get_num_threads(),
                    torch=torch.__version__,
                    date=today(),
                )
            )
    return rows


def _run(model: torch.nn.Module | SimaMaskRCNN, images: Tensor | list[Tensor]) -> list[dict[str, Tensor]]:
    on_gpu = images[0].is_cuda
    with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
        out = model(images)
    if on_gpu:
        torch.cuda.synchronize()
    return out


def _peak_mib(step: Callable[[], object], device: str) -> float:
    """Memory that a call needs beyond what is there before it, after a first one has tuned the kernels."""
    if device != "cuda":
        return 0.0
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def detect_table(rows: Sequence[DetectSpeedRow]) -> TextTable:
    """Milliseconds and memory of each part beside its twin's."""
    header = ["model", "part", "px", "twin", "twin, ms", "SimA, ms", "speed", "goal", "twin, MiB", "SimA, MiB"]
    lines = []
    for twin, sima in zip(rows[::2], rows[1::2], strict=True):  # they are written in pairs
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
                *(f"{row.peak_mib:,.0f}" if row.peak_mib else "-" for row in (twin, sima)),
            ]
        )
    return TextTable(header, lines, bold=set())
