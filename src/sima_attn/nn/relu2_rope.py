"""relu2 of rotated queries and keys: its weights depend on the places of both tokens.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from typing import Any

from sima_attn.nn.grid import Grid
from sima_attn.nn.relu2 import Relu2Attention
from sima_attn.nn.rotation import Rotation, with_rotations
from sima_attn.ops.cost import AttentionShape, Cost


class Relu2RopeAttention(Relu2Attention):
    """relu2 on R_i q_i and R_j k_j, where R turns channels by the row and the column of a token. No exp().

        O_i = phi(R_i q_i) S / max(phi(R_i q_i) . z, 1e-6) + conv3x3(v)_i,    S = sum_j phi(R_j k_j) v_j^T

    The rotation comes before phi, so the weights are not negative and sum to one, as in `relu2`, and its kernels are
    the same. They do not depend on the difference of places alone, as those of softmax with rotations do.

    Args:
        args, kwargs: Arguments of `Relu2Attention`.
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
        self.q_map = self.k_map = Rotation(self.head_dim, base=base, grid_ref=grid_ref, **place)

    def cost(self, shape: AttentionShape) -> Cost:
        return with_rotations(super().cost(shape))
