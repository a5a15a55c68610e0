"""Bad input to the operator: each gets an error that says what was given and what to do."""

import pytest
import torch

from sima_attn.ops import sima_attention

GOOD = torch.zeros(2, 3, 4, 5)


def qkv(**replaced):
    return {"q": GOOD, "k": GOOD, "v": GOOD, **replaced}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (qkv(q=torch.zeros(4, 5)), r"q must have four axes .* got shape \(4, 5\)"),
        (qkv(v=[1.0]), "v must be a torch.Tensor, got list"),
        (qkv(k=None), "k must be a torch.Tensor, got NoneType"),
        (qkv(k=torch.zeros(2, 3, 4, 6)), r"q and k must have the same number of channels.*k \(2, 3, 4, 6\)"),
        (qkv(v=torch.zeros(2, 3, 7, 5)), "k and v must have the same number of tokens"),
        (qkv(v=torch.zeros(1, 3, 4, 5)), "agree in batch and heads"),
        (
            qkv(q=GOOD.int(), k=GOOD.int(), v=GOOD.int()),
            "must be float16, bfloat16, float32 or float64, got torch.int32",
        ),
        (qkv(v=GOOD.half()), "one dtype, got torch.float32, torch.float32 and torch.float16"),
        (qkv(v=GOOD.to("meta")), "on one device, got cpu, cpu and meta"),
        (qkv(q=GOOD[:, :, :0]), "at least 1"),
        (qkv(k=GOOD[:, :, :0], v=GOOD[:, :, :0]), "at least 1"),
        (qkv(v=GOOD[..., :0]), "at least 1"),
        (qkv(order="auot"), "unknown order 'auot'; known: auto, kv, qk; did you mean 'auto'?"),
        (qkv(backend="tritn"), "unknown backend 'tritn'; known: auto, eager"),
        (qkv(eps=0.0), r"eps must lie in \[1e-18, 1\), got 0.0"),
        (qkv(eps=float("nan")), "eps must lie in"),
        (qkv(eps="1e-6"), "eps must lie in .* got '1e-6'"),
        (qkv(eps=None), "eps must lie in"),
        (qkv(token_ref="train"), "token_ref must be None or the positive number of tokens .* got 'train'"),
        (qkv(token_ref=True), "token_ref must be None or the positive number of tokens .* got True"),
        (qkv(token_ref=0), "token_ref must be None or the positive number of tokens .* got 0"),
        (qkv(token_ref=float("inf")), "token_ref must be"),
        (qkv(key_mask=torch.ones(2, 4)), "key_mask must be a bool tensor.*torch.float32"),
        (qkv(key_mask=[True]), "key_mask must be a bool tensor.*list"),
        (
            qkv(query_mask=torch.ones(2, 5).bool()),
            r"query_mask must have shape \[batch, tokens\] = \(2, 4\), got \(2, 5\)",
        ),
        (qkv(key_mask=torch.ones(2, 4, 4).bool()), "does not support masks of token pairs"),
        (qkv(key_mask=torch.ones(2, 4, device="meta").bool()), "key_mask must be on cpu"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        sima_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_the_good_input_of_these_tests_is_good():
    assert sima_attention(GOOD, GOOD, GOOD).shape == GOOD.shape
