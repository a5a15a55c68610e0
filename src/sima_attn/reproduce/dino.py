"""The paper's self-supervised comparison in miniature: a grid of runs of `sima dino` on 64-pixel images.

RUNS is the table. The frozen features of each run are evaluated by k-NN and by a linear classifier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from sima_attn._settings import with_overrides
from sima_attn.data.cache import decode
from sima_attn.data.loader import seed_everything
from sima_attn.data.splits import open_data
from sima_attn.dino import recipes as dino_recipes
from sima_attn.dino.recipes import DinoRecipe
from sima_attn.dino.task import build_backbone, train_dino
from sima_attn.probe.features import LayerFeatures, features_of, load_backbone
from sima_attn.probe.knn import features_accuracy
from sima_attn.probe.linear import train_linear
from sima_attn.report.progress import RunProgress
from sima_attn.reproduce.grid import FINISHED, RESULTS, Grid, Job, Run
from sima_attn.train import recipes
from sima_attn.train.classify import train_classifier
from sima_attn.train.recipes import Recipe

VIT = ("model.name=sima_deit_tiny_patch16_224", "model.attention=softmax")
DINO, SUPERVISED, RANDOM = "dino", "supervised", "random"  # how the weights are trained


class Paper(NamedTuple):
    """ImageNet accuracy in percent in the paper's Table 5, 100 epochs."""

    model: str
    knn: float
    linear: float


@dataclass(frozen=True)
class DinoRun(Run):
    """One line of the grid.

    Attributes:
        weights: "dino", "supervised" (the same model and images, with labels) or "random".
        paper: The paper's numbers, if it has any.
    """

    weights: str = DINO
    paper: Paper | None = None
    epochs: int = field(default=100, kw_only=True)

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return self.name if self.weights == RANDOM else f"{self.name}-{self.epochs}epochs"


RUNS = (
    DinoRun("sima", "XCiT-T12/8, SimA", paper=Paper("XCiT-S12/16, SimA", 71.2, 75.5)),
    DinoRun("xca", "XCiT-T12/8, XCA", settings=("model.attention=xca",), paper=Paper("XCiT-S12/16", 71.6, 75.8)),
    DinoRun("vit_softmax", "ViT-T/8, softmax", settings=VIT, paper=Paper("ViT-S/16", 69.3, 74.0)),
    DinoRun(
        "sima_paper", "XCiT-T12/8, SimA, class attention as published", settings=("distill.class_token_ref=false",)
    ),
    DinoRun("sima_token_ref", "XCiT-T12/8, SimA, token_ref", settings=("distill.token_ref=true",)),
    DinoRun("supervised", "XCiT-T12/8, SimA, with labels", weights=SUPERVISED),
    DinoRun("random", "XCiT-T12/8, SimA, random weights", weights=RANDOM, epochs=0),
    DinoRun("random_vit", "ViT-T/8, softmax, random weights", settings=VIT, weights=RANDOM, epochs=0),
)


@dataclass(frozen=True)
class DinoResultRow:
    """The result of a run: accuracies of its frozen features in percent, nan where it diverged or collapsed.

    `linear_lr` is the learning rate of the linear classifier. `seconds` and `images_per_second` are of training alone,
    with `jobs` runs on the same device.
    """

    name: str
    weights: str
    model: str
    attention: str
    settings: str
    seed: int
    epochs: int
    params: int
    knn_top1: float
    knn_top5: float
    linear_top1: float
    linear_top5: float
    k: int
    temperature: float
    linear_epochs: int
    linear_lr: float
    bank: int
    images: int
    status: str
    steps: int
    seconds: float
    images_per_second: float
    jobs: int
    device: str
    torch: str
    date: str

    def summary(self) -> str:
        """The result in a few words."""
        finished = f"k-NN {self.knn_top1:.2f}, linear {self.linear_top1:.2f}"
        return f"{finished if self.status == FINISHED else self.status}, {self.seconds:.0f} s of training"


@dataclass(frozen=True)
class DinoCurveRow:
    """k-NN accuracy of the teacher's features in percent after `epoch` epochs."""

    name: str
    epochs: int
    epoch: float
    knn_top1: float
    knn_top5: float


def planned_dino_runs(only: Sequence[str] = (), *, epochs: int | None = None) -> list[DinoRun]:
    """The runs with these names, by default all."""
    chosen = GRID.select(only)
    return [run if run.weights == RANDOM else replace(run, epochs=epochs or run.epochs) for run in chosen]


def dino_recipe(run: DinoRun, data: str, on_gpu: bool) -> DinoRecipe:
    """The recipe `miniature` with the changes of the run; a tenth of the epochs is warm-up, as for 100."""
    base = dino_recipes.miniature()
    epochs = run.epochs or base.schedule.epochs
    warmup = min(max(1, epochs // 10), epochs - 1)
    recipe = replace(
        base,
        name=run.name,
        data=replace(base.data, path=data),
        schedule=replace(base.schedule, epochs=epochs, warmup_epochs=warmup),
        run=replace(base.run, compile=on_gpu, cuda_graph=on_gpu, checkpoint_minutes=1.0),
    )
    return with_overrides(recipe, run.settings)


def supervised_recipe(recipe: DinoRecipe) -> Recipe:
    """The recipe `tiny_imagenet` with the model, images, epochs and batch size of a DINO run.

    The batch is a quarter of the recipe's, so the learning rate is halved (square root scaling).
    """
    base = recipes.tiny_imagenet()
    optim = replace(base.optim, lr=base.optim.lr / 2)
    schedule = replace(base.schedule, epochs=recipe.schedule.epochs, warmup_epochs=recipe.schedule.warmup_epochs)
    return replace(
        base, name=recipe.name, model=recipe.model, data=recipe.data, optim=optim, schedule=schedule, run=recipe.run
    )


def recipe_of(run: DinoRun, data: str, on_gpu: bool) -> DinoRecipe | Recipe:
    """The recipe with which a run is trained."""
    recipe = dino_recipe(run, data, on_gpu)
    return supervised_recipe(recipe) if run.weights == SUPERVISED else recipe


class FeatureScores(NamedTuple):
    """Accuracies in percent, and the number of images in the bank and of those evaluated."""

    knn_top1: float = math.nan
    knn_top5: float = math.nan
    linear_top1: float = math.nan
    linear_top5: float = math.nan
    bank: int = 0
    images: int = 0


def evaluate_features(backbone: nn.Module, recipe: DinoRecipe, device: str, progress: RunProgress) -> FeatureScores:
    """k-NN accuracy of the output of a backbone, and linear accuracy of its last layers."""
    probe, layers = recipe.probe, LayerFeatures(backbone)
    pairs = []
    for split in ("train", "val"):
        source = open_data(recipe.data.path, split)
        cache = decode(source, split, recipe.data, torch.device(device), progress)
        what = f"features of {split}"
        pairs.append([features_of(model, cache, device, progress.counter(what)) for model in (backbone, layers)])
    (bank, bank_layers), (queries, query_layers) = pairs
    found = features_accuracy(queries, bank, k=[probe.k], temperature=probe.temperature, device=device)[0]
    counter = progress.counter("linear classifier")
    linear = train_linear(bank_layers, query_layers, probe, device=device, on_step=counter)
    return FeatureScores(found.top1, found.top5, linear.top1, linear.top5, found.bank, found.images)


def train(job: Job) -> dict[str, float]:
    """Train the weights of a run, if there is anything to train."""
    if job.run.weights == DINO:
        return train_dino(job.recipe, job.folder.path, **job.train_options).metrics
    if job.run.weights == SUPERVISED:
        return train_classifier(job.recipe, job.folder.path, **job.train_options).metrics
    job.folder.check(job.recipe, resume=job.train_options["resume"])
    job.folder.write_recipe(job.recipe)
    return {}


def rows(job: Job, status: str, metrics: dict[str, float]) -> dict[str, list[Any]]:
    """The result of a run, and the k-NN accuracy during its training."""
    run = job.run
    recipe = dino_recipe(run, job.recipe.data.path, job.device == "cuda")  # that of a supervised run has no probe
    seed_everything(recipe.run.seed)
    scores = FeatureScores()
    if status == FINISHED:
        backbone = build_backbone(recipe).eval() if run.weights == RANDOM else load_backbone(job.folder.path).model
        with RunProgress(shown=not job.quiet) as progress:
            scores = evaluate_features(backbone, recipe, job.device, progress)
    else:
        backbone = build_backbone(recipe)
    result = DinoResultRow(
        **job.columns(status),
        weights=run.weights,
        settings=" ".join(run.settings),
        params=sum(p.numel() for p in backbone.parameters()),
        **scores._asdict(),
        k=recipe.probe.k,
        temperature=recipe.probe.temperature,
        linear_epochs=recipe.probe.epochs,
        linear_lr=recipe.probe.lr,
        jobs=job.jobs,
    )
    curve = [
        DinoCurveRow(run.name, run.epochs, float(r["epoch"]), float(r["knn_top1"]), float(r["knn_top5"]))
        for r in job.log("eval.csv")
        if run.weights == DINO
    ]
    return {RESULTS: [result], "curves.csv": curve}


GRID = Grid(
    runs=RUNS,
    row_files={RESULTS: DinoResultRow, "curves.csv": DinoCurveRow},
    recipe=recipe_of,
    train=train,
    rows=rows,
    sort_by=("name", "epochs"),
)
