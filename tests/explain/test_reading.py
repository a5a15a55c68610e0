"""What is read from a running model is what it computed: the layer's output follows from it."""

import pytest
import torch
from small_models import MODELS, build, cvt, deit, image, timm_vit
from torch import nn

from closeness import assert_close
from sima_attn import convert
from sima_attn.explain import read_attention
from sima_attn.nn.attention import Attention
from sima_attn.nn.grid import on_grid
from sima_attn.ops.reference import normalize_tokens, sima_matrix_reference

FLOAT32 = 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_in_order_and_their_grids_fit(name):
    model = build(name)
    reading = read_attention(model, image(batch=2))
    order = [path for path, _ in model.named_modules()]
    paths = [layer.path for layer in reading.layers]
    assert paths == sorted(paths, key=order.index)
    for layer in reading.layers:
        for of in ("q", "k"):
            tokens, (rows, columns) = layer.tokens(of)
            assert 0 <= tokens.shape[2] - rows * columns <= 4
            assert columns > rows  # the image is wider than high
            assert layer.scores(of).shape == (2, rows, columns)
    with torch.no_grad():
        assert torch.equal(reading.output, model(image(batch=2)))


@pytest.mark.parametrize("name", ["deit", "deit, softmax", "cvt", "cvt, softmax", "timm's vit, converted"])
def test_the_output_of_the_layer_follows_from_the_q_and_k_that_were_read(name):
    """A v is made by the model's own projection; A from q and k must turn it into the model's own output."""
    model = build(name)
    calls = {}

    def keep(module, inputs, output):
        calls[module] = inputs, output

    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_hook(keep)
    layers = read_attention(model, image()).layers
    assert len(layers) == len(calls)
    for layer in layers:
        inputs, output = calls[layer.module]
        with torch.no_grad():
            v = layer.module.split(*inputs)[2]
            assert_close(layer.module.join(layer.matrix() @ v), output, FLOAT32)


def test_maps_are_of_the_rotated_queries_and_keys():
    """The l1 norm of a channel that is turned is not that of the channel."""
    layer = read_attention(deit(attention="sima_rope"), image()).layers[0]
    rotation, (rows, columns) = layer.module.rotation, layer.tokens("q")[1]
    with on_grid(rotation, (rows, columns)):
        turned = rotation(layer.q)
    assert_close(layer.normalized("q"), normalize_tokens(turned, "l1", 1e-12), FLOAT32)
    assert_close(layer.normalized("q") @ layer.normalized("k").mT * turned.shape[2] / turned.shape[3], layer.matrix())


def test_torchvisions_and_transformers_models_can_be_read():
    vision = pytest.importorskip("torchvision").models.VisionTransformer
    model = vision(image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=16).eval()
    seen = []
    model.encoder.layers[0].self_attention.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(args[0]), with_kwargs=True
    )
    layer = read_attention(model, image(32, 32)).layers[0]
    _, weights = model.encoder.layers[0].self_attention(seen[0], seen[0], seen[0], average_attn_weights=False)
    assert_close(layer.matrix(), weights.detach(), FLOAT32)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=32, patch_size=8))
    reading = read_attention(model, image(32, 32))
    assert [layer.q_grid for layer in reading.layers] == [(4, 4), (4, 4)]
    assert reading.output.shape == (1, 2)
    model.set_attn_implementation("eager")
    weights = model(image(32, 32), output_attentions=True).attentions
    assert_close(reading.layers[0].matrix(), weights[0].detach(), FLOAT32)
    convert(model, token_ref=34.0)  # with 17 tokens, the output is halved
    layer = read_attention(model, image(32, 32)).layers[0]
    assert_close(layer.matrix(), 0.5 * sima_matrix_reference(layer.q, layer.k), FLOAT32)


def test_sima_is_normalized_over_all_tokens_and_softmax_is_not():
    layer = read_attention(build("deit"), image()).layers[0]
    assert_close(layer.normalized("q").abs().sum(2), torch.ones(1, 2, 16), FLOAT32)  # class token included
    layer = read_attention(build("deit, softmax"), image()).layers[0]
    assert torch.equal(layer.normalized("k"), layer.k)
    layer = read_attention(build("xcit, xca"), image()).layers[0]
    assert torch.equal(layer.normalized("q"), normalize_tokens(layer.q, "l2"))


def test_the_model_is_left_as_it_was():
    model = deit().train()
    model.blocks[0].eval()
    read_attention(model, image())
    assert model.training
    assert not model.blocks[0].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_padded_image_covers_a_share_of_the_grid():
    assert read_attention(deit(), image(28, 40)).share == (28 / 32, 1.0)
    assert read_attention(cvt(), image(32, 48)).share == (1.0, 1.0)


def test_what_cannot_be_read_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="no self-attention of this Sequential can be read"):
        read_attention(nn.Sequential(nn.Conv2d(3, 4, 3)), image())
    with pytest.raises(ValueError, match="layer must be from -3 to 2, got 3"):
        read_attention(deit(), image()).layer(3)
    with pytest.raises(ValueError, match=r"is of 'q' .* or 'k'"):
        read_attention(deit(), image()).layers[0].scores("v")
    with pytest.raises(ValueError, match="its matrix is of channels"):
        read_attention(build("xcit, xca"), image()).layers[0].matrix()
    with pytest.raises(ValueError, match="images must have shape"):
        read_attention(timm_vit(), image()[0])


def test_the_matrix_of_an_attention_with_rope_is_unknown():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes, image_size=32, patch_size=8))
    with pytest.raises(ValueError, match="whose attention matrix is unknown"):
        read_attention(model, image(32, 32)).layers[0].matrix()
