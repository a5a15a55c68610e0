"""Forward and backward pass of a step as one CUDA graph: captured once, then replayed with a single call.

Small models at small image sizes are limited by Python, which launches thousands of kernels per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sima_attn.train.recipes import Run

if TYPE_CHECKING:
    from lightning.fabric import Fabric

PLAIN_STEPS = 3  # warm-up steps before the capture: they compile, select algorithms and load libraries

Numbers = dict[str, Tensor]


def check_can_be_recorded(run: Run, fabric: Fabric, *, recordable: bool) -> None:
    """Raise if a run does not support run.cuda_graph; `recordable` is the attribute of its task."""
    reasons = {
        f"it needs a CUDA device, got {fabric.device.type}": fabric.device.type != "cuda",
        "processes synchronize within a pass": fabric.world_size > 1,
        f"a replay overwrites the gradients, so run.accumulate must be 1, got {run.accumulate}": run.accumulate > 1,
        "the loss scale of fp16 is not captured; use run.precision=bf16": run.precision == "fp16",
        "run.grad_checkpointing saves random states, which a capture does not allow": run.grad_checkpointing,
        "this kind of training has steps of varying shapes": not recordable,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"run.cuda_graph=true is not supported here: {reason}; set it to false")


class RecordedPass:
    """CUDA graph of `plain(batch)`, which sets gradients and returns numbers to log.

    A replay repeats the captured kernels on the same memory: everything that changes between steps must be in tensors
    that stay in place. Weights and buffers do; the batch is copied; random numbers follow the seed set before the call.
    """

    def __init__(self, plain: Callable[[Sequence[Tensor]], Numbers], parameters: Iterable[nn.Parameter]) -> None:
        self.plain = plain
        self.parameters = list(parameters)
        self.stream = torch.cuda.Stream()  # a capture needs a side stream, also for the warm-up
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Sequence[Tensor]) -> Numbers:
        """The numbers of a batch of fixed shapes; the next call overwrites them."""
        self.steps += 1
        if self.steps <= PLAIN_STEPS:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                numbers = self.plain(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return numbers
        if self.graph is None:
            self.record(batch)
        for place, tensor in zip(self.batch, batch, strict=True):
            place.copy_(tensor)
        self.graph.replay()  # type: ignore[union-attr]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        return self.numbers

    def record(self, batch: Sequence[Tensor]) -> None:
        """Capture the pass for batches of these shapes; nothing is computed."""
        self.batch = [tensor.clone() for tensor in batch]
        for parameter in self.parameters:
            parameter.grad = None  # a replay then sets the gradients instead of adding to them
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as those that log, may use the device meanwhile.
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                numbers = self.plain(self.batch)
        except RuntimeError as error:
            raise ValueError(
                f"the step cannot be captured in a CUDA graph: {error} (the forward pass must neither synchronize with "
                "the device nor copy from the host); set run.cuda_graph=false"
            ) from error
        self.numbers = {name: value.detach() for name, value in numbers.items()}
        self.gradients = [parameter.grad for parameter in self.parameters]
