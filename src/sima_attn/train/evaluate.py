"""A finished model on a data set: top-1 and top-5, classes, confusions; at any size. `sima eval` calls it.

Shapes: B batch, K classes.
"""

from __future__ import annotations

import csv
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sima_attn._files import atomic_write
from sima_attn.data.loader import BrokenImages, evaluation_batches
from sima_attn.data.settings import Data
from sima_attn.data.sources import check_same_names
from sima_attn.data.splits import open_trained_split
from sima_attn.models.loading import LoadedModel
from sima_attn.nn.token_ref import trained_at
from sima_attn.report.rows import today
from sima_attn.train.classify import logits_of, output_at, top_five
from sima_attn.train.mistakes import Mistake, most_confident


@dataclass(frozen=True)
class ClassRow:
    """One class: its images, top-1 and top-5 in percent, and the class it is most often confused with."""

    label: int
    name: str
    images: int
    top1: float
    top5: float
    most_taken_for: str


@dataclass(frozen=True)
class EvaluationRow:
    """A model at one size, as a line of a CSV file."""

    model: str
    px: int
    token_ref: bool
    top1: float
    top5: float
    loss: float
    images: int
    device: str
    date: str


class Evaluation(NamedTuple):
    """What a model does on a data set. `confusion` [K, K] counts images of class i called j.

    `mistakes` are the most confident ones, `place` says which images were used.
    """

    size: int
    token_ref: bool
    images: int
    broken: int
    top1: float
    top5: float
    loss: float
    confusion: Tensor
    rows: list[ClassRow]
    mistakes: list[Mistake]
    place: str

    def most_confused(self, count: int = 5) -> list[tuple[str, str, int]]:
        """(true class, predicted class, images) of the most frequent mistakes."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        values, places = wrong.flatten().topk(min(count, wrong.numel()))
        K = len(self.rows)
        pairs = zip(values.tolist(), places.tolist(), strict=True)
        return [(self.rows[p // K].name, self.rows[p % K].name, n) for n, p in pairs if n]

    def write_confusion(self, path: Path) -> None:
        """Write the confusion matrix as a CSV file: one row per true class, one column per predicted class."""
        names = [row.name for row in self.rows]
        with atomic_write(path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["true", *names])
            writer.writerows([name, *counts] for name, counts in zip(names, self.confusion.tolist(), strict=True))

    def as_row(self, model: str, device: str) -> EvaluationRow:
        """Its numbers, under the names of the model and of what it ran on."""
        top1, top5, loss = round(self.top1, 3), round(self.top5, 3), round(self.loss, 4)
        return EvaluationRow(model, self.size, self.token_ref, top1, top5, loss, self.images, device, today())


def evaluate(
    loaded: LoadedModel,
    data: str | Path | None = None,
    *,
    split: str = "val",
    size: int | None = None,
    token_ref: bool = False,
    batch: int = 256,
    device: str = "cpu",
    workers: int | None = None,
    say: Any = print,
) -> Evaluation:
    """The model on a split of the data (by default those it was trained on), at a size (by default its own).

    `token_ref` makes up for the shrinking of SimA's output at another number of tokens than at the training size.
    """
    loaded.check_has_classes()
    trained = Data.of_model(loaded)
    source = open_trained_split(trained, split, data)
    settings = replace(
        trained,
        size=trained.size if size is None else size,
        workers=trained.workers if workers is None else workers,
    )
    model = loaded.model.to(device).eval()
    if loaded.classes is not None:
        check_same_names("the model", loaded.classes, "the data", source.classes)
    elif getattr(model, "num_classes", len(source.classes)) != len(source.classes):
        raise ValueError(f"the model has {model.num_classes} classes, the data have {len(source.classes)}")
    output_at(model, settings.size, "give another --size")
    broken = BrokenImages(source, say)
    batches = evaluation_batches(source, settings, batch, device=torch.device(device), broken=broken)
    K, mistakes = len(source.classes), list[Mistake]()
    confusion, in_five, loss = torch.zeros(K, K, dtype=torch.long), torch.zeros(K, dtype=torch.long), 0.0
    with trained_at(model, trained.size) if token_ref else nullcontext():
        for seen, logits in logits_of(model, batches):
            labels = seen.labels
            best, batch_loss = top_five(labels, logits)
            mistakes = most_confident(mistakes, seen, logits)
            confusion += torch.bincount(labels * K + best[:, 0], minlength=K * K).view(K, K).cpu()
            in_five += torch.bincount(labels[(best == labels[:, None]).any(1)], minlength=K).cpu()
            loss += float(batch_loss)
    images = int(confusion.sum())
    if not images:
        raise ValueError(f"none of the {len(source)} images can be read")
    rows = [_class_row(k, source.classes, confusion, in_five) for k in range(K)]
    return Evaluation(
        size=settings.size,
        token_ref=token_ref,
        images=images,
        broken=len(broken.found),
        top1=100 * int(confusion.diag().sum()) / images,
        top5=100 * int(in_five.sum()) / images,
        loss=loss / images,
        confusion=confusion,
        rows=rows,
        mistakes=mistakes,
        place=source.place,
    )


def _class_row(k: int, classes: list[str], confusion: Tensor, in_five: Tensor) -> ClassRow:
    images = int(confusion[k].sum())
    wrong = confusion[k].clone()
    wrong[k] = 0
    taken_for = classes[int(wrong.argmax())] if wrong.any() else ""
    top1, top5 = (100 * int(hits) / images if images else 0.0 for hits in (confusion[k, k], in_five[k]))
    return ClassRow(k, classes[k], images, top1, top5, taken_for)
