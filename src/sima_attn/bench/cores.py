"""Attention cores on packed qkv [B, N, 3, H, D], as an attention module has it, and the check of their results."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from sima_attn.ops.reference import algorithm_1

FORWARD, TRAINING = DIRECTIONS = ("forward", "forward + backward")


def unpack(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, views of packed qkv."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B, H, N, D] each
    return q, k, v


def softmax(qkv: Tensor) -> Tensor:
    """Softmax attention by the kernel that torch selects -> [B, N, H, D]."""
    return F.scaled_dot_product_attention(*unpack(qkv)).transpose(1, 2)


def paper(qkv: Tensor) -> Tensor:
    """Algorithm 1 with F.normalize, as in the authors' code -> [B, N, H, D]."""
    return algorithm_1(*unpack(qkv)).transpose(1, 2)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes with that many threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_error(name: str, out: Tensor, truth: Tensor, largest: float) -> float:
    """The relative error of `out` against a float64 result; raises if it is too large to report a time."""
    error = ((out.double() - truth).norm() / truth.norm()).item()
    if not error < largest:
        raise RuntimeError(f"{name} is off by {error:.1e} from the float64 reference at {tuple(out.shape)}")
    return float(f"{error:.2e}")
