"""A finished model on a data set: top-1 and top-5, classes, confusions; at any size. `sima eval` calls it.

Shapes: B batch, K classes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sima_attn._files import atomic_write
from sima_attn.data import Source, open_data
from sima_attn.data.loader import Batch, BrokenImages, evaluation_batches
from sima_attn.data.settings import Data
from sima_attn.data.sources import few_of
from sima_attn.models.pretrained import weights_file
from sima_attn.nn.token_ref import trained_at
from sima_attn.report.rows import today
from sima_attn.train.checkpoint import load_checkpoint, newest_readable
from sima_attn.train.classify import build_model, create_model, output_at
from sima_attn.train.recipe_files import check_size, class_names_in, recipe_from_file, without_sources
from sima_attn.train.recipes import Recipe
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

    def write_confusion(self, path: Path) -> None:
        """The confusions as a CSV file: a row for each true class, a column for each class it was taken for."""
        names = [row.name for row in self.rows]
        with atomic_write(path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["true", *names])
            writer.writerows([name, *counts] for name, counts in zip(names, self.confusion.tolist(), strict=True))

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
        RunFolder(path).read_recipe()
        path = file_of_run(path, ema=ema)
    if path.suffix == ".safetensors" and path.is_file():
        if ema:
            raise ValueError(f"{path} holds one set of weights; the average is in the run's checkpoints")
        return _loaded(path, *read_weights(path))
    if path.suffix == ".pt":
        state = load_checkpoint(path)
        if not isinstance(state, dict) or not {"about", "model", "ema"} <= state.keys():
            raise ValueError(_not_ours(path))
        if ema and state["ema"] is None:
            raise ValueError(f"the run of {path} kept no average weights; set run.ema for that")
        return _loaded(path, state["about"], state["ema" if ema else "model"])
    if not timm.is_model(str(what)):
        raise ValueError(
            f"{what} is neither a run's folder, a checkpoint (.pt), weights (.safetensors) nor a model that timm knows"
        )
    if ema:
        raise ValueError("average weights are in checkpoints; a registered model has none")
    kwargs: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    # A model that comes with weights is meant with them.
    trained = weights_file(str(what)).is_file()
    model: Any = timm.create_model(str(what), pretrained=trained, **kwargs)
    cfg = model.pretrained_cfg
    made: dict[str, Any] = {
        "crop_ratio": cfg.get("crop_pct") or 1.0,
        "interpolation": cfg.get("interpolation") or "bicubic",
    }
    data = Data("", size=cfg["input_size"][-1], mean=cfg["mean"], std=cfg["std"], workers=0, **made)
    names = cfg.get("label_names") or ()
    # With another number of classes its head is a new one, which knows nothing of the names.
    return Loaded(model, data, list(names) if trained and len(names) == model.num_classes else None)


def file_of_run(run: Path, *, ema: bool = False) -> Path:
    """The weights of a run, or its newest checkpoint: while it runs, and for the average weights."""
    folder = RunFolder(run)
    if folder.weights.exists() and not ema:
        return folder.weights
    if found := newest_readable(folder.checkpoints):
        return found
    if folder.weights.exists():
        raise FileNotFoundError(
            f"the run in {run} has no checkpoints, which alone hold the average weights; its last weights are "
            "there: leave out --ema (with `sima ship`: --no-ema)"
        )
    raise FileNotFoundError(f"the run in {run} has no checkpoint yet")


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file of weights says of itself, and the weights."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("about", "{}"))
        return about, load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as weights (.safetensors): {error}") from error
    except (json.JSONDecodeError, RecursionError):
        raise ValueError(_not_ours(path)) from None


def _not_ours(path: Path) -> str:
    return f"{path} was not written by a run of `sima train`: it does not say which model it is"


def load_weights(model: nn.Module, weights: dict[str, Tensor], path: Path) -> None:
    """Load them, or say in one line why they do not fit."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} are not those of its recipe: {' '.join(str(error).split())}") from None


def _loaded(path: Path, about: Any, weights: dict[str, Tensor]) -> Loaded:
    if not isinstance(about, dict):
        raise ValueError(_not_ours(path))
    if about.get("task") == "dino":
        raise ValueError("a run of `sima dino` has features and no classes; `sima knn` and `sima linear` measure them")
    if "detector" in about:
        raise ValueError("this is a run of `sima detect train`; `sima detect eval` measures it")
    if not {"recipe", "classes"} <= about.keys():
        raise ValueError(_not_ours(path))
    recipe = without_sources(recipe_from_file(Recipe, about["recipe"], path))
    classes = class_names_in(about, path)
    check_size(partial(create_model, recipe.model, len(classes)), weights, path)
    model: Any = build_model(recipe.model, len(classes))
    load_weights(model, weights, path)
    # What timm would say of the model is how others are trained; this one takes images as the run made them.
    made = {"crop_pct": recipe.data.crop_ratio, "interpolation": recipe.data.interpolation}
    model.pretrained_cfg = {**model.pretrained_cfg, **made}
    return Loaded(model, recipe.data, classes)


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
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1 px, got {size}")
    source = open_data(data if data is not None else loaded.data.path, split)
    settings = replace(loaded.data, size=loaded.data.size if size is None else size)
    if workers is not None:
        settings = replace(settings, workers=workers)
    model = loaded.model.to(device).eval()
    _check_classes(loaded, source, model)
    output_at(model, settings.size, "give another --size")
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
        ours, theirs = loaded.classes, source.classes
        missing, foreign = [c for c in ours if c not in set(theirs)], [c for c in theirs if c not in set(ours)]
        parts = [f"only the model has {few_of(missing)}"] if missing else []
        parts += [f"only the data have {few_of(foreign)}"] if foreign else []
        raise ValueError(
            f"the model was trained on {len(ours)} classes, these data have {len(theirs)}: "
            f"{'; '.join(parts) or 'the same names in another order'}. The numbers would mean nothing; evaluate it on "
            "data with its classes"
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
