"""Linearization in miniature: students of the softmax ViT on 64-pixel images, with and without labels.

    python benchmarks/linearize_mini.py --data PATH --only teacher          # a GPU, 3 minutes
    python benchmarks/linearize_mini.py --data PATH --only relu2            # and each other student, in any order
    python benchmarks/linearize_mini.py --data PATH --rows linearize_mini.csv

The teacher is the softmax ViT of the grid (`sima reproduce miniature`) at its best recipe: ReLU, learning rate 1e-3, 60
epochs; --teacher takes the run of it that `sima reproduce fair` has made. A student sees 6 epochs' worth of images, and
so does SimA from scratch, the line to beat. With labels, the last two of the six are supervised fine-tuning. Each step
is a run in --folder of its own, which the same command skips when it is finished and resumes when it was interrupted.
Students can run side by side on one GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench_steps import CHECKPOINTS_BY_TIME, StepBench, last_top1, step_parser, steps_and_seconds, train_once
from sima_attn import linearize
from sima_attn._devices import resolve_device
from sima_attn._settings import with_overrides
from sima_attn.data.loader import BrokenImages, evaluation_batches
from sima_attn.data.settings import Data
from sima_attn.data.splits import open_data
from sima_attn.distill.networks import run as outputs_of
from sima_attn.distill.recipes import LinearizeRecipe
from sima_attn.models.loading import load_model
from sima_attn.report.rows import provenance_columns
from sima_attn.report.tables import TextTable
from sima_attn.reproduce.miniature import RUNS, MiniatureRun, miniature_recipe
from sima_attn.train.classify import train_classifier
from sima_attn.train.recipes import Recipe
from sima_attn.train.run import RunFolder

TEACHER = "teacher"
TEACHER_RUN = next(run for run in RUNS if run.name == "softmax_relu")
SCRATCH_RUN = next(run for run in RUNS if run.name == "sima_relu_lr")  # at the rate that suits SimA
EPOCHS = 6  # of a student, all stages together
LABELED_EPOCHS = 2  # of them, with labels
BATCH = 128
# The images as the teacher was trained with them, without mixtures.
STUDENT_SETTINGS = (
    "data.cache=true",
    "data.workers=0",
    "augment.crop=padded",
    "augment.padding=8",
    "augment.flip=0.5",
    "run.precision=bf16",
    CHECKPOINTS_BY_TIME,
    "schedule.attention_lr=0.5",
    "schedule.network_lr=0.15",
    "schedule.finetune_lr=0.05",
    "report.speed=false",
)
STUDENT_GPU_SETTINGS = ("run.cuda_graph=true",)
LABEL_SETTINGS = ("augment.mixup=0.8", "augment.cutmix=1.0", "augment.smoothing=0.1")  # as for the teacher


@dataclass(frozen=True)
class Student:
    """One line of the table.

    Attributes:
        target: Largest loss of top-1 against the teacher, in points; 0 where there is no target.
    """

    name: str
    attention: str
    labels: bool = False
    target: float = 0.0


STUDENTS = (
    Student("sima", "sima", target=2.5),
    Student("sima_local", "sima_local", target=1.0),
    Student("relu2", "relu2", target=0.5),
    Student("relu2_wide", "relu2_wide", target=0.5),
    Student("sima_labels", "sima", labels=True, target=2.5),
    Student("sima_local_labels", "sima_local", labels=True, target=1.0),
    Student("relu2_labels", "relu2", labels=True, target=0.5),
    Student("relu2_wide_labels", "relu2_wide", labels=True, target=0.5),
    Student("sima_scratch", "sima", labels=True),
)


@dataclass(frozen=True)
class MiniRow:
    """A student, its accuracy in percent and that of its teacher.

    `cosine` is that of the final tokens, `seconds` are those of training alone.
    """

    name: str
    attention: str
    labels: bool
    epochs: int
    top1: float
    teacher_top1: float
    difference: float
    target: float
    cosine: float
    train_images: int
    seconds: float
    settings: str
    device: str
    torch: str
    date: str


@dataclass(frozen=True)
class Bench(StepBench):
    """The teacher and its students.

    Attributes:
        epochs: Of the teacher.
        teacher: Folder of its run.
        teacher_settings: Changes to the recipes of the teacher and of the run from scratch.
        student_settings: The same for the students.
    """

    epochs: int
    teacher: Path
    teacher_settings: Sequence[str]
    student_settings: Sequence[str]

    steps = (TEACHER, *(student.name for student in STUDENTS))
    row_type = MiniRow

    def make(self, name: str, place: Path) -> MiniRow | dict[str, float]:
        """Train the teacher, or train a student and compare it with the teacher."""
        if name == TEACHER:
            settings = [*self.teacher_settings, *self.settings]
            self.train_classifier(self.recipe(TEACHER_RUN, self.epochs), self.teacher, settings)
            return {"top1": last_top1(self.teacher)}
        return self.measure(next(student for student in STUDENTS if student.name == name), place)

    def table(self, rows: Sequence[MiniRow]) -> TextTable:
        """One line per student."""
        return mini_table(rows)

    def recipe(self, run: MiniatureRun, epochs: int) -> Recipe:
        """The recipe of a run of the grid with another number of epochs."""
        return miniature_recipe(replace(run, epochs=epochs), self.data, on_gpu=self.device == "cuda")

    def train_classifier(self, recipe: Recipe, out: Path, settings: Sequence[str]) -> None:
        """Train by a recipe with these settings."""
        train = partial(train_classifier, with_overrides(recipe, settings), out, device=self.device)
        train_once(out, Recipe, settings, train)

    def measure(self, student: Student, place: Path) -> MiniRow:
        """Teach a student, or train it from scratch, and compare it with the teacher."""
        teacher = self.teacher
        if not RunFolder(teacher).weights.exists():
            raise ValueError(f"there is no trained teacher in {teacher}; run --only {TEACHER} first")
        if student.name == "sima_scratch":
            last, changes = place / "run", [*self.teacher_settings, *self.settings]
            self.train_classifier(with_shape_of(teacher, self.recipe(SCRATCH_RUN, EPOCHS)), last, changes)
        else:
            labeled = LABEL_SETTINGS if student.labels else ()
            last, changes = place / "linearized", [*schedule_of(student.labels), *STUDENT_SETTINGS, *labeled]
            changes += [*self.settings, *self.student_settings]
            options: dict[str, Any] = {"attention": student.attention, "batch": BATCH, "device": self.device}
            train = partial(linearize, teacher, self.data, last, overrides=changes, **options)
            train_once(last, LinearizeRecipe, changes, train)
        loaded = load_model(last)
        _, seconds = steps_and_seconds(last, loaded.about["recipe"]["run"]["batch"])
        top1, teacher_top1, cosine = compare(loaded, load_model(teacher), self.data, self.device)
        return MiniRow(
            name=student.name,
            attention=student.attention,
            labels=student.labels,
            epochs=EPOCHS,
            top1=round(top1, 2),
            teacher_top1=round(teacher_top1, 2),
            difference=round(top1 - teacher_top1, 2),
            target=0.0 - student.target,  # not -0.0
            cosine=round(cosine, 4),
            train_images=len(open_data(self.data, "train")),
            seconds=seconds,
            settings=" ".join(changes),
            **provenance_columns(self.device),
        )


def with_shape_of(folder: Path, recipe: Recipe) -> Recipe:
    """The recipe with the arguments of the model in the folder of a run."""
    kwargs = load_model(folder).about["recipe"]["model"]["kwargs"]
    return replace(recipe, model=replace(recipe.model, kwargs=kwargs))


def schedule_of(labels: bool) -> list[str]:
    """One epoch block by block, one for the attentions in the network, the others for all weights."""
    finetune = LABELED_EPOCHS if labels else 0
    epochs = {"block": 1, "attention": 1, "network": EPOCHS - 2 - finetune, "finetune": finetune}
    return [f"schedule.{stage}_epochs={count}" for stage, count in epochs.items()]


@torch.no_grad()
def compare(student: Any, teacher: Any, data: str, device: str) -> tuple[float, float, float]:
    """Top-1 of both in percent, and the cosine of their final tokens, in float32."""
    val, settings = open_data(data, "val"), Data.of_model(teacher)
    networks: list[nn.Module] = [loaded.model.to(device).eval() for loaded in (student, teacher)]
    settings = replace(settings, workers=4 if device == "cuda" else 0, cache=False)
    sums = torch.zeros(3, dtype=torch.float64)
    where = torch.device(device)
    for images, labels in evaluation_batches(val, settings, 250, device=where, broken=BrokenImages(val, print)):
        found, wanted = (outputs_of(network, images) for network in networks)
        cosines = F.cosine_similarity(found.tokens, wanted.tokens, dim=2).mean(1)
        hits = [(output.logits.argmax(1) == labels).sum() for output in (found, wanted)]
        sums += torch.stack([*hits, cosines.sum()]).double().cpu()
    top1, teacher_top1, cosine = (sums / len(val)).tolist()
    return 100 * top1, 100 * teacher_top1, cosine


def mini_table(rows: Sequence[MiniRow]) -> TextTable:
    """One line per student."""
    head = ["student", "labels", "top-1", "teacher", "difference", "target", "cosine of final tokens", "seconds"]
    lines = [
        [
            row.name,
            "yes" if row.labels else "no",
            f"{row.top1:.1f}",
            f"{row.teacher_top1:.1f}",
            f"{row.difference:+.1f}",
            f"{row.target:+.1f}" if row.target else "-",
            "-" if row.name == "sima_scratch" else f"{row.cosine:.3f}",
            f"{row.seconds:.0f}",
        ]
        for row in rows
    ]
    return TextTable(head, lines)


def main(arguments: list[str] | None = None) -> None:
    """Run steps, or collect the rows."""
    parser = step_parser(__doc__, "a folder of labeled 64-pixel images", "runs/linearize_mini", Bench.steps)
    parser.add_argument("--epochs", type=int, default=TEACHER_RUN.epochs, help="epochs of the teacher")
    parser.add_argument("--teacher", type=Path, help="its run; by default in --folder, where it is trained")
    for group in ("set-teacher", "set-student"):
        parser.add_argument(f"--{group}", action="append", default=[], metavar="NAME=VALUE", help="a setting")
    given = parser.parse_args(arguments)
    device = resolve_device(given.device)
    on_gpu = device == "cuda"
    student_settings = [*(STUDENT_GPU_SETTINGS if on_gpu else ()), *given.set_student]
    bench = Bench(
        data=given.data,
        folder=given.folder,
        device=device,
        settings=given.set,
        epochs=given.epochs,
        teacher=given.teacher or given.folder / TEACHER / "run",
        teacher_settings=given.set_teacher,
        student_settings=student_settings,
    )
    bench.run_all(given.only, given.rows)


if __name__ == "__main__":
    main()
