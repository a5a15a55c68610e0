"""DINO: a student learns to say of any crop of an image what its slow average, the teacher, says of another one.

    p_t = softmax((teacher - centre) / T_t),  q_v = softmax(student / T_s),  loss = mean over t != v of -sum p_t log q_v

`train_dino` is what `sima dino` calls; the loop is that of all training.
Shapes: B images, V views, G global views, C channels, K outputs of the head. Views follow one another: [V * B, ...].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sima_attn._settings import to_dict
from sima_attn.data import open_data
from sima_attn.data.cache import Decoded, decode_once, normalise
from sima_attn.data.crops import CropBatch, CropImage, split_views
from sima_attn.data.loader import (
    BrokenImages,
    Samples,
    Share,
    batch_indices,
    batch_loader,
    seed_everything,
    steps_per_epoch,
)
from sima_attn.dino import recipes as dino_recipes
from sima_attn.dino.knn_monitor import KnnProbe
from sima_attn.dino.recipes import DinoRecipe, Distill
from sima_attn.models.building import build_model, set_token_refs
from sima_attn.models.compiled import compile_blocks
from sima_attn.ops.eager import without_autocast
from sima_attn.report.progress import RunProgress
from sima_attn.train.classify import output_at
from sima_attn.train.engine import Finished, Task
from sima_attn.train.start import train_task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

COLLAPSED = 1e-3  # nats; a teacher at its random start tells more of an image than that: the least seen is 0.005
LOOKED_AFTER = 10  # steps between two looks for a collapse: each waits for the device


class CollapseError(ValueError):
    """A teacher that says the same of every image; `step` is the last one made."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Head(nn.Module):
    """Projection head: features [B, C] -> logits [B, K], the cosines to K prototypes where the gains are kept at 1."""

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
    """Student or teacher: a backbone that gives features, and the head."""

    def __init__(self, backbone: nn.Module, head: Head) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Groups of views [V * B, 3, s, s] -> features [all V * B, C] and logits [all V * B, K]; one pass a size."""
        parts = [
            self.backbone(torch.cat(list(same)))
            for _, same in itertools.groupby(groups, key=lambda group: group.shape[-2:])
        ]
        features = torch.cat(parts)
        return features, self.head(features)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass, to save memory."""
        if not hasattr(self.backbone, "set_grad_checkpointing"):
            raise ValueError(f"{type(self.backbone).__name__} has no gradient checkpointing; set it to false")
        self.backbone.set_grad_checkpointing(enable)  # type: ignore[operator]


class DinoLoss(nn.Module):
    """The loss of all pairs of different views, and the centre [K] of the teacher's outputs.

    `flat_steps` counts the steps in a row in which the teacher said the same of every image.
    """

    centre: Tensor
    flat_steps: Tensor

    def __init__(self, distill: Distill) -> None:
        super().__init__()
        self.student_temp, self.centre_momentum = distill.student_temp, distill.centre_momentum
        self.register_buffer("centre", torch.zeros(distill.out_dim))
        self.register_buffer("flat_steps", torch.zeros((), dtype=torch.long))

    def forward(
        self, student: Tensor, teacher: Tensor, images: int, teacher_temp: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [V * B, K] of the student, [G * B, K] of the teacher -> loss, targets [G * B, K].

        The first G views of the student are those of the teacher; a view is not compared with itself.
        """
        with without_autocast(student):
            targets = F.softmax((teacher.float() - self.centre) / teacher_temp, dim=-1)  # [G * B, K]
            log_q = F.log_softmax(student.float() / self.student_temp, dim=-1)  # [V * B, K]
            p, q = targets.view(-1, images, targets.shape[1]), log_q.view(-1, images, log_q.shape[1])
            pairs = -(p.transpose(0, 1) @ q.permute(1, 2, 0)).mean(0)  # [B, G, K] x [B, K, V] -> [G, V]
            G, V = pairs.shape
            same = torch.eye(G, V, dtype=torch.bool, device=pairs.device)
            return pairs.masked_fill(same, 0).sum() / (G * (V - 1)), targets

    @torch.no_grad()
    def update(self, teacher_mean: Tensor, information: Tensor) -> None:
        """Move the centre to the mean [K] of a step's outputs of the teacher, and count steps without information."""
        self.centre.lerp_(teacher_mean, 1 - self.centre_momentum)
        self.flat_steps.copy_(torch.where(information < COLLAPSED, self.flat_steps + 1, 0))


def entropy(p: Tensor) -> Tensor:
    """Mean entropy of distributions [B, K], in nats."""
    return -torch.xlogy(p, p).sum(-1).mean()


def information(p: Tensor) -> Tensor:
    """Nats that distributions [B, K] tell of the image they are of: 0 where all are the same.

    The mean over b of KL(p_b || mean p), whatever it is that they all say: uniform, or one output alone.
    """
    mean = p.mean(0)
    return (torch.xlogy(p, p) - torch.xlogy(p, mean)).sum(-1).mean().clamp(min=0)


def spread(features: Tensor) -> Tensor:
    """Variance of features [B, C] over the batch, each of length 1: from 0, all the same, to 1, everywhere."""
    unit = F.normalize(features.float(), dim=-1)
    return unit.var(0, unbiased=False).sum()


def cosine(start: float, end: float, step: int, total: int) -> float:
    """From start at step 0 to end at `total`, along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * step / total)) / 2


def teacher_temperature(distill: Distill, epoch: int) -> float:
    """Of an epoch: in equal steps from its start in the first epoch to its end in the last one of the warm-up."""
    epochs = distill.teacher_temp_epochs
    if epoch >= epochs:
        return distill.teacher_temp
    return distill.teacher_temp_start + (distill.teacher_temp - distill.teacher_temp_start) * epoch / max(epochs - 1, 1)


@torch.no_grad()
def move_teacher(teacher: list[Tensor], student: list[Tensor], momentum: float) -> None:
    """teacher <- momentum * teacher + (1 - momentum) * student, every parameter; buffers are each one's own."""
    torch._foreach_lerp_(teacher, student, 1 - momentum)


def build_backbone(recipe: DinoRecipe) -> nn.Module:
    """The model of a recipe without classifier: images -> features [B, C]."""
    model = build_model(recipe.model, 0)
    set_token_refs(model, recipe.data.size, vars(recipe.distill))
    return model.train()


def check_takes_crops(model: nn.Module, recipe: DinoRecipe) -> int:
    """Channels of the features, the same at every size of crop, or an error that says which size is wrong."""
    width = 0
    sizes = [recipe.data.size, *([recipe.crops.local_size] if recipe.crops.local_count else [])]
    for size in dict.fromkeys(sizes):
        hint = "timm's ViTs need model.kwargs.dynamic_img_size=true; crops.local_size is the side of the local crops"
        features = output_at(model, size, hint)
        if features.dim() != 2:
            raise ValueError(
                f"{recipe.model.name} gives features of shape {tuple(features.shape)}, DINO needs one vector an image; "
                "set model.kwargs.global_pool"
            )
        width = features.shape[1]
    return width


class Dino(Task):
    """Self-distillation on the images of a recipe. `model` is the student; the teacher is what comes of it."""

    model: Branch
    recordable = True

    def __init__(
        self, recipe: DinoRecipe, fabric: Fabric, progress: RunProgress, decoded: Decoded | None = None
    ) -> None:
        self.recipe, self.fabric = recipe, fabric
        decoded = {} if decoded is None or not recipe.data.cache else decoded
        self.source = open_data(recipe.data.path, "train", labelled=recipe.probe.bank > 0)
        self.classes = self.source.classes
        self.share = Share(recipe.run.batch, fabric.global_rank, fabric.world_size, recipe.run.accumulate)
        images = recipe.run.batch // (fabric.world_size * recipe.run.accumulate)
        if images * recipe.crops.global_count < 2:
            raise ValueError(
                "a pass of one image with one global crop gives the teacher nothing to tell apart: raise run.batch or "
                "crops.global_count, or lower run.accumulate"
            )
        self.steps_per_epoch = steps_per_epoch(self.source, self.share)
        self.total = recipe.schedule.all_epochs * self.steps_per_epoch
        self.broken = BrokenImages(self.source, progress.say)
        self.cache = None
        if recipe.data.cache:
            self.cache = decode_once(decoded, "train", self.source, recipe.data, fabric.device, progress)
        self.probe = KnnProbe(recipe, fabric, self.share, self.source, decoded, progress) if recipe.probe.bank else None
        seed_everything(recipe.run.seed)
        backbone = build_backbone(recipe)
        dim = check_takes_crops(backbone, recipe)
        self.model = Branch(backbone, Head(dim, recipe.distill))
        # The teacher has no stochastic depth; it stays in training mode, so that BatchNorms see the batch, as in DINO.
        settled = replace(recipe, model=replace(recipe.model, drop_path=0.0))
        self.teacher: Any = Branch(build_backbone(settled), Head(dim, recipe.distill))
        self.teacher.load_state_dict(self.model.state_dict())
        self.teacher.requires_grad_(False)
        if fabric.world_size > 1 and fabric.device.type == "cuda":
            self.teacher = nn.SyncBatchNorm.convert_sync_batchnorm(self.teacher)  # the loop does it to the student
        # Listed once: to walk through the modules takes milliseconds, for which the device would wait at every step.
        self.followed: list[Tensor] = list(self.model.parameters())
        self.following: list[Tensor] = list(self.teacher.parameters())
        self.crop = CropBatch(recipe.crops, recipe.data).to(fabric.device)
        self.teach: Any = self.teacher
        if recipe.run.compile:
            self.teach = compile_blocks(self.teacher)  # not the crops: they take a fraction of a step
        self.criterion = DinoLoss(recipe.distill)
        # Filled at each step and never replaced, so that a recorded pass finds them.
        self.temperature = torch.zeros((), device=fabric.device)  # of the teacher
        # Of all parts of a step, summed: the mean of the teacher's outputs, and the information. [K + 1]
        self.seen = torch.zeros(recipe.distill.out_dim + 1, device=fabric.device)

    def batches(self, start: int, stop: int) -> Iterator[Tensor]:
        """Images of this process: bytes [B, 3, S, S] from the cache, or rows of bytes of their views."""
        seed, data = self.recipe.run.seed, self.recipe.data
        if self.cache is not None:
            return (images for images, _ in self.cache.batches(self.share, seed, start=start, stop=stop))
        crop = CropImage(self.recipe.crops, data.size, data.interpolation)
        return self._decoded(Samples(self.source, crop, seed), start, stop)

    def _decoded(self, samples: Samples, start: int, stop: int) -> Iterator[Tensor]:
        device = self.fabric.device
        pieces = batch_indices(self.source, self.share, self.recipe.run.seed, start=start, stop=stop)
        for rows, _, passed in batch_loader(samples, pieces, self.recipe.data.workers, device.type == "cuda"):
            self.broken.add(passed)
            yield rows.to(device, non_blocking=True)

    def prepare(self, batch: Tensor) -> list[Tensor]:
        """The normalised views of a batch: the global ones [G * B, 3, S, S], then the local ones [V * B, 3, s, s]."""
        if batch.dim() == 4:
            return self.crop(batch)
        data = self.recipe.data
        return [normalise(group, data) for group in split_views(batch, self.recipe.crops, data.size)]

    def loss(self, model: Callable[..., Any], batch: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross entropy of the student's views against the teacher's; how varied the teacher's outputs are."""
        groups, images = batch, len(batch[0]) // self.recipe.crops.global_count
        with torch.no_grad(), self.fabric.autocast():
            features, teacher = self.teach(groups[:1])  # [G * B, C], [G * B, K]
        _, student = model(groups)  # [V * B, K]
        loss, targets = self.criterion(student, teacher, images, self.temperature)
        told = information(targets)
        self.seen += torch.cat([teacher.float().mean(0), told[None]])
        return loss, {
            "teacher_entropy": entropy(targets),
            "teacher_information": told,
            "feature_variance": spread(features),
        }

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Biases and norms (all vectors) are not decayed; `decayed` says which group follows the schedule."""
        moving = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        plain = [p for name, p in moving if p.ndim <= 1 or name.endswith(".bias")]
        rest = [p for name, p in moving if not (p.ndim <= 1 or name.endswith(".bias"))]
        return [
            {"params": plain, "weight_decay": 0.0, "decayed": False},
            {"params": rest, "weight_decay": weight_decay, "decayed": True},
        ]

    def before_step(self, step: int, groups: list[dict[str, Any]]) -> None:
        """The weight decay and the teacher's temperature of the step."""
        decay = cosine(self.recipe.optim.weight_decay, self.recipe.distill.weight_decay_end, step, self.total)
        for group in groups:
            if group["decayed"]:
                group["weight_decay"] = decay
        self.temperature.fill_(teacher_temperature(self.recipe.distill, step // self.steps_per_epoch))
        self.seen.zero_()

    def after_backward(self, step: int) -> None:
        """Clip each gradient on its own; leave those of the last layer out while it is frozen."""
        distill = self.recipe.distill
        if distill.clip is not None:
            gradients = [p.grad for p in self.followed if p.grad is not None]
            norms = torch.stack(torch._foreach_norm(gradients))
            torch._foreach_mul_(gradients, list((distill.clip / (norms + 1e-6)).clamp(max=1).unbind()))
        if step < distill.freeze_last_layer * self.steps_per_epoch:
            for p in self.model.head.last_layer.parameters():
                p.grad = None  # not zero: with zero the optimiser would still decay it

    def after_step(self, step: int) -> None:
        """Teacher and centre follow; a teacher that says the same of every image ends the run."""
        momentum = cosine(self.recipe.distill.momentum, 1.0, step - 1, self.total)
        move_teacher(self.following, self.followed, momentum)
        if self.cache is None and step % self.recipe.run.log_steps == 0:
            self.broken.gather()
        seen = self.seen / self.recipe.run.accumulate
        if self.fabric.world_size > 1:
            seen = self.fabric.all_reduce(seen, reduce_op="mean")  # type: ignore[assignment]
            if self.fabric.device.type == "cpu":  # no SyncBatchNorm here: each process has statistics of its own
                for buffer in self.teacher.buffers():
                    if buffer.is_floating_point():
                        buffer.copy_(self.fabric.all_reduce(buffer, reduce_op="mean"))
        self.criterion.update(seen[:-1], seen[-1])
        limit = self.recipe.distill.collapse_steps
        if (step % LOOKED_AFTER == 0 or step == self.total) and int(self.criterion.flat_steps) >= limit:
            raise CollapseError(
                f"the teacher has collapsed: for {int(self.criterion.flat_steps)} steps up to step {step} it said the "
                f"same of every image (less than {COLLAPSED} nats of difference; teacher_entropy in train.csv is near "
                f"{math.log(self.recipe.distill.out_dim):.2f} if that is everything, near 0 if it is one output). In "
                "an XCiT with SimA distill.class_token_ref=true keeps it from that; a lower distill.teacher_temp or "
                "optim.lr, more distill.freeze_last_layer epochs or a distill.momentum nearer 1 may help, too. The "
                "checkpoints from before are kept",
                step,
            )

    def state(self) -> dict[str, nn.Module]:
        """The teacher and the centre belong to a checkpoint; the schedules are functions of the step."""
        return {"teacher": self.teacher, "centre": self.criterion}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """k-NN accuracy of the teacher's features in percent, over all processes; nothing without a bank."""
        if self.probe is None:
            return {}
        self.teacher.eval()
        metrics = self.probe(self.teacher.backbone)
        self.teacher.train()
        return metrics


def train_dino(
    recipe: DinoRecipe,
    out: Path | str,
    *,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
    decoded: Decoded | None = None,
) -> Finished:
    """Train by a recipe into a folder, or go on with the run in it; the metrics of the last evaluation come back.

    `weights.safetensors` in the folder is the teacher's backbone, which is what DINO is for.

    Args:
        decoded: Where a run with data.cache finds its images, or leaves them for another use of the same images.
    """
    dino_recipes.check(recipe)
    return train_task(
        recipe,
        out,
        build=lambda recipe, fabric, progress: Dino(recipe, fabric, progress, decoded),
        about=lambda task: {
            "task": "dino",
            "recipe": to_dict(recipe),
            "classes": task.classes,
            "images": len(task.source),
        },
        weights=lambda task: task.teacher.backbone,
        title=f"DINO {recipe.name}: {recipe.model.name}, {recipe.model.attention or 'its own'} attention",
        command="dino",
        resume=resume,
        device=device,
        quiet=quiet,
    )
