"""The operator on a CUDA device; skipped without one."""

import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code

from closeness import assert_as_accurate, assert_close, relative_error
from sima_attn.nn import ATTENTIONS, create_attention
from sima_attn.ops import sima_attention, sima_attention_qkv, sima_reference
from sima_attn.ops.reference import algorithm_1

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def packed_qkv(dtype, B=4, N=300, H=3, D=48):
    packed = torch.randn(B, N, 3, H, D, device="cuda").to(dtype)
    return packed.permute(2, 0, 3, 1, 4).unbind(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("order", ["kv", "qk"])
@pytest.mark.parametrize("with_autograd", [True, False])
def test_error_is_at_most_twice_that_of_plain_torch(dtype, order, with_autograd):
    q, k, v = packed_qkv(dtype)
    truth = sima_reference(q.double(), k.double(), v.double())
    plain = algorithm_1(q, k, v, order=order)
    if with_autograd:
        q = q.requires_grad_()
    assert_as_accurate(sima_attention(q, k, v, order=order), plain, truth)


def test_masks_and_token_ref_agree_with_the_cpu():
    q, k, v = packed_qkv(torch.float64)
    mask = torch.rand(4, 300, device="cuda") > 0.3
    out = sima_attention(q, k, v, key_mask=mask, query_mask=mask, token_ref=100)
    on_cpu = sima_attention(q.cpu(), k.cpu(), v.cpu(), key_mask=mask.cpu(), query_mask=mask.cpu(), token_ref=100)
    assert_close(out.cpu(), on_cpu)


def test_compiled_and_under_autocast():
    torch._dynamo.reset()
    q, k, v = packed_qkv(torch.bfloat16)
    with torch.autocast("cuda", torch.bfloat16):
        out = torch.compile(sima_attention, fullgraph=True)(q, k, v)
        assert_close(out, sima_attention(q, k, v), 1e-2)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_agrees_with_the_cpu(name):
    module = create_attention(name, 24, 3, num_tokens=64).double()
    x = torch.randn(2, 64, 24, dtype=torch.float64)
    expected = module(x)
    assert_close(module.cuda()(x.cuda()).cpu(), expected, 1e-9)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one():
    q, k, v = (t.to("cuda:1").requires_grad_() for t in packed_qkv(torch.bfloat16))
    with torch.cuda.device(0):
        out = sima_attention(q, k, v)
        out.sum().backward()
    assert out.device == q.grad.device == q.device
    assert_close(out.float().cpu(), sima_attention(q.float().cpu(), k.float().cpu(), v.float().cpu()), bound=1e-2)


def test_inductor_launches_the_kernels_itself():
    """An opaque operator would be called from Python: slower, and nothing around it could be fused."""
    torch._dynamo.reset()
    qkv = torch.randn(2, 196, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    out, code = run_and_get_code(torch.compile(sima_attention_qkv, fullgraph=True), qkv)
    assert "forward_head" in "".join(code)
    assert "torch.ops.sima_attn" not in "".join(code)
    assert_close(out, sima_attention_qkv(qkv), 1e-6)


@pytest.mark.parametrize("N", [100, 1025], ids=["one launch", "two launches"])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_every_mode_of_torch_compile_gives_what_eager_gives(mode, N):
    torch._dynamo.reset()
    module = create_attention("sima", 128, 2).cuda()
    x = torch.randn(2, N, 128, device="cuda")

    def gradients(f):
        with torch.autocast("cuda", torch.bfloat16):
            loss = f(x).float().square().sum()
        return [loss.detach().clone(), *(g.clone() for g in torch.autograd.grad(loss, list(module.parameters())))]

    compiled = torch.compile(module, fullgraph=True, mode=mode)
    expected = gradients(module)
    for _ in range(3):  # the third call replays what "reduce-overhead" has recorded
        torch.compiler.cudagraph_mark_step_begin()
        for ours, theirs in zip(gradients(compiled), expected, strict=True):
            assert_close(ours, theirs, 3e-2)


def test_image_sizes_of_one_class_share_a_compiled_program():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(sima_attention_qkv, fullgraph=True, dynamic=True, backend=counter)
    for N in (1100, 1300, 1444, 1601, 1800, 1999):
        qkv = torch.randn(1, N, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
        assert_close(compiled(qkv), sima_attention_qkv(qkv), 1e-6)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("N", [49, 100, 196, 600])
@pytest.mark.parametrize("B", [1, 64])
@pytest.mark.parametrize(("D", "Dv"), [(64, 16), (64, 32), (32, 64), (16, 64), (48, 32), (128, 32), (32, 128)])
def test_values_of_another_width_than_the_keys(dtype, N, B, D, Dv):
    """With ptxas of CUDA 12.8 some of these shapes gave wrong results (`WHOLE` in triton_launch.py)."""
    q, k = (torch.randn(B, 3, N, D, device="cuda").to(dtype) for _ in range(2))
    v = torch.randn(B, 3, N, Dv, device="cuda").to(dtype)
    truth = sima_attention(q.double(), k.double(), v.double(), backend="eager")
    plain = sima_attention(q, k, v, order="kv", backend="eager")
    assert_as_accurate(sima_attention(q, k, v, order="kv", backend="triton"), plain, truth)


@pytest.fixture
def group_of_one():
    """A group of this process alone, through NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("N", "D"), [(20, 64), (196, 48), (1025, 64), (9216, 64), (500, 128)])
def test_the_kernels_around_an_all_reduce(group_of_one, dtype, N, D):
    """What each process of a group runs. `sima_attention` takes another way where the group has one process."""
    from sima_attn.ops.triton_sequence_parallel import sima_split_triton

    q, k, v = packed_qkv(dtype, N=N, D=D)
    grad = torch.randn(4, N, 3, D, device="cuda").to(dtype)
    mask = torch.rand(4, N, device="cuda") > 0.3

    def gradients(attend, *tensors, **options):
        leaves = [t.detach().requires_grad_() for t in tensors]
        o = attend(*leaves, key_mask=mask, query_mask=mask, token_ref=100.0, eps=1e-12, **options)
        return o, *torch.autograd.grad(o, leaves, grad.to(o.dtype))

    def whole(*tensors, **options):
        return sima_attention(*tensors, **options).transpose(1, 2)

    ours = gradients(sima_split_triton, q, k, v, group=group_of_one)
    alone = gradients(whole, q, k, v, order="kv", backend="triton")
    truth = gradients(whole, q.double(), k.double(), v.double())
    for a, b, true in zip(ours, alone, truth, strict=True):
        assert relative_error(a, true) <= 2 * relative_error(b, true) + torch.finfo(dtype).eps / 8


def test_torch_compile_launches_the_kernels_around_an_all_reduce(group_of_one):
    from sima_attn.ops.triton_sequence_parallel import sima_split_triton

    torch._dynamo.reset()
    options = {"group": group_of_one, "key_mask": None, "query_mask": None, "token_ref": 100.0, "eps": 1e-12}
    qkv = torch.randn(2, 1025, 3, 3, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    expected = sima_split_triton(qkv, **options)
    out, code = run_and_get_code(torch.compile(sima_split_triton, fullgraph=True), qkv, **options)
    for name in ("outer_products", "all_reduce", "finish_forward", "apply_forward"):
        assert name in "".join(code)
    assert "torch.ops.sima_attn" not in "".join(code)
    assert_close(out, expected, 1e-6)
    grad = torch.randn_like(out)
    assert_close(*(torch.autograd.grad(o, qkv, grad)[0] for o in (out, expected)), 1e-2)


AOT_INDUCTOR = """
import sys, timm, torch, sima_attn
if sys.argv[1] == "linear":
    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
else:
    model, x = timm.create_model(sys.argv[1], img_size=64, depth=2), torch.randn(2, 3, 64, 64)
model, x = model.cuda().eval(), x.cuda()
with torch.no_grad():
    package = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=sys.argv[2])
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), model(x), rtol=1e-3, atol=1e-3)
"""


def test_an_aot_inductor_package_runs(tmp_path):
    def run(name):
        command = [sys.executable, "-c", AOT_INDUCTOR, name, str(tmp_path / f"{name}.pt2")]
        return subprocess.run(command, capture_output=True, text=True)

    if run("linear").returncode < 0:
        pytest.skip("torch cannot load an AOTInductor package here, not even one of a linear layer")
    done = run("sima_deit_tiny_patch16_224")
    assert done.returncode == 0, done.stderr
