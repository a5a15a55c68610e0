"""k-NN accuracy of the teacher's features during a run.

Shapes: B batch, n images, C channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sima_attn.data.cache import Cache, decode
from sima_attn.data.loader import BrokenImages, Share, evaluation_batches
from sima_attn.data.sources import Source, Subset, check_same_classes
from sima_attn.data.splits import open_data
from sima_attn.dino.recipes import DinoRecipe
from sima_attn.probe.knn import knn_accuracy
from sima_attn.report.progress import RunProgress

if TYPE_CHECKING:
    from lightning.fabric import Fabric


class KnnProbe:
    """Backbone -> k-NN accuracy on the val images in percent; the neighbors are among `probe.bank` training images."""

    def __init__(
        self,
        recipe: DinoRecipe,
        fabric: Fabric,
        share: Share,
        train: Source,
        train_cache: Cache | None,
        progress: RunProgress,
    ) -> None:
        self.recipe, self.fabric, self.share, self.classes = recipe, fabric, share, len(train.classes)
        val = open_data(recipe.data.path, "val")
        check_same_classes(train, val)
        count = min(recipe.probe.bank, len(train))
        if count < recipe.probe.k:
            raise ValueError(f"probe.k must be at most {count}, the number of training images, got {recipe.probe.k}")
        bank = Subset(train, np.linspace(0, len(train) - 1, count).round().astype(int))
        val_cache = decode(val, "val", recipe.data, fabric.device, progress) if recipe.data.cache else None
        self.bank = (bank, bank.indices, train_cache, BrokenImages(bank, progress.say))
        self.val = (val, np.arange(len(val)), val_cache, BrokenImages(val, progress.say))

    def __call__(self, backbone: nn.Module) -> dict[str, float]:
        """knn_top1 and knn_top5 over all processes; each process evaluates its share of the val images."""
        probe, world = self.recipe.probe, self.share.world
        bank, bank_labels = self.features(backbone, *self.bank)
        if world > 1:
            parts: list[Any] = [None] * world
            torch.distributed.all_gather_object(parts, (bank.cpu(), bank_labels.cpu()))
            bank, bank_labels = (torch.cat(list(tensors)) for tensors in zip(*parts, strict=True))
        queries, labels = self.features(backbone, *self.val)
        found = knn_accuracy(
            queries,
            labels,
            bank,
            bank_labels,
            classes=self.classes,
            k=[probe.k],
            temperature=probe.temperature,
            device=self.fabric.device,
        )[0]
        counts = torch.tensor([found.top1, found.top5, 1.0], dtype=torch.float64) * len(labels)
        if world > 1:
            counts = self.fabric.all_reduce(counts.to(self.fabric.device), reduce_op="sum")  # type: ignore[assignment]
        top1, top5, images = counts.tolist()
        return {"knn_top1": top1 / images, "knn_top5": top5 / images}

    @torch.no_grad()
    def features(
        self, backbone: nn.Module, source: Source, indices: np.ndarray, cache: Cache | None, broken: BrokenImages
    ) -> tuple[Tensor, Tensor]:
        """Features [n, C] and labels [n] of this process's share; `indices` are positions in the cache."""
        rank, world, batch = self.share.rank, self.share.world, self.share.piece
        if cache is not None:
            batches = cache.evaluation_batches(batch, rank, world, among=indices)
        else:
            batches = evaluation_batches(
                source, self.recipe.data, batch, device=self.fabric.device, broken=broken, rank=rank, world=world
            )
        features, labels = [], []
        for images, numbers in batches:
            with self.fabric.autocast():
                features.append(backbone(images).float())
            labels.append(numbers)
        broken.gather()
        return torch.cat(features), torch.cat(labels)
