"""Softmax attention of rotated queries and keys with a convolution of v: what `relu2_rope` is compared with.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from torch import Tensor

from sima_attn.nn.baselines.softmax_local import SoftmaxLocalAttention
from sima_attn.nn.rotation import RotatedAttention
from sima_attn.ops.cost import AttentionShape, Cost


class SoftmaxRopeAttention(RotatedAttention, SoftmaxLocalAttention):
    """O = softmax((R Q) (R K)^T / sqrt(D)) V + conv3x3(V): R turns channels by the row and the column of a token.

    A weight depends on the positions by their difference alone. The convolution starts at zero.

    Args:
        args, kwargs: Arguments of `SoftmaxLocalAttention`, and `base` and `grid_ref` of `Rotation`.
    """

    def core(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return super().core(self.rotation(q), self.rotation(k), v, attn_mask, is_causal)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        return super().matrix(self.rotation(q), self.rotation(k))

    def cost(self, shape: AttentionShape) -> Cost:
        return self.with_rotations(super().cost(shape))
