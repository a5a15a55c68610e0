"""Efficient attention (Shen et al., 2021): two softmaxes, neither of them N x N.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head.
"""

from torch import Tensor

from sima_attn.nn.attention import Attention
from sima_attn.ops.cost import AttentionShape, Cost, product_macs


class EfficientAttention(Attention):
    """O = rho_q(Q) (rho_k(K)^T V): softmax over the channels of each query, over the tokens of each key channel."""

    exps_in_paper = "ND"

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q.softmax(dim=-1) @ (k.softmax(dim=-2).mT @ v)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        return q.softmax(dim=-1) @ k.softmax(dim=-2).mT

    def cost(self, shape: AttentionShape) -> Cost:
        N, M, D, Dv = shape.N, shape.M, shape.D, shape.Dv
        features = (N + M) * D
        return Cost(
            shape,
            macs=shape.heads * product_macs("kv", N, M, D, Dv),
            exps=shape.heads * features,
            scratch=shape.heads * (features + D * Dv),
            order="kv",
        )
