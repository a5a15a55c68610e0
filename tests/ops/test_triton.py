"""The fused kernels: through Triton's interpreter without a GPU, on the GPU with larger shapes where there is one."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from cpp_compiler import HAS_CPP
from recorder import Recorder
from sima_attn.nn import Relu2Attention, SimAttention
from sima_attn.ops import (
    plan,
    prepared_calls,
    relu2_attention,
    sima_attention,
    sima_attention_qkv,
    sima_reference,
    triton_tiles,
)
from sima_attn.ops.reference import algorithm_1

triton_launchers = pytest.importorskip("sima_attn.ops.triton_launchers", reason="needs triton")
from sima_attn.ops import triton_op  # noqa: E402

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LARGER = 4 if CUDA else 1
# Triton's interpreter cuts float32 off when it makes bfloat16 of it, a GPU rounds: twice the error, and biased.
BF16_FACTOR = 2.0 if CUDA else 5.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


pytestmark = pytest.mark.usefixtures("nothing_is_prepared", "poisoned_memory")


PATHS = ("one launch", "few shares", "many shares")  # of the "kv" order


def choose_path(monkeypatch, path):
    """Make the "kv" order take a path, with tiles smaller than the tokens."""
    few = 10**6 if path == "one launch" else 0
    for limit in ("FEW_TOKENS", "FEW_TOKENS_RECORDED", "FEW_TOKENS_CALLED", "FEW_TOKENS_OF_LARGE_CALLS"):
        monkeypatch.setattr(triton_tiles, limit, few)
    monkeypatch.setattr(triton_tiles, "SMALLEST_SHARE", 16)
    monkeypatch.setattr(triton_tiles, "PROGRAMS", 12.0)
    monkeypatch.setattr(triton_tiles, "SMALL_CALL", 10**6 if path == "few shares" else 0)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    choose_path(monkeypatch, request.param)
    return request.param


@pytest.fixture(params=[("qk", 40), ("one launch", 40), *((path, 100) for path in PATHS)], ids=str)
def case(request, monkeypatch):
    """(order, tokens): "kv" on each path, also with all tokens of a head in one tile, as "qk" needs them."""
    path, N = request.param
    if path == "qk":
        return "qk", N
    choose_path(monkeypatch, path)
    return "kv", N


def make(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def make_qkv(B=2, H=2, N=70, M=None, D=24, Dv=None, dtype=torch.float32):
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
def test_the_other_order_is_as_accurate_as_plain_torch(dtype):
    assert_as_accurate_as_plain_torch(*make_qkv(B=1, N=40, dtype=dtype), "qk")


@pytest.mark.parametrize("D", [16, 48, 72, 80, 96, 256])
@pytest.mark.parametrize("order", ["kv", "qk"])
def test_head_dims(D, order):
    """Lanes past D are masked: 48 runs in 64 lanes, 72 to 96 in 128. 256 has no room for a head in one program."""
    assert_as_accurate_as_plain_torch(*make_qkv(B=1, H=1, N=40, D=D, dtype=torch.float16), order)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("D", [16, 32, 48, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [2, 128], ids=["few heads", "many heads"])
def test_head_dims_and_dtypes_on_the_gpu(D, dtype, B):
    """Every tile of the table: heads whole, in a loop and split, in both orders."""
    for N, order in ((36, "kv"), (36, "qk"), (196, "kv"), (500, "kv")):
        if order == "qk" and not triton_tiles.fits_one_tile(N, N, D, D, dtype.itemsize):
            continue
        assert_as_accurate_as_plain_torch(*make_qkv(B=B, H=2, N=N, D=D, dtype=dtype), order)


@pytest.mark.parametrize("order", ["kv", "qk"])
@pytest.mark.parametrize(("N", "M", "D", "Dv"), [(1, 60, 24, 24), (60, 33, 24, 40), (33, 1, 40, 24), (5, 61, 16, 62)])
def test_class_and_cross_attention(order, N, M, D, Dv):
    q, k, v = make_qkv(H=3, N=N, M=M, D=D, Dv=Dv)
    grad = make(2, 3, N, Dv)
    ours = with_grads(sima_attention, q, k, v, grad, order=order, backend="triton")
    plain = with_grads(sima_attention, q, k, v, grad, order=order, backend="eager")
    truth = with_grads(sima_attention, q.double(), k.double(), v.double(), grad, backend="eager")
    for a, b, true in zip(ours, plain, truth, strict=True):
        # Of one token only the sign counts: its gradient is 0, the difference of two numbers that may be large.
        assert (a - true).abs().max() <= 10 * (b - true).abs().max() + 2e-6 * true.abs().max()


def guarded(monkeypatch):
    """Everything that is allocated lies between guard zones; the function returned asserts that they are untouched."""
    zone, memory = 4096, []

    def empty(self, *shape, dtype=torch.float32):
        numbers = torch.Size(shape).numel()
        whole = torch.full((numbers + 2 * zone,), -7.0, dtype=dtype, device=DEVICE)
        memory.append((whole, numbers))
        self._allocations.append((shape, dtype))
        self._tensors.append(whole[zone : zone + numbers].fill_(torch.nan).view(shape))
        return self._tensors[-1]

    monkeypatch.setattr(triton_launchers.Recording, "empty", empty)

    def check():
        assert memory
        for whole, numbers in memory:
            assert (whole[:zone] == -7).all(), "written before the beginning"
            assert (whole[zone + numbers :] == -7).all(), "written past the end"

    return check


@pytest.mark.parametrize(
    ("D", "Dv"), [(64, 65), (64, 128), (128, 64), (256, 128), (32, 96), (65, 64), (128, 48), (16, 256)]
)
def test_different_widths_of_keys_and_values(D, Dv, path, monkeypatch):
    """D and Dv may span a different number of column blocks: nothing is written outside the outputs."""
    check = guarded(monkeypatch)
    N = 70
    q, k, v = make_qkv(B=1, H=1, N=N, M=N + 3, D=D, Dv=Dv)
    grad = make(1, 1, N, Dv)
    ours = with_grads(sima_attention, q, k, v, grad, order="kv", backend="triton")
    check()
    truth = with_grads(sima_attention, q.double(), k.double(), v.double(), grad, backend="eager")
    for name, a, true in zip(("o", "dq", "dk", "dv"), ours, truth, strict=True):
        assert error(a, true) < 1e-5, name


def test_the_guard_zones_notice_a_write(monkeypatch):
    check = guarded(monkeypatch)
    out = triton_launchers.Recording([make(1)]).empty(4, 16)
    check()
    torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0)
    with pytest.raises(AssertionError, match="past the end"):
        check()


def test_gradients_where_a_norm_is_below_eps(case):
    order, N = case
    q, k, v = make_qkv(N=N)
    q[..., 3] *= 1e-4
    k[..., 5] *= 1e-4
    grad = make(2, 2, N, 24)
    ours = with_grads(sima_attention, q, k, v, grad, order=order, backend="triton", eps=0.5)
    truth = with_grads(sima_reference, q.double(), k.double(), v.double(), grad, eps=0.5)
    for a, true in zip(ours, truth, strict=True):
        assert error(a, true) < 1e-5
        # The two channels on their own: among the others a wrong gradient of theirs could go unnoticed.
        for c in (3, 5):
            assert error(a[..., c], true[..., c]) < 1e-4


def test_large_queries_and_keys_keep_their_result(case):
    """|Q|_1 |K|_1 overflows float32 at 1e18 and above, bfloat16's range too."""
    order, N = case
    q, k, v = make_qkv(N=N)
    grad = make(2, 2, N, 24)
    options = {"order": order, "backend": "triton", "token_ref": 1.0}
    expected = with_grads(sima_attention, q, k, v, grad, **options)
    o, dq, dk, dv = with_grads(sima_attention, q * 1e20, k * 1e20, v, grad, **options)
    for a, b in zip((o, dq * 1e20, dk * 1e20, dv), expected, strict=True):
        assert error(a, b.double()) < 1e-5


def test_masks_and_token_ref(path):
    q, k, v = make_qkv(N=70, M=80)
    masks = {"query_mask": torch.rand(2, 70, device=DEVICE) > 0.3, "key_mask": torch.rand(2, 80, device=DEVICE) > 0.3}
    assert_as_accurate_as_plain_torch(q, k, v, "kv", token_ref=49.0)
    assert_as_accurate_as_plain_torch(q, k, v, "kv", token_ref=49.0, **masks)


def test_not_even_nan_in_the_padding_gets_out(case):
    order, N = case
    q, k, v = make_qkv(N=N)
    mask = torch.arange(N, device=DEVICE).expand(2, N) < N - 9
    grad = torch.ones(2, 2, N, 24, device=DEVICE)
    expected = with_grads(sima_attention, *(t[:, :, :-9] for t in (q, k, v)), grad[:, :, :-9], order=order)
    for t in (q, k, v):
        t[:, :, -9:] = torch.nan
    grad[:, :, -9:] = torch.nan
    ours = with_grads(sima_attention, q, k, v, grad, order=order, key_mask=mask, query_mask=mask, backend="triton")
    for a, b in zip(ours, expected, strict=True):
        assert error(a[:, :, :-9], b.double()) < 1e-5
        assert (a[:, :, -9:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dead_channel_gives_zeros(case, dtype):
    """In float16 eps is 0 and 1/0 would be NaN; the kernels keep the norms in float32."""
    order, N = case
    q, k, v = make_qkv(N=N, dtype=dtype)
    q[..., 5] = 0
    k[..., 7] = 0
    grad = make(2, 2, N, 24, dtype=dtype)
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
    assert error(sima_attention(q, k, v, order="kv", backend="triton"), truth) < 0.02  # o itself is near 1e-5
    assert error(sima_attention(q, k, v, order="kv", backend="triton", token_ref=1.0), truth * N) < 1e-3


def test_the_same_input_gives_the_same_bits(case):
    order, N = case
    q, k, v = make_qkv(N=N)
    grad = make(2, 2, N, 24)
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
def test_training_keeps_q_k_v_and_a_matrix_per_head(order):
    qkv = make(2, 60, 3, 4, 16).requires_grad_()
    kept = {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        sima_attention_qkv(qkv, order=order, backend="triton")
    assert sum(kept.values()) <= 4 * (qkv.numel() + 2 * 4 * (16 * 16 + 2 * 16))


def test_inference_keeps_nothing():
    with torch.no_grad():
        _, state = triton_op.attention(*make_qkv(), None, None, None, 1.0, 1e-12, "sima", "kv", False)
    assert state.numel() == 0


@pytest.mark.parametrize("order", ["kv", "qk"])
def test_opcheck(order):
    q, k, v = (t.requires_grad_() for t in make_qkv(B=1, H=2, N=20, D=16))
    torch.library.opcheck(triton_op.attention, (q, k, v, None, None, None, 1.0, 1e-12, "sima", order, True))
    qkv = make(1, 20, 3, 2, 16).requires_grad_()
    mask = torch.ones(1, 20, dtype=torch.uint8, device=DEVICE)
    torch.library.opcheck(triton_op.attention, (qkv, None, None, mask, mask, None, 1.0, 1e-12, "sima", order, True))


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


@pytest.mark.skipif(not (CUDA or HAS_CPP), reason="needs a C++ compiler")
def test_inductor_compiles_masks():
    """Of torch 2.11, on any device, Inductor cannot view a mask as bytes."""
    torch._dynamo.reset()
    qkv, mask = make(2, 20, 3, 2, 16), (torch.rand(20, 2, device=DEVICE) > 0.4).T

    def run(qkv, mask):
        return sima_attention_qkv(qkv, token_mask=mask, token_ref=7.0, backend="triton")

    compiled = torch.compile(run, fullgraph=True)
    assert error(compiled(qkv, mask), run(qkv, mask).double()) < 1e-5


def test_masks_are_not_copied():
    mask = torch.rand(2, 20, device=DEVICE) > 0.4
    assert triton_op.as_bytes(mask).data_ptr() == mask.data_ptr()


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
    ours = [name for name in mode.names if name.startswith("sima_attn")]
    assert ours == ["sima_attn::attention", "sima_attn::attention_backward"]


def test_a_second_derivative_is_an_error_and_not_a_zero():
    qkv = make(1, 20, 3, 1, 16).requires_grad_()
    first = torch.autograd.grad(sima_attention_qkv(qkv, backend="triton").square().sum(), qkv, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def count_recordings(monkeypatch):
    made, new = [], triton_launchers.Recording
    monkeypatch.setattr(triton_launchers, "Recording", lambda inputs: made.append(new(inputs)) or made[-1])
    return made


def test_the_second_call_of_a_description_repeats_the_first(path, monkeypatch):
    """Its launches are recorded once: for other tensors of the same description the result must be right too."""
    made = count_recordings(monkeypatch)
    for _ in range(3):
        qkv, grad = make(2, 140, 3, 2, 16).requires_grad_(), make(2, 140, 2, 16)
        o = sima_attention_qkv(qkv, backend="triton", token_ref=70)
        o.backward(grad)
        q, k, v = qkv.detach().double().permute(2, 0, 3, 1, 4).unbind(0)
        expected = with_grads(sima_attention, q, k, v, grad.transpose(1, 2), token_ref=70)
        assert error(o.transpose(1, 2), expected[0]) < 1e-5
        assert error(qkv.grad, torch.stack(expected[1:]).permute(1, 3, 0, 2, 4)) < 1e-5
    assert len(made) == 2, "one forward and one backward"


def test_another_description_is_another_recording(monkeypatch):
    made = count_recordings(monkeypatch)
    q, k, v = make_qkv(N=40, D=16)
    mask = torch.rand(2, 40, device=DEVICE) > 0.3
    unaligned = torch.empty(q.numel() + 1, device=DEVICE)[1:].view(q.shape).copy_(q)
    calls = [
        ((q, k, v), {}),
        ((unaligned, k, v), {}),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
        ((q.half(), k.half(), v.half()), {}),
        ((q, k, v), {"token_ref": 7.0}),
        ((q, k, v), {"eps": 0.5}),
        ((q, k, v), {"order": "kv"}),
        ((q, k, v), {"key_mask": mask}),
        ((q, k, v), {"query_mask": mask}),
        ((q, k, v), {"query_mask": mask, "token_ref": 7.0}),
    ]
    for repetition in range(2):
        for count, (tensors, options) in enumerate(calls, start=1):
            out = sima_attention(*tensors, backend="triton", **options)
            truth = sima_attention(*(t.double() for t in tensors), **options)
            assert error(out, truth) < (5e-3 if out.dtype == torch.float16 else 1e-5)
            assert len(made) == (count if repetition == 0 else len(calls))


@pytest.mark.parametrize("attention", [sima_attention, relu2_attention])
def test_a_tensor_that_is_passed_twice_is_two_arguments(attention):
    """The launches of a call with q for k must not be repeated with q for k where they differ."""
    q, k, v = make_qkv(N=40, D=16)
    for tensors in ((q, q, v), (q, k, v), (q, q, v), (k, k, k)):
        grad = make(2, 2, 40, 16)
        truth = with_grads(attention, *(t.double() for t in tensors), grad, backend="eager")
        o = attention(*tensors, backend="triton")
        assert error(o, truth[0]) < 1e-5
        leaf = tensors[0].clone().requires_grad_()
        attention(leaf, leaf, v, backend="triton").backward(grad)
        for a, true in zip(with_grads(attention, *tensors, grad, backend="triton"), truth, strict=True):
            assert error(a, true) < 1e-5


def test_hooks_may_move_what_the_backward_needs():
    """Activation offloading brings tensors back with other strides: the backward looks at them anew."""
    q, k, v = (t.requires_grad_() for t in make(2, 40, 3, 2, 16).permute(2, 0, 3, 1, 4).detach().unbind(0))
    grad = make(2, 2, 40, 16)
    expected = torch.autograd.grad(sima_attention(q, k, v, backend="triton"), (q, k, v), grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().cpu(), lambda t: t.to(DEVICE)):
        o = sima_attention(q, k, v, backend="triton")
    for a, b in zip(torch.autograd.grad(o, (q, k, v), grad), expected, strict=True):
        assert error(a, b.double()) < 1e-6


def test_what_is_prepared_stays_bounded(monkeypatch):
    monkeypatch.setattr(prepared_calls, "MOST_PREPARED", 2)
    for N in (20, 21, 22):
        sima_attention(*make_qkv(N=N), backend="triton")
    assert len(prepared_calls._prepared) == 1


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
        "at most 256 channels per head": make_qkv(N=20, D=257),
        "contiguous": [t.mT.contiguous().mT for t in (q, k, v)],
        "the batch is empty": make_qkv(B=0, N=1200),
    }
    for reason, tensors in cases.items():
        with pytest.raises(ValueError, match=reason):
            sima_attention(*tensors, backend="triton")
        assert plan(*tensors).backend == "eager"
        sima_attention(*tensors)


@pytest.mark.parametrize(("H", "N"), [(1, 64 * 65535 + 1), (64, 2**20)])
def test_more_tokens_than_the_kernels_can_index_are_refused(H, N):
    tokens = make(32).expand(1, H, N, 32)
    with pytest.raises(ValueError, match="too many tokens"):
        plan(tokens, tokens, tokens, backend="triton")


def test_forward_mode_is_refused_and_not_zero():
    q, k, v = make_qkv(N=20)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ValueError, match="forward mode"):
            sima_attention(dual, k, v, backend="triton")
        assert forward_ad.unpack_dual(sima_attention(dual, k, v)).tangent.any()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_heads_may_lie_far_apart():
    """More than 2**31 numbers from the first head to the last."""
    step, shape = 2**30 + 64, (1, 3, 50, 64)
    q, k, v = (make(3 * step, dtype=torch.float16).as_strided(shape, (0, step, 64, 1)) for _ in range(3))
    near = [t.contiguous() for t in (q, k, v)]
    assert torch.equal(sima_attention(q, k, v, backend="triton"), sima_attention(*near, backend="triton"))


def test_the_plan_says_what_runs():
    q, k, v = make_qkv(N=20, D=64)
    assert plan(q, k, v).backend == ("triton" if CUDA else "eager")
    assert plan(q, k, v, backend="triton") == ("qk", "triton")
    assert plan(*make_qkv(N=1, M=300, D=64), backend="triton").order == "kv"
    assert plan(*make_qkv(N=1, M=300, D=64), backend="eager").order == "qk"


def test_a_chip_with_little_shared_memory_takes_a_smaller_tile():
    hopper = triton_tiles.Problem(4096, heads=48, width=64, itemsize=2, multiprocessors=132, shared_memory=232448)
    small = hopper._replace(shared_memory=48_000)
    for kernel in ("forward_head", "backward_head", "outer_products", "apply_forward", "apply_backward"):
        large_tile, small_tile = triton_tiles.choose_tile(kernel, hopper), triton_tiles.choose_tile(kernel, small)
        assert small_tile.rows * small_tile.stages < large_tile.rows * large_tile.stages


def test_shares_are_few_where_two_launches_are_enough():
    assert triton_tiles.count_shares(1024, 6, 132, narrow=True) == (8, True)
    assert triton_tiles.count_shares(1024, 6, 132, narrow=False) == (8, False)
    assert triton_tiles.count_shares(4096, 48, 132, narrow=True) == (4, False)
    assert triton_tiles.count_shares(4097, 6, 132, narrow=True) == (8, True)
    assert triton_tiles.count_shares(36864, 6, 132, narrow=True) == (28, False)


def test_programs_share_a_head_where_heads_are_few():
    assert triton_tiles.tiles_per_program(17, columns=6, multiprocessors=132) == 1
    assert triton_tiles.tiles_per_program(17, columns=48, multiprocessors=132) == 9
    assert triton_tiles.tiles_per_program(17, columns=132, multiprocessors=132) == 17
    assert triton_tiles.tiles_per_program(17, columns=1536, multiprocessors=132) == 17


@pytest.mark.parametrize("converted", [False, True])
def test_wide_heads_are_divided_only_where_they_do_not_fill_the_chip(converted):
    shape = {"width": 128, "itemsize": 2, "multiprocessors": 132, "shared_memory": 232448, "converted": converted}
    for heads, columns in ((64, 64), (256, 128)):
        assert triton_tiles.choose_tile("forward_head", triton_tiles.Problem(784, heads, **shape)).columns == columns


@pytest.mark.parametrize(("heads", "columns"), [(6, 16), (12, 32), (48, 64)])
def test_programs_share_the_columns_of_a_head_where_heads_are_very_few(heads, columns):
    problem = triton_tiles.Problem(196, heads, width=64, itemsize=2, multiprocessors=132, shared_memory=232448)
    assert triton_tiles.choose_tile("forward_head", problem).columns == columns


# --- relu2: the forward kernels of SimA, and a backward of its own -------------------------------------------------


def assert_relu2_is_as_accurate_as_plain_torch(q, k, v):
    grad = make(*q.shape[:3], v.shape[3], dtype=q.dtype)
    ours = with_grads(relu2_attention, q, k, v, grad, backend="triton")
    plain = with_grads(relu2_attention, q, k, v, grad, backend="eager")
    truth = with_grads(relu2_attention, q.double(), k.double(), v.double(), grad, backend="eager")
    # Plain torch rounds the result alone. The kernels round each factor of a product too, as flash attention does;
    # cut off, as in the interpreter, the features are all too small.
    factor = {torch.float32: 2.0, torch.bfloat16: 3.0 if CUDA else 10.0, torch.float16: 3.0}[q.dtype]
    # Tensor cores cut off the sums of products, here of numbers of one sign: 9e-7 for 256 features in float32.
    smallest = torch.finfo(q.dtype).eps * (4 if CUDA and q.dtype == torch.float32 else 1 / 8)
    for name, a, b, true in zip(("o", "dq", "dk", "dv"), ours, plain, truth, strict=True):
        assert a.dtype == q.dtype
        bound = factor * max(error(b, true), smallest)
        assert error(a, true) <= bound, f"{name}: error {error(a, true):.2e}, plain torch {error(b, true):.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_relu2_is_as_accurate_as_plain_torch(path, dtype):
    assert_relu2_is_as_accurate_as_plain_torch(*make_qkv(N=150 * LARGER, dtype=dtype))


@pytest.mark.parametrize(
    ("N", "M", "D", "Dv"), [(40, 40, 64, 64), (60, 33, 256, 64), (1, 61, 16, 62), (61, 3, 80, 128)]
)
def test_relu2_of_other_widths_and_tokens(N, M, D, Dv, path, monkeypatch):
    """256 features of 64 channels are those of relu2_wide."""
    check = guarded(monkeypatch)
    q, k, v = make_qkv(B=1, N=N, M=M, D=D, Dv=Dv)
    assert_relu2_is_as_accurate_as_plain_torch(q, k, v)
    check()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(("D", "Dv"), [(16, 16), (32, 32), (48, 48), (64, 64), (80, 80), (128, 128), (256, 64)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("B", [2, 128], ids=["few heads", "many heads"])
def test_relu2_on_the_gpu(D, Dv, dtype, B):
    """Every tile of the table."""
    for N in (36, 196, 500, 1370):
        assert_relu2_is_as_accurate_as_plain_torch(*make_qkv(B=B, N=N, D=D, Dv=Dv, dtype=dtype))


def test_a_query_without_positive_weights_gets_zeros_and_no_gradient(path):
    q, k, v = make_qkv(N=70)
    q[:, :, 3] = -q[:, :, 3].abs()
    q[:, :, 5] *= 1e-4  # the sum of its weights is below the smallest divisor
    grad = make(2, 2, 70, 24)
    ours = with_grads(relu2_attention, q, k, v, grad, backend="triton")
    truth = with_grads(relu2_attention, q.double(), k.double(), v.double(), grad, backend="eager")
    o, dq = ours[:2]
    assert (o[:, :, 3] == 0).all()
    assert (dq[:, :, 3] == 0).all()
    for a, true in zip(ours, truth, strict=True):
        assert error(a, true) < 1e-5
    assert error(dq[:, :, 5], truth[1][:, :, 5]) < 1e-5


def test_relu2_lets_nan_through():
    q, k, v = make_qkv(N=20)
    q[0, 0, 3, 5] = torch.nan
    o = relu2_attention(q, k, v, backend="triton")
    assert o[0, 0, 3].isnan().all()
    assert not o[0, 0, 4].isnan().any()
    k[0, 1, 2, 5] = torch.nan
    assert relu2_attention(q, k, v, backend="triton")[0, 1].isnan().all()


def test_relu2_is_recorded_once_and_has_other_recordings_than_sima(monkeypatch):
    made = count_recordings(monkeypatch)
    for _ in range(3):
        q, k, v = make_qkv(N=40, D=16)
        grad = make(2, 2, 40, 16)
        truth = with_grads(relu2_attention, q.double(), k.double(), v.double(), grad, backend="eager")
        for a, true in zip(with_grads(relu2_attention, q, k, v, grad, backend="triton"), truth, strict=True):
            assert error(a, true) < 1e-5
        sima_attention(q, k, v, backend="triton", order="kv")
    assert len(made) == 3, "forward and backward of relu2, forward of SimA"


def test_opcheck_of_relu2():
    q, k, v = (t.requires_grad_() for t in make_qkv(B=1, H=2, N=20, D=16))
    torch.library.opcheck(triton_op.attention, (q, k, v, None, None, None, 1.0, 1e-6, "relu2", "kv", True))


def test_relu2_compiles_without_a_graph_break():
    torch._dynamo.reset()
    module = Relu2Attention(48, 2).to(DEVICE)
    x = make(2, 60, 48).requires_grad_()

    def run(x):
        return module.join(relu2_attention(*module.split(x), backend="triton")).square().sum()

    expected = torch.autograd.grad(run(x), x)[0]
    compiled = torch.compile(run, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    assert error(torch.autograd.grad(compiled(x), x)[0], expected.double()) < 1e-4


def test_what_the_kernels_of_relu2_cannot_take_raises_when_named_and_falls_back_when_not():
    cases = {
        "kernels for order='kv' only": (make_qkv(N=20), {"order": "qk"}),
        "too large for one program": (make_qkv(N=20, D=256), {}),
        "float64": ([t.double() for t in make_qkv(N=20)], {}),
    }
    for reason, (tensors, options) in cases.items():
        with pytest.raises(ValueError, match=reason):
            relu2_attention(*tensors, backend="triton", **options)
        relu2_attention(*tensors, **options)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("N", [196, 600, 1025, 1500])
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
    assert "sima_attn.attention" in code[0]
