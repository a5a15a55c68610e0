"""CPU time per call of the attention operator: SimA against torch's softmax attention, both from packed qkv.

At small sizes the GPU waits for Python, and this is the time that matters.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn.bench.cores import DIRECTIONS, TRAINING, unpack
from sima_attn.bench.gpu import check_kernels
from sima_attn.ops import sima_attention_qkv
from sima_attn.report.cuda_timing import ENQUEUED_CALLS, check_cuda, time_enqueuing
from sima_attn.report.rows import cpu_name, provenance_columns

SHAPES = ((1, 196, 6, 64), (32, 196, 6, 64))  # B, N, H, D: DeiT-S at 224 px
# "module": from the output of one projection to the input of the next, including the views in between, as in timm's
# Attention. "operator": the operator alone.
MODULE, OPERATOR = "module", "operator"
TARGET = 1.0  # for "module"


@dataclass(frozen=True)
class CallOverheadRow:
    """One method in one form; `speedup` is the median time of softmax in the same form over that of the method."""

    method: str
    form: str
    direction: str
    B: int
    N: int
    H: int
    D: int
    dtype: str
    speedup: float
    target: float
    p20_us: float
    p50_us: float
    p80_us: float
    samples: int
    calls_per_sample: int
    cpu: str
    device: str
    torch: str
    triton: str
    date: str


def bench_call_overhead(
    *, shapes: Sequence[tuple[int, int, int, int]] = SHAPES, seconds: float = 2.0
) -> Generator[list[CallOverheadRow]]:
    """The rows of each shape and direction."""
    check_cuda()
    import triton

    for B, N, H, D in shapes:
        check_kernels(torch.randn(1, N, 3, H, D, device="cuda", dtype=torch.bfloat16))
        for direction in DIRECTIONS:
            calls = create_calls(B, N, H, D, direction, "cuda")
            with nullcontext() if direction == TRAINING else torch.inference_mode():
                timings = time_enqueuing({str(key): call for key, call in calls.items()}, seconds=seconds)
            yield [
                CallOverheadRow(
                    method=method,
                    form=form,
                    direction=direction,
                    B=B,
                    N=N,
                    H=H,
                    D=D,
                    dtype="bfloat16",
                    speedup=round(timings[str(("softmax", form))].p50 / timing.p50, 3),
                    target=TARGET if (method, form) == ("sima", MODULE) else 0.0,
                    **timing.columns("us", 2),
                    calls_per_sample=ENQUEUED_CALLS,
                    cpu=cpu_name(),
                    triton=triton.__version__,
                    **provenance_columns("cuda"),
                )
                for method, form in calls
                for timing in [timings[str((method, form))]]
            ]


def create_calls(
    B: int, N: int, H: int, D: int, direction: str, device: str
) -> dict[tuple[str, str], Callable[[], Tensor | tuple[Tensor, ...]]]:
    """(method, form) -> a call that returns the output or, in training, the gradients of its inputs.

    Inputs and gradients have the memory layout they have in a module: views of a packed projection, tokens first.
    """
    generator = torch.Generator(device).manual_seed(0)
    projected = torch.randn(B, N, 3 * H * D, generator=generator, device=device).to(torch.bfloat16)
    grad = torch.randn(B, N, H * D, generator=generator, device=device).to(torch.bfloat16)
    packed = projected.detach().view(B, N, 3, H, D)
    q, k, v = (t.detach() for t in unpack(packed))  # [B, H, N, D] each
    grad_heads = grad.view(B, N, H, D)

    def softmax_module() -> Tensor:
        q, k, v = unpack(projected.reshape(B, N, 3, H, D))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, H * D)

    def sima_module() -> Tensor:
        return sima_attention_qkv(projected.reshape(B, N, 3, H, D)).reshape(B, N, H * D)

    # (method, form): the call, its inputs, the gradient of its output
    calls: dict[tuple[str, str], tuple[Callable[[], Tensor], tuple[Tensor, ...], Tensor]] = {
        ("softmax", MODULE): (softmax_module, (projected,), grad),
        ("sima", MODULE): (sima_module, (projected,), grad),
        ("softmax", OPERATOR): (
            lambda: F.scaled_dot_product_attention(q, k, v),
            (q, k, v),
            grad_heads.transpose(1, 2),
        ),
        ("sima", OPERATOR): (lambda: sima_attention_qkv(packed), (packed,), grad_heads),
    }
    if direction != TRAINING:
        return {key: call for key, (call, _, _) in calls.items()}
    for _, inputs, _ in calls.values():
        for tensor in inputs:
            tensor.requires_grad_()
    return {key: partial(_gradients, *parts) for key, parts in calls.items()}


def _gradients(call: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(), inputs, grad)
