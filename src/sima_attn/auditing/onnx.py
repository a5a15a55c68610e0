"""ONNX file -> its exp-like nodes, with the number of elements they are evaluated on if the shapes are fixed.

The file is not run. Functions are inlined, and the bodies of If, Loop and Scan are searched: both branches of an If are
listed, and nodes in a loop have an unknown count. `Pow` is listed if its exponent depends on the input.

Operations that are not known to be free of exp() are listed as exp-like, with an unknown count: those of other domains
(such as ai.onnx.ml), standard operations that the installed onnx does not know, and those of ONNX Runtime that are not
in EXP_FREE (MoE uses a softmax, EPContext contains a whole compiled graph).
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sima_attn._errors import check_installed
from sima_attn.auditing.model import Parts, in_paper
from sima_attn.auditing.report import AuditReport, ExpCall, Shape, show_shapes

if TYPE_CHECKING:
    import onnx

Sizes = tuple[int, ...]

STANDARD_DOMAINS = ("", "ai.onnx")
RUNTIME_DOMAINS = ("com.microsoft", "com.ms.internal")  # of ONNX Runtime; both have subdomains
EXP_LIKE = frozenset(
    """
    Exp Softmax LogSoftmax ReduceLogSumExp SoftmaxCrossEntropyLoss Multinomial Sigmoid Tanh Sinh Cosh Erf Gelu Elu Selu
    Celu Softplus Mish Swish SwiGLU Attention LSTM GRU RNN
    """.split()
)
# Fused operations (FastGelu, QuickGelu, BiasSoftmax, QLinearSigmoid, MultiHeadAttention ...) by name.
EXP_LIKE_WORDS = ("gelu", "softmax", "sigmoid", "tanh", "silu", "swish", "attention", "lstm", "gru")
RECURRENT_WORDS = ("lstm", "gru", "rnn")  # with unknown counts and MACs
# Operations of ONNX Runtime without exp(), in addition to the standard ones.
EXP_FREE = frozenset(
    """
    FusedConv FusedGemm FusedMatMul FusedMatMulActivation TransposeMatMul NhwcConv NhwcFusedConv NhwcMaxPool
    ReorderInput ReorderOutput BiasAdd BiasDropout BitmaskDropout BitmaskBiasDropout ExpandDims SkipLayerNormalization
    SimplifiedLayerNormalization SkipSimplifiedLayerNormalization EmbedLayerNormalization QEmbedLayerNormalization
    QLinearAdd QLinearMul QLinearConcat QLinearWhere QLinearReduceMean QLinearLeakyRelu QLinearAveragePool
    QLinearGlobalAveragePool QLinearConvTranspose QGemm DynamicQuantizeMatMul MatMulIntegerToFloat MatMulInteger16
    MulInteger ReduceSumInteger MatMulNBits MatMulBnb4 MatMulFpQ4 GatherBlockQuantized
    """.split()
)
EXP_FREE_ACTIVATIONS = ("", "Relu", "LeakyRelu", "ThresholdedRelu", "HardSigmoid", "HardSwish", "Clip")
# Products of the first two inputs; the MACs of others are unknown.
PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Conv", "FusedConv", "ConvTranspose")
PRODUCT_WORDS = ("matmul", "gemm", "conv", "attention", "einsum", "lstm", "gru", "rnn")


@dataclass(frozen=True)
class _Node:
    """A node and its context: its subgraph, the shapes in scope, and whether a loop repeats it."""

    proto: onnx.NodeProto
    name: str
    shapes: dict[str, Sizes | None]
    constants: set[str]  # values that do not depend on the input
    repeated: bool
    feeds_product: bool  # its output goes into a MatMul

    def shape(self, position: int) -> Sizes | None:
        """Shape of an input, None if it is absent or dynamic."""
        names = self.proto.input
        return self.shapes.get(names[position]) if position < len(names) else None

    def attribute(self, name: str, default: Any = None) -> Any:
        from onnx.helper import get_attribute_value

        return next((get_attribute_value(a) for a in self.proto.attribute if a.name == name), default)

    def scopes(self) -> dict[str, str]:
        """Paths and classes of the enclosing torch modules, if torch's exporter recorded them."""
        found = {entry.key: entry.value for entry in self.proto.metadata_props}
        try:
            paths = ast.literal_eval(found.get("pkg.torch.onnx.name_scopes", "[]"))
            classes = ast.literal_eval(found.get("pkg.torch.onnx.class_hierarchy", "[]"))
        except (ValueError, SyntaxError):
            return {}
        return dict(list(zip(paths, classes, strict=False))[:-1])  # the last is the aten operation


def audit_onnx(path: Path, inputs: Sequence[Sizes] | None = None) -> AuditReport:
    """Audit of an .onnx file; `inputs` fixes its dynamic sizes.

    A node is "in attention" if an enclosing torch module is; torch.onnx.export(dynamo=True) records the modules in the
    file. Without that record, fused attentions and Softmax nodes whose output goes into a MatMul count as attention.
    """
    model = _load(path)
    import onnx.inliner
    import onnx.shape_inference

    model = onnx.inliner.inline_local_functions(model)
    if inputs is not None:
        _fix_inputs(model, inputs, path)
    model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    nodes = list(_walk(model.graph, {}, set()))

    classes = {scope: cls for node in nodes for scope, cls in node.scopes().items()}
    parts = Parts({scope: [cls.rpartition(".")[2]] for scope, cls in classes.items()})
    with_exps: set[str | None] = set()
    anonymous: dict[str, None] = {}
    calls = []
    macs: int | None = 0
    for node in nodes:
        product = _macs(node)
        macs = None if macs is None or product is None else macs + product
        kind = _exp_kind(node)
        if kind is None:
            continue
        scopes = list(node.scopes())
        attention = parts.attention_of(scopes[-1], kind) if scopes else None
        is_softmax = "softmax" in node.proto.op_type.lower() and node.feeds_product
        unnamed = not scopes and (is_softmax or _is_fused_attention(node))
        with_exps.add(attention)
        if unnamed:
            anonymous["HN^2" if _is_fused_attention(node) else "?"] = None
        calls.append(ExpCall(node.name, kind, _exp_count(node), in_attention=attention is not None or unnamed))

    symbols = [in_paper(classes[scope], scope in with_exps) for scope in parts.distinct(classes, with_exps)]
    return AuditReport(
        name=path.name,
        input_size=tuple(_open_shape(value) for value in _inputs(model.graph)),
        params=_count_parameters(model.graph, nodes),
        macs=macs,
        activation_bytes=None,
        calls=tuple(calls),
        in_paper=tuple(dict.fromkeys([*symbols, *anonymous])),
    )


def _count_parameters(graph: onnx.GraphProto, nodes: Sequence[_Node]) -> int:
    """Elements of the initializers, without int64 shapes and indices and without the scales of int8."""
    from onnx import TensorProto

    quantized = [node.proto.input for node in nodes if node.proto.op_type in ("QuantizeLinear", "DequantizeLinear")]
    scales = {name for names in quantized for name in names[1:]}  # and zero points
    weights = [w for w in graph.initializer if w.data_type != TensorProto.INT64 and w.name not in scales]
    return sum(math.prod(weight.dims) for weight in weights)


def _load(path: Path) -> onnx.ModelProto:
    if path.suffix != ".onnx":
        raise ValueError(f"the file must end in .onnx, got {str(path)!r}; of a model pass timm.create_model(name)")
    if not path.is_file():
        raise ValueError(f"{str(path)!r} does not exist: check the path, or export the model first")
    check_installed("reading ONNX files", "onnx", extra="onnx")
    import onnx

    try:
        model = onnx.load(path, load_external_data=False)  # only shapes are needed
    except Exception as error:  # an error of protobuf, which onnx does not wrap
        raise ValueError(f"{str(path)!r} is not an ONNX file ({error}); export the model again") from error
    if not model.ir_version or not model.graph.node:
        raise ValueError(f"{str(path)!r} has no ONNX graph; export the model again")
    return model


def _inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """Inputs without the initializers, which old files list too."""
    weights = {initializer.name for initializer in graph.initializer}
    return [value for value in graph.input if value.name not in weights]


def _fix_inputs(model: onnx.ModelProto, shapes: Sequence[Sizes], path: Path) -> None:
    values = _inputs(model.graph)
    own = [_open_shape(value) for value in values]
    fits = len(shapes) <= len(own) and all(
        len(given) == len(mine) and all(isinstance(m, str) or g == m for g, m in zip(given, mine, strict=True))
        for given, mine in zip(shapes, own, strict=False)
    )
    if not fits:
        raise ValueError(
            f"{path.name} takes {show_shapes(own)}, got {show_shapes(shapes)}; omit input_size, or export the model at "
            "that size"
        )
    for value, shape in zip(values, shapes, strict=False):
        for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
            dim.dim_value = size
    # Shapes in the file were inferred with dynamic sizes; they are inferred again.
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def _open_shape(value: onnx.ValueInfoProto) -> Shape:
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in dims)


def _fixed_shape(value: onnx.ValueInfoProto) -> Sizes | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    sizes = tuple(size for size in _open_shape(value) if isinstance(size, int))
    return sizes if len(sizes) == len(tensor.shape.dim) else None


def _walk(
    graph: onnx.GraphProto,
    outer_shapes: dict[str, Sizes | None],
    outer_constants: set[str],
    prefix: str = "",
    repeated: bool = False,
) -> Iterator[_Node]:
    """All nodes of a graph and of its subgraphs."""
    shapes = dict(outer_shapes)
    constants = outer_constants | {weight.name for weight in graph.initializer}
    for value in (*graph.input, *graph.output, *graph.value_info):
        shapes[value.name] = _fixed_shape(value)
    for weight in graph.initializer:
        shapes[weight.name] = tuple(weight.dims)
    in_products = _inputs_of_products(graph)
    for i, node in enumerate(graph.node):
        name = prefix + (node.name or f"{node.op_type}_{i}")
        if _is_constant(node, constants):
            constants.update(node.output)
        yield _Node(node, name, shapes, constants, repeated, feeds_product=not in_products.isdisjoint(node.output))
        for attribute in node.attribute:
            bodies = [attribute.g] if attribute.HasField("g") else attribute.graphs
            for body in bodies:
                inside = f"{name}/{attribute.name}/"
                yield from _walk(body, shapes, constants, inside, repeated or node.op_type in ("Loop", "Scan"))


def _is_constant(node: onnx.NodeProto, constants: set[str]) -> bool:
    """Whether the outputs depend only on weights and sizes."""
    if node.domain not in STANDARD_DOMAINS or node.op_type.startswith("Random"):
        return False
    if node.op_type in ("Constant", "Shape", "Size"):
        return True
    has_body = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
    return bool(node.input) and not has_body and constants.issuperset(filter(None, node.input))


def _inputs_of_products(graph: onnx.GraphProto) -> set[str]:
    """Values that go into a MatMul, directly or through nodes that copy, cast or drop."""
    wanted: set[str] = set()
    for node in reversed(graph.node):
        if node.op_type in ("MatMul", "FusedMatMul", "Einsum"):
            wanted.update(node.input)
        elif node.op_type in ("Dropout", "Cast", "Identity", "Reshape", "Transpose") and wanted & set(node.output):
            wanted.add(node.input[0])
    return wanted


def _exp_kind(node: _Node) -> str | None:
    """The name of an operation that is exp-like or unknown; None for any other."""
    operation = node.proto.op_type
    if not _is_of_known_domain(node):
        return f"{node.proto.domain}::{operation}"
    if operation == "Pow":
        return None if node.proto.input[1] in node.constants else operation
    activation = node.attribute("activation", b"")  # of FusedConv, FusedGemm and FusedMatMulActivation
    if isinstance(activation, bytes) and activation.decode() not in EXP_FREE_ACTIVATIONS:
        return f"{operation}({activation.decode()})"
    return operation if _is_named_exp_like(operation) or not _is_known(operation) else None


def _is_of_known_domain(node: _Node) -> bool:
    return node.proto.domain in STANDARD_DOMAINS or node.proto.domain.startswith(RUNTIME_DOMAINS)


def _is_named_exp_like(operation: str) -> bool:
    name = operation.lower().replace("hardsigmoid", "").replace("hardswish", "")
    return operation in EXP_LIKE or any(word in name for word in EXP_LIKE_WORDS)


def _is_known(operation: str) -> bool:
    import onnx.defs

    return operation in EXP_FREE or onnx.defs.has(operation)


def _exp_count(node: _Node) -> int | None:
    """Elements that an exp-like node is evaluated on, None if unknown."""
    operation = node.proto.op_type
    is_known = _is_of_known_domain(node) and (_is_named_exp_like(operation) or _is_known(operation))
    if node.repeated or not is_known or any(word in operation.lower() for word in RECURRENT_WORDS):
        return None
    if _is_fused_attention(node):
        sizes = _attention_sizes(node)
        return None if sizes is None else math.prod(sizes[:4])
    # The activation of a fused product is applied to its output, and Pow broadcasts its inputs.
    by_output = operation == "Pow" or _exp_kind(node) != operation
    shape = node.shapes.get(node.proto.output[0]) if by_output else node.shape(0)
    return None if shape is None else math.prod(shape)


def _is_fused_attention(node: _Node) -> bool:
    return "attention" in node.proto.op_type.lower()


def _attention_sizes(node: _Node) -> tuple[int, int, int, int, int, int] | None:
    """B, H, N, M, D, Dv of a fused attention; None if shapes are dynamic or the operation is unknown."""
    standard = node.proto.domain in STANDARD_DOMAINS
    operation = node.proto.op_type
    heads = node.attribute("q_num_heads" if standard else "num_heads")
    q, k, v = (node.shape(i) for i in range(3))
    cache = slice(6, 8) if operation == "MultiHeadAttention" else slice(4, 6 if standard else 5)
    if q is None or any(node.proto.input[cache]):
        return None  # a cache adds keys
    if not standard and operation == "Attention":  # tokens, packed weight [C, 3 C], bias
        if len(q) != 3 or not heads or k is None:
            return None
        B, N, width = q[0], q[1], k[1] // 3
        return B, heads, N, N, width // heads, width // heads
    if k is None or v is None or not (standard or operation == "MultiHeadAttention"):
        return None
    if len(q) == len(k) == len(v) == 4:
        return q[0], q[1], q[2], k[2], q[3], v[3]
    if len(q) == len(k) == len(v) == 3 and heads:
        key_heads = node.attribute("kv_num_heads", heads)
        return q[0], heads, q[1], k[1], q[2] // heads, v[2] // key_heads
    return None


def _macs(node: _Node) -> int | None:
    """Multiply-adds of a node: 0 if it is not a product, None if shapes are dynamic."""
    operation = node.proto.op_type
    if not any(word in operation.lower() for word in PRODUCT_WORDS):
        return 0
    if node.repeated:
        return None
    if _is_fused_attention(node):
        return _attention_macs(node)
    if operation == "Einsum":
        return _einsum_macs(node)
    if operation not in PRODUCTS:
        return None
    left, right = node.shape(0), node.shape(1)
    out = node.shapes.get(node.proto.output[0])
    if left is None or right is None:
        return None
    if operation == "ConvTranspose":  # weight [C_in, C_out / groups, kernel]
        return math.prod(left) * math.prod(right[1:])
    if out is None:
        return None
    if "Conv" in operation:  # weight [C_out, C_in / groups, kernel]
        return math.prod(out) * math.prod(right[1:])
    summed = left[-2] if node.attribute("transA", 0) and len(left) > 1 else left[-1]
    return math.prod(out) * summed


def _attention_macs(node: _Node) -> int | None:
    if (sizes := _attention_sizes(node)) is None:
        return None
    B, H, N, M, D, Dv = sizes
    macs = B * H * N * M * (D + Dv)
    if node.proto.domain not in STANDARD_DOMAINS and node.proto.op_type == "Attention":
        macs += B * N * math.prod(node.shape(1) or ())  # it includes the projection to q, k and v
    return macs


def _einsum_macs(node: _Node) -> int | None:
    """For two factors: the product of the sizes of all letters."""
    terms = node.attribute("equation", b"").decode().replace(" ", "").split("->")[0].split(",")
    shapes = [node.shape(i) for i in range(len(terms))]
    if len(terms) != 2:
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, shapes, strict=True):
        if shape is None or len(shape) != len(term) or "." in term:
            return None
        sizes.update(zip(term, shape, strict=True))
    return math.prod(sizes.values())
