"""The kernels of the convolution of tokens against plain torch: in Triton's interpreter, or on a GPU."""

import pytest
import torch

from recorder import Recorder
from sima_attn.nn import SimLocalAttention
from sima_attn.ops.token_convolution import token_convolution

triton_token_convolution = pytest.importorskip("sima_attn.ops.triton_token_convolution", reason="needs triton")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LAYOUTS = [(0, 1, 1), (0, 4, 4), (1, 3, 15), (5, 12, 9)]
pytestmark = pytest.mark.usefixtures("nothing_is_prepared", "poisoned_memory")


def make_v(layout, H=2, D=24, dtype=torch.float32, B=2):
    """v [B, H, N, D] of a packed projection, and a filter per channel."""
    prefix, rows, columns = layout
    packed = torch.randn(B, prefix + rows * columns, 3, H, D, device=DEVICE).to(dtype)
    return packed[:, :, 2].transpose(1, 2), torch.randn(H * D, 1, 3, 3, device=DEVICE)


def with_grads(v, weight, layout, grad, backend):
    """[output, gradient of v, gradient of the filters]."""
    v, weight = v.detach().requires_grad_(), weight.detach().clone().requires_grad_()
    out = token_convolution(v, weight, *layout, backend=backend)
    out.backward(grad.to(out.dtype))
    return [out.detach(), v.grad, weight.grad]


def error(out, truth):
    return ((out.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [8, 80])
def test_the_kernels_are_as_accurate_as_plain_torch(layout, dtype, D):
    v, weight = make_v(layout, D=D, dtype=dtype)
    grad = torch.randn(v.shape, device=DEVICE).to(dtype)
    ours = with_grads(v, weight, layout, grad, "triton")
    plain = with_grads(v, weight, layout, grad, "eager")
    truth = with_grads(v.double(), weight.double(), layout, grad.double(), "eager")
    for a, b, true in zip(ours, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert error(a, true) <= 2 * max(error(b, true), torch.finfo(b.dtype).eps)
    assert not ours[0][:, :, : layout[0]].any()
    assert not ours[1][:, :, : layout[0]].any()


def test_one_launch_and_no_copy():
    layout = (1, 6, 6)
    v, weight = make_v(layout)
    with Recorder() as recorder:
        out = token_convolution(v, weight, *layout, backend="triton")
    assert not recorder.shapes("clone", "contiguous", "_to_copy", "copy_", "convolution")
    assert out.transpose(1, 2).is_contiguous()


def test_the_same_input_gives_the_same_bits_again():
    layout = (1, 6, 6)
    v, weight = make_v(layout)
    first, second = (with_grads(v, weight, layout, torch.ones_like(v), "triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_opcheck():
    layout = (1, 3, 4)
    v, weight = make_v(layout)
    v, weight = v.detach().requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(triton_token_convolution.convolution, (v, weight, *layout))


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    layout = (1, 6, 6)
    v, weight = make_v(layout)

    def run(v, weight):
        return token_convolution(v, weight, *layout, backend="triton").square().sum()

    weight.requires_grad_()
    compiled = torch.compile(run, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    expected = torch.autograd.grad(run(v, weight), weight)[0]
    assert error(torch.autograd.grad(compiled(v, weight), weight)[0], expected.double()) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_module_uses_the_kernel_without_being_asked():
    module = SimLocalAttention(192, 3).cuda()
    with Recorder() as recorder:
        module(torch.randn(2, 101, 192, device=DEVICE))
    assert not recorder.shapes("convolution")
