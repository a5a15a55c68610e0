"""Text tables for the terminal and for Markdown pages."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple


class TextTable(NamedTuple):
    """A header and lines of cells; `bold` has the indices of the lines to emphasize."""

    header: list[str]
    lines: list[list[str]]
    bold: Set[int] = frozenset()

    def markdown(self) -> str:
        """The table as Markdown."""
        shown = [[f"**{cell}**" for cell in line] if i in self.bold else line for i, line in enumerate(self.lines)]
        return "\n".join(f"| {' | '.join(line)} |" for line in [self.header, ["---"] * len(self.header), *shown])
