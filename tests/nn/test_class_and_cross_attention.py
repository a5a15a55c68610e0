"""SimClassAttention and SimCrossAttention."""

import pytest
import timm
import torch
from timm.models.cait import ClassAttn

from closeness import assert_close
from sima_attn.nn import SimClassAttention, SimCrossAttention
from sima_attn.ops import ExpCounter, sima_reference


def test_class_attention_is_the_first_row_of_sima_over_all_tokens():
    module = SimClassAttention(12, 3).double()
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64)
    assert_close(module.core(q, k, v), sima_reference(q, k, v, eps=1e-6)[:, :, :1])
    with pytest.raises(AssertionError):  # the queries of the other tokens matter: they are in |Q|_1
        assert_close(module.core(q[:, :, :1].expand_as(q), k, v), sima_reference(q, k, v, eps=1e-6)[:, :, :1])


def test_class_attention_makes_up_for_other_token_counts():
    module = SimClassAttention(12, 3, token_ref=14).double()
    q, k, v = torch.randn(3, 2, 3, 7, 4, dtype=torch.float64)
    assert_close(module.core(q, k, v), sima_reference(q, k, v, eps=1e-6, token_ref=14)[:, :, :1])


def test_class_attention_has_the_parameters_and_output_shape_of_timm():
    ours, theirs = SimClassAttention(12, 3), ClassAttn(12, 3, qkv_bias=True)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    x = torch.randn(2, 7, 12)
    assert ours(x).shape == theirs(x).shape == (2, 1, 12)


def test_class_attention_takes_its_place_in_timm_xcit():
    model = timm.create_model("xcit_nano_12_p16_224", img_size=32, num_classes=3)
    for block in model.cls_attn_blocks:
        block.attn = SimClassAttention(128, 4)
    model.eval()
    with torch.no_grad(), ExpCounter() as counter:
        assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)
    assert counter.counts["softmax"] == 12 * 4 * 32 * 32  # XCA's alone are left


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_class_attention_survives_dead_channels_in_every_dtype(dtype):
    module = SimClassAttention(8, 2)
    q, k, v = torch.randn(3, 1, 2, 5, 4).to(dtype)
    q[..., 0] = k[..., 1] = 0
    out = module.core(q, k, v)
    assert out.dtype == dtype
    assert out.isfinite().all()


def test_class_attention_drops_entries():
    module = SimClassAttention(12, 3, attn_drop=0.5)
    x = torch.randn(2, 7, 12)
    assert not torch.equal(module(x), module(x))


def test_class_attention_gradients_reach_every_query():
    module = SimClassAttention(12, 3)
    x = torch.randn(2, 7, 12, requires_grad=True)
    module(x).sum().backward()
    assert (x.grad.abs().sum(-1) > 0).all()
    assert all(p.grad.any() for p in module.parameters())


@pytest.mark.parametrize("context_dim", [None, 20])
def test_cross_attention_equals_the_equations(context_dim):
    module = SimCrossAttention(12, 3, context_dim=context_dim).double()
    x, context = torch.randn(2, 5, 12).double(), torch.randn(2, 9, context_dim or 12).double()
    q = module.q(x).view(2, 5, 3, 4).transpose(1, 2)
    k, v = (t.view(2, 9, 3, 4).transpose(1, 2) for t in module.kv(context).chunk(2, dim=-1))
    expected = module.proj(sima_reference(q, k, v).transpose(1, 2).flatten(2))
    assert_close(module(x, context), expected)


def test_cross_attention_masks_are_exact():
    module = SimCrossAttention(12, 3, token_ref=4).double()
    x, context = torch.randn(1, 5, 12).double(), torch.randn(1, 9, 12).double()
    masked = module(x, context, query_mask=torch.arange(5)[None] < 3, context_mask=torch.arange(9)[None] < 6)
    assert_close(masked[:, :3], module(x[:, :3], context[:, :6]))


def test_cross_attention_refuses_a_context_of_other_images():
    with pytest.raises(ValueError, match="agree in batch and heads"):
        SimCrossAttention(12, 3)(torch.randn(2, 5, 12), torch.randn(3, 9, 12))
    with pytest.raises(ValueError, match=r"tokens must have shape \[batch, tokens, 20\], got \(2, 9, 12\)"):
        SimCrossAttention(12, 3, context_dim=20)(torch.randn(2, 5, 12), torch.randn(2, 9, 12))
    with pytest.raises(ValueError, match=r"tokens must have shape \[batch, tokens, 12\], got \(7, 12\)"):
        SimClassAttention(12, 3)(torch.randn(7, 12))
    with pytest.raises(ValueError, match="unknown order"):
        SimCrossAttention(12, 3, order="vq")
