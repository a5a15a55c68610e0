"""SimA with one gain per head and a depth-wise convolution of v.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

import torch
from torch import Tensor, nn

from sima_attn.nn.attention import SimAttention
from sima_attn.nn.local_values import LocalAttention
from sima_attn.ops.cost import AttentionShape, Cost


class SimLocalAttention(LocalAttention, SimAttention):
    """O_h = g_h N SimA(q, k, v)_h + conv3x3(v)_h. No exp(), linear in the tokens, fused kernels on CUDA.

    The factor N, the number of tokens, brings SimA's output to the scale of v at any image size: it is `token_ref=1`,
    so there is no `token_ref` to set. The gains g start at 1 and the convolution at zero.

    Args:
        args, kwargs: Arguments of `SimAttention` except `token_ref` and `group`.
        grid: (rows, columns) of the patch tokens. By default a square.
        prefix_tokens: Number of tokens before the patch tokens. By default the smallest from 0 to 8 that fits.
    """

    exps_in_paper = None
    can_stay_packed = False  # both branches read v: a packed gradient would have to be added to that of the convolution

    def __init__(self, dim: int, num_heads: int = 8, *args, **kwargs) -> None:
        if kwargs.get("group") is not None:
            raise ValueError(
                "the convolution of v reads tokens of other processes: omit group, and split the whole model with "
                "parallelize(model, mesh)"
            )
        super().__init__(dim, num_heads, *args, token_ref=1.0, **kwargs)
        self.gain = nn.Parameter(torch.ones(num_heads, device=self.proj.weight.device, dtype=self.proj.weight.dtype))

    def core(
        self, q: Tensor, k: Tensor, v: Tensor, token_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        o = super().core(q, k, v, token_mask, key_mask)  # [B, H, N, D]
        return torch.addcmul(self.local_values(q, v, token_mask), o, self.gain.to(o.dtype)[:, None, None])

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        return super().matrix(q, k) * self.gain.to(q.dtype)[:, None, None]

    def cost(self, shape: AttentionShape) -> Cost:
        return self.with_local_cost(super().cost(shape))
