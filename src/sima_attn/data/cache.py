"""A data set as one tensor of bytes on the device: decoded once, then batches without a worker.

Shapes: B batch, S side in pixels; images [B, 3, S, S].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sima_attn.data.loader import Batch, BrokenImages, Samples, Share, batch_indices, batch_loader, evaluation_transform
from sima_attn.data.settings import Data
from sima_attn.data.sources import Source

if TYPE_CHECKING:
    from sima_attn.report.progress import RunProgress

PART, MOST_WORKERS = 256, 16  # images decoded at a time, processes that decode


class Cache:
    """Decoded images of a source, uint8 [n, 3, S, S], and labels [n], on one device."""

    def __init__(
        self,
        source: Source,
        data: Data,
        device: torch.device,
        *,
        broken: BrokenImages,
        on_step: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        fit = evaluation_transform(data.preprocessing, normalize=False)
        n = len(source)
        images = torch.zeros(n, 3, data.size, data.size, dtype=torch.uint8)
        good = np.ones(n, dtype=bool)
        parts = np.split(np.arange(n), range(PART, n, PART))
        workers = min(len(parts) // 8, MOST_WORKERS, os.cpu_count() or 1)  # none for a few images
        decoded = batch_loader(Samples(source, fit, seed=None), ((0, p, p) for p in parts), workers, pin=False)
        for part, (pixels, _, unreadable) in zip(parts, decoded, strict=True):
            broken.add(unreadable)
            good[unreadable] = False
            if good[part].any():
                images[part[good[part]]] = pixels
            on_step(int(part[-1]) + 1, n)
        self.source, self.good = source, good
        # A training batch takes the next readable image in a broken one's place; evaluation leaves it out.
        self.instead = _next_good(good)
        self.images = images.to(device)
        self.labels = torch.from_numpy(source.labels).to(device)

    def batches(self, share: Share, seed: int, *, start: int, stop: int, repeats: int = 1) -> Iterator[Batch]:
        """Pieces of this process for the steps from start to stop: bytes, not augmented."""
        for _, _, indices in batch_indices(self.source, share, seed, start=start, stop=stop, repeats=repeats):
            yield self.take(self.instead[indices])

    def evaluation_batches(self, batch: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Every readable image of this process once."""
        mine = np.flatnonzero(self.good)[rank::world]
        for part in np.split(mine, range(batch, len(mine), batch)):
            if len(part):
                yield self.take(part)

    def take(self, indices: np.ndarray) -> Batch:
        """The images at these indices."""
        chosen = torch.from_numpy(indices).to(self.images.device)
        return Batch(self.images[chosen], self.labels[chosen])


Decoded = dict[str, Cache]  # by the name of a split


def decode_once(
    decoded: Decoded, split: str, source: Source, data: Data, device: torch.device, progress: RunProgress
) -> Cache:
    """The images of a split on the device: those decoded before, or decoded now and kept in `decoded`."""
    if split not in decoded:
        broken, counter = BrokenImages(source, progress.say), progress.counter(f"decoding {split}")
        decoded[split] = Cache(source, data, device, broken=broken, on_step=counter)
    return decoded[split]


def _next_good(good: np.ndarray) -> np.ndarray:
    """The index itself, or that of the next readable image, the first one after the last."""
    if not good.any():
        raise ValueError("none of the images can be read")
    readable = np.flatnonzero(good)
    return readable[np.searchsorted(readable, np.arange(len(good))) % len(readable)]


def normalise(images: Tensor, data: Data) -> Tensor:
    """Images [B, 3, S, S], values in [0, 1] -> about mean 0 and deviation 1."""
    mean = torch.tensor(data.mean, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(data.std, device=images.device).view(1, 3, 1, 1)
    return (images - mean) / std
