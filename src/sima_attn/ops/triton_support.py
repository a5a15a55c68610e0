"""Which tensors the Triton kernels support, checked without importing triton."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor

from sima_attn.ops.plain_calls import in_forward_mode
from sima_attn.ops.triton_tiles import LARGEST_HEAD, fits_one_tile, padded

LARGEST_OFFSET = 2**31  # the kernels index the numbers of one head with 32 bits
MOST_TOKENS = 64 * 65535  # programs along one axis of a grid, each with at least 64 tokens
LARGEST_RELU2_STATE = 256 * 64  # numbers in a padded matrix of a head
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALLEST_CAPABILITY = (8, 0)
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch: kernels run on the CPU, slowly


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, order: str = "auto") -> str | None:
    """Why the kernels do not support these tensors in this order; None if they do."""
    (B, H, N, D), M, Dv = q.shape, k.shape[2], v.shape[3]
    reason = _unsupported_device(q.device)
    if reason is not None:
        return reason
    # torch.compile calls this while it traces, where nothing differentiates in forward mode.
    if not torch.compiler.is_compiling() and in_forward_mode():
        return "they have no derivatives in forward mode"
    if q.dtype not in DTYPES:
        return f"they compute in float16, bfloat16 and float32, got {q.dtype}"
    if D > LARGEST_HEAD or Dv > LARGEST_HEAD:
        return f"they support at most {LARGEST_HEAD} channels per head, got D={D} and Dv={Dv}"
    if order == "qk" and not fits_one_tile(N, M, D, Dv, q.element_size()):
        return f"order 'qk' needs all tokens of a head in one tile, got N={N}, M={M}, D={D}, Dv={Dv}; use order='kv'"
    if B == 0:
        return "the batch is empty"
    if max(N, M) > MOST_TOKENS or max(N, M) * H * max(D, Dv) >= LARGEST_OFFSET:
        return (
            f"there are too many tokens, N={N} and M={M}: they support {MOST_TOKENS}, and fewer than 2**31 numbers per "
            "image in each tensor"
        )
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(3) != 1 and t.shape[3] != 1:
            return f"the channels of {name} must be contiguous; use {name}.contiguous()"
        if t.shape[2] * max(t.stride(2), 1) >= LARGEST_OFFSET:
            return f"{name} is too large: a head must span fewer than 2**31 numbers"
    return None


def unsupported_by_relu2(q: Tensor, k: Tensor, v: Tensor, order: str) -> str | None:
    """As `unsupported_reason`, for the kernels of relu2."""
    if order == "qk":
        return "relu2 has kernels for order='kv' only"
    widths = padded(q.shape[3]) * padded(v.shape[3])
    if widths > LARGEST_RELU2_STATE:
        return f"two matrices of {q.shape[3]} x {v.shape[3]} numbers are too large for one program"
    return unsupported_reason(q, k, v, "kv")


def _unsupported_device(device: torch.device) -> str | None:
    if not HAS_TRITON:
        return "the package triton is not installed"
    if device.type == "cpu":
        return None if INTERPRETED else "they run on CUDA devices, got a tensor on the CPU"
    if device.type != "cuda":
        return f"they run on CUDA devices, got a tensor on {device}"
    # torch.compile cannot trace get_device_capability.
    if not torch.compiler.is_compiling() and _is_too_old(device):
        return "they need a GPU of compute capability 8.0 (Ampere) or newer"
    return None


@functools.cache
def _is_too_old(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) < SMALLEST_CAPABILITY


def describe(t: Tensor | None) -> tuple | None:
    """The properties of a tensor that the checks of a call, its kernels and their compilation depend on."""
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15)
