"""transformers' models built from small configurations, converted, saved and loaded. Nothing is downloaded."""

import json

import pytest
import torch

from closeness import assert_close
from sima_attn.conversion import convert
from sima_attn.ops import ExpCounter

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
# name -> (model class, configuration class, arguments)
HONOURED = {
    "vit": ("ViTModel", "ViTConfig", VISION),
    "vit_classifier": ("ViTForImageClassification", "ViTConfig", VISION),
    "deit": ("DeiTModel", "DeiTConfig", VISION),
    "dinov2": ("Dinov2Model", "Dinov2Config", VISION),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VISION),
    "beit": ("BeitModel", "BeitConfig", VISION),
    "vit_msn": ("ViTMSNModel", "ViTMSNConfig", VISION),
    "ijepa": ("IJepaModel", "IJepaConfig", VISION),
    "yolos": ("YolosModel", "YolosConfig", {**VISION, "image_size": [32, 32]}),
}
SILENT = {
    "cvt": ("CvtModel", "CvtConfig", {"embed_dim": [16, 48, 96], "depth": [1, 2, 3], "image_size": 32}),
    "pvt_v2": ("PvtV2Model", "PvtV2Config", {"depths": [1, 1, 1, 1], "image_size": 32}),
}


def build(table, name):
    model, config, options = table[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options)).eval()


def outputs(model, **inputs):
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def image(batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", HONOURED)
def test_converts_every_layer_and_comes_back(name):
    model = build(HONOURED, name)
    before = outputs(model, pixel_values=image())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = convert(model)
    assert len(report.converted) == 2
    with ExpCounter() as counter:
        after = outputs(model, pixel_values=image())
    softmaxes = counter.counts["softmax"] + counter.counts["scaled_dot_product_attention"]
    assert (softmaxes == 0) == (not report.skipped)  # SigLIP pools by an attention of another kind
    assert after.shape == before.shape
    assert not torch.equal(after, before)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    report.undo()
    assert torch.equal(outputs(model, pixel_values=image()), before)


@pytest.mark.parametrize("name", SILENT)
def test_families_that_accept_the_setting_and_ignore_it_are_refused(name):
    model = build(SILENT, name)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="accepts attn_implementation='sima' and never calls it"):
        convert(model)
    assert model.config._attn_implementation == before


def test_a_model_with_a_bias_of_token_pairs_is_refused_and_left_as_it_was():
    options = {
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "image_size": 32,
        "window_size": 4,
        "patch_size": 2,
    }
    model = transformers.SwinModel(transformers.SwinConfig(**options)).eval()
    before = outputs(model, pixel_values=image())
    with pytest.raises(ValueError, match="cannot add a bias to pairs of tokens"):
        convert(model)
    assert torch.equal(outputs(model, pixel_values=image()), before)


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_saved_and_loaded_it_is_still_sima(name, tmp_path):
    model = build(HONOURED, name)
    convert(model, token_ref=9)
    expected = outputs(model, pixel_values=image())
    model.save_pretrained(tmp_path / "once")
    loaded = type(model).from_pretrained(tmp_path / "once").eval()
    assert_close(outputs(loaded, pixel_values=image()), expected, 1e-6)
    loaded.save_pretrained(tmp_path / "twice")
    again = type(model).from_pretrained(tmp_path / "twice").eval()
    assert_close(outputs(again, pixel_values=image()), expected, 1e-6)


def test_loaded_without_sima_it_fails_loudly(tmp_path):
    model = build(HONOURED, "vit")
    convert(model)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["attn_implementation"] == "sima"
    config["attn_implementation"] = "sima_of_a_process_that_did_not_import_sima_attn"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="not supported"):
        transformers.ViTModel.from_pretrained(tmp_path)


def test_token_ref_reaches_the_operator():
    model = build(HONOURED, "vit")
    convert(model)
    plain = outputs(model, pixel_values=image())
    other = build(HONOURED, "vit")
    convert(other, token_ref=17)  # 16 patches and the class token: a factor of 1
    assert_close(outputs(other, pixel_values=image()), plain, 1e-6)
    larger = build(HONOURED, "vit")
    convert(larger, token_ref=170)
    assert not torch.allclose(outputs(larger, pixel_values=image()), plain)


def test_padding_masks_are_honoured_and_other_masks_refused():
    from sima_attn.conversion.huggingface import sima_for_transformers

    module = torch.nn.Identity()
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    keep = torch.arange(6) < torch.tensor([[6], [4]])
    mask = keep[:, None, None, :].expand(2, 1, 6, 6)
    out, weights = sima_for_transformers(module, q, k, v, mask)
    assert weights is None
    alone, _ = sima_for_transformers(module, q[1:, :, :4], k[1:, :, :4], v[1:, :, :4])
    assert_close(out[1:, :4], alone, 1e-6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    with pytest.raises(ValueError, match="different keys from different queries"):
        sima_for_transformers(module, q, k, v, causal)
    with pytest.raises(ValueError, match="cannot add a bias to pairs of tokens"):
        sima_for_transformers(module, q, k, v, torch.zeros(2, 1, 6, 6))
    with pytest.raises(ValueError, match="is causal, which SimA cannot be"):
        sima_for_transformers(module, q, k, v, is_causal=True)


def test_wrong_use_is_named():
    model = build(HONOURED, "vit")
    with pytest.raises(ValueError, match="can be converted to 'sima' only, got 'elu'"):
        convert(model, "elu")
    with pytest.raises(ValueError, match="`where` cannot choose parts of it"):
        convert(model, where=lambda path, module: True)
    with pytest.raises(ValueError, match=r"options for transformers' models: token_ref; got \['norm'\]"):
        convert(model, norm="l2")
    text = transformers.BertModel(transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4))
    with pytest.raises(ValueError, match="takes 'input_ids', not an image: pass example_inputs"):
        convert(text)


def test_a_text_encoder_by_its_own_inputs():
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = transformers.BertModel(config).eval()
    ids = torch.arange(6).expand(2, 6)
    report = convert(model, example_inputs={"input_ids": ids})
    assert len(report.converted) == 2
    padding = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    out = outputs(model, input_ids=ids, attention_mask=padding)
    assert_close(out[1:, :4], outputs(model, input_ids=ids[1:, :4]), 1e-5)


def test_a_converted_model_compiles_to_one_graph():
    torch._dynamo.reset()
    model = build(HONOURED, "vit")
    convert(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(outputs(compiled, pixel_values=image()), outputs(model, pixel_values=image()), 1e-5)
