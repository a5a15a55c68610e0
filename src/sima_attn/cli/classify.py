"""`sima classify` and `sima ship`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from typer import Argument, Option

from sima_attn._devices import resolve_device
from sima_attn._settings import to_dict
from sima_attn.cli import _options as option
from sima_attn.cli._next import after_classify, say_next
from sima_attn.cli._shared import console, progress_bar, step_callback, teller
from sima_attn.data.images import find_photos, open_photos

if TYPE_CHECKING:
    from sima_attn.explain.answer import Answer
    from sima_attn.models.loading import LoadedModel
    from sima_attn.train.recipes import Recipe

app = typer.Typer()
BAR = 30  # characters of the bar for a probability of 1
RESEARCH = "Trained on images from ImageNet: for non-commercial research and education only."


@app.command("classify")
def classify_command(
    photos: Annotated[list[str] | None, Argument(metavar="PHOTO", help="Photos, folders of them, or patterns.")] = None,
    model: option.Model = None,
    data: option.Reference = None,
    top: Annotated[int, Option(help="Number of classes to show.", min=1)] = 5,
    classes: Annotated[bool, Option("--classes", help="List the classes that the model knows, and exit.")] = False,
    device: option.Device = "cpu",
) -> None:
    """Classify photos: the most likely classes of each. Photos that cannot be read are reported and skipped."""
    if bool(photos) == classes:
        raise ValueError("give photos to classify, or --classes alone to list the classes that the model knows")
    device = resolve_device(device)
    files = find_photos(photos or [])
    loaded = load_classifier(model, data, device)
    if classes:
        for name in loaded.class_names():
            console.print(name)
        return
    if not loaded.trained:
        raise ValueError(
            f"{loaded.name} has no trained weights: train a model with `sima train` and give its folder with --model"
        )
    from sima_attn.explain.answer import classify
    from sima_attn.explain.photo_model import PhotoModel

    classified = []
    for path, photo in open_photos(files, say=console.print):
        print_answer(path.name, classify(loaded, photo, top))
        classified.append(path)
    if PhotoModel(**vars(loaded)).has_maps:
        say_next(after_classify(classified[0], model, data))


def load_classifier(model: str | None, data: str | None, device: str) -> LoadedModel:
    """A model with classes: its own or, with `data` or for a model of features, by the nearest labeled images."""
    from sima_attn.models.loading import load_model
    from sima_attn.probe.features import feature_folder
    from sima_attn.probe.knn_classifier import knn_classifier

    loaded = load_model(model, features=True if data else None, device=device)
    if loaded.has_classes:
        return loaded
    with progress_bar() as bar:
        on_step = step_callback(bar, "features of the labeled images")
        say = teller(bar.console)
        return knn_classifier(loaded, data, feature_folder(model), device=device, say=say, on_step=on_step)


def print_answer(title: str, answer: Answer) -> None:
    """Print the classes of a photo with bars."""
    doubt = "  unsure: maybe none of the classes that it knows (--classes lists them)" if answer.unsure else ""
    console.print(Text.assemble((title, "bold"), (doubt, "yellow")))
    width = max(len(name) for name, _ in answer.classes)
    for name, likely in answer.classes:
        bar = "█" * round(BAR * likely)
        console.print(Text.assemble(f"  {name:<{width}}  {100 * likely:5.1f} %  ", (bar, "green")))


@app.command("ship")
@option.takes_model
def ship_command(
    model: Annotated[str, Option(help="Folder of a run of `sima train`.")],
    name: Annotated[str | None, Option(help="Model to pretrain.", show_default="the run's model")] = None,
    data: Annotated[str | None, Option(help="Folder of the images. Default: the run's.")] = None,
    ema: Annotated[bool | None, Option("--ema/--no-ema", help="The average weights. Default: if kept.")] = None,
    size: Annotated[
        list[int] | None, Option(help="Another image side whose accuracy the card names; repeat for several.", min=1)
    ] = None,
    terms: Annotated[str, Option(help="What the weights may be used for.")] = RESEARCH,
    device: option.Device = "cpu",
) -> None:
    """Put the weights of a run into the package, in half precision: `pretrained=True` finds them there."""
    from rich.console import Console

    from sima_attn.data.sources import class_words
    from sima_attn.models.loading import load_model
    from sima_attn.models.pretrained import Card, check_same_model, in_half, save_shipped
    from sima_attn.models.weight_files import weights_of_run
    from sima_attn.train.evaluate import evaluate
    from sima_attn.train.run import RunFolder

    device = resolve_device(device)
    run = Path(model)
    recipe = RunFolder(run).read_recipe()
    branch = "ema" if (recipe.run.ema is not None if ema is None else ema) else None
    shipped = weights_of_run(run, branch=branch)
    epochs = epochs_made(shipped, run, recipe)
    loaded = load_model(shipped, branch=branch)
    weights = in_half(loaded.model.state_dict())
    loaded.model.load_state_dict(weights)  # the accuracy is to be that of the rounded weights
    settings = to_dict(recipe)
    check_same_model(loaded.model, name or recipe.model.name, settings["model"], recipe.data.size)
    where = Path(data or recipe.data.path)
    with Console(stderr=True).status("evaluating"):
        result, *others = (
            evaluate(loaded, data or recipe.data.path, size=side, device=device, say=console.print)
            for side in (recipe.data.size, *dict.fromkeys(size or ()))
        )
    settings["data"]["path"] = where.name  # not the path on this machine
    if recipe.teacher.path is not None:
        settings["teacher"]["path"] = Path(recipe.teacher.path).name
    card = Card(
        classes=loaded.classes or [],
        words=class_words(where),
        size=recipe.data.size,
        mean=recipe.data.mean,
        std=recipe.data.std,
        recipe=settings,
        epochs=epochs,
        top1=round(result.top1, 2),
        top5=round(result.top5, 2),
        images=result.images,
        other_sizes={str(other.size): round(other.top1, 2) for other in others},
        terms=terms,
    )
    path = save_shipped(weights, name or recipe.model.name, card)
    at_others = "".join(f", {top1:.2f} at {side} px" for side, top1 in card.other_sizes.items())
    console.print(f"top-1 {result.top1:.2f}{at_others}, top-5 {result.top5:.2f}: {path.name}")
    console.print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def epochs_made(file: Path, run: Path, recipe: Recipe) -> float:
    """The epochs behind a file of a run: all of them for its weights, for a checkpoint those of its step."""
    from sima_attn.train.logs import read_log

    if file.suffix == ".safetensors":
        return float(recipe.schedule.all_epochs)
    log = run / "train.csv"
    rows = read_log(log) if log.is_file() else []
    if not rows:
        raise ValueError(f"the run in {run} has logged no step yet ({log.name}): ship it when it has")
    step = int(file.stem.removeprefix("step-"))  # the log may have gone on since, or be behind
    return round(step * float(rows[-1]["epoch"]) / int(rows[-1]["step"]), 1)
