"""The audit counts every exp-like call, puts it in the right part, and leaves the model as it was."""

import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn
from typer.testing import CliRunner

from sima_attn import cli
from sima_attn.auditing import ExpCall, assert_exp_free, audit
from sima_attn.nn import ATTENTIONS, SimAttention, create_attention
from sima_attn.ops import AttentionShape
from sima_attn.report.rows import read_rows
from sima_attn.reproduce.table_1 import TABLE_1, ModelRow, count_models, table_1

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5, "embed_dim": 24, "num_heads": 3}
SOFTMAX = 2 * 3 * 17 * 17  # layers, heads, tokens squared
GELU = 2 * 17 * 4 * 24  # layers, tokens, hidden channels


def small_deit(**options):
    return timm.create_model("deit_tiny_patch16_224", **SMALL, **options)


def exp_free_deit():
    return small_deit(attn_layer=SimAttention, act_layer=nn.ReLU)


def hooks_of(model):
    return [h for m in model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


class Caught(nn.Module):
    """A model that survives the failure of one part."""

    def __init__(self):
        super().__init__()
        self.broken = nn.Sequential(nn.Linear(99, 1))
        self.act = nn.GELU()

    def forward(self, x):
        try:
            self.broken(x)
        except RuntimeError:
            return self.act(x) + x.sigmoid()


class AttentionBlock(nn.Module):
    """A block named like an attention, around one."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)
        self.act = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        return self.act(self.inner(x, x, x, need_weights=False)[0])


def test_deit_small():
    report = audit(timm.create_model("deit_small_patch16_224"))
    assert (report.attention_exps, report.other_exps) == (2_794_248, 3_631_104)
    assert {(c.kind, c.in_attention) for c in report.calls} == {("softmax", True), ("gelu", False)}
    assert (report.params, report.macs) == (22_050_664, 4_598_882_304)
    assert report.in_paper == ("HN^2",)
    assert report.input_size == ((1, 3, 224, 224),)
    assert report.summary() == "2,794,248 softmax elements in attention, 3,631,104 GELU elements elsewhere"
    assert "4.599 G MACs" in report.facts()


def test_sima_deit_small_has_no_exp_in_attention_and_still_does_not_claim_to_be_exp_free():
    report = audit(timm.create_model("deit_small_patch16_224", attn_layer=SimAttention), 224)
    assert (report.attention_exps, report.other_exps, report.macs) == (0, 3_631_104, 4_357_413_888)
    assert report.in_paper == ("0",)
    assert not report.is_exp_free
    assert report.summary() == "no exp() in attention, 3,631,104 GELU elements elsewhere"


def test_xcit_small_with_its_class_attention():
    report = audit(timm.create_model("xcit_small_12_p16_224"))
    assert (report.attention_exps, report.other_exps) == (224_336, 5_572_608)
    assert {(c.kind, c.in_attention) for c in report.calls} == {("softmax", True), ("gelu", False)}
    assert report.in_paper == ("HD^2", "HN")


def test_sima_with_relu_is_exp_free():
    report = audit(exp_free_deit(), 32)
    assert report.is_exp_free
    assert (report.exps, report.calls) == (0, ())
    assert report.summary() == "no exp-like call in the whole network"
    assert report.table().lines == []
    assert_exp_free(exp_free_deit(), 32)


def test_a_call_is_named_by_its_module():
    report = audit(small_deit(), (3, 32, 32))
    assert report.calls[:2] == (
        ExpCall("blocks.0.attn", "softmax", SOFTMAX // 2, in_attention=True),
        ExpCall("blocks.0.mlp.act", "gelu", GELU // 2, in_attention=False),
    )
    assert report.table().lines == [
        ["softmax", "attention", "2", f"{SOFTMAX:,}"],
        ["gelu", "rest", "2", f"{GELU:,}"],
    ]
    assert report.table(by_module=True).lines[1] == ["blocks.0.mlp.act", "gelu", "rest", f"{GELU // 2:,}"]


@pytest.mark.parametrize("name", ATTENTIONS)
def test_each_of_our_attentions_is_one_and_counts_what_its_cost_says(name):
    module = create_attention(name, 16, 2, num_tokens=16)
    x = torch.randn(1, 16, 16)
    report = audit(module, x)
    assert report.attention_exps == module.cost(AttentionShape(1, 2, 16, 8)).exps
    assert report.other_exps == 0
    assert report.in_paper == (module.exps_in_paper or ("?" if report.attention_exps else "0"),)


@pytest.mark.parametrize("need_weights", [True, False])
def test_torch_multihead_attention_counts_although_it_has_a_one_kernel_path(need_weights):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.mixer(x, x, x, need_weights=need_weights)[0]

    report = audit(Encoder(), torch.randn(1, 5, 8))
    assert report.calls == (ExpCall("mixer", "softmax", 2 * 5 * 5, in_attention=True),)
    assert report.in_paper == ("HN^2",)
    assert report.summary() == "50 softmax elements in attention, no exp-like call elsewhere"


def test_torch_encoder_layer_counts_although_it_has_a_one_kernel_path():
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, activation="gelu", batch_first=True)
    report = audit(nn.TransformerEncoder(layer, 3), torch.randn(1, 5, 8))
    assert (report.attention_exps, report.other_exps) == (3 * 2 * 5 * 5, 3 * 5 * 16)
    assert torch.backends.mha.get_fastpath_enabled()


def test_exps_of_fused_recurrent_layers_and_of_powers_are_found():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory = nn.LSTM(8, 4)

        def forward(self, x):
            return 2 ** self.memory(x)[0]

    calls = audit(Recurrent(), torch.randn(3, 2, 8)).calls
    assert {(c.module, c.kind, c.count) for c in calls} == {("memory", "lstm", 5 * 6 * 4), ("", "pow", 6 * 4)}


def test_a_block_named_after_its_attention_is_not_attention():
    report = audit(AttentionBlock(), torch.randn(1, 5, 8))
    assert {(c.module, c.in_attention) for c in report.calls} == {("inner", True), ("act.1", False)}


def test_an_attention_that_holds_parts_named_after_it_is_attention():
    class AttentionProjection(nn.Linear):
        """A part, by its name alone an attention."""

    class SelfAttention(nn.Module):
        def __init__(self, softmax):
            super().__init__()
            self.q = AttentionProjection(8, 8)
            self.softmax = softmax

        def forward(self, x):
            return self.softmax(self.q(x) @ x.mT) @ x

    for softmax in (nn.Softmax(-1), lambda scores: scores.softmax(-1)):
        report = audit(nn.Sequential(SelfAttention(softmax)), torch.randn(1, 5, 8))
        assert (report.attention_exps, report.other_exps) == (25, 0)
        assert report.in_paper == ("?",)


def test_an_mlp_inside_an_attention_is_not_attention():
    pool = timm.layers.AttentionPoolLatent(16, num_heads=2)
    report = audit(pool, torch.randn(1, 5, 16))
    assert {(c.kind, c.in_attention) for c in report.calls} == {("softmax", True), ("gelu", False)}
    assert report.in_paper == ("?",)


def test_a_network_without_attention_says_so():
    report = audit(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), torch.randn(2, 4))
    assert report.summary() == "8 sigmoid elements; no attention recognized"
    assert report.in_paper == ()


def test_activation_memory_is_the_most_that_is_alive_at_one_time():
    layers = nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 10), nn.ReLU())
    x = torch.randn(1, 100)
    report = audit(layers, x)
    assert report.activation_bytes == 4 * (1000 + 1000)  # the hidden layer before and after its ReLU
    assert report == audit(layers, x)
    views = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (10, 10)))
    assert audit(views, x).activation_bytes == 0


def test_a_compiled_model_counts_the_same():
    model = torch.compile(small_deit(), backend="eager")
    assert audit(model, 32).exps == SOFTMAX + GELU


def test_no_hook_stays_and_modes_return():
    model = small_deit().train()
    model.blocks[0].eval()  # a frozen part
    modes = [m.training for m in model.modules()]
    audit(model, 32)
    assert hooks_of(model) == []
    assert [m.training for m in model.modules()] == modes
    assert torch.is_grad_enabled()


def test_no_hook_stays_and_modes_return_after_a_failure():
    model = small_deit().train()
    message = r"cannot run on an input of 1x3x40x40 \(AssertionError: .*pass the input_size it was built for"
    with pytest.raises(ValueError, match=message):
        audit(model, 40)
    assert hooks_of(model) == []
    assert all(m.training for m in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_failure_the_model_catches_does_not_shift_the_paths():
    report = audit(Caught(), torch.randn(1, 4))
    assert {(c.module, c.kind) for c in report.calls} == {("act", "gelu"), ("", "sigmoid")}
    assert report.table(by_module=True).lines[-1][0] == "(model)"


def test_gradients_and_the_random_state_are_not_touched():
    model = small_deit().double()
    model.cls_token.requires_grad_(False)
    wants_gradient = [p.requires_grad for p in model.parameters()]
    state = torch.random.get_rng_state()
    audit(model, 32)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [p.requires_grad for p in model.parameters()] == wants_gradient
    assert all(p.grad is None for p in model.parameters())


def test_the_assertion_names_the_offenders():
    with pytest.raises(AssertionError, match=r"blocks\.1\.mlp\.act: gelu on 1,632 elements \(rest\)"):
        assert_exp_free(small_deit(attn_layer=SimAttention), 32)
    with pytest.raises(AssertionError, match=r"blocks\.0\.attn: softmax on 867 elements \(attention\)"):
        assert_exp_free(small_deit(act_layer=nn.ReLU), 32)


@pytest.mark.parametrize("size", [0, -3, True, "224", 2.5, (3, 32), (3, 0, 32), (), (torch.ones(1), 3, 4)])
def test_impossible_input_sizes_are_refused(size):
    with pytest.raises(ValueError, match="input_size must be an image side"):
        audit(exp_free_deit(), size)


def test_what_is_neither_a_module_nor_a_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"takes a torch module or the path of an \.onnx file, got dict"):
        audit({})
    with pytest.raises(ValueError, match=r"must end in \.onnx, got 'deit_small.*timm\.create_model"):
        audit("deit_small_patch16_224")
    with pytest.raises(ValueError, match="does not exist"):
        audit(tmp_path / "none.onnx")
    with pytest.raises(ValueError, match="TorchScript"):
        audit(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)), torch.ones(1, 2))


def test_a_missing_onnx_is_named(tmp_path, monkeypatch):
    (tmp_path / "some.onnx").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ValueError, match=r"pip .*install .*\[onnx\]'"):
        audit(tmp_path / "some.onnx")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A small DeiT twice, with softmax and GELU and without any exp: module and file."""
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pairs = {}
    for name, model in (("softmax", small_deit()), ("sima", exp_free_deit())):
        path = tmp_path_factory.mktemp("onnx") / f"{name}.onnx"
        image = torch.randn(1, 3, 32, 32)
        torch.onnx.export(model.eval(), (image,), path, dynamo=True, opset_version=20, verbose=False)
        pairs[name] = model, path
    return pairs


@pytest.mark.parametrize("name", ["softmax", "sima"])
def test_a_module_and_its_onnx_file_audit_alike(exported, name):
    model, path = exported[name]
    mine, its = audit(model, 32), audit(path)
    assert its.name == f"{name}.onnx"
    for what in ("macs", "attention_exps", "other_exps", "is_exp_free", "in_paper", "input_size"):
        assert getattr(its, what) == getattr(mine, what), what
    assert its.activation_bytes is None
    # The exporter keeps one copy of equal weights, here the fresh norms and biases.
    assert 0.95 * mine.params < its.params <= mine.params


def test_an_exported_file_is_read_without_its_weights(exported, tmp_path):
    path = tmp_path / "alone.onnx"
    path.write_bytes(exported["softmax"][1].read_bytes())
    assert audit(path).summary() == f"{SOFTMAX:,} Softmax elements in attention, {GELU:,} Gelu elements elsewhere"


def test_the_assertion_and_the_command_take_files(exported):
    assert_exp_free(exported["sima"][1])
    with pytest.raises(AssertionError, match=r"softmax\.onnx is not exp-free"):
        assert_exp_free(str(exported["softmax"][1]))
    assert "no exp-like call" in sima(exported["sima"][1], "--fail-on-exp")
    assert "node_gelu" in sima(exported["softmax"][1], "--by-module", "--fail-on-exp", code=1)


class Graphs:
    """Writes small ONNX files: x [2, 6] -> y through the given nodes."""

    def __init__(self, folder):
        onnx = pytest.importorskip("onnx")
        self.onnx, self.node, self.folder = onnx, onnx.helper.make_node, folder

    def value(self, name, shape=(2, 6)):
        return self.onnx.helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, shape)

    def body(self, *nodes, inputs=(), output="z"):
        return self.onnx.helper.make_graph(nodes, "body", inputs, [self.value(output, None)])

    def write(self, *nodes, inputs=None, weights=(), functions=()):
        helper = self.onnx.helper
        values = [self.value("x")] if inputs is None else inputs
        graph = helper.make_graph(nodes, "g", values, [self.value("y", None)], initializer=weights)
        domains = dict.fromkeys(["", "com.microsoft", "local", "strange", "ai.onnx.ml"], 1) | {"": 23}
        opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
        path = self.folder / "made.onnx"
        self.onnx.save(helper.make_model(graph, opset_imports=opsets, functions=functions), path)
        return path


@pytest.fixture
def graphs(tmp_path):
    return Graphs(tmp_path)


@pytest.mark.parametrize(
    "operation",
    "Exp Softmax LogSoftmax ReduceLogSumExp Sigmoid Tanh Erf Gelu Elu Selu Celu Softplus Mish".split(),
)
def test_exp_like_nodes(graphs, operation):
    report = audit(graphs.write(graphs.node(operation, ["x"], ["y"], name="n")))
    assert report.calls == (ExpCall("n", operation, 12, in_attention=False),)


@pytest.mark.parametrize("operation", ["Relu", "HardSwish", "HardSigmoid", "ReduceL1", "Sqrt", "LeakyRelu", "Neg"])
def test_other_nodes_are_exp_free(graphs, operation):
    report = audit(graphs.write(graphs.node(operation, ["x"], ["y"])))
    assert report.is_exp_free
    assert report.macs == 0


@pytest.mark.parametrize("operation", ["FastGelu", "QuickGelu", "BiasGelu", "Gelu", "BiasSoftmax", "QLinearSigmoid"])
def test_fused_nodes_of_onnxruntime(graphs, operation):
    report = audit(graphs.write(graphs.node(operation, ["x"], ["y"], domain="com.microsoft")))
    assert [(c.kind, c.count) for c in report.calls] == [(operation, 12)]


def test_fused_activations_of_onnxruntime(graphs):
    def fused(activation):
        node = graphs.node("FusedGemm", ["x", "w"], ["y"], domain="com.microsoft", activation=activation)
        return audit(graphs.write(node, inputs=[graphs.value("x"), graphs.value("w", (6, 3))]))

    assert fused("Relu").is_exp_free
    assert [c.kind for c in fused("OfALaterVersion").calls] == ["FusedGemm(OfALaterVersion)"]
    assert [c.kind for c in fused("Tanh").calls] == ["FusedGemm(Tanh)"]


def floats(graphs, name, values):
    return graphs.onnx.helper.make_tensor(name, graphs.onnx.TensorProto.FLOAT, np.shape(values), np.ravel(values))


def test_a_power_with_an_exponent_of_the_input_is_exp_like_in_disguise(graphs):
    path = graphs.write(graphs.node("Pow", ["two", "x"], ["y"], name="n"), weights=[floats(graphs, "two", 2.0)])
    assert audit(path).calls == (ExpCall("n", "Pow", 12, in_attention=False),)
    with pytest.raises(AssertionError, match="n: Pow on 12 elements"):
        assert_exp_free(path)
    sima(path, "--fail-on-exp", code=1)
    inputs = [graphs.value("x"), graphs.value("k", (1, 6))]
    assert audit(graphs.write(graphs.node("Pow", ["x", "k"], ["y"]), inputs=inputs)).exps == 12


def test_a_power_with_an_exponent_of_weights_and_sizes_is_none(graphs):
    weights = [floats(graphs, "two", 2.0), floats(graphs, "table", [1.0, 2.0, 3.0])]
    assert audit(graphs.write(graphs.node("Pow", ["x", "two"], ["y"]), weights=weights)).is_exp_free
    sizes = [
        graphs.node("Shape", ["x"], ["n"]),
        graphs.node("Cast", ["n"], ["f"], to=graphs.onnx.TensorProto.FLOAT),
        graphs.node("Div", ["f", "two"], ["e"]),
        graphs.node("Pow", ["two", "e"], ["y"]),
    ]
    assert audit(graphs.write(*sizes, weights=weights)).is_exp_free
    random = [graphs.node("RandomNormalLike", ["table"], ["e"]), graphs.node("Pow", ["two", "e"], ["y"])]
    assert not audit(graphs.write(*random, weights=weights)).is_exp_free


@pytest.mark.parametrize("operation", ["MoE", "QMoE", "EPContext", "GroupNorm", "OfALaterVersion"])
def test_an_operation_of_onnxruntime_that_is_not_known_to_be_free_of_exp_is_listed(graphs, operation):
    path = graphs.write(graphs.node(operation, ["x"], ["y"], domain="com.microsoft", activation=1))
    assert [(c.kind, c.count) for c in audit(path).calls] == [(operation, None)]
    sima(path, "--fail-on-exp", code=1)


@pytest.mark.parametrize("operation", ["SkipLayerNormalization", "QLinearAdd", "MatMulNBits", "DequantizeLinear"])
def test_known_operations_of_onnxruntime_are_exp_free(graphs, operation):
    assert audit(graphs.write(graphs.node(operation, ["x"], ["y"], domain="com.microsoft"))).is_exp_free


@pytest.mark.parametrize(("operation", "domain"), [("OfALaterVersion", ""), ("SVMClassifier", "ai.onnx.ml")])
def test_standard_operations_that_are_not_known_are_listed(graphs, operation, domain):
    report = audit(graphs.write(graphs.node(operation, ["x"], ["y"], domain=domain)))
    assert [(c.kind.rpartition("::")[2], c.count) for c in report.calls] == [(operation, None)]


def test_attention_nodes(graphs):
    tokens = [graphs.value("q", (1, 4, 6)), graphs.value("k", (1, 5, 6)), graphs.value("v", (1, 5, 8))]
    heads = {"q_num_heads": 2, "kv_num_heads": 2}
    report = audit(graphs.write(graphs.node("Attention", ["q", "k", "v"], ["y"], **heads), inputs=tokens))
    assert [(c.kind, c.count, c.in_attention) for c in report.calls] == [("Attention", 2 * 4 * 5, True)]
    assert report.macs == 2 * 4 * 5 * (3 + 4)
    assert report.in_paper == ("HN^2",)
    node = graphs.node("MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", num_heads=2)
    assert audit(graphs.write(node, inputs=tokens)).attention_exps == 2 * 4 * 5
    packed = [graphs.value("x", (1, 4, 6)), graphs.value("w", (6, 18)), graphs.value("b", (18,))]
    node = graphs.node("Attention", ["x", "w", "b"], ["y"], domain="com.microsoft", num_heads=2)
    report = audit(graphs.write(node, inputs=packed))
    assert (report.attention_exps, report.macs) == (2 * 4 * 4, 2 * 4 * 4 * (3 + 3) + 4 * 6 * 18)


def test_a_softmax_between_products_is_attention_and_a_last_one_is_not(graphs):
    inside = [graphs.node("Softmax", ["x"], ["a"]), graphs.node("MatMul", ["a", "v"], ["y"])]
    report = audit(graphs.write(*inside, inputs=[graphs.value("x"), graphs.value("v", (6, 5))]))
    assert (report.attention_exps, report.macs, report.in_paper) == (12, 2 * 6 * 5, ("?",))
    report = audit(graphs.write(graphs.node("Softmax", ["x"], ["y"])))
    assert report.summary() == "12 Softmax elements; no attention recognized"


def test_nodes_inside_subgraphs(graphs):
    branches = {
        "then_branch": graphs.body(graphs.node("Relu", ["x"], ["r"]), graphs.node("Exp", ["r"], ["z"], name="e")),
        "else_branch": graphs.body(graphs.node("Relu", ["x"], ["z"])),
    }
    condition = graphs.onnx.helper.make_tensor("c", graphs.onnx.TensorProto.BOOL, [], [True])
    report = audit(graphs.write(graphs.node("If", ["c"], ["y"], name="if", **branches), weights=[condition]))
    assert report.calls == (ExpCall("if/then_branch/e", "Exp", 12, in_attention=False),)


def test_what_a_loop_repeats_has_an_unknown_count(graphs):
    helper, types = graphs.onnx.helper, graphs.onnx.TensorProto
    inputs = [
        helper.make_tensor_value_info("i", types.INT64, []),
        helper.make_tensor_value_info("go", types.BOOL, []),
        graphs.value("s"),
    ]
    steps = [graphs.node("Identity", ["go"], ["on"]), graphs.node("MatMul", ["s", "w"], ["m"])]
    outputs = [helper.make_tensor_value_info("on", types.BOOL, []), graphs.value("t")]
    body = helper.make_graph([*steps, graphs.node("Tanh", ["m"], ["t"], name="t")], "body", inputs, outputs)
    weights = [helper.make_tensor("n", types.INT64, [], [7]), helper.make_tensor("w", types.FLOAT, [6, 6], [0.0] * 36)]
    loop = graphs.node("Loop", ["n", "", "x"], ["y"], name="loop", body=body)
    report = audit(graphs.write(loop, weights=weights))
    assert report.calls == (ExpCall("loop/body/t", "Tanh", None, in_attention=False),)
    assert (report.macs, report.params) == (None, 36)


def test_scales_and_zero_points_are_no_parameters(graphs):
    types = graphs.onnx.TensorProto
    weights = [
        graphs.onnx.helper.make_tensor(name, types.FLOAT if name == "s" else types.INT8, shape, np.ones(shape))
        for name, shape in {"w": [6, 4], "s": [4], "z": [4]}.items()
    ]
    path = graphs.write(graphs.node("DequantizeLinear", ["w", "s", "z"], ["y"]), weights=weights)
    assert audit(path).params == 24


def test_nodes_inside_functions(graphs):
    opset = graphs.onnx.helper.make_opsetid("", 23)
    steps = [graphs.node("Neg", ["a"], ["t"]), graphs.node("Sigmoid", ["t"], ["b"], name="s")]
    function = graphs.onnx.helper.make_function("local", "Gate", ["a"], ["b"], steps, [opset])
    calls = [graphs.node("Gate", ["x"], ["z"], domain="local"), graphs.node("Gate", ["z"], ["y"], domain="local")]
    report = audit(graphs.write(*calls, functions=[function]))
    assert [(c.kind, c.count) for c in report.calls] == [("Sigmoid", 12)] * 2


def test_functions_inside_functions_and_subgraphs(graphs):
    helper, node = graphs.onnx.helper, graphs.node
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("local", 1)]
    inner = helper.make_function("local", "Inner", ["a"], ["b"], [node("Exp", ["a"], ["b"])], opsets)
    outer = helper.make_function("local", "Outer", ["a"], ["b"], [node("Inner", ["a"], ["b"], domain="local")], opsets)
    branches = {
        "then_branch": graphs.body(node("Outer", ["x"], ["z"], domain="local")),
        "else_branch": graphs.body(node("Relu", ["x"], ["z"])),
    }
    condition = helper.make_tensor("c", graphs.onnx.TensorProto.BOOL, [], [True])
    path = graphs.write(node("If", ["c"], ["y"], **branches), weights=[condition], functions=[inner, outer])
    assert [(c.kind, c.count) for c in audit(path).calls] == [("Exp", 12)]


def test_open_shapes_are_unknown_until_a_size_is_given(graphs):
    image = graphs.value("x", ("batch", 3, "height", None))
    kernel = graphs.onnx.helper.make_tensor("w", graphs.onnx.TensorProto.FLOAT, [8, 3, 4, 4], [0.0] * 384)
    conv = graphs.node("Conv", ["x", "w"], ["a"], strides=[4, 4])
    path = graphs.write(conv, graphs.node("Gelu", ["a"], ["y"]), inputs=[image], weights=[kernel])
    report = audit(path)
    assert report.input_size == (("batch", 3, "height", "?"),)
    assert (report.exps, report.attention_exps, report.macs, report.params) == (None, 0, None, 384)
    assert report.table().lines == [["Gelu", "rest", "1", "unknown"]]
    assert report.summary() == "an unknown number of Gelu elements; no attention recognized"
    assert "unknown MACs" in report.facts()
    fixed = audit(path, 16)
    assert (fixed.exps, fixed.macs) == (8 * 4 * 4, 8 * 4 * 4 * 3 * 4 * 4)
    assert audit(path, torch.ones(2, 3, 16, 16)).exps == 2 * fixed.exps
    with pytest.raises(ValueError, match=r"made\.onnx takes batchx3xheightx\?, got 1x4x16x16; omit input_size"):
        audit(path, (4, 16, 16))
    others = graphs.node("Gelu", ["a"], ["b"]), graphs.node("Exp", ["b"], ["y"])
    path = graphs.write(conv, *others, inputs=[image], weights=[kernel])
    assert audit(path).summary() == "an unknown number of Gelu, Exp elements; no attention recognized"


def test_macs_of_the_products(graphs):
    values = [graphs.value("x"), graphs.value("w", (5, 2)), graphs.value("e", (6, 7))]
    gemm = graphs.node("Gemm", ["x", "w"], ["a"], transA=1, transB=1)  # [6, 2] [2, 5]
    einsum = graphs.node("Einsum", ["a", "e"], ["y"], equation="ij, ik -> jk")
    assert audit(graphs.write(gemm, einsum, inputs=values)).macs == 6 * 2 * 5 + 6 * 5 * 7
    values = [graphs.value("x", (1, 4, 3, 3)), graphs.value("w", (4, 2, 2, 2))]
    assert audit(graphs.write(graphs.node("ConvTranspose", ["x", "w"], ["y"]), inputs=values)).macs == 36 * 8


def test_an_operation_nobody_knows_is_not_called_exp_free(graphs):
    report = audit(graphs.write(graphs.node("Magic", ["x"], ["y"], domain="strange")))
    assert [(c.kind, c.count) for c in report.calls] == [("strange::Magic", None)]


@pytest.mark.parametrize("content", [b"", b"this is not a graph at all"])
def test_a_file_that_is_not_onnx_is_refused(tmp_path, content):
    pytest.importorskip("onnx")
    (tmp_path / "bad.onnx").write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.onnx'.*export the model again"):
        audit(tmp_path / "bad.onnx")


def sima(*arguments, code=0):
    result = CliRunner().invoke(cli.app, ["audit", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_command_prints_facts_table_and_summary():
    output = sima("deit_tiny_patch16_224", "--size", 64)
    assert "input 1x3x64x64" in output
    assert "MACs" in output
    assert "HN^2" in output
    assert "│ softmax │ attention │      12 │" in output
    assert "10,404 softmax elements in attention" in output
    assert "blocks.11.attn" in sima("deit_tiny_patch16_224", "--size", 64, "--by-module")


def test_command_fails_on_exp_where_asked():
    sima("deit_tiny_patch16_224", "--size", 32, "--fail-on-exp", code=1)
    assert "no exp-like call in the whole network" in sima("resnet18", "--size", 32, "--fail-on-exp")


def test_command_knows_our_own_models():
    assert "no exp() in attention" in sima("sima_deit_tiny_patch16_224", "--size", 32)


def test_command_suggests_names():
    result = CliRunner().invoke(cli.app, ["audit", "deit_tiny_patch16_24"])
    assert isinstance(result.exception, ValueError)
    assert (
        "unknown model, run folder or .onnx file 'deit_tiny_patch16_24'; did you mean 'deit_tiny_patch16_224'"
        in str(result.exception)
    )
    assert len(str(result.exception)) < 300


def test_table_1_of_the_paper_is_made_of_counts():
    steps = []
    models = [row for row in TABLE_1 if row.ours.startswith("sima_deit_small_patch16_224")]
    rows = count_models(models, size=32, on_step=steps.append)
    assert steps == [row.model for row in rows] == [row.ours for row in models]
    assert [row.other_exps == 0 for row in rows] == [False, False, True]
    assert [line[3] for line in table_1(rows).lines] == ["0 (0)"] * 3
    assert [line[-1] for line in table_1(rows).lines] == ["79.8", "79.4", "79.6"]


def test_the_committed_rows_are_those_of_table_1():
    rows = read_rows(Path(__file__).parents[2] / "benchmarks" / "results" / "table_1.csv", ModelRow)
    assert [row.model for row in rows] == [row.ours for row in TABLE_1]


def test_every_model_of_table_1_is_registered():
    assert all(timm.is_model(row.ours) for row in TABLE_1)


@pytest.mark.parametrize("name", ["xcit_small_12_p16_224", "sima_xcit_small_12_p16_224_relu"])
def test_the_readme_shows_what_the_command_says_last(name):
    said = CliRunner().invoke(cli.app, ["audit", name]).output.rstrip().splitlines()[-1]
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert readme.split(f"$ sima audit {name}\n")[1].splitlines()[:2] == ["    ...", f"    {said}"]
