"""`sima export` and `sima quantize`: a model as an ONNX file, in float32 and in int8."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from typer import Option

from sima_attn.cli import _options as option
from sima_attn.cli._next import after_detector_eval, after_export, after_quantize, say_next
from sima_attn.cli._shared import console, print_table, progress_bar
from sima_attn.data.images import find_photos, open_photos
from sima_attn.report.rows import read_rows, write_rows

if TYPE_CHECKING:
    from sima_attn.models.preprocessing import Preprocessing

app = typer.Typer()
FLOAT32 = ".float32"  # in the name of a file that is exported only to be quantized


@app.command("export")
@option.takes_model
def export_command(
    model: option.Model = None,
    out: Annotated[
        Path | None,
        option.file("onnx", "The ONNX file.", "--out", "-o", show_default="RUN/model.onnx, or runs/NAME.onnx"),
    ] = None,
    size: Annotated[int | None, Option(help="Image side in pixels. Default: the model's own.", min=1)] = None,
    weights: option.Weights = None,
    pretrained: Annotated[bool, Option("--pretrained", help="The weights that come with a model name.")] = False,
    dynamic: Annotated[str, Option(help="Dynamic axes: batch, size, or batch,size.")] = "",
    preprocess: Annotated[bool, Option("--preprocess", help="The input is a photo: prepare it in the graph.")] = False,
    labels: Annotated[Path | None, Option(help="Names of the classes, one per line.")] = None,
    order: Annotated[str, Option(help="auto, kv or qk; auto is the cheaper one at this size.")] = "auto",
    data: Annotated[Path | None, Option(help="Folder of images to compare on, besides random ones.")] = None,
    fail_on_exp: Annotated[bool, Option("--fail-on-exp", help="Fail if the graph has an exp-like node.")] = False,
) -> None:
    """Write a model as an ONNX file, compared with torch and audited for exp(). Detectors are exported at one size."""
    from sima_attn.models.loading import is_detector

    if model is not None and is_detector(model):
        given = {"--weights": weights, "--pretrained": pretrained, "--dynamic": dynamic, "--labels": labels}
        given |= {"--preprocess": preprocess, "--order": order != "auto", "--fail-on-exp": fail_on_exp}
        _export_detector(
            model, out or _default_file(model, model), size, data, [name for name, value in given.items() if value]
        )
        return
    with Console(stderr=True).status("exporting"):
        from sima_attn.export.onnx import check_installed, export_onnx

        check_installed()
        from sima_attn.models.loading import load_model

        loaded = load_model(model, weights=weights, pretrained=pretrained or None, features=None)
        prepare = replace(loaded.preprocessing, size=size or loaded.preprocessing.size)
        report = export_onnx(
            loaded.model,
            out or _default_file(model, loaded.name),
            input_size=prepare.size,
            dynamic=tuple(filter(None, dynamic.split(","))),
            order=order,
            preprocessing=preprocess,
            prepare=prepare,
            labels=_read_labels(labels) if labels is not None else None,
            unsure_below=loaded.unsure_below if prepare == loaded.preprocessing else None,  # measured at its own size
            check_images=_read_images(data, prepare, preprocess) if data is not None else None,
            fail_on_exp=fail_on_exp,
            name=loaded.name,
        )
    *facts, last = report.lines()
    used = weights or (model if model and Path(model).exists() else None)
    for fact in [*facts, f"weights: {used or ('pretrained' if loaded.trained else 'random')}"]:
        console.print(fact)
    console.print(last, style="bold")
    say_next(after_export(report.path, loaded.about))


def _export_detector(run: str, out: Path, size: int | None, data: Path | None, others: list[str]) -> None:
    if others:
        raise ValueError(f"{run} is a detector, whose export takes --size and --data only, got {', '.join(others)}")
    with Console(stderr=True).status(escape(f"exporting {run}")):
        from sima_attn.detect.weights import load_detector
        from sima_attn.export.detector import export_detector, images_of_run

        loaded = load_detector(run)
        photos = [photo for _, photo in open_photos(find_photos([data]), say=console.print)] if data else None
        report = export_detector(
            loaded.model,
            out,
            size=size or loaded.recipe.data.side,
            classes=loaded.classes,
            images=photos or images_of_run(loaded.recipe),
            name=Path(run).name,
        )
    for fact in report.lines():
        console.print(fact)
    say_next(after_detector_eval(run, loaded.recipe.data.path))


@app.command("quantize")
@option.takes_model
def quantize_command(
    model: Annotated[
        list[str], Option(help="A float32 file of `sima export`, or the folder of a run; repeat for several.")
    ],
    data: Annotated[str, Option(help="What `sima train --data` takes, or a folder of image files.")],
    out: Annotated[
        Path | None, option.file("onnx", "The int8 file, for one model.", "--out", "-o", show_default="NAME.int8.onnx")
    ] = None,
    calibrate: Annotated[int, Option(help="Training images that set the ranges.", min=1)] = 256,
    compare: Annotated[int, Option(help="Val images on which int8 and float32 are compared.", min=0)] = 1000,
    reduce_range: Annotated[
        bool, Option("--reduce-range", help="7-bit weights, for x86 processors without VNNI.")
    ] = False,
    rows: Annotated[Path | None, option.file("csv", "CSV file; rows of other models in it are kept.")] = None,
) -> None:
    """Quantize ONNX files to int8 and compare size and accuracy with float32."""
    if out is not None and len(model) > 1:
        raise ValueError(f"--out names one file, and there are {len(model)}: omit it to write NAME.int8.onnx for each")
    from sima_attn.export.onnx import check_installed
    from sima_attn.export.quantize import FileRow, open_images, quantize_onnx, quantize_table
    from sima_attn.export.runtimes import read_metadata

    check_installed()
    for name in model:
        if not Path(name).is_dir():
            read_metadata(name)  # raises for a wrong file before the others are quantized
    kept = read_rows(rows, FileRow) if rows is not None and rows.exists() else []
    found: list[FileRow] = []
    written: list[Path] = []
    with progress_bar() as progress:
        for name in model:
            task = progress.add_task(Path(name).name, total=None)
            file = _exported_run(Path(name)) if Path(name).is_dir() else Path(name)
            int8 = out or file.with_name(f"{file.name.removesuffix('.onnx').removesuffix(FLOAT32)}.int8.onnx")
            metadata = read_metadata(file)
            training = open_images(data, metadata, split="train", most=calibrate)
            val = open_images(data, metadata, split="val", most=compare, seed=1)
            progress.update(task, total=len(training) + len(val))
            found += quantize_onnx(
                file,
                int8,
                training,
                compare_images=val,
                compare_labels=val.labels,
                data=Path(data).name,
                reduce_range=reduce_range,
                on_image=lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
            written.append(int8)
            if rows is not None:  # after each model, so that a later failure loses nothing
                new = {row.model for row in found}
                write_rows(rows, [*(row for row in kept if row.model not in new), *found])
    print_table(quantize_table(found), title=f"int8 against float32, ranges from {found[-1].calibration_images} images")
    console.print(f"Written: {', '.join(map(str, written))}")
    if rows is not None:
        console.print(f"Rows: {rows}")
    say_next(after_quantize(written))


def _default_file(model: str | Path | None, name: str) -> Path:
    """Where the ONNX file of a model is written unless --out says: in the folder of its run, or in runs/."""
    folder = Path(model) if model is not None else None
    return folder / "model.onnx" if folder is not None and folder.is_dir() else Path("runs") / f"{name}.onnx"


def _exported_run(folder: Path) -> Path:
    """Export the model of a run with a dynamic batch, so that images are compared in batches.

    RUN/model.onnx, which `sima export` writes with options of the user, is left alone.
    """
    from sima_attn.export.onnx import export_onnx
    from sima_attn.models.loading import load_model

    loaded = load_model(folder, features=None)
    path = folder / f"model{FLOAT32}.onnx"
    export_onnx(loaded.model, path, input_size=loaded.preprocessing.size, dynamic=("batch",), name=loaded.name)
    return path


def _read_labels(path: Path) -> list[str]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file of labels {path}")
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


def _read_images(folder: Path, prepare: "Preprocessing", raw: bool) -> Any:
    import numpy as np

    from sima_attn.data.loader import evaluation_transform

    transform = evaluation_transform(prepare)
    photos = open_photos(find_photos([folder]), say=console.print)
    return [np.asarray(photo) if raw else transform(photo).numpy() for _, photo in photos]
