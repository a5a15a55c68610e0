"""Linear attention with squared relu features and a depth-wise convolution of v.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from sima_attn.nn.baselines.feature_maps import FeatureMapAttention, feature_cost
from sima_attn.nn.local_values import LocalAttention
from sima_attn.ops.cost import AttentionShape, Cost
from sima_attn.ops.linear_attention import RELU2_EPS, relu2_attention, relu2_features

if TYPE_CHECKING:
    from sima_attn.ops.sequence_parallel import Group


class Relu2Attention(LocalAttention, FeatureMapAttention):
    """O_i = phi(q_i) S / max(phi(q_i) . z, 1e-6) + conv3x3(v)_i, phi(x) = relu(x)^2 / sqrt(D). No exp().

        S = sum_j phi(k_j) v_j^T        z = sum_j phi(k_j)

    The weights of a query are not negative and sum to one; a query without positive weights attends to nothing. The
    square makes them sharper than those of relu, and 1 / sqrt(D) makes a weight the mean over the channels. The
    convolution starts at zero. On CUDA it runs in SimA's fused kernels, see `relu2_attention`.

    Args:
        args, kwargs: Arguments of timm's attention.
        order: "auto" | "kv" | "qk", see `sima_attention`.
        grid: (rows, columns) of the patch tokens. By default a square.
        prefix_tokens: Number of tokens before the patch tokens. By default the smallest from 0 to 8 that fits.
    """

    group: "Group | None" = None  # the processes over which `parallelize` has split the tokens

    def __init__(self, dim: int, num_heads: int = 8, *args, **kwargs) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        self.q_map: nn.Module = nn.Identity()
        self.k_map: nn.Module = nn.Identity()

    def features(self, x: Tensor) -> Tensor:
        return relu2_features(x)

    def query_features(self, q: Tensor) -> Tensor:
        return self.features(self.q_map(q))

    def key_features(self, k: Tensor) -> Tensor:
        return self.features(self.k_map(k))

    def divisor(self, weights: Tensor) -> Tensor:
        return weights.clamp_min(RELU2_EPS)

    def core(self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None = None) -> Tensor:
        keys = self.k_map(k)
        if token_mask is not None:
            keys = keys.masked_fill(~token_mask[:, None, :, None], 0)  # relu(0)^2 adds nothing
        o = relu2_attention(self.q_map(q), keys, v, order=self.order, group=self.group)  # [B, H, N, D]
        return o + self.local_values(q, v, token_mask)

    def cost(self, shape: AttentionShape) -> Cost:
        return self.with_local_cost(feature_cost(shape, shape.D, self.order, exps=0))
