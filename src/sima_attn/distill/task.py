"""Linearization as a task of the training loop: block by block, then the whole network.

Stage 1 is teacher-forced: one forward pass of the teacher gives the input and output of all its attentions, and each
new attention learns the output for that input, all of them in one step. Then some attentions of the teacher may be put
back. Stage 2 matches the final tokens (and logits) of the network. The result are the weights with the best final
tokens on held-out images or, after a stage of fine-tuning with labels, with the best accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn._settings import to_dict
from sima_attn.data.cache import Cache, augmented, decode
from sima_attn.data.loader import (
    Batch,
    BrokenImages,
    Share,
    evaluation_batches,
    seed_everything,
    steps_per_epoch,
    training_batches,
)
from sima_attn.data.sources import Source, Subset, check_same_names
from sima_attn.distill.features import knn_agreement
from sima_attn.distill.images import open_images
from sima_attn.distill.keeping import Metrics, choose_blocks, keep_blocks, kept_for_now
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
from sima_attn.distill.recipes import ATTENTIONS, BLOCKS, FINETUNE, LinearizeRecipe
from sima_attn.distill.report import write_report
from sima_attn.distill.result import Block, Linearized, Record
from sima_attn.models.huggingface import users_path
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn.eval_mode import eval_mode
from sima_attn.report.progress import RunProgress
from sima_attn.train.batch_picture import draw_labeled
from sima_attn.train.best import Best
from sima_attn.train.checkpoint import load_newest
from sima_attn.train.classify import create_mixup, label_loss, mixed
from sima_attn.train.elastic import continues_run
from sima_attn.train.finetune_task import is_in
from sima_attn.train.run import RunFolder
from sima_attn.train.start import train_task
from sima_attn.train.task import Task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sima_attn.train.task import RunSummary

MEASURED_IMAGES = 64  # for the errors of single blocks
CHOICE_IMAGES = 256  # for the choice of the attentions to keep; they stay in memory meanwhile


class Linearization(Task):
    """A student with new attentions learns the outputs of its teacher.

    Args:
        teacher: The trained model. In a resumed run any weights will do: the checkpoint has them.
        classes: Names of its classes; empty without a classifier.
        record: In a resumed run: what was measured before.
    """

    recipe: LinearizeRecipe
    calls_wrapper = False
    recordable = True

    def __init__(
        self,
        recipe: LinearizeRecipe,
        fabric: Fabric,
        progress: RunProgress,
        *,
        teacher: nn.Module,
        classes: list[str],
        record: Record | None = None,
    ) -> None:
        self.recipe, self.fabric, self.progress, self.classes = recipe, fabric, progress, classes
        self.title = f"{recipe.model.name}: {recipe.model.attention} learns from its teacher"
        self.source, self.val = open_images(
            recipe.data.path,
            recipe.transfer.held_out,
            recipe.run.seed,
            labeled=recipe.schedule.finetune_epochs > 0,
        )
        progress.say(
            f"{len(self.source)} images to learn from in {self.source.place}; {len(self.val)} images to measure on in "
            f"{self.val.place}"
        )
        self.share = Share(recipe.run.batch, fabric.global_rank, fabric.world_size, recipe.run.accumulate)
        self.steps_per_epoch = steps_per_epoch(self.source, self.share)
        self.broken = BrokenImages(self.source, progress.say)
        self.broken_val = BrokenImages(self.val, progress.say)
        self.mixup = None
        if recipe.schedule.finetune_epochs:
            for source in (self.source, self.val):
                _check_labels(source, classes)
            self.mixup = create_mixup(recipe.augment, len(classes), self.share.piece)
        self.caches: dict[Source, Cache] = {}
        if recipe.data.cache:
            for split, source, side in (
                ("train", self.source, recipe.data.cache_size),
                ("val", self.val, None),
            ):
                self.caches[source] = decode(source, split, recipe.data, fabric.device, progress, side)
        self.teacher = teacher.eval().requires_grad_(False).to(fabric.device)
        seed_everything(recipe.run.seed)
        self.model = build_student(teacher, recipe.model, str(recipe.model.attention)).to(fabric.device)
        self.paths = exchanged(self.teacher, self.model)
        self.check_keep()
        # Collected before attentions are kept: the optimizer of a resumed run needs the parameters that they replace.
        learning = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        new = [p for name, p in learning if is_in(name, self.paths)]
        self.groups = [new, [p for name, p in learning if not is_in(name, self.paths)]]
        self.completed = 0
        if record is None:
            record = Record(self.errors(self.model))
            record.stages.append(("conversion", self.measure(self.model, self._batches_of(self.val, self.broken_val))))
            fit_gains(self.teacher, self.model, self.paths, self._first_images(self.source, self.broken))
        self.record = record
        self.put_kept(record.kept)

    def check_keep(self) -> None:
        """Raise where nothing would be left to linearize."""
        keep, blocks = self.recipe.transfer.keep, len(self.paths)
        if keep is not None and keep >= blocks:
            raise ValueError(
                f"keep={keep} leaves no attention to linearize: {self.recipe.model.name} has {blocks} that can be "
                f"exchanged, so keep at most {blocks - 1}"
            )

    def put_kept(self, paths: list[str]) -> None:
        """Keep these attentions of the teacher, and begin anew to look for the best student."""
        self.record.kept = paths
        keep_blocks(self.model, self.teacher, paths)
        new = [path for path in self.paths if path not in paths]
        optimized = {p for group in self.groups for p in group}
        self.others = [p for name, p in self.model.named_parameters() if p in optimized and not is_in(name, new)]
        self.best = Best(self.model).to(self.fabric.device)

    def batches(self, start: int, stop: int) -> Iterator[Batch]:
        """Augmented images, or bytes from the cache."""
        recipe, seed = self.recipe, self.recipe.run.seed
        source, share, device = self.source, self.share, self.fabric.device
        if recipe.data.cache:
            repeats = recipe.augment.repeats
            return self.caches[source].batches(share, seed, start=start, stop=stop, repeats=repeats)
        return training_batches(
            source, share, recipe.data, recipe.augment, seed, start=start, stop=stop, device=device, broken=self.broken
        )

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """The new attentions, and all other weights."""
        return [{"params": group, "weight_decay": weight_decay} for group in self.groups]

    def starts_stage(self, step: int) -> bool:
        """After the end of the stage before."""
        return step in self.recipe.schedule.last_steps(self.steps_per_epoch)

    def before_step(self, step: int, groups: list[dict[str, Any]]) -> None:
        """Choose the stage; weights outside of the new attentions learn in the last ones only."""
        schedule = self.recipe.schedule
        self.stage = schedule.stage(step, self.steps_per_epoch)
        all_learn = self.stage not in (BLOCKS, ATTENTIONS)
        for parameter in self.others:
            parameter.requires_grad_(all_learn)
        if not all_learn:
            groups[1]["lr"] = 0.0
        if step == schedule.first_step(FINETUNE, self.steps_per_epoch):
            # From the best distilled weights, which stay the result unless fine-tuning improves the accuracy.
            self.model.load_state_dict(self.best.network.state_dict())
            self.best.score = (self.best.metrics["top1"],)

    def prepare(self, batch: Batch) -> Batch:
        """Images from the cache augmented; in the stage of fine-tuning mixed where the recipe has mixup or cutmix."""
        batch = augmented(batch, self.recipe.data, self.recipe.augment)
        return mixed(batch, self.mixup) if self.stage == FINETUNE else batch

    def draw_batch(self, batch: Batch, path: Path) -> None:
        """Augmented images, with their classes if they have labels."""
        draw_labeled(path, batch, self.source, self.recipe.data, self.recipe.augment.smoothing)

    def loss(self, model: Callable[..., Any], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean relative error of the new attentions, difference of the final outputs, or the loss of the labels."""
        # The module itself, not its wrapper, which has no other method than forward.
        images, labels = batch  # of a recorded pass, a plain list
        with self.fabric.autocast():
            if self.stage == FINETUNE:
                loss, _ = label_loss(run(self.model, images).logits, labels, self.recipe.augment.smoothing)
                return loss, {}
            if self.stage != BLOCKS:
                transfer = self.recipe.transfer
                watched = self.paths if transfer.attentions else []
                with torch.no_grad(), recorded(self.teacher, watched) as theirs:
                    wanted = run(self.teacher, images)
                with recorded(self.model, watched) as ours:
                    found = run(self.model, images)
                loss = output_loss(found, wanted, transfer.logits)
                errors = [relative_error(ours[path][1], theirs[path][1]) for path in watched]
                return (loss + transfer.attentions * torch.stack(errors).mean() if errors else loss), {}
            with torch.no_grad(), recorded(self.teacher, self.paths) as seen:
                run(self.teacher, images)
            errors = [relative_error(attend(self.model.get_submodule(path), x), y) for path, (x, y) in seen.items()]
        return torch.stack(errors).mean(), {}

    def after_step(self, step: int) -> None:
        """Choose the attentions to keep after the first stage."""
        self.completed = step
        if step == self.recipe.schedule.last_steps(self.steps_per_epoch)[0]:
            self.choose_kept()
        if step % self.recipe.run.log_steps == 0:
            self.broken.gather()

    def choose_kept(self) -> None:
        """Rank the attentions by what keeping them gains, and keep as many as the recipe says."""
        transfer, limit = self.recipe.transfer, len(self.paths) - 1
        shown = min(self.recipe.report.trade, limit)
        most = limit if transfer.keep is None else max(transfer.keep, shown)
        if not most:
            return
        batches = list(self._batches_of(self.val, self.broken_val, CHOICE_IMAGES))

        def measure(paths: Sequence[str]) -> Metrics:
            with kept_for_now(self.model, self.teacher, paths):
                return self.measure(self.model, batches)

        ranking, count = choose_blocks(self.errors(self.model), measure, transfer, most=most, shown=shown)
        self.record.ranking = ranking
        if count:
            self.put_kept([kept.path for kept in ranking[1 : count + 1]])
            self.progress.say(f"kept attentions of the teacher: {', '.join(self.record.kept)}")

    def needs_evaluation(self, step: int) -> bool:
        """At the end of each stage."""
        return step in self.recipe.schedule.last_steps(self.steps_per_epoch)

    def evaluate(self, model: nn.Module) -> Metrics:
        """Cosine of the final tokens with the teacher's, agreement of the best class, and accuracy with labels."""
        metrics = self.measure(self.model, self._batches_of(self.val, self.broken_val))
        score = metrics["top1" if self.stage == FINETUNE else "cosine"]
        self.best.offer(self.model, metrics, (score,), self.completed)
        if self.needs_evaluation(self.completed):
            self.record.stages.append((self.stage, metrics))
        return metrics

    @torch.no_grad()
    def measure(self, student: nn.Module, batches: Iterable[Batch]) -> Metrics:
        """The metrics of a student over the batches of all processes."""
        names = ["cosine"]
        if self.classes:
            names += ["agreement", "top1", "teacher_top1"] if self.val.classes == self.classes else ["agreement"]
        totals = torch.zeros(len(names) + 1, dtype=torch.float64, device=self.fabric.device)
        for batch in batches:
            with self.fabric.autocast(), eval_mode(student):
                wanted, found = run(self.teacher, batch.images), run(student, batch.images)
            numbers = [_cosine(found.tokens, wanted.tokens).mean(1)]
            if self.classes:
                best, same = wanted.logits.argmax(1), found.logits.argmax(1)
                numbers += [100.0 * hits for hits in (same == best, same == batch.labels, best == batch.labels)]
            sums = [values.double().sum() for values in numbers[: len(names)]]
            totals += torch.stack([*sums, totals.new_tensor(len(batch.images))])
        self.broken_val.gather()
        *sums, images = self._mean_over_processes(totals).tolist()
        if not images:
            raise ValueError(f"none of the {len(self.val)} held-out images can be read")
        return {name: value / images for name, value in zip(names, sums, strict=True)}

    def errors(self, student: nn.Module) -> dict[str, float]:
        """Relative error of each new attention on the first held-out images, given the teacher's input."""
        images = self.held_out_images(MEASURED_IMAGES)
        with self.fabric.autocast(), eval_mode(student):
            errors = block_errors(self.teacher, student, self.paths, images)
        # All processes measure the same images; the mean makes them agree in the last bit, too.
        means = self._mean_over_processes(torch.tensor(list(errors.values()), device=self.fabric.device))
        return dict(zip(errors, means.tolist(), strict=True))

    def state(self) -> dict[str, nn.Module]:
        """Teacher and best student."""
        return {"teacher": self.teacher, "best": self.best}

    def about(self, recipe: LinearizeRecipe) -> dict[str, Any]:
        """What a resumed run and `load_model` need: recipe, classes, kept attentions, and what was measured."""
        return {
            "task": "linearize",
            "recipe": to_dict(recipe),
            "classes": self.classes,
            "images": len(self.source),
            "kept": dict.fromkeys(self.record.kept, recipe.transfer.teacher_attention),
            "record": self.record.to_dict(),
            **description_of(self.teacher),
        }

    def result(self) -> nn.Module:
        """The best student on held-out images."""
        return self.best.network

    def finish(self, summary: RunSummary) -> Linearized:
        """The result. The processes have parted: each one measures all held-out images."""
        self.share = Share(self.share.piece)
        student = self.best.network.eval()
        metrics = self.measure(student, self._batches_of(self.val, self.broken_val))
        theirs, ours = self._pooled_features(student)
        if len(ours) > 2:  # with two images there is but one neighbor
            metrics["knn_agreement"] = knn_agreement(theirs, ours)
        after, before = self.errors(student), self.record.errors_before
        blocks = [
            Block(users_path(student, path), before[path], after[path], path in self.record.kept) for path in self.paths
        ]
        return Linearized(student, metrics, blocks, summary, self.record)

    def held_out_images(self, count: int) -> Tensor:
        """The first held-out images [count, 3, S, S], the same in all processes."""
        return self._first_images(self.val, self.broken_val, count)

    @torch.no_grad()
    def _pooled_features(self, student: nn.Module) -> tuple[Tensor, Tensor]:
        """The mean of the final tokens of each held-out image [n, C], of the teacher and of the student."""
        means: list[list[Tensor]] = [[], []]
        for batch in self._batches_of(self.val, self.broken_val):
            with self.fabric.autocast():
                for found, model in zip(means, (self.teacher, student), strict=True):
                    found.append(run(model, batch.images).tokens.float().mean(1))
        return torch.cat(means[0]), torch.cat(means[1])

    def _first_images(self, source: Source, broken: BrokenImages, count: int = MEASURED_IMAGES) -> Tensor:
        """The first images of a source, all of them in each process."""
        batches = self._batches_of(source, broken, count, Share(self.share.piece))
        return torch.cat([batch.images for batch in batches])

    def _batches_of(
        self, source: Source, broken: BrokenImages, count: int | None = None, share: Share | None = None
    ) -> Iterator[Batch]:
        """The first `count` images of a source, by default all, as they are; each process has its share."""
        share = share or self.share
        batch, first = min(share.piece, len(source)), np.arange(len(source))[:count]
        if source in self.caches:
            return self.caches[source].evaluation_batches(batch, share.rank, share.world, among=first)
        return evaluation_batches(
            source if len(first) == len(source) else Subset(source, first),
            self.recipe.data,
            batch,
            device=self.fabric.device,
            broken=broken,
            rank=share.rank,
            world=share.world,
        )

    def _mean_over_processes(self, values: Tensor) -> Tensor:
        if self.share.world == 1:
            return values
        return self.fabric.all_reduce(values, reduce_op="mean")  # type: ignore[return-value]


def _check_labels(source: Source, classes: list[str]) -> None:
    """Raise unless the images have labels of the teacher's classes."""
    if not classes or not source.classes:
        lacks = "the teacher has no classifier" if not classes else "the images have no labels"
        raise ValueError(f"fine-tuning learns from labels, and {lacks}; omit --finetune")
    check_same_names("the teacher", classes, "the images", source.classes)


def _cosine(found: Tensor, wanted: Tensor) -> Tensor:
    """Cosine of each token [B, N]."""
    return F.cosine_similarity(found.float(), wanted.float(), dim=2)


def train_linearization(
    recipe: LinearizeRecipe,
    out: Path | str,
    *,
    teacher: nn.Module | None = None,
    classes: list[str] | None = None,
    resume: bool = False,
    device: str = "auto",
    quiet: bool = False,
    notes: Sequence[str] = (),
) -> Linearized:
    """Teach by a recipe into a folder, or resume the run in it, which has the teacher in its checkpoints."""
    resumed = resume or continues_run(Path(out))
    saved = load_newest(RunFolder(Path(out)).checkpoints) if resumed else None
    record = Record.from_dict(saved["about"]["record"]) if saved else None
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
        task = Linearization(recipe, fabric, progress, teacher=teacher, classes=classes or [], record=record)
        return task

    options: dict[str, Any] = {"resume": resume, "device": device, "quiet": quiet, "notes": notes}
    summary = train_task(recipe, out, build=build, **options)
    assert task is not None
    first = task.fabric.is_global_zero
    with RunProgress(shown=first and not quiet) as progress:
        progress.counter("measuring for the report")  # up to minutes on a CPU
        done = task.finish(summary)
        if first:
            photos = task.held_out_images(recipe.report.photos) if recipe.report.photos else None
            write_report(done, recipe, Path(out), teacher=task.teacher, photos=photos, autocast=task.fabric.autocast)
    return done


def _check_same_weights(teacher: nn.Module, saved: dict[str, Tensor], out: Path | str) -> None:
    given = teacher.state_dict()
    if given.keys() != saved.keys() or not all(torch.equal(given[name].cpu(), saved[name].cpu()) for name in saved):
        raise ValueError(
            f"the run in {out} has another teacher than the model given; omit the model to resume with the teacher of "
            "the run, or start a new run with another --out"
        )
