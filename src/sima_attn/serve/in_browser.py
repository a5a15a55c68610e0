"""An ONNX file and onnxruntime-web -> what the page `browser` needs to run a model by itself.

The page asks for everything from here, so that the photo and the model stay on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sima_attn.export.runtimes import labels_in, open_model
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.serve.limits import Refusal

RUNTIME = {"ort.wasm.bundle.min.mjs": "text/javascript", "ort-wasm-simd-threaded.wasm": "application/wasm"}
PRECISIONS = ("float32", "int8")
LONGEST_NAME = 200
USUAL_RUNTIME = Path(".tools/web")  # where `make browser` puts them
NO_RUNTIME = (
    "onnxruntime-web is not here: run `make browser` in the repository, or `npm install onnxruntime-web` and start "
    "again with --onnxruntime-web node_modules/onnxruntime-web/dist"
)
NO_MODEL = (
    "no model was given for this page: write one with `sima export MODEL --out model.onnx`, and start again with "
    "`sima serve --onnx model.onnx`"
)


@dataclass(frozen=True)
class BrowserModel:
    """An ONNX file: how a photo is made ready for it (or that it does so itself), and what its classes are called."""

    name: str
    bytes: int
    precision: str
    prepares_itself: bool
    preprocessing: Preprocessing
    classes: list[str] | None


class InBrowser:
    """The files that the page asks for, checked before the server starts.

    A path that is given must exist. Omitted paths are optional; without them the page says how to get the files.
    """

    def __init__(self, onnx: Path | None = None, runtime: Path | None = None) -> None:
        folder = runtime or USUAL_RUNTIME
        missing = [name for name in RUNTIME if not (folder / name).is_file()]
        if runtime is not None and missing:
            raise FileNotFoundError(
                f"{runtime} has no {' and no '.join(missing)}: give the folder `dist` of npm's onnxruntime-web"
            )
        self.model = browser_model(onnx) if onnx is not None else None
        self.files: Mapping[str, tuple[Path, str]] = {}  # name -> file and media type
        if not missing:
            self.files = {name: ((folder / name).resolve(), kind) for name, kind in RUNTIME.items()}
        if onnx is not None:
            self.files |= {"model.onnx": (onnx.resolve(), "application/octet-stream")}

    def facts(self) -> BrowserModel:
        """The model, or a refusal that says how to get what is missing."""
        if self.model is None:
            raise Refusal(404, NO_MODEL)
        if not self.files.keys() >= RUNTIME.keys():
            raise Refusal(404, NO_RUNTIME)
        return self.model


def browser_model(path: Path) -> BrowserModel:
    """The metadata of a file of `sima export` or `sima quantize`; the file is loaded once to check that it runs.

    Anyone may have written the file, so its metadata are compared with its graph.
    """
    session = open_model(path)
    metadata = session.metadata
    if "preprocessing" not in metadata:
        raise ValueError(f"{path} does not say how its images are prepared: write it with `sima export`")
    try:
        how, classes = Preprocessing.from_json(metadata["preprocessing"]), labels_in(metadata)
        inside = _one_of(metadata, "preprocessing_inside", ("false", "true")) == "true"
        precision = _one_of(metadata, "precision", PRECISIONS)
        _check_shape("input", session.input_shape, ("?", "?", 3) if inside else ("?", 3, how.size, how.size))
        _check_shape("output", session.output_shape, ("?", len(classes) if classes is not None else "?"))
    except ValueError as error:
        raise ValueError(f"the metadata of {path} cannot be used: {error}; write it with `sima export`") from error
    return BrowserModel(
        name=metadata.get("model", path.stem)[:LONGEST_NAME],
        bytes=path.stat().st_size,
        precision=precision,
        prepares_itself=inside,
        preprocessing=how,
        classes=classes,
    )


def _one_of(metadata: Mapping[str, str], key: str, allowed: tuple[str, ...]) -> str:
    """A value of the metadata; the first of those allowed where it is missing."""
    value = metadata.get(key, allowed[0])
    if value not in allowed:
        raise ValueError(f"{key} must be {' or '.join(allowed)}, got {value[:LONGEST_NAME]!r}")
    return value


def _check_shape(which: str, shape: tuple[int | str, ...], wanted: tuple[int | str, ...]) -> None:
    """Raise where a shape is not the one that the metadata tell of; a str is a size that is left open."""
    sizes = zip(shape, wanted, strict=False)
    if len(shape) != len(wanted) or any(
        isinstance(one, int) and isinstance(other, int) and one != other for one, other in sizes
    ):
        raise ValueError(f"they tell of an {which} {wanted}, and the model has {shape}")
