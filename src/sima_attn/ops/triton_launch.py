"""Which Triton kernels compute SimA and relu2, on which grids, with which memory.

Few tokens take one launch. With many tokens there are two launches: the first sums over shares of the tokens, the
second computes the outputs. A third one in between adds the shares where they are many. Where the tokens are split over
processes, the `..._of_part` functions launch the same kernels on each side of an all-reduce. relu2 has the forward of
SimA's "kv" order and a backward of its own, always in two or three launches.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, DV value channels per head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sima_attn.ops import triton_kernels as kernels
from sima_attn.ops import triton_relu2_kernels as relu2_kernels
from sima_attn.ops import triton_tiles as tiles
from sima_attn.ops.triton_launchers import Launcher
from sima_attn.ops.triton_tiles import Problem, Tile, cdiv, choose_tile, padded

PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "tf32x3"}
NARROW = 32  # so few channels multiply in full float32 without tensor cores, which is a little more accurate
FINISH_ROWS = 4  # rows of the state that one program adds up, half as many where heads are few


class Inputs(NamedTuple):
    """Inputs of the kernels. If q is a packed tensor, k and v are None and start at `offsets` in it."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    query_mask: Tensor | None  # [B, N] bytes
    key_mask: Tensor | None  # [B, M] bytes
    gains: Tensor | None  # factor on the output per image, [B] float32; None: `gain` for all images
    gain: float
    eps: float
    offsets: tuple[int, int]  # of k and v
    strides: tuple[int, ...]  # (batch, head, token) of q, k and v
    B: int
    H: int
    N: int
    M: int
    D: int
    DV: int
    kind: str = "sima"  # or "relu2"

    @property
    def heads(self) -> int:
        """Heads of the whole batch."""
        return self.B * self.H

    @property
    def tokens(self) -> int:
        """Rows of the longer one of q and k."""
        return max(self.N, self.M)

    @property
    def blocks(self) -> tuple[int, int]:
        """The padded channel counts."""
        return padded(self.D), padded(self.DV)

    @property
    def row_shape(self) -> tuple[int, int]:
        """A matrix [D, DV] and two vectors [D] per head: the state that the forward keeps."""
        return self.heads, self.D * self.DV + 2 * self.D

    @property
    def chip(self) -> tiles.Chip:
        """Limits of the device."""
        return tiles.chip(self.q.device)

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of the kernels that multiply."""
        (block_d, block_v), dtype = self.blocks, self.q.dtype
        precision = "ieee" if dtype == torch.float32 and max(self.blocks) <= NARROW else PRECISION[dtype]
        return {"D": self.D, "DV": self.DV, "BLOCK_D": block_d, "BLOCK_V": block_v, "PRECISION": precision}


# query_mask, key_mask, gains, gain and eps of the inputs
Options = tuple[Tensor | None, Tensor | None, Tensor | None, float, float]


def read_inputs(tensors: Sequence[Tensor], *options: *Options, kind: str = "sima") -> Inputs:
    """Inputs of q [B, H, N, D], k [B, H, M, D] and v [B, H, M, DV], or of one packed tensor [B, N, 3, H, D]."""
    if len(tensors) == 1:
        (qkv,) = tensors
        B, N, _, H, D = qkv.shape
        batch, token, which, head, _ = qkv.stride()
        return Inputs(qkv, None, None, *options, (which, 2 * which), (batch, head, token) * 3, B, H, N, N, D, D, kind)
    q, k, v = tensors
    B, H, N, D = q.shape
    strides = tuple(stride for t in tensors for stride in t.stride()[:3])
    return Inputs(q, k, v, *options, (0, 0), strides, B, H, N, k.shape[2], D, v.shape[3], kind)


def forward(launcher: Launcher, x: Inputs, *, order: str, keep: bool) -> tuple[Tensor, Tensor | None]:
    """(o [B, N, H, DV], state), the first two tensors allocated. The gradient needs the state; None unless `keep`."""
    o = launcher.empty(x.B, x.N, x.H, x.DV, dtype=x.q.dtype)
    if order == "kv" and not _forward_is_one_launch(x, launcher.called_from_python):
        return o, _forward_split(launcher, x, o, keep)
    state = launcher.empty(*((x.heads, 2 * x.D) if order == "qk" else x.row_shape)) if keep else None
    kernel = kernels.attend if order == "qk" else kernels.forward_head
    tile = _tile(kernel, x)
    sizes, grid, own = [x.H, x.N, x.M], (x.heads, 1, 1), x.constants
    if order == "qk":
        own |= _whole_blocks(x)
    else:
        columns, count = min(padded(x.DV), tile.columns), cdiv(x.N, tile.rows)
        parts = cdiv(x.DV, columns)
        sizes.append(tiles.tiles_per_program(count, x.heads * parts, x.chip.multiprocessors))
        grid = (x.heads, cdiv(count, sizes[-1]), parts)
        own |= {"BLOCK_N": tile.rows, "BLOCK_V": columns, "SUM_ROWS": _sum_rows(x, tile)}
        # Where the two widths differ, ptxas of CUDA 12.8 (Triton 3.6) computes the address of W from a register that
        # nothing has written, unless there is a loop: wrong results, or illegal accesses.
        own |= {"STAGES": tile.stages, "WHOLE": x.tokens <= tile.rows and x.blocks[0] == x.blocks[1], "KIND": x.kind}
    launcher.launch(
        kernel, grid,
        (x.q, x.k, x.v, o, state, x.query_mask, x.key_mask, x.gains),
        (*x.offsets, x.gain, x.eps, *sizes, *x.strides, x.H * x.DV),
        tile, KEEP=keep, **own,
    )  # fmt: skip
    return o, state


def _forward_split(launcher: Launcher, x: Inputs, o: Tensor, keep: bool) -> Tensor | None:
    """Fill o in two launches, or three where the shares are many. Returns the state."""
    splits, few = _count_shares(x)
    state = launcher.empty(*x.row_shape) if keep or not few else None
    shares = _sum_shares(launcher, x, splits)
    if not few:
        _finish(launcher, kernels.finish_forward, (shares, state), splits, x, KIND=x.kind)
    _apply_forward(launcher, x, o, shares, state, splits=splits if few else 0, keep=keep)
    return state


def _apply_forward(
    launcher: Launcher, x: Inputs, o: Tensor, shares: Tensor | None, state: Tensor | None, *, splits: int, keep: bool
) -> None:
    """Fill o from that many shares, or from W in the state where `splits` is 0."""
    tile = _tile(kernels.apply_forward, x)
    columns = min(padded(x.DV), tile.columns)
    launcher.launch(
        kernels.apply_forward, (x.heads, cdiv(x.N, tile.rows * tile.tiles), cdiv(x.DV, columns)),
        (x.q, o, shares, state, x.query_mask, x.gains),
        (x.gain, x.eps, x.heads, x.H, x.N, tile.tiles, *x.strides[:3], x.H * x.DV),
        tile, BLOCK_N=tile.rows, SPLITS=splits, KEEP=keep, KIND=x.kind, **{**x.constants, "BLOCK_V": columns},
    )  # fmt: skip


def _count_shares(x: Inputs) -> tuple[int, bool]:
    """Number of shares, and whether they are few."""
    narrow = x.blocks[0] == x.blocks[1] <= tiles.NARROW_HEAD
    return tiles.count_shares(x.tokens, x.heads, x.chip.multiprocessors, narrow=narrow)


def _sum_shares(launcher: Launcher, x: Inputs, splits: int, do: Tensor | None = None) -> Tensor:
    """Shares of K^T V and of both norms; with dO those of Q^T dO, without norms."""
    tensors: tuple[Tensor | None, ...]
    q_strides = x.strides[:3]
    if do is None:
        tensors = (x.q, None, None) if x.k is None else (x.k, x.v, x.q)
        offsets, strides, rows = x.offsets, (*x.strides[3:], *q_strides), (x.M, x.N)
        masks = x.key_mask, x.query_mask
    else:
        tensors = (x.q, do, None)
        offsets, strides, rows = (0, 0), (*q_strides, *_head_strides(do), *q_strides), (x.N, x.N)
        masks = x.query_mask, x.query_mask
    shares = launcher.empty(splits, *x.row_shape)
    tile = _tile(kernels.outer_products, x)
    columns = min(padded(x.DV), tile.columns)
    launcher.launch(
        kernels.outer_products, (x.heads, splits, cdiv(x.DV, columns)),
        (*tensors, shares, *masks), (*offsets, x.heads, x.H, *rows, splits, *strides),
        tile, BLOCK_N=tile.rows, SUM_ROWS=_sum_rows(x, tile), STAGES=tile.stages, NORMS=do is None, KIND=x.kind,
        **{**x.constants, "BLOCK_V": columns},
    )  # fmt: skip
    return shares


def _finish(
    launcher: Launcher, kernel: Any, rows: tuple[Tensor | None, ...], splits: int, x: Inputs, **constants: str
) -> None:
    few_heads = x.heads * cdiv(x.D, FINISH_ROWS) < x.chip.multiprocessors
    count = FINISH_ROWS // 2 if few_heads else FINISH_ROWS
    launcher.launch(
        kernel, (x.heads, cdiv(x.D, count), 1), (*rows, x.gains),
        (x.gain, x.eps, x.heads, x.H, splits), Tile(count, warps=4),
        D=x.D, DV=x.DV, ROWS=count, BLOCK_V=padded(x.DV), AT_ONCE=4 if splits <= 4 else 16, **constants,
    )  # fmt: skip


def backward(launcher: Launcher, x: Inputs, do: Tensor, state: Tensor, *, order: str) -> Tensor:
    """The gradients of q, k and v in one flat tensor, the first one allocated; `split_grads` returns views of it.

    do is [B, N, H, DV] with contiguous channels.
    """
    if x.kind == "relu2":
        return _relu2_backward(launcher, x, do, state)
    grads = _empty_grads(launcher, x)
    if order == "qk" or _is_one_launch(x, tiles.FEW_TOKENS):
        kernel = kernels.attend_backward if order == "qk" else kernels.backward_head
        tile = _tile(kernel, x)
        own = _whole_blocks(x) if order == "qk" else {"BLOCK_N": tile.rows, "WHOLE": tile.rows >= x.N}
        offsets, strides = _offsets_and_strides(x, do)
        launcher.launch(
            kernel, (x.heads, 1, 1), (x.q, x.k, x.v, do, grads, state, x.query_mask, x.key_mask, x.gains),
            (*offsets, x.gain, x.eps, x.H, x.N, x.M, *strides), tile, **own, **x.constants,
        )  # fmt: skip
        return grads

    splits, few = _count_shares(x)
    shares = _sum_shares(launcher, x, splits, do)
    sums = None if few else launcher.empty(*x.row_shape)
    if not few:
        _finish(launcher, kernels.finish_backward, (shares, state, sums), splits, x)
    _apply_backward(launcher, x, do, grads, shares, state, sums, splits=splits if few else 0)
    return grads


def _empty_grads(launcher: Launcher, x: Inputs) -> Tensor:
    """Memory for the gradients of q, k and v."""
    C, CV = x.H * x.D, x.H * x.DV
    return launcher.empty(x.B * (x.N * C + x.M * (C + CV)), dtype=x.q.dtype)


def _offsets_and_strides(x: Inputs, do: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where k and v begin in a packed tensor, and dk and dv in the gradients; strides of all inputs and gradients."""
    C, CV = x.H * x.D, x.H * x.DV
    if x.k is None:
        dk_dv_offsets, token_strides = (C, 2 * C), (3 * C, 3 * C, 3 * C)
    else:
        dk_dv_offsets, token_strides = (x.B * x.N * C, x.B * (x.N + x.M) * C), (C, C, CV)
    return (*x.offsets, *dk_dv_offsets), (*x.strides, *_head_strides(do), *token_strides)


def _apply_backward(
    launcher: Launcher, x: Inputs, do: Tensor, grads: Tensor, shares: Tensor | None, state: Tensor,
    sums: Tensor | None, *, splits: int,
) -> None:  # fmt: skip
    """Fill the gradients from that many shares, or from `sums` where `splits` is 0."""
    tile = _tile(kernels.apply_backward, x)
    columns = min(max(x.blocks), tile.columns)
    offsets, strides = _offsets_and_strides(x, do)
    launcher.launch(
        kernels.apply_backward,
        (x.heads, cdiv(x.tokens, tile.rows * tile.tiles), cdiv(max(x.D, x.DV), columns)),
        (x.q, x.k, x.v, do, grads, shares, state, sums, x.query_mask, x.key_mask, x.gains),
        (*offsets, x.gain, x.eps, x.heads, x.H, x.N, x.M, tile.tiles, *strides),
        tile, BLOCK_C=columns, BLOCK_N=tile.rows, SPLITS=splits, **x.constants,
    )  # fmt: skip


def _relu2_backward(launcher: Launcher, x: Inputs, do: Tensor, state: Tensor) -> Tensor:
    """As `backward`, for relu2."""
    grads = _empty_grads(launcher, x)
    splits, few = _count_shares(x)
    shares, numbers = launcher.empty(splits, *x.row_shape), launcher.empty(x.heads, 2, x.N)
    offsets, strides = _offsets_and_strides(x, do)
    tile = _tile(relu2_kernels.relu2_sums_backward, x)
    launcher.launch(
        relu2_kernels.relu2_sums_backward, (x.heads, splits, 1), (x.q, do, shares, state, numbers),
        (x.eps, x.heads, x.H, x.N, splits, *x.strides[:3], *_head_strides(do)),
        tile, BLOCK_N=tile.rows, **x.constants,
    )  # fmt: skip
    sums = None if few else launcher.empty(*x.row_shape)
    if sums is not None:
        _finish(launcher, kernels.finish_forward, (shares, sums), splits, x, KIND=x.kind)
    tile = _tile(relu2_kernels.relu2_apply_backward, x)
    columns = min(max(x.blocks), tile.columns)
    launcher.launch(
        relu2_kernels.relu2_apply_backward,
        (x.heads, cdiv(x.tokens, tile.rows * tile.tiles), cdiv(max(x.D, x.DV), columns)),
        (x.q, x.k, x.v, do, grads, shares, state, sums, numbers),
        (*offsets, x.eps, x.heads, x.H, x.N, x.M, tile.tiles, *strides),
        tile, BLOCK_C=columns, BLOCK_N=tile.rows, SPLITS=splits if few else 0, **x.constants,
    )  # fmt: skip
    return grads


def split_grads(grads: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of `tensors`, q, k and v or one packed tensor: views of the flat tensor that `backward` returns."""
    if len(tensors) == 1:
        return [grads.view(tensors[0].shape)]
    parts = grads.split([t.numel() for t in tensors])
    return [part.view(t.transpose(1, 2).shape).transpose(1, 2) for part, t in zip(parts, tensors, strict=True)]


def _head_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides (batch, head, token) of x [B, N, H, D]."""
    return x.stride(0), x.stride(2), x.stride(1)


def _forward_is_one_launch(x: Inputs, called_from_python: bool) -> bool:
    wide = max(x.blocks) > tiles.NARROW_HEAD
    few = tiles.FEW_TOKENS
    if x.heads >= x.chip.multiprocessors or (wide and x.q.element_size() == 2):
        few = tiles.FEW_TOKENS_OF_LARGE_CALLS
    elif x.q.element_size() == 2:
        few = tiles.FEW_TOKENS_CALLED if called_from_python else tiles.FEW_TOKENS_RECORDED
    return _is_one_launch(x, few)


def _is_one_launch(x: Inputs, few: int) -> bool:
    """True where one launch computes Q (diag(s) K^T V), or its gradient: the state of a head fits one program."""
    block_d, block_v = x.blocks
    return x.tokens <= few and block_d * block_v <= tiles.LARGEST_STATE[x.q.element_size()]


def _tile(kernel: Any, x: Inputs) -> Tile:
    block_d, block_v = x.blocks
    problem = Problem(
        tokens=x.tokens,
        heads=x.heads,
        width=max(block_d, block_v),
        itemsize=x.q.element_size(),
        multiprocessors=x.chip.multiprocessors,
        shared_memory=x.chip.shared_memory,
        converted=x.q.dtype == torch.float16,
    )
    return choose_tile(kernel.fn.__name__, problem)


def _whole_blocks(x: Inputs) -> dict[str, int]:
    """Blocks that hold all queries and all keys of a head."""
    block_n, block_m = (next(rows for rows in (16, 32, 64, 128) if count <= rows) for count in (x.N, x.M))
    return {"BLOCK_N": block_n, "BLOCK_M": block_m}


def _sum_rows(x: Inputs, tile: Tile) -> int:
    """Rows of a tile that one pass of all threads covers, 16 bytes per thread."""
    return min(tile.rows, max(16, tile.warps * 256 // x.blocks[0]))


# --- tokens split over processes ---------------------------------------------------------------------------------


def sums_of_part(launcher: Launcher, x: Inputs) -> Tensor:
    """K^T V, |Q|_1 and |K|_1 of the tokens of this process, a row per head; zeros where there are none."""
    splits = max(1, _count_shares(x)[0])
    shares = _sum_shares(launcher, x, splits)
    return shares[0] if splits == 1 else shares.sum(0)


def forward_of_part(launcher: Launcher, x: Inputs, sums: Tensor) -> tuple[Tensor, Tensor]:
    """(o [B, N, H, DV], state) from the sums over all processes."""
    o, state = launcher.empty(x.B, x.N, x.H, x.DV, dtype=x.q.dtype), launcher.empty(*x.row_shape)
    _finish(launcher, kernels.finish_forward, (sums, state), 1, x, KIND=x.kind)
    if x.N > 0:
        _apply_forward(launcher, x, o, None, state, splits=0, keep=False)
    return o, state


def gradient_sums_of_part(launcher: Launcher, x: Inputs, do: Tensor, state: Tensor) -> Tensor:
    """Z, t/|Q|_1 and t/|K|_1 of the queries of this process, a row per head. They are linear in dO, so they add up."""
    splits = max(1, _count_shares(x)[0])
    shares, sums = _sum_shares(launcher, x, splits, do), launcher.empty(*x.row_shape)
    _finish(launcher, kernels.finish_backward, (shares, state, sums), splits, x)
    return sums


def backward_of_part(launcher: Launcher, x: Inputs, do: Tensor, state: Tensor, sums: Tensor) -> Tensor:
    """The gradients of q, k and v as `backward` returns them, from the gradient sums over all processes."""
    grads = _empty_grads(launcher, x)
    if x.tokens > 0:
        _apply_backward(launcher, x, do, grads, None, state, sums, splits=0)
    return grads
