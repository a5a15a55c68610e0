"""`sima detect` and `sima bench detect`: Mask R-CNN, and Faster R-CNN for boxes without masks."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from sima_attn import _errors
from sima_attn._devices import resolve_device
from sima_attn.cli import _options as option
from sima_attn.cli import bench
from sima_attn.cli._next import after_detector, after_detector_eval, after_predict, say_next
from sima_attn.cli._shared import console, print_recipes, print_table, progress_bar, step_callback, teller
from sima_attn.cli.train import check_installed, resolved, say_finished
from sima_attn.data.images import find_photos
from sima_attn.report.rows import write_rows

app = typer.Typer(help="Boxes and instance masks: Mask R-CNN, Faster R-CNN.", no_args_is_help=True)


def check_ready() -> None:
    """Raise unless pycocotools is installed."""
    _errors.check_installed("detection", "pycocotools", extra="detection")


@app.command("train")
def train_command(
    recipe: Annotated[
        str | None, Option(help="Name of a recipe, see `sima detect recipes`. Default: by the images.")
    ] = None,
    data: Annotated[str | None, Option(help="Folder with COCO files or YOLO labels. Default: the recipe's.")] = None,
    backbone: Annotated[str | None, Option(help="Weights of a classifier to start from: a run or a file.")] = None,
    no_masks: Annotated[
        bool, Option("--no-masks", help="Train on boxes alone, as is done where most objects have no mask.")
    ] = False,
    out: option.RunFolder = None,
    overrides: option.Settings = None,
    resume: option.Resume = False,
    device: option.Device = "auto",
    precision: option.Precision = None,
) -> None:
    """Train a detector with a recipe. Runs on all processes of torchrun; after an interruption, add --resume."""
    check_installed()
    check_ready()
    from sima_attn.detect.recipe_choice import choose_detector
    from sima_attn.detect.recipes import named_recipe

    folder = out or Path("runs") / (recipe or "own_images")
    options = {"data.path": data, "model.weights": backbone, "run.precision": precision}
    options |= {"model.masks": "false"} if no_masks else {}
    choose = partial(choose_detector, device=resolve_device(device))
    chosen = resolved(named_recipe, recipe, "own_images", folder, resume, overrides, options, choose)
    from sima_attn.detect.task import train_detector  # slow to import: after the settings are checked

    finished = train_detector(chosen, folder, resume=resume, device=device)
    say_finished(finished, folder, "(weights.safetensors, eval.csv)", ".1f", commands=after_detector)


@app.command("eval")
@option.takes_model
def eval_command(
    model: option.Detector,
    data: Annotated[str | None, Option(help="Folder with COCO files or YOLO labels. Default: the run's.")] = None,
    split: Annotated[
        str | None,
        Option(help="train, val or test, or a COCO file in the folder. Default: the run's last; with --data, val."),
    ] = None,
    out: Annotated[Path | None, option.folder("Folder for results.json and categories.csv.")] = None,
    batch: option.BatchSize = 2,
    workers: Annotated[int, Option(help="Worker processes that decode images.", min=0)] = 4,
    device: option.Device = "auto",
) -> None:
    """AP of boxes and, if there are any, masks: as a row of the paper's Table 4, by size, and by category."""
    check_ready()
    from sima_attn.detect.scores import write_results
    from sima_attn.detect.task import evaluate_detector
    from sima_attn.detect.weights import load_detector
    from sima_attn.reproduce.detection import size_table, table_4

    loaded = load_detector(model)
    path = data or loaded.recipe.data.path
    split = split or ("val" if data else loaded.recipe.data.eval_splits[-1])
    with progress_bar() as progress:
        evaluated = evaluate_detector(
            loaded.model,
            loaded.classes,
            path,
            split,
            batch=batch,
            workers=workers,
            device=resolve_device(device),
            say=teller(progress.console),
            counter=partial(step_callback, progress),
        )
    params = sum(p.numel() for p in loaded.model.parameters())
    print_table(table_4(loaded.recipe.model.name, params, evaluated.scores), "Detection on COCO, Table 4")
    print_table(size_table(evaluated.scores), "By the size of the objects")
    if out is not None:
        write_results(out / "results.json", evaluated.results)
        write_rows(out / "categories.csv", evaluated.scores.categories)
        console.print(f"Results: {out / 'results.json'}\nCategories: {out / 'categories.csv'}")
    say_next(after_detector_eval(model, path))


@app.command("predict")
def predict_command(
    photos: Annotated[list[str], Argument(metavar="PHOTO", help="Photos, folders of them, or patterns.")],
    model: option.Detector,
    out: Annotated[Path, option.folder("Folder for the pictures and detections.json.")] = Path("runs/predict"),
    threshold: Annotated[float, Option(help="Minimum score to draw.", min=0.0, max=1.0)] = 0.5,
    device: option.Device = "auto",
) -> None:
    """Draw boxes, masks if there are any, class names and scores on photos."""
    check_ready()
    from sima_attn.detect.predict import predict_photos
    from sima_attn.detect.weights import load_detector

    files = find_photos(photos)
    loaded = load_detector(model, score_threshold=threshold)
    loaded.model.to(resolve_device(device))
    with progress_bar() as progress:
        task = progress.add_task("photos", total=len(files))
        told = predict_photos(
            loaded,
            files,
            out,
            threshold=threshold,
            say=teller(progress.console),
            on_photo=lambda path: progress.advance(task),
        )
    for entry in told:
        best = ", ".join(f"{found['class']} {found['score']:.0%}" for found in entry["objects"][:5])
        count = len(entry["objects"])
        console.print(f"{entry['photo']}: {count} object{'s' * (count != 1)}{': ' * bool(count)}{best}")
    console.print(f"Pictures: {out}\nDetections: {out / 'detections.json'}")
    say_next(after_predict(model))


@app.command("recipes")
def recipes_command() -> None:
    """List the recipes of `sima detect train`."""
    from sima_attn.detect.recipes import RECIPES

    print_recipes(RECIPES)


@bench.app.command("detect")
def bench_detect_command(
    out: Annotated[
        Path | None, option.file("csv", "CSV file for the rows.", show_default="runs/bench/detect_DEVICE.csv")
    ] = None,
    size: option.Sizes = None,
    no_masks: Annotated[bool, Option("--no-masks", help="Time Faster R-CNN instead of Mask R-CNN.")] = False,
    device: option.Device = "auto",
    seconds: option.Seconds = 2.0,
) -> None:
    """Backbone and whole detector at 480 to 2048 px: softmax DeiT-S and XCA against their SimA twins."""
    from sima_attn.bench.detect import PIXELS, TWINS, bench_detect, detect_table

    device = resolve_device(device)
    file = out or option.BENCH_FOLDER / f"detect_{device}.csv"
    total = len(TWINS) * len(size or PIXELS[device])
    rows = bench.measure(
        lambda show: bench_detect(device, pixels=size, seconds=seconds, masks=not no_masks), file, total
    )
    print_table(detect_table(rows), f"one image, {rows[0].precision}, {rows[0].device}")
    bench.print_paths(rows=file)
