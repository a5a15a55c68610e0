"""The Triton kernels as torch operators: autograd, torch.compile, CUDA graphs, and when they can run at all.

Three operators share the kernels. `sima_attn::attention` takes q, k and v; `sima_attn::attention_qkv` takes the packed
projection [B, N, 3, H, D] and returns its gradient packed too, so that no copy stands between the kernels and the
matrix products around them; `sima_attn::state_qkv` stops at the small matrix of each head, for those who multiply it
by more than the queries.

The operators are there for torch.compile and for modes that look at every call. A plain call goes past them, through
an autograd.Function of the same code: an operator written in Python takes longer to call than the kernels to run.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels a head, Dv value channels a head.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sima_attn.ops.cost import choose_order
from sima_attn.ops.eager import token_gain

LARGEST_HEAD = 256
LARGEST_OFFSET = 2**31  # the kernels count the numbers of one head in 32 bits
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALLEST_CAPABILITY = (8, 0)
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run on the CPU, slowly


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the kernels cannot take these tensors, or None where they can."""
    D, Dv = q.shape[3], v.shape[3]
    reason = _why_not_on(q.device)
    if reason is not None:
        return reason
    if q.dtype not in DTYPES:
        return f"they compute in float16, bfloat16 and float32, got {q.dtype}"
    if D > LARGEST_HEAD or Dv > LARGEST_HEAD:
        return f"they take at most {LARGEST_HEAD} channels a head, got D={D} and Dv={Dv}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(3) != 1 and t.shape[3] != 1:
            return f"the channels of {name} must lie side by side in memory; use {name}.contiguous()"
        if t.shape[2] * max(t.stride(2), 1) >= LARGEST_OFFSET:
            return f"{name} is too large: a head must span fewer than 2**31 numbers"
    return None


def fits_one_tile(N: int, M: int, D: int, Dv: int, itemsize: int) -> bool:
    """True where all tokens of a head make one tile that leaves room for the products of the "qk" order."""
    tokens, width = padded(max(N, M)), padded(max(D, Dv))
    if itemsize > 2:
        return tokens <= 64 and width <= 64
    return tokens <= (128 if width <= 64 else 64)


def padded(size: int) -> int:
    """The next power of two that the tensor cores take, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def order_on_gpu(N: int, M: int, D: int, Dv: int, itemsize: int) -> str:
    """The order of "auto" for the kernels: "qk" where it is cheaper and all tokens fit one tile, else "kv".

    What counts on a GPU is memory, not multiplications, and past one tile "kv" reads k and v only once.
    """
    return choose_order(N, M, D, Dv) if fits_one_tile(N, M, D, Dv, itemsize) else "kv"


def _why_not_on(device: torch.device) -> str | None:
    if not HAS_TRITON:
        return "the package triton is not installed"
    if device.type == "cpu":
        return None if INTERPRETED else "they run on CUDA devices, got a tensor on the CPU"
    if device.type != "cuda":
        return f"they run on CUDA devices, got a tensor on {device}"
    # torch.compile cannot trace the question.
    if not torch.compiler.is_compiling() and _is_too_old(device):
        return "they need a GPU of compute capability 8.0 (Ampere) or newer"
    return None


@functools.cache
def _is_too_old(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < SMALLEST_CAPABILITY


def sima_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    order: str,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    token_ref: float | None = None,
    eps: float = 1e-12,
) -> Tensor:
    """SimA of checked arguments [B, H, N, Dv], a view of [B, N, H, Dv]."""
    gain, gains = _gain(q, query_mask, token_ref)
    keep = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if _must_see_operators(q, k, v):
        return attention(q, k, v, query_mask, key_mask, gains, gain, eps, order, keep)[0]
    if keep:
        return plain_attention(q, k, v, query_mask, key_mask, gains, gain, eps, order, keep)[0]
    o = _heads_last(q, v.shape[3])
    _run_forward(q, k, v, o, query_mask, key_mask, gains, gain, eps, order, keep)
    return o


def sima_triton_qkv(
    qkv: Tensor, *, order: str, token_mask: Tensor | None = None, token_ref: float | None = None, eps: float = 1e-12
) -> Tensor:
    """SimA of a packed projection [B, N, 3, H, D] -> [B, N, H, D]."""
    gain, gains = (1.0, None) if token_ref is None else _gain(_unpack(qkv)[0], token_mask, token_ref)
    keep = torch.is_grad_enabled() and qkv.requires_grad
    call = attention_qkv if _must_see_operators(qkv) else plain_attention_qkv
    return call(qkv, token_mask, gains, gain, eps, order, keep)[0]


def is_better_packed(qkv: Tensor) -> bool:
    """True where `sima_triton_qkv` should take it whole: its gradient comes packed, and a graph has one node of it.

    In a plain call without a gradient q, k and v are views that cost nothing to pass.
    """
    return (torch.is_grad_enabled() and qkv.requires_grad) or _must_see_operators(qkv)


def sima_projected(
    qkv: Tensor, weight: Tensor, bias: Tensor | None, *, token_ref: float | None = None, eps: float = 1e-12
) -> Tensor:
    """Packed [B, N, 3, H, D] -> the attention times a projection weight [C, H * D], plus its bias: [B, N, C].

    O W^T = Q (diag(s) K^T V W^T): the projection joins the small matrix of a head, and O is never written. Inference
    only.
    """
    B, _, _, H, D = qkv.shape
    gain, _ = _gain(_unpack(qkv)[0], None, token_ref)
    C = weight.shape[0]
    state = state_qkv(qkv, gain, eps).to(qkv.dtype).transpose(0, 1).reshape(H, B * D, D)
    columns = weight.to(qkv.dtype).view(C, H, D).permute(1, 2, 0)  # [H, D, C]
    matrices = torch.bmm(state, columns).view(H, B, D, C).transpose(0, 1).reshape(B, H * D, C)
    out = torch.bmm(qkv[:, :, 0].flatten(2), matrices)  # [B, N, C]
    return out if bias is None else out + bias.to(out.dtype)


def _must_see_operators(*tensors: Tensor) -> bool:
    """True where more than torch's autograd looks at a call: a compiler, a tracer, a mode, a transform, a subclass."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or any(type(t) is not Tensor and type(t) is not nn.Parameter for t in tensors)
    )


def _gain(q: Tensor, query_mask: Tensor | None, token_ref: float | None) -> tuple[float, Tensor | None]:
    """The factor on the output: one number, or one for every image [B]."""
    if token_ref is None:
        return 1.0, None
    gain = token_gain(q, query_mask, token_ref)
    return (1.0, gain.flatten()) if isinstance(gain, Tensor) else (gain, None)


def _unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, N, 3, H, D] -> q, k, v [B, H, N, D], views."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _heads_last(like: Tensor, channels: int) -> Tensor:
    """An empty [B, H, N, channels] in the memory order of tokens, which a projection reads without a copy."""
    B, H, N, _ = like.shape
    return like.new_empty(B, N, H, channels).transpose(1, 2)


def _run_forward(q, k, v, o, query_mask, key_mask, gains, gain, eps, order, keep) -> tuple[Tensor | None, ...]:
    """Fill o. Returns the state and the norms, None where they are not kept."""
    from sima_attn.ops.triton_launch import Options, forward

    with _device_of(q):
        kept = forward(q, k, v, o, Options(query_mask, key_mask, gains, gain, eps), order=order, keep=keep)
    return kept if keep else (None, None)


def _or_empty(kept: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """An operator returns tensors: empty ones for what there is not."""
    state, norms = (like.new_empty(0, dtype=torch.float32) if t is None else t for t in kept)
    return state, norms


def _run_backward(grads, tensors, state, norms, query_mask, key_mask, gains, gain, eps) -> None:
    from sima_attn.ops.triton_launch import Options, backward

    q, k, v, grad = tensors
    if grad.stride(3) != 1:  # such as the expanded gradient of a sum
        grad = grad.contiguous()
    state = state if state.numel() else None
    with _device_of(q):
        backward((q, k, v, grad, *grads), state, norms, Options(query_mask, key_mask, gains, gain, eps))


def _device_of(q: Tensor) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    elsewhere = q.is_cuda and q.device.index != torch.cuda.current_device()
    return torch.cuda.device(q.device) if elsewhere else contextlib.nullcontext()


def _fake_kept(q: Tensor, v: Tensor, order: str, keep: bool) -> tuple[Tensor, Tensor]:
    B, H, _, D = q.shape
    state_shape = (B, H, D, v.shape[3]) if keep and order == "kv" else (0,)
    norms_shape = (2, B, H, D) if keep else (0,)
    return q.new_empty(state_shape, dtype=torch.float32), q.new_empty(norms_shape, dtype=torch.float32)


def run_attention(
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(o [B, H, N, Dv], state, norms); the last two are what the gradient needs, empty unless `keep`."""
    o = _heads_last(q, v.shape[3])
    kept = _run_forward(q, k, v, o, query_mask, key_mask, gains, gain, eps, order, keep)
    return o, *_or_empty(kept, q)


attention = torch.library.custom_op("sima_attn::attention", run_attention, mutates_args=())


@attention.register_fake
def _(q, k, v, query_mask, key_mask, gains, gain, eps, order, keep):
    return _heads_last(q, v.shape[3]), *_fake_kept(q, v, order, keep)


def run_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    norms: Tensor,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    gains: Tensor | None,
    gain: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    grads = _heads_last(q, q.shape[3]), _heads_last(k, k.shape[3]), _heads_last(v, v.shape[3])
    _run_backward(grads, (q, k, v, grad), state, norms, query_mask, key_mask, gains, gain, eps)
    return grads


attention_backward = torch.library.custom_op("sima_attn::attention_backward", run_attention_backward, mutates_args=())


@attention_backward.register_fake
def _(grad, q, k, v, state, norms, query_mask, key_mask, gains, gain, eps):
    return tuple(_heads_last(t, t.shape[3]) for t in (q, k, v))


def run_attention_qkv(
    qkv: Tensor, token_mask: Tensor | None, gains: Tensor | None, gain: float, eps: float, order: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention`, of a packed [B, N, 3, H, D]; o is [B, N, H, D]."""
    q, k, v = _unpack(qkv)
    o = _heads_last(q, v.shape[3])
    kept = _run_forward(q, k, v, o, token_mask, token_mask, gains, gain, eps, order, keep)
    return o.transpose(1, 2), *_or_empty(kept, q)


attention_qkv = torch.library.custom_op("sima_attn::attention_qkv", run_attention_qkv, mutates_args=())


@attention_qkv.register_fake
def _(qkv, token_mask, gains, gain, eps, order, keep):
    q, _, v = _unpack(qkv)
    return _heads_last(q, v.shape[3]).transpose(1, 2), *_fake_kept(q, v, order, keep)


def run_attention_qkv_backward(
    grad: Tensor,
    qkv: Tensor,
    state: Tensor,
    norms: Tensor,
    token_mask: Tensor | None,
    gains: Tensor | None,
    gain: float,
    eps: float,
) -> Tensor:
    """The gradient of the packed qkv [B, N, 3, H, D]."""
    packed = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    tensors = (*_unpack(qkv), grad.transpose(1, 2))
    _run_backward(_unpack(packed), tensors, state, norms, token_mask, token_mask, gains, gain, eps)
    return packed


attention_qkv_backward = torch.library.custom_op(
    "sima_attn::attention_qkv_backward", run_attention_qkv_backward, mutates_args=()
)


@attention_qkv_backward.register_fake
def _(grad, qkv, state, norms, token_mask, gains, gain, eps):
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


@torch.library.custom_op("sima_attn::state_qkv", mutates_args=())
def state_qkv(qkv: Tensor, gain: float, eps: float) -> Tensor:
    """diag(s) K^T V [B, H, D, D] of a packed [B, N, 3, H, D], float32; without a gradient."""
    from sima_attn.ops.triton_launch import Options, state_of

    with _device_of(qkv):
        return state_of(*_unpack(qkv), Options(None, None, None, gain, eps))


@state_qkv.register_fake
def _(qkv, gain, eps):
    B, _, _, H, D = qkv.shape
    return qkv.new_empty((B, H, D, D), dtype=torch.float32)


def _save(ctx, inputs, output) -> None:
    q, k, v, query_mask, key_mask, gains, gain, eps, _, _ = inputs
    ctx.save_for_backward(q, k, v, output[1], output[2], query_mask, key_mask, gains)
    ctx.gain, ctx.eps = gain, eps
    ctx.set_materialize_grads(False)  # state and norms have no gradient: no zeros for them


def _grad(ctx, grad, *_unused, run=attention_backward):
    return *run(grad, *ctx.saved_tensors, ctx.gain, ctx.eps), *[None] * 7


def _save_qkv(ctx, inputs, output) -> None:
    qkv, token_mask, gains, gain, eps, _, _ = inputs
    ctx.save_for_backward(qkv, output[1], output[2], token_mask, gains)
    ctx.gain, ctx.eps = gain, eps
    ctx.set_materialize_grads(False)


def _grad_qkv(ctx, grad, *_unused, run=attention_qkv_backward):
    return run(grad, *ctx.saved_tensors, ctx.gain, ctx.eps), *[None] * 6


attention.register_autograd(_grad, setup_context=_save)
attention_qkv.register_autograd(_grad_qkv, setup_context=_save_qkv)


def _past_the_operator(run: Callable, save: Callable, grad: Callable, run_backward: Callable) -> Callable:
    """What an operator does, for a plain call: the same code in an autograd.Function.

    It has no setup_context, for which torch would look at the signature in every call; to differentiate it twice is
    an error and not a zero.
    """

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            outputs = run(*arguments)
            save(ctx, arguments, outputs)
            return outputs

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            return grad(ctx, *grads, run=run_backward)

    return Plain.apply


plain_attention = _past_the_operator(run_attention, _save, _grad, run_attention_backward)
plain_attention_qkv = _past_the_operator(run_attention_qkv, _save_qkv, _grad_qkv, run_attention_qkv_backward)
