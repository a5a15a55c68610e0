"""Position embeddings of any tile of the token grid, without those of the whole grid.

Both kinds are sums over a row part and a column part, of which each is stored once per row or column.

Shapes: r rows and c columns of a tile, C channels.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from timm.models.xcit import PositionalEncodingFourier
from torch import Tensor

from sima_attn.gigapixel.tiles import Tile

Grid = tuple[int, int]


class Positions(ABC):
    """What is added to the tokens of a tile."""

    @abstractmethod
    def of(self, tile: Tile) -> Tensor:
        """The embeddings [r, c, C] of a tile."""


class LearnedPositions(Positions):
    """Learned embeddings, resampled to the grid as timm does: bicubic with antialiasing, in float32.

    Resampling is linear and separable: P[i, j] = sum_ab R[i, a] S[j, b] E[a, b]. R and S are what resampling makes of
    an identity matrix.

    Args:
        embedding: [rows, columns, C] of the training size.
        grid: Rows and columns of the image.
    """

    def __init__(self, embedding: Tensor, grid: Grid) -> None:
        self.embedding = embedding
        old = (embedding.shape[0], embedding.shape[1])
        self.weights = None if old == grid else [_resampling(*n, embedding.device) for n in zip(old, grid, strict=True)]

    def of(self, tile: Tile) -> Tensor:
        """The embeddings [r, c, C] of a tile."""
        if self.weights is None:
            return self.embedding[tile.slices]
        rows, columns = (weights[part] for weights, part in zip(self.weights, tile.slices, strict=True))
        partly = torch.einsum("jb,abk->ajk", columns, self.embedding.float())
        return torch.einsum("ia,ajk->ijk", rows, partly).to(self.embedding.dtype)


def _resampling(old: int, new: int, device: torch.device) -> Tensor:
    """The weights [new, old] with which a line of `old` embeddings becomes one of `new`."""
    # Of width 2: torch 2.15 resamples an image of width 1 wrongly.
    eye = torch.eye(old, device=device)[None, :, :, None].expand(1, old, old, 2)  # [1, channels, places, 2]
    lines = F.interpolate(eye, size=(new, 2), mode="bicubic", antialias=True)  # [1, old, new, 2]
    return lines[0, :, :, 0].T


class FourierPositions(Positions):
    """XCiT's encoding: sines and cosines of the place, relative to the size of the grid, times a matrix.

    Args:
        encoding: timm's module.
        grid: Rows and columns of the image.
    """

    def __init__(self, encoding: PositionalEncodingFourier, grid: Grid) -> None:
        weight, bias = encoding.token_projection.weight.flatten(1), encoding.token_projection.bias  # [C, 2 x hidden]
        of_rows, of_columns = weight.split(encoding.hidden_dim, dim=1)  # the vertical part comes first
        rows, columns = (_waves(encoding, n, weight) for n in grid)
        self.rows = F.linear(rows, of_rows, bias)  # [rows, C]
        self.columns = F.linear(columns, of_columns)  # [columns, C]

    def of(self, tile: Tile) -> Tensor:
        """The embeddings [r, c, C] of a tile."""
        rows, columns = tile.slices
        return self.rows[rows, None] + self.columns[None, columns]


def _waves(encoding: PositionalEncodingFourier, n: int, like: Tensor) -> Tensor:
    """Sines and cosines [n, hidden] of n places, as timm computes them: in float32."""
    places = torch.arange(1, n + 1, device=like.device).float()
    places = places / (places[-1:] + encoding.eps) * encoding.scale
    powers = torch.arange(encoding.hidden_dim, device=like.device).float()
    powers = encoding.temperature ** (2 * torch.div(powers, 2, rounding_mode="floor") / encoding.hidden_dim)
    angles = places[:, None] / powers
    return torch.stack([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=2).flatten(1).to(like.dtype)
