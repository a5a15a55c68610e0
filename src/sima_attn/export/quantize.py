"""ONNX file in float32 -> int8: static quantization with per-channel weights, and its effect on accuracy.

All products with a weight (projections, MLPs, convolutions) run in int8. Products of two activations stay in float32:
in SimA these are s = 1 / (|Q|_1 |K|_1), whose values are far below the step of any 8-bit scale, and the two products
around it, which are a few percent of all multiplications.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from sima_attn._files import atomic_write
from sima_attn._version import __version__
from sima_attn.auditing.model import audit
from sima_attn.data.images import images_in, open_photo
from sima_attn.data.settings import Data
from sima_attn.export.onnx import check_installed, write_metadata
from sima_attn.export.runtimes import FEATURES, Session, labels_in, open_model
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.report.rows import cpu_name, today
from sima_attn.report.tables import TextTable

if TYPE_CHECKING:
    import onnx

MIN_IMAGES = 32
MAX_BATCH = 16  # for files with a dynamic batch size
PRODUCTS = ("Gemm", "MatMul", "Conv")
FP32, INT8 = "fp32", "int8"
UNKNOWN = float("nan")


@dataclass(frozen=True)
class FileRow:
    """A file and its accuracy on `images` val images, in percent; NaN without images or labels, and for features.

    `share_of_fp32`, `points_lost` (of top-1), `same_class` and `cosine` are relative to the original float32 file.
    """

    model: str
    format: str  # fp32 or int8
    file: str
    bytes: int
    share_of_fp32: float
    top1: float
    top5: float
    points_lost: float
    same_class: float  # share of images with the same first class as float32
    cosine: float  # of the features, mean over the images; NaN for logits
    images: int
    data: str
    calibration_images: int
    settings: str
    int8_products: int
    float_products: int
    exp_like_nodes: int
    device: str
    onnxruntime: str
    sima_attn: str
    date: str


class QuantizeReport(NamedTuple):
    """The float32 file and the int8 file."""

    fp32: FileRow
    int8: FileRow

    def summary(self) -> str:
        """Size and accuracy in one line."""
        sizes = " -> ".join(f"{row.bytes / 2**20:.2f}" for row in self)
        size = f"{sizes} MiB ({self.int8.share_of_fp32:.1%})"
        if not self.int8.images:
            return f"{size}; not compared on images"
        if not np.isnan(self.int8.cosine):
            return f"{size}; cosine of the features {self.int8.cosine:.4f} on {self.int8.images} images"
        same = f"same first class on {self.int8.same_class:.1f} % of {self.int8.images} images"
        if np.isnan(self.int8.top1):
            return f"{size}; {same}"
        return f"{size}; top-1 {self.fp32.top1:.2f} -> {self.int8.top1:.2f}, {same}"


def quantize_table(rows: Sequence[FileRow]) -> TextTable:
    """Size and accuracy of each file; int8 in bold. Files of features have a cosine, and no top-1."""
    columns = {"top-1": "top1", "top-5": "top5", "lost": "points_lost", "same class": "same_class", "cosine": "cosine"}
    columns = {title: name for title, name in columns.items() if any(not np.isnan(getattr(row, name)) for row in rows)}
    header = ["model", "type", "MiB", "of fp32", *columns, "images", "exp-like"]
    lines = [
        [row.model, row.format, f"{row.bytes / 2**20:.2f}", f"{row.share_of_fp32:.1%}"]
        + [_shown(name, getattr(row, name)) for name in columns.values()]
        + [str(row.images), str(row.exp_like_nodes)]
        for row in rows
    ]
    return TextTable(header, lines, {i for i, row in enumerate(rows) if row.format == INT8})


def _shown(column: str, value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.{4 if column == 'cosine' else 2}f}"


class Images:
    """Inputs for an ONNX file from a data folder, decoded on access; `labels` is None if there are none."""

    def __init__(self, read: Callable[[int], np.ndarray], size: int, labels: list[int] | None) -> None:
        self.read, self.size, self.labels = read, size, labels

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[np.ndarray]:
        return map(self.read, range(self.size))


def open_images(
    data: str | Path, metadata: dict[str, str], *, split: str = "val", most: int | None = None, seed: int = 0
) -> Images:
    """Images of a data folder as inputs of an exported file; `most` of them, selected at random.

    The folder has a format of `sima train`, where class folders without val images are divided as by `sima finetune`,
    or it contains image files, without labels.
    """
    from sima_attn.data.loader import evaluation_transform
    from sima_attn.data.splits import default_val, open_split

    if metadata.get("task") == "detection":
        raise ValueError("the file is a detector, and quantization of detectors is not supported: use it as float32")
    if "preprocessing" not in metadata:
        raise ValueError("the file has no preprocessing metadata: export it again with `sima export`")
    transform = evaluation_transform(Preprocessing.from_json(metadata["preprocessing"]))
    raw = metadata.get("preprocessing_inside") == "true"
    root = Path(data)
    files = images_in(root) if root.is_dir() else []
    source = None if files else open_split(Data(str(data), val=default_val(data)), split)
    known = labels_in(metadata)
    if source is not None and known is not None and len(source.classes) != len(known):
        raise ValueError(
            f"{data} has {len(source.classes)} classes, the file has {len(known)}: pass the data it was trained on, or "
            "a folder of image files, which need no labels"
        )
    total = len(files) if source is None else len(source)
    chosen = np.random.default_rng(seed).permutation(total)[: total if most is None else most]

    def read(index: int) -> np.ndarray:
        place = int(chosen[index])
        if source is None:
            image = open_photo(files[place])
        else:
            try:
                image = source.read(place)
            except Exception as error:  # decoders raise many kinds of errors
                raise ValueError(f"{source.name(place)} cannot be read as an image: {error}; remove it") from None
        return np.asarray(image) if raw else transform(image).numpy()

    return Images(read, len(chosen), None if source is None else source.labels[chosen].tolist())


def quantize_onnx(
    fp32_path: str | Path,
    int8_path: str | Path,
    calibration_images: Collection[np.ndarray] | Images,
    *,
    compare_images: Collection[np.ndarray] | Images = (),
    compare_labels: Sequence[int] | None = None,
    data: str = "",
    reduce_range: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> QuantizeReport:
    """Quantize an exported file to int8, and compare both files.

    Args:
        fp32_path: A file that `export_onnx` wrote.
        int8_path: Must end in .onnx.
        calibration_images: Training images, which determine the ranges of all activations. Inputs of the file without
            the batch axis: [3, height, width], or a photo [height, width, 3] in uint8.
        compare_images: Images on which both files are run.
        compare_labels: Their classes, for accuracy.
        data: Name of the images in the report.
        reduce_range: 7-bit weights, for x86 processors without VNNI, whose 8-bit products saturate.
        on_image: Called after each image of calibration and comparison.
    """
    check_installed()
    import onnx

    fp32_path, int8_path = Path(fp32_path), Path(int8_path)
    if int8_path.suffix != ".onnx" or int8_path == fp32_path:
        raise ValueError(f"the int8 file must end in .onnx and differ from {fp32_path}, got {str(int8_path)!r}")
    if len(calibration_images) < MIN_IMAGES:
        count = len(calibration_images)
        raise ValueError(f"{count} calibration images are too few: use at least {MIN_IMAGES}, better a few hundred")
    if compare_labels is not None and len(compare_labels) != len(compare_images):
        raise ValueError(f"got {len(compare_labels)} labels for {len(compare_images)} images")
    fp32 = open_model(fp32_path, threads=torch.get_num_threads())
    if fp32.metadata.get("precision") == INT8:
        raise ValueError(f"{fp32_path} is already in int8: pass the float32 file")
    batches = _batches(calibration_images, fp32)
    proto = quantized_graph(fp32_path, batches, reduce_range=reduce_range, on_image=on_image)
    write_metadata(proto, {"precision": INT8, "calibration_images": str(len(calibration_images))})

    with atomic_write(int8_path) as written:
        onnx.save(proto, written)
        int8 = open_model(written, threads=torch.get_num_threads())
        compared = _compare(fp32, int8, compare_images, compare_labels, on_image)
        model = fp32.metadata.get("model", fp32_path.stem)
        full_size = fp32_path.stat().st_size
        bits = 7 if reduce_range else 8
        settings = (
            f"static QDQ; weights {bits} bits a channel; activations 8 bits, min-max; activation products in float32"
        )

        def row(path: Path, name: str, precision: str, accuracy: _Accuracy, images: int, settings: str) -> FileRow:
            int8_products, float_products = _count_products(path)
            return FileRow(
                model=model,
                format=precision,
                file=name,
                bytes=path.stat().st_size,
                share_of_fp32=round(path.stat().st_size / full_size, 4),
                **accuracy._asdict(),
                images=len(compare_images),
                data=data,
                calibration_images=images,
                settings=settings,
                int8_products=int8_products,
                float_products=float_products,
                exp_like_nodes=len(audit(path).calls),
                device=cpu_name(),
                onnxruntime=version("onnxruntime"),
                sima_attn=__version__,
                date=today(),
            )

        return QuantizeReport(
            row(fp32_path, fp32_path.name, FP32, compared[0], 0, "-"),
            row(written, int8_path.name, INT8, compared[1], len(calibration_images), settings),
        )


def quantized_graph(
    path: Path,
    batches: Iterator[np.ndarray],
    *,
    reduce_range: bool = False,
    on_image: Callable[[], object] = lambda: None,
) -> onnx.ModelProto:
    """The graph of a file with all products with a weight in int8, activations in uint8.

    Ranges are the minimum and maximum on the calibration images. SimA's bound |K-hat^T V| <= max |V| is for a product
    that stays in float32 and has no scale. For the next quantized one, the input of the projection, the bound is
    D max |V|, far above the real values: the steps would be too coarse.
    """
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    class Reader(CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            batch = next(batches, None)
            if batch is None:
                return None
            for _ in range(len(batch) if batch.ndim == 4 else 1):  # a photo has no batch axis
                on_image()
            return {input_name: batch}

    proto = onnx.load(path)
    input_name = proto.graph.input[0].name
    convert_linear_to_gemm(proto)
    weights = {weight.name for weight in proto.graph.initializer}
    chosen = [node.name for node in proto.graph.node if node.op_type in PRODUCTS and node.input[1] in weights]
    add_pre_process_metadata(proto)  # these graphs do not need the preprocessing step that is advised otherwise
    with tempfile.TemporaryDirectory() as folder:
        after = Path(folder) / "after.onnx"
        quantize_static(
            proto,
            after,
            Reader(),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=reduce_range,
            nodes_to_quantize=chosen,
            # Outputs of linear layers stay in float32: more accurate, and not slower, since the next norm needs it.
            extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm", "MatMul"]},
        )
        return onnx.load(after)


def convert_linear_to_gemm(proto: onnx.ModelProto) -> None:
    """Replace MatMul + bias on tokens [B, N, C] by one Gemm on [B * N, C], which ONNX Runtime can run in int8.

    It would fuse the two nodes to a float32 Gemm, and convert the weights to float32 in each call.
    """
    import onnx
    from onnx import helper, numpy_helper

    graph = onnx.shape_inference.infer_shapes(proto).graph
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*graph.value_info, *graph.output)}
    weights = {weight.name: tuple(weight.dims) for weight in proto.graph.initializer}
    uses = Counter(name for node in proto.graph.node for name in node.input)
    producers = {name: node for node in proto.graph.node for name in node.output}

    def layer_before(add: onnx.NodeProto) -> tuple[onnx.NodeProto, str] | None:
        """The MatMul and the bias that a node adds, or None."""
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

    nodes: dict[str, list[onnx.NodeProto]] = {}  # first output of a node -> its replacement
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
        if out_shape.count(-1) > 1:  # Reshape infers one size; more are computed from the tokens
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


def _count_products(path: Path) -> tuple[int, int]:
    """Number of products with quantized weights, and of those in float32."""
    import onnx

    graph = onnx.load(path).graph
    from_bytes = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    found = [node.input[1] in from_bytes for node in graph.node if node.op_type in PRODUCTS]
    return sum(found), len(found) - sum(found)


def _batches(images: Iterable[np.ndarray], session: Session) -> Iterator[np.ndarray]:
    """Inputs of the file: one image each, or up to MAX_BATCH if its batch size is dynamic."""
    photo = session.metadata.get("preprocessing_inside") == "true"
    fitting = len(session.input_shape) - (not photo)
    at_once = MAX_BATCH if isinstance(session.input_shape[0], str) and not photo else 1
    waiting: list[np.ndarray] = []
    for image in images:
        if image.ndim != fitting:
            raise ValueError(f"images must have {fitting} axes for an input {session.input_shape}, got {image.shape}")
        if photo:
            yield image
            continue
        waiting.append(image.astype(np.float32))
        if len(waiting) == at_once:
            yield np.stack(waiting)
            waiting = []
    if waiting:
        yield np.stack(waiting)


class _Accuracy(NamedTuple):
    """Accuracy of a file in percent."""

    top1: float = UNKNOWN
    top5: float = UNKNOWN
    points_lost: float = UNKNOWN
    same_class: float = UNKNOWN
    cosine: float = UNKNOWN


def _compare(
    fp32: Session,
    int8: Session,
    images: Collection[np.ndarray] | Images,
    labels: Sequence[int] | None,
    on_image: Callable[[], object],
) -> tuple[_Accuracy, _Accuracy]:
    """Accuracy of both files on the same images."""
    if not len(images):
        return _Accuracy(), _Accuracy()
    if fp32.metadata.get("output") == FEATURES:
        cosine = _mean_cosine(fp32, int8, images, on_image)
        return _Accuracy(cosine=1.0), _Accuracy(cosine=cosine)
    known = labels_in(fp32.metadata)
    if labels is not None and known is not None and max(labels) >= len(known):
        raise ValueError(f"the images have labels up to {max(labels)}, the file has {len(known)} classes")
    found: dict[Session, list[np.ndarray]] = {fp32: [], int8: []}  # five classes per image, the most probable first
    for batch in _batches(images, fp32):
        for session, fives in found.items():
            logits = session(batch)  # [B, K]
            fives.append(np.argsort(-logits, axis=-1)[:, :5])
        for _ in fives[-1]:
            on_image()
    theirs, ours = (np.concatenate(fives) for fives in found.values())  # [images, 5]

    def accuracy(fives: np.ndarray) -> _Accuracy:
        same = _percent(fives[:, 0] == theirs[:, 0])
        if labels is None:
            return _Accuracy(same_class=same)
        truth = np.asarray(labels)
        first = _percent(fives[:, 0] == truth)
        lost = round(_percent(theirs[:, 0] == truth) - first, 2)
        return _Accuracy(first, _percent((fives == truth[:, None]).any(1)), lost, same)

    return accuracy(theirs), accuracy(ours)


def _mean_cosine(
    fp32: Session, int8: Session, images: Collection[np.ndarray] | Images, on_image: Callable[[], object]
) -> float:
    """Mean cosine of the features of both files."""
    cosines: list[float] = []
    for batch in _batches(images, fp32):
        theirs, ours = (session(batch) for session in (fp32, int8))  # [B, C]
        norms = np.linalg.norm(theirs, axis=1) * np.linalg.norm(ours, axis=1)
        cosines += ((theirs * ours).sum(1) / norms.clip(1e-12)).tolist()
        for _ in theirs:
            on_image()
    return round(float(np.mean(cosines)), 6)


def _percent(of: np.ndarray) -> float:
    return round(100 * float(of.mean()), 2)
