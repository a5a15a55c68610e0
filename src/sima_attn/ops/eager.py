"""SimA in plain torch: any device, any float type, autograd, torch.compile.

Both l1 norms are per channel, so they fold into one vector s of D numbers a head:

    s_c = 1 / (|Q^c|_1 |K^c|_1)               O = Q diag(s) K^T V

`folded_attention` is that equation. No normalised copy of Q or K is ever made, and in "kv" order no
N x M matrix either. `folded_by_image` is the same equation for inference on the CPU, where reading the
heads in place and staying in the cache is worth a factor of two.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels a head, Dv value channels a head.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Numbers of q or k that are copied at once on the CPU: 4 MiB in float32, whatever the token count.
TILE_NUMBERS = 2**20


PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def l1_over_tokens(x: Tensor) -> Tensor:
    return x.abs().sum(-2)


def l2_over_tokens(x: Tensor) -> Tensor:
    return x.square().sum(-2).sqrt()


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


def folded_by_image(
    q: Tensor, k: Tensor, v: Tensor, *, order: str, eps: float, gain: float | Tensor | None = None
) -> Tensor:
    """`folded_attention` for the CPU without autograd, one image after the other.

    torch.matmul copies head views of a packed qkv tensor when B > 1; torch.bmm on one image reads them
    in place. The output lies in memory as [B, N, H, Dv], so the projection after it needs no copy either.
    """
    (B, H, N, D), tokens = q.shape, max(q.shape[2], k.shape[2])
    work = compute_dtype(q.dtype)
    out = q.new_empty(B, N, H, v.shape[3]).transpose(1, 2)  # [B, H, N, Dv]
    room = tokens if order == "qk" else min(tokens, max(1, TILE_NUMBERS // (H * D)))
    scratch = q.new_empty(H, room, D, dtype=work)
    operands = _kv_operands if order == "kv" else _qk_operands
    # Only a dense result is computed by several threads; without them writing in place saves a copy.
    in_place = q.dtype == work and torch.get_num_threads() == 1

    for b in range(B):
        q_b, k_b, v_b = q[b], k[b], v[b]  # [H, N, D], [H, M, D], [H, M, Dv]
        if q.dtype != work:
            q_b, k_b, v_b = q_b.to(work), k_b.to(work), v_b.to(work)
        left, right = operands(q_b, k_b, v_b, scratch, eps, gain[b] if isinstance(gain, Tensor) else gain)
        if in_place:
            torch.bmm(left, right, out=out[b])
        else:
            out[b].copy_(torch.bmm(left, right))
    return out


def _kv_operands(
    q: Tensor, k: Tensor, v: Tensor, scratch: Tensor, eps: float, gain: float | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Q [H, N, D] and diag(s) K^T V [H, D, Dv], whose product is O."""
    norms = _l1_in_scratch(q, scratch).clamp_min_(eps)  # [H, D]
    if k.shape[1] == scratch.shape[1] and k.stride(1) * k.element_size() % 2048 == 0:
        # Rows that lie a multiple of 2 KiB apart compete for the same few sets of the cache: then K^T V is
        # 10 % sooner from a dense copy (in packed qkv of C = 512 or 1024, say).
        kv = torch.bmm(scratch.copy_(k).mT, v)  # [H, D, Dv]
        norms.mul_(scratch.abs_().sum(1).clamp_min_(eps))
    else:
        kv = torch.bmm(k.mT, v)
        norms.mul_(_l1_in_scratch(k, scratch).clamp_min_(eps))
    if gain is not None:
        norms /= gain
    return q, kv.div_(norms.unsqueeze(2))


def _qk_operands(
    q: Tensor, k: Tensor, v: Tensor, scratch: Tensor, eps: float, gain: float | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Q diag(s) K^T [H, N, M] and V [H, M, Dv], whose product is O."""
    norms = _l1_in_scratch(q, scratch).clamp_min_(eps)  # [H, D]
    norms.mul_(_l1_in_scratch(k, scratch).clamp_min_(eps))
    if gain is not None:
        norms /= gain
    qs = torch.mul(q, norms.reciprocal_().unsqueeze(1), out=_room(scratch, q))  # [H, N, D]
    # (K (Q s)^T)^T instead of (Q s) K^T: the same products, 7 % sooner with MKL at N = 64, D = 256.
    return torch.bmm(k, qs.mT).mT, v


def _l1_in_scratch(x: Tensor, scratch: Tensor) -> Tensor:
    """|x|_1 over the tokens of x [H, N, D] -> [H, D], as many tokens at a time as the scratch has room for."""
    if x.shape[1] <= scratch.shape[1]:
        return torch.abs(x, out=_room(scratch, x)).sum(1)
    norm = x.new_zeros(x.shape[0], x.shape[2])
    for tile in x.split(scratch.shape[1], dim=1):
        norm += torch.abs(tile, out=_room(scratch, tile)).sum(1)
    return norm


def _room(scratch: Tensor, x: Tensor) -> Tensor:
    return scratch if x.shape[1] == scratch.shape[1] else scratch[:, : x.shape[1]]


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
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):  # it would round the float32 products back
            return sima_eager(
                q, k, v, order=order, key_mask=key_mask, query_mask=query_mask, token_ref=token_ref, eps=eps, norm=norm
            )
    gain = None if token_ref is None else token_gain(q, query_mask, token_ref)
    if key_mask is not None or query_mask is not None:
        q, k, v = drop_padding(q, k, v, key_mask=key_mask, query_mask=query_mask)
    if norm == "l1" and _is_plain_cpu_inference(q, k, v):
        return folded_by_image(q, k, v, order=order, eps=eps, gain=gain)

    dtype, work = q.dtype, compute_dtype(q.dtype)
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


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays; everything else is summed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _is_plain_cpu_inference(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True where nothing watches the computation: no autograd of any kind, no tracing, no tensor subclass."""
    return not (
        torch.compiler.is_compiling()
        or not q.is_cpu
        or (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or not (type(q) in PLAIN_TYPES and type(k) in PLAIN_TYPES and type(v) in PLAIN_TYPES)
        # torch.func (grad, jvp, vmap), forward-mode AD and jit tracing cannot follow writes into `out=`.
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
    )
