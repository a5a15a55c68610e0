"""`sima serve`: the web page."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from typer import Option

from sima_attn._devices import resolve_device
from sima_attn._errors import check_installed
from sima_attn.cli import _options as option
from sima_attn.cli._shared import note, teller
from sima_attn.cli.classify import load_classifier
from sima_attn.cli.explain import load_models

if TYPE_CHECKING:
    from sima_attn.detect.weights import LoadedDetector
    from sima_attn.explain.photo_model import PhotoModel

app = typer.Typer()


@app.command("serve")
@option.takes_model
def serve_command(
    model: option.Model = None,
    data: option.Reference = None,
    host: Annotated[str, Option(help="Address to listen on; the default is local to this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on; 0 selects a free one.", min=0, max=65535)] = 8000,
    samples: Annotated[Path | None, Option(help="Folder of sample photos for the page.")] = None,
    onnx: Annotated[Path | None, Option(help="A file of `sima export` to run in the browser.")] = None,
    onnxruntime_web: Annotated[
        Path | None, Option(help="Folder of onnxruntime-web, for --onnx.", show_default=".tools/web")
    ] = None,
    device: option.Device = "auto",
    queue: Annotated[int, Option(help="Maximum number of waiting requests; more are rejected.", min=0)] = 16,
    timeout: Annotated[float, Option(help="Seconds per request.", min=1.0)] = 60.0,
) -> None:
    """Serve a web page that classifies photos and shows attention maps; with a detector, it shows boxes and masks."""
    check_installed("the page", "fastapi", "uvicorn", extra="serve")
    from sima_attn.models.loading import is_detector

    loaded: PhotoModel | LoadedDetector
    if model is not None and is_detector(model):
        if onnx is not None:
            raise ValueError(f"{model} is a detector, which does not run in the browser: omit --onnx")
        if data is not None:
            raise ValueError(f"{model} is a detector, which shows boxes: omit --data")
        loaded, what = _load_detector(model, device)
    else:
        (loaded,) = load_models([model], device)
        if data is not None:
            loaded = replace(loaded, **vars(load_classifier(model, data, resolve_device(device))))
        elif not loaded.has_classes:
            note(f"{loaded.name} gives features: the page shows maps alone; --data FOLDER adds classes")
        what = f"{loaded.name}, {loaded.size} px"
    from sima_attn.serve.limits import Limits
    from sima_attn.serve.run import serve

    teller(Console(stderr=True))(f"{what}, {resolve_device(device)}")
    if host not in ("127.0.0.1", "::1", "localhost"):
        note(f"{host} can be reached from other machines")
    limits = Limits(queue=queue, seconds=timeout)
    serve(loaded, host=host, port=port, samples=samples, limits=limits, onnx=onnx, onnxruntime_web=onnxruntime_web)


def _load_detector(run: str, device: str) -> "tuple[LoadedDetector, str]":
    """The detector of a run, and what to call it."""
    from sima_attn.detect.weights import load_detector

    loaded = load_detector(run)
    loaded.model.to(resolve_device(device))
    return loaded, f"{run}, a detector of {len(loaded.classes)} classes"
