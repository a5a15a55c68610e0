"""SimA against softmax attention on the CPU: the attention core, from the packed qkv that a module holds."""

import os
import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn.bench.rows import cpu_name, today
from sima_attn.bench.timing import time_interleaved
from sima_attn.ops import AttentionShape, choose_order, sima_attention, sima_reference
from sima_attn.ops.cost import product_macs
from sima_attn.ops.reference import algorithm_1


@dataclass(frozen=True)
class Case:
    """A shape to measure, and how many times softmax's speed SimA should reach on one thread without compiling."""

    B: int
    H: int
    N: int
    D: int
    goal: float

    def __str__(self) -> str:
        return f"{self.B}, {self.H}, {self.N}, {self.D}"


CASES = (
    Case(1, 6, 196, 64, goal=2.6),
    Case(1, 8, 256, 64, goal=3.0),
    Case(8, 8, 256, 64, goal=2.5),
    Case(1, 6, 1024, 64, goal=12.0),
    Case(1, 6, 4096, 64, goal=35.0),
    Case(1, 8, 64, 256, goal=1.05),
    Case(8, 8, 64, 256, goal=1.0),
)

# "paper" is Algorithm 1 with F.normalize, as the authors' code has it.
METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": F.scaled_dot_product_attention,
    "paper": algorithm_1,
    "sima": sima_attention,
}
LARGEST_ERROR = 1e-4


@dataclass(frozen=True)
class CpuRow:
    """One method at one shape; `speedup` is the median of uncompiled softmax in the same run over this median."""

    method: str
    compiled: bool
    B: int
    H: int
    N: int
    D: int
    order: str
    dtype: str
    threads: int
    speedup: float
    goal: float
    p20_us: float
    p50_us: float
    p80_us: float
    samples: int
    gflops: float
    matmul_gflops: float
    error: float
    device: str
    torch: str
    date: str


def can_compile() -> bool:
    """torch.compile needs a C++ compiler on the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))


def bench_cpu(
    *,
    cases: Sequence[Case] = CASES,
    threads: int = 1,
    seconds: float = 4.0,
    compiled: bool = True,
) -> Generator[list[CpuRow]]:
    """The rows of one case after the other: parity first, then all methods timed against each other."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for case in cases:
            yield _bench_case(case, threads, seconds, compiled)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _bench_case(case: Case, threads: int, seconds: float, compiled: bool) -> list[CpuRow]:
    B, H, N, D = case.B, case.H, case.N, case.D
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(B, N, 3, H, D, generator=generator)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D] each

    forms = {(name, False): method for name, method in METHODS.items()}
    if compiled:
        torch.compiler.reset()  # the generated code has the number of threads built in
        forms |= {(name, True): torch.compile(METHODS[name], dynamic=False) for name in ("paper", "sima")}

    truth = sima_reference(q.double(), k.double(), v.double())
    errors = {form: _check(form, method(q, k, v), truth) for form, method in forms.items() if form[0] != "softmax"}
    square = torch.randn(1024, 1024, generator=generator)
    timings = time_interleaved(
        {str(form): (lambda method=method: method(q, k, v)) for form, method in forms.items()}
        | {"matmul": lambda: square @ square},
        seconds=seconds,
    )

    order = choose_order(N, N, D, D)
    matmul_gflops = 2 * 1024**3 / timings["matmul"].p50 / 1e9
    rows = []
    for form in forms:
        method, is_compiled = form
        timing = timings[str(form)]
        its_order = "qk" if method == "softmax" else order
        flops = 2 * AttentionShape(B, H, N, D).heads * product_macs(its_order, N, N, D, D)
        rows.append(
            CpuRow(
                method=method,
                compiled=is_compiled,
                B=B,
                H=H,
                N=N,
                D=D,
                order=its_order,
                dtype="float32",
                threads=threads,
                speedup=round(timings[str(("softmax", False))].p50 / timing.p50, 3),
                goal=case.goal,
                p20_us=round(timing.p20 * 1e6, 1),
                p50_us=round(timing.p50 * 1e6, 1),
                p80_us=round(timing.p80 * 1e6, 1),
                samples=timing.samples,
                gflops=round(flops / timing.p50 / 1e9, 1),
                matmul_gflops=round(matmul_gflops, 1),
                error=float(f"{errors.get(form, 0.0):.2e}"),
                device=cpu_name(),
                torch=torch.__version__,
                date=today(),
            )
        )
    return rows


def _check(form: tuple[str, bool], out: Tensor, truth: Tensor) -> float:
    """No time is reported for a wrong result."""
    error = ((out.double() - truth).norm() / truth.norm()).item()
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"{form[0]} (compiled: {form[1]}) is off by {error:.1e} from the float64 reference")
    return error
