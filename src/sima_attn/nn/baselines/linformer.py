"""Linformer (Wang et al., 2020): keys and values projected along the tokens to a fixed small number.

Shapes: B batch, H heads, N tokens (fixed when the module is built), R projected tokens, D channels per head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.nn.attention import Attention
from sima_attn.ops.cost import AttentionShape, Cost


class LinformerAttention(Attention):
    """O = softmax(Q (E K)^T / sqrt(D)) (F V) with learned E, F [rank, num_tokens], shared by the heads."""

    exps_in_paper = "HN"
    can_drop_attention = True
    equivariant = False
    needs_num_tokens = True

    def __init__(
        self, dim: int, num_heads: int = 8, *args, num_tokens: int | None = None, rank: int = 64, **kwargs
    ) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        if num_tokens is None or num_tokens < 1 or rank < 1:
            raise ValueError(f"pass num_tokens >= 1 and rank >= 1 to LinformerAttention, got {num_tokens} and {rank}")
        factory: dict[str, Any] = {"device": self.proj.weight.device, "dtype": self.proj.weight.dtype}
        self.num_tokens, self.rank = num_tokens, rank
        self.project_k = nn.Parameter(torch.empty(rank, num_tokens, **factory))
        self.project_v = nn.Parameter(torch.empty(rank, num_tokens, **factory))
        for projection in (self.project_k, self.project_v):
            nn.init.normal_(projection, std=num_tokens**-0.5)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.check_tokens(k)
        drop = self.attn_drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(
            q, self.project_k.to(k.dtype) @ k, self.project_v.to(v.dtype) @ v, dropout_p=drop
        )

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        self.check_tokens(k)
        projected = self.project_k.to(k.dtype) @ k  # [B, H, R, D]
        return (q @ projected.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ self.project_v.to(k.dtype)

    def check_tokens(self, k: Tensor) -> None:
        if k.shape[-2] != self.num_tokens:
            raise ValueError(f"this Linformer was built for num_tokens={self.num_tokens}, got {k.shape[-2]} tokens")

    def cost(self, shape: AttentionShape) -> Cost:
        N, M, D, Dv, R = shape.N, shape.M, shape.D, shape.Dv, self.rank
        return Cost(
            shape,
            macs=shape.heads * (R * M * (D + Dv) + N * R * (D + Dv)),
            exps=shape.heads * N * R,
            scratch=shape.heads * (R * (D + Dv) + N),
        )
