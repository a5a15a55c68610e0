"""SimA in plain torch: any device, any float type, autograd, torch.compile.

Both l1 norms are per channel, so they fold into one vector s of D numbers a head:

    s_c = 1 / (|Q^c|_1 |K^c|_1)               O = Q diag(s) K^T V

`folded_attention` is that equation. No normalised copy of Q or K is ever made, and in "kv" order no
N x M matrix either. Inference on the CPU has a form of its own, in cpu_inference.py.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels a head, Dv value channels a head.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from sima_attn.ops.cpu_inference import folded_by_image, is_plain_cpu_inference


def l1_over_tokens(x: Tensor) -> Tensor:
    return x.abs().sum(-2)


def l2_over_tokens(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-2)


def ones_over_tokens(x: Tensor) -> Tensor:
    return torch.ones_like(x[..., 0, :])


# "l1" is SimA; the other two are the ablations of the paper.
NORMS = {"l1": l1_over_tokens, "l2": l2_over_tokens, "none": ones_over_tokens}


def folded_scale(q: Tensor, k: Tensor, *, eps: float = 1e-12, norm: str = "l1") -> Tensor:
    """s = 1 / (|Q|_1 |K|_1) [..., D], each norm at least eps."""
    over_tokens = NORMS[norm]
    return (over_tokens(q).clamp_min(eps) * over_tokens(k).clamp_min(eps)).reciprocal()


def folded_attention(q: Tensor, k: Tensor, v: Tensor, s: Tensor, order: str) -> Tensor:
    """O = Q diag(s) K^T V [..., N, Dv], the product taken from the right ("kv") or the left ("qk")."""
    if order == "kv":
        return q @ (s[..., :, None] * (k.mT @ v))
    return ((q * s[..., None, :]) @ k.mT) @ v


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

    A normalised value is about 1/N: it underflows in float16, and an eps of 1e-12 is 0 there.
    """
    if not q.is_meta and torch.is_autocast_enabled(q.device.type):
        with without_autocast(q):  # it would round the float32 products back
            return sima_eager(
                q, k, v, order=order, key_mask=key_mask, query_mask=query_mask, token_ref=token_ref, eps=eps, norm=norm
            )
    gain = None if token_ref is None else token_gain(q, query_mask, token_ref)
    if key_mask is not None or query_mask is not None:
        q, k, v = drop_padding(q, k, v, key_mask=key_mask, query_mask=query_mask)
    dtype, work = q.dtype, compute_dtype(q.dtype)
    if norm == "l1" and is_plain_cpu_inference(q, k, v):
        return folded_by_image(q, k, v, order=order, eps=eps, gain=gain, work=work)

    q, k, v = q.to(work), k.to(work), v.to(work)
    s = folded_scale(q, k, eps=eps, norm=norm)  # [B, H, D]
    if gain is not None:
        s = s * gain
    return folded_attention(q, k, v, s, order).to(dtype)


def token_gain(q: Tensor, query_mask: Tensor | None, token_ref: float) -> float | Tensor:
    """N / token_ref, N being the query tokens that are not padding: one number, or [B, 1, 1] with a mask."""
    if query_mask is None:
        return q.shape[2] / token_ref
    return query_mask.sum(1, dtype=compute_dtype(q.dtype))[:, None, None] / token_ref


def drop_padding(
    q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, query_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero the masked rows, v too: then not even a NaN in the padding reaches the output."""
    if query_mask is not None:
        q = q.masked_fill(~query_mask[:, None, :, None], 0)
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
    return q, k, v


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Autocast off for the device of x; "meta" has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
