"""The counter sees every exp-like function, however it is called."""

import pytest
import torch
import torch.nn.functional as F

from sima_attn.ops import ExpCounter

X = torch.randn(2, 3, 4, 5)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


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
        (lambda: X.exp2(), "exp2", 120),
        (lambda: X.logcumsumexp(-1), "logcumsumexp", 120),
        (lambda: torch.linalg.matrix_exp(X[..., :4]), "linalg_matrix_exp", 96),
        (lambda: F.binary_cross_entropy_with_logits(X, X), "binary_cross_entropy_with_logits", 120),
        (lambda: 2**X, "pow", 120),
        (lambda: torch.float_power(2, X), "pow", 120),
        (lambda: torch.pow(X[..., :1].abs(), X), "pow", 120),
        (lambda: X.abs().pow_(X), "pow", 120),
        (lambda: torch.pow(2, X, out=torch.empty_like(X)), "pow", 120),
        (lambda: torch.ldexp(X, X), "pow", 120),
        (lambda: 2 ** torch.randn(3), "pow", 3),
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


def test_powers_with_a_fixed_exponent_are_not_counted():
    power = torch.nn.Parameter(torch.tensor(3.0))
    with ExpCounter() as counter:
        X.abs().pow(2.5)
        X.abs().pow(power)
        X ** torch.arange(5)  # integers
        10000 ** (2 * torch.arange(8.0) / 8)  # a table of position encodings
    assert counter.total == 0


@pytest.mark.parametrize("write", ["slice", "add", "foreach"])
def test_a_table_that_is_written_to_is_none(write):
    with ExpCounter() as counter:
        table = torch.zeros(2, 3, 4, 5)
        if write == "slice":
            table[:, 1] = X[:, 1]
        elif write == "add":
            table.view(-1).add_(X.view(-1))
        else:
            torch._foreach_add_([table], [X])
        2**table
    assert counter.counts == {"pow": 120}


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_one_kernel_path_of_multihead_attention_counts_its_scores(need_weights):
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    tokens = torch.randn(3, 5, 8)
    with torch.no_grad(), ExpCounter() as counter:
        attention(tokens, tokens, tokens, need_weights=need_weights)
    assert counter.counts == {"scaled_dot_product_attention": 3 * 2 * 5 * 5}


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_one_kernel_path_of_an_encoder_counts_what_its_parts_would(activation):
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, activation=activation, batch_first=True)
    encoder, tokens = torch.nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    with torch.no_grad(), ExpCounter() as fused:
        encoder(tokens)
    with ExpCounter() as parts:  # gradients switch the one-kernel path off
        encoder(tokens)
    assert fused.counts == parts.counts
    padding = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    with torch.no_grad(), ExpCounter() as nested:  # padded tokens are left out
        encoder(tokens, src_key_padding_mask=padding)
    gelus = {"gelu": 2 * (5 + 3 + 1) * 16} if activation == "gelu" else {}
    assert nested.counts == {"scaled_dot_product_attention": 2 * 2 * (25 + 9 + 1), **gelus}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("cell", ["LSTM", "GRU", "RNN"])
def test_fused_recurrent_layers_count_what_their_parts_would(cell, options, device):
    layer, x = getattr(torch.nn, cell)(6, 4, **options).to(device), torch.randn(3, 5, 6, device=device)
    with torch.no_grad(), ExpCounter() as fused:
        layer(x)
    no_mkldnn, no_cudnn = torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False)
    with torch.no_grad(), no_mkldnn, no_cudnn, ExpCounter() as parts:
        layer(x)
    per_unit = {"LSTM": 5, "GRU": 3, "RNN": 1}[cell]
    assert fused.total == parts.total == per_unit * 3 * 5 * 4 * (4 if options else 1)


def test_an_operator_of_another_library_is_counted_by_its_name():
    library = torch.library.Library("sima_test_strangers", "DEF")
    library.define("magic(Tensor x) -> Tensor")
    library.impl("magic", torch.exp, "CPU")
    with ExpCounter() as counter:
        torch.ops.sima_test_strangers.magic(X)
    assert counter.counts == {"sima_test_strangers::magic": 120}


@pytest.mark.parametrize(
    ("name", "run", "count"),
    [
        ("foreach_exp", lambda x: torch._foreach_exp([x, x]), 12),
        ("foreach_sigmoid", lambda x: torch._foreach_sigmoid_([x.clone()]), 6),
        ("sparse_softmax", lambda x: torch.sparse.softmax(x.to_sparse(), 1), 6),
        ("gelu", lambda x: torch._addmm_activation(torch.zeros(4), x, torch.ones(3, 4), use_gelu=True), 8),
        ("special_i0e", lambda x: torch.special.i0e(x), 6),
    ],
)
def test_functions_by_other_names(name, run, count):
    with ExpCounter() as counter:
        run(torch.rand(2, 3) + 0.1)
    assert counter.counts[name] == count
