"""Rotation of pairs of channels by an angle per token and pair.

Shapes: B batch, H heads, N tokens, D channels per head.
"""

import torch
from torch import Tensor

from sima_attn.ops.api import choose_backend
from sima_attn.ops.prepared_calls import call_key, keep_call, prepared_call
from sima_attn.ops.triton_support import unsupported_reason


def token_rotation(x: Tensor, cos: Tensor, sin: Tensor, *, backend: str = "auto") -> Tensor:
    """(x_2i, x_2i+1) -> (x_2i cos - x_2i+1 sin, x_2i sin + x_2i+1 cos): [B, H, N, D], in the dtype of x.

    Args:
        x: [B, H, N, D], D even.
        cos, sin: Of the angles [N, D / 2], contiguous and in float32, for float64 inputs in float64. They get no
            gradient.
        backend: As for `sima_attention`.
    """
    key = call_key((x, cos, sin), ("token_rotation", backend))
    if (call := prepared_call(key)) is None:
        if choose_backend(x, backend, lambda: unsupported_reason(x, x, x, "kv")) == "eager":
            return _rotate(x, cos, sin)
        from sima_attn.ops.triton_token_rotation import RotationCall

        call = keep_call(key, RotationCall())
    return call(x, cos, sin).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation in plain torch."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # [B, H, N, D / 2] each
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)
