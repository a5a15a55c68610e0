"""A depth-wise 3 x 3 convolution of values over the grid of their patch tokens.

Shapes: B batch, H heads, N tokens, D channels per head, C = H * D.
"""

import torch.nn.functional as F
from torch import Tensor

from sima_attn.ops.api import choose_backend
from sima_attn.ops.eager import without_autocast
from sima_attn.ops.prepared_calls import call_key, keep_call, prepared_call
from sima_attn.ops.triton_support import unsupported_reason


def token_convolution(
    v: Tensor, weight: Tensor, prefix: int, rows: int, columns: int, *, backend: str = "auto"
) -> Tensor:
    """The convolution of v [B, H, N, D] with zeros beyond the border; zero for the prefix tokens.

    Args:
        v: `prefix` tokens, then rows * columns patch tokens, row by row.
        weight: A filter per channel [C, 1, 3, 3].
        prefix, rows, columns: The layout of the tokens.
        backend: As for `sima_attention`.
    """
    key = call_key((v, weight), ("token_convolution", prefix, rows, columns, backend))
    if (call := prepared_call(key)) is None:
        if choose_backend(v, backend, lambda: unsupported_reason(v, v, v, "kv")) == "eager":
            return _convolve(v, weight, prefix, rows, columns)
        from sima_attn.ops.triton_token_convolution import ConvolutionCall

        call = keep_call(key, ConvolutionCall(prefix, rows, columns))
    return call(v, weight).transpose(1, 2)


def _convolve(v: Tensor, weight: Tensor, prefix: int, rows: int, columns: int) -> Tensor:
    """The convolution in plain torch. Views of a packed projection are read without a copy."""
    x = patch_map(v, prefix, rows, columns)
    with without_autocast(v):  # the dtype of the output is that of v, as for A v
        x = F.conv2d(x, weight.to(v.dtype), padding=1, groups=x.shape[1])
    return values_of_map(x, prefix, v.shape[1])


def patch_map(v: Tensor, prefix: int, rows: int, columns: int) -> Tensor:
    """v [B, H, N, D] -> the map of its patch tokens [B, C, rows, columns]."""
    x = v.transpose(1, 2).flatten(2)[:, prefix:]  # [B, rows * columns, C]
    return x.transpose(1, 2).unflatten(2, (rows, columns))


def values_of_map(x: Tensor, prefix: int, heads: int) -> Tensor:
    """A map [B, C, rows, columns] -> [B, H, N, D], zero for the prefix tokens."""
    x = F.pad(x.flatten(2).transpose(1, 2), (0, 0, prefix, 0))  # [B, N, C]
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
