"""Linear attention with a feature map phi, o_i = phi(q_i) S / (phi(q_i) . z), and relu2, which has fused kernels.

    S = sum_j phi(k_j) v_j^T        z = sum_j phi(k_j)

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head, Dv value channels per head, F features.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sima_attn.ops.api import check_order, check_qkv, choose_backend, is_split
from sima_attn.ops.cost import resolve_order
from sima_attn.ops.eager import compute_dtype, heads_last, without_autocast
from sima_attn.ops.prepared_calls import call_key, keep_call, prepared_call
from sima_attn.ops.triton_support import unsupported_by_relu2

if TYPE_CHECKING:
    from sima_attn.ops.sequence_parallel import Group

RELU2_EPS = 1e-6


def weighted_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Sum of the values [B, H, N, Dv] and of the weights [B, H, N, 1] for every query, from phi [B, H, N, F]."""
    order = resolve_order(order, phi_q.shape[-2], phi_k.shape[-2], phi_q.shape[-1], v.shape[-1])
    if order == "kv":
        return phi_q @ (phi_k.mT @ v), phi_q @ phi_k.sum(-2).unsqueeze(-1)
    weights = phi_q @ phi_k.mT  # [B, H, N, M]
    return weights @ v, weights.sum(-1, keepdim=True)


def relu2_features(x: Tensor) -> Tensor:
    """phi(x) = relu(x)^2 / sqrt(D)."""
    return (x * x.shape[-1] ** -0.25).relu().square()


def relu2_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    order: str = "auto",
    backend: str = "auto",
    group: "Group | None" = None,
) -> Tensor:
    """Linear attention with squared relu features [B, H, N, Dv]: weights that are not negative and sum to one.

        o_i = phi(q_i) S / max(phi(q_i) . z, 1e-6),    phi(x) = relu(x)^2 / sqrt(D)

    A query without positive weights gets zeros. Features and sums are float32 (float64 for float64 inputs), and the
    result has the dtype of the inputs. The kernels round the factors of a product, not the sums, to half precision.
    Strided views are read in place.

    Args:
        q: [B, H, N, D].
        k: [B, H, M, D].
        v: [B, H, M, Dv].
        order: "kv" computes phi(Q) (phi(K)^T V), linear in the tokens; "qk" computes (phi(Q) phi(K)^T) V; "auto" uses
            the cheaper one, see `choose_order`, and "kv" in the kernels.
        backend: "eager" is plain torch on any device, "triton" the fused kernels for CUDA; "auto" uses the kernels
            where they are supported. A named backend runs or raises.
        group: The processes over which the tokens are split, as for `sima_attention`: S and z are summed over them.
            Computed in plain torch, in the order "kv".
    """
    if group is not None and is_split(group):
        return _relu2_split(q, k, v, order, backend, group)
    key = call_key((q, k, v), ("relu2", order, backend))
    if (call := prepared_call(key)) is None:
        check_qkv(q, k, v)
        check_order(order)
        if choose_backend(q, backend, lambda: unsupported_by_relu2(q, k, v, order)) == "eager":
            return _relu2_eager(q, k, v, order)
        from sima_attn.ops.triton_op import PreparedCall

        call = keep_call(key, PreparedCall("kv", None, RELU2_EPS, "relu2"))
    return call(q, k, v).transpose(1, 2)


def _relu2_eager(q: Tensor, k: Tensor, v: Tensor, order: str) -> Tensor:
    """relu2 in plain torch; half precision is computed in float32, where squares would overflow, and rounded once."""
    dtype, work = q.dtype, compute_dtype(q.dtype)
    with without_autocast(q):
        values, weights = weighted_sums(relu2_features(q.to(work)), relu2_features(k.to(work)), v.to(work), order)
        return heads_last((values / weights.clamp_min(RELU2_EPS)).to(dtype))


def _relu2_split(q: Tensor, k: Tensor, v: Tensor, order: str, backend: str, group: "Group") -> Tensor:
    """relu2 of tokens that are split over processes: one all-reduce of D x Dv + D numbers per head and direction."""
    from sima_attn.ops.sequence_parallel import SumOverProcesses, check_agreement, process_group

    check_qkv(q, k, v)
    check_order(order)
    if order == "qk" or backend == "triton":
        raise ValueError(
            f"relu2 with a group is computed in plain torch and in the order 'kv', got {order=}, {backend=}; omit both"
        )
    members, (dtype, work) = process_group(group), (q.dtype, compute_dtype(q.dtype))
    check_agreement(members, q, k, v, backend="eager", token_ref=None, eps=RELU2_EPS)
    with without_autocast(q):
        phi_q, phi_k = relu2_features(q.to(work)), relu2_features(k.to(work))
        sums = torch.cat([phi_k.mT @ v.to(work), phi_k.sum(-2).unsqueeze(-1)], -1)  # S and z: [B, H, D, Dv + 1]
        values = phi_q @ SumOverProcesses.apply(sums, members)  # [B, H, N, Dv + 1]
        return heads_last((values[..., :-1] / values[..., -1:].clamp_min(RELU2_EPS)).to(dtype))
