"""SimAttention as timm and a user meet it."""

import pytest
import timm
import torch

from closeness import assert_close
from recorder import Recorder
from sima_attn.nn import SimAttention, attention_class
from sima_attn.ops import ExpCounter, sima_reference


def small_deit(**options):
    return timm.create_model(
        "deit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5, embed_dim=24, num_heads=3, **options
    )


def test_timm_builds_deit_small_with_it_and_the_checkpoint_keys_stay():
    twin = timm.create_model("deit_small_patch16_224")
    model = timm.create_model("deit_small_patch16_224", attn_layer=SimAttention)
    assert isinstance(model.blocks[0].attn, SimAttention)
    assert model.state_dict().keys() == twin.state_dict().keys()
    assert model.load_state_dict(twin.state_dict()).missing_keys == []
    assert sum(p.numel() for p in model.parameters()) == 22_050_664


def test_it_trains_inside_timm():
    model = small_deit(attn_layer=SimAttention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    images, labels = torch.randn(10, 3, 32, 32), torch.arange(10) % 5
    losses = []
    for _ in range(50):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_the_attention_of_a_whole_model_has_no_exp():
    model = small_deit(attn_layer=SimAttention, act_layer=torch.nn.ReLU).eval()
    with torch.no_grad(), ExpCounter() as counter:
        model(torch.randn(1, 3, 32, 32))
    assert counter.counts == {}
    twin = small_deit().eval()
    with torch.no_grad(), ExpCounter() as counter:
        twin(torch.randn(1, 3, 32, 32))
    assert set(counter.counts) == {"scaled_dot_product_attention", "gelu"}


def test_training_and_inference_compute_the_same():
    module = SimAttention(24, 3)
    x = torch.randn(2, 17, 24)
    with_autograd = module(x)
    assert with_autograd.requires_grad
    with torch.no_grad():
        assert_close(module(x), with_autograd, 1e-5)
    with torch.inference_mode():
        assert_close(module(x), with_autograd, 1e-5)


@pytest.mark.parametrize("norm", ["l1", "l2", "none"])
@pytest.mark.parametrize("order", ["auto", "kv", "qk"])
def test_ablations_of_the_norm(norm, order):
    module = SimAttention(16, 2, norm=norm, order=order).double()
    q, k, v = torch.randn(3, 2, 2, 9, 8, dtype=torch.float64)
    assert_close(module.core(q, k, v), sima_reference(q, k, v, norm=norm))
    assert_close(module.matrix(q, k) @ v, sima_reference(q, k, v, norm=norm))


def test_the_l2_norm_of_a_dead_channel_has_a_finite_gradient():
    module = SimAttention(16, 2, norm="l2")
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    q[..., 0] = 0
    q.requires_grad_()
    module.core(q, k, v).sum().backward()
    assert not q.grad.isnan().any()


def test_a_single_head_is_one_wide_head():
    module = SimAttention(24, num_heads=1).double()
    q, k, v = torch.randn(3, 1, 1, 5, 24, dtype=torch.float64)
    assert_close(module.core(q, k, v), sima_reference(q, k, v))


def test_padding_changes_nothing_for_the_real_tokens():
    module = SimAttention(16, 2, token_ref=9).double()
    short = torch.randn(1, 6, 16, dtype=torch.float64)
    padded = torch.cat([short, torch.full((1, 3, 16), 100.0, dtype=torch.float64)], dim=1)
    mask = torch.arange(9)[None] < 6
    assert_close(module(padded, token_mask=mask)[:, :6], module(short))
    with pytest.raises(ValueError, match=r"token_mask must have shape \[batch, tokens\] = \(1, 9\)"):
        module(padded, token_mask=mask[:, :4])


def test_the_packed_qkv_is_read_in_place():
    module = SimAttention(16, 2)
    with torch.no_grad(), Recorder() as seen:
        module(torch.randn(3, 600, 16))  # tiny images are copied
    assert not [shape for shape in seen.shapes("clone", "contiguous", "_to_copy") if len(shape) > 2]


def test_autocast_runs_and_keeps_the_layer_dtype():
    module = SimAttention(16, 2)
    x = torch.randn(2, 9, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    assert_close(out, module(x), 0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "l3"}, "unknown norm 'l3'; known: l1, l2, none"),
        ({"order": "vq"}, "unknown order 'vq'"),
        ({"token_ref": 0}, "token_ref must be"),
        ({"eps": 0}, "eps must lie in"),
        ({"qk_norm": True}, "need a norm_layer"),
        ({"attn_drop": 0.1}, "attn_drop must be 0"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SimAttention(16, 2, **options)


def test_it_says_what_it_is():
    text = repr(SimAttention(16, 2, token_ref=196))
    assert "dim=16, num_heads=2, norm='l1', order='auto', token_ref=196" in text


def test_a_configured_class_goes_into_timm():
    model = small_deit(attn_layer=attention_class("sima", token_ref=17.0, order="kv"))
    assert model.blocks[1].attn.token_ref == 17.0
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 5)
