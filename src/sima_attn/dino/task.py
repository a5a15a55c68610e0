"""DINO: a student is trained to predict, for any crop, the teacher's output for another crop of the same image.

The teacher is a moving average of the student.

    p_t = softmax((teacher - center) / T_t),  q_v = softmax(student / T_s),  loss = mean over t != v of -sum p_t log q_v

Shapes: B images, V views, G global views, C channels, K outputs of the head. Views are concatenated: [V * B, ...].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sima_attn._settings import check, to_dict
from sima_attn.data.any_images import NONE, OPTIONAL, open_any
from sima_attn.data.cache import decode, normalize
from sima_attn.data.crops import CropBatch, CropImage, split_views
from sima_attn.data.loader import (
    BrokenImages,
    Samples,
    Share,
    batch_indices,
    decoded_batches,
    seed_everything,
    steps_per_epoch,
)
from sima_attn.data.splits import has_val_images
from sima_attn.dino.knn_monitor import KnnProbe
from sima_attn.dino.recipes import DinoRecipe, Distill
from sima_attn.models.building import build_model, set_token_refs
from sima_attn.models.compiled import compile_blocks
from sima_attn.ops.eager import without_autocast
from sima_attn.report.drawing import Tile
from sima_attn.report.progress import RunProgress
from sima_attn.train.batch_picture import save_sheet, to_pictures
from sima_attn.train.classify import output_at
from sima_attn.train.sharding import local_parts, norms
from sima_attn.train.start import train_task, with_possible_batch
from sima_attn.train.task import RunSummary, Task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

COLLAPSED = 1e-3  # nats of information; untrained teachers have at least 0.005
DRAWN_IMAGES, DRAWN_SIDE = 6, 120  # in the picture of the first batch; pixels per view
COLLAPSE_CHECK_INTERVAL = 10  # steps; each check synchronizes with the device


class CollapseError(ValueError):
    """The teacher's output is the same for every image; `step` is the last completed one."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Head(nn.Module):
    """Projection head: features [B, C] -> logits [B, K]; with norm_last_layer the cosines to K prototypes."""

    def __init__(self, dim: int, distill: Distill) -> None:
        super().__init__()
        widths = [dim, *[distill.hidden_dim] * (distill.head_layers - 1), distill.bottleneck_dim]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        self.last_layer: Any = weight_norm(nn.Linear(distill.bottleneck_dim, distill.out_dim, bias=False))
        gains = self.last_layer.parametrizations.weight.original0  # [K, 1]
        nn.init.ones_(gains)
        gains.requires_grad_(not distill.norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Features [B, C] -> logits [B, K]."""
        x = F.normalize(self.mlp(x), dim=-1, eps=1e-6)  # [B, bottleneck]; 1e-12 is 0 in half precision
        return self.last_layer(x)


class Branch(nn.Module):
    """Student or teacher: backbone and projection head."""

    def __init__(self, backbone: nn.Module, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Groups of views [V * B, 3, s, s] -> features [all V * B, C] and logits [all V * B, K]; one pass per size."""
        parts = [
            self.backbone(torch.cat(list(same)))
            for _, same in itertools.groupby(groups, key=lambda group: group.shape[-2:])
        ]
        features = torch.cat(parts)
        return features, self.head(features)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass to save memory."""
        self.backbone.set_grad_checkpointing(enable)  # type: ignore[operator]


class DinoLoss(nn.Module):
    """Cross entropy of all pairs of different views, and the center [K] of the teacher's outputs.

    `flat_steps` counts the consecutive steps in which the teacher's output was the same for every image.
    """

    center: Tensor
    flat_steps: Tensor

    def __init__(self, distill: Distill) -> None:
        super().__init__()
        self.student_temp, self.center_momentum = distill.student_temp, distill.center_momentum
        self.register_buffer("center", torch.zeros(distill.out_dim))
        self.register_buffer("flat_steps", torch.zeros((), dtype=torch.long))

    def forward(
        self, student: Tensor, teacher: Tensor, images: int, teacher_temp: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [V * B, K] of the student, [G * B, K] of the teacher -> loss, targets [G * B, K].

        The first G views of the student are the teacher's; a view is not compared with itself.
        """
        with without_autocast(student):
            targets = F.softmax((teacher.float() - self.center) / teacher_temp, dim=-1)  # [G * B, K]
            log_q = F.log_softmax(student.float() / self.student_temp, dim=-1)  # [V * B, K]
            p, q = targets.view(-1, images, targets.shape[1]), log_q.view(-1, images, log_q.shape[1])
            pairs = -(p.transpose(0, 1) @ q.permute(1, 2, 0)).mean(0)  # [B, G, K] x [B, K, V] -> [G, V]
            G, V = pairs.shape
            same = torch.eye(G, V, dtype=torch.bool, device=pairs.device)
            return pairs.masked_fill(same, 0).sum() / (G * (V - 1)), targets

    @torch.no_grad()
    def update(self, teacher_mean: Tensor, information: Tensor) -> None:
        """Move the center towards the mean [K] of the teacher's outputs, and count steps without information."""
        self.center.lerp_(teacher_mean, 1 - self.center_momentum)
        self.flat_steps.copy_(torch.where(information < COLLAPSED, self.flat_steps + 1, 0))


def entropy(p: Tensor) -> Tensor:
    """Mean entropy of distributions [B, K], in nats."""
    return -torch.xlogy(p, p).sum(-1).mean()


def information(p: Tensor) -> Tensor:
    """Mutual information of image and output in nats, from distributions [B, K]: the mean over b of KL(p_b || mean p).

    It is 0 if all distributions are the same, whether uniform or a single output.
    """
    mean = p.mean(0)
    return (torch.xlogy(p, p) - torch.xlogy(p, mean)).sum(-1).mean().clamp(min=0)


def spread(features: Tensor) -> Tensor:
    """Variance over the batch of features [B, C] scaled to length 1: 0 if all are the same, at most 1."""
    unit = F.normalize(features.float(), dim=-1)
    return unit.var(0, unbiased=False).sum()


def cosine(start: float, end: float, step: int, total: int) -> float:
    """Cosine schedule from `start` at step 0 to `end` at step `total`."""
    return end + (start - end) * (1 + math.cos(math.pi * step / total)) / 2


def teacher_temperature(distill: Distill, epoch: int) -> float:
    """Teacher temperature of an epoch: linear warm-up from `teacher_temp_start`, then constant."""
    epochs = distill.teacher_temp_epochs
    if epoch >= epochs:
        return distill.teacher_temp
    return distill.teacher_temp_start + (distill.teacher_temp - distill.teacher_temp_start) * epoch / max(epochs - 1, 1)


def build_backbone(recipe: DinoRecipe) -> nn.Module:
    """The model of a recipe without classifier: images -> features [B, C]."""
    model = build_model(recipe.model, 0)
    set_token_refs(model, recipe.data.size, vars(recipe.distill))
    return model.train()


def check_takes_crops(model: nn.Module, recipe: DinoRecipe) -> int:
    """Channels of the features; raise if the model does not support the size of a crop."""
    hint = "timm's ViTs need model.kwargs.dynamic_img_size=true; crops.local_size is the side of the local crops"
    if recipe.crops.local_count:
        output_at(model, recipe.crops.local_size, hint)
    features = output_at(model, recipe.data.size, hint)
    if features.dim() != 2:
        raise ValueError(
            f"{recipe.model.name} gives features of shape {tuple(features.shape)}, but DINO needs one vector per "
            "image; set model.kwargs.global_pool"
        )
    return features.shape[1]


class Dino(Task):
    """DINO training: `model` is the student, and the teacher's backbone is the result."""

    recipe: DinoRecipe
    model: Branch
    recordable = True

    def __init__(self, recipe: DinoRecipe, fabric: Fabric, progress: RunProgress) -> None:
        self.recipe, self.fabric = recipe, fabric
        self.title = f"DINO {recipe.name}: {recipe.model.name}, {recipe.model.attention or 'its own'} attention"
        self.source = open_any(recipe.data.path, labels=OPTIONAL if recipe.probe.bank else NONE)
        self.classes = self.source.classes
        self.share = Share(recipe.run.batch, fabric.global_rank, fabric.world_size, recipe.run.accumulate)
        self.steps_per_epoch = steps_per_epoch(self.source, self.share)
        self.total = recipe.schedule.all_epochs * self.steps_per_epoch
        self.broken = BrokenImages(self.source, progress.say)
        self.cache = None
        if recipe.data.cache:
            self.cache = decode(self.source, "train", recipe.data, fabric.device, progress, recipe.data.cache_size)
        self.probe = None
        progress.say(f"{len(self.source)} images in {self.source.place}")
        lacks = None if self.classes else "labels"
        lacks = lacks or (None if has_val_images(recipe.data.path) else "val images")
        if recipe.probe.bank and lacks:
            progress.say(f"the data have no {lacks}, so that no k-NN accuracy is measured during the run")
        elif recipe.probe.bank:
            self.probe = KnnProbe(recipe, fabric, self.share, self.source, self.cache, progress)
        seed_everything(recipe.run.seed)
        backbone = build_backbone(recipe)
        dim = check_takes_crops(backbone, recipe)
        self.model = Branch(backbone, Head(dim, recipe.distill))
        # The teacher has no stochastic depth. It stays in training mode so that BatchNorm uses the batch, as in DINO.
        settled = replace(recipe, model=replace(recipe.model, drop_path=0.0))
        self.teacher: Any = Branch(build_backbone(settled), Head(dim, recipe.distill))
        self.teacher.load_state_dict(self.model.state_dict())
        self.teacher.requires_grad_(False)
        if fabric.world_size > 1 and fabric.device.type == "cuda":
            self.teacher = nn.SyncBatchNorm.convert_sync_batchnorm(self.teacher)  # the loop converts the student
        self.crop = CropBatch(recipe.crops, recipe.data).to(fabric.device)
        self.teach: Any = self.teacher
        if recipe.run.compile:
            self.teach = compile_blocks(self.teacher)  # not the crops, which take a small part of a step
        self.criterion = DinoLoss(recipe.distill)
        # Filled in place at each step, because a CUDA graph reads and writes fixed memory.
        self.temperature = torch.zeros((), device=fabric.device)  # of the teacher
        # Mean of the teacher's outputs and information, summed over the parts of a step. [K + 1]
        self.teacher_sums = torch.zeros(recipe.distill.out_dim + 1, device=fabric.device)

    @cached_property
    def student_and_teacher(self) -> tuple[list[Tensor], list[Tensor]]:
        """Their parameters, or the parts of them in this process; first used when they are sharded, if they are.

        Collected once: listing parameters takes milliseconds per step while the device waits.
        """
        return local_parts(self.model.parameters()), local_parts(self.teacher.parameters())

    def batches(self, start: int, stop: int) -> Iterator[Tensor]:
        """Images of this process: uint8 [B, 3, S, S] from the cache, or their views as rows of bytes."""
        seed, data = self.recipe.run.seed, self.recipe.data
        if self.cache is not None:
            return (images for images, _ in self.cache.batches(self.share, seed, start=start, stop=stop))
        samples = Samples(self.source, CropImage(self.recipe.crops, data.size, data.interpolation), seed)
        pieces = batch_indices(self.source, self.share, seed, start=start, stop=stop)
        return (rows for rows, _ in decoded_batches(samples, pieces, data.workers, self.fabric.device, self.broken))

    def prepare(self, batch: Tensor) -> list[Tensor]:
        """Normalized views of a batch: global ones [G * B, 3, S, S], then local ones [(V - G) * B, 3, s, s]."""
        if batch.dim() == 4:
            return self.crop(batch)
        data = self.recipe.data
        return [normalize(group, data) for group in split_views(batch, self.recipe.crops, data.size)]

    def draw_batch(self, batch: Sequence[Tensor], path: Path) -> None:
        """One row per image with all its views; the teacher sees the global ones."""
        crops, images = self.recipe.crops, len(batch[0]) // self.recipe.crops.global_count
        names = ["global"] * crops.global_count + ["local"] * crops.local_count
        shown = [view[:DRAWN_IMAGES] for group in batch for view in group.split(images)]  # one [n, 3, s, s] per view
        columns = [
            [Tile(picture, name) for picture in to_pictures(view, self.recipe.data)]
            for view, name in zip(shown, names, strict=True)
        ]
        title = f"first training batch: views of {len(columns[0])} of {images} images"
        save_sheet(path, list(zip(*columns, strict=True)), title, DRAWN_SIDE)

    def loss(self, model: Callable[..., Any], batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross entropy of the student against the teacher, and measures of the variety of the teacher's outputs."""
        groups, images = batch, len(batch[0]) // self.recipe.crops.global_count
        with torch.no_grad(), self.fabric.autocast():
            features, teacher = self.teach(groups[:1])  # [G * B, C], [G * B, K]
        _, student = model(groups)  # [V * B, K]
        loss, targets = self.criterion(student, teacher, images, self.temperature)
        nats = information(targets)
        self.teacher_sums += torch.cat([teacher.float().mean(0), nats[None]])
        return loss, {
            "teacher_entropy": entropy(targets),
            "teacher_information": nats,
            "feature_variance": spread(features),
        }

    def before_step(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Set the weight decay and the teacher's temperature of the step."""
        decay = cosine(self.recipe.optim.weight_decay, self.recipe.distill.weight_decay_end, step, self.total)
        groups[1]["weight_decay"] = decay  # the first group is not decayed
        self.temperature.fill_(teacher_temperature(self.recipe.distill, step // self.steps_per_epoch))
        self.teacher_sums.zero_()

    def after_backward(self, step: int) -> None:
        """Clip the gradient of each parameter, and drop those of the last layer while it is frozen."""
        distill = self.recipe.distill
        if distill.clip is not None:
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            factors = (distill.clip / (norms(gradients) + 1e-6)).clamp(max=1)
            torch._foreach_mul_(local_parts(gradients), list(factors.unbind()))
        if step < distill.freeze_last_layer * self.steps_per_epoch:
            for p in self.model.head.last_layer.parameters():
                p.grad = None  # with a zero gradient the optimizer would still apply weight decay

    def after_step(self, step: int) -> None:
        """Update teacher and center; stop the run if the teacher has collapsed."""
        momentum = cosine(self.recipe.distill.momentum, 1.0, step - 1, self.total)
        with torch.no_grad():  # parameters alone: the teacher keeps its own buffers
            student, teacher = self.student_and_teacher
            torch._foreach_lerp_(teacher, student, 1 - momentum)
        if self.cache is None and step % self.recipe.run.log_steps == 0:
            self.broken.gather()
        means = self.teacher_sums / self.recipe.run.accumulate
        if self.fabric.world_size > 1:
            means = self.fabric.all_reduce(means, reduce_op="mean")  # type: ignore[assignment]
            if self.fabric.device.type == "cpu":  # without SyncBatchNorm the statistics of the processes differ
                for buffer in self.teacher.buffers():
                    if buffer.is_floating_point():
                        buffer.copy_(self.fabric.all_reduce(buffer, reduce_op="mean"))
        self.criterion.update(means[:-1], means[-1])
        limit = self.recipe.distill.collapse_steps
        if (step % COLLAPSE_CHECK_INTERVAL == 0 or step == self.total) and int(self.criterion.flat_steps) >= limit:
            raise CollapseError(
                f"the teacher has collapsed: for {int(self.criterion.flat_steps)} steps up to step {step} its output "
                f"was the same for every image (information below {COLLAPSED} nats; teacher_entropy in train.csv is "
                f"near {math.log(self.recipe.distill.out_dim):.2f} if the output is uniform, near 0 if it is one "
                "class). For an XCiT with SimA set distill.class_token_ref=true; otherwise try a lower "
                "distill.teacher_temp or optim.lr, more distill.freeze_last_layer epochs or a distill.momentum closer "
                "to 1. Earlier checkpoints are kept",
                step,
            )

    def state(self) -> dict[str, nn.Module]:
        """Teacher and center; the schedules depend only on the step."""
        return {"teacher": self.teacher, "center": self.criterion}

    def about(self, recipe: DinoRecipe) -> dict[str, Any]:
        """Recipe, classes and number of training images."""
        return {"task": "dino", "recipe": to_dict(recipe), "classes": self.classes, "images": len(self.source)}

    def result(self) -> nn.Module:
        """The teacher's backbone."""
        return self.teacher.backbone

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """k-NN accuracy of the teacher's features in percent, over all processes; empty if probe.bank is 0."""
        if self.probe is None:
            return {}
        self.teacher.eval()
        metrics = self.probe(self.teacher.backbone)
        self.teacher.train()
        return metrics


def train_dino(
    recipe: DinoRecipe, out: Path | str, *, resume: bool = False, device: str = "auto", quiet: bool = False
) -> RunSummary:
    """Train by a recipe into a folder, or resume the run in it. `weights.safetensors` is the teacher's backbone.

    A batch larger than the data is reduced.
    """
    check(recipe)
    recipe, notes = with_possible_batch(recipe, len(open_any(recipe.data.path, labels=NONE)))
    options: dict[str, Any] = {"resume": resume, "device": device, "quiet": quiet, "notes": notes}
    return train_task(recipe, out, build=Dino, **options)
