"""torch.compile and torch.export take the operator whole."""

import pytest
import torch

from closeness import assert_close
from cpp_compiler import needs_cpp
from sima_attn.ops import sima_attention


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def qkv(N, M, D=8, B=2, H=2, dtype=torch.float32):
    return (
        torch.randn(B, H, N, D, dtype=dtype),
        torch.randn(B, H, M, D, dtype=dtype),
        torch.randn(B, H, M, D, dtype=dtype),
    )


@pytest.mark.parametrize("options", [{"order": "kv"}, {"order": "qk"}, {}, {"token_ref": 16.0}], ids=str)
def test_compiles_to_one_graph_for_every_token_count(options):
    compiled = torch.compile(
        lambda q, k, v: sima_attention(q, k, v, **options),
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    for N, M in ((5, 5), (12, 12), (30, 7), (33, 64)):
        q, k, v = qkv(N, M)
        assert_close(compiled(q, k, v), sima_attention(q, k, v, **options), 1e-6)


def test_one_compiled_graph_serves_many_token_counts():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lambda q, k, v: sima_attention(q, k, v), backend=counter, fullgraph=True, dynamic=True)
    for N in (12, 13, 40, 100):
        compiled(*qkv(N, N))
    assert counter.frame_count == 1


def test_masks_compile_and_gradients_flow():
    compiled = torch.compile(sima_attention, backend="aot_eager", fullgraph=True)
    q, k, v = qkv(6, 6, dtype=torch.float64)
    mask = torch.rand(2, 6) > 0.3
    grads = []
    for attend in (compiled, sima_attention):
        leaf = q.clone().requires_grad_()
        attend(leaf, k, v, key_mask=mask, query_mask=mask, token_ref=4).square().sum().backward()
        grads.append(leaf.grad)
    assert_close(grads[0], grads[1])


@needs_cpp
def test_inductor_gives_the_same_numbers():
    compiled = torch.compile(sima_attention, fullgraph=True)
    q, k, v = qkv(20, 20, dtype=torch.bfloat16)
    assert_close(compiled(q, k, v), sima_attention(q, k, v), 5e-3)


class Operator(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return sima_attention(q, k, v, **self.options)


@pytest.mark.parametrize("options", [{}, {"order": "qk"}, {"token_ref": 16.0}], ids=["auto", "qk", "token_ref"])
def test_exports_with_a_dynamic_token_count_and_stays_right_for_every_one(options):
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    module = Operator(**options)
    program = torch.export.export(module, qkv(20, 20), dynamic_shapes=[{2: tokens}] * 3)
    for N in (2, 7, 20, 50):  # both sides of the order rule, whichever side was exported
        q, k, v = qkv(N, N)
        assert_close(program.module()(q, k, v), sima_attention(q, k, v, **options), 1e-5)


def test_exports_with_a_fixed_token_count():
    q, k, v = qkv(5, 9)
    program = torch.export.export(Operator(), (q, k, v))
    assert_close(program.module()(q, k, v), sima_attention(q, k, v), 1e-5)
    exponentials = [n for n in program.graph.nodes if any(w in str(n.target) for w in ("exp.", "softmax", "sigmoid"))]
    assert not exponentials
