"""transformers' models built from small configurations, converted, saved and loaded. Nothing is downloaded."""

import json
import logging

import pytest
import torch

from closeness import assert_close
from sima_attn.conversion import convert, load_pretrained
from sima_attn.conversion.huggingface import SEALS, register, sima_for_transformers
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


TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = {"vocab_size": 9, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NESTED = {"clip": ("CLIPModel", "CLIPConfig"), "siglip": ("SiglipModel", "SiglipConfig")}
SAVED = ["clip", "siglip", "clip_vision", "siglip_vision", "vit", "vit_classifier", "dinov2", "beit"]


def build_to_save(name):
    """A model, and the part of it that is converted: of those with text the vision model."""
    if name not in NESTED:
        model = build(HONOURED, name.removesuffix("_vision"))
        return model, model
    model, config = (getattr(transformers, part) for part in NESTED[name])
    torch.manual_seed(0)
    model = model(config(text_config={**TEXT, **TOKENS}, vision_config=VISION)).eval()
    return model, model.vision_model


def features(model):
    if not hasattr(model, "get_image_features"):
        return outputs(model, pixel_values=image())
    with torch.no_grad():
        return model.get_image_features(pixel_values=image()).pooler_output


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


@pytest.mark.parametrize("name", SAVED)
def test_saved_and_loaded_twice_it_is_still_sima(name, tmp_path):
    model, part = build_to_save(name)
    convert(part, token_ref=9)
    expected = features(model)
    model.save_pretrained(tmp_path / "once")
    loaded = load_pretrained(type(model), tmp_path / "once")  # and not run before it is saved again
    loaded.save_pretrained(tmp_path / "twice")
    again = load_pretrained(type(model), tmp_path / "twice").eval()
    assert_close(features(again), expected, 1e-6)


@pytest.mark.parametrize("name", SAVED)
def test_no_way_of_transformers_loads_it_as_softmax(name, tmp_path, caplog):
    model, part = build_to_save(name)
    convert(part)
    model.save_pretrained(tmp_path / "once")
    load_pretrained(type(model), tmp_path / "once").save_pretrained(tmp_path / "twice")
    for folder in (tmp_path / "once", tmp_path / "twice"):
        ways = [
            lambda path: type(model).from_pretrained(path),
            lambda path: type(part).from_pretrained(path),
            lambda path: type(model).from_pretrained(path, attn_implementation="sdpa"),
            transformers.AutoModel.from_pretrained,
            transformers.AutoConfig.from_pretrained,
        ]
        for load in ways:
            with pytest.raises(AttributeError, match="has no setter"):
                load(folder)
    with pytest.raises(AttributeError, match="has no setter"):
        type(model.config)(**model.config.to_dict())
    # Nothing but what is shown without any setting of the log says how.
    assert "load this model with sima_attn.conversion.load_pretrained" in caplog.text


@pytest.fixture(autouse=True)
def transformers_log_is_captured(monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)


def test_either_seal_is_enough(tmp_path):
    model = build(HONOURED, "vit")
    convert(model)
    model.save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "config.json").read_text())
    for seal in SEALS:
        one = {key: value for key, value in entries.items() if key not in SEALS or key == seal}
        (tmp_path / "config.json").write_text(json.dumps(one))
        with pytest.raises(AttributeError, match="has no setter"):
            transformers.ViTModel.from_pretrained(tmp_path)
        assert load_pretrained(transformers.AutoModel, tmp_path).config._attn_implementation == "sima"


def test_a_part_of_a_converted_model_is_loaded_alone(tmp_path):
    model, part = build_to_save("clip")
    convert(part)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(transformers.CLIPVisionModel, tmp_path).eval()
    assert_close(outputs(loaded, pixel_values=image()), outputs(part, pixel_values=image()), 1e-6)


def test_a_model_built_with_the_setting_is_sealed_by_its_first_forward(tmp_path):
    register()
    config = transformers.ViTConfig(**VISION)
    model = transformers.AutoModel.from_config(config, attn_implementation="sima").eval()
    outputs(model, pixel_values=image())
    model.save_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="has no setter"):
        transformers.ViTModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_after_undo_it_is_saved_as_it_was(name, tmp_path):
    model, part = build_to_save(name)
    before, entries = features(model), model.config.to_dict()
    convert(part, token_ref=9).undo()
    assert model.config.to_dict() == entries
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no model that was converted to SimA: load it with from_pretrained"):
        load_pretrained(type(model), tmp_path)
    assert torch.equal(features(type(model).from_pretrained(tmp_path).eval()), before)


def test_a_converted_part_stays_so_when_the_whole_cannot_be_converted():
    model, part = build_to_save("clip")
    convert(part, token_ref=9)
    entries, expected = model.config.to_dict(), features(model)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="is causal, which SimA cannot be"):
        convert(model, example_inputs={"input_ids": ids, "pixel_values": image(1)})
    assert model.config.to_dict() == entries
    assert torch.equal(features(model), expected)


def test_what_is_sima_already_is_said_to_be():
    model = build(HONOURED, "vit")
    convert(model)
    with pytest.raises(ValueError, match="the attentions of this ViTModel are 'sima' already"):
        convert(model)


def test_the_proof_changes_no_mode():
    model = build(HONOURED, "vit").train()
    model.embeddings.eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    assert convert(model).proven
    assert [module.training for module in model.modules()] == modes


def test_a_compiled_part_takes_the_conversion():
    torch._dynamo.reset()
    model, plain = build(HONOURED, "vit"), build(HONOURED, "vit")
    convert(plain)
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    outputs(model, pixel_values=image())
    assert len(convert(model).converted) == 2
    assert_close(outputs(model, pixel_values=image()), outputs(plain, pixel_values=image()), 1e-5)


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


def test_padding_of_the_keys_hides_no_query_of_cross_attention():
    """Not even where there are as many queries as keys."""

    class CrossAttention(torch.nn.Module):
        pass

    class SelfAttention(torch.nn.Module):
        pass

    q, k, v = torch.randn(3, 1, 2, 6, 4)
    mask = (torch.arange(6) < 3).expand(1, 1, 6, 6)
    across, _ = sima_for_transformers(CrossAttention(), q, k, v, attention_mask=mask)
    within, _ = sima_for_transformers(SelfAttention(), q, k, v, attention_mask=mask)
    assert (across != 0).all()
    assert (within[:, 3:] == 0).all()


def test_the_attention_of_a_converted_model_is_not_chosen_when_it_is_loaded(tmp_path):
    with pytest.raises(ValueError, match="attn_implementation and config are those of the converted model"):
        load_pretrained(transformers.ViTModel, str(tmp_path), attn_implementation="sdpa")
