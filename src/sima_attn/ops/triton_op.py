"""SimA by the Triton kernels: eager calls, torch operators for torch.compile, and their gradients.

A plain call goes through a `PreparedCall`, which checks nothing and repeats recorded launches. Wherever more than
torch's autograd looks at a call (a compiler, a tracer, a dispatch mode, a tensor subclass), it goes through the
operators `sima_attn::attention` (of q, k and v) and `sima_attn::attention_qkv` (of a packed projection, whose gradient
is packed too). torch.compile sees the kernels inside them and launches these itself.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sima_attn.ops.triton_launch import Inputs, Options, backward, forward, grads_of, head_state, packed, unpacked
from sima_attn.ops.triton_launchers import INTERPRETED, Recording, TracedLauncher
from sima_attn.ops.triton_support import describe


class PreparedCall:
    """SimA of tensors of one description, [B, N, H, Dv]: q, k and v, or one packed tensor."""

    def __init__(self, order: str, token_ref: float | None, eps: float) -> None:
        self.order, self.token_ref, self.eps = order, token_ref, eps
        self._forward: dict[bool, Recording] = {}
        self._backward: dict[tuple, Recording] = {}

    def __call__(self, *inputs: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """The output, with its gradient where one is asked for."""
        if query_mask is not None or key_mask is not None:
            query_mask, key_mask = as_bytes(query_mask), as_bytes(key_mask)
        if torch.is_grad_enabled() and needs_grad(inputs):
            return _Attention.apply(self, query_mask, key_mask, *inputs)
        return self.forward(inputs, query_mask, key_mask, keep=False)[0]

    def forward(
        self, inputs: Sequence[Tensor], query_mask: Tensor | None, key_mask: Tensor | None, *, keep: bool
    ) -> list[Tensor]:
        """[o, state, ...]; there is a state only if `keep`."""
        recording = self._forward.get(keep)
        if recording is not None and query_mask is None and key_mask is None:
            return recording.repeat(inputs)  # the usual case, and the fastest
        options = self._options(inputs, query_mask, key_mask)
        tensors = (*inputs, *(t for t in options[:3] if t is not None))
        if recording is not None:
            return recording.repeat(tensors)
        with _device_of(inputs[0]):
            recording = Recording(tensors)
            forward(recording, _inputs(inputs), options, order=self.order, keep=keep)
        self._forward[keep] = recording
        return recording.finish()

    def backward(
        self, do: Tensor, state: Tensor, inputs: Sequence[Tensor], query_mask: Tensor | None, key_mask: Tensor | None
    ) -> Tensor:
        """The gradients as one flat tensor."""
        options = self._options(inputs, query_mask, key_mask)
        tensors = (*inputs, do, state, *(t for t in options[:3] if t is not None))
        # Hooks on saved tensors may have moved the inputs: they are described anew.
        key = tuple(map(describe, tensors))
        recording = self._backward.get(key)
        if recording is not None:
            return recording.repeat(tensors)[0]
        with _device_of(do):
            recording = Recording(tensors)
            x, is_packed = _inputs(inputs), len(inputs) == 1
            backward(recording, x, do, state, options, order=self.order, is_packed=is_packed)
        self._backward[key] = recording
        return recording.finish()[0]

    def _options(self, inputs: Sequence[Tensor], query_mask: Tensor | None, key_mask: Tensor | None) -> Options:
        gain, gains = output_gain(inputs[0], query_mask, self.token_ref, is_packed=len(inputs) == 1)
        return Options(query_mask, key_mask, gains, gain, self.eps)


class OperatorCall:
    """As `PreparedCall` through the operators, for whatever looks at them."""

    def __init__(self, order: str, token_ref: float | None, eps: float) -> None:
        self.order, self.token_ref, self.eps = order, token_ref, eps

    def __call__(self, *inputs: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """The output of the operator."""
        is_packed = len(inputs) == 1
        query_mask, key_mask = as_bytes(query_mask), as_bytes(key_mask)
        gain, gains = output_gain(inputs[0], query_mask, self.token_ref, is_packed=is_packed)
        last = gains, gain, self.eps, self.order, torch.is_grad_enabled() and needs_grad(inputs)
        if is_packed:
            return attention_qkv(*inputs, query_mask, *last)[0]
        return attention(*inputs, query_mask, key_mask, *last)[0]


def needs_grad(inputs: Sequence[Tensor]) -> bool:
    """True where some input requires a gradient."""
    return any(t.requires_grad for t in inputs)


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask as the kernels read it."""
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _inputs(tensors: Sequence[Tensor]) -> Inputs:
    return packed(*tensors) if len(tensors) == 1 else unpacked(*tensors)


def _device_of(t: Tensor) -> contextlib.AbstractContextManager:
    """Kernels are launched on the current device, which need not be the tensors'."""
    elsewhere = t.is_cuda and t.get_device() != torch.cuda.current_device()
    return torch.cuda.device(t.device) if elsewhere else contextlib.nullcontext()


def output_gain(
    q: Tensor, query_mask: Tensor | None, token_ref: float | None, *, is_packed: bool
) -> tuple[float, Tensor | None]:
    """The factor on the output: one number, or one per image [B]."""
    if token_ref is None:
        return 1.0, None
    if query_mask is None:
        return q.shape[1 if is_packed else 2] / token_ref, None
    return 1.0, query_mask.sum(1, dtype=torch.float32) / token_ref


def _with_contiguous_channels(grad: Tensor) -> Tensor:
    """The gradient of a sum, for example, is expanded."""
    return grad if grad.stride(3) == 1 or grad.shape[3] == 1 else grad.contiguous()


class _Attention(torch.autograd.Function):
    """A prepared call with its gradient. It has no setup_context, for which torch would inspect every call."""

    @staticmethod
    def forward(ctx, call, query_mask, key_mask, *inputs):
        o, state = call.forward(inputs, query_mask, key_mask, keep=True)[:2]
        ctx.save_for_backward(state, query_mask, key_mask, *inputs)
        ctx.call = call
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        state, query_mask, key_mask, *inputs = ctx.saved_tensors
        grads = ctx.call.backward(_with_contiguous_channels(grad), state, inputs, query_mask, key_mask)
        split = (grads.view(inputs[0].shape),) if len(inputs) == 1 else grads_of(grads, *inputs)
        return None, None, None, *split


# --- the operators ---------------------------------------------------------------------------------------------


def _operator(name: str, run):
    """A torch operator. In Triton's interpreter there is nothing that torch.compile could launch by itself."""
    if not INTERPRETED:
        return torch.library.triton_op(name, run, mutates_args=())
    operator = torch.library.custom_op(name, run, mutates_args=())
    operator.register_fake(run)
    return operator


def _run_forward(
    x: Inputs, query_mask, key_mask, gains, gain: float, eps: float, order: str, keep: bool
) -> tuple[Tensor, Tensor]:
    options = Options(query_mask, key_mask, gains, gain, eps)
    o, state = forward(TracedLauncher(x.q), x, options, order=order, keep=keep)
    return o, x.q.new_empty(0, dtype=torch.float32) if not keep or state is None else state


def _run_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    gains: Tensor | None,
    gain: float,
    eps: float,
    order: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(o [B, N, H, Dv], state), the latter empty unless `keep`."""
    return _run_forward(unpacked(q, k, v), query_mask, key_mask, gains, gain, eps, order, keep)


def _run_attention_backward(
    do: Tensor,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    gains: Tensor | None,
    gain: float,
    eps: float,
    order: str,
) -> Tensor:
    """The gradients of q, k and v as one flat tensor."""
    options = Options(query_mask, key_mask, gains, gain, eps)
    x = unpacked(q, k, v)
    return backward(TracedLauncher(q), x, do, state, options, order=order, is_packed=False)


def _run_attention_qkv(
    qkv: Tensor, token_mask: Tensor | None, gains: Tensor | None, gain: float, eps: float, order: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """As `attention`, of a packed [B, N, 3, H, D]."""
    return _run_forward(packed(qkv), token_mask, token_mask, gains, gain, eps, order, keep)


def _run_attention_qkv_backward(
    do: Tensor,
    state: Tensor,
    qkv: Tensor,
    token_mask: Tensor | None,
    gains: Tensor | None,
    gain: float,
    eps: float,
    order: str,
) -> Tensor:
    """The gradient of the packed qkv [B, N, 3, H, D]."""
    options = Options(token_mask, token_mask, gains, gain, eps)
    grads = backward(TracedLauncher(qkv), packed(qkv), do, state, options, order=order, is_packed=True)
    return grads.view(qkv.shape)


attention = _operator("sima_attn::attention", _run_attention)
attention_backward = _operator("sima_attn::attention_backward", _run_attention_backward)
attention_qkv = _operator("sima_attn::attention_qkv", _run_attention_qkv)
attention_qkv_backward = _operator("sima_attn::attention_qkv_backward", _run_attention_qkv_backward)


def _run_state_qkv(qkv: Tensor, gain: float, eps: float) -> Tensor:
    """diag(s) K^T V [B, H, D, D] of a packed [B, N, 3, H, D], float32; without a gradient."""
    B, _, _, H, D = qkv.shape
    state = head_state(TracedLauncher(qkv), packed(qkv), Options(None, None, None, gain, eps))
    return state[:, : D * D].reshape(B, H, D, D)


state_qkv = _operator("sima_attn::state_qkv", _run_state_qkv)


def sima_projected(
    qkv: Tensor, weight: Tensor, bias: Tensor | None, *, token_ref: float | None = None, eps: float = 1e-12
) -> Tensor:
    """Packed [B, N, 3, H, D] -> the attention times a projection weight [C, H * D], plus its bias: [B, N, C].

    O W^T = Q (diag(s) K^T V W^T): the projection joins the small matrix of a head, and O is never written. Inference
    only.
    """
    B, _, _, H, D = qkv.shape
    gain, _ = output_gain(qkv, None, token_ref, is_packed=True)
    C = weight.shape[0]
    state = state_qkv(qkv, gain, eps).to(qkv.dtype).transpose(0, 1).reshape(H, B * D, D)
    columns = weight.to(qkv.dtype).view(C, H, D).permute(1, 2, 0)  # [H, D, C]
    matrices = torch.bmm(state, columns).view(H, B, D, C).transpose(0, 1).reshape(B, H * D, C)
    out = torch.bmm(qkv[:, :, 0].flatten(2), matrices)  # [B, N, C]
    return out if bias is None else out + bias.to(out.dtype)


def _save(ctx, inputs, output) -> None:
    *tensors, gain, eps, order, _ = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.numbers = gain, eps, order
    ctx.set_materialize_grads(False)  # the state has no gradient: no zeros for it


def _grad(ctx, grad, _unused):
    grads = attention_backward(_with_contiguous_channels(grad), *ctx.saved_tensors, *ctx.numbers)
    return *grads_of(grads, *ctx.saved_tensors[1:4]), *[None] * 7


def _grad_qkv(ctx, grad, _unused):
    return attention_qkv_backward(_with_contiguous_channels(grad), *ctx.saved_tensors, *ctx.numbers), *[None] * 6


attention.register_autograd(_grad, setup_context=_save)
attention_qkv.register_autograd(_grad_qkv, setup_context=_save)
