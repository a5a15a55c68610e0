"""Detection at high resolution: time and memory of the backbone and of the whole detector, SimA against its twins.

One image at a time. On a CUDA device the backbone is timed as a CUDA graph: called from Python, the time of a small
image is that of the kernel launches. The whole detector cannot be a graph, since its work depends on the detections;
each call is followed by a synchronization.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sima_attn.detect.rcnn import SimaRCNN, build_rcnn
from sima_attn.report.cuda_timing import peak_mib, time_graphs
from sima_attn.report.rows import provenance_columns
from sima_attn.report.tables import TextTable
from sima_attn.report.timing import Function, time_interleaved

BACKBONE, DETECTOR, BOX_DETECTOR = "backbone", "detector", "detector, boxes only"
GRAPH, CALLED = "graph", "called"
PIXELS = {"cuda": (480, 800, 1333, 2048), "cpu": (480, 800)}
DETECTIONS = 100  # COCO's maximum per image
GOAL_PIXELS, GOAL = 1333, 2.2  # target of DeiT-S on a GPU


# SimA model -> attention of its twin
TWINS = {"sima_deit_small_patch16_224": "softmax", "sima_xcit_small_12_p16_224": "xca"}


@dataclass(frozen=True)
class DetectSpeedRow:
    """One part of one detector at one size; `speedup` is against its twin in the same run.

    The part "backbone" includes the feature pyramid. `timed` says whether percentiles and speedup are of a CUDA graph
    or of calls from Python; `called_ms` is always the median call. `peak_mib` is not measured on the CPU, and 0 there.
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
    twins: Mapping[str, str] = TWINS,
    pixels: Sequence[int] | None = None,
    seconds: float = 2.0,
    **kwargs: object,
) -> Generator[list[DetectSpeedRow]]:
    """The rows of each pair at each size; `kwargs` are arguments of `build_rcnn`."""
    for name, twin in twins.items():
        models = {attention: _build(name, attention, device, kwargs) for attention in (twin, "sima")}
        for side in pixels or PIXELS[device]:
            yield _bench_pair(name, models, side, device, seconds)


def _build(name: str, attention: str, device: str, kwargs: dict) -> SimaRCNN:
    torch.manual_seed(0)
    model = build_rcnn(name, score_threshold=0.0, detections=DETECTIONS, attention=attention, **kwargs)
    return model.to(device).eval()


@torch.inference_mode()
def _bench_pair(name: str, models: dict[str, SimaRCNN], side: int, device: str, seconds: float) -> list[DetectSpeedRow]:
    twin = next(iter(models))
    image = torch.rand(3, side, side, device=device)
    whole = DETECTOR if models[twin].has_masks else BOX_DETECTOR
    forwards: dict[str, dict[str, Function]] = {BACKBONE: {}, whole: {}}
    found: dict[str, int] = {}
    for attention, model in models.items():
        model.transform.min_size, model.transform.max_size = (side,), side
        batch = model.transform([image])[0].tensors
        forwards[BACKBONE][attention] = partial(_forward, model.backbone, batch)
        forwards[whole][attention] = partial(_forward, model, [image])
        found[attention] = len(_forward(model, [image])[0]["boxes"])
    rows = []
    for part, mine in forwards.items():
        steps = {attention: partial(_call_and_wait, forward, device) for attention, forward in mine.items()}
        peaks = {attention: peak_mib(step) if device == "cuda" else 0.0 for attention, step in steps.items()}
        called = time_interleaved(steps, seconds=seconds * len(steps))
        as_graph = device == "cuda" and part == BACKBONE
        timings = time_graphs(mine, seconds=seconds) if as_graph else called
        for attention, timing in timings.items():
            has_goal = attention == "sima" and twin == "softmax" and (part, side) == (BACKBONE, GOAL_PIXELS)
            rows.append(
                DetectSpeedRow(
                    model=name,
                    attention=attention,
                    part=part,
                    pixels=side,
                    **timing.columns("ms", 3),
                    speedup=round(timings[twin].p50 / timing.p50, 3),
                    goal=GOAL if has_goal and device == "cuda" else 0.0,
                    timed=GRAPH if as_graph else CALLED,
                    called_ms=round(called[attention].p50 * 1e3, 3),
                    peak_mib=round(peaks[attention], 1),
                    detections=found[attention] if part == whole else 0,
                    precision="bfloat16 autocast" if device == "cuda" else "float32",
                    threads=torch.get_num_threads(),
                    **provenance_columns(device),
                )
            )
    return rows


def _forward(model: torch.nn.Module, images: Tensor | list[Tensor]) -> list[dict[str, Tensor]]:
    with torch.autocast("cuda", torch.bfloat16, enabled=images[0].is_cuda):
        return model(images)


def _call_and_wait(forward: Function, device: str) -> None:
    forward()
    if device == "cuda":
        torch.cuda.synchronize()


def detect_table(rows: Sequence[DetectSpeedRow]) -> TextTable:
    """Milliseconds and memory of each part and its twin; for CUDA graphs also the time of plain calls."""
    graphs = any(row.timed == GRAPH for row in rows)
    header = ["model", "part", "px", "baseline", "baseline, ms", "SimA, ms", "speed", "goal"]
    header += ["timed", "baseline called, ms", "SimA called, ms"] * graphs + ["baseline, MiB", "SimA, MiB"]
    lines = []
    for twin, sima in zip(rows[::2], rows[1::2], strict=True):  # rows come in pairs
        what = [sima.model, sima.part, str(sima.pixels), twin.attention]
        goal = f"{sima.goal:.1f}x" if sima.goal else "-"
        times = [f"{twin.p50_ms:,.1f}", f"{sima.p50_ms:,.1f}", f"{sima.speedup:.2f}x", goal]
        called = [sima.timed, f"{twin.called_ms:,.1f}", f"{sima.called_ms:,.1f}"] * graphs
        memory = [f"{row.peak_mib:,.0f}" if row.peak_mib else "-" for row in (twin, sima)]
        lines.append([*what, *times, *called, *memory])
    return TextTable(header, lines)
