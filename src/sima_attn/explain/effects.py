"""Contribution of all tokens to one token, and statistics of the attention of a layer.

A row n of Q-hat K-hat^T is signed: the value of token m is added to the output of token n, or subtracted.

Shapes: B batch, H heads, N query tokens, M key tokens, D channels per head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from sima_attn.explain.maps import Photo, read_image, spread
from sima_attn.explain.reading import Layer, Reading


def effect(model: nn.Module, image: Photo, *, patch: tuple[int, int], layer: int = -1) -> np.ndarray:
    """Contribution of all patches to the patch (row, column): a map in [-1, 1] at image size.

    It is a row of the attention matrix, averaged over heads and divided by its largest magnitude.
    """
    reading, size = read_image(model, image)
    return signed_unit(spread(effect_scores(reading.layer(layer), patch)[None], reading.share, size))


def effect_scores(layer: Layer, patch: tuple[int, int]) -> Tensor:
    """The row of the attention matrix for a patch of the query grid, on the grid of the keys [rows, columns]."""
    rows, columns = layer.q_grid
    row, column = patch
    if not (0 <= row < rows and 0 <= column < columns):
        last = (rows - 1, columns - 1)
        raise ValueError(f"a patch of {layer.path} is (row, column) from (0, 0) to {last}, got {tuple(patch)}")
    prefix = layer.q.shape[2] - rows * columns
    keys = layer.k_grid[0] * layer.k_grid[1]
    weights = layer.matrix()[0, :, prefix + row * columns + column].mean(0)  # [M]
    return weights[-keys:].unflatten(0, layer.k_grid)  # [rows, columns]


def signed_unit(values: np.ndarray) -> np.ndarray:
    """Values divided by their largest magnitude."""
    largest = float(np.abs(values).max())
    return values / largest if largest > 0 else np.zeros_like(values)


@dataclass(frozen=True)
class AttentionRow:
    """One layer, averaged over heads and images.

    negative_share is the share of negative entries of the attention matrix: 0 for softmax, NaN if the matrix is not one
    of tokens. largest_channel_share is the share of the strongest channel, by the Frobenius norm |q^c|_2 |k^c|_2 of its
    part of Q-hat K-hat^T (softmax: of Q K^T): 1/D if all channels are equal, 1 if there is only one.
    """

    model: str
    layer: int
    path: str
    images: int
    N: int
    M: int
    H: int
    D: int
    negative_share: float
    largest_channel_share: float


def attention_statistics(readings: Iterable[Reading], model: str) -> list[AttentionRow]:
    """One row per layer, averaged over readings of the same model; they are taken one by one, and none is kept.

    N and M are those of the first reading.
    """
    found = [_layer_rows(reading, model) for reading in readings]
    return [_mean_row(rows) for rows in zip(*found, strict=True)]


def _layer_rows(reading: Reading, model: str) -> list[AttentionRow]:
    return [
        AttentionRow(
            model=model,
            layer=index,
            path=layer.path,
            images=len(layer.q),
            N=layer.q.shape[2],
            M=layer.k.shape[2],
            H=layer.q.shape[1],
            D=layer.q.shape[3],
            negative_share=_negative_share(layer),
            largest_channel_share=float(_largest_channel_share(layer)),
        )
        for index, layer in enumerate(reading.layers)
    ]


def _mean_row(rows: Sequence[AttentionRow]) -> AttentionRow:
    counts = [row.images for row in rows]
    negative, largest = ([getattr(row, name) for row in rows] for name in ("negative_share", "largest_channel_share"))
    return replace(
        rows[0],
        images=sum(counts),
        negative_share=round(float(np.average(negative, weights=counts)), 6),
        largest_channel_share=round(float(np.average(largest, weights=counts)), 6),
    )


def _negative_share(layer: Layer) -> float:
    try:
        return float((layer.matrix() < 0).float().mean())
    except ValueError:  # no matrix of tokens
        return float("nan")


def _largest_channel_share(layer: Layer) -> Tensor:
    strength = layer.normalized("q").norm(dim=2) * layer.normalized("k").norm(dim=2)  # [B, H, D]
    return (strength.amax(-1) / strength.sum(-1).clamp_min(1e-30)).mean()
