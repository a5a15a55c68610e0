"""Which tile each Triton kernel works with: a table for Hopper, a short search on every other chip.

A `Tile` says how many tokens a program takes at a time and how the compiler may spend registers and shared memory.
The first candidate that fits is what an H200 does best with (benchmarks/results/gpu.csv was measured with it); on
another chip the candidates are timed on the first call of a size, a few milliseconds and one compilation each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton

TABLE_CAPABILITY = (9, 0)
TIMED_CALLS = 5


class Tile(NamedTuple):
    """Tokens a tile, columns of the output a program, tiles a program, and what the compiler is told."""

    rows: int
    warps: int
    stages: int = 2
    columns: int = 64
    tiles: int = 4
    registers: int | None = None

    def compiler_options(self) -> dict[str, int | None]:
        """The part that Triton takes as launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


class Problem(NamedTuple):
    """What the choice of a tile depends on."""

    tokens: int
    heads: int
    width: int  # the larger of the two padded channel counts
    itemsize: int
    fills_chip: bool  # there are several heads for every multiprocessor


def power_of_two(size: int) -> int:
    """The least one that is not below size."""
    return 1 << (size - 1).bit_length()


def candidates(kernel: str, problem: Problem) -> list[Tile]:
    """Tiles for a kernel, the best known one first, the frugal ones last."""
    wide = problem.width * problem.itemsize > 64 * 2  # a row of a tile takes more than 128 bytes
    if problem.width > 64 and problem.itemsize == 2:
        return [Tile(64, warps=8), Tile(32, warps=8), Tile(16, warps=8, stages=1)]
    if problem.width > 64:
        return [Tile(32, warps=8, columns=32), Tile(16, warps=8, stages=1, columns=32)]
    if wide and kernel.endswith("backward"):
        return [Tile(32, warps=4), Tile(32, warps=4, stages=1), Tile(16, warps=4, stages=1)]
    if kernel == "forward_head":
        whole = max(16, power_of_two(problem.tokens))
        if whole <= 64:
            return [Tile(whole, warps=2 if problem.itemsize == 2 else 4), Tile(whole, warps=4), Tile(32, warps=4)]
        if whole <= 256 and not problem.fills_chip and not wide:
            return [Tile(whole, warps=4, registers=168), Tile(64, warps=4, stages=3), Tile(32, warps=4)]
        if whole <= 256:
            best = [Tile(128, warps=4, registers=128), Tile(64, warps=4, stages=3, registers=128)]
            return [*(best[1:] if wide else best), Tile(64, warps=4), Tile(32, warps=4)]
        return [Tile(64, warps=4, stages=3, registers=168), Tile(64, warps=4), Tile(32, warps=4)]
    return {
        "backward_head": [Tile(64, warps=4, stages=3), Tile(32, warps=4), Tile(32, warps=4, stages=1)],
        "outer_products": [Tile(32, warps=4, stages=4), Tile(64, warps=4, stages=3), Tile(32, warps=4)],
        "apply_forward": [Tile(64, warps=4, stages=3), Tile(64, warps=4), Tile(32, warps=4)],
        "apply_backward": [Tile(64, warps=4, stages=3), Tile(32, warps=4), Tile(32, warps=4, stages=1)],
        "attend": [Tile(64, warps=4), Tile(32, warps=4), Tile(16, warps=4, stages=1)],
        "attend_backward": [Tile(64, warps=4), Tile(32, warps=8)],
    }[kernel]


_chosen: dict[tuple, Tile] = {}  # for problems alike
_known: dict[tuple, Tile] = {}  # for the very problem, to be found at once: a call must not wait for Python
forced: dict[str, Tile] = {}  # a kernel's name -> the tile it must take; benchmarks/tune_tiles.py tries them so


def launch_with_best_tile(kernel: str, problem: Problem, device: torch.device, launch: Callable[[Tile], None]) -> None:
    """Call `launch` with the best tile, which is looked up, or found by trying on the first call of a size."""
    tile = forced.get(kernel) or _known.get((kernel, problem, device))
    if tile is None:
        # Sizes between two powers of two share a choice, so that a new image size does not search again.
        key = (kernel, problem._replace(tokens=power_of_two(problem.tokens), heads=0), device)
        if key not in _chosen:
            _chosen[key] = _choose(candidates(kernel, problem), device, launch)
        tile = _known[kernel, problem, device] = _chosen[key]
    launch(tile)


def _choose(tiles: list[Tile], device: torch.device, launch: Callable[[Tile], None]) -> Tile:
    in_table = device.type != "cuda" or torch.cuda.get_device_capability(device) == TABLE_CAPABILITY
    if in_table or torch.cuda.is_current_stream_capturing():
        return next((tile for tile in tiles if _fits(tile, launch)), tiles[-1])
    timed = {tile: _milliseconds(tile, launch) for tile in tiles if _fits(tile, launch)}
    return min(timed, key=lambda tile: timed[tile]) if timed else tiles[-1]


def _fits(tile: Tile, launch: Callable[[Tile], None]) -> bool:
    """True where the kernel compiles and the chip has the shared memory for it. The launch writes what it must."""
    try:
        launch(tile)
    except triton.runtime.errors.OutOfResources:
        return False
    return True


def _milliseconds(tile: Tile, launch: Callable[[Tile], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(TIMED_CALLS):
        launch(tile)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side at least; the interpreter gets a few, so that heads are split there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
