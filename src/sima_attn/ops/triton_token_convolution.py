"""Triton kernels of `token_convolution`: the convolution of tokens as they lie, and its gradients.

In plain torch the convolution takes about ten operations, which copy v into an image and back. Here it is one launch.
The gradient of v is the same kernel with the filters turned around, that of the filters a sum over shares of the
tokens. Sums are float32. No atomics: the same input gives the same bits.

Shapes: B batch, H heads, N tokens, D channels per head, C = H * D.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from sima_attn.ops.plain_calls import needs_grad
from sima_attn.ops.triton_launchers import Launcher, Recordings, TracedLauncher, device_of
from sima_attn.ops.triton_op import by_head, operator
from sima_attn.ops.triton_parts import at_head, load_tile, output_at_head, store_tile
from sima_attn.ops.triton_support import describe
from sima_attn.ops.triton_tiles import Tile, cdiv, chip, padded

TAPS = tl.constexpr(9)
TILE = Tile(64, warps=4)
PROGRAMS = 4  # per multiprocessor, for the gradient of the filters


@triton.jit
def shifted(x, n, prefix, rows, columns, tap, d, x_n, D: tl.constexpr):
    """The neighbors of tokens n that a tap of the filter multiplies, in float32; zero for prefix tokens."""
    down, right = tap // 3 - 1, tap % 3 - 1
    patch = n - prefix
    row, column = patch // columns + down, patch % columns + right
    real = (patch >= 0) & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    places = x + (n + down * columns + right)[:, None] * x_n + d[None, :]
    return tl.load(places, mask=real[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["N", "prefix", "rows", "columns"])
def convolve_tokens(
    x, weight, out, H, N, prefix, rows, columns, x_b, x_h, x_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A tile of the convolution of one head. TURNED: with the filters turned by 180 degrees."""
    head = tl.program_id(0)
    n, d = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    x = at_head(x, x, 0, head, H, x_b, x_h)
    weight += (head % H) * D * TAPS
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for tap in tl.static_range(TAPS):
        factor = tl.load(weight + d * TAPS + (TAPS - 1 - tap if TURNED else tap), mask=d < D, other=0.0)
        total += shifted(x, n, prefix, rows, columns, tap, d, x_n, D) * factor.to(tl.float32)[None, :]
    store_tile(output_at_head(out, head, H, N, D, H * D), total, n, N, H * D, d, D)


@triton.jit(do_not_specialize=["B", "N", "prefix", "rows", "columns", "splits"])
def filter_gradient_shares(
    x, do, shares, B, H, N, prefix, rows, columns, splits, x_b, x_h, x_n, do_b, do_h, do_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One share of the gradient of one tap of the filters of a head, over its part of the tiles of all images."""
    h, split, tap = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    tiles = tl.cdiv(N, BLOCK_N)
    total = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(split, B * tiles, splits):
        head = (i // tiles) * H + h
        n = (i % tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
        near = shifted(at_head(x, x, 0, head, H, x_b, x_h), n, prefix, rows, columns, tap, d, x_n, D)
        grad = load_tile(at_head(do, do, 0, head, H, do_b, do_h), n, n < N, do_n, d, D)
        total += near * grad.to(tl.float32)
    place = shares + ((split * H + h) * D + d) * TAPS + tap
    tl.store(place, tl.sum(total, axis=0), mask=d < D)


Layout = tuple[int, int, int]  # prefix tokens, rows, columns


def convolve(launcher: Launcher, x: Tensor, weight: Tensor, layout: Layout, *, turned: bool = False) -> Tensor:
    """The convolution [B, N, H, D] of x [B, H, N, D]."""
    B, H, N, D = x.shape
    out = launcher.empty(B, N, H, D, dtype=x.dtype)
    launcher.launch(
        convolve_tokens, (B * H, cdiv(N, TILE.rows), 1), (x, weight, out), (H, N, *layout, *x.stride()[:3]),
        TILE, D=D, BLOCK_D=padded(D), BLOCK_N=TILE.rows, TURNED=turned,
    )  # fmt: skip
    return out


def differentiate(launcher: Launcher, x: Tensor, weight: Tensor, do: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The gradient of x [B, N, H, D], and shares [splits, C, 1, 3, 3] of that of the filters."""
    B, H, N, D = x.shape
    dx = convolve(launcher, do, weight, layout, turned=True)
    programs = cdiv(PROGRAMS * chip(x.device).multiprocessors, H * TAPS.value)
    splits = min(B * cdiv(N, TILE.rows), programs)
    shares = launcher.empty(splits, *weight.shape)
    launcher.launch(
        filter_gradient_shares, (H, splits, TAPS.value), (x, do, shares),
        (B, H, N, *layout, splits, *x.stride()[:3], *do.stride()[:3]),
        TILE, D=D, BLOCK_D=padded(D), BLOCK_N=TILE.rows,
    )  # fmt: skip
    return dx, shares


class ConvolutionCall:
    """`token_convolution` of tensors with one description -> [B, N, H, D]."""

    def __init__(self, prefix: int, rows: int, columns: int) -> None:
        self.layout = prefix, rows, columns
        self._recordings = Recordings()

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """The output, with its gradient where one is needed."""
        return _Convolution.apply(self, x, weight) if needs_grad(x, weight) else self.forward(x, weight)

    def through_operator(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same through the operator, which compilers, tracers and dispatch modes see; nothing is recorded."""
        return convolution(x, weight, *self.layout)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """The output, without a gradient."""
        return self._recordings.run("forward", (x, weight), lambda new: convolve(new, x, weight, self.layout))[0]

    def backward(self, x: Tensor, weight: Tensor, do: Tensor) -> list[Tensor]:
        """The gradient of x [B, N, H, D] and shares of that of the filters."""
        given = x, weight, do
        # Hooks on saved tensors may have moved them: they are described anew.
        key = tuple(map(describe, given))
        return self._recordings.run(key, given, lambda new: differentiate(new, *given, self.layout))


class _Convolution(torch.autograd.Function):
    """A prepared call with its gradient."""

    @staticmethod
    def forward(ctx: Any, call: ConvolutionCall, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return call.forward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dx, shares = ctx.call.backward(x, weight, by_head(grad))
        return None, dx.transpose(1, 2), shares.sum(0).to(weight.dtype)


def _run_convolution(x: Tensor, weight: Tensor, prefix: int, rows: int, columns: int) -> Tensor:
    """The output [B, N, H, D]."""
    with device_of(x):
        return convolve(TracedLauncher(x), x, weight, (prefix, rows, columns))


def _run_convolution_backward(
    x: Tensor, weight: Tensor, do: Tensor, prefix: int, rows: int, columns: int
) -> tuple[Tensor, Tensor]:
    """The gradient of x [B, N, H, D] and shares of that of the filters."""
    with device_of(x):
        return differentiate(TracedLauncher(x), x, weight, do, (prefix, rows, columns))


convolution = operator("sima_attn::token_convolution", _run_convolution)
convolution_backward = operator("sima_attn::token_convolution_backward", _run_convolution_backward)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, *layout = inputs
    ctx.save_for_backward(x, weight)
    ctx.layout = layout


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    dx, shares = convolution_backward(x, weight, by_head(grad), *ctx.layout)
    return dx.transpose(1, 2), shares.sum(0).to(weight.dtype), None, None, None


convolution.register_autograd(_grad, setup_context=_save)
