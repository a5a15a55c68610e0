"""What launches Triton kernels: at once, from a recording, or in a graph of torch.compile.

`forward` and `backward` of triton_launch.py are written against a `Launcher`. `TracedLauncher` launches in a way that
torch.compile sees. `Recording` launches at once and can repeat what it saw for other tensors of the same description:
an eager call then costs one allocation per output and one call of the driver per kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from sima_attn.ops.triton_tiles import Tile

INTERPRETED = triton.knobs.runtime.interpret


class Launcher(Protocol):
    """Allocates memory and launches kernels."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory that kernels fill completely before anything reads it."""

    def launch(self, kernel: Any, grid: tuple, tensors: Sequence, numbers: Sequence, tile: Tile, **constants) -> None:
        """kernel[grid](*tensors, *numbers, **constants), compiled with the options of the tile."""


class TracedLauncher:
    """Launches for the torch operators: what torch.compile traces into its graph."""

    def __init__(self, like: Tensor) -> None:
        self.like = like

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `Launcher`."""
        return self.like.new_empty(shape, dtype=dtype)

    def launch(self, kernel: Any, grid: tuple, tensors: Sequence, numbers: Sequence, tile: Tile, **constants) -> None:
        """See `Launcher`."""
        if not INTERPRETED:
            kernel = torch.library.wrap_triton(_with_registers(kernel, tile))
        elif type(tensors[0]) is not Tensor and type(tensors[0]) is not torch.nn.Parameter:
            return  # the interpreter has nothing to compute with fake tensors
        options = {} if tile.registers else {"num_warps": tile.warps, "num_stages": tile.stages}
        kernel[grid](*tensors, *numbers, **constants, **options)


def _with_registers(kernel: Any, tile: Tile) -> Any:
    """The kernel with a limit on its registers, an option that torch.compile takes from an autotuner only."""
    if tile.registers is None:
        return kernel
    config = triton.Config({}, num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers)
    return triton.autotune(configs=[config], key=[])(kernel)


class Recording:
    """The allocations and launches of one call, to be repeated for other tensors of the same description.

    Triton inspects every argument to find the compiled kernel, which takes longer than a kernel of a small model runs.
    A repetition passes plain addresses to the compiled kernel. `triton_support.describe` has everything that Triton's
    choice depends on.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._tensors = list(inputs)
        self._allocations: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._steps: list[Callable[[list, int], object]] = []

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """See `Launcher`."""
        self._allocations.append((shape, dtype))
        self._tensors.append(self._tensors[0].new_empty(shape, dtype=dtype))
        return self._tensors[-1]

    def launch(self, kernel: Any, grid: tuple, tensors: Sequence, numbers: Sequence, tile: Tile, **constants) -> None:
        """See `Launcher`."""
        # None is the last of the arguments of a repetition.
        places = [-1 if t is None else next(i for i, known in enumerate(self._tensors) if known is t) for t in tensors]
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers}
        compiled = kernel[grid](*tensors, *numbers, **constants, **options)
        if INTERPRETED:
            step = _interpreted_step(kernel, grid, places, numbers, constants)
        else:
            # Compiled kernels take constants too, by position.
            fixed = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))
            step = _compiled_step(compiled, grid, places, fixed)
        self._steps.append(step)

    def finish(self) -> list[Tensor]:
        """The tensors that were allocated, in order. The recording keeps none of them."""
        tensors, self._tensors = self._tensors, []
        return tensors[len(tensors) - len(self._allocations) :]

    def repeat(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Everything again, for other inputs; returns what is allocated, in order."""
        first = inputs[0]
        outputs = [first.new_empty(shape, dtype=dtype) for shape, dtype in self._allocations]
        arguments: list[Tensor | int | None]
        if INTERPRETED:
            arguments, stream = [*inputs, *outputs, None], 0
        else:
            device = first.get_device()
            if device != torch.cuda.current_device():  # kernels are launched on the current one
                with torch.cuda.device(device):
                    return self.repeat(inputs)
            arguments = [t.data_ptr() for t in (*inputs, *outputs)]
            arguments.append(None)
            stream = torch._C._cuda_getCurrentRawStream(device)
        for step in self._steps:
            step(arguments, stream)
        return outputs


def _compiled_step(compiled: Any, grid: tuple, places: list[int], fixed: tuple) -> Callable[[list, int], object]:
    run, function, metadata, (x, y, z) = compiled.run, compiled.function, compiled.packed_metadata, grid

    def step(arguments: list, stream: int) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *[arguments[i] for i in places], *fixed)

    return step


def _interpreted_step(kernel, grid, places: list[int], numbers, constants) -> Callable[[list, int], object]:
    return lambda arguments, stream: kernel[grid](*[arguments[i] for i in places], *numbers, **constants)
