"""Rotation of queries and keys by the position of their token (RoPE), so that attention weights depend on positions.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from sima_attn.nn.grid import Grid, OnPatches, TokenLayout, as_grid
from sima_attn.nn.local_values import LocalAttention
from sima_attn.ops.cost import Cost
from sima_attn.ops.eager import compute_dtype
from sima_attn.ops.token_rotation import token_rotation


class Rotation(nn.Module, OnPatches):
    """x [B, H, N, D] -> [B, H, N, D]: each pair of channels is turned by an angle a that depends on the token.

        (x_2i, x_2i+1) -> (x_2i cos a - x_2i+1 sin a, x_2i sin a + x_2i+1 cos a)

    Half of the pairs turn with the row of a patch token, the others with its column: pair i of a half by
    base^(-4 i / D) radians per row or column. Prefix tokens are not turned. There are no parameters.

    Args:
        head_dim: D, a multiple of 4.
        base: The ratio of the largest angle per row to the smallest, about.
        grid: (rows, columns) of the patch tokens. By default that of the image, or a square, found at each call.
        prefix_tokens: Number of tokens before the patch tokens. By default the smallest from 0 to 8 that fits.
        grid_ref: (rows, columns) of the training size. The positions of a grid of another size are scaled to it, so
            that images of all sizes cover the same angles. By default an angle per row is the same at all sizes.
    """

    user = "a rotation by position"

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 50.0,
        grid: Grid | None = None,
        prefix_tokens: int | None = None,
        grid_ref: Grid | None = None,
    ) -> None:
        super().__init__()
        if head_dim % 4:
            raise ValueError(
                f"a rotation by rows and columns needs a multiple of 4 channels per head, got {head_dim}; "
                "change num_heads"
            )
        if not base > 1:
            raise ValueError(f"base must be larger than 1, got {base!r}")
        self.set_layout(grid, prefix_tokens)
        self.head_dim, self.base = head_dim, base
        self.grid_ref = as_grid("grid_ref", grid_ref)

    def forward(self, x: Tensor) -> Tensor:
        """The rotated channels, in the dtype of x."""
        return token_rotation(x, *self.table(x))

    def table(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, D / 2] of the tokens of x, at least in float32."""
        make = rotation_table if torch.compiler.is_compiling() else _kept_table  # a graph must not keep tensors
        layout, dtype = self.layout(x.shape[2]), compute_dtype(x.dtype)
        return make(layout, self.grid_ref, self.head_dim, self.base, x.device, dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.head_dim}, base={self.base}, grid={self.grid}, prefix_tokens={self.prefix_tokens}, "
            f"grid_ref={self.grid_ref}"
        )


def rotation_table(
    layout: TokenLayout, grid_ref: Grid | None, head_dim: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, D / 2] for tokens with a layout."""
    prefix, rows, columns = layout
    rows_ref, columns_ref = grid_ref or (rows, columns)
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    speeds = torch.tensor([base ** (-4 * i / head_dim) for i in range(head_dim // 4)], **factory)
    down = torch.arange(rows, **factory)[:, None, None] * (rows_ref / rows) * speeds  # [rows, 1, D / 4]
    across = torch.arange(columns, **factory)[:, None] * (columns_ref / columns) * speeds  # [columns, D / 4]
    angles = torch.cat([down.expand(-1, columns, -1), across.expand(rows, -1, -1)], -1).flatten(0, 1)
    angles = torch.cat([angles.new_zeros(prefix, angles.shape[1]), angles])
    return angles.cos(), angles.sin()


@functools.lru_cache(maxsize=64)
def _kept_table(*arguments) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # training may use it after inference
        return rotation_table(*arguments)


class RotatedAttention(LocalAttention):
    """Put before an attention with a convolution of v; the attention rotates queries and keys by `rotation`.

    Args:
        args, kwargs: Arguments of the attention.
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
        layout: dict[str, Any] = {"grid": grid, "prefix_tokens": prefix_tokens}
        super().__init__(dim, num_heads, *args, **layout, **kwargs)
        self.rotation = Rotation(self.head_dim, base=base, grid_ref=grid_ref, **layout)

    def with_rotations(self, cost: Cost) -> Cost:
        """The cost with memory for the rotated queries and keys."""
        shape = cost.shape
        return dataclasses.replace(cost, scratch=cost.scratch + shape.heads * (shape.N + shape.M) * shape.D)
