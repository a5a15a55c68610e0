"""Linear attention with squared relu features and a depth-wise convolution of v.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

from torch import Tensor

from sima_attn.nn.baselines.feature_maps import FeatureMapAttention, feature_cost
from sima_attn.nn.local_values import LocalAttention
from sima_attn.ops.cost import AttentionShape, Cost

EPS = 1e-6


class Relu2Attention(LocalAttention, FeatureMapAttention):
    """O_i = phi(q_i) S / max(phi(q_i) . z, 1e-6) + conv3x3(v)_i, phi(x) = relu(x)^2 / sqrt(D). No exp().

        S = sum_j phi(k_j) v_j^T        z = sum_j phi(k_j)

    The weights of a query are not negative and sum to one; a query without positive weights attends to nothing. The
    square makes them sharper than those of relu, and 1 / sqrt(D) makes a weight the mean over the channels. Features
    and sums are float32 in half precision, where squares would overflow. The convolution starts at zero.

    This is plain torch. A fused kernel would compute Q' (K'^T V) as SimA's does, with Q' = phi(Q), K' = phi(K) applied
    as the tiles are read, and z in place of the l1 norms: z is one more column of K'^T [V, 1], and the division by
    Q' z is one per row of the output.

    Args:
        args, kwargs: Arguments of timm's attention.
        order: "auto" | "kv" | "qk", see `sima_attention`.
        grid: (rows, columns) of the patch tokens. By default a square.
        prefix_tokens: Number of tokens before the patch tokens. By default the smallest from 0 to 8 that fits.
    """

    def features(self, x: Tensor) -> Tensor:
        return (x * x.shape[-1] ** -0.25).relu().square()

    def divisor(self, weights: Tensor) -> Tensor:
        return weights.clamp_min(EPS)

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return super().core(q, k, v) + self.local_values(q, v)  # [B, H, N, D]

    def cost(self, shape: AttentionShape) -> Cost:
        return self.with_local_cost(feature_cost(shape, shape.D, self.order, exps=0))
