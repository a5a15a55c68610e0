"""The small models for 64-pixel images: their sizes, and what their own options do."""

import pytest
import timm
import torch

from closeness import assert_close
from sima_attn.auditing import audit
from sima_attn.models.sizes import MINI_VIT, MINI_XCIT
from sima_attn.nn import ATTENTIONS, SimAttention, SimClassAttention
from sima_attn.nn.token_ref import tokens_at

VIT, XCIT = "sima_vit_mini_patch4_64", "sima_xcit_mini_p4_64"
PARAMETERS = {VIT: 5_416_612, f"{VIT}_local": 5_471_908, XCIT: 5_592_388, f"{XCIT}_nolpi": 5_544_388}
TOKENS = 256  # 64 pixels in patches of 4
both = pytest.mark.parametrize("name", [VIT, XCIT])


def build(name, **options):
    return timm.create_model(name, **{"depth": 1, "num_classes": 5, **options}).eval()


def images(height=64, width=64, batch=2):
    return torch.randn(batch, 3, height, width)


@pytest.mark.parametrize("name", [*MINI_VIT, *MINI_XCIT])
def test_every_name_is_known_to_timm_small_and_made_for_64_pixels(name):
    with torch.device("meta"):
        model = timm.create_model(name)
        assert model.eval()(torch.empty(1, 3, 64, 64)).shape == (1, 100)
    count = sum(p.numel() for p in model.parameters())
    assert count <= 6_000_000
    assert count == PARAMETERS.get(name, count)
    cfg = model.pretrained_cfg
    assert (cfg["input_size"], cfg["crop_pct"], cfg["num_classes"]) == ((3, 64, 64), 1.0, 100)
    assert model.state_dict().keys() >= {cfg["first_conv"] + ".weight", cfg["classifier"] + ".weight"}
    assert any(isinstance(m, SimAttention) for m in model.modules())


@pytest.mark.parametrize("attention", ATTENTIONS)
@both
def test_every_attention_goes_in(name, attention):
    model = build(name, attention=attention)
    assert any(isinstance(m, ATTENTIONS[attention]) for m in model.modules())
    if name == XCIT:
        assert isinstance(model.cls_attn_blocks[0].attn, SimClassAttention) == (attention == "sima")
    with torch.no_grad():
        assert model(images()).shape == (2, 5)


@pytest.mark.parametrize("name", [f"{VIT}_relu", f"{XCIT}_relu"])
def test_with_relu_there_is_no_exp_in_the_whole_network(name):
    assert audit(build(name), 64).is_exp_free
    plain = audit(build(name.removesuffix("_relu")), 64)
    assert (plain.attention_exps, plain.other_exps > 0) == (0, True)


@both
def test_token_ref_train_stands_for_the_tokens_of_64_pixels(name):
    model = build(name, token_ref="train")
    modules = [m for m in model.modules() if hasattr(m, "token_ref")]
    assert [m.token_ref for m in modules] == tokens_at(model, modules, 64)
    assert modules[0].token_ref == TOKENS
    plain = build(name)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert_close(model(x := images()), plain(x), 1e-5)
        assert (model(y := images(32, 32)) - plain(y)).abs().max() > 1e-5


@pytest.mark.parametrize("name", [VIT, "sima_deit_tiny_patch16_224"])
def test_the_tokens_of_the_training_size_are_those_of_the_models_own_patches(name):
    model = timm.create_model(name, depth=1, patch_size=8, token_ref="train")
    tokens = (model.pretrained_cfg["input_size"][-1] // 8) ** 2 + model.num_prefix_tokens
    assert model.blocks[0].attn.token_ref == tokens


@both
def test_any_input_size_and_feature_maps(name):
    with torch.no_grad():
        for height, width in ((48, 80), (50, 37)):
            assert build(name)(images(height, width)).shape == (2, 5)
        (maps,) = build(name, features_only=True, out_indices=(0,))(images(32, 48))
    assert maps.shape == (2, 192, 8, 12)


@pytest.mark.parametrize("attention", ["sima", "xca"])
def test_the_tokens_of_an_xcit_lie_in_memory_token_by_token(attention):
    """Otherwise every layer norm copies them."""
    model, strides = build(XCIT, attention=attention, depth=2), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: strides.append(inputs[0].stride()))
    model(images())
    assert set(strides) == {(256 * 192, 192, 1)}


def test_without_lpi_no_convolution_is_left_but_the_stem():
    kinds = [n for n, m in build(XCIT, lpi=False).named_modules() if isinstance(m, torch.nn.Conv2d)]
    assert all(n.startswith(("patch_embed", "pos_embed")) for n in kinds)
    assert any("local_mp" in n for n, _ in build(XCIT).named_modules())


@pytest.mark.parametrize("options", [{}, {"init_values": 0.5}])
def test_a_local_mixer_whose_kernel_is_zero_is_no_mixer(options):
    mixed, plain = build(VIT, local_mixer=True, **options), build(VIT, **options)
    plain.load_state_dict({k: v for k, v in mixed.state_dict().items() if k in plain.state_dict()})
    x = images()
    with torch.no_grad():
        assert (mixed(x) - plain(x)).abs().max() > 1e-4
        for tensor in mixed.blocks[0].local_mp.conv2.parameters():
            tensor.zero_()
        assert_close(mixed(x), plain(x), 1e-6)


def test_initial_q_and_k_change_their_learning_rate_and_nothing_else():
    """SimA's output stays, the gradient of q and k grows as 1 / qk_init: so do Adam's steps relative to the weights."""
    models = []
    for factor in (1.0, 0.25):
        torch.manual_seed(0)
        models.append(build(VIT, qk_init=factor))
    plain, changed = (model.blocks[0].attn.qkv.weight for model in models)
    assert torch.equal(changed[:384], 0.25 * plain[:384])
    assert torch.equal(changed[384:], plain[384:])
    x = images()
    outputs = [model(x) for model in models]
    assert_close(outputs[1], outputs[0].detach(), 1e-5)
    for out in outputs:
        out.square().sum().backward()
    assert_close(changed.grad[:384], 4 * plain.grad[:384], 1e-4)
    assert_close(changed.grad[384:], plain.grad[384:], 1e-4)


def test_a_bias_of_q_and_k_makes_the_first_attention_a_mean():
    """Weights D / N^2 each where q and k are all bias; token_ref D makes them 1 / N, softmax's where all are alike."""
    model = build(VIT, qk_bias=1.0, token_ref=64.0)
    attention = model.blocks[0].attn
    assert (attention.qkv.bias[:384] == 1).all()
    assert (attention.qkv.bias[384:] == 0).all()
    with torch.no_grad():
        attention.qkv.weight[:384].zero_()
        q, k, v = attention.split(torch.randn(2, TOKENS, 192))
        assert_close(attention.core(q, k, v), v.mean(2, keepdim=True).expand_as(v), 1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (VIT, {"local_mixer": True, "class_token": True}, "needs all tokens on a grid"),
        (VIT, {"qk_bias": 1.0, "qkv_bias": False}, "qk_bias=1.0 needs qkv_bias=True"),
        (VIT, {"relu": True, "act_layer": torch.nn.SiLU}, "contradict each other"),
        (XCIT, {"relu": True, "act_layer": torch.nn.SiLU}, "contradict each other"),
        (XCIT, {"token_ref": "test"}, "token_ref must be None, a number of tokens or 'train'"),
        (XCIT, {"pretrained": True, "depth": 1}, "no published weights for sima_xcit_mini_p4_64"),
    ],
)
def test_what_cannot_be_is_said(name, options, message, monkeypatch, tmp_path):
    monkeypatch.setattr("sima_attn.models.pretrained.WEIGHTS", tmp_path)
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **options)


def test_the_local_mixer_has_the_grid_of_the_image():
    model = build(VIT, local_mixer=True).eval()
    grids = []
    for block in model.blocks:
        block.local_mp.register_forward_pre_hook(lambda lpi, inputs: grids.append(inputs[1:]))
    model(images(32, 48))
    assert set(grids) == {(8, 12)}
    with pytest.raises(ValueError, match="the local mixer needs its tokens on a grid, and 40 tokens"):
        model.blocks[0](torch.zeros(1, 40, model.embed_dim))
