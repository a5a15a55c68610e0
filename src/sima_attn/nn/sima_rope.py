"""SimA of rotated queries and keys: its weights depend on the positions of both tokens.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from torch import Tensor

from sima_attn.nn.attention import SimAttention, split_heads
from sima_attn.nn.rotation import RotatedAttention
from sima_attn.ops.cost import AttentionShape, Cost


class SimRopeAttention(RotatedAttention, SimAttention):
    """O = (N / D) SimA(R Q, R K, V) + conv3x3(V): R turns channels by the row and the column of a token. No exp().

    The rotation comes before the norms, so the kernels are those of SimA. The factor N / D, `token_ref=D`, keeps the
    scale of the output at any image size and starts it as a small branch; the convolution starts at zero.

    Args:
        args, kwargs: Arguments of `SimAttention` except `token_ref` and `group`, and `base` and `grid_ref` of
            `Rotation`.
    """

    exps_in_paper = None
    can_stay_packed = False  # q and k are rotated between the projection and the attention

    def __init__(self, dim: int, num_heads: int = 8, *args, **kwargs) -> None:
        if kwargs.get("group") is not None:
            raise ValueError(
                "the convolution of v reads tokens of other processes, and rotations need the position of each token "
                "in the whole image: omit group, or use the attention sima"
            )
        super().__init__(dim, num_heads, *args, token_ref=float(split_heads(dim, num_heads)), **kwargs)

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        o = super().core(self.rotation(q), self.rotation(k), v, token_mask, key_mask)  # [B, H, N, D]
        return o + self.local_values(q, v, token_mask)

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        return super().matrix(self.rotation(q), self.rotation(k))

    def cost(self, shape: AttentionShape) -> Cost:
        return self.with_rotations(self.with_local_cost(super().cost(shape)))
