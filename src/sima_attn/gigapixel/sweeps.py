"""All tokens through all blocks, tile by tile: one sweep over the tiles per block, and one for the embedding.

A sweep reads the tokens of each tile after the block before, applies the block with the sums of its attention, writes
the tokens, and adds them to the sums of the next attention. So each block reads and writes the store once. Two arrays
take turns: a sweep reads one and writes the other, and what an interrupted run has read is still there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sima_attn.gigapixel.attentions import Sums
from sima_attn.gigapixel.network import Network
from sima_attn.gigapixel.positions import Grid
from sima_attn.gigapixel.stores import TileArray
from sima_attn.gigapixel.tiles import Tile, tiles_of
from sima_attn.nn.grid import TokenLayout
from sima_attn.nn.rotation import GridPart
from sima_attn.ops.eager import compute_dtype

SAVE_SECONDS = 10.0  # between two records of the progress

Pixels = Callable[[Tile], Tensor]  # tile in pixels -> normalized [1, 3, height, width]


@dataclass
class Progress:
    """How far a run is, and all it knows apart from the tokens.

    Attributes:
        sweep: The sweep under way: 0 is the embedding, i the block i - 1.
        tile: The number of its tiles that are done.
        prefix: The prefix tokens that this sweep's tokens go with [1, P, C].
        sums: Of the attention that this sweep applies, complete.
        following: Of the attentions that it adds to.
        total: Sum of the final features [C].
    """

    sweep: int
    tile: int
    prefix: Tensor
    sums: list[Sums]
    following: list[Sums]
    total: Tensor

    def to_dict(self) -> dict[str, Any]:
        """As tensors and numbers."""
        values = {"sweep": self.sweep, "tile": self.tile, "prefix": self.prefix, "total": self.total}
        for name in ("sums", "following"):
            values[name] = [
                {part: value for part, value in vars(each).items() if isinstance(value, Tensor)}
                for each in getattr(self, name)
            ]
        return values

    def update(self, values: dict[str, Any], sweeps: "Sweeps") -> None:
        """Take over what `to_dict` gave."""
        device = self.prefix.device
        self.sweep, self.tile = values["sweep"], values["tile"]
        self.prefix, self.total = values["prefix"].to(device), values["total"].to(device)
        self.sums, self.following = sweeps.sums_before(self.sweep), sweeps.sums_after(self.sweep)
        for name in ("sums", "following"):
            for mine, saved in zip(getattr(self, name), values[name], strict=True):
                for part, value in saved.items():
                    setattr(mine, part, value.to(device))


class Sweeps:
    """The run of a network over an image.

    Args:
        network: Its parts.
        size: Height and width of the image.
        pixels: Reads and normalizes a rectangle of the image.
        side: Of a tile, in tokens.
        arrays: Two, for the tokens between the blocks.
        features: For the final features.
        save: Records the progress, at the start of each sweep and every `SAVE_SECONDS`.
    """

    def __init__(
        self,
        network: Network,
        size: tuple[int, int],
        pixels: Pixels,
        side: int,
        arrays: tuple[TileArray, TileArray],
        features: TileArray,
        save: Callable[[Progress], object] | None = None,
    ) -> None:
        self.network, self.size, self.pixels, self.arrays, self.features = network, size, pixels, arrays, features
        self.grid: Grid = network.grid(*size)
        self.tiles = list(tiles_of(self.grid, side))
        self.last = len(network.stages)
        self.positions = network.positions(self.grid)
        self.save, self._saved_at = save, 0.0
        self.progress = self._first()

    def run(self, on_tile: Callable[[int, int], object] = lambda done, total: None) -> tuple[Tensor, Tensor]:
        """From the progress to the end: the final prefix tokens [1, P, C], and the mean of the final features [C].

        `on_tile` is called with the number of tiles done in all sweeps, and the total.
        """
        total = (self.last + 1) * len(self.tiles)
        while True:
            self._save(wait=0)  # the first tile overwrites what the sweep before has read
            now = self.progress
            for i in range(now.tile, len(self.tiles)):
                on_tile(now.sweep * len(self.tiles) + i, total)
                self._step(self.tiles[i])
                now.tile = i + 1
                self._save(wait=SAVE_SECONDS)
            if now.sweep == self.last:
                break
            self.progress = self._next(now)
        self._save(wait=0)
        on_tile(total, total)
        mean = self.progress.total / (self.grid[0] * self.grid[1])
        return self.network.finish_prefix(self.progress.following, self.progress.prefix), mean

    def queries_and_keys(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """q and k [1, H, n, D] of a tile in the last attention, as it normalizes them; after `run`."""
        x = self._read(tile, self.last).flatten(1, 2)
        return self.network.stages[-1].normalized(self.progress.sums[0], x, self._grid_part(tile))

    def sums_before(self, sweep: int) -> list[Sums]:
        """Empty sums of the attention that a sweep applies."""
        return [] if sweep == 0 else [self.network.stages[sweep - 1].new_sums()]

    def sums_after(self, sweep: int) -> list[Sums]:
        """Empty sums of the attentions that a sweep adds to: one, or after the last block those of class attention."""
        stages = self.network.class_stages if sweep == self.last else [self.network.stages[sweep]]
        return [stage.new_sums() for stage in stages]

    def _first(self) -> Progress:
        total = torch.zeros(self.network.width, device=self.network.device, dtype=compute_dtype(self.network.dtype))
        first = Progress(0, 0, self.network.prefix(), [], self.sums_after(0), total)
        self._add_prefix(first)
        return first

    def _next(self, now: Progress) -> Progress:
        """The start of the next sweep; its block is applied to the prefix tokens first."""
        prefix = now.prefix
        if prefix.shape[1]:
            prefix = self.network.stages[now.sweep].apply(now.following[0], prefix, self._prefix_part(prefix))
        following = Progress(now.sweep + 1, 0, prefix, now.following, self.sums_after(now.sweep + 1), now.total)
        self._add_prefix(following)
        return following

    def _add_prefix(self, now: Progress) -> None:
        """Add the prefix tokens to the sums of the next self-attention."""
        if now.sweep < self.last and now.prefix.shape[1]:
            self.network.stages[now.sweep].add(now.following[0], now.prefix, self._prefix_part(now.prefix))

    def _grid_part(self, tile: Tile) -> GridPart:
        return GridPart(TokenLayout(0, *tile.shape), self.grid, tile.top, tile.left)

    def _prefix_part(self, prefix: Tensor) -> GridPart:
        return GridPart(TokenLayout(prefix.shape[1], 0, 0), self.grid)

    def _step(self, tile: Tile) -> None:
        now = self.progress
        x = self._embed(tile) if now.sweep == 0 else self._apply(tile)  # [1, r, c, C]
        if now.sweep < self.last:
            self.arrays[now.sweep % 2].write(tile, x[0])
            self.network.stages[now.sweep].add(now.following[0], x.flatten(1, 2), self._grid_part(tile))
        else:
            x = self.network.finish(now.following, x)
            self.features.write(tile, x[0])
            now.total += x.sum((0, 1, 2), dtype=now.total.dtype)

    def _embed(self, tile: Tile) -> Tensor:
        network = self.network
        halo = network.stem_halo
        seen = Tile(max(0, tile.top - halo), tile.bottom, max(0, tile.left - halo), tile.right)
        x = network.embed(self.pixels(seen.times(network.patch, self.size)).to(network.dtype))
        x = x[(slice(None), *tile.inside(seen))]  # [1, r, c, C]
        if self.positions is not None:
            x = x + self.positions.of(tile)
        return network.settle(x)

    def _apply(self, tile: Tile) -> Tensor:
        now = self.progress
        stage = self.network.stages[now.sweep - 1]
        seen = tile.grown(stage.halo, self.grid)
        x = stage.apply(now.sums[0], self._read(seen, now.sweep).flatten(1, 2), self._grid_part(seen))
        x = x.unflatten(1, seen.shape)
        return x[(slice(None), *tile.inside(seen))]  # [1, r, c, C]

    def _read(self, tile: Tile, sweep: int) -> Tensor:
        """The tokens that a sweep reads [1, r, c, C]."""
        return self.arrays[(sweep - 1) % 2].read(tile).to(self.network.device)[None]

    def _save(self, wait: float) -> None:
        if self.save is not None and time.monotonic() - self._saved_at >= wait:
            self.save(self.progress)
            self._saved_at = time.monotonic()
