"""Model -> ONNX file: exported, constants folded, compared with torch in ONNX Runtime, audited, then written.

The graph is opset 20 and computes SimA as `ops.eager` does: two sums over the tokens, one vector s, two products.
Shapes: B batch, N tokens, C channels, K classes; images [B, 3, height, width] -> logits [B, K]. A model without a
classifier gives features [B, C] and its final tokens [B, N, C].
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sima_attn import _errors
from sima_attn._errors import check_known, first_line
from sima_attn._files import atomic_write
from sima_attn._version import __version__
from sima_attn.auditing.model import audit, followed
from sima_attn.auditing.report import AuditReport
from sima_attn.conversion.huggingface import is_pretrained_model
from sima_attn.export.photo_graph import PreparePhoto
from sima_attn.export.runtimes import FEATURES, LOGITS, PREFIX, OnnxRuntime
from sima_attn.models.huggingface import TimmInterface, with_timm_interface
from sima_attn.models.loading import classes_of
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn import SimAttention, SimCrossAttention, SimMultiheadAttention
from sima_attn.nn.grid import OnGrid
from sima_attn.nn.image_channels import image_channels
from sima_attn.ops.api import check_order, plan_callback

if TYPE_CHECKING:
    import onnx

OPSET = 20  # the first with GELU as one node; supported by current runtimes
DYNAMIC = ("batch", "size")
LARGEST_ERROR = 1e-4  # relative to the largest value of an output
OUTPUTS = {LOGITS: (LOGITS,), FEATURES: (FEATURES, "tokens")}
LARGEST_ERROR_FROM_PHOTO = 1e-3  # resizing differs in the last bits, which bicubic weights amplify
KEPT_IN_NODES = ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy")  # for the audit
Shape = tuple[int, int, int, int]  # of images: B, C, height, width
WITH_ORDER = (SimAttention, SimCrossAttention, SimMultiheadAttention)


@dataclass(frozen=True)
class ExportReport:
    """The file that was written, and how it was checked.

    Attributes:
        path: The file.
        file_bytes: Its size.
        inputs: Its input, with the names of dynamic sizes.
        outputs: Its outputs: logits, or features and tokens of a model without a classifier.
        orders: SimA module -> order of its products; "kv" is linear in the tokens.
        parity: Input -> largest difference between ONNX Runtime and torch, relative to the largest value of an output.
        nodes: Operation -> number of its nodes in the graph.
        audit: Audit of the file.
    """

    path: Path
    file_bytes: int
    inputs: str
    outputs: str
    orders: dict[str, str]
    parity: dict[str, float]
    nodes: dict[str, int]
    audit: AuditReport

    @property
    def order(self) -> str:
        """The orders of all SimA modules: "kv", "kv, qk", or "-" without SimA."""
        return ", ".join(sorted(set(self.orders.values()))) or "-"

    def lines(self) -> list[str]:
        """A summary, one fact per line."""
        size = f"{self.path}: {self.file_bytes / 2**20:.2f} MiB, {sum(self.nodes.values())} nodes, opset {OPSET}"
        facts = [size, f"input {self.inputs}, output {self.outputs}"]
        if self.orders:
            facts.append(f"order of the products: {self.order} in {len(self.orders)} SimA modules")
        facts += [f"parity with torch on {what}: {error:.1e}" for what, error in self.parity.items()]
        return [*facts, self.audit.summary()]


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    input_size: int | tuple[int, int],
    dynamic: Collection[str] = (),
    order: str = "auto",
    preprocessing: bool = False,
    prepare: Preprocessing | None = None,
    labels: Sequence[str] | None = None,
    unsure_below: float | None = None,
    check_images: Tensor | Sequence[np.ndarray] | None = None,
    fail_on_exp: bool = False,
    name: str | None = None,
) -> ExportReport:
    """Export a model to an ONNX file; the report has its error relative to torch and its exp-like calls.

    The file is compared with torch in ONNX Runtime first; if it differs, nothing is written. The model is not modified.

    Args:
        model: Image -> logits, or features of a model without a classifier; from timm, transformers or here, converted
            or not.
        path: Must end in .onnx.
        input_size: Image size in pixels, or (height, width). It also determines the order of the products.
        dynamic: "batch" and "size" make these dynamic; the order remains the one chosen at `input_size`.
        order: "auto" selects the cheaper order at `input_size`, "kv" or "qk" forces one.
        preprocessing: Include resize, crop and normalization in the graph. The input is then one photo of any size,
            uint8 [height, width, 3].
        prepare: How photos become inputs. By default timm's configuration of the model, cropped to `input_size`.
        labels: Names of the classes, stored in the file. By default `class_names`.
        unsure_below: Probability of the most likely class below which the page in the browser says "unsure", stored in
            the file; None for never.
        check_images: Real images to compare on, in addition to random ones: inputs of the model
            [B, 3, height, width] or, with `preprocessing`, photos [height, width, 3] in uint8.
        fail_on_exp: Raise if the graph has any exp-like node.
        name: Name of the model in the file. By default its class.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"the file must end in .onnx, got {str(path)!r}")
    check_installed()
    import onnx

    name = name or type(model).__name__
    if is_pretrained_model(model):
        model = with_timm_interface(model)
    height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
    _check_options(model, height, width, dynamic, order, preprocessing)
    if prepare is None and height == width:
        prepare = Preprocessing.of_model(model, height)
    if preprocessing and prepare is None:
        raise ValueError(f"{name} does not say how images are normalized: pass prepare=Preprocessing(...)")
    labels = class_names(model) if labels is None else labels

    plain, shape = _inference_copy(model), (1, image_channels(model), height, width)
    with torch.no_grad():
        orders = _pin_orders(plain, order, _random_images(*shape), name)
        values = plain(_random_images(*shape))
    output = FEATURES if isinstance(values, tuple) else LOGITS
    if labels is not None and (output == FEATURES or len(labels) != values.shape[-1]):
        classes = f"{name}, which gives features" if output == FEATURES else f"the {values.shape[-1]} classes of {name}"
        raise ValueError(f"got {len(labels)} labels for {classes}")

    whole = nn.Sequential(PreparePhoto(prepare), plain) if preprocessing and prepare is not None else plain
    example, axes = _example(shape, _patch(model), dynamic, preprocessing)
    with torch.no_grad():
        _run(whole, example, name)
    proto = _to_onnx(whole, example, axes, OUTPUTS[output], name)
    facts = {
        "model": name,
        "version": __version__,
        "input_size": f"{height}x{width}",
        "dynamic": ",".join(dynamic),
        "order": ",".join(sorted(set(orders.values()))),
        "preprocessing_inside": "true" if preprocessing else "false",
        "output": output,
    }
    facts |= {"preprocessing": prepare.to_json()} if prepare is not None else {}
    facts |= {"labels": json.dumps(list(labels))} if labels is not None else {}
    facts |= {"unsure_below": str(unsure_below)} if unsure_below is not None else {}
    write_metadata(proto, facts)

    with atomic_write(path) as written:  # if a check raises, no file is left
        onnx.save(proto, written)
        given = _checked_inputs(shape, dynamic, preprocessing, check_images)
        parity = _parity(whole, written, given, LARGEST_ERROR_FROM_PHOTO if preprocessing else LARGEST_ERROR, name)
        found = audit(written)
        if fail_on_exp and not found.is_exp_free:
            raise ValueError(f"{name} is not exp-free: {found.summary()}; the file was not written")
        return ExportReport(
            path=path,
            file_bytes=written.stat().st_size,
            inputs=_shown(proto.graph.input),
            outputs=_shown(proto.graph.output),
            orders=orders,
            parity=parity,
            nodes=dict(Counter(node.op_type for node in proto.graph.node).most_common()),
            audit=found,
        )


def class_names(model: nn.Module) -> list[str] | None:
    """Names of the classes in timm's configuration of a model, in words where it has them; None without."""
    names, words = classes_of(model)
    return None if names is None else [words.get(name, name) for name in names]


def check_installed() -> None:
    """Raise if a package is missing."""
    _errors.check_installed("an ONNX file", "onnx", "onnxscript", "onnxruntime", extra="onnx")


def write_metadata(proto: onnx.ModelProto, facts: dict[str, str]) -> None:
    """Write facts to the metadata of a graph under our prefix; existing values are replaced."""
    kept = [entry for entry in proto.metadata_props if entry.key.removeprefix(PREFIX) not in facts]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    for key, value in facts.items():
        proto.metadata_props.add(key=PREFIX + key, value=value)


def _check_options(
    model: nn.Module, height: int, width: int, dynamic: Collection[str], order: str, preprocessing: bool
) -> None:
    for option in dynamic:
        check_known("dynamic size", option, DYNAMIC)
    if preprocessing and dynamic:
        raise ValueError(f"a file with preprocessing takes one photo of any size: omit dynamic {', '.join(dynamic)}")
    if preprocessing and height != width:
        raise ValueError(f"preprocessing makes square images: the image size must be one number, got {height}x{width}")
    on_grid = [module for module in model.modules() if isinstance(module, OnGrid)]
    if "size" in dynamic and any(module.grid or module.image_grid is None for module in on_grid):
        raise ValueError(
            "an attention of this model has a fixed token grid, so 'size' cannot be dynamic; export one file per image "
            "size, or omit the option grid and call sima_attn.nn.follow_image_grid(model)"
        )
    patch = _patch(model)
    for side in (height, width):
        if side < 1 or side % patch:
            near = max(patch, side // patch * patch)
            raise ValueError(
                f"the image size must be a multiple of the patch size {patch}, got {side}: use {near} or {near + patch}"
            )
    check_order(order)
    if order != "auto" and not any(isinstance(module, WITH_ORDER) for module in model.modules()):
        raise ValueError(f"order applies to SimA, and {type(model).__name__} has no SimA module: use order='auto'")


def _patch(model: Any) -> int:
    """The patch size, 1 if unknown."""
    if isinstance(model, TimmInterface):
        return model.feature_info[0]["reduction"]
    size = getattr(getattr(model, "patch_embed", None), "patch_size", 1)
    return size if isinstance(size, int) else size[0] if isinstance(size, tuple) else 1


class _Backbone(nn.Module):
    """A model without a classifier, that returns its features [B, C] and its final tokens [B, N, C]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.model, TimmInterface):
            return self.model.features_and_tokens(images)
        tokens = self.model.forward_features(images)  # of timm; of a CNN, a map [B, C, rows, columns]
        return self.model.forward_head(tokens), tokens.flatten(2).mT if tokens.dim() == 4 else tokens


def _inference_copy(model: nn.Module) -> nn.Module:
    """A copy of the model in float32 on the CPU, in eval mode, that returns logits, or features and tokens."""
    plain = copy.deepcopy(getattr(model, "_orig_mod", model)).cpu().float().eval().requires_grad_(False)
    is_backbone = isinstance(plain, TimmInterface) or hasattr(plain, "forward_features")
    return _Backbone(plain) if is_backbone and getattr(plain, "num_classes", None) == 0 else plain


def _random_images(B: int, C: int, height: int, width: int) -> Tensor:
    return torch.randn(B, C, height, width, generator=torch.Generator().manual_seed(0))


def _run(model: nn.Module, images: Tensor, name: str) -> Any:
    """The output for images; raises where the model does not take their size."""
    try:
        return model(images)
    except Exception as error:
        raise ValueError(
            f"{name} cannot run on {tuple(images.shape)}: {first_line(error)}; use the size it was built for, without "
            "'size' in dynamic"
        ) from error


def _pin_orders(model: nn.Module, order: str, images: Tensor, name: str) -> dict[str, str]:
    """Fix the order of each SimA module to the one it selects for these images; path -> order."""
    modules = {path: module for path, module in model.named_modules() if isinstance(module, WITH_ORDER)}
    for module in modules.values():
        module.order = order if order != "auto" else module.order
    found: dict[str, str] = {}
    with followed(model) as (running, _), plan_callback(lambda plan: found.update({running[-1]: plan.order})):
        _run(model, images, name)
    for path, module in modules.items():
        module.order = found.get(path, module.order)
    return found


def _example(
    shape: Shape, patch: int, dynamic: Collection[str], preprocessing: bool
) -> tuple[Tensor, dict[int, Any] | None]:
    """The example input, and its dynamic axes, whose example sizes match no special case of a model."""
    open_axis = torch.export.Dim.DYNAMIC
    B, C, height, width = shape
    if preprocessing:
        photo = torch.zeros(height + 3, width + 7, 3, dtype=torch.uint8)
        return photo, {0: open_axis, 1: open_axis}
    axes: dict[int, Any] = {}
    if "batch" in dynamic:
        B, axes[0] = 2, open_axis
    if "size" in dynamic:
        # Neither square nor the size of the position embedding, so that the graph includes its resize; whole patches.
        step = -(-16 // patch) * patch
        height, width = height + step, width + 2 * step
        axes[2] = axes[3] = open_axis
    return _random_images(B, C, height, width), axes or None


def _to_onnx(
    model: nn.Module, example: Tensor, axes: dict[int, Any] | None, outputs: tuple[str, ...], name: str
) -> onnx.ModelProto:
    from onnxscript import optimizer

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model,
                (example,),
                dynamo=True,
                opset_version=OPSET,
                dynamic_shapes=None if axes is None else (axes,),
                input_names=["photo" if example.dtype == torch.uint8 else "images"],
                output_names=outputs,
                verbose=False,
            )
    except Exception as error:
        raise ValueError(f"{name} cannot be exported: {first_line(error)}") from error
    assert program is not None  # with dynamo=True it never is
    # torch's exporter folds small constants only; resized position embeddings and Fourier features are larger.
    optimizer.fold_constants(program.model, input_size_limit=sys.maxsize, output_size_limit=sys.maxsize)
    optimizer.remove_unused_nodes(program.model)
    proto = program.model_proto
    for node in proto.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key in KEPT_IN_NODES]
        del node.metadata_props[:]  # the rest is source code and local paths
        node.metadata_props.extend(kept)
        node.ClearField("doc_string")
    is_photo = example.dtype == torch.uint8
    _name_open_sizes(proto.graph.input[0], ("height", "width", "") if is_photo else ("batch", "", "height", "width"))
    for value in proto.graph.output:  # [B, K], [B, C] or [B, N, C]
        axes_of_output = len(value.type.tensor_type.shape.dim)
        _name_open_sizes(value, ("batch", "") if axes_of_output == 2 else ("batch", "tokens", ""))
    return proto


def _name_open_sizes(value: onnx.ValueInfoProto, names: tuple[str, ...]) -> None:
    """Name the dynamic sizes of an input or output."""
    for size, name in zip(value.type.tensor_type.shape.dim, names, strict=True):
        if size.dim_param and name:
            size.dim_param = name


def _shown(values: Iterable[onnx.ValueInfoProto]) -> str:
    """Inputs or outputs of a graph with their sizes, such as "features 1x384, tokens 1x257x384"."""

    def sizes(value: onnx.ValueInfoProto) -> str:
        return "x".join(size.dim_param or str(size.dim_value) for size in value.type.tensor_type.shape.dim)

    return ", ".join(f"{value.name} {sizes(value)}" for value in values)


def _checked_inputs(
    shape: Shape,
    dynamic: Collection[str],
    preprocessing: bool,
    given: Tensor | Sequence[np.ndarray] | None,
) -> Iterator[tuple[str, Tensor]]:
    """(description, input) of all inputs to compare on."""
    _, C, height, width = shape
    if preprocessing:
        draw = np.random.default_rng(0)
        for rows, columns in ((height, width), (2 * height + 1, width + 3), (height // 2 + 1, 2 * width)):
            photo = draw.integers(0, 256, (rows, columns, 3), dtype=np.uint8)
            yield f"a random photo {rows}x{columns}", torch.from_numpy(photo)
        for i, real in enumerate(() if given is None else given):
            yield f"given photo {i + 1}, {real.shape[0]}x{real.shape[1]}", torch.from_numpy(np.array(real))
        return
    sizes = [(1, height, width)]
    if "batch" in dynamic:
        sizes.append((3, height, width))
    if "size" in dynamic:
        sizes += [(1, 2 * height, width), (1, height, 3 * width)]
    for B, rows, columns in sizes:
        yield f"random images {B}x{C}x{rows}x{columns}", _random_images(B, C, rows, columns)
    if given is not None:
        images = torch.as_tensor(np.stack(list(given)) if not isinstance(given, Tensor) else given).float()
        B = len(images) if "batch" in dynamic else 1
        for i, part in enumerate(images.split(B)):
            yield f"given images {i * B + 1} to {i * B + len(part)}", part


def _parity(
    model: nn.Module, path: Path, inputs: Iterable[tuple[str, Tensor]], largest: float, name: str
) -> dict[str, float]:
    """Input -> relative error of the file; raises if it is too large. Given images share one entry."""
    session = OnnxRuntime(path, threads=torch.get_num_threads())
    errors: dict[str, float] = {}
    given: list[float] = []
    for what, images in inputs:
        with torch.no_grad():
            truth = model(images)
        truths = [value.numpy() for value in (truth if isinstance(truth, tuple) else (truth,))]
        found = session.outputs(images.numpy())
        for out, true in zip(found, truths, strict=True):
            if out.shape != true.shape:
                raise ValueError(f"{name} returns {true.shape} in torch and {out.shape} in ONNX Runtime on {what}")
        # The largest of the differences, NaN if one of them is.
        error = float(np.max([relative_error(out, true) for out, true in zip(found, truths, strict=True)]))
        if not error <= largest:  # NaN too
            raise ValueError(
                f"the exported {name} differs from torch by {error:.1e} of the largest output on {what}, more than "
                f"{largest:g}: the file was not written"
            )
        if what.startswith("given"):
            given.append(error)
        else:
            errors[what] = error
    if given:
        errors[f"{len(given)} given inputs, the worst"] = max(given)
    return errors


def relative_error(found: np.ndarray, true: np.ndarray) -> float:
    """The largest difference, relative to the largest true value."""
    return float(np.abs(found - true).max() / np.abs(true).max().clip(1e-12))
