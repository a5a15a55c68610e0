"""Calls of the kernels that were checked before: an eager call with the same description needs no checks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sima_attn.ops.plain_calls import is_plain_call
from sima_attn.ops.triton_support import INTERPRETED, describe

MOST_PREPARED = 1024
_prepared: dict[tuple, Callable[..., Tensor]] = {}


def call_key(tensors: tuple[Tensor | None, ...], options: tuple) -> tuple | None:
    """All that the checks of a call depend on, if it is a plain one on a device that has the kernels.

    None for other calls, e.g. while torch.compile traces.
    """
    if not (INTERPRETED or getattr(tensors[0], "is_cuda", False)) or not is_plain_call(*tensors):
        return None
    if torch._C._len_torch_dispatch_stack() > 0:  # a dispatch mode follows operations, not launches
        return None
    return (*map(describe, tensors), *options)


def prepared_call(key: tuple | None) -> Callable[..., Tensor] | None:
    """The call that was prepared under this key, if there is one."""
    return None if key is None else _prepared.get(key)


def keep_call(key: tuple | None, call: Any) -> Callable[..., Tensor]:
    """The call, kept for the next time if there is a key; otherwise as a torch operator."""
    if key is None:
        return call.through_operator
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    _prepared[key] = call
    return call
