"""An ONNX file and onnxruntime-web -> what the page `browser` needs to run a model by itself.

The page asks for everything from here, so that the photo and the model stay on this machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sima_attn.export.runtimes import FEATURES, labels_in, open_model, unsure_below_in
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.serve.limits import Refusal

RUNTIME = {"ort.wasm.bundle.min.mjs": "text/javascript", "ort-wasm-simd-threaded.wasm": "application/wasm"}
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
    unsure_below: float | None


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

    @property
    def reason_it_does_not_run(self) -> str:
        """What is missing, and how to get it; empty if the page can run the model."""
        if self.model is None:
            return NO_MODEL
        return "" if self.files.keys() >= RUNTIME.keys() else NO_RUNTIME

    def facts(self) -> BrowserModel:
        """The model, or a refusal that says how to get what is missing."""
        if self.model is None or self.reason_it_does_not_run:
            raise Refusal(404, self.reason_it_does_not_run)
        return self.model


def browser_model(path: Path) -> BrowserModel:
    """The metadata of a file of `sima export` or `sima quantize`; the file is loaded once to check that it runs."""
    metadata = open_model(path).metadata
    if metadata.get("task") == "detection":
        raise ValueError(f"{path} is a detector, which does not run in the browser; serve its run with --model")
    if "preprocessing" not in metadata:
        raise ValueError(f"{path} does not say how its images are prepared: write it with `sima export`")
    if metadata.get("output") == FEATURES:
        raise ValueError(f"{path} gives features, and the page shows classes: export a model with a classifier")
    try:
        how = Preprocessing.from_json(metadata["preprocessing"])
        classes, unsure_below = labels_in(metadata), unsure_below_in(metadata)
    except ValueError as error:
        raise ValueError(f"the metadata of {path} cannot be used: {error}; write it with `sima export`") from error
    return BrowserModel(
        name=metadata.get("model", path.stem)[:LONGEST_NAME],
        bytes=path.stat().st_size,
        precision="int8" if metadata.get("precision") == "int8" else "float32",
        prepares_itself=metadata.get("preprocessing_inside") == "true",
        preprocessing=how,
        classes=classes,
        unsure_below=unsure_below,
    )
