"""The paper's self-supervised comparison in miniature: DINO on 64-pixel images, one row a run.

GRID is the one table. Every run is an ordinary run of `sima dino` (or `sima train`) in a folder of its own, judged by
k-NN and a linear classifier on its frozen features: finished ones are passed over, interrupted ones go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sima_attn._errors import unknown_name
from sima_attn._settings import check, with_overrides
from sima_attn.data.settings import Data
from sima_attn.dino import recipes as dino_recipes
from sima_attn.dino.recipes import DinoRecipe
from sima_attn.probe.settings import Probe
from sima_attn.report.rows import processor_name, read_rows, today, write_rows
from sima_attn.reproduce.grid import collect_rows, in_processes, read_collected_rows, training_speed
from sima_attn.train import recipes
from sima_attn.train.logs import read_log
from sima_attn.train.recipes import Recipe

if TYPE_CHECKING:
    from torch import nn

    from sima_attn.data.cache import Decoded

VIT = ("model.name=sima_deit_tiny_patch16_224", "model.attention=softmax")
DINO, SUPERVISED, RANDOM = "dino", "supervised", "random"  # how the weights come about


class Paper(NamedTuple):
    """ImageNet accuracy in percent in the paper's Table 5, 100 epochs."""

    model: str
    knn: float
    linear: float


@dataclass(frozen=True)
class DinoRun:
    """One line of the grid.

    Attributes:
        about: What it is, in words.
        settings: Changes of the recipe `miniature`, as `--set` takes them.
        weights: "dino", "supervised" (the same model and images, with labels) or "random".
        paper: The paper's numbers for it, where it has some.
    """

    name: str
    about: str
    settings: tuple[str, ...] = ()
    weights: str = DINO
    paper: Paper | None = None
    epochs: int = 100

    @property
    def folder(self) -> str:
        """Its folder among the others."""
        return self.name if self.weights == RANDOM else f"{self.name}-{self.epochs}epochs"


GRID = (
    DinoRun("sima", "XCiT-T12/8, SimA", paper=Paper("XCiT-S12/16, SimA", 71.2, 75.5)),
    DinoRun("xca", "XCiT-T12/8, XCA", ("model.attention=xca",), paper=Paper("XCiT-S12/16", 71.6, 75.8)),
    DinoRun("vit_softmax", "ViT-T/8, softmax", VIT, paper=Paper("ViT-S/16", 69.3, 74.0)),
    DinoRun("sima_paper", "XCiT-T12/8, SimA, class attention as published", ("distill.class_token_ref=false",)),
    DinoRun("sima_token_ref", "XCiT-T12/8, SimA, token_ref", ("distill.token_ref=true",)),
    DinoRun("supervised", "XCiT-T12/8, SimA, with labels", weights=SUPERVISED),
    DinoRun("random", "XCiT-T12/8, SimA, random weights", weights=RANDOM, epochs=0),
    DinoRun("random_vit", "ViT-T/8, softmax, random weights", VIT, weights=RANDOM, epochs=0),
)


@dataclass(frozen=True)
class DinoResultRow:
    """What a run came to: accuracies of its frozen features in percent, nan where it diverged or collapsed.

    `linear_lr` is the learning rate of the linear classifier; `jobs` is how many runs shared the device, which tells
    what `seconds` and `images_per_second`, of training alone, are worth.
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


@dataclass(frozen=True)
class DinoCurveRow:
    """k-NN accuracy of the teacher's features in percent after so many epochs."""

    name: str
    epochs: int
    epoch: float
    knn_top1: float
    knn_top5: float


ROW_FILES: dict[str, type] = {"results.csv": DinoResultRow, "curves.csv": DinoCurveRow}


def planned_dino_runs(only: Sequence[str] = (), *, epochs: int | None = None) -> list[DinoRun]:
    """The runs to make: those named, by default all."""
    known = {run.name: run for run in GRID}
    for name in only:
        if name not in known:
            raise unknown_name("run", name, known)
    chosen = [known[name] for name in dict.fromkeys(only)] or list(GRID)
    return [run if run.weights == RANDOM else replace(run, epochs=epochs or run.epochs) for run in chosen]


def dino_recipe(run: DinoRun, data: str, *, on_gpu: bool) -> DinoRecipe:
    """The recipe `miniature` with what the run changes in it; a tenth of the epochs warms up, as in 100."""
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
    """The recipe `tiny_imagenet` with the model, the images, the epochs and the batch of a run of DINO.

    The batch is a fourth of the recipe's: its learning rate goes down by the root of that.
    """
    base = recipes.tiny_imagenet()
    optim = replace(base.optim, lr=base.optim.lr / 2)
    schedule = replace(base.schedule, epochs=recipe.schedule.epochs, warmup_epochs=recipe.schedule.warmup_epochs)
    return replace(
        base, name=recipe.name, model=recipe.model, data=recipe.data, optim=optim, schedule=schedule, run=recipe.run
    )


class Judged(NamedTuple):
    """Accuracies in percent, and how many images voted and were judged."""

    knn_top1: float = math.nan
    knn_top5: float = math.nan
    linear_top1: float = math.nan
    linear_top5: float = math.nan
    bank: int = 0
    images: int = 0


def judge(backbone: nn.Module, decoded: Decoded, data: Data, probe: Probe, device: str, on_step: Any) -> Judged:
    """k-NN and linear accuracy of the frozen features of decoded images: both from one pass over them."""
    from sima_attn.probe.features import OutputAndLayers, features_of
    from sima_attn.probe.knn import knn_accuracy
    from sima_attn.probe.linear import train_linear

    reader = OutputAndLayers(backbone)
    train, val = (
        features_of(reader, decoded[split], data, device=device, on_step=on_step(f"features of {split}"))
        for split in ("train", "val")
    )
    (outputs, bank), (queries, judged) = (reader.split(features) for features in (train, val))
    found = knn_accuracy(
        queries.values,
        queries.labels,
        outputs.values,
        outputs.labels,
        classes=len(train.classes),
        k=[probe.k],
        temperature=probe.temperature,
        device=device,
    )[0]
    linear = train_linear(bank, judged, probe, device=device, on_step=on_step("linear classifier"))
    return Judged(found.top1, found.top5, linear.top1, linear.top5, found.bank, found.images)


def make_dino_run(
    run: DinoRun,
    out: Path,
    data: str,
    *,
    device: str = "cuda",
    quiet: bool = False,
    jobs: int = 1,
    decoded: Decoded | None = None,
) -> DinoResultRow:
    """Train a run to its end, or go on with it, judge it, and leave its rows in its folder; a finished one is read.

    Args:
        jobs: How many runs share the device, for the row.
        decoded: The images, where another run of this process left them.
    """
    import torch

    from sima_attn.data import open_data
    from sima_attn.data.cache import decode_once
    from sima_attn.data.loader import seed_everything
    from sima_attn.dino.task import CollapseError, build_backbone
    from sima_attn.probe.features import load_backbone
    from sima_attn.report.progress import RunProgress
    from sima_attn.train.checkpoint import checkpoints
    from sima_attn.train.engine import NonFiniteError
    from sima_attn.train.run import RunFolder

    folder = RunFolder(out / run.folder)
    done = folder.path / "results.csv"
    recipe = dino_recipe(run, data, on_gpu=device == "cuda")
    if done.exists():  # of these images, not of others that were in this place before
        folder.check_finished(supervised_recipe(recipe) if run.weights == SUPERVISED else recipe)
        return read_rows(done, DinoResultRow)[0]
    check(recipe)
    decoded = {} if decoded is None else decoded
    status = "finished"
    try:
        _train(run, recipe, folder, device=device, quiet=quiet, decoded=decoded)
    except NonFiniteError as error:
        status = f"diverged at step {error.step}"
    except CollapseError as error:
        status = f"collapsed at step {error.step}"
    seed_everything(recipe.run.seed)
    backbone = build_backbone(recipe).eval() if run.weights == RANDOM else None
    judged = Judged()
    if status == "finished":
        backbone = backbone or load_backbone(folder.path).model
        with RunProgress(shown=not quiet) as progress:
            for split in ("train", "val"):
                decode_once(decoded, split, open_data(data, split), recipe.data, torch.device(device), progress)
            judged = judge(backbone, decoded, recipe.data, recipe.probe, device, progress.counter)
    train_log, eval_log = (folder.path / name for name in ("train.csv", "eval.csv"))
    steps, seconds, rate = training_speed(read_log(train_log) if train_log.exists() else [], recipe.run.batch)
    row = DinoResultRow(
        name=run.name,
        weights=run.weights,
        model=recipe.model.name,
        attention=str(recipe.model.attention),
        settings=" ".join(run.settings),
        seed=recipe.run.seed,
        epochs=run.epochs,
        params=sum(p.numel() for p in (backbone or build_backbone(recipe)).parameters()),
        **judged._asdict(),
        k=recipe.probe.k,
        temperature=recipe.probe.temperature,
        linear_epochs=recipe.probe.epochs,
        linear_lr=recipe.probe.lr,
        status=status,
        steps=steps,
        seconds=seconds,
        images_per_second=rate,
        jobs=jobs,
        device=processor_name(device),
        torch=torch.__version__,
        date=today(),
    )
    if run.weights == DINO and eval_log.exists():
        curve = [
            DinoCurveRow(run.name, run.epochs, float(r["epoch"]), float(r["knn_top1"]), float(r["knn_top5"]))
            for r in read_log(eval_log)
        ]
        write_rows(folder.path / "curves.csv", curve)
    write_rows(done, [row])  # the last file: with it the run is done
    for path in checkpoints(folder.checkpoints):
        path.unlink()  # teacher, student and optimiser of every run; the weights are kept
    return row


def _train(run: DinoRun, recipe: DinoRecipe, folder: Any, *, device: str, quiet: bool, decoded: dict[str, Any]) -> None:
    """Weights in the run's folder, if there is anything to train."""
    from sima_attn.dino.task import train_dino
    from sima_attn.train.classify import train_classifier

    options: dict[str, Any] = {"resume": folder.recipe_file.exists(), "device": device, "quiet": quiet}
    if run.weights == DINO:
        train_dino(recipe, folder.path, decoded=decoded, **options)
    elif run.weights == SUPERVISED:
        train_classifier(supervised_recipe(recipe), folder.path, **options)
    else:
        folder.check(recipe, resume=options["resume"])
        folder.write_recipe(recipe)


def make_dino_runs(
    runs: Sequence[DinoRun],
    out: Path,
    data: str,
    *,
    device: str = "cuda",
    jobs: int = 1,
    on_start: Callable[[DinoRun], None] = lambda run: None,
) -> Iterator[tuple[DinoRun, DinoResultRow]]:
    """Make the runs, `jobs` at a time on the one device, each yielded when it is done and its rows are collected."""
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if jobs > 1:
        make = partial(make_dino_run, out=out, data=data, device=device, quiet=True, jobs=jobs)
        for run, row in in_processes(make, runs, jobs):
            collect_dino(out)
            yield run, row
        return
    decoded: Decoded = {}
    for run in runs:
        on_start(run)
        row = make_dino_run(run, out, data, device=device, decoded=decoded)
        collect_dino(out)
        yield run, row


def collect_dino(out: Path) -> None:
    """Gather the rows of all done runs under `out` into its CSV files, in the order of the grid."""
    order = {run.name: i for i, run in enumerate(GRID)}  # a run that the grid has no longer comes last
    collect_rows(out, ROW_FILES, lambda row: (order.get(row.name, len(order)), row.name, row.epochs))


def read_collected_dino(out: Path) -> tuple[list[DinoResultRow], list[DinoCurveRow]]:
    """The rows that `collect_dino` gathered."""
    results, curves = read_collected_rows(out, ROW_FILES)
    return results, curves
