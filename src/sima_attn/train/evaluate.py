"""A finished model on a data set: top-1 and top-5, classes, confusions; at any size. `sima eval` calls it.

Shapes: B batch, K classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn.bench.rows import today
from sima_attn.models.pretrained import weights_file
from sima_attn.nn.token_ref import trained_at
from sima_attn.train import recipes
from sima_attn.train.checkpoint import checkpoints, load_checkpoint
from sima_attn.train.classify import build_model
from sima_attn.train.data import Source, open_data
from sima_attn.train.data.loader import Batch, BrokenImages, evaluation_batches
from sima_attn.train.recipes import Data
from sima_attn.train.run import RunFolder


class Loaded(NamedTuple):
    """A model ready to be evaluated: its classes (None where it does not know them) and the data it was made for."""

    model: nn.Module
    data: Data
    classes: list[str] | None


@dataclass(frozen=True)
class ClassRow:
    """One class: its images, how many were right at first and among five, what it was most taken for."""

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
    """What a model does on a data set. `confusion` [K, K] counts images of class i called j."""

    size: int
    token_ref: bool
    images: int
    broken: int
    top1: float
    top5: float
    loss: float
    confusion: Tensor
    rows: list[ClassRow]

    def most_confused(self, count: int = 5) -> list[tuple[str, str, int]]:
        """(class, what it was taken for, images) of the most frequent mistakes."""
        wrong = self.confusion.clone().fill_diagonal_(0)
        values, places = wrong.flatten().topk(min(count, wrong.numel()))
        K = len(self.rows)
        pairs = zip(values.tolist(), places.tolist(), strict=True)
        return [(self.rows[p // K].name, self.rows[p % K].name, n) for n, p in pairs if n]

    def as_row(self, model: str, device: str) -> EvaluationRow:
        """Its numbers, under the names of the model and of what it ran on."""
        top1, top5, loss = round(self.top1, 3), round(self.top5, 3), round(self.loss, 4)
        return EvaluationRow(model, self.size, self.token_ref, top1, top5, loss, self.images, device, today())


def load_trained(what: str | Path, *, ema: bool = False, num_classes: int | None = None) -> Loaded:
    """A model from a run's folder, a checkpoint (.pt), weights (.safetensors), or timm's registry.

    Args:
        what: Path or model name. A folder stands for its weights, or its newest checkpoint while it runs.
        ema: Take the average weights; only checkpoints hold them.
        num_classes: For a registered model.
    """
    path = Path(what)
    if path.is_dir():
        folder = RunFolder(path)
        folder.read_recipe()
        found = checkpoints(folder.checkpoints)
        if not found and not folder.weights.exists():
            raise FileNotFoundError(f"the run in {path} has no checkpoint yet")
        path = folder.weights if folder.weights.exists() and not ema else found[0]
    if path.suffix == ".safetensors" and path.is_file():
        if ema:
            raise ValueError(f"{path} holds one set of weights; the average is in the run's checkpoints")
        from safetensors import safe_open
        from safetensors.torch import load_file

        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
        if not about:
            raise ValueError(f"{path} was not written by a run of `sima train`: it does not say which model it is")
        return _loaded(about, load_file(path))
    if path.suffix == ".pt":
        state = load_checkpoint(path)
        if ema and state["ema"] is None:
            raise ValueError(f"the run of {path} kept no average weights; set run.ema for that")
        return _loaded(state["about"], state["ema" if ema else "model"])
    if not timm.is_model(str(what)):
        raise ValueError(
            f"{what} is neither a run's folder, a checkpoint (.pt), weights (.safetensors) nor a model that timm knows"
        )
    if ema:
        raise ValueError("average weights are in checkpoints; a registered model has none")
    kwargs: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    # A model that comes with weights is meant with them.
    model: Any = timm.create_model(str(what), pretrained=weights_file(str(what)).is_file(), **kwargs)
    cfg = model.pretrained_cfg
    data = Data("", size=cfg["input_size"][-1], mean=cfg["mean"], std=cfg["std"], workers=0)
    return Loaded(model, data, None)


def _loaded(about: dict[str, Any], weights: dict[str, Tensor]) -> Loaded:
    if about.get("task") == "dino":
        raise ValueError("a run of `sima dino` has features and no classes; `sima knn` and `sima linear` measure them")
    if "detector" in about:
        raise ValueError("this is a run of `sima detect train`; `sima detect eval` measures it")
    recipe = recipes.from_dict(recipes.Recipe, about["recipe"])
    model = build_model(recipe.model, len(about["classes"]))
    model.load_state_dict(weights)
    return Loaded(model, recipe.data, about["classes"])


def evaluate(
    loaded: Loaded,
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
    source = open_data(data if data is not None else loaded.data.path, split)
    settings = replace(loaded.data, size=size or loaded.data.size)
    if workers is not None:
        settings = replace(settings, workers=workers)
    model = loaded.model.to(device).eval()
    _check_classes(loaded, source, model)
    broken = BrokenImages(source, say)
    batches = evaluation_batches(source, settings, batch, device=torch.device(device), broken=broken)
    with trained_at(model, loaded.data.size) if token_ref else nullcontext():
        confusion, in_five, loss = _count(model, batches, len(source.classes))
    images = int(confusion.sum())
    if not images:
        raise ValueError(f"none of the {len(source)} images can be read")
    rows = [_class_row(k, source.classes, confusion, in_five) for k in range(len(source.classes))]
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
    )


def _check_classes(loaded: Loaded, source: Source, model: nn.Module) -> None:
    if loaded.classes is not None and loaded.classes != source.classes:
        raise ValueError(
            f"the model was trained on {len(loaded.classes)} classes ({', '.join(loaded.classes[:3])}, ...), these "
            f"data have {len(source.classes)} ({', '.join(source.classes[:3])}, ...): the numbers would mean nothing"
        )
    if getattr(model, "num_classes", len(source.classes)) != len(source.classes):
        raise ValueError(f"the model has {model.num_classes} classes, the data have {len(source.classes)}")


@torch.no_grad()
def _count(model: nn.Module, batches: Iterator[Batch], K: int) -> tuple[Tensor, Tensor, float]:
    """Confusion [K, K], images right among five [K], summed loss."""
    confusion, in_five, loss = torch.zeros(K, K, dtype=torch.long), torch.zeros(K, dtype=torch.long), 0.0
    for images, labels in batches:
        logits = model(images).float()  # [B, K]
        best = logits.topk(min(5, K), dim=1).indices  # [B, 5]
        confusion += torch.bincount(labels * K + best[:, 0], minlength=K * K).view(K, K).cpu()
        in_five += torch.bincount(labels[(best == labels[:, None]).any(1)], minlength=K).cpu()
        loss += float(F.cross_entropy(logits, labels, reduction="sum"))
    return confusion, in_five, loss


def _class_row(k: int, classes: list[str], confusion: Tensor, in_five: Tensor) -> ClassRow:
    images = int(confusion[k].sum())
    wrong = confusion[k].clone()
    wrong[k] = 0
    taken_for = classes[int(wrong.argmax())] if wrong.any() else ""
    top1, top5 = (100 * int(hits) / images if images else 0.0 for hits in (confusion[k, k], in_five[k]))
    return ClassRow(k, classes[k], images, top1, top5, taken_for)
