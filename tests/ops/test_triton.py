"""The fused kernels: through Triton's interpreter without a GPU, on the GPU with larger shapes where there is one."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recorder import Recorder
from sima_attn.nn import SimAttention
from sima_attn.ops import api, plan, sima_attention, sima_attention_qkv, sima_reference, triton_op
from sima_attn.ops.reference import algorithm_1

triton_launch = pytest.importorskip("sima_attn.ops.triton_launch", reason="needs triton")
from sima_attn.ops import triton_tuning  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LARGER = 4 if CUDA else 1
# Triton's interpreter cuts float32 off when it makes bfloat16 of it, a GPU rounds: twice the error, and biased.
BF16_FACTOR = 2.0 if CUDA else 5.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Everything the kernels are to fill holds NaN before: what they forget cannot go unnoticed."""
    scratch, output = triton_launch.scratch, triton_op._heads_last
    monkeypatch.setattr(triton_launch, "scratch", lambda *a, **k: scratch(*a, **k).fill_(torch.nan))
    monkeypatch.setattr(triton_op, "_heads_last", lambda *a: output(*a).fill_(torch.nan))


@pytest.fixture(params=["one program a head", "heads split"])
def path(request, monkeypatch):
    """Both ways through the "kv" order, each with tiles smaller than the tokens."""
    few = 10**6 if request.param == "one program a head" else 0
    monkeypatch.setattr(triton_launch, "FEW_TOKENS", few)
    monkeypatch.setattr(triton_launch, "FEW_TOKENS_OF_MANY_HEADS", few)
    monkeypatch.setattr(triton_launch, "SMALLEST_SHARE", 16)
    return request.param


def make(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def make_qkv(B=2, H=3, N=70, M=None, D=24, Dv=None, dtype=torch.float32):
    M, Dv = M or N, Dv or D
    return make(B, H, N, D, dtype=dtype), make(B, H, M, D, dtype=dtype), make(B, H, M, Dv, dtype=dtype)


def error(out, truth):
    return ((out.double() - truth).norm() / truth.norm()).item()


def with_grads(attention, q, k, v, grad, **options):
    """[o, dq, dk, dv]."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (q, k, v))
    o = attention(q, k, v, **options)
    o.backward(grad.to(o.dtype))
    return [o.detach(), q.grad, k.grad, v.grad]


def assert_as_accurate_as_plain_torch(q, k, v, order, **options):
    grad = make(*q.shape[:3], v.shape[3], dtype=q.dtype)
    ours = with_grads(sima_attention, q, k, v, grad, order=order, backend="triton", **options)
    truth = with_grads(sima_attention, q.double(), k.double(), v.double(), grad, backend="eager", **options)
    masked = any(option in options for option in ("key_mask", "query_mask", "token_ref"))
    plainly = sima_attention if masked else algorithm_1
    named = {"backend": "eager", **options} if masked else {}
    plain = with_grads(plainly, q, k, v, grad, order=order, **named)
    factor = BF16_FACTOR if q.dtype == torch.bfloat16 else 2.0
    if q.dtype == torch.float32 and q.shape[3] > 128:
        factor = 2.5  # three tf32 products for each float32 one: 2.25 times the error on an H200
    smallest = torch.finfo(q.dtype).eps / 8  # plain torch may be right by luck
    for name, a, b, true in zip(("o", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        assert a.dtype == q.dtype
        bound = factor * max(error(b, true), smallest)
        assert error(a, true) <= bound, f"{name}: error {error(a, true):.2e}, plain torch {error(b, true):.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward_are_as_accurate_as_plain_torch(path, dtype):
    assert_as_accurate_as_plain_torch(*make_qkv(N=150 * LARGER, dtype=dtype), "kv")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("N", [40, 140], ids=["one tile", "several tiles"])
def test_the_other_order_is_as_accurate_as_plain_torch(dtype, N):
    assert_as_accurate_as_plain_torch(*make_qkv(B=1, N=N, dtype=dtype), "qk")


@pytest.mark.parametrize("D", [16, 48, 72, 80, 96, 256])
@pytest.mark.parametrize("order", ["kv", "qk"])
def test_head_dims(D, order):
    """Lanes past D are masked: 48 runs in 64 lanes, 72 to 96 in 128. 256 has no room for a head in one program."""
    assert_as_accurate_as_plain_torch(*make_qkv(B=1, H=2, N=40 * LARGER, D=D, dtype=torch.float16), order)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("D", [16, 32, 48, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [2, 128], ids=["few heads", "many heads"])
def test_head_dims_and_dtypes_on_the_gpu(D, dtype, B):
    """Every tile of the table: heads whole, in a loop and split, in both orders."""
    for N, order in ((36, "kv"), (36, "qk"), (196, "kv"), (500, "kv")):
        assert_as_accurate_as_plain_torch(*make_qkv(B=B, H=2, N=N, D=D, dtype=dtype), order)


@pytest.mark.parametrize("order", ["kv", "qk"])
@pytest.mark.parametrize(("N", "M", "D", "Dv"), [(1, 70, 24, 24), (70, 33, 24, 40), (33, 1, 40, 24), (5, 200, 16, 72)])
def test_class_and_cross_attention(order, N, M, D, Dv):
    q, k, v = make_qkv(N=N, M=M, D=D, Dv=Dv)
    grad = make(2, 3, N, Dv)
    ours = with_grads(sima_attention, q, k, v, grad, order=order, backend="triton")
    plain = with_grads(sima_attention, q, k, v, grad, order=order, backend="eager")
    truth = with_grads(sima_attention, q.double(), k.double(), v.double(), grad, backend="eager")
    for a, b, true in zip(ours, plain, truth, strict=True):
        # Of one token only the sign counts: its gradient is 0, the difference of two numbers that may be large.
        assert (a - true).abs().max() <= 10 * (b - true).abs().max() + 2e-6 * true.abs().max()


def test_masks_and_token_ref(path):
    q, k, v = make_qkv(N=80, M=90)
    masks = {"query_mask": torch.rand(2, 80, device=DEVICE) > 0.3, "key_mask": torch.rand(2, 90, device=DEVICE) > 0.3}
    assert_as_accurate_as_plain_torch(q, k, v, "kv", token_ref=49.0)
    assert_as_accurate_as_plain_torch(q, k, v, "kv", token_ref=49.0, **masks)


@pytest.mark.parametrize("order", ["kv", "qk"])
@pytest.mark.parametrize("N", [40, 140])
def test_not_even_nan_in_the_padding_gets_out(order, N, path):
    q, k, v = make_qkv(N=N)
    mask = torch.arange(N, device=DEVICE).expand(2, N) < N - 9
    grad = torch.ones(2, 3, N, 24, device=DEVICE)
    expected = with_grads(sima_attention, *(t[:, :, :-9] for t in (q, k, v)), grad[:, :, :-9], order=order)
    for t in (q, k, v):
        t[:, :, -9:] = torch.nan
    grad[:, :, -9:] = torch.nan
    ours = with_grads(sima_attention, q, k, v, grad, order=order, key_mask=mask, query_mask=mask, backend="triton")
    for a, b in zip(ours, expected, strict=True):
        assert error(a[:, :, :-9], b.double()) < 1e-5
        assert (a[:, :, -9:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", ["kv", "qk"])
def test_a_dead_channel_gives_zeros(order, dtype, path):
    """In float16 eps is 0 and 1/0 would be NaN; the kernels keep the norms in float32."""
    q, k, v = make_qkv(N=60, dtype=dtype)
    q[..., 5] = 0
    k[..., 7] = 0
    grad = make(2, 3, 60, 24, dtype=dtype)
    o, dq, dk, dv = with_grads(sima_attention, q, k, v, grad, order=order, backend="triton")
    without = [c for c in range(24) if c not in (5, 7)]
    expected = sima_reference(q[..., without].double(), k[..., without].double(), v.double())
    assert error(o, expected) < 0.03
    assert all(torch.isfinite(t).all() for t in (dq[..., without], dk[..., without], dv))


def test_float16_does_not_underflow(path):
    """Q-hat K-hat^T is near 1/N^2, below the smallest float16: 11.7 % off at N = 9216 where it is stored so."""
    N = 9216 if CUDA else 600
    q, k, v = make_qkv(B=1, H=1, N=N, D=16, dtype=torch.float16)
    truth = sima_reference(q.double(), k.double(), v.double())
    for order in ("qk", "kv"):
        assert error(sima_attention(q, k, v, order=order, backend="triton"), truth) < 0.02  # o itself is near 1e-5
    scaled = [sima_attention(q, k, v, order=order, backend="triton", token_ref=1.0) for order in ("qk", "kv")]
    assert all(error(o, truth * N) < 1e-3 for o in scaled)


@pytest.mark.parametrize("order", ["kv", "qk"])
def test_the_same_input_gives_the_same_bits(order, path):
    q, k, v = make_qkv(N=100 * LARGER)
    grad = make(2, 3, 100 * LARGER, 24)
    first, second = (with_grads(sima_attention, q, k, v, grad, order=order, backend="triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_packed_qkv_equals_the_three_tensors_and_its_gradient_is_packed():
    qkv = make(2, 50, 3, 4, 16).requires_grad_()
    grad = make(2, 50, 4, 16)
    o = sima_attention_qkv(qkv, backend="triton")
    assert o.is_contiguous(), "the projection after it would copy"
    o.backward(grad)
    q, k, v = qkv.detach().permute(2, 0, 3, 1, 4).unbind(0)
    expected = with_grads(sima_attention, q, k, v, grad.transpose(1, 2), backend="triton")
    assert torch.equal(o, expected[0].transpose(1, 2))
    assert torch.equal(qkv.grad, torch.stack(expected[1:]).permute(1, 3, 0, 2, 4))


def test_strided_views_are_read_in_place():
    """No copy of q, k, v or o: the only tensors made are the output and what the gradient needs."""
    qkv = make(2, 50, 3, 4, 16)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    with Recorder() as recorder:
        o = sima_attention(q, k, v, backend="triton")
    assert not recorder.shapes("clone", "contiguous", "_to_copy", "copy_")
    assert o.transpose(1, 2).is_contiguous()


def test_an_expanded_gradient_is_accepted():
    q, k, v = make_qkv(N=30)
    q.requires_grad_()
    sima_attention(q, k, v, backend="triton").sum().backward()
    ours, q.grad = q.grad, None
    sima_attention(q, k, v, backend="eager").sum().backward()
    assert error(ours, q.grad.double()) < 1e-5


@pytest.mark.parametrize("order", ["kv", "qk"])
def test_training_keeps_q_k_v_and_a_matrix_a_head(order):
    qkv = make(2, 120, 3, 4, 16).requires_grad_()
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        sima_attention_qkv(qkv, order=order, backend="triton")
    assert sum(kept.values()) <= 4 * (qkv.numel() + 2 * 4 * (16 * 16 + 2 * 16))


def test_inference_keeps_nothing():
    with torch.no_grad():
        _, state, norms = triton_op.attention(*make_qkv(), None, None, None, 1.0, 1e-12, "kv", False)
    assert state.numel() == norms.numel() == 0


@pytest.mark.parametrize("order", ["kv", "qk"])
def test_opcheck(order):
    q, k, v = (t.requires_grad_() for t in make_qkv(B=1, H=2, N=20, D=16))
    torch.library.opcheck(triton_op.attention, (q, k, v, None, None, None, 1.0, 1e-12, order, True))
    qkv = make(1, 20, 3, 2, 16).requires_grad_()
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    torch.library.opcheck(triton_op.attention_qkv, (qkv, mask, None, 1.0, 1e-12, order, True))
    torch.library.opcheck(triton_op.state_qkv, (qkv.detach(), 1.0, 1e-12))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("token_ref", [None, 40])
@pytest.mark.parametrize("bias", [True, False])
def test_the_projection_folded_in_is_the_projection_after_it(dtype, token_ref, bias):
    qkv, proj = make(2, 150 * LARGER, 3, 3, 24, dtype=dtype), torch.nn.Linear(72, 40, bias=bias).to(DEVICE)
    out = triton_op.sima_projected(qkv, proj.weight, proj.bias, token_ref=token_ref)
    after = torch.nn.functional.linear(
        sima_attention_qkv(qkv, token_ref=token_ref, backend="triton").flatten(2).to(dtype),
        proj.weight.to(dtype),
        None if proj.bias is None else proj.bias.to(dtype),
    )
    q, k, v = qkv.double().permute(2, 0, 3, 1, 4).unbind(0)
    truth = sima_reference(q, k, v, token_ref=token_ref).transpose(1, 2).flatten(2)
    truth = torch.nn.functional.linear(truth, proj.weight.double(), None if proj.bias is None else proj.bias.double())
    assert out.dtype == dtype
    assert error(out, truth) <= (BF16_FACTOR * error(after, truth) if dtype == torch.bfloat16 else 1e-5)


def test_the_projection_is_folded_in_compiled_inference_alone(monkeypatch):
    monkeypatch.setattr(api, "PROJECTED_NUMBERS", 1)
    monkeypatch.setattr(api, "plan", lambda *a, **k: api.Plan("kv", "triton"))
    qkv = make(1, 200, 3, 2, 16)

    def compiled(tokens: int) -> bool:
        torch._dynamo.reset()
        return bool(torch.compile(lambda x: (x, api.folds_projection(x)), backend="eager")(qkv[:, :tokens])[1])

    assert compiled(200) is False  # there may be a gradient
    with torch.no_grad():
        assert compiled(200) is True
        assert compiled(100) is False
        assert api.folds_projection(qkv) is False  # called from Python


def test_compiles_without_a_graph_break(path):
    torch._dynamo.reset()
    module = SimAttention(48, 2).to(DEVICE)
    x = make(2, 60, 48).requires_grad_()

    def run(x):
        qkv = module.project(x)
        return module.proj(sima_attention_qkv(qkv, backend="triton").flatten(2)).square().sum()

    expected = torch.autograd.grad(run(x), x)[0]
    compiled = torch.compile(run, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    assert error(torch.autograd.grad(compiled(x), x)[0], expected.double()) < 1e-4


class OperatorNames(TorchDispatchMode):
    """Looks at every call."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
def test_a_plain_call_goes_past_the_operator_and_gives_the_same_bits(packed):
    qkv, grad = make(2, 40, 3, 2, 16), make(2, 40, 2, 16)

    def run():
        x = qkv.clone().requires_grad_()
        if packed:
            o = sima_attention_qkv(x, backend="triton")
        else:
            o = sima_attention(*(t.transpose(1, 2) for t in x.unbind(2)), backend="triton").transpose(1, 2)
        return [o.detach(), *torch.autograd.grad(o, x, grad)]

    plain = run()
    with OperatorNames() as mode:
        seen = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    name = "sima_attn::attention_qkv" if packed else "sima_attn::attention"
    assert [n for n in mode.names if n.startswith("sima_attn")] == [name, f"{name}_backward"]


def test_a_second_derivative_is_an_error_and_not_a_zero():
    qkv = make(1, 20, 3, 1, 16).requires_grad_()
    first = torch.autograd.grad(sima_attention_qkv(qkv, backend="triton").square().sum(), qkv, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


class KernelThatCounts:
    """A kernel as `start` sees it: launched through itself it compiles, and the compiled one is launched after."""

    arg_names = ("x", "count", "factor", "WIDTH", "FLAG")

    def __init__(self):
        self.fn, self.launches = object(), []

    def __getitem__(self, grid):
        def compile_and_launch(*arguments, **constants):
            self.launches.append(("compiled", grid, arguments, constants))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.launches.append(("remembered", grid, arguments))


def test_a_launch_is_remembered_until_something_that_triton_looks_at_differs(monkeypatch):
    monkeypatch.setattr(triton_launch, "_ready", {})
    kernel, tile = KernelThatCounts(), triton_tuning.Tile(32, warps=4)
    x = make(64)

    def launch(x, count=5, factor=1.0, width=16, tile=tile):
        triton_launch.start(kernel, (2, 1, 1), x, count, factor, FLAG=True, WIDTH=width, tile=tile)
        return kernel.launches[-1]

    how, grid, _, constants = launch(x)
    assert how == "compiled"
    assert grid == (2, 1, 1)
    assert constants == {"FLAG": True, "WIDTH": 16, **tile.compiler_options()}
    # Floats are of one type whatever they are; the constants follow in the order of the kernel, not of the call.
    how, _, arguments = launch(x + 1, factor=2.0)
    assert how == "remembered"
    assert arguments[1:] == (5, 2.0, 16, True)
    changes = ({"count": 16}, {"width": 32}, {"tile": triton_tuning.Tile(64, warps=4)})
    others = [launch(x, **change) for change in changes] + [launch(x[1:]), launch(x.half())]
    assert [other[0] for other in others] == ["compiled"] * len(others)
    monkeypatch.setattr(triton_launch, "MOST_READY", 1)
    launch(x, count=17)
    assert len(triton_launch._ready) == 1, "what is remembered stays bounded"


def test_autocast_leaves_the_dtype_of_the_inputs_alone():
    q, k, v = make_qkv(N=30)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = sima_attention(q, k, v, backend="triton")
    assert out.dtype == torch.float32
    assert torch.equal(out, sima_attention(q, k, v, backend="triton"))


def test_what_the_kernels_cannot_take_raises_when_named_and_falls_back_when_not():
    q, k, v = make_qkv(N=20)
    cases = {
        "float64": [t.double() for t in (q, k, v)],
        "at most 256 channels": make_qkv(N=20, D=257),
        "side by side": [t.mT.contiguous().mT for t in (q, k, v)],
    }
    for reason, tensors in cases.items():
        with pytest.raises(ValueError, match=reason):
            sima_attention(*tensors, backend="triton")
        assert plan(*tensors).backend == "eager"
        sima_attention(*tensors)


def test_the_plan_says_what_runs():
    q, k, v = make_qkv(N=20, D=64)
    assert plan(q, k, v).backend == ("triton" if CUDA else "eager")
    assert plan(q, k, v, backend="triton") == ("qk", "triton")
    assert plan(*make_qkv(N=1, M=300, D=64), backend="triton").order == "kv"
    assert plan(*make_qkv(N=1, M=300, D=64), backend="eager").order == "qk"


def test_another_chip_takes_the_fastest_tile_that_fits(monkeypatch):
    fast, slow, too_large = (triton_tuning.Tile(rows, warps=4) for rows in (32, 64, 128))

    def launch(tile):
        if tile == too_large:
            raise triton_tuning.triton.runtime.errors.OutOfResources(300_000, 100_000, "shared memory")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton_tuning, "_milliseconds", lambda tile, launch: {fast: 1.0, slow: 2.0}[tile])
    tiles = [too_large, slow, fast]
    assert triton_tuning._choose(tiles, torch.device("cuda"), launch) == fast
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: triton_tuning.TABLE_CAPABILITY)
    assert triton_tuning._choose(tiles, torch.device("cuda"), launch) == slow, "the first of the table that fits"


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("N", [196, 1500])
def test_cuda_graphs(N):
    qkv = make(4, N, 3, 4, 64, dtype=torch.bfloat16)
    expected = sima_attention_qkv(qkv)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sima_attention_qkv(qkv)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_sim_attention_uses_the_kernels_without_being_asked():
    module = SimAttention(192, 3).cuda().bfloat16()
    with Recorder() as recorder:
        module(make(2, 100, 192, dtype=torch.bfloat16))
    assert not recorder.shapes("bmm"), "plain torch would multiply in batches"


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_compiled_module_keeps_the_kernels():
    """torch 2.11 says is_exporting() inside torch.compile, and an exported program has no kernels of ours."""
    torch._dynamo.reset()
    code = []

    def look(graph, inputs):
        code.append(graph.code)
        return graph

    module = SimAttention(192, 3).cuda().bfloat16()
    torch.compile(module, fullgraph=True, backend=look)(make(2, 100, 192, dtype=torch.bfloat16))
    assert "attention_qkv" in code[0]
