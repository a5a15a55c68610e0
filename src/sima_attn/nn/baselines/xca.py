"""Cross-covariance attention of XCiT: channels attend to channels.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.nn.attention import Attention, computed_in_float32
from sima_attn.ops.cost import AttentionShape, Cost


class XCAttention(Attention):
    """XCA: O^T = softmax(tau Q-bar^T K-bar) V^T, Q-bar and K-bar having channels of l2 norm 1 over the tokens.

    tau is learned, one number per head. The weights are D x D, so the cost is linear in the tokens.
    """

    exps_in_paper = "HD^2"
    can_drop_attention = True

    def __init__(self, dim: int, num_heads: int = 8, *args, **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        factory: dict[str, Any] = {"device": self.proj.weight.device, "dtype": self.proj.weight.dtype}
        self.temperature = nn.Parameter(torch.ones(num_heads, 1, 1, **factory))

    @computed_in_float32
    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (self.attn_drop(self.matrix(q, k)) @ v.mT).mT  # [B, H, N, D]

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        """Weights of channels [B, H, D, D]: unlike all other attentions here, it mixes channels."""
        cosines = F.normalize(q, dim=-2).mT @ F.normalize(k, dim=-2)  # [B, H, D, D]
        return (cosines * self.temperature.to(q.dtype)).softmax(dim=-1)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhcd,bhnd->bhnc", self.matrix(q, k), v)

    def cost(self, shape: AttentionShape) -> Cost:
        N, D = shape.N, shape.D
        weights = D * D
        return Cost(
            shape,
            macs=shape.heads * 2 * N * D * D,
            exps=shape.heads * weights,
            scratch=shape.heads * (2 * N * D + 2 * D + 2 * weights),
        )
