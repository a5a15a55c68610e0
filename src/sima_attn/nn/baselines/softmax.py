"""Softmax attention: O = softmax(Q K^T / sqrt(D)) V.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from sima_attn.nn.attention import Attention
from sima_attn.ops.cost import AttentionShape, Cost, product_macs


def softmax_matrix(q: Tensor, k: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(D)), rows summing to 1."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)  # [B, H, N, M]


class SoftmaxAttention(Attention):
    """Softmax attention by torch's fused kernel (flash attention where the device has it)."""

    exps_in_paper: ClassVar[str | None] = "HN^2"
    can_drop_attention = True

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Tokens [B, N, C] -> tokens [B, N, C]. Masks of token pairs are supported."""
        return self.join(self.core(*self.split(x), attn_mask=attn_mask, is_causal=is_causal))

    def core(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        drop = self.attn_drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=drop, is_causal=is_causal)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        return softmax_matrix(q, k)

    def cost(self, shape: AttentionShape) -> Cost:
        scores = shape.heads * shape.N * shape.M
        macs = shape.heads * product_macs("qk", shape.N, shape.M, shape.D, shape.Dv)
        return Cost(shape, macs=macs, exps=scores, scratch=shape.heads * shape.N)


class ExplicitSoftmaxAttention(Attention):
    """Softmax attention that stores its N x M matrix, as measured in the paper."""

    exps_in_paper = "HN^2"
    can_drop_attention = True

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attn_drop(softmax_matrix(q, k)) @ v

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        return softmax_matrix(q, k)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def cost(self, shape: AttentionShape) -> Cost:
        scores = shape.heads * shape.N * shape.M
        macs = shape.heads * product_macs("qk", shape.N, shape.M, shape.D, shape.Dv)
        return Cost(shape, macs=macs, exps=scores, scratch=2 * scores)
