"""SimA on the CPU, forward: the folded equation, one image after the other. The backward is in cpu_training.py.

torch.matmul copies head views of a packed qkv tensor when B > 1. torch.bmm on one image reads them in place, and q and
k of one image stay in the cache between their norm and their product. Together this is twice as fast. docs/cpu-speed.md
has the measurements for every choice in this module.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sima_attn.ops.plain_calls import is_plain_call

# Numbers of |q| or |k| that are stored at once: 4 MiB in float32, for any token count.
TILE_NUMBERS = 2**20
# With fewer numbers of q or v per image, launching the operations costs more than the copies that they save.
LEAST_NUMBERS = 2**13


def runs_by_image(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True where SimA is computed one image after the other: plain calls on the CPU, images that are not tiny."""
    return are_plain_on_cpu(q, k, v) and max(q.shape[1:].numel(), v.shape[1:].numel()) >= LEAST_NUMBERS


def are_plain_on_cpu(*tensors: Tensor) -> bool:
    """True for a plain call with tensors on the CPU."""
    return all(t.is_cpu for t in tensors) and is_plain_call(*tensors)


class ImageState(NamedTuple):
    """Saved for the backward of one image, besides its q, k and v."""

    norm_q: Tensor  # |Q|_1 [H, 1, D], before eps
    norm_k: Tensor
    inner: Tensor  # diag(s) K^T V [H, D, Dv] in "kv" order, Q diag(s) K^T [H, N, M] in "qk" order


def folded_by_image(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    order: str,
    eps: float,
    gain: float | Tensor | None,
    work: torch.dtype,
    states: list[ImageState] | None = None,
) -> Tensor:
    """O [B, H, N, Dv], stored as [B, N, H, Dv], so that the projection after it reads it without a copy.

    `gain` multiplies s: a number, or one per image [B, 1, 1]. Sums and products run in dtype `work`.
    The state of each image is appended to `states`.
    """
    (B, H, N, D), tokens = q.shape, max(q.shape[2], k.shape[2])
    out = q.new_empty(B, N, H, v.shape[3]).transpose(1, 2)  # [B, H, N, Dv]
    room = tokens if order == "qk" else min(tokens, max(1, TILE_NUMBERS // (H * D)))
    scratch = q.new_empty(H, room, D, dtype=work)
    attend = _attend_kv if order == "kv" else _attend_qk
    for b, (q_b, k_b, v_b) in enumerate(images_in(work, q, k, v)):
        left, right, state = attend(q_b, k_b, v_b, scratch, eps, gain_of_image(gain, b))
        multiply_into(out[b], left, right)
        if states is not None:
            states.append(state)
    return out


def _attend_kv(
    q: Tensor, k: Tensor, v: Tensor, scratch: Tensor, eps: float, gain: float | Tensor | None
) -> tuple[Tensor, Tensor, ImageState]:
    """Q [H, N, D] and diag(s) K^T V [H, D, Dv], whose product is O."""
    norm_q = _l1_in_scratch(q, scratch)
    if k.shape[1] == scratch.shape[1] and k.stride(1) * k.element_size() % 2048 == 0:
        # Rows that are a multiple of 2 KiB apart compete for the same few cache sets. K^T V is then 10 % faster from
        # a dense copy (for example with packed qkv of C = 512 or 1024).
        kv = torch.bmm(scratch.copy_(k).mT, v)  # [H, D, Dv]
        norm_k = scratch.abs_().sum(1, keepdim=True)
    else:
        kv = torch.bmm(k.mT, v)
        norm_k = _l1_in_scratch(k, scratch)
    s_q, s_k = scales(norm_q, norm_k, eps, gain)
    multiply_by_s(kv, s_q.mT, s_k.mT, out=kv)
    return q, kv, ImageState(norm_q, norm_k, kv)


def _attend_qk(
    q: Tensor, k: Tensor, v: Tensor, scratch: Tensor, eps: float, gain: float | Tensor | None
) -> tuple[Tensor, Tensor, ImageState]:
    """Q diag(s) K^T [H, N, M] and V [H, M, Dv], whose product is O."""
    norm_q, norm_k = _l1_in_scratch(q, scratch), _l1_in_scratch(k, scratch)
    qs = multiply_by_s(q, *scales(norm_q, norm_k, eps, gain), out=first_tokens(scratch, q))  # [H, N, D]
    qk = torch.bmm(qs, k.mT)
    return qk, v, ImageState(norm_q, norm_k, qk)


def _l1_in_scratch(x: Tensor, scratch: Tensor) -> Tensor:
    """|x|_1 over the tokens of x [H, N, D] -> [H, 1, D], as many tokens at a time as fit into the scratch."""
    if x.shape[1] <= scratch.shape[1]:
        return torch.abs(x, out=first_tokens(scratch, x)).sum(1, keepdim=True)
    norm = x.new_zeros(x.shape[0], 1, x.shape[2])
    for tile in x.split(scratch.shape[1], dim=1):
        norm += torch.abs(tile, out=first_tokens(scratch, tile)).sum(1, keepdim=True)
    return norm


def images_in(work: torch.dtype, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors of one image after the other, in dtype `work`."""
    for image in zip(*(t.unbind(0) for t in tensors), strict=True):
        yield image if tensors[0].dtype == work else tuple(t.to(work) for t in image)


def gain_of_image(gain: float | Tensor | None, b: int) -> float | Tensor | None:
    return gain[b] if isinstance(gain, Tensor) else gain


def scales(norm_q: Tensor, norm_k: Tensor, eps: float, gain: float | Tensor | None) -> tuple[Tensor, Tensor]:
    """The two factors of s: gain / |Q|_1 and 1 / |K|_1, each norm at least eps."""
    s_q, s_k = norm_q.clamp_min(eps).reciprocal_(), norm_k.clamp_min(eps).reciprocal_()
    return (s_q if gain is None else s_q.mul_(gain)), s_k


def multiply_by_s(x: Tensor, s_q: Tensor, s_k: Tensor, *, out: Tensor) -> Tensor:
    """out = s x. One factor after the other: their product underflows float32 where q and k are near 1e18."""
    return torch.mul(x, s_q, out=out).mul_(s_k)


def multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left right, for a strided `out` of any float type."""
    # Only a dense result is computed by several threads; with one thread, writing in place saves a copy.
    if out.dtype == left.dtype and torch.get_num_threads() == 1:
        torch.bmm(left, right, out=out)
    else:
        out.copy_(torch.bmm(left, right))


def first_tokens(scratch: Tensor, x: Tensor) -> Tensor:
    """The part of the scratch [H, tokens, D] that has as many tokens as x [H, N, D]."""
    return scratch if x.shape[1] == scratch.shape[1] else scratch[:, : x.shape[1]]
