"""cosFormer (Qin et al., 2022): linear attention with relu features, and its cosine re-weighting on a grid.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head.
"""

import torch
from torch import Tensor

from sima_attn.nn.baselines.feature_maps import FeatureMapAttention, feature_cost
from sima_attn.nn.grid import Grid, OnGrid, token_grid
from sima_attn.ops.cost import AttentionShape, Cost


class CosformerAttention(FeatureMapAttention):
    """O_i = q'_i (K'^T V) / max(q'_i . sum_j k'_j, 1e-6), q' = relu(q), k' = relu(k). No re-weighting."""

    exps_in_paper = "0"

    def features(self, x: Tensor) -> Tensor:
        return x.relu()

    def divisor(self, weights: Tensor) -> Tensor:
        return weights.clamp_min(1e-6)

    def cost(self, shape: AttentionShape) -> Cost:
        return feature_cost(shape, shape.D, self.order, exps=0)


class Cosformer2dAttention(CosformerAttention, OnGrid):
    """The weight of tokens at (i, m) and (j, n) times cos(a_i - a_j) cos(b_m - b_n): near tokens have larger weights.

    a_i = pi i / (2 rows) and b_m = pi m / (2 columns), so no weight is negative. A cosine of a difference
    is a sum of four products of one-token factors, hence four times the features and MACs. The cosines come
    from a table of positions, so there is no exp().
    """

    equivariant = False
    needs_grid = True

    def __init__(self, dim: int, num_heads: int = 8, *args, grid: Grid | None = None, **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        self.grid = grid

    def angles(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """a and b for every token of x [B, H, N, D]: [N] each."""
        rows, columns = token_grid(x.shape[-2], self.likely_grids, type(self).__name__)
        a = torch.arange(rows, device=x.device, dtype=x.dtype) * (torch.pi / 2 / rows)
        b = torch.arange(columns, device=x.device, dtype=x.dtype) * (torch.pi / 2 / columns)
        return a.repeat_interleave(columns), b.repeat(rows)

    def features(self, x: Tensor) -> Tensor:
        a, b = self.angles(x)
        factors = (a.cos() * b.cos(), a.cos() * b.sin(), a.sin() * b.cos(), a.sin() * b.sin())  # [N] each
        x = x.relu()
        return torch.cat([x * factor[:, None] for factor in factors], dim=-1)  # [B, H, N, 4 D]

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        (a_q, b_q), (a_k, b_k) = self.angles(q), self.angles(k)
        near = (a_q[:, None] - a_k).cos() * (b_q[:, None] - b_k).cos()  # [N, M]
        weights = (q.relu() @ k.relu().mT) * near
        return weights / self.divisor(weights.sum(-1, keepdim=True))

    def cost(self, shape: AttentionShape) -> Cost:
        return feature_cost(shape, 4 * shape.D, self.order, exps=0)
