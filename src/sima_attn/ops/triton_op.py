"""SimA and relu2 by the Triton kernels: eager calls, torch operators for torch.compile, and their gradients.

A plain call goes through a `PreparedCall`, which checks nothing and repeats recorded launches. A call that a compiler,
a tracer, a dispatch mode or a tensor subclass must see goes through the operator `sima_attn::attention`. torch.compile
sees the kernels inside the operator and launches them itself.

`tensors` are q, k and v, or one packed tensor [B, N, 3, H, D], whose gradient is packed too.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sima_attn.ops.plain_calls import needs_grad
from sima_attn.ops.triton_launch import Options, backward, forward, read_inputs, split_grads
from sima_attn.ops.triton_launchers import INTERPRETED, Recording, Recordings, TracedLauncher, device_of
from sima_attn.ops.triton_support import describe


class PreparedCall:
    """SimA or relu2 of tensors with one description -> [B, N, H, Dv]."""

    def __init__(self, order: str, token_ref: float | None, eps: float, kind: str = "sima") -> None:
        self.order, self.token_ref, self.eps, self.kind = order, token_ref, eps, kind
        self._recordings = Recordings()  # forward by `keep`, backward by the tensors' description

    def __call__(self, *tensors: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """The output, with its gradient where one is needed."""
        if query_mask is not None or key_mask is not None:
            query_mask, key_mask = as_bytes(query_mask), as_bytes(key_mask)
        if needs_grad(*tensors):
            return _Attention.apply(self, query_mask, key_mask, *tensors)
        return self.forward(tensors, query_mask, key_mask, keep=False)[0]

    def through_operator(
        self, *tensors: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """The same through the operator, which compilers, tracers and dispatch modes see; nothing is recorded."""
        options = self._options(tensors, as_bytes(query_mask), as_bytes(key_mask))
        q, k, v = tensors if len(tensors) == 3 else (*tensors, None, None)
        return attention(q, k, v, *options, self.kind, self.order, needs_grad(*tensors))[0]

    def forward(
        self, tensors: Sequence[Tensor], query_mask: Tensor | None, key_mask: Tensor | None, *, keep: bool
    ) -> list[Tensor]:
        """[o, state, ...]; there is a state only if `keep`."""
        if query_mask is None and key_mask is None and (recording := self._recordings.get(keep)) is not None:
            return recording.repeat(tensors)  # the usual case, and the fastest
        return self._run(keep, forward, tensors, (), query_mask, key_mask, keep=keep)

    def backward(
        self, do: Tensor, state: Tensor, tensors: Sequence[Tensor], query_mask: Tensor | None, key_mask: Tensor | None
    ) -> Tensor:
        """The gradients as one flat tensor."""
        # Hooks on saved tensors may have moved them: they are described anew.
        key = tuple(map(describe, (do, state, *tensors, query_mask, key_mask)))
        return self._run(key, backward, tensors, (do, state), query_mask, key_mask)[0]

    def _run(self, key: Hashable, launch: Callable, tensors, others, query_mask, key_mask, **settings) -> list[Tensor]:
        """Repeat the recording of that key, or make it; returns the tensors that are allocated."""
        options = self._options(tensors, query_mask, key_mask)

        def record(recording: Recording) -> None:
            launch(recording, read_inputs(tensors, *options, kind=self.kind), *others, order=self.order, **settings)

        return self._recordings.run(key, (*tensors, *others, *present(*options[:3])), record)

    def _options(self, tensors: Sequence[Tensor], query_mask: Tensor | None, key_mask: Tensor | None) -> Options:
        gains, gain = None, 1.0
        if self.token_ref is not None and query_mask is None:
            gain = tensors[0].shape[1 if len(tensors) == 1 else 2] / self.token_ref
        elif self.token_ref is not None and query_mask is not None:
            gains = query_mask.sum(1, dtype=torch.float32) / self.token_ref
        return query_mask, key_mask, gains, gain, self.eps


class _Attention(torch.autograd.Function):
    """A prepared call with its gradient. With setup_context, torch would inspect every call."""

    @staticmethod
    def forward(ctx, call, query_mask, key_mask, *tensors):
        o, state = call.forward(tensors, query_mask, key_mask, keep=True)[:2]
        ctx.save_for_backward(state, query_mask, key_mask, *tensors)
        ctx.call = call
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        state, query_mask, key_mask, *tensors = ctx.saved_tensors
        grads = ctx.call.backward(with_contiguous_channels(grad), state, tensors, query_mask, key_mask)
        return None, None, None, *split_grads(grads, tensors)


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask as the kernels read it: the same memory, if it is contiguous and nothing is being compiled."""
    if mask is None:
        return None
    if torch.compiler.is_compiling():  # Inductor of torch 2.11 cannot view a mask as another dtype
        return mask.to(torch.uint8, memory_format=torch.contiguous_format)
    return mask.contiguous().view(torch.uint8)


def present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors that are not None."""
    return tuple(t for t in tensors if t is not None)


def with_contiguous_channels(grad: Tensor) -> Tensor:
    """The gradient of a sum, for example, is expanded."""
    return grad if grad.stride(3) == 1 or grad.shape[3] == 1 else grad.contiguous()


def by_head(grad: Tensor) -> Tensor:
    """The gradient of an output [B, N, H, D] as [B, H, N, D] with contiguous channels."""
    return with_contiguous_channels(grad).transpose(1, 2)


def operator(name: str, run: Callable):
    """A torch operator. In Triton's interpreter there is nothing that torch.compile could launch by itself."""
    if not INTERPRETED:
        return torch.library.triton_op(name, run, mutates_args=())
    opaque = torch.library.custom_op(name, run, mutates_args=())
    opaque.register_fake(run)
    return opaque


def _run_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None,
    query_mask: Tensor | None, key_mask: Tensor | None, gains: Tensor | None, gain: float, eps: float,
    kind: str, order: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o [B, N, H, Dv], state), the latter empty unless `keep`. q is packed where k and v are None."""
    x = read_inputs(present(q, k, v), query_mask, key_mask, gains, gain, eps, kind=kind)
    with device_of(q):
        o, state = forward(TracedLauncher(q), x, order=order, keep=keep)
    return o, q.new_empty(0, dtype=torch.float32) if not keep or state is None else state


def _run_attention_backward(
    do: Tensor, state: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None,
    query_mask: Tensor | None, key_mask: Tensor | None, gains: Tensor | None, gain: float, eps: float,
    kind: str, order: str,
) -> Tensor:  # fmt: skip
    """The gradients of q, k and v, or of the packed tensor, as one flat tensor."""
    x = read_inputs(present(q, k, v), query_mask, key_mask, gains, gain, eps, kind=kind)
    with device_of(q):
        return backward(TracedLauncher(q), x, do, state, order=order)


attention = operator("sima_attn::attention", _run_attention)
attention_backward = operator("sima_attn::attention_backward", _run_attention_backward)


def _save(ctx, inputs, output) -> None:
    *tensors, gain, eps, kind, order, _ = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.options = gain, eps, kind, order
    ctx.set_materialize_grads(False)  # the state has no gradient: no zeros for it


def _grad(ctx, grad, _unused):
    _, *tensors = ctx.saved_tensors
    grads = attention_backward(with_contiguous_channels(grad), *ctx.saved_tensors, *ctx.options)
    found = split_grads(grads, present(*tensors[:3]))
    return *found, *[None] * (11 - len(found))


attention.register_autograd(_grad, setup_context=_save)
