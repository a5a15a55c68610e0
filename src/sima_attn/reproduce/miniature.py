"""The paper in miniature: its ablations as a grid of runs of `sima train` on 64-pixel images.

RUNS is the table; a new comparison is one line of it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from sima_attn._settings import with_overrides
from sima_attn.data.splits import open_data
from sima_attn.models.building import build_model
from sima_attn.models.loading import load_model
from sima_attn.reproduce.grid import FINISHED, RESULTS, Grid, Job, Run
from sima_attn.train import recipes
from sima_attn.train.classify import train_classifier
from sima_attn.train.evaluate import evaluate
from sima_attn.train.recipes import Recipe

VIT, XCIT = "sima_vit_mini_patch4_64", "sima_xcit_mini_p4_64"
TOKENS = 256  # of both at 64 px
OTHER_SIZES = (48, 64, 96, 128)
DEIT_S, XCIT_S12 = "DeiT-S", "XCiT-S12/16"
PAPER_TWINS = {DEIT_S: 79.8, XCIT_S12: 82.0}  # with softmax and with XCA, ImageNet, Table 1
DID_NOT_CONVERGE = math.nan
LR = 1e-3  # of all runs but those that double it: best for softmax, half of the recipe's
FASTER = ("optim.lr=2e-3",)
QK_BIAS = 0.3  # the standard deviation of q and k at initialization


@dataclass(frozen=True)
class MiniatureRun(Run):
    """One line of the grid.

    Attributes:
        options: Arguments of the model.
        twin: Name of the run that it is compared with. Softmax prefers LR and SimA its double, so SimA at the doubled
            rate is compared with softmax at LR.
        paper, paper_model: The paper's ImageNet top-1, and the model it is of; None where there is none, nan where
            training did not converge.
        headline: Whether to run it with all seeds, and to evaluate it at other image sizes.
    """

    attention: str = "sima"
    model: str = VIT
    options: dict[str, Any] = field(default_factory=dict)
    twin: str = "softmax"
    paper: float | None = None
    paper_model: str = DEIT_S
    headline: bool = False
    seed: int = 0
    epochs: int = field(default=60, kw_only=True)

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return f"{self.name}-{self.epochs}epochs-seed{self.seed}"

    @property
    def heads(self) -> int:
        """Heads of its attention."""
        return self.options.get("num_heads", 3 if self.model == VIT else 4)


# token_ref r multiplies SimA's output by N / r: at these N = 256 tokens it sets a scale.
RUNS = (
    MiniatureRun("softmax", "softmax, 3 heads", "softmax", paper=79.8, headline=True),
    MiniatureRun("sima", "SimA, 3 heads", paper=79.8, headline=True),
    MiniatureRun("softmax_1head", "softmax, 1 head", "softmax", options={"num_heads": 1}, paper=77.0),
    MiniatureRun("sima_1head", "SimA, 1 head", options={"num_heads": 1}, paper=79.4),
    MiniatureRun("sima_relu", "SimA, ReLU for GELU", options={"relu": True}, twin="softmax_relu", paper=79.6),
    MiniatureRun("softmax_relu", "softmax, ReLU for GELU", "softmax", options={"relu": True}),
    MiniatureRun(
        "sima_l2", "SimA, l2 for l1", options={"attention_options": {"norm": "l2"}}, paper=79.2, paper_model=XCIT_S12
    ),
    MiniatureRun(
        "sima_l2_scaled",
        "SimA, l2, output / N: the scale of l1",
        options={"attention_options": {"norm": "l2"}, "token_ref": TOKENS**2},
    ),
    MiniatureRun(
        "sima_no_norm",
        "SimA without normalization",
        options={"attention_options": {"norm": "none"}},
        paper=DID_NOT_CONVERGE,
        paper_model=XCIT_S12,
    ),
    MiniatureRun("elu", "ELU linear attention", "elu"),
    MiniatureRun("efficient", "efficient attention", "efficient", paper=80.9, paper_model=XCIT_S12),
    MiniatureRun("cosformer", "cosFormer, no re-weighting", "cosformer", paper=76.1, paper_model=XCIT_S12),
    MiniatureRun("xcit_xca", "XCiT", "xca", XCIT, twin="xcit_xca", paper=82.0, paper_model=XCIT_S12),
    MiniatureRun("xcit_sima", "XCiT, SimA", "sima", XCIT, twin="xcit_xca", paper=82.1, paper_model=XCIT_S12),
    MiniatureRun("xcit_xca_nolpi", "XCiT without LPI", "xca", XCIT, {"lpi": False}, twin="xcit_xca"),
    MiniatureRun(
        "xcit_sima_nolpi",
        "XCiT, SimA, without LPI",
        "sima",
        XCIT,
        {"lpi": False},
        twin="xcit_xca",
        paper=80.9,
        paper_model=XCIT_S12,
    ),
    MiniatureRun("xcit_sima_relu", "XCiT, SimA, ReLU for GELU", "sima", XCIT, {"relu": True}, twin="xcit_xca"),
    # What may close SimA's gap to softmax in a plain ViT, one thing at a time.
    MiniatureRun("sima_layerscale", "SimA, LayerScale from 1.0", options={"init_values": 1.0}),
    MiniatureRun("sima_layerscale_small", "SimA, LayerScale from 0.1", options={"init_values": 0.1}),
    MiniatureRun("sima_qk_fast", "SimA, q and k learn 4 times as fast", options={"qk_init": 0.25}),
    MiniatureRun("sima_qk_slow", "SimA, q and k learn 4 times as slowly", options={"qk_init": 4.0}),
    MiniatureRun("sima_gain", "SimA, output x sqrt(N)", options={"token_ref": TOKENS**0.5}),
    MiniatureRun("sima_output_norm", "SimA, LayerNorm of the output", options={"scale_attn_norm": True}),
    MiniatureRun("sima_bias", "SimA, q and k start from a bias", options={"qk_bias": QK_BIAS}),
    MiniatureRun(
        "sima_bias_gain",
        "SimA, q and k start from a bias, output x sqrt(N)",
        options={"qk_bias": QK_BIAS, "token_ref": TOKENS**0.5},
    ),
    MiniatureRun("sima_jax_init", "SimA, larger initial weights (jax)", options={"weight_init": "jax"}),
    MiniatureRun("sima_lr", "SimA, learning rate doubled", settings=FASTER),
    MiniatureRun("softmax_lr", "softmax, learning rate doubled", "softmax", settings=FASTER),
    MiniatureRun(
        "sima_relu_lr",
        "SimA, ReLU for GELU, learning rate doubled",
        options={"relu": True},
        settings=FASTER,
        twin="softmax_relu",
    ),
    MiniatureRun(
        "softmax_relu_lr",
        "softmax, ReLU for GELU, learning rate doubled",
        "softmax",
        options={"relu": True},
        settings=FASTER,
    ),
    MiniatureRun(
        "xcit_sima_lr", "XCiT, SimA, learning rate doubled", "sima", XCIT, settings=FASTER, twin="xcit_xca_lr"
    ),
    MiniatureRun("xcit_xca_lr", "XCiT, learning rate doubled", "xca", XCIT, settings=FASTER, twin="xcit_xca"),
    MiniatureRun("sima_class_token", "SimA, class token", options={"class_token": True, "global_pool": "token"}),
    MiniatureRun(
        "sima_mixer", "SimA, local mixer in its own branch", options={"local_mixer": True}, twin="softmax_mixer"
    ),
    MiniatureRun("softmax_mixer", "softmax, the same local mixer", "softmax", options={"local_mixer": True}),
)


@dataclass(frozen=True)
class ResultRow:
    """The result of a run. Numbers that a diverged run does not have are nan."""

    name: str
    model: str
    attention: str
    options: str
    heads: int
    seed: int
    epochs: int
    params: int
    top1: float
    top5: float
    ema_top1: float
    status: str
    steps: int
    seconds: float
    images_per_second: float
    device: str
    torch: str
    date: str

    def summary(self) -> str:
        """The result in a few words."""
        result = f"top-1 {self.top1:.2f}" if self.status == FINISHED else self.status
        return f"{result}, {self.seconds:.0f} s"


@dataclass(frozen=True)
class SizeRow:
    """A finished run, evaluated at one image size."""

    name: str
    seed: int
    epochs: int
    px: int
    token_ref: bool
    top1: float
    top5: float


@dataclass(frozen=True)
class CurveRow:
    """A run after `epoch` epochs."""

    name: str
    seed: int
    epochs: int
    epoch: float
    top1: float
    loss: float


def planned_runs(
    only: Sequence[str] = (), *, epochs: int | None = None, seeds: Sequence[int] = (0, 1)
) -> list[MiniatureRun]:
    """The runs with these names (by default all): headline runs with all seeds, the others with the first."""
    return [
        replace(run, seed=seed, epochs=epochs or run.epochs)
        for run in GRID.select(only)
        for seed in (dict.fromkeys(seeds) if run.headline else seeds[:1])
    ]


def miniature_recipe(run: MiniatureRun, data: str, on_gpu: bool) -> Recipe:
    """The recipe `tiny_imagenet` at the grid's learning rate, with the changes of the run."""
    base = recipes.tiny_imagenet()
    recipe = replace(
        base,
        name=run.name,
        model=replace(base.model, name=run.model, attention=run.attention, kwargs=run.options),
        data=replace(base.data, path=data),
        optim=replace(base.optim, lr=LR),
        schedule=replace(
            base.schedule, epochs=run.epochs, warmup_epochs=min(base.schedule.warmup_epochs, max(1, run.epochs // 5))
        ),
        run=replace(
            base.run,
            seed=run.seed,
            compile=on_gpu,
            cuda_graph=on_gpu,
            eval_epochs=max(1, run.epochs // 12),
            checkpoint_minutes=1.0,
        ),
    )
    return with_overrides(recipe, run.settings)


def train(job: Job) -> dict[str, float]:
    """Train a run."""
    return train_classifier(job.recipe, job.folder.path, **job.train_options).metrics


def rows(job: Job, status: str, metrics: dict[str, float]) -> dict[str, list[Any]]:
    """The result of a run, its learning curve, and a headline run at other image sizes."""
    run = job.run
    scores: dict[str, Any] = {name: metrics.get(name, math.nan) for name in ("top1", "top5", "ema_top1")}
    result = ResultRow(
        **job.columns(status),
        options=" ".join([*(f"{key}={value}" for key, value in run.options.items()), *run.settings]),
        heads=run.heads,
        params=_parameters(job.recipe),
        **scores,
    )
    curve = [
        CurveRow(run.name, run.seed, run.epochs, float(r["epoch"]), float(r["top1"]), float(r["loss"]))
        for r in job.log("eval.csv")
    ]
    sizes = evaluate_sizes(run, job.folder.path, job.device) if run.headline and status == FINISHED else []
    return {RESULTS: [result], "sizes.csv": sizes, "curves.csv": curve}


def _parameters(recipe: Recipe) -> int:
    with torch.device("meta"):
        model = build_model(recipe.model, len(open_data(recipe.data.path, "val").classes))
    return sum(parameter.numel() for parameter in model.parameters())


def evaluate_sizes(run: MiniatureRun, folder: Path, device: str) -> list[SizeRow]:
    """A finished run at OTHER_SIZES; SimA also with token_ref, where the size is not the training size."""
    loaded = load_model(folder)
    workers = min(8, os.cpu_count() or 1) if device == "cuda" else 0
    found = []
    for px in OTHER_SIZES:
        differs = run.attention == "sima" and px != loaded.preprocessing.size
        for token_ref in (False, True) if differs else (False,):
            result = evaluate(loaded, size=px, token_ref=token_ref, device=device, workers=workers)
            found.append(SizeRow(run.name, run.seed, run.epochs, px, token_ref, result.top1, result.top5))
    return found


GRID = Grid(
    runs=RUNS,
    row_files={RESULTS: ResultRow, "sizes.csv": SizeRow, "curves.csv": CurveRow},
    recipe=miniature_recipe,
    train=train,
    rows=rows,
    sort_by=("epochs", "name", "seed"),
)
