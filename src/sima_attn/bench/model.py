"""Whole models on the GPU: timm's DeiT-S and XCiT-S12/16 against their SimA twins, inference and training.

A step is timed as a CUDA graph, which is what the chip does, and called from Python, which is what a plain loop gets.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor, nn

from sima_attn.bench.cuda_timing import check_cuda, device_name, time_graphs
from sima_attn.bench.rows import today
from sima_attn.bench.timing import Timing, percentiles
from sima_attn.models.compiled import compile_blocks

INFERENCE, TRAINING = "inference", "training"
COMPILED = {INFERENCE: "whole", TRAINING: "block by block"}


@dataclass(frozen=True)
class Twins:
    """A model of timm and the same model with SimA."""

    attention: str
    timm_name: str
    sima_name: str
    options: dict


TWINS = (
    Twins("softmax", "deit_small_patch16_224", "sima_deit_small_patch16_224", {"dynamic_img_size": True}),
    Twins("xca", "xcit_small_12_p16_224", "sima_xcit_small_12_p16_224", {}),
)


@dataclass(frozen=True)
class Size:
    """An image side, a batch, and how many times softmax's speed SimA should reach there."""

    pixels: int
    batch: int
    goal: float


SIZES = (Size(224, 256, 1.10), Size(512, 64, 1.35), Size(1024, 16, 2.2), Size(1536, 8, 3.5))


@dataclass(frozen=True)
class ModelSpeedRow:
    """One model at one size; `speedup` is against its twin in the same run, both as CUDA graphs.

    `called_ms` is the step called from Python, and `called_speedup` that of the twins so.
    """

    model: str
    attention: str
    direction: str
    pixels: int
    batch: int
    images_per_second: float
    speedup: float
    goal: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int
    called_ms: float
    called_speedup: float
    peak_mib: float
    compiled: str
    precision: str
    device: str
    torch: str
    timm: str
    date: str


def bench_models(
    *, twins: Sequence[Twins] = TWINS, sizes: Sequence[Size] = SIZES, seconds: float = 2.0
) -> Generator[list[ModelSpeedRow]]:
    """The rows of one pair at one size and direction after the other."""
    check_cuda()
    for pair in twins:
        for size in sizes:
            for direction in (INFERENCE, TRAINING):
                yield _bench_pair(pair, size, direction, seconds)


def _bench_pair(pair: Twins, size: Size, direction: str, seconds: float) -> list[ModelSpeedRow]:
    names = {pair.attention: pair.timm_name, "sima": pair.sima_name}
    images = torch.randn(size.batch, 3, size.pixels, size.pixels, device="cuda")
    labels = torch.randint(1000, (size.batch,), device="cuda")
    torch.compiler.reset()
    steps, peaks = {}, {}
    for attention, name in names.items():
        steps[attention] = _step(name, pair.options, images, labels, direction)
        peaks[attention] = _peak_mib(steps[attention])
    called = _interleaved(steps, seconds / 2)
    timings = time_graphs(steps, seconds=seconds)
    return [
        ModelSpeedRow(
            model=names[attention],
            attention=attention,
            direction=direction,
            pixels=size.pixels,
            batch=size.batch,
            images_per_second=round(size.batch / timing.p50, 1),
            speedup=round(timings[pair.attention].p50 / timing.p50, 3),
            goal=size.goal if attention == "sima" and pair.attention == "softmax" else 0.0,
            p20_ms=round(timing.p20 * 1e3, 3),
            p50_ms=round(timing.p50 * 1e3, 3),
            p80_ms=round(timing.p80 * 1e3, 3),
            samples=timing.samples,
            called_ms=round(called[attention].p50 * 1e3, 3),
            called_speedup=round(called[pair.attention].p50 / called[attention].p50, 3),
            peak_mib=round(peaks[attention], 1),
            compiled=COMPILED[direction],
            precision="bfloat16 autocast",
            device=device_name(),
            torch=torch.__version__,
            timm=timm.__version__,
            date=today(),
        )
        for attention, timing in timings.items()
    ]


def _step(name: str, options: dict, images: Tensor, labels: Tensor, direction: str) -> Callable[[], object]:
    model: Any = timm.create_model(name, **options).cuda()
    if direction == INFERENCE:
        model = torch.compile(model.eval(), dynamic=False)

        @torch.inference_mode()
        def infer() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model(images)

        return infer

    model = compile_blocks(model)  # as `sima train` does it; as a whole it would take minutes

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return train


def _peak_mib(step: Callable[[], object]) -> float:
    """Memory that one step needs beyond what is there before it, after a first step has compiled and tuned."""
    step()
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _interleaved(steps: dict[str, Callable[[], object]], seconds: float) -> dict[str, Timing]:
    """Whole steps called in turns, clocked on the device."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    spent, rounds = 0.0, 0
    while rounds < 10 or spent < seconds * len(steps):
        for name, step in steps.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e-3)
            spent += samples[name][-1]
        rounds += 1
    return {name: percentiles(times) for name, times in samples.items()}
