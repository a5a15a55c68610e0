"""transformers' models built from small configurations and converted. Nothing is downloaded."""

import copy

import pytest
import torch

from closeness import assert_close
from sima_attn.conversion import convert
from sima_attn.conversion.huggingface import attend, core_of, register, switch
from sima_attn.conversion.modules import Refused
from sima_attn.conversion.placing import converted_modules
from sima_attn.nn import SimMultiheadAttention, attention_class
from sima_attn.ops import ExpCounter
from transformers_models import HONORED, MASKED, SILENT, VISION, build, build_clip, features, image, outputs

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", HONORED)
def test_converts_every_layer_and_comes_back(name):
    model = build(HONORED, name)
    before = outputs(model, pixel_values=image())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    report = convert(model)
    assert len(report.converted) == (3 if name == "siglip" else 2)  # SigLIP pools by a torch.nn.MultiheadAttention
    assert not report.skipped
    with ExpCounter() as counter:
        after = outputs(model, pixel_values=image())
    assert counter.counts["softmax"] + counter.counts["scaled_dot_product_attention"] == 0
    assert after.shape == before.shape
    assert not torch.equal(after, before)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    report.undo()
    assert torch.equal(outputs(model, pixel_values=image()), before)


# Tokens before the patch tokens: class token, distillation token, registers.
PREFIX_TOKENS = {
    "vit": 1,
    "deit": 2,
    "dinov2": 1,
    "dinov2_registers": 5,
    "clip": 1,
    "siglip": 0,
    "beit": 1,
    "vit_msn": 1,
    "ijepa": 0,
}


@pytest.mark.parametrize("attention", ["sima_local", "relu2", "relu2_wide"])
@pytest.mark.parametrize("name", PREFIX_TOKENS)
def test_the_local_branch_sees_the_patch_tokens_and_learns(name, attention):
    model = build(HONORED, name)
    before, keys = outputs(model, pixel_values=image()), list(model.state_dict())
    report = convert(model, attention)
    modules = [model.get_submodule(path) for path in converted_modules(model)]
    cores = [core_of(module) for module in modules]
    prefix = PREFIX_TOKENS[name]
    assert [core.local.prefix_tokens for core in cores] == [prefix] * 2
    # With filters that copy the token, the local branch of a patch token is v, and that of a prefix token is zero.
    with torch.no_grad():
        for core in cores:
            core.local.weight[:, 0, 1, 1] = 1
    seen = {}
    cores[0].register_forward_hook(lambda core, args, o: seen.update(q=args[0], k=args[1], v=args[2], o=o))
    outputs(model, pixel_values=image())
    local = seen["o"] - cores[0].matrix(seen["q"], seen["k"]) @ seen["v"]
    assert_close(local[:, :, prefix:], seen["v"][:, :, prefix:], 1e-4)
    assert local[:, :, :prefix].abs().sum() < 1e-3
    with torch.enable_grad():
        model.train()(pixel_values=image()).last_hidden_state.square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for core in cores for parameter in core.parameters())
    report.undo()
    assert list(model.state_dict()) == keys
    assert torch.equal(outputs(model.eval(), pixel_values=image()), before)


@pytest.mark.parametrize("attention", ["xca", "elu", "efficient", "cosformer", "performer", "nystrom", "soft_full"])
def test_other_attentions_of_the_registry(attention):
    model = build(HONORED, "vit")
    try:
        report = convert(model, attention)
    except ValueError as error:
        assert "one projection for queries and keys" in str(error)  # noqa: PT017
        return
    assert {one.new for one in report.converted} == {attention_class(attention).__name__}
    assert report.proven


def test_a_local_branch_has_the_grid_of_the_image():
    config = transformers.ViTConfig(**{**VISION, "image_size": [48, 32]})
    model = transformers.ViTModel(config).eval()
    convert(model, "sima_local")
    assert core_of(model.layers[0].attention).local.layout(25) == (1, 6, 4)
    square = build(HONORED, "vit")
    convert(square, "sima_local")
    square(torch.zeros(1, 3, 16, 64), interpolate_pos_encoding=True)
    assert core_of(square.layers[0].attention).local.layout(17) == (1, 2, 8)
    other = build(HONORED, "vit")
    convert(other, "sima_local", prefix_tokens=1, grid=(2, 8))  # what is given is taken
    assert core_of(other.layers[0].attention).local.grid == (2, 8)


def test_tokens_that_are_no_grid_are_refused_by_attentions_with_a_local_branch(tmp_path):
    with pytest.raises(ValueError, match=r"117 tokens are not a grid of 4 x 4 plus 0 prefix tokens"):
        convert(build(HONORED, "yolos"), "sima_local")  # 100 detection tokens come after the patches
    masked = build(MASKED, "vit_mae")
    with pytest.raises(
        ValueError, match=r"it sees some of the patches in a random order .* load the encoder as ViTModel"
    ):
        convert(masked, "relu2")
    assert len(convert(masked, "sima").converted) == 3
    masked = build(MASKED, "vit_mae")
    masked.save_pretrained(tmp_path)
    encoder = transformers.ViTModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    masked.config.mask_ratio = 0.0
    in_order = torch.arange(16.0).expand(2, 16)
    with torch.no_grad():
        expected = masked.vit(image(), noise=in_order).last_hidden_state
    assert_close(outputs(encoder, pixel_values=image()), expected, 1e-6)
    assert len(convert(encoder, "sima_local").converted) == 2


@pytest.mark.parametrize("name", SILENT)
def test_families_that_accept_the_setting_and_ignore_it_are_refused(name):
    model = build(SILENT, name)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="it does not call transformers' attention interface"):
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


def test_a_converted_part_stays_so_when_the_whole_cannot_be_converted():
    model = build_clip()
    convert(model.vision_model, token_ref=9)
    entries, expected = model.config.vision_config.to_dict(), features(model)
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="is causal, which SimAttention cannot be"):
        convert(model, example_inputs={"input_ids": ids, "pixel_values": image(1)})
    assert model.config.vision_config.to_dict() == entries
    assert model.config.to_dict()["sima_attn"]["modules"].keys() == converted_modules(model).keys()
    assert torch.equal(features(model), expected)


def test_what_is_sima_already_is_said_to_be():
    model = build(HONORED, "vit")
    convert(model)
    with pytest.raises(ValueError, match="the attentions of this ViTModel are 'sima' already"):
        convert(model)


def test_the_proof_changes_no_mode():
    model = build(HONORED, "vit").train()
    model.embeddings.eval()  # a frozen part
    modes = {module: module.training for module in model.modules()}
    assert convert(model).proven
    assert {module: module.training for module in modes} == modes
    assert all(core_of(layer.attention).training for layer in model.layers)


def test_a_compiled_part_takes_the_conversion():
    torch._dynamo.reset()
    model, plain = build(HONORED, "vit"), build(HONORED, "vit")
    convert(plain)
    model.layers[0] = torch.compile(model.layers[0], backend="eager")
    outputs(model, pixel_values=image())
    assert len(convert(model).converted) == 2
    assert_close(outputs(model, pixel_values=image()), outputs(plain, pixel_values=image()), 1e-5)


def test_token_ref_reaches_the_operator():
    model = build(HONORED, "vit")
    convert(model)
    plain = outputs(model, pixel_values=image())
    other = build(HONORED, "vit")
    convert(other, token_ref=17)  # 16 patches and the class token: a factor of 1
    assert_close(outputs(other, pixel_values=image()), plain, 1e-6)
    larger = build(HONORED, "vit")
    convert(larger, token_ref=170)
    assert not torch.allclose(outputs(larger, pixel_values=image()), plain)


def converted_module(name, attention="sima"):
    """A module of any class that calls transformers' attention interface, as far as the attention sees it."""
    module = type(name, (torch.nn.Module,), {})()
    module.config = transformers.ViTConfig(**VISION)
    switch(module, attention, {})
    return module


def test_output_attentions_is_a_warning():
    model = build(HONORED, "vit")
    convert(model)
    with pytest.warns(UserWarning, match=r"output_attentions is not supported .*read_attention"):
        model(image(), output_attentions=True)


def test_padding_masks_are_honored_and_other_masks_refused():
    module = converted_module("SelfAttention")
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    keep = torch.arange(6) < torch.tensor([[6], [4]])
    mask = keep[:, None, None, :].expand(2, 1, 6, 6)
    out, weights = attend(module, q, k, v, mask)
    assert weights is None
    alone, _ = attend(module, q[1:, :, :4], k[1:, :, :4], v[1:, :, :4])
    assert_close(out[1:, :4], alone, 1e-6)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    with pytest.raises(ValueError, match="different keys from different queries"):
        attend(module, q, k, v, causal)
    with pytest.raises(ValueError, match="cannot add a bias to pairs of tokens"):
        attend(module, q, k, v, torch.zeros(2, 1, 6, 6))
    with pytest.raises(ValueError, match="is causal, which SimAttention cannot be"):
        attend(module, q, k, v, is_causal=True)


def test_attentions_that_cannot_honour_a_mask_or_other_keys_are_refused():
    module = converted_module("SelfAttention", "relu2")
    q, k, v = torch.randn(3, 2, 4, 16, 8)
    with pytest.raises(ValueError, match=r"Relu2Attention takes no mask.*convert it to 'sima'"):
        attend(module, q, k, v, torch.ones(2, 1, 16, 16, dtype=torch.bool))
    with pytest.raises(Refused, match="other keys than queries, which 'sima_local' cannot take"):
        converted_module("CrossAttention", "sima_local")


def test_wrong_use_is_named():
    model = build(HONORED, "vit")
    convert(model, "relu2")
    with pytest.raises(ValueError, match="it was converted to 'relu2' before; undo that first"):
        convert(model, "sima")
    model = build(HONORED, "vit")
    with pytest.raises(ValueError, match="it has softmax already"):
        convert(model, "softmax")
    with pytest.raises(ValueError, match=r"'sima' cannot be built with the options \{'nrom': 'l2'\}"):
        convert(model, nrom="l2")
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
    model = build(HONORED, "vit")
    convert(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(outputs(compiled, pixel_values=image()), outputs(model, pixel_values=image()), 1e-5)


def test_padding_of_the_keys_hides_no_query_of_cross_attention():
    """Not even where there are as many queries as keys."""
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    mask = (torch.arange(6) < 3).expand(1, 1, 6, 6)
    across, _ = attend(converted_module("CrossAttention"), q, k, v, attention_mask=mask)
    within, _ = attend(converted_module("SelfAttention"), q, k, v, attention_mask=mask)
    assert (across != 0).all()
    assert (within[:, 3:] == 0).all()


def test_where_chooses_modules_of_one_configuration():
    model = build(HONORED, "vit")
    with ExpCounter() as all_softmax:
        outputs(model, pixel_values=image(1))
    report = convert(model, where=lambda path, module: path.startswith("layers.1."))
    assert [one.path.split(".")[1] for one in report.converted] == ["1"]
    assert [one.reason for one in report.skipped] == ["`where` left it out"]
    with ExpCounter() as counter:
        outputs(model, pixel_values=image(1))
    key = "scaled_dot_product_attention"
    assert counter.counts[key] == all_softmax.counts[key] / 2 > 0


def test_where_converts_the_vision_model_beside_a_causal_text_model():
    model, other = build_clip(), build_clip()
    inputs = {"input_ids": torch.tensor([[1, 3, 4, 2]]), "pixel_values": image(1)}
    report = convert(model, where=lambda path, module: path.startswith("vision_model."), example_inputs=inputs)
    assert len(report.converted) == 2
    convert(other.vision_model)
    assert torch.equal(features(model), features(other))
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits_per_image, other(**inputs).logits_per_image)
    report.undo()
    assert torch.equal(features(model), features(build_clip()))


def test_the_attention_of_a_converted_model_cannot_be_set_to_another():
    model = build(HONORED, "vit")
    report = convert(model)
    with pytest.raises(ValueError, match="attn_implementation='eager' cannot be set"):
        model.set_attn_implementation("eager")
    report.undo()
    model.set_attn_implementation("eager")


def test_a_model_that_shares_the_configuration_is_not_switched_silently():
    model = build(HONORED, "vit")
    config = copy.deepcopy(model.config)
    teacher = transformers.ViTModel(model.config).eval()
    report = convert(model)
    with pytest.raises(ValueError, match="build that from a copy of the configuration made before the conversion"):
        outputs(teacher, pixel_values=image(1))
    with pytest.raises(ValueError, match="was not converted, but its configuration"):
        outputs(transformers.ViTModel(copy.deepcopy(model.config)).eval(), pixel_values=image(1))
    outputs(transformers.ViTModel(config).eval(), pixel_values=image(1))
    report.undo()
    outputs(teacher, pixel_values=image(1))


def test_the_bare_setting_of_transformers_is_refused():
    register()
    config = transformers.ViTConfig(**VISION)
    model = transformers.AutoModel.from_config(config, attn_implementation="sima_attn").eval()
    with pytest.raises(ValueError, match=r"Convert a model with sima_attn\.convert"):
        outputs(model, pixel_values=image(1))


def test_models_of_transformers_inside_a_plain_module_and_modules_inside_them():
    model = torch.nn.Sequential(build(HONORED, "vit"))
    assert len(convert(model, example_inputs=image(1)).converted) == 2
    part = build(HONORED, "siglip")
    convert(part.head)
    assert isinstance(part.head.attention, SimMultiheadAttention)


@pytest.mark.parametrize(
    ("attention", "new"), [("elu", "EluAttention"), ("sima_local", "SimLocalAttention"), ("relu2", "Relu2Attention")]
)
def test_a_timm_model_in_its_wrapper_takes_any_attention(attention, new):
    model = build(HONORED, "timm")
    before = outputs(model, pixel_values=image())
    report = convert(model, attention)
    assert {one.new for one in report.converted} == {new}
    report.undo()
    assert torch.equal(outputs(model, pixel_values=image()), before)


@pytest.mark.parametrize(("family", "count"), [("CLIP", 2), ("Siglip", 3)])
def test_the_word_vision_converts_the_vision_model_and_needs_no_inputs(family, count, tmp_path):
    model = build_clip(family)
    with pytest.raises(ValueError, match=r'has a vision model and a text model.*where="vision".*A causal text model'):
        convert(model)
    report = convert(model, where="vision")
    assert report.proven
    assert len(report.converted) == count
    assert all(one.path.startswith("vision_model.") for one in report.converted)
    assert [one.path for one in report.skipped] == ["text_model.encoder.layers.0.self_attn"]
    model.save_pretrained(tmp_path)
    assert torch.equal(features(transformers.AutoModel.from_pretrained(tmp_path).eval()), features(model))
    report.undo()
    assert torch.equal(features(model), features(build_clip(family)))


def test_the_word_vision_needs_a_vision_model():
    with pytest.raises(ValueError, match='where="vision" is for models of transformers with a vision_model'):
        convert(build(HONORED, "vit"), where="vision", example_inputs=image())
    with pytest.raises(TypeError, match="or 'vision', got 'text'"):
        convert(build(HONORED, "vit"), where="text")
