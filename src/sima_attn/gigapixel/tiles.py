"""Rectangles of the token grid."""

from collections.abc import Iterator
from typing import NamedTuple


class Tile(NamedTuple):
    """The token rows from `top` to `bottom` and the columns from `left` to `right`, the ends excluded."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.bottom - self.top, self.right - self.left

    @property
    def slices(self) -> tuple[slice, slice]:
        """The index of the tile in an array [rows, columns, ...]."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def grown(self, halo: int, grid: tuple[int, int]) -> "Tile":
        """The tile with `halo` more tokens on each side, as far as the grid goes."""
        rows, columns = grid
        top, left = max(0, self.top - halo), max(0, self.left - halo)
        return Tile(top, min(rows, self.bottom + halo), left, min(columns, self.right + halo))

    def inside(self, outer: "Tile") -> tuple[slice, slice]:
        """The index of the tile in an array of a tile that contains it."""
        top, left = self.top - outer.top, self.left - outer.left
        return slice(top, top + self.shape[0]), slice(left, left + self.shape[1])

    def times(self, factor: int, limits: tuple[int, int]) -> "Tile":
        """The tile in units of which a token has `factor`, such as pixels, as far as the image goes."""
        height, width = limits
        ends = min(height, self.bottom * factor), min(width, self.right * factor)
        return Tile(self.top * factor, ends[0], self.left * factor, ends[1])


def tiles_of(grid: tuple[int, int], side: int) -> Iterator[Tile]:
    """Squares of `side` tokens that cover the grid, row by row; the last ones are smaller."""
    rows, columns = grid
    for top in range(0, rows, side):
        for left in range(0, columns, side):
            yield Tile(top, min(rows, top + side), left, min(columns, left + side))
