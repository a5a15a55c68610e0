"""Models of timm, torchvision and plain torch, converted in place. All are built small; nothing is downloaded."""

import copy
import pickle

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from closeness import assert_close
from sima_attn.conversion import convert
from sima_attn.nn import ATTENTIONS, SimAttention, SimClassAttention, SimMultiheadAttention
from sima_attn.ops import ExpCounter

SMALL_VIT = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 64, "num_classes": 5}
# timm name -> (arguments, input side, attentions converted, attentions left alone)
TIMM = {
    "deit_tiny_patch16_224": (SMALL_VIT, 64, 2, 0),
    "deit_tiny_distilled_patch16_224": (SMALL_VIT, 64, 2, 0),
    "deit3_small_patch16_224": (SMALL_VIT, 64, 2, 0),
    "vit_tiny_patch16_224": ({**SMALL_VIT, "qk_norm": True}, 64, 2, 0),
    "vit_small_patch14_dinov2": ({**SMALL_VIT, "img_size": 56}, 56, 2, 0),
    "vit_base_patch16_siglip_224": (SMALL_VIT, 64, 2, 1),  # its attention pooling is of another kind
    "xcit_nano_12_p16_224": ({"depth": 2, "num_classes": 5}, 64, 4, 0),
    "cait_xxs24_224": ({"depth": 2, "img_size": 64, "num_classes": 5}, 64, 2, 2),  # talking heads stay
    "beit_base_patch16_224": (
        {**SMALL_VIT, "use_rel_pos_bias": False, "use_abs_pos_emb": True},
        64,
        2,
        0,
    ),
    "pvt_v2_b0": ({"num_classes": 5, "depths": (1, 1, 1, 1)}, 64, 4, 0),
    "pvt_v2_b2_li": ({"num_classes": 5, "depths": (1, 1, 1, 1)}, 64, 4, 0),
    "mobilevit_xxs": ({"num_classes": 5}, 64, 9, 0),
}
REFUSED = {
    "swin_tiny_patch4_window7_224": "a position bias to every pair of tokens of a window",
    "beit_base_patch16_224": "a relative position bias to every pair of tokens",
    "eva02_tiny_patch14_224": "RoPE",
    "resnet18": "it has no attention",
}


def build(name):
    options, px, *_ = TIMM[name]
    torch.manual_seed(0)
    return timm.create_model(name, **options).eval(), torch.randn(2, 3, px, px)


@pytest.mark.parametrize("name", TIMM)
def test_converts_runs_and_comes_back_bit_for_bit(name):
    model, x = build(name)
    *_, converted, skipped = TIMM[name]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    modules = [id(m) for m in model.modules()]
    with torch.no_grad():
        before = model(x)
        report = convert(model)
        after = model(x)
    assert (len(report.converted), len(report.skipped)) == (converted, skipped)
    assert after.shape == before.shape
    assert after.isfinite().all()
    assert not torch.equal(after, before)
    assert not any(m.training for m in model.modules())

    report.undo()
    assert [id(m) for m in model.modules()] == modules
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    with torch.no_grad():
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("name", TIMM)
def test_converted_models_train_and_have_no_softmax_where_they_were_converted(name):
    model, x = build(name)
    report = convert(model)
    with torch.no_grad(), ExpCounter() as counter:
        model(x)
    softmaxes = counter.counts["softmax"] + counter.counts["scaled_dot_product_attention"]
    assert (softmaxes == 0) == (not report.skipped)
    model.train()(x).sum().backward()
    for one in report.converted:
        gradients = [p.grad for p in model.get_submodule(one.path).parameters()]
        assert gradients
        assert any(g is not None and g.any() for g in gradients)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "xcit_nano_12_p16_224"])
def test_a_converted_model_is_the_model_that_was_built_with_sima(name):
    model, x = build(name)
    report = convert(model)
    twin = timm.create_model(f"sima_{name}", **{k: v for k, v in TIMM[name][0].items() if k != "img_size"}, img_size=64)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_close(twin.eval()(x), model(x), 1e-6)
    kept = {name for one in report.converted for name in one.kept}
    assert {"qkv.weight", "proj.bias"} <= kept
    assert {one.dropped for one in report.converted} <= {(), ("temperature",)}


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if not ATTENTIONS[name].needs_grid])
def test_other_attentions_too(attention):
    model, x = build("deit_tiny_patch16_224")
    options = {"num_tokens": 17} if ATTENTIONS[attention].needs_num_tokens else {}
    if ATTENTIONS[attention].ties_qk:
        with pytest.raises(ValueError, match="has one projection for queries and keys, this attention has two"):
            convert(model, attention)
        return
    before = model(x)
    convert(model, attention, **options)
    assert model(x).shape == before.shape
    if attention.startswith("softmax") and attention != "softmax_rope":
        assert_close(model(x), before, 1e-5)


@pytest.mark.parametrize("attention", ["sima_local", "relu2", "relu2_wide"])
@pytest.mark.parametrize(
    ("name", "options", "prefix"),
    [
        ("deit_tiny_patch16_224", {"img_size": 64}, 1),
        ("deit_tiny_distilled_patch16_224", {"img_size": 64}, 2),
        ("vit_small_patch14_reg4_dinov2", {"img_size": 56}, 5),
        ("vit_base_patch16_siglip_224", {"img_size": 64}, 0),
        ("vit_tiny_patch16_224", {"img_size": 64, "class_token": False, "global_pool": "avg"}, 0),
        ("beit_base_patch16_224", {"img_size": 64, "use_rel_pos_bias": False}, 1),
        ("xcit_nano_12_p16_224", {"img_size": 64}, 0),
    ],
)
def test_a_local_branch_knows_the_prefix_tokens_of_the_model(name, options, prefix, attention):
    model = timm.create_model(name, depth=1, **options)
    report = convert(model, attention)
    assert report.proven
    block = model.blocks[0]
    assert block.attn.local.prefix_tokens == prefix
    x = torch.randn(2, 3, options["img_size"], options["img_size"])
    layouts = []
    block.attn.local.register_forward_hook(lambda local, inputs, _: layouts.append(local.layout(inputs[0].shape[2])))
    model.forward_features(x).square().sum().backward()
    assert layouts == [(prefix, 4, 4)]
    assert block.attn.local.weight.grad.any()
    report.undo()
    assert not hasattr(block.attn, "local")


@pytest.mark.parametrize("attention", ["sima_local", "relu2", "relu2_wide"])
def test_a_local_branch_has_the_grid_of_the_image(attention):
    model = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), depth=1, dynamic_img_size=True)
    report = convert(model, attention)
    local = model.blocks[0].attn.local
    assert local.layout(25) == (1, 4, 6)  # and not 5 x 5: the image that proved the conversion had 64 x 96 pixels
    copied = copy.deepcopy(model)
    model(torch.zeros(1, 3, 32, 128))
    assert local.layout(17) == (1, 2, 8)  # and not 4 x 4
    assert copied.blocks[0].attn.local.layout(25) == (1, 4, 6)
    copied(torch.zeros(1, 3, 128, 32))
    assert copied.blocks[0].attn.local.layout(17) == (1, 8, 2)
    report.undo()
    assert not model.patch_embed.proj._forward_hooks
    convert(model, attention, grid=(4, 6))
    assert model.blocks[0].attn.local.layout(25) == (1, 4, 6)
    with pytest.raises(ValueError, match="17 tokens are not a grid of 4 x 6 plus 1 prefix tokens"):
        model(torch.zeros(1, 3, 32, 128))


@pytest.mark.parametrize("attention", ["sima_local", "relu2", "relu2_wide"])
def test_a_local_branch_is_refused_where_there_are_fewer_keys(attention):
    model, _ = build("pvt_v2_b0")
    with pytest.raises(ValueError, match=f"fewer keys than queries, which '{attention}' cannot take"):
        convert(model, attention)


@pytest.mark.parametrize(("built", "wanted"), [("sima_local", "sima"), ("cosformer_2d", "cosformer")])
def test_a_subclass_of_an_attention_is_not_that_attention(built, wanted):
    model = timm.create_model("sima_vit_mini_patch4_64", attention=built, depth=1, class_token=False, global_pool="avg")
    with pytest.raises(ValueError, match=f"of this package, which is not converted; build .*attention='{wanted}'"):
        convert(model, wanted)
    with pytest.raises(ValueError, match=f"are '{built}' already"):
        convert(model, built)


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_what_cannot_be_converted_is_refused_with_its_reason(name, reason):
    options = {} if name == "resnet18" else {"img_size": 56 if "eva" in name else 64}
    if name.startswith("swin"):
        options = {"img_size": 224, "depths": (1, 1, 1, 1)}
    elif name != "resnet18":
        options["depth"] = 1
    model = timm.create_model(name, **options)
    with pytest.raises(ValueError, match=f"nothing in this .* could be converted to 'sima': .*{reason}"):
        convert(model)


def test_where_chooses_and_options_are_passed_on():
    model, _ = build("deit_tiny_patch16_224")
    report = convert(model, where=lambda path, module: path.startswith("blocks.1."), token_ref=17, norm="l2")
    assert [one.path for one in report.converted] == ["blocks.1.attn"]
    assert [one.reason for one in report.skipped] == ["`where` left it out"]
    attention = model.blocks[1].attn
    assert isinstance(attention, SimAttention)
    assert (attention.token_ref, attention.norm_over_tokens) == (17, "l2")


def test_the_report_reads_like_one():
    model, _ = build("xcit_nano_12_p16_224")
    text = str(convert(model))
    assert "Xcit: 4 attentions -> sima, 0 left alone" in text
    assert "blocks.0.attn: XCA -> SimAttention, dropped temperature" in text
    assert "cls_attn_blocks.1.attn: ClassAttn -> SimClassAttention" in text
    assert "Fine-tune the converted model" in text
    assert any(isinstance(m, SimClassAttention) for m in model.modules())


@pytest.mark.parametrize(
    ("name", "attention"),
    [("deit_tiny_patch16_224", "softmax"), ("pvt_v2_b0", "softmax"), ("xcit_nano_12_p16_224", "xca")],
)
def test_an_attention_that_computes_the_same_is_not_said_to_need_fine_tuning(name, attention):
    model, x = build(name)
    with torch.no_grad():
        for parameter, value in model.named_parameters():
            if parameter.endswith("temperature"):  # XCA's, one per head; new ones are 1
                value.copy_(torch.linspace(0.2, 9.0, len(value)).view_as(value))
        before = model(x)
        report = convert(model, attention)
        assert_close(model(x), before, 1e-5)
    assert "computes the function that they were trained for" in str(report)
    report.undo()
    assert "another function" in str(convert(model, "elu"))


def test_torchvision_vit():
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model(x)
        report = convert(model)
        with ExpCounter() as counter:
            assert model(x).shape == before.shape
    assert [one.old for one in report.converted] == ["MultiheadAttention"] * 2
    assert counter.counts.keys() == {"gelu"}
    report.undo()
    with torch.no_grad():
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("padded", [False, True])
def test_torch_transformer_encoder_in_eval_mode(padded):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 6, 16)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if padded else None
    report = convert(model)
    assert report.converted[0].dropped == ("dropout=0.1",)
    assert all(isinstance(one.self_attn, SimMultiheadAttention) for one in model.layers)
    with torch.no_grad(), ExpCounter() as counter:
        out = model(x, src_key_padding_mask=mask)
    assert counter.total == 0
    if padded:
        with torch.no_grad():
            assert_close(out[1:, :4], model(x[1:, :4]), 1e-5)
    report.undo()
    assert model.use_nested_tensor
    assert isinstance(model.layers[0].self_attn, nn.MultiheadAttention)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kdim": 8, "vdim": 8}, "another width"),
        ({"add_bias_kv": True}, "a key of its own"),
    ],
)
def test_multihead_attentions_that_have_no_sima_form(options, reason):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4, **options)})
    with pytest.raises(ValueError, match=reason):
        convert(model)


def test_wrong_use_is_named():
    model, _ = build("deit_tiny_patch16_224")
    with pytest.raises(ValueError, match="did you mean 'sima'"):
        convert(model, "smia")
    with pytest.raises(ValueError, match=r"does not run on an image of \[1, 3, 5, 5\] .*pass example_inputs"):
        convert(model, example_inputs=torch.zeros(1, 3, 5, 5))
    assert type(model.blocks[0].attn) is timm.layers.Attention
    with pytest.raises(ValueError, match="the model itself is a MultiheadAttention"):
        convert(nn.MultiheadAttention(16, 4))
    with pytest.raises(ValueError, match=r"takes order, token_ref, eps only"):
        convert(nn.ModuleList([nn.MultiheadAttention(16, 4)]), norm="l2")


def test_an_attention_that_is_shared_is_exchanged_everywhere():
    shared = nn.MultiheadAttention(16, 4)
    model = nn.ModuleDict({"first": shared, "second": shared})
    report = convert(model)
    assert [one.path for one in report.converted] == ["first", "second"]
    assert model["first"] is model["second"]
    assert isinstance(model["first"], SimMultiheadAttention)
    report.undo()
    assert model["first"] is model["second"] is shared


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "xcit_nano_12_p16_224", "torch"])
def test_hooks_go_along_until_their_handle_removes_them(name):
    if name == "torch":
        model, x = (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1),
            torch.randn(2, 6, 16, requires_grad=True),
        )
        path = "layers.0.self_attn"
    else:
        (model, x), path = build(name), "blocks.0.attn"
    old, called = model.train().get_submodule(path), []
    handles = [
        old.register_forward_pre_hook(lambda module, *_: called.append(("before", module))),
        old.register_forward_hook(lambda module, *_: called.append(("after", module)), with_kwargs=True),
        old.register_full_backward_hook(lambda module, *_: called.append(("back", module))),
    ]
    report = convert(model)
    new = model.get_submodule(path)
    called.clear()  # of the forward that proves the conversion
    model(x).sum().backward()
    assert called == [("before", new), ("after", new), ("back", new)]
    handles[0].remove()
    handles[2].remove()
    model(x).sum().backward()
    assert called[3:] == [("after", new)]
    report.undo()
    model(x).sum().backward()
    assert called[4:] == [("after", old)]


def test_a_conversion_that_fails_half_way_leaves_nothing_behind():
    model, x = build("deit_tiny_patch16_224")
    before = model(x)

    def stumble(path, module):
        if path.startswith("blocks.1."):
            raise KeyError(path)
        return True

    with pytest.raises(KeyError):
        convert(model, where=stumble)
    assert torch.equal(model(x), before)


def test_third_party_classes_are_not_patched():
    before = timm.layers.Attention.forward, nn.MultiheadAttention.forward
    model, _ = build("deit_tiny_patch16_224")
    convert(model)
    assert (timm.layers.Attention.forward, nn.MultiheadAttention.forward) == before
    other, _ = build("deit_tiny_patch16_224")
    assert type(other.blocks[0].attn) is timm.layers.Attention


def test_what_cannot_be_converted_is_said():
    model = timm.create_model("deit_tiny_patch16_224", depth=1)
    before = {name: type(module) for name, module in model.named_modules()}
    for wrong in (None, "deit_tiny_patch16_224"):
        with pytest.raises(TypeError, match=r"a model .* is needed"):
            convert(wrong)
    with pytest.raises(TypeError, match="where must be a function"):
        convert(model, where="blocks.0")
    for options in ({"foo": 3}, {"num_heads": 2}):
        with pytest.raises(ValueError, match="'sima' cannot be built with the options"):
            convert(model, **options)
    with pytest.raises(ValueError, match="token_ref must be"):
        convert(model, token_ref="train")
    assert {name: type(module) for name, module in model.named_modules()} == before
    convert(model)
    with pytest.raises(ValueError, match="are 'sima' already"):
        convert(model)


def softmaxes(model, *inputs):
    with torch.no_grad(), ExpCounter() as counter, torch.compiler.set_stance("force_eager"):
        model(*inputs)
    return counter.counts["softmax"] + counter.counts["scaled_dot_product_attention"]


def attention_types(model):
    return {path: type(module) for path, module in model.named_modules()}


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_compiled_attentions_are_refused_and_the_model_is_left_as_it_was(how):
    model, x = build("deit_tiny_patch16_224")
    if how == "torch.compile":
        model.blocks[1].attn = torch.compile(model.blocks[1].attn, backend="eager")
    else:
        model.blocks[1].attn.compile(backend="eager")
    before, types = softmaxes(model, x), attention_types(model)
    with pytest.raises(ValueError, match=r"blocks\.1\.attn.* is compiled; convert the model first, then compile it"):
        convert(model)
    assert softmaxes(model, x) == before
    assert attention_types(model) == types
    convert(model, where=lambda path, module: path.startswith("blocks.0."))


@pytest.mark.parametrize("how", ["model", "block", "block.compile"])
def test_a_conversion_inside_something_compiled_takes_effect(how):
    torch._dynamo.reset()
    model, x = build("deit_tiny_patch16_224")
    plain = timm.create_model("deit_tiny_patch16_224", **SMALL_VIT).eval()
    plain.load_state_dict(model.state_dict())
    convert(plain)
    if how == "model":
        model = torch.compile(model, backend="eager")
    elif how == "block":
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    else:
        model.blocks[0].compile(backend="eager")
    with torch.no_grad():
        model(x)
        assert convert(model).proven
        assert_close(model(x), plain(x), 1e-5)


class Stubborn(nn.Module):
    """Calls the attention it was built with, whatever takes its place."""

    image_size = 4

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.attn = timm.layers.Attention(16, 4)
        self.call = self.attn.__call__

    def forward(self, x):
        return self.call(self.stem(x).flatten(2).mT)


def test_a_conversion_without_effect_is_an_error_and_undone():
    model = Stubborn()
    types = attention_types(model)
    with pytest.raises(ValueError, match=r"did not run in one forward of the model: attn\."):
        convert(model)
    assert attention_types(model) == types


def test_the_proof_needs_an_input_and_the_report_says_so():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 1)
    report = convert(model)
    assert not report.proven
    assert "Not run: no input of this model is known. Pass example_inputs" in str(report)
    report.undo()
    for inputs in (torch.zeros(1, 3, 16), (torch.zeros(1, 3, 16),), {"src": torch.zeros(1, 3, 16)}):
        report = convert(model, example_inputs=inputs)
        assert report.proven
        assert "Not run" not in str(report)
        report.undo()


def test_the_proof_changes_no_mode():
    model, _ = build("deit_tiny_patch16_224")
    model.train()
    model.blocks[0].eval()  # a frozen part
    model.blocks[1].attn.proj_drop.eval()
    model.blocks[1].attn.attn_drop.eval()
    modes = {path: module.training for path, module in model.named_modules()}
    report = convert(model)
    converted = {path: module.training for path, module in model.named_modules()}
    assert converted | {"blocks.1.attn.attn_drop": False} == modes  # a new one, in the mode of the attention
    report.undo()
    assert {path: module.training for path, module in model.named_modules()} == modes


def test_undo_follows_the_model():
    model, x = build("xcit_nano_12_p16_224")
    model.train()
    report = convert(model)
    model.eval().double()  # the temperature of XCA is not in the model now
    report.undo()
    assert not any(module.training for module in model.modules())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    model(x.double())


def test_undo_keeps_a_precision_that_was_there_before():
    model, _ = build("xcit_nano_12_p16_224")
    model.blocks[0].attn.temperature.data = model.blocks[0].attn.temperature.data.double()
    convert(model).undo()
    assert model.blocks[0].attn.temperature.dtype == torch.float64


def test_undo_gives_back_the_trained_bias_of_beit():
    model, _ = build("beit_base_patch16_224")
    report = convert(model)
    bias = model.blocks[0].attn.qkv.bias
    bias.data = torch.arange(3 * 48.0)
    report.undo()
    attention = model.blocks[0].attn
    assert torch.equal(attention.q_bias, torch.arange(48.0))
    assert torch.equal(attention.v_bias, 96 + torch.arange(48.0))


def test_undo_gives_back_weights_that_were_assigned():
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4)})
    report = convert(model)
    state = {key: torch.ones_like(value) for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    report.undo()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_hook_that_came_after_the_conversion_stays_after_undo():
    model, x = build("deit_tiny_patch16_224")
    report, called = convert(model), []
    model.blocks[0].attn.register_full_backward_hook(lambda module, *_: called.append(module))
    report.undo()
    model(x).sum().backward()
    assert called == [model.blocks[0].attn]


def test_the_report_lists_what_went_along_and_what_did_not():
    model, _ = build("deit_tiny_patch16_224")
    attention = model.blocks[0].attn
    attention.gain = nn.Parameter(torch.ones(1))
    attention.register_buffer("seen", torch.zeros(1))
    attention.probe = nn.Sequential(nn.Linear(2, 2, bias=False))
    attention.tap = nn.Identity()
    report = convert(model)
    first, second = report.converted
    assert first.kept == second.kept == ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
    assert set(first.dropped) == {"gain", "seen", "probe.0.weight", "tap"}
    assert second.dropped == ()
    report.undo()
    assert model.blocks[0].attn is attention
    assert {"gain", "seen", "probe.0.weight"} <= attention.state_dict().keys()


@pytest.mark.parametrize("name", TIMM)
def test_what_is_said_to_be_kept_is_in_the_converted_model(name):
    model, _ = build(name)
    old = {path: dict(module.named_parameters()) for path, module in model.named_modules()}
    for one in convert(model).converted:
        new = {id(parameter) for parameter in model.get_submodule(one.path).parameters()}
        moved = {"q_bias", "v_bias"} if "beit" in name else set()  # into the bias of one layer
        assert {name for name, tensor in old[one.path].items() if id(tensor) in new} | moved == set(one.kept)
        assert set(old[one.path]) == set(one.kept) | (set(one.dropped) & set(old[one.path]))


class Lora(nn.Module):
    """A layer around a linear one, as adapters are."""

    def __init__(self, base):
        super().__init__()
        self.base, self.in_features, self.out_features = base, base.in_features, base.out_features
        self.weight = base.weight


class Int8(torch.Tensor):
    """A tensor of another class, as quantized weights are."""


def quantize(attention):
    from torch.ao.nn.quantized.dynamic import Linear

    attention.proj = Linear(48, 48)


CHANGES = {
    "LoRA": (lambda a: setattr(a, "qkv", Lora(a.qkv)), r"its qkv is a .*Lora, not a torch\.nn\.Linear"),
    "quantized": (quantize, r"its proj is a torch\.ao\..*Linear, not a torch\.nn\.Linear"),
    "quantized tensor": (
        lambda a: setattr(a.proj, "weight", nn.Parameter(a.proj.weight.data.as_subclass(Int8))),
        "its proj.weight is a Int8; convert the model before quantizing",
    ),
    "pruned": (lambda a: prune.l1_unstructured(a.qkv, "weight", 0.5), "its qkv is pruned or parametrized"),
    "parametrized": (lambda a: weight_norm(a.proj), "its proj is pruned or parametrized"),
    "patched": (lambda a: setattr(a, "forward", lambda x: x), "its forward was replaced on this instance"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("change", CHANGES)
def test_attentions_that_were_changed_are_refused_before_anything_is_converted(change):
    model, _ = build("deit_tiny_patch16_224")
    apply, reason = CHANGES[change]
    apply(model.blocks[1].attn)
    types = attention_types(model)
    with pytest.raises(ValueError, match=rf"blocks\.1\.attn cannot be converted: {reason}"):
        convert(model)
    assert attention_types(model) == types


@pytest.mark.parametrize("change", ["pruned", "parametrized"])
def test_a_changed_multihead_attention_is_refused_too(change):
    attention = nn.MultiheadAttention(16, 4)
    if change == "pruned":
        prune.l1_unstructured(attention, "in_proj_weight", 0.5)
    else:
        weight_norm(attention, "in_proj_weight")
    with pytest.raises(ValueError, match="first cannot be converted: it is pruned or parametrized"):
        convert(nn.ModuleDict({"first": attention}))


def test_what_is_sima_already_is_said_to_be():
    model, _ = build("deit_tiny_patch16_224")
    convert(model, where=lambda path, module: "0" in path)
    report = convert(model)
    assert [one.path for one in report.converted] == ["blocks.1.attn"]
    assert [(one.path, one.reason) for one in report.skipped] == [("blocks.0.attn", "it is 'sima' already")]
    with pytest.raises(ValueError, match="are 'sima' already"):
        convert(model)
    with pytest.raises(ValueError, match="it was converted to 'sima' before; undo that first"):
        convert(model, "elu")
    for parts in ([SimMultiheadAttention(8, 2)], [SimClassAttention(8, 2)]):
        with pytest.raises(ValueError, match="are 'sima' already"):
            convert(nn.ModuleList(parts))


def test_undo_says_where_a_converted_attention_is_gone():
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32)
    report = convert(model)
    model.blocks[0].attn = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"blocks.0.attn is not the converted attention any more"):
        report.undo()


CHANGES_AFTERWARDS = {
    "adapter": ("deit_tiny_patch16_224", lambda a: setattr(a, "qkv", Lora(a.qkv))),
    "new layer": ("deit_tiny_patch16_224", lambda a: setattr(a, "norm", nn.LayerNorm(48))),
    "added layer": ("deit_tiny_patch16_224", lambda a: a.add_module("adapter", nn.Linear(48, 48))),
    "parametrized": ("torch", lambda a: weight_norm(a, "in_proj_weight")),
    "pruned": ("torch", lambda a: prune.l1_unstructured(a, "in_proj_weight", 0.5)),
    "pruned copy": ("beit_base_patch16_224", lambda a: prune.l1_unstructured(a.qkv, "weight", 0.5)),
}


@pytest.mark.parametrize("change", CHANGES_AFTERWARDS)
def test_undo_drops_nothing_that_was_put_on_a_converted_attention(change):
    name, apply = CHANGES_AFTERWARDS[change]
    if name == "torch":
        model, path = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 2), "layers.1.self_attn"
    else:
        model, path = build(name)[0], "blocks.1.attn"
    report = convert(model)
    apply(model.get_submodule(path))
    types = attention_types(model)
    with pytest.raises(ValueError, match=rf"{path} was changed after its conversion .* would lose that: remove it"):
        report.undo()
    assert attention_types(model) == types  # nothing was put back, neither the first attention


def test_undo_keeps_what_was_put_on_a_layer_that_both_attentions_hold():
    model, _ = build("deit_tiny_patch16_224")
    report = convert(model)
    prune.l1_unstructured(model.blocks[0].attn.qkv, "weight", 0.5)
    report.undo()
    assert "weight_mask" in dict(model.blocks[0].attn.qkv.named_buffers())


@pytest.mark.parametrize("name", [*TIMM, "torch"])
def test_a_converted_model_is_copied_and_pickled(name):
    if name == "torch":
        model, x = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 1).eval(), torch.randn(2, 6, 16)
    else:
        model, x = build(name)
    convert(model, token_ref=9)
    with torch.no_grad():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), model(x))
            assert attention_types(twin) == attention_types(model)


def test_attentions_that_stay_for_the_same_reason_are_one_line():
    model = timm.create_model("swin_tiny_patch4_window7_224")
    with pytest.raises(
        ValueError, match=r"12 attentions, layers\.0\.blocks\.0\.attn to layers\.3\.blocks\.1\.attn"
    ) as error:
        convert(model)
    assert str(error.value).count("position bias") == 1
