"""Detection on the one training loop: COCO's images and a recipe -> a trained detector, and the AP of one.

`train_detector` is what `sima detect train` calls, `evaluate_detector` what `sima detect eval` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from sima_attn._settings import to_dict
from sima_attn.data.loader import BrokenImages, Share, batch_indices, seed_everything, steps_per_epoch
from sima_attn.data.workers import Loader, useful_workers
from sima_attn.detect.augment import Augment, Target
from sima_attn.detect.coco import CocoData, CocoScores, check_pycocotools, coco_scores, open_coco, to_results
from sima_attn.detect.predict import to_tensor
from sima_attn.detect.recipes import DetectRecipe
from sima_attn.detect.weights import build_detector
from sima_attn.report.progress import RunProgress
from sima_attn.train.engine import RunSummary, Task
from sima_attn.train.start import train_task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MOST_BROKEN_IN_A_ROW = 100
Key = tuple[int, int, int]  # epoch, position in the epoch, index


class Batch(NamedTuple):
    """Images [3, height, width] in [0, 1] of any sizes, and what is on them."""

    images: list[Tensor]
    targets: list[Target]


class Samples(Dataset):
    """(epoch, position, index) -> index, image in bytes, target, and the broken images that were passed over.

    With an `augment`, a broken image is replaced by the next one; without, it is left out.
    """

    def __init__(self, data: CocoData, augment: Augment | None, seed: int = 0) -> None:
        self.data, self.augment, self.seed = data, augment, seed

    def __getitem__(self, key: Key) -> tuple[int, Tensor | None, Target, list[int]]:
        epoch, position, index = key
        broken: list[int] = []
        while True:
            try:
                image = to_tensor(self.data.read(index))
                break
            except Exception as error:  # whatever the decoder says: the image cannot be used
                broken.append(index)
                reason = error
            if self.augment is None:
                return index, None, {}, broken
            if len(broken) >= min(MOST_BROKEN_IN_A_ROW, len(self.data)):
                names = ", ".join(self.data.name(i) for i in broken[:3])
                raise ValueError(
                    f"{len(broken)} images in a row cannot be read, the first ones: {names}; the last: {reason}"
                )
            index = (index + 1) % len(self.data)
        if self.augment is None:
            return index, image, {}, broken
        seed_everything(self.seed, epoch, position)
        image, target = self.augment(image, self.data.target(index))
        return index, image, target, broken


def load(samples: Samples, keys: Iterator[list[Key]], workers: int, device: torch.device) -> DataLoader:
    """Lists of what `samples` gives, one list for each list of keys."""
    sampler: Any = keys
    # A generator of its own: the loader draws a base seed, and must not draw it from the step's randomness.
    return Loader(
        samples,
        batch_sampler=sampler,
        num_workers=useful_workers(workers),
        collate_fn=list,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(0),
    )


class Detection(Task):
    """A Mask R-CNN on the images of a recipe."""

    def __init__(self, recipe: DetectRecipe, fabric: Fabric, progress: RunProgress) -> None:
        self.recipe, self.fabric, self.progress = recipe, fabric, progress
        data = recipe.data
        self.data = open_coco(data.path, data.train_split, progress.say).only_trainable()
        self.evaluated = {split: open_coco(data.path, split, progress.say) for split in data.eval_splits}
        for other in self.evaluated.values():
            check_same_categories(self.data, other)
        self.share = Share(recipe.run.batch, fabric.global_rank, fabric.world_size, recipe.run.accumulate)
        self.steps_per_epoch = steps_per_epoch(self.data, self.share)  # type: ignore[arg-type]
        seed_everything(recipe.run.seed)
        self.model = build_detector(recipe, len(self.data.classes), start=True)
        self.broken = BrokenImages(self.data, progress.say)  # type: ignore[arg-type]

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches of this process."""
        recipe, device = self.recipe, self.fabric.device
        samples = Samples(self.data, recipe.augment, recipe.run.seed)
        pieces = batch_indices(self.data, self.share, recipe.run.seed, start=start, stop=stop)  # type: ignore[arg-type]
        keys = ([(epoch, int(p), int(i)) for p, i in zip(at, which, strict=True)] for epoch, at, which in pieces)
        for loaded in load(samples, keys, recipe.data.workers, device):
            self.broken.add([i for *_, passed in loaded for i in passed])
            images = [image.to(device, non_blocking=True).float() / 255 for _, image, _, _ in loaded]
            targets = [
                {name: value.to(device, non_blocking=True) for name, value in target.items()}
                for _, _, target, _ in loaded
            ]
            yield Batch(images, targets)

    def after_step(self, step: int) -> None:
        """Broken images of all processes, named as often as numbers are logged."""
        if step % self.recipe.run.log_steps == 0:
            self.broken.gather()

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The sum of Mask R-CNN's five losses, and each of them."""
        losses = model(*batch)
        return sum(losses.values()), losses

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """AP of boxes and masks in percent, over all processes; of several splits, each with its name before it."""
        scores = {split: self.scores(model, split) for split in self.evaluated}
        if len(scores) == 1:
            return next(iter(scores.values()))
        return {f"{split}_{name}": value for split, found in scores.items() for name, value in found.items()}

    def scores(self, model: nn.Module, split: str) -> dict[str, float]:
        """The same of one split."""
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
            return coco_scores(data, results, seen).metrics()
        return self.scores_of_all(data, results, seen)

    def scores_of_all(self, data: CocoData, results: list[dict[str, Any]], seen: list[int]) -> dict[str, float]:
        """The first process computes the AP of what all have found, and tells it to the others."""
        from torch import distributed

        parts: list[Any] = [None] * self.share.world
        distributed.all_gather_object(parts, (results, seen))
        told: list[Any] = [None]
        if self.share.rank == 0:
            found = [result for part, _ in parts for result in part]
            told = [coco_scores(data, found, [i for _, ids in parts for i in ids]).metrics()]
        distributed.broadcast_object_list(told)
        return told[0]


def check_same_categories(train: CocoData, val: CocoData) -> None:
    """Raise if the splits have other categories."""
    if train.categories_by_id != val.categories_by_id:
        differ = sorted(set(train.categories_by_id.items()) ^ set(val.categories_by_id.items()))
        raise ValueError(f"{train.file} and {val.file} have other categories: {differ[:3]}")


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
    """Results in COCO's format and the ids of the images of this process; broken images are named and left out."""
    check_pycocotools()
    broken = BrokenImages(data, say)  # type: ignore[arg-type]
    was_training = model.training
    model.eval()
    mine = np.arange(rank, len(data), world)
    parts = np.split(mine, range(batch, len(mine), batch)) if len(mine) else []
    keys = ([(0, int(i), int(i)) for i in part] for part in parts)
    results, seen = [], []
    for done, loaded in enumerate(load(Samples(data, None), keys, workers, device), start=1):
        broken.add([i for *_, passed in loaded for i in passed])
        good = [(index, image) for index, image, _, _ in loaded if image is not None]
        if good:
            with autocast():
                found = model([image.to(device, non_blocking=True).float() / 255 for _, image in good])
            for (index, _), detections in zip(good, found, strict=True):
                results += to_results(data.images[index]["id"], detections, data.category_ids)
                seen.append(data.images[index]["id"])
        on_step(done, len(parts))
    broken.gather()
    model.train(was_training)
    return results, seen


class Evaluated(NamedTuple):
    """What a detector does on a split: its scores, and its results in COCO's format."""

    scores: CocoScores
    results: list[dict[str, Any]]


def evaluate_detector(
    model: nn.Module,
    classes: Sequence[str],
    path: str | Path,
    split: str = "val",
    *,
    batch: int = 2,
    workers: int = 4,
    device: str = "cpu",
    say: Callable[[str], None] = print,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluated:
    """AP of a detector, trained on these classes, on a split of a folder in COCO's format."""
    data = open_coco(path, split, say)
    if data.classes != list(classes):
        raise ValueError(
            f"the model was trained on {len(classes)} classes ({', '.join(classes[:3])}, ...), {data.file} has "
            f"{len(data.classes)} ({', '.join(data.classes[:3])}, ...): the numbers would mean nothing"
        )
    where = torch.device(device)
    results, seen = predict_results(
        model.to(where), data, batch=batch, workers=workers, device=where, say=say, on_step=on_step
    )
    return Evaluated(coco_scores(data, results, seen), results)


def train_detector(
    recipe: DetectRecipe, out: Path | str, *, resume: bool = False, device: str = "auto", quiet: bool = False
) -> RunSummary:
    """Train by a recipe into a folder, or resume the run in it."""
    check_pycocotools()
    return train_task(
        recipe,
        out,
        build=Detection,
        about=lambda task: {
            "detector": to_dict(recipe),
            "classes": task.data.classes,
            "category_ids": task.data.category_ids,
            "images": len(task.data),
        },
        weights=lambda task: task.model,
        title=f"{recipe.name}: Mask R-CNN on {recipe.model.name}",
        command="detect train",
        resume=resume,
        device=device,
        quiet=quiet,
    )
