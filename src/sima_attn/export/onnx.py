"""Model -> ONNX file that is right: exported, folded, compared with torch in ONNX Runtime, audited, then put in place.

The graph is opset 20 and holds SimA as `ops.eager` computes it: two sums over the tokens, one vector s, two products.
Shapes: B batch, N tokens, K classes; images [B, 3, height, width] -> logits [B, K].
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sima_attn._errors import unknown_name
from sima_attn._files import atomic_write
from sima_attn._version import __version__
from sima_attn.auditing.model import audit
from sima_attn.auditing.report import AuditReport
from sima_attn.export.photo_graph import PreparePhoto
from sima_attn.export.runtimes import PREFIX, open_model
from sima_attn.models.loading import classes_of
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn import SimAttention, SimCrossAttention, SimMultiheadAttention
from sima_attn.ops.api import Plan, check_order, plan_callback

if TYPE_CHECKING:
    import onnx

Result = TypeVar("Result")

OPSET = 20  # the first with GELU as one node; every runtime of today reads it
DYNAMIC = ("batch", "size")
LARGEST_ERROR = 1e-4  # of the largest logit
LARGEST_ERROR_FROM_PHOTO = 1e-3  # resizing differs in the last bits, which bicubic weights enlarge
KEPT_IN_NODES = ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy")  # what the audit reads
WITH_ORDER = (SimAttention, SimCrossAttention, SimMultiheadAttention)


@dataclass(frozen=True)
class ExportReport:
    """What was written, and the proof that it is right.

    Attributes:
        path: The file.
        file_bytes: Its size.
        inputs: Its input, open sizes by name.
        orders: SimA module -> order of its products; "kv" is linear in the tokens.
        parity: Input that was compared -> largest difference between ONNX Runtime and torch over the largest logit.
        nodes: Operation -> how often it is in the graph.
        audit: Of the file.
    """

    path: Path
    file_bytes: int
    inputs: str
    orders: dict[str, str]
    parity: dict[str, float]
    nodes: dict[str, int]
    audit: AuditReport

    @property
    def order(self) -> str:
        """The orders of all SimA modules in one word or two: "kv", "kv, qk", or "-" without SimA."""
        return ", ".join(sorted(set(self.orders.values()))) or "-"

    def lines(self) -> list[str]:
        """What a user should read, one fact a line."""
        size = f"{self.path}: {self.file_bytes / 2**20:.2f} MiB, {sum(self.nodes.values())} nodes, opset {OPSET}"
        facts = [size, f"input {self.inputs}"]
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
    check_images: Tensor | Sequence[np.ndarray] | None = None,
    fail_on_exp: bool = False,
    name: str | None = None,
) -> ExportReport:
    """Write a model as an ONNX file, and say how far it is from torch and whether it is free of exp().

    The file is compared with torch in ONNX Runtime before it gets its name: one that differs is never left behind.
    The model itself is not touched.

    Args:
        model: Image -> logits (or an output of transformers with `logits`), from timm, from here or converted.
        path: Must end in .onnx.
        input_size: Side of the images in pixels, or (height, width). It decides the order of the products too.
        dynamic: "batch" and "size" leave these open. Every size is then right, in the order chosen at `input_size`.
        order: "auto" takes the cheaper order at `input_size`, "kv" or "qk" forces one.
        preprocessing: Put resize, crop and normalisation into the graph. The input then is one photo of any size,
            bytes [height, width, 3].
        prepare: How photos become inputs. By default timm's configuration of the model, cropped to `input_size`.
        labels: Names of the classes, kept in the file. By default `class_names`.
        check_images: Real images to compare on, besides random ones: [B, 3, height, width] as the model takes them,
            or with `preprocessing` photos [height, width, 3] in bytes.
        fail_on_exp: Raise if anything in the whole graph is exp-like.
        name: What the file calls the model. By default its class.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"the file must end in .onnx, got {str(path)!r}")
    check_installed()
    height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
    _check_options(model, height, width, dynamic, order, preprocessing)
    if prepare is None and height == width:
        prepare = Preprocessing.of_model(model, height)
    if preprocessing and prepare is None:
        raise ValueError(
            f"{type(model).__name__} does not say how its images are normalised: pass prepare=Preprocessing(...)"
        )
    labels = labels or class_names(model)

    name = name or type(model).__name__
    plain = _inference_copy(model)
    with torch.no_grad():
        orders = _pin_orders(plain, order, _random_images(1, height, width))
        classes = plain(_random_images(1, height, width)).shape[-1]
    if labels is not None and len(labels) != classes:
        raise ValueError(f"there are {len(labels)} labels for the {classes} classes of {name}")

    whole = nn.Sequential(PreparePhoto(prepare), plain) if preprocessing and prepare is not None else plain
    example, shapes = _example(model, height, width, dynamic, preprocessing)
    proto = _to_onnx(whole, example, shapes, name)
    fold_constants(proto)
    facts = {
        "model": name,
        "version": __version__,
        "input_size": f"{height}x{width}",
        "dynamic": ",".join(dynamic),
        "order": ",".join(sorted(set(orders.values()))),
        "preprocessing_inside": "true" if preprocessing else "false",
    }
    facts |= {"preprocessing": prepare.to_json()} if prepare is not None else {}
    facts |= {"labels": json.dumps(list(labels))} if labels is not None else {}
    write_metadata(proto, facts)

    def check(written: Path) -> ExportReport:
        given = _checked_inputs(height, width, dynamic, preprocessing, check_images)
        parity = _parity(whole, written, given, LARGEST_ERROR_FROM_PHOTO if preprocessing else LARGEST_ERROR, name)
        found = audit(written)
        if fail_on_exp and not found.is_exp_free:
            raise ValueError(f"{name} is not exp-free: {found.summary()}; the file was not written")
        return ExportReport(
            path=path,
            file_bytes=written.stat().st_size,
            inputs=_shown_input(proto),
            orders=orders,
            parity=parity,
            nodes=dict(Counter(node.op_type for node in proto.graph.node).most_common()),
            audit=found,
        )

    return write_checked(proto, path, check)


def class_names(model: nn.Module) -> list[str] | None:
    """Names of the classes in timm's configuration of a model, in words where it has them; None without."""
    names, words = classes_of(model)
    return None if names is None else [words.get(name, name) for name in names]


def check_installed() -> None:
    """Say what is missing before anything is built."""
    missing = []
    for package in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise ValueError(f"ONNX files need {', '.join(missing)}, not installed here: pip install 'sima-attn[onnx]'")


def write_checked(proto: onnx.ModelProto, path: Path, check: Callable[[Path], Result]) -> Result:
    """Write a graph beside `path`, check it there, and give it its name only if the check does not raise."""
    import onnx

    with atomic_write(path) as temporary:
        onnx.save(proto, temporary)
        return check(temporary)


def write_metadata(proto: onnx.ModelProto, facts: dict[str, str]) -> None:
    """Put facts into a graph under our prefix, in the place of what was there."""
    kept = [entry for entry in proto.metadata_props if entry.key.removeprefix(PREFIX) not in facts]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    for key, value in facts.items():
        proto.metadata_props.add(key=PREFIX + key, value=value)


def fold_constants(proto: onnx.ModelProto) -> None:
    """Compute what does not depend on the input (resized position embeddings, Fourier features), in ONNX Runtime."""
    import onnx
    import onnxruntime

    graph = proto.graph
    known = {weight.name for weight in graph.initializer}
    constant: list[onnx.NodeProto] = []
    rest: list[onnx.NodeProto] = []
    for node in graph.node:  # in the order of computation
        has_body = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        if known.issuperset(filter(None, node.input)) and not has_body:
            constant.append(node)
            known.update(node.output)
        else:
            rest.append(node)
    if not constant:
        return
    needed = {name for node in rest for name in node.input} | {value.name for value in graph.output}
    wanted = [name for node in constant for name in node.output if name in needed]
    small = onnx.ModelProto()
    small.CopyFrom(proto)
    del small.graph.node[:], small.graph.input[:], small.graph.output[:], small.graph.value_info[:]
    small.graph.node.extend(constant)
    small.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in wanted)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(small.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = session.run(wanted, {})

    del graph.node[:]
    graph.node.extend(rest)
    graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in zip(wanted, values, strict=True))
    used = [weight for weight in graph.initializer if weight.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(used)


def _check_options(
    model: nn.Module, height: int, width: int, dynamic: Collection[str], order: str, preprocessing: bool
) -> None:
    for option in dynamic:
        if option not in DYNAMIC:
            raise unknown_name("dynamic size", option, DYNAMIC)
    if preprocessing and (dynamic or height != width):
        raise ValueError(
            "pre-processing inside the graph makes one square image of each photo: input_size must be one number and "
            f"dynamic empty, got {height}x{width} and {', '.join(dynamic) or 'none'}"
        )
    patch = _patch(model)
    for side in (height, width):
        if side < 1 or side % patch:
            near = max(patch, side // patch * patch)
            raise ValueError(
                f"a side of {side} pixels is no multiple of the patch, {patch}: take {near} or {near + patch}"
            )
    check_order(order)
    if order != "auto" and not any(isinstance(module, WITH_ORDER) for module in model.modules()):
        raise ValueError(f"order is SimA's own, and {type(model).__name__} has no SimA module: leave it at 'auto'")


def _patch(model: Any) -> int:
    """The side of a patch, 1 for models that do not say."""
    size = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    size = getattr(getattr(model, "config", None), "patch_size", 1) if size is None else size
    return size if isinstance(size, int) else size[0] if isinstance(size, tuple) else 1


class _Logits(nn.Module):
    """A model whose output is not a tensor, but holds the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


def _inference_copy(model: nn.Module) -> nn.Module:
    """The model in float32 on the CPU, in eval mode, giving logits; the caller's stays as it is."""
    plain = copy.deepcopy(getattr(model, "_orig_mod", model)).cpu().float().eval().requires_grad_(False)
    return _Logits(plain) if hasattr(plain, "config") and hasattr(plain.config, "model_type") else plain


def _random_images(B: int, height: int, width: int) -> Tensor:
    return torch.randn(B, 3, height, width, generator=torch.Generator().manual_seed(0))


def _pin_orders(model: nn.Module, order: str, images: Tensor) -> dict[str, str]:
    """Fix the order of every SimA module to the one it takes for these images; path -> order."""
    modules = {path: module for path, module in model.named_modules() if isinstance(module, WITH_ORDER)}
    for module in modules.values():
        module.order = order if order != "auto" else module.order
    found: dict[str, str] = {}
    running = [""]

    def watch(plan: Plan) -> None:
        caller = running[-1] or f"call {len(found) + 1}"  # transformers' attentions are functions, not modules
        found[caller] = plan.order

    with contextlib.ExitStack() as stack:
        stack.enter_context(plan_callback(watch))
        for path, module in modules.items():
            stack.callback(module.register_forward_pre_hook(lambda *_, path=path: running.append(path)).remove)
            stack.callback(module.register_forward_hook(lambda *_: running.pop() and None).remove)
        try:
            model(images)
        except Exception as error:
            raise ValueError(
                f"{type(model).__name__} cannot run on {tuple(images.shape)}: {_first_line(error)}; take the size it "
                "was built for"
            ) from error
    for path, module in modules.items():
        module.order = found.get(path, module.order)
    return found


def _example(
    model: nn.Module, height: int, width: int, dynamic: Collection[str], preprocessing: bool
) -> tuple[Tensor, dict[int, Any] | None]:
    """The input that is traced, and its open axes. An open axis has a size that no branch of a model asks for."""
    open_axis = torch.export.Dim.DYNAMIC
    if preprocessing:
        photo = torch.zeros(height + 3, width + 7, 3, dtype=torch.uint8)
        return photo, {0: open_axis, 1: open_axis}
    axes: dict[int, Any] = {}
    B = 1
    if "batch" in dynamic:
        B, axes[0] = 2, open_axis
    if "size" in dynamic:
        # Neither square nor the size of the position embedding: then its resize is in the graph.
        step = max(16, _patch(model))
        height, width = height + step, width + 2 * step
        axes[2] = axes[3] = open_axis
    return _random_images(B, height, width), axes or None


def _to_onnx(model: nn.Module, example: Tensor, axes: dict[int, Any] | None, name: str) -> onnx.ModelProto:
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
                output_names=["logits"],
                verbose=False,
            )
    except Exception as error:
        raise ValueError(f"{name} cannot be exported: {_first_line(error)}") from error
    assert program is not None  # with dynamo=True it never is
    proto = program.model_proto
    for node in proto.graph.node:
        kept = [entry for entry in node.metadata_props if entry.key in KEPT_IN_NODES]
        del node.metadata_props[:]  # the rest is source code and the paths of this machine
        node.metadata_props.extend(kept)
        node.ClearField("doc_string")
    _name_open_sizes(proto.graph.input[0], example)
    return proto


def _name_open_sizes(value: onnx.ValueInfoProto, example: Tensor) -> None:
    """Call the open sizes of the input what they are."""
    names = ["height", "width", ""] if example.dtype == torch.uint8 else ["batch", "", "height", "width"]
    for size, name in zip(value.type.tensor_type.shape.dim, names, strict=True):
        if size.dim_param and name:
            size.dim_param = name


def _shown_input(proto: onnx.ModelProto) -> str:
    value = proto.graph.input[0]
    sizes = [size.dim_param or str(size.dim_value) for size in value.type.tensor_type.shape.dim]
    return f"{value.name} {'x'.join(sizes)}"


def _checked_inputs(
    height: int,
    width: int,
    dynamic: Collection[str],
    preprocessing: bool,
    given: Tensor | Sequence[np.ndarray] | None,
) -> Iterator[tuple[str, Tensor]]:
    """(what it is, input) of everything that is compared."""
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
        yield f"random images {B}x3x{rows}x{columns}", _random_images(B, rows, columns)
    if given is not None:
        images = torch.as_tensor(np.stack(list(given)) if not isinstance(given, Tensor) else given).float()
        B = len(images) if "batch" in dynamic else 1
        for i, part in enumerate(images.split(B)):
            yield f"given images {i * B + 1} to {i * B + len(part)}", part


def _parity(
    model: nn.Module, path: Path, inputs: Iterable[tuple[str, Tensor]], largest: float, name: str
) -> dict[str, float]:
    """Input -> relative error of the file; raises where it is more than rounding. Given images share one entry."""
    session = open_model(path, threads=torch.get_num_threads())
    errors: dict[str, float] = {}
    given: list[float] = []
    for what, images in inputs:
        with torch.no_grad():
            truth = model(images).numpy()
        out = session(images.numpy())
        if out.shape != truth.shape:
            raise ValueError(f"{name} gives {truth.shape} in torch and {out.shape} in ONNX Runtime on {what}")
        error = float(np.abs(out - truth).max() / np.abs(truth).max().clip(1e-12))
        if not error <= largest:  # NaN too
            raise ValueError(
                f"the exported {name} differs from torch by {error:.1e} of the largest logit on {what}, more than "
                f"{largest:g}: the file was not written"
            )
        if what.startswith("given"):
            given.append(error)
        else:
            errors[what] = error
    if given:
        errors[f"{len(given)} given inputs, the worst"] = max(given)
    return errors


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
