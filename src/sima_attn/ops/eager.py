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
    Written flat: at 200 tokens every call of a function shows in the time.
    """
    (B, H, N, D), M, Dv = q.shape, k.shape[2], v.shape[3]
    work = compute_dtype(q.dtype)
    tile = max(1, TILE_NUMBERS // (H * D))  # tokens that are copied at once
    in_tiles = order == "kv" and max(N, M) > tile
    out = q.new_empty(B, N, H, Dv).transpose(1, 2)  # [B, H, N, Dv]
    q_scratch = q.new_empty(H, tile if in_tiles else N, D, dtype=work)
    k_scratch = q_scratch if M == N or in_tiles else q.new_empty(H, M, D, dtype=work)
    # Only a dense result is computed by several threads; without them writing in place saves a copy.
    in_place = q.dtype == work and torch.get_num_threads() == 1

    for b in range(B):
        q_b, k_b, v_b = q[b], k[b], v[b]  # [H, N, D], [H, M, D], [H, M, Dv]
        if q.dtype != work:
            q_b, k_b, v_b = q_b.to(work), k_b.to(work), v_b.to(work)
        if in_tiles:
            kv, norms = _kv_and_norms_in_tiles(q_b, k_b, v_b, q_scratch, eps)  # [H, D, Dv], [H, D]
        else:
            norms = torch.abs(q_b, out=q_scratch).sum(1).clamp_min_(eps)  # [H, D]
            if order == "kv":
                # K^T V and |K|_1 both read a dense copy of k while it is in the cache.
                kv = torch.bmm(k_scratch.copy_(k_b).mT, v_b)  # [H, D, Dv]
                norms.mul_(k_scratch.abs_().sum(1).clamp_min_(eps))
            else:
                norms.mul_(torch.abs(k_b, out=k_scratch).sum(1).clamp_min_(eps))
        if gain is not None:
            norms /= gain[b] if isinstance(gain, Tensor) else gain
        if order == "kv":
            left, right = q_b, kv.div_(norms.unsqueeze(2))
        else:
            # (K (Q s)^T)^T instead of (Q s) K^T: the same products, 7 % sooner with MKL at N = 64, D = 256.
            qs = torch.mul(q_b, norms.reciprocal_().unsqueeze(1), out=q_scratch)  # [H, N, D]
            left, right = torch.bmm(k_b, qs.mT).mT, v_b
        if in_place:
            torch.bmm(left, right, out=out[b])
        else:
            out[b].copy_(torch.bmm(left, right))
    return out


def _kv_and_norms_in_tiles(q: Tensor, k: Tensor, v: Tensor, scratch: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """K^T V [H, D, Dv] and |Q|_1 |K|_1 [H, D] of more tokens than the scratch [H, tile, D] has room for."""
    H, tile, D = scratch.shape
    kv, q_norm, k_norm = q.new_zeros(H, D, v.shape[2]), q.new_zeros(H, D), q.new_zeros(H, D)
    for q_tile in q.split(tile, dim=1):
        q_norm += torch.abs(q_tile, out=scratch[:, : q_tile.shape[1]]).sum(1)
    for k_tile, v_tile in zip(k.split(tile, dim=1), v.split(tile, dim=1), strict=True):
        dense = scratch[:, : k_tile.shape[1]].copy_(k_tile)
        kv += torch.bmm(dense.mT, v_tile)
        k_norm += dense.abs_().sum(1)
    return kv, q_norm.clamp_min_(eps).mul_(k_norm.clamp_min_(eps))


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
