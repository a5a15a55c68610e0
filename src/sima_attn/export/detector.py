"""Detector -> ONNX file, compared with torch on boxes, scores and masks in ONNX Runtime.

The number of objects depends on the image, which torch.export does not support in torchvision's detectors, so this uses
the older exporter of torch.onnx, which records one forward pass. The image size is therefore fixed.

Shapes: n objects; image [3, size, size] in [0, 1] -> boxes [n, 4] in pixels, labels [n] from 1, scores [n] and, from a
Mask R-CNN, masks [n, 1, size, size].
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torchvision.ops import box_iou
from torchvision.transforms.functional import pil_to_tensor

from sima_attn._errors import first_line
from sima_attn._files import atomic_write
from sima_attn._version import __version__
from sima_attn.detect.backbone import STRIDE
from sima_attn.detect.folders import open_split
from sima_attn.detect.rcnn import SimaRCNN
from sima_attn.detect.recipes import DetectRecipe
from sima_attn.export.onnx import OPSET, check_installed, write_metadata

if TYPE_CHECKING:
    import onnx

OUTPUTS = ("boxes", "labels", "scores", "masks")
# Largest differences from torch: pixels of boxes, scores, and the mean of the probabilities in a mask.
LARGEST = {"boxes": 0.1, "scores": 1e-3, "masks": 1e-3}
SAME_OBJECT = 0.9  # IoU of the boxes of one object in torch and in ONNX Runtime


class DetectorReport(NamedTuple):
    """The file that was written, and how it was checked.

    Attributes:
        path, file_bytes: The file and its size.
        size: Side of the image in pixels.
        outputs: Names of the outputs.
        images, objects: How many were compared.
        parity: Output -> largest difference between ONNX Runtime and torch: in pixels for boxes, of the scores, and of
            the mean over each mask.
    """

    path: Path
    file_bytes: int
    size: int
    outputs: tuple[str, ...]
    images: int
    objects: int
    parity: dict[str, float]

    def lines(self) -> list[str]:
        """A summary, one fact per line."""
        facts = [f"{self.path}: {self.file_bytes / 2**20:.2f} MiB, opset {OPSET}"]
        facts += [f"input image 3x{self.size}x{self.size}, outputs {', '.join(self.outputs)}"]
        if not self.objects:
            return [*facts, f"parity with torch: no object on {self.images} images; give others with --data"]
        errors = ", ".join(f"{name} {error:.1e}{' px' * (name == 'boxes')}" for name, error in self.parity.items())
        return [*facts, f"parity with torch on {self.objects} objects in {self.images} images: {errors}"]


class OneImage(nn.Module):
    """A detector for one image of a fixed size, as a function of tensors."""

    def __init__(self, detector: SimaRCNN, size: int) -> None:
        super().__init__()
        self.detector = copy.deepcopy(detector).cpu().float().eval().requires_grad_(False)
        self.detector.transform.min_size, self.detector.transform.max_size = (size,), size
        body: Any = self.detector.backbone.maps.body
        if hasattr(body, "set_input_size"):  # position embeddings, which would be resized in the graph
            body.set_input_size(img_size=(size, size))
        self.outputs = OUTPUTS if detector.has_masks else OUTPUTS[:-1]

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """The outputs, in the order of `outputs`."""
        (found,) = self.detector([image])
        return tuple(found[name] for name in self.outputs)


def export_detector(
    detector: SimaRCNN, path: str | Path, *, size: int, classes: Sequence[str], images: Sequence[Image.Image], name: str
) -> DetectorReport:
    """Export a detector to an ONNX file, and compare it with torch first; if it differs, nothing is written.

    Args:
        detector: Its score threshold and its number of detections are part of the file.
        path: Must end in .onnx.
        size: Side of the square image in pixels, a multiple of 32.
        classes: Names of the classes, stored in the file; label k is classes[k - 1].
        images: Photos to compare on. They are resized to fit and padded on the right and below.
        name: Name of the model in the file.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"the file must end in .onnx, got {str(path)!r}")
    if size < STRIDE or size % STRIDE:
        raise ValueError(f"the image size of a detector must be a multiple of {STRIDE}, got {size}")
    check_installed()
    import onnx

    model = OneImage(detector, size).eval()
    inputs = [to_input(image, size) for image in images]
    with atomic_write(path) as written:
        _write_graph(model, inputs[0], written, name)
        proto = onnx.load(written)
        _open_sizes_in_loops(proto.graph)
        facts = {"model": name, "version": __version__, "input_size": f"{size}x{size}", "task": "detection"}
        write_metadata(proto, {**facts, "labels": json.dumps(list(classes))})
        onnx.save(proto, written)
        parity = _parity(model, written, inputs)
        return DetectorReport(path, written.stat().st_size, size, model.outputs, *parity)


def images_of_run(recipe: DetectRecipe, count: int = 4) -> list[Image.Image]:
    """The first images that a run was evaluated on."""
    data = recipe.data
    try:
        source = open_split(data.path, data.eval_splits[0], say=lambda line: None)
        return [source.read(i) for i in range(min(count, len(source)))]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the run's own images cannot be read: {first_line(error)}; give photos to compare on with --data FOLDER"
        ) from error


def to_input(image: Image.Image, size: int) -> Tensor:
    """A photo -> [3, size, size] in [0, 1]: resized to fit, at the top left, zeros in the rest."""
    return pil_to_tensor(ImageOps.pad(image.convert("RGB"), (size, size), centering=(0, 0))).float() / 255


def _write_graph(model: OneImage, example: Tensor, path: Path, name: str) -> None:
    sizes = {output: {0: "objects"} for output in model.outputs}
    torch.onnx.register_custom_op_symbolic("aten::mT", _transpose, 9)  # the older exporter does not know it
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                (example,),
                str(path),
                dynamo=False,
                opset_version=OPSET,
                input_names=["image"],
                output_names=list(model.outputs),
                dynamic_axes=sizes,
            )
    except Exception as error:
        raise ValueError(f"the detector {name} cannot be exported: {first_line(error)}") from error


def _transpose(graph: Any, x: Any) -> Any:
    """ONNX for x.mT."""
    axes = list(range(x.type().dim()))
    return graph.op("Transpose", x, perm_i=[*axes[:-2], axes[-1], axes[-2]])


def _open_sizes_in_loops(graph: onnx.GraphProto) -> None:
    """Make the number of objects in loops dynamic: each step adds a mask, and the recorded shapes are of the first."""
    for node in graph.node:
        for body in (attribute.g for attribute in node.attribute if attribute.HasField("g")):
            for output in body.output:
                output.type.tensor_type.ClearField("shape")
            for given in body.input:
                for size in given.type.tensor_type.shape.dim[:1]:
                    size.dim_param = "objects_so_far"
            _open_sizes_in_loops(body)


def _parity(model: OneImage, path: Path, inputs: Sequence[Tensor]) -> tuple[int, int, dict[str, float]]:
    """Numbers of images and objects, and output -> largest difference from torch; raises if one is too large."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    worst = {output: 0.0 for output in model.outputs if output in LARGEST}
    objects = 0
    for image in inputs:
        with torch.no_grad():
            expected = dict(zip(model.outputs, model(image), strict=True))
        outputs: Any = session.run(None, {"image": image.numpy()})
        found = {output: torch.from_numpy(value) for output, value in zip(model.outputs, outputs, strict=True)}
        for i, j in same_objects(expected, found):
            objects += 1
            for output in worst:
                difference = (expected[output][i] - found[output][j]).abs()
                worst[output] = max(worst[output], float(difference.mean() if output == "masks" else difference.max()))
    for output, error in worst.items():
        if not error <= LARGEST[output]:
            raise ValueError(
                f"the {output} of the exported detector differ from torch by {error:.1e}, and {LARGEST[output]:g} is "
                "allowed: the file was not written"
            )
    return len(inputs), objects, worst


def same_objects(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[tuple[int, int]]:
    """Pairs of indices of the same object in two results; raises if one has an object that the other does not have.

    Objects with nearly equal scores may come in another order.
    """
    same = (box_iou(expected["boxes"], found["boxes"]) > SAME_OBJECT) & (expected["labels"][:, None] == found["labels"])
    distance = (expected["scores"][:, None] - found["scores"]).abs().masked_fill(~same, np.inf)
    counts = len(expected["scores"]), len(found["scores"])
    if counts[0] != counts[1] or not same.any(dim=1).all() or not same.any(dim=0).all():
        raise ValueError(
            f"the exported detector finds other objects than torch, {counts[1]} and {counts[0]}: the file was not "
            "written"
        )
    return list(enumerate(distance.argmin(dim=1).tolist())) if counts[0] else []
