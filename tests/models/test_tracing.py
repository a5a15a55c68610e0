"""torch.fx and TorchScript: what timm's and torchvision's feature extraction trace, and what is refused."""

import pytest
import timm
import torch
from timm.layers import create_feature_extractor as timm_extractor
from timm.layers import get_graph_node_names
from torchvision.models import VisionTransformer
from torchvision.models.feature_extraction import create_feature_extractor as torchvision_extractor

import sima_attn
from sima_attn.nn import SimAttention
from sima_attn.nn.registry import ATTENTIONS

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5}
GRID = {"class_token": False, "global_pool": "avg"}
FIXED_SIZE = {"dynamic_img_size": False, "dynamic_img_pad": False}  # otherwise timm alone can trace a ViT
XCIT = {"embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5}
CVT = {"embed_dims": (16, 32), "depths": (1, 2), "num_heads": (1, 2), "num_classes": 5}
CVT |= {"patch_sizes": (3, 3), "strides": (2, 2), "paddings": (1, 1)}
SMALL = {
    "sima_deit_tiny_patch16_224": VIT | FIXED_SIZE,
    "sima_vit_mini_patch4_64": VIT | FIXED_SIZE,
    "sima_vit_mini_patch4_64_local": VIT | FIXED_SIZE,
    "sima_xcit_nano_12_p16_224": XCIT,
    "sima_xcit_mini_p4_64": XCIT,
    "sima_xcit_mini_p4_64_nolpi": XCIT,
    "sima_cvt_13": CVT,
}


def build(name, **options):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL.get(name, VIT), **options})


def values_and_gradients(model, images, outputs):
    """The logits, and the gradients of their sum of squares with respect to each parameter, by name."""
    torch.manual_seed(0)  # where something is drawn
    logits = outputs(images)
    model.zero_grad()
    logits.square().sum().backward()
    return {"logits": logits} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_traced(model, extractor, last="head", px=16):
    """The graph computes what the model does, forward and backward."""
    images = torch.randn(2, 3, px, px)
    expected = values_and_gradients(model, images, model)
    graph = extractor(model, [last])
    traced = values_and_gradients(graph, images, lambda x: graph(x)[last])
    assert expected.keys() == traced.keys()
    assert [name for name in expected if not torch.equal(expected[name], traced[name])] == []


@pytest.mark.parametrize("extractor", [timm_extractor, torchvision_extractor], ids=["timm", "torchvision"])
@pytest.mark.parametrize("name", SMALL)
def test_features_are_extracted_from_every_family(name, extractor):
    check_traced(build(name), extractor)


def test_timm_traces_a_vit_of_any_image_size():
    check_traced(build("sima_deit_tiny_patch16_224", dynamic_img_size=True, dynamic_img_pad=True), timm_extractor)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_features_are_extracted_with_every_attention(attention):
    check_traced(build("sima_vit_mini_patch4_64", attention=attention, **GRID), torchvision_extractor)


def test_an_attention_is_one_node_by_its_name():
    train, evaluation = get_graph_node_names(build("sima_xcit_nano_12_p16_224"))
    assert train == evaluation
    assert {"blocks.1.attn", "cls_attn_blocks.0.attn"} <= set(train)
    assert not [name for name in train if ".attn." in name]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "pvt_v2_b0", "torchvision"])
def test_features_are_extracted_from_a_converted_model(name):
    options = {"use_rel_pos_bias": False} if "beit" in name else {}
    if name == "torchvision":
        model = VisionTransformer(16, 4, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5)
    elif name == "pvt_v2_b0":
        model = timm.create_model(name, embed_dims=(16, 16, 16, 32), num_heads=(1, 1, 1, 2), num_classes=5)
    else:
        model = build(name, **options)
    report = sima_attn.convert(model)
    assert report.converted
    last, px = ("heads.head" if name == "torchvision" else "head"), (32 if name == "pvt_v2_b0" else 16)
    check_traced(model, timm_extractor, last, px)


@pytest.mark.parametrize("name", ["sima_deit_tiny_patch16_224", "sima_xcit_nano_12_p16_224", "sima_cvt_13"])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_is_refused_in_one_sentence(name):
    said = r"(SimAttention|PatchConv2d) is not supported by torch\.jit\.script, .*; use torch\.compile"
    with pytest.raises(ValueError, match=said):
        torch.jit.script(build(name))


def test_hooks_of_an_attention_run_once_in_a_graph():
    model = torch.nn.Sequential(SimAttention(8, 2))
    calls = []
    model[0].register_forward_hook(lambda module, inputs, output: calls.append(1) or output * 2)
    x = torch.randn(1, 5, 8)
    expected = model(x)
    calls.clear()
    graph = torch.fx.symbolic_trace(model)
    assert calls == []
    assert torch.equal(graph(x), expected)
    assert calls == [1]
