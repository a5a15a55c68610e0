"""The kernel of the rotation of tokens against plain torch: in Triton's interpreter, or on a GPU."""

import pytest
import torch

from recorder import Recorder
from sima_attn.nn import create_attention
from sima_attn.nn.grid import TokenLayout
from sima_attn.nn.rotation import GridPart, rotation_table
from sima_attn.ops.token_rotation import token_rotation

triton_token_rotation = pytest.importorskip("sima_attn.ops.triton_token_rotation", reason="needs triton")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LAYOUTS = [TokenLayout(0, 1, 1), TokenLayout(0, 4, 4), TokenLayout(5, 12, 9)]
pytestmark = pytest.mark.usefixtures("nothing_is_prepared", "poisoned_memory")


def make(layout, H=2, D=24, dtype=torch.float32, B=3):
    """x [B, H, N, D] of a packed projection, and the table of its tokens."""
    N = layout.prefix + layout.rows * layout.columns
    packed = torch.randn(B, N, 3, H, D, device=DEVICE).to(dtype)
    return packed[:, :, 1].transpose(1, 2), table(layout, D, torch.float32)


def table(layout, D, dtype):
    return rotation_table(GridPart.of_image(layout), None, D, 50.0, torch.device(DEVICE), dtype)


def with_grads(x, cos_sin, grad, backend):
    """[output, gradient of x]."""
    x = x.detach().requires_grad_()
    out = token_rotation(x, *cos_sin, backend=backend)
    out.backward(grad.to(out.dtype))
    return [out.detach(), x.grad]


def error(out, truth):
    return ((out.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [4, 80])
def test_the_kernel_is_as_accurate_as_plain_torch(layout, dtype, D):
    x, cos_sin = make(layout, D=D, dtype=dtype)
    grad = torch.randn(x.shape, device=DEVICE).to(dtype)
    ours = with_grads(x, cos_sin, grad, "triton")
    plain = with_grads(x, cos_sin, grad, "eager")
    truth = with_grads(x.double(), table(layout, D, torch.float64), grad.double(), "eager")
    for a, b, true in zip(ours, plain, truth, strict=True):
        assert a.dtype == b.dtype
        assert error(a, true) <= 2 * max(error(b, true), torch.finfo(b.dtype).eps)


def test_a_rotation_and_the_rotation_back_are_nothing():
    x, (cos, sin) = make(LAYOUTS[2])
    again = token_rotation(token_rotation(x, cos, sin, backend="triton"), cos, -sin, backend="triton")
    assert error(again, x.double()) < 1e-6


def test_one_launch_and_no_copy_and_the_same_bits_again():
    x, cos_sin = make(LAYOUTS[1])
    with Recorder() as recorder:
        out = token_rotation(x, *cos_sin, backend="triton")
    assert not recorder.shapes("clone", "contiguous", "_to_copy", "copy_", "mul", "stack")
    assert out.transpose(1, 2).is_contiguous()
    assert torch.equal(out, token_rotation(x, *cos_sin, backend="triton"))


def test_opcheck():
    x, cos_sin = make(LAYOUTS[1])
    torch.library.opcheck(triton_token_rotation.rotation, (x.detach().requires_grad_(), *cos_sin, False))


def test_compiles_without_a_graph_break():
    torch._dynamo.reset()
    x, cos_sin = make(LAYOUTS[1])
    for backend in ("triton", "auto"):

        def run(x, backend=backend):
            return token_rotation(x, *cos_sin, backend=backend).pow(3).sum()

        given = x.detach().requires_grad_()
        compiled = torch.compile(run, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
        expected = torch.autograd.grad(run(given, "eager"), given)[0]
        assert error(torch.autograd.grad(compiled(given), given)[0], expected.double()) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_module_uses_the_kernel_without_being_asked():
    module = create_attention("relu2_rope", 192, 3).cuda()
    with Recorder() as recorder:
        module(torch.randn(2, 101, 192, device=DEVICE))
    assert not recorder.shapes("stack")
