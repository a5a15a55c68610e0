"""ONNX file in float32 -> the same in int8: static quantisation, per-channel weights, and what it costs in accuracy.

Every product with a weight (the projections, the MLPs, the convolutions) runs in int8. What depends on two
activations stays in float32: of SimA these are the sums over the tokens, s = 1 / (|Q|_1 |K|_1), whose values are far
below the step of any 8-bit scale, and the two products around it, which are a few percent of all multiplications.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sima_attn.export.audit_model import audit
from sima_attn.export.onnx import check_installed, write_checked, write_metadata
from sima_attn.export.preprocessing import Preprocessing
from sima_attn.export.runtimes import Session, labels_in, open_model, read_metadata

if TYPE_CHECKING:
    import onnx

LEAST_IMAGES = 32
PRODUCTS = ("Gemm", "MatMul", "Conv")
NO_LABELS = float("nan")


@dataclass(frozen=True)
class QuantizeReport:
    """An int8 file beside the float32 file it was made of; accuracies in percent, NaN where there are no labels."""

    model: str
    file: str
    fp32_mib: float
    int8_mib: float
    share_of_size: float
    calibration_images: int
    compared_images: int
    agreement: float  # images on which both files have the same first class, in percent
    top1_fp32: float
    top1_int8: float
    quantised_products: int
    float_products: int
    exp_like_nodes: int

    def summary(self) -> str:
        """Size and accuracy in one line."""
        size = f"{self.fp32_mib:.2f} -> {self.int8_mib:.2f} MiB ({self.share_of_size:.0%})"
        if not self.compared_images:
            return f"{size}; not compared on images"
        same = f"same first class on {self.agreement:.1f} % of {self.compared_images} images"
        if np.isnan(self.top1_fp32):
            return f"{size}; {same}"
        return f"{size}; top-1 {self.top1_fp32:.2f} -> {self.top1_int8:.2f}, {same}"


class Images:
    """Inputs for an ONNX file from a data folder, decoded when they are asked for; `labels` is None without any."""

    def __init__(self, read: Callable[[int], np.ndarray], size: int, labels: list[int] | None) -> None:
        self.read, self.size, self.labels = read, size, labels

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.read, range(self.size))


def open_images(
    data: str | Path, metadata: dict[str, str], *, split: str = "val", most: int | None = None, seed: int = 0
) -> Images:
    """Images of a data folder as an exported file takes them; `most` of them, drawn at random.

    The folder is one that `sima train` reads, or one with image files in it, which then have no labels.
    """
    from PIL import Image

    from sima_attn.train.data.sources import IMAGE_ENDINGS, open_data

    if "preprocessing" not in metadata:
        raise ValueError("the file does not say how its images are prepared: export it again with `sima export`")
    transform = Preprocessing.from_json(metadata["preprocessing"]).transform()
    raw = metadata.get("preprocessing_inside") == "true"
    root = Path(data)
    files = sorted(p for p in root.glob("*") if p.suffix.lower() in IMAGE_ENDINGS) if root.is_dir() else []
    source = None if files else open_data(data, split)
    total = len(files) if source is None else len(source)
    chosen = np.random.default_rng(seed).permutation(total)[: total if most is None else most]

    def read(index: int) -> np.ndarray:
        place = int(chosen[index])
        image = Image.open(files[place]).convert("RGB") if source is None else source.read(place)
        return np.asarray(image) if raw else transform(image).numpy()

    return Images(read, len(chosen), None if source is None else source.labels[chosen].tolist())


def quantize_onnx(
    fp32_path: str | Path,
    int8_path: str | Path,
    calibration_images: Collection[np.ndarray] | Images,
    *,
    compare_images: Collection[np.ndarray] | Images = (),
    compare_labels: Sequence[int] | None = None,
    reduce_range: bool = False,
    least_images: int = LEAST_IMAGES,
    on_image: Callable[[], object] = lambda: None,
) -> QuantizeReport:
    """Write the int8 form of an exported file, and compare the two.

    Args:
        fp32_path: A file that `export_onnx` wrote.
        int8_path: Must end in .onnx.
        calibration_images: From the training data: the ranges of all activations are read off them. Each as the
            file takes it, without the batch axis: [3, height, width], or a photo [height, width, 3] in bytes.
        compare_images: Images on which both files are run.
        compare_labels: Their classes, for accuracy.
        reduce_range: Weights of 7 bits, for x86 processors without VNNI, whose 8-bit products saturate.
        least_images: Fewer calibration images are an error.
        on_image: Called after each image of calibration and comparison.
    """
    check_installed()
    fp32_path, int8_path = Path(fp32_path), Path(int8_path)
    if int8_path.suffix != ".onnx" or int8_path == fp32_path:
        raise ValueError(f"the int8 file must end in .onnx and be another than {fp32_path}, got {str(int8_path)!r}")
    if len(calibration_images) < least_images:
        raise ValueError(
            f"{len(calibration_images)} calibration images are too few to tell the ranges of the activations: give "
            f"at least {least_images}, better some hundred"
        )
    if compare_labels is not None and len(compare_labels) != len(compare_images):
        raise ValueError(f"there are {len(compare_labels)} labels for {len(compare_images)} images")
    fp32 = open_model(fp32_path, threads=_threads())
    if fp32.metadata.get("precision") == "int8":
        raise ValueError(f"{fp32_path} is in int8 already: give the float32 file it was made of")
    batches = (_as_input(image, fp32) for image in calibration_images)
    proto = quantized_graph(fp32_path, batches, reduce_range=reduce_range, on_image=on_image)
    write_metadata(proto, {"precision": "int8", "calibration_images": str(len(calibration_images))})

    def check(written: Path) -> QuantizeReport:
        int8 = open_model(written, threads=_threads())
        found = _compare(fp32, int8, compare_images, compare_labels, on_image)
        sizes = fp32_path.stat().st_size, written.stat().st_size
        quantised, in_float = _count_products(proto)
        return QuantizeReport(
            model=fp32.metadata.get("model", fp32_path.stem),
            file=int8_path.name,
            fp32_mib=round(sizes[0] / 2**20, 3),
            int8_mib=round(sizes[1] / 2**20, 3),
            share_of_size=round(sizes[1] / sizes[0], 3),
            calibration_images=len(calibration_images),
            compared_images=len(compare_images),
            agreement=found[0],
            top1_fp32=found[1],
            top1_int8=found[2],
            quantised_products=quantised,
            float_products=in_float,
            exp_like_nodes=len(audit(written).calls),
        )

    return write_checked(proto, int8_path, check)


def quantized_graph(
    path: Path,
    batches: Iterator[np.ndarray],
    *,
    reduce_range: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> onnx.ModelProto:
    """The graph of a file with every product with a weight in int8, activations in unsigned bytes."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(batches, None)
            if batch is None:
                return None
            on_image()
            return {input_name: batch}

    proto = onnx.load(path)
    input_name = proto.graph.input[0].name
    linear_layers_as_gemm(proto)
    weights = {weight.name for weight in proto.graph.initializer}
    chosen = [node.name for node in proto.graph.node if node.op_type in PRODUCTS and node.input[1] in weights]
    with tempfile.TemporaryDirectory() as folder, _quiet():
        before, after = Path(folder) / "before.onnx", Path(folder) / "after.onnx"
        onnx.save(proto, before)
        quantize_static(
            before,
            after,
            Reader(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=reduce_range,
            nodes_to_quantize=chosen,
            # Results of linear layers stay in float32: more exact, and no slower, since the next norm needs them so.
            extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},
        )
        return onnx.load(after)


def linear_layers_as_gemm(proto: onnx.ModelProto) -> None:
    """Write MatMul + bias on tokens [B, N, C] as one Gemm on [B * N, C]: ONNX Runtime's int8 form of a linear layer.

    Left as two nodes, it would fuse them to a float32 Gemm, and the weights would go back to float32 in every call.
    """
    import onnx
    from onnx import helper, numpy_helper

    graph = onnx.shape_inference.infer_shapes(proto).graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.output)}
    weights = {weight.name: tuple(weight.dims) for weight in proto.graph.initializer}
    uses = Counter(name for node in proto.graph.node for name in node.input)
    producers = {name: node for node in proto.graph.node for name in node.output}

    def layer_before(add: onnx.NodeProto) -> tuple[onnx.NodeProto, str] | None:
        """The MatMul and the bias whose sum a node is, where it is one."""
        if add.op_type != "Add":
            return None
        for product, bias in (tuple(add.input), tuple(reversed(add.input))):
            node = producers.get(product)
            if node is None or node.op_type != "MatMul" or uses[product] != 1 or product not in shapes:
                continue
            if len(weights.get(node.input[1], ())) == 2 and len(weights.get(bias, ())) == 1:
                return node, bias
        return None

    def constant(name: str, sizes: list[int]) -> str:
        proto.graph.initializer.append(numpy_helper.from_array(np.array(sizes, dtype=np.int64), name))
        return name

    nodes: dict[str, list[onnx.NodeProto]] = {}  # first output of a node -> what stands in its place
    for node in proto.graph.node:
        found = layer_before(node)
        if found is None:
            nodes[node.output[0]] = [node]
            continue
        product, bias = found
        name, (tokens, weight) = product.output[0], product.input
        out_shape = [size.dim_value if size.HasField("dim_value") else -1 for size in shapes[name]]
        flat = constant(f"{name}_flat_shape", [-1, weights[weight][0]])
        new = [helper.make_node("Reshape", [tokens, flat], [f"{name}_flat"])]
        gemm = helper.make_node("Gemm", [f"{name}_flat", weight, bias], [f"{name}_gemm"], name=f"{name}_gemm")
        gemm.metadata_props.extend(product.metadata_props)
        if out_shape.count(-1) > 1:  # one size can be left to Reshape, more must be read off the tokens
            new.append(helper.make_node("Shape", [tokens], [f"{name}_leading"], start=0, end=-1))
            width = constant(f"{name}_width", [out_shape[-1]])
            new.append(helper.make_node("Concat", [f"{name}_leading", width], [f"{name}_shape"], axis=0))
            shape = f"{name}_shape"
        else:
            shape = constant(f"{name}_shape", out_shape)
        del nodes[name]
        nodes[node.output[0]] = [*new, gemm, helper.make_node("Reshape", [f"{name}_gemm", shape], [node.output[0]])]
    del proto.graph.node[:], proto.graph.value_info[:]
    proto.graph.node.extend(node for group in nodes.values() for node in group)


def _count_products(proto: onnx.ModelProto) -> tuple[int, int]:
    """Products whose weight comes from bytes, and those in float32."""
    from_bytes = {node.output[0] for node in proto.graph.node if node.op_type == "DequantizeLinear"}
    found = [node.input[1] in from_bytes for node in proto.graph.node if node.op_type in PRODUCTS]
    return sum(found), len(found) - sum(found)


def _as_input(image: np.ndarray, session: Session) -> np.ndarray:
    """One image as the file takes it, or an error that says what it takes."""
    fitting = len(session.input_shape) - (session.metadata.get("preprocessing_inside") != "true")
    if image.ndim != fitting:
        raise ValueError(f"images must have {fitting} axes for an input {session.input_shape}, got {image.shape}")
    return image if fitting == len(session.input_shape) else image[None].astype(np.float32)


def _compare(
    fp32: Session,
    int8: Session,
    images: Iterable[np.ndarray],
    labels: Sequence[int] | None,
    on_image: Callable[[], object],
) -> tuple[float, float, float]:
    """Agreement of the first class, and top-1 of both, in percent."""
    firsts = []
    for image in images:
        batch = _as_input(image, fp32)
        firsts.append((int(fp32(batch).argmax()), int(int8(batch).argmax())))
        on_image()
    if not firsts:
        return NO_LABELS, NO_LABELS, NO_LABELS
    theirs, ours = np.array(firsts).T
    agreement = round(100 * float((theirs == ours).mean()), 2)
    if labels is None:
        return agreement, NO_LABELS, NO_LABELS
    known = labels_in(fp32.metadata)
    if known is not None and max(labels) >= len(known):
        raise ValueError(f"the images have labels up to {max(labels)}, the file has {len(known)} classes")
    truth = np.asarray(labels)
    return agreement, *(round(100 * float((first == truth).mean()), 2) for first in (theirs, ours))  # type: ignore[return-value]


def _threads() -> int:
    import torch

    return torch.get_num_threads()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without ONNX Runtime's advice to run a pre-processing that these graphs do not need."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def metadata_of(path: str | Path) -> dict[str, str]:
    """The facts in an exported file, or an error that says it is not there."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}: write it with `sima export MODEL -o {path}`")
    return read_metadata(path)
