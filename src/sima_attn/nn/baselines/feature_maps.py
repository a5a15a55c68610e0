"""What the attentions with a positive feature map phi share: O_i = phi(q_i) S / phi(q_i) z.

S = sum_j phi(k_j) v_j^T        z = sum_j phi(k_j)
"""

from torch import Tensor

from sima_attn.ops.cost import AttentionShape, Cost, product_macs, resolve_order


def weighted_sums(phi_q: Tensor, phi_k: Tensor, v: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """Sum of the values [B, H, N, Dv] and of the weights [B, H, N, 1] for every query, from phi [B, H, N, F]."""
    order = resolve_order(order, phi_q.shape[-2], phi_k.shape[-2], phi_q.shape[-1], v.shape[-1])
    if order == "kv":
        return phi_q @ (phi_k.mT @ v), phi_q @ phi_k.sum(-2).unsqueeze(-1)
    weights = phi_q @ phi_k.mT  # [B, H, N, M]
    return weights @ v, weights.sum(-1, keepdim=True)


def feature_cost(shape: AttentionShape, F: int, order: str, *, exps: int, scratch: int = 0, macs: int = 0) -> Cost:
    """The cost of `weighted_sums` with F features, plus what making the features takes."""
    N, M, Dv = shape.N, shape.M, shape.Dv
    order = resolve_order(order, N, M, F, Dv)
    normaliser = N * F if order == "kv" else 0
    between = F * Dv + F if order == "kv" else N * M
    return Cost(
        shape,
        macs=shape.heads * (product_macs(order, N, M, F, Dv) + normaliser) + macs,
        exps=exps,
        scratch=shape.heads * ((N + M) * F + between + N) + scratch,
        order=order,
    )
