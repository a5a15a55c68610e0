"""CvT: the same numbers as transformers' with softmax, any attention that fits, and what timm asks of a model."""

import copy
import pickle

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from closeness import assert_close
from sima_attn.models.cvt import Cvt, from_transformers_state_dict
from sima_attn.nn import ATTENTIONS
from sima_attn.ops import AttentionShape, ExpCounter

TINY = {"embed_dims": (8, 16, 32), "depths": (1, 2, 3), "num_heads": (1, 2, 4), "num_classes": 5}
WITH_GRID = {name for name, cls in ATTENTIONS.items() if cls.has_local_branch}
REFUSED = {"xca", "linformer", "soft", "cosformer_2d"} | WITH_GRID
WORKING = [name for name in ATTENTIONS if name not in REFUSED]


def tiny(**kwargs):
    return randomized(Cvt(**{**TINY, **kwargs}))


def randomized(model):
    """No zeros and ones that would hide a missing factor, and BatchNorms that have seen something."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor).abs())
    return model.double()


def images(height=40, width=56, channels=3, batch=2):
    return torch.randn(batch, channels, height, width, dtype=torch.float64)


def attentions(model):
    return [block.attn for stage in model.stages for block in stage.blocks]


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    # Stage i of transformers' has to have more than i blocks.
    sizes = {"embed_dim": [8, 16, 32], "depth": [1, 2, 3], "num_heads": [1, 2, 4], "num_labels": 5}
    torch.manual_seed(0)
    return randomized(transformers.CvtForImageClassification(transformers.CvtConfig(**sizes))).eval()


@pytest.mark.parametrize("attention", ["softmax", "softmax_explicit"])
@pytest.mark.parametrize("size", [(64, 64), (50, 75)])
def test_softmax_is_the_cvt_of_transformers(theirs, attention, size):
    ours = tiny(attention=attention).eval()
    ours.load_state_dict(from_transformers_state_dict(theirs.state_dict()))
    x = images(*size)
    with torch.no_grad():
        expected = theirs(x, output_hidden_states=True)
        assert_close(ours(x), expected.logits, 1e-12)
        for ours_map, their_map in zip(ours.forward_intermediates(x)[1], expected.hidden_states, strict=True):
            assert_close(ours_map, their_map, 1e-12)


def test_every_key_of_transformers_has_a_place_or_is_named(theirs):
    state = theirs.state_dict()
    assert set(from_transformers_state_dict(state)) == set(tiny().state_dict())
    strange = {"cvt.encoder.stages.0.layers.0.gate.weight": 1, "embedding.weight": 2, "cls_token": 3}
    with pytest.raises(ValueError, match=r"unknown keys: \S*gate\.weight, embedding\.weight, cls_token$"):
        from_transformers_state_dict({**state, **strange})


@pytest.fixture(scope="module")
def cvt_13():
    return {name: timm.create_model("sima_cvt_13", attention=name).eval() for name in ("softmax", "sima")}


@pytest.mark.parametrize(("attention", "exps"), [("softmax", 3_971_608), ("sima", 0)])
def test_cvt_13_has_its_parameters_and_its_exponentials(cvt_13, attention, exps):
    assert sum(p.numel() for p in cvt_13[attention].parameters()) == 19_997_480
    with torch.no_grad(), ExpCounter() as counter:
        assert cvt_13[attention](torch.randn(1, 3, 224, 224)).shape == (1, 1000)
    assert counter.counts.pop("gelu") == 5_032_960
    assert counter.total == exps


def test_sizes_are_registered_with_their_settings(cvt_13):
    assert [len(stage.blocks) for stage in timm.create_model("sima_cvt_21").stages] == [1, 4, 16]
    assert {"sima_cvt_13", "sima_cvt_21"} <= set(timm.list_models("sima_cvt*"))
    cfg = cvt_13["sima"].default_cfg
    assert (cfg["input_size"], cfg["crop_pct"], cfg["interpolation"]) == ((3, 224, 224), 1.0, "bicubic")
    assert (cfg["mean"], cfg["std"]) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert isinstance(cvt_13["sima"].get_submodule(cfg["first_conv"]), nn.Conv2d)
    assert cvt_13["sima"].get_submodule(cfg["classifier"]) is cvt_13["sima"].get_classifier()


@pytest.mark.parametrize("name", ["sima_cvt_13", "sima_cvt_21"])
def test_pretrained_weights_are_an_error_until_there_are_some(name, tmp_path):
    for overlay in (None, {"crop_pct": 0.9}):
        with pytest.raises(ValueError, match=f"no published weights for {name}"):
            timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **TINY)


def test_weights_of_ones_own_load_through_timm(tmp_path):
    model = timm.create_model("sima_cvt_13", **TINY)
    torch.save(model.state_dict(), tmp_path / "own.pt")
    overlay = {"file": str(tmp_path / "own.pt"), "num_classes": 5}
    again = timm.create_model("sima_cvt_13", pretrained=True, pretrained_cfg_overlay=overlay, **TINY)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_relu_leaves_no_exponential_in_the_whole_network():
    for attention, free in (("sima", True), ("softmax", False)):
        model = tiny(act_layer=nn.ReLU, attention=attention)
        with ExpCounter() as counter:
            model(images()).sum().backward()
        assert (counter.total == 0) == free


def inputs_of_cores(model, x):
    """(module, q, k, v) of every attention, in the order they ran."""
    seen = []
    for module in attentions(model):

        def core(*qkv, module=module, inner=module.core):
            seen.append((module, *qkv))
            return inner(*qkv)

        module.core = core
    with torch.no_grad():
        model(x)
    for module in attentions(model):
        del module.core
    return seen


@pytest.mark.parametrize("attention", WORKING)
def test_queries_meet_a_quarter_of_the_keys_at_the_cost_that_is_declared(attention):
    model = tiny(attention=attention).eval()
    seen = inputs_of_cores(model, images(40, 56))
    grids = [(10, 14), (5, 7), (5, 7), (3, 4), (3, 4), (3, 4)]
    for i, ((module, q, k, v), (rows, columns)) in enumerate(zip(seen, grids, strict=True)):
        prefix = 1 if i >= 3 else 0
        N, M = rows * columns + prefix, -(-rows // 2) * -(-columns // 2) + prefix
        assert (q.shape[2], k.shape[2], v.shape[2]) == (N, M, M)
        with torch.no_grad(), ExpCounter() as exps:
            module.core(q, k, v)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
            out = module.core(q, k, v)
        cost = module.cost(AttentionShape(2, module.num_heads, N, module.head_dim, M))
        assert (cost.exps, 2 * cost.macs) == (exps.total, flops.get_total_flops())
        assert_close(out, module.reference(q, k, v), 1e-9)


@pytest.mark.parametrize("attention", WORKING)
def test_every_attention_that_fits_trains(attention):
    # The class token bypasses the convolutions, so the last of them for queries matter to the mean alone.
    model, x, labels = tiny(attention=attention, global_pool="avg"), images(batch=4), torch.tensor([0, 1, 2, 3])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = nn.functional.cross_entropy(model(x), labels)
    before.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), name
        if "proj_k" not in name or "bias" not in name:  # softmax does not see a shift of all keys
            assert parameter.grad.any(), f"{name} has a gradient of zeros"
    optimizer.step()
    assert nn.functional.cross_entropy(model(x), labels) < before


@pytest.mark.parametrize("attention", sorted(REFUSED))
def test_attentions_that_cannot_fit_are_refused_with_a_reason(attention):
    with pytest.raises(
        ValueError, match=f"CvT does not support attention='{attention}': it.*supported: sima, softmax, .*"
    ):
        Cvt(**TINY, attention=attention)


def test_an_unknown_attention_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown attention 'smia'; .* did you mean 'sima'\?"):
        Cvt(**TINY, attention="smia")


def test_tied_keys_are_the_queries_at_every_second_place():
    model = tiny(attention="soft_full").eval()
    assert not any("proj_k" in name for name, _ in model.named_parameters())
    (_, q, k, _), *_ = inputs_of_cores(model, images(40, 56))
    assert_close(k, q.unflatten(2, (10, 14))[:, :, ::2, ::2].flatten(2, 3), 1e-12)


def test_options_of_an_attention_for_all_stages_or_one_by_one():
    assert [m.order for m in attentions(tiny(attention_options={"order": "qk"}))] == ["qk"] * 6
    refs = [m.token_ref for m in attentions(tiny(attention_options=[{"token_ref": n} for n in (64, 16, 5)]))]
    assert refs == [64, 16, 16, 5, 5, 5]
    x, normed = images(), {"qk_norm": True, "scale_norm": True, "norm_layer": nn.LayerNorm}
    plain, other = tiny(attention="softmax").eval(), tiny(attention="softmax", attention_options=normed).eval()
    missing, unexpected = other.load_state_dict(plain.state_dict(), strict=False)
    assert {key.split(".")[-2] for key in missing} == {"q_norm", "k_norm", "norm"}
    assert not unexpected
    assert (other(x) - plain(x)).norm() > 1e-6
    with pytest.raises(TypeError, match="tempo"):
        Cvt(**TINY, attention_options={"tempo": 1})


@pytest.mark.parametrize("size", [(3, 3), (17, 64), (31, 33)])
def test_any_image_size_runs(size):
    assert tiny().eval()(images(*size)).shape == (2, 5)


def test_the_token_pooling_reads_the_class_token_and_the_mean_leaves_it_out():
    model, x = tiny().eval(), images()
    tokens = model.forward_features(x)
    assert tokens.shape == (2, 1 + 3 * 4, 32)
    assert_close(model.forward_head(tokens, pre_logits=True), tokens[:, 0])
    assert_close(model(x), model.head(tokens[:, 0]))
    model.reset_classifier(7, "avg")
    assert_close(model(x), model.head(tokens[:, 1:].mean(1)))
    model.reset_classifier(7, "")
    assert model(x).shape == (2, 13, 7)
    with pytest.raises(ValueError, match="global_pool must be one of 'token', 'avg', '', got 'max'"):
        model.reset_classifier(7, "max")


def test_a_new_head_keeps_the_pooling_the_type_and_the_features():
    model, x = tiny(global_pool="avg").eval(), images()
    features = model.forward_features(x)
    model.reset_classifier(9)
    assert (model.num_classes, model.global_pool, model.get_classifier().weight.dtype) == (9, "avg", torch.float64)
    assert_close(model.forward_features(x), features)
    model.reset_classifier(0)
    assert_close(model(x), features[:, 1:].mean(1))
    assert (model.num_features, model.head_hidden_size) == (32, 32)


def test_one_channel_and_no_head_through_timm():
    model = timm.create_model("sima_cvt_13", **{**TINY, "num_classes": 0}, in_chans=1)
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 32)


def test_intermediates_are_the_maps_of_the_stages():
    model, x = tiny().eval(), images(41, 56)
    final, maps = model.forward_intermediates(x)
    assert [tuple(m.shape) for m in maps] == [(2, 8, 10, 14), (2, 16, 5, 7), (2, 32, 3, 4)]
    assert_close(final, model.forward_features(x))
    tokens = model.forward_intermediates(x, indices=[0, -1], output_fmt="NLC", intermediates_only=True)
    assert_close(tokens[0], maps[0].flatten(2).mT)
    assert_close(tokens[1], maps[2].flatten(2).mT)
    (normed,) = model.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)
    assert_close(normed.flatten(2).mT, final[:, 1:])
    assert_close(model.norm(tokens[1]), final[:, 1:])


def test_stopping_early_runs_no_later_stage():
    model, x = tiny().eval(), images()
    ran = []
    model.stages[2].register_forward_hook(lambda *_: ran.append(2))
    end, (middle,) = model.forward_intermediates(x, indices=[1], stop_early=True)
    assert not ran
    assert_close(end, middle.flatten(2).mT)
    assert_close(middle, model.forward_intermediates(x)[1][1])


@pytest.mark.parametrize("count", [2, 3])
def test_features_only_gives_a_pyramid_without_unused_parameters(count):
    channels, reductions = [8, 16, 32][:count], [4, 8, 16][:count]
    options = {} if count == 3 else {"out_indices": (0, 1)}  # all is the default
    model = timm.create_model("sima_cvt_13", features_only=True, **TINY, **options)
    assert (model.feature_info.channels(), model.feature_info.reduction()) == (channels, reductions)
    maps = model(torch.randn(2, 3, 64, 96))
    assert [tuple(m.shape) for m in maps] == [
        (2, c, 64 // r, 96 // r) for c, r in zip(channels, reductions, strict=True)
    ]
    sum(m.square().sum() for m in maps).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_pruning_keeps_what_is_asked_for():
    model, x = tiny().eval(), images()
    maps = model.forward_intermediates(x, intermediates_only=True)
    whole = copy.deepcopy(model)
    assert whole.prune_intermediate_layers([2]) == [2]
    assert isinstance(whole.norm, nn.LayerNorm)
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert (len(model.stages), model.num_classes, model.global_pool) == (2, 0, "")
    for kept, before in zip(model.forward_intermediates(x, intermediates_only=True), maps[:2], strict=True):
        assert_close(kept, before)
    assert_close(model(x), maps[1].flatten(2).mT)


def test_drop_path_grows_over_the_blocks_and_acts_in_training_only():
    model, x = tiny(drop_path_rate=0.3), images()
    rates = [block.drop_path1.drop_prob for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.06, 0.12, 0.18, 0.24, 0.3])
    assert torch.equal(model.eval()(x), model(x))
    assert not torch.equal(model.train()(x), model(x))


@pytest.mark.parametrize("rate", ["drop_rate", "proj_drop_rate"])
def test_dropout_acts_in_training_only(rate):
    model, x = tiny(**{rate: 0.5}), images()
    assert torch.equal(model.eval()(x), model(x))
    assert not torch.equal(model.train()(x), model(x))


def test_checkpointing_gives_the_same_gradients():
    plain = tiny(drop_path_rate=0.2)
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    assert (saving.grad_checkpointing, plain.grad_checkpointing) == (True, False)
    x = images()
    ran = []
    saving.stages[2].blocks[0].mlp.register_forward_hook(lambda *_: ran.append(1))
    for model in (plain, saving):
        torch.manual_seed(1)
        model(x).square().sum().backward()
    assert len(ran) == 2  # forward, and once more for the backward pass
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    stages = {"embed_dims": (8, 16), "depths": (1, 1), "num_heads": (1, 2)}  # without and with a class token
    stages |= {"patch_sizes": (7, 3), "strides": (4, 2), "paddings": (2, 1)}
    model, x = tiny(**stages).eval(), images()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), model(x), 1e-10)
    compiled(x).sum().backward()


def test_the_whole_model_can_be_pickled():
    model, x = tiny(attention="elu").eval(), images()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_timm_groups_the_parameters_by_depth_and_decays_no_class_token():
    model = tiny()
    assert model.no_weight_decay() == {"stages.2.cls_token"}
    undecayed, _ = param_groups_weight_decay(model, no_weight_decay_list=model.no_weight_decay())
    assert any(p is model.stages[2].cls_token for p in undecayed["params"])
    depth = group_parameters(model, model.group_matcher(), reverse=True)
    assert set(depth) == {name for name, _ in model.named_parameters()}
    names = ["stages.0.patch_embed.proj.weight", "stages.0.blocks.0.norm1.weight", "stages.1.blocks.0.norm1.weight"]
    names += ["stages.2.cls_token", "stages.2.blocks.2.norm1.weight", "head.weight"]
    assert [depth[name] for name in names] == sorted({depth[name] for name in names})
    assert depth["norm.weight"] == depth["stages.2.blocks.2.norm1.weight"]
    coarse = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert coarse["stages.2.blocks.0.norm1.weight"] == coarse["stages.2.blocks.1.norm1.weight"]
    scales = {group["lr_scale"] for group in param_groups_layer_decay(model, layer_decay=0.5)}
    assert len(scales) > 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"global_pool": "max"}, "global_pool must be one of 'token', 'avg', '', got 'max'"),
        ({"depths": (1, 2)}, r"depths must have one entry for each of the 3 embed_dims, got \(1, 2\)"),
        ({"strides": (4, 2, 2, 2)}, "strides must have one entry for each of the 3"),
        ({"attention_options": [{}]}, "attention_options must have one entry for each of the 3"),
        ({"num_heads": (1, 3, 4)}, "num_heads must divide dim=16, got 3"),
    ],
)
def test_wrong_arguments_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        Cvt(**{**TINY, **wrong})


def test_an_unknown_format_of_the_intermediates_is_named():
    with pytest.raises(ValueError, match="output_fmt must be 'NCHW' or 'NLC', got 'NHWC'"):
        tiny().forward_intermediates(images(), output_fmt="NHWC")
