"""SimA of tokens that are split over processes, by the Triton kernels: those of many tokens, around an all-reduce.

    forward     K^T V, |Q|_1, |K|_1 of the local tokens    -> all-reduce ->    W, and O = Q W for the local queries
    backward    Z, t/|Q|_1, t/|K|_1 of the local queries   -> all-reduce ->    dQ, dK and dV of the local tokens

triton_kernels.py has the letters. Each side of an all-reduce is a torch operator, so torch.compile sees the kernels and
the collectives. `tensors` are q, k and v, or one packed tensor [B, N, 3, H, D], whose gradient is packed too.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head; N and M count
the tokens of this process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from sima_attn.ops.plain_calls import needs_grad
from sima_attn.ops.sequence_parallel import (
    Group,
    all_reduce,
    check_agreement,
    pack_message,
    process_group,
    token_gains,
    unpack_message,
    unpack_qkv,
)
from sima_attn.ops.triton_launch import (
    Inputs,
    backward_of_part,
    forward_of_part,
    gradient_sums_of_part,
    read_inputs,
    split_grads,
    sums_of_part,
)
from sima_attn.ops.triton_launchers import TracedLauncher, device_of
from sima_attn.ops.triton_op import as_bytes, operator, present, with_contiguous_channels


def sima_split_triton(
    *tensors: Tensor,
    group: Group,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    token_ref: float | None,
    eps: float,
) -> Tensor:
    """SimA of checked arguments, q, k and v or packed qkv: the output [B, N, H, Dv] for the queries of this process."""
    q, k, v = unpack_qkv(tensors)
    members = process_group(group)
    check_agreement(members, q, k, v, backend="triton", token_ref=token_ref, eps=eps)
    gains = None if token_ref is None else token_gains(q, query_mask, token_ref)
    masks = as_bytes(query_mask), as_bytes(key_mask)
    return _SplitAttention.apply(members, needs_grad(*tensors), eps, gains, *masks, *tensors)


class _SplitAttention(torch.autograd.Function):
    """The attention of a part with its gradient: one all-reduce each."""

    @staticmethod
    def forward(
        ctx: Any,
        group: ProcessGroup,
        keep: bool,
        eps: float,
        gains: Tensor | None,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        """The output [B, N, H, Dv]."""
        three = _as_three(tensors)
        sums = part_sums(*three, query_mask, key_mask)
        sums, gains = unpack_message(all_reduce(pack_message(sums, gains), group), sums.shape)
        o, state = part_forward(sums, *three, query_mask, gains, eps)
        if keep:
            kept_gains = None if gains is None else gains.clone()  # a view would keep the message
            ctx.save_for_backward(state, kept_gains, query_mask, key_mask, *tensors)
            ctx.group, ctx.eps = group, eps
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of `tensors`."""
        state, gains, query_mask, key_mask, *tensors = ctx.saved_tensors
        three, do = _as_three(tensors), with_contiguous_channels(grad)
        sums = part_gradient_sums(do, state, *three, query_mask, gains, ctx.eps)
        grads = part_backward(do, state, all_reduce(sums, ctx.group), *three, query_mask, key_mask)
        return None, None, None, None, None, None, *split_grads(grads, tensors)


def _as_three(tensors: tuple[Tensor, ...] | list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q, k and v as the operators take them: a packed tensor comes first, without the other two."""
    return (tensors[0], None, None) if len(tensors) == 1 else (tensors[0], tensors[1], tensors[2])


def _inputs(
    q: Tensor, k: Tensor | None, v: Tensor | None, *,
    query_mask: Tensor | None = None, key_mask: Tensor | None = None, gains: Tensor | None = None, eps: float = 0.0,
) -> Inputs:  # fmt: skip
    return read_inputs(present(q, k, v), query_mask, key_mask, gains, 1.0, eps)


def _run_sums(
    q: Tensor, k: Tensor | None, v: Tensor | None, query_mask: Tensor | None, key_mask: Tensor | None
) -> Tensor:
    """K^T V, |Q|_1 and |K|_1 of the local tokens [B * H, D * Dv + 2 D]."""
    with device_of(q):
        return sums_of_part(TracedLauncher(q), _inputs(q, k, v, query_mask=query_mask, key_mask=key_mask))


def _run_forward(
    sums: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None,
    query_mask: Tensor | None, gains: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o [B, N, H, Dv], state) of the local queries, from the sums over all processes."""
    with device_of(q):
        x = _inputs(q, k, v, query_mask=query_mask, gains=gains, eps=eps)
        return forward_of_part(TracedLauncher(q), x, sums)


def _run_gradient_sums(
    do: Tensor, state: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None,
    query_mask: Tensor | None, gains: Tensor | None, eps: float,
) -> Tensor:  # fmt: skip
    """Z, t/|Q|_1 and t/|K|_1 of the local queries [B * H, D * Dv + 2 D]."""
    with device_of(q):
        x = _inputs(q, k, v, query_mask=query_mask, gains=gains, eps=eps)
        return gradient_sums_of_part(TracedLauncher(q), x, do, state)


def _run_backward(
    do: Tensor, state: Tensor, sums: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None,
    query_mask: Tensor | None, key_mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """The gradients of the local tokens as one flat tensor, from the gradient sums over all processes."""
    with device_of(q):
        x = _inputs(q, k, v, query_mask=query_mask, key_mask=key_mask)
        return backward_of_part(TracedLauncher(q), x, do, state, sums)


part_sums = operator("sima_attn::part_sums", _run_sums)
part_forward = operator("sima_attn::part_forward", _run_forward)
part_gradient_sums = operator("sima_attn::part_gradient_sums", _run_gradient_sums)
part_backward = operator("sima_attn::part_backward", _run_backward)
