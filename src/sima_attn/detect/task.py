"""Training and evaluation of a detector, with the training loop that all tasks share.

`sima detect train` calls `train_detector`, `sima detect eval` calls `evaluate_detector`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from sima_attn._settings import check, to_dict
from sima_attn.data.loader import (
    BrokenImages,
    Samples,
    Share,
    batch_indices,
    batch_loader,
    collate_readable,
    pieces_in_order,
    seed_everything,
    steps_per_epoch,
)
from sima_attn.data.sources import check_same_names
from sima_attn.detect.coco import CocoData, check_pycocotools
from sima_attn.detect.drawing import draw_objects
from sima_attn.detect.folders import count_images, open_split
from sima_attn.detect.rcnn import SimaRCNN, Target
from sima_attn.detect.recipes import DetectRecipe
from sima_attn.detect.scores import CocoScores, coco_scores, to_results
from sima_attn.detect.weights import build_detector
from sima_attn.report.drawing import Tile
from sima_attn.report.progress import RunProgress
from sima_attn.train.batch_picture import save_sheet
from sima_attn.train.start import train_task, with_possible_batch
from sima_attn.train.task import RunSummary, Task

if TYPE_CHECKING:
    from lightning.fabric import Fabric
    from PIL.Image import Image


DRAWN_IMAGES, DRAWN_COLUMNS, DRAWN_SIDE = 8, 4, 480  # in the picture of the first batch; pixels per image
MANY_BATCHES = 20  # data of as many batches are not read twice, only to find out that a batch is not too large


class Batch(NamedTuple):
    """Images [3, height, width] in [0, 1] of any sizes, and their objects."""

    images: list[Tensor]
    targets: list[Target]


class TrainingSamples(Samples):
    """Samples are (augmented image as bytes [3, height, width], target)."""

    def sample(self, image: Image, index: int) -> tuple[Tensor, Target]:
        """The augmented image and its objects."""
        return self.transform(pil_to_tensor(image), self.source.target(index))


class EvaluationSamples(Samples):
    """Samples are (index, image as bytes [3, height, width])."""

    def sample(self, image: Image, index: int) -> tuple[int, Tensor]:
        """The index and the image."""
        return index, self.transform(image)


class Detection(Task):
    """Training of a Mask R-CNN, or of a Faster R-CNN where there are no masks, by a recipe."""

    recipe: DetectRecipe
    model: SimaRCNN

    def __init__(self, recipe: DetectRecipe, fabric: Fabric, progress: RunProgress) -> None:
        self.recipe, self.fabric, self.progress = recipe, fabric, progress
        data, masks = recipe.data, recipe.model.masks
        self.data = self.open(data.train_split, masks).only_trainable()
        if masks and not self.data.has_masks:
            raise ValueError(f"model.masks=true needs masks, and {self.data.file} has boxes only: omit it")
        masks = self.data.has_masks
        kind = "Mask R-CNN" if masks else "Faster R-CNN"
        if recipe.model.masks is None and not masks:
            progress.say(
                f"most objects in {self.data.file.name} have no mask: training a Faster R-CNN, which finds boxes only"
            )
        self.title = f"{recipe.name}: {kind} on {recipe.model.name}"
        self.evaluated = {split: self.open(split, masks) for split in data.eval_splits}
        for other in self.evaluated.values():
            check_same_names(self.data.file, self.data.category_names, other.file, other.category_names)
            other.check_has_objects()
        self.share = Share(recipe.run.batch, fabric.global_rank, fabric.world_size, recipe.run.accumulate)
        self.steps_per_epoch = steps_per_epoch(self.data, self.share)
        seed_everything(recipe.run.seed)
        self.model = build_detector(recipe, len(self.data.classes), masks=masks, start=True)
        self.broken = BrokenImages(self.data, progress.say)

    def open(self, split: str, masks: bool | None) -> CocoData:
        """The images of a split and their objects."""
        return open_split(self.recipe.data.path, split, self.progress.say, self.progress.counter, masks=masks)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches of this process."""
        recipe, device = self.recipe, self.fabric.device
        samples = TrainingSamples(self.data, recipe.augment, recipe.run.seed)
        pieces = batch_indices(self.data, self.share, recipe.run.seed, start=start, stop=stop)
        pin = device.type == "cuda"
        for loaded, skipped in batch_loader(samples, pieces, recipe.data.workers, pin, collate_readable):
            self.broken.add(skipped)
            images = [image.to(device, non_blocking=True).float() / 255 for image, _ in loaded]
            targets = [
                {name: value.to(device, non_blocking=True) for name, value in target.items()} for _, target in loaded
            ]
            yield Batch(images, targets)

    def about(self, recipe: DetectRecipe) -> dict[str, Any]:
        """Recipe, classes, number of training images, and whether the detector has masks."""
        data = self.data
        known = {"classes": data.classes, "category_ids": data.category_ids, "images": len(data)}
        known["masks"] = data.has_masks
        return {"detector": to_dict(recipe), **known}

    def after_step(self, step: int) -> None:
        """Report broken images of all processes at each logging step."""
        if step % self.recipe.run.log_steps == 0:
            self.broken.gather()

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of Mask R-CNN's five losses, four without masks, and each loss."""
        losses = model(*batch)
        return sum(losses.values()), losses

    def draw_batch(self, batch: Batch, path: Path) -> None:
        """The images with the boxes, class names and masks that the detector learns from."""
        tiles = [Tile(self.drawn(*each), "") for each in zip(*(part[:DRAWN_IMAGES] for part in batch), strict=True)]
        rows = [tiles[first : first + DRAWN_COLUMNS] for first in range(0, len(tiles), DRAWN_COLUMNS)]
        save_sheet(path, rows, f"first training batch: {len(tiles)} of {len(batch.images)} images", DRAWN_SIDE)

    def drawn(self, image: Tensor, target: Target) -> Image:
        """A training image [3, height, width] with its objects."""
        objects = {name: value.cpu() for name, value in target.items()}
        names = [self.data.classes[label - 1] for label in objects["labels"].tolist()]
        return draw_objects(to_pil_image(image.cpu()), captions=names, **objects)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """AP of boxes, and of masks if there are any, in percent; several splits have their name as a prefix."""
        scores = {split: self.scores(model, split) for split in self.evaluated}
        if len(scores) == 1:
            return next(iter(scores.values()))
        return {f"{split}_{name}": value for split, found in scores.items() for name, value in found.items()}

    def scores(self, model: nn.Module, split: str) -> dict[str, float]:
        """The metrics of one split."""
        share, recipe, data = self.share, self.recipe.data, self.evaluated[split]
        results, seen = predict_results(
            model,
            data,
            batch=recipe.eval_batch,
            workers=recipe.workers,
            device=self.fabric.device,
            autocast=self.fabric.autocast,
            say=self.progress.say,
            on_step=self.progress.counter(f"evaluating on {split}"),
            rank=share.rank,
            world=share.world,
        )
        if share.world == 1:
            return coco_scores(data, results, seen, masks=self.data.has_masks).metrics()
        # The first process computes the AP from the results of all processes and broadcasts it.
        parts: list[Any] = [None] * share.world
        distributed.all_gather_object(parts, (results, seen))
        metrics: list[Any] = [None]
        if share.rank == 0:
            found = [result for part, _ in parts for result in part]
            ids = [i for _, part in parts for i in part]
            metrics = [coco_scores(data, found, ids, masks=self.data.has_masks).metrics()]
        distributed.broadcast_object_list(metrics)
        return metrics[0]


@torch.no_grad()
def predict_results(
    model: nn.Module,
    data: CocoData,
    *,
    batch: int,
    workers: int,
    device: torch.device,
    autocast: Callable[[], Any] = contextlib.nullcontext,
    say: Callable[[str], None] = print,
    on_step: Callable[[int, int], None] = lambda done, total: None,
    rank: int = 0,
    world: int = 1,
) -> tuple[list[dict[str, Any]], list[int]]:
    """Results in COCO's format, and the ids of the images, of this process; broken images are reported and skipped."""
    check_pycocotools()
    broken = BrokenImages(data, say)
    was_training = model.training
    model.eval()
    pieces = list(pieces_in_order(np.arange(rank, len(data), world), batch))
    samples, pin = EvaluationSamples(data, pil_to_tensor, seed=None), device.type == "cuda"
    results, seen = [], []
    for done, (loaded, skipped) in enumerate(batch_loader(samples, iter(pieces), workers, pin, collate_readable), 1):
        broken.add(skipped)
        if loaded:
            with autocast():
                found = model([image.to(device, non_blocking=True).float() / 255 for _, image in loaded])
            for (index, _), detections in zip(loaded, found, strict=True):
                results += to_results(data.images[index]["id"], detections, data.category_ids)
                seen.append(data.images[index]["id"])
        on_step(done, len(pieces))
    broken.gather()
    model.train(was_training)
    return results, seen


class EvalResult(NamedTuple):
    """The scores of a detector on a split, and its results in COCO's format."""

    scores: CocoScores
    results: list[dict[str, Any]]


def evaluate_detector(
    model: SimaRCNN,
    classes: Sequence[str],
    path: str | Path,
    split: str = "val",
    *,
    batch: int = 2,
    workers: int = 4,
    device: str = "cpu",
    say: Callable[[str], None] = print,
    counter: Callable[[str], Callable[[int, int], None]] = lambda what: lambda done, total: None,
) -> EvalResult:
    """AP of a detector that was trained on these classes, on a split of a folder; see `open_split`."""
    data = open_split(path, split, say, counter, masks=model.has_masks)
    check_same_names("the model", classes, data.file, data.classes)
    where = torch.device(device)
    on_step = counter(f"{split} of {path}")
    results, seen = predict_results(
        model.to(where), data, batch=batch, workers=workers, device=where, say=say, on_step=on_step
    )
    return EvalResult(coco_scores(data, results, seen, masks=model.has_masks), results)


def train_detector(
    recipe: DetectRecipe, out: Path | str, *, resume: bool = False, device: str = "auto", quiet: bool = False
) -> RunSummary:
    """Train by a recipe into a folder, or resume the run in it. A batch larger than the data is reduced."""
    check_pycocotools()
    check(recipe)
    recipe, notes = with_possible_batch(recipe, _count_trainable(recipe))
    options: dict[str, Any] = {"resume": resume, "device": device, "quiet": quiet, "notes": notes}
    return train_task(recipe, out, build=Detection, **options)


def _count_trainable(recipe: DetectRecipe) -> int:
    """Number of train images with objects; of many images those without are counted too, which is quick."""
    path, split = recipe.data.path, recipe.data.train_split
    count = count_images(path, split)
    if count >= MANY_BATCHES * recipe.run.batch:
        return count
    return len(open_split(path, split, lambda line: None, masks=recipe.model.masks).only_trainable())
