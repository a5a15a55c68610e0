"""A depth-wise 3 x 3 convolution of v over the token grid, and the base class of attentions that add it to A v.

Shapes: B batch, H heads, N tokens, D channels per head, C = H * D, P prefix tokens.
"""

import dataclasses

import torch
from torch import Tensor, nn

from sima_attn.nn.attention import Attention
from sima_attn.nn.grid import Grid, OnPatches, TokenLayout
from sima_attn.ops.cost import Cost
from sima_attn.ops.token_convolution import token_convolution


class LocalValues(nn.Module, OnPatches):
    """v [B, H, N, D] -> [B, H, N, D]: one 3 x 3 filter per channel over the patch tokens, zero for prefix tokens.

    The filters start at zero. They are no Conv2d, so that the initializers of timm leave them there.

    Args:
        dim: C, the channels of all heads.
        grid: (rows, columns) of the patch tokens. By default that of the image, or a square, found at each call.
        prefix_tokens: Number of tokens before the patch tokens. By default the smallest from 0 to 8 that fits.
        device, dtype: Of the filters.
    """

    user = "a convolution of v"

    def __init__(
        self,
        dim: int,
        *,
        grid: Grid | None = None,
        prefix_tokens: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.set_layout(grid, prefix_tokens)
        self.weight = nn.Parameter(torch.zeros(dim, 1, 3, 3, device=device, dtype=dtype))

    def forward(self, v: Tensor) -> Tensor:
        """The convolution of v."""
        return self.convolve(v, self.layout(v.shape[2]))

    def convolve(self, v: Tensor, layout: TokenLayout) -> Tensor:
        """The convolution of v on a given layout of its tokens."""
        return token_convolution(v, self.weight, *layout)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, grid={self.grid}, prefix_tokens={self.prefix_tokens}"


class LocalAttention(Attention):
    """O = A v + local(v): put before an attention that computes A v; its `core` adds `local_values(v)`.

    `matrix` is A alone. Queries and keys must be the same tokens, because A v and local(v) are added token by token.
    """

    equivariant = False  # once the filters are not zero
    has_local_branch = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *args,
        grid: Grid | None = None,
        prefix_tokens: int | None = None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, *args, **kwargs)
        weight = self.proj.weight
        self.local = LocalValues(dim, grid=grid, prefix_tokens=prefix_tokens, device=weight.device, dtype=weight.dtype)

    def local_values(self, q: Tensor, v: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """local(v) [B, H, N, D]; raises where the keys are other tokens than the queries.

        Padding, False in `token_mask` [B, N], is zero, as beyond the border of the grid.
        """
        if q.shape[2] != v.shape[2]:
            raise ValueError(
                f"{type(self).__name__} adds a convolution of v to its output, so it needs as many keys as queries, "
                f"got {q.shape[2]} queries and {v.shape[2]} keys; use the attention without local branch"
            )
        if token_mask is None:
            return self.local(v)
        hidden = ~token_mask[:, None, :, None]
        return self.local(v.masked_fill(hidden, 0)).masked_fill(hidden, 0)

    def reference(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.matrix(q, k) @ v + self.local(v)

    def with_local_cost(self, cost: Cost) -> Cost:
        """The cost of A v, plus 9 MACs per patch token and channel."""
        _, rows, columns = self.local.layout(cost.shape.N)
        width = cost.shape.heads * cost.shape.Dv
        macs, scratch = cost.macs + 9 * rows * columns * width, cost.scratch + cost.shape.N * width
        return dataclasses.replace(cost, macs=macs, scratch=scratch)
