"""The forward and backward pass of a step as one CUDA graph: recorded once, then replayed with a single call.

A small model at a small size keeps a GPU waiting for Python, which launches its thousands of kernels one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sima_attn.train.recipes import Run

if TYPE_CHECKING:
    from lightning.fabric import Fabric

PLAIN_STEPS = 3  # made as usual before the recording: they compile, choose algorithms and load libraries

Numbers = dict[str, Tensor]


def check_can_be_recorded(run: Run, fabric: Fabric, *, recordable: bool) -> None:
    """Raise where run.cuda_graph does not suit a run, and say why; `recordable` is what its task says."""
    reasons = {
        f"it needs a CUDA device, and this is {fabric.device.type}": fabric.device.type != "cuda",
        "several processes wait for one another inside a pass": fabric.world_size > 1,
        f"a replay sets the gradients, so that it takes run.accumulate=1, got {run.accumulate}": run.accumulate > 1,
        "the loss scale of fp16 is not recorded; use run.precision=bf16": run.precision == "fp16",
        "run.grad_checkpointing keeps states of the generator, which a recording cannot": run.grad_checkpointing,
        "the steps of this kind of training differ in more than the numbers in their tensors": not recordable,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"run.cuda_graph=true cannot be had here: {reason}; set it to false")


class RecordedPass:
    """`plain(batch)`, which leaves gradients in the parameters and returns numbers, in its recorded form.

    A replay does on the device what the recording did, whatever Python has changed since: all that differs from step
    to step must lie in tensors that stay where they are. Weights and buffers do; the batch is copied to its place;
    random draws follow the generator as it is seeded before the call.
    """

    def __init__(self, plain: Callable[[Sequence[Tensor]], Numbers], parameters: Iterable[nn.Parameter]) -> None:
        self.plain = plain
        self.parameters = list(parameters)
        self.stream = torch.cuda.Stream()  # a recording cannot be made on the default stream, nor after work on it
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Sequence[Tensor]) -> Numbers:
        """The numbers of a batch, always of the same shapes; with the next call the recorded ones are overwritten."""
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
        """Record the pass for batches of these shapes; nothing is computed."""
        self.batch = [tensor.clone() for tensor in batch]
        for parameter in self.parameters:
            parameter.grad = None  # so that a replay sets the gradients instead of adding to them
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as those that log, may go on with the device meanwhile.
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                numbers = self.plain(self.batch)
        except RuntimeError as error:
            raise ValueError(
                f"the step cannot be recorded: {error} (a model that waits for the device or copies to it inside its "
                "forward pass cannot); set run.cuda_graph=false"
            ) from error
        self.numbers = {name: value.detach() for name, value in numbers.items()}
        self.gradients = [parameter.grad for parameter in self.parameters]
