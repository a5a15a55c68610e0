"""The paper in miniature: its ablations as a grid of runs on 64-pixel images, one row a run.

GRID is the one table; a new comparison is one line of it. Every run is an ordinary run of `sima train` in a folder
of its own: finished ones are passed over, interrupted ones go on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from sima_attn._errors import unknown_name
from sima_attn._settings import with_overrides
from sima_attn.report.rows import processor_name, read_rows, today, write_rows
from sima_attn.reproduce.grid import collect_rows, in_processes, read_collected_rows, training_speed
from sima_attn.train import recipes
from sima_attn.train.logs import read_log
from sima_attn.train.recipes import Recipe

VIT, XCIT = "sima_vit_mini_patch4_64", "sima_xcit_mini_p4_64"
TOKENS = 256  # of both at 64 px
EPOCHS = 60
OTHER_SIZES = (48, 64, 96, 128)
DEIT_S, XCIT_S12 = "DeiT-S", "XCiT-S12/16"
PAPER_TWINS = {DEIT_S: 79.8, XCIT_S12: 82.0}  # with softmax and with XCA, ImageNet, Table 1
DID_NOT_CONVERGE = math.nan
LR = 1e-3  # of all runs but those that double it: what softmax takes best, half of the recipe's
FASTER = ("optim.lr=2e-3",)
QK_BIAS = 0.3  # the standard deviation of q and k at the start


@dataclass(frozen=True)
class MiniatureRun:
    """One line of the grid.

    Attributes:
        about: What is compared, in words.
        options: Arguments of the model.
        settings: Changes of the recipe, as `--set` takes them.
        twin: The run that it is compared with.
        paper, paper_model: The paper's ImageNet top-1 for it, and the model it is of; None where there is none, nan
            where it did not converge.
        headline: Run with every seed, and evaluated at other sizes.
    """

    name: str
    about: str
    attention: str = "sima"
    model: str = VIT
    options: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    twin: str = "softmax"
    paper: float | None = None
    paper_model: str = DEIT_S
    headline: bool = False
    seed: int = 0
    epochs: int = EPOCHS

    @property
    def folder(self) -> str:
        """Its folder among the others."""
        return f"{self.name}-{self.epochs}epochs-seed{self.seed}"

    @property
    def heads(self) -> int:
        """Heads of its attention."""
        return self.options.get("num_heads", 3 if self.model == VIT else 4)


# token_ref r multiplies SimA's output by N / r: at these N = 256 tokens it is the plain way to set a scale.
GRID = (
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
        "SimA without normalisation",
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
    MiniatureRun("sima_lr", "SimA, learning rate doubled", settings=FASTER, twin="softmax_lr"),
    MiniatureRun("softmax_lr", "softmax, learning rate doubled", "softmax", settings=FASTER),
    MiniatureRun(
        "sima_relu_lr",
        "SimA, ReLU for GELU, learning rate doubled",
        options={"relu": True},
        settings=FASTER,
        twin="softmax_relu_lr",
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
        "sima_local", "SimA, local mixer in its own branch", options={"local_mixer": True}, twin="softmax_local"
    ),
    MiniatureRun("softmax_local", "softmax, the same local mixer", "softmax", options={"local_mixer": True}),
)


@dataclass(frozen=True)
class ResultRow:
    """What a run came to. Numbers that a diverged run does not have are nan."""

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


@dataclass(frozen=True)
class SizeRow:
    """A finished run at one image size."""

    name: str
    seed: int
    epochs: int
    px: int
    token_ref: bool
    top1: float
    top5: float


@dataclass(frozen=True)
class CurveRow:
    """A run after so many epochs."""

    name: str
    seed: int
    epochs: int
    epoch: float
    top1: float
    loss: float


ROW_FILES: dict[str, type] = {"results.csv": ResultRow, "sizes.csv": SizeRow, "curves.csv": CurveRow}


def planned_runs(
    only: Sequence[str] = (), *, epochs: int | None = None, seeds: Sequence[int] = (0, 1)
) -> list[MiniatureRun]:
    """The runs to make: those named (by default all), headline runs with every seed, the others with the first."""
    known = {run.name: run for run in GRID}
    for name in only:
        if name not in known:
            raise unknown_name("run", name, known)
    if not seeds:
        raise ValueError("at least one seed is needed")
    chosen = [known[name] for name in dict.fromkeys(only)] or list(GRID)
    return [
        replace(run, seed=seed, epochs=epochs or run.epochs)
        for run in chosen
        for seed in (dict.fromkeys(seeds) if run.headline else seeds[:1])
    ]


def miniature_recipe(run: MiniatureRun, data: str, *, on_gpu: bool) -> Recipe:
    """The recipe `tiny_imagenet` at the grid's learning rate, with what the run changes in it."""
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
        run=replace(base.run, seed=run.seed, compile=on_gpu, checkpoint_minutes=1.0),
    )
    return with_overrides(recipe, run.settings)


def make_run(run: MiniatureRun, out: Path, data: str, *, device: str = "cuda", quiet: bool = False) -> ResultRow:
    """Train a run to its end, or go on with it, and leave its rows in its folder; a finished one is only read."""
    import torch

    from sima_attn.train.checkpoint import checkpoints
    from sima_attn.train.classify import train_classifier
    from sima_attn.train.engine import NonFiniteError
    from sima_attn.train.run import RunFolder

    folder = RunFolder(out / run.folder)
    done = folder.path / "results.csv"
    recipe = miniature_recipe(run, data, on_gpu=device == "cuda")
    if done.exists():
        folder.check_finished(recipe)  # of these images, not of others that were in this place before
        return read_rows(done, ResultRow)[0]
    metrics: dict[str, float] = {}
    status = "finished"
    try:
        metrics = train_classifier(
            recipe, folder.path, resume=folder.recipe_file.exists(), device=device, quiet=quiet
        ).metrics
    except NonFiniteError as error:
        status = f"diverged at step {error.step}"
    log = read_log(folder.path / "train.csv") if (folder.path / "train.csv").exists() else []
    steps, seconds, rate = training_speed(log, recipe.run.batch)
    row = ResultRow(
        name=run.name,
        model=run.model,
        attention=run.attention,
        options=" ".join([*(f"{key}={value}" for key, value in run.options.items()), *run.settings]),
        heads=run.heads,
        seed=run.seed,
        epochs=run.epochs,
        params=_parameters(recipe),
        top1=metrics.get("top1", math.nan),
        top5=metrics.get("top5", math.nan),
        ema_top1=metrics.get("ema_top1", math.nan),
        status=status,
        steps=steps,
        seconds=seconds,
        images_per_second=rate,
        device=processor_name(device),
        torch=torch.__version__,
        date=today(),
    )
    if run.headline and status == "finished":
        write_rows(folder.path / "sizes.csv", _at_other_sizes(run, folder.path, device))
    evaluated = read_log(folder.path / "eval.csv") if (folder.path / "eval.csv").exists() else []
    if evaluated:
        write_rows(
            folder.path / "curves.csv",
            [
                CurveRow(run.name, run.seed, run.epochs, float(r["epoch"]), float(r["top1"]), float(r["loss"]))
                for r in evaluated
            ],
        )
    write_rows(done, [row])  # the last file: with it the run is done
    for path in checkpoints(folder.checkpoints):
        path.unlink()  # the grid's would fill gigabytes; the weights are kept
    return row


def _parameters(recipe: Recipe) -> int:
    import torch

    from sima_attn.data import open_data
    from sima_attn.models.building import build_model

    with torch.device("meta"):
        model = build_model(recipe.model, len(open_data(recipe.data.path, "val").classes))
    return sum(parameter.numel() for parameter in model.parameters())


def _at_other_sizes(run: MiniatureRun, folder: Path, device: str) -> list[SizeRow]:
    from sima_attn.models.loading import load_model
    from sima_attn.train.evaluate import evaluate

    loaded = load_model(folder)
    workers = min(8, os.cpu_count() or 1) if device == "cuda" else 0
    rows = []
    for px in OTHER_SIZES:
        differs = run.attention == "sima" and px != loaded.preprocessing.size
        for token_ref in (False, True) if differs else (False,):
            result = evaluate(loaded, size=px, token_ref=token_ref, device=device, workers=workers)
            rows.append(SizeRow(run.name, run.seed, run.epochs, px, token_ref, result.top1, result.top5))
    return rows


def make_runs(
    runs: Sequence[MiniatureRun],
    out: Path,
    data: str,
    *,
    device: str = "cuda",
    jobs: int = 1,
    on_start: Callable[[MiniatureRun], None] = lambda run: None,
) -> Iterator[tuple[MiniatureRun, ResultRow]]:
    """Make the runs, `jobs` at a time on the one device, each yielded when it is done and its rows are collected."""
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if jobs == 1:
        for run in runs:
            on_start(run)
            row = make_run(run, out, data, device=device)
            collect(out)
            yield run, row
        return
    for run, row in in_processes(partial(make_run, out=out, data=data, device=device, quiet=True), runs, jobs):
        collect(out)
        yield run, row


def collect(out: Path) -> None:
    """Gather the rows of all done runs under `out` into its CSV files, in the order of the grid."""
    order = {run.name: i for i, run in enumerate(GRID)}  # a run that the grid has no longer comes last
    collect_rows(out, ROW_FILES, lambda row: (row.epochs, order.get(row.name, len(order)), row.name, row.seed))


def read_collected(out: Path) -> tuple[list[ResultRow], list[SizeRow], list[CurveRow]]:
    """The rows that `collect` gathered."""
    results, sizes, curves = read_collected_rows(out, ROW_FILES)
    return results, sizes, curves
