"""SimA on the CPU with autograd: both directions read and write strided views, one image after the other.

With s = gain / (|Q|_1 |K|_1), a vector of D numbers per head:

    "kv" order    W = diag(s) K^T V      A = Q^T dO       dQ' = dO W^T         dK' = V A^T diag(s)    dV = K diag(s) A
    "qk" order    P = Q diag(s) K^T      G = dO V^T       dQ' = G K diag(s)    dK' = G^T Q diag(s)    dV = P^T dO
    both          dQ = dQ' - sign(Q) diag(t / |Q|_1)      dK = dK' - sign(K) diag(t / |K|_1)

where t is the sum of Q * dQ' over the tokens, which equals the row sum of A * W. A norm below eps is the constant eps
and has no gradient.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sima_attn.ops.cpu_inference import (
    ImageState,
    are_plain_on_cpu,
    first_tokens,
    folded_by_image,
    gain_of_image,
    images_in,
    multiply_by_s,
    multiply_into,
    scales,
)


class Options(NamedTuple):
    """Options of SimA; `differentiable` is the same function of q, k and v in operations that autograd supports."""

    order: str
    eps: float
    gain: float | Tensor | None
    work: torch.dtype
    differentiable: Callable[[Tensor, Tensor, Tensor], Tensor]


class FoldedAttention(torch.autograd.Function):
    """O [B, H, N, Dv] of (options, q, k, v), or of (options, qkv) with a packed qkv, whose gradient is packed too."""

    @staticmethod
    def forward(ctx: Any, options: Options, *inputs: Tensor) -> Tensor:
        """O, one image after the other."""
        order, eps, gain, work, _ = options
        states: list[ImageState] = []
        out = folded_by_image(*unpack_qkv(inputs), order=order, eps=eps, gain=gain, work=work, states=states)
        ctx.options = options
        ctx.save_for_backward(*inputs, *(t for state in states for t in state))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs, each in the layout of its input."""
        if torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):  # it would round the float32 products
                return FoldedAttention.backward(ctx, grad)
        needed, saved = ctx.needs_input_grad[1:], ctx.saved_tensors
        inputs, saved = saved[: len(needed)], saved[len(needed) :]
        if torch.is_grad_enabled() or not are_plain_on_cpu(grad):
            # A derivative of this gradient, or batched gradients: autograd must see the operations.
            return None, *_differentiable_gradients(ctx.options, inputs, needed, grad)
        gradients = tuple(torch.empty_like(t) for t in inputs)
        states = [ImageState(*saved[i : i + 3]) for i in range(0, len(saved), 3)]
        _write_gradients(ctx.options, unpack_qkv(inputs), grad, states, unpack_qkv(gradients))
        return None, *gradients


def unpack_qkv(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """q, k, v [B, H, N, D]: the tensors themselves, or views of the one packed tensor [B, N, 3, H, D]."""
    return tensors if len(tensors) == 3 else tensors[0].permute(2, 0, 3, 1, 4).unbind(0)


def _differentiable_gradients(
    options: Options, inputs: tuple[Tensor, ...], needed: Sequence[bool], grad: Tensor
) -> tuple[Tensor | None, ...]:
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views, so that the gradient of k does not include a path through q where q was computed from k.
        inputs = tuple(t.view_as(t) for t in inputs)
        out = options.differentiable(*unpack_qkv(inputs))
    wanted = [t for t, is_needed in zip(inputs, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=create_graph))
    return tuple(next(found) if is_needed else None for is_needed in needed)


def _write_gradients(
    options: Options,
    inputs: Sequence[Tensor],
    grad: Tensor,
    states: Sequence[ImageState],
    gradients: Sequence[Tensor],
) -> None:
    """dQ, dK and dV of one image after the other, into `gradients`."""
    order, eps, gain, work, _ = options
    q, k, _ = inputs
    scratch = q.new_empty(q.shape[1], max(q.shape[2], k.shape[2]), q.shape[3], dtype=work)
    outputs = zip(*(t.unbind(0) for t in gradients), strict=True)
    for b, (image, output) in enumerate(zip(images_in(work, *inputs, grad), outputs, strict=True)):
        _write_image(order, image, output, states[b], scratch, eps, gain_of_image(gain, b))


def _write_image(
    order: str,
    image: Sequence[Tensor],
    gradients: Sequence[Tensor],
    state: ImageState,
    scratch: Tensor,
    eps: float,
    gain: float | Tensor | None,
) -> None:
    (q, k, v, grad), (dq, dk, dv) = image, gradients
    norm_q, norm_k, inner = state
    s_q, s_k = scales(norm_q, norm_k, eps, gain)
    if order == "kv":
        outer = torch.bmm(q.mT, grad)  # [H, D, Dv]
        t = (outer * inner).sum(2).unsqueeze(1)  # [H, 1, D]
        multiply_by_s(outer, s_q.mT, s_k.mT, out=outer)
        multiply_into(dv, k, outer)
        by_query = torch.bmm(grad, inner.mT, out=first_tokens(scratch, q))  # [H, N, D]
        left, right = v, outer.mT
    else:
        multiply_into(dv, inner.mT, grad)
        pairs = torch.bmm(grad, v.mT)  # [H, N, M]
        by_query = torch.bmm(pairs, k, out=first_tokens(scratch, q))  # [H, N, D]
        multiply_by_s(by_query, s_q, s_k, out=by_query)
        product = q * by_query
        t = product.sum(1, keepdim=True)  # [H, 1, D]
        left, right = pairs.mT, multiply_by_s(q, s_q, s_k, out=product)
    _subtract_norm_gradient(by_query, q, t, norm_q, eps, out=dq)
    by_key = torch.bmm(left, right, out=first_tokens(scratch, k))  # [H, M, D]
    _subtract_norm_gradient(by_key, k, t, norm_k, eps, out=dk)


def _subtract_norm_gradient(
    through_product: Tensor, x: Tensor, t: Tensor, norm: Tensor, eps: float, *, out: Tensor
) -> None:
    """dX = dX' - sign(X) diag(t / |X|_1)."""
    slope = torch.where(norm < eps, 0, t / norm)
    signs = torch.sign(x, out=out if out.dtype == x.dtype else None)
    torch.addcmul(through_product, signs, slope, value=-1, out=out)
