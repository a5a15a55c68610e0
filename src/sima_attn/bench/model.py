"""Whole models on the GPU: timm's DeiT-S and XCiT-S12/16 against their SimA twins, inference and training.

A step is timed as users run it (called from Python in eager mode, under `torch.compile`, and under `torch.compile` with
mode "reduce-overhead"), and as a CUDA graph, which shows the time of the device.
"""

from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import timm
import torch
from timm.models.xcit import Xcit
from torch import Tensor, nn

from sima_attn.bench.selection import select
from sima_attn.models.compiled import compile_blocks
from sima_attn.models.patch_embed import ProductPatchEmbed
from sima_attn.models.xcit import ContiguousTokens
from sima_attn.report.cuda_timing import check_cuda, peak_mib, time_calls, time_graphs
from sima_attn.report.rows import provenance_columns

EAGER, COMPILE, REDUCE_OVERHEAD, GRAPH = MODES = ("eager", "compile", "reduce-overhead", "graph")
INFERENCE, TRAINING = DIRECTIONS = ("inference", "training")
DEVICE = "cuda"


@dataclass(frozen=True)
class Twins:
    """A model of timm, the same model with SimA, and the modes in which they are measured."""

    attention: str
    timm_name: str
    sima_name: str
    options: dict
    modes: tuple[str, ...] = MODES

    @property
    def family(self) -> str:
        """The name for `sima bench model --model`."""
        return self.timm_name.partition("_")[0]

    def build(self, attention: str) -> Any:
        """The model with this attention. Both have the stem of this package, so that only the attentions differ."""
        model: Any = timm.create_model(self.sima_name if attention == "sima" else self.timm_name, **self.options)
        if isinstance(model, Xcit):
            model.pos_drop = ContiguousTokens()
        return model


# timm's convolution takes 2 ms of a step at 512 px and more.
VIT_OPTIONS = {"dynamic_img_size": True, "embed_layer": ProductPatchEmbed}
TWINS = (
    Twins("softmax", "deit_small_patch16_224", "sima_deit_small_patch16_224", VIT_OPTIONS),
    Twins("xca", "xcit_small_12_p16_224", "sima_xcit_small_12_p16_224", {}, modes=(GRAPH,)),  # minutes to compile
)


@dataclass(frozen=True)
class ModelCase:
    """How a step is run, at which image size and batch size; `target` is the speedup on an H200, 0 for none."""

    mode: str
    direction: str
    pixels: int
    batch: int
    target: float = 0.0

    @property
    def build(self) -> tuple[str, str, int, int]:
        """Cases with equal values are measured with one pair of models, so that these are compiled once."""
        compiled = COMPILE if (self.mode, self.direction) == (GRAPH, INFERENCE) else self.mode
        return compiled, self.direction, self.pixels, self.batch


# Cases of one build are adjacent.
CASES = (
    ModelCase(EAGER, INFERENCE, 224, 1, target=1.0),
    ModelCase(EAGER, INFERENCE, 224, 8, target=1.0),
    ModelCase(EAGER, INFERENCE, 224, 256),
    ModelCase(EAGER, INFERENCE, 512, 1, target=1.0),
    ModelCase(EAGER, INFERENCE, 512, 64),
    ModelCase(EAGER, INFERENCE, 1024, 1, target=1.0),
    ModelCase(EAGER, INFERENCE, 1024, 16),
    ModelCase(EAGER, TRAINING, 224, 8, target=1.0),
    ModelCase(EAGER, TRAINING, 224, 256),
    ModelCase(COMPILE, INFERENCE, 224, 1, target=1.05),
    ModelCase(COMPILE, INFERENCE, 224, 8, target=1.05),
    ModelCase(COMPILE, INFERENCE, 224, 256),
    ModelCase(GRAPH, INFERENCE, 224, 256, target=1.10),
    ModelCase(COMPILE, INFERENCE, 512, 1, target=1.05),
    ModelCase(COMPILE, INFERENCE, 512, 64),
    ModelCase(GRAPH, INFERENCE, 512, 64, target=1.35),
    ModelCase(COMPILE, INFERENCE, 1024, 1, target=1.05),
    ModelCase(COMPILE, INFERENCE, 1024, 16),
    ModelCase(GRAPH, INFERENCE, 1024, 16, target=2.2),
    ModelCase(GRAPH, INFERENCE, 1536, 8, target=3.5),
    ModelCase(COMPILE, TRAINING, 224, 8, target=1.0),
    ModelCase(COMPILE, TRAINING, 224, 256, target=1.1),
    ModelCase(REDUCE_OVERHEAD, INFERENCE, 224, 1, target=1.03),
    ModelCase(REDUCE_OVERHEAD, INFERENCE, 224, 8),
    ModelCase(REDUCE_OVERHEAD, INFERENCE, 224, 256),
    ModelCase(REDUCE_OVERHEAD, INFERENCE, 512, 1, target=1.1),
    ModelCase(REDUCE_OVERHEAD, INFERENCE, 512, 64),
    ModelCase(REDUCE_OVERHEAD, INFERENCE, 1024, 1, target=1.4),
    ModelCase(REDUCE_OVERHEAD, INFERENCE, 1024, 16),
    ModelCase(GRAPH, TRAINING, 224, 256, target=1.10),
    ModelCase(GRAPH, TRAINING, 512, 64, target=1.35),
    ModelCase(GRAPH, TRAINING, 1024, 16, target=2.2),
    ModelCase(GRAPH, TRAINING, 1536, 8, target=3.5),
)


@dataclass(frozen=True)
class ModelSpeedRow:
    """One model in one case; `speedup` is the median time of its twin over its own.

    Mode "graph" replays a step of the compiled model (training: compiled block by block) as one CUDA graph, timed on
    the device. The other modes are wall-clock time per call. `peak_mib` is the peak memory of a step; it is 0 in mode
    "reduce-overhead", where CUDA graphs keep the memory between steps.
    """

    model: str
    attention: str
    mode: str
    direction: str
    pixels: int
    batch: int
    speedup: float
    target: float
    p20_ms: float
    p50_ms: float
    p80_ms: float
    samples: int
    images_per_second: float
    peak_mib: float
    precision: str
    device: str
    torch: str
    timm: str
    date: str

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """Identifies a row in a file."""
        return self.model, self.mode, self.direction, self.pixels, self.batch

    @property
    def position(self) -> tuple[int, int, int, int, int, bool]:
        """Sort key: model, mode, direction, size; a model before its SimA twin."""
        pair = next(i for i, twins in enumerate(TWINS) if self.model in (twins.timm_name, twins.sima_name))
        mode, direction = MODES.index(self.mode), DIRECTIONS.index(self.direction)
        return pair, mode, direction, self.pixels, self.batch, self.attention == "sima"


def select_cases(
    *,
    models: Collection[str] | None = None,
    modes: Collection[str] | None = None,
    directions: Collection[str] | None = None,
    pixels: Collection[int] | None = None,
    batches: Collection[int] | None = None,
) -> list[tuple[Twins, ModelCase]]:
    """The pairs of models and their cases; each argument keeps only the cases with these values."""
    cases = [(pair, case) for pair in TWINS for case in CASES if case.mode in pair.modes]
    cases = select(cases, "model", models, lambda each: each[0].family)
    cases = select(cases, "mode", modes, lambda each: each[1].mode)
    cases = select(cases, "direction", directions, lambda each: each[1].direction)
    cases = select(cases, "image side", pixels, lambda each: each[1].pixels)
    return select(cases, "batch", batches, lambda each: each[1].batch)


def bench_models(cases: Iterable[tuple[Twins, ModelCase]], *, seconds: float = 2.0) -> Generator[list[ModelSpeedRow]]:
    """The rows of each case: first the model of timm, then its SimA twin."""
    check_cuda()
    for (_, build), group in groupby(cases, key=lambda each: (each[0].timm_name, each[1].build)):
        pairs, alike = zip(*group, strict=True)
        yield from _bench_build(pairs[0], build, alike, seconds)


def _bench_build(
    pair: Twins, build: tuple[str, str, int, int], cases: Sequence[ModelCase], seconds: float
) -> Generator[list[ModelSpeedRow]]:
    mode, direction, pixels, batch = build
    images = torch.randn(batch, 3, pixels, pixels, device=DEVICE)
    labels = torch.randint(1000, (batch,), device=DEVICE)
    torch.compiler.reset()  # otherwise the second size would be compiled with dynamic shapes
    names = {pair.attention: pair.timm_name, "sima": pair.sima_name}
    steps = {
        attention: create_step(pair.build(attention).to(DEVICE), mode, images, labels, direction) for attention in names
    }
    peaks = {attention: peak_mib(step, warmup=3) for attention, step in steps.items()}
    if mode == REDUCE_OVERHEAD:  # its graphs keep the memory between steps
        peaks = dict.fromkeys(peaks, 0.0)
    for case in cases:
        timings = (time_graphs if case.mode == GRAPH else time_calls)(steps, seconds=seconds)
        yield [
            ModelSpeedRow(
                model=names[attention],
                attention=attention,
                mode=case.mode,
                direction=direction,
                pixels=pixels,
                batch=batch,
                speedup=round(timings[pair.attention].p50 / timing.p50, 3),
                target=case.target if attention == "sima" and pair.attention == "softmax" else 0.0,
                **timing.columns("ms", 3),
                images_per_second=round(batch / timing.p50, 1),
                peak_mib=round(peaks[attention], 1),
                precision="bfloat16 autocast",
                timm=timm.__version__,
                **provenance_columns(DEVICE),
            )
            for attention, timing in timings.items()
        ]


def create_step(
    model: nn.Module, mode: str, images: Tensor, labels: Tensor, direction: str
) -> Callable[[], Tensor | None]:
    """A step: inference returns the logits; training is forward, loss and backward, without an optimizer."""
    device = images.device.type
    run: Any = model.train(direction == TRAINING)
    if mode == COMPILE:
        run = torch.compile(run)
    elif mode == REDUCE_OVERHEAD:
        run = torch.compile(run, mode="reduce-overhead")
    elif mode == GRAPH:
        run = compile_blocks(run)  # as `sima train`; the whole model would take a minute to compile

    def infer() -> Tensor:
        if mode == REDUCE_OVERHEAD:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode(), torch.autocast(device, torch.bfloat16):
            return run(images)

    def train() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(run(images), labels)
        loss.backward()
        model.zero_grad(set_to_none=True)

    return train if direction == TRAINING else infer
