"""`sima dino`, `sima knn` and `sima linear`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer import Option

from sima_attn._devices import resolve_device
from sima_attn._errors import check_known
from sima_attn._settings import PositiveFloat, check_value
from sima_attn.cli import _options as option
from sima_attn.cli._next import after_knn, after_linear, say_next
from sima_attn.cli._shared import console, print_table, progress_bar, step_callback, teller
from sima_attn.cli.train import CompileOption, CudaGraphOption, check_installed, check_resumable, resolved, say_finished
from sima_attn.report.figures import check_can_plot
from sima_attn.report.rows import write_rows
from sima_attn.report.tables import TextTable

if TYPE_CHECKING:
    from torch import nn

    from sima_attn.data.sources import Source
    from sima_attn.probe.features import Backbone, Features

app = typer.Typer()

DEFAULT_RUN = "runs/dino-digits"
SizeOption = Annotated[int | None, Option(help="Image side in pixels. Default: the training size.", min=1)]
BranchOption = Annotated[str, Option(help="teacher, or the student of a DINO checkpoint.")]
CacheOption = Annotated[
    Path | None, Option(help="Folder for the stored features.", show_default="RUN/features, or runs/features")
]
DtypeOption = Annotated[str, Option(help="dtype of the stored features: float16 or float32.")]


@app.command("dino")
def dino_command(
    recipe: option.RecipeName = None,
    data: option.Data = None,
    out: Annotated[Path | None, option.folder("Folder of the run.", show_default="runs/dino-RECIPE")] = None,
    overrides: option.Settings = None,
    resume: option.Resume = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
    compile_: CompileOption = False,
    cuda_graph: CudaGraphOption = False,
    strategy: option.Strategy = None,
) -> None:
    """Learn features without labels (DINO). Runs on all processes of torchrun; after an interruption, add --resume."""
    check_installed()
    from sima_attn.dino.recipe_choice import choose_dino
    from sima_attn.dino.recipes import named_dino_recipe

    check_resumable(out, recipe, resume, data)
    folder = out or Path("runs") / f"dino-{recipe or 'digits'}"
    options = {"data.path": data, "run.precision": precision, "run.compile": compile_, "run.cuda_graph": cuda_graph}
    options |= {"run.strategy": strategy}
    choose = partial(choose_dino, device=resolve_device(device))
    chosen = resolved(named_dino_recipe, recipe, "digits", folder, resume, overrides, options, choose)
    folder = out or Path("runs") / f"dino-{recipe or chosen.name}"
    from sima_attn.dino.task import train_dino  # slow to import: after the settings are checked

    finished = train_dino(chosen, folder, resume=resume, device=device)
    say_finished(finished, folder, "(weights.safetensors: the teacher, batch.png)")


@app.command("knn")
@option.takes_model
def knn_command(
    model: option.ModelOrRun = DEFAULT_RUN,
    data: option.DataOfRun = None,
    k: Annotated[
        list[int] | None, Option("-k", help="Neighbors; repeat for several.", min=1, show_default="10, 20, 100, 200")
    ] = None,
    temperature: Annotated[float, Option(help="Temperature T of the weights exp(cosine / T).")] = 0.07,
    size: SizeOption = None,
    branch: BranchOption = "teacher",
    picture: Annotated[Path | None, option.file("png", "Picture of the nearest neighbors of six val images.")] = None,
    map_: Annotated[Path | None, option.file("png", "Picture of the val features of ten classes.", "--map")] = None,
    method: Annotated[str, Option("--map-method", help="pca, or tsne (scikit-learn).")] = "pca",
    out: Annotated[Path | None, option.file("csv", "CSV file for the rows.")] = None,
    cache: CacheOption = None,
    dtype: DtypeOption = "float16",
    batch: option.BatchSize = 256,
    workers: option.Workers = None,
    device: option.Device = "auto",
) -> None:
    """k-NN accuracy of frozen features: val images classified by their nearest training images."""
    from sima_attn.data.sources import class_words
    from sima_attn.probe.feature_map import MAPS, plot_feature_map
    from sima_attn.probe.knn import features_accuracy, plot_neighbors

    check_known("map", method, MAPS)
    check_value(temperature, PositiveFloat, "the temperature")
    for figure in (picture, map_):
        if figure is not None:
            check_can_plot(figure)
    device = resolve_device(device)
    backbone = open_backbone(model, branch)
    options = {"dtype": dtype, "batch": batch, "device": device}
    (train, val), (bank, queries) = extract_splits(
        backbone.model, model, backbone, data, size, cache, workers, **options
    )
    counts = k or [count for count in (10, 20, 100, 200) if count <= len(bank.values)] or [len(bank.values)]
    with progress_bar() as bar:
        on_step = step_callback(bar, "neighbors")
        rows = features_accuracy(queries, bank, k=counts, temperature=temperature, device=device, on_step=on_step)
    lines = [[str(r.k), f"{r.top1:.2f}", f"{r.top5:.2f}", f"{r.images}", f"{r.bank}"] for r in rows]
    print_table(TextTable(["k", "top-1", "top-5", "images", "bank"], lines), title=f"k-NN of {model}")
    if out is not None:
        write_rows(out, rows)
        console.print(f"Rows: {out}")
    name, words = Path(model).name, class_words(data or backbone.data.path)
    bank, queries = (f._replace(classes=[words.get(c, c) for c in f.classes]) for f in (bank, queries))
    if picture is not None:
        plot_neighbors(queries, val, bank, train, picture, device=device, title=f"Nearest neighbors under {name}")
        console.print(f"Picture: {picture}")
    if map_ is not None:
        plot_feature_map(queries, map_, method=method, title=f"Features of {name}, {method}")
        console.print(f"Map: {map_}")
    say_next(after_knn(model, data))


@app.command("linear")
@option.takes_model
def linear_command(
    model: option.ModelOrRun = DEFAULT_RUN,
    data: option.DataOfRun = None,
    features: Annotated[str, Option(help="layers (tokens of the last ones, as in the paper) or output.")] = "layers",
    layers: Annotated[int | None, Option(help="Number of layers.", show_default="2 in XCiT, 4 elsewhere")] = None,
    norm: Annotated[bool, Option(help="Pass the tokens through the model's last norm.")] = True,
    epochs: Annotated[int | None, Option(help="Default: the run's; 100 in the paper.", min=1)] = None,
    lr: Annotated[float | None, Option(help="Default: the run's; 0.001 in the paper.")] = None,
    head_batch: Annotated[
        int | None, Option(help="Batch size of the classifier. Default: the run's; 1024 in the paper.", min=1)
    ] = None,
    seed: Annotated[int, Option(help="Seed of the classifier's initial weights and order.", min=0)] = 0,
    size: SizeOption = None,
    branch: BranchOption = "teacher",
    out: Annotated[Path | None, option.file("csv", "CSV file with one row every ten epochs.")] = None,
    cache: CacheOption = None,
    dtype: DtypeOption = "float16",
    batch: option.BatchSize = 256,
    workers: option.Workers = None,
    device: option.Device = "auto",
) -> None:
    """Accuracy of a linear classifier on frozen features, trained by SGD as in the paper."""
    from sima_attn.probe.features import LayerFeatures
    from sima_attn.probe.linear import train_linear

    check_known("features", features, ("layers", "output"))
    if lr is not None:
        check_value(lr, PositiveFloat, "--lr")
    if features == "output" and (layers is not None or not norm):
        raise ValueError("--layers and --no-norm apply to --features layers only")
    device = resolve_device(device)
    backbone = open_backbone(model, branch)
    reader: nn.Module = LayerFeatures(backbone.model, layers, norm) if features == "layers" else backbone.model
    given: dict[str, Any] = {"epochs": epochs, "lr": lr, "batch": head_batch}
    probe = replace(backbone.probe, **{name: value for name, value in given.items() if value is not None})
    options = {"dtype": dtype, "batch": batch, "device": device}
    _, (train, val) = extract_splits(reader, model, backbone, data, size, cache, workers, **options)
    with progress_bar() as bar:
        on_step = step_callback(bar, "linear classifier")
        result = train_linear(train, val, probe, device=device, seed=seed, on_step=on_step)
    width = train.values.shape[1]
    how = f"{width} channels of {model}, {probe.epochs} epochs, lr {probe.lr:g}, batch {probe.batch}"
    accuracy = (f"top-1 {result.top1:.2f}, top-5 {result.top5:.2f}", "bold")
    console.print(Text.assemble(accuracy, f" of {len(val.values)} images: linear on {how}"))
    if out is not None:
        write_rows(out, result.rows)
        console.print(f"Rows: {out}")
    say_next(after_linear(model, data or backbone.data.path))


def open_backbone(model: str, branch: str) -> "Backbone":
    """The backbone of a model or run; the error for the default run says how to make it."""
    from sima_attn.probe.features import load_backbone

    if model == DEFAULT_RUN and not Path(model).exists():
        raise ValueError(f"there is no run in {DEFAULT_RUN}, the default: make it with `sima dino`, or pass --model")
    return load_backbone(model, branch=branch)


def extract_splits(
    reader: "nn.Module",
    name: str,
    backbone: "Backbone",
    data: str | None,
    size: int | None,
    cache: Path | None,
    workers: int | None,
    **options: Any,
) -> "tuple[list[Source], list[Features]]":
    """The train and val images, and their features by `reader`, extracted or as they were stored."""
    from sima_attn.data.sources import check_same_classes
    from sima_attn.data.splits import default_val, open_trained_split
    from sima_attn.probe.features import extract, feature_folder, with_workers

    path = data or backbone.data.path
    if not path:
        raise ValueError(f"{name} is a registered model: give the images with --data")
    if not backbone.trained:
        console.print(f"{name} has no trained weights: these are the features of random ones")
    trained_on = backbone.data
    if trained_on.val is None and (held_out := default_val(path)):
        console.print(f"{path} has no val images: {held_out:.0%} of each class are held out")
        trained_on = replace(trained_on, val=held_out)
    sources = [open_trained_split(trained_on, split, path) for split in ("train", "val")]
    check_same_classes(*sources)
    images = replace(backbone.data, size=size or backbone.data.size)
    features = []
    for split, source in zip(("train", "val"), sources, strict=True):
        loaded = with_workers(images, len(source)) if workers is None else replace(images, workers=workers)
        with progress_bar() as bar:
            show: dict[str, Any] = {"say": teller(bar.console), "on_step": step_callback(bar, f"features of {split}")}
            features.append(extract(reader, source, loaded, cache or feature_folder(name), **show, **options))
    return sources, features
