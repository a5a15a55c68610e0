"""Time and memory of a teacher and its students at several image sizes."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn._errors import first_line
from sima_attn.auditing.model import LiveBytes
from sima_attn.distill.networks import run
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.report.cuda_timing import peak_mib, time_calls
from sima_attn.report.rows import provenance_columns
from sima_attn.report.timing import time_interleaved

SIZE_FACTORS = (1.0, 37 / 16, 37 / 8)  # 224, 518 and 1036 px for a model of 224 px
BATCH = {"cpu": 1, "cuda": 8}
CPU_SAMPLES, SLOW = 3, 3.0  # one sample of a model that takes longer than three seconds per image
TEACHER = "teacher"
Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class SpeedRow:
    """A forward pass of one model at one image size; `speedup` is the median time of the teacher over its own.

    `kept` counts the attentions that the student keeps from its teacher. `peak_mib` is the memory that the pass needs
    in addition to the weights.
    """

    model: str
    kept: int
    pixels: int
    batch: int
    speedup: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int
    peak_mib: float
    precision: str
    device: str
    torch: str
    date: str


def patch_size(model: nn.Module, size: int) -> int:
    """Pixels per token along one side, from the number of tokens at an image size."""
    image = next(model.parameters()).new_zeros(1, 3, size, size)
    with torch.no_grad(), eval_mode(model):
        return max(1, size // math.isqrt(run(model, image).tokens.shape[1]))


def sizes_for(model: nn.Module, size: int) -> list[int]:
    """The image sizes to measure, whole numbers of patches."""
    patch = patch_size(model, size)
    return [round(factor * size / patch) * patch for factor in SIZE_FACTORS]


def measure_speed(
    models: Mapping[str, tuple[nn.Module, int]], sizes: list[int], *, precision: str, autocast: Autocast
) -> tuple[list[SpeedRow], list[str]]:
    """Rows of all models at each size, and notes about sizes that were left out.

    Args:
        models: Name -> (model, kept attentions); one of the names is "teacher".
        autocast: Context of the forward pass.
    """
    rows: list[SpeedRow] = []
    notes: list[str] = []
    device = next(models[TEACHER][0].parameters()).device.type
    for size in sizes:
        begin = time.perf_counter()
        try:
            prepared = {name: _prepare(model, size, autocast) for name, (model, _) in models.items()}
        except Exception as error:  # models raise anything at sizes that they do not support
            notes.append(f"{size} px is left out: {first_line(error)}")
            continue
        seconds = (time.perf_counter() - begin) / len(models)
        steps = {name: step for name, (step, _) in prepared.items()}
        if device == "cuda":
            timings = time_calls(steps, seconds=0.5 * len(steps))
        else:
            timings = time_interleaved(steps, seconds=0, least_samples=CPU_SAMPLES if seconds < SLOW else 1)
        rows += [
            SpeedRow(
                model=name,
                kept=models[name][1],
                pixels=size,
                batch=BATCH[device],
                speedup=round(timings[TEACHER].p50 / timing.p50, 3),
                **timing.columns("ms", 3),
                peak_mib=round(prepared[name][1], 2),
                precision=precision,
                **provenance_columns(device),
            )
            for name, timing in timings.items()
        ]
    return rows, notes


def _prepare(model: nn.Module, size: int, autocast: Autocast) -> tuple[Callable[[], Tensor], float]:
    """A forward pass at an image size, and its peak memory. A timm model of a fixed size is copied and set to it."""
    step = _forward(model, size, autocast)
    try:
        return step, _peak_mib(step, model)
    except Exception:
        if not hasattr(model, "set_input_size"):
            raise
        resized: Any = copy.deepcopy(model)
        resized.set_input_size(size)
        step = _forward(resized, size, autocast)
        return step, _peak_mib(step, resized)


def _forward(model: nn.Module, size: int, autocast: Autocast) -> Callable[[], Tensor]:
    device = next(model.parameters()).device
    images = torch.randn(BATCH[device.type], 3, size, size, device=device)

    def step() -> Tensor:
        with torch.inference_mode(), autocast():
            return model(images)

    return step


def _peak_mib(step: Callable[[], object], model: nn.Module) -> float:
    """Peak memory of a forward pass beside the weights, in MiB."""
    if next(model.parameters()).device.type == "cuda":
        return peak_mib(step)
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        step()
    return live.peak / 2**20
