"""SimA in plain torch: any device, any float type, autograd, torch.compile.

Both l1 norms are per channel, so they fold into one vector s of D numbers per head:

    s_c = 1 / (|Q^c|_1 |K^c|_1)               O = Q diag(s) K^T V

`folded_attention` is that equation. It makes no normalized copy of Q or K, and in "kv" order no N x M matrix. Plain
calls on the CPU are implemented in cpu_inference.py and cpu_training.py.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from sima_attn.ops.cpu_inference import folded_by_image, runs_by_image
from sima_attn.ops.cpu_training import FoldedAttention, Options
from sima_attn.ops.plain_calls import needs_grad


def l1_over_tokens(x: Tensor) -> Tensor:
    return x.abs().sum(-2)


# "l1" is SimA; the other two are the ablations of the paper.
NORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "l1": l1_over_tokens,
    "l2": lambda x: torch.linalg.vector_norm(x, dim=-2),
    "none": lambda x: torch.ones_like(x[..., 0, :]),
}


def inverse_norm(x: Tensor, *, eps: float = 1e-12, norm: str = "l1") -> Tensor:
    """1 / max(|X|_1, eps) [..., D]."""
    return NORMS[norm](x).clamp_min(eps).reciprocal()


def folded_attention(q: Tensor, k: Tensor, v: Tensor, s_q: Tensor, s_k: Tensor, order: str) -> Tensor:
    """O = Q diag(s_q s_k) K^T V [..., N, Dv], multiplied from the right ("kv") or from the left ("qk").

    The two factors of s are applied separately: their product underflows float32 where q and k are near 1e18.
    """
    if order == "kv":
        return q @ (s_q[..., :, None] * (s_k[..., :, None] * (k.mT @ v)))
    return ((q * s_q[..., None, :] * s_k[..., None, :]) @ k.mT) @ v


def sima_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    order: str,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    token_ref: float | None = None,
    eps: float = 1e-12,
    norm: str = "l1",
) -> Tensor:
    """SimA of checked arguments. Half precision is computed in float32 and rounded once, at the end.

    A normalized value is about 1/N: it underflows in float16, and an eps of 1e-12 is 0 there.
    """
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        with without_autocast(q):  # it would round the float32 products back
            return sima_eager(
                q, k, v, order=order, key_mask=key_mask, query_mask=query_mask, token_ref=token_ref, eps=eps, norm=norm
            )
    gain = None if token_ref is None else token_gain(q, query_mask, token_ref)
    if key_mask is not None or query_mask is not None:
        q, k, v = drop_padding(q, k, v, key_mask=key_mask, query_mask=query_mask)
    if norm != "l1" or not runs_by_image(q, k, v):
        return folded_in_one(q, k, v, order=order, eps=eps, gain=gain, norm=norm)
    if needs_grad(q, k, v):
        return FoldedAttention.apply(_options(q, order, eps, gain), q, k, v)
    return folded_by_image(q, k, v, order=order, eps=eps, gain=gain, work=compute_dtype(q.dtype))


def trains_packed(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True where `sima_eager_qkv` should compute the packed tensor that q, k and v are views of."""
    return needs_grad(q, k, v) and runs_by_image(q, k, v)


def sima_eager_qkv(
    qkv: Tensor, *, order: str, token_mask: Tensor | None = None, token_ref: float | None = None, eps: float = 1e-12
) -> Tensor:
    """SimA of a packed projection [B, N, 3, H, D] -> [B, N, H, D], for training on the CPU.

    The gradient is packed too, so that the gradients of q, k and v need no copy into one tensor.
    """
    q = qkv.select(2, 0).transpose(1, 2)  # [B, H, N, D]
    gain = None if token_ref is None else token_gain(q, token_mask, token_ref)
    if token_mask is not None:
        qkv = qkv.masked_fill(~token_mask[:, :, None, None, None], 0)
    with without_autocast(qkv):
        return FoldedAttention.apply(_options(qkv, order, eps, gain), qkv).transpose(1, 2)


def _options(x: Tensor, order: str, eps: float, gain: float | Tensor | None) -> Options:
    differentiable = partial(folded_in_one, order=order, eps=eps, gain=gain)
    return Options(order, eps, gain, compute_dtype(x.dtype), differentiable)


def folded_in_one(
    q: Tensor, k: Tensor, v: Tensor, *, order: str, eps: float, gain: float | Tensor | None, norm: str = "l1"
) -> Tensor:
    """SimA of all images at once, in operations that every torch transform supports."""
    dtype, work = q.dtype, compute_dtype(q.dtype)
    q, k, v = q.to(work), k.to(work), v.to(work)
    s_q, s_k = inverse_norm(q, eps=eps, norm=norm), inverse_norm(k, eps=eps, norm=norm)  # [B, H, D] each
    if gain is not None:
        s_q = s_q * gain
    return heads_last(folded_attention(q, k, v, s_q, s_k, order).to(dtype))


def heads_last(o: Tensor) -> Tensor:
    """o [B, H, N, Dv], stored as [B, N, H, Dv], so that the projection after it reads it without a copy.

    Every backend returns this layout. Exported programs have no layouts, so the copy would be useless there.
    """
    return o if torch.compiler._is_exporting_flag else o.transpose(1, 2).contiguous().transpose(1, 2)


def token_gain(q: Tensor, query_mask: Tensor | None, token_ref: float) -> float | Tensor:
    """N / token_ref, where N counts the query tokens that are not padding: a number, or [B, 1, 1] with a mask."""
    if query_mask is None:
        return q.shape[2] / token_ref
    return query_mask.sum(1, dtype=compute_dtype(q.dtype))[:, None, None] / token_ref


def drop_padding(
    q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, query_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Set the masked rows to zero, also in v, so that a NaN in the padding does not reach the output."""
    if query_mask is not None:
        q = q.masked_fill(~query_mask[:, None, :, None], 0)
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    return q, k, v


def without_autocast(x: Tensor) -> AbstractContextManager:
    """A context without autocast for the device of x; the "meta" device has no autocast."""
    is_off = x.is_meta or not torch.is_autocast_enabled(x.device.type)
    return nullcontext() if is_off else torch.autocast(x.device.type, enabled=False)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
