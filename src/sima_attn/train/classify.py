"""Classification: images and labels -> a trained model. `train_classifier` is what `sima train` calls.

Shapes: B batch, K classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from sima_attn._settings import check, to_dict
from sima_attn.data.cache import augmented, decode
from sima_attn.data.loader import (
    Batch,
    BrokenImages,
    Share,
    evaluation_batches,
    seed_everything,
    steps_per_epoch,
    training_batches,
)
from sima_attn.data.settings import Augment
from sima_attn.data.sources import check_same_classes
from sima_attn.data.splits import check_classes, open_split
from sima_attn.models.building import build_model
from sima_attn.report.progress import RunProgress
from sima_attn.train.batch_picture import draw_labeled
from sima_attn.train.mesh import batch_share, seed_dropout, split_over_mesh
from sima_attn.train.recipes import Recipe
from sima_attn.train.start import train_task, with_possible_batch
from sima_attn.train.task import RunSummary, Task
from sima_attn.train.teacher import Teacher

if TYPE_CHECKING:
    from lightning.fabric import Fabric


@torch.no_grad()
def output_at(model: nn.Module, size: int, hint: str) -> Tensor:
    """What a model gives for one image of this side; an error with the hint where it cannot take it."""
    training = model.training
    where = next(model.parameters()).device
    try:
        output = model.eval()(torch.zeros(1, 3, size, size, device=where))
    except Exception as error:  # whatever the model says
        raise ValueError(f"{type(model).__name__} cannot take images of {size} px: {error}; {hint}") from error
    model.train(training)
    return output


class Classification(Task):
    """A classifier on the images of a recipe."""

    recordable = True

    def __init__(self, recipe: Any, fabric: Fabric, progress: RunProgress) -> None:
        self.recipe, self.fabric = recipe, fabric
        self.title = f"{recipe.name}: {recipe.model.name}, {recipe.model.attention or 'its own'} attention"
        self.source, self.val = open_split(recipe.data, "train"), open_split(recipe.data, "val")
        check_same_classes(self.source, self.val)
        check_classes(self.source, recipe.data.path)
        self.classes = self.source.classes
        progress.say(
            f"{len(self.source)} train images in {self.source.place}; {len(self.val)} val images in {self.val.place}; "
            f"{len(self.classes)} classes"
        )
        rank, shares = batch_share(recipe.run, fabric.global_rank, fabric.world_size)
        self.share = Share(recipe.run.batch, rank, shares, recipe.run.accumulate)
        self.steps_per_epoch = steps_per_epoch(self.source, self.share)
        seed_everything(recipe.run.seed)
        self.model = self.build_model()
        hint = f"change data.size, or set model.kwargs.img_size={recipe.data.size} if the model has it"
        output_at(self.model, recipe.data.size, hint)
        self.model = split_over_mesh(self.model, recipe.run, fabric)
        self.teacher = None
        if recipe.teacher.path is not None:
            self.teacher = Teacher(recipe.teacher, self.classes, recipe.data, compiled=recipe.run.compile)
            progress.say(f"the teacher is {recipe.teacher.path}, with {recipe.teacher.weight:.0%} of the loss")
        self.mixup = create_mixup(recipe.augment, len(self.classes), self.share.piece)
        self.broken, self.broken_val = BrokenImages(self.source, progress.say), BrokenImages(self.val, progress.say)
        self.cache = self.val_cache = None
        if recipe.data.cache:
            self.cache = decode(self.source, "train", recipe.data, fabric.device, progress, recipe.data.cache_size)
            self.val_cache = decode(self.val, "val", recipe.data, fabric.device, progress)

    def build_model(self) -> nn.Module:
        """The model for the classes of the data, with its initial weights."""
        return build_model(self.recipe.model, len(self.classes))

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches of this process."""
        recipe, seed = self.recipe, self.recipe.run.seed
        if self.cache is not None:
            return self.cache.batches(self.share, seed, start=start, stop=stop, repeats=recipe.augment.repeats)
        return training_batches(
            self.source,
            self.share,
            recipe.data,
            recipe.augment,
            seed,
            start=start,
            stop=stop,
            device=self.fabric.device,
            broken=self.broken,
        )

    def prepare(self, batch: Batch) -> Batch:
        """Images augmented and mixed, where that was not done by the workers; with mixtures the labels are [B, K]."""
        prepared = mixed(augmented(batch, self.recipe.data, self.recipe.augment), self.mixup)
        seed_dropout(self.recipe.run, self.fabric)
        return prepared

    def draw_batch(self, batch: Batch, path: Path) -> None:
        """Augmented images with their classes."""
        draw_labeled(path, batch, self.source, self.recipe.data, self.recipe.augment.smoothing)

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross entropy against labels, smoothed or mixed, and the difference from the teacher."""
        images, labels = batch
        logits = model(images)
        loss, numbers = label_loss(logits, labels, self.recipe.augment.smoothing)
        if self.teacher is None:
            return loss, numbers
        with self.fabric.autocast():
            teacher_loss = self.teacher.loss(logits, images)
        weight = self.recipe.teacher.weight
        return (1 - weight) * loss + weight * teacher_loss, {**numbers, "teacher_loss": teacher_loss}

    def state(self) -> dict[str, nn.Module]:
        """The teacher: a resumed run has the one that it started with."""
        return {} if self.teacher is None else {"teacher": self.teacher}

    def about(self, recipe: Any) -> dict[str, Any]:
        """Recipe, classes and number of training images."""
        return {"recipe": to_dict(recipe), "classes": self.classes, "images": len(self.source)}

    def after_step(self, step: int) -> None:
        """Broken images of all processes, named as often as numbers are logged."""
        if self.cache is None and step % self.recipe.run.log_steps == 0:  # every process decodes the whole cache
            self.broken.gather()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """top1 and top5 in percent, and the loss, over all processes."""
        share = self.share
        if self.val_cache is not None:
            batches = self.val_cache.evaluation_batches(share.piece, share.rank, share.world)
        else:
            batches = evaluation_batches(
                self.val,
                self.recipe.data,
                share.piece,
                device=self.fabric.device,
                broken=self.broken_val,
                rank=share.rank,
                world=share.world,
            )
        totals = torch.zeros(4, dtype=torch.float64)
        for (_, labels), logits in logits_of(model, batches, self.fabric.autocast):
            best, loss = top_five(labels, logits)
            hits = best == labels[:, None]
            numbers = torch.stack([hits[:, 0].sum(), hits.sum(), loss, loss.new_tensor(len(labels))])
            totals += numbers.double().cpu()
        for broken in (self.broken, self.broken_val):
            broken.gather()
        if share.world > 1:
            totals = self.fabric.all_reduce(totals.to(self.fabric.device), reduce_op="sum")  # type: ignore[assignment]
        top1, top5, loss_sum, images = totals.tolist()
        if not images:
            raise ValueError(f"none of the {len(self.val)} val images can be read")
        return {"top1": 100 * top1 / images, "top5": 100 * top5 / images, "loss": loss_sum / images}


@torch.no_grad()
def logits_of(
    model: nn.Module, batches: Iterator[Batch], autocast: Callable[[], Any] = contextlib.nullcontext
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch, and its logits [B, K] in float32."""
    model.eval()
    for batch in batches:
        with autocast():
            logits = model(batch.images)
        yield batch, logits.float()


def top_five(labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The five best classes [B, 5] with the best first, and the summed loss."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return best, F.cross_entropy(logits, labels, reduction="sum")


def create_mixup(augment: Augment, num_classes: int, piece: int) -> Mixup | None:
    """timm's mixup and cutmix for batches of `piece` images; None where both are off."""
    if not augment.mixes:
        return None
    if piece % 2:
        raise ValueError(
            f"mixup and cutmix pair the images of a part of the batch, and {piece} is odd; change run.batch"
        )
    return Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        prob=augment.mix_prob,
        switch_prob=augment.switch_prob,
        label_smoothing=augment.smoothing,
        num_classes=num_classes,
    )


def mixed(batch: Batch, mixup: Mixup | None) -> Batch:
    """The batch with mixed images and soft labels [B, K]; the batch itself without mixup."""
    # timm mixes in place, and a step may be made again to find what went wrong in it.
    return batch if mixup is None else Batch(*mixup(batch.images.clone(), batch.labels))


def label_loss(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross entropy of logits [B, K] against labels [B], smoothed, or mixed ones [B, K]; and top1 for plain labels."""
    logits = logits.float()
    if labels.dim() == 2:  # smoothed by the mixup
        return F.cross_entropy(logits, labels), {}
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    return loss, {"top1": 100 * (logits.argmax(1) == labels).float().mean()}


def train_classifier(
    recipe: Recipe, out: Path | str, *, resume: bool = False, device: str = "auto", quiet: bool = False
) -> RunSummary:
    """Train by a recipe into a folder, or resume the run in it. A batch larger than the data is reduced."""
    check(recipe)
    recipe, notes = with_possible_batch(recipe, len(open_split(recipe.data, "train")), even=recipe.augment.mixes)
    options: dict[str, Any] = {"resume": resume, "device": device, "quiet": quiet, "notes": notes}
    return train_task(recipe, out, build=Classification, **options)
