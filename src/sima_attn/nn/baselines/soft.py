"""SOFT (Lu et al., 2021): a Gaussian kernel in place of softmax, with the queries as keys.

Shapes: B batch, H heads, N query tokens, M key tokens, m landmarks, D channels per head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.nn.attention import Attention, computed_in_float32
from sima_attn.nn.grid import Grid, OnGrid, token_grid
from sima_attn.ops.cost import AttentionShape, Cost, product_macs

NEWTON_STEPS = 20
RIDGE = 0.01


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x_i - y_j|^2 / 2) [B, H, N, M] of x [B, H, N, D] and y [B, H, M, D], each scaled by D^-1/4."""
    x, y = x * x.shape[-1] ** -0.25, y * y.shape[-1] ** -0.25
    squares = x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :] - 2 * (x @ y.mT)
    return (-0.5 * squares.clamp_min(0)).exp()


class SoftFullAttention(Attention):
    """O = A V with A_ij = exp(-|q_i - q_j|^2 / 2) and no normalization: SOFT without its low-rank step."""

    exps_in_paper = "HN^2"
    ties_qk = True

    @computed_in_float32
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gaussian(q, k) @ v

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        difference = (q[..., :, None, :] - k[..., None, :, :]) * q.shape[-1] ** -0.25  # [B, H, N, M, D]
        return (-0.5 * difference.square().sum(-1)).exp()

    def cost(self, shape: AttentionShape) -> Cost:
        kernel = shape.heads * shape.N * shape.M
        macs = shape.heads * product_macs("qk", shape.N, shape.M, shape.D, shape.Dv)
        return Cost(shape, macs=macs, exps=kernel, scratch=2 * kernel + shape.heads * (shape.N + shape.M))


class SoftAttention(Attention, OnGrid):
    """O = C P^+ C^T V with landmarks Q~: C = gaussian(Q, Q~) [N, m], P = gaussian(Q~, Q~) [m, m].

    The landmarks are GELU(LayerNorm(conv(Q))), one for each ratio x ratio patch of the token grid; the
    inverse of P is found by Newton's iteration.
    """

    exps_in_paper = "HN^2"
    ties_qk = True
    equivariant = False
    needs_grid = True

    def __init__(self, dim: int, num_heads: int = 8, *args, ratio: int = 2, grid: Grid | None = None, **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        factory: dict[str, Any] = {"device": self.proj.weight.device, "dtype": self.proj.weight.dtype}
        self.ratio, self.grid = ratio, grid
        self.landmark_conv = nn.Conv2d(self.head_dim, self.head_dim, ratio, stride=ratio, bias=False, **factory)
        self.landmark_norm = nn.LayerNorm(self.head_dim, **factory)

    @computed_in_float32
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        landmarks = self.landmarks(q)  # [B, H, m, D]
        left = gaussian(q, landmarks)  # [B, H, N, m]
        right = left if k is q else gaussian(k, landmarks)  # [B, H, M, m]
        inverse = NewtonInverse.apply(gaussian(landmarks, landmarks))  # [B, H, m, m]
        return left @ (inverse @ (right.mT @ v))

    def landmarks(self, q: Tensor) -> Tensor:
        (B, H, N, D) = q.shape
        rows, columns = token_grid(N, self.likely_grids, type(self).__name__)
        maps = q.transpose(-1, -2).reshape(B * H, D, rows, columns)
        tokens = F.conv2d(maps, self.landmark_conv.weight.to(q.dtype), stride=self.ratio)
        tokens = tokens.flatten(2).transpose(1, 2).reshape(B, H, -1, D)  # [B, H, m, D]
        norm = self.landmark_norm
        return F.gelu(F.layer_norm(tokens, (D,), norm.weight.to(q.dtype), norm.bias.to(q.dtype), norm.eps))

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        landmarks = self.landmarks(q)
        inverse = NewtonInverse.apply(gaussian(landmarks, landmarks))
        return gaussian(q, landmarks) @ inverse @ gaussian(k, landmarks).mT

    def cost(self, shape: AttentionShape) -> Cost:
        N, M, D, Dv = shape.N, shape.M, shape.D, shape.Dv
        rows, columns = token_grid(N, self.likely_grids, type(self).__name__)
        m = (rows // self.ratio) * (columns // self.ratio)
        convolution = m * (D * self.ratio) * (D * self.ratio)
        kernels = N * m * D + m * m * D
        newton = NEWTON_STEPS * 2 * m**3
        products = M * m * Dv + m * m * Dv + N * m * Dv
        return Cost(
            shape,
            macs=shape.heads * (convolution + kernels + newton + products),
            exps=shape.heads * (N * m + m * m + m * D),
            scratch=shape.heads * (2 * m * D + N * m + (NEWTON_STEPS + 2) * m * m + 2 * m * Dv),
        )


class NewtonInverse(torch.autograd.Function):
    """(P + 0.01 I)^-1 by X <- 2 X - X P X; the gradient is that of the inverse, not of its twenty steps."""

    @staticmethod
    def forward(ctx, P: Tensor) -> Tensor:
        alpha = 1.8 / P.sum(-1).amax(-1)[..., None, None].square()
        P = P + RIDGE * torch.eye(P.shape[-1], device=P.device, dtype=P.dtype)
        X = alpha * P
        for _ in range(NEWTON_STEPS):
            X = 2 * X - X @ P @ X
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        return -X.mT @ grads[0] @ X.mT
