"""The model in the package fine-tuned on CIFAR-10, against training from scratch, with few images and with all of them.

    python benchmarks/finetune_cifar.py --data PATH --only subset          # writes 5,000 of the images
    python benchmarks/finetune_cifar.py --data PATH --only finetuned_5000  # and each other line, in any order
    python benchmarks/finetune_cifar.py --data PATH --rows finetune_cifar.csv

Each line makes as many steps as the defaults of `sima finetune` for that many images, with the same batch, augmentation
and schedule. The learning rate from scratch is one that suits it, and is the same in all layers. The softmax twin is
the same XCiT with its own attention, XCA. Only the last weights are evaluated, so that no line is chosen by the test
images. Each step is a run in --folder of its own, which the same command skips when it is finished and resumes when it
was interrupted. All of them together take about 10 minutes on one GPU, two at a time.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench_steps import CHECKPOINTS_BY_TIME, StepBench, last_top1, step_parser, steps_and_seconds, train_once
from sima_attn import finetune
from sima_attn._devices import resolve_device
from sima_attn._settings import with_overrides
from sima_attn.data.settings import Data
from sima_attn.data.splits import held_out_indices, open_data
from sima_attn.models.loading import DEFAULT, load_model
from sima_attn.models.settings import ModelSettings
from sima_attn.report.rows import provenance_columns
from sima_attn.report.tables import TextTable
from sima_attn.train.classify import train_classifier
from sima_attn.train.finetune_recipe import (
    FinetuneRecipe,
    default_augment,
    default_batch,
    default_epochs,
    default_schedule,
)
from sima_attn.train.recipes import Optim, Recipe, Run

SUBSET, SMALL = "subset", 5000  # images, as many of each class as it has a part of all
SCRATCH_LR = 1e-3
GPU_SETTINGS = ("run.cuda_graph=true", "run.compile=true")


@dataclass(frozen=True)
class Line:
    """One line of the table: `small` with few images, `pretrained` fine-tuned instead of trained from scratch."""

    name: str
    attention: str
    small: bool
    pretrained: bool = False


LINES = (
    Line("finetuned_5000", "sima", small=True, pretrained=True),
    Line("scratch_5000", "sima", small=True),
    Line("softmax_5000", "xca", small=True),
    Line("finetuned_50000", "sima", small=False, pretrained=True),
    Line("scratch_50000", "sima", small=False),
    Line("softmax_50000", "xca", small=False),
)


@dataclass(frozen=True)
class CifarRow:
    """A model and its accuracy on the test images in percent, after its last step; `seconds` are of training alone."""

    name: str
    model: str
    attention: str
    pretrained: bool
    train_images: int
    val_images: int
    epochs: int
    steps: int
    batch: int
    top1: float
    seconds: float
    settings: str
    device: str
    torch: str
    date: str


@dataclass(frozen=True)
class Bench(StepBench):
    """The lines of the table.

    Attributes:
        epochs: Of all lines; None for the defaults of `sima finetune`.
    """

    epochs: int | None

    steps = (SUBSET, *(line.name for line in LINES))
    row_type = CifarRow

    def make(self, name: str, place: Path) -> CifarRow | dict[str, int]:
        """Write the subset, or train a line."""
        if name == SUBSET:
            shutil.rmtree(place, ignore_errors=True)
            return write_subset(self.data, place / "data", SMALL)
        return self.measure(next(line for line in LINES if line.name == name), place / "run")

    def table(self, rows: Sequence[CifarRow]) -> TextTable:
        """One line per model."""
        return cifar_table(rows)

    def measure(self, line: Line, out: Path) -> CifarRow:
        """Fine-tune the model in the package, or train it or its twin from scratch."""
        data = self.data
        if line.small:
            data = str(self.folder / SUBSET / "data")
            if not self.is_done(SUBSET):
                raise ValueError(f"there are no images in {data}; run --only {SUBSET} first")
        images = len(open_data(data, "train"))
        epochs = self.epochs or default_epochs(images)
        settings = ["data.cache=true", "data.workers=0", "run.precision=bf16", f"run.eval_epochs={epochs}"]
        settings += [CHECKPOINTS_BY_TIME, *self.settings]

        def train(*, resume: bool) -> None:
            if line.pretrained:
                options: dict[str, Any] = {"epochs": epochs, "overrides": settings, "resume": resume}
                finetune(None if resume else DEFAULT, data, out, device=self.device, **options)
            else:
                recipe = with_overrides(scratch_recipe(line.attention, data, images, epochs), settings)
                train_classifier(recipe, out, resume=resume, device=self.device)

        train_once(out, FinetuneRecipe if line.pretrained else Recipe, settings, train)
        recipe_of_run = load_model(out).about["recipe"]
        steps, seconds = steps_and_seconds(out, recipe_of_run["run"]["batch"])
        return CifarRow(
            name=line.name,
            model=DEFAULT,
            attention=line.attention,
            pretrained=line.pretrained,
            train_images=images,
            val_images=len(open_data(data, "val")),
            epochs=recipe_of_run["schedule"]["epochs"],
            steps=steps,
            batch=recipe_of_run["run"]["batch"],
            top1=last_top1(out),
            seconds=seconds,
            settings=" ".join([*settings, f"optim.lr={recipe_of_run['optim']['lr']}"]),
            **provenance_columns(self.device),
        )


def scratch_recipe(attention: str, data: str, images: int, epochs: int) -> Recipe:
    """Training from random weights, otherwise as `sima finetune` trains the model in the package."""
    return Recipe(
        name="scratch",
        model=ModelSettings(DEFAULT, attention),
        data=Data(data, **vars(load_model(DEFAULT).preprocessing)),
        augment=default_augment(data),
        optim=Optim(lr=SCRATCH_LR, lr_batch=0, clip=1.0),
        schedule=default_schedule(epochs),
        run=Run(batch=min(default_batch(images), images), log_steps=10),
    )


def write_subset(data: str, folder: Path, count: int) -> dict[str, int]:
    """Write about `count` train images, the same part of each class, and all val images; return their numbers."""
    numbers = {}
    for split in ("train", "val"):
        source = open_data(data, split)
        chosen = np.arange(len(source)) if split == "val" else held_out_indices(source, count / len(source), seed=0)
        for name in source.classes:
            (folder / split / name).mkdir(parents=True)
        for i in chosen.tolist():
            source.read(i).save(folder / split / source.classes[source.labels[i]] / f"{i:06}.png")
        numbers[split] = len(chosen)
    return numbers


def cifar_table(rows: Sequence[CifarRow]) -> TextTable:
    """One line per model."""
    head = ["train images", "start", "attention", "epochs", "steps", "top-1", "seconds"]
    lines = [
        [
            f"{row.train_images:,}",
            "bundled model" if row.pretrained else "random weights",
            {"sima": "SimA", "xca": "softmax (XCA)"}[row.attention],
            str(row.epochs),
            f"{row.steps:,}",
            f"{row.top1:.1f}",
            f"{row.seconds:.0f}",
        ]
        for row in rows
    ]
    return TextTable(head, lines)


def main(arguments: list[str] | None = None) -> None:
    """Run steps, or collect the rows."""
    parser = step_parser(__doc__, "folder of CIFAR-10", "runs/finetune_cifar", Bench.steps)
    parser.add_argument("--epochs", type=int, help="epochs of all lines", default=None)
    given = parser.parse_args(arguments)
    device = resolve_device(given.device)
    settings = [*(GPU_SETTINGS if device == "cuda" else ()), *given.set]
    Bench(given.data, given.folder, device, settings, given.epochs).run_all(given.only, given.rows)


if __name__ == "__main__":
    main()
