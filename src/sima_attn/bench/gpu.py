"""SimA's fused kernels against softmax attention on the GPU: the attention core, from packed qkv."""

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sima_attn.bench.cores import DIRECTIONS, FORWARD, TRAINING, check_error, paper, softmax, unpack
from sima_attn.bench.selection import select
from sima_attn.nn import create_attention
from sima_attn.ops import plan, sima_attention, sima_attention_qkv, sima_reference
from sima_attn.report.cuda_timing import check_cuda, copy_bandwidth, time_calls, time_graphs
from sima_attn.report.rows import provenance_columns

# Tensors of the size of q that must be read or written at least once.
TENSORS = {FORWARD: 4, TRAINING: 12}
LARGEST_ERROR = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}
# torch's softmax kernels for each dtype; flash and cuDNN support half precision only.
_HALF = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
SOFTMAX_KERNELS = {
    "bfloat16": _HALF,
    "float16": _HALF,
    "float32": {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH},
}


@dataclass(frozen=True)
class GpuCase:
    """A shape, and SimA's target on an H200, 0 for none.

    The target is in microseconds (forward, and forward + backward), or a speedup over the fastest softmax kernel. If
    the case is not `full`, only the kernels of softmax and SimA are measured.
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
        """The target in microseconds; a target speedup is relative to the fastest softmax kernel, in seconds."""
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
# For the figure, together with CASES: 32768 tokens in total, more and more per image.
FIGURE_CASES = tuple(GpuCase(32768 // N, N, 6, 64, full=False) for N in (64, 256, 512, 2048, 8192, 32768))


@dataclass(frozen=True)
class GpuRow:
    """One method at one shape, as a CUDA graph. `limit_us` is the least memory traffic over the copy bandwidth.

    `called_us` is the time per call from Python; "sdpa" is softmax attention with the kernel that torch selects.
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
        """Identifies a row in a file."""
        return self.method, self.compiled, self.direction, *self.shape, self.dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, N, H, D."""
        return self.B, self.N, self.H, self.D


def softmax_with(backend: SDPBackend, qkv: Tensor) -> Tensor:
    """Softmax attention by one kernel."""
    with sdpa_kernel(backend):
        return softmax(qkv)


def core_of(attention: str, H: int, D: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The core of an attention of the registry, on packed qkv."""
    module = create_attention(attention, H * D, H, device="cuda", dtype=dtype)
    return lambda qkv: module.core(*unpack(qkv)).transpose(1, 2)


def select_cases(*, shapes: Collection[str] | None = None, dtypes: Collection[str] | None = None) -> list[GpuCase]:
    """The cases with these shapes, as "B,N,H,D", and dtypes."""
    cases = select([*CASES, *DTYPE_CASES, *FIGURE_CASES], "shape", shapes, str)
    return select(cases, "dtype", dtypes, lambda case: case.dtype)


def bench_gpu(cases: Sequence[GpuCase], *, seconds: float = 0.3) -> Generator[list[GpuRow]]:
    """The rows of each case."""
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

    error = check_kernels(qkv[:1])
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
    chosen = plan(*unpack(qkv))
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
                **timing.columns("us", 1),
                called_us=round(called[str(form)].p50 * 1e6, 1),
                limit_us=round(limit * 1e6, 2),
                share_of_limit=round(limit / timing.p50, 3),
                speedup=round(fastest_softmax / timing.p50, 2),
                goal_us=case.goal_us(direction, fastest_softmax) if is_sima else 0.0,
                error=error if is_sima else 0.0,
                copy_tb_per_s=round(bandwidth / 1e12, 2),
                triton=triton.__version__,
                **provenance_columns("cuda"),
            )
        )
    return rows


@torch.no_grad()
def check_kernels(qkv: Tensor) -> float:
    """The relative error of SimA's kernels for one image; raises if it is too large to report a time."""
    q, k, v = (t.double() for t in unpack(qkv))
    # The reference computes the N x N matrix, which does not fit in memory for long sequences.
    truth = sima_reference(q, k, v) if q.shape[2] <= 4096 else sima_attention(q, k, v, backend="eager")
    largest = LARGEST_ERROR[str(qkv.dtype).removeprefix("torch.")]
    return check_error("SimA's kernel", sima_attention_qkv(qkv).transpose(1, 2), truth, largest)
