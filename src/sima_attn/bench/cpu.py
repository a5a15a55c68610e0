"""SimA against softmax attention on the CPU: the attention core, from packed qkv."""

import os
import shutil
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sima_attn.bench.cores import DIRECTIONS, TRAINING, check_error, paper, softmax, torch_threads, unpack
from sima_attn.ops import AttentionShape, choose_order, sima_attention_qkv
from sima_attn.ops.cost import product_macs
from sima_attn.ops.reference import algorithm_1
from sima_attn.report.rows import provenance_columns
from sima_attn.report.timing import time_interleaved


@dataclass(frozen=True)
class Case:
    """A shape, and the target: the speed relative to softmax on one thread, not compiled."""

    B: int
    H: int
    N: int
    D: int
    goal: float
    goal_training: float


CASES = (
    Case(1, 6, 196, 64, goal=2.6, goal_training=1.5),
    Case(1, 8, 256, 64, goal=3.0, goal_training=1.5),
    Case(8, 8, 256, 64, goal=2.5, goal_training=1.5),
    Case(1, 6, 1024, 64, goal=12.0, goal_training=1.5),
    Case(1, 6, 4096, 64, goal=35.0, goal_training=1.5),
    Case(1, 8, 64, 256, goal=1.05, goal_training=0.95),
    Case(8, 8, 64, 256, goal=1.0, goal_training=0.95),
)


METHODS: dict[str, Callable[[Tensor], Tensor]] = {"softmax": softmax, "paper": paper, "sima": sima_attention_qkv}
LARGEST_ERROR = 1e-4


@dataclass(frozen=True)
class CpuRow:
    """One method at one shape; `speedup` is the median time of uncompiled softmax over that of the method."""

    method: str
    compiled: bool
    direction: str
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
    """Whether there is a C++ compiler, which torch.compile needs on the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++"))


def bench_cpu(
    *, cases: Sequence[Case] = CASES, threads: int = 1, seconds: float = 4.0, compiled: bool = True
) -> Generator[list[CpuRow]]:
    """The rows of each case: results are checked first, then all methods are timed in turns."""
    with torch_threads(threads):
        for case in cases:
            yield [row for direction in DIRECTIONS for row in _bench_case(case, direction, threads, seconds, compiled)]


def _bench_case(case: Case, direction: str, threads: int, seconds: float, compiled: bool) -> list[CpuRow]:
    B, H, N, D = case.B, case.H, case.N, case.D
    generator = torch.Generator().manual_seed(0)
    training = direction == TRAINING
    qkv = torch.randn(B, N, 3, H, D, generator=generator).requires_grad_(training)
    grad = torch.randn(B, N, H, D, generator=generator)

    def run(method: Callable[[Tensor], Tensor]) -> Tensor:
        """The output, or the gradient of qkv in training."""
        if training:
            return torch.autograd.grad(method(qkv), qkv, grad)[0]
        with torch.no_grad():
            return method(qkv)

    forms = {(name, False): method for name, method in METHODS.items()}
    if compiled and not training:
        torch.compiler.reset()  # the generated code depends on the number of threads
        forms |= {(name, True): torch.compile(METHODS[name], dynamic=False) for name in ("paper", "sima")}

    truth = _truth(qkv, grad if training else None)
    errors = {
        (name, is_compiled): check_error(f"{name} (compiled: {is_compiled})", run(method), truth, LARGEST_ERROR)
        for (name, is_compiled), method in forms.items()
        if name != "softmax"
    }
    square = torch.randn(1024, 1024, generator=generator)
    timings = time_interleaved(
        {str(form): partial(run, method) for form, method in forms.items()} | {"matmul": lambda: square @ square},
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
        if training:
            flops *= 3  # each product has two gradients
        rows.append(
            CpuRow(
                method=method,
                compiled=is_compiled,
                direction=direction,
                B=B,
                H=H,
                N=N,
                D=D,
                order=its_order,
                dtype="float32",
                threads=threads,
                speedup=round(timings[str(("softmax", False))].p50 / timing.p50, 3),
                goal=case.goal_training if training else case.goal,
                **timing.columns("us", 1),
                gflops=round(flops / timing.p50 / 1e9, 1),
                matmul_gflops=round(matmul_gflops, 1),
                error=errors.get(form, 0.0),
                **provenance_columns("cpu"),
            )
        )
    return rows


def _truth(qkv: Tensor, grad: Tensor | None) -> Tensor:
    """The output of the paper's algorithm in float64, or the gradient of qkv if that of the output is given."""
    exact = qkv.detach().double().requires_grad_(grad is not None)
    out = algorithm_1(*unpack(exact), order="kv").transpose(1, 2)
    return out if grad is None else torch.autograd.grad(out, exact, grad.double())[0]
