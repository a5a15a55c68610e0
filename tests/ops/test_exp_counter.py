"""The counter sees every exp-like function, however it is called."""

import pytest
import torch
import torch.nn.functional as F

from sima_attn.ops import ExpCounter

X = torch.randn(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("function", "name", "count"),
    [
        (lambda: X.exp(), "exp", 120),
        (lambda: X.clone().exp_(), "exp", 120),
        (lambda: torch.exp(X, out=torch.empty_like(X)), "exp", 120),
        (lambda: X.softmax(-1), "softmax", 120),
        (lambda: X.log_softmax(-1), "log_softmax", 120),
        (lambda: X.logsumexp(-1), "logsumexp", 120),
        (lambda: X.sigmoid(), "sigmoid", 120),
        (lambda: X.tanh(), "tanh", 120),
        (lambda: X.erf(), "erf", 120),
        (lambda: F.gelu(X), "gelu", 120),
        (lambda: F.gelu(X, approximate="tanh"), "gelu", 120),
        (lambda: F.elu(X), "elu", 120),
        (lambda: F.elu(X.clone(), inplace=True), "elu", 120),
        (lambda: F.silu(X), "silu", 120),
        (lambda: F.mish(X), "mish", 120),
        (lambda: F.softplus(X), "softplus", 120),
        (
            lambda: F.scaled_dot_product_attention(X, X[:, :, :3], X[:, :, :3]),
            "scaled_dot_product_attention",
            2 * 3 * 4 * 3,
        ),
    ],
)
def test_counts_the_numbers_a_function_is_evaluated_on(function, name, count):
    with ExpCounter() as counter:
        function()
    assert counter.counts == {name: count}
    assert counter.total == count


def test_arithmetic_is_not_counted():
    with ExpCounter() as counter:
        (X.relu() @ X.mT).abs().pow(2).sum().sqrt() / 3
    assert counter.total == 0


def test_counts_inside_modules_and_in_training():
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.GELU(), torch.nn.Linear(6, 2), torch.nn.Softmax(-1))
    with ExpCounter() as counter:
        model(torch.randn(7, 5))
    assert counter.counts == {"gelu": 42, "softmax": 14}
