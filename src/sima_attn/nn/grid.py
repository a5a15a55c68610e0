"""Tokens as a grid, for attentions that use the position of a token."""

import math
import operator
from typing import NamedTuple

MOST_PREFIX_TOKENS = 8  # that are inferred: a class token, a distillation token, registers


def token_grid(N: int, grid: tuple[int, int] | None, who: str) -> tuple[int, int]:
    """(rows, columns) of N tokens: the grid given, or a square one."""
    N = operator.index(N)  # under torch.compile a plain number: one graph per image size
    rows, columns = grid or (math.isqrt(N), math.isqrt(N))
    if rows * columns != N:
        expected = f"grid={grid}" if grid else "a square grid"
        raise ValueError(
            f"{who} needs its tokens on a grid, and {N} tokens do not fill {expected}; pass grid=(rows, columns) "
            "and use no class token"
        )
    return rows, columns


class TokenLayout(NamedTuple):
    """Prefix tokens (class token, registers) first, then the patch tokens, row by row."""

    prefix: int
    rows: int
    columns: int


def token_layout(N: int, grid: tuple[int, int] | None, prefix_tokens: int | None, who: str) -> TokenLayout:
    """The layout of N tokens; without `grid` a square one, without `prefix_tokens` the one with the fewest, at most 8.

    The layout is unique from 4 x 4 patch tokens on: the next larger square is then more than 8 tokens away.
    """
    N = operator.index(N)  # under torch.compile a plain number: one graph per image size
    for prefix in range(MOST_PREFIX_TOKENS + 1) if prefix_tokens is None else (prefix_tokens,):
        patches = N - prefix
        if patches < 1:
            break
        rows, columns = grid or (math.isqrt(patches), math.isqrt(patches))
        if rows * columns == patches:
            return TokenLayout(prefix, rows, columns)
    expected = f"a grid of {grid[0]} x {grid[1]}" if grid else "a square grid"
    allowed = f"0 to {MOST_PREFIX_TOKENS}" if prefix_tokens is None else str(prefix_tokens)
    raise ValueError(
        f"{who} needs its patch tokens on a grid, and {N} tokens are not {expected} plus {allowed} prefix tokens "
        "(class token, registers); set grid=(rows, columns) to the grid of the patch tokens, and prefix_tokens to the "
        "number of the other tokens"
    )


def check_layout_options(grid: tuple[int, int] | None, prefix_tokens: int | None) -> None:
    """Raise unless the options of `token_layout` are None, or a pair of positive integers and an integer from 0 on."""
    if grid is not None and not (
        isinstance(grid, tuple | list) and len(grid) == 2 and all(type(side) is int and side > 0 for side in grid)
    ):
        raise ValueError(f"grid must be None or a pair (rows, columns) of positive integers, got {grid!r}")
    if prefix_tokens is not None and (type(prefix_tokens) is not int or prefix_tokens < 0):
        raise ValueError(
            f"prefix_tokens must be None or the number of tokens before the patch tokens, got {prefix_tokens!r}"
        )
