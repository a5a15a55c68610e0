"""What every attention of the registry must do. A new line in the registry is tested by this file as it is."""

import pickle
import re

import pytest
import torch
from formulas import FORMULAS
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from closeness import assert_close
from sima_attn.nn import ATTENTIONS, attention_class, create_attention
from sima_attn.ops import AttentionShape, ExpCounter

B, H, N, D = 2, 3, 16, 8
every = pytest.mark.parametrize("name", ATTENTIONS)


def build(name, tokens=N, **options):
    module = create_attention(name, H * D, H, num_tokens=tokens, **options)
    with torch.no_grad():
        for parameter in module.parameters():  # no zeros and ones that would hide a missing factor
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def random_qkv(module, tokens=N, dtype=torch.float64, batch=B):
    q, k, v = torch.randn(3, batch, H, tokens, D, dtype=torch.float64).to(dtype)
    return (q, q, v) if module.ties_qk else (q, k, v)


def test_every_attention_has_an_independent_formula():
    assert set(FORMULAS) == set(ATTENTIONS)


@every
def test_equals_its_formula_written_in_numpy(name):
    module = build(name).double()
    q, k, v = random_qkv(module)
    expected = torch.empty_like(v)
    for b in range(B):
        for h in range(H):
            one_head = [t[b, h].numpy() for t in (q, k, v)]
            expected[b, h] = torch.as_tensor(FORMULAS[name](module, *one_head, h))
    # SOFT's inverse is iterated, the formula's is exact.
    assert_close(module.core(q, k, v), expected, 1e-4 if name == "soft" else 1e-10)


@every
@pytest.mark.parametrize("qk_norm", [False, True])
def test_autocast_changes_the_precision_alone(name, qk_norm):
    """Under it a norm of q and k answers in float32 while v is bfloat16."""
    module = build(name, qk_norm=qk_norm, norm_layer=torch.nn.LayerNorm)
    x = torch.randn(B, N, H * D)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    assert_close(out, module(x), 0.05)


@every
@pytest.mark.parametrize("tokens", [4, 16, 49])
def test_equals_its_own_reference(name, tokens):
    module = build(name, tokens).double()
    q, k, v = random_qkv(module, tokens)
    assert_close(module.core(q, k, v), module.reference(q, k, v), 1e-9)


@every
def test_the_weights_of_the_reference_have_the_shape_of_a_matrix(name):
    module = build(name).double()
    q, k, _ = random_qkv(module)
    rows = D if name == "xca" else N  # XCA's weights are of channels
    assert module.matrix(q, k).shape == (B, H, rows, rows)


@every
def test_tokens_in_tokens_out_and_gradients_to_every_parameter(name):
    module = build(name)
    x = torch.randn(B, N, H * D, requires_grad=True)
    out = module(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    assert x.grad.abs().sum() > 0
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{parameter_name} has no gradient"
        assert parameter.grad.isfinite().all(), parameter_name
        assert parameter.grad.any(), f"{parameter_name} has a gradient of zeros"


@every
def test_gradients_are_right(name):
    module = create_attention(name, 8, 2, num_tokens=4).double()
    q, k, v = torch.randn(3, 1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    inputs = (q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_())
    if module.ties_qk:
        q, _, v = inputs
        assert torch.autograd.gradcheck(lambda q, v: module.core(q, q, v), (q, v), atol=1e-4)
    else:
        assert torch.autograd.gradcheck(module.core, inputs)


@every
def test_permuting_the_tokens_permutes_the_output_or_the_class_says_otherwise(name):
    tokens = 64  # more than Nystrom has landmarks
    module = build(name, tokens).double()
    x = torch.randn(B, tokens, H * D, dtype=torch.float64)
    order = torch.randperm(tokens)
    difference = (module(x[:, order]) - module(x)[:, order]).norm() / module(x).norm()
    if module.equivariant:
        assert difference < 1e-10
    else:
        assert difference > 1e-4


@every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_finite_and_close(name, dtype):
    module = build(name, 196)
    q, k, v = random_qkv(module, 196, dtype)
    q, k = q * 4, k * 4
    if module.ties_qk:
        k = q
    with torch.no_grad():
        out = module.core(q, k, v)
        truth = module.double().core(q.double(), q.double() if module.ties_qk else k.double(), v.double())
    assert out.dtype == dtype
    assert_close(out, truth, 0.02 if dtype == torch.float16 else 0.1)


@every
@given(st.integers(1, 2), st.sampled_from([4, 9, 16, 25, 64]), st.sampled_from([(1, 8), (2, 4), (3, 16)]))
def test_counts_equal_a_counted_run(name, batch, tokens, heads_and_channels):
    heads, channels = heads_and_channels
    module = create_attention(name, heads * channels, heads, num_tokens=tokens)
    q, k, v = torch.randn(3, batch, heads, tokens, channels)
    if module.ties_qk:
        k = q
    with torch.no_grad(), ExpCounter() as exps:
        module.core(q, k, v)
    # Not every torch knows the FLOPs of its own fused kernel on the CPU.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops:
        module.core(q, k, v)
    cost = module.cost(AttentionShape(batch, heads, tokens, channels))
    assert cost.exps == exps.total
    assert 2 * cost.macs == flops.get_total_flops()
    assert cost.scratch > 0


@every
def test_the_paper_prints_no_exp_exactly_where_there_is_none(name):
    module = build(name)
    printed, exact = module.exps_in_paper, module.cost(AttentionShape(1, H, N, D)).exps
    assert printed is None or re.fullmatch(r"0|[HND^2]+", printed)
    assert printed is None or (printed == "0") == (exact == 0)


# Per block at the sizes of XCiT-S12/16 (H = 8, D = 48, N = 196).
EXACT_EXPS = {
    "sima": 0,
    "xca": 18_432,
    "elu": 150_528,
    "efficient": 150_528,
    "cosformer": 0,
    "performer": 580_160,
    "linformer": 100_352,
    "nystrom": 172_872,
}


@pytest.mark.parametrize(("name", "exps"), EXACT_EXPS.items())
def test_exp_counts_at_the_size_of_xcit_small(name, exps):
    module = create_attention(name, 384, 8, num_tokens=196)
    assert module.cost(AttentionShape(B=1, H=8, N=196, D=48)).exps == exps


def test_soft_counts_its_landmark_gelu_beside_the_kernels():
    module = create_attention("soft", 384, 8)
    assert module.cost(AttentionShape(B=1, H=8, N=196, D=48)).exps == 96_040 + 8 * 49 * 48


def test_softmax_counts_at_the_size_of_deit_small():
    assert create_attention("softmax", 384, 6).cost(AttentionShape(B=1, H=6, N=197, D=64)).exps == 232_854


@every
def test_runs_on_the_largest_scratch_it_declares(name):
    """`scratch` is within a small factor of what a run really allocates between the inputs and the output."""
    tokens = 64
    module = build(name, tokens)
    q, k, v = random_qkv(module, tokens, torch.float32, batch=1)
    made = AllocationCounter()
    with torch.no_grad(), made:
        module.core(q, k, v)
    declared = module.cost(AttentionShape(1, H, tokens, D)).scratch
    fused = name in ("softmax", "linformer")  # what the fused kernel keeps is not visible
    assert declared <= 2 * made.numbers or fused
    assert made.numbers <= 8 * (declared + 4 * H * tokens * D)


class AllocationCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Adds up the numbers in all new tensors that operations return."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.numbers += t.numel()
        return out


@every
def test_compiles_to_one_graph(name):
    torch._dynamo.reset()
    module = build(name)
    x = torch.randn(B, N, H * D)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_close(compiled(x), module(x), 1e-5)
    compiled(x).sum().backward()


@every
def test_what_cannot_be_honored_is_refused(name):
    module = build(name)
    x, mask = torch.randn(B, N, H * D), torch.ones(N, N, dtype=torch.bool)
    if name in ("softmax", "softmax_local", "softmax_rope"):
        causal = module(x, is_causal=True)
        assert_close(causal, module(x, attn_mask=mask.tril()), 1e-6)
    else:
        for options in ({"attn_mask": mask}, {"is_causal": True}):
            with pytest.raises(ValueError, match="does not support"):
                module(x, **options)
    if not module.can_drop_attention:
        with pytest.raises(ValueError, match=r"no attention matrix to drop .* attn_drop must be 0, got 0\.1"):
            build(name, attn_drop=0.1)
    else:
        dropped = build(name, attn_drop=0.5)
        assert not torch.equal(dropped(x), dropped(x))
        assert torch.equal(dropped.eval()(x), dropped(x))


@every
def test_options_of_timm_are_honored(name):
    module = build(name, qk_norm=True, scale_norm=True, norm_layer=torch.nn.LayerNorm, qkv_bias=False, proj_bias=False)
    assert isinstance(module.q_norm, torch.nn.LayerNorm)
    assert isinstance(module.norm, torch.nn.LayerNorm)
    assert module.qkv.bias is None
    assert module.proj.bias is None
    assert module(torch.randn(B, N, H * D)).shape == (B, N, H * D)
    assert build(name, dtype=torch.float64).qkv.weight.dtype == torch.float64


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown attention 'smia'; known: .*; did you mean 'sima'\?"):
        create_attention("smia", 8, 2)


def test_a_class_is_taken_by_name_once_it_is_registered(monkeypatch):
    class Mine(ATTENTIONS["softmax"]):
        pass

    with pytest.raises(ValueError, match=r"by its name in sima_attn\.ATTENTIONS, got the class Mine"):
        create_attention(Mine, 8, 2)
    monkeypatch.setitem(ATTENTIONS, "mine", Mine)
    assert type(create_attention("mine", 8, 2)) is Mine


@every
@pytest.mark.parametrize("shape", [(N, H * D), (B, 4, 4, H * D), (B, N, H * D + 1)])
def test_tokens_of_another_shape_are_named(name, shape):
    with pytest.raises(ValueError, match=re.escape(f"tokens must have shape [batch, tokens, {H * D}], got {shape}")):
        build(name)(torch.randn(shape))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match=r"num_heads must divide dim=6, got 4; possible: \[1, 2, 3, 6\]"):
        create_attention("sima", 6, 4)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="tempo"):
        create_attention("sima", 8, 2, tempo=1)


def test_a_configured_class_is_a_class_with_its_options_fixed():
    cls = attention_class("sima", token_ref=9.0, norm="l2")
    module = cls(8, num_heads=2)
    assert issubclass(cls, ATTENTIONS["sima"])
    assert (cls.__name__, module.token_ref, module.norm_over_tokens) == ("SimAttention", 9.0, "l2")
    assert attention_class("sima") is ATTENTIONS["sima"]
    assert type(module) is ATTENTIONS["sima"]
    assert pickle.loads(pickle.dumps(module)).token_ref == 9.0
    assert cls(8, num_heads=2, token_ref=4.0).token_ref == 4.0
