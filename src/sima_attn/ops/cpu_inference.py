"""SimA on the CPU without autograd: the folded equation, one image after the other.

torch.matmul copies head views of a packed qkv tensor when B > 1. torch.bmm on one image reads them in
place, and q and k of one image stay in the cache between their norm and their product: together worth a
factor of two. docs/cpu-speed.md has the measurements behind every choice here.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels a head, Dv value channels a head.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Numbers of |q| or |k| that are written down at once: 4 MiB in float32, whatever the token count.
TILE_NUMBERS = 2**20
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def is_plain_cpu_inference(q: Tensor, k: Tensor, v: Tensor) -> bool:
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


def folded_by_image(
    q: Tensor, k: Tensor, v: Tensor, *, order: str, eps: float, gain: float | Tensor | None, work: torch.dtype
) -> Tensor:
    """O [B, H, N, Dv], lying in memory as [B, N, H, Dv]: the projection after it reads it without a copy.

    `gain` multiplies s: a number, or one for each image [B, 1, 1]. Sums and products run in dtype `work`.
    """
    (B, H, N, D), tokens = q.shape, max(q.shape[2], k.shape[2])
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
