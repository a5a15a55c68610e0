"""How the Triton kernels divide their work: a table by shape class, tuned on an H200.

A choice depends only on numbers that are known at compile time, not on measurements, so eager calls and torch.compile
run the same kernels. benchmarks/tune_tiles.py searches for better entries.
"""

import functools
from typing import NamedTuple

import torch

from sima_attn.ops.cost import choose_order

LARGEST_HEAD = 256
# A head is one program up to this many tokens, for any batch size: splitting costs a second launch.
FEW_TOKENS = 256
# Where the heads fill the chip, the forward is one program per head up to this many tokens.
FEW_TOKENS_OF_MANY_HEADS = 2048
# The whole state of a head must fit the registers of one program; by bytes per number of the inputs.
LARGEST_STATE = {2: 128 * 128, 4: 64 * 64}
SMALLEST_SHARE = 128  # fewest tokens per share
PROGRAMS = 1.25  # programs per multiprocessor that sum over shares of the tokens; more would write more shares
# Up to this many tokens x heads, narrow heads have few shares, and each program that needs their sum adds them itself:
# a third launch would cost more than reading the shares again.
SMALL_CALL = 2**16
NARROW_HEAD = 64
FEW_SHARES = 8


class Tile(NamedTuple):
    """Tokens per tile, output columns per program, tiles per program, and options of the compiler."""

    rows: int
    warps: int
    stages: int = 2
    columns: int = 64
    tiles: int = 4
    registers: int | None = None


class Problem(NamedTuple):
    """The properties of a call that the choice of a tile depends on."""

    tokens: int
    width: int  # the larger of the two padded channel counts
    itemsize: int
    fills_chip: bool  # there are several heads per multiprocessor
    shared_memory: int  # bytes per program
    converted: bool = False  # factors of products are stored again in float32, as for float16 inputs


def padded(size: int) -> int:
    """The next power of two, at least 16: the sizes that tensor cores support."""
    return max(16, 1 << (size - 1).bit_length())


def cdiv(total: int, size: int) -> int:
    """total / size, rounded up."""
    return -(-total // size)


def fits_one_tile(N: int, M: int, D: int, Dv: int, itemsize: int) -> bool:
    """True where all tokens of a head and the products of the "qk" order fit one tile."""
    tokens, width = max(N, M), padded(max(D, Dv))
    if itemsize > 2:
        return tokens <= 64 and width <= 64
    return tokens <= (128 if width <= 64 else 64)


def order_on_gpu(N: int, M: int, D: int, Dv: int, itemsize: int) -> str:
    """The order of "auto" for the kernels: "qk" where it is cheaper and all tokens fit one tile, else "kv".

    Memory traffic matters more than multiplications on a GPU, and beyond one tile "kv" reads k and v only once.
    """
    return choose_order(N, M, D, Dv) if fits_one_tile(N, M, D, Dv, itemsize) else "kv"


def count_shares(tokens: int, heads: int, multiprocessors: int, *, narrow: bool) -> tuple[int, bool]:
    """The number of shares of a head's tokens, and whether they are few enough for two launches."""
    by_tokens, by_heads = cdiv(tokens, SMALLEST_SHARE), cdiv(int(PROGRAMS * multiprocessors), heads)
    wanted = by_tokens if by_tokens <= by_heads else by_heads
    if narrow and tokens * heads <= SMALL_CALL:
        # Few different values, because the kernels are compiled for each.
        return next((few for few in (1, 2, 4) if wanted <= few), FEW_SHARES), True
    return wanted, False


def choose_tile(kernel: str, problem: Problem) -> Tile:
    """The best known tile whose buffers fit into shared memory."""
    tiles = _candidates(kernel, problem)
    for tile in tiles:
        fetched = 3 * tile.stages * tile.rows * problem.width * problem.itemsize  # three tensors per stage
        factors = 4 * (tile.rows + tile.columns) * problem.width if problem.converted else 0
        if fetched + factors <= problem.shared_memory:
            return tile
    return tiles[-1]


def _candidates(kernel: str, problem: Problem) -> list[Tile]:
    """Tiles for a kernel: the best known one first, those with little shared memory last."""
    wide = problem.width * problem.itemsize > 64 * 2  # a row of a tile takes more than 128 bytes
    if problem.width > 64 and problem.itemsize == 2:
        return [Tile(64, warps=8), Tile(32, warps=8), Tile(16, warps=8, stages=1)]
    if problem.width > 64:
        return [Tile(32, warps=8, columns=32), Tile(16, warps=8, stages=1, columns=32)]
    if wide and kernel.endswith("backward"):
        return [Tile(32, warps=4), Tile(32, warps=4, stages=1), Tile(16, warps=4, stages=1)]
    if kernel == "forward_head":
        return _forward_head_candidates(problem, wide)
    return {
        "backward_head": [Tile(64, warps=4, stages=3), Tile(32, warps=4), Tile(32, warps=4, stages=1)],
        "outer_products": [Tile(32, warps=4, stages=4), Tile(32, warps=4)],
        "apply_forward": [Tile(64, warps=4, stages=3), Tile(64, warps=4), Tile(32, warps=4)],
        "apply_backward": [Tile(64, warps=4, stages=3), Tile(32, warps=4), Tile(32, warps=4, stages=1)],
        "attend": [Tile(64, warps=4)],
        "attend_backward": [Tile(64, warps=4)],
    }[kernel]


def _forward_head_candidates(problem: Problem, wide: bool) -> list[Tile]:
    small = [Tile(64, warps=4), Tile(32, warps=4)]
    for rows in (16, 32, 64):
        if problem.tokens <= rows:
            return [Tile(rows, warps=2 if problem.itemsize == 2 else 4, stages=1), *small]
    if problem.tokens <= 256 and not problem.fills_chip and not wide:
        return [Tile(128 if problem.tokens <= 128 else 256, warps=4, stages=1, registers=168), *small]
    if problem.tokens <= 256:
        narrow = [] if wide else [Tile(128, warps=4, registers=128)]
        return [*narrow, Tile(64, warps=4, stages=3, registers=128), *small]
    return [Tile(64, warps=4, stages=3, registers=168), *small]


class Chip(NamedTuple):
    """Limits of a GPU: multiprocessors, and bytes of shared memory per program."""

    multiprocessors: int
    shared_memory: int


@functools.cache
def chip(device: torch.device) -> Chip:
    """The limits of a device. The interpreter gets few multiprocessors, so that heads are split there too."""
    if device.type != "cuda":
        return Chip(4, 2**20)
    properties = torch.cuda.get_device_properties(device)
    return Chip(properties.multi_processor_count, properties.shared_memory_per_block_optin)
