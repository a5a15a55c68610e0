"""Softmax attention with a depth-wise convolution of v: what attentions with such a branch are compared with.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from torch import Tensor

from sima_attn.nn.baselines.softmax import SoftmaxAttention
from sima_attn.nn.local_values import LocalAttention
from sima_attn.ops.cost import AttentionShape, Cost


class SoftmaxLocalAttention(LocalAttention, SoftmaxAttention):
    """O = softmax(Q K^T / sqrt(D)) V + conv3x3(V). The convolution starts at zero.

    Args:
        args, kwargs: Arguments of timm's attention.
        grid: (rows, columns) of the patch tokens. By default a square.
        prefix_tokens: Number of tokens before the patch tokens. By default the smallest from 0 to 8 that fits.
    """

    exps_in_paper = None

    def core(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return super().core(q, k, v, attn_mask, is_causal) + self.local_values(q, v)  # [B, H, N, D]

    def cost(self, shape: AttentionShape) -> Cost:
        return self.with_local_cost(super().cost(shape))
