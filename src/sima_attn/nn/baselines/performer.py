"""Performer (Choromanski et al., 2021): FAVOR+ random features that estimate the softmax kernel.

Shapes: B batch, H heads, N query tokens, M key tokens, F random features, D channels per head.
"""

import math

import torch
from torch import Tensor

from sima_attn.nn.attention import Attention, computed_in_float32
from sima_attn.nn.baselines.feature_maps import feature_cost
from sima_attn.ops.cost import AttentionShape, Cost
from sima_attn.ops.linear_attention import weighted_sums

FEATURE_EPS = 1e-4
NORMALIZER_EPS = 1e-6


def orthogonal_gaussian(F: int, D: int, device: torch.device | str | None = None) -> Tensor:
    """F random directions [F, D]: orthogonal within blocks of D, with the lengths of Gaussian vectors."""
    blocks = [torch.linalg.qr(torch.randn(D, D, device=device)).Q.mT for _ in range(math.ceil(F / D))]
    lengths = torch.randn(F, D, device=device).norm(dim=1)
    return torch.cat(blocks)[:F] * lengths[:, None]


class PerformerAttention(Attention):
    """Linear attention with phi(x) = F^-1/2 [exp(w_r . x' - |x'|^2 / 2 - c) + 1e-4], x' = x / D^1/4.

    The rows w_r are fixed random directions, stored in the state dict; `redraw` samples new ones. c is the largest
    exponent, per query and over all keys: it keeps exp() in range and nearly cancels.
    """

    exps_in_paper = "ND"

    def __init__(self, dim: int, num_heads: int = 8, *args, num_features: int | None = None, **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        D = self.head_dim
        self.num_features = max(1, int(D * math.log(D))) if num_features is None else num_features
        self.directions: Tensor
        self.register_buffer("directions", torch.empty(self.num_features, D, device=self.proj.weight.device))
        self.redraw()

    def redraw(self) -> None:
        """New random directions, from torch's global generator."""
        F, D = self.directions.shape
        self.directions.copy_(orthogonal_gaussian(F, D, device=self.directions.device))

    def features(self, x: Tensor, stabiliser_dims: tuple[int, ...]) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        exponent = x @ self.directions.to(x.dtype).mT - 0.5 * x.square().sum(-1, keepdim=True)  # [B, H, N, F]
        exponent = exponent - exponent.amax(stabiliser_dims, keepdim=True)
        return (exponent.exp() + FEATURE_EPS) * self.num_features**-0.5

    @computed_in_float32
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values, weights = weighted_sums(self.features(q, (-1,)), self.features(k, (-1, -2)), v, "kv")
        return values / (weights + NORMALIZER_EPS)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        weights = self.features(q, (-1,)) @ self.features(k, (-1, -2)).mT
        return weights / (weights.sum(-1, keepdim=True) + NORMALIZER_EPS)

    def cost(self, shape: AttentionShape) -> Cost:
        features = shape.heads * (shape.N + shape.M) * self.num_features
        return feature_cost(shape, self.num_features, "kv", exps=features, scratch=features, macs=features * shape.D)
