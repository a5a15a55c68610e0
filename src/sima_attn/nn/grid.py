"""Tokens as a grid, for attentions that use the position of a token."""

import math


def token_grid(N: int, grid: tuple[int, int] | None, who: str) -> tuple[int, int]:
    """(rows, columns) of N tokens: the grid given, or a square one."""
    rows, columns = grid or (math.isqrt(N), math.isqrt(N))
    if rows * columns != N:
        expected = f"grid={grid}" if grid else "a square grid"
        raise ValueError(
            f"{who} needs its tokens on a grid, and {N} tokens do not fill {expected}; pass grid=(rows, columns) "
            "and use no class token"
        )
    return rows, columns
