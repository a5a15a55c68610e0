"""Softmax attention of rotated queries and keys with a convolution of v: what `relu2_rope` is compared with.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from typing import Any

from torch import Tensor

from sima_attn.nn.baselines.softmax_local import SoftmaxLocalAttention
from sima_attn.nn.grid import Grid
from sima_attn.nn.rotation import Rotation, with_rotations
from sima_attn.ops.cost import AttentionShape, Cost


class SoftmaxRopeAttention(SoftmaxLocalAttention):
    """O = softmax((R Q) (R K)^T / sqrt(D)) V + conv3x3(V): R turns channels by the row and the column of a token.

    A weight depends on the places by their difference alone. The convolution starts at zero.

    Args:
        args, kwargs: Arguments of `SoftmaxLocalAttention`.
        base, grid_ref: See `Rotation`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *args,
        base: float = 50.0,
        grid: Grid | None = None,
        prefix_tokens: int | None = None,
        grid_ref: Grid | None = None,
        **kwargs,
    ) -> None:
        place: dict[str, Any] = {"grid": grid, "prefix_tokens": prefix_tokens}
        super().__init__(dim, num_heads, *args, **place, **kwargs)
        self.rotation = Rotation(self.head_dim, base=base, grid_ref=grid_ref, **place)

    def core(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return super().core(self.rotation(q), self.rotation(k), v, attn_mask, is_causal)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        return super().matrix(self.rotation(q), self.rotation(k))

    def cost(self, shape: AttentionShape) -> Cost:
        return with_rotations(super().cost(shape))
