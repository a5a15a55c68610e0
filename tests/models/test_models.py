"""Every registered model does what timm's own tests ask of a model."""

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import sima_attn  # noqa: F401  registers the models
from closeness import assert_close
from fresh_imports import run_fresh
from sima_attn.nn import ATTENTIONS, Attention, SimAttention, SimClassAttention
from sima_attn.nn.token_ref import sima_modules, tokens_at
from sima_attn.ops import ExpCounter

# CvT and the small models have files of their own.
NAMES = [name for name in timm.list_models("sima_*") if "cvt" not in name and "_mini_" not in name]
SMALL = ("sima_deit_tiny_patch16_224", "sima_xcit_nano_12_p16_224")
small = pytest.mark.parametrize("name", SMALL)

# paper-facts: exact numbers of parameters of the official models, patch 16 and 8
XCIT_PARAMETERS = {
    "nano_12": (3_053_176, 3_048_968),
    "tiny_12": (6_716_224, 6_706_456),
    "small_12": (26_253_208, 26_212_936),
    "tiny_20": (10_316_608,),
    "tiny_24": (12_116_800, 12_107_032),
    "small_24": (47_671_192, 47_630_920),
    "medium_24": (84_395_560, 84_323_432),
    "large_24": (189_095_752, 188_932_264),
}
PARAMETERS = {
    "sima_deit_tiny_patch16_224": 5_717_416,
    "sima_deit_small_patch16_224": 22_050_664,
    "sima_deit_base_patch16_224": 86_567_656,
    **{
        f"sima_xcit_{size}_p{patch}_224": count
        for size, counts in XCIT_PARAMETERS.items()
        for patch, count in zip((16, 8), counts, strict=False)
    },
}


def build(name, **options):
    """A model of two blocks, so that real forwards stay quick."""
    return timm.create_model(name, depth=2, num_classes=7, **options)


def images(px=48, batch=2, channels=3):
    return torch.randn(batch, channels, px, px)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_builds_and_its_shapes_are_right(name):
    with torch.device("meta"):
        model = timm.create_model(name, depth=2)
        assert model.eval()(torch.empty(1, 3, 224, 224)).shape == (1, 1000)
    cfg = model.default_cfg
    assert cfg["crop_pct"] == 1.0
    assert cfg["architecture"] == name
    assert model.state_dict().keys() >= {cfg["first_conv"] + ".weight", cfg["classifier"] + ".weight"}
    assert any(isinstance(m, SimAttention) for m in model.modules())
    assert not any(type(m).__name__ in ("XCA", "ClassAttn") for m in model.modules())


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_those_of_the_paper(name, count):
    with torch.device("meta"):
        assert sum(p.numel() for p in timm.create_model(name).parameters()) == count


@pytest.mark.parametrize(("width", "channels", "heads"), [("tiny", 192, 3), ("small", 384, 6), ("base", 768, 12)])
@pytest.mark.parametrize("order", ["kv", "qk"])
def test_macs_of_deit_are_the_analytic_count(width, channels, heads, order):
    C, N, D = channels, 197, channels // heads
    core = 2 * N * D * C if order == "kv" else 2 * N * N * C
    block = 3 * N * C * C + core + N * C * C + 8 * N * C * C  # qkv, attention, proj, mlp
    expected = 196 * (3 * 16 * 16) * C + 12 * block + C * 1000
    with torch.device("meta"), FlopCounterMode(display=False) as flops:
        model = timm.create_model(f"sima_deit_{width}_patch16_224", attention_options={"order": order})
        model(torch.empty(1, 3, 224, 224))
    assert flops.get_total_flops() == 2 * expected


def test_macs_of_xcit_small_are_the_analytic_count():
    C, N, D, stem = 384, 196, 48, (3, 48, 96, 192, 384)
    sides = (112, 56, 28, 14)
    convolutions = sum(9 * a * b * side**2 for a, b, side in zip(stem, stem[1:], sides, strict=False))
    block = 4 * N * C * C + 2 * N * D * C + 8 * N * C * C + 2 * 9 * N * C  # qkv and proj, SimA, mlp, LPI
    M = N + 1
    class_block = 3 * M * C * C + 2 * M * C + C * C + 8 * C * C  # q, k, v of all tokens, one row, proj and mlp of one
    positions = 64 * C * N  # the projection of the Fourier features
    with torch.device("meta"), FlopCounterMode(display=False) as flops:
        timm.create_model("sima_xcit_small_12_p16_224").eval()(torch.empty(1, 3, 224, 224))
    assert flops.get_total_flops() == 2 * (convolutions + positions + 12 * block + 2 * class_block + C * 1000)


@small
def test_any_input_size_channels_and_classes(name):
    model = build(name, in_chans=1).eval()
    with torch.no_grad():
        for shape in ((1, 1, 224, 224), (2, 1, 48, 80), (1, 1, 50, 37)):
            assert model(torch.randn(shape)).shape == (shape[0], 7)


@small
def test_features_head_and_pooling(name):
    for pool in ("token", "avg"):
        model = build(name, global_pool=pool).eval()
        x = images()
        features = model.forward_features(x)
        assert_close(model.forward_head(features), model(x), 1e-6)
        assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
        model.reset_classifier(0)
        assert model(x).shape == (2, model.num_features)
        model.reset_classifier(3)
        assert model(x).shape == (2, 3)
        assert model.get_classifier().out_features == 3


@small
def test_intermediates_and_features_only(name):
    model = build(name).eval()
    x = images(px=64)
    final, maps = model.forward_intermediates(x, indices=[0, 1])
    assert [m.shape for m in maps] == [(2, model.num_features, 4, 4)] * 2
    assert_close(final, model.forward_features(x), 1e-6)
    backbone = timm.create_model(name, depth=4, features_only=True, out_indices=(1, 3))
    assert [m.shape[1] for m in backbone(x)] == backbone.feature_info.channels()
    assert backbone.feature_info.reduction() == [16, 16]


@small
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model, x = build(name), images()
    model.eval()  # batch norm without running sums
    grads = []
    for enabled in (False, True):
        model.set_grad_checkpointing(enabled)
        model.zero_grad()
        model(x).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert_close(grads[1], grads[0], 1e-5)


@small
def test_drop_path_and_training(name):
    model = build(name, drop_path_rate=0.5)
    x = images()
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    model.train()(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert {"cls_token"} <= model.no_weight_decay()


@small
def test_compiles_to_one_graph(name):
    torch._dynamo.reset()
    model, x = timm.create_model(name, depth=1, num_classes=7).eval(), images()
    with torch.no_grad():
        assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x), 1e-5)


@pytest.mark.parametrize("attention", ATTENTIONS)
@small
def test_any_attention_of_the_registry_by_name(name, attention):
    needs_grid = ATTENTIONS[attention].needs_grid
    options = {}
    if "deit" in name and needs_grid:
        with pytest.raises(ValueError, match=r"needs all its tokens on a grid.*class_token=False, global_pool='avg'"):
            build(name, attention=attention)
        options = {"class_token": False, "global_pool": "avg"}
    model = build(name, attention=attention, img_size=64, **options)
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    assert [type(m).__name__ for m in layers] == [ATTENTIONS[attention].__name__] * 2
    out = model(images(px=64))
    assert out.shape == (2, 7)
    out.sum().backward()


@pytest.mark.parametrize("attention", ["sima_local", "relu2", "relu2_wide"])
@pytest.mark.parametrize("name", ["sima_deit_tiny_patch16_224", "sima_xcit_nano_12_p16_224"])
def test_a_local_branch_has_the_grid_of_each_image(name, attention):
    model = build(name, attention=attention).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    for grid in ((4, 6), (2, 8), (8, 2), (4, 4)):  # 2 x 8 tokens are as many as 4 x 4
        given = build(name, attention=attention, attention_options={"grid": grid}).eval()
        given.load_state_dict(model.state_dict())
        image = torch.randn(1, 3, 16 * grid[0], 16 * grid[1])
        with torch.no_grad():
            assert torch.equal(model(image), given(image))


@pytest.mark.parametrize("attention", ["soft", "cosformer_2d"])
def test_attentions_on_a_grid_have_that_of_each_image(attention):
    options = {"attention": attention, "class_token": False, "global_pool": "avg"}
    model = build("sima_deit_tiny_patch16_224", **options).eval()
    for grid in ((4, 6), (2, 8)):
        given = build("sima_deit_tiny_patch16_224", attention_options={"grid": grid}, **options).eval()
        given.load_state_dict(model.state_dict())
        image = torch.randn(1, 3, 16 * grid[0], 16 * grid[1])
        with torch.no_grad():
            assert torch.equal(model(image), given(image))


@pytest.mark.parametrize("name", [f"{name}_relu" for name in SMALL])
def test_relu_models_are_free_of_exp_and_gelu_models_are_not(name):
    for variant, free in ((name, True), (name.removesuffix("_relu"), False)):
        model = build(variant).eval()
        with torch.no_grad(), ExpCounter() as counter:
            model(images())
        assert (counter.total == 0) == free
        assert set(counter.counts) <= {"gelu"}


def test_variants_of_the_paper():
    single = build("sima_deit_tiny_patch16_224_1head")
    assert [block.attn.num_heads for block in single.blocks] == [1, 1]
    scaled = build("sima_deit_tiny_patch16_224_layerscale")
    assert (scaled.blocks[0].ls1.gamma == 1).all()
    without = build("sima_xcit_nano_12_p16_224_nolpi")
    assert not any(type(m).__name__ == "LPI" for m in without.modules())
    assert without(images()).shape == (2, 7)
    soft = build("sima_xcit_nano_12_p16_224", class_attention="softmax")
    assert not any(isinstance(m, SimClassAttention) for m in soft.modules())


def test_token_ref_of_the_training_size_makes_up_for_a_larger_image():
    """Every token four times: with token_ref the model says what it said of the small image, without it not."""
    for name, tokens in (("sima_deit_tiny_patch16_224", 197), ("sima_xcit_nano_12_p16_224", 196)):
        model = build(name, token_ref="train")
        assert {m.token_ref for m in model.modules() if isinstance(m, SimAttention)} == {float(tokens)}
        assert build(name).blocks[0].attn.token_ref is None
    assert {m.token_ref for m in model.modules() if isinstance(m, SimClassAttention)} == {197.0}
    q, k, v = torch.randn(3, 1, 4, 196, 32)
    attention = model.blocks[0].attn
    assert_close(attention.core(q, k, v), build(name).blocks[0].attn.core(q, k, v), 1e-6)
    larger = [t.repeat_interleave(4, dim=2) for t in (q, k, v)]
    assert_close(attention.core(*larger)[:, :, ::4], attention.core(q, k, v), 1e-4)


@pytest.mark.parametrize(("name", "px"), [("sima_xcit_nano_12_p16_224", 224), ("sima_xcit_mini_p4_64", 64)])
def test_class_token_ref_train_stands_for_the_tokens_of_the_training_size(name, px):
    model = build(name, attention="xca", class_attention="sima", class_token_ref="train")
    modules = sima_modules(model)
    assert [m.token_ref for m in modules] == tokens_at(model, modules, px)


@pytest.mark.parametrize("token_ref", [None, "train"])
def test_class_token_ref_is_of_the_class_attention_alone(token_ref):
    for name in ("sima_xcit_nano_12_p16_224", "sima_xcit_mini_p4_64"):
        model, plain = (build(name, token_ref=token_ref, **kw) for kw in ({"class_token_ref": 14.0}, {}))
        assert {m.token_ref for m in model.modules() if isinstance(m, SimClassAttention)} == {14.0}
        assert [m.token_ref for m in model.modules() if isinstance(m, SimAttention)] == [
            m.token_ref for m in plain.modules() if isinstance(m, SimAttention)
        ]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (SMALL[0], {"pretrained": True}, "no published weights for sima_deit_tiny_patch16_224"),
        (SMALL[1], {"pretrained": True}, "no published weights for sima_xcit_nano_12_p16_224"),
        (SMALL[0], {"attention": "smia"}, "did you mean 'sima'"),
        (SMALL[0], {"token_ref": "test"}, "token_ref must be None, a number of tokens or 'train', got 'test'"),
        (SMALL[0], {"token_ref": 9, "attention": "elu"}, "token_ref is for SimA attention only"),
        (SMALL[0], {"token_ref": 9, "attention_options": {"token_ref": 4}}, "contradict each other; pass one of them"),
        (SMALL[0], {"relu": True, "act_layer": torch.nn.SiLU}, "contradict each other"),
        (SMALL[1], {"relu": True, "act_layer": torch.nn.SiLU}, "contradict each other"),
        ("sima_cvt_13", {"relu": True, "act_layer": torch.nn.SiLU}, "contradict each other"),
        ("sima_cvt_13", {"token_ref": 9}, "token_ref must be None or 'train'"),
        (SMALL[1], {"class_attention": "sim"}, "unknown class attention 'sim'"),
        (SMALL[1], {"attention": "xca", "class_token_ref": 14.0}, "class_token_ref is for SimA's class attention"),
        (SMALL[1], {"class_token_ref": 0.0}, "token_ref must be None or the positive number"),
        (SMALL[1], {"patch_size": 14}, "patch_size 8 or 16, got 14"),
        (SMALL[1], {"attn_drop_rate": 0.1}, "attn_drop must be 0"),
    ],
)
def test_impossible_arguments_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, **options)


def test_models_are_registered_whichever_is_imported_first():
    # Between the two, somebody asks whether timm is installed, as transformers does.
    asked = "import importlib.util; importlib.util.find_spec('timm')"
    known = "import timm; print('sima_deit_small_patch16_224' in timm.list_models('sima_*'))"
    orders = (("timm", "sima_attn"), ("sima_attn", "timm"))
    programs = [f"import {first}; {asked}; import {second}; {known}" for first, second in orders]
    assert run_fresh(programs) == ["True", "True"]
