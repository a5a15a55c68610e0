"""The commands that lead on from what a command has written. Only those that work as printed are suggested."""

import os
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sima_attn.cli._shared import console

Command = list[str | Path]


def say_next(commands: list[Command]) -> None:
    """Print the commands, quoted for the shell; nothing for none."""
    for number, command in enumerate(commands):
        console.print(f"{'      ' if number else 'Next: '}{shlex.join(['sima', *map(str, command)])}")


def after_run(folder: Path, metrics: Mapping[str, float]) -> list[Command]:
    """After a training. What the run can do is read from its metrics, top1 of a classifier or knn_top1 of features, or
    from its images: features of labeled ones can be classified too.
    """
    commands: list[Command] = []
    photo = first_image(data_of(folder))
    if "top1" in metrics:
        commands += [["eval", folder]]
        commands += [["classify", photo, "--model", folder]] if photo else []
    elif "knn_top1" in metrics or labeled_images(data_of(folder)):
        commands += [["knn", folder]]
        commands += [["classify", photo, "--model", folder]] if photo else []
    elif photo:
        commands += [["heatmap", photo, "--model", folder]]
    return [*commands, *_export(folder)]


def after_eval(model: str | None, data: str | None, split: str) -> list[Command]:
    """After an evaluation with mistakes of which no picture was drawn."""
    named: Command = [model] if model else []
    where: Command = ["--data", data] if data else []
    part: Command = ["--split", split] if split != "val" else []
    return [["eval", *named, *where, *part, "--mistakes", "mistakes.png"]]


def after_detector(folder: Path, metrics: Mapping[str, float]) -> list[Command]:
    """After the training of a detector."""
    photo = first_image(data_of(folder))
    predict: list[Command] = [["detect", "predict", photo, "--model", folder]] if photo else []
    return [["detect", "eval", folder], *predict, *_export(folder)]


def after_detector_eval(model: str, data: str) -> list[Command]:
    """After the evaluation of a detector, or its export: look at what it finds."""
    photo = first_image(data)
    return [["detect", "predict", photo, "--model", model]] if photo else []


def after_predict(model: str) -> list[Command]:
    """After pictures of objects: the page, where the minimum score can be changed."""
    return [["serve", "--model", model]] if _installed("fastapi", "uvicorn") else []


def after_linearize(folder: Path, metrics: Mapping[str, float]) -> list[Command]:
    """After a linearization: a classifier that was taught without labels has no accuracy."""
    evaluate: list[Command] = [["eval", folder]] if "top1" in metrics else []
    return [["audit", folder], *evaluate, *_export(folder)]


def after_export(file: Path, about: Mapping[str, Any]) -> list[Command]:
    """After the export of a model, of whose run `about` are the metadata."""
    from sima_attn.data.images import images_in
    from sima_attn.data.splits import has_val_images
    from sima_attn.export.quantize import MIN_IMAGES

    data = str(about.get("recipe", {}).get("data", {}).get("path", ""))
    usable = data == "digits" or (Path(data).is_dir() and has_val_images(data))
    if data and not usable and Path(data).is_dir():  # one folder, which is divided or has image files
        usable = max(labeled_images(data), len(images_in(Path(data)))) >= MIN_IMAGES
    quantize: list[Command] = [["quantize", file, "--data", data]] if data and usable else []
    return [*quantize, ["audit", file, "--by-module"]]


def after_quantize(files: list[Path]) -> list[Command]:
    """After the quantization of files."""
    return [["audit", file] for file in files]


def after_knn(model: str, data: str | None) -> list[Command]:
    """After k-NN: the other measure of the same features."""
    return [["linear", model, *(["--data", data] if data else [])]]


def after_linear(model: str, data: str) -> list[Command]:
    """After a linear classifier on the frozen features of a model: all its weights learn the same images."""
    folder = Path(model)
    if not folder.is_dir():  # a name, with random weights or with those of a file
        return []
    tuned = folder.with_name(f"{folder.name}-finetuned")
    finetune: list[Command] = [] if tuned.exists() else [["finetune", folder, "--data", data, "--out", tuned]]
    return [*finetune, *_export(folder)]


def after_classify(photo: Path, model: str | None, data: str | None) -> list[Command]:
    """After the classes of photos, by a model whose attentions can be shown: where it looks."""
    named: Command = ["--model", model] if model else []
    by_neighbors: Command = ["--data", data] if data else []
    page: list[Command] = [["serve", *named, *by_neighbors]] if _installed("fastapi", "uvicorn") else []
    return [["heatmap", photo, *named], *page]


def after_heatmap(photo: Path, model: str | None, layer: str) -> list[Command]:
    """After heat maps: more layers, or the page, where each layer is a click away."""
    named: Command = ["--model", model] if model else []
    layers: list[Command] = [["heatmap", photo, *named, "--layer", "all"]] if layer != "all" else []
    page: list[Command] = [["serve", *named]] if _installed("fastapi", "uvicorn") else []
    return [*layers, *page]


def _export(folder: Path) -> list[Command]:
    return [["export", folder]] if _installed("onnx", "onnxscript", "onnxruntime") else []


def _installed(*packages: str) -> bool:
    return all(find_spec(package) is not None for package in packages)


def data_of(folder: Path) -> str:
    """The data of a run, as its recipe names them."""
    import yaml

    path = yaml.safe_load((folder / "recipe.yaml").read_text())["recipe"]["data"]["path"]
    return str(path)


def labeled_images(data: str) -> int:
    """Number of labeled train images, where a part of class folders without a split is held out; 0 without any."""
    from sima_attn.data.settings import Data
    from sima_attn.data.splits import default_val, open_split

    try:
        return len(open_split(Data(data, val=default_val(data)), "train"))
    except (ValueError, OSError):
        return 0


def first_image(data: str) -> Path | None:
    """An image file in a folder, in val/ rather than in train/; None where there are none, as in parquet files."""
    from sima_attn.data.images import ENDINGS, is_hidden

    for here, folders, files in os.walk(data):
        folders[:] = sorted((name for name in folders if not is_hidden(name)), reverse=True)
        for name in sorted(files):
            if name.lower().endswith(ENDINGS) and not is_hidden(name):
                return Path(here) / name
    return None
