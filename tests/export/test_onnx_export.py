"""An exported file is right at every size it claims, clean, free of exp() where the model is; whole or not there."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from torch import nn

import sima_attn  # noqa: F401  registers the models
from sima_attn.auditing import audit
from sima_attn.conversion import convert
from sima_attn.data.loader import evaluation_transform
from sima_attn.export import onnx as export_module
from sima_attn.export.onnx import class_names, export_onnx, write_metadata
from sima_attn.export.photo_graph import PreparePhoto, middle
from sima_attn.export.runtimes import installed_runtimes, labels_in, open_model, read_metadata
from sima_attn.models.preprocessing import Preprocessing
from sima_attn.nn import SimAttention
from sima_attn.serve.in_browser import browser_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "photos"
SIZE = 64
LABELS = ["käse", 'a "quoted" name', *"cdefg"]
# What a SimA module may hold in "kv" order: no Expand, no Softmax, nothing that hides an exp().
IN_SIMA = {"MatMul", "Add", "Reshape", "Transpose", "Slice", "Squeeze", "Abs", "ReduceSum", "Clip", "Mul"}
IN_SIMA |= {"Reciprocal", "Unsqueeze"}


def deit(**options):
    return timm.create_model(
        "sima_deit_tiny_patch16_224_relu",
        **{"depth": 1, "embed_dim": 48, "num_heads": 3, "num_classes": 7, "img_size": SIZE, **options},
    )


def images(*shape):
    return torch.randn(*shape)


def run(path, x, runtime="onnxruntime"):
    return torch.from_numpy(open_model(path, runtime)(x.numpy()).copy())


def in_sima(proto):
    return [n for n in proto.graph.node if any("SimAttention" in entry.value for entry in n.metadata_props)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = deit().train()
    path = tmp_path_factory.mktemp("export") / "deit.onnx"
    report = export_onnx(
        model, path, input_size=SIZE, labels=LABELS, name="mine", check_images=images(3, 3, SIZE, SIZE)
    )
    assert model.training  # it is left as it was
    assert {m.order for m in model.modules() if isinstance(m, SimAttention)} == {"auto"}
    assert all(p.requires_grad for p in model.parameters())
    return model.eval(), path, report


@pytest.mark.parametrize("attention", ["sima_local", "relu2", "relu2_wide"])
def test_a_local_branch_is_exported_for_any_image_size(attention, tmp_path):
    model = deit(attention=attention, img_size=224).eval()
    nn.init.normal_(model.blocks[0].attn.local.weight)
    export_onnx(model, tmp_path / "a.onnx", input_size=SIZE, dynamic=("batch", "size"), fail_on_exp=True)
    for shape in ((2, 3, 48, 80), (1, 3, 32, 128), (1, 3, SIZE, SIZE)):
        x = images(*shape)
        assert torch.allclose(run(tmp_path / "a.onnx", x), model(x), atol=1e-4), shape
    model.blocks[0].attn.local.grid = (4, 4)
    with pytest.raises(ValueError, match="fixed token grid, so 'size' cannot be dynamic; export one file per"):
        export_onnx(model, tmp_path / "b.onnx", input_size=SIZE, dynamic=("size",))


def test_the_file_computes_what_torch_computes(exported):
    model, path, report = exported
    x = images(1, 3, SIZE, SIZE)
    assert torch.allclose(run(path, x), model(x), atol=1e-5)
    assert max(report.parity.values()) < 1e-5
    assert report.file_bytes == path.stat().st_size
    assert list(report.parity) == ["random images 1x3x64x64", "3 given inputs, the worst"]
    assert "parity with torch on random images 1x3x64x64" in "\n".join(report.lines())


@pytest.mark.skipif("openvino" not in installed_runtimes(), reason="needs openvino")
def test_openvino_computes_it_too(exported):
    model, path, _ = exported
    x = images(1, 3, SIZE, SIZE)
    assert torch.allclose(run(path, x, "openvino"), model(x), atol=1e-5)


def test_the_graph_is_clean(exported):
    _, path, report = exported
    proto = onnx.load(path)
    assert [(o.domain, o.version) for o in proto.opset_import] == [("", 20)]
    nodes = in_sima(proto)
    assert Counter(node.op_type for node in nodes)["ReduceSum"] == 2
    assert {node.op_type for node in nodes} <= IN_SIMA
    assert "Resize" not in report.nodes
    assert {entry.key for node in proto.graph.node for entry in node.metadata_props} <= set(
        export_module.KEPT_IN_NODES
    )  # no paths of the machine that exported it


@pytest.mark.parametrize(
    ("size", "asked", "order"), [(32, "auto", "qk"), (96, "auto", "kv"), (96, "qk", "qk")]
)  # 5 and 37 tokens, 16 channels a head
def test_the_order_is_the_cheaper_one_and_kv_has_no_matrix_of_token_pairs(tmp_path, size, asked, order):
    report = export_onnx(deit(img_size=size), tmp_path / "m.onnx", input_size=size, order=asked)
    assert report.orders == {"blocks.0.attn": order}
    assert read_metadata(tmp_path / "m.onnx")["order"] == order
    inferred = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "m.onnx"))
    shapes = [[d.dim_value for d in v.type.tensor_type.shape.dim] for v in inferred.graph.value_info]
    tokens = (size // 16) ** 2 + 1
    assert ([tokens, tokens] in [shape[-2:] for shape in shapes]) is (order == "qk")


def xcit(**options):
    small = {"depth": 1, "cls_attn_layers": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    return timm.create_model("sima_xcit_nano_12_p16_224_relu", **small, **options)


def mini_with_local_mixer(**options):
    small = {"depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 5, "patch_size": 16}
    return timm.create_model("sima_vit_mini_patch4_64_local", relu=True, **small, **options)


@pytest.mark.parametrize("build", [deit, xcit, mini_with_local_mixer])
def test_a_dynamic_file_is_right_at_sizes_it_was_not_made_at(tmp_path, build):
    model = build(img_size=224).eval()
    if build is not xcit:
        nn.init.normal_(model.pos_embed)  # at its start it is too small to be missed
    report = export_onnx(model, tmp_path / "m.onnx", input_size=SIZE, dynamic=("batch", "size"))
    assert report.inputs == "images batchx3xheightxwidth"
    for shape in ((2, 3, 48, 80), (1, 3, 224, 224), (5, 3, SIZE, SIZE), (1, 3, 16, 160)):
        x = images(*shape)
        assert torch.allclose(run(tmp_path / "m.onnx", x), model(x), atol=1e-4), shape


def test_images_may_have_other_channels_than_rgb(tmp_path):
    model, x = deit(in_chans=4).eval(), images(1, 4, SIZE, SIZE)
    report = export_onnx(model, tmp_path / "m.onnx", input_size=SIZE)
    assert report.inputs == "images 1x4x64x64"
    assert torch.allclose(run(tmp_path / "m.onnx", x), model(x), atol=1e-5)


def test_a_dynamic_file_of_a_model_that_takes_whole_patches_only(tmp_path):
    """A patch of 14, as in DINOv2, does not divide 16."""
    small = {"depth": 1, "embed_dim": 32, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("vit_tiny_patch16_224", patch_size=14, img_size=42, dynamic_img_size=True, **small)
    export_onnx(model, tmp_path / "m.onnx", input_size=42, dynamic=("size",))
    x = images(1, 3, 70, 56)
    assert torch.allclose(run(tmp_path / "m.onnx", x), model.eval()(x), atol=1e-4)


def test_position_embeddings_of_another_size_are_folded_into_constants(tmp_path):
    model = deit(img_size=224)
    nn.init.normal_(model.pos_embed)
    assert "Resize" not in export_onnx(model, tmp_path / "m.onnx", input_size=SIZE).nodes
    report = export_onnx(xcit(), tmp_path / "x.onnx", input_size=SIZE)
    assert not {"Sin", "Cos", "Range"} & set(report.nodes)
    assert report.audit.is_exp_free


def test_only_the_relu_model_is_free_of_exp(tmp_path, exported):
    with pytest.raises(ValueError, match=r"not exp-free: no exp\(\) in attention, .* Gelu"):
        export_onnx(deit(relu=False), tmp_path / "gelu.onnx", input_size=SIZE, fail_on_exp=True)
    assert list(tmp_path.iterdir()) == []
    _, path, report = exported
    assert report.audit == audit(path)
    assert report.lines()[-1] == "no exp-like call in the whole network"


def test_a_file_that_differs_is_an_error_and_is_not_left_behind(tmp_path, monkeypatch):
    def spoil(proto, facts):
        weight = next(w for w in proto.graph.initializer if w.name == "head.weight")
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 1.1, weight.name))

    monkeypatch.setattr(export_module, "write_metadata", spoil)
    path = tmp_path / "wrong.onnx"
    path.write_text("what was there before")
    with pytest.raises(ValueError, match="differs from torch by"):
        export_onnx(deit(), path, input_size=SIZE)
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_converted_timm_model_and_a_softmax_twin_export(tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=SIZE, num_classes=3)
    softmax = export_onnx(model, tmp_path / "twin.onnx", input_size=SIZE)
    assert softmax.nodes["Softmax"] == 1
    assert softmax.orders == {}
    convert(model, "sima")
    converted = export_onnx(model, tmp_path / "m.onnx", input_size=SIZE)
    assert "Softmax" not in converted.nodes
    assert list(converted.orders) == ["blocks.0.attn"]


def test_a_converted_transformers_model_exports(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=SIZE, num_labels=3
    )
    model = transformers.ViTForImageClassification(config).eval()
    convert(model, "sima")
    report = export_onnx(model, tmp_path / "m.onnx", input_size=SIZE)
    assert "Softmax" not in report.nodes
    x = images(1, 3, SIZE, SIZE)
    assert torch.allclose(run(tmp_path / "m.onnx", x), model(x).logits, atol=1e-5)


def test_classes_have_the_words_of_the_configuration_and_only_where_they_are_its_own():
    shipped = timm.create_model("sima_xcit_mini_p4_64_relu", pretrained=True)
    names = class_names(shipped)
    assert len(names) == 100
    assert names[0] == "goldfish"
    assert class_names(timm.create_model("sima_xcit_mini_p4_64_relu", num_classes=7)) is None
    assert class_names(deit()) is None
    assert class_names(nn.Linear(1, 1)) is None


def test_metadata_hold_labels_and_preprocessing(exported):
    _, path, _ = exported
    found = open_model(path).metadata
    assert found == read_metadata(path)
    assert labels_in(found) == LABELS
    assert found["model"] == "mine"
    assert found["input_size"] == "64x64"
    how = Preprocessing.from_json(found["preprocessing"])
    assert how == Preprocessing.of_model(deit(), SIZE)
    assert json.loads(found["preprocessing"])["size"] == SIZE
    proto = onnx.load(path)
    write_metadata(proto, {"model": "another"})
    assert [e.value for e in proto.metadata_props if e.key.endswith(".model")] == ["another"]


def test_preprocessing_inside_the_graph_is_that_of_timm(tmp_path):
    image = pytest.importorskip("PIL.Image")
    model = deit().eval()
    path = tmp_path / "m.onnx"
    report = export_onnx(model, path, input_size=SIZE, preprocessing=True)
    assert report.inputs == "photo heightxwidthx3"
    assert report.audit.is_exp_free
    how = Preprocessing.of_model(model, SIZE)
    draw = np.random.default_rng(0)
    photos = [draw.integers(0, 256, shape, dtype=np.uint8) for shape in ((200, 131, 3), (70, 201, 3), (40, 40, 3))]
    if PHOTOS.is_dir():
        photos += [np.asarray(image.open(file).convert("RGB")) for file in sorted(PHOTOS.glob("*.JPEG"))[:3]]
    for photo in photos:
        by_timm = evaluation_transform(how)(image.fromarray(photo))[None]
        ours = PreparePhoto(how)(torch.from_numpy(photo.copy()))
        levels = (ours - by_timm).abs().amax() * 255 * max(how.std)
        assert levels < 1.5  # PIL rounds to bytes twice
        assert torch.allclose(torch.from_numpy(open_model(path)(photo)), model(ours), atol=1e-3)


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize(("crop", "interpolation"), [(0.9, "bilinear"), (1.0, "bicubic")])
def test_the_crop_is_cut_where_torchvision_cuts(crop, interpolation, mode):
    image = pytest.importorskip("PIL.Image")
    how = Preprocessing(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), crop, interpolation, mode)
    photo = np.arange(61 * 93 * 3, dtype=np.uint8).reshape(61, 93, 3)
    assert (
        PreparePhoto(how)(torch.from_numpy(photo)) - evaluation_transform(how)(image.fromarray(photo))
    ).abs().max() * 127 < 1.5


def test_halves_go_to_the_even_number():
    assert [middle(n) for n in range(12)] == [round(n / 2) for n in range(12)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_size": 65}, "must be a multiple of the patch size 16, got 65: use 64 or 80"),
        ({"input_size": SIZE, "dynamic": ("btach",)}, "unknown dynamic size 'btach'.* did you mean 'batch'"),
        ({"input_size": SIZE, "order": "vk"}, "unknown order 'vk'"),
        ({"input_size": SIZE, "labels": ["a", "b"]}, "2 labels for the 7 classes"),
        ({"input_size": SIZE, "labels": []}, "0 labels for the 7 classes"),
        (
            {"input_size": SIZE, "preprocessing": True, "dynamic": ("batch",)},
            "one photo of any size: omit dynamic batch",
        ),
        ({"input_size": (64, 96), "preprocessing": True}, "the image size must be one number, got 64x96"),
    ],
)
def test_wrong_options_are_said(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        export_onnx(deit(), tmp_path / "m.onnx", **options)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_are_said_too(tmp_path):
    with pytest.raises(ValueError, match=r"must end in \.onnx"):
        export_onnx(deit(), tmp_path / "m.pt", input_size=SIZE)
    with pytest.raises(ValueError, match="order applies to SimA"):
        export_onnx(nn.Flatten(), tmp_path / "m.onnx", input_size=SIZE, order="kv")
    with pytest.raises(ValueError, match="cannot run on"):
        export_onnx(nn.Linear(3, 3), tmp_path / "m.onnx", input_size=SIZE)
    with pytest.raises(ValueError, match="does not say how images are normalized"):
        export_onnx(nn.Flatten(), tmp_path / "m.onnx", input_size=SIZE, preprocessing=True)

    class Branches(nn.Module):
        def forward(self, x):
            return x.flatten(1) if x.sum() > 0 else -x.flatten(1)

    with pytest.raises(ValueError, match="Branches cannot be exported"):
        export_onnx(Branches(), tmp_path / "m.onnx", input_size=8)
    with pytest.raises(ValueError, match=r"unknown runtime 'openvinno'.*did you mean 'openvino'"):
        open_model(tmp_path / "m.onnx", "openvinno")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_model(tmp_path / "m.onnx")
    (tmp_path / "m.onnx").write_text("no graph")
    with pytest.raises(ValueError, match="ONNX Runtime cannot load"):
        open_model(tmp_path / "m.onnx")


def test_a_model_without_classifier_gives_features_and_tokens(tmp_path):
    model = timm.create_model("sima_deit_tiny_patch16_224", depth=1, img_size=32, num_classes=0).eval()
    report = export_onnx(model, tmp_path / "m.onnx", input_size=32)
    assert report.outputs == "features 1x192, tokens 1x5x192"
    x = torch.randn(1, 3, 32, 32)
    features, tokens = open_model(tmp_path / "m.onnx").outputs(x.numpy())
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(features), model(x), atol=1e-5)
        assert torch.allclose(torch.from_numpy(tokens), model.forward_features(x), atol=1e-5)
    with pytest.raises(ValueError, match="got 2 labels for DeiT, which gives features"):
        export_onnx(model, tmp_path / "m.onnx", input_size=32, labels=["a", "b"], name="DeiT")
    with pytest.raises(ValueError, match="gives features, and the page shows classes"):
        browser_model(tmp_path / "m.onnx")
