"""How the Triton kernels divide their work: a table by shape class, tuned on an H200.

A choice depends only on numbers that are known at compile time, not on measurements, so eager calls and torch.compile
run the same kernels. benchmarks/tune_tiles.py searches for better entries.
"""

import functools
from typing import NamedTuple

import torch

from sima_attn.ops.cost import choose_order

LARGEST_HEAD = 256
# One launch computes everything up to this many tokens, for any batch size and dtype.
FEW_TOKENS = 256
# The forward takes one launch for longer. Where heads are few, several programs share the outputs of a head, and each
# of them sums over all tokens: up to FEW_TOKENS_RECORDED that takes less time on the device than a second launch, up to
# FEW_TOKENS_CALLED less than a second launch from Python.
FEW_TOKENS_RECORDED = 640
FEW_TOKENS_CALLED = 1088
# The same where the heads fill the chip with one program each, and for wide heads, whose shares are large.
FEW_TOKENS_OF_LARGE_CALLS = 2048
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
    heads: int  # of the whole batch
    width: int  # the larger of the two padded channel counts
    itemsize: int
    multiprocessors: int
    shared_memory: int  # bytes per program
    converted: bool = False  # factors of products are stored again in float32, as for float16 inputs

    @property
    def fills_chip(self) -> bool:
        """There are several heads per multiprocessor."""
        return self.heads >= 2 * self.multiprocessors

    @property
    def parts(self) -> int:
        """Parts of the columns of a head that programs of their own compute: several where heads are very few."""
        return next((parts for parts in (4, 2) if 4 * parts * self.heads <= self.multiprocessors), 1)


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


def tiles_per_program(tiles: int, columns: int, multiprocessors: int) -> int:
    """Tiles of outputs per program of `forward_head`, where `columns` counts the blocks of columns of all heads.

    There is at most one program per multiprocessor where several share a head: each of them sums over all tokens.
    """
    return cdiv(tiles, max(1, multiprocessors // columns))


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
        small = [Tile(64, warps=8), Tile(32, warps=8), Tile(16, warps=8, stages=1)]
        if kernel == "relu2_sums_backward":  # two matrices of a head are kept
            return small[1:]
        if kernel != "forward_head":
            return small
        if problem.heads >= problem.multiprocessors:  # half of the columns would read q and k twice
            return [tile._replace(columns=128) for tile in (Tile(64, warps=4, stages=3), *small)]
        return [Tile(64, warps=8, stages=4), *small]
    if problem.width > 64:
        return [Tile(32, warps=8, columns=32), Tile(16, warps=8, stages=1, columns=32)]
    if wide and kernel.endswith("backward"):
        return [Tile(32, warps=4), Tile(32, warps=4, stages=1), Tile(16, warps=4, stages=1)]
    if kernel == "forward_head":
        return _forward_head_candidates(problem, wide)
    small_call = not wide and problem.tokens * problem.heads <= SMALL_CALL
    return {
        "backward_head": [Tile(64, warps=4, stages=3), Tile(32, warps=4), Tile(32, warps=4, stages=1)],
        "outer_products": [Tile(32, warps=4, stages=4, columns=32 if problem.parts == 4 else 64), Tile(32, warps=4)],
        "apply_forward": [
            *([_small_apply_tile(problem)] if small_call else [Tile(64, warps=4, stages=3)]),
            Tile(64, warps=4),
            Tile(32, warps=4),
        ],
        "apply_backward": [Tile(64, warps=4, stages=3), Tile(32, warps=4), Tile(32, warps=4, stages=1)],
        "relu2_sums_backward": [Tile(64, warps=4), Tile(32, warps=4), Tile(32, warps=4, stages=1)],
        "relu2_apply_backward": [Tile(64, warps=4, stages=3), Tile(32, warps=4), Tile(32, warps=4, stages=1)],
        "attend": [Tile(64, warps=4)],
        "attend_backward": [Tile(64, warps=4)],
    }[kernel]


def _small_apply_tile(problem: Problem) -> Tile:
    """Half of the columns per program; two tiles of tokens where that gives at most two programs per multiprocessor."""
    tile = Tile(64, warps=4, columns=32, tiles=2)
    programs = problem.heads * 2 * cdiv(problem.tokens, tile.rows * tile.tiles)
    return tile if programs <= 2 * problem.multiprocessors else tile._replace(tiles=4)


def _forward_head_candidates(problem: Problem, wide: bool) -> list[Tile]:
    small = [Tile(64, warps=4), Tile(32, warps=4)]
    for rows in (16, 32, 64):
        if problem.tokens <= rows:
            return [Tile(rows, warps=2 if problem.itemsize == 2 else 4, stages=1), *small]
    if not wide and not problem.fills_chip:
        if problem.parts > 1 and problem.tokens > 128:
            return [Tile(64, warps=4, stages=3, columns=64 // problem.parts), *small]
        if problem.tokens <= 256:
            return [Tile(128 if problem.tokens <= 128 else 256, warps=4, stages=1, registers=168), *small]
        return [Tile(64, warps=4, stages=3), *small]
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
