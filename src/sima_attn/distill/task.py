"""Linearization as a task of the training loop: block by block, then the whole network.

Stage 1 is teacher-forced: one forward pass of the teacher gives the input and output of all its attentions, and each
new attention learns the output for that input, all of them in one step. Stage 2 matches the final tokens (and logits)
of the network. The result are the weights with the best final tokens on held-out images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn._settings import to_dict
from sima_attn.data.loader import (
    Batch,
    BrokenImages,
    Share,
    evaluation_batches,
    seed_everything,
    steps_per_epoch,
    training_batches,
)
from sima_attn.data.sources import ClassFolders, Source, Subset, open_data
from sima_attn.distill.networks import (
    attend,
    block_errors,
    build_student,
    description_of,
    exchanged,
    fit_gains,
    output_loss,
    rebuild_teacher,
    recorded,
    relative_error,
    run,
)
from sima_attn.distill.recipes import BLOCKS, NETWORK, LinearizeRecipe
from sima_attn.models.huggingface import TimmInterface, save_folder
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.report.progress import RunProgress
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.engine import RunSummary, Task
from sima_attn.train.run import RunFolder
from sima_attn.train.start import train_task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LEAST_IMAGES = 8
MEASURED_IMAGES = 64  # for the errors of single blocks


def open_images(path: str, held_out: float, seed: int) -> tuple[Source, Source]:
    """(images to learn from, images to measure on): the splits of the data, or parts of a folder of images.

    Labels are optional. Without val images a part of the others is held out, always the same for a seed.
    """
    root = Path(path)
    try:
        train = open_data(path, "train", labelled=False)
    except FileNotFoundError:
        if not root.is_dir():
            raise
        train = ClassFolders(root, labelled=False)
    if len(train) < LEAST_IMAGES:
        raise ValueError(f"{path} has {len(train)} images; a linearization needs at least {LEAST_IMAGES}")
    try:
        return train, open_data(path, "val", labelled=False)
    except FileNotFoundError:
        order = np.random.default_rng(seed).permutation(len(train))
        count = max(1, round(held_out * len(train)))
        return Subset(train, np.sort(order[count:])), Subset(train, np.sort(order[:count]))


class Best(nn.Module):
    """The best student so far, its score on held-out images, and the errors [blocks] before the first step."""

    score: Tensor
    errors_before: Tensor

    def __init__(self, student: nn.Module, errors_before: list[float]) -> None:
        super().__init__()
        self.network = copy.deepcopy(student).requires_grad_(False)
        self.register_buffer("score", torch.tensor(-torch.inf))
        self.register_buffer("errors_before", torch.tensor(errors_before))

    def offer(self, student: nn.Module, score: float) -> None:
        """Keep the student if its score is higher."""
        if score > float(self.score):
            self.network.load_state_dict(student.state_dict())
            self.score.fill_(score)


class Linearization(Task):
    """A student with new attentions learns the outputs of its teacher.

    Args:
        teacher: The trained model. In a resumed run any weights will do: the checkpoint has them.
        classes: Names of its classes; empty without a classifier.
    """

    def __init__(
        self, recipe: LinearizeRecipe, fabric: Fabric, progress: RunProgress, *, teacher: nn.Module, classes: list[str]
    ) -> None:
        if fabric.world_size > 1:
            raise ValueError("a linearization runs in one process; start it without torchrun")
        self.recipe, self.fabric, self.classes = recipe, fabric, classes
        self.title = f"{recipe.model.name}: {recipe.model.attention} learns from its teacher"
        self.source, self.val = open_images(recipe.data.path, recipe.transfer.held_out, recipe.run.seed)
        self.share = Share(recipe.run.batch, accumulate=recipe.run.accumulate)
        self.steps_per_epoch = steps_per_epoch(self.source, self.share)
        self.broken = BrokenImages(self.source, progress.say)
        self.broken_val = BrokenImages(self.val, progress.say)
        self.teacher = teacher.eval().requires_grad_(False).to(fabric.device)
        seed_everything(recipe.run.seed)
        self.model = build_student(teacher, recipe.model, str(recipe.model.attention)).to(fabric.device)
        self.paths = exchanged(self.teacher, self.model)
        before = list(self.errors(self.model).values())
        fit_gains(self.teacher, self.model, self.paths, self._first_images(self.source, self.broken))
        self.best = Best(self.model, before).to(fabric.device)
        # Parameters that are frozen have no part in the final tokens, such as a text model beside the vision model.
        self.others = [
            p for name, p in self.model.named_parameters() if p.requires_grad and not self._is_exchanged(name)
        ]

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Augmented images."""
        recipe, seed = self.recipe, self.recipe.run.seed
        source, share, device = self.source, self.share, self.fabric.device
        return training_batches(
            source, share, recipe.data, recipe.augment, seed, start=start, stop=stop, device=device, broken=self.broken
        )

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The new attentions, and all other weights."""
        new = [p for name, p in self.model.named_parameters() if self._is_exchanged(name)]
        return [{"params": new, "weight_decay": weight_decay}, {"params": self.others, "weight_decay": weight_decay}]

    def before_step(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Choose the stage; weights outside of the attentions learn in the last one only."""
        self.stage = self.recipe.schedule.stage(step, self.steps_per_epoch)
        for parameter in self.others:
            parameter.requires_grad_(self.stage == NETWORK)
        if self.stage != NETWORK:
            groups[1]["lr"] = 0.0

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean relative error of the new attentions, or the difference of the final outputs."""
        # The module itself, not its wrapper, which has no other method than forward.
        with self.fabric.autocast():
            if self.stage != BLOCKS:
                with torch.no_grad():
                    wanted = run(self.teacher, batch.images)
                found = run(self.model, batch.images)
                return output_loss(found, wanted, self.recipe.transfer.logits), {}
            with torch.no_grad(), recorded(self.teacher, self.paths) as seen:
                run(self.teacher, batch.images)
            errors = [relative_error(attend(self.model.get_submodule(path), x), y) for path, (x, y) in seen.items()]
        return torch.stack(errors).mean(), {}

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Cosine of the final tokens with the teacher's, agreement of the best class, and accuracy with labels."""
        student = self.model.eval()
        sums: dict[str, float] = {}
        images = 0
        for batch in self._batches_of(self.val, self.broken_val):
            with self.fabric.autocast():
                wanted, found = run(self.teacher, batch.images), run(student, batch.images)
            numbers = {"cosine": _cosine(found.tokens, wanted.tokens).mean(1)}
            if self.classes:
                best, same = wanted.logits.argmax(1), found.logits.argmax(1)
                numbers["agreement"] = 100 * (same == best).float()
                if self.val.classes == self.classes:
                    numbers["top1"] = 100 * (same == batch.labels).float()
                    numbers["teacher_top1"] = 100 * (best == batch.labels).float()
            for name, values in numbers.items():
                sums[name] = sums.get(name, 0.0) + float(values.sum())
            images += len(batch.images)
        if not images:
            raise ValueError(f"none of the {len(self.val)} held-out images can be read")
        metrics = {name: value / images for name, value in sums.items()}
        self.best.offer(student, metrics["cosine"])
        return metrics

    def errors(self, student: nn.Module) -> dict[str, float]:
        """Relative error of each new attention on the first held-out images, given the teacher's input."""
        images = self._first_images(self.val, self.broken_val)
        with self.fabric.autocast(), eval_mode(student):
            return block_errors(self.teacher, student, self.paths, images)

    def state(self) -> dict[str, nn.Module]:
        """Teacher and best student."""
        return {"teacher": self.teacher, "best": self.best}

    def about(self, recipe: LinearizeRecipe) -> dict[str, Any]:
        """Recipe, classes, number of training images and, for transformers, the configuration of the teacher."""
        facts = {"task": "linearize", "recipe": to_dict(recipe), "classes": self.classes, "images": len(self.source)}
        return {**facts, **description_of(self.teacher)}

    def result(self) -> nn.Module:
        """The best student on held-out images."""
        return self.best.network

    def write_result(self, folder: RunFolder, facts: dict[str, Any]) -> None:
        """Weights as of any run; of a model of transformers what `save_pretrained` writes."""
        network = self.result()
        if isinstance(network, TimmInterface):
            save_folder(network, folder.path, Preprocessing.from_recipe(vars(self.recipe.data)))
        else:
            super().write_result(folder, facts)

    def _first_images(self, source: Source, broken: BrokenImages) -> Tensor:
        part = Subset(source, np.arange(min(MEASURED_IMAGES, len(source))))
        return torch.cat([batch.images for batch in self._batches_of(part, broken)])

    def _batches_of(self, source: Source, broken: BrokenImages) -> Iterator[Batch]:
        batch = min(self.share.piece, len(source))
        return evaluation_batches(source, self.recipe.data, batch, device=self.fabric.device, broken=broken)

    def _is_exchanged(self, name: str) -> bool:
        return name.startswith(tuple(f"{path}." for path in self.paths))


def _cosine(found: Tensor, wanted: Tensor) -> Tensor:
    """Cosine of each token [B, N]."""
    return F.cosine_similarity(found.float(), wanted.float(), dim=2)


class Block(NamedTuple):
    """One attention: its path, and its relative error given the teacher's input, before and after."""

    path: str
    error_before: float
    error_after: float


class Linearized(NamedTuple):
    """The student with the best final tokens, its metrics on held-out images, and the errors of its attentions."""

    model: nn.Module
    metrics: dict[str, float]
    blocks: list[Block]
    summary: RunSummary


def train_linearization(
    recipe: LinearizeRecipe,
    out: Path | str,
    *,
    teacher: nn.Module | None = None,
    classes: list[str] | None = None,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
) -> Linearized:
    """Teach by a recipe into a folder, or resume the run in it, which has the teacher in its checkpoints."""
    saved = load_newest(RunFolder(Path(out)).checkpoints) if resume else None
    if teacher is not None and saved is not None:
        _check_same_weights(teacher, saved["task"]["teacher"], out)
    if teacher is None:
        if saved is None:
            raise ValueError(f"there is no run to resume in {out}; start one without --resume")
        classes = saved["about"]["classes"]
        settings = replace(recipe.model, attention=recipe.transfer.teacher_attention)
        data = Preprocessing.from_recipe(vars(recipe.data))
        teacher = rebuild_teacher(settings, data, saved["about"])  # the loop loads its weights
    task: Linearization | None = None

    def build(recipe: LinearizeRecipe, fabric: Fabric, progress: RunProgress) -> Linearization:
        nonlocal task
        task = Linearization(recipe, fabric, progress, teacher=teacher, classes=classes or [])
        return task

    summary = train_task(recipe, out, build=build, command="linearize", resume=resume, device=device, quiet=quiet)
    assert task is not None
    student = task.best.network.eval()
    after = task.errors(student)
    before = dict(zip(task.paths, task.best.errors_before.tolist(), strict=True))
    blocks = [Block(path, before[path], after[path]) for path in task.paths]
    task.model.load_state_dict(student.state_dict())
    return Linearized(student, task.evaluate(task.model), blocks, summary)


def _check_same_weights(teacher: nn.Module, saved: dict[str, Tensor], out: Path | str) -> None:
    given = teacher.state_dict()
    if given.keys() != saved.keys() or not all(torch.equal(given[name].cpu(), saved[name].cpu()) for name in saved):
        raise ValueError(
            f"the run in {out} has another teacher than the model given; omit the model to resume with the teacher of "
            "the run, or start a new run with another --out"
        )
