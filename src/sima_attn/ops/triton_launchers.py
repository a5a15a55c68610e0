"""How Triton kernels are launched: recorded and repeated in eager calls, or in the graph of torch.compile.

`forward` and `backward` of triton_launch.py take a launcher. `TracedLauncher` launches in a way that torch.compile
sees. `Recording` launches at once and can repeat the launches for other tensors of the same description: an eager call
then costs one allocation per output and one call of the driver per kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
import triton
from torch import Tensor

from sima_attn.ops.triton_tiles import Tile

INTERPRETED = triton.knobs.runtime.interpret


class TracedLauncher:
    """Launches for the torch operators: torch.compile traces them into its graph."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        # mode="reduce-overhead" and "max-autotune" of torch.compile record the launches in a CUDA graph.
        self.called_from_python = not inductor_config.triton.cudagraphs

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that kernels fill completely before anything reads it."""
        return self.like.new_empty(shape, dtype=dtype)

    def launch(self, kernel: Any, grid: tuple, tensors: Sequence, numbers: Sequence, tile: Tile, **constants) -> None:
        """kernel[grid](*tensors, *numbers, **constants), compiled with the options of the tile."""
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        if INTERPRETED:
            if type(tensors[0]) in (Tensor, torch.nn.Parameter):  # there is nothing to compute with fake tensors
                kernel[grid](*tensors, *numbers, **constants, **options)
            return
        if tile.registers is not None:  # torch.compile takes a limit on the registers from an autotuner only
            config = triton.Config({}, maxnreg=tile.registers, **options)
            kernel, options = triton.autotune(configs=[config], key=[])(kernel), {}
        torch.library.wrap_triton(kernel)[grid](*tensors, *numbers, **constants, **options)


class Recording:
    """The allocations and launches of one call, to be repeated for other tensors of the same description.

    Triton inspects every argument to find the compiled kernel, which takes longer than a kernel of a small model runs.
    A repetition passes plain addresses to the compiled kernel. `triton_support.describe` covers everything that
    Triton's choice depends on.
    """

    called_from_python = True

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._tensors = list(inputs)
        self._allocations: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._steps: list[Callable[[list, int], object]] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """As in `TracedLauncher`."""
        self._allocations.append((shape, dtype))
        self._tensors.append(self._tensors[0].new_empty(shape, dtype=dtype))
        return self._tensors[-1]

    def launch(self, kernel: Any, grid: tuple, tensors: Sequence, numbers: Sequence, tile: Tile, **constants) -> None:
        """As in `TracedLauncher`."""
        # None is the last of the arguments of a repetition.
        places = [-1 if t is None else next(i for i, known in enumerate(self._tensors) if known is t) for t in tensors]
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
        compiled = kernel[grid](*tensors, *numbers, **constants, **options)
        if INTERPRETED:
            self._steps.append(lambda args, _: kernel[grid](*[args[i] for i in places], *numbers, **constants))
            return
        # Compiled kernels take constants too, by position.
        fixed = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))
        run, function, metadata, (x, y, z) = compiled.run, compiled.function, compiled.packed_metadata, grid

        def step(args: list, stream: int) -> None:
            run(x, y, z, stream, function, metadata, None, None, None, *[args[i] for i in places], *fixed)

        self._steps.append(step)

    def finish(self) -> list[Tensor]:
        """The tensors that were allocated, in order. The recording keeps none of them."""
        tensors, self._tensors = self._tensors, []
        return tensors[len(tensors) - len(self._allocations) :]

    def repeat(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run everything again for other inputs; returns the tensors that are allocated, in order."""
        first = inputs[0]
        outputs = [first.new_empty(shape, dtype=dtype) for shape, dtype in self._allocations]
        arguments: list[Any] = [*inputs, *outputs]
        stream = 0
        if not INTERPRETED:
            device = first.get_device()
            if device != torch.cuda.current_device():  # kernels are launched on the current one
                with torch.cuda.device(device):
                    return self.repeat(inputs)
            arguments = [t.data_ptr() for t in arguments]
            stream = torch._C._cuda_getCurrentRawStream(device)
        arguments.append(None)
        for step in self._steps:
            step(arguments, stream)
        return outputs


class Recordings(dict[Hashable, Recording]):
    """The recordings of calls that differ only in what their keys say."""

    def run(self, key: Hashable, inputs: Sequence[Tensor], launch: Callable[[Recording], object]) -> list[Tensor]:
        """Repeat the recording of that key, or make it; returns the tensors that are allocated."""
        if (recording := self.get(key)) is not None:
            return recording.repeat(inputs)
        recording = Recording(inputs)
        with device_of(inputs[0]):
            launch(recording)
        if len({id(t) for t in inputs}) == len(inputs):  # a tensor that is passed twice has one place for both
            self[key] = recording
        return recording.finish()


def device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """A context in which kernels are launched on the device of x: they run on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


Launcher = TracedLauncher | Recording
