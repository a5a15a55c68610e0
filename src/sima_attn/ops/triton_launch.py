"""Which Triton kernels compute SimA, on what grids, with which memory.

Few tokens per head are one launch. Many tokens are two: sums over shares of the tokens, then the outputs. A third one
in between adds the shares where they are many.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, DV value channels per head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sima_attn.ops import triton_kernels as kernels
from sima_attn.ops import triton_tiles as tiles
from sima_attn.ops.triton_launchers import Launcher
from sima_attn.ops.triton_tiles import Problem, Tile, cdiv, choose_tile, padded

PRECISION = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "tf32x3"}
NARROW = 32  # so few channels multiply in full float32 without tensor cores, which is a little more accurate
FINISHING_ROWS = 4  # rows of the state that one program adds up, half as many where heads are few


class Inputs(NamedTuple):
    """q, k and v: three tensors, or one packed tensor in the place of q with the offsets of k and v in it."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    offsets: tuple[int, int]  # of k and v
    strides: tuple[int, ...]  # (batch, head, token) of q, k and v
    B: int
    H: int
    N: int
    M: int
    D: int
    DV: int

    @property
    def heads(self) -> int:
        """Attentions computed side by side."""
        return self.B * self.H

    @property
    def blocks(self) -> tuple[int, int]:
        """The padded channel counts."""
        return padded(self.D), padded(self.DV)

    @property
    def row_shape(self) -> tuple[int, int]:
        """A matrix [D, DV] and two vectors [D] per head: the state of the forward."""
        return self.heads, self.D * self.DV + 2 * self.D


def unpacked(q: Tensor, k: Tensor, v: Tensor) -> Inputs:
    """q [B, H, N, D], k [B, H, M, D] and v [B, H, M, DV] as inputs."""
    B, H, N, D = q.shape
    strides = tuple(stride for t in (q, k, v) for stride in t.stride()[:3])
    return Inputs(q, k, v, (0, 0), strides, B, H, N, k.shape[2], D, v.shape[3])


def packed(qkv: Tensor) -> Inputs:
    """A packed projection [B, N, 3, H, D] as inputs, without views."""
    B, N, _, H, D = qkv.shape
    batch, token, which, head, _ = qkv.stride()
    return Inputs(qkv, None, None, (which, 2 * which), (batch, head, token) * 3, B, H, N, N, D, D)


class Options(NamedTuple):
    """What is not a tensor of tokens: masks [B, tokens] as bytes or None, and the factor on the output."""

    query_mask: Tensor | None
    key_mask: Tensor | None
    gains: Tensor | None  # [B] float32, or None for the one number `gain`
    gain: float
    eps: float


def forward(launcher: Launcher, x: Inputs, options: Options, *, order: str, keep: bool) -> tuple[Tensor, Tensor | None]:
    """(o [B, N, H, DV], state): the state is what the gradient needs, None unless `keep`.

    These are the first two tensors allocated.
    """
    o = launcher.empty(x.B, x.N, x.H, x.DV, dtype=x.q.dtype)
    if order == "kv" and not _forward_is_one_program(x):
        return o, _forward_split(launcher, x, o, options, keep)
    state = launcher.empty(*((x.heads, 2 * x.D) if order == "qk" else x.row_shape)) if keep else None
    if order == "qk":
        kernel, tile, own = kernels.attend, _tile(kernels.attend, x), _whole_blocks(x)
    else:
        kernel, tile = kernels.forward_head, _tile(kernels.forward_head, x)
        whole = max(x.N, x.M) <= tile.rows
        own = {"BLOCK_N": tile.rows, "SUM_ROWS": _sum_rows(x, tile), "STAGES": tile.stages, "WHOLE": whole}
    launcher.launch(
        kernel, (x.heads, 1, 1),
        (x.q, x.k, x.v, o, state, *options[:3]),
        (*x.offsets, options.gain, options.eps, x.H, x.N, x.M, *x.strides, x.H * x.DV),
        tile, KEEP=keep, **own, **_widths(x), PRECISION=_precision(x),
    )  # fmt: skip
    return o, state


def head_state(launcher: Launcher, x: Inputs, options: Options) -> Tensor:
    """W = diag(s) K^T V and both norms, a row of `Inputs.row_shape` per head."""
    splits, _ = _count_shares(x)
    state = launcher.empty(*x.row_shape)
    shares = _forward_shares(launcher, x, options, splits)
    _finish(launcher, kernels.finish_forward, (shares, state), splits, x, options)
    return state


def _forward_split(launcher: Launcher, x: Inputs, o: Tensor, options: Options, keep: bool) -> Tensor | None:
    """Fill o in two launches, or three where the shares are many. Returns the state."""
    splits, few = _count_shares(x)
    state = launcher.empty(*x.row_shape) if keep or not few else None
    shares = _forward_shares(launcher, x, options, splits)
    if not few:
        assert state is not None
        _finish(launcher, kernels.finish_forward, (shares, state), splits, x, options)
    tile = _tile(kernels.apply_forward, x)
    columns = min(padded(x.DV), tile.columns)
    launcher.launch(
        kernels.apply_forward, (x.heads, cdiv(x.N, tile.rows * tile.tiles), cdiv(x.DV, columns)),
        (x.q, o, shares, state, options.query_mask, options.gains),
        (options.gain, options.eps, x.heads, x.H, x.N, tile.tiles, *x.strides[:3], x.H * x.DV),
        tile, BLOCK_N=tile.rows, SPLITS=splits if few else 0, KEEP=keep, PRECISION=_precision(x),
        **{**_widths(x), "BLOCK_V": columns},
    )  # fmt: skip
    return state


def _count_shares(x: Inputs) -> tuple[int, bool]:
    """How many shares, and whether these are few."""
    narrow = x.blocks[0] == x.blocks[1] <= tiles.NARROW_HEAD
    return tiles.count_shares(max(x.N, x.M), x.heads, tiles.multiprocessors(x.q.device), narrow=narrow)


def _forward_shares(launcher: Launcher, x: Inputs, options: Options, splits: int) -> Tensor:
    xyz = (x.q, None, None) if x.k is None else (x.k, x.v, x.q)
    return _outer_products(
        launcher, xyz, x.offsets, x.strides[3:] + x.strides[:3], (x.M, x.N), x,
        (options.key_mask, options.query_mask), splits, norms=True,
    )  # fmt: skip


def _outer_products(
    launcher: Launcher, xyz, offsets, strides, rows, sizes: Inputs, masks, splits: int, *, norms: bool
) -> Tensor:
    """Shares of X^T Y and of the norms of x and z."""
    shares = launcher.empty(splits, *sizes.row_shape)
    tile = _tile(kernels.outer_products, sizes)
    columns = min(padded(sizes.DV), tile.columns)
    launcher.launch(
        kernels.outer_products, (sizes.heads, splits, cdiv(sizes.DV, columns)),
        (*xyz, shares, *masks),
        (*offsets, sizes.heads, sizes.H, *rows, splits, *strides),
        tile, BLOCK_N=tile.rows, SUM_ROWS=_sum_rows(sizes, tile), STAGES=tile.stages, NORMS=norms,
        PRECISION=_precision(sizes),
        **{**_widths(sizes), "BLOCK_V": columns},
    )  # fmt: skip
    return shares


def _finish(launcher: Launcher, kernel, rows: tuple[Tensor, ...], splits: int, x: Inputs, options: Options) -> None:
    few_heads = x.heads * cdiv(x.D, FINISHING_ROWS) < tiles.multiprocessors(x.q.device)
    count = FINISHING_ROWS // 2 if few_heads else FINISHING_ROWS
    launcher.launch(
        kernel, (x.heads, cdiv(x.D, count), 1), (*rows, options.gains),
        (options.gain, options.eps, x.heads, x.H, splits), Tile(count, warps=4),
        D=x.D, DV=x.DV, ROWS=count, BLOCK_V=padded(x.DV), AT_ONCE=4 if splits <= 4 else 16,
    )  # fmt: skip


def backward(
    launcher: Launcher, x: Inputs, do: Tensor, state: Tensor, options: Options, *, order: str, is_packed: bool
) -> Tensor:
    """The gradients of q, k and v [tokens, heads, channels] in one flat tensor: see `grads_of`.

    do is [B, N, H, DV] with contiguous channels.
    """
    C, CV = x.H * x.D, x.H * x.DV
    grads = launcher.empty(x.B * (x.N * C + x.M * (C + CV)), dtype=x.q.dtype)
    # Offsets of dk and dv, numbers per token of each.
    layout = (C, 2 * C, 3 * C, 3 * C, 3 * C) if is_packed else (x.B * x.N * C, x.B * (x.N + x.M) * C, C, C, CV)
    do_strides = (do.stride(0), do.stride(2), do.stride(1))
    tensors = (x.q, x.k, x.v, do, grads)
    offsets, strides = (*x.offsets, *layout[:2]), (*x.strides, *do_strides, *layout[2:])
    common = {**_widths(x), "PRECISION": _precision(x)}
    if order == "qk" or _is_one_program(x, tiles.FEW_TOKENS):
        kernel = kernels.attend_backward if order == "qk" else kernels.backward_head
        tile = _tile(kernel, x)
        own = _whole_blocks(x) if order == "qk" else {"BLOCK_N": tile.rows, "WHOLE": tile.rows >= x.N}
        launcher.launch(
            kernel, (x.heads, 1, 1), (*tensors, state, *options[:3]),
            (*offsets, options.gain, options.eps, x.H, x.N, x.M, *strides), tile, **own, **common,
        )  # fmt: skip
        return grads

    mask, (splits, few) = options.query_mask, _count_shares(x)
    shares = _outer_products(
        launcher, (x.q, do, None), (0, 0), (*x.strides[:3], *do_strides, *x.strides[:3]), (x.N, x.N), x,
        (mask, mask), splits, norms=False,
    )  # fmt: skip
    sums = None
    if not few:
        sums = launcher.empty(*x.row_shape)
        _finish(launcher, kernels.finish_backward, (shares, state, sums), splits, x, options)
    tile = _tile(kernels.apply_backward, x)
    columns = min(max(x.blocks), tile.columns)
    grid = x.heads, cdiv(max(x.N, x.M), tile.rows * tile.tiles), cdiv(max(x.D, x.DV), columns)
    launcher.launch(
        kernels.apply_backward, grid, (*tensors, shares, state, sums, *options[:3]),
        (*offsets, options.gain, options.eps, x.heads, x.H, x.N, x.M, tile.tiles, *strides),
        tile, BLOCK_C=columns, BLOCK_N=tile.rows, SPLITS=splits if few else 0, **common,
    )  # fmt: skip
    return grads


def grads_of(grads: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, views of the flat tensor that `backward` returns for unpacked inputs."""
    parts = grads.split([q.numel(), k.numel(), v.numel()])
    dq, dk, dv = (
        part.view(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2)
        for part, t in zip(parts, (q, k, v), strict=True)
    )
    return dq, dk, dv


def _forward_is_one_program(x: Inputs) -> bool:
    fills_chip = x.heads >= tiles.multiprocessors(x.q.device)
    return _is_one_program(x, tiles.FEW_TOKENS_OF_MANY_HEADS if fills_chip else tiles.FEW_TOKENS)


def _is_one_program(x: Inputs, few: int) -> bool:
    return tiles.is_one_program(max(x.N, x.M), *x.blocks, x.q.element_size(), few=few)


def _tile(kernel: Any, x: Inputs) -> Tile:
    device = x.q.device
    fills_chip = x.heads >= 2 * tiles.multiprocessors(device)
    converted = x.q.dtype == torch.float16
    problem = Problem(
        max(x.N, x.M), max(x.blocks), x.q.element_size(), fills_chip, tiles.shared_memory(device), converted
    )
    return choose_tile(kernel.fn.__name__, problem)


def _precision(x: Inputs) -> str:
    narrow = x.q.dtype == torch.float32 and max(x.blocks) <= NARROW
    return "ieee" if narrow else PRECISION[x.q.dtype]


def _widths(x: Inputs) -> dict[str, int]:
    block_d, block_v = x.blocks
    return {"D": x.D, "DV": x.DV, "BLOCK_D": block_d, "BLOCK_V": block_v}


def _whole_blocks(x: Inputs) -> dict[str, int]:
    """Blocks that hold all queries and all keys of a head."""
    block_n, block_m = (next(rows for rows in (16, 32, 64, 128) if count <= rows) for count in (x.N, x.M))
    return {"BLOCK_N": block_n, "BLOCK_M": block_m}


def _sum_rows(x: Inputs, tile: Tile) -> int:
    """Rows of a tile that one pass of all threads covers, 16 bytes per thread."""
    return min(tile.rows, max(16, tile.warps * 256 // x.blocks[0]))
