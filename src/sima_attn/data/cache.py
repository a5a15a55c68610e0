"""A data set decoded once into one byte tensor on the device; batches then need no workers.

Shapes: B batch, S side in pixels; images [B, 3, S, S].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn.data.augment import augment_batch, erase
from sima_attn.data.loader import (
    Batch,
    BrokenImages,
    Samples,
    Share,
    batch_indices,
    batch_loader,
    evaluation_transform,
    pieces_in_order,
)
from sima_attn.data.settings import Augment, Data
from sima_attn.data.sources import Source

if TYPE_CHECKING:
    from sima_attn.report.progress import RunProgress

DECODE_BATCH, MAX_WORKERS = 256, 16


class Cache:
    """Decoded images of a source, uint8 [n, 3, S, S], and their labels [n], on one device.

    Args:
        side: S, by default data.size.
    """

    def __init__(
        self,
        source: Source,
        data: Data,
        device: torch.device,
        *,
        side: int | None = None,
        broken: BrokenImages,
        on_step: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        side = side or data.size
        fit = evaluation_transform(replace(data.preprocessing, size=side), normalize=False)
        n = len(source)
        images = torch.zeros(n, 3, side, side, dtype=torch.uint8)
        good = np.ones(n, dtype=bool)
        pieces = list(pieces_in_order(np.arange(n), DECODE_BATCH))
        workers = min(len(pieces) // 8, MAX_WORKERS)  # none for a few images
        decoded = batch_loader(Samples(source, fit, seed=None), iter(pieces), workers, pin=False)
        for (_, _, indices), (pixels, _, unreadable) in zip(pieces, decoded, strict=True):
            broken.add(unreadable)
            good[unreadable] = False
            if good[indices].any():
                images[indices[good[indices]]] = pixels
            on_step(int(indices[-1]) + 1, n)
        self.source, self.data, self.good = source, data, good
        # In training the next readable image replaces a broken one; evaluation skips it.
        self.replacement = _next_good(good)
        self.images = images.to(device)
        self.labels = torch.from_numpy(source.labels).to(device)

    def batches(self, share: Share, seed: int, *, start: int, stop: int, repeats: int = 1) -> Iterator[Batch]:
        """Batches of this process for the steps from start to stop, as bytes, without augmentation."""
        for _, _, indices in batch_indices(self.source, share, seed, start=start, stop=stop, repeats=repeats):
            yield self.take(self.replacement[indices])

    def evaluation_batches(
        self, batch: int, rank: int = 0, world: int = 1, among: np.ndarray | None = None
    ) -> Iterator[Batch]:
        """Each readable image of this process once, normalized; `among` are the indices of some of the images."""
        readable = np.flatnonzero(self.good) if among is None else among[self.good[among]]
        for _, _, indices in pieces_in_order(readable[rank::world], batch):
            images, labels = self.take(indices)
            yield Batch(normalize(resize(images.float() / 255, self.data.size), self.data), labels)

    def take(self, indices: np.ndarray) -> Batch:
        """The images at these indices."""
        chosen = torch.from_numpy(indices).to(self.images.device)
        return Batch(self.images[chosen], self.labels[chosen])


def decode(
    source: Source, split: str, data: Data, device: torch.device, progress: RunProgress, side: int | None = None
) -> Cache:
    """The images of a split on the device; progress and broken images are shown."""
    broken, counter = BrokenImages(source, progress.say), progress.counter(f"decoding {split}")
    return Cache(source, data, device, side=side, broken=broken, on_step=counter)


def augmented(batch: Batch, data: Data, augment: Augment) -> Batch:
    """A batch of bytes from the cache augmented and normalized; a batch from the workers is that already."""
    images, labels = batch
    if images.dtype != torch.uint8:
        return batch
    images = normalize(augment_batch(images.float() / 255, augment, data.size), data)
    return Batch(erase(images, augment.erasing) if augment.erasing else images, labels)


def _next_good(good: np.ndarray) -> np.ndarray:
    """For each index, the index itself or that of the next readable image, wrapping around at the end."""
    if not good.any():
        raise ValueError("none of the images can be read")
    readable = np.flatnonzero(good)
    return readable[np.searchsorted(readable, np.arange(len(good))) % len(readable)]


def resize(images: Tensor, side: int) -> Tensor:
    """Images [B, 3, S, S] at another side."""
    if images.shape[-1] == side:
        return images
    return F.interpolate(images, (side, side), mode="bilinear", antialias=True)


def normalize(images: Tensor, data: Data) -> Tensor:
    """Images [B, 3, S, S] with values in [0, 1] -> (images - mean) / std per channel."""
    mean = torch.tensor(data.mean, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(data.std, device=images.device).view(1, 3, 1, 1)
    return (images - mean) / std


def denormalize(images: Tensor, data: Data) -> Tensor:
    """The inverse of `normalize`, cut to [0, 1]."""
    mean = torch.tensor(data.mean, device=images.device).view(1, 3, 1, 1)
    std = torch.tensor(data.std, device=images.device).view(1, 3, 1, 1)
    return (images * std + mean).clamp(0, 1)
