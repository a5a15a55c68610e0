"""Tiles fed one by one give what one call on the whole gives, in memory that does not depend on the tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeness import assert_close
from sima_attn.ops import SimaAccumulator, sima_attention


def tiles(x, length):
    return x.split(length, dim=2)


def accumulate(q, k, v, *, query_tile, key_tile, **options):
    acc = SimaAccumulator(**options)
    for k_tile, v_tile in zip(tiles(k, key_tile), tiles(v, key_tile), strict=True):
        acc.add_keys(k_tile, v_tile)
    for q_tile in tiles(q, query_tile):
        acc.add_queries(q_tile)
    return acc


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20), st.sampled_from([None, 7.0]))
def test_tiles_of_any_length_equal_one_call(N, M, query_tile, key_tile, token_ref):
    q, k, v = (torch.randn(2, 2, n, d, dtype=torch.float64) for n, d in ((N, 4), (M, 4), (M, 3)))
    acc = accumulate(q, k, v, query_tile=query_tile, key_tile=key_tile, token_ref=token_ref)
    out = torch.cat([acc.attend(q_tile) for q_tile in tiles(q, query_tile)], dim=2)
    assert_close(out, sima_attention(q, k, v, token_ref=token_ref))


def test_masked_tiles_equal_one_masked_call():
    q, k, v = torch.randn(3, 2, 2, 12, 4, dtype=torch.float64)
    mask = torch.rand(2, 12) > 0.4
    acc = SimaAccumulator(token_ref=5)
    for t in range(0, 12, 5):
        part = slice(t, t + 5)
        acc.add_keys(k[:, :, part], v[:, :, part], mask[:, part])
        acc.add_queries(q[:, :, part], mask[:, part])
    out = torch.cat([acc.attend(q[:, :, t : t + 5], mask[:, t : t + 5]) for t in range(0, 12, 5)], dim=2)
    assert_close(out, sima_attention(q, k, v, key_mask=mask, query_mask=mask, token_ref=5))


def test_partial_sums_of_several_machines_add_up():
    q, k, v = torch.randn(3, 1, 2, 30, 4, dtype=torch.float64)
    parts = []
    for t in (0, 10, 20):
        part = SimaAccumulator()
        part.add_keys(k[:, :, t : t + 10], v[:, :, t : t + 10])
        part.add_queries(q[:, :, t : t + 10])
        parts.append(part)
    whole = SimaAccumulator()
    for part in parts:
        whole.merge(part)
    assert_close(whole.attend(q), sima_attention(q, k, v))


def test_a_million_tokens_in_a_state_of_a_few_thousand_numbers():
    B, H, D, tile, count = 1, 2, 16, 2**13, 123
    N = tile * count  # 1,007,616 tokens
    acc = SimaAccumulator()
    q_norm = k_norm = kv = 0  # the same sums in float64
    for index in range(count):
        generator = torch.Generator().manual_seed(index)
        q, k, v = torch.randn(3, B, H, tile, D, generator=generator).unbind(0)
        acc.add_keys(k, v)
        acc.add_queries(q)
        q_norm, k_norm = q_norm + q.double().abs().sum(2), k_norm + k.double().abs().sum(2)
        kv = kv + k.double().mT @ v.double()

    state = [acc.kv, acc.k_norm, acc.q_norm]
    assert sum(t.numel() for t in state) == B * H * (D * D + 2 * D)
    # The queries of the last tile.
    expected = (q.double() / q_norm[:, :, None]) @ (kv / k_norm[..., None])
    # The mean of a million random values: 3e-3 of their size is left, and float32 sums keep four digits of it.
    error = (acc.attend(q).double() - expected).norm() / expected.norm()
    assert error < 1e-3
    assert N > 1_000_000


def test_gradients_flow_through_tiles():
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 1, 6, 2, dtype=torch.float64))

    def attend(q, k, v):
        return accumulate(q, k, v, query_tile=4, key_tile=4).attend(q)

    assert torch.autograd.gradcheck(attend, (q, k, v))


def test_half_precision_is_summed_in_float32():
    q, k, v = torch.randn(3, 1, 2, 50, 8).half()
    acc = accumulate(q, k, v, query_tile=20, key_tile=20)
    assert acc.kv.dtype == acc.k_norm.dtype == acc.q_norm.dtype == torch.float32
    assert acc.attend(q).dtype == torch.float16
    assert_close(acc.attend(q), sima_attention(q, k, v), 1e-3)


def test_wrong_use_is_named():
    x = torch.zeros(1, 2, 3, 4)
    acc = SimaAccumulator()
    with pytest.raises(ValueError, match="no keys yet: call add_keys"):
        acc.attend(x)
    acc.add_keys(x, x)
    with pytest.raises(ValueError, match="call add_queries"):
        acc.attend(x)
    with pytest.raises(ValueError, match=r"\(1, 2, 5\), the tiles before it had \(1, 2, 4\)"):
        acc.add_queries(torch.zeros(1, 2, 3, 5))
    with pytest.raises(ValueError, match="tile of v has 7 channels, the tiles before it had 4"):
        acc.add_keys(x, torch.zeros(1, 2, 3, 7))
    with pytest.raises(ValueError, match="must have the same eps and token_ref"):
        acc.merge(SimaAccumulator(eps=1e-6))
    with pytest.raises(ValueError, match="k and v must have the same number of tokens"):
        acc.add_keys(x, torch.zeros(1, 2, 9, 4))
    other = SimaAccumulator()
    other.add_keys(torch.zeros(1, 5, 3, 4), torch.zeros(1, 5, 3, 4))
    with pytest.raises(ValueError, match=r"kv has shapes \(1, 2, 4, 4\) and \(1, 5, 4, 4\)"):
        acc.merge(other)
    with pytest.raises(ValueError, match="token_ref must be"):
        SimaAccumulator(token_ref=-1)
