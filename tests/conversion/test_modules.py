"""Models of timm, torchvision and plain torch, converted in place. All are built small; nothing is downloaded."""

import pytest
import timm
import torch
import torchvision
from torch import nn

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
    if attention.startswith("softmax"):
        assert_close(model(x), before, 1e-5)


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
    with pytest.raises(ValueError, match="example_inputs is for transformers' models"):
        convert(model, example_inputs={})
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
