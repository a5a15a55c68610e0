"""Nystromformer (Xiong et al., 2021): softmax attention through a few landmark tokens.

Shapes: B batch, H heads, N query tokens, M key tokens, m landmarks, D channels per head.
"""

import torch
from torch import Tensor

from sima_attn.nn.attention import Attention, computed_in_float32
from sima_attn.ops.cost import AttentionShape, Cost

PINV_STEPS = 6


class NystromAttention(Attention):
    """O = F1 pinv(F2) F3 V: F1 = softmax(Q K~^T), F2 = softmax(Q~ K~^T), F3 = softmax(Q~ K^T), scaled by D^-1/2.

    The landmarks Q~, K~ are means of runs of tokens; with as many landmarks as tokens it is softmax attention.
    """

    exps_in_paper = "HN"
    equivariant = False

    def __init__(self, dim: int, num_heads: int = 8, *args, num_landmarks: int = 49, **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        self.num_landmarks = num_landmarks

    @computed_in_float32
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        f1, inverse, f3 = self.factors(q, k)
        return f1 @ (inverse @ (f3 @ v))

    def factors(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k = q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25
        m = min(self.num_landmarks, q.shape[-2], k.shape[-2])
        q_marks, k_marks = run_means(q, m), run_means(k, m)  # [B, H, m, D]
        f1 = (q @ k_marks.mT).softmax(dim=-1)  # [B, H, N, m]
        f2 = (q_marks @ k_marks.mT).softmax(dim=-1)  # [B, H, m, m]
        f3 = (q_marks @ k.mT).softmax(dim=-1)  # [B, H, m, M]
        return f1, iterative_pinv(f2), f3

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        f1, inverse, f3 = self.factors(q, k)
        return f1 @ inverse @ f3

    def cost(self, shape: AttentionShape) -> Cost:
        N, M, D, Dv = shape.N, shape.M, shape.D, shape.Dv
        m = min(self.num_landmarks, N, M)
        weights = N * m + m * m + m * M
        pinv = PINV_STEPS * 4 * m**3
        products = m * M * Dv + m * m * Dv + N * m * Dv
        return Cost(
            shape,
            macs=shape.heads * (weights * D + pinv + products),
            exps=shape.heads * weights,
            scratch=shape.heads * ((N + M) * D + 2 * m * D + 2 * weights + PINV_STEPS * 4 * m * m + 2 * m * Dv),
        )


def run_means(x: Tensor, m: int) -> Tensor:
    """The means of m runs of neighboring tokens, as even as N allows: [B, H, N, D] -> [B, H, m, D]."""
    N = x.shape[-2]
    size, longer = divmod(N, m)
    if not longer:
        return x.unflatten(-2, (m, size)).mean(-2)
    head, tail = x.split([longer * (size + 1), N - longer * (size + 1)], dim=-2)
    return torch.cat(
        [head.unflatten(-2, (longer, size + 1)).mean(-2), tail.unflatten(-2, (m - longer, size)).mean(-2)], dim=-2
    )


def iterative_pinv(a: Tensor) -> Tensor:
    """The pseudo-inverse of a row-stochastic matrix [B, H, m, m] by six steps of a third-order iteration."""
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    z = a.mT / a.sum(-2).amax(-1)[..., None, None]
    for _ in range(PINV_STEPS):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z
