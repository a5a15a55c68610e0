"""Triton kernel of `token_rotation`: one launch where plain torch takes eight. Its gradient is the rotation back.

Shapes: B batch, H heads, N tokens, D channels per head.
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
from sima_attn.ops.triton_tiles import Tile, cdiv, padded

TILE = Tile(64, warps=4)


@triton.jit(do_not_specialize=["N"])
def rotate_tokens(
    x, cos, sin, out, H, N, x_b, x_h, x_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """A tile of one head, rotated. BACK: by the negative angles."""
    head = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    d, pair = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    tile = load_tile(at_head(x, x, 0, head, H, x_b, x_h), n, n < N, x_n, d, D).to(tl.float32)
    c = load_tile(cos, n, n < N, D // 2, pair, D // 2)
    s = load_tile(sin, n, n < N, D // 2, pair, D // 2)
    if BACK:
        s = -s
    even, odd = tl.split(tl.reshape(tile, [BLOCK_N, BLOCK_D // 2, 2]))
    turned = tl.join(even * c - odd * s, even * s + odd * c)
    store_tile(output_at_head(out, head, H, N, D, H * D), tl.reshape(turned, [BLOCK_N, BLOCK_D]), n, N, H * D, d, D)


def rotate(launcher: Launcher, x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    """The rotation [B, N, H, D] of x [B, H, N, D]."""
    B, H, N, D = x.shape
    out = launcher.empty(B, N, H, D, dtype=x.dtype)
    launcher.launch(
        rotate_tokens, (B * H, cdiv(N, TILE.rows), 1), (x, cos, sin, out), (H, N, *x.stride()[:3]),
        TILE, D=D, BLOCK_D=padded(D), BLOCK_N=TILE.rows, BACK=back,
    )  # fmt: skip
    return out


class RotationCall:
    """`token_rotation` of tensors with one description -> [B, N, H, D]."""

    def __init__(self) -> None:
        self._recordings = Recordings()

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The output, with its gradient where one is needed."""
        return _Rotation.apply(self, x, cos, sin) if needs_grad(x) else self.forward(x, cos, sin)

    def through_operator(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The same through the operator, which compilers, tracers and dispatch modes see; nothing is recorded."""
        return rotation(x, cos, sin, False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The output, without a gradient."""
        return self._recordings.run("forward", (x, cos, sin), lambda new: rotate(new, x, cos, sin))[0]

    def backward(self, do: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The gradient of x [B, N, H, D]."""
        given = do, cos, sin
        key = tuple(map(describe, given))  # the strides of `do` are not those of x
        return self._recordings.run(key, given, lambda new: rotate(new, *given, back=True))[0]


class _Rotation(torch.autograd.Function):
    """A prepared call with its gradient."""

    @staticmethod
    def forward(ctx: Any, call: RotationCall, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.call = call
        return call.forward(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, ctx.call.backward(by_head(grad), *ctx.saved_tensors).transpose(1, 2), None, None


def _run_rotation(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """The output [B, N, H, D]."""
    with device_of(x):
        return rotate(TracedLauncher(x), x, cos, sin, back=back)


rotation = operator("sima_attn::token_rotation", _run_rotation)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, cos, sin, back = inputs
    ctx.save_for_backward(cos, sin)
    ctx.back = back


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return rotation(by_head(grad), *ctx.saved_tensors, not ctx.back).transpose(1, 2), None, None, None


rotation.register_autograd(_grad, setup_context=_save)
