"""Base class of attentions with a feature map phi: O_i = phi(q_i) S / phi(q_i) z.

    S = sum_j phi(k_j) v_j^T        z = sum_j phi(k_j)

Shapes: B batch, H heads, N query tokens, M key tokens, F features, D channels per head.
"""

from abc import abstractmethod

from torch import Tensor

from sima_attn.nn.attention import Attention, computed_in_float32
from sima_attn.ops.api import check_order
from sima_attn.ops.cost import AttentionShape, Cost, product_macs, resolve_order
from sima_attn.ops.linear_attention import weighted_sums


class FeatureMapAttention(Attention):
    """Linear attention with a feature map; a subclass defines `features` and `divisor`.

    Queries and keys share the map, unless a subclass defines `query_features` and `key_features` too. Like SimA it has
    both orders: phi(Q) (phi(K)^T V) and (phi(Q) phi(K)^T) V.
    """

    def __init__(self, dim: int, num_heads: int = 8, *args, order: str = "auto", **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        check_order(order)
        self.order = order

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """phi(x): [B, H, N, D] -> [B, H, N, F]."""

    def query_features(self, q: Tensor) -> Tensor:
        """phi of the queries: [B, H, N, D] -> [B, H, N, F]."""
        return self.features(q)

    def key_features(self, k: Tensor) -> Tensor:
        """phi of the keys: [B, H, M, D] -> [B, H, M, F]."""
        return self.features(k)

    @abstractmethod
    def divisor(self, weights: Tensor) -> Tensor:
        """The sum of a query's weights [B, H, N, 1], bounded away from zero."""

    @computed_in_float32
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values, weights = weighted_sums(self.query_features(q), self.key_features(k), v, self.order)
        return values / self.divisor(weights)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        weights = self.query_features(q) @ self.key_features(k).mT
        return weights / self.divisor(weights.sum(-1, keepdim=True))


def feature_cost(shape: AttentionShape, F: int, order: str, *, exps: int, scratch: int = 0, macs: int = 0) -> Cost:
    """The cost of `weighted_sums` with F features; `scratch` and `macs` are added for computing the features."""
    N, M, Dv = shape.N, shape.M, shape.Dv
    order = resolve_order(order, N, M, F, Dv)
    normalizer = N * F if order == "kv" else 0
    between = F * Dv + F if order == "kv" else N * M
    return Cost(
        shape,
        macs=shape.heads * (product_macs(order, N, M, F, Dv) + normalizer) + macs,
        exps=exps,
        scratch=shape.heads * ((N + M) * F + between + N) + scratch,
        order=order,
    )
