"""Runtimes for ONNX files with one interface: array in, array out.

This module does not import torch, so that the memory of a runtime can be measured without it.
"""

import json
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from sima_attn._errors import check_installed, check_known, first_line

PREFIX = "sima_attn."  # of our metadata keys
LOGITS, FEATURES = "logits", "features"  # the first output of a file, and its metadata "output"


class OnnxRuntime:
    """ONNX Runtime on the CPU."""

    def __init__(self, path: Path, threads: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # errors only
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its error classes are not public
            raise ValueError(f"ONNX Runtime cannot load {path}: {first_line(error)}") from error
        self.metadata = _ours(self.session.get_modelmeta().custom_metadata_map)
        inputs = self.session.get_inputs()
        if len(inputs) != 1:
            raise ValueError(f"{path} has {len(inputs)} inputs; an image model has one")
        self.input_name, self.input_shape = inputs[0].name, tuple(inputs[0].shape)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Run the model: input -> first output."""
        return self.outputs(images)[0]

    def outputs(self, images: np.ndarray) -> list[np.ndarray]:
        """Run the model: input -> all outputs."""
        return self.session.run(None, {self.input_name: images})


class OpenVino:
    """OpenVINO on the CPU in float32; its default is bfloat16 on processors that support it."""

    def __init__(self, path: Path, threads: int) -> None:
        import openvino

        self.metadata = read_metadata(path)
        if self.metadata.get("preprocessing_inside") == "true":
            raise ValueError(
                f"{path} includes preprocessing, and OpenVINO's antialiased Resize differs from that of ONNX: export "
                "without --preprocess for OpenVINO"
            )
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        try:
            compiled = openvino.Core().compile_model(str(path), "CPU", settings)
        except RuntimeError as error:
            raise ValueError(f"OpenVINO cannot load {path}: {first_line(error)}") from error
        sizes = compiled.input(0).get_partial_shape()
        self.input_shape = tuple("?" if size.is_dynamic else size.get_length() for size in sizes)
        self.request = compiled.create_infer_request()

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Run the model: input -> first output."""
        return self.request.infer({0: images})[0]


# A loaded file: `metadata` as `export_onnx` wrote it, and `input_shape`, in which a str is a dynamic size.
Session = OnnxRuntime | OpenVino
RUNTIMES: dict[str, type[Session]] = {"onnxruntime": OnnxRuntime, "openvino": OpenVino}  # by the name of the package


def installed_runtimes() -> list[str]:
    """Names of the installed runtimes."""
    return [name for name in RUNTIMES if find_spec(name)]


def check_runtime(runtime: str) -> None:
    """Raise if a runtime is unknown or not installed."""
    check_known("runtime", runtime, RUNTIMES)
    check_installed(f"the runtime {runtime}", runtime, extra="onnx" if runtime == "onnxruntime" else runtime)


def open_model(path: str | Path, runtime: str = "onnxruntime", threads: int = 1) -> Session:
    """Load an ONNX file in a runtime."""
    check_runtime(runtime)
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist: create it with `sima export MODEL -o {path}`")
    return RUNTIMES[runtime](Path(path), threads)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Metadata that `export_onnx` wrote, without the prefix of the keys; empty for other files."""
    import onnx

    if not Path(path).is_file():
        raise FileNotFoundError(
            f"there is no .onnx file or run folder {path}: export a model with `sima export MODEL -o model.onnx`"
        )
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # an error of protobuf, which onnx does not wrap
        raise ValueError(f"{path} cannot be read as an ONNX file: {error}") from error
    return _ours({entry.key: entry.value for entry in model.metadata_props})


def labels_in(metadata: Mapping[str, str]) -> list[str] | None:
    """The class names, None if the file has none."""
    if "labels" not in metadata:
        return None
    try:
        names = json.loads(metadata["labels"])
    except (json.JSONDecodeError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"the labels of an ONNX file must be a list of names, got {metadata['labels'][:200]!r}")
    return names


def unsure_below_in(metadata: Mapping[str, str]) -> float | None:
    """The probability below which an answer is unsure, None if the file has none."""
    if "unsure_below" not in metadata:
        return None
    text = metadata["unsure_below"]
    if not re.fullmatch(r"0?\.\d{1,20}", text):
        raise ValueError(f"unsure_below of an ONNX file must be a probability such as 0.5, got {text[:200]!r}")
    return float(text)


def _ours(metadata: Mapping[str, str]) -> dict[str, str]:
    return {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
