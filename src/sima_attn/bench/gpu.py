"""SimA's fused kernels against softmax attention on the GPU: the attention core, from the packed qkv of a module."""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sima_attn.bench.selection import select
from sima_attn.nn import create_attention
from sima_attn.ops import plan, sima_attention, sima_attention_qkv, sima_reference
from sima_attn.ops.reference import algorithm_1
from sima_attn.report.cuda_timing import check_cuda, copy_bandwidth, device_name, time_calls, time_graphs
from sima_attn.report.rows import today

FORWARD, TRAINING = DIRECTIONS = ("forward", "forward + backward")
# Tensors of the size of q that must cross the memory bus at least once.
TENSORS = {FORWARD: 4, TRAINING: 12}
LARGEST_ERROR = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
# The softmax kernels of torch that take the dtype; flash and cuDNN take half precision only.
_HALF = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SOFTMAX_KERNELS = {
    "bfloat16": _HALF,
    "float16": _HALF,
    "float32": {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH},
}


@dataclass(frozen=True)
class GpuCase:
    """A shape to measure, and what SimA should reach on an H200, 0 where nothing is asked for.

    The goal is in microseconds (forward, and forward + backward), or a speed over the fastest softmax kernel. Where
    the case is not `full`, only softmax's kernels and SimA's are measured.
    """

    B: int
    N: int
    H: int
    D: int
    goal: float = 0.0
    goal_training: float = 0.0
    goal_speedup: float = 0.0
    dtype: str = "bfloat16"
    directions: tuple[str, ...] = (FORWARD,)
    full: bool = True

    def __str__(self) -> str:
        return f"{self.B},{self.N},{self.H},{self.D}"

    def goal_us(self, direction: str, fastest_softmax: float) -> float:
        """The goal in microseconds, from the seconds of the fastest softmax kernel where it is a speed."""
        if self.goal_speedup:
            return round(fastest_softmax * 1e6 / self.goal_speedup, 1)
        return self.goal_training if direction == TRAINING else self.goal


CASES = (
    GpuCase(256, 196, 6, 64, goal=51, goal_training=260, directions=DIRECTIONS),  # DeiT-S at 224 px
    GpuCase(256, 196, 8, 48, goal=55),  # XCiT-S12/16
    GpuCase(32, 196, 6, 64, goal=8),
    GpuCase(32, 1024, 6, 64, goal=39, goal_training=190, directions=DIRECTIONS),
    GpuCase(8, 4096, 6, 64, goal=39, goal_training=190, directions=DIRECTIONS),
    GpuCase(8, 9216, 6, 64, goal=88, goal_training=400, directions=DIRECTIONS),
    GpuCase(1, 36864, 6, 64, goal=53),
    GpuCase(1, 196, 6, 64, goal=5),
    GpuCase(256, 64, 3, 64, goal=9),
    GpuCase(256, 49, 6, 64, goal_speedup=1.1),  # windows of 7 x 7
    GpuCase(256, 128, 6, 64, goal_speedup=1.1),
    GpuCase(64, 256, 3, 64, goal_speedup=1.1),
    GpuCase(16, 577, 12, 64, goal_speedup=1.1),  # ViT-B at 384 px
    GpuCase(4, 784, 16, 96, goal_speedup=1.1),
)
DTYPE_CASES = tuple(
    GpuCase(B, N, 6, 64, goal_speedup=1.1, dtype=dtype, directions=DIRECTIONS, full=False)
    for dtype in ("float16", "float32")
    for B, N in ((256, 196), (32, 1024))  # DeiT-S at 224 and 512 px
)
# With those of CASES, the same number of tokens in ever longer images, for the figure.
FIGURE_CASES = tuple(GpuCase(32768 // N, N, 6, 64, full=False) for N in (64, 256, 512, 2048, 8192, 32768))


@dataclass(frozen=True)
class GpuRow:
    """One method at one shape, as a CUDA graph. `limit_us` is the least memory traffic over the copy bandwidth.

    `called_us` is a call from Python among many; "sdpa" is softmax attention as torch itself chooses the kernel.
    """

    method: str
    compiled: bool
    direction: str
    B: int
    N: int
    H: int
    D: int
    dtype: str
    plan: str
    p20_us: float
    p50_us: float
    p80_us: float
    samples: int
    called_us: float
    limit_us: float
    share_of_limit: float
    speedup: float  # over the fastest softmax kernel in the same dtype
    goal_us: float
    error: float
    copy_tb_per_s: float
    device: str
    torch: str
    triton: str
    date: str

    @property
    def key(self) -> tuple:
        """A file has one row per key."""
        return self.method, self.compiled, self.direction, *self.shape, self.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, N, H, D."""
        return self.B, self.N, self.H, self.D


def softmax(qkv: Tensor) -> Tensor:
    """Fused softmax attention by the kernel that torch chooses, [B, N, 3, H, D] -> [B, N, H, D]."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def softmax_with(backend: SDPBackend, qkv: Tensor) -> Tensor:
    """The same by one named kernel."""
    with sdpa_kernel(backend):
        return softmax(qkv)


def paper(qkv: Tensor) -> Tensor:
    """Algorithm 1 with F.normalize, as the authors' code has it."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return algorithm_1(q, k, v).transpose(1, 2)


def core_of(attention: str, H: int, D: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The core of an attention of the registry."""
    module = create_attention(attention, H * D, H, device="cuda", dtype=dtype)

    def run(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return module.core(q, k, v).transpose(1, 2)

    return run


def select_cases(*, shapes: Collection[str] | None = None, dtypes: Collection[str] | None = None) -> list[GpuCase]:
    """The cases of these shapes, as "B,N,H,D", and dtypes."""
    cases = select([*CASES, *DTYPE_CASES, *FIGURE_CASES], "shape", shapes, str)
    return select(cases, "dtype", dtypes, lambda case: case.dtype)


def bench_gpu(cases: Sequence[GpuCase], *, seconds: float = 0.3) -> Generator[list[GpuRow]]:
    """The rows of one case after the other."""
    check_cuda()
    bandwidth = copy_bandwidth()
    for case in cases:
        yield [row for direction in case.directions for row in _bench_case(case, direction, bandwidth, seconds)]


def _bench_case(case: GpuCase, direction: str, bandwidth: float, seconds: float) -> list[GpuRow]:
    import triton

    B, N, H, D = case.B, case.N, case.H, case.D
    generator = torch.Generator("cuda").manual_seed(0)
    dtype = getattr(torch, case.dtype)
    qkv = torch.randn(B, N, 3, H, D, generator=generator, device="cuda").to(dtype)
    grad = torch.randn(B, N, H, D, generator=generator, device="cuda").to(dtype)
    kernels = SOFTMAX_KERNELS[case.dtype]
    forms: dict[tuple[str, bool], Callable[[Tensor], Tensor]] = {
        (name, False): partial(softmax_with, backend) for name, backend in kernels.items()
    }
    forms[("sima", False)] = sima_attention_qkv
    if case.full:
        torch.compiler.reset()
        forms[("sdpa", False)] = softmax
        forms[("paper", False)] = paper
        forms[("paper", True)] = torch.compile(paper, dynamic=False)
        forms |= {(name, False): core_of(name, H, D, dtype) for name in ("xca", "elu")}

    error = check_error(qkv[:1])
    training = direction == TRAINING
    qkv.requires_grad_(training)

    def call(method: Callable[[Tensor], Tensor]) -> object:
        if training:
            return torch.autograd.grad(method(qkv), qkv, grad)
        with torch.no_grad():
            return method(qkv)

    calls = {str(form): partial(call, method) for form, method in forms.items()}
    timings = time_graphs(calls, seconds=seconds)
    called = time_calls(calls, seconds=seconds * len(calls) / 2)
    fastest_softmax = min(timings[str((name, False))].p50 for name in kernels)
    limit = TENSORS[direction] * grad.numel() * grad.element_size() / bandwidth
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    chosen = plan(q, k, v)
    rows = []
    for form in forms:
        method, compiled = form
        timing, is_sima = timings[str(form)], method == "sima"
        rows.append(
            GpuRow(
                method=method,
                compiled=compiled,
                direction=direction,
                B=B,
                N=N,
                H=H,
                D=D,
                dtype=case.dtype,
                plan=f"{chosen.backend} {chosen.order}" if is_sima else "",
                p20_us=round(timing.p20 * 1e6, 1),
                p50_us=round(timing.p50 * 1e6, 1),
                p80_us=round(timing.p80 * 1e6, 1),
                samples=timing.samples,
                called_us=round(called[str(form)].p50 * 1e6, 1),
                limit_us=round(limit * 1e6, 2),
                share_of_limit=round(limit / timing.p50, 3),
                speedup=round(fastest_softmax / timing.p50, 2),
                goal_us=case.goal_us(direction, fastest_softmax) if is_sima else 0.0,
                error=error if is_sima else 0.0,
                copy_tb_per_s=round(bandwidth / 1e12, 2),
                device=device_name(),
                torch=torch.__version__,
                triton=triton.__version__,
                date=today(),
            )
        )
    return rows


@torch.no_grad()
def check_error(qkv: Tensor) -> float:
    """The error of one image against float64. No time is reported for a wrong result."""
    q, k, v = (t.double() for t in qkv.permute(2, 0, 3, 1, 4).unbind(0))
    # The reference writes the N x N matrix down, which is too much for long images.
    truth = sima_reference(q, k, v) if q.shape[2] <= 4096 else sima_attention(q, k, v, backend="eager")
    out = sima_attention_qkv(qkv).transpose(1, 2).double()
    error = ((out - truth).norm() / truth.norm()).item()
    if not error < LARGEST_ERROR[str(qkv.dtype).removeprefix("torch.")]:
        raise RuntimeError(f"the kernels are off by {error:.1e} from the float64 reference at {tuple(qkv.shape)}")
    return float(f"{error:.2e}")
