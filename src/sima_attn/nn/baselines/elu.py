"""Linear attention with the feature map elu(x) + 1 (Katharopoulos et al., 2020).

Shapes: B batch, H heads, N query tokens, M key tokens, D channels a head.
"""

import torch.nn.functional as F
from torch import Tensor

from sima_attn.nn.attention import Attention, computed_in_float32
from sima_attn.nn.baselines.feature_maps import feature_cost, weighted_sums
from sima_attn.ops.api import check_order
from sima_attn.ops.cost import AttentionShape, Cost

EPS = 1e-6


class EluAttention(Attention):
    """O_i = phi(q_i) S / (phi(q_i) z + 1e-6), phi(x) = elu(x) + 1, S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j)."""

    def __init__(self, dim: int, num_heads: int = 8, *args, order: str = "auto", **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        check_order(order)
        self.order = order

    @computed_in_float32
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values, weights = weighted_sums(F.elu(q) + 1, F.elu(k) + 1, v, self.order)
        return values / (weights + EPS)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        weights = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
        return weights / (weights.sum(-1, keepdim=True) + EPS)

    def cost(self, shape: AttentionShape) -> Cost:
        features = shape.heads * (shape.N + shape.M) * shape.D
        return feature_cost(shape, shape.D, self.order, exps=features)
