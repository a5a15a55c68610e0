"""The counts that the order choice and every table come from."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from sima_attn.ops import AttentionShape, choose_order, sima_attention, sima_cost
from sima_attn.ops.cost import product_macs

sizes = st.integers(1, 64)


@given(sizes, sizes, sizes, sizes)
def test_the_chosen_order_is_never_the_dearer_one(N, M, D, Dv):
    other = {"kv": "qk", "qk": "kv"}[choose_order(N, M, D, Dv)]
    assert product_macs(choose_order(N, M, D, Dv), N, M, D, Dv) <= product_macs(other, N, M, D, Dv)


@given(sizes, sizes)
def test_for_self_attention_it_is_the_rule_of_the_paper(N, D):
    assert choose_order(N, N, D, D) == ("qk" if N < D else "kv")


def test_cvt_13_takes_the_linear_order_in_every_stage():
    """Keys and values have a quarter of the queries' tokens there (and a class token in the last stage)."""
    for N, M in ((3136, 784), (784, 196), (197, 50)):
        assert choose_order(N, M, 64, 64) == "kv"


@pytest.mark.parametrize("order", ["kv", "qk", "auto"])
@pytest.mark.parametrize("with_autograd", [True, False])
@given(st.integers(1, 3), st.integers(1, 3), *[st.integers(2, 9)] * 4)
def test_macs_are_half_the_flops_that_torch_counts(order, with_autograd, B, H, N, M, D, Dv):
    q, k, v = torch.randn(B, H, N, D, requires_grad=with_autograd), torch.randn(B, H, M, D), torch.randn(B, H, M, Dv)
    with FlopCounterMode(display=False) as counter:
        sima_attention(q, k, v, order=order)
    assert 2 * sima_cost(AttentionShape(B, H, N, D, M, Dv), order).macs == counter.get_total_flops()


def test_deit_small_at_224_pixels():
    shape = AttentionShape(B=1, H=6, N=197, D=64)
    assert sima_cost(shape, "kv").macs == 2 * 6 * 197 * 64 * 64
    assert sima_cost(shape, "qk").macs == 2 * 6 * 197 * 197 * 64
    assert sima_cost(shape).macs == sima_cost(shape, "kv").macs
    assert sima_cost(shape).exps == 0
    assert sima_cost(shape).scratch == 6 * (64 * 64 + 2 * 64)


def test_the_numbers_of_a_cross_attention():
    shape = AttentionShape(B=2, H=3, N=10, D=4, M=5, Dv=6)
    assert shape.inputs_and_output == 2 * 3 * (10 * 4 + 5 * 4 + 5 * 6 + 10 * 6)
    assert sima_cost(shape, "qk").scratch == 2 * 3 * (10 * 5 + 2 * 4)


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        AttentionShape(B=1, H=0, N=3, D=4)
