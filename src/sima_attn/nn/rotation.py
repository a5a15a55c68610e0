"""Rotation of queries and keys by the position of their token (RoPE), so that attention weights depend on positions.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sima_attn.nn.grid import Grid, OnPatches, TokenLayout, as_grid
from sima_attn.nn.local_values import LocalAttention
from sima_attn.ops.cost import Cost
from sima_attn.ops.eager import compute_dtype
from sima_attn.ops.token_rotation import token_rotation


class GridPart(NamedTuple):
    """Which tokens of an image a call gets.

    Attributes:
        layout: Prefix tokens, rows and columns of the call.
        grid: Rows and columns of the whole image.
        top, left: Row and column of the first patch token.
    """

    layout: TokenLayout
    grid: Grid
    top: int = 0
    left: int = 0

    @classmethod
    def of_image(cls, layout: TokenLayout) -> "GridPart":
        """All tokens of an image."""
        return cls(layout, (layout.rows, layout.columns))


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
    part: GridPart | None = None  # None: each call gets all tokens of an image; see `on_part`

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
        part, dtype = self.part_of(x.shape[2]), compute_dtype(x.dtype)
        # A graph must not keep tensors, and an image can have any number of parts.
        keep = not torch.compiler.is_compiling() and part == GridPart.of_image(part.layout)
        make = _kept_table if keep else rotation_table
        return make(part, self.grid_ref, self.head_dim, self.base, x.device, dtype)

    def part_of(self, N: int) -> GridPart:
        """The part of the image that N tokens are."""
        return self.part or GridPart.of_image(self.layout(N))

    def extra_repr(self) -> str:
        return (
            f"{self.head_dim}, base={self.base}, grid={self.grid}, prefix_tokens={self.prefix_tokens}, "
            f"grid_ref={self.grid_ref}"
        )


def rotation_table(
    part: GridPart, grid_ref: Grid | None, head_dim: int, base: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, D / 2] for a part of an image."""
    (prefix, rows, columns), grid, top, left = part
    row_step, column_step = (ref / side for ref, side in zip(grid_ref or grid, grid, strict=True))
    factory: dict[str, Any] = {"device": device, "dtype": dtype}
    speeds = torch.tensor([base ** (-4 * i / head_dim) for i in range(head_dim // 4)], **factory)
    down = torch.arange(top, top + rows, **factory)[:, None, None] * row_step * speeds  # [rows, 1, D / 4]
    across = torch.arange(left, left + columns, **factory)[:, None] * column_step * speeds  # [columns, D / 4]
    angles = torch.cat([down.expand(-1, columns, -1), across.expand(rows, -1, -1)], -1).flatten(0, 1)
    angles = torch.cat([angles.new_zeros(prefix, angles.shape[1]), angles])
    return angles.cos(), angles.sin()


@functools.lru_cache(maxsize=64)
def _kept_table(*arguments) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # training may use it after inference
        return rotation_table(*arguments)


@contextmanager
def on_part(module: nn.Module, part: GridPart) -> Iterator[None]:
    """A context in which the rotations in a module get these tokens; afterwards each `part` is restored."""
    before = [(inner, inner.part) for inner in module.modules() if isinstance(inner, Rotation)]
    try:
        for inner, _ in before:
            inner.part = part
        yield
    finally:
        for inner, old in before:
            inner.part = old


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
