"""Features, queries and keys -> pictures whose longer side has at most `LONGEST` pixels.

Everything is averaged tile by tile, so that nothing of the size of the image is held in memory.

Shapes: r rows and c columns of a tile, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from sima_attn._files import atomic_write
from sima_attn.explain.maps import spread, unit_range
from sima_attn.gigapixel.sources import Source
from sima_attn.gigapixel.stores import TileArray
from sima_attn.gigapixel.sweeps import Sweeps
from sima_attn.gigapixel.tiles import Tile, tiles_of
from sima_attn.ops.eager import compute_dtype
from sima_attn.report.drawing import overlay
from sima_attn.report.feature_colors import FeatureColors

LONGEST = 1024
SAMPLE = 2**14  # tokens whose principal components are the colors
PARTS = ("q", "k")


def write_pictures(
    folder: Path, name: str, source: Source, sweeps: Sweeps, side: int, on_step: Callable[[int, int], object]
) -> list[Path]:
    """NAME_q.png and NAME_k.png, the heat maps of the last attention, and NAME_pca.png, the final features as colors.

    Args:
        sweeps: After its run.
        side: Of the tiles that are read, in tokens.
        on_step: Called with the number of maps done, and of all.
    """
    grid, size = sweeps.grid, source.size
    photo = _picture(shrunken(lambda tile: _pixels(source, tile), size, side * sweeps.network.patch))
    on_step(1, 3)
    covered = [n / (count * sweeps.network.patch) for n, count in zip(size, grid, strict=True)]
    share = (covered[0], covered[1])  # of the grid, by the image: the rest is padding
    scores = torch.from_numpy(shrunken(lambda tile: _scores(sweeps, tile), grid, side))  # [rows, columns, 2]
    pictures = {
        part: overlay(photo, unit_range(spread(scores[None, :, :, i], share, (photo.height, photo.width))))
        for i, part in enumerate(PARTS)
    }
    on_step(2, 3)
    colors = _picture(shrunken(_coloring(sweeps.features, grid, side), grid, side))
    whole = (round(photo.width / share[1]), round(photo.height / share[0]))
    pictures["pca"] = colors.resize(whole, Image.Resampling.NEAREST).crop((0, 0, *photo.size))
    written = []
    for part, picture in pictures.items():
        written.append(folder / f"{name}_{part}.png")
        with atomic_write(written[-1]) as temporary:
            picture.save(temporary, format="png")
    on_step(3, 3)
    return written


def shrunken(read: Callable[[Tile], Tensor], size: tuple[int, int], side: int) -> np.ndarray:
    """An array [rows, columns, C], averaged over squares so that its longer side has at most `LONGEST` of them.

    Args:
        read: A tile -> its values [r, c, C].
        size: Rows and columns.
        side: About that of the tiles that are read.
    """
    factor = -(-max(size) // LONGEST)
    parts: dict[int, list[np.ndarray]] = {}
    for tile in tiles_of(size, max(1, side // factor) * factor):
        values = read(tile).movedim(2, 0)[None]  # [1, C, r, c]
        small = F.avg_pool2d(values.float(), factor, ceil_mode=True)  # the last ones average what there is
        parts.setdefault(tile.top, []).append(small[0].movedim(0, 2).cpu().numpy())
    return np.concatenate([np.concatenate(row, axis=1) for row in parts.values()])


def _picture(values: np.ndarray) -> Image.Image:
    """Values [rows, columns, 3] up to 255 -> a picture."""
    return Image.fromarray(values.round().astype(np.uint8))


def _pixels(source: Source, tile: Tile) -> Tensor:
    return torch.from_numpy(np.array(source.read(tile)))


def _scores(sweeps: Sweeps, tile: Tile) -> Tensor:
    """The norms [r, c, 2] of q and k, normalized as in `explain.maps`."""
    norms = [
        x.to(compute_dtype(x.dtype)).square().sum((1, 3)).sqrt()[0].unflatten(0, tile.shape)
        for x in sweeps.queries_and_keys(tile)
    ]
    return torch.stack(norms, dim=2)


def _coloring(features: TileArray, grid: tuple[int, int], side: int) -> Callable[[Tile], Tensor]:
    """A tile -> its colors [r, c, 3] up to 255; their sample are tokens that are evenly distributed over the grid."""
    step = max(1, round((grid[0] * grid[1] / SAMPLE) ** 0.5))
    sample = []
    for tile in tiles_of(grid, side):
        rows, columns = (slice(-start % step, None, step) for start in (tile.top, tile.left))
        sample.append(features.read(tile)[rows, columns].flatten(0, 1).cpu())
    colors = FeatureColors(torch.cat(sample))
    return lambda tile: 255 * colors(features.read(tile).cpu())
