"""relu2 of rotated queries and keys: its weights depend on the positions of both tokens.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from sima_attn.nn.relu2 import Relu2Attention
from sima_attn.nn.rotation import RotatedAttention
from sima_attn.ops.cost import AttentionShape, Cost


class Relu2RopeAttention(RotatedAttention, Relu2Attention):
    """relu2 on R_i q_i and R_j k_j, where R turns channels by the row and the column of a token. No exp().

        O_i = phi(R_i q_i) S / max(phi(R_i q_i) . z, 1e-6) + conv3x3(v)_i,    S = sum_j phi(R_j k_j) v_j^T

    The rotation comes before phi, so the weights are not negative and sum to one, as in `relu2`, and its kernels are
    the same. They do not depend on the difference of positions alone, as those of softmax with rotations do.

    Args:
        args, kwargs: Arguments of `Relu2Attention`, and `base` and `grid_ref` of `Rotation`.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.q_map = self.k_map = self.rotation

    def cost(self, shape: AttentionShape) -> Cost:
        return self.with_rotations(super().cost(shape))
