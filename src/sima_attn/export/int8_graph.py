"""ONNX graph in float32 -> int8: static quantization with per-channel weights.

All products with a weight (projections, MLPs, convolutions) run in int8. Products of two activations stay in float32:
in SimA these are s = 1 / (|Q|_1 |K|_1), whose values are far below the step of any 8-bit scale, and the two products
around it, which are a few percent of all multiplications.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx

PRODUCTS = ("Gemm", "MatMul", "Conv")


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


def count_products(path: Path) -> tuple[int, int]:
    """Number of products with quantized weights, and of those in float32."""
    import onnx

    graph = onnx.load(path).graph
    from_bytes = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    found = [node.input[1] in from_bytes for node in graph.node if node.op_type in PRODUCTS]
    return sum(found), len(found) - sum(found)
