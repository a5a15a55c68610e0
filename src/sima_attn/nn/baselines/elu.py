"""Linear attention with the feature map elu(x) + 1 (Katharopoulos et al., 2020)."""

import torch.nn.functional as F
from torch import Tensor

from sima_attn.nn.baselines.feature_maps import FeatureMapAttention, feature_cost
from sima_attn.ops.cost import AttentionShape, Cost


class EluAttention(FeatureMapAttention):
    """O_i = phi(q_i) S / (phi(q_i) z + 1e-6), phi(x) = elu(x) + 1, S = sum_j phi(k_j) v_j^T, z = sum_j phi(k_j)."""

    def features(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1

    def divisor(self, weights: Tensor) -> Tensor:
        return weights + 1e-6

    def cost(self, shape: AttentionShape) -> Cost:
        features = shape.heads * (shape.N + shape.M) * shape.D
        return feature_cost(shape, shape.D, self.order, exps=features)
