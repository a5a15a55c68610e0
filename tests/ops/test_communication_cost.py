"""Bytes per layer and process.

What is really sent is counted in tests/parallel/split_models.py (SimA) and tests/nn/split_tokens.py (softmax).
"""

import pytest

from sima_attn.ops.communication_cost import ring_traffic, sima_message, sima_traffic, ulysses_traffic
from sima_attn.ops.cost import AttentionShape


def shape(tokens, H=8):
    return AttentionShape(B=1, H=H, N=tokens, D=64)


def test_simas_message_does_not_depend_on_the_tokens():
    assert sima_message(shape(100)) == sima_message(shape(10**9)) == 4 * 8 * 64 * 66
    assert sima_message(shape(100), token_ref=True) == 4 * (8 * 64 * 66 + 1)


def test_the_others_grow_with_the_tokens():
    for traffic in (ring_traffic, ulysses_traffic):
        assert traffic(shape(8000), 4).total == pytest.approx(10 * traffic(shape(800), 4).total)


def test_one_process_sends_nothing():
    for traffic in (sima_traffic, ring_traffic, ulysses_traffic):
        assert traffic(shape(1000), 1).total == 0


def test_two_processes_by_hand():
    numbers = 500 * 8 * 64  # in k, and in v, of one process
    assert ring_traffic(shape(1000), 2).forward == 2 * (2 * numbers)
    assert ring_traffic(shape(1000), 2).backward == 2 * (2 * numbers) + 2 * 2 * (2 * numbers)
    assert ulysses_traffic(shape(1000), 2).forward == 2 * 4 * numbers / 2  # half of each of q, k, v and o stays
    assert sima_traffic(shape(1000), 2).forward == sima_message(shape(1000))


def test_ulysses_needs_whole_heads():
    with pytest.raises(ValueError, match="must divide 6 heads, got 4"):
        ulysses_traffic(shape(1000, H=6), 4)
