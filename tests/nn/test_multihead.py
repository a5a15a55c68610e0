"""SimMultiheadAttention in the place of torch.nn.MultiheadAttention."""

import pytest
import torch
from torch import nn

from closeness import assert_close
from sima_attn.nn import SimMultiheadAttention
from sima_attn.ops import ExpCounter, sima_attention, sima_reference


def test_state_dict_and_call_are_those_of_torch():
    ours, theirs = SimMultiheadAttention(12, 3), nn.MultiheadAttention(12, 3)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    ours.load_state_dict(theirs.state_dict())
    for batch_first in (False, True):
        ours.batch_first = theirs.batch_first = batch_first
        query, key = torch.randn(5, 4, 12), torch.randn(5, 4, 12)
        if not batch_first:
            key = torch.randn(7, 4, 12)
        for (a, wa), (b, wb) in [
            (ours(query, key, key), theirs(query, key, key)),
            (ours(query, key, key, average_attn_weights=False), theirs(query, key, key, average_attn_weights=False)),
        ]:
            assert a.shape == b.shape
            assert wa.shape == wb.shape
    a, wa = ours(torch.randn(5, 12), torch.randn(7, 12), torch.randn(7, 12))  # without a batch
    assert (a.shape, wa.shape) == ((5, 12), (5, 7))


@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_sima_with_the_projections_of_torch(bias):
    module = SimMultiheadAttention(12, 3, bias=bias, batch_first=True).double()
    x, y = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    b = module.in_proj_bias if bias else torch.zeros(36, dtype=torch.float64)
    q, k, v = (
        (t @ w.T + c).view(2, -1, 3, 4).transpose(1, 2)
        for t, w, c in zip((x, y, y), module.in_proj_weight.chunk(3), b.chunk(3), strict=True)
    )
    out, weights = module(x, y, y, average_attn_weights=False)
    assert_close(out, module.out_proj(sima_reference(q, k, v).transpose(1, 2).flatten(2)))
    assert_close(weights @ v, sima_attention(q, k, v))
    assert module(x, y, y, need_weights=False)[1] is None


def test_two_views_of_the_same_tokens_are_self_attention():
    module = SimMultiheadAttention(12, 3, batch_first=True)
    x, padding = torch.randn(2, 1, 7, 12), torch.arange(7)[None] >= 4
    one = x[1]
    expected, _ = module(one, one, one, key_padding_mask=padding)
    assert torch.equal(module(x[1], x[1], x[1], key_padding_mask=padding)[0], expected)
    assert not torch.equal(module(x[1], x[1].clone(), x[1], key_padding_mask=padding)[0], expected)
    across, _ = module(x[1], x[0].clone(), x[0], key_padding_mask=padding)
    assert torch.equal(module(x[1], x[0], x[0], key_padding_mask=padding)[0], across)


@pytest.mark.parametrize("as_float", [False, True])
def test_padding_is_exact_in_self_attention(as_float):
    module = SimMultiheadAttention(12, 3, batch_first=True).double()
    short = torch.randn(1, 4, 12, dtype=torch.float64)
    padded = torch.cat([short, torch.randn(1, 3, 12, dtype=torch.float64)], dim=1)
    padding = torch.arange(7)[None] >= 4
    mask = torch.zeros(1, 7, dtype=torch.float64).masked_fill(padding, float("-inf")) if as_float else padding
    out, weights = module(padded, padded, padded, key_padding_mask=mask)
    alone, alone_weights = module(short, short, short)
    assert_close(out[:, :4], alone)
    assert_close(weights[:, :4, :4], alone_weights)
    assert (weights[:, :, 4:] == 0).all()


def test_weights_are_finite_where_the_output_is():
    module = SimMultiheadAttention(12, 3, batch_first=True).half()
    zeros = torch.zeros(1, 4, 12, dtype=torch.float16)
    out, weights = module(zeros, zeros, zeros)
    assert torch.isfinite(out).all()
    assert (weights == 0).all()
    x = torch.randn(1, 6, 12, dtype=torch.float16)
    x[:, 4:] = torch.nan
    out, weights = module(x, x, x, key_padding_mask=torch.arange(6)[None] >= 4)
    assert torch.isfinite(out[:, :4]).all()
    assert torch.isfinite(weights).all()


def test_padded_keys_are_masked_in_cross_attention():
    module = SimMultiheadAttention(12, 3, batch_first=True).double()
    x, y = torch.randn(1, 5, 12, dtype=torch.float64), torch.randn(1, 7, 12, dtype=torch.float64)
    out, _ = module(x, y, y, key_padding_mask=torch.arange(7)[None] >= 4)
    assert_close(out, module(x, y[:, :4], y[:, :4])[0])


@pytest.mark.parametrize("layers", [1, 2])
def test_torch_encoder_layers_run_it_in_eval_mode_too(layers):
    """In eval mode torch's encoder would take the weights and run its own fused softmax."""
    layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True, activation="relu")
    layer.self_attn = SimMultiheadAttention(12, 3, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    x, padding = torch.randn(2, 6, 12), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    trained = encoder(x, src_key_padding_mask=padding)
    encoder.eval()
    with torch.no_grad(), ExpCounter() as counter:
        out = encoder(x, src_key_padding_mask=padding)
    assert counter.total == 0
    assert_close(out[0], trained[0], 1e-5)
    assert_close(out[1, :4], trained[1, :4], 1e-5)


def test_gradients_flow_and_compile_takes_it_whole():
    torch._dynamo.reset()
    module = SimMultiheadAttention(12, 3, batch_first=True)
    x = torch.randn(2, 6, 12, requires_grad=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    out, _ = compiled(x, x, x, need_weights=False)
    assert_close(out, module(x, x, x)[0], 1e-5)
    out.sum().backward()
    assert module.in_proj_weight.grad.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout must be 0, got 0.1"),
        ({"add_bias_kv": True}, "add_bias_kv and add_zero_attn must be False"),
        ({"add_zero_attn": True}, "add_bias_kv and add_zero_attn must be False"),
        ({"kdim": 8}, "kdim and vdim must be embed_dim=12, got 8 and None; .* SimCrossAttention"),
        ({"order": "vq"}, "unknown order"),
        ({"token_ref": 0}, "token_ref must be"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(options, message):
    with pytest.raises(ValueError, match=message):
        SimMultiheadAttention(12, 3, **options)


def test_masks_of_pairs_are_refused():
    module, x = SimMultiheadAttention(12, 3, batch_first=True), torch.randn(1, 4, 12)
    for options in ({"attn_mask": torch.zeros(4, 4)}, {"is_causal": True}):
        with pytest.raises(ValueError, match=r"attn_mask and is_causal are not supported.*key_padding_mask"):
            module(x, x, x, **options)
    with pytest.raises(ValueError, match=r"may only hold 0 .* and -inf"):
        module(x, x, x, key_padding_mask=torch.full((1, 4), 0.5))
    with pytest.raises(ValueError, match="must be bool, or float with 0 and -inf, got"):
        module(x, x, x, key_padding_mask=torch.zeros(1, 4, dtype=torch.long))
